"""Ranks that are threads of one process, for tests and notebooks: `run_ranks`."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

import attrs

from .comm import Comm, Meeting, Pending
from .errors import CheckpointError, Failure, LostRanksError

T = TypeVar("T")


def run_ranks(
    n: int, fn: Callable[[Comm], T], *, timeout: float = 60.0, coordinator: int = 0
) -> list[T]:
    """Run ``fn(comm)`` on n threads, each with the comm of one rank, and return their results.

    They exchange the same bytes and get the same errors as processes would. A rank whose function
    has returned or raised is lost to those that still wait for it, at once.

    Args:
        n: How many ranks.
        fn: What each rank does; its comm says which rank it is.
        timeout: Seconds to wait for a rank in a collective; and, once some rank has failed, for the
            others to return (their threads run on).
        coordinator: The rank that gathers and scatters.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        CheckpointError: Some ranks failed; it names all of them. The first one's own exception is
            the ``__cause__``. KeyboardInterrupt and SystemExit are raised as they are.

    >>> run_ranks(3, lambda comm: comm.all_gather(b"%d" % comm.rank))
    [[b'0', b'1', b'2'], [b'0', b'1', b'2'], [b'0', b'1', b'2']]
    """
    if n < 1 or not 0 <= coordinator < n:
        raise ValueError(f"expected at least one rank and a coordinator among them, not {n} ranks")
    room = _Room(n, timeout)
    futures = [Future[T]() for _ in range(n)]
    for rank, future in enumerate(futures):
        comm = _ThreadComm(rank, range(n), coordinator, room)
        threading.Thread(
            target=_run, args=(fn, comm, future), name=f"rank-{rank}", daemon=True
        ).start()
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        # If a rank has failed, the others may first have to find out, which takes them as long.
        wait(futures, timeout)
    except BaseException:
        room.lose(dict.fromkeys(range(n), "was interrupted"))
        raise
    errors = {rank: f.exception() for rank, f in enumerate(futures) if f.done()}
    failed = {rank: error for rank, error in errors.items() if error is not None}
    if failed or len(errors) < n:
        text = f"did not return within {timeout:g} s after another rank had failed"
        silent = [Failure(r, "run_ranks", "LostRank", text) for r in range(n) if r not in errors]
        raise _merged(failed, silent)
    return [future.result() for future in futures]


def _run(fn: Callable[[Comm], T], comm: _ThreadComm, future: Future[T]) -> None:
    try:
        future.set_result(fn(comm))
        comm.leave("had already returned")
    except BaseException as error:
        future.set_exception(error)
        failure = Failure.of(error, comm.rank, "run_ranks")
        comm.leave(f"left: {failure.type}: {failure.text}")


def _merged(errors: Mapping[int, BaseException], silent: Iterable[Failure]) -> BaseException:
    """Return one error for all ranks: their own failures, and those that they report."""
    for error in errors.values():
        if not isinstance(error, Exception):
            return error
    reported, own = dict[int, Failure](), dict[int, Failure]()
    for rank, error in errors.items():
        if isinstance(error, CheckpointError):
            reported |= {failure.rank: failure for failure in error.failures}
        elif isinstance(error, LostRanksError):
            reported |= {failure.rank: failure for failure in error.failures("run_ranks")}
        else:
            own[rank] = Failure.of(error, rank, "run_ranks")
    missing = {failure.rank: failure for failure in silent}
    steps = [error for error in errors.values() if isinstance(error, CheckpointError)]
    first = next((error.own for error in steps if error.own is not None), None)
    raised = next((e for r in own if isinstance(e := errors[r], Exception)), first)
    merged = CheckpointError((missing | reported | own).values(), raised)
    merged.__cause__ = raised
    return merged


class _Room:
    """What the threads share: what each brought to each meeting, and which ranks are gone."""

    def __init__(self, n: int, timeout: float) -> None:
        self.n = n
        self.timeout = timeout
        self.changed = threading.Condition()
        self.brought: dict[int, dict[int, tuple[str, Sequence[bytes]]]] = {}
        self.verdicts: dict[int, dict[int, str]] = {}
        self.gone: dict[int, str] = {}
        # By sender and receiver, the transfers of either side that wait for the other side.
        self.sends: defaultdict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int], deque[_Transfer]] = defaultdict(deque)

    def transfer(self, source: int, target: int, memory: memoryview, *, is_send: bool) -> _Transfer:
        """Begin one side of a transfer; whichever side comes last copies, in order."""
        sends, receives = self.sends[source, target], self.receives[source, target]
        transfer = _Transfer(self, target if is_send else source, memory)
        with self.changed:
            (sends if is_send else receives).append(transfer)
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                received.memory[:] = sent.memory
                sent.done = received.done = True
                self.changed.notify_all()
        return transfer

    def lose(self, reasons: dict[int, str]) -> None:
        with self.changed:
            self.gone = reasons | self.gone
            self.changed.notify_all()

    def meet(
        self, number: int, rank: int, topic: str, parts: Sequence[bytes]
    ) -> list[Sequence[bytes]]:
        """Return what every rank brought to this meeting, by rank, or raise LostRanksError."""
        with self.changed:
            brought = self.brought.setdefault(number, {})
            brought[rank] = (topic, parts)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._over(number), self.timeout)
            lost = self.verdicts.setdefault(number, self._lost(number, topic))
            # Ranks that are here have taken what they needed from the meeting before the last.
            self.brought.pop(number - 2, None)
            self.verdicts.pop(number - 2, None)
        if lost:
            raise LostRanksError(lost)
        return [brought[place][1] for place in range(self.n)]

    def _over(self, number: int) -> bool:
        brought = self.brought[number]
        absent_for_ever = self.gone.keys() - brought.keys()
        return number in self.verdicts or len(brought) == self.n or bool(absent_for_ever)

    def _lost(self, number: int, topic: str) -> dict[int, str]:
        brought = self.brought[number]
        gone = {rank: why for rank, why in self.gone.items() if rank not in brought}
        if gone:
            return gone
        absent = sorted(set(range(self.n)) - brought.keys())
        if absent:
            return dict.fromkeys(absent, f"did not come to {topic} within {self.timeout:g} s")
        first = brought[0][0]
        return {
            rank: f"came to {other} while rank 0 came to {first}"
            for rank, (other, _) in sorted(brought.items())
            if other != first
        }


@attrs.define(eq=False)
class _Transfer:
    """Memory that is sent to, or filled by, another thread; a `Pending`."""

    room: _Room
    other: int
    memory: memoryview
    done: bool = False

    def wait(self) -> None:
        """Return once the bytes were copied, or raise LostRanksError."""
        # Half as long as for a collective, where this rank would else be missed by all others.
        limit, room = self.room.timeout / 2, self.room
        with room.changed:
            room.changed.wait_for(lambda: self.done or self.other in room.gone, limit)
            if not self.done:
                reason = room.gone.get(self.other, f"sent or took nothing within {limit:g} s")
                raise LostRanksError({self.other: reason})


@attrs.define(eq=False, repr=False)
class _ThreadComm(Comm):
    """A comm among threads; see `run_ranks`."""

    rank: int
    ranks: Sequence[int]
    coordinator: int
    _room: _Room
    _number: int = 0
    _lost: LostRanksError | None = None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def meet(self, data: bytes, topic: str) -> Meeting:
        gathered = self._bring([data], topic)
        if self.rank == self.coordinator:
            return Meeting(self, topic, [parts[0] for parts in gathered])
        return Meeting(self, topic, None, self.answer([], topic))

    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        answers = self._bring(parts, topic)[self.coordinator]
        return answers[self.rank if len(answers) > 1 else 0]

    def send(self, place: int, data: memoryview) -> Pending:
        return self._room.transfer(self.rank, place, data, is_send=True)

    def receive(self, place: int, into: memoryview) -> Pending:
        return self._room.transfer(place, self.rank, into, is_send=False)

    def leave(self, reason: str) -> None:
        self._room.lose({self.rank: reason})

    def _bring(self, parts: Sequence[bytes], topic: str) -> list[Sequence[bytes]]:
        """Come to the next meeting of the room, and return what every rank brought, by rank."""
        if self._lost is not None:
            raise LostRanksError(self._lost.reasons)
        self._number += 1
        try:
            return self._room.meet(self._number, self.rank, topic, parts)
        except LostRanksError as error:
            self._lost = error
            raise
