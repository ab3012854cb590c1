"""Plans for saving, loading and resharding checkpoints: immutable values made by pure functions.

Nothing here imports torch, touches a file or talks to another rank. Start with `local_plan` (what
this rank holds), `global_plan` (who writes what, and the checkpoint that results) and `load_plan`
(the saved bytes that fill a state dict).
"""

from typing import TYPE_CHECKING

# What everything is built on. A name that is also its module's (check, flatten, overlap) has to be
# loaded here: loading the module later would give the name to the module.
from .check import check, find_issues
from .door import door
from .dtypes import dtype_name, is_exact_cast, itemsize
from .errors import CodecError, Issue, NotFoundError, PlanError, RefusedError
from .frozen import FrozenDict, freeze
from .geometry.axes import Axes
from .geometry.overlap import Overlap, fills, gaps, overlap
from .geometry.tilings import Boxes, Chunk, Grid, Tiling, tile
from .metadata import BytesMetadata, Metadata, StorageMeta, TensorMetadata
from .records import (
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from .tree import flatten, unflatten

if TYPE_CHECKING:  # the same names as below, by module
    # isort: off
    from .agreement import (
        How, LoadOffer, SaveOffer, SaveVerdict, compare_saves, conflicts, differing_loads,
        ranks_by_value, table_tag, unmatched_everywhere,
    )  # fmt: skip
    from .check import layout_issues
    from .codec import (
        contents_tag, decode_metadata, decode_plan, decode_plans, encode_metadata, encode_plan,
        fingerprint, tag_of_parts,
    )  # fmt: skip
    from .draw import Picture, draw_bytes, draw_reshard, draw_tiling, draw_traffic, traffic_matrix
    from .dtypes import ITEMSIZE
    from .errors import EXTRAS, listed, named_extras, nearest_hint, nearest_names, renumbered, span
    from .expressions import (
        Expression, Product, Term, Weighted, added, expression_of, joined_metadata, joined_name,
        result_of, scaled, sum_dtype, term_boxes, terms_of, with_adapter,
    )  # fmt: skip
    from .frozen import from_json, to_json
    from .load import (
        Strict, global_load_plan, load_plan, loads_into, resolve_overlaps, strict_patterns,
    )  # fmt: skip
    from .matching import whole_names
    from .mesh import (
        LLAMA_TP, DerivedPlans, Mesh, Only, Replicate, Rule, Shard, SpecLayout, StridedShard,
        TensorSpec, WorldPlans, adam, deepseek, deepseek_v3, derive_plans, expert_parallel, fsdp,
        fsdp_tp, hsdp, kimi_k2, llama, llama3_8b, llama3_405b, local_chunks, pipeline, qwen3_235b,
        qwen3_moe, tensor_parallel, world_metadata, world_plans,
    )  # fmt: skip
    from .metadata import Entries, Layout, metadata_of
    from .nodes import is_node, register_node, saved_nodes
    from .passes import (
        Pass, Passes, annotate, balance, cast, chain, concat, dedup_replicas, dequantize, drop,
        inverse, named_chain, on_ranks, pad, partition, permute, read_on, rename, reshape, select,
        share_reads, split, split_chunks, split_reads, split_replicas, stack, trim, unstack,
        where, world_pass,
    )  # fmt: skip
    from .plans import LoadPlan, Plan, SavePlan
    from .records import KeyReport, Transfer
    from .quantized import (
        BLOCK, Quantized, QuantizedPart, dequantized, every, find_quantized, quantized_parts,
    )  # fmt: skip
    from .reports import (
        CostModel, PlanDiff, PlannerTrace, Report, Why, Writers, explain, plan_diff, show, traced,
        why, writers_of,
    )  # fmt: skip
    from .save import DEFAULT_PASSES, WholePlan, global_plan, local_plan, plan_flat, plan_whole
    from .sources import dropped_names, with_replicas
    from .storage import (
        Access, BoxReads, ByteRanges, ChunkPlaces, CopyPlan, FetchPlan, Requests, StoredChunks,
        TransferPlan, WritePlan, byte_ranges, coalesce, copy_plan, fetch_plan, transfer_plan,
        write_plan,
    )  # fmt: skip
    from .tensors import find_object, find_shard, held, kind_of, placement_of, shard_finder, spec_of
    from .testing import assert_all_saved, assert_read_once, assert_written_once
    from .text import (
        Printed, Sheet, Table, counted, cut_text, human_bytes, human_seconds, listing, runs_text,
        shape_text,
    )  # fmt: skip
    from .tree import (
        Path, _is_leaf, empty_names, entry_of, is_tensor, leaves, nesting_issues, nodes_of,
        retyped, with_entry,
    )  # fmt: skip
    # isort: on

__getattr__, __dir__ = door(
    __name__,
    {
        "agreement": (
            "How LoadOffer SaveOffer SaveVerdict compare_saves conflicts differing_loads "
            "ranks_by_value table_tag unmatched_everywhere"
        ),
        "check": "layout_issues",
        "codec": (
            "contents_tag decode_metadata decode_plan decode_plans encode_metadata encode_plan "
            "fingerprint tag_of_parts"
        ),
        "draw": "Picture draw_bytes draw_reshard draw_tiling draw_traffic traffic_matrix",
        "dtypes": "ITEMSIZE",
        "errors": "EXTRAS listed named_extras nearest_hint nearest_names renumbered span",
        "expressions": (
            "Expression Product Term Weighted added expression_of joined_metadata joined_name "
            "result_of scaled sum_dtype term_boxes terms_of with_adapter"
        ),
        "frozen": "from_json to_json",
        "load": "Strict global_load_plan load_plan loads_into resolve_overlaps strict_patterns",
        "mappings": "",
        "matching": "whole_names",
        "mesh": (
            "DerivedPlans LLAMA_TP Mesh Only Replicate Rule Shard SpecLayout StridedShard "
            "TensorSpec WorldPlans adam deepseek deepseek_v3 derive_plans expert_parallel fsdp "
            "fsdp_tp hsdp kimi_k2 llama llama3_405b llama3_8b local_chunks pipeline qwen3_235b "
            "qwen3_moe tensor_parallel world_metadata world_plans"
        ),
        "metadata": "Entries Layout metadata_of",
        "nodes": "is_node register_node saved_nodes",
        "passes": (
            "Pass Passes annotate balance cast chain concat dedup_replicas dequantize drop inverse "
            "named_chain on_ranks pad partition permute read_on rename reshape select share_reads "
            "split split_chunks split_reads split_replicas stack trim unstack where world_pass"
        ),
        "plans": "LoadPlan Plan SavePlan",
        "quantized": (
            "BLOCK Quantized QuantizedPart dequantized every find_quantized quantized_parts"
        ),
        "records": "KeyReport Transfer",
        "reports": (
            "CostModel PlanDiff PlannerTrace Report Why Writers explain plan_diff show traced why "
            "writers_of"
        ),
        "save": "DEFAULT_PASSES WholePlan global_plan local_plan plan_flat plan_whole",
        "sources": "dropped_names with_replicas",
        "storage": (
            "Access BoxReads ByteRanges ChunkPlaces CopyPlan FetchPlan Requests StoredChunks "
            "TransferPlan WritePlan byte_ranges coalesce copy_plan fetch_plan transfer_plan "
            "write_plan"
        ),
        "tensors": "find_object find_shard held kind_of placement_of shard_finder spec_of",
        "testing": "assert_all_saved assert_read_once assert_written_once",
        "text": (
            "Printed Sheet Table counted cut_text human_bytes human_seconds listing runs_text "
            "shape_text"
        ),
        "tree": (
            "Path _is_leaf empty_names entry_of is_tensor leaves nesting_issues nodes_of retyped "
            "with_entry"
        ),
    },
)

__all__ = [
    "Access", "BoxReads", "ChunkPlaces", "CopyPlan", "FetchPlan", "StoredChunks",
    "TransferPlan", "WritePlan", "copy_plan", "fetch_plan", "transfer_plan", "write_plan",
    "Axes", "Boxes", "ByteRanges", "BytesMetadata", "Chunk", "CodecError", "CostModel",
    "DerivedPlans", "FrozenDict", "Grid", "Issue", "KeyReport", "LLAMA_TP", "LoadItemType",
    "LoadPlan", "Mesh", "Metadata", "MetadataIndex", "NotFoundError", "Only", "Overlap", "Pass",
    "Passes", "Picture", "Plan", "PlanDiff", "PlanError", "PlannerTrace", "ReadItem",
    "RefusedError", "Replicate", "Report", "Requests", "Rule", "SavePlan", "Shard", "SpecLayout",
    "StorageMeta", "StridedShard", "TensorMetadata", "TensorProperties", "TensorSpec",
    "TensorWriteData", "Tiling", "Transfer", "Why", "WorldPlans", "WriteItem", "WriteItemType",
    "Writers", "adam", "annotate", "assert_all_saved", "assert_read_once", "assert_written_once",
    "balance", "byte_ranges", "cast", "chain", "check", "coalesce", "concat", "decode_metadata",
    "decode_plan", "decode_plans", "dedup_replicas", "deepseek", "deepseek_v3", "dequantize",
    "derive_plans", "draw_bytes", "draw_reshard",
    "draw_tiling", "draw_traffic", "drop", "dtype_name", "encode_metadata", "encode_plan",
    "expert_parallel", "explain", "fills", "find_issues", "find_object", "find_shard",
    "fingerprint", "flatten", "freeze", "fsdp", "fsdp_tp", "gaps", "global_load_plan",
    "global_plan", "hsdp", "inverse", "is_exact_cast", "itemsize", "kimi_k2", "llama",
    "llama3_405b", "llama3_8b", "load_plan", "local_chunks", "local_plan", "metadata_of",
    "named_chain", "on_ranks", "overlap", "pad", "partition", "permute", "pipeline", "plan_diff",
    "read_on", "qwen3_235b", "qwen3_moe", "register_node", "rename", "reshape",
    "resolve_overlaps", "select", "share_reads", "show", "split", "split_chunks", "split_reads",
    "split_replicas", "stack", "tensor_parallel", "tile", "traffic_matrix", "trim", "unflatten",
    "unstack", "where", "why", "world_metadata", "world_pass", "world_plans", "writers_of",
]  # fmt: skip
