"""Was a chunk that nobody read whole the one that was saved? Its blocks' checksums, put together.

A chunk's checksum is made of those of its blocks. Whoever reads a block whole hashes it; where all
blocks of a chunk have come together, from several reads or from several ranks, it can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import FormatError, listed
from .formats.base import Source

__all__ = ["BlockSums"]

Key = tuple[str, int]


class BlockSums:
    """Checksums of blocks, by chunk: of those chunks of which some blocks are still to come.

    Attributes:
        verified: How many chunks were complete, and found to fit their checksums.
        nbytes: How many bytes were read of these.
    """

    def __init__(self) -> None:
        self._found: dict[Key, tuple[int, dict[int, int]]] = {}
        self._read: dict[Key, int] = {}
        self.verified = self.nbytes = 0

    def add(
        self, name: str, chunk: int, count: int, digests: Mapping[int, int], nbytes: int
    ) -> None:
        """Take in the checksums of some blocks of a chunk, given by number.

        Args:
            name: The tensor.
            chunk: Which chunk of it.
            count: How many blocks the chunk has.
            digests: The checksums.
            nbytes: How many bytes were read of these blocks.
        """
        self._found.setdefault((name, chunk), (count, {}))[1].update(digests)
        self._read[name, chunk] = self._read.get((name, chunk), 0) + nbytes

    def settle(self, source: Source) -> None:
        """Compare, and forget, all chunks that are complete.

        Raises:
            FormatError: Some are not what was saved; all are named.
        """
        done = [key for key, (count, seen) in self._found.items() if len(seen) == count]
        damaged = [key for key in done if not _fits(source, key, self._found.pop(key)[1])]
        self.verified += len(done) - len(damaged)
        self.nbytes += sum(self._read.pop(key) for key in done)
        if damaged:
            files = sorted({source.files[spot.file] for spot in source.spots(damaged)})
            named = listed(sorted({name for name, _ in damaged}))
            raise FormatError(listed(files, quote=""), f"checksums do not fit: {named}")

    def pack(self) -> list[tuple[Any, ...]]:
        """Return all as plain data that can be sent."""
        return [
            (*key, count, self._read[key], _bytes(seen, "<i8"), _bytes(seen.values(), "<u8"))
            for key, (count, seen) in self._found.items()
        ]

    def unpack(self, told: Sequence[tuple[Any, ...]]) -> None:
        """Take in what `pack` returned elsewhere.

        >>> one, other = BlockSums(), BlockSums()
        >>> one.add("w", 0, 2, {1: 7}, 16)
        >>> other.unpack(one.pack())
        >>> other.pack() == one.pack()
        True
        """
        for name, chunk, count, nbytes, numbers, digests in told:
            found = (np.frombuffer(numbers, "<i8"), np.frombuffer(digests, "<u8"))
            sums = dict(zip(*(a.tolist() for a in found), strict=True))
            self.add(name, chunk, count, sums, nbytes)


def _fits(source: Source, key: Key, seen: Mapping[int, int]) -> bool:
    (wanted,) = source.chunk_sums([key])
    found = source.checksum.combine([seen[n] for n in range(len(seen))])
    return wanted is None or found == wanted


def _bytes(values: Iterable[int], dtype: str) -> bytes:
    return np.array(list(values), dtype).tobytes()
