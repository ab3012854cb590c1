"""Lists of names in short: what a pass does to the layers of a model, on a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

_WIDE: Final = 75  # characters of names in a cell, unless one name is longer
_BETWEEN: Final = re.compile("(: | → )")
_NUMBER: Final = re.compile(r"(?<![^. ])[0-9]+(?![^. ])")  # a part of a name that is a number


def few(names: Sequence[str]) -> str:
    """List names in short: those that differ only by numbers once, and as many as fit.

    >>> few(["layers.0.w", "layers.1.w", "step"])
    'layers.#.w (2), step'
    >>> few(["qkv → k", "qkv → q", "qkv → v", "w1 → w13", "w3 → w13"])
    'qkv → k, q, v; w1, w3 → w13'
    >>> few([f"{name}: float32 → int8" for name in "abcdef"])
    'a, b, c, d, e, f: float32 → int8 (6)'
    >>> few([f"{letter * 30}.w" for letter in "abcd"])
    'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.w, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.w, … 2 more'
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("#", name), []).append(name)
    lines = [_line(text if len(some) > 1 else some[0], len(some)) for text, some in alike.items()]
    groups = _grouped(lines)
    texts = [_text(group) for group in groups]
    fitting = _fitting(texts)
    left = sum(line.names for group in groups[fitting:] for line in group)
    mark = "; " if any(" → " in text for text in texts) else ", "
    return mark.join([*texts[:fitting], *([f"… {left:,} more"] if left else [])])


class _Line(NamedTuple):
    """What a pass makes of some names: one before, one after, or several of either."""

    old: str
    between: str  # " → ", or ": " before a dtype or shape; empty if nothing becomes of it
    new: str
    names: int  # how many there are of it, which differ only by numbers


def _line(text: str, names: int) -> _Line:
    old, sign, new = (*_BETWEEN.split(text, maxsplit=1), "", "")[:3]
    return _Line(old, sign, new, names)


def _grouped(lines: Sequence[_Line]) -> list[list[_Line]]:
    """Put lines together that say what one name becomes, or the same of several names."""
    olds, news = Counter(line.old for line in lines), Counter(line.new for line in lines)
    groups: dict[tuple[str, str], list[_Line]] = {}
    for line in lines:
        old = "" if line.new and news[line.new] > 1 and olds[line.old] == 1 else line.old
        groups.setdefault((old, "" if olds[line.old] > 1 else line.new), []).append(line)
    return list(groups.values())


def _text(lines: Sequence[_Line]) -> str:
    """Write a group of lines as one."""
    between, counts = lines[0].between, [line.names for line in lines]
    alike = max(counts) if between == " → " else sum(counts)
    sides = []
    for names in ([line.old for line in lines], [line.new for line in lines]):
        known = list(dict.fromkeys(names))
        fitting = _fitting(known)
        sides.append(", ".join([*known[:fitting], *(["…"] if fitting < len(known) else [])]))
    return f"{between.join(sides)}{f' ({alike:,})' if alike > 1 else ''}"


def _fitting(texts: Sequence[str]) -> int:
    """Return how many of some texts fit on a line; at least one."""
    return max(1, sum(end <= _WIDE for end in accumulate(len(text) + 2 for text in texts)))
