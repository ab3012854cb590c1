"""Look into a checkpoint without loading it: names, shapes, and just the elements asked for."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.io.arrays import empty, torch_dtype, window
from shardplan.io.pool import Pool
from shardplan.io.read import Reader
from shardplan.io.sources import open_source
from shardplan.io.stores import Store
from shardplan.planning import Metadata, SavePlan, WriteItemType, load_plan
from shardplan.planning.catalog import Catalog, column
from shardplan.planning.columns import WriteItems
from shardplan.planning.metadata import TensorMetadata
from shardplan.planning.overlap import expand
from shardplan.planning.packing import readonly

__all__ = ["Checkpoint", "SavedTensor", "open_checkpoint"]


def open_checkpoint(
    path: str | os.PathLike[str] | Store,
    *,
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> Checkpoint:
    """Open a checkpoint; only what describes it is read.

    Args:
        path: The checkpoint.
        format: What wrote it; found out if left out.
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
        entry = self.metadata.state_dict_metadata.get(name)
        if entry is None:
            raise KeyError(str(self._missing(name)))
        if isinstance(entry, TensorMetadata):
            return SavedTensor(self._reader, name, entry, self._verify)
        return self._reader.value(name, verify=self._verify)

    def _missing(self, name: str) -> LookupError:
        try:
            self.metadata.entry(name)
        except LookupError as error:
            return error
        return KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    def __contains__(self, name: object) -> bool:
        return name in self.metadata.state_dict_metadata

    def __repr__(self) -> str:
        return f"<Checkpoint {self._reader.store.url}>\n{self.metadata!r}"


@attrs.frozen
class Axis:
    """Which elements along one axis are wanted.

    Attributes:
        start: The first one.
        step: How far it is from one to the next; negative to go backwards.
        count: How many there are.
        dropped: Whether the axis is left out of the result, as a whole number asks for.
    """

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def low(self) -> int:
        """The least of them."""
        return self.start + min(self.step, 0) * (self.count - 1)


class SavedTensor:
    """A tensor in a checkpoint; indexing it reads the elements asked for, and no others."""

    def __init__(self, reader: Reader, name: str, entry: TensorMetadata, verify: bool) -> None:
        self._reader, self._entry, self._verify = reader, entry, verify
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return self._entry.size

    @property
    def dtype(self) -> torch.dtype:
        """What it is stored as."""
        return torch_dtype(self._entry.properties.dtype)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return int(np.prod(self.shape, dtype=np.int64)) * self._entry.properties.itemsize

    def read(self) -> torch.Tensor:
        """Return all of it."""
        return self[...]

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it."""
        return self[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("elements of a checkpoint can only be had as a copy")
        return np.asarray(self.read().numpy(), dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        axes = normal_index(index, self.shape)
        out = empty([axis.count for axis in axes], self._entry.properties.dtype)
        if out.numel():
            self._fill(out, axes)
        flipped = [i for i, axis in enumerate(axes) if axis.step < 0]
        if flipped:
            out = out.flip(flipped)
        return out[tuple(0 if axis.dropped else slice(None) for axis in axes)]

    def _fill(self, out: torch.Tensor, axes: tuple[Axis, ...]) -> None:
        """Read the elements in ascending order: one box where no axis steps, else one a step."""
        steps = column([max(abs(a.step), 1) for a in axes] or [1])
        counts = column([a.count if abs(a.step) > 1 else 1 for a in axes] or [1], 1, -1)
        _, cell = expand(counts)
        offsets = (column([a.low for a in axes] or [0]) + cell * steps)[:, : self.ndim]
        sizes = column([1 if abs(a.step) > 1 else a.count for a in axes], self.ndim)
        boxes = readonly(np.broadcast_to(sizes, offsets.shape).copy())
        head = (self.name, self.name, WriteItemType.SHARD, self._entry.properties, self.shape)
        items = WriteItems(
            Catalog.of((head,)), column(np.zeros(len(offsets))), readonly(offsets), boxes
        )
        reads = load_plan(self._reader.metadata, SavePlan(items)).items
        low, stride = column([a.low for a in axes], self.ndim), steps[: self.ndim]

        def dest(row: int) -> torch.Tensor:
            anchor, inner = reads.dest_anchor[row], reads.dest_offsets[row]
            at = (anchor[: self.ndim] - low) // stride + inner[: self.ndim]
            return window(out, at.tolist(), reads.lengths[row].tolist())

        self._reader.fill(reads, dest, verify=self._verify)

    def __repr__(self) -> str:
        dtype = self._entry.properties.dtype
        return f"SavedTensor({self.name!r}, shape={list(self.shape)}, dtype={dtype})"


def normal_index(index: Any, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Say what an index means for each axis.

    >>> normal_index((-1, slice(None, None, -2)), (4, 5))
    (Axis(start=3, step=1, count=1, dropped=True), Axis(start=4, step=-2, count=3, dropped=False))

    Raises:
        IndexError: It names an element that is not there, or too many axes.
        TypeError: It is made of anything but whole numbers, slices and an ellipsis.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or len(parts) - len(dots) > len(shape):
        raise IndexError(f"{index!r} has too many parts for a tensor of shape {list(shape)}")
    missing = [slice(None)] * (len(shape) - len(parts) + len(dots))
    at = dots[0] if dots else len(parts)
    parts[at : at + len(dots)] = missing
    return tuple(_axis(part, n, i) for i, (part, n) in enumerate(zip(parts, shape, strict=True)))


def _axis(part: Any, length: int, number: int) -> Axis:
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        return Axis(start, step, len(range(start, stop, step)))
    if isinstance(part, (bool, np.bool_)) or not hasattr(part, "__index__"):
        raise TypeError(
            f"{part!r} cannot index a saved tensor; use whole numbers, slices and ..., "
            "or read() it first"
        )
    position = operator.index(part)
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for axis {number} of length {length}")
    return Axis(position % length, 1, 1, dropped=True)
