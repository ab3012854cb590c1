"""How much is moved? Bytes, requests and peers of every rank and file, counted in columns.

A *request* is one contiguous run of bytes in a saved chunk, which is stored row-major: a box that
does not span the chunk's trailing axes is several. Requests are counted read by read, before
neighbours are merged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..catalog import column
from ..distinct import group_rows
from ..errors import Issue, NotFoundError, PlanError
from ..items import LoadItemType
from ..located import ChunkTable
from ..metadata import Entries, Metadata
from ..overlap import gaps, self_overlaps
from ..packing import Ints
from ..records import LoadPlan, ReadItems, SavePlan
from ..tiling import Grid, Tiling, pad, tile
from ..world import World
from .writers import Writers

__all__ = ["Tally", "Traffic", "count_runs", "itemsizes", "load_traffic", "save_traffic", "volume"]

_VALUE: Final = LoadItemType.BYTE_IO.value
_RELAYED: Final = -2  # in the place of a sender


@attrs.frozen(eq=False)
class Traffic:
    """What moves between ranks and storage.

    Attributes:
        nbytes, requests, elements: Per rank.
        peak: Per rank, the bytes of the largest piece that cannot go straight to its place.
        sent, received: Per rank, bytes that go to and come from other ranks.
        peers: Per rank, from how many files it reads; None for a save, or if it is not known what
            lies where.
        files: The rank that wrote each file; None if that is not known.
        file_nbytes, file_requests: Per file.
        readers: Per file, how many ranks read it.
        unique: Bytes of storage that at least one rank touches.
        whole: Bytes that would move if every read fetched all of its saved chunk; None for a save.
        relayed: Bytes that ranks read for others alone.
    """

    nbytes: Ints
    requests: Ints
    elements: Ints
    peak: Ints
    sent: Ints
    received: Ints
    peers: Ints | None
    files: Ints | None
    file_nbytes: Ints
    file_requests: Ints
    readers: Ints
    unique: int
    whole: int | None
    relayed: int = 0


class Tally:
    """Sums that grow while traffic is counted."""

    def __init__(self, ranks: int, writers: Writers | None) -> None:
        self.files = None if writers is None else writers.ranks
        files = 0 if self.files is None else len(self.files)
        self.nbytes, self.requests, self.elements, self.peak = np.zeros((4, ranks), np.int64)
        self.sent, self.received = np.zeros((2, ranks), np.int64)
        self.file_nbytes, self.file_requests = np.zeros((2, files), np.int64)
        self.seen = np.zeros((ranks, files), bool)
        self.unique = self.whole = self.relayed = 0

    def file(self, writer: Ints) -> Ints:
        """Return which file each writer's is."""
        return np.searchsorted(column([]) if self.files is None else self.files, writer)

    def add_ranks(self, rank: Ints, nbytes: Ints, requests: Ints, elements: Ints) -> None:
        """Count what ranks move; a rank may come in many rows."""
        np.add.at(self.nbytes, rank, nbytes)
        np.add.at(self.requests, rank, requests)
        np.add.at(self.elements, rank, elements)

    def add_files(self, file: Ints, nbytes: Ints, requests: Ints) -> None:
        """Count what moves into or out of files."""
        np.add.at(self.file_nbytes, file, nbytes)
        np.add.at(self.file_requests, file, requests)

    def done(self, *, is_save: bool = False) -> Traffic:
        """Return the sums as a value."""
        known = self.files is not None
        return Traffic(
            self.nbytes,
            self.requests,
            self.elements,
            self.peak,
            self.sent,
            self.received,
            self.seen.sum(axis=1) if known and not is_save else None,
            self.files,
            self.file_nbytes,
            self.file_requests,
            self.seen.sum(axis=0),
            self.unique,
            None if is_save else self.whole,
            self.relayed,
        )


def count_runs(lengths: Ints, extents: Ints) -> Ints:
    """Return how many contiguous runs each box is in the row-major array that holds it.

    Args:
        lengths: How large the box is; one row a box.
        extents: How large the array is.

    >>> lengths = np.array([[2, 3], [2, 4], [1, 3], [0, 4]])
    >>> count_runs(lengths, np.array([[5, 4]] * 4)).tolist()
    [2, 1, 1, 0]
    """
    runs = np.ones(len(lengths), np.int64)
    partial = np.zeros(len(lengths), bool)  # does a later axis stop short of the array's?
    for axis in reversed(range(lengths.shape[1])):
        runs *= np.where(partial, lengths[:, axis], 1)
        partial |= lengths[:, axis] != extents[:, axis]
    return np.where((lengths == 0).any(axis=1), 0, runs)


def save_traffic(plans: Sequence[SavePlan]) -> Traffic:
    """Count what ranks write, each to a file of its own; one request a chunk or value."""
    world = plans if isinstance(plans, World) else World(plans)
    rows = world.rows
    if rows.issues:
        raise PlanError(rows.issues)
    tally = Tally(len(world), None)
    tally.files = np.arange(len(world))
    for rank, plan in enumerate(world):
        items = plan.items
        is_value = items.catalog.is_bytes[items.row]
        elements = np.where(is_value, 0, items.sizes.prod(axis=1))
        sources = [items.row, items.shard_offsets]
        extents = _extents(sources, items.offsets - items.shard_offsets + items.sizes)
        staged = count_runs(items.sizes, extents) > 1
        tally.nbytes[rank] = items.nbytes.sum()
        tally.requests[rank] = np.count_nonzero(is_value | (elements > 0))
        tally.elements[rank] = elements.sum()
        tally.peak[rank] = (items.nbytes * staged).max(initial=0)
    tally.file_nbytes, tally.file_requests = tally.nbytes, tally.requests
    tally.seen = np.zeros((0, len(world)), bool)  # nobody reads
    itemsize = np.array([*(p.itemsize for p in rows.props), 0])[rows.prop]
    nbytes = rows.sizes.prod(axis=1) * itemsize[rows.tensor]
    tally.unique = int(nbytes[~rows.repeats].sum())
    return tally.done(is_save=True)


def _extents(shard: Sequence[Ints], ends: Ints) -> Ints:
    """Return how large each piece's shard is: a shard is the box that its pieces span.

    Args:
        shard: Columns that tell one shard from another.
        ends: Where each piece ends, relative to its shard.
    """
    first, group = group_rows(shard)
    extents = np.zeros((len(first), ends.shape[1]), np.int64)
    np.maximum.at(extents, group, ends)
    return extents[group]


def load_traffic(
    metadata: Metadata, plans: Sequence[LoadPlan], writers: Writers | None = None
) -> Traffic:
    """Count what the reads of all ranks move, and what ranks pass on to each other."""
    got = _gather(metadata, plans)
    tally = Tally(len(plans), writers)
    np.maximum.at(tally.peak, got.rank, got.nbytes * got.staged)
    passed = got.source >= 0
    np.add.at(tally.sent, got.source[passed], got.nbytes[passed])
    np.add.at(tally.received, got.rank[passed], got.nbytes[passed])
    reads = got.take(~passed)
    tally.add_ranks(reads.rank, reads.nbytes, reads.requests, reads.elements)
    tally.whole = int(reads.whole.sum())
    tally.relayed = int(reads.nbytes[reads.source == _RELAYED].sum())
    tally.unique = _unique(itemsizes(metadata.state_dict_metadata), reads)
    if writers is not None:
        file = tally.file(_writer(writers, reads.entry, reads.chunk))
        tally.add_files(file, reads.nbytes, reads.requests)
        touched = reads.requests > 0
        tally.seen[reads.rank[touched], file[touched]] = True
    return tally.done()


@attrs.frozen(eq=False)
class _Pieces:
    """What all ranks read or receive; one row a piece.

    Attributes:
        rank: Whose it is.
        source: The rank that sends it; -1 if it is read from storage, -2 if for others alone.
        entry, chunk: Which of the checkpoint's entries, and which chunk of it.
        offsets, lengths: The box, in the saved tensor's frame.
        elements, nbytes, requests: What it takes; a value that is no tensor takes one request.
        whole: Bytes of the saved chunk.
        staged: Whether it is not contiguous in the shard that it fills.
    """

    rank: Ints
    source: Ints
    entry: Ints
    chunk: Ints
    offsets: Ints
    lengths: Ints
    elements: Ints
    nbytes: Ints
    requests: Ints
    whole: Ints
    staged: npt.NDArray[np.bool_]

    def take(self, rows: npt.NDArray[Any]) -> _Pieces:
        """Return the given rows (numbers or a mask)."""
        fields = [field.name for field in attrs.fields(_Pieces)]
        return _Pieces(*(getattr(self, name)[rows] for name in fields))


def _gather(metadata: Metadata, plans: Sequence[LoadPlan]) -> _Pieces:
    """Lay end to end what all ranks read and what they receive."""
    entries = metadata.state_dict_metadata
    table = ChunkTable.of(entries.layouts)
    items, rank, source = _end_to_end(plans)
    entry, is_value = _entry(metadata, items, rank), items.type == _VALUE
    layout = entries.layout[entry]
    chunk = table.find(layout, items.storage_anchor, items.storage_hint)
    for row in np.flatnonzero(chunk < 0)[:1].tolist():
        index = items[row].storage_index
        text = f"`{index.fqn}`, read by rank {rank[row]}, has no saved chunk at {index.offset}"
        raise NotFoundError(text)
    axes = max(table.sizes.shape[1], items.lengths.shape[1])
    saved = pad(table.sizes, axes, 1)[table.first[layout] + chunk]
    lengths = pad(items.lengths, axes, 1)
    shards = [rank, items.dest, items.dest_anchor]
    extents = pad(_extents(shards, items.dest_offsets + items.lengths), axes, 1)
    itemsize = itemsizes(entries)[entry]
    return _Pieces(
        rank,
        source,
        entry,
        chunk,
        pad(items.storage_anchor + items.storage_offsets, axes, 0),
        lengths,
        items.numel,
        items.numel * itemsize,
        np.where(is_value, 1, count_runs(lengths, saved)),
        saved.prod(axis=1) * itemsize * (items.numel > 0),
        count_runs(lengths, extents) > 1,
    )


def _end_to_end(plans: Sequence[LoadPlan]) -> tuple[ReadItems, Ints, Ints]:
    """Return all reads, those for others, then all received: items, whose, and who sends them."""
    received = [p.transfers.take(p.transfers.target == rank) for rank, p in enumerate(plans)]
    relayed = [_relayed(plan, rank) for rank, plan in enumerate(plans)]
    parts = [plan.items for plan in plans] + relayed + [part.reads for part in received]
    whose = np.concatenate([np.arange(len(plans))] * 3)
    rank = np.repeat(whose, [len(part) for part in parts])
    own, passed = (sum(map(len, some)) for some in ([plan.items for plan in plans], relayed))
    read = np.repeat([-1, _RELAYED], [own, passed])
    return (
        ReadItems.concat(parts),
        rank,
        np.concatenate([read, *(part.source for part in received)]),
    )


def _relayed(plan: LoadPlan, rank: int) -> ReadItems:
    """Return what a rank reads, each region once, though it only sends it to others."""
    sent = plan.transfers.reads.take(plan.transfers.source == rank)
    every = ReadItems.concat([plan.items, sent])
    places = every.storage_anchor + every.storage_offsets
    first, _ = group_rows([every.type, every.storage, places, every.lengths])
    return every.take(np.sort(first[first >= len(plan.items)]))


def _entry(metadata: Metadata, items: ReadItems, rank: Ints) -> Ints:
    """Return which entry each item reads; raise where the checkpoint has no such entry."""
    entries = metadata.state_dict_metadata
    entry = column([entries.row_of.get(name, -1) for name in items.names])[items.storage]
    for row in np.flatnonzero(entry < 0)[:1].tolist():
        metadata.entry(items.names[items.storage[row]])  # raises, with the nearest names
    is_value = items.type == _VALUE
    for row in np.flatnonzero(is_value != (entries.layout[entry] < 0))[:1].tolist():
        name, kind = items.names[items.storage[row]], "value" if is_value[row] else "tensor"
        text = f"`{name}` is read as a {kind} by rank {rank[row]}, but was not saved as one"
        raise PlanError([Issue("type", name, text, [rank[row]])])
    return entry


def itemsizes(entries: Entries) -> Ints:
    """Return the bytes of one element of each entry; 0 for values that are no tensors."""
    return column([*(p.itemsize for p in entries.props), 0])[entries.prop]


def _writer(writers: Writers, entry: Ints, chunk: Ints) -> Ints:
    """Return who wrote each chunk."""
    lengths = column([len(c) for c in writers.columns])
    start = np.cumsum(lengths) - lengths
    flat = np.concatenate([column([]), *writers.columns])
    found: Ints = flat[start[writers.column[entry]] + chunk]
    return found


def _unique(itemsize: Ints, reads: _Pieces) -> int:
    """Return how many bytes of storage the reads touch; tensors read alike are looked at once."""
    real = reads.take(reads.elements > 0)
    first, _ = group_rows([real.entry, real.offsets, real.lengths])
    real = real.take(first)
    known: dict[bytes, int] = {}
    total = 0
    for low, high in _stretches(real.entry):
        boxes = real.offsets[low:high], real.lengths[low:high]
        key = boxes[0].tobytes() + boxes[1].tobytes()
        if key not in known:
            known[key] = volume(tile(*boxes))
        total += known[key] * int(itemsize[real.entry[low]])
    return total


def _stretches(values: Ints) -> Iterator[tuple[int, int]]:
    """Yield where each stretch of equal values begins and ends."""
    edges = np.flatnonzero(np.diff(values, prepend=-1, append=-1)).tolist()
    yield from pairwise(edges)


def volume(tiling: Tiling) -> int:
    """Return how many elements lie in at least one chunk."""
    if isinstance(tiling, Grid) or not self_overlaps(tiling, limit=1):
        return tiling.volume()
    bounds = tiling.bounds()
    return bounds.numel - sum(gap.numel for gap in gaps(tiling, bounds, limit=sys.maxsize))
