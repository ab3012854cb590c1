"""Hugging Face checkpoints: safetensors files and an index."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .shards import MAX_SHARD_SIZE, parse_size, refuse_split
    from .write import HfWriter

__getattr__, __dir__ = door(
    __name__,
    {
        "shards": "MAX_SHARD_SIZE parse_size refuse_split",
        "write": "HfWriter",
    },
)
