"""The `Store` protocol, `open_store`, and stores that wrap another store.

A store is a folder of files, on a disk or in a bucket. Names are relative to its root and use
forward slashes. Only `Store.replace`, `Store.rename` and an atomic `Store.write` are atomic.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

import attrs
import numpy as np

from shardplan.planning.columns import Ints

from ..buffers import Buffer, Bytes, pieces, wanted
from ..errors import MissingFileError, StoreError

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\\]")  # or a backslash
_ONE_SLASH: Final = re.compile(r"(s3|gs|az|file|memory):/(?!/)")
_OBJECTS: Final = ("s3", "gs", "az", "memory")


@attrs.frozen
class Entry:
    """A file in a listing; or a folder, whose name ends with a slash and whose numbers are 0."""

    name: str
    size: int = 0
    # When it appeared here, in seconds since 1970: on a disk, the last change of any kind, so that
    # a fresh copy of an old file is young.
    modified: float = 0.0
    # When its bytes were written, as far as the store knows; copies may keep the time.
    written: float = 0.0


class Contents(Protocol):
    """The bytes of a file to be written."""

    def parts(self) -> Iterable[memoryview]:
        """Return them in order."""

    def write_to(self, fd: int) -> None:
        """Write them to a local file, in any order."""


@runtime_checkable
class Store(Protocol):
    """A folder of files that can be read by ranges, written whole, listed and deleted.

    All methods may be called from several threads at once. Failures are `StoreError`. Derive your
    own store from this class: the methods that only a disk supports have a default here.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The root, as a person would write it."""

    @property
    @abstractmethod
    def staging(self) -> int:
        """Bytes of memory that one call holds at most, beside the caller's own buffers."""

    @abstractmethod
    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file, and return how many bytes were read.

        Each range is a byte offset in the file and the writable memory to fill from there. After an
        error, such as a range past the end of the file, buffers may have been filled in part.
        """

    @abstractmethod
    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Write a file whole, and return its size in bytes; its name is durable after `sync`.

        The parts may be made on the fly: each is asked for once, and dropped when it is written.
        Several are in flight at once, so do not reuse their buffers.

        Args:
            path: The file, which is replaced if it exists; folders are made as needed. After an
                error nothing is left of it.
            parts: Contiguous buffers of any type, which follow one another in the file.
            nbytes: The size, if known. Space is reserved by it, and a file of any other size is
                refused. Pass it where ``parts`` is an iterator of many gigabytes.
            atomic: Whether readers must see the old file or the new one, whole and durable.
        """

    @abstractmethod
    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole, by a single request, so that all of it is of one version.

        If it has more than ``limit`` bytes, the error's ``kind`` is ``long``.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Write a small file atomically and durably: readers see the old bytes or the new ones.

        Without ``overwrite``, a file of that name must not exist (else the error's ``kind`` is
        ``exists``). If several try at once, one of them succeeds, except on disks without hard
        links and services without conditional requests. After an error of ``kind`` ``unsure`` or
        ``other`` the file may have been replaced, or may be later.
        """

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder, sorted by name; none if there is no such folder.

        If not ``recursive``, folders are named instead of entered, with a slash at the end.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and folders that become empty; missing files are ignored."""

    @abstractmethod
    def sync(self) -> None:
        """Make all names that were written or deleted so far durable."""

    # A new store need not define what follows.

    def exists(self, path: str) -> bool:
        """Return whether there is such a file; a folder is not a file."""
        try:
            self.size(path)
        except MissingFileError:
            return False
        return True

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the names of what `entries` returns, in the same order."""
        return tuple(entry.name for entry in self.entries(prefix, recursive=recursive))

    @property
    def can_map(self) -> bool:
        """Whether `mapped` gives a file's own pages, and not a copy."""
        return False

    @property
    def can_rename(self) -> bool:
        """Whether `rename` works."""
        return False

    def locate(self, path: str = "") -> str | None:
        """Return the path of a file (of the root if empty) on this machine's disks, or None."""
        return None

    def read_pieces(
        self, path: str, groups: Iterable[Sequence[tuple[int, memoryview]]], max_bytes: int
    ) -> Generator[Iterator[memoryview], None, None]:
        """Fill buffers as `read` does, and yield the pieces of each group, in the file's order.

        Take all pieces of a group before the next one.
        """
        for ranges in groups:
            asked = wanted(ranges)
            self.read(path, asked)
            yield pieces((view for _, view in asked), max_bytes)

    @contextmanager
    def mapped(
        self, path: str, starts: Ints, lengths: Ints, *, touch: bool = True
    ) -> Iterator[Bytes]:
        """Give the bytes of a file from the start of the first range to the end of the last.

        Only the bytes in the ranges are defined. There is at least one range. Without ``touch``, a
        file's own pages may be read from the disk as late as when they are used, and one that
        cannot be read kills the process.
        """
        first = int(starts.min())
        found = np.zeros(int((starts + lengths).max()) - first, np.uint8)
        places = zip((starts - first).tolist(), lengths.tolist(), strict=True)
        self.read(path, [(first + at, found.data[at : at + size]) for at, size in places])
        yield found

    def write_contents(
        self, path: str, contents: Contents, *, nbytes: int, atomic: bool = False
    ) -> None:
        """Write a file whose bytes may come in any order, if the store can; see `write`."""
        self.write(path, contents.parts(), nbytes=nbytes, atomic=atomic)

    @property
    def can_write_head_last(self) -> bool:
        """Whether `write_head_last` works."""
        return False

    def write_head_last(
        self, path: str, parts: Iterable[Buffer], *, head: int, nbytes: int
    ) -> None:
        """Write a file whose first bytes are known last; see `write`.

        Args:
            path: The file.
            parts: Contiguous buffers: what follows the head, then the head as a whole.
            head: The size of the head in bytes.
            nbytes: The size of the file.
        """
        raise StoreError("write", f"{self.url}/{path}", "this store writes files in order")

    @property
    def can_share_files(self) -> bool:
        """Whether several processes can write parts of one file: `make_file`, `write_ranges`."""
        return False

    def make_file(self, path: str, head: bytes, nbytes: int) -> None:
        """Make a file of a size that begins with ``head``; `write_ranges` brings the rest."""
        raise StoreError("write", f"{self.url}/{path}", "this store writes files whole")

    def write_ranges(self, path: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        """Write parts of a file that exists, durably, and return how many bytes.

        Each range is a byte offset and what goes there. Those that follow one another are written
        together. Each is asked for once, and dropped when it is written.
        """
        raise StoreError("write", f"{self.url}/{path}", "this store writes files whole")

    def rename(self, path: str, to: str) -> None:
        """Rename a file atomically, replacing the file of the new name; see `can_rename`."""
        raise StoreError("rename", f"{self.url}/{path}", "this store does not rename files")

    def link(self, path: str, to: str) -> bool:
        """Give a file a second name; return False if it is taken or the store has no links."""
        return False

    def share(self, other: Store, path: str) -> bool:
        """Give a file of another store the same name here; return False if that cannot be done.

        Both names are then of one file: it stays as long as any of them does.
        """
        return False

    def folder(self, name: str) -> Store:
        """Return one of its folders as a store."""
        return FolderStore(self, name)

    def delete_same(self, path: str, data: bytes) -> bool:
        """Delete a small file if it holds these bytes; a store without locks does not compare."""
        self.delete([path])
        return True


Location = str | os.PathLike[str] | Store
"""A path, a URL or an open store."""


class WrappedStore(Store):
    """A store that passes every call on to an inner one; override `passing` to see them all."""

    url = property(lambda self: self.inner.url)
    staging = property(lambda self: self.inner.staging)

    def __init__(self, inner: Store) -> None:
        self.inner = inner

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


def check_path(path: str, *, root: str = "") -> str:
    """Return ``path`` if it names something inside a store; nothing is repaired.

    Names may come from a manifest that a stranger wrote.

    >>> check_path("step-100/a.safetensors")
    'step-100/a.safetensors'
    >>> check_path("../secret")
    Traceback (most recent call last):
    shardplan.io.errors.StoreError: cannot use '../secret': it leaves the folder; ...
    """
    if not path or path.startswith("/"):
        reason = "the name is empty" if not path else "it is absolute"
    elif ".." in path.split("/"):
        reason = "it leaves the folder"
    elif {"", "."} & set(path.split("/")):
        reason = "it has an empty step"
    elif _UNPRINTABLE.search(path):
        reason = "it holds a backslash or a control character"
    else:
        return path
    inside = f" in {root}" if root else ""
    remedy = "give a name relative to the store's root, such as 'step-100/model.safetensors'"
    raise StoreError("use", f"{path!r}{inside}", reason, remedy=remedy, kind="path")


def open_store(url: Location, **options: Any) -> Store:
    """Open a folder of files, wherever it is. Nothing is read, made or checked yet.

    Args:
        url: A local path, ``file://``, ``s3://bucket/folder``, ``gs://bucket/folder``,
            ``az://container/folder``, or ``memory://name``, which is one store per name for as
            long as the process lives. A store comes back as it is. A folder in a bucket is taken
            as it is written, ``#``, ``?`` and ``%20`` included; in a ``file://`` URL, escapes such
            as ``%20`` stand for their characters.
        **options: ``pool`` (a `Pool`) for any store. Object stores also take ``part_size`` and
            what obstore takes for that service: ``endpoint="http://…"``, ``region=…``,
            ``client_options={…}``; what is not given comes from the usual environment variables.

    >>> store = open_store("memory://example")
    >>> store.write("folder/a", [b"abc", b"", b"def"])
    6
    >>> middle = bytearray(2)
    >>> store.read("folder/a", [(2, memoryview(middle))])
    2
    >>> middle, store.list()
    (bytearray(b'cd'), ('folder/a',))
    """
    if not isinstance(url, (str, os.PathLike)):
        if not isinstance(url, Store):
            raise TypeError(_not_a_path(url))
        if options:
            raise TypeError(f"an open store takes no options, but got {', '.join(options)}")
        return url
    text = os.fspath(url)
    scheme, colon, _ = text.lower().partition("://")
    if not colon or scheme == "file":
        from .local import LocalStore  # which imports this module

        return LocalStore(_local_path(text) if colon else _plain_path(text), **options)
    if scheme not in _OBJECTS:
        known = ", ".join(f"{s}://" for s in ("file", *_OBJECTS))
        raise ValueError(f"cannot open {text}: the scheme must be one of {known}, or none")
    from .objects import open_objects  # obstore is optional

    return open_objects(text, **options)


def _not_a_path(given: object) -> str:
    """Return the error text for something that is not a path, with what may have been meant."""
    kind = type(given).__name__
    if given is None:
        return "the path is None (`latest` returns None where there is no checkpoint yet)"
    if isinstance(given, Mapping) or hasattr(given, "state_dict"):
        order = "save(state_dict, path), load(state_dict, path), restore(path, target)"
        return f"the path is a {kind}: are the arguments swapped? It is {order}"
    if isinstance(given, (bytes, bytearray)):
        return f"a path is text, not {kind}; pass os.fsdecode({given!r})"
    lacking = [name for name in sorted(Store.__abstractmethods__) if not hasattr(given, name)]
    if "read" in lacking:
        return f"a path is text, an os.PathLike or an open store, not a {kind}"
    lack = f"it lacks {', '.join(lacking)}; " if lacking else ""
    return f"a {kind} is not a store: {lack}derive it from shardplan.io.Store"


def _plain_path(path: str) -> str:
    """Refuse what is hardly meant as a path, such as a variable of a script that is not set."""
    if not path:
        raise ValueError("the path is empty; write '.' for the current folder")
    if typo := _ONE_SLASH.match(path):
        raise ValueError(f"cannot open {path}: write {typo[1]}://{path[typo.end() :]}, two slashes")
    if path == "~" or path.startswith("~/"):
        expand = f"pass os.path.expanduser({path!r})"
        raise ValueError(f"{path} is not expanded; {expand}, or './{path}' if it is called that")
    return path


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        raise ValueError(f"cannot open {url}: a local path has three slashes, as in file:///tmp")
    if "?" in url or "#" in url:
        escapes = "write ? as %3F and # as %23"
        raise ValueError(f"cannot open {url}: in a URL of a file, {escapes}; or give the path")
    return _plain_path(unquote(parts.path))
