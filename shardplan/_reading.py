"""Carry out a load plan: all of it from storage, or together with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import attrs
import numpy as np
import torch

from shardplan.dist import Comm, LostRanksError
from shardplan.io import BlockSums, FormatError, LoadError, Progress, StoredValue, Tell
from shardplan.io.execute import Reader, ReadStats
from shardplan.planning import LoadItemType, LoadPlan, Metadata, PlanError
from shardplan.planning.columns import ReadItems, distinct

from ._destinations import destinations, refuse_shared
from ._fanout import FanOut, add_stats
from ._parcels import Parcels, loaded, value_names, values_read
from ._report import place_name
from ._wishes import nbytes_of

__all__ = ["Outcome", "SharedRead", "noting", "overwritten", "read_rank"]

P = ParamSpec("P")
T = TypeVar("T")

_TOGETHER: Final = "ranks load together: on each of them, any key of the load may be overwritten"


@attrs.frozen
class Outcome:
    """What one rank read.

    Attributes:
        stats: What it took.
        values: The values that are no tensors, by name in the state dict.
        sent, received: Bytes that went to other ranks, and came from them.
    """

    stats: ReadStats
    values: Mapping[str, Any]
    sent: int = 0
    received: int = 0


def read_rank(
    reader: Reader,
    flat: Mapping[str, Any],
    plan: LoadPlan,
    *,
    dest: Callable[[int], torch.Tensor] | None = None,
    verify: bool = True,
    sums: BlockSums | None = None,
    progress: Tell | None = None,
) -> Outcome:
    """Carry out one rank's load plan, reading all of it from storage.

    Args:
        reader: The checkpoint.
        flat: The rank's state dict, flattened; its tensors are filled.
        plan: What to read.
        dest: Where reads go, if they were checked already; see `destinations`.
        verify: Whether to check what is read whole against its checksums.
        sums: Gets the checksums of blocks that are read whole, of chunks that are not.
        progress: Called with the bytes of tensors done, and in all.
    """
    values = reader.values(plan, verify=verify)
    names = [name for _, name in value_names(plan.items)]
    stats = values_read(reader, names, verify=verify)
    dest = destinations(flat, plan.items, reader) if dest is None else dest
    told = Progress(nbytes_of(plan, reader.metadata), progress)
    filled = reader.fill(plan.items, dest, verify=verify, sums=sums, progress=told)
    told.finish()
    return Outcome(add_stats(stats, filled), values)


def noting(place: object, work: Callable[P, T]) -> Callable[P, T]:
    """Return what does the same; what it raises about a checkpoint also tells which one it is.

    >>> def read():
    ...     raise FormatError("shardplan.json", "it is not JSON")
    >>> try:
    ...     noting("run/step-7", read)()
    ... except FormatError as error:
    ...     print(error.__notes__)
    ['the checkpoint is run/step-7']
    """

    def run(*args: P.args, **options: P.kwargs) -> T:
        try:
            return work(*args, **options)
        except (FormatError, LoadError, PlanError) as error:
            error.add_note(f"the checkpoint is {place_name(place)}")
            raise

    return run


def overwritten(error: Exception, items: ReadItems, *, together: bool) -> Exception:
    """Return an error that says of all that a rank reads that it may be overwritten in part.

    Args:
        error: What stopped the load, at a time at which nobody knows how far it had come.
        items: What this rank wanted.
        together: Whether other ranks are no better off.
    """
    tensors = items.type == LoadItemType.TENSOR.value
    keys = [items.names[number] for number in distinct(items.dest[tensors]).tolist()]
    more = f"; {_TOGETHER}" if together else ""
    if isinstance(error, FormatError):
        return FormatError(error.file, f"{error.reason}{more}", touched=keys)
    text = error.args[0] if isinstance(error, LoadError) else f"the load failed: {error}"
    return LoadError(f"{text}{more}", (), keys)


@attrs.frozen(eq=False)
class SharedRead:
    """One rank's part of a load in which ranks read for each other.

    Attributes:
        comm: The ranks.
        reader: The checkpoint; None on a rank that cannot read it.
        metadata: What the checkpoint holds.
        flat: The rank's state dict, flattened; its tensors are filled.
        plan: What to read, and for whom.
        told: Values that every rank was given already, by name in the checkpoint.
        place: Where the checkpoint is, for errors.
        progress: Called with the bytes of tensors done, and in all.
    """

    comm: Comm
    reader: Reader | None
    metadata: Metadata
    flat: Mapping[str, Any]
    plan: LoadPlan
    told: Mapping[str, StoredValue] | None
    place: str
    progress: Tell | None = None

    def run(self, *, verify: bool, sums: BlockSums) -> Outcome:
        """Read, send and receive; if anything fails here, others still get what they wait for."""
        failed: list[Exception] = []
        transfers = self.plan.transfers
        mine = np.flatnonzero(transfers.target == self.comm.rank)
        coming, place = transfers.reads.take(mine), {int(row): at for at, row in enumerate(mine)}
        own: Callable[[int], torch.Tensor] = _nowhere
        theirs: Callable[[int], torch.Tensor] = _nowhere
        everything = ReadItems.concat([self.plan.items, coming])
        try:
            if self.reader is not None:
                refuse_shared(self.flat, everything, self.reader)
            own = destinations(self.flat, self.plan.items)
            theirs = destinations(self.flat, coming)
        except Exception as error:
            failed.append(error)
        first = self._values(value_names(everything), failed, verify)
        fan = FanOut(self.comm, self.reader, self.metadata, self.plan, failed, sums)
        stats = fan.run(own, lambda row: theirs(place[row]), verify=verify, tell=self.progress)
        return Outcome(
            add_stats(first.stats, stats),
            first.values,
            first.sent + fan.sent,
            first.received + fan.received,
        )

    def _values(
        self, names: list[tuple[str, str]], failed: list[Exception], verify: bool
    ) -> Outcome:
        """Bring the values that are no tensors, given by their names here and in the checkpoint."""
        if self.reader is None or self.told is not None:
            return Outcome(ReadStats(), loaded(self.told or {}, names, self.place))
        parcels = Parcels(self.comm, self.reader, self.plan.transfers)
        try:
            stored = parcels.exchange(failed, verify=verify)
        except LostRanksError:
            raise
        except Exception as error:  # of the comm: others would wait for what never comes
            self.comm.leave(f"left the load: {type(error).__name__}: {error}")
            raise
        alone = [pair for pair in names if pair[1] not in parcels.shared]
        here = [pair for pair in names if pair[1] in stored]  # all, if no rank has failed
        values: dict[str, Any] = {}
        try:
            if not failed:
                found = self.reader.pool.map(lambda n: self._value(n[1], verify), alone)
                values = dict(zip([dest for dest, _ in alone], found, strict=True))
                values |= loaded(stored, here, self.place)
        except Exception as error:
            failed.append(error)
        names_read = [*(name for _, name in alone), *parcels.read]
        stats = values_read(self.reader, names_read, verify=verify)
        return Outcome(stats, values, parcels.sent, parcels.received)

    def _value(self, name: str, verify: bool) -> Any:
        assert self.reader is not None
        return self.reader.value(name, verify=verify)


def _nowhere(row: int) -> torch.Tensor:
    """Stand in for where reads go, once it is known that the load fails."""
    raise LookupError(f"read {row} has nowhere to go")
