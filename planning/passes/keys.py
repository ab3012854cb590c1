"""Passes that rewrite names, dtypes and data: rename, select, drop, cast, annotate.

Each distinct catalog is edited once, however many ranks share it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from operator import eq
from typing import Any

import attrs

from ..columns.arrays import Ints, column, distinct, readonly
from ..columns.items import Catalog, Head
from ..dtypes import Dtype, dtype_name, family, is_exact_cast
from ..errors import Issue, PlanError, listed, nearest_hint, nearest_names, span
from ..plans import SavePlan
from ..tree import FrozenDict, empty_names
from .base import Step, frozen

Renaming = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]]
Test = Callable[[str], bool]
Pattern = str | Test
Plans = tuple[SavePlan, ...]
Known = Mapping[int, set[str]]  # the names of each catalog, by its identity
# What becomes of one row of a catalog: another head, or None where its items are left out.
Edit = Callable[[Head], Head | None]


def rename(how: Renaming, *, required: bool = True) -> Step[SavePlan]:
    r"""Change names in the checkpoint; the names in the state dict stay the same.

    Args:
        how: A function from old to new name; or a mapping of full names; or pairs of a regular
            expression and its replacement, all applied to every name, in order.
        required: Whether a name in the mapping, or an expression, that matches nothing is an error.
            Pass False where ranks hold different keys, as pipeline stages do.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"_orig_mod.w": TensorSpec((2,))})
    >>> item = rename(lambda key: key.removeprefix("_orig_mod."))((plan,))[0].items[0]
    >>> item.index.fqn, item.source.fqn
    ('w', '_orig_mod.w')
    >>> rename([(r"^_orig_mod\.(.*)", r"module.\1")])((plan,))[0].items[0].index.fqn
    'module.w'

    Raises:
        PlanError: When run, if two names become equal, or (see ``required``) nothing matches.
    """
    _check_renaming(how)
    how = frozen(how)

    def run(plans: Plans) -> Plans:
        known = _known(plans)
        if required and not callable(how):
            _refuse_needless(how, known, plans)
        new = {name: _renamed(how, name) for name in sorted(set().union(*known.values()))}
        for old, name in new.items():
            if not isinstance(name, str):
                raise TypeError(f"rename: `{old}` must become a string, not {name!r}")
        _refuse_collisions(new, plans)
        return _edit(plans, lambda head: head._replace(name=new[head.name]))

    undo = partial(_undo_rename, how, required)
    return Step(rename, (how,), {"required": required}, "rank", run, undo)


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


def _undo_rename(how: Renaming, required: bool) -> Step[SavePlan]:
    if not isinstance(how, Mapping):
        raise ValueError(
            "rename has an inverse if it is given a mapping of whole names: {old: new}"
        )
    olds: dict[str, list[str]] = {}
    for old, new in how.items():
        olds.setdefault(new, []).append(old)
    several = [f"{listed(names)} become `{new}`" for new, names in olds.items() if len(names) > 1]
    if several:
        raise ValueError(f"rename has no inverse: {'; '.join(several)}")
    return rename({new: old for new, (old,) in olds.items()}, required=required)


def _refuse_needless(
    how: Mapping[str, str] | Sequence[tuple[str, str]], known: Known, plans: Plans
) -> None:
    """Refuse names or expressions that match nothing."""
    if isinstance(how, Mapping):
        refuse_unmatched("rename", known, plans, {key: partial(eq, key) for key in how})
        return
    for at, (pattern, _) in enumerate(how):  # each is tried on what the ones before made
        now = {key: {_renamed(how[:at], n) for n in names} for key, names in known.items()}
        refuse_unmatched("rename", now, plans, {pattern: re.compile(pattern).search})


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
    return _filter(select, patterns, required, keeps=True)


def drop(*patterns: Pattern, required: bool = True) -> Step[SavePlan]:
    """Leave out the items whose name matches one of the patterns; see `select`.

    >>> from shardplan.planning import local_plan
    >>> plan = local_plan({"model": {"w": 1, "b": 2}, "step": 3})
    >>> [item.index.fqn for item in drop("*.b", "step")((plan,))[0].items]
    ['model.w']
    """
    return _filter(drop, patterns, required, keeps=False)


def _filter(
    factory: Callable[..., Step[SavePlan]],
    patterns: tuple[Pattern, ...],
    required: bool,
    keeps: bool,
) -> Step[SavePlan]:
    """Return the pass that keeps, or leaves out, the items that match one of the patterns."""
    what = factory.__name__
    check_patterns(what, patterns)

    def run(plans: Plans) -> Plans:
        matches = matcher(what, plans, patterns, required)
        return _edit(plans, lambda head: head if matches(head.name) == keeps else None)

    lost = "what it leaves out is lost"
    return Step(factory, patterns, {"required": required}, "rank", run, lost)


def cast(
    dtype: Dtype | Mapping[str, Dtype], *, lossy: bool = False, required: bool = True
) -> Step[SavePlan]:
    """Store tensors in another dtype; loads through the same pass cast back.

    Rounding to a narrower float is always allowed. Any other loss (integers that the new dtype
    cannot represent, float to integer, complex to real) needs ``lossy=True``.

    Args:
        dtype: A dtype (``"bfloat16"`` or ``torch.bfloat16``) for all tensors of the same kind
            (float, complex or integer); or a mapping from name pattern to dtype, for all tensors
            that match, where the first match counts.
        lossy: Whether to allow other losses than rounding.
        required: Whether a pattern that matches no tensor is an error.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((2,)), "ids": TensorSpec((2,), "int64")})
    >>> [i.tensor_data.properties.dtype for i in cast("bfloat16")((plan,))[0].items]
    ['int64', 'bfloat16']

    Raises:
        PlanError: When run, if a cast would lose more than ``lossy`` allows; it names every key.
    """
    if isinstance(dtype, Mapping) and not all(isinstance(pattern, str) for pattern in dtype):
        raise TypeError(f"cast takes dtypes by pattern of names, not by {[*dtype]}")
    of: str | dict[str, str] = (
        {pattern: dtype_name(name) for pattern, name in dtype.items()}
        if isinstance(dtype, Mapping)
        else dtype_name(dtype)
    )

    def run(plans: Plans) -> Plans:
        heads = dict.fromkeys(h for c in catalogs_of(plans).values() for h in c.heads)
        tensors = [head for head in heads if head.properties is not None]
        if required and isinstance(of, Mapping):
            names = {head.name for head in tensors}
            known = {at: some & names for at, some in _known(plans).items()}
            refuse_unmatched("cast", known, plans, {p: _globs(p) for p in of})
        after = {head: new for head in tensors if (new := _cast_head(head, of)) != head}
        if not lossy:
            _refuse_losses(after)
        return _edit(plans, lambda head: after.get(head, head))

    options = {"lossy": lossy, "required": required}
    lost = "it does not state the dtypes before it"
    return Step(cast, (of,), options, "rank", run, lost)


def _cast_head(head: Head, dtype: str | Mapping[str, str]) -> Head:
    """Return a tensor's row with the new dtype, if the cast applies to it."""
    assert head.properties is not None
    if isinstance(dtype, str):
        wanted = dtype if _kind(dtype) == _kind(head.properties.dtype) else None
    else:
        wanted = next((d for p, d in dtype.items() if fnmatchcase(head.name, p)), None)
    if wanted is None:
        return head
    return head._replace(properties=attrs.evolve(head.properties, dtype=wanted))


def _kind(dtype: str) -> str:
    """Return the kind of number of a dtype; only floats are rounded without ``lossy``."""
    return {"uint": "int", "float8fnuz": "float"}.get(family(dtype), family(dtype))


def check_patterns(what: str, patterns: Sequence[Pattern]) -> None:
    """Refuse what is neither a string nor a function."""
    for pattern in patterns:
        if not isinstance(pattern, str) and not callable(pattern):
            raise TypeError(f"{what} takes patterns (strings) or functions, not {pattern!r}")


def matcher(
    what: str, plans: Sequence[SavePlan], patterns: Sequence[Pattern], required: bool
) -> Test:
    """Return a function that tests names against a pattern."""
    tests = {p if isinstance(p, str) else repr(p): _globs(p) for p in patterns}
    if required:
        refuse_unmatched(what, _known(plans), plans, tests)
    return lambda name: any(test(name) for test in tests.values())


def _globs(pattern: Pattern) -> Test:
    return pattern if callable(pattern) else partial(fnmatchcase, pat=pattern)


def _renamed(how: Renaming, name: str) -> str:
    if callable(how):
        return how(name)
    if isinstance(how, Mapping):
        return how.get(name, name)
    for pattern, replacement in how:
        name = re.sub(pattern, replacement, name)
    return name


def catalogs_of(plans: Sequence[SavePlan]) -> dict[int, Catalog]:
    """Return the distinct catalogs, by identity, since ranks share them."""
    return {id(plan.items.catalog): plan.items.catalog for plan in plans}


def _known(plans: Sequence[SavePlan]) -> Known:
    """Return all names of each catalog, by its identity, including those without items."""
    return {at: set(catalog.names) for at, catalog in catalogs_of(plans).items()}


def refuse_unmatched(
    what: str,
    known: Known,
    plans: Sequence[SavePlan],
    tests: Mapping[str, Callable[[str], Any]],
) -> None:
    """Refuse all patterns that match none of a rank's names, in one error."""
    issues = []
    for pattern, test in tests.items():
        lacking = {at for at, names in known.items() if not any(map(test, names))}
        if lacking:
            ranks = [
                at if plan.rank is None else plan.rank
                for at, plan in enumerate(plans)
                if id(plan.items.catalog) in lacking
            ]
            where = f" on {span(ranks)}" if len(ranks) < len(plans) else ""
            near = nearest_names(pattern, sorted(set().union(*(known[at] for at in lacking))))
            text = f"{what}: {pattern!r} matches nothing{where}{nearest_hint(near)}"
            text += "; required=False allows that"
            issues.append(Issue("unmatched", pattern, text, ranks if where else ()))
    if issues:
        raise PlanError(issues)


def _refuse_collisions(new: Mapping[str, str], plans: Sequence[SavePlan]) -> None:
    """Refuse to give several values of one rank the same name."""
    owners: dict[str, list[str]] = {}
    for old, name in new.items():
        owners.setdefault(name, []).append(old)
    clashes = {name: several for name, several in owners.items() if len(several) > 1}
    issues: dict[str, Issue] = {}
    for plan in plans if clashes else ():
        names = plan.items.catalog.names
        used = {names[row] for row in distinct(plan.items.row).tolist()}
        for name, several in clashes.items():
            mine = [old for old in several if old in used]
            if len(mine) > 1:
                text = f"rename gives {listed(mine)} one name: `{name}`"
                issues.setdefault(name, Issue("conflict", name, text))
    if issues:
        raise PlanError(issues.values())


def _refuse_losses(after: Mapping[Head, Head]) -> None:
    issues = []
    for old, new in after.items():
        assert old.properties is not None
        assert new.properties is not None
        have, wanted = old.properties.dtype, new.properties.dtype
        rounds = _kind(have) == _kind(wanted) and _kind(have) in ("float", "complex")
        if not rounds and not is_exact_cast(have, wanted):
            text = f"cast: `{old.name}` loses values from {have} to {wanted}; lossy=True allows it"
            issues.append(Issue("lossy", old.name, text))
    if issues:
        raise PlanError(issues)


def _edit(plans: Plans, edit: Edit) -> Plans:
    """Edit every distinct catalog once, and drop the items of dropped rows."""
    edited = {at: _edited(catalog, edit) for at, catalog in catalogs_of(plans).items()}
    datas: dict[tuple[int, int], Any] = {}  # ranks share their data, by identity
    done = []
    for plan in plans:
        catalog, rows, names = edited[id(plan.items.catalog)]
        key = id(plan.items.catalog), id(plan.planner_data)
        if key not in datas:
            datas[key] = renest(plan.planner_data, names)
        row = rows[plan.items.row]
        items = plan.items if (row >= 0).all() else plan.items.take(row >= 0)
        items = items.recatalog(catalog, readonly(row[row >= 0]))
        done.append(attrs.evolve(plan, items=items, planner_data=datas[key]))
    return tuple(done)


def _edited(catalog: Catalog, edit: Edit) -> tuple[Catalog, Ints, Mapping[str, str | None]]:
    """Return a catalog after an edit, each old row's number in it, and each old name's new one.

    What is dropped has the number -1 and the name None.
    """
    after = [edit(head) for head in catalog.heads]
    heads: dict[Head, int] = {}
    rows = [-1 if head is None else heads.setdefault(head, len(heads)) for head in after]
    names = [None if head is None else head.name for head in after]
    return Catalog.of(heads), column(rows), dict(zip(catalog.names, names, strict=True))


def renest(data: Any, names: Mapping[str, str | None]) -> Any:
    """Rename empty dicts, and drop the paths of renamed keys, which no longer apply."""
    if not isinstance(data, Mapping):
        return data
    paths = data.get("paths", {})
    empty = {names.get(name, name) for name in empty_names(data)}
    lost = [path for name, path in paths.items() if names.get(name, name) != name]
    open_now = {path[:depth] for path in lost for depth in range(len(path))}  # no longer whole
    nodes = data.get("nodes", {})
    nesting = {
        "nodes": {path: node for path, node in nodes.items() if path not in open_now},
        "paths": {name: path for name, path in paths.items() if names.get(name, name) == name},
        "empty": sorted(name for name in empty if name is not None),
    }
    rest = {key: part for key, part in data.items() if key not in nesting}
    return FrozenDict({**rest, **{key: part for key, part in nesting.items() if part}}) or None


def annotate(note: Callable[[SavePlan], Mapping[str, Any]]) -> Step[SavePlan]:
    """Have every rank add data to its plan, for `global_plan` to collect.

    The data of all ranks, in rank order, becomes ``metadata.planner_data["ranks"]``.

    Args:
        note: Maps a rank's plan to the data to add to its ``planner_data``.

    >>> from shardplan.planning import global_plan, local_plan
    >>> passes = [annotate(lambda plan: {"rank": plan.rank})]
    >>> global_plan([local_plan({"a": 1}), local_plan({"b": 2})], passes)[1].planner_data["ranks"]
    (FrozenDict({'rank': 0}), FrozenDict({'rank': 1}))
    """

    def run(plans: Plans) -> Plans:
        return tuple(_noted(plan, note(plan)) for plan in plans)

    return Step(annotate, (note,), {}, "rank", run, shows_rank=True)


def _noted(plan: SavePlan, extra: Mapping[str, Any]) -> SavePlan:
    if not isinstance(extra, Mapping):
        raise TypeError(f"annotate needs a mapping of names to data, not {extra!r}")
    for taken in ("paths", "empty", "nodes"):
        if taken in extra:
            raise ValueError(f'planner_data["{taken}"] is about nested keys; use another name')
    return attrs.evolve(plan, planner_data=FrozenDict({**(plan.planner_data or {}), **extra}))
