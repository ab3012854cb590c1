"""Reading one checkpoint while another is written: in the order of need, a little ahead of it.

Whoever writes asks for box after box. Boxes are read in batches of some megabytes, so that a
thousand small tensors take a few reads, and the next batches are on their way while the present
one is written. Boxes that are asked for in another order are read all the same, one at a time.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import cached_property, partial
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import (
    Metadata,
    SavePlan,
    TensorMetadata,
    WriteItemType,
    itemsize,
    load_plan,
)
from shardplan.planning.columns import Catalog, Head, Ints, ReadItems, WriteItems, column, padded
from shardplan.planning.storage import BLOCK_BYTES

from ..checksums import Proof
from ..tensors import block_of_memory, empty, torch_dtype, window
from .copying import Block, Stretch
from .pieces import Lazy
from .places import Places, find_places
from .read import Reader, ReadStats

__all__ = ["BATCH_BYTES", "DEPTH", "Ahead", "Box", "Lender"]

BATCH_BYTES: Final = BLOCK_BYTES
"""How many bytes are read at a time."""
DEPTH: Final = 2
"""How many batches are read before they are asked for, if memory allows."""

_LENT: Final = BATCH_BYTES + (1 << 16)  # with room to align small tensors
_MAX_BOXES: Final = 1 << 11  # of a batch
_ALIGN: Final = 16
_KEPT: Final = 2  # batches behind the present one that may still have boxes to give

Corner = tuple[int, ...]


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


@attrs.frozen
class Box:
    """A part of a saved tensor.

    Attributes:
        name: The tensor.
        offsets: Where the box starts in it.
        sizes: How large it is.
    """

    name: str
    offsets: Corner
    sizes: Corner


class Ahead:
    """Reads boxes of a checkpoint before they are asked for.

    Args:
        reader: The checkpoint.
        boxes: What will be asked for, in order; nothing breaks if that is not so.
        threads: Where to read; none of them may be one that asks.
        lender: Where memory comes from.
        depth: How many batches are read before they are asked for.
        proof: Where to note what was read, to check it against checksums; None not to check.
        told: Called with the bytes of each box that was delivered.
        last: Called before the last of the boxes is delivered, when all of them have been read.

    Attributes:
        stats: What was read so far.
    """

    def __init__(
        self,
        reader: Reader,
        boxes: Sequence[Box],
        threads: Executor,
        lender: Lender | None = None,
        *,
        depth: int = DEPTH,
        proof: Proof | None = None,
        told: Callable[[int], object] = lambda _: None,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._reader, self._threads, self._proof, self._told = reader, threads, proof, told
        self._lender, self._depth = lender or Lender(), depth
        self._entries: dict[str, TensorMetadata] = {}
        for name in dict.fromkeys(box.name for box in boxes):
            self.tensor(name)
        self._boxes = [box for box in boxes if 0 not in box.sizes]
        self._reads, self._rows = self._plan()
        self._at = {box: i for i, box in enumerate(self._boxes)}
        self._batches = list(self._group())
        self._batch_of = {
            self._boxes[i]: number for number, batch in enumerate(self._batches) for i in batch
        }
        self._last, self._waiting = last, set(self._boxes)
        self._lock = threading.Lock()
        self._under_way: dict[int, Future[dict[Box, torch.Tensor]]] = {}
        self._next = 0  # the first batch that was not begun yet
        self.stats = ReadStats()

    def tensor(self, name: str) -> AheadTensor:
        """Return one of the tensors, whose boxes are read through this."""
        if name not in self._entries:
            found = self._reader.metadata.state_dict_metadata[name]
            assert isinstance(found, TensorMetadata)
            self._entries[name] = found
        entry = self._entries[name]
        return AheadTensor(self, name, entry.size, torch_dtype(entry.properties.dtype))

    def read(self, box: Box) -> torch.Tensor:
        """Return a box."""
        if 0 in box.sizes:
            return empty(box.sizes, self._entries[box.name].properties.dtype)
        number = self._batch_of.get(box)
        future = None if number is None else self._begin(number)
        found = None if future is None else future.result().pop(box, None)
        if found is None:
            found = self._fetch([box], *self._direct(box))[box]
        self._delivered(box)
        return found

    def stretches(self, box: Box) -> Block | None:
        """Return the bytes of files that a box is made of; None if they are not to be had so."""
        number = self._at.get(box)
        places = self._places
        if number is None or places is None or not all(places.plain[r] for r in self._rows[number]):
            return None
        rows = sorted(self._rows[number], key=places.into.__getitem__)
        return Block([self._stretch(places, row) for row in rows], partial(self._done, box))

    def _stretch(self, places: Places, row: int) -> Stretch:
        items, seen = self._reads, None
        if self._proof is not None:
            axes = items.ndim[row]
            key = items.names[items.storage[row]], int(items.storage_hint[row])
            offsets, lengths = items.storage_offsets[row, :axes], items.lengths[row, :axes]
            seen = self._proof.wants(key, tuple(offsets.tolist()), tuple(lengths.tolist()))
        number = places.file[row]
        path, begin = places.paths[number], places.begin[row]
        assert path is not None
        return Stretch(path, places.files[number], begin, places.nbytes[row], seen)

    def _done(self, box: Box) -> None:
        nbytes = self._nbytes(box)
        self._count(ReadStats(nbytes, nbytes, len(self._rows[self._at[box]])))
        self._delivered(box)

    def _delivered(self, box: Box) -> None:
        self._told(self._nbytes(box))
        with self._lock:
            complete = self._waiting == {box}
            self._waiting.discard(box)
        if complete:
            self._last()

    def close(self) -> None:
        """Forget what was read and not asked for."""
        with self._lock:
            for future in self._under_way.values():
                future.cancel()
            self._under_way.clear()
            self._next = len(self._batches)

    def _begin(self, number: int) -> Future[dict[Box, torch.Tensor]] | None:
        """Have a batch and the next few read; None if that one was dropped already."""
        with self._lock:
            if number >= self._next + max(self._depth, 1):
                self._next = number  # somebody skips: what lies between is read when asked for
            while self._next < min(number + 1 + self._depth, len(self._batches)):
                batch = self._batches[self._next]
                self._under_way[self._next] = self._threads.submit(self._fetch_batch, batch)
                self._next += 1
            for old in [n for n in self._under_way if n < number - _KEPT]:
                self._under_way.pop(old).cancel()
            for old in [n for n in self._under_way if n < number and _is_empty(self._under_way[n])]:
                del self._under_way[old]
            return self._under_way.get(number)

    @cached_property
    def _places(self) -> Places | None:
        """Where the bytes of all reads lie, if that is on a disk."""
        axes = self._reads.lengths.shape[1]
        box = np.zeros(len(self._reads), np.int64)
        for number, rows in enumerate(self._rows):
            box[rows] = number
        sizes = padded([box.sizes for box in self._boxes], 1, axes)
        return find_places(self._reader.source, self._reads, sizes[box])

    def _plan(self) -> tuple[ReadItems, list[list[int]]]:
        """Return all reads, and which of them fill which box."""
        reads = _reads(Metadata(self._entries), self._entries, self._boxes)
        at = {(box.name, box.offsets): i for i, box in enumerate(self._boxes)}
        rows: list[list[int]] = [[] for _ in self._boxes]
        anchors, ndim, dest = reads.dest_anchor.tolist(), reads.ndim.tolist(), reads.dest.tolist()
        for row, (name, anchor, axes) in enumerate(zip(dest, anchors, ndim, strict=True)):
            rows[at[reads.names[name], tuple(anchor[:axes])]].append(row)
        return reads, rows

    def _group(self) -> Iterator[list[int]]:
        batch: list[int] = []
        held = 0
        for i, box in enumerate(self._boxes):
            nbytes = self._nbytes(box)
            if batch and (held + nbytes > BATCH_BYTES or len(batch) == _MAX_BOXES):
                yield batch
                batch, held = [], 0
            batch.append(i)
            held += nbytes
        if batch:
            yield batch

    def _nbytes(self, box: Box) -> int:
        width = itemsize(self._entries[box.name].properties.dtype)
        return math.prod(box.sizes) * width

    def _fetch_batch(self, batch: Sequence[int]) -> dict[Box, torch.Tensor]:
        rows = column([row for i in batch for row in self._rows[i]])
        return self._fetch([self._boxes[i] for i in batch], self._reads, rows)

    def _direct(self, box: Box) -> tuple[ReadItems, Ints]:
        reads = _reads(Metadata({box.name: self._entries[box.name]}), self._entries, [box])
        return reads, column(range(len(reads)))

    def _fetch(self, boxes: Sequence[Box], reads: ReadItems, rows: Ints) -> dict[Box, torch.Tensor]:
        """Read some boxes into one stretch of memory."""
        tensors = self._allocate(boxes)
        found = {(box.name, box.offsets): tensors[box] for box in boxes}
        items = reads.take(rows)

        def dest(row: int) -> torch.Tensor:
            axes = items.ndim[row]
            key = items.names[items.dest[row]], tuple(items.dest_anchor[row, :axes].tolist())
            offsets, lengths = items.dest_offsets[row], items.lengths[row]
            return window(found[key], offsets.tolist(), lengths.tolist())

        if self._proof is None:
            self._count(self._reader.fill(items, dest, verify=False))
        else:
            self._count(self._reader.fill(items, dest, sums=self._proof.sums))
            self._proof.note(items)
        return tensors

    def _allocate(self, boxes: Sequence[Box]) -> dict[Box, torch.Tensor]:
        dtypes = [self._entries[box.name].properties.dtype for box in boxes]
        sizes = [self._nbytes(box) for box in boxes]
        starts = np.concatenate([[0], np.cumsum([-(-n // _ALIGN) * _ALIGN for n in sizes])])
        whole = self._lender.take(int(starts[-1]))
        return {
            box: whole[start : start + n].view(torch_dtype(dtype)).view(box.sizes)
            for box, start, n, dtype in zip(boxes, starts.tolist(), sizes, dtypes, strict=False)
        }

    def _count(self, new: ReadStats) -> None:
        with self._lock:
            old = self.stats
            self.stats = ReadStats(
                *(getattr(old, a.name) + getattr(new, a.name) for a in attrs.fields(ReadStats))
            )


def _is_empty(future: Future[dict[Box, torch.Tensor]]) -> bool:
    return (
        future.done()
        and not future.cancelled()
        and not future.exception()
        and (not future.result())
    )


def _reads(
    metadata: Metadata, entries: Mapping[str, TensorMetadata], boxes: Sequence[Box]
) -> ReadItems:
    """Return what fills some boxes."""
    numbers: dict[str, int] = {}
    row = [numbers.setdefault(box.name, len(numbers)) for box in boxes]
    heads = [
        Head(n, n, WriteItemType.SHARD, entries[n].properties, entries[n].size) for n in numbers
    ]
    catalog = Catalog.of(tuple(heads))
    items = WriteItems(
        catalog,
        column(row),
        padded([box.offsets for box in boxes], 0, catalog.axes),
        padded([box.sizes for box in boxes], 1, catalog.axes),
    )
    return load_plan(metadata, SavePlan(items)).items


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
