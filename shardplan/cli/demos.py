"""``shardplan demo``: see what this is about."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .failing import FOUND
from .options import Debug, Json, Verbose

__all__ = ["HELP", "demo"]

HELP = r"""Train a small transformer on 4 ranks here, and take its checkpoint through it all.

It is saved on 4 ranks (FSDP2 × TP), shown and planned for 3, loaded on 2 and on 1 with all bits
compared, trained on, converted to Hugging Face's format and torch.save's, verified, damaged and
verified again, and timed beside torch DCP; then a model of 405B is planned for 12,288 ranks. Takes
about a minute, and torch. DIR must be new, or an earlier demo's. Exits with 1 if anything did not
hold.

JSON keys: folder, ok, failed (claims that did not hold), seconds (by step, torch's own too).

Example: shardplan demo build/demo
"""


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Where checkpoints and pictures go: a new folder.",
            show_default="build/demo",
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run the demo; see `HELP`."""
    import_module("torch")  # or say what is missing, before any rank is started
    from .. import demo as steps

    if json:
        if not _run_quietly(folder or Path(steps.FILES)):
            raise typer.Exit(FOUND)
        return
    code = steps.main([] if folder is None else [str(folder)])
    if code:
        raise typer.Exit(code)


def _run_quietly(folder: Path) -> bool:
    """Run the demo with its text on stderr, and answer in JSON; tell whether all held."""
    from shardplan.demo import Demo

    from .screen import console, print_json

    run = Demo(folder, console(stderr=True))
    with redirect_stdout(sys.stderr):  # what the commands print that it shows
        held = run.run()
    print_json({"folder": str(folder), "ok": held, "failed": run.failed, "seconds": run.seconds})
    return held
