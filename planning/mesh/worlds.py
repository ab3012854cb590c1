"""The plans of all ranks of a mesh that need not exist, and the checkpoint they would save.

Tensors with the same shape and placements share a `SpecLayout`, which is worked out once for all
ranks; a rank's plan is assembled from layouts on demand. No mesh axis cuts two axes of a tensor, so
a layout is a product: what a rank holds along one axis depends only on its coordinates on the mesh
axes that cut that axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..check import layout_issues
from ..columns.arrays import Columns, Index, Ints, column, group_rows, padded, readonly
from ..columns.items import Catalog, Head, WriteItems
from ..errors import Issue, PlanError, RefusedError
from ..geometry.overlap import fills
from ..geometry.tilings import Chunk, Grid, Tiling, shape_fault, tile
from ..metadata import Entries, Layout
from ..plans import SavePlan
from ..records import TensorProperties, WriteItemType
from ..text import Printed, Sheet, counted, human_bytes, listing
from ..tree import FrozenDict, flatten, is_tensor, nesting_data, nodes_of
from .placements import (
    AxisRuns,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    as_mesh,
    cached_axis_runs,
    holds,
    local_chunks,
    spread,
)

__all__ = [
    "Held", "Holdings", "SpecLayout", "WorldPlans", "catalog_of", "chunks_of", "world_plans",
]  # fmt: skip

_SHOWN: Final = 12


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of a layout, by rank."""

    rank: Ints
    offsets: Ints
    sizes: Ints


@attrs.frozen(slots=False)
class SpecLayout:
    """A shape placed on a mesh, and the boxes of every rank; worked out on demand.

    Attributes:
        size: The global shape, in elements.
        placements: One placement per mesh axis; empty means that every rank holds all of it.
        mesh: The mesh.

    >>> layout = SpecLayout((5, 2), (Shard(0), Replicate()), Mesh(dp=3, tp=2))
    >>> layout.rank, layout.offsets[:, 0], layout.sizes[:, 0]
    (array([0, 1, 2, 3, 4, 5]), array([0, 0, 2, 2, 4, 4]), array([2, 2, 2, 2, 1, 1]))
    """

    size: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: Mesh

    @property
    def rank(self) -> Ints:
        """The rank of each box; ascending."""
        return self._boxes.rank

    @property
    def offsets(self) -> Ints:
        """The start of each box, in the global frame; a rank's boxes are in storage order.

        Empty boxes are left out; an empty tensor is one empty box on each rank that holds it.
        """
        return self._boxes.offsets

    @property
    def sizes(self) -> Ints:
        """The size of each box, in elements."""
        return self._boxes.sizes

    def held_by(self, rank: int) -> tuple[Chunk, ...]:
        """Return the boxes of one rank, without working out the others."""
        at = self.mesh.coordinate(rank)
        if not self.placements or (0 in self.size and holds(at, self.placements)):
            return (Chunk([0] * len(self.size), self.size),)
        return local_chunks(self.size, self.mesh.shape, at, self.placements)

    @cached_property
    def _boxes(self) -> _Boxes:
        at = self.mesh.coordinates(np.arange(len(self.mesh)))
        count = np.ones(len(self.mesh), np.int64)
        for place, placement in zip(at, self.placements, strict=False):
            if isinstance(placement, Only):
                count[~np.isin(place, placement.coordinates)] = 0
        axes = () if 0 in self.size else self._axes()
        begin, each = [], []  # per axis: each rank's first run, and how many it has
        for by, runs in axes:
            combination = np.zeros(len(self.mesh), np.int64)
            for number in by:
                combination = combination * self.mesh.shape[number] + at[number]
            begin.append(runs.first[combination])
            each.append(runs.first[combination + 1] - begin[-1])
            count = count * each[-1]
        rank, nth = spread(count)
        offsets = np.zeros((len(rank), len(self.size)), np.int64)
        sizes = offsets + column(self.size)
        for axis, (_, runs) in reversed(list(enumerate(axes))):  # the last axis runs fastest
            nth, run = np.divmod(nth, each[axis][rank])
            run += begin[axis][rank]
            offsets[:, axis], sizes[:, axis] = runs.start[run], runs.length[run]
        return _Boxes(readonly(rank), readonly(offsets), readonly(sizes))

    def _axes(self) -> tuple[tuple[list[int], AxisRuns], ...]:
        """Per axis of the tensor: the mesh axes that cut it, and the runs of each combination."""
        by: list[list[int]] = [[] for _ in self.size]
        for number, placement in enumerate(self.placements):
            if isinstance(placement, (Shard, StridedShard)):
                by[placement.dim].append(number)
        factors = [getattr(placement, "split_factor", 1) for placement in self.placements]
        cuts = [tuple((self.mesh.shape[n], factors[n]) for n in numbers) for numbers in by]
        return tuple(zip(by, map(cached_axis_runs, self.size, cuts), strict=True))

    def lines(self) -> tuple[Tiling, ...]:
        """Return, per axis, the runs that all ranks together hold, ascending, as tilings."""
        tilings = []
        for _, runs in self._axes():
            order = np.argsort(runs.start, kind="stable")
            tilings.append(tile(runs.start[order, None], runs.length[order, None]))
        return tuple(tilings)

    def __reduce__(self) -> tuple[Any, ...]:
        return SpecLayout, (self.size, self.placements, self.mesh)

    def __str__(self) -> str:
        placed = zip(self.mesh.names, self.placements, strict=False)
        cuts = [f"{name}={_text(p)}" for name, p in placed if not isinstance(p, Replicate)]
        return ", ".join(cuts) or "on every rank"


def _text(placement: object) -> str:
    values = attrs.astuple(placement, recurse=False)  # type: ignore[arg-type]
    return f"{type(placement).__name__}({', '.join(map(str, values))})"


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


@attrs.frozen(eq=False)
class Held:
    """The boxes of a layout, or a non-tensor value, and the ranks that hold them."""

    size: tuple[int, ...] | None  # the global shape; None for a value
    rank: Ints  # the rank of each box; ascending
    offsets: Ints
    sizes: Ints

    @classmethod
    def value(cls, ranks: Ints) -> Held:
        """Return a value that some ranks hold."""
        none = np.zeros((len(ranks), 0), np.int64)
        return cls(None, ranks, none, none)


def chunks_of(held: Held | SpecLayout) -> tuple[Ints, Ints]:
    """Return the first box of each chunk, row-major; and the chunk of each box."""
    constant = np.zeros_like(held.rank)  # a tensor without axes has no other column
    return group_rows([constant, held.offsets, held.sizes])


@attrs.frozen(eq=False, slots=False)
class Holdings:
    """Who holds what: boxes by layout, and the layout of each row of a catalog."""

    catalog: Catalog
    layouts: Sequence[Held | SpecLayout]
    number: Ints  # the layout of each row
    # The only rank that holds all of a row, as of state of its own; -1 for all other rows. The
    # layout of such rows counts for metadata alone.
    owner: Ints | None = None

    def entries(self) -> Entries:
        """Describe the checkpoint that holds all of it; raise if some of it is not held."""
        described = [None if h.size is None else Layout(h.size, _tiling(h)) for h in self.layouts]
        layouts = [layout for layout in described if layout is not None]
        faulty = {n for n, layout in enumerate(described) if layout and not _is_whole(layout)}
        issues: list[Issue] = []
        for name, number in zip(self.catalog.names, self.number.tolist(), strict=True):
            layout = described[number]
            if number in faulty and layout is not None:
                issues += layout_issues(name, layout)
        if issues:
            raise PlanError(issues)
        distinct = {_key(layout): layout for layout in layouts}
        number_of = {key: number for number, key in enumerate(distinct)}
        which = column([-1 if d is None else number_of[_key(d)] for d in described])
        catalog = self.catalog
        where = which[self.number]
        return Entries(catalog.names, catalog.props, catalog.prop, tuple(distinct.values()), where)


def _is_whole(layout: Layout) -> bool:
    return fills(layout.tiling, layout.size)


@attrs.frozen(eq=False, repr=False, slots=False)
class WorldPlans(Printed, Columns[SavePlan]):
    """One plan per rank of a mesh, made on demand. Compares and hashes like a tuple.

    Plans are not kept once made. Hashing makes every plan; ``(plans.mesh, plans.specs)`` is a
    cheaper key.

    Attributes:
        mesh: The ranks.
        specs: The tensors by name, in order of names.
        values: The names of all non-tensor values; every rank holds them.
        planner_data: The ``planner_data`` of each plan: the paths of nested keys.
    """

    mesh: Mesh
    specs: FrozenDict[str, TensorSpec]
    values: tuple[str, ...] = ()
    planner_data: Any = None

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
        value = Held.value(np.arange(len(self)))
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

    def take(self, rows: Index | slice) -> tuple[SavePlan, ...]:
        """Return the plans of some ranks."""
        return tuple(map(self.record, np.arange(len(self))[rows].tolist()))

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


def _key(layout: Layout) -> tuple[object, ...]:
    """Return a value that equal layouts share; hashing a tiling would list its chunks."""
    tiling = layout.tiling
    parts = tiling.cuts if isinstance(tiling, Grid) else (tiling.offsets, tiling.sizes)
    return layout.size, *(part.tobytes() for part in parts)


def _tiling(held: Held | SpecLayout) -> Tiling:
    """Return the chunks that all ranks together hold, each replica once."""
    if held.size is not None and 0 in held.size:
        return tile([[0] * len(held.size)], [held.size])
    lines = held.lines() if isinstance(held, SpecLayout) else ()
    if isinstance(held, SpecLayout) and all(isinstance(line, Grid) for line in lines):
        return Grid(tuple(line.cuts[0] for line in lines if isinstance(line, Grid)))
    first, _ = chunks_of(held)
    return tile(held.offsets[first], held.sizes[first])
