"""Incremental saves: which files of an earlier checkpoint a new one can share.

1. `comparable` says which chunks of a plan the earlier checkpoint has, cut in the same way.
2. Ranks compare the checksums of these with what they hold.
3. `files_to_share` picks the files that are worth sharing: a file is shared whole.
4. `without_shared` takes what these files have out of a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs
import numpy as np

from ..columns.arrays import Ints, column
from ..metadata import Metadata, TensorMetadata
from ..plans import SavePlan

LEAST_SHARE = 0.5
"""How much of a file's bytes must be unchanged for the file to be shared."""

Chunks = Mapping[str, Collection[int]]  # numbers of chunks, by tensor


def comparable(plan: SavePlan, metadata: Metadata) -> dict[int, tuple[str, int]]:
    """Return the items that an earlier checkpoint has, by row: the tensor, and the chunk's number.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan, metadata_of
    >>> state = {"w": TensorSpec((4,)), "b": TensorSpec((2,)), "step": 7}
    >>> (plan,), _ = global_plan([local_plan(state)])
    >>> comparable(plan, metadata_of({"w": TensorSpec((4,)), "b": TensorSpec((3,))}))
    {2: ('w', 0)}
    """
    items, entries = plan.items, metadata.state_dict_metadata
    heads = items.catalog.heads
    known = [entries.get(head.name) for head in heads]
    is_same = [
        isinstance(old, TensorMetadata)
        and (old.properties, old.size) == (head.properties, head.size)
        for old, head in zip(known, heads, strict=True)
    ]
    found: dict[int, tuple[str, int]] = {}
    hints = items.hint if items.hint is not None else np.zeros(len(items), np.int64)
    for row, (number, hint) in enumerate(zip(items.row.tolist(), hints.tolist(), strict=True)):
        old = known[number]
        chunk = max(hint, 0)
        if not is_same[number] or not isinstance(old, TensorMetadata) or chunk >= len(old.chunks):
            continue
        box, axes = old.chunks[chunk], len(old.size)
        mine = tuple(items.offsets[row, :axes].tolist()), tuple(items.sizes[row, :axes].tolist())
        if (box.offsets, box.sizes) == mine:
            found[row] = heads[number].name, chunk
    return found


def files_to_share(
    unchanged: Chunks, files: Mapping[str, Ints], nbytes: Mapping[str, Ints], sizes: Ints
) -> dict[int, int]:
    """Return the files to share, and how many bytes of each are of no use to the new checkpoint.

    Args:
        unchanged: The chunks that are as they were.
        files: The file of each chunk of these tensors.
        nbytes: The bytes of each.
        sizes: The bytes of the data of each file.

    >>> place, size = {"w": np.array([0, 1])}, {"w": np.array([6, 2])}
    >>> files_to_share({"w": [0, 1]}, place, size, np.array([8, 9]))
    {0: 2}
    """
    used = np.zeros(len(sizes), np.int64)
    for name, numbers in unchanged.items():
        chosen = column(sorted(numbers))
        np.add.at(used, files[name][chosen], nbytes[name][chosen])
    worth = np.flatnonzero((used > 0) & (used >= LEAST_SHARE * sizes)).tolist()
    return {file: int(sizes[file] - used[file]) for file in worth}


def without_shared(plan: SavePlan, shared: Chunks) -> SavePlan:
    """Return what is left to be written of a plan, if some chunks are in files that are shared."""
    items = plan.items
    if not shared or not len(items) or items.hint is None:
        return plan
    names = items.catalog.names
    pairs = zip(items.row.tolist(), np.maximum(items.hint, 0).tolist(), strict=True)
    keep = [hint not in shared.get(names[row], ()) for row, hint in pairs]
    return attrs.evolve(plan, items=items.take(np.array(keep, bool)))
