"""What a manifest says of each file, compared with what the file says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from shardplan.planning.columns import column
from shardplan.planning.geometry import Chunk
from shardplan.planning.storage import save_id_of

from ...checksums import Sums, hash_views
from ...errors import FormatError
from ...stores.base import MissingFileError, Store
from ..base import Fault, read_bytes
from ..headers import MAX_HEADER, Header, Slot, parse_header, read_header_text
from .record import Manifest

_PARSED: Final = 8  # how many times its own size a header takes in memory while it is read


@attrs.frozen(eq=False, slots=False)
class Opened:
    """A file's size, its header if chunks can be found by it, and what is wrong.

    Attributes:
        sums: The checksums of its chunks, in order of their bytes; None if they are unknown, or in
            the manifest.
    """

    size: int
    header: Header | None
    faults: Sequence[Fault]
    sums: Sums | None = None

    def sum_of(self, manifest: Manifest, name: str, chunk: int) -> int | None:
        """Return the checksum of a chunk, given its number among all; None if it is unknown."""
        if manifest.sums is not None:
            return int(manifest.sums[chunk])
        return None if self.sums is None else int(self.sums[self._position[name]])

    @cached_property
    def _position(self) -> dict[str, int]:
        """Which chunk of the file each name is."""
        assert self.header is not None
        return {name: at for at, name in enumerate(self.header.slots)}


class Expected:
    """What a manifest says of each file, to be compared with the file's header."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        # One row a number of any distinct column: the column, and the chunk; sorted by file.
        lengths = column([len(place) for place in manifest.places])
        file = np.concatenate([column([]), *manifest.places])
        order = np.argsort(file, kind="stable")
        self._edges = np.searchsorted(file[order], np.arange(len(manifest.files) + 1))
        place = np.repeat(np.arange(len(lengths)), lengths)
        self._place = place[order]
        self._chunk = (np.arange(len(file)) - (np.cumsum(lengths) - lengths)[place])[order]
        self._rows = np.argsort(manifest.place, kind="stable")  # the entries by their column
        numbers = np.arange(len(lengths) + 1)
        self._row_edges = np.searchsorted(manifest.place[self._rows], numbers).tolist()
        self._boxes: dict[tuple[int, int], Chunk] = {}

    def slots(self, number: int) -> Iterator[tuple[int, Slot]]:
        """Yield the chunks of one file: the number of each among all chunks, and what it is."""
        start = self._manifest.start
        here = slice(self._edges[number], self._edges[number + 1])
        for place, chunk in zip(
            self._place[here].tolist(), self._chunk[here].tolist(), strict=True
        ):
            for row in self._rows[self._row_edges[place] : self._row_edges[place + 1]].tolist():
                yield int(start[row]) + chunk, self.slot(row, chunk)

    def slot(self, row: int, chunk: int) -> Slot:
        """Return one chunk of an entry; the manifest does not say where it begins."""
        name = self._manifest.entries.names[row]
        offsets: tuple[int, ...] = (0,)
        dtype, sizes = self.shape(row, chunk)
        if self._manifest.entries.layout[row] >= 0:
            offsets = self._box(row, chunk).offsets
        return Slot(name, dtype, sizes, offsets)

    def shape(self, row: int, chunk: int) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the sizes of one chunk of an entry."""
        entries = self._manifest.entries
        if entries.layout[row] < 0:
            return "uint8", (int(self._manifest.values[entries.names[row]][1]),)
        return entries.props[entries.prop[row]].dtype, self._box(row, chunk).sizes

    def _box(self, row: int, chunk: int) -> Chunk:
        entries = self._manifest.entries
        key = int(entries.layout[row]), chunk
        box = self._boxes.get(key)
        if box is None:  # a thousand layers cut alike share one
            box = self._boxes[key] = entries.layouts[key[0]].tiling[chunk]
        return box

    def header_cost(self, number: int) -> int:
        """Return how many bytes of memory it takes to parse the header of a file."""
        files = self._manifest.files
        table = files.tables.get(number)
        return _PARSED * int(files.headers[number]) + (
            0 if table is None else 2 * int(files.sizes[table])
        )

    def open(self, store: Store, number: int) -> Opened:
        """Read the header of a file, and check that this is the file that was saved."""
        name, size = self._manifest.files.names[number], int(self._manifest.files.sizes[number])
        try:
            return self._check(store, number, name, store.size(name))
        except MissingFileError:
            return Opened(0, None, (size_fault(name, size, None),))

    def _check(self, store: Store, number: int, name: str, found: int) -> Opened:
        files = self._manifest.files
        size, length = int(files.sizes[number]), int(files.headers[number])
        data = read_bytes(store, name, 0, min(length, MAX_HEADER + 8, found))
        genuine = hash_views([memoryview(data)]) == files.digests[number]
        faults = [] if found == size else [size_fault(name, size, found)]
        try:
            if not genuine:
                data = read_header_text(store, name, found)
            header = parse_header(data, name, size if genuine else found)
        except FormatError as error:
            if found >= length:  # else it is cut short, and no more can be said
                faults.append(Fault("header", name, error.reason, None, 0, length))
            return Opened(found, None, faults)
        own = (header.save_id, header.name) == (self._manifest.save_id, name)
        stranger = None if own else self._stranger(name, header, found)
        if stranger is not None:
            return Opened(found, None, (stranger,))
        if not genuine or not own:
            reason = "its header does not fit its checksum"
            faults.append(Fault("header", name, reason, None, 0, length))
        if self._manifest.sums is not None or header.sums is not None:
            return Opened(found, header, faults, header.sums)
        sums, fault = self._table(store, number, len(header.slots))
        return Opened(found, header, faults if fault is None else [*faults, fault], sums)

    def _table(self, store: Store, number: int, count: int) -> tuple[Sums | None, Fault | None]:
        """Read the checksums of a file that are in a file of their own."""
        files, name = self._manifest.files, self._manifest.files.names[number]
        row = files.tables.get(number)
        if row is None:
            reason = "its header has no checksums, and the manifest names no table of them"
            return None, Fault("header", name, reason, None, 0, int(files.headers[number]))
        table, size = files.names[row], int(files.sizes[row])
        try:
            found = store.size(table)
        except MissingFileError:
            return None, size_fault(table, size, None)
        if found != size:
            return None, size_fault(table, size, found)
        data = read_bytes(store, table, 0, size)
        if hash_views([memoryview(data)]) != files.digests[row] or size != 8 * count:
            reason = f"the checksums of {name} do not fit their own"
            return None, Fault("header", table, reason, None, 0, size)
        return np.frombuffer(data, "<u8").astype(np.uint64), None

    def _stranger(self, name: str, header: Header, found: int) -> Fault | None:
        """Return a fault if a file was written under another name, by another save or program."""
        save_id = self._manifest.save_id
        if header.save_id is None:
            return Fault("foreign", name, "another program wrote it", None, 0, found)
        if header.save_id == save_id and header.name in self._manifest.files.names:
            return Fault("swapped", name, f"it was written as {header.name}", None, 0, found)
        own = None if header.name is None else save_id_of(header.name)
        if own != header.save_id or own == save_id:
            return None  # no save wrote that: it is the header that is damaged
        reason = f"save {header.save_id} wrote it as {header.name}; this is save {save_id}"
        return Fault("foreign", name, reason, None, 0, found)


def size_fault(name: str, size: int, found: int | None) -> Fault:
    """Describe a file that is not there in its full size; ``found`` is None if it is missing."""
    if found is None:
        return Fault("missing", name, "it is missing", None, 0, size)
    what = "it was cut short" if found < size else "something was added"
    reason = f"it has {found:,} bytes and was saved with {size:,}: {what}"
    return Fault("size", name, reason, None, min(size, found), max(size, found))
