"""Loading with the signatures of torch.distributed.checkpoint.state_dict_loader."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException, LoadPlanner, StorageReader
from torch.distributed.checkpoint import state_dict_loader as _torchs
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import deprecated

import shardplan
from shardplan.dist import Comm
from shardplan.torch_dcp import as_torch_storage_reader

from ._calls import (
    DcpPlace,
    PathLike,
    comm_of,
    described,
    find_place,
    is_standard,
    old_order,
    used_format,
)
from ._errors import raising

__all__ = ["load", "load_state_dict"]


@old_order
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Fill a state dict from a checkpoint, as ``torch.distributed.checkpoint.load`` does.

    Tensors are filled in place, and cast; other values are replaced; objects with ``state_dict()``
    and ``load_state_dict()`` get their state. The checkpoint may have any format.

    Args:
        state_dict: What to fill.
        checkpoint_id: The checkpoint.
        storage_reader: Torch's `FileSystemReader` or `BroadcastingTorchSaveReader`; torch carries
            out the load with any other.
        planner: Torch's `DefaultLoadPlanner` or `DynamicMetaLoadPlanner`; torch carries out the
            load with any other.
        process_group: The ranks; by default all of the job.
        no_dist: Whether this process loads alone.

    Raises:
        CheckpointException: The load failed, on all ranks alike; ``__cause__`` is our error.
    """
    place = find_place(storage_reader, checkpoint_id, reader=True) if is_standard(planner) else None
    if place is not None:
        comm = comm_of(process_group, no_dist=no_dist)
        if _load(state_dict, place, comm, planner):
            return
    if storage_reader is None and used_format() != "dcp" and checkpoint_id is not None:
        storage_reader = as_torch_storage_reader(checkpoint_id)
    _torchs.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _load(state_dict: dict[str, Any], place: DcpPlace, comm: Comm, planner: Any) -> bool:
    """Load as torch does; return False if torch wrote the checkpoint through an extension."""
    asked = {key: state_dict[key] for key in sorted(state_dict)}  # some communicate
    state = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in asked.items()}
    try:
        _fill(state, place, comm, planner)
    except CheckpointException as error:
        if "was written through the extension" in str(error.__cause__):
            return False
        raise
    for key, value in asked.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    return True


@deprecated(
    "`load_state_dict` is deprecated and will be removed in future versions. "
    "Please use `load` instead.",
    category=FutureWarning,
)
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Fill a state dict from a checkpoint; torch has deprecated this in favour of `load`."""
    place = find_place(storage_reader, None, reader=True) if is_standard(planner) else None
    if place is None:
        return _torchs.load_state_dict(
            state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner
        )
    comm = comm_of(process_group, no_dist=no_dist, coordinator=coordinator_rank)
    return _fill(state_dict, place, comm, planner)


def _fill(state_dict: dict[str, Any], place: DcpPlace, comm: Comm, planner: Any) -> None:
    strict = planner is None or not planner.allow_partial_load
    with raising(comm):
        shardplan.load(state_dict, place.path, strict=strict, dtype="cast", comm=comm)
        if planner is not None:
            planner.metadata = described(comm, place.path)


def __getattr__(name: str) -> Any:
    return getattr(_torchs, name)
