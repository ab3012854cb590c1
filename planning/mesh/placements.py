"""What would rank 7 hold? Meshes, placements and tensor specs, without hardware.

The rules are DTensor's: placements are applied left to right, one per mesh axis, and `Shard` cuts
as ``torch.chunk`` does. Unlike DTensor's chunk lists, which record one box per rank, a rank here
holds as many boxes as its elements form: a strided, uneven shard can be in several places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import index

import attrs

from ..dtypes import ITEMSIZE, dtype_name
from ..errors import RefusedError
from ..frozen import FrozenDict
from ..geometry.tilings import Chunk, as_ints

__all__ = [
    "Mesh",
    "Only",
    "Placement",
    "Replicate",
    "Run",
    "Shard",
    "StridedShard",
    "TensorSpec",
    "holds",
    "local_chunks",
    "local_runs",
    "nested_runs",
    "shard_runs",
]

Run = tuple[int, int]
"""A stretch of indices along one axis: where it starts, and how many there are."""


@attrs.frozen
class Shard:
    """Cut an axis of the tensor over an axis of the mesh, as ``torch.chunk`` does."""

    dim: int


@attrs.frozen
class StridedShard:
    """Cut an axis that ``split_factor`` later shards of the same axis will be taken from first.

    FSDP over tensor parallelism: TP cuts first, then FSDP cuts each TP shard, while the mesh's axes
    (and so the placements) list FSDP first.
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
    """Hold the tensor only at some coordinates of a mesh axis; its other ranks hold nothing of it.

    This places what DTensor has no placement for, because it gives each part of the world a mesh of
    its own: the keys of a pipeline stage, or those of one expert. A tensor that several stages tie
    lies at several coordinates.

    Attributes:
        coordinates: Where it is held, ascending; one may be given as a number.

    >>> Only(2), Only([3, 0])
    (Only(coordinates=(2,)), Only(coordinates=(0, 3)))
    """

    coordinates: tuple[int, ...] = attrs.field(converter=_coordinates)


Placement = Shard | StridedShard | Replicate | Only


class Mesh:
    """Ranks on named axes, numbered row-major: the last axis runs fastest.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> len(mesh), mesh.coordinate(6)
    (8, (1, 2))
    """

    __slots__ = ("axes",)
    axes: FrozenDict[str, int]

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        sizes = {**(axes or {}), **named}
        sizes = {name: index(n) for name, n in sizes.items()}
        if any(n < 1 for n in sizes.values()):
            raise ValueError(f"every mesh axis needs at least one rank, not {sizes}")
        object.__setattr__(self, "axes", FrozenDict(sizes))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Mesh cannot change; make a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Mesh cannot change; make a new one")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """How many ranks lie along each axis."""
        return tuple(self.axes.values())

    def __len__(self) -> int:
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return where a rank lies on each axis."""
        if not 0 <= rank < len(self):
            raise ValueError(f"rank {rank} is not on {self!r}, which has {len(self)} ranks")
        place: list[int] = []
        for size in reversed(self.shape):
            rank, at = divmod(rank, size)
            place.insert(0, at)
        return tuple(place)

    def rank(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate; the inverse of `coordinate`."""
        rank = 0
        for at, size in zip(coordinate, self.shape, strict=True):
            if not 0 <= at < size:
                raise ValueError(f"{tuple(coordinate)} is not on {self!r}")
            rank = rank * size + at
        return rank

    def __eq__(self, other: object) -> bool:
        # Order matters: it numbers the ranks.
        same = isinstance(other, Mesh) and list(self.axes.items()) == list(other.axes.items())
        return same if isinstance(other, Mesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self.axes.items())})"

    def __reduce__(self) -> tuple[type[Mesh], tuple[dict[str, int]]]:
        return Mesh, (dict(self.axes),)


def _placements(values: Iterable[Placement]) -> tuple[Placement, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"placements are a list, one for each axis of the mesh: [{values!r}]")
    return tuple(values)


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"a shape is a tuple of whole numbers, one for each axis; not {values!r}")
    return as_ints(values)


def as_mesh(mesh: object) -> Mesh:
    """Return a mesh, having refused anything else.

    Raises:
        TypeError: It is not a `Mesh`.
    """
    if not isinstance(mesh, Mesh):
        axes = (
            ", ".join(f"{k}={v}" for k, v in mesh.items()) if isinstance(mesh, Mapping) else "dp=8"
        )
        raise TypeError(f"a mesh is made by Mesh({axes}), and is not {mesh!r}")
    return mesh


@attrs.frozen
class TensorSpec:
    """A tensor that nobody has allocated.

    Attributes:
        shape: Its global shape, in elements.
        dtype: Its dtype, by name.
        placements: One placement per mesh axis; none means that every rank holds all of it.

    >>> TensorSpec((4, 8), "bfloat16", [Shard(0)]).nbytes
    64
    """

    shape: tuple[int, ...] = attrs.field(converter=_shape)
    dtype: str = attrs.field(default="float32", converter=dtype_name)
    placements: tuple[Placement, ...] = attrs.field(default=(), converter=_placements)

    def __attrs_post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise ValueError(f"a tensor cannot have the shape {self.shape}: an axis is negative")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def shard_runs(length: int, cuts: Sequence[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return which indices of one axis a rank holds, as runs, in the order it stores them.

    Args:
        length: How long the axis is.
        cuts: The cuts of this axis, in the order they are applied: into how many parts, which part
            is ours, and the split factor (1 for a plain shard).

    >>> shard_runs(10, [(4, 1, 1)])
    ((3, 3),)
    >>> shard_runs(13, [(3, 2, 2), (2, 0, 1)])  # strided over dp 3, then tp 2: rows 6 and 11
    ((6, 1), (11, 1))
    """
    runs: tuple[Run, ...] = ((0, length),) if length else ()
    for parts, ours, factor in cuts:
        held = sum(n for _, n in runs)
        runs = _join(
            run for start, n in _stripes(held, parts, ours, factor) for run in _cut(runs, start, n)
        )
    return runs


def _stripes(length: int, parts: int, ours: int, factor: int) -> Iterator[Run]:
    """Cut into ``factor`` pieces, each into ``parts``, and give our part of every piece."""
    for piece in range(factor):
        start, size = _part(length, factor, piece)
        at, n = _part(size, parts, ours)
        if n:
            yield start + at, n


def _part(length: int, parts: int, ours: int) -> Run:
    """Give one of the parts that ``torch.chunk`` makes; later ones may be short or empty."""
    size = -(-length // parts)
    start = min(size * ours, length)
    return start, min(size, length - start)


def _cut(runs: Sequence[Run], start: int, length: int) -> Iterator[Run]:
    """Give the runs behind positions ``start`` to ``start + length`` of what the runs hold."""
    passed = 0
    for at, n in runs:
        low, high = max(start - passed, 0), min(start + length - passed, n)
        if low < high:
            yield at + low, high - low
        passed += n


def _join(runs: Iterator[Run]) -> tuple[Run, ...]:
    """Merge runs that follow each other without a hole."""
    joined: list[Run] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + n
        else:
            joined.append((start, n))
    return tuple(joined)


def local_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[Run, ...], ...]:
    """Return, per axis of the tensor, which indices the rank at ``coordinate`` holds.

    >>> local_runs((6, 4), (4,), (3,), [Shard(0)])
    ((), ((0, 4),))
    """
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    if len(placements) != len(mesh_shape):
        raise ValueError(f"{len(placements)} placements do not fit a mesh of shape {mesh_shape}")
    for parts, ours, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, (Replicate, Only)):
            continue
        if not isinstance(placement, (Shard, StridedShard)):
            raise RefusedError(f"{placement!r} is no placement that can be saved")
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"{placement!r} cuts an axis that shape {tuple(shape)} does not have")
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        cuts[placement.dim].append((parts, ours, factor))
    return tuple(_cached_runs(n, tuple(cut)) for n, cut in zip(shape, cuts, strict=True))


def nested_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[Run, ...], ...] | None:
    """Return what `local_runs` does for a tensor that FSDP2 cut after others had: shard by shard.

    FSDP2 cuts each shard that it finds by itself. It then says so with a strided placement that
    comes before the others, which means the same only if everything divides.

    >>> placements = [StridedShard(0, split_factor=2), Shard(0)]
    >>> (
    ...     nested_runs((13,), (3, 2), (2, 0), placements),
    ...     local_runs((13,), (3, 2), (2, 0), placements),
    ... )
    ((((6, 1),),), (((6, 1), (11, 1)),))

    Returns:
        The runs; None if the placements are none that FSDP2 makes.
    """
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    last: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    factors: dict[int, int] = {}
    for parts, ours, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, StridedShard):
            if last[placement.dim] or cuts[placement.dim]:
                return None
            last[placement.dim].append((parts, ours, 1))
            factors[placement.dim] = placement.split_factor
        elif isinstance(placement, Shard):
            cuts[placement.dim].append((parts, ours, 1))
    if any(math.prod(parts for parts, _, _ in cuts[dim]) != f for dim, f in factors.items()):
        return None
    whole = [(n, (*cut, *end)) for n, cut, end in zip(shape, cuts, last, strict=True)]
    return tuple(_cached_runs(n, cut) for n, cut in whole) if factors else None


_cached_runs = lru_cache(maxsize=1 << 12)(shard_runs)


def holds(coordinate: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Tell whether the rank at ``coordinate`` is one that may hold a part at all; see `Only`.

    >>> holds((1, 0), [Only(0), Shard(0)])
    False
    """
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
    runs = local_runs(shape, mesh_shape, coordinate, placements)
    if not holds(coordinate, placements):
        return ()
    return tuple(
        Chunk([at for at, _ in box], [n for _, n in box]) for box in itertools.product(*runs)
    )
