"""Nested state dicts: read or replace values inside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardplan.planning import is_tensor

__all__ = ["at", "put", "refilled", "remade", "replaced", "sort_key"]


def at(root: Any, path: Sequence[tuple[str, Any]]) -> Any:
    """Return the value at the end of a path that `flatten` found.

    >>> at({"a": [1, (2, 3)]}, [("dict", "a"), ("list", 1), ("tuple", 0)])
    2
    """
    for _, key in path:
        root = root[key]
    return root


def put(root: Any, path: Sequence[tuple[str, Any]], value: Any) -> None:
    """Set one leaf in place; tuples on the path, which cannot change, are made anew.

    >>> sd = {"a": [1, (2, 3)]}
    >>> put(sd, [("dict", "a"), ("list", 1), ("tuple", 0)], 9)
    >>> sd
    {'a': [1, (9, 3)]}
    """
    nodes = [root]
    for _, key in path[:-1]:
        nodes.append(nodes[-1][key])
    for node, (kind, key) in zip(reversed(nodes), reversed(path), strict=True):
        if kind != "tuple":
            node[key] = value
            return
        entries = [*node[:key], value, *node[key + 1 :]]
        value = node._make(entries) if hasattr(node, "_make") else tuple(entries)


def refilled(old: Any, new: Any) -> Any:
    """Return a value that was read, in the memory of tensors and arrays that were there before.

    >>> old = (np.zeros(2), 1)
    >>> refilled(old, (np.ones(2), 2))[0] is old[0], old[0].tolist()
    (True, [1.0, 1.0])
    """
    if type(old) is not type(new):
        return new
    if type(old) in (list, tuple) and len(old) == len(new):
        return type(old)(map(refilled, old, new))
    if type(old) is dict and old.keys() == new.keys():
        return {key: refilled(old[key], inner) for key, inner in new.items()}
    if not isinstance(old, (np.ndarray, torch.Tensor)):
        return new
    if old.shape != new.shape or old.dtype != new.dtype:
        return new
    if isinstance(old, np.ndarray):
        if old.flags.writeable:
            old[...] = new
        return old if old.flags.writeable else new
    if old.is_meta or type(old) not in (torch.Tensor, torch.nn.Parameter):
        return new
    with torch.no_grad():
        return old.copy_(new)


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with ``change`` applied to everything but tensors.

    What it changes is not searched further; dicts are walked in order of their keys. A value or a
    container in which nothing changes is returned itself, not a copy.

    >>> replaced({"a": [1, (2, "x")]}, lambda value: 9 if value == 2 else value)
    {'a': [1, (9, 'x')]}
    """
    new = change(value)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        return _replaced_in_dict(value, change)
    if isinstance(value, (list, tuple)):
        return remade(value, [replaced(entry, change) for entry in value])
    return value


def _replaced_in_dict(sd: Mapping[Any, Any], change: Callable[[Any], Any]) -> Mapping[Any, Any]:
    changed: dict[Any, Any] = {}
    examples = {type(value): value for value in sd.values()}  # few types, many values
    tensors = {kind for kind, value in examples.items() if is_tensor(value)}
    if tensors.issuperset(examples):
        return sd
    kept = [key for key, value in sd.items() if type(value) not in tensors]
    for key in sorted(kept, key=sort_key):
        inner = replaced(sd[key], change)
        if inner is not sd[key]:
            changed[key] = inner
    return {key: changed.get(key, value) for key, value in sd.items()} if changed else sd


def sort_key(key: Any) -> tuple[str, str]:
    """Return a sort key for dict keys of any type, the same on all ranks."""
    return str(key), type(key).__name__


def remade(value: Any, entries: list[Any]) -> Any:
    """Return a list or tuple like ``value`` with other entries; ``value`` itself if none differ."""
    if all(new is old for new, old in zip(entries, value, strict=True)):
        return value
    if isinstance(value, list):
        return entries
    return value._make(entries) if hasattr(value, "_make") else tuple(entries)
