"""The planner data in a manifest: how names nest, and what planners noted.

A name whose path is its own parts, split at the first dots, is written as the number of these dots;
other paths as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shardplan.planning import FrozenDict, from_json, to_json, unflatten
from shardplan.planning.columns import Ints, column

_KINDS: Final = ("dict", "list", "tuple")
_EMPTY_SEATS: Final = 1 << 20  # entries that lists may have in all, beyond those that are saved
_PATHS: Final = "paths"


def encode_nesting(planner_data: Any, names: Sequence[str]) -> tuple[Any, Ints]:
    """Return planner data for JSON without paths that follow from names, and how these do.

    >>> a, b = (("dict", "a"), ("dict", "b.c")), (("dict", "d"), ("list", 0))
    >>> encode_nesting({"paths": {"a.b.c": a, "d.0": b}}, ["a.b.c", "d.0", "e"])
    ({'paths': {'d.0': [['dict', 'd'], ['list', 0]]}}, array([1, 0, 0]))
    """
    paths = planner_data.get(_PATHS) if isinstance(planner_data, Mapping) else None
    if not isinstance(paths, Mapping):
        return to_json(planner_data, "planner_data"), column([])
    dots = [_dots(name, paths.get(name, ())) for name in names]
    ruled = {name for name, count in zip(names, dots, strict=True) if count}
    rest = {name: path for name, path in paths.items() if name not in ruled}
    return to_json({**planner_data, _PATHS: rest}, "planner_data"), column(dots)


def _dots(name: str, path: Sequence[Any]) -> int:
    """Return at how many dots a name is split to give its path; 0 if no number of dots gives it."""
    count = len(path) - 1
    keys = [key for kind, key in path if kind == "dict" and type(key) is str]
    return count if count > 0 and keys == name.split(".", count) else 0


def decode_nesting(data: Any, dots: Ints, names: Sequence[str]) -> Any:
    """Return planner data; see `encode_nesting`.

    Raises:
        ValueError: It is impossible.
    """
    planner_data = from_json(data)
    if len(dots):
        paths = _paths(planner_data)
        split = np.flatnonzero(dots).tolist()
        found = {names[row]: _path(names[row], int(dots[row])) for row in split}
        if len(dots) != len(names) or found.keys() & paths.keys():
            raise ValueError("its paths do not fit its names")
        every = FrozenDict.of_frozen({**found, **paths})
        planner_data = FrozenDict.of_frozen({**planner_data, _PATHS: every})
    _check_paths(_paths(planner_data), names)
    return planner_data


def _path(name: str, dots: int) -> tuple[tuple[str, str], ...]:
    parts = name.split(".", dots)
    if len(parts) != dots + 1:
        raise ValueError(f"`{name}` has no {dots} dots")
    return tuple([("dict", part) for part in parts])


def _paths(planner_data: Any) -> Mapping[str, Any]:
    paths = planner_data.get(_PATHS, {}) if isinstance(planner_data, Mapping) else {}
    if not isinstance(paths, Mapping):
        raise ValueError("its planner_data has paths that are not an object")
    return paths


def _check_paths(paths: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse paths that no nested state dict has, and lists that are nearly empty.

    A few bytes of a position would make a list of any length.
    """
    lengths: dict[Any, int] = {}
    steps = 0
    for name, path in paths.items():
        for depth, step in enumerate(path):
            kind, key = step if len(step) == 2 else ("", 0)
            if kind not in _KINDS:
                raise ValueError(f"the path of `{name}` has a step that is none: {str(step)[:80]}")
            steps += 1
            if kind != "dict":
                node = path[:depth]
                lengths[node] = max(lengths.get(node, 0), int(key) + 1)
    if sum(lengths.values()) > steps + _EMPTY_SEATS:
        raise ValueError(f"its lists would have {sum(lengths.values()):,} entries")
    if paths:
        unflatten(dict.fromkeys(names), paths)
