"""A pipeline of passes as a planner of torch.distributed.checkpoint.

Its planners exchange non-tensor values as bytes of `torch.save`; they are accepted only if they
load without running code.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans

from shardplan._comm import Place, world_group
from shardplan._memory import blanks, refuse_unfillable, tied_names
from shardplan._state import put, refilled
from shardplan.io import (
    FormatError,
    ValueRefusedError,
    Window,
    as_tensor,
    box_view,
    can_cast,
    torch_dtype,
)
from shardplan.io.formats.torch_save import (
    PickleError,
    RefusedName,
    fault_of,
    in_memory,
    load_archive,
    read_archive,
)
from shardplan.planning import (
    DEFAULT_PASSES,
    KeyReport,
    LoadPlan,
    Metadata,
    MetadataIndex,
    Passes,
    ReadItem,
    SavePlan,
    Strict,
    TensorMetadata,
    WriteItem,
    chain,
    dtype_name,
    find_shard,
    flatten,
    global_plan,
    load_plan,
    local_plan,
    whole_names,
    with_replicas,
)
from shardplan.planning.columns import ReadItems
from shardplan.planning.passes import Stages, may_see_rank
from shardplan.planning.storage import partly_filled

from .records import framed_number, framed_reads, from_torch, to_torch


class UnsafeValueError(TypeError):
    """A value that cannot be loaded without running code; its message goes after the key."""


def dump_buffer(value: Any) -> io.BytesIO:
    """Return the bytes that `torch.save` makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def load_buffer(buffer: io.BytesIO) -> Any:
    """Return the value that `torch.save` was given, or raise UnsafeValueError."""
    try:
        return load_archive(read_archive(in_memory(buffer.getvalue(), "")))
    except RefusedName as error:
        why = f"cannot be loaded without running code: it {fault_of(error)}"
        raise UnsafeValueError(why) from None
    except (PickleError, FormatError) as error:
        raise UnsafeValueError(fault_of(error)) from None


def _safe_dump(value: Any) -> io.BytesIO:
    """Return the bytes that `torch.save` makes of a value, if `load_buffer` accepts them."""
    what = f"is a {type(value).__module__}.{type(value).__qualname__}, which"
    try:
        buffer = dump_buffer(value)
    except Exception as error:  # a class may raise anything when it is pickled
        raise UnsafeValueError(f"{what} cannot be stored ({error})") from None
    try:
        load_buffer(buffer)
    except UnsafeValueError as error:
        raise UnsafeValueError(f"{what} {error}") from None
    buffer.seek(0)
    return buffer


def as_torch_save_planner(
    pipeline: Passes[SavePlan] | None = None, *, process_group: Any = None
) -> torch_plans.SavePlanner:
    """Return a planner for ``torch.distributed.checkpoint.save`` that runs a pipeline of passes.

    The plan is that of `save`, with all its checks. The pipeline decides names, dtypes and chunks,
    so torch loads the result without a planner, into a state dict that has these names. Unlike
    torch, `flatten` saves the tensors of a tuple one by one, and numpy arrays as tensors.

    Args:
        pipeline: A pass, or a list of them, such as ``[rename(...), cast("bfloat16")]``. Load
            through `as_torch_load_planner` with the same one to get the names and dtypes back.
            Where torch saves in another process it is pickled, so it must hold no lambdas.
        process_group: The group that torch is given; by default all ranks. Passes see their rank
            in it.

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

    torch raises errors as its CheckpointException, which holds, by rank:
        PlanError, RefusedError: There is no correct plan; see `global_plan` and `local_plan`.
        ValueRefusedError: Some values cannot be stored safely; all of this rank's are named.
        ValueError: A pass needs the plans of all ranks, and torch does not give them.
    """
    return _SavePlanner(Stages.of(pipeline), process_group)


def _place_of(process_group: Any) -> Place:
    """Return this rank's place; without a process group there is one rank."""
    group = process_group or world_group()
    return Place(0, 1) if group is None else Place(group.rank(), group.size())


def _placed(process_group: Any, plan: SavePlan) -> SavePlan:
    """Return a plan that knows its rank."""
    place = _place_of(process_group)
    return attrs.evolve(plan, rank=place.rank, world_size=place.ranks)


def _check_places(plans: Sequence[SavePlan | LoadPlan], stages: Stages[SavePlan]) -> None:
    """Refuse plans that are not those of all ranks, in order, if a pass may depend on that.

    With ``no_dist=True`` or ``use_collectives=False`` torch gives each process only its own plan.
    """
    places = [(plan.rank, plan.world_size) for plan in plans]
    if len(plans) == 1 and (not stages.needs_all or places == [(0, 1)]):
        return
    if len(plans) == 1:
        raise ValueError(
            f"{stages.rest_text} needs the plans of all {places[0][1]} ranks, and torch gives each "
            "rank its own only; leave out no_dist=True and use_collectives=False, or the pass"
        )
    right = places == [(n, len(plans)) for n in range(len(plans))]
    if not right and any(map(may_see_rank, stages.own)):
        raise ValueError(
            f"{len(plans)} ranks plan together, but their passes saw ranks "
            f"{', '.join(str(rank) for rank, _ in places)} of {places[0][1]}; give the planner the "
            "process_group that torch is given"
        )


class _SavePlanner(torch_plans.SavePlanner):
    def __init__(self, stages: Stages[SavePlan], process_group: Any) -> None:
        self._stages, self._group = stages, process_group
        self._flat: dict[str, Any] = {}
        self._local = SavePlan([])
        self._items: dict[MetadataIndex, WriteItem] = {}
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
        local = _placed(self._group, self._local)
        plan: torch_plans.SavePlan = to_torch(chain(*self._stages.own)((local,))[0])
        return plan

    def create_global_plan(
        self, all_plans: list[torch_plans.SavePlan]
    ) -> tuple[list[torch_plans.SavePlan], theirs.Metadata]:
        local = [from_torch(plan) for plan in all_plans]
        _check_places(local, self._stages)
        plans, metadata = global_plan(local, [*self._stages.rest, *DEFAULT_PASSES])
        bare = (SavePlan([*p.items], p.storage_data, p.planner_data) for p in plans)
        return [to_torch(plan) for plan in bare], to_torch(metadata)

    def finish_plan(self, new_plan: torch_plans.SavePlan) -> torch_plans.SavePlan:
        plan: SavePlan = from_torch(new_plan)
        self._items = {item.index: item for item in plan.items}
        self._values = {}
        refused: dict[str, str] = {}
        for item in plan.items:
            name = item.index.fqn
            try:
                if item.tensor_data is None:
                    self._values[name] = _safe_dump(self._flat[item.source.fqn])
                    continue
                if item.fill is not None:
                    continue
                shard = as_tensor(find_shard(self._flat, item.source))
                own, stored = dtype_name(shard.dtype), item.tensor_data.properties.dtype
            except TypeError as error:
                refused[name] = str(error)
                continue
            if not can_cast(own, stored):
                refused[name] = f"is {own}, which torch cannot cast to {stored}"
        if refused:
            raise ValueRefusedError(refused)
        return new_plan

    def resolve_data(self, write_item: torch_plans.WriteItem) -> torch.Tensor | io.BytesIO:
        item = self._items[from_torch(write_item.index)]
        if item.tensor_data is None:
            return self._values[item.index.fqn]
        dtype = torch_dtype(item.tensor_data.properties.dtype)
        if item.fill is not None:
            return torch.full(item.tensor_data.chunk.sizes, item.fill, dtype=dtype)
        box = self._box(item).resolve_conj().resolve_neg()
        return box.to(dtype)

    def _box(self, item: WriteItem) -> torch.Tensor:
        """Return the elements of a chunk, in the state dict's dtype: its memory, where it can."""
        data, start, box = item.tensor_data, item.source.offset or (), item.source_chunk
        assert data is not None
        assert box is not None
        shard = as_tensor(find_shard(self._flat, item.source))
        if not data.chunk.numel:  # every rank holds an empty tensor
            return shard.new_empty(data.chunk.sizes)
        offsets = [o - s for o, s in zip(box.offsets, start, strict=True)]
        view = box_view(shard, offsets, box.sizes)
        return Window(view, data.chunk.sizes, item.axes).contents()


def as_torch_load_planner(
    pipeline: Passes[SavePlan] | None = None,
    *,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    shape: Literal["same", "overlap"] = "same",
    process_group: Any = None,
) -> PipelineLoadPlanner:
    """Return a planner for ``torch.distributed.checkpoint.load`` that runs a pipeline of passes.

    The plan is that of `load`. Non-tensor values are loaded only if that runs no code.

    Args:
        pipeline: The pass, or the list of passes, that the checkpoint was saved with, or one that
            gives the same names and dtypes. What it drops is not loaded, and reported.
        strict: Whether everything must be filled: True, False, or patterns of names that must be.
        dtype: ``"same"`` refuses another stored dtype, ``"cast"`` casts.
        shape: ``"same"`` refuses another shape; ``"overlap"`` fills what both have.
        process_group: The group that torch is given; by default all ranks. Passes see their rank
            in it.

    Returns:
        The planner. After a load, its ``report`` lists what this rank asked for and did not get,
        and ``tied`` the names that are not in the checkpoint, but share memory with one that is.

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

    torch raises errors as its CheckpointException, which holds, by rank:
        PlanError: Something that must be filled cannot be; all reasons are listed.
        ValueRefusedError: A value is not safe to load, or a tensor cannot be written to.
        ValueError: A pass needs the plans of all ranks, and torch does not give them.
    """
    stages = Stages.of(pipeline, load=True)
    return PipelineLoadPlanner(stages, strict, dtype, shape, process_group)


class PipelineLoadPlanner(torch_plans.LoadPlanner):
    """A pipeline of passes as torch's load planner; `as_torch_load_planner` makes one.

    Attributes:
        report: How the state dict and the checkpoint agree, once a load is planned.
        tied: Names missing from the checkpoint that share memory with one that it has.
    """

    def __init__(
        self,
        stages: Stages[SavePlan],
        strict: Strict,
        dtype: Literal["same", "cast"],
        shape: Literal["same", "overlap"],
        process_group: Any,
    ) -> None:
        self._stages, self._group = stages, process_group
        self._strict, self._dtype, self._shape = strict, dtype, shape
        self._sd: Mapping[str, Any] = {}
        self._flat: dict[str, Any] = {}
        self._paths: Mapping[str, Any] = {}
        self._metadata = Metadata({})
        self._whole: frozenset[str] = frozenset()
        self._held = SavePlan([])
        self._framed = ReadItems.of(())
        self.report = KeyReport()
        self.tied: Mapping[str, str] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: theirs.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Store the state dict to fill, and the checkpoint's metadata."""
        if metadata is None:
            raise ValueError("this planner needs the checkpoint's metadata")
        self._sd, self._metadata = state_dict, from_torch(metadata)
        self._whole = whole_names(*flatten(state_dict), self._metadata)
        self._flat, self._paths = flatten(state_dict, whole=self._whole)

    def create_local_plan(self) -> torch_plans.LoadPlan:
        """Plan this rank's reads, or return its plan if a pass needs those of all ranks first."""
        local = _placed(self._group, local_plan(self._sd, whole=self._whole))
        (plan,) = chain(*self._stages.own)((local,))
        self.tied = tied_names(plan, self._flat, self._metadata)
        self._held = plan
        if self._stages.rest:
            data = (to_torch(plan), dict(self.tied))
            return torch_plans.LoadPlan([], planner_data=data)
        return self._reads(plan, self.tied)

    def _reads(self, plan: SavePlan, tied: Mapping[str, str]) -> torch_plans.LoadPlan:
        """Plan the reads of a rank."""
        wanted = load_plan(
            self._metadata,
            plan,
            strict=self._strict,
            dtype=self._dtype,
            shape=self._shape,
            optional=tied,
        )
        result: torch_plans.LoadPlan = to_torch(wanted)
        return result

    def create_global_plan(
        self, global_plan: list[torch_plans.LoadPlan]
    ) -> list[torch_plans.LoadPlan]:
        """Run the passes that need the plans of all ranks, if any."""
        if not self._stages.rest:
            if any(map(may_see_rank, self._stages.own)):
                _check_places([from_torch(plan) for plan in global_plan], self._stages)
            return global_plan
        plans = tuple(from_torch(plan.planner_data[0]) for plan in global_plan)
        tied = [plan.planner_data[1] for plan in global_plan]
        _check_places(plans, self._stages)
        done = with_replicas(chain(*self._stages.rest)(plans), plans)
        return [self._reads(plan, names) for plan, names in zip(done, tied, strict=True)]

    def finish_plan(self, central_plan: torch_plans.LoadPlan) -> torch_plans.LoadPlan:
        """Refuse read-only tensors before any is filled; replace tensors on the meta device."""
        plan = from_torch(central_plan)
        self.report, self._framed = plan.report, framed_reads(central_plan)
        made = blanks(self._flat, plan, self._held, self._metadata)
        partly = partly_filled(self._held, plan.items)
        refuse_unfillable(self._sd, self._paths, partly, made)
        self._flat |= made
        refused: dict[str, str] = {}
        for item in central_plan.items:
            if item.type is torch_plans.LoadItemType.TENSOR:
                try:
                    self._box(item)
                except TypeError as error:
                    refused[item.dest_index.fqn] = str(error)
        if refused:
            raise ValueRefusedError(refused)
        for name, tensor in made.items():
            put(self._sd, self._paths[name], tensor)
        return central_plan

    def load_bytes(self, read_item: torch_plans.ReadItem, value: io.BytesIO) -> None:
        """Put a non-tensor value into the state dict, if it is safe to load."""
        name = read_item.dest_index.fqn
        try:
            loaded = load_buffer(value)
            loaded = refilled(self._flat[name], loaded) if name in self._whole else loaded
            put(self._sd, self._paths[name], loaded)
        except UnsafeValueError as error:
            raise ValueRefusedError({name: str(error)}) from None

    def resolve_tensor(self, read_item: torch_plans.ReadItem) -> torch.Tensor:
        """Return the memory that a read fills, or a buffer where `commit_tensor` has to copy."""
        window = self._box(read_item)
        entry = self._metadata.entry(read_item.storage_index.fqn)
        assert isinstance(entry, TensorMetadata)
        stored = torch_dtype(entry.properties.dtype)
        if stored == window.memory.dtype and window.tensor is not None:
            return window.tensor
        return torch.empty(window.sizes, dtype=stored, device=window.memory.device)

    def commit_tensor(self, read_item: torch_plans.ReadItem, tensor: torch.Tensor) -> None:
        """Copy a buffer into the state dict, cast and with the axes that it has there."""
        window = self._box(read_item)
        if tensor.dtype != window.memory.dtype or window.tensor is None:
            for mine, theirs in window.pairs((0,) * len(window.sizes), window.sizes, tensor):
                mine.copy_(theirs)

    def _box(self, item: torch_plans.ReadItem) -> Window:
        """Return the memory of the state dict that a read fills."""
        number = framed_number(item)
        read: ReadItem = from_torch(item) if number is None else self._framed[number]
        shard = as_tensor(find_shard(self._flat, read.dest_index), writable=True)
        box = read.dest_box
        return Window(box_view(shard, box.offsets, box.sizes), read.lengths, read.axes)
