"""Check every byte of a checkpoint, and tell all that is wrong with it."""

from __future__ import annotations

import os
import time
from typing import Final

import attrs

from shardplan.io import FormatError, Pool, Progress, Tell, listed
from shardplan.io.execute import find_manifest, leftovers
from shardplan.io.formats import Foreign, check_foreign, check_headers, detect, locate, open_source
from shardplan.io.formats.native import (
    MANIFEST,
    Fault,
    Findings,
    Manifest,
    check_files,
    check_manifest,
    decode_manifest,
)
from shardplan.io.stores import Store, StoreError
from shardplan.planning import Sheet, Table, human_bytes, human_seconds

from ._freshness import ATTEMPTS, is_another, save_of
from ._report import logged

__all__ = ["VerifyReport", "verify"]

_SHOWN: Final = 50


@attrs.frozen(repr=False)
class VerifyReport:
    """What a check of a whole checkpoint found; true if no fault was; printed as a table.

    Attributes:
        path: The checkpoint.
        faults: All that is wrong: the manifest's faults first, then by file and place.
        keys: Names of which some bytes are damaged, lost or could not be checked, sorted. If the
            manifest cannot be read, nobody knows them.
        leftovers: Files of killed saves (or of one under way); they do no harm, and `prune`
            removes them.
        files: How many data files there should be.
        chunks: How many chunks were found to fit their checksums.
        nbytes: How many bytes were read and checked.
        seconds: How long it took.
        format: What was checked.
        notes: What could not be checked, and why.
        unchecked: How many bytes there are that nobody can check, since they have no checksums.
    """

    path: str
    faults: tuple[Fault, ...]
    keys: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    files: int = 0
    chunks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    format: str = "safetensors"
    notes: tuple[str, ...] = ()
    unchecked: int = 0

    @property
    def ok(self) -> bool:
        """Whether every byte that can be checked is what was saved; see ``notes``."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """What the check came to, in a few words."""
        if self.faults:
            return _many(len(self.faults), "fault")
        if not self.unchecked:
            return "sound"
        if not self.chunks:
            return "headers fit; there are no checksums for the elements"
        return f"sound, but for {human_bytes(self.unchecked)} that have no checksums"

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return _sheet(self).text()

    def _repr_html_(self) -> str:
        return _sheet(self).html()


def verify(
    path: str | os.PathLike[str] | Store,
    *,
    progress: Tell | None = None,
    pool: Pool | None = None,
) -> VerifyReport:
    """Check every byte of a checkpoint: the manifest, the headers, and each chunk's checksum.

    Of other tools' checkpoints, all is checked that can be: the CRC-32 of every record of DCP and
    `torch.save`, which torch itself never looks at; headers and sizes of safetensors files, which
    have no checksums. The report's ``notes`` say what could not be checked.

    It does not stop at the first fault, and does not raise for any: print what it returns. Data is
    streamed through small buffers, so that checkpoints of any size can be checked anywhere. If the
    checkpoint is overwritten meanwhile, the new one is checked, from the start.

    Args:
        path: The checkpoint, of any format.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, with
            ever more bytes done and all of them in the end; it starts at 0 again if the checkpoint
            was overwritten. What it raises stops the check.
        pool: The threads and the memory budget to use.

    Returns:
        All that is wrong, by key, file and byte range; true if nothing is.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = save({"a": torch.zeros(2), "w": torch.ones(4, 3), "step": 7}, folder.name)
    >>> report = verify(folder.name)
    >>> report.ok, report.chunks
    (True, 2)
    >>> (file,) = (name for name in os.listdir(folder.name) if name.startswith("shard-"))
    >>> with open(os.path.join(folder.name, file), "r+b") as damaged:
    ...     _ = damaged.seek(-4, os.SEEK_END)
    ...     _ = damaged.write(b"oops")
    >>> for fault in verify(folder.name).faults:
    ...     print(fault.kind, fault.key, fault.end - fault.begin, fault.file == file)
    checksum w 48 True
    >>> folder.cleanup()

    Raises:
        FormatError: There is no checkpoint.
        StoreError: The store cannot tell whether there is one.
    """
    start = time.perf_counter()
    store, name = locate(path)
    for left in reversed(range(ATTEMPTS)):
        report, save_id = _check(path, store, name, progress, pool)
        if report.ok or not left or name or not is_another(store, save_id, pool=pool):
            break
    report = attrs.evolve(report, seconds=time.perf_counter() - start)
    return logged(report, left=report.leftovers)


def _check(
    path: str | os.PathLike[str] | Store,
    store: Store,
    name: str,
    tell: Tell | None,
    pool: Pool | None,
) -> tuple[VerifyReport, str | None]:
    """Check what is there now; return which save that was, too."""
    try:
        data = None if name else find_manifest(store)
        manifest = None if data is None else decode_manifest(data)
    except (FormatError, StoreError) as error:
        if isinstance(error, StoreError) and not store.exists(MANIFEST):
            raise
        return _without_manifest(store, error, tell), None
    if data is None or manifest is None:
        return _foreign(path, store, name, tell, pool)
    return _with_manifest(store, manifest, len(data), tell, pool), manifest.save_id


def _foreign(
    path: str | os.PathLike[str] | Store,
    store: Store,
    name: str,
    tell: Tell | None,
    pool: Pool | None,
) -> tuple[VerifyReport, str | None]:
    """Check a checkpoint that another tool wrote; return which save it is of, too."""
    url = f"{store.url}/{name}" if name else store.url
    format = detect(store, name)
    try:
        source = open_source(path, format=format, pool=pool)
        found = check_foreign(source, tell, pool)
        save_id = save_of(source)
    except FormatError as error:
        Progress(0, tell)
        save_id = None
        found = Foreign((Fault("header", error.file, error.reason),), 0)
        if format == "hf":
            found = check_headers(store, name, error, pool)
    keys = found.lost.union(fault.key for fault in found.faults if fault.key is not None)
    report = VerifyReport(
        url,
        found.faults,
        tuple(sorted(keys)),
        () if name else _leftovers(store),
        files=found.files,
        chunks=found.chunks,
        nbytes=found.nbytes,
        format=format,
        notes=found.notes,
        unchecked=found.unchecked,
    )
    return report, save_id


def _without_manifest(
    store: Store, error: FormatError | StoreError, tell: Tell | None
) -> VerifyReport:
    Progress(0, tell)
    return VerifyReport(store.url, (Fault("manifest", MANIFEST, error.reason),))


def _with_manifest(
    store: Store, manifest: Manifest, size: int, tell: Tell | None, pool: Pool | None
) -> VerifyReport:
    progress = Progress(size + int(manifest.files.sizes.sum()), tell)
    contradictions = check_manifest(manifest)
    progress.add(size)
    found: Findings = check_files(store, manifest, progress, pool)
    progress.finish()
    keys = found.keys.union(fault.key for fault in contradictions if fault.key is not None)
    return VerifyReport(
        store.url,
        contradictions + found.faults,
        tuple(sorted(keys)),
        _leftovers(store),
        len(manifest.files),
        found.chunks,
        size + found.nbytes,
    )


def _leftovers(store: Store) -> tuple[str, ...]:
    try:
        return leftovers(store)
    except StoreError:
        return ()  # a note is not worth an error


def _sheet(report: VerifyReport) -> Sheet:
    count = len(report.faults)
    speed = human_bytes(report.nbytes / report.seconds) if report.seconds else "?"
    title = (
        f"{report.path}: {report.verdict}; {_many(report.files, 'file')}, "
        f"{human_bytes(report.nbytes)} checked in {human_seconds(report.seconds)} ({speed}/s)"
    )
    rows = [_row(fault) for fault in report.faults[:_SHOWN]]
    tables = [Table(("fault", "key", "reason", "file", "bytes"), rows)] if rows else []
    notes = [f"… {count - _SHOWN:,} more"] if count > _SHOWN else []
    notes += report.notes
    if report.keys:
        keys = _many(len(report.keys), "key")
        notes.append(f"{keys} cannot be loaded whole: {listed(report.keys, quote='')}")
    if report.leftovers:
        notes.append(
            f"{_many(len(report.leftovers), 'file')} of a killed save, or of one under way, which "
            f"do no harm: {listed(report.leftovers, quote='')}"
        )
    return Sheet(title, tables, notes)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _row(fault: Fault) -> tuple[str, ...]:
    span = f"{fault.begin:,} to {fault.end:,}" if fault.end else ""
    return fault.kind, fault.key or "", fault.reason, fault.file, span
