"""Our own checkpoints: the manifest says in which file a chunk lies, that file's header where.

The manifest's checksum covers the checksums of headers and tables, and these cover those of chunks.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from shardplan.planning import find_issues
from shardplan.planning.columns import Ints, column
from shardplan.planning.storage import save_id_of

from ...checksums import XXH3, Sums
from ...errors import FormatError, listed
from ...pool import Pool, ProgressCallback, default_pool
from ...stores.base import Store, StoreError
from ...values import RAW, StoredValue, load_value
from ..base import ChunkPlace, Fault, FileColumns, Findings, Format, Source
from .expected import Expected, Held, size_fault
from .manifest import decode_manifest, find_manifest, read_text
from .record import MANIFEST, Manifest

if TYPE_CHECKING:
    from .write import NativeWriter


_REMEDY: Final = (
    "; copy the checkpoint whole, or if it was overwritten or pruned meanwhile, open it again"
)
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
        return self.open_text(store, read_text(store), pool)

    def open_text(self, store: Store, text: bytes, pool: Pool | None = None) -> NativeSource:
        """Open a checkpoint, given its manifest; see `Format.open_text`."""
        manifest = decode_manifest(text)
        issues = find_issues(manifest.metadata)  # which no save of ours has
        if issues:
            more = f", and {len(issues) - 1:,} more; see verify" if len(issues) > 1 else ""
            raise FormatError(MANIFEST, f"it is damaged: {issues[0].message}{more}")
        return NativeSource(store, manifest, pool, text)

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


class NativeSource(Source):
    """A checkpoint of ours. Of headers that were read, only places and checksums are kept."""

    format = "safetensors"

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        pool: Pool | None = None,
        text: bytes | None = None,
    ) -> None:
        self.manifest, self.metadata = manifest, manifest.metadata
        self.block_bytes, self.created = manifest.block_bytes, manifest.created
        self.file_columns = FileColumns(manifest.places, manifest.place)
        self.store, self.files, self.text = store, manifest.files.names, text
        self.shared_files = [self.files[number] for number in manifest.files.shared]
        self._pool = pool or default_pool()
        self._held: dict[int, Held] = {}  # by number of the file

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
        found = self._find(chunks)
        begins = [int(held.begin[at]) for held, at in zip(found.held, found.at, strict=True)]
        kinds = map(self._expected.kind, found.rows, found.numbers)
        return [
            ChunkPlace(file, begin, dtype, sizes)
            for file, begin, (dtype, sizes, _) in zip(found.files, begins, kinds, strict=True)
        ]

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; see `Source.sums_of`."""
        keys = [(name, number) for number in range(len(self.manifest.files_of(name)))]
        return np.array(self.chunk_sums(keys), np.uint64)

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk; see `Source.chunk_sums`."""
        if self.manifest.sums is not None:
            row_of = self.manifest.entries.row_of
            start = self.manifest.start[column([row_of[name] for name, _ in chunks])]
            sums = self.manifest.sums[start + column([n for _, n in chunks])]
            known: list[int | None] = sums.tolist()
            return known
        found = self._find(chunks)
        return [
            int(held.sums[at])
            for held, at in zip(found.held, found.at, strict=True)
            if held.sums is not None
        ]

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

    def _header(self, number: int) -> Held:
        """Return which chunks lie in a file as the manifest says, and where they begin."""
        with suppress(StoreError, ValueError, ArithmeticError):  # which `open` explains
            found = self._expected.by_rule(self.store, number)
            if found is not None:
                return found
        opened = self._expected.open(self.store, number)
        if opened.header is None or opened.faults:
            raise self._bad(number, opened.faults[0])
        return self._expected.held(number, opened)

    def _bad(self, number: int, fault: Fault) -> FormatError:
        """Return the error of a file that is not the saved one, with what should lie in it."""
        names = sorted({slot.name for _, slot in self._expected.slots(number)})
        remedy = _REMEDY if fault.kind == "missing" else ""
        text = f"{fault.reason}; {listed(names)} should lie in it{remedy}"
        return FormatError(fault.file, text)

    def _find(self, chunks: Sequence[tuple[str, int]]) -> _Found:
        """Find chunks in the headers of their files, which are read if they are not known yet."""
        manifest, row_of = self.manifest, self.manifest.entries.row_of
        rows, numbers = column([row_of[name] for name, _ in chunks]), column([n for _, n in chunks])
        chunk, files = manifest.start[rows] + numbers, np.zeros(len(rows), np.int64)
        for place, some in _groups(manifest.place[rows]):
            files[some] = manifest.places[place][numbers[some]]
        self._read_headers(files.tolist())
        at = np.zeros(len(rows), np.int64)
        for file, some in _groups(files):
            known = self._held[file].chunk
            at[some] = np.searchsorted(known, chunk[some])
            lost = at[some] >= len(known)
            lost[~lost] = known[at[some][~lost]] != chunk[some][~lost]
            if lost.any():
                first = some[int(lost.argmax())]
                raise self._absent(int(rows[first]), int(numbers[first]), file)
        held = [self._held[file] for file in files.tolist()]
        return _Found(rows.tolist(), numbers.tolist(), files.tolist(), held, at.tolist())

    def _absent(self, row: int, chunk: int, file: int) -> FormatError:
        """Return the error of a chunk that its file does not have."""
        slot = self._expected.slot(row, chunk)
        return FormatError(
            self.files[file],
            f"its header does not have `{slot.name}` as the manifest says ({slot.dtype} "
            f"{list(slot.shape)} at {list(slot.offsets)}); see verify",
        )


@attrs.frozen(eq=False)
class _Found:
    """Where chunks are: entry, number, file, what is known of that, and the row there of each."""

    rows: list[int]
    numbers: list[int]
    files: list[int]
    held: list[Held]
    at: list[int]


def _groups(values: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct value of a column, and the rows that have it."""
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order], prepend=-1, append=-1)).tolist()
    for low, high in pairwise(edges):
        yield int(values[order[low]]), order[low:high]
