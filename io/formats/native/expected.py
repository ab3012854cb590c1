"""What should a data file hold? What the manifest says of each file, to hold its header against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from shardplan.planning.columns import column
from shardplan.planning.geometry import Chunk

from ...checksums import hash_views
from ...stores.base import Store
from ..headers import MAX_HEADER, Header, Slot
from .manifest import Manifest

__all__ = ["Expected", "header_cost"]

_PARSED: Final = 8  # how many times its own size a header takes in memory while it is read


def header_cost(manifest: Manifest, number: int, store: Store) -> int:
    """Return how many bytes of memory it takes to read the header of a file."""
    return _PARSED * int(manifest.files.headers[number]) + store.staging


class Expected:
    """A manifest, seen file by file.

    Args:
        manifest: The manifest.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        counts = np.diff(manifest.start)
        row = np.repeat(np.arange(len(counts)), counts)  # one row a chunk of any entry
        places = [manifest.places[p] for p in manifest.place.tolist() if p >= 0]
        file = np.concatenate([column([]), *places])
        self._order = np.argsort(file, kind="stable")
        self._edges = np.searchsorted(file[self._order], np.arange(len(manifest.files) + 1))
        self._row, self._chunk = row, np.arange(len(row)) - manifest.start[row]
        self._boxes: dict[int, tuple[Chunk, ...]] = {}

    def slots(self, number: int) -> Iterator[tuple[int, Slot]]:
        """Yield the chunks of one file: the number of each among all chunks, and what it is."""
        for at in self._order[self._edges[number] : self._edges[number + 1]].tolist():
            yield at, self.slot(int(self._row[at]), int(self._chunk[at]))

    def slot(self, row: int, chunk: int) -> Slot:
        """Return what the manifest says of one chunk of an entry; not where it begins."""
        entries = self._manifest.entries
        name, layout = entries.names[row], int(entries.layout[row])
        if layout < 0:
            return Slot(name, "uint8", (int(self._manifest.values[name][1]),), (0,))
        if layout not in self._boxes:  # a thousand layers cut alike share one
            self._boxes[layout] = tuple(entries.layouts[layout].tiling)
        box = self._boxes[layout][chunk]
        return Slot(name, entries.props[entries.prop[row]].dtype, box.sizes, box.offsets)

    def header_bytes(self, number: int, size: int) -> int:
        """Return how many bytes of a file of this size are its header, if it is the saved one."""
        return min(int(self._manifest.files.headers[number]), MAX_HEADER + 8, size)

    def fits(self, number: int, data: bytes | bytearray) -> bool:
        """Say whether these bytes are the header that was saved."""
        return hash_views([memoryview(data)]) == self._manifest.files.digests[number]

    def wrote(self, number: int, header: Header) -> bool:
        """Say whether a header claims to be of this save, and of the file of that number."""
        ours = (self._manifest.save_id, self._manifest.files.names[number])
        return (header.save_id, header.name) == ours
