"""Comparing stored bytes with their checksums, alike for all formats: every fault is found.

Blocks are streamed through small buffers, many at once, and hashed. A region is sound if the
checksums of its blocks, combined, are the one that was saved with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Final, NamedTuple

import attrs
import numpy as np

from shardplan.planning.columns import column
from shardplan.planning.storage import BLOCK_BYTES, group_blocks

from ..checksums import Checksum, read_pieces
from ..pool import Pool, Progress
from ..stores.base import Store, StoreError
from .base import Fault, FaultKind

_PIECE: Final = 1 << 20  # bytes read and hashed at a time, while they are in the cache
_BATCH: Final = 64  # tasks that one thread takes at once, at most
_FAR_PIECE: Final = 16 << 20  # the same where each read is a request


class SummedBytes(NamedTuple):  # a checkpoint has millions: made in a third of attrs' time
    """Bytes of a file that were saved with one checksum: the length of each block, in order."""

    file: str
    begin: int
    blocks: Sequence[int]
    checksum: int
    keys: Sequence[str | None]  # the names that cannot be loaded without them
    what: str = "its bytes"

    def faults(self, error: StoreError | None) -> Iterator[Fault]:
        """Yield a fault for each name: the bytes could not be read, or do not fit."""
        end = self.begin + sum(self.blocks)
        kind: FaultKind = "checksum" if error is None else "unreadable"
        reason = f"{self.what} do not fit their checksum" if error is None else str(error)
        for key in self.keys:
            yield Fault(kind, self.file, reason, key, self.begin, end)


@attrs.frozen
class Checked:
    """What a check of regions found; ``nbytes`` counts the bytes that could be read."""

    faults: tuple[Fault, ...]
    sound: int
    nbytes: int


def check_regions(
    store: Store, regions: Sequence[SummedBytes], kind: Checksum, progress: Progress, pool: Pool
) -> Checked:
    """Compare regions with their checksums; those of one file follow each other, in order."""
    # Local reads keep a processor busy each, and more threads than these slow each other down.
    turns = pool.max_workers if store.staging else (os.cpu_count() or 1) + 1
    piece = _FAR_PIECE if store.staging else _PIECE
    hasher = _Hasher(store, kind, progress, piece, threading.Semaphore(turns))
    tasks = (
        task
        for _, of_file in groupby(regions, key=lambda region: region.file)
        for task in _tasks(list(of_file))
    )
    batches = pool.map(hasher.run_all, _batches(tasks), nbytes=piece + store.staging)
    hashed = chain.from_iterable(batches)
    faults, sound, nbytes = list[Fault](), 0, 0
    for region in regions:
        digests = list(islice(hashed, len(region.blocks)))
        known = [digest for digest in digests if isinstance(digest, int)]
        pairs = zip(digests, region.blocks, strict=True)
        nbytes += sum(length for digest, length in pairs if isinstance(digest, int))
        error = next((digest for digest in digests if isinstance(digest, StoreError)), None)
        if error is None and kind.combine(known) == region.checksum:
            sound += 1
        else:
            faults += region.faults(error)
    return Checked(tuple(faults), sound, nbytes)


@attrs.frozen(eq=False)
class _Task:
    """Some blocks that lie one after the other in a file."""

    file: str
    start: int
    lengths: Sequence[int]


def _tasks(regions: Sequence[SummedBytes]) -> Iterator[_Task]:
    """Group the blocks of one file's regions into tasks."""
    lengths = column([length for region in regions for length in region.blocks])
    counts = column([len(region.blocks) for region in regions])
    before = np.cumsum(lengths) - lengths
    first = np.repeat(np.cumsum(counts) - counts, counts)  # the first block of the same region
    starts = np.repeat(column([region.begin for region in regions]), counts)
    starts = starts + before - before[first]
    for low, high in group_blocks(starts, lengths):
        yield _Task(regions[0].file, int(starts[low]), lengths[low:high].tolist())


def _batches(tasks: Iterable[_Task]) -> Iterator[list[_Task]]:
    """Put small tasks together, so that threads need not take turns for each."""
    batch, nbytes = list[_Task](), 0
    for task in tasks:
        batch.append(task)
        nbytes += sum(task.lengths)
        if nbytes >= BLOCK_BYTES or len(batch) >= _BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


@attrs.frozen(eq=False)
class _Hasher:
    """Reads blocks, so many bytes at a time, and hashes them, on any number of threads."""

    store: Store
    kind: Checksum
    progress: Progress
    piece: int
    turn: threading.Semaphore

    def run_all(self, tasks: Sequence[_Task]) -> list[int | StoreError]:
        """Return the results of some tasks, one after the other."""
        with self.turn:
            return [result for task in tasks for result in self.run(task)]

    def run(self, task: _Task) -> Sequence[int | StoreError]:
        """Return the checksum of each block; where reading fails, the error of each that fails."""
        size = sum(task.lengths)
        try:
            pieces = read_pieces(self.store, task.file, task.start, size, self.piece)
            found = list(self.kind.of_pieces(pieces, task.lengths))
        except StoreError as error:
            if len(task.lengths) == 1:
                self.progress.add(size)
                return [error]
        else:
            self.progress.add(size)
            return found
        starts = np.cumsum([task.start, *task.lengths])[:-1].tolist()
        alone = zip(starts, task.lengths, strict=True)  # to find the one to blame
        return [r for at, length in alone for r in self.run(_Task(task.file, at, [length]))]
