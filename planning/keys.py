"""Passes that rewrite names and dtypes: rename, select, drop, cast.

They look at each catalog once, however many ranks share it, so their cost is that of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from .catalog import Catalog, Head
from .dtypes import dtype_name, family, is_exact_cast
from .errors import Issue, PlanError, nearest_hint, nearest_names
from .frozen import FrozenDict
from .packing import Ints, readonly
from .passes import Pass
from .records import SavePlan

__all__ = ["cast", "drop", "rename", "select"]

Renaming = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]]
Test = Callable[[str], bool]
Tests = Mapping[str, Test]  # by what a message calls them
Pattern = str | Test
# What becomes of one row of a catalog: another head, or None where its items are left out.
Edit = Callable[[Head], Head | None]


def rename(how: Renaming, *, required: bool = True) -> Pass[SavePlan]:
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
    return partial(_rename, how, required)


def _rename(how: Renaming, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    names = _names(plans)
    if required and not callable(how):
        _demand_renames(how, _known(plans))
    new = {name: _renamed(how, name) for name in sorted(names | _known(plans))}
    for old, name in new.items():
        if not isinstance(name, str):
            raise TypeError(f"rename: `{old}` must become a string, not {name!r}")
    _refuse_collisions({old: name for old, name in new.items() if old in names})
    return _edit(plans, lambda head: (new[head[0]], *head[1:]))


def select(*patterns: Pattern, required: bool = True) -> Pass[SavePlan]:
    """Keep only the items whose name matches one of the patterns.

    Args:
        *patterns: Shell-style patterns (``"model.*"``) or functions from name to bool.
        required: Whether a pattern that matches nothing is an error.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"model": {"w": 1, "b": 2}, "step": 3})
    >>> [item.index.fqn for item in select("model.*")((plan,))[0].items]
    ['model.b', 'model.w']
    """
    return partial(_select, _tests("select", patterns), required)


def _select(tests: Tests, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    if required:
        _demand("select", _known(plans), tests)
    return _edit(plans, lambda head: head if _matches(head, tests) else None)


def drop(*patterns: Pattern, required: bool = True) -> Pass[SavePlan]:
    """Leave out the items whose name matches one of the patterns; see `select`.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"model": {"w": 1, "b": 2}, "step": 3})
    >>> [item.index.fqn for item in drop("*.b", "step")((plan,))[0].items]
    ['model.w']
    """
    return partial(_drop, _tests("drop", patterns), required)


def _drop(tests: Tests, required: bool, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    if required:
        _demand("drop", _known(plans), tests)
    return _edit(plans, lambda head: None if _matches(head, tests) else head)


def cast(
    dtype: str | Mapping[str, str], *, lossy: bool = False, required: bool = True
) -> Pass[SavePlan]:
    """Store tensors in another dtype; loads through the same pass cast back.

    Naming a narrower float asks for its rounding. Any other loss (whole numbers that the new dtype
    cannot tell apart, a float made whole, a complex number made real) must be asked for.

    Args:
        dtype: A dtype, for every tensor of its own kind (floats stay floats, complex numbers
            complex, whole numbers whole); or dtypes by name pattern, for every tensor that matches,
            the first match counting.
        lossy: Whether to allow those other losses.
        required: Whether a pattern that matches no tensor is an error.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((2,)), "ids": TensorSpec((2,), "int64")})
    >>> [i.tensor_data.properties.dtype for i in cast("bfloat16")((plan,))[0].items]
    ['int64', 'bfloat16']

    Raises:
        PlanError: When run, if a cast would lose what nobody asked to lose; every key is named.
    """
    by_pattern = not isinstance(dtype, str)
    wishes = {"*": dtype} if isinstance(dtype, str) else dtype
    table = {pattern: dtype_name(wish) for pattern, wish in wishes.items()}
    return partial(_cast, table, by_pattern, lossy, required)


def _cast(
    table: Mapping[str, str],
    by_pattern: bool,
    lossy: bool,
    required: bool,
    plans: tuple[SavePlan, ...],
) -> tuple[SavePlan, ...]:
    def target(head: Head) -> str | None:
        name, _, _, properties, _ = head
        if properties is None:
            return None
        wanted = next((d for p, d in table.items() if fnmatchcase(name, p)), None)
        same_kind = wanted is not None and _kind(wanted) == _kind(properties.dtype)
        return wanted if by_pattern or same_kind else None

    heads = _heads(plans)
    if required and by_pattern:
        values = {head[0] for head in heads if head[3] is None}
        _demand("cast", _known(plans) - values, {p: _globs(p) for p in table})
    if not lossy:
        _refuse_losses([(head, wanted) for head in heads if (wanted := target(head))])

    def edit(head: Head) -> Head:
        wanted, properties = target(head), head[3]
        if wanted is None or properties is None:
            return head
        return (*head[:3], attrs.evolve(properties, dtype=wanted), head[4])

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
    return any(test(head[0]) for test in tests.values())


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


def _used(plans: Sequence[SavePlan]) -> dict[int, tuple[Catalog, npt.NDArray[np.bool_]]]:
    """Return, by identity, every catalog and which of its rows items refer to."""
    used: dict[int, tuple[Catalog, npt.NDArray[np.bool_]]] = {}
    for plan in plans:
        catalog = plan.items.catalog
        _, mask = used.setdefault(id(catalog), (catalog, np.zeros(len(catalog), bool)))
        mask[plan.items.row] = True
    return used


def _heads(plans: Sequence[SavePlan]) -> list[Head]:
    """Return the distinct rows of all catalogs that items refer to, each catalog read once."""
    rows = (c.heads[row] for c, mask in _used(plans).values() for row in np.flatnonzero(mask))
    return list(dict.fromkeys(rows))


def _names(plans: Sequence[SavePlan]) -> set[str]:
    return {head[0] for head in _heads(plans)}


def _known(plans: Sequence[SavePlan]) -> set[str]:
    """Name all that ranks know of, also tensors of which they hold an empty part."""
    return {
        n for c in {id(p.items.catalog): p.items.catalog for p in plans}.values() for n in c.names
    }


def _demand(what: str, names: set[str], tests: Tests) -> None:
    """Refuse patterns that match no name, all of them together."""
    issues = []
    for pattern, test in tests.items():
        if not any(map(test, names)):
            near = nearest_names(pattern, sorted(names))
            hint = nearest_hint(near)
            text = f"{what}: {pattern!r} matches nothing{hint}; required=False allows that"
            issues.append(Issue("unmatched", pattern, text))
    if issues:
        raise PlanError(issues)


def _demand_renames(how: Mapping[str, str] | Sequence[tuple[str, str]], names: set[str]) -> None:
    """Refuse names and expressions that match nothing, each tried on what the ones before made."""
    if isinstance(how, Mapping):
        _demand("rename", names, {key: _same(key) for key in how})
        return
    for pattern, replacement in how:
        _demand("rename", names, {pattern: _searches(pattern)})
        names = {re.sub(pattern, replacement, name) for name in names}


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
                f"rename gives {', '.join(f'`{o}`' for o in old)} one name: `{name}`",
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
    catalogs = {at: (mask, *_edit_catalog(c, mask, edit)) for at, (c, mask) in _used(plans).items()}
    datas: dict[tuple[int, int], Any] = {}
    done = []
    for plan in plans:
        old = plan.items.catalog
        mask, new, number = catalogs[id(old)]
        row = number[plan.items.row]
        items = plan.items if (row >= 0).all() else plan.items.take(row >= 0)
        key = (id(plan.planner_data), id(old))
        if key not in datas:
            kept = {
                n
                for n, at in zip(old.names, number.tolist(), strict=True)
                if at >= 0 and new.names[at] == n
            }
            gone = {old.names[at] for at in np.flatnonzero(mask).tolist()} - kept
            datas[key] = _without_paths(plan.planner_data, gone)
        items = items.recatalog(new, readonly(row[row >= 0]))
        done.append(attrs.evolve(plan, items=items, planner_data=datas[key]))
    return tuple(done)


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
