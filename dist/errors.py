"""Errors between ranks: they name the ranks, and carry only text."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from shardplan.planning import listed, span

T = TypeVar("T")

_LONGEST = 20_000
_SHOWN = 8  # ways to fail that a message lists
_LINES = 9  # of a traceback that a message shows
# Types of errors that shardplan raises with a message of its own, and kinds of them that have none.
_SPEAKING = (ValueError, TypeError, LookupError, OSError, ImportError)
_MUTE = (KeyError, IndexError, UnicodeError)

MOST = 64
"""Ways to fail that are reported in full: thousands of ranks have little to add."""


@attrs.frozen
class Failure:
    """What happened on one rank, as text: exceptions are not sent between ranks.

    Attributes:
        rank: The global rank on which it happened.
        step: The name of the step it happened in.
        type: The error's type, such as ``ValueError``; ``LostRank`` if the rank itself is gone.
        text: The error's message.
        traceback: Its traceback as printed on that rank; empty if there is none.
        expected: Whether it was raised on purpose, with a full message: a mistake of the caller, a
            damaged file, a full disk. Its traceback is then not printed.
    """

    rank: int
    step: str
    type: str
    text: str
    traceback: str = ""
    expected: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.what}"

    @property
    def what(self) -> str:
        """The step, the error's type, and the first line of its message."""
        lines = self.text.splitlines() or [""]
        left = len(lines) - 1
        more = f" … and {left} more line{'s' * (left > 1)}" if left else ""
        return f"{self.step}: {self.type}: {lines[0]}{more}"

    @classmethod
    def of(cls, error: BaseException, rank: int, step: str) -> Failure:
        """Describe an error that is being handled on this rank.

        >>> print(Failure.of(ValueError("no space"), rank=3, step="write"))
        rank 3, write: ValueError: no space
        """
        try:
            text = "; ".join([str(error), *getattr(error, "__notes__", [])])
        except Exception as worse:
            text = f"its message cannot be printed: {type(worse).__name__}"
        try:
            trace = "".join(traceback.format_exception(error))
        except Exception as worse:
            trace = f"its traceback cannot be printed: {type(worse).__name__}"
        kind = type(error).__name__
        return cls(rank, step, kind, _cut(text), _cut(trace), _is_expected(error))


def _is_expected(error: BaseException) -> bool:
    """Return whether an error was raised by shardplan on purpose.

    A pass, a ``state_dict()`` or a library may raise the same types, but elsewhere.
    """
    if type(error).__module__.startswith("shardplan."):
        return True
    if not isinstance(error, _SPEAKING) or isinstance(error, _MUTE):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("shardplan.")


class CheckpointError(Exception):
    """A step that failed on some ranks, raised alike on every rank.

    Its text says once what several ranks have in common, and shows the ends of tracebacks of
    unexpected errors.

    Attributes:
        failures: What happened, one entry per failing rank, by rank. If they failed in very many
            ways, only the first of these have tracebacks.
        own: The error that this rank itself raised, if it did; it stays in this process.

    >>> raise CheckpointError([Failure(r, "write", "OSError", "disk full") for r in range(3)])
    Traceback (most recent call last):
    shardplan.dist.errors.CheckpointError: failed on ranks 0-2 of the job
    ranks 0-2, write: OSError: disk full
    """

    def __init__(self, failures: Iterable[Failure], own: Exception | None = None) -> None:
        self.failures: tuple[Failure, ...] = tuple(
            sorted(failures, key=lambda failure: failure.rank)
        )
        self.own = own
        super().__init__(self.failures)

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: value for name, value in self.__dict__.items() if name != "own"}
        return type(self), (self.failures,), kept

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that failed or were lost, ascending."""
        return tuple(sorted({failure.rank for failure in self.failures}))

    def __str__(self) -> str:
        title = f"failed on {span(self.ranks, MOST)} of the job"
        ways = _ranks_by(self.failures, lambda f: f"{f.step}: {f.type}: {f.text}")
        texts = _few([f"{span(ranks, MOST)}, {way}" for way, ranks in ways.items()])
        surprises = [failure for failure in self.failures if not failure.expected]
        traces = _ranks_by(surprises, lambda failure: _ending(failure.traceback))
        ends = _few([f"--- {span(ranks)} ---\n{end}" for end, ranks in traces.items() if end])
        return "\n".join([title, *texts, *(f"\n{end}" for end in ends)])

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each way to fail."""
        ways = _ranks_by(self.failures, lambda f: (f.what, f.text))
        return tuple(_few([f"{span(ranks, MOST)}, {what}" for (what, _), ranks in ways.items()]))

    @property
    def tracebacks(self) -> str:
        """The tracebacks of all ranks, without repetitions."""
        traces = _ranks_by(self.failures, lambda failure: failure.traceback.rstrip())
        return "\n".join(f"--- {span(ranks)} ---\n{trace}" for trace, ranks in traces.items())


def _few(texts: Sequence[str]) -> list[str]:
    """Return the first texts, and how many more there are."""
    more = [f"and {len(texts) - _SHOWN:,} more: this error's `failures` has all"]
    return [*texts[:_SHOWN], *(more if len(texts) > _SHOWN else ())]


def _ending(trace: str) -> str:
    """Return the last lines of a traceback."""
    lines = trace.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= _LINES else ["…", *lines[-_LINES:]])


def _ranks_by(failures: Iterable[Failure], key: Callable[[Failure], T]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for failure in failures:
        found.setdefault(key(failure), []).append(failure.rank)
    return found


def thinned(failures: Sequence[Failure]) -> list[Failure]:
    """Drop repeated failures; beyond `MOST` ways to fail, shorten texts and drop tracebacks.

    >>> far = thinned([Failure(r, "read", "E", f"{r}" * 999, "Traceback") for r in range(65)])
    >>> len(far[0].text), far[0].traceback, len(far[64].text), far[64].traceback
    (999, 'Traceback', 300, '')
    """
    found, ways = list[Failure](), set[tuple[str, ...]]()
    for failure in dict.fromkeys(failures):
        way = (failure.step, failure.type, failure.text, failure.traceback)
        if way not in ways and len(ways) >= MOST:
            failure = attrs.evolve(failure, text=failure.text[:300], traceback="")
        else:
            ways.add(way)
        found.append(failure)
    return found


class LostRanksError(ConnectionError):
    """Ranks that did not take part in a collective, left it, or died in it.

    Attributes:
        reasons: Per lost global rank, what is known about it.

    >>> raise LostRanksError({2: "did not come to gather within 5 s"})
    Traceback (most recent call last):
    shardplan.dist.errors.LostRanksError: rank 2 did not come to gather within 5 s
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons: dict[int, str] = dict(sorted(reasons.items()))
        super().__init__(self.reasons)

    def __str__(self) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, reason in self.reasons.items():
            ranks.setdefault(reason, []).append(rank)
        each = [f"{'each of ' * (len(r) > 1)}{span(r)} {why}" for why, r in ranks.items()]
        return listed(each, quote="", between="; ", attribute="reasons")

    def failures(self, step: str) -> list[Failure]:
        """Return one failure per lost rank, for a `CheckpointError`."""
        return [Failure(rank, step, "LostRank", why) for rank, why in self.reasons.items()]


def _cut(text: str) -> str:
    """Return both ends of a text that is too long to send, valid in UTF-8."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
