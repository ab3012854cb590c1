"""The format of torch.distributed.checkpoint."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .metadata import OWN_EMPTY, OWN_PATHS, pack_path, unpack_path

__getattr__, __dir__ = door(
    __name__,
    {"metadata": "OWN_EMPTY OWN_PATHS pack_path unpack_path"},
)
