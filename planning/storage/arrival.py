"""Reads cut by key, so that some tensors are complete while others are still being read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..columns.arrays import column
from ..columns.reads import ReadItems
from ..metadata import Metadata
from ..plans import LoadPlan
from ..records import LoadItemType
from .shared_reads import read_widths

__all__ = ["key_batches"]


def key_batches(
    plan: LoadPlan, metadata: Metadata, order: Sequence[str], batch_bytes: int
) -> tuple[ReadItems, ...]:
    """Cut the reads of tensors into batches, each with all reads of its keys.

    Args:
        plan: The reads.
        metadata: What is read from.
        order: The keys of the state dict, in the order in which they are wanted.
        batch_bytes: A batch ends with the key that reaches so many bytes.

    >>> from shardplan.planning import load_plan, local_plan, metadata_of
    >>> sd = {name: np.zeros(4, np.uint8) for name in "cab"}
    >>> plan = load_plan(metadata_of(sd), local_plan(sd))
    >>> [
    ...     [items[row].dest_index.fqn for row in range(len(items))]
    ...     for items in key_batches(plan, metadata_of(sd), list(sd), 5)
    ... ]
    [['c', 'a'], ['b']]
    """
    items = plan.items
    place = {name: number for number, name in enumerate(order)}
    key = column([place.get(name, len(place)) for name in items.names])[items.dest]
    rows = np.flatnonzero(items.type == LoadItemType.TENSOR.value)
    rows = rows[np.argsort(key[rows], kind="stable")]
    if not len(rows):
        return ()
    nbytes = (items.numel * read_widths(items, metadata))[rows]
    is_first = np.diff(key[rows], prepend=-1) != 0  # read of its key
    before = (np.cumsum(nbytes) - nbytes)[is_first]
    batch = (before // batch_bytes)[np.cumsum(is_first) - 1]
    cuts = np.flatnonzero(np.diff(batch)) + 1
    return tuple(items.take(part) for part in np.split(rows, cuts))
