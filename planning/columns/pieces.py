"""Reads of a plan's items, made of pieces of saved chunks: at once, or by rule when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..geometry.overlap import GridOverlap, Overlap
from ..records import LoadItemType, ReadItem
from .arrays import Columns, Index, Ints, column, pad, readonly
from .cuts import cut_items
from .frames import Coded, TargetFrame
from .items import WriteItems
from .reads import COLUMNS, ReadItems

_TENSOR: Final = LoadItemType.TENSOR.value
_BYTES: Final = LoadItemType.BYTE_IO.value
_BATCH: Final = 1 << 16  # reads that are made at a time


class GridReads(ReadItems):
    """Reads of chunks that form grids, by rule: a few numbers an item, however many reads it has.

    It is equal to the `ReadItems` that it stands for, whose columns are made when one is asked for.
    """

    def __init__(self, items: WriteItems, wanted: Ints, met: GridOverlap, values: Ints) -> None:
        vars(self).update(_of=_Rule(items, wanted, met, values))

    def __len__(self) -> int:
        return int(self._of.ends[-1]) if len(self._of.ends) else 0

    def __iter__(self) -> Iterator[ReadItem]:
        for low in range(0, len(self), _BATCH):
            yield from self.take(slice(low, low + _BATCH))

    def __eq__(self, other: object) -> bool:
        return self is other or self.made == other

    __hash__ = Columns.__hash__

    def __getattr__(self, name: str) -> Any:
        if name not in COLUMNS and name not in ("names", "frame"):
            raise AttributeError(name)
        return getattr(self.made, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made.__reduce__()

    @cached_property
    def made(self) -> ReadItems:
        """All reads, in columns."""
        rule = self._of
        return reads_of_pieces(rule.items, rule.wanted, rule.met.pieces(), rule.values)

    def record(self, row: int) -> ReadItem:
        """Return the record of one row."""
        return self.take(np.array([row])).record(0)

    def take(self, rows: Index | slice) -> ReadItems:  # type: ignore[override]
        """Return the given rows, in that order, in columns."""
        if "made" in vars(self) or (isinstance(rows, slice) and rows == slice(None)):
            return self.made.take(rows)
        rule: _Rule = self._of
        if isinstance(rows, slice):
            return rule.reads(np.arange(*rows.indices(len(self))))
        return rule.reads(np.flatnonzero(rows) if rows.dtype == bool else rows % len(self))

    def volume(self) -> int:
        """Return how many elements all reads copy."""
        return int(self._of.met.covered.sum())


@attrs.frozen(eq=False, slots=False)
class _Rule:
    """Items, and the grids that they are read from."""

    items: WriteItems
    wanted: Ints  # the items that are read from grids, ascending
    met: GridOverlap  # of these items
    values: Ints  # the items that are non-tensor values, ascending

    @cached_property
    def order(self) -> Ints:
        """The items that are read, by number among the wanted ones and then the values."""
        return np.argsort(np.concatenate([self.wanted, self.values]), kind="stable")

    @cached_property
    def ends(self) -> Ints:
        """Where the reads of each of these items end."""
        counts = np.concatenate([self.met.count, np.ones(len(self.values), np.int64)])
        return np.cumsum(counts[self.order])

    def reads(self, rows: Ints) -> ReadItems:
        """Make some of the reads."""
        sequence = np.argsort(rows, kind="stable")
        rows = rows[sequence]
        at = np.searchsorted(self.ends, rows, side="right")
        number = self.order[at]
        is_value = number >= len(self.wanted)
        start = np.concatenate([[0], np.cumsum(self.met.count)])  # of each wanted item's pieces
        before = np.concatenate([[0], self.ends])[at]
        pieces = self.met.pieces((start[number * ~is_value] + rows - before)[~is_value])
        values = self.values[(number - len(self.wanted))[is_value]]
        made = reads_of_pieces(self.items, self.wanted, pieces, values)
        back = np.empty_like(sequence)
        back[sequence] = np.arange(len(sequence))
        return made.take(back)


def reads_of_pieces(items: WriteItems, wanted: Ints, pieces: Overlap, values: Ints) -> ReadItems:
    """Make the reads of each piece of the wanted items, and of non-tensor values, by item."""
    filled = _fill_boxes(items, wanted, pieces)
    pieces, catalog, frame = filled.pieces, items.catalog, filled.frame
    width = max(pieces.offsets.shape[1], filled.offsets.shape[1], 1)
    item = np.concatenate([wanted[pieces.box], values])
    order = np.argsort(item, kind="stable")
    row = items.row[item]
    ndim = catalog.ndim[row]
    is_bytes = np.arange(len(item)) >= len(pieces.box)
    position = np.arange(len(items)) - np.searchsorted(items.row, items.row)  # among one tensor's
    known = items.frame is None and (np.diff(items.row) >= 0).all()
    hint = position if known else np.full(len(items), -1)

    def column_of(tensors: Ints, fill: int) -> Ints:
        rows = np.concatenate([tensors, np.zeros((len(values), tensors.shape[1]), np.int64)])
        return readonly(pad(rows, width, fill)[order])

    def lengths_of(sizes: Ints) -> Ints:
        lengths = column_of(sizes, 1).copy()
        lengths[is_bytes[order]] = [0] + [1] * (width - 1)  # a value is one axis of unknown length
        return readonly(lengths)

    def number_of(tensors: Ints, value: int) -> Ints:
        return column(np.concatenate([tensors, np.full(len(values), value)])[order])

    if frame is not None:
        axes = Coded(number_of(frame.axes.number, -1), frame.axes.values)
        frame = TargetFrame(number_of(frame.ndim, 1), lengths_of(frame.lengths), axes)
    if catalog.sources is catalog.names:
        names, dest = catalog.names, row
    else:  # several tensors of the checkpoint may fill one of the state dict
        names = tuple(dict.fromkeys(catalog.sources + catalog.names))
        number = {name: n for n, name in enumerate(names)}
        dest = column([number[name] for name in catalog.sources])[row]
        row = column([number[name] for name in catalog.names])[row]
    return ReadItems(
        names=names,
        type=column(np.where(is_bytes, _BYTES, _TENSOR)[order]),
        ndim=column(np.where(is_bytes, 1, ndim)[order]),
        dest=column(dest[order]),
        dest_anchor=column_of(filled.shard, 0),
        dest_hint=column(np.where(is_bytes, -1, hint[item])[order]),
        dest_offsets=column_of(filled.offsets - filled.shard, 0),
        storage=column(row[order]),
        storage_anchor=column_of(pieces.anchors, 0),
        storage_hint=number_of(pieces.chunk, -1),
        storage_offsets=column_of(pieces.offsets - pieces.anchors, 0),
        lengths=lengths_of(pieces.sizes),
        frame=frame,
    )


@attrs.frozen(eq=False)
class _Filled:
    """Pieces of saved chunks, and the boxes of the state dict that they fill."""

    pieces: Overlap
    shard: Ints  # the start of the shard, in the global frame of the state dict's tensor
    offsets: Ints  # the start of the box, likewise
    frame: TargetFrame | None  # None if every box is as large as its piece


def _fill_boxes(items: WriteItems, wanted: Ints, pieces: Overlap) -> _Filled:
    """Return where pieces of saved chunks go; those that become several boxes are cut."""
    item, width = wanted[pieces.box], pieces.offsets.shape[1]
    if items.frame is None:
        shard = pad(items.shard_offsets[item], width, 0)
        return _Filled(pieces, shard, pieces.offsets, None)
    axes = items.offsets.shape[1]
    shift = pieces.offsets[:, :axes] - items.offsets[item]
    parts, of = cut_items(items, item, shift, pieces.sizes[:, :axes])
    pieces = Overlap(
        pieces.box[of],
        pieces.chunk[of],
        pad(parts.offsets, width, 0),
        pad(parts.sizes, width, 1),
        pieces.anchors[of],
    )
    own, ndim = parts.source_frame, parts.catalog.ndim[parts.row]
    alike = not own.axes.known.any() and np.array_equal(own.ndim, ndim)
    frame = None if alike else TargetFrame(own.ndim, own.sizes, own.axes)
    return _Filled(pieces, parts.shard_offsets, own.offsets, frame)
