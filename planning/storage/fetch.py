"""`fetch_plan`: which bytes of which file a load fetches, in which order, and what it hashes.

1. Reads that fill a chunk, or blocks of it, are marked to be hashed.
2. Each read becomes byte ranges; narrow gaps between them are read over.
3. Each read is cut into blocks of bounded size. Blocks of hashed reads end where the chunk's do.
4. Blocks that are parts of one block of their chunk form a unit, which is hashed as one.
5. Units are sorted by file and place, and grouped into tasks: what one thread does at a time.

Nothing is read here; `shardplan.io.execute.read` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, numbered
from ..text import Printed, Sheet, counted, human_bytes, listing
from .blocks import BLOCK_BYTES, Blocks, blocks_along, cut_blocks, reach_of
from .ranges import (
    SMALL,
    WASTE,
    WIDE_GAP,
    ByteRanges,
    Flags,
    box_ranges,
    coalesce,
    fills_chunks,
    range_axis,
    steps,
    whole_blocks,
)

FAR_GAP: Final = 1 << 17
"""Bytes that are cheaper to read over than to leave out, where every range is a request."""
PIECE_BYTES: Final = 1 << 18
"""Bytes that are still in a processor's own cache once they were read. Half of these, or twice, and
four ranks took 3 to 20 % longer."""

_NEAR_GAP: Final = 512  # bytes that are cheaper to read over, where a range is a system call
_TASK_BLOCKS: Final = 1 << 12
_MANY: Final = 16  # ranges that are sooner copied out of a file's pages than read one by one
_SHORT: Final = 1 << 16  # if they have fewer bytes than this
_MAPPED: Final = 4  # how many times as many bytes are mapped at a time as are read
_RANGE: Final = 256  # bytes of memory that it takes to ask for a range
_SHOWN: Final = 20  # rows of a printed plan


@attrs.frozen(eq=False)
class ChunkPlaces:
    """Where saved chunks lie; one row a chunk."""

    file: Ints  # the number of its file
    begin: Ints  # where its first element lies there, in bytes
    itemsize: Ints  # bytes of an element
    # The sizes of the row-major array that it is the first corner of, in elements; mostly the
    # chunk's own. Axes are in the order in which they are stored.
    extents: Ints
    summed: Flags  # whether there is a checksum to compare it with


@attrs.frozen(eq=False)
class BoxReads:
    """Boxes of chunks to read; one row a read. None is empty."""

    chunk: Ints  # the chunk that it is a box of: a row of `ChunkPlaces`
    offsets: Ints  # where the box starts in its chunk, in elements
    lengths: Ints  # how many elements are read along each axis
    step: Ints  # which elements count along each axis: every one, every second, ...
    direct: Flags  # whether its elements go into one range of memory just as they are stored


@attrs.frozen
class Access:
    """How files can be read."""

    is_far: bool = False  # whether every range is a request to another machine
    is_local: bool = False  # whether files are on this machine, and can be read a piece at a time
    page_bytes: int = 0  # bytes of a page, if bytes can be copied out of a file's own pages; else 0
    threads: int = 2  # how many threads read at once

    @property
    def is_single(self) -> bool:
        """Whether one thread reads everything."""
        return self.threads == 1 and not self.is_far

    @property
    def max_gap(self) -> int:
        """Bytes that are cheaper to read over than to leave out, within a read."""
        return FAR_GAP if self.is_far else max(self.page_bytes - 1, _NEAR_GAP)


@attrs.frozen(eq=False)
class Requested:
    """The byte ranges of some blocks, in order of place; one row a range."""

    block: Ints  # which of the blocks it is a range of, by position in what was asked for
    start: Ints  # where it starts in the file, in bytes
    length: Ints  # how long it is, in bytes
    into: Ints  # where it goes in what is fetched for the block, laid end to end, in bytes
    request: Ints  # which request brings it. The gaps between ranges of one request are read over


@attrs.frozen(eq=False, repr=False, slots=False)
class FetchPlan(Printed):
    """What a load fetches, hashes and delivers. Columns have one row a block."""

    places: ChunkPlaces  # where the chunks lie
    reads: BoxReads  # what is read of them
    access: Access  # how files can be read
    hashed: Flags  # per read, whether its blocks are hashed
    strides: Ints  # per read, how many elements of the file a step along each axis skips
    axis: Ints  # per read, the axis from which on it is fetched as one range, gaps and all
    block_bytes: int  # the most bytes of a block
    blocks: Blocks  # the blocks, each a box of a read
    start: Ints  # where a block's first byte lies in its file
    into: Ints  # where that byte goes in the read's box, laid out row-major
    nbytes: Ints  # how many bytes of it are wanted
    span: Ints  # how many bytes each of its ranges has
    ranges: Ints  # how many ranges it has
    plain: Flags  # whether it is one range that goes into one range of memory as it is
    mapped: Flags  # whether it is copied out of the file's own pages
    unit: Ints  # the first block of its unit: blocks of one unit are hashed as one
    large: Flags  # whether it is hashed piece by piece while it is read, being part of a large unit
    tasks: tuple[Ints, ...]  # the blocks that one thread fetches at a time, in order

    @property
    def chunk(self) -> Ints:
        """The chunk of each block."""
        chunk: Ints = self.reads.chunk[self.blocks.box]
        return chunk

    @cached_property
    def chunk_blocks(self) -> list[int]:
        """How many blocks each chunk is hashed in."""
        extents = self.places.extents
        reach = reach_of(extents, self.places.itemsize, self.block_bytes)
        counts: list[int] = blocks_along(extents, reach).prod(axis=1).tolist()
        return counts

    @cached_property
    def file(self) -> Ints:
        """The file of each block."""
        file: Ints = self.places.file[self.chunk]
        return file

    def cost(self, task: Ints) -> int:
        """Return how many bytes a task may hold: plain blocks need no memory but the tensors'."""
        rough = task[~self.plain[task]]
        fetched = (self.span[rough] + _RANGE) * self.ranges[rough]
        return int((fetched + self.nbytes[rough]).sum())

    def byte_ranges(self, blocks: Ints) -> ByteRanges:
        """Return the byte ranges of some blocks, by block, then by place in the block's box."""
        box = self.blocks.box[blocks]
        width = self.places.itemsize[self.reads.chunk[box]]
        sizes, strides = self.blocks.sizes[blocks], self.strides[box]
        return box_ranges(self.start[blocks], sizes, strides, self.axis[box], width)

    def request(self, blocks: Ints) -> Requested:
        """Return the byte ranges of some blocks of one file, joined into requests."""
        found = self.byte_ranges(blocks)
        if (found.start[1:] == (found.start + found.length)[:-1]).all():  # one range, mostly
            together = np.zeros_like(found.start)
            return Requested(found.read, found.start, found.length, found.into, together)
        far = self.access.is_far
        requests = coalesce(
            np.zeros_like(found.start),
            found.start,
            found.length,
            max_gap=FAR_GAP if far else WIDE_GAP,
            max_waste=np.inf if far else WASTE,
        )
        order = np.argsort(found.start, kind="stable")
        columns = (found.read, found.start, found.length, found.into, requests.members)
        return Requested(*(column[order] for column in columns))

    def staged_strides(self, block: int) -> list[int]:
        """Return how far apart a block's elements are once its ranges lie end to end."""
        read = int(self.blocks.box[block])
        strides: list[int] = self.strides[read].tolist()
        step = int(self.span[block] // self.places.itemsize[self.reads.chunk[read]])
        for axis in reversed(range(int(self.axis[read]))):
            strides[axis], step = step, step * int(self.blocks.sizes[block, axis])
        return strides

    @property
    def _sheet(self) -> Sheet:
        title = (
            f"fetch {human_bytes(self.nbytes.sum())} in {counted(len(self.blocks), 'block')}, "
            f"{counted(int(self.ranges.sum()), 'range')}, {counted(len(self.tasks), 'task')}"
        )
        head = ("task", "file", "from byte", "to byte", "blocks", "ranges", "bytes", "hashed")
        return listing(title, head, self._rows(), len(self.tasks))

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for number, task in enumerate(self.tasks[:_SHOWN]):
            found = self.byte_ranges(task)
            yield (
                number,
                int(self.file[task[0]]),
                int(found.start.min()),
                int((found.start + found.length).max()),
                len(task),
                len(found),
                int(self.nbytes[task].sum()),
                int(self.hashed[self.blocks.box[task]].sum()),
            )


def fetch_plan(
    places: ChunkPlaces,
    reads: BoxReads,
    access: Access | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    hash_parts: bool = False,
) -> FetchPlan:
    """Plan how boxes of saved chunks are fetched.

    Args:
        places: Where the chunks lie.
        reads: What to read of them.
        access: How files can be read; by default, as if by a system call per range.
        block_bytes: The most bytes of a block that chunks were hashed with.
        hash_parts: Whether to hash blocks that are read whole, though their chunk is not.

    Rows 2 to 5 of a chunk of 8 rows of 16 bytes, in blocks of two rows:

    >>> row = lambda *n: np.array([n])
    >>> places = ChunkPlaces(*map(np.array, ([0], [100], [4], [[8, 4]], [True])))
    >>> reads = BoxReads(np.array([0]), row(2, 0), row(4, 4), row(1, 1), np.array([True]))
    >>> fetch_plan(places, reads, block_bytes=32, hash_parts=True)
    fetch 64 B in 2 blocks, 2 ranges, 1 task
    task  file  from byte  to byte  blocks  ranges  bytes  hashed
       0     0        132      196       2       2     64       2
    """
    access = access or Access()
    width, extents = places.itemsize[reads.chunk], places.extents[reads.chunk]
    hashed = _hashed(places, reads, block_bytes, hash_parts)
    strides = steps(extents) * reads.step
    axis = range_axis(reads.lengths, strides, width, access.max_gap, 2 * WASTE)
    blocks = _blocks(reads, hashed, strides, axis, width, extents, block_bytes)
    box, sizes = blocks.box, blocks.sizes
    inside = np.arange(sizes.shape[1]) >= axis[box][:, None]
    span = (np.where(inside, (sizes - 1) * strides[box], 0).sum(axis=1) + 1) * width[box]
    ranges = np.where(inside, 1, sizes).prod(axis=1)
    nbytes = sizes.prod(axis=1) * width[box]
    place = (reads.offsets * steps(extents))[box] + blocks.offsets * strides[box]
    start = places.begin[reads.chunk[box]] + place.sum(axis=1) * width[box]
    into = (blocks.offsets * steps(reads.lengths)[box]).sum(axis=1) * width[box]
    plain = reads.direct[box] & (ranges == 1) & (span == nbytes)
    many = (ranges >= _MANY) & (span < _SHORT)
    mapped = ~plain & (many | (span * ranges > nbytes)) & (access.page_bytes > 0)
    unit = _units(reads.chunk[box], blocks.number, hashed[box])
    large = np.zeros(len(box), bool)
    if access.is_local:
        rough = np.bincount(unit, ~plain)[unit] > 0
        large = hashed[box] & ~rough & (np.bincount(unit, nbytes)[unit] > PIECE_BYTES)
    size = np.maximum(span, SMALL * (ranges > 1)) * ranges
    if access.is_single:  # large units take no memory, and mapped blocks little
        size = np.where(large, 0, np.where(mapped, size // _MAPPED, size))
    tasks = _tasks(places.file[reads.chunk[box]], start, unit, size)
    return FetchPlan(
        places=places,
        reads=reads,
        access=access,
        hashed=hashed,
        strides=strides,
        axis=axis,
        block_bytes=block_bytes,
        blocks=blocks,
        start=start,
        into=into,
        nbytes=nbytes,
        span=span,
        ranges=ranges,
        plain=plain,
        mapped=mapped,
        unit=unit,
        large=large,
        tasks=tasks,
    )


def _hashed(places: ChunkPlaces, reads: BoxReads, block_bytes: int, hash_parts: bool) -> Flags:
    """Return True for reads that fill a chunk with a checksum, or (if asked) blocks of it."""
    rows = np.flatnonzero((reads.step == 1).all(axis=1) & places.summed[reads.chunk])
    chunk = reads.chunk[rows]
    boxes = (chunk, reads.offsets[rows], reads.lengths[rows], places.extents[chunk])
    whole = fills_chunks(*boxes)
    if hash_parts and not whole.all():
        parts = whole_blocks(*boxes, places.itemsize[chunk], block_bytes)
        whole |= parts & ~np.isin(chunk, chunk[whole])
    hashed = np.zeros(len(reads.chunk), bool)
    hashed[rows[whole]] = True
    return hashed


def _blocks(
    reads: BoxReads,
    hashed: Flags,
    strides: Ints,
    axis: Ints,
    itemsize: Ints,
    extents: Ints,
    block_bytes: int,
) -> Blocks:
    """Cut reads into blocks: where their chunk's end if they are hashed; else by fetched bytes."""
    lengths, width = reads.lengths.copy(), itemsize.copy()  # as if gaps were elements, too
    inside = np.arange(lengths.shape[1]) >= axis[:, None]  # axes of one range
    last = inside[:, -1]
    width[last] *= strides[last, -1]
    pitch = -(-strides[:, :-1] // strides[:, 1:])
    lengths[:, 1:] = np.where(inside[:, :-1], np.maximum(pitch, lengths[:, 1:]), lengths[:, 1:])
    span = np.where(inside, (reads.lengths - 1) * strides, 0).sum(axis=1) + 1
    least = min(SMALL, max(block_bytes >> 12, 1))  # so that ranges are not too many
    width *= np.maximum(least // (span * itemsize), 1)
    return cut_blocks(
        reads.lengths,
        np.where(hashed, itemsize, width),
        block_bytes,
        offsets=np.where(hashed[:, None], reads.offsets, 0),
        extents=np.where(hashed[:, None], extents, lengths),
    )


def _units(chunk: Ints, number: Ints, hashed: Flags) -> Ints:
    """Return the first block of each block's unit; a block that is not hashed is alone."""
    unit, rows = np.arange(len(chunk)), np.flatnonzero(hashed)
    key = chunk[rows] * (int(number.max(initial=0)) + 1) + number[rows]
    _, first, same = numbered(key)
    unit[rows] = rows[first][same]
    return unit


def _tasks(file: Ints, start: Ints, unit: Ints, size: Ints) -> tuple[Ints, ...]:
    """Group blocks in order of place: one file to a task, and whole units."""
    place = np.full(len(unit), np.iinfo(np.int64).max)  # of a unit
    np.minimum.at(place, unit, start)
    order = np.lexsort((start, unit, place[unit], file))
    size = size[order]
    limit = max(int(size.max()), BLOCK_BYTES)
    group = (np.cumsum(size) - size) // limit + np.arange(len(order)) // _TASK_BLOCKS
    leads = np.diff(unit[order], prepend=-1) != 0
    group = group[np.maximum.accumulate(np.where(leads, np.arange(len(order)), 0))]
    new = (np.diff(group) != 0) | (np.diff(file[order]) != 0)
    return tuple(np.split(order, np.flatnonzero(new) + 1))
