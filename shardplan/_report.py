"""Reports of saves and loads, and the stopwatch that fills them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import attrs

from shardplan.dist import Comm
from shardplan.planning import (
    Issue,
    Printed,
    Sheet,
    Table,
    counted,
    human_bytes,
    human_seconds,
    leaves,
    listed,
)

if TYPE_CHECKING:
    from shardplan.planning import PlannerTrace

LOG: Final = logging.getLogger("shardplan")
"""The logger of the whole package."""

T = TypeVar("T")


@attrs.frozen
class RankReport:
    """What one rank did until it reported to the others.

    Later phases (waiting, the last exchange) are only in the rank's own report.

    Attributes:
        rank: Its number in the job.
        seconds: Seconds by phase.
        nbytes: Bytes written to storage, or read from it.
        sent: Bytes sent to other ranks.
        device: The device of its tensors, such as ``cpu`` or ``cuda:3``.
        phase_bytes: Bytes by phase: staged, exchanged with other ranks to agree on a plan and to
            report, written, read.
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
    """Return this rank's report so far, given the bytes moved to or from storage."""
    rank, seconds = comm.ranks[comm.rank], dict(watch.seconds)
    return RankReport(rank, seconds, nbytes, sent, device_of(sd), dict(watch.nbytes))


def device_of(sd: Mapping[Any, Any]) -> str:
    """Return the name of the device of a state dict's tensors."""
    devices = (str(getattr(value, "device", "cpu")) for _, value in leaves(sd))
    return next((device for device in devices if device != "cpu"), "cpu")


class Timed(Printed):
    """A report that prints its title, its seconds, its notes, and the slowest ranks."""

    _verb: ClassVar[str]
    seconds: Mapping[str, float]
    slowest: Mapping[str, tuple[int, float]] = MappingProxyType({})
    phase_bytes: Mapping[str, int] = MappingProxyType({})
    dropped: tuple[str, ...]
    trace: PlannerTrace | None

    @property
    def _title(self) -> str:
        raise NotImplementedError

    @property
    def _notes(self) -> list[str]:
        text = f"not {self._verb}, as the planner drops them: {listed(self.dropped, quote='')}"
        return [text] if self.dropped else []

    def __repr__(self) -> str:
        times = ", ".join(f"{phase} {time:.3f} s" for phase, time in self.seconds.items())
        lines = [f"{self._title}; {times}", *self._notes]
        if self.slowest:
            ranks = (f"{p} rank {rank} ({time:.3f} s)" for p, (rank, time) in self.slowest.items())
            lines.append(f"slowest: {', '.join(ranks)}")
        return "\n".join([*lines, repr(self.trace)] if self.trace else lines)

    @property
    def _sheet(self) -> Sheet:
        head = ("phase", "here", "bytes", *(("slowest rank", "there") if self.slowest else ()))
        rows = []
        for phase, mine in self.seconds.items():
            rank, longest = self.slowest.get(phase, ("", mine))
            there = (rank, human_seconds(longest)) if self.slowest else ()
            moved = human_bytes(self.phase_bytes[phase]) if phase in self.phase_bytes else ""
            rows.append((phase, human_seconds(mine), moved, *there))
        tables = self.trace.tables if self.trace else ()
        return Sheet(self._title, [Table(head, rows), *tables], self._notes)


@attrs.frozen(repr=False)
class SaveReport(Timed):
    """What a save did.

    Attributes:
        path: The location of the checkpoint.
        save_id: The name of the save, part of its files' names.
        files: The number of data files, of all ranks together.
        nbytes: Their size, in bytes.
        seconds: This rank's seconds by phase: stage, open, plan, exchange, write, wait (for the
            other ranks), commit.
        leftovers: Files of the replaced checkpoint that could not be removed.
        how: How the plan was made: ``"alone"``, ``"cached"``, ``"derived"`` or ``"gathered"``.
        slowest: By phase, the slowest rank and its seconds.
        ranks: The reports of all ranks on the coordinator; elsewhere only this rank's.
        phase_bytes: This rank's bytes by phase; see `RankReport`.
        dropped: The keys, of any rank, that the planner left out; they were not saved.
        trace: What each pass of the planner did, with ``trace=True``; see `save`.
        shared: Bytes of tensors that were not written, as ``base`` has them.
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
    trace: PlannerTrace | None = None
    shared: int = 0

    _verb = "saved"

    @property
    def _title(self) -> str:
        size = human_bytes(self.nbytes)
        shared = f", {human_bytes(self.shared)} shared" if self.shared else ""
        return f"saved {size} in {counted(self.files, 'file')}{shared} (plan {self.how})"


@attrs.frozen(repr=False)
class LoadReport(Timed):
    """What a load did, and how the state dict and the checkpoint agree.

    Attributes:
        missing: Wanted names that the checkpoint does not have.
        unexpected: Names in the checkpoint that were not wanted.
        mismatched: Names that both have but that did not fit, with the reason.
        bytes_needed: Bytes of the elements that this rank wanted.
        bytes_read: Bytes that this rank read from storage, for itself and for others.
        requests: The number of ranges requested.
        verified: The number of chunks that were read in full and matched their checksums.
        seconds: This rank's seconds by phase: open, plan, exchange, read, wait (for the other
            ranks), hand over (to objects that keep their own state).
        bytes_received: Bytes received from other ranks.
        total_read: Bytes that all ranks together read from storage.
        slowest: By phase, the slowest rank and its seconds.
        ranks: The reports of all ranks on the coordinator; elsewhere only this rank's.
        phase_bytes: This rank's bytes by phase; see `RankReport`.
        bytes_sent: Bytes sent to other ranks.
        tied: Names missing from the checkpoint that share memory with one that it has.
        dropped: This rank's keys that the planner left out; they were not filled.
        bytes_unverified: Bytes that all ranks together read without comparing a checksum: chunks
            that were not read in full, formats without checksums, or all if ``verify`` was false.
        trace: What each pass of the planner did, with ``trace=True``; see `load`.
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
    trace: PlannerTrace | None = None

    @property
    def amplification(self) -> float:
        """Bytes read by this rank, for itself and for others, per byte that it needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    _verb = "filled"

    @property
    def _title(self) -> str:
        read = f"loaded {human_bytes(self.bytes_read)} ({self.amplification:.2f} × what was needed)"
        if self.bytes_received or self.bytes_sent:
            moved = (self.bytes_needed, self.bytes_read, self.bytes_received, self.bytes_sent)
            needed, fetched, received, sent = map(human_bytes, moved)
            read = f"loaded {needed}: read {fetched}, received {received}, sent {sent}"
        if self.bytes_unverified:
            read += f", {human_bytes(self.bytes_unverified)} not verified"
        return (
            f"{read}; {len(self.missing):,} missing, {len(self.unexpected):,} unexpected, "
            f"{len(self.mismatched):,} mismatched"
        )


def place_name(place: object) -> str:
    """Return a path or a store as text; any other object by its type, since it may be long.

    >>> place_name("runs/step-7"), place_name({"w": 1})
    ('runs/step-7', 'a dict')
    """
    if isinstance(place, (str, os.PathLike)):
        return os.fspath(place)
    return str(getattr(place, "url", f"a {type(place).__name__}"))


def logged(report: T, place: object = "", *, loud: bool = True, left: Sequence[str] = ()) -> T:
    """Log a report's first line and its warnings, and return it.

    ``loud`` logs at INFO level: one rank is enough for what all ranks do. ``left`` are files that
    could be removed but still exist.
    """
    where = place_name(place)
    start = f"{where}: " if where else ""
    LOG.log(logging.INFO if loud else logging.DEBUG, "%s%s", start, repr(report).splitlines()[0])
    if left and loud:
        count = counted(len(left), "file")
        LOG.warning("%s%s left over; prune removes them: %s", start, count, listed(left, quote=""))
    return report


def slowest_ranks(ranks: Sequence[RankReport]) -> dict[str, tuple[int, float]]:
    """Return the slowest rank of each phase and its seconds; waiting for others does not count.

    >>> slowest_ranks([RankReport(0, {"write": 1.0}, 0), RankReport(1, {"write": 2.0}, 0)])
    {'write': (1, 2.0)}
    """
    pairs: dict[str, list[tuple[int, float]]] = {}
    for report in ranks:
        for phase, seconds in report.seconds.items():
            pairs.setdefault(phase, []).append((report.rank, seconds))
    return {p: max(pair, key=lambda pair: pair[1]) for p, pair in pairs.items() if p != "wait"}


class Stopwatch:
    """Seconds and bytes by phase. Time in a nested phase counts only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase, and log it."""
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
        """Add bytes to a phase."""
        self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def _turn(self) -> None:
        """Add the time since the last turn to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            last = self._open[-1]
            self.seconds[last] = self.seconds.get(last, 0.0) + now - self._since
        self._since = now
