"""Threads that share a budget of memory, and a counter of their progress.

The standard library's executor would not do: interrupted while it starts a thread, it leaves one
that the interpreter waits for at exit; and a signal handler that submits work may wait for a lock
that its own thread holds.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakSet, finalize

T = TypeVar("T")
R = TypeVar("R")
_Line: TypeAlias = "SimpleQueue[_Job | None]"

_MAX_BYTES: Final = 256 << 20
_TICK: Final = 0.5  # seconds; a waiting main thread handles signals that other threads received


class StoppedError(RuntimeError):
    """Raised in work whose result is no longer needed, because its `Pool.map` has failed."""


def check_stopped() -> None:
    """Raise if the `Pool.map` that this thread works for has failed; long work calls it."""
    if any(job.failures for job in _thread.jobs):
        raise StoppedError("stopped, because the operation that this is a part of has failed")


class Pool:
    """Threads that share a budget of memory.

    The bytes of each piece of work are reserved before it begins. Work larger than the whole budget
    runs alone. A nested `map` on the same pool runs on the calling thread and reserves nothing, so
    a pool never waits for itself. In a forked process, pools start new threads.

    Attributes:
        max_workers: The most threads; they are started when they are first needed, and kept.
        max_bytes: The budget.
        peak_bytes: The most that was ever reserved at once.

    >>> with Pool(max_workers=4, max_bytes=100) as pool:
    ...     squares = pool.map(lambda n: n * n, range(5), nbytes=60)
    >>> squares, pool.peak_bytes
    ([0, 1, 4, 9, 16], 60)
    """

    def __init__(self, *, max_workers: int | None = None, max_bytes: int = _MAX_BYTES) -> None:
        workers = max(8, min(32, os.cpu_count() or 1))
        self.max_workers = workers if max_workers is None else max_workers
        if self.max_workers < 1 or max_bytes < 1:
            raise ValueError(
                f"a pool needs a thread and a byte, not {self.max_workers} and {max_bytes}"
            )
        self.max_bytes, self._closed = max_bytes, False
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        """Begin without threads and reservations, at first and in a forked process."""
        self.peak_bytes = 0
        self._held: dict[object, int] = {}  # bytes in flight by reservation
        # A signal handler may use the pool whose lock its own thread holds: so they are re-entrant.
        self._turn, self._room = threading.RLock(), threading.Condition(threading.RLock())
        self._threads: list[threading.Thread] = []
        self._line: _Line = SimpleQueue()  # jobs, each as often as threads may work on it
        self._end = finalize(self, self._line.put, None)
        self._end.atexit = False  # threads that outlive the main one may still need the pool

    def map(
        self,
        work: Callable[[T], R],
        items: Iterable[T],
        *,
        nbytes: int | Callable[[T], int] = 0,
        here: bool = False,
    ) -> list[R]:
        """Do the same work for each item, and return the results in order.

        When one fails, or the caller is interrupted, no other is started, those under way are
        waited for (they end early if they call `check_stopped`), and the first error is raised.

        Args:
            work: What to do with an item.
            items: The items; their own memory is not counted.
            nbytes: The memory that the work holds until it returns, or a function of the item.
            here: Whether to work on this thread, one item after the other.
        """
        if self._closed:
            raise RuntimeError("this pool is closed: make another, or use default_pool()")
        job = _Job(self, work, list(items), 0 if self.inside else nbytes)
        turns = min(self.max_workers, len(job.results))
        if here or self.inside or not self._start_threads(turns):
            while job.step():
                pass
        else:
            job.share(self._line, turns)
        if job.failures:
            raise job.failures[0]
        return job.results

    def close(self) -> None:
        """End the threads once they have finished their work; later calls of `map` are refused."""
        self._closed = True
        self._end()
        for thread in self._threads:
            thread.join()

    def __reduce__(self) -> tuple[Any, ...]:
        """Give another process a pool of the same limits."""
        return partial(Pool, max_workers=self.max_workers, max_bytes=self.max_bytes), ()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        held = f"{sum(self._held.values())} of {self.max_bytes} bytes in flight"
        return f"Pool({self.max_workers} threads, {held}, peak {self.peak_bytes})"

    @property
    def inside(self) -> bool:
        """Whether the calling thread does work of this pool: then `map` runs on that thread."""
        return any(job.pool is self for job in _thread.jobs)

    def _start_threads(self, count: int) -> bool:
        """Start threads until there are ``count``, if the system lets us; return whether any runs.

        An interrupt in here may leave a thread that is not in the list; it ends with the others.
        """
        with self._room, suppress(RuntimeError):  # no more threads, or the interpreter is exiting
            while len(self._threads) < count:
                thread = threading.Thread(
                    target=_serve, args=(self._line,), name="shardplan-pool", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        return bool(self._threads)

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Wait until some bytes fit into the budget, and hold them during the block."""
        if nbytes < 0:
            raise ValueError(f"work cannot cost {nbytes} bytes")
        ticket, most = object(), self.max_bytes - nbytes
        try:
            with self._turn, self._room:  # one waits for room at a time, so nobody is overtaken
                self._room.wait_for(lambda: not self._held or sum(self._held.values()) <= most)
                self._held[ticket] = nbytes
                self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
            yield
        finally:
            with self._room:
                self._held.pop(ticket, None)
                self._room.notify_all()


class _Job:
    """One call of `Pool.map`: its items, results and errors."""

    def __init__(
        self, pool: Pool, work: Callable[[Any], Any], items: list[Any], nbytes: Any
    ) -> None:
        self.pool, self._work, self._nbytes = pool, work, nbytes
        self._todo = deque(enumerate(items))
        self._outer = _thread.jobs  # what the caller works for
        self.results: list[Any] = [None] * len(items)
        self.failures: list[BaseException] = []
        self._active = 0  # threads that work on an item
        self._changed = threading.Condition(threading.RLock())

    def share(self, line: _Line, turns: int) -> None:
        """Let the pool's threads do the work, and return when none of them works on it."""
        try:
            for _ in range(turns):
                line.put(self)
            self._wait()
        except BaseException as error:  # an interrupt: the threads still use the caller's memory
            self.failures.append(error)
            self._wait()
            raise

    def step(self) -> bool:
        """Do the work of the next item; return whether there was one."""
        with self._changed:
            if self._is_over():
                return False
            number, item = self._todo.popleft()
            self._active += 1
        before, _thread.jobs = _thread.jobs, (*self._outer, self)
        try:
            nbytes = self._nbytes(item) if callable(self._nbytes) else self._nbytes
            with self.pool.reserved(nbytes) if nbytes else nullcontext():
                if not self.failures:
                    self.results[number] = self._work(item)
        except BaseException as error:
            self.failures.append(error)
        finally:
            _thread.jobs = before
            with self._changed:
                self._active -= 1
                if not self._active and self._is_over():
                    self._changed.notify_all()
        return True

    def _is_over(self) -> bool:
        return bool(self.failures) or not self._todo

    def _wait(self) -> None:
        with self._changed:
            while self._active or not self._is_over():
                self._changed.wait(_TICK)


def _serve(line: _Line) -> None:
    """Do the work of a thread, an item of each job in turn, until the pool is closed and idle."""
    while True:
        job = line.get()
        if job is None:
            idle = not line.qsize()
            line.put(None)  # for the other threads; one that waits may have it at once
            if idle:
                return
        elif job.step():
            line.put(job)
        del job  # an idle thread keeps nothing alive


class _Thread(threading.local):
    """The jobs that each thread works for, the innermost last."""

    jobs: tuple[_Job, ...] = ()


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_processors() -> int:
    """Return how many processors this process has for itself: ranks of one machine share them."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return max(processors() // max(int(ranks), 1), 1) if ranks.isdecimal() else processors()


_thread = _Thread()
_pools: WeakSet[Pool] = WeakSet()
_default: Final = Pool()


def default_pool() -> Pool:
    """Return the pool that is used where none is given."""
    return _default


def _reset_pools() -> None:
    """Reset what a forked process inherits: threads do not survive, and a lock may be held."""
    _thread.jobs = ()
    for pool in tuple(_pools):
        pool._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pools)

ProgressCallback: TypeAlias = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all; what it raises stops the work."""


class Progress:
    """Counts the bytes done by any thread, and reports them: first 0, at the end the total.

    >>> progress = Progress(10, print)
    0 10
    >>> progress.add(4)
    4 10
    >>> progress.finish()
    10 10
    """

    def __init__(self, total: int, callback: ProgressCallback | None = None) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"progress is called with the bytes done and in all; not {callback!r}")
        self._total, self._callback = total, callback
        self._done = 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        """Count some bytes as done."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            if self._callback is not None:
                self._callback(self._done, self._total)

    def finish(self) -> None:
        """Count all bytes as done."""
        if self._done < self._total:
            self.add(self._total)
