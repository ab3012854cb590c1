"""Plans for saving, loading and resharding checkpoints, as immutable values made by pure functions.

Nothing here imports torch, touches a file or talks to another rank: state dicts and plans go in,
plans come out. Start with `local_plan` (what does this rank hold?), `global_plan` (who writes what,
and what will the checkpoint be?) and `load_plan` (which saved bytes fill this state dict?).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# What everything is built on. A name that is also its module's (check, flatten, overlap) has to be
# loaded here: loading the module later would give the name to the module.
from .check import check, find_issues
from .dtypes import dtype_name, is_exact_cast, itemsize
from .errors import CodecError, Issue, NotFoundError, PlanError, RefusedError
from .flatten import flatten, unflatten
from .frozen import FrozenDict, freeze
from .items import (
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from .metadata import BytesMetadata, Metadata, StorageMeta, TensorMetadata
from .overlap import Overlap, fills, gaps, overlap
from .tiling import Boxes, Chunk, Grid, Tiling, tile

if TYPE_CHECKING:
    from .chunking import dedup_replicas, split_chunks, split_replicas
    from .codec import (
        decode_metadata,
        decode_plan,
        decode_plans,
        encode_metadata,
        encode_plan,
        fingerprint,
    )
    from .derive import DerivedPlans, derive_plans
    from .describe import metadata_of
    from .draw import Picture, draw_bytes, draw_reshard, draw_tiling, draw_traffic, traffic_matrix
    from .finding import find_object, find_shard
    from .keys import cast, drop, rename, select
    from .layout import Mesh, Only, Replicate, Shard, StridedShard, TensorSpec, local_chunks
    from .load import global_load_plan, load_plan, resolve_overlaps
    from .models import LLAMA_TP, llama, llama3_8b, llama3_405b
    from .oracles import assert_all_saved, assert_read_once, assert_written_once
    from .passes import Pass, Passes, annotate, chain, named_chain, partition, world_pass
    from .placed import SpecLayout
    from .presets import Rule, adam, expert_parallel, fsdp, fsdp_tp, hsdp, pipeline, tensor_parallel
    from .ranges import ByteRanges, Requests, byte_ranges, coalesce
    from .reads import Transfer
    from .records import KeyReport, LoadPlan, Plan, SavePlan
    from .reports import (
        CostModel,
        PlanDiff,
        Report,
        Why,
        Writers,
        explain,
        plan_diff,
        why,
        writers_of,
    )
    from .save import global_plan, local_plan
    from .sharing import read_on, share_reads, split_reads
    from .topology import WorldPlans, world_metadata, world_plans

# Whatever else is asked for is loaded then: looking into a checkpoint needs little of it.
_HOMES = {
    "chunking": ("dedup_replicas", "split_chunks", "split_replicas"),
    "codec": (
        "decode_metadata",
        "decode_plan",
        "decode_plans",
        "encode_metadata",
        "encode_plan",
        "fingerprint",
    ),
    "derive": ("DerivedPlans", "derive_plans"),
    "describe": ("metadata_of",),
    "draw": (
        "Picture",
        "draw_bytes",
        "draw_reshard",
        "draw_tiling",
        "draw_traffic",
        "traffic_matrix",
    ),
    "finding": ("find_object", "find_shard"),
    "keys": ("cast", "drop", "rename", "select"),
    "layout": ("Mesh", "Only", "Replicate", "Shard", "StridedShard", "TensorSpec", "local_chunks"),
    "load": ("global_load_plan", "load_plan", "resolve_overlaps"),
    "models": ("LLAMA_TP", "llama", "llama3_405b", "llama3_8b"),
    "oracles": ("assert_all_saved", "assert_read_once", "assert_written_once"),
    "passes": (
        "Pass",
        "Passes",
        "annotate",
        "chain",
        "named_chain",
        "partition",
        "world_pass",
    ),
    "placed": ("SpecLayout",),
    "presets": (
        "Rule",
        "adam",
        "expert_parallel",
        "fsdp",
        "fsdp_tp",
        "hsdp",
        "pipeline",
        "tensor_parallel",
    ),
    "ranges": ("ByteRanges", "Requests", "byte_ranges", "coalesce"),
    "reads": ("Transfer",),
    "records": ("KeyReport", "LoadPlan", "Plan", "SavePlan"),
    "reports": (
        "CostModel",
        "PlanDiff",
        "Report",
        "Why",
        "Writers",
        "explain",
        "plan_diff",
        "why",
        "writers_of",
    ),
    "save": ("global_plan", "local_plan"),
    "sharing": ("read_on", "share_reads", "split_reads"),
    "topology": ("WorldPlans", "world_metadata", "world_plans"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Boxes",
    "ByteRanges",
    "BytesMetadata",
    "Chunk",
    "CodecError",
    "CostModel",
    "FrozenDict",
    "Grid",
    "Issue",
    "KeyReport",
    "LLAMA_TP",
    "LoadItemType",
    "LoadPlan",
    "Mesh",
    "Metadata",
    "MetadataIndex",
    "NotFoundError",
    "Only",
    "Overlap",
    "Pass",
    "Passes",
    "Picture",
    "Plan",
    "PlanDiff",
    "PlanError",
    "ReadItem",
    "RefusedError",
    "Replicate",
    "Report",
    "Requests",
    "Rule",
    "SavePlan",
    "Shard",
    "SpecLayout",
    "StorageMeta",
    "StridedShard",
    "TensorMetadata",
    "TensorProperties",
    "TensorSpec",
    "TensorWriteData",
    "Tiling",
    "Transfer",
    "Why",
    "DerivedPlans",
    "WorldPlans",
    "WriteItem",
    "WriteItemType",
    "Writers",
    "adam",
    "annotate",
    "assert_all_saved",
    "assert_read_once",
    "assert_written_once",
    "byte_ranges",
    "cast",
    "chain",
    "check",
    "coalesce",
    "decode_metadata",
    "decode_plan",
    "decode_plans",
    "dedup_replicas",
    "draw_bytes",
    "draw_reshard",
    "draw_tiling",
    "draw_traffic",
    "drop",
    "dtype_name",
    "encode_metadata",
    "encode_plan",
    "expert_parallel",
    "explain",
    "fills",
    "derive_plans",
    "find_issues",
    "find_object",
    "find_shard",
    "fingerprint",
    "flatten",
    "freeze",
    "fsdp",
    "fsdp_tp",
    "gaps",
    "global_load_plan",
    "global_plan",
    "hsdp",
    "is_exact_cast",
    "itemsize",
    "llama",
    "llama3_405b",
    "llama3_8b",
    "load_plan",
    "local_chunks",
    "local_plan",
    "metadata_of",
    "named_chain",
    "overlap",
    "partition",
    "pipeline",
    "plan_diff",
    "rename",
    "resolve_overlaps",
    "select",
    "read_on",
    "share_reads",
    "split_reads",
    "split_chunks",
    "split_replicas",
    "tensor_parallel",
    "tile",
    "traffic_matrix",
    "unflatten",
    "why",
    "world_metadata",
    "world_pass",
    "world_plans",
    "writers_of",
]
