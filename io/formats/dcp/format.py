"""The format of torch.distributed.checkpoint, as the registry knows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from ...pool import Pool
from ...progress import Tell
from ...stores.base import Store
from ..base import Findings, Format
from .metadata import METADATA
from .ranks import FIRST_RANK, rank_metadata
from .source import DcpSource, find, source

if TYPE_CHECKING:
    from .write import DcpWriter

__all__ = ["DcpFormat"]

_OURS: Final = re.compile(r"__\d+_\d+-([0-9a-f]{12})\.distcp")  # torch's own names have no save id


class DcpFormat(Format):
    """Checkpoints of torch.distributed.checkpoint."""

    name = "dcp"
    marks = (METADATA, FIRST_RANK)

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether there is a metadata file; see `Format.detect`."""
        return find(store, name)

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> DcpSource:
        """Open a checkpoint; only its metadata is read. See `Format.open`."""
        return source(store, name, pool)

    def writer(self) -> DcpWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import DcpWriter  # which needs torch

        return DcpWriter()

    def verify(
        self, store: Store, name: str = "", *, tell: Tell | None = None, pool: Pool | None = None
    ) -> Findings:
        """Compare every archive with its checksums; see `Format.verify`."""
        from ..torch_save.check import check_archives

        opened = self.open(store, name, pool)
        lacking = opened.missing()
        found = check_archives(store, opened.archives(), tell, pool)
        order = {file: number for number, file in enumerate(opened.files)}
        faults = sorted((*lacking, *found.faults), key=lambda f: (order.get(f.file, -1), f.begin))
        return attrs.evolve(
            found, faults=tuple(faults), files=len(opened.files), save_id=opened.save_id
        )

    def made(self, store: Store) -> float | None:
        """Return when its metadata was written; see `Format.made`."""
        found = {entry.name: entry.written for entry in store.entries(recursive=False)}
        ranks: Sequence[str] = rank_metadata(found) if FIRST_RANK in found else ()
        return found.get(METADATA, max((found[name] for name in ranks), default=None))

    def save_of(self, file: str) -> str | None:
        """Return which save of ours wrote a file; see `Format.save_of`."""
        match = _OURS.fullmatch(file)
        return match[1] if match else None
