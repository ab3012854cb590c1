"""What a save, a load or a reshard costs: bytes, requests, files, balance and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt
from attrs.validators import ge, gt

from ..columns.arrays import Columns
from ..errors import span
from ..mesh.worlds import WorldPlans
from ..metadata import Metadata
from ..plans import LoadPlan, SavePlan
from ..text import Printed, Sheet, Table, counted, human_bytes, human_seconds
from .origins import Writers, writers_of
from .reshard import reshard_traffic
from .traffic import FileCost, FileCosts, RankCost, RankCosts, Traffic, load_traffic, save_traffic

Kind = Literal["save", "load", "reshard"]
Plans = Sequence[SavePlan] | Sequence[LoadPlan]
T = TypeVar("T")
_Columns = dict[str, Callable[[T], object]]  # by heading, the text of a record's cell

_SHOWN: Final = 12  # ranks or files that are listed; of more, the heaviest and the lightest
_HEAVY: Final = 6
_LIGHT: Final = 3
_UNEVEN: Final = 1.2  # imbalance, from here on worth a warning
_REPEATED: Final = 2.0  # read amplification, likewise
_CROWD: Final = 8  # ranks that read one file, if all of them do
_MANY: Final = 1_000  # requests of one rank, if they are tiny
_TINY: Final = 64 * 1024  # bytes of a request


@attrs.frozen
class CostModel:
    """How fast things move: a stated guess, not a measurement; bandwidths are bytes a second.

    A rank takes ``bytes / storage_bandwidth + rounds * request_latency + moved /
    network_bandwidth`` seconds: ``parallel_requests`` requests make a round, and what it sends or
    receives, whichever is more, is moved. All together take as long as the slowest rank, but no
    less than ``all bytes / storage_total``.

    >>> CostModel(storage_bandwidth=1e9, request_latency=0.0).seconds(2_000_000_000, 5, 0)
    2.0
    """

    storage_bandwidth: float = attrs.field(default=2e9, validator=gt(0))  # of one rank
    storage_total: float = attrs.field(default=200e9, validator=gt(0))  # of all ranks together
    network_bandwidth: float = attrs.field(default=25e9, validator=gt(0))  # of a rank, each way
    request_latency: float = attrs.field(default=1e-3, validator=ge(0))  # seconds until an answer
    parallel_requests: int = attrs.field(default=16, validator=gt(0))  # of one rank at a time

    def seconds(self, nbytes: Any, requests: Any, moved: Any) -> Any:
        """Return how long a rank takes; numbers or columns of them."""
        storage = nbytes / self.storage_bandwidth
        rounds = -(-requests // self.parallel_requests)
        return storage + rounds * self.request_latency + moved / self.network_bandwidth

    def __str__(self) -> str:
        return (
            f"storage {_rate(self.storage_bandwidth)} a rank and {_rate(self.storage_total)} in "
            f"all, {_rate(self.network_bandwidth)} between ranks, "
            f"{human_seconds(self.request_latency)} a request, {self.parallel_requests} at a time"
        )


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:g} GB/s"


@attrs.frozen
class Totals:
    """The figures of everything together."""

    needed: int  # bytes that ranks read (or write) for themselves, and receive
    nbytes: int  # bytes that move between ranks and storage
    unique: int  # bytes of storage that move at least once: one copy of everything
    # Bytes if every read fetched all of its saved chunk, as torch's reader does; None for a save.
    whole_chunks: int | None
    requests: int
    elements: int
    sent: int  # bytes that ranks send each other
    imbalance: float  # the largest rank's bytes by the mean; 1 is even
    slowest: int | None  # the rank that takes longest; None if there is no rank
    seconds: float  # by the model

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


@attrs.frozen(repr=False)
class Report(Printed):
    """What a save, a load or a reshard costs; printed as tables."""

    kind: Kind
    ranks: RankCosts  # the figures of each rank: `RankCost`s, with a column a field
    files: FileCosts | None  # likewise of each file; None if the writers are unknown
    totals: Totals
    model: CostModel
    warnings: tuple[str, ...]  # what is worth a second look, in whole sentences
    metadata: Metadata  # what was explained
    plans: Plans
    writers: Writers | None

    @property
    def _sheet(self) -> Sheet:
        totals, count, is_save = self.totals, len(self.ranks), self.kind == "save"
        title = (
            f"{self.kind.capitalize()}: {counted(count, 'rank')} "
            f"{'write' if is_save else 'read'}{'s' * (count == 1)} "
            f"{human_bytes(totals.nbytes)} in {counted(totals.requests, 'request')}, "
            f"about {human_seconds(totals.seconds)}"
        )
        tables = [Table(("figure", "value"), figures(self)), *_tables(self)]
        notes = [f"Warning: {text}" for text in self.warnings]
        if self.files is None:
            notes.append("The files are not known: pass writers= to see files and writers.")
        return Sheet(title, tables, [*notes, f"Model: {self.model}."])


def explain(
    metadata: Metadata,
    plans: Iterable[SavePlan] | Iterable[LoadPlan],
    *,
    writers: Writers | Iterable[SavePlan] | None = None,
    model: CostModel | None = None,
) -> Report:
    """Report what plans will cost, before anything is read or written.

    The kind of plans decides what is explained. Load plans: what each rank reads and receives.
    Save plans: what each rank writes (to explain how they are filled, pass ``load_plan(metadata,
    plan)`` of each). `WorldPlans`: the reshard from the checkpoint to that world, layout by layout,
    without making any rank's plan.

    ``writers`` are who wrote each chunk, or the plans that wrote them: each rank's chunks are taken
    to lie in a file of its own. Without them, only a save reports files.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, local_plan
    >>> sd = {"w": TensorSpec((6, 4), "float32", [Shard(0)])}
    >>> saved, metadata = global_plan(local_plan(sd, mesh=Mesh(dp=2), rank=r) for r in range(2))
    >>> wanted = [local_plan(sd, mesh=Mesh(dp=3), rank=r) for r in range(3)]
    >>> report = explain(metadata, [load_plan(metadata, plan) for plan in wanted], writers=saved)
    >>> [(cost.nbytes, cost.requests, cost.peers) for cost in report.ranks]
    [(32, 1, 1), (32, 2, 2), (32, 1, 1)]
    >>> report.totals.amplification, report.totals.whole_chunk_amplification
    (1.0, 2.0)

    Raises:
        NotFoundError: A plan names a tensor or value that the metadata does not list.
        PlanError: Plans and metadata do not fit each other.
    """
    if not (writers is None or isinstance(writers, Writers)):
        writers = writers_of(writers, metadata)
    given = cast(Plans, plans if isinstance(plans, WorldPlans) else tuple(plans))
    kind, traffic = _count(metadata, given, writers)
    how = model or CostModel()
    moved = np.maximum(traffic.ranks.sent, traffic.ranks.received)
    seconds = how.seconds(traffic.ranks.nbytes, traffic.ranks.requests, moved)
    ranks, nbytes = attrs.evolve(traffic.ranks, seconds=seconds), int(traffic.ranks.nbytes.sum())
    totals = Totals(
        needed=nbytes - traffic.relayed + int(ranks.received.sum()),
        nbytes=nbytes,
        unique=traffic.unique,
        whole_chunks=traffic.whole,
        requests=int(ranks.requests.sum()),
        elements=int(ranks.elements.sum()),
        sent=int(ranks.sent.sum()),
        imbalance=float(ranks.nbytes.max() * len(ranks) / nbytes) if nbytes else 1.0,
        slowest=int(seconds.argmax()) if len(ranks) else None,
        seconds=max(float(seconds.max(initial=0.0)), nbytes / how.storage_total),
    )
    warnings = tuple(_warnings(kind, ranks, traffic.files, totals))
    return Report(kind, ranks, traffic.files, totals, how, warnings, metadata, given, writers)


def _count(metadata: Metadata, plans: Plans, writers: Writers | None) -> tuple[Kind, Traffic]:
    """Count what plans move, by the kind they are of."""
    if isinstance(plans, WorldPlans):
        return "reshard", reshard_traffic(metadata, plans, writers)
    loads = [plan for plan in plans if isinstance(plan, LoadPlan)]
    saves = [plan for plan in plans if isinstance(plan, SavePlan)]
    if len(loads) == len(plans):
        return "load", load_traffic(metadata, loads, writers)
    if len(saves) != len(plans):
        kinds = sorted({type(plan).__name__ for plan in plans})
        raise TypeError(f"expected the save plans or the load plans of all ranks, not {kinds}")
    for name in dict.fromkeys(name for plan in saves for name in plan.items.catalog.names):
        metadata.entry(name)  # raises, with the nearest names
    return "save", save_traffic(saves)


def _warnings(
    kind: Kind, ranks: RankCosts, files: FileCosts | None, totals: Totals
) -> Iterator[str]:
    """Yield what a person should look at before this runs."""
    if totals.imbalance > _UNEVEN:
        most, verb = int(ranks.nbytes.argmax()), "writes" if kind == "save" else "reads"
        text = f"Rank {most} {verb} {human_bytes(int(ranks.nbytes[most]))}, "
        waits = float(ranks.seconds.max()) >= totals.seconds  # else all wait for storage
        yield f"{text}{totals.imbalance:.2f} times the mean{': others wait for it' * waits}."
    if kind == "save" and totals.nbytes > totals.unique:
        extra = human_bytes(totals.nbytes - totals.unique)
        yield f"{extra} would be written more than once: run global_plan, or dedup_replicas, first."
    if kind != "save" and totals.amplification >= _REPEATED:
        times = f"{totals.amplification:.1f} times"
        yield f"A byte is read {times} on average: share_reads has it read once and passed on."
    tiny = np.flatnonzero((ranks.requests >= _MANY) & (ranks.nbytes < ranks.requests * _TINY))
    if len(tiny):
        worst = ranks[int(tiny[ranks.requests[tiny].argmax()])]
        each = human_bytes(worst.nbytes / worst.requests)
        text = f"{len(tiny):,} of {len(ranks):,} ranks make many tiny requests (rank {worst.rank}: "
        yield f"{text}{worst.requests:,} of {each} each): merge neighbours, or cut leading axes."
    crowded = [] if files is None else files.file[files.readers == len(ranks)].tolist()
    if crowded and len(ranks) >= _CROWD:
        whose, verb = ("file", "is") if len(crowded) == 1 else ("files", "are")
        yield f"The {whose} of {span(crowded)} {verb} read by all {len(ranks):,} ranks."


def figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the totals, one line each, without those that say nothing here."""
    totals, is_save = report.totals, report.kind == "save"
    what = "of one copy of everything" if is_save else "in the checkpoint that are read"
    yield f"bytes {what}", human_bytes(totals.unique)
    does = "written" if is_save else "read"
    yield f"times that each is {does} (amplification)", f"{totals.amplification:.2f}"
    if totals.whole_chunk_amplification is not None:
        yield "likewise, if whole chunks were read", f"{totals.whole_chunk_amplification:.2f}"
    yield "busiest rank against the mean", f"{totals.imbalance:.2f}"
    if totals.sent:
        yield "sent between ranks", human_bytes(totals.sent)
    if len(report.ranks):
        yield "largest staging buffer", human_bytes(int(report.ranks.peak_buffer.max()))
        slowest = report.ranks[totals.slowest or 0]
        yield "slowest rank", f"{slowest.rank} ({human_seconds(slowest.seconds)})"
        if slowest.seconds < totals.seconds:
            rate = f"{human_bytes(totals.nbytes)} at {_rate(report.model.storage_total)}"
            yield "all ranks, as storage serves them", f"{human_seconds(totals.seconds)} ({rate})"


def _tables(report: Report) -> Iterator[Table]:
    """Yield the tables of ranks and of files."""
    ranks, files, is_save = report.ranks, report.files, report.kind == "save"
    columns: _Columns[RankCost] = {
        "rank": lambda cost: str(cost.rank),
        "writes" if is_save else "reads": lambda cost: human_bytes(cost.nbytes),
        "requests": lambda cost: cost.requests,
    }
    if ranks.peers is not None:
        columns["writers"] = lambda cost: cost.peers
    columns["buffer"] = lambda cost: human_bytes(cost.peak_buffer)
    if ranks.sent.any() or ranks.received.any():
        columns["sent"] = lambda cost: human_bytes(cost.sent)
        columns["received"] = lambda cost: human_bytes(cost.received)
    columns["time"] = lambda cost: human_seconds(cost.seconds)
    yield _table(ranks, ranks.seconds, columns, "{} slowest and {} fastest of {:,} ranks")
    if files is not None:
        by_file: _Columns[FileCost] = {
            "files of rank": lambda cost: str(cost.file),
            "written" if is_save else "read": lambda cost: human_bytes(cost.nbytes),
            "requests": lambda cost: cost.requests,
        }
        if not is_save:
            by_file["by ranks"] = lambda cost: cost.readers
        yield _table(files, files.nbytes, by_file, "{} largest and {} smallest of {:,} files")


def _table(
    figures: Columns[T], weight: npt.NDArray[Any], columns: _Columns[T], caption: str
) -> Table:
    """List all figures if they are few; of many the heaviest and the lightest."""
    head, count = tuple(columns), len(weight)
    if count <= _SHOWN:
        return Table(head, [[text(cost) for text in columns.values()] for cost in figures])
    order = np.argsort(-weight, kind="stable")[[*range(_HEAVY), *range(-_LIGHT, 0)]]
    rows = [[text(cost) for text in columns.values()] for cost in figures.take(order)]
    rows.insert(_HEAVY, ["…", *[""] * (len(head) - 1)])
    return Table(head, rows, f"The {caption.format(_HEAVY, _LIGHT, count)}:")
