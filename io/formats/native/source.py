"""Our own checkpoints: the manifest says in which file a chunk lies, that file's header where."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from shardplan.planning import find_issues, itemsize
from shardplan.planning.columns import Ints, column
from shardplan.planning.storage import save_id_of

from ...checksums import XXH3, Sums, hash_views
from ...errors import FormatError, listed
from ...pool import Pool, ProgressCallback, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ...values import RAW, StoredValue, load_value
from ..base import ChunkPlace, Fault, FileColumns, Findings, Format, Source, read_bytes
from ..headers import MAX_HEADER, Header, Kind, Slot, header_of, parse_header, read_header_text
from .manifest import MANIFEST, Manifest, decode_manifest, find_manifest, read_manifest

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


@attrs.frozen(eq=False)
class Opened:
    """A file's size, its header if chunks can be found by it, and what is wrong."""

    size: int
    header: Header | None
    faults: Sequence[Fault]


class Expected:
    """What a manifest says of each file, to be compared with the file's header."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        counts = np.diff(manifest.start)
        row = np.repeat(np.arange(len(counts)), counts)  # one row a chunk of any entry
        places = [manifest.places[p] for p in manifest.place.tolist() if p >= 0]
        file = np.concatenate([column([]), *places])
        self._order = np.argsort(file, kind="stable")
        self._edges = np.searchsorted(file[self._order], np.arange(len(manifest.files) + 1))
        self._row, self._chunk = row, np.arange(len(row)) - manifest.start[row]
        self._kinds: dict[tuple[int, int], list[Kind]] = {}

    def slots(self, number: int) -> Iterator[tuple[int, Slot]]:
        """Yield the chunks of one file: the number of each among all chunks, and what it is."""
        for at in self._order[self._edges[number] : self._edges[number + 1]].tolist():
            yield at, self.slot(int(self._row[at]), int(self._chunk[at]))

    def slot(self, row: int, chunk: int) -> Slot:
        """Return one chunk of an entry; the manifest does not say where it begins."""
        return Slot(self._manifest.entries.names[row], *self.kind(row, chunk))

    def kind(self, row: int, chunk: int) -> Kind:
        """Return what one chunk of an entry is; chunks that are alike share it."""
        entries = self._manifest.entries
        key = int(entries.layout[row]), int(entries.prop[row])
        if key[0] < 0:
            return "uint8", (int(self._manifest.values[entries.names[row]][1]),), (0,)
        if key not in self._kinds:  # a thousand layers cut alike share one
            dtype, tiling = entries.props[key[1]].dtype, entries.layouts[key[0]].tiling
            self._kinds[key] = [(dtype, box.sizes, box.offsets) for box in tiling]
        return self._kinds[key][chunk]

    def by_rule(self, store: Store, number: int) -> tuple[Ints, Ints] | None:
        """Return the chunks of a file, and where they begin, if it is as saves write it.

        None if its header is not what follows from the manifest: then it must be read.
        """
        files, names = self._manifest.files, self._manifest.entries.names
        name, size, length = files.names[number], int(files.sizes[number]), files.headers[number]
        at = self._order[self._edges[number] : self._edges[number + 1]]
        rows, chunks = self._row[at].tolist(), self._chunk[at].tolist()
        kinds = [self.kind(row, chunk) for row, chunk in zip(rows, chunks, strict=True)]
        is_value = self._manifest.entries.layout[self._row[at]] < 0
        each = {kind: itemsize(kind[0]) for kind in set(kinds)}
        width = np.where(is_value, 0, column([each[kind] for kind in kinds]))
        order = sorted(range(len(at)), key=lambda n: (-width[n], names[rows[n]]))
        slots = [(names[rows[n]], kinds[n]) for n in order]
        header = header_of(name, slots, self._manifest.save_id)
        if len(header) != length or read_bytes(store, name, 0, len(header)) != header:
            return None
        sizes = column([math.prod(kind[1]) * each[kind] for _, kind in slots])
        ends = len(header) + np.cumsum(sizes)
        if store.size(name) != size or (len(ends) and ends[-1] != size):
            return None
        return at[order], ends - sizes

    def header_cost(self, number: int) -> int:
        """Return how many bytes of memory it takes to parse the header of a file."""
        return _PARSED * int(self._manifest.files.headers[number])

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
        return Opened(found, header, faults)

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


class NativeSource(Source):
    """A checkpoint of ours. Of headers that were read, only places are kept."""

    format = "safetensors"

    def __init__(self, store: Store, manifest: Manifest, pool: Pool | None = None) -> None:
        self.manifest, self.metadata = manifest, manifest.metadata
        self.block_bytes, self.created = manifest.block_bytes, manifest.created
        self.file_columns = FileColumns(manifest.places, manifest.place)
        self.store, self.files = store, manifest.files.names
        self._pool = pool or default_pool()
        self._known: set[int] = set()  # the files whose headers were read
        self._begins = np.full(int(manifest.start[-1]), -1, np.int64)  # one row a chunk

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

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; see `Source.sums_of`."""
        return self.manifest.sums_of(name)

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk; see `Source.chunk_sums`."""
        row_of = self.manifest.entries.row_of
        at = self.manifest.start[column([row_of[name] for name, _ in chunks])]
        sums: list[int | None] = self.manifest.sums[at + column([n for _, n in chunks])].tolist()
        return sums

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
        new = [number for number in dict.fromkeys(numbers) if number not in self._known]
        if not new:
            return
        expected, staging = self._expected, self.store.staging
        found = self._pool.map(
            self._header,
            new,
            nbytes=lambda number: expected.header_cost(number) + staging,
            here=len(new) == 1,
        )
        for at, begins in found:
            self._begins[at] = begins
        self._known.update(new)

    def _header(self, number: int) -> tuple[Ints, Ints]:
        """Return which chunks lie in a file as the manifest says, and where they begin."""
        with suppress(StoreError, ValueError, ArithmeticError):  # which `open` explains
            found = self._expected.by_rule(self.store, number)
            if found is not None:
                return found
        opened = self._expected.open(self.store, number)
        if opened.header is None or opened.faults:
            raise self._bad(number, opened.faults[0])
        slots = opened.header.slots
        pairs = [(at, slots.get(slot.name), slot) for at, slot in self._expected.slots(number)]
        good = [
            (at, slot.begin) for at, slot, wanted in pairs if slot and slot.place == wanted.place
        ]
        rows = column(good, len(good), 2)
        return rows[:, 0], rows[:, 1]

    def _bad(self, number: int, fault: Fault) -> FormatError:
        """Return the error of a file that is not the saved one, with what should lie in it."""
        names = sorted({slot.name for _, slot in self._expected.slots(number)})
        remedy = _REMEDY if fault.kind == "missing" else ""
        text = f"{fault.reason}; {listed(names)} should lie in it{remedy}"
        return FormatError(self.files[number], text)

    def _chunk_place(self, name: str, chunk: int, number: int) -> ChunkPlace:
        """Return where a chunk lies, once the header of its file was read."""
        row = self.manifest.entries.row_of[name]
        dtype, shape, offsets = self._expected.kind(row, chunk)
        begin = int(self._begins[self.manifest.start[row] + chunk])
        if begin < 0:
            raise FormatError(
                self.files[number],
                f"its header does not have `{name}` as the manifest says ({dtype} {list(shape)} "
                f"at {list(offsets)}); see verify",
            )
        return ChunkPlace(number, begin, dtype, shape)


def size_fault(name: str, size: int, found: int | None) -> Fault:
    """Describe a file that is not there in its full size; ``found`` is None if it is missing."""
    if found is None:
        return Fault("missing", name, "it is missing", None, 0, size)
    what = "it was cut short" if found < size else "something was added"
    reason = f"it has {found:,} bytes and was saved with {size:,}: {what}"
    return Fault("size", name, reason, None, min(size, found), max(size, found))
