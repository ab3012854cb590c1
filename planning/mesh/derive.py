"""The save plans of all ranks of a known world, worked out by each rank for itself.

They are those of `global_plan`, but only the plans that are asked for are made. What a layout says
holds for all tensors that have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from ..columns.arrays import Columns, Index, Ints, distinct, group_rows, readonly
from ..columns.catalog import column
from ..columns.items import WriteItems
from ..geometry.tilings import pad
from ..metadata import Metadata
from ..passes.chunks import Shared, share_out
from ..plans import SavePlan
from .runs import spread
from .worlds import SpecLayout, WorldPlans, world_metadata

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
        PlanError: The ranks do not hold some tensor whole; every such fault is reported.
    """
    return DerivedPlans(plans), world_metadata(plans)


@attrs.frozen(eq=False)
class _Shares:
    """Where the boxes of one layout lie, and which ranks hold each.

    Attributes:
        chunk: Which chunk of the tensor each of the layout's rows is.
        holders: Per chunk, by place, the ranks that hold it, ascending; all have as many.
        volume: Per chunk, how many elements it has; 1 for a non-tensor value.
    """

    chunk: Ints
    holders: Ints
    volume: Ints

    @classmethod
    def of(cls, layout: SpecLayout) -> _Shares:
        """Group a layout's boxes into chunks."""
        constant = np.zeros_like(layout.rank)  # a tensor without axes has no other column
        first, chunk = group_rows([constant, layout.offsets, layout.sizes])
        holders = layout.rank[np.argsort(chunk, kind="stable")]
        return cls(chunk, holders.reshape(len(first), -1), layout.sizes[first].prod(axis=1))


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of all layouts, one row a box: by layout, then by rank, then as a rank stores them.

    Attributes:
        first, count: Per rank and layout, where its boxes begin, and how many they are. After the
            last layout comes that of non-tensor values: one box on every rank.
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
class DerivedPlans(Columns[SavePlan]):
    """One plan per rank, after replicas were given out; made when it is asked for.

    Compares like a tuple.

    Attributes:
        plans: What each rank holds.
    """

    plans: WorldPlans

    @cached_property
    def _shares(self) -> tuple[_Shares, ...]:
        """Which ranks hold what of each layout; last, of a non-tensor value."""
        everyone = np.arange(len(self.plans))[None, :]
        value = _Shares(np.zeros(len(self.plans), np.int64), everyone, np.ones(1, np.int64))
        return (*map(_Shares.of, self.plans.layouts), value)

    @cached_property
    def _boxes(self) -> _Boxes:
        """What every rank holds of every layout."""
        return _Boxes.of(self.plans, self._shares)

    @cached_property
    def _writers(self) -> tuple[Ints, Ints]:
        """Where each row's chunks begin in a list of who writes which; -1 if its holders do."""
        return _writers(self.plans, self._shares)

    def _plan(self, rank: int) -> SavePlan:
        boxes, number = self._boxes, self.plans.layout_numbers
        row, nth = spread(boxes.count[rank][number])
        at = boxes.first[rank][number[row]] + nth
        chunk, (first, writer) = boxes.chunk[at], self._writers
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

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank."""
        return self._plan(row)

    def take(self, rows: Index | slice) -> tuple[SavePlan, ...]:
        """Return the plans of some ranks."""
        return tuple(map(self._plan, np.arange(len(self))[rows].tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedPlans, (self.plans,)


def _writers(plans: WorldPlans, shares: Sequence[_Shares]) -> tuple[Ints, Ints]:
    """Give each shared chunk to one holder, as `dedup_replicas` does.

    Returns:
        Per row of the catalog, where its chunks begin in the second array (-1: it has no shared
        ones); and there, per chunk, the rank that writes it.
    """
    number = plans.layout_numbers
    width = np.where(number < len(plans.layouts), plans.catalog.itemsize, 1)
    count = column([share.holders.shape[1] for share in shares])[number]
    load = np.zeros(len(plans), np.int64)
    alone = Counter(zip(number[count == 1].tolist(), width[count == 1].tolist(), strict=True))
    for (layout, size), times in alone.items():
        share = shares[layout]
        np.add.at(load, share.holders[:, 0], share.volume * size * times)
    first, end = np.full(len(number), -1), 0
    shared = []
    for holders in distinct(count[count > 1]).tolist():
        rows = np.flatnonzero(count == holders)
        own = [shares[layout] for layout in number[rows].tolist()]
        counts = column([len(share.volume) for share in own])
        row, chunk = spread(counts)
        first[rows] = end + np.cumsum(counts) - counts
        end += len(row)
        weight = np.concatenate([share.volume for share in own]) * width[rows[row]]
        ranks = np.concatenate([share.holders for share in own])
        shared.append(Shared((rows[row] << 32) + chunk, weight, ranks))
    writers = [
        np.take_along_axis(chunks.holders, holder[:, None], axis=1)[:, 0]
        for chunks, holder in zip(shared, share_out(shared, load), strict=True)
    ]
    return first, np.concatenate([column([]), *writers])
