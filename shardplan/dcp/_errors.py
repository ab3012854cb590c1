"""Errors as torch.distributed.checkpoint raises them; each carries ours as its ``__cause__``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import StackSummary, extract_tb
from typing import Final

from torch.distributed.checkpoint.api import CheckpointException

from shardplan.dist import CheckpointError, Comm, Failure

__all__ = ["raising", "torch_words"]

_MISSING: Final = "Missing key in checkpoint state_dict"
_SIZE: Final = "Size mismatch between saved"
_WORDS: Final = (
    (re.compile(r"`([^`]+)` is not in the checkpoint"), rf"{_MISSING}: \1."),
    (re.compile(r"`([^`]+)` is empty or a single value here"), rf"{_MISSING}: \1."),
    (re.compile(r"\d+ names are not in the checkpoint"), f"{_MISSING}."),
    (
        re.compile(r"`([^`]+)` was saved with shape (\[.*?\]) and is wanted with (\[.*?\])"),
        rf"{_SIZE} torch.Size(\2) and current: torch.Size(\3) for \1",
    ),
)
_EXISTS: Final = "Checkpoint already exists and self.overwrite=False."


@contextmanager
def raising(comm: Comm) -> Iterator[None]:
    """Raise what went wrong on some ranks as torch does."""
    try:
        yield
    except Exception as error:
        raise _as_torch(error, comm) from error


def _as_torch(error: Exception, comm: Comm) -> CheckpointException:
    """Return torch's exception for an error of ours; its ranks are places in the group."""
    own: Exception | None = error
    failures = [Failure.of(error, comm.ranks[comm.rank], "checkpoint")]
    if isinstance(error, CheckpointError):
        own, failures = error.own, list(error.failures)
    trace = StackSummary.from_list([])
    mine = trace if own is None else extract_tb(own.__traceback__)
    places = {rank: place for place, rank in enumerate(comm.ranks)}
    found: dict[int, tuple[BaseException, StackSummary]] = {}
    for rank in dict.fromkeys(failure.rank for failure in failures):
        place = places.get(rank, rank)
        text = "\n".join(torch_words(f) for f in failures if f.rank == rank)
        kind = ValueError if text.startswith(_SIZE) else RuntimeError
        found[place] = (kind(text), mine if place == comm.rank else trace)
    return CheckpointException(failures[0].step, found)


def torch_words(failure: Failure) -> str:
    """Return a failure's message, after the sentences that torch would have in its place.

    >>> failure = Failure(0, "plan", "PlanError", "`w` is not in the checkpoint; rename it")
    >>> print(torch_words(failure))
    Missing key in checkpoint state_dict: w.
    PlanError: `w` is not in the checkpoint; rename it
    """
    words = [
        match.expand(torchs) for ours, torchs in _WORDS for match in ours.finditer(failure.text)
    ]
    words += [_EXISTS] * (failure.type == "ExistsError")
    return "\n".join([*words, f"{failure.type}: {failure.text}"])
