"""Passes that run others over some items or on some ranks: partition, where, on_ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, readonly
from ..columns.items import Catalog, Merged, WriteItems, merge_catalogs
from ..errors import Issue, PlanError, span
from ..plans import LoadPlan, SavePlan

from .base import (  # isort: skip
    Passes, Step, as_steps, chain, combined, frozen, inverse, keeps_names, ranked, run_pass,
)  # fmt: skip
from .keys import Pattern, Plans, catalogs_of, check_patterns, matcher

P = TypeVar("P", SavePlan, LoadPlan)
Ranks = Collection[int] | Callable[[int], bool]
Labels = Mapping[int, npt.NDArray[Any]]  # of each row of a catalog, by the catalog's identity


def partition(
    label: Callable[[str], str], passes: Mapping[str, Passes[SavePlan]]
) -> Step[SavePlan]:
    """Route items by name: items with a label go through that label's pass.

    The scope is ``"world"`` if any of the passes has that scope.

    Args:
        label: Maps a name in the checkpoint to its label.
        passes: The pass for each label; `chain` () leaves items as they are.

    >>> from shardplan.planning import TensorSpec, cast, chain, local_plan
    >>> kind = lambda name: name.split(".")[0]
    >>> route = partition(kind, {"model": cast("bfloat16"), "optim": chain()})
    >>> plan = local_plan({"model.w": TensorSpec((2,)), "optim.w": TensorSpec((2,))})
    >>> [i.tensor_data.properties.dtype for i in route((plan,))[0].items]
    ['bfloat16', 'float32']

    Raises:
        PlanError: When run, if there is no pass for the label of a name.
    """
    passes = frozen(passes)

    def run(plans: Plans) -> Plans:
        labels = _labels(plans, label)
        _refuse_strays(plans, labels, passes)
        return _route(ranked(plans), labels, passes)

    def undo() -> Step[SavePlan]:
        return partition(label, {of: _undone("partition", step) for of, step in passes.items()})

    outer = Step(partition, (label, passes), {}, "rank", run, undo)
    return combined(outer, as_steps(passes.values()))


def _undone(what: str, step: Passes[SavePlan]) -> Step[SavePlan]:
    """Return the inverse of a pass whose items are found again by their names."""
    undone = inverse(step)
    if not keeps_names(chain(step)):
        text = f"{what} has no inverse around {chain(step)!r}, which changes the names that {what} "
        raise ValueError(f"{text}goes by; give the pass itself names that match only these items")
    return undone


def _labels(plans: Sequence[SavePlan], label: Callable[[str], Any]) -> Labels:
    return {
        at: np.array([label(name) for name in catalog.names], object)
        for at, catalog in catalogs_of(plans).items()
    }


def where(pattern: Pattern, step: Passes[SavePlan], *, required: bool = True) -> Step[SavePlan]:
    """Run a pass over the items whose name matches a pattern; others are left as they are.

    The scope is that of the pass. A rank pass does not run on ranks where no name matches.

    Args:
        pattern: A shell-style pattern (``"model.*"``), or a function from name to bool, for names
            in the checkpoint.
        step: The pass; it sees no other items.
        required: Whether a pattern that matches nothing is an error.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> plan = local_plan({"a": TensorSpec((4,)), "b": TensorSpec((4,))})
    >>> [item.nbytes for item in where("a", split_chunks(8))((plan,))[0].items]
    [8, 8, 16]
    """
    check_patterns("where", [pattern])
    inner = chain(step)

    def run(plans: Plans) -> Plans:
        labels = _labels(plans, matcher("where", plans, [pattern], required))
        everyone = inner.scope == "world" and any(hit.any() for hit in labels.values())
        return _on_some(
            ranked(plans),
            lambda plan: everyone or bool(labels[id(plan.items.catalog)].any()),
            lambda some: _route(some, labels, {True: inner, False: chain()}),
        )

    def undo() -> Step[SavePlan]:
        return where(pattern, _undone("where", step), required=required)

    outer = Step(where, (pattern, step), {"required": required}, "rank", run, undo)
    return combined(outer, as_steps(step))


def on_ranks(ranks: Ranks, step: Passes[P]) -> Step[P]:
    """Run a rank pass on the plans of some ranks; those of others are left as they are.

    Args:
        ranks: The ranks, or a function from rank to bool.
        step: The pass, which looks at one plan at a time.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> plans = (local_plan({"w": TensorSpec((4,))}),) * 3
    >>> [len(plan.items) for plan in on_ranks([0, 2], split_chunks(8))(plans)]
    [2, 1, 2]

    Raises:
        ValueError: The pass needs the plans of all ranks; or (when run) there is no such rank.
    """
    if not callable(ranks):
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Collection):
            raise TypeError(f"on_ranks takes ranks, [0, 1], or a function of a rank, not {ranks!r}")
        if any(index(rank) < 0 for rank in ranks):
            raise ValueError(f"ranks are numbered from 0: {ranks!r}")
    inner, chosen = chain(step), ranks if callable(ranks) else frozenset(ranks)
    if inner.scope == "world":
        raise ValueError(f"{inner!r} needs the plans of all ranks, not of some")
    is_chosen = chosen if callable(chosen) else chosen.__contains__

    def run(plans: tuple[P, ...]) -> tuple[P, ...]:
        plans = ranked(plans)
        count = plans[0].world_size if plans else None
        beyond = [] if callable(chosen) or count is None else [r for r in chosen if r >= count]
        if beyond:
            raise ValueError(f"on_ranks names {span(beyond)}, and there are only {count} ranks")
        return _on_some(
            plans,
            lambda plan: plan.rank is not None and is_chosen(plan.rank),
            lambda some: run_pass(inner, some),
        )

    def undo() -> Step[P]:
        return on_ranks(ranks, inverse(step))

    outer = Step(on_ranks, (ranks, step), {}, "rank", run, undo, shows_rank=True)
    return combined(outer, as_steps(step))


def _on_some(
    plans: tuple[P, ...], chosen: Callable[[P], bool], run: Callable[[tuple[P, ...]], tuple[P, ...]]
) -> tuple[P, ...]:
    """Run a function over the chosen plans, and put the others back in between."""
    which = [chosen(plan) for plan in plans]
    if not any(which):
        return plans
    done = iter(run(tuple(plan for plan, is_chosen in zip(plans, which, strict=True) if is_chosen)))
    return tuple(
        next(done) if is_chosen else plan for plan, is_chosen in zip(plans, which, strict=True)
    )


def _route(plans: Plans, labels: Labels, passes: Mapping[Any, Passes[SavePlan]]) -> Plans:
    """Run each pass over the items with its label; the parts keep their places in the plan."""
    catalogs = catalogs_of(plans)
    parts: list[list[WriteItems]] = [[] for _ in plans]
    places: list[list[Ints]] = [[] for _ in plans]
    last = plans
    for label, step in passes.items():
        rows = {at: np.flatnonzero(labels[at] == label) for at in catalogs}
        taken = {at: Catalog.of(c.heads[row] for row in rows[at]) for at, c in catalogs.items()}
        subset = []
        for now, plan in zip(last, plans, strict=True):
            at = id(plan.items.catalog)
            mine = np.flatnonzero(np.isin(plan.items.row, rows[at]))
            items = plan.items.take(mine)
            items = items.recatalog(taken[at], readonly(np.searchsorted(rows[at], items.row)))
            subset.append((mine, attrs.evolve(now, items=items, held=plan.holds)))
        # The next part sees this one's data.
        last = run_pass(chain(step), tuple(plan for _, plan in subset))
        for own, into, (mine, _), plan in zip(parts, places, subset, last, strict=True):
            own.append(plan.items)
            into.append(_places(mine, len(plan.items)))
    merge = lru_cache(merge_catalogs)  # ranks share catalogs, by identity
    return tuple(
        attrs.evolve(now, items=_joined(own, into, merge), held=plan.holds)
        for now, plan, own, into in zip(last, plans, parts, places, strict=True)
    )


def _places(before: Ints, count: int) -> Ints:
    """Return where the items of a part go: to their places, or, if cut, to that of the first."""
    return before if len(before) == count else np.full(count, before[0] if len(before) else 0)


def _joined(
    parts: Sequence[WriteItems], places: Sequence[Ints], merge: Callable[..., Merged]
) -> WriteItems:
    """Return the items of all parts under one catalog, which includes rows without items."""
    catalog, numbers = merge(*(part.catalog for part in parts))
    pairs = zip(parts, numbers, strict=True)
    items = WriteItems.concat([p.recatalog(catalog, readonly(n[p.row])) for p, n in pairs])
    place = np.concatenate(places)
    in_order = bool((place[1:] >= place[:-1]).all())
    return items if in_order else items.take(np.argsort(place, kind="stable"))


def _refuse_strays(plans: Plans, labels: Labels, passes: Mapping[str, object]) -> None:
    """Refuse names whose label has no pass; they would be lost silently."""
    stray: dict[str, str] = {}
    for plan in plans:
        of, names = labels[id(plan.items.catalog)], plan.items.catalog.names
        lost = np.flatnonzero(~np.isin(of, list(passes))) if len(of) else plan.items.row[:0]
        for row in lost[np.isin(lost, plan.items.row)].tolist():
            stray[names[row]] = of[row]
    if stray:
        known = ", ".join(map(repr, passes))
        only = f"and there are passes for {known} only"
        raise PlanError(
            Issue("label", name, f"`{name}` is labelled {of!r}, {only}")
            for name, of in sorted(stray.items())
        )
