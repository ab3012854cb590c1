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
    from .rounds import Arrival, Piece, Round, SharedRounds, shared_rounds
    from .sharing_cost import MOST_READS, Need, need_of, plan_bytes, read_widths, sharing_pays

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
        "rounds": "Arrival Piece Round SharedRounds shared_rounds",
        "sharing_cost": "MOST_READS Need need_of plan_bytes read_widths sharing_pays",
    },
)
