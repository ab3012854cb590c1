"""Reading the manifest: the one file by which a checkpoint exists.

It is written last and replaced atomically: a checkpoint exists from the instant that its manifest
does. See `record` for what it says, `encoding` for its text.
"""

from __future__ import annotations

from typing import Final

from ...checksums import xxhash
from ...errors import FormatError
from ...stores.base import MissingFileError, Store, StoreError
from ..base import LIMITS, check_size, read_bytes, read_whole
from .encoding import MISFIT, decode_manifest, encode_manifest, read_head, sign
from .record import MANIFEST, FileTable, Manifest

__all__ = [
    "MANIFEST",
    "FileTable",
    "Manifest",
    "decode_manifest",
    "encode_manifest",
    "find_manifest",
    "read_manifest",
    "sign",
]

_USUAL: Final = 64 << 20  # up to here a manifest is read before anything is known of it
_PIECE: Final = 16 << 20  # bytes of a larger one that are looked at, at a time
_HEAD_BYTES: Final = 128  # at the beginning: format, version, checksum
_TEXT: Final = bytes(range(32, 127))  # what its text is made of


def read_manifest(store: Store) -> Manifest:
    """Read the manifest of the checkpoint that a store holds; see `read_text`."""
    return decode_manifest(read_text(store))


def read_text(store: Store) -> bytes:
    """Return the text of the manifest of the checkpoint that a store holds.

    Raises:
        FormatError: There is none.
    """
    data = find_manifest(store)
    if data is None:
        raise FormatError(
            MANIFEST, f"there is no checkpoint in {store.url}: no save was ever committed there"
        )
    return data


def find_manifest(store: Store) -> bytes | None:
    """Return the text of a checkpoint's manifest; None if there is none.

    An unusually large one is validated in pieces before it is read in full.
    """
    try:
        return store.read_all(MANIFEST, limit=min(_USUAL, LIMITS["manifest"]))
    except MissingFileError:
        return None
    except StoreError as error:
        if error.kind not in ("long", "path"):
            raise
        if error.kind == "long":
            _validate(store, store.size(MANIFEST))
    return read_whole(store, MANIFEST, "manifest")


def _validate(store: Store, size: int) -> None:
    """Refuse a large file that is not a manifest, or damaged, before all of it is in memory."""
    check_size(MANIFEST, size, "manifest")
    start = read_bytes(store, MANIFEST, 0, _HEAD_BYTES)
    head, state = read_head(start, MANIFEST), xxhash.xxh3_64()
    try:
        for at in range(head.end(), size, _PIECE):
            piece = read_bytes(store, MANIFEST, at, min(_PIECE, size - at))
            if piece.translate(None, _TEXT):  # no manifest has such characters
                break
            state.update(piece)
        else:
            if state.hexdigest() == head[2].decode():
                return
    except StoreError as error:
        if error.kind != "short":
            raise
    if read_bytes(store, MANIFEST, 0, _HEAD_BYTES) == start:  # else another save has replaced it
        raise FormatError(MANIFEST, MISFIT)
