"""`CombinedSource`: a sum of checkpoints as if it were a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shardplan.planning import (
    Expression,
    TensorMetadata,
    joined_metadata,
    joined_name,
    result_of,
)
from shardplan.planning.columns import Ints

from ..stores.base import Store
from .base import ChunkPlace, Fault, Source
from .joined import UnionSource

__all__ = ["CombinedSource"]


class CombinedSource(Source):
    """A sum of checkpoints, whose tensors are added up as they are read by `Reader`."""

    format = "sum"

    def __init__(self, parts: Sequence[Source], expression: Expression) -> None:
        self.parts, self.expression = tuple(parts), expression
        self._stored = UnionSource(parts[0].store, parts, joined_metadata(expression.metadata))
        self.metadata, self.files = result_of(expression), self._stored.files
        self.store: Store = self._stored.store
        self.block_bytes, self.checksum = self._stored.block_bytes, self._stored.checksum
        self.remarks, self.notes, self.beside = (
            parts[0].remarks,
            self._stored.notes,
            parts[0].beside,
        )
        entries = self.metadata.state_dict_metadata
        tensors = {name: e for name, e in entries.items() if isinstance(e, TensorMetadata)}
        sizes = [e.chunks.volume() * e.properties.itemsize for e in tensors.values()]
        self._begin = dict(zip(tensors, accumulate(sizes, initial=0), strict=False))

    @property
    def stored(self) -> UnionSource:
        """All tensors of the checkpoints."""
        return self._stored

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Return where chunks would lie in one file; nothing is read there."""
        return [self._place(*chunk) for chunk in chunks]

    def _place(self, name: str, number: int) -> ChunkPlace:
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorMetadata)
        sizes: Ints = entry.chunks.sizes
        begin = (
            self._begin[name] + int(sizes[:number].prod(axis=1).sum()) * entry.properties.itemsize
        )
        extents = tuple(sizes[number].tolist())
        # Axes that are named, if only in order, say that bytes cannot be copied as they are.
        return ChunkPlace(0, begin, entry.properties.dtype, extents, tuple(range(len(extents))))

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value of the first checkpoint."""
        return self._stored.value(joined_name(0, name), verify=verify)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads."""
        return self._stored.value_bytes(joined_name(0, name))

    def value_cost(self, name: str) -> int:
        """Return about how many bytes of memory `value` takes."""
        return self._stored.value_cost(joined_name(0, name))

    def has_value_sum(self, name: str) -> bool:
        """Return whether a value has a checksum."""
        return self._stored.has_value_sum(joined_name(0, name))

    def file_numbers(self, name: str) -> Sequence[int] | None:
        """Return None: no file has a sum's elements."""
        return None

    def missing(self) -> Sequence[Fault]:
        """Return what is missing of the checkpoints."""
        return self._stored.missing()
