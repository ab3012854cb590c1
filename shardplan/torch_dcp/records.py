"""Lossless conversion between records of torch.distributed.checkpoint and ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeGuard

import attrs
import numpy as np
import torch
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint import planner as torch_plans

from shardplan.io import torch_dtype
from shardplan.io.formats.dcp import OWN_EMPTY, OWN_PATHS, pack_path, unpack_path
from shardplan.planning import Issue, Path, RefusedError, empty_names, listed, tile
from shardplan.planning.columns import Catalog, ReadItems, WriteItems, merge_catalogs
from shardplan.planning.geometry import Axes

from .. import planning as ours

_OURS: Final = ("shardplan",)  # in torch's data: our original; no name is a tuple
_THEIRS: Final = "torch"  # in our data: torch's original
_KEYS: Final = ("missing", "unexpected", "dropped")  # fields of a key report that are names


@attrs.frozen
class StorageInfo:
    """Where torch's writers put one chunk: the file, the offset and the length in bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(tuple)
    )


@attrs.frozen
class StoragePrefix:
    """The prefix of the names of files that torch's writers make for one rank."""

    prefix: str


def to_torch(record: Any) -> Any:
    """Return a record of ours as torch's.

    Fields that torch's plans do not have are put into their ``planner_data``, so that the plan
    comes back whole: its sources and axes, its rank, what the rank holds, a load plan's report.

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
    """Convert all records inside plain data, whose mappings become dicts and lists tuples."""
    if type(value) in table:
        return table[type(value)](value)
    if isinstance(value, Mapping):
        return {_inside(k, table): _inside(v, table) for k, v in value.items()}
    return tuple(_inside(v, table) for v in value) if type(value) in (list, tuple) else value


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


@attrs.frozen
class _Origin:
    """What a chunk is made of; see `WriteItem`."""

    source: ours.MetadataIndex
    source_box: ours.Chunk | None = None
    axes: Axes | None = None
    fill: float | None = None

    @classmethod
    def of(cls, item: ours.WriteItem) -> _Origin:
        return cls(item.source, item.source_box, item.axes, item.fill)


def _to_write_item(record: ours.WriteItem) -> torch_plans.WriteItem:
    if _Origin.of(record) != _Origin(record.index):
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
    if record.dest_lengths is not None:
        raise RefusedError(
            f"`{record.dest_index.fqn}` has other axes than `{record.storage_index.fqn}`, which "
            "torch's ReadItem cannot express; convert the whole plan, which can"
        )
    return _plain_read(record)


def _plain_read(record: ours.ReadItem) -> torch_plans.ReadItem:
    return torch_plans.ReadItem(
        torch_plans.LoadItemType[record.type.name],
        _to_index(record.dest_index),
        torch.Size(record.dest_offsets),
        _to_index(record.storage_index),
        torch.Size(record.storage_offsets),
        torch.Size(record.lengths),
    )


def _to_save_plan(record: ours.SavePlan) -> torch_plans.SavePlan:
    items, origins = list(record.items), dict[ours.MetadataIndex, _Origin]()
    catalog, used = record.items.catalog, set(record.items.row.tolist())
    for item in items:
        origin = _Origin.of(item)
        if origins.setdefault(item.index, origin) != origin:
            raise RefusedError(f"`{item.index.fqn}` at {item.index.offset} comes from two places")
    moved = {index: origin for index, origin in origins.items() if origin != _Origin(index)}
    extra = _place(record) | ({"sources": moved} if moved else {})
    if record.held is not None and record.held is not record.items:
        extra["held"] = record.held.to_bytes()
    if record.left_out is not None:
        extra["left_out"] = record.left_out.to_bytes()
    if unused := [head for row, head in enumerate(catalog.heads) if row not in used]:
        extra["unused"] = Catalog.of(unused).to_bytes()
    names = {item.index.fqn for item in items}
    return torch_plans.SavePlan(
        [_without_source(item) for item in items],
        _inside(record.storage_data, _TO),
        data_to_torch(record.planner_data, names, extra),
    )


def _place(record: ours.SavePlan | ours.LoadPlan) -> dict[str, Any]:
    """Return a plan's rank and world size, for torch's plan to carry."""
    return {} if record.rank is None else {"rank": (record.rank, record.world_size)}


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
    items, framed = record.items, np.zeros(len(record.items), bool)
    if items.frame is not None:
        framed = np.array([item.dest_lengths is not None for item in items], bool)
        extra["reads"] = items.take(framed).to_bytes()
    number = (np.cumsum(framed) - 1).tolist()
    return torch_plans.LoadPlan(
        [
            _framed_read(item, number[row]) if framed[row] else _plain_read(item)
            for row, item in enumerate(items)
        ],
        _inside(record.storage_data, _TO),
        data_to_torch(record.planner_data, (), extra),
    )


def _framed_read(record: ours.ReadItem, number: int) -> torch_plans.ReadItem:
    """Return what torch has to know of a read with other axes; the plan carries the rest.

    ``number`` is its place there: see `framed_number`.
    """
    kind, dest = torch_plans.LoadItemType.TENSOR, record.dest_index.fqn
    return torch_plans.ReadItem(
        kind,
        theirs.MetadataIndex(dest, None, number),
        torch.Size([0] * len(record.lengths)),
        _to_index(record.storage_index),
        torch.Size(record.storage_offsets),
        torch.Size(record.lengths),
    )


def framed_number(item: torch_plans.ReadItem) -> int | None:
    """Return the number of a read among those with other axes; None if it is not one of them."""
    is_tensor = item.type is torch_plans.LoadItemType.TENSOR
    return item.dest_index.index if is_tensor and item.dest_index.offset is None else None


def framed_reads(plan: torch_plans.LoadPlan) -> ReadItems:
    """Return the reads with other axes that a plan carries, by number."""
    _, extra = data_from_torch(plan.planner_data, ())
    return ReadItems.from_bytes(extra["reads"]) if "reads" in extra else ReadItems.of(())


def _to_tensor(record: ours.TensorMetadata) -> theirs.TensorStorageMetadata:
    chunks = [_to_chunk(chunk) for chunk in record.chunks]
    properties = _to_properties(record.properties)
    return theirs.TensorStorageMetadata(properties, torch.Size(record.size), chunks)


def _to_storage_meta(record: ours.StorageMeta) -> theirs.StorageMeta:
    ids = (record.checkpoint_id, record.save_id, record.load_id)
    return theirs.StorageMeta(*ids, list(record.modules))


def _to_metadata(record: ours.Metadata) -> theirs.Metadata:
    entries, meta = record.state_dict_metadata, record.storage_meta
    nesting = _nesting_of(record.planner_data, entries)
    metadata = theirs.Metadata(
        {name: to_torch(entry) for name, entry in entries.items() if name not in nesting.empty},
        data_to_torch(record.planner_data, entries, beside=True),
        _inside(record.storage_data, _TO),
        None if meta is None else _to_storage_meta(meta),
        record.version,
    )
    # torch's readers ignore these attributes; those of DCP files here understand them.
    for attribute, paths in ((OWN_PATHS, nesting.own), (OWN_EMPTY, nesting.empty)):
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

# Records with the same fields; ours convert values such as torch.Size themselves.
_SAME: Final[dict[type, Callable[..., Any]]] = {
    theirs.ChunkStorageMetadata: ours.Chunk,
    theirs.TensorProperties: ours.TensorProperties,
    theirs.BytesStorageMetadata: ours.BytesMetadata,
    theirs.StorageMeta: ours.StorageMeta,
    theirs.MetadataIndex: ours.MetadataIndex,
    torch_plans.TensorWriteData: ours.TensorWriteData,
    torch_plans.ReadItem: ours.ReadItem,
    torch_files._StorageInfo: StorageInfo,
    torch_files._StoragePrefix: StoragePrefix,
}
_FIELDS: Final = {kind: [field.name for field in dataclasses.fields(kind)] for kind in _SAME}


def _from_same(record: Any) -> Any:
    kind = type(record)
    values = [getattr(record, name) for name in _FIELDS[kind]]
    return _SAME[kind](*[_FROM[type(v)](v) if type(v) in _FROM else v for v in values])


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add a tensor's name to the message if it cannot be converted."""
    try:
        yield
    except ValueError as error:
        raise RefusedError(f"`{name}`: {error}") from error


def _from_write_item(
    record: torch_plans.WriteItem, origins: Mapping[ours.MetadataIndex, _Origin] = {}
) -> ours.WriteItem:
    index, data = _from_same(record.index), None
    if record.tensor_data is not None:
        with _naming(index.fqn):
            data = _from_same(record.tensor_data)
    kind = ours.WriteItemType[record.type.name]
    origin = origins.get(index, _Origin(index))
    return ours.WriteItem(
        index, kind, data, origin.source, origin.source_box, origin.axes, origin.fill
    )


def _from_save_plan(record: torch_plans.SavePlan) -> ours.SavePlan:
    if not record.usable:
        raise RefusedError("this plan stands for a cached one of its rank; switch caching off")
    data, extra = data_from_torch(record.planner_data, {item.index.fqn for item in record.items})
    origins = extra.get("sources", {})
    items = WriteItems.of(_from_write_item(item, origins) for item in record.items)
    if "unused" in extra:  # tensors of which the rank holds nothing, which passes know by name
        catalog, rows = merge_catalogs(items.catalog, Catalog.from_bytes(extra["unused"]))
        items = items.recatalog(catalog, rows[0][items.row])
    held, left_out = (
        WriteItems.from_bytes(extra[name]) if name in extra else None
        for name in ("held", "left_out")
    )
    rank, world_size = extra.get("rank", (None, None))
    stored = _inside(record.storage_data, _FROM)
    return ours.SavePlan(items, stored, data, rank, world_size, held, left_out)


def _from_load_plan(record: torch_plans.LoadPlan) -> ours.LoadPlan:
    data, extra = data_from_torch(record.planner_data, ())
    keys = {"not": (), **extra.get("report", dict.fromkeys(_KEYS, ()))}
    issues = [Issue(*fields) for fields in keys["not"]]
    report = ours.KeyReport(keys["missing"], keys["unexpected"], issues, keys["dropped"])
    rank, world_size = extra.get("rank", (None, None))
    framed, items = framed_reads(record), list[ours.ReadItem]()
    for item in record.items:
        number = framed_number(item) if len(framed) else None
        items.append(_from_same(item) if number is None else framed[number])
    stored = _inside(record.storage_data, _FROM)
    return ours.LoadPlan(items, stored, data, report, rank=rank, world_size=world_size)


def _from_tensor(record: theirs.TensorStorageMetadata) -> ours.TensorMetadata:
    boxes = [c.offsets for c in record.chunks], [c.sizes for c in record.chunks]
    chunks = tile(*boxes) if record.chunks else ()
    return ours.TensorMetadata(_from_same(record.properties), record.size, chunks)


def _from_metadata(record: theirs.Metadata) -> ours.Metadata:
    entries = {}
    for name, entry in record.state_dict_metadata.items():
        with _naming(name):
            entries[name] = from_torch(entry)
    own, empty = (
        {n: None if p is None else unpack_path(n, p) for n, p in getattr(record, where, {}).items()}
        for where in (OWN_PATHS, OWN_EMPTY)
    )
    entries |= {name: ours.BytesMetadata() for name, path in empty.items() if path}
    return ours.Metadata(
        entries,
        data_from_torch(record.planner_data, entries, own, empty)[0],
        _inside(record.storage_data, _FROM),
        None if record.storage_meta is None else _from_same(record.storage_meta),
        record.version,
    )


_FROM: Final[dict[type, Callable[[Any], Any]]] = {
    **dict.fromkeys(_SAME, _from_same),
    theirs.TensorStorageMetadata: _from_tensor,
    theirs.Metadata: _from_metadata,
    torch_plans.WriteItem: _from_write_item,
    torch_plans.SavePlan: _from_save_plan,
    torch_plans.LoadPlan: _from_load_plan,
    torch_plans.WriteItemType: lambda record: ours.WriteItemType[record.name],
    torch_plans.LoadItemType: lambda record: ours.LoadItemType[record.name],
}


# The ``planner_data`` of plans and metadata
#
# torch keeps the path of a nested key as ``{"a.0": ("a", 0)}``, with every key as text. Ours also
# distinguishes dicts, lists and tuples, keeps keys as they are, and lists empty dicts. Metadata
# carries what that loses beside it. Other data goes along under a key of its own.


@attrs.frozen
class _Nesting:
    """The paths of nested keys as torch keeps them, and what these lose."""

    paths: dict[str, tuple[str | int, ...]]  # the path of every name, in torch's form
    # The paths that torch's form cannot express, in ours.
    own: dict[str, Path] = attrs.field(factory=dict)
    # The paths of empty dicts, in ours; None for one that is empty on this rank only.
    empty: dict[str, Path | None] = attrs.field(factory=dict)


def _nesting_of(data: Any, names: Collection[str]) -> _Nesting:
    """Return what our ``planner_data`` says about nested keys, and about names without a path."""
    hollow = empty_names(data)
    known = data.get("paths") if isinstance(data, Mapping) else None
    every: dict[str, Path] = {name: (("dict", name),) for name in names}
    every |= dict(known) if _are_paths(known) else {}
    full = {name: path for name, path in every.items() if name not in hollow}
    return _Nesting(
        {name: _torch_path(path) for name, path in full.items()},
        {name: path for name, path in full.items() if path != _our_path(_torch_path(path))},
        {n: every.get(n, (("dict", n),)) if n in names else None for n in sorted(hollow)},
    )


def _nesting_data(nesting: _Nesting, names: Collection[str]) -> dict[str, Any]:
    """Undo `_nesting_of`."""
    paths = {name: _our_path(path) for name, path in nesting.paths.items()} | nesting.own
    paths |= {name: path for name, path in nesting.empty.items() if path}
    deep = {n: p for n, p in paths.items() if n not in names or p != (("dict", n),)}
    if not nesting.empty:
        return {"paths": deep}
    return ({"paths": deep} if deep else {}) | {"empty": tuple(nesting.empty)}


def data_to_torch(
    data: Any, names: Collection[str], extra: Mapping[str, Any] = {}, *, beside: bool = False
) -> Any:
    """Return our ``planner_data`` in torch's form; `data_from_torch` returns ``extra``.

    ``beside`` says that what the paths lose is kept elsewhere.

    >>> data_to_torch({"paths": {"a.w": (("dict", "a"), ("dict", "w"))}}, ["a.w", "b"])
    {'a.w': ('a', 'w'), 'b': ('b',)}
    """
    nesting = _nesting_of(data, names)
    kept = (nesting.own, nesting.empty) if beside else ({}, {})
    original = data[_THEIRS] if isinstance(data, Mapping) and data.keys() == {_THEIRS} else None
    for form in () if extra else (nesting.paths, _inside(original, {})):
        if data_from_torch(form, names, *kept)[0] == data:
            return form
    return {**nesting.paths, _OURS: {**extra, "planner_data": _inside(data, {})}}


def data_from_torch(
    data: Any, names: Collection[str], own: Mapping[str, Any] = {}, empty: Mapping[str, Any] = {}
) -> tuple[Any, Mapping[str, Any]]:
    """Return torch's ``planner_data`` in our form, and the ``extra`` of `data_to_torch`.

    >>> data_from_torch({"a.w": ("a", "w"), "b": ("b",)}, ["a.w", "b"])[0]
    {'paths': {'a.w': (('dict', 'a'), ('dict', 'w'))}}
    """
    mark = data.get(_OURS) if isinstance(data, Mapping) else None
    if isinstance(mark, Mapping) and "planner_data" in mark:
        return mark["planner_data"], {k: v for k, v in mark.items() if k != "planner_data"}
    if _are_torch_paths(data):
        nesting = _Nesting(dict(data), dict(own), dict(empty))
        translated = _nesting_data(nesting, names)
        if _nesting_of(translated, names) == nesting:
            return translated, {}
    return (None if data is None else {_THEIRS: data}), {}


def _are_paths(paths: Any) -> TypeGuard[Mapping[str, Path]]:
    """Return True for the paths that `flatten` returns."""
    return isinstance(paths, Mapping) and all(
        isinstance(path, tuple) and all(isinstance(s, tuple) and len(s) == 2 for s in path)
        for path in paths.values()
    )


def _are_torch_paths(data: Any) -> bool:
    """Return True for the paths that torch's planners keep."""
    return isinstance(data, Mapping) and all(
        isinstance(path, tuple) and path and all(type(step) in (str, int) for step in path)
        for path in data.values()
    )


def _torch_path(path: Path) -> tuple[str | int, ...]:
    """Return a path as torch has it: text for keys of a dict, numbers for positions."""
    return tuple(str(key) if kind == "dict" else key for kind, key in path)


def _our_path(steps: tuple[str | int, ...]) -> Path:
    return tuple(("dict" if isinstance(step, str) else "list", step) for step in steps)
