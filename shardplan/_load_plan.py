"""The plan of a load: open the checkpoint, plan this rank's reads, agree on who reads what.

On many ranks, passes that need the plans of all ranks are run first; every rank plans what it
reads; all compare what they have opened; what several need is given to one to read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal, cast

import attrs

from shardplan.dist import Comm, broadcast, reduce_scatter
from shardplan.io import FormatError, Pool, ProgressCallback, store_values
from shardplan.io.execute import Reader
from shardplan.io.formats import detect, find_format, locate, open_located
from shardplan.io.stores import Store
from shardplan.planning import (
    Issue,
    LoadPlan,
    Metadata,
    Pass,
    PlanError,
    SavePlan,
    Strict,
    chain,
    decode_metadata,
    decode_plan,
    decode_plans,
    encode_metadata,
    encode_plan,
    fingerprint,
    flatten,
    global_load_plan,
    load_plan,
    local_plan,
    read_on,
    share_reads,
    split_reads,
    strict_patterns,
    whole_names,
    with_replicas,
)
from shardplan.planning.passes import Stages
from shardplan.planning.storage import Need, need_of, plan_bytes, sharing_pays

from ._agree import run_together
from ._comm import Kept, Place, fail_alike, host_name, keep_step, place_of, ranks_by_value
from ._memory import (
    Destinations,
    Resized,
    blanks,
    destinations,
    refuse_fixed,
    refuse_unfillable,
    resize,
    tied_names,
)
from ._read import Opened, decode_values, encode_values, value_names, values_read
from ._read_errors import naming_place
from ._report import Stopwatch, place_name
from ._state import State, expand, part


@attrs.frozen(eq=False)
class LoadCall:
    """The arguments of a `load`; see there."""

    state_dict: State
    path: str | os.PathLike[str] | Store
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

    @cached_property
    def located(self) -> tuple[Store, str]:
        """The store to look in, and the name of a single file there; empty for a folder."""
        return locate(self.path)

    @property
    def place(self) -> Place:
        """The position of this rank among all ranks."""
        return place_of(self.comm)


@attrs.frozen(eq=False)
class Target:
    """What this rank wants filled.

    Attributes:
        state: The state dict, after `expand` and `part`.
        flat: The same, flattened; tensors on the meta device are replaced once reads are planned.
        paths: The path to each value; see `flatten`.
        whole: Names of containers that the checkpoint keeps as one value.
        plan: What of it lies where in the checkpoint, after passes.
    """

    state: Mapping[Any, Any]
    flat: Mapping[str, Any]
    paths: Mapping[str, Any]
    whole: frozenset[str]
    plan: SavePlan


@attrs.frozen(eq=False)
class Planned:
    """What this rank is about to do.

    Attributes:
        opened: The checkpoint.
        target: What is filled.
        wanted: What this rank needs.
        plan: What this rank reads; it differs from ``wanted`` where ranks share reads.
        into: The memory that is filled.
        blanks: Tensors that take the place of those on the meta device, by name.
        tied: Names that are not in the checkpoint, but share memory with one that is.
        resized: State by rank that was made of what other ranks had saved.
        unmatched: Patterns of ``strict`` that match no name on this rank.
    """

    opened: Opened
    target: Target
    wanted: LoadPlan
    plan: LoadPlan
    into: Destinations
    blanks: Mapping[str, Any]
    tied: Mapping[str, str]
    resized: Resized
    unmatched: tuple[str, ...]

    @property
    def bytes_needed(self) -> int:
        """Bytes of tensors and values that this rank needs."""
        needed = plan_bytes(self.wanted, self.opened.metadata)
        if self.opened.reader is None:
            return needed
        names = [name for _, name in value_names(self.wanted.items)]
        return needed + values_read(self.opened.reader, names).bytes_needed


def open_reader(call: LoadCall) -> Reader:
    """Open the checkpoint."""
    with call.watch.phase("open"), naming_place(call.path):
        return Reader(open_located(*call.located, format=call.format, pool=call.pool), call.pool)


def _open(call: LoadCall) -> Opened:
    reader = open_reader(call)
    return Opened(reader.metadata, reader)


def plan_alone(call: LoadCall, reader: Reader) -> Planned:
    """Plan a load on a single rank."""
    with call.watch.phase("plan"), naming_place(call.path):
        opened = Opened(reader.metadata, reader)
        return _plan_reads(call, opened, _after_passes(call, _target(call, opened.metadata)))


def plan_together(call: LoadCall) -> Planned:
    """Plan a load on all ranks."""
    with call.watch.phase("exchange"):
        opened, target = _run_passes(call) if call.stages.rest else (None, None)
        offer = partial(_offer, call, opened, target, wait=opened is None)
        done = keep_step(call.comm, "plan", offer, partial(_verdict, call))
        if done.got is None:  # it may be a file that one rank reads for all
            offer = partial(_offer, call, _open_on_one(call), None, wait=False)
            done = keep_step(call.comm, "plan", offer, partial(_verdict, call))
    assert done.mine is not None
    _raise_alike(call.comm, done.got)
    return _share(call, done.mine, done.got["share"])


def _run_passes(call: LoadCall) -> tuple[Opened, Target]:
    """Open the checkpoint, and run the passes that need the plans of all ranks."""
    opened: Opened | None = _open_on_one(call)
    target: Target | None = None

    def own() -> SavePlan:
        nonlocal opened, target
        opened = opened or _open(call)
        with naming_place(call.path):
            target = _target(call, opened.metadata)
        return target.plan

    _, plan = run_together(call.comm, call.stages, own, call.watch)
    assert opened is not None
    assert target is not None
    return opened, attrs.evolve(target, plan=plan)


def _open_on_one(call: LoadCall) -> Opened | None:
    """Open a file of `torch.save` on the coordinator, which sends the others what it holds.

    None means that it is of another format, for every rank to open.
    """
    mine: Opened | None = None

    def work() -> dict[str, Any] | None:
        nonlocal mine
        store, name = call.located
        if not name or not find_format(call.format or detect(store, name)).is_file:
            return None
        reader = open_reader(call)
        entries = reader.metadata.state_dict_metadata
        names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
        stored = store_values({name: reader.value(name) for name in names})
        mine = Opened(reader.metadata, reader, stored)
        return {"metadata": encode_metadata(reader.metadata), "values": encode_values(stored)}

    sent = broadcast(call.comm, "open", work)
    if sent is None or mine is not None:
        return mine
    return Opened(decode_metadata(sent["metadata"]), None, decode_values(sent["values"]))


def _target(call: LoadCall, metadata: Metadata) -> Target:
    """Plan what this rank holds, up to the first pass that needs all plans."""
    state = part(expand(call.state_dict), call.place)
    flat, paths = flatten(state)
    whole = whole_names(flat, paths, metadata)
    if whole:
        flat, paths = flatten(state, whole=whole)
    plan = local_plan(state, whole=whole)
    plan = attrs.evolve(plan, rank=call.comm.rank, world_size=call.comm.world_size)
    return Target(state, flat, paths, whole, chain(*call.stages.own)((plan,))[0])


def _after_passes(call: LoadCall, target: Target) -> Target:
    """Run the other passes on a single rank."""
    plan = with_replicas(chain(*call.stages.rest)((target.plan,)))[0]
    return attrs.evolve(target, plan=plan)


def _plan_reads(call: LoadCall, opened: Opened, target: Target) -> Planned:
    """Plan what this rank reads, and check that all of it can be put in its place."""
    metadata, local = opened.metadata, target.plan
    strict, unmatched = _own_patterns(call, local)
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
    made = blanks(target.flat, plan)
    given: Any = call.state_dict
    refuse_unfillable(part(given, call.place), target.paths, plan, made)
    values = [dest for dest, _ in value_names(plan.items)]
    refuse_fixed(call.state_dict, target.paths, [*values, *made])
    target = attrs.evolve(target, flat={**target.flat, **made})
    into = destinations(target.flat, plan.items, opened.reader)
    return Planned(opened, target, plan, plan, into, made, tied, resized, unmatched)


def _own_patterns(call: LoadCall, local: SavePlan) -> tuple[Strict, tuple[str, ...]]:
    """Return the patterns of ``strict`` that match names of this rank, and the others."""
    if call.comm.world_size == 1 or isinstance(call.strict, (bool, int)):
        return call.strict, ()
    names = local.items.catalog.names
    wanted = strict_patterns(call.strict)
    here = tuple(p for p in wanted if any(fnmatchcase(name, p) for name in names))
    return here, tuple(p for p in wanted if p not in here)


def _offer(
    call: LoadCall, opened: Opened | None, target: Target | None, *, wait: bool
) -> Kept[Planned | None]:
    """Plan this rank's reads; keep the plan, and send what others have to know of it.

    The checkpoint is opened and the target planned unless they are given. With ``wait``, return
    nothing if one rank should look at the checkpoint first.
    """
    if wait and call.located[1] and (call.format is None or find_format(call.format).is_file):
        return Kept(None, None)  # it may be a file of `torch.save`
    opened = opened or _open(call)
    with call.watch.phase("plan"), naming_place(call.path):
        target = target or _after_passes(call, _target(call, opened.metadata))
        planned = _plan_reads(call, opened, target)
        need = need_of(
            planned.plan,
            opened.metadata,
            opened.max_gap,
            host=host_name(),
            is_local=opened.reader is not None and not opened.reader.store.staging,
        )
    meta = opened.metadata.storage_meta
    offer = {
        "save": (meta and meta.save_id) or fingerprint(opened.metadata),
        "place": place_name(call.path),
        "unmatched": planned.unmatched,
        "need": attrs.astuple(need),
    }
    return Kept(planned, offer)


def _verdict(call: LoadCall, offers: Sequence[Any]) -> Kept[None]:
    """Return what every rank has to know of what all want; None if some wait."""
    if None in offers:
        return Kept(None, None)
    alike = len({offer["save"] for offer in offers}) == 1  # one place may have several names
    saves = [f"{offer['place']}, save {offer['save']}" for offer in offers]
    needs = [Need(*offer["need"]) for offer in offers]
    verdict = {
        "apart": "" if alike else ranks_by_value(call.comm.ranks, saves),
        "lost": sorted(set.intersection(*(set(offer["unmatched"]) for offer in offers))),
        "share": call.share is True or (call.share == "auto" and sharing_pays(needs)),
    }
    return Kept(None, verdict)


def _raise_alike(comm: Comm, verdict: Mapping[str, Any]) -> None:
    """Raise, on all ranks alike, what is wrong with what they want together."""
    if verdict["apart"]:
        text = f"they differ between ranks ({verdict['apart']})"
        remedy = "pass all ranks one path; if it is one, it was written meanwhile: load again"
        fail_alike(comm, "open", FormatError("the checkpoints", f"{text}; {remedy}"))
    if verdict["lost"]:
        why = "strict: {!r} matches no name that any rank wants"
        issues = [Issue("unmatched", p, why.format(p)) for p in verdict["lost"]]
        fail_alike(comm, "plan", PlanError(issues))


def _share(call: LoadCall, planned: Planned, pays: bool) -> Planned:
    """Have the coordinator decide who reads what for which ranks, where reads are shared."""
    opened = planned.opened
    metadata, blocks, gap = opened.metadata, opened.block_bytes, opened.max_gap
    share: Pass[LoadPlan]
    if opened.values is not None:
        share = read_on(call.comm.coordinator)
    elif not pays:
        return planned
    else:
        most: dict[str, Any] = {"min_bytes": 1} if call.share is True else {}
        share = share_reads(metadata, block_bytes=blocks, max_gap=gap, **most)

    def all_plans(blobs: list[bytes]) -> list[bytes]:
        with call.watch.phase("plan"):
            plans = cast("tuple[LoadPlan, ...]", decode_plans(blobs))
            passes = (split_reads(metadata, blocks, max_gap=gap), share)
            return [encode_plan(plan) for plan in global_load_plan(plans, passes)]

    with call.watch.phase("exchange"):
        mine = reduce_scatter(
            call.comm,
            "share reads",
            lambda: encode_plan(planned.plan),
            all_plans,
            encode=bytes,
            decode=bytes,
        )
    return attrs.evolve(planned, plan=cast(LoadPlan, decode_plan(mine)))
