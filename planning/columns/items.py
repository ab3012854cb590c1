"""A save plan's items, stored in columns, and the catalog of their tensors and values.

The coordinator handles as many items as ranks times tensors. They are arrays that share one
`Catalog`; records are made on demand. Arrays are padded to the widest tensor: offset 0 and size 1
past a tensor's own axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import CodecError
from ..geometry.tilings import MAX_AXES, Chunk
from ..records import MetadataIndex, TensorProperties, TensorWriteData, WriteItem, WriteItemType

from .arrays import (  # isort: skip
    DAMAGE, Columns, ColumnTable, Ints, column, flat, numbered, pack, pack_names, pad, padded,
    readonly, row_tuples, spread, unpack, unpack_names, within,
)  # fmt: skip
from .frames import Coded, SourceFrame, check_boxes

NO_CHUNK: Final = Chunk((), ())  # the chunk of a non-tensor value
_TYPES: Final = {t.value: t for t in WriteItemType}
_BYTES: Final = WriteItemType.BYTE_IO.value


class Head(NamedTuple):
    """One row of a catalog, as a value that hashes quickly."""

    name: str  # the name in the checkpoint
    source: str  # the name in the state dict
    type: WriteItemType  # whether it is a tensor, a shard or a non-tensor value
    properties: TensorProperties | None  # how it is stored; None for a non-tensor value
    size: tuple[int, ...]  # the global shape, in elements; `()` for a non-tensor value

    @classmethod
    def value(cls, name: str) -> Head:
        """Return the row of a non-tensor value."""
        return cls(name, name, WriteItemType.BYTE_IO, None, ())


@attrs.frozen(eq=False, repr=False, slots=False)
class Catalog:
    """The tensors and values of a plan; one row each, shared by all items."""

    names: tuple[str, ...]  # the names in the checkpoint
    sources: tuple[str, ...]  # the names in the state dict
    type: Ints  # `WriteItemType` values
    # The distinct properties; `prop` numbers them per row (-1: none).
    props: tuple[TensorProperties, ...]
    prop: Ints
    ndim: Ints  # the number of axes
    size: Ints  # the global shape, padded with 1

    @classmethod
    def of(cls, heads: Iterable[Head]) -> Catalog:
        """Make a catalog with one row per head, in order."""
        fields = list(zip(*heads, strict=True)) or [()] * 5
        names, sources, types, properties, sizes = fields
        seen = {id(p): p for p in properties if p is not None}  # hashing each one is slow
        ids = {p: i for i, p in enumerate(dict.fromkeys(seen.values()))}
        number = {key: ids[p] for key, p in seen.items()}
        return cls(
            names,
            names if sources == names else sources,
            column([t.value for t in types]),
            tuple(ids),
            column([-1 if p is None else number[id(p)] for p in properties]),
            column([len(s) for s in sizes]),
            padded(sizes, 1),
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def axes(self) -> int:
        """The number of columns of offsets and sizes."""
        return int(self.size.shape[1])

    def head(self, row: int) -> Head:
        """Return one row as a hashable value."""
        prop, size = int(self.prop[row]), self.size[row, : self.ndim[row]]
        properties = None if prop < 0 else self.props[prop]
        kind = _TYPES[int(self.type[row])]
        return Head(self.names[row], self.sources[row], kind, properties, tuple(size.tolist()))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """All rows as hashable values."""
        types = [_TYPES[number] for number in self.type.tolist()]
        props = [(*self.props, None)[number] for number in self.prop.tolist()]
        sizes = row_tuples(self.size, self.ndim)
        return tuple(map(Head, self.names, self.sources, types, props, sizes))

    @cached_property
    def name_order(self) -> Ints:
        """The rank of each row's name in sorted order; equal names have equal ranks."""
        number = {name: i for i, name in enumerate(sorted(set(self.names)))}
        return column([number[name] for name in self.names])

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes per element in the checkpoint; 0 for non-tensor values."""
        return readonly(column([*(p.itemsize for p in self.props), 0])[self.prop])

    @property
    def is_bytes(self) -> npt.NDArray[np.bool_]:
        """Which rows are non-tensor values."""
        return np.equal(self.type, _BYTES)

    @cached_property
    def content(self) -> tuple[object, ...]:
        """All of the catalog as a hashable value that is cheap to compare."""
        arrays = (self.type, self.prop, self.ndim, self.size)
        return self.names, self.sources, self.props, self.axes, *(a.tobytes() for a in arrays)

    def to_bytes(self) -> bytes:
        """Encode: names as one text, numbers as narrow columns."""
        header = {"props": [attrs.astuple(p) for p in self.props]}
        arrays: dict[str, Any] = {
            "type": self.type,
            "prop": self.prop + 1,
            "ndim": self.ndim,
            "size": self.size,
            **pack_names("names", self.names),
        }
        if self.sources is not self.names:
            arrays.update(pack_names("sources", self.sources))
        return pack(header, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Catalog:
        """Decode, or raise `CodecError` if the columns are inconsistent."""
        header, arrays = unpack(data)
        try:
            props = tuple(TensorProperties(*p) for p in header["props"])
            names = unpack_names("names", arrays)
            sources = unpack_names("sources", arrays) if "sources" in arrays else names
            kind, ndim, prop = flat(arrays, "type", "ndim", "prop")
            size, prop = arrays["size"], readonly(prop - 1)
            fits = len({len(names), len(sources), len(kind), len(prop), len(ndim), len(size)}) == 1
            if not fits or size.ndim != 2 or size.shape[1] > MAX_AXES:
                raise ValueError("its columns differ in length")
            spare = np.arange(size.shape[1]) >= ndim[:, None]
            if not within(ndim, size.shape[1] + 1) or (size[spare] != 1).any():
                raise ValueError("a shape reaches past its axes")
            if not set(np.unique(kind).tolist()) <= _TYPES.keys() or not within(size, 1 << 62):
                raise ValueError("unknown item type or negative size")
            is_bytes = kind == _BYTES
            fits = within(prop + 1, len(props) + 1) and not ndim[is_bytes].any()
            if not fits or ((prop < 0) != is_bytes).any():
                raise ValueError("properties do not fit the item types")
        except DAMAGE as error:
            raise CodecError(f"a catalog is damaged: {error}") from error
        return cls(names, sources, kind, props, prop, ndim, size)


Merged = tuple[Catalog, list[Ints]]


def merge_catalogs(*catalogs: Catalog) -> Merged:
    """Return one catalog with the rows of several, and the new row numbers of each."""
    heads: dict[Head, int] = {}
    numbers = [column([heads.setdefault(h, len(heads)) for h in c.heads]) for c in catalogs]
    return Catalog.of(tuple(heads)), numbers


@attrs.frozen(eq=False, repr=False, slots=False)
class WriteItems(ColumnTable, Columns[WriteItem]):
    """A plan's `WriteItem`s."""

    catalog: Catalog  # their tensors
    row: Ints  # the row of the catalog of each item
    offsets: Ints  # each item's chunk, in the global frame of the checkpoint's tensor
    sizes: Ints
    # The start of the shard that holds it, in the global frame of the state dict's tensor; None if
    # every box starts where its shard does.
    source_offsets: Ints | None = None
    hint: Ints | None = None  # the look-up hints; None if there are none
    # The boxes of the state dict that become the chunks; None if they are the chunks. If there is a
    # frame, ``source_offsets`` is as wide as its boxes.
    frame: SourceFrame | None = None

    @classmethod
    def of(cls, items: Iterable[WriteItem]) -> WriteItems:
        """Convert records to columns; columns are returned unchanged."""
        if isinstance(items, WriteItems):
            return items
        records = tuple(items)
        heads: dict[Head, int] = {}
        row = [heads.setdefault(_head(item), len(heads)) for item in records]
        chunks = [i.tensor_data.chunk if i.tensor_data else NO_CHUNK for i in records]
        catalog = Catalog.of(tuple(heads))
        width = catalog.axes
        offsets = padded([c.offsets for c in chunks], 0, width)
        frame = _frame(records)
        starts = offsets if frame is None else frame.offsets
        sources = padded([i.source.offset or () for i in records], 0, starts.shape[1])
        hints = column([-1 if i.index.index is None else i.index.index for i in records])
        return cls(
            catalog,
            column(row),
            offsets,
            padded([c.sizes for c in chunks], 1, width),
            None if np.array_equal(sources, starts) else sources,
            None if (hints < 0).all() else hints,
            frame,
        )

    @classmethod
    def of_boxes(cls, held: Iterable[tuple[Head, Sequence[Chunk]]]) -> WriteItems:
        """Make columns from catalog rows and the boxes that are held of each."""
        pairs = list(held)
        catalog = Catalog.of(head for head, _ in pairs)
        boxes = [chunk for _, chunks in pairs for chunk in chunks]
        return cls(
            catalog,
            column([row for row, (_, chunks) in enumerate(pairs) for _ in chunks]),
            padded([box.offsets for box in boxes], 0, catalog.axes),
            padded([box.sizes for box in boxes], 1, catalog.axes),
        )

    def repeated(self, names: tuple[str, ...], which: Ints) -> WriteItems:
        """Return the items of named tensors, each of which is like one of the catalog here."""
        few = self.catalog
        counts = np.bincount(self.row, minlength=len(few))[which]
        first = np.searchsorted(self.row, which)  # rows are in the order of the catalog
        row, nth = spread(counts)
        own = first[row] + nth
        columns = (readonly(column[which]) for column in (few.prop, few.ndim, few.size))
        catalog = Catalog(names, names, readonly(few.type[which]), few.props, *columns)
        return WriteItems(
            catalog, readonly(row), readonly(self.offsets[own]), readonly(self.sizes[own])
        )

    def __len__(self) -> int:
        return len(self.row)

    def record(self, row: int) -> WriteItem:
        """Return the record of one row."""
        name, source, kind, properties, size = self.catalog.heads[self.row[row]]
        hint = None if self.hint is None or self.hint[row] < 0 else int(self.hint[row])
        if properties is None:
            return WriteItem(MetadataIndex(name, None, hint), kind, source=MetadataIndex(source))
        chunk = _chunk(self.offsets, self.sizes, row, len(size))
        index = MetadataIndex(name, chunk.offsets, hint)
        data, frame = TensorWriteData(chunk, properties, size), self.frame
        axes = len(size) if frame is None else int(frame.ndim[row])
        shard = MetadataIndex(source, self.shard_offsets[row, :axes].tolist())
        if frame is None:
            return WriteItem(index, kind, data, shard)
        fill = frame.fill[row]
        if fill is not None:
            return WriteItem(index, kind, data, MetadataIndex(source), fill=fill)
        box = _chunk(frame.offsets, frame.sizes, row, axes)
        return WriteItem(index, kind, data, shard, box, frame.axes[row])

    def recatalog(self, catalog: Catalog, row: Ints) -> WriteItems:
        """Return the same chunks under another catalog, given each item's row in it."""
        width, sources = catalog.axes, self.source_offsets
        if sources is not None and self.frame is None:
            sources = readonly(pad(sources, width, 0)[:, :width])
        return attrs.evolve(
            self,
            catalog=catalog,
            row=row,
            offsets=readonly(pad(self.offsets, width, 0)[:, :width]),
            sizes=readonly(pad(self.sizes, width, 1)[:, :width]),
            source_offsets=sources,
        )

    @classmethod
    def concat(
        cls, parts: Sequence[WriteItems], merge: Callable[..., Merged] = merge_catalogs
    ) -> WriteItems:
        """Concatenate several sequences under one catalog; ``merge`` may share it between ranks."""
        moved = [part for part in parts if len(part)] or list(parts[:1])
        if not moved:
            return cls.of(())
        catalog = moved[0].catalog
        if any(part.catalog is not catalog for part in moved):
            catalog, numbers = merge(*(part.catalog for part in moved))
            moved = [p.recatalog(catalog, n[p.row]) for p, n in zip(moved, numbers, strict=True)]
        if len(moved) == 1:
            return moved[0]
        framed = any(m.frame is not None for m in moved)
        apart = any(m.source_offsets is not None for m in moved)
        hinted = any(m.hint is not None for m in moved)
        if framed or apart or hinted:
            moved = [
                attrs.evolve(
                    m,
                    source_offsets=m.shard_offsets if apart else None,
                    hint=m.hints if hinted else None,
                    frame=m.source_frame if framed else None,
                )
                for m in moved
            ]
        return super().concat(moved)

    def canonical(self) -> WriteItems:
        """Return the canonical form, without hints and unused rows, equal for equal items."""
        _, first, number = numbered(self.row)
        order = np.argsort(first, kind="stable")  # rows of the catalog in order of first use
        rank = np.argsort(order, kind="stable")
        heads = [self.catalog.heads[row] for row in self.row[first[order]].tolist()]
        moved = self.recatalog(Catalog.of(heads), readonly(rank[number]))
        frame, sources = moved.frame, moved.source_offsets
        if frame is not None:
            plain = frame.is_plain(moved.catalog.ndim[moved.row], moved.offsets, moved.sizes)
            frame = None if plain else frame.canonical()
            width = moved.catalog.axes if frame is None else frame.offsets.shape[1]
            sources = readonly(pad(moved.shard_offsets, width, 0)[:, :width])
        starts = moved.offsets if frame is None else frame.offsets
        same = sources is None or np.array_equal(starts, sources)
        sources = None if same else sources
        return attrs.evolve(moved, source_offsets=sources, hint=None, frame=frame)

    def box_axes(self, item: int) -> int:
        """Return the number of axes of one item's box."""
        if self.frame is None:
            return int(self.catalog.ndim[self.row[item]])
        return int(self.frame.ndim[item])

    @property
    def hints(self) -> Ints:
        """The look-up hint of each item; -1 if there is none."""
        return np.full(len(self), -1) if self.hint is None else self.hint

    @property
    def box_offsets(self) -> Ints:
        """The start of each item's box in the state dict's tensor, in that tensor's frame."""
        return self.offsets if self.frame is None else self.frame.offsets

    @property
    def box_sizes(self) -> Ints:
        """The sizes of each item's box in the state dict's tensor."""
        return self.sizes if self.frame is None else self.frame.sizes

    @property
    def shard_offsets(self) -> Ints:
        """The start of the shard of the state dict that holds each item, in the same frame."""
        return self.box_offsets if self.source_offsets is None else self.source_offsets

    @property
    def source_frame(self) -> SourceFrame:
        """The frame; made of the chunks if there is none."""
        if self.frame is not None:
            return self.frame
        return SourceFrame.of_chunks(self.catalog.ndim[self.row], self.offsets, self.sizes)

    @property
    def is_fill(self) -> npt.NDArray[np.bool_]:
        """Which items are padding."""
        return np.zeros(len(self), bool) if self.frame is None else self.frame.fill.known

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each chunk in the checkpoint; 0 for non-tensor values."""
        return readonly(self.sizes.prod(axis=1) * self.catalog.itemsize[self.row])

    def _same(self, other: WriteItems) -> bool:
        mine, theirs = self, other
        if self.catalog is not other.catalog and self.catalog.content != other.catalog.content:
            catalog, (a, b) = merge_catalogs(self.catalog, other.catalog)
            mine, theirs = (i.recatalog(catalog, n[i.row]) for i, n in ((self, a), (other, b)))
        if mine.frame is not None or theirs.frame is not None:
            width = max(i.shard_offsets.shape[1] for i in (mine, theirs))
            a, b = (pad(i.shard_offsets, width, 0) for i in (mine, theirs))
            if not np.array_equal(a, b) or not mine.source_frame.same(theirs.source_frame):
                return False
        elif not np.array_equal(mine.shard_offsets, theirs.shard_offsets):
            return False
        columns = ("row", "offsets", "sizes")
        return all(np.array_equal(getattr(mine, c), getattr(theirs, c)) for c in columns)

    def to_bytes(self) -> bytes:
        """Encode the columns, catalog first."""
        arrays: dict[str, Any] = {
            "catalog": self.catalog.to_bytes(),
            "row": self.row,
            "offsets": self.offsets,
            "sizes": self.sizes,
        }
        if self.source_offsets is not None:
            arrays["source_offsets"] = self.source_offsets
        if self.hint is not None:
            arrays["hint"] = self.hint + 1
        header, columns = ({}, {}) if self.frame is None else self.frame.pack()
        return pack(header, {**arrays, **columns})

    @classmethod
    def from_bytes(
        cls, data: bytes, catalog_of: Callable[[bytes], Catalog] = Catalog.from_bytes
    ) -> WriteItems:
        """Decode; ``catalog_of`` lets a caller share catalogs between ranks."""
        header, arrays = unpack(data)
        try:
            catalog = catalog_of(arrays["catalog"])
            (row,), offsets, sizes = flat(arrays, "row"), arrays["offsets"], arrays["sizes"]
            if not within(row, len(catalog)):
                raise ValueError("its columns do not fit its catalog")
            ndim = catalog.ndim[row]
            check_boxes(ndim, catalog.axes, [offsets], [sizes])
            frame = SourceFrame.unpack(header, arrays, catalog.is_bytes[row], ndim, sizes)
            sources = arrays.get("source_offsets")
            if sources is not None:
                boxes = (ndim, offsets) if frame is None else (frame.ndim, frame.offsets)
                check_boxes(boxes[0], boxes[1].shape[1], [sources])
            hint = readonly(flat(arrays, "hint")[0] - 1) if "hint" in arrays else None
            if hint is not None and len(hint) != len(row):
                raise ValueError("it has more hints than items, or fewer")
        except DAMAGE as error:
            raise CodecError(f"a plan's items are damaged: {error}") from error
        return cls(catalog, row, offsets, sizes, sources, hint, frame)


def _head(item: WriteItem) -> Head:
    data = item.tensor_data
    properties, size = (None, ()) if data is None else (data.properties, data.size)
    return Head(item.index.fqn, item.source.fqn, item.type, properties, size)


def _frame(records: Sequence[WriteItem]) -> SourceFrame | None:
    if all(item.source_box is None and item.fill is None for item in records):
        return None
    boxes = [item.source_chunk or NO_CHUNK for item in records]
    return SourceFrame(
        column([len(box.sizes) for box in boxes]),
        padded([box.offsets for box in boxes], 0),
        padded([box.sizes for box in boxes], 1),
        Coded.of(item.axes for item in records),
        Coded.of(item.fill for item in records),
    )


def _chunk(offsets: Ints, sizes: Ints, row: int, axes: int) -> Chunk:
    return Chunk(offsets[row, :axes].tolist(), sizes[row, :axes].tolist())
