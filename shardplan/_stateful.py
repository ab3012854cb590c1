"""Objects that keep their own state: models, optimizers, schedulers, data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import attrs

from shardplan.planning import is_tensor

from ._nested import remade, replaced, sort_key
from ._per_rank import PerRank

__all__ = ["State", "Stateful", "expand", "give_back", "is_stateful"]


class Stateful(Protocol):
    """An object that returns its state and takes it back, as modules and optimizers do."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state."""


State = Mapping[Any, Any] | Stateful
"""What can be saved and loaded: a state dict, or one object that keeps its own state."""


def is_stateful(value: Any) -> bool:
    """Tell whether a value has ``state_dict()`` and ``load_state_dict()``."""
    if isinstance(value, (Mapping, type)) or is_tensor(value):
        return False
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def expand(state_dict: State) -> Mapping[Any, Any]:
    """Return a state dict with the state of stateful values in their place.

    A stateful object stands for its state. Values are asked in order of their keys, the same on all
    ranks, for some of them communicate. The very state dict comes back if it holds no such value.

    >>> class Counter:
    ...     def state_dict(self):
    ...         return {"count": 3}
    ...
    ...     def load_state_dict(self, state):
    ...         print("got", state)
    >>> expand({"counter": Counter(), "step": 7})
    {'counter': {'count': 3}, 'step': 7}
    """
    try:
        expanded: Mapping[Any, Any] = replaced(state_dict, _state_of)
        return expanded
    except RecursionError:
        return cast(Mapping[Any, Any], state_dict)  # planning says what is wrong with it
    except _RaisedError as raised:
        raise raised.error from None


class _RaisedError(Exception):
    """What a value's own ``state_dict()`` has raised."""

    def __init__(self, error: RecursionError) -> None:
        super().__init__(error)
        self.error = error


def _state_of(value: Any) -> Any:
    """Return the state of a stateful value, also of one of each rank; the very value if none."""
    if isinstance(value, PerRank):
        inner = replaced(value.value, _state_of)
        return value if inner is value.value else attrs.evolve(value, value=inner)
    if not is_stateful(value):
        return value
    try:
        return value.state_dict()
    except RecursionError as error:  # which is not that the state dict contains itself
        raise _RaisedError(error) from error


def give_back(state_dict: State, loaded: Mapping[Any, Any]) -> None:
    """Hand every stateful value its state, after a load has filled what `expand` returned.

    Other values that were replaced inside an expanded copy are put where they came from.

    >>> from collections import UserDict
    >>> class Counter:
    ...     def state_dict(self):
    ...         return {"count": 3}
    ...
    ...     def load_state_dict(self, state):
    ...         print("got", state)
    >>> sd = UserDict({"counters": [Counter()], "step": 0})
    >>> give_back(sd, {"counters": [{"count": 5}], "step": 7})
    got {'count': 5}
    >>> sd["step"]
    7
    """
    _give(state_dict, loaded)


def _give(value: Any, new: Any) -> Any:
    """Bring what was loaded to what it was loaded for, and return what stands there then."""
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
    """Tell whether something in a value is given its state, or is replaced by rank."""
    if isinstance(value, Mapping):
        return any(_holds_stateful(inner) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_stateful(inner) for inner in value)
    return isinstance(value, PerRank) or is_stateful(value)
