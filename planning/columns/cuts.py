"""Cutting items and reads: which part of the state dict belongs to a part of a chunk.

If the two sides have the same axes, one box becomes one box. Otherwise it may become several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np

from ..geometry.axes import Axes, Cut, cut
from .arrays import Ints, column, group_rows, pad, padded, readonly, spread
from .frames import Coded, SourceFrame, TargetFrame
from .items import WriteItems
from .reads import ReadItems


def cut_items(items: WriteItems, rows: Ints, shift: Ints, sizes: Ints) -> tuple[WriteItems, Ints]:
    """Return the parts of items inside boxes of their chunks, and the box of each part, ascending.

    ``rows`` has the item of each box, and ``shift`` its start in that item's chunk.
    """
    if items.frame is None:
        part = attrs.evolve(
            items.take(rows),
            offsets=readonly(items.offsets[rows] + shift),
            sizes=readonly(sizes),
            source_offsets=readonly(items.shard_offsets[rows]),
            hint=None,
        )
        return part, np.arange(len(rows))
    mine = items.take(rows)
    ndim = items.catalog.ndim[mine.row]
    frame = mine.source_frame
    parts = _cut(frame.axes, (frame.ndim, frame.sizes), (ndim, mine.sizes), (shift, sizes))
    taken = mine.take(parts.of)
    offsets = np.where(taken.is_fill[:, None], 0, taken.box_offsets + parts.box_offsets)
    ndims, fills = readonly(frame.ndim[parts.of]), frame.fill.take(parts.of)
    part = attrs.evolve(
        taken,
        offsets=readonly(taken.offsets + parts.offsets),
        sizes=parts.sizes,
        source_offsets=taken.shard_offsets,
        hint=None,
        frame=SourceFrame(ndims, readonly(offsets), parts.box_sizes, parts.axes, fills),
    )
    return part, parts.of


def cut_reads(reads: ReadItems, rows: Ints, shift: Ints, lengths: Ints) -> tuple[ReadItems, Ints]:
    """Return the parts of reads inside boxes of what they read; see `cut_items`."""
    mine = reads.take(rows)
    if mine.frame is None:
        part = attrs.evolve(
            mine,
            dest_offsets=readonly(mine.dest_offsets + shift),
            storage_offsets=readonly(mine.storage_offsets + shift),
            lengths=readonly(lengths),
        )
        return part, np.arange(len(rows))
    frame = mine.frame
    parts = _cut(
        frame.axes, (frame.ndim, frame.lengths), (mine.ndim, mine.lengths), (shift, lengths)
    )
    taken = mine.take(parts.of)
    part = attrs.evolve(
        taken,
        dest_offsets=readonly(taken.dest_offsets + parts.box_offsets),
        storage_offsets=readonly(taken.storage_offsets + parts.offsets),
        lengths=parts.sizes,
        frame=TargetFrame(readonly(frame.ndim[parts.of]), parts.box_sizes, parts.axes),
    )
    return part, parts.of


class _Parts(NamedTuple):
    """Boxes on both sides, each relative to the whole on its side."""

    of: Ints
    box_offsets: Ints
    box_sizes: Ints
    axes: Coded[Axes]
    offsets: Ints
    sizes: Ints


Boxes = tuple[Ints, Ints]


def _cut(axes: Coded[Axes], source: Boxes, chunk: Boxes, within: Boxes) -> _Parts:
    """Cut pairs of boxes.

    ``source`` and ``chunk`` have the number of axes and the sizes of each box, ``within`` the start
    of each part in its chunk, and its sizes.
    """
    rows = np.flatnonzero(axes.known)
    keys = (*source, *chunk, *within)
    first, which = group_rows([axes.number[rows], *(key[rows] for key in keys)])
    found = [_cut_one(axes, source, chunk, within, row) for row in rows[first].tolist()]
    table = [piece for pieces in found for piece in pieces]
    lengths = column([len(pieces) for pieces in found])
    starts, count = np.zeros((2, len(axes)), np.int64)
    count += 1
    starts[rows], count[rows] = (np.cumsum(lengths) - lengths)[which], lengths[which]
    of, nth = spread(count)
    cut_rows = np.flatnonzero(axes.known[of])
    at = (starts[of] + nth)[cut_rows]

    def side(
        plain: Ints, corners: Sequence[Sequence[int]], ndim: Ints, width: int, fill: int
    ) -> Ints:
        """Return one column: that of the box where axes are the same, else that of the cut."""
        values = pad(plain, width, fill)[of, :width]
        values = np.where(np.arange(width) < ndim[of, None], values, fill)
        values[cut_rows] = padded(corners, fill, width)[at]
        return readonly(values)

    number = np.full(len(of), -1)
    coded = Coded.of(piece.axes for piece in table)
    number[cut_rows] = coded.number[at]
    box, own = source[1].shape[1], chunk[1].shape[1]
    return _Parts(
        of,
        side(within[0], [piece.box_offsets for piece in table], source[0], box, 0),
        side(within[1], [piece.box_sizes for piece in table], source[0], box, 1),
        Coded(column(number), coded.values),
        side(within[0], [piece.chunk_offsets for piece in table], chunk[0], own, 0),
        side(within[1], [piece.chunk_sizes for piece in table], chunk[0], own, 1),
    )


def _cut_one(
    axes: Coded[Axes], source: Boxes, chunk: Boxes, within: Boxes, row: int
) -> tuple[Cut, ...]:
    box, own = (tuple(side[1][row, : side[0][row]].tolist()) for side in (source, chunk))
    low, size = (tuple(corner[row, : len(own)].tolist()) for corner in within)
    return cut(axes[row], box, own, low, size)
