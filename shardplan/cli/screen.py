"""What does an answer look like? Tables as wide as the terminal, or one JSON object.

Names come from files that a stranger may have written, so nothing in them is taken for markup, and
what cannot be printed is spelled out.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "Lines",
    "console",
    "fits",
    "plain",
    "print_json",
    "safe",
    "shape_text",
    "show",
    "table",
    "unbroken",
]

_UNLIMITED: Final = 100_000
_MANY: Final = 500  # rows from which on a table is plain text
_BARE: Final = None  # no lines around cells


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
    )


class Lines(list[str]):
    """Text that is printed as it is, line by line."""


def show(*parts: Text | Table | Lines | str) -> None:
    """Print an answer's parts, one below the other."""
    screen = console()
    for part in parts:
        if isinstance(part, Lines):
            sys.stdout.writelines(f"{line}\n" for line in part)
        elif screen.is_terminal:
            screen.print(part)
        else:
            with screen.capture() as captured:
                screen.print(part)
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


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape.

    >>> shape_text((4096, 1024)), shape_text((8,)), shape_text(())
    ('4096 × 1024', '8', 'scalar')
    """
    return " × ".join(map(str, shape)) if shape else "scalar"


def table(
    head: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    right: Iterable[str] = (),
    keep: Iterable[str] = (),
    title: str = "",
) -> Table | Lines:
    """Make a table without lines; columns in which nothing stands are left out.

    A table of very many rows is plain text, which takes no time to make.

    Args:
        head: The names of the columns.
        rows: The cells: text, or anything that ``str`` makes text of.
        right: The columns that are set to the right, as numbers are.
        keep: The columns that are never wrapped; others are, where the terminal is narrow.
        title: A line above it.
    """
    made = Table(
        box=_BARE,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title=Text(title, style="bold") if title else None,
        title_justify="left",
    )
    to_right, kept, body = set(right), set(keep), [list(row) for row in rows]
    used = [i for i in range(len(head)) if any(str(row[i]) for row in body)]
    if len(body) > _MANY:
        return _lines(head, body, used, to_right)
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
) -> Lines:
    cells = [[head[i] for i in used], *([safe(row[i]) for i in used] for row in body)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    form = "  ".join(
        f"{{:{'>' if head[i] in right else '<'}{width}}}"
        for i, width in zip(used, widths, strict=True)
    )
    return Lines(form.format(*row).rstrip() for row in cells)


def fits(made: Table | Lines) -> bool:
    """Tell whether a table is no wider than the terminal."""
    screen = console()
    if isinstance(made, Lines):
        return max(map(len, made)) <= screen.width
    free = screen.options.update(max_width=_UNLIMITED)
    return screen.measure(made, options=free).maximum <= screen.width


def plain(value: Any) -> Any:
    """Return a value as JSON can carry it; what it cannot is told as text.

    >>> plain({"lr": float("inf"), "betas": (0.9, 0.95), 3: b"x"})
    {'lr': 'inf', 'betas': [0.9, 0.95], '3': "b'x'"}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return repr(value)
