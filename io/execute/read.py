"""How is a load plan carried out? Exactly the planned bytes are read, into the tensors themselves.

A `Reader` knows one checkpoint. It asks its `Source` where the chunks lie that are touched, and no
others; cuts the reads into blocks; and has threads fetch, check and deliver them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from shardplan.planning import Issue, LoadItemType, LoadPlan, Metadata, PlanError, itemsize
from shardplan.planning.columns import Ints, ReadItems, column, numbered, padded, readonly
from shardplan.planning.geometry import pad
from shardplan.planning.storage import Blocks, ChunkTable, entries_of, filled, whole_blocks

from ..checksums import BlockSums
from ..errors import FormatError, LoadError, listed
from ..formats.sources import Source
from ..pool import Pool, default_pool, own_processors
from ..progress import Progress
from ..stores.base import StoreError
from .fetch import Fetch
from .jobs import Job

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
        unverified: Bytes that were wanted and not compared with any checksum.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    verified: int = 0
    unverified: int = 0

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
        found = self.pool.map(
            lambda pair: self.value(pair[1], verify=verify),
            names,
            nbytes=lambda pair: self.source.value_cost(pair[1]),
        )
        return {dest: value for (dest, _), value in zip(names, found, strict=True)}

    def fill(
        self,
        items: ReadItems,
        dest: Callable[[int], torch.Tensor],
        *,
        step: Sequence[int] = (),
        verify: bool = True,
        sums: BlockSums | None = None,
        progress: Progress | None = None,
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; values that are no tensors are left out.
            dest: Given the row of a read, the tensor of just its box to fill.
            step: Which elements of a read count along each axis, if not every one: those that are
                a multiple of so many away from where the read begins.
            verify: Whether to check every chunk that is read whole, by one read or by several of
                which each brings one range of it.
            sums: Gets the checksums of blocks that are read whole, of chunks that are not.
            progress: Is told of the bytes that were wanted, as they come.

        Raises:
            PlanError: A read is of no chunk that was saved; nothing was changed.
            FormatError: A file is damaged; it says which keys were filled.
            LoadError: Anything else went wrong half way; it says so, too.
        """
        rows = np.flatnonzero((items.type == LoadItemType.TENSOR.value) & (items.numel > 0))
        if not len(rows):
            return ReadStats()
        wanted = items.take(rows)
        number = find_chunks(self.metadata, wanted)
        tensors = [dest(row) for row in rows.tolist()]
        job, chunks = self._job(wanted, number, tensors, step, verify, sums is not None)
        fetch = Fetch(self.store, job, progress)
        names = [items.names[i] for i in wanted.dest.tolist()]
        try:
            self.pool.map(
                fetch.run,
                job.tasks,
                nbytes=lambda task: job.cost(task) + self.store.staging,
                here=job.alone or (job.is_far and len(job.tasks) == 1),
            )
        except Exception as error:
            filled, touched = _progress(job.blocks, fetch, names)
            bad = _named(_misfits(_digests(fetch, job), job, chunks), job, names)
            raise _stopped(error, filled - bad, touched | (filled & bad)) from error
        found = _digests(fetch, job)
        damaged = _misfits(found, job, chunks)
        if damaged:
            raise _damaged(damaged, job, chunks, names)
        parts = {chunk: seen for chunk, seen in found.items() if len(seen) < job.counts[chunk]}
        nbytes = _hashed_bytes(job)
        if sums is not None:
            for chunk, seen in parts.items():
                sums.add(*chunks.names[chunk], job.counts[chunk], seen, int(nbytes[chunk]))
        verified = found.keys() - parts
        left = job.nbytes - int(nbytes[list(verified)].sum())
        return ReadStats(job.nbytes, fetch.bytes_read, fetch.requests, len(verified), left)

    def _job(
        self,
        items: ReadItems,
        number: Ints,
        tensors: list[torch.Tensor],
        step: Sequence[int],
        verify: bool,
        partly: bool,
    ) -> tuple[Job, _Chunks]:
        """Find the bytes of every read, given which chunk of its tensor each is of.

        If ``partly``, blocks that are read whole are hashed even if their chunk is not.
        """
        keys = list(zip(items.storage.tolist(), number.tolist(), strict=True))
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        chunks = [(items.names[name], chunk) for name, chunk in distinct]
        spots = self.source.spots(chunks)
        at = column([distinct[key] for key in keys])
        axes = max(items.lengths.shape[1], 1)
        extents = padded([spot.extents for spot in spots], 1, axes)[at]
        lengths, offsets = pad(items.lengths, axes, 1), pad(items.storage_offsets, axes, 0)
        apart = np.ones_like(lengths)
        if any(one > 1 for one in step):
            apart[:, : len(step)] = step
            lengths = -(-lengths // apart)
            apart[lengths == 1] = 1
        if any(spot.axes is not None for spot in spots):
            orders = [spots[i].axes for i in at.tolist()]
            lengths, offsets, apart = _turn(orders, tensors, lengths, offsets, apart)
        widths = {dtype: itemsize(dtype) for dtype in {spot.dtype for spot in spots}}
        width = column([widths[spot.dtype] for spot in spots])[at]
        known = _Chunks(chunks, self.source.chunk_sums(chunks) if verify else [None] * len(chunks))
        hashed = np.array([s is not None for s in known.sums], bool)[at]
        whole = filled(at, offsets, lengths, extents)
        if partly and not whole.all():
            limit = self.source.block_bytes
            blocks = whole_blocks(at, offsets, lengths, extents, width, limit)
            whole |= blocks & ~np.isin(at, at[whole])
        hashed &= whole & (apart == 1).all(axis=1)
        is_near, is_local = not self.store.staging, self.store.locate() is not None
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
            step=apart,
            chunk=at,
            hashed=hashed,
            block_limit=self.source.block_bytes,
            is_far=not is_near,
            is_local=is_local,
            is_mapped=self.store.can_map,
            alone=is_near and own_processors() == 1,
            checksum=self.source.checksum,
        )
        return job, known


@attrs.frozen
class _Chunks:
    """The chunks that a job touches, each by name and number, and what their checksums must be."""

    names: list[tuple[str, int]]
    sums: list[int | None]


def find_chunks(metadata: Metadata, items: ReadItems) -> Ints:
    """Tell which chunk of its tensor each read is of, by where the chunk starts.

    The hint of a read is tried first: plans that were just made have right ones. A plan may come
    from anywhere, though, or from a time at which the tensor was cut otherwise.

    Args:
        metadata: The checkpoint.
        items: Reads of tensors.

    Returns:
        The number of the chunk among its tensor's.

    Raises:
        PlanError: There is no such tensor, no chunk that starts there, or the read reaches past it.
    """
    entries = metadata.state_dict_metadata
    used, _, layout = numbered(entries_of(metadata, items)[1])
    layout -= used[0] < 0  # -1 for those of no tensor
    table = ChunkTable.of(entries.layouts[n] for n in used.tolist() if n >= 0)
    found = np.where(layout < 0, -1, table.find(layout, items.storage_anchor, items.storage_hint))
    axes = max(items.lengths.shape[1], table.sizes.shape[1])
    room = pad(table.sizes, axes, 1)[table.first[layout] + np.maximum(found, 0)]
    ends = pad(items.storage_offsets, axes, 0) + pad(items.lengths, axes, 1)
    wrong = (found < 0) | (ends > room).any(axis=1) | (items.storage_offsets < 0).any(axis=1)
    if wrong.any():
        raise PlanError(_no_chunk(items, row) for row in np.flatnonzero(wrong).tolist())
    return readonly(found)


def _no_chunk(items: ReadItems, row: int) -> Issue:
    read = items.record(row)
    name, at = read.storage_index.fqn, list(read.storage_index.offset or ())
    text = (
        f"the plan reads {list(read.lengths)} elements from {list(read.storage_offsets)} on of a "
        f"chunk of `{name}` at {at}, and the checkpoint has no such chunk; was the plan made for "
        "another one? plan again with load_plan"
    )
    return Issue("missing", name, text)


def _turn(
    orders: list[tuple[int, ...] | None], tensors: list[torch.Tensor], *columns: Ints
) -> list[Ints]:
    """Bring boxes, and the tensors they fill, into the order of axes that chunks are stored in."""
    turned = [one.copy() for one in columns]
    for row, order in enumerate(orders):
        if order is not None:
            tensors[row] = tensors[row].permute(order)
            full = [*order, *range(len(order), turned[0].shape[1])]
            for one in turned:
                one[row] = one[row][full]
    return turned


def _digests(fetch: Fetch, job: Job) -> dict[int, dict[int, int]]:
    """Return the checksums of all blocks that were hashed, by number, by chunk.

    Chunks of which anything that was asked for did not come are left out.
    """
    came = np.ones(len(job.counts), bool)
    came[job.chunk[job.blocks.box[~fetch.done]]] = False
    hashed = np.flatnonzero((job.hashed & came[job.chunk])[job.blocks.box])  # the blocks
    blocks = hashed[numbered(job.unit[hashed])[1]]  # one of each unit
    chunk, number = job.chunk[job.blocks.box[blocks]], job.blocks.number[blocks]
    order = np.lexsort((number, chunk))
    digests = fetch.digests[job.unit[blocks[order]]]
    found: dict[int, dict[int, int]] = {}
    rows = zip(chunk[order].tolist(), number[order].tolist(), digests.tolist(), strict=True)
    for which, block, digest in rows:
        found.setdefault(which, {})[block] = digest
    return found


def _hashed_bytes(job: Job) -> Ints:
    """Return how many bytes of each chunk are hashed."""
    hashed = job.hashed[job.blocks.box]
    nbytes = np.zeros(len(job.counts), np.int64)
    np.add.at(nbytes, job.chunk[job.blocks.box[hashed]], job.block_bytes[hashed])
    return nbytes


def _misfits(found: dict[int, dict[int, int]], job: Job, chunks: _Chunks) -> list[int]:
    """Return the chunks of which all blocks were hashed, and whose checksums differ."""
    return [
        chunk
        for chunk, seen in found.items()
        if len(seen) == job.counts[chunk]
        and job.checksum.combine([*seen.values()]) != chunks.sums[chunk]
    ]


def _named(chunks: list[int], job: Job, names: list[str]) -> set[str]:
    """Return the keys that are filled from some chunks."""
    return {names[row] for row in np.flatnonzero(np.isin(job.chunk, chunks)).tolist()}


def _damaged(damaged: list[int], job: Job, chunks: _Chunks, names: list[str]) -> FormatError:
    rows = np.flatnonzero(np.isin(job.chunk, damaged)).tolist()
    told = {}
    for row in rows:
        nbytes = int(job.extents[row].prod() * job.itemsize[row])
        first, name = int(job.begin[row]), chunks.names[job.chunk[row]][0]
        told[int(job.chunk[row])] = f"`{name}` (bytes {first:,} to {first + nbytes:,})"
    bad = _named(damaged, job, names)
    files = sorted({job.files[job.file[row]] for row in rows})
    return FormatError(
        listed(files, quote=""),
        f"checksums do not fit: {listed(list(told.values()), quote='')}; this copy is damaged: use "
        "another, and see what verify says of it",
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
