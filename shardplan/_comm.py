"""The ranks that take part in a call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs

from shardplan.dist import (
    CheckpointError,
    Comm,
    Failure,
    LostRanksError,
    Meeting,
    Pending,
    all_reduce,
    solo,
    torch_comm,
)


@attrs.frozen
class Place:
    """A rank, and the number of ranks."""

    rank: int
    ranks: int

    @property
    def label(self) -> str:
        """The key under which the rank's own state is saved.

        >>> Place(3, 8).label
        'rank_3_of_8'
        """
        return f"rank_{self.rank}_of_{self.ranks}"


@attrs.define(eq=False)
class JobComm:
    """The comm of all ranks of the job, made on demand, and again after it was lost.

    Every rank must ask for it in the same calls. A rank may notice a loss one call later than
    others, so ranks compare the counts of their calls when they reconnect: parts of two different
    saves must never become one checkpoint. ``chosen`` is a process group other than that of all
    ranks.
    """

    held: Comm | None = None
    chosen: Any = None
    coordinator: int = 0
    _group: Any = None
    _calls: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def take(self) -> Comm:
        """Return the comm for one call; `solo` without a process group.

        Raises:
            CheckpointError: It was lost, and not all ranks reconnected, or not in the same call.
            RuntimeError: A launcher started several ranks, and there is no process group.
        """
        with self._lock:
            group = world_group() if self.chosen is None else self.chosen
            if group is None:
                _refuse_missing_group()
                self.held = self._group = None
                return solo()
            self._calls += 1
            if self.held is None or self._group is not group:
                with _named_step("make connections"):
                    self.held, self._calls = self._connect(group), 1
                self._group = group
            elif self.held.lost:
                self._go_on()
            return self.held

    def _connect(self, group: Any) -> Comm:
        return torch_comm(group, coordinator=self.coordinator)

    def _go_on(self) -> None:
        step = "go on after a rank was lost"
        with _named_step(step):
            comm = self.held = self._connect(self._group)
        most, behind = all_reduce(comm, step, lambda: self._calls, _behind)
        self._calls = most
        if behind:
            text = f"this rank missed {{}} of {most} calls; all ranks continue with the next call"
            raise CheckpointError(
                Failure(comm.ranks[place], step, "RuntimeError", text.format(missing))
                for place, missing in behind
            )


@contextmanager
def _named_step(step: str) -> Iterator[None]:
    """Raise lost ranks as the failures of a step."""
    try:
        yield
    except LostRanksError as error:
        raise CheckpointError(error.failures(step)) from None


def _behind(calls: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Return the largest number of calls, and the position and lag of each rank behind it."""
    most = max(calls)
    return most, [(place, most - made) for place, made in enumerate(calls) if made < most]


_job: Final = JobComm()


def as_comm(comm: object) -> Comm:
    """Return the comm that a caller passed, by default `default_comm`; check its type."""
    if comm is None:
        return default_comm()
    if isinstance(comm, Comm):
        return comm
    kind = type(comm).__name__  # a process group, say
    raise TypeError(f"comm is a {kind}; for a process group, pass shardplan.dist.torch_comm(it)")


def default_comm() -> Comm:
    """Return the comm of all ranks of the job; every rank must call this."""
    return _job.take()


def _launched() -> Place | None:
    """Return the rank that torchrun, or another launcher, gave this process."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank.isdecimal() or not ranks.isdecimal() or int(ranks) < 2:
        return None
    return Place(int(rank), int(ranks))


def _refuse_missing_group() -> None:
    """Refuse to run alone in a process that a launcher started as one of several."""
    place = _launched()
    if place is not None:
        raise RuntimeError(
            f"this process is rank {place.rank} of {place.ranks} (RANK and WORLD_SIZE in its "
            "environment), but torch.distributed has no process group here, so every rank would "
            "work alone, and the last one to save would win; call "
            "torch.distributed.init_process_group() first, or pass comm=shardplan.dist.solo() if "
            "this process is meant to work alone"
        )


def world_group() -> Any:
    """Return torch's process group of all ranks; None if there is none."""
    dist = sys.modules.get("torch.distributed")  # imported if there is a process group
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def place_of(comm: Comm) -> Place:
    """Return this rank's place among all ranks of a comm."""
    return Place(comm.rank, comm.world_size)


def own_place() -> Place:
    """Return this process's place in the job, without communication."""
    group = world_group()
    if group is None:
        return _launched() or Place(0, 1)
    return Place(group.rank(), group.size())


@attrs.frozen(eq=False)
class _CountingComm(Comm):
    """A comm that counts the bytes that a rank sends and receives in meetings."""

    rank: int
    ranks: Sequence[int]
    coordinator: int
    comm: Comm
    count: Callable[[int], None]

    @property
    def lost(self) -> bool:
        return self.comm.lost

    def meet(self, data: bytes, topic: str) -> Meeting:
        meeting = self.comm.meet(data, topic)
        self.count(len(data) + sum(map(len, meeting.gathered or [meeting.reply])))
        return attrs.evolve(meeting, comm=self)

    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        self.count(sum(map(len, parts)))
        return self.comm.answer(parts, topic)

    def send(self, place: int, data: memoryview) -> Pending:
        return self.comm.send(place, data)

    def receive(self, place: int, into: memoryview) -> Pending:
        return self.comm.receive(place, into)

    def leave(self, reason: str) -> None:
        self.comm.leave(reason)


def counting(comm: Comm, count: Callable[[int], None]) -> Comm:
    """Return a comm that also counts the bytes of this rank's meetings."""
    return _CountingComm(comm.rank, comm.ranks, comm.coordinator, comm, count)
