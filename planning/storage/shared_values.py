"""Which non-tensor values a rank reads, sends to others and receives, when ranks load together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from ..columns import ReadItems
from ..plans import LoadPlan
from ..records import LoadItemType


class ValueRead(NamedTuple):
    """A value, by its name in the state dict and its name in the checkpoint."""

    dest: str
    name: str


def value_reads(items: ReadItems) -> list[ValueRead]:
    """Return the values among some reads."""
    rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value).tolist()
    return [ValueRead(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows]


@attrs.frozen
class ValueExchange:
    """One rank's part in an exchange of values."""

    wanted: Sequence[ValueRead]  # all values that this rank fills
    alone: Sequence[ValueRead]  # those among them that it reads for itself alone
    # Per rank, the names of the values that this rank reads and sends to it.
    send: Mapping[int, Sequence[str]]
    sources: Sequence[int]  # the ranks that send values to this one, ascending

    @property
    def read(self) -> list[str]:
        """The names of the values that this rank reads for others."""
        return sorted({name for names in self.send.values() for name in names})


def value_exchange(plan: LoadPlan, rank: int, value_bytes: Callable[[str], int]) -> ValueExchange:
    """Return one rank's part in the exchange of the values of a plan with transfers.

    Values with no bytes of their own, by ``value_bytes``, are kept with the metadata, which every
    rank has; they do not travel.
    """
    transfers = plan.transfers
    rows = np.flatnonzero(transfers.reads.type == LoadItemType.BYTE_IO.value)
    names = [read.name for read in value_reads(transfers.reads)]
    sent: dict[int, list[str]] = {}
    sources, travelling = set[int](), set[str]()
    ends = zip(transfers.source[rows].tolist(), transfers.target[rows].tolist(), strict=True)
    for name, (source, target) in zip(names, ends, strict=True):
        if not value_bytes(name):
            continue
        travelling.add(name)
        if source == rank:
            sent.setdefault(target, []).append(name)
        else:
            sources.add(source)
    coming = transfers.reads.take(np.flatnonzero(transfers.target == rank))
    wanted = value_reads(plan.items) + value_reads(coming)
    alone = [read for read in wanted if read.name not in travelling]
    return ValueExchange(wanted, alone, sent, sorted(sources))
