"""Patterns of names: what their wildcards match is put into other patterns.

``*`` stands for any characters, as few as possible, and ``#`` for a number. Other characters stand
for themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import listed


class Match(NamedTuple):
    """What the wildcards of a pattern matched."""

    stars: tuple[str, ...]
    numbers: tuple[int, ...]


@lru_cache(maxsize=1 << 10)
def _expression(pattern: str) -> re.Pattern[str]:
    wild = {"*": "(.*?)", "#": "(0|[1-9][0-9]*)"}
    parts = re.split("([*#])", pattern)
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts), re.DOTALL)


def matched(pattern: str, name: str) -> Match | None:
    """Return what the wildcards of a pattern match in a name; None if it does not match.

    >>> matched("*.experts.#.w", "layers.0.experts.12.w")
    Match(stars=('layers.0',), numbers=(12,))
    """
    found = _expression(pattern).fullmatch(name)
    if found is None:
        return None
    pairs = list(zip(re.findall("[*#]", pattern), found.groups(), strict=True))
    stars = tuple(text for kind, text in pairs if kind == "*")
    return Match(stars, tuple(int(text) for kind, text in pairs if kind == "#"))


def filled(pattern: str, match: Match) -> str:
    """Return a pattern with what was matched in place of its wildcards.

    >>> filled("*.w.#", Match(("layers.0",), (12,)))
    'layers.0.w.12'
    """
    wild = {"*": iter(match.stars), "#": map(str, match.numbers)}
    parts = re.split("([*#])", pattern)
    return "".join(next(wild[part]) if part in wild else part for part in parts)


def numbered(match: Match, number: int) -> Match:
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
