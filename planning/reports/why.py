"""Why a rank reads an element: who wrote it, where it lies, and which ranks read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column
from ..columns.reads import ReadItems
from ..errors import NotFoundError, span
from ..geometry.tilings import Chunk, as_ints, pad
from ..load import resolve_overlaps
from ..mesh.worlds import WorldPlans
from ..metadata import BytesMetadata, TensorMetadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType, MetadataIndex, ReadItem
from ..text import Printed, Sheet, listing
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
class Why(Printed):
    """All that is known about one element; printed as a table.

    Attributes:
        fqn: The name of its tensor (or value) in the checkpoint.
        element: Where it lies in the tensor, in the global frame.
        index: The saved chunk that holds it.
        chunk: That chunk's box; None for a non-tensor value.
        byte_offset: Where it starts, in bytes from the start of the chunk; None likewise.
        nbytes: How many bytes it takes; None likewise.
        writers: The ranks that write it; in a load that is the rank in whose file it lies. Empty if
            they are unknown.
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

    @property
    def _sheet(self) -> Sheet:
        who = f"written by {span(self.writers)}" if self.writers else "writer unknown"
        ranks = [read.rank for read in self.reads]
        readers = f"read by {span(ranks)}" if ranks else "read by nobody"
        title = f"Value `{self.fqn}`: {who}, {readers}"
        if self.chunk is not None:
            place = f"{self.nbytes} bytes at byte {self.byte_offset:,} of chunk [{self.chunk.text}]"
            title = f"Element {list(self.element)} of `{self.fqn}`: {place}, {who}, {readers}"
        head = ("rank", "into", "shard at", "at", "read from", "lengths", "chunk offset", "by")
        return listing(title, head, map(_row, self.reads[:_SHOWN]), len(self.reads))


def why(report: Report, fqn: str, element: Iterable[int] = ()) -> Why:
    """Return who wrote one element, where it lies in storage, and which ranks read it.

    Args:
        report: What `explain` returned, for plans of any kind.
        fqn: The tensor's name in the checkpoint.
        element: Where the element lies in the tensor; nothing for a non-tensor value.

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
    entry, at = report.metadata.entry(fqn), as_ints(element)
    index, chunk, place, itemsize = MetadataIndex(fqn), None, None, None
    if isinstance(entry, BytesMetadata):
        if at:
            raise IndexError(f"`{fqn}` is a non-tensor value: it has no element {list(at)}")
    else:
        number = _chunk_at(entry, fqn, at)
        chunk, itemsize = entry.chunks[number], entry.properties.itemsize
        index = MetadataIndex(fqn, chunk.offsets, number)
        inside = [i - offset for i, offset in zip(at, chunk.offsets, strict=True)]
        place = itemsize * (int(np.ravel_multi_index(inside, chunk.sizes)) if at else 0)
    writers, reads = _writers(report, index, at), tuple(_reads(report, fqn, at))
    return Why(fqn, at, index, chunk, place, itemsize, writers, reads)


def _chunk_at(entry: TensorMetadata, fqn: str, at: Element) -> int:
    """Return the number of the first saved chunk that holds an element."""
    if len(at) != len(entry.size) or not all(map(range.__contains__, map(range, entry.size), at)):
        raise IndexError(f"`{fqn}` has the shape {list(entry.size)}: it has no element {list(at)}")
    low = entry.chunks.offsets
    rows = np.flatnonzero(_holds(low, low + entry.chunks.sizes, at))
    if not len(rows):
        raise NotFoundError(f"no saved chunk of `{fqn}` holds element {list(at)}")
    return int(rows[0])


def _holds(low: Ints, high: Ints, element: Element) -> npt.NDArray[np.bool_]:
    """Return which boxes hold an element; columns past its axes are padding."""
    axes = len(element)
    at, low, high = column(element, axes), pad(low, axes, 0), pad(high, axes, 1)
    inside = (low[:, :axes] <= at) & (at < high[:, :axes])
    return np.asarray(inside.all(axis=1))


def _writers(report: Report, index: MetadataIndex, element: Element) -> tuple[int, ...]:
    """Return the ranks that write an element."""
    if report.kind != "save":
        return () if report.writers is None else (report.writers[index],)
    writers = []
    for rank, plan in enumerate(cast(Sequence[SavePlan], report.plans)):
        items = plan.items
        mine = np.array([name == index.fqn for name in items.catalog.names], bool)[items.row]
        if (mine & _holds(items.offsets, items.offsets + items.sizes, element)).any():
            writers.append(rank)
    return tuple(writers)


def _reads(report: Report, fqn: str, element: Element) -> Iterator[ElementRead]:
    """Yield how each rank comes by an element."""
    if isinstance(report.plans, WorldPlans):
        yield from _world_reads(report, report.plans, fqn, element)
    elif report.kind == "load":
        for rank, plan in enumerate(cast(Sequence[LoadPlan], report.plans)):
            passed = plan.transfers.take(plan.transfers.target == rank)
            for row in _matches(plan.items, fqn, element):
                yield _traced(rank, plan.items[row], element)
            for row in _matches(passed.reads, fqn, element):
                yield _traced(rank, passed.reads[row], element, int(passed.source[row]))


def _world_reads(
    report: Report, world: WorldPlans, fqn: str, element: Element
) -> Iterator[ElementRead]:
    """Yield the reads of all ranks that would hold an element, as their load plans would be."""
    if fqn in world.values:
        index, nothing = MetadataIndex(fqn), (0,)
        read = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        yield from (ElementRead(rank, read, (), ()) for rank in range(len(world)))
    elif fqn in world.specs:
        held = world.layouts[world.layout_of[fqn]]
        rows = np.flatnonzero(_holds(held.offsets, held.offsets + held.sizes, element))
        for row in rows[:1].tolist():  # all that hold it hold the same box
            box = Chunk(held.offsets[row], held.sizes[row])
            reads = resolve_overlaps(report.metadata, {fqn: [box]})
            read = reads[_matches(reads, fqn, element)[0]]
            yield from (_traced(rank, read, element) for rank in held.rank[rows].tolist())


def _matches(items: ReadItems, fqn: str, element: Element) -> list[int]:
    """Return the reads that bring an element or a non-tensor value."""
    if fqn not in items.names:
        return []
    mine = items.storage == items.names.index(fqn)
    low = items.storage_anchor + items.storage_offsets
    mine &= (items.type == _VALUE) | _holds(low, low + items.lengths, element)
    rows: list[int] = np.flatnonzero(mine).tolist()
    return rows


def _traced(rank: int, read: ReadItem, element: Element, via: int | None = None) -> ElementRead:
    """Follow an element through the read that brings it."""
    source = tuple(i - o for i, o in zip(element, read.storage_index.offset or (), strict=True))
    moves = zip(source, read.storage_offsets, read.dest_offsets, strict=bool(element))
    return ElementRead(rank, read, source, tuple(i - a + b for i, a, b in moves), via)


def _row(read: ElementRead) -> tuple[object, ...]:
    into, item = read.read.dest_index, read.read
    boxes = (into.offset or (), read.dest_offsets, item.storage_offsets, item.lengths)
    by = "itself" if read.via is None else f"rank {read.via}"
    return str(read.rank), into.fqn, *(str(list(box)) for box in (*boxes, read.storage_offsets)), by
