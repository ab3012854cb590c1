"""A load plan's items and transfers, stored in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..errors import CodecError
from ..geometry.tilings import MAX_AXES
from ..records import LoadItemType, MetadataIndex, ReadItem, Transfer

from .arrays import (  # isort: skip
    DAMAGE, Columns, ColumnTable, Ints, column, flat, pack, pack_names, pad, padded, readonly,
    unpack, unpack_names, within,
)  # fmt: skip
from .frames import Coded, TargetFrame

_TYPES: Final = {t.value: t for t in LoadItemType}
_BYTES: Final = LoadItemType.BYTE_IO.value


@attrs.frozen(eq=False, repr=False, slots=False)
class ReadItems(ColumnTable, Columns[ReadItem]):
    """A plan's `ReadItem`s; one row per read."""

    names: tuple[str, ...]  # the names that ``dest`` and ``storage`` number
    type: Ints  # `LoadItemType` values
    ndim: Ints  # the number of axes of each read, in the checkpoint
    dest: Ints  # the shard of the state dict: name, start, hint
    dest_anchor: Ints
    dest_hint: Ints
    dest_offsets: Ints  # where the read goes, relative to that shard
    storage: Ints  # the saved chunk, likewise
    storage_anchor: Ints
    storage_hint: Ints
    storage_offsets: Ints  # where the read comes from, relative to that chunk
    lengths: Ints  # the size of the read, in elements
    # The boxes of the state dict that are filled, if they differ from what is read; then the
    # ``dest_`` columns, too, have their axes. All boxes are padded to the same width.
    frame: TargetFrame | None = None

    @classmethod
    def of(cls, items: Iterable[ReadItem]) -> ReadItems:
        """Convert records to columns; columns are returned unchanged."""
        if isinstance(items, ReadItems):
            return items
        records = tuple(items)
        names: dict[str, int] = {}
        sides: dict[str, Ints] = {}
        width = max((max(len(r.dest_offsets), len(r.lengths)) for r in records), default=0)
        for label in ("dest", "storage"):
            indices: list[MetadataIndex] = [getattr(r, f"{label}_index") for r in records]
            offsets = [getattr(r, f"{label}_offsets") for r in records]
            sides[label] = column([names.setdefault(i.fqn, len(names)) for i in indices])
            sides[f"{label}_anchor"] = padded([i.offset or () for i in indices], 0, width)
            sides[f"{label}_hint"] = column([-1 if i.index is None else i.index for i in indices])
            sides[f"{label}_offsets"] = padded(offsets, 0, width)
        return cls(
            names=tuple(names),
            type=column([r.type.value for r in records]),
            ndim=column([len(r.lengths) for r in records]),
            lengths=padded([r.lengths for r in records], 1, width),
            frame=_frame(records, width),
            **sides,
        )

    def __len__(self) -> int:
        return len(self.type)

    def record(self, row: int) -> ReadItem:
        """Return the record of one row."""
        axes, frame = slice(0, int(self.ndim[row])), self.frame
        into = axes if frame is None else slice(0, int(frame.ndim[row]))
        return ReadItem(
            _TYPES[int(self.type[row])],
            self._index(row, self.dest, self.dest_anchor[row, into], self.dest_hint),
            self.dest_offsets[row, into].tolist(),
            self._index(row, self.storage, self.storage_anchor[row, axes], self.storage_hint),
            self.storage_offsets[row, axes].tolist(),
            self.lengths[row, axes].tolist(),
            None if frame is None else frame.lengths[row, into].tolist(),
            None if frame is None else frame.axes[row],
        )

    def _index(self, row: int, name: Ints, anchor: Ints, hint: Ints) -> MetadataIndex:
        offset = None if self.type[row] == _BYTES else anchor.tolist()
        number = None if hint[row] < 0 else int(hint[row])
        return MetadataIndex(self.names[name[row]], offset, number)

    def every(self, step: Sequence[int]) -> ReadItems:
        """Begin each read at its first destination that is a multiple of ``step`` on every axis.

        Reads that have none are left out.
        """
        if max(step, default=1) == 1:
            return self
        along = pad(column([step], 1, len(step)), self.lengths.shape[1], 1)
        shift = -self.dest_offsets % along
        lengths = self.lengths - shift
        moved = attrs.evolve(
            self.take(slice(None)),
            dest_offsets=readonly(self.dest_offsets + shift),
            storage_offsets=readonly(self.storage_offsets + shift),
            lengths=readonly(lengths),
        )
        return moved.take(np.all(lengths > 0, axis=1))

    def canonical(self) -> ReadItems:
        """Return the canonical form, without hints and unused names, equal for equal reads."""
        return ReadItems.of(
            attrs.evolve(
                read,
                dest_index=attrs.evolve(read.dest_index, index=None),
                storage_index=attrs.evolve(read.storage_index, index=None),
            )
            for read in self
        )

    @cached_property
    def numel(self) -> Ints:
        """The number of elements that each read copies; 0 for non-tensor values."""
        return readonly(np.where(self.type == _BYTES, 0, self.lengths.prod(axis=1)))

    def volume(self) -> int:
        """Return how many elements all reads copy."""
        return int(self.numel.sum())

    @property
    def target_frame(self) -> TargetFrame:
        """The frame; made of the reads if there is none."""
        if self.frame is not None:
            return self.frame
        return TargetFrame(self.ndim, self.lengths, Coded.none(len(self)))

    @property
    def dest_ndim(self) -> Ints:
        """The number of axes of the box that each read fills."""
        return self.ndim if self.frame is None else self.frame.ndim

    @property
    def dest_lengths(self) -> Ints:
        """The size of the box that each read fills."""
        return self.lengths if self.frame is None else self.frame.lengths

    @property
    def _columns(self) -> dict[str, Ints]:
        return {k: getattr(self, k) for k in COLUMNS}

    def _same(self, other: ReadItems) -> bool:
        both = ReadItems.concat([self, other])
        if both.frame is not None:
            first, second = slice(None, len(self)), slice(len(self), None)
            if not both.frame.take(first).same(both.frame.take(second)):
                return False
        columns = both._columns  # a hint is not part of a name
        halves = [np.split(v, [len(self)]) for k, v in columns.items() if not k.endswith("_hint")]
        return all(np.array_equal(mine, theirs) for mine, theirs in halves)

    @classmethod
    def concat(cls, parts: Sequence[ReadItems]) -> ReadItems:
        """Concatenate several sequences."""
        ids: dict[str, int] = {}
        by_names = {
            names: column([ids.setdefault(n, len(ids)) for n in names])
            for names in dict.fromkeys(part.names for part in parts)
        }
        framed = any(part.frame is not None for part in parts)
        moved = [
            attrs.evolve(
                part.take(slice(None)),
                names=tuple(ids),
                dest=by_names[part.names][part.dest],
                storage=by_names[part.names][part.storage],
                frame=part.target_frame if framed else None,
            )
            for part in parts
        ]
        return super().concat(moved) if moved else cls.of(())

    def to_bytes(self) -> bytes:
        """Encode the columns."""
        shifted = {k: v + 1 if k.endswith("_hint") else v for k, v in self._columns.items()}
        header, own = ({}, {}) if self.frame is None else self.frame.pack()
        return pack(header, {**shifted, **own, **pack_names("names", self.names)})

    @classmethod
    def from_bytes(cls, data: bytes) -> ReadItems:
        """Decode, or raise `CodecError` if the columns are inconsistent."""
        header, arrays = unpack(data)
        try:
            names = unpack_names("names", arrays)
            columns = {
                k: readonly(arrays[k] - 1) if k.endswith("_hint") else arrays[k] for k in COLUMNS
            }
            shape = count, axes = columns["lengths"].shape
            if any(v.shape != (shape if k in _BOXES else (count,)) for k, v in columns.items()):
                raise ValueError("its columns differ in length or axes")
            limits = {"type": 3, "ndim": axes + 1, "dest": len(names), "storage": len(names)}
            limits |= dict.fromkeys(_BOXES, 1 << 62)
            in_range = all(within(columns[k], end) for k, end in limits.items())
            if axes > MAX_AXES or not in_range or not columns["type"].all():
                raise ValueError("a number is out of range")
            frame = TargetFrame.unpack(header, arrays, columns["ndim"], columns["lengths"])
            if frame is not None and frame.axes.known[columns["type"] == _BYTES].any():
                raise ValueError("a value has axes")
        except DAMAGE as error:
            raise CodecError(f"a load plan's items are damaged: {error}") from error
        return cls(names, **columns, frame=frame)


@attrs.frozen(eq=False, repr=False, slots=False)
class Transfers(ColumnTable, Columns[Transfer]):
    """`Transfer`s in columns: the reads, their source ranks and their target ranks."""

    reads: ReadItems
    source: Ints
    target: Ints

    @classmethod
    def of(cls, transfers: Iterable[Transfer]) -> Transfers:
        """Convert records to columns; columns are returned unchanged."""
        if isinstance(transfers, Transfers):
            return transfers
        records = tuple(transfers)
        reads = ReadItems.of([t.read for t in records])
        return cls(reads, column([t.source for t in records]), column([t.target for t in records]))

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> Transfer:
        """Return the record of one row."""
        return Transfer(self.reads.record(row), int(self.source[row]), int(self.target[row]))

    def _same(self, other: Transfers) -> bool:
        ends = ((self.source, other.source), (self.target, other.target))
        return self.reads == other.reads and all(np.array_equal(a, b) for a, b in ends)

    @classmethod
    def concat(cls, parts: Sequence[Transfers]) -> Transfers:
        """Concatenate several sequences."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        return parts[0] if len(parts) == 1 else super().concat(parts)

    def to_bytes(self) -> bytes:
        """Encode the columns."""
        reads = self.reads.to_bytes()
        return pack({}, {"reads": reads, "source": self.source, "target": self.target})

    @classmethod
    def from_bytes(cls, data: bytes) -> Transfers:
        """Decode, or raise `CodecError` if the columns are inconsistent."""
        _, arrays = unpack(data)
        try:
            reads = ReadItems.from_bytes(arrays["reads"])
            source, target = flat(arrays, "source", "target")
            if not len(reads) == len(source) == len(target):
                raise ValueError("columns differ in length")
            if not within(source, 1 << 31) or not within(target, 1 << 31):
                raise ValueError("a rank is out of range")
        except DAMAGE as error:
            raise CodecError(f"a load plan's transfers are damaged: {error}") from error
        return cls(reads, source, target)


def _frame(records: Sequence[ReadItem], width: int) -> TargetFrame | None:
    if all(read.dest_lengths is None for read in records):
        return None
    boxes = [read.dest_box.sizes for read in records]
    axes = Coded.of(read.axes for read in records)
    return TargetFrame(column([len(box) for box in boxes]), padded(boxes, 1, width), axes)


COLUMNS: Final = tuple(a.name for a in attrs.fields(ReadItems) if a.name not in ("names", "frame"))
_BOXES: Final = ("dest_anchor", "dest_offsets", "storage_anchor", "storage_offsets", "lengths")
