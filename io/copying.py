"""How do bytes get into a file as they are? Out of memory or other files, by several threads.

The layout of a file is known before its first byte is, so its parts can be written in any order.
They move half a megabyte at a time: what was just read is summed and written while it is in the
processor's cache. Only local files are written so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import attrs

from .commit import SURE, unsure_commit
from .crc import combine_crc, sum_crc
from .kernel import start_writeback
from .local import LocalStore
from .moving import PIECE, Hand, Out, Stretch, write_views
from .pool import Pool, processors, stop_check
from .signals import undisturbed
from .stores import Store, StoreError

__all__ = [
    "Block",
    "Content",
    "Seal",
    "literal",
    "threads_for",
    "write_direct",
    "write_file",
]

_TASK: Final = 16 << 20
_SMALL: Final = 1 << 16  # bytes an entry has where several threads would only wait for each other


@attrs.frozen(eq=False)
class Block:
    """Some megabytes to write, as they lie somewhere.

    Attributes:
        parts: Where they lie, in order.
        done: Called when they were read.
    """

    parts: Sequence[memoryview | Stretch]
    done: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(part.nbytes for part in self.parts)


@attrs.frozen(eq=False)
class Content:
    """What comes next in a file.

    Attributes:
        blocks: Its bytes.
        record: The number of the record whose checksum they count to; None if they count to none.
    """

    blocks: Sequence[Block]
    record: int | None = None


@attrs.frozen(eq=False)
class Seal:
    """Bytes that depend on the checksums of records before them.

    Attributes:
        nbytes: How many they are.
        records: The numbers of those records.
        make: Given the CRC-32 of each, returns the bytes.
    """

    nbytes: int
    records: Sequence[int]
    make: Callable[[Sequence[int]], bytes]


def literal(data: bytes) -> Content:
    """Return bytes that are known, as what comes next in a file."""
    return Content([Block([memoryview(data)])])


def threads_for(pool: Pool, files: int) -> int:
    """Say how many threads should write one file, of several that a pool has to write.

    >>> with Pool(max_workers=4) as pool:
    ...     threads_for(pool, files=1000)
    1
    """
    at_once = pool.max_workers if pool.inside else min(pool.max_workers, files)
    return max(1, processors() // max(at_once, 1))


def write_direct(
    store: LocalStore,
    path: str,
    contents: Sequence[Content | Seal],
    *,
    nbytes: int,
    atomic: bool = False,
    threads: int = 1,
) -> None:
    """Write a file whose parts follow one another; see `Store.write`.

    Args:
        store: Where to.
        path: The file.
        contents: What it is to hold, in order.
        nbytes: Its size.
        atomic: Whether readers must see the old file or the new one.
        threads: How many threads take part.

    Raises:
        FormatError: A file that bytes come from is missing or too short.
        StoreError: The disk is full, or fails. Nothing is left of the file.
        StoppedError: What it is a part of has failed; see `check_stopped`.
    """
    with store.making(path, nbytes=nbytes, atomic=atomic) as fd:
        work = _Work(fd, contents)
        work.run(threads)
        work.seal()


def write_file(
    store: Store,
    path: str,
    contents: Callable[[], Sequence[Content | Seal] | None],
    parts: Callable[[], Iterable[memoryview]],
    *,
    nbytes: int,
    atomic: bool = False,
    threads: int = 1,
) -> None:
    """Write a file: by several threads where its bytes only have to be copied, else in order.

    Args:
        store: Where to.
        path: The file.
        contents: Says what it is made of; None if some of that must be made.
        parts: Makes its bytes, in order.
        nbytes: Its size.
        atomic: Whether readers must see the old file or the new one. Such a file is a checkpoint
            of its own: it is committed when it appears.
        threads: How many threads take part, if several can.

    Raises:
        UnsureCommitError: An atomic file may be there, or come to be there, though the store said
            no.
        StoreError: The store failed. Nothing is left of the file.
    """
    direct = contents() if isinstance(store, LocalStore) else None
    ended = direct is not None  # whether the store had all bytes

    def watched() -> Iterator[memoryview]:
        nonlocal ended
        yield from parts()
        ended = True

    try:
        if direct is not None and isinstance(store, LocalStore):
            write_direct(store, path, direct, nbytes=nbytes, atomic=atomic, threads=threads)
        else:
            store.write(path, watched(), nbytes=nbytes, atomic=atomic)
    except StoreError as error:
        known = error.kind != "unsure" if direct is not None else error.kind in SURE
        if not atomic or not ended or known:
            raise
        raise unsure_commit(store, error, f"{path} was put in place") from error


@attrs.frozen(eq=False)
class _Task:
    """A part of a file that one thread writes: what comes at which place, without holes."""

    at: int
    entries: Sequence[tuple[Seal | Block, int | None]]


class _Work:
    """A file in the making."""

    def __init__(self, fd: int, contents: Sequence[Content | Seal]) -> None:
        self._fd = fd
        self._tasks = list(_tasks(contents))
        self._next = iter(self._tasks)
        self._lock = threading.Lock()
        self._stopped = False
        self._check = stop_check()
        self._size: dict[int, int] = {}  # of each record
        for content in contents:
            if isinstance(content, Content) and content.record is not None:
                self._size[content.record] = sum(block.nbytes for block in content.blocks)
        self._sums: dict[int, list[tuple[int, int, int]]] = {r: [] for r in self._size}
        self._late: list[tuple[int, Seal]] = []

    def run(self, threads: int) -> None:
        """Write all but some seals."""
        entries = sum(len(task.entries) for task in self._tasks)
        small = entries * _SMALL > len(self._tasks) * _TASK
        threads = min(threads, len(self._tasks))
        if threads <= 1 or small:  # then it is Python that takes the time, a thread at a time
            self._drain()
            return
        with ThreadPoolExecutor(threads, "shardplan-copy") as executor:
            try:
                with undisturbed():
                    futures = [executor.submit(self._drain) for _ in range(threads)]
                for future in futures:
                    future.result()
            finally:
                self._stopped = True

    def seal(self) -> None:
        """Write the seals that had to wait for several threads."""
        sums = {record: _total(parts) for record, parts in self._sums.items()}
        for at, seal in self._late:
            data = _made(seal, [sums[record] for record in seal.records])
            write_views(self._fd, at, [memoryview(data)])

    def _drain(self) -> None:
        hand = Hand()
        try:
            while not self._stopped:
                with self._lock:
                    task = next(self._next, None)
                if task is None:
                    return
                self._carry_out(task, hand)
        except BaseException:
            self._stopped = True
            raise
        finally:
            hand.close()

    def _carry_out(self, task: _Task, hand: Hand) -> None:
        out, known = Out(self._fd, task.at), dict[int, int]()
        for entry, record in task.entries:
            if isinstance(entry, Seal):
                if all(r in known or not self._size[r] for r in entry.records):
                    out.put(memoryview(_made(entry, [known.get(r, 0) for r in entry.records])))
                else:
                    self._late.append((out.at, entry))
                    out.skip(entry.nbytes)
                continue
            begin, crc = out.at, 0 if record is not None else None
            for part in entry.parts:
                pieces = hand.read(part, out) if isinstance(part, Stretch) else _cut(part)
                for piece in pieces:
                    self._check()
                    if crc is not None:
                        crc = sum_crc(piece, crc)
                    out.put(piece)
            entry.done()
            if record is not None and crc is not None:
                self._sums[record].append((begin, crc, out.at - begin))
                if out.at - begin == self._size[record]:
                    known[record] = crc
        out.flush()
        start_writeback(self._fd, task.at, out.at - task.at)


def _tasks(contents: Sequence[Content | Seal]) -> Iterator[_Task]:
    at = begin = 0
    entries: list[tuple[Seal | Block, int | None]] = []
    for content in contents:
        if isinstance(content, Seal):
            entries.append((content, None))
            at += content.nbytes
            continue
        for block in content.blocks:
            if entries and at + block.nbytes - begin > _TASK:
                yield _Task(begin, entries)
                begin, entries = at, []
            entries.append((block, content.record))
            at += block.nbytes
    if entries:
        yield _Task(begin, entries)


def _made(seal: Seal, sums: Sequence[int]) -> bytes:
    data = seal.make(sums)
    assert len(data) == seal.nbytes
    return data


def _total(parts: Sequence[tuple[int, int, int]]) -> int:
    if len(parts) == 1:
        return parts[0][1]
    crc = 0
    for _, part, nbytes in sorted(parts):
        crc = combine_crc(crc, part, nbytes)
    return crc


def _cut(view: memoryview) -> Iterator[memoryview]:
    if view.nbytes <= PIECE:
        return iter([view])
    return (view[i : i + PIECE] for i in range(0, view.nbytes, PIECE))
