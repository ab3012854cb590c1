"""Limits on the size of files that are read whole.

Readers refuse larger files before they allocate memory, and writers refuse to write what no reader
would accept. The limits of shapes are in `planning.geometry`.
"""

from __future__ import annotations

from typing import Final

from .errors import FormatError
from .stores.base import Store, StoreError

LIMITS: Final = {
    "manifest": 1 << 30,  # one of a million chunks has 20 MB
    "metadata": 1 << 30,  # one of a million chunks has 150 MB
    "index": 1 << 26,  # one of a million tensors has 100 bytes for each
    "config": 1 << 24,
    "header": 100_000_000,  # the safetensors library refuses longer ones, too
    "pickle": 1 << 32,  # of a `torch.save` archive; it holds what is not in tensors
    "directory": 1 << 28,  # of an archive
}
"""The most bytes of a file that is read whole, by kind of file."""

MAX_BYTES: Final = 1 << 60
"""Values, files and headers are smaller than this."""


def check_size(file: str, nbytes: int, what: str) -> None:
    """Refuse a file that is too large to be read whole."""
    if nbytes > LIMITS[what]:
        raise FormatError(
            file, f"it has {nbytes:,} bytes; the limit for a file of this kind is {LIMITS[what]:,}"
        )


def read_whole(store: Store, file: str, what: str) -> bytes:
    """Read a file whole, if it is not too large."""
    try:
        return store.read_all(file, limit=LIMITS[what])
    except StoreError as error:
        if error.kind == "long":
            check_size(file, store.size(file), what)
        if error.kind in ("long", "path"):
            raise FormatError(file, error.reason) from None
        raise
    except MemoryError:
        raise FormatError(file, f"there is not enough memory to read this {what}") from None
