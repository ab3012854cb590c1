"""What is in a `torch.save` archive, and where? Reading a zip without loading it.

An archive may lie anywhere in a file. Its directory is at its end; records are stored as they are,
so the bytes of a tensor can be read in place once the archive's few small records are known.
Nothing here needs torch. `torchzip_write` makes such archives.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, cast

import attrs

from ...checksums import sum_crc
from ...errors import FormatError
from ...limits import LIMITS
from ...stores.base import MissingFileError, Store, StoreError

__all__ = [
    "ALIGNMENT",
    "Archive",
    "Record",
    "Window",
    "in_memory",
    "read_archive",
]

ALIGNMENT: Final = 64
"""Records begin at multiples of this, counted from the archive's first byte, as torch has it."""

LOCAL: Final = struct.Struct("<4s5H3I2H")
CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
END: Final = struct.Struct("<4s4H2IH")
END64: Final = struct.Struct("<4sQ2H2I4Q")
LOCATOR: Final = struct.Struct("<4sIQI")
HUGE: Final = 0xFFFFFFFF  # stands for a number that is told in a zip64 field
DESCRIBED: Final = 8  # flag: sizes and checksum follow the data
DESCRIPTOR: Final = 24
"""The most bytes of sizes and checksum that follow the data of a record."""

_PACKED: Final = 1 << 16  # our own flag: compressed or encrypted
_TAIL: Final = 1024


class Window:
    """Some bytes of a file, read as they are asked for.

    Args:
        store: Where the file is.
        file: Its name.
        offset: Where the window begins.
        length: How many bytes it has.
        head: Its first bytes, if they were read already.
    """

    def __init__(
        self, store: Store, file: str, offset: int, length: int, head: bytes = b""
    ) -> None:
        self.store, self.file, self.offset, self.length = store, file, offset, length
        self._head, self._tail = head, b""

    def read(self, at: int, nbytes: int) -> bytes:
        """Return some bytes, from an offset within the window.

        Raises:
            FormatError: They are not all there.
        """
        if at < 0 or nbytes < 0 or at + nbytes > self.length:
            raise FormatError(
                self.file,
                f"what lies at byte {self.offset:,} has {self.length:,} bytes, but its bytes "
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
        """Return the last bytes, and keep them."""
        nbytes = min(nbytes, self.length)
        self._tail = self.read(self.length - nbytes, nbytes)
        return self._tail


def read_ranges(store: Store, file: str, ranges: list[tuple[int, memoryview]]) -> None:
    """Read ranges of a file of a checkpoint; that it is missing or short is the file's fault.

    Raises:
        FormatError: The file is missing or too short.
    """
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
    """A file in an archive.

    Attributes:
        name: Its name as it is spelled there.
        header: Where its local header begins, from the archive's first byte.
        nbytes: Its size.
        described: Whether a descriptor follows its data.
        end: Where what follows it begins.
        crc: The CRC-32 of its data, as its directory has it.
    """

    name: bytes
    header: int
    nbytes: int
    described: bool
    end: int
    crc: int = 0

    @property
    def guess(self) -> int | None:
        """Where its data begins, if it lies as torch lays it; None if that cannot be told."""
        huge = self.nbytes >= HUGE or self.header >= HUGE
        tail = (24 if huge else 16) if self.described and self.nbytes else 0
        begin = self.end - tail - self.nbytes
        return begin if begin == data_begin(self.header, len(self.name), self.nbytes) else None


def data_begin(header: int, name: int, nbytes: int) -> int:
    """Say where the data of a record begins in an archive that torch wrote.

    Args:
        header: Where its local header begins.
        name: How many bytes its name has.
        nbytes: How many its data has.

    >>> data_begin(598, len("archive/data/0"), 24)
    704
    """
    plain = header + LOCAL.size + name + len(zip64_field(nbytes, header)) + 4
    return -(-plain // ALIGNMENT) * ALIGNMENT


def described_crc(data: bytes, nbytes: int) -> int | None:
    r"""Return the CRC-32 of a record's data, given what follows it; None if nothing says so.

    Args:
        data: `DESCRIPTOR` bytes that follow the data, or as many as there are.
        nbytes: How many bytes the data has.

    >>> described_crc(b"PK\x07\x08" + struct.pack("<3I", 7, 5, 5), 5)
    7
    """
    for form in ("<4sI2I", "<4sI2Q"):
        if len(data) >= struct.calcsize(form):
            signature, crc, packed, size = struct.unpack_from(form, data)
            if signature == b"PK\x07\x08" and packed == size == nbytes:
                return crc or None  # torch writes zeros if it is asked to compute none
    return None


def zip64_field(nbytes: int, header: int) -> bytes:
    """Return the field that tells numbers too large for their places; none if all fit."""
    numbers = [nbytes, nbytes] if nbytes >= HUGE else []
    numbers += [header] if header >= HUGE else []
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


@attrs.frozen
class Archive:
    """A `torch.save` archive.

    Attributes:
        window: Where it lies.
        records: Its records, by name, without the folder that torch puts them all in.
        packed: How many more there are that are compressed, which torch.save never does.
    """

    window: Window
    records: Mapping[str, Record]
    packed: int = 0

    @property
    def is_summed(self) -> bool:
        """Whether it has checksums; torch writes zeros if it is asked to compute none."""
        return any(record.crc for record in self.records.values() if record.nbytes)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small record whole.

        Raises:
            FormatError: There is none, it has more than ``limit`` bytes, or other bytes than were
                written.
        """
        record = self._record(name)
        if record.nbytes > limit:
            raise self._fault(f"its record {name} has {record.nbytes:,} bytes; {limit:,} at most")
        data = self.window.read(self.begin(name), record.nbytes)
        if record.crc and sum_crc(data) != record.crc:
            raise self._fault(f"its record {name} does not fit its checksum")
        return data

    def check_storages(self, nbytes: Mapping[str, int]) -> None:
        """Refuse an archive without the storages that its pickle refers to.

        Args:
            nbytes: How many bytes each should have, by key.

        Raises:
            FormatError: One is missing, or of another size.
        """
        for key, size in nbytes.items():
            record = self.records.get(f"data/{key}")
            if record is None or record.nbytes != size:
                held = "none" if record is None else f"{record.nbytes:,}"
                raise self._fault(f"storage {key[:80]} should have {size:,} bytes, and has {held}")

    def begin(self, name: str) -> int:
        """Say where the data of a record begins, from the archive's first byte.

        Raises:
            FormatError: There is no such record, or it is not all there.
        """
        record = self._record(name)
        begin = record.guess
        if begin is None:
            head = self.window.read(record.header, LOCAL.size)
            signature, *_, spelled, extra = LOCAL.unpack(head)
            if signature != b"PK\3\4" or spelled != len(record.name):
                raise self._fault(f"its record {name} is not where its directory says")
            begin = record.header + LOCAL.size + spelled + extra
        if begin + record.nbytes > self.window.length:
            raise self._fault(f"its record {name} reaches past its end")
        return begin

    def _record(self, name: str) -> Record:
        if name not in self.records:
            raise self._fault(f"it has no record {name}: it is no archive of torch.save")
        return self.records[name]

    def _fault(self, reason: str) -> FormatError:
        return fault(self.window, reason)


def in_memory(data: bytes, file: str) -> Window:
    """Return a window whose bytes were all read already."""
    return Window(cast("Store", None), file, 0, len(data), data)


def fault(window: Window, reason: str) -> FormatError:
    """Make the error for an archive that is not what it should be."""
    return FormatError(window.file, f"the archive at byte {window.offset:,} is damaged: {reason}")


def read_archive(window: Window) -> Archive:
    """Read the directory of an archive.

    Raises:
        FormatError: There is none, or it is damaged.
    """
    begin, size, count = _find_directory(window)
    wrong = size > LIMITS["directory"] or begin + size > window.length
    if wrong or count * CENTRAL.size > size:
        raise fault(window, f"its directory of {size:,} bytes cannot be where it says")
    if not count:
        raise fault(window, "it has no records")
    data = window.read(begin, size)
    found = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > size:
            raise fault(window, "its directory is cut short")
        header, nbytes, name, flags, crc, at = _entry(window, data, at)
        found.append((header, nbytes, name, flags, crc))
    found.sort()
    ends = [header for header, *_ in found[1:]] + [begin]
    records = {}
    packed = 0
    for (header, nbytes, name, flags, crc), end in zip(found, ends, strict=True):
        if flags & _PACKED:
            packed += 1  # which torch.save never does, but TorchScript
            continue
        folder, _, inner = name.decode("utf-8", "replace").partition("/")
        if name.endswith(b"/") and not nbytes:
            continue  # a folder, which other programs list
        if not inner or inner in records or header + LOCAL.size + len(name) + nbytes > end:
            raise fault(window, f"its directory lists {folder}/{inner}, which cannot be")
        records[inner] = Record(name, header, nbytes, bool(flags & DESCRIBED), end, crc)
    return Archive(window, records, packed)


def _entry(window: Window, data: bytes, at: int) -> tuple[int, int, bytes, int, int, int]:
    """Read one entry of the directory: header, size, name, flags, CRC; where the next begins."""
    fields = CENTRAL.unpack_from(data, at)
    signature, _, _, flags, method, _, _, crc, packed, nbytes, spelled, extra, note = fields[:13]
    header = fields[16]
    first = at + CENTRAL.size
    name, more = data[first : first + spelled], data[first + spelled : first + spelled + extra]
    if signature != b"PK\1\2" or len(more) != extra:
        raise fault(window, "its directory is damaged")
    flags |= _PACKED if method or flags & 1 or packed != nbytes else 0
    if HUGE in (nbytes, header):
        numbers = _huge(more)
        try:
            if nbytes == HUGE:
                nbytes = numbers.pop(0)
                numbers.pop(0)
            header = numbers.pop(0) if header == HUGE else header
        except IndexError:
            raise fault(window, f"its record {name!r} tells no size") from None
    return header, nbytes, name, flags, crc, first + spelled + extra + note


def _huge(more: bytes) -> list[int]:
    """Return the numbers of the zip64 field."""
    while len(more) >= 4:
        kind, size = struct.unpack_from("<2H", more)
        if kind == 1:
            body = more[4 : 4 + size]
            return [n for (n,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        more = more[4 + size :]
    return []


def _find_directory(window: Window) -> tuple[int, int, int]:
    """Return where the directory begins, how many bytes it has, and how many entries."""
    tail = window.read_tail(_TAIL)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + END.size > len(tail):
        raise fault(
            window, "it does not end as an archive does: it was cut short, or is no archive"
        )
    *_, count, size, begin, _ = END.unpack_from(tail, at)
    where = at - LOCATOR.size
    if where >= 0 and tail[where : where + 4] == b"PK\6\7":
        place = LOCATOR.unpack_from(tail, where)[2]
        record = END64.unpack(window.read(place, END64.size))
        if record[0] != b"PK\6\6":
            raise fault(window, "its end is damaged")
        count, size, begin = record[-3:]
    return begin, size, count
