"""Pictures of one tensor: how it is cut, and which saved chunk goes where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import attrs

from ..geometry.tilings import Chunk
from ..mesh.worlds import WorldPlans
from ..metadata import Metadata, TensorMetadata
from ..plans import SavePlan
from ..reports import Writers
from ..text import counted, human_bytes, runs_text
from .panels import (
    Colours,
    Panel,
    colours_of,
    draw_box,
    draw_label,
    draw_legend,
    fit,
    fits,
    readable,
)
from .svg import EMPTY, GREYS, INK, MARGIN, PAPER, TOP, Picture, card, rect, text
from .tensors import Cell, Cut, Plans, Window, cut_by_writers, cut_of, cut_of_chunks, pieces, seen

__all__ = ["draw_reshard", "draw_tiling"]


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
    window = Window.of(cut)
    cells = seen(cut, window)
    size = fit(window, cells, (560, 320), 80)
    panel = Panel(cut, window, readable(cells, size, cells), size)
    left, above = panel.margins
    width = max(460.0, 2 * MARGIN + left + size[0])
    x = left + (width - left - size[0]) / 2 if left else MARGIN
    panel = attrs.evolve(panel, x=x, y=TOP + above)
    colours = colours_of(cell.holders[0] for cell in panel.cells)
    body, bottom = _drawn([panel.draw(colours)], [panel], colours)
    whose = "Colour and number: the rank that holds each chunk."
    if cut.unit == "chunk":
        whose = "Colour and number: the chunk, in the order of the metadata."
    elif len(cut.who) > len(cut.tiling):
        whose += " Several numbers: each of these ranks holds a copy."
    caption = " ".join([whose, *panel.remarks(len(cells), panel.cells)])
    return card(fqn, _about(cut), body, caption, (width, bottom))


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

    >>> from shardplan.planning import TensorProperties
    >>> saved = [Chunk((0,), (3,)), Chunk((3,), (3,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), saved)})
    >>> draw_reshard(metadata, [Chunk((i,), (2,)) for i in (0, 2, 4)], "w")
    Picture: w, resharded. 2 saved chunks fill 3 wanted chunks in 4 pieces. Each piece ...

    Raises:
        NotFoundError: There is no such name; the nearest ones are listed.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is not a tensor, or has another number of axes than it was saved with.
    """
    saved, target = cut_by_writers(metadata, writers, fqn), _wanted(metadata, wanted, fqn)
    if len(saved.size) != len(target.size):
        words = f"`{fqn}` was saved with shape {list(saved.size)} and is wanted with "
        raise ValueError(f"{words}{list(target.size)}: another number of axes")
    window = Window.of(saved, target)
    olds, news = seen(saved, window), seen(target, window)
    exact = pieces(olds, news)
    # If no cut runs across, the panels lie below each other.
    stacked = all(cell.height == window.lengths[0] for cell in (*olds, *news))
    room = (640.0, 50.0) if stacked else (200.0, 300.0)
    size = fit(window, [*olds, *news], room, 46 if stacked else 120)
    smaller = attrs.evolve(target, size=min(saved.size, target.size, key=math.prod))
    panels = _placed(
        Panel(saved, window, readable(olds, size, olds), size),
        Panel(smaller, window, readable(exact, size, news, olds), size),
        Panel(target, window, readable(news, size, news), size),
        stacked,
    )
    goals, origins = _colours(*panels)
    between = _between(panels[1], saved.unit, origins, goals, stacked)
    parts = [panels[0].draw(origins), between, panels[2].draw(goals), _headings(panels)]
    body, bottom = _drawn(parts, (panels[0], panels[2]), goals)
    shown = [*panels[0].cells, *panels[2].cells]
    count = None if exact is None or window.hidden else len(exact)
    caption = " ".join([_flow(saved, target, count), *panels[2].remarks(len(olds + news), shown)])
    shape = f"{list(target.size)} in " if target.size != saved.size else ""
    about = f"{_about(saved)} → {shape}{_count(target)}"
    width = max(560.0, panels[2].x + size[0] + MARGIN)
    return card(f"{fqn}, resharded", about, body, caption, (width, bottom))


def _wanted(metadata: Metadata, wanted: Plans | Iterable[Chunk], fqn: str) -> Cut:
    """Return how plans or chunks cut the tensor."""
    if isinstance(wanted, (SavePlan, WorldPlans)):
        return cut_of(wanted, fqn)
    given, entry = tuple(wanted), metadata.entry(fqn)
    plans = [plan for plan in given if isinstance(plan, SavePlan)]
    if plans or not isinstance(entry, TensorMetadata):
        return cut_of(plans, fqn)
    return cut_of_chunks(cast(tuple[Chunk, ...], given), fqn, entry)


def _placed(saved: Panel, between: Panel, wanted: Panel, stacked: bool) -> list[Panel]:
    """Place three panels below or beside each other."""
    x, y, panels = MARGIN, TOP + 18 + saved.margins[1], []
    for panel in (saved, between, wanted):
        left, above = panel.margins
        panels.append(attrs.evolve(panel, x=x + left, y=y))
        x, y = (
            (x, y + panel.size[1] + above + 30) if stacked else (x + left + panel.size[0] + 14, y)
        )
    return panels


def _headings(panels: Sequence[Panel]) -> list[str]:
    saved, _, wanted = panels
    units = saved.cut.unit, wanted.cut.unit
    words = f"saved, by {units[0]}", f"pieces, {units[0]} → {units[1]}", f"wanted, by {units[1]}"
    return [
        text(p.x, p.y - p.margins[1] - 2, heading, font_size=12, font_weight=600, fill=INK)
        for p, heading in zip(panels, words, strict=True)
    ]


def _colours(saved: Panel, between: Panel, wanted: Panel) -> tuple[Colours, Colours]:
    """Return the colours of wanted and of saved chunks: one rank has one, on both sides."""
    origins = {c.holders[0] for c in saved.cells} | {
        c.sources[0] for c in between.cells if c.sources
    }
    goals = {c.holders[0] for c in (*between.cells, *wanted.cells)}
    if saved.cut.unit == "chunk":
        return colours_of(goals), {key: GREYS[key % 2] for key in origins}
    colours = colours_of(goals | origins)
    return colours, colours


def _between(
    panel: Panel, origin: str, origins: Colours, goals: Colours, stacked: bool
) -> list[str]:
    """Draw pieces in the colour they come from; a field in each has the colour it goes to."""
    drawn = [panel.paper()]
    labels = [_words(cell, _half(panel, cell, stacked)) for cell in panel.cells]
    if 2 * sum(bool(origin) for origin, _ in labels) <= len(labels):
        labels = [("", "")] * len(labels)
    for cell, words in zip(panel.cells, labels, strict=True):
        x, y, width, height = panel.place(cell)
        fills = origins[cell.sources[0]] if cell.sources else EMPTY, goals[cell.holders[0]]
        drawn.append(draw_box(x, y, width, height, fills[0], panel.tip(cell, origin), "piece"))
        room = _half(panel, cell, stacked)
        inset = min(3.0, 0.08 * min(width, height))  # a thin field still has room for its label
        left, top = x + width - room[0], y + height - room[1]
        if stacked:
            field = x + inset, top, width - 2 * inset, room[1] - inset
        else:
            field = left, y + inset, room[0] - inset, height - 2 * inset
        drawn.append(
            rect(
                *field,
                fills[1],
                class_="field",
                rx=inset,
                stroke=PAPER,
                stroke_width=min(1.0, 0.8 * inset),
            )
        )
        middles = (x + room[0] / 2, y + room[1] / 2), (left + room[0] / 2, top + room[1] / 2)
        for middle, word, fill in zip(middles, words, fills, strict=True):
            drawn.append(draw_label(*middle, word, fill, 10))
    return [*drawn, *panel.ticks()]


def _half(panel: Panel, cell: Cell, stacked: bool) -> tuple[float, float]:
    """Return how wide and high half of a piece is."""
    _, _, width, height = panel.place(cell)
    return (width, height / 2) if stacked else (width / 2, height)


def _words(cell: Cell, room: tuple[float, float]) -> tuple[str, str]:
    """Return where a piece comes from and goes to, if both fit its halves."""
    if cell.sources:
        for short in (runs_text, _first):
            words = short(cell.sources), short(cell.holders)
            if all(fits(word, room, 10) for word in words):
                return words
    return "", ""


def _first(who: Sequence[int]) -> str:
    return f"{who[0]}…" if len(who) > 1 else str(who[0])


def _drawn(
    parts: Iterable[Iterable[str]], panels: Sequence[Panel], colours: Colours
) -> tuple[str, float]:
    """Join what is drawn, with a legend if cells have no label; return also how far it reaches."""
    body, bottom = "".join(map("".join, parts)), panels[-1].bottom + 12
    if all(words for panel in panels for words in panel.labels()):
        return body, bottom
    legend = draw_legend(colours, panels[-1].cut.unit, MARGIN, bottom + 6)
    return body + "".join(legend), bottom + 26


def _about(cut: Cut) -> str:
    """Describe a tensor in one line."""
    nbytes = human_bytes(math.prod(cut.size) * cut.properties.itemsize)
    return f"{cut.properties.dtype} {list(cut.size)} · {nbytes} · {_count(cut)}"


def _count(cut: Cut) -> str:
    """Count chunks and the ranks that hold them."""
    chunks = counted(len(cut.tiling), "chunk")
    ranks = len(set(cut.who.tolist()))
    return f"{chunks} on {counted(ranks, 'rank')}" if cut.unit == "rank" else chunks


def _flow(saved: Cut, wanted: Cut, count: int | None) -> str:
    """Count the pieces, and explain their colours and labels."""
    total = "" if count is None else f" in {counted(count, 'piece')}"
    chunks = len(saved.tiling)
    origin = "rank that wrote it" if saved.unit == "rank" else "saved chunk it comes from"
    return (
        f"{counted(chunks, 'saved chunk')} {'fills' if chunks == 1 else 'fill'} "
        f"{counted(len(wanted.tiling), 'wanted chunk')}{total}. Each piece has the colour of the "
        f"{origin}, the field in it that of the {wanted.unit} that wants it."
    )
