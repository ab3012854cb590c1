"""Agree on one plan for a save, on all ranks, in the cheapest safe way.

Every rank offers fingerprints of its plan and its values; the coordinator compares them
(`compare_saves`). A *cached* plan is that of an earlier save of the same layout. A *derived* one
follows from meshes and placements on every rank: each distinct description of what ranks hold, as
of the stages of a pipeline, is sent once. Else the coordinator *gathers* all plans.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import attrs
import numpy as np

from shardplan.dist import Comm, Turn, all_reduce, decode_json, encode_json, fail_alike, take_step
from shardplan.planning import (
    Issue,
    Passes,
    PlanError,
    SaveOffer,
    SavePlan,
    SaveVerdict,
    compare_saves,
    conflicts,
    decode_plan,
    encode_plan,
    renumbered,
    table_tag,
    tag_of_parts,
)
from shardplan.planning.columns import pack, unpack
from shardplan.planning.mesh import Description, JoinedPlans
from shardplan.planning.passes import Stages

from ._offers import Agreement, Begun, Local, Offer, PlanCache
from ._passes import Planned, Ran, decoded, joined, plan_rest, run_together
from ._report import Stopwatch

if TYPE_CHECKING:
    from shardplan.planning import PlannerTrace

T = TypeVar("T")

_STEP: Final = "plan the save"
_TAG: Final = 32  # letters of a fingerprint
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
    trace: bool = False,
) -> Agreed[T]:
    """Agree on one plan for a save, on all ranks.

    ``begin`` returns this rank's state dict and target; it is called once. If anything fails on any
    rank, all raise a CheckpointError; a single rank raises the error itself.
    """
    planning = _Planning(comm, cache or _default_cache, watch, verify_replicas)
    stages = Stages.of(planner)
    if comm.world_size == 1:
        return planning.alone(lambda: Local(begin(), comm, planner, trace))
    offer, verdict = planning.exchange(lambda: Local(begin(), comm, planner, trace))
    save_id, local = verdict.save_id, offer.local
    early: PlannerTrace | None = None
    if stages.needs_all:
        with watch.phase("exchange"):
            own = partial(Turn[None], None, local.present)
            passed = run_together(comm, stages, own, watch, trace=trace)
        offer, verdict = planning.exchange(lambda: local, (passed.plan, passed.shared))
        early = passed.trace
    agreement = planning.settle(offer, verdict)
    agreement = attrs.evolve(agreement, trace=joined(agreement.trace, early))
    if verdict.speakers:
        with watch.phase("exchange"):
            _refuse_differences(comm, offer.table, verdict.speakers)
    return Agreed(local.begun, agreement, save_id)


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
                done = plan_rest(Ran(offer.plans[:1], offer.local.ran.trace), offer.last)
                agreement = Agreement(done.whole.plans[0], "alone", "", done.whole, done.trace)
                agreement = self._remember(offer, agreement)
        return Agreed(offer.local.begun, agreement, offer.message.save_id)

    def exchange(
        self, local: Callable[[], Local[T]], passed: tuple[SavePlan, SavePlan] | None = None
    ) -> tuple[Offer[T], SaveVerdict]:
        """Make an offer on every rank, and compare them; raise if they contradict each other."""

        def offer() -> Turn[Offer[T]]:
            made = self._offer(local, passed)
            return Turn(made, attrs.astuple(made.message))

        def compare(offers: list[Any]) -> Turn[None]:
            known = [SaveOffer(*fields) for fields in offers]
            verdict = compare_saves(known, self.comm.ranks, self.comm.coordinator)
            return Turn(None, attrs.astuple(verdict))

        with self.watch.phase("exchange"):
            taken = take_step(self.comm, _STEP, offer, compare)
        verdict = SaveVerdict(*taken.reply)
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
                offer = offer.with_description()
        with self.watch.phase("verify"):
            return offer.with_table(self.verify_replicas)

    def settle(self, offer: Offer[T], verdict: SaveVerdict) -> Agreement:
        """Take the plan that all ranks have or can derive, or let the coordinator plan for all."""
        if verdict.how == "cached" and offer.cached is not None:
            return attrs.evolve(offer.cached, how="cached")
        derived = self._derive(offer, verdict) if verdict.how == "derived" else None
        if derived is not None:
            return self._remember(offer, derived)
        with self.watch.phase("exchange"):
            taken = take_step(
                self.comm,
                _STEP,
                lambda: Turn(None, _packed(offer)),
                lambda blobs: self._plan_all(blobs, offer),
                each=True,
            )
        tag, done = taken.reply[:_TAG].decode(), taken.whole
        if done is None:
            mine = cast(SavePlan, decode_plan(taken.reply[_TAG:]))
            agreement = Agreement(mine, "gathered", tag, trace=offer.local.ran.trace)
        else:
            mine = done.whole.plans[self.comm.rank]
            agreement = Agreement(mine, "gathered", tag, done.whole, done.trace)
        return self._remember(offer, agreement)

    def _derive(self, offer: Offer[T], verdict: SaveVerdict) -> Agreement | None:
        """Derive the complete plan; None, on all ranks, if that is impossible after all."""
        with self.watch.phase("exchange"):
            world = self._joined(offer, verdict)
        if offer.local.planner is None:  # the same for the same descriptions
            with self.watch.phase("plan"):
                return offer.derived(world)

        def made() -> tuple[Agreement | None, str]:
            with self.watch.phase("plan"):
                derived = offer.derived(world)
            return derived, "" if derived is None else derived.tag

        with self.watch.phase("exchange"):
            taken = take_step(
                self.comm, _STEP, lambda: Turn(*made()), lambda tags: Turn(None, len({*tags}) == 1)
            )
        return taken.mine if taken.reply else None

    def _joined(self, offer: Offer[T], verdict: SaveVerdict) -> JoinedPlans:
        """Return what all ranks hold; each distinct description is sent once."""
        mine = offer.described
        assert mine is not None
        if not verdict.by_template:
            mine = mine.on(self.comm.rank)
        if not verdict.describers:
            return JoinedPlans([mine], [0] * self.comm.world_size)
        describes = self.comm.rank in verdict.describers
        own = mine.tag.encode() + zlib.compress(mine.encoded if describes else b"")
        _, parts = unpack(zlib.decompress(all_reduce(self.comm, _STEP, lambda: own, _collected)))
        which = parts.pop("part")
        return JoinedPlans([Description.decoded(parts[str(n)]) for n in range(len(parts))], which)

    def _remember(self, offer: Offer[T], agreement: Agreement) -> Agreement:
        if offer.key is not None:
            self.cache.put(offer.key, agreement)
        return agreement

    def _plan_all(self, blobs: list[bytes], offer: Offer[Any]) -> Turn[Planned]:
        """Plan for all ranks, on the coordinator."""
        with self.watch.phase("plan"):
            parts = [unpack(blob)[1] for blob in blobs]
            ran = Ran(decoded(part["plan"] for part in parts), offer.local.ran.trace)
            meta = [decode_json(part["meta"]) for part in parts]
            try:
                done = plan_rest(ran, offer.last, meta)
            except PlanError as error:
                raise PlanError(renumbered(error.issues, self.comm.ranks)) from None
            tag = tag_of_parts(part["plan"] for part in parts).encode()
            return Turn(done, [tag + encode_plan(plan) for plan in done.whole.plans])


def _collected(sent: list[bytes]) -> bytes:
    """Collect the distinct descriptions, and which of them each rank has."""
    tags = [data[:_TAG].decode() for data in sent]
    number = {tag: n for n, tag in enumerate(dict.fromkeys(tags))}
    known = [zlib.decompress(sent[tags.index(tag)][_TAG:]) for tag in number]
    parts = {"part": np.array([number[tag] for tag in tags])}
    return zlib.compress(pack({}, parts | {str(n): data for n, data in enumerate(known)}), 9)


def _packed(offer: Offer[Any]) -> bytes:
    """Encode this rank's plan, and the names of its tensors on the meta device."""
    meta = encode_json(offer.local.saved_meta)
    return pack({}, {"plan": encode_plan(offer.plans[0]), "meta": meta})


def _refuse_differences(comm: Comm, table: Mapping[str, int], speakers: Sequence[int]) -> None:
    """Raise, on all ranks, if some hold different values or small tensors under one name."""

    def compare(sent: list[tuple[str, Mapping[str, int]]]) -> list[tuple[str, str, list[int]]]:
        tags, tables = zip(*sent, strict=True)
        return [(i.fqn, i.message, list(i.ranks)) for i in conflicts(comm.ranks, tags, tables)]

    mine = (table_tag(table), table if comm.rank in speakers else {})
    issues = all_reduce(comm, "compare values", lambda: mine, compare)
    if issues:
        fail_alike(comm, _STEP, PlanError([Issue("conflict", *fields) for fields in issues]))
