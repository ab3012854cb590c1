"""The rank that wrote each chunk of a checkpoint, and so the file that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, readonly
from ..columns.world import World
from ..errors import Issue, NotFoundError, PlanError
from ..mesh.worlds import WorldPlans
from ..metadata import Entries, Metadata
from ..plans import SavePlan
from ..records import MetadataIndex
from ..storage.blocks import ChunkTable, look_up
from ..text import counted

__all__ = ["Writers", "writers_by_plans", "writers_of"]

_NOBODY: Final = np.iinfo(np.int64).max
_LISTED: Final = 8  # names that an error lists


@attrs.frozen(eq=False, repr=False, slots=False)
class Writers(Mapping[MetadataIndex, int]):
    """Which rank wrote each chunk: an immutable mapping; equal columns are held once.

    Attributes:
        entries: The checkpoint's tensors and values.
        columns: Per chunk the rank; a non-tensor value has one chunk.
        column: Which of the columns each entry has.
    """

    entries: Entries
    columns: tuple[Ints, ...]
    column: Ints

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
        row = self.entries.row_of.get(index.fqn)
        if row is None:
            raise KeyError(index)
        writers, layout = self.columns[self.column[row]], self.entries.layout[row]
        if layout < 0:
            return int(writers[0])
        tiling = self.entries.layouts[layout].tiling
        if index.offset is None or len(index.offset) != tiling.ndim:
            raise KeyError(index)
        real = np.all(tiling.sizes > 0, axis=1)
        chunk = look_up(tiling.offsets, real, column(index.offset, 1, tiling.ndim))[0]
        if chunk < 0:
            raise KeyError(index)
        return int(writers[chunk])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, layout in zip(self.entries.names, self.entries.layout.tolist(), strict=True):
            if layout < 0:
                yield MetadataIndex(name)
                continue
            for number, offset in enumerate(self.entries.layouts[layout].tiling.offsets.tolist()):
                yield MetadataIndex(name, offset, number)

    def __len__(self) -> int:
        return sum(len(self.columns[number]) for number in self.column.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Writers):
            return dict(self) == other if isinstance(other, Mapping) else NotImplemented
        if self.entries != other.entries:
            return False
        rows = [other.entries.row_of[name] for name in self.entries.names]
        pairs = set(zip(self.column.tolist(), other.column[rows].tolist(), strict=True))
        return all(np.array_equal(self.columns[a], other.columns[b]) for a, b in pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"<Writers of {counted(len(self), 'chunk')}: {counted(len(self.ranks), 'rank')}>"


def writers_of(plans: Iterable[SavePlan], metadata: Metadata) -> Writers:
    """Return the rank that wrote each chunk of a checkpoint.

    Args:
        plans: What each rank writes, in rank order: the plans that `global_plan` returned. If
            several ranks hold a chunk (plans from before replicas were removed, or `WorldPlans`),
            the lowest of them counts as its writer.
        metadata: The metadata that it returned.

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
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(row.tobytes(), len(numbers)) for row in ranks]
    distinct = dict(zip(which, ranks, strict=True))
    return Writers(entries, tuple(map(readonly, distinct.values())), column(which))


def _ranks_of_plans(
    plans: Sequence[SavePlan], metadata: Metadata, table: ChunkTable
) -> Sequence[Ints]:
    """Return, per entry, the lowest rank that writes each chunk."""
    entries = metadata.state_dict_metadata
    count = table.count[entries.layout]
    start = np.cumsum(count) - count
    flat = np.full(int(count.sum()), _NOBODY, np.int64)
    catalogs = {id(plan.items.catalog): plan.items.catalog for plan in plans}  # ranks share some
    entry_of = {
        key: column([entries.row_of.get(name, -1) for name in catalog.names])
        for key, catalog in catalogs.items()
    }
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
    """Return, per entry, the lowest rank that holds each chunk; equal layouts are done once."""
    values = dict.fromkeys(world.values, column([0]))  # every rank holds every value
    pairs = [
        (saved, world.layout_of.get(name, -1))
        for name, saved in zip(entries.names, entries.layout.tolist(), strict=True)
    ]
    lowest = {}
    for saved, held in dict.fromkeys(pairs):
        lowest[saved, held] = np.full(int(table.count[saved]), _NOBODY, np.int64)
        if held >= 0:
            layout = world.layouts[held]
            chunk = table.find(np.full(len(layout.rank), saved), layout.offsets)
            np.minimum.at(lowest[saved, held], chunk[chunk >= 0], layout.rank[chunk >= 0])
    return [
        values[name] if pair[0] < 0 and name in values else lowest[pair]
        for name, pair in zip(entries.names, pairs, strict=True)
    ]
