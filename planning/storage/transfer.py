"""Transfers: how the tensors of some ranks become those of others, with no storage in between.

1. What the source ranks hold, after their passes, is described as if it were a checkpoint.
2. What each target rank holds, after its passes, is resolved against that: reads.
3. Each read is made by one rank that holds the chunk: by the target itself if it can, else by the
   holder that has the least to send so far.
4. On each rank, reads become parcels, in rounds that bound what is in memory (`transfer_rounds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any, Final, Literal

import attrs
import numpy as np

from ..codec import contents_tag
from ..columns.arrays import Ints, column, spread
from ..columns.reads import ReadItems, Transfers
from ..columns.world import World
from ..dtypes import itemsize
from ..frozen import FrozenDict
from ..load import Strict, load_plan
from ..metadata import Metadata
from ..passes.base import positioned
from ..passes.chunks import assign
from ..plans import LoadPlan, SavePlan
from ..records import KeyReport, LoadItemType
from ..save import global_plan
from ..text import Printed, Sheet, Table, counted, human_bytes
from .blocks import BLOCK_BYTES, boxes_of
from .shared_reads import read_widths

__all__ = ["Exchange", "Parcel", "ParcelPart", "TransferPlan", "transfer_plan", "transfer_rounds"]

_SMALL: Final = 1 << 20  # bytes of a part that is sent together with others
_SHOWN: Final = 16  # ranks


@attrs.frozen(repr=False, slots=False)
class TransferPlan(Printed):
    """Which rank sends what to which rank.

    Attributes:
        metadata: What the source ranks hold together.
        moves: Every read of every target, with the rank that makes it, by target; those that a rank
            makes for itself are copies.
        ranks: The number of ranks.
        reports: By target rank, what of its tensors is not filled.
    """

    metadata: Metadata
    moves: Transfers
    ranks: int
    reports: FrozenDict[int, KeyReport]

    @cached_property
    def plans(self) -> tuple[LoadPlan, ...]:
        """The part of each rank; see `part`."""
        return tuple(self.part(rank) for rank in range(self.ranks))

    def part(self, rank: int) -> LoadPlan:
        """Return one rank's part.

        Its ``items`` are what it copies from its own memory, its ``transfers`` what it sends or
        receives.
        """
        going, coming = (order[start[rank] : start[rank + 1]] for order, start in self._ends)
        stays = self.moves.target[going] == rank
        others = coming[self.moves.source[coming] != rank]
        moved = self.moves.take(_range(np.sort(np.concatenate([going[~stays], others]))))
        items = self.moves.reads.take(_range(going[stays]))
        report = self.reports.get(rank, KeyReport())
        return LoadPlan(items, report=report, transfers=moved, rank=rank, world_size=self.ranks)

    @cached_property
    def _ends(self) -> tuple[tuple[Ints, Ints], ...]:
        """By source, and by target: the rows in the order of ranks, and each rank's first."""
        edges = np.arange(self.ranks + 1)
        orders = [
            (end, np.argsort(end, kind="stable")) for end in (self.moves.source, self.moves.target)
        ]
        return tuple(
            (column(order), column(np.searchsorted(end[order], edges))) for end, order in orders
        )

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of tensors by source rank and target rank; those that stay are on the diagonal."""
        found = np.zeros((self.ranks, self.ranks), np.int64)
        ends = (self.moves.source, self.moves.target)
        np.add.at(found, ends, _bytes(self.moves.reads, self.metadata))
        return column(found)

    @cached_property
    def peers(self) -> int:
        """The most ranks that one rank sends to, or receives from."""
        between = self.nbytes.copy()
        np.fill_diagonal(between, 0)
        counts = [(between > 0).sum(axis=axis).max(initial=0) for axis in (0, 1)]
        return int(max(counts))

    @property
    def _sheet(self) -> Sheet:
        stay = int(np.trace(self.nbytes))
        sent, received = self.nbytes.sum(axis=1), self.nbytes.sum(axis=0)
        title = (
            f"TransferPlan: {counted(self.ranks, 'rank')}, {human_bytes(int(sent.sum()))}, "
            f"{human_bytes(stay)} of which stay where they are"
        )
        rows = [
            (rank, *(human_bytes(int(n)) for n in (out - own, into - own, own)))
            for rank, (out, into, own) in enumerate(
                zip(sent, received, np.diag(self.nbytes), strict=True)
            )
        ]
        more = [f"and {len(rows) - _SHOWN} more ranks"] if len(rows) > _SHOWN else []
        return Sheet(title, [Table(("rank", "sends", "receives", "copies"), rows[:_SHOWN])], more)


def _bytes(reads: ReadItems, metadata: Metadata) -> Ints:
    return reads.numel * read_widths(reads, metadata)


def transfer_plan(
    source_plans: Iterable[SavePlan],
    target_plans: Iterable[SavePlan],
    *,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
) -> TransferPlan:
    """Plan how the tensors of some ranks become those of other ranks, or of the same.

    Args:
        source_plans: What each source rank holds: `local_plan` of its state dict, after any passes.
        target_plans: What each target rank wants filled, likewise. After the passes, both sides
            have the same names.
        source_ranks: Their ranks, among all; by default from 0 on.
        target_ranks: The ranks of the targets, which may be the same ones.
        strict: As in `load_plan`.
        dtype: As in `load_plan`.

    Returns:
        The plan. Every element that a target rank wants comes from one rank that holds it, over the
        network only if the target does not hold it itself; those that hold replicas share the
        sending evenly.

    Raises:
        PlanError: The sources do not hold each element, contradict each other, or lack what a
            target needs; it lists all faults.

    Rows of two ranks become columns of two others:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, world_plans
    >>> rows, columns = (
    ...     world_plans({"w": TensorSpec((2, 4), "float32", [Shard(axis)])}, Mesh(n=2))
    ...     for axis in (0, 1)
    ... )
    >>> transfer_plan(rows, columns, target_ranks=[2, 3]).nbytes.tolist()
    [[0, 0, 8, 8], [0, 0, 8, 8], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    sources, targets = positioned(source_plans), tuple(target_plans)
    senders = column(range(len(sources)) if source_ranks is None else source_ranks)
    takers = column(range(len(targets)) if target_ranks is None else target_ranks)
    for ranks, plans, what in ((senders, sources, "source"), (takers, targets, "target")):
        if len(ranks) != len(plans) or len(set(ranks.tolist())) != len(ranks):
            raise ValueError(
                f"{what}_ranks must name one rank for each of {len(plans)} {what} plans, each "
                f"once, not {ranks.tolist()}"
            )
    metadata = global_plan(sources)[1]
    plan_load = cache(lambda plan: load_plan(metadata, plan.plan, strict=strict, dtype=dtype))
    loads = [plan_load(_Wanted(plan)) for plan in targets]
    reads = ReadItems.concat([load.items for load in loads])
    target = np.repeat(takers, [len(load.items) for load in loads])
    count = int(max(senders.max(initial=-1), takers.max(initial=-1))) + 1
    holders = _Holders.of(World.of(sources), senders)
    source = holders.choose(reads, target, _bytes(reads, metadata), count)
    reports = {rank: load.report for rank, load in zip(takers.tolist(), loads, strict=True)}
    moves = Transfers(reads, column(source), column(target))
    return TransferPlan(metadata, moves, count, FrozenDict(reports))


class _Wanted:
    """What a target wants; equal for targets that hold the same, which are planned once."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        is_plain = plan.holds is plan.items and plan.left_out is None
        own = (contents_tag((plan,)), plan.planner_data) if is_plain else (object(),)
        self._key: tuple[object, ...] = own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wanted) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _range(rows: Any) -> Any:
    """Return rows that follow one another as a slice, which is taken without a copy."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


@attrs.frozen(eq=False)
class _Holders:
    """Which ranks hold each distinct chunk of the sources."""

    tensor: dict[str, int]  # the number of each tensor or value, by name
    group: Ints  # the first chunk of each tensor, among all distinct chunks
    start: Ints  # the first row of each distinct chunk in ``rank``, and their number at the end
    rank: Ints  # the holders, chunk by chunk

    @classmethod
    def of(cls, world: World, ranks: Ints) -> _Holders:
        """Group the chunks of all source ranks, given the ranks of the plans."""
        rows = world.rows
        is_first = ~rows.repeats
        before = np.concatenate([[0], np.cumsum(is_first)])
        start = np.append(np.flatnonzero(is_first), len(rows))
        numbers = {name: number for number, name in enumerate(rows.names)}
        return cls(numbers, column(before[rows.start]), column(start), column(ranks[rows.rank]))

    def choose(self, reads: ReadItems, target: Ints, nbytes: Ints, ranks: int) -> Ints:
        """Return the rank that makes each read, given its target and its bytes."""
        if not len(reads):
            return column([])
        tensor = column([self.tensor.get(name, -1) for name in reads.names])[reads.storage]
        chunk = self.group[tensor] + np.maximum(reads.storage_hint, 0)
        count = self.start[chunk + 1] - self.start[chunk]
        read, nth = spread(count)
        holder = self.rank[self.start[chunk][read] + nth]
        is_own = holder == target[read]
        stays = np.zeros(len(reads), bool)
        stays[read[is_own]] = True
        kept = is_own | ~stays[read]  # one that holds it needs no other
        weight = np.where(stays, 0, np.maximum(nbytes, 1))
        chosen = assign(column(read[kept]), column(holder[kept]), column(weight[read[kept]]), ranks)
        return column(holder[kept][chosen])


# Parcels: what is sent together, and when


@attrs.frozen
class ParcelPart:
    """A box of a read: the row of the plan's transfers, and the box in what it reads."""

    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


@attrs.frozen
class Parcel:
    """Parts that go to one rank, or come from one rank, as one message."""

    peer: int
    parts: tuple[ParcelPart, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(part.nbytes for part in self.parts)


@attrs.frozen
class Exchange:
    """One round of a rank: what it sends and what it receives, at the same time."""

    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]


def transfer_rounds(
    plan: LoadPlan, metadata: Metadata, rank: int, *, peers: int, round_bytes: int
) -> tuple[Exchange, ...]:
    """Cut what a rank sends and receives into parcels and rounds, as its peers do.

    A rank that goes through its rounds in order, and in each of them begins to receive and to send
    everything before it waits, never waits in a circle.

    Args:
        plan: The rank's part of a `TransferPlan`.
        metadata: That of the `TransferPlan`.
        rank: The rank.
        peers: `TransferPlan.peers`, which all ranks must use.
        round_bytes: About how many bytes a rank sends in a round at most, and receives.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, world_plans
    >>> spec, whole = TensorSpec((4,), "int8", [Shard(0)]), TensorSpec((4,), "int8")
    >>> cut, one = world_plans({"w": spec}, Mesh(n=2)), world_plans({"w": whole}, Mesh(n=1))
    >>> plan = transfer_plan(one, cut)
    >>> [first] = transfer_rounds(plan.plans[0], plan.metadata, 0, peers=1, round_bytes=64)
    >>> [(parcel.peer, parcel.nbytes) for parcel in first.sends], first.receives
    ([(1, 2)], ())
    """
    share = max(round_bytes // max(peers, 1), 1)
    transfers = plan.transfers
    rows = np.flatnonzero(transfers.reads.type == LoadItemType.TENSOR.value)
    reads, entries = transfers.reads, metadata.state_dict_metadata
    source, target, ndim = (a.tolist() for a in (transfers.source, transfers.target, reads.ndim))
    lengths = reads.lengths.tolist()
    dtypes = [
        ""
        if name not in entries.row_of
        else entries.props[entries.prop[entries.row_of[name]]].dtype
        for name in reads.names
    ]
    storage = reads.storage.tolist()
    sent = dict[tuple[bool, int], int]()
    placed: list[tuple[int, bool, int, ParcelPart]] = []
    for row in rows.tolist():
        is_sent = source[row] == rank
        key = (is_sent, target[row] if is_sent else source[row])
        shape, name = lengths[row][: ndim[row]], storage[row]
        for part in _parts(row, shape, dtypes[name], min(share, BLOCK_BYTES)):
            placed.append((sent.get(key, 0) // share, *key, part))
            sent[key] = sent.get(key, 0) + part.nbytes
    placed.sort(key=lambda one: one[:3])  # stable: parts stay in order
    rounds = []
    for _, in_round in groupby(placed, lambda one: one[0]):
        parcels = [
            (is_sent, parcel)
            for (is_sent, peer), found in groupby(in_round, lambda one: one[1:3])
            for parcel in _parcels(peer, [part for *_, part in found])
        ]
        rounds.append(
            Exchange(
                tuple(parcel for is_sent, parcel in parcels if is_sent),
                tuple(parcel for is_sent, parcel in parcels if not is_sent),
            )
        )
    return tuple(rounds)


def _parts(row: int, shape: Sequence[int], dtype: str, most: int) -> Iterator[ParcelPart]:
    width = itemsize(dtype)
    for offsets, sizes in boxes_of(shape, dtype, most):
        own = tuple(sizes[: len(shape)])
        yield ParcelPart(row, tuple(offsets[: len(shape)]), own, math.prod(own) * width)


def _parcels(peer: int, parts: Sequence[ParcelPart]) -> Iterator[Parcel]:
    """Put small parts that follow one another into one parcel; others go alone."""
    for is_small, found in groupby(parts, lambda part: part.nbytes < _SMALL):
        if is_small:
            yield Parcel(peer, tuple(found))
        else:
            yield from (Parcel(peer, (part,)) for part in found)
