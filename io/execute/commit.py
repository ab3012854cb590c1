"""Commits: how a checkpoint comes to exist at one instant, whatever its format.

A folder holds a checkpoint once its *mark* is there: a manifest, an index, `.metadata`. A writer
puts it in place last and at once; only then does it remove the files of an older checkpoint. So the
old checkpoint can be loaded until the new one can.

A killed save leaves files behind that no checkpoint needs. The files of a save that is under way
look just the same, so `tidy` leaves them alone until no file of the same save was written for an
hour.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from shardplan.planning.storage import LeftFile, retain_files

from ..errors import ExistsError, FormatError, UnsureCommitError
from ..formats.base import WriteJob, Writer
from ..formats.registry import find_any, known_formats
from ..stores.base import Entry, Store, StoreError
from ..stores.local_files import is_temporary

SURE: Final = frozenset({"missing", "exists", "denied", "full", "short", "long", "path"})
"""The kinds of error after which a replacement has surely not happened, and never will."""
MIN_AGE: Final = 3600.0
"""For how many seconds no file of a killed save must have been written before they are removed."""

F = TypeVar("F")
R = TypeVar("R")
_SAVE: Final = re.compile(r"[0-9a-f]{12}")  # how saves are called; users' own words are not


def refuse_folder(store: Store, format: str, overwrite: bool) -> None:
    """Refuse to save where a checkpoint is, unless it is of this format and may be replaced."""
    root = store.locate()
    if root is not None and os.path.isfile(root):
        raise ExistsError(
            f"{store.url} is a file, but a checkpoint of the format {format!r} is a folder; choose "
            "another place"
        )
    older = find_any(store)
    if older is not None and older.name != format:
        raise ExistsError(
            f"{store.url} holds a checkpoint of the format {older.name!r}, which a save as "
            f"{format!r} does not replace; choose another folder, or remove that checkpoint first"
        )
    if older is not None and not overwrite:
        raise ExistsError(f"{store.url} holds a checkpoint", can_overwrite=True)


class FolderWriter(Writer):
    """What writers of checkpoints that are folders share; ``format`` is the format's name."""

    format: str

    def __init__(self) -> None:
        self.unsure: set[str] = set()  # saves that may have been committed, or still may be

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `refuse_folder`."""
        refuse_folder(store, self.format, overwrite)

    @contextmanager
    def committing(self, save_id: str) -> Iterator[None]:
        """Note that a save may have been committed, unless the block surely failed before that."""
        self.unsure.add(save_id)  # an interrupt comes at any moment
        try:
            yield
        except UnsureCommitError:
            raise
        except Exception:
            self.unsure.discard(save_id)
            raise

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files, unless a checkpoint may need them; see `Writer.discard`."""
        if save_id not in self.unsure:
            with suppress(Exception):
                store.delete(self.unneeded(store, report, save_id))

    def unneeded(self, store: Store, report: bytes, save_id: str) -> Iterable[str]:
        """Name the files of a report that no checkpoint in the store names."""
        raise NotImplementedError


def write_all(
    job: WriteJob,
    files: Mapping[str, F],
    write: Callable[[F], R],
    nbytes: int | Callable[[F], int],
    also: Iterable[str] = (),
) -> list[R]:
    """Write files, given what describes each by name; if one fails, none is left.

    ``also`` names what ``write`` makes besides.
    """
    try:
        written = job.pool.map(write, files.values(), nbytes=nbytes)
        job.store.sync()  # another process may commit, and cannot sync what it did not write
        return written
    except BaseException:
        with suppress(Exception):
            job.store.delete([*files, *also])
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


def remove_save(store: Store, save_id: str) -> None:
    """Remove the files of a save that surely failed, as far as their names show it."""
    with suppress(Exception):
        files = store.list(recursive=False)
        store.delete([name for name in files if _save_of(name) == save_id])


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

    List first, read the manifest second: a save that commits in between then protects its
    files. Files in ``known`` belong to a checkpoint. If ``file`` is one,
    what was to become this file is picked as well.
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
        present = [format for format in known_formats() if format.detect(store)]
        claimed = {name for format in present for name in format.open(store).files}
        suspects = [entry for entry in suspects if entry.name not in claimed]
    return tuple(suspects)


def _save_of(name: str) -> str | None:
    """Return the save that a file's name speaks of; None for files that are not ours."""
    saves = (format.save_of(name) for format in known_formats())
    return next((save for save in saves if save and _SAVE.fullmatch(save)), None)


def by_save(found: Collection[Entry], min_age: float) -> tuple[list[Entry], list[Entry]]:
    """Separate old files from young ones; those of one save stay together."""
    files = []
    for entry in found:
        save = _save_of(entry.name.rpartition("/")[2]) or entry.name
        files.append(LeftFile(entry.name, save, entry.modified))
    old = set(retain_files(files, time.time() - min_age if min_age else math.inf).drop)
    return [e for e in found if e.name in old], [e for e in found if e.name not in old]


def tidy(store: Store, known: Collection[str] = (), file: str = "") -> None:
    """Remove what killed saves left long ago beside a checkpoint that was just committed."""
    try:
        left = strays(store, store.entries(recursive=False), known, file)
        if left:
            store.delete([entry.name for entry in by_save(left, MIN_AGE)[0]])
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return
