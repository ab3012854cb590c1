"""How does a checkpoint come to be in a folder where there may be another one, of any format?

A folder counts as the first of the formats that `detect` finds there, and each format has *marks*:
files without which it is not found. A new checkpoint puts its own mark in place, last and at once;
then those of others go, and only then their files. So the old checkpoint can be loaded until the
new one can. Where that cannot be promised, the folder is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import attrs

from ..errors import ExistsError, FormatError, UnsureCommitError
from ..formats.dcp.metadata import METADATA
from ..formats.dcp.ranks import FIRST_RANK, rank_metadata
from ..formats.hf.index import INDEX, SINGLE, indices, plain_files, uncommitted
from ..formats.native.manifest import MANIFEST
from ..formats.sources import FORMATS, open_source
from ..stores.base import Store, StoreError
from .commit import SURE, unsure_commit

__all__ = [
    "Older",
    "committing",
    "find_older",
    "put_file",
    "put_in_place",
    "refuse_folder",
    "remove",
    "retire",
    "take_name",
]

_ORDER: Final = tuple(FORMATS)


@attrs.frozen
class Older:
    """A checkpoint that is in a folder.

    Attributes:
        format: What it is.
        marks: The files whose removal, in this order, ends it: it loads as before, or not at all.
            None if there are no such files.
    """

    format: str
    marks: tuple[str, ...] | None

    def files(self, store: Store) -> tuple[str, ...]:
        """Name its other files; none if nobody can tell them."""
        with suppress(FormatError):
            return tuple(open_source(store, format=self.format).files)
        return ()


def find_older(store: Store) -> list[Older]:
    """Find the checkpoints in a folder, the one that it counts as first."""
    names = set(store.list(recursive=False))
    found = []
    if MANIFEST in names:
        found.append(Older("safetensors", (MANIFEST,)))
    hf = _find_hf(store, names)
    if hf is not None:
        found.append(hf)
    if METADATA in names:
        found.append(Older("dcp", (METADATA,)))
    elif FIRST_RANK in names:
        found.append(Older("dcp", rank_metadata(names)))
    return found


def _find_hf(store: Store, names: set[str]) -> Older | None:
    found = sorted(indices(names), key=lambda name: (name == INDEX, name))
    marks = (*found, SINGLE) if SINGLE in names else tuple(found)
    if marks:
        return Older("hf", marks)
    loose = any(not uncommitted(store, name) for name in plain_files(names))
    return Older("hf", None) if loose else None


def refuse_folder(store: Store, format: str, overwrite: bool) -> None:
    """Refuse to save where a checkpoint is, unless it may and can be replaced.

    Args:
        store: The folder.
        format: What is to be written there.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        ExistsError: There is one that may not be replaced; or one of another format that would
            be there in part for a while.
    """
    root = store.locate()
    if root is not None and os.path.isfile(root):
        raise ExistsError(
            f"{store.url} is a file, and a checkpoint of the format {format!r} is a folder; choose "
            "another place"
        )
    older = find_older(store)
    if older and not overwrite:
        raise ExistsError(
            f"{store.url} holds a checkpoint of the format {older[0].format!r}", can_overwrite=True
        )
    for old in older:
        if old.format != format and not _can_end(store, old, format):
            raise ExistsError(
                f"{store.url} holds a checkpoint of the format {old.format!r}, which one of the "
                f"format {format!r} cannot replace at one instant; choose another folder"
            )


def _can_end(store: Store, old: Older, format: str) -> bool:
    """Say whether a checkpoint of some format can take another's place at one instant."""
    if old.format != "hf":
        return True
    if old.marks is None:
        return False
    if _ORDER.index(format) < _ORDER.index("hf"):
        return True  # from the instant on at which it has a mark of its own
    if len(old.marks) > 1 and not {SINGLE, INDEX} & set(old.marks):
        return False
    rest = plain_files(name for name in store.list(recursive=False) if name != SINGLE)
    return all(uncommitted(store, name) for name in rest)


@contextmanager
def committing(unsure: set[str], save_id: str) -> Iterator[None]:
    """Note that a save may have been committed, unless the block fails so that it surely was not.

    Args:
        unsure: Saves of which nobody can tell; their files must stay.
        save_id: The save.
    """
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
        UnsureCommitError: The store failed, and nobody can tell whether it did so before.
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
        raise unsure_commit(store, error, f"{file} was looked at, which is there") from error


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


def retire(store: Store, format: str, keep: Iterable[str] = ()) -> tuple[str, ...]:
    """Remove the checkpoints of other formats, now that one of this format has its mark.

    Args:
        store: The folder.
        format: What was just written.
        keep: Its files.

    Returns:
        Files that could not be removed, and do no harm.

    Raises:
        UnsureCommitError: The folder still counts as one of another format, or may.
    """
    left: list[str] = []
    for old in _others(store, format):
        marks = old.marks or ()
        files: list[str] = []
        try:
            files += (name for name in old.files(store) if name not in {*keep, *marks})
            _remove_marks(store, old)
        except Exception as error:
            if _ORDER.index(old.format) < _ORDER.index(format):
                doing = f"a checkpoint of the format {old.format!r} was removed"
                raise unsure_commit(store, error, doing) from error
            left += [*marks, *files]
            continue
        left += remove(store, files)
    return tuple(left)


def _others(store: Store, format: str) -> list[Older]:
    """Find the checkpoints of other formats, beside one that was just committed."""
    try:
        return [old for old in find_older(store) if old.format != format and old.marks is not None]
    except Exception as error:
        if format == _ORDER[0]:  # whatever is there, it does not hide the new one
            return []
        raise unsure_commit(store, error, "older checkpoints were looked for") from error


def _remove_marks(store: Store, old: Older) -> None:
    for mark in old.marks or ():
        store.delete([mark])
    store.sync()  # a loss of power must not bring the mark back once files are gone


def remove(store: Store, files: Sequence[str]) -> tuple[str, ...]:
    """Remove files that nothing needs any more; return them if that failed."""
    try:
        if files:
            store.delete(files)
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return tuple(files)
    return ()
