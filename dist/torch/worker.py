"""Calls that may block for ever, made in a thread: who waits for them can be interrupted."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["StuckError", "Worker"]

T = TypeVar("T")


class StuckError(TimeoutError):
    """A call that did not return in time; it may still be running."""


def _nothing() -> None:
    """Do nothing meanwhile."""


def _never() -> float:
    """Give no sign of life."""
    return 0.0


class Worker:
    """A thread that makes calls which may block for ever, so that its owner never does.

    The owner waits in Python, where Ctrl-C works and time runs out.

    Attributes:
        busy: Whether a call is being made.

    >>> Worker().call(lambda: 6 * 7, limit=5)
    42
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False

    def call(
        self,
        function: Callable[[], T],
        limit: float,
        meanwhile: Callable[[], None] = _nothing,
        alive: Callable[[], float] = _never,
    ) -> T:
        """Return or raise what ``function`` does, or raise StuckError.

        Args:
            function: What to call.
            limit: Seconds that it may take.
            meanwhile: Called now and then while it takes its time; may raise.
            alive: Returns when the function last gave a sign of life, by the monotonic clock: the
                limit counts from then on.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="shardplan-comm", daemon=True)
            thread.start()  # first: if this is interrupted, the next call starts another
            self._thread = thread
        answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        value, error = _await(answer, limit, meanwhile, alive)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def post(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after the calls made so far, whatever becomes of it."""
        self._calls.put((function, queue.SimpleQueue()))

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        if self._thread is not None:
            self._calls.put((_stop, queue.SimpleQueue()))

    def join(self, limit: float) -> None:
        """Let the thread end, and wait for that."""
        self.close()
        if self._thread is not None:
            self._thread.join(limit)

    def _serve(self) -> None:
        while True:
            function, answer = self._calls.get()
            if function is _stop:
                return
            self.busy = True
            value, error = _outcome(function)
            self.busy = False
            answer.put((value, error))
            del function, answer, value, error


def _outcome(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _stop() -> None:
    """Mark the end of a worker's calls."""


def _await(
    answer: queue.SimpleQueue[T],
    limit: float,
    meanwhile: Callable[[], None],
    alive: Callable[[], float],
) -> T:
    """Return what comes; look after other things in between, less and less often."""
    start, pause = time.monotonic(), 0.1
    while (left := max(start, alive()) + limit - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            return answer.get(timeout=min(pause, left) if meanwhile is not _nothing else left)
        meanwhile()
        pause = min(2 * pause, 2.0)
    raise StuckError(f"no reply in {limit:g} s")
