"""Steps that all ranks take together, and that fail on all of them if they fail on one.

A step maps on every rank, reduces on the coordinator, and hands the result back. Any error on any
rank is caught, sent as text, and raised as one `CheckpointError` everywhere; the comm can be used
again after that. What travels is bytes, or plain data as JSON: see `encode_json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import attrs

from shardplan.planning import CodecError, flatten, from_json, to_json

from .comm import Comm, departure
from .errors import CheckpointError, Failure, LostRanksError, thinned

M = TypeVar("M")
W = TypeVar("W")

_JSON, _RAW, _FAILED = b"+", b"=", b"-"  # what the rest of a frame is


def encode_json(value: Any) -> bytes:
    """Encode plain data so that `decode_json` gives it back, tuples and bytes included.

    >>> decode_json(encode_json({"sizes": (1, 2), "raw": b"x"}))
    FrozenDict({'sizes': (1, 2), 'raw': b'x'})

    Raises:
        CodecError: The value holds what only pickle could carry.
    """
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def decode_json(data: bytes) -> Any:
    """Decode what `encode_json` made, into immutable values.

    Raises:
        CodecError: The bytes are something else.
    """
    try:
        return from_json(json.loads(data))
    except CodecError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CodecError(f"these bytes are not typed JSON: {error}") from error


@attrs.frozen(eq=False)
class Turn(Generic[M]):
    """A rank's turn in a step: a value that it keeps, and a message."""

    kept: M
    message: Any


@attrs.frozen(eq=False)
class StepResult(Generic[M, W]):
    """The result of a step that succeeded on all ranks."""

    mine: M  # what `map` kept on this rank
    whole: W | None  # what `reduce` kept on the coordinator; None on other ranks
    reply: Any  # the coordinator's message to this rank


def _leave_it(kept: object, error: BaseException) -> None:
    """Undo nothing."""


def take_step(
    comm: Comm,
    step: str,
    map: Callable[[], Turn[M]],
    reduce: Callable[[list[Any]], Turn[W]],
    *,
    each: bool = False,
    undo: Callable[[M, BaseException], None] = _leave_it,
) -> StepResult[M, W]:
    """Take a step in which ranks keep more than they send.

    Args:
        comm: The ranks.
        step: The step's name, for errors.
        map: Called on every rank; its message goes to the coordinator.
        reduce: Called on the coordinator with every rank's message; its message goes to all ranks.
        each: Whether that is one message per rank instead, by rank.
        undo: Called with what ``map`` kept, and the error, if the step fails after ``map``.

    >>> from shardplan.dist import solo
    >>> take_step(solo(), "add up", lambda: Turn("mine", 2), lambda sent: Turn("all", sum(sent)))
    StepResult(mine='mine', whole='all', reply=2)

    Raises:
        CheckpointError: Anything above raised on any rank, or a rank was lost; on every rank. A
            single rank raises its errors unchanged.
    """
    if comm.world_size > 1:
        mine = _attempt(comm, step, map)
    else:
        mine = _Attempt(map(), [])
    try:
        if comm.world_size > 1:
            return _settled(comm, step, mine, reduce, each)
        return _alone(mine, reduce, each)
    except BaseException as error:
        if mine.turn is not None:
            undo(mine.turn.kept, error)
        raise
    finally:
        del mine  # the traceback of its error refers to this frame


def reduce_scatter(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    reduce: Callable[[list[Any]], Sequence[Any]],
) -> Any:
    """Map on every rank, reduce all values on the coordinator, and give each rank its result.

    Args:
        comm: The ranks.
        step: The step's name, for errors.
        map: Called on every rank; what it returns, bytes or plain data, goes to the coordinator.
        reduce: Called on the coordinator with every rank's value, by rank; returns one result per
            rank.

    Returns:
        This rank's result.

    Raises:
        CheckpointError: Anything above raised on any rank, or a rank was lost; on every rank.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(
    ...     3,
    ...     lambda comm: reduce_scatter(
    ...         comm, "share out", lambda: comm.rank, lambda ranks: [10 * r for r in ranks]
    ...     ),
    ... )
    [0, 10, 20]
    """
    return _replied(comm, step, map, reduce, each=True)


def all_reduce(
    comm: Comm, step: str, map: Callable[[], Any], reduce: Callable[[list[Any]], Any]
) -> Any:
    """Map on every rank, reduce all values on the coordinator, and give every rank the result.

    Arguments and errors are those of `reduce_scatter`; but ``reduce`` returns one result.

    >>> from shardplan.dist import solo
    >>> all_reduce(solo(), "count bytes", lambda: 12, sum)
    12
    """
    return _replied(comm, step, map, reduce)


def all_gather(comm: Comm, step: str, map: Callable[[], Any]) -> list[Any]:
    """Map on every rank, and give every rank all values, by rank.

    Arguments and errors are those of `reduce_scatter`.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(2, lambda comm: all_gather(comm, "who is here", lambda: f"rank {comm.rank}"))
    [['rank 0', 'rank 1'], ['rank 0', 'rank 1']]
    """
    return list(_replied(comm, step, map, list))


def broadcast(comm: Comm, step: str, fn: Callable[[], Any]) -> Any:
    """Call ``fn`` on the coordinator only, and give every rank its result.

    The other arguments and the errors are those of `reduce_scatter`.

    >>> from shardplan.dist import solo
    >>> broadcast(solo(), "read metadata", lambda: {"step": 100})
    FrozenDict({'step': 100})
    """
    return _replied(comm, step, lambda: None, lambda nothing: fn())


def all_keys(comm: Comm, sd: Mapping[Any, Any]) -> list[str]:
    """Return the names of all leaves of every rank's state dict, sorted, each once.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(2, lambda comm: all_keys(comm, {"stage": {str(comm.rank): 0}, "step": 7}))[0]
    ['stage.0', 'stage.1', 'step']
    """

    def union(keys: list[Sequence[str]]) -> list[str]:
        return sorted({key for part in keys for key in part})

    return list(all_reduce(comm, "all_keys", lambda: sorted(flatten(sd)[0]), union))


def fail_alike(comm: Comm, step: str, error: Exception) -> NoReturn:
    """Raise an error that all other ranks raise as well."""
    kind, text = type(error).__name__, str(error)
    failures = [Failure(rank, step, kind, text, expected=True) for rank in comm.ranks]
    raise CheckpointError(failures, error)


def _replied(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    reduce: Callable[[list[Any]], Any],
    each: bool = False,
) -> Any:
    mine = _attempt(comm, step, lambda: Turn(None, map()))
    try:
        return _settled(comm, step, mine, lambda values: Turn(None, reduce(values)), each).reply
    finally:
        del mine  # as in `take_step`


# How a step is taken


class _ReportedError(Exception):
    """Failures of this or other ranks, as they arrived in frames."""

    def __init__(self, failures: Iterable[Failure]) -> None:
        self.failures = list(failures)
        super().__init__(self.failures)


@attrs.frozen(eq=False)
class _Attempt(Generic[M]):
    """What came of a rank's turn: frames to send, with its message or its failures.

    There is one frame for all ranks, or one per rank. ``error`` is the rank's own error.
    """

    turn: Turn[M] | None
    frames: Sequence[bytes]
    error: Exception | None = None


def _attempt(comm: Comm, step: str, work: Callable[[], Turn[M]], each: bool = False) -> _Attempt[M]:
    """Do some work, and turn its message, or its error, into frames."""
    turn: Turn[M] | None = None
    try:
        turn = work()
        messages = turn.message if each else [turn.message]
        if each and len(messages) != comm.world_size:
            raise ValueError(
                f"reduce returned {len(messages)} results for {comm.world_size} ranks; "
                "it must return one per rank, by rank"
            )
        return _Attempt(turn, [_frame(message) for message in messages])
    except _ReportedError as error:
        return _Attempt(turn, [_FAILED + _packed(error.failures)])
    except LostRanksError as error:  # the lost rank is to blame, not this one
        return _Attempt(turn, [_FAILED + _packed(error.failures(step))])
    except Exception as error:
        failure = Failure.of(error, comm.ranks[comm.rank], step)
        return _Attempt(turn, [_FAILED + _packed([failure])], error)
    except BaseException as error:
        comm.leave(departure(step, error))
        raise


def _settled(
    comm: Comm,
    step: str,
    mine: _Attempt[M],
    reduce: Callable[[list[Any]], Turn[W]],
    each: bool,
) -> StepResult[M, W]:
    """Reduce the frames of all ranks on the coordinator, and return the result."""
    whole: _Attempt[W] = _Attempt(None, [])
    try:
        meeting = comm.meet(mine.frames[0], repr(step))
        if meeting.gathered is not None:
            frames = meeting.gathered
            whole = _attempt(comm, step, lambda: reduce(_values(comm, step, frames)), each)
        reply = _value(meeting.answer(whole.frames))
        assert mine.turn is not None
        kept = None if whole.turn is None else whole.turn.kept
        return StepResult(mine.turn.kept, kept, reply)
    except _ReportedError as error:
        raise CheckpointError(error.failures, mine.error or whole.error) from None
    except LostRanksError as error:
        raise _lost(comm, step, error, mine.error or whole.error) from None
    except Exception as error:  # of the comm itself, or no memory left to decode the reply
        reason = departure(step, error)
        comm.leave(reason)
        # This rank cannot know what the others do now: it counts as lost, here as well.
        failure = Failure.of(error, comm.ranks[comm.rank], step)
        raise CheckpointError(
            [attrs.evolve(failure, type="LostRank", text=reason)], error
        ) from error
    except BaseException as error:
        comm.leave(departure(step, error))
        raise
    finally:
        del mine, whole  # as in `take_step`


def _alone(
    mine: _Attempt[M], reduce: Callable[[list[Any]], Turn[W]], each: bool
) -> StepResult[M, W]:
    """Reduce the message of a single rank; nothing is sent."""
    assert mine.turn is not None
    whole = reduce([mine.turn.message])
    reply = whole.message[0] if each else whole.message
    return StepResult(mine.turn.kept, whole.kept, reply)


def _lost(comm: Comm, step: str, error: LostRanksError, own: Exception | None) -> CheckpointError:
    """Return lost ranks as failures of a step; note this rank's error, which no other knows."""
    lost = CheckpointError(error.failures(step), own)
    if own is not None:
        lost.add_note(str(Failure.of(own, comm.ranks[comm.rank], step)))
    return lost


def _frame(message: Any) -> bytes:
    if isinstance(message, bytes):
        return b"".join((_RAW, message))
    return _JSON + encode_json(message)


def _value(frame: bytes) -> Any:
    """Return the message of a frame, or raise the failures in it."""
    if frame[:1] == _FAILED:
        raise _ReportedError(_unpacked(frame[1:]))
    return frame[1:] if frame[:1] == _RAW else decode_json(frame[1:])


def _values(comm: Comm, step: str, frames: Sequence[bytes]) -> list[Any]:
    """Return every rank's message, or raise all failures; name the rank of bad bytes."""
    failed = [_unpacked(frame[1:]) for frame in frames if frame[:1] == _FAILED]
    if failed:
        raise _ReportedError(thinned([failure for part in failed for failure in part]))
    values = []
    for rank, frame in zip(comm.ranks, frames, strict=True):
        try:
            values.append(_value(frame))
        except Exception as error:
            error.add_note(f"while decoding what rank {rank} sent in the step {step!r}")
            raise
    return values


def _packed(failures: Sequence[Failure]) -> bytes:
    """Encode failures; a text that many have in common is stored once.

    >>> alike = [Failure(rank, "write", "OSError", "disk full", "Traceback …") for rank in (3, 5)]
    >>> _unpacked(_packed(alike)) == alike, _packed(alike).count(b"disk full")
    (True, 1)
    """
    known: dict[str, int] = {}
    rows = [
        [rank, *(known.setdefault(word, len(known)) for word in words)]
        for rank, *words in map(attrs.astuple, failures)
    ]
    return encode_json([list(known), rows])


def _unpacked(data: bytes) -> list[Failure]:
    known, rows = decode_json(data)
    return [Failure(rank, *(known[word] for word in words)) for rank, *words in rows]
