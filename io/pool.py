"""How much at once? One bounded pool of threads with a memory budget that is kept."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakSet

from .signals import undisturbed

__all__ = [
    "Pool",
    "StoppedError",
    "check_stopped",
    "default_pool",
    "own_processors",
    "processors",
    "stop_check",
]

T = TypeVar("T")
R = TypeVar("R")

_MAX_BYTES: Final = 256 << 20
_QUEUED: Final = 4  # pieces of work per thread that may be waiting for one
_TICK: Final = 0.5  # seconds


_under_way = threading.local()  # each thread's own: what went wrong beside the work that it does


class StoppedError(RuntimeError):
    """Work that nobody waits for any more, as what it is a part of has failed."""


def check_stopped() -> None:
    """Give up, if what this thread works at has failed elsewhere or was interrupted.

    Long work calls it between its steps. Outside of `Pool.map` it does nothing.

    >>> check_stopped()

    Raises:
        StoppedError: It is in vain to go on; the map raises the error that came first.
    """
    stop_check()()


def stop_check() -> Callable[[], None]:
    """Return what is `check_stopped` here, for other threads that take part in this one's work."""
    under_way = getattr(_under_way, "failures", ())

    def check() -> None:
        if any(under_way):
            raise StoppedError("given up, for what it is a part of has failed")

    return check


@contextmanager
def _part_of(failures: list[BaseException]) -> Iterator[None]:
    """Say what the work of this thread is in vain after."""
    before = getattr(_under_way, "failures", ())
    _under_way.failures = (*before, failures)
    try:
        yield
    finally:
        _under_way.failures = before


def _wait_for(futures: Sequence[Future[Any]]) -> None:
    """Wait, and wake up now and then: another thread may have been given the signal of a Ctrl-C."""
    while wait(futures, timeout=_TICK).not_done:
        pass


class Pool:
    """Threads that share a budget of memory.

    Each piece of work names its cost in bytes. Whoever hands it in waits until it fits, in the
    order of arrival, so the sum of what is in flight never exceeds the budget. Work larger than
    the whole budget runs, but alone.

    Work that itself hands in work does it there and then, on its own thread and its own
    reservation: a pool never waits for itself. A process that was forked has the pools of its
    parent, but neither their threads nor what these were doing.

    Attributes:
        max_workers: How many threads there are at most.
        max_bytes: The budget.
        peak_bytes: The most that was ever reserved at once; above the budget only if a single
            piece of work was.

    >>> with Pool(max_workers=4, max_bytes=100) as pool:
    ...     squares = pool.map(lambda n: n * n, range(5), nbytes=60)
    >>> squares, pool.peak_bytes
    ([0, 1, 4, 9, 16], 60)
    """

    def __init__(self, *, max_workers: int | None = None, max_bytes: int = _MAX_BYTES) -> None:
        self.max_workers = _default_workers() if max_workers is None else max_workers
        if self.max_workers < 1 or max_bytes < 1:
            raise ValueError(
                f"a pool needs a thread and a byte, not {self.max_workers} and {max_bytes}"
            )
        self.max_bytes = max_bytes
        self._closed = False
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """Make the threads, and hold nothing."""
        self.peak_bytes = 0
        self._held_bytes = 0
        self._held_items = 0
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._thread = threading.local()
        self._executor = ThreadPoolExecutor(
            self.max_workers, "shardplan", initializer=self._mark_worker
        )

    def submit(self, work: Callable[[], R], *, nbytes: int = 0) -> Future[R]:
        """Hand in one piece of work, waiting until it fits into the budget.

        Args:
            work: What to call.
            nbytes: Its cost: the memory it holds until it returns.

        Returns:
            Its result to come. Cancelling it gives the reservation back.

        Raises:
            RuntimeError: The pool is closed.
        """
        futures: list[Future[R]] = []
        self._submit(work, nbytes, futures)
        return futures[0]

    def _submit(self, work: Callable[[], R], nbytes: int, futures: list[Future[R]]) -> None:
        """Hand in one piece of work; once it is, its result to come is among ``futures``."""
        if self._closed:
            raise RuntimeError("this pool is closed: make another, or use default_pool()")
        if self._is_worker():
            futures.append(_done(work))
            return
        task = _Task(work)
        task.future.add_done_callback(lambda _: self._release(nbytes))
        self._reserve(nbytes)
        try:
            with undisturbed():
                futures.append(task.future)
                handed = self._hand_over(task)
        except BaseException:
            task.drop()
            raise
        if not handed:
            self._do_as_worker(task)

    def _hand_over(self, task: Callable[[], None]) -> bool:
        """Have a thread do a task; tell whether there is one that does."""
        try:
            self._executor.submit(task)
        except Exception:
            # The interpreter is exiting, or the system has no more threads. In the latter case the
            # task is in line all the same, for whichever thread there is.
            return False
        return True

    def map(
        self,
        work: Callable[[T], R],
        items: Iterable[T],
        *,
        nbytes: int | Callable[[T], int] = 0,
        here: bool = False,
    ) -> list[R]:
        """Do the same work for each item, and return the results in order.

        Items are asked for as room appears, so they may be made on the fly. When one fails, no
        other is started, those under way are waited for, and the first error is raised. They end
        early if they ask `check_stopped`; so they do after an interrupt.

        Args:
            work: What to do with an item.
            items: The items; light ones, for their own memory is not counted.
            nbytes: The cost of each, or a function that tells the cost of an item.
            here: Whether to do it on this thread, one item after the other, where threads would
                only get in each other's way.
        """
        submit = self._do_here if here else self._submit
        failures: list[BaseException] = []

        def guarded(item: T) -> R | None:
            if failures:
                return None
            try:
                with _part_of(failures):
                    return work(item)
            except BaseException as error:
                failures.append(error)
                return None

        futures: list[Future[Any]] = []
        try:
            for item in items:
                cost = nbytes(item) if callable(nbytes) else nbytes
                submit(partial(guarded, item), cost, futures)
                if failures:
                    break
            _wait_for(futures)
        except BaseException as error:  # from `items`, or an interrupt: the memory is still in use
            failures.append(error)
            _wait_for(futures)
            raise
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Wait for what is under way and end the threads; nothing more can be handed in."""
        self._closed = True
        self._executor.shutdown()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        held = f"{self._held_bytes} of {self.max_bytes} bytes in flight"
        return f"Pool({self.max_workers} threads, {held}, peak {self.peak_bytes})"

    @property
    def inside(self) -> bool:
        """Whether the thread that asks is one of the pool's: what it hands in, it does itself."""
        return self._is_worker()

    def _mark_worker(self) -> None:
        self._thread.is_worker = True

    def _is_worker(self) -> bool:
        return getattr(self._thread, "is_worker", False)

    def _do_here(self, work: Callable[[], R], nbytes: int, futures: list[Future[R]]) -> None:
        """Do one piece of work on this thread, once it fits into the budget; see `_submit`."""
        if self._closed or self._is_worker():
            self._submit(work, nbytes, futures)
            return
        self._reserve(nbytes)
        try:
            self._do_as_worker(lambda: futures.append(_done(work)))
        finally:
            self._release(nbytes)

    def _do_as_worker(self, task: Callable[[], None]) -> None:
        """Do something for which there is room on this thread: it takes no more."""
        try:
            self._thread.is_worker = True
            task()
        finally:
            self._thread.is_worker = False

    def _fits(self, nbytes: int) -> bool:
        if self._held_items >= self.max_workers * (1 + _QUEUED):
            return False
        return not nbytes or not self._held_bytes or self._held_bytes + nbytes <= self.max_bytes

    def _reserve(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"work cannot cost {nbytes} bytes")
        ticket = object()
        # A signal's handler may hand in work while this very thread is in line: it goes first.
        first = getattr(self._thread, "is_in_line", False)
        with self._changed:
            self._thread.is_in_line = True
            self._line.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: (first or self._line[0] is ticket) and self._fits(nbytes)
                )
                self._held_bytes += nbytes
                self._held_items += 1
                self.peak_bytes = max(self.peak_bytes, self._held_bytes)
            finally:
                self._line.remove(ticket)
                self._thread.is_in_line = first
                self._changed.notify_all()

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._held_bytes -= nbytes
            self._held_items -= 1
            self._changed.notify_all()


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_processors() -> int:
    """Return how many processors this process has for itself: ranks of one machine share them."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # as torchrun tells
    return max(processors() // max(int(ranks), 1), 1) if ranks.isdecimal() else processors()


def _default_workers() -> int:
    return max(8, min(32, os.cpu_count() or 1))


class _Task:
    """Work that is done once, by whoever comes to it first."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._work = work
        self._taken = threading.Lock()

    def __call__(self) -> None:
        """Do it, unless it is done elsewhere or nobody wants it any more."""
        if not self._take() or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._work()
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)

    def drop(self) -> None:
        """See to it that it is not begun."""
        if self._take():
            self.future.cancel()
            self.future.set_running_or_notify_cancel()

    def _take(self) -> bool:
        return self._taken.acquire(blocking=False)


def _done(work: Callable[[], R]) -> Future[R]:
    """Do the work here, and return it as a future that is done."""
    future: Future[R] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


_lock = threading.Lock()
_default: Pool | None = None
_pools: WeakSet[Pool] = WeakSet()


def default_pool() -> Pool:
    """Return the pool that is used where none is given; it is made when first asked for.

    >>> default_pool() is default_pool()
    True
    """
    global _default
    with _lock:
        if _default is None:
            _default = Pool()
        return _default


def _begin_anew() -> None:
    """Threads do not survive a fork, and a lock may have been held: the child makes its own."""
    global _lock
    _lock = threading.Lock()
    for pool in tuple(_pools):
        pool._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
