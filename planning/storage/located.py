"""The saved chunk, and the block of it, that a read lies in.

Chunks are found by where they start. Blocks are what checksums are made of: what is read
whole, block by block, can be checked, whichever rank reads which block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, distinct, group_rows, numbered, readonly
from ..columns.catalog import column
from ..columns.reads import ReadItems
from ..errors import Issue, PlanError
from ..geometry.tilings import Boxes, pad
from ..metadata import Layout, Metadata
from .blocks import BLOCK_BYTES, reach_of

__all__ = ["ChunkTable", "Located", "entries_of", "find_chunks", "locate_reads", "look_up"]

_VALUE: Final = Layout((), Boxes(column([], 1, 0), column([], 1, 0)))


@attrs.frozen(eq=False, repr=False)
class ChunkTable:
    """Every chunk of some layouts of a checkpoint, laid end to end.

    Non-tensor values have the layout -1, which is also the last: one chunk, no axes.

    Attributes:
        layouts: The layouts.
        first: Where each layout's chunks begin.
        count: How many chunks each has.
        offsets, sizes: One row a chunk, in the global frame, padded.
    """

    layouts: tuple[Layout, ...]
    first: Ints
    count: Ints
    offsets: Ints
    sizes: Ints

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> ChunkTable:
        """Lay out the chunks of a checkpoint's layouts, or of some of them."""
        layouts = (*layouts, _VALUE)
        axes = max(len(layout.size) for layout in layouts)
        count = column([len(layout.tiling) for layout in layouts])
        offsets = np.concatenate([pad(layout.tiling.offsets, axes, 0) for layout in layouts])
        sizes = np.concatenate([pad(layout.tiling.sizes, axes, 1) for layout in layouts])
        return cls(layouts, np.cumsum(count) - count, count, offsets, sizes)

    def find(self, layout: Ints, offsets: Ints, hint: Ints | None = None) -> Ints:
        """Return which chunk of its layout starts at each offset, -1 where none does.

        Args:
            layout: The layout in which to look, row by row.
            offsets: Where the chunk starts, in the global frame.
            hint: The chunk to try first; -1 for no hint.
        """
        axes = max(self.offsets.shape[1], offsets.shape[1])
        known, wanted = pad(self.offsets, axes, 0), pad(offsets, axes, 0)
        found = np.full(len(layout), -1, np.int64)
        if hint is not None:
            rows = np.flatnonzero((hint >= 0) & (hint < self.count[layout]))
            at = self.first[layout[rows]] + hint[rows]
            right = (known[at] == wanted[rows]).all(axis=1) & (self.sizes[at] > 0).all(axis=1)
            rows = rows[right]
            found[rows] = hint[rows]
        lost = np.flatnonzero(found < 0)
        for number in distinct(layout[lost]).tolist():
            rows = lost[layout[lost] == number]
            low = int(self.first[number])
            chunks = slice(low, low + int(self.count[number]))
            real = np.all(self.sizes[chunks] > 0, axis=1)
            found[rows] = look_up(known[chunks], real, wanted[rows])
        return found


def look_up(known: Ints, real: npt.NDArray[Any], wanted: Ints) -> Ints:
    """Return the row of ``known`` that equals each row of ``wanted``, a real one if any, or -1."""
    both = np.concatenate([known, wanted])
    _, group = group_rows([np.zeros(len(both), np.int64), both])
    row_of = np.full(len(both), -1, np.int64)
    rows = np.argsort(real, kind="stable")  # real ones last, so that they prevail
    row_of[group[rows]] = rows
    return row_of[group[len(known) :]]


@attrs.frozen(eq=False)
class Located:
    """The block in which each read begins; one row a read.

    Attributes:
        entry: The number of the checkpoint's entry that is read.
        chunk: The number of the chunk of it; -1 if there is no such chunk.
        number: The number of the block of the chunk.
        start: Where the block starts in the chunk, in elements.
        sizes: How large it is, in elements.
        extents: How large the chunk is.
        inside: Whether the read also ends in that block.
    """

    entry: Ints
    chunk: Ints
    number: Ints
    start: Ints
    sizes: Ints
    extents: Ints
    inside: npt.NDArray[np.bool_]

    @property
    def numel(self) -> Ints:
        """How many elements the block has."""
        numel: Ints = self.sizes.prod(axis=1)
        return numel

    @property
    def keys(self) -> Ints:
        """What identifies a block: entry, chunk, number."""
        return np.stack([self.entry, self.chunk, self.number], axis=1)


def entries_of(metadata: Metadata, reads: ReadItems) -> tuple[Ints, Ints]:
    """Return which of a checkpoint's entries each read is of, and its layout; -1 for none."""
    entries = metadata.state_dict_metadata
    entry = column([entries.row_of.get(name, -1) for name in reads.names])[reads.storage]
    return entry, column([*entries.layout.tolist(), -1])[entry]


def find_chunks(metadata: Metadata, items: ReadItems) -> Ints:
    """Return the number of the chunk, among its tensor's, that each read is of.

    The hint of a read is tried first: plans that were just made have right ones. But a plan may
    come from anywhere, or from a time at which the tensor was cut differently.

    Args:
        metadata: The checkpoint.
        items: Reads of tensors.

    Raises:
        PlanError: There is no such tensor, no chunk that starts there, or the read reaches past it.
    """
    entries = metadata.state_dict_metadata
    used, _, layout = numbered(entries_of(metadata, items)[1])
    layout -= used[0] < 0  # -1 where there is no tensor
    table = ChunkTable.of(entries.layouts[n] for n in used.tolist() if n >= 0)
    found = np.where(layout < 0, -1, table.find(layout, items.storage_anchor, items.storage_hint))
    axes = max(items.lengths.shape[1], table.sizes.shape[1])
    room = pad(table.sizes, axes, 1)[table.first[layout] + np.maximum(found, 0)]
    ends = pad(items.storage_offsets, axes, 0) + pad(items.lengths, axes, 1)
    wrong = (found < 0) | (ends > room).any(axis=1) | (items.storage_offsets < 0).any(axis=1)
    if wrong.any():
        raise PlanError(_no_chunk(items, row) for row in np.flatnonzero(wrong).tolist())
    return readonly(found)


def _no_chunk(items: ReadItems, row: int) -> Issue:
    read = items.record(row)
    name, at = read.storage_index.fqn, list(read.storage_index.offset or ())
    text = (
        f"the plan reads {list(read.lengths)} elements from {list(read.storage_offsets)} on of a "
        f"chunk of `{name}` at {at}, and the checkpoint has no such chunk; was the plan made for "
        "another one? plan again with load_plan"
    )
    return Issue("missing", name, text)


def locate_reads(metadata: Metadata, reads: ReadItems, max_bytes: int = BLOCK_BYTES) -> Located:
    """Find the block in which each read begins.

    Args:
        metadata: The checkpoint.
        reads: The reads; one of a name that the checkpoint does not have gets the chunk -1.
        max_bytes: The most bytes of a block.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})  # rows of 16 bytes, 2 to a block
    >>> metadata = global_plan([plan])[1]
    >>> found = locate_reads(metadata, load_plan(metadata, plan).items, 32)
    >>> found.number.tolist(), found.sizes.tolist(), found.inside.tolist()
    ([0], [[2, 4]], [False])
    """
    entries, table = (
        metadata.state_dict_metadata,
        ChunkTable.of(metadata.state_dict_metadata.layouts),
    )
    entry, layout = entries_of(metadata, reads)
    chunk = table.find(layout, reads.storage_anchor, reads.storage_hint)
    axes = max(table.sizes.shape[1], reads.lengths.shape[1], 1)
    extents = pad(table.sizes, axes, 1)[(table.first[layout] + np.maximum(chunk, 0))]
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop][entry]
    reach = reach_of(extents, width, max_bytes)
    offsets = pad(reads.storage_offsets, axes, 0)
    cell = offsets // reach
    last = (offsets + np.maximum(pad(reads.lengths, axes, 1), 1) - 1) // reach
    along, number = np.maximum(-(-extents // reach), 1), np.zeros(len(reads), np.int64)
    for axis in range(axes):
        number = number * along[:, axis] + cell[:, axis]
    start = cell * reach
    sizes = np.minimum(reach, extents - start)
    return Located(
        entry, chunk, number, start, sizes, extents, (cell == last).all(axis=1) & (chunk >= 0)
    )
