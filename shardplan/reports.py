"""What did it take? Reports of saves and loads, readable as they print."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs

from shardplan.planning import Issue
from shardplan.planning.text import human_bytes

__all__ = ["LoadReport", "SaveReport", "Stopwatch"]


@attrs.frozen(repr=False)
class SaveReport:
    """What a save did.

    Attributes:
        path: Where the checkpoint lies.
        save_id: The name of the save, part of its files' names.
        files: How many data files were written here.
        nbytes: Their size, in bytes.
        seconds: Seconds by phase: plan, write, commit.
        leftovers: Files of the checkpoint that was replaced which could not be removed.
    """

    path: str
    save_id: str
    files: int
    nbytes: int
    seconds: Mapping[str, float]
    leftovers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"saved {human_bytes(self.nbytes)} in {self.files:,} files, {_times(self.seconds)}"


@attrs.frozen(repr=False)
class LoadReport:
    """What a load did, and how the state dict and the checkpoint agree.

    Attributes:
        missing: Names that were asked for and are not in the checkpoint.
        unexpected: Names in the checkpoint that were not asked for.
        mismatched: What is there but did not fit, with the reason.
        bytes_needed: Bytes of the elements that were wanted.
        bytes_read: Bytes that were fetched for them.
        requests: How many ranges were asked for.
        verified: How many chunks were read whole and found to fit their checksums.
        seconds: Seconds by phase: open, plan, read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Issue, ...]
    bytes_needed: int
    bytes_read: int
    requests: int
    verified: int
    seconds: Mapping[str, float]

    @property
    def amplification(self) -> float:
        """How many bytes were fetched for each byte that was needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    def __repr__(self) -> str:
        counts = (
            f"{len(self.missing):,} missing, {len(self.unexpected):,} unexpected, "
            f"{len(self.mismatched):,} mismatched"
        )
        read = f"loaded {human_bytes(self.bytes_read)} ({self.amplification:.2f} × what was needed)"
        return f"{read}; {counts}; {_times(self.seconds)}"


def _times(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {time:.3f} s" for phase, time in seconds.items())


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
