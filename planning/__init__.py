"""Plans for saving, loading and resharding checkpoints, as immutable values made by pure functions.

Nothing here imports torch, touches a file or talks to another rank: state dicts and plans go in,
plans come out. Start with `local_plan` (what does this rank hold?), `global_plan` (who writes what,
and what will the checkpoint be?) and `load_plan` (which saved bytes fill this state dict?).
"""

from .check import check, find_issues
from .codec import (
    decode_metadata,
    decode_plan,
    decode_plans,
    encode_metadata,
    encode_plan,
    fingerprint,
)
from .dtypes import dtype_name, is_exact_cast, itemsize
from .errors import CodecError, Issue, NotFoundError, PlanError, RefusedError
from .flatten import flatten, unflatten
from .frozen import FrozenDict, freeze
from .layout import Mesh, Replicate, Shard, StridedShard, TensorSpec, local_chunks
from .load import global_load_plan, load_plan, resolve_overlaps
from .overlap import Overlap, fills, gaps, overlap
from .passes import Pass, chain, dedup_replicas
from .records import (
    BytesMetadata,
    Chunk,
    KeyReport,
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    Plan,
    ReadItem,
    SavePlan,
    StorageMeta,
    TensorMetadata,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from .save import global_plan, local_plan
from .tiling import Boxes, Grid, Tiling, tile
from .values import find_object, find_shard

__all__ = [
    "Boxes",
    "BytesMetadata",
    "Chunk",
    "CodecError",
    "FrozenDict",
    "Grid",
    "Issue",
    "KeyReport",
    "LoadItemType",
    "LoadPlan",
    "Mesh",
    "Metadata",
    "MetadataIndex",
    "NotFoundError",
    "Overlap",
    "Pass",
    "Plan",
    "PlanError",
    "ReadItem",
    "RefusedError",
    "Replicate",
    "SavePlan",
    "Shard",
    "StorageMeta",
    "StridedShard",
    "TensorMetadata",
    "TensorProperties",
    "TensorSpec",
    "TensorWriteData",
    "Tiling",
    "WriteItem",
    "WriteItemType",
    "chain",
    "check",
    "decode_metadata",
    "decode_plan",
    "decode_plans",
    "dedup_replicas",
    "dtype_name",
    "encode_metadata",
    "encode_plan",
    "fills",
    "find_issues",
    "find_object",
    "find_shard",
    "fingerprint",
    "flatten",
    "freeze",
    "gaps",
    "global_load_plan",
    "global_plan",
    "is_exact_cast",
    "itemsize",
    "load_plan",
    "local_chunks",
    "local_plan",
    "overlap",
    "resolve_overlaps",
    "tile",
    "unflatten",
]
