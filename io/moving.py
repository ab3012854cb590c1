"""How does one thread move bytes from files to a file? Half a megabyte at a time, in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs
import xxhash

from .buffers import advance
from .errors import FormatError
from .kernel import IOV_MAX
from .local import LocalStore
from .store_errors import from_os_error

__all__ = ["PIECE", "Hand", "Out", "Stretch", "write_views"]

PIECE: Final = 1 << 19
"""How many bytes move at a time: as many as stay in a processor's own cache."""

_LEAST: Final = 1 << 16  # less room than this is left empty
_OPEN: Final = 32  # files that a thread keeps open


@attrs.frozen(eq=False)
class Stretch:
    """Some bytes of a file.

    Attributes:
        store: Where the file is.
        file: Its name there.
        offset: Where they begin.
        nbytes: How many they are.
        seen: Called with their xxh3 once they were read; None if nobody wants to know it.
    """

    store: LocalStore
    file: str
    offset: int
    nbytes: int
    seen: Callable[[int], object] | None = None


class Out:
    """What a thread is about to write, from some place on.

    Attributes:
        at: Where what comes next will be.
        flushed: How often all was written; memory that was put before may be used again.
    """

    def __init__(self, fd: int, at: int) -> None:
        self._fd, self._begin, self.at = fd, at, at
        self._views: list[memoryview] = []
        self.flushed = 0

    def put(self, view: memoryview) -> None:
        """Have some bytes written, sooner or later."""
        if view.nbytes:
            self._views.append(view)
            self.at += view.nbytes
            if self.at - self._begin >= PIECE or len(self._views) == IOV_MAX:
                self.flush()

    def skip(self, nbytes: int) -> None:
        """Leave some bytes to somebody else."""
        self.flush()
        self.at = self._begin = self.at + nbytes

    def flush(self) -> None:
        """Write what there is."""
        write_views(self._fd, self._begin, self._views)
        self._begin, self._views = self.at, []
        self.flushed += 1


class Hand:
    """What a thread needs to read: a little memory, and files that it opened."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(PIECE))
        self._used = 0
        self._flushed: tuple[Out | None, int] = (None, 0)
        self._files: dict[tuple[LocalStore, str], int] = {}

    def read(self, stretch: Stretch, out: Out) -> Iterator[memoryview]:
        """Yield the bytes of a stretch, each part of which must be put out before the next."""
        fd = self._open(stretch)
        state = None if stretch.seen is None else xxhash.xxh3_64()
        done = 0
        while done < stretch.nbytes:
            view = self._take(stretch.nbytes - done, out)
            _fill(fd, stretch, stretch.offset + done, view)
            done += view.nbytes
            if state is not None:
                state.update(view)
            yield view
        if state is not None and stretch.seen is not None:
            stretch.seen(state.intdigest())

    def _take(self, nbytes: int, out: Out) -> memoryview:
        """Return memory that nothing waits in to be written."""
        state = (out, out.flushed)
        if self._flushed != state:
            self._used, self._flushed = 0, state
        room = PIECE - self._used
        if room < min(nbytes, _LEAST):
            out.flush()
            self._used, self._flushed, room = 0, (out, out.flushed), PIECE
        size = min(room, nbytes)
        self._used += size
        return self._memory[self._used - size : self._used]

    def _open(self, stretch: Stretch) -> int:
        key = stretch.store, stretch.file
        fd = self._files.get(key)
        if fd is None:
            if len(self._files) == _OPEN:
                self.close()
            try:
                fd = os.open(stretch.store.locate(stretch.file), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise FormatError(stretch.file, "it is missing") from None
            except OSError as error:
                raise from_os_error("read", stretch.file, error) from error
            self._files[key] = fd
        return fd

    def close(self) -> None:
        """Close all files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _fill(fd: int, stretch: Stretch, offset: int, view: memoryview) -> None:
    while view.nbytes:
        try:
            done = os.preadv(fd, [view], offset)
        except OSError as error:
            raise from_os_error("read", stretch.file, error) from error
        if not done:
            end = stretch.offset + stretch.nbytes
            raise FormatError(stretch.file, f"it ends at byte {offset:,}, before byte {end:,}")
        offset, view = offset + done, view[done:]


def write_views(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    """Write views that follow one another, from some place of a file on."""
    while views:
        done = os.pwritev(fd, views, offset)
        offset, views = offset + done, advance(views, done)
