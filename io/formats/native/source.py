"""Our own checkpoints: the manifest says in which file a chunk lies, that file's header where.

The manifest's checksum covers the checksums of headers and tables, and these cover those of chunks.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from shardplan.planning import find_issues
from shardplan.planning.columns import Ints, column
from shardplan.planning.geometry import Chunk
from shardplan.planning.storage import save_id_of

from ...checksums import XXH3, Sums, hash_views
from ...errors import FormatError, listed
from ...pool import Pool, ProgressCallback, default_pool
from ...stores.base import MissingFileError, Store
from ...values import RAW, StoredValue, load_value
from ..base import ChunkPlace, Fault, FileColumns, Findings, Format, Source, read_bytes
from ..headers import MAX_HEADER, Header, Slot, parse_header, read_header_text
from .manifest import decode_manifest, find_manifest, read_manifest
from .record import MANIFEST, Manifest

if TYPE_CHECKING:
    from .write import NativeWriter


_REMEDY: Final = (
    "; copy the checkpoint whole, or if it was overwritten or pruned meanwhile, open it again"
)
_PARSED: Final = 8  # how many times its own size a header takes in memory while it is read
_DECODED: Final = 4  # how many times its own size a value takes while it is decoded


class NativeFormat(Format):
    """Safetensors files and one manifest."""

    name = "safetensors"
    marks = (MANIFEST,)

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether there is a manifest; see `Format.detect`."""
        return name in ("", MANIFEST) and store.exists(MANIFEST)

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> NativeSource:
        """Open a checkpoint; only its manifest is read. See `Format.open`."""
        manifest = read_manifest(store)
        issues = find_issues(manifest.metadata)  # which no save of ours has
        if issues:
            more = f", and {len(issues) - 1:,} more; see verify" if len(issues) > 1 else ""
            raise FormatError(MANIFEST, f"it is damaged: {issues[0].message}{more}")
        return NativeSource(store, manifest, pool)

    def writer(self) -> NativeWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import NativeWriter  # which needs torch

        return NativeWriter()

    def verify(
        self,
        store: Store,
        name: str = "",
        *,
        progress: ProgressCallback | None = None,
        pool: Pool | None = None,
    ) -> Findings:
        """Check every byte; see `Format.verify`."""
        from .verify import verify_native

        return verify_native(store, progress, pool)

    def made(self, store: Store) -> float | None:
        """Return when the checkpoint was made, as its manifest says; see `Format.made`."""
        data = find_manifest(store)
        return None if data is None else decode_manifest(data).created

    def save_of(self, file: str) -> str | None:
        """Return which save wrote a file; see `Format.save_of`."""
        return save_id_of(file)


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
        entries = self._manifest.entries
        name, layout = entries.names[row], int(entries.layout[row])
        if layout < 0:
            return Slot(name, "uint8", (int(self._manifest.values[name][1]),), (0,))
        box = self._boxes.get((layout, chunk))
        if box is None:  # a thousand layers cut alike share one
            box = self._boxes[layout, chunk] = entries.layouts[layout].tiling[chunk]
        return Slot(name, entries.props[entries.prop[row]].dtype, box.sizes, box.offsets)

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


@attrs.frozen(eq=False)
class _Held:
    """What is kept of a file's header: one row a chunk that is there as the manifest says.

    Attributes:
        chunk: Its number among all chunks; ascending.
        begin: Where it begins in the file, in bytes.
        sums: Its checksum; None if the manifest has them.
    """

    chunk: Ints
    begin: Ints
    sums: Sums | None

    def find(self, chunk: int) -> int | None:
        """Return the row of a chunk; None if it is not there."""
        at = int(np.searchsorted(self.chunk, chunk))
        return at if at < len(self.chunk) and self.chunk[at] == chunk else None


class NativeSource(Source):
    """A checkpoint of ours. Of headers that were read, only places and checksums are kept."""

    format = "safetensors"

    def __init__(self, store: Store, manifest: Manifest, pool: Pool | None = None) -> None:
        self.manifest, self.metadata = manifest, manifest.metadata
        self.block_bytes, self.created = manifest.block_bytes, manifest.created
        self.file_columns = FileColumns(manifest.places, manifest.place)
        self.store, self.files = store, manifest.files.names
        self._pool = pool or default_pool()
        self._held: dict[int, _Held] = {}  # by number of the file

    @property
    def file_sizes(self) -> Mapping[str, int]:
        """The size of each file, in bytes."""
        files = self.manifest.files
        return dict(zip(files.names, files.sizes.tolist(), strict=True))

    def file_numbers(self, name: str) -> Sequence[int]:
        """Return the file of each chunk of a tensor; see `Source.file_numbers`."""
        numbers: list[int] = self.manifest.files_of(name).tolist()
        return numbers

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find chunks; see `Source.find_chunks`. Only the headers of their files are read."""
        places = {name: self.manifest.files_of(name) for name in {name for name, _ in chunks}}
        self._read_headers(int(places[name][chunk]) for name, chunk in chunks)
        return [self._chunk_place(name, chunk, int(places[name][chunk])) for name, chunk in chunks]

    has_sums = True

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; see `Source.sums_of`."""
        keys = [(name, number) for number in range(len(self.manifest.files_of(name)))]
        return np.array(self.chunk_sums(keys), np.uint64)

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk; see `Source.chunk_sums`."""
        start, row_of = self.manifest.start, self.manifest.entries.row_of
        if self.manifest.sums is not None:
            return [int(self.manifest.sums[start[row_of[name]] + n]) for name, n in chunks]
        places = {name: self.manifest.files_of(name) for name in {name for name, _ in chunks}}
        self._read_headers(int(places[name][chunk]) for name, chunk in chunks)
        return [self._chunk_sum(name, chunk, int(places[name][chunk])) for name, chunk in chunks]

    def has_value_sum(self, name: str) -> bool:
        """Return True: every value has one; see `Source.has_value_sum`."""
        return True

    def value_cost(self, name: str) -> int:
        """Return how many bytes of memory it takes to read a value; see `Source.value_cost`."""
        kind, size = self.manifest.values[name]
        if kind == "inline":
            return 0
        return int(size) * (1 if kind == "bytes" else 2 if kind in RAW else _DECODED)

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; see `Source.value`."""
        kind, data = self.manifest.values[name]
        if kind == "inline":
            return load_value(StoredValue("inline", data), MANIFEST, name)
        (place,) = self.find_chunks([(name, 0)])
        file = self.files[place.file]
        buffer = io.BytesIO(bytes(place.extents[0]))  # which gives away its bytes without a copy
        with buffer.getbuffer() as view:
            self.store.read(file, [(place.begin, view)])
            if verify and XXH3.of_blocks(view, self.block_bytes) != int(self.sums_of(name)[0]):
                raise FormatError(file, f"the value of `{name}` does not fit its checksum")
        return load_value(StoredValue(kind, buffer.getvalue()), file, name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; see `Source.value_bytes`."""
        kind, data = self.manifest.values[name]
        return 0 if kind == "inline" else int(data)

    def plain_value(self, name: str) -> Any:
        """Return a value that the manifest holds; see `Source.plain_value`."""
        if self.manifest.values[name][0] != "inline":
            raise ValueError(f"the value of `{name}` lies in a file")
        return self.value(name)

    def value_key(self, name: str) -> object:
        """Return the checksum of a value that lies in a file; see `Source.value_key`."""
        sums = self.sums_of(name)
        if not len(sums):
            return None
        return self.manifest.values[name], self.block_bytes, int(sums[0])

    def missing(self) -> Sequence[Fault]:
        """Return the files that are not there in their full sizes; see `Source.missing`."""
        sizes = {entry.name: entry.size for entry in self.store.entries(recursive=False)}
        wrong = ((n, size) for n, size in self.file_sizes.items() if sizes.get(n) != size)
        return [size_fault(name, size, sizes.get(name)) for name, size in wrong]

    @cached_property
    def _expected(self) -> Expected:
        return Expected(self.manifest)

    def _read_headers(self, numbers: Iterable[int]) -> None:
        """Read the headers of some files, and check that these are the files that were saved."""
        new = [number for number in dict.fromkeys(numbers) if number not in self._held]
        if not new:
            return
        expected, staging = self._expected, self.store.staging
        found = self._pool.map(
            self._header,
            new,
            nbytes=lambda number: expected.header_cost(number) + staging,
            here=len(new) == 1,
        )
        self._held.update(zip(new, found, strict=True))

    def _header(self, number: int) -> _Held:
        """Return which chunks lie in a file as the manifest says, and where they begin."""
        opened = self._expected.open(self.store, number)
        if opened.header is None or opened.faults:
            raise self._bad(number, opened.faults[0])
        there = {name: (at, slot) for at, (name, slot) in enumerate(opened.header.slots.items())}
        pairs = [(at, *there.get(s.name, (0, None)), s) for at, s in self._expected.slots(number)]
        good = [
            (at, slot.begin, position)
            for at, position, slot, wanted in pairs
            if slot is not None and slot.place == wanted.place
        ]
        rows = column(sorted(good), len(good), 3)
        sums = None if opened.sums is None else opened.sums[rows[:, 2]]
        return _Held(rows[:, 0], rows[:, 1], sums)

    def _bad(self, number: int, fault: Fault) -> FormatError:
        """Return the error of a file that is not the saved one, with what should lie in it."""
        names = sorted({slot.name for _, slot in self._expected.slots(number)})
        remedy = _REMEDY if fault.kind == "missing" else ""
        text = f"{fault.reason}; {listed(names)} should lie in it{remedy}"
        return FormatError(fault.file, text)

    def _find(self, name: str, chunk: int, number: int) -> int:
        """Return the row of a chunk among those of its file, whose header was read."""
        row = self.manifest.entries.row_of[name]
        at = self._held[number].find(int(self.manifest.start[row]) + chunk)
        if at is not None:
            return at
        slot = self._expected.slot(row, chunk)
        raise FormatError(
            self.files[number],
            f"its header does not have `{name}` as the manifest says ({slot.dtype} "
            f"{list(slot.shape)} at {list(slot.offsets)}); see verify",
        )

    def _chunk_sum(self, name: str, chunk: int, number: int) -> int:
        sums, at = self._held[number].sums, self._find(name, chunk, number)
        assert sums is not None
        return int(sums[at])

    def _chunk_place(self, name: str, chunk: int, number: int) -> ChunkPlace:
        """Return where a chunk lies, once the header of its file was read."""
        slot = self._expected.slot(self.manifest.entries.row_of[name], chunk)
        begin = int(self._held[number].begin[self._find(name, chunk, number)])
        return ChunkPlace(number, begin, slot.dtype, slot.shape)


def size_fault(name: str, size: int, found: int | None) -> Fault:
    """Describe a file that is not there in its full size; ``found`` is None if it is missing."""
    if found is None:
        return Fault("missing", name, "it is missing", None, 0, size)
    what = "it was cut short" if found < size else "something was added"
    reason = f"it has {found:,} bytes and was saved with {size:,}: {what}"
    return Fault("size", name, reason, None, min(size, found), max(size, found))
