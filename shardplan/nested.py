"""Values put into a nested state dict, at the end of the path that `flatten` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["put"]


def put(root: Any, path: Sequence[tuple[str, Any]], value: Any) -> None:
    """Set one leaf in place; tuples on the way, which cannot change, are made anew.

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
