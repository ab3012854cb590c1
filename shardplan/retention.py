"""Which checkpoint is the newest whole one, and which can go?"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, overload

import attrs

from shardplan.io.commit import find_manifest, read_manifest, strays
from shardplan.io.errors import FormatError
from shardplan.io.folders import FolderStore
from shardplan.io.manifest import MANIFEST, Manifest, decode_manifest
from shardplan.io.pool import default_pool
from shardplan.io.stores import Entry, Store, open_store
from shardplan.planning.files import save_id_of

__all__ = ["PruneReport", "latest", "prune"]

_HOUR: Final = 3600.0
_ATTEMPTS: Final = 3
_MANIFEST: Final = 32 << 20  # bytes of memory that reading most manifests takes


@overload
def latest(path: str | os.PathLike[str]) -> str | None: ...
@overload
def latest(path: Store) -> Store | None: ...
def latest(path: str | os.PathLike[str] | Store) -> str | Store | None:
    """Return the newest checkpoint below a folder that is whole, by the time it was made.

    Whole means that its manifest can be read and every file it names is there in its full size.
    All manifests are read, several at once; files are looked at only until one is found.

    Args:
        path: A folder that holds checkpoints, one folder each.

    Returns:
        What opens the checkpoint: for a path, ``path`` and the folder in it; for a store, a store,
        with the same options. None if there is none. Of checkpoints made at the same time, that of
        the last name, numbers counted as such: ``step-10`` comes after ``step-9``.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     latest(folder).removeprefix(folder)
    '/step-100'
    """
    store = open_store(path)
    names = _folders(store)
    cost = _MANIFEST + store.staging
    made = default_pool().map(lambda name: _created(_within(store, name)), names, nbytes=cost)
    dated = [(when, name) for when, name in zip(made, names, strict=True) if when is not None]
    for _, name in sorted(dated, key=_by_age, reverse=True):
        if _is_whole(_within(store, name)):
            return FolderStore(store, name) if store is path else f"{store.url.rstrip('/')}/{name}"
    return None


@attrs.frozen
class PruneReport:
    """What was removed.

    Attributes:
        removed: Checkpoints, by folder.
        kept: Whole checkpoints that stay, the newest last.
        damaged: Checkpoints that are not whole; they are left alone.
        leftovers: Files of killed saves that were removed.
        spared: Files that look like those of a killed save, but are too young to be sure of it.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    damaged: tuple[str, ...]
    leftovers: tuple[str, ...]
    spared: tuple[str, ...] = ()


def prune(
    path: str | os.PathLike[str] | Store, *, keep_last: int, min_age: float = _HOUR
) -> PruneReport:
    """Remove all but the newest checkpoints, and what killed saves left behind.

    Only whole checkpoints count. The files of a save that is not committed yet, and of a checkpoint
    that is being copied, look just like leftovers: so young ones are spared, together with all
    other files of the same save. Parts of files that a killed process was sending to an object
    store are seen by nobody but the service; see `ObjectStore`.

    Args:
        path: A folder that holds checkpoints, one folder each; or a checkpoint, of which only the
            leftovers go.
        keep_last: How many checkpoints stay.
        min_age: For how many seconds no file of a killed save must have been written before they
            are removed. Make it longer than any file takes; 0 only if no save can be under way.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100, 110):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     prune(folder, keep_last=2).removed
    ('step-90',)

    Raises:
        TypeError: ``keep_last`` is no whole number, or ``min_age`` no number.
        ValueError: ``keep_last`` is less than 1, or ``min_age`` less than 0.
    """
    _check_wish(keep_last, min_age)
    store = open_store(path)
    names = ["", *_folders(store)]
    cost = _MANIFEST + store.staging
    looks = default_pool().map(lambda name: _look(_within(store, name)), names, nbytes=cost)
    found = dict(zip(names, looks, strict=True))
    below = [(look.created, name) for name, look in found.items() if name]
    dated = [(when, name) for when, name in below if when is not None]
    whole = [name for _, name in sorted(dated, key=_by_age) if found[name].whole]
    damaged = [name for name in names[1:] if found[name].damaged]
    doomed = whole[:-keep_last]
    for name in doomed:
        _remove(store, name)
    left, spared = _tidy(store, found, min_age)
    kept = tuple(whole[-keep_last:])
    return PruneReport(tuple(doomed), kept, tuple(damaged), tuple(left), tuple(spared))


def _check_wish(keep_last: int, min_age: float) -> None:
    if isinstance(keep_last, bool) or not hasattr(keep_last, "__index__"):
        raise TypeError(
            f"keep_last says how many checkpoints stay, as a whole number; not {keep_last!r}"
        )
    if isinstance(min_age, bool) or not hasattr(min_age, "__float__"):
        raise TypeError(f"min_age says how many seconds, as a number; not {min_age!r}")
    if keep_last < 1 or not min_age >= 0:
        raise ValueError(f"keep_last must be at least 1, min_age 0; not {keep_last}, {min_age}")


def _tidy(store: Store, found: Mapping[str, _Look], min_age: float) -> tuple[list[str], list[str]]:
    """Remove what killed saves left in some folders, unless it is too young."""
    left, spared = list[str](), list[str]()
    for name, look in found.items():
        old, young = _by_save(look.strays, min_age)
        if old:
            _within(store, name).delete(old)
        left += [f"{name}/{file}".lstrip("/") for file in old]
        spared += [f"{name}/{file}".lstrip("/") for file in young]
    return left, spared


def _by_save(found: Iterable[Entry], min_age: float) -> tuple[list[str], list[str]]:
    """Tell files apart that nobody writes any more and others; those of one save go together."""
    newest: dict[str, float] = {}
    for entry in found:
        save = save_id_of(entry.name) or entry.name
        newest[save] = max(entry.modified, newest.get(save, 0.0))
    limit = time.time() - min_age if min_age else math.inf
    old, young = list[str](), list[str]()
    for entry in found:
        is_old = newest[save_id_of(entry.name) or entry.name] <= limit
        (old if is_old else young).append(entry.name)
    return old, young


def _remove(store: Store, name: str) -> None:
    """Remove a checkpoint, its manifest first: it must never look whole while it is not."""
    inside = _within(store, name)
    files = read_manifest(inside).files.names
    store.delete([f"{name}/{MANIFEST}"])
    store.sync()
    store.delete([f"{name}/{file}" for file in files])


@attrs.frozen
class _Look:
    """What a look into a folder told.

    Attributes:
        created: When its checkpoint was made; None if there is none, or nobody can tell.
        whole: Whether all of it is there.
        damaged: Whether there is one, but not all of it.
        strays: Files of killed saves.
    """

    created: float | None = None
    whole: bool = False
    damaged: bool = False
    strays: tuple[Entry, ...] = ()


def _look(store: Store) -> _Look:
    found = store.entries(recursive=False)  # before the manifest is read: see `strays`
    try:
        data = find_manifest(store)
        manifest = None if data is None else decode_manifest(data)
    except FormatError:
        return _Look(damaged=True)  # and nobody can tell which files it speaks of
    if manifest is None:
        return _Look(strays=strays(found, None))
    whole = _is_complete(manifest, found) or _is_whole(store)
    return _Look(manifest.created, whole, not whole, strays(found, manifest))


def _created(store: Store) -> float | None:
    """Return when a checkpoint was made; None if there is none that can be read."""
    try:
        data = find_manifest(store)
        return None if data is None else decode_manifest(data).created
    except FormatError:
        return None


def _is_whole(store: Store) -> bool:
    """Tell whether all files are there that the manifest names, though it may be replaced now."""
    last = None
    for _ in range(_ATTEMPTS):
        try:
            manifest = read_manifest(store)
        except FormatError:
            return False
        if manifest.save_id == last:
            return False
        if _is_complete(manifest, store.entries(recursive=False)):
            return True
        last = manifest.save_id
    return False


def _is_complete(manifest: Manifest, found: Iterable[Entry]) -> bool:
    sizes = {entry.name: entry.size for entry in found}
    files = zip(manifest.files.names, manifest.files.sizes.tolist(), strict=True)
    return all(sizes.get(name) == size for name, size in files)


def _folders(store: Store) -> list[str]:
    return [name.rstrip("/") for name in store.list(recursive=False) if name.endswith("/")]


def _within(store: Store, folder: str) -> Store:
    return FolderStore(store, folder) if folder else store


def _by_age(dated: tuple[float, str]) -> tuple[float, list[Any]]:
    """Sort by time, then by name, in which numbers count as such.

    >>> sorted([(1.0, "step-10"), (1.0, "step-9"), (0.5, "x")], key=_by_age)
    [(0.5, 'x'), (1.0, 'step-9'), (1.0, 'step-10')]
    """
    created, name = dated
    parts = re.split("([0-9]+)", name)  # every other one is a number
    return created, [int(part) if n % 2 else part for n, part in enumerate(parts)]
