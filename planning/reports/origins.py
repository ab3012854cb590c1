"""Where bytes come from and go to: the rank that wrote a chunk, and why a rank reads an element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, distinct_columns, pad
from ..columns.reads import ReadItems
from ..columns.world import World
from ..errors import Issue, NotFoundError, PlanError, span
from ..geometry.tilings import Chunk, as_ints
from ..load import resolve_overlaps
from ..mesh.derive import DerivedPlans
from ..mesh.worlds import WorldPlans
from ..metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType, MetadataIndex, ReadItem
from ..storage.blocks import ChunkTable, look_up
from ..text import Printed, Sheet, counted, listing

if TYPE_CHECKING:
    from .explain import Report

Element = tuple[int, ...]

_NOBODY: Final = np.iinfo(np.int64).max
_LISTED: Final = 8  # names that an error lists
_SHOWN: Final = 12
_VALUE: Final = LoadItemType.BYTE_IO.value


@attrs.frozen(eq=False, repr=False, slots=False)
class Writers(Mapping[MetadataIndex, int]):
    """Which rank wrote each chunk: an immutable mapping; equal columns are held once."""

    entries: Entries  # the checkpoint's tensors and values
    columns: tuple[Ints, ...]  # per chunk the rank; a non-tensor value has one chunk
    column: Ints  # which of the columns each entry has

    @cached_property
    def ranks(self) -> Ints:
        """Every rank that wrote something, ascending."""
        return np.unique(np.concatenate([column([]), *self.columns]))

    @property
    def world_size(self) -> int:
        """One more than the last rank that wrote something."""
        return int(self.ranks.max(initial=-1)) + 1

    def rank_of(self, entry: Ints, chunk: Ints) -> Ints:
        """Return who wrote some chunks, given by the rows of their entries and their numbers."""
        lengths = column([len(c) for c in self.columns])
        start = np.cumsum(lengths) - lengths
        rank: Ints = np.concatenate([column([]), *self.columns])[start[self.column[entry]] + chunk]
        return rank

    def __getitem__(self, index: MetadataIndex) -> int:
        row, chunk = self.entries.row_of.get(index.fqn), -1
        if row is None:
            raise KeyError(index)
        writers, layout = self.columns[self.column[row]], self.entries.layout[row]
        if layout < 0:
            return int(writers[0])
        tiling = self.entries.layouts[layout].tiling
        if index.offset is not None and len(index.offset) == tiling.ndim:
            real = np.all(tiling.sizes > 0, axis=1)
            chunk = look_up(tiling.offsets, real, column(index.offset, 1, tiling.ndim))[0]
        if chunk < 0:
            raise KeyError(index)
        return int(writers[chunk])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, entry in self.entries.items():
            if isinstance(entry, BytesMetadata):
                yield MetadataIndex(name)
            else:
                for number, offset in enumerate(entry.chunks.offsets.tolist()):
                    yield MetadataIndex(name, offset, number)

    def __len__(self) -> int:
        return sum(len(self.columns[number]) for number in self.column.tolist())

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"<Writers of {counted(len(self), 'chunk')}: {counted(len(self.ranks), 'rank')}>"


def writers_of(plans: Iterable[SavePlan], metadata: Metadata) -> Writers:
    """Return the rank that wrote each chunk of a checkpoint, given what `global_plan` returned.

    ``plans`` are those of all ranks, in order. If several ranks hold a chunk (plans from before
    replicas were removed, or `WorldPlans`), the lowest of them counts as its writer. `WorldPlans`
    may go with the metadata of `world_metadata`, in which large replicas are cut.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, local_plan
    >>> sd, mesh = {"w": TensorSpec((6,), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> writers = writers_of(*global_plan(local_plan(sd, mesh=mesh, rank=r) for r in range(2)))
    >>> writers[MetadataIndex("w", (3,))]
    1

    Raises:
        NotFoundError: A plan writes a chunk that the metadata does not list.
        PlanError: The metadata lists chunks that no plan writes.
    """
    entries = metadata.state_dict_metadata
    table = ChunkTable.of(entries.layouts)
    if isinstance(plans, WorldPlans):
        ranks = _ranks_of_world(plans, entries, table)
    else:
        ranks = _ranks_of_plans(tuple(plans), metadata, table)
    lost = [name for name, row in zip(entries.names, ranks, strict=True) if (row == _NOBODY).any()]
    if lost:
        text = "no plan writes some chunks of `{}`; are the plans of all ranks here?"
        raise PlanError(Issue("gap", name, text.format(name)) for name in lost[:_LISTED])
    return _writers(entries, ranks)


def writers_by_plans(plans: Iterable[SavePlan]) -> Writers:
    """Return the rank that wrote each chunk, for plans without metadata."""
    rows = World.of(plans).rows
    if rows.issues:
        raise PlanError(rows.issues)
    rows = rows.take(~rows.repeats)  # of ranks that hold the same chunk, the lowest comes first
    layouts, layout = rows.layouts
    entries = Entries(rows.names, rows.props, rows.prop, layouts, layout)
    return _writers(entries, np.split(rows.rank, rows.start[1:-1]) if rows.names else [])


def _writers(entries: Entries, ranks: Sequence[Ints]) -> Writers:
    """Hold equal columns of ranks once."""
    columns, which = distinct_columns(ranks)
    return Writers(entries, columns, column(which))


def _ranks_of_plans(
    plans: Sequence[SavePlan], metadata: Metadata, table: ChunkTable
) -> Sequence[Ints]:
    """Return, per entry, the lowest rank that writes each chunk."""
    entries = metadata.state_dict_metadata
    count = table.count[entries.layout]
    start = np.cumsum(count) - count
    flat = np.full(int(count.sum()), _NOBODY, np.int64)
    catalogs = {id(plan.items.catalog): plan.items.catalog for plan in plans}  # ranks share some
    row_of = entries.row_of
    entry_of = {k: column([row_of.get(n, -1) for n in c.names]) for k, c in catalogs.items()}
    for rank, plan in enumerate(plans):
        items = plan.items
        entry = entry_of[id(items.catalog)][items.row]
        for row in np.flatnonzero(entry < 0)[:1].tolist():
            metadata.entry(items.catalog.names[items.row[row]])  # raises, with the nearest names
        chunk = table.find(entries.layout[entry], items.offsets, items.hint)
        for row in np.flatnonzero(chunk < 0)[:1].tolist():
            index = items[row].index
            raise NotFoundError(f"`{index.fqn}` has no saved chunk at {index.offset}")
        np.minimum.at(flat, start[entry] + chunk, rank)
    return [flat[low : low + n] for low, n in zip(start.tolist(), count.tolist(), strict=True)]


def _ranks_of_world(world: WorldPlans, entries: Entries, table: ChunkTable) -> Sequence[Ints]:
    """Return, per entry, the lowest rank that holds each chunk; equal layouts are done once.

    Of a replica that is cut between its holders, each part counts for the one that writes it.
    """
    held, written = world.holdings, DerivedPlans(world).settled
    row_of = {name: row for row, name in enumerate(held.catalog.names)}
    rows = [row_of.get(name, -1) for name in entries.names]
    pairs = [
        (saved, int(written.number[row]), int(held.number[row])) if row >= 0 else (saved, -1, -1)
        for row, saved in zip(rows, entries.layout.tolist(), strict=True)
    ]
    lowest = {}
    for saved, *numbers in dict.fromkeys(pairs):
        ranks = np.full(int(table.count[saved]), _NOBODY, np.int64)
        for number in dict.fromkeys(numbers):
            if number >= 0 and (ranks == _NOBODY).any():
                layout = written.layouts[number]
                chunk = table.find(np.full(len(layout.rank), saved), layout.offsets)
                np.minimum.at(ranks, chunk[chunk >= 0], layout.rank[chunk >= 0])
        lowest[saved, *numbers] = ranks
    return [lowest[pair] for pair in pairs]


@attrs.frozen
class ElementRead:
    """How one rank comes by an element."""

    rank: int  # the rank that gets it
    read: ReadItem  # the read that brings it
    storage_offsets: Element  # where it lies, relative to the saved chunk
    dest_offsets: Element  # where it goes, relative to the shard of the state dict
    via: int | None = None  # the rank that reads and sends it; None if this one reads it itself


@attrs.frozen(repr=False)
class Why(Printed):
    """All that is known about one element, or a non-tensor value; printed as a table."""

    fqn: str  # the name of its tensor in the checkpoint
    element: Element  # where it lies in the tensor, in the global frame
    index: MetadataIndex  # the saved chunk that holds it, and its box; None for a value
    chunk: Chunk | None
    byte_offset: int | None  # from the start of the chunk
    nbytes: int | None
    writers: tuple[int, ...]  # the ranks that write it, or in whose file it lies; empty if unknown
    reads: tuple[ElementRead, ...]  # how each rank that wants it comes by it

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

    ``element`` is its place in the tensor; leave it out for a non-tensor value.

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
    writers, reads = _element_writers(report, index, at), tuple(_reads(report, fqn, at))
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


def _element_writers(report: Report, index: MetadataIndex, element: Element) -> tuple[int, ...]:
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
        if len(rows):  # all ranks that hold it hold the same box
            box = Chunk(held.offsets[rows[0]], held.sizes[rows[0]])
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
    inside = tuple(i - a for i, a in zip(source, read.storage_offsets, strict=bool(element)))
    moves = zip(_in_state_dict(read, inside), read.dest_offsets, strict=bool(element))
    return ElementRead(rank, read, source, tuple(i + b for i, b in moves), via)


def _in_state_dict(read: ReadItem, inside: Element) -> Element:
    """Return where an element of what is read lies in the box that is filled."""
    if read.dest_lengths is None:
        return inside
    number = int(np.ravel_multi_index(inside, read.lengths))
    if read.axes is not None:
        turned = np.unravel_index(number, read.axes.ordered)
        digits = tuple(turned[place] for place in np.argsort(read.axes.order))
        number = int(np.ravel_multi_index(digits, read.axes.split))
    return as_ints(int(at) for at in np.unravel_index(number, read.dest_lengths))


def _row(read: ElementRead) -> tuple[object, ...]:
    into, item = read.read.dest_index, read.read
    boxes = (into.offset or (), read.dest_offsets, item.storage_offsets, item.lengths)
    by = "itself" if read.via is None else f"rank {read.via}"
    return str(read.rank), into.fqn, *(str(list(box)) for box in (*boxes, read.storage_offsets)), by
