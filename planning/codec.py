"""Plans and metadata as compact bytes, without pickle, for exchange and for hashing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

from .columns.arrays import (
    DAMAGE,
    Ints,
    column,
    flat,
    pack,
    pack_names,
    readonly,
    unpack,
    unpack_names,
    within,
)
from .columns.items import Catalog, WriteItems
from .columns.reads import ReadItems, Transfers
from .errors import CodecError, Issue
from .frozen import from_json, to_json
from .geometry.tilings import Boxes, Grid, Tiling
from .metadata import Entries, Layout, Metadata, StorageMeta
from .plans import LoadPlan, Plan, SavePlan
from .records import KeyReport, TensorProperties

T = TypeVar("T")


def encode_plan(plan: Plan) -> bytes:
    """Encode a plan as bytes that `decode_plan` decodes to an equal plan.

    >>> plan = SavePlan([], planner_data={"note": (1, b"x")})
    >>> decode_plan(encode_plan(plan)) == plan
    True

    Raises:
        CodecError: ``planner_data`` or ``storage_data`` holds a value that needs pickle.
    """
    data: dict[str, Any] = {
        "planner_data": to_json(plan.planner_data, "planner_data"),
        "storage_data": to_json(plan.storage_data, "storage_data"),
    }
    if isinstance(plan, LoadPlan):
        keys = plan.report
        issues = [attrs.astuple(issue) for issue in keys.mismatched]
        report = (keys.missing, keys.unexpected, issues, keys.dropped)
        data["report"] = to_json(report, "report")
    header: dict[str, Any] = {"plan": "load" if isinstance(plan, LoadPlan) else "save"}
    if plan.rank is not None or plan.world_size is not None:
        header["rank"] = [plan.rank, plan.world_size]
    parts = {"items": plan.items.to_bytes(), "data": _dump(data)}
    if isinstance(plan, LoadPlan):
        parts["transfers"] = plan.transfers.to_bytes()
    elif plan.held is plan.items:
        header["held"] = "items"
    elif plan.held is not None:
        parts["held"] = plan.held.to_bytes()
    if isinstance(plan, SavePlan) and plan.left_out is not None:
        parts["left_out"] = plan.left_out.to_bytes()
    return pack(header, parts)


def decode_plan(data: bytes) -> Plan:
    """Decode one plan; see `encode_plan`.

    Raises:
        CodecError: The bytes are not a plan, or are damaged.
    """
    return decode_plans([data])[0]


def decode_plans(blobs: Iterable[bytes]) -> tuple[Plan, ...]:
    """Decode the plans of many ranks; common parts are decoded and stored once."""
    catalogs: dict[bytes, Catalog] = {}
    datas: dict[bytes, Any] = {}

    def catalog_of(data: bytes) -> Catalog:
        if data not in catalogs:
            catalogs[data] = Catalog.from_bytes(data)
        return catalogs[data]

    def plan_of(blob: bytes) -> Plan:
        header, parts = unpack(blob)
        if header.get("plan") not in ("save", "load") or not {"items", "data"} <= parts.keys():
            raise CodecError(f"these bytes are not a plan: their header says {header}")
        if parts["data"] not in datas:
            datas[parts["data"]] = _load(parts["data"])
        data = datas[parts["data"]]
        own = data["storage_data"], data["planner_data"]
        rank, world_size = place = header.get("rank", (None, None))
        if not {type(rank), type(world_size)} <= {int, type(None)}:
            raise ValueError(f"a rank is a number, not one of {place}")
        if header["plan"] == "save":
            items = WriteItems.from_bytes(parts["items"], catalog_of)
            held = items if header.get("held") == "items" else None
            if "held" in parts:
                held = WriteItems.from_bytes(parts["held"], catalog_of)
            left_out = None
            if "left_out" in parts:
                left_out = WriteItems.from_bytes(parts["left_out"], catalog_of)
            return SavePlan(items, *own, rank, world_size, held, left_out)
        missing, unexpected, issues, dropped = data["report"]
        keys = KeyReport(missing, unexpected, [Issue(*issue) for issue in issues], dropped)
        reads = ReadItems.from_bytes(parts["items"])
        return LoadPlan(
            reads, *own, keys, Transfers.from_bytes(parts["transfers"]), rank, world_size
        )

    plans: list[Plan] = []
    for blob in blobs:
        try:
            plans.append(plan_of(blob))
        except CodecError:
            raise
        except DAMAGE as error:
            raise CodecError(f"a plan is damaged: {error!r}") from error
    return tuple(plans)


def fingerprint(value: Plan | Metadata) -> str:
    """Return a digest of a plan or of metadata; equal values have equal digests.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"a": 1, "b": 2})
    >>> fingerprint(SavePlan(plan.items[:1])) == fingerprint(SavePlan([plan.items[0]]))
    True
    """
    if isinstance(value, Metadata):
        entries = value.state_dict_metadata  # by name, with tables in order of first use
        names = sorted(entries.names)
        row = column([entries.row_of[name] for name in names])
        layout, layouts = _first_use(entries.layout[row], entries.layouts)
        prop, props = _first_use(entries.prop[row], entries.props)
        entries = Entries(tuple(names), props, prop, layouts, layout)
        data = encode_metadata(attrs.evolve(value, state_dict_metadata=entries))
    elif isinstance(value, SavePlan):
        writes = value.items.canonical()
        data = encode_plan(SavePlan(writes, value.storage_data, value.planner_data))
    else:
        reads = value.items.canonical()
        data = encode_plan(attrs.evolve(value, items=reads, rank=None, world_size=None))
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def contents_tag(plans: Iterable[SavePlan]) -> str:
    """Return a fingerprint of the plans of all ranks; a shared catalog is hashed once."""
    seen: dict[int, int] = {}
    parts: list[bytes | str] = []
    for items in (plan.items for plan in plans):
        catalog = items.catalog
        parts.append(repr(seen.get(id(catalog), catalog.content)))
        seen.setdefault(id(catalog), len(seen))
        columns = (items.row, items.offsets, items.sizes, items.shard_offsets)
        parts.append(b"".join(column.tobytes() for column in columns))
        if items.frame is not None:
            header, boxes = items.frame.pack()
            parts += [_dump(header), *(boxes[name].tobytes() for name in sorted(boxes))]
    return tag_of_parts(parts)


def tag_of_parts(parts: Iterable[bytes | str]) -> str:
    """Return a fingerprint of 32 hex digits of a sequence of texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _first_use(numbers: Ints, table: Sequence[T]) -> tuple[Ints, tuple[T, ...]]:
    """Number a table's rows in order of first use, and drop unused ones."""
    order = list(dict.fromkeys(n for n in numbers.tolist() if n >= 0))
    place = {n: i for i, n in enumerate(order)}
    return column([place.get(n, -1) for n in numbers.tolist()]), tuple(table[n] for n in order)


def encode_metadata(metadata: Metadata) -> bytes:
    """Encode metadata as bytes for `decode_metadata`; equal tilings are encoded once."""
    entries = metadata.state_dict_metadata
    data = {
        "planner_data": to_json(metadata.planner_data, "planner_data"),
        "storage_data": to_json(metadata.storage_data, "storage_data"),
        "storage_meta": to_json(metadata.storage_meta and attrs.astuple(metadata.storage_meta)),
        "version": metadata.version,
    }
    arrays: dict[str, Any] = {
        "data": _dump(data),
        "prop": entries.prop + 1,
        "layout": entries.layout + 1,
        **pack_names("names", entries.names),
        **_pack_layouts(entries.layouts),
    }
    return pack({"metadata": 1, "props": [attrs.astuple(p) for p in entries.props]}, arrays)


def decode_metadata(data: bytes) -> Metadata:
    """Decode metadata; see `encode_metadata`.

    Raises:
        CodecError: The bytes are not metadata, or damaged.
    """
    header, arrays = unpack(data)
    if header.get("metadata") != 1:
        raise CodecError(f"these bytes are not metadata of version 1: their header says {header}")
    try:
        names = unpack_names("names", arrays)
        props = tuple(TensorProperties(*p) for p in header["props"])
        layouts = _unpack_layouts(arrays)
        prop, layout = (readonly(c - 1) for c in flat(arrays, "prop", "layout"))
        fits = len(prop) == len(layout) == len(names) == len(set(names))
        fits &= within(prop + 1, len(props) + 1) and within(layout + 1, len(layouts) + 1)
        if not fits or ((prop < 0) != (layout < 0)).any():
            raise ValueError("its columns do not fit each other")
        rest = _load(arrays["data"])
        meta = None if rest["storage_meta"] is None else StorageMeta(*rest["storage_meta"])
        entries = Entries(names, props, prop, layouts, layout)
        return Metadata(entries, rest["planner_data"], rest["storage_data"], meta, rest["version"])
    except DAMAGE as error:
        raise CodecError(f"metadata is damaged: {error}") from error


def _dump(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def _load(data: bytes) -> Any:
    try:
        return from_json(json.loads(data))
    except DAMAGE as error:
        raise CodecError(f"data beside a plan's items is damaged: {error}") from error


def _concat(arrays: Sequence[Any]) -> Any:
    return np.concatenate([np.zeros(0, np.int64), *(a.reshape(-1) for a in arrays)])


def _pack_layouts(layouts: Sequence[Layout]) -> dict[str, Any]:
    """Concatenate all shapes, cuts and boxes, with their lengths alongside."""
    grids = [layout.tiling for layout in layouts if isinstance(layout.tiling, Grid)]
    boxes = [layout.tiling for layout in layouts if not isinstance(layout.tiling, Grid)]
    return {
        "size": _concat([column(layout.size) for layout in layouts]),
        "ndim": column([len(layout.size) for layout in layouts]),
        "is_grid": column([isinstance(layout.tiling, Grid) for layout in layouts]),
        "cuts": _concat([cut for grid in grids for cut in grid.cuts]),
        "cuts.length": column([len(cut) for grid in grids for cut in grid.cuts]),
        "boxes": _concat([part for box in boxes for part in (box.offsets, box.sizes)]),
        "boxes.length": column([len(box) for box in boxes]),
    }


def _unpack_layouts(arrays: dict[str, Any]) -> tuple[Layout, ...]:
    names = ("ndim", "size", "cuts", "cuts.length", "is_grid", "boxes", "boxes.length")
    if not all(within(column, 1 << 62) for column in flat(arrays, *names)):
        raise ValueError("a number is out of range")
    ndim = arrays["ndim"].tolist()
    sizes = iter(_split(arrays["size"], arrays["ndim"]))
    cuts = iter(_split(arrays["cuts"], arrays["cuts.length"]))
    is_box = arrays["is_grid"] == 0
    lengths = arrays["boxes.length"]
    spans = lengths * 2 * arrays["ndim"][is_box]
    boxes = iter(zip(_split(arrays["boxes"], spans), lengths.tolist(), strict=True))
    layouts = []
    for axes, box in zip(ndim, is_box.tolist(), strict=True):
        size = tuple(next(sizes).tolist())
        tiling: Tiling
        if box:
            numbers, count = next(boxes)
            if not axes and count > 1:
                raise ValueError("a scalar cannot have several chunks")
            pair = numbers.reshape(2, count, axes)
            tiling = Boxes(readonly(pair[0]), readonly(pair[1]))
        else:
            tiling = Grid(tuple(readonly(next(cuts)) for _ in range(axes)))
            if any(len(c) < 2 or (c[1:] <= c[:-1]).any() for c in tiling.cuts):
                raise ValueError("a grid's cuts do not ascend")
        layouts.append(Layout(size, tiling))
    return tuple(layouts)


def _split(numbers: Any, lengths: Any) -> list[Any]:
    ends = np.cumsum(lengths).tolist()
    if (ends[-1] if ends else 0) != len(numbers):
        raise ValueError("an array is cut short")
    return [numbers[a:b] for a, b in zip([0, *ends], ends, strict=False)]
