"""Lossless conversion between records of torch.distributed.checkpoint and ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import attrs
import torch
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans

from shardplan.io import torch_dtype
from shardplan.io.formats.dcp import OWN_EMPTY, OWN_PATHS, pack_path, unpack_path
from shardplan.planning import Issue, RefusedError, empty_names, freeze, listed, tile
from shardplan.planning.columns import WriteItems

from .. import planning as ours

__all__ = ["StorageInfo", "StoragePrefix", "from_torch", "to_torch"]

_OURS: Final = ("shardplan",)  # in torch's data: our original; no name is a tuple
_THEIRS: Final = "torch"  # in our data: torch's original
_KEYS: Final = ("missing", "unexpected", "dropped")  # fields of a key report that are names


@attrs.frozen
class StorageInfo:
    """Where torch's writers put one chunk: the file, the offset and the length in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@attrs.frozen
class StoragePrefix:
    """The prefix of the names of files that torch's writers make for one rank."""

    prefix: str


def to_torch(record: Any) -> Any:
    """Return a record of ours as torch's.

    Fields that torch's plans do not have are put into their ``planner_data``, so that the plan
    comes back whole: its sources, its rank, what the rank holds, a load plan's report.

    Args:
        record: Any record of `shardplan.planning` that torch.distributed.checkpoint has as well.

    >>> to_torch(ours.MetadataIndex("w", (4, 0)))
    MetadataIndex(fqn='w', offset=torch.Size([4, 0]), index=None)

    Raises:
        RefusedError: torch's record cannot express it; see the message.
    """
    convert = _TO.get(type(record))
    if convert is None:
        raise TypeError(f"torch.distributed.checkpoint has no {type(record).__name__}")
    return convert(record)


def from_torch(record: Any) -> Any:
    """Return a record of torch.distributed.checkpoint as ours.

    Data of planners and storage is frozen: dicts stay equal, lists come back as tuples and paths
    as text. ``bytes_io_data`` of items, which torch never sets, is dropped.

    Args:
        record: A plan, an item, metadata, or any part of them.

    >>> import torch.distributed.checkpoint as dcp
    >>> from_torch(dcp.metadata.MetadataIndex("w", [4, 0]))
    MetadataIndex(fqn='w', offset=(4, 0), index=None)

    Raises:
        RefusedError: Our record cannot express it; see the message.
    """
    convert = _FROM.get(type(record))
    if convert is None:
        raise TypeError(f"not a record of torch.distributed.checkpoint: {record!r}")
    return convert(record)


def _inside(value: Any, table: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Convert all records inside plain data."""
    if type(value) in table:
        return table[type(value)](value)
    if isinstance(value, Mapping):
        return {_inside(k, table): _inside(v, table) for k, v in value.items()}
    return tuple(_inside(v, table) for v in value) if type(value) in (list, tuple) else value


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add a tensor's name to the message if it cannot be converted."""
    try:
        yield
    except ValueError as error:
        raise RefusedError(f"`{name}`: {error}") from error


# Ours to torch's


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
            "which torch's WriteItem cannot express; convert the whole plan, which can"
        )
    return _without_source(record)


def _without_source(record: ours.WriteItem) -> torch_plans.WriteItem:
    data = None if record.tensor_data is None else _to_write_data(record.tensor_data)
    kind = torch_plans.WriteItemType[record.type.name]
    return torch_plans.WriteItem(_to_index(record.index), kind, tensor_data=data)


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
    for item in record.items:
        key, source = _key(item.index), _key(item.source)
        if sources.setdefault(key, source) != source:
            raise RefusedError(f"`{item.index.fqn}` at {item.index.offset} comes from two places")
    moved = {key: source for key, source in sources.items() if key != source}
    extra = _place(record) | ({"sources": moved} if moved else {})
    if record.held is not None and record.held is not record.items:
        extra["held"] = record.held.to_bytes()
    names = {item.index.fqn for item in record.items}
    return torch_plans.SavePlan(
        [_without_source(item) for item in record.items],
        _inside(record.storage_data, _TO),
        data_to_torch(record.planner_data, names, extra),
    )


def _place(record: ours.SavePlan | ours.LoadPlan) -> dict[str, Any]:
    """Return a plan's rank and world size, for torch's plan to carry."""
    return {} if record.rank is None else {"rank": (record.rank, record.world_size)}


def _key(index: ours.MetadataIndex) -> tuple[str, tuple[int, ...] | None]:
    return index.fqn, index.offset


def _to_load_plan(record: ours.LoadPlan) -> torch_plans.LoadPlan:
    if len(record.transfers):
        names = listed(sorted({t.read.dest_index.fqn for t in record.transfers}))
        raise RefusedError(
            f"{names}: a rank would read for another, which torch's load plans cannot express; "
            "leave share_reads out"
        )
    extra, report = _place(record), record.report
    if report != ours.KeyReport():
        issues = tuple(attrs.astuple(i, recurse=False) for i in report.mismatched)
        extra["report"] = {name: getattr(report, name) for name in _KEYS} | {"not": issues}
    return torch_plans.LoadPlan(
        [_to_read_item(item) for item in record.items],
        _inside(record.storage_data, _TO),
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
        _inside(record.storage_data, _TO),
        None if record.storage_meta is None else _to_storage_meta(record.storage_meta),
        record.version,
    )
    # torch's readers ignore these attributes; those of DCP files here understand them.
    for attribute, paths in ((OWN_PATHS, own), (OWN_EMPTY, empty)):
        if paths:
            packed = {n: None if p is None else pack_path(n, p) for n, p in paths.items()}
            setattr(metadata, attribute, packed)
    return metadata


def _to_info(record: StorageInfo) -> torch_files._StorageInfo:
    how = record.transform_descriptors
    place = (record.relative_path, record.offset, record.length)
    return torch_files._StorageInfo(*place, None if how is None else list(how))


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


# torch's to ours


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
    index, data = _from_index(record.index), None
    if record.tensor_data is not None:
        with _naming(index.fqn):
            data = _from_write_data(record.tensor_data)
    kind = ours.WriteItemType[record.type.name]
    return ours.WriteItem(index, kind, data, index if source is None else source)


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
        raise RefusedError("this plan stands for a cached one of its rank; switch caching off")
    data, extra = data_from_torch(record.planner_data, {item.index.fqn for item in record.items})
    sources = {k: ours.MetadataIndex(*v) for k, v in extra.get("sources", {}).items()}
    items = []
    for item in record.items:
        at = None if item.index.offset is None else tuple(item.index.offset)
        items.append(_from_write_item(item, sources.get((item.index.fqn, at))))
    held = WriteItems.from_bytes(extra["held"]) if "held" in extra else None
    rank, world_size = extra.get("rank", (None, None))
    stored = _inside(record.storage_data, _FROM)
    return ours.SavePlan(items, stored, data, rank, world_size, held)


def _from_load_plan(record: torch_plans.LoadPlan) -> ours.LoadPlan:
    data, extra = data_from_torch(record.planner_data, ())
    keys = {"not": (), **extra.get("report", dict.fromkeys(_KEYS, ()))}
    issues = [Issue(*fields) for fields in keys["not"]]
    report = ours.KeyReport(keys["missing"], keys["unexpected"], issues, keys["dropped"])
    rank, world_size = extra.get("rank", (None, None))
    return ours.LoadPlan(
        [_from_read_item(item) for item in record.items],
        _inside(record.storage_data, _FROM),
        data,
        report,
        rank=rank,
        world_size=world_size,
    )


def _from_tensor(record: theirs.TensorStorageMetadata) -> ours.TensorMetadata:
    boxes = [c.offsets for c in record.chunks], [c.sizes for c in record.chunks]
    chunks = tile(*boxes) if record.chunks else ()
    return ours.TensorMetadata(_from_properties(record.properties), record.size, chunks)


def _from_metadata(record: theirs.Metadata) -> ours.Metadata:
    entries = {}
    for name, entry in record.state_dict_metadata.items():
        with _naming(name):
            entries[name] = from_torch(entry)
    data, _ = data_from_torch(record.planner_data, entries)
    own, empty = (
        {n: None if p is None else unpack_path(n, p) for n, p in getattr(record, where, {}).items()}
        for where in (OWN_PATHS, OWN_EMPTY)
    )
    entries |= {name: ours.BytesMetadata() for name, path in empty.items() if path}
    return ours.Metadata(
        entries,
        with_empty(with_own_paths(data, own), empty),
        _inside(record.storage_data, _FROM),
        None if record.storage_meta is None else from_torch(record.storage_meta),
        record.version,
    )


def _from_info(record: torch_files._StorageInfo) -> StorageInfo:
    how = record.transform_descriptors
    place = (record.relative_path, record.offset, record.length)
    return StorageInfo(*place, None if how is None else tuple(how))


_FROM: Final[dict[type, Callable[[Any], Any]]] = {
    theirs.ChunkStorageMetadata: _from_chunk,
    theirs.TensorProperties: _from_properties,
    theirs.TensorStorageMetadata: _from_tensor,
    theirs.BytesStorageMetadata: lambda record: ours.BytesMetadata(),
    theirs.StorageMeta: lambda record: ours.StorageMeta(**vars(record)),  # the same fields
    theirs.Metadata: _from_metadata,
    theirs.MetadataIndex: _from_index,
    torch_plans.TensorWriteData: _from_write_data,
    torch_plans.WriteItem: _from_write_item,
    torch_plans.ReadItem: _from_read_item,
    torch_plans.SavePlan: _from_save_plan,
    torch_plans.LoadPlan: _from_load_plan,
    torch_plans.WriteItemType: lambda record: ours.WriteItemType[record.name],
    torch_plans.LoadItemType: lambda record: ours.LoadItemType[record.name],
    torch_files._StorageInfo: _from_info,
    torch_files._StoragePrefix: lambda record: StoragePrefix(record.prefix),
}


# The ``planner_data`` of plans and metadata
#
# torch keeps the path of a nested key as ``{"a.0": ("a", 0)}``, with every key as text. Ours also
# distinguishes dicts, lists and tuples and keeps keys as they are. Data is translated if that is
# lossless; otherwise the original goes along under a separate key.


def data_to_torch(data: Any, names: Collection[str], extra: Mapping[str, Any] | None = None) -> Any:
    """Return our ``planner_data`` in torch's form; `data_from_torch` returns ``extra``.

    >>> data_to_torch({"paths": {"a.w": (("dict", "a"), ("dict", "w"))}}, ["a.w", "b"])
    {'b': ('b',), 'a.w': ('a', 'w')}
    """
    translated = _translated(data, names)
    if not extra and data_from_torch(translated, names)[0] == data:
        return translated
    ours = {**(extra or {}), "planner_data": _thaw(data)}
    return {**_torch_paths(_paths_in(data), names), _OURS: ours}


def data_from_torch(data: Any, names: Collection[str]) -> tuple[Any, Mapping[str, Any]]:
    """Return torch's ``planner_data`` in our form, and the ``extra`` of `data_to_torch`.

    >>> data_from_torch({"a.w": ("a", "w"), "b": ("b",)}, ["a.w", "b"])[0]
    {'paths': {'a.w': (('dict', 'a'), ('dict', 'w'))}}
    """
    mark = data.get(_OURS) if isinstance(data, Mapping) else None
    if isinstance(mark, Mapping) and "planner_data" in mark:
        return mark["planner_data"], {k: v for k, v in mark.items() if k != "planner_data"}
    ours = data
    if _is_torch_paths(data) and set(names) <= data.keys():
        paths = {name: _path(steps) for name, steps in data.items()}
        ours = {"paths": {n: p for n, p in paths.items() if n not in names or not _is_flat(n, p)}}
    return (ours if _translated(ours, names) == data else {_THEIRS: data}), {}


def split_empty(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` without empty dicts, and the paths of these by name.

    The path is None if the dict is empty on this rank only.

    >>> split_empty({"paths": {"a.b": (("dict", "a"), ("dict", "b"))}, "empty": ("a.b",)}, ["a.b"])
    (None, {'a.b': (('dict', 'a'), ('dict', 'b'))})
    """
    hollow = empty_names(data)
    if not hollow:
        return data, {}
    known = _paths_in(data)
    empty = {
        name: tuple(known.get(name, (("dict", name),))) if name in names else None
        for name in sorted(hollow)
    }
    paths = {name: path for name, path in known.items() if name not in hollow}
    rest = {key: part for key, part in data.items() if key not in ("paths", "empty")}
    return {**rest, **({"paths": paths} if paths else {})} or None, empty


def with_empty(data: Any, empty: Mapping[str, Any]) -> Any:
    """Undo `split_empty`."""
    if not empty:
        return data
    rest = data if isinstance(data, Mapping) else {}
    nested = {name: path for name, path in empty.items() if path and not _is_flat(name, path)}
    paths = {**rest.get("paths", {}), **nested}
    return {**rest, **({"paths": paths} if paths else {}), "empty": tuple(sorted(empty))}


def with_own_paths(data: Any, own: Mapping[str, Any]) -> Any:
    """Add paths that torch's form cannot express to our ``planner_data``."""
    known = data.get("paths") if isinstance(data, Mapping) else {}
    if not own or not _are_paths(known) or not _are_paths(own):
        return data
    return {**(data or {}), "paths": {**known, **own}}


def paths_to_torch(data: Any, names: Collection[str]) -> tuple[Any, dict[str, Any]]:
    """Return our ``planner_data`` in torch's form, and the paths that it cannot express.

    >>> paths_to_torch({"paths": {"a.0": (("dict", "a"), ("tuple", 0))}}, ["a.0"])
    ({'a.0': ('a', 0)}, {'a.0': (('dict', 'a'), ('tuple', 0))})
    """
    translated = _translated(data, names)
    own = {name: path for name, path in _paths_in(data).items() if path != _path(_steps(path))}
    if own and with_own_paths(data_from_torch(translated, names)[0], own) == data:
        return translated, own
    return data_to_torch(data, names), own


def _translated(data: Any, names: Collection[str]) -> Any:
    """Return our data in torch's form, even if that loses something."""
    if isinstance(data, Mapping) and data.keys() == {"paths"} and _are_paths(data["paths"]):
        return _torch_paths(data["paths"], names)
    if isinstance(data, Mapping) and data.keys() == {_THEIRS}:
        return _thaw(freeze(data[_THEIRS]))
    return _thaw(freeze(data))


def _thaw(value: Any) -> Any:
    """Return frozen data as plain dicts."""
    if isinstance(value, Mapping):
        return {_thaw(key): _thaw(inner) for key, inner in value.items()}
    return tuple(map(_thaw, value)) if type(value) is tuple else value


def _paths_in(data: Any) -> Mapping[str, Any]:
    paths = data.get("paths") if isinstance(data, Mapping) else None
    return paths if _are_paths(paths) else {}


def _are_paths(paths: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return True for the paths that `flatten` returns."""
    return isinstance(paths, Mapping) and all(
        isinstance(path, tuple) and all(isinstance(s, tuple) and len(s) == 2 for s in path)
        for path in paths.values()
    )


def _is_torch_paths(data: Any) -> bool:
    """Return True for the paths that torch's planners keep."""
    return isinstance(data, Mapping) and all(
        isinstance(name, str)
        and isinstance(path, tuple)
        and all(type(step) in (str, int) for step in path)
        and name == ".".join(map(str, path))
        for name, path in data.items()
    )


def _torch_paths(paths: Mapping[str, Any], names: Collection[str]) -> dict[Any, Any]:
    """Return every name's path as torch has it."""
    known = {name: _steps(path) for name, path in paths.items()}
    return {**{name: (name,) for name in names if name not in known}, **known}


def _steps(path: tuple[tuple[str, Any], ...]) -> tuple[str | int, ...]:
    """Return a path as torch has it: text for keys of a dict, numbers for positions."""
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


def _path(steps: tuple[str | int, ...]) -> tuple[tuple[str, str | int], ...]:
    return tuple(("dict" if isinstance(step, str) else "list", step) for step in steps)


def _is_flat(name: str, path: tuple[tuple[str, str | int], ...]) -> bool:
    return path == (("dict", name),)
