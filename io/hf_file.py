"""One safetensors file of a Hugging Face checkpoint: what is in it, and how is it written?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from shardplan.planning import itemsize

from .copying import Content, Seal, literal, write_file
from .headers import file_entry, framed
from .hf_index import INDEX, PART_OF, SINGLE, TIED
from .pieces import Piece
from .stores import Store

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
        return framed(json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode())

    def write(self, store: Store, header: bytes, threads: int) -> None:
        """Write it."""
        size, atomic = len(header) + self.nbytes, self.name == SINGLE
        write_file(
            store,
            self.name,
            lambda: self._contents(header),
            lambda: self._parts(header),
            nbytes=size,
            atomic=atomic,
            threads=threads,
        )

    def _contents(self, header: bytes) -> list[Content | Seal] | None:
        """Return what it is made of, if all of it only has to be copied."""
        found: list[Content | Seal] = [literal(header)]
        for piece in self.ordered():
            blocks = piece.direct()
            if blocks is None:
                return None
            found.append(Content(blocks))
        return found

    def _parts(self, header: bytes) -> Iterator[memoryview]:
        yield memoryview(header)
        for piece in self.ordered():
            yield from piece.blocks()
