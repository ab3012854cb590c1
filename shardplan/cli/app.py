"""Which commands are there? The program `shardplan`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from . import checking, converting, demos, inspecting, plans, pruning, reading
from .failing import BAD, EXIT_CODES, Group
from .options import Debug, Verbose

__all__ = ["app"]

app = typer.Typer(
    name="shardplan",
    cls=Group,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Look into, check, compare, convert and plan sharded checkpoints.\n\n"
        "Any format, on a disk or in s3://, gs:// and az://. Answers go to stdout, the rest to "
        f"stderr; --json is for programs; NO_COLOR and COLUMNS count.\n\n{EXIT_CODES}"
    ),
)


def _version(value: bool) -> None:
    if value:
        import shardplan

        print(f"shardplan {shardplan.__version__}")
        raise typer.Exit


@app.callback()
def _everything(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Take the options that stand before the command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(BAD)


for _name, _run, _help, _short in (
    ("inspect", inspecting.inspect, inspecting.HELP, "Show what a checkpoint holds."),
    ("plan", plans.plan, plans.HELP, "What would loading it on other ranks cost?"),
    ("verify", checking.verify, checking.VERIFY_HELP, "Check every byte."),
    ("diff", checking.diff, checking.DIFF_HELP, "Compare two checkpoints."),
    ("cat", reading.cat, reading.HELP, "Show elements of a tensor, or a value."),
    (
        "convert",
        converting.convert,
        converting.HELP,
        "Write another format, or cut in another way.",
    ),
    ("prune", pruning.prune, pruning.HELP, "Remove all but the newest checkpoints."),
    ("demo", demos.demo, demos.HELP, "See what this is about."),
):
    app.command(_name, short_help=_short, help=f"{_help}\n\n{EXIT_CODES}")(_run)
