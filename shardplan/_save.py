"""Save a state dict, on one rank or on many."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io import Pool, Progress, Tell, UnsureCommitError
from shardplan.io.formats import Part, Writer, open_target
from shardplan.io.stores import Store
from shardplan.planning import Passes, SavePlan

from ._agreement import Agreement, PlanCache, agree
from ._comm import Counted, as_comm, place_of, take_step
from ._per_rank import part
from ._profiling import profiled
from ._refusing import REFUSALS, with_others
from ._report import RankReport, SaveReport, Stopwatch, logged, rank_report, slowest_ranks
from ._stateful import State, expand

__all__ = ["save", "save_state"]


def save(
    state_dict: State,
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    format: str = "safetensors",
    comm: Comm | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    profile: bool = False,
    progress: Tell | None = None,
    pool: Pool | None = None,
    cache: PlanCache | None = None,
) -> SaveReport:
    """Save a state dict as a checkpoint, which exists whole or not at all.

    On many ranks, every rank calls this with its part. Each writes in parallel what the common plan
    says, replicas once; when all have written, one rank commits. If any rank fails, all raise one
    `CheckpointError`, and what was there before is still there.

    Args:
        state_dict: Tensors and other values, nested in any way. Objects with ``state_dict()`` and
            ``load_state_dict()``, in it or in its place, are saved as the state they return. What
            is meant to differ between ranks is a `PerRank`; all else that several ranks have under
            one name must be the same.
        path: A folder that will hold the checkpoint, on a disk or in an object store; for a format
            that is a single file, that file.
        planner: A pass, or a list of them, such as ``[rename(...), cast("bfloat16")]``. Load with
            the same one. Each is given what its scope says: see `shardplan.planning.passes.base`.
        format: What to write: ``"safetensors"``, ``"hf"``, ``"dcp"``, ``"torch"``, or a format
            that was registered with `shardplan.io.formats.register_format`.
        comm: The ranks; by default all of torch's process group, or this process alone (which is
            refused under torchrun: pass ``comm=solo()`` if it is meant).
        overwrite: Whether a checkpoint that is there may be replaced. It can be loaded up to the
            instant at which the new one can.
        verify_replicas: Whether to compare all that several ranks claim to hold alike, bit by bit,
            before anything is written. It costs a pass over all such tensors. Values, and plain
            tensors of up to 64 KiB, are always compared.
        profile: Whether the coordinator's report tells its hottest functions.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, with
            ever more bytes of this process's tensors done, and all of them in the end. What it
            raises stops the save.
        pool: The threads and the memory budget to use.
        cache: Plans made before; by default those of this process.

    Returns:
        What was written, what the planner left out, and how long it took, by phase and by rank.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save({"w": torch.zeros(2, 3), "step": 7}, folder)
    ...     sorted(name.split("-")[0] for name in os.listdir(folder))
    ['shard', 'shardplan.json']

    Raises:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        ValueRefusedError: Some values cannot be stored safely; all are named, nothing was written.
        PlanError, RefusedError: There is no correct plan, or ranks hold different values under one
            name.
        StoreError: The store failed; what was there before is intact.
        CheckpointError: On many ranks, any of these; it tells what happened on which rank.
    """
    ranks = as_comm(comm)

    def state() -> Mapping[Any, Any]:
        return part(expand(state_dict), place_of(ranks))

    try:
        return save_state(
            state,
            path,
            planner=planner,
            format=format,
            comm=ranks,
            overwrite=overwrite,
            verify_replicas=verify_replicas,
            profile=profile,
            progress=progress,
            pool=pool,
            cache=cache,
            watch=Stopwatch(),
        )
    except REFUSALS as error:
        if planner is None:  # else nobody knows what it would have left out
            raise with_others(error, state()) from error.__cause__
        raise


def save_state(
    state: Callable[[], Mapping[Any, Any]],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None,
    format: str,
    comm: Comm,
    overwrite: bool,
    verify_replicas: bool,
    profile: bool,
    progress: Tell | None,
    pool: Pool | None,
    cache: PlanCache | None,
    watch: Stopwatch,
) -> SaveReport:
    """Save what ``state`` returns; all else is as in `save`."""
    comm = Counted(comm, partial(watch.count, "exchange"))
    targets: list[tuple[Store, Writer]] = []

    def begin() -> str:
        store, writer = open_target(path, format)
        most = writer.max_ranks
        if most is not None and most < comm.world_size:
            raise ValueError(
                f"{comm.world_size} ranks cannot save as {format!r}, which {most} can; save with "
                f'format="safetensors", and make {format!r} of that with `convert`, on as many '
                "ranks as you like"
            )
        if comm.rank == comm.coordinator:
            writer.refuse(store, overwrite)
        targets.append((store, writer))
        return f"{format} at {store.url}"

    with profiled(profile and comm.rank == comm.coordinator) as hot:
        sd, agreement, save_id = agree(
            comm,
            state,
            planner=planner,
            watch=watch,
            cache=cache,
            verify_replicas=verify_replicas,
            first=begin,
        )
        task = SaveTask(comm, *targets[0], sd, agreement, save_id, overwrite, pool, progress)
        report = task.run(watch)
    loud = comm.rank == comm.coordinator
    done = attrs.evolve(report, profile=tuple(hot))
    return logged(done, report.path, loud=loud, left=report.leftovers)


@attrs.frozen(eq=False)
class SaveTask:
    """A save that was agreed on and is to be carried out.

    Attributes:
        comm: The ranks.
        store: Where to.
        writer: The format.
        sd: This rank's state dict, or a snapshot of it.
        agreement: The plan.
        save_id: The name of the save.
        overwrite: Whether a checkpoint that is there may be replaced.
        pool: The threads and the memory budget to use.
        progress: Called with the bytes of tensors done, and in all.
    """

    comm: Comm
    store: Store
    writer: Writer
    sd: Mapping[Any, Any]
    agreement: Agreement
    save_id: str
    overwrite: bool
    pool: Pool | None = None
    progress: Tell | None = None

    def run(self, watch: Stopwatch) -> SaveReport:
        """Write this rank's part; once all ranks have, commit."""
        comm, parts = self.comm, list[Part]()
        everyone: list[RankReport] = []

        def write() -> dict[str, Any]:
            with watch.phase("write"):
                progress = Progress(int(self.agreement.plan.items.nbytes.sum()), self.progress)
                part = self.writer.write(
                    self.store,
                    self.sd,
                    self.agreement.plan,
                    save_id=self.save_id,
                    rank=comm.rank,
                    pool=self.pool,
                    progress=progress,
                )
                progress.finish()
            parts.append(part)
            watch.count("write", part.nbytes)
            return {"part": attrs.astuple(part), "rank": attrs.astuple(self._own(watch, part))}

        def commit(written: list[dict[str, Any]]) -> dict[str, Any]:
            told = [Part(*one["part"]) for one in written]
            plans, metadata = self.agreement.plans, self.agreement.metadata
            assert plans is not None
            assert metadata is not None
            with watch.phase("commit"):
                left = self.writer.commit(
                    self.store,
                    metadata,
                    plans,
                    [part.report for part in told],
                    save_id=self.save_id,
                    overwrite=self.overwrite,
                )
            everyone.extend(RankReport(*one["rank"]) for one in written)
            everyone[comm.rank] = self._own(watch, parts[0])  # who commits, with that
            return {
                "files": sum(part.files for part in told),
                "nbytes": sum(part.nbytes for part in told),
                "leftovers": left,
                "dropped": self.agreement.dropped,
                "slowest": slowest_ranks(everyone) if comm.world_size > 1 else {},
            }

        try:
            with watch.phase("wait"):  # for the other ranks, as far as it is nothing else
                done = take_step(comm, "write", write, commit)
        except BaseException as error:
            if parts and _surely_failed(error):
                self.writer.discard(self.store, parts[0].report, self.save_id)
            raise
        return SaveReport(
            self.store.url,
            self.save_id,
            done["files"],
            done["nbytes"],
            watch.seconds,
            tuple(done["leftovers"]),
            self.agreement.how,
            {phase: tuple(found) for phase, found in done["slowest"].items()},
            tuple(everyone) or (self._own(watch, parts[0]),),
            phase_bytes=watch.nbytes,
            dropped=tuple(done["dropped"]),
        )

    def _own(self, watch: Stopwatch, part: Part) -> RankReport:
        return rank_report(self.comm, watch, self.sd, part.nbytes)


def _surely_failed(error: BaseException) -> bool:
    """Return True if no rank has committed or still can.

    Ranks that were lost may know nothing of the failure, a store may carry out late what it seemed
    to refuse, and an interrupt may come at any time.
    """
    if isinstance(error, CheckpointError):
        unsure = {"LostRank", UnsureCommitError.__name__}
        return all(failure.type not in unsure for failure in error.failures)
    return isinstance(error, Exception) and not isinstance(error, UnsureCommitError)
