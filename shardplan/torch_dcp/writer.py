"""Our storage for the save planners of torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardplan.io import Pool, ValueRefusedError
from shardplan.io.execute import Kept
from shardplan.io.formats import find_writer
from shardplan.io.stores import Store, open_store
from shardplan.planning import (
    Chunk,
    Metadata,
    MetadataIndex,
    SavePlan,
    WriteItem,
    fingerprint,
    global_plan,
)

from .inward import from_torch
from .outward import to_torch
from .values import UnsafeValueError, load_value

__all__ = ["as_torch_storage_writer"]


def as_torch_storage_writer(
    path: str | os.PathLike[str] | Store, *, overwrite: bool = False, pool: Pool | None = None
) -> StorageWriter:
    """Return a writer for ``torch.distributed.checkpoint.save`` that makes a checkpoint of ours.

    Any planner may be used, torch's default one too. Its plans are checked as `global_plan` checks
    them: every element is written once, by one rank. The checkpoint exists, whole, from the instant
    at which the last rank has written and the coordinator commits; it has checksums and no pickle.

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

    torch raises what goes wrong as its CheckpointException, which holds, by rank:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        PlanError: The planner's plans leave elements out, or write some twice.
        ValueRefusedError: Some values cannot be stored safely; all of the rank's are named.
    """
    return _StorageWriter(path, overwrite, pool)


@attrs.frozen
class _Ticket:
    """What a rank is told: the save's name, its own number, and the plan that will be committed."""

    save_id: str
    rank: int
    plan: str


class _StorageWriter(StorageWriter):
    def __init__(
        self, path: str | os.PathLike[str] | Store, overwrite: bool, pool: Pool | None
    ) -> None:
        self.checkpoint_id = path
        self._overwrite, self._pool = overwrite, pool
        self._writer = find_writer("safetensors")
        self.save_id, self._begun = secrets.token_hex(6), False
        self._plans: tuple[SavePlan, ...] = ()
        self._metadata = Metadata({})

    @property
    def path(self) -> str | os.PathLike[str] | Store:
        """The checkpoint, by the name that torch's own writer has for it."""
        return self.checkpoint_id

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
        if self._begun:  # by a save before, without a reset: files of two saves must not meet
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
        part = self._writer.write(
            open_store(self.checkpoint_id),
            _resolved(plan, ours, planner),
            ours,
            save_id=ticket.save_id,
            rank=ticket.rank,
            pool=self._pool,
        )
        index = theirs.MetadataIndex(f"rank {ticket.rank}")
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(index, part.nbytes, part.report)])
        return done

    def finish(self, metadata: theirs.Metadata, results: list[list[WriteResult]]) -> None:
        store = open_store(self.checkpoint_id)
        reports = [one.storage_data for rank in results for one in rank]
        try:
            self._writer.commit(
                store,
                attrs.evolve(self._metadata, planner_data=from_torch(metadata).planner_data),
                self._plans,
                reports,
                save_id=self.save_id,
                overwrite=self._overwrite,
            )
        except BaseException:
            for report in reports:
                self._writer.discard(store, report, self.save_id)
            raise
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> theirs.StorageMeta:
        return theirs.StorageMeta(open_store(self.checkpoint_id).url, self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


def _with_remembered(plans: list[torch_plans.SavePlan]) -> list[torch_plans.SavePlan]:
    """Put the plan itself in place of one that says: as before. torch's planners remember them.

    Every save has files and a number of its own, so all ranks need their plans anew.
    """
    if all(plan.usable for plan in plans):
        return plans
    remembered = torch_plans.SavePlanner._cached_global_plan
    known = [found for found in remembered.values() if len(found) == len(plans)]
    if len(known) != 1:
        raise ValueError(
            f"plans were left out, as they are those of a save before, and {len(known)} planners "
            "remember such; set enable_plan_caching for one class of planners only"
        )
    return [p if p.usable else old for p, old in zip(plans, known[0], strict=True)]


def _plan_of(plan: torch_plans.SavePlan) -> SavePlan:
    """Return what is written, whatever it is made from: that is the planner's affair."""
    items = [dataclasses.replace(item, bytes_io_data=None) for item in plan.items]
    return SavePlan(map(from_torch, items))


class _Tensor:
    """The chunks of one tensor that a planner gives for this rank to write."""

    def __init__(self, item: WriteItem) -> None:
        data = item.tensor_data
        assert data is not None
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
    """Return what the planner gives to write, as a state dict that has the plan's names."""
    sd: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for item, one in zip(plan.items, ours.items, strict=True):
        name, data = one.index.fqn, one.tensor_data
        given = planner.resolve_data(item)
        if data is None:
            try:
                sd[name] = Kept(_value(given))  # one value, whatever is inside
            except TypeError as error:
                refused[name] = str(error)
        elif not isinstance(given, torch.Tensor):
            kind = type(given).__name__
            refused[name] = f"is planned as a tensor, and its planner gives a {kind}"
        else:
            sd.setdefault(name, _Tensor(one)).add(data.chunk, given)
    if refused:
        raise ValueRefusedError(refused)
    return sd


def _value(given: object) -> Any:
    """Return the value inside what a planner gives for one that is no tensor."""
    if isinstance(given, io.BytesIO):
        return load_value(given)
    raise UnsafeValueError(f"is planned as bytes, and its planner gives a {type(given).__name__}")
