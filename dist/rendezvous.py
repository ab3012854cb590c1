"""Meetings of ranks in a key-value store, by which they find out whether all are present.

Every collective starts with a meeting:

1. Each rank writes the key ``<number>/<place>``, with a small note for the coordinator.
2. When the coordinator has seen all keys, it writes ``<number>/begun``: all ranks are there. Now it
   may take its time to compute an answer.
3. It writes ``<number>/verdict``, with its answer. Small collectives need nothing else; only after
   that do bytes flow.

The verdict is written once, by compare-and-set, and holds for everyone. So any rank that notices
that another one is missing, or that leaves itself, can call the meeting off for all; and a rank
that is late finds out that it was given up.

A rank that does not receive another's bytes cannot know why: the other may itself wait for a third
one. So it brings its suspicion to the next meeting. Absent ranks are lost. If none is
absent, those are lost that are suspected and suspect nobody.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs

from .errors import LostRanksError
from .transport import Worker

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

GRACE = 2.0
"""Seconds beyond the timeout to wait for the coordinator's verdict, or for the store."""

SOON = 0.1
"""Seconds within which most meetings are over. Until then, only the verdict (the coordinator: the
other ranks' keys) is polled."""


@attrs.define
class Meetings:
    """This rank's view of the meetings of its group."""

    store: Store  # private to the meetings
    rank: int  # this rank's place in the group
    coordinator: int  # the place of the rank that gives verdicts
    ranks: Sequence[int]  # per place, the global rank
    timeout: float  # seconds to wait for the other ranks
    host: int | None = 0  # global rank in whose process the store lives; None if not in a rank's
    number: int = 0  # of meetings that this rank has come to
    lost: LostRanksError | None = None  # no meeting takes place after that
    worker: Worker = attrs.field(factory=Worker)  # the thread that talks to the store
    leaving: str | None = None  # why this rank leaves, if it does: the worker then stops waiting
    heard: float = 0.0  # when the store last answered, by the monotonic clock
    suspects: dict[int, str] = attrs.field(factory=dict)  # ranks whose bytes did not come, and why
    broken: bool = False  # whether the connection to suspects is gone

    def meet(self, topic: str, note: bytes | None = b"") -> None:
        """Return once every rank has come; see `open` and `attend`."""
        if self.rank == self.coordinator:
            self.open(topic, note)
            self.close(None)
        else:
            self.attend(topic, note)

    def open(self, topic: str, note: bytes | None) -> list[bytes | None]:
        """As the coordinator: return all notes once every rank has come to the same meeting.

        If one does not, raise, on all. The meeting ends when `close` gives the answer, which may
        take as long as the timeout to compute.
        """
        self._next()
        lost, notes = self._ask(lambda: self._preside(topic, note))
        if lost:
            self._ask(lambda: self._close(lost, None))
            raise self.lose(lost)
        begun = self._begun
        self.worker.post(lambda: self.store.set(begun, ""))
        return notes

    def close(self, answer: bytes | None) -> None:
        """As the coordinator: end the meeting; raise if it was called off meanwhile."""
        lost, _ = self._ask(lambda: self._close({}, answer))
        if lost:
            raise self.lose(lost)

    def attend(self, topic: str, note: bytes | None) -> bytes | None:
        """As any other rank: come to the meeting, and return the coordinator's answer."""
        self._next()
        lost, answer = self._ask(lambda: self._attend(topic, note))
        if lost:
            raise self.lose(lost)
        return answer

    def _next(self) -> None:
        if self.lost is not None:
            raise LostRanksError(self.lost.reasons)
        self.number += 1

    def lose(self, reasons: Mapping[int, str]) -> LostRanksError:
        """Call off this meeting and the next one because ranks are lost; return the error.

        If another rank has called it off before, for other reasons, those hold.
        """
        self.lost = LostRanksError(reasons)
        with contextlib.suppress(LostRanksError):  # if the store is gone as well
            reasons = self._ask(lambda: self._publish(reasons), GRACE)
            if self.ranks[self.rank] == self.host:
                # The caller may end this process at once, and the store with it: ranks that have
                # not read the verdict by then would blame this one.
                self._ask(lambda: self._wait(lambda _: self._is_read(reasons), GRACE / 2), GRACE)
        self.lost = LostRanksError(reasons)
        return LostRanksError(reasons)

    def resolve(self, suspects: Mapping[int, str], *, broken: bool) -> LostRanksError:
        """Find out at the next meeting which suspects are lost; return the error of all ranks."""
        self.suspects, self.broken = dict(suspects), broken
        try:
            self.meet("the next meeting")
        except LostRanksError as error:
            return error
        raise AssertionError("a meeting with a suspicion ends with a loss")

    def check_next(self) -> None:
        """Raise LostRanksError if the next meeting is called off already."""
        lost = self._ask(self._called_off)
        if lost:
            self.lost = LostRanksError(lost)
            raise LostRanksError(lost)

    def leave(self, reason: str) -> None:
        """Call off the meeting that is being held, or else the next one; see `Comm.leave`."""
        if self.lost is None:
            self.leaving = reason  # first: the worker may be waiting, and stops now
            self.lose(self._left())

    def end(self) -> None:
        """Wait until the others have read the last verdict: this process may host the store."""
        others = [place for place in range(len(self.ranks)) if place != self.rank]
        if self.number and self.lost is None:
            with contextlib.suppress(LostRanksError):
                if self.rank == self.coordinator:
                    self._ask(
                        lambda: self._wait(lambda _: not self._here(others), GRACE), 2 * GRACE
                    )
                else:
                    self._ask(lambda: None, GRACE)  # after all that was posted
        self.worker.close()

    def _come(self, topic: str, note: bytes | None) -> None:
        """Announce this rank, its topic, its note and its suspects."""
        text = json.dumps([topic, _text(note), list(self.suspects.items())])
        self.store.set(self._key(self.rank), text)

    def _preside(self, topic: str, note: bytes | None) -> tuple[dict[int, str], list[bytes | None]]:
        """As the coordinator: wait for all ranks; return the lost ones, and all notes."""
        self._come(topic, note)
        keys, complete = [self._key(place) for place in range(len(self.ranks))], False

        def ready(passed: float) -> bool:
            nonlocal complete
            complete = self.store.check(keys)
            return complete or (passed >= SOON and self._decided())

        dead = self._dead(ready)
        if dead:
            return dead, []
        if not complete:
            self._wait(ready, self.timeout)
        # If the last rank came just now, all are there.
        absent = {} if complete else self._left() or self._absent(topic)
        if absent:
            return absent, []
        came = [json.loads(text) for text in self.store.multi_get(keys)]
        astray = {
            rank: f"came to {other} while rank {self.ranks[self.rank]} came to {topic}"
            for rank, (other, *_) in zip(self.ranks, came, strict=True)
            if other != topic
        }
        suspects = {rank: dict(found) for rank, (*_, found) in zip(self.ranks, came, strict=True)}
        lost = self._left() or _blamed(suspects) or astray
        if not lost and self._decided():  # a rank has left
            return self._decide(self.number, {})[0], []
        return lost, [_bytes(note) for _, note, _ in came]

    def _close(
        self, lost: Mapping[int, str], answer: bytes | None
    ) -> tuple[dict[int, str], bytes | None]:
        """As the coordinator: write the verdict, and return the one that holds."""
        found = self._decide(self.number, lost, answer)
        # Ranks that are here have read the last verdict.
        keys = [self._key(self.rank), self._begun, f"{self.number - 1}/verdict"]
        self.worker.post(lambda: [self.store.delete_key(key) for key in keys])
        return found

    def _attend(self, topic: str, note: bytes | None) -> tuple[dict[int, str], bytes | None]:
        """As any other rank: wait for the verdict and return it; write one if none comes."""
        self._come(topic, note)
        lost = self._unanswered(topic)
        found = self._decide(self.number, self._left() or lost)
        mine = self._key(self.rank)
        self.worker.post(lambda: self.store.delete_key(mine))
        return found

    def _unanswered(self, topic: str) -> dict[int, str]:
        """Wait for the verdict; if none comes, return the lost ranks."""

        def has(key: str) -> Callable[[float], bool]:
            return lambda passed: self._decided() or (passed >= SOON and self.store.check([key]))

        dead = self._dead(self._decided)
        if dead:
            return dead
        if not self._wait(has(self._key(self.coordinator)), self.timeout):
            return self._absent(topic)
        # It may have come late, then wait as long for the others, and compute for as long.
        begun = self._wait(has(self._begun), self.timeout + GRACE / 2)
        if begun and self._wait(self._decided, self.timeout + GRACE / 2):
            return {}
        return {self.ranks[self.coordinator]: f"came to {topic} and then fell silent"}

    def _dead(self, ready: Callable[[float], bool]) -> dict[int, str]:
        """Return the suspects with broken connections that do not come within a grace period."""
        if not self.broken or self._wait(ready, min(GRACE, self.timeout)):
            return {}
        here = {self.ranks[place] for place in self._here(range(len(self.ranks)))}
        return {rank: why for rank, why in self.suspects.items() if rank not in here}

    def _left(self) -> dict[int, str]:
        """Return this rank if it leaves, with its reason."""
        return {} if self.leaving is None else {self.ranks[self.rank]: self.leaving}

    def _absent(self, topic: str) -> dict[int, str]:
        here = set(self._here(range(len(self.ranks))))
        reason = f"did not come to {topic} within {self.timeout:g} s"
        return {rank: reason for place, rank in enumerate(self.ranks) if place not in here}

    def _here(self, places: Iterable[int]) -> list[int]:
        return [place for place in places if self.store.check([self._key(place)])]

    def _decided(self, passed: float = 0.0) -> bool:
        return self.store.check([f"{self.number}/verdict"])

    def _decide(
        self, number: int, lost: Mapping[int, str], said: bytes | None = None
    ) -> tuple[dict[int, str], bytes | None]:
        """Write a verdict unless there is one; return the one that holds."""
        mine = json.dumps([list(lost.items()), _text(said)])
        holds, text = json.loads(self.store.compare_set(f"{number}/verdict", "", mine))
        return {int(rank): str(reason) for rank, reason in holds}, _bytes(text)

    def _called_off(self) -> dict[int, str]:
        """Return the lost ranks of the next meeting's verdict, if it has one."""
        key = f"{self.number + 1}/verdict"
        lost, _ = json.loads(self.store.multi_get([key])[0]) if self.store.check([key]) else ((), 0)
        return {int(rank): str(reason) for rank, reason in lost}

    def _publish(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Call off the meeting that is being held and the next one; return the reasons that hold.

        A meeting that has a successor is over, and its verdict may be gone from the store.
        """
        if not self._called_off():
            reasons = self._decide(self.number, reasons)[0] or reasons
        return self._decide(self.number + 1, reasons)[0]

    def _is_read(self, lost: Mapping[int, str]) -> bool:
        """Return True once no other rank that came to this meeting still waits for its verdict."""
        others = (p for p, rank in enumerate(self.ranks) if p != self.rank and rank not in lost)
        return not any(self.store.check([self._key(place)]) for place in others)

    def _wait(self, ready: Callable[[float], bool], seconds: float) -> bool:
        """Call ``ready`` with the seconds passed, ever less often, until true or out of time."""
        start, passed = time.monotonic(), 0.0
        # Polling takes processor time that the awaited rank may need. And where many ranks poll one
        # server, the first and the longest pause grow with their number.
        first, longest = max(5e-4, len(self.ranks) * 1e-5), max(0.05, len(self.ranks) / 10_000)
        while not ready(passed):
            self.heard = time.monotonic()
            passed = self.heard - start
            if passed >= seconds or self.leaving is not None:
                return False
            time.sleep(min(max(passed / 8, first), longest, seconds - passed))
        return True

    def _ask(self, question: Callable[[], T], limit: float | None = None) -> T:
        """Talk to the store; if it is gone, the rank that hosts it is lost.

        All of it may take ``limit`` seconds; by default, each request may take the timeout.
        """
        try:
            if limit is not None:
                return self.worker.call(question, limit)
            return self.worker.call(question, self.timeout, alive=lambda: self.heard)
        except (RuntimeError, OSError) as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if self.host is None:
            rank, reason = self.ranks[self.coordinator], "cannot be reached: gone is the store"
        else:
            rank, reason = self.host, "is lost, and with it the store"
        self.lost = LostRanksError({rank: f"{reason} through which the ranks meet ({what})"})
        raise LostRanksError(self.lost.reasons)

    def _key(self, place: int) -> str:
        return f"{self.number}/{place}"

    @property
    def _begun(self) -> str:
        """The key that exists once the coordinator computes its answer."""
        return f"{self.number}/begun"


def _blamed(suspects: Mapping[int, Mapping[int, str]]) -> dict[int, str]:
    """Return the ranks to blame: those that others suspect, and that suspect nobody themselves."""
    suspected = {int(rank): why for found in suspects.values() for rank, why in found.items()}
    idle = {rank: why for rank, why in suspected.items() if not suspects.get(rank)}
    return idle or suspected


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode("ascii")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
