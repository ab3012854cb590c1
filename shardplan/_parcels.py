"""Values that are no tensors: one rank reads them, and sends them to those that need them, too.

How long they are is known to who has read them alone, so that a message says it first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardplan.dist import Comm, Pending, decode_json, encode_json
from shardplan.io import StoredValue, load_value, store_values
from shardplan.io.execute import Reader, ReadStats
from shardplan.planning import LoadItemType
from shardplan.planning.columns import ReadItems, Transfers

__all__ = ["Parcels", "loaded", "packed", "unpacked", "value_names", "values_read"]


def packed(value: StoredValue) -> tuple[str, bytes]:
    """Return a stored value's kind, and its data as bytes: JSON as such comes back frozen."""
    data = json.dumps(value.data).encode() if value.kind == "inline" else bytes(value.data)
    return value.kind, data


def unpacked(kind: Any, data: bytes) -> StoredValue:
    """Return what `packed` was given."""
    return StoredValue(kind, json.loads(data) if kind == "inline" else data)


def value_names(items: ReadItems) -> list[tuple[str, str]]:
    """Return, of all values that are read, the names in the state dict and in the checkpoint."""
    rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist()
    return [(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows]


def values_read(reader: Reader, names: Sequence[str], *, verify: bool = True) -> ReadStats:
    """Return what it takes to read some values once; those kept with the metadata take nothing.

    Args:
        reader: The checkpoint.
        names: The values, by name in the checkpoint; read already, or ``unverified`` is too large.
        verify: Whether they are compared with their checksums.
    """
    source = reader.source
    sizes = {name: size for name in names if (size := source.value_bytes(name))}
    total = sum(sizes.values())
    checked = sum(size for name, size in sizes.items() if verify and source.has_value_sum(name))
    return ReadStats(total, total, len(sizes), 0, total - checked)


class Parcels:
    """Values that ranks send each other in a shared load.

    Args:
        comm: The ranks.
        reader: The checkpoint.
        transfers: Who reads what for whom; tensors are left out, and so are values that are kept
            with the metadata, which every rank has.

    Attributes:
        read: The values that this rank reads for others, by name in the checkpoint.
        shared: Those, and the values that come from others.
        sent, received: Bytes that went to other ranks, and came from them.
    """

    def __init__(self, comm: Comm, reader: Reader, transfers: Transfers) -> None:
        self._comm, self._reader = comm, reader
        self._out: dict[int, list[str]] = {}
        self._in: set[int] = set()
        self.read: set[str] = set()
        self.shared: set[str] = set()
        self.sent = self.received = 0
        items = transfers.reads
        for row in np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist():
            name = items.names[items.storage[row]]
            source, target = int(transfers.source[row]), int(transfers.target[row])
            if not reader.source.value_bytes(name):
                continue
            self.shared.add(name)
            if source == comm.rank:
                self.read.add(name)
                self._out.setdefault(target, []).append(name)
            else:
                self._in.add(source)

    def exchange(self, failed: list[Exception], *, verify: bool) -> dict[str, StoredValue]:
        """Read what others need, send it, and return it with what others have sent, by name.

        Args:
            failed: What has gone wrong on this rank, or does so here: others get nothing then.
            verify: Whether to check what is read against its checksums.
        """
        stored = self._read(failed, verify)
        told = {target: self._encoded(stored, names) for target, names in self._out.items()}
        lengths = {source: bytearray(8) for source in sorted(self._in)}
        self._swap(lengths, {target: len(data).to_bytes(8, "big") for target, data in told.items()})
        arrived = {s: bytearray(int.from_bytes(length, "big")) for s, length in lengths.items()}
        self._swap(
            {source: data for source, data in arrived.items() if data},
            {target: data for target, data in told.items() if data},
        )
        self.sent += sum(map(len, told.values()))
        for data in filter(None, arrived.values()):
            self.received += len(data)
            stored |= {name: unpacked(*one) for name, one in decode_json(bytes(data)).items()}
        return stored

    def _read(self, failed: list[Exception], verify: bool) -> dict[str, StoredValue]:
        names = sorted(self.read)
        try:
            if failed:
                return {}
            values = self._reader.pool.map(
                lambda name: self._reader.value(name, verify=verify),
                names,
                nbytes=self._reader.source.value_cost,
            )
            return store_values(dict(zip(names, values, strict=True)))
        except Exception as error:
            failed.append(error)
            return {}

    def _encoded(self, stored: Mapping[str, StoredValue], names: Sequence[str]) -> bytes:
        return encode_json({name: packed(stored[name]) for name in names}) if stored else b""

    def _swap(self, coming: Mapping[int, bytearray], going: Mapping[int, bytes]) -> None:
        """Receive and send; who sends nothing to whom is known to both."""
        under_way: list[Pending] = [
            self._comm.receive(source, memoryview(into)) for source, into in coming.items()
        ]
        under_way += [self._comm.send(target, memoryview(data)) for target, data in going.items()]
        for one in under_way:
            one.wait()


def loaded(
    stored: Mapping[str, StoredValue], names: Sequence[tuple[str, str]], place: str
) -> dict[str, Any]:
    """Make values of what is stored, by name in the state dict; a new one for each name."""
    return {dest: load_value(stored[name], place, name) for dest, name in names}
