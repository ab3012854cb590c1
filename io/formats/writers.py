"""How does a save come to be, in any format? Ranks write their parts; one rank commits them all."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature
from typing import Any, Final, Protocol

import attrs

from shardplan.planning import Metadata, SavePlan

from ..execute.cleanup import tidy
from ..execute.commit import assemble, publish, read_manifest, refuse_existing
from ..execute.replacing import committing, refuse_folder, retire
from ..pool import Pool
from ..progress import Progress
from ..stores.base import Store, open_store
from .native.write import Written, write_rank

__all__ = ["WRITERS", "NativeWriter", "Part", "Writer", "find_writer", "open_target"]


@attrs.frozen
class Part:
    """What one rank wrote.

    Attributes:
        files: How many files.
        nbytes: Their size, in bytes.
        report: What the writer's `commit` has to know of it, in bytes that may travel.
    """

    files: int
    nbytes: int
    report: bytes


class Writer(Protocol):
    """A format that can be written; writers derive from this class.

    Attributes:
        file: The file's name in the store, if the format is a single file; see `open_target`.
            None if it is a folder.
        max_ranks: How many ranks may save; None if any number may.
    """

    file: str | None = None
    max_ranks: int | None = None

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is, unless asked to.

        Raises:
            ExistsError: There is one, of whatever format.
        """

    def prepare(self, plans: Sequence[SavePlan]) -> tuple[SavePlan, ...]:
        """Add to the plans of all ranks what this format has to know; before they go out.

        Raises:
            RefusedError: The format cannot be written from such plans.
        """

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
        progress: Progress | None = None,
    ) -> Part:
        """Write one rank's part, which nobody takes for a checkpoint until it is committed.

        ``progress`` is told of the bytes of tensors. If it fails, what it wrote is removed again.
        """

    def commit(
        self,
        store: Store,
        metadata: Metadata,
        plans: Sequence[SavePlan],
        reports: Sequence[bytes],
        *,
        save_id: str,
        overwrite: bool,
    ) -> tuple[str, ...]:
        """Make a checkpoint of what all ranks wrote: it exists from one instant on.

        Args:
            store: Where to.
            metadata: The checkpoint, as `global_plan` described it.
            plans: The plans that were written, in rank order.
            reports: Every rank's `Part.report`, in rank order.
            save_id: The name of the save.
            overwrite: Whether an older checkpoint may be replaced.

        Returns:
            Files of the older checkpoint that could not be removed.

        Raises:
            ExistsError: There is a checkpoint, and it was not to be overwritten.
            UnsureCommitError: It may have happened nevertheless, or may still.
        """

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's part, unless it was committed after all, or may have been.

        Call it on no rank after an `UnsureCommitError` of any.
        """


class NativeWriter(Writer):
    """Writes our own format."""

    def __init__(self) -> None:
        self._unsure: set[str] = set()  # saves whose commit failed, but may have happened, or may

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        refuse_existing(store, overwrite)
        refuse_folder(store, "safetensors", overwrite)

    def prepare(self, plans: Sequence[SavePlan]) -> tuple[SavePlan, ...]:
        """Return the plans as they are; see `Writer.prepare`."""
        return tuple(plans)

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
        progress: Progress | None = None,
    ) -> Part:
        """Write one rank's safetensors files; see `Writer.write`."""
        written = write_rank(
            store, sd, plan, save_id=save_id, rank=rank, pool=pool, progress=progress
        )
        return Part(len(written.files), written.nbytes, written.to_bytes())

    def commit(
        self,
        store: Store,
        metadata: Metadata,
        plans: Sequence[SavePlan],
        reports: Sequence[bytes],
        *,
        save_id: str,
        overwrite: bool,
    ) -> tuple[str, ...]:
        """Publish the manifest; see `Writer.commit`."""
        written = [Written.from_bytes(report) for report in reports]
        manifest = assemble(metadata, plans, written, save_id=save_id, created=time.time())
        with committing(self._unsure, save_id):
            left = publish(store, manifest, overwrite=overwrite)
        left = (*left, *retire(store, "safetensors", manifest.files.names))
        tidy(store, (*manifest.files.names, *left))
        return left

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files, unless a manifest may come to name them."""
        if save_id in self._unsure:
            return
        with suppress(Exception):
            try:
                published = read_manifest(store).save_id == save_id
            except ValueError:
                published = False
            if not published:
                store.delete([file.name for file in Written.from_bytes(report).files])


WRITERS: Final[dict[str, str]] = {
    "safetensors": "shardplan.io.formats.writers:NativeWriter",
    "hf": "shardplan.io.formats.hf.write:HfWriter",
    "dcp": "shardplan.io.formats.dcp.write:DcpWriter",
    "torch": "shardplan.io.formats.torch_save.write:TorchWriter",
}
"""The formats that can be written, and the class of each one's `Writer`."""


def find_writer(format: str, **options: Any) -> Writer:
    """Return what writes a format.

    Args:
        format: One of `WRITERS`.
        **options: What its class takes: ``max_shard_size`` and ``leave_out`` for ``hf``.

    >>> find_writer("hf", max_shard_size="2GB").max_shard_size
    2000000000

    Raises:
        ValueError: Nothing writes that format, or it has no such option.
    """
    if format not in WRITERS:
        raise ValueError(f"cannot save as {format!r}; known formats are {', '.join(WRITERS)}")
    module, _, name = WRITERS[format].partition(":")
    kind = getattr(import_module(module), name)
    unknown = sorted(options.keys() - signature(kind).parameters.keys())
    if unknown:
        raise ValueError(f"the format {format!r} has no option {', '.join(unknown)}")
    writer: Writer = kind(**options)
    return writer


def open_target(
    path: str | os.PathLike[str] | Store, format: str, **options: Any
) -> tuple[Store, Writer]:
    """Return where a checkpoint goes, and what writes it there.

    Args:
        path: Its folder; for a format that is a single file (``"torch"``), that file.
        format: What to write.
        **options: Options of the format; see `find_writer`.

    >>> open_target("memory://runs/step-7.pt", "torch")[0].url
    'memory://runs'

    Raises:
        ValueError: Nothing writes that format, or it is a file and the path is none.
    """
    writer = find_writer(format, **options)
    if writer.file is None:
        return open_store(path), writer
    if not isinstance(path, (str, os.PathLike)):
        open_store(path)  # refuses what is not a store either
        raise ValueError(f"a {format} checkpoint is a file: pass its path, not a store")
    text = os.fspath(path)
    folder, slash, writer.file = text.rpartition("/")
    if not writer.file or folder.endswith(":/") or ("://" not in text and os.path.isdir(text)):
        raise ValueError(f"a {format} checkpoint is a file, such as model.pt; {text} is a folder")
    return open_store(folder or (slash or ".")), writer
