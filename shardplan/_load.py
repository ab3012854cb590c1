"""Load a checkpoint into a state dict, on one rank or on many."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, Literal, cast

import attrs
import torch

from shardplan.dist import Comm, LostRanksError, all_reduce, reduce_scatter
from shardplan.io import BlockSums, FormatError, Pool, StoredValue, Tell, ValueRefusedError
from shardplan.io.execute import Reader
from shardplan.io.formats import detect, find_format, locate, open_located
from shardplan.io.stores import Store
from shardplan.planning import (
    LoadPlan,
    Metadata,
    Pass,
    Passes,
    PlanError,
    SavePlan,
    Strict,
    chain,
    decode_plan,
    decode_plans,
    encode_plan,
    fingerprint,
    flatten,
    global_load_plan,
    load_plan,
    local_plan,
    read_on,
    split_reads,
    strict_patterns,
    whole_names,
    with_replicas,
)
from shardplan.planning import share_reads as share_pass
from shardplan.planning.passes import Stages
from shardplan.planning.storage import BLOCK_BYTES

from ._agree import run_together
from ._announcing import announce
from ._comm import as_comm, counting, host_name, place_of, take_step
from ._destinations import destinations, refuse_fixed
from ._fanout import MIN_SHARED
from ._freshness import ATTEMPTS, STOPPED, begins_anew
from ._memory import blanks, refuse_unfillable, tied_names
from ._nested import put, refilled
from ._parcels import value_names, values_read
from ._reading import Outcome, SharedRead, noting, overwritten, read_rank
from ._report import (
    LoadReport,
    RankReport,
    Stopwatch,
    logged,
    place_name,
    rank_report,
    slowest_ranks,
)
from ._resizing import Resized, resize, without_other_ranks
from ._state import State, expand, give_back, part, unpart
from ._wishes import Wish, fetched_bytes, gap_of, heed, judged, named, nbytes_of, tensor_bytes

__all__ = ["load"]


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
    progress: Tell | None = None,
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
        dtype: ``"same"`` takes another stored dtype for a mistake, ``"cast"`` for a wish to cast.
        shape: ``"same"`` takes another shape for a mistake; ``"overlap"`` fills what both have.
        format: What wrote the checkpoint; found out if left out.
        comm: The ranks; by default all of torch's process group, or this process alone (which is
            refused under torchrun: pass ``comm=solo()`` if it is meant).
        share_reads: Whether bytes that several ranks need are read by one of them and sent to the
            others. ``"auto"`` does so where that is cheaper: not from a disk of the same machine.
        verify: Whether to check what is read whole against its checksums.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, with
            ever more bytes of this process's tensors done, and of what it reads for others, and all
            of them in the end. What it raises stops the load.
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
        CheckpointError: On many ranks, any of these; it tells what happened on which rank, and its
            ``own`` is this rank's error. A rank without one may have filled all of its tensors or
            none, and where ranks read for each other, with whatever they read.
    """
    comm = as_comm(comm)
    if share_reads not in (True, False, "auto"):
        raise ValueError(f'share_reads must be True, False or "auto", not {share_reads!r}')
    watch, stages = Stopwatch(), Stages.of(planner, load=True)
    for left in reversed(range(ATTEMPTS if comm.world_size == 1 else 1)):
        task = _Load(comm, path, format, pool, watch)

        def plan(task: _Load = task) -> LoadPlan:
            local = task.local(state_dict, stages)
            must = task.patterns(strict, local)
            task.tied = tied_names(local, task.flat, task.metadata)
            task.resize(local, must, verify)
            found = load_plan(
                task.metadata,
                local,
                strict=must,
                dtype=dtype,
                shape=shape,
                optional={*task.tied, *task.resized.names},
            )
            task.blanks = blanks(task.flat, found)
            refuse_unfillable(task.parted(state_dict), task.paths, found, task.blanks)
            names = [dest for dest, _ in value_names(found.items)]
            refuse_fixed(state_dict, task.paths, [*names, *task.blanks])
            task.flat = {**task.flat, **task.blanks}
            task.dest = destinations(task.flat, found.items, task.reader)
            return found

        try:
            if stages.rest and comm.world_size > 1:
                task.run_passes(state_dict, stages)
            noting(path, task.plan_with)(plan, share_reads)
            report = task.run(verify, state_dict, progress)
            break
        except STOPPED:  # if it was overwritten meanwhile, the new checkpoint is loaded
            if not left or not begins_anew(task.reader):
                raise
    return logged(report, path, loud=comm.rank == comm.coordinator)


class _Load:
    """A load on all ranks: what this rank does of it."""

    def __init__(
        self,
        comm: Comm,
        path: str | os.PathLike[str] | Store,
        format: str | None,
        pool: Pool | None,
        watch: Stopwatch,
    ) -> None:
        self.comm, self.watch = counting(comm, partial(watch.count, "exchange")), watch
        self._path, self._format, self._pool = path, format, pool
        self.reader: Reader | None = None
        self.metadata = Metadata({})
        self.told: Mapping[str, StoredValue] | None = None
        self.sd: Mapping[Any, Any] = {}
        self.flat: Mapping[str, Any] = {}
        self.dest: Callable[[int], torch.Tensor] | None = None
        self.tied: Mapping[str, str] = {}
        self.resized = Resized((), frozenset())
        self.blanks: Mapping[str, Any] = {}  # what takes the place of tensors on the meta device
        self._local: SavePlan | None = None  # once passes that need all plans were run
        self._alone = False  # whether one rank reads for all
        self.paths: Mapping[str, Any] = {}
        self._whole: frozenset[str] = frozenset()
        self.needed = self._tensor_bytes = 0
        self._unmatched: tuple[str, ...] = ()

    @property
    def _mine(self) -> bool:
        return self.comm.rank == self.comm.coordinator

    @cached_property
    def _located(self) -> tuple[Store, str]:
        """The store to look in, and the name of a single file there; empty for a folder."""
        return locate(self._path)

    def open(self) -> str:
        """Open the checkpoint, and return its format."""
        with self.watch.phase("open"):
            source = open_located(*self._located, format=self._format, pool=self._pool)
            self.reader, self.metadata = Reader(source, self._pool), source.metadata
            return source.format

    def local(self, state_dict: State, stages: Stages[SavePlan]) -> SavePlan:
        """Plan what this rank holds, and where that is in the checkpoint."""
        if self._local is not None:
            return self._local
        own = self._own_plan(state_dict, stages)
        return with_replicas(chain(*stages.rest)((own,)))[0]

    def _own_plan(self, state_dict: State, stages: Stages[SavePlan]) -> SavePlan:
        """Plan what this rank holds, up to the first pass that needs all plans."""
        self.sd = self.parted(expand(state_dict))
        self.flat, self.paths = flatten(self.sd)
        self._whole = whole = whole_names(self.flat, self.paths, self.metadata)
        if whole:
            self.flat, self.paths = flatten(self.sd, whole=whole)
        plan = local_plan(self.sd, whole=whole)
        plan = attrs.evolve(plan, rank=self.comm.rank, world_size=self.comm.world_size)
        return chain(*stages.own)((plan,))[0]

    def run_passes(self, state_dict: State, stages: Stages[SavePlan]) -> None:
        """Open the checkpoint, and run the passes that need the plans of all ranks."""

        def own() -> SavePlan:
            if not self._alone:
                self.open()
            return self._own_plan(state_dict, stages)

        with self.watch.phase("exchange"):
            self._alone = self._open_on_one()
            _, self._local = run_together(self.comm, stages, noting(self._path, own), self.watch)

    def parted(self, state: Any) -> Any:
        """Return a state dict with this rank's own of what each rank has its own of."""
        return part(state, place_of(self.comm))

    def resize(self, local: SavePlan, strict: Strict, verify: bool) -> None:
        """Make this rank's own of what was saved on another number of ranks."""
        place = place_of(self.comm)
        self.resized = resize(
            self.sd, local, self.metadata, self.reader, place, strict=strict, verify=verify
        )

    def patterns(self, strict: Strict, local: SavePlan) -> Strict:
        """Return what of ``strict`` concerns this rank: others may hold what the rest matches."""
        if self.comm.world_size == 1 or isinstance(strict, (bool, int)):
            return strict
        names = local.items.catalog.names
        wanted = strict_patterns(strict)
        here = tuple(p for p in wanted if any(fnmatchcase(name, p) for name in names))
        self._unmatched = tuple(p for p in wanted if p not in here)
        return here

    def plan_with(self, plan: Callable[[], LoadPlan], share: bool | Literal["auto"]) -> None:
        """Plan on every rank, and together where reads are shared."""
        if self.comm.world_size == 1:
            self.open()
            with self.watch.phase("plan"):
                self._take(plan())
            return

        def wish() -> tuple[Any, ...]:
            with self.watch.phase("plan"):
                self._take(plan())
            local = self.reader is not None and not self.reader.store.staging
            gap = self._gap
            fetched = fetched_bytes(self.plan, self.metadata, gap) if gap else self._tensor_bytes
            names, size = named(self.plan, self.metadata)
            wish = Wish(fetched, names, size, host_name(), local, len(self.plan.items))
            place = place_name(self._path)
            return (self._identity(), place, self._unmatched, *attrs.astuple(wish))

        def offer() -> tuple[Any, ...] | None:
            if self._local is None:
                if self._is_file():
                    return None  # let one rank look at it first
                self.open()
            return wish()

        def second_offer() -> tuple[Any, ...]:
            if not self._alone:
                self.open()
            return wish()

        def verdict(offers: list[Any]) -> dict[str, Any] | None:
            if None in offers:
                return None
            return judged(self.comm.ranks, offers, share, tensor_bytes(self.metadata))

        with self.watch.phase("exchange"):
            found = all_reduce(self.comm, "plan", noting(self._path, offer), verdict)
            if found is None:
                self._alone = self._open_on_one()
                found = all_reduce(self.comm, "plan", noting(self._path, second_offer), verdict)
        heed(self.comm, found)
        if self._alone:
            self._share(read_on(self.comm.coordinator))
        elif found["share"]:
            least = 1 if share is True else MIN_SHARED
            blocks = BLOCK_BYTES if self.reader is None else self.reader.source.block_bytes
            gap = self._gap
            self._share(share_pass(self.metadata, min_bytes=least, block_bytes=blocks, max_gap=gap))

    def _take(self, plan: LoadPlan) -> None:
        """Take a plan as this rank's, and count what it needs."""
        self.plan, self._wanted = plan, plan.items
        self.needed = self._tensor_bytes = nbytes_of(plan, self.metadata)
        if self.reader is not None:
            names = [name for _, name in value_names(plan.items)]
            self.needed += values_read(self.reader, names).bytes_needed

    def _identity(self) -> str:
        """Return what tells the checkpoint that this rank has opened from any other."""
        meta = self.metadata.storage_meta
        known = None if meta is None else meta.save_id
        return known or fingerprint(self.metadata)

    @property
    def _gap(self) -> int:
        """The bytes between two ranges that are sooner fetched than left out."""
        return 0 if self.reader is None else gap_of(self.reader)

    def _is_file(self) -> bool:
        """Return whether the checkpoint may be of a format that is a single file."""
        return bool(self._located[1]) and (
            self._format is None or find_format(self._format).is_file
        )

    def _open_on_one(self) -> bool:
        """Open a file of `torch.save` on the coordinator, which tells the others what it holds.

        Returns:
            Whether it is one. Any other checkpoint is opened by every rank.
        """

        def opened() -> Reader | None:
            store, name = self._located
            if not name or not find_format(self._format or detect(store, name)).is_file:
                return None
            self.open()
            return self.reader

        found = announce(self.comm, opened)
        if found is None:
            return False
        self.told = found.values
        if not self._mine:
            self.metadata = found.metadata
        return True

    def _share(self, share: Pass[LoadPlan]) -> None:
        """Have the coordinator say who reads what for whom."""

        def all_plans(blobs: list[bytes]) -> list[bytes]:
            with self.watch.phase("plan"):
                assert self.reader is not None
                blocks = self.reader.source.block_bytes
                passes = (split_reads(self.metadata, blocks, max_gap=self._gap), share)
                plans = cast("tuple[LoadPlan, ...]", decode_plans(blobs))
                return [encode_plan(plan) for plan in global_load_plan(plans, passes)]

        with self.watch.phase("exchange"):
            mine = reduce_scatter(
                self.comm,
                "share reads",
                lambda: encode_plan(self.plan),
                all_plans,
                encode=bytes,
                decode=bytes,
            )
        self.plan = cast(LoadPlan, decode_plan(mine))

    def run(self, verify: bool, state_dict: State, progress: Tell | None) -> LoadReport:
        """Read on all ranks; once all have read, hand over what was read; report what each did."""
        everyone: list[RankReport] = []
        results: list[Outcome] = []
        comm, sums, common = self.comm, BlockSums(), BlockSums()

        def read() -> tuple[Any, ...]:
            with self.watch.phase("read"):
                results.append(self._read(verify, sums, progress))
                self._settle(sums)
            own = attrs.astuple(self._own(results[0]))
            unverified = results[0].stats.unverified - sums.nbytes
            return (self.sd is not state_dict, own, sums.pack(), unverified)

        def summary(told: list[tuple[Any, ...]]) -> dict[str, Any]:
            for _, own, parts, _ in told:
                everyone.append(RankReport(*own))
                common.unpack(parts)
            self._settle(common)
            slowest = slowest_ranks(everyone) if comm.world_size > 1 else {}
            total = sum(one.nbytes for one in everyone)
            return {
                "total": total,
                "slowest": slowest,
                "stateful": any(s for s, *_ in told),
                "unverified": sum(nbytes for *_, nbytes in told) - common.nbytes,
            }

        with self.watch.phase("wait"):  # for the other ranks, as far as it is nothing else
            done = take_step(comm, "read", noting(self._path, read), noting(self._path, summary))
        for name, value in {**self.blanks, **results[0].values}.items():
            value = refilled(self.flat[name], value) if name in self._whole else value
            put(self.sd, self.paths[name], value)
        self.resized.put(self.sd)
        if done["stateful"]:
            self._give_back(state_dict)
        stats, keys = results[0].stats, self.plan.report
        return LoadReport(
            keys.missing,
            without_other_ranks(keys.unexpected, self.flat),
            keys.mismatched,
            self.needed,
            stats.bytes_read,
            stats.requests,
            stats.verified + sums.verified + common.verified,
            self.watch.seconds,
            results[0].received,
            done["total"],
            {phase: tuple(found) for phase, found in done["slowest"].items()},
            tuple(everyone) if self._mine else (self._own(results[0]),),
            phase_bytes=self.watch.nbytes,
            bytes_sent=results[0].sent,
            tied=self.tied,
            dropped=keys.dropped,
            bytes_unverified=done["unverified"],
        )

    def _own(self, done: Outcome) -> RankReport:
        self.watch.nbytes["read"] = done.stats.bytes_read
        return rank_report(self.comm, self.watch, self.sd, done.stats.bytes_read, done.sent)

    def _read(self, verify: bool, sums: BlockSums, progress: Tell | None) -> Outcome:
        if not len(self.plan.transfers) and self.reader is not None:
            options: dict[str, Any] = {"verify": verify, "sums": sums, "progress": progress}
            dest = self.dest if self.plan.items is self._wanted else None
            return read_rank(self.reader, self.flat, self.plan, dest=dest, **options)
        told = (self.comm, self.reader, self.metadata, self.flat, self.plan, self.told)
        try:
            return SharedRead(*told, str(self._path), progress).run(verify=verify, sums=sums)
        except (LostRanksError, PlanError, ValueRefusedError):
            raise
        except Exception as error:
            raise overwritten(error, self._wanted, together=True) from error

    def _settle(self, sums: BlockSums) -> None:
        """Compare the checksums of what several reads brought."""
        if self.reader is not None:
            try:
                sums.settle(self.reader.source)
            except FormatError as error:
                many = self.comm.world_size > 1
                raise overwritten(error, self._wanted, together=many) from None

    def _give_back(self, state_dict: State) -> None:
        """Hand stateful values their state: another step, for any of them may refuse it."""

        def give() -> None:
            with self.watch.phase("hand over"):
                unpart(self.sd, self.sd)
                give_back(state_dict, self.sd)

        take_step(self.comm, "load_state_dict", give, lambda told: None)
