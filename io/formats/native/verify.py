"""Is every byte of a checkpoint what was saved? All faults are found, not only the first.

First each file is opened and its header compared with the manifest, which tells where the chunks
lie that can be checked at all. Then those are streamed through small buffers, many at once, and
hashed block by block. Nothing is kept but checksums, so a chunk may be of any size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import attrs
import numpy as np

from shardplan.planning import find_issues

from ...buffers import byte_view
from ...checksums import combine, xxhash
from ...errors import FormatError
from ...pool import Pool, default_pool
from ...progress import Progress
from ...stores.base import Store, StoreError
from ...values import StoredValue, load_value
from .expected import header_cost
from .manifest import MANIFEST, Manifest
from .scan import Fault, Files, Scan, chunk_fault

__all__ = ["Findings", "check_files", "check_manifest"]

_TASK: Final = 16 << 20  # bytes that are worth a thread's while
_TASK_BLOCKS: Final = 1 << 12
_PIECE: Final = 1 << 20  # bytes read and hashed at a time, while they are in the cache
_FAR_PIECE: Final = 16 << 20  # the same where each read is a request


@attrs.frozen
class Findings:
    """What checking the data files found.

    Attributes:
        faults: All that is wrong, by file, then by place.
        keys: Names of which some bytes are damaged, lost or could not be checked.
        nbytes: How many bytes were read and checked.
        chunks: How many chunks were found to fit their checksums.
    """

    faults: tuple[Fault, ...]
    keys: frozenset[str]
    nbytes: int
    chunks: int


def check_manifest(manifest: Manifest) -> tuple[Fault, ...]:
    """Look for what a manifest that could be read still gets wrong: gaps, overlaps, bad values."""
    faults = [
        Fault("manifest", MANIFEST, issue.message, issue.fqn)
        for issue in find_issues(manifest.metadata)
    ]
    for name, (kind, data) in manifest.values.items():
        try:
            if kind == "inline":
                load_value(StoredValue("inline", data), MANIFEST, name)
        except FormatError as error:
            faults.append(Fault("manifest", MANIFEST, error.reason, name))
    return tuple(faults)


def check_files(
    store: Store, manifest: Manifest, progress: Progress, pool: Pool | None = None
) -> Findings:
    """Check every byte of every data file.

    Args:
        store: Where the checkpoint lies.
        manifest: What it should be.
        progress: Is told of all bytes that the files should have, damaged or not.
        pool: The threads and the memory budget to use.
    """
    pool = pool or default_pool()
    files = Files(store, manifest, progress)
    scans = pool.map(
        files.scan,
        range(len(manifest.files)),
        nbytes=lambda number: header_cost(manifest, number, store),
    )
    hasher = _Hasher(store, progress, pool)
    cost = hasher.piece + store.staging
    pool.map(hasher.run, (task for scan in scans for task in _tasks(scan)), nbytes=cost)
    damaged = [_judge(scan) for scan in scans]
    return Findings(
        tuple(f for scan, bad in zip(scans, damaged, strict=True) for f in (*scan.faults, *bad)),
        frozenset(f.key for bad in damaged for f in bad if f.key is not None).union(
            *(scan.lost for scan in scans)
        ),
        sum(scan.header_bytes for scan in scans) + hasher.nbytes,
        sum(len(scan.slots) for scan in scans) - sum(map(len, damaged)),
    )


@attrs.frozen(eq=False)
class _Task:
    """Some blocks of one file that lie one after the other."""

    scan: Scan
    first: int
    last: int


def _tasks(scan: Scan) -> Iterator[_Task]:
    if not len(scan.lengths):
        return
    group = (np.cumsum(scan.lengths) - scan.lengths) // _TASK
    group += np.arange(len(group)) // _TASK_BLOCKS
    apart = scan.starts[1:] != (scan.starts + scan.lengths)[:-1]
    edges = np.flatnonzero((np.diff(group) != 0) | apart) + 1
    bounds = [0, *edges.tolist(), len(group)]
    yield from (_Task(scan, a, b) for a, b in pairwise(bounds))


class _Hasher:
    """Reads blocks and notes their checksums, on any number of threads.

    Attributes:
        piece: How many bytes a thread holds.
        nbytes: How many were read.
    """

    def __init__(self, store: Store, progress: Progress, pool: Pool) -> None:
        self._store, self._progress = store, progress
        self._buffers = threading.local()
        self._lock = threading.Lock()
        # Local reads keep a processor busy each, and more threads than these slow each other down.
        turns = pool.max_workers if store.staging else (os.cpu_count() or 1) + 1
        self._turn = threading.Semaphore(turns)
        self.piece = _FAR_PIECE if store.staging else _PIECE
        self.nbytes = 0

    def run(self, task: _Task) -> None:
        """Hash some blocks; where reading fails, each by itself, to tell which one is to blame."""
        scan, blocks = task.scan, slice(task.first, task.last)
        lengths = scan.lengths[blocks].tolist()
        with self._turn:
            try:
                found = list(self._digests(scan.file, int(scan.starts[task.first]), lengths))
            except StoreError as error:
                if len(lengths) == 1:
                    scan.errors[task.first] = str(error)
                    self._progress.add(sum(lengths))
                    return
            else:
                scan.digests[blocks] = np.array(found, np.uint64)
                with self._lock:
                    self.nbytes += sum(lengths)
                self._progress.add(sum(lengths))
                return
        for block in range(task.first, task.last):
            self.run(_Task(scan, block, block + 1))

    def _digests(self, file: str, start: int, lengths: Sequence[int]) -> Iterator[int]:
        pieces = self._pieces(file, start, sum(lengths))
        view = memoryview(b"")
        for left in lengths:
            state = xxhash.xxh3_64()
            while left:
                view = view or next(pieces)
                part, view = view[:left], view[left:]
                state.update(part)
                left -= len(part)
            yield state.intdigest()

    def _pieces(self, file: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of a file piece by piece; each is overwritten by the next."""
        for at in range(start, start + nbytes, self.piece):
            view = self._buffer()[: min(self.piece, start + nbytes - at)]
            self._store.read(file, [(at, view)])
            yield view

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "view"):
            self._buffers.view = byte_view(np.empty(self.piece, np.uint8))
        view: memoryview = self._buffers.view
        return view


def _judge(scan: Scan) -> list[Fault]:
    """Compare the checksums of a file's chunks, once all of its blocks were read."""
    faults = []
    edges = np.searchsorted(scan.chunk, np.arange(len(scan.slots) + 1)).tolist()
    failed = {int(scan.chunk[block]): reason for block, reason in scan.errors.items()}
    digests, sums = scan.digests.tolist(), scan.sums.tolist()
    for number, slot in enumerate(scan.slots):
        if number in failed:
            faults.append(chunk_fault("unreadable", scan.file, failed[number], slot))
        elif combine(digests[edges[number] : edges[number + 1]]) != sums[number]:
            reason = "its bytes do not fit their checksum"
            faults.append(chunk_fault("checksum", scan.file, reason, slot))
    return faults
