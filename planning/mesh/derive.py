"""Who writes what, when everybody knows what everybody holds? Each rank works it out by itself.

The answer is `global_plan`'s, but no rank's plan is made for it except those that are asked for.
What a layout says holds for all tensors that have it; and chunks that are shared by the same ranks
are given out without looking at the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import index as as_index
from typing import overload

import attrs
import numpy as np

from ..columns.arrays import Ints, readonly
from ..columns.catalog import column
from ..columns.items import WriteItems
from ..geometry.tilings import pad
from ..metadata import Metadata
from ..passes.chunks import even_out, uneven
from ..plans import SavePlan
from .placed import SpecLayout, spread
from .worlds import WorldPlans, world_metadata

__all__ = ["DerivedPlans", "derive_plans"]


def derive_plans(plans: WorldPlans) -> tuple[DerivedPlans, Metadata]:
    """Decide who writes what, and describe the checkpoint, without making every rank's plan.

    Args:
        plans: What `world_plans` returned.

    Returns:
        What ``global_plan(plans)`` returns; each rank's plan is made when it is asked for.

    >>> from shardplan.planning import Mesh, Replicate, TensorSpec, global_plan, world_plans
    >>> specs = {"a": TensorSpec((4,)), "b": TensorSpec((4,)), "step": 7}
    >>> plans = world_plans(specs, Mesh(dp=2))
    >>> derive_plans(plans) == global_plan(plans)
    True

    Raises:
        PlanError: The ranks do not hold some tensor whole; every such fault is told.
    """
    return DerivedPlans(plans), world_metadata(plans)


@attrs.frozen(eq=False)
class _Shares:
    """Where the boxes of one layout lie, and who holds each.

    Attributes:
        chunk: Which chunk of the tensor each of the layout's rows is.
        holders: Per chunk, by place, the ranks that hold it, ascending; all have as many.
        volume: Per chunk, how many elements it has.
    """

    chunk: Ints
    holders: Ints
    volume: Ints

    @classmethod
    def of(cls, layout: SpecLayout) -> _Shares:
        """Group a layout's boxes into chunks."""
        rank, offsets, sizes = layout.rank, layout.offsets, layout.sizes
        keys = [sizes[:, a] for a in reversed(range(sizes.shape[1]))]
        keys += [offsets[:, a] for a in reversed(range(offsets.shape[1]))]
        order = np.lexsort([rank, *keys])
        new = np.ones(len(order), bool)
        boxes = np.concatenate([offsets, sizes], axis=1)[order]
        new[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
        chunk = np.empty(len(order), np.int64)
        chunk[order] = np.cumsum(new) - 1
        count = int(new.sum())
        return cls(
            readonly(chunk),
            readonly(rank[order].reshape(count, -1)),
            readonly(sizes[order][new].prod(axis=1)),
        )


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of all layouts, one row a box: by layout, then by rank, then as a rank stores them.

    Attributes:
        first, count: Per rank and layout, where its boxes begin, and how many they are. After the
            last layout comes that of values that are no tensors: one box on every rank.
        offsets, sizes: The boxes, as wide as the catalog is.
        chunk: Which chunk of its tensor each of them is.
    """

    first: Ints
    count: Ints
    offsets: Ints
    sizes: Ints
    chunk: Ints

    @classmethod
    def of(cls, plans: WorldPlans, shares: Sequence[_Shares]) -> _Boxes:
        """List the boxes of a world, given who shares which chunks."""
        axes, ranks = plans.catalog.axes, np.arange(len(plans) + 1)
        none = np.zeros((len(plans), 0), np.int64)
        held = [*((s.rank, s.offsets, s.sizes) for s in plans.layouts), (ranks[:-1], none, none)]
        edges = np.stack([np.searchsorted(rank, ranks) for rank, _, _ in held], axis=1)
        start = np.cumsum([0, *(len(rank) for rank, _, _ in held)])[:-1]
        columns = (
            edges[:-1] + start,
            np.diff(edges, axis=0),
            np.concatenate([pad(offsets, axes, 0) for _, offsets, _ in held]),
            np.concatenate([pad(sizes, axes, 1) for _, _, sizes in held]),
            np.concatenate([share.chunk for share in shares]),
        )
        return cls(*map(readonly, columns))


@attrs.frozen(eq=False, slots=False)
class DerivedPlans(Sequence[SavePlan]):
    """One plan per rank, after replicas were given out; made when it is asked for.

    Compares like a tuple.

    Attributes:
        plans: What each rank holds.
    """

    plans: WorldPlans

    @cached_property
    def _shares(self) -> tuple[_Shares, ...]:
        """Who holds what of each layout; last, of a value that is no tensor."""
        everyone = column(np.arange(len(self.plans)), 1, -1)
        value = _Shares(column(np.zeros(len(self.plans))), everyone, column([0]))
        return (*map(_Shares.of, self.plans.layouts), value)

    @cached_property
    def _writers(self) -> dict[int, Ints]:
        """Per row of the catalog that several ranks hold: which rank writes each chunk."""
        return _give_out(self.plans, self._shares)

    @cached_property
    def _boxes(self) -> _Boxes:
        """What every rank holds of every layout."""
        return _Boxes.of(self.plans, self._shares)

    @cached_property
    def _choice(self) -> tuple[Ints, Ints]:
        """Where each row's chunks begin in a list of who writes which; -1 if its holders do."""
        first, parts, end = np.full(len(self.plans.catalog.names), -1), [column([])], 0
        for row, writers in self._writers.items():
            first[row] = end
            parts.append(writers)
            end += len(writers)
        return readonly(first), readonly(np.concatenate(parts))

    def _plan(self, rank: int) -> SavePlan:
        boxes, number = self._boxes, self.plans.layout_numbers
        row, nth = spread(boxes.count[rank][number])
        at = boxes.first[rank][number[row]] + nth
        chunk, (first, writer) = boxes.chunk[at], self._choice
        shared = np.flatnonzero(first[row] >= 0)
        keep = np.ones(len(row), bool)
        keep[shared] = writer[first[row[shared]] + chunk[shared]] == rank
        row, at, chunk = row[keep], at[keep], chunk[keep]
        items = WriteItems(
            self.plans.catalog,
            readonly(row),
            readonly(boxes.offsets[at]),
            readonly(boxes.sizes[at]),
            hint=readonly(chunk),
        )
        return SavePlan(items, None, self.plans.planner_data, rank, len(self))

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> SavePlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SavePlan, ...]: ...
    def __getitem__(self, index: int | slice) -> SavePlan | tuple[SavePlan, ...]:
        if isinstance(index, slice):
            return tuple(map(self._plan, range(len(self))[index]))
        return self._plan(range(len(self))[as_index(index)])

    def __iter__(self) -> Iterator[SavePlan]:
        return map(self._plan, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (DerivedPlans, tuple, list)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))


@attrs.frozen(eq=False)
class _Groups:
    """Chunks that several ranks hold, as many ranks each; one row a chunk.

    Attributes:
        row, chunk: Which row of the catalog, and which of its chunks.
        weight: Its bytes.
        holders: The ranks that hold it, ascending.
    """

    row: Ints
    chunk: Ints
    weight: Ints
    holders: Ints


def _give_out(plans: WorldPlans, shares: Sequence[_Shares]) -> dict[int, Ints]:
    """Give each shared chunk to one holder, as `balance.assign` does; return who writes what."""
    number, width = plans.layout_numbers, np.maximum(plans.catalog.itemsize, 0)
    load = np.zeros(len(plans), np.int64)
    shared: dict[int, list[int]] = {}  # how many hold it: rows of the catalog
    alone: dict[tuple[int, int], int] = {}
    for row, layout in enumerate(number.tolist()):
        holders = shares[layout].holders.shape[1] if len(shares[layout].holders) else 0
        if holders > 1:
            shared.setdefault(holders, []).append(row)
        elif holders == 1:
            key = (layout, int(width[row]))
            alone[key] = alone.get(key, 0) + 1
    for (layout, size), count in alone.items():
        share = shares[layout]
        weight = share.volume * size if layout < len(plans.layouts) else np.ones(1, np.int64)
        np.add.at(load, share.holders[:, 0], weight * count)
    writers: dict[int, Ints] = {}
    every: list[tuple[_Groups, Ints]] = []
    for _, rows in sorted(shared.items()):
        groups = _groups(plans, shares, rows)
        chosen = _assign(groups, load)
        every.append((groups, chosen))
    _even(every, load)
    for groups, chosen in every:
        edges = np.flatnonzero(np.diff(groups.row, prepend=-1, append=-1))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            at = np.arange(low, high)
            writers[int(groups.row[low])] = groups.holders[at, chosen[at]]
    return writers


def _groups(plans: WorldPlans, shares: Sequence[_Shares], rows: Sequence[int]) -> _Groups:
    """List the chunks of some tensors, by tensor, then by place."""
    width, number = plans.catalog.itemsize, plans.layout_numbers
    parts = [shares[number[row]] for row in rows]
    counts = [len(part.holders) for part in parts]
    values = number[list(rows)] == len(plans.layouts)
    weights = [
        np.ones(1, np.int64) if value else part.volume * width[row]
        for part, row, value in zip(parts, rows, values.tolist(), strict=True)
    ]
    return _Groups(
        np.repeat(column(rows), counts),
        np.concatenate([np.arange(n) for n in counts]),
        np.concatenate(weights),
        np.concatenate([part.holders for part in parts]),
    )


def _assign(groups: _Groups, load: Ints) -> Ints:
    """Give each chunk to its least loaded holder, the heaviest chunk first; return which holder.

    Chunks of one set of ranks are looked at in turn; if no rank is in two sets, all sets go ahead
    side by side.
    """
    weight = np.maximum(groups.weight, 1)
    chosen = np.zeros(len(weight), np.int64)
    first, which = np.unique(groups.holders[:, 0], return_inverse=True)
    _, example = np.unique(which, return_index=True)
    sets = groups.holders[example]
    if len(np.unique(sets)) != sets.size or (sets[which] != groups.holders).any():
        for at in np.argsort(-groups.weight, kind="stable").tolist():
            ranks = groups.holders[at]
            chosen[at] = load[ranks].argmin()
            load[ranks[chosen[at]]] += weight[at]
        return chosen
    order = np.lexsort((-groups.weight, which))  # stable: by tensor and place among equals
    start = np.searchsorted(which[order], np.arange(len(first) + 1))
    loads = load[sets]
    for turn in range(int(np.diff(start).max())):
        active = np.flatnonzero(np.diff(start) > turn)
        at = order[start[active] + turn]
        pick = loads[active].argmin(axis=1)
        chosen[at] = pick
        loads[active, pick] += weight[at]
    load[sets] = loads
    return chosen


def _even(every: Sequence[tuple[_Groups, Ints]], load: Ints) -> None:
    """Look for a better choice where there are few chunks to choose; see `balance.even_out`."""
    rows = np.concatenate([groups.row for groups, _ in every]) if every else column([])
    if not len(rows):
        return
    chunks = np.concatenate([groups.chunk for groups, _ in every])
    order = np.lexsort((chunks, rows))
    places = [(g, i) for g, (groups, _) in enumerate(every) for i in range(len(groups.row))]
    if not uneven(len(rows), load):
        return
    count = column([every[places[o][0]][0].holders.shape[1] for o in order.tolist()])
    first = np.cumsum(count) - count
    rank = np.concatenate([every[g][0].holders[i] for g, i in (places[o] for o in order.tolist())])
    weight = column([every[g][0].weight[i] for g, i in (places[o] for o in order.tolist())])
    chosen = first + column([every[g][1][i] for g, i in (places[o] for o in order.tolist())])
    even_out(chosen, first, count, rank, weight, load)
    for at, o in enumerate(order.tolist()):
        g, i = places[o]
        every[g][1][i] = chosen[at] - first[at]
