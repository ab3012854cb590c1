"""One answer, printed twice: as text for a terminal, as HTML for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

import attrs

from .text import are_quantities, table

__all__ = ["Sheet", "Table", "human_seconds"]

# No colour of our own: both inherit the page's, so that light and dark pages read alike.
_CELL: Final = "padding:.15em .7em;border-bottom:1px solid rgba(128,128,128,.35);text-align:"
_TABLE: Final = "border-collapse:collapse;margin:.8em 0 1.4em;font-variant-numeric:tabular-nums"
_SHEET: Final = "color:inherit;background:none;overflow-x:auto"


def _rows(rows: Iterable[Iterable[object]]) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(row) for row in rows)


@attrs.frozen
class Table:
    """Rows under a head.

    Attributes:
        head: What each column holds.
        rows: The cells; columns of quantities are set to the right.
        caption: A line above, if any.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...] = attrs.field(converter=_rows)
    caption: str = ""

    @property
    def _columns(self) -> list[list[object]]:
        return [[row[i] for row in self.rows] for i in range(len(self.head))]

    def text(self) -> str:
        """Return the table as lines of text."""
        lines = table(self.head, ([_words(cell) for cell in row] for row in self.rows))
        return f"{_plain(self.caption)}\n{lines}" if self.caption else lines

    def html(self) -> str:
        """Return the table as HTML, all text escaped."""
        caption = f'<caption style="text-align:left">{_escape(self.caption)}</caption>'
        sides = ["right" if are_quantities(c) else "left" for c in self._columns]
        head = "".join(map(_tag, ["th"] * len(sides), self.head, sides))
        cells = ("".join(map(_tag, ["td"] * len(sides), row, sides)) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return (
            f'<table style="{_TABLE}">{caption if self.caption else ""}'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def _tables(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(tables)


def _notes(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(notes)


@attrs.frozen
class Sheet:
    """A title, tables and notes.

    >>> sheet = Sheet(
    ...     "Two keys", [Table(("key", "bytes"), [("<b>", 64), ("w", 8)])], ["That is all."]
    ... )
    >>> print(sheet.text())
    Two keys
    key  bytes
    <b>     64
    w        8
    That is all.
    >>> "&lt;b&gt;" in sheet.html()
    True
    """

    title: str
    tables: tuple[Table, ...] = attrs.field(default=(), converter=_tables)
    notes: tuple[str, ...] = attrs.field(default=(), converter=_notes)

    def text(self) -> str:
        """Return everything as text."""
        parts = [_plain(self.title), *(t.text() for t in self.tables), *map(_plain, self.notes)]
        return "\n".join(parts)

    def html(self) -> str:
        """Return everything as one piece of HTML that needs nothing else to be shown."""
        notes = "".join(f"<li>{_escape(note)}</li>" for note in self.notes)
        return (
            f'<div style="{_SHEET}"><p><strong>{_escape(self.title)}</strong></p>'
            f"{''.join(t.html() for t in self.tables)}{f'<ul>{notes}</ul>' if notes else ''}</div>"
        )


def human_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> human_seconds(0.00042), human_seconds(0.25), human_seconds(93), human_seconds(7200)
    ('0.42 ms', '250 ms', '93.0 s', '120 min')
    """
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def _plain(text: object) -> str:
    """Return text on one line, with what cannot be printed spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def _escape(text: object) -> str:
    return escape(_plain(text), quote=True)


def _words(cell: object) -> str:
    is_number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
    return f"{cell:,}" if is_number else _plain(cell)


def _tag(name: str, cell: object, side: str) -> str:
    return f'<{name} style="{_CELL}{side}">{_escape(_words(cell))}</{name}>'
