"""How a pass that changes shapes runs: names are matched, and what does not fit is refused.

A pass is one function per pattern, from a row of a catalog to what becomes of it. All tensors of
all ranks are looked at before any moves, so that one error lists all that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..columns.items import Head
from ..errors import Issue, PlanError, listed
from ..plans import SavePlan
from .catalogs import apply_moves
from .keys import catalogs_of, refuse_unmatched
from .moves import Moved
from .patterns import Match, matched

Plans = tuple[SavePlan, ...]
Edit = Callable[[Head, Match], Moved]


class Misfit(ValueError):
    """A tensor that a pass cannot change."""


def run_edits(
    what: str,
    plans: Plans,
    edits: Mapping[str, Edit],
    required: bool,
    *,
    joins: bool = False,
    everywhere: bool = False,
) -> Plans:
    """Run a pass that makes an edit of every tensor whose name matches a pattern.

    Args:
        what: The name of the pass.
        plans: The plans.
        edits: By pattern, what becomes of a tensor. It may raise `Misfit`.
        required: Whether it is an error if a pattern matches no tensor.
        joins: Whether several tensors become one.
        everywhere: Whether it suffices that a pattern matches on some rank.
    """
    catalogs = catalogs_of(plans)
    known = {
        at: {head.name for head in c.heads if head.properties is not None}
        for at, c in catalogs.items()
    }
    if required:
        union = set[str]().union(*known.values())
        places = dict.fromkeys(known, union) if everywhere else known
        tests = {pattern: partial(matched, pattern) for pattern in edits}
        refuse_unmatched(what, places, plans, tests)
    edited = {at: _Edited.of(catalog.heads, edits, what) for at, catalog in catalogs.items()}
    issues = [issue for one in edited.values() for issue in one.issues]
    issues += _collisions(what, edited.values(), joins)
    if issues:
        raise PlanError(dict.fromkeys(issues))
    return apply_moves(plans, {at: one.moved for at, one in edited.items()})


class _Edited(NamedTuple):
    """What becomes of the rows of a catalog, and why some cannot be changed."""

    heads: Sequence[Head]
    moved: Sequence[Moved | None]
    issues: Sequence[Issue]

    @classmethod
    def of(cls, heads: Sequence[Head], edits: Mapping[str, Edit], what: str) -> _Edited:
        """Edit every row whose name matches a pattern."""
        moved: list[Moved | None] = []
        issues = []
        for head in heads:
            moved.append(None)
            if head.properties is None:
                continue
            found = [(p, match) for p in edits if (match := matched(p, head.name)) is not None]
            if len(found) > 1:
                text = f"{what}: `{head.name}` matches {listed([p for p, _ in found])}, "
                text += "and each element is used once; make the patterns differ"
                issues.append(Issue("doubled", head.name, text))
            elif found:
                try:
                    moved[-1] = edits[found[0][0]](head, found[0][1])
                except Misfit as error:
                    issues.append(Issue("shape", head.name, f"{what}: {error}"))
        return cls(heads, moved, issues)


def _collisions(what: str, edited: Iterable[_Edited], joins: bool) -> Iterator[Issue]:
    """Report names that stand for several tensors, and parts of one tensor that do not fit."""
    made: dict[str, dict[str, Head]] = {}  # by new name, the new row of each old name
    for one in edited:
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
