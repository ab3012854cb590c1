"""`write_plan` and `number_shards`: which bytes of which file each item of a plan becomes.

1. A name occurs once per file, so a rank's second chunk of a tensor goes to a second file.
   Most ranks hold one chunk of each tensor, and write one file.
2. Within a file, items lie by width of an element, the widest first, then by name: so every chunk
   is aligned.
3. Items follow each other without gaps, each cut into blocks that are hashed as one.

Shards are files that are filled with whole tensors one after the other, in order of their names, as
Hugging Face tools do. All of it follows from plans, so that no rank has to ask another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from ..columns.arrays import Ints, column, distinct, nth_equal, pad, readonly
from ..errors import RefusedError, listed
from ..text import Printed, Sheet, counted, human_bytes, listing
from .blocks import BLOCK_BYTES, Blocks, cut_blocks

if TYPE_CHECKING:
    from ..columns.items import WriteItems
    from ..plans import SavePlan


_SUFFIX: Final = ".safetensors"
_FILE: Final = re.compile(r"shard-([0-9]+)-model-([0-9]+)-of-([0-9]+)-([^-]+)\.(safetensors|sums)")


def file_name(rank: int, number: int, count: int, save_id: str) -> str:
    """Name one file of a rank.

    >>> file_name(3, 0, 2, "5f3a")
    'shard-00003-model-00001-of-00002-5f3a.safetensors'
    """
    return f"shard-{rank:05d}-model-{number + 1:05d}-of-{count:05d}-{save_id}{_SUFFIX}"


def save_id_of(name: str) -> str | None:
    """Return the save id in a file's name; None if the name is not one of `file_name`.

    >>> save_id_of("shard-00003-model-00001-of-00002-5f3a.safetensors")
    '5f3a'
    >>> save_id_of("model-00001-of-00002.safetensors")
    """
    match = _FILE.fullmatch(name)
    return match[4] if match else None


def table_name(name: str) -> str:
    """Name the file that has the checksums of a file, if they are not in its header.

    >>> table_name(file_name(3, 0, 2, "5f3a"))
    'shard-00003-model-00001-of-00002-5f3a.sums'
    """
    return f"{name.removesuffix(_SUFFIX)}.sums"


def numbers_of(name: str) -> tuple[int, int, int] | None:
    """Return the rank, number and count in a file's name; None if it is not one of `file_name`.

    >>> numbers_of("shard-00003-model-00001-of-00002-5f3a.safetensors")
    (3, 0, 2)
    """
    match = _FILE.fullmatch(name)
    if match is None or match[5] == "sums":
        return None
    return int(match[1]), int(match[2]) - 1, int(match[3])


def file_numbers(plan: SavePlan) -> Ints:
    """Return which of its rank's files each item of a plan goes to: its place among equal names.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> file_numbers(split_chunks(8)((local_plan({"w": TensorSpec((4,))}),))[0])
    array([0, 1])
    """
    return readonly(nth_equal(plan.items.catalog.name_order[plan.items.row]))


_SHOWN: Final = 20  # rows of a printed plan


@attrs.frozen(eq=False, repr=False)
class WritePlan(Printed):
    """What one rank writes where. Columns have one row an item of its save plan."""

    plan: SavePlan  # the save plan
    names: tuple[str, ...]  # the rank's files
    file: Ints  # the file that each item goes to; non-tensor values go to the first one
    order: Ints  # the items by file, and within a file in the order in which they are written
    begin: Ints  # where each item begins, counted from the end of its file's header, in bytes
    nbytes: Ints  # how many bytes each has
    block_bytes: int  # the most bytes of a block

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
            f"write {human_bytes(self.nbytes.sum())} of {counted(len(self.order), 'item')} "
            f"to {counted(len(self.names), 'file')}"
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
    """Plan where each item of a rank's plan, as `global_plan` returned it, is written.

    Non-tensor values take ``value_bytes`` in a file, by name; by default none. Of a tensor ``b``
    and two halves of ``w``, the second half has a file of its own:

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


def widest_first(items: WriteItems) -> Ints:
    """Return the order of items that keeps each aligned in a file: by width, then by name."""
    if not len(items):
        return items.row
    catalog, row = items.catalog, items.row
    return np.lexsort((catalog.name_order[row], -catalog.itemsize[row]))


def pack_files(
    nbytes: Ints, align: int, *, file_bytes: int = 256 << 20, max_files: int = 4
) -> tuple[Ints, Ints]:
    """Distribute items over files of about the same size, in order, each from an aligned byte on.

    Return the file of each item and its first byte there, a multiple of ``align``. With less than
    twice ``file_bytes``, there is one file.

    >>> file, begin = pack_files(np.array([30, 5, 40]), 8, file_bytes=30)
    >>> file.tolist(), begin.tolist()
    ([0, 0, 1], [0, 32, 0])
    """
    total = int(nbytes.sum())
    count = min(max(total // file_bytes, 1), max_files)
    middle = np.cumsum(nbytes) - nbytes + nbytes // 2
    file = np.minimum(middle * count // max(total, 1), count - 1)
    file = np.searchsorted(distinct(file), file)  # without files that would hold nothing
    room = -(-nbytes // align) * align
    start = np.cumsum(room) - room
    return file, start - start[np.searchsorted(file, file)]


MAX_SHARD_SIZE: Final = 5_000_000_000
"""How many bytes of tensors a file holds by default; Hugging Face tools say ``"5GB"``."""

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_KEY: Final = "hf"  # of a plan's storage_data
_SAVE_FIRST: Final = "save as 'safetensors', then use shardplan.convert(..., format='hf')"


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as Hugging Face tools write it.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(1000)
    (5000000000, 1572864, 1000)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{size!r} is not a size; write '5GB', '500MiB' or a number of bytes")
        unit = match[2].upper()
        scale = _UNITS[unit] if not match[3] else 1024 ** list(_UNITS).index(unit)
        size = int(float(match[1]) * scale)
    if size < 1:
        raise ValueError(f"a file must hold a byte at least, not {size}")
    return int(size)


@attrs.frozen
class Shards:
    """The files of one rank."""

    first: int  # the number of its first file among those of all ranks, from 0
    count: int  # how many files all ranks write
    names: tuple[tuple[str, ...], ...]  # the tensors of each of its files


def assign_shards(
    sizes: Sequence[Mapping[str, int]], max_shard_size: int = MAX_SHARD_SIZE
) -> list[Shards]:
    """Fill files with tensors one after the other, each rank its own, given the tensors' bytes.

    A tensor larger than ``max_shard_size`` has a file to itself.

    >>> [s.names for s in assign_shards([{"a": 4, "b": 4, "c": 9, "d": 1}], 8)]
    [(('a', 'b'), ('c',), ('d',))]
    """
    ranks = [_fill(mine, max_shard_size) for mine in sizes]
    if ranks and not any(ranks):
        ranks[0] = ((),)  # a checkpoint without tensors has a file, too
    ends = list(accumulate(map(len, ranks), initial=0))
    return [Shards(first, ends[-1], names) for first, names in zip(ends, ranks, strict=False)]


def _fill(sizes: Mapping[str, int], max_shard_size: int) -> tuple[tuple[str, ...], ...]:
    files: list[list[str]] = []
    room = 0
    for name, nbytes in sizes.items():
        if not files or nbytes > room:
            files.append([])
            room = max_shard_size
        files[-1].append(name)
        room -= nbytes
    return tuple(map(tuple, files))


def number_shards(
    plans: Sequence[SavePlan], max_shard_size: int, tied: Mapping[str, str] | None = None
) -> tuple[SavePlan, ...]:
    """Note in the plans of all ranks which files each writes; `shards_of` reads it.

    Names in ``tied`` share another's elements, and take no room. Raise RefusedError if a tensor is
    not whole on a rank.
    """
    refuse_split(plans)
    tied = tied or {}
    sizes = [{n: b for n, b in _tensor_sizes(p).items() if tied.get(n, n) == n} for p in plans]
    return tuple(
        attrs.evolve(plan, storage_data={_KEY: (shards.first, shards.count, shards.names)})
        for plan, shards in zip(plans, assign_shards(sizes, max_shard_size), strict=True)
    )


def shards_of(plan: SavePlan) -> Shards | None:
    """Return the files of a plan; None if they are not numbered."""
    data = plan.storage_data
    return Shards(*data[_KEY]) if isinstance(data, Mapping) and _KEY in data else None


def shard_plans(
    plan: SavePlan, max_shard_size: int, tied: Mapping[str, str] | None = None
) -> tuple[SavePlan, ...]:
    """Divide a plan of whole tensors into one plan per file; see `number_shards`.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"a": TensorSpec((2,)), "b": TensorSpec((3,)), "c": TensorSpec((1,))})
    >>> [[item.index.fqn for item in part.items] for part in shard_plans(plan, 16)]
    [['a'], ['b', 'c']]
    """
    (numbered,) = number_shards((plan,), max_shard_size, tied)
    shards = shards_of(numbered)
    assert shards is not None
    items = plan.items
    file_of = {name: number for number, held in enumerate(shards.names) for name in held}
    number = column([file_of.get(items.catalog.names[row], -1) for row in items.row.tolist()])
    return tuple(
        attrs.evolve(
            plan,
            items=items.take(np.flatnonzero(number == n)),
            storage_data={_KEY: (n, shards.count, (held,))},
        )
        for n, held in enumerate(shards.names)
    )


def refuse_split(plans: Sequence[SavePlan], remedy: str = _SAVE_FIRST) -> None:
    """Raise `RefusedError` if plans would split tensors; it names them, and the remedy."""
    split = {name for plan in plans for name in split_tensors(plan)}
    if split:
        raise RefusedError(
            f"an `hf` checkpoint holds tensors whole, and {listed(sorted(split))} would be split; "
            f"{remedy}"
        )


def split_tensors(plan: SavePlan) -> list[str]:
    """Name the tensors that a plan writes only in part, or in chunks because a pass cut them.

    A tensor that is made of several of the state dict, or of several boxes of one, is whole.
    """
    items = plan.items
    catalog, row = items.catalog, items.row
    size = catalog.size[row] if len(items) else items.sizes
    cut = (items.sizes != size).any(axis=1)
    if items.frame is not None and cut.any():
        number = column([*_numbers(catalog.names)])[row]
        frame, ndim = items.frame, catalog.ndim[row]
        width = max(items.offsets.shape[1], frame.offsets.shape[1])
        pairs = ((frame.offsets, items.offsets, 0), (frame.sizes, items.sizes, 1))
        differs = [(pad(a, width, v) != pad(b, width, v)).any(axis=1) for a, b, v in pairs]
        moved = frame.axes.known | frame.fill.known | (frame.ndim != ndim) | np.any(differs, axis=0)
        numel = np.bincount(number, items.sizes.prod(axis=1))[number]
        cut &= (np.bincount(number, moved)[number] == 0) | (numel != size.prod(axis=1))
    return [catalog.names[r] for r in row[cut].tolist()]


def _numbers(names: Iterable[str]) -> Iterator[int]:
    number: dict[str, int] = {}
    return (number.setdefault(name, len(number)) for name in names)


def _tensor_sizes(plan: SavePlan) -> dict[str, int]:
    """Return the bytes of each tensor of a plan, in order of names."""
    items, catalog = plan.items, plan.items.catalog
    sizes = Counter[str]()
    for row, nbytes in zip(items.row.tolist(), items.nbytes.tolist(), strict=True):
        if not catalog.is_bytes[row]:
            sizes[catalog.names[row]] += nbytes
    return dict(sorted(sizes.items()))
