"""A folder of a store, as a store of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from .buffers import Buffer
from .stores import Entry, Store, check_path

__all__ = ["FolderStore"]


class FolderStore:
    """The files below one folder of another store, named relative to it.

    >>> from shardplan.io.stores import open_store
    >>> store = open_store("memory://folders")
    >>> FolderStore(store, "step-100").write("a", [b"abc"])
    3
    >>> store.list()
    ('step-100/a',)
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, check_path(folder)

    def __repr__(self) -> str:
        return f"FolderStore({self._store!r}, {self._folder!r})"

    @property
    def url(self) -> str:
        """The folder, as a person would write it."""
        return f"{self._store.url.rstrip('/')}/{self._folder}"

    @property
    def staging(self) -> int:
        """What the other store needs."""
        return self._store.staging

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        return self._store.read(self._inside(path), ranges)

    def write(
        self,
        path: str,
        parts: Iterable[Buffer],
        *,
        nbytes: int | None = None,
        sync: bool = True,
        atomic: bool = False,
    ) -> int:
        """Write a file whole; see `Store.write`."""
        inside = self._inside(path)
        return self._store.write(inside, parts, nbytes=nbytes, sync=sync, atomic=atomic)

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole; see `Store.read_all`."""
        return self._store.read_all(self._inside(path), limit=limit)

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Publish a small file at once and durably; see `Store.replace`."""
        self._store.replace(self._inside(path), data, overwrite=overwrite)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return self._store.size(self._inside(path))

    def exists(self, path: str) -> bool:
        """Say whether there is such a file."""
        return self._store.exists(self._inside(path))

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the files below a folder, sorted; see `Store.list`."""
        below = self._inside(prefix) if prefix else self._folder
        found = self._store.list(below, recursive=recursive)
        return tuple(name.removeprefix(f"{self._folder}/") for name in found)

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder with sizes and times; see `Store.entries`."""
        below = self._inside(prefix) if prefix else self._folder
        found = self._store.entries(below, recursive=recursive)
        return tuple(attrs.evolve(e, name=e.name.removeprefix(f"{self._folder}/")) for e in found)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; see `Store.delete`."""
        self._store.delete([self._inside(path) for path in paths])

    def sync(self) -> None:
        """Make the names of all files written so far durable; see `Store.sync`."""
        self._store.sync()

    def _inside(self, path: str) -> str:
        return f"{self._folder}/{check_path(path)}"
