"""The ranks that take part in a call, and their collective steps."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

import attrs

from shardplan.dist import (
    CheckpointError,
    Comm,
    Failure,
    LostRanksError,
    Reduce,
    all_reduce,
    solo,
    torch_comm,
)
from shardplan.planning import listed, span

__all__ = [
    "JobComm",
    "Kept",
    "Place",
    "Taken",
    "as_comm",
    "counting",
    "default_comm",
    "fail_alike",
    "host_name",
    "keep_step",
    "own_place",
    "place_of",
    "take_step",
    "ranks_by_value",
    "world_group",
]

_MEETINGS: Final = frozenset(("gather", "scatter", "broadcast", "all_gather", "reduce"))

M = TypeVar("M")
W = TypeVar("W")


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

    Making one is a collective step, so every rank must ask for it in the same calls. A rank may
    notice a loss one call later than others. Therefore ranks count their calls and compare the
    counts when they reconnect: parts of two different saves must never become one checkpoint.

    Attributes:
        private: Whether it has its own connections.
        held: The current comm; None if there is none yet.
    """

    private: bool
    held: Comm | None = None
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
            group = world_group()
            if group is None:
                _refuse_missing_group()
                self.held = self._group = None
                return solo()
            self._calls += 1
            if self.held is None or self._group is not group:
                with _named_step("make connections"):
                    self.held, self._calls = torch_comm(group, private=self.private), 1
                self._group = group
            elif self.held.lost:
                self._go_on()
            return self.held

    def _go_on(self) -> None:
        step = "go on after a rank was lost"
        with _named_step(step):
            comm = self.held = torch_comm(self._group, private=True, fresh=True)
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


_job: Final = JobComm(private=False)


def as_comm(comm: Comm | None) -> Comm:
    """Return the comm that a caller passed, by default `default_comm`; check its type."""
    if comm is not None and not hasattr(comm, "coordinator"):  # a process group, say
        kind = type(comm).__name__
        raise TypeError(
            f"comm is a {kind}; for a process group, pass shardplan.dist.torch_comm(it)"
        )
    return default_comm() if comm is None else comm


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


def take_step(
    comm: Comm, step: str, map: Callable[[], Any], reduce: Callable[[list[Any]], Any]
) -> Any:
    """Run `all_reduce`, except that a single rank raises its errors unchanged."""
    if comm.world_size == 1:
        return reduce([map()])
    return all_reduce(comm, step, map, reduce)


@attrs.frozen(eq=False)
class Kept(Generic[M]):
    """The result of a function of a step: a value for this rank, and a message."""

    value: M
    sent: Any


@attrs.frozen(eq=False)
class Taken(Generic[M, W]):
    """The result of a step that succeeded on all ranks.

    ``mine`` is what ``map`` kept, ``whole`` what ``reduce`` kept (None except on the coordinator),
    and ``got`` the coordinator's message to this rank.
    """

    mine: M
    whole: W | None
    got: Any


def keep_step(
    comm: Comm,
    step: str,
    map: Callable[[], Kept[M]],
    reduce: Callable[[list[Any]], Kept[W]],
    *,
    collective: Callable[..., Any] = take_step,
    undo: Callable[[M, BaseException], None] | None = None,
) -> Taken[M, W]:
    """Run a step in which ranks keep more than they send.

    ``map`` runs on every rank, and ``reduce`` on the coordinator with the messages of all ranks.
    ``undo`` is called with what ``map`` kept, and the error, if the step fails after ``map``.

    >>> keep_step(solo(), "add up", lambda: Kept("mine", 2), lambda sent: Kept("all", sum(sent)))
    Taken(mine='mine', whole='all', got=2)
    """
    mine: Kept[M] | None = None
    whole: Kept[W] | None = None

    def send() -> Any:
        nonlocal mine
        mine = map()
        return mine.sent

    def reply(sent: list[Any]) -> Any:
        nonlocal whole
        whole = reduce(sent)
        return whole.sent

    try:
        got = collective(comm, step, send, reply)
    except BaseException as error:
        if mine is not None and undo is not None:
            undo(mine.value, error)
        raise
    assert mine is not None
    return Taken(mine.value, None if whole is None else whole.value, got)


def ranks_by_value(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return which ranks have which of several values, as text; empty if all are equal.

    >>> ranks_by_value((0, 1, 2), ("a", "a", "b"))
    'ranks 0, 1: a; rank 2: b'
    """
    sides: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        sides.setdefault(value, []).append(rank)
    texts = [f"{span(who)}: {value}" for value, who in sides.items()]
    return listed(texts, quote="", between="; ") if len(sides) > 1 else ""


def fail_alike(comm: Comm, step: str, error: Exception) -> NoReturn:
    """Raise an error that all other ranks raise as well."""
    kind, text = type(error).__name__, str(error)
    failures = [Failure(rank, step, kind, text, expected=True) for rank in comm.ranks]
    raise CheckpointError(failures, error)


class _Counting:
    """A comm that counts the bytes that a rank sends and receives in collectives."""

    def __init__(self, comm: Comm, count: Callable[[int], None]) -> None:
        self._comm, self._count = comm, count

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)
        return partial(self._meet, method) if name in _MEETINGS else method

    def _meet(self, method: Callable[..., Any], data: Any, *rest: Any) -> Any:
        got = method(data, *(self._counted(work) if callable(work) else work for work in rest))
        self._count(_size(data) + _size(got))
        return got

    def _counted(self, work: Reduce) -> Reduce:
        def counted(parts: list[bytes]) -> bytes:
            self._count(_size(parts))
            return work(parts)

        return counted


def _size(data: bytes | Sequence[bytes] | None) -> int:
    if isinstance(data, bytes) or not data:
        return len(data or b"")
    return sum(map(len, data))


def counting(comm: Comm, count: Callable[[int], None]) -> Comm:
    """Return a comm that also counts the bytes of this rank's collectives.

    >>> counts = []
    >>> counting(solo(), counts.append).broadcast(b"plan")
    b'plan'
    >>> counts
    [8]
    """
    return cast(Comm, _Counting(comm, count))


def host_name() -> str:
    """Return the host name, equal for ranks on one machine."""
    return socket.gethostname()
