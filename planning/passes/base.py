"""Passes: pure functions from one plan per rank to one plan per rank, and how they are run.

Any ``Callable[[tuple[Plan, ...]], tuple[Plan, ...]]`` is a pass. Its *scope* decides what it is
given, wherever it runs (`save`, `load`, `convert`, `global_plan`, torch's planners):

- a ``"rank"`` pass gets one plan at a time, with ``plan.rank`` and ``plan.world_size`` set;
- a ``"world"`` pass gets the plans of all ranks, in rank order.

A plain function is a rank pass unless `world_pass` marks it. Only `run_pass` calls passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Generic, Literal, TypeVar, cast

import attrs
import numpy as np

from ..columns.arrays import readonly
from ..columns.items import Catalog, Merged, WriteItems, merge_catalogs
from ..errors import Issue, PlanError
from ..plans import LoadPlan, SavePlan

__all__ = [
    "Pass",
    "Passes",
    "Stages",
    "Step",
    "as_steps",
    "chain",
    "may_see_rank",
    "named_chain",
    "only_assigns",
    "partition",
    "positioned",
    "run_pass",
    "scope_of",
    "world_pass",
]

_HINT: Final = "mark it with @world_pass to be given all plans"

P = TypeVar("P", SavePlan, LoadPlan)
F = TypeVar("F", bound=Callable[..., Any])
Scope = Literal["rank", "world"]
Pass = Callable[[tuple[P, ...]], tuple[P, ...]]
Passes = Pass[P] | Sequence[Pass[P]]
"""What a planner may be: a pass, or several, which run one after the other."""


@attrs.frozen(repr=False)
class Step(Generic[P]):
    """A pass that ships with shardplan: it knows its scope and prints as it was written.

    Attributes:
        factory: The function that made it.
        args, options: The arguments of that function.
        scope: ``"rank"`` or ``"world"``.
        run: The implementation; called with the plans, then ``args`` and ``options``. A rank pass
            may get several plans at once, and treats each as if it were alone.
        assigns: Whether the pass only decides which holder of a replica writes it. Such a pass
            means nothing for a load and cannot lose data.
        shows_rank: Whether the pass shows plans, which know their rank, to a user's function.
    """

    factory: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    scope: Scope
    run: Callable[..., tuple[P, ...]] = attrs.field(eq=False)
    assigns: bool = attrs.field(default=False, eq=False)
    shows_rank: bool = attrs.field(default=False, eq=False)

    def __call__(self, plans: tuple[P, ...]) -> tuple[P, ...]:
        """Run the pass over one plan per rank."""
        return self.run(plans, *self.args, **self.options)

    def __repr__(self) -> str:
        known = inspect.signature(self.factory).parameters
        shown = [_shown(value) for value in self.args]
        for name, value in self.options.items():
            if value != known[name].default:
                shown.append(f"{name}={_shown(value)}")
        return f"{self.factory.__name__}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and any(map(callable, value.values())):
        return "{" + ", ".join(f"{k!r}: {_shown(v)}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, Step) else getattr(value, "__name__", repr(value))


def world_pass(run: F) -> F:
    """Mark a function as a pass over the plans of all ranks; unmarked ones get one plan at a time.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan
    >>> @world_pass
    ... def only_the_last_writes(plans):
    ...     return (*(attrs.evolve(plan, items=[]) for plan in plans[:-1]), plans[-1])
    >>> plans = [local_plan({"w": TensorSpec((4,))})] * 3
    >>> [len(plan.items) for plan in global_plan(plans, only_the_last_writes)[0]]
    [0, 0, 1]
    """
    run.scope = "world"  # type: ignore[attr-defined]
    return run


def scope_of(step: Callable[..., Any]) -> Scope:
    """Return the scope of a pass."""
    while isinstance(step, partial) and not hasattr(step, "scope"):
        step = step.func
    scope = getattr(step, "scope", "rank")
    if scope not in ("rank", "world"):
        raise ValueError(f'the scope of a pass is "rank" or "world", not {scope!r}: {step!r}')
    return cast(Scope, scope)


def chain(*passes: Passes[P]) -> Step[P]:
    """Return the pass that runs ``passes`` one after the other, each in its scope.

    Without any, it is the identity. A list of passes counts as a chain of them.

    >>> chain()((SavePlan([]),)) == (SavePlan([]),)
    True

    Raises:
        ValueError: When run, if a pass returns more or fewer plans than it was given.
    """
    steps: tuple[Pass[P], ...] = as_steps(passes)
    seen = any(map(may_see_rank, steps))
    return Step(chain, passes, {}, _widest(steps), _chain, shows_rank=seen)


def _chain(plans: tuple[P, ...], *passes: Passes[P]) -> tuple[P, ...]:
    for step in as_steps(passes):
        plans = run_pass(step, plans)
    return plans


def _widest(steps: Iterable[Callable[..., Any]]) -> Scope:
    return "world" if "world" in map(scope_of, steps) else "rank"


def as_steps(passes: Passes[P] | Iterable[Passes[P]] | None) -> tuple[Pass[P], ...]:
    """Return a planner as a flat tuple of passes.

    >>> from shardplan.planning import cast, drop
    >>> as_steps([drop("a"), chain(drop("b"), [cast("bfloat16")])])
    (drop('a'), drop('b'), cast('bfloat16'))
    """
    if passes is None:
        return ()
    return _steps(passes)


def _steps(passes: object) -> tuple[Any, ...]:
    if isinstance(passes, Step) and passes.factory is chain:
        return _steps(passes.args)
    if callable(passes):
        return (passes,)
    if isinstance(passes, (str, Mapping)) or not isinstance(passes, Iterable):
        raise TypeError(
            f"a pass is a function from plans to plans, and a planner one or a list of them, "
            f"not {passes!r}"
        )
    return tuple(step for one in passes for step in _steps(one))


@attrs.frozen
class Stages(Generic[P]):
    """A planner, cut at its first world pass.

    Attributes:
        own: The rank passes before the cut; each rank runs them over its own plan.
        rest: The first world pass and all passes after it; run where all plans are known.
    """

    own: tuple[Pass[P], ...]
    rest: tuple[Pass[P], ...]

    @classmethod
    def of(cls, planner: Passes[P] | None, *, load: bool = False) -> Stages[P]:
        """Cut a planner; for a load, leave out passes that only assign writers.

        They stay if a later pass is shown plans, since it may depend on the assignment.

        >>> from shardplan.planning import cast, dedup_replicas, drop, split_replicas
        >>> Stages.of([drop("a"), split_replicas(), cast("int8")])
        Stages(own=(drop('a'),), rest=(split_replicas(), cast('int8')))
        >>> Stages.of([drop("a"), split_replicas(), cast("int8")], load=True)
        Stages(own=(drop('a'), cast('int8')), rest=())
        """
        steps = as_steps(planner)
        if load:
            shown = max((n for n, step in enumerate(steps) if may_see_rank(step)), default=-1)
            pairs = enumerate(steps)
            steps = tuple(s for n, s in pairs if n < shown or not only_assigns(s))
        cut = next((n for n, s in enumerate(steps) if scope_of(s) == "world"), len(steps))
        return cls(steps[:cut], steps[cut:])

    @property
    def needs_all(self) -> bool:
        """Whether ``rest`` does more than assign writers, so that it must run in one place."""
        return not all(map(only_assigns, self.rest))

    @property
    def rest_text(self) -> str:
        """The text of ``rest``, equal in every process."""
        return ", ".join(repr(s) if only_assigns(s) else _name(s) for s in self.rest)


def only_assigns(step: Callable[..., Any]) -> bool:
    """Return True if a pass only decides which holder of a replica writes it."""
    return isinstance(step, Step) and step.assigns


def may_see_rank(step: Callable[..., Any]) -> bool:
    """Return True if the result of a pass may depend on ``plan.rank``."""
    return step.shows_rank if isinstance(step, Step) else True


def _name(step: Callable[..., Any]) -> str:
    return step.factory.__name__ if isinstance(step, Step) else getattr(step, "__name__", "a pass")


def named_chain(
    **passes: Passes[P],
) -> Callable[[tuple[P, ...]], tuple[tuple[P, ...], dict[str, tuple[P, ...]]]]:
    """Return a function that runs named passes and also returns the plans after each of them.

    >>> from shardplan.planning import TensorSpec, drop, local_plan
    >>> plan = local_plan({"w": TensorSpec((2,)), "tmp": 1})
    >>> plans, after = named_chain(clean=drop("tmp"))((plan,))
    >>> [len(p.items) for p in after["clean"]]
    [1]
    """
    return partial(_named_chain, {name: chain(step) for name, step in passes.items()})


def _named_chain(
    passes: Mapping[str, Pass[P]], plans: tuple[P, ...]
) -> tuple[tuple[P, ...], dict[str, tuple[P, ...]]]:
    after: dict[str, tuple[P, ...]] = {}
    for name, step in passes.items():
        plans = after[name] = run_pass(step, plans)
    return plans, after


def run_pass(step: Pass[P], plans: tuple[P, ...]) -> tuple[P, ...]:
    """Run a pass in its scope, and check that it returns as many plans as it was given.

    Plans without a rank are numbered by position. A pass cannot change a plan's rank, its world
    size, or the record of what the rank holds.
    """
    if any(plan.rank is None for plan in plans):
        plans = positioned(plans)
    if isinstance(step, Step) or scope_of(step) == "world":
        done = _returned(step, plans, step(plans))
    else:
        done = tuple(_run_on(step, plan) for plan in plans)
    kept = [after.following(before) for before, after in zip(plans, done, strict=True)]
    same = all(a is b for a, b in zip(kept, done, strict=True))
    return done if same else tuple(kept)  # a `World` that knows its rows stays one


def _run_on(step: Pass[P], plan: P) -> P:
    """Run a user's function over one rank's plan."""
    try:
        return _returned(step, (plan,), step((plan,)))[0]
    except IndexError as error:
        error.add_note(f"pass {_name(step)} was given the plan of rank {plan.rank} only; {_HINT}")
        raise


def _returned(step: Pass[P], plans: tuple[P, ...], done: object) -> tuple[P, ...]:
    """Return the result of a pass after checking the number and type of its plans."""
    name = _name(step)
    if done is None or isinstance(done, Step):
        what = "None: is its `return` missing?" if done is None else f"{done!r}: call it first"
        raise ValueError(f"pass {name} must return plans, and returned {what}")
    if not isinstance(done, tuple) or len(done) != len(plans):
        got = f"a tuple of {len(done)}" if isinstance(done, tuple) else f"a {type(done).__name__}"
        many = "a tuple of 1 plan" if len(plans) == 1 else f"a tuple of {len(plans)} plans"
        short = isinstance(done, tuple) and scope_of(step) != "world"
        hint = f"; {_HINT}" if short else ""
        raise ValueError(f"pass {name} was given {many} and returned {got}{hint}")
    for before, after in zip(plans, done, strict=True):
        if type(after) is not type(before):
            kinds = f"{type(before).__name__}s and returned a {type(after).__name__}"
            raise ValueError(f"pass {name} was given {kinds} among them")
    return done


def positioned(plans: Iterable[P]) -> tuple[P, ...]:
    """Set the rank and world size of plans that are given in rank order."""
    known = tuple(plans)
    places = [(rank, len(known)) for rank in range(len(known))]
    if [(plan.rank, plan.world_size) for plan in known] == places:
        return known
    return tuple(
        attrs.evolve(plan, rank=rank, world_size=count)
        for plan, (rank, count) in zip(known, places, strict=True)
    )


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
    seen = any(may_see_rank(chain(step)) for step in passes.values())
    scope = _widest(map(chain, passes.values()))
    return Step(partition, (label, passes), {}, scope, _partition, shows_rank=seen)


def _partition(
    plans: tuple[SavePlan, ...],
    label: Callable[[str], str],
    passes: Mapping[str, Passes[SavePlan]],
) -> tuple[SavePlan, ...]:
    catalogs = {id(plan.items.catalog): plan.items.catalog for plan in plans}
    labels = {at: np.array([label(n) for n in c.names], object) for at, c in catalogs.items()}
    _refuse_strays(plans, labels, passes)
    parts: list[list[WriteItems]] = [[] for _ in plans]
    last = plans
    for name, step in passes.items():
        rows = {at: np.flatnonzero(of == name) for at, of in labels.items()}
        taken = {
            at: Catalog.of(c.heads[r] for r in rows[at].tolist()) for at, c in catalogs.items()
        }
        subset = []
        for now, plan in zip(last, plans, strict=True):
            at = id(plan.items.catalog)
            mine = plan.items.take(np.isin(plan.items.row, rows[at]))
            items = mine.recatalog(taken[at], readonly(np.searchsorted(rows[at], mine.row)))
            subset.append(attrs.evolve(now, items=items, held=plan.holds))
        last = run_pass(chain(step), tuple(subset))  # the next part sees this one's data
        for own, plan in zip(parts, last, strict=True):
            own.append(plan.items)
    merge = lru_cache(merge_catalogs)  # ranks share catalogs, by identity
    return tuple(
        attrs.evolve(now, items=_joined(own, merge), held=plan.holds)
        for now, plan, own in zip(last, plans, parts, strict=True)
    )


def _joined(parts: Sequence[WriteItems], merge: Callable[..., Merged]) -> WriteItems:
    """Return the items of all parts under one catalog, which includes rows without items."""
    catalog, numbers = merge(*(part.catalog for part in parts))
    pairs = zip(parts, numbers, strict=True)
    return WriteItems.concat([p.recatalog(catalog, readonly(n[p.row])) for p, n in pairs])


def _refuse_strays(
    plans: tuple[SavePlan, ...], labels: Mapping[int, Any], passes: Mapping[str, object]
) -> None:
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
