"""Save planning: `local_plan` for one rank, `global_plan` for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from .check import duplicates, world_issues
from .columns.arrays import column, distinct, readonly
from .columns.items import NO_CHUNK, Head, WriteItems
from .columns.world import World
from .errors import Issue, PlanError, RefusedError, span
from .geometry.tilings import Chunk
from .mesh.placements import Mesh
from .metadata import Entries, Metadata
from .nodes import NodeData
from .passes.base import Pass, Passes, as_steps, chain, only_assigns, positioned
from .passes.chunks import balance
from .passes.keys import drop
from .plans import SavePlan
from .records import WriteItemType
from .sources import dropped_names, source_issues
from .tensors import LocalBoxes, Memo, held, held_alike
from .tree import (
    FrozenDict,
    Path,
    clash,
    empty_names,
    flatten,
    is_tensor,
    nesting_data,
    nesting_issues,
    nodes_of,
)

_NESTING: Final = ("paths", "empty", "nodes")  # keys of planner_data about nesting
_META: Final = "it on the meta device, without elements: materialise it first, or leave it out"
DEFAULT_PASSES: tuple[Pass[SavePlan], ...] = (balance(),)


def local_plan(
    sd: Mapping[Any, Any], *, mesh: Mesh | None = None, rank: int = 0, whole: Collection[str] = ()
) -> SavePlan:
    """Return which chunks of which tensors this rank holds.

    One plan serves both directions: `global_plan` turns the plans of all ranks into a save, and
    `load_plan` finds the saved bytes that fill the same chunks.

    Args:
        sd: A state dict, nested or flat: torch tensors, DTensors on any mesh, ShardedTensors,
            objects with ``__create_chunk_list__``, numpy arrays, `TensorSpec`s; any other value is
            kept as bytes.
        mesh: The mesh on which `TensorSpec`s with placements lie.
        rank: Which rank of that mesh to plan for.
        whole: Names of containers, and of arrays, that are single values; see `flatten`.

    Returns:
        The plan, in order of names; empty chunks are left out.

    >>> local_plan({"w": np.zeros((4, 2), np.float32), "step": 7})
    SavePlan: 2 items, 32 B
    name  type     dtype    shape   box
    step  BYTE_IO
    w     TENSOR   float32  [4, 2]  [0:4, 0:2]

    Raises:
        PlanError: Two keys flatten to the same name.
        RefusedError: Some values have no correct plan; it names all of them.
    """
    return plan_flat(*flatten(sd, whole=whole), nodes_of(sd), mesh=mesh, rank=rank, whole=whole)


def plan_flat(
    flat: Mapping[str, Any],
    paths: Mapping[str, Path],
    nodes: Mapping[Path, NodeData],
    *,
    mesh: Mesh | None = None,
    rank: int = 0,
    whole: Collection[str] = (),
) -> SavePlan:
    """Return the `local_plan` of a state dict, given the results of `flatten` and `nodes_of`."""
    names = tuple(sorted(flat))
    each: list[LocalBoxes | None] = []
    refused = []
    memo: Memo = {}
    for name in names:
        value = flat[name]
        if name in whole or not is_tensor(value):
            each.append(None)
            continue
        try:
            each.append(held_alike(name, value, memo) or held(name, value, mesh, rank))
        except RefusedError as error:
            refused.append(str(error))
    if refused:
        raise RefusedError(*refused)
    kinds = {id(here): here for here in each}  # few: tensors that are alike share one
    number = {key: at for at, key in enumerate(kinds)}
    which = column([number[id(here)] for here in each])
    items = WriteItems.of_boxes(map(_boxes_of, kinds.values())).repeated(names, which)
    data = nesting_data(flat, paths, nodes)
    if mesh is None:
        return SavePlan(items, planner_data=data, held=items)
    return SavePlan(items, None, data, rank, len(mesh), items)


def _boxes_of(here: LocalBoxes | None) -> tuple[Head, Sequence[Chunk]]:
    """Return the boxes that are held of a tensor that has no name yet; None for a value."""
    if here is None:
        return Head.value(""), (NO_CHUNK,)
    kind = WriteItemType.SHARD if here.sharded else WriteItemType.TENSOR
    return Head("", "", kind, here.properties, here.size), here.chunks


def global_plan(
    plans: Iterable[SavePlan], passes: Passes[SavePlan] = DEFAULT_PASSES
) -> tuple[tuple[SavePlan, ...], Metadata]:
    """Decide who writes what, and describe the checkpoint that results.

    An empty dict on one rank gives way to what other ranks hold under the same name.

    Args:
        plans: One plan per rank, in rank order.
        passes: The passes to run first, in order, each in its scope; by default each replica is
            written once, evenly spread over its holders.

    Returns:
        One plan per rank, whose hints number the metadata's chunks; and the metadata.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec
    >>> sd, mesh = {"w": TensorSpec((6, 2), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> _, metadata = global_plan(local_plan(sd, mesh=mesh, rank=r) for r in range(2))
    >>> metadata
    Metadata: 1 entry, 48 B
    name  dtype    shape   chunks
    w     float32  [6, 2]  Grid(0:3:6, 0:2)

    Raises:
        PlanError: Some element of the checkpoint would be written twice or not at all, a state
            dict's tensor would be saved only in part or twice, or ranks disagree about a tensor; it
            lists all faults.
    """
    given: object = plans
    if isinstance(given, (SavePlan, Mapping)):
        own = "plan" if isinstance(given, SavePlan) else "local_plan(sd)"
        raise TypeError(f"global_plan takes one plan per rank; for one rank: global_plan([{own}])")
    steps = as_steps(passes)
    last = next((n for n, s in enumerate(steps[::-1]) if not only_assigns(s)), len(steps))
    first, rest = steps[: len(steps) - last], steps[len(steps) - last :]
    world = World.of(chain(*first)(World(positioned(plans))))
    # Passes that only choose who writes lose nothing, once the checkpoint is known to be whole.
    issues = source_issues(world)
    world = World.of(chain(*rest)(world))
    nesting = merge_nesting(world)
    if nesting.filled:
        world = _give_way(world, nesting.filled)
    issues += [*nesting.issues, *world_issues(world)]
    if not world.rows.faulty:  # if ranks disagree, replicas are unknown
        issues += duplicates(world)
    if issues:
        raise PlanError(issues)
    world = world.keep(np.ones(len(world.rows), bool))  # chunks without elements have no row
    rows = world.rows
    layouts, which = rows.layouts
    entries = Entries(rows.names, rows.props, rows.prop, layouts, which)
    return _with_hints(world), Metadata(entries, planner_data=nesting.data)


@attrs.frozen(eq=False)
class WholePlan:
    """What each rank writes, the metadata, and the names that the planner dropped on all ranks."""

    plans: Sequence[SavePlan]
    metadata: Metadata
    dropped: tuple[str, ...] = ()


def plan_whole(
    plans: Sequence[SavePlan],
    passes: Sequence[Pass[SavePlan]] = (),
    meta: Sequence[Sequence[str]] = (),
) -> WholePlan:
    """Decide who writes what, after running the remaining passes.

    ``meta`` has, by rank, the names of its tensors on the meta device; it explains why no rank
    holds their elements.
    """
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(meta):
        for name in names:
            holders.setdefault(name, []).append(rank)
    why = {
        name: f"{span(ranks)} {'has' if len(ranks) == 1 else 'have'} {_META}"
        for name, ranks in holders.items()
    }
    try:
        done, metadata = global_plan(plans, [*passes, *DEFAULT_PASSES])
    except PlanError as error:
        catalogs = [plan.items.catalog for plan in plans]
        pairs = (pair for c in catalogs for pair in zip(c.names, c.sources, strict=True))
        reason = {name: why[source] for name, source in pairs if source in why}
        raise PlanError(
            attrs.evolve(issue, message=f"{issue.message}; {reason[issue.fqn]}")
            if issue.kind == "gap" and issue.fqn in reason
            else issue
            for issue in error.issues
        ) from None
    parts = ((p.holds.catalog.sources, distinct(p.holds.row)) for p in (plans if meta else ()))
    held = {sources[row] for sources, rows in parts for row in rows.tolist()}
    lost = [name for name in holders if name not in held]
    if lost:
        raise PlanError(Issue("gap", n, f"no rank holds `{n}`: {why[n]}", holders[n]) for n in lost)
    written = tuple(attrs.evolve(plan, held=None, left_out=None) for plan in done)
    return WholePlan(written, metadata, dropped_names(done))


def _give_way(world: World, names: frozenset[str]) -> World:
    """Drop empty dicts that have contents on other ranks; they count as not held."""
    plans = []
    for plan, after in zip(world, drop(names.__contains__, required=False)(world), strict=True):
        catalog, held = plan.items.catalog, plan.holds
        pairs = zip(catalog.names, catalog.sources, strict=True)
        sources = {source for name, source in pairs if name in names}
        gone = np.array([source in sources for source in held.catalog.sources], bool)
        plans.append(attrs.evolve(after, held=held.take(~gone[held.row]) if gone.any() else held))
    return World(plans)


def _with_hints(world: World) -> tuple[SavePlan, ...]:
    """Set each item's hint to the number of its chunk in the metadata."""
    rows = world.rows
    hints = np.full(int(rows.first[-1]), -1, np.int64)
    hints[rows.flat] = np.arange(len(rows)) - rows.spread(rows.start[:-1])
    hints = readonly(hints)
    edges = rows.first.tolist()
    return tuple(
        attrs.evolve(plan, items=attrs.evolve(plan.items, hint=hints[low:high]))
        for plan, low, high in zip(world, edges[:-1], edges[1:], strict=True)
    )


@attrs.frozen
class _Nesting:
    """The ``planner_data`` of nested keys, and the conflicts between ranks."""

    data: Any
    issues: list[Issue]
    filled: frozenset[str]  # dicts that are empty on some ranks and have contents on others


def merge_nesting(world: World) -> _Nesting:
    """Merge the paths of all ranks' nested keys, and collect their other data."""
    paths: dict[str, Any] = {}
    holders: dict[str, int] = {}  # a rank that has each
    issues: dict[str, Issue] = {}
    empty: set[str] = set()
    values: set[str] = set()  # names that are something else on some rank
    nodes: dict[Path, tuple[NodeData, int]] = {}
    notes = []
    written = set(world.rows.names)  # a catalog may list what a pass has left out
    seen: set[tuple[int, int]] = set()
    for rank, plan in enumerate(world):
        data = plan.planner_data
        is_mapping = isinstance(data, Mapping)
        mine = data.get("paths", {}) if is_mapping else {}
        rest = {k: v for k, v in data.items() if k not in _NESTING} if is_mapping else data
        notes.append(rest or None)
        if (id(data), id(plan.items.catalog)) in seen:
            continue  # ranks that were decoded together share what is equal
        seen.add((id(data), id(plan.items.catalog)))
        for path, node in (data.get("nodes", {}) if is_mapping else {}).items():
            if nodes.setdefault(path, (node, rank))[0] != node:
                issue = _node_conflict(path, *nodes[path], node, rank)
                issues.setdefault(issue.fqn, issue)
        hollow = empty_names(data)
        empty |= hollow
        for name in written.intersection(plan.items.catalog.names):
            path = mine.get(name, (("dict", name),))
            holders.setdefault(name, rank)
            if name not in hollow:
                values.add(name)
            if paths.setdefault(name, path) != path and name not in issues:
                issues[name] = clash(name, paths[name], path, [rank])
    empty -= values
    keys = {tuple(key for _, key in path): name for name, path in paths.items()} if empty else {}
    above = {way[:depth] for way in keys for depth in range(1, len(way))}
    filled = empty.intersection(keys[way] for way in above & keys.keys())
    paths = {name: path for name, path in paths.items() if name not in filled}
    for issue in nesting_issues(paths, holders):
        issues.setdefault(issue.fqn, issue)
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    merged = {
        "empty": sorted(empty),
        "nodes": {path: node for path, (node, _) in nodes.items()},
        "paths": nested,
        "ranks": notes if any(notes) else (),
    }
    found = FrozenDict({key: part for key, part in merged.items() if part}) or None
    return _Nesting(found, list(issues.values()), frozenset(filled))


def _node_conflict(path: Path, node: NodeData, rank: int, other: NodeData, second: int) -> Issue:
    """Report an object of a registered class that is not the same on all ranks."""
    name = ".".join(str(key) for _, key in path)
    sides = (
        f"{kind} with {data!r} on rank {at}" for (kind, data), at in ((node, rank), (other, second))
    )
    text = f"`{name}` is a {' and a '.join(sides)}; what `flatten` returns besides the children is "
    return Issue("conflict", name, f"{text}the same on all ranks", [rank, second])
