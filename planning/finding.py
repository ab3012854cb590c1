"""Where in a state dict is what a plan names? A value, or the memory of a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from .errors import NotFoundError, nearest_hint, nearest_names
from .geometry.tilings import Chunk, as_ints
from .items import MetadataIndex
from .tensors import Memo, dtensor_chunks, held_alike, is_dtensor, is_elsewhere
from .tree import flatten, is_tensor

__all__ = ["find_object", "find_shard", "shard_finder"]


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
