"""One thread's share of a load: fetch some blocks, hash them, deliver them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import numpy as np
import numpy.typing as npt

from shardplan.planning import coalesce, itemsize
from shardplan.planning.columns import Ints, column
from shardplan.planning.storage import BLOCK_BYTES

from ..pool import own_processors
from ..progress import Progress
from ..stores.base import Store
from ..tensors import memory, run_bytes, runs, same_dtype, store
from ..tensors import window as box_of
from .jobs import FAR_GAP, PIECE, SMALL, Job

__all__ = ["Fetch"]

_MAX_GAP: Final = 1 << 16  # bytes that may be read over between tensors, if
_WASTE: Final = 0.1  # they are no larger a share of what is wanted on both sides
Range = tuple[int, memoryview]


class Fetch:
    """Carries out a job's tasks, on any number of threads.

    Args:
        source: Where from.
        job: What to fetch.
        progress: Is told of the bytes that were wanted, as they come.

    Attributes:
        digests: The checksums of the job's units that are hashed, by unit.
        begun, done: Which blocks may have been written to, and which are complete.
        bytes_read, requests: What was asked of the store.
    """

    def __init__(self, source: Store, job: Job, progress: Progress | None = None) -> None:
        self._store, self._job, self._progress = source, job, progress
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = 1 if job.alone else len(job.tasks) if source.staging else own_processors()
        self._turn = threading.Semaphore(max(turns, 1))
        columns = (job.blocks.box, job.first, job.into, job.block_bytes)
        self._places = np.stack(columns, axis=1)  # one row a block
        self._maps = job.is_mapped
        self.digests = np.zeros(len(job.blocks), np.uint64)
        self.begun = np.zeros(len(job.blocks), bool)
        self.done = np.zeros(len(job.blocks), bool)
        self.bytes_read = 0
        self.requests = 0

    def run(self, task: Ints) -> None:
        """Fetch some blocks of one file, given in order of place."""
        job = self._job
        file, large = job.files[job.file[job.blocks.box[task[0]]]], job.large[task]
        with self._turn:
            if large.any():
                self._read_large(file, task[large])
            rest = task[~large]
            if len(rest):
                self.begun[rest] = True
                self._read_together(file, rest)
                self.done[rest] = True
                self._tell(int(job.block_bytes[rest].sum()))

    def _read_large(self, file: str, blocks: Ints) -> None:
        """Read blocks of large units, and hash every piece while it is in the cache."""
        job, units = self._job, _alike(blocks, self._job.unit)
        groups = [self._plain_ranges(unit) for unit in units]
        sizes = [sum([view.nbytes for _, view in ranges]) for ranges in groups]
        edges = np.cumsum([0, *map(len, units)])  # where the blocks of each unit begin
        begun, untold, digests = 0, 0, list[int]()
        try:
            with closing(self._store.read_pieces(file, groups, PIECE)) as each:
                for pieces, size in zip(each, sizes, strict=True):
                    begun += 1
                    state = job.checksum.start()
                    for piece in pieces:
                        state.update(piece)
                    digests.append(state.intdigest())
                    untold += size
                    if untold >= BLOCK_BYTES or begun == len(units):
                        self._tell(untold)
                        untold = 0
        finally:
            done = len(digests)
            self.begun[blocks[: edges[begun]]] = True
            self.done[blocks[: edges[done]]] = True
            self.digests[job.unit[blocks[edges[:done]]]] = digests
            self._count(sum(map(len, groups[:done])), sum(sizes[:done]))

    def _tell(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.add(nbytes)

    def _read_together(self, file: str, task: Ints) -> None:
        """Read many blocks at once; then deliver and hash each of them."""
        job, plain = self._job, self._job.plain[task]
        ranges = self._plain_ranges(task[plain])
        views = [[view] for _, view in ranges]
        works = [] if plain.all() else self._works(task[~plain])
        mapped = [work for work in works if work.is_scattered and self._maps]
        staged = [work for work in works if not (work.is_scattered and self._maps)]
        for work in staged:
            ranges.extend(work.ranges())
        if ranges:
            ranges = _joined(ranges, job.is_far)
            self._count(len(ranges), self._store.read(file, ranges))
        if mapped:
            self._copy_mapped(file, mapped)
        for work in staged:
            work.deliver()
        views.extend(work.views for work in works)
        blocks = np.concatenate((task[plain], task[~plain]))  # in the order of `views`
        self._hash(blocks, views, job.first[blocks])

    def _copy_mapped(self, file: str, works: list[_Work]) -> None:
        """Bring blocks to where they belong, out of the file's own pages."""
        starts = np.concatenate([work.starts for work in works])
        lengths = np.concatenate([np.full_like(work.starts, work.length) for work in works])
        with self._store.mapped(file, starts, lengths) as found:
            for work in works:
                self._count(1, work.deliver_from(found, int(starts.min())))

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
        self.digests[list(units)] = [job.checksum.of(found) for found in units.values()]

    def _plain_ranges(self, blocks: Ints) -> list[Range]:
        """Return where blocks lie in their file, and the tensors' own memory that they go to."""
        found = []
        for row, start, low, size in self._places[blocks].tolist():
            view = memory(self._job.tensors[row])
            assert view is not None
            found.append((start, view if len(view) == size else view[low : low + size]))
        return found

    def _works(self, blocks: Ints) -> list[_Work]:
        starts, block = self._job.starts(blocks)
        edges = np.searchsorted(block, np.arange(len(blocks) + 1)).tolist()
        return [
            _Work(self._job, block, starts[low:high])
            for block, low, high in zip(blocks.tolist(), edges, edges[1:], strict=False)
        ]

    def _count(self, requests: int, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            self.requests += requests


class _Work:
    """One block: the memory that its bytes are read into, and how they get from there to a tensor.

    Attributes:
        block: Its number.
        is_scattered: Whether it is better copied out of the file's pages; see `Job.scattered`.
        starts, length: Where its ranges start in the file, and how many bytes each has.
        views: Its bytes in order, once they were read; none if others lie between them.
    """

    def __init__(self, job: Job, block: int, starts: Ints) -> None:
        row = int(job.blocks.box[block])
        offsets, sizes = job.blocks.offsets[block].tolist(), job.blocks.sizes[block].tolist()
        self.block, self.views = block, list[memoryview]()
        self.is_scattered = bool(job.scattered[block])
        self._tensor = box_of(job.tensors[row], offsets, sizes)
        self._dtype = job.dtypes[row]
        self.starts, self.length = starts, int(job.span[block])
        self._staged: npt.NDArray[np.uint8] | None = None
        self._apart: list[int] | None = None  # how far one element is from the next, per axis
        self._in_file = job.strides[row].tolist()
        if self.length * len(starts) > int(job.block_bytes[block]):
            self._apart = _strides(job, block)

    def deliver_from(self, found: npt.NDArray[np.uint8], base: int) -> int:
        """Bring its bytes to where they belong, given a part of the file; return how many."""
        low, high = int(self.starts[0]) - base, int(self.starts[-1]) + self.length - base
        store(self._tensor, found[low:high], self._dtype, self._in_file)
        return self._tensor.numel() * itemsize(self._dtype)

    def ranges(self) -> Iterator[Range]:
        """Say which bytes of the file go where in memory."""
        if self._apart is not None:
            self._staged = np.empty(len(self.starts) * self.length, np.uint8)
            views = _slices(self._staged.data, self.length)
            yield from zip(self.starts.tolist(), views, strict=True)
            return
        self.views = self._memory(min(self.length, self._direct_bytes()))
        per = self.length // len(self.views[0])  # views that one range fills
        for number, view in enumerate(self.views):
            start = int(self.starts[number // per])
            yield start + (number % per) * len(view), view

    def _direct_bytes(self) -> int:
        """Return how long the runs of the tensor's memory are that can be read into; or 0."""
        tensor = self._tensor
        if tensor.device.type != "cpu" or not same_dtype(tensor, self._dtype):
            return 0
        return 0 if tensor.is_conj() or tensor.is_neg() else run_bytes(tensor)

    def _memory(self, piece: int) -> list[memoryview]:
        """Return the memory to read into: the tensor's own where that is worth it."""
        whole = memory(self._tensor) if piece else None
        if whole is not None:
            return _slices(whole, piece)
        if piece >= SMALL:
            return runs(self._tensor, piece)
        self._staged = np.empty(len(self.starts) * self.length, np.uint8)
        return _slices(self._staged.data, self.length)

    def deliver(self) -> None:
        """Bring what was read to where it belongs."""
        if self._staged is not None:
            store(self._tensor, self._staged, self._dtype, self._apart)


def _slices(view: memoryview, length: int) -> list[memoryview]:
    return [view[i : i + length] for i in range(0, len(view), length)]


def _strides(job: Job, block: int) -> list[int]:
    """Return how far apart the elements of a block are, once its ranges were read one by one."""
    row = int(job.blocks.box[block])
    axis, sizes = int(job.axis[row]), job.blocks.sizes[block].tolist()
    strides: list[int] = job.strides[row].tolist()
    step = int(job.span[block]) // int(job.itemsize[row])
    for at in reversed(range(axis)):  # outside of a range, ranges follow one another
        strides[at], step = step, step * sizes[at]
    return strides


def _joined(ranges: list[Range], is_far: bool) -> list[Range]:
    """Return ranges in order of place; gaps that are cheap to read over become ranges of waste."""
    start, length = column([s for s, _ in ranges]), column([len(v) for _, v in ranges])
    if (start[1:] == (start + length)[:-1]).all():
        return ranges
    order = np.argsort(start, kind="stable")
    gap, share = (FAR_GAP, np.inf) if is_far else (_MAX_GAP, _WASTE)
    requests = coalesce(np.zeros_like(start), start, length, max_gap=gap, max_waste=share)
    joined = requests.members[order].tolist()
    waste = memoryview(bytearray(gap))
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
