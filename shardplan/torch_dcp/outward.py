"""Our records as torch's, without loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans

from shardplan.io import torch_dtype
from shardplan.io.formats.dcp import OWN_EMPTY, OWN_PATHS, pack_path
from shardplan.planning import RefusedError, listed

from .. import planning as ours
from .data import data_to_torch, paths_to_torch, split_empty, split_sizes
from .records import StorageInfo, StoragePrefix, inside

__all__ = ["to_torch"]


def to_torch(record: Any) -> Any:
    """Return a record of ours as torch's.

    What torch has no word for goes along in a plan's ``planner_data``, so the plan comes back
    whole: its sources, its rank, what the rank holds, a load plan's report.

    Args:
        record: Any record of `shardplan.planning` that torch.distributed.checkpoint has as well.

    >>> to_torch(ours.MetadataIndex("w", (4, 0)))
    MetadataIndex(fqn='w', offset=torch.Size([4, 0]), index=None)

    Raises:
        RefusedError: torch's record cannot say it; see the message.
    """
    convert = _TO.get(type(record))
    if convert is None:
        raise TypeError(f"torch.distributed.checkpoint has no {type(record).__name__}")
    return convert(record)


def _torch_constant(kind: type, name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise RefusedError(f"torch has no {kind.__name__} called {name!r}")
    return found


def _to_properties(record: ours.TensorProperties) -> theirs.TensorProperties:
    return theirs.TensorProperties(
        torch_dtype(record.dtype),
        _torch_constant(torch.layout, record.layout),
        record.requires_grad,
        _torch_constant(torch.memory_format, record.memory_format),
        record.pin_memory,
    )


def _to_chunk(record: ours.Chunk) -> theirs.ChunkStorageMetadata:
    return theirs.ChunkStorageMetadata(torch.Size(record.offsets), torch.Size(record.sizes))


def _to_index(record: ours.MetadataIndex) -> theirs.MetadataIndex:
    return theirs.MetadataIndex(record.fqn, record.offset, record.index)


def _to_write_data(record: ours.TensorWriteData) -> torch_plans.TensorWriteData:
    properties = _to_properties(record.properties)
    return torch_plans.TensorWriteData(_to_chunk(record.chunk), properties, torch.Size(record.size))


def _to_write_item(record: ours.WriteItem) -> torch_plans.WriteItem:
    if record.source != record.index:
        raise RefusedError(
            f"`{record.index.fqn}` comes from `{record.source.fqn}` at {record.source.offset}, "
            "which torch's WriteItem cannot say; convert the whole plan, which can"
        )
    return _without_source(record)


def _without_source(record: ours.WriteItem, nbytes: int | None = None) -> torch_plans.WriteItem:
    data = None if record.tensor_data is None else _to_write_data(record.tensor_data)
    kind = torch_plans.WriteItemType[record.type.name]
    told = None if nbytes is None else torch_plans.BytesIOWriteData(nbytes)
    return torch_plans.WriteItem(_to_index(record.index), kind, told, data)


def _to_read_item(record: ours.ReadItem) -> torch_plans.ReadItem:
    return torch_plans.ReadItem(
        torch_plans.LoadItemType[record.type.name],
        _to_index(record.dest_index),
        torch.Size(record.dest_offsets),
        _to_index(record.storage_index),
        torch.Size(record.storage_offsets),
        torch.Size(record.lengths),
    )


def _to_save_plan(record: ours.SavePlan) -> torch_plans.SavePlan:
    sources: dict[Any, Any] = {}
    extra: dict[str, Any] = _place(record)
    moved = False
    for item in record.items:
        key, source = _key(item.index), _key(item.source)
        moved |= key != source
        if sources.setdefault(key, source) != source:
            raise RefusedError(f"`{item.index.fqn}` at {item.index.offset} comes from two places")
    if moved:
        extra["sources"] = {k: v for k, v in sources.items() if k != v}
    if record.held is not None and record.held is not record.items:
        extra["held"] = record.held.to_bytes()
    names = {item.index.fqn for item in record.items}
    data, sizes = split_sizes(record.planner_data, names)
    return torch_plans.SavePlan(
        [_without_source(item, sizes.get(item.index.fqn)) for item in record.items],
        inside(record.storage_data, _TO),
        data_to_torch(data, names, extra),
    )


def _place(record: ours.SavePlan | ours.LoadPlan) -> dict[str, Any]:
    """Return what a plan knows of its rank, for torch's plans to carry."""
    return {} if record.rank is None else {"rank": (record.rank, record.world_size)}


def _key(index: ours.MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    return index.fqn, index.offset


def _to_load_plan(record: ours.LoadPlan) -> torch_plans.LoadPlan:
    if len(record.transfers):
        names = listed(sorted({t.read.dest_index.fqn for t in record.transfers}))
        raise RefusedError(
            f"{names}: a rank would read for another, which torch's load plans cannot say; leave "
            "share_reads out"
        )
    keys = record.report
    extra: dict[str, Any] = _place(record)
    if keys != ours.KeyReport():
        found = tuple(attrs.astuple(i, recurse=False) for i in keys.mismatched)
        lists = {"missing": keys.missing, "unexpected": keys.unexpected, "dropped": keys.dropped}
        extra["report"] = {**lists, "not": found}
    return torch_plans.LoadPlan(
        [_to_read_item(item) for item in record.items],
        inside(record.storage_data, _TO),
        data_to_torch(record.planner_data, (), extra),
    )


def _to_tensor(record: ours.TensorMetadata) -> theirs.TensorStorageMetadata:
    chunks = [_to_chunk(chunk) for chunk in record.chunks]
    properties = _to_properties(record.properties)
    return theirs.TensorStorageMetadata(properties, torch.Size(record.size), chunks)


def _to_storage_meta(record: ours.StorageMeta) -> theirs.StorageMeta:
    ids = (record.checkpoint_id, record.save_id, record.load_id)
    return theirs.StorageMeta(*ids, list(record.modules))


def _to_metadata(record: ours.Metadata) -> theirs.Metadata:
    entries = record.state_dict_metadata
    rest, empty = split_empty(record.planner_data, entries)
    data, own = paths_to_torch(rest, [name for name in entries.names if name not in empty])
    metadata = theirs.Metadata(
        {name: to_torch(entry) for name, entry in entries.items() if name not in empty},
        data,
        inside(record.storage_data, _TO),
        None if record.storage_meta is None else _to_storage_meta(record.storage_meta),
        record.version,
    )
    if own:
        packed = {name: pack_path(name, path) for name, path in own.items()}
        setattr(metadata, OWN_PATHS, packed)  # for whoever reads torch's files as a checkpoint
    if empty:
        ways = {n: None if path is None else pack_path(n, path) for n, path in empty.items()}
        setattr(metadata, OWN_EMPTY, ways)
    return metadata


def _to_info(record: StorageInfo) -> torch_files._StorageInfo:
    told = None if record.transform_descriptors is None else list(record.transform_descriptors)
    return torch_files._StorageInfo(record.relative_path, record.offset, record.length, told)


_TO: Final[dict[type, Callable[[Any], Any]]] = {
    ours.Chunk: _to_chunk,
    ours.TensorProperties: _to_properties,
    ours.TensorMetadata: _to_tensor,
    ours.BytesMetadata: lambda record: theirs.BytesStorageMetadata(),
    ours.StorageMeta: _to_storage_meta,
    ours.Metadata: _to_metadata,
    ours.MetadataIndex: _to_index,
    ours.TensorWriteData: _to_write_data,
    ours.WriteItem: _to_write_item,
    ours.ReadItem: _to_read_item,
    ours.SavePlan: _to_save_plan,
    ours.LoadPlan: _to_load_plan,
    ours.WriteItemType: lambda record: torch_plans.WriteItemType[record.name],
    ours.LoadItemType: lambda record: torch_plans.LoadItemType[record.name],
    StorageInfo: _to_info,
    StoragePrefix: lambda record: torch_files._StoragePrefix(record.prefix),
}
