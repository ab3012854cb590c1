"""How much is deleted? Deletions of a store, counted, or only pretended."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardplan.io.stores import MissingFileError, Store

__all__ = ["Deletions"]

_log = logging.getLogger("shardplan.cli")


class Deletions:
    """Stands in for the ``delete`` of a store, and counts.

    Args:
        store: The store; from now on, deleting from it is this.
        pretend: Whether files stay.

    Attributes:
        files: How many files were deleted, or would have been.
        nbytes: Their size, in bytes.

    >>> from shardplan.io.stores import open_store
    >>> store = open_store("memory://deleting")
    >>> _ = store.write("a", [b"abc"])
    >>> counted = Deletions(store, pretend=True)
    >>> store.delete(["a"])
    >>> counted.files, counted.nbytes, store.exists("a")
    (1, 3, True)
    """

    def __init__(self, store: Store, *, pretend: bool) -> None:
        self._size, self._delete, self._pretend = store.size, store.delete, pretend
        self.files = self.nbytes = 0
        # A store of its own would have to repeat every method only to hand it on.
        store.delete = self  # type: ignore[method-assign]

    def __call__(self, paths: Iterable[str]) -> None:
        """Count files, and delete them unless that is pretended."""
        names = tuple(paths)
        for name in names:
            try:
                self.nbytes += self._size(name)
            except MissingFileError:
                continue
            self.files += 1
            _log.info("%s %s", "would delete" if self._pretend else "deleting", name)
        if not self._pretend:
            self._delete(names)
