"""Writing our own format.

Each rank writes its files straight out of tensor memory, in one pass, hashed on the way. The
checksums go into each file's header, which is written last; where a store writes files from front
to back, those of a large file go into a file of their own, its table. Then one rank makes a
manifest of what all wrote, and publishes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, cast

import attrs
import numpy as np

from shardplan.planning import CodecError, Entries, Metadata, SavePlan, StorageMeta, flatten
from shardplan.planning.columns import (
    DAMAGE,
    Ints,
    column,
    distinct,
    pack,
    readonly,
    unpack,
)
from shardplan.planning.storage import (
    BLOCK_BYTES,
    chunk_places,
    table_name,
    write_plan,
)

from ...checksums import Sums, combine, hash_views, xxhash
from ...errors import FormatError, ValueRefusedError, listed
from ...execute.commit import FolderWriter, put_in_place, remove, tidy, write_all
from ...execute.pieces import Piece, collect
from ...pool import Pool, Progress, check_stopped, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ...values import StoredValue, sort_values
from ..base import CommitJob, Part, SharedFiles, WriteJob
from ..headers import Slot, build_header, refused_name, with_sums
from .encoding import PLAIN, VERSION, encode_manifest
from .manifest import read_manifest
from .record import MANIFEST, FileTable, Manifest
from .source import NativeSource

_PIECE: Final = 1 << 20  # bytes that are hashed and then written, while they are in the cache
_SMALL: Final = 1 << 14  # bytes of a block that is copied to be written together with others
_STAGED: Final = 96 << 20  # memory that copies for one file in the making may take
_COLLECTED: Final = 16 << 20  # bytes of a file that is hashed before it is written, if need be
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
        manifest = assemble(
            job.metadata,
            job.plans,
            written,
            save_id=job.save_id,
            created=created,
            shared=job.shared,
        )
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
    """A file that a rank wrote; `size` and `header` are lengths in bytes."""

    number: int  # which of the rank's files it is; -1 for a table of checksums
    name: str
    size: int
    header: int
    digest: int  # the checksum of its header, or of a table


@attrs.frozen(eq=False)
class Written:
    """What one rank wrote, for whoever commits the checkpoint."""

    files: tuple[WrittenFile, ...]
    # Its non-tensor values, by name: kind (see `StoredValue`), and the JSON data of an inline one,
    # or how many bytes another takes.
    values: Mapping[str, tuple[str, Any]]

    @property
    def nbytes(self) -> int:
        """How many bytes the files have."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Encode it, for the rank that commits."""
        return pack(
            {"files": [attrs.astuple(f) for f in self.files], "values": dict(self.values)}, {}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Written:
        """Decode it."""
        head, _ = unpack(data)
        try:
            files = tuple(WrittenFile(*fields) for fields in head["files"])
            values = {name: (str(kind), data) for name, (kind, data) in head["values"].items()}
            return cls(files, values)
        except DAMAGE as error:
            raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


def write_rank(job: WriteJob, block_bytes: int = BLOCK_BYTES) -> Written:
    """Write the data files of one rank; nothing can be loaded until the save is committed.

    Returns:
        What was written. All of it has reached the disk, the names of the files included.
    """
    store = job.store
    pieces, values = _collect_items(flatten(job.sd)[0], job.plan, job.progress)
    files = _files(job, pieces, values)
    written = write_all(
        job,
        {file.name: file for file in files},
        lambda file: file.write(store, block_bytes),
        lambda file: file.staged(store.staging) + len(file.header),
        also=[table_name(file.name) for file in files if not file.is_summed],
    )
    kinds = {k: (v.kind, v.data if v.kind == "inline" else len(v.data)) for k, v in values.items()}
    return Written(tuple(made for some in written for made in some), kinds)


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
    """One file to write."""

    number: int
    name: str
    # The bytes of each of its items, in order; `slots` describes them.
    contents: Sequence[Piece | bytes]
    slots: Sequence[Slot | Piece]
    nbytes: int  # of all items
    header: bytes  # its header, without checksums
    is_summed: bool  # whether they are; else they go into a table

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self.header) + self.nbytes

    def staged(self, by_store: int) -> int:
        """Return how many bytes of memory it takes to write, given what the store may take."""
        rough = 0
        for one in self.contents:
            if isinstance(one, Piece) and (one.nbytes <= _SMALL or not one.is_plain):
                rough += one.nbytes
        return min(_COPIES * rough, _STAGED) + min(2 * self.size, by_store)

    def write(self, store: Store, block_bytes: int) -> tuple[WrittenFile, ...]:
        """Write it, and its table if it has one."""
        hashed = _Hashed(self.contents, block_bytes)
        if not self.is_summed:
            store.write(self.name, chain([self.header], hashed), nbytes=self.size)
            table = hashed.sums.astype("<u8").tobytes()
            store.write(table_name(self.name), [table], nbytes=len(table))
            return self._described(self.header), _described_table(self.name, table)
        if store.can_write_head_last:
            parts, head = self._head_last(hashed), len(self.header)
            store.write_head_last(self.name, parts, head=head, nbytes=self.size)
        else:
            pieces = list(hashed)
            header = with_sums(self.header, hashed.sums)
            store.write(self.name, _until_stopped([header, *pieces]), nbytes=self.size)
        return (self._described(with_sums(self.header, hashed.sums)),)

    def _head_last(self, hashed: _Hashed) -> Iterator[memoryview]:
        yield from hashed
        yield memoryview(with_sums(self.header, hashed.sums))

    def _described(self, header: bytes) -> WrittenFile:
        digest = hash_views([memoryview(header)])
        return WrittenFile(self.number, self.name, self.size, len(header), digest)


def _described_table(name: str, table: bytes) -> WrittenFile:
    digest = hash_views([memoryview(table)])
    return WrittenFile(-1, table_name(name), len(table), len(table), digest)


def _until_stopped(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        check_stopped()
        yield piece


class _Hashed:
    """The bytes of a file behind its header, hashed as they are taken.

    Small items are copied together, which is faster than to write each from where it is.

    Attributes:
        sums: The checksum of each item; all are known once all bytes were taken.
    """

    def __init__(self, contents: Sequence[Piece | bytes], block_bytes: int) -> None:
        self._contents, self._block_bytes = contents, block_bytes
        self.sums: Sums = np.zeros(len(contents), np.uint64)

    def __iter__(self) -> Iterator[memoryview]:
        held, room = list[memoryview](), _PIECE
        for number, content in enumerate(self._contents):
            digests = []
            for block in _blocks(content, self._block_bytes):
                if held and len(block) > min(room, _SMALL):
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
            self.sums[number] = combine(digests)
        yield memoryview(b"".join(held))


def _blocks(content: Piece | bytes, block_bytes: int) -> Iterator[memoryview]:
    if isinstance(content, Piece):
        yield from content.blocks(block_bytes)
        return
    view = memoryview(content)
    for at in range(0, len(view) or 1, block_bytes):
        yield view[at : at + block_bytes]


def _files(
    job: WriteJob, pieces: Mapping[int, Piece], values: Mapping[str, StoredValue]
) -> list[_File]:
    """Return the files to write; inline values lie in none."""
    files = write_plan(job.plan, job.rank, job.save_id)
    catalog, row_of = job.plan.items.catalog, job.plan.items.row
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
            nbytes = sum(slot.nbytes for slot in held)
            summed = job.store.can_write_head_last or nbytes <= _COLLECTED
            header = build_header(file, held, job.save_id, summed=summed)
            found.append(_File(number, file, contents, held, nbytes, header, summed))
    return found


def assemble(
    metadata: Metadata,
    plans: Sequence[SavePlan],
    written: Sequence[Written],
    *,
    save_id: str,
    created: float = 0.0,
    block_bytes: int = BLOCK_BYTES,
    shared: SharedFiles | None = None,
) -> Manifest:
    """Make the manifest of what all ranks wrote, and of the files that they share."""
    metadata = attrs.evolve(metadata, state_dict_metadata=_tensors_first(metadata))
    entries = metadata.state_dict_metadata
    values = {k: v for one in written for k, v in one.values.items()}
    in_files = [name not in values or values[name][0] != "inline" for name in entries.names]
    data = [file for one in written for file in one.files if file.number >= 0]
    old = _described_shared(shared)
    chunks = [] if shared is None else _shared_chunks(shared, len(data))
    places = chunk_places(entries, plans, _numbered(written), in_files, chunks)
    made = [*data, *old, *(file for one in written for file in one.files if file.number < 0)]
    unused = [] if shared is None else [*shared.unused.values()]
    files = FileTable(
        tuple(file.name for file in made),
        column([file.size for file in made]),
        column([file.header for file in made]),
        tuple(file.digest for file in made),
        dict(enumerate(unused, len(data))),
    )
    meta = StorageMeta(save_id=save_id)
    metadata = attrs.evolve(
        metadata, storage_meta=meta, version=str(PLAIN if shared is None else VERSION)
    )
    return Manifest(
        save_id, metadata, files, places.columns, places.entry, values, created, block_bytes
    )


def _described_shared(shared: SharedFiles | None) -> list[WrittenFile]:
    """Describe the files that are shared, as the checkpoint that has them does."""
    if shared is None:
        return []
    files = cast("NativeSource", shared.source).manifest.files
    return [
        WrittenFile(
            number, files.names[number], int(files.sizes[number]), int(files.headers[number]),
            files.digests[number],
        )
        for number in shared.unused
    ]  # fmt: skip


def _shared_chunks(shared: SharedFiles, first: int) -> list[tuple[str, int, int]]:
    """Return the chunks that are shared, with their files' numbers in the new checkpoint."""
    manifest = cast("NativeSource", shared.source).manifest
    row = {number: first + at for at, number in enumerate(shared.unused)}
    return [
        (name, number, row[int(files[number])])
        for name, numbers in shared.chunks.items()
        for files in [manifest.files_of(name)]
        for number in numbers
    ]


def _numbered(written: Sequence[Written]) -> Ints:
    """Number the data files of all ranks; one row a rank, one column a file, -1 for none."""
    numbers = [[file.number for file in one.files if file.number >= 0] for one in written]
    most = max((number for mine in numbers for number in mine), default=-1) + 1
    found = np.full((len(written), most + 1), -1, np.int64)
    rank = np.repeat(np.arange(len(numbers)), [len(mine) for mine in numbers])
    flat = column([number for mine in numbers for number in mine])
    found[rank, flat] = np.arange(len(flat))
    return found


def _tensors_first(metadata: Metadata) -> Entries:
    """Sort the entries, and leave out layouts that none of them has."""
    entries = metadata.state_dict_metadata
    order = np.argsort(entries.layout < 0, kind="stable")
    names = tuple(entries.names[row] for row in order.tolist())
    used = distinct(entries.layout[entries.layout >= 0])
    layout = np.where(entries.layout < 0, -1, np.searchsorted(used, entries.layout))[order]
    layouts = tuple(entries.layouts[number] for number in used.tolist())
    return Entries(names, entries.props, readonly(entries.prop[order]), layouts, readonly(layout))


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
