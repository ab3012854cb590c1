"""Save in the background: training goes on as soon as its state is copied."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io.pool import Pool
from shardplan.io.progress import Tell
from shardplan.io.stores import Store
from shardplan.planning import Pass, SavePlan

from .agreement import PlanCache
from .ranks import JobComm
from .refusing import by_name
from .reports import SaveReport, Stopwatch
from .saving import save_state
from .snapshots import Buffers
from .stateful import expand

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
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Pass[SavePlan] | None = None,
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
    future, watch = SaveFuture(str(getattr(path, "url", path))), Stopwatch()
    with saver.lock:
        with saver.staying(future, job.held):
            earlier = saver.settle()
        comm = job.take()
        options = {
            "planner": planner,
            "format": format,
            "comm": comm,
            "overwrite": overwrite,
            "verify_replicas": verify_replicas,
            "profile": False,
            "progress": progress,
            "pool": pool,
            "cache": cache,
            "watch": watch,
        }
        with saver.staying(future, comm):
            with watch.phase("stage"):
                state = saver.snapshot(state_dict, watch) if earlier is None else _failing(earlier)
            future.told = earlier is not None
            saver.start(future, lambda: _run(future, state, path, options))
    future.blocked = time.perf_counter() - start
    if earlier is not None:
        raise earlier
    return future


class _Saver:
    """What saves in the background have in common; only who has the lock may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffers = Buffers()
        self.last: SaveFuture | None = None

    def snapshot(
        self, state_dict: Mapping[Any, Any], watch: Stopwatch
    ) -> Callable[[], Mapping[Any, Any]]:
        """Copy a state dict; if that fails, let the save fail, on all ranks."""
        try:
            state = expand(state_dict)
        except Exception as error:
            return _failing(error)
        try:
            copied = self.buffers.copy(state)
            watch.count("stage", self.buffers.nbytes)
        except Exception as error:
            return _failing(by_name(error, state))
        return lambda: copied

    def settle(self) -> BaseException | None:
        """Wait for the save before, if there is one; return its error if nobody has had it.

        Other ranks may have had it, and save now: this one must take part, if only to fail.
        """
        return None if self.last is None else self.last.settle()

    def start(self, future: SaveFuture, run: Callable[[], None]) -> None:
        """Have a save run in a thread; from here on it cannot be cancelled."""
        thread = threading.Thread(target=run, name="shardplan-save", daemon=False)
        future.set_running_or_notify_cancel()
        before, self.last = self.last, future
        try:
            thread.start()
        finally:
            if thread.ident is None:  # else it runs, though this thread was interrupted
                self.last = before

    @contextlib.contextmanager
    def staying(self, future: SaveFuture, comm: Comm | None) -> Iterator[None]:
        """If this rank cannot begin its save, tell the others, once the one before is done."""
        try:
            yield
        except BaseException as error:
            if self.last is not future:
                self._leave(future, comm, error)
            raise

    def _leave(self, future: SaveFuture, comm: Comm | None, error: BaseException) -> None:
        def leave(_: object) -> None:
            if comm is not None:
                comm.leave(f"left the save: {type(error).__name__}: {error}".rstrip(": "))
            future.set_exception(error)

        before, self.last, future.told = self.last, future, True
        if before is None:
            leave(None)
        else:
            before.add_done_callback(leave)


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
