"""One thread's share of a load: fetch some blocks, hash them, deliver them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import byte_ranges, coalesce
from shardplan.planning.blocks import BLOCK_BYTES, Blocks
from shardplan.planning.catalog import column
from shardplan.planning.packing import Ints

from .arrays import memory, run_bytes, runs, same_dtype, store
from .arrays import window as box_of
from .checksums import hash_views
from .stores import Store

__all__ = ["Fetch", "Job"]

_SMALL: Final = 1 << 12  # ranges shorter than this are read together and picked apart by numpy
_TINY_GAP: Final = 64  # bytes that are always cheaper to read over than to leave out
_TASK_BLOCKS: Final = 1 << 12
_MAX_GAP: Final = 1 << 16

Range = tuple[int, memoryview]


@attrs.frozen(eq=False, slots=False)
class Job:
    """Everything that a load has to do; one row a read, except ``blocks``, which cut reads up.

    Attributes:
        tensors: The boxes to fill.
        files: The checkpoint's files, and ``file``, which of them each read is from.
        begin: Where the chunk that is read begins in its file, in bytes.
        dtypes, itemsize: What the chunk is stored as.
        extents: The sizes of the chunk, in elements.
        offsets: Where the read starts in it, in elements.
        whole: Whether the read is all of its chunk, and to be hashed.
        blocks: What is fetched at a time.
    """

    tensors: list[torch.Tensor]
    files: tuple[str, ...]
    file: Ints
    begin: Ints
    dtypes: list[str]
    itemsize: Ints
    extents: Ints
    offsets: Ints
    whole: npt.NDArray[np.bool_]
    blocks: Blocks

    @cached_property
    def block_bytes(self) -> Ints:
        """How many bytes each block has."""
        nbytes: Ints = self.blocks.sizes.prod(axis=1) * self.itemsize[self.blocks.box]
        return nbytes

    @property
    def nbytes(self) -> int:
        """How many bytes are wanted altogether."""
        return int(self.block_bytes.sum())

    @cached_property
    def first(self) -> Ints:
        """Where the first byte of each block lies in its file."""
        step = np.ones_like(self.extents)  # elements that one step along an axis skips
        for axis in reversed(range(self.extents.shape[1] - 1)):
            step[:, axis] = step[:, axis + 1] * self.extents[:, axis + 1]
        box = self.blocks.box
        place = ((self.offsets[box] + self.blocks.offsets) * step[box]).sum(axis=1)
        first: Ints = self.begin[box] + place * self.itemsize[box]
        return first

    @cached_property
    def tasks(self) -> list[Ints]:
        """The blocks in order of place, in groups of one file that are worth a thread's while."""
        file = self.file[self.blocks.box]
        order = np.lexsort((self.first, file))
        size, limit = self.block_bytes[order], max(int(self.block_bytes.max()), BLOCK_BYTES)
        before = np.cumsum(size) - size
        group = before // limit + (np.arange(len(order)) // _TASK_BLOCKS)
        new = (np.diff(group) != 0) | (np.diff(file[order]) != 0)
        return np.split(order, np.flatnonzero(new) + 1)

    def cost(self, task: Ints) -> int:
        """How many bytes a task may have to hold."""
        return int(self.block_bytes[task].sum())


class Fetch:
    """Carries out a job's tasks, on any number of threads.

    Attributes:
        digests: The checksums of the blocks of reads that are `Job.whole`.
        begun, done: Which blocks may have been written to, and which are complete.
        bytes_read, requests: What was asked of the store.
    """

    def __init__(self, source: Store, job: Job) -> None:
        self._store, self._job = source, job
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = len(job.tasks) if source.staging else (os.cpu_count() or 1) + 1
        self._turn = threading.Semaphore(max(turns, 1))
        self.digests: dict[int, int] = {}
        self.begun = np.zeros(len(job.blocks), bool)
        self.done = np.zeros(len(job.blocks), bool)
        self.bytes_read = 0
        self.requests = 0

    def run(self, task: Ints) -> None:
        """Fetch some blocks of one file."""
        job, box = self._job, self._job.blocks.box[task]
        blocks = job.blocks
        ranges = byte_ranges(
            job.offsets[box] + blocks.offsets[task],
            blocks.sizes[task],
            job.extents[box],
            job.itemsize[box],
            job.begin[box],
        )
        edges = np.searchsorted(ranges.read, np.arange(len(task) + 1)).tolist()
        works = [
            _Work(job, block, ranges.start[low:high], int(ranges.length[low]))
            for block, low, high in zip(task.tolist(), edges, edges[1:], strict=False)
        ]
        self.begun[task] = True
        file = job.files[job.file[box[0]]]
        with self._turn:
            wanted = [found for work in works for found in work.ranges()]
            self._read(file, list(_joined(wanted)))
            for work in works:
                work.deliver()
                if job.whole[blocks.box[work.block]]:
                    self.digests[work.block] = hash_views(work.views)
        self.done[task] = True

    def _read(self, file: str, ranges: list[Range]) -> None:
        done = self._store.read(file, ranges)
        with self._lock:
            self.bytes_read += done
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


def _joined(ranges: list[Range]) -> Iterator[Range]:
    """Yield ranges in order of place; a gap that is cheap to read over becomes a range of waste."""
    ranges = sorted(ranges, key=lambda pair: pair[0])
    start = column([s for s, _ in ranges])
    length = column([len(v) for _, v in ranges])
    joined = coalesce(np.zeros_like(start), start, length, max_gap=_MAX_GAP).members
    waste = memoryview(bytearray(_MAX_GAP))
    end = 0
    for number, (begin, view) in enumerate(ranges):
        if number and joined[number] == joined[number - 1] and begin > end:
            yield end, waste[: begin - end]
        yield begin, view
        end = begin + len(view)
