"""Save in the background: training goes on as soon as its state is copied."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io import Pool, Tell
from shardplan.io.stores import Store
from shardplan.planning import Passes, SavePlan

from ._agreement import PlanCache
from ._comm import JobComm, Place, as_comm, place_of
from ._per_rank import part
from ._refusing import by_name
from ._report import SaveReport, Stopwatch, place_name
from ._save import save_state
from ._snapshots import Buffers
from ._stateful import State, expand

__all__ = ["SaveFuture", "async_save"]

_log = logging.getLogger("shardplan")
_TOLD: Final = 4  # ways to fail that the log tells of


class SaveFuture(Future[SaveReport]):
    """A save under way; see `async_save`.

    Attributes:
        path: Where it goes.
        blocked: Seconds for which training waited: for the save before, and for the snapshot.
        told: Whether somebody has had its outcome.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # other ranks count on it: it cannot be cancelled
        self.path = path
        self.blocked = 0.0
        self.told = False

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save, and return its report or raise its error."""
        try:
            return super().result(timeout)
        finally:
            self.told = self.told or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return its error, if there was one."""
        try:
            return super().exception(timeout)
        finally:
            self.told = self.told or self.done()

    def __repr__(self) -> str:
        if not self.done():
            return f"SaveFuture({self.path!r}): under way"
        error = super().exception()
        words = "failed" if error else "done"
        told = repr(super().result()) if error is None else f"{type(error).__name__}: {error}"
        return f"SaveFuture({self.path!r}): {words}: {told}"

    def settle(self) -> BaseException | None:
        """Wait for the save; return its error unless somebody has had it already."""
        error = super().exception()
        if error is None or self.told:
            return None
        self.told = True
        return error


def async_save(
    state_dict: State,
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    format: str = "safetensors",
    comm: Comm | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    progress: Tell | None = None,
    pool: Pool | None = None,
    cache: PlanCache | None = None,
) -> SaveFuture:
    """Copy a state dict, and save the copy in the background.

    When this returns, the copy is complete: whatever happens to any tensor after that is not saved.
    Planning, writing and the commit take place in a thread, over connections of their own; the
    process group that trains is not touched. One save is under way at a time: a call waits for the
    one before, and raises its error if nobody has asked for it. The copy's memory is used again by
    the next one. An interpreter that exits waits for the save, and logs its error.

    Args:
        state_dict: As in `save`.
        path: As in `save`.
        planner: As in `save`.
        format: As in `save`.
        comm: The ranks, for these saves alone; by default one of our own, over all of torch's
            process group.
        overwrite: As in `save`.
        verify_replicas: As in `save`.
        progress: As in `save`; called from the background.
        pool: As in `save`.
        cache: As in `save`.

    Returns:
        The report to come.

    >>> import tempfile, torch
    >>> from shardplan import restore
    >>> w = torch.ones(2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     future = async_save({"w": w}, folder)
    ...     _ = w.zero_()  # too late to be saved
    ...     _ = future.result()
    ...     restore(folder)
    {'w': tensor([1., 1.])}
    """
    saver, job = _saver_of(comm)
    start = time.perf_counter()
    future, watch = SaveFuture(place_name(path)), Stopwatch()
    with saver.lock:
        turn, held = threading.Lock(), job.held
        try:
            earlier = saver.settle()
            held = None  # whoever cannot make connections says so itself
            held = job.take()
            options = {
                "planner": planner,
                "format": format,
                "comm": held,
                "overwrite": overwrite,
                "verify_replicas": verify_replicas,
                "profile": False,
                "progress": progress,
                "pool": pool,
                "cache": cache,
                "watch": watch,
            }
            with watch.phase("stage"):
                snapshot = saver.snapshot(state_dict, place_of(held), earlier, watch)
            future.told = earlier is not None
            saver.line.put(lambda: saver.run(turn, future, snapshot, path, options))
        except BaseException as error:
            saver.stay_away(turn, held, error)
            raise
    future.blocked = time.perf_counter() - start
    if earlier is not None:
        raise earlier
    return future


class _Line:
    """Jobs that threads do one after the other, in order; an interrupt cannot lose any of them.

    A thread serves all jobs that are in line. If the call that starts it is interrupted, it serves
    them nevertheless, or the next one does. What the interrupted thread shares with others are
    queues and locks of the interpreter, which no interrupt leaves half done.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], object]] = deque()
        self._serving = threading.Lock()

    def put(self, job: Callable[[], object]) -> None:
        """Have a job done; if this is interrupted, it may be done now, later, or not at all."""
        self._jobs.append(job)
        started = queue.SimpleQueue[BaseException | None]()
        _thread.start_new_thread(self._start, (started,))
        error = started.get()
        if error is not None:
            raise error

    def drain(self) -> None:
        """Return once all jobs before this call are done."""
        done = queue.SimpleQueue[None]()
        self.put(lambda: done.put(None))
        done.get()

    def _start(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        """Start a thread that an exiting interpreter waits for, where no signal interrupts it."""
        try:
            threading.Thread(target=self._serve, name="shardplan-save", daemon=False).start()
        except BaseException as error:
            started.put(error)
        else:
            started.put(None)

    def _serve(self) -> None:
        with self._serving:
            while self._jobs:
                self._jobs.popleft()()


@attrs.frozen(eq=False)
class _Snapshot:
    """A copy of a state dict.

    Attributes:
        state: Returns it, or raises why there is none.
        buffers: The memory that it is in; nothing else may use it until the copy was written.
    """

    state: Callable[[], Mapping[Any, Any]]
    buffers: Buffers


class _Saver:
    """What saves in the background have in common; only who has the lock may use it.

    Attributes:
        lock: Who has it may begin a save. A thread that was interrupted may have it still, and may
            be the handler of a signal that came in a call of its own: it can take it again.
        line: The saves, one after the other.
        spare: Memory that no save uses.
        last: The save that was begun last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.line = _Line()
        self.spare = Buffers()
        self.last: SaveFuture | None = None

    def settle(self) -> BaseException | None:
        """Wait for the saves before, if there are any; return the last one's untold error.

        Other ranks may have had it, and save now: this one must take part, if only to fail.
        """
        self.line.drain()
        return None if self.last is None else self.last.settle()

    def snapshot(
        self, state_dict: State, place: Place, earlier: BaseException | None, watch: Stopwatch
    ) -> _Snapshot:
        """Copy a state dict; if that fails, or a save has, let the save fail, on all ranks."""
        buffers, self.spare = self.spare, Buffers()  # only who has written it out gives it back
        if earlier is not None:
            return _Snapshot(_failing(earlier), buffers)
        try:
            state = part(expand(state_dict), place)
        except Exception as error:
            return _Snapshot(_failing(error), buffers)
        try:
            copied = buffers.copy(state)
            watch.count("stage", buffers.nbytes)
        except Exception as error:
            return _Snapshot(_failing(by_name(error, state)), buffers)
        return _Snapshot(lambda: copied, buffers)

    def run(
        self,
        turn: threading.Lock,
        future: SaveFuture,
        snapshot: _Snapshot,
        path: str | os.PathLike[str] | Store,
        options: Mapping[str, Any],
    ) -> None:
        """Save, unless the call that asked for it was interrupted and took this turn."""
        if turn.acquire(blocking=False):
            self.last = future
            _run(future, snapshot.state, path, options)
            self.spare = snapshot.buffers

    def stay_away(self, turn: threading.Lock, comm: Comm | None, error: BaseException) -> None:
        """Tell the other ranks that this one does not save, unless a thread has begun to."""
        if turn.acquire(blocking=False) and comm is not None:
            reason = f"left the save: {type(error).__name__}: {error}".rstrip(": ")
            with contextlib.suppress(RuntimeError):  # there are no more threads: the next one tells
                self.line.put(lambda: comm.leave(reason))  # when the saves before are done


def _failing(error: BaseException) -> Callable[[], Mapping[Any, Any]]:
    """Return what raises an error when it is asked for a state dict."""

    def fail() -> Mapping[Any, Any]:
        raise error

    return fail


@attrs.frozen
class _Given:
    """A comm that the caller made: it is what it is."""

    held: Comm

    def take(self) -> Comm:
        """Return it."""
        return self.held


# By comm that a caller made, for as long as the caller has it; and for the job, one of our own.
_savers: weakref.WeakKeyDictionary[Comm, _Saver] = weakref.WeakKeyDictionary()
_savers_lock: Final = threading.Lock()
_own: Final = _Saver()
_job: Final = JobComm(private=True)


def _saver_of(comm: Comm | None) -> tuple[_Saver, _Given | JobComm]:
    """Return what saves for some ranks, made when it is first needed, and who has their comm."""
    if comm is None:
        return _own, _job
    as_comm(comm)
    with _savers_lock:
        return _savers.setdefault(comm, _Saver()), _Given(comm)


def _run(
    future: SaveFuture,
    state: Callable[[], Mapping[Any, Any]],
    path: str | os.PathLike[str] | Store,
    options: Mapping[str, Any],
) -> None:
    try:
        future.set_result(save_state(state, path, **options))
    except BaseException as error:
        if not future.told:  # else it failed because the one before had
            told = str(error) or type(error).__name__
            if isinstance(error, CheckpointError):
                more = [f"and {len(error.lines) - _TOLD} more"] if len(error.lines) > _TOLD else []
                told = "; ".join([*error.lines[:_TOLD], *more])
            _log.error("the save to %s failed in the background: %s", future.path, told)
        future.set_exception(error)
