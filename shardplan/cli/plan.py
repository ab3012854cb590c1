"""``shardplan plan``: estimate the cost of loading a checkpoint on other ranks.

A mesh is ``dp=96,tp=2``. Placements are ``PATTERN=PLACED``: a pattern of names, and either one
placement per mesh axis, in order (``Shard(0),Replicate()``), or placements by axis name
(``dp:shard0,tp:shard1``), where the other axes replicate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Final

import attrs
import numpy as np
from typer import Option

from shardplan.planning import (
    Entries,
    Mesh,
    Only,
    Pass,
    PlannerTrace,
    Replicate,
    Report,
    SavePlan,
    Shard,
    StridedShard,
    TensorSpec,
    WorldPlans,
    Writers,
    counted,
    explain,
    global_plan,
    human_bytes,
    loads_into,
    traced,
    world_plans,
)
from shardplan.planning.columns import column
from shardplan.planning.mesh import Placement
from shardplan.planning.reports import StepTrace

from .contents import Contents, Total, choose, hint, open_contents
from .passes import Cast, Drop, PlannerName, Rename, Select, parse_passes
from .screen import (
    Ckpt,
    Json,
    Placements,
    print_json,
    record_json,
    safe,
    show,
    table,
    waiting,
    width,
)

_MOST: Final = 1 << 20  # ranks; the columns of more would not fit into memory
_MOST_ITEMS: Final = 1 << 22  # of all ranks together, to run passes over
_MESH: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")
_PLACED: Final = re.compile(r"([a-z]+)\s*(?:\(([^()]*)\)|(-?[0-9]+))?", re.IGNORECASE)
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)\s*:(.*)")
_COMMA: Final = re.compile(r",(?![^()]*\))")  # not those between parentheses
_NUMBER: Final = re.compile(r"(?:dim=|split_factor=)?(-?[0-9]+)")
RANKS_HELP: Final = "The ranks, by named axes; the last axis runs fastest: dp=96,tp=2."
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1f2328;background:#fff}}svg{{max-width:100%;height:auto}}</style></head>
<body><h1>{title}</h1>
<pre>{placed}</pre>{trace}{report}<p>{bars}</p><p>{picture}</p></body></html>
"""


def plan(
    ckpt: Ckpt,
    mesh: Annotated[str, Option(metavar="AXIS=N,…", help=RANKS_HELP)],
    placements: Placements,
    selects: Select,
    drops: Drop,
    renames: Rename,
    casts: Cast,
    planner: PlannerName = None,
    tensor: Annotated[
        str | None, Option(metavar="NAME", help="The tensor to draw.", show_default="the largest")
    ] = None,
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Draw how one tensor is resharded.")
    ] = None,
    html: Annotated[
        Path | None, Option(metavar="FILE", help="Write the report, with pictures, as a page.")
    ] = None,
    json: Json = False,
) -> None:
    """Plan how a checkpoint would be loaded on a mesh of ranks, and report what that costs.

    Nothing is loaded and no rank is needed: only metadata is read.

    --placements is PATTERN=PLACED. PLACED names a placement per mesh axis, by name
    (dp:shard0,tp:shard1; axes left out hold copies) or in the order of the mesh
    (Shard(0),Replicate()). A placement is shard0 or Shard(0), replicate or Replicate(),
    StridedShard(0,2), or Only(3): held at coordinate 3 alone. Of several patterns the first that
    matches a name counts. Other tensors are sharded along axis 0 over the first mesh axis and
    copied along the others; tensors without axes are copied everywhere.

    --select, --drop, --rename, --cast and --planner are those of `shardplan convert`. Each pass is
    shown with what it does to the items of all ranks, and the cost is that of what is left.

    JSON keys: path, mesh, placements (pattern, placed: by mesh axis, tensors, bytes), passes (pass,
    scope, ranks, before, after, changes: kind, before, after, names; notes; before and after have
    items, tensors and bytes), totals
    (needed, bytes, unique_bytes, whole_chunks, requests, elements, sent, imbalance, slowest_rank,
    seconds, amplification, whole_chunk_amplification), ranks (rank, bytes, requests, elements,
    peers, peak_buffer, sent, received, seconds), files (rank, bytes, requests, readers; or null),
    warnings, model.

    Example: shardplan plan step-100 --mesh dp=96,tp=2 -p '*.wo.*=dp:shard0,tp:shard1' --html a.html
    """
    if tensor is not None and svg is None and html is None:
        raise ValueError("--tensor says which one to draw: it needs --svg or --html")
    ranks = parse_mesh(mesh)
    placings = parse_placements(placements, ranks)
    passes = parse_passes(selects, drops, renames, casts, planner)
    contents = open_contents(ckpt)
    files = [file for file in (svg, html) if file is not None]
    with waiting("planning"):
        reshard = plan_reshard(contents, ranks, placings, passes)
        for file in files:
            drawn = _picture(reshard, tensor)
            text = _page(reshard, drawn) if file is html else drawn
            file.write_text(text, encoding="utf-8")
    if json:
        print_json(_json(reshard))
        return
    show(reshard.title, bold=True)
    show(f"{_placement_table(reshard)}\n")
    if reshard.trace:
        show(f"{_trace_text(reshard.trace)}\n")
    show(str(reshard.report))
    for file in files:
        show(f"wrote {safe(file)}")


@attrs.frozen(eq=False)
class Reshard:
    """A load of a checkpoint, planned for other ranks, what passes do to it, and its cost."""

    contents: Contents
    mesh: Mesh
    world: WorldPlans
    totals: dict[Placing, Total]
    report: Report
    trace: PlannerTrace | None = None

    @property
    def title(self) -> str:
        """The checkpoint and the mesh."""
        axes = " × ".join(f"{name} {ranks}" for name, ranks in self.mesh.axes.items())
        return f"{safe(self.contents.path)} on {counted(len(self.mesh), 'rank')}: {axes}"

    def placed(self, placing: Placing) -> dict[str, str]:
        """Return placements by mesh axis, as the command line takes them."""
        texts = (
            f"{type(placement).__name__}({','.join(re.findall(r'-?[0-9]+', repr(placement)))})"
            for placement in placing.placements
        )
        return dict(zip(self.mesh.names, texts, strict=True))


def plan_reshard(
    contents: Contents, mesh: Mesh, placings: Sequence[Placing], passes: Sequence[Pass[SavePlan]]
) -> Reshard:
    """Plan the load of a checkpoint on a mesh, or of what passes leave of it."""
    entries = contents.entries
    specs: dict[str, TensorSpec | None] = dict.fromkeys(entries.names)
    rows: dict[Placing, list[int]] = {placing: [] for placing in placings}
    for name, placing in place(entries, placings).items():
        row = entries.row_of[name]
        shape = contents.shape(row)
        specs[name] = TensorSpec(shape, contents.dtype(row), fitting(placing, shape))
        rows[placing].append(row)
    world = world_plans(specs, mesh)
    metadata, writers = contents.source.metadata, _writers(contents)
    totals = {placing: contents.total(some) for placing, some in rows.items()}
    if not passes:
        report = explain(metadata, world, writers=writers)
        return Reshard(contents, mesh, world, totals, report)
    if len(mesh) * len(entries) > _MOST_ITEMS:
        text = f"{len(mesh):,} ranks × {len(entries):,} names are too many to run passes over"
        raise ValueError(f"{text}; plan for fewer ranks: most passes do the same on all")
    plans, trace = traced(passes, world)
    global_plan(plans)  # refuses passes that lose or double elements
    report = explain(metadata, loads_into(passes, world, metadata), writers=writers)
    return Reshard(contents, mesh, world, totals, report, trace)


def _writers(contents: Contents) -> Writers | None:
    """Return the rank that wrote each chunk, from the file names; None for other formats."""
    files = contents.source.file_columns
    if files is None or not len(contents.source.files):
        return None
    steps = [name.split("-") for name in contents.source.files]
    rank = column([int(s[1]) if len(s) == 7 and s[1].isdecimal() else 0 for s in steps])
    inline = column([0])  # a value in the manifest counts as the first rank's
    columns = tuple(rank[numbers] for numbers in files.columns)
    which = np.where(files.entry < 0, len(columns), files.entry)
    return Writers(contents.entries, (*columns, inline), column(which))


def _picture(reshard: Reshard, name: str | None) -> str:
    """Draw how a tensor is resharded: the one that is named, or the largest."""
    from shardplan.planning import draw_reshard

    contents = reshard.contents
    if name is None:
        if not contents.tensors:
            raise LookupError(f"{contents.path} has no tensor to draw")
        name = contents.entries.names[max(contents.tensors, key=contents.nbytes.__getitem__)]
    metadata, writers = contents.source.metadata, reshard.report.writers
    return str(draw_reshard(metadata, reshard.world, name, writers=writers))


def _page(reshard: Reshard, picture: str) -> str:
    """Return the report as an HTML page: figures, bytes per rank, one tensor's reshard."""
    from shardplan.planning import draw_bytes

    return _PAGE.format(
        title=escape(reshard.title),
        placed=escape(_placement_table(reshard)),
        trace=reshard.trace._repr_html_() if reshard.trace else "",
        report=reshard.report._repr_html_(),
        bars=draw_bytes(reshard.report.ranks.nbytes.tolist(), title="Bytes read per rank"),
        picture=picture,
    )


def _trace_text(trace: PlannerTrace) -> str:
    """Return what passes do, with names wrapped in their column if the terminal is narrow."""
    title, *_ = str(trace).splitlines()
    lines = [title]
    for step in trace.tables:
        _, head, *_ = rows = step.text().splitlines()
        indent = " " * min(head.index("names"), width() // 2)
        for row in rows:
            lines += wrap(row, width(), subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _placement_table(reshard: Reshard) -> str:
    *_, default = reshard.totals
    rows = []
    for placing, total in reshard.totals.items():
        if total.tensors or placing is not default:
            name = f"{placing.pattern} (default)" if placing is default else placing.pattern
            placed = ", ".join(f"{k}:{v}" for k, v in reshard.placed(placing).items())
            rows.append((name, placed, f"{total.tensors:,}", human_bytes(total.nbytes)))
    return table(("names", "placed", "tensors", "bytes"), rows)


def _json(reshard: Reshard) -> dict[str, Any]:
    """Return everything as plain data."""
    report, totals = reshard.report, reshard.report.totals
    files = report.files
    return {
        "path": reshard.contents.path,
        "mesh": reshard.mesh.axes,
        "placements": [
            {"pattern": placing.pattern, "placed": reshard.placed(placing)} | record_json(total)
            for placing, total in reshard.totals.items()
        ],
        "passes": [_step_json(step) for step in reshard.trace.steps] if reshard.trace else [],
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


def _step_json(step: StepTrace) -> dict[str, Any]:
    sides = {"before": record_json(step.before), "after": record_json(step.after)}
    changes = [
        {"kind": c.kind, "before": record_json(c.before), "after": record_json(c.after)}
        | {"names": c.names}
        for c in step.changes
    ]
    head = {"pass": step.step, "scope": step.scope, "ranks": step.ranks}
    return {**head, **sides, "changes": changes, "notes": step.notes}


@attrs.frozen
class Placing:
    """A pattern of names, and their placements, one per mesh axis."""

    pattern: str
    placements: tuple[Placement, ...]


def parse_mesh(text: str) -> Mesh:
    """Parse a mesh.

    >>> parse_mesh("dp = 96, tp=2")
    Mesh(dp=96, tp=2)
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        match = _MESH.fullmatch(part)
        if match is None:
            raise ValueError(f"--mesh {text!r}: {part.strip()!r} is not an axis; write dp=96,tp=2")
        if int(match[2]) < 1:
            raise ValueError(f"--mesh {text!r}: {match[1]} needs at least 1 rank")
        if match[1] in axes:
            raise ValueError(f"--mesh {text!r}: there are two axes named {match[1]}")
        axes[match[1]] = int(match[2])
    ranks = math.prod(axes.values())
    if ranks > _MOST:
        raise ValueError(f"--mesh {text!r} has {ranks:,} ranks; at most {_MOST:,} can be planned")
    return Mesh(axes)


def parse_placements(texts: Sequence[str], mesh: Mesh) -> tuple[Placing, ...]:
    """Parse placements; the default comes last, and matches all names.

    >>> for placing in parse_placements(["*.wo=dp:shard0,tp:shard1"], Mesh(dp=4, tp=2)):
    ...     print(placing.pattern, *placing.placements)
    *.wo Shard(dim=0) Shard(dim=1)
    * Shard(dim=0) Replicate()
    """
    copies: list[Placement] = [Replicate()] * (len(mesh.shape) - 1)
    default = (Shard(0), *copies)
    return (*(_parse(text, mesh) for text in texts), Placing("*", default))


def _parse(text: str, mesh: Mesh) -> Placing:
    pattern, _, placed = map(str.strip, text.partition("="))
    where = f"--placements {text!r}"
    if not pattern or not placed:
        raise ValueError(f"{where}: write PATTERN=PLACED, as in '*.weight=dp:shard0'")
    parts = [part.strip() for part in _COMMA.split(placed)]
    named = [_NAMED.fullmatch(part) for part in parts]
    if not any(named):
        in_order = tuple(_placement(part, where) for part in parts)
        if len(parts) != len(mesh.shape):
            raise ValueError(
                f"{where}: {counted(len(parts), 'placement')} given, and {mesh!r} takes "
                f"{len(mesh.shape)}; name the axes to leave some out, as in {mesh.names[0]}:shard0"
            )
        return Placing(pattern, in_order)
    axes: dict[str, Placement] = {}
    for part, found in zip(parts, named, strict=True):
        if found is None:
            raise ValueError(f"{where}: {part!r} does not name a mesh axis, while others do")
        if found[1] not in mesh.names or found[1] in axes:
            problem = "is named twice" if found[1] in axes else f"is not an axis of {mesh!r}"
            raise ValueError(f"{where}: {found[1]} {problem}")
        axes[found[1]] = _placement(found[2].strip(), where)
    return Placing(pattern, tuple(axes.get(name, Replicate()) for name in mesh.names))


def _placement(text: str, where: str) -> Placement:
    match = _PLACED.fullmatch(text)
    kind = match[1].lower() if match else ""
    inside = "" if match is None else match[2] or match[3] or ""
    parts = [_NUMBER.fullmatch(part.strip()) for part in inside.split(",")] if inside else []
    numbers = [int(part[1]) for part in parts if part]
    if len(numbers) == len(parts):
        match kind, numbers:
            case "replicate" | "r", []:
                return Replicate()
            case "shard" | "s", [dim]:
                return Shard(dim)
            case "shard" | "s", []:
                text = f"{text!r} needs an axis number, as in shard0 or Shard(0)"
                raise ValueError(f"{where}: {text}")
            case "stridedshard", [dim, factor] if factor > 0:
                return StridedShard(dim, split_factor=factor)
            case "only", [_, *_] if min(numbers) >= 0:
                return Only(numbers)
    known = "shard0, replicate, StridedShard(0,2) or Only(3)"
    raise ValueError(f"{where}: {text!r} is not a placement; write {known}")


def place(entries: Entries, placings: Sequence[Placing]) -> dict[str, Placing]:
    """Return the placing of each tensor: the first whose pattern matches it."""
    names = [n for n, layout in zip(entries.names, entries.layout, strict=True) if layout >= 0]
    placed: dict[str, Placing] = {}
    for placing in placings:
        chosen = choose(placing.pattern, names)
        if not chosen and placing is not placings[-1]:
            near = hint(placing.pattern, names)
            raise ValueError(f"--placements: {placing.pattern!r} matches no tensor{near}")
        for number in chosen:
            placed.setdefault(names[number], placing)
    return placed


def fitting(placing: Placing, shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements of a tensor; a scalar is replicated."""
    return placing.placements if shape else (Replicate(),) * len(placing.placements)
