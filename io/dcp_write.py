"""How is a DCP checkpoint written? Archives one after another, and `.metadata` last of all.

Torch goes by the names and places in `.metadata` alone, so it is written last and replaced at once,
as our own manifest is; files of a save that replaces another have names of their own.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import CodecError, Metadata, SavePlan, flatten
from shardplan.planning.metadata import TensorMetadata
from shardplan.planning.packing import DAMAGE

from .dcp_metadata import METADATA, OWN_PATHS, parse_metadata
from .errors import ExistsError, FormatError, ValueRefusedError
from .pieces import Piece, collect
from .pool import Pool, default_pool
from .sources import detect, open_source
from .stores import Store, StoreError
from .torchvalues import dump_values, pickle_tensor
from .torchzip import ALIGNMENT
from .torchzip_write import Member, archive_parts, archive_size, members_of
from .writers import Part

__all__ = ["DcpWriter"]

_FILE_BYTES: Final = 256 << 20  # a rank with more than this writes several files at once
_MAX_FILES: Final = 4
_STAGED: Final = 96 << 20  # memory that one file in the making may take
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, type(None))


@attrs.frozen
class _Written:
    """An item that a rank wrote: its name, offset and number, its file, and its bytes there."""

    name: str
    offset: tuple[int, ...] | None
    number: int
    file: str
    begin: int
    length: int


class DcpWriter:
    """Writes checkpoints that `torch.distributed.checkpoint.load` reads; a `Writer`."""

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        if not overwrite and _format(store) is not None:
            raise ExistsError(f"{store.url} holds a checkpoint; pass overwrite=True to replace it")

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
    ) -> Part:
        """Write one rank's ``.distcp`` files; see `Writer.write`."""
        flat, _ = flatten(sd)
        pieces, values, refused = collect(flat, plan)
        try:
            dumped = dump_values(values)
        except ValueRefusedError as error:
            raise ValueRefusedError({**refused, **error.reasons}) from None
        if refused:
            raise ValueRefusedError(refused)
        tag = f"-{save_id}" if store.exists(METADATA) else ""
        files = [
            _File(f"__{rank}_{number}{tag}.distcp", items)
            for number, items in enumerate(_share(_items(plan, pieces, dumped)))
        ]
        try:
            (pool or default_pool()).map(
                lambda file: store.write(file.name, file.parts(), nbytes=file.nbytes),
                files,
                nbytes=_STAGED + store.staging,
            )
        except BaseException:
            with suppress(Exception):
                store.delete([file.name for file in files])
            raise
        told = [attrs.astuple(item) for file in files for item in file.written]
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
        old = _older(store) if overwrite else ()
        store.sync()
        store.replace(METADATA, data)
        doomed = [name for name in old if name not in {item.file for item in written}]
        try:
            if doomed:
                store.delete(doomed)
        except StoreError:
            return tuple(doomed)
        return ()

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files; see `Writer.discard`."""
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
    members: Sequence[Member] = ()
    data: bytes = b""

    def parts(self) -> Iterator[memoryview]:
        return archive_parts(self.members) if self.members else iter([memoryview(self.data)])


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

    def parts(self) -> Iterator[memoryview]:
        """Yield its bytes in order."""
        at = 0
        for item, place in zip(self._items, self.written, strict=True):
            yield memoryview(bytes(place.begin - at))
            yield from item.parts()
            at = place.begin + place.length


def _items(
    plan: SavePlan, pieces: Mapping[int, Piece], dumped: Mapping[str, bytes]
) -> Iterator[_Item]:
    """Yield what a plan writes, values first, as torch does."""
    items = plan.items
    hints = np.zeros(len(items), np.int64) if items.hint is None else items.hint
    for name, data in dumped.items():
        yield _Item(name, None, 0, len(data), data=data)
    for row, piece in pieces.items():
        storage = Member("data/0", piece.nbytes, piece.blocks)
        members = members_of(pickle_tensor(piece.dtype, piece.shape), [storage])
        size = archive_size(members)
        yield _Item(piece.name, piece.offsets, int(hints[row]), size, members)


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
    meta = records.Metadata(
        {name: _torch_entry(records, entries[name]) for name in entries},
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
    return meta


def _torch_entry(records: Any, entry: Any) -> Any:
    import torch

    from .arrays import torch_dtype

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
    data = metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    theirs, ours = {}, {}
    for name in metadata.state_dict_metadata:
        path = paths.get(name, (("dict", name),))
        theirs[name] = tuple(str(key) if kind == "dict" else key for kind, key in path)
        kept = all(kind == "list" or (kind == "dict" and type(key) is str) for kind, key in path)
        if not kept and all(type(key) in _PLAIN_KEYS for _, key in path):
            ours[name] = tuple(path)
    return theirs, ours


def _format(store: Store) -> str | None:
    try:
        return detect(store)
    except FormatError:
        return None


def _older(store: Store) -> tuple[str, ...]:
    """Name the files of the checkpoint that is there, other than `.metadata`."""
    from .manifest import MANIFEST

    found: list[str] = []
    # It may be one that cannot be read: what it named is then left alone.
    with suppress(FormatError):
        format = detect(store)
        found += open_source(store, format=format).files
        found += [MANIFEST] if format == "safetensors" else []
    if store.exists(METADATA):
        with suppress(FormatError):
            found += open_source(store, format="dcp").files
    return tuple(dict.fromkeys(found))


def _published(store: Store) -> str | None:
    if not store.exists(METADATA):
        return None
    data = bytearray(store.size(METADATA))
    store.read(METADATA, [(0, memoryview(data))])
    meta = parse_metadata(bytes(data)).metadata.storage_meta
    return meta.save_id if meta else None
