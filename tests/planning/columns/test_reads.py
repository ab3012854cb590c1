"""Reads in columns."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import LoadItemType, MetadataIndex, ReadItem
from shardplan.planning.columns import ReadItems

W = MetadataIndex("w", (0,))


@given(st.sets(st.integers(0, 30), min_size=2), st.integers(1, 7))
def test_every_nth_element_is_read_once_from_where_it_was(edges, step):
    ends = [0, *sorted(edges)]
    reads = [
        ReadItem(LoadItemType.TENSOR, W, (a,), W, (a + 5,), (b - a,)) for a, b in pairwise(ends)
    ]
    every = ReadItems.of(reads).every([step])
    found = [
        position
        for read in every
        for position in range(read.dest_offsets[0], read.dest_offsets[0] + read.lengths[0], step)
    ]
    assert found == list(range(0, ends[-1], step))
    assert all(read.storage_offsets[0] - read.dest_offsets[0] == 5 for read in every)
