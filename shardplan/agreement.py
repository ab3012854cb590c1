"""Who writes what? All ranks come to one plan, by the cheapest way that is sure.

- *Cached*: every rank has the layout that it had when a plan was made before. Only a fingerprint
  is exchanged.
- *Derived*: meshes and placements tell every rank what all others hold. Each makes the whole plan
  by itself, and only its fingerprint is exchanged.
- *Gathered*: the coordinator gets every rank's plan and gives each its part of the whole one.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import attrs
import numpy as np

from shardplan.dist import Comm, all_reduce, reduce_scatter
from shardplan.io.values import store_values
from shardplan.planning import (
    Issue,
    Metadata,
    Pass,
    PlanError,
    SavePlan,
    WorldPlans,
    decode_plan,
    decode_plans,
    derive_plans,
    encode_plan,
    fingerprint,
    flatten,
    global_plan,
    local_plan,
)
from shardplan.planning.flatten import is_tensor
from shardplan.planning.packing import pack, unpack

from .layouts import holds_objects, layout_key, whole_layout
from .ranks import fail_alike, told_apart
from .replicas import compare_replicas, replica_sums
from .reports import Stopwatch

__all__ = ["Agreement", "PlanCache", "agree", "default_cache"]

_STEP: Final = "plan the save"
_TAG: Final = 32  # letters of a fingerprint
_TOLD: Final = 8  # ranks that an error tells by both their numbers
_DERIVED_ITEMS: Final = 1 << 22  # items of all ranks together that each rank will plan by itself


@attrs.frozen(eq=False)
class Agreement:
    """What all ranks agreed on.

    Attributes:
        plan: What this rank writes.
        how: How it came to be: see the module.
        tag: A fingerprint of the whole plan, the same on all ranks.
        plans, metadata: The whole plan; only the coordinator is sure to have it.
    """

    plan: SavePlan
    how: Literal["alone", "cached", "derived", "gathered"]
    tag: str
    plans: Sequence[SavePlan] | None = None
    metadata: Metadata | None = None


class PlanCache:
    """Plans by what they were made of, the last few of them.

    A key holds all that a plan depends on, so nothing in here can be out of date: a layout, or,
    where a planner may do anything with it, what the planner made of it.

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
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
            return found

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


_cache: Final = PlanCache()


def default_cache() -> PlanCache:
    """Return the cache that is used where none is given."""
    return _cache


def agree(
    comm: Comm,
    state: Callable[[], Mapping[Any, Any]],
    *,
    planner: Pass[SavePlan] | None,
    watch: Stopwatch,
    cache: PlanCache | None = None,
    verify_replicas: bool = False,
    first: Callable[[], str] = lambda: "",
) -> tuple[Mapping[Any, Any], Agreement, str]:
    """Come to one plan for a save, on all ranks.

    Args:
        comm: The ranks.
        state: Returns this rank's state dict; called once.
        planner: The pass to apply to each rank's plan, if any.
        watch: Gets the seconds of the phases open, plan and exchange.
        cache: Where to look for a plan made before, and to keep this one.
        verify_replicas: Whether to compare what several ranks claim to hold alike; then plans are
            gathered in any case.
        first: Called before anything else; what it raises on any rank, all raise. It returns what
            is saved to, which must be the same on all ranks.

    Returns:
        The state dict, the agreement, and a name for the save, the same on all ranks.

    Raises:
        CheckpointError: Anything went wrong on any rank; with a single rank, whatever did.
    """
    cache = default_cache() if cache is None else cache
    offer = _Offer(comm, state, planner, cache, first)
    if comm.world_size == 1:
        with watch.phase("plan"):
            offer.prepare(watch, derive=False)
            found = offer.cached
            if found is None:
                plans, metadata = global_plan((offer.local,))
                found = offer.keep(Agreement(plans[0], "alone", "", plans, metadata))
            else:
                found = attrs.evolve(found, how="cached")
        return offer.sd, found, offer.save_id
    with watch.phase("exchange"):
        save_id, way, apart = all_reduce(
            comm,
            _STEP,
            lambda: offer.make(watch, derive=not verify_replicas),
            lambda offers: _compared(offers, comm),
        )
    if apart:
        text = f"ranks were told to save to different places ({apart}); give all the same"
        fail_alike(comm, _STEP, ValueError(text))
    if way == "cached" and offer.cached is not None and not verify_replicas:
        found = attrs.evolve(offer.cached, how="cached")
    elif way == "derived" and offer.derived is not None and not verify_replicas:
        found = offer.keep(offer.derived)
    else:
        found = offer.keep(_gather(comm, offer, watch, verify_replicas=verify_replicas))
    return offer.sd, found, save_id


def _compared(offers: Sequence[tuple[str, str, str, str]], comm: Comm) -> tuple[str, str, str]:
    """Return, given what each rank offers: the save's name, a way to the plan, what is wrong.

    >>> from shardplan.dist import solo
    >>> _compared([("save", "", "f00", "here")], solo())
    ('save', 'derived', '')
    """
    names, cached, derived, places = zip(*offers, strict=True)
    ways = {"cached": set(cached), "derived": set(derived)}
    sure = [way for way, tags in ways.items() if len(tags) == 1 and "" not in tags]
    return names[comm.coordinator], (*sure, "gathered")[0], told_apart(comm.ranks, places)


class _Offer:
    """What one rank brings: a plan it knows already, one it can derive, or just its own part."""

    def __init__(
        self,
        comm: Comm,
        state: Callable[[], Mapping[Any, Any]],
        planner: Pass[SavePlan] | None,
        cache: PlanCache,
        first: Callable[[], str],
    ) -> None:
        self.comm, self.state, self.planner = comm, state, planner
        self.cache, self.first = cache, first
        self.save_id = secrets.token_hex(6)
        self.place = ""
        self.sd: Mapping[Any, Any] = {}
        self.key: Hashable = None
        self.cached: Agreement | None = None
        self.derived: Agreement | None = None
        self._local: SavePlan | None = None

    def make(self, watch: Stopwatch, derive: bool) -> tuple[str, str, str, str]:
        """Return what to tell the others: a name, tags of the plans it could use, and where to."""
        with watch.phase("plan"):
            self.prepare(watch, derive)
        tags = (a.tag if a is not None else "" for a in (self.cached, self.derived))
        return (self.save_id, *tags, self.place)  # type: ignore[return-value]

    def prepare(self, watch: Stopwatch, derive: bool) -> None:
        """Look for a known plan; if there is none, plan this rank's part."""
        with watch.phase("open"):
            self.place = self.first()
        self.sd = self.state()
        # A planner may look at anything, so that it is asked every time.
        key = layout_key(self.sd) if self.planner is None else fingerprint(self.local)
        ranks = (tuple(self.comm.ranks), self.comm.rank, self.comm.coordinator)
        self.key = None if key is None else _Key(key, ranks)
        self.cached = None if self.key is None else self.cache.get(self.key)
        new = self.cached is None
        if self.comm.world_size > 1 and (new or holds_objects(self.sd)):
            # What cannot be stored is refused, also if another rank will write it.
            store_values({k: v for k, v in self.flat.items() if not is_tensor(v)})
        if self.cached is None and derive:
            self.derived = self._derive()

    @cached_property
    def flat(self) -> Mapping[str, Any]:
        """The state dict, flattened."""
        return flatten(self.sd)[0]

    @property
    def local(self) -> SavePlan:
        """This rank's plan, passed through the planner."""
        if self._local is None:
            self._local = _passed(self.planner, local_plan(self.sd))
        return self._local

    def keep(self, agreement: Agreement) -> Agreement:
        """Remember an agreement for the next save."""
        if self.key is not None:
            self.cache.put(self.key, agreement)
        return agreement

    def _derive(self) -> Agreement | None:
        own = local_plan(self.sd)
        if self.planner is None:
            self._local = own
        whole = whole_layout(self.flat, own, self.comm)
        if whole is None:
            return None
        plans: Sequence[SavePlan]
        if self.planner is None:
            plans, metadata = derive_plans(whole)
        elif len(whole) * len(own.items) > _DERIVED_ITEMS:
            return None  # a pass may do anything: every rank's plan would have to be made
        else:
            plans, metadata = global_plan([_passed(self.planner, plan) for plan in whole])
        tag = _tag([_described(whole), fingerprint(metadata)])
        mine = self.comm.rank == self.comm.coordinator
        known = (plans, metadata) if mine else (None, None)
        return Agreement(plans[self.comm.rank], "derived", tag, *known)


@attrs.frozen(cache_hash=True)
class _Key:
    """All that a plan depends on."""

    layout: Hashable
    ranks: Hashable


def _described(whole: WorldPlans) -> str:
    return repr((whole.mesh, dict(whole.specs), whole.values, whole.planner_data))


def _passed(planner: Pass[SavePlan] | None, plan: SavePlan) -> SavePlan:
    return plan if planner is None else planner((plan,))[0]


def _gather(comm: Comm, offer: _Offer, watch: Stopwatch, *, verify_replicas: bool) -> Agreement:
    """Have the coordinator plan for all."""
    whole: list[tuple[Sequence[SavePlan], Metadata]] = []

    def own() -> bytes:
        parts = {"plan": encode_plan(offer.local)}
        if verify_replicas:
            with watch.phase("verify"):
                parts["sums"] = replica_sums(offer.flat, offer.local).astype("<u8").tobytes()
        return pack({}, parts)

    def plan_all(blobs: list[bytes]) -> list[bytes]:
        with watch.phase("plan"):
            parts = [unpack(blob)[1] for blob in blobs]
            plans = decode_plans(part["plan"] for part in parts)
            if verify_replicas:
                sums = [np.frombuffer(part["sums"], "<u8") for part in parts]
                compare_replicas(plans, sums, comm.ranks)  # type: ignore[arg-type]
            try:
                done, metadata = global_plan(plans)  # type: ignore[arg-type]
            except PlanError as error:
                raise PlanError(_renumbered(error.issues, comm.ranks)) from None
            whole.append((done, metadata))
            tag = _tag([part["plan"] for part in parts]).encode()
            return [tag + encode_plan(plan) for plan in done]

    with watch.phase("exchange"):
        mine = reduce_scatter(comm, _STEP, own, plan_all, encode=bytes, decode=bytes)
    plans, metadata = whole[0] if whole else (None, None)
    plan = plans[comm.rank] if plans is not None else decode_plan(mine[_TAG:])
    assert isinstance(plan, SavePlan)
    return Agreement(plan, "gathered", mine[:_TAG].decode(), plans, metadata)


def _renumbered(issues: Sequence[Issue], ranks: Sequence[int]) -> list[Issue]:
    """Say whom issues mean by ranks, where the job numbers them otherwise than the group does.

    >>> str(*_renumbered([Issue("gap", "w", "rank 1 lacks `w`", [1])], [4, 6]))
    'rank 1 lacks `w` (rank 1 of this group is rank 6 of the job)'
    """
    if list(ranks) == list(range(len(ranks))):
        return list(issues)
    told = []
    for issue in issues:
        places = issue.ranks or range(len(ranks))
        pairs = [f"rank {place} of this group is rank {ranks[place]}" for place in places[:_TOLD]]
        text = f"{issue.message} ({', '.join(pairs)} of the job)"
        own = [ranks[place] for place in issue.ranks]
        told.append(attrs.evolve(issue, message=text, ranks=own))
    return told


def _tag(parts: Sequence[bytes | str]) -> str:
    """Return the fingerprint of some texts, one after the other.

    >>> _tag(["ab", "c"]) == _tag(["a", "bc"])
    False
    """
    digest = hashlib.blake2b(digest_size=_TAG // 2)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
