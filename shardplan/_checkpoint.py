"""An open checkpoint: its names and shapes, and the elements that are asked for."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.io import Pool, box_view, empty_tensor, flip_axes, to_numpy, torch_dtype
from shardplan.io.execute import Lazy, Reader
from shardplan.io.formats import Source, open_source
from shardplan.io.stores import Store
from shardplan.planning import (
    Grid,
    Metadata,
    SavePlan,
    Sheet,
    TensorMetadata,
    WriteItemType,
    counted,
    cut_text,
    human_bytes,
    listing,
    load_plan,
    shape_text,
)
from shardplan.planning.columns import Catalog, Head, ReadItems, WriteItems, column, readonly
from shardplan.planning.geometry import pad

from ._read import plain_errors

_SHOWN: Final = 12  # entries of a checkpoint that are printed
_HEAD: Final = ("name", "shape", "dtype", "bytes", "sharding")


def open_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> Checkpoint:
    """Open a checkpoint, reading only its metadata.

    Args:
        path: The checkpoint.
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

    Raises:
        FormatError: There is no checkpoint, or its manifest is damaged.
    """
    return Checkpoint(Reader(open_source(path, format=format, pool=pool), pool), verify=verify)


class Checkpoint(Mapping[str, Any]):
    """A saved state dict, flat, read as it is asked for.

    Tensors come as `SavedTensor`, other values as they were saved.
    """

    def __init__(self, reader: Reader, *, verify: bool = True) -> None:
        self._reader, self._verify = reader, verify

    @property
    def reader(self) -> Reader:
        """What reads it."""
        return self._reader

    @property
    def metadata(self) -> Metadata:
        """What it holds."""
        return self._reader.metadata

    def __getitem__(self, name: str) -> Any:
        try:
            entry = self.metadata.entry(name)
        except LookupError as error:
            raise KeyError(str(error)) from None
        if isinstance(entry, TensorMetadata):
            return SavedTensor(self._reader, name, entry, self._verify)
        with plain_errors(self._reader):
            return self._reader.value(name, verify=self._verify)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    def __contains__(self, name: object) -> bool:
        return name in self.metadata.state_dict_metadata

    def __repr__(self) -> str:
        return _describe(self._reader.source).text()

    def _repr_html_(self) -> str:
        return _describe(self._reader.source).html()


@attrs.frozen
class Axis:
    """The elements that are wanted along one axis.

    ``step`` may be negative; ``dropped`` leaves the axis out of the result, as for an integer.
    """

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def low(self) -> int:
        """The lowest position."""
        return self.start + min(self.step, 0) * (self.count - 1)

    @property
    def reach(self) -> int:
        """The distance from the lowest position past the highest."""
        return abs(self.step) * (self.count - 1) + 1


class SavedTensor(Lazy):
    """A tensor in a checkpoint; indexing it reads the elements asked for.

    Elements between them are read too, and dropped, where that is cheaper.
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
        """The dtype that it is stored as."""
        return torch_dtype(self._entry.properties.dtype)

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
            raise TypeError(f"`{self.name}` has {self.size:,} elements: only one can be a number")
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
            raise ValueError("elements of a checkpoint can only be read into a copy")
        try:
            return to_numpy(self.read(), dtype)
        except TypeError as error:
            raise TypeError(f"`{self.name}` {error}") from None

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = _spread(index if isinstance(index, tuple) else (index,), self.shape)
        axes = normal_index(tuple(part for part in parts if part is not None), self.shape)
        with plain_errors(self._reader):
            out = self._read(axes)
        flipped = [i for i, axis in enumerate(axes) if axis.step < 0]
        if flipped:
            out = flip_axes(out, flipped)
        out = out[tuple(0 if axis.dropped else slice(None) for axis in axes)]
        if None not in parts:
            return out
        left = (part for part in parts if part is None or isinstance(part, slice))
        return out[tuple(None if part is None else slice(None) for part in left)]

    def _read(self, axes: tuple[Axis, ...]) -> torch.Tensor:
        """Return the elements in ascending order; all is planned before memory is asked for."""
        counts, dtype = [axis.count for axis in axes], self._entry.properties.dtype
        if 0 in counts:
            return empty_tensor(counts, dtype)
        head = Head(self.name, self.name, WriteItemType.SHARD, self._entry.properties, self.shape)
        items = WriteItems(
            Catalog.of((head,)),
            column([0]),
            column([[axis.low for axis in axes]], 1, self.ndim),
            column([[axis.reach for axis in axes]], 1, self.ndim),
        )
        step = [abs(axis.step) if axis.count > 1 else 1 for axis in axes]
        alone = Metadata({self.name: self._entry})  # planning looks at every name
        reads = _every(load_plan(alone, SavePlan(items)).items, step)
        out, sizes = empty_tensor(counts, dtype), reads.lengths[:, : self.ndim]
        at, sizes = (reads.dest_offsets[:, : self.ndim] // column(step), -(-sizes // column(step)))
        self._reader.fill(
            reads,
            lambda row: box_view(out, at[row].tolist(), sizes[row].tolist()),
            step=step,
            verify=self._verify,
        )
        return out

    def __repr__(self) -> str:
        dtype = self._entry.properties.dtype
        return f"SavedTensor({self.name!r}, shape={list(self.shape)}, dtype={dtype})"

    def _repr_html_(self) -> str:
        return _describe(self._reader.source, self.name).html()


def _every(reads: ReadItems, step: Sequence[int]) -> ReadItems:
    """Start each read at the first of its elements that is wanted; drop those without any."""
    if max(step, default=1) == 1:
        return reads
    along = pad(column([step], 1, len(step)), reads.lengths.shape[1], 1)
    skipped = -reads.dest_offsets % along
    lengths = reads.lengths - skipped
    begun = attrs.evolve(
        reads,
        dest_offsets=readonly(reads.dest_offsets + skipped),
        storage_offsets=readonly(reads.storage_offsets + skipped),
        lengths=readonly(np.maximum(lengths, 0)),
    )
    return begun.take(np.all(lengths > 0, axis=1))


def _spread(parts: Sequence[Any], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Replace an ellipsis, or the end of a short index, by full slices; new axes stay."""
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    said = sum(part is not None and part is not Ellipsis for part in parts)
    if len(dots) > 1 or said > len(shape):
        raise IndexError(f"{tuple(parts)!r} has too many parts for a tensor of shape {list(shape)}")
    at = dots[0] if dots else len(parts)
    rest = [slice(None)] * (len(shape) - said)
    return (*parts[:at], *rest, *parts[at + len(dots) :])


def normal_index(index: Any, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Return what an index of integers, slices and an ellipsis selects along each axis.

    >>> normal_index((-1, slice(None, None, -2)), (4, 5))
    (Axis(start=3, step=1, count=1, dropped=True), Axis(start=4, step=-2, count=3, dropped=False))
    """
    parts = _spread(index if isinstance(index, tuple) else (index,), shape)
    return tuple(_axis(part, n, i) for i, (part, n) in enumerate(zip(parts, shape, strict=True)))


def _axis(part: Any, length: int, number: int) -> Axis:
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        return Axis(start, step, len(range(start, stop, step)))
    try:
        if isinstance(part, (bool, np.bool_)) or getattr(part, "ndim", 0) > 0:
            raise TypeError  # a mask or an array, even if of one element
        position = operator.index(part)
    except TypeError:
        kind = f"a {type(part).__name__}" if hasattr(part, "__len__") else repr(part)
        raise TypeError(
            f"{kind} cannot index a saved tensor; use whole numbers, slices, None and ..., or "
            "read() it first and index that by lists, arrays and masks"
        ) from None
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for axis {number} of length {length}")
    return Axis(position % length, 1, 1, dropped=True)


def _describe(source: Source, name: str | None = None) -> Sheet:
    """Lay out a checkpoint, or one of its tensors."""
    entries = source.metadata.state_dict_metadata
    if name is not None:
        return listing(f"Tensor {name} of {source.store.url}", _HEAD, [_row(source, name)], 1)
    rows = [_row(source, name) for name in entries.names[:_SHOWN]]
    return listing(_title(source), _HEAD, rows, len(entries))


def _title(source: Source) -> str:
    entries = source.metadata.state_dict_metadata
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


def _row(source: Source, name: str) -> tuple[str, ...]:
    entry = source.metadata.entry(name)
    if not isinstance(entry, TensorMetadata):
        return name, "value", "", "", ""
    chunks = entry.chunks
    grid = [len(cuts) - 1 for cuts in chunks.cuts] if isinstance(chunks, Grid) else None
    cut = cut_text(len(chunks), grid)
    files = source.file_numbers(name)
    if files is not None:
        cut += f", {counted(len(set(files)), 'file')}"
    size = human_bytes(math.prod(entry.size) * entry.properties.itemsize)
    return name, shape_text(entry.size), entry.properties.dtype, size, cut
