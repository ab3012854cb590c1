"""Agreement of all ranks on one plan for a save, in the cheapest way that is certain.

- *Cached*: every rank has the layout of an earlier plan. Only a fingerprint is exchanged.
- *Derived*: meshes and placements determine what every rank holds. Each rank makes the complete
  plan by itself, and only its fingerprint is exchanged.
- *Gathered*: the coordinator collects every rank's plan and sends each rank its part of the result.

The steps of `agree`:

1. Every rank makes an offer: fingerprints of its cached or derived plan, and of its values.
2. The coordinator compares the offers and decides how to proceed (`_compare`).
3. If passes need the plans of all ranks, the coordinator runs them, and ranks offer once more.
4. Every rank takes the plan that it has, or the coordinator plans for all.
5. If ranks hold different values under one name, all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import attrs

from shardplan.dist import Comm, all_reduce, decode_json, encode_json, reduce_scatter
from shardplan.planning import (
    Issue,
    Pass,
    Passes,
    PlanError,
    SavePlan,
    WholePlan,
    chain,
    decode_plan,
    decode_plans,
    encode_plan,
    plan_whole,
    renumbered,
    tag_of_parts,
    with_replicas,
)
from shardplan.planning.columns import pack, unpack
from shardplan.planning.passes import Stages

from ._comm import Kept, fail_alike, keep_step, ranks_by_value
from ._offers import Agreement, Begun, How, Local, Offer, PlanCache, Sent
from ._replicas import differences, tag_of
from ._report import Stopwatch

__all__ = ["Agreed", "agree", "run_together"]

T = TypeVar("T")

_STEP: Final = "plan the save"
_TAG: Final = 32  # letters of a fingerprint
_bytes_step: Final = partial(reduce_scatter, encode=bytes, decode=bytes)
_default_cache: Final = PlanCache()


@attrs.frozen(eq=False)
class Agreed(Generic[T]):
    """The result of `agree`: this rank's input, its plan, and the name of the save."""

    begun: Begun[T]
    agreement: Agreement
    save_id: str


def agree(
    comm: Comm,
    begin: Callable[[], Begun[T]],
    *,
    planner: Passes[SavePlan] | None,
    watch: Stopwatch,
    cache: PlanCache | None = None,
    verify_replicas: bool = False,
) -> Agreed[T]:
    """Agree on one plan for a save, on all ranks.

    ``begin`` returns this rank's state dict and target; it is called once. If anything fails on any
    rank, all raise a CheckpointError; a single rank raises the error itself.
    """
    planning = _Planning(comm, cache or _default_cache, watch, verify_replicas)
    stages = Stages.of(planner)
    if comm.world_size == 1:
        return planning.alone(lambda: Local(begin(), comm, planner))
    offer, verdict = planning.exchange(lambda: Local(begin(), comm, planner))
    save_id, local = verdict.save_id, offer.local
    if stages.needs_all:
        with watch.phase("exchange"):
            passed = run_together(comm, stages, lambda: local.present, watch)
        offer, verdict = planning.exchange(lambda: local, passed)
    agreement = planning.settle(offer, verdict.how)
    if verdict.speakers:
        with watch.phase("exchange"):
            _refuse_differences(comm, offer.table, verdict.speakers)
    return Agreed(local.begun, agreement, save_id)


@attrs.frozen
class _Verdict:
    """The coordinator's decision about all offers.

    Attributes:
        save_id: The name of the save.
        how: How ranks get their plan.
        conflict: Arguments that differ between ranks and must not; empty if there are none.
        speakers: If ranks hold different values: one rank per distinct table, by position.
    """

    save_id: str
    how: How
    conflict: str
    speakers: tuple[int, ...]


def _compare(offers: Sequence[Sent], comm: Comm) -> _Verdict:
    """Compare the offers of all ranks."""
    tags = {"cached": {o.cached for o in offers}, "derived": {o.derived for o in offers}}
    ways = [how for how, found in tags.items() if len(found) == 1 and "" not in found]
    first: dict[str, int] = {}
    for place, offer in enumerate(offers):
        first.setdefault(offer.held, place)
    given = {
        "save to different places": [offer.target for offer in offers],
        "were given different passes over the plans of all ranks": [o.passes for o in offers],
    }
    apart = {what: ranks_by_value(comm.ranks, texts) for what, texts in given.items()}
    conflicts = [f"ranks {what} ({who}); give all the same" for what, who in apart.items() if who]
    return _Verdict(
        offers[comm.coordinator].save_id,
        cast(How, [*ways, "gathered"][0]),
        "".join(conflicts[:1]),
        tuple(first.values()) if len(first) > 1 else (),
    )


@attrs.frozen(eq=False)
class _Planning:
    """The arguments of `agree`, and the steps that use them."""

    comm: Comm
    cache: PlanCache
    watch: Stopwatch
    verify_replicas: bool

    def alone(self, local: Callable[[], Local[T]]) -> Agreed[T]:
        """Plan for a single rank."""
        with self.watch.phase("plan"):
            offer = Offer(local()).looked_up(self.cache)
            agreement = offer.cached and attrs.evolve(offer.cached, how="cached")
            if agreement is None:
                whole = plan_whole(offer.plans[:1], offer.last)
                agreement = self._remember(offer, Agreement(whole.plans[0], "alone", "", whole))
        return Agreed(offer.local.begun, agreement, offer.sent().save_id)

    def exchange(
        self, local: Callable[[], Local[T]], passed: tuple[SavePlan, SavePlan] | None = None
    ) -> tuple[Offer[T], _Verdict]:
        """Make an offer on every rank, and compare them; raise if they contradict each other."""

        def offer() -> Kept[Offer[T]]:
            made = self._offer(local, passed)
            return Kept(made, attrs.astuple(made.sent()))

        def compare(offers: list[Any]) -> Kept[None]:
            return Kept(None, attrs.astuple(_compare([Sent(*sent) for sent in offers], self.comm)))

        with self.watch.phase("exchange"):
            taken = keep_step(self.comm, _STEP, offer, compare)
        verdict = _Verdict(*taken.got)
        if verdict.conflict:
            fail_alike(self.comm, _STEP, ValueError(verdict.conflict))
        return taken.mine, verdict

    def _offer(
        self, local: Callable[[], Local[T]], passed: tuple[SavePlan, SavePlan] | None
    ) -> Offer[T]:
        with self.watch.phase("plan"):
            offer = Offer(local(), passed)
            if offer.early:
                return offer
            offer = offer.looked_up(self.cache)
            with self.watch.phase("verify"):
                offer.refuse_values()
            if offer.cached is None:
                offer = offer.with_derived()
        with self.watch.phase("verify"):
            return offer.with_table(self.verify_replicas)

    def settle(self, offer: Offer[T], how: How) -> Agreement:
        """Take the plan that all ranks have, or let the coordinator plan for all."""
        if how == "cached" and offer.cached is not None:
            return attrs.evolve(offer.cached, how="cached")
        if how == "derived" and offer.derived is not None:
            return self._remember(offer, offer.derived)
        with self.watch.phase("exchange"):
            taken = keep_step(
                self.comm,
                _STEP,
                lambda: Kept(None, _packed(offer)),
                lambda blobs: self._plan_all(blobs, offer.last),
                collective=_bytes_step,
            )
        tag, whole = taken.got[:_TAG].decode(), taken.whole
        mine = whole.plans[self.comm.rank] if whole else decode_plan(taken.got[_TAG:])
        return self._remember(offer, Agreement(cast(SavePlan, mine), "gathered", tag, whole))

    def _remember(self, offer: Offer[T], agreement: Agreement) -> Agreement:
        if offer.key is not None:
            self.cache.put(offer.key, agreement)
        return agreement

    def _plan_all(self, blobs: list[bytes], last: Sequence[Pass[SavePlan]]) -> Kept[WholePlan]:
        """Plan for all ranks, on the coordinator."""
        with self.watch.phase("plan"):
            parts = [unpack(blob)[1] for blob in blobs]
            plans = _decoded(part["plan"] for part in parts)
            try:
                whole = plan_whole(plans, last, [decode_json(part["meta"]) for part in parts])
            except PlanError as error:
                raise PlanError(renumbered(error.issues, self.comm.ranks)) from None
            tag = tag_of_parts(part["plan"] for part in parts).encode()
            return Kept(whole, [tag + encode_plan(plan) for plan in whole.plans])


def _packed(offer: Offer[Any]) -> bytes:
    """Encode this rank's plan, and the names of its tensors on the meta device."""
    meta = encode_json(offer.local.saved_meta)
    return pack({}, {"plan": encode_plan(offer.plans[0]), "meta": meta})


def _refuse_differences(comm: Comm, table: Mapping[str, int], speakers: Sequence[int]) -> None:
    """Raise, on all ranks, if some hold different values or small tensors under one name."""

    def compare(sent: list[tuple[str, Mapping[str, int]]]) -> list[tuple[str, str, list[int]]]:
        tags, tables = zip(*sent, strict=True)
        return [(i.fqn, i.message, list(i.ranks)) for i in differences(comm.ranks, tags, tables)]

    mine = (tag_of(table), table if comm.rank in speakers else {})
    issues = all_reduce(comm, "compare values", lambda: mine, compare)
    if issues:
        fail_alike(comm, _STEP, PlanError([Issue("conflict", *fields) for fields in issues]))


def run_together(
    comm: Comm, stages: Stages[SavePlan], own: Callable[[], SavePlan], watch: Stopwatch
) -> tuple[SavePlan, SavePlan]:
    """Run the world passes of a planner, and all after them, on the coordinator.

    Every rank must call this. ``own`` returns this rank's plan after its own passes.

    Returns:
        This rank's plan after the passes; and the same plan with the replicas that the passes
        assigned to other ranks, see `with_replicas`.
    """

    def mine() -> bytes:
        with watch.phase("plan"):
            return encode_plan(own())

    def run(blobs: list[bytes]) -> list[bytes]:
        with watch.phase("plan"):
            plans = chain(*stages.rest)(_decoded(blobs))
            return list(map(_packed_pair, plans, with_replicas(plans)))

    parts = unpack(_bytes_step(comm, "run passes", mine, run))[1]
    plan = cast(SavePlan, decode_plan(parts["plan"]))
    return plan, cast(SavePlan, decode_plan(parts["shared"])) if "shared" in parts else plan


def _packed_pair(plan: SavePlan, shared: SavePlan) -> bytes:
    parts = {"plan": encode_plan(plan)}
    return pack({}, parts if shared is plan else parts | {"shared": encode_plan(shared)})


def _decoded(blobs: Iterable[bytes]) -> tuple[SavePlan, ...]:
    return cast("tuple[SavePlan, ...]", decode_plans(blobs))
