"""Which tensors go into which file of a Hugging Face checkpoint? Files are filled one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from shardplan.planning import RefusedError, SavePlan

from ...errors import listed

__all__ = [
    "MAX_SHARD_SIZE",
    "Shards",
    "assign_shards",
    "parse_size",
    "refuse_split",
    "tensor_sizes",
]

MAX_SHARD_SIZE: Final = 5_000_000_000
"""How many bytes of tensors a file holds by default; Hugging Face tools say ``"5GB"``."""

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as Hugging Face tools write it.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(1000)
    (5000000000, 1572864, 1000)

    Raises:
        ValueError: It is no size.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{size!r} is no size; write '5GB', '500MiB' or a number of bytes")
        unit = match[2].upper()
        scale = _UNITS[unit] if not match[3] else 1024 ** list(_UNITS).index(unit)
        size = int(float(match[1]) * scale)
    if size < 1:
        raise ValueError(f"a file must hold a byte at least, not {size}")
    return int(size)


@attrs.frozen
class Shards:
    """Which tensors go into which file.

    Attributes:
        first: The number of this rank's first file, from 0.
        count: How many files all ranks write.
        names: The tensors of each of this rank's files.
    """

    first: int
    count: int
    names: tuple[tuple[str, ...], ...]


def assign_shards(
    sizes: Sequence[Mapping[str, int]], max_shard_size: int = MAX_SHARD_SIZE
) -> list[Shards]:
    """Fill files with tensors one after the other, as Hugging Face tools do.

    Args:
        sizes: Per rank, the bytes of each of its tensors, in order.
        max_shard_size: How many bytes a file holds at most; a larger tensor has one to itself.

    >>> [s.names for s in assign_shards([{"a": 4, "b": 4, "c": 9, "d": 1}], 8)]
    [(('a', 'b'), ('c',), ('d',))]
    """
    ranks = []
    for mine in sizes:
        files: list[list[str]] = []
        room = 0
        for name, nbytes in mine.items():
            if not files or nbytes > room:
                files.append([])
                room = max_shard_size
            files[-1].append(name)
            room -= nbytes
        ranks.append(tuple(map(tuple, files)))
    if ranks and not any(ranks):
        ranks[0] = ((),)  # a checkpoint without tensors has a file, too
    count, first = sum(map(len, ranks)), 0
    shards = []
    for files_of in ranks:
        shards.append(Shards(first, count, files_of))
        first += len(files_of)
    return shards


_SAVE_FIRST: Final = "save as 'safetensors', then use shardplan.convert(..., format='hf')"


def refuse_split(plans: Sequence[SavePlan], rank: int = 0, way: str = _SAVE_FIRST) -> None:
    """Refuse plans that would split tensors; or one of several plans, if they are not numbered.

    Args:
        plans: The plans.
        rank: The rank of the first of them.
        way: What to do instead.

    Raises:
        RefusedError: They cannot be written; tensors are named.
    """
    split = {name for plan in plans for name in _split_tensors(plan)}
    if split:
        named = listed(sorted(split))
        raise RefusedError(
            f"an `hf` checkpoint holds tensors whole, and {named} would be split; {way}"
        )
    if rank:
        raise RefusedError(
            f"several ranks write an `hf` checkpoint only from plans that `HfWriter.prepare` has "
            f"numbered; {way}"
        )


def _split_tensors(plan: SavePlan) -> Iterator[str]:
    """Name the tensors of which an item is only a part."""
    items = plan.items
    size = items.catalog.size[items.row] if len(items) else items.sizes
    partial = (items.sizes != size).any(axis=1)
    for row in items.row[partial].tolist():
        yield items.catalog.names[row]


def tensor_sizes(plan: SavePlan) -> dict[str, int]:
    """Return the bytes of each tensor of a plan, in order of names."""
    items = plan.items
    found = {}
    for row in items.row.tolist():
        name, _, _, properties, size = items.catalog.heads[row]
        if properties is not None:
            found[name] = math.prod(size) * properties.itemsize
    return dict(sorted(found.items()))
