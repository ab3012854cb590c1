"""``shardplan verify`` and ``shardplan diff``: is it sound, and what differs?"""

from __future__ import annotations

from typing import Annotated

import typer

from .failing import FOUND
from .options import Ckpt, Debug, Json, Verbose, is_there
from .waiting import counting

__all__ = ["DIFF_HELP", "VERIFY_HELP", "diff", "verify"]

VERIFY_HELP = r"""Check every byte of a checkpoint, and tell all that is wrong with it.

Damage is told and does not stop the check. Exits with 1 if there is any. Files of other tools may
have no checksums, and then only what describes their elements is checked: the verdict says so.

JSON keys: path, format, ok, verdict, faults (kind, file, key or null, begin, end, reason), keys
(names that cannot be loaded whole), leftovers (files of killed saves), files, chunks, bytes (that
were checked), unchecked (bytes that have no checksums), seconds, notes.

Example: shardplan verify s3://bucket/step-100 && echo fine
"""

DIFF_HELP = r"""Compare two checkpoints by name: shapes, dtypes and values, however each was cut.

Where both were cut alike, the checksums are compared that were recorded when they were saved, and
no bytes are read: the answer says so. Other tensors are read, a few megabytes at a time. --read
reads everything. Exits with 1 if anything differs.

JSON keys: a, b, equal, keys (that both have), changes (key, what: added, removed, type, shape,
dtype or values, before, after, elements, first, chunks), by_checksum (how many keys were compared
by recorded checksums, at least in part), bytes_read, seconds.

Example: shardplan diff step-100 step-200 --locate
"""


def verify(ckpt: Ckpt, json: Json = False, verbose: Verbose = False, debug: Debug = False) -> None:
    """Check every byte of a checkpoint; see `VERIFY_HELP`."""
    from shardplan._verify import verify as check

    from .findings import print_verified, show_verified

    with counting("verify") as tell:
        report = check(ckpt, progress=tell)
    if json:
        print_verified(report)
    else:
        show_verified(report)
    if not report.ok:
        raise typer.Exit(FOUND)


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="The first.", show_default=False, callback=is_there)
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The second.", show_default=False, callback=is_there)
    ],
    values: Annotated[
        bool,
        typer.Option("--values/--no-values", help="Compare values, or names and shapes only."),
    ] = True,
    locate: Annotated[
        bool,
        typer.Option(
            "--locate", help="Find the first element that differs, where it takes reading."
        ),
    ] = False,
    read: Annotated[
        bool,
        typer.Option("--read", help="Read everything from both; trust no checksum."),
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints; see `DIFF_HELP`."""
    from shardplan._diff import diff as compare

    from .findings import print_diff, show_diff

    with counting("diff") as tell:
        found = compare(a, b, values=values, locate=locate, read=read, progress=tell)
    if json:
        print_diff(found)
    else:
        show_diff(found)
    if found:
        raise typer.Exit(FOUND)
