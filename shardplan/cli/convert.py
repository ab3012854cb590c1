"""``shardplan convert``: write a checkpoint in another format, or shard it in another way."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from .options import Debug, Json, Overwrite, Placements, Verbose, exists, parse_bytes
from .screen import counting, print_json, record_json

__all__ = ["Format", "convert"]


class Format(StrEnum):
    """A format that can be written."""

    safetensors = "safetensors"
    dcp = "dcp"
    hf = "hf"
    torch = "torch"


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint of any format.",
            show_default=False,
            callback=exists,
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where to write.", show_default=False)
    ],
    placements: Placements,
    format: Annotated[Format, typer.Option("--format", help="What to write.", show_default=False)],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXIS=N,…", help="Shard for these ranks: dp=8,tp=2."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="SIZE", help="The most bytes to hold: 1GiB, 500MB."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="The most bytes of a file: 5GB."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint in another format, or shard it in another way, within a memory budget.

    With --mesh, the new checkpoint is sharded as those ranks would save it; --placements are those
    of `shardplan plan`. Without it, tensors keep their chunks, or become whole where the format
    requires that. The new checkpoint appears whole or not at all.

    JSON keys: path, format, tensors, values, files, bytes_read, bytes_written, verified (chunks
    that fit their checksums), seconds (by phase), left_out (values that the format cannot carry),
    tied (names that share elements), notes, leftovers.

    Example: shardplan convert step-100 exported --format hf --max-memory 4GiB
    """
    sizes = {"max_memory": max_memory, "max_shard_size": max_shard_size}
    options: dict[str, Any] = {k: parse_bytes(size) for k, size in sizes.items() if size}
    if placements and mesh is None:
        raise ValueError("--placements needs --mesh: say which ranks there are")
    if mesh is not None:
        options |= _placed(source, mesh, placements)
    from shardplan._convert import convert as run
    from shardplan.dist import solo

    with counting("convert") as progress:  # alone, whatever job the shell is a part of
        report = run(
            source,
            destination,
            format=format.value,
            overwrite=overwrite,
            progress=progress,
            comm=solo(),
            **options,
        )
    if json:
        print_json(record_json(report))
    else:
        print(report)


def _placed(source: str, mesh: str, placements: list[str]) -> dict[str, Any]:
    """Return the mesh and the placements as `convert` takes them."""
    from .contents import open_contents
    from .placements import fitting, parse_mesh, parse_placements, place

    ranks = parse_mesh(mesh)
    placed = place(open_contents(source).entries, parse_placements(placements, ranks))
    return {"mesh": ranks, "placements": lambda name, shape: fitting(placed[name], shape)}
