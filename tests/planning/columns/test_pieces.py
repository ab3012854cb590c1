"""Reads by rule are the reads that the same plan has as a list."""

import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    LLAMA_TP,
    Chunk,
    Mesh,
    Metadata,
    PlanError,
    Shard,
    StridedShard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    adam,
    fsdp_tp,
    global_plan,
    llama3_405b,
    load,
    load_plan,
    local_plan,
    world_metadata,
    world_plans,
)
from shardplan.planning.columns.pieces import GridReads
from shardplan.planning.testing.strategies import save_plans

TENSORS = {"w": TensorSpec((7, 5)), "b": TensorSpec((6,), "int8"), "s": TensorSpec(()), "v": None}
WORLDS = save_plans(tensors=TENSORS)


def planned(metadata, plan, *, by_rule, **options):
    with mock.patch.object(load, "_MANY", -1 if by_rule else 1 << 60):
        return load_plan(metadata, plan, **options)


@given(WORLDS, WORLDS, st.data())
def test_a_plan_by_rule_equals_the_plan_by_list(saved, wanted, data):
    metadata = global_plan(saved)[1]
    for plan in wanted:
        rule, listed = (planned(metadata, plan, by_rule=how) for how in (True, False))
        assert rule.report == listed.report
        assert len(rule.items) == len(listed.items)
        assert rule.items.volume() == listed.items.volume()
        numbers = st.integers(0, max(len(listed.items) - 1, 0))
        some = np.array(data.draw(st.lists(numbers, max_size=9 * (len(listed.items) > 0))), int)
        assert list(rule.items.take(some)) == [listed.items[n] for n in some]
        assert list(rule.items[1:4]) == list(listed.items[1:4])
        assert list(rule.items) == list(listed.items)
        assert rule == listed
        assert listed == rule
        assert pickle.loads(pickle.dumps(rule)) == listed


STRIDED = st.tuples(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.integers(0, 1)
)


@given(STRIDED)
def test_uneven_and_strided_shards_are_read_by_rule(case):
    rows, dp, tp, columns, axis = case
    mesh = Mesh(dp=dp, tp=tp)
    placements = [StridedShard(0, split_factor=tp), Shard(0)]
    metadata = world_metadata(world_plans({"w": TensorSpec((rows, 6), "int8", placements)}, mesh))
    for plan in world_plans({"w": TensorSpec((rows, 6), "int8", [Shard(axis)])}, Mesh(n=columns)):
        rule, listed = (planned(metadata, plan, by_rule=how) for how in (True, False))
        assert isinstance(rule.items, GridReads) or not len(plan.items)
        assert list(rule.items) == list(listed.items)


def test_what_grids_leave_uncovered_is_reported_alike():
    parts = {"w": ((4, 6), (4, 3)), "v": ((3,), (2,))}
    metadata = Metadata(
        {
            name: TensorMetadata(TensorProperties(), size, [Chunk([0] * len(size), held)])
            for name, (size, held) in parts.items()
        }
    )
    wanted = local_plan({name: TensorSpec(size) for name, (size, _) in parts.items()})
    errors = []
    for how in (True, False):
        with pytest.raises(PlanError) as caught:
            planned(metadata, wanted, by_rule=how)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "elements [0:4, 3:6]" in errors[0]
    plans = [planned(metadata, wanted, by_rule=how, strict=False) for how in (True, False)]
    assert plans[0] == plans[1]


def test_a_model_of_16384_ranks_is_planned_for_one_without_a_list_of_its_reads():
    mesh = Mesh(dp=2048, tp=8)
    specs = adam(fsdp_tp(llama3_405b(), mesh, LLAMA_TP))
    metadata = world_metadata(world_plans(specs, mesh))
    whole = {name: TensorSpec(spec.shape, spec.dtype) for name, spec in specs.items()}
    plan = load_plan(metadata, local_plan(whole))
    assert len(plan.items) > 30_000_000
    assert plan.items.volume() == sum(int(np.prod(spec.shape)) for spec in specs.values())
    last = plan.items[len(plan.items) - 1]
    assert last == plan.items[-1]
    assert "made" not in vars(plan.items)
    assert f"{len(plan.items):,} reads" in repr(plan)
