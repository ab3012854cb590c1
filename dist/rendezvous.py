"""Meetings of ranks in a key-value store, which carry the messages of every collective.

A meeting takes a constant number of requests per rank:

1. Each rank appends its note to that of its batch, and counts itself in. The rank that comes last
   sets ``<number>/all``, for which the coordinator waits.
2. The coordinator reads the notes, one batch at a time. It sets ``<number>/begun``, and may take
   its time to compute an answer.
3. It writes ``<number>/verdict``, with its answer, for which all other ranks wait.

Long messages are stored in pieces. To wait is one request, which the store answers when the key is
there; now and then, ever less often, a rank that waits looks how far the meeting has come.

The verdict is written once, by compare-and-set, and holds for everyone. So any rank that notices
that another one is missing, or that leaves itself, can call the meeting off for all; and a rank
that is late finds out that it was given up. If the coordinator is missing, one rank finds out who
is there, and the others wait for what it writes.

A rank that does not receive another's bytes cannot know why: the other may itself wait for a third
one. So it brings its suspicion to the next meeting. Absent ranks are lost. If none is absent, those
are lost that are suspected and suspect nobody.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import attrs

from .errors import LostRanksError
from .transport import Job, Worker

T = TypeVar("T")

GRACE = 2.0
"""Seconds beyond the timeout to wait for the coordinator's verdict, or for the store."""

SMALL: Final = 4096
"""The most bytes of a message that travels in a note or a verdict."""

PIECE = 1 << 16
"""The most bytes of a value of the store; it handles larger ones slowly, and refuses very large."""

_FOR_EVER: Final = timedelta(days=20)  # torch counts milliseconds in 31 bits
_BATCH: Final = 128  # ranks whose notes share a key
_SIZE: Final = struct.Struct("<Q")


@attrs.frozen
class _Note:
    """What a rank brings to a meeting."""

    topic: str
    data: bytes | None  # its message; None if that is stored in pieces
    suspects: dict[int, str]  # ranks whose bytes did not come, and why


@attrs.frozen(eq=False)
class WaitingStore:
    """The store on a connection that blocks while somebody waits, and whose turn it is to wait."""

    store: Any
    turn: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.define
class Meetings:
    """This rank's view of the meetings of its group."""

    store: Any  # a key-value store of torch, on a connection on which nobody waits
    rank: int  # this rank's place in the group
    coordinator: int  # the place of the rank that gives verdicts
    ranks: Sequence[int]  # per place, the global rank
    timeout: float  # seconds to wait for the other ranks
    host: int | None = 0  # global rank in whose process the store lives; None if not in a rank's
    number: int = 0  # of meetings that this rank has come to
    over: int = 0  # of meetings whose verdict this rank needs no more
    lost: LostRanksError | None = None  # no meeting takes place after that
    worker: Worker = attrs.field(factory=Worker)  # the thread that talks to the store
    leaving: str | None = None  # why this rank leaves, if it does: the worker then stops waiting
    line: WaitingStore | None = None  # to wait on
    waiter: Worker = attrs.field(factory=Worker)  # the thread that waits there
    waiting: Job | None = None  # its last wait
    due: float = 0.0  # when the store should answer at the latest, by the monotonic clock
    suspects: dict[int, str] = attrs.field(factory=dict)  # ranks whose bytes did not come, and why
    broken: bool = False  # whether the connection to suspects is gone
    stored: list[str] = attrs.field(factory=list)  # keys of this rank that others may still read

    def meet(self, topic: str) -> None:
        """Return once every rank has come; see `open` and `attend`."""
        if self.rank == self.coordinator:
            self.open(topic, b"")
            self.close([b""])
        else:
            self.attend(topic, b"")

    def open(self, topic: str, data: bytes) -> list[bytes]:
        """As the coordinator: return all messages once every rank has come to the same meeting.

        If one does not, raise, on all. The meeting ends when `close` gives the answer, which may
        take as long as the timeout to compute.
        """
        self._next()
        lost, messages = self._ask(lambda: self._preside(topic, data))
        if lost:
            self._ask(lambda: self._close(lost, [b""]))
            raise self.lose(lost)
        return messages

    def close(self, parts: Sequence[bytes]) -> None:
        """As the coordinator: end the meeting; raise if it was called off meanwhile.

        Args:
            parts: The answer, one for all ranks or one for each.
        """
        lost = self._ask(lambda: self._close({}, parts))
        if lost:
            raise self.lose(lost)

    def attend(self, topic: str, data: bytes) -> bytes:
        """As any other rank: come to the meeting, and return the coordinator's answer."""
        self._next()
        lost, answer = self._ask(lambda: self._attend(topic, data))
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
        if self.worker.busy:  # it waits for others, and ends when this is published
            self.worker.close()
            self.worker = Worker()
        with contextlib.suppress(LostRanksError):  # if the store is gone as well
            reasons = self._ask(lambda: self._publish(reasons), GRACE)
            if self.ranks[self.rank] == self.host:
                # The caller may end this process at once, and the store with it: ranks that have
                # not read the verdict by then would blame this one.
                self._ask(lambda: self._wait_for_readers(GRACE / 2), GRACE)
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
        """Wait until the others have read the last verdict: this process may host the store.

        No thread may wait in torch when the interpreter ends: it would abort the process.
        """
        if self.lost is None and self.waiting is not None and not self.waiting.done.is_set():
            self.leave("ended")
            self.waiting.done.wait(GRACE)
        if self.number and self.lost is None:
            with contextlib.suppress(LostRanksError):  # after all that was posted
                if self.rank == self.coordinator:
                    self._ask(lambda: self._wait_for_readers(GRACE), 2 * GRACE)
                    self._ask(lambda: self._forget(self.stored, self.number), GRACE)
                else:
                    self._ask(lambda: None, GRACE)
        self.worker.close()
        self.waiter.close()

    def _preside(self, topic: str, data: bytes) -> tuple[dict[int, str], list[bytes]]:
        """As the coordinator: wait for all ranks; return the lost ones, and all messages."""
        self.store.set(self._key("open"), "")
        self._come(_Note(topic, b"", self.suspects))
        everyone = self._key("all")
        dead = self._dead(everyone)
        if dead:
            return dead, []
        self._wait(everyone, self.timeout)
        if self.leaving is not None:
            return self._left(), []
        if self.store.check([self._key("verdict")]):  # a rank has left
            return self._decide(self.number, {})[0], []
        came = self._roll()  # if the last rank came just now, all are there
        absent = self._absent(topic, came)
        if absent:
            return absent, []
        astray = {
            self.ranks[place]: f"came to {note.topic} while rank {self.ranks[self.rank]} came to "
            f"{topic}"
            for place, note in sorted(came.items())
            if note.topic != topic
        }
        suspects = {self.ranks[place]: note.suspects for place, note in came.items()}
        lost = _blamed(suspects) or astray
        if lost:
            return lost, []
        self.store.set(self._key("begun"), "")  # from now on this rank computes its answer
        messages = [came[place].data for place in range(len(self.ranks))]
        messages[self.rank] = data
        return {}, [
            self._fetch(f"note/{place}") if message is None else message
            for place, message in enumerate(messages)
        ]

    def _close(self, lost: Mapping[int, str], parts: Sequence[bytes]) -> dict[int, str]:
        """As the coordinator: write the verdict; return the lost ranks of the one that holds."""
        number, old, self.stored = self.number, self.stored, []
        lost, _ = self._decide(number, lost, self._said(parts))
        if lost:  # whoever is late reads what there is
            old = []
        else:  # all are here, and have read the last answer
            batches = [f"notes/{batch}" for batch in range(self._batches)]
            old += [self._key(name) for name in ("open", "all", "begun", *batches)]
            self.stored.append(self._key("verdict"))
        self.worker.post(lambda: self._forget(old, number))
        return lost

    def _attend(self, topic: str, data: bytes) -> tuple[dict[int, str], bytes]:
        """As any other rank: wait for the verdict and return it; write one if none comes."""
        if len(data) > SMALL:
            self._put(f"note/{self.rank}", data)
        self._come(_Note(topic, None if len(data) > SMALL else data, self.suspects))
        lost = self._left() or self._unanswered(topic)
        lost, said = self._decide(self.number, lost) if lost else self._verdict(self.number)
        answer = b"" if lost else self._heard(said)
        number, old, self.stored = self.number, self.stored, []
        self.worker.post(lambda: self._forget(old, number))
        return lost, answer

    def _come(self, note: _Note) -> None:
        """Announce this rank; the last one that comes says so."""
        text = None if note.data is None else base64.b64encode(note.data).decode("ascii")
        row = json.dumps([self.rank, note.topic, text, list(note.suspects.items())])
        self.store.append(self._key(f"notes/{self.rank // _BATCH}"), f"{row},")
        if self.store.add("came", 1) == self.number * len(self.ranks):
            self.store.set(self._key("all"), "")

    def _unanswered(self, topic: str) -> dict[int, str]:
        """Wait for the verdict; if none comes, return the lost ranks."""
        verdict, opened, begun = map(self._key, ("verdict", "open", "begun"))
        dead = self._dead(verdict)
        if dead:
            return dead
        # The coordinator may come late, then wait as long for the others, and compute for as long.
        longer = self.timeout + GRACE / 2
        for sooner, limit in ((opened, self.timeout), (begun, longer), ("", longer)):
            found = self._wait(verdict, limit, sooner)
            if found == verdict:
                return {}
            if not found and sooner == opened:
                return self._inquest(topic)
            if not found:
                break
        return self._left() or {
            self.ranks[self.coordinator]: f"came to {topic} and then fell silent"
        }

    def _inquest(self, topic: str) -> dict[int, str]:
        """Return the ranks that did not come, the coordinator among them, unless a verdict comes.

        The first rank that asks finds out; the others, only if it is lost meanwhile.
        """
        if self.store.add(self._key("inquest"), 1) > 1 and self._wait(self._key("verdict"), GRACE):
            return {}
        # If the coordinator came just now, it is too late as well.
        return self._left() or self._absent(topic, self._roll().keys() - {self.coordinator})

    def _dead(self, key: str) -> dict[int, str]:
        """Return the suspects with broken connections that do not come within a grace period."""
        if not self.broken or self._wait(key, min(GRACE, self.timeout)):
            return {}
        here = {self.ranks[place] for place in self._roll()}
        return {rank: why for rank, why in self.suspects.items() if rank not in here}

    def _left(self) -> dict[int, str]:
        """Return this rank if it leaves, with its reason."""
        return {} if self.leaving is None else {self.ranks[self.rank]: self.leaving}

    def _absent(self, topic: str, came: Collection[int]) -> dict[int, str]:
        reason = f"did not come to {topic} within {self.timeout:g} s"
        return {rank: reason for place, rank in enumerate(self.ranks) if place not in came}

    def _roll(self) -> dict[int, _Note]:
        """Return the notes of all ranks that have come, by place."""
        notes = {}
        for batch in range(self._batches):
            # What is there, or nothing: `get` would wait for a batch of which nobody has come.
            rows = self.store.compare_set(self._key(f"notes/{batch}"), "", "")
            for place, topic, text, suspects in json.loads(b"[%s]" % rows[:-1]):
                data = None if text is None else base64.b64decode(text)
                notes[place] = _Note(topic, data, dict(suspects))
        return notes

    def _decide(
        self, number: int, lost: Mapping[int, str], said: Any = None
    ) -> tuple[dict[int, str], Any]:
        """Write a verdict unless there is one; return the one that holds."""
        mine = json.dumps([list(lost.items()), said])
        holds = self.store.compare_set(f"{number}/verdict", "", mine)
        if lost:
            self.store.set(f"{number}/all", "")  # for a coordinator that waits for others
        return _decoded(holds)

    def _verdict(self, number: int) -> tuple[dict[int, str], Any]:
        return _decoded(self.store.get(f"{number}/verdict"))

    def _called_off(self) -> dict[int, str]:
        """Return the lost ranks of the next meeting's verdict, if it has one."""
        number = self.number + 1
        return self._verdict(number)[0] if self.store.check([f"{number}/verdict"]) else {}

    def _publish(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Call off the meeting that is being held and the next one; return the reasons that hold.

        A meeting that has a successor is over, and its verdict may be gone from the store.
        """
        if not self._called_off():
            reasons = self._decide(self.number, reasons)[0] or reasons
        reasons = self._decide(self.number + 1, reasons)[0]
        self._forget([], self.number)
        return reasons

    def _said(self, parts: Sequence[bytes]) -> Any:
        """Return how a verdict says an answer, and store what is too long for it."""
        if sum(map(len, parts)) + 3 * len(parts) <= SMALL + 3:
            return [base64.b64encode(part).decode("ascii") for part in parts]
        names = ["answer"] if len(parts) == 1 else [f"answer/{n}" for n in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            self._put(name, part)
        return len(parts)

    def _heard(self, said: Any) -> bytes:
        """Return this rank's part of an answer; see `_said`."""
        if isinstance(said, int):
            return self._fetch("answer" if said == 1 else f"answer/{self.rank}")
        return base64.b64decode(said[self.rank if len(said) > 1 else 0])

    def _put(self, name: str, data: bytes) -> None:
        """Store a message of this meeting in pieces; the first one says how long it is."""
        key, data = self._key(name), _SIZE.pack(len(data)) + data
        for start in range(0, len(data), PIECE):
            self.due = time.monotonic()
            self.stored.append(f"{key}/{start}")
            self.store.set(self.stored[-1], data[start : start + PIECE])

    def _fetch(self, name: str) -> bytes:
        """Return a message that was stored in pieces."""
        key = self._key(name)
        pieces = [self.store.get(f"{key}/0")]
        (size,) = _SIZE.unpack_from(pieces[0])
        for start in range(PIECE, _SIZE.size + size, PIECE):
            self.due = time.monotonic()
            pieces.append(self.store.get(f"{key}/{start}"))
        return b"".join(pieces)[_SIZE.size :]

    def _forget(self, keys: Sequence[str], number: int) -> None:
        """Remove keys that nobody reads any more; count this rank as done with a meeting."""
        for key in keys:
            self.store.delete_key(key)
        if self.over < number:
            self.over = number
            self.store.add("read", 1)

    def _wait_for_readers(self, seconds: float) -> None:
        """Return once no rank that has come still waits for the verdict, or needs what it says."""
        end = time.monotonic() + seconds
        while self.store.add("read", 0) < self.store.add("came", 0):
            if time.monotonic() > end:
                return
            time.sleep(0.01)

    def _wait(self, key: str, seconds: float, sooner: str = "") -> str:
        """Wait in the store for a key, and now and then look for one that may be there sooner.

        Return the one that was found; nothing if the time is up, or this rank leaves. All waits of
        a meeting are for one key; whoever ends the meeting ends them.
        """
        n, end = len(self.ranks), time.monotonic() + seconds
        first, longest = max(0.5, n / 2000), max(1.0, n / 500)
        pause = 0.0  # to look at once, if it waits already
        if self.waiting is None or self.waiting.done.is_set():
            self.waiting, pause = self.waiter.begin(partial(self._wait_for_ever, key)), first
        while self.leaving is None and (left := end - time.monotonic()) > 0:
            self.due = time.monotonic() + pause
            if self.waiting.done.wait(min(pause, left)):
                self.waiting.result()
                return key
            if self.store.check([sooner or key]) and sooner:  # or else find out that it answers
                return sooner
            pause = min(max(2 * pause, first), longest)
        return ""

    def _wait_for_ever(self, key: str) -> None:
        """Wait on the line; poll if there is none, or another comm waits on it."""
        if self.line is not None and self.line.turn.acquire(blocking=False):
            try:
                self.line.store.wait([key], _FOR_EVER)
            finally:
                self.line.turn.release()
            return
        pause = 1e-3
        while self.lost is None and not self.store.check([key]):
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)

    def _ask(self, question: Callable[[], T], limit: float | None = None) -> T:
        """Talk to the store; if it is gone, the rank that hosts it is lost.

        All of it may take ``limit`` seconds; by default, each request may take the timeout.
        """
        try:
            if limit is not None:
                return self.worker.call(question, limit)
            return self.worker.call(question, self.timeout, lambda: self.due)
        except (RuntimeError, OSError) as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if self.host is None:
            rank, reason = self.ranks[self.coordinator], "cannot be reached: gone is the store"
        else:
            rank, reason = self.host, "is lost, and with it the store"
        self.lost = LostRanksError({rank: f"{reason} through which the ranks meet ({what})"})
        raise LostRanksError(self.lost.reasons)

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    @property
    def _batches(self) -> int:
        return -(-len(self.ranks) // _BATCH)


def _decoded(verdict: bytes) -> tuple[dict[int, str], Any]:
    """Return the lost ranks of a verdict, and what it says else."""
    lost, said = json.loads(verdict)
    return {int(rank): str(reason) for rank, reason in lost}, said


def _blamed(suspects: Mapping[int, Mapping[int, str]]) -> dict[int, str]:
    """Return the ranks to blame: those that others suspect, and that suspect nobody themselves."""
    suspected = {int(rank): why for found in suspects.values() for rank, why in found.items()}
    idle = {rank: why for rank, why in suspected.items() if not suspects.get(rank)}
    return idle or suspected
