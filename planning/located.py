"""In which block of which saved chunk does a read lie? Blocks are what checksums are made of.

What is read whole, block by block, can be checked, whoever reads which block.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from .blocks import BLOCK_BYTES, reach_of
from .catalog import column
from .metadata import Metadata
from .packing import Ints
from .reads import ReadItems
from .reports.writers import ChunkTable
from .tiling import pad

__all__ = ["Located", "locate_reads"]


@attrs.frozen(eq=False)
class Located:
    """The block in which each read begins; one row a read.

    Attributes:
        entry: Which of the checkpoint's entries is read.
        chunk: Which chunk of it; -1 if there is none such.
        number: Which block of the chunk.
        start: Where the block starts in the chunk, in elements.
        sizes: How large it is, in elements.
        extents: How large the chunk is.
        inside: Whether the read also ends in that block.
    """

    entry: Ints
    chunk: Ints
    number: Ints
    start: Ints
    sizes: Ints
    extents: Ints
    inside: npt.NDArray[np.bool_]

    @property
    def numel(self) -> Ints:
        """How many elements the block has."""
        numel: Ints = self.sizes.prod(axis=1)
        return numel

    @property
    def keys(self) -> Ints:
        """What tells one block from another: entry, chunk, number."""
        return np.stack([self.entry, self.chunk, self.number], axis=1)


def locate_reads(metadata: Metadata, reads: ReadItems, max_bytes: int = BLOCK_BYTES) -> Located:
    """Find the block in which each read begins.

    Args:
        metadata: The checkpoint.
        reads: The reads; names that the checkpoint does not have are no chunks of it.
        max_bytes: The most bytes of a block.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})  # rows of 16 bytes, 2 to a block
    >>> metadata = global_plan([plan])[1]
    >>> found = locate_reads(metadata, load_plan(metadata, plan).items, 32)
    >>> found.number.tolist(), found.sizes.tolist(), found.inside.tolist()
    ([0], [[2, 4]], [False])
    """
    entries, table = metadata.state_dict_metadata, ChunkTable.of(metadata.state_dict_metadata)
    entry = column([entries.row_of.get(name, -1) for name in reads.names])[reads.storage]
    layout = np.where(entry < 0, -1, entries.layout[entry])
    chunk = table.find(layout, reads.storage_anchor, reads.storage_hint)
    axes = max(table.sizes.shape[1], reads.lengths.shape[1], 1)
    extents = pad(table.sizes, axes, 1)[(table.first[layout] + np.maximum(chunk, 0))]
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop][entry]
    reach = reach_of(extents, width, max_bytes)
    offsets = pad(reads.storage_offsets, axes, 0)
    cell = offsets // reach
    last = (offsets + np.maximum(pad(reads.lengths, axes, 1), 1) - 1) // reach
    along, number = np.maximum(-(-extents // reach), 1), np.zeros(len(reads), np.int64)
    for axis in range(axes):
        number = number * along[:, axis] + cell[:, axis]
    start = cell * reach
    sizes = np.minimum(reach, extents - start)
    return Located(
        entry, chunk, number, start, sizes, extents, (cell == last).all(axis=1) & (chunk >= 0)
    )
