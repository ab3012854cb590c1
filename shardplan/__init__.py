"""Plans for saving and loading sharded checkpoints, as plain values.

The front door. Planning itself lives in `shardplan.planning`, which needs numpy and attrs only;
importing this package loads neither torch nor any of its subpackages: what is used is loaded then.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparing import diff
    from .loading import load, restore
    from .opening import open_checkpoint
    from .retention import latest, prune
    from .saving import save
    from .verifying import verify

__all__ = [
    "__version__",
    "diff",
    "latest",
    "load",
    "open_checkpoint",
    "prune",
    "restore",
    "save",
    "verify",
]

_HOMES = {
    "diff": "comparing",
    "latest": "retention",
    "load": "loading",
    "open_checkpoint": "opening",
    "prune": "retention",
    "restore": "loading",
    "save": "saving",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("shardplan")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardplan' has no attribute {name!r}")
    value = getattr(import_module(f"shardplan.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
