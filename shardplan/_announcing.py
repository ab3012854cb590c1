"""A checkpoint that one rank alone opens: it tells the others what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from shardplan.dist import Comm, broadcast
from shardplan.io import StoredValue, store_values
from shardplan.io.execute import Reader
from shardplan.planning import Metadata, decode_metadata, encode_metadata

from ._parcels import packed, unpacked

__all__ = ["Announced", "announce"]


@attrs.frozen
class Announced:
    """What a rank is told of a checkpoint that another one has opened.

    Attributes:
        metadata: What it holds.
        values: Its values that are no tensors, by name.
    """

    metadata: Metadata
    values: Mapping[str, StoredValue]


def announce(comm: Comm, opened: Callable[[], Reader | None]) -> Announced | None:
    """Open a checkpoint on the coordinator, and tell all ranks what it holds.

    Args:
        comm: The ranks.
        opened: Opens it; None if every rank had better do so itself. Called on the coordinator.

    Returns:
        What was told, on all ranks; None where there is nothing to tell.
    """
    known: list[Metadata] = []

    def tell() -> dict[str, Any] | None:
        reader = opened()
        if reader is None:
            return None
        known.append(reader.metadata)
        entries = reader.metadata.state_dict_metadata
        names = [n for n, row in entries.row_of.items() if entries.layout[row] < 0]
        stored = store_values({name: reader.value(name) for name in names})
        values = {name: packed(value) for name, value in stored.items()}
        return {"metadata": encode_metadata(reader.metadata), "values": values}

    told = broadcast(comm, "open", tell)
    if told is None:
        return None
    values = {name: unpacked(*value) for name, value in told["values"].items()}
    return Announced(known[0] if known else decode_metadata(told["metadata"]), values)
