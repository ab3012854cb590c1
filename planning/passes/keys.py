"""Passes that rewrite names and dtypes: rename, select, drop, cast.

They look at each catalog once, however many ranks share it, so their cost is that of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, readonly
from ..columns.catalog import Catalog, Head
from ..dtypes import Dtype, dtype_name, family, is_exact_cast
from ..errors import Issue, PlanError, listed, nearest_hint, nearest_names, span
from ..frozen import FrozenDict
from ..plans import SavePlan
from ..tree import empty_names
from .base import Step

__all__ = ["cast", "drop", "rename", "select"]

Renaming = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]]
Test = Callable[[str], bool]
Tests = Mapping[str, Test]  # by what a message calls them
Pattern = str | Test
# What becomes of one row of a catalog: another head, or None where its items are left out.
Edit = Callable[[Head], Head | None]


def rename(how: Renaming, *, required: bool = True) -> Step[SavePlan]:
    r"""Change names in the checkpoint; the names in the state dict stay as they are.

    Args:
        how: A function from old to new name; or a mapping of whole names; or pairs of a regular
            expression and its replacement, all applied to every name, in order.
        required: Whether a name of the mapping, or an expression, that matches nothing is an error.
            Pass False where ranks hold different keys, as pipeline stages do.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"_orig_mod.w": TensorSpec((2,))})
    >>> item = rename(lambda key: key.removeprefix("_orig_mod."))((plan,))[0].items[0]
    >>> item.index.fqn, item.source.fqn
    ('w', '_orig_mod.w')
    >>> rename([(r"^_orig_mod\.(.*)", r"module.\1")])((plan,))[0].items[0].index.fqn
    'module.w'

    Raises:
        PlanError: When run, if two names become one, or (see ``required``) nothing matches.
    """
    _check_renaming(how)
    run = partial(_rename, how, required)
    return Step(rename, (how,), {"required": required}, "rank", run)


def _check_renaming(how: object) -> None:
    """Refuse what is not a renaming, before it is used."""
    if callable(how) or isinstance(how, Mapping):
        return
    pairs = list(how) if isinstance(how, Sequence) and not isinstance(how, str) else [how]
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                "rename takes a function, a mapping of whole names, or pairs of regular expression "
                f"and replacement: [(r'^old\\.', 'new.')]; not {how!r}"
            )
        try:
            re.compile(pair[0])
        except re.error as error:
            text = f"rename: {pair[0]!r} is not a regular expression: {error}"
            raise ValueError(f"{text}; re.escape makes one of plain text") from None


def _rename(how: Renaming, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    if required and not callable(how):
        _demand_renames(how, plans)
    new = {name: _renamed(how, name) for name in sorted(_known(plans))}
    for old, name in new.items():
        if not isinstance(name, str):
            raise TypeError(f"rename: `{old}` must become a string, not {name!r}")
    for use in _uses(plans):
        _refuse_collisions({old: new[old] for old in use.names})
    return _edit(plans, lambda head: head._replace(name=new[head.name]))


def select(*patterns: Pattern, required: bool = True) -> Step[SavePlan]:
    """Keep only the items whose name matches one of the patterns.

    Args:
        *patterns: Shell-style patterns (``"model.*"``) or functions from name to bool.
        required: Whether a pattern that matches nothing is an error.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"model": {"w": 1, "b": 2}, "step": 3})
    >>> [item.index.fqn for item in select("model.*")((plan,))[0].items]
    ['model.b', 'model.w']
    """
    run = partial(_select, _tests("select", patterns), required)
    return Step(select, patterns, {"required": required}, "rank", run)


def _select(tests: Tests, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    if required:
        _demand("select", plans, tests)
    return _edit(plans, lambda head: head if _matches(head, tests) else None)


def drop(*patterns: Pattern, required: bool = True) -> Step[SavePlan]:
    """Leave out the items whose name matches one of the patterns; see `select`.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"model": {"w": 1, "b": 2}, "step": 3})
    >>> [item.index.fqn for item in drop("*.b", "step")((plan,))[0].items]
    ['model.w']
    """
    run = partial(_drop, _tests("drop", patterns), required)
    return Step(drop, patterns, {"required": required}, "rank", run)


def _drop(tests: Tests, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    if required:
        _demand("drop", plans, tests)
    return _edit(plans, lambda head: None if _matches(head, tests) else head)


def cast(
    dtype: Dtype | Mapping[str, Dtype], *, lossy: bool = False, required: bool = True
) -> Step[SavePlan]:
    """Store tensors in another dtype; loads through the same pass cast back.

    Naming a narrower float asks for its rounding. Any other loss (whole numbers that the new dtype
    cannot tell apart, a float made whole, a complex number made real) must be asked for.

    Args:
        dtype: A dtype (``"bfloat16"`` or ``torch.bfloat16``), for every tensor of its own kind
            (floats stay floats, complex numbers complex, whole numbers whole); or dtypes by name
            pattern, for every tensor that matches, the first match counting.
        lossy: Whether to allow those other losses.
        required: Whether a pattern that matches no tensor is an error.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((2,)), "ids": TensorSpec((2,), "int64")})
    >>> [i.tensor_data.properties.dtype for i in cast("bfloat16")((plan,))[0].items]
    ['int64', 'bfloat16']

    Raises:
        PlanError: When run, if a cast would lose what nobody asked to lose; every key is named.
    """
    by_pattern = isinstance(dtype, Mapping)
    wanted = dict(dtype) if isinstance(dtype, Mapping) else {"*": dtype}
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise TypeError(f"cast takes dtypes by pattern of names, not by {pattern!r}")
    table = {pattern: dtype_name(one) for pattern, one in wanted.items()}
    run = partial(_cast, table, by_pattern, lossy, required)
    named = table if by_pattern else table["*"]
    return Step(cast, (named,), {"lossy": lossy, "required": required}, "rank", run)


def _cast(
    table: Mapping[str, str],
    by_pattern: bool,
    lossy: bool,
    required: bool,
    plans: tuple[SavePlan, ...],
) -> tuple[SavePlan, ...]:
    def target(head: Head) -> str | None:
        if head.properties is None:
            return None
        wanted = next((d for p, d in table.items() if fnmatchcase(head.name, p)), None)
        same_kind = wanted is not None and _kind(wanted) == _kind(head.properties.dtype)
        return wanted if by_pattern or same_kind else None

    heads = list(dict.fromkeys(head for use in _uses(plans) for head in use.heads))
    if required and by_pattern:
        values = {head.name for head in heads if head.properties is None}
        _demand("cast", plans, {p: _globs(p) for p in table}, values)
    if not lossy:
        _refuse_losses([(head, wanted) for head in heads if (wanted := target(head))])

    def edit(head: Head) -> Head:
        wanted, properties = target(head), head.properties
        if wanted is None or properties is None:
            return head
        return head._replace(properties=attrs.evolve(properties, dtype=wanted))

    return _edit(plans, edit)


def _kind(dtype: str) -> str:
    """Return the kind of number a dtype has; only floats are rounded into each other unasked."""
    return {"uint": "int", "float8fnuz": "float"}.get(family(dtype), family(dtype))


def _tests(what: str, patterns: Sequence[Pattern]) -> Tests:
    for p in patterns:
        if not isinstance(p, str) and not callable(p):
            raise TypeError(f"{what} takes patterns (strings) or functions, not {p!r}")
    return {p if isinstance(p, str) else repr(p): _globs(p) for p in patterns}


def _matches(head: Head, tests: Tests) -> bool:
    return any(test(head.name) for test in tests.values())


def _globs(pattern: Pattern) -> Test:
    return pattern if callable(pattern) else partial(fnmatchcase, pat=pattern)


def _searches(pattern: str) -> Test:
    return lambda name: re.search(pattern, name) is not None


def _same(key: str) -> Test:
    return lambda name: name == key


def _renamed(how: Renaming, name: str) -> str:
    if callable(how):
        return how(name)
    if isinstance(how, Mapping):
        return how.get(name, name)
    for pattern, replacement in how:
        name = re.sub(pattern, replacement, name)
    return name


@attrs.frozen(eq=False)
class _Use:
    """Plans that use the same rows of one catalog: what is done to one is done to all.

    Attributes:
        catalog: Their catalog.
        mask: Which of its rows they have items of.
        ranks: Their positions.
    """

    catalog: Catalog
    mask: npt.NDArray[np.bool_]
    ranks: list[int] = attrs.field(factory=list)

    @property
    def heads(self) -> list[Head]:
        """The rows that they have items of."""
        return [self.catalog.heads[row] for row in np.flatnonzero(self.mask).tolist()]

    @property
    def names(self) -> set[str]:
        """The names that they have items of."""
        return {self.catalog.names[row] for row in np.flatnonzero(self.mask).tolist()}


def _uses(plans: Sequence[SavePlan]) -> list[_Use]:
    """Group plans by their catalog, by identity, and by which of its rows they use."""
    uses: dict[tuple[int, bytes], _Use] = {}
    for position, plan in enumerate(plans):
        catalog = plan.items.catalog
        mask = np.zeros(len(catalog), bool)
        mask[plan.items.row] = True
        uses.setdefault((id(catalog), mask.tobytes()), _Use(catalog, mask)).ranks.append(position)
    return list(uses.values())


def _known(plans: Sequence[SavePlan]) -> set[str]:
    """Name all that ranks know of, also tensors of which they hold an empty part."""
    return {name for names in _known_by(plans).values() for name in names}


def _known_by(plans: Sequence[SavePlan]) -> dict[int, tuple[str, ...]]:
    """Return the names of each catalog, by its identity."""
    return {id(plan.items.catalog): plan.items.catalog.names for plan in plans}


def _demand(
    what: str, plans: Sequence[SavePlan], tests: Tests, without: Set[str] = frozenset()
) -> None:
    """Refuse patterns that match none of a rank's names, all of them together."""
    known = {at: set(names) - without for at, names in _known_by(plans).items()}
    _refuse_unmatched(what, known, plans, tests)


def _refuse_unmatched(
    what: str, known: Mapping[int, set[str]], plans: Sequence[SavePlan], tests: Tests
) -> None:
    issues = []
    for pattern, test in tests.items():
        lacking = {at for at, names in known.items() if not any(map(test, names))}
        if lacking:
            ranks = [rank for rank, plan in enumerate(plans) if id(plan.items.catalog) in lacking]
            where = f" on {span(ranks)}" if len(ranks) < len(plans) else ""
            near = nearest_names(pattern, sorted(set().union(*(known[at] for at in lacking))))
            text = f"{what}: {pattern!r} matches nothing{where}{nearest_hint(near)}"
            text += "; required=False allows that"
            issues.append(Issue("unmatched", pattern, text, ranks if where else ()))
    if issues:
        raise PlanError(issues)


def _demand_renames(
    how: Mapping[str, str] | Sequence[tuple[str, str]], plans: Sequence[SavePlan]
) -> None:
    """Refuse names and expressions that match nothing, each tried on what the ones before made."""
    if isinstance(how, Mapping):
        _demand("rename", plans, {key: _same(key) for key in how})
        return
    known = {at: set(names) for at, names in _known_by(plans).items()}
    for pattern, replacement in how:
        _refuse_unmatched("rename", known, plans, {pattern: _searches(pattern)})
        known = {
            at: {re.sub(pattern, replacement, name) for name in names}
            for at, names in known.items()
        }


def _refuse_collisions(new: Mapping[str, str]) -> None:
    owners: dict[str, list[str]] = {}
    for old, name in sorted(new.items()):
        owners.setdefault(name, []).append(old)
    clashes = {name: old for name, old in owners.items() if len(old) > 1}
    if clashes:
        raise PlanError(
            Issue(
                "conflict",
                name,
                f"rename gives {listed(old)} one name: `{name}`",
            )
            for name, old in clashes.items()
        )


def _refuse_losses(casts: Sequence[tuple[Head, str]]) -> None:
    issues = []
    for (name, _, _, properties, _), wanted in casts:
        have = properties.dtype if properties is not None else wanted
        rounds = _kind(have) == _kind(wanted) and _kind(have) in ("float", "complex")
        if not rounds and not is_exact_cast(have, wanted):
            text = f"cast: `{name}` loses values from {have} to {wanted}; lossy=True allows that"
            issues.append(Issue("lossy", name, text))
    if issues:
        raise PlanError(issues)


def _edit(plans: tuple[SavePlan, ...], edit: Edit) -> tuple[SavePlan, ...]:
    """Rewrite every catalog once; items of rows that are gone go with them."""
    uses = _uses(plans)
    used: dict[int, Any] = {}  # per catalog, by identity, the rows that any plan uses
    for use in uses:
        used[id(use.catalog)] = used.get(id(use.catalog), False) | use.mask
    edited = {id(u.catalog): u.catalog for u in uses}
    catalogs = {at: _edit_catalog(c, used[at], edit) for at, c in edited.items()}
    done = list(plans)
    for use in uses:
        new, number = catalogs[id(use.catalog)]
        gone = use.names - _unchanged(use, new, number)
        pairs = zip(use.catalog.names, number.tolist(), strict=True)
        names = {name: new.names[at] if at >= 0 else None for name, at in pairs}
        datas: dict[int, Any] = {}  # ranks share their data, by identity
        for position in use.ranks:
            plan = plans[position]
            if id(plan.planner_data) not in datas:
                data = _without_paths(plan.planner_data, gone)
                datas[id(plan.planner_data)] = _with_names(data, names)
            row = number[plan.items.row]
            items = plan.items if (row >= 0).all() else plan.items.take(row >= 0)
            items = items.recatalog(new, readonly(row[row >= 0]))
            data = datas[id(plan.planner_data)]
            done[position] = attrs.evolve(plan, items=items, planner_data=data)
    return tuple(done)


def _unchanged(use: _Use, new: Catalog, number: Ints) -> set[str]:
    """Return the names that are in use and stay as they are."""
    pairs = [(use.catalog.names[row], int(number[row])) for row in np.flatnonzero(use.mask)]
    return {name for name, at in pairs if at >= 0 and new.names[at] == name}


def _edit_catalog(
    catalog: Catalog, mask: npt.NDArray[np.bool_], edit: Edit
) -> tuple[Catalog, Ints]:
    """Return the new catalog, and each old row's number in it (-1: gone).

    Rows in use come first; those that are only known of come after them.
    """
    heads: dict[Head, int] = {}
    number = np.full(len(catalog), -1, np.int64)
    for row in np.argsort(~mask, kind="stable").tolist():
        after = edit(catalog.heads[row])
        if after is not None:
            number[row] = heads.setdefault(after, len(heads))
    return Catalog.of(tuple(heads)), number


def _without_paths(data: Any, gone: set[str]) -> Any:
    """Drop the paths of names that are gone; a renamed key has no nested place."""
    if not isinstance(data, Mapping) or "paths" not in data:
        return data
    paths = {name: path for name, path in data["paths"].items() if name not in gone}
    rest = {k: v for k, v in data.items() if k != "paths"}
    return FrozenDict({**rest, **({"paths": paths} if paths else {})}) or None


def _with_names(data: Any, names: Mapping[str, str | None]) -> Any:
    """Call empty dicts by their new names, if they have one; those that are dropped are gone."""
    if not empty_names(data):
        return data
    renamed = {names.get(name, name) for name in empty_names(data)}
    empty = sorted(name for name in renamed if name is not None)
    rest = {k: v for k, v in data.items() if k != "empty"}
    return FrozenDict({**rest, **({"empty": empty} if empty else {})}) or None
