"""Checksums of a chunk's bytes, made block by block, so that threads can share the work.

Ours is xxh3-64. The checksum of a chunk of one block is that of its bytes. A larger chunk's is that
of the checksums of its blocks (see `planning.storage.blocks`), eight bytes each, most significant
first. Archives of torch have the CRC-32 of each record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import named_extras

with named_extras("reading or writing a checkpoint"):
    import xxhash

from .crc import combine_crc, sum_crc

__all__ = [
    "CRC32",
    "XXH3",
    "Checksum",
    "Sums",
    "combine",
    "hash_views",
    "sums_from_hex",
    "sums_to_hex",
    "xxhash",
]

Sums = npt.NDArray[np.uint64]


class State(Protocol):
    """A checksum in the making."""

    def update(self, data: memoryview, /) -> object:
        """Take in some more bytes."""

    def intdigest(self) -> int:
        """Return the checksum of all bytes so far."""


@attrs.frozen
class Checksum:
    """A kind of checksum.

    Attributes:
        start: Begins the checksum of a block.
        combine: Returns that of a chunk, given those of its blocks, in order.
    """

    start: Callable[[], State]
    combine: Callable[[Sequence[int]], int]

    def of(self, views: Iterable[memoryview]) -> int:
        """Return the checksum of a block, one view after the other."""
        state = self.start()
        for view in views:
            state.update(view)
        return state.intdigest()


class _Crc:
    """The CRC-32 of a block in the making; it carries the block's length, to be combined."""

    def __init__(self) -> None:
        self._crc = self._nbytes = 0

    def update(self, data: memoryview, /) -> None:
        """Take in some more bytes."""
        self._crc, self._nbytes = sum_crc(data, self._crc), self._nbytes + len(data)

    def intdigest(self) -> int:
        """Return how many bytes there were, and their CRC-32 in the lowest four bytes."""
        return self._nbytes << 32 | self._crc


def _combine_crcs(digests: Sequence[int]) -> int:
    crc = 0
    for digest in digests:
        crc = combine_crc(crc, digest & 0xFFFFFFFF, digest >> 32)
    return crc


def hash_views(views: Iterable[memoryview]) -> int:
    """Return the checksum of some memory, one view after the other.

    >>> hash_views([memoryview(b"ab"), memoryview(b"c")]) == xxhash.xxh3_64_intdigest(b"abc")
    True
    """
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def combine(digests: Sequence[int]) -> int:
    """Return a chunk's checksum, given those of its blocks in order.

    >>> combine([7])
    7
    """
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_64_intdigest(b"".join(d.to_bytes(8, "big") for d in digests))


def sums_to_hex(sums: Sums) -> str:
    """Write checksums as text, sixteen digits each.

    >>> sums_to_hex(np.array([1, 255], np.uint64))
    '000000000000000100000000000000ff'
    """
    return sums.astype(">u8").tobytes().hex()


def sums_from_hex(text: str) -> Sums:
    """Read checksums from text; see `sums_to_hex`.

    >>> sums_from_hex("00000000000000ff").tolist()
    [255]

    Raises:
        ValueError: The text is no row of hexadecimal numbers of sixteen digits.
    """
    sums = np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    sums.flags.writeable = False
    return sums


XXH3: Final = Checksum(xxhash.xxh3_64, combine)
"""The checksums of our own format."""
CRC32: Final = Checksum(_Crc, _combine_crcs)
"""The checksums of archives.

>>> CRC32.combine([CRC32.of([memoryview(b"check")]), CRC32.of([memoryview(b"point")])])
2345966128
"""
