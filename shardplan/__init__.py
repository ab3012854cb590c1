"""Plans for saving and loading sharded checkpoints, as plain values.

The front door. Planning itself lives in `shardplan.planning`, which needs numpy and attrs only;
importing this package loads neither torch nor any of its subpackages: what is used is loaded then.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import (
        as_torch_load_planner,
        as_torch_save_planner,
        as_torch_storage_reader,
        as_torch_storage_writer,
        from_torch,
        to_torch,
    )
    from .background import async_save
    from .comparing import diff
    from .converting import convert, dcp_to_torch_save, torch_save_to_dcp
    from .dist import CheckpointError
    from .loading import load
    from .opening import open_checkpoint
    from .per_rank import PerRank
    from .planning import metadata_of
    from .restoring import restore
    from .retention import latest, prune
    from .saving import save
    from .verifying import verify

__all__ = [
    "CheckpointError",
    "PerRank",
    "__version__",
    "as_torch_load_planner",
    "as_torch_save_planner",
    "as_torch_storage_reader",
    "as_torch_storage_writer",
    "async_save",
    "convert",
    "dcp_to_torch_save",
    "diff",
    "from_torch",
    "latest",
    "load",
    "metadata_of",
    "open_checkpoint",
    "prune",
    "restore",
    "save",
    "to_torch",
    "torch_save_to_dcp",
    "verify",
]

_HOMES = {
    "CheckpointError": "dist",
    "PerRank": "per_rank",
    "as_torch_load_planner": "adapters",
    "as_torch_save_planner": "adapters",
    "as_torch_storage_reader": "adapters",
    "as_torch_storage_writer": "adapters",
    "async_save": "background",
    "convert": "converting",
    "dcp_to_torch_save": "converting",
    "diff": "comparing",
    "from_torch": "adapters",
    "latest": "retention",
    "load": "loading",
    "metadata_of": "planning",
    "open_checkpoint": "opening",
    "prune": "retention",
    "restore": "restoring",
    "save": "saving",
    "to_torch": "adapters",
    "torch_save_to_dcp": "converting",
    "verify": "verifying",
}


_WITHOUT_TORCH = {"latest", "prune", "verify"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("shardplan")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardplan' has no attribute {name!r}")
    from .planning.extras import named_extras

    with named_extras(f"shardplan.{name}", with_torch=name not in _WITHOUT_TORCH):
        value = getattr(import_module(f"shardplan.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
