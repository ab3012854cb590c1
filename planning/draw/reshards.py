"""Show me: which saved chunk goes where?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from ..metadata import Metadata, TensorMetadata
from ..records import SavePlan
from ..reports.writers import Writers
from ..text import counted
from ..tiling import Chunk
from ..topology import WorldPlans
from .captions import about, remarks, tip_of
from .cells import (
    Cell,
    Cut,
    Plans,
    Window,
    cut_by_writers,
    cut_of,
    cut_of_chunks,
    merged,
    pieces,
    seen,
)
from .panels import (
    Colours,
    Frame,
    Label,
    Side,
    are_readable,
    are_told,
    colours_of,
    draw_axes,
    draw_box,
    draw_legend,
    draw_paper,
    draw_word,
    fit,
    fits,
    gutter,
    head,
    is_to_scale,
    labels_of,
    most_cells,
    outline,
    readable,
)
from .svg import (
    EMPTY,
    GREYS,
    INK,
    MARGIN,
    PAPER,
    TOP,
    Picture,
    card,
    rect,
    runs_text,
    text,
)

__all__ = ["draw_reshard"]


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
        writers: Who wrote: the plans that were written, one per rank, or what `writers_of` makes
            of them. Without them saved chunks are numbered and grey.

    >>> from shardplan.planning import TensorProperties
    >>> saved = [Chunk((0,), (3,)), Chunk((3,), (3,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), saved)})
    >>> draw_reshard(metadata, [Chunk((i,), (2,)) for i in (0, 2, 4)], "w")
    Picture: w, resharded. 2 saved chunks fill 3 wanted chunks in 4 pieces. Each piece ...

    Raises:
        NotFoundError: There is no such name; the nearest ones are told.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is no tensor, or has another number of axes than it was saved with.
    """
    saved = cut_of(metadata, fqn) if writers is None else cut_by_writers(metadata, writers, fqn)
    target = _wanted(metadata, wanted, fqn)
    if len(saved.size) != len(target.size):
        raise ValueError(
            f"`{fqn}` was saved with shape {list(saved.size)} and is wanted with "
            f"{list(target.size)}: another number of axes"
        )
    view = _Reshard.of(saved, target)
    body, bottom = view.drawn()
    told = " ".join([view.flow(), *view.remarks()])
    return card(f"{fqn}, resharded", about(saved, target), body, told, (view.width, bottom))


def _wanted(metadata: Metadata, wanted: Plans | Iterable[Chunk], fqn: str) -> Cut:
    """Tell plans from chunks."""
    entry = metadata.entry(fqn)
    if isinstance(wanted, (SavePlan, WorldPlans)):
        return cut_of(wanted, fqn)
    plans, chunks = [], []
    for one in wanted:
        if isinstance(one, SavePlan):
            plans.append(one)
        else:
            chunks.append(one)
    if plans or not isinstance(entry, TensorMetadata):
        return cut_of(plans, fqn)
    return cut_of_chunks(chunks, fqn, entry)


@attrs.frozen(eq=False)
class _Reshard:
    """Saved, pieces and wanted: what is shown of each, and where.

    Attributes:
        saved, wanted: How the tensor was cut, and is to be.
        window: The plane that is shown.
        exact: All pieces, where they are few enough to be listed.
        whole: How many cells saved and wanted have before any are drawn together.
        shown: The cells of each panel.
        frames: Where each panel lies.
        stacked: Whether panels lie below each other, because all cuts run down.
        width: How wide the card is.
    """

    saved: Cut
    wanted: Cut
    window: Window
    exact: list[Cell] | None
    whole: int
    shown: tuple[list[Cell], list[Cell], list[Cell]]
    frames: tuple[Frame, ...]
    stacked: bool
    width: float

    @classmethod
    def of(cls, saved: Cut, wanted: Cut) -> _Reshard:
        """Choose what to show, and where."""
        window = Window.of(saved, wanted)
        olds, news = seen(saved, window), seen(wanted, window)
        exact = pieces(saved, wanted, window)
        stacked = all(cell.height == window.lengths[0] for cell in (*olds, *news))
        room = (640.0, 50.0) if stacked else (200.0, 300.0)
        size = fit(window, [*olds, *news], room, 46 if stacked else 120)
        if exact is None or not are_readable(exact, size):
            between = merged(news, most_cells(news, size), olds)
        else:
            between = exact
        shown = readable(olds, size), between, readable(news, size)
        sides = gutter(saved, window, shown[0]), gutter(wanted, window, shown[2])
        top = TOP + head(saved, window) + 18
        frames, width = _place(size, window, sides, top, stacked)
        whole = len(olds) + len(news)
        return cls(saved, wanted, window, exact, whole, shown, frames, stacked, width)

    def drawn(self) -> tuple[str, float]:
        """Draw the three panels; return also how far down they reach."""
        goals, origins = self._colours()
        labels = [
            labels_of(self.shown[at], self.frames[at], cut.unit)
            for at, cut in ((0, self.saved), (2, self.wanted))
        ]
        body = [
            *self._side(0, self.saved, origins, labels[0], {"left": True, "top": True}),
            *self._between(origins, goals),
            *self._side(2, self.wanted, goals, labels[1], {"right": True, "top": False}),
        ]
        bottom = self.frames[-1].bottom + 12
        if not all(words for side in labels for words, _ in side):
            right = self.width - MARGIN
            legend, bottom = draw_legend(goals, self.wanted.unit, MARGIN, bottom + 6, right)
            body += legend
        return "".join(body), bottom

    def _colours(self) -> tuple[Colours, Colours]:
        """Return the colours of wanted and of saved chunks: one rank has one, on both sides."""
        olds, between, news = self.shown
        origins = {c.holders[0] for c in olds} | {c.sources[0] for c in between if c.sources}
        goals = {c.holders[0] for c in (*between, *news)}
        if self.saved.unit == "chunk":
            return colours_of(goals), {key: GREYS[key % 2] for key in origins}
        colours = colours_of(goals | origins)
        return colours, colours

    def _side(
        self,
        at: int,
        cut: Cut,
        colours: Colours,
        labels: Sequence[Label],
        sides: Mapping[Side, bool],
    ) -> list[str]:
        """Draw what was saved, or what is wanted."""
        frame, cells = self.frames[at], self.shown[at]
        return [
            self._heading(at, f"{'wanted' if at else 'saved'}, by {cut.unit}"),
            draw_paper(frame, self.window.of_shape(cut.plane)),
            *(
                draw_box(c, frame, colours[c.holders[0]], label, tip_of(c, cut, self.window))
                for c, label in zip(cells, labels, strict=True)
            ),
            *draw_axes(frame, cells, cut, self.window, sides),
        ]

    def _between(self, origins: Colours, goals: Colours) -> list[str]:
        """Draw the pieces."""
        frame, cells = self.frames[1], self.shown[1]
        small = min(self.saved, self.wanted, key=lambda cut: math.prod(cut.size))
        drawn = [
            self._heading(1, f"pieces, {self.saved.unit} → {self.wanted.unit}"),
            draw_paper(frame, self.window.of_shape(small.plane)),
        ]
        words = [_words(cell, frame, self.stacked) for cell in cells]
        if not are_told(cells, words):
            words = [()] * len(cells)
        for cell, labels in zip(cells, words, strict=True):
            origin = origins[cell.sources[0]] if cell.sources else EMPTY
            fills = origin, goals[cell.holders[0]]
            tip = tip_of(cell, self.wanted, self.window, self.saved)
            drawn.append(_piece(frame.place(cell), fills, labels, tip, self.stacked))
        return [*drawn, *draw_axes(frame, cells, self.wanted, self.window, {"top": False})]

    def _heading(self, at: int, words: str) -> str:
        frame = self.frames[at]
        above = _TICKS if self.stacked and at else head(self.saved, self.window)
        x, anchor = (frame.x, "start") if self.stacked else (frame.x + frame.width / 2, "middle")
        bold = {"font_size": 12, "font_weight": 600}
        return text(x, frame.y - above - 2, words, anchor=anchor, fill=INK, **bold)

    def flow(self) -> str:
        """Say how many pieces there are and what their colours mean."""
        saved, wanted = (len(cut.tiling) for cut in (self.saved, self.wanted))
        total = None if self.exact is None else sum(cell.chunks for cell in self.exact)
        count = "" if total is None else f" in {counted(total, 'piece')}"
        by_rank = self.saved.unit == "rank"
        origin = "the rank that wrote it" if by_rank else "the saved chunk it comes from"
        goal = f"the {self.wanted.unit} that wants it"
        return (
            f"{counted(saved, 'saved chunk')} {'fills' if saved == 1 else 'fill'} "
            f"{counted(wanted, 'wanted chunk')}{count}. "
            f"Each piece has the colour of {origin}, the field in it that of {goal}."
        )

    def remarks(self) -> list[str]:
        """Say in which ways the picture is not the whole truth."""
        shown = [*self.shown[0], *self.shown[2]]
        to_scale = is_to_scale(self.window, (self.frames[0].width, self.frames[0].height))
        told = remarks(self.wanted, self.window, self.whole, shown, to_scale)
        words = (_words(cell, self.frames[1], self.stacked) for cell in self.shown[1])
        short = next((word for labels in words for word, _ in labels if word.endswith("…")), "")
        unit = self.wanted.unit
        return [*told, *([f"“{short}” is {unit} {short[:-1]} and others."] if short else [])]


_TICKS: Final = 24.0  # above a frame whose axis is not named again


def _place(
    size: tuple[float, float],
    window: Window,
    sides: tuple[float, float],
    top: float,
    stacked: bool,
) -> tuple[tuple[Frame, ...], float]:
    """Place three panels below or beside each other; return also how wide the card is."""
    x = MARGIN + sides[0]
    if stacked:
        places = [(x, top + i * (size[1] + _TICKS + 30)) for i in range(3)]
        width = x + size[0] + sides[1] + MARGIN
    else:
        gap = max(26.0, (560 - sum(sides) - 3 * size[0]) / 2)
        places = [(x + i * (size[0] + gap), top) for i in range(3)]
        width = places[2][0] + size[0] + sides[1] + MARGIN
    frames = tuple(Frame(x, y, *size, window.lengths) for x, y in places)
    return frames, max(560.0, width)


def _words(cell: Cell, frame: Frame, stacked: bool) -> tuple[Label, ...]:
    """Return where a piece comes from and goes to, if both can be written into it."""
    width, height = frame.place(cell)[2:]
    room = (width - 3, height / 2) if stacked else (width / 2 - 3, height)
    both = [who for who in (cell.sources, cell.holders) if who]
    for words, size in ((runs_text, 12.0), (runs_text, 10.0), (_first, 10.0), (_first, 9.0)):
        labels = tuple((words(who), size) for who in both)
        if len(labels) == 2 and all(fits(label, *room) for label in labels):
            return labels
    return ()


def _first(who: Sequence[int]) -> str:
    return f"{who[0]}…" if len(who) > 1 else str(who[0])


def _piece(
    place: tuple[float, float, float, float],
    fills: tuple[str, str],
    labels: tuple[Label, ...],
    tip: str,
    stacked: bool,
) -> str:
    """Draw a piece in the colour it comes from; a field in it has the colour it goes to."""
    x, y, width, height = place
    whole = rect(x, y, width, height, fills[0], tip, class_="piece", **outline(width, height))
    inset = min(3.0, 0.08 * min(width, height))  # a thin field still has room for its label
    if stacked:
        half = height / 2
        field = x + inset, y + half, width - 2 * inset, half - inset
        first = x + width / 2, y + half / 2 + inset / 2
    else:
        half = width / 2
        field = x + half, y + inset, half - inset, height - 2 * inset
        first = x + half / 2, y + height / 2
    left, top, wide, high = field
    thin = min(1.0, 0.8 * inset)
    inner = rect(
        left, top, wide, high, fills[1], class_="field", rx=inset, stroke=PAPER, stroke_width=thin
    )
    drawn = [whole, inner]
    second = left + wide / 2, top + high / 2
    for middle, label, fill in zip((first, second), labels, fills, strict=False):
        drawn.append(draw_word(*middle, label, fill))
    return "".join(drawn)
