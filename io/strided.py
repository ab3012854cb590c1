"""Where do the elements of a stored view lie? In place where they can be read there.

A view whose axes nest, in any order and with gaps, is a box of a row-major array: a `Spot`. Any
other one (every second column, one row told many times, conjugates) becomes a file that is not
there, which an `Overlay` makes up out of the real one as it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, cast

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning.dtypes import ITEMSIZE

from .buffers import copy_into
from .sources import Spot
from .stores import Store
from .torchpickles import StoredTensor
from .torchzip import read_ranges

__all__ = ["Overlay", "nest"]

_WORDS: Final = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


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
    """A file that is made up: the elements of a view, row-major."""

    file: str
    begin: int
    tensor: StoredTensor


class Overlay:
    """A store with some files that are made up as they are read; all else is the inner store's.

    Args:
        inner: The store with the real files.
        files: Their names; `spot` numbers files that are made up after them.
    """

    def __init__(self, inner: Store, files: Sequence[str]) -> None:
        self._inner, self._real = inner, tuple(files)
        self._made: dict[str, _Made] = {}
        self._numbers: dict[_Made, int] = {}
        self._lock = threading.Lock()
        self._last: tuple[str, npt.NDArray[Any]] | None = None

    @property
    def store(self) -> Store:
        """This, as the store that it is."""
        return cast("Store", self)

    @property
    def inner(self) -> Store:
        """The store with the real files."""
        return self._inner

    @property
    def real(self) -> int:
        """How many files are real; they come first."""
        return len(self._real)

    @property
    def files(self) -> tuple[str, ...]:
        """All files so far."""
        return (*self._real, *self._made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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
        made = _Made(self._real[file], first, tensor)
        with self._lock:
            if made not in self._numbers:
                self._numbers[made] = len(self.files)
                self._made[f"<view {len(self._made)} of {made.file}>"] = made
            return Spot(self._numbers[made], 0, tensor.dtype, tensor.size)

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        made = self._made.get(path)
        if made is None:
            return self._inner.read(path, ranges)
        elements, width = self._elements(path, made), ITEMSIZE[made.tensor.dtype]
        total = 0
        for offset, view in ranges:
            last = -(-(offset + len(view)) // width)
            cells = np.array(elements.flat[offset // width : last])
            _flip(cells, made.tensor)
            skipped = offset % width
            copy_into(view, cells.view(np.uint8)[skipped : skipped + len(view)])
            total += len(view)
        return total

    def _elements(self, path: str, made: _Made) -> npt.NDArray[Any]:
        """Return the view, over bytes of the real file; those read last are kept."""
        with self._lock:
            if self._last is None or self._last[0] != path:
                tensor, width = made.tensor, ITEMSIZE[made.tensor.dtype]
                data = bytearray(tensor.span * width)
                read_ranges(self._inner, made.file, [(made.begin, memoryview(data))])
                flat = np.frombuffer(data, _WORDS[width])
                steps = [s * width for s in tensor.stride]
                self._last = path, np.lib.stride_tricks.as_strided(flat, tensor.size, steps)
            return self._last[1]


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
