"""Shapes and tilings in a manifest, and its columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardplan.planning import Grid, Layout
from shardplan.planning.columns import (
    Ints,
    decode_columns,
    decode_runs,
    encode_runs,
    readonly,
    within,
)
from shardplan.planning.geometry import Boxes, Tiling, shape_fault

from ..base import MAX_BYTES

MOST_NUMBERS: Final = 1 << 25
"""The most numbers that runs of one kind may stand for."""


def decode_numbers(values: Any, end: int, what: str, count: int | None = None) -> Ints:
    """Return whole numbers, all of them at least 0 and less than ``end``; ``count``, if given."""
    array = decode_runs(values, MOST_NUMBERS if count is None else count)
    if not within(array, end):
        raise ValueError(f"{what} is impossible: {array.min()} to {array.max()}, of {end}")
    if count is not None and len(array) != count:
        raise ValueError(f"of {count} in a column, {len(array)} have {what}")
    return array


def encode_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout as JSON data."""
    tiling = layout.tiling
    size = list(layout.size)
    if isinstance(tiling, Grid):
        return {"size": size, "cuts": [encode_runs(c) for c in tiling.cuts]}
    boxes = {"offsets": tiling.offsets, "sizes": tiling.sizes}
    axes = {key: [encode_runs(c) for c in rows.T] for key, rows in boxes.items()}
    return {"size": size, "chunks": len(tiling), **axes}


def decode_layouts(
    layouts: Sequence[dict[str, Any]], files: int, version: int
) -> tuple[Layout, ...]:
    """Read layouts. A few bytes of cuts can stand for any number of chunks: none are made here."""
    columns = [c for data in layouts for key in _AXES if key in data for c in data[key]]
    # An axis has no more cuts than there are chunks; old versions list a number for each axis.
    numbers = decode_columns(columns, files + 64, MOST_NUMBERS)
    found = []
    for data in layouts:
        size = decode_numbers(data["size"], MAX_BYTES, "a size")
        fault = shape_fault(size.tolist())
        if fault is not None:
            raise ValueError(f"a tensor {fault}")
        axes: dict[str, list[Ints]] = {
            key: [next(numbers) for _ in data[key]] for key in _AXES if key in data
        }
        tiling = _grid(size, axes["cuts"]) if "cuts" in axes else _boxes(data, axes, size, version)
        found.append(Layout(tuple(size.tolist()), tiling))
    return tuple(found)


_AXES: Final = ("cuts", "offsets", "sizes")


def _grid(size: Ints, cuts: list[Ints]) -> Grid:
    if len(cuts) != len(size) or any(
        len(c) < 2 or not within(c, MAX_BYTES) or c[-1] > end or (c[1:] <= c[:-1]).any()
        for c, end in zip(cuts, size, strict=True)
    ):
        raise ValueError(f"the cuts of shape {size.tolist()} do not ascend inside it")
    return Grid(tuple(cuts))


def _boxes(data: dict[str, Any], axes: dict[str, list[Ints]], size: Ints, version: int) -> Tiling:
    """Read chunks; they are listed axis by axis, and up to version 2 chunk by chunk."""
    count = data["chunks"] if version > 2 else len(axes["offsets"])
    shape = (len(size), count) if version > 2 else (count, len(size))
    if type(count) is not int or not 0 <= count <= MOST_NUMBERS:
        raise ValueError(f"a tensor has {str(count)[:80]} chunks")
    boxes = []
    for key in ("offsets", "sizes"):
        if len(axes[key]) != shape[0] or any(len(c) != shape[1] for c in axes[key]):
            raise ValueError("a chunk's offsets or sizes are impossible")
        array = np.array(axes[key], np.int64).reshape(shape)
        boxes.append(readonly(np.ascontiguousarray(array.T) if version > 2 else array))
    offsets, sizes = boxes
    if not within(offsets, MAX_BYTES) or not within(sizes, MAX_BYTES):
        raise ValueError("a chunk's offsets or sizes are impossible")
    if (offsets + sizes > size).any():
        raise ValueError(f"chunks of shape {size.tolist()} lie outside of it")
    return Boxes(offsets, sizes)
