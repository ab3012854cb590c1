"""One rank reads, others get it: carry out what a load plan says of transfers.

Ranks go through the checkpoint in the same rounds, in order of names and places. In a round each
rank first makes ready to receive, then reads and sends, then waits: so nobody waits for somebody
who waits in turn, and what is under way at a time is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from shardplan.dist import Comm, LostRanksError, Pending
from shardplan.io.arrays import empty, memory, same_dtype, store
from shardplan.io.read import Reader, ReadStats
from shardplan.planning import LoadItemType, LoadPlan, Metadata
from shardplan.planning.reads import ReadItems

__all__ = ["MIN_SHARED", "PIECE_BYTES", "FanOut"]

PIECE_BYTES: Final = 8 << 20
"""The most bytes of one message: larger reads are cut before they are shared."""

MIN_SHARED: Final = 1 << 16
"""The fewest bytes that are sent rather than read twice, unless asked for."""

_ROUND: Final = 128 << 20  # bytes of the checkpoint that are under way at a time

# What is read: the tensor's name in the checkpoint, and the box of it.
_Region = tuple[str, tuple[int, ...], tuple[int, ...]]

Dest = Callable[[int], torch.Tensor]


@attrs.frozen(eq=False)
class _Send:
    """A region that others need: where to, and which read of the plan's transfers it is."""

    row: int
    targets: Sequence[int]


class FanOut:
    """Carries out one rank's part of a shared load.

    Args:
        comm: The ranks.
        reader: The checkpoint; only who reads for others needs one that can read.
        metadata: What the checkpoint holds.
        plan: This rank's plan, with transfers.
        failed: What has gone wrong on this rank already. Others still get as many bytes as they
            wait for; then the first of these errors is raised.

    Attributes:
        sent, received: Bytes that went to other ranks, and came from them.
    """

    def __init__(
        self,
        comm: Comm,
        reader: Reader | None,
        metadata: Metadata,
        plan: LoadPlan,
        failed: list[Exception] | None = None,
    ) -> None:
        self._comm, self._reader, self._metadata, self._plan = comm, reader, metadata, plan
        self._failed = [] if failed is None else failed
        self._starts = _starts(metadata)
        self.sent = self.received = 0

    def run(self, items_dest: Dest, transfers_dest: Dest, *, verify: bool) -> ReadStats:
        """Read, send and receive.

        If anything but the sending fails, others still get as many bytes as they wait for; then it
        raises, and the step that this is part of fails on all ranks.

        Args:
            items_dest: Given the row of one of the plan's reads, the tensor of its box to fill.
            transfers_dest: The same for the reads of the transfers that come to this rank.
            verify: Whether to check every chunk that is read whole.

        Returns:
            What was read from storage.
        """
        reads, transfers = self._plan.transfers.reads, self._plan.transfers
        tensors = reads.type == LoadItemType.TENSOR.value
        regions = _regions(reads)
        coming = np.flatnonzero((transfers.target == self._comm.rank) & tensors).tolist()
        going = np.flatnonzero((transfers.source == self._comm.rank) & tensors).tolist()
        own = _by_region(_regions(self._plan.items))
        sends: dict[int, dict[_Region, _Send]] = {}
        for region, send in self._sends(regions, going).items():
            sends.setdefault(self._round(region), {})[region] = send
        arrivals: dict[int, list[int]] = {}
        for row in sorted(coming, key=lambda row: (regions[row], row)):
            arrivals.setdefault(self._round(regions[row]), []).append(row)
        stats = ReadStats()
        try:
            for number in sorted({*sends, *arrivals}):
                expected = [
                    self._expect(row, regions[row], transfers_dest)
                    for row in arrivals.get(number, ())
                ]
                now = sends.get(number, {})
                stats = _add(stats, self._send(reads, now, own, items_dest, verify))
                for arrival in expected:
                    arrival.finish(self._failed)
        except LostRanksError:
            raise
        except Exception as error:  # of the comm: others would wait for what never comes
            self._comm.leave(f"left the load: {type(error).__name__}: {error}")
            raise
        if self._failed:
            raise self._failed[0]
        shared = {row for now in sends.values() for region in now for row in own.get(region, ())}
        rest = [row for row in range(len(self._plan.items)) if row not in shared]
        if rest and self._reader is not None:
            left = self._plan.items.take(np.array(rest, np.int64))
            stats = _add(
                stats, self._reader.fill(left, lambda row: items_dest(rest[row]), verify=verify)
            )
        return stats

    def _round(self, region: _Region) -> int:
        """Number the round in which a region is moved: by where it lies in the checkpoint."""
        name, offsets, _ = region
        start, size, width = self._starts[name]
        place = 0
        for offset, extent in zip(offsets, size, strict=True):
            place = place * extent + offset
        return (start + place * width) // _ROUND

    def _sends(self, regions: Sequence[_Region], going: Sequence[int]) -> dict[_Region, _Send]:
        """Find what to read for others, in the order in which all of them expect it."""
        rows: dict[_Region, list[int]] = {}
        for row in sorted(going, key=lambda row: (regions[row], row)):
            rows.setdefault(regions[row], []).append(row)
        target = self._plan.transfers.target
        return {r: _Send(found[0], [int(target[i]) for i in found]) for r, found in rows.items()}

    def _send(
        self,
        reads: ReadItems,
        sends: Mapping[_Region, _Send],
        own: Mapping[_Region, Sequence[int]],
        dest: Dest,
        verify: bool,
    ) -> ReadStats:
        """Read some regions once, send them, and keep what this rank needs of them."""
        if not sends:
            return ReadStats()
        rows = [send.row for send in sends.values()]
        staged = [empty(region[2], self._dtype(region[0])) for region in sends]
        stats = ReadStats()
        try:
            if not self._failed and self._reader is not None:
                chosen = reads.take(np.array(rows, np.int64))
                stats = self._reader.fill(chosen, lambda row: staged[row], verify=verify)
        except Exception as error:
            self._failed.append(error)
        pending: list[Pending] = []
        for (region, send), tensor in zip(sends.items(), staged, strict=True):
            view = memory(tensor)
            assert view is not None
            for target in send.targets:
                pending.append(self._comm.send(target, view))
                self.sent += len(view)
            try:
                for row in own.get(region, ()) if not self._failed else ():
                    store(dest(row), np.frombuffer(view, np.uint8), self._dtype(region[0]))
            except Exception as error:
                self._failed.append(error)
        for parcel in pending:
            parcel.wait()
        return stats

    def _expect(self, row: int, region: _Region, dest: Dest) -> _Arrival:
        """Make ready to receive a region, straight into its tensor where that is possible."""
        dtype, tensor, view, staged = self._dtype(region[0]), None, None, None
        try:
            if not self._failed:
                tensor = dest(row)
                view = memory(tensor) if same_dtype(tensor, dtype) else None
        except Exception as error:
            self._failed.append(error)
        if view is None:
            staged = np.empty(math.prod(region[2]) * self._starts[region[0]][2], np.uint8)
            view = staged.data
        self.received += len(view)
        source = int(self._plan.transfers.source[row])
        return _Arrival(self._comm.receive(source, view), tensor, staged, dtype)

    def _dtype(self, name: str) -> str:
        entry: Any = self._metadata.state_dict_metadata[name]
        dtype: str = entry.properties.dtype
        return dtype


@attrs.frozen(eq=False)
class _Arrival:
    """A region that another rank sends; without a tensor, it is thrown away."""

    parcel: Pending
    tensor: torch.Tensor | None
    staged: np.ndarray[Any, np.dtype[np.uint8]] | None
    dtype: str

    def finish(self, failed: list[Exception]) -> None:
        """Wait for it, and bring it to where it belongs."""
        self.parcel.wait()
        try:
            if self.staged is not None and self.tensor is not None and not failed:
                store(self.tensor, self.staged, self.dtype)
        except Exception as error:
            failed.append(error)


def _starts(metadata: Metadata) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Say where each tensor starts when all lie end to end, its shape, and an element's bytes."""
    entries, at = metadata.state_dict_metadata, 0
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for name in sorted(entries.names):
        row = entries.row_of[name]
        if entries.layout[row] >= 0:
            size, width = entries.layouts[entries.layout[row]].size, 0
            width = entries.props[entries.prop[row]].itemsize
            found[name] = (at, size, width)
            at += int(np.prod(size, dtype=np.int64)) * width
    return found


def _regions(reads: ReadItems) -> list[_Region]:
    """Say which box of which saved tensor each read copies."""
    offsets = (reads.storage_anchor + reads.storage_offsets).tolist()
    lengths, axes = reads.lengths.tolist(), reads.ndim.tolist()
    names = [reads.names[n] for n in reads.storage.tolist()]
    return [
        (name, tuple(o[:n]), tuple(s[:n]))
        for name, o, s, n in zip(names, offsets, lengths, axes, strict=True)
    ]


def _by_region(regions: Sequence[_Region]) -> dict[_Region, list[int]]:
    rows: dict[_Region, list[int]] = {}
    for row, region in enumerate(regions):
        rows.setdefault(region, []).append(row)
    return rows


def _add(a: ReadStats, b: ReadStats) -> ReadStats:
    """Add up what two reads took.

    >>> _add(ReadStats(1, 2, 3, 4), ReadStats(1, 1, 1, 1))
    ReadStats(bytes_needed=2, bytes_read=3, requests=4, verified=5)
    """
    pairs = zip(attrs.astuple(a), attrs.astuple(b), strict=True)
    return ReadStats(*(x + y for x, y in pairs))
