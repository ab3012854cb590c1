"""Load a checkpoint into a state dict, on one rank or on many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import attrs
import numpy as np
import torch

from shardplan.dist import CheckpointError, Comm, Failure, all_gather, broadcast, reduce_scatter
from shardplan.io.errors import FormatError
from shardplan.io.pool import Pool
from shardplan.io.read import Reader, ReadStats
from shardplan.io.sources import detect, locate, open_source
from shardplan.io.stores import Store
from shardplan.io.values import StoredValue, load_value, store_values
from shardplan.planning import (
    LoadItemType,
    LoadPlan,
    Pass,
    PlanError,
    SavePlan,
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
    split_reads,
)
from shardplan.planning import share_reads as share_pass
from shardplan.planning.errors import span
from shardplan.planning.load import Strict
from shardplan.planning.reads import ReadItems

from .destinations import destinations, refuse_fixed, refuse_shared
from .fanout import MIN_SHARED, PIECE_BYTES, FanOut
from .freshness import ATTEMPTS, STOPPED, was_replaced
from .nested import put
from .profiling import profiled
from .ranks import default_comm, device_of, host_name, take_step
from .reports import LoadReport, RankReport, Stopwatch, slowest_ranks
from .stateful import expand, give_back
from .wishes import Wish, named, nbytes_of, worth_sharing

__all__ = ["load", "read_rank"]


def load(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Pass[SavePlan] | None = None,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    shape: Literal["same", "overlap"] = "same",
    format: str | None = None,
    comm: Comm | None = None,
    share_reads: bool | Literal["auto"] = "auto",
    verify: bool = True,
    profile: bool = False,
    pool: Pool | None = None,
) -> LoadReport:
    """Fill a state dict from a checkpoint, in place.

    On many ranks, every rank calls this with its part, cut in whatever way. All of them plan before
    any of them changes anything; if any fails, all raise one `CheckpointError`.

    Args:
        state_dict: Tensors to fill, and other values to replace, nested in any way. Objects with
            ``state_dict()`` and ``load_state_dict()`` are given their state.
        path: The checkpoint.
        planner: The pass it was saved with.
        strict: Whether everything must be filled: True, False, or patterns of names that must be.
            A pattern that matches no name on any rank is a mistake.
        dtype: ``"same"`` takes another stored dtype for a mistake, ``"cast"`` for a wish to cast.
        shape: ``"same"`` takes another shape for a mistake; ``"overlap"`` fills what both have.
        format: What wrote the checkpoint; found out if left out.
        comm: The ranks; by default all of torch's process group, or this process alone.
        share_reads: Whether bytes that several ranks need are read by one of them and sent to the
            others. ``"auto"`` does so where that is cheaper: not from a disk of the same machine.
        verify: Whether to check what is read whole against its checksums.
        profile: Whether the coordinator's report tells its hottest functions.
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
        CheckpointError: On many ranks, any of these; it tells what happened on which rank.
    """
    comm = default_comm() if comm is None else comm
    if share_reads not in (True, False, "auto"):
        raise ValueError(f'share_reads must be True, False or "auto", not {share_reads!r}')
    watch = Stopwatch()
    with profiled(profile and comm.rank == comm.coordinator) as hot:
        for left in reversed(range(ATTEMPTS if comm.world_size == 1 else 1)):
            task = _Load(comm, path, format, pool, watch)

            def plan(task: _Load = task) -> LoadPlan:
                local = task.local(state_dict, planner or chain())
                must = task.patterns(strict, local)
                found = load_plan(task.metadata, local, strict=must, dtype=dtype, shape=shape)
                refuse_fixed(state_dict, task.paths, _value_names(found.items))
                return found

            try:
                task.plan_with(plan, share_reads)
                report = task.run(verify, state_dict)
                break
            except STOPPED:  # if it was overwritten meanwhile, the new checkpoint is loaded
                if not left or not was_replaced(task.reader):
                    raise
    return attrs.evolve(report, profile=tuple(hot))


def _value_names(items: ReadItems) -> list[str]:
    """Return the names, in the state dict, of the values that are no tensors."""
    rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value)
    return [items.names[number] for number in items.dest[rows].tolist()]


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
        self.comm, self.watch = comm, watch
        self._path, self._format, self._pool = path, format, pool
        self.reader: Reader | None = None
        self.values: Mapping[str, StoredValue] = {}
        self.sd: Mapping[Any, Any] = {}
        self.flat: Mapping[str, Any] = {}
        self.paths: Mapping[str, Any] = {}
        self.needed = 0
        self._unmatched: tuple[str, ...] = ()

    @property
    def _mine(self) -> bool:
        return self.comm.rank == self.comm.coordinator

    def open(self) -> str:
        """Open the checkpoint, and return its format."""
        with self.watch.phase("open"):
            source = open_source(self._path, format=self._format, pool=self._pool)
            self.reader, self.metadata = Reader(source, self._pool), source.metadata
            return source.format

    def local(self, state_dict: Mapping[Any, Any], planner: Pass[SavePlan]) -> SavePlan:
        """Plan what this rank holds."""
        self.sd = expand(state_dict)
        self.flat, self.paths = flatten(self.sd)
        return planner((local_plan(self.sd),))[0]

    def patterns(self, strict: Strict, local: SavePlan) -> Strict:
        """Return what of ``strict`` concerns this rank: others may hold what the rest matches."""
        if self.comm.world_size == 1 or isinstance(strict, (bool, int)):
            return strict
        names = local.items.catalog.names
        wanted = (strict,) if isinstance(strict, str) else tuple(strict)
        here = tuple(p for p in wanted if any(fnmatchcase(name, p) for name in names))
        self._unmatched = tuple(p for p in wanted if p not in here)
        return here

    def plan_with(self, plan: Callable[[], LoadPlan], share: bool | Literal["auto"]) -> None:
        """Plan on every rank, and together where reads are shared."""
        if self.comm.world_size == 1:
            self.open()
            with self.watch.phase("plan"):
                self.plan = plan()
                self.needed = nbytes_of(self.plan, self.metadata)
            return

        def wish() -> tuple[Any, ...]:
            with self.watch.phase("plan"):
                self.plan = plan()
                self.needed = nbytes_of(self.plan, self.metadata)
            local = self.reader is not None and not self.reader.store.staging
            wish = Wish(self.needed, *named(self.plan, self.metadata), host_name(), local)
            return (*attrs.astuple(wish), self._unmatched, self._identity())

        def offer() -> tuple[Any, ...] | None:
            if self._is_file():
                return None  # let one rank look at it first
            self.open()
            return wish()

        def second_offer() -> tuple[Any, ...]:
            if not alone:
                self.open()
            return wish()

        alone = False
        with self.watch.phase("exchange"):
            offers = all_gather(self.comm, "plan", offer)
            if None in offers:
                alone = self._open_on_one()
                offers = all_gather(self.comm, "plan", second_offer)
        self._check_same([identity for *_, identity in offers])
        self._check_matched([set(unmatched) for *_, unmatched, _ in offers])
        wishes = [Wish(*wish) for *wish, _, _ in offers]
        if alone:
            self._share(read_on(self.comm.coordinator))
        elif share is not False and worth_sharing(wishes, share):
            least = 1 if share is True else MIN_SHARED
            self._share(share_pass(self.metadata, min_bytes=least))

    def _identity(self) -> str:
        """Return what tells the checkpoint that this rank has opened from any other."""
        meta = self.metadata.storage_meta
        known = None if meta is None else meta.save_id
        return known or fingerprint(self.metadata)

    def _check_same(self, identities: Sequence[str]) -> None:
        """Raise, on all ranks alike, if not all of them have opened the same checkpoint."""
        if len(set(identities)) == 1:
            return
        sides: dict[str, list[int]] = {}
        for rank, identity in zip(self.comm.ranks, identities, strict=True):
            sides.setdefault(identity, []).append(rank)
        told = "; ".join(f"{span(ranks)}: save {name[:12]}" for name, ranks in sides.items())
        text = f"ranks have opened different checkpoints ({told}); was one written meanwhile?"
        raise CheckpointError(
            Failure(rank, "open", FormatError.__name__, text) for rank in self.comm.ranks
        )

    def _check_matched(self, unmatched: Sequence[set[str]]) -> None:
        """Raise, on all ranks alike, if some pattern matches nothing on any of them."""
        lost = sorted(set.intersection(*unmatched))
        if lost:
            told = ", ".join(map(repr, lost))
            text = f"strict: {told} matches no name that any rank wants"
            raise CheckpointError(
                Failure(rank, "plan", PlanError.__name__, text) for rank in self.comm.ranks
            )

    def _is_file(self) -> bool:
        """Tell whether the checkpoint may be a file of `torch.save`, without reading it."""
        return self._format in (None, "torch") and bool(locate(self._path)[1])

    def _open_on_one(self) -> bool:
        """Open a file of `torch.save` on the coordinator, which tells the others what it holds.

        Returns:
            Whether it is one. Any other checkpoint is opened by every rank.
        """

        def tell() -> dict[str, Any] | None:
            store, name = locate(self._path)
            if not name or (self._format or detect(store, name)) != "torch":
                return None
            self.open()
            reader = self.reader
            assert reader is not None
            entries = self.metadata.state_dict_metadata
            names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
            stored = store_values({name: reader.value(name) for name in names})
            values = {name: (v.kind, _packed(v)) for name, v in stored.items()}
            return {"metadata": encode_metadata(self.metadata), "values": values}

        told = broadcast(self.comm, "open", tell)
        if told is None:
            return False
        self.values = {name: _unpacked(*value) for name, value in told["values"].items()}
        if not self._mine:
            self.metadata = decode_metadata(told["metadata"])
        return True

    def _share(self, share: Pass[LoadPlan]) -> None:
        """Have the coordinator say who reads what for whom."""
        passes = (split_reads(self.metadata, PIECE_BYTES), share)

        def all_plans(blobs: list[bytes]) -> list[bytes]:
            with self.watch.phase("plan"):
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

    def run(self, verify: bool, state_dict: Mapping[Any, Any]) -> LoadReport:
        """Read on all ranks; once all have read, hand over what was read; report what each did."""
        everyone: list[RankReport] = []
        results: list[tuple[ReadStats, dict[str, Any], FanOut | None]] = []
        comm = self.comm

        def read() -> tuple[Any, ...]:
            with self.watch.phase("read"):
                results.append(self._read(verify))
            stats, _, fan = results[0]
            sent = fan.sent if fan is not None else 0
            seconds, device = dict(self.watch.seconds), device_of(self.sd)
            own = (comm.ranks[comm.rank], seconds, stats.bytes_read, sent, device)
            return (self.sd is not state_dict, own)

        def summary(told: list[tuple[bool, tuple[Any, ...]]]) -> dict[str, Any]:
            everyone.extend(RankReport(*one) for _, one in told)
            slowest = slowest_ranks(everyone) if comm.world_size > 1 else {}
            total = sum(one.nbytes for one in everyone)
            return {"total": total, "slowest": slowest, "stateful": any(s for s, _ in told)}

        with self.watch.phase("wait"):  # for the other ranks, as far as it is nothing else
            done = take_step(comm, "read", read, summary)
        stats, values, fan = results[0]
        for name, value in values.items():
            put(self.sd, self.paths[name], value)
        if done["stateful"]:
            self._give_back(state_dict)
        keys = self.plan.report
        own = RankReport(
            comm.ranks[comm.rank], self.watch.seconds, stats.bytes_read, fan.sent if fan else 0
        )
        return LoadReport(
            keys.missing,
            keys.unexpected,
            keys.mismatched,
            self.needed,
            stats.bytes_read,
            stats.requests,
            stats.verified,
            self.watch.seconds,
            fan.received if fan is not None else 0,
            done["total"],
            {phase: tuple(found) for phase, found in done["slowest"].items()},
            tuple(everyone) if self._mine else (own,),
        )

    def _give_back(self, state_dict: Mapping[Any, Any]) -> None:
        """Hand stateful values their state: another step, for any of them may refuse it."""

        def give() -> None:
            with self.watch.phase("hand over"):
                give_back(state_dict, self.sd)

        take_step(self.comm, "load_state_dict", give, lambda told: None)

    def _read(self, verify: bool) -> tuple[ReadStats, dict[str, Any], FanOut | None]:
        if not len(self.plan.transfers):
            if self.reader is None:
                return ReadStats(), self._told(self.plan.items), None
            return *read_rank(self.reader, self.flat, self.plan, verify=verify), None
        failed: list[Exception] = []  # if any, others still get what they wait for
        transfers = self.plan.transfers
        mine = np.flatnonzero(transfers.target == self.comm.rank)
        coming, place = transfers.reads.take(mine), {int(row): at for at, row in enumerate(mine)}
        values: dict[str, Any] = {}
        own: Callable[[int], torch.Tensor] = _nowhere
        theirs: Callable[[int], torch.Tensor] = _nowhere
        try:
            everything = ReadItems.concat([self.plan.items, coming])
            if self.reader is not None:
                refuse_shared(self.flat, everything, self.reader)
            values = self._values(everything, verify)
            own = destinations(self.flat, self.plan.items)
            theirs = destinations(self.flat, coming)
        except Exception as error:
            failed.append(error)
        fan = FanOut(self.comm, self.reader, self.metadata, self.plan, failed)
        stats = fan.run(own, lambda row: theirs(place[row]), verify=verify)
        return stats, values, fan

    def _values(self, items: ReadItems, verify: bool) -> dict[str, Any]:
        """Return the values that are no tensors, by name in the state dict."""
        if self.reader is None or self.values:
            return self._told(items)
        return self.reader.values(LoadPlan(items), verify=verify)

    def _told(self, items: ReadItems) -> dict[str, Any]:
        rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist()
        names = [(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows]
        return {dest: load_value(self.values[name], str(self._path), name) for dest, name in names}


def _nowhere(row: int) -> torch.Tensor:
    """Stand in for where reads go, once it is known that the load fails."""
    raise LookupError(f"read {row} has nowhere to go")


def _packed(value: StoredValue) -> bytes:
    """Return the data of a stored value as bytes: JSON that travels as such comes back frozen."""
    return json.dumps(value.data).encode() if value.kind == "inline" else bytes(value.data)


def _unpacked(kind: Any, data: bytes) -> StoredValue:
    """Return what `_packed` was given."""
    return StoredValue(kind, json.loads(data) if kind == "inline" else data)


def read_rank(
    reader: Reader, flat: Mapping[str, Any], plan: LoadPlan, *, verify: bool = True
) -> tuple[ReadStats, dict[str, Any]]:
    """Carry out one rank's load plan, reading all of it from storage.

    Args:
        reader: The checkpoint.
        flat: The rank's state dict, flattened; its tensors are filled.
        plan: What to read.
        verify: Whether to check what is read whole against its checksums.

    Returns:
        What was read, and the values that are no tensors, by name in the state dict.
    """
    values = reader.values(plan, verify=verify)
    return reader.fill(plan.items, destinations(flat, plan.items, reader), verify=verify), values
