"""byte_ranges and coalesce, against enumerating every byte."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.ranges import byte_ranges, coalesce
from shardplan.planning.strategies import chunks, shapes


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
