"""Saving with the signatures of torch.distributed.checkpoint.state_dict_saver."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import Metadata, SavePlanner, StorageWriter
from torch.distributed.checkpoint import state_dict_saver as _torchs
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from typing_extensions import deprecated

import shardplan
from shardplan._async import SaveFuture
from shardplan._report import SaveReport
from shardplan.dist import Comm
from shardplan.torch_dcp import as_torch_storage_writer

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

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]


@old_order
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    format: str | None = None,
) -> Metadata:
    """Save a state dict, as ``torch.distributed.checkpoint.save`` does.

    Args:
        state_dict: As in `shardplan.save`.
        checkpoint_id: The folder. A checkpoint that is there is replaced.
        storage_writer: Torch's `FileSystemWriter`; torch carries out the save with any other.
        planner: Torch's `DefaultSavePlanner`; torch carries out the save with any other.
        process_group: The ranks; by default all of the job.
        no_dist: Whether this process saves alone.
        use_collectives: If false, torch carries out the save.
        format: What to write in place of what `use` chose.

    Raises:
        CheckpointException: The save failed, on all ranks alike; ``__cause__`` is our error.
    """
    place = None
    if use_collectives and is_standard(planner):
        place = find_place(storage_writer, checkpoint_id, reader=False)
    if place is None:
        metadata: Metadata = _torchs.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=_writer(storage_writer, checkpoint_id, format),
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return metadata
    comm = comm_of(process_group, no_dist=no_dist)
    return _save(state_dict, place, comm, storage_writer, format)


@deprecated(
    "`save_state_dict` is deprecated and will be removed in future versions."
    "Please use `save` instead.",
    category=FutureWarning,
)
def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save a state dict; torch has deprecated this in favour of `save`."""
    place = find_place(storage_writer, None, reader=False) if is_standard(planner) else None
    if place is None:
        return _torchs.save_state_dict(
            state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner
        )
    comm = comm_of(process_group, no_dist=no_dist, coordinator=coordinator_rank)
    return _save(state_dict, place, comm, storage_writer, None)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    format: str | None = None,
) -> Future[Metadata] | AsyncSaveResponse:
    """Copy a state dict, and save the copy in the background; see `shardplan.async_save`.

    The arguments are those of `save`. With ``AsyncCheckpointerType.PROCESS``, our writer process
    writes, as with ``process=True`` there. Torch carries out saves with a stager.

    Returns:
        A future of the metadata; what torch returns if torch carries out the save.
    """
    place = None
    if async_stager is None and use_collectives and is_standard(planner):
        place = find_place(storage_writer, checkpoint_id, reader=False)
    if place is None:
        return _torchs.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=_writer(storage_writer, checkpoint_id, format),
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    comm = comm_of(process_group, no_dist=no_dist, private=True)
    format = format or used_format()
    with raising(comm):
        saving = shardplan.async_save(
            state_dict,
            place.path,
            format=format,
            comm=comm,
            overwrite=place.overwrite,
            process=async_checkpointer_type is AsyncCheckpointerType.PROCESS,
        )
    future = Future[Metadata]()
    future.set_running_or_notify_cancel()  # other ranks depend on it
    saving.add_done_callback(partial(_pass_on, future, comm, place, storage_writer))
    return future


def _save(
    state_dict: dict[str, Any], place: DcpPlace, comm: Comm, writer: Any, format: str | None
) -> Metadata:
    format = format or used_format()
    with raising(comm):
        report = shardplan.save(
            state_dict, place.path, format=format, comm=comm, overwrite=place.overwrite
        )
        return _metadata(report, comm, place, writer)


def _metadata(report: SaveReport, comm: Comm, place: DcpPlace, writer: Any) -> Metadata:
    """Return what was saved, and note in the caller's writer under what id."""
    if writer is not None:
        writer.save_id = report.save_id
    return described(comm, place.path)


def _pass_on(
    future: Future[Metadata], comm: Comm, place: DcpPlace, writer: Any, saving: SaveFuture
) -> None:
    """Settle torch's future when ours is done."""
    try:
        with raising(comm):
            metadata = _metadata(saving.result(), comm, place, writer)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(metadata)


def _writer(writer: Any, checkpoint_id: PathLike | None, format: str | None) -> Any:
    """Return the storage for a save that torch carries out: the caller's, or ours if asked for."""
    if writer is not None or (format or used_format()) == "dcp" or checkpoint_id is None:
        return writer
    if (format or used_format()) == "safetensors":
        return as_torch_storage_writer(checkpoint_id, overwrite=True)
    raise ValueError(
        f"format={format or used_format()!r} needs torch's default planner; save as dcp or "
        "safetensors, then shardplan.convert"
    )


def __getattr__(name: str) -> Any:
    return getattr(_torchs, name)
