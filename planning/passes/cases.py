"""What becomes of boxes when their tensors move, once for each distinct case.

A case is a box of a tensor and the move of that tensor. Millions of items have few cases: ranks
hold many tensors of one shape, and boxes of one size.

1. Number the distinct cases.
2. Pair each case with the pieces of the tensor that its box overlaps.
3. Where neither has axes of its own, move offsets, for all pairs together.
4. Elsewhere compose the two. Pieces are periodic along an axis, so a shard is like its neighbour.
5. Add padding after the boxes that touch the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import ColumnTable, Ints, column, group_rows, numbered, pad, padded, readonly
from ..columns.frames import Coded, SourceFrame
from ..columns.items import WriteItems
from ..geometry.axes import Axes, Cut, canonical, composed, cut, digits_of
from ..geometry.overlap import overlap_many
from ..geometry.tilings import Tiling, tile
from .moves import Move, MovedBox

Sizes = tuple[int, ...]


@attrs.frozen(eq=False)
class Cases:
    """The distinct cases among the items of several plans; one row each."""

    sample: Ints  # the first item of each case, among all items in order of plans
    move: Ints  # the number of its move; -1 if it stays
    offsets: Ints
    sizes: Ints
    frame: SourceFrame

    @classmethod
    def of(cls, every: Sequence[WriteItems], move: Ints, moves: Sequence[Move]) -> NumberedCases:
        """Find the cases of the items of all plans, given the number of each item's move.

        If an item stays, that is -1 minus its number of axes.
        """
        wide = max(items.catalog.axes for items in every)
        offsets = np.concatenate([pad(items.offsets, wide, 0) for items in every])
        sizes = np.concatenate([pad(items.sizes, wide, 1) for items in every])
        columns, frame = [move, offsets, sizes], None
        if any(items.frame is not None for items in every):
            frame = SourceFrame.concat([items.source_frame for items in every])
            columns += [frame.axes.number, frame.fill.number]
            columns += [frame.ndim, frame.offsets, frame.sizes]
        sample, which = _distinct(columns)
        move, offsets, sizes = move[sample], offsets[sample], sizes[sample]
        if frame is not None:
            boxes = frame.take(sample)
        else:
            axes = column([len(one.pieces[0].cut.box_sizes) for one in moves])
            ndim = np.where(move < 0, -1 - move, axes[np.maximum(move, 0)])
            boxes = SourceFrame.of_chunks(ndim, offsets, sizes)
        return NumberedCases(cls(sample, np.maximum(move, -1), offsets, sizes, boxes), which)


class NumberedCases(NamedTuple):
    """The distinct cases of some items, and the number of the case of each item."""

    cases: Cases
    which: Ints


def move_cases(cases: Cases, moves: Sequence[Move]) -> Results:
    """Return what becomes of the box of every case, in order of cases.

    Raises:
        CaseError: A box would be cut into too many.
    """
    pieces = _Pieces.of(moves)
    empty = (cases.sizes == 0).any(axis=1) & (cases.move >= 0)
    pairs = _pairs(cases, pieces, ~empty)
    axes = cases.frame.axes.known[pairs.case]
    plain = (pairs.piece < 0) | (pieces.plain[pairs.piece] & ~axes)
    parts = [_shifted(cases, pieces, pairs.take(plain))]
    if not plain.all():
        parts.append(_composed(cases, pieces, pairs.take(~plain)))
    if empty.any():
        parts.append(_emptied(cases, pieces, np.flatnonzero(empty)))
    results = Results.concat(parts + _padding(cases, moves))
    return results.take(np.argsort(results.case, kind="stable"))


class CaseError(ValueError):
    """A case that would be cut into too many boxes; ``item`` is one of its items."""

    def __init__(self, item: int, reason: str) -> None:
        self.item = item
        super().__init__(reason)


@attrs.frozen(eq=False)
class _Pairs(ColumnTable):
    """Cases, the pieces that they overlap, and where, in the frame of the tensor before."""

    case: Ints
    piece: Ints  # its number among the pieces of all moves; -1 if the box stays
    offsets: Ints
    sizes: Ints


@attrs.frozen(eq=False)
class Results(ColumnTable):
    """Boxes after the move; one row each."""

    case: Ints  # the case that it belongs to
    target: Ints  # the number of its tensor; -1 if it is left out
    offsets: Ints
    sizes: Ints
    frame: SourceFrame

    @property
    def plain(self) -> npt.NDArray[np.bool_]:
        """Which boxes are the chunks that they become."""
        frame = self.frame
        same = ~frame.axes.known & ~frame.fill.known
        for chunk, box, value in ((self.offsets, frame.offsets, 0), (self.sizes, frame.sizes, 1)):
            wide = max(chunk.shape[1], box.shape[1])
            same &= (pad(chunk, wide, value) == pad(box, wide, value)).all(axis=1)
        return same


@attrs.frozen(eq=False)
class _Pieces:
    """The pieces of all moves, in columns. A row of padding comes last, for number -1."""

    pieces: tuple[MovedBox, ...]
    tilings: tuple[Tiling, ...]  # of each move
    first: Ints  # the number of each move's first piece
    count: Ints  # how many pieces each move has
    plain: npt.NDArray[np.bool_]  # which have the same axes before and after
    target: Ints
    low: Ints  # the start before
    shift: Ints  # from the start before to that after, of plain pieces
    period: Ints  # per axis before: after how many elements the axes repeat
    stride: Ints  # per axis before and axis after: how far one period leads

    @classmethod
    def of(cls, moves: Sequence[Move]) -> _Pieces:
        """Lay out the pieces of some moves."""
        pieces = [piece for move in moves for piece in move.pieces]
        cuts = [piece.cut for piece in pieces]
        before = max(len(c.box_sizes) for c in cuts)
        after = max(len(c.chunk_sizes) for c in cuts)
        wide = max(before, after)
        counts = [len(move.pieces) for move in moves]
        low = padded([*(c.box_offsets for c in cuts), ()], 0, wide)
        period = np.ones((len(cuts) + 1, before), np.int64)
        stride = np.zeros((len(cuts) + 1, before, after), np.int64)
        plain = np.array([*(c.axes is None for c in cuts), True])
        known: dict[tuple[Axes, Sizes, Sizes], tuple[Ints, Ints]] = {}
        has = np.array([*(0 not in c.box_sizes for c in cuts), False])
        for number in np.flatnonzero(~plain & has).tolist():
            _, sizes, axes, _, chunk = cuts[number]
            assert axes is not None
            if (axes, sizes, chunk) not in known:
                known[axes, sizes, chunk] = _periods(axes, sizes, chunk)
            own, steps = known[axes, sizes, chunk]
            period[number, : len(sizes)] = own
            stride[number, : len(sizes), : len(chunk)] = steps
        return cls(
            tuple(pieces),
            tuple(
                tile([p.cut.box_offsets for p in m.pieces], [p.cut.box_sizes for p in m.pieces])
                for m in moves
            ),
            column(np.cumsum([0, *counts])[:-1]),
            column(counts),
            plain,
            column([*(piece.target for piece in pieces), 0]),
            low,
            readonly(padded([*(c.chunk_offsets for c in cuts), ()], 0, wide) - low),
            period,
            stride,
        )


def _periods(axes: Axes, sizes: Sizes, chunk: Sizes) -> tuple[Ints, Ints]:
    """Return the period of each axis of a box, and how far one leads along the axes of the chunk.

    >>> _periods(Axes((12,), (0,)), (12,), (3, 4))
    (array([4]), array([[1, 0]]))
    """
    digits = digits_of(axes, sizes, chunk)
    period = np.array(sizes, np.int64)
    stride = np.zeros((len(sizes), len(chunk)), np.int64)
    for axis, group in enumerate(digits.box):
        if not group:
            continue
        period[axis] //= digits.sizes[group[0]]
        for after, others in enumerate(digits.chunk):
            if group[0] in others:
                inner = others[others.index(group[0]) + 1 :]
                stride[axis, after] = math.prod(digits.sizes[digit] for digit in inner)
    return period, stride


def _pairs(cases: Cases, pieces: _Pieces, mask: npt.NDArray[np.bool_]) -> _Pairs:
    """Pair cases with the pieces that they overlap."""
    single = np.append(pieces.count == 1, True)[cases.move]  # the last is for those that stay
    alone = np.flatnonzero(single & mask)
    number = np.append(pieces.first, -1)[cases.move[alone]]
    parts = [_Pairs(alone, number, cases.offsets[alone], cases.sizes[alone])]
    several = np.flatnonzero(~single & mask)
    if len(several):
        move = cases.move[several]
        used, _, which = numbered(move)
        tilings = [pieces.tilings[number] for number in used.tolist()]
        found = overlap_many(tilings, which, cases.offsets[several], cases.sizes[several])
        piece = pieces.first[move[found.box]] + found.chunk
        parts.append(_Pairs(several[found.box], piece, found.offsets, found.sizes))
    return _Pairs.concat(parts)


def _base(cases: Cases, pairs: _Pairs) -> tuple[Ints, Ints]:
    """Return the box of each part; that of the whole box, if it has axes of its own."""
    frame = cases.frame
    offsets, sizes = frame.offsets[pairs.case], frame.sizes[pairs.case]
    same = np.flatnonzero((~frame.axes.known & ~frame.fill.known & (frame.ndim > 0))[pairs.case])
    wide = min(offsets.shape[1], pairs.offsets.shape[1])
    into = pairs.offsets[same, :wide] - cases.offsets[pairs.case[same], :wide]
    offsets[same, :wide] += into
    sizes[same, :wide] = pairs.sizes[same, :wide]
    return offsets, sizes


def _shifted(cases: Cases, pieces: _Pieces, pairs: _Pairs) -> Results:
    """Move parts of boxes whose axes stay the same."""
    box_offsets, box_sizes = _base(cases, pairs)
    wide = max(pairs.offsets.shape[1], pieces.shift.shape[1])
    shift = pad(pieces.shift, wide, 0)[pairs.piece]
    return Results(
        pairs.case,
        pieces.target[pairs.piece],
        pad(pairs.offsets, wide, 0) + shift,
        pad(pairs.sizes, wide, 1),
        attrs.evolve(cases.frame.take(pairs.case), offsets=box_offsets, sizes=box_sizes),
    )


def _composed(cases: Cases, pieces: _Pieces, pairs: _Pairs) -> Results:
    """Move parts of boxes whose axes change, or have changed before."""
    frame = cases.frame
    box_offsets, box_sizes = _base(cases, pairs)
    axes = frame.axes.number[pairs.case]
    own = axes >= 0
    ndim = frame.ndim[pairs.case]
    whole = np.where(own[:, None], cases.sizes[pairs.case], pairs.sizes)
    inside = np.where(own[:, None], pairs.offsets - cases.offsets[pairs.case], 0)
    wide = pieces.period.shape[1]
    at = pad(pairs.offsets, wide, 0)[:, :wide] - pieces.low[pairs.piece, :wide]
    turns, rest = np.divmod(at, pieces.period[pairs.piece])
    turns = np.where(pieces.plain[pairs.piece][:, None], 0, turns)
    rest = np.where(pieces.plain[pairs.piece][:, None], at, rest)
    columns = [pairs.piece, axes, ndim, rest, pairs.sizes, whole, inside, box_sizes]
    first, kind = _distinct(columns)
    cuts: list[tuple[Cut, ...]] = []
    for row in first.tolist():
        piece, case = pieces.pieces[pairs.piece[row]].cut, int(pairs.case[row])
        before = len(piece.box_sizes)
        sizes, start, chunk = (
            tuple(values[row, :before].tolist()) for values in (pairs.sizes, inside, whole)
        )
        low = _plus(piece.box_offsets, rest[row, :before].tolist())
        box = tuple(box_sizes[row, : ndim[row]].tolist()) if own[row] else chunk
        try:
            parts = cut(frame.axes[case], box, chunk, start, sizes)
            placed = (c._replace(chunk_offsets=_placed(c, low, start)) for c in parts)
            cuts.append(tuple(found for part in placed for found in composed(part, piece)))
        except ValueError as error:
            raise CaseError(int(cases.sample[case]), str(error)) from error
    return _spread(cases, pieces, _Solved(pairs, turns, box_offsets, kind, cuts))


@attrs.frozen(eq=False)
class _Solved:
    """Pairs, and what becomes of those of each kind."""

    pairs: _Pairs
    turns: Ints  # how many periods each pair is away from the first of its kind
    base: Ints  # the start of each pair's box
    kind: Ints
    cuts: Sequence[tuple[Cut, ...]]  # by kind; their boxes are relative to ``base``


def _plus(a: Sequence[int], b: Sequence[int]) -> Sizes:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _placed(part: Cut, low: Sizes, start: Sizes) -> Sizes:
    """Return where a part lies that is given relative to a box whose ``start`` lies at ``low``."""
    return _plus(_plus(part.chunk_offsets, low), tuple(-n for n in start))


def _spread(cases: Cases, pieces: _Pieces, solved: _Solved) -> Results:
    """Repeat the cuts of each kind for all pairs of that kind."""
    kind, base = solved.kind, solved.base
    cuts = [one for some in solved.cuts for one in some]
    counts = np.array([len(some) for some in solved.cuts], np.int64)
    first = np.cumsum(counts) - counts
    pair = np.repeat(np.arange(len(kind)), counts[kind])
    each = np.cumsum(counts[kind]) - counts[kind]
    at = first[kind][pair] + np.arange(len(pair)) - each[pair]
    case, piece = solved.pairs.case[pair], solved.pairs.piece[pair]
    after = max([pieces.stride.shape[2], *(len(c.chunk_offsets) for c in cuts)])
    boxes = max([base.shape[1], *(len(c.box_offsets) for c in cuts)])
    steps = np.einsum("pb,pba->pa", solved.turns[pair], pieces.stride[piece])
    fills = cases.frame.fill.take(case)
    none = fills.known
    box_offsets = padded([c.box_offsets for c in cuts], 0, boxes)[at] + pad(base, boxes, 0)[pair]
    axes = Coded.of(c.axes for c in cuts).take(at)
    frame = SourceFrame(
        np.where(none, 0, column([len(c.box_offsets) for c in cuts])[at]),
        np.where(none[:, None], 0, box_offsets),
        np.where(none[:, None], 1, padded([c.box_sizes for c in cuts], 1, boxes)[at]),
        Coded(np.where(none, -1, axes.number), axes.values),
        fills,
    )
    offsets = padded([c.chunk_offsets for c in cuts], 0, after)[at] + pad(steps, after, 0)
    sizes = padded([c.chunk_sizes for c in cuts], 1, after)[at]
    return Results(case, pieces.target[piece], offsets, sizes, frame)


def _distinct(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return the first of each distinct row of some columns, and the number of each row.

    Rows that fit into 62 bits are compared as one number.
    """
    key = np.zeros(len(columns[0]), np.int64)
    if not len(key):
        return key, key
    limit = 1
    for values in (c for array in columns for c in (array.T if array.ndim == 2 else [array])):
        low = int(values.min())
        size = int(values.max()) - low + 1
        if size == 1:
            continue
        if limit * size >= 1 << 62:
            key, limit = numbered(key).which, len(key)
        if limit * size >= 1 << 62:
            return group_rows(columns)
        key, limit = key * size + (values - low), limit * size
    found = numbered(key)
    return found.first, found.which


def _emptied(cases: Cases, pieces: _Pieces, at: Ints) -> Results:
    """Move chunks without elements: they become those of the targets that have none."""
    found = []
    for case in at.tolist():
        move = int(cases.move[case])
        for number in range(int(pieces.first[move]), int(pieces.first[move] + pieces.count[move])):
            one, target = pieces.pieces[number]
            if 0 in one.box_sizes and target >= 0:
                found.append((case, target, one))
    frame, case = cases.frame, column([case for case, _, _ in found])
    boxes = zip(frame.sizes[case].tolist(), frame.ndim[case].tolist(), strict=True)
    sizes = [tuple(box[:ndim]) for box, ndim in boxes]
    cuts = [one for _, _, one in found]
    axes = (
        None if frame.fill[case[n]] is not None else canonical((0,), (0,), box, one.chunk_sizes)
        for n, (box, one) in enumerate(zip(sizes, cuts, strict=True))
    )
    return Results(
        case,
        column([target for _, target, _ in found]),
        padded([one.chunk_offsets for one in cuts], 0),
        padded([one.chunk_sizes for one in cuts], 1),
        attrs.evolve(frame.take(case), axes=Coded.of(axes)),
    )


def _padding(cases: Cases, moves: Sequence[Move]) -> list[Results]:
    """Add padding after every chunk that touches the end of the axis."""
    found = []
    for number, move in enumerate(moves):
        if move.padding is None:
            continue
        axis, low, high, value = move.padding
        ends = cases.offsets[:, axis] + cases.sizes[:, axis]
        at = np.flatnonzero((cases.move == number) & (ends == low) & cases.sizes.all(axis=1))
        offsets, sizes = cases.offsets[at], cases.sizes[at]
        offsets[:, axis], sizes[:, axis] = low, high - low
        zero = np.zeros(len(at), np.int64)
        none = Coded[Axes].none(len(at))
        frame = SourceFrame(zero, sizes[:, :0], sizes[:, :0], none, Coded(zero, (value,)))
        found.append(Results(at, zero, offsets, sizes, frame))
    return found
