"""What of a tensor does a picture show? Its chunks as cells of a plane, few enough to be read.

A tensor of any number of axes is seen through a `Window` of two of them; chunks that lie behind
each other there are one cell. Where cells would be too small to read, neighbours become one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..errors import NotFoundError, PlanError, nearest_hint, nearest_names
from ..items import MetadataIndex, TensorProperties
from ..metadata import Metadata, TensorMetadata
from ..overlap import fills, overlap
from ..packing import Ints, readonly
from ..records import SavePlan
from ..reports.writers import Writers
from ..tiling import Chunk, Grid, Tiling, tile, tile_chunks
from ..topology import WorldPlans
from ..world import World
from .svg import block

__all__ = ["Cell", "Cut", "Window", "merged", "pieces", "seen"]

Plans = SavePlan | Iterable[SavePlan]

# Overlaps past this many are not listed one by one: they would be merged anyway.
_PIECES: Final = 4096


@attrs.frozen(eq=False, slots=False)
class Cut:
    """How one tensor is cut, and who holds the chunks; a chunk that two ranks hold has two rows.

    Tensors of fewer than two axes get leading axes of length 1, so that all have a plane to show.

    Attributes:
        fqn: The tensor's name.
        dtype: Its dtype in the checkpoint, by name.
        size: Its global shape.
        itemsize: Bytes of one element.
        offsets, sizes: The chunk of each row, in the global frame.
        who: Whose chunk each row is: a rank, or the number of the chunk.
        unit: What ``who`` counts: ``"rank"`` or ``"chunk"``.
    """

    fqn: str
    dtype: str
    size: tuple[int, ...]
    itemsize: int
    offsets: Ints
    sizes: Ints
    who: Ints
    unit: str

    @property
    def lead(self) -> int:
        """How many axes were put in front."""
        return max(0, 2 - len(self.size))

    @property
    def plane(self) -> tuple[int, ...]:
        """The shape with the axes that were put in front."""
        return (1,) * self.lead + self.size

    @cached_property
    def tiling(self) -> Tiling:
        """The distinct chunks, in row-major order."""
        boxes = np.concatenate([self.offsets, self.sizes], axis=1)
        offsets, sizes = np.split(np.unique(boxes, axis=0), 2, axis=1)
        return tile(offsets, sizes)

    @property
    def is_whole(self) -> bool:
        """Whether every element lies in exactly one distinct chunk."""
        return fills(self.tiling, self.plane)


def cut_of(source: Metadata | Plans, fqn: str) -> Cut:
    """Read off how a tensor is cut, from a checkpoint's metadata or from one plan per rank.

    Raises:
        NotFoundError: There is no such name; the nearest ones are told.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is no tensor.
    """
    if isinstance(source, Metadata):
        entry = _tensor(source, fqn)
        return cut_of_chunks(entry.chunks, fqn, entry)
    if isinstance(source, WorldPlans) and fqn in source.specs:
        spec, layout = source.specs[fqn], source.layouts[source.layout_of[fqn]]
        properties = TensorProperties(spec.dtype)
        return _cut(fqn, properties, spec.shape, layout.offsets, layout.sizes, layout.rank)
    plans = (source,) if isinstance(source, SavePlan) else tuple(source)
    rows = World(_only(plans, fqn)).rows
    if rows.issues:
        raise PlanError(rows.issues)
    if not rows.names:
        names = dict.fromkeys(name for plan in plans for name in plan.items.catalog.names)
        near = nearest_names(fqn, names)
        hint = nearest_hint(near)
        raise NotFoundError(f"`{fqn}` is in none of the {len(plans):,} plans{hint}", near)
    if rows.prop[0] < 0:
        raise ValueError(f"`{fqn}` is a value that is no tensor: it has no chunks to draw")
    size = rows.shapes[0]
    boxes = rows.offsets[:, : len(size)], rows.sizes[:, : len(size)]
    return _cut(fqn, rows.props[0], size, *boxes, rows.rank)


def cut_of_chunks(chunks: Iterable[Chunk], fqn: str, like: TensorMetadata) -> Cut:
    """Describe chunks that nobody in particular holds, of a tensor like a saved one."""
    tiling = tile_chunks(chunks)
    if len(tiling) and tiling.ndim != len(like.size):
        raise ValueError(
            f"`{fqn}` was saved with shape {list(like.size)}; chunks of {tiling.ndim} axes "
            "do not fit it"
        )
    empty = np.zeros((0, len(like.size)), np.int64)
    boxes = (tiling.offsets, tiling.sizes) if len(tiling) else (empty, empty)
    who = np.arange(len(tiling))
    return _cut(fqn, like.properties, like.size, *boxes, who, unit="chunk")


def cut_by_writers(metadata: Metadata, writers: Writers | Plans, fqn: str) -> Cut:
    """Read off how a saved tensor is cut, and who wrote each chunk."""
    if not isinstance(writers, Writers):
        return cut_of(writers, fqn)
    cut = cut_of(metadata, fqn)
    if _tensor(metadata, fqn) == writers.entries.get(fqn):
        who = writers.columns[writers.column[writers.entries.row_of[fqn]]]
    else:  # the writers of another checkpoint: look every chunk up
        chunks = _tensor(metadata, fqn).chunks.offsets.tolist()
        who = np.array([writers[MetadataIndex(fqn, offset)] for offset in chunks], np.int64)
    return attrs.evolve(cut, who=who, unit="rank")


def _tensor(metadata: Metadata, fqn: str) -> TensorMetadata:
    entry = metadata.entry(fqn)
    if not isinstance(entry, TensorMetadata):
        raise ValueError(f"`{fqn}` is a value that is no tensor: it has no chunks to draw")
    return entry


def _cut(
    fqn: str,
    properties: TensorProperties,
    size: tuple[int, ...],
    offsets: Ints,
    sizes: Ints,
    who: Ints,
    unit: str = "rank",
) -> Cut:
    """Make a cut that has two axes at least."""
    boxes = _with_lead(offsets, 0), _with_lead(sizes, 1)
    return Cut(fqn, properties.dtype, size, properties.itemsize, *boxes, who, unit)


def _only(plans: Sequence[SavePlan], fqn: str) -> Iterable[SavePlan]:
    """Return the plans without all other tensors; catalogs that ranks share are searched once."""
    found: dict[int, list[int]] = {}
    for plan in plans:
        items = plan.items
        rows = found.get(id(items.catalog))
        if rows is None:
            rows = [row for row, name in enumerate(items.catalog.names) if name == fqn]
            found[id(items.catalog)] = rows
        yield SavePlan(items.take(np.isin(items.row, rows)))


def _with_lead(columns: Ints, value: int) -> Ints:
    """Put columns in front until there are two."""
    missing = max(0, 2 - columns.shape[1])
    front = np.full((len(columns), missing), value, np.int64)
    return readonly(np.concatenate([front, columns], axis=1))


@attrs.frozen
class Cell:
    """One box of a picture, in elements of the plane.

    Attributes:
        top, left, height, width: Where it lies.
        holders: Whose it is: ranks or chunks, ascending.
        sources: Where it comes from, if that is shown: ranks or chunks, ascending.
        chunks: How many chunks it stands for.
    """

    top: int
    left: int
    height: int
    width: int
    holders: tuple[int, ...]
    sources: tuple[int, ...] = ()
    chunks: int = 1

    @property
    def area(self) -> int:
        """How many elements of the plane it covers."""
        return self.height * self.width


@attrs.frozen
class Window:
    """The two axes of a tensor (with those put in front) that a picture shows, and their lengths.

    Attributes:
        axes: Which axes run down and across.
        lengths: How long they are.
        hidden: Other axes that are cut, too.
    """

    axes: tuple[int, int]
    lengths: tuple[int, int]
    hidden: tuple[int, ...] = ()

    @classmethod
    def of(cls, *cuts: Cut) -> Window:
        """Choose the first two axes that any of the cuts cuts, and others where there are none."""
        plane = tuple(max(lengths) for lengths in zip(*(cut.plane for cut in cuts), strict=True))
        offsets = np.concatenate([cut.offsets for cut in cuts])
        sliced = [a for a in range(len(plane)) if len(np.unique(offsets[:, a])) > 1]
        rest = [a for a in range(len(plane)) if a not in sliced]
        down, across = sorted([*sliced, *rest][:2])
        return cls((down, across), (plane[down], plane[across]), tuple(sliced[2:]))

    def of_shape(self, plane: Sequence[int]) -> tuple[int, int]:
        """Return how long the axes that are shown are in a tensor of some shape."""
        return plane[self.axes[0]], plane[self.axes[1]]


def seen(cut: Cut, window: Window) -> list[Cell]:
    """Return the chunks as they are seen through a window, large ones first; empty ones are not."""
    tiling = cut.tiling
    holders = _holders(cut, tiling)
    cells = [
        Cell(*box, holders=_union(holders[i] for i in mine), chunks=len(mine))
        for box, mine in _stacks(tiling.offsets, tiling.sizes, window)
    ]
    return sorted(cells, key=lambda cell: -cell.area)


def pieces(saved: Cut, wanted: Cut, window: Window) -> list[Cell] | None:
    """Return where saved chunks meet wanted ones, seen through a window; None if far too many."""
    a, b = saved.tiling, wanted.tiling
    if math.prod(_edges(a, x) + _edges(b, x) for x in range(a.ndim)) > _PIECES:
        return None
    meet = overlap(a, b)
    sources, holders = _holders(saved, a), _holders(wanted, b)
    return [
        Cell(
            *box,
            holders=_union(holders[meet.box[i]] for i in mine),
            sources=_union(sources[meet.chunk[i]] for i in mine),
            chunks=len(mine),
        )
        for box, mine in _stacks(meet.offsets, meet.sizes, window)
    ]


def merged(
    cells: Sequence[Cell], most: tuple[int, int], sources: Sequence[Cell] = ()
) -> list[Cell]:
    """Lay a grid over cells, of every n-th of their cuts, and merge what falls into one of its own.

    Args:
        cells: What is shown.
        most: How many rows and columns may remain.
        sources: Other cells, whose holders become the sources of what falls on them.

    >>> [
    ...     (c.top, c.height, c.holders)
    ...     for c in merged([Cell(i, 0, 1, 1, (i,)) for i in range(6)], (3, 1))
    ... ]
    [(0, 2, (0, 1)), (2, 2, (2, 3)), (4, 2, (4, 5))]
    """
    together = [*cells, *sources]
    if not together:
        return []
    grid = Grid(
        (
            _coarse([e for c in together for e in (c.top, c.top + c.height)], most[0]),
            _coarse([e for c in together for e in (c.left, c.left + c.width)], most[1]),
        )
    )
    mine, theirs = _falls(cells, grid), _falls(sources, grid)
    found = []
    for at in sorted(mine):
        here, there = [cells[i] for i in mine[at]], [sources[i] for i in theirs.get(at, ())]
        top, left, bottom, right = _bounds(here, grid[at])
        holders, origins = (_union(c.holders for c in group) for group in (here, there))
        count = sum(c.chunks for c in (there or here))
        found.append(Cell(top, left, bottom - top, right - left, holders, origins, count))
    return found


Box = tuple[int, int, int, int]  # top, left, height, width


def _stacks(offsets: Ints, sizes: Ints, window: Window) -> list[tuple[Box, list[int]]]:
    """Return the boxes that are seen through a window, and which chunks lie in each."""
    axes = list(window.axes)
    boxes = np.concatenate([offsets[:, axes], sizes[:, axes]], axis=1)
    found: dict[Box, list[int]] = {}
    for row, (top, left, height, width) in enumerate(boxes.tolist()):
        if height and width:
            found.setdefault((top, left, height, width), []).append(row)
    return sorted(found.items())


def _holders(cut: Cut, tiling: Tiling) -> list[tuple[int, ...]]:
    """Return, for each distinct chunk, who holds it."""
    found: dict[tuple[int, ...], list[int]] = {}
    boxes = np.concatenate([cut.offsets, cut.sizes], axis=1).tolist()
    for box, who in zip(boxes, cut.who.tolist(), strict=True):
        found.setdefault(tuple(box), []).append(who)
    distinct = np.concatenate([tiling.offsets, tiling.sizes], axis=1).tolist()
    return [tuple(sorted(found[tuple(box)])) for box in distinct]


def _edges(tiling: Tiling, axis: int) -> int:
    return len(np.unique(tiling.offsets[:, axis]))


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({value for group in groups for value in group}))


def _coarse(edges: Sequence[int], most: int) -> Ints:
    """Keep every n-th of some edges, first and last always, spread as evenly as they can be."""
    cuts = np.unique(edges)
    last = len(cuts) - 1
    cells = -(-last // block(last, most))
    return readonly(cuts[np.arange(cells + 1) * last // cells])


def _falls(cells: Sequence[Cell], grid: Grid) -> Mapping[int, list[int]]:
    """Return which cells meet each cell of a grid."""
    rows = np.array([(c.top, c.left, c.height, c.width) for c in cells], np.int64).reshape(-1, 4)
    meet = overlap(tile(rows[:, :2], rows[:, 2:]), grid)
    found: dict[int, list[int]] = {}
    for at, cell in zip(meet.box.tolist(), meet.chunk.tolist(), strict=True):
        found.setdefault(at, []).append(cell)
    return found


def _bounds(cells: Sequence[Cell], within: Chunk) -> tuple[int, int, int, int]:
    """Return the smallest box around some cells, clipped to a cell of the grid."""
    (top, left), (bottom, right) = within.offsets, within.ends
    return (
        max(top, min(c.top for c in cells)),
        max(left, min(c.left for c in cells)),
        min(bottom, max(c.top + c.height for c in cells)),
        min(right, max(c.left + c.width for c in cells)),
    )
