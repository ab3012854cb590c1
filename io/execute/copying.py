"""Write files whose layout is known in advance.

A file is described as `Content` (bytes that lie in memory or in other files, or are made as they
are written) and `Seal` (bytes that depend on checksums of what comes before). A store that takes
bytes in order gets them so. On a local disk, parts that only have to be copied are written in any
order by several threads, half a megabyte at a time: what was just read is summed and written while
it is in the processor's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

import attrs

from shardplan.planning.columns import column
from shardplan.planning.storage import write_tasks

from ..checksums import XXH3, Checksum, combine_crc, sum_crc
from ..errors import FormatError, from_os_error
from ..pool import Pool, check_stopped, processors
from ..stores.base import Store, StoreError
from ..stores.local_files import IOV_MAX, start_writeback, write_run
from .commit import SURE, unsure_commit

__all__ = [
    "PIECE",
    "STAGED",
    "Block",
    "Content",
    "FileContents",
    "Deferred",
    "Seal",
    "Stretch",
    "literal",
    "threads_for",
    "write_file",
]

PIECE: Final = 1 << 19
"""How many bytes move at a time: as many as stay in a processor's own cache."""

STAGED: Final = 96 << 20
"""Bytes of memory that writing one file may take."""

_WRITEBACK: Final = 16 << 20  # bytes after which the system is asked to bring them to the disk
_LEAST: Final = 1 << 16  # less room than this is left empty
_OPEN: Final = 32  # files that are kept open to be read


@attrs.frozen(eq=False)
class Stretch:
    """Some bytes of a local file."""

    path: str  # where the file is
    file: str  # its name in errors
    offset: int  # where they begin
    nbytes: int  # how many they are
    # Called with their checksum once they were read; None if that is not needed.
    seen: Callable[[int], object] | None = None
    checksum: Checksum = XXH3


@attrs.frozen(eq=False)
class Deferred:
    """Some megabytes that do not lie anywhere yet."""

    nbytes: int  # how many bytes they are
    make: Callable[[], memoryview]  # returns them


@attrs.frozen(eq=False)
class Block:
    """Some megabytes to write."""

    parts: Sequence[memoryview | Stretch | Deferred]  # where they lie, in order
    done: Callable[[], object] = lambda: None  # called when they were read

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(part.nbytes for part in self.parts)


@attrs.frozen(eq=False)
class Content:
    """What comes next in a file."""

    blocks: Sequence[Block]  # its bytes
    # The number of the record whose checksum they count to; None if they count to none.
    record: int | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(block.nbytes for block in self.blocks)


@attrs.frozen(eq=False)
class Seal:
    """Bytes that depend on the checksums of records before them."""

    nbytes: int  # how many they are
    records: Sequence[int]  # the numbers of those records
    make: Callable[[Sequence[int]], bytes]  # given the CRC-32 of each, returns the bytes

    def view(self, sums: Mapping[int, int]) -> memoryview:
        """Return the bytes, given the CRC-32 of each record; that of an empty one may be left out.

        Raises:
            ValueError: They are more or fewer than was said.
        """
        data = self.make([sums.get(record, 0) for record in self.records])
        return _checked(memoryview(data), self.nbytes)


def literal(data: bytes) -> Content:
    """Return bytes that are known, as what comes next in a file."""
    return Content([Block([memoryview(data)])])


def threads_for(pool: Pool, files: int) -> int:
    """Return how many threads should write one file, of several that a pool has to write.

    >>> with Pool(max_workers=4) as pool:
    ...     threads_for(pool, files=1000)
    1
    """
    at_once = pool.max_workers if pool.inside else min(pool.max_workers, files)
    return max(1, processors() // max(at_once, 1))


class FileContents:
    r"""The bytes of a file, for `Store.write_contents`.

    Args:
        describe: Returns what the file holds, in order. It is called with True where bytes may be
            taken from other files, and with False where they must be in memory.
        threads: How many threads may write it to a disk.

    Attributes:
        handed_over: Whether `parts` has given its last byte: the store may have all of them.

    >>> sealed = Seal(4, [0], lambda sums: sums[0].to_bytes(4, "little"))
    >>> text = Content([Block([memoryview(b"abc")])], record=0)
    >>> b"".join(FileContents(lambda local: [text, sealed]).parts())
    b'abc\xc2A$5'
    """

    def __init__(
        self, describe: Callable[[bool], Sequence[Content | Seal]], threads: int = 1
    ) -> None:
        self._describe, self._threads = describe, threads
        self.handed_over = False

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes in order."""
        sums: dict[int, int] = {}
        for content in self._describe(False):
            if isinstance(content, Seal):
                yield content.view(sums)
                continue
            crc = 0
            for block in content.blocks:
                for part in block.parts:
                    assert not isinstance(part, Stretch)
                    for piece in _cut(part):
                        crc = crc if content.record is None else sum_crc(piece, crc)
                        yield piece
                block.done()
            if content.record is not None:
                sums[content.record] = crc
        self.handed_over = True

    def write_to(self, fd: int) -> None:
        """Write the bytes to a local file, in any order.

        Raises:
            FormatError: A file that bytes come from is missing or too short.
            StoppedError: The `Pool.map` that this is a part of has failed.
        """
        contents = self._describe(True)
        every = [block for one in contents if isinstance(one, Content) for block in one.blocks]
        made = any(isinstance(part, Deferred) for block in every for part in block.parts)
        tasks = write_tasks(column([block.nbytes for block in every]))
        threads = min(self._threads, len(tasks))
        if made or threads < 2:  # what must be made is read ahead, in order
            _write_in_order(fd, contents)
            return
        blocks, seals = _place(contents)
        with Pool(max_workers=threads) as pool:
            written = pool.map(partial(_write_blocks, fd), [blocks[i:j] for i, j in tasks])
        crcs = [crc for one in written for crc in one]
        sums: dict[int, int] = {}
        for one, crc in zip(blocks, crcs, strict=True):
            if one.record is not None:
                sums[one.record] = combine_crc(sums.get(one.record, 0), crc, one.block.nbytes)
        for at, seal in seals:
            write_run(fd, at, [seal.view(sums)])


def write_file(
    store: Store, path: str, contents: FileContents, *, nbytes: int, atomic: bool = False
) -> None:
    """Write a file; see `Store.write_contents`.

    One that is to be atomic is a checkpoint of its own: it is committed when it appears.

    Raises:
        UnsureCommitError: An atomic file may be there, or may still appear, though the store
            failed.
        StoreError: The store failed. Nothing is left of the file.
    """
    try:
        store.write_contents(path, contents, nbytes=nbytes, atomic=atomic)
    except StoreError as error:
        unsure = error.kind == "unsure" or (contents.handed_over and error.kind not in SURE)
        if not atomic or not unsure:
            raise
        raise unsure_commit(store, error, f"{path} was put in place") from error


@attrs.frozen(eq=False)
class _Placed:
    """A block, where it goes in the file, and the record whose checksum it counts to."""

    at: int
    block: Block
    record: int | None


def _place(contents: Sequence[Content | Seal]) -> tuple[list[_Placed], list[tuple[int, Seal]]]:
    """Return the blocks of a file and its seals, each with its place."""
    at, blocks, seals = 0, list[_Placed](), list[tuple[int, Seal]]()
    for content in contents:
        if isinstance(content, Seal):
            seals.append((at, content))
            at += content.nbytes
            continue
        for block in content.blocks:
            blocks.append(_Placed(at, block, content.record))
            at += block.nbytes
    return blocks, seals


def _write_in_order(fd: int, contents: Sequence[Content | Seal]) -> None:
    sums: dict[int, int] = {}
    with closing(_Mover(fd, 0)) as mover:
        for content in contents:
            if isinstance(content, Seal):
                mover.put(content.view(sums))
                continue
            crc = 0
            for block in content.blocks:
                crc = mover.move(block, content.record is not None, crc)
            if content.record is not None:
                sums[content.record] = crc
        mover.flush()


def _write_blocks(fd: int, blocks: Sequence[_Placed]) -> list[int]:
    """Write some blocks of a file, and return the CRC-32 of each that counts to a record."""
    with closing(_Mover(fd, blocks[0].at)) as mover:
        crcs = []
        for one in blocks:
            mover.go_to(one.at)
            crcs.append(mover.move(one.block, one.record is not None))
        mover.flush()
    return crcs


class _Mover:
    """Moves bytes into a file, from some place on."""

    def __init__(self, fd: int, at: int) -> None:
        self._fd, self._begin, self._at, self._started = fd, at, at, at
        self._views: list[memoryview] = []  # what waits to be written
        self._memory, self._used = memoryview(bytearray(PIECE)), 0
        self._files: dict[str, int] = {}

    def move(self, block: Block, summed: bool, crc: int = 0) -> int:
        """Queue a block to be written; continue a CRC-32 if it is ``summed``."""
        for part in block.parts:
            for piece in self._read(part) if isinstance(part, Stretch) else _cut(part):
                check_stopped()
                crc = sum_crc(piece, crc) if summed else crc
                self.put(piece)
        block.done()
        if self._at - self._started >= _WRITEBACK:
            self.flush()
        return crc

    def put(self, view: memoryview) -> None:
        """Queue bytes to be written."""
        if view.nbytes:
            self._views.append(view)
            self._at += view.nbytes
            if self._at - self._begin >= PIECE or len(self._views) == IOV_MAX:
                self._write()

    def go_to(self, at: int) -> None:
        """Continue at another place of the file."""
        if at != self._at:
            self.flush()
            self._at = self._begin = self._started = at

    def flush(self) -> None:
        """Write what is queued, and let the system begin to bring it to the disk."""
        self._write()
        start_writeback(self._fd, self._started, self._at - self._started)
        self._started = self._at

    def _write(self) -> None:
        """Write what is queued; its memory can then be used again."""
        write_run(self._fd, self._begin, self._views)
        self._begin, self._views, self._used = self._at, [], 0

    def close(self) -> None:
        """Close the files that were read."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _read(self, stretch: Stretch) -> Iterator[memoryview]:
        """Yield the bytes of a stretch; each part must be put before the next is asked for."""
        fd = self._open(stretch)
        state = None if stretch.seen is None else stretch.checksum.start()
        done = 0
        while done < stretch.nbytes:
            view = self._take(stretch.nbytes - done)
            _fill(fd, stretch, stretch.offset + done, view)
            done += view.nbytes
            if state is not None:
                state.update(view)
            yield view
        if state is not None and stretch.seen is not None:
            stretch.seen(state.intdigest())

    def _take(self, nbytes: int) -> memoryview:
        """Return memory that holds nothing queued."""
        if PIECE - self._used < min(nbytes, _LEAST):
            self._write()
        size = min(PIECE - self._used, nbytes)
        self._used += size
        return self._memory[self._used - size : self._used]

    def _open(self, stretch: Stretch) -> int:
        if stretch.path not in self._files:
            if len(self._files) == _OPEN:
                self.close()
            try:
                self._files[stretch.path] = os.open(stretch.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise FormatError(stretch.file, "it is missing") from None
            except OSError as error:
                raise from_os_error("read", stretch.file, error) from error
        return self._files[stretch.path]


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


def _cut(part: memoryview | Deferred) -> Iterator[memoryview]:
    view = _checked(part.make(), part.nbytes) if isinstance(part, Deferred) else part
    return (view[i : i + PIECE] for i in range(0, view.nbytes, PIECE))


def _checked(view: memoryview, nbytes: int) -> memoryview:
    if view.nbytes != nbytes:
        raise ValueError(f"{nbytes} bytes were announced, and {view.nbytes} were made")
    return view
