"""`show`: what each pass of a planner does, against a comparison of records one by one."""

import pickle
from time import perf_counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    PlanError,
    PlannerTrace,
    Replicate,
    SavePlan,
    Shard,
    TensorSpec,
    annotate,
    cast,
    chain,
    dedup_replicas,
    drop,
    global_plan,
    load_plan,
    local_plan,
    pad,
    permute,
    rename,
    select,
    show,
    split,
    split_chunks,
    split_replicas,
    stack,
    traced,
    trim,
    where,
    world_pass,
    world_plans,
)
from shardplan.planning.passes import Stages
from shardplan.planning.reports import Amount
from shardplan.planning.testing.strategies import save_plans

STEPS = {
    "rename": rename(lambda name: f"x.{name}"),
    "some": where("*a*", rename(lambda name: f"y.{name}"), required=False),
    "cast": cast("bfloat16", required=False),
    "annotate": annotate(lambda plan: {"count": len(plan.items)}),
    "drop": drop("*b*", required=False),
    "chunks": split_chunks(16),
    "replicas": split_replicas(1),
    "dedup": dedup_replicas(),
}
planners = st.lists(st.sampled_from(sorted(STEPS)).map(STEPS.__getitem__), max_size=4)


def plan_of(**specs):
    return local_plan({name: TensorSpec(*spec) for name, spec in specs.items()})


def amount(items):
    items = list(items)
    names = {item.index.fqn for item in items}
    return Amount(len(items), len(names), sum(item.nbytes for item in items))


def made_of(rank, item):
    """Say of which box of the state dict an item is made."""
    box = item.tensor_data and item.tensor_data.chunk
    return rank, item.source.fqn, item.source.offset, box


def compared(before, after):
    """Compare items one by one: which were renamed, which cast, which left alone, which are new."""
    old = {made_of(r, i): i for r, plan in enumerate(before) for i in plan.items}
    new = {made_of(r, i): i for r, plan in enumerate(after) for i in plan.items}
    both = [(old[place], new[place]) for place in old.keys() & new.keys()]
    renamed = [a for a, b in both if a.index.fqn != b.index.fqn]
    recast = [a for a, b in both if dtype(a) != dtype(b)]
    alone = [a for a, b in both if a == b]
    gone = [old[place] for place in old.keys() - new.keys()]
    return {
        "renamed": amount(renamed), "cast": amount(recast), "left alone": amount(alone),
    }, amount(gone).items  # fmt: skip


def dtype(item):
    return item.tensor_data and item.tensor_data.properties.dtype


@given(save_plans(), planners)
def test_plans_go_through_the_passes_as_without_a_trace(plans, planner):
    done, trace = traced(planner, plans)
    assert done == chain(*planner)(plans)
    assert [step.step for step in trace.steps] == list(map(repr, planner))
    assert show(planner, plans) == trace
    assert hash(pickle.loads(pickle.dumps(trace))) == hash(trace)


@given(save_plans(), planners)
def test_a_planner_that_runs_in_two_stages_has_the_trace_of_both(plans, planner):
    stages = Stages.of(planner)
    own, first = traced(stages.own, plans)
    done, second = traced(stages.rest, own)
    assert first + second == show(planner, plans)
    assert done == chain(*planner)(plans)


@given(save_plans(), planners)
def test_what_goes_in_comes_out_or_is_named(plans, planner):
    done, trace = traced(planner, plans)
    for step, following in zip(trace.steps, trace.steps[1:], strict=False):
        assert step.after == following.before
    if trace.steps:
        assert trace.steps[0].before == amount(i for plan in plans for i in plan.items)
        assert trace.steps[-1].after == amount(i for plan in done for i in plan.items)


@given(save_plans(), st.sampled_from(sorted(STEPS)))
def test_items_that_are_made_of_the_same_box_are_compared(plans, name):
    step = STEPS[name]
    (found,) = show(step, plans).steps
    wanted, lost = compared(plans, step(plans))
    changes = {change.kind: change for change in found.changes}
    for kind, some in wanted.items():
        if name not in ("chunks", "replicas"):  # what is cut there keeps its name and dtype
            assert (changes[kind].before if kind in changes else Amount()) == some
    told = [changes[k].before.items for k in ("cut", "dropped", "left to others") if k in changes]
    assert sum(told) == lost


@given(save_plans(), st.randoms())
def test_the_order_of_items_is_no_change(plans, random):
    def shuffled(plans):
        (plan,) = plans
        order = list(range(len(plan.items)))
        random.shuffle(order)
        return (attrs.evolve(plan, items=[plan.items[n] for n in order]),)

    (step,) = show(shuffled, plans).steps
    assert {change.kind for change in step.changes} <= {"left alone"}


def kinds(step, *plans):
    (trace,) = show(step, plans).steps
    return {c.kind: c.names for c in trace.changes}


def test_each_kind_of_change_is_named():
    plan = plan_of(a=((4,),), b=((4,), "int64"), c=((2,),))
    assert kinds(rename({"a": "x"}), plan) == {"renamed": ("a → x",), "left alone": ("b", "c")}
    assert kinds(cast("float16"), plan) == {
        "cast": ("a: float32 → float16", "c: float32 → float16"),
        "left alone": ("b",),
    }
    assert kinds(drop("a"), plan) == {"dropped": ("a",), "left alone": ("b", "c")}
    assert kinds(select("a"), plan) == {"dropped": ("b", "c"), "left alone": ("a",)}
    assert kinds(split_chunks(8), plan) == {"cut": ("a", "b"), "left alone": ("c",)}


def test_a_replica_is_left_to_others_and_not_dropped():
    plan = plan_of(a=((4,),), b=((4,),))
    assert kinds(dedup_replicas(), plan, plan)["left to others"] == ("a", "b")
    assert kinds(split_replicas(1), plan, plan) == {"cut": ("a", "b")}
    few = kinds(split_replicas(8), plan, plan, plan)
    assert few == {"cut": ("a", "b"), "left to others": ("a", "b")}


def test_a_shard_that_no_other_rank_holds_is_dropped():
    specs = {"w": TensorSpec((4,), "float32", [Shard(0)])}

    def forget(plans):
        return plans if plans[0].rank == 0 else (SavePlan([]),)

    found = kinds(forget, *world_plans(specs, Mesh(dp=2)))
    assert found == {"dropped": ("w",), "left alone": ("w",)}


def test_names_that_become_one_are_fused_and_one_that_becomes_several_is_split():
    plans = plan_of(a=((4,),)), plan_of(b=((4,),))
    assert kinds(rename(lambda _: "w"), *plans) == {"fused": ("a → w", "b → w")}

    def by_rank(plans):
        (plan,) = plans
        return rename(lambda _: f"w{plan.rank}")(plans)

    assert kinds(by_rank, plans[0], plans[0]) == {"split": ("a → w0", "a → w1")}


def test_another_shape_in_the_checkpoint_is_reshaped():
    def one_axis(plans):
        (plan,) = plans
        (item,) = plan.items
        data = item.tensor_data
        flat = attrs.evolve(data, size=(3, 4))
        return (attrs.evolve(plan, items=[attrs.evolve(item, tensor_data=flat)]),)

    assert kinds(one_axis, plan_of(w=((2, 4),))) == {"reshaped": ("w: [2, 4] → [3, 4]",)}


def test_what_a_pass_adds_is_named():
    def stray(plans):
        return (SavePlan([*plans[0].items, *plan_of(z=((1,),)).items]),)

    assert kinds(stray, plan_of(w=((2,),))) == {"added": ("z",), "left alone": ("w",)}


def test_data_that_a_pass_adds_to_plans_is_named():
    (step,) = show(annotate(lambda plan: {"host": "a"}), [local_plan({"m": {"w": 1}})]).steps
    assert step.notes == ("host",)
    (step,) = show(rename({"m.w": "w"}), [local_plan({"m": {"w": 1}})]).steps
    assert step.notes == ()


def test_ranks_and_scopes_are_said():
    @world_pass
    def everyone(plans):
        return plans

    own, all_plans = show([cast("int8", required=False), everyone], [SavePlan([])] * 3).steps
    assert (own.scope, all_plans.scope) == ("rank", "world")
    assert own.ranks == (0, 1, 2)
    alone = attrs.evolve(SavePlan([]), rank=5, world_size=8)
    assert traced(chain(rename(str.upper)), [alone])[1].steps[0].ranks == (5,)


def test_a_pass_that_fails_is_numbered():
    with pytest.raises(PlanError) as caught:
        show([cast("float16"), drop("nothng")], [plan_of(nothing=((2,),))])
    assert caught.value.__notes__ == ["in pass 2 of 2: drop('nothng')"]


def test_no_pass_and_no_plan_can_be_shown():
    assert show([], [SavePlan([])]) == PlannerTrace()
    assert str(show([], [])) == "No passes: plans stay as they are"
    (step,) = show(chain(split_chunks(8)), []).steps
    assert step.before == step.after == Amount()


def test_plans_are_one_per_rank_and_for_a_save():
    plan = plan_of(a=((4,),))
    with pytest.raises(TypeError, match=r"show\(planner, \[plan\]\)"):
        show(cast("int8"), plan)
    with pytest.raises(TypeError, match="plan_diff compares load plans"):
        show(cast("int8"), [load_plan(global_plan([plan])[1], plan)])


def test_it_prints_as_text_and_html():
    plan = plan_of(a=((4,),), **{f"b{n}": ((2,), "int64") for n in range(6)})
    trace = show([cast("float16"), split_chunks(8)], [plan] * 2)
    assert (
        str(trace)
        == """\
2 passes: 14 items, 224 B → 26 items, 208 B
1. cast('float16'): each plan, ranks 0, 1
            items  tensors        bytes  names
in             14        7        224 B
cast            2        1  32 B → 16 B  a: float32 → float16
left alone     12        6        192 B  b0, b1, b2, b3, b4, b5
out            14        7        208 B
2. split_chunks(8): each plan, ranks 0, 1
              items  tensors  bytes  names
in               14        7  208 B
cut         12 → 24        6  192 B  b0, b1, b2, b3, b4, b5
left alone        2        1   16 B  a
out              26        7  208 B"""
    )
    assert "cast(&#x27;float16&#x27;)" in trace._repr_html_()
    assert str(trace.steps[0]).startswith("ranks 0, 1\ncast('float16'): each plan\n")


def test_many_ranks_are_compared_in_a_second():
    specs = {
        f"layer.{n}.w": TensorSpec((4096, 512), "float32", [Shard(0), Replicate()])
        for n in range(1000)
    }
    plans = tuple(world_plans(specs, Mesh(dp=256, tp=2)))
    start = perf_counter()
    trace = show(dedup_replicas(), plans)
    assert perf_counter() - start < 10  # a second on an idle machine
    assert [c.before.items for c in trace.steps[0].changes] == [256_000, 256_000]


def test_shape_passes_are_shown_in_both_frames():
    sd = {"wqkv": TensorSpec((12, 4), "float32", [Shard(0)]), "out": TensorSpec((5, 4))}
    sd |= {f"e.{n}.w": TensorSpec((2, 2)) for n in range(2)}
    plans = [local_plan(sd, mesh=Mesh(tp=2), rank=rank) for rank in range(2)]
    planner = [
        split("wqkv", into={"q": 8, "k": 2, "v": 2}, axis=0),
        stack("e.#.w", into="e.w", axis=0),
        permute("out", (1, 0)),
        pad("out", axis=1, to=8),
        trim("out", axis=1, to=4),
    ]
    steps = show(planner, plans).steps
    found = [{c.kind: c.names for c in step.changes if c.kind != "left alone"} for step in steps]
    assert found == [
        {"split": ("wqkv → k", "wqkv → q", "wqkv → v")},
        {"fused": ("e.0.w → e.w", "e.1.w → e.w")},
        {"reshaped": ("out: [5, 4] → [4, 5]",)},
        {"reshaped": ("out: [4, 5] → [4, 8]",), "filled": ("out",)},
        {"reshaped": ("out: [4, 8] → [4, 4]",), "cut": ("out",), "dropped": ("out",)},
    ]
    assert [c.after.items for c in steps[0].changes] == [4, 6]


def test_a_square_that_is_turned_is_reshaped():
    plan = plan_of(w=((3, 3),))
    assert kinds(permute("w", (1, 0)), plan) == {"reshaped": ("w",)}
    assert kinds(split_chunks(12), *permute("w", (1, 0))((plan,))) == {"cut": ("w",)}


def test_padding_is_known_again_after_the_next_pass():
    (plan,) = pad("w", axis=0, to=6)((plan_of(w=((4, 2),)),))
    assert kinds(rename({"w": "x"}), plan) == {"renamed": ("w → x",)}
    assert kinds(split_chunks(8), plan) == {"cut": ("w",)}
    assert kinds(dedup_replicas(), plan, plan)["left to others"] == ("w",)


def test_layers_are_listed_once_and_lines_stay_short():
    layers = {f"model.layers.{n}.self_attn.q_proj.weight": ((4,),) for n in range(40)}
    others = {f"{letter * 20}.weight": ((4,),) for letter in "bcdefg"}
    trace = show(cast("float16"), [plan_of(**layers, **others)])
    (change,) = trace.steps[0].changes
    assert len(change.names) == 46  # the record has them all
    (line,) = (line for line in str(trace).splitlines() if line.startswith("cast"))
    names = ", ".join(f"{letter * 20}.weight" for letter in "bc")
    assert line.endswith(f"  {names}, …: float32 → float16 (46)")
    renamed = show(
        rename({f"model.layers.{n}.self_attn.q_proj.weight": f"q.{n}" for n in range(40)}),
        [plan_of(**layers)],
    )
    assert "model.layers.#.self_attn.q_proj.weight → q.# (40)" in str(renamed)


def test_a_pass_of_thousands_of_characters_begins_its_table_and_is_whole_in_the_record():
    names = {f"layers.{n}.w": f"model.layers.{n}.weight" for n in range(100)}
    trace = show(rename(names), [plan_of(**dict.fromkeys(names, ((2,),)))])
    (step,) = trace.steps
    assert step.step == repr(rename(names))
    assert max(map(len, str(trace).splitlines())) < 400
    assert "1. rename({'layers.0.w': 'model.layers.0.weight', 'layers.1.w'" in str(trace)
