"""How does a checkpoint come to exist? Its manifest is put in place, last and at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from shardplan.planning import Entries, Metadata, StorageMeta
from shardplan.planning.columns import Catalog, Ints, column, distinct, readonly
from shardplan.planning.storage import BLOCK_BYTES, file_numbers

from ..checksums import Sums
from ..errors import ExistsError, FormatError, UnsureCommitError, listed
from ..formats.native.manifest import (
    HEAD_BYTES,
    MANIFEST,
    MISFIT,
    FileTable,
    Manifest,
    check_head,
    decode_manifest,
    encode_manifest,
    fits_head,
    version_of,
)
from ..limits import LIMITS, check_size, read_whole
from ..pool import Pool, default_pool
from ..stores.base import MissingFileError, Store, StoreError

if TYPE_CHECKING:  # reading a manifest needs no plans, and no torch
    from shardplan.planning import SavePlan

    from ..formats.native.write import Written

__all__ = [
    "SURE",
    "assemble",
    "find_manifest",
    "no_checkpoint",
    "publish",
    "read_manifest",
    "refuse_existing",
    "unsure_commit",
]

_USUAL: Final = 64 << 20  # up to here a manifest is read before anything is known of it
_PIECE: Final = 16 << 20  # bytes of a larger one that are looked at, at a time
_PRUNED: Final = "; prune removes what is not needed"
SURE: Final = frozenset({"missing", "exists", "denied", "full", "short", "long", "path"})
"""The kinds of error after which a replacement has surely not happened, and never will."""


def assemble(
    metadata: Metadata,
    plans: Sequence[SavePlan],
    written: Sequence[Written],
    *,
    save_id: str,
    created: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
) -> Manifest:
    """Make the manifest of what all ranks wrote.

    Args:
        metadata: The checkpoint, as `global_plan` described it.
        plans: The plans that `global_plan` returned, in rank order.
        written: What `write_rank` returned, in rank order.
        save_id: The name of the save.
        created: When it was made, in seconds since 1970.
        block_bytes: What `write_rank` was told.

    Raises:
        ValueError: Some chunk was written by nobody, or these are no plans of `global_plan`.
    """
    metadata = attrs.evolve(metadata, state_dict_metadata=_tensors_first(metadata))
    entries = metadata.state_dict_metadata
    values = {k: v for one in written for k, v in one.values.items()}
    counts = [
        len(entries.layouts[layout].tiling) if layout >= 0 else int(values[name][0] != "inline")
        for name, layout in zip(entries.names, entries.layout.tolist(), strict=True)
    ]
    start = np.concatenate([[0], np.cumsum(column(counts))])
    file, sums = _collect(metadata, plans, written, start)
    if (file < 0).any():
        lost = entries.names[int(np.searchsorted(start, np.argmin(file), "right")) - 1]
        raise ValueError(
            f"some of `{lost}` was written by nobody; were plans and results mixed up?"
        )
    places, place = _places(file, start)
    made = [f for one in written for f in one.files]
    files = FileTable(
        tuple(f.name for f in made),
        column([f.size for f in made]),
        column([f.header for f in made]),
        tuple(f.digest for f in made),
    )
    version = str(version_of(values))
    metadata = attrs.evolve(metadata, storage_meta=StorageMeta(save_id=save_id), version=version)
    return Manifest(save_id, metadata, files, places, place, sums, values, created, block_bytes)


def _collect(
    metadata: Metadata,
    plans: Sequence[SavePlan],
    written: Sequence[Written],
    start: Ints,
) -> tuple[Ints, Sums]:
    """Return, per chunk of the checkpoint, the number of its file and its checksum."""
    file = np.full(int(start[-1]), -1, np.int64)
    sums = np.zeros(int(start[-1]), np.uint64)
    stored = np.diff(start) > 0  # all but inline values
    first = 0  # how many files the ranks before have
    catalog, rows = None, column([])
    for plan, one in zip(plans, written, strict=True):
        items = plan.items
        if items.catalog is not catalog:  # ranks often share one
            catalog, rows = items.catalog, _entries_of(items.catalog, metadata)
        if len(items) and items.hint is None:
            raise ValueError("these plans number no chunks; pass those that global_plan returned")
        number = np.full(max((made.number for made in one.files), default=-1) + 1, -1, np.int64)
        for position, made in enumerate(one.files):
            number[made.number] = first + position
        first += len(one.files)
        if items.hint is None:
            continue
        row = rows[items.row]
        kept = stored[row]
        at = start[row[kept]] + np.maximum(items.hint[kept], 0)
        file[at], sums[at] = number[file_numbers(plan)[kept]], one.sums[kept]
    return file, sums


def _tensors_first(metadata: Metadata) -> Entries:
    """Sort the entries, and leave out layouts that none of them has."""
    entries = metadata.state_dict_metadata
    order = np.argsort(entries.layout < 0, kind="stable")
    names = tuple(entries.names[row] for row in order.tolist())
    used = distinct(entries.layout[entries.layout >= 0])
    layout = np.where(entries.layout < 0, -1, np.searchsorted(used, entries.layout))[order]
    layouts = tuple(entries.layouts[number] for number in used.tolist())
    return Entries(names, entries.props, readonly(entries.prop[order]), layouts, readonly(layout))


def _entries_of(catalog: Catalog, metadata: Metadata) -> Ints:
    """Return which entry of the checkpoint each row of a catalog is; -1 if no item is of it."""
    row_of = metadata.state_dict_metadata.row_of
    return column([row_of.get(name, -1) for name in catalog.names])


def _places(file: Ints, start: Ints) -> tuple[tuple[Ints, ...], Ints]:
    """Find the distinct columns of file numbers, and which of them each entry has."""
    distinct: dict[bytes, int] = {}
    columns: list[Ints] = []
    place = []
    for low, high in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        key = file[low:high].tobytes()
        number = distinct.setdefault(key, len(columns)) if low < high else -1
        if number == len(columns):
            columns.append(readonly(file[low:high].copy()))
        place.append(number)
    return tuple(columns), column(place)


def read_manifest(store: Store) -> Manifest:
    """Read the manifest of the checkpoint that a store holds.

    Raises:
        FormatError: There is none, or it is damaged.
    """
    data = find_manifest(store)
    if data is None:
        raise no_checkpoint(store)
    return decode_manifest(data)


def no_checkpoint(store: Store) -> FormatError:
    """Make the error for a folder without a checkpoint."""
    return FormatError(
        MANIFEST, f"there is no checkpoint in {store.url}: no save was ever committed there"
    )


def find_manifest(store: Store) -> bytes | None:
    """Return the text of a checkpoint's manifest, all of it of one version; None if there is none.

    Raises:
        FormatError: It is larger than any manifest, or a folder.
    """
    try:
        return _read_whole(store)
    except MissingFileError:
        return None
    except StoreError as error:
        if error.kind in ("long", "path"):
            raise FormatError(MANIFEST, error.reason) from None
        raise


def _read_whole(store: Store) -> bytes:
    """Read the manifest; an unusually large one is validated before it is read in full."""
    try:
        return store.read_all(MANIFEST, limit=min(_USUAL, LIMITS["manifest"]))
    except StoreError as error:
        if error.kind != "long":
            raise
    size = store.size(MANIFEST)
    check_size(MANIFEST, size, "manifest")
    _look_through(store, size)
    return read_whole(store, MANIFEST, "manifest")


def _look_through(store: Store, size: int) -> None:
    """Refuse a large file that is no manifest, or damaged, before all of it is in memory."""
    head = _piece(store, 0, HEAD_BYTES)
    check_head(head)
    try:
        starts = range(0, size, _PIECE)
        if fits_head(head, (_piece(store, at, min(_PIECE, size - at)) for at in starts)):
            return
    except StoreError as error:
        if error.kind != "short":
            raise
    if _piece(store, 0, HEAD_BYTES) == head:  # else another save has just replaced it
        raise FormatError(MANIFEST, MISFIT)


def _piece(store: Store, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    store.read(MANIFEST, [(offset, memoryview(data))])
    return bytes(data)


def refuse_existing(store: Store, overwrite: bool) -> None:
    """Refuse to save where a checkpoint is, unless asked to.

    Raises:
        ExistsError: There is one.
    """
    if not overwrite and store.exists(MANIFEST):
        raise _exists(store)


def _exists(store: Store) -> ExistsError:
    return ExistsError(f"{store.url} holds a checkpoint", can_overwrite=True)


def publish(
    store: Store, manifest: Manifest, *, overwrite: bool = False, pool: Pool | None = None
) -> tuple[str, ...]:
    """Put the manifest in place, at which instant the checkpoint exists; then tidy up.

    Args:
        store: Where all data files have been written.
        manifest: What to publish.
        overwrite: Whether an older checkpoint may be replaced. It can be loaded up to the instant
            at which the new one can.
        pool: The threads to use.

    Returns:
        Files of the older checkpoint that could not be removed; `prune` will try again.

    Raises:
        ExistsError: There is a checkpoint, and it was not to be overwritten; of several saves at
            once, one succeeds.
        UnsureCommitError: The store failed while it put the manifest in place. The new checkpoint
            is there, or will be in a while, or the old one stays; so nothing was removed.
        StoreError: It failed before that, or some data files are not there; what was there before
            is as it was.
    """
    old: Iterable[str] = ()
    if overwrite:
        # There may be none, or one that cannot be read: whatever it named is left to `prune`.
        with suppress(FormatError):
            old = read_manifest(store).files.names
    data = encode_manifest(manifest)
    check_size(MANIFEST, len(data), "manifest")
    store.sync()
    _check_written(store, manifest.files, pool or default_pool())
    _commit(store, manifest.save_id, data, overwrite)
    doomed = tuple(sorted(set(old) - set(manifest.files.names)))
    try:
        if doomed:
            store.delete(doomed)
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return doomed
    return ()


def _check_written(store: Store, files: FileTable, pool: Pool) -> None:
    """Refuse to commit unless every file is there, whole: somebody may have tidied up."""
    wanted: dict[str, int] = dict(zip(files.names, files.sizes.tolist(), strict=True))
    if not wanted:
        return
    sizes = {entry.name: entry.size for entry in store.entries(recursive=False)}
    doubtful = [name for name, size in wanted.items() if sizes.get(name) != size]

    def differs(name: str) -> bool:
        try:
            return store.size(name) != wanted[name]
        except MissingFileError:
            return True

    # A network disk may list another machine's new files late, but finds them by name.
    wrong = pool.map(differs, doubtful)
    lost = [name for name, is_wrong in zip(doubtful, wrong, strict=True) if is_wrong]
    if lost:
        raise StoreError(
            "commit",
            store.url,
            f"files that this save wrote are gone, or were changed: {listed(lost, quote='')}",
            remedy="did something tidy the folder meanwhile, with prune(min_age=0)? save again",
            kind="missing",
        )


def _commit(store: Store, save_id: str, data: bytes, overwrite: bool) -> None:
    """Put the manifest in place, or tell whether it might be there nevertheless."""
    try:
        store.replace(MANIFEST, data, overwrite=overwrite)
    except StoreError as error:
        if error.kind == "exists":
            if not _is_committed(store, save_id):
                raise _exists(store) from None
        elif error.kind in SURE:
            raise
        else:
            raise unsure_commit(store, error, "the manifest was put in place", _PRUNED) from error
    except Exception as error:
        raise unsure_commit(store, error, "the manifest was put in place", _PRUNED) from error


def _is_committed(store: Store, save_id: str) -> bool:
    """Tell whether the manifest in our way is our own: sent twice, though we sent it once."""
    try:
        with suppress(FormatError):
            return decode_manifest(_read_whole(store)).save_id == save_id
    except Exception as error:
        raise unsure_commit(store, error, "the manifest that is there was read", _PRUNED) from error
    return False


def unsure_commit(store: Store, error: Exception, doing: str, later: str = "") -> UnsureCommitError:
    """Make the error for a commit that may have happened.

    Args:
        store: Where.
        error: What went wrong.
        doing: Meanwhile, as a clause.
        later: What to do in the end.
    """
    reason = error.reason if isinstance(error, StoreError) else str(error)
    return UnsureCommitError(
        "commit",
        store.url,
        f"the store failed while {doing} ({reason})",
        remedy="the checkpoint may exist nevertheless, so its files were kept: look with "
        f"open_checkpoint, or save again{later}",
        kind="unsure",
    )
