"""What does a reshard cost? The plan, its figures, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from typing import Any, Final

import attrs
import numpy as np
from rich.table import Table
from rich.text import Text

from shardplan.planning import (
    Mesh,
    Report,
    TensorMetadata,
    TensorSpec,
    WorldPlans,
    Writers,
    counted,
    draw_bytes,
    draw_reshard,
    explain,
    human_bytes,
    human_seconds,
    world_plans,
)
from shardplan.planning.columns import column
from shardplan.planning.reports import figures

from .contents import Contents, Total
from .placing import Placing, by_axis, place, words
from .screen import Lines, safe, table, unbroken

__all__ = ["Resharding", "reshard"]

_SHOWN: Final = 8  # ranks or files that are listed; of more, the heaviest and the lightest
_HEAVY: Final = 4
_LIGHT: Final = 2
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1f2328;background:#fff}}svg{{max-width:100%;height:auto}}</style></head>
<body><h1>{title}</h1>
<p>{mesh}</p>{body}</body></html>
"""


@attrs.frozen(eq=False, slots=False)
class Resharding:
    """A checkpoint, planned for other ranks.

    Attributes:
        contents: The checkpoint.
        mesh: The ranks.
        world: What each of them holds.
        groups: How tensors are placed: the pattern, and the tensors it gave their places.
        report: What it costs.
    """

    contents: Contents
    mesh: Mesh
    world: WorldPlans
    groups: tuple[tuple[Placing, Total], ...]
    report: Report

    @cached_property
    def wanted(self) -> str:
        """The ranks, in words."""
        axes = " × ".join(f"{name} {ranks}" for name, ranks in self.mesh.axes.items())
        return f"{counted(len(self.mesh), 'rank')}: {axes}"

    def tensor_to_draw(self, name: str | None) -> str:
        """Return the tensor that is drawn: the one asked for, or the largest.

        Raises:
            LookupError: There is none of that name.
        """
        if name is not None:
            entry = self.contents.source.metadata.entry(name)
            if not isinstance(entry, TensorMetadata):
                raise LookupError(f"`{name}` is no tensor, and cannot be drawn")
            return name
        if not self.contents.tensors:
            raise LookupError(f"{self.contents.path} has no tensor to draw")
        sizes = self.contents.nbytes[self.contents.tensors]
        return self.contents.entries.names[self.contents.tensors[int(np.argmax(sizes))]]

    def picture(self, name: str) -> str:
        """Draw how one tensor is resharded, as SVG."""
        return str(
            draw_reshard(
                self.contents.source.metadata, self.world, name, writers=self.report.writers
            )
        )

    def page(self, name: str) -> str:
        """Return the report as a page: figures, bytes per rank, one tensor's reshard."""
        bars = draw_bytes(self.report.ranks.nbytes.tolist(), title="Bytes read per rank")
        placed = "".join(
            f"<li><code>{escape(safe(pattern))}</code>: {escape(how)}</li>"
            for pattern, how, *_ in self._placed()
        )
        body = (
            f"<ul>{placed}</ul>{self.report._repr_html_()}<p>{bars}</p><p>{self.picture(name)}</p>"
        )
        title = escape(f"Reshard of {safe(self.contents.path)}")
        return _PAGE.format(title=title, mesh=escape(self.wanted), body=body)

    def screen(self) -> Iterator[Table | Lines | Text | str]:
        """Give the parts of the answer on a terminal."""
        totals, size = self.report.totals, self.contents.total(self.contents.rows)
        yield unbroken(
            (f"Reshard of {safe(self.contents.path)}", "bold"),
            f"\n{counted(size.tensors, 'tensor')}, {human_bytes(size.nbytes)}, ",
            f"onto {self.wanted}\n",
            f"{human_bytes(totals.nbytes)} in {counted(totals.requests, 'request')}, "
            f"about {human_seconds(totals.seconds)}",
        )
        yield ""
        yield self._placements()
        yield ""
        yield table(("figure", "value"), figures(self.report), keep=("figure",))
        yield ""
        yield self._ranks()
        if self.report.files is not None:
            yield ""
            yield self._files()
        yield ""
        for warning in self.report.warnings:
            yield Text.assemble(("warning: ", "bold yellow"), warning)
        yield Text(_model(self.report), style="dim")

    def _placements(self) -> Table | Lines:
        head = ("names", "placed", "tensors", "bytes")
        return table(head, self._placed(), right=("tensors", "bytes"))

    def _placed(self) -> Iterator[tuple[str, str, str, str]]:
        """Say how tensors are placed, pattern by pattern."""
        last = len(self.groups) - 1
        for number, (placing, total) in enumerate(self.groups):
            if total.tensors or number < last:
                name = f"{placing.pattern} (default)" if number == last else placing.pattern
                how = words(placing.placements, self.mesh)
                yield name, how, f"{total.tensors:,}", human_bytes(total.nbytes)

    def _ranks(self) -> Table | Lines:
        ranks = self.report.ranks
        rows = []
        for row in _extremes(ranks.seconds):
            if row is None:
                rows.append(("…", "", "", "", ""))
                continue
            cost = ranks[row]
            files = "" if cost.peers is None else f"{cost.peers:,}"
            time = human_seconds(cost.seconds)
            rows.append(
                (f"{cost.rank}", human_bytes(cost.nbytes), f"{cost.requests:,}", files, time)
            )
        head = ("rank", "reads", "requests", "writers", "time")
        return table(head, rows, right=head, title=_title("slowest and fastest ranks", len(ranks)))

    def _files(self) -> Table | Lines:
        assert self.report.files is not None
        files = self.report.files
        rows = []
        for row in _extremes(files.nbytes):
            if row is None:
                rows.append(("…", "", "", ""))
                continue
            cost = files[row]
            told = (f"{cost.file}", human_bytes(cost.nbytes))
            rows.append((*told, f"{cost.requests:,}", f"{cost.readers:,}"))
        head = ("files of rank", "read", "requests", "by ranks")
        return table(head, rows, right=head, title=_title("most and least read files", len(files)))

    def as_json(self) -> dict[str, Any]:
        """Return all of this as plain data."""
        report, totals = self.report, self.report.totals
        return {
            "path": self.contents.path,
            "mesh": dict(self.mesh.axes),
            "placements": [
                {
                    "pattern": placing.pattern,
                    "placed": by_axis(placing.placements, self.mesh),
                    "tensors": total.tensors,
                    "bytes": total.nbytes,
                }
                for placing, total in self.groups
            ],
            "totals": {
                "needed": totals.needed,
                "bytes": totals.nbytes,
                "unique_bytes": totals.unique,
                "requests": totals.requests,
                "amplification": totals.amplification,
                "whole_chunk_amplification": totals.whole_chunk_amplification,
                "imbalance": totals.imbalance,
                "slowest_rank": totals.slowest,
                "seconds": totals.seconds,
            },
            "ranks": [
                {
                    "rank": cost.rank,
                    "bytes": cost.nbytes,
                    "requests": cost.requests,
                    "peers": cost.peers,
                    "peak_buffer": cost.peak_buffer,
                    "seconds": cost.seconds,
                }
                for cost in report.ranks
            ],
            "files": None
            if report.files is None
            else [
                {
                    "rank": cost.file,
                    "bytes": cost.nbytes,
                    "requests": cost.requests,
                    "readers": cost.readers,
                }
                for cost in report.files
            ],
            "warnings": list(report.warnings),
            "model": attrs.asdict(report.model),
        }


def reshard(contents: Contents, mesh: Mesh, placings: Sequence[Placing]) -> Resharding:
    """Plan how a checkpoint is loaded on a mesh.

    Raises:
        ValueError: A pattern matches nothing, or placements do not fit.
    """
    metadata = contents.source.metadata
    entries = metadata.state_dict_metadata
    placements, which = place(entries, mesh, placings)
    specs = {
        name: _spec(contents, row, placements.get(name)) for row, name in enumerate(entries.names)
    }
    world = world_plans(specs, mesh)
    report = explain(metadata, world, writers=_writers(contents))
    rows: dict[Placing, list[int]] = {placing: [] for placing in placings}
    for name, placing in which.items():
        rows[placing].append(entries.row_of[name])
    groups = tuple((placing, contents.total(found)) for placing, found in rows.items())
    return Resharding(contents, mesh, world, groups, report)


def _spec(contents: Contents, row: int, placed: Any) -> TensorSpec | None:
    """Describe a tensor and where it goes; None for a value, which every rank holds."""
    return placed and TensorSpec(contents.shape(row), contents.dtype(row), placed)


def _writers(contents: Contents) -> Writers | None:
    """Return which rank wrote each chunk: names of files say so; None for other formats."""
    files = contents.source.file_columns
    if files is None or not len(contents.source.files):
        return None
    steps = [name.split("-") for name in contents.source.files]
    rank = column([int(s[1]) if len(s) == 7 and s[1].isdecimal() else 0 for s in steps])
    inline = column([0])  # a value in the manifest counts as the first rank's
    columns = tuple(rank[numbers] for numbers in files.columns)
    which = np.where(files.entry < 0, len(columns), files.entry)
    return Writers(contents.entries, (*columns, inline), column(which))


def _extremes(weight: Any) -> list[int | None]:
    """Return all rows if they are few; of many the heaviest, None for the rest, the lightest."""
    if len(weight) <= _SHOWN:
        return list(range(len(weight)))
    order = np.argsort(-weight, kind="stable").tolist()
    return [*order[:_HEAVY], None, *order[-_LIGHT:]]


def _title(what: str, count: int) -> str:
    return "" if count <= _SHOWN else f"{what}, of {count:,}"


def _model(report: Report) -> str:
    model = report.model
    rates = (model.storage_bandwidth, model.storage_total)
    rank, everyone = (f"{rate / 1e9:g} GB/s" for rate in rates)
    return (
        f"Times are a guess: storage gives {rank} to a rank and {everyone} in all, and answers in "
        f"{human_seconds(model.request_latency)}, {model.parallel_requests} requests at a time."
    )
