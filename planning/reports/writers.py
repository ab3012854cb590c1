"""Who wrote it? For every chunk of a checkpoint, the rank in whose file it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from ..catalog import column
from ..errors import Issue, NotFoundError, PlanError
from ..items import MetadataIndex
from ..located import ChunkTable, look_up
from ..metadata import Entries, Metadata
from ..packing import Ints, readonly
from ..records import SavePlan
from ..text import counted
from ..topology import WorldPlans

__all__ = ["Writers", "writers_of"]

_NOBODY: Final = np.iinfo(np.int64).max
_TOLD: Final = 8  # names that an error lists


@attrs.frozen(eq=False, repr=False, slots=False)
class Writers(Mapping[MetadataIndex, int]):
    """Which rank wrote each chunk: an immutable mapping, equal columns held once.

    Attributes:
        entries: The checkpoint's tensors and values.
        columns: Per chunk the rank; a value that is no tensor has one chunk.
        column: Which of the columns each entry has.
    """

    entries: Entries
    columns: tuple[Ints, ...]
    column: Ints

    @cached_property
    def ranks(self) -> Ints:
        """Every rank that wrote something, ascending."""
        return np.unique(np.concatenate([column([]), *self.columns]))

    def __getitem__(self, index: MetadataIndex) -> int:
        row = self.entries.row_of.get(index.fqn)
        if row is None:
            raise KeyError(index)
        writers = self.columns[self.column[row]]
        if self.entries.layout[row] < 0:
            return int(writers[0])
        tiling = self.entries.layouts[self.entries.layout[row]].tiling
        if index.offset is None or len(index.offset) != tiling.ndim:
            raise KeyError(index)
        real = np.all(tiling.sizes > 0, axis=1)
        chunk = look_up(tiling.offsets, real, column(index.offset, 1, tiling.ndim))[0]
        if chunk < 0:
            raise KeyError(index)
        return int(writers[chunk])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for row, name in enumerate(self.entries.names):
            if self.entries.layout[row] < 0:
                yield MetadataIndex(name)
                continue
            tiling = self.entries.layouts[self.entries.layout[row]].tiling
            for number, offset in enumerate(tiling.offsets.tolist()):
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
    """Say which rank wrote each chunk of a checkpoint.

    Args:
        plans: What each rank writes, in rank order: the plans that `global_plan` returned. Where
            several ranks hold a chunk (plans from before replicas were removed, or the plans of a
            world without hardware) the lowest of them counts as its writer.
        metadata: The metadata that it returned.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, local_plan
    >>> sd, mesh = {"w": TensorSpec((6,), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> writers = writers_of(*global_plan(local_plan(sd, mesh=mesh, rank=r) for r in range(2)))
    >>> writers[MetadataIndex("w", (3,))]
    1

    Raises:
        NotFoundError: A plan writes what the metadata does not list.
        PlanError: The metadata lists chunks that no plan writes.
    """
    entries = metadata.state_dict_metadata
    table = ChunkTable.of(entries.layouts)
    rows = (
        _world_writers(plans, metadata, table)
        if isinstance(plans, WorldPlans)
        else _plan_writers(plans, metadata, table)
    )
    lost = [name for name, row in zip(entries.names, rows, strict=True) if (row == _NOBODY).any()]
    if lost:
        text = "no plan writes some chunks of `{}`; are the plans of all ranks here?"
        raise PlanError(Issue("gap", name, text.format(name)) for name in lost[:_TOLD])
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(row.tobytes(), len(numbers)) for row in rows]
    distinct = {number: readonly(row) for number, row in zip(which, rows, strict=True)}
    return Writers(entries, tuple(distinct[n] for n in range(len(numbers))), column(which))


def _plan_writers(
    plans: Iterable[SavePlan], metadata: Metadata, table: ChunkTable
) -> Sequence[Ints]:
    """Return, per entry, who writes each chunk."""
    entries = metadata.state_dict_metadata
    count = table.count[entries.layout]
    start = np.cumsum(count) - count
    flat = np.full(int(count.sum()), _NOBODY, np.int64)
    numbering: dict[int, tuple[Any, Ints]] = {}  # by identity: ranks may share a catalog
    for rank, plan in enumerate(plans):
        items = plan.items
        known = numbering.get(id(items.catalog))
        if known is None:
            names = items.catalog.names
            known = items.catalog, column([entries.row_of.get(name, -1) for name in names])
            numbering[id(items.catalog)] = known
        entry = known[1][items.row]
        for row in np.flatnonzero(entry < 0)[:1].tolist():
            metadata.entry(items.catalog.names[items.row[row]])  # raises, with the nearest names
        chunk = table.find(entries.layout[entry], items.offsets, items.hint)
        for row in np.flatnonzero(chunk < 0)[:1].tolist():
            index = items[row].index
            raise NotFoundError(f"`{index.fqn}` has no saved chunk at {index.offset}")
        np.minimum.at(flat, start[entry] + chunk, rank)
    return [flat[low : low + n] for low, n in zip(start.tolist(), count.tolist(), strict=True)]


def _world_writers(world: WorldPlans, metadata: Metadata, table: ChunkTable) -> Sequence[Ints]:
    """Return, per entry, the lowest rank that holds each chunk; equal layouts go once."""
    entries = metadata.state_dict_metadata
    done: dict[tuple[int, int], Ints] = {}
    values, first = set(world.values), column([0])  # every rank holds every value
    rows = []
    for name, saved in zip(entries.names, entries.layout.tolist(), strict=True):
        held = world.layout_of.get(name, -1)
        if saved < 0 and name in values:
            rows.append(first)
            continue
        if (saved, held) not in done:
            flat = np.full(int(table.count[saved]), _NOBODY, np.int64)
            if held >= 0:
                layout = world.layouts[held]
                chunk = table.find(np.full(len(layout.rank), saved), layout.offsets)
                np.minimum.at(flat, chunk[chunk >= 0], layout.rank[chunk >= 0])
            done[saved, held] = flat
        rows.append(done[saved, held])
    return rows
