"""Check every byte of a checkpoint, and report all that is wrong with it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

import attrs

from shardplan.io import FormatError, Pool, Progress, ProgressCallback, listed
from shardplan.io.execute import leftovers
from shardplan.io.formats import Fault, Findings, detect, find_format, locate
from shardplan.io.stores import Store, StoreError
from shardplan.planning import Sheet, Table, counted, human_bytes, human_seconds

from ._read import ATTEMPTS, is_another
from ._report import Printed, logged

_SHOWN: Final = 50


@attrs.frozen(repr=False)
class VerifyReport(Printed):
    """What a check of a whole checkpoint found; true if there are no faults; printed as a table.

    Attributes:
        path: The checkpoint.
        faults: All that is wrong: the manifest's faults first, then by file and place.
        keys: Names with bytes that are damaged, lost or could not be checked, sorted. If the
            manifest cannot be read, they are not known.
        leftovers: Files of killed saves (or of one under way); they do no harm, and `prune`
            removes them.
        files: How many data files there should be.
        chunks: How many chunks were found to fit their checksums.
        nbytes: How many bytes were read and checked.
        seconds: How long it took.
        format: What was checked.
        notes: What could not be checked, and why.
        unchecked: How many bytes cannot be checked, since they have no checksums.
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
        """The result of the check, in a few words."""
        if self.faults:
            return counted(len(self.faults), "fault")
        if not self.unchecked:
            return "sound"
        if not self.chunks:
            return "headers fit; there are no checksums for the elements"
        return f"sound, but for {human_bytes(self.unchecked)} that have no checksums"

    def __bool__(self) -> bool:
        return self.ok

    @property
    def _sheet(self) -> Sheet:
        count = len(self.faults)
        speed = human_bytes(self.nbytes / self.seconds) if self.seconds else "?"
        title = (
            f"{self.path}: {self.verdict}; {counted(self.files, 'file')}, "
            f"{human_bytes(self.nbytes)} checked in {human_seconds(self.seconds)} ({speed}/s)"
        )
        rows = [
            (f.kind, f.key or "", f.reason, f.file, f"{f.begin:,} to {f.end:,}" if f.end else "")
            for f in self.faults[:_SHOWN]
        ]
        tables = [Table(("fault", "key", "reason", "file", "bytes"), rows)] if rows else []
        notes = [f"… {count - _SHOWN:,} more"] if count > _SHOWN else []
        notes += self.notes
        if self.keys:
            keys = counted(len(self.keys), "key")
            notes.append(f"{keys} cannot be loaded whole: {listed(self.keys, quote='')}")
        if self.leftovers:
            notes.append(
                f"{counted(len(self.leftovers), 'file')} of a killed save, or of one under way, "
                f"which do no harm: {listed(self.leftovers, quote='')}"
            )
        return Sheet(title, tables, notes)


def verify(
    path: str | os.PathLike[str] | Store,
    *,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> VerifyReport:
    """Check every byte of a checkpoint: the manifest, the headers, and each chunk's checksum.

    Of other tools' checkpoints, all is checked that can be: the CRC-32 of every record of DCP and
    `torch.save`; headers and sizes of safetensors files. ``notes`` say what could not be checked.

    It does not stop at the first fault, and raises for none: print what it returns. If the
    checkpoint is overwritten meanwhile, the new one is checked, from the start.

    Args:
        path: The checkpoint, of any format.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time; it
            starts at 0 again if the checkpoint was overwritten. What it raises stops the check.
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
        StoreError: The store fails.
    """
    start = time.perf_counter()
    store, name = locate(path)
    for left in reversed(range(ATTEMPTS)):
        format = find_format(detect(store, name))
        try:
            found = format.verify(store, name, progress=progress, pool=pool)
        except FormatError as error:  # what describes the checkpoint is damaged
            Progress(0, progress)
            found = Findings((Fault("header", error.file, error.reason),))
        if not (left and found.faults) or name or not is_another(store, found.save_id, pool=pool):
            break
    left_behind: tuple[str, ...] = ()
    if not name:
        with suppress(StoreError):  # a note is not worth an error
            left_behind = leftovers(store)
    report = VerifyReport(
        f"{store.url}/{name}" if name else store.url,
        found.faults,
        found.keys,
        left_behind,
        found.files,
        found.chunks,
        found.nbytes,
        time.perf_counter() - start,
        format.name,
        found.notes,
        found.unchecked,
    )
    return logged(report, left=report.leftovers)
