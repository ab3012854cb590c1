"""Blocks: a saved chunk cut into boxes of bounded size, each of which lies together in its file.

They are what is hashed, staged and handed to a thread at a time. The cut is part of the format: it
follows from a chunk's sizes alone.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np

from .overlap import expand
from .packing import Ints
from .tiling import pad

__all__ = ["BLOCK_BYTES", "Blocks", "cut_blocks"]

BLOCK_BYTES: Final = 16 << 20
"""How many bytes a block has at most; a checkpoint says which limit it was made with."""


@attrs.frozen(eq=False)
class Blocks:
    """The blocks of some boxes; one row a block, by box, then row-major.

    Attributes:
        box: Which box it is a block of.
        offsets: Where it starts, relative to the box, in elements.
        sizes: How large it is, in elements.
    """

    box: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.box)


def cut_blocks(sizes: Ints, itemsize: Ints, max_bytes: int = BLOCK_BYTES) -> Blocks:
    """Cut boxes into blocks: by rows where a row fits into a block, else within rows.

    Args:
        sizes: How large each box is, in elements; one row a box.
        itemsize: Bytes an element takes.
        max_bytes: The most bytes a block has (but it has one element at least).

    >>> cut_blocks(np.array([[5, 4]]), np.array([4]), 32).sizes.tolist()
    [[2, 4], [2, 4], [1, 4]]
    >>> cut_blocks(np.array([[2, 6]]), np.array([1]), 4).offsets.tolist()
    [[0, 0], [0, 4], [1, 0], [1, 4]]
    """
    sizes = pad(sizes, 1, 1)
    step = np.ones_like(sizes)  # how far a block reaches along each axis
    inner = np.maximum(itemsize, 1)
    for axis in reversed(range(sizes.shape[1])):
        step[:, axis] = np.clip(max_bytes // inner, 1, np.maximum(sizes[:, axis], 1))
        inner = inner * np.maximum(sizes[:, axis], 1)
    box, cell = expand(np.maximum(-(-sizes // step), 1))
    offsets = cell * step[box]
    return Blocks(box, offsets, np.minimum(step[box], sizes[box] - offsets))
