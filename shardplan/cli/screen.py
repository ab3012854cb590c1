"""What commands print: text and tables as wide as the terminal, JSON, and progress on stderr.

Names come from files that anyone may have written, so characters that cannot be printed are
escaped. Nothing is written to stderr unless it is a terminal, so that logs and pipes stay clean.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, Final

import attrs
import typer
from rich.cells import cell_len, set_cell_size

__all__ = [
    "counting",
    "cut",
    "plain",
    "print_json",
    "record_json",
    "safe",
    "show",
    "table",
    "waiting",
    "width",
]

_UNLIMITED: Final = 100_000  # characters of a line in a pipe

_PATIENCE: Final = 1.0  # seconds before progress is shown


def width() -> int:
    """Return how many characters a line may have.

    That is the terminal's width, or COLUMNS. In a pipe lines are as long as they need to be, so
    that ``grep`` sees whole names.
    """
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return _UNLIMITED if piped else shutil.get_terminal_size().columns


def show(text: str, **style: Any) -> None:
    """Print text, its long lines wrapped at spaces.

    Args:
        text: The lines.
        style: What `typer.style` takes: ``bold=True``, ``fg="red"``.
    """
    wide = width()
    wanted = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    colored = style and wanted and not os.environ.get("NO_COLOR")
    for line in text.split("\n"):
        if len(line) > wide:
            line = "\n    ".join(
                wrap(line, wide - 4, break_long_words=False, break_on_hyphens=False)
            )
        print(typer.style(line, **style) if colored else line)


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()
) -> str:
    """Return a table as text; empty columns are left out.

    Args:
        head: The names of the columns.
        rows: The cells.
        right: The columns that are aligned to the right, as numbers are.

    >>> print(table(("name", "files", "bytes"), [("w", "", 8), ("bias", "", 64)], right=["bytes"]))
    name  bytes
    w         8
    bias     64
    """
    columns = zip(head, *([safe(cell) for cell in row] for row in rows), strict=True)
    to_right = set(right)
    padded = []
    for column in columns:
        if any(column[1:]):
            widest = max(map(cell_len, column))
            spaces = [" " * (widest - cell_len(cell)) for cell in column]
            sides = (spaces, column) if column[0] in to_right else (column, spaces)
            padded.append([f"{a}{b}" for a, b in zip(*sides, strict=True)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def cut(text: str, wide: int) -> str:
    """Shorten text to some characters.

    >>> cut("layernorm", 6), cut("norm", 6)
    ('layer…', 'norm')
    """
    return text if cell_len(text) <= wide else f"{set_cell_size(text, max(wide - 1, 0))}…"


def safe(text: object) -> str:
    r"""Escape what cannot be printed: control characters, lone surrogates.

    >>> safe("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    word = str(text)
    if word.isprintable():
        return word
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in word)


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one JSON object, on one line in a pipe."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(plain(answer), indent=indent, allow_nan=False))


def record_json(record: Any, **names: str) -> dict[str, Any]:
    """Return the fields of a record by name; ``nbytes`` is called bytes.

    Args:
        record: An attrs record.
        names: Other names for fields.
    """
    renamed = {"nbytes": "bytes", **names}
    fields = attrs.asdict(record)
    return {renamed.get(name, name): value for name, value in fields.items()}


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it: bytes in base64, and other types as text.

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


class _Bar:
    """A progress bar that appears when something takes longer than a second."""

    def __init__(self, label: str) -> None:
        self._label, self._start = label, time.monotonic()
        self._display: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        """Show how many bytes are done."""
        if self._display is None:
            if time.monotonic() - self._start < _PATIENCE or done >= total:
                return
            self._open(total)
        self._display.update(self._task, completed=done, total=total)

    def _open(self, total: int) -> None:
        from rich import progress
        from rich.console import Console

        self._display = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._display.add_task(self._label, total=total)
        self._display.start()

    def close(self) -> None:
        """Remove the bar."""
        if self._display is not None:
            self._display.stop()


@contextmanager
def counting(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar; yield the function to call with the bytes done and in all.

    >>> with counting("verify") as progress:  # stderr is not a terminal here
    ...     print(progress)
    None
    """
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(label)
    try:
        yield bar.update
    finally:
        bar.close()


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Say on stderr what is going on if it takes longer than a second."""
    timer = threading.Timer(_PATIENCE, print, [f"{label} …"], {"file": sys.stderr})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
