"""Checking every byte of a checkpoint of ours; all faults are found, not only the first.

1. Each file is opened, and its header compared with the manifest (`_Scanner`). This finds the
   chunks that can be checked at all, and where their blocks lie.
2. The blocks are streamed through small buffers, many at once, and hashed (`_Hasher`).
3. The checksums of each chunk's blocks are combined and compared (`_judge`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Final

import attrs
import numpy as np

from shardplan.planning import find_issues, itemsize
from shardplan.planning.columns import Ints, column, padded
from shardplan.planning.storage import cut_blocks, group_blocks

from ...checksums import XXH3, Sums, combine, read_pieces
from ...errors import FormatError
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import Store, StoreError
from ...values import StoredValue, load_value
from ..base import Fault, FaultKind, Findings
from ..headers import Header, Slot
from .manifest import MANIFEST, Manifest, decode_manifest, find_manifest
from .source import Expected, Opened

_PIECE: Final = 1 << 20  # bytes read and hashed at a time, while they are in the cache
_FAR_PIECE: Final = 16 << 20  # the same where each read is a request


def verify_native(
    store: Store, tell: ProgressCallback | None = None, pool: Pool | None = None
) -> Findings:
    """Check a checkpoint of ours; see `Format.verify`."""
    try:
        data = find_manifest(store)
        if data is None:
            raise FormatError(store.url, "there is no checkpoint")
        manifest = decode_manifest(data)
    except (FormatError, StoreError) as error:
        if not store.exists(MANIFEST):
            raise
        Progress(0, tell)
        return Findings((Fault("manifest", MANIFEST, error.reason),))
    progress = Progress(len(data) + int(manifest.files.sizes.sum()), tell)
    contradictions = tuple(_contradictions(manifest))
    progress.add(len(data))
    found = _check_files(store, manifest, progress, pool or default_pool())
    progress.finish()
    return attrs.evolve(
        found,
        faults=contradictions + found.faults,
        nbytes=len(data) + found.nbytes,
        save_id=manifest.save_id,
    )


def _contradictions(manifest: Manifest) -> Iterator[Fault]:
    """Yield what a manifest that could be read still gets wrong: gaps, overlaps, bad values."""
    for issue in find_issues(manifest.metadata):
        yield Fault("manifest", MANIFEST, issue.message, issue.fqn)
    for name, (kind, data) in manifest.values.items():
        try:
            if kind == "inline":
                load_value(StoredValue("inline", data), MANIFEST, name)
        except FormatError as error:
            yield Fault("manifest", MANIFEST, error.reason, name)


def _check_files(store: Store, manifest: Manifest, progress: Progress, pool: Pool) -> Findings:
    """Check every byte of every data file."""
    scanner = _Scanner(store, manifest, Expected(manifest), progress)
    scans = pool.map(
        scanner.scan,
        range(len(manifest.files)),
        nbytes=lambda number: scanner.expected.header_cost(number) + store.staging,
    )
    # Local reads keep a processor busy each, and more threads than these slow each other down.
    turns = pool.max_workers if store.staging else (os.cpu_count() or 1) + 1
    piece = _FAR_PIECE if store.staging else _PIECE
    hasher = _Hasher(store, progress, piece, threading.Semaphore(turns))
    tasks = (
        _Task(scan.file, int(scan.starts[low]), scan.lengths[low:high].tolist())
        for scan in scans
        for low, high in group_blocks(scan.starts, scan.lengths)
    )
    hashed = chain.from_iterable(pool.map(hasher.run, tasks, nbytes=piece + store.staging))
    judged = [_judge(scan, list(islice(hashed, len(scan.lengths)))) for scan in scans]
    return Findings(
        tuple(
            f for scan, (bad, _) in zip(scans, judged, strict=True) for f in (*scan.faults, *bad)
        ),
        len(manifest.files),
        sum(len(scan.slots) - len(bad) for scan, (bad, _) in zip(scans, judged, strict=True)),
        sum(scan.header_bytes for scan in scans) + sum(nbytes for _, nbytes in judged),
        lost=frozenset[str]().union(*(scan.lost for scan in scans)),
    )


@attrs.frozen(eq=False)
class _Scan:
    """What one file's header says.

    Attributes:
        header_bytes: How many bytes were read for it.
        slots: The chunks that can be checked, in order of place, and ``sums``, their checksums.
        lengths: The bytes of each block of these, ``chunk``, which of them it is a block of, and
            ``starts``, where it lies in the file.
    """

    file: str
    faults: tuple[Fault, ...]
    lost: frozenset[str]
    header_bytes: int = 0
    slots: Sequence[Slot] = ()
    sums: Sums = attrs.Factory(lambda: np.zeros(0, np.uint64))
    lengths: Ints = attrs.Factory(lambda: column([]))
    chunk: Ints = attrs.Factory(lambda: column([]))
    starts: Ints = attrs.Factory(lambda: column([]))


@attrs.frozen(eq=False)
class _Scanner:
    """Compares files and their headers with the manifest."""

    store: Store
    manifest: Manifest
    expected: Expected
    progress: Progress

    def scan(self, number: int) -> _Scan:
        """Look at one file; its data is not read."""
        files = self.manifest.files
        name, size = files.names[number], int(files.sizes[number])
        try:
            opened = self.expected.open(self.store, number)
        except StoreError as error:
            opened = Opened(0, None, (Fault("unreadable", name, str(error), None, 0, size),))
        wanted = {slot.name: (slot, at) for at, slot in self.expected.slots(number)}
        if opened.header is None:
            scan = _Scan(name, tuple(opened.faults), frozenset(wanted))
        else:
            scan = self._match(name, wanted, opened, opened.header)
        self.progress.add(size - int(scan.lengths.sum()))
        return scan

    def _match(
        self, file: str, wanted: Mapping[str, tuple[Slot, int]], opened: Opened, header: Header
    ) -> _Scan:
        """Compare the chunks of a header with those of the manifest, and cut them into blocks."""
        good, bad = list[tuple[Slot, int]](), list[Fault]()
        for name, (slot, at) in wanted.items():
            there = header.slots.get(name)
            fault = _slot_fault(file, slot, there, opened.size)
            if there is not None and fault is None:
                good.append((there, at))
            elif fault is not None:
                bad.append(fault)
        lost = frozenset(fault.key for fault in bad if fault.key is not None)
        for name in sorted(header.slots.keys() - wanted.keys()):
            reason = "the header has it, and the manifest does not"
            bad.append(_chunk_fault("disagrees", file, reason, header.slots[name]))
        good.sort(key=lambda pair: pair[0].begin)
        slots = [slot for slot, _ in good]
        width = column([itemsize(slot.dtype) for slot in slots])
        blocks = cut_blocks(padded([s.shape for s in slots], 1), width, self.manifest.block_bytes)
        lengths = blocks.sizes.prod(axis=1) * width[blocks.box]
        before = np.cumsum(lengths) - lengths
        first = np.searchsorted(blocks.box, blocks.box)  # the first block of the same chunk
        begin = column([slot.begin for slot in slots])
        return _Scan(
            file,
            (*opened.faults, *bad),
            lost,
            header.length,
            slots,
            self.manifest.sums[column([at for _, at in good])],
            lengths,
            blocks.box,
            begin[blocks.box] + before - before[first],
        )


def _slot_fault(file: str, wanted: Slot, there: Slot | None, size: int) -> Fault | None:
    """Return what is wrong with a chunk, given what the header has of it."""
    if there is None or there.place != wanted.place:
        says = "does not have it" if there is None else f"says {_described(there)}"
        reason = f"the manifest says {_described(wanted)}, and the header {says}"
        return _chunk_fault("disagrees", file, reason, there or wanted)
    if there.begin + there.nbytes > size:
        return _chunk_fault("size", file, "its bytes are cut off", there)
    return None


def _described(slot: Slot) -> str:
    return f"{slot.dtype} {list(slot.shape)} at {list(slot.offsets)}"


def _chunk_fault(kind: FaultKind, file: str, reason: str, slot: Slot) -> Fault:
    end = slot.begin + slot.nbytes if slot.begin else 0
    return Fault(kind, file, reason, slot.name, slot.begin, end)


@attrs.frozen(eq=False)
class _Task:
    """Some blocks that lie one after the other in a file: its name, where, and their lengths."""

    file: str
    start: int
    lengths: Sequence[int]


@attrs.frozen(eq=False)
class _Hasher:
    """Reads blocks, so many bytes at a time, and hashes them, on any number of threads."""

    store: Store
    progress: Progress
    piece: int
    turn: threading.Semaphore

    def run(self, task: _Task) -> Sequence[int | StoreError]:
        """Return the checksum of each block; where reading fails, the error of each that fails."""
        with self.turn:
            try:
                size = sum(task.lengths)
                pieces = read_pieces(self.store, task.file, task.start, size, self.piece)
                found = list[int | StoreError](XXH3.of_pieces(pieces, task.lengths))
            except StoreError as error:
                if len(task.lengths) > 1:
                    found = None
                else:
                    found = [error]
        if found is None:  # each block by itself, to find the one to blame
            starts = np.cumsum([task.start, *task.lengths]).tolist()
            alone = (
                _Task(task.file, start, [length])
                for start, length in zip(starts, task.lengths, strict=False)
            )
            return [result for block in alone for result in self.run(block)]
        self.progress.add(sum(task.lengths))
        return found


def _judge(scan: _Scan, hashed: Sequence[int | StoreError]) -> tuple[list[Fault], int]:
    """Compare the checksums of a file's chunks; return faults, and how many bytes were read."""
    faults = []
    edges = np.searchsorted(scan.chunk, np.arange(len(scan.slots) + 1)).tolist()
    for slot, wanted, (low, high) in zip(
        scan.slots, scan.sums.tolist(), pairwise(edges), strict=True
    ):
        error = next((one for one in hashed[low:high] if isinstance(one, StoreError)), None)
        if error is not None:
            faults.append(_chunk_fault("unreadable", scan.file, str(error), slot))
        elif combine([one for one in hashed[low:high] if isinstance(one, int)]) != wanted:
            reason = "its bytes do not fit their checksum"
            faults.append(_chunk_fault("checksum", scan.file, reason, slot))
    lengths = zip(hashed, scan.lengths.tolist(), strict=True)
    return faults, sum(length for one, length in lengths if isinstance(one, int))
