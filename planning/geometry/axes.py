"""How the axes of one box are those of another: permuted, merged, parted.

A shape pass changes which axes a tensor has in the checkpoint. Then a box of the state dict's
tensor (the *source box*) becomes a box of the checkpoint's tensor (the *chunk*), with the same
elements in another arrangement. `Axes` describes the arrangement; the functions here cut, permute
and compose such pairs of boxes. The method:

1. Refine the parts of `Axes` into *digits*, such that each axis of either box is a product of
   neighbouring digits. An element is then a row of digits, which the two boxes order differently.
2. A box, as a range per digit, is a box again on a side where, in each axis, the digits before the
   last partial one are single values. Enumerate the values of digits that violate this.
3. Where two arrangements have no common digits, cut the boxes between them into slabs that have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Final, NamedTuple

import attrs

from .tilings import as_ints

MAX_CUTS: Final = 1 << 16
"""The most boxes that one box is cut into."""

Sizes = tuple[int, ...]


@attrs.frozen
class Axes:
    """How the axes of a source box are those of a chunk.

    The chunk is ``source_box.reshape(split).transpose(order).reshape(chunk.sizes)``, in the words
    of numpy. In place of an `Axes`, None means: the same sizes, in the same order.

    Attributes:
        split: The sizes of the parts into which the source box is cut, row-major.
        order: The order of these parts in the chunk.

    >>> Axes([2, 3], [1, 0]).ordered
    (3, 2)
    """

    split: Sizes = attrs.field(converter=as_ints)
    order: Sizes = attrs.field(converter=as_ints)

    def __attrs_post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.split))):
            raise ValueError(f"{self.order} is not an order of {len(self.split)} parts")
        if any(n < 0 for n in self.split):
            raise ValueError(f"parts of sizes {self.split}: one is negative")

    @property
    def ordered(self) -> Sizes:
        """The sizes of the parts as they lie in the chunk."""
        return tuple(self.split[part] for part in self.order)


class Cut(NamedTuple):
    """A box of the source that becomes a box of the checkpoint."""

    box_offsets: Sizes  # its start in the source
    box_sizes: Sizes
    axes: Axes | None  # how the axes of one are those of the other
    chunk_offsets: Sizes  # its start in the checkpoint
    chunk_sizes: Sizes


def canonical(
    split: Sequence[int], order: Sequence[int], box_sizes: Sizes, chunk_sizes: Sizes
) -> Axes | None:
    """Return the one value that stands for an arrangement; None if it is trivial.

    Parts of size 1 are left out, and parts that stay neighbours are merged.

    >>> canonical((2, 3, 4), (2, 0, 1), (6, 4), (4, 2, 3))
    Axes(split=(6, 4), order=(1, 0))
    >>> canonical((6, 4), (0, 1), (6, 4), (24,))
    Axes(split=(24,), order=(0,))
    >>> canonical((6, 4), (0, 1), (6, 4), (6, 4)) is None
    True
    """
    numel = math.prod(split)
    if not numel == math.prod(box_sizes) == math.prod(chunk_sizes):
        raise ValueError(f"parts of sizes {split} do not fit boxes of {box_sizes}, {chunk_sizes}")
    if numel == 0:
        return None if box_sizes == chunk_sizes else Axes((0,), (0,))
    runs: list[list[int]] = []  # parts that are neighbours in the source and in the checkpoint
    kept = [part for part in range(len(split)) if split[part] != 1]
    after = dict(pairwise(kept))
    for part in order:
        if split[part] == 1:
            continue
        if runs and after.get(runs[-1][-1]) == part:
            runs[-1].append(part)
        else:
            runs.append([part])
    ranked = sorted(range(len(runs)), key=lambda run: runs[run][0])
    if len(runs) <= 1 and box_sizes == chunk_sizes:
        return None
    sizes = [math.prod(split[part] for part in runs[run]) for run in ranked]
    place = {run: at for at, run in enumerate(ranked)}
    return Axes(sizes, [place[run] for run in range(len(runs))])


def inverted(axes: Axes | None) -> Axes | None:
    """Return the arrangement from the checkpoint to the source.

    >>> inverted(Axes((2, 3, 4), (2, 0, 1)))
    Axes(split=(4, 2, 3), order=(1, 2, 0))
    """
    if axes is None:
        return None
    return Axes(axes.ordered, sorted(range(len(axes.order)), key=axes.order.__getitem__))


def parts(axes: Axes | None, box_sizes: Sizes, chunk_sizes: Sizes) -> Axes:
    """Return an arrangement in parts that cross no axis of either box, or raise ValueError.

    So ``source_box.reshape(split).transpose(order)`` and ``chunk.reshape(ordered)`` are views of
    their memory, however it is strided, with the same shape and the same elements.

    >>> parts(Axes((24,), (0,)), (6, 4), (2, 12))
    Axes(split=(2, 3, 4), order=(0, 1, 2))
    """
    if 0 in box_sizes:
        return Axes((0,), (0,))
    digits = digits_of(axes, box_sizes, chunk_sizes)
    return Axes(digits.sizes, digits.order)


@lru_cache(maxsize=1 << 14)
def cut(
    axes: Axes | None, box_sizes: Sizes, chunk_sizes: Sizes, offsets: Sizes, sizes: Sizes
) -> tuple[Cut, ...]:
    """Cut the part inside a sub-box of the chunk into boxes of both sides.

    The sub-box and the results are relative to the chunk and to the source box; together the
    results hold each element of the sub-box once. Raise ValueError if there would be more than
    `MAX_CUTS` boxes, or the two have no common parts (see `parts`).

    >>> for piece in cut(Axes((24,), (0,)), (6, 4), (24,), (2,), (9,)):
    ...     print(piece.box_offsets, piece.box_sizes, piece.chunk_offsets, piece.chunk_sizes)
    (0, 2) (1, 2) (2,) (2,)
    (1, 0) (1, 4) (4,) (4,)
    (2, 0) (1, 3) (8,) (3,)
    """
    if axes is None:
        return (Cut(offsets, sizes, None, offsets, sizes),)
    if sizes == chunk_sizes:
        return (Cut((0,) * len(box_sizes), box_sizes, axes, offsets, sizes),)
    if 0 in sizes:
        return ()
    return tuple(_cuts(digits_of(axes, box_sizes, chunk_sizes), offsets, sizes))


def cut_source(
    axes: Axes | None, box_sizes: Sizes, chunk_sizes: Sizes, offsets: Sizes, sizes: Sizes
) -> tuple[Cut, ...]:
    """Cut the part inside a sub-box of the source box into boxes of both sides; see `cut`.

    >>> cut_source(Axes((2, 3), (1, 0)), (2, 3), (3, 2), (1, 1), (1, 2))[0].chunk_offsets
    (1, 1)
    """
    found = cut(inverted(axes), chunk_sizes, box_sizes, offsets, sizes)
    return tuple(Cut(c[3], c[4], inverted(c.axes), c[0], c[1]) for c in found)


def permuted(
    axes: Axes | None, box_sizes: Sizes, chunk_sizes: Sizes, order: Sequence[int]
) -> Axes | None:
    """Return the arrangement after the axes of the chunk are put into another order.

    >>> permuted(None, (2, 3), (2, 3), (1, 0))
    Axes(split=(2, 3), order=(1, 0))
    """
    after = tuple(chunk_sizes[axis] for axis in order)
    if 0 in box_sizes:
        return canonical((0,), (0,), box_sizes, after)
    digits = digits_of(axes, box_sizes, chunk_sizes)
    placed = [digit for axis in order for digit in digits.chunk[axis]]
    return canonical(digits.sizes, placed, box_sizes, after)


def reshaped(before: Sizes, after: Sizes) -> tuple[Cut, ...]:
    """Cut a tensor into boxes that stay boxes when it is reshaped.

    Merging and parting axes needs no cut. There may be at most `MAX_CUTS` boxes.

    >>> len(reshaped((32, 128, 64), (4096, 64))), len(reshaped((5, 6, 4), (5, 4, 6)))
    (1, 8)
    """
    numel = (math.prod(before),)
    into = Cut((0,) * len(before), before, canonical(numel, (0,), before, numel), (0,), numel)
    out = Cut((0,), numel, canonical(numel, (0,), numel, after), (0,) * len(after), after)
    if before == after or not numel[0]:
        axes = canonical(numel, (0,), before, after)
        return (Cut(into.box_offsets, before, axes, out.chunk_offsets, after),)
    return _limited(_fused(into, out))


def composed(first: Cut, second: Cut) -> tuple[Cut, ...]:
    """Compose two arrangements where the chunk of the first overlaps the source box of the second.

    The second is a box in the frame of the first's chunk, and what becomes of it. The results, at
    most `MAX_CUTS`, are boxes of the first's source and what becomes of them, in the frames of the
    arguments.

    >>> transposed = Cut((0, 0), (2, 3), Axes((2, 3), (1, 0)), (0, 0), (3, 2))
    >>> composed(transposed, Cut((1, 0), (2, 2), None, (0, 0), (2, 2)))[0][:2]
    ((0, 1), (2, 2))
    """
    return _limited(_joined(first, second))


def _limited(cuts: Iterator[Cut]) -> tuple[Cut, ...]:
    found = []
    for one in cuts:
        found.append(one)
        if len(found) > MAX_CUTS:
            raise ValueError(_too_many(len(found)))
    return tuple(found)


def _too_many(count: int) -> str:
    return f"one box would be cut into {count:,} or more, and the most is {MAX_CUTS:,}"


class Digits(NamedTuple):
    """Parts that cross no axis; each is given by its number in the source box, row-major."""

    sizes: Sizes
    order: Sizes  # the digits as they lie in the chunk
    box: tuple[Sizes, ...]  # the digits of each axis of the source box
    chunk: tuple[Sizes, ...]  # the digits of each axis of the chunk


@lru_cache(maxsize=1 << 12)
def digits_of(axes: Axes | None, box_sizes: Sizes, chunk_sizes: Sizes) -> Digits:
    """Refine an arrangement so that no part crosses an axis; it must have elements."""
    if axes is None:
        axes = Axes(box_sizes, range(len(box_sizes)))
    rows = _common(axes.split, box_sizes)
    columns = (
        None if rows is None else _common([rows[n][0] for n in _spread(axes, rows)], chunk_sizes)
    )
    if rows is None or columns is None:
        text = f"boxes of sizes {box_sizes} and {chunk_sizes} have no common parts under {axes}"
        raise ValueError(text)
    placed = _spread(axes, rows)
    # A digit, named by its row and by its number within it.
    names = [(placed[at], number) for number, (_, at, _) in enumerate(columns)]
    ranked = sorted(names)
    number_of = {name: at for at, name in enumerate(ranked)}
    size_of = dict(zip(names, (size for size, _, _ in columns), strict=True))
    axis_of = dict(zip(names, (axis for _, _, axis in columns), strict=True))
    return Digits(
        tuple(size_of[name] for name in ranked),
        tuple(number_of[name] for name in names),
        _grouped([rows[row][2] for row, _ in ranked], range(len(ranked)), len(box_sizes)),
        _grouped([axis_of[n] for n in names], [number_of[n] for n in names], len(chunk_sizes)),
    )


def _spread(axes: Axes, rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the refined parts, by number, as they lie in the chunk."""
    of_part: dict[int, list[int]] = {}
    for number, (_, part, _) in enumerate(rows):
        of_part.setdefault(part, []).append(number)
    return [number for part in axes.order for number in of_part.get(part, ())]


def _grouped(axis: Sequence[int], digits: Sequence[int], count: int) -> tuple[Sizes, ...]:
    groups: list[list[int]] = [[] for _ in range(count)]
    for number, digit in zip(axis, digits, strict=True):
        groups[number].append(digit)
    return tuple(map(tuple, groups))


def _common(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Return the coarsest parts that cross no axis of two shapes; None if there are none.

    Each is its size, its axis in ``a`` and its axis in ``b``. Axes of size 1 have no part.
    """
    found = []
    left = [[(n, axis) for axis, n in enumerate(shape) if n != 1] for shape in (a, b)]
    while left[0] and left[1]:
        (m, row), (n, column) = left[0].pop(), left[1].pop()
        size = min(m, n)
        if max(m, n) % size:
            return None
        found.append((size, row, column))
        if m > size:
            left[0].append((m // size, row))
        if n > size:
            left[1].append((n // size, column))
    return found[::-1]


Range = tuple[int, int]  # the values of a digit: the first, and one past the last


def _cuts(digits: Digits, offsets: Sizes, sizes: Sizes) -> Iterator[Cut]:
    """Yield the boxes of a sub-box of the chunk."""
    per_axis = []
    for group, low, size in zip(digits.chunk, offsets, sizes, strict=True):
        per_axis.append(list(_ranges([digits.sizes[d] for d in group], low, low + size)))
    count = 0
    for choice in product(*per_axis):
        ranges = {
            digit: values
            for group, some in zip(digits.chunk, choice, strict=True)
            for digit, values in zip(group, some, strict=True)
        }
        single = _enumerated(digits, ranges)
        count += math.prod(ranges[digit][1] - ranges[digit][0] for digit in single)
        if count > MAX_CUTS:
            raise ValueError(_too_many(count))
        for values in product(*(range(*ranges[digit]) for digit in single)):
            fixed = {digit: (at, at + 1) for digit, at in zip(single, values, strict=True)}
            yield _piece(digits, {**ranges, **fixed})


def _ranges(sizes: Sequence[int], low: int, high: int) -> Iterator[tuple[Range, ...]]:
    """Cut a range of an axis into ranges of its digits.

    >>> list(_ranges([3, 4], 2, 9))
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    first, last = -(-low // inner), high // inner  # the values that are covered in full
    if first > last:
        for rest in _ranges(sizes[1:], low - last * inner, high - last * inner):
            yield ((last, first), *rest)
        return
    if low % inner:
        for rest in _ranges(sizes[1:], low % inner, inner):
            yield ((first - 1, first), *rest)
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    if high % inner:
        for rest in _ranges(sizes[1:], 0, high % inner):
            yield ((last, last + 1), *rest)


def _enumerated(digits: Digits, ranges: dict[int, Range]) -> list[int]:
    """Return the digits whose values must be enumerated, for boxes on both sides."""
    single: set[int] = set()
    while True:
        before = len(single)
        for group in (*digits.box, *digits.chunk):
            partial = False
            for digit in reversed(group):
                low, high = ranges[digit]
                if partial and high - low > 1:
                    single.add(digit)
                partial |= high - low < digits.sizes[digit] or digit in single
        if len(single) == before:
            return sorted(single)


def _piece(digits: Digits, ranges: dict[int, Range]) -> Cut:
    """Return the box of some ranges of digits, which must be one on both sides."""
    box_offsets, box_sizes = _extent(digits, digits.box, ranges)
    chunk_offsets, chunk_sizes = _extent(digits, digits.chunk, ranges)
    widths = [ranges[d][1] - ranges[d][0] for d in range(len(digits.sizes))]
    axes = canonical(widths, digits.order, box_sizes, chunk_sizes)
    return Cut(box_offsets, box_sizes, axes, chunk_offsets, chunk_sizes)


def _extent(
    digits: Digits, groups: Sequence[Sizes], ranges: dict[int, Range]
) -> tuple[Sizes, Sizes]:
    """Return the offsets and sizes on one side."""
    offsets, sizes = [], []
    for group in groups:
        at, size = 0, 1
        for digit in group:
            low, high = ranges[digit]
            at = at * digits.sizes[digit] + low
            size *= high - low
        offsets.append(at)
        sizes.append(size)
    return tuple(offsets), tuple(sizes)


def _within(whole: Cut, offsets: Sizes, sizes: Sizes) -> Iterator[Cut]:
    """Yield the part of a pair of boxes inside a box of the checkpoint."""
    low = _minus(offsets, whole.chunk_offsets)
    for c in cut(whole.axes, whole.box_sizes, whole.chunk_sizes, low, sizes):
        yield _moved(c, whole.box_offsets, whole.chunk_offsets)


def _within_source(whole: Cut, offsets: Sizes, sizes: Sizes) -> Iterator[Cut]:
    """Yield the part of a pair of boxes inside a box of the source."""
    low = _minus(offsets, whole.box_offsets)
    for c in cut_source(whole.axes, whole.box_sizes, whole.chunk_sizes, low, sizes):
        yield _moved(c, whole.box_offsets, whole.chunk_offsets)


def _moved(c: Cut, box: Sizes, chunk: Sizes) -> Cut:
    offsets = _plus(c.box_offsets, box), _plus(c.chunk_offsets, chunk)
    return c._replace(box_offsets=offsets[0], chunk_offsets=offsets[1])


def _plus(a: Sizes, b: Sizes) -> Sizes:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Sizes, b: Sizes) -> Sizes:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _joined(first: Cut, second: Cut) -> Iterator[Cut]:
    low = tuple(map(max, first.chunk_offsets, second.box_offsets))
    ends = zip(
        _plus(first.chunk_offsets, first.chunk_sizes),
        _plus(second.box_offsets, second.box_sizes),
        strict=True,
    )
    sizes = _minus(tuple(min(pair) for pair in ends), low)
    if any(size <= 0 for size in sizes):
        return
    for a in _within(first, low, sizes):
        for b in _within_source(second, a.chunk_offsets, a.chunk_sizes):
            whole = b.box_sizes == a.chunk_sizes
            yield from _fused(a, b) if whole else _joined(a, b)


def _fused(a: Cut, b: Cut) -> Iterator[Cut]:
    """Compose two arrangements whose boxes in the middle frame are the same."""
    if a.axes is None or b.axes is None:
        yield Cut(a.box_offsets, a.box_sizes, a.axes or b.axes, b.chunk_offsets, b.chunk_sizes)
        return
    first = digits_of(a.axes, a.box_sizes, a.chunk_sizes)
    second = digits_of(b.axes, b.box_sizes, b.chunk_sizes)
    middle = [first.sizes[digit] for digit in first.order]
    common = _common(middle, second.sizes)
    if common is None:
        yield from _slabs(a, b, _shared(middle, second.sizes))
        return
    source = [(first.order[row], at) for at, (_, row, _) in enumerate(common)]
    ranked = sorted(range(len(common)), key=source.__getitem__)
    place = {at: number for number, at in enumerate(ranked)}
    of_digit = _grouped([digit for _, _, digit in common], range(len(common)), len(second.sizes))
    order = [place[at] for digit in second.order for at in of_digit[digit]]
    sizes = [common[at][0] for at in ranked]
    axes = canonical(sizes, order, a.box_sizes, b.chunk_sizes)
    yield Cut(a.box_offsets, a.box_sizes, axes, b.chunk_offsets, b.chunk_sizes)


def _shared(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Return the axes that two factorisations share, and how long a slab of each may be.

    >>> _shared((5, 6, 4), (5, 4, 6))
    [(5, 5), (24, 6)]
    """
    ends = [{math.prod(shape[at:]) for at in range(len(shape) + 1)} for shape in (a, b)]
    both = sorted(ends[0] & ends[1], reverse=True)
    every = ends[0] | ends[1]
    found = []
    for outer, inner in pairwise(both):
        within = sorted(end // inner for end in every if inner < end < outer)
        fit = all(b % a == 0 for a, b in pairwise(within))
        found.append((outer // inner, outer // inner if fit else within[-1]))
    return found


def _slabs(a: Cut, b: Cut, middle: Sequence[tuple[int, int]]) -> Iterator[Cut]:
    """Cut two arrangements without common digits along the first axis where that is so."""
    sizes = tuple(size for size, _ in middle)
    origin = (0,) * len(sizes)
    into = a._replace(chunk_offsets=origin, chunk_sizes=sizes)
    out = b._replace(box_offsets=origin, box_sizes=sizes)
    into = into._replace(axes=_as(a.axes, into))
    out = out._replace(axes=_as(b.axes, out))
    axis = next(at for at, (size, step) in enumerate(middle) if step < size)
    size, step = middle[axis]
    if size // step > MAX_CUTS:
        raise ValueError(_too_many(size // step))
    for low in range(0, size, step):
        offsets = (*origin[:axis], low, *origin[axis + 1 :])
        lengths = (*sizes[:axis], min(step, size - low), *sizes[axis + 1 :])
        for part in _within(into, offsets, lengths):
            yield from _joined(part, out)


def _as(axes: Axes | None, now: Cut) -> Axes | None:
    """Return an arrangement after one of its boxes was written with other axes."""
    assert axes is not None
    return canonical(axes.split, axes.order, now.box_sizes, now.chunk_sizes)
