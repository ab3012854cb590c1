"""Load a checkpoint into a state dict, or make a new one of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import attrs
import numpy as np
import torch

from shardplan.dist import Comm, all_gather, broadcast, reduce_scatter
from shardplan.io.arrays import as_tensor, empty, window
from shardplan.io.errors import ValueRefusedError
from shardplan.io.pool import Pool
from shardplan.io.read import Reader, ReadStats
from shardplan.io.sources import detect, locate, open_source
from shardplan.io.stores import Store
from shardplan.io.values import StoredValue, load_value, store_values
from shardplan.planning import (
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    NotFoundError,
    Pass,
    SavePlan,
    chain,
    decode_metadata,
    decode_plan,
    decode_plans,
    dtype_name,
    encode_metadata,
    encode_plan,
    find_shard,
    flatten,
    global_load_plan,
    load_plan,
    local_plan,
    read_on,
    split_reads,
    unflatten,
)
from shardplan.planning import share_reads as share_pass
from shardplan.planning.catalog import column
from shardplan.planning.errors import nearest_names
from shardplan.planning.flatten import is_tensor
from shardplan.planning.load import Strict
from shardplan.planning.metadata import TensorMetadata
from shardplan.planning.reads import ReadItems

from .fanout import MIN_SHARED, PIECE_BYTES, FanOut
from .nested import put
from .profiling import profiled
from .ranks import default_comm, device_of, host_name, take_step
from .reports import LoadReport, RankReport, Stopwatch, slowest_ranks
from .stateful import expand, give_back

__all__ = ["load", "read_rank", "restore"]


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
        task = _Load(comm, path, format, pool, watch)

        def plan() -> LoadPlan:
            local = task.local(state_dict, planner or chain())
            return load_plan(task.metadata, local, strict=strict, dtype=dtype, shape=shape)

        task.plan_with(plan, share_reads)
        report = task.run(verify)
    give_back(state_dict, task.sd)
    return attrs.evolve(report, profile=tuple(hot))


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

    def plan_with(self, plan: Callable[[], LoadPlan], share: bool | Literal["auto"]) -> None:
        """Plan on every rank, and together where reads are shared."""
        if self.comm.world_size == 1:
            self.open()
            with self.watch.phase("plan"):
                self.plan = plan()
                self.needed = _nbytes(self.plan, self.metadata)
            return
        alone = _is_torch_file(self._path, self._format)
        if alone:
            self._open_on_one()

        def offer() -> tuple[int, str, bool]:
            if not alone:
                self.open()
            with self.watch.phase("plan"):
                self.plan = plan()
                self.needed = _nbytes(self.plan, self.metadata)
            local = self.reader is not None and not self.reader.store.staging
            return self.needed, host_name(), local

        with self.watch.phase("exchange"):
            offers = all_gather(self.comm, "plan", offer)
        if alone:
            self._share(read_on(self.comm.coordinator))
        elif share is not False and _worth_sharing(offers, self.metadata, share):
            least = 1 if share is True else MIN_SHARED
            self._share(share_pass(self.metadata, min_bytes=least))

    def _open_on_one(self) -> None:
        """Open a file on the coordinator, which tells the others all but the tensors' elements."""

        def tell() -> dict[str, Any]:
            self.open()
            reader = self.reader
            assert reader is not None
            entries = self.metadata.state_dict_metadata
            names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
            stored = store_values({name: reader.value(name) for name in names})
            values = {name: (v.kind, _plain(v.data)) for name, v in stored.items()}
            return {"metadata": encode_metadata(self.metadata), "values": values}

        with self.watch.phase("exchange"):
            told = broadcast(self.comm, "open", tell)
        self.values = {name: StoredValue(*value) for name, value in told["values"].items()}
        if not self._mine:
            self.metadata = decode_metadata(told["metadata"])

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

    def run(self, verify: bool) -> LoadReport:
        """Read on all ranks; report what each did."""
        everyone: list[RankReport] = []
        results: list[tuple[ReadStats, dict[str, Any], FanOut | None]] = []
        comm = self.comm

        def read() -> tuple[Any, ...]:
            with self.watch.phase("read"):
                results.append(self._read(verify))
            stats, _, fan = results[0]
            sent = fan.sent if fan is not None else 0
            seconds, device = dict(self.watch.seconds), device_of(self.sd)
            return (comm.ranks[comm.rank], seconds, stats.bytes_read, sent, device)

        def summary(told: list[tuple[Any, ...]]) -> dict[str, Any]:
            everyone.extend(RankReport(*one) for one in told)
            slowest = slowest_ranks(everyone) if comm.world_size > 1 else {}
            return {"total": sum(one.nbytes for one in everyone), "slowest": slowest}

        with self.watch.phase("wait"):  # for the other ranks, as far as it is nothing else
            done = take_step(comm, "read", read, summary)
        stats, values, fan = results[0]
        for name, value in values.items():
            put(self.sd, self.paths[name], value)
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

    def _read(self, verify: bool) -> tuple[ReadStats, dict[str, Any], FanOut | None]:
        if not len(self.plan.transfers):
            if self.reader is None:
                return ReadStats(), self._told(self.plan.items), None
            return *read_rank(self.reader, self.flat, self.plan, verify=verify), None
        transfers = self.plan.transfers
        coming = transfers.reads.take(np.flatnonzero(transfers.target == self.comm.rank))
        values = self._values(ReadItems.concat([self.plan.items, coming]), verify)
        fan = FanOut(self.comm, self.reader, self.metadata, self.plan)
        own = _destinations(self.flat, self.plan.items)
        mine = np.flatnonzero(transfers.target == self.comm.rank)
        place = {int(row): at for at, row in enumerate(mine)}
        theirs = _destinations(self.flat, coming)
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


def _is_torch_file(path: str | os.PathLike[str] | Store, format: str | None) -> bool:
    """Tell whether the checkpoint is a single file of `torch.save`."""
    store, name = locate(path)
    return bool(name) and (format or detect(store, name)) == "torch"


def _plain(data: Any) -> Any:
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else data


def _nbytes(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes that a plan reads."""
    entries, items = metadata.state_dict_metadata, plan.items
    if not len(items):
        return 0
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return int((items.numel * width[row[items.storage]]).sum())


def _worth_sharing(
    offers: Sequence[tuple[int, str, bool]], metadata: Metadata, share: bool | Literal["auto"]
) -> bool:
    """Tell whether reading once and sending is cheaper than reading more than once.

    Args:
        offers: Per rank: bytes it needs, its machine, and whether storage is a local path.
        metadata: The checkpoint.
        share: What was asked for.
    """
    needed, size = sum(n for n, _, _ in offers), _saved_bytes(metadata)
    if needed <= size:  # as far as this tells, nobody needs what another one does
        return share is True
    hosts = {host for _, host, _ in offers}
    local = all(local for _, _, local in offers)
    return share is True or not local or len(hosts) > 1


def _saved_bytes(metadata: Metadata) -> int:
    """Count the bytes of all tensors of a checkpoint."""
    entries = metadata.state_dict_metadata
    numel = column([*(math.prod(layout.size) for layout in entries.layouts), 0])
    width = column([*(p.itemsize for p in entries.props), 0])
    return int((numel[entries.layout] * width[entries.prop]).sum())


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
    return reader.fill(plan.items, _destinations(flat, plan.items), verify=verify), values


def _destinations(flat: Mapping[str, Any], items: ReadItems) -> Callable[[int], torch.Tensor]:
    """Return what gives the box of the state dict that a read fills, having checked them all."""
    shards: dict[tuple[int, bytes], torch.Tensor] = {}
    refused: dict[str, str] = {}

    def key(row: int) -> tuple[int, bytes]:
        return int(items.dest[row]), items.dest_anchor[row].tobytes()

    for row, kind in enumerate(items.type.tolist()):
        if kind == LoadItemType.TENSOR.value and key(row) not in shards:
            name, anchor = items.names[items.dest[row]], items.dest_anchor[row]
            index = MetadataIndex(name, anchor[: items.ndim[row]].tolist())
            try:
                shards[key(row)] = as_tensor(find_shard(flat, index), writable=True)
            except TypeError as error:
                refused[name] = str(error)
    if refused:
        raise ValueRefusedError(refused)
    return lambda row: window(
        shards[key(row)], items.dest_offsets[row].tolist(), items.lengths[row].tolist()
    )


def restore(
    path: str | os.PathLike[str] | Store,
    target: Mapping[Any, Any] | None = None,
    *,
    keys: Iterable[str] | None = None,
    device: Any = "cpu",
    dtype: Literal["same", "cast"] = "same",
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> dict[Any, Any]:
    """Make a new state dict of a checkpoint, nested as it was saved.

    Args:
        path: The checkpoint.
        target: What to make, nested in any way: meta tensors, `TensorSpec`s, or anything else with
            a shape and a dtype; other leaves stand for values that are no tensors. Everything that
            was saved if left out.
        keys: Shell-style patterns of the flattened names to read; everything if left out.
        device: Where new tensors are made.
        dtype: Whether tensors of ``target`` may have another dtype than the saved ones: ``"cast"``.
        format: What wrote the checkpoint; found out if left out.
        verify: Whether to check what is read whole against its checksums.
        pool: The threads and the memory budget to use.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"model": {"w": torch.ones(2)}, "step": 7}, folder)
    ...     restore(folder)
    {'model': {'w': tensor([1., 1.])}, 'step': 7}

    Raises:
        PlanError: Something in ``target`` is not in the checkpoint, or does not fit.
        NotFoundError: A pattern of ``keys`` matches nothing.
        FormatError: The checkpoint is damaged.
    """
    reader = Reader(open_source(path, format=format, pool=pool), pool)
    metadata = reader.metadata
    if target is None:
        wanted, paths = _everything(metadata)
    else:
        wanted, paths = flatten(target)
    flat = {
        name: empty(leaf.shape, dtype_name(leaf.dtype), device) if is_tensor(leaf) else None
        for name, leaf in _matching(wanted, keys).items()
    }
    plan = load_plan(metadata, local_plan(flat), dtype=dtype)
    _, values = read_rank(reader, flat, plan, verify=verify)
    return unflatten({**flat, **values}, paths)


class _Saved:
    """A saved tensor's shape and dtype."""

    def __init__(self, entry: TensorMetadata) -> None:
        self.shape, self.dtype = entry.size, entry.properties.dtype


def _everything(metadata: Metadata) -> tuple[dict[str, Any], Mapping[str, Any]]:
    entries = metadata.state_dict_metadata
    wanted = {
        name: _Saved(entry) if isinstance(entry, TensorMetadata) else None
        for name, entry in entries.items()
    }
    data = metadata.planner_data
    return wanted, data.get("paths", {}) if isinstance(data, Mapping) else {}


def _matching(wanted: Mapping[str, Any], keys: Iterable[str] | None) -> Mapping[str, Any]:
    if keys is None:
        return wanted
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in wanted):
            near = nearest_names(pattern, wanted)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise NotFoundError(f"nothing in the checkpoint is called `{pattern}`{hint}", near)
    return {n: v for n, v in wanted.items() if any(fnmatchcase(n, p) for p in patterns)}
