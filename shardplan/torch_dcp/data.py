"""What planners leave for themselves, in torch's words and in ours.

torch keeps a nested key's path as ``{"a.0": ("a", 0)}``, with every key as text; ours also tells
dicts, lists and tuples apart and keeps keys as they are. Where one says all that the other does,
`planner_data` is translated. Where it does not, the original goes along under a key of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeGuard

from shardplan.planning import empty_names, freeze

__all__ = [
    "data_from_torch",
    "data_to_torch",
    "own_paths",
    "paths_to_torch",
    "split_empty",
    "split_sizes",
    "thaw",
    "with_empty",
    "with_own_paths",
    "with_sizes",
]

_OURS: Final = ("shardplan",)  # in torch's data: what only ours can say; no name is a tuple
_THEIRS: Final = "torch"  # in our data: what only torch's can say
_SIZES: Final = "torch bytes_io_data"  # in our data: the sizes that torch's items tell of values
_ALONE: Final = "torch planner_data"  # beside these: data that is no mapping, or an empty one


def data_to_torch(data: Any, names: Collection[str], extra: Mapping[str, Any] | None = None) -> Any:
    """Return our ``planner_data`` as torch's.

    Args:
        data: The data.
        names: The names that the plan or the checkpoint has.
        extra: What else to carry, for `data_from_torch` to return.

    >>> data_to_torch({"paths": {"a.w": (("dict", "a"), ("dict", "w"))}}, ["a.w", "b"])
    {'b': ('b',), 'a.w': ('a', 'w')}
    """
    told = _told(data, names)
    if not extra and data_from_torch(told, names)[0] == data:
        return told
    paths = _paths_in(data)
    return {**_mapping(paths, names), _OURS: {**(extra or {}), "planner_data": thaw(data)}}


def data_from_torch(data: Any, names: Collection[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return torch's ``planner_data`` as ours, and what else `data_to_torch` was given.

    >>> data_from_torch({"a.w": ("a", "w"), "b": ("b",)}, ["a.w", "b"])[0]
    {'paths': {'a.w': (('dict', 'a'), ('dict', 'w'))}}
    """
    mark = data.get(_OURS) if isinstance(data, Mapping) else None
    if isinstance(mark, Mapping) and "planner_data" in mark:
        return mark["planner_data"], {k: v for k, v in mark.items() if k != "planner_data"}
    heard = data
    if _is_mapping(data) and set(names) <= data.keys():
        paths = {name: _path(steps) for name, steps in data.items()}
        heard = {"paths": {n: p for n, p in paths.items() if n not in names or not _flat(n, p)}}
    return (heard if _told(heard, names) == data else {_THEIRS: data}), {}


def with_sizes(data: Any, sizes: Mapping[str, int]) -> Any:
    """Return our ``planner_data`` with the sizes that torch's items tell of values, by name.

    >>> with_sizes(None, {"step": 8})
    {'torch planner_data': None, 'torch bytes_io_data': {'step': 8}}
    """
    if not sizes:
        return data
    rest = data if isinstance(data, Mapping) and data else {_ALONE: data}
    return {**rest, _SIZES: dict(sizes)}


def split_sizes(data: Any, names: Collection[str]) -> tuple[Any, Mapping[str, int]]:
    """Return what `with_sizes` was given, unless the names that have sizes are gone.

    >>> split_sizes({"mine": 1, "torch bytes_io_data": {"step": 8}}, ["step"])
    ({'mine': 1}, {'step': 8})
    """
    sizes = data.get(_SIZES) if isinstance(data, Mapping) else None
    if not isinstance(sizes, Mapping) or not sizes:
        return data, {}
    if not sizes.keys() <= set(names) or not all(type(n) is int for n in sizes.values()):
        return data, {}
    rest = {key: value for key, value in data.items() if key != _SIZES}
    return (rest[_ALONE] if rest.keys() == {_ALONE} else rest or None), sizes


def split_empty(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` without empty dicts, and the way to each of these by name.

    One without an entry, as it holds something on other ranks, has None for its way.

    >>> split_empty({"paths": {"a.b": (("dict", "a"), ("dict", "b"))}, "empty": ("a.b",)}, ["a.b"])
    (None, {'a.b': (('dict', 'a'), ('dict', 'b'))})
    """
    hollow = empty_names(data)
    if not hollow:
        return data, {}
    known = _paths_in(data)
    empty = {
        name: tuple(known.get(name, (("dict", name),))) if name in names else None
        for name in sorted(hollow)
    }
    paths = {name: path for name, path in known.items() if name not in hollow}
    rest = {key: part for key, part in data.items() if key not in ("paths", "empty")}
    return {**rest, **({"paths": paths} if paths else {})} or None, empty


def with_empty(data: Any, empty: Mapping[str, Any]) -> Any:
    """Return what `split_empty` was given.

    >>> with_empty(None, {"a": (("dict", "a"),)})
    {'empty': ('a',)}
    """
    if not empty:
        return data
    rest = data if isinstance(data, Mapping) else {}
    nested = {name: path for name, path in empty.items() if path and not _flat(name, path)}
    paths = {**rest.get("paths", {}), **nested}
    return {**rest, **({"paths": paths} if paths else {}), "empty": tuple(sorted(empty))}


def own_paths(data: Any) -> dict[str, Any]:
    """Return the paths that torch's words cannot tell.

    >>> own_paths({"paths": {"a.0": (("dict", "a"), ("tuple", 0)), "b.c": (("dict", "b"),)}})
    {'a.0': (('dict', 'a'), ('tuple', 0))}
    """
    return {name: path for name, path in _paths_in(data).items() if path != _path(_steps(path))}


def with_own_paths(data: Any, own: Mapping[str, Any]) -> Any:
    """Return our ``planner_data`` with the paths that torch's words could not tell.

    >>> with_own_paths(None, {"a.0": (("dict", "a"), ("tuple", 0))})
    {'paths': {'a.0': (('dict', 'a'), ('tuple', 0))}}
    """
    told = data.get("paths") if isinstance(data, Mapping) else {}
    if not own or not _are_paths(told) or not _are_paths(own):
        return data
    return {**(data or {}), "paths": {**told, **own}}


def paths_to_torch(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` as torch's, and the paths that go beside it.

    >>> paths_to_torch({"paths": {"a.0": (("dict", "a"), ("tuple", 0))}}, ["a.0"])
    ({'a.0': ('a', 0)}, {'a.0': (('dict', 'a'), ('tuple', 0))})
    """
    told, own = _told(data, names), own_paths(data)
    if own and with_own_paths(data_from_torch(told, names)[0], own) == data:
        return told, own
    return data_to_torch(data, names), own


def thaw(value: Any) -> Any:
    """Return frozen data as plain dicts.

    >>> thaw(freeze({"a": [{"b": 1}]}))
    {'a': ({'b': 1},)}
    """
    if isinstance(value, Mapping):
        return {thaw(key): thaw(inner) for key, inner in value.items()}
    return tuple(map(thaw, value)) if type(value) is tuple else value


def _told(data: Any, names: Collection[str]) -> Any:
    """Return our data in torch's words, whether or not those say all of it."""
    if isinstance(data, Mapping) and data.keys() == {"paths"} and _are_paths(data["paths"]):
        return _mapping(data["paths"], names)
    if isinstance(data, Mapping) and data.keys() == {_THEIRS}:
        return thaw(freeze(data[_THEIRS]))
    return thaw(freeze(data))


def _paths_in(data: Any) -> Mapping[str, Any]:
    paths = data.get("paths") if isinstance(data, Mapping) else None
    return paths if _are_paths(paths) else {}


def _are_paths(paths: Any) -> TypeGuard[Mapping[str, Any]]:
    """Tell whether data is what `flatten` makes of nested keys."""
    return isinstance(paths, Mapping) and all(
        isinstance(path, tuple) and all(isinstance(s, tuple) and len(s) == 2 for s in path)
        for path in paths.values()
    )


def _mapping(paths: Mapping[str, Any], names: Collection[str]) -> dict[str, tuple[str | int, ...]]:
    """Return every name's path as torch has it: text for keys of a dict, numbers for positions."""
    known = {name: _steps(path) for name, path in paths.items()}
    return {**{name: (name,) for name in names if name not in known}, **known}


def _steps(path: tuple[tuple[str, Any], ...]) -> tuple[str | int, ...]:
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


def _path(steps: tuple[str | int, ...]) -> tuple[tuple[str, str | int], ...]:
    return tuple(("dict" if isinstance(step, str) else "list", step) for step in steps)


def _flat(name: str, path: tuple[tuple[str, str | int], ...]) -> bool:
    return path == (("dict", name),)


def _is_mapping(data: Any) -> bool:
    """Tell whether data is what torch's planners make of nested keys."""
    return isinstance(data, Mapping) and all(
        isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(step) in (str, int) for step in path)
        and name == ".".join(map(str, path))
        for name, path in data.items()
    )
