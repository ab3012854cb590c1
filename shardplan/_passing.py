"""Passes that need the plans of all ranks: the coordinator runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shardplan.dist import Comm, reduce_scatter
from shardplan.planning import (
    SavePlan,
    chain,
    decode_plan,
    decode_plans,
    encode_plan,
    with_replicas,
)
from shardplan.planning.columns import pack, unpack
from shardplan.planning.passes import Stages

from ._report import Stopwatch

__all__ = ["run_together"]


def run_together(
    comm: Comm, stages: Stages[SavePlan], own: Callable[[], SavePlan], watch: Stopwatch
) -> tuple[SavePlan, SavePlan]:
    """Run the passes of a planner that need the plans of all ranks.

    Args:
        comm: The ranks; every one must call this.
        stages: The planner; the coordinator's passes are run.
        own: Returns this rank's plan, after its own passes.
        watch: Gets the seconds of planning.

    Returns:
        This rank's plan after the passes; and the same with what they gave to another rank that
        holds it too, see `with_replicas`.

    Raises:
        CheckpointError: Anything went wrong on any rank.
    """

    def mine() -> bytes:
        with watch.phase("plan"):
            return encode_plan(own())

    def run(blobs: list[bytes]) -> list[bytes]:
        with watch.phase("plan"):
            plans = chain(*stages.rest)(cast("tuple[SavePlan, ...]", decode_plans(blobs)))
            pairs = zip(plans, with_replicas(plans), strict=True)
            return [_packed(plan, whole) for plan, whole in pairs]

    parts = unpack(reduce_scatter(comm, "run passes", mine, run, encode=bytes, decode=bytes))[1]
    plan = cast(SavePlan, decode_plan(parts["plan"]))
    return plan, cast(SavePlan, decode_plan(parts["whole"])) if "whole" in parts else plan


def _packed(plan: SavePlan, whole: SavePlan) -> bytes:
    parts = {"plan": encode_plan(plan)}
    return pack({}, parts if whole is plan else {**parts, "whole": encode_plan(whole)})
