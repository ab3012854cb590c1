"""Steps that all ranks take together, and that fail on all of them if they fail on one.

A step maps on every rank, reduces on the coordinator, and hands the result back. Any error on any
rank is caught, sent as text, and raised as one `CheckpointError` everywhere; the comm can be used
again after that. Where decoding the result may fail on some ranks only, the step ends with one more
round through the coordinator, which reports whether all ranks have decoded it.
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
        raise CodecError(f"these bytes are not typed JSON: {error}") from error


_ALIKE = (decode_json, bytes)  # they succeed on all ranks or on none, given the same bytes


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
            parts = here.frames(
                lambda: [encode_result(r) for r in here.one_each(reduce, gathered, decode)]
            )
        mine = comm.scatter(parts, here.topic("scatter"))
        # Each rank has its own bytes: they decode everywhere if our own codec made them.
        codec = (encode_result, decode_result)
        alike = decode_result is bytes or codec == (encode_json, decode_json)
        return here.agreed([mine], lambda: decode_result(mine[1:]), alike=alike)


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
        mine = here.frame(lambda: encode(map()))
        result = comm.reduce(
            mine,
            lambda frames: here.frame(lambda: encode_result(reduce(here.decoded(frames, decode)))),
            here.topic("reduce"),
        )
        alike = decode_result in _ALIKE
        return here.agreed([result], lambda: decode_result(result[1:]), alike=alike)


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
        alike = decode in _ALIKE
        return here.agreed(gathered, lambda: here.decoded(gathered, decode), alike=alike)


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
        return here.agreed([whole], lambda: decode(whole[1:]), alike=decode in _ALIKE)


def all_keys(comm: Comm, sd: Mapping[Any, Any]) -> list[str]:
    """Return the names of all leaves of every rank's state dict, sorted, each once.

    >>> from shardplan.dist import run_ranks
    >>> run_ranks(2, lambda comm: all_keys(comm, {"stage": {str(comm.rank): 0}, "step": 7}))[0]
    ['stage.0', 'stage.1', 'step']
    """

    def union(keys: list[Sequence[str]]) -> list[str]:
        return sorted({key for part in keys for key in part})

    return list(all_reduce(comm, "all_keys", lambda: sorted(flatten(sd)[0]), union))


class _ReportedError(Exception):
    """Failures of this or other ranks, as they arrived in frames."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = failures
        super().__init__(failures)


@contextlib.contextmanager
def _together(comm: Comm, step: str) -> Iterator[_Here]:
    """Take a step: lost ranks become failures of it, and a rank that cannot go on leaves."""
    here = _Here(comm, step)
    try:
        yield here
    except CheckpointError:
        raise
    except LostRanksError as error:
        lost = CheckpointError(error.failures(step), here.own)
        if here.own is not None:  # the other ranks do not know of it
            lost.add_note(str(Failure.of(here.own, here.rank, step)))
        raise lost from None
    except Exception as error:  # of the comm itself: all others were caught, and sent
        reason = departure(step, error)
        comm.leave(reason)
        # This rank cannot know what the others do now: it counts as lost, here as well.
        failure = attrs.evolve(Failure.of(error, here.rank, step), type="LostRank", text=reason)
        raise CheckpointError([failure], error) from error
    except BaseException as error:
        comm.leave(departure(step, error))
        raise
    finally:
        here.own = None  # its traceback refers to this frame


@attrs.define
class _Here:
    """One rank within one step: turns work into frames, and frames into results or errors.

    A frame is bytes with a mark in front: the result of some work, or the failures of ranks.
    """

    comm: Comm
    step: str
    own: Exception | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""
        return self.comm.ranks[self.comm.rank]

    def topic(self, collective: str) -> str:
        """Name a collective, so that ranks in different steps notice it."""
        return f"{collective} of {self.step!r}"

    def frame(self, work: Callable[[], bytes]) -> bytes:
        """Return a frame with the bytes that ``work`` returns, or with the error it raises."""
        return self.frames(lambda: [work()])[0]

    def frames(self, work: Callable[[], Sequence[bytes]]) -> list[bytes]:
        """Return one frame per part that ``work`` returns; if it raises, one per rank."""
        try:
            return [b"".join((_DONE, _only_bytes(part))) for part in work()]
        except Exception as error:
            return [self.failed(error)] * self.comm.world_size

    def failed(self, error: Exception) -> bytes:
        """Return a frame with an error of this rank, or with the failures of others it carries."""
        if isinstance(error, _ReportedError):
            return _FAILED + _packed(error.failures)
        if isinstance(error, LostRanksError):  # the lost rank is to blame, not this one
            return _FAILED + _packed(error.failures(self.step))
        self.own = self.own or error
        return _FAILED + _packed([Failure.of(error, self.rank, self.step)])

    def opened(self, *frames: bytes) -> bytes:
        """Return the bytes of the first frame, or raise all failures of the frames."""
        found = [_unpacked(frame[1:]) for frame in frames if frame[:1] == _FAILED]
        if found:
            raise _ReportedError(thinned([failure for part in found for failure in part]))
        return frames[0][1:]

    def decoded(self, frames: Sequence[bytes], decode: Decode) -> list[Any]:
        """Return every rank's value, or raise all failures; name the rank of bad bytes."""
        self.opened(*frames)
        values = []
        for rank, frame in zip(self.comm.ranks, frames, strict=True):
            try:
                values.append(decode(frame[1:]))
            except Exception as error:
                error.add_note(f"while decoding what rank {rank} sent in the step {self.step!r}")
                raise
        return values

    def one_each(
        self, reduce: Callable[[list[Any]], Sequence[Any]], frames: Sequence[bytes], decode: Decode
    ) -> Sequence[Any]:
        """Reduce all ranks' values, and return the results if there is one for each rank."""
        results, count = reduce(self.decoded(frames, decode)), self.comm.world_size
        if len(results) != count:
            raise ValueError(
                f"reduce returned {len(results)} results for {count} ranks; "
                "it must return one per rank, by rank"
            )
        return results

    def agreed(self, frames: Sequence[bytes], work: Callable[[], T], *, alike: bool) -> T:
        """Return what ``work`` decodes, once it is known that it succeeds on all ranks.

        Args:
            frames: What has arrived; if there are failures in it, all ranks have the same ones.
            work: Decodes it.
            alike: Whether it succeeds on all ranks if it does on one.
        """
        try:
            self.opened(*frames)
            try:
                value, ended = work(), _DONE
            except Exception as error:
                ended = self.failed(error)
                if alike and isinstance(error.__cause__ or error, (MemoryError, RecursionError)):
                    self.comm.leave(departure(self.step, error))  # others may have gone on
            if not alike:
                ended = self.comm.reduce(ended, self._all_ended, self.topic("the end"))
            self.opened(ended)
        except _ReportedError as error:
            raise CheckpointError(error.failures, self.own) from None
        return value

    def _all_ended(self, frames: list[bytes]) -> bytes:
        return self.frame(lambda: self.opened(*frames))


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


def _only_bytes(data: object) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError(f"encode must return bytes, and returned a {type(data).__name__}")
    return data
