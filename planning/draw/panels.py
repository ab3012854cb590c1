"""A tensor on paper: a frame, coloured boxes, labels that fit, cuts along the sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from ..text import counted, runs_text
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
    text,
    thin,
    width_of,
)
from .tensors import Cell, Cut, Window, edges_of, merged

__all__ = ["Colours", "Panel", "colours_of", "draw_label", "draw_legend", "fit", "readable"]

Colours = Mapping[int, str]
Size = tuple[float, float]

_WIDE, _HIGH = 44.0, 14.0  # room for a short label
_NARROW, _LOW = 12.0, 11.0  # smaller cells cannot be seen apart
_CELLS: Final = 400  # more would be too small to read, and too many bytes


@attrs.frozen
class Panel:
    """A tensor in a frame.

    Attributes:
        cut: How the tensor is cut.
        window: The plane that is shown.
        cells: The cells that are drawn.
        size: How wide and high the frame is, in pixels.
        x, y: Where its upper left corner lies.
    """

    cut: Cut
    window: Window
    cells: Sequence[Cell]
    size: Size
    x: float = 0.0
    y: float = 0.0

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.size[1]

    @property
    def is_to_scale(self) -> bool:
        """Whether both axes have the same scale; one alone always has."""
        rows, columns = (max(1, n) for n in self.window.lengths)
        return rows == 1 or math.isclose(self.size[0] / columns, self.size[1] / rows)

    @property
    def margins(self) -> Size:
        """How much room the cuts need to the left and above; none along axes put in front."""
        last = max((cell.top + cell.height for cell in self.cells), default=0)
        left, above = (axis >= self.cut.lead for axis in self.window.axes)
        return 32 + width_of(f"{last:,}", 11) if left else 0.0, 40.0 if above else 6.0

    def across(self, element: int) -> float:
        """Return where an element of the second axis begins."""
        return self.x + self.size[0] * element / max(1, self.window.lengths[1])

    def down(self, element: int) -> float:
        """Return where an element of the first axis begins."""
        return self.y + self.size[1] * element / max(1, self.window.lengths[0])

    def place(self, cell: Cell) -> tuple[float, float, float, float]:
        """Return x, y, width and height of a cell."""
        x, y = self.across(cell.left), self.down(cell.top)
        right, bottom = self.across(cell.left + cell.width), self.down(cell.top + cell.height)
        return x, y, right - x, bottom - y

    def labels(self) -> list[str]:
        """Choose labels: the longest kind that fits everywhere, or else what fits each cell.

        If most cells have no room for any, there are none: a few labels would only puzzle.
        """
        rooms = [self.place(cell)[2:] for cell in self.cells]
        choices = [_kinds(cell.holders, self.cut.unit) for cell in self.cells]
        for kind in zip(*choices, strict=True):
            if all(fits(words, room, 11) for words, room in zip(kind, rooms, strict=True)):
                return list(kind)
        some = [
            next((words for words in kinds if fits(words, room, 11)), "")
            for kinds, room in zip(choices, rooms, strict=True)
        ]
        return some if 2 * sum(map(bool, some)) > len(some) else [""] * len(some)

    def draw(self, colours: Colours) -> list[str]:
        """Draw the cells, each in the colour of its first holder, and the cuts."""
        drawn = [self.paper()]
        for cell, words in zip(self.cells, self.labels(), strict=True):
            x, y, width, height = self.place(cell)
            fill = colours[cell.holders[0]]
            drawn.append(draw_box(x, y, width, height, fill, self.tip(cell), "cell"))
            drawn.append(draw_label(x + width / 2, y + height / 2, words, fill))
        return [*drawn, *self.ticks()]

    def paper(self) -> str:
        """Draw the tensor itself, which shows wherever no chunk is."""
        shape = self.window.of_shape(self.cut.plane)
        bottom, right = (
            n or whole or 1 for n, whole in zip(shape, self.window.lengths, strict=True)
        )
        size = self.across(right) - self.x, self.down(bottom) - self.y
        return rect(self.x, self.y, *size, EMPTY, stroke=EDGE)

    def ticks(self) -> list[str]:
        """Write where chunks are cut, and the axes' numbers, to the left and above."""
        high, wide = self.window.of_shape(self.cut.plane)
        rows, columns = edges_of(self.cells)  # the tensor's ends are shown, too
        down, across = (axis - self.cut.lead for axis in self.window.axes)
        drawn = [] if down < 0 else self._left(sorted({0, high, *rows}), f"axis {down}")
        return drawn + ([] if across < 0 else self._top(sorted({0, wide, *columns}), across))

    def _top(self, cuts: Sequence[int], axis: int) -> list[str]:
        """Write cuts above the frame; the first and the last do not stand out at its sides."""
        widths = [width_of(f"{cut:,}", 11) for cut in cuts]
        places = [self.across(cut) for cut in cuts]
        drawn = [line(x, self.y - 5, x, self.y - 1, MUTED) for x in places]
        if len(places) > 1:
            places[0] += max(0.0, widths[0] / 2 - 4)
            places[-1] -= max(0.0, widths[-1] / 2 - 4)
        drawn += [
            text(places[i], self.y - 9, f"{cuts[i]:,}", anchor="middle", fill=INK)
            for i in thin(places, max(widths) + 8)
        ]
        middle = self.x + self.size[0] / 2
        return [*drawn, text(middle, self.y - 26, f"axis {axis}", anchor="middle", fill=MUTED)]

    def _left(self, cuts: Sequence[int], name: str) -> list[str]:
        """Write cuts to the left of the frame."""
        places = [self.down(cut) for cut in cuts]
        drawn = [line(self.x - 5, y, self.x - 1, y, MUTED) for y in places]
        drawn += [
            text(self.x - 9, places[i] + 4, f"{cuts[i]:,}", anchor="end", fill=INK)
            for i in thin(places, 13)
        ]
        x = self.x - 18 - max(width_of(f"{cut:,}", 11) for cut in cuts)
        y = self.y + self.size[1] / 2
        turn = f"rotate(-90 {x:.2f} {y:.2f})"
        return [*drawn, text(x, y, name, anchor="middle", fill=MUTED, transform=turn)]

    def tip(self, cell: Cell, origin: str = "") -> str:
        """Describe a cell in one line; a piece also by the unit of where it comes from."""
        sides = zip((cell.top, cell.left), (cell.height, cell.width), self.window.axes, strict=True)
        box = ", ".join(f"{low}:{low + n}" for low, n, axis in sides if axis >= self.cut.lead)
        count = "" if cell.chunks == 1 else f"{cell.chunks:,} chunks, "
        source = f"{named(cell.sources, origin)} → " if origin else ""
        return f"{source}{named(cell.holders, self.cut.unit)}: {count}[{box}]"

    def remarks(self, whole: int, shown: Sequence[Cell]) -> list[str]:
        """List the ways in which a picture is not the whole truth.

        Args:
            whole: How many cells there would be if none were drawn together.
            shown: The cells that are drawn, on this panel and others.
        """
        cut, found = self.cut, []
        if len(shown) < whole:
            most = counted(max(cell.chunks for cell in shown), "chunk")
            ranks = counted(max(len(cell.holders) for cell in shown), "rank")
            held = f", {ranks}" if cut.unit == "rank" else ""
            found.append(f"Neighbours are drawn together: each cell up to {most}{held}.")
        if len(cut.size) > 2:
            axes, cuts = (" and ".join(map(str, a)) for a in (self.window.axes, self.window.hidden))
            behind = f"chunks cut along axis {cuts} lie behind each other"
            rest = behind if cuts else "no other axis is cut"
            found.append(f"Axes {axes} of {len(cut.size)} are shown; {rest}.")
        if not self.is_to_scale:
            found.append("The axes do not have the same scale.")
        if 0 in cut.size:
            found.append("The tensor is empty.")
        elif not cut.is_whole:
            found.append("The chunks leave gaps or overlap.")
        return found


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


def readable(
    cells: Sequence[Cell] | None, size: Size, coarse: Sequence[Cell], sources: Sequence[Cell] = ()
) -> Sequence[Cell]:
    """Return cells as they are, or, if they would be too small, others merged.

    Args:
        cells: The cells; None if they are too many to be listed.
        size: How large they are drawn together.
        coarse: The cells to merge instead.
        sources: The cells whose holders become sources of the merged ones.
    """
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


def _kinds(who: Sequence[int], unit: str) -> list[str]:
    """Return labels for some ranks or chunks, the longest first."""
    ends = f"{who[0]} … {who[-1]}", f"{who[0]} …"
    return [named(who, unit), runs_text(who), *(ends if len(who) > 1 else [str(who[0])] * 2)]


def named(who: Sequence[int], unit: str) -> str:
    """Name ranks or chunks in a few words.

    >>> named((3,), "rank"), named((0, 4), "rank"), named((0, 3, 6, 9), "chunk")
    ('rank 3', 'ranks 0, 4', 'chunks 0, 3, …, 9')
    """
    if not who:
        return "nobody"
    words = f"{unit}{'s' if len(who) > 1 else ''} {runs_text(who)}"
    return words if len(words) <= 60 else f"{counted(len(who), unit)}, {who[0]} … {who[-1]}"


def fits(words: str, room: Size, size: float) -> bool:
    """Return True if words fit a box of some width and height."""
    return room[1] >= size and width_of(words, size) <= room[0] - 4


def draw_box(
    x: float, y: float, width: float, height: float, fill: str, tip: str, kind: str
) -> str:
    """Draw a box with a white outline that never hides it."""
    thin_line = min(1.5, 0.2 * min(width, height))
    return rect(x, y, width, height, fill, tip, class_=kind, stroke=PAPER, stroke_width=thin_line)


def draw_label(x: float, y: float, words: str, fill: str, size: float = 11) -> str:
    """Write words, if any, in the middle of a box of some colour."""
    if not words:
        return ""
    return text(x, y + size * 0.36, words, anchor="middle", font_size=size, fill=ink_on(fill))


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


def draw_legend(colours: Colours, unit: str, x: float, y: float) -> list[str]:
    """Draw a bar of all colours, with the first and the last rank or chunk at its ends."""
    keys = list(colours)
    if not keys:
        return []
    first, last = (f"{unit} {key}" for key in (keys[0], keys[-1]))
    start, count = x + width_of(first, 11) + 6, min(24, len(keys))
    steps = [keys[i * (len(keys) - 1) // max(1, count - 1)] for i in range(count)]
    wide = 144 / count
    bars = [rect(start + wide * i, y, wide + 0.2, 12, colours[k]) for i, k in enumerate(steps)]
    ends = (x, first), (start + 152, last)
    return [*bars, *(text(at, y + 10, words, fill=INK) for at, words in ends)]
