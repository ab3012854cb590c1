"""Boxes of saved chunks as byte ranges: where they lie, and which to fetch as one.

A saved chunk lies row-major in its file. A box of it is one range if it spans the chunk's trailing
axes, and several otherwise. `shardplan.planning.storage.fetch` plans whole loads with these.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints
from ..geometry.overlap import grid_cells
from .blocks import reach_of

Flags = npt.NDArray[np.bool_]

SMALL: Final = 1 << 12
"""Ranges shorter than this many bytes are worth reading together and picking apart."""
WIDE_GAP: Final = 1 << 16
"""The widest gap to read over where the bytes on both sides are ten times as many."""
WASTE: Final = 0.1
"""The largest share of the bytes on both sides that such a gap may be."""


@attrs.frozen(eq=False)
class ByteRanges:
    """Bytes that lie together in a file; one row a range, in order of read, then of place.

    Attributes:
        read: The read that the range belongs to.
        start: Where it starts in the file, in bytes.
        length: How long it is, in bytes.
        into: Where it goes in what is fetched for the read, laid end to end, in bytes.
    """

    read: Ints
    start: Ints
    length: Ints
    into: Ints

    def __len__(self) -> int:
        return len(self.read)


def byte_ranges(
    offsets: Ints, lengths: Ints, extents: Ints, itemsize: Ints, begin: Ints
) -> ByteRanges:
    """Return the byte ranges of some boxes of saved chunks, without any other byte.

    Chunks are ``extents`` large, and ``begin`` at a byte of their file.

    >>> one = lambda *n: np.array([n])
    >>> r = byte_ranges(one(1, 0), one(2, 4), one(6, 4), np.array([4]), np.array([100]))
    >>> r.start.tolist(), r.length.tolist()  # whole rows lie together
    ([116], [32])
    >>> r = byte_ranges(one(1, 2), one(2, 2), one(6, 4), np.array([4]), np.array([100]))
    >>> r.start.tolist(), r.length.tolist(), r.into.tolist()
    ([124, 140], [8, 8], [0, 8])
    """
    strides = steps(extents)
    first = begin + (offsets * strides).sum(axis=1) * itemsize
    return box_ranges(first, lengths, strides, range_axis(lengths, strides, itemsize), itemsize)


def box_ranges(first: Ints, lengths: Ints, strides: Ints, axis: Ints, itemsize: Ints) -> ByteRanges:
    """Return the byte ranges of boxes whose first elements lie at byte ``first`` of their file.

    From ``axis`` on each is fetched as one range, gaps and all. A step along an axis skips
    ``strides`` elements of the file.
    """
    outside = np.arange(lengths.shape[1]) < axis[:, None]
    counts = np.where(outside, lengths, np.minimum(lengths, 1))  # none of an empty box
    read, cell = grid_cells(counts)
    place = (cell * strides[read]).sum(axis=1) * itemsize[read]
    span = (np.where(outside, 0, (lengths - 1) * strides).sum(axis=1) + 1) * itemsize
    number = np.arange(len(read)) - np.searchsorted(read, read)  # of a range among its read's
    length = span[read]
    return ByteRanges(read, first[read] + place, length, number * length)


def range_axis(
    lengths: Ints, strides: Ints, itemsize: Ints, max_gap: int = 0, max_waste: float = 0.0
) -> Ints:
    """Return the axis from which on each box is fetched as one range, gaps and all.

    Gaps are read over where that is cheaper than another range: up to ``max_gap`` bytes, or a share
    of ``max_waste`` of the range. Long ranges go straight to where they belong, so they are not
    joined here unless they touch. If every element is a range of its own, the axis is the number of
    axes.

    Of a tensor of 8-byte elements, one column of 4, one of 1,000, and all rows but the last:

    >>> lengths, strides = (
    ...     np.array([[50, 1], [50, 1], [49, 4]]),
    ...     np.array([[4, 1], [1000, 1], [4, 1]]),
    ... )
    >>> range_axis(lengths, strides, np.array([8, 8, 8]), 512).tolist()
    [0, 1, 0]
    """
    rows, axes = lengths.shape
    span, needed = itemsize.copy(), itemsize.copy()  # bytes of a range; wanted bytes of it
    axis, together = np.full(rows, axes, np.int64), np.ones(rows, bool)
    for at in reversed(range(axes)):
        gap = strides[:, at] * itemsize - span
        cheap = (gap <= max_gap) | ((gap <= WIDE_GAP) & (gap <= max_waste * span))
        staged = (span < SMALL) | (span > needed)
        together = together & ((lengths[:, at] == 1) | (gap == 0) | (cheap & staged))
        span = np.where(together, span + (lengths[:, at] - 1) * strides[:, at] * itemsize, span)
        needed = np.where(together, needed * lengths[:, at], needed)
        axis = np.where(together, at, axis)
    return axis


def steps(extents: Ints) -> Ints:
    """Return how many elements of a row-major box a step along each axis skips.

    >>> steps(np.array([[6, 4, 2]])).tolist()
    [[8, 2, 1]]
    """
    step = np.ones_like(extents)
    for axis in reversed(range(extents.shape[1] - 1)):
        step[:, axis] = step[:, axis + 1] * extents[:, axis + 1]
    return step


def lies_together(lengths: Ints, extents: Ints) -> Flags:
    """Return True for boxes, none of them empty, that are a single range of their chunk.

    >>> lies_together(np.array([[2, 4], [1, 3], [2, 3]]), np.array([[6, 4]] * 3)).tolist()
    [True, True, False]
    """
    span = ((lengths - 1) * steps(extents)).sum(axis=1) + 1  # from first to last element
    together: Flags = span == lengths.prod(axis=1)
    return together


def has_narrow_gaps(lengths: Ints, extents: Ints, itemsize: Ints, max_gap: int) -> Flags:
    """Return True for boxes that are several ranges of their chunk, none far from the next.

    No box may be empty. Here: two columns of rows of 4 bytes; two rows; all columns but one of 9:

    >>> lengths, extents = np.array([[3, 2], [2, 4], [3, 8]]), np.array([[3, 4], [3, 4], [3, 9]])
    >>> has_narrow_gaps(lengths, extents, np.array([1, 1, 4]), 2).tolist()
    [True, False, False]
    """
    strides = steps(extents) * itemsize[:, None]
    span, narrow = itemsize.copy(), np.ones(len(lengths), bool)
    for axis in reversed(range(lengths.shape[1])):
        gap = strides[:, axis] - span
        narrow &= (lengths[:, axis] == 1) | (gap <= max_gap)
        span += (lengths[:, axis] - 1) * strides[:, axis]
    return narrow & ~lies_together(lengths, extents)


def fetched(lengths: Ints, extents: Ints, itemsize: Ints, max_gap: int) -> Ints:
    """Count the elements fetched for each box, if any: its own, and those in narrow gaps.

    >>> fetched(np.array([[3, 2], [2, 4]]), np.array([[3, 4]] * 2), np.array([1, 1]), 2).tolist()
    [10, 8]
    """
    narrow = has_narrow_gaps(lengths, extents, itemsize, max_gap) & (lengths > 0).all(axis=1)
    span = ((lengths - 1) * steps(extents)).sum(axis=1) + 1
    numel: Ints = np.where(narrow, span, lengths.prod(axis=1))
    return numel


def fills_chunks(chunk: Ints, offsets: Ints, lengths: Ints, extents: Ints) -> Flags:
    """Return True for boxes of chunks that are filled by boxes, each of them one range.

    Boxes come in any order, and none is empty. Chunk 0 of 4 elements is read in halves, of chunk 1
    all but the first element:

    >>> column = lambda *n: np.array(n).reshape(-1, 1)
    >>> boxes = column(2, 1, 0), column(2, 3, 2), column(4, 4, 4)
    >>> fills_chunks(np.array([0, 1, 0]), *boxes).tolist()
    [True, False, True]
    """
    begin = (offsets * steps(extents)).sum(axis=1)
    end = begin + lengths.prod(axis=1)
    order = np.lexsort((begin, chunk))
    first = np.flatnonzero(np.diff(chunk[order], prepend=-1))  # the row each chunk starts at
    if not len(first):
        return np.zeros(0, bool)
    wanted = np.roll(end[order], 1)  # a box starts where the one before it ends
    wanted[first] = 0
    right = lies_together(lengths, extents)[order] & (begin[order] == wanted)
    last = np.append(first[1:], len(order)) - 1
    right[last] &= (end == extents.prod(axis=1))[order][last]
    found = np.empty(len(order), bool)
    found[order] = np.repeat(
        np.logical_and.reduceat(right, first), np.diff(first, append=len(order))
    )
    return found


def whole_blocks(
    chunk: Ints, offsets: Ints, lengths: Ints, extents: Ints, itemsize: Ints, max_bytes: int
) -> Flags:
    """Return True for boxes that are one range which begins and ends where blocks do.

    Of boxes that share elements, only one counts: a block is hashed once. None is empty. Of a chunk
    of 5 elements in blocks of 2, the last two blocks are read, and half of the first:

    >>> column = lambda *n: np.array(n).reshape(-1, 1)
    >>> boxes = (column(2, 0), column(3, 1), column(5, 5))
    >>> whole_blocks(np.array([0, 0]), *boxes, np.array([1, 1]), 2).tolist()
    [True, False]
    """
    reach, ends = reach_of(extents, itemsize, max_bytes), offsets + lengths
    right: Flags = lies_together(lengths, extents)
    right &= (offsets % reach == 0).all(axis=1)
    right &= ((ends % reach == 0) | (ends == extents)).all(axis=1)
    begin = (offsets * steps(extents)).sum(axis=1)
    rows = np.flatnonzero(right)
    rows = rows[np.lexsort((begin[rows], chunk[rows]))]
    if len(rows):
        reached = _reach(chunk[rows], (begin + lengths.prod(axis=1))[rows])
        same = np.diff(chunk[rows]) == 0
        right[rows[1:][same & (begin[rows[1:]] < reached[:-1])]] = False
    return right


@attrs.frozen(eq=False)
class Requests:
    """Ranges to fetch in one go each; one row a request.

    Attributes:
        file: The file that it fetches from.
        start, length: Its bytes, in the file's frame.
        members: The request that brings each range, in the order given.
    """

    file: Ints
    start: Ints
    length: Ints
    members: Ints

    def __len__(self) -> int:
        return len(self.file)


def coalesce(
    file: Ints,
    start: Ints,
    length: Ints,
    *,
    max_gap: int = WIDE_GAP,
    max_waste: float = WASTE,
    max_bytes: int = 1 << 26,
) -> Requests:
    """Join ranges of the same file where a request costs more than the gap between them.

    Args:
        file: The file that each range lies in; ranges come in any order.
        start: Where each starts, in bytes.
        length: How long each is, in bytes.
        max_gap: The widest gap to read over, in bytes.
        max_waste: The largest share of the two neighbours' bytes that the gap may be.
        max_bytes: Requests do not grow past this (a longer range stays whole).

    >>> r = coalesce(*map(np.array, ([0, 0, 0], [0, 100, 900], [96, 100, 10])))
    >>> r.start.tolist(), r.length.tolist(), r.members.tolist()
    ([0, 900], [200, 10], [0, 0, 1])
    """
    order = np.lexsort((start, file))
    file, start, length = file[order], start[order], length[order]
    joins = np.zeros(len(order), bool)
    if len(order):
        reach = _reach(file, start + length)
        gap = start[1:] - reach[:-1]
        near = (gap <= max_gap) & (gap <= max_waste * (length[1:] + length[:-1]))
        joins[1:] = (file[1:] == file[:-1]) & near
        joins = _bounded(joins, start, start + length, max_bytes)
    number = np.cumsum(~joins) - 1
    members = np.empty(len(order), np.int64)
    members[order] = number
    first = np.flatnonzero(~joins)
    if not len(first):
        return Requests(file, start, length, members)
    ends = np.maximum.reduceat(start + length, first)
    return Requests(file[first], start[first], ends - start[first], members)


def _reach(file: Ints, ends: Ints) -> Ints:
    """Return how far the ranges of a file reach, up to and including each of them."""
    shift = int(ends.max()) + 1
    number = np.cumsum(np.diff(file, prepend=file[0]) != 0)  # files apart, so that none leaks
    return np.asarray(np.maximum.accumulate(ends + number * shift) - number * shift)


def _bounded(joins: Ints, start: Ints, ends: Ints, max_bytes: int) -> Ints:
    """Cut runs of joined ranges that would fetch more than ``max_bytes``."""
    bounded = joins.copy()
    first = np.flatnonzero(~joins)
    total = np.maximum.reduceat(ends, first) - start[first]
    for run in np.flatnonzero(total > max_bytes).tolist():
        stop = first[run + 1] if run + 1 < len(first) else len(joins)
        begin = first[run]
        for row in range(begin + 1, stop):
            if ends[row] - start[begin] > max_bytes:
                bounded[row], begin = False, row
    return bounded
