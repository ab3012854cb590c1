"""What each rank and each file moves, counted from plans, in columns.

A *request* is one contiguous run of bytes in a saved chunk, which is stored row-major: a box that
does not span the chunk's trailing axes is several. Requests are counted read by read, before
neighbours are merged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Columns, ColumnTable, Ints, column, group_rows, pad
from ..columns.reads import ReadItems
from ..columns.world import World
from ..errors import Issue, NotFoundError, PlanError
from ..geometry.overlap import gaps, self_overlaps
from ..geometry.tilings import tile
from ..metadata import Metadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType
from ..storage.blocks import ChunkTable, entries_of
from .origins import Writers

T = TypeVar("T")

_VALUE: Final = LoadItemType.BYTE_IO.value
_RELAYED: Final = -2  # in place of a sender: read from storage, for other ranks only


@attrs.frozen
class RankCost:
    """What one rank does."""

    rank: int
    nbytes: int  # what it moves from storage, or, in a save, to storage
    requests: int  # contiguous runs of bytes that it asks for, before neighbours are merged
    elements: int
    peers: int | None  # the files it reads; None in a save, or if the writers are unknown
    # Bytes of the largest piece that is staged: it is not contiguous in its shard, or is cast.
    peak_buffer: int
    sent: int  # bytes to other ranks
    received: int
    seconds: float  # by the model


@attrs.frozen
class FileCost:
    """What happens to one file."""

    file: int  # the rank that wrote it
    nbytes: int  # bytes that are read from it, or, in a save, written to it
    requests: int
    readers: int  # how many ranks read it; 0 in a save


class _Figures(ColumnTable, Columns[T]):
    """Records of numbers; one column a field, None where a figure is unknown."""

    _record: ClassVar[Any]

    def __attrs_post_init__(self) -> None:
        for values in self.columns:
            if values is not None:
                values.flags.writeable = False

    @property
    def columns(self) -> tuple[Any, ...]:
        """Every column, in order of the record's fields."""
        return tuple(getattr(self, field.name) for field in attrs.fields(self._record))

    def __len__(self) -> int:
        return len(self.columns[0])

    def record(self, row: int) -> T:
        """Make the record of one row."""
        made: T = self._record(*(None if c is None else c[row].item() for c in self.columns))
        return made

    def _same(self, other: Self) -> bool:
        return self.same(other)


@attrs.frozen(eq=False, repr=False)
class RankCosts(_Figures[RankCost]):
    """The figures of all ranks; see `RankCost`."""

    _record = RankCost
    rank: Ints
    nbytes: Ints
    requests: Ints
    elements: Ints
    peers: Ints | None
    peak_buffer: Ints
    sent: Ints
    received: Ints
    seconds: npt.NDArray[np.float64]

    @classmethod
    def of(cls, nbytes: Ints, requests: Ints, elements: Ints, peak: Ints) -> RankCosts:
        """Make the figures of ranks that send nothing and whose peers are unknown; no time yet."""
        rank, none = np.arange(len(nbytes)), np.zeros(len(nbytes), np.int64)
        return cls(rank, nbytes, requests, elements, None, peak, none, none, none.astype(float))


@attrs.frozen(eq=False, repr=False)
class FileCosts(_Figures[FileCost]):
    """The figures of all files; see `FileCost`."""

    _record = FileCost
    file: Ints
    nbytes: Ints
    requests: Ints
    readers: Ints


@attrs.frozen(eq=False)
class Traffic:
    """What moves between ranks and storage."""

    ranks: RankCosts  # the figures of each rank; no time yet
    files: FileCosts | None  # the figures of each file; None if the writers are unknown
    unique: int  # bytes of storage that at least one rank touches
    # Bytes that would move if every read fetched all of its saved chunk; None for a save.
    whole: int | None
    relayed: int = 0  # bytes that ranks read for others only


def add_up(at: Ints, values: Ints, count: int) -> Ints:
    """Add values up by where they belong."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, at, values)
    return sums


def count_runs(lengths: Ints, extents: Ints) -> Ints:
    """Return how many contiguous runs each box is in the row-major array that holds it.

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
    world = World.of(plans)
    rows = world.rows
    if rows.issues:
        raise PlanError(rows.issues)
    written = column([attrs.astuple(_written(plan)) for plan in world], len(world), 4)
    ranks = RankCosts.of(*written.T)
    files = FileCosts(ranks.rank, ranks.nbytes, ranks.requests, ranks.sent)
    itemsize = column([*(p.itemsize for p in rows.props), 0])[rows.prop]
    sizes = rows.sizes.prod(axis=1) * itemsize[rows.tensor]
    return Traffic(ranks, files, int(sizes[~rows.repeats].sum()), None)


@attrs.frozen
class _Written:
    """What one rank writes."""

    nbytes: int
    requests: int
    elements: int
    peak_buffer: int  # bytes of the largest chunk that must be staged


def _written(plan: SavePlan) -> _Written:
    items = plan.items
    is_value = items.catalog.is_bytes[items.row]
    elements = np.where(is_value, 0, items.sizes.prod(axis=1))
    shards = [items.row, items.shard_offsets]
    extents = _extents(shards, items.box_offsets - items.shard_offsets + items.box_sizes)
    is_staged = count_runs(items.box_sizes, extents) > 1
    if items.frame is not None:
        is_staged |= items.frame.axes.known | items.is_fill
    staged = items.nbytes * is_staged
    requests = int(np.count_nonzero(is_value | (elements > 0)))
    peak = int(staged.max(initial=0))
    return _Written(int(items.nbytes.sum()), requests, int(elements.sum()), peak)


def _extents(shard: Sequence[Ints], ends: Ints) -> Ints:
    """Return how large each piece's shard is: a shard is the box that its pieces span."""
    first, group = group_rows(shard)
    extents = np.zeros((len(first), ends.shape[1]), np.int64)
    np.maximum.at(extents, group, ends)
    return extents[group]


def load_traffic(
    metadata: Metadata, plans: Sequence[LoadPlan], writers: Writers | None = None
) -> Traffic:
    """Count what the reads of all ranks move, and what ranks pass on to each other."""
    pieces, count = load_pieces(metadata, plans), len(plans)
    passed = pieces.take(pieces.source >= 0)
    reads = pieces.take(pieces.source < 0)
    peak = np.zeros(count, np.int64)
    np.maximum.at(peak, pieces.rank, pieces.nbytes * pieces.staged)
    nbytes, requests, elements = (
        add_up(reads.rank, c, count) for c in (reads.nbytes, reads.requests, reads.elements)
    )
    sent, received = (add_up(at, passed.nbytes, count) for at in (passed.source, passed.rank))
    ranks, files = RankCosts.of(nbytes, requests, elements, peak), None
    ranks = attrs.evolve(ranks, sent=sent, received=received)
    if writers is not None:
        file = np.searchsorted(writers.ranks, writers.rank_of(reads.entry, reads.chunk))
        seen = np.zeros((count, len(writers.ranks)), bool)
        touched = reads.requests > 0
        seen[reads.rank[touched], file[touched]] = True
        size, runs = (add_up(file, c, len(writers.ranks)) for c in (reads.nbytes, reads.requests))
        files = FileCosts(writers.ranks, size, runs, seen.sum(axis=0))
        ranks = attrs.evolve(ranks, peers=seen.sum(axis=1))
    unique = _unique(metadata.state_dict_metadata.itemsize, reads)
    relayed = int(reads.nbytes[reads.source == _RELAYED].sum())
    return Traffic(ranks, files, unique, int(reads.whole.sum()), relayed)


@attrs.frozen(eq=False)
class _Pieces(ColumnTable):
    """What all ranks read or receive; one row a piece."""

    rank: Ints  # the rank that gets it
    source: Ints  # the rank that sends it; -1 if it is read from storage, -2 if for others only
    entry: Ints  # which of the checkpoint's entries, and which chunk of it
    chunk: Ints
    offsets: Ints  # the box, in the saved tensor's frame
    lengths: Ints
    elements: Ints  # what it takes; a non-tensor value takes one request
    nbytes: Ints
    requests: Ints
    whole: Ints  # bytes of the saved chunk
    staged: npt.NDArray[np.bool_]  # whether it is not contiguous in the shard that it fills


def load_pieces(metadata: Metadata, plans: Sequence[LoadPlan]) -> _Pieces:
    """Lay end to end what all ranks read and what they receive."""
    entries = metadata.state_dict_metadata
    table = ChunkTable.of(entries.layouts)
    reads = _end_to_end(plans)
    items, rank = reads.items, reads.rank
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
    extents = pad(_extents(shards, items.dest_offsets + items.dest_lengths), axes, 1)
    scatters = count_runs(pad(items.dest_lengths, axes, 1), extents) > 1
    if items.frame is not None:
        scatters |= items.frame.axes.known
    itemsize = entries.itemsize[entry]
    return _Pieces(
        rank=rank,
        source=reads.source,
        entry=entry,
        chunk=chunk,
        offsets=pad(items.storage_anchor + items.storage_offsets, axes, 0),
        lengths=lengths,
        elements=items.numel,
        nbytes=items.numel * itemsize,
        requests=np.where(is_value, 1, count_runs(lengths, saved)),
        whole=saved.prod(axis=1) * itemsize * (items.numel > 0),
        staged=scatters,
    )


@attrs.frozen(eq=False)
class _Reads:
    """All that is read, relayed and received; see `_Pieces`."""

    items: ReadItems
    rank: Ints
    source: Ints


def _end_to_end(plans: Sequence[LoadPlan]) -> _Reads:
    own = [plan.items for plan in plans]
    relayed = [_relayed(plan, rank) for rank, plan in enumerate(plans)]
    received = [p.transfers.take(p.transfers.target == rank) for rank, p in enumerate(plans)]
    parts = [*own, *relayed, *(part.reads for part in received)]
    rank = np.repeat(np.tile(np.arange(len(plans)), 3), [len(part) for part in parts])
    read = np.repeat([-1, _RELAYED], [sum(map(len, own)), sum(map(len, relayed))])
    source = np.concatenate([read, *(part.source for part in received)])
    return _Reads(ReadItems.concat(parts), rank, source)


def _relayed(plan: LoadPlan, rank: int) -> ReadItems:
    """Return what a rank reads only to send it to others, each region once."""
    sent = plan.transfers.reads.take(plan.transfers.source == rank)
    every = ReadItems.concat([plan.items, sent])
    places = every.storage_anchor + every.storage_offsets
    first, _ = group_rows([every.type, every.storage, places, every.lengths])
    return every.take(np.sort(first[first >= len(plan.items)]))


def _entry(metadata: Metadata, items: ReadItems, rank: Ints) -> Ints:
    """Return which entry each item reads; raise if the checkpoint has no such entry."""
    entries = metadata.state_dict_metadata
    entry, _ = entries_of(metadata, items)
    for row in np.flatnonzero(entry < 0)[:1].tolist():
        metadata.entry(items.names[items.storage[row]])  # raises, with the nearest names
    is_value = items.type == _VALUE
    for row in np.flatnonzero(is_value != (entries.layout[entry] < 0))[:1].tolist():
        name, kind = items.names[items.storage[row]], "value" if is_value[row] else "tensor"
        text = f"`{name}` is read as a {kind} by rank {rank[row]}, but was not saved as one"
        raise PlanError([Issue("type", name, text, [rank[row]])])
    return entry


def _unique(itemsize: Ints, reads: _Pieces) -> int:
    """Return how many bytes of storage the reads touch; tensors read alike are looked at once."""
    real = reads.take(reads.elements > 0)
    first, _ = group_rows([real.entry, real.offsets, real.lengths])
    real = real.take(first)
    edges = np.flatnonzero(np.diff(real.entry, prepend=-1, append=-1)).tolist()
    known: dict[bytes, int] = {}
    total = 0
    for low, high in pairwise(edges):
        boxes = real.offsets[low:high], real.lengths[low:high]
        key = boxes[0].tobytes() + boxes[1].tobytes()
        if key not in known:
            tiling = tile(*boxes)
            known[key] = tiling.volume()
            if self_overlaps(tiling, limit=1):  # count what lies in several boxes once
                bounds = tiling.bounds()
                holes = gaps(tiling, bounds, limit=sys.maxsize)
                known[key] = bounds.numel - sum(gap.numel for gap in holes)
        total += known[key] * int(itemsize[real.entry[low]])
    return total
