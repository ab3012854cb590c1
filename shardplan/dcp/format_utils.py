"""Conversion with the signatures of torch.distributed.checkpoint.format_utils."""

from typing import Any

from torch.distributed.checkpoint import format_utils as _torchs
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
)

import shardplan
from shardplan.dist import solo

from ._calls import PathLike
from ._errors import raising

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def dcp_to_torch_save(dcp_checkpoint_dir: PathLike, torch_save_path: PathLike) -> None:
    """Make a ``torch.save`` file of a checkpoint, in bounded memory.

    Args:
        dcp_checkpoint_dir: The checkpoint, of any format.
        torch_save_path: The file to write; one that is there is replaced.
    """
    with raising(solo()):
        shardplan.dcp_to_torch_save(dcp_checkpoint_dir, torch_save_path)


def torch_save_to_dcp(torch_save_path: PathLike, dcp_checkpoint_dir: PathLike) -> None:
    """Make a DCP checkpoint of a ``torch.save`` file, in bounded memory.

    Args:
        torch_save_path: The file.
        dcp_checkpoint_dir: The folder to write; a checkpoint that is there is replaced.
    """
    shardplan.torch_save_to_dcp(torch_save_path, dcp_checkpoint_dir)


def __getattr__(name: str) -> Any:
    return getattr(_torchs, name)
