"""Checkpoints of Lightning's trainer: a plugin for whole models, a strategy for sharded ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardplan
from shardplan.dist import solo

__all__ = ["ShardplanIO", "ShardplanStrategy"]

PathLike = str | os.PathLike[str]
_SHARDED = ("state_dict", "optimizer_states")


class ShardplanIO(CheckpointIO):
    """Saves what the trainer holds on its first rank: ``Trainer(plugins=[ShardplanIO()])``.

    Checkpoints are folders. Nothing in them is pickled: what cannot be stored otherwise is refused.

    Args:
        format: As in `shardplan.save`.
    """

    def __init__(self, format: str = "safetensors") -> None:
        self.format = format

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; the trainer calls this on one rank."""
        _refuse_options(storage_options)
        shardplan.save(checkpoint, path, format=self.format, comm=solo(), overwrite=True)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any format; each rank reads it for itself."""
        device = map_location if not callable(map_location) else None
        return dict(shardplan.restore(path, device=device))

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint that the trainer keeps no longer."""
        if Path(path).exists():
            shutil.rmtree(path)


class ShardplanStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose ranks save and load their shards with shardplan.

    A run can be resumed on another number of ranks, and from checkpoints of any format.

    Args:
        format: As in `shardplan.save`.
        options: Those of `ModelParallelStrategy`.
    """

    def __init__(self, *, format: str = "safetensors", **options: Any) -> None:
        super().__init__(save_distributed_checkpoint=True, **options)
        self.format = format

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; the trainer calls this on every rank."""
        _refuse_options(storage_options)
        path = self.broadcast(filepath)
        shardplan.save(checkpoint, path, format=self.format, overwrite=True)

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest; the trainer calls this on every rank."""
        path = self.broadcast(checkpoint_path)
        state = {
            "state_dict": self.lightning_module_state_dict(),
            "optimizer_states": [self.optimizer_state(each) for each in self.optimizers],
        }
        shardplan.load(state, path)
        self._give_back(state)
        names = shardplan.open_checkpoint(path)
        rest = [name for name in names if name.partition(".")[0] not in _SHARDED]
        return {**shardplan.restore(path, keys=rest), **state}

    def _give_back(self, state: Mapping[str, Any]) -> None:
        assert self.model is not None
        strict = self.lightning_module.strict_loading
        set_model_state_dict(
            self.model, state["state_dict"], options=StateDictOptions(strict=strict)
        )
        for optimizer, loaded in zip(self.optimizers, state["optimizer_states"], strict=True):
            set_optimizer_state_dict(self.model, optimizer, loaded)


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise TypeError("shardplan takes no storage_options; pass options to the plugin instead")
