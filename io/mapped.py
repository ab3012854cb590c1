"""Bytes that lie here and there in a file, seen where the system keeps them.

A page that cannot be had (the disk fails, the file was cut short) would end the process when it is
touched. So all pages are asked for first, which reports that as an error.
"""

from __future__ import annotations

import mmap
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from shardplan.planning.packing import Ints

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


def map_ranges(fd: int, starts: Ints, lengths: Ints) -> Bytes:
    """Return the bytes of a file from where the first of some ranges starts to where the last ends.

    Only those in the ranges may be looked at.

    Args:
        fd: The file.
        starts: Where the ranges start; there is at least one.
        lengths: How long each is.

    Raises:
        OSError: Some of them cannot be read.
        ValueError: The file ends before.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(bytes(range(100)))
    ...     file.flush()
    ...     found = map_ranges(file.fileno(), np.array([90, 3]), np.array([4, 4]))
    >>> found[:4].tolist(), found[87:].tolist()
    ([3, 4, 5, 6], [90, 91, 92, 93])
    """
    order = np.argsort(starts, kind="stable")
    low, ends = starts[order] // PAGE * PAGE, (starts + lengths)[order]
    first, size = int(low[0]), int(ends.max() - low[0])
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # a copy of our own, if anybody wrote to it
    pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=writable, offset=first)
    reach = np.maximum.accumulate(-(-ends // PAGE) * PAGE)
    apart = np.flatnonzero(low[1:] > reach[:-1])  # the last range before each gap of whole pages
    runs = zip(low[[0, *(apart + 1)]].tolist(), reach[[*apart, -1]].tolist(), strict=True)
    for begin, end in runs:
        pages.madvise(_POPULATE, begin - first, min(end - first, size) - (begin - first))
    return np.frombuffer(pages, np.uint8)[int(starts.min()) - first :]
