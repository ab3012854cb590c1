"""Carry out a `FetchPlan`: read the ranges of each task, hash them, deliver them to tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning.columns import Ints
from shardplan.planning.storage import (
    BLOCK_BYTES,
    FAR_GAP,
    PIECE_BYTES,
    SMALL,
    FetchPlan,
    Requested,
)

from ..formats.base import Source
from ..pool import Progress
from ..tensors import box_view, fill_from_bytes, flat_memory, run_bytes, runs, same_dtype

__all__ = ["Dest", "Fetch"]

Range = tuple[int, memoryview]
Views = list[memoryview]


@attrs.frozen(eq=False)
class Dest:
    """What a read fills.

    Attributes:
        tensor: A tensor of just the read's box, its axes in the order in which they are stored.
        dtype: What the elements are stored as.
    """

    tensor: torch.Tensor
    dtype: str


class Fetch:
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
        self, source: Source, plan: FetchPlan, dests: Sequence[Dest], progress: Progress | None
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
    def of(cls, plan: FetchPlan, dests: Sequence[Dest], block: int) -> _Staged:
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


def _box(plan: FetchPlan, dests: Sequence[Dest], block: int) -> tuple[torch.Tensor, str]:
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
