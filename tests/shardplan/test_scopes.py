"""One planner, one meaning: passes are given the same plans wherever they run."""

import importlib.util
import re
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

import shardplan
from shardplan import _restore
from shardplan._agree import agree
from shardplan._comm import Place
from shardplan._offers import Begun, PlanCache
from shardplan._replicas import COMPARED_BYTES
from shardplan._report import Stopwatch
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io.execute import stored_chunks
from shardplan.io.formats.registry import find_format, open_source
from shardplan.io.stores.base import open_store
from shardplan.planning import (
    Chunk,
    Mesh,
    MetadataIndex,
    PlanError,
    Replicate,
    SavePlan,
    Shard,
    TensorSpec,
    annotate,
    assert_all_saved,
    assert_read_once,
    assert_written_once,
    cast,
    chain,
    dedup_replicas,
    drop,
    find_issues,
    global_load_plan,
    global_plan,
    load_plan,
    local_plan,
    named_chain,
    on_ranks,
    partition,
    permute,
    read_on,
    rename,
    select,
    share_reads,
    split_chunks,
    split_reads,
    split_replicas,
    stack,
    world_pass,
    world_plans,
)
from shardplan.planning.passes.base import Stages, scope_of
from shardplan.planning.sources import dropped_names, with_replicas
from shardplan.planning.storage import plan_target
from shardplan.planning.testing.strategies import save_plans
from shardplan.torch_dcp import from_torch, planners, to_torch

SPEC = importlib.util.spec_from_file_location(
    "ranks_parts", Path(__file__).parents[1] / "ranks" / "parts.py"
)
parts = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(parts)


def fresh(name):
    store = open_store(f"memory://scopes/{name}")
    store.delete(store.list())
    return store


def name_rank(plans):
    """Give every name the rank that holds it; a rank pass, as any plain function."""
    (plan,) = plans
    return rename(lambda name: f"{name}@{plan.rank}of{plan.world_size}")(plans)


def odd_ranks_turn(plans):
    """List the items of every other rank backwards."""
    (plan,) = plans
    return (attrs.evolve(plan, items=plan.items[::-1]),) if plan.rank % 2 else plans


@world_pass
def spare_first(plans):
    """Take from rank 0 what others hold too, as the notebook about planners does."""

    def same(item):
        return item.index.fqn, item.tensor_data

    held = {same(item) for plan in plans[1:] for item in plan.items}
    kept = [item for item in plans[0].items if same(item) not in held]
    return attrs.evolve(plans[0], items=kept), *plans[1:]


@world_pass
def count_ranks(plans):
    """Name every tensor after the number of ranks that hold some of it."""
    holders = {}
    for plan in plans:
        for name in {item.index.fqn for item in plan.items}:
            holders[name] = holders.get(name, 0) + 1
    return rename(lambda name: f"{name}x{holders.get(name, 0)}")(plans)


def has_a(name):
    return "a" if "a" in name else "b"


STEPS = {
    "rename": rename(lambda name: f"x.{name}"),
    "cast": cast("bfloat16", required=False),
    "drop": drop("*b*", required=False),
    "annotate": annotate(lambda plan: {"rank": plan.rank, "of": plan.world_size}),
    "split_chunks": split_chunks(16),
    "odd_ranks_turn": odd_ranks_turn,
    "name_rank": name_rank,
    "partition": partition(has_a, {"a": [split_chunks(8), cast("float64")], "b": odd_ranks_turn}),
    "world partition": partition(has_a, {"a": split_replicas(4), "b": rename(str.title)}),
    "split_replicas": split_replicas(4),
    "dedup": dedup_replicas(),
    "lowest": dedup_replicas(prefer="lowest_rank"),
    "spare_first": spare_first,
    "count_ranks": count_ranks,
    "list": [odd_ranks_turn, rename(lambda name: name + "!")],
}
planners_of = st.lists(st.sampled_from(sorted(STEPS)), max_size=4)
LAYOUTS = st.sampled_from(["rows", "columns", "replicated", "halves", "uneven", "mixed"])


def whole_state():
    return {
        "a": torch.arange(24.0).view(6, 4),
        "b": torch.arange(8.0),
        "ab": torch.arange(6.0).view(3, 2),
        "step": 7,
    }


def seen(plans):
    """Return what is written, by rank, whatever memory it comes from."""
    return [[(i.index, i.tensor_data, i.source.fqn) for i in plan.items] for plan in plans]


def saved_plans(states, planner):
    """Return what each rank writes in a save."""
    watch, caches = Stopwatch, [PlanCache() for _ in states]

    def fn(comm):
        rank = comm.rank
        own = {"planner": planner, "watch": watch(), "cache": caches[rank]}
        begun = Begun(states[rank], "here")
        return agree(comm, lambda: begun, **own).agreement.plan

    return run_ranks(len(states), fn, timeout=60)


def torch_plans(states, planner, monkeypatch):
    """Return what each rank writes where torch saves."""
    own = [shardplan.as_torch_save_planner(planner) for _ in states]
    local = []
    for rank, (one, state) in enumerate(zip(own, states, strict=True)):
        place = planners.Place(rank, len(states))
        monkeypatch.setattr(planners, "_place_of", lambda group, place=place: place)
        one.set_up_planner(state)
        local.append(one.create_local_plan())
    return [from_torch(plan) for plan in own[0].create_global_plan(local)[0]]


@example(["name_rank"], 2, "rows")  # refused
@example(["split_replicas", "rename"], 3, "mixed")
@given(planners_of, st.integers(1, 4), LAYOUTS)
def test_a_planner_gives_equal_plans_through_save_global_plan_and_torch_s_planner(
    names, world, layout
):
    """Or all of them refuse it: shards that every rank names after itself are not whole."""
    planner = [STEPS[name] for name in names]
    states = [parts.part(whole_state(), layout, world, rank) for rank in range(world)]
    held = [local_plan(state) for state in states]
    plans = planned(lambda: global_plan(held, chain(planner, dedup_replicas()))[0])
    assert planned(lambda: saved_plans(states, planner)) == plans
    with pytest.MonkeyPatch.context() as patch:
        assert planned(lambda: torch_plans(states, planner, patch)) == plans
    event("refused" if isinstance(plans, set) else "planned")
    if isinstance(plans, list):
        assert_all_saved(held, plans)


def test_in_torch_s_save_a_pass_matches_tensors_of_which_a_rank_holds_no_element(monkeypatch):
    """Of three rows, the last of four ranks holds none."""
    planner = [stack("e.#", "e"), permute("w", (1, 0))]
    whole = {"w": torch.arange(6.0).view(3, 2), "e.0": torch.ones(4), "e.1": torch.ones(4)}
    states = [parts.part(whole, "rows", 4, rank) for rank in range(4)]
    plans, _ = global_plan(map(local_plan, states), [*planner, dedup_replicas()])
    assert torch_plans(states, planner, monkeypatch) == list(plans)


def planned(run):
    """Return the plans, or the kinds and keys of what is wrong if there is no correct one."""
    try:
        return list(run())
    except PlanError as error:
        return refused(error)
    except CheckpointError as error:
        if {failure.type for failure in error.failures} != {"PlanError"}:
            raise
        return refused(error.own)


def refused(error):
    return {(issue.kind, issue.fqn) for issue in error.issues}


@given(planners_of, st.integers(1, 4), st.sampled_from([[Shard(0)], [Shard(1)], [Replicate()]]))
def test_a_planner_gives_equal_plans_through_convert_and_global_plan(names, world, placed):
    planner, mesh, store = [STEPS[name] for name in names], Mesh(dp=world), fresh("convert")
    shardplan.save(whole_state(), store)
    placements = {"a": placed, "b": [Replicate()], "ab": placed}
    specs = {
        name: TensorSpec(value.shape, "float32", placements[name])
        for name, value in whole_state().items()
        if name in placements
    }
    passes, options = chain(planner, dedup_replicas()), {"mesh": mesh, "placements": placements}
    source = open_source(store)
    expected = planned(lambda: [global_plan(world_plans(specs | {"step": 7}, mesh), passes)])
    into, stored = find_format("safetensors"), stored_chunks(source)
    target = partial(plan_target, source.metadata, into, stored, planner=planner)
    found = planned(lambda: [target(**options)])
    event("refused" if isinstance(expected, set) else "planned")
    if isinstance(expected, set):
        assert found == expected
        return
    ((plans, metadata),), (target,) = expected, found
    assert seen(target.plans) == seen(plans)
    assert target.metadata.state_dict_metadata == metadata.state_dict_metadata
    assert target.dropped == dropped_names(plans)


@given(planners_of, st.integers(1, 3), LAYOUTS)
def test_what_a_planner_saved_the_same_planner_loads(names, world, layout):
    """Or the load says that it cannot know which of several tensors that were replicas is meant."""
    planner, store = [STEPS[name] for name in names], fresh("both ways")
    states = [parts.part(whole_state(), layout, world, rank) for rank in range(world)]
    plans = planned(lambda: global_plan(map(local_plan, states), [*planner, dedup_replicas()])[0])
    assume(isinstance(plans, list))
    dropped = set(dropped_names(plans))

    def save(comm):
        state = states[comm.rank]
        return shardplan.save(state, store, comm=comm, planner=planner, cache=PlanCache())

    def load(comm):
        state = parts.part(whole_state(), layout, world, comm.rank, parts.blank) | {"step": 0}
        try:
            report = shardplan.load(state, store, comm=comm, planner=planner)
        except CheckpointError as error:
            return "fill each element once" in str(error)
        kept = {name: value for name, value in state.items() if name not in dropped}
        assert parts.same(kept, {name: whole_state()[name] for name in kept}) == []
        return set(report.dropped) <= dropped

    for report in run_ranks(world, save, timeout=60):
        assert set(report.dropped) == dropped
    assert run_ranks(world, load, timeout=60) == [True] * world


# --- what passes are given


def test_a_rank_pass_is_given_one_plan_at_a_time_with_its_rank_and_a_world_pass_all():
    given_to = []

    def plain(plans):
        given_to.append([(plan.rank, plan.world_size) for plan in plans])
        return plans

    everyone = world_pass(lambda plans: plain(plans))
    plans = [local_plan({"w": TensorSpec((2,))})] * 3
    global_plan(plans, [plain, everyone, dedup_replicas()])
    assert given_to == [[(0, 3)], [(1, 3)], [(2, 3)], [(0, 3), (1, 3), (2, 3)]]


@pytest.mark.parametrize("mark", [lambda step: step, world_pass], ids=["rank", "world"])
def test_save_load_convert_and_torch_give_a_pass_what_global_plan_gives_it(tmp_path, mark):
    """Of two ranks, where there are two; convert asks for the ranks of its mesh."""
    calls = []

    @mark
    def spy(plans):
        calls.append(tuple((plan.rank, plan.world_size) for plan in plans))
        return plans

    expected = {((0, 2),), ((1, 2),)} if mark is not world_pass else {((0, 2), (1, 2))}
    state, store = {"w": np.ones(4, np.float32)}, fresh("calls")

    def collected(run):
        calls.clear()
        run()
        return set(calls)

    def save(comm):
        shardplan.save(state, store, comm=comm, planner=[spy], overwrite=True, cache=PlanCache())

    def load(comm):
        shardplan.load({"w": torch.zeros(4)}, store, comm=comm, planner=spy)

    uses = [
        lambda: global_plan([local_plan(state)] * 2, [spy, dedup_replicas()]),
        lambda: run_ranks(2, save),
        lambda: run_ranks(2, load),
        lambda: shardplan.convert(store, tmp_path / "b", planner=[spy], mesh=Mesh(dp=2)),
    ]
    assert [collected(use) for use in uses] == [expected] * 4
    with pytest.MonkeyPatch.context() as patch:
        assert collected(lambda: torch_plans([state] * 2, spy, patch)) == expected


def test_shipped_passes_know_their_scope():
    metadata = global_plan([local_plan({"w": TensorSpec((2,))})])[1]
    rank = [rename(str.upper), select("a"), drop("a"), cast("int8"), split_chunks(8), chain()]
    rank += [annotate(len), split_reads(metadata, 8), partition(has_a, {"a": [], "b": drop("b")})]
    world = [dedup_replicas(), split_replicas(), share_reads(metadata), read_on(0), spare_first]
    world += [chain(drop("a"), [split_replicas()]), partition(has_a, {"a": chain(spare_first)})]
    assert {scope_of(step) for step in rank} == {"rank"}
    assert {scope_of(step) for step in world} == {"world"}


def test_a_plain_function_that_looks_for_a_second_plan_is_told_why_there_is_none():
    plans = [local_plan({"w": TensorSpec((2,))})] * 2
    with pytest.raises(IndexError) as caught:
        global_plan(plans, lambda plans: (plans[1], plans[0]))
    assert "given the plan of rank 0 only; mark it with @world_pass" in caught.value.__notes__[0]


def test_named_chains_run_each_step_in_its_scope():
    plans = tuple(world_plans({"w": TensorSpec((2,))}, Mesh(dp=2)))
    done, after = named_chain(who=name_rank, once=[spare_first, dedup_replicas()])(plans)
    assert [[i.index.fqn for i in p.items] for p in after["who"]] == [["w@0of2"], ["w@1of2"]]
    assert done == after["once"]


@given(save_plans())
def test_plans_keep_their_rank_and_what_is_held_whatever_a_pass_makes_anew(plans):
    def anew(plans):
        return tuple(SavePlan(plan.items) for plan in plans)

    steps = [anew, split_chunks(16), world_pass(lambda plans: anew(plans)), name_rank]
    done = chain(steps)(plans)
    assert [(plan.rank, plan.world_size) for plan in done] == [
        (rank, len(plans)) for rank in range(len(plans))
    ]
    assert [plan.holds for plan in done] == [plan.items for plan in plans]


@pytest.mark.parametrize("planner", [7, "cast", {"a": chain()}, [cast("int8"), None, 3]])
def test_what_is_no_planner_is_refused_by_everything_that_takes_one(tmp_path, planner):
    state = {"w": torch.ones(2)}
    shardplan.save(state, tmp_path / "a")
    uses = [
        lambda: global_plan([local_plan(state)], planner),
        lambda: shardplan.save(state, tmp_path / "b", planner=planner),
        lambda: shardplan.load(state, tmp_path / "a", planner=planner),
        lambda: shardplan.convert(tmp_path / "a", tmp_path / "b", planner=planner),
        lambda: shardplan.as_torch_save_planner(planner),
        lambda: shardplan.as_torch_load_planner(planner),
    ]
    for use in uses:
        with pytest.raises(TypeError, match=r"a planner one or a list of them|float8|dtype"):
            use()
    assert not (tmp_path / "b").exists()


# --- the cases that were found


def test_a_pass_that_knows_its_rank_gives_stages_names_of_their_own():
    def staged(plans):
        (plan,) = plans
        shift = 2 * plan.rank

        def moved(name):
            return re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + shift}", name)

        return rename(moved)(plans)

    def state(rank, make=torch.clone):
        return {f"layers.{i}.w": make(torch.full((2,), float(2 * rank + i))) for i in range(2)}

    store = fresh("stages")
    run_ranks(2, lambda comm: shardplan.save(state(comm.rank), store, comm=comm, planner=staged))
    whole = shardplan.restore(store)
    assert {name: value.tolist() for name, value in whole.items()} == {
        f"layers.{i}.w": [i, i] for i in range(4)
    }

    def load(comm):
        mine = state(comm.rank, parts.blank)
        shardplan.load(mine, store, comm=comm, planner=staged)
        return [value.tolist() for value in mine.values()]

    assert run_ranks(2, load) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize("count", [2, 3])
def test_passes_that_captured_their_rank_mean_what_they_say(count):
    """Each rank runs its own pass over its own plan, also where plans could be derived."""
    states = [{"w": torch.full((2,), float(rank))} for rank in range(count)]

    def fn(comm):
        rank = comm.rank
        planner = rename(lambda name: f"{name}.{rank}")
        options = {"planner": planner, "watch": Stopwatch(), "cache": PlanCache()}
        begun = Begun(states[rank], "here")
        return agree(comm, lambda: begun, **options).agreement

    found = run_ranks(count, fn)
    names = [[item.index.fqn for item in agreement.plan.items] for agreement in found]
    assert names == [[f"w.{rank}"] for rank in range(count)]
    assert {agreement.how for agreement in found} == {"gathered"}


@pytest.mark.parametrize("as_world", [False, True], ids=["rank", "world"])
def test_stages_that_are_told_apart_by_a_pass_do_not_count_as_ranks_that_disagree(as_world):
    """What ranks hold alike is compared under the names that the passes give."""

    def by_rank(plans):
        named = (rename(lambda name, r=plan.rank: f"{name}.{r}")((plan,)) for plan in plans)
        return tuple(plan for one in named for plan in one)

    store, planner = fresh("apart"), world_pass(by_rank) if as_world else by_rank

    def fn(comm):
        state = {"w": torch.full((2,), float(comm.rank)), "step": comm.rank}
        shardplan.save(state, store, comm=comm, planner=planner, cache=PlanCache())

    run_ranks(2, fn)
    assert shardplan.restore(store)["w.1"].tolist() == [1, 1]
    assert shardplan.restore(store)["step.0"] == 0


@pytest.mark.parametrize("planner", [None, spare_first, [count_ranks, spare_first]])
def test_replicas_that_differ_are_named_also_if_a_world_pass_would_choose_one(tmp_path, planner):
    def fn(comm):
        state = {"w": torch.full((2,), float(comm.rank)), "step": comm.rank}
        shardplan.save(state, tmp_path, comm=comm, planner=planner, cache=PlanCache())

    with pytest.raises(CheckpointError, match=r"`w\w*` differs between ranks that save it"):
        run_ranks(2, fn)
    assert not (tmp_path / "shardplan.json").exists()


@world_pass
def last_holder_writes(plans):
    """Have the last holder of anything write it, as the docs about planners do."""
    last = {(i.index, i.tensor_data): plan.rank for plan in plans for i in plan.items}
    return tuple(
        attrs.evolve(p, items=[i for i in p.items if last[i.index, i.tensor_data] == p.rank])
        for p in plans
    )


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("planner", [spare_first, last_holder_writes, [count_ranks, spare_first]])
def test_verified_replicas_are_compared_also_if_a_world_pass_gave_them_to_one_rank(
    tmp_path, planner, large
):
    def save(comm, apart):
        tensor = torch.zeros(COMPARED_BYTES if large else 2)
        tensor[-1] = apart * comm.rank
        state = {"w": tensor, "step": 0 if large else apart * comm.rank}
        options = {"planner": planner, "cache": PlanCache(), "verify_replicas": True}
        return shardplan.save(state, tmp_path, comm=comm, **options)

    with pytest.raises(CheckpointError, match=r"`w\w*` differs.*rank 0 against rank 1"):
        run_ranks(2, lambda comm: save(comm, 1))
    assert not (tmp_path / "shardplan.json").exists()
    assert run_ranks(2, lambda comm: save(comm, 0))[0].how == "gathered"


def test_split_replicas_in_a_save_lets_every_holder_write_a_share(tmp_path):
    sd = {"a": torch.ones(6000), "b": torch.ones(2000)}

    def save(comm):
        planner = split_replicas(1000)
        return shardplan.save(sd, tmp_path, comm=comm, planner=planner, cache=PlanCache())

    reports = run_ranks(2, save)
    assert [one.nbytes for one in reports[0].ranks] == [reports[0].nbytes / 2] * 2
    chunks = shardplan.open_checkpoint(tmp_path).metadata.state_dict_metadata["a"].chunks
    assert [chunk.sizes for chunk in chunks] == [(3000,), (3000,)]


def test_a_world_pass_in_a_save_decides_who_writes(tmp_path):
    sd = {f"w{i}": torch.ones(1000) for i in range(8)}

    def save(comm):
        options = {"planner": spare_first, "cache": PlanCache(), "overwrite": True}
        return shardplan.save(sd, tmp_path, comm=comm, **options)

    for _ in range(2):
        (first, second) = run_ranks(2, save)[0].ranks
        assert (first.nbytes, second.nbytes > 32000) == (0, True)


def test_a_world_pass_is_asked_at_every_save_and_a_shipped_one_is_remembered(tmp_path):
    calls, caches = [], [PlanCache(), PlanCache()]

    @world_pass
    def counted(plans):
        calls.append(len(plans))
        return plans

    def save(planner):
        def fn(comm):
            options = {"planner": planner, "cache": caches[comm.rank], "overwrite": True}
            return shardplan.save({"w": torch.ones(2)}, tmp_path, comm=comm, **options).how

        return run_ranks(2, fn)[0]

    assert [save(counted) for _ in range(2)] == ["gathered", "cached"]
    assert calls == [2, 2]
    assert [save(split_replicas()) for _ in range(2)] == ["derived", "cached"]
    assert save(split_replicas(4)) == "derived"


def test_what_is_held_is_part_of_what_a_remembered_plan_depends_on(tmp_path):
    """The same is written both times; the second time something else is left out."""
    cache = PlanCache()

    def save(state):
        options = {"planner": select("a"), "cache": cache, "overwrite": True}
        return shardplan.save(state, tmp_path, **options)

    a = {"a": torch.ones(2)}
    reports = [save(a | {"b": 1}), save(a | {"b": 2}), save(a | {"c": 1})]
    assert [report.dropped for report in reports] == [("b",), ("b",), ("c",)]
    assert [report.how for report in reports] == ["alone", "cached", "alone"]
    assert "not saved, as the planner drops them: c" in repr(reports[2])


def test_what_any_rank_drops_is_reported_on_all_unless_another_saves_it(tmp_path):
    def rank_1_drops(plans):
        return drop("*")(plans) if plans[0].rank == 1 else plans

    def fn(comm):
        state = {"shared": torch.ones(2), f"own.{comm.rank}": torch.ones(2)}
        return shardplan.save(state, tmp_path, comm=comm, planner=rank_1_drops).dropped

    assert run_ranks(2, fn) == [("own.1",)] * 2


@pytest.mark.parametrize("planner", [None, rename(lambda name: f"x.{name}"), [drop("w")]])
def test_an_empty_dict_that_gives_way_to_what_others_have_inside_is_not_dropped(tmp_path, planner):
    def fn(comm):
        inside = {"p": {"m": torch.ones(2)}} if comm.rank else {}
        state = {"optim": inside, "w": torch.ones(2)}
        return shardplan.save(state, tmp_path, comm=comm, planner=planner).dropped

    assert run_ranks(2, fn) == [("w",) if isinstance(planner, list) else ()] * 2


@pytest.mark.parametrize("format", ["safetensors", "dcp", "hf", "torch"])
def test_a_pass_may_leave_out_items_by_slicing_them(tmp_path, format):
    """Which leaves their names in the catalog behind the items."""

    def first(plans):
        return tuple(attrs.evolve(plan, items=plan.items[:1]) for plan in plans)

    state = {"a": torch.ones(2), "b": {"c": torch.ones(2)}}
    report = shardplan.save(state, tmp_path / "a", planner=first, format=format)
    assert report.dropped == ("b.c",)
    assert list(shardplan.restore(tmp_path / "a")) == ["a"]
    found = shardplan.convert(tmp_path / "a", tmp_path / "b", planner=first, format=format)
    assert found.dropped == ()


def test_a_partition_that_renames_can_be_saved_and_knows_no_old_names(tmp_path):
    route = partition(has_a, {"a": chain(), "b": rename({"b": "c"})})
    state = {"a": torch.ones(2), "b": torch.zeros(2)}
    shardplan.save(state, tmp_path, planner=route)
    assert list(shardplan.restore(tmp_path)) == ["a", "c"]
    with pytest.raises(PlanError, match="drop: 'b' matches nothing"):
        global_plan([local_plan(state)], [route, drop("b")])


def test_ranks_whose_world_passes_differ_are_told_so(tmp_path):
    def fn(comm):
        planner = [spare_first] if comm.rank else [split_replicas()]
        shardplan.save({"w": torch.ones(2)}, tmp_path, comm=comm, planner=planner)

    with pytest.raises(CheckpointError, match=r"rank 0: split_replicas\(\); rank 1: spare_first"):
        run_ranks(2, fn)


def test_a_conversion_whose_planner_depends_on_the_process_is_refused(tmp_path):
    shardplan.save({"w": torch.arange(4.0)}, tmp_path / "a")

    def fn(comm):
        rank = comm.rank
        shardplan.convert(
            tmp_path / "a", tmp_path / "b", comm=comm, planner=rename(lambda name: f"{name}.{rank}")
        )

    with pytest.raises(CheckpointError, match="gives processes different plans"):
        run_ranks(2, fn)
    assert not (tmp_path / "b" / "shardplan.json").exists()


def test_a_conversion_says_what_the_planner_dropped(tmp_path):
    shardplan.save({"a": torch.ones(2), "b": torch.ones(2), "n": 1}, tmp_path / "a")
    for format in ("safetensors", "dcp", "hf", "torch"):
        report = shardplan.convert(
            tmp_path / "a", tmp_path / format, format=format, planner=[drop("b")]
        )
        assert report.dropped == ("b",)
        assert "not converted, as the planner drops them: b" in repr(report)


def test_a_load_says_what_the_planner_dropped(tmp_path):
    shardplan.save({"a": torch.ones(2)}, tmp_path)
    state = {"a": torch.zeros(2), "new": torch.zeros(3)}
    report = shardplan.load(state, tmp_path, planner=drop("new"))
    assert report.dropped == ("new",)
    assert "not filled, as the planner drops them: new" in repr(report)


# --- loads


@given(save_plans(), st.lists(st.sampled_from([split_replicas(1), dedup_replicas(), spare_first])))
def test_what_world_passes_gave_to_one_holder_all_holders_fill(plans, steps):
    given_out = chain(steps)(plans)
    _, metadata = global_plan(plans, [*steps, dedup_replicas()])
    for rank, plan in enumerate(with_replicas(given_out)):
        assert find_issues(metadata) == ()
        wanted = load_plan(metadata, plan)
        assert wanted.report.dropped == ()
        assert_read_once(metadata, plan, wanted)
        assert assert_all_saved(plans[rank : rank + 1], [plan]) == ()


@pytest.mark.parametrize("count", [None, 2])
def test_a_rank_does_not_get_back_what_its_own_pass_left_out(tmp_path, count):
    saved = {"a": torch.full((8,), 5.0), "e": torch.arange(8.0).reshape(2, 4)}
    shardplan.save(saved, tmp_path)
    planner = [on_ranks([1], drop("a")), stack("e.#", "e", count=count)]

    def load(comm):
        state = {"a": torch.zeros(8), "e.0": torch.zeros(4), "e.1": torch.zeros(4)}
        shardplan.load(state, tmp_path, planner=planner, comm=comm)
        return state["a"][0].item(), state["e.1"][0].item()

    assert run_ranks(2, load, timeout=60) == [(5, 4), (0, 4)]


@given(save_plans(), st.sampled_from([split_replicas(1), dedup_replicas(), spare_first]), st.data())
def test_world_passes_leave_out_of_a_load_what_came_out_of_rank_passes(plans, step, data):
    own = on_ranks([0], data.draw(st.sampled_from([drop("*a*", required=False), split_chunks(16)])))
    before = chain(own)(plans)
    try:  # a planner that cuts one of several replicas cannot save them, and so has nothing to load
        global_plan(plans, [own, step, dedup_replicas()])
    except PlanError:
        reject()
    _, metadata = global_plan(plans)
    for plan, wanted in zip(with_replicas(chain(step)(before), before), before, strict=True):
        fills = [load_plan(metadata, p) for p in (plan, wanted)]
        names = [{read.dest_index.fqn for read in fill.items} for fill in fills]
        assert names[0] == names[1]
        totals = [sum(fill.items.numel.tolist()) for fill in fills]
        assert totals[0] == totals[1]


def test_an_empty_shard_gets_nothing_of_what_another_rank_writes():
    """The first rank holds every row, the second none, and a pass lets the first write alone."""

    @world_pass
    def first_writes(plans):
        return plans[0], attrs.evolve(plans[1], items=[])

    whole = local_plan({"w": TensorSpec((4, 2))})
    (item,) = whole.items
    data = attrs.evolve(item.tensor_data, chunk=Chunk((4, 0), (0, 2)))
    at = MetadataIndex("w", (4, 0))
    nothing = SavePlan([attrs.evolve(item, index=at, tensor_data=data, source=at)])
    before = (whole, nothing)
    for entering in (None, before):
        first, second = with_replicas(chain(first_writes)(before), entering)
        assert list(first.items) == [item]
        assert list(second.items) == []


def test_a_restore_of_several_ranks_refuses_passes_over_all_plans(tmp_path, monkeypatch):
    shardplan.save({"e": torch.arange(8.0).reshape(2, 4)}, tmp_path)
    target = {"e.0": torch.zeros(4), "e.1": torch.zeros(4)}
    assert shardplan.restore(tmp_path, target, planner=stack("e.#", "e"))["e.1"][0] == 4
    monkeypatch.setattr(_restore, "own_place", lambda: Place(1, 2))
    with pytest.raises(
        ValueError, match=r"restore plans each rank alone, and stack .*use load\(\)"
    ):
        shardplan.restore(tmp_path, target, planner=stack("e.#", "e"))
    for planner in (stack("e.#", "e", count=2), [stack("e.#", "e", count=2), dedup_replicas()]):
        assert shardplan.restore(tmp_path, target, planner=planner)["e.1"][0] == 4


def test_a_load_that_cannot_know_which_of_two_tensors_is_meant_is_refused():
    """Two ranks save theirs under two names; the third holds one of that name and saves none."""

    @world_pass
    def apart(plans):
        named = (
            rename(lambda name: f"{name}.0")(plans[:1]),
            rename(lambda name: f"{name}.1")(plans[1:2]),
        )
        return *named[0], *named[1], attrs.evolve(plans[2], items=[])

    plans = apart((local_plan({"w": TensorSpec((2,))}),) * 3)
    _, metadata = global_plan(plans)
    last = with_replicas(plans)[2]
    with pytest.raises(PlanError, match=r"would be filled 2 times on rank 0, from `w.0`, `w.1`"):
        load_plan(metadata, attrs.evolve(last, rank=0))


def test_passes_that_only_choose_who_writes_are_no_reason_to_exchange_plans_for_a_load():
    stages = Stages.of([rename(str.upper), split_replicas(), cast("int8")], load=True)
    assert stages.rest == ()
    assert Stages.of([split_replicas(), name_rank, dedup_replicas()], load=True).rest == (
        split_replicas(),
        name_rank,
    )
    assert Stages.of([partition(has_a, {"a": split_replicas()})], load=True).rest != ()


def test_torch_s_loader_runs_world_passes_over_all_plans(monkeypatch):
    """Each rank loads what it holds under the names that the pass gives, knowing all plans."""
    states = [{"w": torch.zeros(2), f"own{rank}": torch.zeros(3)} for rank in range(2)]
    planner = [name_of_holders, spare_first, dedup_replicas()]
    _, metadata = global_plan(map(local_plan, states), planner)
    own = [shardplan.as_torch_load_planner(planner) for _ in states]
    local = []
    for rank, (one, state) in enumerate(zip(own, states, strict=True)):
        place = planners.Place(rank, 2)
        monkeypatch.setattr(planners, "_place_of", lambda group, place=place: place)
        one.set_up_planner(state, to_torch(metadata))
        local.append(one.create_local_plan())
    for rank, plan in enumerate(own[0].create_global_plan(local)):
        reads = {(r.storage_index.fqn, r.dest_index.fqn) for r in plan.items}
        assert reads == {("wx2", "w"), (f"own{rank}x1", f"own{rank}")}
        own[rank].finish_plan(plan)
        assert own[rank].report.missing == ()


name_of_holders = count_ranks


def test_torch_s_planners_refuse_world_passes_where_ranks_plan_alone(monkeypatch):
    monkeypatch.setattr(planners, "_place_of", lambda group: planners.Place(1, 4))
    one = shardplan.as_torch_save_planner(spare_first)
    one.set_up_planner({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="spare_first needs the plans of all 4 ranks"):
        one.create_global_plan([one.create_local_plan()])
    one = shardplan.as_torch_save_planner([name_rank, dedup_replicas()])
    one.set_up_planner({"w": torch.ones(2)})
    ((plan,), _) = one.create_global_plan([one.create_local_plan()])
    assert [item.index.fqn for item in plan.items] == ["w@1of4"]


def test_torch_s_planners_name_the_process_group_where_ranks_are_not_those_of_the_job(monkeypatch):
    def local(rank, pipeline):
        monkeypatch.setattr(planners, "_place_of", lambda group: planners.Place(rank, 4))
        one = shardplan.as_torch_save_planner(pipeline)
        one.set_up_planner({"w": torch.ones(2)})
        return one, one.create_local_plan()

    (one, a), (_, b) = local(1, name_rank), local(3, name_rank)
    with pytest.raises(ValueError, match=r"ranks 1, 3 of 4; give the planner the process_group"):
        one.create_global_plan([a, b])
    (one, a), (_, b) = local(1, rename(str.upper)), local(3, rename(str.upper))
    assert len(one.create_global_plan([a, b])[0]) == 2  # which does not look at ranks


@pytest.mark.filterwarnings("ignore")
def test_lists_and_plain_functions_work_in_torch_s_own_save_and_load(tmp_path):
    sd = {"w": torch.arange(4.0), "gone": 3}
    planner = [drop("gone"), name_rank, split_chunks(8), dedup_replicas()]
    dcp.save(sd, checkpoint_id=tmp_path, planner=shardplan.as_torch_save_planner(planner))
    got = {"w": torch.zeros(4), "gone": 0}
    loader = shardplan.as_torch_load_planner(planner)
    dcp.load(got, checkpoint_id=tmp_path, planner=loader)
    assert got["w"].tolist() == [0, 1, 2, 3]
    assert loader.report.dropped == ("gone",)


# --- load plans


def test_a_plain_pass_over_load_plans_is_given_one_at_a_time():
    plan = local_plan({"w": TensorSpec((2,))})
    _, metadata = global_plan([plan])
    seen_ranks = []

    def spy(plans):
        seen_ranks.append([loading.rank for loading in plans])
        return plans

    loads = [load_plan(metadata, plan)] * 2
    shared = global_load_plan(loads, [spy, share_reads(metadata, min_bytes=1)])
    assert seen_ranks == [[0], [1]]
    assert [len(loading.items) for loading in shared] == [1, 0]
    assert_written_once(*global_plan([plan]))


def misplaced(read, kind):
    """Return a read of as many elements that is wrong in some way."""
    if kind == "read from the neighbour":
        return attrs.evolve(read, storage_index=attrs.evolve(read.storage_index, fqn="b"))
    if kind == "read one row late":
        return attrs.evolve(read, storage_offsets=(1, 0), dest_offsets=(0, 0), lengths=(1, 2))
    return attrs.evolve(read, dest_offsets=(0, 0), storage_offsets=(0, 0), lengths=(1, 2))


@pytest.mark.parametrize("kind", ["read from the neighbour", "read one row late", "fill one twice"])
def test_a_pass_over_load_plans_that_keeps_the_count_and_moves_elements_is_refused(kind):
    plan = local_plan({"a": TensorSpec((2, 2)), "b": TensorSpec((2, 2))})
    _, metadata = global_plan([plan])
    loading = load_plan(metadata, plan)

    def wrong(plans):
        a, b = plans[0].items
        first = attrs.evolve(a, lengths=(1, 2))
        items = [first, misplaced(a, kind), b]
        if kind == "read from the neighbour":
            items = [misplaced(a, kind), b]
        return (attrs.evolve(plans[0], items=items),)

    with pytest.raises(PlanError, match=r"rank 0 would fill `a` at .* twice, or from elsewhere"):
        global_load_plan([loading], wrong)
    for cut in (
        split_reads(metadata, 8),
        lambda plans: plans,
        lambda plans: split_reads(metadata, 8)(plans),
    ):
        assert len(global_load_plan([loading], cut)[0].items) >= 2
