"""Meshes, placements and tensor specs: how tensors are laid over ranks.

The rules are DTensor's: placements are applied left to right, one per mesh axis, and `Shard` cuts
as ``torch.chunk`` does. Unlike DTensor's chunk lists, which record one box per rank, a rank here
holds as many boxes as its elements form: a strided, uneven shard can be in several places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index

import attrs

from ..dtypes import ITEMSIZE, dtype_name
from ..frozen import FrozenDict
from ..geometry.tilings import as_ints

__all__ = [
    "Mesh",
    "Only",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorSpec",
]


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


@attrs.frozen(init=False, eq=False, repr=False)
class Mesh:
    """Ranks on named axes, numbered row-major: the last axis runs fastest.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> len(mesh), mesh.coordinate(6)
    (8, (1, 2))
    """

    axes: FrozenDict[str, int]

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        sizes = {name: index(n) for name, n in {**(axes or {}), **named}.items()}
        if any(n < 1 for n in sizes.values()):
            raise ValueError(f"every mesh axis needs at least one rank, not {sizes}")
        self.__attrs_init__(FrozenDict(sizes))

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
        if not isinstance(other, Mesh):
            return NotImplemented
        return list(self.axes.items()) == list(other.axes.items())  # their order numbers the ranks

    def __hash__(self) -> int:
        return hash(tuple(self.axes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{k}={n}' for k, n in self.axes.items())})"


def _placements(values: Iterable[Placement]) -> tuple[Placement, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"placements are a list, one for each axis of the mesh: [{values!r}]")
    return tuple(values)


def _shape(values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"a shape is a tuple of whole numbers, one for each axis; not {values!r}")
    return as_ints(values)


def as_mesh(mesh: object) -> Mesh:
    """Return a mesh; anything else is a TypeError."""
    if isinstance(mesh, Mesh):
        return mesh
    given = mesh if isinstance(mesh, Mapping) else {"dp": 8}
    axes = ", ".join(f"{name}={count}" for name, count in given.items())
    raise TypeError(f"a mesh is made by Mesh({axes}), and is not {mesh!r}")


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
