"""Tensors of a state dict: the parts that this rank holds, and the memory of their shards.

Tensors are read by duck typing, so that torch is not needed. A tensor is anything with ``shape``
and ``dtype``. Its layout comes, in this order, from ``device_mesh`` and ``placements`` (DTensor),
``local_shards()`` (ShardedTensor) or ``__create_chunk_list__()`` (any class); otherwise this rank
holds all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import attrs

from .dtypes import dtype_name
from .errors import NotFoundError, RefusedError, nearest_hint, nearest_names
from .geometry.tilings import Chunk, as_ints, shape_fault
from .mesh.placements import (
    AxisCut,
    Mesh,
    Placement,
    Replicate,
    Run,
    Shard,
    StridedShard,
    TensorSpec,
    holds,
    local_chunks,
    local_cuts,
    nested_cuts,
    shard_runs,
)
from .records import MetadataIndex, TensorProperties
from .tree import flatten, is_plain_type, is_tensor


@attrs.frozen
class LocalBoxes:
    """The parts of a tensor that this rank holds."""

    properties: TensorProperties
    size: tuple[int, ...]  # the global shape, in elements
    chunks: tuple[Chunk, ...]  # the boxes held here, none of them empty, in storage order
    sharded: bool  # whether other ranks may hold the rest


def held(name: str, value: Any, mesh: Mesh | None = None, rank: int = 0) -> LocalBoxes:
    """Describe a tensor; ``mesh`` and ``rank`` place a `TensorSpec` that has placements."""
    try:
        known = hasattr(value, "shape") and hasattr(value, "dtype")
    except Exception as error:
        why = str(error).partition("\n")[0]
        what = f"is a {type(value).__name__} that has no shape: {why}"
        raise RefusedError(f"`{name}` {_NESTED if 'NestedTensor' in why else what}") from None
    if not known:
        kind = type(value).__name__
        raise RefusedError(f"`{name}` has chunks, but a {kind} lacks shape or dtype")
    properties = _properties(name, value)
    size = as_ints(value.shape)
    fault = shape_fault(size)
    if fault is not None:
        raise RefusedError(f"`{name}` {fault}")
    chunks = _chunks(name, value, mesh, rank)
    if chunks is None or (0 in size and not is_elsewhere(value, mesh, rank)):
        whole = Chunk([0] * len(size), size)  # an empty tensor has one empty chunk, on every rank
        return LocalBoxes(properties, size, (whole,), chunks is not None)
    return LocalBoxes(properties, size, tuple(c for c in chunks if c.numel), True)


Memo = dict[Hashable, LocalBoxes]
"""Descriptions of tensors by kind; a model has few kinds."""

_SHARDED: Final = ("device_mesh", "local_shards", "__create_chunk_list__")


def kind_of(value: Any) -> Hashable | None:
    """Return a key that determines a tensor's chunks; None if it must be examined itself."""
    try:
        if is_plain_type(type(value)):
            grad, layout = getattr(value, "requires_grad", False), getattr(value, "layout", None)
            return type(value), value.shape, value.dtype, layout, grad
        spec, part = spec_of(value), value
        if spec is not None:
            part = value._local_tensor
        elif getattr(value, "placements", None) or any(hasattr(value, a) for a in _SHARDED):
            return None
        made = (getattr(value, "layout", None), getattr(value, "requires_grad", False))
        kind = (type(value), value.shape, value.dtype, *made, spec, part.shape)
        hash(kind)
    except Exception:  # `held` raises a clear error
        return None
    return kind


def spec_of(value: Any) -> Any:
    """Return a DTensor's spec, which describes all but its local tensor; None if it has none."""
    spec = getattr(value, "_spec", None)
    if spec is None or not is_dtensor(value):
        return None
    own = spec.placements is value.placements and spec.mesh is value.device_mesh
    return spec if own else None


def held_alike(name: str, value: Any, memo: Memo) -> LocalBoxes | None:
    """Describe a tensor as `held` does, once per kind; None if it has no kind."""
    kind = kind_of(value)
    if kind is None:
        return None
    here = memo.get(kind)
    if here is None:
        try:
            here = memo[kind] = held(name, value)
        except RefusedError:
            return None
    return here


_NESTED: Final = "is a nested tensor; save the parts of it, `tensor.unbind()`"


def _chunks(name: str, value: Any, mesh: Mesh | None, rank: int) -> Sequence[Chunk] | None:
    """Return the local boxes of a sharded tensor; None for a plain tensor."""
    if isinstance(value, TensorSpec):
        if not value.placements:
            return None
        mesh = value.mesh or mesh
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
    """Return True if only other ranks hold a tensor."""
    if isinstance(value, TensorSpec):
        mesh = value.mesh or mesh
        return mesh is not None and not holds(mesh.coordinate(rank), value.placements)
    device_mesh = getattr(value, "device_mesh", None)
    return device_mesh is not None and device_mesh.get_coordinate() is None


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor, unless its local tensor defines its own chunks."""
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
    """Convert one of DTensor's placements; a partial sum is refused, by name."""
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
    raise RefusedError(f"`{name}` has an unknown placement: {placement!r}")


_Pairs = tuple[tuple[Chunk, Chunk], ...]


def dtensor_chunks(name: str, tensor: Any) -> _Pairs:
    """Pair each box that a DTensor holds with its position in the local tensor."""
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
    local_shape = None if local is None else as_ints(local.shape)
    where = as_ints(tensor.shape), as_ints(mesh.shape), as_ints(coordinate)
    try:
        return _placed(*where, placements, local_shape)
    except RefusedError as error:
        raise RefusedError(f"`{name}`: {error}") from None


def _is_reordered(tensor: Any) -> bool:
    """Return True if a DTensor's axes were cut in another order than its placements'."""
    order = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    if all(len(entry.mesh_dims) < 2 for entry in order):
        return False
    if any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return False  # their order is explicit
    return any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)


@lru_cache(maxsize=1 << 12)
def _placed(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    local: tuple[int, ...] | None,
) -> _Pairs:
    """Pair each box that a rank holds with its position in a local tensor of some shape, if known.

    A strided placement of an axis that does not divide evenly is treated as FSDP2's if the local
    tensor's shape allows it; see `nested_cuts`. If that guess is wrong, planning the save finds
    overlaps and gaps.
    """
    cuts = local_cuts(shape, mesh_shape, coordinate, placements)
    nested = is_nested(shape, cuts, local)
    runs = tuple(map(shard_runs, shape, (nested_cuts(cuts) or cuts) if nested else cuts))
    if local is not None and not _fits(local, runs):
        expected = tuple(sum(n for _, n in axis) for axis in runs)
        raise RefusedError(
            f"its local tensor has shape {local}, but {list(placements)} of {shape} on a mesh of "
            f"shape {mesh_shape} gives {expected} here; "
            "pad the axis to a multiple of the ranks that share it"
        )
    # Runs are stored one after the other: each starts where the ones before it end.
    local_starts = [[0, *itertools.accumulate(n for _, n in axis)] for axis in runs]
    boxes = (zip(*box, strict=True) if box else ((), ()) for box in itertools.product(*runs))
    places = itertools.product(*(s[:-1] for s in local_starts))
    return tuple(
        (Chunk(offsets, sizes), Chunk(place, sizes))
        for (offsets, sizes), place in zip(boxes, places, strict=True)
    )


def is_nested(
    shape: tuple[int, ...], cuts: tuple[tuple[AxisCut, ...], ...], local: tuple[int, ...] | None
) -> bool:
    """Return True if a local tensor is as large as FSDP2 would have made it; see `nested_cuts`."""
    nested = nested_cuts(cuts)
    if nested is None or local is None:
        return False
    return _fits(local, tuple(map(shard_runs, shape, nested)))


def _fits(local: tuple[int, ...], runs: Sequence[Sequence[Run]]) -> bool:
    """Return True if a local tensor is as long along each axis as the runs, or both are empty."""
    expected = tuple(sum(n for _, n in axis) for axis in runs)
    return local == expected or (0 in expected and 0 in local)


def find_object(sd: Mapping[Any, Any], index: MetadataIndex) -> Any:
    """Return the value or the shard that ``index`` names in a state dict, flat or nested.

    >>> import numpy as np
    >>> find_object({"w": np.arange(3), "step": 7}, MetadataIndex("step"))
    7

    Raises:
        NotFoundError: The name or the offset does not exist; the message suggests similar ones.
    """
    value = _named(sd, index.fqn)
    if is_tensor(value):
        return find_shard(sd, index)
    if index.offset is not None:
        raise NotFoundError(
            f"`{index.fqn}` is a {type(value).__name__}, not a tensor: no offset {index.offset}"
        )
    return value


def _named(sd: Mapping[Any, Any], name: str) -> Any:
    """Return the value of a flattened key, without walking a flat state dict."""
    if name in sd and not isinstance(sd[name], Mapping):
        return sd[name]
    flat = flatten(sd)[0]
    if name not in flat:
        near = nearest_names(name, flat) or tuple(sorted(flat)[:3])
        raise NotFoundError(f"`{name}` is not in the state dict{nearest_hint(near)}", near)
    return flat[name]


def find_shard(sd: Mapping[Any, Any], index: MetadataIndex) -> Any:
    """Return the tensor memory that starts at ``index.offset`` of the named tensor.

    The position in ``index.index`` is tried first. If there is only one shard, as for a plain
    tensor, the offset may be omitted.

    >>> import numpy as np
    >>> find_shard({"w": np.arange(3)}, MetadataIndex("w", (0,)))
    array([0, 1, 2])

    Raises:
        NotFoundError: The name or the offset does not exist; the message lists the existing ones.
    """
    value = _named(sd, index.fqn)
    if not is_tensor(value):
        raise NotFoundError(f"`{index.fqn}` is a {type(value).__name__}, not a tensor")
    shards = _shards(index, value)
    starts = [shard.offsets for shard in shards]
    offset = starts[0] if index.offset is None and len(starts) == 1 else index.offset
    hint = index.index
    if hint is not None and 0 <= hint < len(starts) and starts[hint] == offset:
        return shards[hint].memory()
    if offset in starts:
        return shards[starts.index(offset)].memory()
    known = ", ".join(map(str, starts[:8])) or "nothing"
    asked = "the offset is missing" if offset is None else f"no shard at {offset}"
    text = f"`{index.fqn}`: {asked}; this rank holds {known}"
    raise NotFoundError(text, [str(s) for s in starts[:8]])


@attrs.frozen
class _Shard:
    """A shard of a tensor: its start, its size, and a function that returns its memory."""

    offsets: tuple[int, ...] = attrs.field(converter=as_ints)
    sizes: tuple[int, ...] = attrs.field(converter=as_ints)
    memory: Callable[[], Any]


def _shards(index: MetadataIndex, value: Any) -> list[_Shard]:
    """List the local shards of a tensor."""
    whole = [0] * len(value.shape), value.shape
    if is_dtensor(value):
        pairs = dtensor_chunks(index.fqn, value)
        local = _local(value)
        if 0 in value.shape and not is_elsewhere(value):  # planned as one empty chunk: see `held`
            return [_Shard(*whole, lambda: local)]
        return [_Shard(c.offsets, c.sizes, partial(_view, local, place)) for c, place in pairs]
    if hasattr(value, "local_shards"):
        shards = [
            _Shard(s.metadata.shard_offsets, s.metadata.shard_sizes, partial(getattr, s, "tensor"))
            for s in value.local_shards()
        ]
    elif hasattr(value, "__get_tensor_shard__"):
        get = value.__get_tensor_shard__
        shards = [
            _Shard(c.offsets, c.sizes, partial(get, MetadataIndex(index.fqn, c.offsets, i)))
            for i, c in enumerate(value.__create_chunk_list__())
        ]
    else:
        return [_Shard(*whole, lambda: value)]
    # An empty shard may start where a real one does.
    return [shard for shard in shards if 0 not in shard.sizes] or shards


def shard_finder(sd: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], Any]:
    """Return a function that finds shards of a flat state dict by name and offset.

    It is faster than `find_shard` if many tensors have the same layout, and is invalid once any of
    them changes.
    """
    memo: Memo = {}

    def find(name: str, offset: tuple[int, ...]) -> Any:
        value = sd.get(name)
        if is_plain_type(type(value)) and not any(offset):
            return value
        here = held_alike(name, value, memo)
        if here is None or [chunk.offsets for chunk in here.chunks] != [offset]:
            return find_shard(sd, MetadataIndex(name, offset))
        return _local(value) if is_dtensor(value) else value  # all of it is the only chunk

    return find


def _local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor._local_tensor


def _view(local: Any, place: Chunk) -> Any:
    """Return the part of a local tensor that one box occupies."""
    if place.sizes == as_ints(local.shape):
        return local
    return local[tuple(slice(o, e) for o, e in zip(place.offsets, place.ends, strict=True))]
