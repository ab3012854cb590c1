"""Which file holds which chunk? A pure function of a rank's plan, so that nobody has to be told.

A safetensors file holds a name once. So the k-th chunk of a tensor on a rank goes to that rank's
k-th file, and most ranks write one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from ..columns.arrays import Ints, readonly

if TYPE_CHECKING:
    from ..plans import SavePlan

__all__ = ["FileAssignment", "assign_files", "file_name", "file_numbers", "save_id_of"]

_SUFFIX: Final = ".safetensors"


@attrs.frozen(eq=False)
class FileAssignment:
    """The files that one rank writes, and the order in which items lie in them.

    Attributes:
        names: The rank's files.
        file: Per item, which of them it goes to; values that are no tensors go to the first one.
        order: The items by file, and within a file by width of an element, the widest first, then
            by name: so every chunk lies aligned.
    """

    names: tuple[str, ...]
    file: Ints
    order: Ints


def file_name(rank: int, number: int, count: int, save_id: str) -> str:
    """Name one file of a rank.

    >>> file_name(3, 0, 2, "5f3a")
    'shard-00003-model-00001-of-00002-5f3a.safetensors'
    """
    return f"shard-{rank:05d}-model-{number + 1:05d}-of-{count:05d}-{save_id}{_SUFFIX}"


def save_id_of(name: str) -> str | None:
    """Read the save id off a file's name; None for files that are none of ours.

    >>> save_id_of("shard-00003-model-00001-of-00002-5f3a.safetensors")
    '5f3a'
    >>> save_id_of("model-00001-of-00002.safetensors")
    """
    parts = name.removesuffix(_SUFFIX).split("-")
    words = parts[0::2] == ["shard", "model", "of", parts[-1]] if len(parts) == 7 else False
    numbers = len(parts) == 7 and all(p.isdecimal() for p in parts[1:6:2])
    return parts[-1] if name.endswith(_SUFFIX) and words and numbers and parts[-1] else None


def assign_files(plan: SavePlan, rank: int, save_id: str) -> FileAssignment:
    """Say which file each item of a rank's plan goes to, and in which order.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> sd = {"b": TensorSpec((2,), "bfloat16"), "w": TensorSpec((4,))}
    >>> files = assign_files(split_chunks(8)((local_plan(sd),))[0], 0, "5f3a")
    >>> files.file.tolist(), files.order.tolist()  # items: all of b, two halves of w
    ([0, 0, 1], [1, 0, 2])
    >>> files.names[1]
    'shard-00000-model-00002-of-00002-5f3a.safetensors'
    """
    items, file = plan.items, file_numbers(plan)
    name, width = items.catalog.name_order[items.row], items.catalog.itemsize[items.row]
    count = int(file.max()) + 1 if len(file) else 0
    return FileAssignment(
        tuple(file_name(rank, i, count, save_id) for i in range(count)),
        file,
        readonly(np.lexsort((name, -width, file))),
    )


def file_numbers(plan: SavePlan) -> Ints:
    """Say which of its rank's files each item of a plan goes to: its place among equal names.

    >>> from shardplan.planning import TensorSpec, local_plan, split_chunks
    >>> file_numbers(split_chunks(8)((local_plan({"w": TensorSpec((4,))}),))[0])
    array([0, 1])
    """
    name = plan.items.catalog.name_order[plan.items.row]
    by_name = np.argsort(name, kind="stable")
    file = np.empty(len(name), np.int64)
    file[by_name] = np.arange(len(name)) - np.searchsorted(name[by_name], name[by_name])
    return readonly(file)
