"""Checksums: xxh3-64 of a chunk's bytes, block by block, so that threads can share the work.

The checksum of a chunk of one block is that of its bytes. A larger chunk's is that of the
checksums of its blocks (see `shardplan.planning.blocks`), eight bytes each, most significant first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Sums", "combine", "hash_views", "sums_from_hex", "sums_to_hex"]

Sums = npt.NDArray[np.uint64]


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
