"""Columns of whole numbers as text: regular ones are written by rule.

A column is a list of parts. A part is a number, or a *run* ``[inner, count, step]``: the numbers of
``inner``, which is a number or a column, so many times, each time ``step`` more. So ``[[0, 3, 8]]``
is 0, 8, 16, and ``[[[[0, 3, 8]], 2, 1]]`` is 0, 8, 16, 1, 9, 17. Every column can be written as the
plain list of its numbers; what `encode_runs` writes is short where numbers follow a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from .arrays import Ints, column, readonly

__all__ = ["decode_columns", "decode_runs", "encode_runs", "flat_runs"]

_SHORTEST: Final = 4  # numbers that are worth a run
_FEWEST: Final = 3  # runs that are worth a run of runs
_PERIODS: Final = range(2, 33)  # lengths of patterns that are tried
_LARGEST: Final = 1 << 62
_WHOLE: Final = frozenset((int,))


def encode_runs(values: Ints) -> list[Any]:
    """Return a column as a list for JSON; see the module.

    >>> encode_runs(np.array([0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 7]))
    [[[[0, 4, 8]], 3, 1], 7]
    >>> encode_runs(np.array([0, 3, 5, 8, 10, 13, 15, 18, 20]))
    [[[0, 3], 4, 5], 20]
    """
    parts = flat_runs(values)
    period = None if len(parts) * _SHORTEST < len(values) else _period(values)
    if period is not None:
        count = len(values) // period
        block = [values[:period].tolist(), count, int(values[period] - values[0])]
        return [block, *values[period * count :].tolist()]
    while len(folded := _fold(parts)) < len(parts):
        parts = folded
    return parts


def flat_runs(values: Ints, shortest: int = _SHORTEST) -> list[Any]:
    """Replace every stretch of so many numbers with equal steps, or more, by a run.

    >>> flat_runs(np.array([0, 8, 16, 24, 7, 7, 7, 7, 3]))
    [[0, 4, 8], [7, 4, 0], 3]
    """
    steps = np.diff(values)
    edges = np.flatnonzero(np.diff(steps)) + 1  # where a step differs from the one before
    first = np.concatenate([[0], edges])
    length = np.diff(first, append=len(steps))
    long = length >= shortest - 1
    parts: list[Any] = []
    at = 0  # what was encoded so far
    for start, count in zip(first[long].tolist(), length[long].tolist(), strict=True):
        begin = max(start, at)  # the run before may have taken the first number
        if start + count + 1 - begin < shortest:
            continue
        parts += values[at:begin].tolist()
        parts.append([int(values[begin]), start + count + 1 - begin, int(steps[start])])
        at = start + count + 1
    parts += values[at:].tolist()
    return parts


def _period(values: Ints) -> int | None:
    """Return after how many numbers a column repeats, each time with one number added."""
    for period in _PERIODS:
        if len(values) < _FEWEST * period:
            return None
        shift = values[period:] - values[:-period]
        if shift[0] == shift[-1] and (shift == shift[0]).all():
            return period
    return None


def _fold(parts: list[Any]) -> list[Any]:
    """Replace neighbouring runs that differ in a constant step by a run of them."""
    folded: list[Any] = []
    for form, group in groupby(parts, key=_form):
        alike = list(group)
        starts = column([_start(part) for part in alike])
        if form is None or len(alike) < _FEWEST:
            folded += alike
            continue
        position = 0
        for run in flat_runs(starts, _FEWEST):
            if isinstance(run, list):
                _, count, step = run
                folded.append([[alike[position]], count, step])
                position += count
            else:
                folded.append(alike[position])
                position += 1
    return folded


def _form(part: Any) -> str | None:
    """Return what runs have in common that differ in their first number alone."""
    return None if isinstance(part, int) else f"{_form_of_inner(part[0])}{part[1:]}"


def _form_of_inner(inner: Any) -> str:
    if isinstance(inner, int):
        return ""
    start = _start(inner[0])
    return str([_moved(part, -start) for part in inner])


def _start(part: Any) -> int:
    """Return the first number of a part."""
    while not isinstance(part, int):
        part = part[0]
    return part


def _moved(part: Any, by: int) -> Any:
    """Return a part with a number added to all that it stands for."""
    if isinstance(part, int):
        return part + by
    inner, count, step = part
    moved = inner + by if isinstance(inner, int) else [_moved(p, by) for p in inner]
    return [moved, count, step]


def decode_runs(parts: Any, limit: int) -> Ints:
    """Return the numbers of a column; see `encode_runs`.

    Args:
        parts: What was read from JSON.
        limit: How many numbers runs may stand for; a few bytes could stand for any number.

    Raises:
        ValueError: It is not a column, or stands for too many numbers.
    """
    if not isinstance(parts, list):
        raise ValueError(f"expected a list of numbers, not {str(parts)[:80]}")
    if _WHOLE.issuperset(map(type, parts)):
        return column(parts)
    blocks: list[Ints] = []
    for is_number, group in groupby(parts, key=lambda part: type(part) is int):
        if is_number:
            blocks.append(column(list(group)))
            continue
        for run in group:
            blocks.append(_expand(run, limit))
            limit -= len(blocks[-1])
    return readonly(np.concatenate(blocks))


def _expand(run: Any, limit: int) -> Ints:
    """Return the numbers of a run: at most ``limit``."""
    if not isinstance(run, list) or len(run) != 3 or not _WHOLE.issuperset(map(type, run[1:])):
        raise ValueError(f"expected a number or a run, not {str(run)[:80]}")
    inner, count, step = run
    if count < 2:  # so that what nests is bounded by what it stands for
        raise ValueError(f"a run repeats {count} times, and two is the least")
    block = column([inner]) if type(inner) is int else decode_runs(inner, limit // count)
    if not len(block) or len(block) * count > limit:
        what = "nothing" if not len(block) else f"{len(block) * count:,} numbers"
        raise ValueError(f"a run stands for {what}, and {limit:,} may follow")
    if max(abs(int(block.min())), abs(int(block.max()))) + abs(step) * count > _LARGEST:
        raise ValueError(f"a run from {block.min()} on leads to numbers that are too large")
    numbers: Ints = (np.arange(count)[:, None] * step + block).reshape(-1)
    return numbers


def decode_columns(columns: Iterable[Sequence[Any]], limit: int, total: int) -> Iterator[Ints]:
    """Yield the numbers of several columns; see `decode_runs`.

    Args:
        columns: The columns.
        limit: How many numbers each may have.
        total: How many numbers runs may stand for in all of them.

    Raises:
        ValueError: It is not a column, or too long.
    """
    for parts in columns:
        found = decode_runs(parts, min(limit, total))
        if len(found) > limit:
            raise ValueError(f"a column has {len(found):,} numbers, and at most {limit:,} fit")
        total -= max(len(found) - len(parts), 0)
        yield found
