"""Run the passes of a planner over plans, and trace them if that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import attrs

from shardplan import planning
from shardplan.dist import Comm, Turn, take_step
from shardplan.planning import (
    Pass,
    SavePlan,
    WholePlan,
    chain,
    decode_plan,
    decode_plans,
    encode_plan,
    plan_whole,
    with_replicas,
)
from shardplan.planning.columns import pack, unpack
from shardplan.planning.passes import Stages

from ._report import Stopwatch

if TYPE_CHECKING:  # reports are loaded when one is asked for
    from shardplan.planning import PlannerTrace

M = TypeVar("M")


@attrs.frozen(eq=False)
class Ran:
    """Plans after some passes, and, if it was asked for, what each pass did."""

    plans: tuple[SavePlan, ...]
    trace: PlannerTrace | None = None


@attrs.frozen(eq=False)
class Planned:
    """Who writes what, and, if it was asked for, what each pass did."""

    whole: WholePlan
    trace: PlannerTrace | None = None


def run_passes(passes: Sequence[Pass[SavePlan]], plans: Sequence[SavePlan], *, trace: bool) -> Ran:
    """Run passes over the plans of some ranks.

    >>> from shardplan.planning import drop, local_plan
    >>> plan = local_plan({"w": 1, "tmp": 2})
    >>> run_passes([drop("tmp")], [plan], trace=True).trace.steps[0].step
    "drop('tmp')"
    """
    if trace:
        return Ran(*planning.traced(passes, plans))
    return Ran(chain(*passes)(tuple(plans)))


def plan_rest(
    ran: Ran, passes: Sequence[Pass[SavePlan]], meta: Sequence[Sequence[str]] = ()
) -> Planned:
    """Run the remaining passes over all plans, and decide who writes what; see `plan_whole`."""
    if ran.trace is None:
        return Planned(plan_whole(ran.plans, passes, meta))
    last = run_passes(passes, ran.plans, trace=True)
    return Planned(plan_whole(last.plans, (), meta), joined(ran.trace, last.trace))


def joined(first: PlannerTrace | None, then: PlannerTrace | None) -> PlannerTrace | None:
    """Return two traces as one; None if nothing was traced.

    >>> joined(None, planning.PlannerTrace()), joined(None, None)
    (No passes: plans stay as they are, None)
    """
    return first + then if first and then else first or then


@attrs.frozen(eq=False)
class Passed(Generic[M]):
    """What a rank kept, its plan after `run_together`, and that plan `with_replicas`."""

    mine: M
    plan: SavePlan
    shared: SavePlan
    trace: PlannerTrace | None = None


def run_together(
    comm: Comm,
    stages: Stages[SavePlan],
    own: Callable[[], Turn[M]],
    watch: Stopwatch,
    *,
    trace: bool = False,
) -> Passed[M]:
    """Run the world passes of a planner, and all after them, on the coordinator.

    Every rank must call this. The message of ``own`` is the rank's plan after its own passes.
    """

    def mine() -> Turn[M]:
        with watch.phase("plan"):
            turn = own()
            return Turn(turn.kept, encode_plan(turn.message))

    def run(blobs: list[bytes]) -> Turn[Ran]:
        with watch.phase("plan"):
            given = decoded(blobs)
            ran = run_passes(stages.rest, given, trace=trace)
            shared = with_replicas(ran.plans, given)
            return Turn(ran, list(map(_packed_pair, ran.plans, shared)))

    done = take_step(comm, "run passes", mine, run, each=True)
    parts = unpack(done.reply)[1]
    plan = cast(SavePlan, decode_plan(parts["plan"]))
    shared = cast(SavePlan, decode_plan(parts["shared"])) if "shared" in parts else plan
    return Passed(done.mine, plan, shared, done.whole.trace if done.whole else None)


def _packed_pair(plan: SavePlan, shared: SavePlan) -> bytes:
    parts = {"plan": encode_plan(plan)}
    return pack({}, parts if shared is plan else parts | {"shared": encode_plan(shared)})


def decoded(blobs: Iterable[bytes]) -> tuple[SavePlan, ...]:
    """Decode the plans of several ranks."""
    return cast("tuple[SavePlan, ...]", decode_plans(blobs))
