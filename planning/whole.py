"""The complete plan of a save: what each rank writes, from the plans of all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from .completeness import dropped_names
from .errors import Issue, PlanError, span
from .metadata import Metadata
from .passes.base import Pass
from .plans import SavePlan
from .save import DEFAULT_PASSES, global_plan

__all__ = ["WholePlan", "contents_tag", "plan_whole", "renumbered", "tag_of_parts"]

_NAMED_RANKS: Final = 8  # ranks that an error names by both their numbers
_META: Final = "it on the meta device, without elements: materialise it first, or leave it out"


@attrs.frozen(eq=False)
class WholePlan:
    """What each rank writes, the metadata, and the names that the planner dropped on all ranks."""

    plans: Sequence[SavePlan]
    metadata: Metadata
    dropped: tuple[str, ...] = ()


def plan_whole(
    plans: Sequence[SavePlan],
    passes: Sequence[Pass[SavePlan]] = (),
    meta: Sequence[Sequence[str]] = (),
) -> WholePlan:
    """Decide who writes what, after running the remaining passes.

    ``meta`` has, by rank, the names of its tensors on the meta device; it explains why no rank
    holds their elements.
    """
    holders = _holders(meta)
    why = {
        name: f"{span(ranks)} {'has' if len(ranks) == 1 else 'have'} {_META}"
        for name, ranks in holders.items()
    }
    try:
        done, metadata = global_plan(plans, [*passes, *DEFAULT_PASSES])
    except PlanError as error:
        raise PlanError(_explained(error.issues, plans, why)) from None
    pieces = ((p.holds.catalog.sources, np.unique(p.holds.row)) for p in (plans if meta else ()))
    held = {sources[row] for sources, rows in pieces for row in rows.tolist()}
    lost = [name for name in holders if name not in held]
    if lost:
        raise PlanError(
            [Issue("gap", n, f"no rank holds `{n}`: {why[n]}", holders[n]) for n in lost]
        )
    written = tuple(attrs.evolve(plan, held=None) for plan in done)
    return WholePlan(written, metadata, dropped_names(done))


def _holders(meta: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Invert a list of names per rank into the ranks of each name."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(meta):
        for name in names:
            holders.setdefault(name, []).append(rank)
    return holders


def _explained(
    issues: Sequence[Issue], plans: Sequence[SavePlan], why: Mapping[str, str]
) -> list[Issue]:
    """Add to gaps why ranks do not hold the elements."""
    catalogs = [plan.items.catalog for plan in plans]
    pairs = (pair for c in catalogs for pair in zip(c.names, c.sources, strict=True))
    source = {name: source for name, source in pairs if source in why}
    return [
        attrs.evolve(issue, message=f"{issue.message}; {why[source[issue.fqn]]}")
        if issue.kind == "gap" and issue.fqn in source
        else issue
        for issue in issues
    ]


def renumbered(issues: Sequence[Issue], ranks: Sequence[int]) -> list[Issue]:
    """Add rank numbers of the job to issues that name ranks of a smaller group.

    >>> str(*renumbered([Issue("gap", "w", "rank 1 lacks `w`", [1])], [4, 6]))
    'rank 1 lacks `w` (rank 1 of this group is rank 6 of the job)'
    """
    if list(ranks) == list(range(len(ranks))):
        return list(issues)
    changed = []
    for issue in issues:
        places = (issue.ranks or range(len(ranks)))[:_NAMED_RANKS]
        pairs = ", ".join(f"rank {place} of this group is rank {ranks[place]}" for place in places)
        text = f"{issue.message} ({pairs} of the job)"
        changed.append(
            attrs.evolve(issue, message=text, ranks=[ranks[place] for place in issue.ranks])
        )
    return changed


def contents_tag(plans: Iterable[SavePlan]) -> str:
    """Return a fingerprint of the plans of all ranks; a shared catalog is hashed once."""
    seen: dict[int, int] = {}
    parts: list[bytes | str] = []
    for items in (plan.items for plan in plans):
        catalog = items.catalog
        parts.append(repr(seen.get(id(catalog), catalog.content)))
        seen.setdefault(id(catalog), len(seen))
        columns = (items.row, items.offsets, items.sizes, items.shard_offsets)
        parts.append(b"".join(column.tobytes() for column in columns))
    return tag_of_parts(parts)


def tag_of_parts(parts: Iterable[bytes | str]) -> str:
    """Return a fingerprint of 32 hex digits of a sequence of texts.

    >>> tag_of_parts(["ab", "c"]) == tag_of_parts(["a", "bc"])
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
