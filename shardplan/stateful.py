"""Objects that keep their own state: models, optimizers, schedulers, data loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardplan.planning.flatten import is_tensor

__all__ = ["expand", "give_back", "is_stateful"]


def is_stateful(value: Any) -> bool:
    """Tell whether a value has ``state_dict()`` and ``load_state_dict()``."""
    if isinstance(value, (Mapping, type)) or is_tensor(value):
        return False
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def expand(state_dict: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a state dict with the state of stateful values in their place.

    Values are asked in order of their keys, the same on all ranks, for some of them communicate.
    The very state dict comes back if it holds no such value.

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
        return _expand(state_dict) if _is_mapping(state_dict) else state_dict
    except RecursionError:
        return state_dict  # planning says what is wrong with it
    except _RaisedError as raised:
        raise raised.error from None


class _RaisedError(Exception):
    """What a value's own ``state_dict()`` has raised."""

    def __init__(self, error: RecursionError) -> None:
        super().__init__(error)
        self.error = error


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _expand(state_dict: Mapping[Any, Any]) -> Mapping[Any, Any]:
    changed: dict[Any, Any] = {}
    examples = {type(value): value for value in state_dict.values()}  # there are mostly a few
    tensors = {kind for kind, value in examples.items() if is_tensor(value)}
    if tensors.issuperset(examples):
        return state_dict
    kept = [key for key, value in state_dict.items() if type(value) not in tensors]
    for key in sorted(kept, key=_order):
        value = state_dict[key]
        inner = _expand_value(value)
        if inner is not value:
            changed[key] = inner
    if not changed:
        return state_dict
    return {key: changed.get(key, value) for key, value in state_dict.items()}


def _order(key: Any) -> tuple[str, str]:
    return str(key), type(key).__name__


def _expand_value(value: Any) -> Any:
    """Return a value with the state of what is stateful in it; the very value if nothing is."""
    if is_stateful(value):
        try:
            return value.state_dict()
        except RecursionError as error:  # which is not that the state dict contains itself
            raise _RaisedError(error) from error
    if isinstance(value, Mapping):
        return _expand(value)
    if isinstance(value, (list, tuple)):
        entries = [_expand_value(entry) for entry in value]
        return _remade(value, entries)
    return value


def _remade(value: Any, entries: list[Any]) -> Any:
    """Return a list or tuple of such entries; the very one if it has these already."""
    if all(new is old for new, old in zip(entries, value, strict=True)):
        return value
    if isinstance(value, list):
        return entries
    return value._make(entries) if hasattr(value, "_make") else tuple(entries)


def give_back(state_dict: Mapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
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
    if not _holds_stateful(value):
        return new
    if not isinstance(value, Mapping):
        entries = [_give(*pair) for pair in zip(value, new, strict=True)]
        if not isinstance(value, list):
            return _remade(value, entries)
        value[:] = entries
        return value
    for key in sorted(value, key=_order):
        old = value[key]
        got = _give(old, new[key])
        if got is not old:
            value[key] = got  # type: ignore[index]
    return value


def _holds_stateful(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(is_stateful(v) or _holds_stateful(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(is_stateful(v) or _holds_stateful(v) for v in value)
    return False
