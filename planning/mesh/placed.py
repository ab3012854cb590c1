"""Where does a placed shape lie? On every rank of a mesh at once, in columns.

No mesh axis cuts two axes of a tensor, so a layout is a product: what a rank holds along one axis
depends only on its coordinates on the mesh axes that cut that axis. That is worked out once for
each combination of those coordinates, and spread over the ranks by numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import attrs
import numpy as np

from ..columns.arrays import Ints, readonly
from ..columns.catalog import column
from ..geometry.tilings import Chunk, Tiling, tile
from .placements import Mesh, Only, Placement, Replicate, Shard, StridedShard, holds, local_chunks

__all__ = ["AxisRuns", "SpecLayout", "axis_runs", "spread"]


@attrs.frozen(eq=False)
class AxisRuns:
    """Which indices of one axis each combination of coordinates holds; one row a run.

    Attributes:
        first: Where the runs of each combination begin, and, last, where all runs end.
        start: The index at which each run starts, in the order in which it is stored.
        length: How many indices it has.
    """

    first: Ints
    start: Ints
    length: Ints


def axis_runs(length: int, cuts: Sequence[tuple[int, int]]) -> AxisRuns:
    """Say what `shard_runs` says, for all combinations of coordinates at once.

    Args:
        length: How long the axis is.
        cuts: The cuts of this axis, in the order they are applied: into how many parts, and the
            split factor (1 for a plain shard). Combinations are numbered row-major.

    >>> runs = axis_runs(13, [(3, 2), (2, 1)])  # strided over dp 3, then tp 2
    >>> held = slice(*runs.first[4:6])  # dp 2, tp 0: rows 6 and 11
    >>> runs.start[held].tolist(), runs.length[held].tolist()
    ([6, 11], [1, 1])
    """
    first = np.array([0, int(length > 0)])
    start, extent = np.zeros(first[-1], np.int64), np.full(first[-1], length, np.int64)
    for parts, factor in cuts:
        # All that is held, end to end: run i lies at positions[i] to positions[i + 1].
        positions = np.concatenate([[0], np.cumsum(extent)])
        base = positions[first][:-1, None, None]
        held = np.diff(positions[first])[:, None, None]
        piece, size = _part(held, factor, np.arange(factor))
        at, count = _part(size, parts, np.arange(parts)[:, None])
        low = (base + piece + at).ravel()  # one row a stripe, by combination, part and piece
        high = low + count.ravel()
        owner = np.arange(len(low)) // factor
        owner, low, high = (a[low < high] for a in (owner, low, high))
        begin = np.searchsorted(positions, low, "right") - 1
        stripe, nth = spread(np.searchsorted(positions, high, "left") - begin)
        run = begin[stripe] + nth
        low, high = (
            np.maximum(low[stripe], positions[run]),
            np.minimum(high[stripe], positions[run + 1]),
        )
        owner, start, extent = owner[stripe], start[run] + low - positions[run], high - low
        follows = (owner[1:] == owner[:-1]) & (start[1:] == start[:-1] + extent[:-1])
        heads = np.flatnonzero(np.concatenate([np.ones(min(len(owner), 1), bool), ~follows]))
        extent = np.add.reduceat(extent, heads) if len(heads) else extent
        owner, start = owner[heads], start[heads]
        first = np.searchsorted(owner, np.arange((len(first) - 1) * parts + 1))
    return AxisRuns(readonly(first), readonly(start), readonly(extent))


_cached_runs: Callable[[int, tuple[tuple[int, int], ...]], AxisRuns] = lru_cache(maxsize=128)(
    axis_runs
)


def _part(length: Ints, parts: int, ours: Ints) -> tuple[Ints, Ints]:
    """Give the start and the size of the parts that ``torch.chunk`` makes."""
    size = -(-length // parts)
    start = np.minimum(size * ours, length)
    return start, np.minimum(size, length - start)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each row as often as it counts: the row, and the how-manieth of its repeats it is.

    >>> [a.tolist() for a in spread(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


@attrs.frozen(slots=False)
class SpecLayout:
    """A shape placed on a mesh, and where that puts it on every rank; worked out when asked for.

    Attributes:
        size: The global shape, in elements.
        placements: One placement per mesh axis; none means that every rank holds all of it.
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
        """Whose box each row is; ascending."""
        return self._columns[0]

    @property
    def offsets(self) -> Ints:
        """Where each box starts, in the global frame; a rank's boxes in the order it stores them.

        Empty boxes are left out; an empty tensor is one empty box on each rank that holds it.
        """
        return self._columns[1]

    @property
    def sizes(self) -> Ints:
        """How large each box is."""
        return self._columns[2]

    def held_by(self, rank: int) -> tuple[Chunk, ...]:
        """Return the boxes of one rank, without working out anybody else's."""
        at = self.mesh.coordinate(rank)
        if not self.placements or (0 in self.size and holds(at, self.placements)):
            return (Chunk([0] * len(self.size), self.size),)
        return local_chunks(self.size, self.mesh.shape, at, self.placements)

    @cached_property
    def _columns(self) -> tuple[Ints, Ints, Ints]:
        """Rank, offsets and sizes: count the boxes of each rank, then find the runs of each box."""
        at = np.indices(self.mesh.shape).reshape(len(self.mesh.shape), len(self.mesh))
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
        return readonly(rank), readonly(offsets), readonly(sizes)

    def _axes(self) -> tuple[tuple[list[int], AxisRuns], ...]:
        """Per axis of the tensor: the mesh axes that cut it, and what each combination holds."""
        by: list[list[int]] = [[] for _ in self.size]
        for number, placement in enumerate(self.placements):
            if isinstance(placement, (Shard, StridedShard)):
                by[placement.dim].append(number)
        factors = [getattr(placement, "split_factor", 1) for placement in self.placements]
        cuts = [tuple((self.mesh.shape[n], factors[n]) for n in numbers) for numbers in by]
        return tuple(zip(by, map(_cached_runs, self.size, cuts), strict=True))

    def lines(self) -> tuple[Tiling, ...]:
        """Return, per axis, the runs that all ranks together hold, ascending, as tilings of it."""
        found = []
        for _, runs in self._axes():
            order = np.argsort(runs.start, kind="stable")
            found.append(tile(runs.start[order, None], runs.length[order, None]))
        return tuple(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return SpecLayout, (self.size, self.placements, self.mesh)

    def __str__(self) -> str:
        placed = zip(self.mesh.names, self.placements, strict=False)
        cuts = [f"{name}={_text(p)}" for name, p in placed if not isinstance(p, Replicate)]
        return ", ".join(cuts) or "on every rank"


def _text(placement: object) -> str:
    values = attrs.astuple(placement, recurse=False)  # type: ignore[arg-type]
    return f"{type(placement).__name__}({', '.join(map(str, values))})"
