"""The arguments of torch's functions: which calls are carried out here, where, and by which ranks.

A call is ours if it asks for torch's own planners and for files as torch lays them out by default.
Anything else, above all what users derived from torch's classes, is torch's to carry out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

import attrs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint import default_planner as planners
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)
from torch.distributed.checkpoint.utils import _api_bc_check

from shardplan._comm import JobComm, as_comm
from shardplan.dist import Comm, broadcast, solo
from shardplan.io.formats import find_format, open_source
from shardplan.planning import Path, decode_metadata, encode_metadata
from shardplan.torch_dcp import to_torch

__all__ = [
    "DcpPlace",
    "comm_of",
    "described",
    "find_place",
    "is_standard",
    "old_order",
    "used_format",
    "use",
]

PathLike = str | os.PathLike[str]


# The format


@attrs.define
class _Chosen:
    format: str = "dcp"


_chosen: Final = _Chosen()


def use(format: str) -> None:
    """Choose the format of all later saves of `shardplan.dcp` in this process.

    Args:
        format: ``"dcp"``, as at first, or any other that `shardplan.save` takes. Loads detect it.

    >>> use("safetensors")
    >>> use("dcp")
    """
    find_format(format)
    _chosen.format = format


def used_format() -> str:
    """Return the format that `use` chose."""
    return _chosen.format


# Planners and storage

F = TypeVar("F", bound=Callable[..., Any])


def old_order(function: F) -> F:
    """Let a function also take the storage as its second argument, as torch does, and warn."""
    return cast(F, _api_bc_check(function))  # type: ignore[no-untyped-call]


@attrs.frozen
class DcpPlace:
    """Where to save or load, and whether a checkpoint there may be replaced."""

    path: PathLike
    overwrite: bool = True


def is_standard(planner: Any) -> bool:
    """Return True if a planner is torch's, and plans as `shardplan` does."""
    if planner is None:
        return True
    if type(planner) is planners.DefaultSavePlanner:
        flat = planner.flatten_state_dict and planner.flatten_sharded_tensors
        return flat and not planner.dedup_save_to_lowest_rank
    if type(planner) in (planners.DefaultLoadPlanner, DynamicMetaLoadPlanner):
        return bool(planner.flatten_state_dict and planner.flatten_sharded_tensors)
    return False


def find_place(storage: Any, checkpoint_id: PathLike | None, *, reader: bool) -> DcpPlace | None:
    """Return where torch's storage keeps a checkpoint; None if torch has to access it.

    Raises:
        RuntimeError: There is no storage and no ``checkpoint_id``, or nothing can open it.
    """
    if storage is None:
        storage = _detect(checkpoint_id, reader=reader)
    elif _is_plain_storage(storage) and checkpoint_id is not None:
        storage.reset(checkpoint_id)
    if isinstance(storage, DcpPlace):
        return storage
    if not _is_plain_storage(storage) or not storage.checkpoint_id:
        return None
    return DcpPlace(storage.checkpoint_id, reader or storage.overwrite)


_OBJECTS: Final = ("s3://", "gs://", "az://")


def _detect(checkpoint_id: PathLike | None, *, reader: bool) -> Any:
    """Return torch's storage for a checkpoint; a place in a bucket that torch cannot open."""
    try:
        return _storage_setup(None, checkpoint_id, reader=reader)
    except RuntimeError:
        if checkpoint_id is None or not os.fspath(checkpoint_id).startswith(_OBJECTS):
            raise
        return DcpPlace(checkpoint_id)


def _is_plain_storage(storage: Any) -> bool:
    """Return True for storage of torch whose options change no more than the speed."""
    if type(storage) is FileSystemWriter:
        plain = storage.serialization_format is SerializationFormat.TORCH_SAVE
        one_file = storage.single_file_per_rank and storage.sync_files
        return plain and one_file and not storage.transforms.extensions
    if type(storage) is FileSystemReader:
        return vars(storage.transforms.extension_registry) == vars(ExtensionRegistry())
    return type(storage) is BroadcastingTorchSaveReader


# Ranks


def described(comm: Comm, path: PathLike) -> Metadata:
    """Return what a checkpoint holds in torch's own record, on every rank; one of them reads it."""

    def described() -> bytes:
        return encode_metadata(open_source(path).metadata)

    ours = decode_metadata(broadcast(comm, "metadata", described))
    metadata = cast(Metadata, to_torch(ours))
    nesting = ours.planner_data if isinstance(ours.planner_data, Mapping) else {}
    paths, names = nesting.get("paths", {}), metadata.state_dict_metadata
    metadata.planner_data = {
        name: _torch_path(paths.get(name, (("dict", name),))) for name in names
    }
    return metadata


def _torch_path(path: Path) -> tuple[str | int, ...]:
    """Return a path as torch's metadata has it.

    >>> _torch_path((("dict", "betas"), ("tuple", 0), ("dict", 7)))
    ('betas', 0, '7')
    """
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


_jobs: Final[dict[tuple[Any, int, bool], JobComm]] = {}


def comm_of(
    group: Any, *, no_dist: bool = False, coordinator: int = 0, private: bool = False
) -> Comm:
    """Return the comm of a process group, by default of all ranks; ``private`` for a thread."""
    if no_dist:
        return solo()
    key = (group, coordinator, private)
    if key == (None, 0, False):
        return as_comm(None)
    job = _jobs.setdefault(key, JobComm(chosen=group, coordinator=coordinator))
    return job.take()
