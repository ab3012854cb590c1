"""Each rank derives the plan that a coordinator would have made for it."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    adam,
    derive_plans,
    find_issues,
    global_plan,
    llama3_8b,
    world_plans,
)


@st.composite
def worlds(draw):
    """Tensors of few sizes on a small mesh: so that many are shared, alike and of equal weight."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    assume(math.prod(shape) <= 24)
    mesh = Mesh(dict(zip("abc", shape, strict=False)))
    specs = {}
    for number in range(draw(st.integers(1, 7))):
        size = draw(st.lists(st.integers(0, 9), max_size=3))
        kinds = [st.just(Replicate())] * 2
        if size:
            dims = st.integers(0, len(size) - 1)
            kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
        placements = draw(st.lists(st.one_of(kinds), min_size=len(shape), max_size=len(shape)))
        dtype = draw(st.sampled_from(["float32", "uint8"]))
        specs[f"t{number}"] = TensorSpec(size, dtype, placements if draw(st.booleans()) else ())
    specs |= {f"value{n}": n for n in range(draw(st.integers(0, 3)))}
    return world_plans(specs, mesh)


@given(worlds())
def test_derived_plans_are_those_of_the_coordinator_hints_included(plans):
    try:
        expected, metadata = global_plan(plans)
    except PlanError:
        with pytest.raises(PlanError):
            derive_plans(plans)
        return
    derived, described = derive_plans(plans)
    assert derived == expected
    assert described == metadata
    for ours, theirs in zip(derived, expected, strict=True):
        assert ours.planner_data == theirs.planner_data
        if len(theirs.items):
            assert np.array_equal(ours.items.hint, theirs.items.hint)


@st.composite
def large_worlds(draw):
    """Tensors that are worth cutting, on a small mesh."""
    mesh = Mesh(a=draw(st.integers(1, 4)), b=draw(st.integers(1, 3)))
    specs = {}
    for number in range(draw(st.integers(1, 5))):
        size = [draw(st.integers(1, 9)), draw(st.sampled_from([1 << 10, 1 << 16, 70_000]))]
        dims = st.integers(0, 1)
        kinds = [st.just(Replicate())] * 3 + [st.builds(Shard, dims)]
        placements = draw(st.lists(st.one_of(kinds), min_size=2, max_size=2))
        dtype = draw(st.sampled_from(["float32", "uint8"]))
        specs[f"t{number}"] = TensorSpec(size, dtype, placements if draw(st.booleans()) else ())
    return world_plans({**specs, "step": 1}, mesh)


@given(large_worlds())
def test_cut_replicas_are_derived_as_the_coordinator_cuts_them(plans):
    expected, metadata = global_plan(plans)
    derived, described = derive_plans(plans)
    assert described == metadata
    for ours, theirs in zip(derived, expected, strict=True):
        assert ours == theirs
        assert np.array_equal(ours.items.hints, theirs.items.hints)


def test_a_replicated_model_is_written_evenly_by_many_ranks():
    plans, metadata = derive_plans(world_plans(adam(llama3_8b()), Mesh(dp=512)))
    written = [plan.nbytes for plan in plans]
    assert max(written) <= 1.1 * sum(written) / 512
    assert find_issues(metadata) == ()


def test_chunks_whose_holders_overlap_in_part_are_given_out_as_the_coordinator_does():
    """Replicated along either axis: sets of two ranks each, which cross."""
    specs = {
        f"{axis}{n}": TensorSpec((4 + n, 4), "float32", placements)
        for n in range(5)
        for axis, placements in {"a": [Shard(0), Replicate()], "b": [Replicate(), Shard(0)]}.items()
    }
    plans = world_plans(specs, Mesh(dp=2, tp=2))
    assert derive_plans(plans)[0] == global_plan(plans)[0]


def test_few_heavy_replicas_are_evened_out_as_the_coordinator_does():
    weights = [50, 50, 50, 30, 30, 30, 30, 30, 20, 7]
    specs = {f"t{n}": TensorSpec((w,), "uint8") for n, w in enumerate(weights)}
    plans = world_plans(specs, Mesh(dp=3))
    derived, expected = derive_plans(plans)[0], global_plan(plans)[0]
    assert derived == expected
    greedy = [50 + 30 + 30, 50 + 30 + 20, 50 + 30 + 30 + 7]  # what giving out in turn comes to
    assert max(plan.nbytes for plan in derived) < max(greedy)


def test_plans_behave_like_a_tuple_of_them():
    plans, _ = derive_plans(world_plans({"w": TensorSpec((4,), "float32", [Shard(0)])}, Mesh(dp=2)))
    assert len(plans) == 2
    assert plans[-1] == plans[1] == plans[1:][0]
    assert hash(plans) == hash(tuple(plans))
    with pytest.raises(IndexError):
        plans[2]
