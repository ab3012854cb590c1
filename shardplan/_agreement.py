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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.dist import Comm, all_reduce, decode_json, encode_json, reduce_scatter
from shardplan.io import store_values
from shardplan.planning import (
    DEFAULT_PASSES,
    Issue,
    Metadata,
    Pass,
    Passes,
    Path,
    PlanError,
    SavePlan,
    WorldPlans,
    chain,
    decode_plan,
    decode_plans,
    derive_plans,
    dropped_names,
    encode_plan,
    fingerprint,
    flatten,
    global_plan,
    is_tensor,
    local_plan,
    span,
)
from shardplan.planning.columns import WriteItems, pack, unpack
from shardplan.planning.passes import Stages

from ._comm import fail_alike, told_apart
from ._layouts import holds_objects, layout_key, on_meta, whole_layout
from ._passing import run_together
from ._per_rank import per_rank_names
from ._replicas import compare_replicas, differences, digests, replica_sums, tag_of
from ._report import Stopwatch

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
        dropped: The names in the state dict of what the planner left out on all ranks; only the
            coordinator is sure to know them.
    """

    plan: SavePlan
    how: Literal["alone", "cached", "derived", "gathered"]
    tag: str
    plans: Sequence[SavePlan] | None = None
    metadata: Metadata | None = None
    dropped: tuple[str, ...] = ()


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
    planner: Passes[SavePlan] | None,
    watch: Stopwatch,
    cache: PlanCache | None = None,
    verify_replicas: bool = False,
    first: Callable[[], str] = lambda: "",
) -> tuple[Mapping[Any, Any], Agreement, str]:
    """Come to one plan for a save, on all ranks.

    Args:
        comm: The ranks.
        state: Returns this rank's state dict; called once.
        planner: The passes to apply, if any. Rank passes that come before the first world pass run
            on each rank; that one, and what comes after it, on the coordinator.
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
                whole = _Whole.of((offer.local,), offer.last)
                found = offer.keep(Agreement(whole.plans[0], "alone", "", *whole.parts))
            else:
                found = attrs.evolve(found, how="cached")
        return offer.sd, found, offer.save_id
    save_id, way, speakers = _exchange(comm, offer, watch, verify_replicas)
    if offer.stages.needs_all:
        with watch.phase("exchange"):
            offer.take(run_together(comm, offer.stages, lambda: offer.local, watch))
        _, way, speakers = _exchange(comm, offer, watch, verify_replicas)
    if way == "cached" and offer.cached is not None and not verify_replicas:
        found = attrs.evolve(offer.cached, how="cached")
    elif way == "derived" and offer.derived is not None and not verify_replicas:
        found = offer.keep(offer.derived)
    else:
        found = offer.keep(_gather(comm, offer, watch, verify_replicas=verify_replicas))
    if speakers:
        with watch.phase("exchange"):
            _refuse_differences(comm, offer, speakers)
    return offer.sd, found, save_id


def _exchange(
    comm: Comm, offer: _Offer, watch: Stopwatch, verify_replicas: bool
) -> tuple[str, str, tuple[int, ...]]:
    """Compare what all ranks offer: see `_compared`; where they cannot go together, raise."""
    with watch.phase("exchange"):
        save_id, way, apart, planners, speakers = all_reduce(
            comm,
            _STEP,
            lambda: offer.make(watch, verify_replicas=verify_replicas),
            lambda offers: _compared(offers, comm),
        )
    if apart:
        text = f"ranks were told to save to different places ({apart}); give all the same"
        fail_alike(comm, _STEP, ValueError(text))
    if planners:
        text = f"ranks were given different passes over the plans of all ranks ({planners})"
        fail_alike(comm, _STEP, ValueError(f"{text}; give all the same"))
    return save_id, way, speakers


def _compared(
    offers: Sequence[tuple[str, str, str, str, str, str]], comm: Comm
) -> tuple[str, str, str, str, tuple[int, ...]]:
    """Return, given what each rank offers: the save's name, a way to the plan, what differs.

    That is: where ranks save to, and which passes they have for the coordinator to run. Last come
    the places of the ranks that are to say what they hold: the first of each sort, where there are
    several.

    >>> from shardplan.dist import solo
    >>> _compared([("save", "", "f00", "here", "", "a5")], solo())
    ('save', 'derived', '', '', ())
    """
    names, cached, derived, *texts, held = zip(*offers, strict=True)
    ways = {"cached": set(cached), "derived": set(derived)}
    sure = [way for way, tags in ways.items() if len(tags) == 1 and "" not in tags]
    sorts = dict(zip(reversed(held), reversed(range(len(held))), strict=True))
    speakers = tuple(sorted(sorts.values())) if len(sorts) > 1 else ()
    places, planners = (told_apart(comm.ranks, text) for text in texts)
    return names[comm.coordinator], (*sure, "gathered")[0], places, planners, speakers


def _refuse_differences(comm: Comm, offer: _Offer, speakers: Sequence[int]) -> None:
    """Raise, on all ranks, if some hold different values or small tensors under one name."""

    def compare(held: list[tuple[str, Mapping[str, int]]]) -> list[tuple[str, str, list[int]]]:
        tags, tables = zip(*held, strict=True)
        return [(i.fqn, i.message, list(i.ranks)) for i in differences(comm.ranks, tags, tables)]

    table = offer.table if comm.rank in speakers else {}
    found = all_reduce(comm, "compare values", lambda: (offer.held, table), compare)
    if found:
        fail_alike(comm, _STEP, PlanError([Issue("conflict", *fields) for fields in found]))


class _Offer:
    """What one rank brings: a plan it knows already, one it can derive, or just its own part."""

    def __init__(
        self,
        comm: Comm,
        state: Callable[[], Mapping[Any, Any]],
        planner: Passes[SavePlan] | None,
        cache: PlanCache,
        first: Callable[[], str],
    ) -> None:
        self.comm, self.state, self.planner = comm, state, planner
        self.stages = Stages.of(planner)
        self.cache, self.first = cache, first
        self.save_id = secrets.token_hex(6)
        self.place = ""
        self.sd: Mapping[Any, Any] = {}
        self.key: Hashable = None
        self.cached: Agreement | None = None
        self.derived: Agreement | None = None
        self.table: Mapping[str, int] = {}
        self.held = ""
        self._begun = False
        self._run: tuple[SavePlan, SavePlan] | None = None

    def make(
        self, watch: Stopwatch, *, verify_replicas: bool
    ) -> tuple[str, str, str, str, str, str]:
        """Return a name, tags of usable plans, where to, passes to run together, what is held."""
        with watch.phase("plan"):
            if self._waits:
                self._begin(watch)
            else:
                self.prepare(watch, derive=not verify_replicas)
        if not self._waits:
            with watch.phase("verify"):
                self._compare()
        cached, derived = (a.tag if a is not None else "" for a in (self.cached, self.derived))
        return self.save_id, cached, derived, self.place, self.stages.rest_text, self.held

    @property
    def _waits(self) -> bool:
        """Whether passes that need all plans are still to be run."""
        return self.stages.needs_all and self.comm.world_size > 1 and self._run is None

    def take(self, plans: tuple[SavePlan, SavePlan]) -> None:
        """Take what passes over the plans of all ranks made of this one's: see `run_together`."""
        self._run = plans

    @property
    def last(self) -> tuple[Pass[SavePlan], ...]:
        """The passes that are left for `global_plan`."""
        return () if self._run is not None else self.stages.rest

    def _compare(self) -> None:
        """Look at what must be the same on all ranks that hold it."""
        # Without a planner, nothing has to be planned to know what is stored.
        plan = None if self.planner is None else self.shared
        self.table = digests(self.flat, plan, own=per_rank_names(self.sd, self._flattened[1]))
        self.held = tag_of(self.table)

    def _begin(self, watch: Stopwatch) -> None:
        """Look at where to save to, and at the state dict."""
        if not self._begun:
            with watch.phase("open"):
                self.place = self.first()
            self.sd, self._begun = self.state(), True

    def prepare(self, watch: Stopwatch, derive: bool) -> None:
        """Look for a known plan; if there is none, plan this rank's part."""
        self._begin(watch)
        # A planner may look at anything, so that it is asked every time.
        key = layout_key(self.sd) if self.planner is None else self._planned()
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
    def _flattened(self) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
        """The state dict, flattened, and the way to each value."""
        return flatten(self.sd)

    @property
    def flat(self) -> Mapping[str, Any]:
        """The state dict, flattened."""
        return self._flattened[0]

    def _planned(self) -> Hashable | None:
        """Return all that a plan depends on, if there is a planner; None if nobody can tell."""
        if self.stages.needs_all and self._run is None:
            return None
        texts = [repr(step) for step in self.last]
        return fingerprint(self.local), fingerprint(self.own), *texts

    @cached_property
    def own(self) -> SavePlan:
        """This rank's plan, before any pass."""
        comm = self.comm
        return attrs.evolve(local_plan(self.sd), rank=comm.rank, world_size=comm.world_size)

    @cached_property
    def passed(self) -> SavePlan:
        """This rank's plan, after the passes that look at it alone."""
        return chain(*self.stages.own)((self.own,))[0]

    @cached_property
    def _present(self) -> SavePlan:
        """The same without what is on the meta device: this rank does not hold that."""
        plan = self.passed
        if not self._meta:
            return plan
        items, held = (part.take(~self._is_meta(part)) for part in (plan.items, plan.holds))
        return attrs.evolve(plan, items=items, held=held)

    @property
    def local(self) -> SavePlan:
        """The same after the passes that need the plans of all ranks, once these were run."""
        return self._present if self._run is None else self._run[0]

    @property
    def shared(self) -> SavePlan:
        """The same with what such passes gave to another rank: what to compare between ranks."""
        return self.local if self._run is None else self._run[1]

    @property
    def meta_names(self) -> list[str]:
        """The names, in the state dict, of tensors to save that are on the meta device here."""
        items = self.passed.items
        rows = items.row[self._is_meta(items)].tolist() if self._meta else ()
        return sorted({items.catalog.sources[row] for row in rows})

    @cached_property
    def _meta(self) -> frozenset[str]:
        """Tensors of the state dict that other ranks may hold, but not this one."""
        if self.comm.world_size == 1:
            return frozenset()  # refused when they are written
        return frozenset(name for name, value in self.flat.items() if on_meta(value))

    def _is_meta(self, items: WriteItems) -> npt.NDArray[np.bool_]:
        """Return which items of a plan are of such tensors."""
        mask = np.array([source in self._meta for source in items.catalog.sources], bool)
        return mask[items.row]

    def keep(self, agreement: Agreement) -> Agreement:
        """Remember an agreement for the next save."""
        if self.key is not None:
            self.cache.put(self.key, agreement)
        return agreement

    def _derive(self) -> Agreement | None:
        if self.stages.needs_all or self._meta:
            return None
        whole = whole_layout(self.flat, self.own, self.comm)
        if whole is None:
            return None
        if self.planner is None:
            planned = _Whole(*derive_plans(whole))
        elif len(whole) * len(self.own.items) > _DERIVED_ITEMS:
            return None  # a pass may do anything: every rank's plan would have to be made
        else:
            planned = _Whole.of(chain(*self.stages.own)(tuple(whole)), self.last)
        tag = _tag([_described(whole), fingerprint(planned.metadata), *self._made(planned)])
        mine = self.comm.rank == self.comm.coordinator
        known = planned.parts if mine else ()
        return Agreement(planned.plans[self.comm.rank], "derived", tag, *known)

    def _made(self, planned: _Whole) -> Iterator[bytes]:
        """Distinguish plans that this rank's planner makes for all ranks, and others' do not."""
        seen: dict[int, int] = {}
        for plan in planned.plans if self.planner is not None else ():
            items, catalog = plan.items, plan.items.catalog
            yield repr(seen.get(id(catalog), catalog.content)).encode()
            seen.setdefault(id(catalog), len(seen))
            columns = (items.row, items.offsets, items.sizes, items.shard_offsets)
            yield b"".join(column.tobytes() for column in columns)


@attrs.frozen(eq=False)
class _Whole:
    """The plan of all ranks, what describes it, and what it leaves out; see `Agreement`."""

    plans: Sequence[SavePlan]
    metadata: Metadata
    dropped: tuple[str, ...] = ()

    @classmethod
    def of(cls, plans: Sequence[SavePlan], last: Sequence[Pass[SavePlan]]) -> _Whole:
        """Decide who writes what, given each rank's plan, and the passes that are left."""
        done, metadata = global_plan(plans, [*last, *DEFAULT_PASSES])
        dropped = dropped_names(done)
        return cls(tuple(attrs.evolve(plan, held=None) for plan in done), metadata, dropped)

    @property
    def parts(self) -> tuple[Sequence[SavePlan], Metadata, tuple[str, ...]]:
        """What an agreement holds of it."""
        return self.plans, self.metadata, self.dropped


@attrs.frozen(cache_hash=True)
class _Key:
    """All that a plan depends on."""

    layout: Hashable
    ranks: Hashable


def _described(whole: WorldPlans) -> str:
    return repr((whole.mesh, dict(whole.specs), whole.values, whole.planner_data))


def _gather(comm: Comm, offer: _Offer, watch: Stopwatch, *, verify_replicas: bool) -> Agreement:
    """Have the coordinator plan for all."""
    whole: list[_Whole] = []

    def own() -> bytes:
        parts = {"plan": encode_plan(offer.local), "meta": encode_json(offer.meta_names)}
        if verify_replicas:
            with watch.phase("verify"):
                if offer.shared is not offer.local:
                    parts["shared"] = encode_plan(offer.shared)
                parts["sums"] = replica_sums(offer.flat, offer.shared).astype("<u8").tobytes()
        return pack({}, parts)

    def plan_all(blobs: list[bytes]) -> list[bytes]:
        with watch.phase("plan"):
            parts = [unpack(blob)[1] for blob in blobs]
            plans = decode_plans(part["plan"] for part in parts)
            if verify_replicas:
                shared = decode_plans(part.get("shared", part["plan"]) for part in parts)
                sums = [np.frombuffer(part["sums"], "<u8") for part in parts]
                compare_replicas(shared, sums, comm.ranks)  # type: ignore[arg-type]
            try:
                meta = _meta_holders(decode_json(part["meta"]) for part in parts)
                done = _plan_all(plans, offer.last, meta)  # type: ignore[arg-type]
            except PlanError as error:
                raise PlanError(_renumbered(error.issues, comm.ranks)) from None
            whole.append(done)
            tag = _tag([part["plan"] for part in parts]).encode()
            return [tag + encode_plan(plan) for plan in done.plans]

    with watch.phase("exchange"):
        mine = reduce_scatter(comm, _STEP, own, plan_all, encode=bytes, decode=bytes)
    plan = whole[0].plans[comm.rank] if whole else decode_plan(mine[_TAG:])
    assert isinstance(plan, SavePlan)
    return Agreement(plan, "gathered", mine[:_TAG].decode(), *(whole[0].parts if whole else ()))


def _meta_holders(names: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    """Return, given the tensors that are on the meta device on each rank, the ranks of each.

    >>> _meta_holders([["a"], ["a", "b"]])
    {'a': [0, 1], 'b': [1]}
    """
    holders: dict[str, list[int]] = {}
    for rank, here in enumerate(names):
        for name in here:
            holders.setdefault(name, []).append(rank)
    return holders


def _plan_all(
    plans: Sequence[SavePlan], last: Sequence[Pass[SavePlan]], meta: Mapping[str, Sequence[int]]
) -> _Whole:
    """Plan for all ranks; say which of them have a tensor on the meta device that nobody holds."""
    text = "{} {} it on the meta device, without elements: materialise it first, or leave it out"
    why = {k: text.format(span(who), "has" if len(who) == 1 else "have") for k, who in meta.items()}
    try:
        whole = _Whole.of(plans, last)
    except PlanError as error:
        pairs = (zip(p.items.catalog.names, p.items.catalog.sources, strict=True) for p in plans)
        source = {name: source for some in pairs for name, source in some if source in why}
        known = [
            attrs.evolve(issue, message=f"{issue.message}; {why[source[issue.fqn]]}")
            if issue.kind == "gap" and issue.fqn in source
            else issue
            for issue in error.issues
        ]
        raise PlanError(known) from None
    pieces = ((p.holds.catalog.sources, np.unique(p.holds.row)) for p in (plans if meta else ()))
    held = {sources[row] for sources, rows in pieces for row in rows.tolist()}
    lost = [name for name in meta if name not in held]
    if lost:
        issues = [Issue("gap", n, f"no rank holds `{n}`: {why[n]}", meta[n]) for n in lost]
        raise PlanError(issues)
    return whole


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
