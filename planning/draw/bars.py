"""Show me: how evenly are bytes spread?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..records import SavePlan
from ..text import counted, human_bytes
from .svg import (
    EDGE,
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
    line,
    rect,
    span_names,
    text,
    width_of,
)

__all__ = ["draw_bytes"]

_BARS: Final = 64  # more are drawn together
_BAR, _MOST = PALETTE[0], PALETTE[5]


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
    values = np.array(given, np.float64)
    bars = _Bars.of(values)
    body = [*bars.grid(), *bars.drawn(unit), *bars.mean(), *bars.words(unit)]
    caption = _spread(values, unit)
    if bars.step > 1:
        caption += f" Each bar: the mean of {bars.step} {unit}s; thin line: from least to most."
    width = bars.right + 12 + width_of(bars.mean_words, 11) + MARGIN
    return card(
        title,
        counted(len(values), unit),
        "".join(body),
        caption,
        (max(440.0, width), bars.bottom + 46),
    )


@attrs.frozen(eq=False)
class _Bars:
    """A bar chart: its values, how many of them a bar stands for, and where it lies."""

    values: npt.NDArray[np.float64]
    step: int
    x: float
    width: float
    top: float
    height: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> _Bars:
        """Choose bars as wide as there is room for."""
        step = block(len(values), _BARS)
        ticks = _ticks(float(values.max()))
        x = MARGIN + 12 + max(width_of(byte_tick(t), 11) for t in ticks)
        count = -(-len(values) // step)
        return cls(values, step, x, min(56.0, 540 / count), TOP + 22, 200.0, ticks)

    @property
    def starts(self) -> npt.NDArray[Any]:
        """The first rank of each bar."""
        return np.arange(0, len(self.values), self.step)

    @property
    def right(self) -> float:
        """The right edge."""
        return self.x + max(240.0, self.width * len(self.starts))

    @property
    def bottom(self) -> float:
        """Where nothing is drawn: zero bytes."""
        return self.top + self.height

    def level(self, value: float) -> float:
        """Return how far down a number of bytes lies."""
        return self.bottom - self.height * value / self.ticks[-1]

    def above(self, value: float) -> float:
        """Return the base line of the words above a bar, which the mean must not strike through."""
        words, mean = self.level(value) - 5, self.level(float(self.values.mean()))
        return mean - 4 if words - 9 <= mean <= words + 3 else words

    def grid(self) -> list[str]:
        """Draw a line for each tick."""
        drawn = []
        for tick in self.ticks:
            y = self.level(tick)
            drawn.append(line(self.x, y, self.right, y, EDGE))
            drawn.append(text(self.x - 8, y + 4, byte_tick(tick), anchor="end", fill=INK))
        return drawn

    @property
    def mean_words(self) -> str:
        """What is written beside the mean."""
        return f"mean {byte_tick(float(self.values.mean()))}"

    def middle(self, bar: float) -> float:
        """Return where a bar's middle lies."""
        return self.x + (bar + 0.5) * self.width

    def drawn(self, unit: str) -> list[str]:
        """Draw the bars; the one with the largest value has a colour of its own."""
        counts = np.diff([*self.starts, len(self.values)])
        means = np.add.reduceat(self.values, self.starts) / counts
        least, most = (f.reduceat(self.values, self.starts) for f in (np.minimum, np.maximum))
        largest = int(self.values.argmax()) // self.step if np.ptp(self.values) else -1
        names = span_names(len(self.values), self.step)
        width = self.width - min(6.0, self.width * 0.2)
        bars = []
        for i, (mean, low, high) in enumerate(zip(means, least, most, strict=True)):
            x, y = self.middle(i), self.level(mean)
            fill = _MOST if i == largest else _BAR
            tip = f"{unit} {names[i]}: {byte_tick(mean)}"
            bars.append(rect(x - width / 2, y, width, self.bottom - y, fill, tip, class_="bar"))
            if low < high:
                bars.append(line(x, self.level(high), x, self.level(low), INK))
        return bars

    def mean(self) -> list[str]:
        """Draw the mean across all bars, its value at the right."""
        y = self.level(float(self.values.mean()))
        dashes: dict[str, float | str] = {"stroke_width": 1.5, "stroke_dasharray": "5 3"}
        across = line(self.x, y, self.right + 4, y, INK, **dashes)
        return [across, text(self.right + 8, y + 4, self.mean_words, fill=INK)]

    def words(self, unit: str) -> list[str]:
        """Write below each bar which rank it is, and above it how many bytes, where they fit."""
        names = [str(start) for start in self.starts.tolist()]
        places = [self.middle(i) for i in range(len(names))]
        gap = max(width_of(name, 11) for name in names) + 8
        below = [
            text(places[i], self.bottom + 16, names[i], anchor="middle", fill=INK)
            for i in range(0, len(names), max(1, math.ceil(gap / self.width)))
        ]
        below.append(
            text(
                self.middle((len(names) - 1) / 2),
                self.bottom + 34,
                unit,
                anchor="middle",
                fill=MUTED,
            )
        )
        sizes = [byte_tick(value) for value in self.values.tolist()]
        if self.step > 1 or max(width_of(words, 10) for words in sizes) > self.width:
            return below
        halo: dict[str, float | str] = {"stroke": PAPER, "stroke_width": 3, "paint_order": "stroke"}
        above = [
            text(x, self.above(v), w, anchor="middle", font_size=10, fill=INK, **halo)
            for x, v, w in zip(places, self.values.tolist(), sizes, strict=True)
        ]
        return above + below


def _ticks(most: float) -> tuple[float, ...]:
    """Return round numbers of bytes from 0 to at least ``most``, a few of them.

    >>> _ticks(3000)
    (0.0, 1024.0, 2048.0, 3072.0)
    """
    step = 2.0 ** max(0, math.ceil(math.log2(max(most, 1) / 4)))
    return tuple(step * i for i in range(max(1, math.ceil(most / step)) + 1))


def _spread(values: npt.NDArray[np.float64], unit: str) -> str:
    """Say how evenly bytes are spread."""
    total, mean, most = float(values.sum()), float(values.mean()), float(values.max())
    if not total:
        return "There are no bytes."
    where = int(values.argmax())
    return (
        f"{human_bytes(total)} in all, mean {human_bytes(mean)}, most {human_bytes(most)} "
        f"({unit} {where}{', orange' * (most > mean)}): max/mean {most / mean:.2f}."
    )
