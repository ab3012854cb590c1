"""Plans, state dicts and planners print as code that makes them again."""

import pickle

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import shardplan.planning
from shardplan.planning import (
    Mesh,
    Replicate,
    SavePlan,
    Shard,
    StridedShard,
    TensorSpec,
    annotate,
    cast,
    chain,
    dedup_replicas,
    drop,
    global_plan,
    local_plan,
    on_ranks,
    pad,
    partition,
    permute,
    rename,
    reshape,
    select,
    split_chunks,
    split_replicas,
    stack,
    trim,
    where,
)
from shardplan.planning.testing.printing import as_code
from shardplan.planning.testing.strategies import (
    meshes,
    placements,
    save_plans,
    state_dicts,
    tensor_specs,
)

from ..test_tree import same


def kind(name):
    return "ab"["a" in name]


KNOWN = {name: getattr(shardplan.planning, name) for name in shardplan.planning.__all__}
KNOWN |= {"np": np, "kind": kind}

PASSES = [
    rename({"a": "b", "c": "d"}),
    rename([(r"^a\.", "b.")], required=False),
    rename(str.upper),
    select("a*", kind),
    drop("b"),
    cast("bfloat16"),
    cast({"*.norm": "float32", "*": "bfloat16"}, lossy=True),
    annotate(kind),
    split_chunks(8),
    split_replicas(8),
    dedup_replicas(prefer="lowest_rank"),
    partition(kind, {"a": chain(), "b": [drop("c"), split_chunks(8)]}),
    where("a*", (split_chunks(8),)),
    on_ranks({0, 2}, split_chunks(8)),
]


def again(code):
    return eval(code, dict(KNOWN))


@given(st.lists(st.sampled_from(PASSES), max_size=3))
def test_a_planner_is_made_again_from_what_it_prints(passes):
    planner = chain(*passes, list(passes))
    assert again(repr(planner)) == planner
    assert again(as_code(planner)) == planner
    assert hash(again(repr(planner))) == hash(planner)
    assert repr(pickle.loads(pickle.dumps(planner))) == repr(planner)


@given(meshes(), st.data())
def test_meshes_placements_and_specs_are_made_again_from_what_they_print(mesh, data):
    placed = data.draw(placements(mesh, (4, 4)))
    spec = data.draw(tensor_specs(mesh=mesh))
    for value in (mesh, placed, spec):
        assert again(repr(value)) == value
        assert again(as_code(value)) == value
    assert again(repr([Shard(1), Replicate(), StridedShard(0, 2)])) == [
        Shard(1),
        Replicate(),
        StridedShard(0, 2),
    ]
    for name in ("d p", "class"):
        assert again(repr(Mesh({name: 2}))) == Mesh({name: 2})


@given(save_plans())
def test_plans_are_made_again_from_their_code(plans):
    assert again(as_code(plans)) == plans
    done = global_plan(plans)[0]
    made = again(as_code(done))
    assert made == done
    assert [plan.rank for plan in made] == [plan.rank for plan in done]
    assert [plan.holds for plan in made] == [plan.holds for plan in done]


def test_plans_whose_tensors_have_other_shapes_are_made_again_too():
    plan = local_plan({"w": TensorSpec((4, 6)), "b": TensorSpec((2,))}, mesh=Mesh(dp=2), rank=1)
    steps = [permute("w", (1, 0)), pad("b", axis=0, to=4), trim("w", axis=0, to=5)]
    for step in [*steps, chain(*steps), reshape("w", (2, 2, 6)), stack("?.#", into="x", axis=0)]:
        assert again(repr(step)) == step
    (done,) = chain(*steps)((plan,))
    made = again(as_code(done))
    assert made == done
    assert (made.held, made.left_out) == (done.held, done.left_out)


@given(state_dicts())
def test_state_dicts_are_made_again_from_their_code(sd):
    assert same(again(as_code(sd)), sd)
    plan = local_plan(sd)
    assert again(as_code(plan)) == plan


@pytest.mark.parametrize("value", [float("inf"), np.zeros((0, 3), "float32"), (1,), SavePlan([])])
def test_odd_values_are_made_again_too(value):
    assert same(again(as_code(value)), value)


def test_a_failing_test_prints_its_plans_as_code():
    @settings(deadline=None, database=None)
    @given(save_plans(tensors={"w": TensorSpec((2,))}))
    def loses_something(plans):
        assert sum(map(len, (plan.items for plan in plans))) > 1

    with pytest.raises(AssertionError) as caught:
        loses_something()
    text = "\n".join(caught.value.__notes__)
    (line,) = [line for line in text.splitlines() if line.startswith("plans = ")]
    made = again(line.removeprefix("plans = "))
    assert sum(map(len, (plan.items for plan in made))) == 1


def test_a_failing_test_prints_its_state_dict_and_planner_as_code():
    @settings(deadline=None, database=None)
    @given(state_dicts(), st.sampled_from(PASSES[:4]))
    def holds_nothing(sd, step):
        assert not sd

    with pytest.raises(AssertionError) as caught:
        holds_nothing()
    text = "\n".join(caught.value.__notes__)
    (line,) = [line for line in text.splitlines() if line.startswith("state_dict = ")]
    made = again(line.removeprefix("state_dict = "))
    assert len(made) == 1
    assert f"step={PASSES[0]!r}" in text


def test_strategies_can_be_searched_without_a_test():
    assert len(find(save_plans(), lambda plans: len(plans) == 2)) == 2
