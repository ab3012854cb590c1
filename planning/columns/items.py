"""A save plan's items in columns: columns behind, records in front.

A coordinator sees as many items as ranks times tensors. They are arrays that share one `Catalog` of
tensors, and a record is made when one is asked for. Arrays are padded to the widest tensor: offset
0 and size 1 past a tensor's own axes, so that overlaps do not depend on the number of axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..errors import CodecError
from ..geometry.tilings import Chunk, pad
from ..records import MetadataIndex, TensorWriteData, WriteItem
from .arrays import DAMAGE, Columns, Index, Ints, flat, numbered, pack, readonly, unpack
from .catalog import Catalog, Head, Merged, column, merge_catalogs, padded, within

__all__ = ["Columns", "Index", "NO_CHUNK", "WriteItems"]


NO_CHUNK: Final = Chunk((), ())  # what is held of a non-tensor value


@attrs.frozen(eq=False, repr=False, slots=False)
class WriteItems(Columns[WriteItem]):
    """A plan's `WriteItem`s.

    Attributes:
        catalog: The tensors they belong to.
        row: Which row of the catalog each item belongs to.
        offsets, sizes: Each item's chunk, in the global frame.
        source_offsets: Where the shard that holds it starts; None where that is ``offsets``.
        hint: The look-up hints; None where there are none.
    """

    catalog: Catalog
    row: Ints
    offsets: Ints
    sizes: Ints
    source_offsets: Ints | None = None
    hint: Ints | None = None

    @classmethod
    def of(cls, items: Iterable[WriteItem]) -> WriteItems:
        """Make columns of records; columns come back as they are."""
        if isinstance(items, WriteItems):
            return items
        records = tuple(items)
        heads: dict[Head, int] = {}
        row = [heads.setdefault(_head(item), len(heads)) for item in records]
        chunks = [i.tensor_data.chunk if i.tensor_data else NO_CHUNK for i in records]
        catalog = Catalog.of(tuple(heads))
        width = catalog.axes
        offsets = padded([c.offsets for c in chunks], 0, width)
        sources = padded([i.source.offset or () for i in records], 0, width)
        hints = column([-1 if i.index.index is None else i.index.index for i in records])
        return cls(
            catalog,
            column(row),
            offsets,
            padded([c.sizes for c in chunks], 1, width),
            None if np.array_equal(sources, offsets) else sources,
            None if (hints < 0).all() else hints,
        )

    @classmethod
    def of_boxes(cls, held: Iterable[tuple[Head, Sequence[Chunk]]]) -> WriteItems:
        """Make columns of catalog rows and the boxes that are held of each.

        >>> from shardplan.planning import TensorProperties, WriteItemType
        >>> head = Head("w", "w", WriteItemType.SHARD, TensorProperties(), (4,))
        >>> WriteItems.of_boxes([(head, [Chunk((0,), (1,)), Chunk((3,), (1,))])]).nbytes
        array([4, 4])
        """
        pairs = list(held)
        catalog = Catalog.of(head for head, _ in pairs)
        boxes = [chunk for _, chunks in pairs for chunk in chunks]
        return cls(
            catalog,
            column([row for row, (_, chunks) in enumerate(pairs) for _ in chunks]),
            padded([box.offsets for box in boxes], 0, catalog.axes),
            padded([box.sizes for box in boxes], 1, catalog.axes),
        )

    def __len__(self) -> int:
        return len(self.row)

    def record(self, row: int) -> WriteItem:
        """Make the record of one row."""
        name, source, kind, properties, size = self.catalog.heads[self.row[row]]
        hint = None if self.hint is None or self.hint[row] < 0 else int(self.hint[row])
        if properties is None:
            return WriteItem(MetadataIndex(name, None, hint), kind, source=MetadataIndex(source))
        chunk = Chunk(
            self.offsets[row, : len(size)].tolist(), self.sizes[row, : len(size)].tolist()
        )
        at = self.shard_offsets[row, : len(size)].tolist()
        return WriteItem(
            MetadataIndex(name, chunk.offsets, hint),
            kind,
            TensorWriteData(chunk, properties, size),
            MetadataIndex(source, at),
        )

    def take(self, rows: Index | slice) -> WriteItems:
        """Return the given rows (numbers, a mask or a slice), in that order."""
        return WriteItems(
            self.catalog,
            readonly(self.row[rows]),
            readonly(self.offsets[rows]),
            readonly(self.sizes[rows]),
            _optional(self.source_offsets, rows),
            _optional(self.hint, rows),
        )

    def recatalog(self, catalog: Catalog, row: Ints) -> WriteItems:
        """Return the same chunks under another catalog, given each item's row in it."""
        width, sources = catalog.axes, self.source_offsets
        return attrs.evolve(
            self,
            catalog=catalog,
            row=row,
            offsets=readonly(pad(self.offsets, width, 0)[:, :width]),
            sizes=readonly(pad(self.sizes, width, 1)[:, :width]),
            source_offsets=None if sources is None else readonly(pad(sources, width, 0)[:, :width]),
        )

    @classmethod
    def concat(
        cls, parts: Sequence[WriteItems], merge: Callable[..., Merged] | None = None
    ) -> WriteItems:
        """Return the items of several sequences, one after the other, under one catalog.

        ``merge`` lets a caller who concatenates for many ranks remember what `merge_catalogs` gave.
        """
        moved = [part for part in parts if len(part)] or list(parts[:1])
        if not moved:
            return cls.of(())
        catalog = moved[0].catalog
        if any(part.catalog is not catalog for part in moved):
            catalog, numbers = (merge or merge_catalogs)(*(part.catalog for part in moved))
            moved = [p.recatalog(catalog, n[p.row]) for p, n in zip(moved, numbers, strict=True)]
        if len(moved) == 1:
            return moved[0]
        sources = None
        if any(m.source_offsets is not None for m in moved):
            sources = readonly(np.concatenate([m.shard_offsets for m in moved]))
        hints = None
        if any(m.hint is not None for m in moved):
            every = [np.full(len(m), -1) if m.hint is None else m.hint for m in moved]
            hints = readonly(np.concatenate(every))
        return cls(
            catalog,
            readonly(np.concatenate([m.row for m in moved])),
            readonly(np.concatenate([m.offsets for m in moved])),
            readonly(np.concatenate([m.sizes for m in moved])),
            sources,
            hints,
        )

    def canonical(self) -> WriteItems:
        """Return equal items in the one form that equal items have: no hints, no spare rows."""
        _, first, number = numbered(self.row)
        order = np.argsort(first, kind="stable")  # rows of the catalog in order of first use
        rank = np.argsort(order, kind="stable")
        heads = [self.catalog.heads[row] for row in self.row[first[order]].tolist()]
        moved = self.recatalog(Catalog.of(heads), readonly(rank[number]))
        same = np.array_equal(moved.offsets, moved.shard_offsets)
        sources = None if same else moved.source_offsets
        return attrs.evolve(moved, source_offsets=sources, hint=None)

    @property
    def shard_offsets(self) -> Ints:
        """Where the shard of the state dict that holds each item starts."""
        return self.offsets if self.source_offsets is None else self.source_offsets

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each chunk in the checkpoint; 0 for non-tensor values."""
        return readonly(self.sizes.prod(axis=1) * self.catalog.itemsize[self.row])

    def _same(self, other: WriteItems) -> bool:
        mine, theirs = self.row, other.row
        if self.catalog is not other.catalog and self.catalog.content != other.catalog.content:
            ids: dict[Head, int] = {}
            mine, theirs = (
                column([ids.setdefault(h, len(ids)) for h in items.catalog.heads])[items.row]
                if len(items)
                else items.row
                for items in (self, other)
            )
        width = min(
            self.offsets.shape[1], other.offsets.shape[1]
        )  # equal heads: the rest is padding
        pairs = [
            (self.offsets, other.offsets),
            (self.sizes, other.sizes),
            (self.shard_offsets, other.shard_offsets),
        ]
        return np.array_equal(mine, theirs) and all(
            np.array_equal(a[:, :width], b[:, :width]) for a, b in pairs
        )

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
        return pack({}, arrays)

    @classmethod
    def from_bytes(
        cls, data: bytes, catalog_of: Callable[[bytes], Catalog] = Catalog.from_bytes
    ) -> WriteItems:
        """Decode; ``catalog_of`` lets a caller share catalogs that many ranks have in common."""
        _, arrays = unpack(data)
        try:
            catalog = catalog_of(arrays["catalog"])
            (row,), offsets, sizes = flat(arrays, "row"), arrays["offsets"], arrays["sizes"]
            sources = arrays.get("source_offsets")
            shape = (len(row), catalog.axes)
            boxes = (offsets, sizes, offsets if sources is None else sources)
            if not within(row, len(catalog)) or any(b.shape != shape for b in boxes):
                raise ValueError("its columns do not fit its catalog")
            spare = np.arange(catalog.axes) >= catalog.ndim[row][:, None]
            if any((b != fill)[spare].any() for b, fill in zip(boxes, (0, 1, 0), strict=True)):
                raise ValueError("a chunk reaches past its tensor's axes")
            if not all(within(b, 1 << 62) for b in boxes):
                raise ValueError("a negative offset or size")
            hint = readonly(flat(arrays, "hint")[0] - 1) if "hint" in arrays else None
            if hint is not None and len(hint) != len(row):
                raise ValueError("it has more hints than items, or fewer")
        except DAMAGE as error:
            raise CodecError(f"a plan's items are damaged: {error}") from error
        return cls(catalog, row, offsets, sizes, sources, hint)


def _head(item: WriteItem) -> Head:
    data = item.tensor_data
    properties, size = (None, ()) if data is None else (data.properties, data.size)
    return Head(item.index.fqn, item.source.fqn, item.type, properties, size)


def _optional(values: Ints | None, rows: Index | slice) -> Ints | None:
    return None if values is None else readonly(values[rows])
