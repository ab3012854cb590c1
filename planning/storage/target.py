"""`plan_target`: which tensors, cut how, go to which file when a checkpoint is converted.

Every item's source is a whole tensor of the old checkpoint, so any box of it can be read wherever
it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import numpy as np

from ..columns.arrays import Ints, column, padded, readonly
from ..columns.items import Catalog, Head, WriteItems
from ..mesh import Mesh, Placement, Shard, TensorSpec, as_mesh, world_plans
from ..metadata import Metadata, TensorMetadata
from ..passes import Passes, Stages, chain, inverse
from ..plans import SavePlan
from ..records import WriteItemType
from ..save import DEFAULT_PASSES, global_plan
from ..sources import dropped_names
from .blocks import ChunkTable
from .copy import StoredChunks
from .write import MAX_SHARD_SIZE, refuse_split, shard_plans

if TYPE_CHECKING:
    from ..reports.show import PlannerTrace


Placements = (
    Mapping[str, Sequence[Placement]]
    | Sequence[Placement]
    | Callable[[str, tuple[int, ...]], Sequence[Placement]]
)
"""How tensors lie on a mesh: the placements of all of them; or by shell-style pattern of their
names, where the first that fits counts; or a function of name and shape."""

_LEAST_PART: Final = 64 << 20
_PARTS: Final = 4  # files that one process should have to write, to keep all threads busy
_NESTING: Final = ("paths", "empty", "nodes")  # what planner data says of nested keys


@attrs.frozen(eq=False)
class Target:
    """A checkpoint to be made."""

    # What to write; each is written by one process, as if it were a rank.
    plans: tuple[SavePlan, ...]
    metadata: Metadata  # what the checkpoint will hold
    # Names that share another's elements, and those others.
    tied: Mapping[str, str] = attrs.field(factory=dict)
    left_out: tuple[str, ...] = ()  # names of values that the format cannot hold
    dropped: tuple[str, ...] = ()  # names in the old checkpoint of what the planner left out
    trace: PlannerTrace | None = None  # what each pass of the planner did, if that was asked for


class Traits(Protocol):
    """What a checkpoint format can hold; see `shardplan.io.formats.Format`."""

    name: str
    is_file: bool
    whole_tensors: bool
    has_values: bool
    reserved: tuple[str, ...]


def plan_target(
    metadata: Metadata,
    into: Traits,
    stored: StoredChunks,
    *,
    planner: Passes[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_shard_size: int | None = None,
    processes: int = 1,
    trace: bool = False,
) -> Target:
    """Plan what a conversion writes, or raise ValueError, PlanError or RefusedError.

    With a mesh, there is one plan per rank of it. Without one, tensors stay cut as they are, one
    plan per file of the old checkpoint or part of it; a format that holds tensors whole gets them
    so, one plan per file.

    Args:
        metadata: The old checkpoint.
        into: The format to write.
        stored: Where the old checkpoint's chunks lie.
        planner: A pass over the plans, or a list of them.
        mesh: The ranks to shard for.
        placements: How tensors lie on the mesh; by default all are cut along their first axis.
        max_shard_size: The most bytes of a file, where there is no mesh.
        processes: How many processes share the work.
        trace: Whether to return what each pass of the planner did.
    """
    whole = into.whole_tensors
    if mesh is None and placements is not None:
        raise ValueError("placements need a mesh to lie on; pass mesh=Mesh(dp=4), say")
    if mesh is not None and whole:
        as_mesh(mesh)
        raise ValueError(
            f"a checkpoint of the format {into.name!r} is not sharded; leave out `mesh`"
        )
    if mesh is None:
        local: Sequence[SavePlan] = (held_tensors(metadata, whole),)
    else:
        local = _sharded(metadata, as_mesh(mesh), placements)
    did: PlannerTrace | None = None
    if trace:
        from ..reports.show import traced

        local, did = traced(planner or (), local)
    passes = chain(() if trace or planner is None else planner, *DEFAULT_PASSES)
    plans, described = global_plan(local, passes)
    described = attrs.evolve(described, planner_data=_planner_data(metadata, described))
    dropped = dropped_names(plans)
    plans = tuple(attrs.evolve(plan, held=None, left_out=None) for plan in plans)
    tied = _tie_names(stored.tied, plans, into.reserved)
    left_out: tuple[str, ...] = ()
    if not into.has_values:
        plans, left_out = _without_values(plans)
    if whole and not into.is_file:
        refuse_split(plans, "leave out the pass of `planner` that splits tensors")
        plans = shard_plans(plans[0], max_shard_size or MAX_SHARD_SIZE, tied)
    elif mesh is None and not whole:
        plans = _split_by_file(plans[0], metadata, stored, max_shard_size, processes)
    plans = tuple(attrs.evolve(plan, items=_from_whole(plan.items)) for plan in plans)
    return Target(plans, described, tied, left_out, dropped, did)


def held_tensors(metadata: Metadata, whole: bool) -> SavePlan:
    """Plan to write all that was saved, cut as it is or in whole tensors."""
    heads: list[Head] = []
    row, offsets, sizes = list[int](), list[Sequence[int]](), list[Sequence[int]]()
    for number, (name, entry) in enumerate(sorted(metadata.state_dict_metadata.items())):
        if not isinstance(entry, TensorMetadata):
            heads.append(Head.value(name))
            boxes: tuple[Any, Any] = ([()], [()])
        elif whole or 0 in entry.size:
            heads.append(Head(name, name, WriteItemType.TENSOR, entry.properties, entry.size))
            boxes = ([(0,) * len(entry.size)], [entry.size])
        else:
            heads.append(Head(name, name, WriteItemType.SHARD, entry.properties, entry.size))
            boxes = (entry.chunks.offsets.tolist(), entry.chunks.sizes.tolist())
        row += [number] * len(boxes[0])
        offsets += boxes[0]
        sizes += boxes[1]
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
    return {key: data[key] for key in _NESTING if data.get(key)} or None


def _planner_data(old: Metadata, new: Metadata) -> Any:
    """Keep what planners left in the old checkpoint, except for nested keys: they may change."""
    theirs = dict(old.planner_data) if isinstance(old.planner_data, Mapping) else {}
    theirs = {key: part for key, part in theirs.items() if key not in _NESTING}
    return {**theirs, **(new.planner_data or {})} or None


def _from_whole(items: WriteItems) -> WriteItems:
    """Let all items be parts of whole tensors, which start at the origin."""
    return attrs.evolve(items, source_offsets=readonly(np.zeros_like(items.box_offsets)))


def _without_values(plans: Sequence[SavePlan]) -> tuple[tuple[SavePlan, ...], tuple[str, ...]]:
    """Leave out non-tensor values; return their names, too."""
    kept, names = [], set[str]()
    for plan in plans:
        items = plan.items
        is_value = items.catalog.is_bytes[items.row] if len(items) else np.zeros(0, bool)
        names |= {items.catalog.names[row] for row in items.row[is_value].tolist()}
        kept.append(attrs.evolve(plan, items=items.take(~is_value)))
    return tuple(kept), tuple(sorted(names))


def _tie_names(
    tied: Mapping[str, str], plans: Sequence[SavePlan], reserved: Sequence[str]
) -> dict[str, str]:
    """Return the new names of tied tensors; those that are changed apart are tied no longer."""
    if not tied:
        return {}
    either = {*tied, *tied.values()}
    made: dict[str, set[Hashable]] = {}  # what each new tensor is made of
    is_second = set[str]()
    for plan in plans:
        sources = plan.items.catalog.sources
        known = np.array([source in either for source in sources], bool)
        for item in plan.items.take(known[plan.items.row]):
            name, source, data = item.index.fqn, item.source.fqn, item.tensor_data
            if data is not None:
                box = (tied.get(source, source), item.source_chunk, item.axes, item.fill)
                made.setdefault(name, set()).add((*box, data))
                is_second |= {name} if source in tied else set()
    groups: dict[Hashable, str] = {}
    ties = {}
    for name in sorted(made, key=lambda n: (n in is_second, n)):
        kept = groups.setdefault(frozenset(made[name]), name)
        if kept != name and name not in reserved:
            ties[name] = kept
    return ties


def _split_by_file(
    plan: SavePlan, metadata: Metadata, stored: StoredChunks, max_bytes: int | None, processes: int
) -> tuple[SavePlan, ...]:
    """Divide a plan by the files that its bytes come from, and these by size."""
    items = plan.items
    if not len(items):
        return (plan,)
    file, begin = _origins(items, metadata, stored)
    width = np.maximum(items.catalog.itemsize[items.row], 0)
    nbytes = np.where(items.catalog.is_bytes[items.row], 0, items.sizes.prod(axis=1) * width)
    share = int(nbytes.sum()) // (_PARTS * processes)
    limit = max_bytes or min(MAX_SHARD_SIZE, max(share, _LEAST_PART))
    part, number, held, last = np.zeros(len(items), np.int64), 0, 0, None
    for row in np.lexsort((begin, file)).tolist():
        if last is not None and (file[row] != last or held + int(nbytes[row]) > limit):
            number, held = number + 1, 0
        part[row], last, held = number, file[row], held + int(nbytes[row])
    rows = np.split(np.argsort(part, kind="stable"), np.cumsum(np.bincount(part))[:-1])
    return tuple(attrs.evolve(plan, items=items.take(mine)) for mine in rows)


def _origins(items: WriteItems, metadata: Metadata, stored: StoredChunks) -> tuple[Ints, Ints]:
    """Return the file that each item begins in, and where; values are in the first file."""
    entries, sources = metadata.state_dict_metadata, items.catalog.sources
    layout = entries.layout[column([entries.row_of[name] for name in sources])][items.row]
    table = ChunkTable.of(entries.layouts)
    first = column([stored.first.get(name, -1) for name in sources])[items.row]
    chunk = first + np.maximum(table.find(layout, items.shard_offsets), 0)
    file, begin, real = np.zeros_like(chunk), np.zeros_like(chunk), first >= 0
    file[real], begin[real] = stored.places.file[chunk[real]], stored.places.begin[chunk[real]]
    file[~real] = min(file[real].tolist(), default=0)
    return file, begin


@attrs.frozen(eq=False)
class Seen:
    """A checkpoint as the state dict sees it."""

    metadata: Metadata  # the tensors and values of the state dict
    # The boxes of the checkpoint's tensors that make them up. The names of items are the state
    # dict's, their sources the checkpoint's whole tensors. A fill is an element that the planner
    # leaves out, so that the checkpoint does not have it.
    items: WriteItems


def seen_through(metadata: Metadata, planner: Passes[SavePlan]) -> Seen:
    """Return a checkpoint as the state dict sees it that a planner maps to it.

    Raise ValueError if the planner has no inverse, and PlanError if the checkpoint is not one that
    it makes.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan, split
    >>> metadata = global_plan([local_plan({"q": TensorSpec((4,)), "k": TensorSpec((2,))})])[1]
    >>> seen_through(metadata, split("qkv", {"q": 4, "k": 2})).metadata
    Metadata: 1 entry, 24 B
    name  dtype    shape  chunks
    qkv   float32  [6]    Grid(0:4:6)
    """
    stages = Stages.of(planner, load=True)
    back = inverse(chain(*stages.own, *stages.rest))
    (plan,), seen = global_plan([held_tensors(metadata, whole=True)], back)
    start = readonly(np.zeros_like(plan.items.box_offsets))
    return Seen(seen, attrs.evolve(plan.items, source_offsets=start))
