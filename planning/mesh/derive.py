"""Every rank's final plan from what all of them hold, layout by layout, on every rank alike.

`global_plan` looks at each item of each rank. Here replicas are shared out by layout: the chunks of
a layout and their holders are worked out once for all tensors that have it. A tensor whose chunks
are cut, as `balance` does, gets a layout of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import attrs
import numpy as np

from ..columns.arrays import (
    Columns,
    ColumnTable,
    Ints,
    column,
    distinct,
    pad,
    readonly,
    spread,
)
from ..columns.items import WriteItems
from ..metadata import Metadata
from ..passes.shares import (
    SMALLEST,
    Shared,
    Shares,
    cut_boxes,
    least_share,
    parts_of,
    share_out,
)
from ..plans import SavePlan
from .layouts import Holding, Holdings, SpecLayout, boxes_by_chunk
from .placements import Only, Replicate
from .worlds import WorldPlans


def derive_plans(plans: WorldPlans) -> tuple[DerivedPlans, Metadata]:
    """Return what ``global_plan(plans)`` does; each rank's plan is made on demand.

    >>> from shardplan.planning import Mesh, Replicate, TensorSpec, global_plan, world_plans
    >>> specs = {"a": TensorSpec((4,)), "b": TensorSpec((4,)), "step": 7}
    >>> plans = world_plans(specs, Mesh(dp=2))
    >>> derive_plans(plans) == global_plan(plans)
    True

    Raises:
        PlanError: Some tensors are not fully held; it lists all of them.
    """
    done = DerivedPlans(plans)
    return done, done.describe(plans.planner_data)


def world_metadata(plans: WorldPlans) -> Metadata:
    """Return the metadata that ``global_plan(plans)`` does, layout by layout, without making plans.

    >>> from shardplan.planning import Mesh, Shard, StridedShard, TensorSpec, world_plans
    >>> specs = {"w": TensorSpec((13,), "float32", [StridedShard(0, split_factor=2), Shard(0)])}
    >>> world_metadata(world_plans(specs, Mesh(dp=3, tp=2)))
    Metadata: 1 entry, 52 B
    name  dtype    shape  chunks
    w     float32  [13]   Grid(0:3:6:7:9:11:12:13)

    Raises:
        PlanError: Some tensors are not fully held; it lists all of them.
    """
    return derive_plans(plans)[1]


class HeldPlans(Protocol):
    """What all ranks hold: `WorldPlans`, or the plans of ranks that differ."""

    @property
    def holdings(self) -> Holdings:
        """Who holds which boxes of what."""

    def data_of(self, rank: int) -> Any:
        """Return the ``planner_data`` of one rank's plan."""

    def __len__(self) -> int: ...


@attrs.frozen(eq=False)
class _Chunks:
    """The chunks of one layout, and the ranks that hold each."""

    of_box: Ints  # the chunk of each box
    box: Ints  # a box of each chunk
    volume: Ints  # the elements of each chunk; 1 for a non-tensor value
    holders: Ints  # the ranks, chunk by chunk, ascending
    first: Ints  # the first holder of each chunk
    count: Ints  # how many holders each has

    @classmethod
    def of(cls, held: Holding | SpecLayout) -> _Chunks:
        """Group a layout's boxes into chunks."""
        first, chunk = boxes_by_chunk(held)
        count = np.bincount(chunk, minlength=len(first))
        volume = held.sizes[first].prod(axis=1)
        holders = held.rank[np.argsort(chunk, kind="stable")]
        return cls(chunk, first, volume, holders, np.cumsum(count) - count, count)

    def held_by(self, holders: int) -> tuple[Ints, Ints]:
        """Return the chunks that so many ranks hold, and these ranks, one row a chunk."""
        chunk = np.flatnonzero(self.count == holders)
        return chunk, self.holders[self.first[chunk][:, None] + np.arange(holders)]


@attrs.frozen(eq=False)
class _Sharing:
    """Chunks of tensors with the same number of holders, and who writes what of them."""

    row: Ints  # the row of the catalog, per chunk
    chunk: Ints  # its number in the layout of that row
    held: Shared
    shares: Shares
    least: int  # the bytes of the smallest share

    def writers(self, some: Shares) -> Ints:
        """Return the rank that writes each share."""
        writers: Ints = self.held.holders[some.chunk, some.holder]
        return writers


@attrs.frozen(eq=False)
class _Writers:
    """The writers of the chunks of layouts that several ranks share."""

    first: Ints  # per row of the catalog, where its first chunk is in `rank`; -1 if none is shared
    rank: Ints  # the rank that writes each chunk; -1 if only one rank holds it


@attrs.frozen(eq=False)
class _Settled:
    """Who holds what after tensors were cut."""

    holdings: Holdings
    shards: Sequence[Ints] = ()  # of the layouts of cut tensors, where the shard of each box starts


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of all layouts, end to end."""

    start: Ints  # where each layout starts
    chunk: Ints
    offsets: Ints
    sizes: Ints
    shards: Ints  # the start of the shard of the state dict that holds each box


@attrs.frozen(eq=False, slots=False)
class DerivedPlans(Columns[SavePlan]):
    """One plan per rank, made on demand; each replica has one writer. Compares like a tuple."""

    plans: HeldPlans  # what each rank holds

    def describe(self, planner_data: Any) -> Metadata:
        """Return the metadata of the checkpoint; raise `PlanError` if not all of it is held."""
        return Metadata(self.settled.entries(), planner_data=planner_data)

    @cached_property
    def settled(self) -> Holdings:
        """Who holds what, with a layout for every tensor that is cut: one writer a chunk."""
        return self._settled.holdings

    @cached_property
    def _settled(self) -> _Settled:
        holdings = self.plans.holdings
        if not any(_may_be_cut(holdings, n) for n in range(len(holdings.layouts))):
            return _Settled(holdings)
        return _settle(holdings, self._held_chunks, self._sharings)

    @cached_property
    def _held_chunks(self) -> tuple[_Chunks, ...]:
        return tuple(map(_Chunks.of, self.plans.holdings.layouts))

    @cached_property
    def _sharings(self) -> tuple[_Sharing, ...]:
        return tuple(_share(self.plans.holdings, self._held_chunks, len(self)))

    @cached_property
    def _chunks(self) -> tuple[_Chunks, ...]:
        known = self._held_chunks
        return (*known, *map(_Chunks.of, self.settled.layouts[len(known) :]))

    @cached_property
    def _boxes(self) -> _Boxes:
        layouts, axes = self.settled.layouts, self.settled.catalog.axes
        whole = [held.offsets for held in layouts[: len(self._held_chunks)]]
        return _Boxes(
            np.cumsum([0, *(len(held.rank) for held in layouts)])[:-1],
            np.concatenate([chunks.of_box for chunks in self._chunks]),
            np.concatenate([pad(held.offsets, axes, 0) for held in layouts]),
            np.concatenate([pad(held.sizes, axes, 1) for held in layouts]),
            np.concatenate([pad(c, axes, 0) for c in (*whole, *self._settled.shards)]),
        )

    @cached_property
    def _writers(self) -> _Writers:
        return _writers(self.settled, self._chunks, self._sharings)

    def writers_of(self, row: int) -> Ints:
        """Return the rank that writes each chunk of one row of the catalog, by chunk number."""
        owner, chunks = self.settled.owner, self._chunks[self.settled.number[row]]
        if owner is not None and owner[row] >= 0:
            return owner[row : row + 1]
        first, alone = self._writers.first[row], chunks.holders[chunks.first]
        if first < 0:
            return readonly(alone)
        chosen = self._writers.rank[first : first + len(alone)]
        return readonly(np.where(chosen < 0, alone, chosen))

    def layout_alone(self, row: int) -> int | None:
        """Return the layout of one row of the catalog if it alone says who writes; else None."""
        owner = self.settled.owner
        is_owned = owner is not None and owner[row] >= 0
        return None if is_owned or self._writers.first[row] >= 0 else int(self.settled.number[row])

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank."""
        holdings, boxes = self.settled, self._boxes
        edges = [np.searchsorted(held.rank, [row, row + 1]) for held in holdings.layouts]
        first, end = column(edges, len(edges), 2).T
        times = (end - first)[holdings.number]
        if holdings.owner is not None:
            times = np.where(holdings.owner < 0, times, holdings.owner == row)
            first = np.where(end > first, first, 0)
        item, nth = spread(times)
        at = (first + boxes.start)[holdings.number[item]] + nth
        chunk, writers = boxes.chunk[at], self._writers
        shared = np.flatnonzero(writers.first[item] >= 0)
        keep = np.ones(len(item), bool)
        chosen = writers.rank[writers.first[item[shared]] + chunk[shared]]
        keep[shared] = (chosen == row) | (chosen < 0)
        columns = (item, boxes.offsets[at], boxes.sizes[at], boxes.shards[at], chunk)
        item, offsets, sizes, shards, chunk = (readonly(values[keep]) for values in columns)
        starts = None if np.array_equal(shards, offsets) else shards
        items = WriteItems(holdings.catalog, item, offsets, sizes, starts, hint=chunk)
        return SavePlan(items, None, self.plans.data_of(row), row, len(self))

    def __len__(self) -> int:
        return len(self.plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedPlans, (self.plans,)


def _share(holdings: Holdings, chunks: Sequence[_Chunks], ranks: int) -> list[_Sharing]:
    """Share out the chunks that several ranks hold, as `balance` does."""
    catalog, number, owner = holdings.catalog, holdings.number, holdings.owner
    width = np.where(catalog.is_bytes, 1, catalog.itemsize)
    load = np.zeros(ranks, np.int64)
    rows = np.arange(len(catalog))
    if owner is not None:
        rows = np.flatnonzero(owner < 0)
        own = np.flatnonzero(owner >= 0)
        np.add.at(load, owner[own], catalog.size[own].prod(axis=1) * width[own])
    alone = Counter(zip(number[rows].tolist(), width[rows].tolist(), strict=True))
    for (layout, size), times in alone.items():
        chunk, holders = chunks[layout].held_by(1)
        np.add.at(load, holders[:, 0], chunks[layout].volume[chunk] * size * times)
    used = distinct(number[rows]).tolist()
    counts = distinct(np.concatenate([column([]), *(chunks[n].count for n in used)]))
    shared = []
    for holders in counts[counts > 1].tolist():
        known = {n: chunks[n].held_by(holders) for n in used}
        parts = [(row, *known[number[row]]) for row in rows.tolist() if len(known[number[row]][0])]
        row = np.repeat(column([r for r, *_ in parts]), [len(c) for _, c, _ in parts])
        chunk = np.concatenate([c for _, c, _ in parts])
        volume = np.concatenate([chunks[number[r]].volume[c] for r, c, _ in parts])
        ranks_of = np.concatenate([h for *_, h in parts])
        shared.append((row, chunk, Shared((row << 32) + chunk, volume * width[row], ranks_of)))
    every = [held for *_, held in shared]
    least = least_share(every, load)
    shares = share_out(every, load, least=least)
    return [_Sharing(*one, some, least) for one, some in zip(shared, shares, strict=True)]


def _may_be_cut(holdings: Holdings, layout: int) -> bool:
    """Return True unless no chunk of a layout has several holders and is large enough to cut."""
    held, rows = holdings.layouts[layout], np.flatnonzero(holdings.number == layout)
    if held.size is None or not len(rows) or 0 in held.size:
        return False
    width = int(holdings.catalog.itemsize[rows].max())
    if isinstance(held, Holding):
        return int(held.sizes.prod(axis=1).max(initial=0)) * width >= 2 * SMALLEST
    copies = [isinstance(placement, (Replicate, Only)) for placement in held.placements]
    if held.placements and not any(copies):
        return False
    longest = [int(line.sizes.max()) for line in held.lines()]
    return math.prod(longest) * width >= 2 * SMALLEST


def _settle(
    holdings: Holdings, chunks: Sequence[_Chunks], sharings: Sequence[_Sharing]
) -> _Settled:
    """Give each tensor that is cut a layout of its own, with one holder a chunk."""
    cut = [part.row[part.shares.chunk[parts_of(part.held, part.shares)]] for part in sharings]
    rows = distinct(np.concatenate([column([]), *cut]))
    if not len(rows):
        return _Settled(holdings)
    parts = [_alone(holdings, chunks, row) for row in rows.tolist()]
    parts += [_written(holdings, chunks, part, rows) for part in sharings]
    boxes = _Written.concat(parts)
    order = np.lexsort((*boxes.offsets.T[::-1], boxes.rank, boxes.row))
    boxes = boxes.take(order)
    edges = np.searchsorted(boxes.row, rows)
    layouts, number, shards = list(holdings.layouts), holdings.number.copy(), []
    for n, at in zip(rows.tolist(), np.split(np.arange(len(order)), edges[1:]), strict=True):
        axes, mine = int(holdings.catalog.ndim[n]), boxes.take(at)
        size = tuple(holdings.catalog.size[n, :axes].tolist())
        number[n] = len(layouts)
        layouts.append(Holding(size, mine.rank, mine.offsets[:, :axes], mine.sizes[:, :axes]))
        shards.append(mine.shards[:, :axes])
    return _Settled(attrs.evolve(holdings, layouts=layouts, number=number), shards)


@attrs.frozen(eq=False)
class _Written(ColumnTable):
    """Boxes that ranks write."""

    row: Ints  # the row of the catalog
    rank: Ints
    shards: Ints  # the start of the shard that holds the box
    offsets: Ints
    sizes: Ints


def _alone(holdings: Holdings, chunks: Sequence[_Chunks], row: int) -> _Written:
    """Return the boxes of a row that one rank holds."""
    chunk, holders = chunks[holdings.number[row]].held_by(1)
    rows = np.full(len(chunk), row)
    offsets, sizes = _corners(holdings, chunks, rows, chunk)
    return _Written(rows, holders[:, 0], offsets, offsets, sizes)


def _written(holdings: Holdings, chunks: Sequence[_Chunks], part: _Sharing, rows: Ints) -> _Written:
    """Return the boxes of the shares of some rows."""
    mine = part.shares.take(np.isin(part.row[part.shares.chunk], rows))
    parts = parts_of(part.held, mine)
    cut, whole = mine.take(parts), mine.take(~parts)
    row = part.row[cut.chunk]
    _, sizes = _corners(holdings, chunks, row, part.chunk[cut.chunk])
    found = cut_boxes(cut, sizes, holdings.catalog.is_bytes[row], part.least)
    written = []
    for some in (whole, found.shares):
        row = part.row[some.chunk]
        offsets, sizes = _corners(holdings, chunks, row, part.chunk[some.chunk])
        written.append(_Written(row, part.writers(some), offsets, offsets, sizes))
    shifted = attrs.evolve(
        written[1], offsets=written[1].offsets + found.offsets, sizes=found.sizes
    )
    return _Written.concat([written[0], shifted])


def _corners(
    holdings: Holdings, chunks: Sequence[_Chunks], row: Ints, chunk: Ints
) -> tuple[Ints, Ints]:
    """Return the offsets and sizes of chunks of rows, padded to the catalog's axes."""
    axes = holdings.catalog.axes
    offsets, sizes = np.zeros((len(row), axes), np.int64), np.ones((len(row), axes), np.int64)
    layout = holdings.number[row]
    for number in distinct(layout).tolist():
        at, held = np.flatnonzero(layout == number), holdings.layouts[number]
        box = chunks[number].box[chunk[at]]
        width = held.offsets.shape[1]
        offsets[at, :width], sizes[at, :width] = held.offsets[box], held.sizes[box]
    return offsets, sizes


def _writers(
    holdings: Holdings, chunks: Sequence[_Chunks], sharings: Sequence[_Sharing]
) -> _Writers:
    """Lay out the writers of whole chunks, row by row."""
    number = holdings.number
    is_shared = np.array([(c.count > 1).any() for c in chunks], bool)
    rows = np.flatnonzero(is_shared[number])
    if holdings.owner is not None:
        rows = rows[holdings.owner[rows] < 0]
    count = column([len(chunks[layout].count) for layout in number[rows].tolist()])
    first = np.full(len(holdings.catalog), -1)
    first[rows] = np.cumsum(count) - count
    writer = np.full(int(count.sum()), -1)
    for part in sharings:
        mine = part.shares.take(first[part.row[part.shares.chunk]] >= 0)
        writer[first[part.row[mine.chunk]] + part.chunk[mine.chunk]] = part.writers(mine)
    return _Writers(first, writer)
