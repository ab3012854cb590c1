"""``shardplan convert``: write a checkpoint in another format, or cut in another way."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from .options import Debug, Json, Overwrite, Placements, Verbose, is_there, parse_bytes
from .waiting import counting

__all__ = ["HELP", "Format", "convert"]

HELP = r"""Write a checkpoint in another format, or cut in another way, within a memory budget.

With --mesh, the new checkpoint is cut as those ranks would cut it, and --placements are those of
`shardplan plan`. Without it, tensors stay cut as they are, or become whole where the format wants
that. The new checkpoint exists whole or not at all.

JSON keys: path, format, tensors, values, files, bytes_read, bytes_written, verified (chunks that
fit their checksums), seconds (by phase), left_out (values that the format cannot carry), tied
(names that share elements), notes, leftovers.

Example: shardplan convert step-100 exported --format hf --max-memory 4GiB
"""


class Format(StrEnum):
    """What can be written."""

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
            callback=is_there,
        ),
    ],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="Where to write.", show_default=False)
    ],
    placements: Placements,
    format: Annotated[Format, typer.Option("--format", help="What to write.", show_default=False)],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXIS=N,…", help="Cut as these ranks would: dp=8,tp=2."),
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
    """Write a checkpoint in another format; see `HELP`."""
    options: dict[str, Any] = {"format": format.value, "overwrite": overwrite}
    if max_memory is not None:
        options["max_memory"] = parse_bytes(max_memory)
    if max_shard_size is not None:
        options["max_shard_size"] = parse_bytes(max_shard_size)
    if placements and mesh is None:
        raise ValueError("--placements needs --mesh: say which ranks there are")
    if mesh is not None:
        options |= _placed(source, mesh, placements)
    from shardplan._convert import convert as run
    from shardplan.dist import solo

    with counting("convert") as tell:  # alone, whatever job the shell is a part of
        report = run(source, destination, **options, progress=tell, comm=solo())
    if json:
        import attrs

        from .screen import plain, print_json

        print_json(plain(attrs.asdict(report, recurse=False)))
        return
    print(report)


def _placed(source: str, mesh: str, placements: list[str]) -> dict[str, Any]:
    from .contents import open_contents
    from .placing import parse_mesh, parse_placements, place

    ranks = parse_mesh(mesh)
    placed, _ = place(open_contents(source).entries, ranks, parse_placements(placements, ranks))
    return {"mesh": ranks, "placements": lambda name, shape: placed[name]}
