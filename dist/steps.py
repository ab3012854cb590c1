"""Steps that all ranks take together, and that fail on all of them if they fail on one.

A step maps on every rank, reduces on the coordinator, and hands the result back. Whatever raises
on the way, and wherever, is caught, sent as text, and raised as one `CheckpointError` everywhere;
the comm can be used again after that. Where decoding the result may fail on some ranks and not on
others, a step ends when all have decoded it; whether they have, the coordinator finds out and
tells, so that what travels grows as the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from shardplan.planning import CodecError, flatten, from_json, to_json

from .comm import Comm, departure
from .errors import CheckpointError, Failure, LostRanksError, thinned

__all__ = [
    "all_gather",
    "all_keys",
    "all_reduce",
    "broadcast",
    "decode_json",
    "encode_json",
    "reduce_scatter",
]

T = TypeVar("T")

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]

_DONE, _FAILED = b"+", b"-"


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
        raise CodecError(f"these bytes are no typed JSON: {error}") from error


_ALIKE = (decode_json, bytes)  # what these do with the same bytes, they do on every rank


def reduce_scatter(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    reduce: Callable[[list[Any]], Sequence[Any]],
    *,
    encode: Encode = encode_json,
    decode: Decode = decode_json,
    encode_result: Encode | None = None,
    decode_result: Decode | None = None,
) -> Any:
    """Map on every rank, reduce all values on the coordinator, and give each rank its result.

    Args:
        comm: The ranks.
        step: The step's name, for errors.
        map: Called on every rank; what it returns goes to the coordinator.
        reduce: Called on the coordinator with every rank's value, by rank; returns one result per
            rank.
        encode: Turns a value into bytes. By default values are plain data: see `encode_json`.
        decode: Turns the bytes back.
        encode_result: The same for results; by default, as for values.
        decode_result: The same for results; by default, as for values.

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
    encode_result, decode_result = encode_result or encode, decode_result or decode
    with _together(comm, step) as here:
        gathered = comm.gather(here.frame(lambda: encode(map())), here.topic("gather"))
        parts = None
        if gathered is not None:
            parts = here.frames(lambda: _reduced(here, gathered, decode, reduce, encode_result))
        mine = comm.scatter(parts, here.topic("scatter"))
        # Each rank has bytes of its own, which decode everywhere only if we have encoded them.
        ours = decode_result is bytes or (encode_result, decode_result) == (
            encode_json,
            decode_json,
        )
        return here.agreed([mine], decode_result if ours else None, lambda: decode_result(mine[1:]))


def all_reduce(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    reduce: Callable[[list[Any]], Any],
    *,
    encode: Encode = encode_json,
    decode: Decode = decode_json,
    encode_result: Encode | None = None,
    decode_result: Decode | None = None,
) -> Any:
    """Map on every rank, reduce all values on the coordinator, and give every rank the result.

    Arguments and errors are those of `reduce_scatter`; but ``reduce`` returns one result.

    >>> from shardplan.dist import solo
    >>> all_reduce(solo(), "count bytes", lambda: 12, sum)
    12
    """
    encode_result, decode_result = encode_result or encode, decode_result or decode
    with _together(comm, step) as here:

        def work(gathered: list[bytes]) -> bytes:
            return here.frame(lambda: encode_result(reduce(here.decoded(gathered, decode))))

        mine = here.frame(lambda: encode(map()))
        result = comm.reduce(mine, work, here.topic("reduce"))
        return here.agreed([result], decode_result, lambda: decode_result(result[1:]))


def all_gather(
    comm: Comm,
    step: str,
    map: Callable[[], Any],
    *,
    encode: Encode = encode_json,
    decode: Decode = decode_json,
) -> list[Any]:
    """Map on every rank, and give every rank all values, by rank.

    Arguments and errors are those of `reduce_scatter`.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(2, lambda comm: all_gather(comm, "who is here", lambda: f"rank {comm.rank}"))
    [['rank 0', 'rank 1'], ['rank 0', 'rank 1']]
    """
    with _together(comm, step) as here:
        mine = here.frame(lambda: encode(map()))
        gathered = comm.all_gather(mine, here.topic("all_gather"))
        return here.agreed(gathered, decode, lambda: here.decoded(gathered, decode))


def broadcast(
    comm: Comm,
    step: str,
    fn: Callable[[], Any],
    *,
    encode: Encode = encode_json,
    decode: Decode = decode_json,
) -> Any:
    """Call ``fn`` on the coordinator only, and give every rank its result.

    The other arguments and the errors are those of `reduce_scatter`.

    >>> from shardplan.dist import solo
    >>> broadcast(solo(), "read metadata", lambda: {"step": 100})
    FrozenDict({'step': 100})
    """
    with _together(comm, step) as here:
        mine = comm.rank == comm.coordinator
        frame = here.frame(lambda: encode(fn())) if mine else None
        whole = comm.broadcast(frame, here.topic("broadcast"))
        return here.agreed([whole], decode, lambda: decode(whole[1:]))


def all_keys(comm: Comm, sd: Mapping[Any, Any]) -> list[str]:
    """Return the names of all leaves of every rank's state dict, sorted, each once.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(2, lambda comm: all_keys(comm, {"stage": {str(comm.rank): 0}, "step": 7}))[0]
    ['stage.0', 'stage.1', 'step']
    """

    def union(keys: list[Sequence[str]]) -> list[str]:
        return sorted({key for part in keys for key in part})

    return list(all_reduce(comm, "all_keys", lambda: sorted(flatten(sd)[0]), union))


class _ToldError(Exception):
    """Failures that a frame brought; they are raised as they are."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = failures
        super().__init__(failures)


@contextlib.contextmanager
def _together(comm: Comm, step: str) -> Iterator[_Here]:
    """Take a step; ranks that are lost become failures of it, and who cannot go on says so."""
    here = _Here(comm, step)
    try:
        yield here
    except CheckpointError:
        raise
    except LostRanksError as error:
        lost = CheckpointError(error.failures(step), here.own)
        if here.own is not None:  # of which the others know nothing
            lost.add_note(str(Failure.of(here.own, comm.ranks[comm.rank], step)))
        raise lost from None
    except Exception as error:  # of the comm itself: all else was caught, and told to the others
        failure = Failure.of(error, comm.ranks[comm.rank], step)
        reason = departure(step, error)
        comm.leave(reason)
        # This rank cannot know what the others do now: it is lost, to itself as to them.
        told = [attrs.evolve(failure, type="LostRank", text=reason)]
        raise CheckpointError(told, error) from error
    except BaseException as error:
        comm.leave(departure(step, error))
        raise
    finally:
        here.raised.clear()  # an error knows by its traceback who holds it


@attrs.frozen
class _Here:
    """One rank within one step: it turns what is done into frames, and frames into errors."""

    comm: Comm
    step: str
    raised: list[Exception] = attrs.field(factory=list)

    @property
    def own(self) -> Exception | None:
        """What was raised here, if anything was."""
        return self.raised[0] if self.raised else None

    def topic(self, collective: str) -> str:
        """Say what a meeting is for, so that nobody takes it for one of another step.

        >>> from shardplan.dist import solo
        >>> _Here(solo(), "write").topic("gather")
        "gather of 'write'"
        """
        return f"{collective} of {self.step!r}"

    def frame(self, work: Callable[[], bytes]) -> bytes:
        """Return the bytes that ``work`` does, or what it raised, ready to be sent."""
        return self.frames(lambda: [work()])[0]

    def frames(self, work: Callable[[], Sequence[bytes]]) -> list[bytes]:
        """Return one frame per part of what ``work`` returns; if it raised, one per rank."""
        try:
            return [b"".join((_DONE, _only_bytes(part))) for part in work()]
        except _ToldError as told:
            failures = list(told.failures)
        except LostRanksError as lost:  # to blame is who is lost, not who has noticed
            failures = lost.failures(self.step)
        except Exception as error:
            self.raised.append(error)
            failures = [Failure.of(error, self.comm.ranks[self.comm.rank], self.step)]
        return [_FAILED + _packed(failures)] * self.comm.world_size

    def opened(self, *frames: bytes) -> Any:
        """Return the bytes of a frame, or raise all failures of the frames."""
        told = [_unpacked(frame[1:]) for frame in frames if frame[:1] == _FAILED]
        failures = [failure for part in told for failure in part]
        if failures:
            raise _ToldError(thinned(failures))
        return frames[0][1:]

    def decoded(self, frames: Sequence[bytes], decode: Decode) -> list[Any]:
        """Return every rank's value, or raise all failures; say whose bytes do not decode."""
        self.opened(*frames)
        values = []
        for rank, frame in zip(self.comm.ranks, frames, strict=True):
            try:
                values.append(decode(frame[1:]))
            except Exception as error:
                error.add_note(f"while decoding what rank {rank} sent in the step {self.step!r}")
                raise
        return values

    def agreed(self, frames: Sequence[bytes], decode: Decode | None, work: Callable[[], T]) -> T:
        """Return what ``work`` decodes, once it is known that it succeeds on all ranks.

        Args:
            frames: What has come. If it tells of failures, it tells all ranks of the same ones.
            decode: What decodes it; None if it may fail on some ranks and not on others.
            work: Decodes it.
        """
        results: list[T] = []
        scarce: list[Exception] = []

        def attempt() -> bytes:
            try:
                results.append(work())
            except Exception as error:
                if isinstance(error.__cause__ or error, (MemoryError, RecursionError)):
                    scarce.append(error)
                raise
            return b""

        def end(told: list[bytes]) -> bytes:
            return self.frame(lambda: self.opened(*told))

        try:
            self.opened(*frames)
            ended = self.frame(attempt)
            if decode not in _ALIKE:
                ended = self.comm.reduce(ended, end, self.topic("the end"))
            elif scarce:  # other ranks may have had enough, and have gone on
                self.comm.leave(departure(self.step, scarce[0]))
            self.opened(ended)
        except _ToldError as error:
            raise CheckpointError(error.failures, self.own) from None
        return results[0]


def _packed(failures: Sequence[Failure]) -> bytes:
    """Encode failures; what many have in common is there once.

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


def _reduced(
    here: _Here,
    gathered: Sequence[bytes],
    decode: Decode,
    reduce: Callable[[list[Any]], Sequence[Any]],
    encode: Encode,
) -> list[bytes]:
    """Return the encoded result of each rank; there must be one for each."""
    results = reduce(here.decoded(gathered, decode))
    if len(results) != here.comm.world_size:
        raise ValueError(
            f"reduce returned {len(results)} results for {here.comm.world_size} ranks; "
            "it must return one per rank, by rank"
        )
    return [encode(result) for result in results]


def _only_bytes(data: object) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"encode must return bytes, and returned a {type(data).__name__}")
    return data
