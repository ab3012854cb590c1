"""Save in the background: training continues as soon as its state is copied."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io import Pool, ProgressCallback
from shardplan.io.formats import ExtraFiles
from shardplan.io.stores import Store
from shardplan.planning import Passes, SavePlan, listed

from ._comm import JobComm, as_comm, place_of
from ._incremental import base_of
from ._line import Line
from ._offers import PlanCache
from ._report import SaveReport, Stopwatch, place_name
from ._save import Destination, SaveOptions, save_state
from ._snapshots import Buffers, Snapshot
from ._staging import SharedMemory
from ._state import State, by_name, expand, part
from ._writer import WriterProcess, check_portable

__all__ = ["SaveFuture", "async_save"]

_log = logging.getLogger("shardplan")
_LOGGED_LINES: Final = 4  # of a failure on many ranks


class SaveFuture(Future[SaveReport]):
    """A save in progress; see `async_save`.

    Attributes:
        path: The destination.
        staged: Done as soon as the state is copied, or never will be; it never fails.
        blocked: Seconds that training waited: for the previous save, and for the snapshot.
        seen: Whether the caller has asked for the outcome.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.staged: Future[None] = Future()
        self.staged.set_running_or_notify_cancel()
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
    process: bool = False,
    overlap: bool = False,
    base: str | os.PathLike[str] | Store | None = None,
) -> SaveFuture:
    """Copy a state dict, and save the copy in the background.

    When this returns, the copy is complete: later changes of tensors are not saved. A thread plans,
    writes and commits over its own connections; the process group of the training job is not used.
    Only one save runs at a time: a call waits for the previous one, and raises its error unless the
    caller has already asked for it. The memory of a copy is reused by the next one. An exiting
    interpreter waits for the save, and logs its error.

    With ``process``, a writer process hashes and writes the copy, so that Python's lock and the
    processors stay with training. It maps the memory of the copy, runs with low priority, serves
    all later saves, and ends with this process. Plans and commits stay in the thread.

    With ``overlap``, this returns before the tensors are copied, so that the copy is made during
    the next forward pass. **Tensors must not change until** ``future.staged`` **is done**: call
    ``future.staged.result()`` before the optimizer's step. A save during which torch counts a
    change of a tensor fails; a change that torch does not count (of a numpy array, or through
    ``.data``) makes a checkpoint with a mixture of old and new elements.

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
        process: Whether a process writes instead of a thread. The path must be one that another
            process can open: not ``memory://``.
        overlap: Whether to return before the tensors are copied; see above.
        base: As in `save`.

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
        TypeError, ValueError: The path or the format is wrong, or the store cannot be passed to
            the writer process; other ranks raise as well.
        CheckpointError: There are no connections to the other ranks.
        Exception: The error of the previous save, if the caller has not asked for it.
    """
    saver = _saver_of(comm)
    start = time.perf_counter()
    future, watch = SaveFuture(place_name(path)), Stopwatch()
    options = SaveOptions(planner, overwrite, verify_replicas, progress, pool, cache, trace)
    options = attrs.evolve(options, base=base_of(base, format))
    with saver.lock:
        ranks = _job.held if comm is None else comm
        try:
            earlier = saver.settle()
            ranks = None  # if `take` fails, it reports to the other ranks itself
            ranks = _job.take() if comm is None else comm
            with watch.phase("stage"):
                opening = partial(Destination.open, path, format, extra_files)
                writer = saver.start_writer() if process else None
                copy = saver.snapshot(state_dict, opening, ranks, earlier, writer)
                if not overlap:
                    copy = copy.finished(future, check=False)
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


@attrs.frozen(eq=False)
class _Copy:
    """A copy of a state dict and its target, or the error with which the save fails.

    A save that cannot begin must fail on all ranks, since the others wait for this one.

    Attributes:
        buffers: The memory of the copy, reserved until the copy is written.
        target: The destination.
        snapshot: The copy.
        error: Why there is none.
        raised: Whether the call raises the error, in addition to the future.
    """

    buffers: Buffers
    target: Destination | None = None
    snapshot: Snapshot | None = None
    error: BaseException | None = None
    raised: bool = False

    def finished(self, future: SaveFuture, *, check: bool) -> _Copy:
        """Return a copy with all elements; ``check`` refuses tensors that changed meanwhile."""
        try:
            changed = [] if self.snapshot is None else self.snapshot.finish()
        except Exception as error:
            return attrs.evolve(self, error=error)
        finally:
            future.staged.set_result(None)
        return attrs.evolve(self, error=_torn(changed)) if changed and check else self

    def opened(self) -> Destination:
        """Return the target, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.target is not None
        return self.target

    def state(self) -> Mapping[Any, Any]:
        """Return the copy."""
        assert self.snapshot is not None
        return self.snapshot.sd


class _Saver:
    """The state that background saves of some ranks share.

    Attributes:
        lock: Held while a save begins; reentrant, since a signal handler may begin one, too.
        line: The queue of saves.
        spare: Memory that no save uses, for those in threads and for those of the writer process.
        writer: The writer process, once there was one.
        last: The most recent save.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.line = Line()
        self.spare: dict[bool, Buffers] = {}
        self.writer: WriterProcess | None = None
        self.last: SaveFuture | None = None

    def settle(self) -> BaseException | None:
        """Wait for earlier saves; return the last one's error if the caller has not seen it."""
        self.line.drain()
        return None if self.last is None else self.last.unseen_error()

    def start_writer(self) -> WriterProcess:
        """Return the writer process; it gets ready while the state is copied."""
        self.writer = self.writer or WriterProcess()
        self.writer.start()
        return self.writer

    def snapshot(
        self,
        state_dict: State,
        opening: Callable[[], Destination],
        comm: Comm,
        earlier: BaseException | None,
        writer: WriterProcess | None = None,
    ) -> _Copy:
        """Begin to copy a state dict; if that or the previous save failed, return the error."""
        memory = None if writer is None else writer.memory
        spare = self.spare.pop(writer is not None, None)  # given back once the copy is written
        buffers = spare or Buffers(memory)
        if earlier is not None:
            return _Copy(buffers, error=earlier, raised=True)
        try:
            target = attrs.evolve(opening(), process=writer)
            if writer is not None:
                check_portable(target.store, target.writer)
        except Exception as error:
            return _Copy(buffers, error=error, raised=True)
        try:
            state = part(expand(state_dict), place_of(comm))
        except Exception as error:
            return _Copy(buffers, error=error)
        try:
            return _Copy(buffers, target, buffers.begin(state))
        except Exception as error:
            return _Copy(buffers, error=by_name(error, state))

    def run(
        self, future: SaveFuture, copy: _Copy, comm: Comm, options: SaveOptions, watch: Stopwatch
    ) -> None:
        """Save a copy, unless the call that made it was interrupted."""
        if not future.set_running_or_notify_cancel():
            return
        self.last = future
        if not future.staged.done():
            with watch.phase("stage"):
                copy = copy.finished(future, check=True)
        try:
            future.set_result(save_state(comm, copy.opened, copy.state, options, watch))
        except BaseException as error:
            if not copy.raised:
                text = _short(error)
                _log.error("the save to %s failed in the background: %s", future.path, text)
            future.set_exception(error)
        self.spare[isinstance(copy.buffers.memory, SharedMemory)] = copy.buffers

    def stay_away(self, future: SaveFuture, comm: Comm | None, error: BaseException) -> None:
        """Report to the other ranks that this one does not save, unless it has begun to."""
        if future.abandon() and comm is not None:
            reason = f"left the save: {type(error).__name__}: {error}".rstrip(": ")
            with suppress(RuntimeError):  # no thread can be started: the next one runs it
                self.line.put(lambda: comm.leave(reason))  # when the saves before are done


def _torn(names: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"{listed(names)} changed while being copied, so nothing was saved; with overlap=True, "
        "call .staged.result() on what async_save returned before tensors change"
    )


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
