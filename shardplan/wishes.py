"""What does each rank need of a checkpoint, and does it pay to read it together?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from shardplan.planning import LoadPlan, Metadata
from shardplan.planning.catalog import column
from shardplan.planning.distinct import distinct

from .ranks import told_apart

__all__ = ["Wish", "judged", "named", "nbytes_of", "worth_sharing"]


@attrs.frozen
class Wish:
    """What one rank needs of a checkpoint.

    Attributes:
        needed: Bytes of what it needs.
        names: A fingerprint of the names of the tensors of which it needs anything.
        size: Bytes of these tensors, whole.
        host: The machine it runs on.
        local: Whether storage is a local path to it.
    """

    needed: int
    names: str
    size: int
    host: str
    local: bool


def nbytes_of(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes that a plan reads."""
    entries, items = metadata.state_dict_metadata, plan.items
    if not len(items):
        return 0
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return int((items.numel * width[row[items.storage]]).sum())


def named(plan: LoadPlan, metadata: Metadata) -> tuple[str, int]:
    """Return a fingerprint of the names of the tensors that a plan reads, and their size, whole."""
    entries, items = metadata.state_dict_metadata, plan.items
    used = sorted({items.names[n] for n in distinct(items.storage).tolist()})
    rows = [entries.row_of[name] for name in used]
    size = sum(
        math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for layout, prop in zip(
            entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True
        )
        if layout >= 0
    )
    return hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(), size


def judged(
    ranks: Sequence[int],
    offers: Sequence[tuple[Any, ...]],
    share: bool | Literal["auto"],
) -> dict[str, Any]:
    """Say, of what all ranks told, what each has to know.

    Args:
        ranks: Their numbers in the job.
        offers: Of each, which save it has opened, which patterns match no name that it wants, and
            the fields of its `Wish`.
        share: Whether bytes are to be read once; "auto" where that is cheaper.

    >>> wish = (8, "w", 8, "host", True)
    >>> judged((0, 1), [("s1", ("a", "b"), *wish), ("s1", ("b",), *wish)], "auto")
    {'apart': '', 'lost': ['b'], 'share': False}
    """
    lost = set.intersection(*(set(unmatched) for _, unmatched, *_ in offers))
    wishes = [Wish(*wish) for _, _, *wish in offers]
    saves = [f"save {identity[:12]}" for identity, *_ in offers]
    return {
        "apart": told_apart(ranks, saves),
        "lost": sorted(lost),
        "share": share is not False and worth_sharing(wishes, share),
    }


def worth_sharing(wishes: Sequence[Wish], share: bool | Literal["auto"]) -> bool:
    """Tell whether reading once and sending is cheaper than reading more than once.

    If ranks need more bytes than the tensors have that they need anything of, some need the same.
    """
    size = sum({wish.names: wish.size for wish in wishes}.values())
    if share is True or sum(wish.needed for wish in wishes) <= size:
        return share is True
    return not all(wish.local for wish in wishes) or len({wish.host for wish in wishes}) > 1
