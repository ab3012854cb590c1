"""What commands share: arguments and exit codes; text, tables, JSON, and progress on stderr.

Tables of names are as wide as the terminal. Names come from untrusted files, so unprintable
characters are escaped. Progress is shown on terminals only, so that logs and pipes stay clean.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import threading
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import attrs
import typer
from typer import Argument, Option

from shardplan.planning import Table, nearest_hint, nearest_names

FOUND: Final = 1  # the exit code if there are differences, or damage
SCHEMA: Final = 1  # of JSON: raised when a key goes or changes its meaning, not when one is new
BAD: Final = 2  # the exit code if the command could not be carried out
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]*\.?[0-9]+) ?([kmgt]i?)?b?", re.IGNORECASE)
_UNLIMITED: Final = 100_000  # characters of a line in a pipe
_PATIENCE: Final = 1.0  # seconds until `waiting` prints


def _exists(path: str) -> str:
    """Return a path that exists, or a URL, which is checked on opening; else raise ValueError."""
    if "://" in path or os.path.lexists(path):
        return path
    parent, name = os.path.split(path.rstrip("/"))
    beside = sorted(os.listdir(parent or ".")) if os.path.isdir(parent or ".") else []
    raise ValueError(f"{path} does not exist{nearest_hint(nearest_names(name, beside))}")


def checkpoint(metavar: str, about: str) -> Any:
    """Return an argument that names an existing checkpoint."""
    return Argument(metavar=metavar, help=about, show_default=False, callback=_exists)


_ANY: Final = "A checkpoint of any format: a folder or a file, local, s3://, gs:// or az://."
Ckpt = Annotated[str, checkpoint("CKPT", _ANY)]
Json = Annotated[
    bool,
    Option(
        "--json",
        help="Write one JSON object to stdout, and nothing else; new keys do not raise its schema.",
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


def width() -> int:
    """Return the largest number of characters in a line.

    That is the terminal's width, or COLUMNS; unlimited in a pipe, so that ``grep`` sees full names.
    """
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return _UNLIMITED if piped else shutil.get_terminal_size().columns


def show(text: str, **style: Any) -> None:
    """Print text; ``style`` is that of `typer.style`, and for terminals only."""
    wanted = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    colored = style and wanted and not os.environ.get("NO_COLOR")
    print(typer.style(text, **style) if colored else text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as text, without empty columns.

    >>> print(table(("name", "files", "bytes"), [("w", "", 8), ("bias", "", 64)]))
    name  bytes
    w         8
    bias     64
    """
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    names, *body = zip(*columns, strict=True)
    return Table(tuple(map(str, names)), body).text()


def cut(text: str, wide: int) -> str:
    """Shorten text to ``wide`` characters, ending in an ellipsis."""
    return text if len(text) <= wide else f"{text[: max(wide - 1, 0)]}…"


def safe(text: object) -> str:
    r"""Escape unprintable characters: control characters and lone surrogates.

    >>> safe("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    word = str(text)
    if word.isprintable():
        return word
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in word)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one JSON object, on one line in a pipe; its first key is `SCHEMA`."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps({"schema": SCHEMA, **plain(answer)}, indent=indent, allow_nan=False))


def record_json(record: Any, **names: str) -> dict[str, Any]:
    """Return the fields of an attrs record by name, some renamed; ``nbytes`` becomes bytes."""
    renamed = {"nbytes": "bytes", **names}
    fields = attrs.asdict(record)
    return {renamed.get(name, name): value for name, value in fields.items()}


def plain(value: Any) -> Any:
    """Return a value as JSON data: bytes in base64, other types as text.

    >>> plain({"lr": float("inf"), "betas": (0.9, 0.95), 3: b"x"})
    {'lr': 'inf', 'betas': [0.9, 0.95], '3': {'base64': 'eA=='}}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return {"base64": b2a_base64(value, newline=False).decode()}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return repr(value)


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar; yield a function of the bytes done and in total, None in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(compact=True),
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = bar.add_task(label, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Print a message on stderr if the block takes longer than a second."""
    timer = threading.Timer(_PATIENCE, print, [f"{label} …"], {"file": sys.stderr})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
