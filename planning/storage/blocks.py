"""Blocks: a saved chunk cut into boxes of bounded size, each of them one range of its file.

A block is hashed, staged and handed to a thread as one. The cut is part of the format: it follows
from a chunk's sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints
from ..columns.catalog import column
from ..dtypes import itemsize
from ..geometry.overlap import expand
from ..geometry.tilings import pad

__all__ = ["BLOCK_BYTES", "Blocks", "boxes_of", "cut_blocks", "reach_of", "reads_of"]

BLOCK_BYTES: Final = 16 << 20
"""The most bytes of a block; a checkpoint says which limit it was made with."""


@attrs.frozen(eq=False)
class Blocks:
    """The blocks of some boxes; one row a block, by box, then row-major.

    Attributes:
        box: The box that it is a block of.
        offsets: Where it starts, relative to the box, in elements.
        sizes: How large it is, in elements.
        number: The block of its chunk that it is, or is a part of; see `cut_blocks`.
    """

    box: Ints
    offsets: Ints
    sizes: Ints
    number: Ints

    def __len__(self) -> int:
        return len(self.box)


def cut_blocks(
    sizes: Ints,
    itemsize: Ints,
    max_bytes: int = BLOCK_BYTES,
    *,
    offsets: Ints | None = None,
    extents: Ints | None = None,
) -> Blocks:
    """Cut boxes into blocks: by rows where a row fits into a block, else within rows.

    A box that is a part of a chunk may be cut where the chunk's own blocks end, so that parts of
    one block that come in several boxes can be put together again.

    Args:
        sizes: How large each box is, in elements; one row a box.
        itemsize: Bytes of an element.
        max_bytes: The most bytes a block has (but it has one element at least).
        offsets: Where each box starts in its chunk, in elements; at its start if left out.
        extents: How large that chunk is; as large as the box if left out.

    >>> cut_blocks(np.array([[5, 4]]), np.array([4]), 32).sizes.tolist()
    [[2, 4], [2, 4], [1, 4]]
    >>> cut_blocks(np.array([[2, 6]]), np.array([1]), 4).offsets.tolist()
    [[0, 0], [0, 4], [1, 0], [1, 4]]

    Two boxes of 3 and 2 elements fill a chunk of 5 that has blocks of 2:

    >>> sizes, offsets, extents = np.array([[3], [2]]), np.array([[0], [3]]), np.array([[5], [5]])
    >>> parts = cut_blocks(sizes, np.array([1, 1]), 2, offsets=offsets, extents=extents)
    >>> parts.sizes.ravel().tolist(), parts.number.tolist()
    ([2, 1, 1, 1], [0, 1, 1, 2])
    """
    sizes = pad(sizes, 1, 1)
    offsets = np.zeros_like(sizes) if offsets is None else pad(offsets, 1, 0)
    extents = sizes if extents is None else pad(extents, 1, 1)
    step = reach_of(extents, itemsize, max_bytes)
    first = offsets // step
    box, cell = expand((offsets + np.maximum(sizes, 1) - 1) // step - first + 1)
    cell += first[box]
    low = np.maximum(cell * step[box], offsets[box])
    high = np.minimum((cell + 1) * step[box], (offsets + sizes)[box])
    along, number = np.maximum(-(-extents // step), 1), np.zeros(len(box), np.int64)
    for axis in range(sizes.shape[1]):
        number = number * along[box, axis] + cell[:, axis]
    return Blocks(box, low - offsets[box], high - low, number)


def reach_of(extents: Ints, itemsize: Ints, max_bytes: int = BLOCK_BYTES) -> Ints:
    """Return how far a block reaches along each axis of a chunk, in elements.

    Args:
        extents: How large each chunk is, in elements; one row a chunk.
        itemsize: Bytes of an element.
        max_bytes: The most bytes a block has (but it has one element at least).

    A chunk without elements is one block, however long its other axes are.

    >>> reach_of(np.array([[5, 4], [2, 9], [0, 99]]), np.array([4, 4, 4]), 32).tolist()
    [[2, 4], [1, 8], [1, 99]]
    """
    reach = np.ones_like(extents)
    inner = np.maximum(itemsize, 1)
    for axis in reversed(range(extents.shape[1])):
        reach[:, axis] = np.clip(max_bytes // inner, 1, np.maximum(extents[:, axis], 1))
        inner = inner * np.maximum(extents[:, axis], 1)
    empty = (extents == 0).any(axis=1)
    reach[empty] = np.maximum(extents[empty], 1)
    return reach


def boxes_of(
    shape: Sequence[int], dtype: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the blocks of a chunk, as offsets and sizes, in the order of its bytes.

    >>> list(boxes_of((3, 4), "float32", 32))
    [([0, 0], [2, 4]), ([2, 0], [1, 4])]
    """
    nbytes = math.prod(shape) * itemsize(dtype)
    if nbytes <= block_bytes:
        return iter([([0] * len(shape), shape)])
    blocks = cut_blocks(column([shape], 1, len(shape)), column([itemsize(dtype)]), block_bytes)
    return zip(blocks.offsets.tolist(), blocks.sizes.tolist(), strict=True)


def reads_of(
    shape: Sequence[int], dtype: str, stored: str, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the boxes by which a chunk is read from a checkpoint that may store another dtype.

    They are its blocks; where elements are wider as stored, parts of these.

    >>> list(reads_of((3, 4), "float32", "float64", 32))
    [([0, 0], [1, 4]), ([1, 0], [1, 4]), ([2, 0], [1, 4])]
    """
    axes = len(shape)
    for offsets, sizes in boxes_of(shape, dtype, block_bytes):
        for inner, part in boxes_of(sizes[:axes], stored, block_bytes):
            at = [o + i for o, i in zip(offsets[:axes], inner[:axes], strict=True)]
            yield at, part[:axes]
