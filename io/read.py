"""How is a load plan carried out? Exactly the planned bytes are read, into the tensors themselves.

A `Reader` knows one checkpoint. It asks its `Source` where the chunks lie that are touched, and no
others; cuts the reads into blocks; and has threads fetch, check and deliver them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from shardplan.planning import LoadItemType, LoadPlan, itemsize
from shardplan.planning.blocks import Blocks, cut_blocks
from shardplan.planning.catalog import column, padded
from shardplan.planning.packing import Ints
from shardplan.planning.ranges import filled
from shardplan.planning.reads import ReadItems
from shardplan.planning.tiling import pad

from .checksums import combine
from .errors import FormatError, LoadError
from .fetch import Fetch
from .jobs import Job
from .pool import Pool, default_pool
from .sources import Source
from .stores import StoreError

__all__ = ["ReadStats", "Reader"]


@attrs.frozen
class ReadStats:
    """What a load took.

    Attributes:
        bytes_needed: Bytes of the elements that were wanted.
        bytes_read: Bytes that were fetched for them, headers left out.
        requests: How many ranges were asked for.
        verified: How many chunks were read whole, by one read or by several, and found to fit their
            checksums.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    verified: int = 0

    @property
    def amplification(self) -> float:
        """How many bytes were fetched for each byte that was needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


class Reader:
    """Reads one checkpoint, of any format.

    Args:
        source: The checkpoint; see `open_source`.
        pool: The threads and the memory budget to use.
    """

    def __init__(self, source: Source, pool: Pool | None = None) -> None:
        self.source = source
        self.store = source.store
        self.metadata = source.metadata
        self.pool = pool or default_pool()

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor.

        Raises:
            FormatError: It is damaged.
        """
        return self.source.value(name, verify=verify)

    def values(self, plan: LoadPlan, *, verify: bool = True) -> dict[str, Any]:
        """Return, by name in the state dict, the values that a plan reads."""
        items = plan.items
        rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value)
        names = [(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows.tolist()]
        found = self.pool.map(lambda pair: self.value(pair[1], verify=verify), names)
        return {dest: value for (dest, _), value in zip(names, found, strict=True)}

    def fill(
        self, items: ReadItems, dest: Callable[[int], torch.Tensor], *, verify: bool = True
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; values that are no tensors are left out.
            dest: Given the row of a read, the tensor of just its box to fill.
            verify: Whether to check every chunk that is read whole, by one read or by several of
                which each brings one range of it.

        Raises:
            FormatError: A file is damaged; it says which keys were filled.
            LoadError: Anything else went wrong half way; it says so, too.
        """
        rows = np.flatnonzero((items.type == LoadItemType.TENSOR.value) & (items.numel > 0))
        if not len(rows):
            return ReadStats()
        job, chunks = self._job(items.take(rows), [dest(row) for row in rows.tolist()], verify)
        fetch = Fetch(self.store, job)
        names = [items.names[i] for i in items.dest[rows].tolist()]
        try:
            self.pool.map(fetch.run, job.tasks, nbytes=lambda t: job.cost(t) + self.store.staging)
        except Exception as error:
            raise _stopped(error, *_progress(job.blocks, fetch, names)) from error
        verified = _check(fetch, job, chunks, names)
        return ReadStats(job.nbytes, fetch.bytes_read, fetch.requests, verified)

    def _job(
        self, items: ReadItems, tensors: list[torch.Tensor], verify: bool
    ) -> tuple[Job, _Chunks]:
        """Find the bytes of every read."""
        keys = list(zip(items.storage.tolist(), items.storage_hint.tolist(), strict=True))
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        chunks = [(items.names[name], hint) for name, hint in distinct]
        spots = self.source.spots(chunks)
        at = column([distinct[key] for key in keys])
        axes = max(items.lengths.shape[1], 1)
        extents = padded([spot.extents for spot in spots], 1, axes)[at]
        lengths, offsets = pad(items.lengths, axes, 1), pad(items.storage_offsets, axes, 0)
        if any(spot.axes is not None for spot in spots):
            lengths, offsets = _turn(
                [spots[i].axes for i in at.tolist()], tensors, lengths, offsets
            )
        widths = {dtype: itemsize(dtype) for dtype in {spot.dtype for spot in spots}}
        width = column([widths[spot.dtype] for spot in spots])[at]
        known = _Chunks(chunks, self._sums(chunks) if verify else [None] * len(chunks))
        hashed = np.array([s is not None for s in known.sums], bool)[at]
        hashed &= filled(at, offsets, lengths, extents)
        job = Job(
            tensors=tensors,
            files=tuple(self.source.files),
            file=column([spot.file for spot in spots])[at],
            begin=column([spot.begin for spot in spots])[at],
            dtypes=[spots[i].dtype for i in at.tolist()],
            itemsize=width,
            extents=extents,
            offsets=offsets,
            lengths=lengths,
            chunk=at,
            hashed=hashed,
            blocks=cut_blocks(
                lengths,
                width,
                self.source.block_bytes,
                offsets=np.where(hashed[:, None], offsets, 0),
                extents=np.where(hashed[:, None], extents, lengths),
            ),
        )
        return job, known

    def _sums(self, chunks: list[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk; None where there is none."""
        found = ((self.source.sums_of(name), number) for name, number in chunks)
        return [None if sums is None else int(sums[number]) for sums, number in found]


@attrs.frozen
class _Chunks:
    """The chunks that a job touches, each by name and number, and what their checksums must be."""

    names: list[tuple[str, int]]
    sums: list[int | None]


def _turn(
    orders: list[tuple[int, ...] | None], tensors: list[torch.Tensor], lengths: Ints, offsets: Ints
) -> tuple[Ints, Ints]:
    """Bring boxes, and the tensors they fill, into the order of axes that chunks are stored in."""
    lengths, offsets = lengths.copy(), offsets.copy()
    for row, order in enumerate(orders):
        if order is not None:
            tensors[row] = tensors[row].permute(order)
            full = [*order, *range(len(order), lengths.shape[1])]
            lengths[row], offsets[row] = lengths[row][full], offsets[row][full]
    return lengths, offsets


def _check(fetch: Fetch, job: Job, chunks: _Chunks, names: list[str]) -> int:
    """Compare the checksums of all chunks that were filled; tell every one that differs.

    Returns:
        How many there are.
    """
    hashed = np.flatnonzero(job.hashed[job.blocks.box])  # the blocks
    _, first = np.unique(job.unit[hashed], return_index=True)
    blocks = hashed[first]  # one of each unit
    chunk, number = job.chunk[job.blocks.box[blocks]], job.blocks.number[blocks]
    order = np.lexsort((number, chunk))
    which, edges = np.unique(chunk[order], return_index=True)
    digests = fetch.digests[job.unit[blocks[order]]].tolist()
    ends = [*edges[1:].tolist(), len(digests)]
    damaged = [
        chunk
        for chunk, low, high in zip(which.tolist(), edges.tolist(), ends, strict=False)
        if combine(digests[low:high]) != chunks.sums[chunk]
    ]
    if damaged:
        raise _damaged(damaged, job, chunks, names)
    return len(which)


def _damaged(damaged: list[int], job: Job, chunks: _Chunks, names: list[str]) -> FormatError:
    rows = np.flatnonzero(np.isin(job.chunk, damaged)).tolist()
    told = {}
    for row in rows:
        nbytes = int(job.extents[row].prod() * job.itemsize[row])
        first, name = int(job.begin[row]), chunks.names[job.chunk[row]][0]
        told[int(job.chunk[row])] = f"`{name}` (bytes {first:,} to {first + nbytes:,})"
    bad = {names[row] for row in rows}
    files = sorted({job.files[job.file[row]] for row in rows})
    return FormatError(
        ", ".join(files),
        f"checksums do not fit: {', '.join(list(told.values())[:8])}"
        + (f" and {len(told) - 8} more" if len(told) > 8 else ""),
        filled=set(names) - bad,
        touched=bad,
    )


def _progress(blocks: Blocks, fetch: Fetch, names: list[str]) -> tuple[set[str], set[str]]:
    """Tell the keys of which all blocks are done, and those of which some were begun."""
    boxes: Ints = blocks.box
    unfinished = {names[box] for box in boxes[~fetch.done].tolist()}
    begun = {names[box] for box in boxes[fetch.begun].tolist()}
    return begun - unfinished, begun & unfinished


def _stopped(error: Exception, filled: set[str], touched: set[str]) -> Exception:
    if isinstance(error, StoreError) and error.kind in ("missing", "short"):
        name = str(error.url).replace("\\", "/").rpartition("/")[2]
        return FormatError(name, error.reason, filled=filled, touched=touched)
    if isinstance(error, FormatError):
        return FormatError(error.file, error.reason, filled=filled, touched=touched)
    return LoadError(f"the load failed: {error}", filled, touched)
