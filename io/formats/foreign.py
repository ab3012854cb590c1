"""Is a checkpoint of another tool sound? What it says of itself is compared with its bytes.

Archives of `torch.save`, of which DCP checkpoints are made, carry a CRC-32 for each record, which
torch never looks at. Safetensors files have none: of those, only headers and sizes can be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ..checksums import combine_crc, sum_crc
from ..errors import FormatError
from ..pool import Pool, default_pool
from ..progress import Progress, Tell
from ..stores.base import MissingFileError, Store, StoreError
from .dcp.source import DcpSource
from .headers import Header
from .hf.index import choose_files, missing_parts, read_header
from .hf.source import HfSource
from .native.scan import Fault
from .sources import Source
from .torch_save.zip_read import Archive, Record, Window, read_archive

if TYPE_CHECKING:
    from .torch_save.source import TorchSource

__all__ = ["Foreign", "check_foreign", "check_headers", "lost_parts"]

_SPAN: Final = 64 << 20  # bytes of a record that one thread sums
_STEP: Final = 4 << 20
_HELD_BY_HF: Final = (
    "safetensors files have no checksums: headers and sizes were checked, elements were not"
)
_OLD_TORCH: Final = "files of old torch versions have no checksums"


@attrs.frozen
class Foreign:
    """What a check found.

    Attributes:
        faults: All that is wrong.
        files: How many files there are.
        chunks: How many records were found to fit their checksums.
        nbytes: How many bytes were read for that.
        notes: What could not be checked, and why.
        unchecked: How many bytes there are that have no checksums.
        lost: Names that cannot be loaded whole, beside those of the faults.
    """

    faults: tuple[Fault, ...]
    files: int
    chunks: int = 0
    nbytes: int = 0
    notes: tuple[str, ...] = ()
    unchecked: int = 0
    lost: frozenset[str] = frozenset()


@attrs.frozen
class _Item:
    """An archive: its bytes of a file, and whose they are.

    Attributes:
        file: The file.
        offset, length: Its bytes there.
        key: What it holds; None if it holds all.
        keys_in: Says what one of its records holds, if it holds all.
    """

    file: str
    offset: int
    length: int
    key: str | None
    keys_in: Callable[[str], Sequence[str]] | None = None

    def keys(self, record: str) -> Sequence[str | None]:
        """Name what is lost with a record."""
        found = () if self.keys_in is None else self.keys_in(record)
        return found or (self.key,)


@attrs.frozen
class _Sum:
    """A record to check: where its bytes begin in the file, and whose they are."""

    item: _Item
    name: str
    begin: int
    record: Record


def check_foreign(source: Source, tell: Tell | None = None, pool: Pool | None = None) -> Foreign:
    """Check all that can be checked of a checkpoint that is not our own.

    Args:
        source: The checkpoint, opened.
        tell: Called with the bytes done and the bytes in all.
        pool: The threads and the memory budget to use.
    """
    pool = pool or default_pool()
    bare = _without_sums(source)
    if bare is not None:
        Progress(0, tell)
        return bare
    store, items, faults = _archives(source)
    sums, unsummed = list[_Sum](), list[_Item]()
    records = pool.map(lambda item: _records(store, item), items)
    for item, found in zip(items, records, strict=True):
        if isinstance(found, Fault):
            faults.append(found)
            continue
        sums += found
        unsummed += [] if found else [item]
    progress = Progress(sum(one.record.nbytes for one in sums), tell)
    checked = _check(store, sums, progress, pool)
    progress.finish()
    faults += [fault for some in checked for fault in some]
    order = {file: number for number, file in enumerate(source.files)}
    note = f"{len(unsummed):,} of {len(items):,} archives have no checksums"
    return Foreign(
        tuple(sorted(faults, key=lambda f: (order.get(f.file, -1), f.begin))),
        len(source.files),
        sum(not some for some in checked),
        sum(one.record.nbytes for one in sums),
        (note,) if unsummed else (),
        sum(item.length for item in unsummed),
    )


def _without_sums(source: Source) -> Foreign | None:
    """Say all that can be said of a checkpoint without checksums; None if it has some."""
    files = len(source.files)
    if isinstance(source, HfSource):
        read, rest = source.header_bytes, source.data_bytes
        return Foreign((), files, 0, read, (_HELD_BY_HF,), rest)
    if isinstance(source, DcpSource):
        return None
    old: TorchSource = source  # type: ignore[assignment]
    if old.archive is not None:
        return None
    return Foreign((), files, notes=(_OLD_TORCH,), unchecked=old.inner.size(old.file))


def _archives(source: Source) -> tuple[Store, list[_Item], list[Fault]]:
    """Return the archives of a checkpoint, where they lie, and those that are not all there."""
    if isinstance(source, DcpSource):
        return source.inner, *_dcp_items(source)
    single: TorchSource = source  # type: ignore[assignment]
    size = single.inner.size(single.file)
    return single.inner, [_Item(single.file, 0, size, None, single.keys_in)], []


def check_headers(store: Store, name: str, error: FormatError, pool: Pool | None = None) -> Foreign:
    """Look for all that is wrong with safetensors files that could not be opened.

    Args:
        store: Where they lie.
        name: A single file, or an index; empty for whatever is in the folder.
        error: Why they could not be opened: told if each file by itself is as it should be.
        pool: The threads to use.
    """
    try:
        weights, files, index = choose_files(store, name)
    except FormatError as damage:
        return Foreign((Fault("header", damage.file, damage.reason),), 0)
    lacking = () if index or name else missing_parts(files)
    faults = [Fault("missing", file, reason) for file, reason in lacking]
    found = (pool or default_pool()).map(lambda file: _header(store, file, index), files)
    faults += [one for one in found if isinstance(one, Fault)]
    bad = {fault.file for fault in faults}
    return Foreign(
        tuple(faults) or (Fault("header", error.file, error.reason),),
        len(files),
        0,
        sum(one.length for one in found if isinstance(one, Header)),
        lost=frozenset(key for key, file in weights.items() if file in bad),
    )


def _header(store: Store, file: str, index: str | None) -> Header | Fault:
    size = _size(store, file)
    if isinstance(size, Fault):
        return attrs.evolve(size, reason=f"{size.reason}, and {index} names it") if index else size
    try:
        return read_header(store, file, index)
    except FormatError as error:
        return Fault("header", file, error.reason)
    except StoreError as error:
        return Fault("unreadable", file, error.reason)


def lost_parts(source: Source) -> Sequence[Fault]:
    """Name what is missing of a DCP checkpoint, or was cut short; no file is read."""
    return _dcp_items(source)[1] if isinstance(source, DcpSource) else ()


def _dcp_items(source: DcpSource) -> tuple[list[_Item], list[Fault]]:
    """Return the archives that `.metadata` speaks of, and those that are not all there."""
    described, sizes = source.described, dict[int, int | Fault]()
    items, faults = [], []
    copies = [(key, place) for key, found in described.copies.items() for place in found]
    for (name, _), place in [*described.places.items(), *copies]:
        file = described.files[place.file]
        if place.file not in sizes:
            sizes[place.file] = _size(source.inner, file)
        size, end = sizes[place.file], place.offset + place.length
        if isinstance(size, Fault):
            faults.append(attrs.evolve(size, key=name))
        elif end > size:
            reason = f"it has {size:,} bytes, and `{name}` ends at byte {end:,}: it was cut short"
            faults.append(Fault("size", file, reason, name, place.offset, end))
        elif not place.transforms:
            items.append(_Item(file, place.offset, place.length, name))
    return items, faults


def _size(store: Store, file: str) -> int | Fault:
    try:
        return store.size(file)
    except MissingFileError:
        return Fault("missing", file, "it is missing")
    except StoreError as error:
        return Fault("unreadable", file, error.reason)


def _records(store: Store, item: _Item) -> list[_Sum] | Fault:
    """Return the records of an archive that have checksums, or what is wrong with it."""
    try:
        archive = read_archive(Window(store, item.file, item.offset, item.length))
        found = list(_sums(archive, item))
    except FormatError as error:
        if item.key is not None and _is_safetensors(store, item):
            return []
        end = item.offset + item.length
        return Fault("header", item.file, error.reason, item.key, item.offset, end)
    except StoreError as error:
        return Fault("unreadable", item.file, error.reason, item.key, item.offset)
    # Torch writes zeros where it was told to compute no checksums.
    return found if any(one.record.crc for one in found if one.record.nbytes) else []


def _sums(archive: Archive, item: _Item) -> Iterator[_Sum]:
    for name, record in archive.records.items():
        yield _Sum(item, name, item.offset + archive.begin(name), record)


def _is_safetensors(store: Store, item: _Item) -> bool:
    """Tell whether DCP's tensors lie there as safetensors, which begin with a length and JSON."""
    head = bytearray(min(9, item.length))
    store.read(item.file, [(item.offset, memoryview(head))])
    return len(head) == 9 and head[8:] == b"{"


def _check(
    store: Store, sums: Sequence[_Sum], progress: Progress, pool: Pool
) -> Sequence[Sequence[Fault]]:
    """Return what is wrong with each record."""
    spans = [
        (number, low, min(low + _SPAN, one.record.nbytes))
        for number, one in enumerate(sums)
        for low in range(0, one.record.nbytes, _SPAN)
    ]

    def add_up(span: tuple[int, int, int]) -> int | StoreError:
        number, low, high = span
        one, crc = sums[number], 0
        buffer = memoryview(bytearray(min(_STEP, high - low)))
        try:
            for at in range(low, high, _STEP):
                view = buffer[: min(_STEP, high - at)]
                store.read(one.item.file, [(one.begin + at, view)])
                crc = sum_crc(view, crc)
        except StoreError as error:
            return error
        finally:
            progress.add(high - low)
        return crc

    found = [0] * len(sums)
    failed: dict[int, StoreError] = {}
    parts = pool.map(add_up, spans, nbytes=_STEP + store.staging)
    for (number, low, high), crc in zip(spans, parts, strict=True):
        if isinstance(crc, StoreError):
            failed[number] = crc
        else:
            found[number] = combine_crc(found[number], crc, high - low) if low else crc
    return [list(_faults(one, found[n], failed.get(n))) for n, one in enumerate(sums)]


def _faults(one: _Sum, crc: int, failed: StoreError | None) -> Iterator[Fault]:
    """Tell of each name in a record that it is damaged, if it is."""
    if failed is None and crc == one.record.crc:
        return
    place = one.begin, one.begin + one.record.nbytes
    reason = f"the CRC-32 of {one.name} is {crc:08x}, and {one.record.crc:08x} was written down"
    for key in one.item.keys(one.name):
        if failed is not None:
            yield Fault("unreadable", one.item.file, failed.reason, key, *place)
        else:
            yield Fault("checksum", one.item.file, reason, key, *place)
