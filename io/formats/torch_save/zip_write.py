"""Writing `torch.save` archives in torch's own layout.

Records are aligned, their checksums follow them, the directory comes last. So every position is
known before the first byte is written, and parts can be written in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import attrs

from ...execute.copying import Block, Content, Seal, literal
from .zip_read import (
    CENTRAL,
    DESCRIBED,
    END,
    END64,
    HUGE,
    LOCAL,
    LOCATOR,
    data_begin,
    tail_size,
    zip64_field,
)

_UTF8: Final = 0x800


@attrs.frozen(eq=False)
class _Placed:
    """A record to write; its data is None unless it is short and known."""

    name: bytes
    nbytes: int
    data: bytes | None
    header: int

    @property
    def begin(self) -> int:
        """Where its data begins."""
        return data_begin(self.header, len(self.name), self.nbytes)

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.begin + self.nbytes + tail_size(self.nbytes, self.header)

    @property
    def flags(self) -> int:
        """The flags of its headers."""
        return _UTF8 | (DESCRIBED if self.nbytes else 0)

    @property
    def entry_size(self) -> int:
        """How many bytes its entry in the directory has."""
        return CENTRAL.size + len(self.name) + len(zip64_field(self.nbytes, self.header))

    def head(self) -> bytes:
        """Return what comes before its data: its header, and padding as torch makes it."""
        huge = zip64_field(self.nbytes, self.header)
        gap = self.begin - self.header - LOCAL.size - len(self.name) - len(huge)
        extra = huge + b"FB" + (gap - 4).to_bytes(2, "little") + b"Z" * (gap - 4)
        size = HUGE if self.nbytes >= HUGE else 0
        lengths = len(self.name), len(extra)
        head = LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, 0, size, size, *lengths)
        return head + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        """Return what comes after its data."""
        width = tail_size(self.nbytes, self.header) // 2 - 4
        if width < 0:
            return b""
        return b"PK\7\10" + crc.to_bytes(4, "little") + 2 * self.nbytes.to_bytes(width, "little")

    def entry(self, crc: int) -> bytes:
        """Return its entry in the directory."""
        huge = zip64_field(self.nbytes, self.header)
        size, place = min(self.nbytes, HUGE), min(self.header, HUGE)
        lengths = (len(self.name), len(huge), 0, 0, 0, 0)
        fields = (b"PK\1\2", 0, 0, self.flags, 0, 0, 0, crc, size, size, *lengths, place)
        return CENTRAL.pack(*fields) + self.name + huge


@attrs.frozen(eq=False)
class ArchiveLayout:
    """An archive to write: its records in order, each at its position."""

    records: Sequence[_Placed]

    @property
    def end(self) -> int:
        """Where the directory begins."""
        return self.records[-1].end

    @property
    def directory_size(self) -> int:
        """How many bytes the directory has."""
        return sum(record.entry_size for record in self.records)

    @property
    def size(self) -> int:
        """How many bytes the archive has."""
        return self.end + self.directory_size + END64.size + LOCATOR.size + END.size

    def contents(self, blocks: Sequence[Sequence[Block]] = ()) -> list[Content | Seal]:
        """Return the parts of the archive, which may be written in any order."""
        parts: list[Content | Seal] = []
        number, known = 0, b""  # the next unknown record; known bytes that are not in `parts`
        last: _Placed | None = None  # the last unknown record
        for record in self.records:
            known += record.head()
            if record.data is not None:
                known += record.data + record.descriptor(zlib.crc32(record.data))
                continue
            parts += [_after(last, number - 1, known), Content(blocks[number], number)]
            last, known, number = record, b"", number + 1
        parts.append(_after(last, number - 1, known))
        return [*parts, Seal(self.size - self.end, range(number), self.directory)]

    def directory(self, sums: Sequence[int]) -> bytes:
        """Return the end of the archive, given the CRC-32 of each record with unknown bytes."""
        rest = iter(sums)
        entries = b"".join(
            record.entry(next(rest) if record.data is None else zlib.crc32(record.data))
            for record in self.records
        )
        begin, size, count = self.end, len(entries), len(self.records)
        long = END64.pack(b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, begin)
        where = LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        few = min(count, 0xFFFF)
        short = END.pack(b"PK\5\6", 0, 0, few, few, min(size, HUGE), min(begin, HUGE), 0)
        return entries + long + where + short


def lay_out(pickle: bytes, storages: Sequence[int] = ()) -> ArchiveLayout:
    """Place the records of an archive in the order in which torch writes them.

    Args:
        pickle: The pickle that `torch.load` reads.
        storages: How many bytes each storage has that it refers to; they are named ``data/0`` etc.
    """
    records: dict[str, bytes | int] = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": b"little",
        **{f"data/{number}": nbytes for number, nbytes in enumerate(storages)},
        "version": b"3\n",
    }
    at, placed = 0, []
    for name, held in records.items():
        nbytes, data = (held, None) if isinstance(held, int) else (len(held), held)
        placed.append(_Placed(f"archive/{name}".encode(), nbytes, data, at))
        at = placed[-1].end
    return ArchiveLayout(placed)


def _after(record: _Placed | None, number: int, known: bytes) -> Content | Seal:
    """Return the bytes after a record: its descriptor, and bytes that are known."""
    if record is None:
        return literal(known)
    size = tail_size(record.nbytes, record.header) + len(known)
    return Seal(size, [number], lambda sums: record.descriptor(sums[0]) + known)


@attrs.frozen(eq=False)
class Frame:
    """An archive of one storage, without the storage's bytes; `tail` is how many follow these."""

    head: bytes
    nbytes: int
    tail: int
    make_tail: Callable[[int], bytes]

    @property
    def size(self) -> int:
        """How many bytes the archive has."""
        return len(self.head) + self.nbytes + self.tail


@lru_cache(maxsize=4096)
def frame_of(pickle: bytes, nbytes: int) -> Frame:
    """Return the archive of one tensor; it is the same for all of one shape and dtype.

    >>> frame, data = frame_of(b"N.", 4), b"abcd"
    >>> whole = frame.head + data + frame.make_tail(zlib.crc32(data))
    >>> import io, zipfile
    >>> zipfile.ZipFile(io.BytesIO(whole)).testzip() is None, len(whole) == frame.size
    (True, True)
    """
    layout = lay_out(pickle, [nbytes])
    *before, storage, version = layout.records
    head = _known_bytes(before) + storage.head()
    tail = layout.size - len(head) - nbytes
    known = _known_bytes([version])

    def make_tail(crc: int) -> bytes:
        return storage.descriptor(crc) + known + layout.directory([crc])

    return Frame(head, nbytes, tail, make_tail)


def _known_bytes(records: Sequence[_Placed]) -> bytes:
    """Return records whose bytes are known, with their headers and descriptors."""
    return b"".join(
        part
        for record in records
        if record.data is not None
        for part in (record.head(), record.data, record.descriptor(zlib.crc32(record.data)))
    )


def zip_bytes(pickle: bytes) -> bytes:
    """Return the archive of a value that holds no tensors, given its pickle."""
    layout = lay_out(pickle)
    return _known_bytes(layout.records) + layout.directory(())
