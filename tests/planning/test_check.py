"""What is wrong is found, always, and reported all at once: key, ranks, region, remedy."""

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Mesh,
    Metadata,
    MetadataIndex,
    PlanError,
    SavePlan,
    Shard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    check,
    find_issues,
    global_plan,
    local_plan,
)
from shardplan.planning.testing.strategies import cells, chunks, save_plans, shapes, tensor_specs


def item(name, offsets, sizes, shape, dtype="float32"):
    data = TensorWriteData(Chunk(offsets, sizes), TensorProperties(dtype), shape)
    return WriteItem(MetadataIndex(name), WriteItemType.SHARD, data)


def plans_of(*ranks):
    return tuple(SavePlan(items) for items in ranks)


def refused(plans):
    """Return the issues with which plans are refused, the same by every way of asking."""
    issues = find_issues(plans)
    with pytest.raises(PlanError) as caught:
        check(plans)
    assert caught.value.issues == issues
    with pytest.raises(PlanError) as caught:
        global_plan(plans)
    assert {(i.kind, i.fqn, i.region) for i in caught.value.issues} == {
        (i.kind, i.fqn, i.region) for i in issues
    }
    return issues


def region_cells(issue):
    return set(cells(Chunk(*issue.region)))


# Take a valid world and break it


FULL = shapes(min_dims=1, min_side=2, max_side=5)


@st.composite
def worlds_with_a_victim(draw):
    """A valid world, and the place of one of its chunks: rank, position in the plan, item."""
    specs = st.dictionaries(
        st.sampled_from("abc"), tensor_specs(shape=FULL), min_size=1, max_size=2
    )
    plans = draw(save_plans(tensors=draw(specs)))
    places = [(rank, at) for rank, plan in enumerate(plans) for at in range(len(plan.items))]
    rank, at = draw(st.sampled_from(places))
    return plans, rank, at, plans[rank].items[at]


def with_items(plans, rank, change):
    items = list(plans[rank].items)
    change(items)
    return (*plans[:rank], SavePlan(items), *plans[rank + 1 :])


def without(plans, victim):
    """Remove a chunk from every rank that holds it."""
    return tuple(SavePlan([i for i in plan.items if i != victim]) for plan in plans)


@given(worlds_with_a_victim())
def test_a_dropped_chunk_is_reported_as_a_gap_of_exactly_its_elements(case):
    plans, _, _, victim = case
    left, name = without(plans, victim), victim.index.fqn
    holders = {rank for rank, p in enumerate(left) if any(i.index.fqn == name for i in p.items)}
    if not holders:
        return  # nobody speaks of this tensor any more
    issues = refused(left)
    assert {(i.kind, i.fqn) for i in issues} == {("gap", name)}
    assert set().union(*map(region_cells, issues)) == set(cells(victim.tensor_data.chunk))
    assert all(issue.ranks and holders.issuperset(issue.ranks) for issue in issues)


@given(worlds_with_a_victim(), st.data())
def test_a_chunk_too_many_is_reported_with_exactly_what_it_covers_twice(case, data):
    plans, rank, _, victim = case
    name, size, dtype = victim.index.fqn, victim.tensor_data.size, victim.tensor_data.properties
    held = {i.tensor_data.chunk for p in plans for i in p.items if i.index.fqn == name}
    chunk = data.draw(chunks(size).filter(lambda chunk: chunk not in held))
    extra = item(name, chunk.offsets, chunk.sizes, size, dtype.dtype)
    issues = refused(with_items(plans, rank, lambda items: items.append(extra)))
    assert {i.fqn for i in issues} == {name}
    assert {i.kind for i in issues} <= {"overlap", "conflict"}
    assert all(rank in i.ranks for i in issues)
    if len(issues) < 8:  # no more are told of one tensor
        assert set().union(*map(region_cells, issues)) == set(cells(chunk))


@given(worlds_with_a_victim(), st.data())
def test_an_enlarged_chunk_is_reported_as_out_of_bounds_or_as_a_collision(case, data):
    plans, rank, at, victim = case
    chunk, size = victim.tensor_data.chunk, victim.tensor_data.size
    axis = data.draw(st.integers(0, len(size) - 1))
    sizes = [n + (x == axis) for x, n in enumerate(chunk.sizes)]
    larger = item(victim.index.fqn, chunk.offsets, sizes, size, victim.tensor_data.properties.dtype)
    issues = refused(with_items(plans, rank, lambda items: items.__setitem__(at, larger)))
    assert {i.fqn for i in issues} == {victim.index.fqn}
    assert any(rank in i.ranks for i in issues)
    if chunk.ends[axis] == size[axis]:
        (issue,) = issues
        assert issue.kind == "out_of_bounds"
        assert issue.region == (chunk.offsets, tuple(sizes))
        assert issue.ranks == (rank,)
    else:
        assert {i.kind for i in issues} <= {"overlap", "conflict", "gap"}


def other_tensor(write, what):
    name, data = write.index.fqn, write.tensor_data
    offsets, sizes = data.chunk.offsets, data.chunk.sizes
    dtype = data.properties.dtype
    match what:
        case "dtype":
            return item(name, offsets, sizes, data.size, "int16")
        case "shape":
            return item(name, offsets, sizes, [n + 1 for n in data.size], dtype)
        case "axes":
            return item(name, (*offsets, 0), (*sizes, 1), (*data.size, 1), dtype)
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


@given(worlds_with_a_victim(), st.sampled_from(["dtype", "shape", "axes", "value"]))
def test_a_rank_that_means_another_tensor_is_reported_with_both_sides(case, what):
    plans, rank, _, victim = case
    name, data = victim.index.fqn, victim.tensor_data
    holders = [r for r, p in enumerate(plans) if any(i.index.fqn == name for i in p.items)]
    if holders == [rank] or data.properties.dtype == "int16":
        return  # nobody to disagree with

    def differ(items):
        items[:] = [other_tensor(i, what) if i.index.fqn == name else i for i in items]

    (issue,) = refused(with_items(plans, rank, differ))
    assert (issue.kind, issue.fqn, issue.ranks) == ("conflict", name, tuple(holders))
    other = {"dtype": "int16", "value": "a non-tensor value"}.get(what, "of shape")
    assert f"rank {rank}: " in issue.message
    assert other in issue.message
    assert f"{data.properties.dtype} of shape {list(data.size)}" in issue.message


# Named cases


def test_all_faults_of_a_call_are_told_together_by_name():
    plans = plans_of(
        [
            item("bounds", (2,), (3,), (4,)),
            item("clash", (0,), (2,), (4,)),
            item("dtype", (0,), (4,), (4,)),
            item("fine", (0,), (4,), (4,)),
            item("gap", (0,), (1,), (4,)),
        ],
        [
            item("clash", (1,), (3,), (4,)),
            item("dtype", (0,), (4,), (4,), "int8"),
            item("gap", (3,), (1,), (4,)),
        ],
    )
    issues = refused(plans)
    assert [(i.kind, i.fqn, i.ranks, i.region) for i in issues] == [
        ("out_of_bounds", "bounds", (0,), ((2,), (3,))),
        ("overlap", "clash", (0, 1), ((1,), (1,))),
        ("conflict", "dtype", (0, 1), None),
        ("gap", "gap", (0, 1), ((1,), (2,))),
    ]
    with pytest.raises(PlanError) as caught:
        check(plans)
    for issue in issues:
        assert f"- {issue.message}" in str(caught.value).splitlines()


def test_messages_say_what_who_and_what_to_do():
    gap = plans_of([item("w", (0, 0), (4, 2), (8, 2))], [])
    (issue,) = refused(gap)
    assert "no rank holds rows 4 to 8 of `w` (rank 0" in issue.message
    assert "is a rank or a shard left out?" in issue.message
    clash = plans_of([item("w", (0, 0), (3, 2), (4, 2))], [item("w", (2, 0), (2, 2), (4, 2))])
    (issue,) = refused(clash)
    assert "[0:3, 0:2] and [2:4, 0:2] (ranks 0, 1) share rows 2 to 3" in issue.message
    side = plans_of([item("w", (0,), (4,), (4,))], [item("w", (0,), (4,), (4,), "int8")])
    (issue,) = refused(side)
    assert "rank 0: float32 of shape [4]; rank 1: int8 of shape [4]" in issue.message
    assert "give them different names" in issue.message


def test_replicas_are_no_issue_but_must_not_be_written_twice():
    plan = local_plan({"w": TensorSpec((4,)), "step": 3})
    assert find_issues([plan, plan]) == ()
    with pytest.raises(PlanError, match="add dedup_replicas") as caught:
        global_plan([plan, plan], passes=())
    assert {i.fqn for i in caught.value.issues} == {"w", "step"}
    assert all(i.ranks == (0, 1) for i in caught.value.issues)


def test_an_empty_shard_does_not_swallow_the_real_one_at_its_offset():
    plans = plans_of([item("w", (0,), (0,), (4,))], [item("w", (0,), (4,), (4,))])
    done, metadata = global_plan(plans)
    assert list(metadata.state_dict_metadata["w"].chunks) == [Chunk((0,), (4,))]
    assert [[i.tensor_data.chunk for i in p.items] for p in done] == [[], [Chunk((0,), (4,))]]


def test_chunks_at_one_offset_with_other_sizes_are_a_conflict():
    plans = plans_of([item("w", (0,), (2,), (4,))], [item("w", (0,), (4,), (4,))])
    (issue,) = refused(plans)
    assert (issue.kind, issue.ranks, issue.region) == ("conflict", (0, 1), ((0,), (2,)))


def test_a_tensor_of_which_only_empty_chunks_come_is_one_gap():
    (issue,) = refused(plans_of([item("w", (0,), (0,), (4,))]))
    assert (issue.kind, issue.fqn, issue.region) == ("gap", "w", ((0,), (4,)))


def test_pieces_that_leave_holes_are_refused():
    plans = plans_of([item("w", (0,), (4,), (16,))], [item("w", (12,), (4,), (16,))])
    (issue,) = refused(plans)
    assert (issue.kind, issue.region) == ("gap", ((4,), (8,)))


def test_one_missing_tensor_parallel_rank_is_refused():
    mesh = Mesh(dp=2, tp=2)
    sd = {"w": TensorSpec((4, 4), placements=[Shard(0), Shard(1)])}
    plans = [local_plan(sd, mesh=mesh, rank=rank) for rank in range(3)]
    (issue,) = refused(plans)
    assert issue.region == ((2, 2), (2, 2))
    assert issue.ranks == (0, 1, 2)


def test_a_shape_that_overflows_is_reported_not_wrapped():
    huge = (1 << 40, 1 << 40)
    issues = refused(plans_of([item("w", (0, 0), (1, 1), huge)]))
    assert [(i.kind, i.fqn) for i in issues] == [("too_large", "w")]


def test_broken_worlds_of_many_ranks_are_told_in_few_words():
    plans = [SavePlan([item("w", (2 * i,), (1,), (2_000,))]) for i in range(1_000)]
    issues = find_issues(plans)
    assert len(issues) == 64
    assert issues[-1].message.endswith("(there may be more: only 64 are reported)")
    assert all(len(str(issue)) < 300 for issue in issues)


def test_a_chunk_written_by_many_ranks_is_one_issue_that_names_them_all():
    plan = local_plan({name: TensorSpec((4,)) for name in "abc"})
    with pytest.raises(PlanError) as caught:
        global_plan([plan] * 40, passes=())
    assert [(i.fqn, i.ranks) for i in caught.value.issues] == [(n, tuple(range(40))) for n in "abc"]


def test_a_stray_chunk_does_not_hide_what_else_is_wrong_with_its_tensor():
    plans = plans_of(
        [item("w", (0,), (3,), (4,))], [item("w", (2,), (2,), (4,))], [item("w", (3,), (2,), (4,))]
    )
    assert {i.kind for i in find_issues(plans)} == {"out_of_bounds", "overlap"}


def test_a_fault_in_one_tensor_without_axes_is_not_blamed_on_another():
    plans = plans_of(
        [item("a", (), (), (), "int16"), item("b", (), (), ())], [item("a", (), (), ())]
    )
    (issue,) = refused(plans)
    assert (issue.kind, issue.fqn) == ("conflict", "a")


# Metadata


@given(save_plans())
def test_the_metadata_of_a_good_plan_has_no_issues(plans):
    assert find_issues(global_plan(plans)[1]) == ()


@given(tensor_specs(shape=FULL), st.data())
def test_metadata_with_a_missing_or_moved_chunk_is_reported(spec, data):
    _, good = global_plan(data.draw(save_plans(tensors={"w": spec})))
    entry = good.state_dict_metadata["w"]
    chunks = list(entry.chunks)
    at = data.draw(st.integers(0, len(chunks) - 1))
    gone = attrs.evolve(entry, chunks=chunks[:at] + chunks[at + 1 :])
    issues = find_issues(Metadata({"v": BytesMetadata(), "w": gone}))
    assert {(i.kind, i.fqn) for i in issues} == {("gap", "w")}
    assert sum(math.prod(i.region[1]) for i in issues) == chunks[at].numel
    doubled = attrs.evolve(entry, chunks=[*chunks, chunks[at]])
    issues = find_issues(Metadata({"w": doubled}))
    assert [(i.kind, i.region) for i in issues] == [
        ("conflict", (chunks[at].offsets, chunks[at].sizes))
    ]


def test_a_saved_chunk_outside_the_shape_is_reported():
    entry = TensorMetadata(TensorProperties(), (4,), [Chunk((0,), (5,))])
    (issue,) = find_issues(Metadata({"w": entry}))
    assert (issue.kind, issue.fqn, issue.region) == ("out_of_bounds", "w", ((0,), (5,)))
    other_axes = TensorMetadata(TensorProperties(), (4,), [Chunk((0, 0), (4, 1))])
    (issue,) = find_issues(Metadata({"w": other_axes}))
    assert issue.kind == "out_of_bounds"


def test_every_tensor_that_shares_a_broken_layout_is_named():
    entry = TensorMetadata(TensorProperties(), (4,), [Chunk((0,), (3,))])
    issues = find_issues(Metadata(dict.fromkeys("abc", entry)))
    assert [i.fqn for i in issues] == ["a", "b", "c"]


def test_a_scalar_without_a_chunk_is_not_taken_for_one_with_a_chunk():
    chunks = {"a": [Chunk((), ())], "b": [], "c": [Chunk((), ())] * 2}
    metadata = Metadata({k: TensorMetadata(TensorProperties(), (), v) for k, v in chunks.items()})
    assert [len(e.chunks) for e in metadata.state_dict_metadata.values()] == [1, 0, 2]
    issues = find_issues(metadata)
    assert [(i.kind, i.fqn) for i in issues] == [("gap", "b"), ("conflict", "c")]
