"""``shardplan inspect``: what is in this checkpoint, and how was it cut?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Ckpt, Debug, Json, Verbose, names_to_come

if TYPE_CHECKING:
    from .contents import Contents

__all__ = ["HELP", "inspect"]

HELP = r"""Show what a checkpoint holds: names as a tree, shapes, dtypes, bytes, cuts.

Layers that are alike are shown once, as layers.0–79; "count" says how many tensors a line stands
for, "bytes" is what they take together. Only what describes the checkpoint is read, without
torch.

JSON keys: path, format, save_id, created (seconds since 1970, or null), bytes, chunks, files
(name; bytes or null), tensors (name, shape, dtype, bytes, chunks, grid: chunks per axis or
null, files: how many, or null; with --chunks also chunk_list: offsets, sizes, bytes, file), values
(name; value if it is at hand, as `cat` writes it), by_dtype and by_prefix (tensors, bytes).

Example: shardplan inspect s3://bucket/step-100 'model.*norm*'
"""


def inspect(
    ckpt: Ckpt,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATTERN]",
            help="Only these names: a shell-style pattern, or a prefix such as model.layers.",
            show_default=False,
            autocompletion=names_to_come,
        ),
    ] = None,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="List the chunks of each tensor, and their files.")
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, help="How deep to draw the tree.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Draw every layer by itself, however many lines.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds; see `HELP`."""
    from .contents import open_contents

    contents = open_contents(ckpt).matching(pattern)
    if json:
        _print_json(contents, chunks)
        return
    from .screen import show

    show(*_screen(contents, chunks, depth, everything))


def _print_json(contents: Contents, chunks: bool) -> None:
    from .screen import print_json

    print_json(contents.as_json(chunks=chunks))


def _screen(contents: Contents, chunks: bool, depth: int | None, everything: bool) -> list[Any]:
    from . import pages

    parts: list[Any] = [pages.head(contents)]
    if chunks:
        parts += ["", *pages.chunk_lists(contents, everything)]
    else:
        parts += ["", *pages.names(contents, depth, everything)]
    return [*parts, "", *pages.totals(contents)]
