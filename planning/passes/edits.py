"""How a pass that changes shapes runs: names are matched, what does not fit is refused, items move.

A pass is one function per pattern, from a row of a catalog to what becomes of it. All tensors of
all ranks are looked at before any moves, so that one error lists all that does not fit. Ranks share
catalogs by identity, before and after: each is edited once.

In a pattern of names, ``*`` stands for any characters, as few as possible, and ``#`` for a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import attrs
import numpy as np

from ..columns.arrays import Ints, column, pad, padded, readonly, spread
from ..columns.frames import SourceFrame
from ..columns.items import Catalog, Head, WriteItems
from ..errors import Issue, PlanError, listed
from ..plans import SavePlan
from .cases import CaseError, Cases, Results, move_cases
from .keys import Plans, catalogs_of, refuse_unmatched, renest
from .moves import Move, Moved


class NameMatch(NamedTuple):
    """What the wildcards of a pattern matched."""

    stars: tuple[str, ...]
    numbers: tuple[int, ...]


@lru_cache(maxsize=1 << 10)
def _expression(pattern: str) -> re.Pattern[str]:
    wild = {"*": "(.*?)", "#": "(0|[1-9][0-9]*)"}
    parts = re.split("([*#])", pattern)
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts), re.DOTALL)


def matched(pattern: str, name: str) -> NameMatch | None:
    """Return what the wildcards of a pattern match in a name; None if it does not match.

    >>> matched("*.experts.#.w", "layers.0.experts.12.w")
    NameMatch(stars=('layers.0',), numbers=(12,))
    """
    found = _expression(pattern).fullmatch(name)
    if found is None:
        return None
    pairs = list(zip(re.findall("[*#]", pattern), found.groups(), strict=True))
    stars = tuple(text for kind, text in pairs if kind == "*")
    return NameMatch(stars, tuple(int(text) for kind, text in pairs if kind == "#"))


def applied(pattern: str, match: NameMatch) -> str:
    """Return a pattern with what was matched in place of its wildcards.

    >>> applied("*.w.#", NameMatch(("layers.0",), (12,)))
    'layers.0.w.12'
    """
    wild = {"*": iter(match.stars), "#": map(str, match.numbers)}
    parts = re.split("([*#])", pattern)
    return "".join(next(wild[part]) if part in wild else part for part in parts)


def with_number(match: NameMatch, number: int) -> NameMatch:
    """Return a match with one more number."""
    return match._replace(numbers=(*match.numbers, number))


def check_names(what: str, before: Sequence[Any], after: Sequence[Any], more: int = 0) -> None:
    """Refuse patterns whose wildcards do not carry over; ``more`` numbers are added."""
    names = [*before, *after]
    strange = [name for name in names if not isinstance(name, str)]
    if strange:
        raise TypeError(f"{what} takes names as strings, not {strange[0]!r}")
    for some in (before, after):
        if not some or len(set(some)) < len(some):
            raise ValueError(f"{what} needs several names that differ, not {listed(some)}")
    stars = {name.count("*") for name in names}
    marks = {name.count("#") + more for name in before} | {name.count("#") for name in after}
    if len(stars) > 1 or len(marks) > 1:
        need = {0: "as many # each", -1: "one # more first", 1: "one # more last"}[more]
        text = f"{what}: what the wildcards of {listed(before)} match goes to {listed(after)}"
        raise ValueError(f"{text}; they need as many * each, and {need}")


Edit = Callable[[Head, NameMatch], Moved]


class Misfit(ValueError):
    """A tensor that a pass cannot change."""


def run_edits(
    what: str,
    edits: Mapping[str, Edit],
    required: bool,
    plans: Plans,
    *,
    joins: bool = False,
    everywhere: bool = False,
) -> Plans:
    """Run a pass that makes an edit of every tensor whose name matches a pattern.

    Args:
        what: The name of the pass.
        edits: By pattern, what becomes of a tensor. It may raise `Misfit`.
        required: Whether it is an error if a pattern matches no tensor.
        plans: The plans.
        joins: Whether several tensors become one.
        everywhere: Whether it suffices that a pattern matches on some rank.
    """
    catalogs = catalogs_of(plans)
    if required:
        known = {
            at: {head.name for head in c.heads if head.properties is not None}
            for at, c in catalogs.items()
        }
        if everywhere:
            known = dict.fromkeys(known, set[str]().union(*known.values()))
        refuse_unmatched(what, known, plans, {p: partial(matched, p) for p in edits})
    fates = {at: _fates(catalog.heads, edits, what) for at, catalog in catalogs.items()}
    issues = [issue for one in fates.values() for issue in one.issues]
    issues += _collisions(what, fates.values(), joins)
    if issues:
        raise PlanError(dict.fromkeys(issues))
    return _apply(plans, {at: one.moved for at, one in fates.items()})


class _Fates(NamedTuple):
    """What becomes of the rows of a catalog, and why some cannot be changed."""

    heads: Sequence[Head]
    moved: Sequence[Moved | None]
    issues: Sequence[Issue]


def _fates(heads: Sequence[Head], edits: Mapping[str, Edit], what: str) -> _Fates:
    """Edit every row whose name matches a pattern."""
    moved: list[Moved | None] = [None] * len(heads)
    issues = []
    for row, head in enumerate(heads):
        if head.properties is None:
            continue
        found = [(p, match) for p in edits if (match := matched(p, head.name)) is not None]
        if len(found) > 1:
            text = f"{what}: `{head.name}` matches {listed([p for p, _ in found])}, "
            text += "and each element is used once; make the patterns differ"
            issues.append(Issue("doubled", head.name, text))
        for pattern, match in found if len(found) == 1 else ():
            try:
                moved[row] = edits[pattern](head, match)
            except Misfit as error:
                issues.append(Issue("shape", head.name, f"{what}: {error}"))
    return _Fates(heads, moved, issues)


def _collisions(what: str, fates: Iterable[_Fates], joins: bool) -> Iterator[Issue]:
    """Report names that stand for several tensors, and parts of one tensor that do not fit."""
    made: dict[str, dict[str, Head]] = {}  # by new name, the new row of each old name
    for one in fates:
        stay = {head.name for head, new in zip(one.heads, one.moved, strict=True) if new is None}
        owners: dict[str, dict[str, None]] = {}
        for head, new in zip(one.heads, one.moved, strict=True):
            for after in () if new is None else new.heads(head):
                owners.setdefault(after.name, {})[head.name] = None
                made.setdefault(after.name, {})[head.name] = after
        for name, olds in owners.items():
            if name in stay or (len(olds) > 1 and not joins):
                others = [*olds, *([name] if name in stay else [])]
                text = f"{what} gives {listed(others)} one name: `{name}`"
                yield Issue("conflict", name, f"{text}; rename or drop one")
    for name, parts in made.items():
        kinds = {(head.size, head.properties and head.properties.dtype) for head in parts.values()}
        if len(kinds) > 1:
            each = [f"`{old}` makes it {_kind(head)}" for old, head in parts.items()]
            text = f"{what}: the parts of `{name}` do not fit: {listed(each, quote='')}"
            yield Issue("conflict", name, f"{text}; cast or reshape them to fit")


def _kind(head: Head) -> str:
    dtype = "" if head.properties is None else head.properties.dtype
    return f"{dtype} of shape {list(head.size)}"


def _apply(plans: Plans, moved: Mapping[int, Sequence[Moved | None]]) -> Plans:
    """Move the items of some plans, given what becomes of the rows of each distinct catalog."""
    moves: dict[Move, int] = {}
    edited = {
        at: _Edited.of(catalog, moved[at], moves)
        for at, catalog in catalogs_of(plans).items()
        if any(one is not None for one in moved[at])
    }
    touched = [plan for plan in plans if id(plan.items.catalog) in edited]
    if not touched:
        return plans
    done = iter(_follow(touched, [edited[id(p.items.catalog)] for p in touched], list(moves)))
    return tuple(next(done) if id(p.items.catalog) in edited else p for p in plans)


@attrs.frozen(eq=False)
class _Edited:
    """A catalog after an edit."""

    catalog: Catalog  # the new catalog
    move: Ints  # the number of the move of each old row; if it stays, -1 minus its number of axes
    first: Ints  # the position in ``rows`` of the first target of each old row
    rows: Ints  # the new rows of all targets
    shift: Ints  # how much further the elements of each target go
    names: dict[str, None]  # None for each name that no longer exists

    @classmethod
    def of(cls, catalog: Catalog, moved: Sequence[Moved | None], moves: dict[Move, int]) -> _Edited:
        """Edit a catalog; moves that are not yet in ``moves`` are numbered on."""
        heads: dict[Head, int] = {}
        move, first, rows, shift = [], [], list[int](), list[tuple[int, ...]]()
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
        item, nth = spread(count[case])
        return cls(item, rows[first[case[item]] + nth])


def _assembled(
    plans: Sequence[SavePlan], edited: Sequence[_Edited], case: Ints, results: Results
) -> list[SavePlan]:
    """Give each plan what became of its items."""
    edge = np.cumsum([0, *(len(plan.items) for plan in plans)])
    kept = _Expanded.of(results, np.flatnonzero(results.target >= 0), case)
    lost = results.target < 0
    left_out = _Expanded.of(results, np.flatnonzero(lost & ~results.frame.fill.known), case)
    low, high = (np.searchsorted(some.item, edge).tolist() for some in (kept, left_out))
    plain = results.plain
    datas: dict[tuple[int, int], Any] = {}  # ranks share their data, by identity
    held_rows: dict[tuple[int, int], Ints] = {}  # likewise
    done = []
    for number, (plan, edit) in enumerate(zip(plans, edited, strict=True)):
        rows = slice(low[number], low[number + 1])
        mine, at = kept.item[rows] - edge[number], kept.at[rows]
        items = _items(plan.items, edit, mine, results, at, bool(plain[at].all()))
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
            rest = _left_out(plan, mine, results.frame, at, held_rows[held])
        done.append(
            attrs.evolve(plan, items=items, planner_data=datas[key], held=plan.holds, left_out=rest)
        )
    return done


def _items(
    before: WriteItems, edit: _Edited, item: Ints, results: Results, at: Ints, is_plain: bool
) -> WriteItems:
    """Return the items of one plan, given the old item and the result of each."""
    catalog, wide = edit.catalog, edit.catalog.axes
    target = edit.first[before.row[item]] + results.target[at]
    row, shift = edit.rows[target], pad(edit.shift, wide, 0)[target] if edit.shift.any() else None
    offsets = pad(results.offsets[at], wide, 0)[:, :wide]
    sizes = pad(results.sizes[at], wide, 1)[:, :wide]
    frame = None if is_plain and shift is None else results.frame.take(at)
    if shift is not None:
        offsets = offsets + shift
        plain = frame is not None and frame.is_plain(catalog.ndim[row], offsets, sizes)
        frame = None if plain else frame
    starts = offsets if frame is None else frame.offsets
    shard = pad(before.shard_offsets, starts.shape[1], 0)[item, : starts.shape[1]]
    if frame is not None and frame.fill.values:
        shard[frame.fill.known] = 0
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


def _left_out(plan: SavePlan, item: Ints, frame: SourceFrame, at: Ints, rows: Ints) -> WriteItems:
    """Return all boxes that a plan leaves out, in the frame of what its rank holds."""
    held, before = plan.holds.catalog, plan.items
    boxes = [(frame.offsets[at], 0), (frame.sizes[at], 1), (before.shard_offsets[item], 0)]
    offsets, sizes, shard = (
        readonly(pad(c, held.axes, value)[:, : held.axes]) for c, value in boxes
    )
    items = WriteItems(held, readonly(rows[before.row[item]]), offsets, sizes, shard)
    return WriteItems.concat([items] if plan.left_out is None else [plan.left_out, items])
