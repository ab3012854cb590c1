"""Load a checkpoint into a state dict, on one rank or on many.

1. Local plan: open the checkpoint, run passes, and plan what this rank reads (`_plan_reads`).
2. Global plan: on many ranks, compare what was opened (`_plan_together`), and let one rank read
   what several need (`_share`).
3. Read, alone or together, and compare checksums (`_read`).
4. Finish: once all ranks have read, put values and new tensors in their places, hand stateful
   objects their state, and report (`_finish`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal, cast

import attrs

from shardplan.dist import Comm, LostRanksError, reduce_scatter
from shardplan.io import (
    BlockSums,
    FormatError,
    Pool,
    ProgressCallback,
    ValueRefusedError,
    store_values,
)
from shardplan.io.execute import Reader, ReadStats
from shardplan.io.formats import detect, find_format, locate, open_located
from shardplan.io.stores import Store
from shardplan.planning import (
    Issue,
    LoadPlan,
    Metadata,
    Passes,
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
from shardplan.planning.storage import (
    Need,
    need_of,
    plan_bytes,
    sharing_pays,
    without_other_ranks,
)

from ._agree import run_together
from ._comm import (
    Kept,
    Place,
    Taken,
    as_comm,
    counting,
    fail_alike,
    host_name,
    keep_step,
    place_of,
    ranks_by_value,
    take_step,
)
from ._memory import (
    Resized,
    blanks,
    destinations,
    refuse_fixed,
    refuse_unfillable,
    resize,
    tied_names,
)
from ._read import (
    Destinations,
    Opened,
    Outcome,
    decode_values,
    encode_values,
    naming_place,
    read_anew,
    read_rank,
    read_shared,
    touching,
    value_names,
    values_read,
)
from ._report import (
    LoadReport,
    RankReport,
    Stopwatch,
    logged,
    place_name,
    rank_report,
    slowest_ranks,
)
from ._state import State, expand, give_back, part, put, refilled, unpart


def load(
    state_dict: State,
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    shape: Literal["same", "overlap"] = "same",
    format: str | None = None,
    comm: Comm | None = None,
    share_reads: bool | Literal["auto"] = "auto",
    verify: bool = True,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> LoadReport:
    """Fill a state dict from a checkpoint, in place.

    On many ranks, every rank calls this with its part, cut in whatever way. All of them plan before
    any of them changes anything; if any fails, all raise one `CheckpointError`.

    Args:
        state_dict: Tensors to fill, and other values to replace, nested in any way. Objects with
            ``state_dict()`` and ``load_state_dict()``, in it or in its place, get their state. A
            tensor on the meta device is replaced: by a DTensor on the same mesh, or by a tensor
            on torch's default device. In a module, which would not take it, it is refused. A
            `PerRank` gets the state that this rank saved.
        path: The checkpoint.
        planner: The pass, or the list of passes, that it was saved with. Each rank fills all that
            it holds, whoever saved it: passes that only choose who writes, such as
            `dedup_replicas`, are skipped where that makes no difference. For any other world pass,
            the coordinator gets the plans of all ranks. What passes drop is not filled, and
            reported.
        strict: Whether everything must be filled: True, False, or patterns of names that must be.
            A pattern that matches no name on any rank is a mistake.
        dtype: ``"same"`` refuses tensors of another stored dtype; ``"cast"`` casts them.
        shape: ``"same"`` refuses tensors of another shape; ``"overlap"`` fills what both have.
        format: What wrote the checkpoint; detected if left out.
        comm: The ranks; by default all of torch's process group, or this process alone (which is
            refused under torchrun: pass ``comm=solo()`` if it is meant).
        share_reads: Whether bytes that several ranks need are read by one of them and sent to the
            others. ``"auto"`` does so where that is cheaper: not from a disk of the same machine.
        verify: Whether to check what is read whole against its checksums.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, for
            what this process fills and what it reads for others; with all bytes in the end. What
            it raises stops the load.
        pool: The threads and the memory budget to use.

    Returns:
        What did not fit, what was read, and how long it took, by phase and by rank.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> sd = {"w": torch.zeros(2), "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"w": torch.ones(2), "step": 7}, folder)
    ...     report = load(sd, folder)
    >>> sd, report.bytes_read
    ({'w': tensor([1., 1.]), 'step': 7}, 8)

    Raises:
        PlanError: Something that must be filled cannot be; nothing was changed.
        FormatError: The checkpoint is damaged; ``filled`` and ``touched`` say what was changed.
        LoadError: Anything else stopped the load half way; it says what was changed, too.
        StoreError: The checkpoint cannot be read at all; nothing was changed.
        CheckpointError: On many ranks, any of these; it says what happened on which rank, and its
            ``own`` is this rank's error. A rank without one may have filled all of its tensors or
            none, and where ranks read for each other, with whatever they read.
    """
    comm = as_comm(comm)
    if share_reads not in (True, False, "auto"):
        raise ValueError(f'share_reads must be True, False or "auto", not {share_reads!r}')
    watch = Stopwatch()
    call = _LoadCall(
        state_dict,
        path,
        Stages.of(planner, load=True),
        strict,
        dtype,
        shape,
        format,
        "auto" if share_reads == "auto" else bool(share_reads),
        verify,
        progress,
        pool,
        counting(comm, partial(watch.count, "exchange")),
        watch,
    )
    if comm.world_size == 1:
        report = read_anew(lambda: (_open_reader(call),), partial(_load_alone, call))
    else:
        report = _finish(call, _share(call, _plan_together(call)))
    return logged(report, path, loud=comm.rank == comm.coordinator)


@attrs.frozen(eq=False)
class _LoadCall:
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
class _Target:
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
class _Planned:
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
        shares: Whether ranks read for each other.
    """

    opened: Opened
    target: _Target
    wanted: LoadPlan
    plan: LoadPlan
    into: Destinations
    blanks: Mapping[str, Any]
    tied: Mapping[str, str]
    resized: Resized
    unmatched: tuple[str, ...]
    shares: bool = False


def _open_reader(call: _LoadCall) -> Reader:
    with call.watch.phase("open"), naming_place(call.path):
        return Reader(open_located(*call.located, format=call.format, pool=call.pool), call.pool)


def _open(call: _LoadCall) -> Opened:
    reader = _open_reader(call)
    return Opened(reader.metadata, reader)


def _load_alone(call: _LoadCall, reader: Reader) -> LoadReport:
    opened = Opened(reader.metadata, reader)
    with call.watch.phase("plan"), naming_place(call.path):
        planned = _plan_reads(call, opened, _after_passes(call, _target(call, opened.metadata)))
    return _finish(call, planned)


def _target(call: _LoadCall, metadata: Metadata) -> _Target:
    """Plan what this rank holds, up to the first pass that needs all plans."""
    state = part(expand(call.state_dict), call.place)
    flat, paths = flatten(state)
    whole = whole_names(flat, paths, metadata)
    if whole:
        flat, paths = flatten(state, whole=whole)
    plan = local_plan(state, whole=whole)
    plan = attrs.evolve(plan, rank=call.comm.rank, world_size=call.comm.world_size)
    return _Target(state, flat, paths, whole, chain(*call.stages.own)((plan,))[0])


def _after_passes(call: _LoadCall, target: _Target) -> _Target:
    """Run the other passes on a single rank."""
    plan = with_replicas(chain(*call.stages.rest)((target.plan,)))[0]
    return attrs.evolve(target, plan=plan)


def _plan_reads(call: _LoadCall, opened: Opened, target: _Target) -> _Planned:
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
    made = blanks(target.flat, plan)
    given: Any = call.state_dict
    refuse_unfillable(part(given, call.place), target.paths, plan, made)
    values = [dest for dest, _ in value_names(plan.items)]
    refuse_fixed(call.state_dict, target.paths, [*values, *made])
    target = attrs.evolve(target, flat={**target.flat, **made})
    into = destinations(target.flat, plan.items, opened.reader)
    return _Planned(opened, target, plan, plan, into, made, tied, resized, unmatched)


# Together


def _plan_together(call: _LoadCall) -> _Planned:
    """Plan a load on all ranks, and raise on all alike what is wrong with what they want."""
    comm, verdict = call.comm, partial(_verdict, call)
    with call.watch.phase("exchange"):
        if call.stages.rest:
            opened, target = _run_passes(call)
            done = keep_step(comm, "plan", partial(_offer, call, opened, target), verdict)
        else:
            done = keep_step(comm, "plan", partial(_offer, call, wait=True), verdict)
            if done.got is None:  # it may be a file that one rank reads for all
                done = keep_step(comm, "plan", partial(_offer, call, _open_on_one(call)), verdict)
    if done.got["apart"]:
        text = f"they differ between ranks ({done.got['apart']})"
        remedy = "pass all ranks one path; if it is one, it was written meanwhile: load again"
        fail_alike(comm, "open", FormatError("the checkpoints", f"{text}; {remedy}"))
    if done.got["lost"]:
        why = "strict: {!r} matches no name that any rank wants"
        issues = [Issue("unmatched", p, why.format(p)) for p in done.got["lost"]]
        fail_alike(comm, "plan", PlanError(issues))
    assert done.mine is not None
    return attrs.evolve(done.mine, shares=done.got["share"])


def _run_passes(call: _LoadCall) -> tuple[Opened, _Target]:
    """Open the checkpoint, and run the passes that need the plans of all ranks."""
    sent = _open_on_one(call)

    def begin() -> Kept[tuple[Opened, _Target]]:
        opened = sent or _open(call)
        with naming_place(call.path):
            return Kept((opened, _target(call, opened.metadata)), None)

    opened, target = keep_step(call.comm, "plan", begin, lambda nothing: Kept(None, None)).mine
    _, plan = run_together(call.comm, call.stages, lambda: target.plan, call.watch)
    return opened, attrs.evolve(target, plan=plan)


def _open_on_one(call: _LoadCall) -> Opened | None:
    """Open a file of `torch.save` on the coordinator, which sends the others what it holds.

    None means that it is of another format, for every rank to open.
    """
    done = keep_step(call.comm, "open", lambda: Kept(None, None), lambda nothing: _open_file(call))
    if done.got is None or done.whole is not None:
        return done.whole
    return Opened(decode_metadata(done.got["metadata"]), None, decode_values(done.got["values"]))


def _open_file(call: _LoadCall) -> Kept[Opened | None]:
    """Open a file of `torch.save`; send what it holds, except for the tensors."""
    store, name = call.located
    if not name or not find_format(call.format or detect(store, name)).is_file:
        return Kept(None, None)
    reader = _open_reader(call)
    entries = reader.metadata.state_dict_metadata
    names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
    stored = store_values({name: reader.value(name) for name in names})
    sent = {"metadata": encode_metadata(reader.metadata), "values": encode_values(stored)}
    return Kept(Opened(reader.metadata, reader, stored), sent)


def _offer(
    call: _LoadCall,
    opened: Opened | None = None,
    target: _Target | None = None,
    *,
    wait: bool = False,
) -> Kept[_Planned | None]:
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


def _verdict(call: _LoadCall, offers: Sequence[Any]) -> Kept[None]:
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


def _share(call: _LoadCall, planned: _Planned) -> _Planned:
    """Have the coordinator decide who reads what for which ranks, where reads are shared."""
    opened = planned.opened
    metadata, blocks, gap = opened.metadata, opened.block_bytes, opened.max_gap
    if opened.values is None and not planned.shares:
        return planned
    most: dict[str, Any] = {"min_bytes": 1} if call.share is True else {}
    share = share_reads(metadata, block_bytes=blocks, max_gap=gap, **most)
    if opened.values is not None:
        share = read_on(call.comm.coordinator)

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


# Reading, and the end


@attrs.frozen
class _Everyone:
    """What all ranks did, and how many chunks were verified that several ranks read."""

    ranks: tuple[RankReport, ...]
    verified: int


def _read(call: _LoadCall, planned: _Planned) -> Kept[Outcome]:
    """Read what this rank reads; return the outcome, and a summary of it for the coordinator."""
    sums = BlockSums()
    with call.watch.phase("read"), naming_place(call.path):
        outcome = _fill(call, planned, sums)
        _settle(call, planned, sums)
    stats = outcome.stats + ReadStats(verified=sums.verified, unverified=-sums.nbytes)
    outcome = attrs.evolve(outcome, stats=stats)
    call.watch.count("read", stats.bytes_read)
    is_stateful = planned.target.state is not call.state_dict
    own = attrs.astuple(_own_report(call, planned, outcome))
    return Kept(outcome, (is_stateful, own, sums.pack(), stats.unverified))


def _fill(call: _LoadCall, planned: _Planned, sums: BlockSums) -> Outcome:
    """Fill this rank's tensors, alone or together with other ranks."""
    opened, plan, into = planned.opened, planned.plan, planned.into
    options: dict[str, Any] = {"verify": call.verify, "sums": sums, "progress": call.progress}
    if not len(plan.transfers) and opened.reader is not None:
        return read_rank(opened.reader, plan, into, **options)
    try:
        return read_shared(call.comm, opened, plan, into, place=str(call.path), **options)
    except (LostRanksError, PlanError, ValueRefusedError):
        raise
    except Exception as error:
        raise touching(error, planned.wanted.items, together=True) from error


def _settle(call: _LoadCall, planned: _Planned, sums: BlockSums) -> None:
    """Compare the checksums of chunks that several reads brought."""
    if planned.opened.reader is not None:
        try:
            sums.settle(planned.opened.reader.source)
        except FormatError as error:
            many = call.comm.world_size > 1
            raise touching(error, planned.wanted.items, together=many) from None


def _sum_up(call: _LoadCall, planned: _Planned, parts: list[tuple[Any, ...]]) -> Kept[_Everyone]:
    """Put together what the ranks have read, on the coordinator."""
    stateful, own, digests, unverified = zip(*parts, strict=True)
    ranks, sums = tuple(RankReport(*one) for one in own), BlockSums()
    for digest in digests:
        sums.unpack(digest)
    with naming_place(call.path):
        _settle(call, planned, sums)
    sent = {
        "total": sum(one.nbytes for one in ranks),
        "slowest": slowest_ranks(ranks) if len(ranks) > 1 else {},
        "stateful": any(stateful),
        "unverified": sum(unverified) - sums.nbytes,
    }
    return Kept(_Everyone(ranks, sums.verified), sent)


def _finish(call: _LoadCall, planned: _Planned) -> LoadReport:
    """Read on all ranks; once all have read, put what was read in its place; report."""
    target = planned.target
    with call.watch.phase("wait"):  # for the other ranks, as far as it is nothing else
        done = keep_step(
            call.comm, "read", partial(_read, call, planned), partial(_sum_up, call, planned)
        )
    for name, value in {**planned.blanks, **done.mine.values}.items():
        new = refilled(target.flat[name], value) if name in target.whole else value
        put(target.state, target.paths[name], new)
    planned.resized.put(target.state)
    if done.got["stateful"]:  # a step of its own, since any object may refuse its state
        hand_over = partial(_hand_over, call, target.state)
        take_step(call.comm, "load_state_dict", hand_over, lambda nothing: None)
    return _report(call, planned, done)


def _hand_over(call: _LoadCall, state: Any) -> None:
    """Give stateful objects their state."""
    with call.watch.phase("hand over"):
        unpart(state, state)
        give_back(call.state_dict, state)


def _own_report(call: _LoadCall, planned: _Planned, outcome: Outcome) -> RankReport:
    nbytes, sent = outcome.stats.bytes_read, outcome.sent
    return rank_report(call.comm, call.watch, planned.target.state, nbytes, sent)


def _report(call: _LoadCall, planned: _Planned, done: Taken[Outcome, _Everyone]) -> LoadReport:
    keys, outcome, reader = planned.plan.report, done.mine, planned.opened.reader
    needed = plan_bytes(planned.wanted, planned.opened.metadata)
    if reader is not None:
        names = [name for _, name in value_names(planned.wanted.items)]
        needed += values_read(reader, names).bytes_needed
    # On any rank but the coordinator, only its own report is known.
    everyone = done.whole or _Everyone((_own_report(call, planned, outcome),), 0)
    return LoadReport(
        missing=keys.missing,
        unexpected=without_other_ranks(keys.unexpected, planned.target.flat),
        mismatched=keys.mismatched,
        bytes_needed=needed,
        bytes_read=outcome.stats.bytes_read,
        requests=outcome.stats.requests,
        verified=outcome.stats.verified + everyone.verified,
        seconds=call.watch.seconds,
        bytes_received=outcome.received,
        total_read=done.got["total"],
        slowest={phase: tuple(rank) for phase, rank in done.got["slowest"].items()},
        ranks=everyone.ranks,
        phase_bytes=call.watch.nbytes,
        bytes_sent=outcome.sent,
        tied=planned.tied,
        dropped=keys.dropped,
        bytes_unverified=done.got["unverified"],
    )
