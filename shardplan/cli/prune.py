"""``shardplan prune``: remove old checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from shardplan.planning import counted, human_bytes

from .options import Debug, Json, Verbose
from .screen import counting, print_json, record_json, show

__all__ = ["prune"]


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
    """Remove all but the newest checkpoints of a folder, and what killed saves left behind.

    Only whole checkpoints count: a damaged one is never removed, and never kept in the place of an
    intact one. So before any is removed, every byte of those that stay is checked; with
    --no-verify, only the presence and sizes of their files. Checkpoints of other formats are left
    alone. Files of a save in progress look just like those of a killed one: young ones are spared.

    JSON keys: path, dry_run, removed, kept, damaged, replaced (by another save meanwhile, so they
    stay), ignored (of other formats), denied (folders that may not be read), checked ("bytes" or
    "sizes": how those that are kept were), leftovers (files of killed saves that were removed),
    spared (such files that are too young), files and bytes (how much was removed).

    Example: shardplan prune runs/llama --keep-last 3 --dry-run
    """
    from shardplan._retention import prune as remove

    with counting("check what stays") as progress:
        report = remove(
            folder,
            keep_last=keep_last,
            min_age=min_age,
            verify=verify,
            dry_run=dry_run,
            progress=progress,
        )
    found = (report.removed, report.kept, report.damaged, report.leftovers, report.spared)
    if not any((*found, report.replaced, report.ignored)):
        raise LookupError(f"there is no checkpoint below {folder}")
    if json:
        print_json({"path": folder} | record_json(report))
        return
    show(str(report))
    size = f"{counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    show(f"{size} {'would be removed' if report.dry_run else 'removed'}")
    how = {"bytes": "every byte was checked", "sizes": "presence and sizes of files were checked"}
    show(f"of those that stay, {how[report.checked]}")
