"""Which checkpoint is the newest whole one, and which can go?"""

from __future__ import annotations

import os

import attrs

from shardplan.io.commit import leftovers, read_manifest
from shardplan.io.errors import FormatError
from shardplan.io.folders import FolderStore
from shardplan.io.manifest import MANIFEST, Manifest
from shardplan.io.stores import MissingFileError, Store, open_store

__all__ = ["PruneReport", "latest", "prune"]


def latest(path: str | os.PathLike[str] | Store) -> str | None:
    """Return the newest checkpoint below a folder that is whole, by the time it was made.

    Whole means that its manifest can be read and every file it names is there in its full size.

    Args:
        path: A folder that holds checkpoints, one folder each.

    Returns:
        The name of the checkpoint, as ``path`` and the folder in it; None if there is none.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     latest(folder).removeprefix(folder)
    '/step-100'
    """
    store = open_store(path)
    found = _checkpoints(store)[0]
    return f"{store.url.rstrip('/')}/{found[-1]}" if found else None


@attrs.frozen
class PruneReport:
    """What was removed.

    Attributes:
        removed: Checkpoints, by folder.
        kept: Whole checkpoints that stay, the newest last.
        damaged: Checkpoints that are not whole; they are left alone.
        leftovers: Files of killed saves that were removed.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    damaged: tuple[str, ...]
    leftovers: tuple[str, ...]


def prune(path: str | os.PathLike[str] | Store, *, keep_last: int) -> PruneReport:
    """Remove all but the newest checkpoints, and what killed saves left behind.

    Only whole checkpoints count. Call it while no save is under way below the folder: the files of
    a save that is not committed yet look just like leftovers.

    Args:
        path: A folder that holds checkpoints, one folder each; or a checkpoint, of which only the
            leftovers go.
        keep_last: How many checkpoints stay.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100, 110):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     prune(folder, keep_last=2).removed
    ('step-90',)
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    store = open_store(path)
    whole, damaged = _checkpoints(store)
    doomed = whole[:-keep_last]
    for name in doomed:
        _remove(store, name)
    left = []
    for name in ("", *_folders(store)):
        inside = _within(store, name)
        stray = leftovers(inside)
        inside.delete(stray)
        left += [f"{name}/{file}".lstrip("/") for file in stray]
    return PruneReport(tuple(doomed), tuple(whole[-keep_last:]), tuple(damaged), tuple(left))


def _remove(store: Store, name: str) -> None:
    """Remove a checkpoint, its manifest first: it must never look whole while it is not."""
    inside = _within(store, name)
    files = read_manifest(inside).files.names
    store.delete([f"{name}/{MANIFEST}"])
    store.sync()
    store.delete([f"{name}/{file}" for file in files])


def _checkpoints(store: Store) -> tuple[list[str], list[str]]:
    """Return the folders that hold whole checkpoints, oldest first, and those with damaged ones."""
    whole: list[tuple[float, str]] = []
    damaged = []
    for name in _folders(store):
        inside = _within(store, name)
        if not inside.exists(MANIFEST):
            continue
        try:
            manifest = read_manifest(inside)
            intact = _is_whole(inside, manifest)
        except FormatError:
            intact = False
        if intact:
            whole.append((manifest.created, name))
        else:
            damaged.append(name)
    return [name for _, name in sorted(whole)], damaged


def _is_whole(store: Store, manifest: Manifest) -> bool:
    files = manifest.files
    try:
        return all(
            store.size(name) == size
            for name, size in zip(files.names, files.sizes.tolist(), strict=True)
        )
    except MissingFileError:
        return False


def _folders(store: Store) -> list[str]:
    return [name.rstrip("/") for name in store.list(recursive=False) if name.endswith("/")]


def _within(store: Store, folder: str) -> Store:
    return FolderStore(store, folder) if folder else store
