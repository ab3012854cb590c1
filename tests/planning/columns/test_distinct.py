"""The values of a column, against sets and against looking for each of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.columns.arrays import distinct, numbered

columns = st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62))


@given(columns)
def test_values_come_once_each_in_order_with_where_they_are(values):
    column = np.array(values, np.int64)
    found, first, which = (part.tolist() for part in numbered(column))
    assert found == distinct(column).tolist() == sorted(set(values))
    assert first == [values.index(value) for value in found]
    assert [found[number] for number in which] == values
