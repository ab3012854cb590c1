"""Saving what ``Accelerator.prepare`` returned: DDP, FSDP2, or a single process.

`save_state` and `load_state` stand for the methods of the same names of `Accelerator`; ranks write
in parallel, nothing is pickled, and the number of ranks may change between the two. `save_model`
exports a model for ``AutoModel.from_pretrained``.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardplan
from shardplan import PerRank
from shardplan._report import LoadReport, SaveReport

__all__ = ["load_state", "save_model", "save_state"]

PathLike = str | os.PathLike[str]


def save_state(accelerator: Accelerator, path: PathLike, **options: Any) -> SaveReport:
    """Save models, optimizers, schedulers, registered objects and random states of a run.

    Args:
        accelerator: What prepared them; every rank calls this.
        path: A folder for the checkpoint.
        options: As in `shardplan.save`, such as ``overwrite=True``.
    """
    return shardplan.save(_state(accelerator), path, **options)


def load_state(accelerator: Accelerator, path: PathLike, **options: Any) -> LoadReport:
    """Fill what `save_state` saved, on any number of ranks.

    Args:
        accelerator: What prepared the same models and optimizers in the same order.
        path: The checkpoint.
        options: As in `shardplan.load`.
    """
    state = _state(accelerator)
    report: LoadReport = shardplan.load(state, path, **options)
    for place, model in enumerate(accelerator._models):
        set_model_state_dict(model, state["models"][place])
    for place, (model, optimizer) in enumerate(_pairs(accelerator)):
        set_optimizer_state_dict(model, optimizer, state["optimizers"][place])
    _set_random(state["random"].value)
    accelerator.step = state["step"]
    return report


def save_model(
    accelerator: Accelerator, model: torch.nn.Module, path: PathLike, **options: Any
) -> SaveReport:
    """Export a prepared model as Hugging Face files; each rank writes its part of them.

    Args:
        accelerator: What prepared it; every rank calls this.
        model: The model. The config of a model of transformers is saved with it.
        path: A folder.
        options: As in `shardplan.save`, such as ``planner=cast("bfloat16")``.
    """
    config = getattr(accelerator.unwrap_model(model), "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        options.setdefault("extra_files", {"config.json": config.to_json_string().encode()})
    return shardplan.save(get_model_state_dict(model), path, format="hf", **options)


def _state(accelerator: Accelerator) -> dict[str, Any]:
    return {
        "models": [get_model_state_dict(model) for model in accelerator._models],
        "optimizers": [get_optimizer_state_dict(*pair) for pair in _pairs(accelerator)],
        "schedulers": list(accelerator._schedulers),
        "objects": list(accelerator._custom_objects),
        "scaler": accelerator.scaler or {},
        "random": PerRank(
            _get_random(), resize=lambda states, rank, ranks: states[rank % len(states)]
        ),
        "step": accelerator.step,
    }


def _pairs(accelerator: Accelerator) -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    """Return each prepared optimizer with the model that it trains."""
    models = accelerator._models
    pairs = []
    for prepared in accelerator._optimizers:
        optimizer = prepared.optimizer
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        trained = [m for m in models if own & {id(tensor) for tensor in m.parameters()}]
        if len(trained) != 1:
            raise ValueError(f"an optimizer trains {len(trained)} prepared models; it must be one")
        pairs.append((trained[0], optimizer))
    return pairs


def _get_random() -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # the one that programs share
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
