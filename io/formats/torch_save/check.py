"""Checking archives of `torch.save`, which DCP is made of, by the CRC-32 of each record.

Torch writes these checksums and never looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import attrs

from ...checksums import CRC32
from ...errors import FormatError
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ..base import Fault, Findings, read_bytes
from .zip_read import Record, Window, read_archive

_SPAN: Final = 64 << 20  # bytes of a record that one thread sums
_STEP: Final = 4 << 20


@attrs.frozen
class Stored:
    """An archive: its bytes of a file, and what they hold.

    Attributes:
        offset, length: Its bytes there.
        key: The tensor or value that it holds; None if it holds a whole state dict.
        keys_in: Names what one of its records holds, if it holds a whole state dict.
    """

    file: str
    offset: int
    length: int
    key: str | None = None
    keys_in: Callable[[str], Sequence[str]] | None = None

    def keys(self, record: str) -> Sequence[str | None]:
        """Name what is lost with a record."""
        found = () if self.keys_in is None else self.keys_in(record)
        return found or (self.key,)


@attrs.frozen
class _Summed:
    """A record that has a checksum, and where its bytes begin in the file of its archive."""

    archive: Stored
    name: str
    begin: int
    record: Record


def check_archives(
    store: Store,
    archives: Sequence[Stored],
    tell: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> Findings:
    """Compare every record of some archives with its checksum."""
    pool = pool or default_pool()
    opened = list(zip(archives, pool.map(lambda a: _records(store, a), archives), strict=True))
    faults = [found for _, found in opened if isinstance(found, Fault)]
    bare = [archive for archive, found in opened if not found]
    summed = [one for _, found in opened if not isinstance(found, Fault) for one in found]
    nbytes = sum(one.record.nbytes for one in summed)
    progress = Progress(nbytes, tell)
    damaged = [list(some) for some in _check(store, summed, progress, pool)]
    progress.finish()
    note = f"{len(bare):,} of {len(archives):,} archives have no checksums"
    return Findings(
        (*faults, *(fault for some in damaged for fault in some)),
        chunks=sum(not some for some in damaged),
        nbytes=nbytes,
        notes=(note,) if bare else (),
        unchecked=sum(archive.length for archive in bare),
    )


def _records(store: Store, archive: Stored) -> list[_Summed] | Fault:
    """Return the records of an archive that have checksums, or what is wrong with it."""
    file, offset, end = archive.file, archive.offset, archive.offset + archive.length
    try:
        found = read_archive(Window(store, file, offset, archive.length))
        summed = [
            _Summed(archive, name, offset + found.begin(name), record)
            for name, record in found.records.items()
        ]
    except FormatError as error:
        if archive.key is not None and _is_safetensors(store, archive):
            return []
        return Fault("header", file, error.reason, archive.key, offset, end)
    except StoreError as error:
        return Fault("unreadable", file, error.reason, archive.key, offset)
    # Torch writes zeros if it computes no checksums.
    return summed if any(one.record.crc for one in summed if one.record.nbytes) else []


def _is_safetensors(store: Store, archive: Stored) -> bool:
    """Return whether DCP's tensors lie there as safetensors, which begin with a length and JSON."""
    head = read_bytes(store, archive.file, archive.offset, min(9, archive.length))
    return len(head) == 9 and head[8:] == b"{"


@attrs.frozen
class _Span:
    """Bytes of a record, from one offset of the file to another; its number among all records."""

    record: int
    file: str
    low: int
    high: int


def _check(
    store: Store, summed: Sequence[_Summed], progress: Progress, pool: Pool
) -> Iterator[Iterable[Fault]]:
    """Yield what is wrong with each record."""
    spans = [
        _Span(number, one.archive.file, low, min(low + _SPAN, one.begin + one.record.nbytes))
        for number, one in enumerate(summed)
        for low in range(one.begin, one.begin + one.record.nbytes, _SPAN)
    ]

    def digest(span: _Span) -> int | StoreError:
        try:
            return CRC32.of(_pieces(store, span))
        except StoreError as error:
            return error
        finally:
            progress.add(span.high - span.low)

    digests: list[list[int]] = [[] for _ in summed]
    failed: dict[int, StoreError] = {}
    found = pool.map(digest, spans, nbytes=_STEP + store.staging)
    for span, result in zip(spans, found, strict=True):
        if isinstance(result, StoreError):
            failed[span.record] = result
        else:
            digests[span.record].append(result)
    for number, one in enumerate(summed):
        yield _faults(one, CRC32.combine(digests[number]), failed.get(number))


def _pieces(store: Store, span: _Span) -> Iterator[memoryview]:
    """Yield some bytes of a file piece by piece; each is overwritten by the next."""
    buffer = memoryview(bytearray(min(_STEP, span.high - span.low)))
    for at in range(span.low, span.high, _STEP):
        view = buffer[: min(_STEP, span.high - at)]
        store.read(span.file, [(at, view)])
        yield view


def _faults(one: _Summed, crc: int, failed: StoreError | None) -> Iterator[Fault]:
    """Yield a fault for each name in a record, if it is damaged."""
    if failed is None and crc == one.record.crc:
        return
    end = one.begin + one.record.nbytes
    reason = f"the CRC-32 of {one.name} is {crc:08x}, and {one.record.crc:08x} was written down"
    for key in one.archive.keys(one.name):
        if failed is not None:
            yield Fault("unreadable", one.archive.file, failed.reason, key, one.begin, end)
        else:
            yield Fault("checksum", one.archive.file, reason, key, one.begin, end)


def file_size(store: Store, file: str) -> int | Fault:
    """Return the size of a file, or what is wrong with it."""
    try:
        return store.size(file)
    except MissingFileError:
        return Fault("missing", file, "it is missing")
    except StoreError as error:
        return Fault("unreadable", file, error.reason)
