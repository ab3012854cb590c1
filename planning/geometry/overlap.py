"""Overlaps of tilings, and the gaps that they leave.

Results are columns: one row per piece, one column per axis, in elements of the global frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, distinct, numbered, pad, spread
from .tilings import Chunk, Grid, Tiling, tile_chunks

# Pairs that a sweep tests at a time: bounds its memory to a few hundred MiB.
_BLOCK: Final = 1 << 21
_FAR: Final = 1 << 61  # cuts laid end to end must stay below what 64 bits hold


@attrs.frozen(eq=False)
class Overlap:
    """The pieces where boxes and chunks overlap; one row per piece, by box, then by chunk.

    Attributes:
        box: The number of the box.
        chunk: The number of the chunk in that box's tiling.
        offsets: The start of the piece, in the global frame.
        sizes: The size of the piece.
        anchors: The start of the chunk, in the global frame.
    """

    box: Ints
    chunk: Ints
    offsets: Ints
    sizes: Ints
    anchors: Ints


def overlap(a: Tiling, b: Tiling) -> Overlap:
    """Return every piece where a chunk of ``a`` overlaps a chunk of ``b`` (the box).

    >>> from shardplan.planning.geometry.tilings import tile
    >>> saved, wanted = tile([[0], [3]], [[3], [3]]), tile([[0], [2], [4]], [[2], [2], [2]])
    >>> pieces = overlap(saved, wanted)
    >>> list(zip(pieces.box.tolist(), pieces.chunk.tolist(), pieces.offsets[:, 0].tolist()))
    [(0, 0, 0), (1, 0, 2), (1, 1, 3), (2, 1, 4)]
    """
    if len(a) and len(b) and a.ndim != b.ndim:
        raise ValueError(f"a tiling of {a.ndim} axes cannot overlap one of {b.ndim}")
    return overlap_many((a,), np.zeros(len(b), np.int64), b.offsets, b.sizes)


def overlap_many(
    tilings: Sequence[Tiling], which: npt.NDArray[Any], offsets: Ints, sizes: Ints
) -> Overlap:
    """Overlap each box ``i`` with the chunks of ``tilings[which[i]]``.

    Boxes in grids are bisected together, one axis at a time; other tilings are swept along the axis
    that leaves the fewest pairs to test. Columns past a tiling's own axes are padding.
    """
    grids = np.array([isinstance(t, Grid) for t in tilings], bool)
    parts = []
    rows = np.flatnonzero(grids[which]) if len(which) else np.zeros(0, np.int64)
    if len(rows):
        parts.append(_meet_grids(tilings, which, rows, offsets, sizes))
    for number in distinct(which[~grids[which]]) if len(which) else ():
        rows = np.flatnonzero(which == number)
        parts.append(_meet_boxes(tilings[int(number)], rows, offsets[rows], sizes[rows]))
    if not parts:
        number, corner = np.zeros(0, np.int64), np.zeros((0, offsets.shape[1]), np.int64)
        return Overlap(number, number, corner, corner, corner)
    return _merged(parts)


def _merged(parts: Sequence[Overlap]) -> Overlap:
    """Concatenate the pieces of several overlaps, sorted."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in attrs.fields(Overlap)]
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
    order = np.lexsort((columns[1], columns[0]))
    return Overlap(*(c[order] for c in columns))


def _meet_grids(
    tilings: Sequence[Tiling], numbers: npt.NDArray[Any], rows: Ints, offsets: Ints, sizes: Ints
) -> Overlap:
    """Overlap boxes with grids, so many at a time that their cuts fit end to end."""
    met = meet_grids(tilings, numbers[rows], offsets[rows], sizes[rows])
    if met is None:
        parts = [rows[numbers[rows] == n] for n in distinct(numbers[rows]).tolist()]
        return _merged([_meet_grids(tilings, numbers, part, offsets, sizes) for part in parts])
    found = met.pieces()
    return attrs.evolve(found, box=rows[found.box])


def meet_grids(
    tilings: Sequence[Tiling], which: npt.NDArray[Any], offsets: Ints, sizes: Ints
) -> GridOverlap | None:
    """Overlap each box ``i`` with the cells of the grid ``tilings[which[i]]``, by rule.

    Boxes are bisected together: per axis, one search over all cuts laid end to end. Return None if
    there are too many for that.

    >>> from shardplan.planning.geometry.tilings import tile
    >>> rows = tile([[0, 0], [2, 0]], [[2, 6], [1, 6]])
    >>> met = meet_grids([rows], np.zeros(1, int), np.array([[1, 2]]), np.array([[2, 4]]))
    >>> met.count.tolist(), met.covered.tolist(), met.pieces().sizes.tolist()
    ([2], [8], [[1, 4], [1, 4]])
    """
    used, _, which = numbered(which)
    longest = [max(tilings[n].bounds().ends, default=0) + 2 for n in used.tolist()]
    if len(used) > 1 and sum(longest) > _FAR:
        return None
    axes, ends = offsets.shape[1], offsets + sizes
    rails = tuple(
        _Rail([tilings[n].cuts[x] if x < tilings[n].ndim else _UNIT for n in used])
        for x in range(axes)
    )
    first, cells = np.empty((2, len(which), axes), np.int64)
    for x, rail in enumerate(rails):
        first[:, x], cells[:, x] = rail.bisect(which, offsets[:, x], ends[:, x])
    return GridOverlap(which, offsets, ends, first, cells, rails)


@attrs.frozen(eq=False, slots=False)
class GridOverlap:
    """Where boxes overlap cells of grids, as a product: along each axis, a run of cells."""

    which: Ints  # the grid of each box, in order of use
    offsets: Ints
    ends: Ints
    first: Ints  # per box and axis, the first cell
    cells: Ints  # per box and axis, how many cells
    rails: tuple[_Rail, ...]

    @cached_property
    def count(self) -> Ints:
        """How many pieces each box has."""
        return np.asarray(self.cells.prod(axis=1))

    @cached_property
    def covered(self) -> Ints:
        """How many elements of each box lie in its grid."""
        elements = np.ones(len(self.which), np.int64)
        for axis, rail in enumerate(self.rails):
            start, end = rail.span(self.which)
            low = np.maximum(self.offsets[:, axis], start)
            high = np.minimum(self.ends[:, axis], end)
            elements *= np.maximum(high - low, 0)
        return elements

    def pieces(self, rows: Ints | None = None) -> Overlap:
        """Return the pieces, or those of the given numbers among all of them, in that order."""
        if rows is None:
            piece, within = grid_cells(self.cells)
        else:
            ends = np.cumsum(self.count)
            piece = np.searchsorted(ends, rows, side="right")
            within = _unravelled(rows - (ends - self.count)[piece], self.cells[piece])
        chunk = np.zeros(len(piece), np.int64)
        stride = np.ones(len(piece), np.int64)
        shape = (len(piece), len(self.rails))
        lows, anchors, lengths = (np.empty(shape, np.int64) for _ in range(3))
        grid = self.which[piece]
        for axis in reversed(range(len(self.rails))):  # the last axis runs fastest, as row-major
            rail = self.rails[axis]
            cell = self.first[piece, axis] + within[:, axis]
            start, end = rail.cell(grid, cell)
            low = np.maximum(start, self.offsets[piece, axis])
            anchors[:, axis], lows[:, axis] = start, low
            lengths[:, axis] = np.minimum(end, self.ends[piece, axis]) - low
            chunk += cell * stride
            stride *= rail.cells[grid]
        return Overlap(piece, chunk, lows, lengths, anchors)


def grid_cells(counts: Ints) -> tuple[Ints, Ints]:
    """Enumerate the cells of many small grids, row-major; return each cell's grid and position.

    >>> row, cell = grid_cells(np.array([[1, 2], [2, 1]]))  # cells along each axis; a row a grid
    >>> row.tolist(), cell.tolist()
    ([0, 0, 1, 1], [[0, 0], [0, 1], [0, 0], [1, 0]])
    """
    total = counts.prod(axis=1)
    row, nth = spread(total)
    return row, _unravelled(nth, counts[row])


def _unravelled(nth: Ints, counts: Ints) -> Ints:
    """Return the position of the given cells of grids, row-major."""
    cell = np.empty((len(nth), counts.shape[1]), np.int64)
    for axis in reversed(range(counts.shape[1])):
        nth, cell[:, axis] = np.divmod(nth, counts[:, axis])
    return cell


_UNIT: Final = np.array([0, 1], np.int64)


class _Rail:
    """The cuts of many grids along one axis, laid end to end so that one bisect serves them all."""

    def __init__(self, cuts: Sequence[Ints]) -> None:
        lengths = np.array([len(c) for c in cuts], np.int64)
        spans = np.array([c[-1] + 2 for c in cuts], np.int64)
        self.cells = lengths - 1
        self.start = np.cumsum(lengths) - lengths
        self.shift = np.cumsum(spans) - spans
        self.cuts = np.concatenate(cuts) + np.repeat(self.shift, lengths)
        self.low = self.cuts[self.start]
        self.high = self.cuts[self.start + self.cells]

    def bisect(self, grid: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Return the first cell that each interval overlaps in its grid, and how many."""
        shift = self.shift[grid]
        starts = np.clip(starts + shift, self.low[grid], self.high[grid])
        ends = np.clip(ends + shift, self.low[grid], self.high[grid])
        first = np.searchsorted(self.cuts, starts, side="right") - 1
        last = np.searchsorted(self.cuts, ends, side="left")
        return first - self.start[grid], np.where(starts < ends, last - first, 0)

    def span(self, grid: Ints) -> tuple[Ints, Ints]:
        """Return the start and end of grids."""
        return self.low[grid] - self.shift[grid], self.high[grid] - self.shift[grid]

    def cell(self, grid: Ints, cell: Ints) -> tuple[Ints, Ints]:
        """Return the start and end of a grid's cells."""
        at, shift = self.start[grid] + cell, self.shift[grid]
        return self.cuts[at] - shift, self.cuts[at + 1] - shift


def _meet_boxes(tiling: Tiling, rows: Ints, offsets: Ints, sizes: Ints) -> Overlap:
    """Overlap boxes with chunks that do not form a grid."""
    axes = offsets.shape[1]
    starts, extents = pad(tiling.offsets, axes, 0), pad(tiling.sizes, axes, 1)
    none = np.zeros(0, np.int64)
    pairs = [(none, none), *_sweep(offsets, offsets + sizes, starts, starts + extents)]
    box, chunk = (np.concatenate(side) for side in zip(*pairs, strict=True))
    order = np.lexsort((chunk, box))
    box, chunk = box[order], chunk[order]
    anchors = starts[chunk]
    low = np.maximum(anchors, offsets[box])
    high = np.minimum(anchors + extents[chunk], offsets[box] + sizes[box])
    return Overlap(rows[box], chunk, low, high - low, anchors)


def _sweep(a_low: Ints, a_high: Ints, b_low: Ints, b_high: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield, in blocks of about _BLOCK candidates, all pairs (of a, of b) that share an element."""
    axes = a_low.shape[1]
    if axes == 0:
        pairs = np.indices((len(a_low), len(b_low))).reshape(2, -1)
        yield pairs[0], pairs[1]
        return
    plans = [_candidates(a_low[:, x], a_high[:, x], b_low[:, x], b_high[:, x]) for x in range(axes)]
    best = min(plans, key=lambda plan: sum(int(some.counts.sum()) for some in plan))
    for order, first, counts in best:
        edges = np.searchsorted(np.cumsum(counts), np.arange(_BLOCK, int(counts.sum()), _BLOCK))
        for rows in np.split(np.arange(len(counts)), edges):
            row, nth = spread(counts[rows])
            a = rows[row]
            b = order[first[a] + nth]
            meet = ((a_low[a] < b_high[b]) & (b_low[b] < a_high[a])).all(axis=1)
            meet &= (a_low[a] < a_high[a]).all(axis=1) & (b_low[b] < b_high[b]).all(axis=1)
            yield a[meet], b[meet]


class _Candidates(NamedTuple):
    """Some intervals of b by start, and the run of them that each interval of a may overlap."""

    order: Ints
    first: Ints
    counts: Ints


def _candidates(a_low: Ints, a_high: Ints, b_low: Ints, b_high: Ints) -> list[_Candidates]:
    """Return, on one axis, orders of b and, per interval of a, the run that it may overlap.

    There is one order per power of two of b's lengths, so that an interval's start gives its end
    within a factor of two, and one long box among short ones does not slow the search.
    """
    candidates = []
    power = np.frexp((b_high - b_low).astype(np.float64))[1]
    for number in np.unique(power).tolist():
        mine = np.flatnonzero(power == number)
        order = mine[np.argsort(b_low[mine], kind="stable")]
        starts = b_low[order]
        longest = int((b_high[mine] - b_low[mine]).max())
        first = np.searchsorted(starts, a_low - longest, side="right")
        last = np.searchsorted(starts, a_high, side="left")
        candidates.append(_Candidates(order, first, np.maximum(last - first, 0)))
    return candidates


def self_overlaps(tiling: Tiling, limit: int) -> list[tuple[int, int]]:
    """Return up to ``limit`` pairs of chunks that share elements, in order."""
    if isinstance(tiling, Grid) or len(tiling) < 2:
        return []
    low, high = tiling.offsets, tiling.offsets + tiling.sizes
    pairs: list[tuple[int, int]] = []
    for a, b in _sweep(low, high, low, high):
        pairs.extend(zip(a[a < b].tolist(), b[a < b].tolist(), strict=True))
        if len(pairs) >= limit:
            break  # enough for a report
    return sorted(pairs)[:limit]


def fills(tiling: Tiling, shape: Sequence[int]) -> bool:
    """Return True if every element of a tensor of that shape lies in exactly one chunk.

    >>> from shardplan.planning.geometry.tilings import tile
    >>> fills(tile([[0], [3]], [[3], [3]]), (6,)), fills(tile([[0]], [[3]]), (6,))
    (True, False)
    """
    volume = math.prod(shape)
    if tiling.volume() != volume or volume == 0:
        return tiling.volume() == volume
    ends = tiling.bounds().ends
    inside = len(ends) == len(shape) and all(e <= n for e, n in zip(ends, shape, strict=True))
    return inside and not self_overlaps(tiling, limit=1)


def gaps(tiling: Tiling, within: Chunk, limit: int = 8) -> list[Chunk]:
    """Return up to ``limit`` boxes that together cover the elements of ``within`` in no chunk.

    >>> from shardplan.planning.geometry.tilings import tile
    >>> gaps(tile([[0, 0], [4, 0]], [[4, 8], [4, 5]]), Chunk((0, 0), (8, 8)))
    [Chunk(offsets=(4, 5), sizes=(4, 3))]
    """
    if isinstance(tiling, Grid):
        tiling = tile_chunks([tiling.bounds()])
    low = np.maximum(tiling.offsets, within.offsets) if len(tiling) else tiling.offsets
    high = np.minimum(tiling.offsets + tiling.sizes, within.ends) if len(tiling) else low
    real = (low < high).all(axis=1)
    found = islice(_gaps(low[real], high[real], within.offsets, within.ends), limit)
    return [Chunk(start, [e - o for o, e in zip(start, end, strict=True)]) for start, end in found]


Corner = tuple[int, ...]


def _gaps(low: Ints, high: Ints, start: Corner, end: Corner) -> Iterator[tuple[Corner, Corner]]:
    """Walk slabs along the axis with the most cuts, and recurse; equal neighbours are one gap."""
    if any(s >= e for s, e in zip(start, end, strict=True)):
        return
    if not len(low):
        yield start, end
        return
    ends = [[start[x], end[x]] for x in range(len(start))]
    edges = [np.unique(np.concatenate([low[:, x], high[:, x], e])) for x, e in enumerate(ends)]
    axis = max(range(len(start)), key=lambda x: len(edges[x]), default=-1)
    if axis < 0 or len(edges[axis]) == 2:
        return  # a chunk spans all that is left
    if all(len(e) == 2 for x, e in enumerate(edges) if x != axis):
        order = np.argsort(low[:, axis], kind="stable")
        reach = np.maximum.accumulate(np.append(start[axis], high[order, axis]))
        begins = np.append(low[order, axis], end[axis])
        for hole in np.flatnonzero(begins > reach).tolist():
            yield _put(start, axis, int(reach[hole])), _put(end, axis, int(begins[hole]))
        return
    held: dict[tuple[Corner, Corner], int] = {}  # an open gap's cross-section -> where it began
    for left, right in zip(edges[axis][:-1].tolist(), edges[axis][1:].tolist(), strict=True):
        span = (low[:, axis] <= left) & (high[:, axis] >= right)
        slab = _put(start, axis, left), _put(end, axis, left + 1)
        inner = [_put(box, axis, edge) for box, edge in ((low[span], left), (high[span], left + 1))]
        open_now = dict.fromkeys(_gaps(inner[0], inner[1], *slab), left)
        for (a, b), began in held.items():
            key = _put(a, axis, left), _put(b, axis, left + 1)
            if key in open_now:
                open_now[key] = began
            else:
                yield _put(a, axis, began), _put(b, axis, left)
        held = open_now
    for (a, b), began in held.items():
        yield _put(a, axis, began), _put(b, axis, end[axis])


def _put(corner: Any, axis: int, value: int) -> Any:
    """Return corners with one coordinate replaced."""
    if isinstance(corner, tuple):
        return (*corner[:axis], value, *corner[axis + 1 :])
    moved = corner.copy()
    moved[:, axis] = value
    return moved
