"""Numbers, tables and sheets as text for a terminal and as HTML for a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

import attrs

_BLANK: Final = frozenset(["", "…", "-"])  # cells that may stand among numbers
_ONE: Final = r"[+-]?[0-9][0-9,]*(\.[0-9]+)?( ?([KMGTP]i)?B| ?ms| ?s| ?min| ?[×%])?"
_QUANTITY: Final = re.compile(f"{_ONE}( → {_ONE})?")

_SHORT: Final = 24  # characters of a cell that no browser should break

# No colours of our own: text inherits the page's, so it reads on light and dark pages alike.
_CELL: Final = "padding:.15em .7em;border-bottom:1px solid rgba(128,128,128,.35);text-align:"
_TABLE: Final = "border-collapse:collapse;margin:.8em 0 1.4em;font-variant-numeric:tabular-nums"
_SHEET: Final = "color:inherit;background:none;overflow-x:auto"
_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}
)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in singular or plural.

    >>> counted(1, "box"), counted(2_000, "box"), counted(0, "entry")
    ('1 box', '2,000 boxes', '0 entries')
    """
    if count == 1:
        return f"1 {noun}"
    if noun[-1] == "x":
        return f"{count:,} {noun}es"
    if noun[-1] == "y" and noun[-2] not in "aeou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    if abs(count) < 1024:
        return f"{count:,.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((p for p in range(1, len(units)) if abs(count) < 1024 ** (p + 1)), len(units))
    return f"{count / 1024**power:,.1f} {units[power - 1]}"


def human_seconds(seconds: float) -> str:
    """Format a duration in a suitable unit.

    >>> human_seconds(0.00042), human_seconds(0.25), human_seconds(93), human_seconds(7200)
    ('0.42 ms', '250 ms', '93.0 s', '120 min')
    """
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive numbers, which must ascend."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        first = found.pop()[0] if found and number == found[-1][1] + 1 else number
        found.append((first, number))
    return found


def runs_text(numbers: Sequence[int], between: str = ", ") -> str:
    """Write ascending numbers in short, as four runs at most.

    >>> runs_text([0, 1, 2, 5]), runs_text(range(0, 80, 2)), runs_text([3, 7], ",")
    ('0–2, 5', '0, 2, …, 78', '3,7')
    >>> runs_text([0, 2, 3, 7, 11, 12, 20])
    '0, 2–3, 7, …, 20'
    """
    words = [str(a) if a == b else f"{a}–{b}" for a, b in runs(numbers)]
    if len(words) > 3 and len({b - a for a, b in pairwise(numbers)}) == 1:
        words[2:-1] = ["…"]
    elif len(words) > 4:
        words[3:-1] = ["…"]
    return between.join(words)


def shape_text(shape: Sequence[int]) -> str:
    """Format a shape."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def cut_text(count: int, grid: Sequence[int] | None) -> str:
    """Describe a tensor of ``count`` chunks; ``grid`` is None if they do not form a grid.

    >>> cut_text(8, (4, 2)), cut_text(4, (4,)), cut_text(3, None), cut_text(1, (1, 1))
    ('4 × 2 grid', '4 parts', '3 boxes', 'whole')
    """
    if count < 2:
        return "whole" if count else "nothing"
    if grid is None:
        return f"{count:,} boxes"
    return f"{shape_text(grid)} grid" if len(grid) > 1 else f"{count:,} parts"


def are_quantities(cells: Iterable[object]) -> bool:
    """Return True if a column holds numbers, with or without a unit."""
    words = {str(cell) for cell in cells} - _BLANK
    return bool(words) and all(_QUANTITY.fullmatch(word) for word in words)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table; columns of quantities are right-aligned."""
    body = list(rows)
    columns = []
    for title, *cells in zip(head, *body, strict=True):
        words = [title, *map(str, cells)]
        width = max(map(len, words))
        align = str.rjust if are_quantities(cells) else str.ljust
        columns.append([align(word, width) for word in words])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _rows(rows: Iterable[Iterable[object]]) -> tuple[tuple[object, ...], ...]:
    return tuple(map(tuple, rows))


@attrs.frozen
class Table:
    """Rows under a header; ``caption`` is a line above, and may be empty."""

    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...] = attrs.field(converter=_rows)
    caption: str = ""

    def text(self) -> str:
        """Return the table as lines of text."""
        lines = table(self.head, ([_words(cell) for cell in row] for row in self.rows))
        return f"{_plain(self.caption)}\n{lines}" if self.caption else lines

    def html(self) -> str:
        """Return the table as HTML, all text escaped."""
        caption = f'<caption style="text-align:left">{_escape(self.caption)}</caption>'
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.head)
        styles = [_style(column) for column in columns]
        head = _line("th", self.head, styles)
        body = "".join(_line("td", row, styles) for row in self.rows)
        return (
            f'<table style="{_TABLE}">{caption if self.caption else ""}'
            f"<thead>{head}</thead><tbody>{body}</tbody></table>"
        )


def _tables(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(tables)


def as_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return texts as a tuple; a converter of records."""
    return tuple(names)


@attrs.frozen
class Sheet:
    """A title, tables and notes."""

    title: str
    tables: tuple[Table, ...] = attrs.field(default=(), converter=_tables)
    notes: tuple[str, ...] = attrs.field(default=(), converter=as_names)

    def text(self) -> str:
        """Return everything as text."""
        parts = [_plain(self.title), *(t.text() for t in self.tables), *map(_plain, self.notes)]
        return "\n".join(parts)

    def html(self) -> str:
        """Return everything as one self-contained piece of HTML."""
        notes = "".join(f"<li>{_escape(note)}</li>" for note in self.notes)
        return (
            f'<div style="{_SHEET}"><p><strong>{_escape(self.title)}</strong></p>'
            f"{''.join(t.html() for t in self.tables)}{f'<ul>{notes}</ul>' if notes else ''}</div>"
        )


class Printed:
    """A record that prints as its ``_sheet``: as text, and as HTML in a notebook."""

    __slots__ = ()

    @property
    def _sheet(self) -> Sheet:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._sheet.text()

    def _repr_html_(self) -> str:
        return self._sheet.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # for IPython, and for Hypothesis, which would list the columns


def listing(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> Sheet:
    """Show the first rows of a long table, and how many of its ``count`` rows are left out."""
    shown = Table(tuple(head), rows)
    left = count - len(shown.rows)
    return Sheet(title, [shown] if shown.rows else [], [f"… {left:,} more"] if left > 0 else [])


def _plain(text: object) -> str:
    """Return text on one line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def _escape(text: object) -> str:
    return _plain(text).translate(_ESCAPES)


def _words(cell: object) -> str:
    is_number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
    return f"{cell:,}" if is_number else _plain(cell)


def _style(cells: Sequence[object]) -> str:
    """Return the style of a column: quantities to the right, short cells on one line."""
    is_short = all(len(_words(cell)) <= _SHORT for cell in cells)
    side = "right" if are_quantities(cells) else "left"
    return f"{'white-space:nowrap;' if is_short else ''}{_CELL}{side}"


def _line(tag: str, cells: Iterable[object], styles: Sequence[str]) -> str:
    """Return one row of a table as HTML, each cell in the style of its column."""
    pairs = zip(cells, styles, strict=True)
    line = (f'<{tag} style="{style}">{_escape(_words(c))}</{tag}>' for c, style in pairs)
    return f"<tr>{''.join(line)}</tr>"
