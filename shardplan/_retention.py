"""Find the newest whole checkpoint of a run, and remove old ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal, SupportsFloat, SupportsIndex, overload

import attrs

from shardplan.io import FormatError, ProgressCallback
from shardplan.io.execute import MIN_AGE, by_save
from shardplan.io.formats import known_formats
from shardplan.io.formats.native import MANIFEST, decode_manifest, find_manifest
from shardplan.io.stores import Entry, FolderStore, Store
from shardplan.planning import Sheet, Table, counted

from ._folder import (
    Look,
    by_age,
    contents,
    is_whole,
    look,
    look_at,
    made,
    open_run,
    refuse_missing,
    within,
)
from ._report import logged
from ._verify import verify as check

_LOG: Final = logging.getLogger("shardplan")


@overload
def latest(path: str | os.PathLike[str]) -> str | None: ...
@overload
def latest(path: Store) -> Store | None: ...
def latest(path: str | os.PathLike[str] | Store) -> str | Store | None:
    """Return the newest checkpoint below a folder that is whole, by the time it was made.

    Whole means that its manifest can be read and every file it names is there in its full size.
    All manifests are read, several at once; files are looked at only until one is found.

    Checkpoints of torch.distributed.checkpoint count as well, by the time at which their
    `.metadata` was written. Those of Hugging Face do not, nor do files of `torch.save`: among the
    steps of a run they are what it started from, or what was made of it.

    Args:
        path: A folder that holds checkpoints, one folder each. Folders that may not be looked into
            are passed over.

    Returns:
        What opens the checkpoint: for a path, ``path`` and the folder in it; for a store, a store,
        with the same options. None if there is none, as before the first save of a run, when not
        even the folder may be there. Of checkpoints made at the same time, that of the last name,
        numbers counted as such: ``step-10`` comes after ``step-9``.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     latest(folder).removeprefix(folder)
    '/step-100'

    Raises:
        StoreError: The path is that of a file, or the store fails.
        ValueError: The folder is itself a checkpoint, and holds none.
    """
    store = open_run(path)
    found = look_at(store, contents(store)[0], made, None)
    dated = {name: step for name, step in found.items() if step is not None}
    if not dated and made(store) is not None:
        raise ValueError(f"{store.url} is a checkpoint; latest takes the folder that holds several")
    ages = [(step.when, name) for name, step in dated.items()]
    for _, name in sorted(ages, key=by_age, reverse=True):
        if is_whole(within(store, name), dated[name].format):
            return FolderStore(store, name) if store is path else f"{store.url.rstrip('/')}/{name}"
    return None


@attrs.frozen(repr=False)
class PruneReport:
    """What was removed, or would be; printed as a table.

    Attributes:
        removed: Checkpoints, by folder.
        kept: Whole checkpoints that stay, the newest last.
        damaged: Checkpoints that are not whole; they are left alone.
        leftovers: Files of killed saves that were removed.
        spared: Files that look like those of a killed save, but are too young to be sure of it.
        replaced: Checkpoints that were to go, and stay, since another save has taken their place
            meanwhile.
        ignored: Checkpoints of other formats, which are left alone.
        denied: Folders that may not be looked into.
        checked: How those that are kept were checked: all their ``bytes``, or only the presence
            and ``sizes`` of their files, as where nothing was to go.
        files: How many files were removed.
        nbytes: How many bytes these had.
        dry_run: Whether nothing was removed, and all of this is what would be.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    damaged: tuple[str, ...]
    leftovers: tuple[str, ...]
    spared: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    checked: Literal["bytes", "sizes"] = "sizes"
    files: int = 0
    nbytes: int = 0
    dry_run: bool = False

    def __repr__(self) -> str:
        return _sheet(self).text()

    def _repr_html_(self) -> str:
        return _sheet(self).html()


def prune(
    path: str | os.PathLike[str] | Store,
    *,
    keep_last: int,
    min_age: float = MIN_AGE,
    verify: bool = True,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> PruneReport:
    """Remove all but the newest checkpoints, and what killed saves left behind.

    Only whole checkpoints count. Before any is removed, every byte of those that stay is checked:
    a damaged one is never removed, and never kept in the place of a sound one. Where none is to be
    removed, that is not needed, and presence and sizes are all that is looked at.

    Only checkpoints of our own format go. Others do not say when they were made, and times of
    files change when they are copied: they are left alone, and listed.

    A checkpoint that another save has overwritten since it was looked at stays. On a disk that
    knows locks, the last look and its removal are one step. Object stores cannot look and delete
    at once: a save that overwrites a checkpoint there between the two, which are a request apart,
    is lost, so do not overwrite what is about to be pruned. The files of a save that is not
    committed yet, and of a checkpoint that is being copied, look just like leftovers: so young
    ones are spared, together with all other files of the same save. Parts of files that a killed
    process was sending to an object store are seen by the service alone; see `ObjectStore`.

    Args:
        path: A folder that holds checkpoints, one folder each; or a checkpoint, to remove only its
            leftovers.
        keep_last: How many checkpoints stay.
        min_age: For how many seconds no file of a killed save must have been written before they
            are removed. Make it longer than any file takes; 0 only if no save can be under way.
        verify: Whether every byte of those that stay is checked; else, only whether all files are
            there in their full sizes.
        dry_run: Whether to remove nothing, and only report what would be.
        progress: Called as ``progress(done_bytes, total_bytes)`` of the bytes to be checked. The
            total grows if a checkpoint proves to be damaged, and another is checked in its place.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (90, 100, 110):
    ...         _ = save({"w": torch.ones(2)}, f"{folder}/step-{step}")
    ...     prune(folder, keep_last=2).removed
    ('step-90',)

    Raises:
        TypeError: ``keep_last`` is not a whole number, or ``min_age`` not a number.
        ValueError: ``keep_last`` is less than 1, or ``min_age`` less than 0.
        MissingFileError: There is no such folder on the disk.
    """
    _check_options(keep_last, min_age)
    store = open_run(path)
    refuse_missing(path, store)
    inner, loose = contents(store)
    found = look_at(store, ["", *inner], look, Look(denied=True))
    whole = _whole(found)
    if verify and len(whole) > keep_last:
        kept, bad = _sound(store, found, whole, keep_last, progress)
    else:
        kept, bad = whole[-keep_last:], set()
    doomed = [name for name in whole if name not in kept and name not in bad]
    fates = ["removed" if dry_run else _remove(store, name, found[name].save_id) for name in doomed]
    removed, replaced = (
        tuple(name for name, fate in zip(doomed, fates, strict=True) if fate == what)
        for what in ("removed", "replaced")
    )
    old, spared = _tidy(store, found, min_age, dry_run)
    report = PruneReport(
        removed,
        tuple(kept),
        tuple(name for name in inner if found[name].damaged or name in bad),
        tuple(entry.name for entry in old),
        tuple(entry.name for entry in spared),
        replaced,
        (*(name for name in inner if found[name].foreign), *_single_files(store, loose)),
        tuple(name for name in inner if found[name].denied),
        "bytes" if verify and len(whole) > keep_last else "sizes",
        sum(found[name].files for name in removed) + len(old),
        sum(found[name].nbytes for name in removed) + sum(entry.size for entry in old),
        dry_run,
    )
    return logged(report, store)


def _sheet(report: PruneReport) -> Sheet:
    gone = "would go" if report.dry_run else "gone"
    checkpoints, left = (
        counted(len(names), word)
        for names, word in ((report.removed, "checkpoint"), (report.leftovers, "file"))
    )
    kept = counted(len(report.kept), "checkpoint")
    title = f"{checkpoints} and {left} of killed saves {gone}, {kept} kept"
    fates = {
        gone: report.removed,
        f"{gone}, left by a killed save": report.leftovers,
        "spared, perhaps of a save under way": report.spared,
        "damaged, left alone": report.damaged,
        "overwritten meanwhile, left alone": report.replaced,
        "of another format, left alone": report.ignored,
        "may not be read, left alone": report.denied,
        "kept": report.kept,
    }
    rows = [(name, fate) for fate, names in fates.items() for name in names]
    return Sheet(title, [Table(("checkpoint", "what became of it"), rows)] if rows else [])


def _check_options(keep_last: int, min_age: float) -> None:
    if isinstance(keep_last, bool) or not isinstance(keep_last, SupportsIndex):
        raise TypeError(
            f"keep_last says how many checkpoints stay, as a whole number; not {keep_last!r}"
        )
    if isinstance(min_age, bool) or not isinstance(min_age, SupportsFloat):
        raise TypeError(f"min_age says how many seconds, as a number; not {min_age!r}")
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    if not min_age >= 0:
        raise ValueError(f"min_age must be at least 0 seconds, not {min_age}")


def _whole(found: Mapping[str, Look]) -> list[str]:
    """Return the checkpoints whose files are all there, the newest last."""
    dated = [
        (look.created, name)
        for name, look in found.items()
        if name and look.whole and look.created is not None
    ]
    return [name for _, name in sorted(dated, key=by_age)]


def _single_files(store: Store, files: Sequence[str]) -> list[str]:
    """Name the files that are checkpoints of their own."""
    formats = [format for format in known_formats() if format.is_file]
    if MANIFEST in files:
        return []
    return [name for name in files if any(format.detect(store, name) for format in formats)]


def _sound(
    store: Store,
    found: Mapping[str, Look],
    whole: Sequence[str],
    count: int,
    tell: ProgressCallback | None,
) -> tuple[list[str], set[str]]:
    """Check checkpoints, the newest first, until enough are sound; name these and the damaged."""
    sound, bad, left, done = list[str](), set[str](), list(whole), 0
    while left and len(sound) < count:
        total = done + sum(found[name].nbytes for name in left[len(sound) - count :])
        name = left.pop()
        try:
            fine = check(within(store, name), progress=_shifted(tell, done, total)).ok
        except FormatError:
            continue  # it is gone: another process prunes, too
        finally:
            done += found[name].nbytes
        if fine:
            sound.insert(0, name)
        else:
            bad.add(name)
    return sound, bad


def _shifted(tell: ProgressCallback | None, done: int, total: int) -> ProgressCallback | None:
    """Report the progress of one checkpoint as that of all, given what was done before it."""
    return tell and (lambda some, _: tell(min(done + some, total), total))


def _remove(store: Store, name: str, save_id: str | None) -> Literal["removed", "replaced", "gone"]:
    """Remove a checkpoint, its manifest first: it must never look whole while it is not."""
    try:
        data = find_manifest(within(store, name))
        if data is None:
            return "gone"  # another process removes it
        manifest = decode_manifest(data)
    except FormatError:
        return "replaced"  # by something that cannot be read
    if manifest.save_id != save_id:
        return "replaced"
    if not store.delete_same(f"{name}/{MANIFEST}", data):
        return _remove(store, name, save_id)  # look again: something came between
    _LOG.info("removed %s of %s", name, store.url)
    store.sync()
    store.delete([f"{name}/{file}" for file in manifest.files.names])
    return "removed"


def _tidy(
    store: Store, found: Mapping[str, Look], min_age: float, dry_run: bool
) -> tuple[list[Entry], list[Entry]]:
    """Remove what killed saves left in some folders, unless it is too young."""
    left, spared = list[Entry](), list[Entry]()
    for name, seen in found.items():
        inside = [attrs.evolve(e, name=f"{name}/{e.name}".lstrip("/")) for e in seen.strays]
        old, young = by_save(inside, min_age)
        left += old
        spared += young
    if left and not dry_run:
        _LOG.info("removing %d files of killed saves in %s", len(left), store.url)
        store.delete([entry.name for entry in left])
    return left, spared
