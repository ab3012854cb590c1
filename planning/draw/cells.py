"""How tensors are cut into chunks, and the cells of a plane that show this.

1. `cut_of` finds the chunks of a tensor and the rank that holds each.
2. `window_of` chooses the two axes that are shown.
3. `seen` projects the chunks onto them: chunks that lie behind each other are one cell.
4. `fit` chooses how large they are drawn, and `readable` joins those that would be too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from .svg import block, width_of

Plans = SavePlan | Iterable[SavePlan]
Size = tuple[float, float]

_WIDE, _HIGH = 44.0, 14.0  # room for a short label
_NARROW, _LOW = 12.0, 11.0  # smaller cells cannot be seen apart
_CELLS: Final = 400  # more would be too small to read, and too many bytes
_PIECES: Final = 4096  # more are not listed one by one: they would be joined anyway
_NOT_A_TENSOR: Final = "`{}` is a non-tensor value: it has no chunks to draw"


@attrs.frozen(eq=False)
class TensorCut:
    """The chunks of one tensor and who holds them; a chunk that two ranks hold has two rows.

    Tensors of fewer than two axes get leading axes of length 1, so that all have a plane to show.
    """

    like: TensorMetadata  # the dtype and the global shape
    offsets: Ints  # the chunk of each row, in the global frame
    sizes: Ints
    who: Ints  # whose chunk each row is: a rank, or the number of the chunk
    unit: str  # what `who` counts: `"rank"` or `"chunk"`
    tiling: Tiling  # the distinct chunks, in row-major order
    chunk: Ints  # which of the distinct chunks each row is

    @property
    def size(self) -> tuple[int, ...]:
        """The global shape."""
        return self.like.size

    @property
    def lead(self) -> int:
        """How many axes were put in front."""
        return max(0, 2 - len(self.size))

    @property
    def plane(self) -> tuple[int, ...]:
        """The shape with the axes that were put in front."""
        return (1,) * self.lead + self.size

    @property
    def is_whole(self) -> bool:
        """Whether every element lies in exactly one distinct chunk."""
        return fills(self.tiling, self.plane)


def _cut(like: TensorMetadata, offsets: Ints, sizes: Ints, who: Ints, unit: str) -> TensorCut:
    lead = np.ones((len(who), max(0, 2 - len(like.size))), np.int64)
    offsets, sizes = np.hstack([lead * 0, offsets]), np.hstack([lead, sizes])
    first, chunk = group_rows([offsets, sizes])
    return TensorCut(like, offsets, sizes, who, unit, tile(offsets[first], sizes[first]), chunk)


def cut_of(
    source: Metadata | Plans | Iterable[Chunk], fqn: str, metadata: Metadata | None = None
) -> TensorCut:
    """Return how a tensor is cut: by a checkpoint, by one plan per rank, or by chunks.

    ``metadata`` describes the tensor that chunks cut.
    """
    if isinstance(source, Metadata):
        return _cut_of_chunks(None, fqn, source)
    if isinstance(source, WorldPlans) and fqn in source.specs:
        spec, held = source.specs[fqn], source.layouts[source.layout_of[fqn]]
        like = TensorMetadata(TensorProperties(spec.dtype), spec.shape, ())
        return _cut(like, held.offsets, held.sizes, held.rank, "rank")
    given = (source,) if isinstance(source, SavePlan) else tuple(source)
    chunks = [chunk for chunk in given if isinstance(chunk, Chunk)]
    if metadata is not None and len(chunks) == len(given):
        return _cut_of_chunks(chunks, fqn, metadata)
    plans = [plan for plan in given if isinstance(plan, SavePlan)]
    if len(plans) != len(given):
        kinds = sorted({type(one).__name__ for one in given})
        raise TypeError(f"expected the save plans of all ranks, or chunks to fill; not {kinds}")
    return _cut_of_plans(plans, fqn)


def _cut_of_chunks(chunks: Iterable[Chunk] | None, fqn: str, metadata: Metadata) -> TensorCut:
    """Return how chunks cut a saved tensor; without chunks, how it was saved."""
    like = metadata.entry(fqn)
    if not isinstance(like, TensorMetadata):
        raise ValueError(_NOT_A_TENSOR.format(fqn))
    tiling, axes = tile_chunks(like.chunks if chunks is None else chunks), len(like.size)
    if len(tiling) and tiling.ndim != axes:
        text = f"`{fqn}` was saved with shape {list(like.size)}; chunks of {tiling.ndim} axes "
        raise ValueError(f"{text}do not fit it")
    offsets, sizes = (c.reshape(len(tiling), axes) for c in (tiling.offsets, tiling.sizes))
    return _cut(like, offsets, sizes, np.arange(len(tiling)), "chunk")


def _cut_of_plans(plans: Sequence[SavePlan], fqn: str) -> TensorCut:
    """Return how ranks hold a tensor."""
    items = [plan.items for plan in plans]
    named = [np.array([name == fqn for name in i.catalog.names], bool)[i.row] for i in items]
    rows = World(SavePlan(i.take(is_it)) for i, is_it in zip(items, named, strict=True)).rows
    if rows.issues:
        raise PlanError(rows.issues)
    if not rows.names:
        near = nearest_names(fqn, {name for plan in plans for name in plan.items.catalog.names})
        text = f"`{fqn}` is in none of the {len(plans):,} plans{nearest_hint(near)}"
        raise NotFoundError(text, near)
    if rows.prop[0] < 0:
        raise ValueError(_NOT_A_TENSOR.format(fqn))
    like, axes = TensorMetadata(rows.props[0], rows.shapes[0], ()), len(rows.shapes[0])
    return _cut(like, rows.offsets[:, :axes], rows.sizes[:, :axes], rows.rank, "rank")


def cut_by_writers(metadata: Metadata, writers: Writers | Plans | None, fqn: str) -> TensorCut:
    """Return how a saved tensor is cut, and who wrote each chunk, if that is known."""
    if not (writers is None or isinstance(writers, Writers)):
        return cut_of(writers, fqn)
    cut = cut_of(metadata, fqn)
    if writers is None:
        return cut
    if cut.like == writers.entries.get(fqn):
        who = writers.columns[writers.column[writers.entries.row_of[fqn]]]
    else:  # the writers of another checkpoint: look every chunk up
        chunks = cut.offsets[:, cut.lead :].tolist()
        who = np.array([writers[MetadataIndex(fqn, offset)] for offset in chunks], np.int64)
    return attrs.evolve(cut, who=who, unit="rank")


@attrs.frozen
class Plane:
    """The two axes of a tensor (with those put in front) that a picture shows."""

    axes: tuple[int, int]  # which axes run down and across
    lengths: tuple[int, int]  # how long they are, at least 1
    hidden: tuple[int, ...]  # other axes that are cut, too


def window_of(*cuts: TensorCut) -> Plane:
    """Choose the first two axes that any of the cuts cuts, or others if there are none."""
    plane = [max(1, *lengths) for lengths in zip(*(cut.plane for cut in cuts), strict=True)]
    offsets = np.concatenate([cut.offsets for cut in cuts])
    sliced = [a for a in range(len(plane)) if len(np.unique(offsets[:, a])) > 1]
    rest = [a for a in range(len(plane)) if a not in sliced]
    down, across = sorted([*sliced, *rest][:2])
    return Plane((down, across), (plane[down], plane[across]), tuple(sliced[2:]))


@attrs.frozen
class Cell:
    """One box of a picture, in elements of the plane."""

    top: int  # where it lies
    left: int
    height: int
    width: int
    holders: tuple[int, ...]  # whose it is: ranks or chunks, ascending
    sources: tuple[int, ...] = ()  # where it comes from, if that is shown, likewise
    chunks: int = 1  # how many chunks, or pieces of them, it stands for


def _cell(
    box: Sequence[int], holders: Iterable[int], sources: Iterable[int] = (), chunks: int = 1
) -> Cell:
    top, left, height, width = box
    ascending = tuple(sorted(set(holders))), tuple(sorted(set(sources)))
    return Cell(top, left, height, width, *ascending, chunks)


def seen(cut: TensorCut, window: Plane) -> list[Cell]:
    """Return the chunks as they are seen through a window, large ones first; empty ones are not."""
    axes = list(window.axes)
    boxes = np.hstack([cut.offsets[:, axes], cut.sizes[:, axes]])
    stacks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for box, who, chunk in zip(boxes.tolist(), cut.who.tolist(), cut.chunk.tolist(), strict=True):
        stacks.setdefault(tuple(box), []).append((who, chunk))
    cells = [
        _cell(box, [who for who, _ in rows], chunks=len({chunk for _, chunk in rows}))
        for box, rows in sorted(stacks.items())
        if box[2] and box[3]
    ]
    return sorted(cells, key=lambda cell: -cell.height * cell.width)


def meeting_cells(saved: Sequence[Cell], wanted: Sequence[Cell]) -> list[Cell] | None:
    """Return where saved cells meet wanted ones, by rows; None if there may be far too many."""
    if math.prod(len(edges) for edges in edges_of([*saved, *wanted])) > _PIECES:
        return None
    meet = overlap(_tile(saved), _tile(wanted))
    boxes = np.hstack([meet.offsets, meet.sizes]).tolist()
    rows = sorted(zip(boxes, meet.box.tolist(), meet.chunk.tolist(), strict=True))
    return [_cell(box, wanted[b].holders, saved[a].holders) for box, b, a in rows]


def merged(
    cells: Sequence[Cell], most: tuple[int, int], sources: Sequence[Cell] = ()
) -> list[Cell]:
    """Join cells so that at most some rows and columns remain: those between every n-th cut."""
    if not cells:
        return []
    cuts = []
    for edges, limit in zip(edges_of([*cells, *sources]), most, strict=True):
        last = len(edges) - 1  # first and last stay, the others are spread evenly
        count = -(-last // block(last, limit))
        cuts.append([edges[i * last // count] for i in range(count + 1)])
    grid = Grid(cuts)
    meet, origin = overlap(_tile(cells), grid), overlap(_tile(sources), grid)
    found = []
    for box in np.unique(meet.box).tolist():
        mine, theirs = (slice(*np.searchsorted(m.box, [box, box + 1])) for m in (meet, origin))
        here = [cells[i] for i in meet.chunk[mine].tolist()]
        there = [sources[i] for i in origin.chunk[theirs].tolist()]
        low = meet.offsets[mine].min(axis=0)
        size = (meet.offsets[mine] + meet.sizes[mine]).max(axis=0) - low
        count = sum(cell.chunks for cell in there or here)
        holders, origins = ([w for c in cs for w in c.holders] for cs in (here, there))
        found.append(_cell([*low.tolist(), *size.tolist()], holders, origins, count))
    return found


def _tile(cells: Sequence[Cell]) -> Tiling:
    rows = np.array([(c.top, c.left, c.height, c.width) for c in cells], np.int64).reshape(-1, 4)
    return tile(rows[:, :2], rows[:, 2:])


def edges_of(cells: Sequence[Cell]) -> tuple[list[int], list[int]]:
    """Return where cells begin and end, along both axes, ascending."""
    rows = {e for c in cells for e in (c.top, c.top + c.height)}
    columns = {e for c in cells for e in (c.left, c.left + c.width)}
    return sorted(rows), sorted(columns)


def fit(window: Plane, cells: Sequence[Cell], room: Size, least: float) -> Size:
    """Choose how large a tensor is drawn: to scale, unless its cells could then not be read."""
    rows, columns = window.lengths
    if rows == 1:
        return (room[0] if columns > 1 else min(room[0], 160.0)), min(room[1], 60.0)
    scale = min(room[0] / columns, room[1] / rows)
    tops, lefts = len({c.top for c in cells}), len({c.left for c in cells})
    width = max(columns * scale, least, min(room[0], 400.0, _WIDE * lefts))
    height = max(rows * scale, least, min(room[1], _HIGH * tops))
    return min(width, room[0]), min(height, room[1])


def readable(
    cells: Sequence[Cell] | None, size: Size, coarse: Sequence[Cell], sources: Sequence[Cell] = ()
) -> Sequence[Cell]:
    """Return cells as they are, or, if they would be too many or too small, others merged."""
    if cells is not None and len(cells) <= _CELLS:
        rows, columns = len({c.top for c in cells}), len({c.left for c in cells})
        if rows <= size[1] / _LOW and columns <= size[0] / _NARROW:
            return cells
    last = max((cell.holders[-1] for cell in coarse), default=0)
    short, wide = (max(_WIDE, width_of(words, 11) + 4) for words in (f"{last} …", f"{last}–{last}"))
    columns = len({cell.left for cell in coarse})
    if columns > size[0] / short:  # few columns, as of tensor parallelism, are not drawn together
        columns = max(1, int(size[0] / wide))
    return merged(coarse, (max(1, int(size[1] / _HIGH)), columns), sources)
