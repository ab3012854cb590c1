"""A drop-in for torch.distributed.checkpoint: ``import shardplan.dcp as dcp``.

`save`, `load`, `async_save` and the functions of `format_utils` have torch's signatures, defaults
and returns. What they write is DCP's format, which torch reads, unless `use` or the argument
``format`` chooses another. A call with a planner or a storage of the caller's own is handed to
torch. Every other name and submodule of torch.distributed.checkpoint can be imported from here: it
is torch's.

>>> import tempfile, torch
>>> import shardplan.dcp as dcp
>>> with tempfile.TemporaryDirectory() as folder:
...     metadata = dcp.save({"model": {"w": torch.ones(2, 3)}, "step": 7}, checkpoint_id=folder)
...     state = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
...     dcp.load(state, checkpoint_id=folder)
>>> state["step"], metadata.state_dict_metadata["model.w"].size
(7, torch.Size([2, 3]))
"""

import pkgutil
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from shardplan.planning import named_extras

with named_extras("shardplan.dcp", with_torch=True):
    from torch.distributed import checkpoint as _torchs
    from torch.distributed.checkpoint import (
        CheckpointException,
        DefaultLoadPlanner,
        DefaultSavePlanner,
        FileSystemReader,
        FileSystemWriter,
        LoadPlan,
        LoadPlanner,
        Metadata,
        SavePlan,
        SavePlanner,
        StorageReader,
        StorageWriter,
    )

    from . import format_utils, state_dict_loader, state_dict_saver
    from ._calls import use
    from .state_dict_loader import load, load_state_dict
    from .state_dict_saver import async_save, save, save_state_dict

__all__ = [
    # ours
    "async_save",
    "format_utils",
    "load",
    "load_state_dict",
    "save",
    "save_state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "use",
    # torch's
    "CheckpointException",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
]


def _share_submodules() -> None:
    """Let ``import shardplan.dcp.state_dict``, and so on, import torch's own modules."""
    for found in pkgutil.iter_modules(_torchs.__path__):
        if f"{__name__}.{found.name}" not in sys.modules:
            with suppress(ImportError):  # of what it needs, such as fsspec
                module = import_module(f"{_torchs.__name__}.{found.name}")
                sys.modules[f"{__name__}.{found.name}"] = module


_share_submodules()


def __getattr__(name: str) -> Any:
    return getattr(_torchs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torchs)})
