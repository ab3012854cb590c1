"""Was a chunk that nobody read whole the one that was saved? Its blocks' checksums, put together.

A chunk's checksum is made of those of its blocks. Whoever reads a block whole hashes it; where all
blocks of a chunk have come together, from several reads or from several ranks, it can be checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .checksums import combine
from .errors import FormatError
from .sources import Source

__all__ = ["BlockSums"]

Key = tuple[str, int]


class BlockSums:
    """Checksums of blocks, by chunk: of those chunks of which some blocks are still to come.

    Attributes:
        verified: How many chunks were complete, and found to fit their checksums.
    """

    def __init__(self) -> None:
        self._found: dict[Key, tuple[int, dict[int, int]]] = {}
        self.verified = 0

    def add(self, name: str, chunk: int, count: int, digests: Mapping[int, int]) -> None:
        """Take in the checksums of some blocks of a chunk, given by number.

        Args:
            name: The tensor.
            chunk: Which chunk of it.
            count: How many blocks the chunk has.
            digests: The checksums.
        """
        self._found.setdefault((name, chunk), (count, {}))[1].update(digests)

    def settle(self, source: Source) -> None:
        """Compare, and forget, all chunks that are complete.

        Raises:
            FormatError: Some are not what was saved; all are named.
        """
        done = [key for key, (count, seen) in self._found.items() if len(seen) == count]
        damaged = [key for key in done if not _fits(source, key, self._found.pop(key)[1])]
        self.verified += len(done) - len(damaged)
        if damaged:
            files = sorted({source.files[spot.file] for spot in source.spots(damaged)})
            named = ", ".join(f"`{name}`" for name in sorted({name for name, _ in damaged})[:8])
            raise FormatError(", ".join(files), f"checksums do not fit: {named}")

    def pack(self) -> list[tuple[Any, ...]]:
        """Return all as plain data that can be sent."""
        return [
            (*key, count, _bytes(seen, "<i8"), _bytes(seen.values(), "<u8"))
            for key, (count, seen) in self._found.items()
        ]

    def unpack(self, told: Sequence[tuple[Any, ...]]) -> None:
        """Take in what `pack` returned elsewhere.

        >>> one, other = BlockSums(), BlockSums()
        >>> one.add("w", 0, 2, {1: 7})
        >>> other.unpack(one.pack())
        >>> other.pack() == one.pack()
        True
        """
        for name, chunk, count, numbers, digests in told:
            found = (np.frombuffer(numbers, "<i8"), np.frombuffer(digests, "<u8"))
            self.add(name, chunk, count, dict(zip(*(a.tolist() for a in found), strict=True)))


def _fits(source: Source, key: Key, seen: Mapping[int, int]) -> bool:
    sums = source.sums_of(key[0])
    return sums is None or combine([seen[n] for n in range(len(seen))]) == int(sums[key[1]])


def _bytes(values: Iterable[int], dtype: str) -> bytes:
    return np.array(list(values), dtype).tobytes()
