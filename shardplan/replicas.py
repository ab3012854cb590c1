"""Do ranks that claim to hold the same values hold the same? Compared by checksum, on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardplan.io.checksums import Sums, combine, hash_views
from shardplan.io.pieces import collect
from shardplan.io.pool import default_pool
from shardplan.io.values import store_values
from shardplan.planning import Issue, PlanError, SavePlan
from shardplan.planning.errors import span
from shardplan.planning.world import World

__all__ = ["compare_replicas", "replica_sums"]


def replica_sums(flat: Mapping[str, Any], plan: SavePlan) -> Sums:
    """Return the checksum of every item of a rank's plan, as it would be stored.

    Raises:
        ValueRefusedError: Some values cannot be stored.
    """
    pieces, values, _ = collect(flat, plan)
    stored = store_values(values)
    names, row = plan.items.catalog.names, plan.items.row.tolist()

    def digest(number: int) -> int:
        if number in pieces:
            return combine([hash_views([block]) for block in pieces[number].blocks()])
        value = stored.get(names[row[number]])
        if value is None:
            return 0  # refused when it is written
        data = repr(value.data).encode() if value.kind == "inline" else value.data
        return hash_views([memoryview(value.kind.encode()), memoryview(data)])

    found = default_pool().map(digest, range(len(row)))
    return np.array(found, np.uint64)


def compare_replicas(plans: Sequence[SavePlan], sums: Sequence[Sums], ranks: Sequence[int]) -> None:
    """Raise if chunks that several ranks hold alike differ in any bit.

    Args:
        plans: Every rank's local plan, by rank.
        sums: What `replica_sums` returned on each.
        ranks: Each one's number in the job.

    Raises:
        PlanError: Some differ; it names every such tensor, and the ranks on either side.
    """
    rows = World.of(plans).rows
    flat = np.concatenate(sums) if sums else np.zeros(0, np.uint64)
    digest, group = flat[rows.flat], np.cumsum(~rows.repeats) - 1
    first = digest[np.flatnonzero(~rows.repeats)]
    bad = np.unique(group[digest != first[group]]) if len(group) else group
    issues = []
    for number in bad.tolist():
        at = np.flatnonzero(group == number)
        name = rows.names[rows.tensor[at[0]]]
        sides: dict[int, list[int]] = {}
        for row in at.tolist():
            sides.setdefault(int(digest[row]), []).append(ranks[rows.rank[row]])
        told = " against ".join(span(sorted(side)) for side in sides.values())
        axes = len(rows.shapes[rows.tensor[at[0]]])
        where = f" at {rows.offsets[at[0], :axes].tolist()}" if axes else ""
        text = f"`{name}`{where} is said to be the same everywhere, and is not: {told}"
        holders = sorted(rank for side in sides.values() for rank in side)
        issues.append(Issue("replicas", name, text, holders))
    if issues:
        raise PlanError(issues)
