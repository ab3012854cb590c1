"""Charts of many ranks: bytes from each writer to each reader, and bytes of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints
from ..mesh.worlds import WorldPlans
from ..plans import LoadPlan, SavePlan
from ..reports import Writers, traffic_blocks, traffic_matrix
from ..text import counted, human_bytes
from . import svg
from .svg import MARGIN, Picture, block, byte_tick, line, middle, rect, text, width_of

_CELLS: Final = 32  # rows and columns of a heat map: more are added up
_BARS: Final = 64  # more are drawn together
_BAR, _MOST = svg.PALETTE[0], svg.PALETTE[5]
_TOP, _BOTTOM = svg.TOP + 22, svg.TOP + 222  # of bars


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
    (x, y), (wide, high), (rows, columns) = heat.at, heat.pitch, heat.sums.shape
    right, bottom = x + columns * wide, y + rows * high
    scale = _scale(right + 24, y, max(110.0, min(200.0, bottom - y - 26)), float(heat.sums.max()))
    body = "".join([*_cells(heat), *_names(heat), *scale])
    about = f"{counted(heat.shape[0], source)} → {counted(heat.shape[1], reader)}"
    size = max(420.0, right + 114 + MARGIN), max(bottom, y + 136) + 8
    return svg.card(title, about, body, _most(heat, bool(source_names)), size)


@attrs.frozen(eq=False)
class _Heat:
    """Bytes from sources to readers, in blocks."""

    shape: tuple[int, int]  # how many sources and readers there are
    steps: tuple[int, int]  # how many of each a cell adds up
    sums: Ints  # bytes of each cell
    units: tuple[str, str]  # what a row and a column is
    names: tuple[list[str], list[str]]  # the names of rows and columns

    @property
    def at(self) -> tuple[float, float]:
        """Where the first cell lies: the names of rows stand to the left of it."""
        widest = max(width_of(name, 11) for name in self.names[0])
        return MARGIN + 40 + min(300.0, widest), svg.TOP + 44

    @property
    def pitch(self) -> tuple[float, float]:
        """From one cell to the next, across and down."""
        rows, columns = self.sums.shape
        return max(14.0, min(74.0, 480 / columns)), max(14.0, min(36.0, 448 / rows))


def _heat(traffic: Any, writers: Any, units: tuple[str, str], source_names: Sequence[str]) -> _Heat:
    """Add bytes up in blocks that can be read; a world's pairs of ranks are never listed."""
    is_world = isinstance(traffic, WorldPlans) and isinstance(writers, Writers)
    matrix = None if is_world else _matrix(traffic, writers)
    shape = (writers.world_size, len(traffic)) if matrix is None else matrix.shape
    steps = block(shape[0], _CELLS), block(shape[1], _CELLS)
    if matrix is None:
        sums = traffic_blocks(traffic, writers, steps)
    else:
        rows = np.add.reduceat(matrix, np.arange(0, shape[0], steps[0]), axis=0)
        sums = np.add.reduceat(rows, np.arange(0, shape[1], steps[1]), axis=1)
    if source_names and len(source_names) != shape[0]:
        raise ValueError(f"{len(source_names)} names do not fit {shape[0]} rows of traffic")
    names = svg.span_names(shape[0], steps[0], source_names), svg.span_names(shape[1], steps[1])
    return _Heat(shape, steps, sums, units, names)


def _matrix(traffic: Any, writers: Writers | Iterable[SavePlan] | None) -> npt.NDArray[Any]:
    """Return the bytes of a matrix or of plans."""
    if isinstance(traffic, WorldPlans) or writers is not None:
        return traffic_matrix(traffic, writers or ())
    given = traffic if isinstance(traffic, np.ndarray) else list(traffic)
    if any(isinstance(plan, LoadPlan) for plan in given):
        raise ValueError("load plans do not say who wrote; pass writers=, the plans written")
    matrix = np.asarray(given)
    if matrix.ndim != 2 or not matrix.size or matrix.min() < 0:
        wanted = "expected bytes as a matrix, one row a source and one column a reader, none of "
        raise ValueError(f"{wanted}them negative; got shape {matrix.shape}")
    return matrix


def _cells(heat: _Heat) -> Iterator[str]:
    """Draw the cells, with their bytes if these fit everywhere."""
    words = [[byte_tick(v) for v in row] for row in heat.sums.tolist()]
    (left, top), (wide, high), most = heat.at, heat.pitch, float(heat.sums.max())
    labelled = max(width_of(w, 10) for row in words for w in row) <= wide - 6
    gap = 1.0 if wide >= 20 else 0.5
    for (i, j), value in np.ndenumerate(heat.sums):
        fill = svg.ramp(0.97 - 0.97 * value / most) if value else svg.EMPTY
        ends = f"{heat.units[0]} {heat.names[0][i]} → {heat.units[1]} {heat.names[1][j]}"
        x, y = left + j * wide, top + i * high
        tip = f"{ends}: {words[i][j]}" if value else ""
        yield rect(x, y, wide - gap, high - gap, fill, tip, class_="cell")
        if labelled and value:
            at, ink = (x + (wide - gap) / 2, y + (high - gap) / 2 + 3.6), svg.ink_on(fill)
            yield middle(*at, words[i][j], ink, font_size=10)


def _names(heat: _Heat) -> Iterator[str]:
    """Write the names of rows and columns, as many as fit, and what they are."""
    (x, y), (wide, high), (names, heads) = heat.at, heat.pitch, heat.names
    rows = [y + (i + 0.5) * high for i in range(len(names))]
    columns = [x + (j + 0.5) * wide for j in range(len(heads))]
    for i in svg.thin(rows, 13):
        yield text(x - 8, rows[i] + 4, svg.elide(names[i], 301, 11), anchor="end", fill=svg.INK)
    for j in svg.thin(columns, max(width_of(head, 11) for head in heads) + 8):
        yield middle(columns[j], y - 8, heads[j], svg.INK)
    yield svg.upright(MARGIN + 8, y + len(rows) * high / 2, f"from {heat.units[0]}")
    yield middle(x + len(columns) * wide / 2, y - 28, f"to {heat.units[1]}", svg.MUTED)


def _scale(x: float, y: float, height: float, most: float) -> Iterator[str]:
    """Draw the colour scale from most, on top, to nothing."""
    for i in range(30 if most else 0):
        yield rect(x, y + height * i / 30, 14, height / 30 + 0.3, svg.ramp(0.97 * i / 29))
    for share in (0.0, 0.5, 1.0) if most else ():
        at = y + height * share
        yield line(x + 14, at, x + 18, at, svg.MUTED)
        yield text(x + 22, at + 4, byte_tick(most * (1 - share)), fill=svg.INK)
    yield rect(x, y + height + 12, 14, 14, svg.EMPTY)
    yield text(x + 22, y + height + 23, "none", fill=svg.INK)


def _most(heat: _Heat, are_named: bool) -> str:
    """Write how much there is in all, where most of it is, and what a cell adds up."""
    if not heat.sums.any():
        return "Nothing is read."
    at = np.unravel_index(int(heat.sums.argmax()), heat.sums.shape)
    sides = zip(heat.units, heat.steps, heat.names, at, strict=True)
    ends = [f"{unit}{'s' * (step > 1)} {names[i]}" for unit, step, names, i in sides]
    if are_named:
        ends[0] = svg.elide(heat.names[0][at[0]], 360, 12)
    total, largest = human_bytes(int(heat.sums.sum())), human_bytes(int(heat.sums.max()))
    most = f"{' → '.join(ends)} the most ({largest})."
    if heat.steps == (1, 1):
        pairs = f"{np.count_nonzero(heat.sums):,} of {heat.sums.size:,} pairs share bytes"
        return f"{total} in all; {pairs}, {most}"
    blocks = map(counted, heat.steps, heat.units)
    return f"{total} in all, {most} Each cell adds up {' × '.join(blocks)}."


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
    values, top = np.array(given, np.float64), max(given)
    tick = 2.0 ** max(0, math.ceil(math.log2(max(top, 1) / 4)))  # a round number of bytes
    ticks = [tick * i for i in range(max(1, math.ceil(top / tick)) + 1)]
    step = block(len(values), _BARS)
    x, bars = MARGIN + 12 + max(width_of(byte_tick(t), 11) for t in ticks), -(-len(values) // step)
    chart = _Chart(values, unit, step, x, min(56.0, 540 / bars), (_BOTTOM - _TOP) / ticks[-1])
    right, mean = x + max(240.0, chart.width * bars), f"mean {byte_tick(values.mean())}"
    body = []
    for tick in ticks:
        y = chart.level(tick)
        body.append(line(x, y, right, y, svg.EDGE))
        body.append(text(x - 8, y + 4, byte_tick(tick), anchor="end", fill=svg.INK))
    y = chart.level(float(values.mean()))
    dashes = line(x, y, right + 4, y, svg.INK, stroke_width=1.5, stroke_dasharray="5 3")
    body += [*_bars(chart), dashes, text(right + 8, y + 4, mean, fill=svg.INK), *_labels(chart)]
    size = max(440.0, right + 12 + width_of(mean, 11) + MARGIN), _BOTTOM + 60
    return svg.card(title, counted(len(given), unit), "".join(body), _evenness(chart), size)


@attrs.frozen(eq=False)
class _Chart:
    """A bar chart."""

    values: npt.NDArray[np.float64]  # the bytes of each rank
    unit: str  # what a bar is
    step: int  # how many ranks a bar stands for
    x: float  # where the first bar begins
    width: float  # from one bar to the next
    scale: float  # pixels of one byte

    def level(self, value: float) -> float:
        """Return how far down a number of bytes lies."""
        return _BOTTOM - value * self.scale


def _bars(chart: _Chart) -> Iterator[str]:
    """Draw the bars; the one with the largest value has a colour of its own."""
    values, starts = chart.values, np.arange(0, len(chart.values), chart.step)
    means = np.add.reduceat(values, starts) / np.diff([*starts, len(values)])
    least, most = (f.reduceat(values, starts) for f in (np.minimum, np.maximum))
    largest = int(values.argmax()) // chart.step if np.ptp(values) else -1
    names, width = svg.span_names(len(values), chart.step), chart.width - min(6.0, chart.width / 5)
    for i, (mean, low, high) in enumerate(zip(means, least, most, strict=True)):
        x, y = chart.x + (i + 0.5) * chart.width, chart.level(mean)
        fill, tip = _MOST if i == largest else _BAR, f"{chart.unit} {names[i]}: {byte_tick(mean)}"
        yield rect(x - width / 2, y, width, _BOTTOM - y, fill, tip, class_="bar")
        if low < high:
            yield line(x, chart.level(high), x, chart.level(low), svg.INK)


def _labels(chart: _Chart) -> Iterator[str]:
    """Write below each bar which rank it is, and how many bytes, if they fit."""
    names = [str(start) for start in range(0, len(chart.values), chart.step)]
    middles = [chart.x + (i + 0.5) * chart.width for i in range(len(names))]
    gap = max(width_of(name, 11) for name in names) + 8
    for i in range(0, len(names), max(1, math.ceil(gap / chart.width))):
        yield middle(middles[i], _BOTTOM + 16, names[i], svg.INK)
    sizes = [byte_tick(value) for value in chart.values.tolist()]
    has_sizes = chart.step == 1 and max(width_of(words, 10) for words in sizes) <= chart.width
    for x, words in zip(middles, sizes, strict=False) if has_sizes else ():
        yield middle(x, _BOTTOM + 30, words, svg.MUTED, font_size=10)
    y = _BOTTOM + (46 if has_sizes else 34)
    yield middle((middles[0] + middles[-1]) / 2, y, chart.unit, svg.MUTED)


def _evenness(chart: _Chart) -> str:
    """Write how evenly bytes are spread."""
    values, unit = chart.values, chart.unit
    total, mean, most = float(values.sum()), float(values.mean()), float(values.max())
    if not total:
        return "There are no bytes."
    caption = (
        f"{human_bytes(total)} in all, mean {human_bytes(mean)}, most {human_bytes(most)} "
        f"({unit} {int(values.argmax())}{', orange' * (most > mean)}): max/mean {most / mean:.2f}."
    )
    if chart.step == 1:
        return caption
    blocks = f"Each bar: the mean of {counted(chart.step, unit)}"
    return f"{caption} {blocks}; thin line: from least to most."
