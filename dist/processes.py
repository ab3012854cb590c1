"""Ranks that are processes of a torch.distributed job: `torch_comm`.

The ranks meet in the group's key-value store (see `rendezvous`), through which the messages of
collectives travel, too. What one rank sends another directly goes over a connection of these two
(see `transport`). The group's backend is not used: gloo breaks all connections of a group when one
wait times out, and then blames the wrong ranks; and it connects each rank with all others.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from shardplan.planning import named_extras

from .comm import Comm, Meeting, Pending
from .errors import LostRanksError
from .rendezvous import Meetings, WaitingStore
from .transport import StuckError, Trouble, Wire, Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@attrs.define(eq=False)
class _Shared:
    """What all comms of a group share."""

    hosted: Any  # the group's own store, which this process may host for the others
    store: Any  # the same on our own connection: who waits on one blocks it as long as that lasts
    line: WaitingStore | None = None  # the same once more, to wait on


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


def torch_comm(
    group: ProcessGroup | None = None,
    *,
    timeout: float = 1800.0,
    coordinator: int = 0,
) -> Comm:
    """Return the comm of a torch.distributed process group.

    All ranks of the group call this, in the same order if they call it more than once. Comms of
    one group do not disturb each other, and may be used by different threads at the same time. The
    group's own connections, and the GPU, are never touched.

    Args:
        group: The group; by default, all ranks of the job.
        timeout: Seconds to wait for a rank, and for one message. A rank that is busy for longer
            counts as lost.
        coordinator: The place in the group of the rank that gathers and scatters.

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
    prefix = f"shardplan/{number}"
    rooms, line = dist.PrefixStore(prefix, shared.store), shared.line
    if line is not None:
        line = attrs.evolve(line, store=dist.PrefixStore(prefix, line.store))
    meetings = Meetings(rooms, rank, coordinator, ranks, timeout, host, worker=worker, line=line)
    wire = Wire(rooms, rank, timeout, meetings.check_next)
    # The group's own store stays alive with the comm.
    comm = _TorchComm(rank, ranks, coordinator, meetings, wire, shared.hosted)
    weakref.finalize(comm, meetings.end)
    weakref.finalize(comm, wire.close)
    return comm


def _numbered(group: ProcessGroup, rank: int) -> tuple[_Shared, int]:
    """Return what the group's comms share, and the number of the next one, equal on all ranks.

    Torch before 2.8 cannot connect to a store once more.
    """
    from torch.distributed import distributed_c10d

    if group not in _shared:
        store = distributed_c10d._get_process_group_store(group)
        if hasattr(store, "clone"):
            _shared[group] = _Shared(store, store.clone(), WaitingStore(store.clone()))
        else:
            _shared[group] = _Shared(store, store)
    return _shared[group], _shared[group].store.add(f"shardplan/comms/{rank}", 1)


def _host_of_the_store() -> int | None:
    """Return the rank whose process holds the store; None if a launcher's agent does."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


@attrs.frozen(eq=False, repr=False)
class _TorchComm(Comm):
    """A comm among processes; see `torch_comm`."""

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
        if self.rank == self.coordinator:
            return Meeting(self, topic, self._meetings.open(topic, data))
        return Meeting(self, topic, None, self._meetings.attend(topic, data))

    def answer(self, parts: Sequence[bytes], topic: str) -> bytes:
        self._meetings.close(parts)
        return parts[self.rank if len(parts) > 1 else 0]

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
