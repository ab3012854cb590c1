"""How is a save plan made? `local_plan` for one rank, `global_plan` for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from .catalog import Catalog, Head, column, padded
from .check import duplicates, world_issues
from .chunking import dedup_replicas
from .columns import WriteItems
from .errors import Issue, PlanError, RefusedError
from .flatten import clash, flatten, is_tensor, nesting_issues
from .frozen import FrozenDict
from .items import WriteItemType
from .layout import Mesh
from .metadata import Entries, Metadata
from .packing import readonly
from .passes import Pass, as_pass
from .records import SavePlan
from .values import Memo, held, held_alike
from .world import World

__all__ = ["DEFAULT_PASSES", "global_plan", "local_plan"]

DEFAULT_PASSES: tuple[Pass[SavePlan], ...] = (dedup_replicas(),)


def local_plan(sd: Mapping[Any, Any], *, mesh: Mesh | None = None, rank: int = 0) -> SavePlan:
    """Say which chunks of which tensors this rank holds.

    One plan serves both directions: `global_plan` turns everybody's into a save, `load_plan` finds
    what fills the same chunks.

    Args:
        sd: A state dict, nested or flat: torch tensors, DTensors on any mesh, ShardedTensors,
            objects with ``__create_chunk_list__``, numpy arrays, `TensorSpec`s; any other value is
            kept as bytes.
        mesh: The mesh on which `TensorSpec`s with placements lie.
        rank: Which rank of that mesh to plan for.

    Returns:
        The plan, in order of names; empty chunks are left out.

    >>> local_plan({"w": np.zeros((4, 2), np.float32), "step": 7})
    SavePlan: 2 items, 32 B
    name  type     dtype    shape   box
    step  BYTE_IO
    w     TENSOR   float32  [4, 2]  [0:4, 0:2]

    Raises:
        PlanError: Two keys flatten to the same name.
        RefusedError: A value has no correct plan; every such key is named.
    """
    flat, paths = flatten(sd)
    heads: list[Head] = []
    row: list[int] = []
    offsets: list[tuple[int, ...]] = []
    sizes: list[tuple[int, ...]] = []
    refused = []
    memo: Memo = {}
    for name in sorted(flat):
        value = flat[name]
        if not is_tensor(value):
            heads.append((name, name, WriteItemType.BYTE_IO, None, ()))
            row.append(len(heads) - 1)
            offsets.append(())
            sizes.append(())
            continue
        try:
            here = held_alike(name, value, memo) or held(name, value, mesh, rank)
        except RefusedError as error:
            refused.append(str(error))
            continue
        kind = WriteItemType.SHARD if here.sharded else WriteItemType.TENSOR
        heads.append((name, name, kind, here.properties, here.size))
        for chunk in here.chunks:
            row.append(len(heads) - 1)
            offsets.append(chunk.offsets)
            sizes.append(chunk.sizes)
    if refused:
        raise RefusedError("; ".join(refused))
    catalog = Catalog.of(tuple(heads))
    items = WriteItems(
        catalog, column(row), padded(offsets, 0, catalog.axes), padded(sizes, 1, catalog.axes)
    )
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    return SavePlan(items, planner_data={"paths": nested} if nested else None)


def global_plan(
    plans: Iterable[SavePlan], passes: Pass[SavePlan] | Sequence[Pass[SavePlan]] = DEFAULT_PASSES
) -> tuple[tuple[SavePlan, ...], Metadata]:
    """Decide who writes what, and describe the checkpoint that results.

    Args:
        plans: One plan per rank, in rank order.
        passes: What to do to the plans first, one after the other; by default replicas are written
            once, evenly spread.

    Returns:
        One plan per rank, whose hints number the metadata's chunks, and the metadata.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec
    >>> sd, mesh = {"w": TensorSpec((6, 2), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> _, metadata = global_plan(local_plan(sd, mesh=mesh, rank=r) for r in range(2))
    >>> metadata
    Metadata: 1 entry, 48 B
    name  dtype    shape   chunks
    w     float32  [6, 2]  Grid(0:3:6, 0:2)

    Raises:
        PlanError: Some element would be written twice or not at all, or ranks disagree about a
            tensor; every such fault is told.
    """
    world = World.of(as_pass(passes)(World.of(plans)))
    data, issues = _planner_data(world)
    issues += world_issues(world)
    if not world.rows.issues:  # replicas stay where ranks disagree: no pass can sort them out
        issues += duplicates(world)
    if issues:
        raise PlanError(issues)
    world = world.keep(np.ones(len(world.rows), bool))  # chunks without elements have no row
    rows = world.rows
    layouts, which = rows.layouts
    entries = Entries(rows.names, rows.props, rows.prop, layouts, which)
    return _with_hints(world), Metadata(entries, planner_data=data)


def _with_hints(world: World) -> tuple[SavePlan, ...]:
    """Let each item's hint tell which of the metadata's chunks it is."""
    rows = world.rows
    hints = np.full(int(rows.first[-1]), -1, np.int64)
    hints[rows.flat] = np.arange(len(rows)) - rows.spread(rows.start[:-1])
    hints = readonly(hints)
    edges = rows.first.tolist()
    return tuple(
        attrs.evolve(plan, items=attrs.evolve(plan.items, hint=hints[low:high]))
        for plan, low, high in zip(world, edges[:-1], edges[1:], strict=True)
    )


def _planner_data(world: World) -> tuple[Any, list[Issue]]:
    """Merge the paths of all ranks' nested keys, and line up whatever else they brought."""
    paths: dict[str, Any] = {}
    holders: dict[str, int] = {}  # a rank that has each
    issues: dict[str, Issue] = {}
    notes = []
    seen: set[tuple[int, int]] = set()
    for rank, plan in enumerate(world):
        data = plan.planner_data
        is_mapping = isinstance(data, Mapping)
        mine = data.get("paths", {}) if is_mapping else {}
        rest = {k: v for k, v in data.items() if k != "paths"} if is_mapping else data
        notes.append(rest or None)
        if (id(data), id(plan.items.catalog)) in seen:
            continue  # ranks that were decoded together share what is equal
        seen.add((id(data), id(plan.items.catalog)))
        for name in plan.items.catalog.names:
            path = mine.get(name, (("dict", name),))
            holders.setdefault(name, rank)
            if paths.setdefault(name, path) != path and name not in issues:
                issues[name] = clash(name, paths[name], path, [rank])
    for issue in nesting_issues(paths, holders):
        issues.setdefault(issue.fqn, issue)
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    merged: dict[str, Any] = {"paths": nested} if nested else {}
    if any(note is not None for note in notes):
        merged["ranks"] = tuple(notes)
    return FrozenDict(merged) if merged else None, list(issues.values())
