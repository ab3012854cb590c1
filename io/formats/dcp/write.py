"""Writing DCP checkpoints: archives one after another, and `.metadata` last, atomically.

The files of each save have names of their own, so that two saves into one folder do not collide.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from shardplan.planning import (
    CodecError,
    Metadata,
    Path,
    SavePlan,
    TensorMetadata,
    empty_names,
    flatten,
)
from shardplan.planning.columns import DAMAGE, column
from shardplan.planning.storage import pack_files

from ...errors import ExistsError, FormatError, ValueRefusedError
from ...execute.commit import FolderWriter, put_in_place, remove, tidy, write_all
from ...execute.copying import STAGED, Content, FileContents, Seal, literal, threads_for, write_file
from ...execute.pieces import Piece, blocks_of, collect
from ...stores.base import Store
from ..base import CommitJob, Part, WriteJob, check_size, read_whole
from ..torch_save.archive import ALIGNMENT, ArchiveLayout, frame_of
from ..torch_save.write import dump_values, pickle_tensor
from .megatron import is_there
from .metadata import (
    FIRST_RANK,
    METADATA,
    OWN_EMPTY,
    OWN_PATHS,
    Item,
    pack_path,
    parse_metadata,
    rank_metadata,
)
from .source import DcpFormat


class DcpWriter(FolderWriter):
    """Writes checkpoints that `torch.distributed.checkpoint.load` reads."""

    format = "dcp"

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`.

        One of Megatron-core has files that cannot be replaced together with `.metadata`.
        """
        super().refuse(store, overwrite)
        if store.exists(METADATA) and is_there(store):
            raise ExistsError(
                f"{store.url} holds a checkpoint of Megatron-core, which is not replaced; choose "
                "another folder, or remove that checkpoint first"
            )

    def write(self, job: WriteJob) -> Part:
        """Write one rank's ``.distcp`` files; see `Writer.write`."""
        plan, store = job.plan, job.store
        pieces, values, refused = collect(flatten(job.sd)[0], plan, progress=job.progress)
        items = [*_values(values, {**refused, **_lost_keys(plan)}), *_tensors(plan, pieces)]
        file, begin = pack_files(column([item.nbytes for item in items]), ALIGNMENT)
        count = int(file[-1]) + 1 if items else 0
        edges = pairwise(np.searchsorted(file, np.arange(count + 1)).tolist())
        files = [
            _File(f"__{job.rank}_{n}-{job.save_id}.distcp", items[i:j], begin[i:j].tolist())
            for n, (i, j) in enumerate(edges)
        ]
        threads = threads_for(job.pool, len(files))
        write_all(
            job,
            {file.name: file for file in files},
            lambda file: file.write(store, threads),
            STAGED + store.staging,
        )
        written = [attrs.astuple(item) for file in files for item in file.written()]
        nbytes = sum(file.nbytes for file in files)
        return Part(len(files), nbytes, json.dumps(written).encode())

    def commit(self, job: CommitJob) -> tuple[str, ...]:
        """Put `.metadata` in place; see `Writer.commit`."""
        store, save_id = job.store, job.save_id
        self.refuse(store, job.overwrite)
        written = {(w.name, w.offset): w for report in job.reports for w in _from_report(report)}
        _check_all(job.metadata, written)
        data = pickle.dumps(_torch_metadata(job.metadata, written, store.url, save_id))
        check_size(METADATA, len(data), "metadata")
        old = _older(store)
        new = {item.file for item in written.values()}
        store.sync()
        with self.committing(save_id):
            put_in_place(store, METADATA, data, overwrite=job.overwrite)
        left = remove(store, [name for name in old if name not in new])
        tidy(store, {*new, *left})
        return left

    def unneeded(self, store: Store, report: bytes, save_id: str) -> Iterable[str]:
        """Name the files that `.metadata` does not name; see `FolderWriter.unneeded`."""
        if store.exists(METADATA):
            found = parse_metadata(read_whole(store, METADATA, "metadata")).metadata.storage_meta
            if found is not None and found.save_id == save_id:
                return ()
        return {item.file for item in _from_report(report)}


@attrs.frozen
class _Written:
    """An archive that a rank wrote: its item and the chunk's number, its file, its bytes there."""

    name: str
    offset: tuple[int, ...] | None
    number: int
    file: str
    begin: int
    length: int


@attrs.frozen(eq=False)
class _Archive:
    """An archive to write: the bytes of a value, or a chunk's number, elements and frame."""

    name: str
    nbytes: int
    data: bytes = b""
    number: int = 0
    piece: Piece | None = None
    frame: ArchiveLayout | None = None


@attrs.frozen(eq=False)
class _File:
    """A file to write: archives one after another, aligned as torch aligns records in one."""

    name: str
    archives: Sequence[_Archive]
    begins: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.begins[-1] + self.archives[-1].nbytes

    def written(self) -> Iterator[_Written]:
        for own, begin in zip(self.archives, self.begins, strict=True):
            offset = None if own.piece is None else own.piece.offsets
            yield _Written(own.name, offset, own.number, self.name, begin, own.nbytes)

    def write(self, store: Store, threads: int) -> None:
        contents = FileContents(self._contents, threads)
        write_file(store, self.name, contents, nbytes=self.nbytes)

    def _contents(self, local: bool) -> list[Content | Seal]:
        found: list[Content | Seal] = []
        held = [archive.piece for archive in self.archives if archive.piece is not None]
        blocks = iter(blocks_of(held, local))
        at = 0
        pairs = zip(self.archives, self.begins, strict=True)
        for number, (archive, begin) in enumerate(pairs):
            found.append(literal(bytes(begin - at)))
            at = begin + archive.nbytes
            if archive.frame is None:
                found.append(literal(archive.data))
            else:
                own, frame = Content(next(blocks), number), archive.frame
                seal = Seal(frame.tail_size, [number], partial(_tail, frame))
                found += [literal(frame.head), own, seal]
        return found


def _tail(frame: ArchiveLayout, sums: Sequence[int]) -> bytes:
    return frame.tail(sums[0])


def _values(values: Mapping[str, Any], refused: dict[str, str]) -> list[_Archive]:
    """Return the archives of non-tensor values, or refuse all that cannot be stored."""
    try:
        dumped = dump_values(values)
    except ValueRefusedError as error:
        raise ValueRefusedError({**refused, **error.reasons}) from None
    if refused:
        raise ValueRefusedError(refused)
    return [_Archive(name, len(data), data) for name, data in dumped.items()]


def _tensors(plan: SavePlan, pieces: Mapping[int, Piece]) -> Iterator[_Archive]:
    hints = np.zeros(len(plan.items), np.int64) if plan.items.hint is None else plan.items.hint
    for row, piece in pieces.items():
        frame = frame_of(pickle_tensor(piece.dtype, piece.shape), piece.nbytes)
        yield _Archive(piece.name, frame.size, b"", int(hints[row]), piece, frame)


def _from_report(report: bytes) -> list[_Written]:
    try:
        return [
            _Written(name, None if offset is None else tuple(offset), *rest)
            for name, offset, *rest in json.loads(report)
        ]
    except DAMAGE as error:
        raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


def _check_all(metadata: Metadata, written: Mapping[Item, _Written]) -> None:
    for name, entry in metadata.state_dict_metadata.items():
        wanted: list[tuple[int, ...] | None] = [None]
        if isinstance(entry, TensorMetadata):
            wanted = [tuple(offset) for offset in entry.chunks.offsets.tolist()]
        if any((name, offset) not in written for offset in wanted):
            raise ValueError(f"no rank wrote all of `{name}`; were plans and results mixed up?")


def _torch_metadata(
    metadata: Metadata, written: Mapping[Item, _Written], url: str, save_id: str
) -> Any:
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as records

    places = {
        records.MetadataIndex(name, offset, None if offset is None else item.number): (
            filesystem._StorageInfo(item.file, item.begin, item.length)
        )
        for (name, offset), item in written.items()
    }
    entries = metadata.state_dict_metadata
    hollow = sorted(empty_names(metadata.planner_data))
    paths = {name: _path(metadata.planner_data, name) for name in {*entries, *hollow}}
    empty = {n: pack_path(n, paths[n]) if n in entries else None for n in hollow}
    full = [name for name in entries if name not in empty]
    meta = records.Metadata(
        {name: _torch_entry(records, entries[name]) for name in full},
        planner_data={name: _torch_path(paths[name]) for name in full},
        storage_data=places,
    )
    if hasattr(records, "StorageMeta"):  # since torch 2.4
        meta.storage_meta = records.StorageMeta(checkpoint_id=url, save_id=save_id)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        meta.version = version
    ours = {name: pack_path(name, paths[name]) for name in full if not _is_torchs(paths[name])}
    for attribute, extra in ((OWN_PATHS, ours), (OWN_EMPTY, empty)):
        if extra:
            setattr(meta, attribute, extra)
    return meta


def _torch_entry(records: Any, entry: Any) -> Any:
    import torch

    from ...tensors import torch_dtype

    if not isinstance(entry, TensorMetadata):
        return records.BytesStorageMetadata()
    own = entry.properties
    properties = records.TensorProperties(
        torch_dtype(own.dtype), requires_grad=own.requires_grad, pin_memory=own.pin_memory
    )
    boxes = zip(entry.chunks.offsets.tolist(), entry.chunks.sizes.tolist(), strict=True)
    chunks = [records.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    return records.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)


def _torch_path(path: Path) -> tuple[Any, ...]:
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


def _is_torchs(path: Path) -> bool:
    """Return True if torch's own form of a path loses nothing."""
    return all(kind == "list" or (kind == "dict" and type(key) is str) for kind, key in path)


def _path(data: Any, name: str) -> Path:
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    return tuple(paths.get(name, (("dict", name),)))


def _lost_keys(plan: SavePlan) -> dict[str, str]:
    """Return why some values cannot be stored: by keys that no format keeps."""
    refused: dict[str, str] = {}
    for name in plan.items.catalog.names:
        try:
            pack_path(name, _path(plan.planner_data, name))
        except ValueRefusedError as error:
            refused.update(error.reasons)
    return refused


def _older(store: Store) -> tuple[str, ...]:
    """Name the files of the DCP checkpoint that is to be replaced, except `.metadata`."""
    if not store.exists(METADATA) and not store.exists(FIRST_RANK):
        return ()
    files: Sequence[str] = ()
    with suppress(FormatError):  # what damaged metadata names is left alone
        files = DcpFormat().open(store).files
    return *files, *rank_metadata(store.list(recursive=False))
