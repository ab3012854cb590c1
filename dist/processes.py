"""Ranks that are processes of a torch.distributed job: `torch_comm`.

Before any byte flows, the ranks meet in the group's key-value store (see `rendezvous`) to find out
whether all are present: gloo itself breaks all connections of a group when one wait times out, and
then blames the wrong ranks. The bytes then go through gloo, between the coordinator and each other
rank, in CPU memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs

from shardplan.planning import named_extras

from .comm import Comm, Meeting, Pending, join, split
from .errors import LostRanksError
from .rendezvous import Meetings
from .transport import StuckError, Trouble, Wire, Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SMALL = 4096
"""The most bytes of a message that is passed through the store, without gloo."""

_SEND = b""
"""The coordinator's answer if some rank has too many bytes for a note: send them, meet again."""

_TAG = 0x5AD0000
"""Tag of the messages of a group's first comm; users have small tags."""


@attrs.define(eq=False)
class _Shared:
    """What all comms of a group share."""

    hosted: Any  # the group's own store, which this process may host for the others
    store: Any  # the same on our own connection: torch's waits block theirs as long as they last
    connections: Any = None  # our own gloo connections, once they are made


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


def torch_comm(
    group: ProcessGroup | None = None,
    *,
    timeout: float = 1800.0,
    coordinator: int = 0,
    private: bool = False,
    fresh: bool = False,
) -> Comm:
    """Return the comm of a torch.distributed process group.

    All ranks of the group call this, in the same order if they call it more than once. Comms of
    one group do not disturb each other, and may be used by different threads at the same time. If
    the group has no gloo backend for CPU tensors (NCCL), gloo connections between the same ranks
    are made once and kept. The GPU is never touched.

    Args:
        group: The group; by default, all ranks of the job.
        timeout: Seconds to wait for a rank, and for one message. A rank that is busy for longer
            counts as lost.
        coordinator: The place in the group of the rank that gathers and scatters.
        private: Whether to use our own connections even if the group has some, so that nothing
            here can disturb training.
        fresh: Whether to make new connections, instead of sharing those of earlier comms: for
            ranks that continue after a comm was lost.

    Returns:
        The comm. Its `rank` is the place in the group; its errors name global ranks.

    Raises:
        ValueError: This rank is not in the group, or the coordinator is not.
        RuntimeError: There is no process group.
        LostRanksError: Some ranks did not come to make connections, or the store through which the
            ranks meet does not answer.

    >>> torch_comm()
    Traceback (most recent call last):
    RuntimeError: torch.distributed has no process group; call init_process_group, or use solo()
    """
    with named_extras("torch_comm"):
        import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group; call init_process_group, or use solo()"
        )
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if group is None or rank < 0:
        raise ValueError("this rank is not in the group; only its members may make its comm")
    ranks = tuple(dist.get_process_group_ranks(group))
    if not 0 <= coordinator < len(ranks):
        raise ValueError(f"coordinator {coordinator} is not one of the {len(ranks)} ranks")
    worker, host = Worker(), _host_of_the_store()
    try:
        shared, number = worker.call(lambda: _numbered(group, rank), timeout)
    except StuckError as error:
        lost = ranks[coordinator] if host is None else host
        reason = f"cannot be reached: the store through which the ranks meet gives {error}"
        raise LostRanksError({lost: reason}) from None
    rooms = dist.PrefixStore(f"shardplan/{number}", shared.store)
    meetings = Meetings(rooms, rank, coordinator, ranks, timeout, host, worker=worker)
    if not fresh and not private and "cpu:gloo" in dist.get_backend_config(group).split(","):
        messages = group
    else:
        messages = _connect(shared, meetings, number, fresh)
    wire = Wire(messages, _TAG + number, timeout, meetings.check_next)
    # The group's own store stays alive with the comm.
    comm = _TorchComm(rank, ranks, coordinator, meetings, wire, shared.hosted)
    weakref.finalize(comm, meetings.end)
    weakref.finalize(comm, wire.worker.close)
    return comm


def _connect(shared: _Shared, meetings: Meetings, number: int, fresh: bool) -> Any:
    """Return our own gloo connections between the ranks of a group, made once.

    They are made through the group's store, by its members alone: torch's new_group would need
    every rank of the job, or names on which ranks with different groups disagree.
    """
    import torch.distributed as dist

    if shared.connections is not None and not fresh:
        return shared.connections
    try:
        meetings.meet("torch_comm")
        rooms = dist.PrefixStore(f"shardplan/gloo/{number}", shared.store)
        limit = timedelta(seconds=meetings.timeout)
        ranks = len(meetings.ranks)
        shared.connections = dist.ProcessGroupGloo(rooms, meetings.rank, ranks, limit)
    except LostRanksError:
        raise
    except BaseException as error:
        meetings.leave(f"left torch_comm: {type(error).__name__}")
        raise
    return shared.connections


def _numbered(group: ProcessGroup, rank: int) -> tuple[_Shared, int]:
    """Return what the group's comms share, and the number of the next one, equal on all ranks."""
    from torch.distributed import distributed_c10d

    if group not in _shared:
        store = distributed_c10d._get_process_group_store(group)
        _shared[group] = _Shared(store, store.clone() if hasattr(store, "clone") else store)
    return _shared[group], _shared[group].store.add(f"shardplan/comms/{rank}", 1)


def _host_of_the_store() -> int | None:
    """Return the rank whose process holds the store; None if a launcher's agent does."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


@attrs.frozen(eq=False, repr=False)
class _TorchComm(Comm):
    """A comm over a gloo group; see `torch_comm`."""

    rank: int
    ranks: Sequence[int]
    coordinator: int
    _meetings: Meetings
    _wire: Wire
    _hosted: Any

    @property
    def lost(self) -> bool:
        return self._meetings.lost is not None

    def meet(self, data: bytes, topic: str) -> Meeting:
        note = _small(data)
        if self.rank == self.coordinator:
            notes = self._meetings.open(topic, note)
            return Meeting(self, topic, self._collect(data, notes, topic))
        answer = self._meetings.attend(topic, note)
        if answer == _SEND:
            if note is None:
                self._check(self._wire.send({self.coordinator: data}))
            answer = self._meetings.attend(topic, b"")
        if answer is not None:
            parts = split(answer)
            return Meeting(self, topic, None, parts[self.rank if len(parts) > 1 else 0])
        received, failed = self._wire.receive([self.coordinator])
        self._check(failed)
        return Meeting(self, topic, None, received[self.coordinator])

    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        small = _small(*parts)
        self._meetings.close(small)
        each = list(parts) * self.world_size if len(parts) == 1 else parts
        if small is None:
            self._check(self._wire.send({place: each[place] for place in self._others}))
        return each[self.rank]

    def _collect(self, data: bytes, notes: Sequence[bytes | None], topic: str) -> list[bytes]:
        """Return all ranks' bytes; those too big for a note are sent now, between two meetings."""
        found = {place: split(note)[0] for place, note in enumerate(notes) if note is not None}
        found[self.rank] = data
        big = [place for place in self._others if place not in found]
        if big:
            self._meetings.close(_SEND)
            received, failed = self._wire.receive(big)
            self._check(failed)
            found |= received
            self._meetings.open(topic, b"")
        return [found[place] for place in range(self.world_size)]

    def send(self, place: int, data: memoryview) -> Pending:
        return self._wire.post(place, data, self._lost_ranks, sends=True)

    def receive(self, place: int, into: memoryview) -> Pending:
        return self._wire.post(place, into, self._lost_ranks, sends=False)

    def _lost_ranks(self, troubles: Mapping[int, Trouble]) -> LostRanksError:
        """Return which ranks are lost, after bytes did not flow between this rank and others."""
        suspects = {self.ranks[place]: trouble.text for place, trouble in troubles.items()}
        broken = any(trouble.broken for trouble in troubles.values())
        return self._meetings.resolve(suspects, broken=broken)

    def leave(self, reason: str) -> None:
        """Call off the meeting that is being held, or else the next one."""
        self._meetings.leave(reason)

    @property
    def _others(self) -> list[int]:
        return [place for place in range(self.world_size) if place != self.rank]

    def _check(self, failed: Mapping[int, Trouble]) -> None:
        """Raise if messages failed; the other ranks get the same error at the next meeting."""
        if failed:
            raise self._lost_ranks(failed)


def _small(*parts: bytes) -> bytes | None:
    """Return parts as one note for a meeting; None if they are too big."""
    return join(parts) if sum(map(len, parts)) <= SMALL else None
