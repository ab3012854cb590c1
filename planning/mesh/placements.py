"""Meshes, placements and tensor specs, and the indices of a tensor that a rank holds.

The rules are DTensor's: placements are applied left to right, one per mesh axis, and `Shard` cuts
as ``torch.chunk`` does. DTensor's chunk lists record one box per rank; here a rank holds as many
boxes as its elements form, since a strided, uneven shard can consist of several. `axis_runs` works
out one axis for all ranks at once, in columns; `shard_runs` looks one rank up in them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from keyword import iskeyword
from operator import index
from typing import Any, NamedTuple

import attrs
import numpy as np

from ..columns.arrays import Ints, readonly, spread
from ..dtypes import ITEMSIZE, dtype_name
from ..errors import RefusedError
from ..frozen import FrozenDict
from ..geometry.tilings import Chunk, as_ints


@attrs.frozen
class Shard:
    """Cut an axis of the tensor over an axis of the mesh, as ``torch.chunk`` does."""

    dim: int


@attrs.frozen
class StridedShard:
    """Cut an axis that later placements, ``split_factor`` parts in all, have already cut.

    For FSDP over tensor parallelism: TP cuts first, then FSDP cuts each TP shard, although the mesh
    axes (and so the placements) list FSDP first.
    """

    dim: int
    split_factor: int = 1

    def __attrs_post_init__(self) -> None:
        if self.split_factor < 1:
            raise ValueError(f"split_factor must be at least 1, not {self.split_factor}")


@attrs.frozen
class Replicate:
    """Hold the whole tensor on every rank of a mesh axis."""


def _coordinates(values: int | Iterable[int]) -> tuple[int, ...]:
    return (values,) if isinstance(values, int) else tuple(sorted(set(as_ints(values))))


@attrs.frozen
class Only:
    """Hold the tensor only at some coordinates of a mesh axis.

    DTensor has none, because it gives each part of the world its own mesh. Use it for the keys of a
    pipeline stage or of one expert; weights tied between stages have several coordinates.

    >>> Only(2), Only([3, 0])
    (Only(coordinates=(2,)), Only(coordinates=(0, 3)))
    """

    # Where it is held, ascending; a single one may be given as a number.
    coordinates: tuple[int, ...] = attrs.field(converter=_coordinates)


Placement = Shard | StridedShard | Replicate | Only


@attrs.frozen(init=False, repr=False)
class Mesh:
    """Ranks on named axes, numbered row-major: the last axis varies fastest.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> len(mesh), mesh.coordinate(6)
    (8, (1, 2))
    """

    # How many ranks each axis has.
    axes: FrozenDict[str, int] = attrs.field(eq=lambda axes: tuple(axes.items()))  # in their order
    strides: tuple[int, ...]  # how far apart, in ranks, the neighbours on each axis are
    # How many ranks there are. A mesh made by `strided` may be part of a larger one; then ranks
    # that have the same coordinate on it hold the same.
    ranks: int

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        sizes = {name: index(n) for name, n in {**(axes or {}), **named}.items()}
        if any(n < 1 for n in sizes.values()):
            raise ValueError(f"every mesh axis needs at least one rank, not {sizes}")
        *strides, ranks = itertools.accumulate([1, *reversed(sizes.values())], operator.mul)
        self.__attrs_init__(FrozenDict(sizes), tuple(strides[::-1]), ranks)

    @classmethod
    def strided(cls, shape: Iterable[int], strides: Iterable[int], ranks: int) -> Mesh:
        """Return a mesh that lies in a larger one: rank ``r`` is at ``r // stride % size``.

        >>> mesh = Mesh.strided((2, 2), (4, 1), 8)  # axes 0 and 2 of a mesh of 2 × 2 × 2 ranks
        >>> mesh.coordinate(5), mesh.coordinate(7)
        ((1, 1), (1, 1))
        """
        mesh = cls.__new__(cls)
        named = FrozenDict({f"axis{number}": size for number, size in enumerate(shape)})
        mesh.__attrs_init__(named, tuple(strides), ranks)
        return mesh

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return tuple(self.axes.values())

    def __len__(self) -> int:
        return self.ranks

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return a rank's coordinate on each axis."""
        if not 0 <= rank < len(self):
            raise ValueError(f"rank {rank} is not on {self!r}, which has {len(self)} ranks")
        return tuple(int(at[0]) for at in self.coordinates(np.array([rank])))

    def coordinates(self, ranks: Ints) -> list[Ints]:
        """Return, per axis, the coordinates of some ranks."""
        return [ranks // n % size for n, size in zip(self.strides, self.shape, strict=True)]

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the first rank at a coordinate; the inverse of `coordinate`."""
        places = list(zip(coordinate, self.shape, self.strides, strict=True))
        if not all(0 <= at < size for at, size, _ in places):
            raise ValueError(f"{tuple(coordinate)} is not on {self!r}")
        return sum(at * stride for at, _, stride in places)

    def __repr__(self) -> str:
        if self.ranks != math.prod(self.shape) or self.strides != Mesh(self.axes).strides:
            return f"Mesh.strided({self.shape}, {self.strides}, {self.ranks})"
        if not all(name.isidentifier() and not iskeyword(name) for name in self.names):
            return f"Mesh({dict(self.axes)})"
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self.axes.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # for Hypothesis, which would print the fields


def _placements(values: Iterable[Placement]) -> tuple[Placement, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"placements are a list, one for each axis of the mesh: [{values!r}]")
    return tuple(values)


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"a shape is a tuple of whole numbers, one for each axis; not {values!r}")
    return as_ints(values)


def as_mesh(mesh: object) -> Mesh:
    """Return a mesh, or raise TypeError for any other type."""
    if isinstance(mesh, Mesh):
        return mesh
    given = mesh if isinstance(mesh, Mapping) else {"dp": 8}
    axes = ", ".join(f"{name}={count}" for name, count in given.items())
    raise TypeError(f"expected a mesh, such as Mesh({axes}), not {mesh!r}")


@attrs.frozen
class TensorSpec:
    """The shape, dtype and placements of a tensor that need not exist.

    >>> TensorSpec((4, 8), "bfloat16", [Shard(0)]).nbytes
    64
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)  # its global shape, in elements
    dtype: str = attrs.field(default="float32", converter=dtype_name)  # its dtype, by name
    # One placement per mesh axis; empty means that every rank holds all of it.
    placements: tuple[Placement, ...] = attrs.field(default=(), converter=_placements)
    # The mesh of the placements, if that is not the one of all tensors.
    mesh: Mesh | None = attrs.field(default=None, repr=False)
    requires_grad: bool = attrs.field(default=False, repr=False)  # kept for exchange with torch

    def __attrs_post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise ValueError(f"a tensor cannot have the shape {self.shape}: an axis is negative")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


Run = tuple[int, int]
"""A run of indices along one axis: its start and its length."""


class AxisCut(NamedTuple):
    """How one mesh axis cuts one axis of a tensor, and the part that this rank holds."""

    parts: int
    ours: int
    factor: int = 1  # the split factor of a strided shard


@lru_cache(maxsize=1 << 12)
def shard_runs(length: int, cuts: tuple[AxisCut, ...]) -> tuple[Run, ...]:
    """Return the indices of one axis that a rank holds, as runs, in storage order.

    >>> shard_runs(10, (AxisCut(4, 1),))
    ((3, 3),)
    >>> strided = (AxisCut(3, 2, 2), AxisCut(2, 0))  # over dp 3, then tp 2: rows 6 and 11
    >>> shard_runs(13, strided)
    ((6, 1), (11, 1))
    """
    if not cuts:
        return ((0, length),) if length else ()
    runs = cached_axis_runs(length, tuple((cut.parts, cut.factor) for cut in cuts))
    ours = 0
    for cut in cuts:
        ours = ours * cut.parts + cut.ours
    rows = slice(*runs.first[ours : ours + 2].tolist())
    return tuple(zip(runs.start[rows].tolist(), runs.length[rows].tolist(), strict=True))


def local_cuts(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[AxisCut, ...], ...]:
    """Return the cuts of each axis of a tensor, in order, for the rank at ``coordinate``."""
    cuts: list[list[AxisCut]] = [[] for _ in shape]
    if len(placements) != len(mesh_shape):
        raise ValueError(f"{len(placements)} placements do not fit a mesh of shape {mesh_shape}")
    for parts, ours, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, (Replicate, Only)):
            continue
        if not isinstance(placement, (Shard, StridedShard)):
            raise RefusedError(f"{placement!r} is not a placement that can be saved")
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"{placement!r} cuts an axis that shape {tuple(shape)} does not have")
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        cuts[placement.dim].append(AxisCut(parts, ours, factor))
    return tuple(map(tuple, cuts))


def nested_cuts(axes: Iterable[tuple[AxisCut, ...]]) -> tuple[tuple[AxisCut, ...], ...] | None:
    """Return the cuts of a tensor that FSDP2 cut after other placements; None if it cannot have.

    FSDP2 cuts each existing shard by itself, and records that as a strided placement before the
    others. The two agree only if everything divides evenly.

    >>> cuts = local_cuts((13,), (3, 2), (2, 0), [StridedShard(0, split_factor=2), Shard(0)])
    >>> shard_runs(13, cuts[0]), shard_runs(13, nested_cuts(cuts)[0])
    (((6, 1), (11, 1)), ((6, 1),))
    """
    nested = []
    for cuts in axes:
        if any(cut.factor > 1 for cut in cuts):
            fsdp, *others = cuts
            if any(cut.factor > 1 for cut in others):
                return None
            if math.prod(cut.parts for cut in others) != fsdp.factor:
                return None
            cuts = (*others, fsdp._replace(factor=1))
        nested.append(cuts)
    return tuple(nested)


def holds(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Return True if `Only` placements let the rank at ``coordinate`` hold a part."""
    return all(
        at in placement.coordinates
        for at, placement in zip(coordinate, placements, strict=False)
        if isinstance(placement, Only)
    )


def local_chunks(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Chunk, ...]:
    """Return the boxes of a tensor that the rank at ``coordinate`` holds, none of them empty.

    >>> local_chunks((13,), (3, 2), (2, 0), [StridedShard(0, split_factor=2), Shard(0)])
    (Chunk(offsets=(6,), sizes=(1,)), Chunk(offsets=(11,), sizes=(1,)))
    """
    cuts = local_cuts(shape, mesh_shape, coordinate, placements)
    if not holds(coordinate, placements):
        return ()
    runs = map(shard_runs, shape, cuts)
    return tuple(
        Chunk([at for at, _ in box], [n for _, n in box]) for box in itertools.product(*runs)
    )


@attrs.frozen(eq=False)
class AxisRuns:
    """The indices of one axis that each combination of coordinates holds; one row per run."""

    first: Ints  # the first run of each combination; the last entry is the number of runs
    start: Ints  # the first index of each run, in storage order
    length: Ints  # how many indices are in it


def axis_runs(length: int, cuts: Sequence[tuple[int, int]]) -> AxisRuns:
    """Return the indices that each combination of coordinates, row-major, holds along one axis.

    ``cuts`` are those of this axis, in the order they are applied: the number of parts, and the
    split factor (1 for a plain shard).

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
        low = (base + piece + at).ravel()  # one row per stripe, by combination, part and piece
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


cached_axis_runs: Callable[[int, tuple[tuple[int, int], ...]], AxisRuns] = lru_cache(maxsize=128)(
    axis_runs
)


def _part(length: Ints, parts: int, ours: Ints) -> tuple[Ints, Ints]:
    """Return the start and the size of the parts that ``torch.chunk`` makes."""
    size = -(-length // parts)
    start = np.minimum(size * ours, length)
    return start, np.minimum(size, length - start)
