"""Commits: how a checkpoint comes to exist at one instant, whatever its format.

A folder holds a checkpoint once its *mark* is there: a manifest, an index, `.metadata`. A writer
puts it in place last and at once; only then does it remove the files of an older checkpoint. So the
old checkpoint can be loaded until the new one can.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ..errors import ExistsError, UnsureCommitError
from ..formats.registry import find_any
from ..stores.base import Store, StoreError

SURE: Final = frozenset({"missing", "exists", "denied", "full", "short", "long", "path"})
"""The kinds of error after which a replacement has surely not happened, and never will."""


def refuse_folder(store: Store, format: str, overwrite: bool) -> None:
    """Refuse to save where a checkpoint is, unless it is of this format and may be replaced."""
    root = store.locate()
    if root is not None and os.path.isfile(root):
        raise ExistsError(
            f"{store.url} is a file, and a checkpoint of the format {format!r} is a folder; choose "
            "another place"
        )
    older = find_any(store)
    if older is not None and older.name != format:
        raise ExistsError(
            f"{store.url} holds a checkpoint of the format {older.name!r}, which one of the format "
            f"{format!r} does not replace; choose another folder, or remove that checkpoint first"
        )
    if older is not None and not overwrite:
        raise ExistsError(f"{store.url} holds a checkpoint", can_overwrite=True)


@contextmanager
def committing(unsure: set[str], save_id: str) -> Iterator[None]:
    """Note that a save may have been committed, unless the block surely failed before that."""
    unsure.add(save_id)  # an interrupt comes at any moment
    try:
        yield
    except UnsureCommitError:
        raise
    except Exception:
        unsure.discard(save_id)
        raise


def put_in_place(store: Store, mark: str, data: bytes, *, overwrite: bool = True) -> None:
    """Put a mark in place: from this instant on there is a checkpoint; see `Store.replace`.

    Raises:
        ExistsError: Another save was faster, and its mark must not be replaced.
        UnsureCommitError: The store failed, and it may have happened before that.
        StoreError: It surely did not happen.
    """
    try:
        store.replace(mark, data, overwrite=overwrite)
    except Exception as error:
        kind = error.kind if isinstance(error, StoreError) else ""
        if kind == "exists" and not overwrite:
            if _holds(store, mark, data):
                return  # a request whose answer was lost was sent again
            raise _overtaken(store) from None
        if kind in SURE:
            raise
        raise unsure_commit(store, error, f"{mark} was put in place") from error


def _holds(store: Store, file: str, data: bytes) -> bool:
    try:
        return store.read_all(file, limit=len(data)) == data
    except Exception as error:
        if isinstance(error, StoreError) and error.kind == "long":
            return False
        raise unsure_commit(store, error, f"the {file} that is there was read") from error


def _overtaken(store: Store) -> ExistsError:
    return ExistsError(f"another save into {store.url} was faster", can_overwrite=True)


def put_file(store: Store, file: str, name: str, *, overwrite: bool) -> None:
    """Give a file that is a checkpoint of its own the name under which it counts as one.

    Raises:
        ExistsError: Another save was faster, and what it wrote must not be replaced.
        UnsureCommitError: A loss of power may undo it.
        StoreError: It surely did not happen.
    """
    sure = SURE
    try:
        if overwrite or not store.link(file, name):
            if not overwrite and store.exists(name):
                raise _overtaken(store)
            store.rename(file, name)
        sure = frozenset()  # it is there: what fails from here on leaves that in doubt
        store.delete([file])
        store.sync()
    except StoreError as error:
        if error.kind in sure:
            raise
        raise unsure_commit(store, error, f"{name} was put in place") from error


def take_name(store: Store, file: str, name: str) -> bool:
    """Give a file another name, if that is free and the store has links; return whether it was.

    No two savers can take the same name, and neither can take the other's file.
    """
    if not store.link(file, name):
        return False
    store.delete([file])
    return True


def remove(store: Store, files: Sequence[str]) -> tuple[str, ...]:
    """Remove files that nothing needs any more; return them if that failed."""
    try:
        if files:
            store.delete(files)
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return tuple(files)
    return ()


def unsure_commit(store: Store, error: Exception, doing: str) -> UnsureCommitError:
    """Make the error for a commit that may have happened."""
    reason = error.reason if isinstance(error, StoreError) else str(error)
    return UnsureCommitError(
        "commit",
        store.url,
        f"the store failed while {doing} ({reason})",
        remedy="the checkpoint may exist nevertheless, so its files were kept: look with "
        "open_checkpoint, or save again; prune removes what is not needed",
        kind="unsure",
    )
