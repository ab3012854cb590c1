"""State dicts, objects that keep their own state, and state of single ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Final, Protocol, cast

import attrs
import numpy as np

from shardplan.io import ValueRefusedError, as_tensor, sort_values, torch
from shardplan.io.execute import Kept
from shardplan.planning import (
    Path,
    PlanError,
    RefusedError,
    entry_of,
    flatten,
    held,
    is_node,
    is_tensor,
    leaves,
    retyped,
    with_entry,
)

from ._comm import Place

# Objects that keep their own state: models, optimizers, schedulers, data loaders


class Stateful(Protocol):
    """An object that returns its state and accepts it back, as modules and optimizers do."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state."""


State = Mapping[Any, Any] | Stateful
"""What can be saved and loaded: a state dict, or one object that keeps its own state."""


def is_stateful(value: Any) -> bool:
    """Return True if a value has ``state_dict()`` and ``load_state_dict()``."""
    if isinstance(value, (Mapping, type)) or is_tensor(value):
        return False
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def expand(state_dict: State) -> Mapping[Any, Any]:
    """Return a state dict with stateful objects replaced by their state.

    Objects are asked in order of their keys, equal on all ranks, since some of them communicate. A
    state dict without such objects is returned unchanged.
    """
    return _replaced_state(state_dict, _state_of)


def _state_of(value: Any) -> Any:
    """Return the state of a stateful object or of a `PerRank`; other values unchanged."""
    if isinstance(value, PerRank):
        inner = replaced(value.value, _state_of)
        return value if inner is value.value else attrs.evolve(value, value=inner)
    return value.state_dict() if is_stateful(value) else value


def _replaced_state(state_dict: State, change: Callable[[Any], Any]) -> Mapping[Any, Any]:
    """Run `replaced` on a state dict."""
    try:
        return cast(Mapping[Any, Any], replaced(state_dict, change))
    except RecursionError:
        if isinstance(state_dict, Mapping):
            flatten(state_dict)  # raises a clear error if it contains itself
        raise


def give_back(state_dict: State, loaded: Mapping[Any, Any]) -> None:
    """Hand every stateful object its state, after a load has filled the result of `expand`.

    Other values that were replaced inside an expanded copy are moved back to the original.
    """
    _give(state_dict, loaded)


def _give(value: Any, new: Any) -> Any:
    """Hand over what was loaded for a value, and return the value's replacement."""
    if value is new:
        return value
    if is_stateful(value):
        value.load_state_dict(new)
        return value
    if isinstance(value, PerRank):
        return attrs.evolve(value, value=_give(value.value, new.value))
    if not _holds_stateful(value):
        return new
    if not isinstance(value, Mapping):
        entries = [_give(*pair) for pair in zip(value, new, strict=True)]
        if not isinstance(value, list):
            return remade(value, entries)
        value[:] = entries
        return value
    for key in sorted(value, key=sort_key):
        old = value[key]
        got = _give(old, new[key])
        if got is not old:
            value[key] = got  # type: ignore[index]
    return value


def _holds_stateful(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_stateful(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_stateful(inner) for inner in value)
    return isinstance(value, PerRank) or is_stateful(value)


# State that each rank owns: random states, data loaders

Resize = Callable[[tuple[Any, ...], int, int], Any]
"""Makes a rank's state of all saved ones: ``resize(values, rank, ranks)``."""


@attrs.frozen(eq=False)
class PerRank:
    """State that differs between ranks: each rank saves and loads its own.

    It may be anywhere in a state dict. In the checkpoint, rank 3 of 8 has its state under the key
    ``rank_3_of_8``, so that any tool can read it, and `restore` without a target returns all of it.
    After a load, it is replaced by a `PerRank` with the loaded value.

    Attributes:
        value: This rank's state: any values, tensors, or objects with ``state_dict()`` and
            ``load_state_dict()``, nested in any way.
        resize: What to do if the number of ranks has changed; an error by default. It is called on
            every rank as ``resize(values, rank, ranks)``, with the states of all ranks that saved,
            by rank (None for a rank that saved none), and returns this rank's state.

    >>> import tempfile
    >>> from shardplan import load, restore, save
    >>> from shardplan.dist import run_ranks
    >>> folder = tempfile.TemporaryDirectory()
    >>> def train(comm):
    ...     save({"step": 7, "seed": PerRank(100 + comm.rank)}, folder.name, comm=comm)
    ...     state = {"step": 0, "seed": PerRank(0)}
    ...     load(state, folder.name, comm=comm)
    ...     return state["seed"].value
    >>> run_ranks(2, train)
    [100, 101]
    >>> restore(folder.name)["seed"]
    {'rank_0_of_2': 100, 'rank_1_of_2': 101}
    >>> state = {"seed": PerRank(0, resize=lambda seeds, rank, ranks: sum(seeds) + rank)}
    >>> _ = load(state, folder.name)
    >>> state["seed"].value
    201
    >>> folder.cleanup()
    """

    value: Any
    resize: Resize | None = None


class Parted(dict[str, Any]):
    """The saved form of a `PerRank`: a dict with one rank's value under its label."""

    def __init__(self, source: PerRank, label: str) -> None:
        super().__init__({label: source.value})
        self.source, self.label = source, label


def part(state: Mapping[Any, Any], place: Place) -> Mapping[Any, Any]:
    """Return a state dict in which each `PerRank` is a dict with this rank's value.

    A state dict without any is returned unchanged.

    >>> part({"rng": PerRank(7), "step": 1}, Place(0, 2))
    {'rng': {'rank_0_of_2': 7}, 'step': 1}
    """

    def change(value: Any) -> Any:
        return Parted(value, place.label) if isinstance(value, PerRank) else value

    return _replaced_state(state, change)


def unpart(state: Any, like: Mapping[Any, Any]) -> None:
    """Replace each result of `part` by a `PerRank` with the loaded value, in place.

    ``like`` is what `part` returned; it may be ``state`` itself.

    >>> state = part({"rng": PerRank(7)}, Place(0, 2))
    >>> state["rng"]["rank_0_of_2"] = 8
    >>> unpart(state, state)
    >>> state["rng"].value
    8
    """
    for path, node in list(parted(like)):
        with suppress(LookupError, TypeError):  # it is not in the target
            put(state, path, attrs.evolve(node.source, value=at(state, path)[node.label]))


_HOLDERS: Final = (Parted, Mapping, list, tuple)


def parted(value: Any, path: Path = ()) -> Iterator[tuple[Path, Parted]]:
    """Yield each `Parted` of a state dict, with its path."""
    if isinstance(value, Parted):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, _HOLDERS):
                yield from parted(inner, (*path, ("dict", key)))
    elif isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        for number, inner in enumerate(value):
            if isinstance(inner, _HOLDERS):
                yield from parted(inner, (*path, (kind, number)))


def per_rank_names(state: Mapping[Any, Any], paths: Mapping[str, Path]) -> frozenset[str]:
    """Return the names that come from a `PerRank`, given the results of `part` and `flatten`.

    >>> state = part({"rng": PerRank(7), "like": {"rank_0_of_2": 7}}, Place(0, 2))
    >>> sorted(per_rank_names(state, flatten(state)[1]))
    ['rng.rank_0_of_2']
    """
    nodes = {path for path, _ in parted(state)}
    if not nodes:
        return frozenset()
    return frozenset(
        name
        for name, path in paths.items()
        if any(path[:depth] in nodes for depth in range(len(path)))
    )


# Values that cannot be saved: each step of a save finds only some of them

REFUSALS = (PlanError, RefusedError, ValueRefusedError)
"""Errors that say that a state dict cannot be saved."""


def with_others(error: Exception, sd: Mapping[Any, Any]) -> Exception:
    """Return an error that names everything that cannot be saved, given the first error met.

    >>> sd = {"a": {1: 2, "1": 3}, "f": len}
    >>> try:
    ...     flatten(sd)
    ... except PlanError as error:
    ...     print(with_others(error, sd))
    `a.1` names two values, ['a'][1] and ['a']['1']; rename one of these keys; `f` is a ...
    """
    reasons = _reasons(sd)
    named = len(getattr(error, "reasons", ()) or getattr(error, "issues", ()))
    return error if len(reasons) < 2 or named >= len(reasons) else ValueRefusedError(reasons)


def by_name(error: Exception, sd: Mapping[Any, Any]) -> Exception:
    """Return an error that names what cannot be saved; the given one if nothing is found."""
    reasons = _reasons(sd)
    return ValueRefusedError(reasons) if reasons else error


def _reasons(sd: Mapping[Any, Any]) -> dict[str, str]:
    """Return, by name, why something cannot be saved; empty if that cannot be determined."""
    try:
        leaf_of: dict[str, Any] = {}
        for name, leaf in leaves(sd):
            leaf_of.setdefault(name, leaf)
        tensors = {name: leaf for name, leaf in leaf_of.items() if is_tensor(leaf)}
        refused = _name_clashes(sd) | _refused_tensors(tensors)
        values = {
            name: leaf.value if isinstance(leaf, Kept) else leaf
            for name, leaf in leaf_of.items()
            if name not in tensors
        }
        unnamed = {
            n: t.removeprefix(f"`{n}`").removeprefix(":").strip() for n, t in refused.items()
        }
        return unnamed | sort_values(values)[1]
    except Exception:  # the state dict cannot be inspected
        return {}


def _name_clashes(sd: Mapping[Any, Any]) -> dict[str, str]:
    try:
        flatten(sd)
    except PlanError as error:
        return {issue.fqn: str(issue) for issue in error.issues}
    return {}


def _refused_tensors(tensors: Mapping[str, Any]) -> dict[str, str]:
    refused: dict[str, str] = {}
    for name, tensor in tensors.items():
        try:
            held(name, tensor)
            if getattr(tensor, "is_meta", False):
                as_tensor(tensor)
        except (RefusedError, TypeError) as error:
            refused[name] = str(error)
    return refused


# Nested values: read and replace them


def at(root: Any, path: Sequence[tuple[str, Any]]) -> Any:
    """Return the value at the end of a path that `flatten` found."""
    return reduce(lambda node, step: entry_of(node, step[1]), path, root)


def put(root: Any, path: Sequence[tuple[str, Any]], value: Any) -> None:
    """Set one leaf in place; tuples and nodes on the path are made anew if they must change.

    >>> sd = {"a": [1, (2, 3)]}
    >>> put(sd, [("dict", "a"), ("list", 1), ("tuple", 0)], 9)
    >>> sd
    {'a': [1, (9, 3)]}
    """
    nodes = [root]
    for _, key in path[:-1]:
        nodes.append(entry_of(nodes[-1], key))
    value = retyped(_entry(nodes[-1], path[-1][1]), value)
    is_inside = any(map(is_node, nodes))  # what a node returns may be a copy of what it holds
    for node, (kind, key) in zip(reversed(nodes), reversed(path), strict=True):
        if kind == "tuple" or is_node(node):
            value = with_entry(node, key, value)
            continue
        if _entry(node, key) is not value:
            node[key] = value
        if not is_inside:
            return
        value = node


def _entry(node: Any, key: Any) -> Any:
    """Return what is at a place; None if there is nothing."""
    with suppress(LookupError, TypeError):
        return entry_of(node, key)


def refilled(old: Any, new: Any) -> Any:
    """Return a value that was read, in the memory of tensors and arrays that were there before."""
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
    if is_node(value):
        return value
    if isinstance(value, Mapping):
        return _replaced_in_dict(value, change)
    if isinstance(value, (list, tuple)):
        return remade(value, [replaced(entry, change) for entry in value])
    return value


def _replaced_in_dict(sd: Mapping[Any, Any], change: Callable[[Any], Any]) -> Mapping[Any, Any]:
    examples = {type(value): value for value in sd.values()}  # few types, many values
    tensors = {kind for kind, value in examples.items() if is_tensor(value)}
    if tensors.issuperset(examples):
        return sd
    kept = [key for key, value in sd.items() if type(value) not in tensors]
    changed: dict[Any, Any] = {}
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
