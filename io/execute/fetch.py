"""Carry out the tasks of a `FetchPlan`: read ranges, hash them, and deliver them to tensors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import itemsize
from shardplan.planning.columns import Ints, ReadItems, column, numbered, padded
from shardplan.planning.storage import (
    BLOCK_BYTES,
    FAR_GAP,
    PIECE_BYTES,
    SMALL,
    ChunkPlaces,
    FetchPlan,
    Requested,
    group_blocks,
)

from ..checksums import BlockSums
from ..errors import FormatError, LoadError
from ..formats.base import ChunkPlace, Source
from ..pool import Progress
from ..stores.base import StoreError
from ..tensors import direct_bytes, flat_memory, is_plain, memory_runs
from ..windows import Window

__all__ = ["Chunks", "Dests", "Fetch", "chunks_of", "places_of", "stopped_error"]

_SMALLEST: Final = 1 << 14  # bytes of a block that is copied rather than read by itself
_BUFFER: Final = 1 << 20  # bytes that are read to be copied, while they are in the cache
_MANY: Final = 8  # blocks for each read, from which on that pays
Range = tuple[int, memoryview]
Views = list[memoryview]


@attrs.frozen(eq=False)
class Chunks:
    """The chunks that some reads touch.

    Attributes:
        names: Each by its tensor's name and its number among the tensor's chunks.
        spots, places: Where each lies.
        of_read: The chunk of each read.
    """

    names: list[tuple[str, int]]
    spots: list[ChunkPlace]
    places: ChunkPlaces
    of_read: Ints


def chunks_of(source: Source, items: ReadItems, number: Ints, verify: bool) -> Chunks:
    """Find the chunks of some reads, given the number of each among its tensor's."""
    keys = list(zip(items.storage.tolist(), number.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    names = [(items.names[name], chunk) for name, chunk in distinct]
    spots = source.find_chunks(names)
    sums = source.chunk_sums(names) if verify else [None] * len(names)
    places = places_of(spots, max(items.lengths.shape[1], 1), [s is not None for s in sums])
    return Chunks(names, spots, places, column([distinct[key] for key in keys]))


def places_of(spots: Sequence[ChunkPlace], axes: int, summed: Sequence[bool]) -> ChunkPlaces:
    """Return where chunks lie, as columns of so many axes."""
    widths = {dtype: itemsize(dtype) for dtype in {spot.dtype for spot in spots}}
    return ChunkPlaces(
        file=column([spot.file for spot in spots]),
        begin=column([spot.begin for spot in spots]),
        itemsize=column([widths[spot.dtype] for spot in spots]),
        extents=padded([spot.extents for spot in spots], 1, axes),
        summed=np.array(summed, bool),
    )


@attrs.frozen(eq=False)
class Dests:
    """What reads fill, one after the other."""

    # The memory of just a read's box, its axes in the order in which they are stored.
    windows: Sequence[Window]
    dtypes: Sequence[str]  # what the elements are stored as

    @property
    def plain(self) -> list[bool]:
        """Whether each one's memory is the elements just as they are stored."""
        tensors = (window.tensor for window in self.windows)
        pairs = zip(tensors, self.dtypes, strict=True)
        return [tensor is not None and is_plain(tensor, dtype) for tensor, dtype in pairs]


class Fetch:
    """Carries out the tasks of a plan, on any number of threads; ``dests`` are filled by its reads.

    Attributes:
        digests: The checksums of hashed units, by the unit's first block.
        begun, done: Which blocks may have been written to, and which are complete.
        bytes_read, requests: What was asked of the store.
    """

    def __init__(
        self, source: Source, plan: FetchPlan, dests: Dests, progress: Progress | None
    ) -> None:
        self._source, self._store = source, source.store
        self._plan, self._dests, self._progress = plan, dests, progress
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = len(plan.tasks) if plan.access.is_far else plan.access.threads
        self._turn = threading.Semaphore(max(turns, 1))
        columns = (plan.blocks.box, plan.into, plan.nbytes)
        self._places = np.stack(columns, axis=1)  # one row a block
        alone = np.bincount(plan.unit, minlength=len(plan.blocks))[plan.unit] == 1
        self._small = alone & (plan.nbytes <= _SMALLEST) & (not plan.access.is_far)
        self.digests = np.zeros(len(plan.blocks), np.uint64)
        self.begun = np.zeros(len(plan.blocks), bool)
        self.done = np.zeros(len(plan.blocks), bool)
        self.bytes_read = 0
        self.requests = 0

    def run(self, task: Ints) -> None:
        """Fetch the blocks of one task."""
        plan = self._plan
        number, large = int(plan.file[task[0]]), plan.large[task]
        with self._turn:
            if large.any():
                self._read_large(number, task[large])
            rest = task[~large]
            if len(rest):
                self.begun[rest] = True
                self._read_together(number, rest)
                self.done[rest] = True
                self._report(int(plan.nbytes[rest].sum()))

    def sums(self, chunks: Chunks) -> BlockSums:
        """Return the checksums of blocks, for chunks whose wanted blocks all came."""
        plan = self._plan
        came = np.ones(len(plan.places.file), bool)
        came[plan.chunk[~self.done]] = False
        rows = np.flatnonzero(plan.hashed[plan.blocks.box] & came[plan.chunk])
        nbytes = np.bincount(plan.chunk[rows], plan.nbytes[rows], minlength=len(came)).tolist()
        rows = rows[numbered(plan.unit[rows])[1]]  # one of each unit
        sums, alone = BlockSums(), column(plan.chunk_blocks)[plan.chunk[rows]] == 1
        own, rows = rows[alone], rows[~alone]
        chosen = plan.chunk[own].tolist()
        keys, sizes = [chunks.names[chunk] for chunk in chosen], [int(nbytes[n]) for n in chosen]
        sums.add_whole(keys, self.digests[plan.unit[own]].tolist(), sizes)
        digests: dict[int, dict[int, int]] = {}
        columns = (plan.chunk[rows], plan.blocks.number[rows], self.digests[plan.unit[rows]])
        for chunk, block, digest in zip(*(c.tolist() for c in columns), strict=True):
            digests.setdefault(chunk, {})[block] = digest
        for chunk, found in digests.items():
            sums.add(chunks.names[chunk], plan.chunk_blocks[chunk], found, int(nbytes[chunk]))
        return sums

    def keys(
        self, names: Sequence[str], chunks: Chunks, damaged: Collection[tuple[str, int]]
    ) -> tuple[set[str], set[str]]:
        """Return the keys that were filled entirely from sound chunks, and those in part or badly.

        ``names`` has the key of each read.
        """
        plan = self._plan
        boxes: Ints = plan.blocks.box
        numbers = [number for number, chunk in enumerate(chunks.names) if chunk in damaged]
        bad_reads = np.flatnonzero(np.isin(plan.reads.chunk, numbers))
        bad = {names[box] for box in (*boxes[~self.done].tolist(), *bad_reads.tolist())}
        begun = {names[box] for box in boxes[self.begun].tolist()}
        return begun - bad, begun & bad

    def _read_large(self, number: int, blocks: Ints) -> None:
        """Read blocks of large units, and hash every piece while it is in the cache."""
        plan, file = self._plan, self._source.files[number]
        units = np.split(blocks, np.flatnonzero(np.diff(plan.unit[blocks])) + 1)
        groups = [
            [*zip(plan.start[unit].tolist(), self._own_memory(unit), strict=True)] for unit in units
        ]
        sizes = [sum([view.nbytes for _, view in ranges]) for ranges in groups]
        edges = np.cumsum([0, *map(len, units)])  # where the blocks of each unit begin
        begun, unreported, digests = 0, 0, list[int]()
        try:
            with closing(self._store.read_pieces(file, groups, PIECE_BYTES)) as each:
                for pieces, size in zip(each, sizes, strict=True):
                    begun += 1
                    state = self._source.checksum_in(number).start()
                    for piece in pieces:
                        state.update(piece)
                    digests.append(state.intdigest())
                    unreported += size
                    if unreported >= BLOCK_BYTES or begun == len(units):
                        self._report(unreported)
                        unreported = 0
        finally:
            done = len(digests)
            self.begun[blocks[: edges[begun]]] = True
            self.done[blocks[: edges[done]]] = True
            self.digests[plan.unit[blocks[edges[:done]]]] = digests
            self._count(sum(map(len, groups[:done])), sum(sizes[:done]))

    def _read_together(self, number: int, task: Ints) -> None:
        """Read many blocks at once; then deliver and hash each of them."""
        plan, file = self._plan, self._source.files[number]
        plain, mapped = plan.plain[task], plan.mapped[task]
        small = plain & ~mapped & self._small[task]
        runs = group_blocks(plan.start[task[small]], plan.nbytes[task[small]], max_bytes=_BUFFER)
        if len(runs) * _MANY <= int(small.sum()):
            self._copy_small(number, task[small], runs)
            plain, mapped, task = plain[~small], mapped[~small], task[~small]
        staged = [_Staged.of(plan, self._dests, block) for block in task[~plain & ~mapped].tolist()]
        views: list[Views] = [[view] for view in self._own_memory(task[plain])]
        views += [block.views for block in staged]
        blocks = np.concatenate((task[plain], task[~plain & ~mapped]))  # in the order of `views`
        if views:
            ranges = _ranges(plan.request(blocks), views)
            self._count(len(ranges), self._store.read(file, ranges))
        if mapped.any():
            self._copy_mapped(file, task[mapped])
        for block in staged:
            block.deliver()
        self._hash(number, blocks, views)

    def _copy_small(self, number: int, blocks: Ints, runs: Sequence[tuple[int, int]]) -> None:
        """Read runs of small blocks into a buffer; hash each, and copy it to where it belongs."""
        plan, file = self._plan, self._source.files[number]
        digest = self._source.checksum_in(number).of
        for low, high in runs:
            own = blocks[low:high]
            hashed = bool(plan.hashed[plan.blocks.box[own]].any())
            buffer = memoryview(bytearray(int(plan.nbytes[own].sum())))
            self._count(1, self._store.read(file, [(int(plan.start[own[0]]), buffer)]))
            at, digests = 0, list[int]()
            for view in self._own_memory(own):
                piece = buffer[at : at + len(view)]
                view[:] = piece
                at += len(view)
                digests.append(digest([piece]) if hashed else 0)
            self.digests[plan.unit[own]] = digests

    def _copy_mapped(self, file: str, blocks: Ints) -> None:
        """Bring blocks to where they belong, out of the file's own pages."""
        plan, ranges = self._plan, self._plan.byte_ranges(blocks)
        first = int(ranges.start.min())
        edges = np.searchsorted(ranges.read, np.arange(len(blocks) + 1)).tolist()
        with self._store.mapped(file, ranges.start, ranges.length) as found:
            for number, block in enumerate(blocks.tolist()):
                low, last = int(ranges.start[edges[number]]), edges[number + 1] - 1
                high = int(ranges.start[last] + ranges.length[last])
                in_file = plan.strides[plan.blocks.box[block]].tolist()
                dest = _Box.of(plan, self._dests, block)
                dest.fill(found[low - first : high - first], in_file)
        self._count(len(blocks), int(plan.nbytes[blocks].sum()))

    def _hash(self, number: int, blocks: Ints, views: list[Views]) -> None:
        """Hash the units among some blocks, given the memory of each block."""
        plan = self._plan
        rows = np.flatnonzero(plan.hashed[plan.blocks.box[blocks]])
        rows = rows[np.argsort(plan.start[blocks[rows]], kind="stable")]
        units: dict[int, Views] = {}
        for row, unit in zip(rows.tolist(), plan.unit[blocks[rows]].tolist(), strict=True):
            units[unit] = units[unit] + views[row] if unit in units else views[row]
        digest = self._source.checksum_in(number).of
        self.digests[list(units)] = [digest(found) for found in units.values()]

    def _own_memory(self, blocks: Ints) -> Views:
        """Return the tensors' own memory that plain blocks go into."""
        found = []
        for read, low, size in zip(*self._places[blocks].T.tolist(), strict=True):
            tensor = self._dests.windows[read].tensor
            view = None if tensor is None else flat_memory(tensor)
            assert view is not None
            found.append(view if len(view) == size else view[low : low + size])
        return found

    def _report(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.add(nbytes)

    def _count(self, requests: int, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            self.requests += requests


@attrs.frozen(eq=False)
class _Box:
    """What a block fills: a box of what its read fills."""

    window: Window
    dtype: str
    offsets: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(cls, plan: FetchPlan, dests: Dests, block: int) -> _Box:
        blocks, read = plan.blocks, plan.blocks.box[block]
        offsets, sizes = blocks.offsets[block].tolist(), blocks.sizes[block].tolist()
        return cls(dests.windows[read], dests.dtypes[read], offsets, sizes)

    def fill(self, data: npt.NDArray[np.uint8], strides: Sequence[int] | None = None) -> None:
        """Fill it from bytes as they are stored."""
        self.window.fill(self.offsets, self.sizes, data, self.dtype, strides)


@attrs.frozen(eq=False)
class _Staged:
    """A block that cannot be read into its tensor's memory as it is."""

    views: Views  # where its ranges are read to, end to end: the tensor's own runs, or other memory
    box: _Box  # what it fills
    staged: npt.NDArray[np.uint8] | None = None  # that other memory, if any
    # How far apart its elements are there, if gaps are read as well.
    strides: Sequence[int] | None = None

    @classmethod
    def of(cls, plan: FetchPlan, dests: Dests, block: int) -> _Staged:
        box = _Box.of(plan, dests, block)
        span, nbytes = int(plan.span[block]), int(plan.ranges[block] * plan.span[block])
        strides = plan.staged_strides(block) if nbytes > plan.nbytes[block] else None
        tensor = None if strides else box.window.box(box.offsets, box.sizes)
        run = 0 if tensor is None else min(span, direct_bytes(tensor, box.dtype))
        whole = None if tensor is None or not run else flat_memory(tensor)
        if whole is not None:
            return cls(_slices(whole, run), box)
        if tensor is not None and run >= SMALL:
            return cls(memory_runs(tensor, run), box)
        staged = np.empty(nbytes, np.uint8)
        return cls(_slices(staged.data, span), box, staged, strides)

    def deliver(self) -> None:
        """Bring what was read to where it belongs."""
        if self.staged is not None:
            self.box.fill(self.staged, self.strides)


def _slices(view: memoryview, length: int) -> Views:
    return [view[i : i + length] for i in range(0, len(view), length)]


def _ranges(wanted: Requested, views: list[Views]) -> list[Range]:
    """Return ranges and their memory in order of place; gaps to read over go to waste."""
    found, waste, end, last = list[Range](), None, 0, -1
    columns = (wanted.block, wanted.start, wanted.length, wanted.into, wanted.request)
    for block, start, length, into, request in zip(*(c.tolist() for c in columns), strict=True):
        if request == last and start > end:
            waste = memoryview(bytearray(FAR_GAP)) if waste is None else waste
            found.append((end, waste[: start - end]))
        end, last, mine = start + length, request, views[block]
        if len(mine) == 1:
            found.append((start, mine[0]))
            continue
        size = len(mine[0])
        pieces = mine[into // size : (into + length) // size]
        found += zip(range(start, end, size), pieces, strict=True)
    return found


def stopped_error(error: Exception, filled: Iterable[str], touched: Iterable[str]) -> Exception:
    """Return the error of a load that stopped half way, with the keys that it has changed."""
    if isinstance(error, StoreError) and error.kind in ("missing", "short"):
        name = str(error.url).replace("\\", "/").rpartition("/")[2]
        return FormatError(name, error.reason, filled=filled, touched=touched)
    if isinstance(error, FormatError):
        return FormatError(error.file, error.reason, filled=filled, touched=touched)
    return LoadError(f"the load failed: {error}", filled, touched)
