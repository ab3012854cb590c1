"""How do I add a step? Passes: pure functions from one plan per rank to one plan per rank.

Any ``Callable[[tuple[Plan, ...]], tuple[Plan, ...]]`` is a pass, a lambda too. A one-rank tuple is
a legal input, so the same pass runs on one rank's own plan or on everybody's. Passes that rewrite
keys are in `keys`, those that rewrite chunks in `chunking`, those for loads in `sharing`.

The passes that factories return are `functools.partial`s of functions of a module, so that they can
be pickled and sent to another process, as long as what they were given can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import attrs
import numpy as np

from .catalog import merge_catalogs
from .columns import WriteItems
from .errors import Issue, PlanError
from .frozen import FrozenDict
from .records import LoadPlan, SavePlan

__all__ = ["Pass", "annotate", "chain", "named_chain", "partition"]

P = TypeVar("P", SavePlan, LoadPlan)
Pass = Callable[[tuple[P, ...]], tuple[P, ...]]


def chain(*passes: Pass[P]) -> Pass[P]:
    """Return the pass that runs ``passes`` one after the other; none of them is the identity.

    >>> chain()((SavePlan([]),)) == (SavePlan([]),)
    True

    Raises:
        ValueError: When run, if a pass returns more or fewer plans than it was given.
    """
    for step in passes:
        if not callable(step):
            raise TypeError(f"a pass is a function from plans to plans, not {step!r}")
    return partial(_chain, passes)


def _chain(passes: tuple[Pass[P], ...], plans: tuple[P, ...]) -> tuple[P, ...]:
    for step in passes:
        plans = _run(step, plans, _name(step))
    return plans


def named_chain(
    **passes: Pass[P],
) -> Callable[[tuple[P, ...]], tuple[tuple[P, ...], dict[str, tuple[P, ...]]]]:
    """Return a function that runs named passes and also returns the plans after each of them.

    >>> from shardplan.planning import TensorSpec, drop, local_plan
    >>> plan = local_plan({"w": TensorSpec((2,)), "tmp": 1})
    >>> plans, after = named_chain(clean=drop("tmp"))((plan,))
    >>> [len(p.items) for p in after["clean"]]
    [1]
    """
    return partial(_named_chain, passes)


def _named_chain(
    passes: Mapping[str, Pass[P]], plans: tuple[P, ...]
) -> tuple[tuple[P, ...], dict[str, tuple[P, ...]]]:
    after: dict[str, tuple[P, ...]] = {}
    for name, step in passes.items():
        plans = after[name] = _run(step, plans, name)
    return plans, after


def _run(step: Pass[P], plans: tuple[P, ...], name: str) -> tuple[P, ...]:
    done: object = step(plans)
    if not isinstance(done, tuple) or len(done) != len(plans):
        got = f"a tuple of {len(done)}" if isinstance(done, tuple) else f"a {type(done).__name__}"
        raise ValueError(f"pass {name} was given a tuple of {len(plans)} plans and returned {got}")
    return done


def _name(step: Callable[..., Any]) -> str:
    if not isinstance(step, partial):
        return getattr(step, "__name__", repr(step))
    if step.func is _chain:
        return f"chain({', '.join(map(_name, step.args[0]))})"
    return _name(step.func).lstrip("_")


def as_pass(passes: Pass[P] | Iterable[Pass[P]]) -> Pass[P]:
    """Return one pass, given one or several."""
    return chain(passes) if callable(passes) else chain(*passes)


def annotate(note: Callable[[SavePlan], Mapping[str, Any]]) -> Pass[SavePlan]:
    """Have every rank add data of its own, which `global_plan` collects.

    The data of all ranks, in rank order, becomes ``metadata.planner_data["ranks"]``.

    Args:
        note: Given a rank's plan, returns what to add to its ``planner_data``.

    >>> from shardplan.planning import global_plan, local_plan
    >>> passes = [annotate(lambda plan: {"items": len(plan.items)})]
    >>> global_plan([local_plan({"a": 1}), local_plan({"b": 2})], passes)[1].planner_data["ranks"]
    (FrozenDict({'items': 1}), FrozenDict({'items': 1}))
    """
    return partial(_annotate, note)


def _annotate(
    note: Callable[[SavePlan], Mapping[str, Any]], plans: tuple[SavePlan, ...]
) -> tuple[SavePlan, ...]:
    return tuple(_noted(plan, note(plan)) for plan in plans)


def _noted(plan: SavePlan, extra: Mapping[str, Any]) -> SavePlan:
    if not isinstance(extra, Mapping):
        raise TypeError(f"annotate needs a mapping of names to data, not {extra!r}")
    if "paths" in extra:
        raise ValueError('planner_data["paths"] holds the nested keys; use another name')
    return attrs.evolve(plan, planner_data=FrozenDict({**(plan.planner_data or {}), **extra}))


def partition(label: Callable[[str], str], passes: Mapping[str, Pass[SavePlan]]) -> Pass[SavePlan]:
    """Route items by their name: those of each label go through that label's pass, on all ranks.

    Args:
        label: Given a name in the checkpoint, returns its label.
        passes: What to do with the items of each label; `chain` () leaves them as they are.

    >>> from shardplan.planning import TensorSpec, cast, chain, local_plan
    >>> kind = lambda name: name.split(".")[0]
    >>> route = partition(kind, {"model": cast("bfloat16"), "optim": chain()})
    >>> plan = local_plan({"model.w": TensorSpec((2,)), "optim.w": TensorSpec((2,))})
    >>> [i.tensor_data.properties.dtype for i in route((plan,))[0].items]
    ['bfloat16', 'float32']

    Raises:
        PlanError: When run, if a name has a label for which there is no pass.
    """
    return partial(_partition, label, dict(passes))


def _partition(
    label: Callable[[str], str],
    passes: Mapping[str, Pass[SavePlan]],
    plans: tuple[SavePlan, ...],
) -> tuple[SavePlan, ...]:
    of = {id(p.items.catalog): p.items.catalog.names for p in plans}
    by_catalog = {at: np.array([label(n) for n in names], object) for at, names in of.items()}
    labels = [by_catalog[id(p.items.catalog)] for p in plans]
    _known(plans, labels, passes)
    parts: list[list[WriteItems]] = [[] for _ in plans]
    data = [plan.planner_data for plan in plans]
    stored = [plan.storage_data for plan in plans]
    for name, step in passes.items():
        chosen = {at: np.asarray(of == name) for at, of in by_catalog.items()}
        rows = [np.flatnonzero(chosen[id(p.items.catalog)][p.items.row]) for p in plans]
        subset = [
            SavePlan(p.items.take(mine), s, d)
            for p, mine, s, d in zip(plans, rows, stored, data, strict=True)
        ]
        done = _run(step, tuple(subset), name)
        data = [plan.planner_data for plan in done]
        stored = [plan.storage_data for plan in done]
        for mine, plan in zip(parts, done, strict=True):
            mine.append(plan.items)
    merge = lru_cache(merge_catalogs)  # ranks share catalogs, by identity
    return tuple(
        SavePlan(WriteItems.concat(mine, merge), storage, d)
        for mine, storage, d in zip(parts, stored, data, strict=True)
    )


def _known(
    plans: tuple[SavePlan, ...], labels: list[Any], passes: Mapping[str, Pass[SavePlan]]
) -> None:
    """Refuse names whose label has no pass: they would silently vanish."""
    stray: dict[str, str] = {}
    for plan, of in zip(plans, labels, strict=True):
        lost = ~np.isin(of, list(passes))[plan.items.row] if len(of) else plan.items.row < 0
        for row in np.unique(plan.items.row[lost]).tolist():
            stray[plan.items.catalog.names[row]] = of[row]
    if stray:
        known = ", ".join(map(repr, passes))
        raise PlanError(
            Issue(
                "label", name, f"`{name}` is labelled {of!r}, and there are passes for {known} only"
            )
            for name, of in sorted(stray.items())
        )
