"""The arithmetic of quantised tensors: elements times scales, a part of a tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardplan.planning import Quantized, QuantizedPart

from ..optional import torch

__all__ = ["PART", "PART_BYTES", "dequantized_part"]

PART: Final = 1 << 21
"""How many elements are made at a time."""
PART_BYTES: Final = 16 * PART
"""Bytes of memory that takes at most: elements, indices and scales."""

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
