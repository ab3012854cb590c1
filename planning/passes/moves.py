"""What becomes of a tensor of some shape: its boxes go to boxes of other tensors.

A move has nothing to do with names or with how the tensor is sharded. Equal moves are one value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import attrs

from ..columns.items import Head
from ..geometry.axes import Cut, canonical, permuted, reshaped

Sizes = tuple[int, ...]


class MovedBox(NamedTuple):
    """A box of a tensor, and where it goes."""

    cut: Cut  # from the tensor's frame to that of the tensor that it goes to
    target: int  # the number of that tensor; -1 if the box is left out


class Padding(NamedTuple):
    """Elements that are added at the end of an axis."""

    axis: int
    low: int  # the length of the axis before
    high: int  # its length after
    value: float


@attrs.frozen(cache_hash=True)
class Move:
    """What becomes of the elements of a tensor, whatever its name."""

    sizes: tuple[Sizes, ...]  # the shapes of the tensors that they go to
    pieces: tuple[MovedBox, ...]  # boxes that together are the tensor
    # What is added; then there is one piece, which stays where it is.
    padding: Padding | None = None


class Moved(NamedTuple):
    """What becomes of one row of a catalog, and the names that it gets."""

    move: Move
    names: tuple[str, ...]
    shift: Sizes = ()  # how much further its elements go, if that differs between tensors

    def heads(self, head: Head) -> list[Head]:
        """Return the rows of the tensors that the elements go to."""
        pairs = zip(self.names, self.move.sizes, strict=True)
        return [head._replace(name=name, size=size) for name, size in pairs]


@lru_cache(maxsize=1 << 10)
def split_move(size: Sizes, axis: int, lengths: Sizes) -> Move:
    """Cut a tensor into several along an axis."""
    pieces, low = [], 0
    for target, length in enumerate(lengths):
        pieces.append(MovedBox(_slab(size, axis, low, length), target))
        low += length
    return Move(tuple(with_length(size, axis, length) for length in lengths), tuple(pieces))


@lru_cache(maxsize=1 << 10)
def trim_move(size: Sizes, axis: int, to: int) -> Move:
    """Leave out the end of an axis."""
    kept = MovedBox(_slab(size, axis, 0, to), 0)
    if to == size[axis]:
        return Move((size,), (kept,))
    rest = MovedBox(_slab(size, axis, to, size[axis] - to), -1)
    return Move((with_length(size, axis, to),), (kept, rest))


@lru_cache(maxsize=1 << 10)
def concat_move(size: Sizes, axis: int, total: int) -> Move:
    """Make a tensor the first part of a longer one."""
    return Move((with_length(size, axis, total),), (MovedBox(_slab(size, axis, 0, size[axis]), 0),))


def _slab(size: Sizes, axis: int, low: int, length: int) -> Cut:
    """Return the move of a slab of a tensor to the start of another."""
    sizes, zero = with_length(size, axis, length), (0,) * len(size)
    return Cut(with_length(zero, axis, low), sizes, None, zero, sizes)


@lru_cache(maxsize=1 << 10)
def stack_move(size: Sizes, axis: int, count: int) -> Move:
    """Make a tensor the first of several along a new axis."""
    one = (*size[:axis], 1, *size[axis:])
    axes = canonical(size, range(len(size)), size, one)
    piece = MovedBox(Cut((0,) * len(size), size, axes, (0,) * len(one), one), 0)
    return Move((with_length(one, axis, count),), (piece,))


@lru_cache(maxsize=1 << 10)
def unstack_move(size: Sizes, axis: int) -> Move:
    """Cut a tensor into one for each position along an axis, without that axis."""
    rest, sizes = (*size[:axis], *size[axis + 1 :]), with_length(size, axis, 1)
    axes = canonical(sizes, range(len(size)), sizes, rest)
    zero = (0,) * len(size)
    pieces = (
        MovedBox(Cut(with_length(zero, axis, number), sizes, axes, zero[1:], rest), number)
        for number in range(size[axis])
    )
    return Move((rest,) * size[axis], tuple(pieces))


@lru_cache(maxsize=1 << 10)
def permute_move(size: Sizes, order: Sizes) -> Move:
    """Put the axes into another order."""
    after = tuple(size[axis] for axis in order)
    zero = (0,) * len(size)
    cut = Cut(zero, size, permuted(None, size, size, order), zero, after)
    return Move((after,), (MovedBox(cut, 0),))


@lru_cache(maxsize=1 << 10)
def reshape_move(size: Sizes, after: Sizes) -> Move:
    """Merge and part axes."""
    return Move((after,), tuple(MovedBox(cut, 0) for cut in reshaped(size, after)))


@lru_cache(maxsize=1 << 10)
def pad_move(size: Sizes, axis: int, to: int, value: float) -> Move:
    """Lengthen an axis."""
    zero = (0,) * len(size)
    padding = Padding(axis, size[axis], to, value) if to > size[axis] else None
    return Move(
        (with_length(size, axis, to),), (MovedBox(Cut(zero, size, None, zero, size), 0),), padding
    )


def with_length(sizes: Sizes, axis: int, value: int) -> Sizes:
    """Return sizes with another value for one axis."""
    return (*sizes[:axis], value, *sizes[axis + 1 :])
