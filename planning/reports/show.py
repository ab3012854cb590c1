"""What each pass of a planner does to the items of all ranks: `show`.

1. Run the planner pass by pass, as `global_plan` does (`traced`).
2. Put the items before and after a pass into columns (`_Rows`): the box of the state dict that each
   is made of, and its name, dtype and box in the checkpoint.
3. Pair items that are made of the same box, then, since they were cut, those of the same shard
   (`_Matches`). What remains was dropped, left to other ranks, or added.
4. Compare the names, dtypes and shapes of each pair, and sum up (`_changes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns import arrays
from ..columns.arrays import Ints, column, distinct, group_rows, nth_equal, pad
from ..errors import span
from ..passes.base import Passes, Scope, as_steps, ranked, run_pass, scope_of, shown
from ..plans import SavePlan
from ..text import Printed, Sheet, Table, as_names, counted, human_bytes
from .names import few

_NESTING: Final = frozenset(["paths", "empty", "nodes"])  # plans' data that passes keep up to date
_CAPTION: Final = 300  # characters of a pass; a rename of all layers has thousands


@attrs.frozen
class Amount:
    """Some items of the ranks: how many, of how many names, and their bytes in the checkpoint."""

    items: int = 0
    tensors: int = 0
    nbytes: int = 0


@attrs.frozen
class Change:
    """What a pass does to some items; an item may be changed in several ways.

    Kinds are ``renamed``, ``split`` (one name becomes several), ``fused`` (several become one),
    ``cast``, ``reshaped``, ``cut``, ``dropped``, ``left to others`` (ranks that hold the same),
    ``filled`` (padding), ``added`` and ``left alone``.
    """

    kind: str
    before: Amount  # the items that are changed
    after: Amount  # what becomes of them
    names: tuple[str, ...] = attrs.field(converter=as_names)  # of each name, what becomes of it


@attrs.frozen(repr=False)
class StepTrace(Printed):
    """What one pass does."""

    step: str  # the pass, as it prints
    scope: Scope
    ranks: tuple[int, ...]  # the ranks whose plans it ran on
    before: Amount  # all items
    after: Amount
    changes: tuple[Change, ...]  # what it does to them, by kind, and which it leaves alone
    notes: tuple[str, ...] = ()  # the names of data that it adds to plans

    @property
    def table(self) -> Table:
        """What went in, what changed, and what came out."""
        rows = [_row("in", self.before, self.before)]
        rows += [_row(c.kind, c.before, c.after, c.names) for c in self.changes]
        if self.notes:
            rows.append(("notes", "", "", "", few(self.notes)))
        rows.append(_row("out", self.after, self.after))
        where = "all plans at once" if self.scope == "world" else "each plan"
        return Table(
            ("", "items", "tensors", "bytes", "names"), rows, f"{_shortened(self.step)}: {where}"
        )

    @property
    def _sheet(self) -> Sheet:
        return Sheet(span(self.ranks) if self.ranks else "no ranks", [self.table])


@attrs.frozen(repr=False)
class PlannerTrace(Printed):
    """What each pass of a planner does, in order; printed as one table per pass."""

    steps: tuple[StepTrace, ...] = ()

    def __add__(self, other: PlannerTrace) -> PlannerTrace:
        return PlannerTrace(self.steps + other.steps)

    @property
    def tables(self) -> tuple[Table, ...]:
        """One numbered table per pass."""
        return tuple(
            attrs.evolve(step.table, caption=f"{number}. {step.table.caption}, {span(step.ranks)}")
            for number, step in enumerate(self.steps, 1)
        )

    @property
    def _sheet(self) -> Sheet:
        if not self.steps:
            return Sheet("No passes: plans stay as they are")
        first, last = self.steps[0].before, self.steps[-1].after
        ends = (f"{counted(a.items, 'item')}, {human_bytes(a.nbytes)}" for a in (first, last))
        count = "1 pass" if len(self.steps) == 1 else f"{len(self.steps)} passes"
        return Sheet(f"{count}: {' → '.join(ends)}", self.tables)


def show(planner: Passes[SavePlan], plans: Iterable[SavePlan]) -> PlannerTrace:
    """Run a planner pass by pass over the plans of all ranks, and say what each pass does.

    Args:
        planner: A pass, or several.
        plans: One plan per rank, in rank order.

    >>> from shardplan.planning import TensorSpec, cast, drop, local_plan
    >>> plan = local_plan({"a": TensorSpec((4,)), "b": TensorSpec((2,), "int64"), "tmp": 1})
    >>> show([drop("tmp"), cast("bfloat16")], [plan])
    2 passes: 3 items, 32 B → 2 items, 24 B
    1. drop('tmp'): each plan, rank 0
                items  tensors  bytes  names
    in              3        3   32 B
    dropped         1        1    0 B  tmp
    left alone      2        2   32 B  a, b
    out             2        2   32 B
    2. cast('bfloat16'): each plan, rank 0
                items  tensors       bytes  names
    in              2        2        32 B
    cast            1        1  16 B → 8 B  a: float32 → bfloat16
    left alone      1        1        16 B  b
    out             2        2        24 B

    Raises:
        PlanError: A pass refuses the plans; a note says which.
    """
    if isinstance(plans, (SavePlan, Mapping)):
        raise TypeError("show takes one plan per rank; for one rank: show(planner, [plan])")
    return traced(planner, plans)[1]


def traced(
    planner: Passes[SavePlan], plans: Iterable[SavePlan]
) -> tuple[tuple[SavePlan, ...], PlannerTrace]:
    """Run passes in their scopes; return the plans that result, and what each pass did."""
    now = ranked(tuple(plans))
    if not all(isinstance(plan, SavePlan) for plan in now):
        raise TypeError("show takes save plans; plan_diff compares load plans")
    steps, traces = as_steps(planner), []
    for number, step in enumerate(steps, 1):
        try:
            after = run_pass(step, now)
        except Exception as error:
            error.add_note(f"in pass {number} of {len(steps)}: {_shortened(shown(step))}")
            raise
        traces.append(_trace(shown(step), scope_of(step), now, after))
        now = after
    return now, PlannerTrace(tuple(traces))


def _shortened(step: str) -> str:
    """Return the beginning of a pass's text, up to a whole argument."""
    if len(step) <= _CAPTION:
        return step
    start = step[:_CAPTION]
    return f"{start.rpartition(', ')[0] or start}, …)"


def _trace(
    step: str, scope: Scope, before: tuple[SavePlan, ...], after: tuple[SavePlan, ...]
) -> StepTrace:
    old, new = _rows(before, after)
    matches = _matched(old, new)
    added = {key for a, b in zip(before, after, strict=True) for key in _keys(b) - _keys(a)}
    return StepTrace(
        step,
        scope,
        tuple(at if plan.rank is None else plan.rank for at, plan in enumerate(before)),
        old.amount(np.arange(len(old))),
        new.amount(np.arange(len(new))),
        tuple(change for change in _changes(old, new, matches) if change.names),
        tuple(sorted(added - _NESTING)),
    )


def _keys(plan: SavePlan) -> frozenset[str]:
    return frozenset(plan.planner_data) if isinstance(plan.planner_data, Mapping) else frozenset()


@attrs.frozen(eq=False)
class _Rows(arrays.ColumnTable):
    """Items of all ranks, one row each; both sides of a pass number the same tables."""

    names: Sequence[str]  # the tables: names, dtypes (empty for a non-tensor value) and shapes
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    rank: Ints  # the position of the item's plan
    source: Ints  # the numbers of the names in the state dict and in the checkpoint, ...
    name: Ints
    dtype: Ints
    shape: Ints
    fill: Ints  # 1 if the item is padding, 0 if it is made of a box
    shard: Ints  # the start of the shard, in the state dict's frame
    box: Ints  # the box in it: offsets, then sizes; of padding, the chunk
    chunk: Ints  # the box in the checkpoint, and the number of the axes' correspondence
    nbytes: Ints  # bytes in the checkpoint

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def made_of(self) -> Ints:
        """What each item is made of: whose shard in the first columns, then the box in it."""
        return np.column_stack([self.rank, self.source, self.fill, self.shard, self.box])

    def amount(self, rows: Ints) -> Amount:
        """Return how much the given rows are."""
        names = distinct(self.name[rows])
        return Amount(len(rows), len(names), int(self.nbytes[rows].sum()))


def _rows(*sides: Sequence[SavePlan]) -> list[_Rows]:
    """Return the items of all plans of each side, in order; equal catalogs are read once."""
    every = [plan.items for plans in sides for plan in plans]
    width = max((max(i.offsets.shape[1], i.box_offsets.shape[1]) for i in every), default=0)
    texts, dtypes, shapes, axes = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    heads: dict[Any, Ints] = {}
    for catalog in {id(items.catalog): items.catalog for items in every}.values():
        if catalog.content not in heads:
            dtype = [head.properties.dtype if head.properties else "" for head in catalog.heads]
            sources = [head.source for head in catalog.heads]
            sizes = [head.size for head in catalog.heads]
            numbers = texts.of(sources), texts.of(catalog.names), dtypes.of(dtype), shapes.of(sizes)
            heads[catalog.content] = column(numbers, 4, -1).T
    tables = tuple(texts), tuple(dtypes), tuple(shapes)
    done = []
    for plans in sides:
        parts = []
        for rank, items in enumerate(plan.items for plan in plans or [SavePlan([])]):
            chunk = np.hstack([pad(items.offsets, width, 0), pad(items.sizes, width, 1)])
            box = np.hstack([pad(items.box_offsets, width, 0), pad(items.box_sizes, width, 1)])
            turned = np.full(len(items), -1)  # both sides have the same axes
            if items.frame is not None:
                coded = items.frame.axes
                turned = np.array([*axes.of(coded.values), -1])[coded.number]
            head = heads.get(items.catalog.content, np.zeros((0, 4), np.int64))[items.row]
            fill, shard = items.is_fill.astype(np.int64), pad(items.shard_offsets, width, 0)
            boxes = shard, np.where(fill[:, None], chunk, box), np.column_stack([chunk, turned])
            columns = np.full(len(items), rank), *head.T, fill, *boxes, items.nbytes
            parts.append(_Rows(*tables, *columns))
        done.append(_Rows.concat(parts))
    return done


class _Numbers(dict[Any, int]):
    """Values and their numbers, in order of first use."""

    def of(self, values: Iterable[Any]) -> list[int]:
        """Return the numbers of some values."""
        return [self.setdefault(value, len(self)) for value in values]


@attrs.frozen(eq=False)
class _Matches:
    """Items before a pass, and what became of them, by row."""

    before: Ints  # pairs of items; if an item was cut, each part is paired
    after: Ints
    exact: npt.NDArray[np.bool_]  # which pairs are made of the same box; others share a shard
    gone: Ints  # the items before the pass that became nothing
    added: Ints  # the items after the pass that were nothing


def _matched(old: _Rows, new: _Rows) -> _Matches:
    """Pair items made of the same box, then, since they were cut, those of the same shard."""
    a, b = _alike(old.made_of, new.made_of)
    nth = np.column_stack([a, nth_equal(a)]), np.column_stack([b, nth_equal(b)])
    _, before, after = np.intersect1d(*_alike(*nth), assume_unique=True, return_indices=True)
    gone, added = (
        np.setdiff1d(np.arange(len(rows)), paired, assume_unique=True)
        for rows, paired in ((old, before), (new, after))
    )
    shard = 3 + old.shard.shape[1]  # columns that name the shard
    a, b = _alike(old.made_of[gone, :shard], new.made_of[added, :shard])
    into, made = _first_equal(a, b), _first_equal(b, a)
    cut, part = into >= 0, made >= 0
    return _Matches(
        np.concatenate([before, gone[cut], gone[made[part]]]),
        np.concatenate([after, added[into[cut]], added[part]]),
        np.arange(len(before) + cut.sum() + part.sum()) < len(before),
        gone[~cut],
        added[~part],
    )


def _alike(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Number the rows of two tables; equal rows have equal numbers."""
    if a.shape == b.shape and (a == b).all():
        _, number = group_rows([a])
        return number, number
    _, number = group_rows([np.concatenate([a, b])])
    return number[: len(a)], number[len(a) :]


def _first_equal(numbers: Ints, others: Ints) -> Ints:
    """Return, per number, the first place of an equal one among others; -1 if there is none."""
    first = np.full(max(numbers.max(initial=-1), others.max(initial=-1)) + 1, -1)
    first[others[::-1]] = np.arange(len(others))[::-1]
    return first[numbers]


def _changes(old: _Rows, new: _Rows, matches: _Matches) -> Iterator[Change]:
    """Yield what happened to the items, kind by kind."""
    before, after = matches.before, matches.after
    a, b = old.take(before), new.take(after)
    links = np.unique(np.column_stack([a.name, b.name])[_firsts(a.name, b.name)], axis=0)
    ways, parts = (np.bincount(of, minlength=len(old.names)) for of in links.T)
    is_fused = parts[b.name] > 1
    is_split = (ways[a.name] > 1) & ~is_fused
    alone = ~is_fused & ~is_split
    moved = (a.shape != b.shape) | (matches.exact & (a.chunk != b.chunk).any(axis=1))
    kinds = {
        "renamed": alone & (a.name != b.name),
        "split": is_split,
        "fused": is_fused,
        "cast": a.dtype != b.dtype,
        "reshaped": alone & moved,
        "cut": ~matches.exact & ~is_split,
    }
    for kind, which in kinds.items():
        sides = distinct(before[which]), distinct(after[which])
        yield Change(kind, old.amount(sides[0]), new.amount(sides[1]), _lines(kind, a, b, which))
    spared = _is_elsewhere(old, new, matches.gone)
    for kind, rows in (
        ("left to others", matches.gone[spared]),
        ("dropped", matches.gone[~spared]),
    ):
        yield Change(kind, old.amount(rows), Amount(), _names(old, rows))
    is_fill = new.fill[matches.added] == 1
    for kind, rows in (("filled", matches.added[is_fill]), ("added", matches.added[~is_fill])):
        yield Change(kind, Amount(), new.amount(rows), _names(new, rows))
    rest = before[~np.any(list(kinds.values()), axis=0)]
    yield Change("left alone", old.amount(rest), old.amount(rest), _names(old, rest))


def _firsts(*columns: Ints) -> Ints:
    """Return the first of each distinct row, ascending."""
    return np.sort(group_rows(columns)[0])


def _names(rows: _Rows, which: Ints) -> tuple[str, ...]:
    return tuple(sorted(rows.names[name] for name in distinct(rows.name[which]).tolist()))


def _lines(kind: str, a: _Rows, b: _Rows, which: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    """Describe changed items: a line per name, and what became of it."""
    names, dtypes, shapes = a.names, a.dtypes, a.shapes
    rows = np.flatnonzero(which)
    columns = [getattr(side, f)[rows] for f in ("name", "dtype", "shape") for side in (a, b)]
    distinct_rows = np.column_stack(columns)[_firsts(*columns)].tolist()
    lines = set()
    for name, new_name, dtype, new_dtype, shape, new_shape in distinct_rows:
        if kind == "cast":
            lines.add(f"{names[name]}: {dtypes[dtype]} → {dtypes[new_dtype]}")
        elif kind == "reshaped" and shape != new_shape:
            lines.add(f"{names[name]}: {list(shapes[shape])} → {list(shapes[new_shape])}")
        elif kind in ("renamed", "split", "fused"):
            lines.add(f"{names[name]} → {names[new_name]}")
        else:
            lines.add(names[name])
    return tuple(sorted(lines))


def _is_elsewhere(old: _Rows, new: _Rows, gone: Ints) -> npt.NDArray[np.bool_]:
    """Return which boxes that a rank no longer writes are written by others, also in parts."""
    boxes = old.take(gone)
    places, others = (np.column_stack([r.source, r.fill, r.box]) for r in (boxes, new))
    done = _first_equal(*_alike(places, others)) >= 0
    left = np.flatnonzero(~done)
    if not len(left):
        return done
    which = left[_firsts(*places[left].T)]  # a few distinct ones
    made = np.flatnonzero(new.fill == 0)
    order = made[np.argsort(new.source[made], kind="stable")]
    starts = np.searchsorted(new.source[order], [boxes.source[which], boxes.source[which] + 1])
    covered = [
        place
        for place, low, high in zip(places[which], *starts.tolist(), strict=True)
        if _is_covered(place[2:], new.box[order[low:high]])
    ]
    if covered:
        done[left] = _first_equal(*_alike(places[left], np.stack(covered))) >= 0
    return done


def _is_covered(box: Ints, parts: Ints) -> bool:
    """Return True if the parts inside a box, which do not overlap each other, fill it."""
    (low, size), width = np.split(box, 2), len(box) // 2
    starts, sizes = parts[:, :width], parts[:, width:]
    inside = ((starts >= low) & (starts + sizes <= low + size)).all(axis=1)
    return int(np.unique(parts[inside], axis=0)[:, width:].prod(axis=1).sum()) == int(size.prod())


def _row(what: str, before: Amount, after: Amount, names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a line of a table: "3 → 6" if it changed, one number if it did not."""
    pairs = [
        (f"{before.items:,}", f"{after.items:,}"),
        (f"{before.tensors:,}", f"{after.tensors:,}"),
        (human_bytes(before.nbytes), human_bytes(after.nbytes)),
    ]
    if not before.items or not after.items:
        cells = [old if before.items else new for old, new in pairs]
    else:
        cells = [old if old == new else f"{old} → {new}" for old, new in pairs]
    return what, *cells, few(names)
