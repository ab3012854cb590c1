"""Find the newest whole checkpoint of a run, and remove old ones; `retain` decides which."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, SupportsFloat, TypeVar, overload

import attrs

from shardplan.io import FormatError, ProgressCallback, default_pool
from shardplan.io.execute import MIN_AGE, by_save, strays
from shardplan.io.formats import find_any, find_format, known_formats
from shardplan.io.formats.native import MANIFEST, decode_manifest, find_manifest
from shardplan.io.stores import Entry, Location, MissingFileError, Store, StoreError, open_store
from shardplan.planning import Sheet, Table, counted
from shardplan.planning.storage import Keep, RunEntry, by_age, retain

from ._report import LOG, Printed, logged
from ._verify import verify as check

_ATTEMPTS: Final = 3
_MANIFEST: Final = 32 << 20  # bytes of memory that reading most manifests takes
_T = TypeVar("_T")


@overload
def latest(path: str | os.PathLike[str]) -> str | None: ...
@overload
def latest(path: Store) -> Store | None: ...
def latest(path: str | os.PathLike[str] | Store) -> str | Store | None:
    """Return the newest checkpoint below a folder that is whole, by the time it was made.

    Whole means that its manifest can be read and every file it names is there in its full size.
    Checkpoints of torch.distributed.checkpoint count by the time of their `.metadata`; those of
    Hugging Face and files of `torch.save` do not count.

    Args:
        path: A folder that holds checkpoints, one folder each; unreadable folders are skipped.

    Returns:
        A path, or a store if ``path`` is one; None if there is no checkpoint, or no folder yet. Of
        checkpoints made at the same time, the last by name: ``step-10`` comes after ``step-9``.

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
    store = _open_run(path)
    found = look_at(store, _contents(store)[0], made, None)
    dated = {name: step for name, step in found.items() if step is not None}
    if not dated and made(store) is not None:
        raise ValueError(f"{store.url} is a checkpoint; latest takes the folder that holds several")
    for entry in reversed(by_age(RunEntry(name, step.when) for name, step in dated.items())):
        if is_whole(_within(store, entry.name), dated[entry.name].format):
            folder = store.folder(entry.name)
            return folder if store is path else f"{store.url.rstrip('/')}/{entry.name}"
    return None


@attrs.frozen(repr=False)
class PruneReport(Printed):
    """What was removed, or would be; printed as a table.

    Attributes:
        removed: Checkpoints, by folder.
        kept: Whole checkpoints that stay, the newest last.
        damaged: Checkpoints that are not whole; they are left alone.
        leftovers: Files of killed saves that were removed.
        spared: Files that look like those of a killed save, but are too young to be sure.
        replaced: Checkpoints that stay because another save overwrote them meanwhile.
        ignored: Checkpoints of other formats, which are left alone.
        denied: Folders that may not be read.
        checked: How those that are kept were checked: all ``bytes``, or only ``sizes`` of files.
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

    @property
    def _sheet(self) -> Sheet:
        gone = "would go" if self.dry_run else "gone"
        checkpoints, left = len(self.removed), len(self.leftovers)
        went = f"{counted(checkpoints, 'checkpoint')} and {counted(left, 'file')} of killed saves"
        fates = {
            gone: self.removed,
            f"{gone}, left by a killed save": self.leftovers,
            "spared, perhaps of a save under way": self.spared,
            "damaged, left alone": self.damaged,
            "overwritten meanwhile, left alone": self.replaced,
            "of another format, left alone": self.ignored,
            "may not be read, left alone": self.denied,
            "kept": self.kept,
        }
        rows = [(name, fate) for fate, names in fates.items() for name in names]
        tables = [Table(("checkpoint", "what became of it"), rows)] if rows else []
        return Sheet(f"{went} {gone}, {counted(len(self.kept), 'checkpoint')} kept", tables)


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

    Only whole checkpoints of our own format count; others are left alone and listed. Before any is
    removed, every byte of those that stay is checked: a damaged one is never removed, and never
    kept in the place of a sound one.

    A checkpoint that another save has overwritten meanwhile stays. On a disk that knows locks, the
    last look and the removal are one step; object stores cannot do that, so do not overwrite there
    what is about to be pruned. Files of a save under way look like those of a killed one: young
    ones are spared, with all other files of the same save.

    Args:
        path: A folder that holds checkpoints, one folder each; or a checkpoint, to remove only its
            leftovers.
        keep_last: How many checkpoints stay.
        min_age: Seconds since the last file of a killed save was written, before its files are
            removed. Make it longer than any file takes; 0 only if no save can be under way.
        verify: Whether every byte of those that stay is checked; else, only the sizes of files.
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
    policy = Keep(keep_last)
    if isinstance(min_age, bool) or not isinstance(min_age, SupportsFloat):
        raise TypeError(f"min_age must be a number of seconds, not {min_age!r}")
    if not min_age >= 0:
        raise ValueError(f"min_age must be at least 0 seconds, not {min_age}")
    store = _open_run(path)
    root = store.locate()
    # A path is probably misspelt; an open store may be made yet, and a bucket has no folders.
    if store is not path and root is not None and not os.path.isdir(root):
        raise MissingFileError(
            "list", store.url, "there is no such folder", remedy="check the path", kind="missing"
        )
    inner, loose = _contents(store)
    found = look_at(store, ["", *inner], _look, _Look("denied"))
    entries = [RunEntry(n, found[n].created, found[n].state == "whole") for n in inner]
    check_all = verify and bool(retain(entries, policy).drop)
    unsound = _unsound(store, found, entries, policy, progress) if check_all else {}
    kept, doomed = retain((e for e in entries if e.name not in unsound), policy)
    states = {name: found[name].state for name in inner} | unsound
    for name in doomed:
        states[name] = "removed" if dry_run else _remove(store, name, found[name].save_id)
    old, spared = _leftovers(found, min_age)
    if old and not dry_run:
        LOG.info("removing %d files of killed saves in %s", len(old), store.url)
        store.delete([entry.name for entry in old])

    def of(state: _State, names: Sequence[str] = inner) -> tuple[str, ...]:
        return tuple(name for name in names if states[name] == state)

    gone = [found[name] for name in of("removed")]
    report = PruneReport(
        removed=of("removed", doomed),
        kept=kept,
        damaged=of("damaged"),
        leftovers=tuple(entry.name for entry in old),
        spared=tuple(entry.name for entry in spared),
        replaced=of("replaced", doomed),
        ignored=(*of("foreign"), *_single_files(store, loose)),
        denied=of("denied"),
        checked="bytes" if check_all else "sizes",
        files=sum(one.files for one in gone) + len(old),
        nbytes=sum(one.nbytes for one in gone) + sum(entry.size for entry in old),
        dry_run=dry_run,
    )
    return logged(report, store)


_State = Literal["none", "whole", "damaged", "foreign", "denied", "gone", "removed", "replaced"]
"""What is known of a folder: what it holds, and then what became of it."""


@attrs.frozen
class _Look:
    """What was found in a folder: a checkpoint of ours, and ``strays`` of killed saves."""

    state: _State
    strays: tuple[Entry, ...] = ()
    created: float | None = None
    save_id: str | None = None
    files: int = 0  # with the manifest
    nbytes: int = 0


def _single_files(store: Store, files: Sequence[str]) -> list[str]:
    """Name the files that are checkpoints of their own."""
    formats = [] if MANIFEST in files else [f for f in known_formats() if f.is_file]
    return [name for name in files if any(format.detect(store, name) for format in formats)]


def _unsound(
    store: Store,
    found: Mapping[str, _Look],
    entries: Sequence[RunEntry],
    policy: Keep,
    progress: ProgressCallback | None,
) -> dict[str, _State]:
    """Check those that would stay, the newest first, until all that would are sound."""
    sound, unsound, done = set[str](), dict[str, _State](), 0
    while True:
        left = (entry for entry in entries if entry.name not in unsound)
        unchecked = [name for name in retain(left, policy).keep if name not in sound]
        if not unchecked:
            return unsound
        total, name = done + sum(found[name].nbytes for name in unchecked), unchecked[-1]
        of_all = progress and partial(_progress_of_all, progress, done, total)
        try:
            if check(_within(store, name), progress=of_all).ok:
                sound.add(name)
            else:
                unsound[name] = "damaged"
        except FormatError:
            unsound[name] = "gone"  # another process prunes, too
        done += found[name].nbytes


def _progress_of_all(
    progress: ProgressCallback, before: int, total: int, done: int, _: int
) -> None:
    """Report the progress of one checkpoint as that of all."""
    progress(min(before + done, total), total)


def _remove(store: Store, name: str, save_id: str | None) -> _State:
    """Remove a checkpoint, its manifest first: it must never look whole while it is not."""
    try:
        data = find_manifest(_within(store, name))
        if data is None:
            return "gone"  # another process removes it
        manifest = decode_manifest(data)
    except FormatError:
        return "replaced"  # by something that cannot be read
    if manifest.save_id != save_id:
        return "replaced"
    if not store.delete_same(f"{name}/{MANIFEST}", data):
        return _remove(store, name, save_id)  # look again: something came between
    LOG.info("removed %s of %s", name, store.url)
    store.sync()
    store.delete([f"{name}/{file}" for file in manifest.files.names])
    return "removed"


def _leftovers(found: Mapping[str, _Look], min_age: float) -> tuple[list[Entry], list[Entry]]:
    """Separate the files of killed saves that may go from those that are too young."""
    strays = [
        attrs.evolve(entry, name=f"{name}/{entry.name}".lstrip("/"))
        for name, seen in found.items()
        for entry in seen.strays
    ]
    return by_save(strays, min_age)


def look_at(
    store: Store, names: Sequence[str], see: Callable[[Store], _T], refused: _T
) -> Mapping[str, _T]:
    """Look into several folders of a store at once; the empty name is the root.

    ``refused`` is the result for a folder that may not be read, such as ``lost+found`` on many
    disks. The root must be readable.
    """

    def see_one(name: str) -> _T:
        try:
            return see(_within(store, name))
        except StoreError as error:
            if error.kind != "denied" or not name:
                raise
            return refused

    cost = _MANIFEST + store.staging
    return dict(zip(names, default_pool().map(see_one, names, nbytes=cost), strict=True))


def _look(store: Store) -> _Look:
    """Look into a folder for a checkpoint of our own format, and for what killed saves left."""
    listed = store.entries(recursive=False)  # before the manifest is read: see `strays`
    try:
        data = find_manifest(store)
        manifest = None if data is None else decode_manifest(data)
    except FormatError:
        return _Look("damaged")  # and it may need any file
    left: tuple[Entry, ...] = ()
    with suppress(FormatError, StoreError):  # a checkpoint that may need any file, or is gone
        left = strays(store, listed, set() if manifest is None else set(manifest.files.names))
    if manifest is None or data is None:
        files = sum(not entry.name.endswith("/") for entry in listed)
        is_foreign = files > len(left) and find_any(store) is not None
        return _Look("foreign" if is_foreign else "none", left)
    sizes = {entry.name: entry.size for entry in listed}
    saved = zip(manifest.files.names, manifest.files.sizes.tolist(), strict=True)
    whole = all(sizes.get(name) == size for name, size in saved) or is_whole(store, "safetensors")
    nbytes = int(manifest.files.sizes.sum()) + len(data)
    state: _State = "whole" if whole else "damaged"
    files = len(manifest.files) + 1
    return _Look(state, left, manifest.created, manifest.save_id, files, nbytes)


@attrs.frozen
class Made:
    """A checkpoint of a run: its format, and when it was made, in seconds since 1970."""

    format: str
    when: float


def made(store: Store) -> Made | None:
    """Return when the checkpoint in a folder was made; None if there is none that can be read."""
    with suppress(FormatError):
        for format in known_formats():
            when = format.made(store)
            if when is not None:
                return Made(format.name, when)
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


def _open_run(path: Location) -> Store:
    """Open a folder that holds checkpoints; it need not be there yet, but may not be a file."""
    store = open_store(path)
    root = store.locate()
    if root is not None and os.path.isfile(root):
        reason, remedy = "it is a file", "give the folder that holds the checkpoints"
        raise StoreError("list", store.url, reason, remedy=remedy, kind="path")
    return store


def _contents(store: Store) -> tuple[list[str], list[str]]:
    """Name the folders of a store, and the files."""
    found = store.list(recursive=False)
    inner = [name.rstrip("/") for name in found if name.endswith("/")]
    return inner, [name for name in found if not name.endswith("/")]


def _within(store: Store, folder: str) -> Store:
    """Return a folder of a store; for the empty name, the store."""
    return store.folder(folder) if folder else store
