"""Is this the file that was saved? Its size and header against the manifest, all faults noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from shardplan.planning import itemsize
from shardplan.planning.columns import Ints, column, padded
from shardplan.planning.storage import cut_blocks, save_id_of

from ...checksums import Sums
from ...errors import FormatError
from ...progress import Progress
from ...stores.base import MissingFileError, Store, StoreError
from ..headers import Header, Slot, header_length, parse_header
from .expected import Expected
from .manifest import Manifest

__all__ = ["Fault", "FaultKind", "Files", "Scan", "chunk_fault"]

FaultKind = Literal[
    "manifest",
    "missing",
    "size",
    "swapped",
    "foreign",
    "header",
    "disagrees",
    "checksum",
    "unreadable",
]


@attrs.frozen
class Fault:
    """One thing that is wrong with a checkpoint.

    Attributes:
        kind: ``manifest`` (it cannot be read, or contradicts itself), ``missing`` (no such file),
            ``size`` (cut short, or longer than it was), ``swapped`` (another file of this
            checkpoint under its name), ``foreign`` (a file of another save or program),
            ``header`` (damaged), ``disagrees`` (header and manifest tell different stories),
            ``checksum`` (a chunk's bytes were changed) or ``unreadable`` (the store fails).
        file: The file, by its name inside the checkpoint.
        reason: What was expected and what was found.
        key: The tensor or value concerned; None where it is the whole file.
        begin, end: The bytes of the file concerned.
    """

    kind: FaultKind
    file: str
    reason: str
    key: str | None = None
    begin: int = 0
    end: int = 0


@attrs.frozen(eq=False)
class Scan:
    """What a look at one file's header told.

    Attributes:
        file: The file.
        faults: What is wrong so far.
        lost: Names of its chunks that cannot be checked.
        header_bytes: How many bytes were read for it.
        slots: The chunks that can be checked, in order of place, and ``sums``, their checksums.
        lengths: The bytes of each block of these, ``chunk``, which of them it is a block of, and
            ``starts``, where it lies.
        digests: The checksum of each block, once it is known.
        errors: Why a block could not be read.
    """

    file: str
    faults: list[Fault] = attrs.Factory(list)
    lost: set[str] = attrs.Factory(set)
    header_bytes: int = 0
    slots: Sequence[Slot] = ()
    sums: Sums = attrs.Factory(lambda: np.zeros(0, np.uint64))
    lengths: Ints = attrs.Factory(lambda: column([]))
    chunk: Ints = attrs.Factory(lambda: column([]))
    starts: Ints = attrs.Factory(lambda: column([]))
    digests: Sums = attrs.Factory(lambda: np.zeros(0, np.uint64))
    errors: dict[int, str] = attrs.Factory(dict)


class Files:
    """Compares files and their headers with the manifest."""

    def __init__(self, store: Store, manifest: Manifest, progress: Progress) -> None:
        self._store, self._manifest, self._progress = store, manifest, progress
        self._expected = Expected(manifest)

    def scan(self, number: int) -> Scan:
        """Look at one file; its data is not read."""
        files = self._manifest.files
        name, size = files.names[number], int(files.sizes[number])
        expected = {slot.name: (slot, at) for at, slot in self._expected.slots(number)}
        found, header, faults = self._open(number)
        scan = Scan(name, faults)
        if header is None:
            scan.lost.update(expected)
        else:
            pairs = self._match(scan, expected, header, found)
            scan = self._with_blocks(attrs.evolve(scan, header_bytes=header.length), pairs)
        self._progress.add(size - int(scan.lengths.sum()))
        return scan

    def _open(self, number: int) -> tuple[int, Header | None, list[Fault]]:
        """Return a file's size and, if chunks can be found by it, its header; and what is wrong."""
        files = self._manifest.files
        name, size = files.names[number], int(files.sizes[number])
        try:
            found = self._store.size(name)
            return found, *self._header(number, found)
        except MissingFileError:
            fault = Fault("missing", name, "it is not there", None, 0, size)
        except StoreError as error:
            fault = Fault("unreadable", name, str(error), None, 0, size)
        return 0, None, [fault]

    def _header(self, number: int, found: int) -> tuple[Header | None, list[Fault]]:
        files = self._manifest.files
        name, size, length = (
            files.names[number],
            int(files.sizes[number]),
            int(files.headers[number]),
        )
        data = self._read(name, self._expected.header_bytes(number, found))
        genuine = self._expected.fits(number, data)
        faults = [] if found == size else [_wrong_size(name, size, found)]
        try:
            if not genuine:
                data = self._read(name, header_length(data[:8], name, found))
            header = parse_header(data, name, size if genuine else found)
        except FormatError as error:
            if found >= length:  # else it is cut short, and no more can be said
                faults.append(Fault("header", name, error.reason, None, 0, length))
            return None, faults
        own = self._expected.wrote(number, header)
        stranger = None if own else self._stranger(name, header, found)
        if stranger is not None:
            return None, [stranger]
        if not genuine or not own:
            reason = "its header does not fit its checksum"
            faults.append(Fault("header", name, reason, None, 0, length))
        return header, faults

    def _stranger(self, name: str, header: Header, found: int) -> Fault | None:
        """Tell whether a file was written under another name, by another save or program."""
        save_id = self._manifest.save_id
        if header.save_id is None:
            return Fault("foreign", name, "another program wrote it", None, 0, found)
        if header.save_id == save_id and header.name in self._manifest.files.names:
            return Fault("swapped", name, f"it was written as {header.name}", None, 0, found)
        own = None if header.name is None else save_id_of(header.name)
        if own != header.save_id or own == save_id:
            return None  # no save wrote that: it is the header that is damaged
        reason = f"save {header.save_id} wrote it as {header.name}; this is save {save_id}"
        return Fault("foreign", name, reason, None, 0, found)

    def _read(self, name: str, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._store.read(name, [(0, memoryview(data))])
        return bytes(data)

    def _match(
        self, scan: Scan, expected: dict[str, tuple[Slot, int]], header: Header, found: int
    ) -> list[tuple[Slot, int]]:
        """Return the chunks that lie in the file as the manifest says, noting all that do not."""
        good = []
        for name, (wanted, at) in expected.items():
            slot = header.slots.get(name)
            if slot is None or slot.place != wanted.place:
                says = "does not have it" if slot is None else f"says {_told(slot)}"
                reason = f"the manifest says {_told(wanted)}, and the header {says}"
                scan.faults.append(chunk_fault("disagrees", scan.file, reason, slot or wanted))
            elif slot.begin + slot.nbytes > found:
                scan.faults.append(chunk_fault("size", scan.file, "its bytes are cut off", slot))
            else:
                good.append((slot, at))
                continue
            scan.lost.add(name)
        for name in sorted(header.slots.keys() - expected.keys()):
            reason = "the header has it, and the manifest does not"
            slot = header.slots[name]
            scan.faults.append(chunk_fault("disagrees", scan.file, reason, slot))
        return sorted(good, key=lambda pair: pair[0].begin)

    def _with_blocks(self, scan: Scan, pairs: list[tuple[Slot, int]]) -> Scan:
        """Cut the chunks that can be checked into blocks."""
        slots = [slot for slot, _ in pairs]
        width = column([itemsize(slot.dtype) for slot in slots])
        blocks = cut_blocks(padded([s.shape for s in slots], 1), width, self._manifest.block_bytes)
        lengths = blocks.sizes.prod(axis=1) * width[blocks.box]
        before = np.cumsum(lengths) - lengths
        first = np.searchsorted(blocks.box, blocks.box)  # the first block of the same chunk
        begin = column([slot.begin for slot in slots])
        return attrs.evolve(
            scan,
            slots=slots,
            sums=self._manifest.sums[column([at for _, at in pairs])],
            lengths=lengths,
            chunk=blocks.box,
            starts=begin[blocks.box] + before - before[first],
            digests=np.zeros(len(lengths), np.uint64),
        )


def _wrong_size(name: str, size: int, found: int) -> Fault:
    what = "it was cut short" if found < size else "something was added"
    reason = f"it has {found:,} bytes and was saved with {size:,}: {what}"
    return Fault("size", name, reason, None, min(size, found), max(size, found))


def _told(slot: Slot) -> str:
    return f"{slot.dtype} {list(slot.shape)} at {list(slot.offsets)}"


def chunk_fault(kind: FaultKind, file: str, reason: str, slot: Slot) -> Fault:
    """Say what is wrong with one chunk."""
    end = slot.begin + slot.nbytes if slot.begin else 0
    return Fault(kind, file, reason, slot.name, slot.begin, end)
