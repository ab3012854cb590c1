"""The elements of items and boxes, one by one: for oracles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..geometry.axes import Axes
from ..geometry.tilings import Chunk
from ..records import WriteItem

__all__ = ["Element", "item_elements", "pairs", "plus"]

Element = tuple[int, ...]
"""Where an element lies in its tensor, in the global frame."""


def item_elements(item: WriteItem) -> Iterator[tuple[Element, Element | None]]:
    """Yield each element that an item writes, with the state dict's that it is made of.

    An element of padding is made of none.
    """
    if item.tensor_data is None:
        yield (), ()
        return
    chunk, box = item.tensor_data.chunk, item.source_chunk
    if box is not None:
        yield from pairs(chunk, box, item.axes)
        return
    for element in np.ndindex(chunk.sizes):
        yield plus(chunk.offsets, element), None


def pairs(chunk: Chunk, box: Chunk, axes: Axes | None) -> Iterator[tuple[Element, Element]]:
    """Yield each element of a chunk, with that of the box which becomes it."""
    number: npt.NDArray[Any] = np.arange(box.numel)
    if axes is not None and box.numel:
        number = number.reshape(axes.split).transpose(axes.order)
    number = number.reshape(chunk.sizes)
    for element in np.ndindex(chunk.sizes):
        origin = [int(at) for at in np.unravel_index(int(number[element]), box.sizes)]
        yield plus(chunk.offsets, element), plus(box.offsets, origin)


def plus(a: Sequence[int], b: Sequence[int]) -> Element:
    """Add two vectors."""
    return tuple(x + y for x, y in zip(a, b, strict=True))
