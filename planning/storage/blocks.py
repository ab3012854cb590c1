"""Blocks: a saved chunk cut into boxes of bounded size, and the block that each read lies in.

A block is one range of its file, and is hashed, staged and handed to a thread as one. The cut is
part of the format: it follows from a chunk's sizes alone. What is read whole, block by block, can
be checked, whichever rank reads which block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, distinct, group_rows, numbered, pad, readonly
from ..dtypes import itemsize
from ..errors import Issue, PlanError
from ..geometry.axes import Cut, composed
from ..geometry.overlap import grid_cells
from ..geometry.tilings import Boxes
from ..metadata import Layout, Metadata

if TYPE_CHECKING:
    from ..columns.reads import ReadItems


BLOCK_BYTES: Final = 16 << 20
"""The most bytes of a block; a checkpoint says which limit it was made with."""


@attrs.frozen(eq=False)
class Blocks:
    """The blocks of some boxes; one row a block, by box, then row-major."""

    box: Ints  # the box that it is a block of
    offsets: Ints  # where it starts, relative to the box, in elements
    sizes: Ints  # how large it is, in elements
    number: Ints  # the block of its chunk that it is, or is a part of; see `cut_blocks`

    def __len__(self) -> int:
        return len(self.box)


def cut_blocks(
    sizes: Ints,
    itemsize: Ints,
    max_bytes: int = BLOCK_BYTES,
    *,
    offsets: Ints | None = None,
    extents: Ints | None = None,
) -> Blocks:
    """Cut boxes into blocks: by rows where a row fits into a block, else within rows.

    A box that is a part of a chunk may be cut where the chunk's own blocks end, so that parts of
    one block that come in several boxes can be put together again. Then ``offsets`` says where it
    starts in that chunk, and ``extents`` how large the chunk is.

    >>> cut_blocks(np.array([[5, 4]]), np.array([4]), 32).sizes.tolist()
    [[2, 4], [2, 4], [1, 4]]
    >>> cut_blocks(np.array([[2, 6]]), np.array([1]), 4).offsets.tolist()
    [[0, 0], [0, 4], [1, 0], [1, 4]]

    Two boxes of 3 and 2 elements fill a chunk of 5 that has blocks of 2:

    >>> sizes, offsets, extents = np.array([[3], [2]]), np.array([[0], [3]]), np.array([[5], [5]])
    >>> parts = cut_blocks(sizes, np.array([1, 1]), 2, offsets=offsets, extents=extents)
    >>> parts.sizes.ravel().tolist(), parts.number.tolist()
    ([2, 1, 1, 1], [0, 1, 1, 2])
    """
    sizes = pad(sizes, 1, 1)
    offsets = np.zeros_like(sizes) if offsets is None else pad(offsets, 1, 0)
    extents = sizes if extents is None else pad(extents, 1, 1)
    step = reach_of(extents, itemsize, max_bytes)
    first = offsets // step
    box, cell = grid_cells((offsets + np.maximum(sizes, 1) - 1) // step - first + 1)
    cell += first[box]
    low = np.maximum(cell * step[box], offsets[box])
    high = np.minimum((cell + 1) * step[box], (offsets + sizes)[box])
    number = _row_major(cell, blocks_along(extents, step)[box])
    return Blocks(box, low - offsets[box], high - low, number)


def blocks_along(extents: Ints, reach: Ints) -> Ints:
    """Return how many blocks a chunk has along each axis, given how far each reaches."""
    along: Ints = np.maximum(-(-extents // reach), 1)
    return along


def _row_major(cell: Ints, along: Ints) -> Ints:
    """Number cells of grids, given how many cells each grid has along each axis."""
    number = np.zeros(len(cell), np.int64)
    for axis in range(cell.shape[1]):
        number = number * along[:, axis] + cell[:, axis]
    return number


def block_numbers(
    offsets: Ints, sizes: Ints, extents: Ints, itemsize: Ints, max_bytes: int
) -> tuple[Ints, Ints]:
    """Return which block of its chunk each box is, -1 for none, and how many blocks that has.

    >>> boxes = np.array([[2], [2]]), np.array([[2], [1]])
    >>> [n.tolist() for n in block_numbers(*boxes, np.array([[5], [5]]), np.array([1, 1]), 2)]
    [[1, -1], [3, 3]]
    """
    reach = reach_of(extents, itemsize, max_bytes)
    along = blocks_along(extents, reach)
    is_block = (offsets % reach == 0) & (sizes == np.minimum(reach, extents - offsets))
    number = _row_major(offsets // reach, along)
    return np.where(is_block.all(axis=1), number, -1), along.prod(axis=1)


def group_blocks(
    start: Ints, nbytes: Ints, max_bytes: int = BLOCK_BYTES, max_blocks: int = 1 << 12
) -> list[tuple[int, int]]:
    """Group blocks of a file, in order, into tasks of neighbours; return which rows each has.

    A task has at most ``max_blocks`` blocks, and less than ``max_bytes`` bytes in all of them but
    the last.

    >>> group_blocks(np.array([0, 4, 8, 20]), np.array([4, 4, 4, 4]), max_bytes=8)
    [(0, 2), (2, 3), (3, 4)]
    """
    if not len(nbytes):
        return []
    share, few = (np.cumsum(nbytes) - nbytes) // max_bytes, np.arange(len(nbytes)) // max_blocks
    apart = start[1:] != (start + nbytes)[:-1]
    edges = np.flatnonzero((np.diff(share) != 0) | (np.diff(few) != 0) | apart) + 1
    return list(pairwise([0, *edges.tolist(), len(nbytes)]))


_WRITTEN: Final = 16 << 20  # bytes that a thread writes before it takes the next ones
_SMALL: Final = 1 << 16  # bytes of a block where several threads would only wait for each other


def write_tasks(nbytes: Ints) -> list[tuple[int, int]]:
    """Group the blocks of a file to be written into tasks of threads: only one if they are tiny.

    Return which rows each has.

    >>> write_tasks(np.full(4, 10 << 20)), write_tasks(np.full(4, 1))
    ([(0, 2), (2, 4)], [(0, 4)])
    """
    if int(nbytes.sum()) < len(nbytes) * _SMALL:
        return [(0, len(nbytes))]
    edges = np.flatnonzero(np.diff((np.cumsum(nbytes) - nbytes) // _WRITTEN)) + 1
    return list(pairwise([0, *edges.tolist(), len(nbytes)]))


def reach_of(extents: Ints, itemsize: Ints, max_bytes: int = BLOCK_BYTES) -> Ints:
    """Return how far a block reaches along each axis of a chunk, in elements.

    A chunk without elements is one block, however long its other axes are.

    >>> reach_of(np.array([[5, 4], [2, 9], [0, 99]]), np.array([4, 4, 4]), 32).tolist()
    [[2, 4], [1, 8], [1, 99]]
    """
    reach = np.ones_like(extents)
    inner = np.maximum(itemsize, 1)
    for axis in reversed(range(extents.shape[1])):
        reach[:, axis] = np.clip(max_bytes // inner, 1, np.maximum(extents[:, axis], 1))
        inner = inner * np.maximum(extents[:, axis], 1)
    empty = (extents == 0).any(axis=1)
    reach[empty] = np.maximum(extents[empty], 1)
    return reach


def boxes_of(
    shape: Sequence[int], dtype: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the blocks of a chunk, as offsets and sizes, in the order of its bytes.

    >>> list(boxes_of((3, 4), "float32", 32))
    [([0, 0], [2, 4]), ([2, 0], [1, 4])]
    """
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes <= block_bytes:
        return iter([([0] * len(shape), shape)])
    blocks = cut_blocks(column([shape], 1, len(shape)), column([itemsize(dtype)]), block_bytes)
    return zip(blocks.offsets.tolist(), blocks.sizes.tolist(), strict=True)


def reads_of(
    shape: Sequence[int], dtype: str, stored: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the boxes by which a chunk is read from a checkpoint that may store another dtype.

    They are its blocks; where elements are wider as stored, parts of these.

    >>> list(reads_of((3, 4), "float32", "float64", 32))
    [([0, 0], [1, 4]), ([1, 0], [1, 4]), ([2, 0], [1, 4])]
    """
    axes = len(shape)
    for offsets, sizes in boxes_of(shape, dtype, block_bytes):
        for inner, part in boxes_of(sizes[:axes], stored, block_bytes):
            at = [o + i for o, i in zip(offsets[:axes], inner[:axes], strict=True)]
            yield at, part[:axes]


def cut_within(where: Cut, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Cut, ...]:
    """Return the part of a pair of boxes inside a box of the chunk, and relative to that box.

    >>> from shardplan.planning.geometry import Axes
    >>> transposed = Cut((0, 0), (2, 3), Axes((2, 3), (1, 0)), (0, 0), (3, 2))
    >>> cut_within(transposed, (1, 0), (2, 2))[0][:2]
    ((0, 1), (2, 2))
    """
    if where.axes is None and (offsets, sizes) == (where.chunk_offsets, where.chunk_sizes):
        return (where._replace(chunk_offsets=(0,) * len(sizes)) if any(offsets) else where,)
    return composed(where, Cut(offsets, sizes, None, (0,) * len(sizes), sizes))


_VALUE: Final = Layout((), Boxes(column([], 1, 0), column([], 1, 0)))


@attrs.frozen(eq=False, repr=False)
class ChunkTable:
    """Every chunk of some layouts of a checkpoint, laid end to end.

    Non-tensor values have the layout -1, which is also the last: one chunk, no axes.
    """

    layouts: tuple[Layout, ...]  # the layouts
    first: Ints  # where each layout's chunks begin
    count: Ints  # how many chunks each has
    offsets: Ints  # one row a chunk, in the global frame, padded
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
        """Return which chunk of its layout starts at each offset (global), -1 where none does.

        The chunk of ``hint`` is tried first, unless it is -1.
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
    """The block in which each read begins; one row a read."""

    entry: Ints  # the number of the checkpoint's entry that is read
    chunk: Ints  # the number of the chunk of it; -1 if there is no such chunk
    number: Ints  # the number of the block of the chunk
    start: Ints  # where the block starts in the chunk, in elements
    sizes: Ints  # how large it is, in elements
    extents: Ints  # how large the chunk is
    inside: npt.NDArray[np.bool_]  # whether the read also ends in that block

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

    Raise PlanError if there is none, or the read reaches past it. The hint of a read is tried
    first. But a plan may come from anywhere, or from a time at which the tensor was cut
    differently.
    """
    if not len(items):
        return column([])
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
    """Find the block in which each read begins; the chunk is -1 for an unknown name.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})  # rows of 16 bytes, 2 to a block
    >>> metadata = global_plan([plan])[1]
    >>> found = locate_reads(metadata, load_plan(metadata, plan).items, 32)
    >>> found.number.tolist(), found.sizes.tolist(), found.inside.tolist()
    ([0], [[2, 4]], [False])
    """
    entries = metadata.state_dict_metadata
    table = ChunkTable.of(entries.layouts)
    entry, layout = entries_of(metadata, reads)
    chunk = table.find(layout, reads.storage_anchor, reads.storage_hint)
    axes = max(table.sizes.shape[1], reads.lengths.shape[1], 1)
    extents = pad(table.sizes, axes, 1)[(table.first[layout] + np.maximum(chunk, 0))]
    reach = reach_of(extents, entries.itemsize[entry], max_bytes)
    offsets = pad(reads.storage_offsets, axes, 0)
    cell = offsets // reach
    last = (offsets + np.maximum(pad(reads.lengths, axes, 1), 1) - 1) // reach
    number, start = _row_major(cell, blocks_along(extents, reach)), cell * reach
    inside = (cell == last).all(axis=1) & (chunk >= 0)
    sizes = np.minimum(reach, extents - start)
    return Located(entry, chunk, number, start, sizes, extents, inside)
