"""``shardplan demo``: see what this is about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Debug, Verbose

__all__ = ["HELP", "demo"]

HELP = r"""Plan, reshard and draw a small model, and plan a large one, step by step.

Example: shardplan demo pictures
"""


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Where to put the pictures.", show_default="build/demo"
        ),
    ] = None,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run the demo; see `HELP`."""
    from shardplan.demo import main

    code = main([] if folder is None else [str(folder)])
    if code:
        raise typer.Exit(code)
