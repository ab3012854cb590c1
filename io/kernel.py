"""What is asked of the operating system: hints that make large writes faster, durable names, locks.

Where a file system does not know of such a thing, each quietly does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

__all__ = ["IOV_MAX", "locked_folder", "reserve_space", "start_writeback", "sync_folder"]

IOV_MAX: Final = max(16, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16
"""How many buffers one call of preadv or pwritev takes."""

_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: a file that a kill cuts short looks short
_WRITE: Final = 2  # SYNC_FILE_RANGE_WRITE: start, and do not wait
_PATIENCE: Final = 10.0  # seconds that a lock is waited for
_TICK: Final = 0.01
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@cache
def _function(name: str, *types: Any) -> Any:
    """Return a function of Linux's C library, or None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


def reserve_space(fd: int, nbytes: int) -> None:
    """Reserve room for a file that is about to be written, so that a full disk shows at once.

    The C library's posix_fallocate is avoided: where a file system cannot reserve, it writes.

    Raises:
        OSError: There is not that much space.
    """
    fallocate = _function(
        "fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    ) or _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate and nbytes and fallocate(fd, _KEEP_SIZE, 0, nbytes):
        code = ctypes.get_errno()
        if code in _NO_SPACE:
            raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with these bytes now, while the next are prepared."""
    signature = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sync_file_range := _function("sync_file_range", *signature):
        sync_file_range(fd, offset, nbytes, _WRITE)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable, on file systems that know of such a thing."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)


@contextmanager
def locked_folder(path: str) -> Iterator[None]:
    """Keep others who ask for the same from a folder, for a moment.

    Where a disk knows no locks there is none, and nobody is waited for who holds one for many
    seconds: such a process was stopped.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | os.O_CLOEXEC)
    try:
        _lock(fd)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked just now has it, too
        os.close(fd)


def _lock(fd: int) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TICK)
        except OSError:
            return
