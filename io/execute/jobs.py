"""What does a load have to fetch? Its reads as columns, cut into blocks, grouped into tasks.

Nothing is read here. What a thread does with a task is said in `shardplan.io.execute.fetch`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning.columns import Ints, numbered
from shardplan.planning.geometry import expand
from shardplan.planning.storage import BLOCK_BYTES, Blocks, cut_blocks, reach_of, steps

from ..checksums import XXH3, Checksum
from ..stores.local_files import PAGE
from ..tensors import is_plain

__all__ = ["FAR_GAP", "PIECE", "SMALL", "Job"]

Flags = npt.NDArray[np.bool_]

SMALL: Final = 1 << 12
"""Ranges shorter than this many bytes are worth reading together and picking apart."""

PIECE: Final = 1 << 18
"""Bytes that are still in a processor's own cache once they were read. Half of these, or twice, and
four ranks took 3 to 20 % longer."""

FAR_GAP: Final = 1 << 17
"""Bytes that are cheaper to read over than to leave out, where every range is a request."""

_NEAR_GAP: Final = 512  # likewise, where it is a system call
_WIDE_GAP: Final = 1 << 16  # likewise, if the bytes on both sides are so many more
_WASTE: Final = 0.1
_TASK_BLOCKS: Final = 1 << 12
_MANY: Final = 16  # ranges that are sooner copied out of a file's pages than read one by one
_SHORT: Final = 1 << 16  # if they have fewer bytes than this
_MAPPED: Final = 4  # how many times as many bytes are mapped at a time as are read
_RANGE: Final = 256  # bytes of memory that it takes to ask for a range


@attrs.frozen(eq=False, slots=False)
class Job:
    """Everything that a load has to do; one row a read.

    Attributes:
        tensors: The boxes to fill.
        files: The checkpoint's files, and ``file``, which of them each read is from.
        begin: Where the chunk that is read begins in its file, in bytes.
        dtypes, itemsize: What the chunk is stored as.
        extents: The sizes of the chunk, in elements.
        offsets, lengths: Which box of it is read, in elements.
        step: Which elements of it count along each axis: every one, every second, ...; ``lengths``
            says how many do.
        chunk: Which chunk it is.
        hashed: Whether the reads fill that chunk, or blocks of it (see
            `shardplan.planning.storage.ranges`), so that it can be hashed.
        block_limit: The most bytes of a block.
        is_far: Whether every range is a request to another machine.
        is_local: Whether files are read by this machine's own system, a piece at a time if need be.
        is_mapped: Whether bytes can be copied out of the files' own pages; see `map_ranges`.
        alone: Whether one thread does all of it.
        checksum: How the checksums of chunks are made.
    """

    tensors: list[torch.Tensor]
    files: tuple[str, ...]
    file: Ints
    begin: Ints
    dtypes: list[str]
    itemsize: Ints
    extents: Ints
    offsets: Ints
    lengths: Ints
    step: Ints
    chunk: Ints
    hashed: Flags
    block_limit: int = BLOCK_BYTES
    is_far: bool = False
    is_local: bool = False
    is_mapped: bool = False
    alone: bool = False
    checksum: Checksum = XXH3

    @cached_property
    def strides(self) -> Ints:
        """How many elements of the file one step along each axis of a read skips."""
        strides: Ints = steps(self.extents) * self.step
        return strides

    @cached_property
    def axis(self) -> Ints:
        """From which axis on a read's elements are fetched as one range, gaps and all."""
        gap = FAR_GAP if self.is_far else PAGE - 1 if self.is_mapped else _NEAR_GAP
        return read_over(self.lengths, self.strides, self.itemsize, gap)

    @cached_property
    def blocks(self) -> Blocks:
        """What is fetched at a time. Those of reads that are hashed end where the chunk's do.

        Of other reads, a block counts as large as what is fetched for it.
        """
        hashed, axes = self.hashed[:, None], self.lengths.shape[1]
        extents, width = self.lengths.copy(), self.itemsize.copy()
        inside = np.arange(axes) >= self.axis[:, None]  # axes of one range
        last = inside[:, -1]
        width[last] *= self.strides[last, -1]
        pitch = -(-self.strides[:, :-1] // self.strides[:, 1:])
        extents[:, 1:] = np.where(inside[:, :-1], np.maximum(pitch, extents[:, 1:]), extents[:, 1:])
        span = np.where(inside, (self.lengths - 1) * self.strides, 0).sum(axis=1) + 1
        least = min(SMALL, max(self.block_limit >> 12, 1))  # so that ranges are not too many
        width *= np.maximum(least // (span * self.itemsize), 1)
        return cut_blocks(
            self.lengths,
            np.where(self.hashed, self.itemsize, width),
            self.block_limit,
            offsets=np.where(hashed, self.offsets, 0),
            extents=np.where(hashed, self.extents, extents),
        )

    @cached_property
    def counts(self) -> list[int]:
        """How many blocks each chunk has, as it was hashed."""
        reach = reach_of(self.extents, self.itemsize, self.block_limit)
        counts = np.zeros(int(self.chunk.max()) + 1, np.int64)
        counts[self.chunk] = np.maximum(-(-self.extents // reach), 1).prod(axis=1)
        found: list[int] = counts.tolist()
        return found

    @cached_property
    def block_bytes(self) -> Ints:
        """How many bytes each block has."""
        nbytes: Ints = self.blocks.sizes.prod(axis=1) * self.itemsize[self.blocks.box]
        return nbytes

    @cached_property
    def span(self) -> Ints:
        """How many bytes each range of a block has."""
        box, sizes = self.blocks.box, self.blocks.sizes
        inside = np.arange(sizes.shape[1]) >= self.axis[box][:, None]
        elements = np.where(inside, (sizes - 1) * self.strides[box], 0).sum(axis=1) + 1
        span: Ints = elements * self.itemsize[box]
        return span

    @cached_property
    def ranges(self) -> Ints:
        """How many ranges each block has."""
        sizes = self.blocks.sizes
        outside = np.arange(sizes.shape[1]) < self.axis[self.blocks.box][:, None]
        ranges: Ints = np.where(outside, sizes, 1).prod(axis=1)
        return ranges

    @property
    def nbytes(self) -> int:
        """How many bytes are wanted altogether."""
        return int(self.block_bytes.sum())

    @cached_property
    def first(self) -> Ints:
        """Where the first byte of each block lies in its file."""
        box = self.blocks.box
        place = (self.offsets * steps(self.extents))[box] + self.blocks.offsets * self.strides[box]
        first: Ints = self.begin[box] + place.sum(axis=1) * self.itemsize[box]
        return first

    @cached_property
    def into(self) -> Ints:
        """Where the first byte of each block goes in its read's own box, laid out row-major."""
        box = self.blocks.box
        place = (self.blocks.offsets * steps(self.lengths)[box]).sum(axis=1)
        into: Ints = place * self.itemsize[box]
        return into

    @cached_property
    def plain(self) -> Flags:
        """Which blocks are one range of their file that goes into one range of memory as it is."""
        own = [is_plain(t, dtype) for t, dtype in zip(self.tensors, self.dtypes, strict=True)]
        plain: Flags = np.array(own, bool)[self.blocks.box]
        plain &= (self.ranges == 1) & (self.span == self.block_bytes)
        return plain

    @cached_property
    def unit(self) -> Ints:
        """Which blocks are hashed together, as parts of one of their chunk's; others are alone."""
        box, number = self.blocks.box, self.blocks.number
        unit = np.arange(len(box))
        rows = np.flatnonzero(self.hashed[box])
        key = self.chunk[box[rows]] * (int(number.max(initial=0)) + 1) + number[rows]
        _, first, same = numbered(key)
        unit[rows] = rows[first][same]
        return unit

    @cached_property
    def large(self) -> Flags:
        """Which blocks are worth hashing while they are read: those of large units, all plain."""
        if not self.is_local:
            return np.zeros(len(self.blocks), bool)
        rough = np.bincount(self.unit, ~self.plain)[self.unit] > 0
        nbytes = np.bincount(self.unit, self.block_bytes)[self.unit]
        large: Flags = self.hashed[self.blocks.box] & ~rough & (nbytes > PIECE)
        return large

    @cached_property
    def scattered(self) -> Flags:
        """Which blocks are many short ranges, or have other bytes between their own."""
        many: Flags = (self.ranges >= _MANY) & (self.span < _SHORT)
        return many | (self.span * self.ranges > self.block_bytes)

    @cached_property
    def tasks(self) -> list[Ints]:
        """The blocks in order of place, in groups of one file that are worth a thread's while.

        Blocks that are hashed together stay together. Large ones are read one after the other and
        take no memory: a thread that is alone has no reason to part them. Those that it copies out
        of a file's pages it maps by the dozen.
        """
        file, unit = self.file[self.blocks.box], self.unit
        place = np.full(len(unit), np.iinfo(np.int64).max)  # of a unit
        np.minimum.at(place, unit, self.first)
        order = np.lexsort((self.first, unit, place[unit], file))
        size = np.maximum(self.span, SMALL * (self.ranges > 1))[order] * self.ranges[order]
        if self.alone:
            size = np.where(self.large[order], 0, size)
            size = np.where(self.scattered[order] & self.is_mapped, size // _MAPPED, size)
        before = np.cumsum(size) - size
        limit = max(int(size.max()), BLOCK_BYTES)
        group = before // limit + (np.arange(len(order)) // _TASK_BLOCKS)
        leads = np.diff(unit[order], prepend=-1) != 0
        group = group[np.maximum.accumulate(np.where(leads, np.arange(len(order)), 0))]
        new = (np.diff(group) != 0) | (np.diff(file[order]) != 0)
        return np.split(order, np.flatnonzero(new) + 1)

    def cost(self, task: Ints) -> int:
        """How many bytes a task may have to hold: plain blocks need no memory but the tensors'."""
        rough = task[~self.plain[task]]
        fetched = (self.span[rough] + _RANGE) * self.ranges[rough]
        return int((fetched + self.block_bytes[rough]).sum())

    def starts(self, blocks: Ints) -> tuple[Ints, Ints]:
        """Return where the ranges of some blocks start in their file; and of which block each is.

        They come by block, then by place in the block's box.
        """
        box, sizes = self.blocks.box[blocks], self.blocks.sizes[blocks]
        outside = np.arange(sizes.shape[1]) < self.axis[box][:, None]
        block, cell = expand(np.where(outside, sizes, 1))
        place = (cell * self.strides[box][block]).sum(axis=1) * self.itemsize[box][block]
        return self.first[blocks][block] + place, block


def read_over(lengths: Ints, strides: Ints, itemsize: Ints, near: int = _NEAR_GAP) -> Ints:
    """Tell from which axis on boxes are fetched as one range each, however much lies in between.

    Gaps are read over where that is cheaper than another range. Long ranges go straight to where
    they belong, so that they are not joined here unless they touch.

    Args:
        lengths: How many elements each box has along each axis; one row a box.
        strides: How many elements of the file a step along each axis skips.
        itemsize: Bytes an element takes.
        near: How many bytes are cheaper to read over than to leave out.

    Returns:
        The first such axis; the number of axes if every element is a range of its own.

    Of a tensor of 8-byte elements, one column of 4, one of 1,000, and all rows but the last:

    >>> lengths, strides = (
    ...     np.array([[50, 1], [50, 1], [49, 4]]),
    ...     np.array([[4, 1], [1000, 1], [4, 1]]),
    ... )
    >>> read_over(lengths, strides, np.array([8, 8, 8])).tolist()
    [0, 1, 0]
    """
    rows, axes = lengths.shape
    span, needed = itemsize.copy(), itemsize.copy()  # bytes of a range; of what is wanted of it
    axis, together = np.full(rows, axes, np.int64), np.ones(rows, bool)
    for at in reversed(range(axes)):
        gap = strides[:, at] * itemsize - span
        cheap = (gap <= near) | ((gap <= _WIDE_GAP) & (gap <= 2 * _WASTE * span))
        staged = (span < SMALL) | (span > needed)
        together = together & ((lengths[:, at] == 1) | (gap == 0) | (cheap & staged))
        span = np.where(together, span + (lengths[:, at] - 1) * strides[:, at] * itemsize, span)
        needed = np.where(together, needed * lengths[:, at], needed)
        axis = np.where(together, at, axis)
    return axis
