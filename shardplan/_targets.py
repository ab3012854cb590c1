"""Who writes what when a checkpoint is converted? Plans over the chunks of another checkpoint.

Every plan's items point at whole saved tensors, so any box can be read wherever it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import attrs
import numpy as np

from shardplan.io.formats import ChunkPlace, Source, find_format
from shardplan.planning import (
    DEFAULT_PASSES,
    Mesh,
    Metadata,
    Passes,
    SavePlan,
    Shard,
    TensorMetadata,
    TensorSpec,
    WriteItemType,
    chain,
    dropped_names,
    global_plan,
    world_plans,
)
from shardplan.planning.columns import Catalog, Head, Ints, WriteItems, column, padded, readonly
from shardplan.planning.mesh import Placement, as_mesh
from shardplan.planning.storage import MAX_SHARD_SIZE, refuse_split, shard_plans

__all__ = ["Placements", "Target", "nbytes_of", "plan_target", "tied_names"]

Placements = (
    Mapping[str, Sequence[Placement]]
    | Sequence[Placement]
    | Callable[[str, tuple[int, ...]], Sequence[Placement]]
)
"""How tensors lie on a mesh: the placements of all of them; or by pattern of their names, of which
the first that fits counts; or a function of name and shape."""

_LEAST_PART: Final = 64 << 20
_PARTS: Final = 4  # files that one process should have to write, to keep all threads busy


@attrs.frozen(eq=False)
class Target:
    """A checkpoint to be made.

    Attributes:
        plans: What to write; each is written by one process, as if it were a rank.
        metadata: What the checkpoint will hold.
        tied: Names that share another's elements, and those others.
        left_out: Names of values that the format cannot carry.
        dropped: Names in the source of what the planner left out.
    """

    plans: tuple[SavePlan, ...]
    metadata: Metadata
    tied: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def plan_target(
    source: Source,
    format: str,
    *,
    planner: Passes[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_shard_size: int | None = None,
    processes: int = 1,
) -> Target:
    """Plan a conversion; a pure function of what describes the source.

    With a mesh, there is one plan per rank of it. Without one, tensors stay cut as they are, one
    plan per file of the source or part of it; a format that holds tensors whole gets them so.

    Args:
        source: What to convert.
        format: What to.
        planner: A pass over the plans, or a list of them.
        mesh: The ranks to shard for.
        placements: How tensors lie on the mesh; by default all are cut along their first axis,
            over all axes of the mesh.
        max_shard_size: The most bytes of a file, for ``hf`` and where there is no mesh.
        processes: How many processes there are to share the work.

    Raises:
        PlanError, RefusedError: There is no correct plan.
        ValueError: What was asked for does not go together.
    """
    into = find_format(format)
    whole = into.whole_tensors
    if mesh is not None:
        as_mesh(mesh)
    if mesh is None and placements is not None:
        raise ValueError("placements need a mesh to lie on; pass mesh=Mesh(dp=4), say")
    if mesh is not None and whole:
        raise ValueError(f"a checkpoint of the format {format!r} is not sharded; leave out `mesh`")
    metadata = source.metadata
    if mesh is None:
        local: Sequence[SavePlan] = (_held(metadata, whole),)
    else:
        local = _sharded(metadata, mesh, placements)
    plans, described = global_plan(local, chain(planner or (), *DEFAULT_PASSES))
    dropped = dropped_names(plans)
    described = attrs.evolve(described, planner_data=_planner_data(metadata, described))
    plans = tuple(attrs.evolve(plan, items=_from_whole(plan.items), held=None) for plan in plans)
    ties = _renamed(tied_names(source), plans)
    ties = {name: kept for name, kept in ties.items() if name not in into.reserved}
    left_out: tuple[str, ...] = ()
    if not into.has_values:
        plans, left_out = _without_values(plans)
    if whole and not into.is_file:
        refuse_split(plans, "leave out the pass of `planner` that splits tensors")
        plans = shard_plans(plans[0], max_shard_size or MAX_SHARD_SIZE, ties)
    elif mesh is None and not whole:
        plans = _cut(source, plans[0], max_shard_size, processes)
    return Target(plans, described, ties, left_out, dropped)


def _held(metadata: Metadata, whole: bool) -> SavePlan:
    """Plan to write all that was saved, cut as it is or in whole tensors."""
    heads: list[Head] = []
    row: list[int] = []
    offsets: list[Sequence[int]] = []
    sizes: list[Sequence[int]] = []
    boxes: list[tuple[Sequence[int], Sequence[int]]]
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if not isinstance(entry, TensorMetadata):
            heads.append(Head.value(name))
            boxes = [((), ())]
        else:
            one = whole or 0 in entry.size
            kind = WriteItemType.TENSOR if one else WriteItemType.SHARD
            heads.append(Head(name, name, kind, entry.properties, entry.size))
            cuts = entry.chunks.offsets.tolist(), entry.chunks.sizes.tolist()
            boxes = [((0,) * len(entry.size), entry.size)] if one else list(zip(*cuts, strict=True))
        row += [len(heads) - 1] * len(boxes)
        offsets += [at for at, _ in boxes]
        sizes += [size for _, size in boxes]
    catalog = Catalog.of(tuple(heads))
    items = WriteItems(
        catalog, column(row), padded(offsets, 0, catalog.axes), padded(sizes, 1, catalog.axes)
    )
    return SavePlan(items, planner_data=_paths(metadata), held=items)


def _sharded(metadata: Metadata, mesh: Mesh, placements: Placements | None) -> tuple[SavePlan, ...]:
    """Plan what the ranks of a mesh would have written."""
    specs: dict[str, TensorSpec | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        specs[name] = None
        if isinstance(entry, TensorMetadata):
            placed: Any = _placed(name, entry.size, mesh, placements)
            specs[name] = TensorSpec(entry.size, entry.properties.dtype, placed)
    data = _paths(metadata)
    return tuple(attrs.evolve(plan, planner_data=data) for plan in world_plans(specs, mesh))


def _placed(
    name: str, shape: tuple[int, ...], mesh: Mesh, placements: Placements | None
) -> Sequence[Placement]:
    if placements is None:
        return [Shard(0)] * len(mesh.shape) if shape else ()
    if callable(placements):
        return placements(name, shape)
    if isinstance(placements, Mapping):
        fitting = (p for pattern, p in placements.items() if fnmatchcase(name, pattern))
        return next(fitting, ())
    return placements if shape else ()


def _paths(metadata: Metadata) -> dict[str, Any] | None:
    data = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {key: data[key] for key in ("paths", "empty") if data.get(key)} or None


def _planner_data(old: Metadata, new: Metadata) -> Any:
    """Keep what planners left in the source, beside nested keys, which may have changed."""
    theirs = dict(old.planner_data) if isinstance(old.planner_data, Mapping) else {}
    theirs = {key: part for key, part in theirs.items() if key not in ("paths", "empty")}
    return {**theirs, **(new.planner_data or {})} or None


def _from_whole(items: WriteItems) -> WriteItems:
    """Let all items be parts of whole tensors, which start at the origin."""
    return attrs.evolve(items, source_offsets=readonly(np.zeros_like(items.offsets)))


def tied_names(source: Source) -> dict[str, str]:
    """Find names of one and the same stored tensor; the first of each is the one that is kept.

    These are weights that were tied when they were saved, by a tool that stores them once. Views of
    one storage may begin at the same place of the same array: only their sizes tell them apart.
    """
    entries = source.metadata.state_dict_metadata
    single = {
        name: entry.size
        for name, entry in entries.items()
        if isinstance(entry, TensorMetadata) and len(entry.chunks) == 1 and 0 not in entry.size
    }
    first: dict[tuple[ChunkPlace, tuple[int, ...]], str] = {}
    spots = source.find_chunks([(name, 0) for name in single])
    views = zip(single, zip(spots, single.values(), strict=True), strict=True)
    pairs = [(name, first.setdefault(view, name)) for name, view in views]
    return {name: kept for name, kept in pairs if name != kept}


def _renamed(tied: Mapping[str, str], plans: Sequence[SavePlan]) -> dict[str, str]:
    """Say under which names tied tensors will be saved; those that are cast apart are no longer."""
    if not tied:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for plan in plans:
        for row in np.unique(plan.items.row).tolist():
            name, source, _, properties, _ = plan.items.catalog.heads[row]
            if properties is not None:
                found[source] = (name, properties.dtype)
    groups: dict[tuple[str, str], str] = {}
    ties = {}
    for source in sorted(found, key=lambda s: (s in tied, found[s][0])):
        name, dtype = found[source]
        kept = groups.setdefault((tied.get(source, source), dtype), name)
        if kept != name:
            ties[name] = kept
    return ties


def _without_values(plans: Sequence[SavePlan]) -> tuple[tuple[SavePlan, ...], tuple[str, ...]]:
    """Leave out non-tensor values; return their names, too."""
    kept, names = [], set[str]()
    for plan in plans:
        items = plan.items
        is_value = items.catalog.is_bytes[items.row] if len(items) else np.zeros(0, bool)
        names |= {items.catalog.names[row] for row in items.row[is_value].tolist()}
        kept.append(attrs.evolve(plan, items=items.take(~is_value)))
    return tuple(kept), tuple(sorted(names))


def _cut(
    source: Source, plan: SavePlan, max_shard_size: int | None, processes: int
) -> tuple[SavePlan, ...]:
    """Divide a plan by the files that its bytes come from, and these by size."""
    items = plan.items
    if not len(items):
        return (plan,)
    file, begin = _places(source, items)
    width = np.maximum(items.catalog.itemsize[items.row], 0)
    nbytes = np.where(items.catalog.is_bytes[items.row], 0, items.sizes.prod(axis=1) * width)
    share = int(nbytes.sum()) // (_PARTS * processes)
    limit = max_shard_size or min(MAX_SHARD_SIZE, max(share, _LEAST_PART))
    order = np.lexsort((begin, file))
    part, number, held, last = np.zeros(len(items), np.int64), 0, 0, None
    for row in order.tolist():
        if last is not None and (file[row] != last or held + int(nbytes[row]) > limit):
            number, held = number + 1, 0
        part[row], last, held = number, file[row], held + int(nbytes[row])
    rows = np.split(np.argsort(part, kind="stable"), np.cumsum(np.bincount(part))[:-1])
    return tuple(attrs.evolve(plan, items=items.take(mine)) for mine in rows)


def _places(source: Source, items: WriteItems) -> tuple[Ints, Ints]:
    """Return in which file of the source each item begins, and where; values are in the first."""
    entries = source.metadata.state_dict_metadata
    heads, rows = items.catalog.heads, items.row.tolist()
    names = dict.fromkeys(heads[row][1] for row in rows if heads[row][3] is not None)
    chunks: list[tuple[str, int]] = []
    corners: list[tuple[str, tuple[int, ...]]] = []
    for name in names:
        entry = entries[name]
        assert isinstance(entry, TensorMetadata)
        for number, offsets in enumerate(entry.chunks.offsets.tolist()):
            chunks.append((name, number))
            corners.append((name, tuple(offsets)))
    at = dict(zip(corners, source.find_chunks(chunks), strict=True))
    first: dict[str, ChunkPlace] = {}
    for (name, _), spot in at.items():
        first.setdefault(name, spot)
    found = []
    for row, offsets in zip(rows, items.offsets.tolist(), strict=True):
        _, name, _, properties, size = heads[row]
        if properties is None:
            found.append((-1, 0))
            continue
        spot = at.get((name, tuple(offsets[: len(size)])), first[name])
        found.append((spot.file, spot.begin))
    places = column(found, len(found), 2)
    file = places[:, 0]
    lowest = file[file >= 0].min() if (file >= 0).any() else 0
    return np.maximum(file, lowest), places[:, 1]


def nbytes_of(plan: SavePlan) -> int:
    """Return how many bytes of tensors a plan writes."""
    items = plan.items
    if not len(items):
        return 0
    tensors = ~items.catalog.is_bytes[items.row]
    numel = [math.prod(size) for size in items.sizes[tensors].tolist()]
    width = items.catalog.itemsize[items.row[tensors]].tolist()
    return sum(n * w for n, w in zip(numel, width, strict=True))
