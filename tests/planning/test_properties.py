"""What always holds: each element is written once, read once, and nothing depends on order."""

import os
import subprocess
import sys

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Mesh,
    MetadataIndex,
    Replicate,
    SavePlan,
    Shard,
    StridedShard,
    TensorSpec,
    dedup_replicas,
    find_issues,
    flatten,
    global_load_plan,
    global_plan,
    load_plan,
    local_plan,
    resolve_overlaps,
)
from shardplan.planning.testing.strategies import (
    assert_read_once,
    assert_written_once,
    cells,
    chunks,
    count_writes,
    meshes,
    placements,
    save_plans,
    shapes,
    state_dicts,
    trace_reads,
)


def contents(metadata):
    """What a checkpoint holds, as `save_plans` takes it to lay it out anew."""
    return {
        name: None
        if isinstance(entry, BytesMetadata)
        else TensorSpec(entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }


@st.composite
def reshardings(draw):
    """A saved world, and another one that wants to load the same tensors."""
    saved = draw(save_plans())
    _, metadata = global_plan(saved)
    return saved, metadata, draw(save_plans(tensors=contents(metadata)))


# Saving


@given(save_plans())
def test_generated_worlds_have_no_issues_and_cover_every_element(plans):
    assert find_issues(plans) == ()
    assert all((count >= 1).all() for count in count_writes(plans).values())


@given(save_plans(), st.sampled_from(["balance", "lowest_rank"]))
def test_every_element_is_written_exactly_once(plans, prefer):
    done, metadata = global_plan(plans, dedup_replicas(prefer=prefer))
    assert_written_once(done, metadata)
    assert find_issues(metadata) == ()


@given(save_plans())
def test_each_rank_writes_only_what_it_holds(plans):
    done, _ = global_plan(plans)
    assert len(done) == len(plans)
    for before, after in zip(plans, done, strict=True):
        assert set(after.items) <= set(before.items)


@given(save_plans())
def test_hints_number_the_chunks_of_the_metadata(plans):
    done, metadata = global_plan(plans)
    for item in (item for plan in done for item in plan.items if item.tensor_data):
        chunk = metadata.state_dict_metadata[item.index.fqn].chunks[item.index.index]
        assert chunk == item.tensor_data.chunk


@given(st.data())
def test_state_dicts_on_a_mesh_are_written_exactly_once(data):
    mesh = data.draw(meshes())
    sd = data.draw(state_dicts(mesh=mesh))
    plans = [local_plan(sd, mesh=mesh, rank=rank) for rank in range(len(mesh))]
    done, metadata = global_plan(plans)
    assert_written_once(done, metadata)
    assert set(metadata.state_dict_metadata) == set(flatten(sd)[0])


@given(st.data())
def test_placements_put_every_element_on_a_rank_and_replicas_on_as_many_as_promised(data):
    mesh, shape = data.draw(meshes(max_ranks=8)), data.draw(shapes(min_side=1))
    placed = data.draw(placements(mesh, shape))
    specs = {"w": TensorSpec(shape, placements=placed)}
    plans = [local_plan(specs, mesh=mesh, rank=rank) for rank in range(len(mesh))]
    copies = [n for n, p in zip(mesh.shape, placed, strict=True) if p == Replicate()]
    assert (count_writes(plans)["w"] == np.prod(copies, dtype=int)).all()


# Loading


@given(reshardings())
def test_every_target_cell_is_read_exactly_once_from_where_it_was_written(case):
    _, metadata, targets = case
    for rank, target in enumerate(targets):
        plan = load_plan(metadata, target)
        assert_read_once(metadata, target, plan, rank=rank)
        assert plan.items == resolve_overlaps(metadata, target)
        assert not plan.report.missing
        assert not plan.report.mismatched


@given(reshardings())
def test_hints_of_reads_number_the_saved_chunks(case):
    _, metadata, targets = case
    for read in (read for target in targets for read in load_plan(metadata, target).items):
        source = read.storage_index
        if source.offset is not None:
            chunk = metadata.state_dict_metadata[source.fqn].chunks[source.index]
            assert chunk.offsets == source.offset


@given(save_plans(), st.data())
def test_any_chunks_by_name_are_read_exactly_once(plans, data):
    _, metadata = global_plan(plans)
    wanted = {
        name: data.draw(st.lists(chunks(spec.shape), max_size=3, unique_by=lambda c: c.offsets))
        for name, spec in contents(metadata).items()
        if spec is not None
    }
    assert_read_once(metadata, wanted, resolve_overlaps(metadata, wanted))


@given(reshardings())
def test_renamed_sources_are_filled_from_the_names_they_have_in_the_checkpoint(case):
    _, metadata, targets = case
    for target in targets:
        moved = [
            attrs.evolve(i, source=attrs.evolve(i.source, fqn=f"model.{i.source.fqn}"))
            for i in target.items
        ]
        plan = SavePlan(moved)
        reads = load_plan(metadata, plan)
        assert all(read.dest_index.fqn == f"model.{read.storage_index.fqn}" for read in reads.items)
        assert_read_once(metadata, plan, reads)


@given(save_plans(tensors={"w": TensorSpec((7,)), "v": TensorSpec((3, 4))}), st.data())
def test_parts_of_a_shard_are_read_into_their_place_in_it(plans, data):
    # A target whose items are pieces of the shards that hold them, as after splitting big chunks.
    _, metadata = global_plan(plans)
    items = []
    for item in data.draw(st.sampled_from(plans)).items:
        box = item.tensor_data.chunk
        part = data.draw(chunks(box.sizes))
        start = [a + b for a, b in zip(box.offsets, part.offsets, strict=True)]
        write = attrs.evolve(item.tensor_data, chunk=Chunk(start, part.sizes))
        index = MetadataIndex(item.index.fqn)
        items.append(attrs.evolve(item, index=index, tensor_data=write, source=item.source))
    plan = SavePlan(items)
    assert_read_once(metadata, plan, load_plan(metadata, plan))


@pytest.mark.parametrize("saved", [Mesh(dp=4), Mesh(dp=2, tp=2), Mesh(tp=3), Mesh(dp=1)], ids=repr)
@pytest.mark.parametrize("wanted", [Mesh(dp=3), Mesh(dp=3, tp=2), Mesh(dp=2, tp=3)], ids=repr)
def test_known_layouts_reshard_between_meshes(saved, wanted):
    # Rows that do not divide, strided shards, axes shorter than the mesh, no axes, empty.
    def specs(mesh):
        rows = [Shard(0)] * len(mesh.names)
        strided = [StridedShard(0, split_factor=mesh.shape[-1]), Shard(0)][-len(mesh.names) :]
        last = [*[Replicate()] * (len(mesh.names) - 1), Shard(1)]
        return {
            "rows": TensorSpec((6, 2), placements=rows),
            "strided": TensorSpec((13,), placements=strided),
            "thin": TensorSpec((1, 5), placements=rows),
            "columns": TensorSpec((2, 7), "bfloat16", last),
            "scalar": TensorSpec((), "int64", [Replicate()] * len(mesh.names)),
            "empty": TensorSpec((0, 3), placements=rows),
            "step": 7,
        }

    plans = [local_plan(specs(saved), mesh=saved, rank=rank) for rank in range(len(saved))]
    done, metadata = global_plan(plans)
    assert_written_once(done, metadata)
    for rank in range(len(wanted)):
        target = local_plan(specs(wanted), mesh=wanted, rank=rank)
        assert_read_once(metadata, target, load_plan(metadata, target), rank=rank)


@given(reshardings())
def test_without_passes_every_rank_loads_as_it_would_alone(case):
    _, metadata, targets = case
    plans = tuple(load_plan(metadata, target) for target in targets)
    assert global_load_plan(plans) == plans


# Nothing depends on order


@given(save_plans(), st.data())
def test_metadata_is_the_same_for_any_order_of_the_ranks(plans, data):
    order = data.draw(st.permutations(range(len(plans))))
    _, metadata = global_plan(plans)
    _, permuted = global_plan([plans[rank] for rank in order])
    assert permuted == metadata
    assert list(permuted.state_dict_metadata) == list(metadata.state_dict_metadata)


@given(save_plans(), st.data())
def test_metadata_is_the_same_for_any_order_of_the_items(plans, data):
    shuffled = [SavePlan(data.draw(st.permutations(list(plan.items)))) for plan in plans]
    done, metadata = global_plan(plans)
    again, same = global_plan(shuffled)
    assert same == metadata
    assert [set(plan.items) for plan in again] == [set(plan.items) for plan in done]


@given(st.data())
def test_plans_are_the_same_for_any_order_of_the_keys(data):
    sd = data.draw(state_dicts())

    def turned(value):
        if isinstance(value, dict):
            return {k: turned(v) for k, v in reversed(value.items())}
        return type(value)(map(turned, value)) if type(value) in (list, tuple) else value

    assert local_plan(turned(sd)) == local_plan(sd)


SCRIPT = """
from shardplan.planning import *
mesh = Mesh(dp=2, tp=2)
names = [f"layer.{i}.{kind}" for i in range(5) for kind in ("weight", "bias", "norm")]
placed = ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)])
sd = {name: TensorSpec((6, 4 + i), "bfloat16", placed[i % 3]) for i, name in enumerate(names)}
sd |= {"groups": [{"lr": 0.1, "params": {"a", "b", "c"}}], "spec": TensorSpec((3,))}
plans = [local_plan(sd, mesh=mesh, rank=rank) for rank in range(4)]
plans = [SavePlan(p.items, {"tags": {"x", "y", "z"}}, p.planner_data) for p in plans]
done, metadata = global_plan(plans)
print(fingerprint(metadata), *map(fingerprint, plans), *map(fingerprint, done))
print(*(fingerprint(load_plan(metadata, p)) for p in plans))
"""


def test_fingerprints_are_the_same_in_every_process():
    outputs = {
        subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 13


# The oracles notice


W = TensorSpec((4, 2))
PLANS = tuple(
    local_plan({"w": attrs.evolve(W, placements=[Shard(0)])}, mesh=Mesh(dp=2), rank=rank)
    for rank in range(2)
)


def test_the_oracle_names_the_element_and_the_ranks_that_write_it_twice():
    done, metadata = global_plan(PLANS)
    with pytest.raises(
        AssertionError, match=r"`w`: element \(2, 0\) is written 2 times, by ranks 1, 2"
    ):
        assert_written_once([*done, done[1]], metadata)
    with pytest.raises(
        AssertionError, match=r"`w`: element \(2, 0\) is written 0 times, by no rank"
    ):
        assert_written_once(done[:1], metadata)
    with pytest.raises(AssertionError, match="`w` is in the metadata, but no rank writes it"):
        assert_written_once([SavePlan([])], metadata)


def test_the_oracle_compares_what_is_written_with_the_metadata():
    done, _ = global_plan(PLANS)
    whole = local_plan({"w": W})
    other = local_plan({"w": attrs.evolve(W, dtype="int8")})
    with pytest.raises(AssertionError, match=r"`w`: ranks 0, 1 write .*does not list"):
        assert_written_once(done, global_plan([whole])[1])
    with pytest.raises(
        AssertionError, match=r"`w`: rank 0 writes \('int8'.*metadata says \('float32'"
    ):
        assert_written_once([other], global_plan([whole])[1])
    with pytest.raises(AssertionError, match="`w` is written by rank 0, but not in the metadata"):
        assert_written_once([whole], global_plan([])[1])


def test_the_oracle_names_the_element_that_is_not_read_or_read_from_elsewhere():
    _, metadata = global_plan(PLANS)
    reads = list(load_plan(metadata, PLANS[1]).items)
    (read,) = reads
    with pytest.raises(AssertionError, match=r"element \(2, 0\) .* is read 2 times on rank 1"):
        assert_read_once(metadata, PLANS[1], reads * 2, rank=1)
    moved = attrs.evolve(read, storage_index=MetadataIndex("w", (0, 0)))
    with pytest.raises(AssertionError, match=r"element \(2, 0\) .* is read from \(0, 0\) of `w`"):
        assert_read_once(metadata, PLANS[1], [moved])
    past = attrs.evolve(read, storage_offsets=(1, 0))
    with pytest.raises(AssertionError, match="runs past the saved"):
        assert_read_once(metadata, PLANS[1], [past])
    short = attrs.evolve(read, lengths=(1, 2))
    with pytest.raises(AssertionError, match=r"element \(3, 0\) .* is read 0 times"):
        assert_read_once(metadata, PLANS[1], [short])
    strange = attrs.evolve(read, dest_offsets=(1, 0))
    with pytest.raises(AssertionError, match=r"fills element \(4, 0\), not in the target"):
        trace_reads(metadata, PLANS[1], [strange])


def test_cells_of_a_chunk_without_axes_are_one():
    assert list(cells(Chunk((), ()))) == [()]
    assert list(cells(Chunk((3,), (0,)))) == []
