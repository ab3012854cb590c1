"""What a manifest says of each file, compared with what the file says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from shardplan.planning import itemsize
from shardplan.planning.columns import Ints, column
from shardplan.planning.storage import save_id_of

from ...checksums import Sums, hash_views
from ...errors import FormatError
from ...stores.base import MissingFileError, Store
from ..base import Fault, read_bytes
from ..headers import (
    MAX_HEADER,
    Header,
    Kind,
    Slot,
    header_of,
    parse_header,
    read_header_text,
    without_sums,
)
from .record import Manifest

_PARSED: Final = 8  # how many times its own size a header takes in memory while it is read


@attrs.frozen(eq=False, slots=False)
class OpenedFile:
    """A file's size, its header if chunks can be found by it, and what is wrong."""

    size: int
    header: Header | None
    faults: Sequence[Fault]
    # The checksums of its chunks, in order of their bytes; None if they are unknown, or in the
    # manifest.
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


@attrs.frozen(eq=False)
class Held:
    """What is kept of a file's header: one row a chunk that is there as the manifest says."""

    chunk: Ints  # its number among all chunks; ascending
    begin: Ints  # where it begins in the file, in bytes
    sums: Sums | None  # its checksum; None if the manifest has them

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]], sums: Sums | None) -> Held:
        """Take numbers of chunks, where they begin, and which of the checksums are theirs."""
        chunk, begin, position = column(sorted(rows), len(rows), 3).T
        return cls(chunk, begin, None if sums is None else sums[position])


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
        self._kinds: dict[tuple[int, int, int], Kind] = {}

    def slots(self, number: int) -> Iterator[tuple[int, Slot]]:
        """Yield the chunks of one file: the number of each among all chunks, and what it is."""
        for row, chunk in self._chunks(number):
            yield int(self._manifest.start[row]) + chunk, self.slot(row, chunk)

    def _chunks(self, number: int) -> list[tuple[int, int]]:
        """Return the chunks of one file: entry, and number among the entry's."""
        here = slice(self._edges[number], self._edges[number + 1])
        pairs = zip(self._place[here].tolist(), self._chunk[here].tolist(), strict=True)
        return [
            (row, chunk)
            for place, chunk in pairs
            for row in self._rows[self._row_edges[place] : self._row_edges[place + 1]].tolist()
        ]

    def slot(self, row: int, chunk: int) -> Slot:
        """Return one chunk of an entry; the manifest does not say where it begins."""
        return Slot(self._manifest.entries.names[row], *self.kind(row, chunk))

    def kind(self, row: int, chunk: int) -> Kind:
        """Return what one chunk of an entry is; chunks that are alike share it."""
        entries = self._manifest.entries
        key = int(entries.layout[row]), int(entries.prop[row]), chunk
        if key[0] < 0:
            return "uint8", (int(self._manifest.values[entries.names[row]][1]),), (0,)
        found = self._kinds.get(key)
        if found is None:  # a thousand layers cut alike share one
            box = entries.layouts[key[0]].tiling[chunk]
            found = self._kinds[key] = (entries.props[key[1]].dtype, box.sizes, box.offsets)
        return found

    def by_rule(self, store: Store, number: int) -> Held | None:
        """Return what a file holds, and where, if it is as saves write it.

        None if its header is not what follows from the manifest: then it must be read.
        """
        manifest = self._manifest
        if number in manifest.files.shared:
            return None
        files, names, layout = manifest.files, manifest.entries.names, manifest.entries.layout
        name, size, length = files.names[number], int(files.sizes[number]), files.headers[number]
        chunks = self._chunks(number)
        kinds = [self.kind(row, chunk) for row, chunk in chunks]
        each = {kind: itemsize(kind[0]) for kind in set(kinds)}
        width = [
            0 if layout[row] < 0 else each[kind]
            for (row, _), kind in zip(chunks, kinds, strict=True)
        ]
        order = sorted(range(len(kinds)), key=lambda n: (-width[n], names[chunks[n][0]]))
        slots = [(names[chunks[n][0]], kinds[n]) for n in order]
        summed = manifest.sums is None and number not in files.tables
        header = header_of(name, slots, manifest.save_id, summed=summed)
        if len(header) != length:
            return None
        data, sums = read_bytes(store, name, 0, len(header)), None
        if hash_views([memoryview(data)]) != files.digests[number]:
            return None
        if summed:
            data, sums = without_sums(data, len(slots))
        elif manifest.sums is None:
            sums, _ = self._table(store, number, len(slots))
        ends = len(header) + np.cumsum([math.prod(kind[1]) * each[kind] for _, kind in slots])
        fits = store.size(name) == size and (not len(ends) or int(ends[-1]) == size)
        if data != header or not fits or (sums is None and manifest.sums is None):
            return None
        begins = [len(header), *ends.tolist()]
        rows = [
            (int(manifest.start[chunks[n][0]]) + chunks[n][1], begins[at], at)
            for at, n in enumerate(order)
        ]
        return Held.of(rows, sums)

    def held(self, number: int, opened: OpenedFile) -> Held:
        """Return what of a file, whose header was read, is there as the manifest says."""
        assert opened.header is not None
        there = {name: (at, slot) for at, (name, slot) in enumerate(opened.header.slots.items())}
        pairs = [(at, *there.get(s.name, (0, None)), s) for at, s in self.slots(number)]
        good = [
            (at, slot.begin, position)
            for at, position, slot, wanted in pairs
            if slot is not None and slot.place == wanted.place
        ]
        return Held.of(good, opened.sums)

    def header_cost(self, number: int) -> int:
        """Return how many bytes of memory it takes to parse the header of a file."""
        files = self._manifest.files
        table = files.tables.get(number)
        return _PARSED * int(files.headers[number]) + (
            0 if table is None else 2 * int(files.sizes[table])
        )

    def open(self, store: Store, number: int) -> OpenedFile:
        """Read the header of a file, and check that this is the file that was saved."""
        name, size = self._manifest.files.names[number], int(self._manifest.files.sizes[number])
        try:
            return self._check(store, number, name, store.size(name))
        except MissingFileError:
            return OpenedFile(0, None, (size_fault(name, size, None),))

    def _check(self, store: Store, number: int, name: str, found: int) -> OpenedFile:
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
            return OpenedFile(found, None, faults)
        own = (header.save_id, header.name) == (self._save_of(number), name)
        stranger = None if own else self._stranger(number, header, found)
        if stranger is not None:
            return OpenedFile(found, None, (stranger,))
        if not genuine or not own:
            reason = "its header does not fit its checksum"
            faults.append(Fault("header", name, reason, None, 0, length))
        if self._manifest.sums is not None or header.sums is not None:
            return OpenedFile(found, header, faults, header.sums)
        sums, fault = self._table(store, number, len(header.slots))
        return OpenedFile(found, header, faults if fault is None else [*faults, fault], sums)

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

    def _save_of(self, number: int) -> str:
        """Return the save that wrote a file: another one, if the file is shared."""
        files = self._manifest.files
        other = save_id_of(files.names[number]) if number in files.shared else None
        return other or self._manifest.save_id

    def _stranger(self, number: int, header: Header, found: int) -> Fault | None:
        """Return a fault if a file was written under another name, by another save or program."""
        save_id, name = self._save_of(number), self._manifest.files.names[number]
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
