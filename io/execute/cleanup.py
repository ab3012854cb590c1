"""Which files did killed saves leave behind, and which of them can go?

The files of a save that is under way look just the same. So they are left alone until nobody has
written any file of the same save for a while.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterable
from typing import Final

from shardplan.planning.storage import save_id_of

from ..errors import FormatError
from ..formats.dcp.metadata import METADATA, parse_metadata
from ..formats.hf.index import indices, read_index
from ..formats.native.manifest import MANIFEST, Manifest, decode_manifest
from ..limits import read_whole
from ..stores.base import Entry, Store
from ..stores.local_files import is_temporary
from .commit import find_manifest

__all__ = ["MIN_AGE", "by_save", "leftovers", "spoken_of", "strays", "tidy"]

MIN_AGE: Final = 3600.0
"""For how many seconds no file of a killed save must have been written before they are removed."""

_DCP: Final = re.compile(r"__\d+_\d+-([0-9a-f]{12})\.distcp")  # torch's own name no save
_SAVE: Final = re.compile(r"[0-9a-f]{12}")  # how saves are called; other words are of a user's own


def leftovers(store: Store) -> tuple[str, ...]:
    """Name the files that a killed save left behind: no manifest speaks of them.

    While a save is under way its files look just like that.
    """
    found = store.entries(recursive=False)
    try:
        known = spoken_of(store, found, _manifest(store))
        return tuple(entry.name for entry in strays(found, known))
    except FormatError:
        return ()  # nobody can tell what a damaged manifest speaks of


def _manifest(store: Store) -> Manifest | None:
    data = find_manifest(store)
    return None if data is None else decode_manifest(data)


def spoken_of(store: Store, found: Iterable[Entry], manifest: Manifest | None) -> set[str]:
    """Name the files of the checkpoints in a folder, as far as they have names of ours.

    Args:
        store: The folder.
        found: What it holds.
        manifest: What its manifest says; None if there is none.

    Raises:
        FormatError: The metadata or the index of another checkpoint is damaged.
    """
    known = set() if manifest is None else set(manifest.files.names)
    names = {entry.name for entry in found}
    if METADATA in names and any(map(_DCP.fullmatch, names)):
        known |= set(parse_metadata(read_whole(store, METADATA, "metadata")).files)
    if not known.issuperset(n for n in names if _save_of(n)):  # an index may name files as it likes
        for index in indices(names):
            known |= set(read_index(store, index).values())
    return known


def strays(found: Iterable[Entry], known: Collection[str], file: str = "") -> tuple[Entry, ...]:
    """Pick from a listing the files that a killed save left behind; see `leftovers`.

    Args:
        found: What the folder holds; listed before its manifest was read, so that a save which
            commits in between is one that the manifest speaks of.
        known: The files that belong to checkpoints.
        file: A checkpoint that is a single file; what was to become this file is picked as well.
    """
    marks = [MANIFEST, METADATA, *([file] if file else [])]
    return tuple(
        entry
        for entry in found
        if entry.name not in known
        and (_save_of(entry.name) or any(is_temporary(entry.name, mark) for mark in marks))
    )


def _save_of(name: str) -> str | None:
    """Read the save id off a file's name; None for files that are none of ours."""
    dcp = _DCP.fullmatch(name)
    save = dcp[1] if dcp else save_id_of(name)
    return save if save and _SAVE.fullmatch(save) else None


def by_save(found: Collection[Entry], min_age: float) -> tuple[list[Entry], list[Entry]]:
    """Tell files apart that nobody writes any more and others; those of one save go together."""
    saves = [_save_of(entry.name.rpartition("/")[2]) or entry.name for entry in found]
    newest: dict[str, float] = {}
    for entry, save in zip(found, saves, strict=True):
        newest[save] = max(entry.modified, newest.get(save, 0.0))
    limit = time.time() - min_age if min_age else math.inf
    old, young = list[Entry](), list[Entry]()
    for entry, save in zip(found, saves, strict=True):
        (old if newest[save] <= limit else young).append(entry)
    return old, young


def tidy(store: Store, known: Collection[str] = (), file: str = "") -> None:
    """Remove what killed saves left long ago beside a checkpoint that was just committed.

    Args:
        store: The folder.
        known: The checkpoint's files.
        file: Its name, if it is a single file.
    """
    try:
        found = store.entries(recursive=False)
        left = strays(found, known, file)
        if left:  # other checkpoints may be there as well, or may just have been committed
            left = strays(left, spoken_of(store, found, _manifest(store)), file)
            store.delete([entry.name for entry in by_save(left, MIN_AGE)[0]])
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return
