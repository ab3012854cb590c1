"""Checks of metadata and plans; they report all overlaps, gaps, stray chunks and conflicts.

Plans are also checked against the state dict. A *source* is a tensor or another value of the state
dict, given by name and shape. Passes may rename its items, cut them, give them to other ranks or
drop all of them. Over all ranks, either every element of a source is moved (saved or filled) or
none is; and no rank moves an element twice. `source_issues` checks this:

1. Number the sources that ranks hold, and find the source of every item.
2. If ranks move exactly what they hold, except for sources that all leave out, nothing is wrong.
3. Otherwise, per rank: every item lies in the shard that it names, and no two share an element.
4. Over all ranks: sources that no single rank moves in full are moved in full by all together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from .columns.arrays import Ints, distinct, group_rows
from .errors import Issue, PlanError, region_text, span
from .geometry.overlap import fills, gaps, self_overlaps
from .geometry.tilings import Chunk, Tiling, meet, pad, shape_fault, tile
from .metadata import Layout, Metadata

if TYPE_CHECKING:
    from .columns.items import Catalog, Head, WriteItems
    from .columns.world import World
    from .plans import SavePlan
    from .records import WriteItem

__all__ = ["check", "dropped_names", "find_issues", "source_issues", "with_replicas"]

# The most faults of one kind to report per tensor: a broken sharding repeats itself.
_PER_TENSOR: Final = 64


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
    issues += _merged_sources(world)
    return sorted(issues, key=lambda issue: (issue.fqn, issue.kind))


def _merged_sources(world: World) -> Iterable[Issue]:
    """Report different values saved under one name, which would pass as replicas."""
    rows, seen = world.rows, set[tuple[str, str, str]]()
    for row in np.flatnonzero(rows.clashes).tolist():
        name = rows.names[rows.tensor[row]]
        a, b = rows.rank[row - 1 : row + 1].tolist()
        held = zip((world[a].items, world[b].items), rows.item[row - 1 : row + 1], strict=True)
        first, second = (items.catalog.sources[items.row[item]] for items, item in held)
        if (name, first, second) not in seen:
            seen.add((name, first, second))
            both = f"`{first}`" if a == b else f"`{first}` of rank {a}"
            text = f"`{name}` stands for {both} and `{second}` of rank {b}; rename one"
            yield Issue("conflict", name, text, sorted({a, b}))


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
    for number, (a, b) in enumerate(self_overlaps(tiling, _PER_TENSOR), 1):
        both = sorted({ranks[a], ranks[b]}) if ranks else ()
        shared = meet(tiling[a], tiling[b]) or tiling[a]
        text = f"`{name}`: chunks [{tiling[a].text}] and [{tiling[b].text}]"
        text += f" ({span(both)})" * bool(both)
        text += f" share {region_text(shared.offsets, shared.sizes, size)}; "
        text += "is an offset or a size wrong, or one name used for two tensors?"
        kind = "conflict" if tiling[a].offsets == tiling[b].offsets else "overlap"
        yield _last(Issue(kind, name, text, both, (shared.offsets, shared.sizes)), number)
    for number, gap in enumerate(gaps(tiling, Chunk((0,) * len(size), size), _PER_TENSOR), 1):
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
    if number < _PER_TENSOR:
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


Source = tuple[str, tuple[int, ...] | None]  # the name and the shape; None for other values


def _is_untouched(plans: Iterable[SavePlan]) -> bool:
    """Return True if no pass has changed what the plans move."""
    return all(plan.items is plan.holds for plan in plans)


def dropped_names(plans: Sequence[SavePlan]) -> tuple[str, ...]:
    """Return the names, in the state dict, of what ranks hold and no rank moves."""
    if _is_untouched(plans):
        return ()
    sources, numbers = _number_sources(plans)
    held = {n for own, _ in numbers for n in distinct(own).tolist()}
    moved = {n for _, other in numbers for n in distinct(other).tolist()}
    return tuple(sorted({sources[n][0] for n in held - moved}))


def source_issues(
    plans: Sequence[SavePlan], verb: Literal["saved", "filled"] = "saved"
) -> list[Issue]:
    """Report elements that are moved only in part, twice, or from where nothing is held.

    Args:
        plans: One plan per rank, in rank order; each knows what its rank holds.
        verb: The verb for the messages.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((4,))})
    >>> twice = attrs.evolve(plan, items=[*plan.items, *plan.items])
    >>> print(*source_issues([twice]))
    `w` of the state dict: rows 0 to 4 would be saved 2 times by rank 0, as `w`; ...
    """
    if _is_untouched(plans):
        return []
    sources, numbers = _number_sources(plans)
    axes = max(p.offsets.shape[1] for plan in plans for p in (plan.holds, plan.items))
    held = _Boxes.of([plan.holds for plan in plans], [own for own, _ in numbers], axes)
    moved = _Boxes.of([plan.items for plan in plans], [other for _, other in numbers], axes)
    if _is_plain(held, moved):
        return []
    shards = [np.concatenate([getattr(b, c) for b in (held, moved)]) for c in _SHARD]
    held_shard, moved_shard = np.split(group_rows(shards)[1], [len(held.rank)])
    work = _Work(plans, sources, held, moved, held_shard, moved_shard, verb)
    faults = [*_unheld(work), *_doubled(work)]
    left_out = _left_out(work, np.array([row for row, _ in faults], np.int64))
    return [issue for _, issue in faults] + list(left_out)


def with_replicas(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    """Give each rank back the replicas that a world pass assigned to another rank.

    That assignment is for a save; on a load, each rank fills everything that it holds.

    >>> from shardplan.planning import TensorSpec, dedup_replicas, local_plan
    >>> plans = (local_plan({"w": TensorSpec((4,))}),) * 2
    >>> with_replicas(dedup_replicas()(plans)) == plans
    True
    """
    if _is_untouched(plans):
        return plans
    sources, numbers = _number_sources(plans)
    movers: dict[int, dict[Any, WriteItem]] = {}  # per source, its distinct items
    for plan, (_, moved) in zip(plans, numbers, strict=True):
        for source, item in zip(moved.tolist(), plan.items, strict=True):
            movers.setdefault(source, {})[item.index, item.tensor_data] = item
    completed = []
    for plan, (own, moved) in zip(plans, numbers, strict=True):
        has, takes = (  # elements by source; an item without any counts as one
            np.bincount(some + 1, np.maximum(items.sizes.prod(axis=1), 1), len(sources) + 1)[1:]
            for some, items in ((own, plan.holds), (moved, plan.items))
        )
        lacking = set(np.flatnonzero(takes < has).tolist()) & movers.keys()
        if lacking:
            pairs = zip(moved.tolist(), plan.items, strict=True)
            items = [item for source, item in pairs if source not in lacking]
            for source, shard in zip(own.tolist(), plan.holds, strict=True):
                if source in lacking:
                    cuts = (_cut(item, shard) for item in movers[source].values())
                    items += [cut for cut in cuts if cut is not None]
            plan = attrs.evolve(plan, items=items)
        completed.append(plan)
    return tuple(completed)


def _cut(item: WriteItem, shard: WriteItem) -> WriteItem | None:
    """Return the part of an item inside another rank's shard; None if there is none."""
    data, held = item.tensor_data, shard.tensor_data
    if data is None or held is None or not held.chunk.numel:
        return item
    chunk = meet(data.chunk, held.chunk)
    if chunk is None:
        return None
    index = attrs.evolve(item.index, offset=None, index=None)
    part = attrs.evolve(data, chunk=chunk)
    return attrs.evolve(item, index=index, tensor_data=part, source=shard.source)


def _number_sources(
    plans: Sequence[SavePlan],
) -> tuple[Sequence[Source], list[tuple[Ints, Ints]]]:
    """Number the sources that ranks hold; catalogs that ranks share are read once."""
    sources: dict[Source, int] = {}
    own: dict[int, Ints] = {}  # by the catalog's identity, the source of each row
    other: dict[tuple[int, int], Ints] = {}
    numbers = []
    for plan in plans:
        held, items = plan.holds.catalog, plan.items.catalog
        if id(held) not in own:
            keys = [(h.source, None if h.properties is None else h.size) for h in held.heads]
            own[id(held)] = np.array([sources.setdefault(k, len(sources)) for k in keys], np.int64)
        both = id(held), id(items)
        if both not in other:
            known = dict(zip(_keys(held), own[id(held)].tolist(), strict=True))
            other[both] = np.array([known.get(key, -1) for key in _keys(items)], np.int64)
        numbers.append((own[id(held)][plan.holds.row], other[both][plan.items.row]))
    return list(sources), numbers


def _keys(catalog: Catalog) -> list[tuple[str, bool]]:
    return list(zip(catalog.sources, catalog.is_bytes.tolist(), strict=True))


@attrs.frozen(eq=False)
class _Boxes:
    """Boxes of sources on all ranks; one row per box, by rank, by source, in the order of items."""

    rank: Ints  # the position of its plan
    source: Ints  # the number of its source; -1 if the rank holds no such source
    shard: Ints  # the start of its shard
    offsets: Ints
    sizes: Ints
    item: Ints  # the number of its item in the plan

    @classmethod
    def of(cls, ranks: Sequence[WriteItems], sources: Sequence[Ints], axes: int) -> _Boxes:
        """List the items of all ranks, given their sources."""
        order = [np.argsort(source, kind="stable") for source in sources]

        def every(columns: Iterable[Ints]) -> Ints:
            return np.concatenate([c[rows] for c, rows in zip(columns, order, strict=True)])

        return cls(
            np.repeat(np.arange(len(ranks)), list(map(len, ranks))),
            every(sources),
            every(pad(items.shard_offsets, axes, 0) for items in ranks),
            every(pad(items.offsets, axes, 0) for items in ranks),
            every(pad(items.sizes, axes, 1) for items in ranks),
            np.concatenate(order),
        )

    def tiling(self, rows: Any, axes: int) -> Tiling:
        """Return some boxes as a tiling, without the padding."""
        return tile(self.offsets[rows, :axes], self.sizes[rows, :axes])


_SHARD: Final = ("rank", "source", "shard")


def _is_plain(held: _Boxes, moved: _Boxes) -> bool:
    """Return True if ranks move exactly what they hold, except sources that all leave out."""
    if (moved.source < 0).any():
        return False
    count = int(held.source.max(initial=-1)) + 1
    mine, theirs = (boxes.rank * count + boxes.source for boxes in (held, moved))  # ascending
    kept = np.searchsorted(theirs, mine, "right") > np.searchsorted(theirs, mine, "left")
    for name in (*_SHARD, "offsets", "sizes"):
        if not np.array_equal(getattr(held, name)[kept], getattr(moved, name)):
            return False
    return not np.isin(moved.source, held.source[~kept]).any()


@attrs.frozen(eq=False)
class _Work:
    """The boxes that are held, and those that are moved."""

    plans: Sequence[SavePlan]
    sources: Sequence[Source]
    held: _Boxes
    moved: _Boxes
    held_shard: Ints  # the shard (of a rank and source) of each box
    moved_shard: Ints
    verb: str

    def rank(self, position: int) -> int:
        """Return the rank of a plan."""
        known = self.plans[position].rank
        return position if known is None else known

    def head(self, row: int) -> Head:
        """Return the catalog row of a moved box."""
        items = self.plans[int(self.moved.rank[row])].items
        return items.catalog.heads[int(items.row[self.moved.item[row]])]


def _unheld(work: _Work) -> Iterator[tuple[int, Issue]]:
    """Report items that are not inside the shard that they name."""
    held, moved = work.held, work.moved
    order = np.argsort(work.held_shard, kind="stable")
    shards = work.held_shard[order]
    at = np.searchsorted(shards, work.moved_shard)
    inside = np.zeros(len(moved.rank), bool)
    some = np.flatnonzero(at < len(shards))
    same = some[shards[at[some]] == work.moved_shard[some]]
    box = order[at[same]]  # the first that is held of the shard
    inside[same] = (moved.source[same] >= 0) & (
        (moved.offsets[same] >= held.offsets[box])
        & (moved.offsets[same] + moved.sizes[same] <= held.offsets[box] + held.sizes[box])
    ).all(axis=1)
    for row in _few_per_source(moved.source, np.flatnonzero(~inside)).tolist():
        head, rank = work.head(row), work.rank(int(moved.rank[row]))
        if moved.source[row] < 0:
            text = f"`{head.name}` comes from `{head.source}`, which rank {rank} does not hold"
            yield row, Issue("unheld", head.source, text, [rank])
            continue
        axes = len(head.size)
        shard = held.tiling(order[_equal(shards, int(work.moved_shard[row]))], axes)
        for gap in gaps(shard, moved.tiling([row], axes)[0], 1):
            where = region_text(gap.offsets, gap.sizes, head.size)
            start = moved.shard[row, :axes].tolist()
            text = f"`{head.source}` of the state dict: `{head.name}` takes {where} from the shard "
            text += f"that starts at {start}, and rank {rank} does not hold them there"
            yield row, Issue("unheld", head.source, text, [rank], (gap.offsets, gap.sizes))


def _few_per_source(source: Ints, rows: Ints) -> Ints:
    """Return some rows, at most _PER_TENSOR of each source."""
    order = np.argsort(source[rows], kind="stable")
    mine = source[rows][order]
    nth = np.arange(len(rows)) - np.searchsorted(mine, mine)
    return np.sort(rows[order[nth < _PER_TENSOR]])


def _equal(ordered: Ints, value: int) -> slice:
    """Return the position of a value in an ascending column."""
    return slice(*np.searchsorted(ordered, [value, value + 1]).tolist())


def _doubled(work: _Work) -> Iterator[tuple[int, Issue]]:
    """Report elements that one rank moves twice."""
    moved = work.moved
    new = np.ones(len(moved.rank), bool)
    new[1:] = (np.diff(moved.rank) != 0) | (np.diff(moved.source) != 0)
    edges = [*np.flatnonzero(new).tolist(), len(moved.rank)]
    boxes = np.concatenate([moved.offsets, moved.sizes], axis=1)
    sound: set[tuple[int, bytes]] = set()  # checked already: a model's tensors repeat
    for low, high in pairwise(edges):
        if high - low == 1 or moved.source[low] < 0:
            continue
        axes = len(work.head(low).size)
        key = axes, boxes[low:high].tobytes()
        if key in sound:
            continue
        tiling = moved.tiling(slice(low, high), axes)
        shared: dict[Chunk | None, set[int]] = {}  # the rows that take each region
        for a, b in self_overlaps(tiling, _PER_TENSOR):
            shared.setdefault(meet(tiling[a], tiling[b]), set()).update((low + a, low + b))
        if not shared:
            sound.add(key)
        rank = work.rank(int(moved.rank[low]))
        source, shape = work.sources[int(moved.source[low])]
        for region, rows in shared.items():
            if region is None:
                continue
            names = ", ".join(dict.fromkeys(f"`{work.head(row).name}`" for row in sorted(rows)))
            where = region_text(region.offsets, region.sizes, shape) if shape else "it"
            how = f"saved {len(rows)} times by rank {rank}, as {names}; a pass must take each "
            if work.verb == "filled":
                how = f"filled {len(rows)} times on rank {rank}, from {names}; fill each "
            text = f"`{source}` of the state dict: {where} would be {how}element once"
            region_of = region.offsets, region.sizes
            yield min(rows), Issue("doubled", source, text, [rank], region_of)


def _left_out(work: _Work, faulty: npt.NDArray[np.int64]) -> Iterator[Issue]:
    """Report boxes that no rank moves in full, though other parts of the source are moved."""
    held, moved = work.held, work.moved
    count = max(work.held_shard.max(initial=-1), work.moved_shard.max(initial=-1)) + 1
    own, taken = np.zeros((2, count), np.int64)  # elements of each shard
    np.add.at(own, work.held_shard, held.sizes.prod(axis=1))
    np.add.at(taken, work.moved_shard, moved.sizes.prod(axis=1))
    taken[work.moved_shard[faulty]] = -1
    first, box = group_rows([held.source, held.offsets, held.sizes])
    whole = (taken == own)[work.held_shard]  # moved by the rank that holds it
    todo = first[(np.bincount(box, whole) == 0) & np.isin(held.source[first], moved.source)]
    by_source, by_box = np.argsort(moved.source, kind="stable"), np.argsort(box, kind="stable")
    sources, boxes = moved.source[by_source], box[by_box]
    for row in _few_per_source(held.source, np.sort(todo)).tolist():
        source, shape = work.sources[int(held.source[row])]
        axes = len(shape or ())
        tiling = moved.tiling(by_source[_equal(sources, int(held.source[row]))], axes)
        ranks = held.rank[by_box[_equal(boxes, int(box[row]))]].tolist()
        holders = [work.rank(rank) for rank in ranks]
        for gap in gaps(tiling, held.tiling([row], axes)[0], _PER_TENSOR):
            where, who = region_text(gap.offsets, gap.sizes, shape or ()), span(holders)
            text = f"`{source}` of the state dict: {where} would not be {work.verb} "
            text += f"(held by {who}), though other parts are; "
            text += "a pass must take all of a tensor, or drop it"
            yield Issue("left_out", source, text, holders, (gap.offsets, gap.sizes))
