"""Bytes that lie here and there in a file, seen where the system keeps them.

A page that cannot be had (the disk fails, the file was cut short) would end the process when it is
touched. So all pages are asked for first, which reports that as an error.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE", "Bytes", "can_map", "map_ranges"]

Bytes = npt.NDArray[np.uint8]

PAGE: Final = mmap.ALLOCATIONGRANULARITY
"""Bytes that the system reads at least, whatever is asked for."""

_POPULATE: Final = 22  # MADV_POPULATE_READ, of Linux 5.14


@cache
def can_map() -> bool:
    """Tell whether the system can be asked for pages so that it says which it cannot give."""
    try:
        with mmap.mmap(-1, PAGE) as page:
            page.madvise(_POPULATE)
    except (AttributeError, OSError, ValueError):
        return False
    return True


def map_ranges(fd: int, starts: Sequence[int], length: int) -> Bytes:
    """Return the bytes of a file from the first of some ranges to the end of the last.

    Only those in the ranges may be looked at.

    Args:
        fd: The file.
        starts: Where the ranges start, ascending.
        length: How long each is.

    Raises:
        OSError: Some of them cannot be read.
        ValueError: The file ends before.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(bytes(range(100)))
    ...     file.flush()
    ...     found = map_ranges(file.fileno(), [3, 90], 4)
    >>> found[:4].tolist(), found[87:].tolist()
    ([3, 4, 5, 6], [90, 91, 92, 93])
    """
    first = starts[0] // PAGE * PAGE
    size = starts[-1] + length - first
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # a copy of our own, if anybody wrote to it
    pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=writable, offset=first)
    done = 0
    for start in starts:
        low = max(start // PAGE * PAGE - first, done)
        high = start + length - first
        if high > low:
            pages.madvise(_POPULATE, low, high - low)
            done = -(-high // PAGE) * PAGE
    return np.frombuffer(pages, np.uint8)[starts[0] - first :]
