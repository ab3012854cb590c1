"""How is work begun that no signal may interrupt? Signals are put off for a moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["undisturbed"]

_RAISING: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
_SIGNALS: Final = [getattr(signal, name) for name in _RAISING if hasattr(signal, name)]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put signals off for a moment: a thread whose start is interrupted is one nobody knows of.

    Python's executors would wait for it for ever when the program ends. Signals are those for which
    programs have handlers that raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread is interrupted
        return
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    came: list[int] = []
    over = False

    def later(number: int, frame: FrameType | None) -> None:
        if over:  # this one is still in place, as a signal came while handlers were put back
            handlers[number](number, frame)
        else:
            came.append(number)

    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                try:
                    signal.signal(number, later)
                except ValueError:  # Python began on another thread: no signal is handled here
                    del handlers[number]
        yield
    finally:
        try:
            for one, handler in handlers.items():
                signal.signal(one, handler)
        finally:
            over = True
            for one in came:
                handlers[one](one, None)
