"""Passes over some items or some ranks: `where`, `on_ranks`, and their inverses."""

import pickle
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    PlanError,
    SavePlan,
    TensorSpec,
    annotate,
    cast,
    chain,
    dedup_replicas,
    global_load_plan,
    global_plan,
    inverse,
    load_plan,
    local_plan,
    on_ranks,
    partition,
    rename,
    share_reads,
    split_chunks,
    split_replicas,
    where,
    with_replicas,
    world_pass,
)
from shardplan.planning.passes.base import Step, scope_of
from shardplan.planning.testing import assert_read_once, assert_written_once
from shardplan.planning.testing.strategies import save_plans

STEPS = {
    "rename": rename(lambda name: f"x.{name}"),
    "cast": cast("bfloat16", required=False),
    "chunks": split_chunks(16),
    "replicas": split_replicas(1),
    "dedup": dedup_replicas(),
    "nothing": chain(),
}
steps = st.sampled_from(sorted(STEPS)).map(STEPS.__getitem__)
has_a = "*a*"


def plan_of(**specs):
    return local_plan({name: TensorSpec(*spec) for name, spec in specs.items()})


def reversed_items():
    """Reverse the items of a plan: a pass that keeps all names and undoes itself."""
    return Step(reversed_items, (), {}, "rank", _reverse, reversed_items, keeps_names=True)


def _reverse(plans):
    return tuple(attrs.evolve(plan, items=plan.items[::-1]) for plan in plans)


@given(save_plans(), steps)
def test_where_everything_matches_the_pass_runs_as_if_alone(plans, step):
    assert where("*", step, required=False)(plans) == step(plans)


@given(save_plans(), steps)
def test_where_nothing_matches_nothing_changes(plans, step):
    for done, plan in zip(where("?never", step, required=False)(plans), plans, strict=True):
        assert done == plan
        assert done.items is plan.items


@given(save_plans(), steps)
def test_items_that_do_not_match_are_left_alone_in_their_order(plans, step):
    done = where(has_a, step, required=False)(plans)
    for before, after in zip(plans, done, strict=True):
        assert [i for i in after.items if "a" not in i.index.fqn] == [
            i for i in before.items if "a" not in i.index.fqn
        ]


@given(save_plans(), steps)
def test_items_that_match_become_what_the_pass_makes_of_them_alone(plans, step):
    done = where(has_a, step, required=False)(plans)
    matching = tuple(SavePlan([i for i in p.items if "a" in i.index.fqn]) for p in plans)
    for alone, after in zip(step(matching), done, strict=True):
        assert [i for i in after.items if "a" in i.index.fqn] == list(alone.items)


@given(save_plans(), steps, steps)
def test_two_passes_over_the_same_items_are_one(plans, first, second):
    """The rename keeps to names that match as before."""
    together = where(has_a, chain(first, second), required=False)
    apart = chain(where(has_a, first, required=False), where(has_a, second, required=False))
    assert sorted_items(together(plans)) == sorted_items(apart(plans))


def sorted_items(plans):
    return [sorted(map(str, plan.items)) for plan in plans]


@given(save_plans(), steps)
def test_every_element_is_written_once_where_a_pass_runs_on_some_items(plans, step):
    planner = [where(has_a, step, required=False), dedup_replicas()]
    assert_written_once(*global_plan(plans, planner))


@given(save_plans(), steps)
def test_what_a_pass_on_some_items_saved_the_same_pass_loads(plans, step):
    planner = where(has_a, step, required=False)
    if scope_of(planner) == "rank":
        metadata = global_plan(plans, [planner, dedup_replicas()])[1]
        for plan in plans:
            (wanted,) = planner((plan,))
            assert_read_once(metadata, wanted, load_plan(metadata, wanted))


def test_where_takes_a_function_and_a_list_of_passes():
    plan = plan_of(a=((4,),), b=((4,),))
    planner = where(lambda name: name == "a", [rename({"a": "c"}), split_chunks(8)])
    assert [i.index.fqn for i in planner((plan,))[0].items] == ["c", "c", "b"]


def test_a_pattern_of_where_that_matches_nothing_is_an_error_that_names_the_nearest():
    with pytest.raises(PlanError, match="where: 'nothng' matches nothing; nearest: nothing"):
        where("nothng", cast("int8"))((plan_of(nothing=((2,),)),))
    with pytest.raises(TypeError, match="where takes patterns"):
        where(3, cast("int8"))


def test_ranks_without_a_match_do_not_run_the_pass():
    plans = plan_of(a=((2,),)), plan_of(b=((2,),))
    planner = where("a", rename({"a": "c"}), required=False)
    done, _ = global_plan(plans, planner)
    assert [plan.items[0].index.fqn for plan in done] == ["c", "b"]
    with pytest.raises(PlanError, match="where: 'a' matches nothing on rank 1"):
        where("a", rename({"a": "c"}))(plans)


def test_scopes_follow_from_the_pass_inside():
    @world_pass
    def everyone(plans):
        return plans

    assert scope_of(where("*", cast("int8"))) == "rank"
    assert scope_of(where("*", everyone)) == "world"
    assert scope_of(on_ranks([0], cast("int8"))) == "rank"


@given(save_plans())
def test_a_load_fills_every_replica_that_a_pass_on_some_items_assigned_to_one_rank(plans):
    planner = where(has_a, dedup_replicas(), required=False)
    metadata = global_plan(plans, [planner, dedup_replicas()])[1]
    for plan, wanted in zip(plans, with_replicas(planner(plans)), strict=True):
        reads = load_plan(metadata, wanted)
        assert Counter(reads.items) == Counter(load_plan(metadata, plan).items)


# --- ranks


@given(save_plans(), st.sets(st.integers(0, 5)))
def test_a_pass_on_some_ranks_is_the_pass_there_and_nothing_elsewhere(plans, ranks):
    ranks = {rank for rank in ranks if rank < len(plans)}
    step = split_chunks(16)
    whole = step(plans)
    for chosen in (ranks, sorted(ranks), ranks.__contains__):
        for rank, plan in enumerate(on_ranks(chosen, step)(plans)):
            assert plan == (whole if rank in ranks else plans)[rank]


def test_a_rank_pass_on_ranks_is_the_same_for_one_rank_alone_as_for_all():
    plans = (plan_of(w=((4,),)),) * 3
    planner = on_ranks([1], cast("float16"))
    whole = planner(tuple(attrs.evolve(p, rank=r, world_size=3) for r, p in enumerate(plans)))
    for rank, plan in enumerate(plans):
        (alone,) = planner((attrs.evolve(plan, rank=rank, world_size=3),))
        assert alone == whole[rank]


def test_ranks_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="names ranks 2, 3, and there are only 2 ranks"):
        on_ranks([0, 2, 3], cast("int8"))((SavePlan([]),) * 2)
    with pytest.raises(ValueError, match="numbered from 0"):
        on_ranks([-1], cast("int8"))
    with pytest.raises(TypeError, match=r"not 3"):
        on_ranks(3, cast("int8"))
    with pytest.raises(ValueError, match="needs the plans of all ranks"):
        on_ranks([0], dedup_replicas())


def test_load_plans_may_differ_by_rank_and_a_users_pass_on_a_rank_is_checked():
    plan = plan_of(a=((4,),), b=((4,),))
    metadata = global_plan([plan])[1]
    loads = (load_plan(metadata, plan),) * 2

    def swap_sources(plans):
        (only,) = plans
        a, b = only.items
        parts = (
            attrs.evolve(a, storage_index=b.storage_index),
            attrs.evolve(b, storage_index=a.storage_index),
        )
        return (attrs.evolve(only, items=parts),)

    assert global_load_plan(loads, on_ranks([1], chain())) == loads
    with pytest.raises(PlanError):
        global_load_plan(loads, on_ranks([1], swap_sources))
    with pytest.raises(ValueError, match="needs the plans of all"):
        on_ranks([1], share_reads(metadata))


# --- values


def test_they_print_compare_hash_and_pickle():
    made = [
        where("a*", cast("int8")),
        where("a*", [rename({"a": "b"}), cast("int8")], required=False),
        where(str.isupper, chain()),
        on_ranks([0, 2], split_chunks(8)),
        on_ranks(range(2), split_chunks(8)),
        on_ranks({1, 0}, split_chunks(8)),
    ]
    assert list(map(repr, made)) == [
        "where('a*', cast('int8'))",
        "where('a*', [rename({'a': 'b'}), cast('int8')], required=False)",
        "where(str.isupper, chain())",
        "on_ranks([0, 2], split_chunks(8))",
        "on_ranks(range(0, 2), split_chunks(8))",
        "on_ranks({0, 1}, split_chunks(8))",
    ]
    for step in made:
        assert eval(repr(step)) == step
        assert pickle.loads(pickle.dumps(step)) == step
        assert hash(eval(repr(step))) == hash(step)


# --- inverses


@given(save_plans(), st.sampled_from(["where", "on_ranks", "partition"]))
def test_a_pass_inside_that_keeps_names_is_undone_inside(plans, how):
    step = {
        "where": where(has_a, reversed_items(), required=False),
        "on_ranks": on_ranks(lambda rank: rank % 2 == 0, reversed_items()),
        "partition": partition(
            lambda name: "ab"["a" in name], {"a": chain(), "b": chain(reversed_items())}
        ),
    }[how]
    assert chain(step, inverse(step))(plans) == plans
    assert inverse(step) == step or how == "partition"


def test_ranks_keep_their_numbers_so_renames_on_ranks_are_undone():
    step = on_ranks([1], rename({"a": "b"}))
    assert inverse(step) == on_ranks([1], rename({"b": "a"}))


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (where("a", rename({"a": "b"})), "which changes the names that where goes by"),
        (partition(str, {"a": rename({"a": "b"})}), "the names that partition goes by"),
        (where("a", cast("int8")), r"cast\('int8'\) has no inverse"),
        (on_ranks([0], annotate(dict)), r"annotate\(dict\) has no inverse"),
    ],
)
def test_what_cannot_be_undone_inside_is_refused(step, reason):
    with pytest.raises(ValueError, match=reason):
        inverse(step)
