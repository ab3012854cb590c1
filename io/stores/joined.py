"""`JoinedStore`: the files of several stores, to be read as if they were those of one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from shardplan.planning.columns import Ints

from ..buffers import Bytes
from ..errors import MissingFileError, StoreError
from .base import Entry, Store, WrappedStore


class JoinedStore(WrappedStore):
    """Reads the files of several stores; the names of each begin with its number and a slash.

    >>> from shardplan.io import open_store
    >>> store = open_store("memory://joined")
    >>> store.write("a", [b"abc"])
    3
    >>> JoinedStore(store, [store, store]).read_all("1/a", limit=3)
    b'abc'
    """

    def __init__(self, inner: Store, parts: Sequence[Store]) -> None:
        super().__init__(inner)
        self._parts = tuple(parts)

    def __repr__(self) -> str:
        return f"JoinedStore({self.inner!r}, {list(self._parts)})"

    @property
    def staging(self) -> int:
        """The most that one call holds; see `Store.staging`."""
        return max(part.staging for part in self._parts)

    @property
    def can_map(self) -> bool:
        """Whether all stores give files' own pages."""
        return all(part.can_map for part in self._parts)

    def _find(self, path: str) -> tuple[Store, str]:
        number, _, name = path.partition("/")
        if not number.isdecimal() or int(number) >= len(self._parts) or not name:
            raise MissingFileError("read", f"{self.url}/{path}", "there is no such file")
        return self._parts[int(number)], name

    def locate(self, path: str = "") -> str | None:
        """Return where a file is on this machine; see `Store.locate`."""
        if path:
            store, name = self._find(path)
            return store.locate(name)
        places = [part.locate() for part in self._parts]
        return None if None in places else places[0]

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        store, name = self._find(path)
        return store.read(name, ranges)

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole; see `Store.read_all`."""
        store, name = self._find(path)
        return store.read_all(name, limit=limit)

    def read_pieces(
        self, path: str, groups: Iterable[Sequence[tuple[int, memoryview]]], max_bytes: int
    ) -> Generator[Iterator[memoryview], None, None]:
        """Fill buffers a piece at a time; see `Store.read_pieces`."""
        store, name = self._find(path)
        return store.read_pieces(name, groups, max_bytes)

    @contextmanager
    def mapped(
        self, path: str, starts: Ints, lengths: Ints, *, touch: bool = True
    ) -> Iterator[Bytes]:
        """Give the bytes of a file; see `Store.mapped`."""
        store, name = self._find(path)
        with store.mapped(name, starts, lengths, touch=touch) as found:
            yield found

    def size(self, path: str) -> int:
        """Return the size of a file; see `Store.size`."""
        store, name = self._find(path)
        return store.size(name)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        store, name = self._find(path)
        return store.exists(name)

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files of all stores; see `Store.entries`."""
        return tuple(
            attrs.evolve(entry, name=f"{number}/{entry.name}")
            for number, part in enumerate(self._parts)
            for entry in part.entries(prefix, recursive=recursive)
        )

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Refuse what would change files."""
        if operation not in ("read", "size"):
            text = "files of other checkpoints are only read"
            raise StoreError(operation, f"{self.url}/{path}", text)
        yield path
