"""Read quantised tensors as elements times scales, a part of a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from shardplan.planning import Quantized, QuantizedPart, every, itemsize, quantized_parts
from shardplan.planning.columns import ReadItems
from shardplan.planning.storage import BLOCK_BYTES, Box, find_chunks, read_boxes

from ..checksums import BlockSums, Proof
from ..errors import FormatError, LoadError
from ..optional import torch
from ..pool import Progress
from ..tensors import box_view, copy_elements, empty_tensor, torch_dtype
from ..windows import Window
from .fetch import chunks_of, stopped_error

if TYPE_CHECKING:
    from .read import Reader, ReadStats

__all__ = ["dequantized_part", "fill_dequantized"]

PART: Final = 1 << 21  # elements that are made at a time
PART_BYTES: Final = 16 * PART  # memory that takes at most: elements, indices and scales


def fill_dequantized(
    reader: Reader,
    stored: Reader,
    items: ReadItems,
    dest: Callable[[int], Window],
    *,
    step: Sequence[int],
    verify: bool,
    sums: BlockSums | None,
    progress: Progress | None,
) -> ReadStats:
    """Fill tensors from a checkpoint, some quantised, given what it stores; see `Reader.fill`."""
    quantized = reader.source.quantized
    kinds = [quantized.get(items.names[number]) for number in items.storage.tolist()]
    wanted = _wanted(reader, stored, items, kinds, verify)
    proof = Proof(stored.source)
    proof.begin(wanted.whole)

    def work(task: _Part) -> ReadStats:
        parts = [task.part.values, task.part.scales]
        reads, box = read_boxes(stored.metadata, parts)
        found = [empty_tensor(one.sizes, stored.dtype_of(one.name)) for one in parts]
        stats = stored.fill_boxes(found, reads, box, verify=verify, sums=proof.sums)
        for small in task.small_parts():
            boxes = zip(found, parts, [small.values, small.scales], strict=True)
            cut = [_box_within(tensor, whole, one) for tensor, whole, one in boxes]
            made = dequantized_part(task.kind, small, *cut).to(torch_dtype(task.dtype))
            picked = every(small.offsets, step)
            made = made[tuple(slice(one.first, None, one.step) for one in picked)]
            into = [one.into for one in picked]
            for mine, theirs in dest(task.row).pairs(into, made.shape, made):
                copy_elements(mine, theirs)
            if progress is not None:
                progress.add(made.numel() * itemsize(task.dtype))
        return stats

    rows = np.flatnonzero([kind is None for kind in kinds])
    options: dict[str, Any] = {"verify": verify, "sums": sums, "progress": progress}
    first = stored.fill(items.take(rows), lambda n: dest(int(rows[n])), step=step, **options)
    tasks = _parts(reader, items, kinds, wanted.rows, stored.source.block_bytes)
    try:
        done = reader.pool.map(work, tasks, nbytes=lambda task: task.cost)
        again = proof.sums.incomplete(wanted.whole)
        proof.settle(reader.pool)
    except (FormatError, LoadError) as error:  # of memory that no state dict has
        touched = {items.names[number] for number in items.dest.tolist()}
        raise stopped_error(error, set(), touched) from error
    if sums is not None:
        sums.take(proof.sums)
    matched = proof.sums.matched
    unverified = sum(size for key, size in wanted.nbytes.items() if key not in matched)
    took = sum(done, first)
    return attrs.evolve(
        took,
        bytes_read=took.bytes_read + sum(wanted.whole[key] for key in again),
        requests=took.requests + len(again),
        verified=first.verified + len(matched),
        unverified=first.unverified + unverified,
    )


@attrs.frozen
class _Wanted:
    """What has to be read for the quantised tensors of a load."""

    # Bytes that are wanted of each chunk as it is stored.
    nbytes: Mapping[tuple[str, int], int] = attrs.field(factory=dict)
    # The bytes of each chunk that has a checksum, where what is read of it adds up to as many. If
    # reads overlap, some of it may not be wanted: it is compared all the same.
    whole: Mapping[tuple[str, int], int] = attrs.field(factory=dict)
    rows: Collection[int] = ()  # the reads that want anything of these


def _wanted(
    reader: Reader,
    stored: Reader,
    items: ReadItems,
    kinds: Sequence[Quantized | None],
    verify: bool,
) -> _Wanted:
    each = list(_parts(reader, items, kinds))
    if not each:
        return _Wanted()
    boxes = [box for one in each for box in (one.part.values, one.part.scales)]
    reads, box = read_boxes(stored.metadata, boxes)
    chunks = chunks_of(stored.source, reads, find_chunks(stored.metadata, reads), verify)
    nbytes = np.bincount(chunks.of_read, reads.numel * chunks.places.itemsize[chunks.of_read])
    sizes = np.array([spot.nbytes for spot in chunks.spots])
    whole = chunks.places.summed & (nbytes >= sizes)
    return _Wanted(
        {key: int(size) for key, size in zip(chunks.names, nbytes.tolist(), strict=True)},
        {chunks.names[number]: int(sizes[number]) for number in np.flatnonzero(whole).tolist()},
        {each[number // 2].row for number in box[whole[chunks.of_read]].tolist()},
    )


@attrs.frozen
class _Part:
    """A part of what one read brings of a quantised tensor, and the dtype that it becomes."""

    row: int
    kind: Quantized
    part: QuantizedPart
    dtype: str

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes at most."""
        if self.part.numel <= PART:
            return PART_BYTES
        scales, values = math.prod(self.part.scales.sizes), math.prod(self.part.values.sizes)
        return PART_BYTES + 4 * scales + values

    def small_parts(self) -> Iterator[QuantizedPart]:
        """Yield the parts of it that are made at a time."""
        for one in quantized_parts(self.kind, self.part.start, self.part.sizes, PART):
            at = zip(self.part.offsets, one.offsets, strict=True)
            yield attrs.evolve(one, offsets=tuple(a + b for a, b in at))


def _parts(
    reader: Reader,
    items: ReadItems,
    kinds: Sequence[Quantized | None],
    checked: Collection[int] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[_Part]:
    """Yield the parts in which quantised tensors are read: one a row, if none is ``checked``.

    For rows that are checked, these are the blocks that have checksums.
    """
    starts = (items.storage_anchor + items.storage_offsets).tolist()
    columns = (starts, items.lengths.tolist(), items.ndim.tolist(), items.storage.tolist())
    for row, (start, sizes, axes, number) in enumerate(zip(*columns, strict=True)):
        kind, name = kinds[row], items.names[number]
        if kind is None:
            continue
        numel = math.prod(sizes[:axes])
        if checked is not None:
            packed = 2 if kind.kind == "mxfp4" else 1
            numel = max(PART, block_bytes * packed) if row in checked else PART
        for part in quantized_parts(kind, start[:axes], sizes[:axes], numel):
            yield _Part(row, kind, part, reader.dtype_of(name))


def _box_within(tensor: torch.Tensor, whole: Box, one: Box) -> torch.Tensor:
    """Return one box of a tensor that is another box."""
    at = [o - w for o, w in zip(one.offsets, whole.offsets, strict=True)]
    return box_view(tensor, at, one.sizes).contiguous()


_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA: Final = 23  # bits of a 32-bit float before its exponent, which has the same bias
_LEAST: Final = 1 << 22  # the bits of 2 ** -127, which has no exponent of its own


def dequantized_part(
    one: Quantized, part: QuantizedPart, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return a part of a tensor as 32-bit floats, given what was read for it.

    >>> from shardplan.planning import quantized_parts
    >>> one = Quantized("fp8", "w", "w_scale_inv", (2, 4), (2, 2))
    >>> (part,) = quantized_parts(one, (0, 1), (2, 3), 100)
    >>> dequantized_part(one, part, torch.ones(2, 3), torch.tensor([[3.0, 5.0]]))
    tensor([[3., 5., 5.],
            [3., 5., 5.]])
    """
    if one.kind == "fp8":
        return _scaled(values, scales, part.start, one.block)
    pairs = _unpacked(values).mul_(_powers(scales)[..., None])
    skipped = part.start[1] % one.block[1]
    return pairs.flatten(-2).narrow(-1, skipped, part.sizes[1]).transpose(-1, -2)


def _scaled(
    values: torch.Tensor, scales: torch.Tensor, start: Sequence[int], block: Sequence[int]
) -> torch.Tensor:
    scales = scales.float()
    for axis in reversed(range(values.ndim)):
        place = torch.arange(start[axis], start[axis] + values.shape[axis])
        scales = scales.index_select(axis, place // block[axis] - start[axis] // block[axis])
    return values.float().mul_(scales)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two, exactly, given exponents that count from -127.

    >>> _powers(torch.tensor([127, 128, 126], dtype=torch.uint8))
    tensor([1.0000, 2.0000, 0.5000])
    """
    bits = exponents.int() << _MANTISSA
    return bits.masked_fill_(bits == 0, _LEAST).view(torch.float32)


def _unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Return the numbers that bytes hold two of each, the one in the lower bits first."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    out = torch.empty(*pairs.shape[:-1], 2 * pairs.shape[-1])
    out[..., 0::2] = table[(pairs & 15).int()]
    out[..., 1::2] = table[(pairs >> 4).int()]
    return out
