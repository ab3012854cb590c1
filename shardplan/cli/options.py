"""Arguments, options and exit codes that several commands share."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

__all__ = [
    "BAD",
    "FOUND",
    "Ckpt",
    "Debug",
    "Json",
    "Placements",
    "Verbose",
    "checkpoint",
    "complete_name",
    "parse_bytes",
]

FOUND: Final = 1  # the exit code if there are differences, or damage
BAD: Final = 2  # the exit code if the command could not be carried out
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]*\.?[0-9]+) ?([kmgt]i?)?b?", re.IGNORECASE)


def _debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta["shardplan.debug"] = True


def _verbose(value: bool) -> None:
    if value:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger = logging.getLogger("shardplan")
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG)


def _exists(path: str) -> str:
    """Return a path that exists, or a URL, which is checked on opening; else raise ValueError."""
    if "://" not in path and not os.path.lexists(path):
        raise ValueError(f"{path} does not exist")
    return path


def checkpoint(metavar: str, about: str) -> Any:
    """Return an argument that names an existing checkpoint."""
    return Argument(metavar=metavar, help=about, show_default=False, callback=_exists)


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return shell completions of a name in the checkpoint; none if it cannot be opened."""
    from .contents import continuations, open_contents

    try:
        names = open_contents(ctx.params["ckpt"]).entries.names
    except Exception:  # no errors while typing
        return []
    return continuations(incomplete, names)


_ANY: Final = "A checkpoint of any format: a folder or a file, local, s3://, gs:// or az://."
Ckpt = Annotated[str, checkpoint("CKPT", _ANY)]
Json = Annotated[bool, Option("--json", help="Write one JSON object to stdout, and nothing else.")]
# The program adds these two to every command; their callbacks do all the work.
Debug = Annotated[
    bool,
    Option(
        "--debug",
        help="Show the traceback of an error.",
        callback=_debug,
        is_eager=True,
        expose_value=False,
    ),
]
Verbose = Annotated[
    bool,
    Option(
        "--verbose",
        "-v",
        help="Log what happens to stderr (logger 'shardplan').",
        callback=_verbose,
        is_eager=True,
        expose_value=False,
    ),
]
Placements = Annotated[
    list[str],
    Option(
        "--placements",
        "-p",
        metavar="PATTERN=PLACED",
        help="How tensors whose names match are placed; may be given several times.",
        default_factory=list,
        show_default=False,
    ),
]


def parse_bytes(text: str) -> int:
    """Parse a number of bytes.

    >>> parse_bytes("1GiB"), parse_bytes("1.5 MB"), parse_bytes("4096")
    (1073741824, 1500000, 4096)
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a number of bytes; write 1GiB, 500MB or 4096")
    return size
