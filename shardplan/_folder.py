"""The folders of a run: which of them hold a checkpoint, and whether it is whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from shardplan.io import FormatError, default_pool
from shardplan.io.execute import strays
from shardplan.io.formats import find_any, find_format, known_formats
from shardplan.io.formats.native import Manifest, decode_manifest, find_manifest
from shardplan.io.stores import Entry, FolderStore, MissingFileError, Store, StoreError, open_store

_ATTEMPTS: Final = 3
_MANIFEST: Final = 32 << 20  # bytes of memory that reading most manifests takes
_T = TypeVar("_T")


@attrs.frozen
class Look:
    """What was found in a folder.

    Attributes:
        created: When its checkpoint was made; None if there is none, or that is not known.
        save_id: Which save made it.
        whole: Whether all of it is there.
        damaged: Whether there is one, but not all of it.
        strays: Files of killed saves.
        files: How many files the checkpoint has, its manifest among them.
        nbytes: How many bytes these have.
        foreign: Whether there is a checkpoint of another format.
        denied: Whether it may not be looked into.
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
    """Look into several folders of a store at once; the empty name is the root.

    ``refused`` is the result for a folder that may not be read, such as ``lost+found`` on many
    disks. The root must be readable.
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
        return Look(damaged=True)  # and it may need any file
    left = _strays(store, found, manifest)
    if manifest is None or data is None:
        files = sum(not entry.name.endswith("/") for entry in found)
        return Look(strays=left, foreign=files > len(left) and find_any(store) is not None)
    sizes = {entry.name: entry.size for entry in found}
    saved = zip(manifest.files.names, manifest.files.sizes.tolist(), strict=True)
    whole = all(sizes.get(name) == size for name, size in saved) or is_whole(store, "safetensors")
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
        return strays(store, found, set() if manifest is None else set(manifest.files.names))
    except (FormatError, StoreError):
        return ()  # a checkpoint is damaged, or gone by now, and may need any of them


@attrs.frozen
class Made:
    """A checkpoint of a run: its format, and when it was made, in seconds since 1970."""

    format: str
    when: float


def made(store: Store) -> Made | None:
    """Return when the checkpoint in a folder was made; None if there is none that can be read."""
    try:
        for format in known_formats():
            when = format.made(store)
            if when is not None:
                return Made(format.name, when)
    except FormatError:
        pass
    return None


def is_whole(store: Store, format: str) -> bool:
    """Return whether all files of a checkpoint are there, though it may be replaced meanwhile."""
    last = None
    for _ in range(_ATTEMPTS):
        try:
            source = find_format(format).open(store)
        except FormatError:
            return False
        if not source.missing():
            return True
        if source.save_id == last:
            return False
        last = source.save_id
    return False


def open_run(path: str | os.PathLike[str] | Store) -> Store:
    """Open a folder that holds checkpoints; it need not be there yet, but may not be a file."""
    store = open_store(path)
    root = store.locate()
    if root is not None and os.path.isfile(root):
        reason, remedy = "it is a file", "give the folder that holds the checkpoints"
        raise StoreError("list", store.url, reason, remedy=remedy, kind="path")
    return store


def refuse_missing(path: str | os.PathLike[str] | Store, store: Store) -> None:
    """Refuse a path to a folder that is not there: it is probably misspelt.

    An open store may be made yet, and in a bucket no folder is there without a file in it.
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
    """Sort by time, then by name, with numbers in numeric order.

    >>> sorted([(1.0, "step-10"), (1.0, "step-9"), (0.5, "x")], key=by_age)
    [(0.5, 'x'), (1.0, 'step-9'), (1.0, 'step-10')]
    """
    created, name = dated
    parts = re.split("([0-9]+)", name)  # every other one is a number
    return created, [int(part) if n % 2 else part for n, part in enumerate(parts)]
