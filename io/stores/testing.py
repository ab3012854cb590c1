"""Stores for tests: one counts what is asked of it, one fails.

They wrap any store, and are meant for your tests as much as for ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import attrs

from ..buffers import Buffer, byte_view
from ..errors import StoreError
from .base import Store
from .folders import WrappedStore

__all__ = ["CountingStore", "FaultyStore", "InjectedError", "Operation"]

# By method, what an operation that has nothing but a path is called in `CountingStore.operations`.
_BARE: Final = {
    "size": "size",
    "exists": "exists",
    "list": "list",
    "entries": "list",
    "sync": "sync",
}
# By method that changes nothing, what an error says of it.
_QUESTIONS: Final = {
    "read": "read",
    "read_all": "read",
    "size": "measure",
    "exists": "find",
    "list": "list",
    "entries": "list",
}


@attrs.frozen
class Operation:
    """One call of a store.

    Attributes:
        name: What was asked: ``read`` (a whole file, too), ``write``, ``replace``, ``size``,
            ``exists``, ``list`` (with sizes and times, too), ``delete`` or ``sync``.
        path: The file or folder; the empty name where there is none. Each deleted file is an
            operation of its own.
        nbytes: How many bytes were read or written.
        ranges: For a read, its byte offsets and lengths.
    """

    name: str
    path: str = ""
    nbytes: int = 0
    ranges: tuple[tuple[int, int], ...] = ()


class CountingStore(WrappedStore):
    """A store that remembers what was asked of it, once it succeeded.

    Attributes:
        operations: All calls so far, in the order in which they ended.

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
        self.operations: list[Operation] = []  # appended to by any thread

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
        """Count a call for which its name and path are all there is to say."""
        yield path
        if operation in _BARE:
            self.operations.append(Operation(_BARE[operation], path))

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Count a read."""
        done = super().read(path, ranges)
        asked = tuple((offset, view.nbytes) for offset, view in ranges)
        self.operations.append(Operation("read", path, done, asked))
        return done

    def write(
        self,
        path: str,
        parts: Iterable[Buffer],
        *,
        nbytes: int | None = None,
        atomic: bool = False,
    ) -> int:
        """Count a write."""
        done = super().write(path, parts, nbytes=nbytes, atomic=atomic)
        self.operations.append(Operation("write", path, done))
        return done

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Count a read of a whole file."""
        data = super().read_all(path, limit=limit)
        self.operations.append(Operation("read", path, len(data), ((0, len(data)),)))
        return data

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Count a replacement."""
        super().replace(path, data, overwrite=overwrite)
        self.operations.append(Operation("replace", path, len(data)))

    def delete(self, paths: Iterable[str]) -> None:
        """Count each deleted file."""
        paths = tuple(paths)
        super().delete(paths)
        self.operations.extend(Operation("delete", path) for path in paths)

    def _total(self, names: set[str], path: str | None) -> int:
        counted = (o for o in self.operations if o.name in names and path in {None, o.path})
        return sum(operation.nbytes for operation in counted)


class InjectedError(StoreError):
    """The failure that a `FaultyStore` was asked for; its ``kind`` is ``stopped``."""


class FaultyStore(WrappedStore):
    """A store that fails at one chosen change: a write, a replacement, a deletion or a sync.

    Run once without a fault to learn how many changes there are, then once for each of them:
    whatever is found in the store afterwards must still load. With ``questions`` it may fail at
    any call.

    Args:
        inner: The store to change.
        fail_at: Which change fails, counted from 0; none if left out.
        questions: Whether calls that change nothing count as well, and fail in their turn: reads,
            sizes and listings.
        mode: ``"raise"`` fails this once. ``"stop"`` acts like a kill: this call and every later
            one raises, reads too, and nothing more reaches the store. ``"late"`` fails this once,
            as a request that times out, which happens all the same when `arrive` is called.
        landed: How much of the failing change happens at once, from 0 to 1: that share of a
            file's bytes, or of the files to delete. An atomic write or replacement happens only
            if this is 1: done, but the answer was lost. Nothing does of a late one.

    Attributes:
        changes: How many changes were asked for; with ``questions``, how many calls.

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
            raise ValueError(
                f"mode is raise, stop or late, landed from 0 to 1; not {mode}, {landed}"
            )
        super().__init__(inner)
        self.changes = 0
        self._fail_at, self._questions, self._mode, self._landed = fail_at, questions, mode, landed
        self._stopped = False
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    @contextmanager
    def passing(self, operation: str, path: str) -> Iterator[str]:
        """Fail instead of a call that changes nothing, if that is what to fail at."""
        if operation in _QUESTIONS:
            doing = _QUESTIONS[operation]
            self._check(doing, path)
            if self._questions and self._fails(doing, path):
                raise self._error(doing, path)
        yield path

    def write(
        self,
        path: str,
        parts: Iterable[Buffer],
        *,
        nbytes: int | None = None,
        atomic: bool = False,
    ) -> int:
        """Write, or write the first bytes and fail."""
        if self._fails("write", path):
            views = [byte_view(part) for part in parts]
            if self._mode == "late":
                copies = [bytes(view) for view in views]
                self._late.append(lambda: self.inner.write(path, copies, atomic=atomic))
                raise self._error("write", path)
            keep = int(self._landed * sum(view.nbytes for view in views))
            if not atomic or self._landed == 1:
                self.inner.write(path, list(_first_bytes(views, keep)), atomic=atomic)
            raise self._error("write", path)
        return self.inner.write(path, parts, nbytes=nbytes, atomic=atomic)

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Replace, or fail before or after."""
        fails = self._fails("replace", path)

        def replace() -> None:
            self.inner.replace(path, data, overwrite=overwrite)

        if fails and self._mode == "late":
            self._late.append(replace)
        elif not fails or self._landed == 1:
            replace()
        if fails:
            raise self._error("replace", path)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete, or delete the first few and fail."""
        paths = tuple(paths)
        fails = self._fails("delete", ", ".join(paths))
        if fails and self._mode == "late":
            self._late.append(lambda: self.inner.delete(paths))
            raise self._error("delete", ", ".join(paths))
        self.inner.delete(paths[: int(self._landed * len(paths))] if fails else paths)
        if fails:
            raise self._error("delete", ", ".join(paths))

    def sync(self) -> None:
        """Sync, or fail."""
        if self._fails("sync", self.url):
            raise self._error("sync", self.url)
        self.inner.sync()

    def arrive(self) -> None:
        """Let the change happen that failed in the mode ``"late"``."""
        late, self._late = self._late, []
        for change in late:
            change()

    def _check(self, operation: str, path: str) -> None:
        if self._stopped:
            raise InjectedError(operation, path, "the store was stopped before", kind="stopped")

    def _fails(self, operation: str, path: str) -> bool:
        """Count a call, and say whether it is the one to fail."""
        with self._lock:
            self._check(operation, path)
            fails = self.changes == self._fail_at
            self.changes += 1
            self._stopped = fails and self._mode == "stop"
            return fails

    def _error(self, operation: str, path: str) -> InjectedError:
        what = "call" if self._questions else "change"
        reason = f"{what} {self._fail_at} fails, as the test wants it"
        return InjectedError(operation, path, reason, kind="stopped")


def _first_bytes(views: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
    for view in views:
        yield view[:nbytes]
        nbytes -= min(nbytes, view.nbytes)
