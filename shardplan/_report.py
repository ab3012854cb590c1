"""Reports of saves and loads, and the stopwatch that fills them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs

from shardplan.dist import Comm
from shardplan.planning import (
    Issue,
    Sheet,
    Table,
    counted,
    human_bytes,
    human_seconds,
    leaves,
    listed,
)

__all__ = [
    "LOG",
    "LoadReport",
    "RankReport",
    "SaveReport",
    "Stopwatch",
    "dropped_text",
    "logged",
    "place_name",
    "rank_report",
    "sheet_of",
    "slowest_ranks",
    "times_text",
]

LOG: Final = logging.getLogger("shardplan")
"""What everything is logged to."""

T = TypeVar("T")


@attrs.frozen
class RankReport:
    """What one rank did, until it told the others.

    What came after that, waiting for them and the last exchange, only its own report tells.

    Attributes:
        rank: Its number in the job.
        seconds: Seconds by phase.
        nbytes: Bytes that it wrote to storage, or read from there.
        sent: Bytes that it sent to other ranks.
        device: Where its tensors are, such as ``cpu`` or ``cuda:3``.
        phase_bytes: Bytes by phase: what was staged, exchanged with other ranks to agree on a plan
            and to report, written, read.
    """

    rank: int
    seconds: Mapping[str, float]
    nbytes: int
    sent: int = 0
    device: str = "cpu"
    phase_bytes: Mapping[str, int] = attrs.field(factory=dict)


def rank_report(
    comm: Comm, watch: Stopwatch, sd: Mapping[Any, Any], nbytes: int, sent: int = 0
) -> RankReport:
    """Return what this rank did so far, given the bytes that it moved to or from storage."""
    rank, seconds = comm.ranks[comm.rank], dict(watch.seconds)
    return RankReport(rank, seconds, nbytes, sent, device_of(sd), dict(watch.nbytes))


def device_of(sd: Mapping[Any, Any]) -> str:
    """Name the device that a state dict's tensors are on, the one way.

    >>> import torch
    >>> device_of({"step": 7, "w": torch.zeros(2)}), device_of({})
    ('cpu', 'cpu')
    """
    for _, value in leaves(sd):
        device = getattr(value, "device", None)
        if getattr(device, "type", "cpu") != "cpu":
            return _normal_device(device)
    return "cpu"


def _normal_device(device: Any) -> str:
    """Write a device the one way: ``cpu``, ``cuda:3``.

    >>> _normal_device("cpu:0"), _normal_device("cuda"), _normal_device("cuda:3")
    ('cpu', 'cuda:0', 'cuda:3')
    """
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "meta"):
        return kind
    torch = sys.modules.get("torch")
    if not index and torch is not None and kind == "cuda" and torch.cuda.is_available():
        index = str(torch.cuda.current_device())
    return f"{kind}:{index or 0}"


@attrs.frozen(repr=False)
class SaveReport:
    """What a save did.

    Attributes:
        path: Where the checkpoint lies.
        save_id: The name of the save, part of its files' names.
        files: How many data files were written, by all ranks together.
        nbytes: Their size, in bytes.
        seconds: This rank's seconds by phase: stage, open, plan, exchange, write, wait (for the
            other ranks), commit.
        leftovers: Files of the checkpoint that was replaced which could not be removed.
        how: How the plan came to be: ``"alone"``, ``"cached"``, ``"derived"`` or ``"gathered"``.
        slowest: By phase, the rank that took longest for it, and its seconds.
        ranks: What each rank did; on the coordinator all of them, elsewhere this one alone.
        phase_bytes: This rank's bytes by phase; see `RankReport`.
        dropped: The keys, on any rank, of what the planner left out: they were not saved.
    """

    path: str
    save_id: str
    files: int
    nbytes: int
    seconds: Mapping[str, float]
    leftovers: tuple[str, ...] = ()
    how: str = "alone"
    slowest: Mapping[str, tuple[int, float]] = attrs.field(factory=dict)
    ranks: tuple[RankReport, ...] = ()
    phase_bytes: Mapping[str, int] = attrs.field(factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def _told(self) -> str:
        return f"saved {human_bytes(self.nbytes)} in {counted(self.files, 'file')}"

    def __repr__(self) -> str:
        text = f"{self._told} (plan {self.how}), {times_text(self.seconds)}"
        notes = dropped_text(self.dropped, "saved")
        return "\n".join([text, *notes, *_slowest(self.slowest)])

    def _repr_html_(self) -> str:
        phases = (self.seconds, self.slowest, dropped_text(self.dropped, "saved"))
        return sheet_of(self._told, *phases, nbytes=self.phase_bytes).html()


@attrs.frozen(repr=False)
class LoadReport:
    """What a load did, and how the state dict and the checkpoint agree.

    Attributes:
        missing: Names that were asked for and are not in the checkpoint.
        unexpected: Names in the checkpoint that were not asked for.
        mismatched: What is there but did not fit, with the reason.
        bytes_needed: Bytes of the elements that this rank wanted.
        bytes_read: Bytes that this rank fetched from storage, for itself and for others.
        requests: How many ranges were asked for.
        verified: How many chunks were read whole and found to fit their checksums.
        seconds: This rank's seconds by phase: open, plan, exchange, read, wait (for the other
            ranks), hand over (to objects that keep their own state).
        bytes_received: Bytes that came from other ranks.
        total_read: Bytes that all ranks together fetched from storage.
        slowest: By phase, the rank that took longest for it, and its seconds.
        ranks: What each rank did; on the coordinator all of them, elsewhere this one alone.
        phase_bytes: This rank's bytes by phase; see `RankReport`.
        bytes_sent: Bytes that this rank sent to others.
        tied: Names that are not in the checkpoint, but share memory with one that is, by name.
        dropped: This rank's keys that the planner left out: they were not filled.
        bytes_unverified: Bytes that all ranks together read and nobody compared with a checksum: of
            chunks that were not read whole, of formats that have none, or all if ``verify`` was
            false.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Issue, ...]
    bytes_needed: int
    bytes_read: int
    requests: int
    verified: int
    seconds: Mapping[str, float]
    bytes_received: int = 0
    total_read: int = 0
    slowest: Mapping[str, tuple[int, float]] = attrs.field(factory=dict)
    ranks: tuple[RankReport, ...] = ()
    phase_bytes: Mapping[str, int] = attrs.field(factory=dict)
    bytes_sent: int = 0
    tied: Mapping[str, str] = attrs.field(factory=dict)
    dropped: tuple[str, ...] = ()
    bytes_unverified: int = 0

    @property
    def amplification(self) -> float:
        """How many bytes this rank fetched, for itself and for others, for each that it needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def _told(self) -> str:
        counts = (
            f"{len(self.missing):,} missing, {len(self.unexpected):,} unexpected, "
            f"{len(self.mismatched):,} mismatched"
        )
        read = f"loaded {human_bytes(self.bytes_read)} ({self.amplification:.2f} × what was needed)"
        if self.bytes_received or self.bytes_sent:
            moved = (self.bytes_needed, self.bytes_read, self.bytes_received, self.bytes_sent)
            needed, fetched, received, sent = map(human_bytes, moved)
            read = f"loaded {needed}: read {fetched}, received {received}, sent {sent}"
        if self.bytes_unverified:
            read += f", {human_bytes(self.bytes_unverified)} not verified"
        return f"{read}; {counts}"

    def __repr__(self) -> str:
        text = f"{self._told}; {times_text(self.seconds)}"
        notes = dropped_text(self.dropped, "filled")
        return "\n".join([text, *notes, *_slowest(self.slowest)])

    def _repr_html_(self) -> str:
        phases = (self.seconds, self.slowest, dropped_text(self.dropped, "filled"))
        return sheet_of(self._told, *phases, nbytes=self.phase_bytes).html()


def place_name(place: object) -> str:
    """Return a path or a store as text; anything else by its type, since it may be long.

    >>> place_name("runs/step-7"), place_name({"w": 1})
    ('runs/step-7', 'a dict')
    """
    if isinstance(place, (str, os.PathLike)):
        return os.fspath(place)
    return str(getattr(place, "url", f"a {type(place).__name__}"))


def dropped_text(names: Sequence[str], verb: str) -> list[str]:
    """Say what a planner left out, in a line, if it did.

    >>> dropped_text(["a", "b"], "saved")
    ['not saved, as the planner drops them: a, b']
    """
    text = f"not {verb}, as the planner drops them: {listed(names, quote='')}"
    return [text] if names else []


def logged(report: T, place: object = "", *, loud: bool = True, left: Sequence[str] = ()) -> T:
    """Log a report: its first line, and what must not be overlooked.

    Args:
        report: What was done; it is returned.
        place: Where, unless the report says so itself.
        loud: Whether this is news; what all ranks do alike is news on one of them.
        left: Files that no checkpoint needs any more, and that are still there.
    """
    where = place_name(place)
    told = f"{where}: " if where else ""
    LOG.log(logging.INFO if loud else logging.DEBUG, "%s%s", told, repr(report).splitlines()[0])
    if left and loud:
        count = counted(len(left), "file")
        LOG.warning("%s%s left over; prune removes them: %s", told, count, listed(left, quote=""))
    return report


def slowest_ranks(ranks: Iterable[RankReport]) -> dict[str, tuple[int, float]]:
    """Find, for each phase, the rank that took longest for it; who waits for others is not slow.

    >>> slowest_ranks([RankReport(0, {"write": 1.0}, 0), RankReport(1, {"write": 2.0}, 0)])
    {'write': (1, 2.0)}
    """
    found: dict[str, tuple[int, float]] = {}
    for one in ranks:
        for phase, seconds in one.seconds.items():
            if phase == "wait":
                continue
            if phase not in found or seconds > found[phase][1]:
                found[phase] = (one.rank, seconds)
    return found


def _slowest(slowest: Mapping[str, tuple[int, float]]) -> list[str]:
    if not slowest:
        return []
    told = (f"{phase} rank {rank} ({time:.3f} s)" for phase, (rank, time) in slowest.items())
    return [f"slowest: {', '.join(told)}"]


def sheet_of(
    title: str,
    seconds: Mapping[str, float],
    slowest: Mapping[str, tuple[int, float]] = MappingProxyType({}),
    notes: Iterable[str] = (),
    *,
    nbytes: Mapping[str, int] = MappingProxyType({}),
) -> Sheet:
    """Lay out a report: phases, and the slowest rank of each."""
    head = ("phase", "here", "bytes", *(("slowest rank", "there") if slowest else ()))
    rows = []
    for phase, mine in seconds.items():
        rank, longest = slowest.get(phase, ("", mine))
        there = (rank, human_seconds(longest)) if slowest else ()
        moved = human_bytes(nbytes[phase]) if phase in nbytes else ""
        rows.append((phase, human_seconds(mine), moved, *there))
    return Sheet(title, [Table(head, rows)], notes)


def times_text(seconds: Mapping[str, float]) -> str:
    """Write seconds by phase.

    >>> times_text({"plan": 0.25, "write": 1.5})
    'plan 0.250 s, write 1.500 s'
    """
    return ", ".join(f"{phase} {time:.3f} s" for phase, time in seconds.items())


class Stopwatch:
    """Seconds and bytes by phase. Time in a phase inside another one counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a phase, and log it."""
        before = self.seconds.get(name, 0.0)
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()
            LOG.debug("%s: %.3f s", name, self.seconds[name] - before)

    def count(self, name: str, nbytes: int) -> None:
        """Add some bytes to those that a phase moved."""
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def _turn(self) -> None:
        """Give the innermost phase the time since the last turn."""
        now = time.perf_counter()
        if self._open:
            last = self._open[-1]
            self.seconds[last] = self.seconds.get(last, 0.0) + now - self._since
        self._since = now
