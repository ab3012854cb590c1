"""One rank's input to a save, and the plans that it has cached or can derive by itself."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import attrs
import numpy as np

from shardplan.dist import Comm
from shardplan.io import store_values
from shardplan.planning import (
    How,
    Pass,
    Passes,
    Path,
    PlanError,
    SaveOffer,
    SavePlan,
    WholePlan,
    contents_tag,
    fingerprint,
    flatten,
    is_tensor,
    nodes_of,
    plan_flat,
    table_tag,
    tag_of_parts,
)
from shardplan.planning.columns import WriteItems
from shardplan.planning.mesh import (
    Description,
    JoinedPlans,
    derive_joined,
    describe,
    layout_key,
    on_meta,
)
from shardplan.planning.passes import Stages

from ._passes import Planned, Ran, plan_rest, run_passes
from ._replicas import digests
from ._state import per_rank_names

if TYPE_CHECKING:
    from shardplan.planning import PlannerTrace

T = TypeVar("T")

_DERIVED_ITEMS: Final = 1 << 22  # the most items, of all ranks together, to derive on each rank
_PLAIN: Final = frozenset[type]((str, int, float, bool, type(None)))


@attrs.frozen(eq=False)
class Agreement:
    """The plan that all ranks agreed on: what this rank writes, and a tag of the complete plan.

    ``whole``, the plans of all ranks, may be None except on the coordinator.
    """

    plan: SavePlan
    how: How
    tag: str
    whole: WholePlan | None = None
    trace: PlannerTrace | None = None


@attrs.frozen(eq=False)
class Begun(Generic[T]):
    """A rank's state dict and its opened target, whose text must be equal on all ranks."""

    sd: Mapping[Any, Any]
    target: T


class PlanCache:
    """The plans of the last few layouts; a key holds everything that a plan depends on."""

    def __init__(self, entries: int = 8) -> None:
        self._entries = entries
        self._plans: OrderedDict[Hashable, Agreement] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Agreement | None:
        """Return the agreement of a key, if any."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
            return self._plans.get(key)

    def put(self, key: Hashable, agreement: Agreement) -> None:
        """Store an agreement."""
        with self._lock:
            self._plans[key] = agreement
            self._plans.move_to_end(key)
            while len(self._plans) > self._entries:
                self._plans.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._plans.clear()


@attrs.frozen(eq=False, slots=False)
class Local(Generic[T]):
    """A rank's state dict, and its plans, each made on demand."""

    begun: Begun[T]
    comm: Comm
    planner: Passes[SavePlan] | None
    trace: bool = False

    @cached_property
    def stages(self) -> Stages[SavePlan]:
        """The passes, cut at the first world pass."""
        return Stages.of(self.planner)

    @cached_property
    def flattened(self) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
        return flatten(self.begun.sd)

    @property
    def flat(self) -> Mapping[str, Any]:
        return self.flattened[0]

    @cached_property
    def own(self) -> SavePlan:
        """The plan before any pass."""
        plan = plan_flat(*self.flattened, nodes_of(self.begun.sd))
        return attrs.evolve(plan, rank=self.comm.rank, world_size=self.comm.world_size)

    @cached_property
    def ran(self) -> Ran:
        """This rank's own passes, run over its plan."""
        return run_passes(self.stages.own, (self.own,), trace=self.trace)

    @property
    def passed(self) -> SavePlan:
        """The plan after this rank's own passes."""
        return self.ran.plans[0]

    @cached_property
    def present(self) -> SavePlan:
        """The same without tensors on the meta device, whose elements this rank lacks."""
        plan = self.passed
        if not self.meta:
            return plan
        items, held = (part.take(~self._on_meta(part)) for part in (plan.items, plan.holds))
        return attrs.evolve(plan, items=items, held=held)

    @cached_property
    def meta(self) -> frozenset[str]:
        """Names of tensors on the meta device here; other ranks may hold their elements."""
        if self.comm.world_size == 1:
            return frozenset()  # refused when they are written
        return frozenset(name for name, value in self.flat.items() if on_meta(value))

    @property
    def saved_meta(self) -> list[str]:
        """The names in ``meta`` that are to be saved."""
        items = self.passed.items
        rows = items.row[self._on_meta(items)].tolist() if self.meta else ()
        return sorted({items.catalog.sources[row] for row in rows})

    def _on_meta(self, items: WriteItems) -> Any:
        return np.array([source in self.meta for source in items.catalog.sources], bool)[items.row]


@attrs.frozen(cache_hash=True)
class _Key:
    """Everything that a plan depends on."""

    layout: Hashable
    ranks: Hashable


@attrs.frozen(eq=False)
class Offer(Generic[T]):
    """What one rank offers: its plans, and digests of all that must be equal on all ranks.

    ``passed`` is the result of `run_together`, and ``key`` that of the cache, if there is any;
    ``described`` determines the plans of this rank and of all that hold the same, perhaps with
    templates for names that carry the rank's number.
    """

    local: Local[T]
    passed: tuple[SavePlan, SavePlan] | None = None
    key: _Key | None = None
    cached: Agreement | None = None
    described: Description | None = None
    table: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def plans(self) -> tuple[SavePlan, SavePlan]:
        """The plan after all passes run so far, and the part of it to compare."""
        return self.passed or (self.local.present, self.local.present)

    @property
    def last(self) -> tuple[Pass[SavePlan], ...]:
        """The passes that are left for the coordinator."""
        return self.local.stages.rest if self.passed is None else ()

    @property
    def early(self) -> bool:
        """Whether world passes are still to be run."""
        return self.local.stages.needs_all and self.passed is None

    def looked_up(self, cache: PlanCache) -> Offer[T]:
        """Add the cached plan, if there is one; a trace needs a plan made anew."""
        comm = self.local.comm
        if self.early or self.local.trace:
            return self
        if self.local.planner is None:
            layout = layout_key(self.local.begun.sd)
        else:  # a planner may look at anything, so it is run every time
            made = (fingerprint(plan) for plan in (self.plans[0], self.local.own))
            layout = (*made, *map(repr, self.last))
        if layout is None:
            return self
        key = _Key(layout, (tuple(comm.ranks), comm.rank, comm.coordinator))
        return attrs.evolve(self, key=key, cached=cache.get(key))

    def with_description(self) -> Offer[T]:
        """Add the description of what this rank holds, if there is one."""
        local, comm = self.local, self.local.comm
        if local.stages.needs_all or local.meta:
            return self
        described = describe(local.flat, local.own, comm.rank, tuple(comm.ranks))
        return attrs.evolve(self, described=described)

    def derived(self, world: JoinedPlans) -> Agreement | None:
        """Return the complete plan; None if it is quicker, or clearer, to gather all plans."""
        local, comm = self.local, self.local.comm
        parts = [part.tag for part in world.parts]
        if local.planner is None:
            try:
                planned = Planned(WholePlan(*derive_joined(world)), local.ran.trace)
            except PlanError:
                return None  # the coordinator will say what is wrong, and with which ranks
        elif world.items > _DERIVED_ITEMS:
            return None  # passes would need every rank's plan
        else:
            ran = run_passes(local.stages.own, tuple(world), trace=local.trace)
            planned = plan_rest(ran, self.last)
            parts.append(contents_tag(planned.whole.plans))
            parts.append(fingerprint(planned.whole.metadata))
        whole = planned.whole
        known = whole if comm.rank == comm.coordinator else None
        tag = tag_of_parts([*parts, world.part.tobytes()])
        return Agreement(whole.plans[comm.rank], "derived", tag, known, planned.trace)

    def with_table(self, everything: bool) -> Offer[T]:
        """Add the digests of everything that must be equal on all ranks that hold it."""
        flat, paths = self.local.flattened
        # Without a planner, small tensors and values are stored as they are.
        plan = self.plans[1] if everything or self.local.planner is not None else None
        own = per_rank_names(self.local.begun.sd, paths)
        return attrs.evolve(self, table=digests(flat, plan, own=own, everything=everything))

    def refuse_values(self) -> None:
        """Refuse values that cannot be stored, including those that another rank will write."""
        flat = self.local.flat
        kinds = {type(value): value for value in flat.values()}
        # Whether an array is a tensor depends on its dtype; for others the type decides.
        skipped = {k for k, v in kinds.items() if not issubclass(k, np.ndarray) and is_tensor(v)}
        if self.cached is not None:
            skipped |= _PLAIN  # known to be storable since the plan was made
        rest = {name: value for name, value in flat.items() if type(value) not in skipped}
        store_values({name: value for name, value in rest.items() if not is_tensor(value)})

    @property
    def message(self) -> SaveOffer:
        """The message to the coordinator."""
        return SaveOffer(
            secrets.token_hex(6),
            "" if self.cached is None else self.cached.tag,
            "" if self.described is None else self.described.on(self.local.comm.rank).tag,
            "" if self.described is None else self.described.tag,
            str(self.local.begun.target),
            self.local.stages.rest_text,
            table_tag(self.table),
        )
