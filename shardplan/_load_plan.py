"""Plan a load: what this rank fills, what it reads for that, and what it reads for others."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs

from shardplan.dist import Comm, Turn, fail_alike, reduce_scatter, take_step
from shardplan.io import FormatError, Pool, ProgressCallback, store_values
from shardplan.io.execute import Reader
from shardplan.io.formats import detect, find_format, locate, open_located, read_as
from shardplan.io.stores import Store
from shardplan.planning import (
    Issue,
    LoadOffer,
    LoadPlan,
    Metadata,
    PlanError,
    SavePlan,
    Strict,
    decode_metadata,
    decode_plan,
    decode_plans,
    differing_loads,
    encode_metadata,
    encode_plan,
    fingerprint,
    flatten,
    global_load_plan,
    load_plan,
    nodes_of,
    plan_flat,
    read_on,
    share_reads,
    split_reads,
    strict_patterns,
    unmatched_everywhere,
    whole_names,
    with_replicas,
)
from shardplan.planning.passes import Reading, Stages
from shardplan.planning.storage import (
    SMALL_BYTES,
    Need,
    SharedReads,
    Wants,
    Way,
    need_of,
    partly_filled,
    replica_groups,
    shared_by_rule,
    shared_by_transfers,
    sharing_way,
    value_reads,
    wants_of,
)

from ._comm import Place, place_of
from ._memory import (
    Resized,
    blanks,
    destinations,
    refuse_fixed,
    refuse_unfillable,
    resize,
    tied_names,
)
from ._passes import joined, run_passes, run_together
from ._read import ROUND_BYTES, Destinations, Opened, decode_values, encode_values, naming_place
from ._report import Stopwatch, place_name
from ._state import State, expand, part

if TYPE_CHECKING:
    from shardplan.planning import PlannerTrace

    from ._arrivals import LoadFuture


SENT_FROM: Final = 16
"""How many ranks have one of them read what describes a checkpoint, and send it to the others."""


@attrs.frozen(eq=False)
class LoadCall:
    """The arguments of a `load`; see there."""

    state_dict: State
    path: str | os.PathLike[str] | Store
    reading: Reading
    stages: Stages[SavePlan]
    strict: Strict
    dtype: Literal["same", "cast"]
    shape: Literal["same", "overlap"]
    format: str | None
    share: bool | Literal["auto"]
    verify: bool
    progress: ProgressCallback | None
    pool: Pool | None
    comm: Comm
    watch: Stopwatch
    trace: bool = False
    arrivals: LoadFuture | None = None

    @cached_property
    def located(self) -> tuple[Store, str]:
        """The store to look in, and the name of a single file there; empty for a folder."""
        return locate(self.path)

    @property
    def place(self) -> Place:
        """The position of this rank among all ranks."""
        return place_of(self.comm)


@attrs.frozen(eq=False)
class LoadTarget:
    """What this rank wants filled.

    ``state`` is the state dict after `expand` and `part`, ``flat`` and ``paths`` what `flatten`
    makes of it, ``whole`` the containers that the checkpoint keeps as one value, and ``plan`` what
    lies where in the checkpoint.
    """

    state: Mapping[Any, Any]
    flat: Mapping[str, Any]
    paths: Mapping[str, Any]
    whole: frozenset[str]
    plan: SavePlan
    trace: PlannerTrace | None = None


@attrs.frozen(eq=False)
class PlannedLoad:
    """What this rank is about to do.

    ``wanted`` is what it needs, and ``plan`` what it reads by itself or as the coordinator planned.
    Where ranks share reads, ``way`` says how, and ``shared`` who reads what.
    ``blanks`` replace tensors on the meta device, ``tied`` names share memory with others, and
    ``unmatched`` patterns of ``strict`` match no name on this rank.
    """

    opened: Opened
    target: LoadTarget
    wanted: LoadPlan
    plan: LoadPlan
    into: Destinations
    blanks: Mapping[str, Any]
    tied: Mapping[str, str]
    resized: Resized
    unmatched: tuple[str, ...]
    wants: Wants | None = None
    way: Way = "alone"
    groups: tuple[tuple[int, ...], ...] = ()
    shared: SharedReads | None = None


def open_reader(call: LoadCall) -> Reader:
    with call.watch.phase("open"), naming_place(call.path):
        source = open_located(*call.located, format=call.format, pool=call.pool)
        return Reader(read_as(source, call.reading), call.pool)


def _open(call: LoadCall) -> Opened:
    reader = open_reader(call)
    return Opened(reader.metadata, reader)


def plan_alone(call: LoadCall, reader: Reader) -> PlannedLoad:
    """Plan a load on a single rank."""
    opened = Opened(reader.metadata, reader)
    with call.watch.phase("plan"), naming_place(call.path):
        return _plan_reads(call, opened, _after_passes(call, _target(call, opened.metadata)))


def _target(call: LoadCall, metadata: Metadata) -> LoadTarget:
    """Plan what this rank holds, up to the first pass that needs all plans."""
    state = part(expand(call.state_dict), call.place)
    flat, paths = flatten(state)
    whole = whole_names(flat, paths, metadata)
    if whole:
        flat, paths = flatten(state, whole=whole)
    plan = plan_flat(flat, paths, nodes_of(state), whole=whole)
    plan = attrs.evolve(plan, rank=call.comm.rank, world_size=call.comm.world_size)
    ran = run_passes(call.stages.own, (plan,), trace=call.trace)
    return LoadTarget(state, flat, paths, whole, ran.plans[0], ran.trace)


def _after_passes(call: LoadCall, target: LoadTarget) -> LoadTarget:
    """Run the other passes on a single rank."""
    ran = run_passes(call.stages.rest, (target.plan,), trace=call.trace)
    plan = with_replicas(ran.plans, (target.plan,))[0]
    return attrs.evolve(target, plan=plan, trace=joined(target.trace, ran.trace))


def _plan_reads(call: LoadCall, opened: Opened, target: LoadTarget) -> PlannedLoad:
    """Plan what this rank reads, and check that all of it can be put in its place."""
    metadata, local, strict = opened.metadata, target.plan, call.strict
    unmatched: tuple[str, ...] = ()
    if call.comm.world_size > 1 and not isinstance(strict, (bool, int)):
        patterns, names = strict_patterns(strict), local.items.catalog.names
        strict = tuple(p for p in patterns if any(fnmatchcase(name, p) for name in names))
        unmatched = tuple(p for p in patterns if p not in strict)
    tied = tied_names(local, target.flat, metadata)
    resized = resize(target.state, local, opened, call.place, strict=strict, verify=call.verify)
    plan = load_plan(
        metadata,
        local,
        strict=strict,
        dtype=call.dtype,
        shape=call.shape,
        optional={*tied, *resized.names},
    )
    made = blanks(target.flat, plan, local, metadata)
    given: Any = call.state_dict
    partly = partly_filled(local, plan.items)
    refuse_unfillable(part(given, call.place), target.paths, partly, made)
    values = [dest for dest, _ in value_reads(plan.items)]
    refuse_fixed(call.state_dict, target.paths, [*values, *made])
    target = attrs.evolve(target, flat={**target.flat, **made})
    into = destinations(target.flat, plan.items, opened.reader)
    return PlannedLoad(opened, target, plan, plan, into, made, tied, resized, unmatched)


# Together


def plan_together(call: LoadCall) -> PlannedLoad:
    """Plan a load on all ranks; if something does not fit, raise the same error on all."""
    comm, verdict = call.comm, partial(_verdict, call)
    with call.watch.phase("exchange"):
        if call.stages.rest:
            opened, target = _run_passes(call)
            offer = partial(_offer, call, opened, target)
            done = take_step(comm, "plan", offer, verdict, each=True)
        elif comm.world_size >= SENT_FROM:
            offer = partial(_offer, call, _open_on_one(call))
            done = take_step(comm, "plan", offer, verdict, each=True)
        else:
            done = take_step(comm, "plan", partial(_offer, call, wait=True), verdict, each=True)
            if done.reply is None:  # it may be a file that one rank reads for all
                offer = partial(_offer, call, _open_on_one(call))
                done = take_step(comm, "plan", offer, verdict, each=True)
    apart, unmatched, way, spans = done.reply
    if apart:
        remedy = "pass all ranks one path; if it is one, it was written meanwhile: load again"
        text = f"they differ between ranks ({apart}); {remedy}"
        fail_alike(comm, "open", FormatError("the checkpoints", text))
    if unmatched:
        why = "strict: {!r} matches no name that any rank wants"
        issues = [Issue("unmatched", pattern, why.format(pattern)) for pattern in unmatched]
        fail_alike(comm, "plan", PlanError(issues))
    assert done.mine is not None
    groups = tuple(tuple(rank for span in group for rank in range(*span)) for group in spans)
    return attrs.evolve(done.mine, way=way, groups=groups)


def _run_passes(call: LoadCall) -> tuple[Opened, LoadTarget]:
    """Open the checkpoint, and run the passes that need the plans of all ranks."""
    sent = _open_on_one(call)

    def begin() -> Turn[tuple[Opened, LoadTarget]]:
        opened = sent or _open(call)
        with naming_place(call.path):
            target = _target(call, opened.metadata)
        return Turn((opened, target), target.plan)

    passed = run_together(call.comm, call.stages, begin, call.watch, trace=call.trace)
    opened, target = passed.mine
    trace = joined(target.trace, passed.trace)
    return opened, attrs.evolve(target, plan=passed.shared, trace=trace)


def _open_on_one(call: LoadCall) -> Opened | None:
    """Open a checkpoint on the coordinator, which sends the others what they need for that.

    For a file of `torch.save`, that is what it holds; for many ranks, what they would read. None
    means that every rank opens it by itself.
    """
    done = take_step(call.comm, "open", lambda: Turn(None, None), lambda nothing: _open_first(call))
    if done.reply is None or done.whole is not None:
        return done.whole
    if "text" in done.reply:
        with call.watch.phase("open"), naming_place(call.path):
            text = zlib.decompress(done.reply["text"])
            found = find_format(done.reply["format"]).open_text(call.located[0], text, call.pool)
            reader = Reader(read_as(found, call.reading), call.pool)
        return Opened(reader.metadata, reader)
    metadata = decode_metadata(done.reply["metadata"])
    return Opened(metadata, None, decode_values(done.reply["values"]))


def _open_first(call: LoadCall) -> Turn[Opened | None]:
    """Open a checkpoint for all ranks; send what it holds, or the text that describes it."""
    store, name = call.located
    if not name or not find_format(call.format or detect(store, name)).is_file:
        if call.comm.world_size < SENT_FROM:
            return Turn(None, None)
        reader = open_reader(call)
        source = reader.source.stored
        text = None if source.text is None else zlib.compress(source.text, 1)
        described = None if text is None else {"format": source.format, "text": text}
        return Turn(Opened(reader.metadata, reader), described)
    reader = open_reader(call)
    entries = reader.metadata.state_dict_metadata
    names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
    stored = store_values({name: reader.value(name) for name in names})
    sent = {"metadata": encode_metadata(reader.metadata), "values": encode_values(stored)}
    return Turn(Opened(reader.metadata, reader, stored), sent)


def _offer(
    call: LoadCall,
    opened: Opened | None = None,
    target: LoadTarget | None = None,
    *,
    wait: bool = False,
) -> Turn[PlannedLoad | None]:
    """Plan this rank's reads; keep the plan, and send what others have to know of it.

    The checkpoint is opened and the target planned unless they are given. With ``wait``, return
    nothing if one rank should look at the checkpoint first.
    """
    if wait and call.located[1] and (call.format is None or find_format(call.format).is_file):
        return Turn(None, None)  # it may be a file of `torch.save`
    opened = opened or _open(call)
    with call.watch.phase("plan"), naming_place(call.path):
        target = target or _after_passes(call, _target(call, opened.metadata))
        planned = _plan_reads(call, opened, target)
        metadata, blocks, gap = opened.metadata, opened.block_bytes, opened.max_gap
        cut = split_reads(metadata, blocks, max_gap=gap)((planned.plan,))[0].items
        small = {"block_bytes": blocks, "small_bytes": max(gap, SMALL_BYTES)}
        wants = wants_of(cut, metadata, call.comm.world_size, **small)
        need = need_of(
            planned.plan,
            wants,
            metadata,
            gap,
            host=socket.gethostname(),
            is_local=opened.reader is not None and not opened.reader.store.staging,
        )
    meta = opened.metadata.storage_meta
    save = (meta and meta.save_id) or fingerprint(opened.metadata)
    offer = LoadOffer(save, place_name(call.path), planned.unmatched)
    return Turn(attrs.evolve(planned, wants=wants), (attrs.astuple(offer), attrs.astuple(need)))


def _verdict(call: LoadCall, offers: Sequence[Any]) -> Turn[None]:
    """Return what every rank has to know of what all want; None if some wait."""
    if None in offers:
        return Turn(None, [None] * len(offers))
    wants = [LoadOffer(*fields) for fields, _ in offers]
    needs = [Need(*fields) for _, fields in offers]
    way = sharing_way(needs, asked=call.share is True) if call.share else "alone"
    groups = replica_groups(needs) if way == "groups" else [()] * len(needs)
    apart, unmatched = differing_loads(wants, call.comm.ranks), unmatched_everywhere(wants)
    spans = [[[(r.start, r.stop, r.step) for r in g] for g in mine] for mine in groups]
    return Turn(None, [(apart, unmatched, way, mine) for mine in spans])


def share_reading(call: LoadCall, planned: PlannedLoad) -> PlannedLoad:
    """Decide who reads what for which ranks: by rule, or as the coordinator plans."""
    opened, way = planned.opened, planned.way
    if opened.values is not None or way == "coordinator":
        with call.watch.phase("exchange"):
            plan = _transferred(call, planned)
        shared = shared_by_transfers(plan, opened.metadata, call.comm.rank, round_bytes=ROUND_BYTES)
        return attrs.evolve(planned, plan=plan, shared=shared)
    wants = planned.wants
    if wants is None or all(len(group) == 1 for group in planned.groups):
        return planned
    with call.watch.phase("plan"):
        shared = shared_by_rule(
            wants,
            opened.metadata,
            call.comm.rank,
            planned.groups,
            opened.files_of(wants.reads),
            round_bytes=ROUND_BYTES,
            block_bytes=opened.block_bytes,
        )
    return attrs.evolve(planned, shared=shared)


def _transferred(call: LoadCall, planned: PlannedLoad) -> LoadPlan:
    """Have the coordinator plan, for all ranks, what they read for each other."""
    opened = planned.opened
    metadata, blocks, gap = opened.metadata, opened.block_bytes, opened.max_gap
    most: dict[str, Any] = {"min_bytes": 1} if call.share is True else {}
    share = share_reads(metadata, block_bytes=blocks, max_gap=gap, **most)
    if opened.values is not None:
        share = read_on(call.comm.coordinator)

    def all_plans(blobs: list[bytes]) -> list[bytes]:
        with call.watch.phase("plan"):
            plans = cast("tuple[LoadPlan, ...]", decode_plans(blobs))
            passes = (split_reads(metadata, blocks, max_gap=gap), share)
            return [encode_plan(plan) for plan in global_load_plan(plans, passes)]

    mine = reduce_scatter(call.comm, "share reads", lambda: encode_plan(planned.plan), all_plans)
    return cast(LoadPlan, decode_plan(mine))
