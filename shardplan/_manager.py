"""Save a training run at intervals, resume it, and remove what the policy drops."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal, SupportsIndex, TypeVar

import attrs

from shardplan.dist import CheckpointError, Comm, all_reduce, broadcast
from shardplan.io import FormatError
from shardplan.io.execute import MIN_AGE
from shardplan.io.formats import find_format, known_formats
from shardplan.io.stores import MissingFileError, Store, StoreError, open_store
from shardplan.planning import Passes, SavePlan, Strict, chain, drop
from shardplan.planning.storage import Best, Keep, RunEntry, by_age, retain

from ._async import SaveFuture, async_save
from ._comm import as_comm
from ._incremental import base_of, run_base
from ._load import load
from ._report import LOG, SaveReport
from ._retention import is_whole, look_at, made
from ._save import save
from ._state import State

METRICS: Final = "metrics.json"
_STEP: Final = re.compile(r"step-([0-9]+)")
_MOST: Final = 1 << 20  # bytes of a file of metrics
_NOTES: Final = 16  # earlier saves of a step; the last ones may have failed
_DAMAGE: Final = (FormatError, StoreError)
_T = TypeVar("_T")


@attrs.frozen
class _Found:
    """A folder of the run: its step, when it was made or last written to, and its state."""

    name: str
    step: int
    created: float | None
    state: Literal["committed", "damaged", "unfinished"]
    format: str = ""


class Checkpoints:
    """The checkpoints of a training run, each a folder such as ``step-500``.

    `save` is called after a step with its number, and `restore` returns that of the next step.
    Only the coordinator lists the folder, and only it removes anything, in a thread of its own.

    Args:
        folder: Where they lie, one folder each; on a disk or in an object store.
        every: Save after every step whose number is a multiple of this.
        seconds: Save also when this much time has passed since the last save, by the
            coordinator's clock. On many ranks each call of `save` then costs a small meeting.
        keep: Which checkpoints stay; see `Keep`.
        background: Whether to save with `async_save`, or with `save`; ``"process"`` has the writer
            process of `async_save` write.
        planner: As in `save`; also used to load.
        format: ``"safetensors"``, ``"dcp"``, or another format that holds values in a folder.
        comm: The ranks; by default all of torch's process group, or this process alone.
        incremental: Whether each save shares files with the newest checkpoint, where most of a file
            is unchanged, instead of writing them: see ``base`` of `shardplan.save`.
        on_sigterm: Whether SIGTERM asks for a save after the current step. The process goes on
            after the signal: end the loop when `stopping` is true. Call from the main thread.

    >>> import tempfile, torch
    >>> folder, w = tempfile.TemporaryDirectory(), torch.zeros(2)
    >>> run = Checkpoints(folder.name, every=2, keep=Keep(last=2, best=("loss", "min", 1)))
    >>> for step in range(run.restore({"w": w}, default=0), 9):
    ...     _ = run.save(step, {"w": w + step}, metrics={"loss": abs(step - 3.9)})
    >>> run.wait()
    >>> run.steps(), run.restore({"w": w}), w
    ((4, 6, 8), 9, tensor([8., 8.]))
    >>> run.best().endswith("step-4")
    True
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Store,
        *,
        every: int | None = None,
        seconds: float | None = None,
        keep: Keep | None = None,
        background: bool | Literal["process"] = True,
        planner: Passes[SavePlan] | None = None,
        format: str = "safetensors",
        comm: Comm | None = None,
        incremental: bool = False,
        on_sigterm: bool = False,
    ) -> None:
        for what, number in (("every", every), ("seconds", seconds)):
            if number is not None and not number > 0:
                raise ValueError(f"{what} must be more than 0, not {number}")
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"keep must be a Keep, such as Keep(last=3), not {keep!r}")
        if background not in (True, False, "process"):
            raise ValueError(f'background must be True, False or "process", not {background!r}')
        kind = find_format(format)
        if kind.is_file or not kind.has_values:
            raise ValueError(
                f"{format!r} does not hold all of a run's state in a folder; save steps as "
                f'"safetensors" or "dcp", and the result with finish(format={format!r})'
            )
        if comm is not None and background and (seconds is not None or on_sigterm):
            raise ValueError(
                "background saves use the comm at any time, but seconds= and on_sigterm= need it "
                "at every step; pass background=False, or leave comm out"
            )
        self._store = open_store(folder)
        self._damaged = set[str]()  # folders that `restore` skipped: no save is based on these
        self._base = run_base(self._store, self._newest) if incremental else None
        base_of(self._base, format)
        self._every, self._seconds, self._keep = every, seconds, keep or Keep(last=3)
        self._background, self._planner = background, planner
        self._format, self._comm = format, comm
        self._saved_at = time.monotonic()
        self._future: SaveFuture | None = None
        self._stop: _Sigterm | None = _Sigterm() if on_sigterm else None
        self._removal = _Removal(self._store, self._keep)

    def __repr__(self) -> str:
        return f"Checkpoints({self._store.url!r})"

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM came, and `save` has saved because of it."""
        return self._stop is not None and self._stop.saved

    def save(
        self,
        step: int,
        state_dict: State,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> SaveFuture | SaveReport | None:
        """Save if it is time to; every rank calls this after every step.

        A checkpoint of the same step, as after going back to an earlier one, is replaced.

        Args:
            step: The number of the step that has just been done.
            state_dict: As in `shardplan.save`.
            metrics: Numbers to choose the best checkpoint by; the coordinator's are used.
            force: Save in any case.

        Returns:
            None if it is not time. A future when saving in the background, else a report.

        Raises:
            Exception: As `shardplan.save` and `async_save`.
        """
        _check_step(step)
        why = self._reason(step, force)
        if why is None:
            return None
        name = f"step-{step}"
        if self._comm is not None and self._future is not None:
            self._future.result()  # the save in the background needs the comm for itself
        comm = as_comm(self._comm)
        try:
            broadcast(comm, "write metrics", lambda: self._begin(name, step, metrics))
            done = self._save(state_dict, self._store.folder(name))
        except BaseException:
            self._removal.release(name)
            raise
        if comm.rank == comm.coordinator:
            self._removal.start(name, done if isinstance(done, SaveFuture) else None)
        self._saved_at = time.monotonic()
        if self._stop is not None and why == "SIGTERM":
            self._stop.saved = True
        return done

    def _save(self, state_dict: State, target: Store) -> SaveFuture | SaveReport:
        options: dict[str, Any] = {"planner": self._planner, "format": self._format}
        options |= {"comm": self._comm, "overwrite": True, "base": self._base}
        if not self._background:
            return save(state_dict, target, **options)
        process = self._background == "process"
        self._future = async_save(state_dict, target, process=process, **options)
        return self._future

    def _newest(self) -> str:
        """Return the folder of the newest checkpoint not known to be damaged; empty if none."""
        folders = [folder for folder in _folders(self._store) if folder.state == "committed"]
        sound = [folder for folder in folders if folder.name not in self._damaged]
        entries = by_age(RunEntry(folder.name, folder.created) for folder in sound)
        return entries[-1].name if entries else ""

    def _reason(self, step: int, force: bool) -> str | None:
        """Return why to save now, the same on all ranks; None if there is no reason."""
        if force:
            return "asked for"
        if self._every is not None and step > 0 and step % self._every == 0:
            return "step"
        if self._seconds is None and self._stop is None:
            return None

        def mine() -> list[bool]:
            late = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
            asked = self._stop is not None and self._stop.asked and not self._stop.saved
            return [asked, late]

        def decide(ranks: list[Any]) -> str:
            asked, (_, late) = any(asked for asked, _ in ranks), ranks[comm.coordinator]
            return "SIGTERM" if asked else "time" if late else ""

        comm = as_comm(self._comm)
        return all_reduce(comm, "decide whether to save", mine, decide) or None

    def _begin(self, name: str, step: int, metrics: Mapping[str, float] | None) -> None:
        """Protect the folder of a step, and write its metrics; see `METRICS`."""
        numbers = {key: float(value) for key, value in (metrics or {}).items()}
        self._removal.protect(name)
        notes = [*_read_notes(self._store, name)[-_NOTES:], {"at": time.time(), "metrics": numbers}]
        data = json.dumps({"step": step, "saves": notes}).encode()
        self._store.replace(f"{name}/{METRICS}", data)

    def restore(
        self,
        state_dict: State,
        *,
        default: int = 0,
        exclude: str | Sequence[str] = (),
        strict: Strict = True,
        dtype: Literal["same", "cast"] = "same",
    ) -> int:
        """Fill a state dict from the newest checkpoint that can be loaded; every rank calls this.

        A checkpoint that is damaged or was not finished is skipped, with a warning that names it.

        Args:
            state_dict: As in `shardplan.load`.
            default: What to return if there is no checkpoint yet.
            exclude: Names in the checkpoint, or patterns such as ``"optimizer.*"``, that are not
                loaded; what the state dict has there stays.
            strict: As in `shardplan.load`.
            dtype: As in `shardplan.load`.

        Returns:
            The number of the next step: one more than that of the checkpoint.

        Raises:
            PlanError: The newest checkpoint does not fit the state dict.
            CheckpointError: On many ranks, any error.
            FormatError, StoreError: There are checkpoints, and all are damaged.
        """
        self.wait()
        patterns = [exclude] if isinstance(exclude, str) else list(exclude)
        planner = self._planner
        if patterns:
            planner = chain(*([] if planner is None else [planner]), drop(*patterns))
        unfinished, found = self._ask("find the newest checkpoint", self._candidates)
        failed: Exception | None = None
        spoilt: set[str] | None = set()  # names with elements of a damaged one; None: any may have
        for name, step in found:
            target = self._store.folder(name)
            try:
                report = load(
                    state_dict, target, planner=planner, strict=strict, dtype=dtype, comm=self._comm
                )
            except Exception as error:
                if not _is_damage(error):
                    raise
                self._damaged.add(name)
                self._warn(f"{target.url} is damaged and was skipped: {error}")
                failed, more = failed or error, _touched(error)
                spoilt = None if spoilt is None or more is None else spoilt | more
                continue
            left = set(report.missing if spoilt is None else spoilt.intersection(report.missing))
            if failed is not None and left:
                raise failed
            self._warn_of(other for other in unfinished if other > step)
            return step + 1
        if failed is not None:
            raise failed
        self._warn_of(unfinished)
        return default

    def _warn_of(self, unfinished: Iterable[int]) -> None:
        for step in unfinished:
            self._warn(f"{self._store.url}/step-{step} was not finished and was skipped", level=4)

    def _warn(self, text: str, level: int = 3) -> None:
        """Warn once for all ranks."""
        comm = as_comm(self._comm)
        if comm.rank == comm.coordinator:
            warnings.warn(text, stacklevel=level)

    def _candidates(self) -> tuple[list[int], list[tuple[str, int]]]:
        """Return unfinished steps, and the folders to try, the newest first."""
        folders = _folders(self._store)
        tried = [folder for folder in folders if folder.state != "unfinished"]
        tried.sort(key=lambda f: (f.created is None, f.created or 0.0, f.step), reverse=True)
        unfinished = [folder.step for folder in folders if folder.state == "unfinished"]
        return unfinished, [(folder.name, folder.step) for folder in tried]

    def steps(self) -> tuple[int, ...]:
        """Return the steps that are saved, in ascending order; every rank calls this."""
        self.wait()

        def listed() -> list[int]:
            return sorted(f.step for f in _folders(self._store) if f.state == "committed")

        return tuple(self._ask("list the checkpoints", listed))

    def best(
        self, metric: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> str | Store | None:
        """Return the path of the best checkpoint; every rank calls this.

        Args:
            metric: The metric; by default that of ``keep.best``.
            mode: Whether small or large values are good.

        Returns:
            What `shardplan.load` takes as a path; None if no checkpoint has the metric.
        """
        self.wait()
        if metric is None and self._keep.best is None:
            raise ValueError('name a metric: best("loss"), or Keep(best=("loss", "min", 1))')
        choice = self._keep.best if metric is None else Best(metric, mode)
        assert choice is not None

        def choose() -> str | None:
            ranked = choice.of(by_age(_entries(self._store, _folders(self._store))))
            return ranked[0].name if ranked else None

        name = self._ask("find the best checkpoint", choose)
        if name is None:
            return None
        root = self._store.locate(name)
        return root if root is not None else self._store.folder(name)

    def wait(self) -> None:
        """Wait for the background save and for removals; raise the save's error, if any."""
        future, self._future = self._future, None
        try:
            if future is not None:
                future.result()
        finally:
            self._removal.wait()

    def finish(
        self,
        state_dict: State,
        name: str = "final",
        *,
        planner: Passes[SavePlan] | None = None,
        format: str | None = None,
    ) -> SaveReport:
        """Save the result of the run, which no policy removes; every rank calls this.

        Args:
            state_dict: As in `shardplan.save`.
            name: Its folder beside the steps.
            planner: What to save of it and how, such as
                ``[select("model.*"), cast("bfloat16")]``; by default the planner of the run.
            format: Such as ``"hf"``; by default the format of the run.
        """
        self.wait()
        if _STEP.fullmatch(name):
            raise ValueError(f"{name!r} is the name of a step, which a policy may remove")
        return save(
            state_dict,
            self._store.folder(name),
            planner=self._planner if planner is None else planner,
            format=format or self._format,
            comm=self._comm,
            overwrite=True,
        )

    def _ask(self, step: str, fn: Callable[[], _T]) -> _T:
        """Have the coordinator look at the folder, and give all ranks what it found."""
        answer: _T = broadcast(as_comm(self._comm), step, fn)
        return answer

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            if self._stop is not None:
                self._stop.close()


class _Sigterm:
    """A handler of SIGTERM that remembers the signal.

    Attributes:
        asked: Whether the signal came to this process.
        saved: Whether a save was made because it came to any rank.
    """

    def __init__(self) -> None:
        self.asked = False
        self.saved = False
        self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self.asked = True

    def close(self) -> None:
        """Restore the earlier handler."""
        before = signal.SIG_DFL if self._before is None else self._before  # None: not Python's
        signal.signal(signal.SIGTERM, before)


class _Removal:
    """Removes what a policy drops, in a thread; only the coordinator has work for it."""

    def __init__(self, store: Store, policy: Keep) -> None:
        self._store, self._policy = store, policy
        self._saving = set[str]()
        self._removing = threading.Lock()
        self._thread: threading.Thread | None = None

    def protect(self, name: str) -> None:
        """Keep a folder that is about to be written; waits if it is just being removed."""
        with self._removing:
            self._saving.add(name)

    def release(self, name: str) -> None:
        """Undo `protect`."""
        self._saving.discard(name)

    def start(self, name: str, save: SaveFuture | None) -> None:
        """Begin to remove what the policy drops, after earlier removals and after a save."""
        arguments = (self._thread, name, save)
        thread = threading.Thread(target=self._run, args=arguments, name="shardplan-remove")
        thread.start()
        self._thread = thread

    def wait(self) -> None:
        """Wait until what was begun is done."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, before: threading.Thread | None, name: str, save: SaveFuture | None) -> None:
        if before is not None:
            before.join()
        # `SaveFuture.exception` would count as the caller's own look at the error.
        failed = save is not None and Future.exception(save) is not None
        self.release(name)
        if failed:
            return
        try:
            folders = _folders(self._store)
            old = retain(_entries(self._store, folders), self._policy).drop
            for folder in (*old, *_abandoned(self._store, folders)):
                with self._removing:
                    if folder not in self._saving:
                        _remove(self._store, folder)
        except Exception as error:  # the next commit tries again
            LOG.warning("could not remove old checkpoints of %s: %s", self._store.url, error)


def _folders(store: Store) -> list[_Found]:
    """Look at the folders of all steps, several at once."""
    names = [name.rstrip("/") for name in store.list(recursive=False) if name.endswith("/")]
    steps = {name: int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
    seen = look_at(store, list(steps), _look, None)
    return [
        attrs.evolve(found, name=name, step=steps[name])
        for name, found in seen.items()
        if found is not None
    ]


def _look(store: Store) -> _Found | None:
    """Look at one folder; its name and step are filled in by the caller. None if it is empty."""
    known = made(store)
    if known is not None:
        return _Found("", 0, known.when, "committed", known.format)
    files = store.entries(recursive=False)
    names = {file.name for file in files}
    if any(not names.isdisjoint(format.marks) for format in known_formats()):
        return _Found("", 0, None, "damaged")
    written = max((file.written for file in files), default=None)
    return None if written is None else _Found("", 0, written, "unfinished")


def _abandoned(store: Store, folders: Sequence[_Found]) -> list[str]:
    """Return the folders of saves that were killed, unless they are too young to be sure.

    A folder without `METRICS`, with which each of our saves begins, is another program's.
    """
    before = time.time() - MIN_AGE
    unfinished = (folder for folder in folders if folder.state == "unfinished")
    old = [folder.name for folder in unfinished if (folder.created or 0.0) < before]
    return [name for name in old if store.exists(f"{name}/{METRICS}")]


def _entries(store: Store, folders: Sequence[_Found]) -> list[RunEntry]:
    """Describe the steps for `retain`."""
    return [
        RunEntry(
            found.name,
            found.created,
            is_whole(store.folder(found.name), found.format),
            found.step,
            _read_metrics(store, found.name, found.created),
        )
        for found in folders
        if found.state == "committed"
    ]


def _read_notes(store: Store, name: str) -> list[Mapping[str, Any]]:
    """Return what `METRICS` of a step says of its saves; nothing if there is no such file."""
    try:
        notes = json.loads(store.read_all(f"{name}/{METRICS}", limit=_MOST))["saves"]
    except (StoreError, ValueError, TypeError, LookupError):
        return []
    return notes if isinstance(notes, list) else []


def _read_metrics(store: Store, name: str, created: float | None) -> dict[str, float]:
    """Return the metrics of the save that made a checkpoint, not of a later one that failed."""
    # Some stores give times in whole seconds.
    made = math.inf if created is None else created + (created == int(created))
    try:
        known = [note for note in _read_notes(store, name) if note["at"] <= made]
        return {str(key): float(value) for key, value in known[-1]["metrics"].items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def _touched(error: Exception) -> set[str] | None:
    """Return the names that a failed load may have changed; None if that is not known."""
    own = error.own if isinstance(error, CheckpointError) else error
    names = [getattr(own, key, None) for key in ("filled", "touched")]
    return None if None in names else {name for some in names for name in some or ()}


def _remove(store: Store, name: str) -> None:
    """Remove a checkpoint, what marks it as one first: it must never look whole while it is not."""
    marks = {mark for format in known_formats() for mark in format.marks}
    files = store.list(name)
    marked = [file for file in files if file.removeprefix(f"{name}/") in marks]
    store.delete(marked)
    store.sync()
    store.delete(files)
    LOG.info("removed %s of %s", name, store.url)


def _is_damage(error: Exception) -> bool:
    """Return True if a load failed because of the files of the checkpoint."""
    if not isinstance(error, CheckpointError):
        return isinstance(error, _DAMAGE)
    damage = {kind.__name__ for kind in (*_DAMAGE, MissingFileError)}
    return all(failure.type in damage for failure in error.failures)


def _check_step(step: object) -> None:
    if isinstance(step, bool) or not isinstance(step, SupportsIndex) or step.__index__() < 0:
        what = f"a {type(step).__name__}; is it save(step, state_dict)?"
        shown = what if isinstance(step, Mapping) else repr(step)
        raise ValueError(f"a step is a whole number, 0 or more, not {shown}")
