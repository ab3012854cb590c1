"""Checks of plans in the state dict's frame: what ranks hold is moved, once, or left out by name.

A *source* is a tensor or another value of the state dict, given by name and shape. Passes may
rename its items, cut them, turn them, give them to other ranks or drop all of them. Over all ranks,
either every element of a source is accounted for (saved, filled, or in `SavePlan.left_out`) or none
is moved; and no rank accounts for an element twice. Padding has no source. `source_issues` checks
this:

1. Number the sources that ranks hold, and find the source of every box.
2. If ranks move exactly what they hold, except for sources that all leave out, nothing is wrong.
3. Otherwise, per rank: every box lies in the shard that it names, and no two share an element.
4. Over all ranks: sources that no single rank moves in full are moved in full by all together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from .check import PER_TENSOR
from .columns.arrays import Ints, column, distinct, group_rows, pad, readonly
from .columns.items import Catalog, Head, WriteItems, merge_catalogs
from .errors import Issue, region_text, span
from .geometry.axes import cut_source
from .geometry.overlap import gaps, self_overlaps
from .geometry.tilings import Chunk, Tiling, meet, tile
from .plans import SavePlan
from .records import MetadataIndex, WriteItem

Source = tuple[str, tuple[int, ...] | None]  # the name and the shape; None for other values


def _is_untouched(plans: Iterable[SavePlan]) -> bool:
    """Return True if no pass has changed what the plans move."""
    return all(plan.items is plan.holds and plan.left_out is None for plan in plans)


def dropped_names(plans: Sequence[SavePlan]) -> tuple[str, ...]:
    """Return the names, in the state dict, of what ranks hold and no rank moves."""
    if _is_untouched(plans):
        return ()
    sources, numbers = _number_sources(plans, [_without_fills(plan.items) for plan in plans])
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
    accounted = _accounted(plans)
    sources, numbers = _number_sources(plans, accounted)
    every = [*(plan.holds for plan in plans), *accounted]
    axes = max(items.box_offsets.shape[1] for items in every)
    held = _Boxes.of([plan.holds for plan in plans], [own for own, _ in numbers], axes)
    moved = _Boxes.of(accounted, [other for _, other in numbers], axes)
    if _is_plain(held, moved):
        return []
    shards = [np.concatenate([getattr(b, c) for b in (held, moved)]) for c in _SHARD]
    held_shard, moved_shard = np.split(group_rows(shards)[1], [len(held.rank)])
    work = _Work(plans, accounted, sources, held, moved, held_shard, moved_shard, verb)
    faults = [*_unheld(work), *_doubled(work)]
    left_out = _left_out(work, np.array([row for row, _ in faults], np.int64))
    return [issue for _, issue in faults] + list(left_out)


def _without_fills(items: WriteItems) -> WriteItems:
    """Return the items that are made of something in the state dict."""
    return items.take(~items.is_fill) if items.is_fill.any() else items


def _accounted(plans: Sequence[SavePlan]) -> list[WriteItems]:
    """Return the boxes that ranks move, plus those they leave out of tensors moved in part."""
    moved = [_without_fills(plan.items) for plan in plans]
    if all(plan.left_out is None for plan in plans):
        return moved
    used = {i.catalog.sources[row] for i in moved for row in distinct(i.row).tolist()}
    merge = lru_cache(merge_catalogs)  # ranks share catalogs, by identity
    return [
        items
        if plan.left_out is None
        else WriteItems.concat([items, _from(plan.left_out, used)], merge)
        for items, plan in zip(moved, plans, strict=True)
    ]


def in_source_frame(plans: Iterable[SavePlan]) -> tuple[SavePlan, ...]:
    """Return plans of the same boxes as they lie in the state dict, under its names.

    >>> from shardplan.planning import TensorSpec, local_plan, rename
    >>> (plan,) = rename({"w": "v"})((local_plan({"w": TensorSpec((4,))}),))
    >>> in_source_frame([plan])[0].items[0].index.fqn
    'w'
    """
    rows = lru_cache(_source_rows)  # ranks share catalogs, by identity
    return tuple(_unframed(plan, rows) for plan in plans)


def _source_rows(held: Catalog, moved: Catalog) -> Ints:
    """Return the row of what is held that each row of what is moved is made of."""
    known = {key: row for row, key in enumerate(_keys(held))}
    return column([known.get(key, -1) for key in _keys(moved)])


def _unframed(plan: SavePlan, rows: Callable[[Catalog, Catalog], Ints]) -> SavePlan:
    items, held = _without_fills(plan.items), plan.holds.catalog
    offsets, sizes, starts = (
        readonly(pad(values, held.axes, blank)[:, : held.axes])
        for values, blank in (
            (items.box_offsets, 0),
            (items.box_sizes, 1),
            (items.shard_offsets, 0),
        )
    )
    row = readonly(rows(held, items.catalog)[items.row])
    moved = WriteItems(held, row, offsets, sizes, starts)
    return attrs.evolve(plan, items=moved, held=None, left_out=None)


def _from(items: WriteItems, sources: set[str]) -> WriteItems:
    """Return the items of some sources."""
    mine = np.array([source in sources for source in items.catalog.sources], bool)
    return items.take(mine[items.row])


def with_replicas(
    plans: tuple[SavePlan, ...], entering: tuple[SavePlan, ...] | None = None
) -> tuple[SavePlan, ...]:
    """Give each rank back the replicas that a world pass assigned to another rank.

    That assignment is for a save; on a load, each rank fills everything that it holds.

    Args:
        plans: The plans of all ranks, after world passes.
        entering: The same plans before the world passes. What a rank had left out by then, it does
            not get back. If left out, these are the plans of all that ranks hold.

    >>> from shardplan.planning import TensorSpec, dedup_replicas, local_plan
    >>> plans = (local_plan({"w": TensorSpec((4,))}),) * 2
    >>> with_replicas(dedup_replicas()(plans)) == plans
    True
    """
    if _is_untouched(plans):
        return plans
    shares = had = [plan.holds for plan in plans]  # what ranks may fill, and what they account for
    lost = [items.take(slice(0)) for items in shares]  # what they have left out before
    if entering is not None:
        framed = [plan.items for plan in in_source_frame(entering)]
        shares = [items.take(items.row >= 0) for items in framed]
        had, lost = _accounted(entering), _left_out_by(entering)
    moved, left_out = [_without_fills(plan.items) for plan in plans], _left_out_by(plans)
    every = (shares, had, lost, _accounted(plans), moved, left_out)
    share, old, gone, new, own, out = (_Sourced.of(plans, items) for items in every)
    known = set[int]().union(*(distinct(n).tolist() for n in [*own.source, *out.source]))
    lacks = [_fewer(new.elements(rank), old.elements(rank)) & known for rank in range(len(plans))]
    movers, leavers = (some.distinct(set[int]().union(*lacks)) for some in (own, out))
    completed = []
    for rank, (plan, lacking) in enumerate(zip(plans, lacks, strict=True)):
        if lacking:
            wanted = [(n, shard) for n, shard in share.pairs(rank) if n in lacking]
            items = [item for n, item in own.pairs(rank) if n not in lacking]
            items += [*_parts_of(movers, wanted), *plan.items.take(plan.items.is_fill)]
            rest = [item for n, item in out.pairs(rank) if n not in lacking]
            rest += [item for n, item in gone.pairs(rank) if n in lacking]
            rest += _parts_of(leavers, wanted)
            plan = attrs.evolve(plan, items=items, left_out=WriteItems.of(rest) if rest else None)
        completed.append(plan)
    return tuple(completed)


def _fewer(counts: Mapping[int, int], than: Mapping[int, int]) -> set[int]:
    """Return the keys with a smaller count than another mapping has."""
    return {n for n, count in than.items() if counts.get(n, 0) < count}


def _left_out_by(plans: Iterable[SavePlan]) -> list[WriteItems]:
    """Return what each rank leaves out."""
    return [p.holds.take(slice(0)) if p.left_out is None else p.left_out for p in plans]


@attrs.frozen(eq=False)
class _Sourced:
    """Items of each rank, and the number of the source of each."""

    items: Sequence[WriteItems]
    source: Sequence[Ints]

    @classmethod
    def of(cls, plans: Sequence[SavePlan], items: Sequence[WriteItems]) -> _Sourced:
        """Number the sources of some items of each rank."""
        return cls(items, [source for _, source in _number_sources(plans, items)[1]])

    def pairs(self, rank: int) -> Iterator[tuple[int, WriteItem]]:
        """Yield the items of a rank with their sources."""
        return zip(self.source[rank].tolist(), self.items[rank], strict=True)

    def elements(self, rank: int) -> dict[int, int]:
        """Count the elements of a rank by source; an item without any counts as one."""
        weights = np.maximum(self.items[rank].box_sizes.prod(axis=1), 1)
        counts = np.bincount(self.source[rank] + 1, weights)[1:]
        return {n: int(counts[n]) for n in np.flatnonzero(counts).tolist()}

    def distinct(self, sources: Collection[int]) -> Mapping[int, Collection[WriteItem]]:
        """Return the distinct items of all ranks that have one of some sources, by source."""
        found: dict[int, dict[Any, WriteItem]] = {}
        for rank in range(len(self.items) if sources else 0):
            for number, item in self.pairs(rank):
                if number in sources:
                    found.setdefault(number, {})[item.index, item.tensor_data] = item
        return {number: items.values() for number, items in found.items()}


def _parts_of(
    items: Mapping[int, Collection[WriteItem]], wanted: Iterable[tuple[int, WriteItem]]
) -> Iterator[WriteItem]:
    """Yield the parts of some items, by source, that lie in the shards of a rank."""
    for number, shard in wanted:
        for item in items.get(number, ()):
            yield from _parts(item, shard)


def _parts(item: WriteItem, shard: WriteItem) -> Iterator[WriteItem]:
    """Yield the parts of an item inside another rank's shard."""
    data, box, held = item.tensor_data, item.source_chunk, shard.source_chunk
    if data is None or box is None or held is None or box.numel == held.numel == 0:
        yield item
        return
    common = meet(box, held) if held.numel else None
    if common is None:
        return
    low = tuple(o - start for o, start in zip(common.offsets, box.offsets, strict=True))
    for part in cut_source(item.axes, box.sizes, data.chunk.sizes, low, common.sizes):
        chunk = _at(data.chunk, part.chunk_offsets, part.chunk_sizes)
        taken = _at(box, part.box_offsets, part.box_sizes)
        index, mine = MetadataIndex(item.index.fqn), attrs.evolve(data, chunk=chunk)
        yield WriteItem(index, item.type, mine, shard.source, taken, part.axes)


def _at(whole: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> Chunk:
    """Return a part of a box, given its start relative to that box."""
    return Chunk([a + b for a, b in zip(whole.offsets, offsets, strict=True)], sizes)


def _number_sources(
    plans: Sequence[SavePlan], moved: Sequence[WriteItems]
) -> tuple[Sequence[Source], list[tuple[Ints, Ints]]]:
    """Number the sources that ranks hold, and return those of what each holds and moves.

    Catalogs that ranks share are read once.
    """
    sources: dict[Source, int] = {}
    own: dict[int, Ints] = {}  # by the catalog's identity, the source of each row
    other: dict[tuple[int, int], Ints] = {}
    numbers = []
    for plan, theirs in zip(plans, moved, strict=True):
        held, items = plan.holds.catalog, theirs.catalog
        if id(held) not in own:
            keys = [(h.source, None if h.properties is None else h.size) for h in held.heads]
            own[id(held)] = np.array([sources.setdefault(k, len(sources)) for k in keys], np.int64)
        both = id(held), id(items)
        if both not in other:
            known = dict(zip(_keys(held), own[id(held)].tolist(), strict=True))
            other[both] = np.array([known.get(key, -1) for key in _keys(items)], np.int64)
        numbers.append((own[id(held)][plan.holds.row], other[both][theirs.row]))
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
            every(pad(items.box_offsets, axes, 0) for items in ranks),
            every(pad(items.box_sizes, axes, 1) for items in ranks),
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
    accounted: Sequence[WriteItems]
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
        items = self.accounted[int(self.moved.rank[row])]
        return items.catalog.heads[int(items.row[self.moved.item[row]])]

    def axes(self, row: int) -> int:
        """Return the number of axes of a moved box."""
        items = self.accounted[int(self.moved.rank[row])]
        return items.box_axes(int(self.moved.item[row]))

    def held_axes(self, row: int) -> int:
        """Return the number of axes of a held box."""
        items = self.plans[int(self.held.rank[row])].holds
        return items.box_axes(int(self.held.item[row]))

    def where(self, source: int, box: Chunk) -> str:
        """Describe a box of a source."""
        shape = self.sources[source][1] or ()
        return region_text(
            box.offsets, box.sizes, shape if len(shape) == len(box.sizes) else box.ends
        )


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
        axes = work.axes(row)
        shard = held.tiling(order[_equal(shards, int(work.moved_shard[row]))], axes)
        for gap in gaps(shard, moved.tiling([row], axes)[0], 1):
            where = work.where(int(moved.source[row]), gap)
            start = moved.shard[row, :axes].tolist()
            text = f"`{head.source}` of the state dict: `{head.name}` takes {where} from the shard "
            text += f"that starts at {start}, and rank {rank} does not hold them there"
            yield row, Issue("unheld", head.source, text, [rank], (gap.offsets, gap.sizes))


def _few_per_source(source: Ints, rows: Ints) -> Ints:
    """Return some rows, at most PER_TENSOR of each source."""
    order = np.argsort(source[rows], kind="stable")
    mine = source[rows][order]
    nth = np.arange(len(rows)) - np.searchsorted(mine, mine)
    return np.sort(rows[order[nth < PER_TENSOR]])


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
        axes = work.axes(low)
        key = axes, boxes[low:high].tobytes()
        if key in sound:
            continue
        tiling = moved.tiling(slice(low, high), axes)
        shared: dict[Chunk | None, set[int]] = {}  # the rows that take each region
        for a, b in self_overlaps(tiling, PER_TENSOR):
            shared.setdefault(meet(tiling[a], tiling[b]), set()).update((low + a, low + b))
        if not shared:
            sound.add(key)
        rank = work.rank(int(moved.rank[low]))
        source = work.sources[int(moved.source[low])][0]
        for region, rows in shared.items():
            if region is None:
                continue
            names = ", ".join(dict.fromkeys(f"`{work.head(row).name}`" for row in sorted(rows)))
            where = work.where(int(moved.source[low]), region) if axes else "it"
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
        source, axes = work.sources[int(held.source[row])][0], work.held_axes(row)
        tiling = moved.tiling(by_source[_equal(sources, int(held.source[row]))], axes)
        ranks = held.rank[by_box[_equal(boxes, int(box[row]))]].tolist()
        holders = [work.rank(rank) for rank in ranks]
        for gap in gaps(tiling, held.tiling([row], axes)[0], PER_TENSOR):
            where, who = work.where(int(held.source[row]), gap), span(holders)
            text = f"`{source}` of the state dict: {where} would not be {work.verb} "
            text += f"(held by {who}), though other parts are; "
            text += "a pass must take all of a tensor, or drop it"
            yield Issue("left_out", source, text, holders, (gap.offsets, gap.sizes))
