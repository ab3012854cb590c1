"""Lists of names in short: what a pass does to the layers of a model, on a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import attrs

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
    lines = []
    for text, some in alike.items():
        parts = _BETWEEN.split(text if len(some) > 1 else some[0], maxsplit=1)
        old, sign, new = parts if len(parts) == 3 else (parts[0], "", "")
        lines.append(_Line(old, sign, new, len(some)))
    merged = _merged(lines)
    texts = [line.text for line in merged]
    ends = list(accumulate(len(text) + 2 for text in texts))
    fitting = max(1, sum(end <= _WIDE for end in ends))
    left = sum(line.names for line in merged[fitting:])
    mark = "; " if any(" → " in text for text in texts) else ", "
    return mark.join([*texts[:fitting], *([f"… {left:,} more"] if left else [])])


class _Line(NamedTuple):
    """What a pass makes of some names: one before, one after, or several of either."""

    old: str
    between: str  # " → ", or ": " before a dtype or shape; empty if nothing becomes of it
    new: str
    names: int  # how many there are of it, which differ only by numbers


@attrs.frozen
class _Lines:
    """Lines that are shown as one."""

    lines: Sequence[_Line]

    @property
    def names(self) -> int:
        return sum(line.names for line in self.lines)

    @property
    def text(self) -> str:
        between = self.lines[0].between
        alike = max(line.names for line in self.lines) if between == " → " else self.names
        sides = _first(line.old for line in self.lines), _first(line.new for line in self.lines)
        return f"{between.join(sides)}{f' ({alike:,})' if alike > 1 else ''}"


def _merged(lines: Sequence[_Line]) -> list[_Lines]:
    """Put lines together that say what one name becomes, or the same of several names."""
    olds, news = Counter(line.old for line in lines), Counter(line.new for line in lines)
    groups: dict[tuple[str, str], list[_Line]] = {}
    for line in lines:
        old = "" if line.new and news[line.new] > 1 and olds[line.old] == 1 else line.old
        groups.setdefault((old, "" if olds[line.old] > 1 else line.new), []).append(line)
    return [_Lines(some) for some in groups.values()]


def _first(names: Iterable[str]) -> str:
    """List the first of some names, as many as fit."""
    known = list(dict.fromkeys(names))
    fitting = max(1, sum(end <= _WIDE for end in accumulate(len(name) + 2 for name in known)))
    return ", ".join([*known[:fitting], *(["…"] if fitting < len(known) else [])])
