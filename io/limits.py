"""Limits on the size of files that are read whole.

Readers refuse larger files before they allocate memory, and writers refuse to write what no reader
would accept. The limits of shapes are in `planning.geometry`.
"""

from __future__ import annotations

from typing import Final

from .errors import FormatError
from .stores.base import Store, StoreError

__all__ = ["LIMITS", "MAX_BYTES", "check_size", "read_whole"]

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
    """Refuse a file that is too large to be read whole.

    Args:
        file: The file's name, for errors.
        nbytes: Its size in bytes.
        what: Its kind: a key of `LIMITS`.

    >>> check_size("config.json", 1 << 30, "config")
    Traceback (most recent call last):
    shardplan.io.errors.FormatError: config.json: it has 1,073,741,824 bytes; the limit for a ...

    Raises:
        FormatError: It is too large.
    """
    if nbytes > LIMITS[what]:
        raise FormatError(
            file, f"it has {nbytes:,} bytes; the limit for a file of this kind is {LIMITS[what]:,}"
        )


def read_whole(store: Store, file: str, what: str) -> bytes:
    """Read a file whole, if it is not too large.

    Args:
        store: Where it is.
        file: Its name.
        what: Its kind: a key of `LIMITS`.

    Raises:
        MissingFileError: There is no such file.
        FormatError: It is too large, or not a file.
        StoreError: The store fails.
    """
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
