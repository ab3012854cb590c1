"""Charts of many ranks: bytes from each writer to each reader, and bytes of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints
from ..mesh.worlds import WorldPlans
from ..plans import LoadPlan, SavePlan
from ..reports import Writers, traffic_blocks, traffic_matrix
from ..text import counted, human_bytes
from .svg import (
    EDGE,
    EMPTY,
    INK,
    MARGIN,
    MUTED,
    PALETTE,
    PAPER,
    TOP,
    Picture,
    block,
    byte_tick,
    card,
    elide,
    ink_on,
    line,
    ramp,
    rect,
    span_names,
    text,
    thin,
    width_of,
)

__all__ = ["draw_bytes", "draw_traffic"]

_CELLS: Final = 32  # rows and columns of a heat map: more are added up
_BARS: Final = 64  # more are drawn together
_BAR, _MOST = PALETTE[0], PALETTE[5]


def draw_traffic(
    traffic: npt.ArrayLike | Iterable[LoadPlan] | WorldPlans,
    writers: Writers | Iterable[SavePlan] | None = None,
    *,
    source: str = "rank",
    reader: str = "rank",
    source_names: Sequence[str] = (),
    title: str = "Traffic",
) -> Picture:
    """Draw the bytes from each writer to each reader, as a heat map.

    More than 32 rows or columns are added up in blocks, and the caption says of how many.

    Args:
        traffic: Bytes, one row a source and one column a reader; or one load plan per rank; or a
            world that is to be filled.
        writers: With plans: who wrote, as `traffic_matrix` takes it.
        source: What a row is: ``"rank"``, ``"file"``, ``"node"``.
        reader: What a column is.
        source_names: A name for each row, such as a file's.
        title: What is shown.

    >>> draw_traffic([[8, 4, 0], [0, 4, 8]])
    Picture: Traffic. 24 B in all; 4 of 6 pairs share bytes, rank 0 → rank 0 the most (8 B).

    Raises:
        ValueError: The matrix has no cells or negative ones, or its rows are not the names'.
    """
    heat = _heat(traffic, writers, (source, reader), source_names)
    rows, columns = heat.sums.shape
    left = min(300.0, max(width_of(name, 11) for name in heat.names[0])) + 40
    x, y = MARGIN + left, TOP + 44
    wide, high = max(14.0, min(74.0, 480 / columns)), max(14.0, min(36.0, 448 / rows))
    right, bottom = x + columns * wide, y + rows * high
    body = [
        *_cells(heat, x, y, wide, high),
        *_names(heat, x, y, wide, high, left),
        *_scale(right + 24, y, max(110.0, min(200.0, bottom - y - 26)), float(heat.sums.max())),
    ]
    about = f"{counted(heat.shape[0], source)} → {counted(heat.shape[1], reader)}"
    size = max(420.0, right + 114 + MARGIN), max(bottom, y + 136) + 8
    return card(title, about, "".join(body), _most(heat), size)


@attrs.frozen(eq=False)
class _Heat:
    """Bytes from sources to readers, in blocks.

    Attributes:
        shape: How many sources and readers there are.
        steps: How many of each a cell adds up.
        sums: Bytes of each cell.
        units: What a row and a column is.
        names: The names of rows and columns.
    """

    shape: tuple[int, int]
    steps: tuple[int, int]
    sums: Ints
    units: tuple[str, str]
    names: tuple[list[str], list[str]]


def _heat(
    traffic: Any,
    writers: Writers | Iterable[SavePlan] | None,
    units: tuple[str, str],
    source_names: Sequence[str],
) -> _Heat:
    """Add bytes up in blocks that can be read; a world's pairs of ranks are never listed."""
    if isinstance(traffic, WorldPlans) and isinstance(writers, Writers):
        shape = writers.world_size, len(traffic)
        steps = block(shape[0], _CELLS), block(shape[1], _CELLS)
        sums = _checked(traffic_blocks(traffic, writers, steps))
    else:
        matrix = _checked(_matrix(traffic, writers))
        shape = matrix.shape[0], matrix.shape[1]
        steps = block(shape[0], _CELLS), block(shape[1], _CELLS)
        rows = np.add.reduceat(matrix, np.arange(0, shape[0], steps[0]), axis=0)
        sums = np.add.reduceat(rows, np.arange(0, shape[1], steps[1]), axis=1)
    if source_names and len(source_names) != shape[0]:
        raise ValueError(f"{len(source_names)} names do not fit {shape[0]} rows of traffic")
    names = span_names(shape[0], steps[0], source_names), span_names(shape[1], steps[1])
    return _Heat(shape, steps, sums, units, names)


def _matrix(traffic: Any, writers: Writers | Iterable[SavePlan] | None) -> npt.NDArray[Any]:
    """Return the bytes of a matrix or of plans."""
    if isinstance(traffic, WorldPlans) or writers is not None:
        return traffic_matrix(traffic, writers or ())
    given = traffic if isinstance(traffic, np.ndarray) else list(traffic)
    if any(isinstance(plan, LoadPlan) for plan in given):
        raise ValueError("load plans do not say who wrote; pass writers=, the plans written")
    return np.asarray(given)


def _checked(matrix: npt.NDArray[Any]) -> Ints:
    if matrix.ndim != 2 or not matrix.size or matrix.min() < 0:
        wanted = "expected bytes as a matrix, one row a source and one column a reader, none of "
        raise ValueError(f"{wanted}them negative; got shape {matrix.shape}")
    return matrix


def _cells(heat: _Heat, x: float, y: float, wide: float, high: float) -> list[str]:
    """Draw the cells, with their bytes if these fit everywhere."""
    words = [[byte_tick(v) for v in row] for row in heat.sums.tolist()]
    labelled = max(width_of(w, 10) for row in words for w in row) <= wide - 6
    most, gap = float(heat.sums.max()), 1.0 if wide >= 20 else 0.5
    drawn = []
    for (i, j), value in np.ndenumerate(heat.sums):
        fill = ramp(0.97 - 0.97 * value / most) if value else EMPTY
        names = (f"{u} {n[k]}" for u, n, k in zip(heat.units, heat.names, (i, j), strict=True))
        tip = f"{' → '.join(names)}: {words[i][j]}" if value else ""
        at = x + j * wide, y + i * high
        drawn.append(rect(*at, wide - gap, high - gap, fill, tip, class_="cell"))
        if labelled and value:
            middle = at[0] + (wide - gap) / 2, at[1] + (high - gap) / 2 + 3.6
            ink = ink_on(fill)
            drawn.append(text(*middle, words[i][j], anchor="middle", font_size=10, fill=ink))
    return drawn


def _names(heat: _Heat, x: float, y: float, wide: float, high: float, left: float) -> list[str]:
    """Write the names of rows and columns, as many as fit, and what they are."""
    rows = [y + (i + 0.5) * high for i in range(len(heat.names[0]))]
    columns = [x + (j + 0.5) * wide for j in range(len(heat.names[1]))]
    widest = max(width_of(name, 11) for name in heat.names[1]) + 8
    drawn = [
        text(x - 8, rows[i] + 4, elide(heat.names[0][i], left - 39, 11), anchor="end", fill=INK)
        for i in thin(rows, 13)
    ]
    drawn += [
        text(columns[j], y - 8, heat.names[1][j], anchor="middle", fill=INK)
        for j in thin(columns, widest)
    ]
    side, middle, across = MARGIN + 8, y + len(rows) * high / 2, x + len(columns) * wide / 2
    turn = f"rotate(-90 {side:.2f} {middle:.2f})"
    source, reader = (f"{way} {unit}" for way, unit in zip(("from", "to"), heat.units, strict=True))
    drawn.append(text(side, middle, source, anchor="middle", fill=MUTED, transform=turn))
    return [*drawn, text(across, y - 28, reader, anchor="middle", fill=MUTED)]


def _scale(x: float, y: float, height: float, most: float) -> list[str]:
    """Draw the colour scale from most, on top, to nothing."""
    if not most:
        return []
    steps = 30
    drawn = [
        rect(x, y + height * i / steps, 14, height / steps + 0.3, ramp(0.97 * i / (steps - 1)))
        for i in range(steps)
    ]
    for share in (0.0, 0.5, 1.0):
        at = y + height * share
        drawn.append(line(x + 14, at, x + 18, at, MUTED))
        drawn.append(text(x + 22, at + 4, byte_tick(most * (1 - share)), fill=INK))
    none = y + height + 12
    return [*drawn, rect(x, none, 14, 14, EMPTY), text(x + 22, none + 11, "none", fill=INK)]


def _most(heat: _Heat) -> str:
    """Write how much there is in all, where most of it is, and what a cell adds up."""
    if not heat.sums.any():
        return "Nothing is read."
    at = np.unravel_index(int(heat.sums.argmax()), heat.sums.shape)
    ends = [
        f"{unit}{'s' * (step > 1)} {names[i]}"
        for unit, step, names, i in zip(heat.units, heat.steps, heat.names, at, strict=True)
    ]
    if heat.names[0] != span_names(heat.shape[0], heat.steps[0]):  # sources have their own names
        ends[0] = elide(heat.names[0][at[0]], 360, 12)
    total, most = (human_bytes(int(count)) for count in (heat.sums.sum(), heat.sums.max()))
    if heat.steps == (1, 1):
        pairs = f"{np.count_nonzero(heat.sums):,} of {heat.sums.size:,} pairs share bytes"
        return f"{total} in all; {pairs}, {' → '.join(ends)} the most ({most})."
    blocks = (counted(step, unit) for step, unit in zip(heat.steps, heat.units, strict=True))
    most = f"{' → '.join(ends)} the most ({most})"
    return f"{total} in all, {most}. Each cell adds up {' × '.join(blocks)}."


def draw_bytes(
    bytes_per_rank: Iterable[int] | Iterable[SavePlan],
    *,
    unit: str = "rank",
    title: str = "Bytes per rank",
) -> Picture:
    """Draw how many bytes each rank has, with their mean and how far the largest is above it.

    More than 64 bars are drawn together: each is then the mean of a block, with a line from the
    least to the most of it.

    Args:
        bytes_per_rank: Bytes, or the plans that hold them, in rank order.
        unit: What a bar is: ``"rank"``, ``"file"``, ``"node"``.
        title: What is shown.

    >>> draw_bytes([4, 4, 8, 0])
    Picture: Bytes per rank. 16 B in all, mean 4 B, most 8 B (rank 2, orange): max/mean 2.00.

    Raises:
        ValueError: There is nothing to draw, or a number is negative.
    """
    given = [p.nbytes if isinstance(p, SavePlan) else int(p) for p in bytes_per_rank]
    if not given or min(given) < 0:
        raise ValueError("expected at least one number of bytes, and none that is negative")
    bars = _Bars.of(np.array(given, np.float64), unit)
    body = [*bars.grid(), *bars.drawn(), *bars.mean_line(), *bars.words()]
    width = max(440.0, bars.right + 12 + width_of(bars.mean_words, 11) + MARGIN)
    size = width, bars.bottom + 46
    return card(title, counted(len(given), unit), "".join(body), bars.caption(), size)


@attrs.frozen(eq=False)
class _Bars:
    """A bar chart: its values, how many of them a bar stands for, and where it lies."""

    values: npt.NDArray[np.float64]
    unit: str
    step: int
    ticks: tuple[float, ...]
    x: float
    width: float

    top: Final = TOP + 22
    bottom: Final = TOP + 222

    @classmethod
    def of(cls, values: npt.NDArray[np.float64], unit: str) -> _Bars:
        """Choose bars as wide as there is room for."""
        step, ticks = block(len(values), _BARS), _ticks(float(values.max()))
        x = MARGIN + 12 + max(width_of(byte_tick(t), 11) for t in ticks)
        return cls(values, unit, step, ticks, x, min(56.0, 540 / -(-len(values) // step)))

    @property
    def starts(self) -> npt.NDArray[Any]:
        """The first rank of each bar."""
        return np.arange(0, len(self.values), self.step)

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + max(240.0, self.width * len(self.starts))

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return float(self.values.mean())

    @property
    def mean_words(self) -> str:
        """What is written beside the mean."""
        return f"mean {byte_tick(self.mean)}"

    def level(self, value: float) -> float:
        """Return how far down a number of bytes lies."""
        return self.bottom - (self.bottom - self.top) * value / self.ticks[-1]

    def middle(self, bar: float) -> float:
        """Return where a bar's middle lies."""
        return self.x + (bar + 0.5) * self.width

    def grid(self) -> list[str]:
        """Draw a line for each tick."""
        drawn = []
        for tick in self.ticks:
            y = self.level(tick)
            drawn.append(line(self.x, y, self.right, y, EDGE))
            drawn.append(text(self.x - 8, y + 4, byte_tick(tick), anchor="end", fill=INK))
        return drawn

    def drawn(self) -> list[str]:
        """Draw the bars; the one with the largest value has a colour of its own."""
        counts = np.diff([*self.starts, len(self.values)])
        means = np.add.reduceat(self.values, self.starts) / counts
        least, most = (f.reduceat(self.values, self.starts) for f in (np.minimum, np.maximum))
        largest = int(self.values.argmax()) // self.step if np.ptp(self.values) else -1
        names, width = (
            span_names(len(self.values), self.step),
            self.width - min(6.0, self.width / 5),
        )
        bars = []
        for i, (mean, low, high) in enumerate(zip(means, least, most, strict=True)):
            x, y = self.middle(i), self.level(mean)
            fill, tip = (
                _MOST if i == largest else _BAR,
                f"{self.unit} {names[i]}: {byte_tick(mean)}",
            )
            bars.append(rect(x - width / 2, y, width, self.bottom - y, fill, tip, class_="bar"))
            if low < high:
                bars.append(line(x, self.level(high), x, self.level(low), INK))
        return bars

    def mean_line(self) -> list[str]:
        """Draw the mean across all bars, its value at the right."""
        y = self.level(self.mean)
        dashes: dict[str, float | str] = {"stroke_width": 1.5, "stroke_dasharray": "5 3"}
        across = line(self.x, y, self.right + 4, y, INK, **dashes)
        return [across, text(self.right + 8, y + 4, self.mean_words, fill=INK)]

    def words(self) -> list[str]:
        """Write below each bar which rank it is, and above it how many bytes, if they fit."""
        names = [str(start) for start in self.starts.tolist()]
        gap = max(width_of(name, 11) for name in names) + 8
        drawn = [
            text(self.middle(i), self.bottom + 16, names[i], anchor="middle", fill=INK)
            for i in range(0, len(names), max(1, math.ceil(gap / self.width)))
        ]
        middle = self.middle((len(names) - 1) / 2)
        drawn.append(text(middle, self.bottom + 34, self.unit, anchor="middle", fill=MUTED))
        sizes = [byte_tick(value) for value in self.values.tolist()]
        if self.step > 1 or max(width_of(words, 10) for words in sizes) > self.width:
            return drawn
        halo: dict[str, float | str] = {"stroke": PAPER, "stroke_width": 3, "paint_order": "stroke"}
        for i, (value, words) in enumerate(zip(self.values.tolist(), sizes, strict=True)):
            y, mean = self.level(value) - 5, self.level(self.mean)
            y = mean - 4 if y - 9 <= mean <= y + 3 else y  # the mean must not strike words through
            style: dict[str, float | str] = {"font_size": 10, "fill": INK, **halo}
            drawn.append(text(self.middle(i), y, words, anchor="middle", **style))
        return drawn

    def caption(self) -> str:
        """Write how evenly bytes are spread."""
        total, most = float(self.values.sum()), float(self.values.max())
        if not total:
            return "There are no bytes."
        caption = (
            f"{human_bytes(total)} in all, mean {human_bytes(self.mean)}, most {human_bytes(most)} "
            f"({self.unit} {int(self.values.argmax())}{', orange' * (most > self.mean)}): "
            f"max/mean {most / self.mean:.2f}."
        )
        if self.step == 1:
            return caption
        blocks = f"Each bar: the mean of {counted(self.step, self.unit)}"
        return f"{caption} {blocks}; thin line: from least to most."


def _ticks(most: float) -> tuple[float, ...]:
    """Return round numbers of bytes from 0 to at least ``most``, a few of them.

    >>> _ticks(3000)
    (0.0, 1024.0, 2048.0, 3072.0)
    """
    step = 2.0 ** max(0, math.ceil(math.log2(max(most, 1) / 4)))
    return tuple(step * i for i in range(max(1, math.ceil(most / step)) + 1))
