"""Indices select what numpy selects."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardplan.planning.geometry import selection_of

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
CASES = SHAPES.flatmap(
    lambda shape: st.tuples(st.just(shape), arrays.basic_indices(shape, allow_newaxis=True))
)


@given(CASES)
def test_an_index_selects_the_elements_and_the_shape_that_numpy_gives(case):
    shape, index = case
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    chosen = selection_of(index, shape)
    along = [[axis.start + n * axis.step for n in range(axis.count)] for axis in chosen.axes]
    elements = [int(whole[position]) for position in itertools.product(*along)]
    expected = np.asarray(whole[index])
    assert chosen.shape == expected.shape
    assert elements == expected.reshape(-1).tolist()


@given(CASES)
def test_ascending_from_the_lowest_each_stride_away_are_the_same_elements(case):
    for axis in selection_of(case[1], case[0]).axes:
        wanted = sorted(axis.start + n * axis.step for n in range(axis.count))
        if wanted:
            assert wanted == list(range(axis.low, axis.low + axis.reach, axis.stride))


@pytest.mark.parametrize(
    ("index", "error"),
    [((0, 0), IndexError), (7, IndexError), ([1], TypeError), (True, TypeError), (1.5, TypeError)],
)
def test_what_is_not_an_index_is_refused(index, error):
    with pytest.raises(error):
        selection_of(index, (4,))
