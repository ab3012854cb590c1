"""The cost of a load on each rank, and whether reading together is cheaper."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs

from ..columns.arrays import Ints, distinct
from ..columns.catalog import column
from ..columns.reads import ReadItems
from ..geometry.tilings import pad
from ..metadata import Entries, Metadata
from ..plans import LoadPlan
from .located import locate_reads
from .ranges import fetched

__all__ = ["MOST_READS", "Need", "need_of", "plan_bytes", "read_widths", "sharing_pays"]

MOST_READS: Final = 1 << 22
"""The most reads of all ranks together for which sharing is planned unasked: so many take the
coordinator some 12 s and 4 GB."""


@attrs.frozen
class Need:
    """What one rank needs of a checkpoint.

    Attributes:
        fetched: Bytes that it would fetch alone: what it needs, and narrow gaps in between.
        names: A fingerprint of the names of all tensors that it reads, in whole or in part.
        size: Bytes of these tensors, whole.
        reads: How many reads its plan has.
        total: Bytes of all tensors of the checkpoint.
        host: The machine it runs on.
        is_local: Whether the checkpoint is on a local path.
    """

    fetched: int
    names: str
    size: int
    reads: int
    total: int
    host: str
    is_local: bool


def need_of(plan: LoadPlan, metadata: Metadata, max_gap: int, *, host: str, is_local: bool) -> Need:
    """Return what a rank with this plan needs; gaps of up to ``max_gap`` bytes are fetched.

    One column of four, of rows of 4 bytes, is 3 bytes, or 9 with what lies between:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, world_plans
    >>> wanted = world_plans({"w": TensorSpec((3, 4), "int8", [Shard(1)])}, Mesh(tp=4))
    >>> metadata = global_plan(world_plans({"w": TensorSpec((3, 4), "int8")}, Mesh(one=1)))[1]
    >>> plan = load_plan(metadata, wanted[0])
    >>> [need_of(plan, metadata, gap, host="a", is_local=True).fetched for gap in (0, 3)]
    [3, 9]
    """
    entries, items = metadata.state_dict_metadata, plan.items
    used = sorted({items.names[n] for n in distinct(items.storage).tolist()})
    return Need(
        _fetched_bytes(items, metadata, max_gap) if max_gap else plan_bytes(plan, metadata),
        hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(),
        _size(entries, [entries.row_of[name] for name in used]),
        len(items),
        _size(entries, slice(None)),
        host,
        is_local,
    )


def _fetched_bytes(items: ReadItems, metadata: Metadata, max_gap: int) -> int:
    if not len(items):
        return 0
    extents, width = locate_reads(metadata, items).extents, read_widths(items, metadata)
    lengths = pad(items.lengths, extents.shape[1], 1)
    return int((fetched(lengths, extents, width, max_gap) * width).sum())


def plan_bytes(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes of tensors that a plan reads."""
    return int((plan.items.numel * read_widths(plan.items, metadata)).sum())


def read_widths(items: ReadItems, metadata: Metadata) -> Ints:
    """Return the bytes of one element of each read; 0 for non-tensor values."""
    entries = metadata.state_dict_metadata
    if not len(items):
        return column([])
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return width[row[items.storage]]


def sharing_pays(needs: Sequence[Need]) -> bool:
    """Return True if reading once and sending is cheaper than reading more than once.

    If ranks fetch more bytes than the tensors have that they need, or than there are, some fetch
    the same. Planning for all of them takes the coordinator time and memory, though, and a local
    disk is read faster than other ranks can send.

    >>> needs = [Need(9, f"tensors of {r}", 9, 1, 12, "host", is_local=False) for r in range(4)]
    >>> sharing_pays(needs), sharing_pays(needs[:1])
    (True, False)
    """
    size = min(sum({need.names: need.size for need in needs}.values()), needs[0].total)
    if sum(need.fetched for need in needs) <= size:
        return False
    if sum(need.reads for need in needs) > MOST_READS:
        return False
    return not all(need.is_local for need in needs) or len({need.host for need in needs}) > 1


def _size(entries: Entries, rows: list[int] | slice) -> int:
    """Count the bytes of some tensors, whole."""
    kinds = zip(entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True)
    return sum(
        count * math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for (layout, prop), count in Counter(kinds).items()
        if layout >= 0
    )
