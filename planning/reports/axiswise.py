"""What do a grid of saved chunks and a grid of wanted boxes share? Counted one axis at a time.

Rows read as columns make a piece of every chunk and every box: hundreds of millions for a large
world. But a piece of two grids is made of one stretch along each axis, and all that is asked of the
pieces (how many, how large, how many runs) follows from the stretches, of which there are few.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from ..overlap import expand, overlap_many
from ..packing import Ints
from ..tiling import Grid, Tiling

__all__ = ["Axes"]


@attrs.frozen(eq=False)
class _Stretches:
    """What lies along one axis of something: per interval, its stretches.

    Attributes:
        whole: How many stretches are all of their chunk's interval.
        partial: How many are less.
        total: How long all are together.
    """

    whole: Ints
    partial: Ints
    total: Ints

    @classmethod
    def of(cls, at: Ints, count: int, lengths: Ints, extents: Ints) -> _Stretches:
        """Add up stretches, each of the interval ``at``."""
        is_whole = lengths == extents
        total = np.zeros(count, np.int64)
        np.add.at(total, at, lengths)
        whole, partial = (np.bincount(at[m], minlength=count) for m in (is_whole, ~is_whole))
        return cls(whole, partial, total)


@attrs.frozen(eq=False)
class _Axis:
    """Where the intervals of boxes meet the cuts of a grid.

    Attributes:
        which: Per box, its interval; boxes that lie alike along the axis share one.
        first, count: Per interval, the chunks that it meets.
        extents: Per interval, how long those chunks are together.
        longest, longest_partial: Per interval, its longest stretch, and the longest one that is
            not all of the interval; 0 if there is none.
        has_unit: Per interval, 1 if a stretch of it has length 1.
        boxes, chunks: The stretches of each interval, and of each chunk of the grid.
    """

    which: Ints
    first: Ints
    count: Ints
    extents: Ints
    longest: Ints
    longest_partial: Ints
    has_unit: Ints
    boxes: _Stretches
    chunks: _Stretches

    @classmethod
    def of(cls, cuts: Ints, offsets: Ints, sizes: Ints) -> _Axis:
        distinct, which = np.unique(np.stack([offsets, sizes], 1), axis=0, return_inverse=True)
        intervals = len(distinct)
        line = Grid((cuts,))
        met = overlap_many((line,), np.zeros(intervals, np.int64), distinct[:, :1], distinct[:, 1:])
        lengths, extents = met.sizes[:, 0], np.diff(cuts)[met.chunk]
        count = np.bincount(met.box, minlength=intervals)
        first = np.append(met.chunk, 0)[np.cumsum(count) - count]
        sums, longest, longest_partial, has_unit = np.zeros((4, intervals), np.int64)
        np.add.at(sums, met.box, extents)
        np.maximum.at(longest, met.box, lengths)
        np.maximum.at(longest_partial, met.box, lengths * (lengths != distinct[met.box, 1]))
        np.maximum.at(has_unit, met.box, lengths == 1)
        return cls(
            which.reshape(-1),
            first,
            count,
            sums,
            longest,
            longest_partial,
            has_unit,
            _Stretches.of(met.box, intervals, lengths, extents),
            _Stretches.of(met.chunk, len(line), lengths, extents),
        )


@attrs.frozen(eq=False)
class Axes:
    """A grid of chunks and a grid of boxes, axis by axis."""

    axes: tuple[_Axis, ...]

    @classmethod
    def of(cls, tiling: Tiling, offsets: Ints, sizes: Ints) -> Axes | None:
        """Take distinct boxes apart; None if they, or the chunks, are no grid.

        >>> from shardplan.planning.tiling import tile
        >>> rows = tile([[0, 0], [2, 0]], [[2, 6], [1, 6]])
        >>> columns = np.array([[0, 0], [0, 4]]), np.array([[3, 4], [3, 2]])
        >>> elements, requests, *_ = Axes.of(rows, *columns).per_box()
        >>> elements.tolist(), requests.tolist()
        ([12, 6], [3, 3])
        """
        if not isinstance(tiling, Grid) or not tiling.ndim or not len(offsets):
            return None
        axes = range(tiling.ndim)
        made = tuple(_Axis.of(tiling.cuts[x], offsets[:, x], sizes[:, x]) for x in axes)
        return cls(made) if math.prod(len(a.count) for a in made) == len(offsets) else None

    def per_box(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Add up the pieces of each box.

        Returns:
            Per box: elements, runs, elements of all chunks that it meets, elements of its largest
            piece, and of the largest one that is not contiguous in the box.
        """
        one, none = (np.full(len(self.axes[0].which), n, np.int64) for n in (1, 0))
        elements = extents = largest = one
        straight, broken = one, none  # runs of pieces whose later axes are all whole, or are not
        solid, flat, scattered = one, none, none  # largest piece: whole so far, one run, several
        for axis in reversed(self.axes):
            at, s = axis.which, axis.boxes
            straight, broken = (
                straight * s.whole[at],
                straight * s.partial[at] + broken * s.total[at],
            )
            elements, extents = elements * s.total[at], extents * axis.extents[at]
            longest, partial, unit = (
                c[at] for c in (axis.longest, axis.longest_partial, axis.has_unit)
            )
            scattered = np.maximum(flat * longest * (longest > 1), scattered * longest)
            flat = np.maximum(solid * partial, flat * unit)
            solid, largest = solid * longest * (partial == 0), largest * longest
        return elements, straight + broken, extents, largest, scattered

    def per_chunk(self) -> tuple[Ints, Ints]:
        """Return, per chunk of the grid, elements and runs of its pieces."""
        one = np.ones(1, np.int64)
        elements, straight, broken = one, one, one * 0
        for axis in reversed(self.axes):
            whole, partial, total = (
                c[:, None] for c in (axis.chunks.whole, axis.chunks.partial, axis.chunks.total)
            )
            elements = (total * elements).ravel()
            straight, broken = (
                (whole * straight).ravel(),
                (partial * straight + total * broken).ravel(),
            )
        return elements, straight + broken

    def alike(self) -> tuple[Ints, Ints]:
        """Group boxes that meet the same chunks.

        Returns:
            Per box its group; and, one row a group, the first chunk and the number of chunks that
            it meets along each axis.
        """
        spans = [column[a.which] for a in self.axes for column in (a.first, a.count)]
        groups, which = np.unique(np.stack(spans, 1), axis=0, return_inverse=True)
        return which.reshape(-1), groups

    def chunks_met(self, groups: Ints) -> tuple[Ints, Ints]:
        """Return, one row a group and chunk, the group and the chunk's number in the grid."""
        lengths = [len(axis.chunks.total) for axis in self.axes]
        strides = np.cumprod([1, *lengths[:0:-1]])[::-1]
        row, cell = expand(groups[:, 1::2])
        return row, ((groups[row, ::2] + cell) * strides).sum(axis=1)
