"""Checking every byte of a checkpoint of ours; all faults are found, not only the first.

1. Each file is opened, and its header compared with the manifest (`_Scanner`). This finds the
   chunks that can be checked at all, and where their blocks lie.
2. Their bytes are compared with the checksums in the header or in the file's table, which the
   manifest covers (`check_regions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from shardplan.planning import find_issues, itemsize
from shardplan.planning.columns import column, padded
from shardplan.planning.storage import cut_blocks

from ...checksums import XXH3
from ...errors import FormatError
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import Store, StoreError
from ...values import StoredValue, load_value
from ..base import Fault, FaultKind, Findings
from ..checks import SummedBytes, check_regions
from ..headers import Header, Slot
from .expected import Expected, OpenedFile
from .manifest import decode_manifest, find_manifest
from .record import MANIFEST, Manifest


def verify_native(
    store: Store, callback: ProgressCallback | None = None, pool: Pool | None = None
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
        Progress(0, callback)
        return Findings((Fault("manifest", MANIFEST, error.reason),))
    pool = pool or default_pool()
    progress = Progress(len(data) + int(manifest.files.sizes.sum()), callback)
    contradictions = tuple(_contradictions(manifest))
    progress.add(len(data))
    scanner = _Scanner(store, manifest, Expected(manifest), progress)
    tables = set(manifest.files.tables.values())  # each is looked at with its file
    scans = pool.map(
        scanner.scan,
        [number for number in range(len(manifest.files)) if number not in tables],
        nbytes=lambda number: scanner.expected.header_cost(number) + store.staging,
    )
    regions = [region for scan in scans for region in scan.regions]
    checked = check_regions(store, regions, XXH3, progress, pool)
    progress.finish()
    headers = tuple(fault for scan in scans for fault in scan.faults)
    order = {name: number for number, name in enumerate(manifest.files.names)}
    return Findings(
        contradictions + tuple(sorted(headers + checked.faults, key=lambda f: order[f.file])),
        len(manifest.files),
        checked.sound,
        len(data) + sum(scan.header_bytes for scan in scans) + checked.nbytes,
        lost=frozenset[str]().union(*(scan.lost for scan in scans)),
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


@attrs.frozen(eq=False)
class _Scan:
    """What one file's header says: faults, names that cannot be read, and chunks to check."""

    faults: tuple[Fault, ...]
    lost: frozenset[str]
    header_bytes: int = 0
    regions: Sequence[SummedBytes] = ()
    data_bytes: int = 0  # of the regions


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
            opened = OpenedFile(0, None, (Fault("unreadable", name, str(error), None, 0, size),))
        wanted = {slot.name: (slot, at) for at, slot in self.expected.slots(number)}
        if opened.header is None:
            scan = _Scan(tuple(opened.faults), frozenset(wanted))
        else:
            scan = self._match(number, wanted, opened, opened.header)
        table = files.tables.get(number)
        if table is not None:
            nbytes = scan.header_bytes + (0 if opened.sums is None else int(files.sizes[table]))
            scan = attrs.evolve(scan, header_bytes=nbytes)
            self.progress.add(int(files.sizes[table]))
        self.progress.add(size - scan.data_bytes)
        return scan

    def _match(
        self,
        number: int,
        wanted: Mapping[str, tuple[Slot, int]],
        opened: OpenedFile,
        header: Header,
    ) -> _Scan:
        """Compare the chunks of a header with those of the manifest, and cut them into blocks."""
        file, is_shared = self.manifest.files.names[number], number in self.manifest.files.shared
        good, bad, unchecked = list[tuple[Slot, int]](), list[Fault](), list[str]()
        for name, (slot, at) in wanted.items():
            there = header.slots.get(name)
            fault = _slot_fault(file, slot, there, opened.size)
            if there is not None and fault is None:
                checksum = opened.sum_of(self.manifest, name, at)
                if checksum is None:
                    unchecked.append(name)
                else:
                    good.append((there, checksum))
            elif fault is not None:
                bad.append(fault)
        lost = frozenset([*unchecked, *(fault.key for fault in bad if fault.key is not None)])
        for name in () if is_shared else sorted(header.slots.keys() - wanted.keys()):
            reason = "the header has it, and the manifest does not"
            bad.append(_chunk_fault("disagrees", file, reason, header.slots[name]))
        good.sort(key=lambda pair: pair[0].begin)
        width = column([itemsize(slot.dtype) for slot, _ in good])
        shapes = padded([slot.shape for slot, _ in good], 1)
        cut = cut_blocks(shapes, width, self.manifest.block_bytes)
        lengths = (cut.sizes.prod(axis=1) * width[cut.box]).tolist()
        edges = np.searchsorted(cut.box, np.arange(len(good) + 1)).tolist()
        regions = [
            SummedBytes(
                file,
                slot.begin,
                lengths[edges[n] : edges[n + 1]],
                checksum,
                (slot.name,),
            )
            for n, (slot, checksum) in enumerate(good)
        ]
        return _Scan((*opened.faults, *bad), lost, header.length, regions, sum(lengths))


def _slot_fault(file: str, wanted: Slot, there: Slot | None, size: int) -> Fault | None:
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
