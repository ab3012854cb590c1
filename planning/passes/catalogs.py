"""Catalogs whose tensors move: each is edited once, and items follow.

Ranks share catalogs by identity, before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ..columns.arrays import Ints, column, padded, readonly
from ..columns.frames import SourceFrame
from ..columns.items import Catalog, Head, WriteItems
from ..errors import Issue, PlanError
from ..geometry.tilings import pad
from ..plans import SavePlan
from .cases import CaseError, Cases, Results, move_cases
from .keys import catalogs_of, renest
from .moves import Move, Moved

Sizes = tuple[int, ...]


def apply_moves(
    plans: tuple[SavePlan, ...], moved: Mapping[int, Sequence[Moved | None]]
) -> tuple[SavePlan, ...]:
    """Move the items of some plans.

    Args:
        plans: The plans.
        moved: By the identity of each distinct catalog, what becomes of its rows; None for those
            that stay.
    """
    moves: dict[Move, int] = {}
    edited = {
        at: _Edited.of(catalog, moved[at], moves)
        for at, catalog in catalogs_of(plans).items()
        if any(one is not None for one in moved[at])
    }
    at = [number for number, plan in enumerate(plans) if id(plan.items.catalog) in edited]
    done = list(plans)
    if at:
        touched = [plans[number] for number in at]
        after = _follow(touched, [edited[id(p.items.catalog)] for p in touched], list(moves))
        for number, plan in zip(at, after, strict=True):
            done[number] = plan
    return tuple(done)


@attrs.frozen(eq=False)
class _Edited:
    """A catalog after an edit.

    Attributes:
        catalog: The new catalog.
        move: The number of the move of each old row; if it stays, -1 minus its number of axes.
        first: The position in ``rows`` of the first target of each old row.
        rows: The new rows of all targets.
        shift: How much further the elements of each target go.
        names: None for each name that no longer exists.
    """

    catalog: Catalog
    move: Ints
    first: Ints
    rows: Ints
    shift: Ints
    names: dict[str, None]

    @classmethod
    def of(cls, catalog: Catalog, moved: Sequence[Moved | None], moves: dict[Move, int]) -> _Edited:
        """Edit a catalog; moves that are not yet in ``moves`` are numbered on."""
        heads: dict[Head, int] = {}
        move, first, rows, shift = [], [], list[int](), list[Sizes]()
        for head, one in zip(catalog.heads, moved, strict=True):
            stays = -1 - len(head.size)
            move.append(stays if one is None else moves.setdefault(one.move, len(moves)))
            first.append(len(rows))
            after = [head] if one is None else one.heads(head)
            rows += [heads.setdefault(target, len(heads)) for target in after]
            shift += [() if one is None else one.shift] * len(after)
        gone = set(catalog.names) - {head.name for head in heads}
        names = dict.fromkeys(sorted(gone))
        columns = (column(move), column(first), column(rows), padded(shift, 0))
        return cls(Catalog.of(heads), *columns, names)


def _follow(
    plans: Sequence[SavePlan], edited: Sequence[_Edited], moves: Sequence[Move]
) -> list[SavePlan]:
    """Return the plans after their tensors moved."""
    every = [plan.items for plan in plans]
    pairs = zip(every, edited, strict=True)
    move = np.concatenate([edit.move[items.row] for items, edit in pairs])
    cases, which = Cases.of(every, move, moves)
    try:
        results = move_cases(cases, moves)
    except CaseError as error:
        name = _name(plans, error.item)
        text = f"`{name}` cannot change shape as its shards lie: {error}"
        issue = Issue("shape", name, f"{text}; shard it along another axis")
        raise PlanError([issue]) from error
    return _assembled(plans, edited, which, results)


def _name(plans: Sequence[SavePlan], item: int) -> str:
    """Return the name of an item, given its number among those of all plans."""
    for plan in plans:
        if item < len(plan.items):
            return plan.items.catalog.names[int(plan.items.row[item])]
        item -= len(plan.items)
    raise IndexError(item)


@attrs.frozen(eq=False)
class _Expanded:
    """Results for items, in order of plans."""

    item: Ints  # the item, among all items in order of plans
    at: Ints  # its result

    @classmethod
    def of(cls, results: Results, rows: Ints, case: Ints) -> _Expanded:
        """Repeat some results, in order of cases, for each item of their case."""
        which = results.case[rows]
        first = np.searchsorted(which, np.arange(int(case.max(initial=-1)) + 2))
        count = np.diff(first)
        if (count == 1).all():
            return cls(np.arange(len(case)), rows[case])
        each = count[case]
        item = np.repeat(np.arange(len(case)), each)
        nth = np.arange(len(item)) - np.repeat(np.cumsum(each) - each, each)
        return cls(item, rows[first[case[item]] + nth])


def _assembled(
    plans: Sequence[SavePlan], edited: Sequence[_Edited], case: Ints, results: Results
) -> list[SavePlan]:
    """Give each plan what became of its items."""
    edge = np.cumsum([0, *(len(plan.items) for plan in plans)])
    kept = _Expanded.of(results, np.flatnonzero(results.target >= 0), case)
    lost = results.target < 0
    left_out = _Expanded.of(results, np.flatnonzero(lost & ~results.fill.known), case)
    low, high = (np.searchsorted(some.item, edge).tolist() for some in (kept, left_out))
    plain = results.plain
    datas: dict[tuple[int, int], Any] = {}  # ranks share their data, by identity
    held_rows: dict[tuple[int, int], Ints] = {}  # likewise
    done = []
    for number, (plan, edit) in enumerate(zip(plans, edited, strict=True)):
        rows = slice(low[number], low[number + 1])
        mine, at = kept.item[rows] - edge[number], kept.at[rows]
        items = _items(plan.items, edit, mine, results.take(at), bool(plain[at].all()))
        key = id(edit), id(plan.planner_data)
        if key not in datas:
            datas[key] = renest(plan.planner_data, edit.names)
        rows = slice(high[number], high[number + 1])
        rest = plan.left_out
        if rows.start < rows.stop:
            mine, at = left_out.item[rows] - edge[number], left_out.at[rows]
            held = id(plan.holds.catalog), id(plan.items.catalog)
            if held not in held_rows:
                held_rows[held] = _held_rows(plan)
            rest = _left_out(plan, mine, results.take(at), held_rows[held])
        done.append(
            attrs.evolve(plan, items=items, planner_data=datas[key], held=plan.holds, left_out=rest)
        )
    return done


def _items(
    before: WriteItems, edit: _Edited, item: Ints, results: Results, is_plain: bool
) -> WriteItems:
    """Return the items of one plan, given the old item of each."""
    catalog, wide = edit.catalog, edit.catalog.axes
    at = edit.first[before.row[item]] + results.target
    row, shift = edit.rows[at], pad(edit.shift, wide, 0)[at] if edit.shift.any() else None
    offsets = pad(results.offsets, wide, 0)[:, :wide]
    sizes = pad(results.sizes, wide, 1)[:, :wide]
    frame = None
    if shift is not None or not is_plain:
        frame = SourceFrame(
            readonly(results.box_ndim),
            readonly(results.box_offsets),
            readonly(results.box_sizes),
            results.axes,
            results.fill,
        )
    if shift is not None:
        offsets = offsets + shift
        plain = frame is not None and frame.is_plain(catalog.ndim[row], offsets, sizes)
        frame = None if plain else frame
    starts = offsets if frame is None else frame.offsets
    shard = pad(before.shard_offsets, starts.shape[1], 0)[item, : starts.shape[1]]
    if results.fill.values:
        shard[results.fill.known] = 0
    return WriteItems(
        catalog,
        readonly(row),
        readonly(offsets),
        readonly(sizes),
        None if np.array_equal(shard, starts) else readonly(shard),
        frame=frame,
    )


def _held_rows(plan: SavePlan) -> Ints:
    """Return the row of what the rank holds for each row of the catalog of the items."""
    row_of = {source: row for row, source in enumerate(plan.holds.catalog.sources)}
    return column([row_of.get(source, -1) for source in plan.items.catalog.sources])


def _left_out(plan: SavePlan, item: Ints, lost: Results, rows: Ints) -> WriteItems:
    """Return all boxes that a plan leaves out, in the frame of what its rank holds."""
    held, before = plan.holds.catalog, plan.items
    boxes = [(lost.box_offsets, 0), (lost.box_sizes, 1), (before.shard_offsets[item], 0)]
    offsets, sizes, shard = (
        readonly(pad(c, held.axes, value)[:, : held.axes]) for c, value in boxes
    )
    items = WriteItems(held, readonly(rows[before.row[item]]), offsets, sizes, shard)
    return WriteItems.concat([items] if plan.left_out is None else [plan.left_out, items])
