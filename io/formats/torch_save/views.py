"""Where do the elements of a stored view lie? In place where they can be read there.

A view whose axes nest, in any order and with gaps, is a box of a row-major array: a `Spot`. Any
other one (every second column, one row told many times, conjugates) becomes a file that is not
there, which an `Overlay` makes up out of the real one as it is read, a few MiB at a time. Its axes
come in the order of the storage, so that what is read together lies together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import ITEMSIZE

from ...buffers import copy_into
from ...stores.base import Store
from ...stores.folders import WrappedStore
from ..base import Spot
from .standins import StoredTensor
from .zip_read import read_ranges

__all__ = ["Overlay", "nest"]

_WORDS: Final = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_GROUP: Final = 4 << 20  # bytes of a view that are made up at once
_SPAN: Final = 8 << 20  # bytes of its storage that are read at once
Range = tuple[int, memoryview]


def nest(
    size: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """See a view as the first corner of a row-major array.

    Args:
        size: Its shape.
        stride: How far apart its elements lie along each axis, in elements.

    Returns:
        The sizes of the array, in the order in which its axes are stored, and which axes of the
        view these are (None if they are in order); None if there is no such array.

    >>> nest((2, 3), (3, 1)), nest((2, 3), (1, 2)), nest((4, 3), (6, 1))
    (((2, 3), None), ((3, 2), (1, 0)), ((4, 6), None))
    >>> nest((4, 3), (6, 2)), nest((4, 3), (0, 1))
    (None, None)
    """
    if 0 in size:
        return tuple(size), None
    extents = _extents(size, stride)
    if extents is not None:
        return extents, None
    order = sorted(range(len(size)), key=lambda axis: (size[axis] > 1, -stride[axis]))
    extents = _extents([size[a] for a in order], [stride[a] for a in order])
    return None if extents is None else (extents, tuple(order))


def _extents(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    extents = list(size)
    inner, step = -1, 1  # the axis inside the one that is looked at, and the stride it must have
    for axis in reversed(range(len(size))):
        if size[axis] == 1:
            continue
        if inner < 0:
            if stride[axis] != 1:
                return None
        elif stride[axis] % step or stride[axis] // step < size[inner]:
            return None
        else:
            extents[inner] = stride[axis] // step
        inner, step = axis, stride[axis]
    return tuple(extents)


@attrs.frozen
class _Made:
    """A file that is made up: the elements of a view, row-major, its widest strides first."""

    file: str
    begin: int
    tensor: StoredTensor


class Overlay(WrappedStore):
    """A store with some files that are made up as they are read; all else is the inner store's.

    Args:
        inner: The store with the real files.
        files: Their names; `spot` numbers files that are made up after them.
    """

    def __init__(self, inner: Store, files: Sequence[str]) -> None:
        super().__init__(inner)
        self._real = tuple(files)
        self._made: dict[str, _Made] = {}
        self._numbers: dict[_Made, int] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> tuple[str, ...]:
        """All files so far."""
        return (*self._real, *self._made)

    def locate(self, path: str = "") -> str | None:
        """Return where a real file is on this machine's disks; see `Store.locate`."""
        return self.inner.locate(path) if path and path not in self._made else None

    def spot(self, file: int, begin: int, tensor: StoredTensor) -> Spot:
        """Say where a view's elements can be read.

        Args:
            file: The number of the file that holds its storage.
            begin: Where the storage begins there.
            tensor: The view.
        """
        first = begin + tensor.offset * ITEMSIZE[tensor.dtype]
        nested = None if tensor.conj or tensor.neg else nest(tensor.size, tensor.stride)
        if nested is not None:
            return Spot(file, first, tensor.dtype, *nested)
        order = tuple(sorted(range(len(tensor.size)), key=lambda axis: -tensor.stride[axis]))
        size = tuple(tensor.size[axis] for axis in order)
        stride = tuple(tensor.stride[axis] for axis in order)
        made = _Made(self._real[file], first, attrs.evolve(tensor, size=size, stride=stride))
        with self._lock:
            if made not in self._numbers:
                self._numbers[made] = len(self.files)
                self._made[f"<view {len(self._made)} of {made.file}>"] = made
            axes = None if order == tuple(range(len(order))) else order
            return Spot(self._numbers[made], 0, tensor.dtype, size, axes)

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        made = self._made.get(path)
        if made is None:
            return self.inner.read(path, ranges)
        for low, high, group in _groups(ranges):
            cells = self._cells(made, low, high)
            for offset, view in group:
                copy_into(view, cells[offset - low : offset - low + len(view)])
        return sum(len(view) for _, view in ranges)

    def _cells(self, made: _Made, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Return some bytes of a file that is made up."""
        tensor, width = made.tensor, ITEMSIZE[made.tensor.dtype]
        first, last = low // width, -(-high // width)
        cells = np.empty(last - first, _WORDS[width])

        def fetch(at: int, count: int) -> npt.NDArray[Any]:
            data = bytearray(count * width)
            place = made.begin + at * width
            read_ranges(self.inner, made.file, [(place, memoryview(data))])
            return np.frombuffer(data, _WORDS[width])

        _gather(fetch, tensor.size, tensor.stride, first, cells, max(_SPAN // width, 1))
        _flip(cells, tensor)
        return cells.view(np.uint8)[low - first * width : high - first * width]


def _groups(ranges: Sequence[Range]) -> Iterator[tuple[int, int, list[Range]]]:
    """Cut long ranges up, and put short neighbours together; yield each group and its bounds."""
    group: list[Range] = []
    low = high = 0
    for offset, view in ranges:
        for at in range(0, len(view), _GROUP):
            part = view[at : at + _GROUP]
            begin, end = offset + at, offset + at + len(part)
            if group and (begin < low or max(high, end) - low > _GROUP):
                yield low, high, group
                group = []
            low, high = (low, max(high, end)) if group else (begin, end)
            group.append((begin, part))
    if group:
        yield low, high, group


def _gather(
    fetch: Callable[[int, int], npt.NDArray[Any]],
    size: Sequence[int],
    stride: Sequence[int],
    first: int,
    cells: npt.NDArray[Any],
    most: int,
    start: int = 0,
) -> None:
    """Fill cells with elements of a view, the first of which is its ``first``, row-major.

    Args:
        fetch: Returns so many elements of the storage, from a place on.
        size: The view's shape.
        stride: How far apart its elements lie along each axis.
        first: The first element to take.
        cells: What to fill.
        most: How many elements to fetch at once.
        start: Where in the storage the view starts.
    """
    if not size:
        cells[:] = fetch(start, 1)
        return
    inner = math.prod(size[1:])
    row_span = 1 + sum((n - 1) * s for n, s in zip(size[1:], stride[1:], strict=True))
    fit = size[0] if not stride[0] else 1 + max(most - row_span, 0) // stride[0]
    done = 0
    while done < len(cells):
        row, skipped = divmod(first + done, inner)
        rows = min(fit, -(-(skipped + len(cells) - done) // inner))
        part = cells[done : done + rows * inner - skipped]
        at = start + row * stride[0]
        if rows == 1 and len(size) > 1:
            _gather(fetch, size[1:], stride[1:], skipped, part, most, at)
        else:
            found = fetch(at, (rows - 1) * stride[0] + row_span)
            steps = [s * found.itemsize for s in stride]
            box = np.lib.stride_tricks.as_strided(found, (rows, *size[1:]), steps)
            part[:] = box.flat[skipped : skipped + len(part)]
        done += len(part)


def _flip(cells: npt.NDArray[Any], tensor: StoredTensor) -> None:
    """Turn what is stored into what is meant: conjugates differ in one sign, negatives in all."""
    if not tensor.conj and not tensor.neg:
        return
    parts = 2 if tensor.dtype.startswith("complex") else 1
    width = ITEMSIZE[tensor.dtype] // parts
    words: npt.NDArray[Any] = cells.view(f"<u{width}")
    sign = words.dtype.type(1 << (8 * width - 1))
    if tensor.conj:
        words[1::2] ^= sign
    if tensor.neg:
        words ^= sign
