"""Where does a rank's time go? Its hottest functions, if that is asked for."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["profiled"]

_SHOWN: Final = 12

Hot = list[tuple[str, int, float]]


@contextmanager
def profiled(wanted: bool) -> Iterator[Hot]:
    """Fill the list with the functions that took longest in the block, when it ends.

    >>> with profiled(True) as hot:
    ...     _ = sorted(range(1000))
    >>> any("sorted" in name for name, calls, seconds in hot)
    True
    """
    found: Hot = []
    profile = cProfile.Profile() if wanted else None
    if profile is None:
        yield found
        return
    try:
        profile.enable()
    except ValueError:  # another profiler is at work
        yield found
        return
    try:
        yield found
    finally:
        profile.disable()
        rows = pstats.Stats(profile).get_stats_profile().func_profiles
        hottest = sorted(rows.items(), key=lambda row: -row[1].tottime)[:_SHOWN]
        found += [
            (
                f"{_place(row.file_name, row.line_number)}{name}",
                int(str(row.ncalls).split("/")[0]),
                row.tottime,
            )
            for name, row in hottest
        ]


def _place(file: str, line: int) -> str:
    return "" if file == "~" else f"{file.rpartition('/')[2]}:{line} "
