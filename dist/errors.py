"""What can go wrong between ranks, as errors that name the ranks and carry text alone."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import attrs

__all__ = ["CheckpointError", "Failure", "LostRanksError"]

_LONGEST = 20_000


@attrs.frozen
class Failure:
    """What happened on one rank, in words: no live exception crosses between ranks.

    Attributes:
        rank: The global rank on which it happened.
        step: The name of the step it happened in.
        type: The error's type, such as ``ValueError``; ``LostRank`` if the rank itself is gone.
        text: The error's message.
        traceback: Its traceback as printed on that rank; empty if there is none.
    """

    rank: int
    step: str
    type: str
    text: str
    traceback: str = ""

    def __str__(self) -> str:
        lines = self.text.splitlines() or [""]
        left = len(lines) - 1
        more = f" … and {left} more line{'s' * (left > 1)}" if left else ""
        return f"rank {self.rank}, {self.step}: {self.type}: {lines[0]}{more}"

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
        return cls(rank, step, type(error).__name__, _cut(text), _cut(trace))


class CheckpointError(Exception):
    """A step that failed on some ranks, told alike on every rank.

    Attributes:
        failures: What happened, one entry per failing rank, by rank.

    >>> raise CheckpointError([Failure(1, "write", "OSError", "disk full", "Traceback …")])
    Traceback (most recent call last):
    shardplan.dist.errors.CheckpointError: failed on rank 1 of the job
    rank 1, write: OSError: disk full
    <BLANKLINE>
    --- rank 1 ---
    Traceback …
    """

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures: tuple[Failure, ...] = tuple(
            sorted(failures, key=lambda failure: failure.rank)
        )
        super().__init__(self.failures)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that failed or were lost, ascending."""
        return tuple(sorted({failure.rank for failure in self.failures}))

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        head = f"failed on rank{'s' * (len(self.ranks) > 1)} {ranks} of the job"
        traces = [
            f"\n--- rank {failure.rank} ---\n{failure.traceback.rstrip()}"
            for failure in self.failures
            if failure.traceback
        ]
        return "\n".join([head, *map(str, self.failures), *traces])


class LostRanksError(ConnectionError):
    """Ranks that did not come to a collective, left it, or died in it.

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
        return "; ".join(f"rank {rank} {reason}" for rank, reason in self.reasons.items())

    def failures(self, step: str) -> list[Failure]:
        """Return one failure per lost rank, for a `CheckpointError`."""
        return [Failure(rank, step, "LostRank", why) for rank, why in self.reasons.items()]


def _cut(text: str) -> str:
    """Keep both ends of a text too long to send; make it one that UTF-8 can carry."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
