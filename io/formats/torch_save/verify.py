"""Comparing archives with the CRC-32 of each record, which torch writes and never looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from shardplan.planning.storage import BLOCK_BYTES

from ...checksums import CRC32
from ...errors import FormatError
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import Store, StoreError
from ..base import Fault, Findings
from ..checks import SummedBytes, check_regions
from .archive import Archive, FileWindow, read_archive


@attrs.frozen(eq=False)
class Stored:
    """An archive: its bytes of a file, and the key that they hold, or the tensors by record."""

    file: str
    offset: int
    length: int
    key: str | None = None
    tensors: Mapping[str, Sequence[str]] = {}


def check_archives(
    store: Store,
    archives: Sequence[Stored],
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> Findings:
    """Compare every record of some archives with its checksum."""
    pool = pool or default_pool()
    archives = sorted(archives, key=lambda archive: (archive.file, archive.offset))
    opened = pool.map(lambda archive: _regions(store, archive), archives)
    unreadable = [found for found in opened if isinstance(found, Fault)]
    regions = [region for found in opened if not isinstance(found, Fault) for region in found]
    bare = [archive for archive, found in zip(archives, opened, strict=True) if not found]
    done = Progress(sum(sum(region.blocks) for region in regions), progress)
    checked = check_regions(store, regions, CRC32, done, pool)
    done.finish()
    note = f"{len(bare):,} of {len(archives):,} archives have no checksums"
    return Findings(
        (*unreadable, *checked.faults),
        chunks=checked.sound,
        nbytes=checked.nbytes,
        notes=(note,) if bare else (),
        unchecked=sum(archive.length for archive in bare),
    )


def _regions(store: Store, archive: Stored) -> list[SummedBytes] | Fault:
    """Return the records of an archive that have checksums, or what is wrong with it."""
    file, offset, end = archive.file, archive.offset, archive.offset + archive.length
    try:
        found = read_archive(FileWindow(store, file, offset, archive.length))
        found.check_packing()
        found.begin("data.pkl")  # without which nothing can be loaded
        begins = {name: found.begin(name) for name in found.records}
        if archive.key is not None:
            _check_descriptors(found)
    except FormatError as error:
        return Fault("header", file, error.reason, archive.key, offset, end)
    except StoreError as error:
        return Fault("unreadable", file, error.reason, archive.key, offset)
    if not found.is_summed:
        return []
    return [
        SummedBytes(
            file,
            offset + begins[name],
            [min(BLOCK_BYTES, record.nbytes - at) for at in range(0, record.nbytes, BLOCK_BYTES)],
            record.crc,
            archive.tensors.get(name) or (archive.key,),
            f"the bytes of its record {name}",
        )
        for name, record in sorted(found.records.items(), key=lambda pair: pair[1].header)
    ]


def _check_descriptors(archive: Archive) -> None:
    """Refuse an archive whose storages are described in another way than its directory does.

    A load of a DCP checkpoint takes its checksums from the descriptors, which follow the elements.
    """
    for name, record in archive.records.items():
        is_used = name.startswith("data/") and record.described and record.nbytes
        if is_used and archive.described_crc(name) != record.crc:
            raise archive.window.fault(f"the descriptor after its record {name} is damaged")
