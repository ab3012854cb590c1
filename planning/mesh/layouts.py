"""Layouts: the boxes that ranks hold of a tensor, and who holds what of a whole checkpoint.

No mesh axis cuts two axes of a tensor, so a layout is a product: what a rank holds along one axis
depends only on its coordinates on the mesh axes that cut that axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from ..check import layout_issues
from ..columns.arrays import Ints, column, group_rows, readonly, spread
from ..columns.items import Catalog
from ..errors import Issue, PlanError
from ..geometry.overlap import fills
from ..geometry.tilings import Chunk, Grid, Tiling, tile
from ..metadata import Entries, Layout
from .placements import (
    AxisRuns,
    Mesh,
    Only,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    cached_axis_runs,
    holds,
    local_chunks,
)  # fmt: skip


@attrs.frozen(eq=False)
class _Boxes:
    """The boxes of a layout, by rank."""

    rank: Ints
    offsets: Ints
    sizes: Ints


@attrs.frozen(slots=False)
class SpecLayout:
    """A shape placed on a mesh, and the boxes of every rank; worked out on demand.

    >>> layout = SpecLayout((5, 2), (Shard(0), Replicate()), Mesh(dp=3, tp=2))
    >>> layout.rank, layout.offsets[:, 0], layout.sizes[:, 0]
    (array([0, 1, 2, 3, 4, 5]), array([0, 0, 2, 2, 4, 4]), array([2, 2, 2, 2, 1, 1]))
    """

    size: tuple[int, ...]  # the global shape, in elements
    # One placement per mesh axis; empty means that every rank holds all of it.
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


@attrs.frozen(eq=False)
class Holding:
    """The boxes of a layout, or a non-tensor value, and the ranks that hold them."""

    size: tuple[int, ...] | None  # the global shape; None for a value
    rank: Ints  # the rank of each box; ascending
    offsets: Ints
    sizes: Ints

    @classmethod
    def value(cls, ranks: Ints) -> Holding:
        """Return a value that some ranks hold."""
        none = np.zeros((len(ranks), 0), np.int64)
        return cls(None, ranks, none, none)


def boxes_by_chunk(held: Holding | SpecLayout) -> tuple[Ints, Ints]:
    """Return the first box of each chunk, row-major; and the chunk of each box."""
    constant = np.zeros_like(held.rank)  # a tensor without axes has no other column
    return group_rows([constant, held.offsets, held.sizes])


@attrs.frozen(eq=False, slots=False)
class Holdings:
    """Who holds what: boxes by layout, and the layout of each row of a catalog."""

    catalog: Catalog
    layouts: Sequence[Holding | SpecLayout]
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


def _key(layout: Layout) -> tuple[object, ...]:
    """Return a value that equal layouts share; hashing a tiling would list its chunks."""
    tiling = layout.tiling
    parts = tiling.cuts if isinstance(tiling, Grid) else (tiling.offsets, tiling.sizes)
    return layout.size, *(part.tobytes() for part in parts)


def _tiling(held: Holding | SpecLayout) -> Tiling:
    """Return the chunks that all ranks together hold, each replica once."""
    if held.size is not None and 0 in held.size:
        return tile([[0] * len(held.size)], [held.size])
    lines = held.lines() if isinstance(held, SpecLayout) else ()
    if isinstance(held, SpecLayout) and all(isinstance(line, Grid) for line in lines):
        return Grid(tuple(line.cuts[0] for line in lines if isinstance(line, Grid)))
    first, _ = boxes_by_chunk(held)
    return tile(held.offsets[first], held.sizes[first])
