"""From elements to bytes: write, fetch and copy plans, and the files and blocks in them."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .blocks import (
        BLOCK_BYTES,
        Blocks,
        ChunkTable,
        boxes_of,
        cut_blocks,
        cut_within,
        entries_of,
        find_chunks,
        group_blocks,
        locate_reads,
        reach_of,
        reads_of,
        write_tasks,
    )
    from .copy import (
        BATCH_BYTES,
        Box,
        ComparePlan,
        CopyBudget,
        CopyPlan,
        StoredChunks,
        begun_chunks,
        compare_plan,
        copy_budget,
        copy_plan,
        file_bytes,
        read_boxes,
        share_plans,
        tensor_bytes,
    )
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
    from .filling import (
        SavedElsewhere,
        is_folded,
        is_needed,
        meeting,
        partly_filled,
        saved_elsewhere,
        without_other_ranks,
    )
    from .places import Places, chunk_places
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
    from .retention import Best, Keep, LeftFile, Retained, RunEntry, by_age, retain, retain_files
    from .seen import Seen, seen_through
    from .shared_files import (
        FileTensor,
        SharedPlan,
        Spot,
        common_ties,
        lay_out_files,
        place_tensors,
        shared_plan,
    )
    from .shared_reads import (
        MOST_READS,
        Arrival,
        Need,
        Piece,
        Round,
        SharedRounds,
        need_of,
        plan_bytes,
        shared_rounds,
        sharing_pays,
    )
    from .shared_values import ValueExchange, ValueRead, value_exchange, value_reads
    from .target import Placements, Target, Traits, plan_target
    from .write import (
        MAX_SHARD_SIZE,
        Shards,
        WritePlan,
        assign_shards,
        file_name,
        file_numbers,
        number_shards,
        numbers_of,
        pack_files,
        parse_size,
        refuse_split,
        save_id_of,
        shard_plans,
        shards_of,
        split_tensors,
        table_name,
        widest_first,
        write_plan,
    )

__getattr__, __dir__ = door(
    __name__,
    {
        "blocks": (
            "BLOCK_BYTES Blocks ChunkTable boxes_of cut_blocks cut_within entries_of "
            "find_chunks group_blocks locate_reads reach_of reads_of write_tasks"
        ),
        "copy": (
            "BATCH_BYTES Box ComparePlan CopyBudget CopyPlan StoredChunks begun_chunks "
            "compare_plan copy_budget copy_plan file_bytes read_boxes share_plans tensor_bytes"
        ),
        "fetch": ("Access BoxReads ChunkPlaces FAR_GAP FetchPlan PIECE_BYTES Requested fetch_plan"),
        "filling": (
            "SavedElsewhere is_folded is_needed meeting partly_filled saved_elsewhere "
            "without_other_ranks"
        ),
        "places": "Places chunk_places",
        "ranges": (
            "ByteRanges Requests SMALL byte_ranges coalesce fetched filled lies_together "
            "range_axis steps whole_blocks"
        ),
        "retention": "Best Keep LeftFile Retained RunEntry by_age retain retain_files",
        "seen": "Seen seen_through",
        "shared_files": (
            "FileTensor SharedPlan Spot common_ties lay_out_files place_tensors shared_plan"
        ),
        "shared_reads": (
            "Arrival MOST_READS Need Piece Round SharedRounds need_of plan_bytes shared_rounds "
            "sharing_pays"
        ),
        "shared_values": "ValueExchange ValueRead value_exchange value_reads",
        "target": "Placements Target Traits plan_target",
        "write": (
            "MAX_SHARD_SIZE Shards WritePlan assign_shards file_name file_numbers number_shards "
            "numbers_of pack_files parse_size refuse_split save_id_of shard_plans shards_of "
            "split_tensors table_name widest_first write_plan"
        ),
    },
)
