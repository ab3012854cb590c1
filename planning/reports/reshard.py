"""What a world reads from a checkpoint, counted layout by layout, without making any rank's plan.

A large model has thousands of tensors and few layouts. Each pair of a saved and a wanted layout is
counted once, for all tensors that share it:

1. The distinct boxes that ranks hold form a grid, and equally many ranks hold each of them,
   because no mesh axis cuts two axes of a tensor.
2. Boxes that look alike from the chunks they meet cost the same, so one of them is counted. If
   16,384 ranks saved rows and 12,288 ranks want columns, all columns look alike.
3. What a box costs counts for every rank that holds it; what a chunk costs counts for its file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, group_rows, numbered, readonly
from ..errors import NotFoundError, PlanError
from ..geometry.overlap import overlap_many
from ..geometry.tilings import Grid, Tiling, tile
from ..load import load_plan
from ..matching import match_entries
from ..mesh.layouts import SpecLayout
from ..mesh.worlds import WorldPlans
from ..metadata import Metadata
from ..plans import LoadPlan, SavePlan
from .origins import Writers, writers_by_plans
from .traffic import FileCosts, RankCosts, Traffic, add_up, count_runs, load_pieces

_BLOCK: Final = 1 << 20  # pieces that are looked at together: bounds memory to a few hundred MiB


@attrs.frozen(eq=False, slots=False)
class _Pair:
    """A saved layout, a wanted layout, and the tensors that go from one to the other."""

    tiling: Tiling  # the saved chunks
    boxes: Tiling  # the distinct boxes that ranks want, none of them empty
    rank: Ints  # one row a box: the ranks that hold it
    rows: Ints  # the tensors, as rows of the checkpoint's entries
    itemsize: Ints  # bytes of one element of each tensor
    is_cast: Ints  # which of the tensors are wanted in another dtype

    @cached_property
    def costs(self) -> Ints:
        """Per box, for one tensor and one holder; see `_box_costs`."""
        return _box_costs(self.tiling, self.boxes)

    def files(self, writers: Writers) -> Iterator[tuple[Ints, Ints]]:
        """Yield the file of each chunk, and the item sizes of the tensors that are written so."""
        which = writers.column[self.rows]
        for number in np.unique(which).tolist():
            file = np.searchsorted(writers.ranks, writers.columns[number])
            yield file, self.itemsize[which == number]


def reshard_traffic(
    metadata: Metadata, world: WorldPlans, writers: Writers | None = None
) -> Traffic:
    """Count what all ranks of a world read to fill what they hold."""
    pairs = pairs_of(metadata, world)
    for pair in pairs:
        short = np.flatnonzero(pair.costs[0] != pair.boxes.sizes.prod(axis=1))
        for rank in pair.rank[short[:1], 0].tolist():
            load_plan(metadata, world[rank], dtype="cast")  # raises: says what is uncovered
    values = [metadata.state_dict_metadata.row_of[name] for name in world.values]
    whole = sum(int(p.costs[2].sum()) * p.rank.shape[1] * int(p.itemsize.sum()) for p in pairs)
    unique = sum(p.boxes.volume() * int(p.itemsize.sum()) for p in pairs)
    ranks, files = _ranks(pairs, len(world), len(values)), None
    if writers is not None:
        seen = _seen(pairs, writers, len(world))
        held = np.searchsorted(writers.ranks, writers.rank_of(column(values), column(values) * 0))
        seen[:, held] = True
        files = _files(pairs, writers, add_up(held, held * 0 + len(world), len(writers.ranks)))
        files = attrs.evolve(files, readers=seen.sum(axis=0))
        ranks = attrs.evolve(ranks, peers=seen.sum(axis=1))
    return Traffic(ranks, files, unique, whole)


def pairs_of(metadata: Metadata, world: WorldPlans) -> list[_Pair]:
    """Gather the tensors by saved and by wanted layout; tensors without elements are left out."""
    entries, catalog = metadata.state_dict_metadata, world.catalog
    match = match_entries(entries, catalog, np.arange(len(catalog)), "cast", "same")
    if match.issues:
        raise PlanError(match.issues)
    row_of = dict(zip(catalog.names, match.entry.tolist(), strict=True))
    names: dict[tuple[int, int], list[str]] = {}
    for name, wanted in world.layout_of.items():
        names.setdefault((int(entries.layout[row_of[name]]), wanted), []).append(name)
    held = {wanted: _held(world.layouts[wanted]) for _, wanted in names}
    pairs, itemsize = [], entries.itemsize
    for (saved, wanted), some in names.items():
        rows = column([row_of[name] for name in some])
        dtypes = [entries.props[prop].dtype for prop in entries.prop[rows].tolist()]
        is_cast = column([world.specs[n].dtype != d for n, d in zip(some, dtypes, strict=True)])
        tiling = entries.layouts[saved].tiling
        pairs.append(_Pair(tiling, *held[wanted], rows, itemsize[rows], is_cast))
    return [pair for pair in pairs if len(pair.rank)]


def _held(layout: SpecLayout) -> tuple[Tiling, Ints]:
    """Return the distinct boxes of a layout, and, one row a box, the ranks that hold it."""
    real = layout.sizes.all(axis=1)
    offsets, sizes = layout.offsets[real], layout.sizes[real]
    first, box = group_rows([np.zeros(len(offsets), np.int64), offsets, sizes])
    rank = layout.rank[real][np.argsort(box, kind="stable")]
    return tile(offsets[first], sizes[first]), rank.reshape(len(first), -1 if len(first) else 1)


def _ranks(pairs: Iterable[_Pair], ranks: int, values: int) -> RankCosts:
    """Add up what each rank reads; each value is one request."""
    nbytes, requests, elements, peak = np.zeros((4, ranks), np.int64)
    requests += values
    for pair in pairs:
        count, runs, _, largest, scattered = np.repeat(pair.costs, pair.rank.shape[1], axis=1)
        rank, tensors = pair.rank.ravel(), len(pair.rows)
        np.add.at(nbytes, rank, count * pair.itemsize.sum())
        np.add.at(requests, rank, runs * tensors)
        np.add.at(elements, rank, count * tensors)
        cast = (pair.itemsize * pair.is_cast).max()
        np.maximum.at(peak, rank, np.maximum(scattered * pair.itemsize.max(), largest * cast))
    return RankCosts.of(nbytes, requests, elements, peak)


def _files(pairs: Iterable[_Pair], writers: Writers, requests: Ints) -> FileCosts:
    """Add up what is read from each file, to the requests that it gets already."""
    nbytes, requests = np.zeros(len(requests), np.int64), requests.copy()
    for pair in pairs:
        elements, runs = _chunk_costs(pair.tiling, pair.boxes) * pair.rank.shape[1]
        for file, itemsize in pair.files(writers):
            np.add.at(nbytes, file, elements * itemsize.sum())
            np.add.at(requests, file, runs * len(itemsize))
    return FileCosts(writers.ranks, nbytes, requests, nbytes * 0)


def _seen(pairs: Iterable[_Pair], writers: Writers, ranks: int) -> Ints:
    """Return which files each rank reads; boxes that meet the same chunks are marked together."""
    seen = np.zeros((ranks, len(writers.ranks)), bool)
    for pair in pairs:
        first, alike = _alike(pair.tiling, pair.boxes, _spans)
        holders = pair.rank[np.argsort(alike, kind="stable")].ravel()
        count = np.bincount(alike) * pair.rank.shape[1]
        start = np.cumsum(count) - count
        for met in _pieces(pair.tiling, pair.boxes, first):
            group, chunk = met.box, met.chunk
            alone = count[group] == 1
            for file, _ in pair.files(writers):
                seen[holders[start[group[alone]]], file[chunk[alone]]] = True
                for number in np.unique(group[~alone]).tolist():
                    low, high = np.searchsorted(group, [number, number + 1])
                    row = np.zeros(len(writers.ranks), bool)
                    row[file[chunk[low:high]]] = True
                    for rank in holders[start[number] : start[number] + count[number]].tolist():
                        seen[rank] |= row
    return seen


def _box_costs(tiling: Tiling, boxes: Tiling) -> Ints:
    """Count the pieces of chunks that fill each box, one column a box.

    The rows: elements; runs in the chunks; elements of all chunks that are met; elements of the
    largest piece, and of the largest one that is not contiguous in the box.

    >>> rows = tile([[0, 0], [2, 0]], [[2, 6], [1, 6]])
    >>> columns = tile([[0, 0], [0, 4]], [[3, 4], [3, 2]])
    >>> _box_costs(rows, columns).tolist()
    [[12, 6], [3, 3], [18, 18], [8, 4], [0, 0]]
    """
    first, alike = _alike(tiling, boxes, _looks)
    costs = np.zeros((5, len(first)), np.int64)
    for met in _pieces(tiling, boxes, first):
        extents, elements = tiling.sizes[met.chunk], met.lengths.prod(axis=1)
        scattered = count_runs(met.lengths, boxes.sizes[first[met.box]]) > 1
        np.add.at(costs[0], met.box, elements)
        np.add.at(costs[1], met.box, count_runs(met.lengths, extents))
        np.add.at(costs[2], met.box, extents.prod(axis=1))
        np.maximum.at(costs[3], met.box, elements)
        np.maximum.at(costs[4], met.box, elements * scattered)
    return costs[:, alike]


def _chunk_costs(tiling: Tiling, boxes: Tiling) -> Ints:
    """Count the pieces of each chunk: one column a chunk, elements and runs."""
    first, alike = _alike(boxes, tiling, _looks)
    costs = np.zeros((2, len(first)), np.int64)
    for met in _pieces(boxes, tiling, first):  # with the roles of boxes and chunks swapped
        extents = tiling.sizes[first[met.box]]
        np.add.at(costs[0], met.box, met.lengths.prod(axis=1))
        np.add.at(costs[1], met.box, count_runs(met.lengths, extents))
    return costs[:, alike]


@attrs.frozen(eq=False)
class _Pieces:
    """Where boxes meet chunks; one row a piece."""

    box: Ints  # the position of the box among those looked at
    chunk: Ints
    lengths: Ints


def _pieces(tiling: Tiling, boxes: Tiling, rows: Ints) -> Iterator[_Pieces]:
    """Yield the pieces of some boxes, in blocks."""
    step = max(1, int(_BLOCK / _met_by_a_box(tiling, boxes)))
    for low in range(0, len(rows), step):
        here = rows[low : low + step]
        which = np.zeros(len(here), np.int64)
        met = overlap_many((tiling,), which, boxes.offsets[here], boxes.sizes[here])
        yield _Pieces(low + met.box, met.chunk, met.sizes)


def _met_by_a_box(tiling: Tiling, boxes: Tiling) -> float:
    """Estimate how many chunks a box meets; never too low for chunks that do not form a grid."""
    if not isinstance(tiling, Grid) or not isinstance(boxes, Grid):
        return max(1, len(tiling))
    stretches = (len(a) + len(b) for a, b in zip(tiling.cuts, boxes.cuts, strict=True))
    return math.prod(stretches) / len(boxes)


def _alike(
    tiling: Tiling, boxes: Tiling, number: Callable[[Ints, Ints], Ints]
) -> tuple[Ints, Ints]:
    """Group boxes by what they meet: the first box of each group, and the group of each box.

    Grids are compared axis by axis, where ``number`` numbers the intervals of the boxes. Every box
    is a group of its own if there are few pieces, no grids, or boxes that chunks do not cover.
    """
    every = np.arange(len(boxes))
    is_few = len(boxes) * _met_by_a_box(tiling, boxes) <= _BLOCK
    if is_few or not isinstance(tiling, Grid) or not isinstance(boxes, Grid):
        return every, every
    code = np.zeros(1, np.int64)
    for cuts, edges in zip(tiling.cuts, boxes.cuts, strict=True):
        if edges[0] < cuts[0] or cuts[-1] < edges[-1]:
            return every, every
        numbers = number(cuts, edges)
        code = (code[:, None] * (numbers.max() + 1) + numbers).ravel()
    _, first, alike = numbered(code)
    return first, alike


def _spans(cuts: Ints, edges: Ints) -> Ints:
    """Number intervals by the chunks that they meet."""
    met = np.searchsorted(cuts, edges[:-1], "right"), np.searchsorted(cuts, edges[1:], "left")
    return group_rows(met)[1]


def _looks(cuts: Ints, edges: Ints) -> Ints:
    """Number intervals by their length and the lengths of the chunks and stretches they meet."""
    first = np.searchsorted(cuts, edges[:-1], "right")
    last = np.searchsorted(cuts, edges[1:], "left")
    extents, lengths = np.diff(cuts), np.diff(edges)
    stretch = np.minimum(cuts[first], edges[1:]) - edges[:-1]  # the others follow from the extents
    columns = (c.tolist() for c in (first - 1, last, stretch, lengths))
    numbers: dict[tuple[int, int, bytes], int] = {}
    keys = ((s, n, extents[a:b].tobytes()) for a, b, s, n in zip(*columns, strict=True))
    return column([numbers.setdefault(key, len(numbers)) for key in keys])


def traffic_matrix(
    plans: Iterable[LoadPlan] | WorldPlans, writers: Writers | Iterable[SavePlan]
) -> Ints:
    """Add up the stored bytes that each rank reads: one row a writer, one column a reader.

    ``plans`` are one per reading rank, or a world that is to be filled, which is counted layout by
    layout and needs `Writers`. ``writers`` are one plan per writing rank, as `global_plan` returns
    them, or the result of `writers_of`; a chunk that several ranks wrote counts for the lowest.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, local_plan
    >>> sd = {"w": TensorSpec((6,), "float32", [Shard(0)])}
    >>> two, three = ([local_plan(sd, mesh=Mesh(dp=n), rank=r) for r in range(n)] for n in (2, 3))
    >>> writers, metadata = global_plan(two)
    >>> traffic_matrix([load_plan(metadata, plan) for plan in three], writers)
    array([[8, 4, 0],
           [0, 4, 8]])

    Raises:
        PlanError: Writers disagree about a tensor.
        TypeError: The plans are those of a world, and the writers are plans.
        ValueError: A read asks for a chunk that no writer wrote.
    """
    if isinstance(plans, WorldPlans):
        return readonly(traffic_blocks(plans, writers, (1, 1)))
    if isinstance(writers, Writers):
        known, rows = writers, writers.world_size
    else:
        written = tuple(writers)
        known, rows = writers_by_plans(written), len(written)
    loads = tuple(plans)
    try:
        pieces = load_pieces(Metadata(known.entries), loads)
    except NotFoundError as error:
        hint = "pass the plans that global_plan returned together with the metadata"
        raise ValueError(f"nobody wrote a chunk that is read: {error}; {hint}") from error
    reads = pieces.take(pieces.source < 0)  # other ranks send the rest
    matrix = np.zeros((rows, len(loads)), np.int64)
    np.add.at(matrix, (known.rank_of(reads.entry, reads.chunk), reads.rank), reads.nbytes)
    return readonly(matrix)


def traffic_blocks(
    world: WorldPlans, writers: Writers | Iterable[SavePlan] | None, steps: tuple[int, int]
) -> Ints:
    """Add up the bytes that a world reads, in blocks of so many writers and readers.

    Raises:
        TypeError: The writers are not `Writers`.
        PlanError: A tensor of the world was not written, or with another shape.
    """
    if not isinstance(writers, Writers):
        raise TypeError("a world does not say who wrote; pass writers_of(plans, metadata)")
    sums = np.zeros((-(-writers.world_size // steps[0]), -(-len(world) // steps[1])), np.int64)
    for pair in pairs_of(Metadata(writers.entries), world):
        for met in _pieces(pair.tiling, pair.boxes, np.arange(len(pair.boxes))):
            for file, itemsize in pair.files(writers):
                writer = writers.ranks[file][met.chunk] // steps[0]
                nbytes = met.lengths.prod(axis=1) * itemsize.sum()
                for reader in pair.rank.T // steps[1]:  # each of the ranks that hold a box
                    np.add.at(sums, (writer, reader[met.box]), nbytes)
    return sums
