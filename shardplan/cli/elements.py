"""Which elements are shown, and how? The answers of `shardplan cat`."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shardplan._checkpoint import Axis, Checkpoint, SavedTensor, normal_index
from shardplan.io.execute import Reader
from shardplan.io.formats import Source

from .screen import console, plain, print_json, safe, shape_text

__all__ = ["Shown", "look", "print_tensor", "show_tensor"]

Shown = tuple[tuple[int, ...], npt.NDArray[Any], str]
"""The shape that was asked for, the elements (of many, the corners), and their dtype."""

_EDGE: Final = 3  # elements that are shown at each end of a long axis
_WHOLE: Final = 1000  # elements up to which all are shown


def look(source: Source, name: str, index: Any, everything: bool) -> Shown:
    """Return the shape that was asked for, its elements or (of many) the corners, and the dtype."""
    saved = Checkpoint(Reader(source))[name]
    index = ... if index is None else index
    axes = normal_index(index, saved.shape)
    shape = tuple(axis.count for axis in axes if not axis.dropped)
    dtype = str(saved.dtype).removeprefix("torch.")
    if everything or math.prod(shape) <= _WHOLE:
        return shape, _array(saved[index]), dtype
    return shape, _corners(saved, axes), dtype


def _corners(saved: SavedTensor, axes: Sequence[Axis]) -> npt.NDArray[Any]:
    """Read both ends of every long axis, with one element in between that will not be shown."""
    shown = [min(axis.count, 2 * _EDGE + 1) for axis in axes]
    ends: list[list[tuple[slice, slice]]] = []
    for axis, count in zip(axes, shown, strict=True):
        if count == axis.count:
            ends.append([(slice(None), _stretch(axis, 0, count))])
        else:
            low = (slice(0, _EDGE + 1), _stretch(axis, 0, _EDGE + 1))
            high = (slice(_EDGE + 1, count), _stretch(axis, axis.count - _EDGE, _EDGE))
            ends.append([low, high])
    out: npt.NDArray[Any] | None = None
    for corner in itertools.product(*ends):
        part = _array(saved[tuple(read for _, read in corner)])
        if out is None:
            out = np.empty(shown, part.dtype)
        out[tuple(put for put, _ in corner)] = part
    assert out is not None
    return out[tuple(0 if axis.dropped else slice(None) for axis in axes)]


def _stretch(axis: Axis, first: int, count: int) -> slice:
    """Return which elements of an axis are some of those that were asked for."""
    start = axis.start + first * axis.step
    stop = start + count * axis.step
    return slice(start, stop if stop >= 0 else None, axis.step)


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as numpy has it; what numpy has no dtype for becomes float32."""
    narrow = tensor.dtype.is_floating_point and tensor.element_size() < 4
    if narrow and tensor.dtype != torch.float16:
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def show_tensor(title: str, shown: Shown, precision: int) -> None:
    """Print elements as numpy does."""
    screen = console()
    shape, array, dtype = shown
    corners = array.shape != shape
    text = np.array2string(
        array,
        max_line_width=min(screen.width, 10_000),
        precision=precision,
        threshold=0 if corners else sys.maxsize,
        edgeitems=_EDGE,
        separator=", ",
    )
    screen.print(f"{safe(title)}: {shape_text(shape)} {dtype}", style="bold", soft_wrap=True)
    print(text)


def print_tensor(name: str, index: str, shown: Shown) -> None:
    """Print elements as JSON; ``index`` is empty if there was none."""
    shape, array, dtype = shown
    values = plain(array.tolist())
    print_json(
        {
            "key": name,
            "index": index or None,
            "type": "tensor",
            "dtype": dtype,
            "shape": list(shape),
            "values": values,
        }
    )
