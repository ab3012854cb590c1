"""Checks of metadata and plans: every overlap, gap, stray chunk and disagreement at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from .completeness import source_issues
from .errors import Issue, PlanError, region_text, span
from .geometry.overlap import fills, gaps, self_overlaps
from .geometry.tilings import Chunk, meet, shape_fault
from .metadata import Layout, Metadata

if TYPE_CHECKING:
    from .columns.world import Rows, World
    from .plans import SavePlan

__all__ = ["check", "find_issues"]

# Faults of one kind reported of one tensor: a broken sharding repeats itself.
_PER_TENSOR: Final = 64


def find_issues(subject: Metadata | SavePlan | Iterable[SavePlan]) -> tuple[Issue, ...]:
    """Return all that is wrong with a checkpoint's metadata, or with the plans of all ranks.

    Replicas (the same chunk of the same tensor on several ranks) are fine: `global_plan` has one of
    them written. Otherwise each element must lie in one chunk. After passes, plans must also cover
    all that `local_plan` said is held: every element of a tensor of the state dict is written, and
    by no rank twice, or the whole tensor is left out.

    Args:
        subject: Metadata; or one plan per rank, in rank order; or one plan, if one rank is all.

    Returns:
        The issues, by name; none if all is well.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> find_issues(local_plan({"w": TensorSpec((4, 2))}))
    ()
    """
    if isinstance(subject, Metadata):
        return tuple(sorted(_metadata_issues(subject), key=lambda i: (i.fqn, i.kind)))
    from .columns.world import World
    from .plans import SavePlan  # not needed to look into a checkpoint

    world = World.of((subject,) if isinstance(subject, SavePlan) else subject)
    issues = world_issues(world) + source_issues(world)
    return tuple(sorted(issues, key=lambda issue: (issue.fqn, issue.kind)))


def check(subject: Metadata | SavePlan | Iterable[SavePlan]) -> None:
    """Raise all that `find_issues` finds.

    Raises:
        PlanError: Something is wrong; its ``issues`` say what.
    """
    issues = find_issues(subject)
    if issues:
        raise PlanError(issues)


def world_issues(world: World) -> list[Issue]:
    """Check the plans of all ranks, replicas counted once."""
    rows = world.rows
    if rows.repeats.any():
        rows = rows.take(~rows.repeats)
    layouts, which = rows.layouts
    issues = list(rows.issues)
    faulty = {issue.fqn: issue.kind for issue in rows.issues}
    for number, layout in enumerate(layouts):
        if fills(layout.tiling, layout.size):
            continue
        for tensor in np.flatnonzero(which == number).tolist():
            kind = faulty.get(rows.names[tensor])
            found = _cover_issues(rows, tensor, layout) if kind in (None, "out_of_bounds") else ()
            # Where a chunk has strayed, the gap that it leaves goes without saying.
            issues.extend(i for i in found if kind is None or i.kind != "gap")
    issues += _merged_sources(world)
    return sorted(issues, key=lambda issue: (issue.fqn, issue.kind))


def _merged_sources(world: World) -> Iterable[Issue]:
    """Report values that would be saved under one name, as if they were replicas."""
    rows, seen = world.rows, set[tuple[str, str, str]]()
    for row in np.flatnonzero(rows.clashes).tolist():
        (a, one), (b, other) = (_source(world, at) for at in (row - 1, row))
        name = rows.names[rows.tensor[row]]
        if (name, one, other) not in seen:
            seen.add((name, one, other))
            both = f"`{one}`" if a == b else f"`{one}` of rank {a}"
            text = f"`{name}` stands for {both} and `{other}` of rank {b}; rename one"
            yield Issue("conflict", name, text, sorted({a, b}))


def _source(world: World, row: int) -> tuple[int, str]:
    """Return whose row it is, and what it is called in that rank's state dict."""
    rank, item = int(world.rows.rank[row]), int(world.rows.item[row])
    items = world[rank].items
    return rank, items.catalog.sources[items.row[item]]


def duplicates(world: World) -> list[Issue]:
    """Report chunks that several plans would write: after all passes there must be none."""
    rows = world.rows
    edges = [*np.flatnonzero(~rows.repeats).tolist(), len(rows)]
    issues = []
    for low, high in itertools.pairwise(edges) if rows.repeats.any() else ():
        if high - low == 1:
            continue
        tensor = int(rows.tensor[low])
        name, axes = rows.names[tensor], len(rows.shapes[tensor])
        ranks = sorted(set(rows.rank[low:high].tolist()))
        box = (tuple(rows.offsets[low, :axes].tolist()), tuple(rows.sizes[low, :axes].tolist()))
        text = f"`{name}`: {region_text(*box, rows.shapes[tensor])} would be written by "
        text += f"{span(ranks)}; add dedup_replicas() to the passes"
        issues.append(Issue("overlap", name, text, ranks, box))
    return issues


def _cover_issues(rows: Rows, tensor: int, layout: Layout) -> Iterable[Issue]:
    """Say which chunks of one tensor collide and what no rank holds."""
    name, size, tiling = rows.names[tensor], layout.size, layout.tiling
    ranks = rows.rank[int(rows.start[tensor]) : int(rows.start[tensor + 1])].tolist()
    for number, (a, b) in enumerate(self_overlaps(tiling, _PER_TENSOR), 1):
        both = sorted({ranks[a], ranks[b]})
        yield _last(_collision(name, size, tiling[a], tiling[b], both), number)
    hold = "holds" if len(set(ranks)) == 1 else "hold"
    holders = f"{span(ranks)} {hold} other parts" if ranks else "nobody holds any of it"
    for number, gap in enumerate(gaps(tiling, Chunk((0,) * len(size), size), _PER_TENSOR), 1):
        where = region_text(gap.offsets, gap.sizes, size)
        text = f"no rank holds {where} of `{name}` ({holders}); is a rank or a shard left out?"
        issue = Issue("gap", name, text, sorted(set(ranks)), (gap.offsets, gap.sizes))
        yield _last(issue, number)


def _last(issue: Issue, number: int) -> Issue:
    """Have the last fault that is reported of a tensor say so."""
    if number < _PER_TENSOR:
        return issue
    text = f"{issue.message} (there may be more: only {number} are reported)"
    return attrs.evolve(issue, message=text)


def _collision(
    name: str, size: Sequence[int], a: Chunk, b: Chunk, ranks: Sequence[int] = ()
) -> Issue:
    shared = meet(a, b) or a
    low, extent = shared.offsets, shared.sizes
    kind = "conflict" if a.offsets == b.offsets else "overlap"
    who = f" ({span(ranks)})" if ranks else ""
    text = f"`{name}`: chunks {_box(a)} and {_box(b)}{who} share {region_text(low, extent, size)}; "
    text += "is an offset or a size wrong, or one name used for two tensors?"
    return Issue(kind, name, text, ranks, (low, extent))


def _metadata_issues(metadata: Metadata) -> Iterable[Issue]:
    entries = metadata.state_dict_metadata
    for number, layout in enumerate(entries.layouts):
        if shape_fault(layout.size) is None and fills(layout.tiling, layout.size):
            continue
        for row in np.flatnonzero(entries.layout == number).tolist():
            yield from layout_issues(entries.names[row], layout)


def layout_issues(name: str, layout: Layout) -> Iterable[Issue]:
    """Say what is wrong with one stored tensor."""
    size, tiling = layout.size, layout.tiling
    fault = shape_fault(size)
    if fault is not None:
        yield Issue("too_large", name, f"`{name}` {fault}")
        return
    strays = [
        chunk
        for chunk in tiling
        if len(chunk.sizes) != len(size)
        or any(e > n for e, n in zip(chunk.ends, size, strict=True))
    ]
    for chunk in strays:
        text = f"`{name}`: the saved chunk {_box(chunk)} lies outside shape {list(size)}"
        yield Issue("out_of_bounds", name, text, (), (chunk.offsets, chunk.sizes))
    if strays:
        return
    for a, b in self_overlaps(tiling, _PER_TENSOR):
        yield _collision(name, size, tiling[a], tiling[b])
    for gap in gaps(tiling, Chunk((0,) * len(size), size), _PER_TENSOR):
        text = f"no saved chunk of `{name}` holds {region_text(gap.offsets, gap.sizes, size)}"
        yield Issue("gap", name, text, (), (gap.offsets, gap.sizes))


def _box(chunk: Chunk) -> str:
    return "[" + ", ".join(f"{o}:{e}" for o, e in zip(chunk.offsets, chunk.ends, strict=True)) + "]"
