"""What of a state dict cannot be saved? All of it at once, though each step finds its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardplan.io import ValueRefusedError, as_tensor, sort_values
from shardplan.io.execute import Kept
from shardplan.planning import PlanError, RefusedError, flatten, held, is_tensor, leaves

__all__ = ["REFUSALS", "by_name", "with_others"]

REFUSALS = (PlanError, RefusedError, ValueRefusedError)
"""What says that a state dict cannot be saved."""


def with_others(error: Exception, sd: Mapping[Any, Any]) -> Exception:
    """Return an error that names all that cannot be saved, given the one that was met first.

    >>> sd = {"a": {1: 2, "1": 3}, "f": len}
    >>> try:
    ...     flatten(sd)
    ... except PlanError as error:
    ...     print(with_others(error, sd))
    `a.1` names two values, ['a'][1] and ['a']['1']; rename one of these keys; `f` is a ...
    """
    try:
        reasons = _reasons(sd)
    except Exception:  # the state dict is so odd that the first error must do
        return error
    known = getattr(error, "reasons", None)
    if len(reasons) < 2 or (known is not None and len(known) >= len(reasons)):
        return error
    if isinstance(error, PlanError) and len(error.issues) >= len(reasons):
        return error
    return ValueRefusedError(reasons)


def by_name(error: Exception, sd: Mapping[Any, Any]) -> Exception:
    """Return an error that names what cannot be saved, given one that may not; or that one.

    >>> by_name(RuntimeError("no data pointer"), {"f": len, "w": 1})
    ValueRefusedError('`f` is a builtin_function_or_method, ...')
    """
    try:
        reasons = _reasons(sd)
    except Exception:
        return error
    return ValueRefusedError(reasons) if reasons else error


def _reasons(sd: Mapping[Any, Any]) -> dict[str, str]:
    """Return by name why something cannot be saved."""
    reasons: dict[str, str] = {}
    flat: dict[str, Any] = {}
    try:
        flatten(sd)
    except PlanError as error:
        reasons |= {issue.fqn: _unnamed(issue.fqn, str(issue)) for issue in error.issues}
    for name, leaf in leaves(sd):
        flat.setdefault(name, leaf)
    values: dict[str, Any] = {}
    for name, leaf in flat.items():
        if not is_tensor(leaf):
            values[name] = leaf.value if isinstance(leaf, Kept) else leaf
            continue
        try:
            held(name, leaf)
            if getattr(leaf, "is_meta", False):
                as_tensor(leaf)
        except (RefusedError, TypeError) as error:
            reasons[name] = _unnamed(name, str(error))
    return reasons | sort_values(values)[1]


def _unnamed(name: str, text: str) -> str:
    return text.removeprefix(f"`{name}`").removeprefix(":").strip()
