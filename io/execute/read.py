"""Carry out the reads of a load plan, straight into the tensors they fill.

`Reader` asks the `Source` where the chunks lie that are read, has `fetch_plan` decide which bytes
to fetch and hash in which order, and compares checksums. Threads of its pool carry out the tasks
of that plan with a `_Fetch`: they read ranges, hash them, and deliver them to tensors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import (
    LoadItemType,
    Quantized,
    QuantizedPart,
    TensorMetadata,
    every,
    itemsize,
    named_extras,
    quantized_parts,
)
from shardplan.planning.columns import Ints, ReadItems, column, numbered, padded
from shardplan.planning.geometry import pad
from shardplan.planning.storage import (
    BLOCK_BYTES,
    FAR_GAP,
    PIECE_BYTES,
    SMALL,
    Access,
    Box,
    BoxReads,
    ChunkPlaces,
    FetchPlan,
    Requested,
    fetch_plan,
    find_chunks,
    read_boxes,
)

from ..checksums import BlockSums, Proof, damage_error
from ..errors import FormatError, LoadError
from ..formats.base import ChunkPlace, Source
from ..optional import torch
from ..pool import Pool, Progress, default_pool, own_processors
from ..stores.base import Store, StoreError
from ..stores.local_files import PAGE
from ..tensors import (
    box_view,
    copy_elements,
    direct_bytes,
    empty_tensor,
    flat_memory,
    is_plain,
    runs,
    torch_dtype,
)
from ..windows import Window
from .dequantize import PART, PART_BYTES, dequantized_part

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
    """Reads one checkpoint, of any format, with the threads and the memory budget of a pool."""

    def __init__(self, source: Source, pool: Pool | None = None) -> None:
        self.source = source
        self.store = source.store
        self.metadata = source.metadata
        self.pool = pool or default_pool()

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; raise `FormatError` if it is damaged."""
        with named_extras(f"the value of `{name}`", with_torch=True):
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
        dest: Callable[[int], Window],
        *,
        step: Sequence[int] = (),
        verify: bool = True,
        sums: BlockSums | None = None,
        progress: Progress | None = None,
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; non-tensor values are left out.
            dest: Given the row of a read, the memory of just its box to fill.
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
        if self.source.quantized:
            return self._fill_dequantized(
                items.take(rows),
                lambda row: dest(int(rows[row])),
                step=step,
                verify=verify,
                sums=sums,
                progress=progress,
            )
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
            damaged = _collect(plan, fetch, chunks).compare(self.source)
            bad = _keys_of(damaged, plan, chunks, names)
            raise _stopped(error, filled - bad, touched | (filled & bad)) from error
        found = _collect(plan, fetch, chunks)
        damaged = found.compare(self.source)
        if damaged:
            bad = _keys_of(damaged, plan, chunks, names)
            raise damage_error(self.source, damaged, set(names) - bad, bad)
        if sums is not None:
            sums.take(found)
        needed = int(plan.nbytes.sum())
        unverified = needed - found.nbytes
        return ReadStats(needed, fetch.bytes_read, fetch.requests, found.verified, unverified)

    def _fill_dequantized(
        self,
        items: ReadItems,
        dest: Callable[[int], Window],
        *,
        step: Sequence[int],
        verify: bool,
        sums: BlockSums | None,
        progress: Progress | None,
    ) -> ReadStats:
        """Fill tensors from a checkpoint that stores some quantised; see `fill`."""
        stored, quantized = Reader(self.source.stored, self.pool), self.source.quantized
        kinds = [quantized.get(items.names[number]) for number in items.storage.tolist()]
        plain = np.array([kind is None for kind in kinds], bool)
        wanted = self._wanted(stored, items, kinds, verify)
        proof = Proof(stored.source)
        proof.begin(wanted.whole)

        def work(task: _Part) -> ReadStats:
            parts = [task.part.values, task.part.scales]
            reads, box = read_boxes(stored.metadata, parts)
            found = [empty_tensor(one.sizes, stored.dtype_of(one.name)) for one in parts]
            stats = stored.fill_boxes(found, reads, box, verify=verify, sums=proof.sums)
            for small in task.small_parts():
                boxes = zip(found, parts, [small.values, small.scales], strict=True)
                cut = [_box_within(tensor, whole, one) for tensor, whole, one in boxes]
                made = dequantized_part(task.kind, small, *cut).to(torch_dtype(task.dtype))
                picked = every(small.offsets, step)
                made = made[tuple(slice(one.first, None, one.step) for one in picked)]
                into = [one.into for one in picked]
                for mine, theirs in dest(task.row).pairs(into, made.shape, made):
                    copy_elements(mine, theirs)
                if progress is not None:
                    progress.add(made.numel() * itemsize(task.dtype))
            return stats

        rows = np.flatnonzero(plain)
        options: dict[str, Any] = {"verify": verify, "sums": sums, "progress": progress}
        first = stored.fill(items.take(rows), lambda n: dest(int(rows[n])), step=step, **options)
        tasks = self._parts(items, kinds, wanted.rows, stored.source.block_bytes)
        try:
            done = self.pool.map(work, tasks, nbytes=lambda task: task.cost)
            again = proof.sums.incomplete(wanted.whole)
            proof.settle(self.pool)
        except (FormatError, LoadError) as error:  # of memory that no state dict has
            touched = {items.names[number] for number in items.dest.tolist()}
            raise _stopped(error, set(), touched) from error
        if sums is not None:
            sums.take(proof.sums)
        fetched = ReadStats(0, sum(wanted.whole[key] for key in again), len(again))
        took = sum(done, fetched)
        matched = proof.sums.matched
        unverified = sum(size for key, size in wanted.nbytes.items() if key not in matched)
        return first + attrs.evolve(took, verified=len(matched), unverified=unverified)

    def _wanted(
        self, stored: Reader, items: ReadItems, kinds: Sequence[Quantized | None], verify: bool
    ) -> _Wanted:
        """Find what quantised tensors are read of."""
        each = list(self._parts(items, kinds))
        if not each:
            return _Wanted()
        boxes = [box for one in each for box in (one.part.values, one.part.scales)]
        reads, box = read_boxes(stored.metadata, boxes)
        chunks = _chunks(stored.source, reads, find_chunks(stored.metadata, reads), verify)
        nbytes = np.bincount(chunks.of_read, reads.numel * chunks.places.itemsize[chunks.of_read])
        sizes = np.array([spot.nbytes for spot in chunks.spots])
        whole = chunks.places.summed & (nbytes >= sizes)
        return _Wanted(
            {key: int(size) for key, size in zip(chunks.names, nbytes.tolist(), strict=True)},
            {chunks.names[number]: int(sizes[number]) for number in np.flatnonzero(whole).tolist()},
            {each[number // 2].row for number in box[whole[chunks.of_read]].tolist()},
        )

    def _parts(
        self,
        items: ReadItems,
        kinds: Sequence[Quantized | None],
        checked: Collection[int] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> Iterator[_Part]:
        """Yield the parts in which quantised tensors are read: one a row, if none is ``checked``.

        For rows that are checked, these are the blocks that have checksums.
        """
        starts = (items.storage_anchor + items.storage_offsets).tolist()
        columns = (starts, items.lengths.tolist(), items.ndim.tolist(), items.storage.tolist())
        for row, (start, sizes, axes, number) in enumerate(zip(*columns, strict=True)):
            kind, name = kinds[row], items.names[number]
            if kind is None:
                continue
            numel = math.prod(sizes[:axes])
            if checked is not None:
                packed = 2 if kind.kind == "mxfp4" else 1
                numel = max(PART, block_bytes * packed) if row in checked else PART
            for part in quantized_parts(kind, start[:axes], sizes[:axes], numel):
                yield _Part(row, kind, part, self.dtype_of(name))

    def stored_chunks(self, chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield the chunks, as they are stored, that some chunks come of; all of their scales."""
        entries = self.source.stored.metadata.state_dict_metadata
        for name, number in chunks:
            kind = self.source.quantized.get(name)
            if kind is None or kind.kind == "fp8":
                yield name, number
            for part in () if kind is None else (kind.scales, kind.values):
                entry = entries[part]
                if part != name and isinstance(entry, TensorMetadata):
                    yield from ((part, n) for n in range(len(entry.chunks)))

    def dtype_of(self, name: str) -> str:
        """Return what a tensor is stored as, or read as."""
        entries = self.metadata.state_dict_metadata
        return entries.props[int(entries.prop[entries.row_of[name]])].dtype

    def fill_boxes(
        self,
        tensors: Sequence[torch.Tensor],
        items: ReadItems,
        box: Ints,
        *,
        verify: bool = True,
        sums: BlockSums | None = None,
    ) -> ReadStats:
        """Fill a tensor per box, given the reads of `read_boxes` and the box of each."""

        def dest(row: int) -> Window:
            offsets, lengths = items.dest_offsets[row].tolist(), items.lengths[row].tolist()
            return Window.of(box_view(tensors[box[row]], offsets, lengths))

        return self.fill(items, dest, verify=verify, sums=sums)


@attrs.frozen
class _Part:
    """A part of what one read brings of a quantised tensor, and the dtype that it becomes."""

    row: int
    kind: Quantized
    part: QuantizedPart
    dtype: str

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes at most."""
        if self.part.numel <= PART:
            return PART_BYTES
        return (
            PART_BYTES + 4 * math.prod(self.part.scales.sizes) + math.prod(self.part.values.sizes)
        )

    def small_parts(self) -> Iterator[QuantizedPart]:
        """Yield the parts of it that are made at a time."""
        for one in quantized_parts(self.kind, self.part.start, self.part.sizes, PART):
            at = zip(self.part.offsets, one.offsets, strict=True)
            yield attrs.evolve(one, offsets=tuple(a + b for a, b in at))


@attrs.frozen
class _Wanted:
    """What the quantised tensors of a load are read of.

    Attributes:
        nbytes: Bytes that are wanted of each chunk as it is stored.
        whole: The bytes of each chunk that has a checksum and as many bytes of which are wanted. If
            reads overlap, it may not be wanted whole: it is compared all the same.
        rows: The reads that want anything of these.
    """

    nbytes: Mapping[tuple[str, int], int] = attrs.field(factory=dict)
    whole: Mapping[tuple[str, int], int] = attrs.field(factory=dict)
    rows: Collection[int] = ()


def _box_within(tensor: torch.Tensor, whole: Box, one: Box) -> torch.Tensor:
    """Return one box of a tensor that is another box."""
    at = [o - w for o, w in zip(one.offsets, whole.offsets, strict=True)]
    return box_view(tensor, at, one.sizes).contiguous()


@attrs.frozen(eq=False)
class _Chunks:
    """The chunks that some reads are of.

    Attributes:
        names: Each by its tensor's name and its number among the tensor's chunks.
        spots, places: Where each lies.
        of_read: The chunk of each read.
    """

    names: list[tuple[str, int]]
    spots: list[ChunkPlace]
    places: ChunkPlaces
    of_read: Ints


def _chunks(source: Source, items: ReadItems, number: Ints, verify: bool) -> _Chunks:
    """Find the chunks of some reads, given the number of each among its tensor's."""
    keys = list(zip(items.storage.tolist(), number.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    names = [(items.names[name], chunk) for name, chunk in distinct]
    spots = source.find_chunks(names)
    sums = source.chunk_sums(names) if verify else [None] * len(names)
    places = places_of(spots, max(items.lengths.shape[1], 1), [s is not None for s in sums])
    return _Chunks(names, spots, places, column([distinct[key] for key in keys]))


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
    items: ReadItems, chunks: _Chunks, windows: list[Window], step: Sequence[int]
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
                windows[row] = windows[row].permuted(spot.axes)
                order = [*spot.axes, *range(len(spot.axes), axes)]
                for one in (lengths, offsets, steps):
                    one[row] = one[row][order]
    dests = [_Dest(window, spot.dtype) for window, spot in zip(windows, spots, strict=True)]
    direct = np.array([dest.is_plain for dest in dests], bool)
    return BoxReads(chunks.of_read, offsets, lengths, steps, direct), dests


def _collect(plan: FetchPlan, fetch: _Fetch, chunks: _Chunks) -> BlockSums:
    """Return the checksums of all blocks that were hashed.

    A chunk is left out if any part of it that was asked for did not come.
    """
    came = np.ones(len(plan.places.file), bool)
    came[plan.chunk[~fetch.done]] = False
    rows = np.flatnonzero(plan.hashed[plan.blocks.box] & came[plan.chunk])
    nbytes = np.bincount(plan.chunk[rows], plan.nbytes[rows], minlength=len(came)).tolist()
    rows = rows[numbered(plan.unit[rows])[1]]  # one of each unit
    digests: dict[int, dict[int, int]] = {}
    columns = (plan.chunk[rows], plan.blocks.number[rows], fetch.digests[plan.unit[rows]])
    for chunk, block, digest in zip(*(c.tolist() for c in columns), strict=True):
        digests.setdefault(chunk, {})[block] = digest
    sums = BlockSums()
    for chunk, found in digests.items():
        sums.add(chunks.names[chunk], plan.chunk_blocks[chunk], found, int(nbytes[chunk]))
    return sums


def _keys_of(
    damaged: Iterable[tuple[str, int]], plan: FetchPlan, chunks: _Chunks, names: list[str]
) -> set[str]:
    """Return the keys that are filled from some chunks."""
    bad = set(damaged)
    numbers = [number for number, chunk in enumerate(chunks.names) if chunk in bad]
    return {names[row] for row in np.flatnonzero(np.isin(plan.reads.chunk, numbers)).tolist()}


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
        window: The memory of just the read's box, its axes in the order in which they are stored.
        dtype: What the elements are stored as.
    """

    window: Window
    dtype: str

    @property
    def is_plain(self) -> bool:
        """Whether the memory is the elements just as they are stored."""
        tensor = self.window.tensor
        return tensor is not None and is_plain(tensor, self.dtype)


class _Fetch:
    """Carries out the tasks of a plan, on any number of threads; ``dests`` are filled by its reads.

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
                in_file = plan.strides[plan.blocks.box[block]].tolist()
                dest = _Box.of(plan, self._dests, block)
                dest.fill(found[low - first : high - first], in_file)
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
            tensor = self._dests[read].window.tensor
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

    dest: _Dest
    offsets: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(cls, plan: FetchPlan, dests: Sequence[_Dest], block: int) -> _Box:
        blocks = plan.blocks
        offsets, sizes = blocks.offsets[block].tolist(), blocks.sizes[block].tolist()
        return cls(dests[blocks.box[block]], offsets, sizes)

    def fill(self, data: npt.NDArray[np.uint8], strides: Sequence[int] | None = None) -> None:
        """Fill it from bytes as they are stored."""
        self.dest.window.fill(self.offsets, self.sizes, data, self.dest.dtype, strides)


@attrs.frozen(eq=False)
class _Staged:
    """A block that cannot be read into its tensor's memory as it is.

    Attributes:
        views: Where its ranges are read to, end to end: the tensor's own runs, or other memory.
        box: What it fills.
        staged: That other memory, if any.
        strides: How far apart its elements are there, if gaps are read as well.
    """

    views: Views
    box: _Box
    staged: npt.NDArray[np.uint8] | None = None
    strides: Sequence[int] | None = None

    @classmethod
    def of(cls, plan: FetchPlan, dests: Sequence[_Dest], block: int) -> _Staged:
        box = _Box.of(plan, dests, block)
        span, nbytes = int(plan.span[block]), int(plan.ranges[block] * plan.span[block])
        strides = plan.staged_strides(block) if nbytes > plan.nbytes[block] else None
        tensor = None if strides else box.dest.window.box(box.offsets, box.sizes)
        run = 0 if tensor is None else min(span, direct_bytes(tensor, box.dest.dtype))
        whole = None if tensor is None or not run else flat_memory(tensor)
        if whole is not None:
            return cls(_slices(whole, run), box)
        if tensor is not None and run >= SMALL:
            return cls(runs(tensor, run), box)
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
