"""Chunk, and the tilings that the chunks of a tensor form.

A tensor's chunks form a *tiling*: a `Grid` (cut points per axis) if possible, else `Boxes`. Both
are immutable sequences of `Chunk` that compare and hash like tuples of them.

Row ``i`` of ``offsets`` and ``sizes`` is chunk ``i``, one column per axis, in elements of the
tensor's global frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import index
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Columns, Index, Ints, readonly

MAX_AXES: Final = 63
"""The most axes of a tensor; numpy's arrays have 64, and one is needed for an element's bytes."""
MAX_NUMEL: Final = 1 << 59
"""The product of a tensor's axes, except those of length 0, is less than this.

So every offset in bytes fits into 64 bits.
"""


def shape_fault(size: Sequence[int]) -> str | None:
    """Return why a checkpoint cannot hold a tensor of this shape; None if it can.

    >>> shape_fault((4, 0)), shape_fault((1,) * 64)
    (None, 'has 64 axes, and a checkpoint holds tensors of at most 63; reshape it')
    """
    if len(size) > MAX_AXES:
        most = f"a checkpoint holds tensors of at most {MAX_AXES}"
        return f"has {len(size)} axes, and {most}; reshape it"
    if math.prod([max(n, 1) for n in size]) >= MAX_NUMEL:
        return "has a shape too large for a checkpoint: the product of its axes is 2^59 or more"
    return None


def as_ints(values: Iterable[int]) -> tuple[int, ...]:
    """Return a sequence, such as a torch.Size or a numpy row, as a tuple of ints."""
    return tuple(map(index, values))


@attrs.frozen
class Chunk:
    """A box of a tensor.

    Attributes:
        offsets: Its start, per axis, in elements of the global tensor.
        sizes: Its size, per axis, in elements.

    >>> Chunk([4, 0], (2, 8)).ends
    (6, 8)
    """

    offsets: tuple[int, ...] = attrs.field(converter=as_ints)
    sizes: tuple[int, ...] = attrs.field(converter=as_ints)

    def __attrs_post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(
                f"a chunk at {self.offsets} cannot have sizes {self.sizes}: other rank"
            )
        if any(o < 0 for o in self.offsets) or any(s < 0 for s in self.sizes):
            raise ValueError(f"a chunk at {self.offsets} of sizes {self.sizes} is negative")

    @property
    def ends(self) -> tuple[int, ...]:
        """The end per axis, one past the last element."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def text(self) -> str:
        """The box as slices, such as ``0:4, 8:16``."""
        return ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True))


def meet(a: Chunk, b: Chunk) -> Chunk | None:
    """Return the overlap of two boxes; None if they share no element."""
    low = tuple(map(max, a.offsets, b.offsets))
    sizes = [min(x, y) - o for x, y, o in zip(a.ends, b.ends, low, strict=True)]
    return Chunk(low, sizes) if all(n > 0 for n in sizes) else None


class Tiling(Columns[Chunk]):
    """An immutable sequence of chunks of one tensor, backed by columns. Either Grid or Boxes."""

    offsets: Ints  # one row per chunk
    sizes: Ints  # one row per chunk

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return int(self.offsets.shape[1])

    def record(self, row: int) -> Chunk:
        """Return the chunk of one row."""
        return Chunk(self.offsets[row].tolist(), self.sizes[row].tolist())

    def take(self, rows: Index | slice) -> Tiling:
        """Return the given chunks, in that order."""
        return tile(self.offsets[rows], self.sizes[rows])

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk, self.offsets.tolist(), self.sizes.tolist())

    def _same(self, other: Tiling) -> bool:
        pairs = ((self.offsets, other.offsets), (self.sizes, other.sizes))
        return all(np.array_equal(a, b) for a, b in pairs)

    def bounds(self) -> Chunk:
        """Return the smallest box that contains every chunk; there must be at least one."""
        low = self.offsets.min(axis=0)
        return Chunk(low, (self.offsets + self.sizes).max(axis=0) - low)

    def volume(self) -> int:
        """Return the total number of elements of all chunks."""
        return int(self.sizes.prod(axis=1).sum())


def _frozen(values: npt.ArrayLike) -> Ints:
    """Return a read-only array; the caller's own is copied."""
    array = np.asarray(values, np.int64)
    return readonly(array.copy()) if array.flags.writeable else array


def _frozen_cuts(cuts: Iterable[npt.ArrayLike]) -> tuple[Ints, ...]:
    return tuple(map(_frozen, cuts))


@attrs.frozen(eq=False, repr=False, slots=False)
class Grid(Tiling):
    """Chunks that cut every axis straight through, in row-major order.

    Attributes:
        cuts: Per axis, the starts of the chunks, ascending, and the end of the last one.

    >>> grid = tile([[0, 0], [0, 4], [3, 0], [3, 4]], [[3, 4], [3, 2], [2, 4], [2, 2]])
    >>> grid
    Grid(0:3:5, 0:4:6)
    >>> grid[1]
    Chunk(offsets=(0, 4), sizes=(3, 2))
    """

    cuts: tuple[Ints, ...] = attrs.field(converter=_frozen_cuts)

    def __len__(self) -> int:
        return math.prod(len(c) - 1 for c in self.cuts)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.cuts)

    @cached_property
    def offsets(self) -> Ints:  # type: ignore[override]
        """The start of each chunk; one row per chunk."""
        return self._cells([c[:-1] for c in self.cuts])

    @cached_property
    def sizes(self) -> Ints:  # type: ignore[override]
        """The size of each chunk; one row per chunk."""
        return self._cells([np.diff(c) for c in self.cuts])

    def _cells(self, axes: Sequence[Ints]) -> Ints:
        """Combine one value per cut of each axis into a row per chunk, row-major."""
        rows = np.empty((*(len(a) for a in axes), len(axes)), np.int64)
        for axis, values in enumerate(axes):
            rows[..., axis] = values.reshape([-1 if i == axis else 1 for i in range(len(axes))])
        return readonly(rows.reshape(len(self), len(axes)))

    def bounds(self) -> Chunk:
        """Return the box that the cuts span."""
        low = [int(c[0]) for c in self.cuts]
        return Chunk(low, [int(c[-1]) - o for c, o in zip(self.cuts, low, strict=True)])

    def volume(self) -> int:
        """Return the total number of elements of all chunks."""
        return self.bounds().numel

    def __repr__(self) -> str:
        texts = []
        for cuts in self.cuts:
            values = [str(cut) for cut in cuts.tolist()]
            if len(values) > 8:
                values = [*values[:3], f"…{len(values) - 5} more…", *values[-2:]]
            texts.append(":".join(values))
        return f"Grid({', '.join(texts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Grid, ([c.tolist() for c in self.cuts],)


@attrs.frozen(eq=False, repr=False, slots=False)
class Boxes(Tiling):
    """Chunks in any arrangement and order.

    >>> tile([[0], [12]], [[4], [4]])
    Boxes([0:4], [12:16])
    """

    offsets: Ints = attrs.field(converter=_frozen)
    sizes: Ints = attrs.field(converter=_frozen)

    def __len__(self) -> int:
        return len(self.offsets)

    def __repr__(self) -> str:
        shown = [f"[{chunk.text}]" for chunk in self[:6]]
        more = [f"… {len(self) - 6} more"] if len(self) > 6 else []
        return f"Boxes({', '.join(shown + more)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return tile, (self.offsets.tolist(), self.sizes.tolist())


def tile(offsets: npt.ArrayLike, sizes: npt.ArrayLike) -> Tiling:
    """Return the tiling of these chunks: a Grid if they form one in row-major order, else Boxes.

    >>> tile([[0], [2], [4]], [[2], [2], [2]])
    Grid(0:2:4:6)
    """
    starts, extents = (np.ascontiguousarray(a, np.int64) for a in (offsets, sizes))
    if starts.shape == extents.shape == (0,):
        starts = extents = np.zeros((0, 0), np.int64)
    if starts.ndim != 2 or starts.shape != extents.shape:
        raise ValueError(f"offsets of shape {starts.shape} do not fit sizes of {extents.shape}")
    return _as_grid(starts, extents) or Boxes(starts, extents)


def tile_chunks(chunks: Iterable[Any]) -> Tiling:
    """Return the tiling of some records; a tiling is returned unchanged."""
    if isinstance(chunks, Tiling):
        return chunks
    boxes = [c if isinstance(c, Chunk) else Chunk(c.offsets, c.sizes) for c in chunks]
    if len({len(c.offsets) for c in boxes}) > 1:
        raise ValueError("the chunks of one tensor must all have the same number of axes")
    axes = len(boxes[0].offsets) if boxes else 0
    columns = np.array([(c.offsets, c.sizes) for c in boxes], np.int64).reshape(len(boxes), 2, axes)
    return tile(columns[:, 0], columns[:, 1])


def _as_grid(offsets: Ints, sizes: Ints) -> Grid | None:
    """Return the cut points of chunks that form a row-major grid, else None."""
    count, axes = offsets.shape
    if count == 0 or (axes == 0 and count > 1):
        return None
    cuts: list[Ints] = []
    stride = 1
    for axis in reversed(range(axes)):
        column = offsets[::stride, axis]
        drops = column[1:] <= column[:-1]
        cells = int(drops.argmax()) + 1 if drops.any() else len(column)
        last = (cells - 1) * stride
        cut = np.append(column[:cells], offsets[last, axis] + sizes[last, axis])
        cuts.insert(0, readonly(cut))
        stride *= cells
    if stride != count:
        return None
    shape = [len(c) - 1 for c in cuts]
    for axis, cut in enumerate(cuts):  # compared without making the rows of the grid: that is slow
        along = [-1 if i == axis else 1 for i in range(axes)]
        extents = np.diff(cut)
        fits = offsets[:, axis].reshape(shape) == cut[:-1].reshape(along)
        fits &= sizes[:, axis].reshape(shape) == extents.reshape(along)
        if not fits.all() or not (extents > 0).all():
            return None
    return Grid(tuple(cuts))
