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


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _expand(state_dict: Mapping[Any, Any]) -> Mapping[Any, Any]:
    changed: dict[Any, Any] = {}
    tensors: set[type] = set()  # seen here: most values are of one of a few such types
    kept: list[Any] = []
    for key, value in state_dict.items():
        if type(value) in tensors:
            continue
        if is_tensor(value):
            tensors.add(type(value))
        else:
            kept.append(key)
    for key in sorted(kept, key=lambda key: (str(key), type(key).__name__)):
        value = state_dict[key]
        if is_stateful(value):
            changed[key] = value.state_dict()
        elif isinstance(value, Mapping):
            inner = _expand(value)
            if inner is not value:
                changed[key] = inner
    if not changed:
        return state_dict
    return {key: changed.get(key, value) for key, value in state_dict.items()}


def give_back(state_dict: Mapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Hand every stateful value its state, after a load has filled what `expand` returned.

    Other values that were replaced inside an expanded copy are put where they came from.
    """
    if state_dict is loaded:
        return
    for key in sorted(state_dict, key=lambda key: (str(key), type(key).__name__)):
        value = state_dict[key]
        if is_stateful(value):
            value.load_state_dict(loaded[key])
        elif isinstance(value, Mapping):
            give_back(value, loaded[key])
        elif loaded[key] is not value and isinstance(state_dict, dict):
            state_dict[key] = loaded[key]
