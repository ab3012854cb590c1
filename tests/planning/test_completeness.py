"""The state dict's side of a plan: all that ranks hold is saved or filled once, or reported."""

import itertools
import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Chunk,
    Mesh,
    MetadataIndex,
    PlanError,
    Replicate,
    SavePlan,
    Shard,
    TensorSpec,
    TensorWriteData,
    assert_all_saved,
    cast,
    chain,
    decode_plan,
    dedup_replicas,
    drop,
    encode_plan,
    find_issues,
    fingerprint,
    global_plan,
    load_plan,
    local_plan,
    rename,
    select,
    split_chunks,
    split_replicas,
    world_pass,
    world_plans,
)
from shardplan.planning.sources import dropped_names, source_issues
from shardplan.planning.testing.strategies import save_plans

D = 4


def split_qkv(plans):
    """Cut a fused tensor in three, as somebody might who does not know that sources stay."""
    done = []
    for plan in plans:
        items = []
        for item in plan.items:
            if not item.index.fqn.endswith("wqkv.weight"):
                items.append(item)
                continue
            data = item.tensor_data
            size = (D, data.size[1])
            third = TensorWriteData(Chunk((0, 0), size), data.properties, size)
            for name in "qkv":
                index = MetadataIndex(item.index.fqn.replace("wqkv", f"w{name}"))
                items.append(attrs.evolve(item, index=index, tensor_data=third))
        done.append(attrs.evolve(plan, items=items))
    return tuple(done)


FUSED = {"attn.wqkv.weight": TensorSpec((3 * D, 2)), "step": 1}


def kinds(issues):
    return {(issue.kind, issue.fqn, issue.ranks, issue.region) for issue in issues}


@pytest.mark.parametrize(
    "run", [split_qkv, chain(split_qkv), [split_qkv], [drop("step"), split_qkv]]
)
def test_a_pass_that_saves_one_third_three_times_is_refused_with_key_rank_and_region(run):
    plans = [local_plan(FUSED)]
    with pytest.raises(PlanError) as caught:
        global_plan(plans, run)
    name = "attn.wqkv.weight"
    first, rest = ((0, 0), (4, 2)), ((4, 0), (8, 2))
    assert kinds(caught.value.issues) == {
        ("doubled", name, (0,), first),
        ("left_out", name, (0,), rest),
    }
    names = ", ".join(f"`attn.w{n}.weight`" for n in "qkv")
    assert f"rows 0 to 4 would be saved 3 times by rank 0, as {names}" in str(caught.value)
    assert "rows 4 to 12 would not be saved (held by rank 0)" in str(caught.value)


def test_the_same_fault_is_found_without_a_save_whoever_ran_the_pass():
    found = find_issues(split_qkv((local_plan(FUSED),)))
    assert {issue.kind for issue in found} == {"doubled", "left_out"}


def test_a_load_through_that_pass_is_refused_before_anything_is_filled():
    thirds = {f"attn.w{n}.weight": TensorSpec((D, 2)) for n in "qkv"}
    _, metadata = global_plan([local_plan(thirds)])
    (wanted,) = split_qkv((local_plan({"attn.wqkv.weight": TensorSpec((3 * D, 2))}),))
    with pytest.raises(
        PlanError, match=r"rows 0 to 4 would be filled 3 times on rank 0, from `attn.w"
    ):
        load_plan(metadata, wanted, strict=False)


def test_what_a_pass_drops_whole_is_reported_and_no_fault():
    plans = [local_plan({"a": TensorSpec((2,)), "b": TensorSpec((2,)), "c": 3})] * 2
    done, metadata = global_plan(plans, [select("a", "c"), dedup_replicas()])
    assert dropped_names(done) == ("b",) == assert_all_saved(plans, done)
    (wanted,) = drop("c")(plans[:1])
    assert load_plan(metadata, wanted, strict=False).report.dropped == ("c",)
    assert load_plan(metadata, wanted, strict=False).report.missing == ("b",)


def lose_rows(plans):
    """Shrink every tensor to the rows before its last one, in both frames of the checkpoint."""
    done = []
    for plan in plans:
        items = []
        for item in plan.items:
            data = item.tensor_data
            rows = data.size[0] - 1
            sizes = (min(data.chunk.sizes[0], rows - data.chunk.offsets[0]), *data.chunk.sizes[1:])
            if sizes[0] > 0:
                data = attrs.evolve(
                    data, chunk=Chunk(data.chunk.offsets, sizes), size=(rows, *data.size[1:])
                )
                items.append(attrs.evolve(item, tensor_data=data))
        done.append(attrs.evolve(plan, items=items))
    return tuple(done)


@pytest.mark.parametrize("placed", [[Shard(0)], [Replicate()], [Shard(1)]], ids=str)
def test_a_tensor_that_is_saved_in_part_is_refused_with_those_who_hold_the_rest(placed):
    plans = world_plans({"w": TensorSpec((6, 4), "float32", placed)}, Mesh(dp=2))
    with pytest.raises(PlanError, match=r"rows? 5 to 6 would not be saved|\[5:6") as caught:
        global_plan(plans, [lose_rows, dedup_replicas()])
    regions = {(issue.kind, issue.ranks) for issue in caught.value.issues}
    everyone = (
        {(0, 1)} if placed == [Replicate()] else {(1,)} if placed == [Shard(0)] else {(0,), (1,)}
    )
    assert regions == {("left_out", ranks) for ranks in everyone}


def moved(item, name, **source):
    source = attrs.evolve(item.source, **source)
    return attrs.evolve(item, index=attrs.evolve(item.index, fqn=name), source=source)


FROM_NOWHERE = {
    "another name": lambda item: moved(item, "w", fqn="x"),
    "another shard": lambda item: moved(item, "w", offset=(0, 2)),
    "outside": lambda item: attrs.evolve(
        item,
        index=MetadataIndex("w"),
        tensor_data=attrs.evolve(item.tensor_data, chunk=Chunk((0, 0), (9, 2)), size=(9, 2)),
    ),
}


@pytest.mark.parametrize("how", FROM_NOWHERE)
def test_items_from_where_the_rank_holds_nothing_are_refused(how):
    plan = local_plan({"w": TensorSpec((4, 2))})
    broken = attrs.evolve(plan, items=[FROM_NOWHERE[how](plan.items[0])])
    with pytest.raises(PlanError) as caught:
        global_plan([broken])
    assert "unheld" in {issue.kind for issue in caught.value.issues}
    assert all(issue.ranks == (0,) for issue in caught.value.issues)


def test_a_value_under_two_names_is_refused_like_an_element():
    def both(plans):
        (plan,) = plans
        return (attrs.evolve(plan, items=[*plan.items, moved(plan.items[0], "again")]),)

    for held in (7, TensorSpec((3,)), TensorSpec(())):
        with pytest.raises(PlanError, match=r"`v` of the state dict: .* would be saved 2 times"):
            global_plan([local_plan({"v": held})], both)


def test_stages_may_hold_other_tensors_of_one_name_and_shape():
    """Pipeline stages count their layers from 0; a pass that knows its rank tells them apart."""

    def staged(plans):
        shift = 2 * plans[0].rank
        return rename(lambda name: f"layers.{int(name[7:]) + shift}")(plans)

    plans = [local_plan({"layers.0": TensorSpec((2,)), "layers.1": TensorSpec((3,))})] * 2
    done, metadata = global_plan(plans, [staged, dedup_replicas()])
    assert list(metadata.state_dict_metadata) == [f"layers.{i}" for i in range(4)]
    assert assert_all_saved(plans, done) == ()


def test_what_is_held_stays_known_through_a_pass_that_makes_plans_anew():
    plan = local_plan({"w": TensorSpec((4,)), "b": TensorSpec((4,))})
    (done,) = chain(lambda plans: tuple(SavePlan(p.items[:1]) for p in plans))((plan,))
    assert done.held is plan.items
    assert dropped_names([done]) == ("w",)


def test_what_is_held_travels_only_if_a_pass_changed_something():
    plan = local_plan({f"layer.{i}": TensorSpec((4,)) for i in range(100)})
    plan = attrs.evolve(plan, rank=3, world_size=8)
    same, renamed = decode_plan(encode_plan(plan)), chain(rename(str.upper))((plan,))[0]
    back = decode_plan(encode_plan(renamed))
    assert same.held is same.items
    assert (same.rank, same.world_size) == (back.rank, back.world_size) == (3, 8)
    assert back.held == plan.items
    assert len(encode_plan(plan)) < len(encode_plan(SavePlan(plan.items))) + 100
    assert fingerprint(plan) == fingerprint(SavePlan(plan.items))
    assert plan == SavePlan(plan.items)
    assert hash(plan) == hash(SavePlan(plan.items))


# --- any pass, any world: the columns say what the oracle says


@st.composite
def mangled(draw):
    """Draw what ranks hold, and what some careless pass makes of it: often wrong, often right."""
    held = draw(save_plans(max_tensors=2))
    plans = []
    for plan in held:
        items = list(plan.items)
        for at in sorted(draw(st.sets(st.integers(0, 2), max_size=2)), reverse=True):
            if at < len(items):
                items[at : at + 1] = draw(changed(items[at]))
        plans.append(attrs.evolve(plan, items=items, held=plan.items))
    if draw(st.booleans()):
        names = sorted({item.source.fqn for plan in held for item in plan.items})
        gone = set(draw(st.lists(st.sampled_from(names), max_size=1))) if names else set()
        plans = [
            attrs.evolve(p, items=[i for i in p.items if i.source.fqn not in gone]) for p in plans
        ]
    step = draw(st.sampled_from([chain(), dedup_replicas(), split_replicas(1), split_chunks(16)]))
    return held, step(tuple(plans))


@st.composite
def changed(draw, item):
    """Draw what becomes of one item: gone, doubled, cut, cut and doubled, renamed."""
    how = draw(st.sampled_from(["gone", "doubled", "part", "renamed", "stray"]))
    if how == "gone":
        return []
    if how == "doubled":
        return [item, moved(item, "again")]
    if how == "stray":
        return [moved(item, item.index.fqn, fqn=draw(st.sampled_from("ab")))]
    data = item.tensor_data
    if how == "renamed" or data is None or not data.size:
        return [moved(item, "new")]
    sizes = draw(st.tuples(*(st.integers(1, n) if n else st.just(0) for n in data.chunk.sizes)))
    part = attrs.evolve(data, chunk=Chunk(data.chunk.offsets, sizes))
    return [attrs.evolve(item, tensor_data=part)] * draw(st.integers(1, 2))


def is_complete(held, plans):
    try:
        return True, assert_all_saved(held, plans)
    except AssertionError:
        return False, ()


@given(mangled())
def test_a_plan_is_refused_just_when_some_element_is_lost_doubled_or_made_up(case):
    held, plans = case
    complete, dropped = is_complete(held, plans)
    assert (not source_issues(plans)) == complete
    if complete:
        assert dropped_names(plans) == dropped


@given(save_plans(), st.data())
def test_shipped_pipelines_save_all_that_is_held(plans, data):
    steps = st.sampled_from(
        [rename(str.upper), cast("bfloat16", required=False), split_chunks(16), split_replicas(1)]
    )
    planner = [*data.draw(st.lists(steps, max_size=4)), dedup_replicas()]
    done, _ = global_plan(plans, planner)
    assert assert_all_saved(plans, done) == () == dropped_names(done)
    assert find_issues(done) == ()


@world_pass
def first_holder_writes(plans):
    """Do by hand what dedup_replicas does."""
    seen, done = set(), []
    for plan in plans:
        new = [i for i in plan.items if (i.index, i.tensor_data) not in seen]
        seen.update((i.index, i.tensor_data) for i in new)
        done.append(attrs.evolve(plan, items=new))
    return tuple(done)


@given(save_plans())
def test_a_world_pass_may_choose_who_writes(plans):
    done, _ = global_plan(plans, first_holder_writes)
    assert assert_all_saved(plans, done) == ()


@pytest.mark.parametrize("placed", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_the_check_is_quick_along_whatever_axis_tensors_are_cut(placed):
    specs = {f"w{i}": TensorSpec((64, 64), "float32", placed) for i in range(1000)}
    plans = chain(rename(str.upper), dedup_replicas())(tuple(world_plans(specs, Mesh(dp=64))))
    start = time.perf_counter()
    assert source_issues(plans) == []
    assert time.perf_counter() - start < 2  # 0.1 s on a machine that has nothing else to do


def test_boxes_of_a_shard_may_be_cut_in_any_way():
    plan = local_plan({"w": TensorSpec((6, 6))})
    item = plan.items[0]
    boxes = [Chunk(o, s) for o, s in itertools.product([(0, 0)], [(3, 6)])]
    boxes += [Chunk((3, 0), (3, 2)), Chunk((3, 2), (3, 4))]
    items = [
        attrs.evolve(
            item,
            index=MetadataIndex("w"),
            tensor_data=attrs.evolve(item.tensor_data, chunk=box),
        )
        for box in boxes
    ]
    assert find_issues(attrs.evolve(plan, items=items)) == ()
    assert kinds(find_issues(attrs.evolve(plan, items=items[:2]))) == {
        ("gap", "w", (0,), ((3, 2), (3, 4))),
        ("left_out", "w", (0,), ((3, 2), (3, 4))),
    }


def test_of_one_source_a_bounded_number_of_items_that_are_not_held_is_reported():
    plan = local_plan({"w": TensorSpec((500,))})
    (item,) = plan.items
    chunks = [Chunk((i,), (1,)) for i in range(500)]
    elsewhere = attrs.evolve(item.source, offset=(7,))
    data = (attrs.evolve(item.tensor_data, chunk=chunk) for chunk in chunks)
    items = [
        attrs.evolve(
            item,
            index=attrs.evolve(item.index, offset=one.chunk.offsets),
            tensor_data=one,
            source=elsewhere,
        )
        for one in data
    ]
    issues = source_issues([attrs.evolve(plan, items=items)])
    assert 0 < sum(issue.kind == "unheld" for issue in issues) <= 64
