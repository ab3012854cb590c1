"""How is a tensor put on paper? Frames, coloured boxes, labels that fit, cuts along the sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import attrs

from .captions import named
from .cells import Cell, Cut, Window, merged
from .svg import (
    EDGE,
    EMPTY,
    INK,
    MUTED,
    PALETTE,
    PAPER,
    ink_on,
    line,
    ramp,
    rect,
    runs_text,
    text,
    thin,
    width_of,
)

__all__ = ["Colours", "Frame", "Side", "colours_of", "draw_axes", "draw_box", "draw_legend"]

Colours = Mapping[int, str]
Side = Literal["left", "right", "top"]
Size = tuple[float, float]
Label = tuple[str, float]  # the words, and the size of their font

_WIDE, _HIGH = 44.0, 14.0  # room for a short label
_NARROW, _LOW = 12.0, 11.0  # less cannot be told apart
_CELLS: Final = 400  # more would be neither read nor few bytes


@attrs.frozen
class Frame:
    """Where a tensor is drawn, in pixels, and how many elements lie along its sides."""

    x: float
    y: float
    width: float
    height: float
    lengths: tuple[int, int]

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height

    def down(self, element: int) -> float:
        """Return where an element of the first axis begins."""
        return self.y + self.height * element / max(1, self.lengths[0])

    def across(self, element: int) -> float:
        """Return where an element of the second axis begins."""
        return self.x + self.width * element / max(1, self.lengths[1])

    def place(self, cell: Cell) -> tuple[float, float, float, float]:
        """Return x, y, width and height of a cell."""
        x, y = self.across(cell.left), self.down(cell.top)
        right, bottom = self.across(cell.left + cell.width), self.down(cell.top + cell.height)
        return x, y, right - x, bottom - y


def fit(window: Window, cells: Sequence[Cell], room: Size, least: float) -> Size:
    """Choose how large a tensor is drawn: to scale, unless its cells could then not be read.

    Args:
        window: The plane that is shown.
        cells: What will be drawn on it.
        room: The largest width and height.
        least: How short a side may become.
    """
    rows, columns = (max(1, n) for n in window.lengths)
    if rows == 1:
        return (room[0] if columns > 1 else min(room[0], 160.0)), min(room[1], 60.0)
    scale = min(room[0] / columns, room[1] / rows)
    tops, lefts = len({c.top for c in cells}), len({c.left for c in cells})
    width = max(columns * scale, least, min(room[0], 400.0, _WIDE * lefts))
    height = max(rows * scale, least, min(room[1], _HIGH * tops))
    return min(width, room[0]), min(height, room[1])


def is_to_scale(window: Window, size: Size) -> bool:
    """Tell whether both axes have the same scale; one alone always has."""
    rows, columns = (max(1, n) for n in window.lengths)
    return rows == 1 or math.isclose(size[0] / columns, size[1] / rows)


def most_cells(cells: Sequence[Cell], size: Size) -> tuple[int, int]:
    """Return how many rows and columns leave room for a label in each cell.

    Columns that all have room for a short one stay: few are cut on purpose, as by tensor
    parallelism, and what lies on both sides of such a cut has little to do with each other.
    """
    last = max((cell.holders[-1] for cell in cells), default=0)
    wide, short = (max(_WIDE, width_of(w, 10) + 8) for w in (f"{last}–{last}", f"{last} …"))
    columns = len({cell.left for cell in cells})
    most = columns if columns <= size[0] / short else int(size[0] / wide)
    return max(1, int(size[1] / _HIGH)), max(1, most)


def are_readable(cells: Sequence[Cell], size: Size) -> bool:
    """Tell whether cells are large and few enough to be drawn one by one."""
    rows, columns = len({c.top for c in cells}), len({c.left for c in cells})
    return rows <= size[1] / _LOW and columns <= size[0] / _NARROW and len(cells) <= _CELLS


def readable(cells: Sequence[Cell], size: Size) -> list[Cell]:
    """Return cells as they are, or merged where they would be too small."""
    return list(cells) if are_readable(cells, size) else merged(cells, most_cells(cells, size))


def gutter(cut: Cut, window: Window, cells: Sequence[Cell]) -> float:
    """Return how much room the cuts of the first axis need beside a frame."""
    if window.axes[0] < cut.lead:
        return 0.0
    last = max((cell.top + cell.height for cell in cells), default=0)
    return 32 + width_of(f"{last:,}", 11)


def head(cut: Cut, window: Window) -> float:
    """Return how much room the cuts of the second axis need above a frame."""
    return 40.0 if window.axes[1] >= cut.lead else 6.0


def colours_of(keys: Iterable[int]) -> Colours:
    """Give each rank its own colour of the palette, or, if there are many, its place on a ramp.

    >>> colours_of([0, 2]), colours_of([8, 16])
    ({0: '#0072b2', 2: '#009e73'}, {8: '#0072b2', 16: '#e69f00'})
    """
    known = sorted(set(keys))
    if not known or known[-1] < len(PALETTE):
        return {key: PALETTE[key] for key in known}
    if len(known) <= len(PALETTE):
        return dict(zip(known, PALETTE, strict=False))
    return {key: ramp(i / (len(known) - 1)) for i, key in enumerate(known)}


def draw_paper(frame: Frame, lengths: tuple[int, int]) -> str:
    """Draw the tensor itself, which shows wherever no chunk is."""
    bottom, right = (n or frame.lengths[i] or 1 for i, n in enumerate(lengths))
    size = frame.across(right) - frame.x, frame.down(bottom) - frame.y
    return rect(frame.x, frame.y, *size, EMPTY, stroke=EDGE)


def draw_box(cell: Cell, frame: Frame, fill: str, label: Label, tip: str) -> str:
    """Draw a cell, its label in the middle."""
    x, y, width, height = frame.place(cell)
    box = rect(x, y, width, height, fill, tip, class_="cell", **outline(width, height))
    return box + draw_word(x + width / 2, y + height / 2, label, fill)


def outline(width: float, height: float) -> dict[str, float | str]:
    """Return a white outline that never hides a small box."""
    return {"stroke": PAPER, "stroke_width": min(1.5, 0.2 * min(width, height))}


def draw_word(x: float, y: float, label: Label, fill: str) -> str:
    """Write a label in the middle of a box of some colour; nothing if it is empty."""
    words, size = label
    ink = ink_on(fill)
    middle = y + size * 0.36
    return text(x, middle, words, anchor="middle", font_size=size, fill=ink) if words else ""


def fits(label: Label, width: float, height: float) -> bool:
    """Tell whether a label fits a box."""
    return height >= (_LOW if label[1] <= 10 else 17) and width_of(*label) <= width - 6


def labels_of(cells: Sequence[Cell], frame: Frame, unit: str) -> list[Label]:
    """Choose labels: the most telling kind that fits everywhere, or else what fits each cell.

    Where most of the area could not be labelled, nothing is: a few labels would only puzzle.
    """
    rooms = [frame.place(cell)[2:] for cell in cells]
    choices = [_kinds(cell.holders, unit) for cell in cells]
    for kind in zip(*choices, strict=True):
        if all(fits(label, *room) for label, room in zip(kind, rooms, strict=True)):
            return list(kind)
    some = [
        next((label for label in labels if fits(label, *room)), ("", 10.0))
        for labels, room in zip(choices, rooms, strict=True)
    ]
    return some if are_told(cells, [words for words, _ in some]) else [("", 10.0)] * len(cells)


def are_told(cells: Sequence[Cell], labels: Sequence[object]) -> bool:
    """Tell whether most of the area has a label."""
    told = sum(cell.area for cell, label in zip(cells, labels, strict=True) if label)
    return 2 * told > sum(cell.area for cell in cells)


def _kinds(who: Sequence[int], unit: str) -> list[Label]:
    """Return labels for some ranks or chunks, the most telling first."""
    ends = f"{who[0]} … {who[-1]}" if len(who) > 1 else str(who[0])
    first = f"{who[0]} …" if len(who) > 1 else str(who[0])
    words = named(who, unit), runs_text(who), ends, first
    return [(word, size) for word in words for size in (12.0, 10.0)]


def draw_axes(
    frame: Frame, cells: Sequence[Cell], cut: Cut, window: Window, sides: Mapping[Side, bool]
) -> list[str]:
    """Write where chunks are cut along some sides of a frame, and, if asked, the axes' names."""
    down, across = (axis - cut.lead for axis in window.axes)
    high, wide = window.of_shape(cut.plane)  # its ends are told even where no chunk reaches them
    rows = sorted({0, high} | {e for c in cells for e in (c.top, c.top + c.height)})
    columns = sorted({0, wide} | {e for c in cells for e in (c.left, c.left + c.width)})
    drawn = []
    for side, is_named in sides.items():
        if side == "top" and across >= 0:
            drawn += _top_ticks(frame, columns, f"axis {across}" if is_named else "")
        elif side != "top" and down >= 0:
            way = -1 if side == "left" else 1
            drawn += _side_ticks(frame, rows, f"axis {down}" if is_named else "", way)
    return drawn


def _top_ticks(frame: Frame, cuts: Sequence[int], name: str) -> list[str]:
    """Write cuts above a frame; the first and the last do not stand out at its sides."""
    widths = [width_of(f"{cut:,}", 11) for cut in cuts]
    places = [frame.across(cut) for cut in cuts]
    drawn = [line(x, frame.y - 5, x, frame.y - 1, MUTED) for x in places]
    if len(places) > 1:
        places[0] += max(0.0, widths[0] / 2 - 4)
        places[-1] -= max(0.0, widths[-1] / 2 - 4)
    drawn += [
        text(places[i], frame.y - 9, f"{cuts[i]:,}", anchor="middle", fill=INK)
        for i in thin(places, max(widths, default=0) + 8)
    ]
    if name:
        middle = frame.x + frame.width / 2
        drawn.append(text(middle, frame.y - 26, name, anchor="middle", fill=MUTED))
    return drawn


def _side_ticks(frame: Frame, cuts: Sequence[int], name: str, way: int) -> list[str]:
    """Write cuts to the left (``way`` -1) or to the right (1) of a frame."""
    edge = frame.x if way < 0 else frame.right
    places = [frame.down(cut) for cut in cuts]
    anchor = "end" if way < 0 else "start"
    drawn = [line(edge + way, y, edge + 5 * way, y, MUTED) for y in places]
    for i in thin(places, 13):
        words = f"{cuts[i]:,}"
        drawn.append(text(edge + 9 * way, places[i] + 4, words, anchor=anchor, fill=INK))
    if name:
        widest = max((width_of(f"{cut:,}", 11) for cut in cuts), default=0)
        x, y = edge + way * (18 + widest), frame.y + frame.height / 2
        turn = f"rotate({90 * way} {x:.2f} {y:.2f})"
        drawn.append(text(x, y, name, anchor="middle", fill=MUTED, transform=turn))
    return drawn


def draw_legend(
    colours: Colours, unit: str, left: float, top: float, right: float
) -> tuple[list[str], float]:
    """Explain the colours of ranks or chunks; return the drawing and where it ends."""
    if len(colours) > len(PALETTE):
        return _ramp_legend(colours, unit, left, top), top + 20
    drawn, x = [], left
    for key, fill in colours.items():
        words = f"{unit} {key}"
        need = 30 + width_of(words, 11)
        if x + need > right and x > left:
            x, top = left, top + 18
        drawn += [rect(x, top, 12, 12, fill, rx=2), text(x + 17, top + 10, words, fill=INK)]
        x += need
    return drawn, top + 20


def _ramp_legend(colours: Colours, unit: str, left: float, top: float) -> list[str]:
    """Draw a colour bar from the first to the last."""
    keys = list(colours)
    first, last = (f"{unit} {key}" for key in (keys[0], keys[-1]))
    start = left + width_of(first, 11) + 6
    steps = [keys[i * (len(keys) - 1) // 23] for i in range(24)]
    bars = [rect(start + 6 * i, top, 6.2, 12, colours[key]) for i, key in enumerate(steps)]
    ends = (left, first), (start + 152, last)
    return [*bars, *(text(x, top + 10, words, fill=INK) for x, words in ends)]
