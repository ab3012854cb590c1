"""What does each rank need of a checkpoint, and does it pay to read it together?"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from shardplan.dist import Comm
from shardplan.io import FormatError
from shardplan.io.execute import Reader
from shardplan.planning import Entries, Issue, LoadPlan, Metadata, PlanError
from shardplan.planning.columns import Ints, ReadItems, column, distinct
from shardplan.planning.geometry import pad
from shardplan.planning.storage import FAR_GAP, fetched, locate_reads

from ._comm import fail_alike, told_apart

__all__ = [
    "Wish",
    "fetched_bytes",
    "gap_of",
    "heed",
    "judged",
    "named",
    "nbytes_of",
    "tensor_bytes",
    "widths",
    "worth_sharing",
]


MOST_READS: Final = 1 << 22
"""Reads of all ranks together that are planned anew to be shared, unless asked for: that many take
the coordinator some 12 s and 4 GB."""


@attrs.frozen
class Wish:
    """What one rank needs of a checkpoint.

    Attributes:
        fetched: Bytes that it would fetch alone: what it needs, and narrow gaps in between.
        names: A fingerprint of the names of the tensors of which it needs anything.
        size: Bytes of these tensors, whole.
        host: The machine it runs on.
        local: Whether storage is a local path to it.
        reads: How many reads its plan has.
    """

    fetched: int
    names: str
    size: int
    host: str
    local: bool
    reads: int = 0


def nbytes_of(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes that a plan reads."""
    return int((plan.items.numel * widths(plan.items, metadata)).sum())


def widths(items: ReadItems, metadata: Metadata) -> Ints:
    """Return the bytes of an element of what each read is of; 0 for values that are no tensors."""
    entries = metadata.state_dict_metadata
    if not len(items):
        return column([])
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return width[row[items.storage]]


def fetched_bytes(plan: LoadPlan, metadata: Metadata, max_gap: int) -> int:
    """Count the bytes that a plan reads, and those in gaps of at most so many bytes.

    One column of four, of rows of 4 bytes, is 3 bytes, or 9 with what lies between:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, world_plans
    >>> wanted = world_plans({"w": TensorSpec((3, 4), "int8", [Shard(1)])}, Mesh(tp=4))
    >>> metadata = global_plan(world_plans({"w": TensorSpec((3, 4), "int8")}, Mesh(one=1)))[1]
    >>> [fetched_bytes(load_plan(metadata, wanted[0]), metadata, gap) for gap in (0, 3)]
    [3, 9]
    """
    items = plan.items
    if not len(items):
        return 0
    extents, width = locate_reads(metadata, items).extents, widths(items, metadata)
    lengths = pad(items.lengths, extents.shape[1], 1)
    return int((fetched(lengths, extents, width, max_gap) * width).sum())


def gap_of(reader: Reader) -> int:
    """Return how many bytes between two ranges are sooner fetched than left out."""
    return FAR_GAP if reader.store.staging else 0


def named(plan: LoadPlan, metadata: Metadata) -> tuple[str, int]:
    """Return a fingerprint of the names of the tensors that a plan reads, and their size, whole."""
    entries, items = metadata.state_dict_metadata, plan.items
    used = sorted({items.names[n] for n in distinct(items.storage).tolist()})
    size = _size(entries, [entries.row_of[name] for name in used])
    return hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(), size


def judged(
    ranks: Sequence[int],
    offers: Sequence[tuple[Any, ...]],
    share: bool | Literal["auto"],
    total: int,
) -> dict[str, Any]:
    """Say, of what all ranks told, what each has to know.

    Args:
        ranks: Their numbers in the job.
        offers: Of each, which save it has opened and where, which patterns match no name that it
            wants, and the fields of its `Wish`.
        share: Whether bytes are to be read once; "auto" where that is cheaper.
        total: Bytes of all tensors of the checkpoint.

    >>> wish = (8, "w", 8, "host", True)
    >>> offers = [("s1", "/step", ("a", "b"), *wish), ("s1", "step", ("b",), *wish)]
    >>> judged((0, 1), offers, "auto", 8)
    {'apart': '', 'lost': ['b'], 'share': False}
    """
    lost = set.intersection(*(set(unmatched) for _, _, unmatched, *_ in offers))
    wishes = [Wish(*wish) for _, _, _, *wish in offers]
    saves = [f"{place}, save {identity}" for identity, place, *_ in offers]
    alike = len({identity for identity, *_ in offers}) == 1  # a place may have several names
    return {
        "apart": "" if alike else told_apart(ranks, saves),
        "lost": sorted(lost),
        "share": share is not False and worth_sharing(wishes, share, total),
    }


def heed(comm: Comm, found: Mapping[str, Any]) -> None:
    """Raise, on all ranks alike, what is wrong with what they want together; see `judged`."""
    if found["apart"]:
        text = f"they differ between ranks ({found['apart']})"
        remedy = "pass all ranks one path; if it is one, it was written meanwhile: load again"
        fail_alike(comm, "open", FormatError("the checkpoints", f"{text}; {remedy}"))
    if found["lost"]:
        why = "strict: {!r} matches no name that any rank wants"
        issues = [Issue("unmatched", p, why.format(p)) for p in found["lost"]]
        fail_alike(comm, "plan", PlanError(issues))


def worth_sharing(wishes: Sequence[Wish], share: bool | Literal["auto"], total: int) -> bool:
    """Tell whether reading once and sending is cheaper than reading more than once.

    If ranks fetch more bytes than the tensors have that they need anything of, or than there are,
    some fetch the same. To plan for all of them takes the coordinator time and memory, though.

    >>> wishes = [Wish(9, f"all and rank {r}'s own", 9, f"host {r}", False) for r in range(4)]
    >>> worth_sharing(wishes, "auto", 12), worth_sharing(wishes[:1], "auto", 12)
    (True, False)
    >>> many = [attrs.evolve(wish, reads=MOST_READS) for wish in wishes]
    >>> worth_sharing(many, "auto", 12), worth_sharing(many, True, 12)
    (False, True)
    """
    size = min(sum({wish.names: wish.size for wish in wishes}.values()), total)
    if share is True or sum(wish.fetched for wish in wishes) <= size:
        return share is True
    if sum(wish.reads for wish in wishes) > MOST_READS:
        return False
    return not all(wish.local for wish in wishes) or len({wish.host for wish in wishes}) > 1


def tensor_bytes(metadata: Metadata) -> int:
    """Count the bytes of all tensors of a checkpoint."""
    return _size(metadata.state_dict_metadata, slice(None))


def _size(entries: Entries, rows: list[int] | slice) -> int:
    """Count the bytes of some tensors, whole."""
    kinds = zip(entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True)
    return sum(
        count * math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for (layout, prop), count in Counter(kinds).items()
        if layout >= 0
    )
