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
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar, cast

import attrs

from ..frozen import FrozenDict, freeze
from ..plans import LoadPlan, SavePlan

_HINT: Final = "mark it with @world_pass to be given all plans"

P = TypeVar("P", SavePlan, LoadPlan)
F = TypeVar("F", bound=Callable[..., Any])
Scope = Literal["rank", "world"]
Pass = Callable[[tuple[P, ...]], tuple[P, ...]]
Passes = Pass[P] | Sequence[Pass[P]]
"""What a planner may be: a pass, or several, which run one after the other."""


class _List(tuple[Any, ...]):
    """A list among the arguments of a pass: a tuple that prints as a list."""

    __slots__ = ()


def frozen(value: Any) -> Any:
    """Freeze an argument of a pass; what was a list still prints as one."""
    if isinstance(value, (list, _List)) or type(value) is tuple:
        return (tuple if type(value) is tuple else _List)(map(frozen, value))
    if isinstance(value, Mapping):
        return FrozenDict.of_frozen({freeze(key): frozen(inner) for key, inner in value.items()})
    return freeze(value)


def _ordered(value: Any) -> Any:
    """Return what is compared of an argument: the order of a mapping counts, as in `cast`."""
    if isinstance(value, Mapping):
        return FrozenDict, tuple((key, _ordered(inner)) for key, inner in value.items())
    return tuple(map(_ordered, value)) if type(value) in (tuple, _List) else value


@attrs.frozen(repr=False)
class Step(Generic[P]):
    """A pass of shardplan: a value that knows its scope and prints as it was written."""

    factory: Callable[..., Any]  # the function that made it
    # The arguments of that function, frozen.
    args: tuple[Any, ...] = attrs.field(converter=frozen, eq=_ordered)
    options: Mapping[str, Any] = attrs.field(converter=frozen, eq=_ordered)
    scope: Scope  # ``"rank"`` or ``"world"``
    # From plans to plans. A rank pass may get several plans at once, and treats each as if it were
    # alone.
    run: Callable[[tuple[P, ...]], tuple[P, ...]] = attrs.field(eq=False)
    # A function that returns the pass that undoes this one, or raises a ValueError; or a text that
    # says why there is none. See `inverse`.
    undo: Callable[[], Step[P]] | str = attrs.field(
        default="the plans before it cannot be known after it", eq=False
    )
    # Whether the pass only decides which holder of a replica writes it. Such a pass means nothing
    # for a load and cannot lose data.
    assigns: bool = attrs.field(default=False, eq=False)
    # Whether the pass shows plans, which know their rank, to a user's function.
    shows_rank: bool = attrs.field(default=False, eq=False)
    # Whether a pass that has an inverse leaves all names as they are.
    keeps_names: bool = attrs.field(default=False, eq=False)

    def __call__(self, plans: tuple[P, ...]) -> tuple[P, ...]:
        """Run the pass over one plan per rank."""
        return self.run(plans)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.factory, self.args, dict(self.options))

    def __repr__(self) -> str:
        known = inspect.signature(self.factory).parameters
        words = [shown(value) for value in self.args]
        for name, value in self.options.items():
            if value != known[name].default:
                words.append(f"{name}={shown(value)}")
        return f"{self.factory.__name__}({', '.join(words)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # for Hypothesis, which would list the fields


def _made(factory: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    return factory(*args, **options)


def shown(value: Any) -> str:
    """Return an argument of a pass as it was written, as far as that is known."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if type(value) in (tuple, _List):
        inner = ", ".join(map(shown, value))
        comma = "," if len(value) == 1 else ""
        return f"[{inner}]" if isinstance(value, _List) else f"({inner}{comma})"
    if isinstance(value, frozenset) and value:
        return "{" + ", ".join(sorted(map(shown, value))) + "}"
    name = getattr(value, "__name__", "")
    path = getattr(value, "__qualname__", name)
    text = (name if "<locals>" in path else path) or repr(value)
    return text if "\n" not in text else f"<{text.partition(chr(10))[0]}>"


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
    steps = as_steps(passes)
    return combined(
        Step(chain, passes, {}, "rank", partial(_run_all, steps), partial(_undo_all, steps)), steps
    )


def _run_all(steps: Sequence[Pass[P]], plans: tuple[P, ...]) -> tuple[P, ...]:
    for step in steps:
        plans = run_pass(step, plans)
    return plans


def _undo_all(steps: Sequence[Pass[P]]) -> Step[P]:
    return chain(*map(inverse, reversed(steps)))


def combined(outer: Step[P], steps: Sequence[Pass[P]]) -> Step[P]:
    """Return a pass that runs others, ``steps``, with the facts that follow from theirs."""
    return attrs.evolve(
        outer,
        scope="world" if "world" in map(scope_of, steps) else "rank",
        shows_rank=outer.shows_rank or any(map(may_see_rank, steps)),
        keeps_names=all(map(keeps_names, steps)),
    )


def inverse(step: Passes[P]) -> Step[P]:
    """Return the pass that undoes a pass: plans that went through both are what they were.

    A chain is undone in reverse order.

    >>> from shardplan.planning import rename
    >>> inverse(chain(rename({"a": "b"}), rename({"c": "d"})))
    chain(rename({'d': 'c'}), rename({'b': 'a'}))

    Raises:
        ValueError: A pass has no inverse; it says which and why.
    """
    if not callable(step):
        return inverse(chain(step))
    if not isinstance(step, Step):
        raise ValueError(f"{_name(step)} is a function, and only passes of shardplan have inverses")
    if isinstance(step.undo, str):
        raise ValueError(f"{step!r} has no inverse: {step.undo}")
    return step.undo()


def as_steps(passes: Passes[P] | Iterable[Passes[P]] | None) -> tuple[Pass[P], ...]:
    """Return a planner as a flat tuple of passes.

    >>> from shardplan.planning import cast, drop
    >>> as_steps([drop("a"), chain(drop("b"), [cast("bfloat16")])])
    (drop('a'), drop('b'), cast('bfloat16'))
    """
    return () if passes is None else _steps(passes)


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
    """A planner, cut at its first world pass."""

    # The rank passes before the cut; each rank runs them over its own plan.
    own: tuple[Pass[P], ...]
    # The first world pass and all passes after it; run where all plans are known.
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


def keeps_names(step: Callable[..., Any]) -> bool:
    """Return True if a pass that has an inverse leaves all names as they are."""
    return isinstance(step, Step) and step.keeps_names


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
    plans = ranked(plans)
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


def ranked(plans: tuple[P, ...]) -> tuple[P, ...]:
    """Number plans by position, unless all of them know their rank."""
    return positioned(plans) if any(plan.rank is None for plan in plans) else plans


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
