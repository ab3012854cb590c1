"""Where do the bytes of our own checkpoints lie? The manifest says in which file, headers where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardplan.planning import Metadata
from shardplan.planning.metadata import TensorMetadata

from .checksums import Sums, combine, hash_views
from .commit import read_manifest
from .errors import FormatError
from .headers import MAX_HEADER, Header, Slot, parse_header
from .manifest import MANIFEST, Manifest
from .pool import Pool, default_pool
from .sources import Spot
from .stores import MissingFileError, Store
from .values import StoredValue, load_value

__all__ = ["NativeSource", "find", "source"]


def find(store: Store, name: str = "") -> bool:
    """Say whether a checkpoint of ours is there; ``name`` is empty, or that of its manifest."""
    return name in ("", MANIFEST) and store.exists(MANIFEST)


def source(store: Store, name: str = "", pool: Pool | None = None) -> NativeSource:
    """Open a checkpoint of ours; only its manifest is read.

    Raises:
        FormatError: There is none, or its manifest is damaged.
    """
    return NativeSource(store, read_manifest(store), pool)


class NativeSource:
    """A checkpoint of ours; a `Source`. Headers that were read are kept.

    Args:
        store: Where it lies.
        manifest: What it says of itself; see `read_manifest`.
        pool: The threads and the memory budget to use.
    """

    format = "safetensors"

    def __init__(self, store: Store, manifest: Manifest, pool: Pool | None = None) -> None:
        self.store, self.manifest = store, manifest
        self._pool = pool or default_pool()
        self._headers: dict[int, Header] = {}

    @property
    def files(self) -> Sequence[str]:
        """The names of its data files."""
        return self.manifest.files.names

    @property
    def metadata(self) -> Metadata:
        """What it holds."""
        return self.manifest.metadata

    @property
    def block_bytes(self) -> int:
        """The most bytes of a block."""
        return self.manifest.block_bytes

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find chunks; see `Source.spots`. Only the headers of their files are read."""
        self.headers(int(self.manifest.files_of(name)[chunk]) for name, chunk in chunks)
        slots = (self._slot(name, chunk) for name, chunk in chunks)
        return [Spot(number, slot.begin, slot.dtype, slot.shape) for number, slot in slots]

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; see `Source.sums_of`."""
        return self.manifest.sums_of(name)

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor; see `Source.value`."""
        kind, data = self.manifest.values[name]
        if kind == "inline":
            return load_value(StoredValue("inline", data), MANIFEST, name)
        number, slot = self._slot(name, 0)
        file = self.files[number]
        buffer = bytearray(slot.nbytes)
        self.store.read(file, [(slot.begin, memoryview(buffer))])
        limit = self.block_bytes
        blocks = [memoryview(buffer)[i : i + limit] for i in range(0, len(buffer) or 1, limit)]
        found = combine([hash_views([block]) for block in blocks])
        if verify and found != int(self.sums_of(name)[0]):
            raise FormatError(file, f"the value of `{name}` does not fit its checksum")
        return load_value(StoredValue("json" if kind == "json" else "torch", buffer), file, name)

    def headers(self, numbers: Iterable[int]) -> Mapping[int, Header]:
        """Read the headers of some files, and check that these are the files that were saved.

        Raises:
            FormatError: A file is missing, of another size, or its header is not the saved one.
        """
        new = [n for n in dict.fromkeys(numbers) if n not in self._headers]
        if new:
            self._headers.update(zip(new, self._pool.map(self._header, new), strict=True))
        return self._headers

    def _header(self, number: int) -> Header:
        files = self.manifest.files
        name, size = files.names[number], int(files.sizes[number])
        length = min(int(files.headers[number]), MAX_HEADER + 8, size)
        data = bytearray(length)
        try:
            found = self.store.size(name)
            if found != size:
                raise FormatError(name, f"it has {found:,} bytes and was saved with {size:,}")
            self.store.read(name, [(0, memoryview(data))])
        except MissingFileError:
            raise FormatError(name, "it is missing") from None
        if hash_views([memoryview(data)]) != files.digests[number]:
            raise FormatError(name, "its header is damaged, or belongs to another file")
        header = parse_header(bytes(data), name, size)
        if (header.save_id, header.name) != (self.manifest.save_id, name):
            raise FormatError(
                name,
                f"it was written as {header.name} by save {header.save_id}: files were swapped",
            )
        return header

    def _slot(self, name: str, chunk: int) -> tuple[int, Slot]:
        """Return the file that holds a chunk, and its place there, checked against the manifest."""
        number = int(self.manifest.files_of(name)[chunk])
        header = self.headers([number])[number]
        if name not in header.slots:
            raise FormatError(header.file, f"it does not hold `{name}`")
        slot, entry = header.slots[name], self.manifest.entries[name]
        if isinstance(entry, TensorMetadata):
            box = entry.chunks[chunk]
            expected = (entry.properties.dtype, box.sizes, box.offsets)
        else:
            expected = ("uint8", (int(self.manifest.values[name][1]),), (0,))
        if (slot.dtype, slot.shape, slot.offsets) != expected:
            raise FormatError(header.file, f"its `{name}` is {slot}, not {expected}")
        return number, slot
