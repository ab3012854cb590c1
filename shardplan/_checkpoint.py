"""An open checkpoint: its names and shapes, and the elements that are asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.io import (
    Pool,
    ValueRefusedError,
    Window,
    box_view,
    copy_elements,
    empty_tensor,
    flip_axes,
    own_dtype,
    refuse_dtypes,
    to_numpy,
    torch,
)
from shardplan.io.execute import Lazy, Reader, collect, map_tensors
from shardplan.io.formats import CombinedSource, Source, open_source, read_as
from shardplan.io.stores import Store
from shardplan.planning import (
    BytesMetadata,
    Expression,
    Grid,
    Issue,
    Metadata,
    Passes,
    PlanError,
    SavePlan,
    Sheet,
    TensorMetadata,
    WriteItemType,
    added,
    counted,
    cut_text,
    expression_of,
    flatten,
    human_bytes,
    listing,
    load_plan,
    scaled,
    shape_text,
    with_adapter,
)
from shardplan.planning.columns import Catalog, Head, WriteItems, column
from shardplan.planning.geometry import Axis, Cut, selection_of
from shardplan.planning.passes import reading_of
from shardplan.planning.storage import Box, Seen, read_boxes, seen_through

from ._read import plain_errors

_SHOWN: Final = 12  # entries of a checkpoint that are printed
_HEAD: Final = ("name", "shape", "dtype", "bytes", "sharding")


def open_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> Checkpoint:
    """Open a checkpoint, reading only its metadata.

    Args:
        path: The checkpoint.
        planner: A pass, or a list of them, that maps a state dict to this checkpoint, as for
            `load`: names and shapes are then those of the state dict. Each pass must have an
            inverse.
        format: What wrote it; detected if left out.
        verify: Whether to check chunks that are read whole against their checksums.
        pool: The threads and the memory budget to use.

    >>> import tempfile
    >>> from shardplan import save
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = save({"w": torch.arange(12).reshape(4, 3), "step": 7}, folder.name)
    >>> checkpoint = open_checkpoint(folder.name)
    >>> sorted(checkpoint), checkpoint["step"], checkpoint["w"].shape
    (['step', 'w'], 7, (4, 3))
    >>> checkpoint["w"][-1, ::2]
    tensor([ 9, 11])
    >>> folder.cleanup()

    Through a planner that fuses tensors, a fused checkpoint has the parts:

    >>> from shardplan.planning import concat
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save({"w13": torch.arange(6)}, path)
    ...     open_checkpoint(path, planner=concat({"w1": 2, "w3": 4}, into="w13"))["w3"][:2]
    tensor([2, 3])

    Raises:
        FormatError: There is no checkpoint, or its manifest is damaged.
        ValueError: The planner has no inverse.
        PlanError: The checkpoint is not one that the planner makes.
    """
    reading = reading_of(planner)
    reader = Reader(read_as(open_source(path, format=format, pool=pool), reading), pool)
    planner = reading.planner
    seen = None if planner is None else seen_through(reader.metadata, planner)
    return Checkpoint(reader, verify=verify, seen=seen)


class Checkpoint(Mapping[str, Any]):
    """A saved state dict, flat, read as it is asked for.

    Tensors come as `SavedTensor`, other values as they were saved.
    """

    def __init__(self, reader: Reader, *, verify: bool = True, seen: Seen | None = None) -> None:
        self._reader, self._verify, self._seen = reader, verify, seen

    @property
    def reader(self) -> Reader:
        """What reads it."""
        return self._reader

    @property
    def is_seen(self) -> bool:
        """Whether it was opened with a planner that changes names or shapes."""
        return self._seen is not None

    @property
    def metadata(self) -> Metadata:
        """What it holds, as the state dict sees it if there is a planner."""
        return self._reader.metadata if self._seen is None else self._seen.metadata

    def __getitem__(self, name: str) -> Any:
        try:
            entry = self.metadata.entry(name)
        except LookupError as error:
            raise KeyError(str(error)) from None
        if isinstance(entry, TensorMetadata):
            if self._seen is not None:
                return SeenTensor(self._reader, name, entry, self._verify, self._seen.items)
            return SavedTensor(self._reader, name, entry, self._verify)
        with plain_errors(self._reader):
            return self._reader.value(self._saved_name(name), verify=self._verify)

    def tensors(self, *, verify: bool = False) -> dict[str, torch.Tensor]:
        """Return all tensors, by name: views of local files, copy-on-write, where these hold them.

        See ``mmap`` of `restore`. Other tensors are read.

        Args:
            verify: Whether to compare what is mapped with its checksums, for which it is read.
        """
        names = [
            name
            for name, one in self.metadata.state_dict_metadata.items()
            if isinstance(one, TensorMetadata)
        ]
        with plain_errors(self._reader):
            plain = names if self._seen is None else []
            mapped = map_tensors(self._reader, plain, verify=verify)
        return {name: mapped[name] if name in mapped else self[name].read() for name in names}

    def _saved_name(self, name: str) -> str:
        """Return the name in the checkpoint of a non-tensor value."""
        if self._seen is None:
            return name
        catalog = self._seen.items.catalog
        return catalog.sources[catalog.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    def __contains__(self, name: object) -> bool:
        return name in self.metadata.state_dict_metadata

    def __add__(self, other: Checkpoint) -> Checkpoint:
        return sum_of(self, other)

    def __sub__(self, other: Checkpoint) -> Checkpoint:
        return sum_of(self, -1.0 * other)

    def __mul__(self, weight: float) -> Checkpoint:
        parts, expression = _as_sum(self)
        return self._summed(parts, scaled(expression, float(weight)))

    __rmul__ = __mul__

    def __truediv__(self, weight: float) -> Checkpoint:
        return self * (1 / weight)

    def to(self, dtype: str | torch.dtype) -> Checkpoint:
        """Return it with all tensors of floats in another dtype; see `shardplan.merging`."""
        parts, expression = _as_sum(self)
        return self._summed(parts, expression.cast(dtype))

    def _summed(self, parts: Sequence[Source], expression: Expression) -> Checkpoint:
        reader = Reader(CombinedSource(parts, expression), self._reader.pool)
        return Checkpoint(reader, verify=self._verify)

    def __repr__(self) -> str:
        return self._describe().text()

    def _repr_html_(self) -> str:
        return self._describe().html()

    def _describe(self) -> Sheet:
        """Lay out the checkpoint."""
        source, entries = self._reader.source, self.metadata.state_dict_metadata
        files = source if self._seen is None else None
        rows = [_row(name, entries[name], files) for name in entries.names[:_SHOWN]]
        return listing(_title(source, self.metadata), _HEAD, rows, len(entries))


def _as_sum(checkpoint: object) -> tuple[tuple[Source, ...], Expression]:
    """Return the checkpoints that a checkpoint adds up, at least itself, and how."""
    if not isinstance(checkpoint, Checkpoint):
        text = f"expected an open checkpoint, not a {type(checkpoint).__name__}"
        raise TypeError(f"{text}; pass what open_checkpoint returns")
    source = source_of(checkpoint)
    if source.expression is not None:
        return tuple(source.parts), source.expression
    return (source,), expression_of(source.metadata)


def source_of(checkpoint: Checkpoint) -> Source:
    """Return what a checkpoint is read from; refuse one that is seen through a planner."""
    source = checkpoint.reader.source
    if checkpoint.is_seen or source.quantized:
        raise ValueError(
            f"{source.store.url} was opened with a planner, so it cannot be added or converted; "
            "open it without one, or convert it with that planner first"
        )
    return source


def sum_of(a: Checkpoint, b: Checkpoint, *, partial: bool = False) -> Checkpoint:
    """Return the sum of two checkpoints; see `shardplan.planning.expressions.added`."""
    (mine, left), (theirs, right) = _as_sum(a), _as_sum(b)
    return a._summed((*mine, *theirs), added(left, right, partial=partial))


def in_sum(base: Checkpoint, adapter: Checkpoint, scale: float) -> Checkpoint:
    """Return a checkpoint with an adapter merged in; see `with_adapter`."""
    parts, expression = _as_sum(base)
    source = source_of(adapter)
    merged = with_adapter(expression, source.metadata, scale)
    return base._summed((*parts, source), merged)


class SavedTensor(Lazy):
    """A tensor in a checkpoint; indexing it reads the elements asked for.

    Elements between them are read too, and dropped, where that is cheaper. They come as a torch
    tensor, or as a numpy array where torch is not installed.
    """

    def __init__(self, reader: Reader, name: str, entry: TensorMetadata, verify: bool) -> None:
        self._reader, self._entry, self._verify = reader, entry, verify
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return self._entry.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored as; numpy's where torch is not installed."""
        dtype: torch.dtype = own_dtype(self._entry.properties.dtype)
        return dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements, as in numpy."""
        return math.prod(self.shape)

    def numel(self) -> int:
        """Return the number of elements, as in torch."""
        return self.size

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * self._entry.properties.itemsize

    def read(self) -> torch.Tensor:
        """Return all of it."""
        return self[...]

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it."""
        return self[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    def item(self) -> Any:
        """Return its only element as a Python number."""
        if self.size != 1:
            raise TypeError(f"`{self.name}` has {self.size:,} elements, not one; index it first")
        return self.read().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[row] for row in range(len(self)))

    def __contains__(self, value: object) -> bool:
        return value in self.read()

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("elements are read from files, so copy=False is not possible")
        try:
            return to_numpy(self.read(), dtype)
        except TypeError as error:
            raise TypeError(f"`{self.name}` {error}") from None

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return empty_tensor((0,), "uint8").__dlpack_device__()

    def __getitem__(self, index: Any) -> torch.Tensor:
        chosen = selection_of(index, self.shape)
        with plain_errors(self._reader):
            out = self._read(chosen.axes)
        if chosen.flipped:
            out = flip_axes(out, chosen.flipped)
        return out.reshape(chosen.shape)

    def _read(self, axes: tuple[Axis, ...]) -> torch.Tensor:
        """Return the elements in ascending order; all is planned before memory is asked for."""
        counts = [axis.count for axis in axes]
        if 0 in counts:
            return self._empty(counts)
        head = Head(self.name, self.name, WriteItemType.SHARD, self._entry.properties, self.shape)
        items = WriteItems(
            Catalog.of((head,)),
            column([0]),
            column([[axis.low for axis in axes]], 1, self.ndim),
            column([[axis.reach for axis in axes]], 1, self.ndim),
        )
        step = [axis.stride for axis in axes]
        alone = Metadata({self.name: self._entry})  # planning looks at every name
        reads = load_plan(alone, SavePlan(items)).items.every(step)
        out, sizes = self._empty(counts), reads.lengths[:, : self.ndim]
        at, sizes = reads.dest_offsets[:, : self.ndim] // column(step), -(-sizes // column(step))
        self._reader.fill(
            reads,
            lambda row: Window.of(box_view(out, at[row].tolist(), sizes[row].tolist())),
            step=step,
            verify=self._verify,
        )
        return out

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        refuse_dtypes({self.name: self._entry.properties.dtype})
        return empty_tensor(shape, self._entry.properties.dtype)

    def __repr__(self) -> str:
        dtype = self._entry.properties.dtype
        return f"SavedTensor({self.name!r}, shape={list(self.shape)}, dtype={dtype})"

    def _repr_html_(self) -> str:
        row, url = _row(self.name, self._entry, self._files), self._reader.store.url
        return listing(f"Tensor {self.name} of {url}", _HEAD, [row], 1).html()

    @property
    def _files(self) -> Source | None:
        return self._reader.source


class SeenTensor(SavedTensor):
    """A tensor of the state dict, as a planner makes it of the tensors in a checkpoint."""

    def __init__(
        self, reader: Reader, name: str, entry: TensorMetadata, verify: bool, items: WriteItems
    ) -> None:
        super().__init__(reader, name, entry, verify)
        named = np.array([known == name for known in items.catalog.names], bool)
        self._items = items.take(named[items.row])

    @property
    def _files(self) -> Source | None:
        return None

    def _read(self, axes: tuple[Axis, ...]) -> torch.Tensor:
        """Return the elements in ascending order; those between them are read, too."""
        counts, dtype = [axis.count for axis in axes], self._entry.properties.dtype
        if 0 in counts:
            return empty_tensor(counts, dtype)
        offsets, sizes = tuple(a.low for a in axes), tuple(a.reach for a in axes)
        out = empty_tensor(sizes, dtype)
        sources = self._sources(offsets, sizes)
        targets = [box_view(out, one.cut.chunk_offsets, one.cut.chunk_sizes) for one in sources]
        found = [
            target if one.is_plain(dtype) else empty_tensor(one.box.sizes, one.dtype)
            for one, target in zip(sources, targets, strict=True)
        ]
        reads, box = read_boxes(self._reader.metadata, [one.box for one in sources])
        # All at once, so that chunks are read whole, and checked.
        self._reader.fill_boxes(found, reads, box, verify=self._verify)
        for one, tensor, target in zip(sources, found, targets, strict=True):
            if tensor is not target:
                window = Window(tensor, one.cut.chunk_sizes, one.cut.axes)
                start = (0,) * target.ndim
                for theirs, mine in window.pairs(start, one.cut.chunk_sizes, target):
                    copy_elements(mine, theirs)
        return out[tuple(slice(None, None, axis.stride) for axis in axes)].contiguous()

    def _sources(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[_Source]:
        """Find what a box of it is made of."""
        checkpoint = Checkpoint(self._reader, verify=self._verify)
        names = {self._items.catalog.sources[row] for row in self._items.row.tolist()}
        pieces, _, refused = collect(
            {name: checkpoint[name] for name in names}, SavePlan(self._items)
        )
        if refused:
            raise ValueRefusedError(refused)
        found = []
        for piece in pieces.values():
            for origin in piece.origins:
                moved = origin.moved(piece.offsets)
                cuts = moved.within(offsets, sizes)
                if isinstance(moved.source, SavedTensor):
                    name, dtype = moved.source.name, self._reader.dtype_of(moved.source.name)
                    boxes = [Box(name, one.box_offsets, one.box_sizes) for one in cuts]
                    found += [_Source(b, dtype, c) for b, c in zip(boxes, cuts, strict=True)]
                elif cuts:
                    text = f"the planner leaves out a part of `{self.name}`: it is not saved"
                    raise PlanError([Issue("left_out", self.name, text)])
        return found


@attrs.frozen
class _Source:
    """A box of a saved tensor, its stored dtype, and the box of another tensor that it becomes."""

    box: Box
    dtype: str
    cut: Cut

    def is_plain(self, dtype: str) -> bool:
        """Whether its elements are used unchanged."""
        return self.cut.axes is None and self.dtype == dtype


def refuse_saved(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a state dict as it is; refuse tensors that lie in a checkpoint.

    A save would read them block by block, and chunks of the checkpoint that are cut differently
    could not be checked: damage would be given new checksums that fit.
    """
    names = [name for name, value in flatten(state)[0].items() if isinstance(value, SavedTensor)]
    if names:
        why = "is a tensor of a checkpoint: read() it first, or use convert to copy checkpoints"
        raise ValueRefusedError(dict.fromkeys(names, why))
    return state


def _title(source: Source, metadata: Metadata) -> str:
    entries = metadata.state_dict_metadata
    volumes = [layout.tiling.volume() for layout in entries.layouts]
    pairs = zip(entries.layout.tolist(), entries.prop.tolist(), strict=True)
    total = sum(volumes[la] * entries.props[pr].itemsize for la, pr in pairs if la >= 0)
    tensors = int((entries.layout >= 0).sum())
    about = [f"format {source.format}"]
    if source.created:
        about.append(f"{datetime.fromtimestamp(source.created, UTC):%Y-%m-%d %H:%M} UTC")
    about.append(counted(tensors, "tensor"))
    if tensors < len(entries):
        about.append(counted(len(entries) - tensors, "value"))
    about.append(f"{human_bytes(total)} in {counted(len(source.files), 'file')}")
    return f"Checkpoint {source.store.url}: {', '.join(about)}"


def _row(
    name: str, entry: TensorMetadata | BytesMetadata, source: Source | None
) -> tuple[str, ...]:
    """Describe a tensor or another value; ``source`` knows the files, if they are to be shown."""
    if not isinstance(entry, TensorMetadata):
        return name, "value", "", "", ""
    chunks = entry.chunks
    grid = [len(cuts) - 1 for cuts in chunks.cuts] if isinstance(chunks, Grid) else None
    cut = cut_text(len(chunks), grid)
    files = None if source is None else source.file_numbers(name)
    if files is not None:
        cut += f", {counted(len(set(files)), 'file')}"
    size = human_bytes(math.prod(entry.size) * entry.properties.itemsize)
    return name, shape_text(entry.size), entry.properties.dtype, size, cut
