"""Load a checkpoint into a state dict: plan alone or together, read, and put in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import attrs

from shardplan.dist import Comm, LostRanksError, StepResult, Turn, take_step
from shardplan.io import BlockSums, FormatError, Pool, ProgressCallback, ValueRefusedError
from shardplan.io.execute import ReadStats
from shardplan.io.stores import Store
from shardplan.planning import Passes, PlanError, SavePlan, Strict
from shardplan.planning.passes import Stages, reading_of
from shardplan.planning.storage import plan_bytes, value_reads, without_other_ranks

from ._arrivals import LoadFuture, load_later, read_by_key
from ._comm import JobComm, as_comm, counting
from ._content_hash import content_hash
from ._load_plan import LoadCall, PlannedLoad, open_reader, plan_alone, plan_together, share_reading
from ._read import Outcome, naming_place, read_anew, read_rank, read_shared, touching, values_read
from ._report import (
    LoadReport,
    RankReport,
    Stopwatch,
    logged,
    place_name,
    rank_report,
    slowest_ranks,
)
from ._state import State, give_back, put, refilled, unpart


@overload
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
    trace: bool = False,
    expect: str | None = None,
    background: Literal[False] = False,
) -> LoadReport: ...
@overload
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
    trace: bool = False,
    expect: None = None,
    background: Literal[True],
) -> LoadFuture: ...
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
    trace: bool = False,
    expect: str | None = None,
    background: bool = False,
) -> LoadReport | LoadFuture:
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
        planner: The pass, or the list of passes, that it was saved with. Passes that only choose
            who writes, such as `dedup_replicas`, are skipped where that makes no difference. What
            passes drop is not filled, and reported. `dequantize` reads a quantised model as if it
            were not.
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
            what this process fills and reads for others. What it raises stops the load.
        pool: The threads and the memory budget to use.
        trace: Whether to report what each pass of ``planner`` does, as in `save`; passes that are
            skipped do not appear.
        expect: What `content_hash` of the state dict must be once it is filled, as the side that
            saved it computed it. It costs a pass over all tensors. Not with ``background``.
        background: Whether to return once all is planned, and read in a thread. The result is then
            a future of the report, and ``future["model.w"]`` one of that tensor: done as soon as it
            is filled, and the chunks of it that this rank reads whole are verified. Tensors arrive
            in the order of the state dict, or all at the end if ranks read for each other. Values
            and the state of objects are in their places once the load is done. Until then, use
            nothing of the state dict but the tensors that have arrived. The default ``comm`` has
            connections of its own. Errors after planning are raised by the future. Reading
            does not start again if the checkpoint is overwritten meanwhile.

    Returns:
        What did not fit, what was read, and how long it took, by phase and by rank; with
        ``background``, a future of it.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> sd = {"w": torch.zeros(2), "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"w": torch.ones(2), "step": 7}, folder)
    ...     report = load(sd, folder)
    ...     future = load(sd, folder, background=True)
    ...     future["w"].result().sum(), future.result().bytes_read
    (tensor(2.), 8)
    >>> sd, report.bytes_read
    ({'w': tensor([1., 1.]), 'step': 7}, 8)

    Raises:
        PlanError: Something that must be filled cannot be; nothing was changed.
        FormatError: The checkpoint is damaged, or not the one that ``expect`` says; ``filled`` and
            ``touched`` say what was changed.
        LoadError: Anything else stopped the load half way; it says what was changed, too.
        StoreError: The checkpoint cannot be read at all; nothing was changed.
        CheckpointError: On many ranks, any of these; it says what happened on which rank, and its
            ``own`` is this rank's error. If it is None, this rank's tensors may have
            been filled or not; with shared reads, take their contents for undefined.
    """
    comm = JobComm().take() if background and comm is None else as_comm(comm)
    if share_reads not in (True, False, "auto"):
        raise ValueError(f'share_reads must be True, False or "auto", not {share_reads!r}')
    if background and expect is not None:
        raise ValueError("expect needs all tensors: compare content_hash once the future is done")
    watch, reading = Stopwatch(), reading_of(planner)
    call = LoadCall(
        state_dict,
        path,
        reading,
        Stages.of(reading.planner, load=True),
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
        trace,
    )
    if background:
        return load_later(call, _planned(call), _logged_finish)
    if comm.world_size == 1:
        report = read_anew(
            lambda: (open_reader(call),), lambda reader: _finish(call, plan_alone(call, reader))
        )
    else:
        report = _finish(call, _planned(call))
    if expect is not None and (found := content_hash(state_dict, comm=comm)) != expect:
        reason = f"it was loaded, and its content hash is {found}, not {expect} as expected"
        raise FormatError(place_name(path), reason)
    return logged(report, path, loud=comm.rank == comm.coordinator)


def _planned(call: LoadCall) -> PlannedLoad:
    if call.comm.world_size == 1:
        return plan_alone(call, open_reader(call))
    return share_reading(call, plan_together(call))


def _logged_finish(call: LoadCall, planned: PlannedLoad) -> LoadReport:
    report = _finish(call, planned)
    return logged(report, call.path, loud=call.comm.rank == call.comm.coordinator)


@attrs.frozen
class _Everyone:
    """What all ranks did, and how many chunks were verified that several ranks read."""

    ranks: tuple[RankReport, ...]
    verified: int


@attrs.frozen
class _Total:
    """What every rank has to know of what all did; see `LoadReport`."""

    nbytes: int
    slowest: Mapping[str, tuple[int, float]]
    is_stateful: bool
    unverified: int


def _read(call: LoadCall, planned: PlannedLoad) -> Turn[Outcome]:
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
    return Turn(outcome, (is_stateful, own, sums.pack(), stats.unverified))


def _fill(call: LoadCall, planned: PlannedLoad, sums: BlockSums) -> Outcome:
    """Fill this rank's tensors, alone or together with other ranks."""
    opened, shared, into = planned.opened, planned.shared, planned.into
    options: dict[str, Any] = {"verify": call.verify, "sums": sums, "progress": call.progress}
    if shared is None and opened.reader is not None:
        if call.arrivals is not None:
            return read_by_key(call.arrivals, opened.reader, planned, **options)
        return read_rank(opened.reader, planned.plan, into, **options)
    assert shared is not None
    try:
        return read_shared(call.comm, opened, shared, into, place=str(call.path), **options)
    except (LostRanksError, PlanError, ValueRefusedError):
        raise
    except Exception as error:
        raise touching(error, planned.wanted.items, together=True) from error


def _settle(call: LoadCall, planned: PlannedLoad, sums: BlockSums) -> None:
    """Compare the checksums of chunks that several reads brought."""
    if planned.opened.reader is not None:
        try:
            sums.settle(planned.opened.reader.source)
        except FormatError as error:
            many = call.comm.world_size > 1
            raise touching(error, planned.wanted.items, together=many) from None


def _sum_up(call: LoadCall, planned: PlannedLoad, parts: list[tuple[Any, ...]]) -> Turn[_Everyone]:
    """Put together what the ranks have read, on the coordinator."""
    stateful, own, digests, unverified = zip(*parts, strict=True)
    ranks, sums = tuple(RankReport(*fields) for fields in own), BlockSums()
    for digest in digests:
        sums.unpack(digest)
    with naming_place(call.path):
        _settle(call, planned, sums)
    total = _Total(
        sum(report.nbytes for report in ranks),
        slowest_ranks(ranks) if len(ranks) > 1 else {},
        any(stateful),
        sum(unverified) - sums.nbytes,
    )
    return Turn(_Everyone(ranks, sums.verified), attrs.astuple(total))


def _finish(call: LoadCall, planned: PlannedLoad) -> LoadReport:
    """Read on all ranks; once all have read, put what was read in its place; report."""
    target = planned.target
    with call.watch.phase("wait"):  # for the other ranks, as far as it is nothing else
        done = take_step(
            call.comm, "read", partial(_read, call, planned), partial(_sum_up, call, planned)
        )
    total = _Total(*done.reply)
    for name, value in {**planned.blanks, **done.mine.values}.items():
        new = refilled(target.flat[name], value) if name in target.whole else value
        put(target.state, target.paths[name], new)
    planned.resized.put(target.state)
    if total.is_stateful:  # a step of its own, since any object may refuse its state
        hand_over = partial(_hand_over, call, target.state)
        take_step(call.comm, "load_state_dict", hand_over, lambda nothing: Turn(None, None))
    return _report(call, planned, done, total)


def _hand_over(call: LoadCall, state: Any) -> Turn[None]:
    """Give stateful objects their state."""
    with call.watch.phase("hand over"):
        unpart(state, state)
        give_back(call.state_dict, state)
    return Turn(None, None)


def _own_report(call: LoadCall, planned: PlannedLoad, outcome: Outcome) -> RankReport:
    nbytes, sent = outcome.stats.bytes_read, outcome.sent
    return rank_report(call.comm, call.watch, planned.target.state, nbytes, sent)


def _report(
    call: LoadCall, planned: PlannedLoad, done: StepResult[Outcome, _Everyone], total: _Total
) -> LoadReport:
    keys, outcome, reader = planned.plan.report, done.mine, planned.opened.reader
    needed = plan_bytes(planned.wanted, planned.opened.metadata)
    if reader is not None:
        names = [name for _, name in value_reads(planned.wanted.items)]
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
        total_read=total.nbytes,
        slowest=dict(total.slowest),
        ranks=everyone.ranks,
        phase_bytes=call.watch.nbytes,
        bytes_sent=outcome.sent,
        tied=planned.tied,
        dropped=keys.dropped,
        bytes_unverified=total.unverified,
        trace=planned.target.trace,
    )
