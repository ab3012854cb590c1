"""Stores for tests, yours and ours: one records what is asked of it, one fails on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal

import attrs

from ..buffers import Buffer, byte_view
from ..errors import StoreError
from .base import Store, WrappedStore

# The names of calls that change nothing: in `CountingStore.operations`, and in errors.
_NAMES: Final = {"size": "size", "exists": "exists", "list": "list", "entries": "list"}
_VERBS: Final = _NAMES | {"size": "measure", "exists": "find", "read": "read", "read_all": "read"}


@attrs.frozen
class Operation:
    """One call of a store; each deleted file is one of its own."""

    # What was asked: ``read``, ``write``, ``replace``, ``size``, ``exists``, ``list``, ``delete``
    # or ``sync``.
    name: str
    path: str = ""
    nbytes: int = 0
    ranges: tuple[tuple[int, int], ...] = ()  # for a read, its byte offsets and lengths


class CountingStore(WrappedStore):
    """A store that records the calls that succeed: ``operations``, in the order in which they end.

    >>> from shardplan.io.stores.base import open_store
    >>> store = CountingStore(open_store("memory://counting"))
    >>> store.write("a", [bytes(1000)])
    1000
    >>> store.read("a", [(100, memoryview(bytearray(10)))])
    10
    >>> store.bytes_read(), store.bytes_written("a"), store.operations[-1].ranges
    (10, 1000, ((100, 10),))
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def clear(self) -> None:
        """Forget the calls so far."""
        self.operations.clear()

    def bytes_read(self, path: str | None = None) -> int:
        """Return how many bytes were read, of one file or of all."""
        return self._total({"read"}, path)

    def bytes_written(self, path: str | None = None) -> int:
        """Return how many bytes were written, into one file or into all."""
        return self._total({"write", "replace"}, path)

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Record a call that has nothing but a name and a path."""
        yield path
        if operation in _NAMES or operation == "sync":
            self.operations.append(Operation(_NAMES.get(operation, operation), path))

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Record a read."""
        done = super().read(path, ranges)
        asked = tuple((offset, view.nbytes) for offset, view in ranges)
        self.operations.append(Operation("read", path, done, asked))
        return done

    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Record a write."""
        done = super().write(path, parts, nbytes=nbytes, atomic=atomic)
        self.operations.append(Operation("write", path, done))
        return done

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Record a read of a whole file."""
        data = super().read_all(path, limit=limit)
        self.operations.append(Operation("read", path, len(data), ((0, len(data)),)))
        return data

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Record a replacement."""
        super().replace(path, data, overwrite=overwrite)
        self.operations.append(Operation("replace", path, len(data)))

    def delete(self, paths: Iterable[str]) -> None:
        """Record each deleted file."""
        paths = tuple(paths)
        super().delete(paths)
        self.operations.extend(Operation("delete", path) for path in paths)

    def _total(self, names: set[str], path: str | None) -> int:
        counted = (o for o in self.operations if o.name in names and path in {None, o.path})
        return sum(operation.nbytes for operation in counted)


class InjectedError(StoreError):
    """The failure of a `FaultyStore`; its ``kind`` is ``stopped``."""


class FaultyStore(WrappedStore):
    """A store that fails at one chosen change: a write, a replacement, a deletion or a sync.

    Run once without a fault to count the ``changes``, then once for each of them: the store must
    still hold a checkpoint that loads.

    Args:
        inner: The store to change.
        fail_at: Which change fails, counted from 0; none if left out.
        questions: Whether calls that change nothing are counted, and fail, as well.
        mode: ``"raise"`` fails this once. ``"stop"`` acts like a kill: this call and every later
            one raises, and nothing more reaches the store. ``"late"`` fails this once, like a
            request that times out, and happens when `arrive` is called.
        landed: How much of the failing change happens at once, from 0 to 1: that share of a
            file's bytes, or of the files to delete. An atomic one happens only if this is 1: done,
            but the answer was lost. A late change does not happen at once.

    >>> from shardplan.io.stores.base import open_store
    >>> store = open_store("memory://faulty")
    >>> FaultyStore(store, fail_at=0).write("a", [b"abc", b"def"])
    Traceback (most recent call last):
    shardplan.io.stores.testing.InjectedError: cannot write a: change 0 fails, as the test wants it
    >>> store.list(), store.size("a")
    (('a',), 3)
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | None = None,
        questions: bool = False,
        mode: Literal["raise", "stop", "late"] = "raise",
        landed: float = 0.5,
    ) -> None:
        if mode not in {"raise", "stop", "late"} or not 0 <= landed <= 1:
            what = "mode is raise, stop or late, landed from 0 to 1"
            raise ValueError(f"{what}; not {mode}, {landed}")
        super().__init__(inner)
        self.changes = 0
        self._fail_at, self._questions, self._mode, self._landed = fail_at, questions, mode, landed
        self._stopped = False
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Fail instead of a call that changes nothing, if it is its turn."""
        if operation in _VERBS:
            self._refuse_stopped(_VERBS[operation], path)
            if self._questions and self._fails(_VERBS[operation], path):
                raise self._error(_VERBS[operation], path)
        yield path

    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Write; or write the first bytes and fail."""
        if not self._fails("write", path):
            return self.inner.write(path, parts, nbytes=nbytes, atomic=atomic)
        data = b"".join(map(byte_view, parts))
        first = data[: int(self._landed * len(data))]
        now = not atomic or self._landed == 1
        raise self._failed(
            "write",
            path,
            lambda: self.inner.write(path, [data], atomic=atomic),
            lambda: self.inner.write(path, [first], atomic=atomic) if now else None,
        )

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Replace; or fail before or after."""
        replace = partial(self.inner.replace, path, data, overwrite=overwrite)
        if self._fails("replace", path):
            now = replace if self._landed == 1 else lambda: None
            raise self._failed("replace", path, replace, now)
        replace()

    def delete(self, paths: Iterable[str]) -> None:
        """Delete; or delete the first few and fail."""
        paths = tuple(paths)
        first, names = paths[: int(self._landed * len(paths))], ", ".join(paths)
        if self._fails("delete", names):
            later, now = (lambda: self.inner.delete(paths)), (lambda: self.inner.delete(first))
            raise self._failed("delete", names, later, now)
        self.inner.delete(paths)

    def sync(self) -> None:
        """Sync; or fail."""
        if self._fails("sync", self.url):
            raise self._error("sync", self.url)
        self.inner.sync()

    def arrive(self) -> None:
        """Let the change happen that failed in the mode ``"late"``."""
        late, self._late = self._late, []
        for change in late:
            change()

    def _failed(
        self, operation: str, path: str, later: Callable[[], object], now: Callable[[], object]
    ) -> InjectedError:
        """Let a failing change happen in part now, or later when it arrives; return the error."""
        if self._mode == "late":
            self._late.append(later)
        else:
            now()
        return self._error(operation, path)

    def _refuse_stopped(self, operation: str, path: str) -> None:
        if self._stopped:
            raise InjectedError(operation, path, "the store was stopped before", kind="stopped")

    def _fails(self, operation: str, path: str) -> bool:
        """Count a call, and return whether it is the one to fail."""
        with self._lock:
            self._refuse_stopped(operation, path)
            fails = self.changes == self._fail_at
            self.changes += 1
            self._stopped = fails and self._mode == "stop"
            return fails

    def _error(self, operation: str, path: str) -> InjectedError:
        what = "call" if self._questions else "change"
        reason = f"{what} {self._fail_at} fails, as the test wants it"
        return InjectedError(operation, path, reason, kind="stopped")
