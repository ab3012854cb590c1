"""The state dict's side of plans: each element that ranks hold is moved exactly once, or dropped.

A *source* is a tensor or another value of the state dict, given by name and shape. Passes may
rename its items, cut them, give them to other ranks or drop all of them. Over all ranks, either
every element of a source is moved (saved or filled) or none is; and no rank moves an element twice.

1. Number the sources that ranks hold, and find the source of every item.
2. If ranks move exactly what they hold, except for sources that all leave out, nothing is wrong.
3. Otherwise, per rank: every item lies in the shard that it names, and no two share an element.
4. Over all ranks: sources that no single rank moves in full are moved in full by all together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from .columns.arrays import Ints, distinct, group_rows
from .errors import Issue, region_text, span
from .geometry.overlap import gaps, self_overlaps
from .geometry.tilings import Chunk, meet, pad, tile

if TYPE_CHECKING:
    from .columns.catalog import Catalog, Head
    from .columns.items import WriteItems
    from .plans import SavePlan
    from .records import WriteItem

__all__ = ["dropped_names", "source_issues", "with_replicas"]

Source = tuple[str, tuple[int, ...] | None]  # the name and the shape; None for other values
_PER_SOURCE: Final = 64  # faults of one kind to report per source


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
    _, numbers = _number_sources(plans)
    movers: dict[int, dict[Any, WriteItem]] = {}  # per source, its distinct items
    for plan, (_, moved) in zip(plans, numbers, strict=True):
        for source, item in zip(moved.tolist(), plan.items, strict=True):
            movers.setdefault(source, {})[item.index, item.tensor_data] = item
    pairs = zip(plans, numbers, strict=True)
    return tuple(
        _completed(plan, own.tolist(), moved.tolist(), movers) for plan, (own, moved) in pairs
    )


def _completed(
    plan: SavePlan, own: list[int], moved: list[int], movers: Mapping[int, Mapping[Any, WriteItem]]
) -> SavePlan:
    """Return a rank's plan with what others move for it."""
    has, takes = Counter[int](), Counter[int]()
    for count, sources, items in ((has, own, plan.holds), (takes, moved, plan.items)):
        for source, volume in zip(sources, items.sizes.prod(axis=1).tolist(), strict=True):
            count[source] += volume
    lacking = {s for s in has if s in movers and (s not in takes or takes[s] < has[s])}
    if not lacking:
        return plan
    pairs = zip(moved, plan.items, strict=True)
    after = [item for source, item in pairs if source not in lacking]
    for source, shard in zip(own, plan.holds, strict=True):
        cuts = (_cut(i, shard) for i in movers[source].values()) if source in lacking else ()
        after += [cut for cut in cuts if cut is not None]
    return attrs.evolve(plan, items=after)


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
    """Number the sources that ranks hold; catalogs that ranks share are read once.

    Returns:
        The sources; and per plan, the source number of each held item and of each moved item (-1:
        the rank holds no such source).
    """
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
    """Boxes of sources on all ranks; one row per box, by rank, by source, in the order of items.

    Attributes:
        rank: The position of its plan.
        source: The number of its source; -1 if the rank holds no such source.
        shard: The start of its shard.
        offsets, sizes: The box.
        item: The number of its item in the plan.
    """

    rank: Ints
    source: Ints
    shard: Ints
    offsets: Ints
    sizes: Ints
    item: Ints

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

    def tiling(self, rows: Any, axes: int) -> Any:
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
    """The boxes that are held, and those that are moved.

    ``held_shard`` and ``moved_shard`` number the shard (of a rank and source) of each box.
    """

    plans: Sequence[SavePlan]
    sources: Sequence[Source]
    held: _Boxes
    moved: _Boxes
    held_shard: Ints
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

    def volumes(self) -> tuple[Ints, Ints]:
        """Return how many elements of each shard are held, and how many are moved."""
        count = int(max(self.held_shard.max(initial=-1), self.moved_shard.max(initial=-1))) + 1
        own, taken = np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.add.at(own, self.held_shard, self.held.sizes.prod(axis=1))
        np.add.at(taken, self.moved_shard, self.moved.sizes.prod(axis=1))
        return own, taken


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
    """Return some rows, at most _PER_SOURCE of each source."""
    order = np.argsort(source[rows], kind="stable")
    mine = source[rows][order]
    nth = np.arange(len(rows)) - np.searchsorted(mine, mine)
    return np.sort(rows[order[nth < _PER_SOURCE]])


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
    for low, high in itertools.pairwise(edges):
        if high - low == 1 or moved.source[low] < 0:
            continue
        axes = len(work.head(low).size)
        key = axes, boxes[low:high].tobytes()
        if key in sound:
            continue
        tiling = moved.tiling(slice(low, high), axes)
        shared: dict[Chunk | None, set[int]] = {}  # the rows that take each region
        for a, b in self_overlaps(tiling, _PER_SOURCE):
            shared.setdefault(meet(tiling[a], tiling[b]), set()).update((low + a, low + b))
        for region, rows in shared.items():
            if region is not None:
                yield min(rows), _repeated(work, region, sorted(rows))
        if not shared:
            sound.add(key)


def _repeated(work: _Work, region: Chunk, rows: Sequence[int]) -> Issue:
    """Report a region that one rank moves several times."""
    rank = work.rank(int(work.moved.rank[rows[0]]))
    source, shape = work.sources[int(work.moved.source[rows[0]])]
    names = ", ".join(dict.fromkeys(f"`{work.head(row).name}`" for row in rows))
    where, times = region_text(region.offsets, region.sizes, shape) if shape else "it", len(rows)
    how, rule = f"saved {times} times by rank {rank}, as", "a pass must take each element once"
    if work.verb == "filled":
        how, rule = f"filled {times} times on rank {rank}, from", "each must be filled once"
    text = f"`{source}` of the state dict: {where} would be {how} {names}; {rule}"
    return Issue("doubled", source, text, [rank], (region.offsets, region.sizes))


def _left_out(work: _Work, faulty: npt.NDArray[np.int64]) -> Iterator[Issue]:
    """Report boxes that no rank moves in full, though other parts of the source are moved.

    ``faulty`` are rows that were reported already; their element counts are meaningless.
    """
    held, moved = work.held, work.moved
    own, taken = work.volumes()
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
        for gap in gaps(tiling, held.tiling([row], axes)[0], _PER_SOURCE):
            where, who = region_text(gap.offsets, gap.sizes, shape or ()), span(holders)
            text = f"`{source}` of the state dict: {where} would not be {work.verb} "
            text += f"(held by {who}), though other parts are; "
            text += "a pass must take all of a tensor, or drop it"
            yield Issue("left_out", source, text, holders, (gap.offsets, gap.sizes))
