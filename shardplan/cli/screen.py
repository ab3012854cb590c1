"""What does an answer look like? Tables as wide as the terminal, or one JSON object.

Names come from files that a stranger may have written, so nothing in them is taken for markup, and
what cannot be printed is spelled out.
"""

from __future__ import annotations

import json
import math
import os
import sys
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.planning import shape_text

__all__ = [
    "Lines",
    "console",
    "fits",
    "plain",
    "print_json",
    "room",
    "safe",
    "shape_text",
    "show",
    "table",
    "unbroken",
]

_UNLIMITED: Final = 100_000
_MANY: Final = 500  # rows from which on a table is plain text
_BARE: Final = None  # no lines around cells
_GAP: Final = 2  # spaces between columns


def console(*, stderr: bool = False) -> Console:
    """Return a console for answers, or for what is said beside them.

    It is as wide as the terminal, or as COLUMNS says. Where neither is known, as in a pipe, lines
    are as long as they need to be, so that ``grep`` sees whole names.
    """
    file = sys.stderr if stderr else sys.stdout
    piped = not file.isatty() and not os.environ.get("COLUMNS")
    return Console(
        file=file,
        markup=False,
        highlight=False,
        emoji=False,
        width=_UNLIMITED if piped else None,
        soft_wrap=False,
        # Bold and dim are drawn with escape codes, too: who wants no color wants none of these.
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


class Lines(list[str]):
    """Text that is printed as it is, line by line."""


def show(*parts: Text | Table | Lines | str) -> None:
    """Print an answer's parts, one below the other."""
    screen = console()
    for part in parts:
        if isinstance(part, Lines):
            sys.stdout.writelines(f"{line}\n" for line in part)
            continue
        whole = isinstance(part, Text) and bool(part.no_wrap)  # which `print` would forget
        if screen.is_terminal:
            screen.print(part, soft_wrap=whole)
        else:
            with screen.capture() as captured:
                screen.print(part, soft_wrap=whole)
            for line in captured.get().splitlines():  # a table fills its cells up with spaces
                print(line.rstrip())


def print_json(answer: dict[str, Any]) -> None:
    """Print one JSON object, on one line if it is piped."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(answer, indent=indent, allow_nan=False))


def safe(text: object) -> str:
    r"""Spell out what cannot be printed: control characters, lone surrogates.

    >>> safe("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    word = str(text)
    if word.isprintable():
        return word
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in word)


def unbroken(*parts: str | tuple[str, str]) -> Text:
    """Return text whose lines are never broken, as those with a path in them should not be."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def table(
    head: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    right: Iterable[str] = (),
    keep: Iterable[str] = (),
    without: Iterable[str] = (),
    title: str = "",
) -> Table | Lines:
    """Make a table without lines; columns in which nothing stands are left out.

    One of very many rows, or in a pipe, is plain text, which takes no time to make.

    Args:
        head: The names of the columns.
        rows: The cells: text, or anything that ``str`` makes text of.
        right: The columns that are set to the right, as numbers are.
        keep: The columns that are never wrapped; others are, where the terminal is narrow.
        without: The columns that are left out.
        title: A line above it.
    """
    made = Table(
        box=_BARE,
        pad_edge=False,
        padding=(0, _GAP, 0, 0),
        header_style="bold",
        title=Text(title, style="bold") if title else None,
        title_justify="left",
    )
    to_right, kept, body = set(right), set(keep), [list(row) for row in rows]
    dropped = set(without)
    used = [
        i for i, name in enumerate(head) if name not in dropped and any(str(row[i]) for row in body)
    ]
    if len(body) > _MANY or _is_free(console()):
        return Lines([*([title] if title else []), *_lines(head, body, used, to_right)])
    for name in (head[i] for i in used):
        made.add_column(
            name,
            justify="right" if name in to_right else "left",
            no_wrap=name in to_right or name in kept,
            overflow="ellipsis" if name in kept else "fold",
        )
    for row in body:
        cells = [row[i] for i in used]
        made.add_row(*(cell if isinstance(cell, Text) else safe(cell) for cell in cells))
    return made


def _lines(
    head: Sequence[str], body: Sequence[Sequence[object]], used: Sequence[int], right: set[str]
) -> Iterator[str]:
    cells = [[head[i] for i in used], *([_line(row[i]) for i in used] for row in body)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    aligned = [head[i] in right for i in used]
    for row in cells:
        padded = map(_pad, row, widths, aligned)
        yield (" " * _GAP).join(padded).rstrip()


def _line(cell: object) -> str:
    """Return a cell as one line, so that ``grep`` finds all of it; lines of ours are joined."""
    return "; ".join(map(safe, cell.plain.split("\n"))) if isinstance(cell, Text) else safe(cell)


def _pad(cell: str, width: int, right: bool) -> str:
    spaces = " " * (width - cell_len(cell))  # which some characters take two of
    return spaces + cell if right else cell + spaces


def _is_free(screen: Console) -> bool:
    """Tell whether lines may be as long as they like, and have no colors."""
    return screen.width == _UNLIMITED and not screen.is_terminal


def fits(made: Table | Lines, *, first: int | None = None) -> bool:
    """Tell whether a table is no wider than the terminal.

    Args:
        made: The table.
        first: The characters to which its first column may be cut; None if it may not be.
    """
    if isinstance(made, Lines):
        return max(map(len, made)) <= console().width
    spare = 0 if first is None else max(0, _column_width(made, 0) - first)
    return _left(made) + spare >= 0


def room(made: Table | Lines) -> int:
    """Tell how wide the last column of a table can be on this terminal, or has to be."""
    return _UNLIMITED if isinstance(made, Lines) else _column_width(made, -1) + max(0, _left(made))


def _left(made: Table) -> int:
    """Return how much narrower than the terminal a table is; negative if it is wider."""
    widths = [_column_width(made, number) for number in range(len(made.columns))]
    return console().width - sum(widths) - _GAP * (len(widths) - 1)


def _column_width(made: Table, number: int) -> int:
    column = made.columns[number]
    return max(cell_len(str(cell)) for cell in (column.header, *column.cells))


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it: bytes in base64, and what it cannot at all as text.

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
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return repr(value)
