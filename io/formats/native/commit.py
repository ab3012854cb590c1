"""Committing our own format: one rank makes a manifest of what all wrote, and publishes it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from shardplan.planning import Entries, Metadata, SavePlan, StorageMeta
from shardplan.planning.columns import Catalog, Ints, column, distinct, readonly
from shardplan.planning.storage import BLOCK_BYTES, file_numbers, write_plan

from ...checksums import Sums
from ...errors import FormatError, listed
from ...execute.cleanup import tidy
from ...execute.commit import committing, put_in_place, refuse_folder, remove
from ...limits import check_size
from ...pool import Pool, Progress, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ..base import Part, Writer
from .manifest import MANIFEST, FileTable, Manifest, encode_manifest, read_manifest, version_of
from .write import Written, write_rank

__all__ = ["NativeWriter", "assemble", "publish"]


class NativeWriter(Writer):
    """Writes our own format."""

    def __init__(self) -> None:
        self._unsure: set[str] = set()  # saves whose commit failed, but may have happened, or may

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        refuse_folder(store, "safetensors", overwrite)

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the items by file, and by width in each; see `Writer.write_order`."""
        order: list[int] = write_plan(plan).order.tolist()
        return order

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
        progress: Progress | None = None,
    ) -> Part:
        """Write one rank's safetensors files; see `Writer.write`."""
        written = write_rank(
            store, sd, plan, save_id=save_id, rank=rank, pool=pool, progress=progress
        )
        return Part(len(written.files), written.nbytes, written.to_bytes())

    def commit(
        self,
        store: Store,
        metadata: Metadata,
        plans: Sequence[SavePlan],
        reports: Sequence[bytes],
        *,
        save_id: str,
        overwrite: bool,
    ) -> tuple[str, ...]:
        """Publish the manifest; see `Writer.commit`."""
        written = [Written.from_bytes(report) for report in reports]
        manifest = assemble(metadata, plans, written, save_id=save_id, created=time.time())
        with committing(self._unsure, save_id):
            left = publish(store, manifest, overwrite=overwrite)
        tidy(store, (*manifest.files.names, *left))
        return left

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files, unless a manifest may come to name them."""
        if save_id in self._unsure:
            return
        with suppress(Exception):
            try:
                published = read_manifest(store).save_id == save_id
            except FormatError:
                published = False
            if not published:
                store.delete([file.name for file in Written.from_bytes(report).files])


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
        block_bytes: What `write_rank` was given.

    Raises:
        ValueError: Some chunk was not written, or these are not plans of `global_plan`.
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
        raise ValueError(f"some of `{lost}` was not written; were plans and results mixed up?")
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
    old: Sequence[str] = ()
    if overwrite:
        # There may be none, or one that cannot be read: whatever it named is left to `prune`.
        with suppress(FormatError):
            old = read_manifest(store).files.names
    data = encode_manifest(manifest)
    check_size(MANIFEST, len(data), "manifest")
    store.sync()
    _check_written(store, manifest.files, pool or default_pool())
    put_in_place(store, MANIFEST, data, overwrite=overwrite)
    return remove(store, sorted(set(old) - set(manifest.files.names)))


def _check_written(store: Store, files: FileTable, pool: Pool) -> None:
    """Refuse to commit unless every file is there, whole: another process may have removed some."""
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
