"""``shardplan verify`` and ``shardplan diff``: whether checkpoints are intact, and equal."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import FOUND, Ckpt, Debug, Json, Verbose, exists
from .screen import counting, print_json, record_json, show

__all__ = ["diff", "verify"]


def verify(ckpt: Ckpt, json: Json = False, verbose: Verbose = False, debug: Debug = False) -> None:
    """Check every byte of a checkpoint, and report all damage.

    The check does not stop at the first fault. Exits with 1 if there is any. Files of other tools
    may have no checksums; then only their headers are checked, and the verdict says so.

    JSON keys: path, format, ok, verdict, faults (kind, file, key or null, begin, end, reason), keys
    (names that cannot be loaded whole), leftovers (files of killed saves), files, chunks, bytes
    (that were checked), unchecked (bytes that have no checksums), seconds, notes.

    Example: shardplan verify s3://bucket/step-100 && echo fine
    """
    from shardplan._verify import verify as check

    with counting("verify") as progress:
        report = check(ckpt, progress=progress)
    if json:
        print_json(record_json(report) | {"ok": report.ok, "verdict": report.verdict})
    else:
        _show(str(report), "red" if report.faults else "yellow" if report.unchecked else "green")
    if not report.ok:
        raise typer.Exit(FOUND)


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="The first.", show_default=False, callback=exists)
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="The second.", show_default=False, callback=exists)
    ],
    values: Annotated[
        bool,
        typer.Option("--values/--no-values", help="Compare values, or names and shapes only."),
    ] = True,
    locate: Annotated[
        bool, typer.Option("--locate", help="Read tensors that differ, to find where.")
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Read everything from both; trust no checksum.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints by name: shapes, dtypes and values, however each was sharded.

    Where both have the same chunks, the checksums recorded at save time are compared and no bytes
    are read; the answer says so. Other tensors are read, a few megabytes at a time. --read reads
    everything. Exits with 1 if anything differs.

    JSON keys: a, b, equal, keys (that both have), changes (key, what: added, removed, type, shape,
    dtype or values, before, after, elements, first, chunks), by_checksum (how many keys were
    compared by recorded checksums, at least in part), bytes_read, seconds, values (whether values
    were compared).

    Example: shardplan diff step-100 step-200 --locate
    """
    from shardplan._diff import diff as compare

    with counting("diff") as progress:
        found = compare(a, b, values=values, locate=locate, read=read, progress=progress)
    if json:
        print_json(record_json(found) | {"equal": not found})
    else:
        _show(str(found), "yellow" if found else "green")
        if found.by_checksum:
            show("pass --read to read them", dim=True)
    if found:
        raise typer.Exit(FOUND)


def _show(report: str, color: str) -> None:
    """Print a report, with its first line in color."""
    title, *rest = report.split("\n", 1)
    show(title, bold=True, fg=color)
    for text in rest:
        show(text)
