"""One plan for a save, agreed on by all ranks in the cheapest way that is certain.

- *Cached*: every rank has the layout that it had when a plan was made before. Only a fingerprint
  is exchanged.
- *Derived*: meshes and placements say what every rank holds. Each rank makes the whole plan by
  itself, and only its fingerprint is exchanged.
- *Gathered*: the coordinator gets every rank's plan and gives each rank its part of the whole one.

The steps of `agree`:

1. Every rank makes an offer: fingerprints of the plan that it knows or derives, and of its values.
2. The coordinator compares the offers and decides how to go on (`_compare`).
3. If passes need the plans of all ranks, the coordinator runs them, and ranks offer once more.
4. Every rank takes the plan that it has, or the coordinator plans for all.
5. If ranks hold different values under one name, all of them raise.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, Generic, Literal, TypeVar, cast

import attrs
import numpy as np

from shardplan.dist import Comm, all_reduce, decode_json, encode_json, reduce_scatter
from shardplan.io import store_values
from shardplan.planning import (
    Issue,
    Pass,
    Passes,
    Path,
    PlanError,
    SavePlan,
    WholePlan,
    chain,
    decode_plan,
    decode_plans,
    derive_plans,
    encode_plan,
    fingerprint,
    flatten,
    is_tensor,
    local_plan,
    plan_contents,
    plan_whole,
    renumbered,
    tag_of_parts,
    with_replicas,
)
from shardplan.planning.columns import WriteItems, pack, unpack
from shardplan.planning.mesh import described_plans, layout_key, on_meta
from shardplan.planning.passes import Stages

from ._comm import Kept, fail_alike, keep_step, told_apart
from ._replicas import compare_replicas, differences, digests, replica_sums, tag_of
from ._report import Stopwatch
from ._state import per_rank_names

__all__ = ["Agreed", "Agreement", "Begun", "PlanCache", "agree", "run_together"]

T = TypeVar("T")
How = Literal["alone", "cached", "derived", "gathered"]

_STEP: Final = "plan the save"
_TAG: Final = 32  # letters of a fingerprint
_DERIVED_ITEMS: Final = 1 << 22  # items of all ranks together that each rank plans by itself
_PLAIN: Final = frozenset((str, int, float, bool, type(None)))
_bytes_step: Final = partial(reduce_scatter, encode=bytes, decode=bytes)


@attrs.frozen(eq=False)
class Agreement:
    """The plan that all ranks agreed on.

    Attributes:
        plan: What this rank writes.
        how: How the plan came to be: see the module.
        tag: A fingerprint of the whole plan, the same on all ranks.
        whole: The plans of all ranks; only the coordinator is sure to have them.
    """

    plan: SavePlan
    how: How
    tag: str
    whole: WholePlan | None = None


@attrs.frozen(eq=False)
class Begun(Generic[T]):
    """What a rank brings to a save.

    Attributes:
        sd: Its state dict.
        target: Where to save; its text must be the same on all ranks.
    """

    sd: Mapping[Any, Any]
    target: T


@attrs.frozen(eq=False)
class Agreed(Generic[T]):
    """What `agree` returns: what this rank brought, its plan, and the name of the save."""

    begun: Begun[T]
    agreement: Agreement
    save_id: str


class PlanCache:
    """The plans of the last few layouts.

    A key holds everything that a plan depends on, so no entry can be out of date: a layout, or,
    with a planner, the plan that it made of the layout.

    Args:
        entries: How many are kept.
    """

    def __init__(self, entries: int = 8) -> None:
        self._entries = entries
        self._plans: OrderedDict[Hashable, Agreement] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Agreement | None:
        """Return what is known under a key."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
            return self._plans.get(key)

    def put(self, key: Hashable, agreement: Agreement) -> None:
        """Remember an agreement."""
        with self._lock:
            self._plans[key] = agreement
            self._plans.move_to_end(key)
            while len(self._plans) > self._entries:
                self._plans.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._plans.clear()


_default_cache: Final = PlanCache()


def agree(
    comm: Comm,
    begin: Callable[[], Begun[T]],
    *,
    planner: Passes[SavePlan] | None,
    watch: Stopwatch,
    cache: PlanCache | None = None,
    verify_replicas: bool = False,
) -> Agreed[T]:
    """Come to one plan for a save, on all ranks.

    Args:
        comm: The ranks.
        begin: Returns what this rank brings; called once. What it raises on any rank, all raise.
        planner: The passes to apply, if any. Rank passes that come before the first world pass run
            on each rank; that one, and what comes after it, on the coordinator.
        watch: Gets the seconds of the phases plan, verify and exchange.
        cache: Where to look for a plan made before, and to keep this one; by default the one of
            this process.
        verify_replicas: Whether to compare all chunks that several ranks hold; then plans are
            always gathered.

    Raises:
        CheckpointError: Anything went wrong on any rank; with a single rank, the error itself.
    """
    cache = _default_cache if cache is None else cache
    planning = _Planning(comm, planner, Stages.of(planner), cache, watch, verify_replicas)
    if comm.world_size == 1:
        return planning.alone(begin)
    offer, verdict = planning.exchange(lambda: _Local(begin(), comm, planning.stages))
    save_id, local = verdict.save_id, offer.local
    if planning.stages.needs_all:
        with watch.phase("exchange"):
            passed = run_together(comm, planning.stages, lambda: local.present, watch)
        offer, verdict = planning.exchange(lambda: local, passed)
    agreement = planning.settle(offer, verdict.how)
    if verdict.speakers:
        with watch.phase("exchange"):
            _refuse_differences(comm, offer, verdict.speakers)
    return Agreed(local.begun, agreement, save_id)


def run_together(
    comm: Comm, stages: Stages[SavePlan], own: Callable[[], SavePlan], watch: Stopwatch
) -> tuple[SavePlan, SavePlan]:
    """Run the passes of a planner that need the plans of all ranks, on the coordinator.

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
            plans = chain(*stages.rest)(_decoded(blobs))
            pairs = zip(plans, with_replicas(plans), strict=True)
            return [pack({}, _plan_parts(plan, shared)) for plan, shared in pairs]

    parts = unpack(_bytes_step(comm, "run passes", mine, run))[1]
    plan = cast(SavePlan, decode_plan(parts["plan"]))
    return plan, cast(SavePlan, decode_plan(parts["shared"])) if "shared" in parts else plan


def _plan_parts(plan: SavePlan, shared: SavePlan) -> dict[str, bytes]:
    """Encode a plan, and what it shares with other ranks if that is another plan."""
    parts = {"plan": encode_plan(plan)}
    return parts if shared is plan else parts | {"shared": encode_plan(shared)}


def _decoded(blobs: Iterable[bytes]) -> tuple[SavePlan, ...]:
    return cast("tuple[SavePlan, ...]", decode_plans(blobs))


# What a rank brings


@attrs.frozen(eq=False, slots=False)
class _Local(Generic[T]):
    """What a rank brings, and the plans of it; each is made when it is first needed."""

    begun: Begun[T]
    comm: Comm
    stages: Stages[SavePlan]

    @property
    def sd(self) -> Mapping[Any, Any]:
        """The state dict."""
        return self.begun.sd

    @cached_property
    def flattened(self) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
        """The state dict, flattened, and the path of each value."""
        return flatten(self.sd)

    @property
    def flat(self) -> Mapping[str, Any]:
        """The state dict, flattened."""
        return self.flattened[0]

    @cached_property
    def own(self) -> SavePlan:
        """This rank's plan, before any pass."""
        plan = local_plan(self.sd)
        return attrs.evolve(plan, rank=self.comm.rank, world_size=self.comm.world_size)

    @cached_property
    def passed(self) -> SavePlan:
        """The plan after the passes that look at it alone."""
        return chain(*self.stages.own)((self.own,))[0]

    @cached_property
    def present(self) -> SavePlan:
        """The same without tensors on the meta device: this rank does not hold them."""
        plan = self.passed
        if not self.meta:
            return plan
        items, held = (part.take(~self._is_meta(part)) for part in (plan.items, plan.holds))
        return attrs.evolve(plan, items=items, held=held)

    @cached_property
    def meta(self) -> frozenset[str]:
        """Tensors on the meta device here: other ranks may hold their elements."""
        if self.comm.world_size == 1:
            return frozenset()  # refused when they are written
        return frozenset(name for name, value in self.flat.items() if on_meta(value))

    @property
    def meta_names(self) -> list[str]:
        """Those of them that are to be saved."""
        items = self.passed.items
        rows = items.row[self._is_meta(items)].tolist() if self.meta else ()
        return sorted({items.catalog.sources[row] for row in rows})

    def _is_meta(self, items: WriteItems) -> Any:
        return np.array([source in self.meta for source in items.catalog.sources], bool)[items.row]


@attrs.frozen(cache_hash=True)
class _Key:
    """All that a plan depends on."""

    layout: Hashable
    ranks: Hashable


@attrs.frozen(eq=False)
class _Offer(Generic[T]):
    """What one rank offers.

    Attributes:
        local: What it brings.
        passed: What `run_together` made of its plan, once it was called.
        key: The key of the plan in the cache; None if it cannot be cached.
        cached: The plan that was made before.
        derived: The plan that the rank derived.
        table: The digests of what must be the same on all ranks that hold it.
    """

    local: _Local[T]
    passed: tuple[SavePlan, SavePlan] | None = None
    key: _Key | None = None
    cached: Agreement | None = None
    derived: Agreement | None = None
    table: Mapping[str, int] | None = None

    @property
    def plan(self) -> SavePlan:
        """This rank's plan, after all passes that were run so far."""
        return self.local.present if self.passed is None else self.passed[0]

    @property
    def shared(self) -> SavePlan:
        """The same with what passes gave to another rank: what to compare between ranks."""
        return self.local.present if self.passed is None else self.passed[1]

    @property
    def last(self) -> tuple[Pass[SavePlan], ...]:
        """The passes that are left for `global_plan`."""
        return self.local.stages.rest if self.passed is None else ()

    @cached_property
    def sent(self) -> _Sent:
        """What the coordinator is sent of it."""
        return _Sent(
            secrets.token_hex(6),
            "" if self.cached is None else self.cached.tag,
            "" if self.derived is None else self.derived.tag,
            str(self.local.begun.target),
            self.local.stages.rest_text,
            "" if self.table is None else tag_of(self.table),
        )


@attrs.frozen
class _Sent:
    """An offer as it travels: a name for the save, and the fingerprints of what the rank has."""

    save_id: str
    cached: str
    derived: str
    target: str
    passes: str
    held: str


@attrs.frozen
class _Verdict:
    """What the coordinator makes of all offers.

    Attributes:
        save_id: The name of the save.
        how: How ranks get their plan.
        targets, passes: Which ranks have which, if they differ.
        speakers: If ranks hold different values: the first rank of each kind, by place.
    """

    save_id: str
    how: How
    targets: str
    passes: str
    speakers: tuple[int, ...]


def _compare(offers: Sequence[_Sent], comm: Comm) -> _Verdict:
    """Compare the offers of all ranks.

    >>> from shardplan.dist import solo
    >>> _compare([_Sent("save", "", "f00", "here", "", "a5")], solo())
    _Verdict(save_id='save', how='derived', targets='', passes='', speakers=())
    """
    how: How = "gathered"
    if _all_have_one([offer.derived for offer in offers]):
        how = "derived"
    if _all_have_one([offer.cached for offer in offers]):
        how = "cached"
    first: dict[str, int] = {}
    for place, offer in enumerate(offers):
        first.setdefault(offer.held, place)
    return _Verdict(
        offers[comm.coordinator].save_id,
        how,
        told_apart(comm.ranks, [offer.target for offer in offers]),
        told_apart(comm.ranks, [offer.passes for offer in offers]),
        tuple(first.values()) if len(first) > 1 else (),
    )


def _all_have_one(tags: Sequence[str]) -> bool:
    return bool(tags[0]) and len(set(tags)) == 1


@attrs.frozen(eq=False)
class _Planning:
    """The arguments of `agree`, and the steps that use them."""

    comm: Comm
    planner: Passes[SavePlan] | None
    stages: Stages[SavePlan]
    cache: PlanCache
    watch: Stopwatch
    verify_replicas: bool

    def alone(self, begin: Callable[[], Begun[T]]) -> Agreed[T]:
        """Plan for a single rank."""
        with self.watch.phase("plan"):
            offer = self._looked_up(_Offer(_Local(begin(), self.comm, self.stages)))
            if offer.cached is not None:
                found = attrs.evolve(offer.cached, how="cached")
            else:
                whole = plan_whole((offer.plan,), offer.last)
                found = self._remembered(offer, Agreement(whole.plans[0], "alone", "", whole))
        return Agreed(offer.local.begun, found, offer.sent.save_id)

    def exchange(
        self, local: Callable[[], _Local[T]], passed: tuple[SavePlan, SavePlan] | None = None
    ) -> tuple[_Offer[T], _Verdict]:
        """Make an offer on every rank, and compare all of them; raise where they contradict."""

        def offer() -> Kept[_Offer[T]]:
            made = self._offer(local, passed)
            return Kept(made, attrs.astuple(made.sent))

        def compare(offers: list[Any]) -> Kept[None]:
            return Kept(None, attrs.astuple(_compare([_Sent(*sent) for sent in offers], self.comm)))

        with self.watch.phase("exchange"):
            taken = keep_step(self.comm, _STEP, offer, compare)
        verdict = _Verdict(*taken.got)
        if verdict.targets:
            text = f"ranks save to different places ({verdict.targets}); give all the same"
            fail_alike(self.comm, _STEP, ValueError(text))
        if verdict.passes:
            text = (
                f"ranks were given different passes over the plans of all ranks ({verdict.passes})"
            )
            fail_alike(self.comm, _STEP, ValueError(f"{text}; give all the same"))
        return taken.mine, verdict

    def _offer(
        self, local: Callable[[], _Local[T]], passed: tuple[SavePlan, SavePlan] | None
    ) -> _Offer[T]:
        """Look for a plan that is known or can be derived, and digest what is to be compared."""
        with self.watch.phase("plan"):
            offer = _Offer(local(), passed)
            if self.stages.needs_all and passed is None:
                return offer  # these passes come first
            offer = self._looked_up(offer)
            _refuse_values(offer.local.flat, known=offer.cached is not None)
            if offer.cached is None and not self.verify_replicas:
                offer = attrs.evolve(offer, derived=self._derived(offer))
        with self.watch.phase("verify"):
            flat, paths = offer.local.flattened
            # Without a planner, what is stored is known without planning.
            plan = None if self.planner is None else offer.shared
            table = digests(flat, plan, own=per_rank_names(offer.local.sd, paths))
            return attrs.evolve(offer, table=table)

    def _looked_up(self, offer: _Offer[T]) -> _Offer[T]:
        """Return an offer with the plan that was made before, if there is one."""
        if self.planner is None:
            layout = layout_key(offer.local.sd)
        elif self.stages.needs_all and offer.passed is None:
            return offer
        else:  # a planner may look at anything, so it is run every time
            made = (fingerprint(plan) for plan in (offer.plan, offer.local.own))
            layout = (*made, *map(repr, offer.last))
        if layout is None:
            return offer
        key = _Key(layout, (tuple(self.comm.ranks), self.comm.rank, self.comm.coordinator))
        return attrs.evolve(offer, key=key, cached=self.cache.get(key))

    def _remembered(self, offer: _Offer[T], agreement: Agreement) -> Agreement:
        if offer.key is not None:
            self.cache.put(offer.key, agreement)
        return agreement

    def _derived(self, offer: _Offer[T]) -> Agreement | None:
        """Make the whole plan from what this rank knows of the others; None if it cannot."""
        local, rank, ranks = offer.local, self.comm.rank, self.comm.world_size
        if self.stages.needs_all or local.meta:
            return None
        world = described_plans(local.flat, local.own, rank, ranks)
        if world is None:
            return None
        described = repr((world.mesh, dict(world.specs), world.values, world.planner_data))
        if self.planner is None:
            whole = WholePlan(*derive_plans(world))
            tag = tag_of_parts([described, fingerprint(whole.metadata)])
        elif len(world) * len(local.own.items) > _DERIVED_ITEMS:
            return None  # a pass may do anything: every rank's plan would have to be made
        else:
            whole = plan_whole(chain(*self.stages.own)(tuple(world)), offer.last)
            made = plan_contents(whole.plans)
            tag = tag_of_parts([described, fingerprint(whole.metadata), *made])
        known = whole if rank == self.comm.coordinator else None
        return Agreement(whole.plans[rank], "derived", tag, known)

    def settle(self, offer: _Offer[T], how: How) -> Agreement:
        """Take the plan that all ranks have, or have the coordinator plan for all."""
        if not self.verify_replicas and how == "cached" and offer.cached is not None:
            return attrs.evolve(offer.cached, how="cached")
        if not self.verify_replicas and how == "derived" and offer.derived is not None:
            return self._remembered(offer, offer.derived)
        return self._remembered(offer, self._gathered(offer))

    def _gathered(self, offer: _Offer[T]) -> Agreement:
        """Have the coordinator plan for all."""
        with self.watch.phase("exchange"):
            taken = keep_step(
                self.comm,
                _STEP,
                lambda: Kept(None, self._packed(offer)),
                lambda blobs: self._plan_all(blobs, offer.last),
                collective=_bytes_step,
            )
        tag, whole = taken.got[:_TAG].decode(), taken.whole
        if whole is None:
            return Agreement(cast(SavePlan, decode_plan(taken.got[_TAG:])), "gathered", tag)
        return Agreement(whole.plans[self.comm.rank], "gathered", tag, whole)

    def _packed(self, offer: _Offer[T]) -> bytes:
        """Encode this rank's plan, and the checksums of its items if they are to be compared."""
        parts = {"meta": encode_json(offer.local.meta_names)}
        if not self.verify_replicas:
            return pack({}, parts | _plan_parts(offer.plan, offer.plan))
        with self.watch.phase("verify"):
            parts |= _plan_parts(offer.plan, offer.shared)
            sums = replica_sums(offer.local.flat, offer.shared)
            return pack({}, parts | {"sums": sums.astype("<u8").tobytes()})

    def _plan_all(self, blobs: list[bytes], last: Sequence[Pass[SavePlan]]) -> Kept[WholePlan]:
        """Plan for all ranks, on the coordinator."""
        ranks = self.comm.ranks
        with self.watch.phase("plan"):
            parts = [unpack(blob)[1] for blob in blobs]
            plans = _decoded(part["plan"] for part in parts)
            if self.verify_replicas:
                shared = _decoded(part.get("shared", part["plan"]) for part in parts)
                compare_replicas(shared, [np.frombuffer(p["sums"], "<u8") for p in parts], ranks)
            try:
                whole = plan_whole(plans, last, [decode_json(part["meta"]) for part in parts])
            except PlanError as error:
                raise PlanError(renumbered(error.issues, ranks)) from None
            tag = tag_of_parts(part["plan"] for part in parts).encode()
            return Kept(whole, [tag + encode_plan(plan) for plan in whole.plans])


def _refuse_values(flat: Mapping[str, Any], known: bool) -> None:
    """Refuse values that cannot be stored, also those that another rank will write.

    With a known plan, numbers and texts were looked at before.
    """
    plain = _PLAIN if known else frozenset[type]()
    store_values({k: v for k, v in flat.items() if type(v) not in plain and not is_tensor(v)})


def _refuse_differences(comm: Comm, offer: _Offer[Any], speakers: Sequence[int]) -> None:
    """Raise, on all ranks, if some hold different values or small tensors under one name."""

    def compare(sent: list[tuple[str, Mapping[str, int]]]) -> list[tuple[str, str, list[int]]]:
        tags, tables = zip(*sent, strict=True)
        return [(i.fqn, i.message, list(i.ranks)) for i in differences(comm.ranks, tags, tables)]

    table = offer.table if comm.rank in speakers else {}
    issues = all_reduce(comm, "compare values", lambda: (offer.sent.held, table), compare)
    if issues:
        fail_alike(comm, _STEP, PlanError([Issue("conflict", *fields) for fields in issues]))
