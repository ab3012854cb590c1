"""The protocol of a group of ranks, `Comm`, and a group of one, `solo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import attrs

Reduce = Callable[[list[bytes]], bytes]
"""Computes a result from every rank's bytes, by rank, on the coordinator."""


class Pending(Protocol):
    """A transfer of bytes between two ranks."""

    def wait(self) -> None:
        """Return once the memory can be used again, or was filled.

        Raises:
            LostRanksError: The other rank is gone, or took longer than half the comm's timeout.
        """


class Comm(Protocol):
    """A group of ranks that exchange bytes. Every rank calls the same methods in the same order.

    Each method is a meeting: it returns only if all ranks take part, and raises `LostRanksError`,
    which names those that do not, on all that do. After that the comm cannot be used any more, and
    raises at once; the remaining ranks can make another. The topic is the purpose of a meeting:
    ranks that come for different ones get an error. Only bytes are sent, so that nothing received
    can run code.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def coordinator(self) -> int:
        """The place of the rank that gathers and scatters."""

    @property
    def ranks(self) -> Sequence[int]:
        """Per place in the group, the rank's number in the whole job."""

    @property
    def lost(self) -> bool:
        """Whether ranks were lost, so that the comm cannot be used any more."""

    def gather(self, data: bytes, topic: str = "gather") -> list[bytes] | None:
        """Return every rank's bytes, by rank, on the coordinator; None on the others."""

    def scatter(self, parts: Sequence[bytes] | None, topic: str = "scatter") -> bytes:
        """Return this rank's part of what the coordinator gives, one part per rank."""

    def broadcast(self, data: bytes | None, topic: str = "broadcast") -> bytes:
        """Return, on every rank, what the coordinator gives."""

    def all_gather(self, data: bytes, topic: str = "all_gather") -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank."""

    def reduce(self, data: bytes, work: Reduce, topic: str = "reduce") -> bytes:
        """Return, on every rank, what ``work`` makes of every rank's bytes on the coordinator."""

    def barrier(self) -> None:
        """Return once all ranks have come."""

    def send(self, place: int, data: memoryview) -> Pending:
        """Begin to send bytes to one rank, which receives as many; this is not a meeting."""

    def receive(self, place: int, into: memoryview) -> Pending:
        """Begin to fill memory with what one rank sends, in the order in which it sends."""

    def leave(self, reason: str) -> None:
        """Announce, without waiting, that this rank takes part in no further meeting."""


@attrs.frozen
class _Solo:
    """The group of one rank; see `solo`."""

    rank: int = 0
    world_size: int = 1
    coordinator: int = 0
    ranks: Sequence[int] = (0,)
    lost: bool = False

    def gather(self, data: bytes, topic: str = "gather") -> list[bytes] | None:
        return [as_bytes(data)]

    def scatter(self, parts: Sequence[bytes] | None, topic: str = "scatter") -> bytes:
        return as_parts(parts, 1)[0]

    def broadcast(self, data: bytes | None, topic: str = "broadcast") -> bytes:
        return as_bytes(data)

    def all_gather(self, data: bytes, topic: str = "all_gather") -> list[bytes]:
        return [as_bytes(data)]

    def reduce(self, data: bytes, work: Reduce, topic: str = "reduce") -> bytes:
        return as_bytes(work([as_bytes(data)]))

    def barrier(self) -> None:
        pass

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
            "encode it first, or use a step with encode and decode"
        )
    return bytes(data)


def as_parts(parts: Sequence[bytes] | None, world_size: int) -> list[bytes]:
    """Return what a coordinator scatters as a list of bytes, one part per rank, or raise."""
    if parts is None or len(parts) != world_size:
        came = "none" if parts is None else len(parts)
        raise ValueError(f"scatter takes one part for each of {world_size} ranks, and {came} came")
    return [as_bytes(part) for part in parts]
