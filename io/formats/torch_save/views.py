"""Stored views of any strides, read in place where possible.

A view whose axes nest, in any order and with gaps, is a box of a row-major array: a
`ChunkPlace`. Any other (every second column, a repeated row, conjugates) is exposed as a virtual
file, which an `Overlay` computes from the real one as it is read, a few MiB at a time. Its axes are
in the order of the storage, so that elements that are read together lie together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import ITEMSIZE

from ...buffers import copy_into
from ...stores.base import Store, WrappedStore
from ..base import ChunkPlace
from .standins import StoredTensor
from .zip_read import read_ranges

_WORDS: Final = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
_GROUP: Final = 4 << 20  # bytes of a view that are computed at once
_SPAN: Final = 8 << 20  # bytes of its storage that are read at once
Range = tuple[int, memoryview]


def nest(
    size: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Return a row-major array whose first corner is a view.

    Args:
        size: The view's shape.
        stride: Its strides, in elements.

    Returns:
        The sizes of the array, in the order in which its axes are stored, and the view's axis that
        each is (None if they are in order); None if there is no such array.

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
    inner, step = -1, 1  # the next axis inwards, and its stride
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
class _Virtual:
    """A virtual file: the elements of a view, row-major, its widest strides first."""

    file: str
    begin: int
    tensor: StoredTensor


class Overlay(WrappedStore):
    """A store with some virtual files; all others are those of the inner store."""

    def __init__(self, inner: Store, files: Sequence[str]) -> None:
        super().__init__(inner)
        self.files = list(files)  # the real files, then the virtual ones so far
        self._virtual: dict[str, _Virtual] = {}
        self._numbers: dict[_Virtual, int] = {}
        self._lock = threading.Lock()

    def locate(self, path: str = "") -> str | None:
        """Return where a real file is on this machine's disks; see `Store.locate`."""
        return self.inner.locate(path) if path and path not in self._virtual else None

    def chunk_place(self, file: int, begin: int, tensor: StoredTensor) -> ChunkPlace:
        """Return where a view's elements can be read."""
        first = begin + tensor.offset * ITEMSIZE[tensor.dtype]
        nested = None if tensor.conj or tensor.neg else nest(tensor.size, tensor.stride)
        if nested is not None:
            return ChunkPlace(file, first, tensor.dtype, *nested)
        order = tuple(sorted(range(len(tensor.size)), key=lambda axis: -tensor.stride[axis]))
        size = tuple(tensor.size[axis] for axis in order)
        stride = tuple(tensor.stride[axis] for axis in order)
        view = _Virtual(self.files[file], first, attrs.evolve(tensor, size=size, stride=stride))
        with self._lock:
            if view not in self._numbers:
                name = f"<view {len(self._virtual)} of {view.file}>"
                self._virtual[name], self._numbers[view] = view, len(self.files)
                self.files.append(name)
        axes = None if order == tuple(range(len(order))) else order
        return ChunkPlace(self._numbers[view], 0, tensor.dtype, size, axes)

    def read(self, path: str, ranges: Sequence[Range]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        view = self._virtual.get(path)
        if view is None:
            return self.inner.read(path, ranges)
        for group in _groups(ranges):
            low = group[0][0]
            cells = self._cells(view, low, max(offset + len(part) for offset, part in group))
            for offset, part in group:
                copy_into(part, cells[offset - low : offset - low + len(part)])
        return sum(len(part) for _, part in ranges)

    def _cells(self, view: _Virtual, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Return some bytes of a virtual file."""
        tensor, width = view.tensor, ITEMSIZE[view.tensor.dtype]
        first, last = low // width, -(-high // width)
        cells = np.empty(last - first, _WORDS[width])
        _Gather(self.inner, view).fill(cells, first, 0, 0)
        _flip(cells, tensor)
        return cells.view(np.uint8)[low - first * width : high - first * width]


def _groups(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Split long ranges, and group short neighbours; the first of a group begins first."""
    group: list[Range] = []
    for offset, view in ranges:
        for at in range(0, len(view), _GROUP):
            part = view[at : at + _GROUP]
            low = group[0][0] if group else 0
            if group and not low <= offset + at <= low + _GROUP - len(part):
                yield group
                group = []
            group.append((offset + at, part))
    if group:
        yield group


@attrs.frozen
class _Gather:
    """Gathers elements of a view."""

    store: Store
    view: _Virtual

    def fill(self, cells: npt.NDArray[Any], first: int, axis: int, start: int) -> None:
        """Fill cells with elements of a part of the view, row-major.

        Args:
            cells: The cells.
            first: The first element to take, counted in the part.
            axis: The first axis of the part, which has this and all later axes.
            start: Where the part starts, counted from the view's first element in storage.
        """
        size, stride = self.view.tensor.size[axis:], self.view.tensor.stride[axis:]
        if not size:
            cells[:] = self._fetch(start, 1)
            return
        inner = math.prod(size[1:])
        row_span = 1 + sum((n - 1) * s for n, s in zip(size[1:], stride[1:], strict=True))
        most = max(_SPAN // cells.itemsize, 1)
        fit = 1 + max(most - row_span, 0) // stride[0] if stride[0] else size[0]
        done = 0
        while done < len(cells):
            row, skipped = divmod(first + done, inner)
            rows = min(fit, -(-(skipped + len(cells) - done) // inner))
            part = cells[done : done + rows * inner - skipped]
            at = start + row * stride[0]
            if rows == 1 and len(size) > 1:
                self.fill(part, skipped, axis + 1, at)
            else:
                found = self._fetch(at, (rows - 1) * stride[0] + row_span)
                steps = [s * found.itemsize for s in stride]
                box = np.lib.stride_tricks.as_strided(found, (rows, *size[1:]), steps)
                part[:] = box.flat[skipped : skipped + len(part)]
            done += len(part)

    def _fetch(self, at: int, count: int) -> npt.NDArray[Any]:
        """Read so many elements of the storage, counted from the view's first element."""
        width = ITEMSIZE[self.view.tensor.dtype]
        data = bytearray(count * width)
        read_ranges(self.store, self.view.file, [(self.view.begin + at * width, memoryview(data))])
        return np.frombuffer(data, _WORDS[width])


def _flip(cells: npt.NDArray[Any], tensor: StoredTensor) -> None:
    """Apply conjugation, which flips one sign of each element, and negation, which flips all."""
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
