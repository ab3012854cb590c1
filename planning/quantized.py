"""Block-quantised tensors, small numbers with a scale per block, and how they are read.

Two kinds are known by their names and dtypes:

- *fp8*, as in DeepSeek-V3: ``w`` holds 8-bit floats, and ``w_scale_inv`` a factor for each block
  of 128 × 128 elements of the last two axes.
- *mxfp4*, as in gpt-oss: ``w_blocks`` holds two 4-bit floats in a byte, and ``w_scales`` an
  exponent for each 32 of them. The tensor ``w`` has its last two axes swapped, as models hold it.

`dequantized` describes the tensors that come of them, and `quantized_parts` what is read for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain as joined
from typing import Final, Literal

import attrs

from .errors import RefusedError
from .geometry.tilings import Chunk, tile_chunks
from .metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from .storage.blocks import boxes_of
from .storage.copy import Box

BLOCK: Final = (128, 128)
"""The elements of the last two axes that share a scale, where a checkpoint does not say."""
_FP8: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_GROUP: Final = 32  # elements that share an exponent
_PACKED: Final = 2  # elements of a byte


@attrs.frozen
class Quantized:
    """How a tensor is stored."""

    kind: Literal["fp8", "mxfp4"]  # which kind it is; see above
    values: str  # the name of the tensor with its elements
    scales: str  # the name of the tensor with the scales
    size: tuple[int, ...]  # the shape of what comes of them
    block: tuple[int, ...]  # how many elements share a scale, along each axis of `size`


def find_quantized(metadata: Metadata, block: Sequence[int] = BLOCK) -> dict[str, Quantized]:
    """Find the tensors that are stored quantised, by the names that they have once they are not.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> sd = {"w": TensorSpec((256, 200), "float8_e4m3fn"), "w_scale_inv": TensorSpec((2, 2))}
    >>> find_quantized(metadata_of(sd))["w"].block
    (128, 128)

    Raises:
        RefusedError: The shapes of some tensors and their scales do not fit; it names all of them.
    """
    entries, found, wrong = metadata.state_dict_metadata, dict[str, Quantized](), list[str]()
    for values, entry in entries.items():
        if not isinstance(entry, TensorMetadata):
            continue
        one, dtype = None, entry.properties.dtype
        if dtype in _FP8:
            one = _fp8(values, entry.size, block)
        elif dtype == "uint8" and values.endswith("_blocks"):
            one = _mxfp4(values, entry.size)
        scale = None if one is None else entries.get(one.scales)
        if one is None or not isinstance(scale, TensorMetadata):
            continue
        name = values if one.kind == "fp8" else values.removesuffix("_blocks")
        expected = _scales_size(one)
        if scale.size != expected or (name != values and name in entries):
            wrong.append(
                f"`{one.scales}` has shape {list(scale.size)}, and scales for blocks of "
                f"{list(one.block)} elements of `{values}` have {list(expected)}; if blocks are of "
                "another size, say so: dequantize(block=(64, 64))"
            )
        found[name] = one
    if wrong:
        raise RefusedError(*wrong)
    return found


def _fp8(values: str, size: tuple[int, ...], block: Sequence[int]) -> Quantized | None:
    if len(size) < len(block):
        return None
    reach = (1,) * (len(size) - len(block)) + tuple(block)
    return Quantized("fp8", values, f"{values}_scale_inv", size, reach)


def _mxfp4(values: str, stored: tuple[int, ...]) -> Quantized | None:
    if len(stored) != 4 or stored[3] * _PACKED != _GROUP:
        return None
    experts, rows, groups, _ = stored
    scales = f"{values.removesuffix('_blocks')}_scales"
    return Quantized("mxfp4", values, scales, (experts, groups * _GROUP, rows), (1, _GROUP, 1))


def _scales_size(one: Quantized) -> tuple[int, ...]:
    sizes = tuple(-(-n // b) for n, b in zip(one.size, one.block, strict=True))
    return sizes if one.kind == "fp8" else _swapped(sizes)


def _swapped(numbers: Sequence[int]) -> tuple[int, ...]:
    """Swap the last two of some numbers."""
    return (*numbers[:-2], numbers[-1], numbers[-2])


def dequantized(metadata: Metadata, found: Mapping[str, Quantized], dtype: str) -> Metadata:
    """Describe a checkpoint as if its quantised tensors were stored in a dtype, without scales.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> sd = {"w": TensorSpec((256, 200), "float8_e4m3fn"), "w_scale_inv": TensorSpec((2, 2))}
    >>> metadata = metadata_of(sd)
    >>> dequantized(metadata, find_quantized(metadata), "bfloat16")
    Metadata: 1 entry, 100.0 KiB
    name  dtype     shape       chunks
    w     bfloat16  [256, 200]  Grid(0:256, 0:200)
    """
    entries = metadata.state_dict_metadata
    gone = set(joined.from_iterable((one.values, one.scales) for one in found.values()))
    kept: dict[str, TensorMetadata | BytesMetadata] = {
        name: entry for name, entry in entries.items() if name not in gone
    }
    for name, one in found.items():
        entry = entries[one.values]
        assert isinstance(entry, TensorMetadata)
        whole = tile_chunks([Chunk((0,) * len(one.size), one.size)])
        chunks = entry.chunks if one.kind == "fp8" else whole
        properties = attrs.evolve(entry.properties, dtype=dtype)
        kept[name] = TensorMetadata(properties, one.size, chunks)
    return attrs.evolve(metadata, state_dict_metadata=Entries.of(dict(sorted(kept.items()))))


@attrs.frozen
class Picked:
    """Every so many-th index along one axis of a part: the first, the step, and where it goes."""

    first: int
    step: int
    into: int


def every(offsets: Sequence[int], step: Sequence[int]) -> tuple[Picked, ...]:
    """Return which elements of a part of a box are wanted, if every so many-th of the box's is.

    Of every third of ten, the part from 4 to 8 has one, at 6, which is the third one:

    >>> every((4,), (3,))
    (Picked(first=2, step=3, into=2),)
    """
    steps = (*step, *(1 for _ in offsets))
    pairs = zip(offsets, steps, strict=False)
    return tuple(Picked(-at % one, one, -(-at // one)) for at, one in pairs)


@attrs.frozen
class QuantizedPart:
    """A part of a box of a tensor, and what is read for it."""

    offsets: tuple[int, ...]  # where it starts, relative to the box, in elements
    sizes: tuple[int, ...]  # how large it is
    start: tuple[int, ...]  # where it starts in the tensor
    values: Box  # the boxes of the stored tensors
    scales: Box

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def quantized_parts(
    one: Quantized, offsets: Sequence[int], sizes: Sequence[int], numel: int
) -> Iterator[QuantizedPart]:
    """Cut a box into parts of at most ``numel`` elements, in the order in which these are stored.

    Of 3 experts of 4 rows in 2 groups, the first 40 elements of the last 2 rows of the last expert:

    >>> one = Quantized("mxfp4", "w_blocks", "w_scales", (3, 64, 4), (1, 32, 1))
    >>> (part,) = quantized_parts(one, (2, 0, 2), (1, 40, 2), 1000)
    >>> part.values.offsets, part.values.sizes, part.scales.sizes
    ((2, 2, 0, 0), (1, 2, 2, 16), (1, 2, 2))
    """
    swap = one.kind == "mxfp4"
    shape = _swapped(sizes) if swap else tuple(sizes)
    for at, size in boxes_of(shape, "uint8", numel):
        at, size = (_swapped(at), _swapped(size)) if swap else (tuple(at), tuple(size))
        start = tuple(o + a for o, a in zip(offsets, at, strict=True))
        low = tuple(o // b for o, b in zip(start, one.block, strict=True))
        ends = (-(-(o + n) // b) for o, n, b in zip(start, size, one.block, strict=True))
        count = tuple(high - first for first, high in zip(low, ends, strict=True))
        if swap:
            low, count = _swapped(low), _swapped(count)
            values = Box(one.values, (*low, 0), (*count, _GROUP // _PACKED))
        else:
            values = Box(one.values, start, size)
        yield QuantizedPart(at, size, start, values, Box(one.scales, low, count))
