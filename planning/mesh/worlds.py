"""The plans of all ranks of a mesh that need not exist, and the checkpoint they would save.

Tensors with the same shape and placements share a `SpecLayout`, which is worked out once for all
ranks; a rank's plan is assembled from layouts on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..columns.arrays import Columns, Ints, column, padded, readonly, spread
from ..columns.items import Catalog, Head, WriteItems
from ..errors import Issue, PlanError, RefusedError
from ..geometry.tilings import shape_fault
from ..plans import SavePlan
from ..records import TensorProperties, WriteItemType
from ..text import Printed, Sheet, counted, human_bytes, listing
from ..tree import FrozenDict, flatten, is_tensor, nesting_data, nodes_of
from .layouts import Holding, Holdings, SpecLayout
from .placements import (
    Mesh,
    Only,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    as_mesh,
)

_SHOWN: Final = 12


def catalog_of(leaves: Iterable[tuple[str, TensorSpec | None]]) -> Catalog:
    """Return the catalog of tensors and values, which have no spec, in order of names."""
    properties: dict[tuple[str, bool], TensorProperties] = {}
    heads = []
    for name, spec in sorted(leaves, key=lambda leaf: leaf[0]):
        if spec is None:
            heads.append(Head.value(name))
            continue
        kind = WriteItemType.SHARD if spec.placements else WriteItemType.TENSOR
        how = spec.dtype, spec.requires_grad
        stored = properties.get(how) or TensorProperties(how[0], requires_grad=how[1])
        heads.append(Head(name, name, kind, properties.setdefault(how, stored), spec.shape))
    return Catalog.of(heads)


@attrs.frozen(eq=False, repr=False, slots=False)
class WorldPlans(Printed, Columns[SavePlan]):
    """One plan per rank of a mesh, made on demand. Compares and hashes like a tuple.

    Plans are not kept once made. Hashing makes every plan; ``(plans.mesh, plans.specs)`` is a
    cheaper key.
    """

    mesh: Mesh  # the ranks
    specs: FrozenDict[str, TensorSpec]  # the tensors by name, in order of names
    values: tuple[str, ...] = ()  # the names of all non-tensor values; every rank holds them
    planner_data: Any = None  # the `planner_data` of each plan: the paths of nested keys

    @cached_property
    def layouts(self) -> tuple[SpecLayout, ...]:
        """The distinct shapes and placements."""
        distinct = dict.fromkeys((s.shape, s.placements, s.mesh) for s in self.specs.values())
        return tuple(SpecLayout(size, placed, own or self.mesh) for size, placed, own in distinct)

    @cached_property
    def layout_of(self) -> FrozenDict[str, int]:
        """The layout number of each tensor."""
        number: dict[tuple[Any, ...], int] = {}
        keys = {name: (s.shape, s.placements, s.mesh) for name, s in self.specs.items()}
        return FrozenDict({k: number.setdefault(key, len(number)) for k, key in keys.items()})

    @cached_property
    def catalog(self) -> Catalog:
        """The tensors and values of all plans."""
        return catalog_of([*self.specs.items(), *((name, None) for name in self.values)])

    @cached_property
    def holdings(self) -> Holdings:
        """Who holds which boxes of what."""
        value = Holding.value(np.arange(len(self)))
        return Holdings(self.catalog, [*self.layouts, value], self._numbers)

    @cached_property
    def _numbers(self) -> Ints:
        """The layout number of each row of the catalog; values come after the last layout."""
        return column([self.layout_of.get(k, len(self.layouts)) for k in self.catalog.names])

    def record(self, row: int) -> SavePlan:
        """Make the plan of one rank: its boxes in each layout, repeated for each tensor."""
        held = [layout.held_by(row) for layout in self.layouts]
        counts = column([*map(len, held), 1])  # a non-tensor value counts once
        boxes = [chunk for chunks in held for chunk in chunks]
        offsets = padded([*(box.offsets for box in boxes), ()], 0, self.catalog.axes)
        sizes = padded([*(box.sizes for box in boxes), ()], 1, self.catalog.axes)
        item, nth = spread(counts[self._numbers])
        at = (np.cumsum(counts) - counts)[self._numbers][item] + nth
        items = WriteItems(self.catalog, readonly(item), readonly(offsets[at]), readonly(sizes[at]))
        return SavePlan(items, None, self.planner_data, row, len(self), held=items)

    def data_of(self, rank: int) -> Any:
        """Return the ``planner_data`` of one rank's plan, which all ranks share."""
        return self.planner_data

    def __len__(self) -> int:
        return len(self.mesh)

    def _same(self, other: WorldPlans) -> bool:
        return self._key == other._key or super()._same(other)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.mesh, self.specs, self.values, self.planner_data

    def __reduce__(self) -> tuple[Any, ...]:
        return WorldPlans, self._key

    @property
    def _sheet(self) -> Sheet:
        nbytes, tensors = Counter[int](), Counter(self.layout_of.values())
        for name, number in self.layout_of.items():
            nbytes[number] += self.specs[name].nbytes
        largest = sorted(range(len(self.layouts)), key=lambda n: -nbytes[n])[:_SHOWN]
        rows = [
            (str(list(self.layouts[n].size)), self.layouts[n], tensors[n], human_bytes(nbytes[n]))
            for n in largest
        ]
        title = (
            f"WorldPlans: {counted(len(self), 'rank')} on {self.mesh!r}, "
            f"{counted(len(self.specs), 'tensor')} in {counted(len(self.layouts), 'layout')}, "
            f"{human_bytes(nbytes.total())}"
        )
        head = ("shape", "placements", "tensors", "bytes")
        return listing(title, head, rows, len(self.layouts))


def world_plans(specs: Mapping[Any, Any], mesh: Mesh) -> WorldPlans:
    """Plan for every rank of a mesh, without the mesh.

    ``specs`` is a state dict, nested or flat, whose tensors are `TensorSpec`s; their placements may
    include `Only`. The plan of rank ``r`` is ``local_plan(specs, mesh=mesh, rank=r)``, made on
    demand.

    >>> plans = world_plans({"w": TensorSpec((6, 2), "float32", [Shard(0)]), "step": 7}, Mesh(dp=2))
    >>> plans
    WorldPlans: 2 ranks on Mesh(dp=2), 1 tensor in 1 layout, 48 B
    shape   placements   tensors  bytes
    [6, 2]  dp=Shard(0)        1   48 B
    >>> plans[1]
    SavePlan: 2 items, 24 B
    name  type     dtype    shape   box
    step  BYTE_IO
    w     SHARD    float32  [6, 2]  [3:6, 0:2]

    Raises:
        PlanError: Two keys flatten to the same name, or placements do not fit the mesh or the
            shape; it lists all such keys.
        RefusedError: A tensor is not a `TensorSpec`, or a placement cannot be saved.
    """
    as_mesh(mesh)
    flat, paths = flatten(specs)
    tensors = {name: flat[name] for name in sorted(flat) if is_tensor(flat[name])}
    refused = [text for name, value in tensors.items() for text in _refusals(name, value)]
    if refused:
        raise RefusedError(*refused)
    issues = [
        Issue(kind, name, f"`{name}` {text}")
        for name, spec in tensors.items()
        for kind, text in _misfits(spec, spec.mesh or mesh)
    ]
    if issues:
        raise PlanError(issues)
    values = tuple(name for name in sorted(flat) if name not in tensors)
    return WorldPlans(mesh, FrozenDict(tensors), values, nesting_data(flat, paths, nodes_of(specs)))


def _refusals(name: str, value: object) -> Iterator[str]:
    """Return why a tensor cannot be planned."""
    if not isinstance(value, TensorSpec):
        kind = type(value).__name__
        yield f"`{name}` is a {kind}; describe it as TensorSpec(shape, dtype, placements)"
        return
    placements: tuple[object, ...] = value.placements
    for placement in placements:
        if not isinstance(placement, (Shard, StridedShard, Replicate, Only)):
            yield f"`{name}`: {placement!r} is not a placement that can be saved"


def _misfits(spec: TensorSpec, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Return why a spec does not fit a mesh."""
    shape, placements = spec.shape, spec.placements
    fault = shape_fault(shape)
    if fault is not None:
        yield "too_large", fault
    if placements and len(placements) != len(mesh.shape):
        yield "shape", f"has {len(placements)} placements, which do not fit {mesh!r}"
        return
    for placement, ranks in zip(placements, mesh.shape, strict=False):
        if isinstance(placement, (Shard, StridedShard)):
            if not -len(shape) <= placement.dim < len(shape):
                yield "shape", f"has no axis for {placement!r}: its shape is {shape}"
        elif isinstance(placement, Only):
            at = placement.coordinates
            if not at or not 0 <= at[0] <= at[-1] < ranks:
                yield "shape", f"is at {placement!r} of a mesh axis that has {ranks} ranks"
