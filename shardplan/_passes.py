"""Run the passes of a planner over plans, and trace them if that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from shardplan import planning
from shardplan.planning import Pass, SavePlan, WholePlan, chain, plan_whole

if TYPE_CHECKING:  # reports are loaded when one is asked for
    from shardplan.planning import PlannerTrace


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
