"""Do two checkpoints hold the same elements? By checksum where they can tell, else bit by bit.

A chunk that both sides cut and hashed alike is settled by its checksums. Of all others, the blocks
of the first side's chunks are read from both sides, a few at a time, however the second is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from .progress import Progress, Tell
from .tensors import empty, memory, window

__all__ = ["Comparison", "TensorDiff", "compare_tensors", "named_errors", "same_value"]

_BATCH: Final = 8 << 20  # bytes that are read from either side at a time
_BATCH_BOXES: Final = 1 << 10
_WORDS: Final[dict[int, str]] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


@attrs.frozen
class Box:
    """Elements to compare: a box of a tensor, small enough to be held.

    Attributes:
        name: The tensor.
        chunk: The box.
        nbytes: How many bytes it takes.
        number: Which of the first side's chunks it is a part of.
    """

    name: str
    chunk: Chunk
    nbytes: int
    number: int


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
    """What comparing tensors found.

    Attributes:
        differing: Those that differ, by name.
        bytes_read: Bytes of elements that were read for it, of both sides.
        unread: Those of which some or all chunks were compared by checksum, and not read.
    """

    differing: Mapping[str, TensorDiff]
    bytes_read: int
    unread: frozenset[str]


def compare_tensors(
    a: Reader,
    b: Reader,
    names: Iterable[str],
    *,
    locate: bool = False,
    read: bool = False,
    tell: Tell | None = None,
) -> Comparison:
    """Compare the elements of tensors that have the same shape and dtype on both sides.

    Args:
        a: The first side.
        b: The second side, with the same pool.
        names: The tensors.
        locate: Whether to read what checksums say differs, too, to tell how much of it and where.
        read: Whether to read everything, and go by no checksum.
        tell: Is told of the bytes that are to be read from either side.
    """
    matcher = _Matcher(a, b)
    found: dict[str, TensorDiff] = {}
    unread: list[tuple[str, Ints]] = []
    settled: set[str] = set()
    for name in names:
        equal, differs = matcher.settle(name, trust=not read)
        if (~equal & ~differs).any() or (locate and differs.any()):
            unread.append((name, np.flatnonzero(~equal)))
            settled.update([name] if equal.any() else [])
            continue
        settled.update([name] if len(equal) else [])
        if differs.any():
            found[name] = TensorDiff(int(differs.sum()))
    boxes = list(_boxes(a, unread))
    progress = Progress(sum(box.nbytes for box in boxes), tell)
    work = _Work(a, b, progress)
    for reader in (a, b):
        counts = ((name, len(_entry(reader, name).chunks)) for name, _ in unread)
        reader.source.spots([(name, i) for name, count in counts for i in range(count)])
    cost = 4 * _BATCH + max(a.store.staging, b.store.staging)
    pieces = a.pool.map(work.run, _batches(boxes), nbytes=cost)
    progress.finish()
    found.update(_merge(piece for part in pieces for piece in part[0]))
    return Comparison(found, sum(part[1] for part in pieces), frozenset(settled))


class _Matcher:
    """Finds the chunks that both sides have, and compares their checksums."""

    def __init__(self, a: Reader, b: Reader) -> None:
        self._a, self._b = a.source, b.source
        self._entries = a.metadata.state_dict_metadata, b.metadata.state_dict_metadata
        self._known: dict[tuple[int, int], Ints] = {}

    def settle(
        self, name: str, *, trust: bool
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Tell of each chunk of the first side whether it is surely equal, or surely not.

        If checksums are not to be trusted, nothing is sure.
        """
        ours, theirs = self._a.sums_of(name), self._b.sums_of(name)
        match = self._match(name)
        if ours is None or theirs is None or not trust:
            return np.zeros(len(match), bool), np.zeros(len(match), bool)
        both = match >= 0
        if self._a.block_bytes != self._b.block_bytes:  # only a single block is hashed alike
            both &= _chunk_bytes(self._entries[0][name]) <= min(
                self._a.block_bytes, self._b.block_bytes
            )
        same = np.zeros(len(ours), bool)
        same[both] = ours[both] == theirs[match[both]]
        return same, both & ~same

    def _match(self, name: str) -> Ints:
        """Return which chunk of the second side is the same box; -1 where none is."""
        ours, theirs = (int(side.layout[side.row_of[name]]) for side in self._entries)
        key = ours, theirs
        if key not in self._known:
            a, b = self._entries
            self._known[key] = _same_boxes(a.layouts[ours].tiling, b.layouts[theirs].tiling)
        return self._known[key]


def _same_boxes(a: Tiling, b: Tiling) -> Ints:
    """Return, for each chunk of ``a``, the number of the same one in ``b``, or -1.

    >>> from shardplan.planning import tile
    >>> _same_boxes(tile([[0], [2]], [[2], [2]]), tile([[0], [2], [3]], [[2], [1], [1]])).tolist()
    [0, -1]
    """
    if a == b:
        return column(np.arange(len(a)))
    number = {box: i for i, box in enumerate(b)}
    return column([number.get(box, -1) for box in a])


def _chunk_bytes(entry: Any) -> Ints:
    sizes: Ints = entry.chunks.sizes.prod(axis=1) * entry.properties.itemsize
    return sizes


def _boxes(reader: Reader, unread: Sequence[tuple[str, Ints]]) -> Iterator[Box]:
    """Cut chunks into blocks small enough to be held."""
    for name, chunks in unread:
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
    """Group boxes up to the size that is read at a time."""
    batch, held = list[Box](), 0
    for box in boxes:
        if batch and (held + box.nbytes > _BATCH or len(batch) == _BATCH_BOXES):
            yield batch
            batch, held = [], 0
        batch.append(box)
        held += box.nbytes
    if batch:
        yield batch


class _Work:
    """Reads boxes from both sides and compares them, on any number of threads."""

    def __init__(self, a: Reader, b: Reader, progress: Progress) -> None:
        self._a, self._b, self._progress = a, b, progress

    def run(self, batch: list[Box]) -> tuple[list[tuple[Box, TensorDiff]], int]:
        """Return the boxes of a batch that differ, and how many bytes were read."""
        (ours, some), (theirs, more) = _read(self._a, batch), _read(self._b, batch)
        pairs = zip(batch, ours, theirs, strict=True)
        found = [(box, diff) for box, x, y in pairs if (diff := _compare(box.chunk, x, y))]
        self._progress.add(sum(box.nbytes for box in batch))
        return found, some + more


def _read(reader: Reader, batch: Sequence[Box]) -> tuple[list[torch.Tensor], int]:
    """Return the elements of some boxes, and how many bytes were read for them."""
    entries = {name: _entry(reader, name) for name in dict.fromkeys(box.name for box in batch)}
    tensors = [empty(box.chunk.sizes, entries[box.name].properties.dtype) for box in batch]
    at = {(box.name, box.chunk.offsets): number for number, box in enumerate(batch)}
    items = load_plan(reader.metadata, _plan(entries, batch)).items

    def dest(row: int) -> torch.Tensor:
        anchor = items.dest_anchor[row, : items.ndim[row]].tolist()
        tensor = tensors[at[items.names[items.dest[row]], tuple(anchor)]]
        return window(tensor, items.dest_offsets[row].tolist(), items.lengths[row].tolist())

    with named_errors(reader):
        stats = reader.fill(items, dest)
    return tensors, stats.bytes_read


@contextmanager
def named_errors(reader: Reader) -> Iterator[None]:
    """Name the checkpoint in what reading it raises: there are two, and neither is being loaded."""
    try:
        yield
    except FormatError as error:
        raise error.within(reader.store.url) from error.__cause__
    except LoadError as error:
        raise (error.__cause__ or error) from None


def _plan(entries: Mapping[str, TensorMetadata], batch: Sequence[Box]) -> SavePlan:
    """Return the plan of a rank that holds just these boxes."""
    kind = WriteItemType.SHARD
    heads = [Head(name, name, kind, e.properties, e.size) for name, e in entries.items()]
    catalog = Catalog.of(heads)
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
    """Return a tensor's elements as whole numbers; one row an element, if one is not enough."""
    view = memory(tensor)
    assert view is not None
    words = np.frombuffer(view, _WORDS[tensor.dtype.itemsize])
    return words.reshape(-1, 2) if tensor.dtype.itemsize == 16 else words


def _number(tensor: torch.Tensor, at: int) -> Any:
    try:
        return tensor.reshape(-1)[at].item()
    except (RuntimeError, NotImplementedError):  # a dtype that torch only carries
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
    """Compare values, their types and their bits to the leaves; the order of a dict is no matter.

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
    """Return what is equal just for values of the same type and bits.

    >>> _token(1) == _token(True), _token((0.0,)) == _token((-0.0,))
    (False, False)
    """
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
    x, y = (memory(t.detach().cpu().contiguous().resolve_conj().resolve_neg()) for t in (a, b))
    return x == y
