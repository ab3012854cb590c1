"""Writing our own format.

Each rank writes its files straight out of tensor memory, in one pass, hashed on the way. Then one
rank makes a manifest of what all wrote, and publishes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import CodecError, Entries, Metadata, SavePlan, StorageMeta, flatten
from shardplan.planning.columns import (
    DAMAGE,
    Catalog,
    Ints,
    column,
    distinct,
    pack,
    readonly,
    unpack,
)
from shardplan.planning.storage import BLOCK_BYTES, WritePlan, file_numbers, write_plan

from ...checksums import Sums, combine, hash_views, xxhash
from ...errors import FormatError, ValueRefusedError, listed
from ...execute.commit import FolderWriter, put_in_place, remove, tidy, write_all
from ...execute.pieces import Piece, collect
from ...pool import Pool, Progress, check_stopped, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ...values import StoredValue, sort_values
from ..base import CommitJob, Part, WriteJob, check_size
from ..headers import Slot, build_header, refused_name
from .manifest import MANIFEST, FileTable, Manifest, encode_manifest, read_manifest, version_of

_PIECE: Final = 1 << 20  # bytes that are hashed and then written, while they are in the cache
_SMALL: Final = 1 << 14  # bytes of a block that is copied to be written together with others
_STAGED: Final = 96 << 20  # memory that copies for one file in the making may take
_COPIES: Final = 3  # of what cannot be written as it lies: cast, laid out, waiting to be written


class NativeWriter(FolderWriter):
    """Writes our own format."""

    format = "safetensors"

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the items by file, and by width in each; see `Writer.write_order`."""
        order: list[int] = write_plan(plan).order.tolist()
        return order

    def write(self, job: WriteJob) -> Part:
        """Write one rank's safetensors files; see `Writer.write`."""
        written = write_rank(job)
        return Part(len(written.files), written.nbytes, written.to_bytes())

    def commit(self, job: CommitJob) -> tuple[str, ...]:
        """Publish the manifest; see `Writer.commit`."""
        written = [Written.from_bytes(report) for report in job.reports]
        created = time.time()
        manifest = assemble(job.metadata, job.plans, written, save_id=job.save_id, created=created)
        with self.committing(job.save_id):
            left = publish(job.store, manifest, overwrite=job.overwrite)
        tidy(job.store, (*manifest.files.names, *left))
        return left

    def unneeded(self, store: Store, report: bytes, save_id: str) -> Iterable[str]:
        """Name the files that no manifest names; see `FolderWriter.unneeded`."""
        with suppress(FormatError):
            if read_manifest(store).save_id == save_id:
                return ()
        return [file.name for file in Written.from_bytes(report).files]


@attrs.frozen
class WrittenFile:
    """A data file that a rank wrote; `size` and `header` are lengths in bytes."""

    number: int
    name: str
    size: int
    header: int
    digest: int


@attrs.frozen(eq=False)
class Written:
    """What one rank wrote, for whoever commits the checkpoint.

    Attributes:
        sums: The checksum of each of its plan's items; 0 for an inline value.
        values: Its non-tensor values, by name: kind (see `StoredValue`), and the JSON data of an
            inline one, or how many bytes another takes.
    """

    files: tuple[WrittenFile, ...]
    sums: Sums
    values: Mapping[str, tuple[str, Any]]

    @property
    def nbytes(self) -> int:
        """How many bytes the files have."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Encode it, for the rank that commits."""
        head = {"files": [attrs.astuple(f) for f in self.files], "values": dict(self.values)}
        return pack(head, {"sums": self.sums.astype("<u8").tobytes()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Written:
        """Decode it."""
        head, arrays = unpack(data)
        try:
            files = tuple(WrittenFile(*fields) for fields in head["files"])
            values = {name: (str(kind), data) for name, (kind, data) in head["values"].items()}
            return cls(files, np.frombuffer(arrays["sums"], "<u8").astype(np.uint64), values)
        except DAMAGE as error:
            raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


def write_rank(job: WriteJob, block_bytes: int = BLOCK_BYTES) -> Written:
    """Write the data files of one rank; nothing can be loaded until the save is committed.

    Returns:
        What was written. All of it has reached the disk, the names of the files included.
    """
    plan, store = job.plan, job.store
    pieces, values = _collect_items(flatten(job.sd)[0], plan, job.progress)
    files = _files(plan, write_plan(plan, job.rank, job.save_id), pieces, values)
    headers = [build_header(file.name, file.slots, job.save_id) for file in files]
    written = write_all(
        job,
        {file.name: (file, header) for file, header in zip(files, headers, strict=True)},
        lambda pair: pair[0].write(store, pair[1], block_bytes),
        lambda pair: pair[0].staged(store.staging) + len(pair[1]),
    )
    sums = np.zeros(len(plan.items), np.uint64)
    for file, digests in zip(files, written, strict=True):
        sums[file.rows] = digests
    kinds = {k: (v.kind, v.data if v.kind == "inline" else len(v.data)) for k, v in values.items()}
    made = (file.described(header) for file, header in zip(files, headers, strict=True))
    return Written(tuple(made), sums, kinds)


def _collect_items(
    flat: Mapping[str, Any], plan: SavePlan, progress: Progress | None
) -> tuple[dict[int, Piece], dict[str, StoredValue]]:
    """Find all that is to be written, and refuse what cannot be, before anything is."""
    pieces, values, refused = collect(flat, plan, refused_name, progress)
    stored, unfit = sort_values(values)
    refused |= unfit
    for name, value in stored.items():
        reason = None if value.kind == "inline" else refused_name(name)
        if reason is not None:
            refused[name] = reason
    if refused:
        raise ValueRefusedError(refused)
    return pieces, stored


@attrs.frozen(eq=False)
class _File:
    """One file to write: the plan's items that lie in it, in order, and the bytes of each."""

    number: int
    name: str
    rows: Sequence[int]
    contents: Sequence[Piece | bytes]
    slots: Sequence[Slot | Piece]
    nbytes: int  # of all items

    def staged(self, by_store: int) -> int:
        """Return how many bytes of memory it takes to write, given what the store may take."""
        rough = 0
        for one in self.contents:
            if isinstance(one, Piece) and (one.nbytes <= _SMALL or not one.is_plain):
                rough += one.nbytes
        return min(_COPIES * rough, _STAGED) + min(2 * self.nbytes, by_store)

    def described(self, header: bytes) -> WrittenFile:
        digest = hash_views([memoryview(header)])
        size = len(header) + self.nbytes
        return WrittenFile(self.number, self.name, size, len(header), digest)

    def write(self, store: Store, header: bytes, block_bytes: int) -> list[int]:
        """Write it, and return the checksum of each item."""
        sums: list[int] = []
        size = len(header) + self.nbytes
        store.write(self.name, self._parts(header, block_bytes, sums), nbytes=size)
        return sums

    def _parts(self, header: bytes, block_bytes: int, sums: list[int]) -> Iterator[memoryview]:
        """Yield the file's bytes in order; each item's checksum is appended once it was made.

        Small items are copied together, which is faster than to write each from where it is.
        """
        held: list[bytes | memoryview] = [header]
        room = _PIECE - len(header)
        for content in self.contents:
            digests = []
            for block in _blocks(content, block_bytes):
                if len(block) > min(room, _SMALL):
                    yield memoryview(b"".join(held))
                    held, room = [], _PIECE
                if len(block) <= _SMALL:
                    held.append(block)
                    room -= len(block)
                    digests.append(xxhash.xxh3_64_intdigest(block))
                    continue
                state = xxhash.xxh3_64()
                for start in range(0, len(block), _PIECE):
                    check_stopped()
                    state.update(block[start : start + _PIECE])
                    yield block[start : start + _PIECE]
                digests.append(state.intdigest())
            sums.append(combine(digests))
        yield memoryview(b"".join(held))


def _blocks(content: Piece | bytes, block_bytes: int) -> Iterator[memoryview]:
    if isinstance(content, Piece):
        yield from content.blocks(block_bytes)
        return
    view = memoryview(content)
    for at in range(0, len(view) or 1, block_bytes):
        yield view[at : at + block_bytes]


def _files(
    plan: SavePlan,
    files: WritePlan,
    pieces: Mapping[int, Piece],
    values: Mapping[str, StoredValue],
) -> list[_File]:
    """Return the files to write; inline values lie in none."""
    catalog, row_of = plan.items.catalog, plan.items.row
    data: dict[int, bytes] = {}
    slots: dict[int, Slot | Piece] = {**pieces}
    for row in np.flatnonzero(catalog.is_bytes[row_of]).tolist():
        name = catalog.names[row_of[row]]
        if values[name].kind != "inline":
            data[row] = values[name].data
            slots[row] = Slot(name, "uint8", (len(data[row]),), (0,))
    found = []
    for number, file in enumerate(files.names):
        rows = [row for row in files.rows(number).tolist() if row in slots]
        if rows:
            contents = [data[row] if row in data else pieces[row] for row in rows]
            held = [slots[row] for row in rows]
            found.append(_File(number, file, rows, contents, held, sum(s.nbytes for s in held)))
    return found


def assemble(
    metadata: Metadata,
    plans: Sequence[SavePlan],
    written: Sequence[Written],
    *,
    save_id: str,
    created: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
) -> Manifest:
    """Make the manifest of what all ranks wrote."""
    metadata = attrs.evolve(metadata, state_dict_metadata=_tensors_first(metadata))
    entries = metadata.state_dict_metadata
    values = {k: v for one in written for k, v in one.values.items()}
    counts = [
        len(entries.layouts[layout].tiling) if layout >= 0 else int(values[name][0] != "inline")
        for name, layout in zip(entries.names, entries.layout.tolist(), strict=True)
    ]
    start = np.concatenate([[0], np.cumsum(column(counts))])
    file, sums = _chunk_files(metadata, plans, written, start)
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


def _chunk_files(
    metadata: Metadata, plans: Sequence[SavePlan], written: Sequence[Written], start: Ints
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
