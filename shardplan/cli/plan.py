"""``shardplan plan``: estimate the cost of loading a checkpoint on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
import typer

from shardplan.planning import counted, human_bytes

from .options import Ckpt, Debug, Json, Mesh, Placements, Verbose
from .screen import print_json, record_json, safe, show, table, waiting

if TYPE_CHECKING:
    from shardplan.planning import Mesh as Ranks
    from shardplan.planning import Report, WorldPlans, Writers

    from .contents import Contents, Total
    from .placements import Placing

__all__ = ["plan"]

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1f2328;background:#fff}}svg{{max-width:100%;height:auto}}</style></head>
<body><h1>{title}</h1>
<pre>{placed}</pre>{report}<p>{bars}</p><p>{picture}</p></body></html>
"""


def plan(
    ckpt: Ckpt,
    mesh: Annotated[str, Mesh],
    placements: Placements,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor", metavar="NAME", help="The tensor to draw.", show_default="the largest"
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw how one tensor is resharded."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report, with pictures, as a page."),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Plan how a checkpoint would be loaded on a mesh of ranks, and report what that costs.

    Nothing is loaded and no rank is needed: only metadata is read.

    --placements is PATTERN=PLACED. PLACED names a placement per mesh axis, by name
    (dp:shard0,tp:shard1; axes left out hold copies) or in the order of the mesh
    (Shard(0),Replicate()). A placement is shard0 or Shard(0), replicate or Replicate(),
    StridedShard(0,2), or Only(3): held at coordinate 3 alone. Of several patterns the first that
    matches a name counts. Other tensors are sharded along axis 0 over the first mesh axis and
    copied along the others; tensors without axes are copied everywhere.

    JSON keys: path, mesh, placements (pattern, placed: by mesh axis, tensors, bytes), totals
    (needed, bytes, unique_bytes, whole_chunks, requests, elements, sent, imbalance, slowest_rank,
    seconds, amplification, whole_chunk_amplification), ranks (rank, bytes, requests, elements,
    peers, peak_buffer, sent, received, seconds), files (rank, bytes, requests, readers; or null),
    warnings, model.

    Example: shardplan plan step-100 --mesh dp=96,tp=2 -p '*.wo.*=dp:shard0,tp:shard1' --html a.html
    """
    from .contents import open_contents
    from .placements import parse_mesh, parse_placements

    if tensor is not None and svg is None and html is None:
        raise ValueError("--tensor says which one to draw: it needs --svg or --html")
    ranks = parse_mesh(mesh)
    placings = parse_placements(placements, ranks)
    contents = open_contents(ckpt)
    with waiting("planning"):
        reshard = _reshard(contents, ranks, placings)
        files = [file for file in (svg, html) if file is not None]
        drawn = _tensor_to_draw(contents, tensor) if files else ""
        for file in files:
            picture = _page(reshard, drawn) if file is html else _picture(reshard, drawn)
            file.write_text(picture, encoding="utf-8")
    if json:
        print_json(_json(reshard))
        return
    show(_title(reshard), bold=True)
    show(f"{_placement_table(reshard)}\n")
    show(str(reshard.report))
    for file in files:
        show(f"wrote {safe(file)}")


@attrs.frozen(eq=False)
class _Reshard:
    """A load of a checkpoint, planned for other ranks, and its cost."""

    contents: Contents
    mesh: Ranks
    world: WorldPlans
    totals: dict[Placing, Total]
    report: Report


def _reshard(contents: Contents, mesh: Ranks, placings: Sequence[Placing]) -> _Reshard:
    """Plan the load of a checkpoint on a mesh."""
    from shardplan.planning import TensorSpec, explain, world_plans

    from .placements import fitting, place

    entries = contents.entries
    placed = place(entries, placings)
    specs: dict[str, TensorSpec | None] = dict.fromkeys(entries.names)
    rows: dict[Placing, list[int]] = {placing: [] for placing in placings}
    for name, placing in placed.items():
        row = entries.row_of[name]
        shape = contents.shape(row)
        specs[name] = TensorSpec(shape, contents.dtype(row), fitting(placing, shape))
        rows[placing].append(row)
    world = world_plans(specs, mesh)
    report = explain(contents.source.metadata, world, writers=_writers(contents))
    totals = {placing: contents.total(found) for placing, found in rows.items()}
    return _Reshard(contents, mesh, world, totals, report)


def _writers(contents: Contents) -> Writers | None:
    """Return the rank that wrote each chunk, from the file names; None for other formats."""
    import numpy as np

    from shardplan.planning import Writers
    from shardplan.planning.columns import column

    files = contents.source.file_columns
    if files is None or not len(contents.source.files):
        return None
    steps = [name.split("-") for name in contents.source.files]
    rank = column([int(s[1]) if len(s) == 7 and s[1].isdecimal() else 0 for s in steps])
    inline = column([0])  # a value in the manifest counts as the first rank's
    columns = tuple(rank[numbers] for numbers in files.columns)
    which = np.where(files.entry < 0, len(columns), files.entry)
    return Writers(contents.entries, (*columns, inline), column(which))


def _tensor_to_draw(contents: Contents, name: str | None) -> str:
    """Return the name of the tensor to draw: the requested one, or the largest."""
    if name is not None:
        contents.source.metadata.entry(name)
        if contents.entries.layout[contents.entries.row_of[name]] < 0:
            raise LookupError(f"`{name}` is not a tensor, and cannot be drawn")
        return name
    if not contents.tensors:
        raise LookupError(f"{contents.path} has no tensor to draw")
    return contents.entries.names[max(contents.tensors, key=contents.nbytes.__getitem__)]


def _picture(reshard: _Reshard, name: str) -> str:
    """Draw how one tensor is resharded, as SVG."""
    from shardplan.planning import draw_reshard

    metadata = reshard.contents.source.metadata
    return str(draw_reshard(metadata, reshard.world, name, writers=reshard.report.writers))


def _page(reshard: _Reshard, name: str) -> str:
    """Return the report as an HTML page: figures, bytes per rank, one tensor's reshard."""
    from shardplan.planning import draw_bytes

    return _PAGE.format(
        title=escape(_title(reshard)),
        placed=escape(_placement_table(reshard)),
        report=reshard.report._repr_html_(),
        bars=draw_bytes(reshard.report.ranks.nbytes.tolist(), title="Bytes read per rank"),
        picture=_picture(reshard, name),
    )


def _title(reshard: _Reshard) -> str:

    axes = " × ".join(f"{name} {ranks}" for name, ranks in reshard.mesh.axes.items())
    return f"{safe(reshard.contents.path)} on {counted(len(reshard.mesh), 'rank')}: {axes}"


def _placement_table(reshard: _Reshard) -> str:

    from .placements import by_axis

    *_, default = reshard.totals
    rows = []
    for placing, total in reshard.totals.items():
        if total.tensors or placing is not default:
            name = f"{placing.pattern} (default)" if placing is default else placing.pattern
            placed = ", ".join(f"{k}:{v}" for k, v in by_axis(placing, reshard.mesh).items())
            rows.append((name, placed, f"{total.tensors:,}", human_bytes(total.nbytes)))
    return table(("names", "placed", "tensors", "bytes"), rows, right=("tensors", "bytes"))


def _json(reshard: _Reshard) -> dict[str, Any]:
    """Return everything as plain data."""
    from .placements import by_axis

    report, totals = reshard.report, reshard.report.totals
    files = report.files
    return {
        "path": reshard.contents.path,
        "mesh": reshard.mesh.axes,
        "placements": [
            {"pattern": placing.pattern, "placed": by_axis(placing, reshard.mesh)}
            | record_json(total)
            for placing, total in reshard.totals.items()
        ],
        "totals": record_json(totals, unique="unique_bytes", slowest="slowest_rank")
        | {
            "amplification": totals.amplification,
            "whole_chunk_amplification": totals.whole_chunk_amplification,
        },
        "ranks": [record_json(cost) for cost in report.ranks],
        "files": None if files is None else [record_json(cost, file="rank") for cost in files],
        "warnings": report.warnings,
        "model": record_json(report.model),
    }
