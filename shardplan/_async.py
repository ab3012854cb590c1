"""Save in the background: training continues as soon as its state is copied."""

from __future__ import annotations

import _thread
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io import Pool, ProgressCallback
from shardplan.io.formats import ExtraFiles
from shardplan.io.stores import Store
from shardplan.planning import Passes, SavePlan

from ._comm import JobComm, as_comm, place_of
from ._offers import PlanCache
from ._report import SaveReport, Stopwatch, place_name
from ._save import SaveOptions, Target, save_state
from ._snapshots import Buffers
from ._state import State, by_name, expand, part

__all__ = ["SaveFuture", "async_save"]

_log = logging.getLogger("shardplan")
_LOGGED_LINES: Final = 4  # of a failure on many ranks


class SaveFuture(Future[SaveReport]):
    """A save in progress; see `async_save`.

    Attributes:
        path: The destination.
        blocked: Seconds that training waited: for the previous save, and for the snapshot.
        seen: Whether the caller has asked for the outcome.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.blocked = 0.0
        self.seen = False

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the save, and return its report or raise its error."""
        try:
            return super().result(timeout)
        finally:
            self.seen = self.seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return its error, if there was one."""
        try:
            return super().exception(timeout)
        finally:
            self.seen = self.seen or self.done()

    def cancel(self) -> bool:
        """Return False: other ranks depend on the save."""
        return False

    def abandon(self) -> bool:
        """Return True if the save has not begun; then it never will."""
        return super().cancel()

    def unseen_error(self) -> BaseException | None:
        """Wait for the save; return its error unless the caller has asked for it already."""
        error = super().exception()
        if error is None or self.seen:
            return None
        self.seen = True
        return error

    def __repr__(self) -> str:
        if not self.done():
            return f"SaveFuture({self.path!r}): under way"
        error = super().exception()
        if error is None:
            return f"SaveFuture({self.path!r}): done: {super().result()!r}"
        return f"SaveFuture({self.path!r}): failed: {type(error).__name__}: {error}"


def async_save(
    state_dict: State,
    path: str | os.PathLike[str] | Store,
    *,
    planner: Passes[SavePlan] | None = None,
    format: str = "safetensors",
    extra_files: ExtraFiles | None = None,
    comm: Comm | None = None,
    overwrite: bool = False,
    verify_replicas: bool = False,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
    cache: PlanCache | None = None,
    trace: bool = False,
) -> SaveFuture:
    """Copy a state dict, and save the copy in the background.

    When this returns, the copy is complete: later changes of tensors are not saved. A thread plans,
    writes and commits over its own connections; the process group of the training job is not used.
    Only one save runs at a time: a call waits for the previous one, and raises its error unless the
    caller has already asked for it. The memory of a copy is reused by the next one. An exiting
    interpreter waits for the save, and logs its error.

    Args:
        state_dict: As in `save`.
        path: As in `save`.
        planner: As in `save`.
        format: As in `save`.
        extra_files: As in `save`; they are read in the background.
        comm: The ranks, used by these saves alone; by default a separate comm over all of torch's
            process group.
        overwrite: As in `save`.
        verify_replicas: As in `save`.
        progress: As in `save`; called from the background thread.
        pool: As in `save`.
        cache: As in `save`.
        trace: As in `save`.

    Returns:
        A future of the report. Its ``result()`` raises errors that occur after the copy.

    >>> import tempfile, torch
    >>> from shardplan import restore
    >>> w = torch.ones(2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     future = async_save({"w": w}, folder)
    ...     _ = w.zero_()  # too late to be saved
    ...     _ = future.result()
    ...     restore(folder)
    {'w': tensor([1., 1.])}

    Raises:
        TypeError, ValueError: The path or the format is wrong; other ranks raise as well.
        CheckpointError: There are no connections to the other ranks.
        Exception: The error of the previous save, if the caller has not asked for it.
    """
    saver = _saver_of(comm)
    start = time.perf_counter()
    future, watch = SaveFuture(place_name(path)), Stopwatch()
    options = SaveOptions(planner, overwrite, verify_replicas, progress, pool, cache, trace)
    with saver.lock:
        ranks = _job.held if comm is None else comm
        try:
            earlier = saver.settle()
            ranks = None  # if `take` fails, it reports to the other ranks itself
            ranks = _job.take() if comm is None else comm
            with watch.phase("stage"):
                opening = partial(Target.open, path, format, extra_files)
                copy = saver.snapshot(state_dict, opening, ranks, earlier)
            watch.count("stage", copy.buffers.nbytes)
            future.seen = copy.raised
            saver.line.put(lambda: saver.run(future, copy, ranks, options, watch))
        except BaseException as error:
            saver.stay_away(future, ranks, error)
            raise
    future.blocked = time.perf_counter() - start
    if copy.raised and copy.error is not None:
        raise copy.error
    return future


class _Line:
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


@attrs.frozen(eq=False)
class _Copy:
    """A copy of a state dict and its target, or the error with which the save fails.

    A save that cannot begin must fail on all ranks, since the others wait for this one.

    Attributes:
        buffers: The memory of the copy, reserved until the copy is written.
        target: The destination.
        sd: The copy.
        error: Why there is none.
        raised: Whether the call raises the error, in addition to the future.
    """

    buffers: Buffers
    target: Target | None = None
    sd: Mapping[Any, Any] | None = None
    error: BaseException | None = None
    raised: bool = False

    def opened(self) -> Target:
        """Return the target, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.target is not None
        return self.target

    def state(self) -> Mapping[Any, Any]:
        """Return the copy."""
        assert self.sd is not None
        return self.sd


class _Saver:
    """The state that background saves of some ranks share.

    Attributes:
        lock: Held while a save begins; reentrant, since a signal handler may begin one, too.
        line: The queue of saves.
        spare: Memory that no save uses.
        last: The most recent save.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.line = _Line()
        self.spare = Buffers()
        self.last: SaveFuture | None = None

    def settle(self) -> BaseException | None:
        """Wait for earlier saves; return the last one's error if the caller has not seen it."""
        self.line.drain()
        return None if self.last is None else self.last.unseen_error()

    def snapshot(
        self,
        state_dict: State,
        opening: Callable[[], Target],
        comm: Comm,
        earlier: BaseException | None,
    ) -> _Copy:
        """Copy a state dict; if that or the previous save failed, return the error."""
        buffers, self.spare = self.spare, Buffers()  # given back once the copy is written
        if earlier is not None:
            return _Copy(buffers, error=earlier, raised=True)
        try:
            target = opening()
        except Exception as error:
            return _Copy(buffers, error=error, raised=True)
        try:
            state = part(expand(state_dict), place_of(comm))
        except Exception as error:
            return _Copy(buffers, error=error)
        try:
            return _Copy(buffers, target, buffers.copy(state))
        except Exception as error:
            return _Copy(buffers, error=by_name(error, state))

    def run(
        self, future: SaveFuture, copy: _Copy, comm: Comm, options: SaveOptions, watch: Stopwatch
    ) -> None:
        """Save a copy, unless the call that made it was interrupted."""
        if not future.set_running_or_notify_cancel():
            return
        self.last = future
        try:
            future.set_result(save_state(comm, copy.opened, copy.state, options, watch))
        except BaseException as error:
            if not copy.raised:
                text = _short(error)
                _log.error("the save to %s failed in the background: %s", future.path, text)
            future.set_exception(error)
        self.spare = copy.buffers

    def stay_away(self, future: SaveFuture, comm: Comm | None, error: BaseException) -> None:
        """Report to the other ranks that this one does not save, unless it has begun to."""
        if future.abandon() and comm is not None:
            reason = f"left the save: {type(error).__name__}: {error}".rstrip(": ")
            with suppress(RuntimeError):  # no thread can be started: the next one runs it
                self.line.put(lambda: comm.leave(reason))  # when the saves before are done


def _short(error: BaseException) -> str:
    """Return an error as one line for the log."""
    if not isinstance(error, CheckpointError):
        return str(error) or type(error).__name__
    more = len(error.lines) - _LOGGED_LINES
    return "; ".join([*error.lines[:_LOGGED_LINES], *([f"and {more} more"] if more > 0 else [])])


# By comm that a caller made, for as long as the caller has it; and for the job, one of our own.
_savers: weakref.WeakKeyDictionary[Comm, _Saver] = weakref.WeakKeyDictionary()
_savers_lock: Final = threading.Lock()
_own: Final = _Saver()
_job: Final = JobComm()


def _saver_of(comm: Comm | None) -> _Saver:
    """Return the saver of some ranks, made on demand."""
    if comm is None:
        return _own
    as_comm(comm)
    with _savers_lock:
        return _savers.setdefault(comm, _Saver())
