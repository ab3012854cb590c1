"""torch's records as ours, without loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans

from shardplan.io.formats.dcp import OWN_EMPTY, OWN_PATHS, unpack_path
from shardplan.planning import Issue, RefusedError, tile
from shardplan.planning.columns import WriteItems

from .. import planning as ours
from .data import data_from_torch, with_empty, with_own_paths, with_sizes
from .records import StorageInfo, StoragePrefix, inside

__all__ = ["from_torch"]

_NOWHERE: Final = (None, None)  # the rank and world size of a plan that knows neither


def from_torch(record: Any) -> Any:
    """Return a record of torch.distributed.checkpoint as ours.

    Data of planners and storage is frozen: dicts stay equal, lists come back as tuples and paths
    as text.

    Args:
        record: A plan, an item, metadata, or any part of them.

    >>> import torch.distributed.checkpoint as dcp
    >>> from_torch(dcp.metadata.MetadataIndex("w", [4, 0]))
    MetadataIndex(fqn='w', offset=(4, 0), index=None)

    Raises:
        RefusedError: Our record cannot say it; see the message.
    """
    convert = _FROM.get(type(record))
    if convert is None:
        raise TypeError(f"not a record of torch.distributed.checkpoint: {record!r}")
    return convert(record)


def _from_properties(record: theirs.TensorProperties) -> ours.TensorProperties:
    return ours.TensorProperties(
        record.dtype,
        record.layout,
        record.requires_grad,
        record.memory_format,
        record.pin_memory,
    )


def _from_chunk(record: theirs.ChunkStorageMetadata) -> ours.Chunk:
    return ours.Chunk(record.offsets, record.sizes)


def _from_index(record: theirs.MetadataIndex) -> ours.MetadataIndex:
    return ours.MetadataIndex(record.fqn, record.offset, record.index)


def _from_write_data(record: torch_plans.TensorWriteData) -> ours.TensorWriteData:
    properties = _from_properties(record.properties)
    return ours.TensorWriteData(_from_chunk(record.chunk), properties, record.size)


def _from_write_item(
    record: torch_plans.WriteItem, source: ours.MetadataIndex | None = None
) -> ours.WriteItem:
    kind, index = ours.WriteItemType[record.type.name], _from_index(record.index)
    data = None
    if record.tensor_data is not None:
        with _Naming(record.index.fqn):
            data = _from_write_data(record.tensor_data)
    return ours.WriteItem(index, kind, data, index if source is None else source)


def _from_lone_item(record: torch_plans.WriteItem) -> ours.WriteItem:
    if record.bytes_io_data is not None:
        raise RefusedError(
            f"`{record.index.fqn}` has bytes_io_data, for which our WriteItem has no field; "
            "convert the whole plan, which can"
        )
    return _from_write_item(record)


def _from_read_item(record: torch_plans.ReadItem) -> ours.ReadItem:
    return ours.ReadItem(
        ours.LoadItemType[record.type.name],
        _from_index(record.dest_index),
        record.dest_offsets,
        _from_index(record.storage_index),
        record.storage_offsets,
        record.lengths,
    )


def _from_save_plan(record: torch_plans.SavePlan) -> ours.SavePlan:
    if not record.usable:
        raise RefusedError("this plan stands for one that its rank remembers; switch caching off")
    names = {item.index.fqn for item in record.items}
    data, extra = data_from_torch(record.planner_data, names)
    sources = extra.get("sources", {})
    items = []
    for item in record.items:
        at = None if item.index.offset is None else tuple(item.index.offset)
        found = sources.get((item.index.fqn, at))
        items.append(_from_write_item(item, None if found is None else ours.MetadataIndex(*found)))
    data = with_sizes(data, _sizes(record.items))
    held = WriteItems.from_bytes(extra["held"]) if "held" in extra else None
    stored, (rank, world_size) = inside(record.storage_data, _FROM), extra.get("rank", _NOWHERE)
    return ours.SavePlan(items, stored, data, rank, world_size, held)


def _sizes(items: Sequence[torch_plans.WriteItem]) -> dict[str, int]:
    """Return the sizes that items tell of values, by name."""
    found: dict[str, int | None] = {}
    for item in items:
        name = item.index.fqn
        told = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
        if found.setdefault(name, told) != told:
            raise RefusedError(f"`{name}` has several items, of which bytes_io_data differs")
    return {name: told for name, told in found.items() if told is not None}


def _from_load_plan(record: torch_plans.LoadPlan) -> ours.LoadPlan:
    data, extra = data_from_torch(record.planner_data, ())
    keys = extra.get("report", {"missing": (), "unexpected": (), "not": (), "dropped": ()})
    issues = [Issue(*fields) for fields in keys["not"]]
    report = ours.KeyReport(keys["missing"], keys["unexpected"], issues, keys["dropped"])
    rank, world_size = extra.get("rank", _NOWHERE)
    return ours.LoadPlan(
        [_from_read_item(item) for item in record.items],
        inside(record.storage_data, _FROM),
        data,
        report,
        rank=rank,
        world_size=world_size,
    )


def _from_tensor(record: theirs.TensorStorageMetadata) -> ours.TensorMetadata:
    boxes = [c.offsets for c in record.chunks], [c.sizes for c in record.chunks]
    chunks = tile(*boxes) if record.chunks else ()
    return ours.TensorMetadata(_from_properties(record.properties), record.size, chunks)


def _from_storage_meta(record: theirs.StorageMeta) -> ours.StorageMeta:
    return ours.StorageMeta(**vars(record))  # the same fields


def _from_metadata(record: theirs.Metadata) -> ours.Metadata:
    entries = {}
    for name, entry in record.state_dict_metadata.items():
        with _Naming(name):
            entries[name] = from_torch(entry)
    meta = record.storage_meta
    data, _ = data_from_torch(record.planner_data, entries)
    own, empty = (_ways(getattr(record, extra, {})) for extra in (OWN_PATHS, OWN_EMPTY))
    entries |= {name: ours.BytesMetadata() for name, path in empty.items() if path}
    return ours.Metadata(
        entries,
        with_empty(with_own_paths(data, own), empty),
        inside(record.storage_data, _FROM),
        None if meta is None else _from_storage_meta(meta),
        record.version,
    )


def _ways(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the way to each value, as `pack_path` was given it."""
    return {name: None if way is None else unpack_path(name, way) for name, way in packed.items()}


class _Naming:
    """Says which key it was whose tensor has no counterpart."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise RefusedError(f"`{self.name}`: {error}") from error


def _from_info(record: torch_files._StorageInfo) -> StorageInfo:
    place = (record.relative_path, record.offset, record.length)
    return StorageInfo(*place, record.transform_descriptors)


_FROM: Final[dict[type, Callable[[Any], Any]]] = {
    theirs.ChunkStorageMetadata: _from_chunk,
    theirs.TensorProperties: _from_properties,
    theirs.TensorStorageMetadata: _from_tensor,
    theirs.BytesStorageMetadata: lambda record: ours.BytesMetadata(),
    theirs.StorageMeta: _from_storage_meta,
    theirs.Metadata: _from_metadata,
    theirs.MetadataIndex: _from_index,
    torch_plans.TensorWriteData: _from_write_data,
    torch_plans.WriteItem: _from_lone_item,
    torch_plans.ReadItem: _from_read_item,
    torch_plans.SavePlan: _from_save_plan,
    torch_plans.LoadPlan: _from_load_plan,
    torch_plans.WriteItemType: lambda record: ours.WriteItemType[record.name],
    torch_plans.LoadItemType: lambda record: ours.LoadItemType[record.name],
    torch_files._StorageInfo: _from_info,
    torch_files._StoragePrefix: lambda record: StoragePrefix(record.prefix),
}
