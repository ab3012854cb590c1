"""A thread for calls that may block for ever, so that the caller can be interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import attrs

__all__ = ["StuckError", "Worker"]

T = TypeVar("T")


class StuckError(TimeoutError):
    """A call that did not return in time; it may still be running."""


@attrs.define(eq=False)
class _Call:
    """A function to call, and its outcome once it is done."""

    function: Callable[[], Any]
    done: threading.Event = attrs.field(factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error


class Worker:
    """A thread that makes calls which may block for ever, while the caller waits in Python.

    There, Ctrl-C works and timeouts are kept.

    Attributes:
        busy: Whether a call is being made.

    >>> Worker().call(lambda: 6 * 7, limit=5)
    42
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False

    def call(
        self,
        function: Callable[[], T],
        limit: float,
        *,
        meanwhile: Callable[[], None] | None = None,
        alive: Callable[[], float] = lambda: 0.0,
    ) -> T:
        """Return or raise what ``function`` does, or raise StuckError.

        Args:
            function: What to call.
            limit: Seconds that it may take.
            meanwhile: Called now and then while waiting, less and less often; may raise.
            alive: Returns when the function last gave a sign of life, by the monotonic clock: the
                limit counts from then on.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="shardplan-comm", daemon=True)
            thread.start()  # first: if this is interrupted, the next call starts another
            self._thread = thread
        call = _Call(function)
        self._calls.put(call)
        start, pause = time.monotonic(), 0.1
        while (left := max(start, alive()) + limit - time.monotonic()) > 0:
            if call.done.wait(left if meanwhile is None else min(pause, left)):
                if call.error is not None:
                    raise call.error
                result: T = call.value
                return result
            if meanwhile is not None:
                meanwhile()
            pause = min(2 * pause, 2.0)
        raise StuckError(f"no reply in {limit:g} s")

    def post(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after the calls made so far, and ignore its outcome."""
        self._calls.put(_Call(function))

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        self._calls.put(None)

    def join(self, limit: float) -> None:
        """Let the thread end, and wait for that."""
        self.close()
        if self._thread is not None:
            self._thread.join(limit)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self.busy = True
            call.run()
            self.busy = False
            call.done.set()
            del call
