"""Which values does a column have, and which rows are equal? Without what numpy's answer costs.

`numpy.unique` looks for masks each time, and imports numpy's masked arrays for that the first time:
a fiftieth of a second, of which a load has few.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .arrays import Ints

__all__ = ["distinct", "group_rows", "numbered"]


def distinct(values: Ints) -> Ints:
    """Return the values of a column, ascending, each once.

    >>> distinct(np.array([7, 3, 7]))
    array([3, 7])
    """
    ordered = np.sort(values)
    return ordered[_news(ordered)]


def numbered(values: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the values of a column as `distinct` does, and where they are.

    Returns:
        The values, the first row that has each, and per row, which of the values it has.

    >>> [part.tolist() for part in numbered(np.array([7, 3, 7]))]
    [[3, 7], [1, 0], [1, 0, 1]]
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = _news(ordered)
    which = np.empty(len(values), np.int64)
    which[order] = np.cumsum(new) - 1
    return ordered[new], order[new], which


def group_rows(columns: Iterable[Ints]) -> tuple[Ints, Ints]:
    """Number the distinct rows of some columns, in ascending order.

    Args:
        columns: At least one; the first decides the order first. A column of several axes stands
            for as many columns.

    Returns:
        The first row of each group, and the group of each row.

    >>> first, group = group_rows(
    ...     [np.array([7, 3, 7, 7]), np.array([[1, 1], [0, 0], [1, 1], [1, 2]])]
    ... )
    >>> first.tolist(), group.tolist()
    ([1, 0, 3], [1, 0, 1, 2])
    """
    flat = [c for array in columns for c in (array.T if array.ndim == 2 else [array])]
    order = np.lexsort(flat[::-1])
    fresh = np.zeros(len(order), bool)  # whether a row, in order, differs from the one before
    fresh[:1] = True
    for values in flat:
        ordered = values[order]
        fresh[1:] |= ordered[1:] != ordered[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(fresh) - 1
    return order[fresh], group


def _news(ordered: Ints) -> npt.NDArray[np.bool_]:
    """Tell which rows of an ascending column differ from the one before."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new
