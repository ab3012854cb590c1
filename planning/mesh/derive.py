"""The plans of all ranks, derived by each rank without communication.

`derive_plans` returns what `global_plan` does, but a rank's plan is made only on demand, and work
is done once per layout rather than once per tensor. `described_plans` finds the plans of all ranks
in the meshes and placements of one rank's tensors. `layout_key` is the hot path of a save with a
cached plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..columns.arrays import Columns, Index, Ints, column, distinct, group_rows, readonly
from ..columns.items import WriteItems
from ..dtypes import dtype_name
from ..errors import PlanError, RefusedError
from ..geometry.tilings import pad
from ..metadata import Metadata
from ..nodes import children_of, is_node, node_data
from ..passes.chunks import Shared, share_out
from ..plans import SavePlan
from ..tensors import kind_of, placement_of, spec_of
from ..tree import _is_leaf, is_tensor
from .placements import Mesh, Placement, Replicate, Shard, StridedShard, TensorSpec, spread
from .worlds import SpecLayout, WorldPlans, world_metadata, world_plans

__all__ = ["DerivedPlans", "derive_plans", "described_plans", "layout_key", "on_meta"]


def derive_plans(plans: WorldPlans) -> tuple[DerivedPlans, Metadata]:
    """Return what ``global_plan(plans)`` does; each rank's plan is made on demand.

    >>> from shardplan.planning import Mesh, Replicate, TensorSpec, global_plan, world_plans
    >>> specs = {"a": TensorSpec((4,)), "b": TensorSpec((4,)), "step": 7}
    >>> plans = world_plans(specs, Mesh(dp=2))
    >>> derive_plans(plans) == global_plan(plans)
    True

    Raises:
        PlanError: Some tensors are not fully held; it lists all of them.
    """
    return DerivedPlans(plans), world_metadata(plans)


@attrs.frozen(eq=False)
class _Shares:
    """The chunks of one layout, and the ranks that hold each."""

    chunk: Ints  # the chunk number of each row of the layout
    holders: Ints  # one row a chunk: the ranks that hold it, ascending; all rows are equally long
    volume: Ints  # the elements of each chunk; 1 for a non-tensor value

    @classmethod
    def of(cls, layout: SpecLayout) -> _Shares:
        """Group a layout's boxes into chunks."""
        constant = np.zeros_like(layout.rank)  # a tensor without axes has no other column
        first, chunk = group_rows([constant, layout.offsets, layout.sizes])
        holders = layout.rank[np.argsort(chunk, kind="stable")]
        return cls(chunk, holders.reshape(len(first), -1), layout.sizes[first].prod(axis=1))


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of all layouts, one row per box: by layout, then by rank, in storage order."""

    # Per rank and layout, the first box and how many there are. The last layout stands for
    # non-tensor values: one box on every rank.
    first: Ints
    count: Ints
    offsets: Ints  # padded to the catalog's width
    sizes: Ints
    chunk: Ints  # the chunk number of each box

    @classmethod
    def of(cls, plans: WorldPlans, shares: Sequence[_Shares]) -> _Boxes:
        """List the boxes of a world."""
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
    """One plan per rank, made on demand; each replica has one writer. Compares like a tuple.

    Attributes:
        plans: What each rank holds.
    """

    plans: WorldPlans

    @cached_property
    def _shares(self) -> tuple[_Shares, ...]:
        """The holders of each layout's chunks; the last entry is for non-tensor values."""
        everyone = np.arange(len(self.plans))[None, :]
        value = _Shares(np.zeros(len(self.plans), np.int64), everyone, np.ones(1, np.int64))
        return (*map(_Shares.of, self.plans.layouts), value)

    @cached_property
    def _boxes(self) -> _Boxes:
        """The boxes of every layout on every rank."""
        return _Boxes.of(self.plans, self._shares)

    @cached_property
    def _writers(self) -> _Writers:
        return _writers(self.plans, self._shares)

    def writers_of(self, row: int) -> Ints:
        """Return the rank that writes each chunk of one row of the catalog, by chunk number."""
        share, first = self._shares[self.plans.layout_numbers[row]], self._writers.first[row]
        if first < 0:
            return readonly(share.holders[:, 0])
        return readonly(self._writers.rank[first : first + len(share.volume)])

    def layout_alone(self, row: int) -> int | None:
        """Return the layout of one row of the catalog if it alone says who writes; else None."""
        return None if self._writers.first[row] >= 0 else int(self.plans.layout_numbers[row])

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank."""
        boxes, number = self._boxes, self.plans.layout_numbers
        item, nth = spread(boxes.count[row][number])
        at = boxes.first[row][number[item]] + nth
        chunk, writers = boxes.chunk[at], self._writers
        shared = np.flatnonzero(writers.first[item] >= 0)
        keep = np.ones(len(item), bool)
        keep[shared] = writers.rank[writers.first[item[shared]] + chunk[shared]] == row
        columns = (item, boxes.offsets[at], boxes.sizes[at], chunk)
        item, offsets, sizes, chunk = (readonly(column[keep]) for column in columns)
        items = WriteItems(self.plans.catalog, item, offsets, sizes, hint=chunk)
        return SavePlan(items, None, self.plans.planner_data, row, len(self))

    def __len__(self) -> int:
        return len(self.plans)

    def take(self, rows: Index | slice) -> tuple[SavePlan, ...]:
        """Return the plans of some ranks."""
        return tuple(map(self.record, np.arange(len(self))[rows].tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return DerivedPlans, (self.plans,)


@attrs.frozen(eq=False)
class _Writers:
    """The writers of shared chunks."""

    first: Ints  # per row of the catalog, where its first chunk is in `rank`; -1 if none is shared
    rank: Ints  # the rank that writes each chunk


def _writers(plans: WorldPlans, shares: Sequence[_Shares]) -> _Writers:
    """Assign each shared chunk to one holder, as `dedup_replicas` does."""
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
    return _Writers(first, np.concatenate([column([]), *writers]))


_TEXT: Final = frozenset((str,))


@attrs.frozen(cache_hash=True)
class _Key:
    """Everything that a local plan depends on, nested like the state dict."""

    entries: tuple[Hashable, ...]


class _UnknownLayoutError(Exception):
    """The layout of a value cannot be determined without planning it."""


def layout_key(sd: Mapping[Any, Any]) -> Hashable | None:
    """Return everything that a local plan depends on, without planning; None if impossible.

    >>> a, b = np.zeros(3), np.ones(3)
    >>> layout_key({"w": a, "step": 1}) == layout_key({"w": b, "step": 2})
    True
    """
    try:
        key = _Key(_entries(sd))
        hash(key)
    except Exception:  # planning raises a clear error
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
    """Return the key of a value other than a DTensor; None for a non-tensor value."""
    if isinstance(value, Mapping):
        return _entries(value)
    if is_node(value):  # what is in it counts, and its class and data, which a plan keeps
        children = children_of(value)
        inside = _entries(children) if isinstance(children, dict) else _values(children)
        return repr(node_data(value, "a node")), type(children).__name__, inside
    if isinstance(value, (list, tuple)):
        return None if _is_leaf(value) else (type(value).__name__, _values(value))
    if not is_tensor(value):
        return None
    kind = kind_of(value)
    if kind is None:
        raise _UnknownLayoutError
    return kind, getattr(value, "is_meta", False)


def on_meta(value: Any) -> bool:
    """Return True for a tensor on the meta device, which has a shape but no elements."""
    if not is_tensor(value):
        return False
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return bool(shards) and all(shard.is_meta for shard in shards)
    return bool(getattr(getattr(value, "_local_tensor", value), "is_meta", False))


# The plans of all ranks


@attrs.frozen
class _Placed:
    """A tensor's spec and its mesh of all ranks; None for a plain tensor."""

    spec: TensorSpec
    mesh: Mesh | None


def described_plans(
    flat: Mapping[str, Any], local: SavePlan, rank: int, ranks: int
) -> WorldPlans | None:
    """Derive every rank's local plan from this rank's, before any pass; None if impossible.

    It is possible if every tensor is plain, or is a DTensor on the mesh of all ranks or on some
    axes of that mesh (the other axes hold replicas). Plain tensors and values are assumed to be on
    every rank, so ranks must compare fingerprints of what they derived.
    """
    try:
        placed = _all_placed(flat, ranks)
        meshes = {tensor.mesh for tensor in placed.values() if tensor.mesh is not None}
        if len(meshes) > 1:
            return None
        specs = {name: tensor.spec for name, tensor in placed.items()}
        mesh = next(iter(meshes), Mesh(rank=ranks))
        plans = world_plans({**dict.fromkeys(flat), **specs}, mesh)
    except (_UnknownLayoutError, PlanError, RefusedError, ValueError, TypeError):
        return None  # if something is wrong, `local_plan` raises a clear error
    plans = attrs.evolve(plans, planner_data=local.planner_data)
    return plans if plans[rank] == local else None


def _all_placed(flat: Mapping[str, Any], ranks: int) -> dict[str, _Placed]:
    """Return how all tensors are placed on all ranks; tensors of a kind are examined once."""
    known: dict[Hashable, _Placed] = {}
    placed: dict[str, _Placed] = {}
    for name, value in flat.items():
        if is_tensor(value):
            kind = kind_of(value)
            if kind is None or kind not in known:
                known[kind] = _placed(name, value, ranks)
            placed[name] = known[kind]
    return placed


def _placed(name: str, value: Any, ranks: int) -> _Placed:
    """Return how a tensor is placed on all ranks; raise if this rank does not know."""
    if getattr(value, "requires_grad", False):
        raise _UnknownLayoutError  # specs do not have this property
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    if not hasattr(value, "placements") or not hasattr(value, "device_mesh"):
        if hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__"):
            raise _UnknownLayoutError
        return _Placed(TensorSpec(shape, dtype), None)
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        raise _UnknownLayoutError
    own_mesh = value.device_mesh
    root = own_mesh._get_root_mesh() if hasattr(own_mesh, "_get_root_mesh") else own_mesh
    grid = np.asarray(root.mesh)
    if grid.size != ranks or not np.array_equal(grid.reshape(-1), np.arange(ranks)):
        raise _UnknownLayoutError
    axes = root.mesh_dim_names or tuple(f"axis{i}" for i in range(grid.ndim))
    own_axes = axes if own_mesh is root else (own_mesh.mesh_dim_names or ())
    if not own_axes or list(own_axes) != [axis for axis in axes if axis in own_axes]:
        raise _UnknownLayoutError  # axes in another order cut in another order
    given = [placement_of(name, placement) for placement in value.placements]
    by_axis = dict(zip(own_axes, given, strict=True))
    placements = tuple(by_axis.get(axis, Replicate()) for axis in axes)
    if not _is_even(shape, placements, grid.shape):
        raise _UnknownLayoutError
    mesh = Mesh(**dict(zip(axes, grid.shape, strict=True)))
    return _Placed(TensorSpec(shape, dtype, placements), mesh)


def _is_even(
    shape: tuple[int, ...], placements: tuple[Placement, ...], ranks: tuple[int, ...]
) -> bool:
    """Return True if strided placements divide evenly, so that they determine each shard."""
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
