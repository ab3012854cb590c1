"""Names of data files, and the file that each item of a rank's plan goes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..columns.arrays import Ints, readonly

if TYPE_CHECKING:
    from ..plans import SavePlan

__all__ = ["file_name", "file_numbers", "save_id_of"]

_SUFFIX: Final = ".safetensors"


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
    parts = name.removesuffix(_SUFFIX).split("-")
    words = parts[0::2] == ["shard", "model", "of", parts[-1]] if len(parts) == 7 else False
    numbers = len(parts) == 7 and all(p.isdecimal() for p in parts[1:6:2])
    return parts[-1] if name.endswith(_SUFFIX) and words and numbers and parts[-1] else None


def file_numbers(plan: SavePlan) -> Ints:
    """Return which of its rank's files each item of a plan goes to: its place among equal names.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> file_numbers(split_chunks(8)((local_plan({"w": TensorSpec((4,))}),))[0])
    array([0, 1])
    """
    name = plan.items.catalog.name_order[plan.items.row]
    by_name = np.argsort(name, kind="stable")
    file = np.empty(len(name), np.int64)
    file[by_name] = np.arange(len(name)) - np.searchsorted(name[by_name], name[by_name])
    return readonly(file)
