"""`explore`: a page that shows a reshard from every side, without a server or a network."""

from __future__ import annotations

import json
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import attrs

from shardplan.io.formats import open_source
from shardplan.io.stores import Location, Store
from shardplan.planning import PlannerTrace, Report
from shardplan.planning.reports import explorer_data

_MOST: Final = 4096  # chunks whose places in files are looked up


@attrs.frozen(repr=False)
class Explorer:
    """A page; Jupyter shows it.

    Attributes:
        html: The page, complete in itself.
    """

    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Explorer({len(self.html):,} characters; save() writes a page)"

    def _repr_html_(self) -> str:
        page = escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:46rem;border:0"></iframe>'


def explore(
    report: Report,
    *,
    checkpoint: str | os.PathLike[str] | Store | None = None,
    trace: PlannerTrace | None = None,
    title: str = "",
) -> Explorer:
    """Show a load that was planned: what each rank reads, from which file, who wrote it, and why.

    Choose a tensor and click its boxes; choose a rank; zoom into the traffic. The page needs no
    server and no network. Its size grows with distinct layouts and names, not with ranks.

    Args:
        report: What `shardplan.planning.explain` returned for a load. It knows who wrote a chunk if
            ``writers`` were given.
        checkpoint: Where the chunks lie, to name files and byte ranges; for up to 4,096 chunks.
        trace: What a planner did, step by step, from `shardplan.planning.show`.
        title: The heading.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, explain, global_plan, world_plans
    >>> specs = {"w": TensorSpec((8, 4), "float32", [Shard(0)])}
    >>> plans, saved = global_plan(world_plans(specs, Mesh(dp=4)))
    >>> page = explore(explain(saved, world_plans(specs, Mesh(dp=3)), writers=plans))
    >>> "<title>4 ranks to 3</title>" in page.html
    True

    Raises:
        ValueError: The report is of a save.
    """
    data = explorer_data(report) | _places(report, checkpoint)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    ranks = len(report.ranks)
    wrote = "" if report.writers is None else f"{len(report.writers.ranks):,} ranks to {ranks:,}"
    parts = {
        "__TITLE__": escape(title or wrote or f"to {ranks:,} ranks"),
        "__TRACE__": "" if trace is None else trace._repr_html_(),
        "__DATA__": text,
    }
    page = files("shardplan").joinpath("explorer.html").read_text(encoding="utf-8")
    for mark, part in parts.items():
        page = page.replace(mark, part)
    return Explorer(page)


def _places(report: Report, checkpoint: Location | None) -> dict[str, Any]:
    """Return the file of each chunk of each tensor, and where it begins there."""
    if checkpoint is None:
        return {}
    entries = report.metadata.state_dict_metadata
    layouts = [len(layout.tiling) for layout in entries.layouts]
    wanted = [
        (name, layouts[layout])
        for name, layout in zip(entries.names, entries.layout.tolist(), strict=True)
        if layout >= 0
    ]
    if sum(count for _, count in wanted) > _MOST:
        return {}
    source = open_source(checkpoint)
    chunks = [(name, number) for name, count in wanted for number in range(count)]
    places: dict[str, list[list[int]]] = {name: [] for name, _ in wanted}
    for (name, _), place in zip(chunks, source.find_chunks(chunks), strict=True):
        places[name].append([place.file, place.begin])
    return {"files": list(source.files), "places": places}
