"""Plans for saving and loading sharded checkpoints, as plain values.

The front door. Planning itself lives in `shardplan.planning`, which needs numpy and attrs only;
importing this package loads neither torch nor any of its subpackages: what is used is loaded then.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.dist import CheckpointError
    from shardplan.planning import metadata_of, register_node
    from shardplan.planning.storage import Keep

    from ._async import async_save
    from ._checkpoint import open_checkpoint
    from ._content_hash import content_hash
    from ._convert import convert, dcp_to_torch_save, torch_save_to_dcp
    from ._diff import diff
    from ._explore import explore
    from ._load import load
    from ._manager import Checkpoints
    from ._restore import restore
    from ._retention import latest, prune
    from ._save import save
    from ._state import PerRank
    from ._transfer import transfer
    from ._verify import verify
    from .torch_dcp import (
        as_torch_load_planner,
        as_torch_save_planner,
        as_torch_storage_reader,
        as_torch_storage_writer,
        from_torch,
        to_torch,
    )

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Keep",
    "PerRank",
    "__version__",
    "as_torch_load_planner",
    "as_torch_save_planner",
    "as_torch_storage_reader",
    "as_torch_storage_writer",
    "async_save",
    "content_hash",
    "convert",
    "dcp_to_torch_save",
    "diff",
    "explore",
    "from_torch",
    "latest",
    "load",
    "metadata_of",
    "open_checkpoint",
    "prune",
    "register_node",
    "restore",
    "save",
    "to_torch",
    "torch_save_to_dcp",
    "transfer",
    "verify",
]

_MODULES = {
    "_async": "async_save",
    "_checkpoint": "open_checkpoint",
    "_content_hash": "content_hash",
    "_convert": "convert dcp_to_torch_save torch_save_to_dcp",
    "_diff": "diff",
    "_explore": "explore",
    "_load": "load",
    "_manager": "Checkpoints",
    "_restore": "restore",
    "_retention": "latest prune",
    "_save": "save",
    "_state": "PerRank",
    "_transfer": "transfer",
    "_verify": "verify",
    "dist": "CheckpointError",
    "planning": "metadata_of register_node",
    "planning.storage": "Keep",
    "torch_dcp": (
        "as_torch_load_planner as_torch_save_planner as_torch_storage_reader "
        "as_torch_storage_writer from_torch to_torch"
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_READING = {
    "Keep",
    "PerRank",
    "explore",
    "latest",
    "open_checkpoint",
    "prune",
    "register_node",
    "restore",
    "verify",
}
_WITHOUT_TORCH = {"CheckpointError", "metadata_of", *_READING}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("shardplan")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardplan' has no attribute {name!r}")
    from shardplan.planning import named_extras

    with_torch = name not in _WITHOUT_TORCH
    with named_extras(f"shardplan.{name}", with_torch=with_torch):
        if with_torch:
            import_module("torch")  # at once, not when some part of it needs it
        value = getattr(import_module(f"shardplan.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
