"""What does a load have to fetch? Its reads as columns, cut into blocks, grouped into tasks.

Nothing is read here. What a thread does with a task is said in `shardplan.io.fetch`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning.blocks import BLOCK_BYTES, Blocks
from shardplan.planning.packing import Ints
from shardplan.planning.ranges import ByteRanges, byte_ranges, lies_together, steps

from .arrays import is_plain

__all__ = ["Job"]

Flags = npt.NDArray[np.bool_]

_TASK_BLOCKS: Final = 1 << 12


@attrs.frozen(eq=False, slots=False)
class Job:
    """Everything that a load has to do; one row a read, except ``blocks``, which cut reads up.

    Attributes:
        tensors: The boxes to fill.
        files: The checkpoint's files, and ``file``, which of them each read is from.
        begin: Where the chunk that is read begins in its file, in bytes.
        dtypes, itemsize: What the chunk is stored as.
        extents: The sizes of the chunk, in elements.
        offsets, lengths: Which box of it is read, in elements.
        chunk: Which chunk it is.
        hashed: Whether the reads fill that chunk (see `shardplan.planning.ranges.filled`), so that
            it can be hashed.
        blocks: What is fetched at a time. Those of reads that are hashed end where the chunk's do.
    """

    tensors: list[torch.Tensor]
    files: tuple[str, ...]
    file: Ints
    begin: Ints
    dtypes: list[str]
    itemsize: Ints
    extents: Ints
    offsets: Ints
    lengths: Ints
    chunk: Ints
    hashed: Flags
    blocks: Blocks

    @cached_property
    def block_bytes(self) -> Ints:
        """How many bytes each block has."""
        nbytes: Ints = self.blocks.sizes.prod(axis=1) * self.itemsize[self.blocks.box]
        return nbytes

    @property
    def nbytes(self) -> int:
        """How many bytes are wanted altogether."""
        return int(self.block_bytes.sum())

    @cached_property
    def first(self) -> Ints:
        """Where the first byte of each block lies in its file."""
        box = self.blocks.box
        place = (self.offsets[box] + self.blocks.offsets) * steps(self.extents)[box]
        first: Ints = self.begin[box] + place.sum(axis=1) * self.itemsize[box]
        return first

    @cached_property
    def into(self) -> Ints:
        """Where the first byte of each block goes in its read's own box, laid out row-major."""
        box = self.blocks.box
        place = (self.blocks.offsets * steps(self.lengths)[box]).sum(axis=1)
        into: Ints = place * self.itemsize[box]
        return into

    @cached_property
    def plain(self) -> Flags:
        """Which blocks are one range of their file that goes into one range of memory as it is."""
        own = [is_plain(t, dtype) for t, dtype in zip(self.tensors, self.dtypes, strict=True)]
        box = self.blocks.box
        plain: Flags = np.array(own, bool)[box]
        plain &= lies_together(self.blocks.sizes, self.extents[box])
        return plain

    @cached_property
    def unit(self) -> Ints:
        """Which blocks are hashed together, as parts of one of their chunk's; others are alone."""
        box, number = self.blocks.box, self.blocks.number
        unit = np.arange(len(box))
        rows = np.flatnonzero(self.hashed[box])
        key = self.chunk[box[rows]] * (int(number.max(initial=0)) + 1) + number[rows]
        _, first, same = np.unique(key, return_index=True, return_inverse=True)
        unit[rows] = rows[first][same]
        return unit

    @cached_property
    def tasks(self) -> list[Ints]:
        """The blocks in order of place, in groups of one file that are worth a thread's while.

        Blocks that are hashed together stay together.
        """
        file, unit = self.file[self.blocks.box], self.unit
        place = np.full(len(unit), np.iinfo(np.int64).max)  # of a unit
        np.minimum.at(place, unit, self.first)
        order = np.lexsort((self.first, unit, place[unit], file))
        size, limit = self.block_bytes[order], max(int(self.block_bytes.max()), BLOCK_BYTES)
        before = np.cumsum(size) - size
        group = before // limit + (np.arange(len(order)) // _TASK_BLOCKS)
        leads = np.diff(unit[order], prepend=-1) != 0
        group = group[np.maximum.accumulate(np.where(leads, np.arange(len(order)), 0))]
        new = (np.diff(group) != 0) | (np.diff(file[order]) != 0)
        return np.split(order, np.flatnonzero(new) + 1)

    def cost(self, task: Ints) -> int:
        """How many bytes a task may have to hold: plain blocks need no memory but the tensors'."""
        return 2 * int(self.block_bytes[task[~self.plain[task]]].sum())

    def ranges(self, task: Ints) -> ByteRanges:
        """Return the bytes of their file that some blocks are made of."""
        box = self.blocks.box[task]
        return byte_ranges(
            self.offsets[box] + self.blocks.offsets[task],
            self.blocks.sizes[task],
            self.extents[box],
            self.itemsize[box],
            self.begin[box],
        )
