"""What a conversion to some format writes: the parts of its plan that depend on formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import attrs
import numpy as np

from shardplan.io.execute import stored_chunks
from shardplan.io.formats import Source, Spot
from shardplan.io.formats.hf import MAX_SHARD_SIZE, HfWriter, refuse_split
from shardplan.planning import Mesh, Passes, SavePlan, TensorMetadata
from shardplan.planning.columns import column
from shardplan.planning.storage import (
    Placements,
    StoredChunks,
    Target,
    split_by_file,
    target_plans,
    tie_names,
    write_plan,
)

__all__ = ["plan_target", "write_order"]

_WHOLE: Final = ("hf", "torch")  # formats that hold every tensor in one piece


def plan_target(
    source: Source,
    format: str,
    *,
    planner: Passes[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_shard_size: int | None = None,
    processes: int = 1,
    stored: StoredChunks | None = None,
) -> Target:
    """Plan what a conversion writes.

    With a mesh, there is one plan per rank of it. Without one, tensors stay cut as they are, one
    plan per file of the source or part of it; a format that holds tensors whole gets them so.

    Args:
        source: What to convert.
        format: What to.
        planner: A pass over the plans, or a list of them.
        mesh: The ranks to shard for.
        placements: How tensors lie on the mesh; see `target_plans`.
        max_shard_size: The most bytes of a file, for ``hf`` and where there is no mesh.
        processes: How many processes share the work.
        stored: Where the source's chunks lie, if that is known.

    Raises:
        PlanError, RefusedError: There is no correct plan.
        ValueError: What was asked for does not go together.
    """
    whole = format in _WHOLE
    if mesh is not None and whole:
        raise ValueError(f"a checkpoint of the format {format!r} is not sharded; leave out `mesh`")
    target = target_plans(
        source.metadata, planner=planner, mesh=mesh, placements=placements, whole=whole
    )
    target = attrs.evolve(target, tied=tie_names(_tied(source), target.plans))
    if format == "hf":
        return _sharded(target, max_shard_size or MAX_SHARD_SIZE)
    if mesh is not None or whole:
        return target
    plans = split_by_file(
        target.plans[0],
        source.metadata,
        stored or stored_chunks(source),
        max_bytes=max_shard_size,
        processes=processes,
    )
    return attrs.evolve(target, plans=plans)


def _tied(source: Source) -> dict[str, str]:
    """Find names of one and the same stored tensor; the first of each is the one that is kept.

    These are weights that were tied when they were saved, by a tool that stores them once. Views of
    one storage may begin at the same place of the same array: only their sizes differ.
    """
    entries = source.metadata.state_dict_metadata
    single = {
        name: entry.size
        for name, entry in entries.items()
        if isinstance(entry, TensorMetadata) and len(entry.chunks) == 1 and 0 not in entry.size
    }
    first: dict[tuple[Spot, tuple[int, ...]], str] = {}
    spots = source.spots([(name, 0) for name in single])
    views = zip(single, zip(spots, single.values(), strict=True), strict=True)
    pairs = [(name, first.setdefault(view, name)) for name, view in views]
    return {name: kept for name, kept in pairs if name != kept}


def _sharded(target: Target, max_shard_size: int) -> Target:
    """Make one plan per file of whole tensors; values are left out."""
    (plan,) = target.plans
    items = plan.items
    is_value = items.catalog.is_bytes[items.row] if len(items) else np.zeros(0, bool)
    names = np.array([items.catalog.names[row] for row in items.row.tolist()], object)
    writer = HfWriter(max_shard_size=max_shard_size, tied=target.tied)
    tensors = attrs.evolve(plan, items=items.take(~is_value))
    refuse_split((tensors,), way="leave out the pass of `planner` that splits tensors")
    (numbered,) = writer.prepare((tensors,))
    _, count, files = numbered.storage_data["hf"]
    file_of = {name: number for number, held in enumerate(files) for name in held}
    number = column([file_of.get(name, -1) for name in names[~is_value].tolist()])
    plans = tuple(
        SavePlan(
            tensors.items.take(np.flatnonzero(number == n)),
            storage_data={"hf": (n, count, (held,))},
            planner_data=plan.planner_data,
        )
        for n, held in enumerate(files)
    )
    left_out = tuple(sorted(names[is_value].tolist()))
    return attrs.evolve(target, plans=plans, tied=writer.tied, left_out=left_out)


def write_order(format: str, tied: Mapping[str, str], plan: SavePlan) -> Iterable[int]:
    """Return the order in which a writer of some format asks for the items of a plan.

    Args:
        format: What is written.
        plan: What to write.
        tied: Names that share another's elements, which some formats store once.
    """
    items = plan.items
    if format in ("hf", "safetensors"):
        order: list[int] = write_plan(plan).order.tolist()
        return order
    if format == "torch":
        names, rows = items.catalog.names, items.row.tolist()
        return [item for item, row in enumerate(rows) if names[row] not in tied]
    return range(len(items))
