"""Local files: bytes move directly between the disk and the caller's memory."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy as np

from shardplan.planning.columns import Ints

from ..buffers import (
    Buffer,
    Bytes,
    Run,
    bundles,
    byte_view,
    gather,
    pieces,
    placed,
    total_bytes,
    wanted,
)
from ..errors import not_a_file, short, taken, too_long, wrong_size
from ..pool import Pool, default_pool
from . import local_files as system
from .base import Contents, Entry, MissingFileError, Store, check_path

_STEP: Final = 32 << 20  # bytes a system call moves: much below Linux's limit of 2 GiB
_WAIT: Final = 8 << 20  # bytes that wait to be written at most: their memory is held as long
_ATTEMPTS: Final = 5


def _runs(ranges: Iterable[tuple[int, memoryview]], max_bytes: int) -> Iterator[Run]:
    return gather(ranges, max_bytes=max_bytes, max_views=system.IOV_MAX)


class LocalStore(Store):
    """A folder on a disk.

    Reads are spread over the pool's threads. A file is written by one thread, since file systems
    let only one write into a file at a time: write several files at once to use more threads.
    Symbolic links are followed when reading; when writing, the file takes their place.
    """

    def __init__(self, root: str | os.PathLike[str], *, pool: Pool | None = None) -> None:
        self._root = os.path.abspath(root)
        self._pool = pool
        self._lock = threading.Lock()
        self._unsynced: set[str] = set()
        self._made: set[str] = set()  # the root and those above it, if made since the last sync
        self._rooted = False  # whether the root's own name was added to `_unsynced`

    def __reduce__(self) -> tuple[Any, ...]:
        """Give another process a store of the same folder, which has its own names to sync."""
        return partial(type(self), self._root, pool=self._pool), ()

    url = property(lambda self: self._root)
    staging = 0
    can_rename = True
    can_share_files = True
    can_write_head_last = True
    can_map = property(lambda self: system.can_map())

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    def folder(self, name: str) -> Store:
        """Return one of its folders as a store, which can all that this one can."""
        return LocalStore(os.path.join(self._root, check_path(name)), pool=self._pool)

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        file = self._file(path)
        asked = wanted(ranges)
        if not asked:
            return 0
        bundled = list(bundles(_runs(asked, _STEP), _STEP))
        with system.reported("read", file), system.opened(file) as fd:
            system.check_ranges(fd, file, ((at, view.nbytes) for at, view in asked))
            if len(bundled) == 1:
                return system.read_runs(fd, file, bundled[0])
            pool = self._pool or default_pool()
            return sum(pool.map(lambda runs: system.read_runs(fd, file, runs), bundled))

    def read_pieces(
        self, path: str, groups: Iterable[Sequence[tuple[int, memoryview]]], max_bytes: int
    ) -> Generator[Iterator[memoryview], None, None]:
        """Fill buffers a piece at a time; see `Store.read_pieces`."""
        file = self._file(path)
        with system.reported("read", file), system.opened(file) as fd:
            for ranges in groups:
                asked = wanted(ranges)
                system.check_ranges(fd, file, ((at, view.nbytes) for at, view in asked))
                yield system.fill_pieces(fd, file, asked, max_bytes)

    @contextmanager
    def mapped(
        self, path: str, starts: Ints, lengths: Ints, *, touch: bool = True
    ) -> Iterator[Bytes]:
        """Give a file's own pages; see `Store.mapped`."""
        file = self._file(path)
        last = int(np.argmax(starts + lengths))
        start, length = int(starts[last]), int(lengths[last])
        with system.reported("read", file), system.opened(file) as fd:
            system.check_ranges(fd, file, [(start, length)])
            try:
                found = system.map_ranges(fd, starts, lengths, touch=touch)
            except ValueError:  # the file was longer a moment ago
                raise short(file, start, length, os.fstat(fd).st_size) from None
        yield found

    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Write a file whole; see `Store.write`."""
        nbytes = total_bytes(parts) if nbytes is None else nbytes
        with self._making(path, nbytes=nbytes, atomic=atomic) as fd:
            return _write_runs(fd, placed(pieces(parts, _WAIT)))

    def write_head_last(
        self, path: str, parts: Iterable[Buffer], *, head: int, nbytes: int
    ) -> None:
        """Write a file whose first bytes are known last; see `Store.write_head_last`."""
        with self._making(path, nbytes=nbytes, atomic=False) as fd:
            after_head = placed(pieces(parts, _WAIT), head)
            _write_runs(fd, ((offset % nbytes, view) for offset, view in after_head))

    def write_contents(
        self, path: str, contents: Contents, *, nbytes: int, atomic: bool = False
    ) -> None:
        """Write a file in any order; see `Store.write_contents`."""
        with self._making(path, nbytes=nbytes, atomic=atomic) as fd:
            contents.write_to(fd)

    def make_file(self, path: str, head: bytes, nbytes: int) -> None:
        """Make a file of a size; see `Store.make_file`."""
        file = self._file(path)
        with system.reported("write", file), self._created(file) as fd:
            system.reserve_space(fd, nbytes)
            system.write_run(fd, 0, [byte_view(head)])
            os.ftruncate(fd, nbytes)
            os.fsync(fd)

    def write_ranges(self, path: str, ranges: Iterable[tuple[int, memoryview]]) -> int:
        """Write parts of a file; see `Store.write_ranges`."""
        file, flags = self._file(path), os.O_WRONLY | os.O_CLOEXEC
        views = ((at, byte_view(view)) for at, view in ranges if view.nbytes)
        with system.reported("write", file), system.closing(os.open(file, flags)) as fd:
            size, written = os.fstat(fd).st_size, 0
            for offset, run in _runs(views, _WAIT):
                done = system.write_run(fd, offset, run)
                written += done
                if offset + done > size:
                    raise wrong_size(file, size, offset + done)
                if done == _WAIT:
                    system.start_writeback(fd, offset, done)
            os.fsync(fd)
        return written

    @contextmanager
    def _making(self, path: str, *, nbytes: int | None, atomic: bool) -> Iterator[int]:
        """Give a descriptor of a new file for the block to write to; see `write`."""
        target = self._file(path)
        file = system.temporary(target) if atomic else target
        with system.reported("write", target), self._created(file) as fd:
            system.reserve_space(fd, nbytes or 0)
            yield fd
            written = os.fstat(fd).st_size
            if nbytes not in {None, written}:
                raise wrong_size(target, nbytes or 0, written)
            os.fsync(fd)
            if atomic:
                os.replace(file, target)
        if atomic:
            with system.unsure(target, "write"):
                self.sync()

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole; see `Store.read_all`."""
        file = self._file(path)
        with system.reported("read", file), system.opened(file) as fd:
            size = os.fstat(fd).st_size
            if size > limit:
                raise too_long(file, size, limit)
            return b"".join(system.read_parts(fd, file, size))

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Publish a small file at once and durably; see `Store.replace`."""
        file = self._file(path)
        temporary = system.temporary(file)
        with system.reported("replace", file):
            if os.path.isdir(file):
                raise not_a_file("replace", file, is_folder=True)
            with self._created(temporary) as fd:
                system.write_run(fd, 0, [byte_view(data)] if data else [])
                os.fsync(fd)
            try:
                with system.locked_folder(os.path.dirname(file)):
                    if overwrite or not system.link(temporary, file):
                        if not overwrite and os.path.lexists(file):
                            raise taken("replace", file)
                        os.replace(temporary, file)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            with system.unsure(file):
                self.sync()

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        file = self._file(path)
        with system.reported("measure", file):
            return os.stat(file).st_size

    def exists(self, path: str) -> bool:
        """Return whether there is such a file; raise if that is not known."""
        file = self._file(path)
        with system.reported("find", file):
            try:
                return stat.S_ISREG(os.stat(file).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return False

    def list(self, prefix: str = "", *, recursive: bool = True) -> tuple[str, ...]:
        """Return the files below a folder, sorted; see `Store.list`."""
        folder = self.locate(prefix)
        with system.reported("list", folder):
            found = system.walk(folder, f"{prefix}/" if prefix else "", recursive)
            return tuple(sorted(name for name, _ in found))

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder with sizes and times; see `Store.entries`."""
        folder = self.locate(prefix)
        with system.reported("list", folder):
            found = []
            for name, entry in system.walk(folder, f"{prefix}/" if prefix else "", recursive):
                with suppress(FileNotFoundError):  # deleted a moment ago, or a link to nothing
                    s = None if name.endswith("/") else entry.stat()
                    numbers = s and (s.st_size, max(s.st_mtime, s.st_ctime), s.st_mtime)
                    found.append(Entry(name, *(numbers or ())))
            return tuple(sorted(found, key=lambda e: e.name))

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and folders that become empty; see `Store.delete`.

        The root goes, too, if it is empty and was made since the last `sync`.
        """
        files = [self._file(path) for path in paths]
        folders = {os.path.dirname(file) for file in files}
        self._note_changed(*files)
        for file in files:
            with system.reported("delete", file), suppress(FileNotFoundError):
                os.unlink(file)
        for folder in folders:
            self._remove_empty(folder)

    def rename(self, path: str, to: str) -> None:
        """Give a file another name; see `Store.rename`. `sync` makes it durable."""
        source, target = self._file(path), self._file(to)
        with system.reported("replace", target):
            self._note_changed(source, target)
            os.replace(source, target)

    def link(self, path: str, to: str) -> bool:
        """Give a file a second name; see `Store.link`."""
        source, target = self._file(path), self._file(to)
        with system.reported("replace", target):
            self._note_changed(source, target)
            return system.link(source, target)

    def share(self, other: Store, path: str) -> bool:
        """Give a file of another folder on this disk the same name here; see `Store.share`."""
        source, target = other.locate(path), self._file(path)
        if source is None or not os.path.isfile(source):
            return False
        try:
            with system.reported("replace", target):
                self._make_folder(os.path.dirname(target))
                self._note_changed(target)
                return system.link(source, target)
        except MissingFileError:  # it was removed a moment ago
            return False

    def _note_changed(self, *files: str) -> None:
        """Note that names of files change, for the next `sync`."""
        with self._lock:
            self._unsynced |= {os.path.dirname(file) for file in files}

    def delete_same(self, path: str, data: bytes) -> bool:
        """Delete a small file if it holds just these bytes; see `Store.delete_same`."""
        file = self._file(path)
        try:
            with system.reported("delete", file), system.locked_folder(os.path.dirname(file)):
                size = os.stat(file).st_size
                if size != len(data) or self.read_all(path, limit=size) != data:
                    return False
                self.delete([path])
        except MissingFileError:
            return False
        return True

    def sync(self) -> None:
        """Make durable the names written and deleted so far; see `Store.sync`."""
        with self._lock:
            folders, self._unsynced = self._unsynced, set()
            self._made.clear()
        try:
            for folder in sorted(folders):
                # A user who may not list the folder above the root cannot sync it either.
                forgiven = [PermissionError] if len(folder) < len(self._root) else []
                with system.reported("sync", folder), suppress(FileNotFoundError, *forgiven):
                    system.sync_folder(folder)
        except BaseException:
            with self._lock:
                self._unsynced |= folders
            raise

    def locate(self, path: str = "") -> str:
        """Return where a file is on the disk; see `Store.locate`."""
        return self._file(path) if path else self._root

    def _file(self, path: str) -> str:
        return os.path.join(self._root, check_path(path, root=self._root))

    @contextmanager
    def _created(self, file: str) -> Iterator[int]:
        """Open a new file for writing, and remove it again if the block fails."""
        with system.closing(self._create(file)) as fd:
            try:
                yield fd
            except BaseException:
                with suppress(OSError):
                    os.unlink(file)
                raise

    def _create(self, file: str) -> int:
        """Open a new file: make its folders, and remove an old file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for _ in range(_ATTEMPTS):  # a concurrent delete may remove the folder once more
            with suppress(FileNotFoundError):
                self._make_folder(os.path.dirname(file))
                with suppress(FileExistsError):
                    return os.open(file, flags, 0o666)
                os.unlink(file)
        return os.open(file, flags, 0o666)

    def _make_folder(self, folder: str) -> None:
        new, made, above = folder, {folder}, set[str]()
        while not os.path.isdir(new):  # a new folder's name is part of its parent
            if len(new) <= len(self._root):
                above.add(new)
            new = os.path.dirname(new)
            made.add(new)
        os.makedirs(folder, exist_ok=True)
        with self._lock:
            self._made |= above
            if not self._rooted:  # another process may just have made the root
                made.add(os.path.dirname(self._root))
                self._rooted = True
            self._unsynced |= made

    def _remove_empty(self, folder: str) -> None:
        while len(folder) > len(self._root) or folder in self._made:
            try:
                os.rmdir(folder)
            except OSError:
                return
            with self._lock:
                self._made.discard(folder)
                folder = os.path.dirname(folder)
                self._unsynced.add(folder)


def _write_runs(fd: int, ranges: Iterable[tuple[int, memoryview]]) -> int:
    """Write parts of a file, and have the disk begin with each; return how many bytes."""
    written = 0
    for offset, views in _runs(ranges, _WAIT):
        done = system.write_run(fd, offset, views)
        system.start_writeback(fd, offset, done)
        written += done
    return written
