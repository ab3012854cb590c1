"""From elements to bytes: write, fetch and copy plans, and the files and blocks in them."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .blocks import BLOCK_BYTES, Blocks, cut_blocks, reach_of
    from .fetch import (
        FAR_GAP,
        PIECE_BYTES,
        Access,
        BoxReads,
        ChunkPlaces,
        FetchPlan,
        Requested,
        fetch_plan,
    )
    from .files import FileAssignment, assign_files, file_numbers, save_id_of
    from .located import ChunkTable, entries_of, find_chunks, locate_reads
    from .ranges import (
        SMALL,
        ByteRanges,
        Requests,
        byte_ranges,
        coalesce,
        fetched,
        filled,
        lies_together,
        range_axis,
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
        "fetch": ("Access BoxReads ChunkPlaces FAR_GAP FetchPlan PIECE_BYTES Requested fetch_plan"),
        "files": "FileAssignment assign_files file_numbers save_id_of",
        "located": "ChunkTable entries_of find_chunks locate_reads",
        "ranges": (
            "ByteRanges Requests SMALL byte_ranges coalesce fetched filled lies_together "
            "range_axis steps whole_blocks"
        ),
        "shards": (
            "MAX_SHARD_SIZE Shards assign_shards number_shards parse_size refuse_split shard_plans "
            "shards_of"
        ),
    },
)
