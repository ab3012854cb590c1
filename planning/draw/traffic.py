"""Show me: who reads how much of what whom wrote, as a heat map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..packing import Ints
from ..records import LoadPlan, SavePlan
from ..reports.writers import Writers
from ..text import counted, human_bytes
from ..topology import WorldPlans
from .matrix import known_writers, traffic_matrix, world_sums
from .svg import (
    EMPTY,
    INK,
    MARGIN,
    MUTED,
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

__all__ = ["draw_traffic"]

_CELLS: Final = 32  # rows and columns of a heat map: more are drawn together


def draw_traffic(
    traffic: npt.ArrayLike | Iterable[LoadPlan] | WorldPlans,
    writers: Writers | Iterable[SavePlan] | None = None,
    *,
    source: str = "rank",
    reader: str = "rank",
    source_names: Sequence[str] = (),
    title: str = "Traffic",
) -> Picture:
    """Draw who reads how many bytes of what whom wrote, as a heat map.

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
    units = source, reader
    shape, steps, sums, matrix = _in_blocks(traffic, writers)
    if source_names and len(source_names) != shape[0]:
        raise ValueError(f"{len(source_names)} names do not fit {shape[0]} rows of traffic")
    rows, columns = sums.shape
    size = max(14.0, min(74.0, 480 / columns)), max(14.0, min(36.0, 448 / rows))
    names = (
        span_names(shape[0], steps[0], source_names),
        span_names(shape[1], steps[1]),
    )
    gutter = min(300.0, max(width_of(name, 11) for name in names[0])) + 40
    heat = _Heat(MARGIN + gutter, TOP + 44, *size, float(sums.max()))
    right, bottom = heat.x + columns * size[0], heat.y + rows * size[1]
    body = [
        *heat.cells(sums, names, units),
        *heat.labels(names, (f"from {source}", f"to {reader}"), gutter),
        *_scale_legend(right + 24, heat.y, max(110.0, min(200.0, bottom - heat.y - 26)), heat.most),
    ]
    full = max(420.0, right + 24 + 14 + 76 + MARGIN)
    told = (
        _world_told(sums, steps, shape, units)
        if matrix is None
        else _told(matrix, units, source_names)
    )
    caption = told + _blocks_told(steps, source, reader)
    about = f"{counted(shape[0], source)} → {counted(shape[1], reader)}"
    end = max(bottom, heat.y + 136) + 8
    return card(title, about, "".join(body), caption, (full, end))


_Shape = tuple[int, int]


def _in_blocks(
    traffic: Any, writers: Writers | Iterable[SavePlan] | None
) -> tuple[_Shape, _Shape, Ints, Ints | None]:
    """Return how many sources and readers there are, how many are added up, and their sums.

    The whole matrix comes last, unless it is that of a large world, which is never made.
    """
    if not isinstance(traffic, WorldPlans):
        matrix = _matrix(traffic, writers)
        shape = matrix.shape[0], matrix.shape[1]
        steps = block(shape[0], _CELLS), block(shape[1], _CELLS)
        return shape, steps, _sums(matrix, steps), matrix
    known = known_writers(writers)
    shape = int(known.ranks.max(initial=-1)) + 1, len(traffic)
    steps = block(shape[0], _CELLS), block(shape[1], _CELLS)
    sums = _checked(world_sums(traffic, known, steps))
    return shape, steps, sums, sums if steps == (1, 1) else None


def _matrix(traffic: Any, writers: Writers | Iterable[SavePlan] | None) -> Ints:
    """Return the bytes of a matrix or of plans."""
    if writers is not None:
        return _checked(traffic_matrix(traffic, writers))
    if not isinstance(traffic, np.ndarray):
        traffic = list(traffic)
        if any(isinstance(plan, LoadPlan) for plan in traffic):
            raise ValueError("load plans do not say who wrote; pass writers=, the plans written")
    return _checked(np.asarray(traffic))


def _checked(matrix: npt.NDArray[Any]) -> Ints:
    if matrix.ndim != 2 or not matrix.size or matrix.min() < 0:
        raise ValueError(
            "expected bytes as a matrix, one row a source and one column a reader, none of them "
            f"negative; got shape {matrix.shape}"
        )
    return matrix


def _sums(matrix: Ints, steps: tuple[int, int]) -> Ints:
    """Add up blocks of rows and columns.

    >>> _sums(np.arange(6).reshape(2, 3), (1, 2))
    array([[1, 2],
           [7, 5]])
    """
    for axis, step in enumerate(steps):
        matrix = np.add.reduceat(matrix, np.arange(0, matrix.shape[axis], step), axis=axis)
    return matrix


@attrs.frozen
class _Heat:
    """Where a heat map lies, how large its cells are, and the value of its darkest colour."""

    x: float
    y: float
    width: float
    height: float
    most: float

    def cells(
        self, sums: Ints, names: tuple[list[str], list[str]], units: tuple[str, str]
    ) -> list[str]:
        """Draw the cells, with their bytes where these fit everywhere."""
        words = [[byte_tick(v) for v in row] for row in sums.tolist()]
        widest = max(width_of(w, 10) for row in words for w in row)
        labelled = widest <= self.width - 6 and self.height >= 14
        gap = 1.0 if self.width >= 20 else 0.5
        drawn = []
        for i, row in enumerate(sums.tolist()):
            for j, value in enumerate(row):
                x, y = self.x + j * self.width, self.y + i * self.height
                fill = ramp(0.97 - 0.97 * value / self.most) if value else EMPTY
                tip = f"{units[0]} {names[0][i]} → {units[1]} {names[1][j]}: {words[i][j]}"
                size = self.width - gap, self.height - gap
                drawn.append(rect(x, y, *size, fill, tip if value else "", class_="cell"))
                if labelled and value:
                    x, y = x + size[0] / 2, y + size[1] / 2 + 3.6
                    ink = ink_on(fill)
                    drawn.append(text(x, y, words[i][j], anchor="middle", font_size=10, fill=ink))
        return drawn

    def labels(
        self, names: tuple[list[str], list[str]], titles: tuple[str, str], gutter: float
    ) -> list[str]:
        """Write the names of rows and columns, as many as fit, and what they are."""
        rows = [self.y + (i + 0.5) * self.height for i in range(len(names[0]))]
        columns = [self.x + (j + 0.5) * self.width for j in range(len(names[1]))]
        widest = max(width_of(name, 11) for name in names[1]) + 8
        drawn = [
            text(
                self.x - 8, rows[i] + 4, elide(names[0][i], gutter - 39, 11), anchor="end", fill=INK
            )
            for i in thin(rows, 13)
        ]
        drawn += [
            text(columns[j], self.y - 8, names[1][j], anchor="middle", fill=INK)
            for j in thin(columns, widest)
        ]
        middle = self.y + len(rows) * self.height / 2
        x = MARGIN + 8
        turn = f"rotate(-90 {x:.2f} {middle:.2f})"
        drawn.append(text(x, middle, titles[0], anchor="middle", fill=MUTED, transform=turn))
        middle = self.x + len(columns) * self.width / 2
        return [*drawn, text(middle, self.y - 28, titles[1], anchor="middle", fill=MUTED)]


def _scale_legend(x: float, y: float, height: float, most: float) -> list[str]:
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


def _told(matrix: Ints, units: tuple[str, str], names: Sequence[str]) -> str:
    """Say how much there is in all, and where most of it is."""
    total, pairs = int(matrix.sum()), int(np.count_nonzero(matrix))
    if not total:
        return "Nothing is read."
    row, column = (int(i) for i in np.unravel_index(int(matrix.argmax()), matrix.shape))
    most = human_bytes(int(matrix[row, column]))
    origin = elide(names[row], 360, 12) if names else f"{units[0]} {row}"
    return (
        f"{human_bytes(total)} in all; {pairs:,} of {matrix.size:,} pairs share bytes, "
        f"{origin} → {units[1]} {column} the most ({most})."
    )


def _world_told(
    sums: Ints, steps: tuple[int, int], shape: tuple[int, int], units: tuple[str, str]
) -> str:
    """Say how much there is in all, and which block has most of it."""
    if not sums.any():
        return "Nothing is read."
    at = np.unravel_index(int(sums.argmax()), sums.shape)
    names = (
        f"{unit}s {span_names(count, step)[int(i)]}" if step > 1 else f"{unit} {int(i)}"
        for unit, count, step, i in zip(units, shape, steps, at, strict=True)
    )
    most = human_bytes(int(sums.max()))
    return f"{human_bytes(int(sums.sum()))} in all, {' → '.join(names)} the most ({most})."


def _blocks_told(steps: tuple[int, int], source: str, reader: str) -> str:
    if steps == (1, 1):
        return ""
    return f" Each cell adds up {counted(steps[0], source)} × {counted(steps[1], reader)}."
