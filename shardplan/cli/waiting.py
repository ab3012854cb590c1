"""What does one see while waiting? After a second a bar or a spinner, on stderr, if a person looks.

Nothing is shown where stderr is no terminal, so that logs and pipes stay clean.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["counting", "spinning"]

_PATIENCE: Final = 1.0  # seconds before anything is shown


class _Bar:
    """A bar of bytes that appears when something takes longer than a second."""

    def __init__(self, label: str) -> None:
        self._label, self._start = label, time.monotonic()
        self._display: Any = None
        self._task: Any = None

    def tell(self, done: int, total: int) -> None:
        """Note how many bytes are done."""
        if self._display is None:
            if time.monotonic() - self._start < _PATIENCE or done >= total:
                return
            self._open(total)
        self._display.update(self._task, completed=done, total=total)

    def _open(self, total: int) -> None:
        from rich import progress

        from .screen import console

        self._display = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            _rate(progress.ProgressColumn),
            progress.TimeRemainingColumn(compact=True),
            console=console(stderr=True),
            transient=True,
        )
        self._task = self._display.add_task(self._label, total=total)
        self._display.start()

    def close(self) -> None:
        """Take it away."""
        if self._display is not None:
            self._display.stop()


def _rate(base: Any) -> Any:
    """Make the column of bytes a second, in the units that everything else has."""
    from rich.text import Text

    from shardplan.planning import human_bytes

    class Rate(base):  # type: ignore[misc]  # rich is imported only where a bar is drawn
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{human_bytes(speed)}/s")

    return Rate()


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar with rate and time left; give what wants to be told of bytes done and in all.

    >>> with counting("verify") as tell:  # no terminal here
    ...     print(tell)
    None
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(label)
    try:
        yield bar.tell
    finally:
        bar.close()


@contextmanager
def spinning(label: str) -> Iterator[None]:
    """Show that something is under way of which nobody knows how long it takes."""
    if not sys.stderr.isatty():
        yield
        return
    shown: list[Any] = []
    lock = threading.Lock()

    def appear() -> None:
        from .screen import console

        with lock:
            if not shown:
                shown.append(console(stderr=True).status(label))
                shown[0].start()

    timer = threading.Timer(_PATIENCE, appear)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            for status in shown:
                status.stop()
            shown.append(None)
