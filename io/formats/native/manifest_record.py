"""The manifest as a record, apart from its text in a file; as a whole, and file by file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import Entries, Grid, Metadata
from shardplan.planning.columns import Ints, column, readonly
from shardplan.planning.geometry import Chunk, Tiling
from shardplan.planning.storage import BLOCK_BYTES

from ...checksums import Sums, hash_views
from ..headers import MAX_HEADER, Header, Slot

_PARSED: Final = 8  # how many times its own size a header takes in memory while it is read


@attrs.frozen(eq=False)
class FileTable:
    """A checkpoint's data files, one row each; sizes and lengths of headers are in bytes."""

    names: tuple[str, ...]
    sizes: Ints
    headers: Ints
    digests: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


@attrs.frozen(eq=False, slots=False)
class Manifest:
    """A checkpoint, all but its bytes.

    Attributes:
        places: The distinct columns of file numbers, one number a chunk.
        place: Per entry of the metadata, which of these columns it has; -1 for an inline value.
        sums: The checksum of every chunk, by entry, then by chunk; see `sums_of`.
        values: Non-tensor values, by name: kind (see `StoredValue`), and the JSON data of
            an inline one, or how many bytes another takes.
        created: When it was made, in seconds since 1970.
        block_bytes: The most bytes of a block; see `shardplan.planning.storage.blocks`.
    """

    save_id: str
    metadata: Metadata
    files: FileTable
    places: tuple[Ints, ...]
    place: Ints
    sums: Sums
    values: Mapping[str, tuple[str, Any]]
    created: float = 0.0
    block_bytes: int = BLOCK_BYTES

    @property
    def entries(self) -> Entries:
        """The metadata's entries, in columns."""
        return self.metadata.state_dict_metadata

    @cached_property
    def start(self) -> Ints:
        """Per entry, where its chunks start among all chunks; and how many chunks there are."""
        counts = column([*map(len, self.places), 0])[self.place]
        return readonly(np.concatenate([[0], np.cumsum(counts)]))

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; none for an inline value."""
        row = self.entries.row_of[name]
        return self.sums[self.start[row] : self.start[row + 1]]

    @property
    def file_bytes(self) -> Ints:
        """How many bytes the chunks of each file take, added up."""
        return _file_bytes(self)

    def files_of(self, name: str) -> Ints:
        """Return the number of the file of each chunk of one entry; none for an inline value."""
        place = self.place[self.entries.row_of[name]]
        return column([]) if place < 0 else self.places[place]


def _file_bytes(manifest: Manifest) -> Ints:
    """Add up, per file, the bytes of its chunks; tensors alike are counted, not visited."""
    entries, limit = manifest.entries, float(manifest.files.sizes.sum())
    tensors = np.stack([manifest.place, entries.layout, entries.prop])[:, entries.layout >= 0]
    kinds = Counter(map(tuple, tensors.T.tolist()))
    width = column([p.itemsize for p in entries.props])
    files, sizes = [column([])], [column([])]
    for (place, layout, prop), count in kinds.items():
        where, tiling = manifest.places[place], entries.layouts[layout].tiling
        if len(where) != len(tiling):  # before any chunk of a grid is made
            raise ValueError(f"{len(tiling)} chunks lie in {len(where)} files")
        volume = _volumes(tiling)
        if float(volume.sum(dtype=float)) * float(width[prop]) * count > limit:
            raise ValueError("its chunks are larger than its files")
        files.append(where)
        sizes.append(volume * (width[prop] * count))
    for name, (kind, data) in manifest.values.items():
        if kind != "inline":
            where = manifest.files_of(name)
            if len(where) != 1:
                raise ValueError(f"the value of `{name}` lies in {len(where)} files")
            files.append(where)
            sizes.append(column([data]))
    every = np.concatenate(sizes)
    if every.sum(dtype=float) > limit:
        raise ValueError("its chunks are larger than its files")
    total = np.zeros(len(manifest.files), np.int64)
    np.add.at(total, np.concatenate(files), every)
    return total


def _volumes(tiling: Tiling) -> Ints:
    """Return how many elements each chunk has, in little more memory than that."""
    if not isinstance(tiling, Grid):
        volume: Ints = tiling.sizes.prod(axis=1)
        return volume
    volume = np.ones(1, np.int64)
    for cuts in tiling.cuts:
        volume = np.multiply.outer(volume, np.diff(cuts)).reshape(-1)
    return volume


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
        self._boxes: dict[int, tuple[Chunk, ...]] = {}

    def slots(self, number: int) -> Iterator[tuple[int, Slot]]:
        """Yield the chunks of one file: the number of each among all chunks, and what it is."""
        for at in self._order[self._edges[number] : self._edges[number + 1]].tolist():
            yield at, self.slot(int(self._row[at]), int(self._chunk[at]))

    def slot(self, row: int, chunk: int) -> Slot:
        """Return one chunk of an entry; the manifest does not say where it begins."""
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

    def header_cost(self, number: int) -> int:
        """Return how many bytes of memory it takes to parse the header of a file."""
        return _PARSED * int(self._manifest.files.headers[number])

    def fits(self, number: int, data: bytes) -> bool:
        """Return whether these bytes are the header that was saved."""
        return hash_views([memoryview(data)]) == self._manifest.files.digests[number]

    def wrote(self, number: int, header: Header) -> bool:
        """Return whether a header claims to be of this save, and of the file of that number."""
        ours = (self._manifest.save_id, self._manifest.files.names[number])
        return (header.save_id, header.name) == ours
