"""Progress: bytes done, and bytes in all, reported by any thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Tell: TypeAlias = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all; what it raises stops the work."""


class Progress:
    """Counts bytes, and reports them: first 0, at the end the total.

    Args:
        total: How many bytes there will be.
        tell: What to call; never by two threads at once.

    >>> progress = Progress(10, print)
    0 10
    >>> progress.add(4)
    4 10
    >>> progress.finish()
    10 10
    """

    def __init__(self, total: int, tell: Tell | None = None) -> None:
        if tell is not None and not callable(tell):
            raise TypeError(f"progress is called with the bytes done and in all; not {tell!r}")
        self._total, self._tell = total, tell
        self._done = 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        """Count some bytes as done."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            if self._tell is not None:
                self._tell(self._done, self._total)

    def finish(self) -> None:
        """Count all bytes as done."""
        if self._done < self._total:
            self.add(self._total)
