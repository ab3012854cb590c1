"""Errors of reading a checkpoint: they name it, and say what was changed.

Another process may overwrite a checkpoint while it is being read: the old files go as soon as the
new checkpoint is there. Reading then begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import attrs

from shardplan.io import FormatError, LoadError
from shardplan.io.formats import open_source
from shardplan.io.stores import Store, StoreError
from shardplan.planning import Issue, LoadItemType, PlanError
from shardplan.planning.columns import ReadItems, distinct

from ._report import LOG, place_name

if TYPE_CHECKING:
    from shardplan.io import Pool
    from shardplan.io.execute import Reader  # which needs torch, and a check does not

T = TypeVar("T")

ATTEMPTS: Final = 16
"""How often to begin anew with a checkpoint that is overwritten again and again."""

_STOPPED: Final = (FormatError, LoadError, StoreError)  # raised when files are taken away


def read_anew(open: Callable[[], tuple[Reader, ...]], work: Callable[..., T]) -> T:
    """Open some checkpoints and work on them; if one is overwritten meanwhile, begin anew."""
    for _ in range(ATTEMPTS - 1):
        readers = open()
        try:
            return work(*readers)
        except _STOPPED:
            replaced = next(filter(_was_replaced, readers), None)
            if replaced is None:
                raise
            url = replaced.store.url
            LOG.warning("%s was overwritten while it was read; reading begins anew", url)
    return work(*open())


def _was_replaced(reader: Reader) -> bool:
    source = reader.source
    return is_another(reader.store, source.save_id, source.format, reader.pool)


def is_another(
    store: Store, known: str | None, format: str | None = None, pool: Pool | None = None
) -> bool:
    """Return True if a folder holds another save than the known one."""
    if known is None:
        return False
    try:
        now = open_source(store, format=format, pool=pool).save_id
    except (FormatError, StoreError):
        return False  # it is gone, and nothing is there in its place
    return now != known


@contextmanager
def naming_place(place: object) -> Iterator[None]:
    """Add the name of the checkpoint to errors about it."""
    try:
        yield
    except (FormatError, LoadError, PlanError) as error:
        error.add_note(f"the checkpoint is {place_name(place)}")
        raise


def touching(error: Exception, items: ReadItems, *, together: bool) -> Exception:
    """Return an error that says that any tensor of some reads may be overwritten in part.

    ``together`` adds that other ranks are in the same state.
    """
    tensors = items.type == LoadItemType.TENSOR.value
    keys = [items.names[number] for number in distinct(items.dest[tensors]).tolist()]
    more = "; ranks load together: on each of them, any key of the load may be overwritten"
    more = more if together else ""
    if isinstance(error, FormatError):
        return FormatError(error.file, f"{error.reason}{more}", touched=keys)
    text = error.args[0] if isinstance(error, LoadError) else f"the load failed: {error}"
    return LoadError(f"{text}{more}", (), keys)


@contextmanager
def plain_errors(reader: Reader) -> Iterator[None]:
    """Leave out of errors which keys were filled, and how to accept gaps, for new memory."""
    try:
        yield
    except PlanError as error:
        raise PlanError(_without_arguments(issue) for issue in error.issues) from None
    except _STOPPED as error:
        if _was_replaced(reader):
            reason = "it was overwritten while it was open: open it again"
            raise FormatError(reader.store.url, reason) from error
        if isinstance(error, FormatError) and (error.filled or error.touched):
            raise FormatError(error.file, error.reason) from error.__cause__
        if isinstance(error, LoadError):
            raise LoadError(str(error.args[0]), (), ()) from error.__cause__
        raise


def _without_arguments(issue: Issue) -> Issue:
    """Leave out the argument to try, which only `load` has; for a prefix, name `load`."""
    if issue.kind != "missing" or not issue.summary:
        return attrs.evolve(issue, remedy="")
    return attrs.evolve(issue, remedy=f"restore takes no planner: use load, and {issue.remedy}")
