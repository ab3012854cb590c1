"""Check that each element of the state dict is saved, or filled, exactly once.

A *source* is a tensor or another value of the state dict: its name, and its shape. Passes may
rename its items, cut them, give them to other ranks or drop them all. Over all ranks, every element
of it must be moved, or none of it; and no rank may move an element twice. The steps:

1. Number the sources that ranks hold, and find the source of every item.
2. Ranks whose items are just what they hold of some sources are done. So is everything if no source
   is moved by one rank and left out by another.
3. Otherwise, per rank: every item lies in the shard that it names, and no two share an element.
4. Over all ranks: what no rank moves whole, all of them together do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from .columns.arrays import Ints, distinct, group_rows
from .errors import Issue, region_text, span
from .geometry.overlap import gaps, self_overlaps
from .geometry.tilings import Chunk, pad, tile

if TYPE_CHECKING:
    from .columns.catalog import Catalog, Head
    from .columns.items import WriteItems
    from .plans import SavePlan
    from .records import WriteItem

__all__ = ["dropped_names", "is_untouched", "source_boxes", "source_issues", "with_replicas"]

Source = tuple[str, tuple[int, ...] | None]  # the name and the shape; None for other values
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
_PER_SOURCE: Final = 64  # faults of one kind that are reported of one source


def source_boxes(items: WriteItems) -> tuple[Ints, Ints]:
    """Return which box of its source each item moves: offsets and sizes, in the source's frame."""
    return items.offsets, items.sizes


def is_untouched(plans: Iterable[SavePlan]) -> bool:
    """Return True if no pass has changed what the plans move."""
    return all(plan.items is plan.holds for plan in plans)


def dropped_names(plans: Sequence[SavePlan]) -> tuple[str, ...]:
    """Name what ranks hold and no rank moves, as the state dict does.

    >>> from shardplan.planning import drop, local_plan
    >>> dropped_names(drop("a")((local_plan({"a": 1, "b": 2}),)))
    ('a',)
    """
    if is_untouched(plans):
        return ()
    held, moved = set[Source](), set[Source]()
    index = _Index()
    for plan in plans:
        own, other = index.numbers(plan)
        held.update(index.sources[n] for n in distinct(own[plan.holds.row]).tolist())
        numbers = distinct(other[plan.items.row]).tolist()
        moved.update(index.sources[n] for n in numbers if n >= 0)
    return tuple(sorted({name for name, _ in held - moved}))


def source_issues(
    plans: Sequence[SavePlan], verb: Literal["saved", "filled"] = "saved"
) -> list[Issue]:
    """Report what would be moved in part, twice, or from where nothing is held.

    Args:
        plans: One plan per rank, in rank order; each knows what its rank holds.
        verb: What is done to elements, for the messages.

    Returns:
        The issues, by source; none if each source is moved once, or not at all.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((4,))})
    >>> twice = attrs.evolve(plan, items=[*plan.items, *plan.items])
    >>> print(*source_issues([twice]))
    `w` of the state dict: rows 0 to 4 would be saved 2 times by rank 0, as `w`; ...
    """
    if is_untouched(plans):
        return []
    table = _Table.of(plans)
    if table.is_plain():
        return []
    every = _All.of(table, verb)
    found = [*_unheld(every), *_doubled(every)]
    issues = [issue for _, issue in found]
    return issues + list(_left_out(every, np.array([row for row, _ in found], np.int64)))


def with_replicas(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    """Let each rank move again what it holds and another rank moves for it, as that one does.

    A world pass may give what several ranks hold to one of them. That is for a save; on a load,
    each rank fills all that it holds, from wherever it was saved.

    >>> from shardplan.planning import TensorSpec, dedup_replicas, local_plan
    >>> plans = (local_plan({"w": TensorSpec((4,))}),) * 2
    >>> with_replicas(dedup_replicas()(plans)) == plans
    True
    """
    if is_untouched(plans):
        return plans
    index = _Index()
    takers: dict[int, dict[tuple[Any, ...], WriteItem]] = {}  # per source, its distinct items
    for plan in plans:
        source = index.numbers(plan)[1][plan.items.row].tolist()
        for number, item in zip(source, plan.items, strict=True):
            takers.setdefault(number, {})[item.index, item.tensor_data] = item
    return tuple(_completed(plan, *index.numbers(plan), takers) for plan in plans)


def _completed(
    plan: SavePlan, own: Ints, other: Ints, takers: Mapping[int, Mapping[Any, WriteItem]]
) -> SavePlan:
    """Return the plan of a rank with what others move for it."""
    held, moved = own[plan.holds.row], other[plan.items.row]
    count = int(max(held.max(initial=-1), moved.max(initial=-1))) + 1
    has, takes = (
        np.bincount(source[source >= 0], items.sizes.prod(axis=1)[source >= 0], count)
        for source, items in ((held, plan.holds), (moved, plan.items))
    )
    less = (has > takes) | (np.bincount(moved[moved >= 0], minlength=count) == 0)
    lacks = less[held] & np.isin(held, list(takers))
    if not lacks.any():
        return plan
    items = [plan.items[row] for row in np.flatnonzero(~np.isin(moved, held[lacks])).tolist()]
    for row in np.flatnonzero(lacks).tolist():
        shard = plan.holds[row]
        cuts = (_cut(item, shard) for item in takers[int(held[row])].values())
        items += [cut for cut in cuts if cut is not None]
    return attrs.evolve(plan, items=items)


def _cut(item: WriteItem, shard: WriteItem) -> WriteItem | None:
    """Return what an item moves of a shard that another rank may hold; None if nothing."""
    data, held = item.tensor_data, shard.tensor_data
    if data is None or held is None or not held.chunk.numel:
        return item
    low = tuple(map(max, data.chunk.offsets, held.chunk.offsets))
    high = tuple(map(min, data.chunk.ends, held.chunk.ends))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    chunk = Chunk(low, [b - a for a, b in zip(low, high, strict=True)])
    index = attrs.evolve(item.index, offset=None, index=None)
    return attrs.evolve(
        item, index=index, tensor_data=attrs.evolve(data, chunk=chunk), source=shard.source
    )


class _Index:
    """The sources of all ranks, numbered; catalogs that ranks share are read once."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._numbers: dict[Source, int] = {}
        self._own: dict[int, Ints] = {}
        self._other: dict[tuple[int, int], Ints] = {}
        self._kept: list[Catalog] = []  # identities stay theirs while these live

    def numbers(self, plan: SavePlan) -> tuple[Ints, Ints]:
        """Return the source of each row of the catalogs of what is held, and of the items."""
        held, items = plan.holds.catalog, plan.items.catalog
        own = self._own.get(id(held))
        if own is None:
            own = self._own[id(held)] = self._of_held(held)
            self._kept.append(held)
        both = id(held), id(items)
        if both not in self._other:
            known = dict(zip(_keys(held), own.tolist(), strict=True))
            found = [known.get(key, -1) for key in _keys(items)]
            self._other[both] = np.array(found, np.int64)
            self._kept.append(items)
        return own, self._other[both]

    def _of_held(self, catalog: Catalog) -> Ints:
        found = []
        for _, source, _, properties, size in catalog.heads:
            key = source, None if properties is None else size
            found.append(self._numbers.setdefault(key, len(self._numbers)))
            if found[-1] == len(self.sources):
                self.sources.append(key)
        return np.array(found, np.int64)


def _keys(catalog: Catalog) -> list[tuple[str, bool]]:
    return list(zip(catalog.sources, catalog.is_bytes.tolist(), strict=True))


@attrs.frozen(eq=False)
class _Rows:
    """Boxes of sources, one row a box.

    Attributes:
        rank: Whose it is.
        source: Which source it is of; -1 if the rank holds no such.
        shard: Where the shard starts that it lies in.
        offsets, sizes: The box.
    """

    rank: Ints
    source: Ints
    shard: Ints
    offsets: Ints
    sizes: Ints

    @property
    def volume(self) -> Ints:
        """How many elements each box has."""
        return np.asarray(self.sizes.prod(axis=1))

    @property
    def columns(self) -> tuple[Ints, ...]:
        """All columns."""
        return self.rank, self.source, self.shard, self.offsets, self.sizes

    def take(self, rows: npt.NDArray[Any]) -> _Rows:
        """Return some of the rows."""
        return _Rows(*(column[rows] for column in self.columns))

    @classmethod
    def concat(cls, parts: Sequence[_Rows]) -> _Rows:
        """Return the rows of several, one after the other."""
        every = zip(*(part.columns for part in parts), strict=True)
        return cls(*(np.concatenate(columns) for columns in every))

    def box(self, row: int, axes: int) -> Chunk:
        """Return one box, without the padding."""
        return Chunk(*(side[row, :axes].tolist() for side in (self.offsets, self.sizes)))


def _rows(rank: int, source: Ints, items: WriteItems, axes: int) -> _Rows:
    offsets, sizes = source_boxes(items)
    boxes = ((items.shard_offsets, 0), (offsets, 0), (sizes, 1))
    padded = (pad(column, axes, fill) for column, fill in boxes)
    return _Rows(np.full(len(items), rank, np.int64), source, *padded)


@attrs.frozen(eq=False, slots=False)
class _Table:
    """What all ranks hold, and what they move.

    Attributes:
        sources: The sources that ranks hold.
        plans: One per rank.
        held, moved: Per rank, its boxes, by source, in the order of its items.
        item: Per rank, which item each row of ``moved`` is.
    """

    sources: Sequence[Source]
    plans: Sequence[SavePlan]
    held: Sequence[_Rows]
    moved: Sequence[_Rows]
    item: Sequence[Ints]

    @classmethod
    def of(cls, plans: Sequence[SavePlan]) -> _Table:
        index = _Index()
        axes = max((p.offsets.shape[1] for q in plans for p in (q.holds, q.items)), default=0)
        held, moved, item = [], [], []
        for rank, plan in enumerate(plans):
            own, other = index.numbers(plan)
            rows = _rows(rank, own[plan.holds.row], plan.holds, axes)
            held.append(rows.take(np.argsort(rows.source, kind="stable")))
            rows = _rows(rank, other[plan.items.row], plan.items, axes)
            item.append(np.argsort(rows.source, kind="stable"))
            moved.append(rows.take(item[-1]))
        return cls(index.sources, plans, held, moved, item)

    def is_plain(self) -> bool:
        """Return True if ranks move just what they hold, and all leave out the same sources."""
        count = len(self.sources)
        moved, left_out = np.zeros(count, bool), np.zeros(count, bool)
        for held, items in zip(self.held, self.moved, strict=True):
            if len(items.source) and items.source[0] < 0:
                return False
            mine = np.zeros(count, bool)
            mine[items.source] = True
            rows = held.take(mine[held.source])
            pairs = zip(rows.columns, items.columns, strict=True)
            if not all(np.array_equal(a, b) for a, b in pairs):
                return False
            moved |= mine
            left_out[held.source[~mine[held.source]]] = True
        return not (moved & left_out).any()


@attrs.frozen(eq=False)
class _All:
    """The boxes of all ranks, one after the other.

    Attributes:
        table: What they come from.
        held, moved: The boxes.
        item: Which item of its rank each row of ``moved`` is.
        held_shard, moved_shard: Which shard (of a rank, of a source) each row lies in.
        verb: What is done to elements.
    """

    table: _Table
    held: _Rows
    moved: _Rows
    item: Ints
    held_shard: Ints
    moved_shard: Ints
    verb: str

    @classmethod
    def of(cls, table: _Table, verb: str) -> _All:
        held, moved = _Rows.concat(table.held), _Rows.concat(table.moved)
        both = _Rows.concat([held, moved])
        _, shard = group_rows([both.rank, both.source, both.shard])
        mine, theirs = np.split(shard, [len(held.rank)])
        return cls(table, held, moved, np.concatenate(table.item), mine, theirs, verb)

    def rank(self, rank: int) -> int:
        """Return the number of a rank, given its position."""
        known = self.table.plans[rank].rank
        return rank if known is None else known

    def item_of(self, row: int) -> Head:
        """Return what the catalog says of an item."""
        items = self.table.plans[int(self.moved.rank[row])].items
        head: Head = items.catalog.heads[items.row[self.item[row]]]
        return head


def _unheld(every: _All) -> Iterator[tuple[int, Issue]]:
    """Report items that reach out of the shard of their rank in which they say they lie."""
    held, moved = every.held, every.moved
    first = np.full(int(max(every.held_shard.max(initial=-1), every.moved_shard.max())) + 1, -1)
    first[every.held_shard[::-1]] = np.arange(len(held.rank))[::-1]
    at = first[every.moved_shard]
    inside = (moved.source >= 0) & (at >= 0)
    if len(held.rank):
        ends = held.offsets[at] + held.sizes[at]
        inside &= (moved.offsets >= held.offsets[at]).all(axis=1)
        inside &= (moved.offsets + moved.sizes <= ends).all(axis=1)
    order = np.argsort(every.held_shard, kind="stable")
    shards = every.held_shard[order]
    for row in _few_per_source(moved.source, np.flatnonzero(~inside)).tolist():
        head = every.item_of(row)
        name, source, size = head.name, head.source, head.size
        rank = every.rank(int(moved.rank[row]))
        if moved.source[row] < 0:
            text = f"`{name}` comes from `{source}`, which rank {rank} does not hold"
            yield row, Issue("unheld", source, text, [rank])
            continue
        mine = order[_equal(shards, int(every.moved_shard[row]))]
        boxes = tile(*(side[mine, : len(size)] for side in (held.offsets, held.sizes)))
        for gap in gaps(boxes, moved.box(row, len(size)), 1):
            where = region_text(gap.offsets, gap.sizes, size)
            start = moved.shard[row, : len(size)].tolist()
            text = f"`{source}` of the state dict: `{name}` takes {where} from the shard that "
            text += f"starts at {start}, and rank {rank} does not hold them there"
            yield row, Issue("unheld", source, text, [rank], (gap.offsets, gap.sizes))


def _few_per_source(source: Ints, rows: Ints) -> Ints:
    """Return some rows, of each source so many at most as are reported of one.

    >>> len(_few_per_source(np.array([5] * 100 + [6]), np.arange(101)))
    65
    """
    order = np.argsort(source[rows], kind="stable")
    mine = source[rows][order]
    nth = np.arange(len(rows)) - np.searchsorted(mine, mine)
    return np.sort(rows[order[nth < _PER_SOURCE]])


def _equal(ordered: Ints, value: int) -> slice:
    """Return where a value is in an ascending column."""
    return slice(*np.searchsorted(ordered, [value, value + 1]).tolist())


def _doubled(every: _All) -> Iterator[tuple[int, Issue]]:
    """Report elements that one rank moves twice."""
    moved = every.moved
    new = np.ones(len(moved.rank), bool)
    new[1:] = (np.diff(moved.rank) != 0) | (np.diff(moved.source) != 0)
    edges = [*np.flatnonzero(new).tolist(), len(moved.rank)]
    boxes = np.concatenate([moved.offsets, moved.sizes], axis=1)
    sound: set[tuple[int, bytes]] = set()  # what was looked at: tensors of a model are alike
    for low, high in itertools.pairwise(edges):
        if high - low == 1 or moved.source[low] < 0:
            continue
        size = every.item_of(low).size
        key = len(size), boxes[low:high].tobytes()
        if key in sound:
            continue
        sides = (moved.offsets, moved.sizes)
        tiling = tile(*(side[low:high, : len(size)] for side in sides))
        shared: dict[Box, set[int]] = {}  # the rows that take each region
        for a, b in self_overlaps(tiling, _PER_SOURCE):
            shared.setdefault(_meet(tiling[a], tiling[b]), set()).update((low + a, low + b))
        for region, rows in shared.items():
            yield min(rows), _repeated(every, region, sorted(rows))
        if not shared:
            sound.add(key)


def _meet(a: Chunk, b: Chunk) -> Box:
    low = tuple(map(max, a.offsets, b.offsets))
    return low, tuple(min(x, y) - o for x, y, o in zip(a.ends, b.ends, low, strict=True))


def _repeated(every: _All, region: Box, rows: Sequence[int]) -> Issue:
    """Report a region that one rank moves several times."""
    rank = every.rank(int(every.moved.rank[rows[0]]))
    source, shape = every.table.sources[int(every.moved.source[rows[0]])]
    names = dict.fromkeys(f"`{every.item_of(row).name}`" for row in rows)
    where, times = region_text(*region, shape) if shape else "it", len(rows)
    how, rule = f"saved {times} times by rank {rank}, as", "a pass must take each element once"
    if every.verb == "filled":
        how, rule = f"filled {times} times on rank {rank}, from", "only one of them can be meant"
    text = f"`{source}` of the state dict: {where} would be {how} {', '.join(names)}; {rule}"
    return Issue("doubled", source, text, [rank], region)


def _left_out(every: _All, faulty: Ints) -> Iterator[Issue]:
    """Report boxes of which something is moved by no rank, though other parts of the source are.

    Args:
        every: What ranks hold and move.
        faulty: Rows that were reported already, whose counts of elements say nothing.
    """
    held, moved = every.held, every.moved
    volume = np.zeros(max(every.held_shard.max(initial=-1), every.moved_shard.max()) + 1, np.int64)
    np.add.at(volume, every.moved_shard, moved.volume)
    volume[every.moved_shard[faulty]] = -1
    own = np.zeros_like(volume)
    np.add.at(own, every.held_shard, held.volume)
    whole = (volume == own)[every.held_shard]  # moved by the rank that holds it
    _, box = group_rows([held.source, held.offsets, held.sizes])
    done = np.bincount(box, whole)[box] > 0  # by a rank that holds it
    is_moved = np.zeros(len(every.table.sources), bool)
    is_moved[moved.source[moved.source >= 0]] = True
    first = np.full(len(held.rank), -1)
    first[box[::-1]] = np.arange(len(held.rank))[::-1]
    todo = ~done & is_moved[held.source] & (first[box] == np.arange(len(held.rank)))
    by_source, by_box = (np.argsort(column, kind="stable") for column in (moved.source, box))
    sources, boxes = moved.source[by_source], box[by_box]
    for row in _few_per_source(held.source, np.flatnonzero(todo)).tolist():
        number = int(held.source[row])
        source, shape = every.table.sources[number]
        mine, axes = by_source[_equal(sources, number)], len(shape or ())
        tiling = tile(*(side[mine, :axes] for side in (moved.offsets, moved.sizes)))
        ranks = held.rank[by_box[_equal(boxes, int(box[row]))]].tolist()
        holders = [every.rank(rank) for rank in ranks]
        for gap in gaps(tiling, held.box(row, axes), _PER_SOURCE):
            where, who = region_text(gap.offsets, gap.sizes, shape or ()), span(holders)
            text = (
                f"`{source}` of the state dict: {where} would not be {every.verb} (held by {who}), "
            )
            text += "though other parts are; a pass must take all of a tensor, or drop it"
            yield Issue("left_out", source, text, holders, (gap.offsets, gap.sizes))
