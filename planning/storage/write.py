"""`write_plan`: which bytes of which file each item of a rank's plan becomes.

1. A safetensors file holds a name once. So the k-th chunk of a tensor on a rank goes to the rank's
   k-th file, and most ranks write one file.
2. Within a file, items lie by width of an element, the widest first, then by name: so every chunk
   is aligned.
3. Items follow each other without gaps, each cut into blocks that are hashed as one.

All of it follows from the rank's plan, so that no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from ..columns.arrays import Ints, readonly
from ..text import Printed, Sheet, human_bytes, listing
from .blocks import BLOCK_BYTES, Blocks, cut_blocks
from .files import file_name, file_numbers

if TYPE_CHECKING:
    from ..plans import SavePlan

__all__ = ["WritePlan", "write_plan"]

_SHOWN: Final = 20  # rows of a printed plan


@attrs.frozen(eq=False, repr=False)
class WritePlan(Printed):
    """What one rank writes where. Columns have one row an item of its save plan.

    Attributes:
        plan: The save plan.
        names: The rank's files.
        file: The file that each item goes to; non-tensor values go to the first one.
        order: The items by file, and within a file in the order in which they are written.
        begin: Where each item begins, counted from the end of its file's header, in bytes.
        nbytes: How many bytes each has.
        block_bytes: The most bytes of a block.
    """

    plan: SavePlan
    names: tuple[str, ...]
    file: Ints
    order: Ints
    begin: Ints
    nbytes: Ints
    block_bytes: int

    def rows(self, number: int) -> Ints:
        """Return the items of one file, in the order in which they are written."""
        rows: Ints = self.order[self.file[self.order] == number]
        return rows

    def blocks(self, rows: Ints) -> Blocks:
        """Return the blocks of some tensor items, in the order in which they are written."""
        items = self.plan.items
        width = items.catalog.itemsize[items.row[rows]]
        return cut_blocks(items.sizes[rows], width, self.block_bytes)

    @property
    def _sheet(self) -> Sheet:
        title = (
            f"write {human_bytes(self.nbytes.sum())} of {len(self.order):,} items "
            f"to {len(self.names):,} files"
        )
        head = ("file", "item", "from byte", "to byte", "blocks")
        return listing(title, head, self._rows(), len(self.order))

    def _rows(self) -> Iterator[tuple[object, ...]]:
        items = self.plan.items
        for row in self.order[:_SHOWN].tolist():
            begin, end = int(self.begin[row]), int(self.begin[row] + self.nbytes[row])
            is_value = items.catalog.is_bytes[items.row[row]]
            blocks = "-" if is_value else len(self.blocks(np.array([row])))
            name = items.catalog.names[items.row[row]]
            yield self.names[self.file[row]], name, begin, end, blocks


def write_plan(
    plan: SavePlan,
    rank: int = 0,
    save_id: str = "",
    *,
    value_bytes: Mapping[str, int] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> WritePlan:
    """Plan where each item of a rank's plan is written.

    Args:
        plan: The rank's plan, as `global_plan` returned it.
        rank: Which rank it is.
        save_id: The name of the save, part of every file's name.
        value_bytes: How many bytes non-tensor values take in a file, by name; by default none.
        block_bytes: The most bytes of a block.

    Of a tensor ``b`` and two halves of ``w``, the second half has a file of its own:

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> sd = {"b": TensorSpec((2,), "bfloat16"), "w": TensorSpec((4,))}
    >>> write_plan(split_chunks(8)((local_plan(sd),))[0], save_id="5f3a")
    write 20 B of 3 items to 2 files
    file                                               item  from byte  to byte  blocks
    shard-00000-model-00001-of-00002-5f3a.safetensors  w             0        8       1
    shard-00000-model-00001-of-00002-5f3a.safetensors  b             8       12       1
    shard-00000-model-00002-of-00002-5f3a.safetensors  w             0        8       1
    """
    items, file = plan.items, file_numbers(plan)
    catalog, row = items.catalog, items.row
    width = catalog.itemsize[row] if len(items) else row
    nbytes = items.sizes.prod(axis=1) * width if len(items) else row
    if len(items) and catalog.is_bytes[row].any():
        known = value_bytes or {}
        is_value = np.flatnonzero(catalog.is_bytes[row])
        nbytes[is_value] = [known.get(catalog.names[r], 0) for r in row[is_value].tolist()]
    name = catalog.name_order[row] if len(items) else row
    order = np.lexsort((name, -width, file))
    count = int(file.max()) + 1 if len(file) else 0
    ends = np.cumsum(nbytes[order])
    first = np.searchsorted(file[order], file[order])  # the first row of each file
    begin = np.empty_like(nbytes)
    begin[order] = ends - nbytes[order] - (ends - nbytes[order])[first]
    return WritePlan(
        plan,
        tuple(file_name(rank, number, count, save_id) for number in range(count)),
        file,
        readonly(order),
        readonly(begin),
        readonly(nbytes),
        block_bytes,
    )
