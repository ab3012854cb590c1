"""The layout of `torch.save` archives that are written.

It is torch's own: records are aligned, their checksums follow them, the directory comes last. So
the size is known before the first byte is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

import attrs

from ...execute.copying import Block, Content, FileContents, Seal, literal
from .zip_read import (
    CENTRAL,
    DESCRIBED,
    END,
    END64,
    HUGE,
    LOCAL,
    LOCATOR,
    data_begin,
    zip64_field,
)

__all__ = [
    "Frame",
    "Member",
    "archive_contents",
    "archive_size",
    "directory_size",
    "frame_of",
    "members_of",
    "zip_bytes",
]

_UTF8: Final = 0x800


@attrs.frozen(eq=False)
class Member:
    """A record to write.

    Attributes:
        name: Its name.
        nbytes: Its size.
        data: Its bytes, if they are few and known.
    """

    name: str
    nbytes: int
    data: bytes | None = None

    @property
    def spelled(self) -> bytes:
        """Its name as the archive has it."""
        return f"archive/{self.name}".encode()


def members_of(pickle: bytes, storages: Sequence[Member] = ()) -> list[Member]:
    """Return the records of an archive, in the order in which torch writes them.

    Args:
        pickle: What `torch.load` unpickles.
        storages: The storages it refers to, named ``data/0`` and so on.
    """
    small = {"data.pkl": pickle, ".format_version": b"1", ".storage_alignment": b"64"}
    head = [_small(name, data) for name, data in (small | {"byteorder": b"little"}).items()]
    return [*head, *storages, _small("version", b"3\n")]


def _small(name: str, data: bytes) -> Member:
    return Member(name, len(data), data)


def archive_size(members: Sequence[Member]) -> int:
    """Return how many bytes an archive will have."""
    return sum(_sizes(members)) + END64.size + LOCATOR.size + END.size


def directory_size(members: Sequence[Member]) -> int:
    """Return how many bytes the directory of an archive will have."""
    return _sizes(members)[1]


def _sizes(members: Sequence[Member]) -> tuple[int, int]:
    """Return how many bytes an archive's records take, and how many its directory does."""
    at = directory = 0
    for member in members:
        name = member.spelled
        begin = data_begin(at, len(name), member.nbytes)
        directory += CENTRAL.size + len(name) + len(zip64_field(member.nbytes, at))
        at = begin + member.nbytes + _tail_size(member.nbytes, at)
    return at, directory


def _tail_size(nbytes: int, header: int) -> int:
    return (24 if max(nbytes, header) >= HUGE else 16) if nbytes else 0


def archive_contents(
    members: Sequence[Member], blocks: Sequence[Sequence[Block]] = ()
) -> list[Content | Seal]:
    """Return what an archive is made of, to be written in any order.

    Args:
        members: Its records.
        blocks: The bytes of each record whose bytes are not known yet.

    >>> [type(part).__name__ for part in archive_contents(members_of(b"N."))]
    ['Content', 'Seal']
    """
    contents: list[Content | Seal] = []
    known: list[int | None] = []  # the checksum of each record, as far as it is
    starts: list[int] = []
    at, number, before = 0, 0, b""  # bytes that are known, and not in `contents` yet
    open_: tuple[Member, int] | None = None  # the record whose checksum is to come
    for member in members:
        starts.append(at)
        head, begin = _head(member, at)
        crc = None if member.data is None else zlib.crc32(member.data)
        known.append(crc)
        tail = _tail_size(member.nbytes, at)
        if crc is not None and member.data is not None:
            before += head + member.data + _descriptor(member, crc, at)
        else:
            own = Content(blocks[number], number)
            contents += [_between(open_, before + head, number - 1), own]
            open_, before, number = (member, at), b"", number + 1
        at = begin + member.nbytes + tail
    contents.append(_between(open_, before, number - 1))
    size = archive_size(members) - at
    make = partial(_directory, members, starts, known, at)
    contents.append(Seal(size, range(number), make))
    return contents


@attrs.frozen(eq=False)
class Frame:
    """An archive of one storage, without the storage's bytes.

    Attributes:
        head: What comes before these.
        nbytes: How many they are.
        tail: How many bytes come after them.
        make_tail: Given their CRC-32, returns those.
    """

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
    members = members_of(pickle, [Member("data/0", nbytes)])
    contents = archive_contents(members, [[]])
    head, seals = contents[0], contents[2:]
    assert isinstance(head, Content)
    (view,) = head.blocks[0].parts
    assert isinstance(view, memoryview)
    size = archive_size(members)
    return Frame(
        bytes(view),
        nbytes,
        size - nbytes - len(view),
        lambda crc: b"".join(seal.make([crc]) for seal in seals if isinstance(seal, Seal)),
    )


def _between(last: tuple[Member, int] | None, data: bytes, number: int) -> Content | Seal:
    """Return what comes after a record: what tells its checksum, and bytes that are known."""
    if last is None:
        return literal(data)
    member, at = last
    size = _tail_size(member.nbytes, at) + len(data)
    return Seal(size, [number], lambda sums: _descriptor(member, sums[0], at) + data)


def _directory(
    members: Sequence[Member],
    starts: Sequence[int],
    known: Sequence[int | None],
    at: int,
    sums: Sequence[int],
) -> bytes:
    rest = iter(sums)
    found = [next(rest) if crc is None else crc for crc in known]
    entries = b"".join(map(_entry, members, found, starts))
    return entries + _end(at, len(entries), len(members))


def _head(member: Member, at: int) -> tuple[bytes, int]:
    """Return what comes before the data of a record, and where the data begins."""
    name, nbytes = member.spelled, member.nbytes
    begin = data_begin(at, len(name), nbytes)
    huge = zip64_field(nbytes, at)
    gap = begin - at - LOCAL.size - len(name) - len(huge)
    extra = huge + b"FB" + (gap - 4).to_bytes(2, "little") + b"Z" * (gap - 4)
    size = HUGE if nbytes >= HUGE else 0
    lengths = len(name), len(extra)
    head = LOCAL.pack(b"PK\3\4", 0, _flags(member), 0, 0, 0, 0, size, size, *lengths)
    return head + name + extra, begin


def _flags(member: Member) -> int:
    return _UTF8 | (DESCRIBED if member.nbytes else 0)


def _descriptor(member: Member, crc: int, at: int) -> bytes:
    """Return what comes after the data of a record."""
    tail = _tail_size(member.nbytes, at)
    if not tail:
        return b""
    return (
        b"PK\7\10" + crc.to_bytes(4, "little") + 2 * member.nbytes.to_bytes(tail // 2 - 4, "little")
    )


def _entry(member: Member, crc: int, header: int) -> bytes:
    name, huge = member.spelled, zip64_field(member.nbytes, header)
    size, place = min(member.nbytes, HUGE), min(header, HUGE)
    lengths = (len(name), len(huge), 0, 0, 0, 0)
    fields = (b"PK\1\2", 0, 0, _flags(member), 0, 0, 0, crc, size, size, *lengths, place)
    return CENTRAL.pack(*fields) + name + huge


def _end(begin: int, size: int, count: int) -> bytes:
    long = END64.pack(b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, begin)
    where = LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
    few = min(count, 0xFFFF)
    short = END.pack(b"PK\5\6", 0, 0, few, few, min(size, HUGE), min(begin, HUGE), 0)
    return long + where + short


def zip_bytes(pickle: bytes) -> bytes:
    """Return the archive of a value that holds no tensors, given its pickle.

    >>> import io, zipfile
    >>> zipfile.ZipFile(io.BytesIO(zip_bytes(b"N."))).testzip() is None
    True
    >>> len(zip_bytes(b"N.")) == archive_size(members_of(b"N."))
    True
    """
    return b"".join(FileContents(lambda _: archive_contents(members_of(pickle))).parts())
