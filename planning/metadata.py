"""Metadata: the contents of a checkpoint, one entry per tensor, equal tilings stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from .columns.arrays import Ints, column, readonly
from .errors import NotFoundError, nearest_hint, nearest_names
from .frozen import freeze
from .geometry.tilings import MAX_AXES, Chunk, Tiling, as_ints, shape_fault, tile_chunks
from .records import TensorProperties
from .text import Printed, Sheet, as_names, counted, human_bytes, listing

_SHOWN: Final = 12


@attrs.frozen
class TensorMetadata:
    """A tensor in a checkpoint."""

    properties: TensorProperties  # how it is stored
    size: tuple[int, ...] = attrs.field(converter=as_ints)  # its global shape, in elements
    # Its chunks: an immutable sequence of `Chunk`, given as any iterable.
    chunks: Tiling = attrs.field(converter=tile_chunks)

    def __attrs_post_init__(self) -> None:
        if any(n < 0 for n in self.size):
            raise ValueError(f"a tensor cannot have the shape {self.size}: an axis is negative")
        if len(self.size) > MAX_AXES:
            raise ValueError(f"a tensor {shape_fault(self.size)}")


@attrs.frozen
class BytesMetadata:
    """A non-tensor value in a checkpoint."""


@attrs.frozen
class StorageMeta:
    """The location of a checkpoint, and the save that made it."""

    checkpoint_id: str | None = attrs.field(default=None, converter=attrs.converters.optional(str))
    save_id: str | None = None
    load_id: str | None = None
    modules: tuple[str, ...] = attrs.field(default=(), converter=as_names)


@attrs.frozen
class Layout:
    """A global shape and its tiling; a thousand layers with the same sharding share one."""

    size: tuple[int, ...]
    tiling: Tiling


@attrs.frozen(eq=False, repr=False, slots=False)
class Entries(Mapping[str, TensorMetadata | BytesMetadata]):
    """An immutable mapping from name to metadata, in columns; records are made on look-up."""

    names: tuple[str, ...]  # the keys; one row each
    props: tuple[TensorProperties, ...]  # the distinct properties; `prop` numbers them per row
    prop: Ints = attrs.field(converter=column)
    # The distinct layouts; `layout` numbers them per row (-1: a non-tensor value).
    layouts: tuple[Layout, ...]
    layout: Ints = attrs.field(converter=column)

    @classmethod
    def of(cls, entries: Mapping[str, TensorMetadata | BytesMetadata]) -> Entries:
        """Convert records to columns; columns are returned unchanged."""
        if isinstance(entries, Entries):
            return entries
        props: dict[TensorProperties, int] = {}
        layouts: dict[tuple[tuple[int, ...], tuple[int, ...], bytes], int] = {}
        distinct: list[Layout] = []
        rows, seen = [], dict[int, tuple[int, int]]()  # many names may share one record
        for name, entry in entries.items():
            if id(entry) in seen:
                rows.append(seen[id(entry)])
                continue
            if not isinstance(entry, (TensorMetadata, BytesMetadata)):
                raise TypeError(f"`{name}`: expected tensor or bytes metadata, not {entry!r}")
            if isinstance(entry, BytesMetadata):
                rows.append((-1, -1))
                continue
            boxes = np.concatenate([entry.chunks.offsets, entry.chunks.sizes]).tobytes()
            key = (entry.size, entry.chunks.offsets.shape, boxes)
            number = layouts.setdefault(key, len(distinct))
            if number == len(distinct):
                distinct.append(Layout(entry.size, entry.chunks))
            seen[id(entry)] = props.setdefault(entry.properties, len(props)), number
            rows.append(seen[id(entry)])
        columns = column(rows, len(rows), 2)
        return cls(tuple(entries), tuple(props), columns[:, 0], tuple(distinct), columns[:, 1])

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The row of each name."""
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes per element of each entry; 0 for non-tensor values."""
        return readonly(column([*(p.itemsize for p in self.props), 0])[self.prop])

    @cached_property
    def name_order(self) -> Ints:
        """The position of each name in sorted order."""
        return readonly(np.argsort(sorted(range(len(self)), key=self.names.__getitem__)))

    def record(self, row: int) -> TensorMetadata | BytesMetadata:
        """Return the record of one row."""
        key = int(self.prop[row]), int(self.layout[row])
        if key[1] < 0:
            return BytesMetadata()
        if key not in self._records:
            layout = self.layouts[key[1]]
            self._records[key] = TensorMetadata(self.props[key[0]], layout.size, layout.tiling)
        return self._records[key]

    @cached_property
    def _records(self) -> dict[tuple[int, int], TensorMetadata]:
        """The records that were made, by properties and layout."""
        return {}

    def __getitem__(self, name: str) -> TensorMetadata | BytesMetadata:
        row = self.row_of.get(name)
        if row is None:
            raise KeyError(name)
        return self.record(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.row_of

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        if not isinstance(other, Entries):
            return dict(self) == dict(other)
        if self is other or len(self) != len(other) or self.row_of.keys() != other.row_of.keys():
            return self is other
        rows = column([other.row_of[name] for name in self.names])
        return _same(self.props, self.prop, other.props, other.prop[rows]) and _same(
            self.layouts, self.layout, other.layouts, other.layout[rows]
        )

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        prop, layout = self.prop.tolist(), self.layout.tolist()
        return Entries, (self.names, self.props, prop, self.layouts, layout)

    def __repr__(self) -> str:
        more = ", …" if len(self) > 4 else ""
        return f"<{len(self):,} Entries: {', '.join(self.names[:4])}{more}>"


def _same(a: Sequence[object], a_rows: Ints, b: Sequence[object], b_rows: Ints) -> bool:
    """Compare two columns of numbers into tables, comparing each distinct pair once."""
    pairs = np.unique(np.stack([a_rows, b_rows]), axis=1).T.tolist()
    return all(i == j if min(i, j) < 0 else a[i] == b[j] for i, j in pairs)


def _entries_of(entries: Mapping[str, TensorMetadata | BytesMetadata]) -> Entries:
    return Entries.of(entries)


@attrs.frozen(repr=False)
class Metadata(Printed):
    """The global contents of a checkpoint."""

    # Name to `TensorMetadata` or `BytesMetadata`.
    state_dict_metadata: Entries = attrs.field(converter=_entries_of)
    planner_data: Any = attrs.field(default=None, converter=freeze)  # data of planners, frozen
    # Data of the storage layer, frozen.
    storage_data: Any = attrs.field(default=None, converter=freeze)
    storage_meta: StorageMeta | None = None  # its location, and the save that made it
    version: str | None = None  # the format's version

    def entry(self, name: str) -> TensorMetadata | BytesMetadata:
        """Return one entry.

        Raises:
            NotFoundError: There is none of that name; the message suggests similar ones.
        """
        entries = self.state_dict_metadata
        if name not in entries:
            near = nearest_names(name, entries.names)
            raise NotFoundError(f"`{name}` is not in the checkpoint{nearest_hint(near)}", near)
        return entries[name]

    @property
    def _sheet(self) -> Sheet:
        entries = self.state_dict_metadata
        rows = []
        for name in entries.names[:_SHOWN]:
            entry = entries[name]
            kind, shape, chunks = "value", "", ""
            if isinstance(entry, TensorMetadata):
                kind, shape = entry.properties.dtype, str(list(entry.size))
                chunks = repr(entry.chunks)
            rows.append((name, kind, shape, chunks))
        tensors = (entry for entry in entries.values() if isinstance(entry, TensorMetadata))
        total = sum(entry.chunks.volume() * entry.properties.itemsize for entry in tensors)
        title = f"Metadata: {counted(len(entries), 'entry')}, {human_bytes(total)}"
        return listing(title, ("name", "dtype", "shape", "chunks"), rows, len(entries))


def metadata_of(sd: Mapping[Any, Any]) -> Metadata:
    """Describe the checkpoint that holds all of a state dict, every tensor in one chunk.

    This is the metadata of files that have none, such as those of ``torch.save``. Tensors count
    with their global shapes, so `load_plan` finds what each rank needs of the file.

    >>> from shardplan.planning import TensorSpec
    >>> metadata_of({"model": {"w": TensorSpec((4, 2), "bfloat16")}, "step": 7})
    Metadata: 2 entries, 16 B
    name     dtype     shape   chunks
    model.w  bfloat16  [4, 2]  Grid(0:4, 0:2)
    step     value

    Raises:
        PlanError: Two keys flatten to the same name.
        RefusedError: A checkpoint cannot hold some tensors; it names all of them.
    """
    # Needed here alone: a checkpoint is opened without the code that looks at tensors.
    from .mesh.placements import TensorSpec
    from .save import local_plan
    from .tree import flatten, nesting_data, nodes_of

    flat, paths = flatten(sd)
    whole = {
        name: attrs.evolve(value, placements=()) if isinstance(value, TensorSpec) else value
        for name, value in flat.items()
    }
    entries: dict[str, TensorMetadata | BytesMetadata] = {}
    for head in local_plan(whole).items.catalog.heads:
        entries[head.name] = BytesMetadata()
        if head.properties is not None:
            everything = Chunk([0] * len(head.size), head.size)
            entries[head.name] = TensorMetadata(head.properties, head.size, [everything])
    return Metadata(entries, planner_data=nesting_data(flat, paths, nodes_of(sd)))
