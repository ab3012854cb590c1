"""How is a `torch.save` archive written? As a stream of parts, tensor memory among them, uncopied.

The layout is torch's own: records are aligned, their checksums follow them, the directory comes
last. So the size is known before the first byte is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import attrs

from .torchzip import (
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

__all__ = ["Member", "archive_parts", "archive_size", "members_of", "zip_bytes"]

_UTF8: Final = 0x800
_PIECE: Final = 1 << 20  # bytes that are summed and then written, while they are in the cache


@attrs.frozen(eq=False)
class Member:
    """A record to write.

    Attributes:
        name: Its name.
        nbytes: Its size.
        blocks: What gives its bytes, in order.
    """

    name: str
    nbytes: int
    blocks: Callable[[], Iterable[memoryview]]

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
    return Member(name, len(data), lambda: [memoryview(data)])


def archive_size(members: Sequence[Member]) -> int:
    """Return how many bytes an archive will have."""
    at = directory = 0
    for member in members:
        name = member.spelled
        begin = data_begin(at, len(name), member.nbytes)
        directory += CENTRAL.size + len(name) + len(zip64_field(member.nbytes, at))
        at = begin + member.nbytes + _tail_size(member.nbytes, at)
    return at + directory + END64.size + LOCATOR.size + END.size


def _tail_size(nbytes: int, header: int) -> int:
    return (24 if max(nbytes, header) >= HUGE else 16) if nbytes else 0


def archive_parts(members: Sequence[Member]) -> Iterator[memoryview]:
    """Yield the bytes of an archive, in order.

    Raises:
        ValueError: A record has other bytes than it said.

    >>> import io, zipfile
    >>> parts = list(archive_parts(members_of(b"N.")))
    >>> sum(map(len, parts)) == archive_size(members_of(b"N."))
    True
    >>> zipfile.ZipFile(io.BytesIO(b"".join(parts))).testzip() is None
    True
    """
    at = 0
    ahead = b""  # the descriptor of the record before goes out with the next header
    directory = []
    for member in members:
        name, nbytes = member.spelled, member.nbytes
        begin = data_begin(at, len(name), nbytes)
        flags = _UTF8 | (DESCRIBED if nbytes else 0)
        huge = zip64_field(nbytes, at)
        gap = begin - at - LOCAL.size - len(name) - len(huge)
        extra = huge + b"FB" + (gap - 4).to_bytes(2, "little") + b"Z" * (gap - 4)
        size = HUGE if nbytes >= HUGE else 0
        head = LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, size, size, len(name), len(extra))
        yield memoryview(ahead + head + name + extra)
        crc = done = 0
        for block in member.blocks():
            for start in range(0, len(block), _PIECE):
                piece = block[start : start + _PIECE]
                crc = zlib.crc32(piece, crc)
                yield piece
            done += len(block)
        if done != nbytes:
            raise ValueError(f"{member.name} was to have {nbytes} bytes and has {done}")
        directory.append(_entry(name, flags, crc, nbytes, at, huge))
        tail = _tail_size(nbytes, at)
        width = (tail - 8) // 2
        sizes = 2 * nbytes.to_bytes(width, "little") if tail else b""
        ahead = b"PK\7\10" + crc.to_bytes(4, "little") + sizes if tail else b""
        at = begin + nbytes + tail
    yield memoryview(ahead + b"".join(directory) + _end(at, len(b"".join(directory)), len(members)))


def _entry(name: bytes, flags: int, crc: int, nbytes: int, header: int, huge: bytes) -> bytes:
    size, place = min(nbytes, HUGE), min(header, HUGE)
    lengths = (len(name), len(huge), 0, 0, 0, 0)
    fields = (b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, size, size, *lengths, place)
    return CENTRAL.pack(*fields) + name + huge


def _end(begin: int, size: int, count: int) -> bytes:
    long = END64.pack(b"PK\6\6", 44, 798, 45, 0, 0, count, count, size, begin)
    where = LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
    few = min(count, 0xFFFF)
    short = END.pack(b"PK\5\6", 0, 0, few, few, min(size, HUGE), min(begin, HUGE), 0)
    return long + where + short


def zip_bytes(pickle: bytes) -> bytes:
    """Return the archive of a value that holds no tensors, given its pickle."""
    return b"".join(archive_parts(members_of(pickle)))
