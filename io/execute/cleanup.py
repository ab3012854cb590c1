"""Leftovers: files of killed saves, which no checkpoint needs, and which of them can go.

The files of a save that is under way look just the same. So they are left alone until no file of
the same save was written for a while.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Sequence
from typing import Final

from ..errors import FormatError
from ..formats.registry import known_formats
from ..stores.base import Entry, Store
from ..stores.local_files import is_temporary

MIN_AGE: Final = 3600.0
"""For how many seconds no file of a killed save must have been written before they are removed."""

_SAVE: Final = re.compile(r"[0-9a-f]{12}")  # how saves are called; users' own words are not


def leftovers(store: Store) -> tuple[str, ...]:
    """Name the files that a killed save left behind; those of a save under way look the same."""
    try:
        return tuple(entry.name for entry in strays(store, store.entries(recursive=False)))
    except FormatError:
        return ()  # a checkpoint is damaged, and may need any of them


def strays(
    store: Store, found: Sequence[Entry], known: Collection[str] = (), file: str = ""
) -> tuple[Entry, ...]:
    """Pick from a listing the files that a killed save left behind.

    Args:
        store: The folder.
        found: What it holds; listed before any manifest is read, so that a save which commits in
            between is one that the manifest names.
        known: Files that are known to belong to a checkpoint.
        file: A checkpoint that is a single file; what was to become this file is picked as well.
    """
    marks = [mark for format in known_formats() for mark in format.marks]
    if file:
        marks.append(file)
    suspects = [
        entry
        for entry in found
        if entry.name not in known
        and (_save_of(entry.name) or any(is_temporary(entry.name, mark) for mark in marks))
    ]
    if suspects:
        names = {entry.name for entry in found}
        claimed = {name for name in _claimed(store) if name in names}
        suspects = [entry for entry in suspects if entry.name not in claimed]
    return tuple(suspects)


def _claimed(store: Store) -> set[str]:
    """Name the files of all checkpoints in a folder, of whatever format."""
    present = [format for format in known_formats() if format.detect(store)]
    return {file for format in present for file in format.open(store).files}


def _save_of(name: str) -> str | None:
    """Return the save that a file's name speaks of; None for files that are not ours."""
    saves = (format.save_of(name) for format in known_formats())
    return next((save for save in saves if save and _SAVE.fullmatch(save)), None)


def by_save(found: Collection[Entry], min_age: float) -> tuple[list[Entry], list[Entry]]:
    """Separate old files from young ones; those of one save stay together."""
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
    """Remove what killed saves left long ago beside a checkpoint that was just committed."""
    try:
        left = strays(store, store.entries(recursive=False), known, file)
        if left:
            store.delete([entry.name for entry in by_save(left, MIN_AGE)[0]])
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return
