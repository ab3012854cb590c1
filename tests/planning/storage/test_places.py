"""The file of every chunk: by layouts as by lists, and where each rank's own plan says."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    derive_plans,
    split_chunks,
    world_plans,
)
from shardplan.planning.storage import chunk_places, file_numbers


@st.composite
def worlds(draw):
    """Tensors of few sizes on a small mesh; uneven strided ones have several boxes on a rank."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    mesh = Mesh(dict(zip("ab", shape, strict=False)))
    specs = {}
    for number in range(draw(st.integers(1, 6))):
        size = draw(st.lists(st.integers(1, 9), max_size=2))
        kinds = [st.just(Replicate())]
        if size:
            dims = st.integers(0, len(size) - 1)
            kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
        placements = draw(st.lists(st.one_of(kinds), min_size=len(shape), max_size=len(shape)))
        specs[f"t{number}"] = TensorSpec(size, "float32", placements)
    return world_plans(specs | {"value": 1}, mesh)


def numbered(plans):
    """Number the files of all ranks, and leave some numbers out."""
    files = np.full((len(plans), 20), -1)
    number = itertools.count()
    for rank, plan in enumerate(plans):
        for file in sorted(set(file_numbers(plan).tolist())):
            files[rank, file] = next(number)
    return files


@given(worlds(), st.booleans())
def test_every_chunk_lies_where_the_plan_of_its_rank_puts_it(plans, inline):
    try:
        derived, metadata = derive_plans(plans)
    except PlanError:
        return
    entries, files = metadata.state_dict_metadata, numbered(derived)
    in_files = [name != "value" or not inline for name in entries.names]
    found = chunk_places(entries, derived, files, in_files)
    listed = chunk_places(entries, tuple(derived), files, in_files)
    columns = [[c.tolist() for c in places.columns] for places in (found, listed)]
    assert columns[0] == columns[1]
    assert found.entry.tolist() == listed.entry.tolist()
    assert len(set(map(tuple, columns[0]))) == len(columns[0])
    for rank, plan in enumerate(derived):
        numbers = files[rank, file_numbers(plan)]
        for item, hint, number in zip(plan.items, plan.items.hint, numbers, strict=True):
            place = found.entry[entries.row_of[item.index.fqn]]
            if place < 0:
                assert item.index.fqn == "value"
            else:
                assert columns[0][place][max(hint, 0)] == number


def test_replicas_that_are_cut_between_their_holders_lie_where_each_writes_its_share():
    specs = {
        "whole": TensorSpec((1 << 20, 64), "float32", [Replicate(), Replicate()]),
        "rows": TensorSpec((1 << 20, 64), "float32", [Replicate(), Shard(0)]),
        "small": TensorSpec((4,), "float32", [Shard(0), Replicate()]),
    }
    plans, metadata = derive_plans(world_plans(specs, Mesh(dp=3, tp=2)))
    entries, files = metadata.state_dict_metadata, numbered(plans)
    found, listed = (
        chunk_places(entries, given_plans, files, [True] * 3)
        for given_plans in (plans, tuple(plans))
    )
    assert len(set(found.columns[found.entry[entries.row_of["whole"]]].tolist())) > 1
    assert [c.tolist() for c in found.columns] == [c.tolist() for c in listed.columns]
    assert found.entry.tolist() == listed.entry.tolist()


def test_a_chunk_that_no_rank_wrote_is_named():
    specs = {"w": TensorSpec((4,), "float32", [Shard(0)])}
    plans, metadata = derive_plans(world_plans(specs, Mesh(dp=2)))
    for given_plans in (plans, tuple(plans)):
        with pytest.raises(ValueError, match="some of `w` was not written"):
            chunk_places(metadata.state_dict_metadata, given_plans, np.array([[0], [-1]]), [True])


def test_plans_that_number_no_chunks_are_refused():
    specs = {"w": TensorSpec((4,), "float32", [Shard(0)])}
    plans = world_plans(specs, Mesh(dp=2))
    _, metadata = derive_plans(plans)
    with pytest.raises(ValueError, match="number no chunks"):
        chunk_places(
            metadata.state_dict_metadata, split_chunks(4)(plans), np.array([[0], [1]]), [True]
        )
