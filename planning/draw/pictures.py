"""Pictures of one tensor: how it is cut, and which saved chunk goes where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import attrs

from ..geometry.tilings import Chunk
from ..metadata import Metadata
from ..reports import Writers
from ..text import counted, human_bytes, runs_text
from . import svg
from .cells import (
    Cell,
    Plane,
    Plans,
    Size,
    TensorCut,
    cut_by_writers,
    cut_of,
    edges_of,
    fit,
    meeting_cells,
    readable,
    seen,
    window_of,
)
from .svg import MARGIN, Picture, rect, text, width_of

Colours = Mapping[int, str]


def draw_tiling(source: Metadata | Plans, fqn: str) -> Picture:
    """Draw how a tensor is cut, each chunk in the colour of the rank that holds it.

    Boxes are to scale along each axis, and both axes have the same scale unless the tensor is very
    long or thin. Of a tensor with more than two axes the first two that are cut are shown. Chunks
    too small to be read are drawn together, and the caption says how many.

    Args:
        source: One plan per rank, in rank order (what ranks hold, or, after `global_plan`, what
            they write), or a checkpoint's metadata, which knows the chunks but not the ranks.
        fqn: The tensor's name in the checkpoint.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, local_plan
    >>> sd, mesh = {"w": TensorSpec((6, 4), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> picture = draw_tiling([local_plan(sd, mesh=mesh, rank=r) for r in range(2)], "w")
    >>> picture
    Picture: w. Colour and number: the rank that holds each chunk.
    >>> str(picture).count('class="cell"')
    2

    Raises:
        NotFoundError: There is no such name; the nearest ones are listed.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is not a tensor.
    """
    cut = cut_of(source, fqn)
    window = window_of(cut)
    cells = seen(cut, window)
    size = fit(window, cells, (560, 320), 80)
    panel = _panel(cut, window, readable(cells, size, cells), size)
    left, above = panel.margins
    width = max(460.0, 2 * MARGIN + left + size[0])
    panel = attrs.evolve(panel, x=(width + left - size[0]) / 2, y=svg.TOP + above)
    colours = svg.colours_of(cell.holders[0] for cell in panel.cells)
    legend, bottom = _legend([panel], colours)
    whose = "Colour and number: the rank that holds each chunk."
    if cut.unit == "chunk":
        whose = "Colour and number: the chunk, in the order of the metadata."
    elif len(cut.who) > len(cut.tiling):
        whose += " Several numbers: each of these ranks holds a copy."
    caption = " ".join([whose, *_remarks(cut, window, size, panel.cells, len(cells))])
    body = "".join([*_drawn(panel, colours), *legend])
    return svg.card(fqn, _about(cut), body, caption, (width, bottom))


def draw_reshard(
    metadata: Metadata,
    wanted: Plans | Iterable[Chunk],
    fqn: str,
    writers: Writers | Plans | None = None,
) -> Picture:
    """Draw how a tensor was saved, how it is wanted, and, in between, the pieces that are read.

    A piece is where a saved chunk meets a wanted one. It has the colour of the saved chunk, and in
    it lies a field with the colour of the wanted one.

    Args:
        metadata: The checkpoint.
        wanted: One plan per rank, in rank order, or chunks of the tensor.
        fqn: The tensor's name in the checkpoint.
        writers: Who wrote: the plans that were written, one per rank, or the result of
            `writers_of`. Without them saved chunks are numbered and grey.

    >>> from shardplan.planning import TensorMetadata, TensorProperties
    >>> saved = [Chunk((0,), (3,)), Chunk((3,), (3,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), saved)})
    >>> draw_reshard(metadata, [Chunk((i,), (2,)) for i in (0, 2, 4)], "w")
    Picture: w, resharded. 2 saved chunks fill 3 wanted chunks in 4 pieces. Each piece ...

    Raises:
        NotFoundError: There is no such name; the nearest ones are listed.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is not a tensor, or has another number of axes than it was saved with.
    """
    saved, target = cut_by_writers(metadata, writers, fqn), cut_of(wanted, fqn, metadata)
    if len(saved.size) != len(target.size):
        words = f"`{fqn}` was saved with shape {list(saved.size)} and is wanted with "
        raise ValueError(f"{words}{list(target.size)}: another number of axes")
    window = window_of(saved, target)
    olds, news = seen(saved, window), seen(target, window)
    exact = meeting_cells(olds, news)
    # If no cut runs across, the panels lie below each other.
    stacked = all(cell.height == window.lengths[0] for cell in (*olds, *news))
    room = (640.0, 50.0) if stacked else (200.0, 300.0)
    size = fit(window, [*olds, *news], room, 46 if stacked else 120)
    old, between, new = panels = _placed(
        [
            _panel(saved, window, readable(olds, size, olds), size),
            _panel(target, window, readable(exact, size, news, olds), size),
            _panel(target, window, readable(news, size, news), size),
        ],
        size,
        stacked,
    )
    origins, goals = _two_colours(*panels)
    legend, bottom = _legend([old, new], goals)
    units = saved.unit, target.unit
    heads = "saved, by {0}", "pieces, {0} → {1}", "wanted, by {1}"
    places = [(panel.x, panel.y - panel.margins[1] - 2) for panel in panels]
    body = [
        *(
            text(*at, head.format(*units), font_size=12, font_weight=600, fill=svg.INK)
            for at, head in zip(places, heads, strict=True)
        ),
        *_drawn(old, origins),
        *_drawn_pieces(between, old.unit, origins, goals, stacked),
        *_drawn(new, goals),
        *legend,
    ]
    flow = _flow(saved, target, None if window.hidden else exact)
    remarks = _remarks(target, window, size, [*old.cells, *new.cells], len(olds + news))
    shape = f"{list(target.size)} in " if target.size != saved.size else ""
    about = f"{_about(saved)} → {shape}{_count(target)}"
    width = max(560.0, new.x + size[0] + MARGIN)
    caption = " ".join([flow, *remarks])
    return svg.card(f"{fqn}, resharded", about, "".join(body), caption, (width, bottom))


def _about(cut: TensorCut) -> str:
    """Describe a tensor in one line."""
    kind = cut.like.properties
    nbytes = human_bytes(math.prod(cut.size) * kind.itemsize)
    return f"{kind.dtype} {list(cut.size)} · {nbytes} · {_count(cut)}"


def _count(cut: TensorCut) -> str:
    """Count chunks and the ranks that hold them."""
    chunks = counted(len(cut.tiling), "chunk")
    ranks = len(set(cut.who.tolist()))
    return f"{chunks} on {counted(ranks, 'rank')}" if cut.unit == "rank" else chunks


def _flow(saved: TensorCut, wanted: TensorCut, exact: Sequence[Cell] | None) -> str:
    """Count the pieces, and explain their colours and labels."""
    total = "" if exact is None else f" in {counted(len(exact), 'piece')}"
    chunks = len(saved.tiling)
    origin = "rank that wrote it" if saved.unit == "rank" else "saved chunk it comes from"
    return (
        f"{counted(chunks, 'saved chunk')} {'fills' if chunks == 1 else 'fill'} "
        f"{counted(len(wanted.tiling), 'wanted chunk')}{total}. Each piece has the colour of the "
        f"{origin}, the field in it that of the {wanted.unit} that wants it."
    )


def _remarks(
    cut: TensorCut, window: Plane, size: Size, shown: Sequence[Cell], whole: int
) -> Iterable[str]:
    """Yield what a picture leaves out; ``whole`` counts the cells before any were joined."""
    if len(shown) < whole:
        most = counted(max(cell.chunks for cell in shown), "chunk")
        ranks = counted(max(len(cell.holders) for cell in shown), "rank")
        held = f", {ranks}" if cut.unit == "rank" else ""
        yield f"Neighbours are drawn together: each cell up to {most}{held}."
    if len(cut.size) > 2:
        axes, cuts = (" and ".join(map(str, a)) for a in (window.axes, window.hidden))
        behind = f"chunks cut along axis {cuts} lie behind each other"
        rest = behind if cuts else "no other axis is cut"
        yield f"Axes {axes} of {len(cut.size)} are shown; {rest}."
    rows, columns = window.lengths
    if rows > 1 and not math.isclose(size[0] / columns, size[1] / rows):
        yield "The axes do not have the same scale."
    if 0 in cut.size:
        yield "The tensor is empty."
    elif not cut.is_whole:
        yield "The chunks leave gaps or overlap."


def _named(who: Sequence[int], unit: str) -> str:
    """Name ranks or chunks in a few words."""
    return f"{unit}{'s' * (len(who) > 1)} {runs_text(who)}" if who else "nobody"


class Rect(NamedTuple):
    """A box on the paper, in pixels."""

    x: float
    y: float
    width: float
    height: float


@attrs.frozen
class Panel:
    """A tensor in a frame."""

    cells: Sequence[Cell]  # the cells that are drawn
    unit: str  # what the holders of cells are: `"rank"` or `"chunk"`
    shape: tuple[int, int]  # how many elements the tensor has down and across
    axes: tuple[int, int]  # the numbers of these axes; below 0 if the tensor has no such axis
    scale: Size  # pixels of one element, across and down
    x: float = 0.0  # where its upper left corner lies
    y: float = 0.0

    @property
    def margins(self) -> Size:
        """How much room the cuts need to the left and above."""
        left = 32 + width_of(f"{self.shape[0]:,}", 11) if self.axes[0] >= 0 else 0.0
        return left, 40.0 if self.axes[1] >= 0 else 6.0

    def place(self, cell: Cell) -> Rect:
        """Return where a cell is drawn."""
        wide, high = self.scale
        x, y = self.x + cell.left * wide, self.y + cell.top * high
        return Rect(x, y, cell.width * wide, cell.height * high)


def _panel(cut: TensorCut, window: Plane, cells: Sequence[Cell], size: Size) -> Panel:
    down, across = window.axes
    shape = cut.plane[down], cut.plane[across]
    scale = size[0] / window.lengths[1], size[1] / window.lengths[0]
    return Panel(cells, cut.unit, shape, (down - cut.lead, across - cut.lead), scale)


def _placed(panels: Iterable[Panel], size: Size, stacked: bool) -> list[Panel]:
    """Place panels below or beside each other."""
    x, y, placed = MARGIN, svg.TOP + 18, []
    for panel in panels:
        left, above = panel.margins
        placed.append(attrs.evolve(panel, x=x + left, y=y + above))
        x, y = (x, y + above + size[1] + 30) if stacked else (x + left + size[0] + 14, y)
    return placed


def _drawn(panel: Panel, colours: Colours) -> Iterable[str]:
    """Draw the cells, each in the colour of its first holder, and the cuts."""
    yield from _frame(panel)
    for cell, words in zip(panel.cells, _labels(panel), strict=True):
        place, fill = panel.place(cell), colours[cell.holders[0]]
        yield _box(place, fill, "cell", _tip(panel, cell))
        yield _centred(place, words, fill, 11)


def _drawn_pieces(
    panel: Panel, origin: str, origins: Colours, goals: Colours, stacked: bool
) -> Iterable[str]:
    """Draw pieces in the colour they come from; a field in each has the colour it goes to."""
    yield from _frame(panel)
    for cell in panel.cells:
        place = panel.place(cell)
        came = origins[cell.sources[0]] if cell.sources else svg.EMPTY
        goes = goals[cell.holders[0]]
        yield _box(place, came, "piece", _tip(panel, cell, origin))
        width, height = (
            (place.width, place.height / 2) if stacked else (place.width / 2, place.height)
        )
        left, top = place.x + place.width - width, place.y + place.height - height
        inset = min(2.0, 0.05 * min(place.width, place.height))  # leave room for a label
        field = Rect(left + inset, top + inset, width - 2 * inset, height - 2 * inset)
        yield _box(field, goes, "field")
        halves = Rect(place.x, place.y, width, height), Rect(left, top, width, height)
        for half, who, fill in zip(halves, (cell.sources, cell.holders), (came, goes), strict=True):
            words = _fitting((runs_text(who), f"{who[0]}…"), half, 10) if who else ""
            yield _centred(half, words, fill, 10)


def _box(place: Rect, fill: str, kind: str, tip: str = "") -> str:
    """Draw a box with a white outline that never hides it."""
    outline = min(1.5, 0.2 * min(place.width, place.height))
    return rect(*place, fill, tip, class_=kind, stroke=svg.PAPER, stroke_width=outline)


def _centred(place: Rect, words: str, fill: str, size: float) -> str:
    """Write words, if any, in the middle of a box of some colour."""
    x, y = place.x + place.width / 2, place.y + place.height / 2 + size * 0.36
    return words and svg.middle(x, y, words, svg.ink_on(fill), font_size=size)


def _labels(panel: Panel) -> list[str]:
    """Return the longest label that fits each cell; none at all if most cells have no room."""
    found = []
    for cell in panel.cells:
        who, first = cell.holders, f"{cell.holders[0]} …"
        words = _named(who, panel.unit), runs_text(who), f"{first} {who[-1]}", first
        found.append(_fitting(words, panel.place(cell), 11))
    return found if 2 * sum(map(bool, found)) > len(found) else [""] * len(found)


def _fitting(choices: Iterable[str], place: Rect, size: float) -> str:
    """Return the first of some words that fits a box, or nothing."""
    if place.height < size:
        return ""
    return next((words for words in choices if width_of(words, size) <= place.width - 4), "")


def _tip(panel: Panel, cell: Cell, origin: str = "") -> str:
    """Describe a cell in one line; a piece also by the unit of where it comes from."""
    sides = zip((cell.top, cell.left), (cell.height, cell.width), panel.axes, strict=True)
    box = ", ".join(f"{low}:{low + n}" for low, n, axis in sides if axis >= 0)
    count = "" if cell.chunks == 1 else f"{cell.chunks:,} chunks, "
    source = f"{_named(cell.sources, origin)} → " if origin else ""
    return f"{source}{_named(cell.holders, panel.unit)}: {count}[{box}]"


def _frame(panel: Panel) -> Iterable[str]:
    """Draw the tensor, which shows wherever no chunk is, and write where it is cut."""
    (rows, columns), (wide, high), (x, y) = panel.shape, panel.scale, (panel.x, panel.y)
    yield rect(x, y, (columns or 1) * wide, (rows or 1) * high, svg.EMPTY, stroke=svg.EDGE)
    tops, lefts = edges_of(panel.cells)
    if panel.axes[0] >= 0:
        cuts = sorted({0, rows, *tops})
        places = [y + cut * high for cut in cuts]
        for at in places:
            yield svg.line(x - 5, at, x - 1, at, svg.MUTED)
        for i in svg.thin(places, 13):
            yield text(x - 9, places[i] + 4, f"{cuts[i]:,}", anchor="end", fill=svg.INK)
        yield svg.upright(x + 14 - panel.margins[0], y + rows * high / 2, f"axis {panel.axes[0]}")
    if panel.axes[1] >= 0:
        cuts = sorted({0, columns, *lefts})
        places = [x + cut * wide for cut in cuts]
        for at in places:
            yield svg.line(at, y - 5, at, y - 1, svg.MUTED)
        half = [max(0.0, width_of(f"{cut:,}", 11) / 2 - 4) for cut in (cuts[0], cuts[-1])]
        places[0], places[-1] = places[0] + half[0], places[-1] - half[1]  # not beside the frame
        for i in svg.thin(places, width_of(f"{cuts[-1]:,}", 11) + 8):
            yield svg.middle(places[i], y - 9, f"{cuts[i]:,}", svg.INK)
        yield svg.middle(x + columns * wide / 2, y - 26, f"axis {panel.axes[1]}", svg.MUTED)


def _two_colours(saved: Panel, between: Panel, wanted: Panel) -> tuple[Colours, Colours]:
    """Return the colours of saved and of wanted chunks: one rank has one, on both sides."""
    origins = {c.holders[0] for c in saved.cells}
    origins |= {c.sources[0] for c in between.cells if c.sources}
    goals = {c.holders[0] for c in (*between.cells, *wanted.cells)}
    if saved.unit == "chunk":
        return {key: svg.GREYS[key % 2] for key in origins}, svg.colours_of(goals)
    colours = svg.colours_of(goals | origins)
    return colours, colours


def _legend(panels: Sequence[Panel], colours: Colours) -> tuple[list[str], float]:
    """Draw a bar of all colours if cells lack a label; return also how far down all reaches."""
    bottom = max(p.y + (p.shape[0] or 1) * p.scale[1] for p in panels) + 12
    keys = list(colours)
    if not keys or all(words for panel in panels for words in _labels(panel)):
        return [], bottom
    first, last = (f"{panels[-1].unit} {key}" for key in (keys[0], keys[-1]))
    start, count, y = MARGIN + width_of(first, 11) + 6, min(24, len(keys)), bottom + 6
    steps = [keys[i * (len(keys) - 1) // max(1, count - 1)] for i in range(count)]
    wide = 144 / count
    bars = [rect(start + wide * i, y, wide + 0.2, 12, colours[k]) for i, k in enumerate(steps)]
    ends = (MARGIN, first), (start + 152, last)
    return [*bars, *(text(x, y + 10, words, fill=svg.INK) for x, words in ends)], bottom + 26
