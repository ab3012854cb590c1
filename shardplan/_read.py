"""Carry out a load plan, reading all of it from storage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from shardplan.io import BlockSums, Progress, ProgressCallback, StoredValue
from shardplan.io.execute import Reader, ReadStats
from shardplan.planning import LoadItemType, LoadPlan, Metadata
from shardplan.planning.columns import ReadItems
from shardplan.planning.storage import BLOCK_BYTES, FAR_GAP, plan_bytes

from ._destinations import Destinations, destinations

__all__ = [
    "Opened",
    "Outcome",
    "add_stats",
    "decode_values",
    "encode_values",
    "read_rank",
    "value_names",
    "values_read",
]


@attrs.frozen(eq=False)
class Opened:
    """A checkpoint as one rank has opened it.

    Attributes:
        metadata: What it holds.
        reader: Reads from it; None on a rank that gets everything from another rank.
        values: Its non-tensor values by name, if one rank has read them for all; else None.
    """

    metadata: Metadata
    reader: Reader | None
    values: Mapping[str, StoredValue] | None = None

    @property
    def max_gap(self) -> int:
        """The bytes between two ranges that are sooner fetched than left out."""
        return FAR_GAP if self.reader is not None and self.reader.store.staging else 0

    @property
    def block_bytes(self) -> int:
        """The most bytes of a block that was hashed."""
        return BLOCK_BYTES if self.reader is None else self.reader.source.block_bytes


@attrs.frozen
class Outcome:
    """What one rank read.

    Attributes:
        stats: What it took.
        values: The non-tensor values, by name in the state dict.
        sent, received: Bytes that went to other ranks, and came from them.
    """

    stats: ReadStats
    values: Mapping[str, Any]
    sent: int = 0
    received: int = 0


def read_rank(
    reader: Reader,
    flat: Mapping[str, Any],
    plan: LoadPlan,
    *,
    into: Destinations | None = None,
    verify: bool = True,
    sums: BlockSums | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Carry out one rank's load plan, reading all of it from storage.

    Args:
        reader: The checkpoint.
        flat: The rank's state dict, flattened; its tensors are filled.
        plan: What to read.
        into: The memory of these tensors, if it was checked already.
        verify: Whether to check what is read whole against its checksums.
        sums: Gets the checksums of blocks that are read whole, of chunks that are not.
        progress: Called with the bytes of tensors done, and in all.
    """
    values = reader.values(plan, verify=verify)
    stats = values_read(reader, [name for _, name in value_names(plan.items)], verify=verify)
    into = destinations(flat, plan.items, reader) if into is None else into
    counter = Progress(plan_bytes(plan, reader.metadata), progress)
    dest = into.of(plan.items)
    filled = reader.fill(plan.items, dest, verify=verify, sums=sums, progress=counter)
    counter.finish()
    return Outcome(add_stats(stats, filled), values)


def value_names(items: ReadItems) -> list[tuple[str, str]]:
    """Return the names of all values that are read, in the state dict and in the checkpoint."""
    rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist()
    return [(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows]


def values_read(reader: Reader, names: Sequence[str], *, verify: bool = True) -> ReadStats:
    """Return what it takes to read some values once; those kept with the metadata take nothing.

    Args:
        reader: The checkpoint.
        names: Names in the checkpoint. Read the values first: ``unverified`` is too large before.
        verify: Whether they are compared with their checksums.
    """
    source = reader.source
    sizes = {name: size for name in names if (size := source.value_bytes(name))}
    total = sum(sizes.values())
    checked = sum(size for name, size in sizes.items() if verify and source.has_value_sum(name))
    return ReadStats(total, total, len(sizes), 0, total - checked)


def encode_values(stored: Mapping[str, StoredValue]) -> dict[str, tuple[str, bytes]]:
    """Return stored values as plain data that can be sent."""
    return {name: (value.kind, _data(value)) for name, value in stored.items()}


def _data(value: StoredValue) -> bytes:
    """Return a stored value's data as bytes; JSON that is sent as such arrives frozen."""
    return json.dumps(value.data).encode() if value.kind == "inline" else bytes(value.data)


def decode_values(sent: Mapping[str, tuple[Any, bytes]]) -> dict[str, StoredValue]:
    """Return what `encode_values` was given."""
    return {
        name: StoredValue(kind, json.loads(data) if kind == "inline" else data)
        for name, (kind, data) in sent.items()
    }


def add_stats(*stats: ReadStats) -> ReadStats:
    """Add up what several reads took.

    >>> add_stats(ReadStats(1, 2, 3, 4), ReadStats(1, 1, 1, 1))
    ReadStats(bytes_needed=2, bytes_read=3, requests=4, verified=5, unverified=0)
    """
    return ReadStats(*map(sum, zip(*map(attrs.astuple, stats), strict=True)))
