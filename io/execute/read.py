"""Carry out the reads of a load plan, straight into the tensors they fill.

`Reader` asks the `Source` where the chunks lie that are read, has `fetch_plan` decide which bytes
to fetch and hash in which order, and compares checksums. Threads of its pool carry out the tasks
of that plan with a `_Fetch`: they read ranges, hash them, and deliver them to tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import LoadItemType, itemsize
from shardplan.planning.columns import Ints, ReadItems, column, numbered, padded
from shardplan.planning.geometry import pad
from shardplan.planning.storage import (
    BLOCK_BYTES,
    FAR_GAP,
    PIECE_BYTES,
    SMALL,
    Access,
    BoxReads,
    ChunkPlaces,
    FetchPlan,
    Requested,
    fetch_plan,
    find_chunks,
)

from ..checksums import BlockSums
from ..errors import FormatError, LoadError, listed
from ..formats.base import ChunkPlace, Source
from ..pool import Pool, Progress, default_pool, own_processors
from ..stores.base import Store, StoreError
from ..stores.local_files import PAGE
from ..tensors import (
    box_view,
    fill_from_bytes,
    flat_memory,
    is_plain,
    run_bytes,
    runs,
    same_dtype,
)

__all__ = ["ReadStats", "Reader", "places_of"]


@attrs.frozen
class ReadStats:
    """What a load took.

    Attributes:
        bytes_needed: Bytes of the elements that were wanted.
        bytes_read: Bytes that were fetched for them, headers left out.
        requests: How many ranges were asked for.
        verified: How many chunks were read whole, by one read or by several, and found to fit their
            checksums.
        unverified: Bytes that were wanted and not compared with any checksum.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    verified: int = 0
    unverified: int = 0

    def __add__(self, other: ReadStats) -> ReadStats:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return ReadStats(*(mine + theirs for mine, theirs in pairs))

    @property
    def amplification(self) -> float:
        """How many bytes were fetched for each byte that was needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


class Reader:
    """Reads one checkpoint, of any format.

    Args:
        source: The checkpoint; see `open_source`.
        pool: The threads and the memory budget to use.
    """

    def __init__(self, source: Source, pool: Pool | None = None) -> None:
        self.source = source
        self.store = source.store
        self.metadata = source.metadata
        self.pool = pool or default_pool()

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value.

        Raises:
            FormatError: It is damaged.
        """
        return self.source.value(name, verify=verify)

    def values(self, names: Sequence[tuple[str, str]], *, verify: bool = True) -> dict[str, Any]:
        """Return new values by name in the state dict, given also the names in the checkpoint."""
        found = self.pool.map(
            lambda pair: self.value(pair[1], verify=verify),
            names,
            nbytes=lambda pair: self.source.value_cost(pair[1]),
        )
        return dict(zip((dest for dest, _ in names), found, strict=True))

    def fill(
        self,
        items: ReadItems,
        dest: Callable[[int], torch.Tensor],
        *,
        step: Sequence[int] = (),
        verify: bool = True,
        sums: BlockSums | None = None,
        progress: Progress | None = None,
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; non-tensor values are left out.
            dest: Given the row of a read, the tensor of just its box to fill.
            step: Along each axis, read every so many-th element from where a read begins.
            verify: Whether to check every chunk that is read whole, by one read or by several that
                bring one range of it each.
            sums: Gets the checksums of blocks that are read whole, of chunks that are not.
            progress: Gets the bytes that were wanted, as they come.

        Raises:
            PlanError: A read is not of a saved chunk; nothing was changed.
            FormatError: A file is damaged; the error says which keys were filled.
            LoadError: Anything else went wrong half way; the error says which keys were filled.
        """
        rows = np.flatnonzero((items.type == LoadItemType.TENSOR.value) & (items.numel > 0))
        if not len(rows):
            return ReadStats()
        wanted = items.take(rows)
        chunks = _chunks(self.source, wanted, find_chunks(self.metadata, wanted), verify)
        reads, dests = _reads(wanted, chunks, [dest(row) for row in rows.tolist()], step)
        plan = fetch_plan(
            chunks.places,
            reads,
            _access(self.store),
            block_bytes=self.source.block_bytes,
            hash_parts=sums is not None,
        )
        fetch = _Fetch(self.source, plan, dests, progress)
        names = [items.names[i] for i in wanted.dest.tolist()]
        try:
            self.pool.map(
                fetch.run,
                plan.tasks,
                nbytes=lambda task: plan.cost(task) + self.store.staging,
                here=plan.access.is_single or (plan.access.is_far and len(plan.tasks) == 1),
            )
        except Exception as error:
            filled, touched = _progress(plan, fetch, names)
            bad = _keys_of(self._misfits(_digests(plan, fetch), plan, chunks), plan, names)
            raise _stopped(error, filled - bad, touched | (filled & bad)) from error
        found = _digests(plan, fetch)
        damaged = self._misfits(found, plan, chunks)
        if damaged:
            raise self._damaged(damaged, plan, chunks, names)
        parts = {c: seen for c, seen in found.items() if len(seen) < plan.chunk_blocks[c]}
        nbytes = _hashed_bytes(plan)
        if sums is not None:
            for chunk, seen in parts.items():
                sums.add(*chunks.names[chunk], plan.chunk_blocks[chunk], seen, int(nbytes[chunk]))
        verified = found.keys() - parts
        needed = int(plan.nbytes.sum())
        unverified = needed - int(nbytes[list(verified)].sum())
        return ReadStats(needed, fetch.bytes_read, fetch.requests, len(verified), unverified)

    def _misfits(
        self, found: dict[int, dict[int, int]], plan: FetchPlan, chunks: _Chunks
    ) -> list[int]:
        """Return the chunks whose blocks were all hashed, and whose checksum differs."""
        combine = self.source.checksum.combine
        return [
            chunk
            for chunk, seen in found.items()
            if len(seen) == plan.chunk_blocks[chunk]
            and combine([*seen.values()]) != chunks.sums[chunk]
        ]

    def _damaged(
        self, damaged: list[int], plan: FetchPlan, chunks: _Chunks, names: list[str]
    ) -> FormatError:
        places = plan.places
        texts = []
        for chunk in damaged:
            first = int(places.begin[chunk])
            end = first + int(places.extents[chunk].prod() * places.itemsize[chunk])
            texts.append(f"`{chunks.names[chunk][0]}` (bytes {first:,} to {end:,})")
        bad = _keys_of(damaged, plan, names)
        files = sorted({self.source.files[number] for number in places.file[damaged].tolist()})
        return FormatError(
            listed(files, quote=""),
            f"checksums do not fit: {listed(texts, quote='')}; this copy is damaged: use another, "
            "and see what verify says of it",
            filled=set(names) - bad,
            touched=bad,
        )


@attrs.frozen(eq=False)
class _Chunks:
    """The chunks that some reads are of.

    Attributes:
        names: Each by its tensor's name and its number among the tensor's chunks.
        spots, places: Where each lies.
        sums: What its checksum must be; None if that is not checked.
        of_read: The chunk of each read.
    """

    names: list[tuple[str, int]]
    spots: list[ChunkPlace]
    places: ChunkPlaces
    sums: list[int | None]
    of_read: Ints


def _chunks(source: Source, items: ReadItems, number: Ints, verify: bool) -> _Chunks:
    """Find the chunks of some reads, given the number of each among its tensor's."""
    keys = list(zip(items.storage.tolist(), number.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    names = [(items.names[name], chunk) for name, chunk in distinct]
    spots = source.find_chunks(names)
    sums: list[int | None] = [None] * len(names)
    if verify:
        sums = source.chunk_sums(names)
    places = places_of(spots, max(items.lengths.shape[1], 1), [s is not None for s in sums])
    return _Chunks(names, spots, places, sums, column([distinct[key] for key in keys]))


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


def _access(store: Store) -> Access:
    return Access(
        is_far=bool(store.staging),
        is_local=store.locate() is not None,
        page_bytes=PAGE if store.can_map else 0,
        threads=own_processors(),
    )


def _reads(
    items: ReadItems, chunks: _Chunks, tensors: list[torch.Tensor], step: Sequence[int]
) -> tuple[BoxReads, list[_Dest]]:
    """Return reads in the order of axes in which chunks are stored, and what each fills."""
    axes = max(items.lengths.shape[1], 1)
    lengths, offsets = pad(items.lengths, axes, 1), pad(items.storage_offsets, axes, 0)
    steps = np.ones_like(lengths)
    if any(one > 1 for one in step):
        steps[:, : len(step)] = step
        lengths = -(-lengths // steps)
        steps[lengths == 1] = 1
    spots = [chunks.spots[chunk] for chunk in chunks.of_read.tolist()]
    if any(spot.axes is not None for spot in chunks.spots):
        lengths, offsets = lengths.copy(), offsets.copy()
        for row, spot in enumerate(spots):
            if spot.axes is not None:
                tensors[row] = tensors[row].permute(spot.axes)
                order = [*spot.axes, *range(len(spot.axes), axes)]
                for one in (lengths, offsets, steps):
                    one[row] = one[row][order]
    dests = [_Dest(tensor, spot.dtype) for tensor, spot in zip(tensors, spots, strict=True)]
    direct = np.array([is_plain(dest.tensor, dest.dtype) for dest in dests], bool)
    return BoxReads(chunks.of_read, offsets, lengths, steps, direct), dests


def _digests(plan: FetchPlan, fetch: _Fetch) -> dict[int, dict[int, int]]:
    """Return the checksums of all blocks that were hashed, by number, by chunk.

    A chunk is left out if any part of it that was asked for did not come.
    """
    came = np.ones(len(plan.places.file), bool)
    came[plan.chunk[~fetch.done]] = False
    hashed = np.flatnonzero(plan.hashed[plan.blocks.box] & came[plan.chunk])
    blocks = hashed[numbered(plan.unit[hashed])[1]]  # one of each unit
    chunk, number = plan.chunk[blocks], plan.blocks.number[blocks]
    order = np.lexsort((number, chunk))
    digests = fetch.digests[plan.unit[blocks]]
    found: dict[int, dict[int, int]] = {}
    columns = (chunk[order].tolist(), number[order].tolist(), digests[order].tolist())
    for which, block, digest in zip(*columns, strict=True):
        found.setdefault(which, {})[block] = digest
    return found


def _hashed_bytes(plan: FetchPlan) -> Ints:
    """Return how many bytes of each chunk are hashed."""
    hashed = plan.hashed[plan.blocks.box]
    nbytes = np.zeros(len(plan.places.file), np.int64)
    np.add.at(nbytes, plan.chunk[hashed], plan.nbytes[hashed])
    return nbytes


def _keys_of(chunks: list[int], plan: FetchPlan, names: list[str]) -> set[str]:
    """Return the keys that are filled from some chunks."""
    return {names[row] for row in np.flatnonzero(np.isin(plan.reads.chunk, chunks)).tolist()}


def _progress(plan: FetchPlan, fetch: _Fetch, names: list[str]) -> tuple[set[str], set[str]]:
    """Return the keys whose blocks are all done, and those of which some were begun."""
    boxes: Ints = plan.blocks.box
    unfinished = {names[box] for box in boxes[~fetch.done].tolist()}
    begun = {names[box] for box in boxes[fetch.begun].tolist()}
    return begun - unfinished, begun & unfinished


def _stopped(error: Exception, filled: set[str], touched: set[str]) -> Exception:
    if isinstance(error, StoreError) and error.kind in ("missing", "short"):
        name = str(error.url).replace("\\", "/").rpartition("/")[2]
        return FormatError(name, error.reason, filled=filled, touched=touched)
    if isinstance(error, FormatError):
        return FormatError(error.file, error.reason, filled=filled, touched=touched)
    return LoadError(f"the load failed: {error}", filled, touched)


Range = tuple[int, memoryview]
Views = list[memoryview]


@attrs.frozen(eq=False)
class _Dest:
    """What a read fills.

    Attributes:
        tensor: A tensor of just the read's box, its axes in the order in which they are stored.
        dtype: What the elements are stored as.
    """

    tensor: torch.Tensor
    dtype: str


class _Fetch:
    """Carries out the tasks of a plan, on any number of threads.

    Args:
        source: Where from.
        plan: What to fetch.
        dests: What each of its reads fills.
        progress: Gets the bytes that were wanted, as they come.

    Attributes:
        digests: The checksums of hashed units, by the unit's first block.
        begun, done: Which blocks may have been written to, and which are complete.
        bytes_read, requests: What was asked of the store.
    """

    def __init__(
        self, source: Source, plan: FetchPlan, dests: Sequence[_Dest], progress: Progress | None
    ) -> None:
        self._source, self._store = source, source.store
        self._plan, self._dests, self._progress = plan, dests, progress
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = len(plan.tasks) if plan.access.is_far else plan.access.threads
        self._turn = threading.Semaphore(max(turns, 1))
        columns = (plan.blocks.box, plan.into, plan.nbytes)
        self._places = np.stack(columns, axis=1)  # one row a block
        self.digests = np.zeros(len(plan.blocks), np.uint64)
        self.begun = np.zeros(len(plan.blocks), bool)
        self.done = np.zeros(len(plan.blocks), bool)
        self.bytes_read = 0
        self.requests = 0

    def run(self, task: Ints) -> None:
        """Fetch the blocks of one task."""
        plan = self._plan
        file, large = self._source.files[plan.file[task[0]]], plan.large[task]
        with self._turn:
            if large.any():
                self._read_large(file, task[large])
            rest = task[~large]
            if len(rest):
                self.begun[rest] = True
                self._read_together(file, rest)
                self.done[rest] = True
                self._report(int(plan.nbytes[rest].sum()))

    def _read_large(self, file: str, blocks: Ints) -> None:
        """Read blocks of large units, and hash every piece while it is in the cache."""
        plan = self._plan
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
                    state = self._source.checksum.start()
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

    def _read_together(self, file: str, task: Ints) -> None:
        """Read many blocks at once; then deliver and hash each of them."""
        plan = self._plan
        plain, mapped = plan.plain[task], plan.mapped[task]
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
        self._hash(blocks, views)

    def _copy_mapped(self, file: str, blocks: Ints) -> None:
        """Bring blocks to where they belong, out of the file's own pages."""
        plan, ranges = self._plan, self._plan.byte_ranges(blocks)
        first = int(ranges.start.min())
        edges = np.searchsorted(ranges.read, np.arange(len(blocks) + 1)).tolist()
        with self._store.mapped(file, ranges.start, ranges.length) as found:
            for number, block in enumerate(blocks.tolist()):
                low, last = int(ranges.start[edges[number]]), edges[number + 1] - 1
                high = int(ranges.start[last] + ranges.length[last])
                tensor, dtype = _box(plan, self._dests, block)
                in_file = plan.strides[plan.blocks.box[block]].tolist()
                fill_from_bytes(tensor, found[low - first : high - first], dtype, in_file)
        self._count(len(blocks), int(plan.nbytes[blocks].sum()))

    def _hash(self, blocks: Ints, views: list[Views]) -> None:
        """Hash the units among some blocks, given the memory of each block."""
        plan = self._plan
        rows = np.flatnonzero(plan.hashed[plan.blocks.box[blocks]])
        rows = rows[np.argsort(plan.start[blocks[rows]], kind="stable")]
        units: dict[int, Views] = {}
        for row, unit in zip(rows.tolist(), plan.unit[blocks[rows]].tolist(), strict=True):
            units[unit] = units[unit] + views[row] if unit in units else views[row]
        digest = self._source.checksum.of
        self.digests[list(units)] = [digest(found) for found in units.values()]

    def _own_memory(self, blocks: Ints) -> Views:
        """Return the tensors' own memory that plain blocks go into."""
        found = []
        for read, low, size in self._places[blocks].tolist():
            view = flat_memory(self._dests[read].tensor)
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
class _Staged:
    """A block that cannot be read into its tensor's memory as it is.

    Attributes:
        views: Where its ranges are read to, end to end: the tensor's own runs, or other memory.
        tensor, dtype: What it fills.
        staged: That other memory, if any.
        strides: How far apart its elements are there, if gaps are read as well.
    """

    views: Views
    tensor: torch.Tensor
    dtype: str
    staged: npt.NDArray[np.uint8] | None = None
    strides: Sequence[int] | None = None

    @classmethod
    def of(cls, plan: FetchPlan, dests: Sequence[_Dest], block: int) -> _Staged:
        tensor, dtype = _box(plan, dests, block)
        span, nbytes = int(plan.span[block]), int(plan.ranges[block] * plan.span[block])
        strides = plan.staged_strides(block) if nbytes > plan.nbytes[block] else None
        run = 0 if strides is not None else min(span, _direct_bytes(tensor, dtype))
        whole = flat_memory(tensor) if run else None
        if whole is not None:
            return cls(_slices(whole, run), tensor, dtype)
        if run >= SMALL:
            return cls(runs(tensor, run), tensor, dtype)
        staged = np.empty(nbytes, np.uint8)
        return cls(_slices(staged.data, span), tensor, dtype, staged, strides)

    def deliver(self) -> None:
        """Bring what was read to where it belongs."""
        if self.staged is not None:
            fill_from_bytes(self.tensor, self.staged, self.dtype, self.strides)


def _box(plan: FetchPlan, dests: Sequence[_Dest], block: int) -> tuple[torch.Tensor, str]:
    """Return the part of a tensor that a block fills, and what the block is stored as."""
    dest, blocks = dests[plan.blocks.box[block]], plan.blocks
    offsets, sizes = blocks.offsets[block].tolist(), blocks.sizes[block].tolist()
    return box_view(dest.tensor, offsets, sizes), dest.dtype


def _direct_bytes(tensor: torch.Tensor, dtype: str) -> int:
    """Return how long the runs of a tensor's memory are that can be read into; or 0."""
    if tensor.device.type != "cpu" or not same_dtype(tensor, dtype):
        return 0
    return 0 if tensor.is_conj() or tensor.is_neg() else run_bytes(tensor)


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
