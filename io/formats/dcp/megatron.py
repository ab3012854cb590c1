"""Checkpoints of Megatron-core, of its format `torch_dist`: DCP files, and `common.pt` beside them.

`common.pt` is a file of `torch.save` that holds what all ranks have in common, such as ``args``,
under names of their own beside those of `.metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import numpy as np

from shardplan.planning import Entries, Metadata, listed

from ...errors import FormatError
from ...pool import Pool
from ...stores.base import MissingFileError, Store, StoreError
from ..base import ChunkPlace, Fault, read_whole
from ..torch_save.source import TorchSource, open_file
from ..torch_save.verify import Stored
from .metadata import METADATA, Described
from .source import Chunk, DcpSource

COMMON: Final = "common.pt"
"""The file of what all ranks have in common."""
MARK: Final = "metadata.json"
"""The file that says that Megatron-core wrote a checkpoint, and in which format."""

T = TypeVar("T")


def is_there(store: Store) -> bool:
    """Return whether Megatron-core wrote the checkpoint in a folder."""
    try:
        return b'"torch_dist"' in read_whole(store, MARK, "config")
    except MissingFileError:
        return False


def open_common(store: Store) -> TorchSource:
    """Open `common.pt`; a value that is not safe to load is refused when it is asked for."""
    try:
        return open_file(store, COMMON, sealed=True)
    except FormatError as error:
        raise FormatError(
            COMMON, f"{error.reason}; to read all but what it holds, open {METADATA} itself"
        ) from None


def find_common(store: Store) -> tuple[Stored, tuple[str, ...]] | Fault:
    """Return `common.pt` as an archive to check, and what is odd about it; or what is wrong."""
    try:
        found = open_common(store)
        size = store.size(COMMON)
    except FormatError as error:
        return Fault("header" if store.exists(COMMON) else "missing", COMMON, error.reason)
    except StoreError as error:
        return Fault("unreadable", COMMON, error.reason)
    return Stored(COMMON, 0, size, tensors=found.tensors_by_record()), _notes(found)


def _notes(common: TorchSource) -> tuple[str, ...]:
    refused = [f"`{name}` {why}" for name, why in common.refused_values().items()]
    return (f"{COMMON}: {listed(refused, quote='', between='; ')}",) if refused else ()


class MegatronSource(DcpSource):
    """A checkpoint of Megatron-core; a `Source`. ``common`` is what `common.pt` holds."""

    def __init__(self, store: Store, described: Described, pool: Pool | None = None) -> None:
        super().__init__(store, described, pool)
        self.common = open_common(store)
        self.metadata = _joined(described.metadata, self.common.metadata)
        self.files = (*described.files, COMMON)
        self.notes = (*described.notes, *_notes(self.common))

    def find_chunks(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """Find chunks in either; see `Source.find_chunks`."""
        common = [chunk for chunk in chunks if self._is_common(chunk[0])]
        theirs = [p._replace(file=len(self.files) - 1) for p in self.common.find_chunks(common)]
        return self._merged(chunks, dict(zip(common, theirs, strict=True)), super().find_chunks)

    def chunk_sums(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Return the checksum of each chunk that fills its record; see `Source.chunk_sums`."""
        common = [chunk for chunk in chunks if self._is_common(chunk[0])]
        theirs = zip(common, self.common.chunk_sums(common), strict=True)
        return self._merged(chunks, dict(theirs), super().chunk_sums)

    def _merged(
        self, chunks: Sequence[Chunk], known: dict[Chunk, T], ask: Callable[[Any], Sequence[T]]
    ) -> list[T]:
        """Return what is known of chunks, and ask for the others; in the order of the chunks."""
        others = [chunk for chunk in chunks if chunk not in known]
        known = known | dict(zip(others, ask(others), strict=True))
        return [known[chunk] for chunk in chunks]

    def _is_common(self, name: str) -> bool:
        return name in self.common.metadata.state_dict_metadata

    def file_numbers(self, name: str) -> Sequence[int] | None:
        """Return the file of each chunk; see `Source.file_numbers`."""
        return [len(self.files) - 1] if self._is_common(name) else super().file_numbers(name)

    def has_value_sum(self, name: str) -> bool:
        """Return whether a value that was read has a checksum; see `Source.has_value_sum`."""
        return self._is_common(name) or super().has_value_sum(name)

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; see `Source.value`."""
        if self._is_common(name):
            return self.common.value(name)
        return super().value(name, verify=verify)

    def plain_value(self, name: str) -> Any:
        """Return a non-tensor value that needs no torch; see `Source.plain_value`."""
        return self.common.plain_value(name) if self._is_common(name) else super().plain_value(name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; see `Source.value_bytes`."""
        return 0 if self._is_common(name) else super().value_bytes(name)

    def value_cost(self, name: str) -> int:
        """Return how many bytes of memory it takes to read a value; see `Source.value_cost`."""
        return 0 if self._is_common(name) else super().value_cost(name)


def _joined(sharded: Metadata, common: Metadata) -> Metadata:
    """Return the metadata of both parts of a checkpoint."""
    a, b = sharded.state_dict_metadata, common.state_dict_metadata
    twice = sorted(a.row_of.keys() & b.row_of.keys())
    if twice:
        raise FormatError(
            COMMON,
            f"{listed(twice)} is in it and in {METADATA}; open {METADATA} itself to read what is "
            "there",
        )
    parts = [part.planner_data or {} for part in (sharded, common)]
    data = {
        "paths": {**parts[0].get("paths", {}), **parts[1].get("paths", {})},
        "empty": (*parts[0].get("empty", ()), *parts[1].get("empty", ())),
    }
    return attrs.evolve(
        sharded,
        state_dict_metadata=Entries(
            a.names + b.names,
            a.props + b.props,
            np.concatenate([a.prop, _moved(b.prop, len(a.props))]),
            a.layouts + b.layouts,
            np.concatenate([a.layout, _moved(b.layout, len(a.layouts))]),
        ),
        planner_data={key: part for key, part in data.items() if part} or None,
    )


def _moved(numbers: Any, by: int) -> Any:
    """Return row numbers of a table that comes after another one; -1 stays."""
    return np.where(numbers < 0, numbers, numbers + by)
