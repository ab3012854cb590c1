"""The layout that a rank's state dict describes: a key for its plan, and the plans of all ranks.

`layout_key` is what a save with a known plan spends its time on. `described_plans` derives every
rank's plan from the meshes and placements of one rank's tensors, so that nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from ..dtypes import dtype_name
from ..errors import PlanError, RefusedError
from ..plans import SavePlan
from ..tensors import kind_of, placement_of, spec_of
from ..tree import _is_leaf, is_tensor
from .placements import Mesh, Placement, Replicate, Shard, StridedShard, TensorSpec
from .worlds import WorldPlans, world_plans

__all__ = ["described_plans", "layout_key", "on_meta"]

_TEXT: Final = frozenset((str,))


@attrs.frozen(cache_hash=True)
class _Key:
    """All that a local plan depends on, nested as the state dict is."""

    entries: tuple[Hashable, ...]


class _UnknownLayoutError(Exception):
    """The layout of a value cannot be seen without planning it."""


def layout_key(sd: Mapping[Any, Any]) -> Hashable | None:
    """Return all that a local plan depends on, without planning; None if that is impossible.

    >>> a, b = np.zeros(3), np.ones(3)
    >>> layout_key({"w": a, "step": 1}) == layout_key({"w": b, "step": 2})
    True
    """
    try:
        key = _Key(_entries(sd))
        hash(key)
    except Exception:  # planning explains what is wrong with the state dict
        return None
    return key


def _entries(sd: Mapping[Any, Any]) -> tuple[Hashable, ...]:
    names: tuple[Hashable, ...] = tuple(sd)
    if not _TEXT.issuperset(map(type, sd)):  # 1 == True and 0.0 == -0.0, but their names differ
        names = tuple([(type(name), repr(name), name) for name in sd])
    return names, _values(sd.values())


def _values(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the keys of some values; those of DTensors, the usual case, as columns."""
    values = list(values)
    examples = {type(value): value for value in values}
    dtensors = {kind for kind, value in examples.items() if spec_of(value) is not None}
    placed, others = values, list[Any]()
    if not dtensors.issuperset(examples):
        placed = [value for value in values if type(value) in dtensors]
        others = [value for value in values if type(value) not in dtensors]
    local = [value._local_tensor for value in placed]
    if any(hasattr(shard, "__create_chunk_list__") for shard in local):
        raise _UnknownLayoutError
    return (
        tuple([type(value) in dtensors for value in values]) if others else (),
        tuple([value._spec for value in placed]),  # which caches its own hash
        tuple([shard.shape for shard in local]),
        tuple([value.requires_grad for value in placed]),
        tuple([getattr(shard, "is_meta", False) for shard in local]),
        tuple([_value(value) for value in others]),
    )


def _value(value: Any) -> Hashable:
    """Return the key of a value other than a DTensor; None for one that is saved as a whole."""
    if isinstance(value, Mapping):
        return _entries(value)
    if isinstance(value, (list, tuple)):
        return None if _is_leaf(value) else (type(value).__name__, _values(value))
    if not is_tensor(value):
        return None
    kind = kind_of(value)
    if kind is None:
        raise _UnknownLayoutError
    return kind, getattr(value, "is_meta", False)


def on_meta(value: Any) -> bool:
    """Return True if a value is a tensor whose shape is here, but not its elements.

    >>> on_meta(np.zeros(2)), on_meta("text")
    (False, False)
    """
    if not is_tensor(value):
        return False
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return bool(shards) and all(shard.is_meta for shard in shards)
    return bool(getattr(getattr(value, "_local_tensor", value), "is_meta", False))


# The plans of all ranks


@attrs.frozen
class _Placed:
    """A tensor's spec, and the mesh of all ranks that it lies on; None for a plain tensor."""

    spec: TensorSpec
    mesh: Mesh | None


def described_plans(
    flat: Mapping[str, Any], local: SavePlan, rank: int, ranks: int
) -> WorldPlans | None:
    """Return every rank's local plan, derived from one rank's; None if that is impossible.

    It is possible if every tensor is a DTensor on the mesh of all ranks, or on some axes of that
    mesh (the other axes hold replicas), or is plain: plain tensors and values are taken to be on
    every rank. Ranks must still compare whether all derive the same.

    Args:
        flat: The state dict, flattened.
        local: This rank's local plan, before any pass.
        rank: This rank.
        ranks: The number of ranks.
    """
    specs: dict[str, TensorSpec] = {}
    known: dict[Hashable, _Placed | None] = {}
    meshes: set[Mesh] = set()
    try:
        for name, value in flat.items():
            if not is_tensor(value):
                continue
            kind = kind_of(value)
            placed = None if kind is None else known.get(kind)
            if placed is None:
                placed = known[kind] = _placed(name, value, ranks)
                if placed is None:
                    return None
                meshes |= set() if placed.mesh is None else {placed.mesh}
            specs[name] = placed.spec
        if len(meshes) > 1:
            return None
        mesh = next(iter(meshes), Mesh(rank=ranks))
        plans = world_plans({**dict.fromkeys(flat), **specs}, mesh)
    except (PlanError, RefusedError, ValueError, TypeError):
        return None  # `local_plan` says what is wrong
    plans = attrs.evolve(plans, planner_data=local.planner_data)
    return plans if plans[rank] == local else None


def _placed(name: str, value: Any, ranks: int) -> _Placed | None:
    """Return how a tensor is placed on all ranks; None if this rank does not know."""
    if getattr(value, "requires_grad", False):
        return None  # specs do not have this property
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    if not hasattr(value, "placements") or not hasattr(value, "device_mesh"):
        if hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__"):
            return None
        return _Placed(TensorSpec(shape, dtype), None)
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        return None
    own_mesh = value.device_mesh
    root = own_mesh._get_root_mesh() if hasattr(own_mesh, "_get_root_mesh") else own_mesh
    grid = np.asarray(root.mesh)
    if grid.size != ranks or not np.array_equal(grid.reshape(-1), np.arange(ranks)):
        return None
    axes = root.mesh_dim_names or tuple(f"axis{i}" for i in range(grid.ndim))
    own_axes = axes if own_mesh is root else (own_mesh.mesh_dim_names or ())
    if not own_axes or list(own_axes) != [axis for axis in axes if axis in own_axes]:
        return None  # axes in another order cut in another order
    given = [placement_of(name, placement) for placement in value.placements]
    by_axis = dict(zip(own_axes, given, strict=True))
    placements = tuple(by_axis.get(axis, Replicate()) for axis in axes)
    if not _is_even(shape, placements, grid.shape):
        return None
    mesh = Mesh(**dict(zip(axes, grid.shape, strict=True)))
    return _Placed(TensorSpec(shape, dtype, placements), mesh)


def _is_even(
    shape: tuple[int, ...], placements: tuple[Placement, ...], ranks: tuple[int, ...]
) -> bool:
    """Return True if strided placements cut evenly: only then do they say what a rank holds."""
    cuts = [
        (p.dim, count, isinstance(p, StridedShard))
        for p, count in zip(placements, ranks, strict=True)
        if isinstance(p, (Shard, StridedShard))
    ]
    return all(
        shape[dim] % int(np.prod([count for other, count, _ in cuts if other == dim])) == 0
        for dim, _, strided in cuts
        if strided
    )
