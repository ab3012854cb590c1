"""One thread's share of a load: fetch some blocks, hash them, deliver them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from shardplan.planning import coalesce
from shardplan.planning.catalog import column
from shardplan.planning.packing import Ints

from .arrays import memory, run_bytes, runs, same_dtype, store
from .arrays import window as box_of
from .checksums import hash_views
from .jobs import Job
from .local import LocalStore
from .stores import Store

__all__ = ["Fetch"]

_SMALL: Final = 1 << 12  # ranges shorter than this are read together and picked apart by numpy
_TINY_GAP: Final = 64  # bytes that are always cheaper to read over than to leave out
_MAX_GAP: Final = 1 << 16
_PIECE: Final = 1 << 19  # bytes that are still in a processor's own cache once they were read

Range = tuple[int, memoryview]


class Fetch:
    """Carries out a job's tasks, on any number of threads.

    Attributes:
        digests: The checksums of the job's units that are hashed, by unit.
        begun, done: Which blocks may have been written to, and which are complete.
        bytes_read, requests: What was asked of the store.
    """

    def __init__(self, source: Store, job: Job) -> None:
        self._store, self._job = source, job
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = len(job.tasks) if source.staging else _processors()
        self._turn = threading.Semaphore(max(turns, 1))
        columns = (job.blocks.box, job.first, job.into, job.block_bytes)
        self._places = np.stack(columns, axis=1)  # one row a block
        local = isinstance(source, LocalStore)
        self._large = _large(job) if local else np.zeros(len(job.blocks), bool)
        self.digests = np.zeros(len(job.blocks), np.uint64)
        self.begun = np.zeros(len(job.blocks), bool)
        self.done = np.zeros(len(job.blocks), bool)
        self.bytes_read = 0
        self.requests = 0

    def run(self, task: Ints) -> None:
        """Fetch some blocks of one file, given in order of place."""
        job = self._job
        file = job.files[job.file[job.blocks.box[task[0]]]]
        large, rest = self._large[task], task
        self.begun[task] = True
        with self._turn:
            if large.any():
                for unit in _alike(task[large], job.unit):
                    self._read_large(file, unit)
                rest = task[~large]
            if len(rest):
                self._read_together(file, rest)
        self.done[task] = True

    def _read_large(self, file: str, unit: Ints) -> None:
        """Read blocks that are hashed together, and hash every piece while it is in the cache."""
        assert isinstance(self._store, LocalStore)
        state, ranges = xxhash.xxh3_64(), self._plain_ranges(unit)
        for piece in self._store.read_pieces(file, ranges, _PIECE):
            state.update(piece)
        self.digests[self._job.unit[unit[0]]] = state.intdigest()
        self._count(ranges, sum(view.nbytes for _, view in ranges))

    def _read_together(self, file: str, task: Ints) -> None:
        """Read many blocks at once; then deliver and hash each of them."""
        job, plain = self._job, self._job.plain[task]
        ranges = self._plain_ranges(task[plain])
        views = [[view] for _, view in ranges]
        works = [] if plain.all() else self._works(task[~plain])
        for work in works:
            ranges.extend(work.ranges())
        ranges = _joined(ranges)
        self._count(ranges, self._store.read(file, ranges))
        for work in works:
            work.deliver()
            views.append(work.views)
        blocks = np.concatenate((task[plain], task[~plain]))  # in the order of `views`
        self._hash(blocks, views, job.first[blocks])

    def _hash(self, blocks: Ints, views: list[list[memoryview]], place: Ints) -> None:
        """Hash those blocks that are to be, given the memory of each and its place in the file."""
        job = self._job
        rows = np.flatnonzero(job.hashed[job.blocks.box[blocks]])
        rows = rows[np.argsort(place[rows], kind="stable")]
        units: dict[int, list[memoryview]] = {}
        for row, unit in zip(rows.tolist(), job.unit[blocks[rows]].tolist(), strict=True):
            if unit in units:
                units[unit] = units[unit] + views[row]
            else:
                units[unit] = views[row]
        self.digests[list(units)] = [
            xxhash.xxh3_64_intdigest(found[0]) if len(found) == 1 else hash_views(found)
            for found in units.values()
        ]

    def _plain_ranges(self, blocks: Ints) -> list[Range]:
        """Return where blocks lie in their file, and the tensors' own memory that they go to."""
        found = []
        for row, start, low, size in self._places[blocks].tolist():
            view = memory(self._job.tensors[row])
            assert view is not None
            found.append((start, view if len(view) == size else view[low : low + size]))
        return found

    def _works(self, blocks: Ints) -> list[_Work]:
        ranges = self._job.ranges(blocks)
        edges = np.searchsorted(ranges.read, np.arange(len(blocks) + 1)).tolist()
        return [
            _Work(self._job, block, ranges.start[low:high], int(ranges.length[low]))
            for block, low, high in zip(blocks.tolist(), edges, edges[1:], strict=False)
        ]

    def _count(self, ranges: list[Range], nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            self.requests += len(ranges)


class _Work:
    """One block: the memory that its bytes are read into, and how they get from there to a tensor.

    Attributes:
        block: Its number.
        views: Its bytes in order, once they were read.
    """

    def __init__(self, job: Job, block: int, starts: Ints, length: int) -> None:
        row = int(job.blocks.box[block])
        offsets, sizes = job.blocks.offsets[block].tolist(), job.blocks.sizes[block].tolist()
        self.block, self.views = block, list[memoryview]()
        self._tensor = box_of(job.tensors[row], offsets, sizes)
        self._dtype = job.dtypes[row]
        self._starts, self._length = starts, length
        self._staged: npt.NDArray[np.uint8] | None = None
        self._spans: list[tuple[Ints, npt.NDArray[np.uint8], int]] = []

    def ranges(self) -> Iterator[Range]:
        """Say which bytes of the file go where in memory."""
        small = self._length < _SMALL and len(self._starts) > 1
        self.views = self._memory(min(self._length, self._direct_bytes()), small)
        if small:
            yield from self._span_ranges()
            return
        per = self._length // len(self.views[0])  # views that one range fills
        for number, view in enumerate(self.views):
            start = int(self._starts[number // per])
            yield start + (number % per) * len(view), view

    def _direct_bytes(self) -> int:
        """Return how long the runs of the tensor's memory are that can be read into; or 0."""
        tensor = self._tensor
        if tensor.device.type != "cpu" or not same_dtype(tensor, self._dtype):
            return 0
        return 0 if tensor.is_conj() or tensor.is_neg() else run_bytes(tensor)

    def _memory(self, piece: int, small: bool) -> list[memoryview]:
        """Return the memory to read into: the tensor's own where that is worth it."""
        whole = memory(self._tensor) if piece else None
        if whole is not None:
            if small:
                self._staged = np.frombuffer(whole, np.uint8)
                return [whole]
            return [whole[i : i + piece] for i in range(0, len(whole), piece)]
        if piece >= _SMALL and not small:
            return runs(self._tensor, piece)
        self._staged = np.empty(len(self._starts) * self._length, np.uint8)
        view = self._staged.data
        if small:
            return [view]
        return [view[i : i + self._length] for i in range(0, len(view), self._length)]

    def _span_ranges(self) -> Iterator[Range]:
        """Read many short ranges as few long ones."""
        file, sizes = np.zeros_like(self._starts), np.full_like(self._starts, self._length)
        near = coalesce(file, self._starts, sizes, max_gap=_TINY_GAP, max_waste=np.inf)
        far = coalesce(near.file, near.start, near.length, max_gap=_MAX_GAP)
        if len(far) == len(self._starts):  # nothing to join: each range goes where it belongs
            view, length = self.views[0], self._length
            for number, start in enumerate(self._starts.tolist()):
                yield start, view[number * length : (number + 1) * length]
            return
        member = far.members[near.members]
        edges = np.searchsorted(member, np.arange(len(far) + 1))
        for number, (start, size) in enumerate(
            zip(far.start.tolist(), far.length.tolist(), strict=True)
        ):
            buffer = np.empty(size, np.uint8)
            low, high = int(edges[number]), int(edges[number + 1])
            self._spans.append((self._starts[low:high] - start, buffer, low))
            yield start, buffer.data

    def deliver(self) -> None:
        """Bring what was read to where it belongs."""
        for starts, buffer, low in self._spans:
            assert self._staged is not None
            cells = self._staged.reshape(-1, self._length)
            windows = np.lib.stride_tricks.sliding_window_view(buffer, self._length)
            cells[low : low + len(starts)] = windows[starts]
        own = memory(self._tensor) if self._direct_bytes() else None
        if self._staged is not None and own is None:
            store(self._tensor, self._staged, self._dtype)


def _joined(ranges: list[Range]) -> list[Range]:
    """Return ranges in order of place; gaps that are cheap to read over become ranges of waste."""
    start, length = column([s for s, _ in ranges]), column([len(v) for _, v in ranges])
    if (start[1:] == (start + length)[:-1]).all():
        return ranges
    order = np.argsort(start, kind="stable")
    joined = coalesce(np.zeros_like(start), start, length, max_gap=_MAX_GAP).members[order].tolist()
    waste = memoryview(bytearray(_MAX_GAP))
    found, end, last = list[Range](), 0, -1
    for number, member in zip(order.tolist(), joined, strict=True):
        begin, view = ranges[number]
        if member == last and begin > end:
            found.append((end, waste[: begin - end]))
        found.append((begin, view))
        end, last = begin + len(view), member
    return found


def _alike(rows: Ints, label: Ints) -> list[Ints]:
    """Split rows wherever the label changes from one to the next."""
    if not len(rows):
        return []
    return np.split(rows, np.flatnonzero(np.diff(label[rows])) + 1)


def _large(job: Job) -> npt.NDArray[np.bool_]:
    """Tell which blocks are worth hashing while they are read: those of large units, all plain."""
    rough = np.bincount(job.unit, ~job.plain)[job.unit] > 0
    nbytes = np.bincount(job.unit, job.block_bytes)[job.unit]
    large: npt.NDArray[np.bool_] = job.hashed[job.blocks.box] & ~rough & (nbytes > _PIECE)
    return large


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
