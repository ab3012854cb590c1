"""One rank reads, others get it: carry out what a load plan says of transfers.

Ranks go through the checkpoint in the same rounds, in order of names and places. In a round each
rank first makes ready to receive, then reads and sends, then waits: so nobody waits for somebody
who waits in turn, and what is under way at a time is bounded.

Pieces that make up a block of a chunk are read as the block: once, and so that it can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from shardplan.dist import Comm, LostRanksError, Pending
from shardplan.io import (
    BlockSums,
    Progress,
    Tell,
    box_view,
    empty_tensor,
    fill_from_bytes,
    flat_memory,
    same_dtype,
)
from shardplan.io.execute import Reader, ReadStats
from shardplan.planning import LoadItemType, LoadPlan, Metadata
from shardplan.planning.columns import ReadItems, readonly
from shardplan.planning.geometry import pad
from shardplan.planning.storage import BLOCK_BYTES, fetched, locate_reads

from ._wishes import gap_of, widths

__all__ = ["MIN_SHARED", "FanOut", "add_stats"]

MIN_SHARED: Final = 1 << 16
"""The fewest bytes that are sent rather than read twice, unless asked for."""

_ROUND: Final = 128 << 20  # bytes of the checkpoint that are under way at a time

# What is read: the tensor's name in the checkpoint, and the box of it.
_Region = tuple[str, tuple[int, ...], tuple[int, ...]]

Dest = Callable[[int], torch.Tensor]


@attrs.frozen(eq=False)
class _Piece:
    """A region that this rank reads.

    Attributes:
        row: A read of it: of the plan's transfers, then of its items.
        targets: Which ranks it goes to, and ``own``, which of the plan's items it fills.
    """

    row: int
    targets: list[int] = attrs.field(factory=list)
    own: list[int] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class _Batch:
    """Pieces that are read as one: a piece alone, or all those that make up a block."""

    pieces: Mapping[_Region, _Piece]
    is_block: bool

    @property
    def row(self) -> int:
        """The read of any of them."""
        return next(iter(self.pieces.values())).row


class FanOut:
    """Carries out one rank's part of a shared load.

    Args:
        comm: The ranks.
        reader: The checkpoint; only who reads for others needs one that can read.
        metadata: What the checkpoint holds.
        plan: This rank's plan, with transfers.
        failed: What has gone wrong on this rank already. Others still get as many bytes as they
            wait for; then the first of these errors is raised.
        sums: Gets the checksums of blocks that are read whole, of chunks that are not.

    Attributes:
        sent, received: Bytes that went to other ranks, and came from them.
    """

    def __init__(
        self,
        comm: Comm,
        reader: Reader | None,
        metadata: Metadata,
        plan: LoadPlan,
        failed: list[Exception],
        sums: BlockSums,
    ) -> None:
        self._comm, self._reader, self._metadata, self._plan = comm, reader, metadata, plan
        self._failed, self._sums = failed, sums
        self._starts = _starts(metadata)
        self._reads = ReadItems.concat([plan.transfers.reads, plan.items])
        limit = BLOCK_BYTES if reader is None else reader.source.block_bytes
        self._spots = locate_reads(metadata, self._reads, limit)
        self._regions = _regions(self._reads)
        extents, width = self._spots.extents, widths(self._reads, metadata)
        lengths = pad(self._reads.lengths, extents.shape[1], 1)
        self._fetched = fetched(lengths, extents, width, 0 if reader is None else gap_of(reader))
        self.sent = self.received = 0

    def run(
        self, items_dest: Dest, transfers_dest: Dest, *, verify: bool, tell: Tell | None = None
    ) -> ReadStats:
        """Read, send and receive.

        If anything but the sending fails, others still get as many bytes as they wait for; then it
        raises, and the step that this is part of fails on all ranks.

        Args:
            items_dest: Given the row of one of the plan's reads, the tensor of its box to fill.
            transfers_dest: The same for the reads of the transfers that come to this rank.
            verify: Whether to check every chunk that is read whole.
            tell: Called with the bytes done, read and received, and with those in all.

        Returns:
            What was read from storage.
        """
        (batches, rest), arrivals = self._batches(), self._arrivals()
        try:
            progress = Progress(self._total(batches, arrivals, rest), tell)
        except Exception as error:
            self._failed.append(error)
            progress = Progress(0)
        stats = ReadStats()
        try:
            for number in sorted({*batches, *arrivals}):
                expected = [self._expect(row, transfers_dest) for row in arrivals.get(number, ())]
                now = batches.get(number, ())
                stats = add_stats(
                    stats, self._move(now, items_dest, verify, progress) if now else ReadStats()
                )
                for arrival in expected:
                    arrival.finish(self._failed, progress)
        except LostRanksError:
            raise
        except Exception as error:  # of the comm: others would wait for what never comes
            self._comm.leave(f"left the load: {type(error).__name__}: {error}")
            raise
        if self._failed:
            raise self._failed[0]
        if rest and self._reader is not None:
            left = self._plan.items.take(np.array(rest, np.int64))
            dest = lambda row: items_dest(rest[row])  # noqa: E731
            filled = self._reader.fill(
                left, dest, verify=verify, sums=self._sums, progress=progress
            )
            stats = add_stats(stats, filled)
        progress.finish()
        return stats

    def _total(
        self,
        batches: Mapping[int, Sequence[_Batch]],
        arrivals: Mapping[int, Sequence[int]],
        rest: Sequence[int],
    ) -> int:
        """Count the bytes that this rank reads and receives."""
        rows = [row for found in arrivals.values() for row in found]
        rows += [len(self._plan.transfers) + row for row in rest]
        numel = [(row, int(self._reads.numel[row])) for row in rows]
        for batch in (batch for found in batches.values() for batch in found):
            whole, own = self._spots.sizes[batch.row].prod(), self._reads.numel[batch.row]
            numel.append((batch.row, int(whole if batch.is_block else own)))
        return sum(count * self._starts[self._regions[row][0]][2] for row, count in numel)

    def _arrivals(self) -> dict[int, list[int]]:
        """Say which of the transfers come to this rank, by round, in the order of their sending."""
        transfers, found = self._plan.transfers, dict[int, list[int]]()
        tensors = transfers.reads.type == LoadItemType.TENSOR.value
        coming = np.flatnonzero((transfers.target == self._comm.rank) & tensors).tolist()
        for row in sorted(coming, key=lambda row: (self._regions[row], row)):
            found.setdefault(self._round(row), []).append(row)
        return found

    def _batches(self) -> tuple[dict[int, list[_Batch]], list[int]]:
        """Say what to read for others, or in pieces, by round; and which items are left then."""
        rounds, rest = dict[int, list[_Batch]](), list[int]()
        for pieces in self._pieces().values():
            if self._is_block(pieces):
                batches = [_Batch(pieces, True)]
            else:
                batches = [_Batch({r: p}, False) for r, p in pieces.items() if p.targets]
                rest += [row for p in pieces.values() if not p.targets for row in p.own]
            for batch in batches:
                rounds.setdefault(self._round(batch.row), []).append(batch)
        return rounds, rest

    def _pieces(self) -> dict[tuple[int, ...], dict[_Region, _Piece]]:
        """Find all that this rank reads, by the block in which it lies."""
        transfers, found = self._plan.transfers, dict[tuple[int, ...], dict[_Region, _Piece]]()
        keys = list(map(tuple, self._spots.keys.tolist()))
        tensors = self._reads.type == LoadItemType.TENSOR.value
        going = np.flatnonzero(transfers.source == self._comm.rank).tolist()
        own = range(len(transfers), len(self._reads))
        for row in (*going, *own):
            if tensors[row]:
                mine = found.setdefault(keys[row], {})
                piece = mine.setdefault(self._regions[row], _Piece(row))
                if row < len(transfers):
                    piece.targets.append(int(transfers.target[row]))
                else:
                    piece.own.append(row - len(transfers))
        return found

    def _is_block(self, pieces: Mapping[_Region, _Piece]) -> bool:
        """Tell whether pieces, more than one, make up a block of a chunk, or fetch as much."""
        rows = [piece.row for piece in pieces.values()]
        if len(rows) == 1 or not self._spots.inside[rows].all() or self._reader is None:
            return False
        return int(self._fetched[rows].sum()) >= int(self._spots.sizes[rows[0]].prod())

    def _round(self, row: int) -> int:
        """Number the round in which a read is moved: by where its block lies in the checkpoint."""
        start, size, width = self._starts[self._regions[row][0]]
        offsets = self._reads.storage_anchor[row, : len(size)] + self._spots.start[row, : len(size)]
        place = 0
        for offset, extent in zip(offsets.tolist(), size, strict=True):
            place = place * extent + offset
        return (start + place * width) // _ROUND

    def _move(
        self, batches: Sequence[_Batch], dest: Dest, verify: bool, progress: Progress
    ) -> ReadStats:
        """Read some batches once, send their pieces, and keep what this rank needs of them."""
        reads = self._whole([batch.row for batch in batches], [b.is_block for b in batches])
        boxes = _regions(reads)
        staged = [empty_tensor(sizes, self._dtype(name)) for name, _, sizes in boxes]
        stats = ReadStats()
        try:
            if not self._failed and self._reader is not None:
                stats = self._reader.fill(
                    reads, staged.__getitem__, verify=verify, sums=self._sums, progress=progress
                )
        except Exception as error:
            self._failed.append(error)
        pieces = {
            region: (piece, _part(tensor, box, region))
            for batch, box, tensor in zip(batches, boxes, staged, strict=True)
            for region, piece in batch.pieces.items()
        }
        pending: list[Pending] = []
        for region in sorted(pieces):
            pending += self._send(*pieces[region], dest)
        for parcel in pending:
            parcel.wait()
        return stats

    def _whole(self, rows: Sequence[int], is_block: Sequence[bool]) -> ReadItems:
        """Return some reads; where asked for, those of the whole blocks that they lie in."""
        reads, axes = self._reads.take(np.array(rows, np.int64)), self._reads.lengths.shape[1]
        widen = np.array(is_block, bool)[:, None]
        start, sizes = self._spots.start[rows, :axes], self._spots.sizes[rows, :axes]
        return attrs.evolve(
            reads,
            storage_offsets=readonly(np.where(widen, start, reads.storage_offsets)),
            lengths=readonly(np.where(widen, sizes, reads.lengths)),
        )

    def _send(self, piece: _Piece, tensor: torch.Tensor, dest: Dest) -> list[Pending]:
        """Begin to send a piece, and bring it to where this rank needs it."""
        view = flat_memory(tensor)
        assert view is not None
        pending = [self._comm.send(target, view) for target in piece.targets]
        self.sent += len(view) * len(pending)
        dtype = self._dtype(self._regions[piece.row][0])
        try:
            for row in piece.own if not self._failed else ():
                fill_from_bytes(dest(row), np.frombuffer(view, np.uint8), dtype)
        except Exception as error:
            self._failed.append(error)
        return pending

    def _expect(self, row: int, dest: Dest) -> _Arrival:
        """Make ready to receive a region, straight into its tensor where that is possible."""
        region = self._regions[row]
        dtype, tensor, view, staged = self._dtype(region[0]), None, None, None
        try:
            if not self._failed:
                tensor = dest(row)
                view = flat_memory(tensor) if same_dtype(tensor, dtype) else None
        except Exception as error:
            self._failed.append(error)
        if view is None:
            staged = np.empty(math.prod(region[2]) * self._starts[region[0]][2], np.uint8)
            view = staged.data
        self.received += len(view)
        source = int(self._plan.transfers.source[row])
        return _Arrival(self._comm.receive(source, view), tensor, staged, dtype, len(view))

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
    nbytes: int

    def finish(self, failed: list[Exception], progress: Progress) -> None:
        """Wait for it, and bring it to where it belongs."""
        self.parcel.wait()
        try:
            if self.staged is not None and self.tensor is not None and not failed:
                fill_from_bytes(self.tensor, self.staged, self.dtype)
            if not failed:
                progress.add(self.nbytes)
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


def _part(tensor: torch.Tensor, box: _Region, region: _Region) -> torch.Tensor:
    """Return the region of a tensor that holds a box, in memory of its own where it must."""
    if box == region:
        return tensor
    offsets = [at - low for at, low in zip(region[1], box[1], strict=True)]
    return box_view(tensor, offsets, region[2]).contiguous()


def add_stats(a: ReadStats, b: ReadStats) -> ReadStats:
    """Add up what two reads took.

    >>> add_stats(ReadStats(1, 2, 3, 4), ReadStats(1, 1, 1, 1))
    ReadStats(bytes_needed=2, bytes_read=3, requests=4, verified=5, unverified=0)
    """
    pairs = zip(attrs.astuple(a), attrs.astuple(b), strict=True)
    return ReadStats(*(x + y for x, y in pairs))
