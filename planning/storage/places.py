"""`chunk_places`: the file of every chunk of a checkpoint, by distinct columns.

Tensors that are cut alike and written by the same ranks share a column. Where the plans of all
ranks follow from a mesh, columns are made once per layout, and no rank's plan is.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from ..columns.arrays import Ints, column, distinct_columns, nth_equal, readonly
from ..columns.items import Catalog
from ..mesh.derive import DerivedPlans
from ..metadata import Entries
from ..plans import SavePlan
from .write import file_numbers

__all__ = ["Places", "chunk_places"]


@attrs.frozen(eq=False)
class Places:
    """The file of every chunk."""

    columns: tuple[Ints, ...]  # the distinct columns of file numbers, one number a chunk
    entry: Ints  # which of them each entry has; -1 for one without chunks in files


def chunk_places(
    entries: Entries,
    plans: Sequence[SavePlan],
    files: Ints,
    in_files: Sequence[bool],
    shared: Sequence[tuple[str, int, int]] = (),
) -> Places:
    """Return the file of every chunk.

    Args:
        entries: What the checkpoint holds.
        plans: The plans of all ranks, as `global_plan` or `derive_plans` returned them.
        files: One row a rank: the number of each of its files among those of all, -1 for none.
        in_files: Whether each entry is stored in files.
        shared: Chunks that no plan writes: name, number among the tensor's, and file.

    >>> from shardplan.planning import Mesh, TensorSpec, Shard, derive_plans, world_plans
    >>> specs = {n: TensorSpec((4, 2), "float32", [Shard(0)]) for n in "ab"}
    >>> plans, metadata = derive_plans(world_plans(specs, Mesh(dp=2)))
    >>> both = metadata.state_dict_metadata
    >>> chunk_places(both, plans, np.array([[0], [1]]), [True, True])
    Places(columns=(array([0, 1]),), entry=array([0, 0]))

    Raises:
        ValueError: No file has some chunk.
    """
    given: object = plans
    if isinstance(given, DerivedPlans):
        found = _derived(entries, given, files, in_files)
    else:
        found = _listed(entries, plans, files, in_files, shared)
    lost = {number for number, files_of in enumerate(found.columns) if (files_of < 0).any()}
    for name, number in zip(entries.names, found.entry.tolist(), strict=True):
        if number in lost:
            raise ValueError(f"some of `{name}` was not written; were plans and results mixed up?")
    return found


def _derived(
    entries: Entries, plans: DerivedPlans, files: Ints, in_files: Sequence[bool]
) -> Places:
    """Work out columns once for tensors that are placed alike."""
    row_of = {name: row for row, name in enumerate(plans.settled.catalog.names)}
    known: dict[int | bytes, int] = {}
    columns: list[Ints] = []
    entry = []
    for name, is_there in zip(entries.names, in_files, strict=True):
        if not is_there:
            entry.append(-1)
            continue
        row = row_of[name]
        layout = plans.layout_alone(row)
        ranks = plans.writers_of(row) if layout not in known else column([])
        keys = (layout, ranks.tobytes()) if layout not in known else (layout,)
        number = next((known[key] for key in keys if key in known), len(columns))
        known |= {key: number for key in keys if key is not None}
        if number == len(columns):
            columns.append(readonly(files[ranks, nth_equal(ranks)]))
        entry.append(number)
    return Places(tuple(columns), column(entry))


def _listed(
    entries: Entries,
    plans: Sequence[SavePlan],
    files: Ints,
    in_files: Sequence[bool],
    shared: Sequence[tuple[str, int, int]],
) -> Places:
    """Visit all chunks of all plans."""
    sizes = [len(layout.tiling) for layout in entries.layouts]
    counts = [
        (sizes[layout] if layout >= 0 else 1) if is_there else 0
        for layout, is_there in zip(entries.layout.tolist(), in_files, strict=True)
    ]
    start = np.concatenate([[0], np.cumsum(column(counts))])
    stored = column(counts) > 0
    file = np.full(int(start[-1]), -1, np.int64)
    for name, number, place in shared:
        file[start[entries.row_of[name]] + number] = place
    catalog, rows = None, column([])
    for rank, plan in enumerate(plans):
        items = plan.items
        if items.catalog is not catalog:  # ranks often share one
            catalog, rows = items.catalog, _entries_of(items.catalog, entries)
        if items.hint is None:
            if len(items):
                text = "these plans number no chunks; pass those that global_plan returned"
                raise ValueError(text)
            continue
        row = rows[items.row]
        kept = stored[row]
        at = start[row[kept]] + np.maximum(items.hint[kept], 0)
        file[at] = files[rank, file_numbers(plan)[kept]]
    columns, entry = distinct_columns(np.split(file, start[1:-1])[: len(counts)])
    return Places(columns, column(entry))


def _entries_of(catalog: Catalog, entries: Entries) -> Ints:
    """Return which entry of the checkpoint each row of a catalog is; -1 if no item is of it."""
    return column([entries.row_of.get(name, -1) for name in catalog.names])
