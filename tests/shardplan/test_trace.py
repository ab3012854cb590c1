"""``trace=True``: reports say what each pass of the planner did."""

import attrs
import numpy as np
import pytest
import torch

import shardplan
from shardplan._offers import PlanCache
from shardplan.dist import run_ranks
from shardplan.io.stores.base import open_store
from shardplan.planning import (
    Mesh,
    PlannerTrace,
    cast,
    dedup_replicas,
    drop,
    local_plan,
    rename,
    show,
    split,
    stack,
    world_pass,
)

WORLD = 3
PLANNER = [drop("tmp"), cast("bfloat16")]


def state(rank=0):
    return {"w": torch.ones(4, 2), "b": torch.zeros(2), "tmp": 1}


def plans(state_of=state, count=1):
    made = (local_plan(state_of(rank)) for rank in range(count))
    return [attrs.evolve(plan, rank=at, world_size=count) for at, plan in enumerate(made)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ckpt"


def saves(name, planner, state_of=state, **options):
    """Save on several ranks; return their reports."""
    store = open_store(f"memory://trace/{name}")
    store.delete(store.list())
    options = {"trace": True, "overwrite": True, "planner": planner} | options

    def run(comm):
        return shardplan.save(state_of(comm.rank), store, comm=comm, cache=PlanCache(), **options)

    return run_ranks(WORLD, run), store


def test_a_save_reports_what_each_pass_did_below_its_own_lines(folder):
    report = shardplan.save(state(), folder, planner=PLANNER, trace=True)
    assert report.trace == show(PLANNER, plans())
    own, trace = str(report).split("\n", 2)[:2], str(report).split("\n", 2)[2]
    assert own[0].startswith("saved")
    assert own[1].startswith("not saved, as the planner drops them")
    assert trace == str(report.trace)
    assert "1. drop(&#x27;tmp&#x27;): each plan, rank 0" in report._repr_html_()


def test_a_load_reports_what_each_pass_did(folder):
    shardplan.save(state(), folder, planner=PLANNER)
    report = shardplan.load(state(), folder, planner=PLANNER, trace=True)
    assert report.trace == show(PLANNER, plans())
    assert str(report).endswith(str(report.trace))


def test_reports_have_no_trace_unless_it_is_asked_for(folder):
    saved = shardplan.save(state(), folder, planner=PLANNER)
    loaded = shardplan.load(state(), folder, planner=PLANNER)
    assert (saved.trace, loaded.trace) == (None, None)


def test_a_trace_without_a_planner_says_that_there_are_no_passes(folder):
    assert shardplan.save(state(), folder, trace=True).trace == PlannerTrace()
    assert shardplan.load(state(), folder, trace=True).trace == PlannerTrace()
    assert {report.trace for report in saves("none", None)[0]} == {PlannerTrace()}


def test_a_traced_save_makes_its_plan_anew(folder):
    options = {"planner": PLANNER, "overwrite": True, "cache": PlanCache()}
    assert [shardplan.save(state(), folder, **options).how for _ in range(2)] == ["alone", "cached"]
    report = shardplan.save(state(), folder, trace=True, **options)
    assert (report.how, len(report.trace.steps)) == ("alone", 2)
    assert shardplan.save(state(), folder, **options).how == "cached"


def test_background_saves_and_conversions_trace_too(folder, tmp_path):
    assert shardplan.async_save(state(), folder, planner=PLANNER, trace=True).result().trace == (
        show(PLANNER, plans())
    )
    report = shardplan.convert(folder, tmp_path / "b", planner=rename({"w": "v"}), trace=True)
    assert [change.kind for change in report.trace.steps[0].changes] == ["renamed", "left alone"]
    assert str(report).endswith(str(report.trace))
    assert shardplan.restore(tmp_path / "b").keys() == {"v", "b"}
    meshed = shardplan.convert(
        folder, tmp_path / "c", mesh=Mesh(dp=2), planner=rename({"w": "v"}), trace=True
    )
    assert meshed.trace.steps[0].ranks == (0, 1)


def test_where_plans_are_derived_every_rank_traces_all_of_them():
    planner = [*PLANNER, dedup_replicas()]
    reports, _ = saves("derived", planner)
    assert {report.how for report in reports} == {"derived"}
    assert {report.trace for report in reports} == {show(planner, plans(count=WORLD))}


def uneven(rank=0):
    """Return a state dict that only this rank knows."""
    return {f"experts.{rank}.w": torch.full((2, 2), float(rank)), "step": 7, "tmp": 1}


def odd(rank=0):
    """Return a state dict that differs from all others."""
    return {f"{'abc'[rank]}.w": torch.full((2, 2), float(rank)), "step": 7, "tmp": 1}


def test_where_plans_are_gathered_ranks_trace_their_own_passes_and_the_coordinator_the_rest():
    planner = [*PLANNER, dedup_replicas()]
    reports, _ = saves("gathered", planner, odd)
    assert {report.how for report in reports} == {"gathered"}
    every = plans(odd, WORLD)
    for rank, report in enumerate(reports):
        assert report.trace.steps[:2] == show(PLANNER, [every[rank]]).steps
    rest = show(planner, every).steps[2:]
    assert [report.trace.steps[2:] for report in reports] == [rest, (), ()]


@world_pass
def as_they_are(plans):
    return plans


@pytest.mark.parametrize(
    "last", [stack("experts.#.w", into="experts.w", axis=0), as_they_are], ids=["stack", "function"]
)
def test_passes_that_need_all_plans_are_traced_on_the_coordinator_in_saves_and_loads(last):
    planner, every = [drop("tmp"), last], plans(uneven, WORLD)
    reports, store = saves("world", planner, uneven)
    rest = show(planner, every).steps[1:]
    assert [report.trace.steps[1:] for report in reports] == [rest, (), ()]

    def run(comm):
        return shardplan.load(uneven(comm.rank), store, planner=planner, comm=comm, trace=True)

    loaded = run_ranks(WORLD, run)
    assert [report.trace.steps[1:] for report in loaded] == [rest, (), ()]
    assert all(report.trace.steps[0].ranks == (rank,) for rank, report in enumerate(loaded))


def test_ranks_that_trace_and_ranks_that_do_not_save_the_same(tmp_path):
    def run(comm):
        return shardplan.save(
            state(), tmp_path, planner=PLANNER, comm=comm, trace=comm.rank == 1, cache=PlanCache()
        )

    reports = run_ranks(2, run)
    assert [report.trace is None for report in reports] == [True, False]
    assert np.array_equal(shardplan.restore(tmp_path)["w"].float(), np.ones((4, 2)))


def test_an_error_of_a_pass_says_which_one_in_a_traced_save(folder):
    with pytest.raises(shardplan.planning.PlanError) as caught:
        shardplan.save(
            state(), folder, planner=[drop("tmp"), split("w", ["u", "v"], axis=5)], trace=True
        )
    assert caught.value.__notes__[0].startswith("in pass 2 of 2: split(")
