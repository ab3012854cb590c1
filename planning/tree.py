"""Nested values: made immutable, encoded as JSON, and state dicts flattened and unflattened."""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import numpy as np

from .errors import CodecError, Issue, PlanError, RefusedError

__all__ = [
    "FrozenDict", "Path", "clash", "empty_names", "flatten", "freeze", "from_json", "is_tensor",
    "leaves", "nesting_data", "nesting_issues", "to_json", "unflatten",
]  # fmt: skip

K = TypeVar("K")
V = TypeVar("V")

_SCALARS: Final = frozenset((str, int, float, bool, bytes, type(None)))  # the most common types
_NOTHING: Final = object()
_LONGEST: Final = 1 << 20  # positions past this are damage, not a list of tensors
_DEEPEST: Final = 128  # containers in containers: they are walked by recursion


class FrozenDict(Mapping[K, V]):
    """An immutable, hashable mapping. Equal to any mapping of the same items.

    >>> FrozenDict({"a": [1, 2]})
    FrozenDict({'a': (1, 2)})
    >>> FrozenDict({"a": 1, "b": 2}) == {"b": 2, "a": 1}
    True
    """

    __slots__ = ("_dict", "_hash")
    _dict: dict[K, V]
    _hash: int

    def __init__(self, items: Mapping[K, V] | Sequence[tuple[K, V]] = ()) -> None:
        frozen = {freeze(key): freeze(value) for key, value in dict(items).items()}
        object.__setattr__(self, "_dict", frozen)

    @classmethod
    def of_frozen(cls, items: dict[K, V]) -> FrozenDict[K, V]:
        """Wrap a dict of immutable keys and values, which the caller gives up."""
        made: FrozenDict[K, V] = cls.__new__(cls)
        object.__setattr__(made, "_dict", items)
        return made

    def __setattr__(self, name: str, value: object = None) -> None:
        raise AttributeError("a FrozenDict cannot change; make a new one from dict(this)")

    __delattr__ = __setattr__

    def __getitem__(self, key: K) -> V:
        return self._dict[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(frozenset(self.items())))
            return self._hash

    def __repr__(self) -> str:
        return f"FrozenDict({self._dict!r})"

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return ``value`` with every list, set and dict inside it replaced by an immutable one.

    >>> freeze({"a": [1, {2}]})
    FrozenDict({'a': (1, frozenset({2}))})
    """
    kind = type(value)
    if kind in _SCALARS or isinstance(value, (str, bytes, int, float, FrozenDict)):
        return value
    if kind is tuple or isinstance(value, list):
        return tuple([v if type(v) in _SCALARS else freeze(v) for v in value])
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return FrozenDict(dict(value))
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return freeze(value.tolist())  # an array or a numpy scalar
    return value


def to_json(value: Any, where: str = "value") -> Any:
    """Return frozen data as plain JSON data that `from_json` decodes to an equal value.

    Tuples become arrays and string-keyed mappings become objects; types that JSON lacks are objects
    with a single key that starts with ``$``.

    >>> to_json((1, 2.5, b"x", {3: None}))
    [1, 2.5, {'$bytes': 'eA=='}, {'$map': [[3, None]]}]

    Raises:
        CodecError: ``value`` contains another type; the message starts with ``where``.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (tuple, list)):
        return [to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: to_json(v, f"{where}[{k!r}]") for k, v in value.items()}
        pairs = [[to_json(k, where), to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"$map": sorted(pairs, key=json.dumps)}
    if isinstance(value, Set):
        return {"$set": sorted((to_json(v, where) for v in value), key=json.dumps)}
    raise CodecError(
        f"{where} is a {type(value).__name__}, which has no safe encoding; "
        "use None, bool, int, float, str, bytes, tuples, sets and dicts of these"
    )


def from_json(data: Any) -> Any:
    """Return the frozen value that `to_json` was given."""
    if isinstance(data, list):
        return tuple([v if type(v) in _SCALARS else from_json(v) for v in data])
    if not isinstance(data, dict):
        return data
    tag = next(iter(data)) if len(data) == 1 else ""
    if not tag.startswith("$"):
        return FrozenDict.of_frozen({k: from_json(v) for k, v in data.items()})
    body = data[tag]
    match tag:
        case "$float":
            return float(body)
        case "$bytes":
            return base64.b64decode(body, validate=True)
        case "$map":
            return FrozenDict.of_frozen({from_json(k): from_json(v) for k, v in body})
        case "$set":
            return frozenset(from_json(v) for v in body)
    raise CodecError(f"unknown tag {tag!r} in encoded data; was it written by a newer version?")


Step = tuple[str, Any]
Path = tuple[Step, ...]
"""The path of a leaf: per container its kind ("dict", "list" or "tuple") and key or position."""


def flatten(
    sd: Mapping[Any, Any], *, whole: Collection[str] = ()
) -> tuple[dict[str, Any], FrozenDict[str, Path]]:
    """Return the leaves of a nested state dict by dotted name, and the path of each.

    Dicts are opened. Lists and tuples are opened if they contain a tensor or a dict (for a tuple, a
    non-empty dict). Everything else, empty containers included, is a leaf. Keys may be of any
    hashable type: the name has their text, the path keeps the key itself.

    Args:
        sd: Dicts, lists and tuples, nested in any way.
        whole: Names of containers to treat as leaves, whatever they hold.

    Returns:
        The flat dict, in order of traversal, and the paths, which `unflatten` takes.

    >>> flat, paths = flatten({"model": {"w": 1}, "betas": (0.9, 0.99), "groups": [{"lr": 0.1}]})
    >>> flat
    {'model.w': 1, 'betas': (0.9, 0.99), 'groups.0.lr': 0.1}
    >>> paths["groups.0.lr"]
    (('dict', 'groups'), ('list', 0), ('dict', 'lr'))

    Raises:
        PlanError: Two leaves would get the same name; it lists every clash, with both paths.
        RefusedError: Some values contain themselves or are nested too deeply; it lists all keys.
    """
    given: Any = sd
    if not isinstance(given, Mapping):
        kind, remedy = type(given).__name__, ""
        if hasattr(given, "state_dict"):
            remedy = f"; pass the {kind}'s state_dict()"
        elif callable(given):
            remedy = "; call it, and pass what it returns"
        text = f"a state dict is a mapping from names to values, not a {kind}{remedy}"
        raise TypeError(text)
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    issues = []
    frozen = True  # whether all keys are of types that cannot change
    try:
        for path, leaf in _leaves((), sd, whole):
            keys = [key for _, key in path]
            frozen = frozen and _SCALARS.issuperset(map(type, keys))
            name = ".".join(map(str, keys))
            if name in flat:
                issues.append(clash(name, paths[name], path))
            else:
                flat[name], paths[name] = leaf, path
    except RecursionError:
        raise _too_deep(sd) from None
    if issues:
        raise PlanError(issues)
    return flat, FrozenDict.of_frozen(paths) if frozen else FrozenDict(paths)


def nesting_data(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> FrozenDict[str, Any] | None:
    """Return the ``planner_data`` of nested keys, given the result of `flatten`."""
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    empty = sorted(n for n, leaf in flat.items() if _container(type(leaf)) == "dict" and not leaf)
    data = {"empty": empty, "paths": nested}
    return FrozenDict({key: part for key, part in data.items() if part}) or None


def empty_names(planner_data: Any) -> frozenset[str]:
    """Return the names of empty dicts in the data of a plan or of a checkpoint's metadata.

    Such a name may have no entry, if the dict had contents on other ranks.
    """
    names = planner_data.get("empty", ()) if isinstance(planner_data, Mapping) else ()
    return frozenset(names)


def leaves(sd: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each leaf, including leaves whose names clash."""
    return ((_name(path), leaf) for path, leaf in _leaves((), sd))


def _too_deep(sd: Mapping[Any, Any]) -> RefusedError:
    """Return the keys whose values are nested too deeply, or contain themselves."""
    reasons = []
    for key, value in sd.items():
        try:
            deque(_leaves((("dict", key),), value), maxlen=0)
        except RecursionError:
            levels = f"{_DEEPEST} levels are the most"
            reasons.append(f"`{key}` contains itself, or is nested too deeply ({levels})")
    return RefusedError(*reasons)


def unflatten(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """Return the nested state dict that `flatten` was given.

    Leaves without a path stay at the top. If some leaves are missing, the others keep their
    positions: a list has None for each missing entry.

    >>> unflatten(*flatten({"a": {"b": 1}, "c": [{"d": 2}, 3]}))
    {'a': {'b': 1}, 'c': [{'d': 2}, 3]}
    """
    root = _Node("dict")
    for name, leaf in flat.items():
        path = paths.get(name, (("dict", name),))
        if not path or path[0][0] != "dict":
            raise ValueError(f"the path of `{name}` does not start at a dict: {path}")
        node = root
        for (_, key), (kind, _) in pairwise(path):
            inner = node.get(key, _NOTHING)
            if inner is _NOTHING:
                inner = node[key] = _Node(kind)
            elif not isinstance(inner, _Node) or inner.kind != kind:
                raise ValueError(f"`{name}` lies inside another value: {path}")
            node = inner
        if path[-1][1] in node:
            raise ValueError(f"`{name}` is where another value is: {path}")
        node[path[-1][1]] = leaf
    return dict(_settle(root))


def nesting_issues(paths: Mapping[str, Path], holders: Mapping[str, int]) -> list[Issue]:
    """Report names that are a value on one rank and a container on another.

    ``holders`` names one rank that has each leaf.

    >>> paths = {"m": (("dict", "m"),), "m.a": (("dict", "m"), ("dict", "a"))}
    >>> print(nesting_issues(paths, {"m": 1, "m.a": 0})[0])
    `m` is a value (or empty) on rank 1 and holds `m.a` on rank 0; leave it out on ranks that have
    nothing to save there, or rename one of them
    """
    nodes: dict[tuple[Any, ...], tuple[str, str]] = {}  # by keys: the kind of container, and a leaf
    issues = []
    for name, path in paths.items():
        keys = tuple(key for _, key in path)
        for depth in range(1, len(path)):
            kind, other = nodes.setdefault(keys[:depth], (path[depth][0], name))
            if kind != path[depth][0]:
                text = f"`{name}` lies in a {path[depth][0]} on rank {holders[name]}, and "
                text += f"`{other}`, in the same place, in a {kind} on rank {holders[other]}; "
                issues.append((name, other, text + "rename one of them"))
                break
    for name, path in paths.items():
        _, below = nodes.get(tuple(key for _, key in path), ("", ""))
        if below:
            text = f"`{name}` is a value (or empty) on rank {holders[name]} and holds `{below}` on "
            text += f"rank {holders[below]}; leave it out on ranks that have nothing to save there"
            issues.append((name, below, f"{text}, or rename one of them"))
    return [
        Issue("conflict", name, text, sorted({holders[name], holders[other]}))
        for name, other, text in issues
    ]


def is_tensor(value: object) -> bool:
    """Return True if a value is saved as a tensor."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
    if isinstance(value, (np.generic, type)):
        return False
    try:
        if hasattr(value, "__create_chunk_list__"):
            return True  # without shape or dtype it is refused by name, never taken for a plain one
        return hasattr(value, "shape") and hasattr(value, "dtype")
    except Exception:
        return True  # a tensor without a known shape is refused by name, too


def _container_of(kind: type) -> str:
    """Return "dict", "list" or "tuple" for a container type, "" for any other type."""
    kinds: dict[str, type] = {"dict": Mapping, "tuple": tuple, "list": list}
    return next((name for name, base in kinds.items() if issubclass(kind, base)), "")


_container: Callable[[type], str] = cast(Any, lru_cache(maxsize=1024)(_container_of))


def _is_leaf(value: Any) -> bool:
    kind = _container(type(value))
    if kind == "dict":
        return not value
    return not kind or not any(_opens(entry, kind, 1) for entry in value)


def _opens(entry: Any, holder: str, depth: int) -> bool:
    """Return True if a list or tuple is opened for this entry: a tensor, a dict, or one inside.

    torch also opens lists for empty dicts, and never opens a tuple.
    """
    kind = _container(type(entry))
    if kind == "dict":
        return bool(entry) or holder == "list"
    if kind:
        if depth > _DEEPEST:
            raise RecursionError
        holder = "tuple" if "tuple" in (kind, holder) else kind
        return any(_opens(inner, holder, depth + 1) for inner in entry)
    return is_tensor(entry)


def _name(path: Path) -> str:
    return ".".join([str(key) for _, key in path])


def _leaves(path: Path, value: Any, whole: Collection[str] = ()) -> Iterator[tuple[Path, Any]]:
    kind = _container(type(value))
    if path and (not kind or _is_leaf(value) or (whole and _name(path) in whole)):
        yield path, value
        return
    if len(path) > _DEEPEST:
        raise RecursionError
    if kind != "dict" and len(value) > _LONGEST:
        text = f"`{_name(path)}` is a {kind} of {len(value):,}, and {_LONGEST:,} are the most"
        raise RefusedError(text)
    entries = value.items() if kind == "dict" else enumerate(value)
    for key, inner in entries:
        if _container(type(inner)):
            yield from _leaves((*path, (kind, key)), inner, whole)
        else:
            yield (*path, (kind, key)), inner


class _Node(dict[Any, Any]):
    """A container under construction; keyed by position if it is a list or a tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def _settle(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    if value.kind == "dict":
        return {key: _settle(inner) for key, inner in value.items()}
    if not all(isinstance(at, int) and at >= 0 for at in value) or max(value) >= _LONGEST:
        raise ValueError(f"positions {list(value)[:8]} do not form a {value.kind}")
    entries = [_settle(value.get(position)) for position in range(max(value) + 1)]
    return tuple(entries) if value.kind == "tuple" else entries


def clash(name: str, first: Path, second: Path, ranks: Sequence[int] = ()) -> Issue:
    """Report that two values with different paths would get the same name."""
    ways = ["".join(f"[{key!r}]" for _, key in path) for path in (first, second)]
    if ways[0] == ways[1]:  # a list and a dict with numbers for keys, say
        kinds = [[kind for kind, _ in path] for path in (first, second)]
        ways = [f"{way} ({' in '.join(reversed(k))})" for way, k in zip(ways, kinds, strict=True)]
    text = f"`{name}` names two values, {' and '.join(ways)}; rename one of these keys"
    return Issue("conflict", name, text, ranks)
