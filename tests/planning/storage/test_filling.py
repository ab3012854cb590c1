"""What a load can fill, decided from values alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import TensorSpec, local_plan, metadata_of
from shardplan.planning.storage import is_folded, meeting, saved_elsewhere

strided = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=3)


@given(strided)
def test_memory_is_folded_if_two_indices_lead_to_one_place(axes):
    strides, sizes = [stride for stride, _ in axes], [size for _, size in axes]
    indices = itertools.product(*map(range, sizes))
    places = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
    assert is_folded(strides, sizes) == (len(set(places)) < len(places))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=8))
def test_every_pair_of_spans_that_overlap_is_named_once(spans):
    named = {number: (start, start + size) for number, (start, size) in enumerate(spans)}
    pairs = [frozenset(pair) for pair in meeting(named)]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {
        frozenset((a, b))
        for a, b in itertools.combinations(named, 2)
        if max(named[a][0], named[b][0]) < min(named[a][1], named[b][1])
    }


@pytest.mark.parametrize(("saved_on", "ranks"), [((4,), 4), ((2, 4), 4), ((2,), None), ((), None)])
def test_state_of_other_ranks_is_found_by_its_label_unless_as_many_saved_it(saved_on, ranks):
    saved = {f"rng.rank_{r}_of_{n}.pos": r for n in saved_on for r in range(n)}
    metadata = metadata_of(saved | {"w": TensorSpec((2,))})
    plan = local_plan({"rng": {"rank_1_of_2": {"pos": 0}}})
    found = saved_elsewhere("rng.rank_1_of_2", 3 if ranks else 2, plan, metadata)
    assert (found and found.ranks) == ranks
    if found:
        assert (found.name, found.names) == ("rng", ("rng.rank_1_of_2.pos",))
