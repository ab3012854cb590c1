"""Files of `torch.save`, as the registry knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from ...pool import Pool
from ...progress import Progress, Tell
from ...stores.base import Store
from ..base import Findings, Format
from .source import TorchSource, find, source

if TYPE_CHECKING:
    from .write import TorchWriter

__all__ = ["TorchFormat"]

_OLD: Final = "files of old torch versions have no checksums"


class TorchFormat(Format):
    """Files that `torch.save` writes."""

    name = "torch"
    is_file = True
    whole_tensors = True

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether a file begins as `torch.save` has it; see `Format.detect`."""
        return find(store, name)

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> TorchSource:
        """Open a file; only its pickle is read. See `Format.open`."""
        return source(store, name, pool)

    def writer(self) -> TorchWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import TorchWriter  # which needs torch

        return TorchWriter()

    def verify(
        self, store: Store, name: str = "", *, tell: Tell | None = None, pool: Pool | None = None
    ) -> Findings:
        """Compare every record with its checksum; see `Format.verify`."""
        from .check import Stored, check_archives

        opened = self.open(store, name, pool)
        size = store.size(name)
        if opened.archive is None:
            Progress(0, tell)
            return Findings((), 1, notes=(_OLD,), unchecked=size)
        whole = Stored(name, 0, size, keys_in=opened.keys_in)
        return attrs.evolve(check_archives(store, [whole], tell, pool), files=1)
