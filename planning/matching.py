"""Matching of a catalog with a checkpoint: names, kinds, shapes, dtypes.

A checkpoint may have wanted names under another prefix: ``torch.compile`` adds ``_orig_mod.`` to
names, DDP prepends ``module.``, and in a checkpoint of ``{"model": sd}`` all names begin with
``model.``. `find_renames` finds the `rename` that maps them: it compares a sample of the missing
names with the saved names that have the longest common suffix. Of what precedes it, one must have
all steps of the other: replacing steps could load one tensor into another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Any, Final
from zlib import crc32

import attrs
import numpy as np

from .columns.arrays import Ints
from .columns.items import Catalog
from .dtypes import is_exact_cast
from .errors import Issue, nearest_hint, nearest_names
from .metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from .records import TensorProperties
from .tree import Path, is_tensor

_SUGGESTED: Final = 8  # missing names that get a "nearest" hint
_LEAVE: Final = "strict=False leaves it as it is"
_SAMPLED: Final = 8  # missing names to make rules from
_ALIKE: Final = 64  # saved names to compare each with
_CANDIDATES: Final = 8  # rules to make from each
_PROBED: Final = 256  # missing names to try a rule on first
_TRIED: Final = 6  # rules to try on all names
_SHARE: Final = 10  # a rule must find a tenth of the names, and at least two, or all
_HEADS: Final = 12  # first steps to list in an expression


@attrs.frozen(eq=False)
class Match:
    """How a catalog and a checkpoint fit."""

    entry: Ints  # the entry that fills each row of the catalog; -1 if none does
    issues: list[Issue]  # what does not fit
    notes: list[Issue]  # what does not fit but was allowed
    # Per row, the common shape of the saved and the wanted tensor, if only that is filled.
    shared: dict[int, tuple[int, ...]]


def match_entries(
    entries: Entries,
    catalog: Catalog,
    rows: Ints,
    dtype: str,
    shape: str,
    unneeded: Container[str] = (),
) -> Match:
    """Compare a catalog with a checkpoint, tensor by tensor; some names are optional."""
    match = Match(np.full(len(catalog), -1, np.int64), [], [], {})
    layouts, props = entries.layout.tolist(), entries.prop.tolist()
    fitting: set[tuple[Any, ...]] = set()  # pairs of tensors that fit: most repeat
    for row in rows.tolist():
        name, _, _, properties, size = catalog.heads[row]
        at = entries.row_of.get(name, -1)
        if at < 0 and name in unneeded:
            continue
        if at < 0:
            text = f"`{name}` is not in the checkpoint"
            match.issues.append(Issue("missing", name, text, remedy=_LEAVE))
            continue
        pair = (layouts[at], props[at], id(properties), size)
        if pair in fitting:
            match.entry[row] = at
            continue
        saved = entries.record(at)
        issue = _misfit(name, saved, properties, size, dtype)
        if issue is None:
            match.entry[row] = at
            loss = _loss(name, saved, properties)
            if loss is None:
                fitting.add(pair)
            else:
                match.notes.append(loss)
            continue
        stored = saved.size if issue.kind == "shape" and isinstance(saved, TensorMetadata) else None
        if shape == "same" or stored is None or len(stored) != len(size):
            match.issues.append(issue)
        else:
            match.entry[row] = at
            match.notes.append(issue)
            match.shared[row] = tuple(map(min, stored, size))
    return match


def explain_missing(
    issues: Sequence[Issue], entries: Entries, catalog: Catalog, dtype: str
) -> list[Issue]:
    """Add likely alternatives to issues about missing names."""
    saved = entries.row_of
    missing = [issue.fqn for issue in issues if issue.kind == "missing"]
    wanted = {head.name: head for head in catalog.heads}

    def fits(way: Renames) -> bool:
        pairs = ((wanted[name], entries.record(saved[new])) for name, new in way.names.items())
        return all(
            _misfit(head.name, entry, head.properties, head.size, dtype) is None
            for head, entry in pairs
        )

    fitting = [name for name in catalog.names if name in saved]
    ways = find_renames(missing, saved, fitting) if missing else ()
    if len(ways) > 1 and sum(map(fits, ways)) == 1:
        ways = tuple(filter(fits, ways))
    found = ways[0].names if ways else {}
    summary = _prefix_text(ways) if ways else ""
    remedy = "choose one, and rename to it in the planner"
    if len(ways) == 1:
        renamed = catalog.sources is not catalog.names
        remedy = f"add {ways[0]} to the planner" if renamed else f"pass planner={ways[0]}"
    known, left = sorted(saved), [name for name in missing if name not in found]
    hints = {name: nearest_names(name, known) for name in left[:_SUGGESTED]}
    values = {head.name for head in catalog.heads if head.properties is None}
    explained = []
    for issue in issues:
        if issue.kind == "missing" and issue.fqn in found:
            issue = attrs.evolve(issue, summary=summary, remedy=remedy)
        elif issue.kind == "missing" and issue.fqn in hints:
            issue = _with_hint(issue, hints[issue.fqn], issue.fqn in values)
        explained.append(issue)
    return explained


def _with_hint(issue: Issue, near: Sequence[str], is_value: bool) -> Issue:
    """Add names that resemble a missing one, or lie below it."""
    below = [name for name in near if is_value and name.startswith(f"{issue.fqn}.")]
    if not below:
        return attrs.evolve(issue, message=f"{issue.message}{nearest_hint(near)}")
    text = (
        f"`{issue.fqn}` is empty or a single value here, and the checkpoint has more below "
        f"({below[0]}, …); nest it alike. If it is an optimizer's, that has no state before its "
        "first step: use torch's get_state_dict, or take a step, then load"
    )
    return attrs.evolve(issue, message=text, remedy="")


def _prefix_text(ways: Sequence[Renames]) -> str:
    names = ways[0].names
    first = next(iter(names))
    places = " or ".join(f"`{way.names[first]}`" for way in ways if first in way.names)
    if len(names) == 1:
        return f"`{first}` is not in the checkpoint, which has {places}"
    prefix = "another prefix" if len(ways) == 1 else "several prefixes"
    return (
        f"{len(names):,} names are not in the checkpoint, which has them under {prefix}: "
        f"`{first}` as {places}, and so on"
    )


def _loss(
    name: str, saved: TensorMetadata | BytesMetadata, properties: TensorProperties | None
) -> Issue | None:
    """Note a cast that cannot keep every value."""
    if isinstance(saved, BytesMetadata) or properties is None:
        return None
    was, now = saved.properties.dtype, properties.dtype
    text = f"`{name}` is cast from {was} to {now}, which cannot hold every value"
    return None if is_exact_cast(was, now) else Issue("lossy", name, text)


def _misfit(
    name: str,
    saved: TensorMetadata | BytesMetadata,
    properties: TensorProperties | None,
    size: tuple[int, ...],
    dtype: str,
) -> Issue | None:
    """Return how a saved tensor differs from the wanted one."""
    if isinstance(saved, BytesMetadata) or properties is None:
        if isinstance(saved, BytesMetadata) and properties is None:
            return None
        kinds = ("a tensor", "a non-tensor value")
        was, wanted = kinds if properties is None else kinds[::-1]
        return Issue("type", name, f"`{name}` was saved as {was} and is wanted as {wanted}")
    shapes = f"`{name}` was saved with shape {list(saved.size)} and is wanted with {list(size)}"
    if len(saved.size) != len(size):
        return Issue("shape", name, f"{shapes}, which has another number of axes")
    if saved.properties.dtype != properties.dtype and dtype == "same":
        text = f"`{name}` was saved as {saved.properties.dtype} and is wanted as {properties.dtype}"
        return Issue("dtype", name, f'{text}; pass dtype="cast", or a cast(...) pass, to convert')
    if saved.size != size:
        return Issue("shape", name, shapes, remedy='shape="overlap" fills what both have')
    return None


def whole_names(
    flat: Mapping[str, object], paths: Mapping[str, Path], metadata: Metadata
) -> frozenset[str]:
    """Return the names of single values in a checkpoint that the state dict opens into parts.

    torch before 2.4 stores dicts without tensors so, as do planners that do not flatten. All
    versions store tuples, with or without tensors, and numpy arrays so. Dicts that hold a tensor
    here, and containers with a name that the checkpoint has, are not included.

    >>> from shardplan.planning import BytesMetadata, flatten
    >>> whole_names(*flatten({"a": {"b": 1}, "c": 2}), Metadata({"a": BytesMetadata()}))
    frozenset({'a'})
    """
    entries = metadata.state_dict_metadata
    known, layout = entries.row_of, entries.layout
    lost = [name for name in flat if name not in known]
    values = {holder for name in lost for holder in _holders(paths[name]) if holder in known}
    opened: set[str] = set()
    if values:
        others = flat.keys() - set(lost)
        opened = {holder for name in others for holder in _holders(paths[name])}
        tensors = [paths[name] for name in lost if is_tensor(flat[name])]
        opened |= {holder for path in tensors for holder in _holders(path, "dict")}
    arrays = {n for n, leaf in flat.items() if isinstance(leaf, np.ndarray) and n in known}
    return frozenset(n for n in (values - opened) | arrays if layout[known[n]] < 0)


def _holders(path: Path, kind: str = "") -> list[str]:
    """Return the names of the containers of a leaf, optionally of one kind only."""
    keys = [str(key) for _, key in path]
    depths = [depth for depth in range(1, len(keys)) if path[depth][0] == (kind or path[depth][0])]
    return [".".join(keys[:depth]) for depth in depths]


Steps = Sequence[str]  # the parts of a name between dots


@attrs.frozen
class Rule:
    """A regular expression and its replacement, as `rename` takes them."""

    pattern: str
    new: str

    def __str__(self) -> str:
        return f"({_code(self.pattern)}, {_code(self.new)})"

    def apply(self, names: Iterable[str]) -> list[str]:
        """Rename names."""
        pattern = re.compile(self.pattern)
        return [pattern.sub(self.new, name) for name in names]


@attrs.frozen
class Renames:
    """Rules, applied in order, and the saved name of each missing name that they find."""

    rules: tuple[Rule, ...]
    names: dict[str, str]

    def __str__(self) -> str:
        return f"rename([{', '.join(map(str, self.rules))}])"

    def disagrees(self, other: Renames) -> bool:
        """Return True if the two map one name to two saved ones, or two names to one."""
        both = self.names.items() | other.names.items()
        return not len(both) == len(dict(both)) == len({new for _, new in both})


def find_renames(
    missing: Sequence[str], saved: Collection[str], fitting: Collection[str] = ()
) -> tuple[Renames, ...]:
    r"""Return the rules that map the most missing names to saved ones; empty if there are none.

    They do not change ``fitting``, the wanted names that the checkpoint has. There are several
    results if it has the missing names under several prefixes.

    >>> print(*find_renames(["_orig_mod.a.w", "_orig_mod.b.w"], ["a.w", "b.w"]))
    rename([(r"^_orig_mod\.", "")])
    >>> print(*find_renames(["a.w", "b.w"], ["model.a.w", "model.b.w", "step"], ["step"]))
    rename([(r"^(?=a\.|b\.)", "model.")])
    """
    free = set(saved) - set(fitting)
    # A deterministic sample: names in an arbitrary order that is equal everywhere.
    probe = nsmallest(_PROBED, missing, key=lambda n: crc32(n.encode("utf-8", "surrogatepass")))
    hits = {r: len(free.intersection(r.apply(probe))) for r in _candidates(missing, sorted(free))}
    likely = [rule for rule in hits if hits[rule] > len(probe) / _SHARE / 2]
    ways: dict[frozenset[tuple[str, str]], Renames] = {}
    for rule in nlargest(_TRIED, likely, key=hits.__getitem__):
        for narrow in _narrowed(rule, missing, fitting):
            after = narrow.apply(missing)
            renamed = {old: new for old, new in zip(missing, after, strict=True) if new in free}
            if len(set(after)) == len(after):
                ways.setdefault(frozenset(renamed.items()), Renames((narrow,), renamed))
    most = max((len(way.names) for way in ways.values()), default=0)
    enough = most == len(missing) or (most > 1 and most * _SHARE >= len(missing))
    best = [way for way in ways.values() if enough and len(way.names) == most]
    return tuple(best if any(way.disagrees(best[0]) for way in best) else best[:1])


def _candidates(missing: Sequence[str], free: Sequence[str]) -> Iterator[Rule]:
    """Yield rules that would find some of the missing names, simple ones first."""
    sample = missing[:: -(-len(missing) // _SAMPLED) or 1]
    for name in sample:
        for old, new in _differences(name, free)[:_CANDIDATES]:
            numbers = [step for step in new if step.isdigit()]
            if numbers and numbers == [step for step in old if step.isdigit()]:
                many = "".join(r"(\d+)\." if s.isdigit() else _pattern(s) for s in old)
                group = iter(range(1, len(numbers) + 1))
                same = (rf"\{next(group)}." if s.isdigit() else _plain(s) for s in new)
                yield Rule(f"^{many}", "".join(same))
            yield Rule(f"^{''.join(map(_pattern, old))}", "".join(map(_plain, new)))
    known = {step for name in free for step in name.split(".")}
    odd = dict.fromkeys(step for name in sample for step in name.split(".")[:-1])
    wrappers = [re.escape(step) for step in odd if step not in known]
    if wrappers:  # wherever they stand
        yield Rule(rf"(?<![^.])(?:{'|'.join(wrappers)})\.", "")


def _differences(name: str, free: Sequence[str]) -> list[tuple[Steps, Steps]]:
    """Return what precedes the common suffix of a name and each similar saved one, as steps.

    >>> _differences("model._orig_mod.a.w", ["a.w", "model.a.w", "model.b.w"])
    [(['model', '_orig_mod'], ['model'])]
    >>> _differences("a.k.w", ["b.q.w"])
    []
    """
    steps = name.split(".")
    alike, tail = _ending(steps, 1, free), 1
    while closer := _ending(steps, tail + 1, alike):
        alike, tail = closer, tail + 1
    old = steps[:-tail]
    pairs = [(old, other.split(".")[:-tail]) for other in nsmallest(_ALIKE, alike, key=len)]
    pairs = [(old, new) for old, new in pairs if _within(old, new) or _within(new, old)]
    least = min((abs(len(old) - len(new)) for old, new in pairs), default=0)
    return [(old, new) for old, new in pairs if abs(len(old) - len(new)) == least]


def _ending(steps: Steps, count: int, names: Sequence[str]) -> Sequence[str]:
    """Return the names that end with the last steps of another; none if it has fewer."""
    end = ".".join(steps[-count:])
    inner = f".{end}"
    return [n for n in names if n.endswith(inner) or n == end] if count <= len(steps) else []


def _within(some: Steps, steps: Steps) -> bool:
    """Return True if some steps are a subsequence of others."""
    rest = iter(steps)
    return all(step in rest for step in some)


def _narrowed(rule: Rule, missing: Sequence[str], fixed: Collection[str]) -> Iterator[Rule]:
    """Yield a rule; if it changes fixed names, narrower ones that do not."""
    pattern = re.compile(rule.pattern)
    if not any(map(pattern.search, fixed)):
        yield rule
    elif rule.pattern.startswith("^"):
        for sign, names in (("=", missing), ("!", fixed)):
            heads = dict.fromkeys(_head(pattern.sub("", n)) for n in names if pattern.search(n))
            narrow = f"{rule.pattern}(?{sign}{'|'.join(heads)})"
            if 0 < len(heads) <= _HEADS and not any(map(re.compile(narrow).search, fixed)):
                yield attrs.evolve(rule, pattern=narrow)


def _head(name: str) -> str:
    """Return an expression for the start of names with the same first step."""
    first, dot, _ = name.partition(".")
    return re.escape(first) + (r"\." if dot else "$")


def _pattern(step: str) -> str:
    """Return an expression for one step and its dot."""
    return rf"{re.escape(step)}\."


def _plain(step: str) -> str:
    """Return one step and its dot, escaped for use in a replacement."""
    return step.replace("\\", r"\\") + "."


def _code(text: str) -> str:
    """Return a string as Python source."""
    if '"' in text or not text.isprintable() or text.endswith("\\"):
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'
