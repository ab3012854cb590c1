"""Byte ranges, what they fill and how they are joined, against enumerating every byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.storage.blocks import cut_blocks
from shardplan.planning.storage.ranges import byte_ranges, coalesce, fills_chunks, lies_together
from shardplan.planning.testing.strategies import chunks, shapes, tilings


@st.composite
def boxes(draw):
    extents = draw(shapes(max_dims=4))
    box = draw(chunks(extents, allow_empty=True))
    return extents, box, draw(st.sampled_from([1, 2, 8])), draw(st.integers(0, 50))


def ranges_of(extents, box, itemsize, begin):
    row = lambda values: np.array([values], np.int64).reshape(1, len(values))  # noqa: E731
    return byte_ranges(
        row(box.offsets), row(box.sizes), row(extents), np.array([itemsize]), np.array([begin])
    )


@given(boxes())
def test_ranges_are_exactly_the_bytes_of_the_box_in_its_own_order(case):
    extents, box, itemsize, begin = case
    file = begin + np.arange(int(np.prod(extents)) * itemsize).reshape(*extents, itemsize)
    inside = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
    wanted = file[inside].reshape(-1)
    ranges = ranges_of(*case)
    got = np.full(wanted.size, -1)
    for start, length, into in zip(ranges.start, ranges.length, ranges.into, strict=True):
        got[into : into + length] = np.arange(start, start + length)
    assert got.tolist() == wanted.tolist()


@given(boxes())
def test_there_are_as_few_ranges_as_there_are_stretches(case):
    extents, box, itemsize, begin = case
    file = begin + np.arange(int(np.prod(extents)) * itemsize).reshape(*extents, itemsize)
    inside = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
    wanted = file[inside].reshape(-1)
    stretches = int((np.diff(wanted) != 1).sum()) + 1 if wanted.size else 0
    # A box may touch the next stretch only across rows that it spans from end to end.
    assert stretches <= len(ranges_of(*case)) <= max(stretches, 1) * max(box.numel, 1)
    if all(s == e for s, e in zip(box.sizes[1:], extents[1:], strict=True)):
        assert len(ranges_of(*case)) == stretches


some_ranges = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=12
)


def columns(rows):
    return (np.array(c, np.int64) for c in zip(*rows, strict=True))


@given(some_ranges, st.integers(0, 50), st.sampled_from([0.0, 0.5, 10.0]), st.integers(1, 200))
def test_every_range_lies_in_its_request_and_requests_keep_their_bounds(rows, gap, waste, most):
    file, start, length = columns(rows)
    requests = coalesce(file, start, length, max_gap=gap, max_waste=waste, max_bytes=most)
    for f, s, n, member in zip(file, start, length, requests.members, strict=True):
        assert requests.file[member] == f
        assert requests.start[member] <= s
        assert s + n <= requests.start[member] + requests.length[member]
    for number in range(len(requests)):
        mine = requests.members == number
        assert requests.start[number] == start[mine].min()
        assert requests.length[number] == (start + length)[mine].max() - start[mine].min()
        assert requests.length[number] <= max(most, length[mine].max())


@given(some_ranges)
def test_without_a_gap_allowance_no_byte_is_fetched_that_nobody_wants(rows):
    file, start, length = columns(rows)
    requests = coalesce(file, start, length, max_gap=0)
    wanted = {(f, b) for f, s, n in rows for b in range(s, s + n)}
    fetched = {
        (f, b)
        for f, s, n in zip(requests.file, requests.start, requests.length, strict=True)
        for b in range(s, s + n)
    }
    assert fetched == wanted


def test_neighbours_are_joined_over_a_small_gap_only():
    file, start, length = columns([(0, 0, 1000), (0, 1050, 1000), (0, 4000, 10)])
    assert len(coalesce(file, start, length)) == 2
    assert len(coalesce(file, start, length, max_gap=49)) == 3
    assert len(coalesce(file, start, length, max_waste=0.01)) == 3


def test_no_ranges_make_no_requests():
    none = np.zeros(0, np.int64)
    assert len(coalesce(none, none, none)) == 0


@given(boxes())
def test_a_box_lies_together_if_its_bytes_are_one_range(case):
    extents, box, *_ = case
    if box.numel:
        together = lies_together(np.array([box.sizes]), np.array([extents]))
        assert together.tolist() == [len(ranges_of(*case)) == 1]


@st.composite
def cut_chunks(draw):
    """Some chunks, and boxes of them: all of one, or all but one, or one twice."""
    rows = []
    for chunk in range(draw(st.integers(1, 3))):
        extents = draw(shapes(min_dims=2, max_dims=2, min_side=1, max_side=4))
        parts = [part for part in draw(tilings(extents)) if part.numel]
        if draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(parts), max_size=4))
        rows += [(chunk, part, extents) for part in parts]
    return draw(st.permutations(rows))


@given(cut_chunks())
def test_chunks_are_filled_by_single_ranges_that_hold_each_element_once(rows):
    offsets = np.array([part.offsets for _, part, _ in rows], np.int64).reshape(-1, 2)
    lengths = np.array([part.sizes for _, part, _ in rows], np.int64).reshape(-1, 2)
    extents = np.array([whole for _, _, whole in rows], np.int64).reshape(-1, 2)
    found = fills_chunks(np.array([c for c, _, _ in rows], np.int64), offsets, lengths, extents)
    for row, (chunk, _, whole) in enumerate(rows):
        mine = [part for c, part, _ in rows if c == chunk]
        count = np.zeros(whole, int)
        for part in mine:
            count[tuple(slice(o, e) for o, e in zip(part.offsets, part.ends, strict=True))] += 1
        single = all(len(ranges_of(whole, part, 1, 0)) == 1 for part in mine)
        assert found[row] == (single and (count == 1).all())


@given(boxes(), st.integers(1, 40))
def test_a_box_is_cut_where_the_blocks_of_its_chunk_end(case, limit):
    extents, box, itemsize, _ = case
    if not box.numel:
        return
    row = lambda values: np.array([values], np.int64).reshape(1, len(values))  # noqa: E731
    width = np.array([itemsize])
    owner = np.empty(extents or (1,), int)  # the chunk's block of each cell
    whole = cut_blocks(row(extents), width, limit)
    for number, place in enumerate(zip(whole.offsets, whole.sizes, strict=True)):
        owner[tuple(slice(o, o + s) for o, s in zip(*place, strict=True))] = number
    start = box.offsets or (0,)
    parts = cut_blocks(row(box.sizes), width, limit, offsets=row(box.offsets), extents=row(extents))
    seen = np.zeros(extents or (1,), int)
    for number, *place in zip(parts.number, parts.offsets, parts.sizes, strict=True):
        inside = tuple(slice(b + o, b + o + s) for b, o, s in zip(start, *place, strict=True))
        assert (owner[inside] == number).all()
        seen[inside] += 1
    inside = tuple(slice(o, e) for o, e in zip(start, box.ends or (1,), strict=True))
    assert (seen[inside] == 1).all()
    assert seen.sum() == box.numel
