"""From elements to bytes: write, fetch and copy plans, and the files and blocks in them."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .arrival import key_batches
    from .blocks import (  # isort: skip
        BLOCK_BYTES, Blocks, boxes_of, cut_blocks, cut_within, entries_of, find_chunks,
        group_blocks, reads_of, write_tasks,
    )  # fmt: skip
    from .copy import (  # isort: skip
        BATCH_BYTES, Box, ComparePlan, CopyBudget, CopyPlan, StoredChunks, begun_chunks,
        compare_plan, copy_budget, copy_plan, copy_memory, read_boxes, share_plans, written_bytes,
    )  # fmt: skip
    from .fetch import (  # isort: skip
        FAR_GAP, PIECE_BYTES, Access, BoxReads, ChunkPlaces, FetchPlan, Requested, fetch_plan,
    )  # fmt: skip
    from .filling import (  # isort: skip
        SavedElsewhere, is_folded, is_needed, meeting, partly_filled, saved_elsewhere,
        without_other_ranks,
    )  # fmt: skip
    from .linking import comparable, files_to_share, without_shared
    from .places import chunk_places
    from .ranges import SMALL, ByteRanges, Requests, byte_ranges, coalesce, range_axis
    from .retention import Best, Keep, LeftFile, RunEntry, by_age, retain, retain_files
    from .shared_files import (  # isort: skip
        FileTensor, SharedPlan, Spot, common_ties, lay_out_files, place_tensors, shared_plan,
    )  # fmt: skip
    from .shared_reads import SharedReads, shared_by_rule, shared_by_transfers, turns_of
    from .wants import (  # isort: skip
        MOST_READS, SMALL_BYTES, Need, Wants, Way, need_of, plan_bytes, replica_groups, sharing_way,
        wants_of,
    )  # fmt: skip
    from .rounds import (  # isort: skip
        Incoming, Outgoing, ReadRegion, Region, Round, ValueRead, shared_rounds, value_exchange,
        value_reads,
    )  # fmt: skip
    from .target import Placements, Seen, Target, plan_target, seen_through
    from .transfer import Exchange, Parcel, ParcelPart, TransferPlan, transfer_plan, transfer_rounds
    from .write import (  # isort: skip
        MAX_SHARD_SIZE, Shards, WritePlan, assign_shards, file_name, file_numbers, number_shards,
        numbers_of, pack_files, parse_size, refuse_split, save_id_of, shard_plans, shards_of,
        split_tensors, table_name, widest_first,
        write_plan,
    )  # fmt: skip

__getattr__, __dir__ = door(
    __name__,
    {
        "arrival": "key_batches",
        "blocks": (
            "BLOCK_BYTES Blocks boxes_of cut_blocks cut_within entries_of find_chunks "
            "group_blocks reads_of write_tasks"
        ),
        "copy": (
            "BATCH_BYTES Box ComparePlan CopyBudget CopyPlan StoredChunks begun_chunks "
            "compare_plan copy_budget copy_plan copy_memory read_boxes share_plans written_bytes"
        ),
        "fetch": "FAR_GAP PIECE_BYTES Access BoxReads ChunkPlaces FetchPlan Requested fetch_plan",
        "filling": (
            "SavedElsewhere is_folded is_needed meeting partly_filled saved_elsewhere "
            "without_other_ranks"
        ),
        "linking": "comparable files_to_share without_shared",
        "places": "chunk_places",
        "ranges": "SMALL ByteRanges Requests byte_ranges coalesce range_axis",
        "retention": "Best Keep LeftFile RunEntry by_age retain retain_files",
        "shared_files": (
            "FileTensor SharedPlan Spot common_ties lay_out_files place_tensors shared_plan"
        ),
        "shared_reads": "SharedReads shared_by_rule shared_by_transfers turns_of",
        "wants": (
            "MOST_READS SMALL_BYTES Need Wants Way need_of plan_bytes replica_groups sharing_way "
            "wants_of"
        ),
        "rounds": (
            "Incoming Outgoing ReadRegion Region Round ValueRead shared_rounds value_exchange "
            "value_reads"
        ),
        "target": "Placements Seen Target plan_target seen_through",
        "transfer": "Exchange Parcel ParcelPart TransferPlan transfer_plan transfer_rounds",
        "write": (
            "MAX_SHARD_SIZE Shards WritePlan assign_shards file_name file_numbers number_shards "
            "numbers_of pack_files parse_size refuse_split save_id_of shard_plans shards_of "
            "split_tensors table_name widest_first write_plan"
        ),
    },
)
