"""What is a cost? The figures of a rank, of a file and of everything, and the model behind them."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ..columns import Columns, Index
from ..packing import Ints, readonly

__all__ = ["CostModel", "FileCost", "FileCosts", "RankCost", "RankCosts", "Totals"]

T = TypeVar("T")
Floats = npt.NDArray[np.float64]


def _positive(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be above 0, not {value}")


def _not_negative(instance: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{attribute.name} must not be negative, and is {value}")


@attrs.frozen
class CostModel:
    """How fast things move: a stated guess, not a measurement.

    A rank takes ``bytes / storage_bandwidth + rounds * request_latency + moved /
    network_bandwidth`` seconds: ``parallel_requests`` requests make a round, and what it sends or
    receives, whichever is more, is moved. All together take as long as the slowest rank, but no
    less than ``all bytes / storage_total``.

    Attributes:
        storage_bandwidth: Bytes a second between one rank and storage.
        storage_total: Bytes a second between all ranks together and storage.
        network_bandwidth: Bytes a second between one rank and the others, each way.
        request_latency: Seconds that storage takes to answer a request.
        parallel_requests: How many requests a rank has under way at a time.

    >>> CostModel(storage_bandwidth=1e9, request_latency=0.0).seconds(2_000_000_000, 5, 0)
    2.0
    """

    storage_bandwidth: float = attrs.field(default=2e9, validator=_positive)
    storage_total: float = attrs.field(default=200e9, validator=_positive)
    network_bandwidth: float = attrs.field(default=25e9, validator=_positive)
    request_latency: float = attrs.field(default=1e-3, validator=_not_negative)
    parallel_requests: int = attrs.field(default=16, validator=_positive)

    def seconds(self, nbytes: Any, requests: Any, moved: Any) -> Any:
        """Return how long a rank takes; numbers or columns of them."""
        storage = nbytes / self.storage_bandwidth
        rounds = -(-requests // self.parallel_requests)
        return storage + rounds * self.request_latency + moved / self.network_bandwidth


@attrs.frozen
class RankCost:
    """What one rank does.

    Attributes:
        rank: Which rank.
        nbytes: Bytes that it moves from storage, or, in a save, to storage.
        requests: Contiguous runs of bytes that it asks for, before neighbours are merged.
        elements: Elements that it moves.
        peers: From how many files it reads; None in a save, or if nobody knows what lies where.
        peak_buffer: Bytes of the largest piece that must be staged: it is not contiguous in the
            tensor it goes to (or comes from), or it is known to be cast. A shard that no plan
            describes is taken to be the box that its pieces span.
        sent, received: Bytes that it sends to other ranks, and receives from them.
        seconds: How long it takes, by the model.
    """

    rank: int
    nbytes: int
    requests: int
    elements: int
    peers: int | None
    peak_buffer: int
    sent: int
    received: int
    seconds: float


@attrs.frozen
class FileCost:
    """What happens to one file.

    Attributes:
        file: The rank that wrote it.
        nbytes: Bytes that are read from it, or, in a save, written to it.
        requests: How many requests it gets.
        readers: How many ranks read it; 0 in a save.
    """

    file: int
    nbytes: int
    requests: int
    readers: int


class _Figures(Columns[T]):
    """Records of numbers; one column a field, None where nobody knows."""

    _record: ClassVar[Any]

    @property
    def columns(self) -> tuple[npt.NDArray[Any] | None, ...]:
        """Every column, in order of the record's fields."""
        return tuple(getattr(self, field.name) for field in attrs.fields(self._record))

    def __len__(self) -> int:
        column = self.columns[0]
        return 0 if column is None else len(column)

    def record(self, row: int) -> T:
        """Make the record of one row."""
        values = [None if c is None else c[row].item() for c in self.columns]
        made: T = self._record(*values)
        return made

    def take(self, rows: Index | slice) -> Self:
        """Return the given rows (numbers, a mask or a slice), in that order."""
        return type(self)(*(None if c is None else readonly(c[rows]) for c in self.columns))

    def _same(self, other: Self) -> bool:
        pairs = zip(self.columns, other.columns, strict=True)
        return all(
            a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs
        )


@attrs.frozen(eq=False, repr=False)
class RankCosts(_Figures[RankCost]):
    """The figures of all ranks; see `RankCost`."""

    _record = RankCost
    rank: Ints
    nbytes: Ints
    requests: Ints
    elements: Ints
    peers: Ints | None
    peak_buffer: Ints
    sent: Ints
    received: Ints
    seconds: Floats


@attrs.frozen(eq=False, repr=False)
class FileCosts(_Figures[FileCost]):
    """The figures of all files; see `FileCost`."""

    _record = FileCost
    file: Ints
    nbytes: Ints
    requests: Ints
    readers: Ints


@attrs.frozen
class Totals:
    """The figures of everything together.

    Attributes:
        needed: Bytes that ranks need: those they read (or write) for themselves, and receive.
        nbytes: Bytes that move between ranks and storage.
        unique: Bytes of storage that move at least once: what one copy of everything takes.
        whole_chunks: Bytes that a reader moves that fetches all of a saved chunk for every read,
            as torch's does; None for a save.
        requests: Requests of all ranks.
        elements: Elements that move.
        sent: Bytes that ranks send each other.
        imbalance: The largest rank's bytes by the mean; 1 is even.
        slowest: The rank that takes longest; None if there is no rank.
        seconds: How long everything takes, by the model.
    """

    needed: int
    nbytes: int
    unique: int
    whole_chunks: int | None
    requests: int
    elements: int
    sent: int
    imbalance: float
    slowest: int | None
    seconds: float

    @property
    def amplification(self) -> float:
        """How often a byte moves, on average: 1 is best."""
        return self.nbytes / self.unique if self.unique else 1.0

    @property
    def whole_chunk_amplification(self) -> float | None:
        """Likewise, for a reader that fetches whole chunks; None for a save."""
        if self.whole_chunks is None:
            return None
        return self.whole_chunks / self.unique if self.unique else 1.0
