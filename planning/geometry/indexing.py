"""Indexing as numpy does it: which elements of a tensor an index selects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np


@attrs.frozen
class Axis:
    """The elements that are wanted along one axis.

    ``step`` may be negative; ``dropped`` leaves the axis out of the result, as for an integer.
    """

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def low(self) -> int:
        """The lowest position."""
        return self.start + min(self.step, 0) * (self.count - 1)

    @property
    def reach(self) -> int:
        """The distance from the lowest position past the highest."""
        return abs(self.step) * (self.count - 1) + 1

    @property
    def stride(self) -> int:
        """The distance between neighbours, in ascending order."""
        return abs(self.step) if self.count > 1 else 1


@attrs.frozen
class Selection:
    """What an index selects: elements along each axis, and the shape that numpy gives them."""

    axes: tuple[Axis, ...]
    shape: tuple[int, ...]

    @property
    def flipped(self) -> list[int]:
        """The axes along which elements are wanted in descending order."""
        return [number for number, axis in enumerate(self.axes) if axis.step < 0]


def selection_of(index: Any, shape: Sequence[int]) -> Selection:
    """Return what an index of integers, slices, ``None`` and an ellipsis selects.

    >>> selection_of((-1, slice(None, None, -2)), (4, 5)).axes
    (Axis(start=3, step=1, count=1, dropped=True), Axis(start=4, step=-2, count=3, dropped=False))
    >>> selection_of((..., None, 0), (4, 5)).shape
    (4, 1)
    """
    parts = index if isinstance(index, tuple) else (index,)
    dots = [number for number, part in enumerate(parts) if part is Ellipsis]
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if len(dots) > 1 or given > len(shape):
        raise IndexError(f"{parts!r} has too many parts for a tensor of shape {list(shape)}")
    at = dots[0] if dots else len(parts)
    parts = (*parts[:at], *[slice(None)] * (len(shape) - given), *parts[at + len(dots) :])
    axes: list[Axis] = []
    selected: list[int] = []
    for part in parts:
        if part is None:
            selected.append(1)
            continue
        axes.append(_axis(part, shape[len(axes)], len(axes)))
        if not axes[-1].dropped:
            selected.append(axes[-1].count)
    return Selection(tuple(axes), tuple(selected))


def _axis(part: Any, length: int, number: int) -> Axis:
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        return Axis(start, step, len(range(start, stop, step)))
    try:
        if isinstance(part, (bool, np.bool_)) or getattr(part, "ndim", 0) > 0:
            raise TypeError  # a mask or an array, even if of one element
        position = operator.index(part)
    except TypeError:
        kind = f"a {type(part).__name__}" if hasattr(part, "__len__") else repr(part)
        raise TypeError(
            f"{kind} cannot index a saved tensor; use whole numbers, slices, None and ..., or "
            "read() it first and index that by lists, arrays and masks"
        ) from None
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of range for axis {number} of length {length}")
    return Axis(position % length, 1, 1, dropped=True)
