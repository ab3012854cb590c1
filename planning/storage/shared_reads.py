"""Shared reads of a load: whether reading together is cheaper, and in which rounds ranks do it.

1. All tensors of the checkpoint are thought to lie end to end, in order of their names, and are
   cut into rounds of a fixed number of bytes. Each block of a chunk belongs to one round.
2. A region that one rank reads for others is read once. Regions that make up a block of a chunk
   are read as the block, so that it can be checked.
3. Within a round, a rank sends regions in the order in which others expect them.
4. What a rank reads for itself alone needs no round.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, distinct, group_rows, padded, readonly
from ..columns.reads import ReadItems
from ..geometry.tilings import pad
from ..metadata import Entries, Metadata
from ..plans import LoadPlan
from ..records import LoadItemType
from .blocks import Located, locate_reads
from .ranges import fetched

MOST_READS: Final = 1 << 22
"""The most reads of all ranks together for which sharing is planned unasked: so many take the
coordinator some 12 s and 4 GB."""


@attrs.frozen
class Need:
    """What one rank needs of a checkpoint.

    Attributes:
        fetched: Bytes that it would fetch alone: what it needs, and narrow gaps in between.
        names: A fingerprint of the names of all tensors that it reads, in whole or in part.
        size: Bytes of these tensors, whole.
        reads: The number of reads in its plan.
        total: Bytes of all tensors of the checkpoint.
        host: The machine it runs on.
        is_local: Whether the checkpoint is on a local path.
    """

    fetched: int
    names: str
    size: int
    reads: int
    total: int
    host: str
    is_local: bool


def need_of(plan: LoadPlan, metadata: Metadata, max_gap: int, *, host: str, is_local: bool) -> Need:
    """Return what a rank with this plan needs; gaps of up to ``max_gap`` bytes are fetched.

    One column of four, of rows of 4 bytes, is 3 bytes, or 9 with what lies between:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, world_plans
    >>> wanted = world_plans({"w": TensorSpec((3, 4), "int8", [Shard(1)])}, Mesh(tp=4))
    >>> metadata = global_plan(world_plans({"w": TensorSpec((3, 4), "int8")}, Mesh(one=1)))[1]
    >>> plan = load_plan(metadata, wanted[0])
    >>> [need_of(plan, metadata, gap, host="a", is_local=True).fetched for gap in (0, 3)]
    [3, 9]
    """
    entries, items = metadata.state_dict_metadata, plan.items
    used = sorted({items.names[n] for n in distinct(items.storage).tolist()})
    return Need(
        _fetched_bytes(items, metadata, max_gap) if max_gap else plan_bytes(plan, metadata),
        hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(),
        _size(entries, [entries.row_of[name] for name in used]),
        len(items),
        _size(entries, slice(None)),
        host,
        is_local,
    )


def _fetched_bytes(items: ReadItems, metadata: Metadata, max_gap: int) -> int:
    if not len(items):
        return 0
    extents, width = locate_reads(metadata, items).extents, read_widths(items, metadata)
    lengths = pad(items.lengths, extents.shape[1], 1)
    return int((fetched(lengths, extents, width, max_gap) * width).sum())


def plan_bytes(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes of tensors that a plan reads."""
    return int((plan.items.numel * read_widths(plan.items, metadata)).sum())


def read_widths(items: ReadItems, metadata: Metadata) -> Ints:
    """Return the bytes of one element of each read; 0 for non-tensor values."""
    entries = metadata.state_dict_metadata
    if not len(items):
        return column([])
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return width[row[items.storage]]


def sharing_pays(needs: Sequence[Need]) -> bool:
    """Return True if reading once and sending is cheaper than reading more than once.

    If ranks fetch more bytes than there are in the tensors that they need, or in all, some fetch
    the same. Planning for all of them takes the coordinator time and memory, though, and a local
    disk is read faster than other ranks can send.

    >>> needs = [Need(9, f"tensors of {r}", 9, 1, 12, "host", is_local=False) for r in range(4)]
    >>> sharing_pays(needs), sharing_pays(needs[:1])
    (True, False)
    """
    size = min(sum({need.names: need.size for need in needs}.values()), needs[0].total)
    if sum(need.fetched for need in needs) <= size:
        return False
    if sum(need.reads for need in needs) > MOST_READS:
        return False
    return not all(need.is_local for need in needs) or len({need.host for need in needs}) > 1


def _size(entries: Entries, rows: list[int] | slice) -> int:
    """Count the bytes of some tensors, whole."""
    kinds = zip(entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True)
    return sum(
        count * math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for (layout, prop), count in Counter(kinds).items()
        if layout >= 0
    )


@attrs.frozen
class Arrival:
    """A region that another rank sends; ``transfer`` is the row of the plan's transfers."""

    transfer: int
    source: int
    dtype: str
    nbytes: int


@attrs.frozen
class Piece:
    """A region that this rank reads for others, and perhaps for itself.

    Attributes:
        read: The row of the round's reads that brings it.
        offsets, sizes: The region in the box of that read, in elements.
        nbytes: Its size in bytes.
        targets: The ranks it is sent to.
        items: The rows of the plan's own reads that it fills.
    """

    read: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int
    targets: tuple[int, ...]
    items: tuple[int, ...]


@attrs.frozen(eq=False)
class Round:
    """What a rank does in one round.

    Attributes:
        arrivals: What it receives, in the order of sending.
        reads: What it reads from storage, and ``dtypes``, what each read is stored as.
        pieces: What it sends of that, in the order of sending.
    """

    arrivals: tuple[Arrival, ...]
    reads: ReadItems
    dtypes: tuple[str, ...]
    pieces: tuple[Piece, ...]


@attrs.frozen(eq=False)
class SharedRounds:
    """One rank's part of a shared load.

    Attributes:
        rounds: The rounds in which it reads for others or receives anything, in order.
        rest: The rows of the plan's own reads that are read straight from storage.
        read: Bytes of tensors that it reads from storage, for itself and for others.
    """

    rounds: tuple[Round, ...]
    rest: tuple[int, ...]
    read: int

    @property
    def received(self) -> int:
        """Bytes that come from other ranks."""
        return sum(a.nbytes for one in self.rounds for a in one.arrivals)

    @property
    def sent(self) -> int:
        """Bytes that go to other ranks."""
        return sum(p.nbytes * len(p.targets) for one in self.rounds for p in one.pieces)


def shared_rounds(
    plan: LoadPlan,
    metadata: Metadata,
    rank: int,
    *,
    round_bytes: int,
    block_bytes: int,
    max_gap: int = 0,
) -> SharedRounds:
    """Order what a rank reads, sends and receives, as all other ranks do.

    Args:
        plan: The rank's plan, with transfers; see `share_reads`.
        metadata: The checkpoint.
        rank: The rank.
        round_bytes: Bytes of the checkpoint in a round: they are in memory at a time.
        block_bytes: The most bytes of a block that the checkpoint was hashed with.
        max_gap: Gaps of up to so many bytes between two ranges are fetched.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan, share_reads
    >>> plan = local_plan({"w": TensorSpec((4,))})
    >>> metadata = global_plan([plan])[1]
    >>> plans = share_reads(metadata, min_bytes=1)((load_plan(metadata, plan),) * 2)
    >>> a, b = (
    ...     shared_rounds(plan, metadata, rank, round_bytes=64, block_bytes=64)
    ...     for rank, plan in enumerate(plans)
    ... )
    >>> a.rounds[0].pieces[0].targets, a.sent, b.rounds[0].arrivals[0].source, b.received
    ((1,), 16, 0, 16)
    """
    table = _Table.of(plan, metadata, block_bytes, max_gap)
    number = table.round_numbers(round_bytes)
    batches, rest = table.batches(rank)
    coming, going = defaultdict[int, list[int]](list), defaultdict[int, list[_Batch]](list)
    for row in table.arrivals(rank):
        coming[number[row]].append(row)
    for batch in batches:
        going[number[batch.row]].append(batch)
    rounds = tuple(table.round(coming[n], going[n]) for n in sorted({*coming, *going}))
    reads = ReadItems.concat([plan.items.take(column(rest)), *(one.reads for one in rounds)])
    nbytes = int((reads.numel * read_widths(reads, metadata)).sum())
    return SharedRounds(rounds, tuple(rest), nbytes)


@attrs.frozen
class _Batch:
    """Regions that are read as one: a region alone, or all those that make up a block.

    ``regions`` has the rows of each region; transfers come before own reads.
    """

    regions: list[list[int]]
    is_block: bool

    @property
    def row(self) -> int:
        """Any row of it."""
        return self.regions[0][0]


@attrs.frozen(eq=False)
class _Table:
    """A plan's reads, one row each: those of its transfers, then its own.

    Attributes:
        plan, metadata: The plan, and the checkpoint.
        reads, located: The reads, and the blocks they lie in.
        by_name: The checkpoint's entries in order of their names.
        width: Bytes of one element.
        region: Which region of the checkpoint is read; all ranks number them in the same order.
        fetched: Elements that are fetched if the region is read alone.
    """

    plan: LoadPlan
    metadata: Metadata
    reads: ReadItems
    located: Located
    by_name: Ints
    width: Ints
    region: Ints
    fetched: Ints

    @classmethod
    def of(cls, plan: LoadPlan, metadata: Metadata, block_bytes: int, max_gap: int) -> _Table:
        """Find the blocks, regions and sizes of all reads."""
        reads = ReadItems.concat([plan.transfers.reads, plan.items])
        located, width = locate_reads(metadata, reads, block_bytes), read_widths(reads, metadata)
        names = metadata.state_dict_metadata.names
        by_name = column(sorted(range(len(names)), key=names.__getitem__))
        where = reads.storage_anchor + reads.storage_offsets
        _, region = group_rows([np.argsort(by_name)[located.entry], where, reads.lengths])
        lengths = pad(reads.lengths, located.extents.shape[1], 1)
        many = fetched(lengths, located.extents, width, max_gap)
        return cls(plan, metadata, reads, located, by_name, width, region, many)

    def arrivals(self, rank: int) -> list[int]:
        """Return the rows that come to a rank, in the order in which they are sent."""
        transfers = self.plan.transfers
        tensors = transfers.reads.type == LoadItemType.TENSOR.value
        rows = np.flatnonzero((transfers.target == rank) & tensors)
        ordered: list[int] = rows[np.argsort(self.region[rows], kind="stable")].tolist()
        return ordered

    def batches(self, rank: int) -> tuple[list[_Batch], list[int]]:
        """Return what a rank reads for others, and which of its own reads are left then."""
        count, region = len(self.plan.transfers), self.region.tolist()
        mine = np.ones(len(self.reads), bool)
        mine[:count] = self.plan.transfers.source == rank
        rows = np.flatnonzero(mine & (self.reads.type == LoadItemType.TENSOR.value))
        _, block = group_rows([self.located.keys])
        rows = rows[np.lexsort((self.region[rows], block[rows]))]
        batches, rest = list[_Batch](), list[int]()
        for _, same_block in groupby(rows.tolist(), block.tolist().__getitem__):
            regions = [list(same) for _, same in groupby(same_block, region.__getitem__)]
            if self._is_block(regions):
                batches.append(_Batch(regions, is_block=True))
                continue
            batches += [_Batch([rows], is_block=False) for rows in regions if rows[0] < count]
            rest += [row - count for rows in regions if rows[0] >= count for row in rows]
        return batches, rest

    def _is_block(self, regions: list[list[int]]) -> bool:
        """Return True if several regions make up a block of a chunk, or fetch as much."""
        first = [rows[0] for rows in regions]
        if len(first) == 1 or not self.located.inside[first].all():
            return False
        return int(self.fetched[first].sum()) >= int(self.located.numel[first[0]])

    def round_numbers(self, round_bytes: int) -> list[int]:
        """Return the round of each read, by where its block lies in the checkpoint."""
        entries, axes = self.metadata.state_dict_metadata, self.reads.lengths.shape[1]
        shapes = [*(layout.size for layout in entries.layouts), ()]
        width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
        sizes = column([math.prod(shape) for shape in shapes])[entries.layout] * width
        start = np.empty_like(sizes)
        start[self.by_name] = np.cumsum(sizes[self.by_name]) - sizes[self.by_name]
        extent = padded(shapes, 1, axes)[entries.layout[self.located.entry]]
        offsets = self.reads.storage_anchor + self.located.start[:, :axes]
        place = np.zeros(len(self.reads), np.int64)
        for axis in range(axes):
            place = place * extent[:, axis] + offsets[:, axis]
        numbers: list[int] = (
            (start[self.located.entry] + place * self.width) // round_bytes
        ).tolist()
        return numbers

    def round(self, coming: list[int], going: list[_Batch]) -> Round:
        """Describe a round, given the rows that come and the batches that are read."""
        source = self.plan.transfers.source
        arrivals = tuple(
            Arrival(row, int(source[row]), self._dtype(row), self._nbytes(row)) for row in coming
        )
        rows = column([batch.row for batch in going])
        reads, axes = self.reads.take(rows), self.reads.lengths.shape[1]
        widen = np.array([batch.is_block for batch in going], bool)[:, None]
        start, sizes = self.located.start[rows, :axes], self.located.sizes[rows, :axes]
        reads = attrs.evolve(
            reads,
            storage_offsets=readonly(np.where(widen, start, reads.storage_offsets)),
            lengths=readonly(np.where(widen, sizes, reads.lengths)),
            frame=None,  # they go into memory of their own first
        )
        regions = [(rows, read) for read, batch in enumerate(going) for rows in batch.regions]
        regions.sort(key=lambda pair: self.region[pair[0][0]])
        pieces = tuple(self._piece(rows, read, reads) for rows, read in regions)
        return Round(arrivals, reads, tuple(self._dtype(batch.row) for batch in going), pieces)

    def _piece(self, rows: list[int], read: int, reads: ReadItems) -> Piece:
        row, count, target = rows[0], len(self.plan.transfers), self.plan.transfers.target
        axes = int(self.reads.ndim[row])
        offsets = self.reads.storage_offsets[row] - reads.storage_offsets[read]
        return Piece(
            read,
            tuple(offsets[:axes].tolist()),
            tuple(self.reads.lengths[row, :axes].tolist()),
            self._nbytes(row),
            tuple(int(target[row]) for row in rows if row < count),
            tuple(row - count for row in rows if row >= count),
        )

    def _nbytes(self, row: int) -> int:
        return int(self.reads.numel[row] * self.width[row])

    def _dtype(self, row: int) -> str:
        entries = self.metadata.state_dict_metadata
        dtype: str = entries.props[entries.prop[self.located.entry[row]]].dtype
        return dtype
