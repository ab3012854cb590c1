"""What one rank holds, described so that every rank with the same description can be derived.

1. `describe` places each tensor by the layout of its mesh: sizes and strides over the ranks. So
   slices of a mesh, flattened meshes and several root meshes need no special case. Names that carry
   the rank's own number, as those of random states do, are kept as templates.
2. Ranks compare the tags of their descriptions. Ranks with equal ones (all of them, or those of a
   pipeline stage) differ only in their coordinates, so one description of each kind suffices.
3. `JoinedPlans` puts the descriptions together: the local plans of all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import attrs
import numpy as np

from ..columns.arrays import DAMAGE, Columns, Ints, column
from ..columns.items import WriteItems
from ..columns.world import World
from ..dtypes import dtype_name
from ..errors import CodecError, Issue, PlanError, RefusedError
from ..frozen import FrozenDict, from_json, to_json
from ..metadata import Metadata
from ..plans import SavePlan
from ..save import merge_nesting
from ..tensors import is_dtensor, is_nested, kind_of, placement_of
from ..tree import Path, is_tensor
from .derive import DerivedPlans
from .layouts import Holding, Holdings, SpecLayout
from .own import OwnKey, OwnLeaf, nesting_of, own_paths
from .placements import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    local_cuts,
)
from .worlds import WorldPlans, catalog_of


class _UnknownLayoutError(Exception):
    """The layout of a value cannot be determined without planning it."""


@attrs.frozen(slots=False)
class Description:
    """What a rank holds, and, with their own coordinates, all ranks that have the same."""

    ranks: int  # how many ranks there are
    specs: FrozenDict[str, TensorSpec]  # the tensors by name, each with the mesh of its placements
    values: tuple[str, ...]  # the names of all non-tensor values
    data: Any  # the `planner_data` of the plan, without the rank's own leaves
    own: tuple[OwnLeaf, ...] = ()  # what each rank has under a name of its own

    @property
    def items(self) -> int:
        """How many tensors and values there are."""
        return len(self.specs) + len(self.values) + len(self.own)

    def own_on(self, rank: int) -> dict[str, OwnLeaf]:
        """Return the own leaves of a rank, by name."""
        return {leaf.name: leaf for leaf in (leaf.on(rank) for leaf in self.own)}

    def data_of(self, rank: int) -> Any:
        """Return the ``planner_data`` of one rank's plan."""
        if not self.own:
            return self.data
        data, mine = dict(self.data or {}), nesting_of(self.own_on(rank))
        data["paths"] = {**data.get("paths", {}), **mine["paths"]}
        data["empty"] = sorted([*data.get("empty", ()), *mine["empty"]])
        return FrozenDict({key: part for key, part in data.items() if part}) or None

    def on(self, rank: int) -> Description:
        """Return the same for one rank: its own leaves are like all others."""
        if not self.own:
            return self
        own, specs = self.own_on(rank), dict(self.specs)
        specs |= {name: leaf.spec for name, leaf in own.items() if leaf.spec is not None}
        values = sorted([*self.values, *(name for name, leaf in own.items() if leaf.spec is None)])
        named = FrozenDict({name: specs[name] for name in sorted(specs)})
        return Description(self.ranks, named, tuple(values), self.data_of(rank))

    def plan_of(self, rank: int) -> SavePlan:
        """Return the local plan of a rank that has this description."""
        plan = self._common[rank]
        if not self.own:
            return plan
        catalog = catalog_of((name, leaf.spec) for name, leaf in self.own_on(rank).items())
        whole = WriteItems(catalog, column(range(len(catalog))), catalog.size * 0, catalog.size)
        items = WriteItems.concat([plan.items, whole])
        items = items.take(np.argsort(items.catalog.name_order[items.row], kind="stable"))
        return SavePlan(items, None, self.data_of(rank), rank, self.ranks, items)

    @cached_property
    def _common(self) -> WorldPlans:
        """The plans of ranks without leaves of their own."""
        return WorldPlans(Mesh(rank=self.ranks), self.specs, self.values, self.data)

    @cached_property
    def encoded(self) -> bytes:
        """All of it as bytes for `decoded`; equal descriptions have equal bytes."""
        specs = [*self.specs.values(), *(leaf.spec for leaf in self.own if leaf.spec is not None)]
        number = {spec: n for n, spec in enumerate(dict.fromkeys(specs))}
        own = [
            (_plain_path(leaf.path), leaf.spec and number[leaf.spec], leaf.is_empty)
            for leaf in self.own
        ]
        named = [number[spec] for spec in self.specs.values()]
        parts = (self.ranks, [*map(_plain, number)], [*self.specs], named, self.values, self.data)
        text = json.dumps(to_json((*parts, own)), separators=(",", ":"), sort_keys=True)
        return text.encode()

    @classmethod
    def decoded(cls, data: bytes) -> Description:
        """Decode what `encoded` returned, or raise `CodecError`."""
        try:
            ranks, table, names, named, values, rest, own = from_json(json.loads(data))
            specs = [_spec(*row, ranks=ranks) for row in table]
            leaves = [
                OwnLeaf(_own_path(path), None if n is None else specs[n], is_empty)
                for path, n, is_empty in own
            ]
            by_name = FrozenDict({k: specs[n] for k, n in zip(names, named, strict=True)})
            return cls(ranks, by_name, values, rest, tuple(leaves))
        except DAMAGE as error:
            raise CodecError(f"a description of what a rank holds is damaged: {error}") from error

    @cached_property
    def tag(self) -> str:
        """A fingerprint."""
        return hashlib.blake2b(self.encoded, digest_size=16).hexdigest()


def _plain(spec: TensorSpec) -> tuple[Any, ...]:
    """Return a spec as plain data."""
    cuts = [(getattr(p, "dim", None), getattr(p, "split_factor", 0)) for p in spec.placements]
    mesh = None if spec.mesh is None else (spec.mesh.shape, spec.mesh.strides)
    return spec.shape, spec.dtype, spec.requires_grad, cuts, mesh


def _spec(
    shape: Any, dtype: str, requires_grad: bool, cuts: Any, mesh: Any, *, ranks: int
) -> TensorSpec:
    """Return the spec that `_plain` made plain data of."""
    placements: list[Placement] = [
        Replicate() if dim is None else StridedShard(dim, factor) if factor else Shard(dim)
        for dim, factor in cuts
    ]
    on = None if mesh is None else Mesh.strided(mesh[0], mesh[1], ranks)
    return TensorSpec(shape, dtype, placements, on, requires_grad)


def _plain_path(path: Path) -> list[Any]:
    return [
        (kind, attrs.astuple(key) if isinstance(key, OwnKey) else key, isinstance(key, OwnKey))
        for kind, key in path
    ]


def _own_path(path: Any) -> Path:
    return tuple((kind, OwnKey(*key) if is_own else key) for kind, key, is_own in path)


def describe(
    flat: Mapping[str, Any], local: SavePlan, rank: int, ranks: Sequence[int]
) -> Description | None:
    """Describe what this rank holds, given its local plan before any pass; None if impossible.

    It is possible if every tensor is plain, or a DTensor whose mesh has a stride along each axis.
    ``rank`` is a position in ``ranks``, the numbers that meshes know the ranks by.
    """
    try:
        places = {number: place for place, number in enumerate(ranks)}
        specs = _specs(flat, rank, places)
        data = local.planner_data or FrozenDict()
        paths = {name: data.get("paths", {}).get(name, (("dict", name),)) for name in flat}
        plain = [name for name in flat if not (name in specs and specs[name].placements)]
        own = own_paths(paths, plain, rank)
        empty = set(data.get("empty", ()))
        leaves = tuple(OwnLeaf(own[name], specs.get(name), name in empty) for name in sorted(own))
        rest = dict(data) | {
            "paths": {name: p for name, p in data.get("paths", {}).items() if name not in own},
            "empty": tuple(sorted(empty - own.keys())),
        }
        found = Description(
            len(ranks),
            FrozenDict({name: specs[name] for name in sorted(specs) if name not in own}),
            tuple(n for n in sorted(flat) if n not in own and not is_tensor(flat[n])),
            FrozenDict({key: part for key, part in rest.items() if part}) or None,
            leaves,
        )
        return found if found.encoded and found.plan_of(rank) == local else None
    except (_UnknownLayoutError, PlanError, RefusedError, CodecError, ValueError, TypeError):
        return None  # if something is wrong, `local_plan` raises a clear error


def _specs(flat: Mapping[str, Any], rank: int, places: Mapping[int, int]) -> dict[str, TensorSpec]:
    """Describe all tensors that this rank holds; those of a kind are examined once."""
    known: dict[Hashable, TensorSpec | None] = {}
    meshes: dict[int, Mesh] = {}
    specs: dict[str, TensorSpec] = {}
    for name, value in flat.items():
        if not is_tensor(value):
            continue
        kind = kind_of(value)
        if kind is None or kind not in known:
            known[kind] = _spec_of(name, value, rank, places, meshes)
        spec = known[kind]
        if spec is not None:
            specs[name] = spec
    return specs


def _spec_of(
    name: str, value: Any, rank: int, places: Mapping[int, int], meshes: dict[int, Mesh]
) -> TensorSpec | None:
    """Describe a tensor; None if only other ranks hold it."""
    shape, dtype = tuple(value.shape), dtype_name(value.dtype)
    grad = bool(getattr(value, "requires_grad", False))
    if not is_dtensor(value):
        known = ("local_shards", "__create_chunk_list__", "device_mesh")
        if any(hasattr(value, attribute) for attribute in known):
            raise _UnknownLayoutError
        return TensorSpec(shape, dtype, requires_grad=grad)
    device_mesh, local = value.device_mesh, getattr(value, "_local_tensor", None)
    if device_mesh.get_coordinate() is None:
        return None
    if id(device_mesh) not in meshes:
        meshes[id(device_mesh)] = _mesh(np.asarray(device_mesh.mesh), places)
    mesh = meshes[id(device_mesh)]
    placements = [placement_of(name, placement) for placement in value.placements]
    cuts = local_cuts(shape, mesh.shape, mesh.coordinate(rank), placements)
    strided = [n for n, placed in enumerate(placements) if getattr(placed, "split_factor", 1) > 1]
    if strided and is_nested(shape, cuts, None if local is None else tuple(local.shape)):
        # FSDP2 cuts what others have cut: its axes come last.
        order = [n for n in range(len(placements)) if n not in strided] + strided
        placements = [placements[n] for n in order]
        placements = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements]
        sizes, strides = ([of[n] for n in order] for of in (mesh.shape, mesh.strides))
        mesh = Mesh.strided(sizes, strides, mesh.ranks)
    return TensorSpec(shape, dtype, placements, mesh, grad)


def _mesh(numbers: Ints, places: Mapping[int, int]) -> Mesh:
    """Return the layout of a mesh, given the numbers of its ranks."""
    at = np.array([places.get(number, -1) for number in numbers.ravel().tolist()])
    at = at.reshape(numbers.shape)
    sizes: tuple[int, ...] = at.shape
    strides = [  # from the first rank to the next one along each axis
        int(np.diff(at, axis=axis).flat[0]) if size > 1 else 1 for axis, size in enumerate(sizes)
    ]
    if min(strides, default=1) < 1 or at.min() < 0:
        raise _UnknownLayoutError
    mesh = Mesh.strided(sizes, strides, len(places))
    if not all(
        (c == i).all() for c, i in zip(mesh.coordinates(at), np.indices(sizes), strict=True)
    ):
        raise _UnknownLayoutError  # its axes have no strides, or it is not aligned to them
    return mesh


# The plans of all ranks


def _parts(parts: Iterable[Description]) -> tuple[Description, ...]:
    return tuple(parts)


@attrs.frozen(eq=False, slots=False)
class JoinedPlans(Columns[SavePlan]):
    """The local plans of all ranks, from a few descriptions; compares like a tuple."""

    parts: tuple[Description, ...] = attrs.field(converter=_parts)  # the distinct descriptions
    part: Ints = attrs.field(converter=column)  # which of them each rank has

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank."""
        part: Description = self.parts[self.part[row]]
        return part.plan_of(row)

    def __len__(self) -> int:
        return len(self.part)

    def data_of(self, rank: int) -> Any:
        """Return the ``planner_data`` of one rank's plan."""
        return self.parts[self.part[rank]].data_of(rank)

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedPlans, (self.parts, self.part.tolist())

    @property
    def items(self) -> int:
        """How many items all plans have, if a rank has one of each tensor and value."""
        return int(np.bincount(self.part) @ [part.items for part in self.parts])

    @cached_property
    def _own(self) -> dict[str, tuple[int, OwnLeaf]]:
        """By name: the state that ranks have under names of their own."""
        found: dict[str, tuple[int, OwnLeaf]] = {}
        for rank, part in enumerate(self.part.tolist()):
            for name, leaf in self.parts[part].own_on(rank).items():
                if found.setdefault(name, (rank, leaf))[0] != rank:
                    raise PlanError([_conflict(name)])
        return found

    @cached_property
    def holdings(self) -> Holdings:
        """Who holds which boxes of what; raises `PlanError` if descriptions contradict."""
        specs: dict[str, TensorSpec | None] = {}
        holders: dict[str, list[int]] = {}
        for at, part in enumerate(self.parts):
            for name, spec in chain(part.specs.items(), dict.fromkeys(part.values).items()):
                if specs.setdefault(name, spec) != spec:
                    raise PlanError([_conflict(name)])
                holders.setdefault(name, []).append(at)
        own = self._own
        for name, (_, leaf) in own.items():
            if specs.setdefault(name, leaf.spec) != leaf.spec:
                raise PlanError([_conflict(name)])
        catalog = catalog_of(specs.items())
        number: list[int] = []
        layouts: dict[Hashable, tuple[int, Holding | SpecLayout]] = {}
        for name in catalog.names:
            placed, who = specs[name], tuple(holders.get(name, ()))
            also = own[name][0] if who and name in own else None
            key = placed and (placed.shape, placed.placements, placed.mesh), who, also
            if key not in layouts:
                layouts[key] = len(layouts), self._held(placed, who, also)
            number.append(layouts[key][0])
        alone = own.keys() - holders.keys()
        owner = column([own[n][0] if n in alone else -1 for n in catalog.names]) if alone else None
        every = [*(held for _, held in layouts.values()), Holding.value(column([]))]
        return Holdings(catalog, every, column(number), owner)

    def _held(
        self, spec: TensorSpec | None, parts: tuple[int, ...], also: int | None
    ) -> Holding | SpecLayout:
        """Return what ranks with some descriptions hold, and perhaps one more.

        Without any, return what a rank holds alone.
        """
        ranks = np.isin(self.part, parts)
        if also is not None:
            ranks[also] = True
        if spec is None:
            return Holding.value(np.flatnonzero(ranks) if parts else column([-1]))
        size = spec.shape
        if not parts:
            whole = column(size, 1, len(size))
            return Holding(size, column([-1]), whole * 0, whole)
        every = SpecLayout(spec.shape, spec.placements, spec.mesh or Mesh(rank=len(self)))
        if ranks.all():
            return every
        mine = ranks[every.rank]
        return Holding(size, every.rank[mine], every.offsets[mine], every.sizes[mine])

    @cached_property
    def nesting(self) -> Any:
        """The ``planner_data`` of the checkpoint; raises `PlanError` if ranks disagree."""
        if len(self.parts) == 1 and not self._own:
            return self.parts[0].data
        plans = [_names_alone([*p.specs, *p.values], p.data) for p in self.parts]
        own = {name: leaf for name, (_, leaf) in self._own.items()}
        plans.append(_names_alone(own, nesting_of(own)))
        merged = merge_nesting(World(plans))
        if merged.issues or merged.filled:
            raise PlanError(merged.issues or [_conflict(name) for name in sorted(merged.filled)])
        return merged.data


def _names_alone(names: Iterable[str], data: Any) -> SavePlan:
    """Return a plan of nothing but names and their nesting."""
    catalog = catalog_of((name, None) for name in names)
    none = np.zeros((len(catalog), 0), np.int64)
    return SavePlan(WriteItems(catalog, np.arange(len(catalog)), none, none), None, data)


def _conflict(name: str) -> Issue:
    return Issue("conflict", name, f"`{name}` is not the same on all ranks that hold it")


def derive_joined(plans: JoinedPlans) -> tuple[DerivedPlans, Metadata]:
    """Return what ``global_plan(plans)`` does; each rank's plan is made on demand.

    Raises:
        PlanError: Descriptions contradict each other, or some tensors are not fully held.
            `global_plan` finds out more.
    """
    done = DerivedPlans(plans)
    return done, done.describe(plans.nesting)
