"""Which checkpoints of a run stay and which go.

Only whole checkpoints of a known time are counted. Anything else stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import attrs


@attrs.frozen
class RunEntry:
    """A checkpoint of a run.

    Attributes:
        name: Its folder.
        created: When it was made, in seconds since 1970; None if that is not known.
        whole: Whether all of it is there.
    """

    name: str
    created: float | None
    whole: bool = True

    @property
    def age_key(self) -> tuple[float, list[Any]]:
        """Sorts by time, then by name, with numbers in numeric order.

        >>> entries = [RunEntry("a-10", 1.0), RunEntry("a-9", 1.0), RunEntry("x", 0.5)]
        >>> [entry.name for entry in sorted(entries, key=lambda entry: entry.age_key)]
        ['x', 'a-9', 'a-10']
        """
        parts = re.split("([0-9]+)", self.name)  # every other one is a number
        numbered = [int(part) if n % 2 else part for n, part in enumerate(parts)]
        return self.created or 0.0, numbered


@attrs.frozen
class Policy:
    """How many of the newest checkpoints stay; at least 1."""

    keep_last: int = attrs.field()

    @keep_last.validator
    def _check(self, _: Any, count: Any) -> None:
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise TypeError(
                f"keep_last says how many checkpoints stay, as a whole number; not {count!r}"
            )
        if int(count) < 1:
            raise ValueError(f"keep_last must be at least 1, not {count}")


class Retained(NamedTuple):
    """The checkpoints that stay and those that go, the newest last."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]


def by_age(entries: Iterable[RunEntry]) -> list[RunEntry]:
    """Return the checkpoints that can be loaded and have a time, the newest last."""
    dated = (entry for entry in entries if entry.whole and entry.created is not None)
    return sorted(dated, key=lambda entry: entry.age_key)


def retain(entries: Iterable[RunEntry], policy: Policy) -> Retained:
    """Choose which checkpoints stay and which go: of those that are whole, the newest stay.

    >>> steps = [RunEntry("9", 1.0), RunEntry("10", 2.0), RunEntry("cut", 3.0, whole=False)]
    >>> retain(steps, Policy(keep_last=1))
    Retained(keep=('10',), drop=('9',))
    """
    names = [entry.name for entry in by_age(entries)]
    return Retained(tuple(names[-policy.keep_last :]), tuple(names[: -policy.keep_last]))
