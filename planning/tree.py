"""State dicts, flattened and unflattened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np

from .errors import Issue, PlanError, RefusedError
from .frozen import SCALARS, FrozenDict
from .nodes import NodeData, children_of, has_nodes, is_node, made_node, node_data

_NOTHING: Final = object()
_LONGEST: Final = 1 << 20  # positions past this are damage, not a list of tensors
_DEEPEST: Final = 128  # containers in containers: they are walked by recursion


Step = tuple[str, Any]
Path = tuple[Step, ...]
"""The path of a leaf: per container its kind ("dict", "list" or "tuple") and key or position."""


def flatten(
    sd: Mapping[Any, Any], *, whole: Collection[str] = ()
) -> tuple[dict[str, Any], FrozenDict[str, Path]]:
    """Return the leaves of a nested state dict by dotted name, and the path of each.

    Dicts are opened, and objects of registered classes (see `register_node`). Lists and tuples are
    opened if they contain one of these or a tensor (for a tuple, a non-empty dict). Everything
    else, empty containers included, is a leaf. Keys may be of any hashable type: the name has their
    text, the path keeps the key itself.

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
            for _, key in path:
                frozen = frozen and type(key) in SCALARS
            name = _name(path)
            if name in flat:
                issues.append(clash(name, paths[name], path))
            else:
                flat[name], paths[name] = leaf, path
    except RecursionError:
        raise _too_deep(sd) from None
    if issues:
        raise PlanError(issues)
    return flat, FrozenDict.of_frozen(paths) if frozen else FrozenDict(paths)


def nesting_data(
    flat: Mapping[str, Any], paths: Mapping[str, Path], nodes: Mapping[Path, NodeData] | None = None
) -> FrozenDict[str, Any] | None:
    """Return the ``planner_data`` of nested keys, given the results of `flatten` and `nodes_of`."""
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    empty = sorted(n for n, leaf in flat.items() if _container(type(leaf)) == "dict" and not leaf)
    data = {"empty": empty, "nodes": nodes or {}, "paths": nested}
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


def unflatten(
    flat: Mapping[str, Any],
    paths: Mapping[str, Path],
    *,
    like: Mapping[Any, Any] | None = None,
    nodes: Mapping[Path, NodeData] | None = None,
) -> dict[Any, Any]:
    """Return the nested state dict that `flatten` was given.

    Leaves without a path stay at the top. If some leaves are missing, the others keep their
    positions: a list has None for each missing entry.

    Args:
        flat: The leaves, by name.
        paths: Their paths.
        like: A state dict whose named tuples and registered classes come back as themselves.
        nodes: The result of `nodes_of`, if not that of ``like``.

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
    if nodes is None:
        nodes = {} if like is None else nodes_of(like)
    done = dict(_settle(root, (), nodes))
    return done if like is None else cast("dict[Any, Any]", retyped(like, done))


def nodes_of(sd: Mapping[Any, Any]) -> dict[Path, NodeData]:
    """Return the objects of registered classes in a state dict, by path: class and other data."""
    return dict(_nodes((), sd)) if has_nodes() else {}


def _nodes(path: Path, value: Any) -> Iterator[tuple[Path, NodeData]]:
    if path and is_node(value):
        yield path, node_data(value, _name(path))
    opened: Any = children_of(value) if path and is_node(value) else value
    kind = _container(type(opened))
    if not kind or len(path) > _DEEPEST:
        return
    for key, inner in opened.items() if kind == "dict" else enumerate(opened):
        if _container(type(inner)) or is_node(inner):
            yield from _nodes((*path, (kind, key)), inner)


def entry_of(node: Any, key: Any) -> Any:
    """Return what a container or a node has at a step of a path."""
    return (children_of(node) if is_node(node) else node)[key]


def with_entry(node: Any, key: Any, value: Any) -> Any:
    """Return a tuple or a node anew, with another entry; ``node`` itself if it has that one.

    >>> with_entry((1, 2), 0, 3)
    (3, 2)
    """
    if entry_of(node, key) is value:
        return node
    if is_node(node):
        children = children_of(node)
        changed = _with(children, key, value)
        return made_node(node_data(node, str(key)), changed, str(key))
    return getattr(node, "_make", tuple)(_with(node, key, value))


def _with(children: Any, key: Any, value: Any) -> Any:
    if isinstance(children, dict):
        return {**children, key: value}
    return tuple(value if at == key else old for at, old in enumerate(children))


def retyped(old: Any, new: Any) -> Any:
    """Return a value that was read; its tuples are named tuples where those of ``old`` are.

    >>> from collections import namedtuple
    >>> Pair = namedtuple("Pair", "x y")
    >>> retyped({"a": [Pair(0, 0)]}, {"a": [(1, 2), (3, 4)]})
    {'a': [Pair(x=1, y=2), (3, 4)]}
    """
    if type(new) is dict and isinstance(old, Mapping):
        return {key: retyped(old[key], v) if key in old else v for key, v in new.items()}
    if type(new) not in (list, tuple) or not isinstance(old, (list, tuple)):
        return new
    entries = [retyped(old[at], v) if at < len(old) else v for at, v in enumerate(new)]
    if type(new) is list:
        return entries
    make: Callable[[list[Any]], Any] = getattr(old, "_make", tuple)
    return make(entries) if len(old) == len(new) else tuple(entries)


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


_PLAIN_TYPES: Final = {
    ("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("numpy", "ndarray")
}  # fmt: skip


def _is_plain_type(kind: type) -> bool:
    """Return True for a class of tensors that are whole, and lie in memory, by its name."""
    return (kind.__module__, kind.__qualname__) in _PLAIN_TYPES


is_plain_type: Callable[[type], bool] = cast(Any, lru_cache(maxsize=1024)(_is_plain_type))


def is_tensor(value: object) -> bool:
    """Return True if a value is saved as a tensor."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
    if is_plain_type(type(value)):
        return True
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
    if is_node(entry):
        return True
    if kind == "dict":
        return bool(entry) or holder == "list"
    if kind:
        if depth > _DEEPEST:
            raise RecursionError
        holder = "tuple" if "tuple" in (kind, holder) else kind
        return any(_opens(inner, holder, depth + 1) for inner in entry)
    return is_tensor(entry)


def _name(path: Path) -> str:
    return str(path[0][1]) if len(path) == 1 else ".".join([str(key) for _, key in path])


def _leaves(path: Path, value: Any, whole: Collection[str] = ()) -> Iterator[tuple[Path, Any]]:
    if path and whole and _name(path) in whole:
        yield path, value
        return
    opened = bool(path) and is_node(value)
    if opened:
        value = children_of(value)
    kind = _container(type(value))
    if path and (not kind or (not opened and _is_leaf(value))):
        yield path, value
        return
    if len(path) > _DEEPEST:
        raise RecursionError
    if kind != "dict" and len(value) > _LONGEST:
        text = f"`{_name(path)}` is a {kind} of {len(value):,}, and {_LONGEST:,} are the most"
        raise RefusedError(text)
    entries = value.items() if kind == "dict" else enumerate(value)
    for key, inner in entries:
        if _container(type(inner)) or is_node(inner):
            yield from _leaves((*path, (kind, key)), inner, whole)
        else:
            yield (*path, (kind, key)), inner


class _Node(dict[Any, Any]):
    """A container under construction; keyed by position if it is a list or a tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def _settle(value: Any, path: Path, nodes: Mapping[Path, NodeData]) -> Any:
    if not isinstance(value, _Node):
        return value
    inner = {key: _settle(v, (*path, (value.kind, key)), nodes) for key, v in value.items()}
    done: Any = inner
    if value.kind != "dict":
        if not all(isinstance(at, int) and at >= 0 for at in inner) or max(inner) >= _LONGEST:
            raise ValueError(f"positions {list(inner)[:8]} do not form a {value.kind}")
        done = [inner.get(position) for position in range(max(inner) + 1)]
        done = tuple(done) if value.kind == "tuple" else done
    return made_node(nodes[path], done, _name(path)) if path in nodes else done


def clash(name: str, first: Path, second: Path, ranks: Sequence[int] = ()) -> Issue:
    """Report that two values with different paths would get the same name."""
    ways = ["".join(f"[{key!r}]" for _, key in path) for path in (first, second)]
    if ways[0] == ways[1]:  # a list and a dict with numbers for keys, say
        kinds = [[kind for kind, _ in path] for path in (first, second)]
        ways = [f"{way} ({' in '.join(reversed(k))})" for way, k in zip(ways, kinds, strict=True)]
    text = f"`{name}` names two values, {' and '.join(ways)}; rename one of these keys"
    return Issue("conflict", name, text, ranks)
