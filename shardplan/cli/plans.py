"""``shardplan plan``: what would it cost to load this checkpoint on ranks that nobody has yet?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Ckpt, Debug, Json, Mesh, Placements, Verbose

if TYPE_CHECKING:
    from .costs import Resharding

__all__ = ["HELP", "plan"]

HELP = r"""Plan how a checkpoint would be loaded on a mesh of ranks, and say what that costs.

Nothing is loaded and no rank is needed: only what describes the checkpoint is read.

--placements is PATTERN=PLACED. PLACED names a placement per mesh axis, by name
(dp:shard0,tp:shard1; axes left out hold copies) or in the order of the mesh
(Shard(0),Replicate()). A placement is shard0 or Shard(0), replicate or Replicate(),
StridedShard(0,2), or Only(3): held at coordinate 3 alone. Of several patterns the first that
matches a name counts. What none matches is cut along axis 0 over the first mesh axis and copied
along the others; tensors without axes are copied everywhere.

JSON keys: path, mesh, placements (pattern, placed: by mesh axis, tensors, bytes), totals (needed,
bytes, unique_bytes, requests, amplification, whole_chunk_amplification, imbalance, slowest_rank,
seconds), ranks (rank, bytes, requests, peers, peak_buffer, seconds), files (rank, bytes, requests,
readers; or null), warnings, model.

Example: shardplan plan step-100 --mesh dp=96,tp=2 -p '*.wo.*=dp:shard0,tp:shard1' --html plan.html
"""


def plan(
    ckpt: Ckpt,
    mesh: Mesh,
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
    """Plan a reshard and say what it costs; see `HELP`."""
    from .contents import open_contents
    from .costs import reshard
    from .placing import parse_mesh, parse_placements
    from .waiting import spinning

    if tensor is not None and svg is None and html is None:
        raise ValueError("--tensor says which one to draw: it needs --svg or --html")
    ranks = parse_mesh(mesh)
    placings = parse_placements(placements, ranks)
    contents = open_contents(ckpt)
    with spinning("planning"):
        found = reshard(contents, ranks, placings)
        drawn = _draw(found, tensor, svg, html)
    if json:
        from .screen import print_json

        print_json(found.as_json())
        return
    from .screen import show

    show(*found.screen(), *drawn)


def _draw(found: Resharding, tensor: str | None, svg: Path | None, html: Path | None) -> list[Any]:
    """Write the pictures that were asked for, and say where they are."""
    from rich.text import Text

    said = []
    name = found.tensor_to_draw(tensor) if svg or html else ""
    for file, page in ((svg, found.picture), (html, found.page)):
        if file is not None:
            file.write_text(page(name), encoding="utf-8")
            said.append(Text(f"wrote {file}", style="dim"))
    return said
