"""Comparing the elements of two checkpoints: by checksum where possible, else bit by bit.

A chunk that both sides cut and hashed alike is compared by its checksums. The blocks of all other
chunks of the first side are read from both sides, a few at a time, however the second is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import TensorMetadata
from shardplan.planning.columns import Ints, column
from shardplan.planning.geometry import Tiling
from shardplan.planning.storage import Box, ComparePlan, compare_plan, read_boxes

from .errors import FormatError, LoadError
from .execute.read import Reader
from .pool import Progress, ProgressCallback
from .tensors import empty_tensor, flat_memory

_BATCH: Final = 8 << 20  # bytes that are read from either side at a time
_WORDS: Final[dict[int, str]] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


@attrs.frozen
class TensorDiff:
    """How the elements of one tensor differ.

    Attributes:
        chunks: How many of the first side's chunks hold a difference.
        elements: How many elements differ; None if only checksums were compared.
        first: Where the first of these is, in row-major order; None likewise.
        before, after: That element on either side; None where Python has no number for it.
    """

    chunks: int
    elements: int | None = None
    first: tuple[int, ...] | None = None
    before: Any = None
    after: Any = None


@attrs.frozen
class Comparison:
    """The result of comparing tensors."""

    differing: Mapping[str, TensorDiff]
    bytes_read: int  # of both sides
    unread: frozenset[str]  # tensors with chunks that were compared by checksum only


@attrs.frozen(eq=False)
class _BySums:
    """What checksums say of each chunk of the first side: equal, different, or neither."""

    equal: npt.NDArray[np.bool_]
    differs: npt.NDArray[np.bool_]


def compare_tensors(
    a: Reader,
    b: Reader,
    names: Iterable[str],
    *,
    locate: bool = False,
    read: bool = False,
    progress: ProgressCallback | None = None,
) -> Comparison:
    """Compare the elements of tensors that have the same shape and dtype on both sides.

    ``locate``: read chunks whose checksums differ, to find where and how much. ``read``: read
    everything, and ignore checksums. Progress counts the bytes of one side.
    """
    found, unread, skipped = dict[str, TensorDiff](), dict[str, Ints](), set[str]()
    for name, sums in _compare_sums(a, b, names, ignore=read):
        if not (sums.equal | sums.differs).all() or (locate and sums.differs.any()):
            unread[name] = np.flatnonzero(~sums.equal)
            skipped.update([name] if sums.equal.any() else [])
        else:
            skipped.update([name] if len(sums.equal) else [])
            if sums.differs.any():
                found[name] = TensorDiff(int(sums.differs.sum()))
    plan = compare_plan(a.metadata, unread, _BATCH)
    done = Progress(sum(plan.nbytes), progress)
    for reader in (a, b):  # all chunks are found at once, not batch by batch
        counts = {name: len(_entry(reader, name).chunks) for name in unread}
        keys = [(name, number) for name, count in counts.items() for number in range(count)]
        reader.source.find_chunks(keys)

    def run(batch: range) -> _Compared:
        boxes = plan.boxes[batch.start : batch.stop]
        (ours, some), (theirs, more) = _read(a, boxes), _read(b, boxes)
        compared = zip(batch, map(_compare, boxes, ours, theirs), strict=True)
        done.add(sum(plan.nbytes[batch.start : batch.stop]))
        return _Compared({number: diff for number, diff in compared if diff}, some + more)

    cost = 4 * _BATCH + max(a.store.staging, b.store.staging)
    compared = a.pool.map(run, plan.batches, nbytes=cost)
    done.finish()
    found |= _merge(plan, {n: diff for one in compared for n, diff in one.diffs.items()})
    return Comparison(found, sum(one.bytes_read for one in compared), frozenset(skipped))


@attrs.frozen(eq=False)
class _Compared:
    """What differs in some boxes, by number of the box, and the bytes that were read for that."""

    diffs: Mapping[int, TensorDiff]
    bytes_read: int


def _compare_sums(
    a: Reader, b: Reader, names: Iterable[str], *, ignore: bool
) -> Iterator[tuple[str, _BySums]]:
    """Yield what the checksums of each tensor say; nothing if they are to be ignored."""
    left, right = a.metadata.state_dict_metadata, b.metadata.state_dict_metadata

    @cache
    def matches(ours: int, theirs: int) -> Ints:
        return _same_boxes(left.layouts[ours].tiling, right.layouts[theirs].tiling)

    block_bytes = min(a.source.block_bytes, b.source.block_bytes)
    for name in names:
        match = matches(int(left.layout[left.row_of[name]]), int(right.layout[right.row_of[name]]))
        ours, theirs = a.source.sums_of(name), b.source.sums_of(name)
        equal, both = np.zeros(len(match), bool), np.zeros(len(match), bool)
        if ours is not None and theirs is not None and not ignore:
            both = match >= 0
            if a.source.block_bytes != b.source.block_bytes:  # only a single block is hashed alike
                entry = _entry(a, name)
                sizes = entry.chunks.sizes.prod(axis=1) * entry.properties.itemsize
                both &= sizes <= block_bytes
            equal[both] = ours[both] == theirs[match[both]]
        yield name, _BySums(equal, both & ~equal)


def _same_boxes(a: Tiling, b: Tiling) -> Ints:
    """Return, for each chunk of ``a``, the number of the same box in ``b``, or -1."""
    if a == b:
        return column(np.arange(len(a)))
    number = {box: i for i, box in enumerate(b)}
    return column([number.get(box, -1) for box in a])


def _entry(reader: Reader, name: str) -> TensorMetadata:
    entry = reader.metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorMetadata)
    return entry


def _read(reader: Reader, boxes: Sequence[Box]) -> tuple[list[torch.Tensor], int]:
    """Return the elements of some boxes, and how many bytes were read for them."""
    dtypes = {name: _entry(reader, name).properties.dtype for name in {box.name for box in boxes}}
    tensors = [empty_tensor(box.sizes, dtypes[box.name]) for box in boxes]
    with named_errors(reader):
        stats = reader.fill_boxes(tensors, *read_boxes(reader.metadata, boxes))
    return tensors, stats.bytes_read


@contextmanager
def named_errors(reader: Reader) -> Iterator[None]:
    """Name the checkpoint in errors of reading it, for there are two, and drop a load's details."""
    try:
        yield
    except FormatError as error:
        raise error.within(reader.store.url) from error.__cause__
    except LoadError as error:
        raise (error.__cause__ or error) from None


def _compare(box: Box, a: torch.Tensor, b: torch.Tensor) -> TensorDiff | None:
    """Compare two tensors as bits: NaNs differ if their bits do, and so do zeros of either sign.

    >>> box = Box("w", (4, 0), (2, 2))
    >>> _compare(box, torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 9]]))
    TensorDiff(chunks=1, elements=1, first=(5, 1), before=4, after=9)
    """
    differs = _bits(a) != _bits(b)
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    at = int(differs.argmax())
    inner = np.unravel_index(at, box.sizes)
    first = tuple(o + int(i) for o, i in zip(box.offsets, inner, strict=True))
    return TensorDiff(1, count, first, _number(a, at), _number(b, at))


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's elements as integers; two for each element of sixteen bytes."""
    view = flat_memory(tensor)
    assert view is not None
    words = np.frombuffer(view, _WORDS[tensor.dtype.itemsize])
    return words.reshape(-1, 2) if tensor.dtype.itemsize == 16 else words


def _number(tensor: torch.Tensor, at: int) -> Any:
    try:
        return tensor.reshape(-1)[at].item()
    except (RuntimeError, NotImplementedError):  # a dtype that torch cannot compute with
        return None


def _merge(plan: ComparePlan, diffs: Mapping[int, TensorDiff]) -> dict[str, TensorDiff]:
    """Add up what was found in the boxes of each tensor."""
    by_name: dict[str, list[int]] = {}
    for number in diffs:
        by_name.setdefault(plan.boxes[number].name, []).append(number)
    merged = {}
    for name, numbers in by_name.items():
        first = min((diffs[number] for number in numbers), key=lambda diff: diff.first or ())
        chunks = len({plan.chunk[number] for number in numbers})
        elements = sum(diffs[number].elements or 0 for number in numbers)
        merged[name] = attrs.evolve(first, chunks=chunks, elements=elements)
    return merged


def same_value(a: Any, b: Any) -> bool:
    """Compare values, their types and their bits, to the leaves; dicts in any order.

    >>> same_value([1, (2.0, float("nan"))], [1, (2.0, float("nan"))])
    True
    >>> same_value(1, 1.0), same_value({1}, {True}), same_value({1: 2}, {True: 2})
    (False, False, False)
    >>> same_value(0.0, -0.0)
    False
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and _same_bits(a, b))
    if isinstance(a, Mapping):
        ours, theirs = ({_token(k): v for k, v in side.items()} for side in (a, b))
        return ours.keys() == theirs.keys() and all(same_value(ours[k], theirs[k]) for k in ours)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(_token(a) == _token(b))


def _token(value: Any) -> Any:
    """Return an object that equals another one's only if type and bits are the same."""
    if isinstance(value, (float, complex)):
        return type(value), np.array(value).tobytes()
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if isinstance(value, tuple):
        return type(value), tuple(map(_token, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_token, value))
    return type(value), value


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    x, y = (flat_memory(t.detach().cpu().contiguous().resolve_conj().resolve_neg()) for t in (a, b))
    return x == y
