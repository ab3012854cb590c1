"""What lies in the folders of a run: which of them hold a checkpoint, and is all of it there?"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from shardplan.io import FormatError, default_pool
from shardplan.io.execute import find_manifest, find_older, spoken_of, strays
from shardplan.io.formats import lost_parts, open_source
from shardplan.io.formats.dcp import FIRST_RANK, METADATA, rank_metadata
from shardplan.io.formats.native import Manifest, decode_manifest
from shardplan.io.stores import Entry, FolderStore, MissingFileError, Store, StoreError, open_store

__all__ = [
    "Look",
    "by_age",
    "contents",
    "is_whole",
    "look",
    "look_at",
    "made",
    "open_run",
    "refuse_missing",
    "within",
]

_ATTEMPTS: Final = 3
_MANIFEST: Final = 32 << 20  # bytes of memory that reading most manifests takes
_T = TypeVar("_T")


@attrs.frozen
class Look:
    """What a look into a folder told.

    Attributes:
        created: When its checkpoint was made; None if there is none, or nobody can tell.
        save_id: Which save made it.
        whole: Whether all of it is there.
        damaged: Whether there is one, but not all of it.
        strays: Files of killed saves.
        files: How many files the checkpoint has, its manifest among them.
        nbytes: How many bytes these have.
        foreign: Whether there is a checkpoint of another format.
        denied: Whether nobody let us look.
    """

    created: float | None = None
    save_id: str | None = None
    whole: bool = False
    damaged: bool = False
    strays: tuple[Entry, ...] = ()
    files: int = 0
    nbytes: int = 0
    foreign: bool = False
    denied: bool = False


def look_at(
    store: Store, names: Sequence[str], see: Callable[[Store], _T], refused: _T
) -> Mapping[str, _T]:
    """Look into several folders of a store at once.

    Args:
        store: The store.
        names: The folders; the empty name is the root.
        see: How to look into one.
        refused: What to say of a folder that may not be looked into: on many disks there is one,
            ``lost+found``. The root must be open.
    """

    def see_one(name: str) -> _T:
        try:
            return see(within(store, name))
        except StoreError as error:
            if error.kind != "denied" or not name:
                raise
            return refused

    cost = _MANIFEST + store.staging
    return dict(zip(names, default_pool().map(see_one, names, nbytes=cost), strict=True))


def look(store: Store) -> Look:
    """Look into a folder for a checkpoint of our own format, and for what killed saves left."""
    found = store.entries(recursive=False)  # before the manifest is read: see `strays`
    try:
        data = find_manifest(store)
        manifest = None if data is None else decode_manifest(data)
    except FormatError:
        return Look(damaged=True)  # and nobody can tell which files it speaks of
    left = _strays(store, found, manifest)
    if manifest is None or data is None:
        files = sum(not entry.name.endswith("/") for entry in found)
        return Look(strays=left, foreign=files > len(left) and bool(find_older(store)))
    whole = _is_complete(manifest, found) or is_whole(store)
    return Look(
        manifest.created,
        manifest.save_id,
        whole,
        not whole,
        left,
        len(manifest.files) + 1,
        int(manifest.files.sizes.sum()) + len(data),
    )


def _strays(store: Store, found: Sequence[Entry], manifest: Manifest | None) -> tuple[Entry, ...]:
    try:
        return strays(found, spoken_of(store, found, manifest))
    except (FormatError, StoreError):
        return ()  # nobody can tell what metadata speaks of that is damaged, or gone by now


def made(store: Store) -> float | None:
    """Return when a checkpoint was made; None if there is none that can be read.

    Our own say it. Of one of torch.distributed.checkpoint it is when its metadata was written.
    """
    try:
        data = find_manifest(store)
        if data is not None:
            return decode_manifest(data).created
    except FormatError:
        return None
    found = {entry.name: entry.written for entry in store.entries(recursive=False)}
    ranks = [found[name] for name in rank_metadata(found)] if FIRST_RANK in found else []
    return found.get(METADATA, max(ranks, default=None))


def is_whole(store: Store) -> bool:
    """Tell whether all files are there that a checkpoint needs, though it may be replaced now."""
    last = None
    for _ in range(_ATTEMPTS):
        try:
            data = find_manifest(store)
            if data is None:
                return not lost_parts(open_source(store, format="dcp"))
            manifest = decode_manifest(data)
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


def open_run(path: str | os.PathLike[str] | Store) -> Store:
    """Open a folder that holds checkpoints; it need not be there yet.

    Raises:
        StoreError: It is a file.
    """
    store = open_store(path)
    root = store.locate()
    if root is not None and os.path.isfile(root):
        reason, remedy = "it is a file", "give the folder that holds the checkpoints"
        raise StoreError("list", store.url, reason, remedy=remedy, kind="path")
    return store


def refuse_missing(path: str | os.PathLike[str] | Store, store: Store) -> None:
    """Refuse a path to a folder that is not there: it is probably misspelt.

    An open store may be made yet, and in a bucket no folder is there without a file in it.

    Raises:
        MissingFileError: There is no such folder.
    """
    root = store.locate()
    if store is not path and root is not None and not os.path.isdir(root):
        raise MissingFileError(
            "list", store.url, "there is no such folder", remedy="check the path", kind="missing"
        )


def contents(store: Store) -> tuple[list[str], list[str]]:
    """Name the folders of a store, and the files."""
    found = store.list(recursive=False)
    inner = [name.rstrip("/") for name in found if name.endswith("/")]
    return inner, [name for name in found if not name.endswith("/")]


def within(store: Store, folder: str) -> Store:
    """Return a folder of a store; for the empty name, the store."""
    return FolderStore(store, folder) if folder else store


def by_age(dated: tuple[float, str]) -> tuple[float, list[Any]]:
    """Sort by time, then by name, in which numbers count as such.

    >>> sorted([(1.0, "step-10"), (1.0, "step-9"), (0.5, "x")], key=by_age)
    [(0.5, 'x'), (1.0, 'step-9'), (1.0, 'step-10')]
    """
    created, name = dated
    parts = re.split("([0-9]+)", name)  # every other one is a number
    return created, [int(part) if n % 2 else part for n, part in enumerate(parts)]
