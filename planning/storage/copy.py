"""`copy_plan`: which bytes of one checkpoint become which bytes of another, and in which order.

1. The items of a save plan, in the order in which they are written, are cut into boxes: blocks of
   the new checkpoint, or parts of these where elements are wider in the old one.
2. `load_plan` says which reads of the old checkpoint fill each box.
3. A box whose every read is one range, both in its file and in the box, is copied from file to
   file. Other boxes, and those whose dtype changes, pass through memory.
4. Boxes that pass through memory are read in batches of some megabytes, a little ahead.

Nothing is read here; `shardplan.io.execute` carries the plan out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, pad, padded
from ..columns.items import Catalog, Head, WriteItems
from ..columns.reads import ReadItems
from ..geometry.axes import Cut
from ..load import load_plan
from ..metadata import Metadata, TensorMetadata
from ..plans import SavePlan
from ..records import TensorProperties, WriteItemType
from ..text import Printed, Sheet, counted, human_bytes, listing
from .blocks import BLOCK_BYTES, block_numbers, boxes_of, cut_blocks, cut_within
from .fetch import ChunkPlaces
from .ranges import Flags, lies_together, steps

BATCH_BYTES: Final = BLOCK_BYTES
"""How many bytes of boxes are read at a time."""

_BATCH_BOXES: Final = 1 << 11
_DEPTH: Final = 2  # batches that are read before they are asked for, if memory allows
_MADE: Final = 2  # blocks of a file that were cast: one is written while the next is made
_HELD: Final = 2  # batches of a file: one is written, and another was begun to be
_SHOWN: Final = 20  # rows of a printed plan


@attrs.frozen(cache_hash=True)
class Box:
    """A part of a saved tensor."""

    name: str  # the tensor
    offsets: tuple[int, ...]  # where the box starts in it, in elements
    sizes: tuple[int, ...]  # how large it is, in elements


@attrs.frozen(eq=False)
class StoredChunks:
    """Where all chunks of a checkpoint's tensors lie; one row a chunk, by tensor."""

    places: ChunkPlaces  # where each lies
    first: Mapping[str, int]  # the row of each tensor's first chunk, by name
    movable: Flags  # whether its bytes can be copied out of its file as they are
    # Names of tensors that are stored as another one, and those others.
    tied: Mapping[str, str] = attrs.field(factory=dict)
    block_bytes: int = BLOCK_BYTES  # the most bytes of a block that chunks were hashed with


@attrs.frozen(eq=False, repr=False, slots=False)
class CopyPlan(Printed):
    """What one file, or the files of one rank, are copied from."""

    boxes: tuple[Box, ...]  # what is read, in the order in which it is written; none is empty
    nbytes: Ints  # per box, its bytes as they are stored
    batch: Ints  # per box, the batch that it is read in if it passes through memory
    copied: Flags  # per box, whether its bytes are copied from file to file as they are
    reads: ReadItems  # the reads that fill the boxes, by box, then in the order of its bytes
    box: Ints  # per read, the box that it fills a part of
    file: Ints  # per read of a copied box, where its bytes lie
    begin: Ints
    into: Ints  # per read of a copied box, where they go in the box, in bytes
    length: Ints  # per read, its bytes
    block: Ints  # per read of a copied box, which block of its chunk it is; -1 if it is none
    blocks: Ints  # per read of a copied box, how many blocks its chunk has

    @property
    def batches(self) -> list[Ints]:
        """The boxes of each batch."""
        edges = np.flatnonzero(np.diff(self.batch)) + 1
        return np.split(np.arange(len(self.boxes)), edges) if self.boxes else []

    def rows(self, box: int) -> range:
        """Return the reads that fill a box, in the order of the box's bytes."""
        return range(self._edges[box], self._edges[box + 1])

    @cached_property
    def _edges(self) -> list[int]:
        edges: list[int] = np.searchsorted(self.box, np.arange(len(self.boxes) + 1)).tolist()
        return edges

    @property
    def _sheet(self) -> Sheet:
        copied = human_bytes(self.nbytes[self.copied].sum())
        title = (
            f"copy {human_bytes(self.nbytes.sum())} in {counted(len(self.boxes), 'box')}, "
            f"{copied} from file to file"
        )
        head = ("batch", "first box", "boxes", "bytes", "copied", "reads")
        batches = self.batches
        return listing(title, head, self._rows(batches[:_SHOWN]), len(batches))

    def _rows(self, batches: Sequence[Ints]) -> Iterator[tuple[object, ...]]:
        for number, boxes in enumerate(batches):
            yield (
                number,
                self.boxes[boxes[0]].name,
                len(boxes),
                int(self.nbytes[boxes].sum()),
                int(self.copied[boxes].sum()),
                sum(len(self.rows(box)) for box in boxes.tolist()),
            )


def copy_plan(
    metadata: Metadata,
    plan: SavePlan,
    order: Ints | None = None,
    stored: StoredChunks | None = None,
    *,
    whole: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> CopyPlan:
    """Plan how the items of a plan are copied from another checkpoint.

    Args:
        metadata: The checkpoint to read.
        plan: What to write. Each item's source is a whole tensor of the old checkpoint.
        order: The items in the order in which they are written; some may be left out.
        stored: Where the old checkpoint's chunks lie; None if nothing can be copied as it is.
        whole: Whether all items of a tensor are written as one, cut into its blocks.
        block_bytes: The most bytes of a box.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((4, 4)), "b": TensorSpec((4,))})
    >>> copy_plan(global_plan([plan])[1], plan)
    copy 80 B in 2 boxes, 0 B from file to file
    batch  first box  boxes  bytes  copied  reads
        0  b              2     80       0      2
    """
    boxes, same = _boxes(metadata, plan, order, whole, block_bytes)
    reads, box = read_boxes(metadata, boxes)
    width = column([_properties(metadata, b.name).itemsize for b in boxes])
    axes = max(reads.lengths.shape[1], 1)
    sizes, lengths = padded([b.sizes for b in boxes], 1, axes), pad(reads.lengths, axes, 1)
    nbytes = sizes.prod(axis=1) * width
    into = (pad(reads.dest_offsets, axes, 0) * steps(sizes[box])).sum(axis=1) * width[box]
    order = np.lexsort((into, box))
    reads, lengths, box, into = reads.take(order), lengths[order], box[order], into[order]
    found = _stored_ranges(reads, stored)
    same[box[~(found.single & lies_together(lengths, sizes[box]))]] = False
    return CopyPlan(
        boxes=boxes,
        nbytes=nbytes,
        batch=_batches(nbytes),
        copied=same,
        reads=reads,
        box=box,
        file=found.file,
        begin=found.begin,
        into=into,
        length=reads.numel * width[box],
        block=found.block,
        blocks=found.blocks,
    )


def _boxes(
    metadata: Metadata, plan: SavePlan, order: Ints | None, whole: bool, block_bytes: int
) -> tuple[tuple[Box, ...], Flags]:
    """Return the boxes of a plan's items, and whether each is written as it is stored."""
    found: dict[Box, bool] = {}  # a box that is written twice is planned once
    for piece in _pieces(plan.items, order, whole):
        for low, size in boxes_of(piece.sizes, piece.dtype, block_bytes):
            if 0 in size:
                continue
            block, numel = tuple(low[: len(piece.sizes)]), math.prod(size)
            for name, where in piece.origins:
                stored = _properties(metadata, name).dtype
                for at, sizes in boxes_of(size[: len(block)], stored, block_bytes):
                    start = tuple(b + a for b, a in zip(block, at, strict=False))
                    for one in cut_within(where, start, tuple(sizes[: len(block)])):
                        same = stored == piece.dtype and math.prod(one.box_sizes) == numel
                        same &= one.axes is None or len(one.axes.order) <= 1
                        found.setdefault(Box(name, one.box_offsets, one.box_sizes), same)
    return tuple(found), np.array(list(found.values()), bool)


@attrs.frozen
class _Piece:
    """What is written as one: its sizes, its dtype, and the boxes of tensors that it is made of."""

    sizes: tuple[int, ...]
    dtype: str
    origins: list[tuple[str, Cut]]


def _pieces(items: WriteItems, order: Ints | None, whole: bool) -> Iterable[_Piece]:
    """Return what is written, in order: each item, or each tensor that is written whole."""
    found: dict[str | int, _Piece] = {}
    heads, frame = items.catalog.heads, items.frame
    offsets, sizes, rows = items.offsets.tolist(), items.sizes.tolist(), items.row.tolist()
    box_offsets, box_sizes = items.box_offsets.tolist(), items.box_sizes.tolist()
    for item in range(len(items)) if order is None else order.tolist():
        name, source, _, properties, shape = heads[rows[item]]
        if properties is None:
            continue
        axes, count = len(shape), items.box_axes(item)
        chunk = tuple(sizes[item][:axes])
        start = tuple(offsets[item][:axes]) if whole else (0,) * axes
        empty = _Piece(shape if whole else chunk, properties.dtype, [])
        piece = found.setdefault(name if whole else item, empty)
        if frame is None or frame.fill[item] is None:
            box = tuple(box_offsets[item][:count]), tuple(box_sizes[item][:count])
            axes_of = None if frame is None else frame.axes[item]
            piece.origins.append((source, Cut(*box, axes_of, start, chunk)))
    return found.values()


def read_boxes(metadata: Metadata, boxes: Sequence[Box]) -> tuple[ReadItems, Ints]:
    """Return the reads that fill some boxes, by box, and the box of each read."""
    entries = {box.name: metadata.state_dict_metadata[box.name] for box in boxes}
    number = {name: row for row, name in enumerate(entries)}
    heads: list[Head] = []
    for name, entry in entries.items():
        assert isinstance(entry, TensorMetadata)
        heads.append(Head(name, name, WriteItemType.SHARD, entry.properties, entry.size))
    catalog = Catalog.of(tuple(heads))
    items = WriteItems(
        catalog,
        column([number[box.name] for box in boxes]),
        padded([box.offsets for box in boxes], 0, catalog.axes),
        padded([box.sizes for box in boxes], 1, catalog.axes),
    )
    reads = load_plan(Metadata(entries), SavePlan(items)).items
    # Reads come by box, and cover each box once: so elements say where a box's reads end.
    ends = np.cumsum(items.sizes.prod(axis=1))
    return reads, np.searchsorted(ends, np.cumsum(reads.numel) - reads.numel, side="right")


def _properties(metadata: Metadata, name: str) -> TensorProperties:
    entries = metadata.state_dict_metadata
    return entries.props[int(entries.prop[entries.row_of[name]])]


@attrs.frozen(eq=False)
class _Ranges:
    """Whether each read is one range that can be copied, where it begins, and which block it is."""

    single: Flags
    file: Ints
    begin: Ints
    block: Ints
    blocks: Ints


def _stored_ranges(reads: ReadItems, stored: StoredChunks | None) -> _Ranges:
    if stored is None or not len(reads):
        zeros = np.zeros(len(reads), np.int64)
        return _Ranges(np.zeros(len(reads), bool), zeros, zeros, zeros - 1, zeros)
    places = stored.places
    chunk = column([stored.first[name] for name in reads.names])[reads.storage] + reads.storage_hint
    axes = max(reads.lengths.shape[1], places.extents.shape[1])
    extents, width = pad(places.extents, axes, 1)[chunk], places.itemsize[chunk]
    offsets, lengths = pad(reads.storage_offsets, axes, 0), pad(reads.lengths, axes, 1)
    return _Ranges(
        stored.movable[chunk] & lies_together(lengths, extents),
        places.file[chunk],
        places.begin[chunk] + (offsets * steps(extents)).sum(axis=1) * width,
        *block_numbers(offsets, lengths, extents, width, stored.block_bytes),
    )


def begun_chunks(reads: ReadItems) -> set[tuple[str, int]]:
    """Return the chunks whose first element is read, by name and number among the tensor's.

    Of processes that copy different parts of a chunk, so just one begins it.
    """
    first = np.flatnonzero((reads.storage_offsets == 0).all(axis=1))
    rows = zip(reads.storage[first].tolist(), reads.storage_hint[first].tolist(), strict=True)
    return {(reads.names[name], chunk) for name, chunk in rows}


@attrs.frozen(eq=False)
class ComparePlan:
    """What is read of two checkpoints to compare their elements."""

    boxes: tuple[Box, ...]  # what is read, small enough for memory; none is empty
    chunk: tuple[int, ...]  # per box, the number of the chunk that it is a part of
    nbytes: tuple[int, ...]  # per box, its bytes
    batches: tuple[range, ...]  # the boxes that are read at a time


def compare_plan(metadata: Metadata, chunks: Mapping[str, Ints], max_bytes: int) -> ComparePlan:
    """Cut chunks of a checkpoint into boxes, to be read in batches of about ``max_bytes``.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan
    >>> metadata = global_plan([local_plan({"w": TensorSpec((5, 4)), "b": TensorSpec((4,))})])[1]
    >>> plan = compare_plan(metadata, {"w": np.array([0]), "b": np.array([0])}, 32)
    >>> [(box.name, *box.offsets) for box in plan.boxes], plan.batches
    ([('w', 0, 0), ('w', 2, 0), ('w', 4, 0), ('b', 0)], (range(0, 1), range(1, 2), range(2, 4)))
    """
    boxes, chunk, nbytes = list[Box](), list[int](), list[int]()
    for name, numbers in chunks.items():
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorMetadata)
        width, axes = entry.properties.itemsize, len(entry.size)
        numbers = numbers[(entry.chunks.sizes[numbers] > 0).all(axis=1)]
        sizes = entry.chunks.sizes[numbers]
        blocks = cut_blocks(sizes, np.full(len(numbers), width), max_bytes)
        starts = entry.chunks.offsets[numbers][blocks.box] + blocks.offsets[:, :axes]
        pairs = zip(starts.tolist(), blocks.sizes[:, :axes].tolist(), strict=True)
        boxes += [Box(name, tuple(start), tuple(size)) for start, size in pairs]
        chunk += numbers[blocks.box].tolist()
        nbytes += (blocks.sizes.prod(axis=1) * width).tolist()
    batch = _batches(column(nbytes), max_bytes)
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(boxes)]
    batches = tuple(range(low, high) for low, high in pairwise(edges) if low < high)
    return ComparePlan(tuple(boxes), tuple(chunk), tuple(nbytes), batches)


def _batches(nbytes: Ints, max_bytes: int = BATCH_BYTES) -> Ints:
    """Number the batches in which boxes are read."""
    batch, number, held, boxes = np.zeros(len(nbytes), np.int64), 0, 0, 0
    for row, size in enumerate(nbytes.tolist()):
        if boxes and (held + size > max_bytes or boxes == _BATCH_BOXES):
            number, held, boxes = number + 1, 0, 0
        batch[row], held, boxes = number, held + size, boxes + 1
    return batch


@attrs.frozen
class CopyBudget:
    """How much of a conversion may happen at once."""

    files: int  # how many files are written at a time
    depth: int  # how many batches are read before they are asked for, of each file
    reading: int  # bytes that reads under way may hold


def copy_budget(
    max_memory: int, *, read_staging: int = 0, write_staging: int = 0, max_files: int = 4
) -> CopyBudget:
    """Divide memory: a quarter for reads under way, the rest for files in the making.

    Stores hold ``read_staging`` bytes of a read and ``write_staging`` of a write on the way.

    >>> copy_budget(192 << 20, write_staging=64 << 20)
    CopyBudget(files=1, depth=1, reading=50331648)
    """
    reading = max(min(max_memory // 4, 256 << 20), 2 * BATCH_BYTES + read_staging)
    rest = max_memory - reading
    depth = _DEPTH if rest >= 2 * copy_memory(_DEPTH, write_staging) else 1
    files = min(rest // copy_memory(depth, write_staging), max_files)
    return CopyBudget(max(1, files), depth, reading)


def copy_memory(depth: int, staging: int) -> int:
    """Return how much memory a file in the making takes at most."""
    return (_HELD + depth) * BATCH_BYTES + _MADE * BLOCK_BYTES + staging


def share_plans(plans: Sequence[SavePlan], processes: int) -> list[list[int]]:
    """Return the plans that each process carries out: the largest first, to the least busy.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> share_plans([local_plan({"w": TensorSpec((n,))}) for n in (1, 5, 3, 3)], 2)
    [[1, 0], [2, 3]]
    """
    sizes = [written_bytes(plan) for plan in plans]
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = loads.index(min(loads))
        loads[least] += sizes[number] + 1
        shares[least].append(number)
    return shares


def written_bytes(plan: SavePlan) -> int:
    """Return how many bytes of tensors a plan writes."""
    items = plan.items
    if not len(items):
        return 0
    numel = items.sizes.prod(axis=1) * np.maximum(items.catalog.itemsize[items.row], 0)
    return int(numel[~items.catalog.is_bytes[items.row]].sum())
