"""What a picture shows of a tensor: its chunks as cells of a plane, few enough to be read.

1. `cut_of` finds how the tensor is cut, and which rank holds each chunk.
2. `Window.of` chooses the two axes that are shown.
3. `seen` projects the chunks onto them: chunks that lie behind each other are one cell.
4. `merged` draws neighbours together if the cells would be too small to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, group_rows
from ..columns.world import World
from ..errors import NotFoundError, PlanError, nearest_hint, nearest_names
from ..geometry.overlap import fills, overlap
from ..geometry.tilings import Chunk, Grid, Tiling, tile, tile_chunks
from ..mesh.worlds import WorldPlans
from ..metadata import Metadata, TensorMetadata
from ..plans import SavePlan
from ..records import MetadataIndex, TensorProperties
from ..reports import Writers
from .svg import block

__all__ = [
    "Cell",
    "Cut",
    "Plans",
    "Window",
    "cut_by_writers",
    "cut_of",
    "cut_of_chunks",
    "edges_of",
    "merged",
    "pieces",
    "seen",
]

Plans = SavePlan | Iterable[SavePlan]

_PIECES: Final = 4096  # more are not listed one by one: they would be drawn together anyway


@attrs.frozen(eq=False, slots=False)
class Cut:
    """How one tensor is cut, and who holds the chunks; a chunk that two ranks hold has two rows.

    Tensors of fewer than two axes get leading axes of length 1, so that all have a plane to show.

    Attributes:
        properties: The dtype in the checkpoint, and more.
        size: The global shape.
        offsets, sizes: The chunk of each row, in the global frame.
        who: Whose chunk each row is: a rank, or the number of the chunk.
        unit: What ``who`` counts: ``"rank"`` or ``"chunk"``.
    """

    properties: TensorProperties
    size: tuple[int, ...]
    offsets: Ints
    sizes: Ints
    who: Ints
    unit: str = "rank"

    @classmethod
    def of(cls, like: TensorMetadata, offsets: Ints, sizes: Ints, who: Ints, unit: str) -> Cut:
        """Make a cut that has two axes at least, of a tensor like a saved one."""
        lead = np.ones((len(who), max(0, 2 - len(like.size))), np.int64)
        boxes = np.hstack([lead * 0, offsets]), np.hstack([lead, sizes])
        return cls(like.properties, like.size, *boxes, who, unit)

    @property
    def lead(self) -> int:
        """How many axes were put in front."""
        return max(0, 2 - len(self.size))

    @property
    def plane(self) -> tuple[int, ...]:
        """The shape with the axes that were put in front."""
        return (1,) * self.lead + self.size

    @cached_property
    def _chunks(self) -> tuple[Tiling, Ints]:
        first, which = group_rows([self.offsets, self.sizes])
        return tile(self.offsets[first], self.sizes[first]), which

    @property
    def tiling(self) -> Tiling:
        """The distinct chunks, in row-major order."""
        return self._chunks[0]

    @property
    def chunk(self) -> Ints:
        """Which of the distinct chunks each row is."""
        return self._chunks[1]

    @property
    def is_whole(self) -> bool:
        """Whether every element lies in exactly one distinct chunk."""
        return fills(self.tiling, self.plane)


def cut_of(source: Metadata | Plans, fqn: str) -> Cut:
    """Return how a tensor is cut, by a checkpoint's metadata or by one plan per rank.

    Raises:
        NotFoundError: There is no such name; the nearest ones are listed.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is not a tensor.
    """
    if isinstance(source, Metadata):
        entry = source.entry(fqn)
        if not isinstance(entry, TensorMetadata):
            raise ValueError(_NOT_A_TENSOR.format(fqn))
        return cut_of_chunks(entry.chunks, fqn, entry)
    if isinstance(source, WorldPlans) and fqn in source.specs:
        spec, held = source.specs[fqn], source.layouts[source.layout_of[fqn]]
        tensor = TensorMetadata(TensorProperties(spec.dtype), spec.shape, ())
        return Cut.of(tensor, held.offsets, held.sizes, held.rank, "rank")
    return _cut_of_plans((source,) if isinstance(source, SavePlan) else tuple(source), fqn)


def cut_of_chunks(chunks: Iterable[Chunk], fqn: str, like: TensorMetadata) -> Cut:
    """Return how chunks that nobody in particular holds cut a tensor like a saved one."""
    tiling, axes = tile_chunks(chunks), len(like.size)
    if len(tiling) and tiling.ndim != axes:
        text = f"`{fqn}` was saved with shape {list(like.size)}; chunks of {tiling.ndim} axes "
        raise ValueError(f"{text}do not fit it")
    offsets, sizes = (c.reshape(len(tiling), axes) for c in (tiling.offsets, tiling.sizes))
    return Cut.of(like, offsets, sizes, np.arange(len(tiling)), "chunk")


def _cut_of_plans(plans: Sequence[SavePlan], fqn: str) -> Cut:
    """Return how ranks hold a tensor; catalogs that they share are searched once."""
    catalogs = {id(plan.items.catalog): plan.items.catalog for plan in plans}
    rows_of = {
        key: [row for row, name in enumerate(catalog.names) if name == fqn]
        for key, catalog in catalogs.items()
    }
    only = (
        plan.items.take(np.isin(plan.items.row, rows_of[id(plan.items.catalog)])) for plan in plans
    )
    rows = World(map(SavePlan, only)).rows
    if rows.issues:
        raise PlanError(rows.issues)
    if not rows.names:
        near = nearest_names(fqn, {name for catalog in catalogs.values() for name in catalog.names})
        text = f"`{fqn}` is in none of the {len(plans):,} plans{nearest_hint(near)}"
        raise NotFoundError(text, near)
    if rows.prop[0] < 0:
        raise ValueError(_NOT_A_TENSOR.format(fqn))
    tensor, axes = TensorMetadata(rows.props[0], rows.shapes[0], ()), len(rows.shapes[0])
    return Cut.of(tensor, rows.offsets[:, :axes], rows.sizes[:, :axes], rows.rank, "rank")


_NOT_A_TENSOR: Final = "`{}` is a non-tensor value: it has no chunks to draw"


def cut_by_writers(metadata: Metadata, writers: Writers | Plans | None, fqn: str) -> Cut:
    """Return how a saved tensor is cut, and who wrote each chunk, if that is known."""
    if not (writers is None or isinstance(writers, Writers)):
        return cut_of(writers, fqn)
    cut = cut_of(metadata, fqn)
    if writers is None:
        return cut
    if metadata.entry(fqn) == writers.entries.get(fqn):
        who = writers.columns[writers.column[writers.entries.row_of[fqn]]]
    else:  # the writers of another checkpoint: look every chunk up
        chunks = cut.offsets[:, cut.lead :].tolist()
        who = np.array([writers[MetadataIndex(fqn, offset)] for offset in chunks], np.int64)
    return attrs.evolve(cut, who=who, unit="rank")


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
        """Choose the first two axes that any of the cuts cuts, or others if there are none."""
        plane = tuple(max(lengths) for lengths in zip(*(cut.plane for cut in cuts), strict=True))
        offsets = np.concatenate([cut.offsets for cut in cuts])
        sliced = [a for a in range(len(plane)) if len(np.unique(offsets[:, a])) > 1]
        rest = [a for a in range(len(plane)) if a not in sliced]
        down, across = sorted([*sliced, *rest][:2])
        return cls((down, across), (plane[down], plane[across]), tuple(sliced[2:]))

    def of_shape(self, plane: Sequence[int]) -> tuple[int, int]:
        """Return how long the axes that are shown are in a tensor of some shape."""
        return plane[self.axes[0]], plane[self.axes[1]]


@attrs.frozen
class Cell:
    """One box of a picture, in elements of the plane.

    Attributes:
        top, left, height, width: Where it lies.
        holders: Whose it is: ranks or chunks, ascending.
        sources: Where it comes from, if that is shown: ranks or chunks, ascending.
        chunks: How many chunks, or pieces of them, it stands for.
    """

    top: int
    left: int
    height: int
    width: int
    holders: tuple[int, ...]
    sources: tuple[int, ...] = ()
    chunks: int = 1


def seen(cut: Cut, window: Window) -> list[Cell]:
    """Return the chunks as they are seen through a window, large ones first; empty ones are not."""
    axes = list(window.axes)
    boxes = np.hstack([cut.offsets[:, axes], cut.sizes[:, axes]])
    stacks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for box, who, chunk in zip(boxes.tolist(), cut.who.tolist(), cut.chunk.tolist(), strict=True):
        stacks.setdefault(tuple(box), []).append((who, chunk))
    cells = [
        _cell(box, _union([{who for who, _ in rows}]), chunks=len({chunk for _, chunk in rows}))
        for box, rows in sorted(stacks.items())
        if box[2] and box[3]
    ]
    return sorted(cells, key=lambda cell: -cell.height * cell.width)


def pieces(saved: Sequence[Cell], wanted: Sequence[Cell]) -> list[Cell] | None:
    """Return where saved cells meet wanted ones, by rows; None if there may be far too many."""
    if math.prod(len(edges) for edges in edges_of([*saved, *wanted])) > _PIECES:
        return None
    meet = overlap(_tile(saved), _tile(wanted))
    boxes = np.hstack([meet.offsets, meet.sizes]).tolist()
    rows = zip(boxes, meet.box.tolist(), meet.chunk.tolist(), strict=True)
    return sorted(
        (_cell(box, wanted[b].holders, saved[a].holders) for box, b, a in rows),
        key=lambda cell: (cell.top, cell.left),
    )


def merged(
    cells: Sequence[Cell], most: tuple[int, int], sources: Sequence[Cell] = ()
) -> list[Cell]:
    """Lay a grid over cells, of every n-th of their cuts, and merge what falls into one of its own.

    Args:
        cells: What is shown.
        most: How many rows and columns may remain.
        sources: Other cells, whose holders become the sources of what falls on them.

    >>> column = [Cell(i, 0, 1, 1, (i,)) for i in range(6)]
    >>> [(cell.top, cell.height, cell.holders) for cell in merged(column, (3, 1))]
    [(0, 2, (0, 1)), (2, 2, (2, 3)), (4, 2, (4, 5))]
    """
    if not cells:
        return []
    grid = Grid(tuple(map(_coarse, edges_of([*cells, *sources]), most)))
    meet, origin = overlap(_tile(cells), grid), overlap(_tile(sources), grid)
    found = []
    for box in np.unique(meet.box).tolist():
        mine = slice(*np.searchsorted(meet.box, [box, box + 1]).tolist())
        theirs = slice(*np.searchsorted(origin.box, [box, box + 1]).tolist())
        here = [cells[i] for i in meet.chunk[mine].tolist()]
        there = [sources[i] for i in origin.chunk[theirs].tolist()]
        low = meet.offsets[mine].min(axis=0)
        size = (meet.offsets[mine] + meet.sizes[mine]).max(axis=0) - low
        holders, origins = (_union(c.holders for c in group) for group in (here, there))
        count = sum(cell.chunks for cell in there or here)
        found.append(_cell([*low.tolist(), *size.tolist()], holders, origins, count))
    return found


def _cell(
    box: Sequence[int], holders: tuple[int, ...], sources: tuple[int, ...] = (), chunks: int = 1
) -> Cell:
    top, left, height, width = box
    return Cell(top, left, height, width, holders, sources, chunks)


def _tile(cells: Sequence[Cell]) -> Tiling:
    rows = np.array([(c.top, c.left, c.height, c.width) for c in cells], np.int64).reshape(-1, 4)
    return tile(rows[:, :2], rows[:, 2:])


def edges_of(cells: Sequence[Cell]) -> tuple[list[int], list[int]]:
    """Return where cells begin and end, along both axes, ascending."""
    rows = {e for c in cells for e in (c.top, c.top + c.height)}
    columns = {e for c in cells for e in (c.left, c.left + c.width)}
    return sorted(rows), sorted(columns)


def _coarse(edges: Sequence[int], most: int) -> list[int]:
    """Keep every n-th of some edges, first and last always, spread as evenly as they can be."""
    last = len(edges) - 1
    count = -(-last // block(last, most))
    return [edges[i * last // count] for i in range(count + 1)]


def _union(groups: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted({value for group in groups for value in group}))
