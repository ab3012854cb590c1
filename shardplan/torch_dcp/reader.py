"""Our storage for the load planners of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardplan.io import Pool
from shardplan.io.execute import Reader
from shardplan.io.formats import open_source
from shardplan.io.stores import Store
from shardplan.planning import (
    Issue,
    LoadItemType,
    LoadPlan,
    PlanError,
    ReadItem,
    TensorMetadata,
)

from .inward import from_torch
from .outward import to_torch
from .values import dump_value

__all__ = ["as_torch_storage_reader"]


def as_torch_storage_reader(
    path: str | os.PathLike[str] | Store,
    *,
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> StorageReader:
    """Return a reader for ``torch.distributed.checkpoint.load`` of checkpoints of any known format.

    Any planner may be used, torch's default one too. Each rank reads just the bytes that its plan
    needs. Values that are no tensors reach the planner as bytes that were made here, from what was
    loaded without running code.

    Args:
        path: The checkpoint.
        format: What wrote it; found out if left out.
        verify: Whether to check what is read whole against its checksums.
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

    torch raises what goes wrong as its CheckpointException, which holds, by rank:
        FormatError: There is no checkpoint, or it is damaged; it says which keys were filled.
        PlanError: The planner asks for what the checkpoint does not hold.
    """
    return _StorageReader(path, format, verify, pool)


class _StorageReader(StorageReader):
    def __init__(
        self,
        path: str | os.PathLike[str] | Store,
        format: str | None,
        verify: bool,
        pool: Pool | None,
    ) -> None:
        self.checkpoint_id = path
        self._format, self._verify, self._pool = format, verify, pool
        self._reader: Reader | None = None
        self.load_id = str(uuid.uuid4())

    @property
    def path(self) -> str | os.PathLike[str] | Store:
        """The checkpoint, by the name that torch's own reader has for it."""
        return self.checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._reader = None
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    # Not called `kwargs`: torch would then look for metadata of each rank where there is none.
    def read_metadata(self, *_: Any, **ignored: Any) -> theirs.Metadata:
        self._reader = self._open()
        metadata: theirs.Metadata = to_torch(self._reader.metadata)
        self._sign(metadata, self._reader)
        if metadata.planner_data is None:  # torch's loads of some keys only ask for every path
            metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
        return metadata

    def _sign(self, metadata: theirs.Metadata, reader: Reader) -> None:
        """Say what torch's own reader says of a checkpoint: where it lies, and which load this is.

        The version is that of torch's metadata, which this is, not that of our own format.
        """
        meta = metadata.storage_meta or theirs.StorageMeta()
        meta.checkpoint_id = meta.checkpoint_id or reader.store.url
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        if reader.source.format != "dcp":
            metadata.version = getattr(torch_files, "CURRENT_DCP_VERSION", None)

    def _open(self) -> Reader:
        return Reader(open_source(self.checkpoint_id, format=self._format), self._pool)

    def set_up_storage_reader(
        self, metadata: theirs.Metadata, is_coordinator: bool, *_: Any, **ignored: Any
    ) -> None:
        if self._reader is None:
            self._reader = self._open()

    def prepare_local_plan(self, plan: torch_plans.LoadPlan) -> torch_plans.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[torch_plans.LoadPlan]) -> list[torch_plans.LoadPlan]:
        return plans

    def read_data(
        self, plan: torch_plans.LoadPlan, planner: torch_plans.LoadPlanner
    ) -> Future[None]:
        reader = self._reader = self._reader or self._open()
        ours = LoadPlan(_numbered(reader, [from_torch(item) for item in plan.items]))
        pairs = list(zip(plan.items, ours.items, strict=True))
        tensors = {
            row: _target(planner, item, one)
            for row, (item, one) in enumerate(pairs)
            if one.type is LoadItemType.TENSOR
        }
        reader.fill(ours.items, tensors.__getitem__, verify=self._verify)
        for row, tensor in tensors.items():
            planner.commit_tensor(plan.items[row], tensor)
        for item, one in pairs:
            if one.type is LoadItemType.BYTE_IO:
                value = reader.value(one.storage_index.fqn, verify=self._verify)
                planner.load_bytes(item, dump_value(value))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


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


def _numbered(reader: Reader, items: Sequence[ReadItem]) -> list[ReadItem]:
    """Let every read's hint tell which of its tensor's saved chunks it reads."""
    chunks: dict[str, Mapping[tuple[int, ...], int] | None] = {}
    issues: list[Issue] = []
    numbered = []
    for item in items:
        name, at = item.storage_index.fqn, item.storage_index.offset
        if name not in chunks:
            entry = reader.metadata.entry(name)
            chunks[name] = _numbers(entry) if isinstance(entry, TensorMetadata) else None
        known = chunks[name]
        if (known is None) != (item.type is LoadItemType.BYTE_IO):
            kinds = ("a value that is no tensor", "a tensor")
            was, wanted = kinds if known is None else kinds[::-1]
            text = f"`{name}` was saved as {was} and is wanted as {wanted}"
            issues.append(Issue("type", name, text))
        elif known is not None and at not in known:
            text = f"`{name}` has no saved chunk at {at}; its chunks start at {list(known)[:8]}"
            issues.append(Issue("missing", name, text))
        elif known is not None and at is not None:
            index = attrs.evolve(item.storage_index, index=known[at])
            item = attrs.evolve(item, storage_index=index)
        numbered.append(item)
    if issues:
        raise PlanError(issues)
    return numbered


def _numbers(entry: TensorMetadata) -> dict[tuple[int, ...], int]:
    """Number a tensor's chunks by where they start; an empty one may share that with a real one."""
    empty_first = sorted(enumerate(entry.chunks), key=lambda pair: pair[1].numel > 0)
    return {chunk.offsets: number for number, chunk in empty_first}
