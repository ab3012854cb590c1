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

from shardplan.planning import SavePlan, TensorMetadata, WriteItemType, load_plan
from shardplan.planning.columns import Catalog, Head, Ints, WriteItems, column, padded
from shardplan.planning.geometry import Chunk, Tiling
from shardplan.planning.storage import cut_blocks

from .errors import FormatError, LoadError
from .execute.read import Reader
from .pool import Progress, ProgressCallback
from .tensors import box_view, empty_tensor, flat_memory

_BATCH: Final = 8 << 20  # bytes that are read from either side at a time
_BATCH_BOXES: Final = 1 << 10
_WORDS: Final[dict[int, str]] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


@attrs.frozen
class Box:
    """A box of a tensor to compare, small enough for memory."""

    name: str
    chunk: Chunk
    nbytes: int
    number: int  # of the chunk of the first side that it is a part of


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
    boxes = list(_boxes(a, unread))
    done = Progress(sum(box.nbytes for box in boxes), progress)
    for reader in (a, b):  # all chunks are found at once, not batch by batch
        counts = {name: len(_entry(reader, name).chunks) for name in unread}
        reader.source.find_chunks(
            [(name, i) for name, count in counts.items() for i in range(count)]
        )

    def run(batch: list[Box]) -> tuple[list[tuple[Box, TensorDiff]], int]:
        (ours, some), (theirs, more) = _read(a, batch), _read(b, batch)
        pairs = zip(batch, ours, theirs, strict=True)
        differing = [(box, diff) for box, x, y in pairs if (diff := _compare(box.chunk, x, y))]
        done.add(sum(box.nbytes for box in batch))
        return differing, some + more

    cost = 4 * _BATCH + max(a.store.staging, b.store.staging)
    parts = a.pool.map(run, _batches(boxes), nbytes=cost)
    done.finish()
    found |= _merge(piece for pieces, _ in parts for piece in pieces)
    return Comparison(found, sum(nbytes for _, nbytes in parts), frozenset(skipped))


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


def _boxes(reader: Reader, unread: Mapping[str, Ints]) -> Iterator[Box]:
    """Cut chunks into blocks small enough for memory."""
    for name, chunks in unread.items():
        entry = _entry(reader, name)
        offsets, sizes = entry.chunks.offsets[chunks], entry.chunks.sizes[chunks]
        width, axes = entry.properties.itemsize, len(entry.size)
        blocks = cut_blocks(sizes, np.full(len(chunks), width), _BATCH)
        starts = offsets[blocks.box] + blocks.offsets[:, :axes]
        rows = (starts.tolist(), blocks.sizes[:, :axes].tolist(), chunks[blocks.box].tolist())
        for start, size, number in zip(*rows, strict=True):
            chunk = Chunk(start, size)
            yield Box(name, chunk, chunk.numel * width, number)


def _entry(reader: Reader, name: str) -> TensorMetadata:
    entry = reader.metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorMetadata)
    return entry


def _batches(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    batch, held = list[Box](), 0
    for box in boxes:
        if batch and (held + box.nbytes > _BATCH or len(batch) == _BATCH_BOXES):
            yield batch
            batch, held = [], 0
        batch.append(box)
        held += box.nbytes
    if batch:
        yield batch


def _read(reader: Reader, batch: Sequence[Box]) -> tuple[list[torch.Tensor], int]:
    """Return the elements of some boxes, and how many bytes were read for them."""
    entries = {name: _entry(reader, name) for name in dict.fromkeys(box.name for box in batch)}
    tensors = [empty_tensor(box.chunk.sizes, entries[box.name].properties.dtype) for box in batch]
    at = {(box.name, box.chunk.offsets): number for number, box in enumerate(batch)}
    items = load_plan(reader.metadata, _plan(entries, batch)).items

    def dest(row: int) -> torch.Tensor:
        anchor = items.dest_anchor[row, : items.ndim[row]].tolist()
        tensor = tensors[at[items.names[items.dest[row]], tuple(anchor)]]
        return box_view(tensor, items.dest_offsets[row].tolist(), items.lengths[row].tolist())

    with named_errors(reader):
        stats = reader.fill(items, dest)
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


def _plan(entries: Mapping[str, TensorMetadata], batch: Sequence[Box]) -> SavePlan:
    """Return the plan of a rank that holds these boxes."""
    shard = WriteItemType.SHARD
    catalog = Catalog.of(Head(n, n, shard, e.properties, e.size) for n, e in entries.items())
    number = {name: row for row, name in enumerate(entries)}
    items = WriteItems(
        catalog,
        column([number[box.name] for box in batch]),
        padded([box.chunk.offsets for box in batch], 0, catalog.axes),
        padded([box.chunk.sizes for box in batch], 1, catalog.axes),
    )
    return SavePlan(items)


def _compare(box: Chunk, a: torch.Tensor, b: torch.Tensor) -> TensorDiff | None:
    """Compare two tensors as bits: NaNs differ if their bits do, and so do zeros of either sign.

    >>> box = Chunk((4, 0), (2, 2))
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


def _merge(pieces: Iterable[tuple[Box, TensorDiff]]) -> dict[str, TensorDiff]:
    """Add up what was found in the boxes of each tensor."""
    by_name: dict[str, list[tuple[Box, TensorDiff]]] = {}
    for box, diff in pieces:
        by_name.setdefault(box.name, []).append((box, diff))
    merged = {}
    for name, found in by_name.items():
        first = min((diff for _, diff in found), key=lambda diff: diff.first or ())
        chunks = len({box.number for box, _ in found})
        count = sum(diff.elements or 0 for _, diff in found)
        merged[name] = attrs.evolve(first, chunks=chunks, elements=count)
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
