"""Items packed into files, and blocks grouped into tasks: in order, whole, within bounds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import TensorSpec, local_plan
from shardplan.planning.storage import group_blocks, pack_files, widest_first

SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.sampled_from([1, 8, 64]), st.integers(1, 60))
def test_packed_items_are_aligned_in_order_and_never_overlap(sizes, align, file_bytes):
    packed = pack_files(np.array(sizes, np.int64), align, file_bytes=file_bytes)
    file, begin = (column.tolist() for column in packed)
    assert sorted(set(file)) == list(range(len(set(file))))
    assert len(set(file)) <= 4
    for number in set(file):
        end = 0
        for at, size in [(b, n) for f, b, n in zip(file, begin, sizes, strict=True) if f == number]:
            assert at == -(-end // align) * align
            end = at + size
    assert file == sorted(file)
    assert len(set(file)) <= 1 or sum(sizes) >= 2 * file_bytes


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=20), st.integers(1, 40))
def test_grouped_blocks_are_neighbours_and_each_is_in_one_task(gaps, max_bytes):
    start, nbytes, end = [], [], 0
    for gap, size in gaps:
        start.append(end + gap)
        nbytes.append(size)
        end = start[-1] + size
    columns = np.array(start, np.int64), np.array(nbytes, np.int64)
    tasks = group_blocks(*columns, max_bytes, max_blocks=5)
    assert [row for low, high in tasks for row in range(low, high)] == list(range(len(gaps)))
    for low, high in tasks:
        assert high - low <= 5
        assert sum(nbytes[low : high - 1]) < max_bytes
        assert all(start[i] + nbytes[i] == start[i + 1] for i in range(low, high - 1))


@given(st.dictionaries(st.text("abc", min_size=1), st.sampled_from(["float32", "int8", "int64"])))
def test_the_widest_items_come_first_and_then_by_name(dtypes):
    plan = local_plan({name: TensorSpec((2,), dtype) for name, dtype in dtypes.items()})
    width = {"int64": 8, "float32": 4, "int8": 1}
    names = [plan.items[row].index.fqn for row in widest_first(plan.items).tolist()]
    assert names == sorted(dtypes, key=lambda name: (-width[dtypes[name]], name))
