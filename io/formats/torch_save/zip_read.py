"""Reading a `torch.save` archive in place: which records it has, and where their bytes lie.

An archive may lie anywhere in a file, and its directory is at its end. Records are stored
uncompressed, so the bytes of a tensor can be read in place. Nothing here needs torch. `zip_write`
makes such archives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final, cast

import attrs

from ...checksums import sum_crc
from ...errors import FormatError
from ...limits import LIMITS
from ...stores.base import MissingFileError, Store, StoreError

ALIGNMENT: Final = 64
"""Records begin at multiples of this, counted from the archive's first byte, as torch does it."""

LOCAL: Final = struct.Struct("<4s5H3I2H")
CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
END: Final = struct.Struct("<4s4H2IH")
END64: Final = struct.Struct("<4sQ2H2I4Q")
LOCATOR: Final = struct.Struct("<4sIQI")
HUGE: Final = 0xFFFFFFFF  # stands for a number that is in a zip64 field
DESCRIBED: Final = 8  # flag: sizes and checksum follow the data
DESCRIPTOR: Final = 24
"""The most bytes of sizes and checksum that follow the data of a record."""

_ENCRYPTED: Final = 1
_PACKED: Final = 1 << 16  # our own flag: compressed or encrypted
_DAMAGE: Final = (struct.error, RuntimeError, ValueError)
_TAIL: Final = 1024  # bytes that are read at once from the end


class Window:
    """Some bytes of a file, read as they are asked for."""

    def __init__(
        self, store: Store, file: str, offset: int, length: int, head: bytes = b""
    ) -> None:
        self.store, self.file, self.offset, self.length = store, file, offset, length
        self._head, self._tail = head, b""

    def read(self, at: int, nbytes: int) -> bytes:
        """Return some bytes, from an offset within the window."""
        if at < 0 or nbytes < 0 or at + nbytes > self.length:
            raise FormatError(
                self.file,
                f"the data at byte {self.offset:,} has {self.length:,} bytes, but its bytes "
                f"{at:,} to {at + nbytes:,} are referred to: it was cut short, or is damaged",
            )
        if at + nbytes <= len(self._head):
            return self._head[at : at + nbytes]
        first = self.length - len(self._tail)
        if at >= first:
            return self._tail[at - first : at - first + nbytes]
        data = bytearray(nbytes)
        read_ranges(self.store, self.file, [(self.offset + at, memoryview(data))])
        return bytes(data)

    def read_tail(self, nbytes: int) -> bytes:
        """Return the last bytes, and keep them for `read`."""
        nbytes = min(nbytes, self.length)
        self._tail = self.read(self.length - nbytes, nbytes)
        return self._tail

    def fault(self, reason: str) -> FormatError:
        """Return the error for an archive that is not as it should be."""
        return FormatError(self.file, f"the archive at byte {self.offset:,} is damaged: {reason}")


def read_ranges(store: Store, file: str, ranges: list[tuple[int, memoryview]]) -> None:
    """Read ranges of a file of a checkpoint."""
    try:
        store.read(file, ranges)
    except MissingFileError:
        raise FormatError(file, "it is missing") from None
    except StoreError as error:
        if error.kind == "short":
            raise FormatError(file, error.reason) from None
        raise


@attrs.frozen
class Record:
    """A file in an archive; positions are counted from the archive's first byte.

    Attributes:
        crc: The CRC-32 of its data; 0 if torch was asked to compute none.
    """

    name: str
    header: int
    nbytes: int
    described: bool
    end: int
    crc: int = 0

    @property
    def guess(self) -> int | None:
        """Where its data begins, if it is aligned as torch does it; None if that is unknown."""
        begin = self.end - self.nbytes
        begin -= tail_size(self.nbytes, self.header) if self.described else 0
        expected = data_begin(self.header, len(self.name), self.nbytes)
        return begin if begin == expected and self.name.isascii() else None


def data_begin(header: int, name: int, nbytes: int) -> int:
    """Return where the data of a record begins in an archive that torch wrote.

    >>> data_begin(598, len("archive/data/0"), 24)
    704
    """
    plain = header + LOCAL.size + name + len(zip64_field(nbytes, header)) + 4
    return -(-plain // ALIGNMENT) * ALIGNMENT


def zip64_field(nbytes: int, header: int) -> bytes:
    """Return the field for numbers that are too large for their places; empty if all fit."""
    numbers = [nbytes, nbytes] if nbytes >= HUGE else []
    numbers += [header] if header >= HUGE else []
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def tail_size(nbytes: int, header: int) -> int:
    """Return how many bytes the descriptor after a record has; empty records have none."""
    return (24 if max(nbytes, header) >= HUGE else 16) if nbytes else 0


def described_crc(data: bytes, nbytes: int) -> int | None:
    r"""Return the CRC-32 of a record's data from the descriptor after it; None if there is none."""
    for form in ("<4sI2I", "<4sI2Q"):
        if len(data) >= struct.calcsize(form):
            signature, crc, packed, size = struct.unpack_from(form, data)
            if signature == b"PK\x07\x08" and packed == size == nbytes:
                return crc or None  # torch writes zeros if it is asked to compute none
    return None


@attrs.frozen
class Archive:
    """A `torch.save` archive; names of records lack the folder that torch puts them all in."""

    window: Window
    records: Mapping[str, Record]
    packed: int = 0

    @property
    def is_summed(self) -> bool:
        """Whether it has checksums; torch writes zeros if it is asked to compute none."""
        return any(record.crc for record in self.records.values() if record.nbytes)

    @property
    def is_little(self) -> bool:
        """Whether it was written on a little-endian machine, as far as it says."""
        return "byteorder" not in self.records or self.read("byteorder", 8) == b"little"

    def read(self, name: str, limit: int) -> bytes:
        """Return a small record whole."""
        record = self._record(name)
        if record.nbytes > limit:
            reason = f"its record {name} has {record.nbytes:,} bytes; {limit:,} at most"
            raise self.window.fault(reason)
        data = self.window.read(self.begin(name), record.nbytes)
        if record.crc and sum_crc(data) != record.crc:
            raise self.window.fault(f"its record {name} does not fit its checksum")
        return data

    def check_storages(self, nbytes: Mapping[str, int]) -> None:
        """Refuse an archive without the storages that its pickle refers to."""
        for key, size in nbytes.items():
            record = self.records.get(f"data/{key}")
            if record is None or record.nbytes != size:
                held = "none" if record is None else f"{record.nbytes:,}"
                reason = f"storage {key[:80]} should have {size:,} bytes, and has {held}"
                raise self.window.fault(reason)

    def begin(self, name: str) -> int:
        """Return where the data of a record begins, from the archive's first byte."""
        record = self._record(name)
        begin = record.guess
        if begin is None:
            head = self.window.read(record.header, LOCAL.size)
            signature, *_, spelled, extra = LOCAL.unpack(head)
            if signature != b"PK\3\4":
                raise self.window.fault(f"its record {name} is not where its directory says")
            begin = record.header + LOCAL.size + spelled + extra
        if begin + record.nbytes > record.end:
            raise self.window.fault(f"its record {name} reaches past its end")
        return begin

    def _record(self, name: str) -> Record:
        if name not in self.records:
            reason = f"it has no record {name}: torch.save did not write it"
            raise self.window.fault(reason)
        return self.records[name]


def in_memory(data: bytes, file: str) -> Window:
    """Return a window whose bytes are all known."""
    return Window(cast("Store", None), file, 0, len(data), data)


def read_archive(window: Window) -> Archive:
    """Read the directory of an archive.

    Raises:
        FormatError: There is none, or it is damaged.
    """
    begin, size, count = _find_directory(window)
    if size > LIMITS["directory"] or not 0 < count * CENTRAL.size <= size:
        raise window.fault(f"its directory of {count:,} entries has {size:,} bytes")
    data = window.read(begin, size)
    try:
        entries = sorted(_entries(data, count))
    except _DAMAGE:
        raise window.fault("its directory is damaged") from None
    ends = [header for header, *_ in entries[1:]] + [begin]
    records: dict[str, Record] = {}
    packed = 0
    for (header, nbytes, spelled, flags, crc), end in zip(entries, ends, strict=True):
        if flags & _PACKED:
            packed += 1  # TorchScript does that
            continue
        name = spelled.decode("utf-8", "replace")
        inner = name.partition("/")[2]
        if not inner and not nbytes:
            continue  # a folder, which other programs list
        if not inner or inner in records or header + LOCAL.size + len(spelled) + nbytes > end:
            raise window.fault(f"its directory lists {name}, which cannot be")
        records[inner] = Record(name, header, nbytes, bool(flags & DESCRIBED), end, crc)
    return Archive(window, records, packed)


def _entries(data: bytes, count: int) -> Iterator[tuple[int, int, bytes, int, int]]:
    """Yield the header's offset, size, name, flags and CRC-32 of each entry of a directory.

    The standard library's `zipfile` takes three times as long.
    """
    at = 0
    for _ in range(count):
        fields = CENTRAL.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, nbytes, name, extra, note = fields[:13]
        header = fields[-1]
        begin = at + CENTRAL.size
        middle = begin + name
        at = middle + extra + note
        if signature != b"PK\1\2" or at > len(data):
            raise ValueError
        if nbytes == HUGE or packed == HUGE or header == HUGE:
            long = _zip64_numbers(data[middle : middle + extra])
            nbytes, packed, header = [
                next(long) if number == HUGE else number for number in (nbytes, packed, header)
            ]
        if method or flags & _ENCRYPTED or packed != nbytes:
            flags |= _PACKED
        yield header, nbytes, data[begin:middle], flags, crc
    if at != len(data):
        raise ValueError


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    while extra:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            yield from (number for (number,) in struct.iter_unpack("<Q", extra[4 : 4 + size]))
        extra = extra[4 + size :]


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return where the directory begins, how many bytes it has, and how many entries."""
    tail = window.read_tail(_TAIL)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + END.size > len(tail):
        raise window.fault("it was cut short, or is not an archive")
    *_, count, size, begin, _ = END.unpack_from(tail, at)
    before = at - LOCATOR.size
    if before >= 0 and tail.startswith(b"PK\6\7", before):
        _, _, place, _ = LOCATOR.unpack_from(tail, before)
        signature, *_, count, size, begin = END64.unpack(window.read(place, END64.size))
        if signature != b"PK\6\6":
            raise window.fault("its end is damaged")
    return begin, size, count
