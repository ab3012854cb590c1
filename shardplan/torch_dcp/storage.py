"""Storage for torch.distributed.checkpoint: a writer of our format, and a reader of any format."""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardplan.io import Pool, ValueRefusedError, Window
from shardplan.io.execute import Kept, Reader
from shardplan.io.formats import CommitJob, WriteJob, find_writer, open_source
from shardplan.io.stores import Location, open_store
from shardplan.planning import (
    Chunk,
    Issue,
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    PlanError,
    ReadItem,
    SavePlan,
    TensorMetadata,
    TensorWriteData,
    fingerprint,
    global_plan,
)

from .planners import UnsafeValueError, dump_buffer, load_buffer
from .records import from_torch, to_torch

T = TypeVar("T")


def as_torch_storage_writer(
    path: Location, *, overwrite: bool = False, pool: Pool | None = None
) -> StorageWriter:
    """Return a writer for ``torch.distributed.checkpoint.save`` that writes our own format.

    Any planner may be used; its plans are checked as `global_plan` checks them. The checkpoint
    appears, whole, when the coordinator commits. It has checksums and no pickle.

    Args:
        path: A folder that will hold the checkpoint, on a disk or in an object store.
        overwrite: Whether a checkpoint that is there may be replaced.
        pool: The threads and the memory budget to use.

    >>> import tempfile, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shardplan import restore
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sd = {"model": {"w": torch.ones(3)}, "step": 7}
    ...     _ = dcp.save(sd, storage_writer=as_torch_storage_writer(folder))
    ...     restore(folder)
    {'model': {'w': tensor([1., 1., 1.])}, 'step': 7}

    torch raises errors as its CheckpointException, which holds, by rank:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        PlanError: The planner's plans leave elements out, or write some twice.
        ValueRefusedError: Some values cannot be stored safely; all of the rank's are named.
    """
    return _StorageWriter(path, overwrite, pool)


class _Located:
    """What torch's writers and readers share: the checkpoint's location, under two names."""

    checkpoint_id: Location

    @property
    def path(self) -> Location:
        return self.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


def _done(result: T) -> Future[T]:
    """Return a future that has its result already."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


@attrs.frozen
class _Ticket:
    """What the coordinator sends to a rank: the save's id, its rank, its plan's fingerprint."""

    save_id: str
    rank: int
    plan: str


class _StorageWriter(_Located, StorageWriter):
    def __init__(self, path: Location, overwrite: bool, pool: Pool | None) -> None:
        self.checkpoint_id = path
        self._overwrite, self._pool = overwrite, pool
        self._writer = find_writer("safetensors")
        self.save_id, self._begun = secrets.token_hex(6), False
        self._plans: tuple[SavePlan, ...] = ()
        self._metadata = Metadata({})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.save_id, self._begun = secrets.token_hex(6), False
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("one rank commits what all have written: use_collectives must be True")

    def prepare_local_plan(self, plan: torch_plans.SavePlan) -> torch_plans.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[torch_plans.SavePlan]) -> list[torch_plans.SavePlan]:
        plans = _with_remembered(plans)
        self._writer.refuse(open_store(self.checkpoint_id), self._overwrite)
        self._plans, self._metadata = global_plan(map(_plan_of, plans), ())
        if self._begun:  # an earlier save without a reset: two saves must not share files
            self.save_id = secrets.token_hex(6)
        self._begun = True
        return [
            dataclasses.replace(
                plan,
                items=[to_torch(item) for item in ours.items],
                storage_data=_Ticket(self.save_id, rank, fingerprint(ours)),
            )
            for rank, (plan, ours) in enumerate(zip(plans, self._plans, strict=True))
        ]

    def write_data(
        self, plan: torch_plans.SavePlan, planner: torch_plans.SavePlanner
    ) -> Future[list[WriteResult]]:
        ours, ticket = _plan_of(plan), plan.storage_data
        if not isinstance(ticket, _Ticket) or fingerprint(ours) != ticket.plan:
            raise ValueError("the planner changed its plan after it was agreed on by all ranks")
        self.save_id = ticket.save_id
        store, sd = open_store(self.checkpoint_id), _resolved(plan, ours, planner)
        job = WriteJob(store, sd, ours, ticket.save_id, ticket.rank, self._pool)
        part = self._writer.write(job)
        index = theirs.MetadataIndex(f"rank {ticket.rank}")
        return _done([WriteResult(index, part.nbytes, part.report)])

    def finish(self, metadata: theirs.Metadata, results: list[list[WriteResult]]) -> None:
        store = open_store(self.checkpoint_id)
        reports = [result.storage_data for rank in results for result in rank]
        try:
            paths = from_torch(metadata).planner_data
            ours = attrs.evolve(self._metadata, planner_data=paths)
            self._writer.commit(
                CommitJob(store, ours, self._plans, reports, self.save_id, self._overwrite)
            )
        except BaseException:
            for report in reports:
                self._writer.discard(store, report, self.save_id)
            raise
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> theirs.StorageMeta:
        return theirs.StorageMeta(open_store(self.checkpoint_id).url, self.save_id)


def _with_remembered(plans: list[torch_plans.SavePlan]) -> list[torch_plans.SavePlan]:
    """Replace placeholders for plans of an earlier save, which torch's planners cache."""
    if all(plan.usable for plan in plans):
        return plans
    remembered = torch_plans.SavePlanner._cached_global_plan
    known = [cached for cached in remembered.values() if len(cached) == len(plans)]
    if len(known) != 1:
        raise ValueError(
            f"some plans refer to cached plans of an earlier save, and {len(known)} planners have "
            "such; set enable_plan_caching for one class of planners only"
        )
    return [p if p.usable else old for p, old in zip(plans, known[0], strict=True)]


def _plan_of(plan: torch_plans.SavePlan) -> SavePlan:
    """Return the part of a plan that is written, without its sources."""
    items = [dataclasses.replace(item, bytes_io_data=None) for item in plan.items]
    return SavePlan(map(from_torch, items))


class _Tensor:
    """The chunks of one tensor that this rank writes."""

    def __init__(self, data: TensorWriteData) -> None:
        self.shape, self.dtype = data.size, data.properties.dtype
        self._chunks: dict[tuple[int, ...], tuple[Chunk, torch.Tensor]] = {}

    def add(self, chunk: Chunk, tensor: torch.Tensor) -> None:
        self._chunks[chunk.offsets] = chunk, tensor

    def __create_chunk_list__(self) -> list[Chunk]:
        return [chunk for chunk, _ in self._chunks.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks[index.offset or ()][1]


def _resolved(
    plan: torch_plans.SavePlan, ours: SavePlan, planner: torch_plans.SavePlanner
) -> Mapping[str, Any]:
    """Return the planner's data as a state dict with the plan's names."""
    sd: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for item, planned in zip(plan.items, ours.items, strict=True):
        name, data = planned.index.fqn, planned.tensor_data
        given = planner.resolve_data(item)
        if data is None and isinstance(given, io.BytesIO):
            try:
                sd[name] = Kept(load_buffer(given))  # not flattened
            except UnsafeValueError as error:
                refused[name] = str(error)
        elif data is not None and isinstance(given, torch.Tensor):
            sd.setdefault(name, _Tensor(data)).add(data.chunk, given)
        else:
            kind = "bytes" if data is None else "a tensor"
            refused[name] = f"is planned as {kind}, and its planner gives a {type(given).__name__}"
    if refused:
        raise ValueRefusedError(refused)
    return sd


def as_torch_storage_reader(
    path: Location, *, format: str | None = None, verify: bool = True, pool: Pool | None = None
) -> StorageReader:
    """Return a reader for ``torch.distributed.checkpoint.load`` of checkpoints of any known format.

    Any planner may be used. Each rank reads just the bytes that its plan needs. Non-tensor values
    are loaded without running code, and pickled anew for the planner.

    Args:
        path: The checkpoint.
        format: Its format; detected if left out.
        verify: Whether to compare chunks that are read whole with their checksums.
        pool: The threads and the memory budget to use.

    >>> import tempfile, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shardplan import save
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> sd = {"w": torch.zeros(2), "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"w": torch.ones(2), "step": 7}, folder)
    ...     dcp.load(sd, storage_reader=as_torch_storage_reader(folder))
    >>> sd
    {'w': tensor([1., 1.]), 'step': 7}

    torch raises errors as its CheckpointException, which holds, by rank:
        FormatError: There is no checkpoint, or it is damaged; it says which keys were filled.
        PlanError: The planner asks for what the checkpoint does not hold.
    """
    return _StorageReader(path, format, verify, pool)


class _StorageReader(_Located, StorageReader):
    def __init__(self, path: Location, format: str | None, verify: bool, pool: Pool | None) -> None:
        self.checkpoint_id = path
        self._format, self._verify, self._pool = format, verify, pool
        self._reader: Reader | None = None
        self.load_id = str(uuid.uuid4())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._reader = None
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    # Not named `kwargs`: torch would then ask for metadata per rank, which does not exist.
    def read_metadata(self, *_: Any, **ignored: Any) -> theirs.Metadata:
        self._reader = None  # it may have been overwritten since
        reader = self._open()
        metadata: theirs.Metadata = to_torch(reader.metadata)
        if metadata.planner_data is None:  # torch needs every path when it loads some keys only
            metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
        # What torch's own reader adds: the URL, the load's id, the version of torch.
        meta = metadata.storage_meta or theirs.StorageMeta()
        meta.checkpoint_id = meta.checkpoint_id or reader.store.url
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        if reader.source.format != "dcp":
            metadata.version = getattr(torch_files, "CURRENT_DCP_VERSION", None)
        return metadata

    def _open(self) -> Reader:
        if self._reader is None:
            source = open_source(self.checkpoint_id, format=self._format)
            self._reader = Reader(source, self._pool)
        return self._reader

    def set_up_storage_reader(
        self, metadata: theirs.Metadata, is_coordinator: bool, *_: Any, **ignored: Any
    ) -> None:
        self._open()

    def prepare_local_plan(self, plan: torch_plans.LoadPlan) -> torch_plans.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[torch_plans.LoadPlan]) -> list[torch_plans.LoadPlan]:
        return plans

    def read_data(
        self, plan: torch_plans.LoadPlan, planner: torch_plans.LoadPlanner
    ) -> Future[None]:
        reader = self._open()
        ours = LoadPlan([from_torch(item) for item in plan.items])
        _check_kinds(reader.metadata, ours.items)
        pairs = list(zip(plan.items, ours.items, strict=True))
        tensors = {
            row: _target(planner, item, read)
            for row, (item, read) in enumerate(pairs)
            if read.type is LoadItemType.TENSOR
        }
        reader.fill(ours.items, lambda row: Window.of(tensors[row]), verify=self._verify)
        for row, tensor in tensors.items():
            planner.commit_tensor(plan.items[row], tensor)
        for item, read in pairs:
            if read.type is LoadItemType.BYTE_IO:
                value = reader.value(read.storage_index.fqn, verify=self._verify)
                planner.load_bytes(item, dump_buffer(value))
        return _done(None)


def _target(
    planner: torch_plans.LoadPlanner, item: torch_plans.ReadItem, ours: ReadItem
) -> torch.Tensor:
    tensor = planner.resolve_tensor(item).detach()
    if tuple(tensor.shape) != ours.lengths:
        raise ValueError(
            f"`{ours.dest_index.fqn}`: the planner gives a tensor of shape {tuple(tensor.shape)} "
            f"for a read of {ours.lengths}"
        )
    return tensor


def _kind(is_tensor: bool) -> str:
    return "tensor" if is_tensor else "non-tensor value"


def _check_kinds(metadata: Metadata, items: Sequence[ReadItem]) -> None:
    """Refuse reads of a tensor as a value, and of a value as a tensor."""
    issues = []
    for item in items:
        name = item.storage_index.fqn
        was = _kind(isinstance(metadata.entry(name), TensorMetadata))
        wanted = _kind(item.type is LoadItemType.TENSOR)
        if was != wanted:
            text = f"`{name}` was saved as a {was} and is wanted as a {wanted}"
            issues.append(Issue("type", name, text))
    if issues:
        raise PlanError(issues)
