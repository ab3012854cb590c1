"""Classes of one's own in state dicts: the registry of how they are opened, and made again.

A *node* is an object of a registered class. It is saved as a dict or a tuple of its children, which
any tool can read; the checkpoint also keeps the name of the class, and what `flatten` returned
besides. Nothing is imported because a checkpoint says so: a node comes back as itself if its class
is registered, and as a plain dict or tuple if it is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import attrs

from .errors import CodecError, RefusedError, listed
from .frozen import SCALARS, freeze, to_json

T = TypeVar("T")
Children = Mapping[Any, Any] | Sequence[Any]
Open = Callable[[Any], tuple[Children, Any]]
Make = Callable[[Any, Any], Any]
NodeData = tuple[str, Any]
"""The name of a node's class, and what `flatten` returned besides its children."""


@attrs.frozen
class _NodeType:
    """How objects of a class are opened and made; None means field by field."""

    kind: type
    flatten: Open | None
    unflatten: Make | None


_TYPES: Final[dict[type, _NodeType]] = {}  # the one piece of global state in planning
_PLAIN: Final = (*SCALARS, dict, list, tuple, set, frozenset, object, type)


def register_node(
    kind: type[T], flatten: Open | None = None, unflatten: Make | None = None
) -> type[T]:
    """Open objects of a class in state dicts, so that what they hold is saved leaf by leaf.

    Every process that saves or loads them has to register the class. Where a load finds one in the
    state dict, its tensors are filled in place, and if it holds anything else, a new object takes
    its place. `restore` makes objects of classes that are registered, and otherwise returns a dict
    or a tuple of their children. Named tuples are opened without being registered: a load makes
    them anew where it finds them, and `restore` returns plain tuples.

    Args:
        kind: The class itself; its subclasses are not included.
        flatten: Maps an object to its children, a dict or a sequence, and to any other data that
            makes it again: None, numbers, strings, and tuples and dicts of them, equal on all
            ranks. An object needs at least one child; tensors are its own or views of them, never
            copies. Without it, dataclasses, classes of attrs and named tuples are opened field by
            field; all fields must be arguments of ``__init__``.
        unflatten: Maps that data and the children, a dict or a tuple, to a new object. The data is
            frozen: a list comes back as a tuple.

    Returns:
        The class, so that this can be used as a decorator.

    >>> from shardplan.planning import flatten as flat, unflatten as nested
    >>> @register_node
    ... @dataclasses.dataclass
    ... class Average:
    ...     decay: float
    ...     shadow: dict
    >>> sd = {"ema": Average(0.9, {"w": 1.0})}
    >>> flat(sd)[0]
    {'ema.decay': 0.9, 'ema.shadow.w': 1.0}
    >>> nested(*flat(sd), like=sd)
    {'ema': Average(decay=0.9, shadow={'w': 1.0})}

    Raises:
        ValueError: The class is registered already, with other functions.
        TypeError: The functions are missing, and it has no fields, or some that ``__init__``
            does not take; or it is a built-in container.
    """
    given: object = kind
    if not isinstance(given, type) or given in _PLAIN:
        raise TypeError(f"register_node takes a class of your own, not {kind!r}")
    if (flatten is None) != (unflatten is None):
        raise TypeError("register_node takes flatten and unflatten together, or neither")
    if flatten is None and not _has_fields(kind):
        text = f"{_name(kind)} is not a dataclass, class of attrs or named tuple"
        raise TypeError(f"{text}: give flatten and unflatten")
    unset = _unset(kind) if flatten is None else []
    if unset:
        text = f"{_name(kind)} has fields with init=False ({listed(unset)}), which no call sets"
        raise TypeError(f"{text}: give flatten and unflatten")
    new = _NodeType(kind, flatten, unflatten)
    if _TYPES.setdefault(kind, new) != new:
        raise ValueError(f"{_name(kind)} is registered already, with other functions")
    return kind


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or attrs.has(kind) or _is_named_tuple(kind)


def _unset(kind: type) -> list[str]:
    """Return the fields that a call of the class does not set."""
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind) if not field.init]
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if not field.init]
    return []


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def has_nodes() -> bool:
    """Return True if any class is registered."""
    return bool(_TYPES)


def saved_nodes(planner_data: Any) -> Mapping[Any, NodeData]:
    """Return the nodes of a checkpoint, by path, given the ``planner_data`` of its metadata.

    Raises:
        CodecError: They are damaged.
    """
    nodes = planner_data.get("nodes", {}) if isinstance(planner_data, Mapping) else {}
    given = nodes.values() if isinstance(nodes, Mapping) else [nodes]
    if not all(isinstance(d, tuple) and len(d) == 2 and isinstance(d[0], str) for d in given):
        raise CodecError("the checkpoint's record of node classes is damaged")
    return cast("Mapping[Any, NodeData]", nodes)


def is_node(value: object) -> bool:
    """Return True if a value's class is registered."""
    return type(value) in _TYPES


def _opened(value: Any) -> tuple[Children, Any]:
    kind = _TYPES[type(value)]
    if kind.flatten is not None:
        return kind.flatten(value)
    if attrs.has(kind.kind):
        return {f.alias: getattr(value, f.name) for f in attrs.fields(kind.kind)}, None
    if dataclasses.is_dataclass(kind.kind):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, None
    return tuple(value), None


def children_of(value: Any) -> dict[Any, Any] | tuple[Any, ...]:
    """Return a node's children.

    Raises:
        RefusedError: There are none, or ``flatten`` returned something else.
    """
    done: Any = _opened(value)
    name = _name(type(value))
    if not isinstance(done, tuple) or len(done) != 2 or isinstance(done[0], (str, bytes)):
        raise RefusedError(
            f"flatten of {name} must return its children and other data, not {done!r}"
        )
    children, _ = done
    if not isinstance(children, (Mapping, Sequence)):
        raise RefusedError(
            f"the children of a {name} must be a dict or a sequence, not {children!r}"
        )
    if not children:
        raise RefusedError(f"a {name} without children has no place in a checkpoint; leave it out")
    return dict(children) if isinstance(children, Mapping) else tuple(children)


def node_data(value: Any, where: str) -> NodeData:
    """Return what a checkpoint keeps of a node besides its children; ``where`` is for errors.

    Raises:
        RefusedError: The data has no safe encoding.
    """
    data = freeze(_opened(value)[1])
    try:
        to_json(data, f"the data of `{where}`")
    except CodecError as error:
        raise RefusedError(str(error)) from None
    return _name(type(value)), data


def made_node(data: NodeData, children: dict[Any, Any] | tuple[Any, ...], where: str) -> Any:
    """Make a node; if its class is not registered, return the children."""
    name, rest = data
    found = [kind for kind in _TYPES.values() if _name(kind.kind) == name]
    if not found:
        return children
    kind = found[-1]  # of classes with one name, as a notebook makes them, the last
    try:
        if kind.unflatten is not None:
            return kind.unflatten(rest, children)
        if isinstance(children, tuple):
            return kind.kind(*children)
        return kind.kind(**children)
    except Exception as error:
        error.add_note(f"while making `{where}`, a {name}, of {len(children)} children")
        raise
