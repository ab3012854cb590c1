"""`JoinedSource`: chunks of several checkpoints as those of one, without a byte being copied."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from shardplan.planning import Metadata, TensorMetadata, itemsize

from ..checksums import Checksum
from ..stores.base import Store
from ..stores.joined import JoinedStore
from .base import ChunkPlace, Fault, Source

__all__ = ["ChunkOrigin", "JoinedSource", "UnionSource"]


class ChunkOrigin(NamedTuple):  # a checkpoint has millions
    """The saved chunk that a chunk is a part of.

    Attributes:
        source: The number of the checkpoint that has it.
        name, number: The tensor there, and the number of the chunk among the tensor's.
        offsets: Where the part starts in it, in elements; None if it is the chunk as it is stored.
        axes: Which of the part's axes each axis of that chunk is; None if they are in order.
    """

    source: int
    name: str
    number: int
    offsets: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None


class JoinedSource(Source):
    """A checkpoint whose chunks lie in others; what derives from it says where.

    Args:
        store: Where the checkpoint itself lies, if it does.
        parts: The others.
        metadata: What the checkpoint holds.
    """

    def __init__(self, store: Store, parts: Sequence[Source], metadata: Metadata) -> None:
        self.parts, self.metadata = tuple(parts), metadata
        self.store: Store = JoinedStore(store, [part.store for part in parts])
        self.files = tuple(f"{n}/{file}" for n, part in enumerate(parts) for file in part.files)
        self._first = [0, *accumulate(len(part.files) for part in parts)]
        summed = next((part for part in parts if part.has_sums), parts[0])
        self.checksum, self.block_bytes = summed.checksum, summed.block_bytes
        self.has_sums = any(part.has_sums for part in parts)
        self.notes = tuple(note for part in parts for note in part.notes)

    @abstractmethod
    def origin(self, name: str, number: int) -> ChunkOrigin:
        """Return what a chunk is a part of; of a value, the number is 0."""

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find chunks where they lie; see `Source.find_chunks`."""
        origins = [self.origin(*chunk) for chunk in chunks]
        found: list[ChunkPlace | None] = [None] * len(origins)
        for number, rows in _by_source(origins):
            spots = self.parts[number].find_chunks([_key(origins[row]) for row in rows])
            for row, spot in zip(rows, spots, strict=True):
                moved = spot._replace(file=spot.file + self._first[number])
                found[row] = self._place(chunks[row], origins[row], moved)
        return [spot for spot in found if spot is not None]

    def _place(self, chunk: tuple[str, int], origin: ChunkOrigin, spot: ChunkPlace) -> ChunkPlace:
        """Return where a part of a stored chunk lies."""
        if origin.offsets is None:
            return spot
        stored = spot.axes or tuple(range(len(spot.extents)))
        begin, stride = spot.begin, itemsize(spot.dtype)
        for axis, extent in zip(reversed(stored), reversed(spot.extents), strict=True):
            begin += origin.offsets[axis] * stride
            stride *= extent
        order = stored if origin.axes is None else tuple(origin.axes[axis] for axis in stored)
        extents = spot.extents
        if extents:  # the part ends where its last row does
            entry = self.metadata.state_dict_metadata[chunk[0]]
            assert isinstance(entry, TensorMetadata)
            extents = (int(entry.chunks.sizes[chunk[1]][order[0]]), *extents[1:])
        plain = order == tuple(range(len(order)))
        return ChunkPlace(spot.file, begin, spot.dtype, extents, None if plain else order)

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksums of chunks that lie as they are stored; see `Source.chunk_sums`."""
        origins, found = [self.origin(*chunk) for chunk in chunks], dict[int, int | None]()
        for number, rows in _by_source(origins):
            part = self.parts[number]
            if part.block_bytes != self.block_bytes:
                continue
            whole = [row for row in rows if origins[row].offsets is None]
            sums = part.chunk_sums([_key(origins[row]) for row in whole]) if whole else []
            found |= zip(whole, sums, strict=True)
        return [found.get(row) for row in range(len(origins))]

    def checksum_in(self, file: int) -> Checksum:
        """Return how the checkpoint that has a file sums its chunks."""
        return self.parts[bisect_right(self._first, file) - 1].checksum

    def checksum_of(self, name: str) -> Checksum:
        """Return how the checkpoint that has a tensor sums its chunks."""
        return self.parts[self.origin(name, 0).source].checksum

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].value(origin.name, verify=verify)

    def plain_value(self, name: str) -> Any:
        """Return a value that is known without reading; see `Source.plain_value`."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].plain_value(origin.name)

    def has_value_sum(self, name: str) -> bool:
        """Return whether a value has a checksum."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].has_value_sum(origin.name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].value_bytes(origin.name)

    def value_cost(self, name: str) -> int:
        """Return about how many bytes of memory `value` takes."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].value_cost(origin.name)

    def value_key(self, name: str) -> object:
        """Return what only equal values have in common; see `Source.value_key`."""
        origin = self.origin(name, 0)
        return self.parts[origin.source].value_key(origin.name)

    def missing(self) -> Sequence[Fault]:
        """Return what is missing of any of the checkpoints."""
        return [fault for part in self.parts for fault in part.missing()]


class UnionSource(JoinedSource):
    """All tensors of several checkpoints; each name begins with the number of its checkpoint."""

    format = "union"

    def origin(self, name: str, number: int) -> ChunkOrigin:
        """Return the same chunk in the checkpoint that the name begins with."""
        source, _, rest = name.partition("/")
        return ChunkOrigin(int(source), rest, number)


def _key(origin: ChunkOrigin) -> tuple[str, int]:
    return origin.name, origin.number


def _by_source(origins: Sequence[ChunkOrigin]) -> Iterable[tuple[int, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, origin in enumerate(origins):
        rows.setdefault(origin.source, []).append(row)
    return rows.items()
