"""One safetensors file of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from shardplan.planning import itemsize

from ...execute.copying import Content, FileContents, literal, write_file
from ...execute.pieces import Piece, blocks_of
from ...stores.base import Store
from ..headers import file_entry, framed
from .index import INDEX, PART_OF, SINGLE, TIED

__all__ = ["HfFile"]


@attrs.frozen(eq=False)
class HfFile:
    """One file to write.

    Attributes:
        name: Its name while it is written.
        part: Whether it counts only together with an index.
        pieces: Its tensors.
    """

    name: str
    part: bool
    pieces: Sequence[Piece]

    @property
    def nbytes(self) -> int:
        """How many bytes its tensors take."""
        return sum(piece.nbytes for piece in self.pieces)

    def ordered(self) -> list[Piece]:
        """The tensors as they lie in the file: the widest elements first, so all are aligned."""
        return sorted(self.pieces, key=lambda p: (-itemsize(p.dtype), p.name))

    def header(self, remarks: Mapping[str, str], ties: Mapping[str, str], save_id: str) -> bytes:
        """Return the bytes that come before the tensors."""
        mine = {piece.name for piece in self.pieces}
        tied = {name: kept for name, kept in ties.items() if kept in mine}
        own: dict[str, Any] = {"version": 1}
        own |= {"file": self.name, "save_id": save_id, PART_OF: INDEX} if self.part else {}
        own |= {TIED: sorted(tied)} if tied else {}
        metadata = {"format": "pt", **remarks, **tied}
        if len(own) > 1:
            metadata["shardplan"] = json.dumps(own, separators=(",", ":"))
        table: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for piece in self.ordered():
            entry = file_entry(piece.dtype, piece.shape)
            assert entry is not None
            table[piece.name] = {
                "dtype": entry[0],
                "shape": entry[1],
                "data_offsets": [at, at := at + piece.nbytes],
            }
        return framed(
            json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode(), self.name
        )

    def write(self, store: Store, header: bytes, threads: int) -> None:
        """Write it."""
        contents = FileContents(
            lambda local: [literal(header), *map(Content, blocks_of(self.ordered(), local))],
            threads,
        )
        size = len(header) + self.nbytes
        write_file(store, self.name, contents, nbytes=size, atomic=self.name == SINGLE)
