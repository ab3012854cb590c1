"""Read sums of checkpoints: each tensor is added up a block at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

from shardplan.planning import (
    Expression,
    TensorMetadata,
    Term,
    Weighted,
    every,
    itemsize,
    sum_dtype,
    term_boxes,
    terms_of,
)
from shardplan.planning.columns import ReadItems
from shardplan.planning.storage import BLOCK_BYTES, boxes_of, find_chunks, read_boxes

from ..checksums import BlockSums, Key, Proof
from ..errors import FormatError, LoadError
from ..optional import torch
from ..pool import Progress
from ..tensors import copy_elements, empty_tensor
from ..windows import Window
from .fetch import stopped_error

if TYPE_CHECKING:
    from ..formats.base import Source
    from .read import Reader, ReadStats

__all__ = ["combined_chunks", "fill_combined"]

_STEP = 1 << 20  # elements that are converted at a time


def fill_combined(
    reader: Reader,
    stored: Reader,
    expression: Expression,
    items: ReadItems,
    dest: Callable[[int], Window],
    *,
    step: Sequence[int],
    verify: bool,
    sums: BlockSums | None,
    progress: Progress | None,
) -> ReadStats:
    """Fill tensors from a sum of checkpoints, given a reader of these; see `Reader.fill`.

    Chunks that are read whole are compared with their checksums. Those whose own blocks are not the
    blocks that are added up, as of a narrower dtype, are read again for that.
    """
    proof = Proof(stored.source)
    own = proof.sums if sums is None and verify else sums

    def work(task: _Task) -> tuple[ReadStats, Counter[Key]]:
        made, stats, came = _added_up(stored, expression, task, verify=verify, sums=own)
        picked = every(task.offsets, step)
        made = made[tuple(slice(one.first, None, one.step) for one in picked)]
        into = [one.into for one in picked]
        for mine, theirs in dest(task.row).pairs(into, made.shape, made):
            copy_elements(mine, theirs)
        if progress is not None:
            progress.add(made.numel() * itemsize(reader.dtype_of(task.name)))
        return stats, came

    try:
        done = reader.pool.map(work, list(_tasks(expression, items)), nbytes=_cost)
        if own is proof.sums:
            proof.begin(_read_whole(stored, [came for _, came in done]))
            proof.settle(reader.pool)
    except (FormatError, LoadError) as error:  # of memory that no state dict has
        touched = {items.names[number] for number in items.dest.tolist()}
        raise stopped_error(error, set(), touched) from error
    (first, *rest) = [stats for stats, _ in done]
    return sum(rest, first)


def _read_whole(stored: Reader, came: Iterable[Counter[Key]]) -> list[Key]:
    """Return the chunks of which all elements came, given how many of each came with each block."""
    total: Counter[Key] = Counter()
    for one in came:
        total.update(one)
    entries = stored.metadata.state_dict_metadata
    tensors = {
        name: entry for name, _ in total if isinstance(entry := entries[name], TensorMetadata)
    }
    volumes = {name: entry.chunks.sizes.prod(axis=1) for name, entry in tensors.items()}
    return [(name, chunk) for (name, chunk), n in total.items() if n >= volumes[name][chunk]]


def combined_chunks(
    source: Source, expression: Expression, name: str, number: int
) -> Iterator[tuple[str, int]]:
    """Yield the stored chunks that a chunk of a sum is made of, and maybe others.

    A tensor that is cut in another way there is given whole, with its first chunk.
    """
    mine = source.metadata.state_dict_metadata[name]
    assert isinstance(mine, TensorMetadata)
    for term in terms_of(expression, name):
        for part in {box.name for box in term_boxes(term, (0, 0), (1, 1), 1)}:
            entry = source.stored.metadata.state_dict_metadata[part]
            assert isinstance(entry, TensorMetadata)
            alike = isinstance(term, Weighted) and entry.chunks == mine.chunks
            if alike or number == 0:
                numbers = [number] if alike else range(len(entry.chunks))
                yield from ((part, one) for one in numbers)


@attrs.frozen
class _Task:
    """A block of what one read brings.

    Attributes:
        offsets: Where the block starts in the read's box.
        start: Where it starts in the tensor.
    """

    row: int
    name: str
    dtype: str  # what it is added up in
    offsets: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]


def _cost(task: _Task) -> int:
    return 2 * math.prod(task.sizes) * itemsize(task.dtype) + 8 * _STEP


def _tasks(expression: Expression, items: ReadItems) -> Iterator[_Task]:
    starts = (items.storage_anchor + items.storage_offsets).tolist()
    columns = (starts, items.lengths.tolist(), items.ndim.tolist(), items.storage.tolist())
    for row, (start, sizes, axes, number) in enumerate(zip(*columns, strict=True)):
        name = items.names[number]
        dtype, widest = sum_dtype(expression, name), _widest(expression, name)
        for at, extent in boxes_of(sizes[:axes], widest, BLOCK_BYTES):
            at, extent = tuple(at[:axes]), tuple(extent[:axes])
            origin = tuple(a + b for a, b in zip(start, at, strict=False))
            yield _Task(row, name, dtype, at, origin, extent)


def _widest(expression: Expression, name: str) -> str:
    """Return the widest dtype that a tensor has in any checkpoint: blocks are cut for that."""
    kinds = []
    for term in terms_of(expression, name):
        if isinstance(term, Weighted):
            entry = expression.metadata[term.source].state_dict_metadata[term.name]
            assert isinstance(entry, TensorMetadata)
            kinds.append(entry.properties.dtype)
    return max(kinds, key=itemsize)


def _added_up(
    stored: Reader, expression: Expression, task: _Task, *, verify: bool, sums: BlockSums | None
) -> tuple[torch.Tensor, ReadStats, Counter[Key]]:
    """Read the terms of a block one after the other, and add them up; count what came of chunks."""
    total = empty_tensor(task.sizes, task.dtype)
    stats: list[ReadStats] = []
    came: Counter[Key] = Counter()
    for number, term in enumerate(terms_of(expression, task.name)):
        boxes = term_boxes(term, task.start, task.sizes, _rank(expression, term))
        found = [empty_tensor(box.sizes, stored.dtype_of(box.name)) for box in boxes]
        reads, box = read_boxes(stored.metadata, boxes)
        stats.append(stored.fill_boxes(found, reads, box, verify=verify, sums=sums))
        chunks = find_chunks(stored.metadata, reads).tolist()
        for name, chunk, n in zip(
            reads.storage.tolist(), chunks, reads.numel.tolist(), strict=True
        ):
            came[reads.names[name], chunk] += n
        _add(total, found, term.weight, is_first=number == 0)
    (first, *rest) = stats
    return total, sum(rest, first), came


def _rank(expression: Expression, term: Term) -> int:
    if isinstance(term, Weighted):
        return 0
    entry = expression.metadata[term.source].state_dict_metadata[term.down]
    assert isinstance(entry, TensorMetadata)
    return entry.size[0]


def _add(
    total: torch.Tensor, found: Sequence[torch.Tensor], weight: float, *, is_first: bool
) -> None:
    """Add a term, a part at a time; the first one replaces what is there."""
    rows = len(total) if total.ndim else 1
    step = max(1, _STEP * rows // max(total.numel(), 1))
    for low in range(0, rows, step):
        some = slice(low, low + step) if total.ndim else ...
        part = found[0][some].to(total.dtype)
        if len(found) == 2:
            part = part @ found[1].to(total.dtype)
        if weight != 1.0:
            part = part * weight
        if is_first:
            total[some].copy_(part)
        else:
            total[some].add_(part)
