"""Shards: files that are filled with whole tensors one after the other, as Hugging Face tools do.

Which tensor goes into which file follows from the sizes of all tensors, in order of their names,
and the most bytes that a file may hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from ..columns.catalog import column
from ..errors import RefusedError, listed

if TYPE_CHECKING:
    from ..plans import SavePlan

__all__ = [
    "MAX_SHARD_SIZE",
    "Shards",
    "assign_shards",
    "number_shards",
    "parse_size",
    "refuse_split",
    "shard_plans",
    "shards_of",
]

MAX_SHARD_SIZE: Final = 5_000_000_000
"""How many bytes of tensors a file holds by default; Hugging Face tools say ``"5GB"``."""

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_KEY: Final = "hf"  # of a plan's storage_data
_SAVE_FIRST: Final = "save as 'safetensors', then use shardplan.convert(..., format='hf')"


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as one or as Hugging Face tools write it.

    >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(1000)
    (5000000000, 1572864, 1000)

    Raises:
        ValueError: It is not a size.
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
    """The files of one rank.

    Attributes:
        first: The number of its first file among those of all ranks, from 0.
        count: How many files all ranks write.
        names: The tensors of each of its files.
    """

    first: int
    count: int
    names: tuple[tuple[str, ...], ...]


def assign_shards(
    sizes: Sequence[Mapping[str, int]], max_shard_size: int = MAX_SHARD_SIZE
) -> list[Shards]:
    """Fill files with tensors one after the other, each rank its own.

    Args:
        sizes: Per rank, the bytes of each of its tensors, in order.
        max_shard_size: How many bytes a file holds at most; a larger tensor has one to itself.

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

    Args:
        plans: The plans, of whole tensors.
        max_shard_size: How many bytes a file holds at most.
        tied: Names that share another's elements, and those others; they take no room.

    Raises:
        RefusedError: Some tensor is not whole on a rank.
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
    """Refuse plans that would split tensors.

    Raises:
        RefusedError: They would; tensors are named, and what to do instead.
    """
    split = {name for plan in plans for name in _split_tensors(plan)}
    if split:
        raise RefusedError(
            f"an `hf` checkpoint holds tensors whole, and {listed(sorted(split))} would be split; "
            f"{remedy}"
        )


def _split_tensors(plan: SavePlan) -> list[str]:
    """Name the tensors of which an item is only a part."""
    items = plan.items
    size = items.catalog.size[items.row] if len(items) else items.sizes
    partial = (items.sizes != size).any(axis=1)
    return [items.catalog.names[row] for row in items.row[partial].tolist()]


def _tensor_sizes(plan: SavePlan) -> dict[str, int]:
    """Return the bytes of each tensor of a plan, in order of names."""
    items, catalog = plan.items, plan.items.catalog
    sizes = zip(items.row.tolist(), items.nbytes.tolist(), strict=True)
    return dict(sorted((catalog.names[row], n) for row, n in sizes if not catalog.is_bytes[row]))
