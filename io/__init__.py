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
    from .pool import Pool, Progress, ProgressCallback, default_pool
    from .stores import MissingFileError, Store, StoreError, open_store
    from .tensors import (
        as_tensor,
        box_view,
        can_cast,
        empty_tensor,
        fill_from_bytes,
        flat_memory,
        flip_axes,
        same_dtype,
        tensor_bytes,
        to_numpy,
        torch_dtype,
    )
    from .values import StoredValue, load_value, sort_values, store_values

__getattr__, __dir__ = door(
    __name__,
    {
        "checksums": "BlockSums Proof Sums combine hash_views xxhash",
        "compare": "TensorDiff compare_tensors named_errors same_value",
        "errors": "ExistsError FormatError LoadError UnsureCommitError ValueRefusedError listed",
        "pool": "Pool Progress ProgressCallback default_pool",
        "stores": "MissingFileError Store StoreError open_store",
        "tensors": (
            "as_tensor box_view can_cast empty_tensor fill_from_bytes flat_memory flip_axes "
            "same_dtype tensor_bytes to_numpy torch_dtype"
        ),
        "values": "StoredValue load_value sort_values store_values",
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
