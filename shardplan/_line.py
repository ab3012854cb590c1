"""A queue of jobs that threads run one after the other."""

from __future__ import annotations

import _thread
import queue
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Line"]


class Line:
    """A queue of jobs that threads run one after the other; an interrupt cannot lose a job.

    A thread runs all queued jobs. If the call that starts it is interrupted, the thread, or the
    next one, still runs them. Threads are started by a thread, since signals interrupt only the
    main thread; a `SimpleQueue`, unlike a `threading.Event`, stays consistent when interrupted.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], object]] = deque()
        self._running = threading.Lock()

    def put(self, job: Callable[[], object]) -> None:
        """Queue a job; if this is interrupted, the job may run now, later, or not at all."""
        self._jobs.append(job)
        started = queue.SimpleQueue[BaseException | None]()
        _thread.start_new_thread(self._start, (started,))
        error = started.get()
        if error is not None:
            raise error

    def drain(self) -> None:
        """Return once all earlier jobs are done."""
        done = queue.SimpleQueue[None]()
        self.put(lambda: done.put(None))
        done.get()

    def _start(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        """Start a non-daemon thread, which an exiting interpreter waits for."""
        try:
            threading.Thread(target=self._run, name="shardplan-save", daemon=False).start()
        except BaseException as error:
            started.put(error)
        else:
            started.put(None)

    def _run(self) -> None:
        with self._running:
            while self._jobs:
                self._jobs.popleft()()
