"""Every rank's final plan from what all of them hold, layout by layout, on every rank alike.

`global_plan` looks at each item of each rank. Here replicas are shared out by layout: the chunks of
a layout and their holders are worked out once for all tensors that have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import attrs
import numpy as np

from ..columns.arrays import Columns, Index, Ints, column, distinct, pad, readonly
from ..columns.items import WriteItems
from ..metadata import Metadata
from ..passes.shares import Shared, share_out
from ..plans import SavePlan
from .placements import spread
from .worlds import Held, Holdings, SpecLayout, WorldPlans, chunks_of, world_metadata

__all__ = ["DerivedPlans", "derive_plans"]


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
    return DerivedPlans(plans), world_metadata(plans)


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
    volume: Ints  # the elements of each chunk; 1 for a non-tensor value
    holders: Ints  # the ranks, chunk by chunk, ascending
    first: Ints  # the first holder of each chunk
    count: Ints  # how many holders each has

    @classmethod
    def of(cls, held: Held | SpecLayout) -> _Chunks:
        """Group a layout's boxes into chunks."""
        first, chunk = chunks_of(held)
        count = np.bincount(chunk, minlength=len(first))
        volume = held.sizes[first].prod(axis=1)
        holders = held.rank[np.argsort(chunk, kind="stable")]
        return cls(chunk, volume, holders, np.cumsum(count) - count, count)

    def held_by(self, holders: int) -> tuple[Ints, Ints]:
        """Return the chunks that so many ranks hold, and these ranks, one row a chunk."""
        chunk = np.flatnonzero(self.count == holders)
        return chunk, self.holders[self.first[chunk][:, None] + np.arange(holders)]


@attrs.frozen(eq=False)
class _Writers:
    """The writers of the chunks of layouts that several ranks share."""

    first: Ints  # per row of the catalog, where its first chunk is in `rank`; -1 if none is shared
    rank: Ints  # the rank that writes each chunk; -1 if only one rank holds it


@attrs.frozen(eq=False, slots=False)
class DerivedPlans(Columns[SavePlan]):
    """One plan per rank, made on demand; each replica has one writer. Compares like a tuple.

    Attributes:
        plans: What each rank holds.
    """

    plans: HeldPlans

    @cached_property
    def _chunks(self) -> tuple[_Chunks, ...]:
        return tuple(map(_Chunks.of, self.plans.holdings.layouts))

    @cached_property
    def _boxes(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The boxes of all layouts, end to end: offsets, sizes, chunks; where layouts start."""
        layouts, axes = self.plans.holdings.layouts, self.plans.holdings.catalog.axes
        start = np.cumsum([0, *(len(held.rank) for held in layouts)])[:-1]
        return (
            np.concatenate([pad(held.offsets, axes, 0) for held in layouts]),
            np.concatenate([pad(held.sizes, axes, 1) for held in layouts]),
            np.concatenate([chunks.of_box for chunks in self._chunks]),
            start,
        )

    @cached_property
    def _writers(self) -> _Writers:
        return _writers(self.plans.holdings, self._chunks, len(self))

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank."""
        holdings, (every_offset, every_size, every_chunk, start) = self.plans.holdings, self._boxes
        edges = [np.searchsorted(held.rank, [row, row + 1]) for held in holdings.layouts]
        first, end = column(edges, len(edges), 2).T
        times = (end - first)[holdings.number]
        if holdings.owner is not None:
            times = np.where(holdings.owner < 0, times, holdings.owner == row)
            first = np.where(end > first, first, 0)
        item, nth = spread(times)
        at = (first + start)[holdings.number[item]] + nth
        chunk, writers = every_chunk[at], self._writers
        shared = np.flatnonzero(writers.first[item] >= 0)
        keep = np.ones(len(item), bool)
        chosen = writers.rank[writers.first[item[shared]] + chunk[shared]]
        keep[shared] = (chosen == row) | (chosen < 0)
        columns = (item, every_offset[at], every_size[at], chunk)
        item, offsets, sizes, chunk = (readonly(values[keep]) for values in columns)
        items = WriteItems(holdings.catalog, item, offsets, sizes, hint=chunk)
        return SavePlan(items, None, self.plans.data_of(row), row, len(self))

    def __len__(self) -> int:
        return len(self.plans)

    def take(self, rows: Index | slice) -> tuple[SavePlan, ...]:
        """Return the plans of some ranks."""
        return tuple(map(self.record, np.arange(len(self))[rows].tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedPlans, (self.plans,)


def _writers(holdings: Holdings, chunks: Sequence[_Chunks], ranks: int) -> _Writers:
    """Assign each shared chunk to one holder, as `dedup_replicas` does."""
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
    is_shared = np.array([(c.count > 1).any() for c in chunks], bool)
    rows = rows[is_shared[number[rows]]]
    count = column([len(chunks[layout].count) for layout in number[rows].tolist()])
    first = np.full(len(catalog), -1)
    first[rows] = np.cumsum(count) - count
    writer = np.full(int(count.sum()), -1)
    counts = [chunks[layout].count for layout in distinct(number[rows]).tolist()]
    shared, places = [], []
    for holders in distinct(np.concatenate([column([]), *counts])).tolist():
        if holders < 2:
            continue
        known = {n: chunks[n].held_by(holders) for n in distinct(number[rows]).tolist()}
        parts = [(row, *known[number[row]]) for row in rows.tolist() if len(known[number[row]][0])]
        row = np.repeat(column([r for r, *_ in parts]), [len(c) for _, c, _ in parts])
        chunk = np.concatenate([c for _, c, _ in parts])
        volume = np.concatenate([chunks[number[r]].volume[c] for r, c, _ in parts])
        ranks_of = np.concatenate([h for *_, h in parts])
        shared.append(Shared((row << 32) + chunk, volume * width[row], ranks_of))
        places.append(first[row] + chunk)
    for at, part, chosen in zip(places, shared, share_out(shared, load), strict=True):
        writer[at] = np.take_along_axis(part.holders, chosen.holder[:, None], axis=1)[:, 0]
    return _Writers(first, writer)
