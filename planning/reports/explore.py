"""`explorer_data`: all that a page needs to show a reshard from every side, as plain data.

Geometry is not spelled out: tensors that are cut alike share one pair of tilings, and numbers that
follow a rule are written as the rule. So the data grow with distinct layouts and names, not with
ranks × tensors; the page works out overlaps for what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import attrs

from ..columns.arrays import Ints, column
from ..columns.runs import flat_runs
from ..geometry.tilings import Boxes, Grid, Tiling
from ..mesh.worlds import WorldPlans
from ..metadata import Metadata
from ..plans import LoadPlan
from ..records import LoadItemType
from .explain import Report, figures
from .origins import Writers
from .reshard import pairs_of

__all__ = ["explorer_data"]

_MOST_READS: Final = 1 << 18  # of plans that do not follow from a mesh
_MOST_WRITERS: Final = 1 << 19  # parts of all columns of writers

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
_Reads = tuple[tuple[_Box, tuple[int, ...]], ...]  # boxes, each with the ranks that read it


@attrs.frozen(eq=False)
class _Case:
    """Tensors that are cut alike, as saved and as wanted."""

    saved: Tiling
    wanted: Tiling
    holders: Ints  # one row a wanted box: the ranks that read it; -1 where there are fewer
    rows: Ints  # the tensors, as rows of the checkpoint's entries


def explorer_data(report: Report) -> dict[str, Any]:
    """Return a report, and the geometry behind it, as data for JSON.

    Args:
        report: What `explain` returned for a load: of a world of plans, or of plans one by one.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, explain, world_metadata, world_plans
    >>> specs = {"w": TensorSpec((8, 4), "float32", [Shard(0)])}
    >>> saved = world_metadata(world_plans(specs, Mesh(dp=4)))
    >>> data = explorer_data(explain(saved, world_plans(specs, Mesh(dp=2))))
    >>> data["cases"][0]["saved"], data["cases"][0]["wanted"], data["cases"][0]["holders"]
    ({'cuts': [[[0, 5, 2]], [0, 4]]}, {'cuts': [[0, 4, 8], [0, 4]]}, [0, 1])

    Raises:
        ValueError: It is of a save, or of too many reads.
    """
    if report.kind == "save":
        raise ValueError("there is nothing to explore in a save alone; explain a load of it")
    metadata, entries = report.metadata, report.metadata.state_dict_metadata
    if isinstance(report.plans, WorldPlans):
        pairs = pairs_of(metadata, report.plans)
        cases = [_Case(p.tiling, p.boxes, p.rank, p.rows) for p in pairs]
    else:
        cases = _cases_of_loads(metadata, cast(Sequence[LoadPlan], report.plans))
    sizes, costs = entries.itemsize, report.ranks
    writers = _writers(report.writers)
    return {
        "figures": [[label, value] for label, value in figures(report)],
        "warnings": list(report.warnings),
        "ranks": len(costs),
        "bytes": flat_runs(costs.nbytes),
        "requests": flat_runs(costs.requests),
        "seconds": [float(f"{s:.3g}") for s in (report.totals.seconds,)],
        "storage": report.model.storage_bandwidth,
        "latency": report.model.request_latency / report.model.parallel_requests,
        "writers": None if writers is None else [flat_runs(c) for c in writers.columns],
        "names": [entries.names[row] for case in cases for row in case.rows.tolist()],
        "dtypes": [
            entries.props[entries.prop[row]].dtype for case in cases for row in case.rows.tolist()
        ],
        "cases": [_case(case, metadata, sizes, writers) for case in cases],
    }


def _case(case: _Case, metadata: Metadata, sizes: Ints, writers: Writers | None) -> dict[str, Any]:
    layout = metadata.state_dict_metadata.layouts[metadata.state_dict_metadata.layout[case.rows[0]]]
    return {
        "size": list(layout.size),
        "saved": _tiling(case.saved),
        "wanted": _tiling(case.wanted),
        "holders": flat_runs(case.holders.ravel()),
        "each": case.holders.shape[1],
        "itemsizes": flat_runs(sizes[case.rows]),
        "writers": None if writers is None else flat_runs(writers.column[case.rows]),
    }


def _tiling(tiling: Tiling) -> dict[str, Any]:
    if isinstance(tiling, Grid):
        return {"cuts": [flat_runs(cuts) for cuts in tiling.cuts]}
    return {
        "offsets": [flat_runs(axis) for axis in tiling.offsets.T],
        "sizes": [flat_runs(axis) for axis in tiling.sizes.T],
        "count": len(tiling),
    }


def _writers(writers: Writers | None) -> Writers | None:
    """Return the writers, unless there is too much to say of them."""
    if writers is None or sum(len(flat_runs(c)) for c in writers.columns) > _MOST_WRITERS:
        return None
    return writers


def _cases_of_loads(metadata: Metadata, plans: Iterable[LoadPlan]) -> list[_Case]:
    """Return cases whose wanted boxes are the reads of all ranks."""
    entries = metadata.state_dict_metadata
    found: dict[str, dict[_Box, list[int]]] = {}
    count = 0
    for rank, plan in enumerate(plans):
        count += len(plan.items)
        if count > _MOST_READS:
            raise ValueError(f"more than {_MOST_READS:,} reads are too many; plan for fewer ranks")
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                continue
            starts = item.storage_index.offset or (0,) * len(item.storage_offsets)
            at = zip(starts, item.storage_offsets, strict=True)
            box = tuple(start + inside for start, inside in at), tuple(item.lengths)
            found.setdefault(item.storage_index.fqn, {}).setdefault(box, []).append(rank)
    alike: dict[tuple[int, _Reads], list[int]] = {}
    for name, boxes in found.items():
        row = entries.row_of[name]
        reads = tuple((box, tuple(ranks)) for box, ranks in boxes.items())
        alike.setdefault((int(entries.layout[row]), reads), []).append(row)
    return [
        _case_of_reads(entries.layouts[layout].tiling, reads, rows)
        for (layout, reads), rows in alike.items()
    ]


def _case_of_reads(saved: Tiling, reads: _Reads, rows: list[int]) -> _Case:
    axes, each = len(reads[0][0][0]), max(len(ranks) for _, ranks in reads)
    offsets, sizes = (column([box[side] for box, _ in reads], len(reads), axes) for side in (0, 1))
    holders = [[*ranks, *[-1] * (each - len(ranks))] for _, ranks in reads]
    return _Case(saved, Boxes(offsets, sizes), column(holders, len(reads), each), column(rows))
