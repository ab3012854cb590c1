"""The ``planner_data`` of plans and metadata, in torch's form and in ours.

torch keeps the path of a nested key as ``{"a.0": ("a", 0)}``, with every key as text. Ours also
distinguishes dicts, lists and tuples and keeps keys as they are. Data is translated if that is
lossless; otherwise the original goes along under a separate key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeGuard

from shardplan.planning import empty_names, freeze

__all__ = [
    "data_from_torch",
    "data_to_torch",
    "paths_to_torch",
    "split_empty",
    "with_empty",
    "with_own_paths",
]

_OURS: Final = ("shardplan",)  # in torch's data: our original; no name is a tuple
_THEIRS: Final = "torch"  # in our data: torch's original


def data_to_torch(data: Any, names: Collection[str], extra: Mapping[str, Any] | None = None) -> Any:
    """Return our ``planner_data`` in torch's form; `data_from_torch` returns ``extra``.

    >>> data_to_torch({"paths": {"a.w": (("dict", "a"), ("dict", "w"))}}, ["a.w", "b"])
    {'b': ('b',), 'a.w': ('a', 'w')}
    """
    translated = _translated(data, names)
    if not extra and data_from_torch(translated, names)[0] == data:
        return translated
    ours = {**(extra or {}), "planner_data": _thaw(data)}
    return {**_torch_paths(_paths_in(data), names), _OURS: ours}


def data_from_torch(data: Any, names: Collection[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return torch's ``planner_data`` in our form, and the ``extra`` of `data_to_torch`.

    >>> data_from_torch({"a.w": ("a", "w"), "b": ("b",)}, ["a.w", "b"])[0]
    {'paths': {'a.w': (('dict', 'a'), ('dict', 'w'))}}
    """
    mark = data.get(_OURS) if isinstance(data, Mapping) else None
    if isinstance(mark, Mapping) and "planner_data" in mark:
        return mark["planner_data"], {k: v for k, v in mark.items() if k != "planner_data"}
    ours = data
    if _is_torch_paths(data) and set(names) <= data.keys():
        paths = {name: _path(steps) for name, steps in data.items()}
        ours = {"paths": {n: p for n, p in paths.items() if n not in names or not _is_flat(n, p)}}
    return (ours if _translated(ours, names) == data else {_THEIRS: data}), {}


def split_empty(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` without empty dicts, and the paths of these by name.

    The path is None if the dict is empty on this rank only.

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
    """Undo `split_empty`."""
    if not empty:
        return data
    rest = data if isinstance(data, Mapping) else {}
    nested = {name: path for name, path in empty.items() if path and not _is_flat(name, path)}
    paths = {**rest.get("paths", {}), **nested}
    return {**rest, **({"paths": paths} if paths else {}), "empty": tuple(sorted(empty))}


def with_own_paths(data: Any, own: Mapping[str, Any]) -> Any:
    """Add paths that torch's form cannot express to our ``planner_data``."""
    known = data.get("paths") if isinstance(data, Mapping) else {}
    if not own or not _are_paths(known) or not _are_paths(own):
        return data
    return {**(data or {}), "paths": {**known, **own}}


def paths_to_torch(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` in torch's form, and the paths that it cannot express.

    >>> paths_to_torch({"paths": {"a.0": (("dict", "a"), ("tuple", 0))}}, ["a.0"])
    ({'a.0': ('a', 0)}, {'a.0': (('dict', 'a'), ('tuple', 0))})
    """
    translated = _translated(data, names)
    own = {name: path for name, path in _paths_in(data).items() if path != _path(_steps(path))}
    if own and with_own_paths(data_from_torch(translated, names)[0], own) == data:
        return translated, own
    return data_to_torch(data, names), own


def _translated(data: Any, names: Collection[str]) -> Any:
    """Return our data in torch's form, even if that loses something."""
    if isinstance(data, Mapping) and data.keys() == {"paths"} and _are_paths(data["paths"]):
        return _torch_paths(data["paths"], names)
    if isinstance(data, Mapping) and data.keys() == {_THEIRS}:
        return _thaw(freeze(data[_THEIRS]))
    return _thaw(freeze(data))


def _thaw(value: Any) -> Any:
    """Return frozen data as plain dicts."""
    if isinstance(value, Mapping):
        return {_thaw(key): _thaw(inner) for key, inner in value.items()}
    return tuple(map(_thaw, value)) if type(value) is tuple else value


def _paths_in(data: Any) -> Mapping[str, Any]:
    paths = data.get("paths") if isinstance(data, Mapping) else None
    return paths if _are_paths(paths) else {}


def _are_paths(paths: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return True for the paths that `flatten` returns."""
    return isinstance(paths, Mapping) and all(
        isinstance(path, tuple) and all(isinstance(s, tuple) and len(s) == 2 for s in path)
        for path in paths.values()
    )


def _is_torch_paths(data: Any) -> bool:
    """Return True for the paths that torch's planners keep."""
    return isinstance(data, Mapping) and all(
        isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(step) in (str, int) for step in path)
        and name == ".".join(map(str, path))
        for name, path in data.items()
    )


def _torch_paths(paths: Mapping[str, Any], names: Collection[str]) -> dict[Any, Any]:
    """Return every name's path as torch has it."""
    known = {name: _steps(path) for name, path in paths.items()}
    return {**{name: (name,) for name in names if name not in known}, **known}


def _steps(path: tuple[tuple[str, Any], ...]) -> tuple[str | int, ...]:
    """Return a path as torch has it: text for keys of a dict, numbers for positions."""
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


def _path(steps: tuple[str | int, ...]) -> tuple[tuple[str, str | int], ...]:
    return tuple(("dict" if isinstance(step, str) else "list", step) for step in steps)


def _is_flat(name: str, path: tuple[tuple[str, str | int], ...]) -> bool:
    return path == (("dict", name),)
