"""What will it cost? Bytes, requests, writers, balance and time of a save, a load or a reshard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import span
from ..metadata import Metadata
from ..packing import readonly
from ..records import LoadPlan, SavePlan
from ..sheet import Sheet, Table, human_seconds
from ..text import counted, human_bytes
from ..topology import WorldPlans
from .costs import CostModel, FileCost, FileCosts, RankCost, RankCosts, Totals
from .reshard import reshard_traffic
from .traffic import Traffic, load_traffic, save_traffic
from .writers import Writers, writers_of

__all__ = ["CostModel", "FileCost", "RankCost", "Report", "Totals", "explain", "figures"]

Kind = Literal["save", "load", "reshard"]
Plans = Sequence[SavePlan] | Sequence[LoadPlan]

_SHOWN: Final = 12  # ranks or files that are listed; of more, the heaviest and the lightest
_HEAVY: Final = 6
_LIGHT: Final = 3
_UNEVEN: Final = 1.2  # imbalance, from here on worth a warning
_REPEATED: Final = 2.0  # read amplification, likewise
_CROWD: Final = 8  # ranks that must read one file, if all of them do
_MANY: Final = 1_000  # requests of one rank, if they are tiny
_TINY: Final = 64 * 1024  # bytes of a request


@attrs.frozen(repr=False)
class Report:
    """What a save, a load or a reshard costs; printed as tables.

    Attributes:
        kind: ``"save"``, ``"load"`` or ``"reshard"``.
        ranks: The figures of each rank: an immutable sequence of `RankCost`, with a column a field.
        files: Likewise of each file (`FileCost`); None if nobody knows what lies where.
        totals: The figures of everything together.
        model: How fast things were taken to be.
        warnings: What is worth a second look, in whole sentences.
        metadata, plans, writers: What was explained.
    """

    kind: Kind
    ranks: RankCosts
    files: FileCosts | None
    totals: Totals
    model: CostModel
    warnings: tuple[str, ...]
    metadata: Metadata
    plans: Plans
    writers: Writers | None

    def __repr__(self) -> str:
        return _sheet(self).text()

    def _repr_html_(self) -> str:
        return _sheet(self).html()


def explain(
    metadata: Metadata,
    plans: Iterable[SavePlan] | Iterable[LoadPlan],
    *,
    writers: Writers | Iterable[SavePlan] | None = None,
    model: CostModel | None = None,
) -> Report:
    """Say what plans will cost, before anything is read or written.

    The plans tell what is explained. Load plans: what each rank reads and receives. Save plans:
    what each rank writes (to explain how they are filled, pass ``load_plan(metadata, plan)`` of
    each). `WorldPlans`: the reshard from the checkpoint to that world, layout by layout, without
    making any rank's plan.

    Args:
        metadata: The checkpoint.
        plans: One plan per rank, in rank order.
        writers: Who wrote each chunk, or the plans that wrote them: each rank's chunks are taken to
            lie in a file of its own. Left out, nothing is said about files, save for a save.
        model: How fast things are; `CostModel` states the defaults.

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
        NotFoundError: A plan names what the metadata does not list.
        PlanError: Plans and metadata do not fit each other.
    """
    how = model or CostModel()
    if isinstance(writers, Writers) or writers is None:
        known = writers
    else:
        known = writers_of(writers, metadata)
    if isinstance(plans, WorldPlans):
        return _report(
            "reshard", reshard_traffic(metadata, plans, known), how, metadata, plans, known
        )
    given = tuple(plans)
    loads = tuple(plan for plan in given if isinstance(plan, LoadPlan))
    saves = tuple(plan for plan in given if isinstance(plan, SavePlan))
    if len(loads) == len(given):
        return _report("load", load_traffic(metadata, loads, known), how, metadata, loads, known)
    if len(saves) != len(given):
        kinds = sorted({type(plan).__name__ for plan in given})
        raise TypeError(f"expected the save plans or the load plans of all ranks, not {kinds}")
    for name in dict.fromkeys(name for plan in saves for name in plan.items.catalog.names):
        metadata.entry(name)  # raises, with the nearest names
    return _report("save", save_traffic(saves), how, metadata, saves, known)


def _report(
    kind: Kind,
    traffic: Traffic,
    model: CostModel,
    metadata: Metadata,
    plans: Plans,
    writers: Writers | None,
) -> Report:
    """Add times and warnings to what was counted."""
    moved = np.maximum(traffic.sent, traffic.received)
    seconds = model.seconds(traffic.nbytes, traffic.requests, moved)
    ranks = RankCosts(
        rank=readonly(np.arange(len(seconds))),
        nbytes=readonly(traffic.nbytes),
        requests=readonly(traffic.requests),
        elements=readonly(traffic.elements),
        peers=None if traffic.peers is None else readonly(traffic.peers),
        peak_buffer=readonly(traffic.peak),
        sent=readonly(traffic.sent),
        received=readonly(traffic.received),
        seconds=readonly(seconds),
    )
    files = None
    if traffic.files is not None:
        columns = (traffic.files, traffic.file_nbytes, traffic.file_requests, traffic.readers)
        files = FileCosts(*map(readonly, columns))
    totals = _totals(traffic, ranks, model)
    warnings = tuple(_warnings(kind, ranks, files, totals))
    return Report(kind, ranks, files, totals, model, warnings, metadata, plans, writers)


def _totals(traffic: Traffic, ranks: RankCosts, model: CostModel) -> Totals:
    nbytes, seconds = int(ranks.nbytes.sum()), ranks.seconds
    return Totals(
        needed=nbytes - traffic.relayed + int(ranks.received.sum()),
        nbytes=nbytes,
        unique=traffic.unique,
        whole_chunks=traffic.whole,
        requests=int(ranks.requests.sum()),
        elements=int(ranks.elements.sum()),
        sent=int(ranks.sent.sum()),
        imbalance=float(ranks.nbytes.max() * len(ranks) / nbytes) if nbytes else 1.0,
        slowest=int(seconds.argmax()) if len(ranks) else None,
        seconds=max(float(seconds.max(initial=0.0)), nbytes / model.storage_total),
    )


def _warnings(
    kind: Kind, ranks: RankCosts, files: FileCosts | None, totals: Totals
) -> Iterator[str]:
    """Say what a person should look at before this runs."""
    verb = "writes" if kind == "save" else "reads"
    if totals.imbalance > _UNEVEN:
        most = int(ranks.nbytes.argmax())
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
    if files is not None and len(ranks) >= _CROWD:
        crowded = files.file[files.readers == len(ranks)].tolist()
        if crowded:
            whose = "The file of" if len(crowded) == 1 else "The files of"
            verb = "is" if len(crowded) == 1 else "are"
            yield f"{whose} {span(crowded)} {verb} read by all {len(ranks):,} ranks."


def _sheet(report: Report) -> Sheet:
    totals, count = report.totals, len(report.ranks)
    does = "write" if report.kind == "save" else "read"
    title = (
        f"{report.kind.capitalize()}: {counted(count, 'rank')} {does}{'s' * (count == 1)} "
        f"{human_bytes(totals.nbytes)} in {counted(totals.requests, 'request')}, "
        f"about {human_seconds(totals.seconds)}"
    )
    tables = [Table(("figure", "value"), figures(report)), _rank_table(report)]
    notes = [f"Warning: {text}" for text in report.warnings]
    if report.files is None:
        notes.append(
            "What lies in which file is not known: pass writers= to see files and writers."
        )
    else:
        tables.append(_file_table(report.files, is_save=report.kind == "save"))
    return Sheet(title, tables, [*notes, _stated(report.model)])


def _stated(model: CostModel) -> str:
    """Say in a sentence what the times rest on."""
    rank, everyone, network = map(
        _rate, (model.storage_bandwidth, model.storage_total, model.network_bandwidth)
    )
    return (
        f"Model: storage {rank} a rank and {everyone} in all, {network} between ranks, "
        f"{human_seconds(model.request_latency)} a request, {model.parallel_requests} at a time."
    )


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:g} GB/s"


def figures(report: Report) -> Iterator[tuple[str, str]]:
    """Give the totals, one line each, leaving out what says nothing here."""
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


def _rank_table(report: Report) -> Table:
    ranks = report.ranks
    shows_sent = bool(ranks.sent.any() or ranks.received.any())
    does = "writes" if report.kind == "save" else "reads"
    head = ["rank", does, "requests", "writers", "buffer", "sent", "received", "time"]
    shown = [True, True, True, ranks.peers is not None, True, shows_sent, shows_sent, True]
    rows: list[list[object]] = []
    for row in _extremes(ranks.seconds):
        if row is None:
            rows.append(["…", *[""] * (sum(shown) - 1)])
            continue
        cost = ranks[row]
        moved = map(human_bytes, (cost.peak_buffer, cost.sent, cost.received))
        cells = [str(cost.rank), human_bytes(cost.nbytes), cost.requests, cost.peers, *moved]
        cells.append(human_seconds(cost.seconds))
        rows.append([cell for cell, show in zip(cells, shown, strict=True) if show])
    names = tuple(name for name, show in zip(head, shown, strict=True) if show)
    return Table(names, rows, _caption("ranks", len(ranks), "slowest", "fastest"))


def _file_table(files: FileCosts, *, is_save: bool) -> Table:
    does = "written" if is_save else "read"
    head = ("files of rank", does, "requests") + (() if is_save else ("by ranks",))
    rows: list[tuple[object, ...]] = []
    for row in _extremes(files.nbytes):
        if row is None:
            rows.append(("…", *[""] * (len(head) - 1)))
            continue
        cost = files[row]
        cells = (str(cost.file), human_bytes(cost.nbytes), cost.requests, cost.readers)
        rows.append(cells[: len(head)])
    return Table(head, rows, _caption("files", len(files), "largest", "smallest"))


def _extremes(weight: npt.NDArray[Any]) -> list[int | None]:
    """Return all rows if they are few; of many the heaviest, None for the rest, the lightest."""
    if len(weight) <= _SHOWN:
        return list(range(len(weight)))
    order = np.argsort(-weight, kind="stable").tolist()
    return [*order[:_HEAVY], None, *order[-_LIGHT:]]


def _caption(what: str, count: int, most: str, least: str) -> str:
    if count <= _SHOWN:
        return ""
    return f"The {_HEAVY} {most} and {_LIGHT} {least} of {count:,} {what}:"
