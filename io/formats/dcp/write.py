"""How is a DCP checkpoint written? Archives one after another, and `.metadata` last of all.

Torch goes by the names and places in `.metadata` alone, so it is written last and replaced at once,
as our own manifest is; the files of each save have names of their own, so that two saves into one
folder do not meet.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

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
from shardplan.planning.columns import DAMAGE

from ...errors import FormatError, ValueRefusedError
from ...execute.cleanup import tidy
from ...execute.commit import committing, put_in_place, refuse_folder, remove
from ...execute.copying import Block, Content, FileContents, Seal, literal, threads_for, write_file
from ...execute.pieces import Piece, blocks_of, collect
from ...limits import check_size, read_whole
from ...pool import Pool, default_pool
from ...progress import Progress
from ...stores.base import Store
from ..base import Part, Writer
from ..torch_save.torch_values import dump_values, pickle_tensor
from ..torch_save.zip_read import ALIGNMENT
from ..torch_save.zip_write import Frame, frame_of
from .metadata import METADATA, OWN_EMPTY, OWN_PATHS, pack_path, parse_metadata
from .ranks import FIRST_RANK, rank_metadata
from .source import DcpFormat

__all__ = ["DcpWriter"]

_FILE_BYTES: Final = 256 << 20  # a rank with more than this writes several files at once
_MAX_FILES: Final = 4
_STAGED: Final = 96 << 20  # memory that one file in the making may take


@attrs.frozen
class _Written:
    """An item that a rank wrote: its name, offset and number, its file, and its bytes there."""

    name: str
    offset: tuple[int, ...] | None
    number: int
    file: str
    begin: int
    length: int

    def told(self) -> tuple[Any, ...]:
        """Return it as it travels."""
        return self.name, self.offset, self.number, self.file, self.begin, self.length


class DcpWriter(Writer):
    """Writes checkpoints that `torch.distributed.checkpoint.load` reads."""

    def __init__(self) -> None:
        self._unsure: set[str] = set()  # saves of which nobody can tell whether they were committed

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        refuse_folder(store, "dcp", overwrite)

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
        """Write one rank's ``.distcp`` files; see `Writer.write`."""
        flat, _ = flatten(sd)
        pieces, values, refused = collect(flat, plan, progress=progress)
        refused = {**refused, **_lost_keys(plan)}
        try:
            dumped = dump_values(values)
        except ValueRefusedError as error:
            raise ValueRefusedError({**refused, **error.reasons}) from None
        if refused:
            raise ValueRefusedError(refused)
        files = [
            _File(f"__{rank}_{number}-{save_id}.distcp", items)
            for number, items in enumerate(_share(_items(plan, pieces, dumped)))
        ]
        pool = pool or default_pool()
        threads = threads_for(pool, len(files))
        try:
            pool.map(
                lambda file: file.write(store, threads),
                files,
                nbytes=_STAGED + store.staging,
            )
        except BaseException:
            with suppress(Exception):
                store.delete([file.name for file in files])
            raise
        told = [item.told() for file in files for item in file.written]
        nbytes = sum(file.nbytes for file in files)
        return Part(len(files), nbytes, json.dumps(told).encode())

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
        """Put `.metadata` in place; see `Writer.commit`."""
        self.refuse(store, overwrite)
        written = [item for report in reports for item in _from_report(report)]
        _check_all(metadata, written)
        data = pickle.dumps(_torch_metadata(metadata, written, store.url, save_id))
        check_size(METADATA, len(data), "metadata")
        old = _older(store)
        new = {item.file for item in written}
        store.sync()
        with committing(self._unsure, save_id):
            put_in_place(store, METADATA, data, overwrite=overwrite)
        left = remove(store, [name for name in old if name not in new])
        tidy(store, {*new, *left})
        return left

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files; see `Writer.discard`."""
        if save_id in self._unsure:
            return
        with suppress(Exception):
            if _published(store) != save_id:
                store.delete({item.file for item in _from_report(report)})


@attrs.frozen(eq=False)
class _Item:
    """An archive to write."""

    name: str
    offset: tuple[int, ...] | None
    number: int
    nbytes: int
    data: bytes = b""
    frame: Frame | None = None
    piece: Piece | None = None

    def contents(self, record: int, blocks: Sequence[Block]) -> list[Content | Seal]:
        """Return what it is made of, given the blocks of its piece."""
        frame = self.frame
        if frame is None:
            return [literal(self.data)]
        tail = Seal(frame.tail, [record], lambda sums: frame.make_tail(sums[0]))
        return [literal(frame.head), Content(blocks, record), tail]


class _File:
    """A file to write: archives one after another, each aligned as torch aligns what is in one."""

    def __init__(self, name: str, items: Sequence[_Item]) -> None:
        self.name, self._items = name, items
        self.written = []
        at = 0
        for item in items:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            place = _Written(item.name, item.offset, item.number, name, at, item.nbytes)
            self.written.append(place)
            at += item.nbytes
        self.nbytes = at

    def write(self, store: Store, threads: int) -> None:
        """Write it."""
        contents = FileContents(self._contents, threads)
        write_file(store, self.name, contents, nbytes=self.nbytes)

    def _contents(self, local: bool) -> list[Content | Seal]:
        """Return what it is made of; see `FileContents`."""
        found: list[Content | Seal] = []
        held = [item.piece for item in self._items if item.piece is not None]
        blocks = iter(blocks_of(held, local))
        at = 0
        for number, (item, place) in enumerate(zip(self._items, self.written, strict=True)):
            own = [] if item.piece is None else next(blocks)
            found += [literal(bytes(place.begin - at)), *item.contents(number, own)]
            at = place.begin + place.length
        return found


def _items(
    plan: SavePlan, pieces: Mapping[int, Piece], dumped: Mapping[str, bytes]
) -> Iterator[_Item]:
    """Yield what a plan writes, values first, as torch does."""
    items = plan.items
    hints = np.zeros(len(items), np.int64) if items.hint is None else items.hint
    for name, data in dumped.items():
        yield _Item(name, None, 0, len(data), data)
    for row, piece in pieces.items():
        frame = frame_of(pickle_tensor(piece.dtype, piece.shape), piece.nbytes)
        number = int(hints[row])
        yield _Item(piece.name, piece.offsets, number, frame.size, frame=frame, piece=piece)


def _share(items: Iterator[_Item]) -> list[list[_Item]]:
    """Cut items into as many files as are worth while, of about the same size, order kept."""
    found = list(items)
    total = sum(item.nbytes for item in found)
    count = min(max(total // _FILE_BYTES, 1), _MAX_FILES)
    files: list[list[_Item]] = [[] for _ in range(count)]
    done = 0
    for item in found:
        middle = done + item.nbytes // 2
        files[min(middle * count // max(total, 1), count - 1)].append(item)
        done += item.nbytes
    return [file for file in files if file]


def _from_report(report: bytes) -> list[_Written]:
    try:
        return [
            _Written(name, None if offset is None else tuple(offset), *rest)
            for name, offset, *rest in json.loads(report)
        ]
    except DAMAGE as error:
        raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


def _check_all(metadata: Metadata, written: Sequence[_Written]) -> None:
    known = {(item.name, item.offset) for item in written}
    for name, entry in metadata.state_dict_metadata.items():
        wanted: list[tuple[int, ...] | None] = [None]
        if isinstance(entry, TensorMetadata):
            wanted = [tuple(offset) for offset in entry.chunks.offsets.tolist()]
        if any((name, offset) not in known for offset in wanted):
            raise ValueError(
                f"some of `{name}` was written by nobody; were plans and results mixed up?"
            )


def _torch_metadata(metadata: Metadata, written: Sequence[_Written], url: str, save_id: str) -> Any:
    """Say it all in torch's own records."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as records

    names = {(item.name, item.offset): item for item in written}
    places = {
        records.MetadataIndex(name, offset, None if offset is None else item.number): (
            filesystem._StorageInfo(item.file, item.begin, item.length)
        )
        for (name, offset), item in names.items()
    }
    entries = metadata.state_dict_metadata
    theirs, ours = _nested(metadata)
    empty = _empty(metadata)
    meta = records.Metadata(
        {name: _torch_entry(records, entries[name]) for name in entries if name not in empty},
        planner_data=theirs,
        storage_data=places,
    )
    if hasattr(records, "StorageMeta"):
        meta.storage_meta = records.StorageMeta(checkpoint_id=url, save_id=save_id)
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        meta.version = version
    if ours:
        setattr(meta, OWN_PATHS, ours)
    if empty:
        setattr(meta, OWN_EMPTY, empty)
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


def _nested(metadata: Metadata) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Return the way to each value as torch tells it, and ours where torch's loses something."""
    theirs, ours = {}, {}
    hollow = empty_names(metadata.planner_data)
    for name in metadata.state_dict_metadata:
        if name in hollow:
            continue
        path = _path(metadata, name)
        theirs[name] = tuple(str(key) if kind == "dict" else key for kind, key in path)
        kept = all(kind == "list" or (kind == "dict" and type(key) is str) for kind, key in path)
        if not kept:
            ours[name] = pack_path(name, path)
    return theirs, ours


def _lost_keys(plan: SavePlan) -> dict[str, str]:
    """Say which values lie under keys that cannot be kept."""
    data = plan.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    refused: dict[str, str] = {}
    for name in plan.items.catalog.names:
        try:
            pack_path(name, paths.get(name, ()))
        except ValueRefusedError as error:
            refused.update(error.reasons)
    return refused


def _empty(metadata: Metadata) -> dict[str, Any]:
    """Return the way to each empty dict, which torch's entries must not have; see `OWN_EMPTY`."""
    known = metadata.state_dict_metadata
    return {
        name: pack_path(name, _path(metadata, name)) if name in known else None
        for name in sorted(empty_names(metadata.planner_data))
    }


def _path(metadata: Metadata, name: str) -> Path:
    data = metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    return tuple(paths.get(name, (("dict", name),)))


def _older(store: Store) -> tuple[str, ...]:
    """Name the files of the DCP checkpoint that is to be replaced, but for `.metadata`."""
    if not store.exists(METADATA) and not store.exists(FIRST_RANK):
        return ()
    files: Sequence[str] = ()
    with suppress(FormatError):  # what damaged metadata names is left alone
        files = DcpFormat().open(store).files
    return *files, *rank_metadata(store.list(recursive=False))


def _published(store: Store) -> str | None:
    if not store.exists(METADATA):
        return None
    meta = parse_metadata(read_whole(store, METADATA, "metadata")).metadata.storage_meta
    return meta.save_id if meta else None
