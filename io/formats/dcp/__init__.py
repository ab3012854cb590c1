"""The format of torch.distributed.checkpoint."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .metadata import METADATA, OWN_EMPTY, OWN_PATHS, pack_path, unpack_path
    from .ranks import FIRST_RANK, rank_metadata

__getattr__, __dir__ = door(
    __name__,
    {
        "metadata": "METADATA OWN_EMPTY OWN_PATHS pack_path unpack_path",
        "ranks": "FIRST_RANK rank_metadata",
    },
)
