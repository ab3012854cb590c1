"""The records that plans are made of: what is written, what is read, and what did not fit.

Field names are those of torch.distributed.checkpoint. Every record is deeply immutable, compares
and hashes by value, and checks its invariants on construction.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import attrs

from .dtypes import ITEMSIZE, dtype_name
from .errors import Issue
from .geometry.axes import Axes, canonical, parts
from .geometry.tilings import Chunk, as_ints
from .text import as_names


class WriteItemType(enum.Enum):
    """How a value lies in the state dict: a whole tensor, a shard of one, or any other value."""

    TENSOR = 1
    SHARD = 2
    BYTE_IO = 3


class LoadItemType(enum.Enum):
    """What a read fills: elements of a tensor, or any other value."""

    TENSOR = 1
    BYTE_IO = 2


def _torch_name(value: object) -> str:
    return str(value).removeprefix("torch.")


@attrs.frozen(order=True)
class TensorProperties:
    """How a tensor is stored.

    >>> TensorProperties("torch.bfloat16").dtype
    'bfloat16'
    """

    # The dtype *in the checkpoint*, by name. If it differs from the tensor's own dtype, the tensor
    # is cast.
    dtype: str = attrs.field(default="float32", converter=dtype_name)
    # Kept for exchange with torch; unused here.
    layout: str = attrs.field(default="strided", converter=_torch_name)
    requires_grad: bool = attrs.field(default=False, converter=bool)
    memory_format: str = attrs.field(default="contiguous_format", converter=_torch_name)
    pin_memory: bool = attrs.field(default=False, converter=bool)

    @property
    def itemsize(self) -> int:
        """Bytes per element in the checkpoint."""
        return ITEMSIZE[self.dtype]


@attrs.frozen
class MetadataIndex:
    """The name of a chunk, or of a non-tensor value.

    >>> MetadataIndex("w", [0, 4], 3) == MetadataIndex("w", (0, 4))
    True
    """

    fqn: str  # the flattened key
    # The start of the chunk, in the global frame; None for a non-tensor value.
    offset: tuple[int, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(as_ints)
    )
    # A hint: the likely position in the list of chunks, probed first. Not part of `==` and `hash`.
    index: int | None = attrs.field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.fqn, str):
            raise TypeError(f"a name must be a string, not {self.fqn!r}; `flatten` makes them so")


@attrs.frozen
class TensorWriteData:
    """The box of a tensor that is written, and how it is stored."""

    chunk: Chunk  # the box, in the global frame
    properties: TensorProperties  # how it is stored
    size: tuple[int, ...] = attrs.field(converter=as_ints)  # the global shape, in elements

    def __attrs_post_init__(self) -> None:
        if len(self.size) != len(self.chunk.sizes):
            raise ValueError(f"{self.chunk} does not fit a tensor of shape {self.size}")

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk in the checkpoint."""
        return self.chunk.numel * self.properties.itemsize


@attrs.frozen(init=False)
class WriteItem:
    """One chunk, or one non-tensor value, that a rank holds.

    It has two frames: ``index`` and ``tensor_data`` say where the chunk lies in the checkpoint's
    tensor, ``source`` and ``source_box`` where it lies in the state dict's. They differ after a
    pass that changes shapes.

    Attributes:
        index: Its name in the checkpoint. A chunk's offset may be omitted: it is the chunk's own.
        type: Whether it is a tensor, a shard or a non-tensor value.
        tensor_data: Its box, dtype and shape in the checkpoint; None for a non-tensor value.
        source: Its name in the state dict: the key, and the offset of the shard that holds it.
            Defaults to ``index``. The offset of a fill is None.
        source_box: The box of the state dict's tensor that becomes the chunk, in the global frame
            of that tensor; None if it is the chunk itself. It lies inside the shard.
        axes: How the box's axes become those of the chunk; None if sizes and order are the same.
        fill: The value of the chunk if it is padding: it is made of no box of the state dict.

    >>> WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO).nbytes
    0
    """

    index: MetadataIndex
    type: WriteItemType
    tensor_data: TensorWriteData | None
    source: MetadataIndex
    source_box: Chunk | None
    axes: Axes | None
    fill: float | None

    def __init__(
        self,
        index: MetadataIndex,
        type: WriteItemType,
        tensor_data: TensorWriteData | None = None,
        source: MetadataIndex | None = None,
        source_box: Chunk | None = None,
        axes: Axes | None = None,
        fill: float | None = None,
    ) -> None:
        if not isinstance(type, WriteItemType):
            raise TypeError(f"`{index.fqn}`: type must be a WriteItemType, not {type!r}")
        if (tensor_data is None) != (type is WriteItemType.BYTE_IO):
            what = "needs" if tensor_data is None else "cannot have"
            raise ValueError(f"`{index.fqn}`: a {type.name} item {what} tensor_data")
        chunk = None if tensor_data is None else tensor_data.chunk
        offset = None if chunk is None else chunk.offsets
        if index.offset not in (None, offset):
            raise ValueError(f"`{index.fqn}`: index has offset {index.offset}, its chunk {offset}")
        source_box, axes = _source_box(index.fqn, chunk, source_box, axes)
        if fill is not None:
            if chunk is None or source_box is not None:
                raise ValueError(f"`{index.fqn}`: a fill has a chunk, and no source_box")
            fill, source = fill_value(fill), MetadataIndex((source or index).fqn)
        else:
            bare = attrs.evolve(index, offset=None) if source is None else source
            source = _with_start(bare, source_box or chunk)
        if index.offset is None:
            index = attrs.evolve(index, offset=offset)
        self.__attrs_init__(index, type, tensor_data, source, source_box, axes, fill)

    @property
    def source_chunk(self) -> Chunk | None:
        """The box of the state dict's tensor; None for a fill and for a non-tensor value."""
        if self.tensor_data is None or self.fill is not None:
            return None
        return self.tensor_data.chunk if self.source_box is None else self.source_box

    @property
    def is_reshaped(self) -> bool:
        """Whether the chunk is padding, or lies otherwise in the state dict."""
        return self.fill is not None or self.source_box is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the *chunk* in the checkpoint (0 for non-tensor values)."""
        return 0 if self.tensor_data is None else self.tensor_data.nbytes


def fill_value(value: float) -> float:
    """Return the value of padding; whole numbers are ints, so that equal values are alike.

    >>> fill_value(-0.0), fill_value(0.5)
    (0, 0.5)
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} does not fit 64 bits, so it cannot fill a tensor")
    if math.isnan(value):
        raise ValueError("nan is not equal to itself, so it cannot fill a tensor; use 0")
    return int(value) if abs(value) < 1 << 63 and value == int(value) else value


def fitting_axes(source: tuple[int, ...], chunk: tuple[int, ...], axes: Axes | None) -> Axes | None:
    """Return the axes by which a box becomes a chunk, in canonical form.

    >>> fitting_axes((2, 3), (2, 3), Axes((2, 3), (0, 1)))

    Raises:
        ValueError: They do not fit the sizes of both.
    """
    if axes is None and source != chunk:
        raise ValueError(f"a box of sizes {source} becomes one of {chunk}: axes are missing")
    if axes is None:
        return None
    parts(axes, source, chunk)
    return canonical(axes.split, axes.order, source, chunk)


def _source_box(
    name: str, chunk: Chunk | None, box: Chunk | None, axes: Axes | None
) -> tuple[Chunk | None, Axes | None]:
    """Return the box that a chunk is made of, None if it is the chunk itself, and its axes."""
    if box is None and axes is None:
        return None, None
    if chunk is None or box is None:
        raise ValueError(f"`{name}`: axes belong to a source_box, and that to a chunk")
    axes = _named_axes(name, box.sizes, chunk.sizes, axes)
    return (None if axes is None and box == chunk else box), axes


def _named_axes(
    name: str, source: tuple[int, ...], chunk: tuple[int, ...], axes: Axes | None
) -> Axes | None:
    try:
        return fitting_axes(source, chunk, axes)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from None


def _with_start(source: MetadataIndex, box: Chunk | None) -> MetadataIndex:
    """Return the name of a shard with its start, which defaults to that of the item's box."""
    start = None if box is None else box.offsets
    if source.offset is None:
        return attrs.evolve(source, offset=start)
    if start is None or len(source.offset) != len(start):
        raise ValueError(f"`{source.fqn}`: source has offset {source.offset}, its box {start}")
    return source


@attrs.frozen(init=False)
class ReadItem:
    """One box to copy from a saved chunk into a shard of the state dict.

    Attributes:
        type: Whether elements or a non-tensor value are read.
        dest_index: The shard in the state dict.
        dest_offsets: The start of the box, relative to that shard.
        storage_index: The saved chunk in the checkpoint.
        storage_offsets: The start of the box, relative to the saved chunk.
        lengths: The size of the box in the checkpoint, per axis, in elements.
        dest_lengths: Its size in the state dict; None if it is the same.
        axes: How the axes of the state dict's box become those of the checkpoint's, as in
            `WriteItem`; None if sizes and order are the same.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: tuple[int, ...]
    storage_index: MetadataIndex
    storage_offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dest_lengths: tuple[int, ...] | None
    axes: Axes | None

    def __init__(
        self,
        type: LoadItemType,
        dest_index: MetadataIndex,
        dest_offsets: Iterable[int],
        storage_index: MetadataIndex,
        storage_offsets: Iterable[int],
        lengths: Iterable[int],
        dest_lengths: Iterable[int] | None = None,
        axes: Axes | None = None,
    ) -> None:
        if not isinstance(type, LoadItemType):
            raise TypeError(f"`{dest_index.fqn}`: type must be a LoadItemType, not {type!r}")
        into, out_of, box = as_ints(dest_offsets), as_ints(storage_offsets), as_ints(lengths)
        filled = box if dest_lengths is None else as_ints(dest_lengths)
        if min((*into, *out_of, *box, *filled), default=0) < 0:
            raise ValueError(f"`{dest_index.fqn}`: an offset or a length is negative")
        if len(into) != len(filled) or len(out_of) != len(box):
            lengths_text = f"{box}" if filled == box else f"{filled} and {box}"
            raise ValueError(
                f"`{dest_index.fqn}`: offsets {into} and {out_of} do not fit lengths {lengths_text}"
            )
        if type is LoadItemType.BYTE_IO and (axes is not None or filled != box):
            raise ValueError(f"`{dest_index.fqn}`: a BYTE_IO read has no axes")
        axes = _named_axes(dest_index.fqn, filled, box, axes)
        dest = _end_of_read(dest_index, type, filled)
        storage = _end_of_read(storage_index, type, box)
        own = None if axes is None and filled == box else filled
        self.__attrs_init__(type, dest, into, storage, out_of, box, own, axes)

    @property
    def dest_box(self) -> Chunk:
        """The box that is filled, relative to the shard."""
        return Chunk(
            self.dest_offsets, self.lengths if self.dest_lengths is None else self.dest_lengths
        )

    @property
    def numel(self) -> int:
        """The number of elements copied (0 for a non-tensor value)."""
        return 0 if self.type is LoadItemType.BYTE_IO else math.prod(self.lengths)


def _end_of_read(
    index: MetadataIndex, type: LoadItemType, lengths: tuple[int, ...]
) -> MetadataIndex:
    """Return the name of one end of a read; the offset of a tensor defaults to its origin."""
    if type is LoadItemType.BYTE_IO:
        if index.offset is not None:
            raise ValueError(f"`{index.fqn}`: a BYTE_IO read has no offset {index.offset}")
        return index
    if index.offset is None:
        return attrs.evolve(index, offset=(0,) * len(lengths))
    if len(index.offset) != len(lengths):
        raise ValueError(f"`{index.fqn}`: offset {index.offset} does not fit lengths {lengths}")
    return index


@attrs.frozen
class Transfer:
    """A read that one rank makes for another."""

    read: ReadItem  # what the target needs, as if it read for itself
    source: int  # the rank that reads it from storage and sends it
    target: int  # the rank that receives it


def _issues(values: Iterable[Issue]) -> tuple[Issue, ...]:
    return tuple(values)


@attrs.frozen
class KeyReport:
    """How a state dict and a checkpoint agree."""

    # Wanted names that the checkpoint does not have.
    missing: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    # Names in the checkpoint that are not wanted.
    unexpected: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    # Names that both have but that do not fit, with the reason.
    mismatched: tuple[Issue, ...] = attrs.field(default=(), converter=_issues)
    # Names in the state dict that a pass left out; they are not filled.
    dropped: tuple[str, ...] = attrs.field(default=(), converter=as_names)
