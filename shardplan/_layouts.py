"""What does a state dict say of everybody's part of it? Cheaply, and without asking anybody."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from shardplan.dist import Comm
from shardplan.planning import (
    Mesh,
    PlanError,
    RefusedError,
    Replicate,
    SavePlan,
    Shard,
    StridedShard,
    TensorSpec,
    WorldPlans,
    _is_leaf,
    dtype_name,
    is_tensor,
    kind_of,
    placement_of,
    spec_of,
    world_plans,
)

__all__ = ["holds_objects", "layout_key", "on_meta", "whole_layout"]

_TEXT: Final = frozenset((str,))
_MIXED: Final = (np.ndarray, Mapping, list, tuple)  # of which each must be looked at, or into


@attrs.frozen(cache_hash=True)
class _Layout:
    """All that a local plan depends on, nested as the state dict is."""

    entries: tuple[Hashable, ...]


def layout_key(sd: Mapping[Any, Any]) -> Hashable | None:
    """Return all that a local plan depends on, without planning; None if only planning can tell.

    This is what a save with a known plan spends its time on.

    >>> a, b = np.zeros(3), np.ones(3)
    >>> layout_key({"w": a, "step": 1}) == layout_key({"w": b, "step": 2})
    True
    """
    try:
        layout = _Layout(_entries(sd))
        hash(layout)
    except Exception:  # planning says what is wrong with it
        return None
    return layout


class _UntoldError(Exception):
    """A value whose layout only planning can tell."""


def _entries(sd: Mapping[Any, Any]) -> tuple[Hashable, ...]:
    """Return the keys of all values of a dict, with their names."""
    names: tuple[Hashable, ...] = tuple(sd)
    if not _TEXT.issuperset(map(type, sd)):  # 1 == True and 0.0 == -0.0, and they make other names
        names = tuple([(type(name), repr(name), name) for name in sd])
    return names, _values(sd.values())


def _values(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the keys of some values: those of DTensors as columns, as there are mostly these."""
    values = list(values)
    examples = {type(value): value for value in values}
    dtensors = {kind for kind, value in examples.items() if spec_of(value) is not None}
    placed, others = values, list[Any]()
    if not dtensors.issuperset(examples):
        placed = [value for value in values if type(value) in dtensors]
        others = [value for value in values if type(value) not in dtensors]
    local = [value._local_tensor for value in placed]
    if any(hasattr(one, "__create_chunk_list__") for one in local):
        raise _UntoldError
    return (
        tuple([type(value) in dtensors for value in values]) if others else (),
        tuple([value._spec for value in placed]),  # which keeps its hash, and renews it if it must
        tuple([one.shape for one in local]),
        tuple([value.requires_grad for value in placed]),
        tuple([getattr(one, "is_meta", False) for one in local]),
        tuple([_key(value) for value in others]),
    )


def _key(value: Any) -> Hashable:
    """Return the key of a value that is no DTensor; None for all that are saved as a whole."""
    if isinstance(value, Mapping):
        return _entries(value)
    if isinstance(value, (list, tuple)):
        return None if _is_leaf(value) else (type(value).__name__, _values(value))
    if not is_tensor(value):
        return None
    kind = kind_of(value)
    if kind is None:
        raise _UntoldError
    return kind, getattr(value, "is_meta", False)


def on_meta(value: Any) -> bool:
    """Tell whether a value is a tensor of which this rank has the shape, but not the elements.

    >>> on_meta(np.zeros(2)), on_meta("text")
    (False, False)
    """
    if not is_tensor(value):
        return False
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return bool(shards) and all(shard.is_meta for shard in shards)
    return bool(getattr(getattr(value, "_local_tensor", value), "is_meta", False))


def holds_objects(sd: Mapping[Any, Any]) -> bool:
    """Tell whether a state dict holds what may be refused: more than tensors, numbers and texts.

    >>> holds_objects({"w": np.zeros(3), "groups": [{"lr": 0.1}]}), holds_objects({"f": [len]})
    (False, True)
    >>> holds_objects({"f": np.array([len]), "w": np.zeros(3)})
    True
    """
    safe = {str, int, float, bool, type(None)}  # and types of tensors, once one was seen

    def any_object(values: Iterable[Any]) -> bool:
        values = list(values)
        examples = {type(value): value for value in values}
        new = {kind: value for kind, value in examples.items() if not issubclass(kind, _MIXED)}
        safe.update(kind for kind, value in new.items() if is_tensor(value))
        if safe.issuperset(examples):
            return False
        return any(is_object(value) for value in values if type(value) not in safe)

    def is_object(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any_object(value.values())
        if isinstance(value, (list, tuple)):
            return any_object(value)
        return not is_tensor(value)

    return any_object(sd.values())


@attrs.frozen
class _Placed:
    """A tensor's spec, and the mesh it lies on: all ranks of the job, in order."""

    spec: TensorSpec
    mesh: Mesh | None


def whole_layout(flat: Mapping[str, Any], local: SavePlan, comm: Comm) -> WorldPlans | None:
    """Return what every rank holds, as far as this one can tell; None if it cannot.

    It can if every tensor is a DTensor on the mesh of all ranks, or on some axes of that mesh (then
    the other axes hold replicas), or is plain: those are the same on every rank, as values are.
    Whether all ranks have the same of them, only they can tell, together.

    Args:
        flat: The state dict, flattened.
        local: This rank's local plan, before any pass.
        comm: The ranks.

    Returns:
        Every rank's local plan; this rank's is ``local``.
    """
    ranks = comm.world_size
    specs: dict[str, TensorSpec] = {}
    known: dict[Hashable, _Placed] = {}
    meshes: set[Mesh] = set()
    for name, value in flat.items():
        if not is_tensor(value):
            continue
        kind = kind_of(value)
        placed = None if kind is None else known.get(kind)
        if placed is None:
            try:
                placed = _look(name, value, ranks)
            except (RefusedError, ValueError, TypeError):
                return None  # `local_plan` says what is wrong
            if placed is None:
                return None
            if placed.mesh is not None:
                meshes.add(placed.mesh)
            if kind is not None:
                known[kind] = placed
        specs[name] = placed.spec
    if len(meshes) > 1:
        return None
    mesh = next(iter(meshes), Mesh(rank=ranks))
    try:
        plans = world_plans({**dict.fromkeys(flat), **specs}, mesh)
    except (PlanError, RefusedError):
        return None
    plans = attrs.evolve(plans, planner_data=local.planner_data)
    return plans if plans[comm.rank] == local else None


def _look(name: str, value: Any, ranks: int) -> _Placed | None:
    """Say how a tensor lies on all ranks; None if this one cannot tell."""
    if getattr(value, "requires_grad", False):
        return None  # a property that specs do not have
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    if not hasattr(value, "placements") or not hasattr(value, "device_mesh"):
        if hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__"):
            return None
        return _Placed(TensorSpec(shape, dtype), None)
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        return None
    mine = value.device_mesh
    root = mine._get_root_mesh() if hasattr(mine, "_get_root_mesh") else mine
    grid = np.asarray(root.mesh)
    if grid.size != ranks or not np.array_equal(grid.reshape(-1), np.arange(ranks)):
        return None
    names = root.mesh_dim_names or tuple(f"axis{i}" for i in range(grid.ndim))
    own = names if mine is root else (mine.mesh_dim_names or ())
    if not own or not set(own) <= set(names):
        return None
    given = dict(zip(own, (placement_of(name, p) for p in value.placements), strict=True))
    if list(given) != [n for n in names if n in given]:
        return None  # axes in another order: cuts would be made in another order
    placements = tuple(given.get(n, Replicate()) for n in names)
    if not _even(shape, placements, grid.shape):
        return None
    mesh = Mesh(**dict(zip(names, grid.shape, strict=True)))
    return _Placed(TensorSpec(shape, dtype, placements), mesh)


def _even(shape: tuple[int, ...], placements: tuple[Any, ...], ranks: tuple[int, ...]) -> bool:
    """Tell whether what strided placements say is what any rank has; see `held`."""
    strided = {p.dim for p in placements if isinstance(p, StridedShard)}
    for dim in strided:
        parts = 1
        for placement, count in zip(placements, ranks, strict=True):
            if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim:
                parts *= count
        if shape[dim] % parts:
            return False
    return True
