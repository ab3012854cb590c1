"""Wanted names that a checkpoint has under another prefix, and the `rename` that maps them.

``torch.compile`` adds ``_orig_mod.`` to names, DDP prepends ``module.``, and in a checkpoint of
``{"model": sd}`` all names begin with ``model.``. How rules are found:

1. For a sample of the missing names, find the saved names with the longest common suffix, and
   compare what precedes it: the steps to remove and the steps to add.
2. Make a few regular expressions from that, and try the promising ones on all names. Take the one
   that finds the most missing names and does not change names that fit already.
3. Repeat for the names that are still missing.

A rule that replaces steps, rather than only adding or removing some, could load one tensor into
another. It is used only if it covers all missing names with the same first step, and if shapes and
dtypes agree. Rules that disagree about a name are not suggested as code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import takewhile
from typing import Final
from zlib import crc32

import attrs

__all__ = ["Renames", "find_renames"]

Steps = Sequence[str]  # the parts of a name between dots
Fits = Callable[[str, str], bool]
_SAMPLED: Final = 8  # missing names to make rules from
_ALIKE: Final = 64  # saved names to compare each with
_CANDIDATES: Final = 8  # rules to make from each
_PROBED: Final = 256  # missing names to try a rule on first
_TRIED: Final = 6  # rules to try on all names
_RULES: Final = 3  # rules to combine
_SHARE: Final = 10  # a rule must find a tenth of the names, and at least two, or all
_HEADS: Final = 12  # first steps to list in an expression


@attrs.frozen
class Rule:
    """A regular expression and its replacement, as `rename` takes them.

    Attributes:
        pattern, new: The two.
        sure: Whether it only adds or removes steps, so that a match is not a coincidence.
    """

    pattern: str
    new: str
    sure: bool = attrs.field(default=True, eq=False)

    def __str__(self) -> str:
        return f"({_code(self.pattern)}, {_code(self.new)})"

    def apply(self, names: Sequence[str]) -> list[str]:
        """Rename names."""
        pattern = re.compile(self.pattern)
        return [pattern.sub(self.new, name) for name in names]


@attrs.frozen
class Renames:
    """Rules, applied in order, and the saved name of each missing name that they find.

    Prints as the code to write.
    """

    rules: tuple[Rule, ...]
    names: dict[str, str]

    def __str__(self) -> str:
        return f"rename([{', '.join(map(str, self.rules))}])"

    @property
    def sure(self) -> bool:
        """Whether all rules only add or remove steps."""
        return all(rule.sure for rule in self.rules)

    def disagrees(self, other: Renames) -> bool:
        """Return True if the two map one name to two saved ones, or two names to one."""
        both = self.names.items() | other.names.items()
        return not len(both) == len(dict(both)) == len({new for _, new in both})


def find_renames(
    missing: Sequence[str],
    saved: Collection[str],
    fitting: Collection[str] = (),
    *,
    fits: Fits = lambda wanted, saved: True,
) -> tuple[Renames, ...]:
    r"""Return the rules that map the most missing names to saved ones; empty if there are none.

    There are several results if the checkpoint has the same names under several prefixes.

    Args:
        missing: Wanted names that the checkpoint does not have.
        saved: The names in the checkpoint.
        fitting: Wanted names that it has; these must not change.
        fits: Returns whether a wanted name and a saved one agree in shape and dtype.

    >>> print(*find_renames(["_orig_mod.a.w", "_orig_mod.b.w"], ["a.w", "b.w"]))
    rename([(r"^_orig_mod\.", "")])
    >>> print(*find_renames(["a.w", "b.w"], ["model.a.w", "model.b.w", "step"], ["step"]))
    rename([(r"^(?=a\.|b\.)", "model.")])
    """
    rules: tuple[Rule, ...] = ()
    now = {name: name for name in missing}  # by wanted name, what the rules make of it
    free = set(saved) - set(fitting)
    while len(rules) < _RULES:
        taken = free.intersection(now.values())
        left = {old: new for old, new in now.items() if new not in taken}
        ways = _best_rules(left, free - taken, [*fitting, *taken], fits)
        if any(way.disagrees(ways[0]) for way in ways):
            fit = [way for way in ways if all(fits(*pair) for pair in way.names.items())]
            if not rules and len(fit) != 1:
                return tuple(ways) if all(way.sure for way in ways) else ()
            ways = fit if not rules else []
        if not ways:
            break
        rules += ways[0].rules
        now = dict(zip(now, rules[-1].apply(list(now.values())), strict=True))
    names = {old: new for old, new in now.items() if new in free}
    return (Renames(rules, names),) if rules else ()


def _best_rules(
    missing: Mapping[str, str], free: set[str], fixed: Collection[str], fits: Fits
) -> list[Renames]:
    """Return the rules that find the most names, each different ones, and change no fixed name."""
    ways: dict[frozenset[tuple[str, str]], Renames] = {}
    names = list(missing.values())
    for rule in _promising(names, free, fixed):
        after = rule.apply(names)
        pairs = zip(missing, after, strict=True)
        renamed = {old: new for old, new in pairs if new in free}
        if len(set(after)) == len(after) and (rule.sure or _is_safe(rule, names, renamed, fits)):
            ways.setdefault(frozenset(renamed.items()), Renames((rule,), renamed))
    most = max((len(way.names) for way in ways.values()), default=0)
    enough = most == len(missing) or (most > 1 and most * _SHARE >= len(missing))
    return [way for way in ways.values() if enough and len(way.names) == most]


def _promising(names: Sequence[str], free: set[str], fixed: Collection[str]) -> Iterator[Rule]:
    """Yield the rules that find the most of a few names, and change no fixed name."""
    # A deterministic sample: names in an arbitrary order that is equal everywhere.
    probe = nsmallest(_PROBED, names, key=lambda n: crc32(n.encode("utf-8", "surrogatepass")))
    rules = dict.fromkeys(_candidates(names, sorted(free)))
    hits = {rule: len(free.intersection(rule.apply(probe))) for rule in rules}
    few = len(probe) / _SHARE / 2
    likely = [rule for rule in hits if hits[rule] > few]
    seen = set[tuple[str, ...]]()
    for rule in nlargest(_TRIED, likely, key=lambda rule: (hits[rule], rule.sure)):
        for narrow in _narrowed(rule, names, fixed):
            effect = tuple(narrow.apply(probe))
            if effect not in seen:
                seen.add(effect)
                yield narrow


def _is_safe(rule: Rule, names: Sequence[str], renamed: Mapping[str, str], fits: Fits) -> bool:
    """Return True if a replacing rule covers all names with its first step, and fits."""
    changed = re.compile(rule.pattern)
    steps = {name.partition(".")[0] for name in names if changed.search(name)}
    is_common = all(changed.search(name) for name in names if name.partition(".")[0] in steps)
    return is_common and all(fits(old, new) for old, new in renamed.items())


def _candidates(missing: Sequence[str], free: Sequence[str]) -> Iterator[Rule]:
    """Yield rules that would find some of the missing names, simple ones first."""
    sample = missing[:: -(-len(missing) // _SAMPLED) or 1]
    if len(missing) > 1:  # prefixes that do not end with a dot
        old, new = _common_start(missing), _common_start(free)
        same = len(_common_start([old[::-1], new[::-1]]))  # which both keep at the end
        old, new = old[: len(old) - same], new[: len(new) - same]
        if not (old and new):
            yield Rule(f"^{re.escape(old)}", _plain(new))
    for name in sample:
        for front, old_steps, new_steps in _differences(name, free)[:_CANDIDATES]:
            sure = _within(old_steps, new_steps) or _within(new_steps, old_steps)
            if sure or (len(missing) > 1 and not front):
                yield from _rules((*front, *old_steps), (*front, *new_steps), sure)
    for step in dict.fromkeys(step for name in sample for step in name.split(".")[:-1]):
        yield Rule(rf"(?<![^.]){re.escape(step)}\.", "")  # wherever it stands


def _differences(name: str, free: Sequence[str]) -> list[tuple[Steps, Steps, Steps]]:
    """Compare a name with the most similar saved ones, step by step.

    Returns:
        For each: the common steps at the front, those of the name alone, those of the saved one.

    >>> _differences("model._orig_mod.a.w", ["a.w", "model.a.w", "model.b.w"])
    [(['model'], ['_orig_mod'], [])]
    >>> _differences("a.k.w", ["b.q.w"])
    []
    """
    steps = name.split(".")
    alike, tail = _ending(steps, 2, free), 2
    while closer := _ending(steps, tail + 1, alike):
        alike, tail = closer, tail + 1
    if not alike:
        alike, tail = _ending(steps, 1, free), 1
    differences = []
    for other in nsmallest(_ALIKE, alike, key=len):
        rest = other.split(".")[:-tail]
        pairs = zip(steps[:-tail], rest, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        old, new = steps[same:-tail], rest[same:]
        if tail > 1 or not (old and new):
            differences.append((steps[:same], old, new))
    least = min((len(old) + len(new) for _, old, new in differences), default=0)
    return [parts for parts in differences if len(parts[1]) + len(parts[2]) == least]


def _ending(steps: Steps, count: int, names: Sequence[str]) -> Sequence[str]:
    """Return the names that end with the last steps of another; none if it has fewer steps."""
    end = ".".join(steps[-count:])
    inner = f".{end}"
    return [n for n in names if n.endswith(inner) or n == end] if count <= len(steps) else []


def _within(some: Steps, steps: Steps) -> bool:
    """Return True if some steps are a subsequence of others."""
    rest = iter(steps)
    return all(step in rest for step in some)


def _rules(old: Steps, new: Steps, sure: bool) -> Iterator[Rule]:
    """Yield rules that replace the first steps of a name by others."""
    numbers = [step for step in new if step.isdigit()]
    if numbers and numbers == [step for step in old if step.isdigit()]:
        many = "".join(r"(\d+)\." if s.isdigit() else rf"{re.escape(s)}\." for s in old)
        group = iter(range(1, len(numbers) + 1))
        same = "".join(rf"\{next(group)}." if s.isdigit() else f"{_plain(s)}." for s in new)
        yield Rule(f"^{many}", same, sure)
    before = "".join(rf"{re.escape(step)}\." for step in old)
    yield Rule(f"^{before}", "".join(f"{_plain(step)}." for step in new), sure)


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


def _common_start(names: Collection[str]) -> str:
    """Return the common prefix of all names."""
    pairs = zip(min(names, default=""), max(names, default=""), strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _head(name: str) -> str:
    """Return an expression for the start of names with the same first step."""
    first, dot, _ = name.partition(".")
    return re.escape(first) + (r"\." if dot else "$")


def _plain(text: str) -> str:
    """Return a text escaped for use as a replacement."""
    return text.replace("\\", r"\\")


def _code(text: str) -> str:
    """Return a string as Python source."""
    if '"' in text or not text.isprintable() or text.endswith("\\"):
        return repr(text)
    return f'r"{text}"' if "\\" in text else f'"{text}"'
