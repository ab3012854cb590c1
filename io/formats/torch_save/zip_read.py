"""Reading a `torch.save` archive in place: which records it has, and where their bytes lie.

An archive may lie anywhere in a file. The standard library reads its directory, which is at its
end. Records are stored uncompressed, so the bytes of a tensor can be read in place. Nothing here
needs torch. `zip_write` makes such archives.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from operator import attrgetter
from typing import IO, Any, Final, cast

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
    "read_ranges",
]

ALIGNMENT: Final = 64
"""Records begin at multiples of this, counted from the archive's first byte, as torch does it."""

LOCAL: Final = struct.Struct("<4s5H3I2H")
END: Final = struct.Struct("<4s4H2IH")
HUGE: Final = 0xFFFFFFFF  # stands for a number that is in a zip64 field
MANY: Final = 0xFFFF  # stands for this many entries, or more
DESCRIPTOR: Final = 24
"""The most bytes of sizes and checksum that follow the data of a record."""

_DESCRIBED: Final = 8  # flag: sizes and checksum follow the data
_ENCRYPTED: Final = 1
_DAMAGE: Final = (
    *(zipfile.BadZipFile, NotImplementedError, ArithmeticError, LookupError, ValueError),
    *(EOFError, struct.error),
)
_TAIL: Final = 1024  # bytes that are read at once from the end


class Window:
    """Some bytes of a file, read as they are asked for.

    Args:
        store: Where the file is.
        file: Its name.
        offset: Where the window begins.
        length: How many bytes it has.
        head: Its first bytes, if they are known.
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

    def open(self) -> IO[bytes]:
        """Return the window as a file to read, having read its last bytes."""
        if len(self._head) == self.length:
            return io.BytesIO(self._head)
        nbytes = min(_TAIL, self.length)
        self._tail = self.read(self.length - nbytes, nbytes)
        return cast("IO[bytes]", _WindowFile(self))

    def fault(self, reason: str) -> FormatError:
        """Return the error for an archive that is not as it should be."""
        return FormatError(self.file, f"the archive at byte {self.offset:,} is damaged: {reason}")


class _WindowFile:
    """The methods of a file that `zipfile` calls."""

    def __init__(self, window: Window) -> None:
        self._window, self._at = window, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._window.length if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        rest = max(self._window.length - self._at, 0)
        nbytes = rest if nbytes < 0 else min(nbytes, rest)
        if nbytes > LIMITS["directory"]:
            raise zipfile.BadZipFile(f"its directory has {nbytes:,} bytes")
        self._at += nbytes
        return self._window.read(self._at - nbytes, nbytes)


def read_ranges(store: Store, file: str, ranges: list[tuple[int, memoryview]]) -> None:
    """Read ranges of a file of a checkpoint.

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
        name: Its name, with its folder.
        header: Where its local header begins, from the archive's first byte.
        nbytes: Its size.
        described: Whether a descriptor follows its data.
        end: Where the next record, or the directory, begins.
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

    Args:
        header: Where its local header begins.
        name: How many bytes its name has.
        nbytes: How many bytes its data has.

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
    r"""Return the CRC-32 of a record's data from the descriptor after it; None if there is none.

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


@attrs.frozen
class Archive:
    """A `torch.save` archive.

    Attributes:
        window: Where it lies.
        records: Its records, by name, without the folder that torch puts them all in.
        packed: How many more records are compressed, which `torch.save` never does.
    """

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
        """Return a small record whole.

        Raises:
            FormatError: There is none, it has more than ``limit`` bytes, or its checksum differs.
        """
        record = self._record(name)
        if record.nbytes > limit:
            reason = f"its record {name} has {record.nbytes:,} bytes; {limit:,} at most"
            raise self.window.fault(reason)
        data = self.window.read(self.begin(name), record.nbytes)
        if record.crc and sum_crc(data) != record.crc:
            raise self.window.fault(f"its record {name} does not fit its checksum")
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
                reason = f"storage {key[:80]} should have {size:,} bytes, and has {held}"
                raise self.window.fault(reason)

    def begin(self, name: str) -> int:
        """Return where the data of a record begins, from the archive's first byte.

        Raises:
            FormatError: There is no such record, or it is not all there.
        """
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
    directory = _directory(window)
    entries = sorted(directory.filelist, key=attrgetter("header_offset"))
    ends = [entry.header_offset for entry in entries[1:]] + [directory.start_dir]
    records: dict[str, Record] = {}
    packed = 0
    for entry, end in zip(entries, ends, strict=True):
        name, nbytes, header = entry.filename, entry.file_size, entry.header_offset
        if entry.compress_type or entry.flag_bits & _ENCRYPTED or entry.compress_size != nbytes:
            packed += 1  # TorchScript does that
            continue
        inner = name.partition("/")[2]
        if not inner and not nbytes:
            continue  # a folder, which other programs list
        inside = 0 <= header <= end - LOCAL.size - len(name) - nbytes
        if not inner or inner in records or not inside:
            raise window.fault(f"its directory lists {name}, which cannot be")
        described = bool(entry.flag_bits & _DESCRIBED)
        records[inner] = Record(name, header, nbytes, described, end, entry.CRC)
    return Archive(window, records, packed)


def _directory(window: Window) -> Any:
    try:
        with zipfile.ZipFile(window.open()) as directory:
            found: Any = directory  # whose stub lacks `start_dir`
    except FormatError:
        raise
    except _DAMAGE as error:
        raise window.fault(f"{error}; it was cut short, or is not an archive") from None
    signature, *_, count, _, _, _ = END.unpack(window.read(window.length - END.size, END.size))
    if not found.filelist or (
        signature == b"PK\5\6" and count != min(len(found.filelist), MANY)  # without a comment
    ):
        raise window.fault(f"its directory has {len(found.filelist):,} entries, not {count:,}")
    return found
