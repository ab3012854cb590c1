"""Where do the bytes live? What a store can do, and how one is opened.

A store is a folder of files, on a disk or in a bucket, with as few verbs as saving and loading
need. Names are relative to its root and use forward slashes everywhere. Nothing is renamed, and
nothing but `Store.replace`, and a `Store.write` that is asked to, promises to be atomic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

import attrs

from .buffers import Buffer
from .store_errors import MissingFileError, StoreError

__all__ = ["Entry", "MissingFileError", "Store", "StoreError", "check_path", "open_store"]

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\\]")  # or a backslash
_OBJECTS: Final = ("s3", "gs", "az", "memory")


@attrs.frozen
class Entry:
    """A file in a listing; or a folder, whose name ends with a slash.

    Attributes:
        name: Its name, relative to the store's root.
        size: Its size in bytes; 0 for a folder.
        modified: When it got here, in seconds since 1970, by the store's own clock: on a disk the
            last change of any kind, so that a fresh copy of an old file is young. 0 for a folder.
        written: When its bytes were written, as far as the store knows: a copy may keep the time
            of what it is a copy of. 0 for a folder.
    """

    name: str
    size: int = 0
    modified: float = 0.0
    written: float = 0.0


@runtime_checkable
class Store(Protocol):
    """A folder of files that can be read by ranges, written whole, listed and deleted.

    All methods may be called from several threads at once. Failures are `StoreError`.
    """

    @property
    def url(self) -> str:
        """The root, as a person would write it."""
        ...

    @property
    def staging(self) -> int:
        """Bytes of memory that one call holds at most, beside the caller's own buffers.

        Work in a `Pool` that calls a store counts this in its cost.
        """
        ...

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file, each from its offset, and return how many bytes were read.

        Just those bytes are asked for. A range of no bytes asks for nothing.

        Args:
            path: The file.
            ranges: Pairs of a byte offset in the file and the writable memory to fill from there.

        Raises:
            MissingFileError: There is no such file.
            StoreError: A range reaches past the end of the file, or the store fails. The buffers
                may then have been filled in part.
        """
        ...

    def write(
        self,
        path: str,
        parts: Iterable[Buffer],
        *,
        nbytes: int | None = None,
        sync: bool = True,
        atomic: bool = False,
    ) -> int:
        """Write a file whole, and return its size in bytes.

        The parts follow one another in the file and are not joined in memory. They may be made on
        the fly: each is asked for once, and dropped when it is written. Several are on their way
        at once, so do not refill a buffer that was handed over. A file of that name is replaced,
        but not atomically unless that is asked for: choose a name that nobody reads yet.

        Args:
            path: The file; folders are made as needed.
            parts: Contiguous buffers of any type.
            nbytes: The size to come, if known. Space is reserved by it, and a file of any other
                size is refused. Tell it where ``parts`` is an iterator of many gigabytes.
            sync: Whether the bytes must have reached the disk on return. Its name reaches the
                disk with `sync`.
            atomic: Whether readers must see the old file or the new one, whole and durable.

        Raises:
            StoreError: The disk is full, or the store fails. Nothing is left of the file.
        """
        ...

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole, by a single request: all of it is of one version.

        Args:
            path: The file.
            limit: How many bytes it may have at most.

        Raises:
            MissingFileError: There is no such file.
            StoreError: It is larger than the limit (the ``kind`` is then ``long``), or the store
                fails.
        """
        ...

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Publish a small file at once and durably: readers see the old bytes or the new ones.

        Args:
            path: The file.
            data: What it is to hold.
            overwrite: Whether a file of that name may be there. If not, and several try at once,
                one of them succeeds. (Disks without hard links, and services without conditional
                requests, can only look first.)

        Raises:
            StoreError: With the ``kind`` ``exists`` if the name is taken and must not be. If the
                ``kind`` is ``unsure`` or ``other``, the file may have been replaced nevertheless,
                or may still be: a request that timed out here can arrive there.
        """
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether there is such a file; a folder is not a file."""
        ...

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the files below a folder, sorted; none if there is no such folder.

        Args:
            prefix: A folder; the empty name is the root.
            recursive: If false, folders are named instead of entered, with a slash at the end.
        """
        ...

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return what `list` does, in the same order, with sizes and times."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and folders thereby emptied; a file that is not there is no error."""
        ...

    def sync(self) -> None:
        """Return when a loss of power would undo no name that was written or deleted so far."""
        ...


def check_path(path: str, *, root: str = "") -> str:
    """Return ``path`` if it names something inside a store, and raise if it does not.

    Names may come from a manifest that a stranger wrote, so nothing is repaired: a name that is
    absolute, climbs out, or is spelled in two ways is refused.

    >>> check_path("step-100/a.safetensors")
    'step-100/a.safetensors'
    >>> check_path("../secret")
    Traceback (most recent call last):
    shardplan.io.store_errors.StoreError: cannot use '../secret': it leaves the folder; ...
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


def open_store(url: str | os.PathLike[str] | Store, **options: Any) -> Store:
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

    Raises:
        ValueError: It is empty, the scheme is none of these, or the URL names no folder.
        StoreError: A folder in a bucket is written in a way that no store accepts, as ``a/../b``.
        TypeError: It is no path and no store.
        ModuleNotFoundError: An object store was asked for and obstore is not installed.

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
            raise TypeError(_no_store(url))
        if options:
            raise TypeError(f"an open store takes no options, but got {', '.join(options)}")
        return url
    text = os.fspath(url)
    if "://" not in text:
        return _open_local(text, options)
    scheme = text.partition("://")[0].lower()
    if scheme == "file":
        return _open_local(_local_path(text), options)
    if scheme not in _OBJECTS:
        known = ", ".join(f"{s}://" for s in ("file", *_OBJECTS))
        raise ValueError(f"cannot open {text}: the scheme must be one of {known}, or none")
    from .objects import open_objects  # obstore is optional

    return open_objects(text, **options)


def _no_store(thing: object) -> str:
    if isinstance(thing, (bytes, bytearray)):
        return f"a path is text, not {type(thing).__name__}; pass os.fsdecode({thing!r})"
    verbs = [name for name in dir(Store) if not name.startswith("_")]
    lacking = ", ".join(name for name in verbs if not hasattr(thing, name))
    return f"a {type(thing).__name__} is no path, and no store: it lacks {lacking}"


def _open_local(path: str, options: dict[str, Any]) -> Store:
    from .local import LocalStore  # which imports this module

    if (
        not path
    ):  # in a script, mostly a variable that is not set: never mean where one happens to be
        raise ValueError("the path is empty; write '.' for the current folder")
    return LocalStore(path, **options)


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"}:
        raise ValueError(f"cannot open {url}: a local path has three slashes, as in file:///tmp")
    if "?" in url or "#" in url:
        raise ValueError(
            f"cannot open {url}: in a URL of a file, write ? as %3F and # as %23; or give the path"
        )
    return unquote(parts.path)
