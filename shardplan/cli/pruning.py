"""``shardplan prune``: which checkpoints can go?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Debug, Json, Verbose

if TYPE_CHECKING:
    from shardplan._retention import PruneReport

__all__ = ["HELP", "prune"]

HELP = r"""Remove all but the newest checkpoints of a folder, and what killed saves left behind.

Only whole checkpoints count: a damaged one is never removed, and never kept in the place of a sound
one. So before any is removed, every byte of those that stay is read and checked; with --no-verify,
only whether their files are there in their full sizes. Checkpoints of other formats are left alone.
Files of a save under way look just like those of a killed one: young ones are spared.

JSON keys: path, dry_run, removed, kept, damaged, replaced (by another save meanwhile, so they
stay), ignored (of other formats), denied (folders), checked ("bytes" or "sizes": how those that are
kept were), leftovers (files of killed saves that were removed), spared (such files that are too
young), files and bytes (how much was removed).

Example: shardplan prune runs/llama --keep-last 3 --dry-run
"""


def prune(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A folder that holds checkpoints, one each.", show_default=False
        ),
    ],
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=1, metavar="N", help="How many stay.")
    ],
    min_age: Annotated[
        float,
        typer.Option(
            "--min-age",
            min=0,
            metavar="SECONDS",
            help="How long ago the last file of a killed save was written, at least.",
        ),
    ] = 3600,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check every byte of those that stay, or only that their files are there.",
        ),
    ] = True,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Remove all but the newest checkpoints; see `HELP`."""
    from shardplan._retention import prune as remove

    from .waiting import counting

    with counting("check what stays") as tell:
        report = remove(
            folder,
            keep_last=keep_last,
            min_age=min_age,
            verify=verify,
            dry_run=dry_run,
            progress=tell,
        )
    found = (report.removed, report.kept, report.damaged, report.leftovers, report.spared)
    if not any((*found, report.replaced, report.ignored)):
        raise LookupError(f"there is no checkpoint below {folder}")
    if json:
        _print(folder, report)
    else:
        _show(report)


def _print(folder: str, report: PruneReport) -> None:
    from .screen import print_json

    print_json(
        {
            "path": folder,
            "dry_run": report.dry_run,
            "removed": list(report.removed),
            "kept": list(report.kept),
            "damaged": list(report.damaged),
            "replaced": list(report.replaced),
            "ignored": list(report.ignored),
            "denied": list(report.denied),
            "checked": report.checked,
            "leftovers": list(report.leftovers),
            "spared": list(report.spared),
            "files": report.files,
            "bytes": report.nbytes,
        }
    )


def _show(report: PruneReport) -> None:
    from rich.text import Text

    from shardplan.planning import counted, human_bytes

    from .screen import show, table

    size = f"{counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    does = "nothing was removed; without --dry-run" if report.dry_run else "removed"
    goes = f"{does} {size}{' would be' if report.dry_run else ''}"
    how = "every byte was checked" if report.checked == "bytes" else "presence and sizes of files"
    rows = [(Text(what, style=style), name) for what, style, name in _rows(report)]
    show(
        table(("", "checkpoint"), rows, keep=("",)),
        Text(goes, style="dim"),
        Text(f"what is kept: {how}", style="dim"),
    )


def _rows(report: PruneReport) -> Iterator[tuple[str, str, str]]:
    """Say of each name what becomes of it, and in which colour."""
    gone, style = ("would go", "yellow") if report.dry_run else ("removed", "red")
    told = (
        (gone, style, report.removed, ""),
        (gone, style, report.leftovers, " (left by a killed save)"),
        ("spared", "yellow", report.spared, " (of a killed save, or of one under way)"),
        ("replaced", "yellow", report.replaced, " (saved anew meanwhile; left alone)"),
        ("ignored", "dim", report.ignored, " (of another format; left alone)"),
        ("denied", "yellow", report.denied, " (may not be read)"),
        ("damaged", "bold red", report.damaged, " (left alone)"),
        ("kept", "green", report.kept, ""),
    )
    for what, colour, names, why in told:
        yield from ((what, colour, f"{name}{why}") for name in names)
