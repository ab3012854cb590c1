"""Values as code: what a failing test found can be pasted into a test of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs
import numpy as np

from ..mesh.placements import Mesh
from ..passes.base import Step, shown
from ..plans import SavePlan


def as_code(value: Any) -> str:
    """Return an expression that makes a plan, a state dict, a planner or a record again.

    It needs the names of `shardplan.planning`, ``np``, and the functions that passes were given.

    >>> from shardplan.planning import TensorSpec, cast, drop, local_plan
    >>> print(as_code([cast("int8", lossy=True), drop("*.b")]))
    [cast('int8', lossy=True), drop('*.b')]
    >>> print(as_code(local_plan({"w": np.zeros(2, np.float32)}).items[0].tensor_data))
    TensorWriteData(chunk=Chunk(offsets=(0,), sizes=(2,)), properties=TensorProperties(), size=(2,))
    """
    if isinstance(value, SavePlan):
        return _plan(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.ndarray):
        flat = ", ".join(as_code(entry) for entry in value.ravel().tolist())
        return f"np.array([{flat}], {value.dtype.str!r}).reshape({value.shape})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_code(k)}: {as_code(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return _sequence(value)
    if isinstance(value, Step) or callable(value):
        return shown(value)
    if attrs.has(type(value)) and not isinstance(value, Mesh):
        return _record(value)
    if isinstance(value, float) and not np.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _sequence(values: list[Any] | tuple[Any, ...]) -> str:
    inner = ", ".join(map(as_code, values))
    if isinstance(values, list):
        return f"[{inner}]"
    return f"({inner},)" if len(values) == 1 else f"({inner})"


def _plan(plan: SavePlan) -> str:
    fields = {"storage_data": plan.storage_data, "planner_data": plan.planner_data}
    fields |= {"rank": plan.rank, "world_size": plan.world_size}
    if plan.held is not None and plan.held != plan.items:
        fields["held"] = list(plan.held)
    if plan.left_out is not None:
        fields["left_out"] = list(plan.left_out)
    given = [f"{name}={as_code(part)}" for name, part in fields.items() if part is not None]
    return f"SavePlan({', '.join([as_code(list(plan.items)), *given])})"


def _record(value: Any) -> str:
    """Return a record's class with the arguments that are not as they would be by default."""
    name_of = {field.alias: field.name for field in attrs.fields(type(value))}
    parts = []
    for name, parameter in inspect.signature(type(value)).parameters.items():
        inner = getattr(value, name_of[name])
        if inner != parameter.default:
            parts.append(f"{name}={as_code(inner)}")
    return f"{type(value).__name__}({', '.join(parts)})"
