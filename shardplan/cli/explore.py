"""``shardplan explore``: a page that shows how a checkpoint would be loaded on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from shardplan._explore import explore as page_of

from .contents import open_contents
from .passes import Cast, Drop, PlannerName, Rename, Select, parse_passes
from .plan import RANKS_HELP, parse_mesh, parse_placements, plan_reshard
from .screen import Ckpt, Json, Placements, print_json, safe, show, waiting


def explore(
    ckpt: Ckpt,
    mesh: Annotated[str, Option(metavar="AXIS=N,…", help=RANKS_HELP)],
    placements: Placements,
    selects: Select,
    drops: Drop,
    renames: Rename,
    casts: Cast,
    planner: PlannerName = None,
    html: Annotated[Path, Option(metavar="FILE", help="The page to write.")] = Path("explore.html"),
    json: Json = False,
) -> None:
    """Write a page that shows how a checkpoint would be loaded on a mesh of ranks.

    Open it in a browser: choose a tensor and click its boxes, choose a rank, zoom into the traffic
    between those who wrote and those who read. It needs no server and no network. Only metadata is
    read; up to 4,096 chunks are looked up in their files.

    --placements and the passes are those of `shardplan plan`; a pass is shown step by step.

    JSON keys: html (the file), bytes (its size).

    Example: shardplan explore step-100 --mesh dp=96,tp=2 --html plan.html
    """
    ranks = parse_mesh(mesh)
    placings = parse_placements(placements, ranks)
    passes = parse_passes(selects, drops, renames, casts, planner)
    contents = open_contents(ckpt)
    with waiting("planning"):
        made = plan_reshard(contents, ranks, placings, passes)
        page = page_of(made.report, checkpoint=contents.path, trace=made.trace, title=made.title)
        page.save(html)
    size = html.stat().st_size
    if json:
        print_json({"html": str(html), "bytes": size})
    else:
        show(f"wrote {safe(html)}: {size:,} bytes")
