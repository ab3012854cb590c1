"""Which checkpoints of a run stay and which go, and which files that killed saves left behind.

Only whole checkpoints of a known time are counted. Anything else stays where it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import attrs

from ..frozen import FrozenDict, freeze


@attrs.frozen
class RunEntry:
    """A checkpoint of a run."""

    name: str  # its folder
    created: float | None  # when it was made, in seconds since 1970; None if that is not known
    whole: bool = True  # whether all of it is there
    step: int | None = None  # the step after which it was saved; None if that is not known
    # What was measured at that step, by name.
    metrics: Mapping[str, float] = attrs.field(factory=FrozenDict, converter=freeze)
    # Whether it must stay: it is being read, or another checkpoint refers to it.
    in_use: bool = False

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


def _count(what: str, value: object) -> None:
    """Raise unless a value is a whole number, and at least 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    if value.__index__() < 1:
        raise ValueError(f"{what} must be at least 1, not {value}")


@attrs.frozen
class Best:
    """Keep the checkpoints with the best values of a metric.

    Attributes:
        metric: Its name.
        mode: Whether small (``"min"``) or large values (``"max"``) are good.
        count: How many checkpoints stay.
    """

    metric: str
    mode: Literal["min", "max"] = attrs.field(
        default="min", validator=attrs.validators.in_(("min", "max"))
    )
    count: int = 1

    def __attrs_post_init__(self) -> None:
        _count("the number of best checkpoints", self.count)

    def of(self, entries: Iterable[RunEntry]) -> list[RunEntry]:
        """Return the best of some checkpoints, the best first; of equals, the newest first.

        Those without the metric, or for which it is not a number, do not count.
        """
        sign = 1.0 if self.mode == "min" else -1.0
        known = [e for e in entries if not math.isnan(e.metrics.get(self.metric, math.nan))]
        known.sort(key=lambda entry: entry.age_key, reverse=True)
        return sorted(known, key=lambda entry: sign * entry.metrics[self.metric])[: self.count]


def _best(value: Best | Sequence[Any] | None) -> Best | None:
    return value if value is None or isinstance(value, Best) else Best(*value)


@attrs.frozen
class Keep:
    """Which checkpoints of a run stay: those that any of these names.

    Attributes:
        last: How many of the newest; at least 1, so that there is always one to load.
        every: Those whose step is a multiple of this.
        best: The best by a metric, as a `Best` or its fields: ``("loss", "min", 2)``.
    """

    last: int = 1
    every: int | None = None
    best: Best | None = attrs.field(default=None, converter=_best)

    def __attrs_post_init__(self) -> None:
        _count("keep_last", self.last)
        if self.every is not None:
            _count("Keep.every", self.every)


@attrs.frozen
class LeftFile:
    """A file that a killed save may have left behind."""

    name: str  # the file
    save: str  # the save that wrote it
    modified: float  # when it was written, in seconds since 1970


class Retained(NamedTuple):
    """The names of what stays and of what goes; checkpoints with the newest last."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]


def by_age(entries: Iterable[RunEntry]) -> list[RunEntry]:
    """Return the checkpoints that can be loaded and have a time, the newest last."""
    dated = (entry for entry in entries if entry.whole and entry.created is not None)
    return sorted(dated, key=lambda entry: entry.age_key)


def retain(entries: Iterable[RunEntry], policy: Keep) -> Retained:
    """Choose which checkpoints stay and which go. What is not whole, or has no time, is in neither.

    >>> steps = [RunEntry("9", 1.0, step=9), RunEntry("10", 2.0, step=10), RunEntry("11", 3.0)]
    >>> retain(steps, Keep(last=1))
    Retained(keep=('11',), drop=('9', '10'))
    >>> retain(steps, Keep(last=1, every=5)).drop
    ('9',)
    """
    known = by_age(entries)
    kept = {entry.name for entry in known[-policy.last :]}
    kept |= {entry.name for entry in known if entry.in_use}
    if policy.every is not None:
        kept |= {e.name for e in known if e.step is not None and e.step % policy.every == 0}
    if policy.best is not None:
        kept |= {entry.name for entry in policy.best.of(known)}
    names = [entry.name for entry in known]
    keep = tuple(name for name in names if name in kept)
    return Retained(keep, tuple(name for name in names if name not in kept))


def retain_files(files: Iterable[LeftFile], before: float) -> Retained:
    """Choose which files go: all files of a save that has written none after ``before``.

    A save in progress may have written some of its files long ago.

    >>> files = [LeftFile("a1", "a", 1.0), LeftFile("b1", "b", 1.0), LeftFile("b2", "b", 9.0)]
    >>> retain_files(files, before=5.0)
    Retained(keep=('b1', 'b2'), drop=('a1',))
    """
    files = tuple(files)
    young = {file.save for file in files if file.modified > before}
    keep = tuple(file.name for file in files if file.save in young)
    return Retained(keep, tuple(file.name for file in files if file.save not in young))
