"""A group of ranks, `Comm`, what every collective is made of, `Meeting`, and a group of one."""

from __future__ import annotations

import contextlib
import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import attrs

from .errors import LostRanksError

Reduce = Callable[[list[bytes]], bytes]
"""Computes a result from every rank's bytes, by rank, on the coordinator."""

_COUNT: Final = struct.Struct("<Q")


class Pending(Protocol):
    """A transfer of bytes between two ranks."""

    def wait(self) -> None:
        """Return once the memory can be used again, or was filled.

        Raises:
            LostRanksError: The other rank is gone, or took longer than half the comm's timeout.
        """


class Comm(ABC):
    """A group of ranks that exchange bytes. Every rank calls the same methods in the same order.

    Each collective is a meeting: it returns only if all ranks take part, and raises
    `LostRanksError`, which names those that do not, on all that do. After that the comm cannot be
    used any more, and raises at once; the remaining ranks can make another. The topic is the
    purpose of a meeting: ranks that come for different ones get an error. Only bytes are sent, so
    that nothing received can run code.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Per place in the group, the rank's number in the whole job."""

    @property
    @abstractmethod
    def coordinator(self) -> int:
        """The place of the rank that gathers and scatters."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether ranks were lost, so that the comm cannot be used any more."""

    @abstractmethod
    def meet(self, data: bytes, topic: str) -> Meeting:
        """Bring bytes to the coordinator, which must answer them; the others get its answer."""

    @abstractmethod
    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        """End a meeting on the coordinator; see `Meeting.answer`."""

    @abstractmethod
    def send(self, place: int, data: memoryview) -> Pending:
        """Begin to send bytes to one rank, which receives as many; this is not a meeting."""

    @abstractmethod
    def receive(self, place: int, into: memoryview) -> Pending:
        """Begin to fill memory with what one rank sends, in the order in which it sends."""

    @abstractmethod
    def leave(self, reason: str) -> None:
        """Announce, without waiting, that this rank takes part in no further meeting."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def gather(self, data: bytes, topic: str = "gather") -> list[bytes] | None:
        """Return every rank's bytes, by rank, on the coordinator; None on the others."""
        with self._leaving(topic):
            meeting = self.meet(as_bytes(data), topic)
            meeting.answer([b""])
            return meeting.gathered

    def scatter(self, parts: Sequence[bytes] | None, topic: str = "scatter") -> bytes:
        """Return this rank's part of what the coordinator gives, one part per rank."""
        with self._leaving(topic):
            given = self._one_each(parts) if self.rank == self.coordinator else []
            return self.meet(b"", topic).answer(given)

    def broadcast(self, data: bytes | None, topic: str = "broadcast") -> bytes:
        """Return, on every rank, what the coordinator gives."""
        with self._leaving(topic):
            given = as_bytes(data) if self.rank == self.coordinator else b""
            return self.meet(b"", topic).answer([given])

    def all_gather(self, data: bytes, topic: str = "all_gather") -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank."""
        with self._leaving(topic):
            meeting = self.meet(as_bytes(data), topic)
            return split(meeting.answer([join(meeting.gathered or [])]))

    def reduce(self, data: bytes, work: Reduce, topic: str = "reduce") -> bytes:
        """Return, on every rank, what ``work`` makes of every rank's bytes on the coordinator."""
        with self._leaving(topic):
            meeting = self.meet(as_bytes(data), topic)
            gathered = meeting.gathered
            return meeting.answer([] if gathered is None else [as_bytes(work(gathered))])

    def barrier(self) -> None:
        """Return once all ranks have come."""
        self.broadcast(b"", "barrier")

    def _one_each(self, parts: Sequence[bytes] | None) -> list[bytes]:
        """Return what a coordinator scatters, if it is one part per rank."""
        if parts is None or len(parts) != self.world_size:
            came = "none" if parts is None else len(parts)
            raise ValueError(
                f"scatter takes one part for each of {self.world_size} ranks, and {came} came"
            )
        return [as_bytes(part) for part in parts]

    @contextlib.contextmanager
    def _leaving(self, topic: str) -> Iterator[None]:
        """Leave if anything but a lost rank stops this one, so that others do not wait."""
        try:
            yield
        except LostRanksError:
            raise
        except BaseException as error:
            self.leave(departure(topic, error))
            raise


@attrs.frozen(eq=False)
class Meeting:
    """A meeting that all ranks have come to; every rank calls `answer` once."""

    comm: Comm  # the ranks
    topic: str  # its purpose
    # Every rank's bytes, by rank, on the coordinator; None on the others.
    gathered: list[bytes] | None
    reply: bytes = b""  # on the others, what the coordinator answered

    def answer(self, parts: Sequence[bytes]) -> bytes:
        """End the meeting, and return this rank's part of what the coordinator gives.

        ``parts`` are one for all ranks, or one per rank; they count on the coordinator only.
        """
        return self.reply if self.gathered is None else self.comm.answer(parts, self.topic)


@attrs.frozen(eq=False)
class _Solo(Comm):
    """The group of one rank; see `solo`."""

    rank: int = 0
    ranks: Sequence[int] = (0,)
    coordinator: int = 0
    lost: bool = False

    def meet(self, data: bytes, topic: str) -> Meeting:
        return Meeting(self, topic, [data])

    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        return parts[0]

    def send(self, place: int, data: memoryview) -> Pending:
        raise ValueError(f"a group of one rank has no rank {place} to send to")

    def receive(self, place: int, into: memoryview) -> Pending:
        raise ValueError(f"a group of one rank has no rank {place} to receive from")

    def leave(self, reason: str) -> None:
        pass


_SOLO: Final = _Solo()


def solo() -> Comm:
    """Return the comm of a job of one rank; it needs no process group.

    >>> comm = solo()
    >>> comm.rank, comm.world_size, comm.gather(b"plan")
    (0, 1, [b'plan'])
    """
    return _SOLO


def departure(topic: str, error: BaseException) -> str:
    """Return why a rank leaves, for those that wait for it."""
    text = f": {error}" if str(error) else ""
    return f"left {topic}: {type(error).__name__}{text}"


def as_bytes(data: object) -> bytes:
    """Return ``data`` as bytes, or raise TypeError: objects are not sent."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"only bytes travel between ranks, and this is a {type(data).__name__}; "
            "encode it first, or take a step, such as all_reduce"
        )
    return bytes(data)


def join(parts: Sequence[bytes]) -> bytes:
    """Return many byte strings as one that `split` takes apart."""
    sizes = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    return b"".join((sizes, *parts))


def split(data: bytes) -> list[bytes]:
    """Return the byte strings that `join` was given."""
    (count,) = _COUNT.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}Q", data, _COUNT.size)
    ends = list(itertools.accumulate(sizes, initial=_COUNT.size * (count + 1)))
    return [data[start:end] for start, end in itertools.pairwise(ends)]
