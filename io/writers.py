"""How does a save come to be, in any format? Ranks write their parts; one rank commits them all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, Protocol

import attrs

from shardplan.planning import Metadata, SavePlan

from .commit import assemble, publish, read_manifest, refuse_existing
from .pool import Pool
from .stores import Store
from .write import Written, write_rank

__all__ = ["WRITERS", "NativeWriter", "Part", "Writer", "find_writer"]


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
    """A format that can be written."""

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is, unless asked to.

        Raises:
            ExistsError: There is one, of whatever format.
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
    ) -> Part:
        """Write one rank's part, which nobody takes for a checkpoint until it is committed.

        If it fails, what it wrote is removed again.
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
        """

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's part, unless it was committed after all."""


class NativeWriter:
    """Writes our own format; a `Writer`."""

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        refuse_existing(store, overwrite)

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
    ) -> Part:
        """Write one rank's safetensors files; see `Writer.write`."""
        written = write_rank(store, sd, plan, save_id=save_id, rank=rank, pool=pool)
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
        return publish(store, manifest, overwrite=overwrite)

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's files; see `Writer.discard`."""
        with suppress(Exception):
            try:
                published = read_manifest(store).save_id == save_id
            except ValueError:
                published = False
            if not published:
                store.delete([file.name for file in Written.from_bytes(report).files])


WRITERS: Final[dict[str, str]] = {
    "safetensors": "shardplan.io.writers:NativeWriter",
}
"""The formats that can be written, and the class of each one's `Writer`."""


def find_writer(format: str) -> Writer:
    """Return what writes a format.

    Raises:
        ValueError: Nothing does.
    """
    if format not in WRITERS:
        raise ValueError(f"cannot save as {format!r}; known formats are {', '.join(WRITERS)}")
    module, _, name = WRITERS[format].partition(":")
    writer: Writer = getattr(import_module(module), name)()
    return writer
