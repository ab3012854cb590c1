"""Arguments, options and exit codes that several commands share."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Annotated, Final

import typer

__all__ = [
    "BAD",
    "FOUND",
    "Ckpt",
    "Debug",
    "Json",
    "Mesh",
    "Overwrite",
    "Placements",
    "Verbose",
    "complete_name",
    "exists",
    "parse_bytes",
]

FOUND: Final = 1  # the exit code if there are differences, or damage
BAD: Final = 2  # the exit code if the command could not be carried out
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]*\.?[0-9]+) ?([kmgt]i?)?b?", re.IGNORECASE)


def _debug(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta["shardplan.debug"] = True
    return value


def _verbose(value: bool) -> bool:
    if value:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger = logging.getLogger("shardplan")
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG)
    return value


def exists(path: str) -> str:
    """Return a path if something is there, or if it is a URL, which is checked when it is opened.

    Raises:
        ValueError: There is nothing at a local path.
    """
    if "://" not in path and not os.path.lexists(path):
        raise ValueError(f"{path} does not exist")
    return path


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return how names of the checkpoint go on, for the shell; none if it cannot be opened."""
    from .contents import open_contents
    from .names import continuations

    try:
        names = open_contents(ctx.params["ckpt"]).entries.names
    except Exception:  # nobody wants an error while typing
        return []
    return continuations(incomplete, names)


Ckpt = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A checkpoint of any format: a folder or a file, local, s3://, gs:// or az://.",
        show_default=False,
        callback=exists,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON object to stdout, and nothing else.")
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", callback=_debug, is_eager=True),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Log what happens to stderr (logger 'shardplan').",
        callback=_verbose,
        is_eager=True,
    ),
]
Mesh = typer.Option(
    "--mesh",
    metavar="AXIS=N,…",
    help="The ranks, by named axes; the last axis runs fastest: dp=96,tp=2.",
    show_default=False,
)
Placements = Annotated[
    list[str],
    typer.Option(
        "--placements",
        "-p",
        metavar="PATTERN=PLACED",
        help="How tensors whose names match are placed; may be given several times.",
        default_factory=list,
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> parse_bytes("1GiB"), parse_bytes("1.5 MB"), parse_bytes("4096")
    (1073741824, 1500000, 4096)

    Raises:
        ValueError: It is not one.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a number of bytes; write 1GiB, 500MB or 4096")
    return size
