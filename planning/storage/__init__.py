"""From elements to bytes: files, blocks, byte ranges."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .blocks import BLOCK_BYTES, Blocks, cut_blocks, reach_of
    from .files import FileAssignment, assign_files, file_numbers, save_id_of
    from .located import ChunkTable, entries_of, locate_reads
    from .ranges import (
        ByteRanges,
        Requests,
        byte_ranges,
        coalesce,
        fetched,
        filled,
        lies_together,
        steps,
        whole_blocks,
    )
    from .shards import (
        MAX_SHARD_SIZE,
        Shards,
        assign_shards,
        number_shards,
        parse_size,
        refuse_split,
        shard_plans,
        shards_of,
    )

__getattr__, __dir__ = door(
    __name__,
    {
        "blocks": "BLOCK_BYTES Blocks cut_blocks reach_of",
        "files": "FileAssignment assign_files file_numbers save_id_of",
        "located": "ChunkTable entries_of locate_reads",
        "ranges": (
            "ByteRanges Requests byte_ranges coalesce fetched filled lies_together steps "
            "whole_blocks"
        ),
        "shards": (
            "MAX_SHARD_SIZE Shards assign_shards number_shards parse_size refuse_split shard_plans "
            "shards_of"
        ),
    },
)
