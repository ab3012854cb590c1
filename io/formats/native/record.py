"""The manifest as a record: all that is global about a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import Entries, Grid, Metadata
from shardplan.planning.columns import Ints, column, readonly
from shardplan.planning.geometry import Tiling
from shardplan.planning.storage import BLOCK_BYTES, table_name

from ...checksums import Sums

MANIFEST: Final = "shardplan.json"


@attrs.frozen(eq=False, slots=False)
class FileTable:
    """A checkpoint's files, one row each: data files first, then tables of checksums."""

    names: tuple[str, ...]
    sizes: Ints  # their sizes in bytes
    headers: Ints  # where the data of each begins; the size of a table
    # The checksum of each header, which covers the checksums in it, or of a table.
    digests: tuple[int, ...]
    # The files that another save wrote, and how many bytes of each are of no use here.
    shared: Mapping[int, int] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def tables(self) -> Mapping[int, int]:
        """The row of the table of each data file that has one, in order of the tables."""
        tables = {name: row for row, name in enumerate(self.names) if name.endswith(".sums")}
        if not tables:
            return {}
        data = {table_name(name): row for row, name in enumerate(self.names) if name not in tables}
        return {data[name]: row for name, row in tables.items()}


@attrs.frozen(eq=False, slots=False)
class Manifest:
    """A checkpoint, all but its bytes and their checksums."""

    save_id: str
    metadata: Metadata
    files: FileTable
    places: tuple[Ints, ...]  # the distinct columns of file numbers, one number a chunk
    place: Ints  # per entry of the metadata, which of these columns it has; -1 for an inline value
    # Non-tensor values, by name: kind (see `StoredValue`), and the JSON data of an inline one, or
    # how many bytes another takes.
    values: Mapping[str, tuple[str, Any]]
    created: float = 0.0  # when it was made, in seconds since 1970
    # The most bytes of a block; see `shardplan.planning.storage.blocks`.
    block_bytes: int = BLOCK_BYTES
    # In versions 1 and 2, the checksum of every chunk, by entry, then by chunk.
    sums: Sums | None = None

    @property
    def entries(self) -> Entries:
        """The metadata's entries, in columns."""
        return self.metadata.state_dict_metadata

    @cached_property
    def start(self) -> Ints:
        """Per entry, where its chunks start among all chunks; and how many chunks there are."""
        counts = column([*map(len, self.places), 0])[self.place]
        return readonly(np.concatenate([[0], np.cumsum(counts)]))

    def files_of(self, name: str) -> Ints:
        """Return the number of the file of each chunk of one entry; none for an inline value."""
        place = self.place[self.entries.row_of[name]]
        return column([]) if place < 0 else self.places[place]


def file_bytes(
    entries: Entries,
    places: Sequence[Ints],
    place: Ints,
    values: Mapping[str, tuple[str, Any]],
    files: int,
    *,
    max_bytes: float,
    max_work: int | None = None,
) -> Ints:
    """Return how many bytes the chunks of each file take; tensors alike are counted, not visited.

    Args:
        entries: The entries of a checkpoint.
        places: As in `Manifest`.
        place: As in `Manifest`.
        values: As in `Manifest`.
        files: How many files there are.
        max_bytes: What all files have at most.
        max_work: How many chunks may be visited.

    Raises:
        ValueError: That is impossible.
    """
    tensors = np.stack([place, entries.layout, entries.prop])[:, entries.layout >= 0]
    kinds = Counter(map(tuple, tensors.T.tolist()))
    work = sum(len(places[number]) for number, _, _ in kinds)
    if max_work is not None and work > max_work:
        raise ValueError(f"its layouts and places are of {work:,} chunks; {max_work:,} are allowed")
    width = column([p.itemsize for p in entries.props])
    total, sum_total = np.zeros(files, np.int64), 0.0
    for (number, layout, prop), count in kinds.items():
        where, tiling = places[number], entries.layouts[layout].tiling
        if len(where) != len(tiling):  # before any chunk of a grid is made
            raise ValueError(f"{len(tiling)} chunks lie in {len(where)} files")
        volume = _volumes(tiling)
        sum_total += float(volume.sum(dtype=float)) * float(width[prop]) * count
        if sum_total > max_bytes:
            raise ValueError("its chunks are larger than its files")
        np.add.at(total, where, volume * (width[prop] * count))
    for name, (kind, data) in values.items():
        if kind == "inline":
            continue
        where = places[place[entries.row_of[name]]]
        if len(where) != 1:
            raise ValueError(f"the value of `{name}` lies in {len(where)} files")
        sum_total += float(data)
        if sum_total > max_bytes:
            raise ValueError("its chunks are larger than its files")
        total[where] += data
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
