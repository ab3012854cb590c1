"""The CRC-32 of bytes that were summed in parts, by several threads."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Final

__all__ = ["combine_crc", "sum_crc"]

_POLYNOMIAL: Final = 0xEDB88320


def sum_crc(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32 of some bytes, given that of what comes before them."""
    return zlib.crc32(data, before)


def combine_crc(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of bytes in two parts, given that of each.

    Args:
        first: The CRC-32 of the first part.
        second: That of the second.
        nbytes: How many bytes the second has.

    >>> combine_crc(sum_crc(b"check"), sum_crc(b"point"), 5) == sum_crc(b"checkpoint")
    True
    """
    return _times(_power(nbytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Multiply polynomials over two elements, modulo that of the CRC; the lowest power is first."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@cache
def _square(power: int) -> int:
    """Return x to the 2 to the ``power``."""
    return 1 << 30 if not power else _times(_square(power - 1), _square(power - 1))


@cache
def _power(nbytes: int) -> int:
    """Return x to the number of bits in some bytes."""
    product, bits, power = 1 << 31, 8 * nbytes, 0
    while bits:
        if bits & 1:
            product = _times(_square(power), product)
        bits, power = bits >> 1, power + 1
    return product
