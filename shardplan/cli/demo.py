"""``shardplan demo``: train, save, reshard, convert and verify a small model."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .options import FOUND, Debug, Json, Verbose

__all__ = ["demo"]


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
    """Train a small transformer on 4 local ranks, and show what can be done with its checkpoint.

    It is saved on 4 ranks (FSDP2 × TP), inspected and planned for 3, loaded on 2 and on 1 with all
    bits compared, trained on, converted to Hugging Face's format and torch.save's, verified,
    damaged and verified again, and timed beside torch DCP; then a model of 405B is planned for
    12,288 ranks. Takes about a minute, and needs torch. DIR must be new, or an earlier demo's.
    Exits with 1 if any check failed.

    JSON keys: folder, ok, failed (checks that failed), seconds (by step, torch's own too).

    Example: shardplan demo build/demo
    """
    import_module("torch")  # or say that it is missing, before any rank is started
    from .. import demo as steps

    if not json:
        code = steps.main([] if folder is None else [str(folder)])
    else:
        from rich.console import Console

        from .screen import print_json

        run = steps.Demo(folder or Path(steps.FILES), Console(file=sys.stderr))
        with redirect_stdout(sys.stderr):  # output of the commands that it runs
            ok = run.run()
        code = 0 if ok else FOUND
        answer = {"folder": str(folder or steps.FILES), "ok": ok, "failed": run.failed}
        print_json(answer | {"seconds": run.seconds})
    if code:
        raise typer.Exit(code)
