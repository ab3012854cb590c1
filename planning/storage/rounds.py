"""When ranks that load together read, send and receive: in rounds, with one message per peer.

1. A region of the checkpoint that one rank reads for others is read once. Regions that make up a
   block of a chunk are read as the block, so that it can be checked.
2. What a rank sends to another in a round is one message: its regions in the order in which all
   ranks number them.
3. What a rank reads for itself alone needs no round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import attrs
import numpy as np

from ..columns.arrays import Ints, column, group_rows, pad, readonly
from ..columns.reads import ReadItems
from ..metadata import Metadata
from ..records import LoadItemType
from .blocks import Located, locate_reads
from .ranges import fetched
from .shared_reads import SharedReads
from .wants import read_widths

_ALIGNED = 16  # bytes: regions of any dtype begin at a multiple


@attrs.frozen
class Region:
    """A box of a saved tensor that travels, and the rows of the reads that it fills here."""

    rows: tuple[int, ...]  # each fills a part of the box, or all of it; see `SharedReads.inner`
    dtype: str
    sizes: tuple[int, ...]  # of the box, in elements
    nbytes: int


@attrs.frozen
class ReadRegion(Region):
    """A region that this rank reads, and where it lies in what the round reads."""

    read: int  # the row of the round's reads that brings it
    offsets: tuple[int, ...]  # in the box of that read, in elements


@attrs.frozen
class Incoming:
    """A message from another rank: its regions, in order."""

    source: int
    regions: tuple[Region, ...]

    @property
    def starts(self) -> list[int]:
        """Where each region begins in the message, in bytes, and where the message ends."""
        return _starts(self.regions)


@attrs.frozen
class Outgoing:
    """A message to some ranks: numbers of regions that the round holds, in order."""

    targets: tuple[int, ...]
    regions: tuple[int, ...]


@attrs.frozen(eq=False)
class Round:
    """What a rank does in one round."""

    reads: ReadItems  # what it reads from storage, and ``dtypes``, what each read is stored as
    dtypes: tuple[str, ...]
    pieces: tuple[ReadRegion, ...]
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    # Once that has come: what it passes on, and what is passed on to it.
    passed_on: tuple[Outgoing, ...]
    relayed: tuple[Incoming, ...]

    @property
    def held(self) -> list[Region]:
        """What this rank can send: what it reads, and then what comes from the readers."""
        return [*self.pieces, *(region for message in self.incoming for region in message.regions)]

    def starts(self, message: Outgoing) -> list[int]:
        """Return where each region begins in a message, in bytes, and where the message ends."""
        held = self.held
        return _starts([held[number] for number in message.regions])


def _starts(regions: Sequence[Region]) -> list[int]:
    """Return where regions begin that lie one after the other, aligned, and where they end."""
    whole = accumulate((-(-one.nbytes // _ALIGNED) * _ALIGNED for one in regions[:-1]), initial=0)
    starts = list(whole)
    return [*starts, starts[-1] + regions[-1].nbytes]


@attrs.frozen(eq=False)
class SharedRounds:
    """One rank's part of a shared load."""

    # The rounds in which it reads for others or receives anything, in order.
    rounds: tuple[Round, ...]
    rest: tuple[int, ...]  # the rows of the reads that it reads for itself alone
    read: int  # bytes of tensors that it reads from storage, for itself and for others

    @property
    def received(self) -> int:
        """Bytes that come from other ranks."""
        return sum(
            region.nbytes
            for one in self.rounds
            for message in (*one.incoming, *one.relayed)
            for region in message.regions
        )

    @property
    def sent(self) -> int:
        """Bytes that go to other ranks."""
        return sum(
            held[number].nbytes * len(message.targets)
            for one in self.rounds
            for held in [one.held]
            for message in (*one.outgoing, *one.passed_on)
            for number in message.regions
        )


def shared_rounds(
    shared: SharedReads, metadata: Metadata, rank: int, *, block_bytes: int, max_gap: int = 0
) -> SharedRounds:
    """Order what a rank reads, sends and receives, as all other ranks do.

    Args:
        shared: Who reads what, as `shared_by_rule` or `shared_by_transfers` say.
        metadata: The checkpoint.
        rank: The rank.
        block_bytes: The most bytes of a block that the checkpoint was hashed with.
        max_gap: Gaps of up to so many bytes between two ranges are fetched.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> from shardplan.planning.storage import shared_by_rule, wants_of
    >>> plan, block = local_plan({"w": TensorSpec((4,))}), {"block_bytes": 64}
    >>> metadata = global_plan([plan])[1]
    >>> wants = wants_of(load_plan(metadata, plan).items, metadata, 2, **block)
    >>> shared = [
    ...     shared_by_rule(wants, metadata, rank, [range(2)], round_bytes=64, **block)
    ...     for rank in range(2)
    ... ]
    >>> a, b = (shared_rounds(one, metadata, rank, **block) for rank, one in enumerate(shared))
    >>> a.rounds[0].outgoing[0].targets, a.sent, b.rounds[0].incoming[0].source, b.received
    ((1,), 16, 0, 16)
    """
    table = _Table.of(shared, metadata, rank, block_bytes, max_gap)
    batches, rest = table.batches()
    coming, going = defaultdict[int, list[int]](list), defaultdict[int, list[_Batch]](list)
    turn = shared.turn.tolist()
    for row in table.arrivals():
        coming[turn[row]].append(row)
    for batch in batches:
        going[turn[batch.row]].append(batch)
    rounds = tuple(table.round(coming[n], going[n]) for n in sorted({*coming, *going}))
    reads = ReadItems.concat([shared.reads.take(column(rest)), *(one.reads for one in rounds)])
    nbytes = int((reads.numel * read_widths(reads, metadata)).sum())
    return SharedRounds(rounds, tuple(rest), nbytes)


@attrs.frozen
class _Batch:
    """Regions that are read as one: a region alone, or all those that make up a block."""

    regions: list[list[int]]
    is_block: bool

    @property
    def row(self) -> int:
        """Any row of it."""
        return self.regions[0][0]


@attrs.frozen(eq=False)
class _Table:
    """The reads of a shared load, one row each."""

    shared: SharedReads
    metadata: Metadata
    rank: int
    located: Located  # the blocks they lie in
    width: Ints  # bytes of one element
    region: Ints  # which region of the checkpoint is read; all ranks number them in the same order
    fetched: Ints  # elements that are fetched if the region is read alone

    @classmethod
    def of(
        cls, shared: SharedReads, metadata: Metadata, rank: int, block_bytes: int, max_gap: int
    ) -> _Table:
        """Find the blocks, regions and sizes of all reads."""
        reads = shared.reads
        located, width = locate_reads(metadata, reads, block_bytes), read_widths(reads, metadata)
        by_name = metadata.state_dict_metadata.name_order
        where = reads.storage_anchor + shared.offsets
        _, region = group_rows([by_name[located.entry], where, shared.lengths])
        lengths = pad(shared.lengths, located.extents.shape[1], 1)
        many = fetched(lengths, located.extents, width, max_gap)
        return cls(shared, metadata, rank, located, width, region, many)

    def arrivals(self) -> list[int]:
        """Return the rows that come from other ranks, in the order in which they are sent."""
        shared = self.shared
        rows = np.flatnonzero((shared.reader != self.rank) & shared.own & ~shared.is_value)
        ordered: list[int] = rows[np.argsort(self.region[rows], kind="stable")].tolist()
        return ordered

    def batches(self) -> tuple[list[_Batch], list[int]]:
        """Return what this rank reads for others, and which of its own reads are left then."""
        shared = self.shared
        is_sent = np.array([any(ranks) for ranks in shared.audiences], bool)[shared.audience]
        rows = np.flatnonzero((shared.reader == self.rank) & ~shared.is_value)
        _, block = group_rows([self.located.keys])
        rows = rows[np.lexsort((~is_sent[rows], self.region[rows], block[rows]))]
        blocks, region, sent = block.tolist(), self.region.tolist(), is_sent.tolist()
        batches, rest = list[_Batch](), list[int]()
        for _, same in groupby(rows.tolist(), blocks.__getitem__):
            same_block = list(same)
            regions = [list(alike) for _, alike in groupby(same_block, region.__getitem__)]
            needed = [rows for rows in regions if sent[rows[0]]]
            if shared.turn[same_block[0]] >= 0 and self._is_block(regions):
                batches.append(_Batch(regions, is_block=True))
                continue
            batches += [_Batch([rows], is_block=False) for rows in needed]
            rest += [row for rows in regions if not sent[rows[0]] for row in rows]
        return batches, rest

    def _is_block(self, regions: list[list[int]]) -> bool:
        """Return True if several regions make up a block of a chunk, or fetch as much."""
        first = [rows[0] for rows in regions]
        if len(first) == 1 or not self.located.inside[first].all():
            return False
        return int(self.fetched[first].sum()) >= int(self.located.numel[first[0]])

    def round(self, coming: list[int], going: list[_Batch]) -> Round:
        """Describe a round, given the rows that come and the batches that are read."""
        rows = column([batch.row for batch in going])
        shared, axes = self.shared, self.shared.lengths.shape[1]
        widen = np.array([batch.is_block for batch in going], bool)[:, None]
        start, sizes = self.located.start[rows, :axes], self.located.sizes[rows, :axes]
        reads = attrs.evolve(
            shared.reads.take(rows),
            storage_offsets=readonly(np.where(widen, start, shared.offsets[rows])),
            lengths=readonly(np.where(widen, sizes, shared.lengths[rows])),
            frame=None,  # they go into memory of their own first
        )
        regions = [(rows, read) for read, batch in enumerate(going) for rows in batch.regions]
        regions.sort(key=lambda pair: self.region[pair[0][0]])
        pieces = tuple(self._piece(rows, read, reads) for rows, read in regions)
        is_near = self.shared.is_near
        near = tuple(self._incoming([row for row in coming if is_near[row]]))
        held = [rows for rows, _ in regions] + [list(r.rows) for m in near for r in m.regions]
        return Round(
            reads,
            tuple(self._dtype(batch.row) for batch in going),
            pieces,
            tuple(self._outgoing([rows for rows, _ in regions])),
            near,
            tuple(self._passed_on(held)),
            tuple(self._incoming([row for row in coming if not is_near[row]])),
        )

    def _incoming(self, rows: list[int]) -> Iterator[Incoming]:
        """Sort what comes by the rank that sends it; rows of one region come once."""
        by_source = defaultdict[int, list[Region]](list)
        for _, same in groupby(rows, self.region.tolist().__getitem__):
            alike = tuple(same)
            row = alike[0]
            region = Region(alike, self._dtype(row), self._sizes(row), self._nbytes(row))
            by_source[int(self.shared.source[row])].append(region)
        return (Incoming(source, tuple(found)) for source, found in by_source.items())

    def _outgoing(self, regions: list[list[int]]) -> Iterator[Outgoing]:
        """Sort pieces by the ranks that get them; ranks that get the same get one message."""
        shared, by_target = self.shared, defaultdict[int, list[int]](list)
        for number, rows in enumerate(regions):
            ranks = {rank for row in rows for rank in shared.audiences[shared.audience[row]].near}
            for target in ranks:
                by_target[target].append(number)
        alike = defaultdict[tuple[int, ...], list[int]](list)
        for target, pieces in by_target.items():
            alike[tuple(pieces)].append(target)
        return (Outgoing(tuple(sorted(targets)), pieces) for pieces, targets in alike.items())

    def _passed_on(self, held: list[list[int]]) -> Iterator[Outgoing]:
        """Pass on all that a line of a group has read; a round is of one group."""
        shared = self.shared
        numbers = [n for n, rows in enumerate(held) if shared.is_near[rows[0]]]
        numbers.sort(key=lambda number: self.region[held[number][0]])
        far = shared.audiences[shared.audience[held[numbers[0]][0]]].far if numbers else ()
        if far:
            yield Outgoing(far, tuple(numbers))

    def _piece(self, rows: list[int], read: int, reads: ReadItems) -> ReadRegion:
        row, shared = rows[0], self.shared
        axes = int(shared.reads.ndim[row])
        offsets = shared.offsets[row] - reads.storage_offsets[read]
        return ReadRegion(
            tuple(row for row in rows if shared.own[row]),
            self._dtype(row),
            self._sizes(row),
            self._nbytes(row),
            read,
            tuple(offsets[:axes].tolist()),
        )

    def _sizes(self, row: int) -> tuple[int, ...]:
        sizes: list[int] = self.shared.lengths[row, : self.shared.reads.ndim[row]].tolist()
        return tuple(sizes)

    def _nbytes(self, row: int) -> int:
        return math.prod(self._sizes(row)) * int(self.width[row])

    def _dtype(self, row: int) -> str:
        entries = self.metadata.state_dict_metadata
        dtype: str = entries.props[entries.prop[self.located.entry[row]]].dtype
        return dtype


class ValueRead(NamedTuple):
    """A value, by its name in the state dict and its name in the checkpoint."""

    dest: str
    name: str


def value_reads(items: ReadItems) -> list[ValueRead]:
    """Return the values among some reads."""
    rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist()
    return [ValueRead(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows]


@attrs.frozen
class ValueExchange:
    """One rank's part in an exchange of values."""

    wanted: Sequence[ValueRead]  # all values that this rank fills
    alone: Sequence[ValueRead]  # those among them that it reads for itself alone
    # Per rank, the names of the values that this rank reads and sends to it.
    send: Mapping[int, Sequence[str]]
    sources: Sequence[int]  # the ranks that send values to this one, ascending

    @property
    def read(self) -> list[str]:
        """The names of the values that this rank reads for others."""
        return sorted({name for names in self.send.values() for name in names})


def value_exchange(
    shared: SharedReads, rank: int, value_bytes: Callable[[str], int]
) -> ValueExchange:
    """Return one rank's part in the exchange of the values of a shared load.

    Values with no bytes of their own, by ``value_bytes``, are kept with the metadata, which every
    rank has; they do not travel.
    """
    send: dict[int, dict[str, None]] = {}
    sources, travelling, wanted = set[int](), set[str](), list[ValueRead]()
    rows = np.flatnonzero(shared.is_value).tolist()
    for read, row in sorted(zip(value_reads(shared.reads), rows, strict=True)):
        reader, audience = int(shared.reader[row]), shared.audiences[shared.audience[row]].everyone
        wanted += [read] if shared.own[row] else []
        if not value_bytes(read.name) or (reader == rank and not audience):
            continue
        travelling.add(read.name)
        sources |= {reader} - {rank}
        for target in audience if reader == rank else ():
            send.setdefault(target, {})[read.name] = None
    alone = [read for read in wanted if read.name not in travelling]
    names = {target: tuple(names) for target, names in send.items()}
    return ValueExchange(wanted, alone, names, sorted(sources))
