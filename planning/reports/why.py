"""Why does this rank read that byte? Who wrote an element, where it lies, and who reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

import attrs
import numpy as np
import numpy.typing as npt

from ..catalog import column
from ..errors import NotFoundError, span
from ..items import LoadItemType, MetadataIndex, ReadItem
from ..metadata import BytesMetadata, TensorMetadata
from ..packing import Ints
from ..reads import ReadItems
from ..records import LoadPlan, SavePlan
from ..sheet import Sheet, Table
from ..tiling import Chunk, as_ints, pad
from ..topology import WorldPlans
from .explain import Report

__all__ = ["ElementRead", "Why", "why"]

Element = tuple[int, ...]

_SHOWN: Final = 12
_VALUE: Final = LoadItemType.BYTE_IO.value


@attrs.frozen
class ElementRead:
    """How one rank comes by an element.

    Attributes:
        rank: The rank that gets it.
        read: The read that brings it.
        storage_offsets: Where it lies, relative to the saved chunk, in elements.
        dest_offsets: Where it goes, relative to the shard of the state dict, in elements.
        via: The rank that reads it from storage and sends it; None if this one reads it itself.
    """

    rank: int
    read: ReadItem
    storage_offsets: Element
    dest_offsets: Element
    via: int | None = None


@attrs.frozen(repr=False)
class Why:
    """All that is known about one element; printed as a table.

    Attributes:
        fqn: The name of its tensor (or value) in the checkpoint.
        element: Where it lies in the tensor, in the global frame.
        index: The saved chunk that holds it.
        chunk: That chunk's box; None for a value that is no tensor.
        byte_offset: Where it starts, in bytes from the start of the chunk; None likewise.
        nbytes: How many bytes it takes; None likewise.
        writers: The ranks that write it; in a load that is the rank in whose file it lies. Empty if
            nobody knows.
        reads: How each rank that wants it comes by it, by rank.
    """

    fqn: str
    element: Element
    index: MetadataIndex
    chunk: Chunk | None
    byte_offset: int | None
    nbytes: int | None
    writers: tuple[int, ...]
    reads: tuple[ElementRead, ...]

    def __repr__(self) -> str:
        return _sheet(self).text()

    def _repr_html_(self) -> str:
        return _sheet(self).html()


def why(report: Report, fqn: str, element: Iterable[int] = ()) -> Why:
    """Say who wrote one element, where it lies in storage, and which ranks read it from there.

    Args:
        report: What `explain` returned, for plans of any kind.
        fqn: The tensor's name in the checkpoint.
        element: Where the element lies in the tensor; nothing for a value that is no tensor.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, local_plan
    >>> from shardplan.planning.reports import explain
    >>> sd = {"w": TensorSpec((6, 4), "float32", [Shard(0)])}
    >>> saved, metadata = global_plan(local_plan(sd, mesh=Mesh(dp=2), rank=r) for r in range(2))
    >>> wanted = [local_plan(sd, mesh=Mesh(dp=3), rank=r) for r in range(3)]
    >>> loads = [load_plan(metadata, plan) for plan in wanted]
    >>> why(explain(metadata, loads, writers=saved), "w", (3, 1))
    Element [3, 1] of `w`: 4 bytes at byte 4 of chunk [3:6, 0:4], written by rank 1, read by rank 1
    rank  into  shard at  at      read from  lengths  chunk offset  by
    1     w     [2, 0]    [1, 1]  [0, 0]     [1, 4]   [0, 1]        itself

    Raises:
        NotFoundError: The checkpoint has no such tensor or no chunk that holds the element.
        IndexError: The element lies outside the tensor.
    """
    entry = report.metadata.entry(fqn)
    at = as_ints(element)
    if isinstance(entry, BytesMetadata):
        if at:
            raise IndexError(f"`{fqn}` is a value that is no tensor: it has no element {at}")
        index, writers = MetadataIndex(fqn), tuple(_writers(report, MetadataIndex(fqn), at))
        return Why(fqn, at, index, None, None, None, writers, _reads(report, fqn, at))
    if len(at) != len(entry.size) or not all(
        0 <= i < n for i, n in zip(at, entry.size, strict=True)
    ):
        raise IndexError(f"`{fqn}` has the shape {list(entry.size)}: it has no element {list(at)}")
    number, chunk = _saved(entry, fqn, at)
    index = MetadataIndex(fqn, chunk.offsets, number)
    inside = tuple(i - o for i, o in zip(at, chunk.offsets, strict=True))
    size = entry.properties.itemsize
    place = _ravel(inside, chunk.sizes) * size
    writers = tuple(_writers(report, index, at))
    return Why(fqn, at, index, chunk, place, size, writers, _reads(report, fqn, at))


def _ravel(element: Element, sizes: Sequence[int]) -> int:
    """Return how many elements come before one in a row-major array."""
    place = 0
    for i, n in zip(element, sizes, strict=True):
        place = place * n + i
    return place


def _saved(entry: TensorMetadata, fqn: str, element: Element) -> tuple[int, Chunk]:
    """Return the saved chunk that holds an element, and which one it is."""
    low = entry.chunks.offsets
    rows = np.flatnonzero(_holds(low, low + entry.chunks.sizes, element))
    if not len(rows):
        raise NotFoundError(f"no saved chunk of `{fqn}` holds element {list(element)}")
    return int(rows[0]), entry.chunks[int(rows[0])]


def _holds(low: Ints, high: Ints, element: Element) -> npt.NDArray[np.bool_]:
    """Tell which boxes hold an element; columns past its axes are padding."""
    axes = len(element)
    at, low, high = column(element, axes), pad(low, axes, 0), pad(high, axes, 1)
    inside = (low[:, :axes] <= at) & (at < high[:, :axes])
    return np.asarray(inside.all(axis=1))


def _writers(report: Report, index: MetadataIndex, element: Element) -> Iterator[int]:
    """Give the ranks that write an element."""
    if report.kind != "save":
        if report.writers is not None:
            yield report.writers[index]
        return
    for rank, plan in enumerate(cast(Sequence[SavePlan], report.plans)):
        items = plan.items
        mine = np.array([name == index.fqn for name in items.catalog.names], bool)[items.row]
        if (mine & _holds(items.offsets, items.offsets + items.sizes, element)).any():
            yield rank


def _reads(report: Report, fqn: str, element: Element) -> tuple[ElementRead, ...]:
    """Return how each rank comes by an element."""
    if report.kind == "save":
        return ()
    if isinstance(report.plans, WorldPlans):
        return tuple(_world_reads(report, report.plans, fqn, element))
    found: list[ElementRead] = []
    for rank, plan in enumerate(cast(Sequence[LoadPlan], report.plans)):
        items = plan.items
        found.extend(_traced(rank, items[row], element) for row in _matches(items, fqn, element))
        passed = plan.transfers.take(plan.transfers.target == rank)
        found.extend(
            _traced(rank, passed.reads[row], element, int(passed.source[row]))
            for row in _matches(passed.reads, fqn, element)
        )
    return tuple(found)


def _matches(items: ReadItems, fqn: str, element: Element) -> list[int]:
    """Return the reads that bring an element (or a value that is no tensor)."""
    if fqn not in items.names:
        return []
    mine = items.storage == items.names.index(fqn)
    low = items.storage_anchor + items.storage_offsets
    mine &= (items.type == _VALUE) | _holds(low, low + items.lengths, element)
    found: list[int] = np.flatnonzero(mine).tolist()
    return found


def _traced(rank: int, read: ReadItem, element: Element, via: int | None = None) -> ElementRead:
    """Follow an element through the read that brings it."""
    source = tuple(i - o for i, o in zip(element, read.storage_index.offset or (), strict=True))
    moves = zip(source, read.storage_offsets, read.dest_offsets, strict=bool(element))
    return ElementRead(rank, read, source, tuple(i - a + b for i, a, b in moves), via)


def _world_reads(
    report: Report, world: WorldPlans, fqn: str, element: Element
) -> Iterator[ElementRead]:
    """Give the reads of all ranks that would hold an element, as their load plans would say."""
    entry = report.metadata.entry(fqn)
    if isinstance(entry, BytesMetadata):
        index, nothing = MetadataIndex(fqn), (0,)
        read = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        holders = range(len(world)) if fqn in world.values else ()
        yield from (ElementRead(rank, read, (), ()) for rank in holders)
    elif fqn in world.specs:
        number, chunk = _saved(entry, fqn, element)
        held = world.layouts[world.layout_of[fqn]]
        rows = np.flatnonzero(_holds(held.offsets, held.offsets + held.sizes, element))
        for row in rows.tolist():
            box = Chunk(held.offsets[row], held.sizes[row])
            source = MetadataIndex(fqn, chunk.offsets, number)
            read = _cut(source, chunk, MetadataIndex(fqn, box.offsets), box)
            yield _traced(int(held.rank[row]), read, element)


def _cut(source: MetadataIndex, chunk: Chunk, dest: MetadataIndex, box: Chunk) -> ReadItem:
    """Return the read of what a saved chunk and a wanted box share."""
    low = [max(a, b) for a, b in zip(chunk.offsets, box.offsets, strict=True)]
    high = [min(a, b) for a, b in zip(chunk.ends, box.ends, strict=True)]
    return ReadItem(
        LoadItemType.TENSOR,
        dest,
        [at - o for at, o in zip(low, box.offsets, strict=True)],
        source,
        [at - o for at, o in zip(low, chunk.offsets, strict=True)],
        [end - at for at, end in zip(low, high, strict=True)],
    )


def _sheet(found: Why) -> Sheet:
    who = f"written by {span(found.writers)}" if found.writers else "by whom is not known"
    ranks = [read.rank for read in found.reads]
    readers = f"read by {span(ranks)}" if ranks else "read by nobody"
    if found.chunk is None:
        title = f"Value `{found.fqn}`: {who}, {readers}"
    else:
        box = zip(found.chunk.offsets, found.chunk.ends, strict=True)
        place = f"{found.nbytes} bytes at byte {found.byte_offset:,} of chunk "
        place += f"[{', '.join(f'{o}:{e}' for o, e in box)}]"
        title = f"Element {list(found.element)} of `{found.fqn}`: {place}, {who}, {readers}"
    head = ("rank", "into", "shard at", "at", "read from", "lengths", "chunk offset", "by")
    tables = [Table(head, map(_row, found.reads[:_SHOWN]))] if found.reads else []
    more = len(found.reads) - _SHOWN
    return Sheet(title, tables, [f"… {more:,} more"] if more > 0 else [])


def _row(read: ElementRead) -> tuple[object, ...]:
    item = read.read
    into = item.dest_index
    boxes = (into.offset or (), read.dest_offsets, item.storage_offsets, item.lengths)
    by = "itself" if read.via is None else f"rank {read.via}"
    return str(read.rank), into.fqn, *(str(list(box)) for box in (*boxes, read.storage_offsets)), by
