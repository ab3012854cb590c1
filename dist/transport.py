"""What one process sends another directly: over a gloo group, in CPU memory.

Calls that may block for ever are made in a thread, a `Worker`, so that the caller can be
interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from .errors import LostRanksError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Work

T = TypeVar("T")

PIECE = 64 << 20
"""Bytes that go as one message: below what gloo and the kernel count in 32 bits."""

# When one of its waits times out, gloo closes all connections of the group, even those to healthy
# ranks; and it cannot be interrupted. So it waits in a thread, practically for ever.
_FOR_EVER = timedelta(days=1000)
_abandoned: list[tuple[Wire, int]] = []  # wires whose thread may still wait, and for which place

_END = 2.0  # seconds to wait for a thread when the interpreter exits
_RELEASE = 1 << 20  # added to the tag of a wait that is meant to time out


class StuckError(TimeoutError):
    """A call that did not return in time; it may still be running."""


@attrs.define(eq=False)
class Call:
    """A function to call, and its outcome once it is done."""

    function: Callable[[], Any]
    done: threading.Event = attrs.field(factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and note the outcome."""
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        """Return or raise what the function did, once that is done."""
        if self.error is not None:
            raise self.error
        return self.value


class Worker:
    """A thread that makes calls which may block for ever, while the caller waits in Python.

    There, Ctrl-C works and timeouts are kept. `busy` is true until a call has returned.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
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
        """Return or raise what ``function`` does, or raise StuckError after ``limit`` seconds.

        ``meanwhile`` is called now and then while waiting, and may raise. ``alive`` returns the
        monotonic time of the last sign of life: the limit counts from then on.
        """
        call = self.begin(function)
        start, pause = time.monotonic(), 0.1
        while (left := max(start, alive()) + limit - time.monotonic()) > 0:
            if call.done.wait(left if meanwhile is None else min(pause, left)):
                result: T = call.result()
                return result
            if meanwhile is not None:
                meanwhile()
            pause = min(2 * pause, 2.0)
        raise StuckError(f"no reply in {limit:g} s")

    def begin(self, function: Callable[[], object]) -> Call:
        """Have ``function`` called after the calls made so far, and return the call."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="shardplan-comm", daemon=True)
            thread.start()  # first: if this is interrupted, the next call starts another
            self._thread = thread
        call = Call(function)
        self.busy = True
        self._calls.put(call)
        return call

    def post(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after the calls made so far, and ignore its outcome."""
        self._calls.put(Call(function))

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        self._calls.put(None)

    def join(self, limit: float) -> None:
        """Let the thread end, and wait for that at most ``limit`` seconds."""
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


@attrs.frozen
class Wire:
    """Sends and receives bytes between ranks that may die."""

    group: Any  # a gloo group
    tag: int  # distinguishes these messages from all others between the same ranks
    timeout: float  # seconds that one message may take
    meanwhile: Callable[[], None]  # called now and then while a message takes time; may raise
    worker: Worker = attrs.field(factory=Worker)  # waits, so that the caller can be interrupted

    def post(
        self,
        place: int,
        data: memoryview,
        gone: Callable[[Mapping[int, Trouble]], Exception],
        *,
        sends: bool,
    ) -> Transfer:
        """Begin to send memory to one place, or to receive into it; any thread may do so.

        The memory must not change until then. ``gone`` returns the error for a lost place.
        """
        import torch

        whole = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0)
        begin = self.group.send if sends else self.group.recv
        try:
            works = [begin([piece], place, self.tag) for piece in _pieces(whole)]
        except (RuntimeError, OSError) as error:  # the connection is known to be gone
            raise gone({place: Trouble.of(error)}) from None
        return Transfer(self, place, works, gone)

    def wait(self, place: int, works: Sequence[Work], limit: float) -> Trouble | None:
        """Wait for the messages to or from one place, and return what went wrong."""
        try:
            self.worker.call(
                lambda: [work.wait(_FOR_EVER) for work in works], limit, meanwhile=self.meanwhile
            )
        except LostRanksError:
            raise
        except (RuntimeError, OSError) as error:
            return Trouble.of(error)
        finally:
            if self.worker.busy:
                _abandoned.append((self, place))
        return None

    def release(self, place: int) -> None:
        """End all waits, by one that times out: that closes all connections of the group."""
        import torch

        work = self.group.recv([torch.empty(1)], place, self.tag + _RELEASE)
        work.wait(timedelta(milliseconds=1))


@attrs.frozen
class Trouble:
    """Why a message was not sent or received, as text."""

    text: str
    broken: bool  # the connection is gone; otherwise the other side took too long

    @classmethod
    def of(cls, error: Exception) -> Trouble:
        """Describe an error of a wait."""
        if isinstance(error, StuckError):
            return cls(f"sent or took nothing: {error}", broken=False)
        return cls(f"is lost: {(str(error).splitlines() or [''])[0][:200]}", broken=True)


@attrs.frozen(eq=False)
class Transfer:
    """Memory that is being sent to, or filled by, another place; a `Pending`."""

    wire: Wire
    place: int
    works: Sequence[Work]
    gone: Callable[[Mapping[int, Trouble]], Exception]

    def wait(self) -> None:
        """Return once the transfer is done."""
        # Half as long as for a collective, where this rank would else be missed by all others.
        trouble = self.wire.wait(self.place, self.works, self.wire.timeout / 2)
        if trouble is not None:
            raise self.gone({self.place: trouble})


@atexit.register
def _release() -> None:
    """End waits before the interpreter exits: a thread that returns from gloo later would crash."""
    for wire, place in _abandoned:
        if wire.worker.busy:
            with contextlib.suppress(RuntimeError, OSError):
                wire.release(place)
            wire.worker.join(_END)


def _pieces(data: Tensor) -> list[Tensor]:
    return [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
