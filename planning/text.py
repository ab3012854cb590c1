"""Plans and reports as text that a person can read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

__all__ = [
    "Listing",
    "are_quantities",
    "counted",
    "cut_text",
    "human_bytes",
    "shape_text",
    "table",
]

_BLANK: Final = frozenset(["", "…", "-"])  # what may stand among numbers
_QUANTITY: Final = re.compile(
    r"[+-]?[0-9][0-9,]*(\.[0-9]+)?( ?([KMGTP]i)?B| ?ms| ?s| ?min| ?[×%])?"
)


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


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape.

    >>> shape_text((4096, 1024)), shape_text((8,)), shape_text(())
    ('4096 × 1024', '8', 'scalar')
    """
    return " × ".join(map(str, shape)) if shape else "scalar"


def cut_text(count: int, grid: Sequence[int] | None) -> str:
    """Say in words how a tensor is cut.

    Args:
        count: How many chunks it has.
        grid: Into how many parts each axis is cut; None if the chunks form no grid.

    >>> cut_text(8, (4, 2)), cut_text(4, (4,)), cut_text(3, None), cut_text(1, (1, 1))
    ('4 × 2 grid', '4 parts', '3 boxes', 'whole')
    """
    if count < 2:
        return "whole" if count else "nothing"
    if grid is None:
        return f"{count:,} boxes"
    return f"{shape_text(grid)} grid" if len(grid) > 1 else f"{count:,} parts"


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
        from .sheet import Sheet, Table  # loaded on demand

        tables = [Table(tuple(self.head), self.rows)] if self.rows else []
        return Sheet(self.title, tables, self._more).html()


def are_quantities(cells: Iterable[object]) -> bool:
    """Tell whether a column holds numbers, with or without a unit: they are set to the right.

    >>> are_quantities([3, "1,024", "1.5 KiB", ""]), are_quantities(["w", 3]), are_quantities([""])
    (True, False, False)
    """
    words = {str(cell) for cell in cells} - _BLANK
    return bool(words) and all(_QUANTITY.fullmatch(word) for word in words)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table; a column of quantities is set to the right.

    >>> print(table(("key", "bytes"), [("w", 64), ("bias", "8 KiB")]))
    key   bytes
    w        64
    bias  8 KiB
    """
    body = list(rows)
    cells = [list(head), *([str(c) for c in row] for row in body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [are_quantities(row[i] for row in body) for i in range(len(head))]
    lines = [
        "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
