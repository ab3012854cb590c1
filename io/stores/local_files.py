"""System calls of `LocalStore`, for one file or folder at a time.

Hints for faster writes, durable names and locks do nothing on file systems that lack them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final

import numpy as np

from shardplan.planning.columns import Ints

from ..buffers import Bytes, Run, advance
from ..clib import c_function
from ..errors import StoreError, from_os_error, not_a_file, short

IOV_MAX: Final = max(16, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16
"""How many buffers one call of preadv or pwritev takes."""

TEMPORARY: Final = ".tmp"
"""The end of the name of a file that is not in place yet."""

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE, so that an unfinished file is short
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE: start, and do not wait
_PATIENCE: Final = 10.0  # seconds to wait for a lock
_TICK: Final = 0.01  # seconds between attempts
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

PAGE: Final = mmap.ALLOCATIONGRANULARITY
"""The least bytes that the system reads."""

_POPULATE: Final = 22  # MADV_POPULATE_READ, of Linux 5.14
_NO_RESERVE: Final = 0x4000  # MAP_NORESERVE


@contextmanager
def reported(operation: str, file: str) -> Iterator[None]:
    """Turn errors of the operating system into `StoreError`."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise from_os_error(operation, file, error) from error


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Give a descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(file: str) -> Iterator[int]:
    """Open a file for reading; refuse pipes and devices, which may block or never end."""
    with closing(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise not_a_file("read", file, is_folder=stat.S_ISDIR(mode))
        yield fd


def check_ranges(fd: int, file: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Refuse ranges (offsets and lengths) that reach past the end of a file."""
    size = os.fstat(fd).st_size
    for offset, length in ranges:
        if offset + length > size:
            raise short(file, offset, length, size)


def read_runs(fd: int, file: str, runs: Sequence[Run]) -> int:
    """Fill buffers, run by run; return how many bytes were read."""
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
    """Fill buffers a piece at a time, and yield each piece once it is filled."""
    with reported("read", file):
        for offset, view in asked:
            for low in range(0, len(view), max_bytes):
                piece = view[low : low + max_bytes]
                done = os.preadv(fd, (piece,), offset + low)
                if done < len(piece):
                    read_runs(fd, file, [(offset + low + done, [piece[done:]])])
                yield piece


def read_parts(fd: int, file: str, size: int) -> Iterator[bytes]:
    """Yield a file's bytes, all of them at once if the system returns them at once."""
    done = 0
    while done < size:
        part = os.pread(fd, size - done, done)
        if not part:  # the file was longer a moment ago
            raise short(file, done, size - done, os.fstat(fd).st_size)
        yield part
        done += len(part)


def write_run(fd: int, offset: int, views: Sequence[memoryview]) -> int:
    """Write buffers that follow one another in the file; return how many bytes."""
    start = offset
    while views:
        done = os.pwritev(fd, views, offset)
        offset, views = offset + done, advance(views, done)
    return offset - start


def link(source: str, target: str) -> bool:
    """Give a file a second name; return False if it is taken, or the disk has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        # A network file system may have linked it, lost the answer, and tried again.
        return os.path.exists(target) and os.path.samefile(source, target)
    return True


@contextmanager
def unsure(file: str, operation: str = "replace") -> Iterator[None]:
    """Report errors as: the file was replaced, but maybe not durably."""
    try:
        yield
    except OSError as error:
        why = error.reason if isinstance(error, StoreError) else str(error)
        reason = f"it was replaced, but a loss of power may undo that ({why})"
        raise StoreError(operation, file, reason, kind="unsure", errno=error.errno) from error


def walk(folder: str, prefix: str, recursive: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a folder with their names; folders too, if not recursive."""
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


@cache
def can_map() -> bool:
    """Return whether the system can report unreadable pages, which else would kill the process."""
    try:
        with mmap.mmap(-1, PAGE) as page:
            page.madvise(_POPULATE)
    except (AttributeError, OSError, ValueError):
        return False
    return True


def map_ranges(fd: int, starts: Ints, lengths: Ints, *, touch: bool = True) -> Bytes:
    """Map a file's pages from the start of the first range to the end of the last.

    With ``touch``, all pages of the ranges are requested first: an unreadable one is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(bytes(range(100)))
    ...     file.flush()
    ...     found = map_ranges(file.fileno(), np.array([90, 3]), np.array([4, 4]))
    >>> found[:4].tolist(), found[87:].tolist()
    ([3, 4, 5, 6], [90, 91, 92, 93])
    """
    order = np.argsort(starts, kind="stable")
    low, ends = starts[order] // PAGE * PAGE, (starts + lengths)[order]
    first, size = int(low[0]), int(ends.max() - low[0])
    writable = mmap.PROT_READ | mmap.PROT_WRITE  # private: a write would not reach the file
    flags = mmap.MAP_PRIVATE | _NO_RESERVE  # pages that are never written take no memory
    pages = mmap.mmap(fd, size, flags=flags, prot=writable, offset=first)
    reach = np.maximum.accumulate(-(-ends // PAGE) * PAGE)
    apart = np.flatnonzero(low[1:] > reach[:-1])  # the last range before each gap of whole pages
    runs = zip(low[[0, *(apart + 1)]].tolist(), reach[[*apart, -1]].tolist(), strict=True)
    for begin, end in runs if touch else ():
        pages.madvise(_POPULATE, begin - first, min(end - first, size) - (begin - first))
    return np.frombuffer(pages, np.uint8)[int(starts.min()) - first :]


def reserve_space(fd: int, nbytes: int) -> None:
    """Reserve space for a file that is about to be written, so that a full disk fails at once.

    The C library's posix_fallocate is avoided: where a file system cannot reserve, it writes.
    """
    signature = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fallocate = c_function("fallocate64", *signature) or c_function("fallocate", *signature)
    if fallocate and nbytes and fallocate(fd, _KEEP_SIZE, 0, nbytes):
        code = ctypes.get_errno()
        if code in _NO_SPACE:
            raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Start writing these bytes to the disk now, while the next are prepared."""
    signature = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sync_file_range := c_function("sync_file_range", *signature):
        sync_file_range(fd, offset, nbytes, _WRITE)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable, on file systems that support it."""
    with closing(os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise


@contextmanager
def locked_folder(path: str) -> Iterator[None]:
    """Lock a folder against other callers of this, for a moment, on a disk that has locks.

    A lock that is held for many seconds is ignored: its process was stopped.
    """
    end = time.monotonic() + _PATIENCE
    with closing(os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | os.O_CLOEXEC)) as fd:
        try:
            with suppress(OSError):
                while not _try_lock(fd) and time.monotonic() < end:
                    time.sleep(_TICK)
            yield
        finally:
            with suppress(OSError):  # explicitly: a process that was just forked has it, too
                fcntl.flock(fd, fcntl.LOCK_UN)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def temporary(file: str) -> str:
    """Return a name for a file until it is in place."""
    return f"{file}.{secrets.token_hex(8)}{TEMPORARY}"


def is_temporary(name: str, file: str) -> bool:
    """Return whether a killed `LocalStore.replace` of a file leaves such a name behind."""
    pattern = rf"{re.escape(file)}\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}"
    return re.fullmatch(pattern, name) is not None
