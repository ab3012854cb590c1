"""Tilings and overlaps, against the enumeration of every element."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import Boxes, Chunk, Grid, fills, gaps, tile
from shardplan.planning.geometry import overlap
from shardplan.planning.geometry.overlap import _candidates, overlap_many, self_overlaps
from shardplan.planning.geometry.tilings import tile_chunks
from shardplan.planning.testing.strategies import cells, chunks, shapes, tilings

SHAPES = shapes(max_dims=4, max_side=4)
MANY_BOXES = st.integers(0, 3).flatmap(
    lambda dims: shapes(min_dims=dims, max_dims=dims, min_side=1, max_side=5)
)


@st.composite
def pairs_of_tilings(draw):
    shape = draw(SHAPES)
    return draw(tilings(shape)), draw(tilings(shape))


@st.composite
def scattered_boxes(draw):
    """Boxes that may collide, leave holes and be empty, and the shape they lie in."""
    shape = draw(MANY_BOXES)
    boxes = draw(st.lists(chunks(shape, allow_empty=True), max_size=6))
    return shape, boxes


def counts(shape, boxes):
    count = np.zeros(shape, int)
    for box in boxes:
        for element in cells(box):
            count[element] += 1
    return count


def is_grid(boxes):
    """Decide by brute force: do the boxes list all cells between some cuts, row-major?"""
    if not boxes or any(box.numel == 0 for box in boxes):
        return False
    axes = []
    for axis in range(len(boxes[0].offsets)):
        edges = {(box.offsets[axis], box.ends[axis]) for box in boxes}
        axes.append(sorted(edges))
        if any(a[1] != b[0] for a, b in itertools.pairwise(axes[-1])):
            return False
    cells_in_order = [
        Chunk([a for a, _ in cell], [b - a for a, b in cell]) for cell in itertools.product(*axes)
    ]
    return cells_in_order == list(boxes)


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))))
def test_generated_tilings_hold_each_element_once(case):
    shape, tiling = case
    assert (counts(shape, tiling) == 1).all()


@given(pairs_of_tilings())
def test_a_tiling_is_a_grid_exactly_where_brute_force_finds_one(pair):
    for tiling in pair:
        assert isinstance(tiling, Grid) == is_grid(list(tiling))


@given(scattered_boxes())
def test_boxes_in_any_arrangement_are_a_grid_exactly_where_brute_force_finds_one(case):
    _, boxes = case
    tiling = tile_chunks(boxes)
    assert isinstance(tiling, Grid) == is_grid(boxes)
    assert list(tiling) == boxes


def expected_pieces(a, b):
    """Every (box, chunk, first element, sizes) that share elements, by looking at all pairs."""
    found = []
    for i, box in enumerate(b):
        for j, chunk in enumerate(a):
            shared = sorted(set(cells(box)) & set(cells(chunk)))
            if shared:
                low, high = shared[0], shared[-1]
                sizes = tuple(h - o + 1 for o, h in zip(low, high, strict=True))
                found.append((i, j, low, sizes, chunk.offsets))
    return found


def pieces_of(result):
    columns = (result.offsets, result.sizes, result.anchors)
    rows = zip(*(map(tuple, c.tolist()) for c in columns), strict=True)
    return [
        (i, j, *row)
        for i, j, row in zip(result.box.tolist(), result.chunk.tolist(), rows, strict=True)
    ]


@given(pairs_of_tilings())
def test_overlap_of_tilings_is_what_enumeration_finds(pair):
    assert pieces_of(overlap(*pair)) == expected_pieces(*pair)


@given(scattered_boxes(), st.data())
def test_overlap_of_any_boxes_is_what_enumeration_finds(case, data):
    shape, boxes = case
    a = tile_chunks(boxes)
    b = data.draw(tilings(shape))
    if len(a):
        assert pieces_of(overlap(a, b)) == expected_pieces(a, b)
        assert pieces_of(overlap(b, a)) == expected_pieces(b, a)


@pytest.mark.parametrize("dims", range(5))
@pytest.mark.parametrize("kinds", [(Grid, Grid), (Grid, Boxes), (Boxes, Grid), (Boxes, Boxes)])
def test_overlap_is_right_for_each_kind_of_tiling_in_each_dimension(dims, kinds):
    shape = (3,) * dims
    halves = [Chunk((o, *[0] * (dims - 1)), (n, *shape[1:])) for o, n in ((0, 1), (1, 2))]
    grid = tile_chunks(halves if dims else [Chunk((), ())])
    boxes = Boxes(grid.offsets[::-1], grid.sizes[::-1])
    a, b = (grid if kind is Grid else boxes for kind in kinds)
    assert (type(a), type(b)) == kinds
    assert pieces_of(overlap(a, b)) == expected_pieces(a, b)


@given(st.lists(pairs_of_tilings(), min_size=1, max_size=4))
def test_many_tensors_are_met_at_once_as_one_by_one(cases):
    width = max(a.ndim for a, _ in cases)

    def widen(columns, value):
        missing = width - columns.shape[1]
        return np.pad(columns, ((0, 0), (0, missing)), constant_values=value)

    which = np.repeat(np.arange(len(cases)), [len(b) for _, b in cases])
    offsets = np.concatenate([widen(b.offsets, 0) for _, b in cases])
    sizes = np.concatenate([widen(b.sizes, 1) for _, b in cases])
    together = overlap_many([a for a, _ in cases], which, offsets, sizes)
    expected, first = [], 0
    for a, b in cases:
        pad, one = (0,) * (width - a.ndim), (1,) * (width - a.ndim)
        expected += [
            (first + i, j, low + pad, size + one, anchor + pad)
            for i, j, low, size, anchor in expected_pieces(a, b)
        ]
        first += len(b)
    assert pieces_of(together) == expected


@given(scattered_boxes())
def test_fills_means_that_each_element_lies_in_one_chunk(case):
    shape, boxes = case
    assert fills(tile_chunks(boxes), shape) == bool((counts(shape, boxes) == 1).all())


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape))))
def test_fills_accepts_every_exact_cover(case):
    assert fills(case[1], case[0])


@given(SHAPES.filter(math.prod).flatmap(lambda s: st.tuples(st.just(s), tilings(s))), st.data())
def test_fills_notices_that_one_chunk_is_gone_or_doubled(case, data):
    shape, tiling = case
    at = data.draw(st.integers(0, len(tiling) - 1))
    boxes = list(tiling)
    assert not fills(tile_chunks(boxes[:at] + boxes[at + 1 :]), shape)
    assert not fills(tile_chunks([*boxes, boxes[at]]), shape)


def test_fills_notices_a_chunk_outside_though_the_volumes_agree():
    assert not fills(tile([[0], [6]], [[3], [3]]), (6,))


@given(scattered_boxes(), st.data())
def test_gaps_are_disjoint_and_exactly_what_no_chunk_covers(case, data):
    shape, boxes = case
    within = data.draw(chunks(shape, allow_empty=True))
    found = gaps(tile_chunks(boxes), within, limit=10_000)
    assert all(gap.numel for gap in found)
    missed = [element for gap in found for element in cells(gap)]
    covered = {element for box in boxes for element in cells(box)}
    assert sorted(missed) == sorted(set(cells(within)) - covered)


@given(scattered_boxes(), st.integers(1, 3))
def test_gaps_are_no_more_than_asked_for(case, limit):
    shape, boxes = case
    whole = Chunk((0,) * len(shape), shape)
    every = gaps(tile_chunks(boxes), whole, limit=10_000)
    assert gaps(tile_chunks(boxes), whole, limit=limit) == every[:limit]


def test_holes_between_pieces_are_told_as_whole_runs():
    tiling = tile([[0], [12]], [[4], [4]])
    assert gaps(tiling, Chunk((0,), (16,))) == [Chunk((4,), (8,))]
    assert gaps(tiling, Chunk((2,), (12,))) == [Chunk((4,), (8,))]


@given(scattered_boxes())
def test_self_overlaps_are_the_pairs_that_share_elements(case):
    _, boxes = case
    expected = [
        (i, j)
        for i, j in itertools.combinations(range(len(boxes)), 2)
        if set(cells(boxes[i])) & set(cells(boxes[j]))
    ]
    tiling = tile_chunks(boxes)
    assert self_overlaps(tiling, limit=100) == expected
    some = self_overlaps(tiling, limit=1)
    assert len(some) == min(len(expected), 1)
    assert set(some) <= set(expected)


@given(scattered_boxes())
def test_bounds_and_volume_are_those_of_the_elements(case):
    shape, boxes = case
    tiling = tile_chunks(boxes)
    assert tiling.volume() == counts(shape, boxes).sum()
    if boxes and all(box.numel for box in boxes):
        elements = [element for box in boxes for element in cells(box)]
        low, high = map(min, zip(*elements, strict=True)), map(max, zip(*elements, strict=True))
        bounds = tiling.bounds()
        assert bounds.offsets == tuple(low)
        assert bounds.ends == tuple(h + 1 for h in high)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_cost_does_not_depend_on_which_axis_is_cut(axis):
    # 10,000 boxes across the short axis; a sweep along the other would test 10⁸ pairs.
    count = 10_000
    order = np.random.default_rng(0).permutation(count)
    offsets, sizes = np.zeros((count, 2), int), np.full((count, 2), 1 << 30)
    offsets[:, axis], sizes[:, axis] = order, 1
    tiling = tile(offsets, sizes)
    low, high = tiling.offsets, tiling.offsets + tiling.sizes
    tested = [
        sum(int(counts.sum()) for _, _, counts in _candidates(*(c[:, x] for c in (low, high) * 2)))
        for x in (0, 1)
    ]
    assert tested[axis] == count
    assert tested[1 - axis] == count**2
    assert len(overlap(tiling, tiling).box) == count
    assert fills(tiling, (count, 1 << 30) if axis == 0 else (1 << 30, count))


def test_changing_the_arrays_that_a_tiling_was_made_of_does_not_change_it():
    offsets, sizes = np.array([[0], [12]]), np.array([[4], [4]])
    tiling = tile(offsets, sizes)
    offsets[0, 0] = sizes[0, 0] = 7
    assert tiling[0] == Chunk((0,), (4,))


def test_chunks_of_different_axes_form_no_tiling():
    with pytest.raises(ValueError, match="same number of axes"):
        tile_chunks([Chunk((0,), (1,)), Chunk((0, 0), (1, 1))])
    with pytest.raises(ValueError, match="do not fit"):
        tile([[0], [1]], [[1, 1], [1, 1]])


def test_a_tiling_does_not_change_with_the_arrays_it_was_made_of():
    cuts = np.array([0, 3, 6])
    grid = Grid((cuts,))
    starts, extents = np.array([[0], [12]]), np.array([[4], [4]])
    boxes = tile(starts, extents)
    cuts[1] = starts[0, 0] = 1
    assert grid == tile([[0], [3]], [[3], [3]])
    assert boxes[0] == Chunk((0,), (4,))


def test_grids_too_long_to_be_laid_end_to_end_are_still_met_right():
    tilings = [tile([[0]], [[2**60 + i]]) for i in range(9)]
    sizes = np.array([[2**60 + i] for i in range(9)])
    pieces = overlap_many(tilings, np.arange(9), np.zeros((9, 1), np.int64), sizes)
    assert pieces.box.tolist() == list(range(9))
    assert (pieces.sizes == sizes).all()


def test_one_long_box_among_many_short_ones_does_not_make_every_pair_a_candidate():
    """A full row across a field of bricks: the running maximum of ends would be useless."""
    side = 60
    bricks = [((2 * r + 1, 3 * c), (2, 3)) for r in range(side) for c in range(side)]
    boxes = [((0, 0), (1, 3 * side)), *bricks, ((1, 3 * side), (2 * side, 1))]
    tiling = tile(*(np.array(side_) for side_ in zip(*boxes, strict=True)))
    low, high = tiling.offsets, tiling.offsets + tiling.sizes
    best = min(
        sum(int(counts.sum()) for _, _, counts in _candidates(*(c[:, x] for c in (low, high) * 2)))
        for x in (0, 1)
    )
    assert best < 4 * len(boxes) * side
