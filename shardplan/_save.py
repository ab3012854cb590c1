"""Save a state dict, on one rank or on many, in the four steps of torch's `_save_state_dict`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from shardplan.dist import CheckpointError, Comm, StepResult, Turn, broadcast, take_step
from shardplan.io import Pool, Progress, ProgressCallback, UnsureCommitError
from shardplan.io.formats import CommitJob, ExtraFiles, Part, WriteJob, Writer, open_target
from shardplan.io.stores import Store
from shardplan.planning import Passes, SavePlan
from shardplan.planning.storage import written_bytes

from ._agree import Agreed, agree
from ._checkpoint import refuse_saved
from ._comm import as_comm, counting, place_of
from ._incremental import NOTHING_SHARED, Base, Sharing, base_of, share
from ._offers import Begun, PlanCache
from ._report import LOG, RankReport, SaveReport, Stopwatch, logged, rank_report, slowest_ranks
from ._state import REFUSALS, State, expand, part, with_others

if TYPE_CHECKING:
    from ._writer import WriterProcess


def save(
    state_dict: State,
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    format: str = "safetensors",
    extra_files: ExtraFiles | None = None,
    comm: Comm | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
    cache: PlanCache | None = None,
    trace: bool = False,
    base: str | os.PathLike[str] | Store | None = None,
) -> SaveReport:
    """Save a state dict as a checkpoint, which appears complete or not at all.

    On many ranks, every rank calls this with its part, and writes what the common plan assigns to
    it; each replica is written once. If any rank fails, all raise the same `CheckpointError`, and
    an earlier checkpoint stays as it was.

    Args:
        state_dict: Tensors and other values, nested in any way. Objects with ``state_dict()`` and
            ``load_state_dict()``, in it or in its place, are saved as the state they return. State
            that differs between ranks is a `PerRank`; everything else that several ranks hold
            under one name must be equal.
        path: A folder for the checkpoint, on a disk or in an object store; for a single-file
            format, that file.
        planner: A pass, or a list of them, such as ``[rename(...), cast("bfloat16")]``. Load with
            the same one. A pass gets one plan or all plans, depending on its scope: see
            `shardplan.planning.passes.base`.
        format: ``"safetensors"``, ``"hf"``, ``"dcp"``, ``"torch"``, or a format registered with
            `shardplan.io.formats.register_format`.
        extra_files: For ``"hf"``: files to put beside the tensors, by name, as paths or bytes; or
            a folder whose ``config.json``, generation config and tokenizer are copied.
        comm: The ranks; by default all of torch's process group, or this process alone (which is
            refused under torchrun unless you pass ``comm=solo()``).
        overwrite: Whether an existing checkpoint may be replaced. It can be loaded until the new
            one can.
        verify_replicas: Whether to compare every chunk that several ranks hold, bit by bit, before
            anything is written. It costs a pass over all tensors. Values, and plain tensors of up
            to 64 KiB, are always compared.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, as
            this process writes its tensors. An exception from it stops the save.
        pool: The threads and the memory budget to use.
        cache: Plans of earlier saves; by default those of this process.
        trace: Whether to report what each pass of ``planner`` does, as `show` prints it: on each
            rank those that it runs. The plans of earlier saves are not used.
        base: An earlier checkpoint of our own format, on the same disk: files of it in which most
            is unchanged are not written anew, but get a second name (a hard link) in the new
            folder. Either checkpoint can be removed without harm to the other. All tensors are
            hashed once more. On disks without links, and in object stores, all is written.

    Returns:
        What was written, what the planner left out, and how long it took, by phase and by rank.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save({"w": torch.zeros(2, 3), "step": 7}, folder)
    ...     sorted(name.split("-")[0] for name in os.listdir(folder))
    ['shard', 'shardplan.json']

    Raises:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        ValueRefusedError: Some values cannot be stored safely; it names all of them, and nothing
            was written.
        PlanError, RefusedError: There is no correct plan, or ranks hold different values under one
            name.
        StoreError: The store failed; an earlier checkpoint is intact.
        CheckpointError: On many ranks, any of these, with the error of each rank.
    """
    ranks = as_comm(comm)
    options = SaveOptions(planner, overwrite, verify_replicas, progress, pool, cache, trace)
    options = attrs.evolve(options, base=base_of(base, format))

    def state() -> Mapping[Any, Any]:
        return part(expand(state_dict), place_of(ranks))

    try:
        opening = partial(Destination.open, path, format, extra_files)
        return save_state(ranks, opening, state, options, Stopwatch())
    except REFUSALS as error:
        if planner is None:  # with one, it is unknown what it would have left out
            raise with_others(error, state()) from error.__cause__
        raise


@attrs.frozen(eq=False)
class SaveOptions:
    """How to save; the fields are arguments of `save`."""

    planner: Passes[SavePlan] | None
    overwrite: bool
    verify_replicas: bool
    progress: ProgressCallback | None
    pool: Pool | None
    cache: PlanCache | None
    trace: bool = False
    base: Base | None = None


@attrs.frozen(eq=False)
class Destination:
    """The destination of a checkpoint, its writer, and the process in which that writes."""

    store: Store
    writer: Writer
    format: str
    process: WriterProcess | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Store,
        format: str,
        extra_files: ExtraFiles | None = None,
    ) -> Destination:
        """Open a target; nothing is written."""
        options = {} if extra_files is None else {"extra_files": extra_files}
        return cls(*open_target(path, format, **options), format)

    def write(self, job: WriteJob) -> Part:
        """Write one rank's part, here or in the writer process."""
        if self.process is not None:
            return self.process.write(self.writer, job)
        return self.writer.write(job)

    def check(self, comm: Comm, overwrite: bool) -> None:
        """Raise if these ranks cannot save here."""
        shared = self.writer.shares_files and not self.store.can_share_files
        most = 1 if shared else self.writer.max_ranks
        if most is not None and most < comm.world_size:
            raise ValueError(
                f"{comm.world_size} ranks cannot save as {self.format!r} to {self.store.url} (at "
                f"most {most} can); "
                f'save with format="safetensors", then `convert` to {self.format!r} on any ranks'
            )
        if comm.rank == comm.coordinator:
            self.writer.refuse(self.store, overwrite)

    def __str__(self) -> str:
        return f"{self.format} at {self.store.url}"


def save_state(
    comm: Comm,
    target: Callable[[], Destination],
    state: Callable[[], Mapping[Any, Any]],
    options: SaveOptions,
    watch: Stopwatch,
) -> SaveReport:
    """Save the result of ``state`` to ``target``; see `save`.

    1. local plan: each rank opens the target and describes its state dict.
    2. global plan: all ranks agree on who writes what; if the save is based on an earlier one,
       then on what is not written, as it is unchanged.
    3. write: each rank writes its part; if ranks share files, one rank lays these out before.
    4. commit: once all have written, the coordinator commits, and ranks report.
    """
    comm = counting(comm, partial(watch.count, "exchange"))

    def begin() -> Begun[Destination]:
        with watch.phase("open"):
            opened = target()
            opened.check(comm, options.overwrite)
        return Begun(refuse_saved(state()), opened)

    agreed = agree(
        comm,
        begin,
        planner=options.planner,
        watch=watch,
        cache=options.cache,
        verify_replicas=options.verify_replicas,
        trace=options.trace,
    )
    saving = _AgreedSave(comm, agreed, options, watch)
    if options.base is not None:
        with watch.phase("compare"):
            saving = saving.sharing_with(options.base)
    with watch.phase("wait"):  # for the other ranks
        done = saving.carry_out()
    report = saving.report(done)
    return logged(report, report.path, loud=comm.rank == comm.coordinator, left=report.leftovers)


@attrs.frozen
class _Total:
    """What all ranks wrote, and the slowest rank of each phase; see `SaveReport`."""

    files: int
    nbytes: int
    leftovers: tuple[str, ...]
    dropped: tuple[str, ...]
    shared: int
    slowest: Mapping[str, tuple[int, float]]


@attrs.frozen(eq=False)
class _AgreedSave:
    """A save that all ranks have agreed on, as one rank carries it out."""

    comm: Comm
    agreed: Agreed[Destination]
    options: SaveOptions
    watch: Stopwatch
    sharing: Sharing = NOTHING_SHARED

    def sharing_with(self, base: Base) -> _AgreedSave:
        """Return what is left to do, given a checkpoint that has some of it already."""
        name = broadcast(self.comm, "choose the earlier checkpoint", base.choose)
        step = "open the earlier checkpoint"
        source = take_step(self.comm, step, lambda: Turn(base.open(name), None), _nothing).mine
        agreement, target = self.agreed.agreement, self.target
        sharing = share(self.comm, source, self.agreed.begun.sd, agreement.plan, target.store)
        whole = agreement.whole
        if whole is not None:
            whole = attrs.evolve(whole, plans=sharing.left_of_all(whole.plans))
            if sharing.files is not None and not any(map(written_bytes, whole.plans)):
                text = "no tensor of %s has changed since save %s: is what is trained in it?"
                LOG.warning(text, target.store.url, sharing.files.source.save_id)
        plan = sharing.left_of(agreement.plan)
        agreed = attrs.evolve(
            self.agreed, agreement=attrs.evolve(agreement, plan=plan, whole=whole)
        )
        return attrs.evolve(self, agreed=agreed, sharing=sharing)

    @property
    def target(self) -> Destination:
        return self.agreed.begun.target

    def carry_out(self) -> StepResult[Part, tuple[RankReport, ...]]:
        """Write on all ranks, and commit; if that fails, no rank leaves anything."""
        try:
            write = partial(self.write, self.lay_out())
            return take_step(self.comm, "write", write, self.commit, undo=self.discard)
        except BaseException as error:
            if self.comm.rank == self.comm.coordinator:  # which knows whether it committed
                self.target.writer.clear(self.target.store, self.agreed.save_id)
                if surely_failed(error):
                    self.sharing.undo(self.target.store)
            raise

    def lay_out(self) -> bytes | None:
        """Have the coordinator make the files that ranks share; None if each has its own."""
        writer, comm = self.target.writer, self.comm
        if comm.world_size == 1 or not writer.shares_files:
            return None

        def describe() -> Turn[None]:
            return Turn(None, writer.describe(self._job()))

        def make(reports: list[bytes]) -> Turn[None]:
            return Turn(None, writer.lay_out(self._commit_job(reports)))

        layout: bytes = take_step(comm, "lay out files", describe, make).reply
        return layout

    def write(self, layout: bytes | None) -> Turn[Part]:
        """Write this rank's part."""
        plan = self.agreed.agreement.plan
        with self.watch.phase("write"):
            progress = Progress(int(plan.items.nbytes.sum()), self.options.progress)
            job = attrs.evolve(self._job(), progress=progress, layout=layout)
            part = self.target.write(job)
            progress.finish()
        self.watch.count("write", part.nbytes)
        return Turn(part, (attrs.astuple(part), attrs.astuple(self._rank_report(part))))

    def commit(self, written: list[Any]) -> Turn[tuple[RankReport, ...]]:
        """Publish what all ranks have written, on the coordinator."""
        parts = [Part(*fields) for fields, _ in written]
        whole = self.agreed.agreement.whole
        assert whole is not None
        with self.watch.phase("commit"):
            job = self._commit_job([part.report for part in parts])
            leftovers = self.target.writer.commit(job)
        reports = [RankReport(*fields) for _, fields in written]
        seconds, nbytes = dict(self.watch.seconds), dict(self.watch.nbytes)  # with the commit
        own = attrs.evolve(reports[self.comm.rank], seconds=seconds, phase_bytes=nbytes)
        reports[self.comm.rank] = own
        total = _Total(
            sum(part.files for part in parts),
            sum(part.nbytes for part in parts),
            tuple(leftovers),
            tuple(whole.dropped),
            self.sharing.nbytes,
            slowest_ranks(reports) if self.comm.world_size > 1 else {},
        )
        return Turn(tuple(reports), attrs.astuple(total))

    def _job(self) -> WriteJob:
        return WriteJob(
            self.target.store,
            self.agreed.begun.sd,
            self.agreed.agreement.plan,
            self.agreed.save_id,
            self.comm.rank,
            self.options.pool,
            is_coordinator=self.comm.rank == self.comm.coordinator,
        )

    def _commit_job(self, reports: list[bytes]) -> CommitJob:
        whole = self.agreed.agreement.whole
        assert whole is not None
        return CommitJob(
            self.target.store,
            whole.metadata,
            whole.plans,
            reports,
            self.agreed.save_id,
            self.options.overwrite,
            self.sharing.files,
        )

    def discard(self, part: Part, error: BaseException) -> None:
        """Remove what this rank wrote, if the save has certainly failed."""
        if surely_failed(error):
            self.target.writer.discard(self.target.store, part.report, self.agreed.save_id)

    def report(self, done: StepResult[Part, tuple[RankReport, ...]]) -> SaveReport:
        total = _Total(*done.reply)
        return SaveReport(
            self.target.store.url,
            self.agreed.save_id,
            total.files,
            total.nbytes,
            self.watch.seconds,
            tuple(total.leftovers),
            self.agreed.agreement.how,
            dict(total.slowest),
            done.whole or (self._rank_report(done.mine),),
            phase_bytes=self.watch.nbytes,
            dropped=tuple(total.dropped),
            shared=total.shared,
            trace=self.agreed.agreement.trace,
        )

    def _rank_report(self, part: Part) -> RankReport:
        return rank_report(self.comm, self.watch, self.agreed.begun.sd, part.nbytes)


def _nothing(_: object) -> Turn[None]:
    return Turn(None, None)


def surely_failed(error: BaseException) -> bool:
    """Return True if no rank has committed or still can.

    Lost ranks may not know of the failure, a store may still carry out what it seemed to refuse,
    and an interrupt may come at any time.
    """
    if isinstance(error, CheckpointError):
        unsure = {"LostRank", UnsureCommitError.__name__}
        return all(failure.type not in unsure for failure in error.failures)
    return isinstance(error, Exception) and not isinstance(error, UnsureCommitError)
