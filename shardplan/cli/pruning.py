"""``shardplan prune``: which checkpoints can go?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Debug, Json, Verbose

if TYPE_CHECKING:
    from shardplan.retention import PruneReport

    from .deleting import Deletions

__all__ = ["HELP", "prune"]

HELP = r"""Remove all but the newest checkpoints of a folder, and what killed saves left behind.

Only whole checkpoints count: a damaged one is never removed, and never kept in the place of a whole
one. Files of a save under way look just like those of a killed one: young ones are spared.

JSON keys: path, dry_run, removed, kept, damaged (folders), leftovers (files of killed saves that
were removed), spared (such files that are too young), files and bytes (how much was removed).

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
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Remove all but the newest checkpoints; see `HELP`."""
    from shardplan.io.stores import open_store
    from shardplan.retention import prune as remove

    from .deleting import Deletions
    from .waiting import spinning

    store = open_store(folder)
    deleted = Deletions(store, pretend=dry_run)
    with spinning("looking for checkpoints" if dry_run else "pruning"):
        report = remove(store, keep_last=keep_last, min_age=min_age)
    found = (report.removed, report.kept, report.damaged, report.leftovers, report.spared)
    if not any(found):
        raise LookupError(f"there is no checkpoint below {folder}")
    if json:
        _print(folder, dry_run, report, deleted)
    else:
        _show(dry_run, report, deleted)


def _print(folder: str, dry_run: bool, report: PruneReport, deleted: Deletions) -> None:
    from .screen import print_json

    print_json(
        {
            "path": folder,
            "dry_run": dry_run,
            "removed": list(report.removed),
            "kept": list(report.kept),
            "damaged": list(report.damaged),
            "leftovers": list(report.leftovers),
            "spared": list(report.spared),
            "files": deleted.files,
            "bytes": deleted.nbytes,
        }
    )


def _show(dry_run: bool, report: PruneReport, deleted: Deletions) -> None:
    from rich.text import Text

    from shardplan.planning.text import counted, human_bytes

    from .screen import show, table

    gone, style = ("would go", "yellow") if dry_run else ("removed", "red")
    rows: list[tuple[Any, str]] = [
        *((Text(gone, style=style), name) for name in report.removed),
        *(
            (Text(gone, style=style), f"{name} (left by a killed save)")
            for name in report.leftovers
        ),
        *(
            (Text("spared", style="yellow"), f"{name} (of a killed save, or of one under way)")
            for name in report.spared
        ),
        *((Text("damaged", style="bold red"), f"{name} (left alone)") for name in report.damaged),
        *((Text("kept", style="green"), name) for name in report.kept),
    ]
    size = f"{counted(deleted.files, 'file')}, {human_bytes(deleted.nbytes)}"
    does = "nothing was removed; without --dry-run" if dry_run else "removed"
    goes = f"{does} {size}{' would be' if dry_run else ''}"
    show(table(("", "checkpoint"), rows, keep=("",)), Text(goes, style="dim"))
