"""Write files of one checkpoint while another is read: carry out a `CopyPlan`.

The writer asks an `Ahead` for box after box. Boxes are read in the plan's batches, so that a
thousand small tensors take a few reads, and the next batches are on their way while the present
one is written. Boxes that are asked for in another order are read all the same, one at a time.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from functools import cached_property, partial
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import SavePlan, TensorMetadata, itemsize
from shardplan.planning.columns import Ints, ReadItems, column
from shardplan.planning.storage import (
    BATCH_BYTES,
    Box,
    CopyBudget,
    CopyPlan,
    StoredChunks,
    begun_chunks,
    copy_plan,
    read_boxes,
    written_bytes,
)

from ..checksums import Proof
from ..formats.base import ChunkPlace, Part, Source, WriteJob, Writer
from ..pool import Pool, Progress, ProgressCallback
from ..stores.base import Store
from ..tensors import block_of_memory, empty_tensor, torch_dtype
from .copying import Block, Stretch
from .fetch import places_of
from .pieces import Kept, Lazy
from .read import Reader, ReadStats

__all__ = ["Ahead", "Copied", "Copies", "Lender", "stored_chunks", "write_copies"]

_LENT: Final = BATCH_BYTES + (1 << 16)  # with room to align small tensors
_ALIGN: Final = 16
_KEPT: Final = 2  # batches behind the present one that may still have boxes to give

Boxes = dict[Box, torch.Tensor]


def stored_chunks(source: Source) -> StoredChunks:
    """Find the chunks of all tensors of a checkpoint."""
    entries = source.metadata.state_dict_metadata
    sizes = {name: entry for name, entry in entries.items() if isinstance(entry, TensorMetadata)}
    counts = [len(entry.chunks) for entry in sizes.values()]
    keys = [(n, i) for n, count in zip(sizes, counts, strict=True) for i in range(count)]
    spots = source.find_chunks(keys)
    first = dict(zip(sizes, np.cumsum([0, *counts]).tolist(), strict=False))
    local = [source.store.locate(name) is not None for name in source.files]
    # Views of one storage may begin at the same place of the same array: only sizes differ.
    views: dict[tuple[ChunkPlace, tuple[int, ...]], str] = {}
    tied = {}
    for (name, entry), count in zip(sizes.items(), counts, strict=True):
        if count == 1 and 0 not in entry.size:
            kept = views.setdefault((spots[first[name]], entry.size), name)
            if kept != name:
                tied[name] = kept
    return StoredChunks(
        places_of(spots, max([1, *(len(s.extents) for s in spots)]), [False] * len(spots)),
        first,
        np.array([spot.axes is None and local[spot.file] for spot in spots], bool),
        tied,
        source.block_bytes,
    )


class Lender:
    """Memory that is used again once nothing looks at it any more: fresh pages cost time, too.

    >>> lender = Lender()
    >>> first = lender.take(100)
    >>> place = first.data_ptr()
    >>> del first
    >>> lender.take(200).data_ptr() == place
    True
    """

    def __init__(self) -> None:
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return some bytes, whose elements may be anything."""
        if nbytes > _LENT:
            return torch.from_numpy(block_of_memory(nbytes))
        try:
            memory = self._free.popleft()
        except IndexError:
            memory = block_of_memory(_LENT)
        lent = memory[:nbytes]  # which torch holds on to, as long as there is a view of it
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return torch.from_numpy(lent)


class Ahead:
    """Reads boxes of a checkpoint before they are asked for.

    Args:
        reader: The checkpoint.
        plan: What will be asked for, in order; nothing breaks if that is not so.
        threads: Where to read; a thread that asks must not be one of them.
        lender: Where memory comes from.
        depth: How many batches are read before they are asked for.
        verify: Whether to check what is read whole against its checksums.
        proof: Gets the checksums of blocks.
        delivered: Called with the bytes of each box that was delivered.
        last: Called before the last of the boxes is delivered, when all of them have been read.

    Attributes:
        stats: What was read so far.
    """

    def __init__(
        self,
        reader: Reader,
        plan: CopyPlan,
        threads: Executor,
        lender: Lender | None = None,
        *,
        depth: int = 2,
        verify: bool = False,
        proof: Proof | None = None,
        delivered: Callable[[int], object] = lambda _: None,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._reader, self._plan, self._threads = reader, plan, threads
        self._lender, self._depth = lender or Lender(), depth
        self._verify, self._proof = verify, proof
        if proof is not None:
            proof.begin(reader.stored_chunks(begun_chunks(plan.reads)))
        self._delivered, self._last = delivered, last
        self._number = {box: number for number, box in enumerate(plan.boxes)}
        self._waiting = set(plan.boxes)
        self._batches = plan.batches
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[Boxes]] = {}
        self._next = 0  # the first batch that was not begun yet
        self.stats = ReadStats()

    def tensor(self, name: str) -> AheadTensor:
        """Return one of the tensors, whose boxes are read through this."""
        entry = self._reader.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorMetadata)
        return AheadTensor(self, name, entry.size, torch_dtype(entry.properties.dtype))

    def read(self, box: Box) -> torch.Tensor:
        """Return a box."""
        if 0 in box.sizes:
            return empty_tensor(box.sizes, self._dtype(box))
        number = self._number.get(box)
        future = None if number is None else self._begin(int(self._plan.batch[number]))
        found = None if future is None else future.result().pop(box, None)
        if found is None:  # it was asked for out of turn, or once more
            found = self._fetch([box], *read_boxes(self._reader.metadata, [box]))[box]
        self._deliver(box, self._nbytes(box))
        return found

    def stretches(self, box: Box) -> Block | None:
        """Return the bytes of files that a box is copied from; None if it must be read."""
        number = self._number.get(box)
        if number is None or not self._plan.copied[number]:
            return None
        parts = [self._stretch(row) for row in self._plan.rows(number)]
        return Block(parts, partial(self._copied, number))

    def _stretch(self, row: int) -> Stretch:
        plan = self._plan
        path, name = self._files[plan.file[row]]
        assert path is not None
        proof = self._proof
        check = None if proof is None or plan.block[row] < 0 else self._check(row, proof)
        begin, length = int(plan.begin[row]), int(plan.length[row])
        checksum = self._reader.source.checksum_in(plan.file[row])
        return Stretch(path, name, begin, length, check, checksum)

    def _check(self, row: int, proof: Proof) -> Callable[[int], None]:
        """Return what takes the checksum of a read that is a block of its chunk."""
        plan, reads = self._plan, self._plan.reads
        block, blocks = int(plan.block[row]), int(plan.blocks[row])
        key = reads.names[reads.storage[row]], int(reads.storage_hint[row])
        return lambda digest: proof.sums.add(key, blocks, {block: digest})

    @cached_property
    def _files(self) -> list[tuple[str | None, str]]:
        """Where each file is, and its name."""
        return [(self._reader.store.locate(name), name) for name in self._reader.source.files]

    def _copied(self, number: int) -> None:
        nbytes = int(self._plan.nbytes[number])
        self._count(ReadStats(nbytes, nbytes, len(self._plan.rows(number))))
        self._deliver(self._plan.boxes[number], nbytes)

    def _deliver(self, box: Box, nbytes: int) -> None:
        self._delivered(nbytes)
        with self._lock:
            had = box in self._waiting
            self._waiting.discard(box)
            complete = had and not self._waiting
        if complete:
            self._last()

    def close(self) -> None:
        """Forget what was read and not asked for."""
        with self._lock:
            for future in self._under_way.values():
                future.cancel()
            self._under_way.clear()
            self._next = len(self._batches)

    def _begin(self, number: int) -> Future[Boxes] | None:
        """Start reading a batch and the next few; return None if that one was dropped already."""
        with self._lock:
            if number >= self._next + max(self._depth, 1):
                self._next = number  # batches that are skipped are read when they are asked for
            while self._next < min(number + 1 + self._depth, len(self._batches)):
                batch = self._batches[self._next]
                self._under_way[self._next] = self._threads.submit(self._fetch_batch, batch)
                self._next += 1
            for old in [n for n in self._under_way if n < number - _KEPT]:
                self._under_way.pop(old).cancel()
            for old in [n for n in self._under_way if n < number and _is_empty(self._under_way[n])]:
                del self._under_way[old]
            return self._under_way.get(number)

    def _fetch_batch(self, batch: Ints) -> Boxes:
        plan, first, last = self._plan, int(batch[0]), int(batch[-1])
        rows = slice(plan.rows(first).start, plan.rows(last).stop)
        return self._fetch(
            plan.boxes[first : last + 1], plan.reads.take(rows), plan.box[rows] - first
        )

    def _fetch(self, boxes: Sequence[Box], items: ReadItems, box: Ints) -> Boxes:
        """Read some boxes into one stretch of memory, given the box of each read."""
        tensors = self._allocate(boxes)
        sums = None if self._proof is None else self._proof.sums
        self._count(self._reader.fill_boxes(tensors, items, box, verify=self._verify, sums=sums))
        return dict(zip(boxes, tensors, strict=True))

    def _allocate(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        sizes = [self._nbytes(box) for box in boxes]
        starts = np.concatenate([[0], np.cumsum([-(-n // _ALIGN) * _ALIGN for n in sizes])])
        whole = self._lender.take(int(starts[-1]))
        return [
            whole[start : start + n].view(torch_dtype(self._dtype(box))).view(box.sizes)
            for box, start, n in zip(boxes, starts.tolist(), sizes, strict=False)
        ]

    def _dtype(self, box: Box) -> str:
        entries = self._reader.metadata.state_dict_metadata
        return entries.props[int(entries.prop[entries.row_of[box.name]])].dtype

    def _nbytes(self, box: Box) -> int:
        return math.prod(box.sizes) * itemsize(self._dtype(box))

    def _count(self, new: ReadStats) -> None:
        with self._lock:
            self.stats += new


def _is_empty(future: Future[Boxes]) -> bool:
    failed = future.done() and (future.cancelled() or future.exception() is not None)
    return future.done() and not failed and not future.result()


@attrs.frozen(eq=False)
class AheadTensor(Lazy):
    """A tensor in a checkpoint, read through an `Ahead`."""

    _ahead: Ahead
    _name: str
    shape: Sequence[int]
    dtype: torch.dtype

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it, contiguous."""
        return self._ahead.read(Box(self._name, tuple(offsets), tuple(sizes)))

    def stretches(self, offsets: Sequence[int], sizes: Sequence[int]) -> Block | None:
        """Return the bytes of files that a box of it is made of; see `Ahead.stretches`."""
        return self._ahead.stretches(Box(self._name, tuple(offsets), tuple(sizes)))


@attrs.frozen(eq=False)
class Copies:
    """What to copy, from where to where."""

    source: Source  # the checkpoint to read
    stored: StoredChunks  # where its chunks lie
    plans: Sequence[SavePlan]  # what to write
    store: Store  # where to write it, and how
    writer: Writer  # where to write it, and how
    budget: CopyBudget  # how much may happen at once
    verify: bool = True  # whether to check what is read against its checksums
    whole: bool = False  # whether each tensor is written as one, whatever it is made of


@attrs.frozen(eq=False)
class Copied:
    """What was written and read."""

    parts: Mapping[int, Part]  # what was written, by number of the plan
    bytes_read: int  # bytes that were read of the old checkpoint
    verified: int  # how many chunks of it were found to fit their checksums


def write_copies(
    copies: Copies,
    numbers: Sequence[int],
    save_id: str,
    callback: ProgressCallback | None,
    pool: Pool | None,
) -> Copied:
    """Carry out the plans of some numbers; if that fails, nothing is left.

    The threads of ``pool`` read; by default as many as fit into the budget.
    """
    plans, budget, writer = copies.plans, copies.budget, copies.writer
    progress = Progress(sum(written_bytes(plans[n]) for n in numbers), callback)
    files = max(1, min(budget.files, len(numbers)))
    with (
        # The pool that writes cannot read, too, as it waits for reads.
        Pool(max_bytes=budget.reading) if pool is None else nullcontext(pool) as reading,
        Pool(max_workers=files, max_bytes=1 << 62) as writing,
        ThreadPoolExecutor(files * (1 + budget.depth), "shardplan-ahead") as threads,
        ExitStack() as undo,
    ):
        reader, lender = Reader(copies.source, reading), Lender()
        stored = copies.source.stored
        proof = Proof(stored) if copies.verify and stored.has_sums else None
        settle = _nothing if proof is None else partial(proof.settle, reading)

        def write(number: int) -> tuple[Part, ReadStats]:
            plan = plans[number]
            order = column([*writer.write_order(plan, number)])
            ahead = Ahead(
                reader,
                copy_plan(reader.metadata, plan, order, copies.stored, whole=copies.whole),
                threads,
                lender,
                depth=budget.depth,
                verify=copies.verify,
                proof=proof,
                delivered=progress.add,
                # A single file may exist as soon as its last byte is there: it is checked before.
                last=settle if len(plans) == 1 else _nothing,
            )
            with closing(ahead):
                sd = _state_dict(reader, ahead, plan)
                part = writer.write(WriteJob(copies.store, sd, plan, save_id, number, writing))
            undo.callback(writer.discard, copies.store, part.report, save_id)
            return part, ahead.stats

        written = writing.map(write, numbers)
        settle()
        undo.pop_all()  # nothing is to be undone
    progress.finish()
    parts = {number: part for number, (part, _) in zip(numbers, written, strict=True)}
    proved = len(proof.sums.matched) if proof is not None else 0
    return Copied(parts, sum(stats.bytes_read for _, stats in written), proved)


def _nothing() -> None:
    pass


def _state_dict(reader: Reader, ahead: Ahead, plan: SavePlan) -> dict[str, Any]:
    """Return what a plan writes: tensors that are read when asked for, and other values."""
    known = plan.items.catalog.heads
    heads = [known[row] for row in sorted(set(plan.items.row.tolist()))]
    return {
        source: Kept(reader.value(source)) if properties is None else ahead.tensor(source)
        for _, source, _, properties, _ in heads
    }
