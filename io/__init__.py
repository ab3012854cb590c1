"""Bytes: stores, the format, and carrying out the reads and writes that a plan says."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .checksums import BlockSums, Proof, Sums, combine, hash_views, xxhash
    from .compare import TensorDiff, compare_tensors, named_errors, same_value
    from .errors import (
        ExistsError,
        FormatError,
        LoadError,
        UnsureCommitError,
        ValueRefusedError,
        listed,
    )
    from .fingerprints import PlaceSums, fingerprint_of, place_sums
    from .optional import HAS_TORCH, torch
    from .pool import Pool, Progress, ProgressCallback, default_pool
    from .stores import MissingFileError, Store, StoreError, open_store
    from .tensors import (
        as_tensor,
        box_view,
        can_cast,
        copy_elements,
        empty_tensor,
        flat_memory,
        flip_axes,
        in_large_pages,
        own_dtype,
        refuse_dtypes,
        same_dtype,
        tensor_bytes,
        to_numpy,
        torch_dtype,
    )
    from .values import StoredValue, load_value, sort_values, store_values
    from .windows import Window

__getattr__, __dir__ = door(
    __name__,
    {
        "checksums": "BlockSums Proof Sums combine hash_views xxhash",
        "compare": "TensorDiff compare_tensors named_errors same_value",
        "errors": "ExistsError FormatError LoadError UnsureCommitError ValueRefusedError listed",
        "fingerprints": "PlaceSums fingerprint_of place_sums",
        "optional": "HAS_TORCH torch",
        "pool": "Pool Progress ProgressCallback default_pool",
        "stores": "MissingFileError Store StoreError open_store",
        "tensors": (
            "as_tensor box_view can_cast copy_elements empty_tensor flat_memory flip_axes "
            "in_large_pages own_dtype refuse_dtypes same_dtype tensor_bytes to_numpy torch_dtype"
        ),
        "values": "StoredValue load_value sort_values store_values",
        "windows": "Window",
    },
)

__all__ = [
    "ExistsError",
    "FormatError",
    "LoadError",
    "MissingFileError",
    "Pool",
    "Store",
    "StoreError",
    "UnsureCommitError",
    "ValueRefusedError",
    "default_pool",
    "open_store",
]
