"""Which rows are equal? Distinct rows of columns, found by one sort."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..packing import Ints

__all__ = ["group_rows"]


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
