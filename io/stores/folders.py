"""Stores that wrap another store; `FolderStore` is one folder of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from ..buffers import Buffer
from .base import Entry, Store, check_path


class WrappedStore(Store):
    """A store that passes every call on to an inner one.

    All calls go through the basic verbs of `Store`: what is derived from this class need only
    override these, or just `passing`, to see everything.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """The root, as a person would write it."""
        return self.inner.url

    @property
    def staging(self) -> int:
        """What the inner store needs."""
        return self.inner.staging

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Enclose one call of the inner store."""
        yield path

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        with self.passing("read", path) as inside:
            return self.inner.read(inside, ranges)

    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Write a file whole; see `Store.write`."""
        with self.passing("write", path) as inside:
            return self.inner.write(inside, parts, nbytes=nbytes, atomic=atomic)

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole; see `Store.read_all`."""
        with self.passing("read_all", path) as inside:
            return self.inner.read_all(inside, limit=limit)

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Publish a small file at once and durably; see `Store.replace`."""
        with self.passing("replace", path) as inside:
            self.inner.replace(inside, data, overwrite=overwrite)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with self.passing("size", path) as inside:
            return self.inner.size(inside)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        with self.passing("exists", path) as inside:
            return self.inner.exists(inside)

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the files below a folder, sorted; see `Store.list`."""
        with self.passing("list", prefix) as inside:
            return self.inner.list(inside, recursive=recursive)

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder with sizes and times; see `Store.entries`."""
        with self.passing("entries", prefix) as inside:
            return self.inner.entries(inside, recursive=recursive)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; see `Store.delete`."""
        with self.passing("delete", ""):
            self.inner.delete(paths)

    def sync(self) -> None:
        """Make the names of all files written so far durable; see `Store.sync`."""
        with self.passing("sync", ""):
            self.inner.sync()


class FolderStore(WrappedStore):
    """The files below one folder of another store, named relative to it.

    >>> from shardplan.io.stores import open_store
    >>> store = open_store("memory://folders")
    >>> FolderStore(store, "step-100").write("a", [b"abc"])
    3
    >>> store.list()
    ('step-100/a',)
    """

    def __init__(self, inner: Store, folder: str) -> None:
        super().__init__(inner)
        self._folder = check_path(folder)

    def __repr__(self) -> str:
        return f"FolderStore({self.inner!r}, {self._folder!r})"

    @property
    def url(self) -> str:
        """The folder, as a person would write it."""
        return f"{self.inner.url.rstrip('/')}/{self._folder}"

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Name a file as the inner store does."""
        yield f"{self._folder}/{check_path(path)}" if path else self._folder

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the files below a folder, sorted; see `Store.list`."""
        found = super().list(prefix, recursive=recursive)
        return tuple(name.removeprefix(f"{self._folder}/") for name in found)

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder with sizes and times; see `Store.entries`."""
        found = super().entries(prefix, recursive=recursive)
        return tuple(attrs.evolve(e, name=e.name.removeprefix(f"{self._folder}/")) for e in found)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; see `Store.delete`."""
        self.inner.delete([f"{self._folder}/{check_path(path)}" for path in paths])
