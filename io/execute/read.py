"""Carry out the reads of a load plan, straight into the tensors they fill.

`Reader` asks the `Source` where the chunks lie that are read, has `fetch_plan` decide which bytes
to fetch and hash in which order, and compares checksums. The threads of its pool carry out the
tasks of that plan with a `Fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from shardplan.planning import LoadItemType, TensorMetadata, named_extras
from shardplan.planning.columns import Ints, ReadItems
from shardplan.planning.geometry import pad
from shardplan.planning.storage import Access, BoxReads, fetch_plan, find_chunks

from ..checksums import BlockSums, damage_error
from ..formats.base import Source
from ..optional import torch
from ..pool import Pool, Progress, default_pool, own_processors
from ..stores.base import Store
from ..stores.local_files import PAGE
from ..tensors import box_view
from ..windows import Window
from .combine import combined_chunks, fill_combined
from .dequantize import fill_dequantized
from .fetch import Chunks, Dests, Fetch, chunks_of, stopped_error

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

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(
            self.bytes_needed + other.bytes_needed,
            self.bytes_read + other.bytes_read,
            self.requests + other.requests,
            self.verified + other.verified,
            self.unverified + other.unverified,
        )


class Reader:
    """Reads one checkpoint, of any format, with the threads and the memory budget of a pool."""

    def __init__(self, source: Source, pool: Pool | None = None) -> None:
        self.source, self.store, self.metadata = source, source.store, source.metadata
        self.pool = pool or default_pool()

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; raise `FormatError` if it is damaged."""
        with named_extras(f"the value of `{name}`", with_torch=True):
            return self.source.value(name, verify=verify)

    def values(self, names: Sequence[tuple[str, str]], *, verify: bool = True) -> dict[str, Any]:
        """Return new values by name in the state dict, given also the names in the checkpoint."""
        found = self.pool.map(
            lambda pair: self.value(pair[1], verify=verify),
            names,
            nbytes=lambda pair: self.source.value_cost(pair[1]),
        )
        return dict(zip((dest for dest, _ in names), found, strict=True))

    def fill(
        self,
        items: ReadItems,
        dest: Callable[[int], Window],
        *,
        step: Sequence[int] = (),
        verify: bool = True,
        sums: BlockSums | None = None,
        progress: Progress | None = None,
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; non-tensor values are left out.
            dest: Given the row of a read, the memory of just its box to fill.
            step: Along each axis, read every n-th element from where a read begins.
            verify: Whether to check every chunk that is read whole, by one read or by several that
                bring one range of it each.
            sums: Gets the checksums of blocks that are read whole, of chunks that are not.
            progress: Gets the bytes that were wanted, as they come.

        Raises:
            PlanError: A read is not of a saved chunk; nothing was changed.
            FormatError: A file is damaged; the error says which keys were filled.
            LoadError: Anything else went wrong half way; the error says which keys were filled.
        """
        rows = np.flatnonzero((items.type == LoadItemType.TENSOR.value) & (items.numel > 0))
        wanted = items.take(rows)
        if self.source.quantized:
            return fill_dequantized(
                self,
                Reader(self.source.stored, self.pool),
                wanted,
                lambda row: dest(int(rows[row])),
                step=step,
                verify=verify,
                sums=sums,
                progress=progress,
            )
        if not len(rows):
            return ReadStats()
        if self.source.expression is not None:
            return fill_combined(
                self,
                Reader(self.source.stored, self.pool),
                self.source.expression,
                wanted,
                lambda row: dest(int(rows[row])),
                step=step,
                verify=verify,
                sums=sums,
                progress=progress,
            )
        chunks = chunks_of(self.source, wanted, find_chunks(self.metadata, wanted), verify)
        reads, dests = _reads(wanted, chunks, [dest(row) for row in rows.tolist()], step)
        access, block_bytes = _access(self.store), self.source.block_bytes
        plan = fetch_plan(
            chunks.places, reads, access, block_bytes=block_bytes, hash_parts=sums is not None
        )
        fetch = Fetch(self.source, plan, dests, progress)
        names = [items.names[i] for i in wanted.dest.tolist()]
        try:
            self.pool.map(
                fetch.run,
                plan.tasks,
                nbytes=lambda task: plan.cost(task) + self.store.staging,
                here=access.is_single or (access.is_far and len(plan.tasks) == 1),
            )
        except Exception as error:
            damaged = fetch.sums(chunks).compare(self.source)
            raise stopped_error(error, *fetch.keys(names, chunks, damaged)) from error
        found = fetch.sums(chunks)
        damaged = found.compare(self.source)
        if damaged:
            raise damage_error(self.source, damaged, *fetch.keys(names, chunks, damaged))
        if sums is not None:
            sums.take(found)
        needed = int(plan.nbytes.sum())
        unverified = needed - found.nbytes
        return ReadStats(needed, fetch.bytes_read, fetch.requests, found.verified, unverified)

    def fill_boxes(
        self,
        tensors: Sequence[torch.Tensor],
        items: ReadItems,
        box: Ints,
        *,
        verify: bool = True,
        sums: BlockSums | None = None,
    ) -> ReadStats:
        """Fill a tensor per box, given the reads of `read_boxes` and the box of each."""

        def dest(row: int) -> Window:
            offsets, lengths = items.dest_offsets[row].tolist(), items.lengths[row].tolist()
            return Window.of(box_view(tensors[box[row]], offsets, lengths))

        return self.fill(items, dest, verify=verify, sums=sums)

    def stored_chunks(self, chunks: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Yield the stored chunks that some chunks are read from, with all of their scales."""
        if self.source.expression is not None:
            for name, number in chunks:
                yield from combined_chunks(self.source, self.source.expression, name, number)
            return
        entries = self.source.stored.metadata.state_dict_metadata
        for name, number in chunks:
            kind = self.source.quantized.get(name)
            if kind is None or kind.kind == "fp8":
                yield name, number
            for part in () if kind is None else (kind.scales, kind.values):
                entry = entries[part]
                if part != name and isinstance(entry, TensorMetadata):
                    yield from ((part, n) for n in range(len(entry.chunks)))

    def dtype_of(self, name: str) -> str:
        """Return what a tensor is stored as, or read as."""
        entries = self.metadata.state_dict_metadata
        return entries.props[int(entries.prop[entries.row_of[name]])].dtype


def _access(store: Store) -> Access:
    return Access(
        is_far=bool(store.staging),
        is_local=store.locate() is not None,
        page_bytes=PAGE if store.can_map else 0,
        threads=own_processors(),
    )


def _reads(
    items: ReadItems, chunks: Chunks, windows: list[Window], step: Sequence[int]
) -> tuple[BoxReads, Dests]:
    """Return reads in the order of axes in which chunks are stored, and what each fills."""
    axes = max(items.lengths.shape[1], 1)
    lengths, offsets = pad(items.lengths, axes, 1), pad(items.storage_offsets, axes, 0)
    steps = np.ones_like(lengths)
    if any(one > 1 for one in step):
        steps[:, : len(step)] = step
        lengths = -(-lengths // steps)
        steps[lengths == 1] = 1
    spots = [chunks.spots[chunk] for chunk in chunks.of_read.tolist()]
    if any(spot.axes is not None for spot in chunks.spots):
        lengths, offsets = lengths.copy(), offsets.copy()
        for row, spot in enumerate(spots):
            if spot.axes is not None:
                windows[row] = windows[row].permuted(spot.axes)
                order = [*spot.axes, *range(len(spot.axes), axes)]
                for one in (lengths, offsets, steps):
                    one[row] = one[row][order]
    dests = Dests(windows, [spot.dtype for spot in spots])
    return BoxReads(chunks.of_read, offsets, lengths, steps, np.array(dests.plain, bool)), dests
