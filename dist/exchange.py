"""Messages between ranks outside of meetings: each rank knows what it sends and receives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .comm import Comm

__all__ = ["exchange", "swap"]

Messages = Iterable[tuple[int, memoryview]]


def swap(comm: Comm, going: Messages, coming: Messages) -> None:
    """Send messages, and fill memory with others, all at the same time.

    Between two ranks, messages arrive in the order of sending. Empty ones are left out.

    Args:
        comm: The ranks.
        going: Places to send to, and what to send; it must not change meanwhile.
        coming: Places to receive from, and the memory to fill.

    >>> from shardplan.dist import run_ranks
    >>> def pass_on(comm):
    ...     got, after = bytearray(1), (comm.rank + 1) % 3
    ...     swap(
    ...         comm, [(after, memoryview(b"%d" % comm.rank))], [((after + 1) % 3, memoryview(got))]
    ...     )
    ...     return bytes(got)
    >>> run_ranks(3, pass_on)
    [b'2', b'0', b'1']

    Raises:
        LostRanksError: A rank is gone.
    """
    pending = [comm.receive(place, into) for place, into in coming if into.nbytes]
    pending += [comm.send(place, data) for place, data in going if data.nbytes]
    for one in pending:
        one.wait()


def exchange(comm: Comm, messages: Mapping[int, bytes], sources: Sequence[int]) -> list[bytes]:
    """Send messages by place, and return those of some places; their lengths travel first."""
    lengths = [bytearray(8) for _ in sources]
    sizes = {target: len(data).to_bytes(8, "big") for target, data in messages.items()}
    swap(comm, _views(sizes.items()), _views(zip(sources, lengths, strict=True)))
    arrived = [bytearray(int.from_bytes(length, "big")) for length in lengths]
    swap(comm, _views(messages.items()), _views(zip(sources, arrived, strict=True)))
    return [bytes(data) for data in arrived]


def _views(messages: Iterable[tuple[int, bytes | bytearray]]) -> Messages:
    return [(place, memoryview(data)) for place, data in messages]
