"""Loads in the background: a future per key, so that a model starts while the rest arrives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.io import BlockSums, FormatError, LoadError, Progress, ProgressCallback
from shardplan.io.execute import Reader
from shardplan.planning.columns import distinct
from shardplan.planning.storage import key_batches, plan_bytes, value_reads

from ._line import Line
from ._read import Outcome, values_read
from ._report import LoadReport, place_name
from ._state import at

if TYPE_CHECKING:
    from ._load_plan import LoadCall, PlannedLoad

__all__ = ["LoadFuture", "load_later", "read_by_key"]

_BATCH_BYTES: Final = 64 << 20  # that arrive together
_log = logging.getLogger("shardplan")


class LoadFuture(Future[LoadReport]):
    """A load in progress; ``future[key]`` is a future of one key. See `load`.

    Attributes:
        path: The checkpoint.
        keys: The names of all that is loaded, nested ones with dots, in the order of their arrival.
    """

    def __init__(self, path: str, keys: Iterable[str]) -> None:
        super().__init__()
        self.path = path
        self._futures: dict[str, Future[Any]] = {key: Future() for key in keys}
        self.keys = tuple(self._futures)
        for future in (self, *self._futures.values()):
            Future.set_running_or_notify_cancel(future)

    def __getitem__(self, key: str) -> Future[Any]:
        """Return the future of a key: of its tensor, once that is filled, or of its value."""
        return self._futures[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def arrived(self, key: str, value: Any) -> None:
        """Settle the future of a key."""
        if not self._futures[key].done():
            self._futures[key].set_result(value)

    def fail(self, error: BaseException) -> None:
        """Settle this future, and those of keys that have not arrived."""
        for future in (*self._futures.values(), self):
            if not future.done():
                future.set_exception(error)

    def __repr__(self) -> str:
        done = sum(future.done() for future in self._futures.values())
        return f"LoadFuture({self.path!r}): {done} of {len(self)} keys have arrived"


def load_later(
    call: LoadCall, planned: PlannedLoad, finish: Callable[[LoadCall, PlannedLoad], LoadReport]
) -> LoadFuture:
    """Carry out a planned load in a thread of its own."""
    flat, items = planned.target.flat, planned.wanted.items
    wanted = {items.names[number] for number in distinct(items.dest).tolist()}
    wanted |= {*planned.tied, *planned.blanks}
    future = LoadFuture(place_name(call.path), [name for name in flat if name in wanted])
    Line().put(partial(_run, future, attrs.evolve(call, arrivals=future), planned, finish))
    return future


def _run(
    future: LoadFuture,
    call: LoadCall,
    planned: PlannedLoad,
    finish: Callable[[LoadCall, PlannedLoad], LoadReport],
) -> None:
    try:
        report = finish(call, planned)
        for key in future.keys:
            future.arrived(key, at(planned.target.state, planned.target.paths[key]))
    except BaseException as error:
        _log.error("the load of %s failed in the background: %s", future.path, error)
        future.fail(error)
    else:
        future.set_result(report)


def read_by_key(
    future: LoadFuture,
    reader: Reader,
    planned: PlannedLoad,
    *,
    verify: bool,
    sums: BlockSums,
    progress: ProgressCallback | None,
) -> Outcome:
    """Read all of one rank's load plan, key by key; see `read_rank`."""
    plan, flat = planned.plan, planned.target.flat
    names = value_reads(plan.items)
    values = reader.values(names, verify=verify)
    stats = values_read(reader, [name for _, name in names], verify=verify)
    counter = Progress(plan_bytes(plan, reader.metadata), progress)
    options: dict[str, Any] = {"verify": verify, "sums": sums, "progress": counter}
    filled: list[str] = []
    for items in key_batches(plan, reader.metadata, list(flat), _BATCH_BYTES):
        try:
            stats += reader.fill(items, planned.into.of(items), **options)
        except (FormatError, LoadError) as error:
            raise _having_filled(error, filled) from error
        batch = [items.names[number] for number in distinct(items.dest).tolist()]
        for key in batch:
            future.arrived(key, flat[key])
        filled += batch
    counter.finish()
    return Outcome(stats, values)


def _having_filled(error: FormatError | LoadError, keys: Iterable[str]) -> Exception:
    """Return an error that also names the keys of earlier batches."""
    filled = {*error.filled, *keys}
    if isinstance(error, LoadError):
        return LoadError(error.args[0], filled, error.touched)
    return FormatError(
        error.file, error.reason, filled=filled, touched=error.touched, folder=error.folder
    )
