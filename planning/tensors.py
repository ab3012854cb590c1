"""What does a value of a state dict hold? Read off by duck typing, so that torch is never needed.

A tensor is anything with ``shape`` and ``dtype``. Where its elements lie is told, in this order, by
``device_mesh`` and ``placements`` (DTensor), ``local_shards()`` (ShardedTensor),
``__create_chunk_list__()`` (any tensor-like class), or it is all there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import attrs

from .dtypes import dtype_name
from .errors import NotFoundError, RefusedError, nearest_hint, nearest_names
from .geometry.tilings import Chunk, as_ints, shape_fault
from .mesh.placements import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    holds,
    local_chunks,
    local_runs,
    nested_runs,
)
from .records import MetadataIndex, TensorProperties
from .tree import flatten, is_tensor

__all__ = [
    "Held",
    "Memo",
    "dtensor_chunks",
    "find_object",
    "find_shard",
    "held",
    "held_alike",
    "is_dtensor",
    "is_elsewhere",
    "kind_of",
    "placement_of",
    "shard_finder",
    "spec_of",
]


@attrs.frozen
class Held:
    """What of a tensor this rank holds.

    Attributes:
        properties: How it is made.
        size: The global shape, in elements.
        chunks: The boxes that are here, none of them empty, in the order in which they are stored.
        sharded: Whether other ranks may hold the rest.
    """

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    sharded: bool


def held(name: str, value: Any, mesh: Mesh | None = None, rank: int = 0) -> Held:
    """Describe a tensor; ``mesh`` and ``rank`` place a `TensorSpec` that has placements.

    Raises:
        RefusedError: There is no right way to save it: a partial sum, a sparse or nested layout, a
            dtype that no checkpoint can carry, a shape that is not known yet, a DTensor whose local
            tensor does not fit its placements.
    """
    try:
        known = hasattr(value, "shape") and hasattr(value, "dtype")
    except Exception as error:
        raise RefusedError(_shapeless(name, value, error)) from None
    if not known:
        raise RefusedError(
            f"`{name}` has chunks, but a {type(value).__name__} lacks shape or dtype"
        )
    properties = _properties(name, value)
    size = as_ints(value.shape)
    fault = shape_fault(size)
    if fault is not None:
        raise RefusedError(f"`{name}` {fault}")
    chunks = _chunks(name, value, mesh, rank)
    if chunks is None or (0 in size and not is_elsewhere(value, mesh, rank)):
        whole = Chunk([0] * len(size), size)  # an empty tensor has one empty chunk, on every rank
        return Held(properties, size, (whole,), chunks is not None)
    return Held(properties, size, tuple(c for c in chunks if c.numel), True)


Memo = dict[Hashable, Held]
"""Tensors that were looked at before, by their kind: there are mostly a few."""

_SHARDED: Final = ("device_mesh", "local_shards", "__create_chunk_list__")


def kind_of(value: Any) -> Hashable | None:
    """Return all that counts of a plain tensor or a DTensor; None if it needs a closer look.

    What is held of tensors of one kind is the same.

    >>> import numpy as np
    >>> kind_of(np.zeros(3)) == kind_of(np.ones(3)), kind_of({"no": "tensor"})
    (True, None)
    """
    try:
        spec, part = spec_of(value), value
        if spec is not None:
            part = value._local_tensor
        elif getattr(value, "placements", None) or any(hasattr(value, a) for a in _SHARDED):
            return None
        made = (getattr(value, "layout", None), getattr(value, "requires_grad", False))
        kind = (type(value), value.shape, value.dtype, *made, spec, part.shape)
        hash(kind)
    except Exception:  # `held` says what is wrong
        return None
    return kind


def spec_of(value: Any) -> Any:
    """Return what tells all of a DTensor but what is here of it; None if nothing does."""
    spec = getattr(value, "_spec", None)
    if spec is None or not is_dtensor(value):
        return None
    own = spec.placements is value.placements and spec.mesh is value.device_mesh
    return spec if own else None


def held_alike(name: str, value: Any, memo: Memo) -> Held | None:
    """Describe a tensor as `held` does, looking at one of each kind.

    Returns:
        What is held; None if it is of no kind, or is refused.
    """
    kind = kind_of(value)
    if kind is None:
        return None
    found = memo.get(kind)
    if found is None:
        try:
            found = memo[kind] = held(name, value)
        except RefusedError:
            return None
    return found


_NESTED: Final = "is a nested tensor; save the parts of it, `tensor.unbind()`"


def _shapeless(name: str, value: Any, error: Exception) -> str:
    why = str(error).partition("\n")[0]
    if "NestedTensor" in why:
        return f"`{name}` {_NESTED}"
    return f"`{name}` is a {type(value).__name__} that has no shape: {why}"


def _chunks(name: str, value: Any, mesh: Mesh | None, rank: int) -> Sequence[Chunk] | None:
    """Return the boxes of a sharded tensor that are here; None for a tensor that is all here."""
    if isinstance(value, TensorSpec):
        if not value.placements:
            return None
        if mesh is None:
            raise RefusedError(f"`{name}` is a TensorSpec with placements; pass mesh= and rank=")
        try:
            return local_chunks(value.shape, mesh.shape, mesh.coordinate(rank), value.placements)
        except (ValueError, RefusedError) as error:
            raise RefusedError(f"`{name}`: {error}") from None
    if is_dtensor(value):
        return [chunk for chunk, _ in dtensor_chunks(name, value)]
    if hasattr(value, "local_shards"):
        shards = [shard.metadata for shard in value.local_shards()]
        return [Chunk(s.shard_offsets, s.shard_sizes) for s in shards]
    if hasattr(value, "__create_chunk_list__"):
        return [Chunk(c.offsets, c.sizes) for c in value.__create_chunk_list__()]
    return None


def is_elsewhere(value: Any, mesh: Mesh | None = None, rank: int = 0) -> bool:
    """Tell whether a tensor lives on ranks that this one is not among."""
    if isinstance(value, TensorSpec):
        return mesh is not None and not holds(mesh.coordinate(rank), value.placements)
    device_mesh = getattr(value, "device_mesh", None)
    return device_mesh is not None and device_mesh.get_coordinate() is None


def is_dtensor(value: object) -> bool:
    """Tell a DTensor that places itself from one whose local tensor knows its own chunks."""
    local = getattr(value, "_local_tensor", None)
    own = hasattr(local, "__create_chunk_list__")
    return hasattr(value, "placements") and hasattr(value, "device_mesh") and not own


def _properties(name: str, value: Any) -> TensorProperties:
    layout = str(getattr(value, "layout", "strided")).removeprefix("torch.")
    if layout == "jagged":
        raise RefusedError(f"`{name}` {_NESTED}")
    if layout != "strided":
        raise RefusedError(f"`{name}` has the layout {layout}; save `tensor.to_dense()` instead")
    try:
        dtype = dtype_name(value.dtype)
    except ValueError as error:
        raise RefusedError(f"`{name}`: {error}") from None
    return TensorProperties(dtype, requires_grad=getattr(value, "requires_grad", False))


def placement_of(name: str, placement: Any) -> Placement:
    """Return one of DTensor's placements as ours; a partial sum is refused, by name."""
    if isinstance(placement, (Shard, StridedShard, Replicate)):
        return placement
    if hasattr(placement, "split_factor"):
        return StridedShard(int(placement.dim), int(placement.split_factor))
    if hasattr(placement, "dim"):
        return Shard(int(placement.dim))
    if hasattr(placement, "reduce_op"):
        raise RefusedError(
            f"`{name}` is {placement!r}: a partial sum is not a value yet; "
            "redistribute it to Replicate() or Shard(dim) before saving"
        )
    if type(placement).__name__ == "Replicate":
        return Replicate()
    raise RefusedError(f"`{name}` has a placement that is not known: {placement!r}")


_Pairs = tuple[tuple[Chunk, Chunk], ...]


def dtensor_chunks(name: str, tensor: Any) -> _Pairs:
    """Pair each box that a DTensor holds with its place inside the local tensor."""
    placements = tuple([placement_of(name, p) for p in tensor.placements])
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()  # this rank is not on the tensor's mesh
    if _is_reordered(tensor):
        raise RefusedError(
            f"`{name}` is sharded in another order than that of its mesh "
            f"({tensor._spec.shard_order}); redistribute it before saving"
        )
    local = getattr(tensor, "_local_tensor", None)
    found = None if local is None else as_ints(local.shape)
    try:
        return _placed(
            as_ints(tensor.shape), as_ints(mesh.shape), as_ints(coordinate), placements, found
        )
    except RefusedError as error:
        raise RefusedError(f"`{name}`: {error}") from None


def _is_reordered(tensor: Any) -> bool:
    """Tell a DTensor whose placements do not say in which order its axes were cut."""
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if all(len(entry.mesh_dims) < 2 for entry in order):
        return False
    if any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return False  # these say it themselves
    return any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)


@lru_cache(maxsize=1 << 12)
def _placed(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local: tuple[int, ...] | None,
) -> _Pairs:
    """Pair each box that a rank holds with its place inside a local tensor of some shape, if known.

    A strided placement of an axis that does not divide is taken for FSDP2's, if the local tensor's
    shape allows it: see `nested_runs`. Where ranks so taken do not fit the others, planning a save
    finds overlaps and gaps.
    """
    where = (shape, mesh_shape, coordinate, placements)
    runs = local_runs(*where)
    if any(isinstance(placement, StridedShard) for placement in placements):
        nested = nested_runs(*where)  # what FSDP2 has there, whatever the placements say
        if nested is not None and local is not None and _fits(local, nested):
            runs = nested
    if local is not None and not _fits(local, runs):
        expected = tuple(sum(n for _, n in axis) for axis in runs)
        raise RefusedError(
            f"its local tensor has shape {local}, but {list(placements)} of {shape} on a mesh of "
            f"shape {mesh_shape} gives {expected} here; "
            "pad the axis to a multiple of the ranks that share it"
        )
    places = [list(zip(_starts(axis), axis, strict=True)) for axis in runs]
    return tuple(
        (
            Chunk([r[0] for _, r in box], [r[1] for _, r in box]),
            Chunk([at for at, _ in box], [r[1] for _, r in box]),
        )
        for box in itertools.product(*places)
    )


def _fits(local: tuple[int, ...], runs: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Tell whether a local tensor is as long along each axis as the runs; empty is empty."""
    expected = tuple(sum(n for _, n in axis) for axis in runs)
    return local == expected or (0 in expected and 0 in local)


def _starts(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return where each run lies in the local tensor: runs are stored one after the other."""
    return [sum(n for _, n in runs[:i]) for i in range(len(runs))]


def find_object(sd: Mapping[Any, Any], index: MetadataIndex) -> Any:
    """Return what ``index`` names in a state dict, flat or nested: a value, or a shard.

    >>> import numpy as np
    >>> find_object({"w": np.arange(3), "step": 7}, MetadataIndex("step"))
    7

    Raises:
        NotFoundError: No such name, or no shard at that offset; the nearest ones are told.
    """
    value = _named(sd, index.fqn)
    if is_tensor(value):
        return find_shard(sd, index)
    if index.offset is not None:
        raise NotFoundError(
            f"`{index.fqn}` is no tensor but a {type(value).__name__}: no offset {index.offset}"
        )
    return value


def _named(sd: Mapping[Any, Any], name: str) -> Any:
    """Return the value of a flattened key; a flat state dict is not walked."""
    if name in sd and not isinstance(sd[name], Mapping):
        return sd[name]
    flat = flatten(sd)[0]
    if name not in flat:
        near = nearest_names(name, flat) or tuple(sorted(flat)[:3])
        hint = nearest_hint(near)
        raise NotFoundError(f"`{name}` is not in the state dict{hint}", near)
    return flat[name]


def find_shard(sd: Mapping[Any, Any], index: MetadataIndex) -> Any:
    """Return the tensor memory that starts at ``index.offset`` of the named tensor.

    The position in ``index.index`` is probed first. A plain tensor is its own only shard, at the
    origin, and needs no offset.

    >>> import numpy as np
    >>> find_shard({"w": np.arange(3)}, MetadataIndex("w", (0,)))
    array([0, 1, 2])

    Raises:
        NotFoundError: No such name, or no shard at that offset; the ones that exist are told.
    """
    value = _named(sd, index.fqn)
    if not is_tensor(value):
        raise NotFoundError(f"`{index.fqn}` is no tensor but a {type(value).__name__}")
    if is_dtensor(value):
        pairs = dtensor_chunks(index.fqn, value)
        local = _local(value)
        if 0 in value.shape and not is_elsewhere(value):  # planned as one empty chunk: see `held`
            return _pick(index, [(0,) * len(value.shape)], lambda _: local)
        views = [_view(local, place) for _, place in pairs]
        return _pick(index, [c.offsets for c, _ in pairs], lambda i: views[i])
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        at = _not_empty([s.metadata.shard_sizes for s in shards])
        starts = [as_ints(shards[i].metadata.shard_offsets) for i in at]
        return _pick(index, starts, lambda i: shards[at[i]].tensor)
    if hasattr(value, "__get_tensor_shard__"):
        chunks = list(value.__create_chunk_list__())
        at = _not_empty([c.sizes for c in chunks])
        starts = [as_ints(chunks[i].offsets) for i in at]
        own = [
            attrs.evolve(index, offset=start, index=i) for i, start in zip(at, starts, strict=True)
        ]
        return _pick(index, starts, lambda i: value.__get_tensor_shard__(own[i]))
    origin = (0,) * len(value.shape)
    if index.offset not in (None, origin):
        raise NotFoundError(
            f"`{index.fqn}` is a plain tensor of shape {tuple(value.shape)}: it has no shard at "
            f"{index.offset}, only all of it at {origin}"
        )
    return value


def shard_finder(sd: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], Any]:
    """Return what finds shards by name and offset, as `find_shard` does.

    It is quicker where many tensors are alike, and must not outlive a change to any of them.

    Args:
        sd: The state dict, flattened.

    >>> import numpy as np
    >>> shard_finder({"w": np.arange(3)})("w", (0,))
    array([0, 1, 2])
    """
    memo: Memo = {}

    def find(name: str, offset: tuple[int, ...]) -> Any:
        value = sd.get(name)
        here = held_alike(name, value, memo)
        if here is None or [chunk.offsets for chunk in here.chunks] != [offset]:
            return find_shard(sd, MetadataIndex(name, offset))
        return _local(value) if is_dtensor(value) else value  # all of it is the only chunk

    return find


def _local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor._local_tensor


def _not_empty(sizes: Sequence[Sequence[int]]) -> Sequence[int]:
    """Number the shards that hold something; an empty one may share its offset with a real one."""
    return [i for i, size in enumerate(sizes) if 0 not in size] or range(len(sizes))


def _view(local: Any, place: Chunk) -> Any:
    """Return the part of a local tensor that one box of it occupies."""
    if place.sizes == as_ints(local.shape):
        return local
    return local[tuple(slice(o, e) for o, e in zip(place.offsets, place.ends, strict=True))]


def _pick(
    index: MetadataIndex, starts: Sequence[tuple[int, ...]], get: Callable[[int], Any]
) -> Any:
    """Return the shard that starts at the index's offset, trying its hint first."""
    if index.offset is None and len(starts) == 1:
        return get(0)
    hint = index.index
    if hint is not None and 0 <= hint < len(starts) and starts[hint] == index.offset:
        return get(hint)
    if index.offset in starts:
        return get(starts.index(index.offset))
    known = ", ".join(map(str, starts[:8])) or "nothing"
    asked = "which shard is not said" if index.offset is None else f"no shard at {index.offset}"
    raise NotFoundError(
        f"`{index.fqn}`: {asked}; this rank holds {known}", [str(s) for s in starts[:8]]
    )
