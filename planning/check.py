"""Checks of metadata and plans; they report all overlaps, gaps, stray chunks and conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from .columns.arrays import group_rows
from .dtypes import can_hold
from .errors import Issue, PlanError, region_text, span
from .geometry.overlap import fills, gaps, self_overlaps
from .geometry.tilings import Chunk, meet, shape_fault
from .metadata import Layout, Metadata
from .records import WriteItem

if TYPE_CHECKING:
    from .columns.world import World
    from .plans import SavePlan


# The most faults of one kind to report per tensor: a broken sharding repeats itself.
PER_TENSOR: Final = 64


def find_issues(subject: Metadata | SavePlan | Iterable[SavePlan]) -> tuple[Issue, ...]:
    """Return everything that is wrong with a checkpoint's metadata, or with the plans of all ranks.

    Replicas (the same chunk of the same tensor on several ranks) are fine, since `global_plan` has
    one of them written; otherwise each element must lie in exactly one chunk. After passes, plans
    must also write every element that `local_plan` found in a tensor, no rank twice, or leave out
    the tensor entirely.

    Args:
        subject: Metadata; or one plan per rank, in rank order; or a single rank's plan.

    Returns:
        The issues, by name; empty if there are none.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> find_issues(local_plan({"w": TensorSpec((4, 2))}))
    ()
    """
    if isinstance(subject, Metadata):
        entries, issues = subject.state_dict_metadata, list[Issue]()
        for number, layout in enumerate(entries.layouts):
            if shape_fault(layout.size) is not None or not fills(layout.tiling, layout.size):
                for row in np.flatnonzero(entries.layout == number).tolist():
                    issues += layout_issues(entries.names[row], layout)
        return tuple(sorted(issues, key=lambda issue: (issue.fqn, issue.kind)))
    from .columns.world import World
    from .plans import SavePlan  # not needed to look into a checkpoint
    from .sources import source_issues

    world = World.of((subject,) if isinstance(subject, SavePlan) else subject)
    issues = world_issues(world) + source_issues(world)
    return tuple(sorted(issues, key=lambda issue: (issue.fqn, issue.kind)))


def check(subject: Metadata | SavePlan | Iterable[SavePlan]) -> None:
    """Raise a PlanError with all issues of `find_issues`, if there are any.

    Raises:
        PlanError: Something is wrong; see its ``issues``.
    """
    issues = find_issues(subject)
    if issues:
        raise PlanError(issues)


def world_issues(world: World) -> list[Issue]:
    """Check the plans of all ranks, counting replicas once."""
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
            if kind in (None, "out_of_bounds"):
                ranks = rows.rank[rows.start[tensor] : rows.start[tensor + 1]].tolist()
                faults = _cover_issues(rows.names[tensor], layout, ranks)
                # A stray chunk implies the gap that it leaves.
                issues.extend(i for i in faults if kind is None or i.kind != "gap")
    issues += [*_merged_sources(world), *_unfit_fills(world)]
    return sorted(issues, key=lambda issue: (issue.fqn, issue.kind))


def _merged_sources(world: World) -> Iterable[Issue]:
    """Report different values saved under one name, which would pass as replicas."""
    rows, seen = world.rows, set[tuple[str, str, str]]()
    for row in np.flatnonzero(rows.clashes).tolist():
        name = rows.names[rows.tensor[row]]
        a, b = rows.rank[row - 1 : row + 1].tolist()
        held = zip((world[a].items, world[b].items), rows.item[row - 1 : row + 1], strict=True)
        first, second = (_origin(items[int(item)]) for items, item in held)
        if (name, first, second) not in seen:
            seen.add((name, first, second))
            both = first if a == b else f"{first} of rank {a}"
            text = f"`{name}` stands for {both} and {second} of rank {b}; rename one"
            yield Issue("conflict", name, text, sorted({a, b}))


def _unfit_fills(world: World) -> Iterable[Issue]:
    """Report padding with a value that its tensor cannot hold."""
    found: dict[Issue, None] = {}
    for items in (plan.items for plan in world if plan.items.is_fill.any()):
        rows = np.flatnonzero(items.is_fill)
        first, _ = group_rows([items.row[rows], items.source_frame.fill.number[rows]])
        for item in (items[row] for row in rows[first].tolist()):
            name, data, fill = item.index.fqn, item.tensor_data, item.fill
            if data is not None and fill is not None and not can_hold(data.properties.dtype, fill):
                text = f"`{name}` is padded with {fill}, which {data.properties.dtype} cannot hold"
                found[Issue("lossy", name, f"{text}; pad with another value, or cast first")] = None
    return found


def _origin(item: WriteItem) -> str:
    """Describe of what an item is made."""
    if item.fill is not None:
        return f"padding with {item.fill}"
    if item.source_box is None:
        return f"`{item.source.fqn}`"
    axes = f", by {item.axes}," * (item.axes is not None)
    return f"[{item.source_box.text}] of `{item.source.fqn}`{axes}"


def duplicates(world: World) -> list[Issue]:
    """Report chunks that several plans would write; after all passes there must be none."""
    rows = world.rows
    edges = [*np.flatnonzero(~rows.repeats).tolist(), len(rows)]
    issues = []
    for low, high in pairwise(edges) if rows.repeats.any() else ():
        if high - low == 1:
            continue
        tensor = int(rows.tensor[low])
        name, shape = rows.names[tensor], rows.shapes[tensor]
        ranks = sorted(set(rows.rank[low:high].tolist()))
        offsets, sizes = (tuple(c[low, : len(shape)].tolist()) for c in (rows.offsets, rows.sizes))
        text = f"`{name}`: {region_text(offsets, sizes, shape)} would be written by "
        text += f"{span(ranks)}; add dedup_replicas() to the passes"
        issues.append(Issue("overlap", name, text, ranks, (offsets, sizes)))
    return issues


def _cover_issues(name: str, layout: Layout, ranks: Sequence[int] | None = None) -> Iterator[Issue]:
    """Report the overlaps and gaps of one tensor, given the rank of each chunk, if known."""
    size, tiling = layout.size, layout.tiling
    for number, (a, b) in enumerate(self_overlaps(tiling, PER_TENSOR), 1):
        both = sorted({ranks[a], ranks[b]}) if ranks else ()
        shared = meet(tiling[a], tiling[b]) or tiling[a]
        text = f"`{name}`: chunks [{tiling[a].text}] and [{tiling[b].text}]"
        text += f" ({span(both)})" * bool(both)
        text += f" share {region_text(shared.offsets, shared.sizes, size)}; "
        text += "is an offset or a size wrong, or one name used for two tensors?"
        kind = "conflict" if tiling[a].offsets == tiling[b].offsets else "overlap"
        yield _last(Issue(kind, name, text, both, (shared.offsets, shared.sizes)), number)
    for number, gap in enumerate(gaps(tiling, Chunk((0,) * len(size), size), PER_TENSOR), 1):
        where = region_text(gap.offsets, gap.sizes, size)
        text = f"no saved chunk of `{name}` holds {where}"
        if ranks is not None:
            hold = "holds" if len(set(ranks)) == 1 else "hold"
            others = f"{span(ranks)} {hold} other parts" if ranks else "no rank holds any part"
            text = f"no rank holds {where} of `{name}` ({others}); is a rank or a shard left out?"
        region = gap.offsets, gap.sizes
        yield _last(Issue("gap", name, text, sorted(set(ranks or ())), region), number)


def _last(issue: Issue, number: int) -> Issue:
    """Mark the last reported fault of a tensor as such."""
    if number < PER_TENSOR:
        return issue
    text = f"{issue.message} (there may be more: only {number} are reported)"
    return attrs.evolve(issue, message=text)


def layout_issues(name: str, layout: Layout) -> Iterator[Issue]:
    """Return what is wrong with one stored tensor."""
    size = layout.size
    fault = shape_fault(size)
    if fault is not None:
        yield Issue("too_large", name, f"`{name}` {fault}")
        return
    strays = [
        chunk
        for chunk in layout.tiling
        if len(chunk.sizes) != len(size)
        or any(e > n for e, n in zip(chunk.ends, size, strict=True))
    ]
    for chunk in strays:
        text = f"`{name}`: the saved chunk [{chunk.text}] lies outside shape {list(size)}"
        yield Issue("out_of_bounds", name, text, (), (chunk.offsets, chunk.sizes))
    if not strays:
        yield from _cover_issues(name, layout)
