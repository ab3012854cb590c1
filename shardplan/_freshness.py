"""Is the checkpoint that is being read still the one that was opened?

Another process may overwrite a checkpoint while it is being read: the old files go as soon as the
new checkpoint is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs

from shardplan.io import FormatError, LoadError
from shardplan.io.formats import open_source
from shardplan.io.stores import Store, StoreError
from shardplan.planning import Issue, PlanError

from ._report import LOG

if TYPE_CHECKING:
    from shardplan.io import Pool
    from shardplan.io.execute import Reader  # which needs torch, and a check does not

__all__ = [
    "ATTEMPTS",
    "STOPPED",
    "begins_anew",
    "is_another",
    "plain_errors",
    "was_replaced",
]

ATTEMPTS: Final = 16
"""How often to begin anew with a checkpoint that is overwritten again and again."""

STOPPED: Final = (FormatError, LoadError, StoreError)
"""What reading a checkpoint raises when its files are taken away."""


def was_replaced(reader: Reader | None) -> bool:
    """Tell whether another save has taken the place of a checkpoint since it was opened."""
    if reader is None:
        return False
    return is_another(reader.store, reader.source.save_id, reader.source.format, reader.pool)


def is_another(
    store: Store, known: str | None, format: str | None = None, pool: Pool | None = None
) -> bool:
    """Tell whether a folder holds another save than the known one."""
    if known is None:
        return False
    try:
        now = open_source(store, format=format, pool=pool).save_id
    except (FormatError, StoreError):
        return False  # it is gone, and nothing is there in its place
    return now != known


def begins_anew(reader: Reader | None) -> bool:
    """Tell whether another save has taken a checkpoint's place, and log that it is read anew."""
    if reader is None or not was_replaced(reader):
        return False
    LOG.warning("%s was overwritten while it was read; reading begins anew", reader.store.url)
    return True


@contextmanager
def plain_errors(reader: Reader) -> Iterator[None]:
    """Say why reading into new memory failed: nobody asks what became of that memory.

    Nor can gaps be accepted: there would be nothing in them.
    """
    try:
        yield
    except PlanError as error:
        raise PlanError(_without_arguments(issue) for issue in error.issues) from None
    except STOPPED as error:
        if was_replaced(reader):
            reason = "it was overwritten while it was open: open it again"
            raise FormatError(reader.store.url, reason) from error
        if isinstance(error, FormatError) and (error.filled or error.touched):
            raise FormatError(error.file, error.reason) from error.__cause__
        if isinstance(error, LoadError):
            raise LoadError(str(error.args[0]), (), ()) from error.__cause__
        raise


def _without_arguments(issue: Issue) -> Issue:
    """Leave out the argument to try, which only `load` has; for a prefix, say that `load` has it.

    >>> str(_without_arguments(Issue("missing", "w", "no `w`", remedy="strict=False leaves it")))
    'no `w`'
    """
    if issue.kind != "missing" or not issue.summary:
        return attrs.evolve(issue, remedy="")
    return attrs.evolve(issue, remedy=f"restore takes no planner: use load, and {issue.remedy}")
