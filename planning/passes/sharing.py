"""Passes for loads: one rank reads what several ranks need, and sends it to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, group_rows, pad, readonly
from ..columns.cuts import cut_reads
from ..columns.items import Catalog, Head, WriteItems
from ..columns.reads import ReadItems, Transfers
from ..columns.world import Rows, World
from ..geometry.overlap import overlap_many, self_overlaps
from ..geometry.tilings import Grid, Tiling
from ..metadata import Metadata, TensorMetadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType, WriteItemType
from ..storage.blocks import BLOCK_BYTES, Located, cut_blocks, locate_reads
from ..storage.ranges import fetched, has_narrow_gaps, lies_together
from .base import Step
from .shares import assign


def share_reads(
    metadata: Metadata,
    *,
    min_readers: int = 2,
    min_bytes: int = 1 << 16,
    block_bytes: int = BLOCK_BYTES,
    max_gap: int = 0,
) -> Step[LoadPlan]:
    """Have one rank read the bytes that several ranks need, and send them to the others.

    Reads that overlap in part are cut first, so that no byte is read twice. Each piece is read by
    one of the ranks that need it, chosen so that the bytes read per rank are even.

    Blocks stay together so that checksums can be compared: a block that some rank needs in full is
    read by one rank. So is a block that ranks need in parts with narrow gaps between them, such as
    columns, if reading it in full is not more expensive. Run `split_reads` first.

    Args:
        metadata: The checkpoint that the plans read.
        min_readers: Pieces that fewer ranks need are left alone.
        min_bytes: Smaller pieces are left alone: a message costs as much as the read saves.
        block_bytes: The block size of the checkpoint's checksums.
        max_gap: The largest gap, in bytes, that is cheaper to read than to skip.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((4,))})
    >>> metadata = global_plan([plan])[1]
    >>> loads = (load_plan(metadata, plan),) * 2
    >>> a, b = share_reads(metadata, min_bytes=1)(loads)
    >>> len(a.items), len(b.items), b.transfers[0].source, b.transfers[0].target
    (1, 0, 0, 1)
    """
    options: dict[str, Any] = {
        "min_readers": min_readers,
        "min_bytes": min_bytes,
        "block_bytes": block_bytes,
        "max_gap": max_gap,
    }
    run = partial(_share_reads, metadata, **options)
    return Step(share_reads, (metadata,), options, "world", run)


def _share_reads(
    metadata: Metadata,
    plans: tuple[LoadPlan, ...],
    *,
    min_readers: int,
    min_bytes: int,
    block_bytes: int,
    max_gap: int,
) -> tuple[LoadPlan, ...]:
    catalog = _catalog(metadata)
    rows = _regions(plans, metadata, catalog)
    grids = dict(_grids(rows))
    if grids:
        cut = [_cut(plan.items, metadata, catalog, grids) for plan in plans]
        plans = tuple(attrs.evolve(p, items=c) for p, c in zip(plans, cut, strict=True))
        rows = _regions(plans, metadata, catalog)
    group = np.cumsum(~rows.repeats) - 1
    if not rows.repeats.any() and not max_gap:
        return plans
    reader, woven = _readers(plans, rows, group, metadata, block_bytes, max_gap)
    is_value = rows.prop[rows.tensor] < 0
    worth = np.bincount(group)[group] >= min_readers
    worth &= (rows.nbytes >= min_bytes) | is_value
    worth |= woven >= min_bytes
    return _hand_over(plans, rows.rank, rows.item, reader, worth & (rows.rank != reader))


def split_reads(metadata: Metadata, max_bytes: int, *, max_gap: int = 0) -> Step[LoadPlan]:
    """Cut every read into pieces of at most ``max_bytes`` of storage, by rows, then within rows.

    Run before `share_reads`, so that several ranks read parts of what all of them need. A read that
    is one range of its chunk, or several with gaps of at most ``max_gap`` bytes, is cut at
    multiples of ``max_bytes`` in the chunk, so that whoever reads a block can compare its checksum.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})
    >>> metadata = global_plan([plan])[1]
    >>> cut = split_reads(metadata, 32)((load_plan(metadata, plan),))[0]
    >>> [read.lengths for read in cut.items]
    [(2, 4), (2, 4), (1, 4)]
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")

    def run(plans: tuple[LoadPlan, ...]) -> tuple[LoadPlan, ...]:
        width = metadata.state_dict_metadata.itemsize
        return tuple(
            attrs.evolve(plan, items=_split_items(plan.items, metadata, max_bytes, max_gap, width))
            for plan in plans
        )

    return Step(split_reads, (metadata, max_bytes), {"max_gap": max_gap}, "rank", run)


def _split_items(
    reads: ReadItems, metadata: Metadata, max_bytes: int, max_gap: int, width: Ints
) -> ReadItems:
    itemsize = width[_rows_of(reads.names, metadata)[reads.storage]] if len(reads) else None
    if itemsize is None or (not max_gap and (reads.numel * itemsize <= max_bytes).all()):
        return reads
    axes, extents = reads.lengths.shape[1], locate_reads(metadata, reads).extents
    lengths, offsets = pad(reads.lengths, extents.shape[1], 1), np.zeros_like(extents)
    offsets[:, :axes] = reads.storage_offsets
    aligned = lies_together(lengths, extents)[:, None]
    if max_gap:
        aligned |= has_narrow_gaps(lengths, extents, itemsize, max_gap)[:, None]
    blocks = cut_blocks(
        lengths,
        itemsize,
        max_bytes,
        offsets=np.where(aligned, offsets, 0),
        extents=np.where(aligned, extents, lengths),
    )
    return cut_reads(reads, blocks.box, blocks.offsets[:, :axes], blocks.sizes[:, :axes])[0]


def read_on(reader: int) -> Step[LoadPlan]:
    """Have one rank read everything, and send every other rank only what it needs.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((4,))})
    >>> loads = (load_plan(global_plan([plan])[1], plan),) * 2
    >>> [len(plan.items) for plan in read_on(1)(loads)]
    [0, 1]
    """

    def run(plans: tuple[LoadPlan, ...]) -> tuple[LoadPlan, ...]:
        if not 0 <= reader < len(plans):
            raise ValueError(f"rank {reader} is not one of the {len(plans)} that load")
        counts = [len(plan.items) for plan in plans]
        rank = np.repeat(np.arange(len(plans)), counts)
        item = np.concatenate([np.arange(n) for n in counts]) if counts else rank
        moved = np.flatnonzero(rank != reader)
        return _hand_over(plans, rank, item, np.full(len(rank), reader), moved)

    return Step(read_on, (reader,), {}, "world", run)


def _catalog(metadata: Metadata) -> Catalog:
    """Return the saved tensors as a catalog, so that reads can be compared like chunks."""
    return Catalog.of(
        Head(name, name, WriteItemType.SHARD, entry.properties, entry.size)
        if isinstance(entry, TensorMetadata)
        else Head.value(name)
        for name, entry in metadata.state_dict_metadata.items()
    )


def _regions(plans: Sequence[LoadPlan], metadata: Metadata, catalog: Catalog) -> Rows:
    """Return every read as the region of the saved tensor that it copies, sorted."""
    row_of = lru_cache(lambda names: _rows_of(names, metadata))  # ranks share their names
    regions = (_region(plan.items, row_of(plan.items.names), catalog.axes) for plan in plans)
    return World(SavePlan(WriteItems(catalog, *region)) for region in regions).rows


def _rows_of(names: tuple[str, ...], metadata: Metadata) -> Ints:
    row_of = metadata.state_dict_metadata.row_of
    return column([row_of.get(name, -1) for name in names])  # names of the state dict have none


def _region(reads: ReadItems, row_of: Ints, width: int) -> tuple[Ints, Ints, Ints]:
    row = row_of[reads.storage] if len(reads) else reads.storage
    if (row < 0).any():
        name = reads.names[int(reads.storage[(row < 0).argmax()])]
        raise ValueError(f"share_reads: `{name}` is read but not in the metadata that was given")
    is_bytes = (reads.type == LoadItemType.BYTE_IO.value)[:, None]
    offsets = np.where(is_bytes, 0, reads.storage_anchor + reads.storage_offsets)
    sizes = np.where(is_bytes, 1, reads.lengths)
    fitted = (pad(offsets, width, 0)[:, :width], pad(sizes, width, 1)[:, :width])
    return row, readonly(fitted[0]), readonly(fitted[1])


def _readers(
    plans: Sequence[LoadPlan],
    rows: Rows,
    group: Ints,
    metadata: Metadata,
    block_bytes: int,
    max_gap: int,
) -> tuple[Ints, Ints]:
    """Choose the reader of each row's region; one rank reads all regions of a block.

    Returns:
        The reader of each row; and the bytes of its block if the block is read in full although no
        rank needs all of it, else 0.
    """
    reads = ReadItems.concat([plan.items for plan in plans]).take(rows.flat)
    located = locate_reads(metadata, reads, block_bytes)
    _, block = group_rows([located.entry, located.chunk, located.number])
    whole = _holds_whole(rows, group, block, located, reads.numel, len(plans))
    first = np.diff(group, prepend=-1) != 0  # the first row of each region
    several, held = (np.bincount(block[first]) > 1)[block], (np.bincount(block, whole) > 0)[block]
    nbytes = rows.nbytes // np.maximum(reads.numel, 1) * located.numel  # of the block
    woven = several & ~held & _is_woven(rows, first, block, located, reads, max_gap)
    together = (several & held) | woven
    unit = np.where(together, len(group) + block, group)  # what one rank reads
    weight = np.where(together, nbytes, rows.nbytes)
    able = np.flatnonzero(~together | whole | woven)
    able = able[np.lexsort((rows.rank[able], unit[able]))]
    names, number = np.unique(unit[able], return_inverse=True)
    again = np.diff(number, prepend=-1) + np.abs(np.diff(rows.rank[able], prepend=-1)) == 0
    able, number = able[~again], number[~again]
    chosen = able[assign(number, rows.rank[able], weight[able], len(plans))]
    readers: Ints = rows.rank[chosen][np.searchsorted(names, unit)]
    return readers, np.where(woven, nbytes, 0)


def _is_woven(
    rows: Rows,
    first: npt.NDArray[np.bool_],
    block: Ints,
    located: Located,
    reads: ReadItems,
    max_gap: int,
) -> npt.NDArray[np.bool_]:
    """Return which rows belong to a block that is cheaper to read in full than in regions."""
    if not max_gap:
        return np.zeros(len(block), bool)
    itemsize = rows.nbytes // np.maximum(reads.numel, 1)
    lengths = pad(reads.lengths, located.extents.shape[1], 1)
    numel = fetched(lengths, located.extents, itemsize, max_gap)
    wide = np.bincount(block, numel > reads.numel)[block] > 0  # some have narrow gaps
    total = np.bincount(block, np.where(first & located.inside, numel, 0))[block]
    woven: npt.NDArray[np.bool_] = located.inside & wide & (total >= located.numel)
    return woven


def _holds_whole(
    rows: Rows, group: Ints, block: Ints, located: Located, numel: Ints, ranks: int
) -> npt.NDArray[np.bool_]:
    """Return which rows belong to a rank that needs all of the row's block."""
    _, pair = np.unique(block * ranks + rows.rank, return_inverse=True)
    again = (np.diff(group, prepend=-1) == 0) & (np.diff(rows.rank, prepend=-1) == 0)
    held = np.bincount(pair, np.where(again | ~located.inside, 0, numel))[pair]
    whole: npt.NDArray[np.bool_] = (held == located.numel) & located.inside & (numel > 0)
    return whole


def _hand_over(
    plans: tuple[LoadPlan, ...], rank: Ints, item: Ints, reader: Ints, moved: Ints
) -> tuple[LoadPlan, ...]:
    """Remove the moved reads from the plans, and add them as transfers on both sides."""
    order = np.lexsort((item[moved], rank[moved]))
    target, source, item = rank[moved][order], reader[moved][order], item[moved][order]
    edges = np.searchsorted(target, np.arange(len(plans) + 1))
    mine = [slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    parts = [plan.items.take(item[rows]) for plan, rows in zip(plans, mine, strict=True)]
    transfers = Transfers(ReadItems.concat(parts), readonly(source), readonly(target))
    sending = np.argsort(source, kind="stable")
    starts = np.searchsorted(source[sending], np.arange(len(plans) + 1))
    done = []
    for number, (plan, rows) in enumerate(zip(plans, mine, strict=True)):
        stay = np.ones(len(plan.items), bool)
        stay[item[rows]] = False
        sent = sending[starts[number] : starts[number + 1]]
        both = np.concatenate([np.arange(rows.start, rows.stop), sent])
        every = Transfers.concat([plan.transfers, transfers.take(both)])
        done.append(attrs.evolve(plan, items=plan.items.take(stay), transfers=every))
    return tuple(done)


def _grids(rows: Rows) -> Iterator[tuple[str, Tiling]]:
    """Return the grid of all edges for each tensor whose regions overlap in part."""
    layouts, which = rows.take(~rows.repeats).layouts
    for number, layout in enumerate(layouts):
        tiling = layout.tiling
        if not self_overlaps(tiling, limit=1):
            continue
        edges = np.concatenate([tiling.offsets, tiling.offsets + tiling.sizes])
        grid = Grid(tuple(readonly(np.unique(edges[:, axis])) for axis in range(tiling.ndim)))
        for tensor in np.flatnonzero(which == number).tolist():
            yield rows.names[tensor], grid


def _cut(
    reads: ReadItems, metadata: Metadata, catalog: Catalog, grids: dict[str, Tiling]
) -> ReadItems:
    row, offsets, sizes = _region(reads, _rows_of(reads.names, metadata), catalog.axes)
    hit = np.flatnonzero([catalog.names[r] in grids for r in row.tolist()])
    numbers, which = np.unique(row[hit], return_inverse=True)
    used = [grids[catalog.names[number]] for number in numbers.tolist()]
    pieces = overlap_many(used, which, offsets[hit], sizes[hit])
    # The untouched reads keep their place; a cut one is replaced by its pieces, in order.
    whole, width = np.setdiff1d(np.arange(len(reads)), hit), reads.lengths.shape[1]
    at = np.concatenate([whole, hit[pieces.box]])
    shift = np.zeros((len(at), width), np.int64)
    shift[len(whole) :] = (pieces.offsets - offsets[hit][pieces.box])[:, :width]
    lengths = np.concatenate([reads.lengths[whole], pieces.sizes[:, :width]])
    order = np.argsort(at, kind="stable")
    return cut_reads(reads, at[order], shift[order], lengths[order])[0]
