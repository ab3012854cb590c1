"""Fingerprints of tensors that do not depend on how the tensors are cut.

1. A tensor's rows are its trailing axes, merged until they have enough bytes. Which axes these are
   follows from its shape alone.
2. A row is words of 8 bytes. Each word is multiplied by a number that depends on its place; the sum
   modulo 2^64 is one half of the fingerprint. The upper halves of the words make the other half,
   with other numbers: there, a change of sign in two places does not cancel out.
3. Sums of any boxes that make up the tensor add up to those of the whole, since bytes that a box
   does not have count as zero.

They are quick, and find any change that is not made on purpose; they are not cryptography.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from .buffers import Bytes

__all__ = ["PlaceSums", "fingerprint_of", "place_sums"]

Words = npt.NDArray[np.uint64]

_WORD: Final = 8  # bytes
_SEGMENT: Final = 512  # words that share a table of numbers
_ROW_BYTES: Final = _WORD * _SEGMENT
_CHUNK: Final = 1 << 17  # words that stay in the cache of a processor
_MASK: Final = (1 << 64) - 1


def _mixed(numbers: Words) -> Words:
    """Return numbers without visible pattern; each comes of one number only (splitmix64)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_ODD: Final = np.uint64(1)  # an odd factor loses no bit
_TABLES: Final = (
    _mixed(np.arange(1, _SEGMENT + 1, dtype=np.uint64)) | _ODD,
    _mixed(np.arange(1 << 20, (1 << 20) + _SEGMENT, dtype=np.uint64)) | _ODD,
)
_ROW, _COLUMN = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_SEEDS: Final = (np.uint64(0x2545F4914F6CDD1D), np.uint64(0x8CB92BA72F3D8DD7))


@attrs.frozen
class PlaceSums:
    """What a box adds to the fingerprint of its tensor.

    >>> PlaceSums(1, 2) + PlaceSums(3, (1 << 64) - 1)
    PlaceSums(words=4, halves=1)
    """

    words: int = 0
    halves: int = 0

    def __add__(self, other: PlaceSums) -> PlaceSums:
        return PlaceSums((self.words + other.words) & _MASK, (self.halves + other.halves) & _MASK)


def fingerprint_of(name: str, dtype: str, shape: Sequence[int], sums: PlaceSums) -> str:
    """Return a tensor's fingerprint of 32 hex digits, given the sums of all its boxes.

    >>> fingerprint_of("w", "int8", (2,), PlaceSums()) == fingerprint_of(
    ...     "v", "int8", (2,), PlaceSums()
    ... )
    False
    """
    data = json.dumps([name, dtype, list(shape), sums.words, sums.halves]).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def place_sums(
    data: Bytes, itemsize: int, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> PlaceSums:
    """Return what a box adds to the fingerprint of its tensor.

    Args:
        data: The bytes of the box, row-major.
        itemsize: Bytes of one element.
        shape: The shape of the whole tensor.
        offsets: Where the box starts.
        sizes: Its sizes.

    >>> whole = np.arange(12, dtype=np.uint8)
    >>> left, right = np.split(whole.reshape(3, 4), [3], axis=1)
    >>> parts = [(left, (0, 0), (3, 3)), (right, (0, 3), (3, 1))]
    >>> sums = [place_sums(np.ravel(d), 1, (3, 4), at, size) for d, at, size in parts]
    >>> sums[0] + sums[1] == place_sums(whole, 1, (3, 4), (0, 0), (3, 4))
    True
    """
    if not data.size:
        return PlaceSums()
    first, last = _row_axis(shape, itemsize), len(shape) - 1
    while last > first and sizes[last] == shape[last]:
        last -= 1  # runs are as long as the box has whole axes
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    run = sizes[last] * strides[last] if shape else itemsize
    rows = _row_numbers(shape[:first], offsets[:first], sizes[:first])
    inner = tuple(sizes[first:last])
    view = data.reshape(len(rows), *inner, run)
    total = PlaceSums()
    for place in np.ndindex(*inner):
        at = [o + i for o, i in zip(offsets[first:last], place, strict=True)]
        begin = sum(a * s for a, s in zip(at, strides[first:last], strict=True))
        begin += offsets[last] * strides[last] if shape else 0
        total += _sums_of_runs(view[(slice(None), *place)], rows, begin)
    return total


def _row_axis(shape: Sequence[int], itemsize: int) -> int:
    """Return the first axis of those that make up a row."""
    for axis in reversed(range(len(shape))):
        nbytes = itemsize * math.prod(shape[axis:])
        if nbytes >= _ROW_BYTES and nbytes % _WORD == 0:
            return axis
    return 0


def _row_numbers(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Words:
    """Return the number of each row of a box, in the whole tensor."""
    rows = np.zeros(1, np.int64)
    for length, start, size in zip(shape, offsets, sizes, strict=True):
        rows = (rows[:, None] * length + np.arange(start, start + size)).ravel()
    return rows.astype(np.uint64)


def _sums_of_runs(runs: npt.NDArray[np.uint8], rows: Words, begin: int) -> PlaceSums:
    """Return the sums of one run of bytes in each of some rows, all beginning at one byte."""
    count, nbytes = runs.shape
    before, after = begin % _WORD, -(begin + nbytes) % _WORD
    plain = not (before or after or runs.ctypes.data % _WORD or runs.strides[0] % _WORD)
    total, step = PlaceSums(), count if plain else max(_CHUNK * _WORD // nbytes, 1)
    for low in range(0, count, step):
        some = runs[low : low + step]
        if not plain:
            padded = np.zeros((len(some), before + nbytes + after), np.uint8)
            padded[:, before : before + nbytes] = some
            some = padded
        for words, segment, place in _segments(some.view(np.uint64), begin // _WORD):
            total += _sums_of_words(words, rows[low : low + step], segment, place)
    return total


def _segments(words: Words, begin: int) -> Iterator[tuple[Words, int, int]]:
    """Cut runs of words at the borders of segments; a run is at ``begin`` of its row.

    Yield runs of one or more segments, with the number of the first, and where they begin in it.
    """
    count, length = words.shape
    head = min(-begin % _SEGMENT, length)
    whole = (length - head) // _SEGMENT * _SEGMENT
    for low, high in ((0, head), (head, head + whole), (head + whole, length)):
        if low < high:
            width = _SEGMENT if (low, high) == (head, head + whole) else high - low
            at = begin + low
            yield words[:, low:high].reshape(count, -1, width), at // _SEGMENT, at % _SEGMENT


def _sums_of_words(words: Words, rows: Words, segment: int, place: int) -> PlaceSums:
    """Return the sums of words, by row and segment, given the number of the first segment."""
    count, segments, width = words.shape
    tables = [table[place : place + width] for table in _TABLES]
    numbers = np.arange(segment, segment + segments, dtype=np.uint64)
    across = min(max(_CHUNK // width, 1), segments)
    down = max(_CHUNK // (width * across), 1)
    scratch, sums = np.empty((down, across, width), np.uint64), [0, 0]
    for low in range(0, count, down):
        for left in range(0, segments, across):
            some = words[low : low + down, left : left + across]
            across_numbers = numbers[left : left + across] * _COLUMN
            where: Words = rows[low : low + down, None] * _ROW + across_numbers
            upper = scratch[: some.shape[0], : some.shape[1]]
            np.right_shift(some, np.uint64(32), out=upper)
            for lane, part in enumerate((some, upper)):
                factors = _mixed(where + _SEEDS[lane]) | _ODD
                found = np.einsum("rsj,j->rs", part, tables[lane]) * factors
                sums[lane] += int(found.sum())
    return PlaceSums(sums[0] & _MASK, sums[1] & _MASK)
