"""Plans and reports as text that a person can read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

__all__ = ["Listing", "counted", "human_bytes", "table"]


def counted(count: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "item"), counted(1234, "key"), counted(2, "entry")
    ('1 item', '1,234 keys', '2 entries')
    """
    if count == 1:
        return f"1 {noun}"
    return (
        f"{count:,} {noun[:-1]}ies"
        if noun[-1] == "y" and noun[-2] not in "aeou"
        else f"{count:,} {noun}s"
    )


def human_bytes(count: float) -> str:
    """Return a number of bytes in the unit that suits it.

    >>> human_bytes(512), human_bytes(1536), human_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if abs(count) < 1024:
        return f"{count:,.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((p for p in range(1, len(units)) if abs(count) < 1024 ** (p + 1)), len(units))
    return f"{count / 1024**power:,.1f} {units[power - 1]}"


@attrs.frozen
class Listing:
    """The first rows of something long, under a title: as text, and as HTML for a notebook.

    >>> print(Listing("Sizes", ("name", "bytes"), [("w", 64)], count=3).text())
    Sizes
    name  bytes
    w        64
    … 2 more
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    count: int

    @property
    def _more(self) -> list[str]:
        left = self.count - len(self.rows)
        return [f"… {left:,} more"] if left > 0 else []

    def text(self) -> str:
        """Return it as lines of text."""
        lines = [table(self.head, self.rows)] if self.rows else []
        return "\n".join([self.title, *lines, *self._more])

    def html(self) -> str:
        """Return it as HTML, all text escaped."""
        from .reports.sheet import Sheet, Table  # loaded on demand

        tables = [Table(tuple(self.head), self.rows)] if self.rows else []
        return Sheet(self.title, tables, self._more).html()


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table; a column of numbers is set to the right.

    >>> print(table(("key", "bytes"), [("w", 64), ("bias", 8)]))
    key   bytes
    w        64
    bias      8
    """
    body = list(rows)
    cells = [list(head), *([str(c) for c in row] for row in body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [
        bool(body) and all(isinstance(row[i], (int, float)) for row in body)
        for i in range(len(head))
    ]
    lines = [
        "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
