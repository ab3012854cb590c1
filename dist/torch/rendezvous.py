"""How ranks find out who is there: meetings held in a key-value store, with a verdict each.

Every collective starts with a meeting. A rank that comes writes the key ``<number>/<rank>``; when
the coordinator has seen all of them it writes the verdict ``<number>/verdict``, and only then do
bytes flow. The verdict is written once, by compare-and-set, and everyone obeys it: so whoever
notices first that a rank is missing, or leaves, can call the meeting off for all, and a rank that
comes late learns that it was given up. A few bytes can ride along, to the coordinator as a note and
back as its answer, which spares small collectives any further message. If the answer is work, the
key ``<number>/begun`` tells that all have come, and only the answer is waited for.

Who waits in vain for another rank's bytes knows only that: the other may itself wait for a third.
So it accuses nobody, but comes to the next meeting with its suspicion, and who is lost is who does
not come; if all do, those who are suspected and suspect nobody themselves.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import attrs

from ..errors import LostRanksError
from .worker import Worker

__all__ = ["Meetings", "Store"]

T = TypeVar("T")

GRACE = 2.0
"""Seconds beyond the timeout that a rank gives to the coordinator's verdict, or to the store."""

SOON = 0.1
"""Seconds within which most meetings are over. Until then the store is asked for nothing else: so
long it may take until a coordinator notices that a meeting was called off."""


class Store(Protocol):
    """The part of torch's key-value store that meetings use."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys that are there."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Write a value if the key has the expected one ("" for none); return what it now has."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


Answer = Callable[[list[bytes | None]], bytes | None]
"""What the coordinator says when all have come, given their notes; None if it says nothing."""


@attrs.define
class Meetings:
    """This rank's view of the meetings of its group.

    Attributes:
        store: Where the meetings are held, private to them.
        rank: This rank's place in the group.
        coordinator: The place of the rank that gives verdicts.
        ranks: Per place, the global rank, for messages.
        timeout: Seconds that the others are waited for.
        host: The global rank in whose process the store lives; None if it is not a rank's.
        number: How many meetings this rank has come to.
        lost: Who was lost, once someone was: no meeting takes place after that.
        worker: The thread that talks to the store.
        leaving: Why this rank leaves, if it does: tells that thread to stop waiting.
        heard: When the store last answered, by the monotonic clock. It must answer within the
            timeout, for as long as a meeting may last.
        suspects: Ranks from which this one waited for bytes in vain, and what it saw.
        broken: Whether its connection to them is gone, which most likely means that they are.
    """

    store: Store
    rank: int
    coordinator: int
    ranks: Sequence[int]
    timeout: float
    host: int | None = 0
    number: int = 0
    lost: LostRanksError | None = None
    worker: Worker = attrs.field(factory=Worker)
    leaving: str | None = None
    heard: float = 0.0
    suspects: dict[int, str] = attrs.field(factory=dict)
    broken: bool = False

    def meet(
        self, topic: str, note: bytes | None, answer: Answer, *, takes_time: bool = False
    ) -> tuple[list[bytes | None], bytes | None]:
        """Return once every rank has come for this topic.

        Args:
            topic: What the meeting is for; the same on all ranks.
            note: A few bytes for the coordinator.
            answer: Called on the coordinator, with all notes, by rank.
            takes_time: Whether that is work; the others wait for it for as long as for a rank.

        Returns:
            All notes (on the coordinator; elsewhere an empty list), and the answer (everywhere).

        Raises:
            LostRanksError: Some did not come, or came for something else; every rank that came
                gets the same error, and so does one that comes later.
        """
        if self.lost is not None:
            raise LostRanksError(self.lost.reasons)
        self.number += 1
        notes = list[bytes | None]()
        if self.rank == self.coordinator:
            lost, notes = self._ask(lambda: self._preside(topic, note, takes_time))
            if takes_time and not lost:  # told while it is done: nobody asks for that soon
                begun = self._begun
                self.worker.post(lambda: self.store.set(begun, ""))
            said = None if lost else answer(notes)  # in the caller's thread: it may take its time
            lost, said = self._ask(lambda: self._close(lost, said))
        else:
            lost, said = self._ask(lambda: self._attend(topic, note, takes_time))
        if lost:
            raise self.lose(lost)
        return notes, said

    def lose(self, reasons: Mapping[int, str]) -> LostRanksError:
        """Note that ranks are lost, tell those that meet now or next, and return the error.

        If others have noted something else before, that is what happened.
        """
        self.lost = LostRanksError(reasons)
        # If the store is gone as well, there is no one to tell.
        with contextlib.suppress(LostRanksError):
            reasons = self._ask(lambda: self._publish(reasons), GRACE)
            if self.ranks[self.rank] == self.host:
                # The caller may end this process at once, and the store with it: whoever has not
                # read the verdict by then would blame this rank.
                self._ask(lambda: self._wait(lambda _: self._is_read(reasons), GRACE / 2), GRACE)
        self.lost = LostRanksError(reasons)
        return LostRanksError(reasons)

    def settle(self, suspects: Mapping[int, str], *, broken: bool) -> LostRanksError:
        """Find out, at the next meeting, who is lost; return the error that all get.

        Args:
            suspects: The ranks from which bytes did not come, and what is known of each.
            broken: Whether connections are gone: who does not come soon either is lost.
        """
        self.suspects, self.broken = dict(suspects), broken
        try:
            self.meet("the next meeting", None, lambda notes: None)
        except LostRanksError as error:
            return error
        raise AssertionError("a meeting that a suspicion was brought to ends with a loss")

    def heed(self) -> None:
        """Raise LostRanksError if the next meeting is called off already."""
        lost = self._ask(self._called_off)
        if lost:
            self.lost = LostRanksError(lost)
            raise LostRanksError(lost)

    def leave(self, reason: str) -> None:
        """Call off the meeting that is being held, or else the next one; see `Comm.leave`."""
        if self.lost is None:
            self.leaving = reason  # first: whoever waits for us stops now, and must say why
            self.lose(self._left())

    def close(self) -> None:
        """Stay until the others have read the last verdict: the store may end with this process."""
        others = [place for place in range(len(self.ranks)) if place != self.rank]
        if self.number and self.lost is None:
            with contextlib.suppress(LostRanksError):
                if self.rank == self.coordinator:
                    self._ask(
                        lambda: self._wait(lambda _: not self._here(others), GRACE), 2 * GRACE
                    )
                else:
                    self._ask(lambda: None, GRACE)  # What was posted has been done by then.
        self.worker.close()

    def _come(self, topic: str, note: bytes | None) -> None:
        """Say that this rank is here, what for, and whom it suspects."""
        text = json.dumps([topic, _text(note), list(self.suspects.items())])
        self.store.set(self._key(self.rank), text)

    def _preside(
        self, topic: str, note: bytes | None, takes_time: bool
    ) -> tuple[dict[int, str], list[bytes | None]]:
        """As the coordinator: come, wait for everyone; return who is lost, and all notes."""
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
        if takes_time and not lost and self._decided():  # somebody has left: it would be in vain
            return self._decide(self.number, {})[0], []
        return lost, [_bytes(note) for _, note, _ in came]

    def _close(
        self, lost: Mapping[int, str], said: bytes | None
    ) -> tuple[dict[int, str], bytes | None]:
        """As the coordinator: give the verdict, and return the one that holds."""
        found = self._decide(self.number, lost, said)
        # Who is here has read the last verdict.
        keys = [self._key(self.rank), self._begun, f"{self.number - 1}/verdict"]
        self.worker.post(lambda: [self.store.delete_key(key) for key in keys])
        return found

    def _attend(
        self, topic: str, note: bytes | None, takes_time: bool
    ) -> tuple[dict[int, str], bytes | None]:
        """As any other rank: come, wait for the verdict, and return it; give one if none comes."""
        self._come(topic, note)
        lost = self._unanswered(topic, takes_time)
        found = self._decide(self.number, self._left() or lost)
        mine = self._key(self.rank)
        self.worker.post(lambda: self.store.delete_key(mine))
        return found

    def _unanswered(self, topic: str, takes_time: bool) -> dict[int, str]:
        """Wait for the verdict, and return who is lost if none comes."""

        def has(key: str) -> Callable[[float], bool]:
            return lambda passed: self._decided() or (passed >= SOON and self.store.check([key]))

        dead = self._dead(self._decided)
        if dead:
            return dead
        if not self._wait(has(self._key(self.coordinator)), self.timeout):
            return self._absent(topic)
        # It may have come later than this rank, wait as long for the others, and work as long.
        begun = not takes_time or self._wait(has(self._begun), self.timeout + GRACE / 2)
        if begun and self._wait(self._decided, self.timeout + GRACE / 2):
            return {}
        return {self.ranks[self.coordinator]: f"came to {topic} and then fell silent"}

    def _dead(self, ready: Callable[[float], bool]) -> dict[int, str]:
        """Return whose connection is gone and who does not come either, after a grace."""
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
        """Give a verdict unless one was given; return the one that holds."""
        mine = json.dumps([list(lost.items()), _text(said)])
        holds, text = json.loads(self.store.compare_set(f"{number}/verdict", "", mine))
        return {int(rank): str(reason) for rank, reason in holds}, _bytes(text)

    def _called_off(self) -> dict[int, str]:
        """Return who is lost according to the next meeting's verdict, if it has one."""
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
        """Ask again and again, less often as time passes, until ready or out of time.

        ``ready`` is given the seconds that have passed.
        """
        start, passed = time.monotonic(), 0.0
        # To ask takes processor time that the rank which is waited for may need. And where many
        # ranks ask one server, the first and the longest pause grow with their number.
        first, longest = max(5e-4, len(self.ranks) * 1e-5), max(0.05, len(self.ranks) / 10_000)
        while not ready(passed):
            self.heard = time.monotonic()
            passed = self.heard - start
            if passed >= seconds or self.leaving is not None:
                return False
            time.sleep(min(max(passed / 8, first), longest, seconds - passed))
        return True

    def _ask(self, question: Callable[[], T], limit: float | None = None) -> T:
        """Talk to the store; if it is gone, the rank in whose process it lived is lost.

        Args:
            question: What to do with the store.
            limit: Seconds that all of it may take; by default, the store must answer each request
                within the timeout.
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
        """Is there once the coordinator looks for its answer."""
        return f"{self.number}/begun"


def _blamed(suspects: Mapping[int, Mapping[int, str]]) -> dict[int, str]:
    """Return whom to blame, given whom each rank waited for in vain: who waited for nobody.

    >>> _blamed({0: {1: "sent nothing"}, 1: {2: "sent nothing"}, 2: {}})
    {2: 'sent nothing'}
    """
    suspected = {int(rank): why for found in suspects.values() for rank, why in found.items()}
    idle = {rank: why for rank, why in suspected.items() if not suspects.get(rank)}
    return idle or suspected


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode("ascii")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
