"""Errors of reading a checkpoint: which one it was, what was changed, was it overwritten meanwhile.

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

__all__ = [
    "ATTEMPTS",
    "is_another",
    "naming_place",
    "plain_errors",
    "read_anew",
    "touching",
]

T = TypeVar("T")

ATTEMPTS: Final = 16
"""How often to begin anew with a checkpoint that is overwritten again and again."""

_STOPPED: Final = (FormatError, LoadError, StoreError)  # raised when files are taken away


def read_anew(open: Callable[[], tuple[Reader, ...]], work: Callable[..., T]) -> T:
    """Open some checkpoints and work on them; if one is overwritten meanwhile, begin anew.

    Args:
        open: Opens the checkpoints.
        work: Is given a reader of each.
    """
    for _ in range(ATTEMPTS - 1):
        readers = open()
        try:
            return work(*readers)
        except _STOPPED:
            if not any(map(_begins_anew, readers)):
                raise
    return work(*open())


def _begins_anew(reader: Reader) -> bool:
    replaced = _was_replaced(reader)
    if replaced:
        LOG.warning("%s was overwritten while it was read; reading begins anew", reader.store.url)
    return replaced


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
    """Add to errors about a checkpoint which one it is.

    >>> try:
    ...     with naming_place("run/step-7"):
    ...         raise FormatError("shardplan.json", "it is not JSON")
    ... except FormatError as error:
    ...     print(error.__notes__)
    ['the checkpoint is run/step-7']
    """
    try:
        yield
    except (FormatError, LoadError, PlanError) as error:
        error.add_note(f"the checkpoint is {place_name(place)}")
        raise


def touching(error: Exception, items: ReadItems, *, together: bool) -> Exception:
    """Return an error that says that any tensor of some reads may be overwritten in part.

    Args:
        error: What stopped the load, when it is not known how far it had come.
        items: What this rank wanted.
        together: Whether other ranks are in the same state.
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
    """Leave out of errors what does not matter to a caller who gets new memory.

    That is which keys were filled, and how to accept gaps.
    """
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
    """Leave out the argument to try, which only `load` has; for a prefix, name `load`.

    >>> str(_without_arguments(Issue("missing", "w", "no `w`", remedy="strict=False leaves it")))
    'no `w`'
    """
    if issue.kind != "missing" or not issue.summary:
        return attrs.evolve(issue, remedy="")
    return attrs.evolve(issue, remedy=f"restore takes no planner: use load, and {issue.remedy}")
