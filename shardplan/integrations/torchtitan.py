"""A checkpoint manager for torchtitan's trainer, in place of its own.

Use `CheckpointManager.Config` as the ``checkpoint`` of a trainer's config. Names in a checkpoint
are torchtitan's, so its own checkpoints of DCP can be loaded, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.tools import filesystem

import shardplan
from shardplan import Checkpoints, Keep
from shardplan._async import SaveFuture
from shardplan.planning import cast as cast_to
from shardplan.planning import dequantize

__all__ = ["CheckpointManager"]

_ALL = 1 << 62  # checkpoints to keep where torchtitan's config says 0


class CheckpointManager(BaseCheckpointManager):
    """Saves and loads a torchtitan run with `shardplan.Checkpoints`.

    A resumed run skips a checkpoint that is damaged or was not finished, with a warning. A final
    checkpoint in Hugging Face's format is written by all ranks, without a step that joins files.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options; these are ours."""

        background: bool | Literal["process"] = True
        """Whether training goes on while a thread, or a process, writes a checkpoint."""

        format: str = "safetensors"
        """The format of checkpoints: "safetensors", or "dcp", which torchtitan's manager loads."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: BaseStateDictAdapter | None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: SaveFuture | None = None
        if not config.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("last_save_in_hf needs a model with a state dict adapter")
        self.config, self.adapter = config, sd_adapter
        self.folder = filesystem.join(base_folder, config.folder)
        self.model = ModelWrapper(list(model_parts))
        parts = {OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}
        self.others = states | parts
        self.run = Checkpoints(
            self.folder,
            every=config.interval,
            keep=Keep(last=config.keep_latest_k or _ALL),
            background=config.background,
            format=config.format,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.config.load_only:
            return False
        if last_step and self.config.last_save_model_only:
            self._save_model(curr_step)
            return True
        first = curr_step == 1 and self.config.enable_first_step_checkpoint
        due = first or last_step or curr_step % self.config.interval == 0
        if not due:
            return False
        done = self.run.save(curr_step, self._state(self.others), force=True)
        self.save_future = done if isinstance(done, SaveFuture) else None
        if last_step:
            self.maybe_wait_for_saving()
        return True

    def _save_model(self, step: int) -> None:
        """Save the model alone, in the dtype and the format that the config asks for."""
        self.run.wait()
        state, format = self.model.state_dict(), self.config.format
        if self.config.last_save_in_hf:
            state, format = cast(Any, self.adapter).to_hf(state), "hf"
        planner = cast_to(self.config.export_dtype)
        shardplan.save(state, self._path(step), planner=planner, format=format, overwrite=True)

    def _load(self, step: int = -1) -> bool:
        steps = self.run.steps()
        if step == -1 and not steps:
            return self._load_initial()
        newest = max(steps, default=-1)
        if step not in (-1, *steps):
            raise FileNotFoundError(f"{self._path(step)} is not a checkpoint; there are {steps}")
        if step == 0 or newest == 0:  # a seed checkpoint holds the model only
            self._fill(self.model.state_dict(), self._path(0))
            return True
        unknown = set(self.config.exclude_from_loading) - {*self.others, MODEL}
        if unknown:
            raise ValueError(f"exclude_from_loading names {sorted(unknown)}, which is not state")
        state = self._wanted()
        if step == -1:
            self.run.restore(state, dtype="cast")
            self.model.load_state_dict(state)
        else:
            self._fill(state, self._path(step))
        return True

    def _load_initial(self) -> bool:
        """Load what the run starts from, if it starts from anything."""
        config, path = self.config, self.config.initial_load_path
        if config.initial_load_in_hf:
            return self._load_hf(path)
        if path is None:
            return False
        only = config.initial_load_model_only
        self._fill(self.model.state_dict() if only else self._wanted(), path)
        return True

    def _load_hf(self, path: str | None) -> bool:
        if self.adapter is None or not (path or self.adapter.hf_assets_path):
            raise ValueError("initial_load_in_hf needs a state dict adapter and a folder to load")
        state = self.adapter.to_hf(self.model.state_dict())
        planner = dequantize() if self.config.initial_load_in_hf_quantized else None
        where = path or self.adapter.hf_assets_path
        shardplan.load(state, where, planner=planner, dtype="cast")
        self.model.load_state_dict(self.adapter.from_hf(state))
        return True

    def _fill(self, state: dict[str, Any], path: str) -> None:
        shardplan.load(state, path, dtype="cast")
        self.model.load_state_dict(state)

    def _state(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return all state, with the model's tensors at the top, as torchtitan names them."""
        return {**others, **self.model.state_dict()}

    def _wanted(self) -> dict[str, Any]:
        """Return all state but what the config leaves out, and what the run does not have."""
        left_out = self.config.exclude_from_loading
        others = {name: part for name, part in self.others.items() if name not in left_out}
        return self._state({name: part for name, part in others.items() if part is not None})

    def _path(self, step: int) -> str:
        return cast(str, filesystem.join(self.folder, f"step-{step}"))

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a background save has its copy before `save` returns."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self.run.wait()

    def _close(self) -> None:
        if hasattr(self, "run"):
            self.run.wait()
