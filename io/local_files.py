"""How is one local file opened, read, written and named? What `LocalStore` does to each."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from .buffers import Run, advance
from .store_errors import StoreError, a_folder, from_os_error, no_file, short, taken
from .stores import Entry

__all__ = [
    "check_size",
    "closing",
    "entry_of",
    "fill_pieces",
    "give_name",
    "opened",
    "read_parts",
    "read_runs",
    "reported",
    "unsure",
    "walk",
    "write_run",
]

_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def reported(operation: str, file: str) -> Iterator[None]:
    """Make a `StoreError` of what the operating system reports."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise from_os_error(operation, file, error) from error


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Give a descriptor, and close it in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(file: str) -> Iterator[int]:
    """Open a file for reading; what is no file would be waited for, or never end."""
    with closing(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise a_folder("read", file)
        if not stat.S_ISREG(mode):
            raise no_file("read", file)
        yield fd


def check_size(fd: int, file: str, asked: Sequence[tuple[int, memoryview]]) -> None:
    """Refuse ranges that reach past the end of a file."""
    size = os.fstat(fd).st_size
    for offset, view in asked:
        if offset + view.nbytes > size:
            raise short(file, offset, view.nbytes, size)


def read_runs(fd: int, file: str, runs: Sequence[Run]) -> int:
    """Fill buffers, run by run; say how many bytes."""
    total = 0
    for offset, views in runs:
        end = offset + sum([view.nbytes for view in views])
        total += end - offset
        while offset < end:
            done = os.preadv(fd, views, offset)
            if not done:  # the file was longer a moment ago
                raise short(file, offset, end - offset, os.fstat(fd).st_size)
            offset += done
            views = advance(views, done) if offset < end else []
    return total


def fill_pieces(
    fd: int, file: str, asked: Sequence[tuple[int, memoryview]], max_bytes: int
) -> Iterator[memoryview]:
    """Fill buffers a piece at a time, and hand out each piece once it is filled."""
    with reported("read", file):
        for offset, view in asked:
            for low in range(0, len(view), max_bytes):
                piece = view[low : low + max_bytes]
                done = os.preadv(fd, (piece,), offset + low)
                if done < len(piece):
                    read_runs(fd, file, [(offset + low + done, [piece[done:]])])
                yield piece


def read_parts(fd: int, file: str, size: int) -> Iterator[bytes]:
    """Yield a file's bytes, all of them at once if the system is willing."""
    done = 0
    while done < size:
        part = os.pread(fd, size - done, done)
        if not part:  # the file was longer a moment ago
            raise short(file, done, size - done, os.fstat(fd).st_size)
        yield part
        done += len(part)


def write_run(fd: int, offset: int, views: Sequence[memoryview]) -> int:
    """Write buffers that follow one another in the file; say how many bytes."""
    start = offset
    while views:
        done = os.pwritev(fd, views, offset)
        offset, views = offset + done, advance(views, done)
    return offset - start


def give_name(temporary: str, file: str) -> None:
    """Give a file its final name, unless that is taken."""
    try:
        os.link(temporary, file)
    except FileExistsError:
        # A network file system may have done it, lost its answer, and tried again.
        if os.stat(temporary).st_nlink < 2:
            raise taken("replace", file) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(file):
            raise taken("replace", file) from None
        os.replace(temporary, file)
        return
    with suppress(OSError):  # the file is there: a second name of it does no harm
        os.unlink(temporary)


@contextmanager
def unsure(file: str, operation: str = "replace") -> Iterator[None]:
    """Say of an error that the file was replaced, though maybe not for good."""
    try:
        yield
    except OSError as error:
        why = error.reason if isinstance(error, StoreError) else str(error)
        reason = f"it was replaced, but a loss of power may undo that ({why})"
        raise StoreError(operation, file, reason, kind="unsure", errno=error.errno) from error


def entry_of(name: str, entry: os.DirEntry[str]) -> Entry | None:
    """Return what a listing tells of a file; None if it is gone."""
    if name.endswith("/"):
        return Entry(name)
    try:
        found = entry.stat()
    except FileNotFoundError:  # deleted a moment ago, or a link to nothing
        return None
    return Entry(name, found.st_size, max(found.st_mtime, found.st_ctime), found.st_mtime)


def walk(folder: str, prefix: str, recursive: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a folder, by name; not recursive, the folders in it as well."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if not entry.is_dir():
            yield prefix + entry.name, entry
        elif entry.is_symlink():
            continue  # a second name of a folder, such as `latest`
        elif recursive:
            yield from walk(entry.path, f"{prefix}{entry.name}/", recursive)
        else:
            yield f"{prefix}{entry.name}/", entry
