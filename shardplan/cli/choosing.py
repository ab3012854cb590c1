"""Which names does a pattern mean? A name, the start of names, or what a shell would match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Final

from shardplan.planning import nearest_hint, nearest_names

__all__ = ["choose", "continuations", "hint", "starts"]

_HARMLESS: Final = re.compile(r"[\w.][\w.,/@%+=:-]*")


def choose(pattern: str, names: Sequence[str]) -> list[int]:
    """Return the numbers of the names that a pattern means.

    A name that is spelled out counts as itself, whatever characters are in it; then a start of
    names, up to a dot; only then is it taken as a shell would.

    >>> names = ["w", "w[0]", "layers.0.w", "layers.1.w"]
    >>> choose("w[0]", names), choose("layers.1", names), choose("*.w", names)
    ([1], [3], [2, 3])
    """
    start = f"{pattern.rstrip('.')}."
    rows = [row for row, n in enumerate(names) if n == pattern or n.startswith(start)]
    return rows or [row for row, name in enumerate(names) if fnmatchcase(name, pattern)]


def starts(name: str) -> Iterator[str]:
    """Give the starts of a name that end before a dot.

    >>> list(starts("model.layers.0"))
    ['model', 'model.layers']
    """
    return accumulate(name.split(".")[:-1], lambda a, b: f"{a}.{b}")


def continuations(start: str, names: Iterable[str]) -> list[str]:
    """Return how what was typed can go on, up to the next dot.

    >>> continuations("la", ["layers.0.w", "layers.1.w", "step"])
    ['layers']
    >>> continuations("layers.", ["layers.0.w", "layers.1.w", "step"])
    ['layers.0', 'layers.1']

    A shell takes what it is offered as if it had been typed, and a stranger may have chosen the
    names: those in which any character means something to a shell are not offered.

    >>> continuations("", ["step", "$(reboot)", "a b", "-x"])
    ['step']
    """
    steps = start.count(".") + 1
    found = (name for name in names if name.startswith(start))
    offers = dict.fromkeys(".".join(name.split(".")[:steps]) for name in found)
    return [offer for offer in offers if _HARMLESS.fullmatch(offer)]


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return the end of a message about a pattern without a match: names and starts like it.

    >>> hint("model.layerz", ["model.layers.0.w", "step"])
    '; nearest: model.layers, model.layers.0, model.layers.0.w'
    """
    known = dict.fromkeys(names)
    for name in names:
        known |= dict.fromkeys(starts(name))
    return nearest_hint(nearest_names(pattern.strip("*."), known))
