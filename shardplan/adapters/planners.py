"""A pipeline of passes as a planner of torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from shardplan.io.arrays import as_tensor, can_cast, torch_dtype, window
from shardplan.io.errors import ValueRefusedError
from shardplan.nested import put
from shardplan.planning import (
    KeyReport,
    Metadata,
    MetadataIndex,
    Pass,
    SavePlan,
    TensorMetadata,
    WriteItem,
    chain,
    dedup_replicas,
    dtype_name,
    find_shard,
    flatten,
    global_plan,
    load_plan,
    local_plan,
)
from shardplan.planning.load import Strict

from .inward import from_torch
from .outward import to_torch
from .values import UnsafeValueError, load_value, safe_dump

__all__ = ["PipelineLoadPlanner", "as_torch_load_planner", "as_torch_save_planner"]


def as_torch_save_planner(pipeline: Pass[SavePlan] | None = None) -> torch_plans.SavePlanner:
    """Return a planner for ``torch.distributed.checkpoint.save`` that runs a pipeline of passes.

    The pipeline sees the plans of all ranks at once; then replicas are written once. Names, dtypes
    and chunks of the checkpoint are as it says, so torch loads the result without any planner, from
    a state dict that has these names. Beside torch's own checks all of `global_plan`'s are made.

    Keys are flattened as `flatten` does it. That differs from torch's way in three cases: a tuple
    that holds tensors is saved tensor by tensor, as torch does it for a list; a numpy array is
    saved as a tensor; an empty dict is saved.

    Args:
        pipeline: A pass, such as ``chain(rename(...), cast("bfloat16"))``. Load through
            `as_torch_load_planner` with the same one to get the names and dtypes back. Where torch
            saves in another process, the pipeline is pickled: what its passes are given has to
            allow that, as a mapping or a function of a module does, and a lambda does not.

    >>> import tempfile, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shardplan.planning import rename
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     planner = as_torch_save_planner(rename({"w": "model.w"}))
    ...     _ = dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, planner=planner)
    ...     sd = {"model": {"w": torch.zeros(3)}}
    ...     dcp.load(sd, checkpoint_id=folder)
    >>> sd
    {'model': {'w': tensor([1., 1., 1.])}}

    torch raises what goes wrong as its CheckpointException, which holds, by rank:
        PlanError, RefusedError: There is no correct plan; see `global_plan` and `local_plan`.
        ValueRefusedError: Some values cannot be stored safely; all of this rank's are named.
    """
    return _SavePlanner(pipeline)


class _SavePlanner(torch_plans.SavePlanner):
    def __init__(self, pipeline: Pass[SavePlan] | None) -> None:
        self._pipeline = pipeline
        self._flat: dict[str, Any] = {}
        self._local = SavePlan([])
        self._items: dict[Any, WriteItem] = {}
        self._values: dict[str, io.BytesIO] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: theirs.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._flat, _ = flatten(state_dict)
        self._local = local_plan(state_dict)

    def create_local_plan(self) -> torch_plans.SavePlan:
        plan: torch_plans.SavePlan = to_torch(self._local)
        return plan

    def create_global_plan(
        self, all_plans: list[torch_plans.SavePlan]
    ) -> tuple[list[torch_plans.SavePlan], theirs.Metadata]:
        first = () if self._pipeline is None else (self._pipeline,)
        passes = (*first, dedup_replicas())
        plans, metadata = global_plan(map(from_torch, all_plans), passes)
        return [to_torch(plan) for plan in plans], to_torch(metadata)

    def finish_plan(self, new_plan: torch_plans.SavePlan) -> torch_plans.SavePlan:
        plan: SavePlan = from_torch(new_plan)
        self._items = {_key(item.index): item for item in plan.items}
        self._values = {}
        refused: dict[str, str] = {}
        for item in plan.items:
            try:
                if item.tensor_data is None:
                    self._values[item.index.fqn] = safe_dump(self._flat[item.source.fqn])
                else:
                    _check_cast(self._box(item), item.tensor_data.properties.dtype)
            except TypeError as error:
                refused[item.index.fqn] = str(error)
        if refused:
            raise ValueRefusedError(refused)
        return new_plan

    def resolve_data(self, write_item: torch_plans.WriteItem) -> torch.Tensor | io.BytesIO:
        item = self._items[_key(from_torch(write_item.index))]
        if item.tensor_data is None:
            return self._values[item.index.fqn]
        box = self._box(item).resolve_conj().resolve_neg()
        return box.to(torch_dtype(item.tensor_data.properties.dtype))

    def _box(self, item: WriteItem) -> torch.Tensor:
        """Return the memory that holds a chunk, in the dtype that it has in the state dict."""
        data, start = item.tensor_data, item.source.offset or ()
        assert data is not None
        shard = as_tensor(find_shard(self._flat, item.source))
        if not data.chunk.numel:  # an empty tensor counts as whole on each rank; its memory may not
            return shard.new_empty(data.chunk.sizes)
        offsets = [o - s for o, s in zip(data.chunk.offsets, start, strict=True)]
        return window(shard, offsets, data.chunk.sizes)


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    return index.fqn, index.offset


def _check_cast(tensor: torch.Tensor, stored: str) -> None:
    own = dtype_name(tensor.dtype)
    if not can_cast(own, stored):
        raise TypeError(f"is {own}, which torch cannot cast to {stored}")


def as_torch_load_planner(
    pipeline: Pass[SavePlan] | None = None,
    *,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
) -> PipelineLoadPlanner:
    """Return a planner for ``torch.distributed.checkpoint.load`` that runs a pipeline of passes.

    Each rank runs the pipeline over its own plan. Values that are no tensors are loaded only if
    that runs no code.

    Args:
        pipeline: The pass that the checkpoint was saved with, or one that gives the names and
            dtypes that it has. What it drops is not loaded.
        strict: Whether everything must be filled: True, False, or patterns of names that must be.
        dtype: ``"same"`` takes another stored dtype for a mistake, ``"cast"`` for a wish to cast.

    Returns:
        The planner. After a load, its ``report`` says what this rank asked for and did not get.

    >>> import tempfile, warnings
    >>> import torch.distributed.checkpoint as dcp
    >>> from shardplan.planning import rename
    >>> warnings.simplefilter("ignore")  # torch warns that there is one process only
    >>> sd = {"w": torch.zeros(3)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder)
    ...     planner = as_torch_load_planner(rename({"w": "model.w"}))
    ...     dcp.load(sd, checkpoint_id=folder, planner=planner)
    >>> sd
    {'w': tensor([1., 1., 1.])}

    torch raises what goes wrong as its CheckpointException, which holds, by rank:
        PlanError: Something that must be filled cannot be; every reason is told.
        ValueRefusedError: A value is not safe to load, or a tensor cannot be written to.
    """
    return PipelineLoadPlanner(chain() if pipeline is None else pipeline, strict, dtype)


class PipelineLoadPlanner(torch_plans.LoadPlanner):
    """A pipeline of passes as torch's load planner; `as_torch_load_planner` makes one.

    Attributes:
        report: How the state dict and the checkpoint agree, once a load is planned.
    """

    def __init__(
        self, pipeline: Pass[SavePlan], strict: Strict, dtype: Literal["same", "cast"]
    ) -> None:
        self._pipeline, self._strict, self._dtype = pipeline, strict, dtype
        self._sd: Mapping[str, Any] = {}
        self._flat: dict[str, Any] = {}
        self._paths: Mapping[str, Any] = {}
        self._metadata = Metadata({})
        self.report = KeyReport()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: theirs.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to fill, and the metadata of the checkpoint."""
        if metadata is None:
            raise ValueError("this planner needs the checkpoint's metadata")
        self._sd, self._metadata = state_dict, from_torch(metadata)
        self._flat, self._paths = flatten(state_dict)

    def create_local_plan(self) -> torch_plans.LoadPlan:
        """Plan this rank's reads."""
        (plan,) = self._pipeline((local_plan(self._sd),))
        plan = self._without_hollow(plan)
        wanted = load_plan(self._metadata, plan, strict=self._strict, dtype=self._dtype)
        self.report = wanted.report
        result: torch_plans.LoadPlan = to_torch(wanted)
        return result

    def _without_hollow(self, plan: SavePlan) -> SavePlan:
        """Leave out values in which torch finds nothing to save, such as an empty dict."""
        items, known = plan.items, self._metadata.state_dict_metadata
        catalog = items.catalog
        gone = [
            is_bytes and name not in known and not flatten_state_dict({"": self._flat[source]})[0]
            for name, source, is_bytes in zip(
                catalog.names, catalog.sources, catalog.is_bytes.tolist(), strict=True
            )
        ]
        return attrs.evolve(plan, items=items.take(~np.array(gone, bool)[items.row]))

    def create_global_plan(
        self, global_plan: list[torch_plans.LoadPlan]
    ) -> list[torch_plans.LoadPlan]:
        """Leave all plans as they are: each rank reads on its own."""
        return global_plan

    def finish_plan(self, central_plan: torch_plans.LoadPlan) -> torch_plans.LoadPlan:
        """Refuse tensors that cannot be written to, before any is."""
        refused: dict[str, str] = {}
        for item in central_plan.items:
            if item.type is torch_plans.LoadItemType.TENSOR:
                try:
                    self._box(item)
                except TypeError as error:
                    refused[item.dest_index.fqn] = str(error)
        if refused:
            raise ValueRefusedError(refused)
        return central_plan

    def load_bytes(self, read_item: torch_plans.ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state dict that is no tensor, if it is safe to load."""
        name = read_item.dest_index.fqn
        try:
            put(self._sd, self._paths[name], load_value(value))
        except UnsafeValueError as error:
            raise ValueRefusedError({name: str(error)}) from None

    def resolve_tensor(self, read_item: torch_plans.ReadItem) -> torch.Tensor:
        """Return what a read fills: memory of the state dict, unless it has to be cast."""
        box = self._box(read_item)
        entry = self._metadata.entry(read_item.storage_index.fqn)
        assert isinstance(entry, TensorMetadata)
        stored = torch_dtype(entry.properties.dtype)
        if stored == box.dtype:
            return box
        return torch.empty(box.shape, dtype=stored, device=box.device)  # `commit_tensor` casts

    def commit_tensor(self, read_item: torch_plans.ReadItem, tensor: torch.Tensor) -> None:
        """Cast what was read into the state dict, if it has to be."""
        box = self._box(read_item)
        if tensor.dtype != box.dtype:
            box.copy_(tensor)

    def _box(self, item: torch_plans.ReadItem) -> torch.Tensor:
        """Return the memory of the state dict that a read fills."""
        shard = find_shard(self._flat, from_torch(item.dest_index))
        return window(as_tensor(shard, writable=True), item.dest_offsets, item.lengths)
