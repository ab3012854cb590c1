"""Archives of `torch.save`: zip files with uncompressed, aligned records, anywhere in a file.

Checksums follow the records, and the directory comes last: every position is known before the first
byte is written, and parts can be written in any order.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Final, NamedTuple, cast

import attrs

from ...checksums import sum_crc
from ...errors import FormatError
from ...execute.copying import Block, Content, Seal, literal
from ...stores.base import Store
from ..base import LIMITS, read_ranges

ALIGNMENT: Final = 64
"""Records begin at multiples of this, counted from the archive's first byte, as torch does it."""
DESCRIPTOR: Final = 24
"""The most bytes of sizes and checksum that follow the data of a record."""

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_HUGE: Final = 0xFFFFFFFF  # stands for a number that is in a zip64 field
_ENCRYPTED: Final = 1
_DESCRIBED: Final = 8  # flag: sizes and checksum follow the data
_UTF8: Final = 0x800
_TAIL: Final = 1024  # bytes that are read at once from the end


def _data_begin(header: int, name: int, nbytes: int) -> int:
    """Return where the data of a record begins in an archive that torch wrote.

    >>> _data_begin(598, len("archive/data/0"), 24)
    704
    """
    plain = header + _LOCAL.size + name + len(_zip64_field(nbytes, header)) + 4
    return -(-plain // ALIGNMENT) * ALIGNMENT


def _zip64_field(nbytes: int, header: int) -> bytes:
    """Return the field for numbers that are too large for their places; empty if all fit."""
    numbers = [number for number in (nbytes, nbytes, header) if number >= _HUGE]
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _tail_size(nbytes: int, header: int) -> int:
    """Return how many bytes the descriptor after a record has; empty records have none."""
    return (24 if max(nbytes, header) >= _HUGE else 16) if nbytes else 0


def described_crc(data: bytes, nbytes: int) -> int | None:
    """Return the CRC-32 of a record's data from the descriptor after it; None if there is none.

    It is 0 where torch was asked to compute none.
    """
    for form in ("<4sI2I", "<4sI2Q"):
        if len(data) >= struct.calcsize(form):
            signature, crc, packed, size = struct.unpack_from(form, data)
            if signature == b"PK\x07\x08" and packed == size == nbytes:
                return int(crc)
    return None


# Reading


class FileWindow:
    """Some bytes of a file, read as they are asked for; ``head`` is those that are known."""

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


def in_memory(data: bytes, file: str) -> FileWindow:
    """Return a window whose bytes are all known."""
    return FileWindow(cast("Store", None), file, 0, len(data), data)


@attrs.frozen
class Record:
    """A file in an archive, from its header to the next record; ``crc`` is 0 if there is none."""

    name: str
    header: int
    nbytes: int
    described: bool
    end: int
    crc: int

    @property
    def guess(self) -> int | None:
        """Where its data begins, if it is aligned as torch does it; None if that is unknown."""
        begin = self.end - self.nbytes
        begin -= _tail_size(self.nbytes, self.header) if self.described else 0
        expected = _data_begin(self.header, len(self.name), self.nbytes)
        return begin if begin == expected and self.name.isascii() else None


@attrs.frozen
class Archive:
    """A `torch.save` archive; names of records lack the folder that torch puts them all in.

    Records that are compressed or encrypted are left out; ``packed`` counts them.
    """

    window: FileWindow
    records: Mapping[str, Record]
    packed: int

    @property
    def is_summed(self) -> bool:
        """Whether it has checksums; torch writes zeros if it is asked to compute none."""
        return any(record.crc for record in self.records.values() if record.nbytes)

    def pickle(self, limit: int) -> bytes:
        """Return its pickle, if this machine can read what it describes."""
        self.check_packing()
        if "byteorder" in self.records and self.read("byteorder", 8) != b"little":
            reason = "it was written on a machine of another byte order; load it with torch.load"
            raise FormatError(self.window.file, reason)
        return self.read("data.pkl", limit)

    def check_packing(self) -> None:
        """Refuse an archive with compressed records."""
        if self.packed:
            reason = "its records are compressed, which torch.save never does"
            raise FormatError(self.window.file, reason)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small record whole."""
        begin, record = self.begin(name), self.records[name]
        if record.nbytes > limit:
            reason = f"its record {name} has {record.nbytes:,} bytes; {limit:,} at most"
            raise self.window.fault(reason)
        data = self.window.read(begin, record.nbytes)
        if record.crc and sum_crc(data) != record.crc:
            raise self.window.fault(f"its record {name} does not fit its checksum")
        return data

    def described_crc(self, name: str) -> int | None:
        """Return the CRC-32 that follows the data of a record; None if none does."""
        begin, nbytes = self.begin(name), self.records[name].nbytes
        room = min(DESCRIPTOR, self.window.length - begin - nbytes)
        return described_crc(self.window.read(begin + nbytes, room), nbytes)

    def crc_at(self, begin: int, nbytes: int) -> int | None:
        """Return the CRC-32, by the directory, of the record of just these bytes, if any."""
        for name, record in self.records.items():
            if record.nbytes == nbytes and self.begin(name) == begin:
                return record.crc
        return None

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
        if name not in self.records:
            raise self.window.fault(f"it has no record {name}: torch.save did not write it")
        record = self.records[name]
        begin = record.guess
        if begin is None:
            head = self.window.read(record.header, _LOCAL.size)
            signature, *_, spelled, extra = _LOCAL.unpack(head)
            if signature != b"PK\3\4":
                raise self.window.fault(f"its record {name} is not where its directory says")
            begin = record.header + _LOCAL.size + spelled + extra
        if begin + record.nbytes > record.end:
            raise self.window.fault(f"its record {name} reaches past its end")
        return begin


def read_archive(window: FileWindow) -> Archive:
    """Read the directory of an archive, or raise a `FormatError`."""
    begin, nbytes, count = _find_directory(window)
    if nbytes > LIMITS["directory"] or not 0 < count * _CENTRAL.size <= nbytes:
        raise window.fault(f"its directory of {count:,} entries has {nbytes:,} bytes")
    data = window.read(begin, nbytes)
    try:
        entries = sorted(_entries(data, count))
    except (struct.error, RuntimeError, ValueError):
        raise window.fault("its directory is damaged") from None
    ends = [entry.header for entry in entries[1:]] + [begin]
    records: dict[str, Record] = {}
    for entry, end in zip(entries, ends, strict=True):
        if entry.packed:
            continue  # TorchScript does that
        name = entry.name.decode("utf-8", "replace")
        inner = name.partition("/")[2]
        if not inner and not entry.nbytes:
            continue  # a folder, which other programs list
        last = entry.header + _LOCAL.size + len(entry.name) + entry.nbytes
        if not inner or inner in records or last > end:
            raise window.fault(f"its directory lists {name}, which cannot be")
        described = bool(entry.flags & _DESCRIBED)
        records[inner] = Record(name, entry.header, entry.nbytes, described, end, entry.crc)
    return Archive(window, records, sum(entry.packed for entry in entries))


class _Entry(NamedTuple):
    """An entry of a directory, to be sorted by place; ``packed`` if compressed or encrypted."""

    header: int
    nbytes: int
    name: bytes
    flags: int
    crc: int
    packed: bool


def _entries(data: bytes, count: int) -> Iterator[_Entry]:
    """Yield the entries of a directory, in a third of the time that `zipfile` takes."""
    at = 0
    for _ in range(count):
        fields = _CENTRAL.unpack_from(data, at)
        signature, _, _, flags, method, _, _, crc, packed, nbytes, name, extra, note = fields[:13]
        header = fields[-1]
        begin = at + _CENTRAL.size
        middle = begin + name
        at = middle + extra + note
        if signature != b"PK\1\2" or at > len(data):
            raise ValueError
        if _HUGE in (nbytes, packed, header):
            long = _zip64_numbers(data[middle : middle + extra])
            sizes = (nbytes, packed, header)
            nbytes, packed, header = [next(long) if n == _HUGE else n for n in sizes]
        is_packed = bool(method or flags & _ENCRYPTED or packed != nbytes)
        yield _Entry(header, nbytes, data[begin:middle], flags, crc, is_packed)
    if at != len(data):
        raise ValueError


def _zip64_numbers(extra: bytes) -> Iterator[int]:
    while extra:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            yield from (number for (number,) in struct.iter_unpack("<Q", extra[4 : 4 + size]))
        extra = extra[4 + size :]


def _find_directory(window: FileWindow) -> tuple[int, int, int]:
    """Return where the directory begins, and how many bytes and entries it has."""
    tail = window.read_tail(_TAIL)
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + _END.size > len(tail):
        raise window.fault("it was cut short, or is not an archive")
    *_, count, size, begin, _ = _END.unpack_from(tail, at)
    before = at - _LOCATOR.size
    if before >= 0 and tail.startswith(b"PK\6\7", before):
        _, _, place, _ = _LOCATOR.unpack_from(tail, before)
        signature, *_, count, size, begin = _END64.unpack(window.read(place, _END64.size))
        if signature != b"PK\6\6":
            raise window.fault("its end is damaged")
    return begin, size, count


# Writing


@attrs.frozen(eq=False)
class _Placed:
    """A record to write; its data is None if it is that of a storage."""

    name: bytes
    nbytes: int
    data: bytes | None
    header: int

    @property
    def end(self) -> int:
        begin = _data_begin(self.header, len(self.name), self.nbytes)
        return begin + self.nbytes + _tail_size(self.nbytes, self.header)

    @property
    def flags(self) -> int:
        return _UTF8 | (_DESCRIBED if self.nbytes else 0)

    def head(self) -> bytes:
        """Return what comes before its data: its header, and padding as torch makes it."""
        huge = _zip64_field(self.nbytes, self.header)
        begin = _data_begin(self.header, len(self.name), self.nbytes)
        gap = begin - self.header - _LOCAL.size - len(self.name) - len(huge)
        extra = huge + b"FB" + (gap - 4).to_bytes(2, "little") + b"Z" * (gap - 4)
        size = _HUGE if self.nbytes >= _HUGE else 0
        lengths = len(self.name), len(extra)
        head = _LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, 0, size, size, *lengths)
        return head + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        width = _tail_size(self.nbytes, self.header) // 2 - 4
        if width < 0:
            return b""
        return b"PK\7\10" + crc.to_bytes(4, "little") + 2 * self.nbytes.to_bytes(width, "little")

    def entry(self, crc: int) -> bytes:
        huge = _zip64_field(self.nbytes, self.header)
        size, place = min(self.nbytes, _HUGE), min(self.header, _HUGE)
        lengths = (len(self.name), len(huge), 0, 0, 0, 0)
        fields = (b"PK\1\2", 0, 0, self.flags, 0, 0, 0, crc, size, size, *lengths, place)
        return _CENTRAL.pack(*fields) + self.name + huge


@attrs.frozen(eq=False, slots=False)
class ArchiveLayout:
    """An archive to write: its records, and those of them whose data comes from elsewhere.

    ``known`` are the bytes before the data of each of these, and after the last, without
    descriptors.
    """

    records: Sequence[_Placed]
    storages: Sequence[_Placed]
    known: Sequence[bytes]

    @cached_property
    def directory_size(self) -> int:
        """How many bytes the directory has."""
        return sum(len(record.entry(0)) for record in self.records)

    @cached_property
    def size(self) -> int:
        """How many bytes the archive has."""
        ends = _END64.size + _LOCATOR.size + _END.size
        return self.records[-1].end + self.directory_size + ends

    def contents(self, blocks: Sequence[Sequence[Block]] = ()) -> list[Content | Seal]:
        """Return the parts of the archive, which may be written in any order."""
        parts: list[Content | Seal] = [literal(self.known[0])]
        for number, storage in enumerate(self.storages):
            size = _tail_size(storage.nbytes, storage.header) + len(self.known[number + 1])
            parts.append(Content(blocks[number], number))
            parts.append(Seal(size, [number], partial(self._after, number)))
        numbers = range(len(self.storages))
        return [*parts, Seal(self.size - self.records[-1].end, numbers, self.directory)]

    def _after(self, number: int, sums: Sequence[int]) -> bytes:
        """Return what comes after a storage's data, given its CRC-32."""
        return self.storages[number].descriptor(sums[0]) + self.known[number + 1]

    def directory(self, sums: Sequence[int]) -> bytes:
        """Return the end of the archive, given the CRC-32 of each storage."""
        rest = iter(sums)
        entries = b"".join(
            record.entry(next(rest) if record.data is None else zlib.crc32(record.data))
            for record in self.records
        )
        begin, size, count = self.records[-1].end, len(entries), len(self.records)
        long = _END64.pack(b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, begin)
        where = _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        few = min(count, 0xFFFF)
        short = _END.pack(b"PK\5\6", 0, 0, few, few, min(size, _HUGE), min(begin, _HUGE), 0)
        return entries + long + where + short

    @property
    def head(self) -> bytes:
        """What comes before the data of the only storage."""
        return self.known[0]

    @cached_property
    def tail_size(self) -> int:
        """How many bytes come after the data of the only storage."""
        return self.size - len(self.head) - self.storages[0].nbytes

    def tail(self, crc: int) -> bytes:
        """Return what comes after the data of the only storage, given its CRC-32."""
        return self._after(0, [crc]) + self.directory([crc])


def lay_out(pickle: bytes, storages: Sequence[int] = ()) -> ArchiveLayout:
    """Place the records of an archive as torch does: a pickle, and storages of so many bytes."""
    contents: dict[str, bytes | int] = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        **{f"data/{number}": nbytes for number, nbytes in enumerate(storages)},
        "version": b"3\n",
    }
    at, records, known = 0, [], [b""]
    for name, held in contents.items():
        nbytes, data = (held, None) if isinstance(held, int) else (len(held), held)
        record = _Placed(f"archive/{name}".encode(), nbytes, data, at)
        records.append(record)
        at = record.end
        known[-1] += record.head()
        if data is None:
            known.append(b"")
        else:
            known[-1] += data + record.descriptor(zlib.crc32(data))
    return ArchiveLayout(records, [record for record in records if record.data is None], known)


@lru_cache(maxsize=4096)
def frame_of(pickle: bytes, nbytes: int) -> ArchiveLayout:
    """Return the archive of one tensor; it is the same for all of one shape and dtype.

    >>> frame, data = frame_of(b"N.", 4), b"abcd"
    >>> whole = frame.head + data + frame.tail(zlib.crc32(data))
    >>> import io, zipfile
    >>> zipfile.ZipFile(io.BytesIO(whole)).testzip() is None, len(whole) == frame.size
    (True, True)
    """
    return lay_out(pickle, [nbytes])


def zip_bytes(pickle: bytes) -> bytes:
    """Return the archive of a value that holds no tensors, given its pickle."""
    layout = lay_out(pickle)
    return layout.known[0] + layout.directory(())
