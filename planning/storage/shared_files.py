"""`lay_out_files` and `shared_plan`: where ranks write their parts of files that they share.

1. Whole tensors fill files one after the other, in order of their names, each up to a size.
2. Within a file they lie by width of an element, the widest first, then by name: all are aligned.
3. A chunk of a tensor is some byte ranges of that file: one if it spans the tensor's trailing axes,
   else one a row.

Files follow from the metadata of a save, so the ranges of all ranks tile them without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, distinct, readonly
from ..dtypes import itemsize
from ..metadata import Metadata, TensorMetadata
from ..plans import SavePlan
from ..text import Printed, Sheet, counted, human_bytes, listing
from .blocks import BLOCK_BYTES
from .ranges import ByteRanges, byte_ranges
from .write import MAX_SHARD_SIZE, assign_shards

_SHOWN: Final = 20  # rows of a printed plan
_MOST_RANGES: Final = 1 << 16  # of a block


@attrs.frozen
class FileTensor:
    """A whole tensor in a file."""

    name: str  # its name
    dtype: str  # what it is stored as
    shape: tuple[int, ...]  # its shape, in elements
    begin: int = 0  # where it begins, in bytes counted from the end of the file's header

    @property
    def end(self) -> int:
        """Where it ends, counted as ``begin`` is."""
        return self.begin + math.prod(self.shape) * itemsize(self.dtype)


def place_tensors(tensors: Iterable[FileTensor]) -> tuple[FileTensor, ...]:
    """Lay tensors one after the other in a file, the widest elements first, then by name.

    >>> tensors = [FileTensor("a", "bfloat16", (3,)), FileTensor("w", "float32", (2,))]
    >>> [(one.name, one.begin, one.end) for one in place_tensors(tensors)]
    [('w', 0, 8), ('a', 8, 14)]
    """
    at, placed = 0, list[FileTensor]()
    for tensor in sorted(tensors, key=lambda t: (-itemsize(t.dtype), t.name)):
        placed.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, at))
        at = placed[-1].end
    return tuple(placed)


def lay_out_files(
    metadata: Metadata, max_shard_size: int = MAX_SHARD_SIZE, tied: Mapping[str, str] | None = None
) -> tuple[tuple[FileTensor, ...], ...]:
    """Return the tensors of each file of a checkpoint that holds tensors whole.

    Names in ``tied`` share another's elements, and take no room.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> sd = {"a": TensorSpec((2,)), "b": TensorSpec((3,)), "c": TensorSpec((1,), "int64")}
    >>> [[(t.name, t.begin) for t in held] for held in lay_out_files(metadata_of(sd), 20)]
    [[('a', 0), ('b', 8)], [('c', 0)]]
    """
    tensors = {
        name: FileTensor(name, entry.properties.dtype, entry.size)
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorMetadata) and name not in (tied or {})
    }
    sizes = {name: tensor.end for name, tensor in tensors.items()}
    (shards,) = assign_shards([sizes], max_shard_size)
    return tuple(place_tensors(tensors[name] for name in held) for held in shards.names)


@attrs.frozen
class Spot:
    """Where a whole tensor begins: the number of its file, and a byte counted from its start."""

    file: int
    begin: int


@attrs.frozen(eq=False, repr=False)
class SharedPlan(Printed):
    """What one rank writes into files that it shares. Columns have one row an item of its plan."""

    plan: SavePlan  # the rank's save plan
    file: Ints  # the file of each item; -1 for what no file holds: values, and names tied to others
    begin: Ints  # where the item's whole tensor begins in that file, in bytes
    rank: int = 0  # the rank

    @property
    def files(self) -> list[int]:
        """The files that the rank writes to; ranks begin with different ones, where they can."""
        numbers: list[int] = distinct(self.file[self.file >= 0]).tolist()
        turn = self.rank % max(len(numbers), 1)
        return numbers[turn:] + numbers[:turn]

    def rows(self, number: int) -> list[int]:
        """Return the items of one file, in order of place."""
        rows = np.flatnonzero(self.file == number)
        items = self.plan.items
        keys = (*items.offsets[rows].T[::-1], self.begin[rows])
        found: list[int] = rows[np.lexsort(keys)].tolist()
        return found

    def block_bytes(self, item: int) -> int:
        """Return the most bytes of an item to write at a time: of few enough ranges to list."""
        items = self.plan.items
        row = items.row[item]
        run = max(int(items.catalog.itemsize[row]), 1)
        sizes, extents = items.sizes[item].tolist(), items.catalog.size[row].tolist()
        for size, extent in zip(sizes[::-1], extents[::-1], strict=True):
            run *= max(size, 1)
            if size != extent:
                break
        return min(run * _MOST_RANGES, BLOCK_BYTES)

    def ranges(self, item: int, offsets: Sequence[int], sizes: Sequence[int]) -> ByteRanges:
        """Return the bytes of the file that a box of an item takes, in row-major order.

        The box is relative to the item's chunk.
        """
        items = self.plan.items
        row, axes = items.row[item], len(sizes)
        width, extents = items.catalog.itemsize[row], items.catalog.size[row]
        place = items.offsets[item].copy()
        place[:axes] += column(offsets)
        lengths = np.ones_like(place)
        lengths[:axes] = column(sizes)
        one = np.array([width]), np.array([self.begin[item]])
        return byte_ranges(place[None], lengths[None], extents[None], *one)

    @property
    def _sheet(self) -> Sheet:
        kept = np.flatnonzero(self.file >= 0)
        title = (
            f"write {human_bytes(self.plan.items.nbytes[kept].sum())} of "
            f"{counted(len(kept), 'item')} into {counted(len(self.files), 'shared file')}"
        )
        head = ("file", "item", "box", "from byte", "ranges")
        return listing(title, head, self._rows(kept[:_SHOWN].tolist()), len(kept))

    def _rows(self, rows: Sequence[int]) -> Iterator[tuple[object, ...]]:
        items = self.plan.items
        for row in rows:
            data = items[row].tensor_data
            assert data is not None
            found = self.ranges(row, [0] * len(data.size), data.chunk.sizes)
            name = items.catalog.names[items.row[row]]
            first = int(found.start[0]) if len(found) else ""
            yield int(self.file[row]), name, f"[{data.chunk.text}]", first, len(found)


def shared_plan(plan: SavePlan, spots: Mapping[str, Spot], rank: int = 0) -> SharedPlan:
    """Plan where a rank writes the items of its plan, given where whole tensors begin.

    Of a tensor of 4 rows, rank 1 of 2 holds the second half of the rows of ``a``, and of ``b`` the
    second half of the columns:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, local_plan
    >>> rows, columns = (
    ...     TensorSpec((4, 2), "int8", [Shard(0)]),
    ...     TensorSpec((4, 2), "int8", [Shard(1)]),
    ... )
    >>> sd = {"a": rows, "b": columns}
    >>> plans, metadata = global_plan(local_plan(sd, mesh=Mesh(dp=2), rank=r) for r in range(2))
    >>> shared_plan(plans[1], {"a": Spot(0, 64), "b": Spot(0, 72)})
    write 8 B of 2 items into 1 shared file
    file  item  box         from byte  ranges
       0  a     [2:4, 0:2]         68       1
       0  b     [0:4, 1:2]         73       4
    """
    items = plan.items
    known = [spots.get(name, Spot(-1, 0)) for name in items.catalog.names]
    file, begin = column([spot.file for spot in known]), column([spot.begin for spot in known])
    return SharedPlan(plan, readonly(file[items.row]), readonly(begin[items.row]), rank)


def common_ties(
    metadata: Metadata,
    plans: Sequence[SavePlan],
    held: Sequence[Mapping[str, str]],
    reserved: Sequence[str] = (),
) -> dict[str, str]:
    """Return names that are tied to others on all ranks that write them, and those others.

    Args:
        metadata: What is saved.
        plans: What each rank writes.
        held: By rank, names of tensors in the memory of an earlier one, and that one's name.
        reserved: Names that are never tied.

    Two ranks write halves of a tensor under two names, and one of them holds two copies:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, world_plans
    >>> half = TensorSpec((4,), "float32", [Shard(0)])
    >>> plans, metadata = global_plan(world_plans({"a": half, "b": half}, Mesh(dp=2)))
    >>> common_ties(metadata, plans, [{"b": "a"}, {"b": "a"}])
    {'b': 'a'}
    >>> common_ties(metadata, plans, [{"b": "a"}, {}])
    {}
    """
    entries = metadata.state_dict_metadata
    suspects = {source for ties in held for pair in ties.items() for source in pair}
    writers: dict[tuple[str, str], list[int]] = {}  # of a name that has a source
    for rank, plan in enumerate(plans):
        catalog = plan.items.catalog
        for row in distinct(plan.items.row).tolist():
            if catalog.sources[row] in suspects:
                key = (catalog.sources[row], catalog.names[row])
                writers.setdefault(key, []).append(rank)
    names: dict[str, list[str]] = {}
    for source, name in writers:
        names.setdefault(source, []).append(name)
    ties: dict[str, str] = {}
    for source, first in dict.fromkeys(pair for mine in held for pair in mine.items()):
        alike = {
            rank
            for rank, mine in enumerate(held)
            if mine.get(source, source) == mine.get(first, first)
        }
        for name in names.get(source, ()):
            kept = next(
                (n for n in names.get(first, ()) if _is_alike(entries[n], entries[name])), name
            )
            free = kept not in ties and name not in ties and name not in reserved and name != kept
            if free and alike.issuperset(writers[source, name]):
                ties[name] = kept
    return ties


def _is_alike(one: object, other: object) -> bool:
    if not isinstance(one, TensorMetadata) or not isinstance(other, TensorMetadata):
        return False
    return (one.size, one.properties.dtype) == (other.size, other.properties.dtype)
