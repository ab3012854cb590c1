"""The key of a cached plan: all that a local plan depends on, found without planning it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Final

import attrs

from ..nodes import children_of, is_node, node_data
from ..tensors import kind_of, spec_of
from ..tree import _is_leaf, is_tensor

_TEXT: Final = frozenset((str,))


@attrs.frozen(cache_hash=True)
class _Key:
    """Everything that a local plan depends on, nested like the state dict."""

    entries: tuple[Hashable, ...]


class _UnknownLayoutError(Exception):
    """The layout of a value cannot be determined without planning it."""


def layout_key(sd: Mapping[Any, Any]) -> Hashable | None:
    """Return everything that a local plan depends on, without planning; None if impossible.

    >>> import numpy as np
    >>> a, b = np.zeros(3), np.ones(3)
    >>> layout_key({"w": a, "step": 1}) == layout_key({"w": b, "step": 2})
    True
    """
    try:
        key = _Key(_entries(sd))
        hash(key)
    except Exception:  # planning raises a clear error
        return None
    return key


def _entries(sd: Mapping[Any, Any]) -> tuple[Hashable, ...]:
    names: tuple[Hashable, ...] = tuple(sd)
    if not _TEXT.issuperset(map(type, sd)):  # 1 == True and 0.0 == -0.0, but their names differ
        names = tuple([(type(name), repr(name), name) for name in sd])
    return names, _values(sd.values())


def _values(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return the keys of some values; those of DTensors, the usual case, as columns."""
    values = list(values)
    examples = {type(value): value for value in values}
    dtensors = {kind for kind, value in examples.items() if spec_of(value) is not None}
    placed, others = values, list[Any]()
    if not dtensors.issuperset(examples):
        placed = [value for value in values if type(value) in dtensors]
        others = [value for value in values if type(value) not in dtensors]
    local = [value._local_tensor for value in placed]
    if any(hasattr(shard, "__create_chunk_list__") for shard in local):
        raise _UnknownLayoutError
    return (
        tuple([type(value) in dtensors for value in values]) if others else (),
        tuple([value._spec for value in placed]),  # which caches its own hash
        tuple([shard.shape for shard in local]),
        tuple([value.requires_grad for value in placed]),
        tuple([getattr(shard, "is_meta", False) for shard in local]),
        tuple([_value(value) for value in others]),
    )


def _value(value: Any) -> Hashable:
    """Return the key of a value other than a DTensor; None for a non-tensor value."""
    if isinstance(value, Mapping):
        return _entries(value)
    if is_node(value):  # what is in it counts, and its class and data, which a plan keeps
        children = children_of(value)
        inside = _entries(children) if isinstance(children, dict) else _values(children)
        return repr(node_data(value, "a node")), type(children).__name__, inside
    if isinstance(value, (list, tuple)):
        return None if _is_leaf(value) else (type(value).__name__, _values(value))
    if not is_tensor(value):
        return None
    kind = kind_of(value)
    if kind is None:
        raise _UnknownLayoutError
    return kind, getattr(value, "is_meta", False)


def on_meta(value: Any) -> bool:
    """Return True for a tensor on the meta device, which has a shape but no elements."""
    if not is_tensor(value):
        return False
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return bool(shards) and all(shard.is_meta for shard in shards)
    return bool(getattr(getattr(value, "_local_tensor", value), "is_meta", False))
