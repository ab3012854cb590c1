"""Nested state dicts become flat ones and come back."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given

from shardplan.planning import (
    PlanError,
    TensorSpec,
    drop,
    flatten,
    global_plan,
    load_plan,
    local_plan,
    rename,
    unflatten,
)
from shardplan.planning.testing.strategies import state_dicts
from shardplan.planning.tree import empty_names


def same(a, b):
    """Compare two trees, types of containers and dtypes of arrays included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(state_dicts())
def test_unflatten_undoes_flatten(sd):
    assert same(unflatten(*flatten(sd)), sd)


@given(state_dicts())
def test_flat_leaves_are_the_very_objects_of_the_state_dict(sd):
    flat, paths = flatten(sd)
    assert flat.keys() == paths.keys()
    for name, path in paths.items():
        value = sd
        for _, key in path:
            value = value[key]
        assert value is flat[name]


@given(state_dicts())
def test_no_leaf_is_a_container_that_holds_a_tensor(sd):
    def tensors(value):
        if isinstance(value, (np.ndarray, TensorSpec)):
            return 1
        inner = value.values() if isinstance(value, dict) else value
        return sum(map(tensors, inner)) if isinstance(value, (dict, list, tuple)) else 0

    flat, _ = flatten(sd)
    leaves = [value for value in flat.values() if isinstance(value, (np.ndarray, TensorSpec))]
    assert len(leaves) == tensors(sd)


@given(state_dicts())
def test_a_local_plan_names_every_leaf_once_and_in_order(sd):
    flat, _ = flatten(sd)
    assert [item.index.fqn for item in local_plan(sd).items] == sorted(flat)


def test_two_ways_to_one_name_are_told_together():
    sd = {"a": {"b": 1}, "a.b": 2, "c": [{"d": 3}], "c.0": {"d": 4}}
    with pytest.raises(PlanError) as caught:
        flatten(sd)
    assert [issue.fqn for issue in caught.value.issues] == ["a.b", "c.0.d"]
    assert {issue.kind for issue in caught.value.issues} == {"conflict"}
    assert "['a']['b'] and ['a.b']" in str(caught.value)
    assert "['c'][0]['d'] and ['c.0']['d']" in str(caught.value)
    assert "rename" in str(caught.value)


def test_a_number_and_its_text_are_two_keys_of_one_name():
    with pytest.raises(PlanError, match=r"\[0\] and \['0'\]"):
        flatten({0: "a", "0": "b"})


def test_optimizer_state_keeps_its_whole_numbers_as_keys():
    sd = {"state": {0: {"step": 1}, 1: {"step": 2}}, "param_groups": [{"params": [0, 1]}]}
    flat, paths = flatten(sd)
    assert list(flat) == ["state.0.step", "state.1.step", "param_groups.0.params"]
    assert unflatten(flat, paths) == sd


def test_subclasses_of_dict_and_tuple_come_back_equal():
    pair = namedtuple("pair", "left right")
    sd = {"model": OrderedDict(w=TensorSpec((2,))), "both": pair(TensorSpec((3,)), 1)}
    assert unflatten(*flatten(sd)) == sd


def test_leaves_without_a_path_stay_on_top():
    flat, paths = flatten({"a": {"b": 1}})
    assert unflatten({**flat, "x.y": 2}, paths) == {"a": {"b": 1}, "x.y": 2}


def test_the_input_is_left_as_it_was():
    sd = {"a": [{"b": 1}], "c": {}}
    unflatten(*flatten(sd))["a"][0]["b"] = 9
    assert sd == {"a": [{"b": 1}], "c": {}}


def test_a_path_that_starts_at_no_dict_is_refused():
    with pytest.raises(ValueError, match="does not start at a dict"):
        unflatten({"0": 1}, {"0": (("list", 0),)})


def test_a_value_inside_another_value_is_refused_and_the_other_is_left_alone():
    paths = {"a.b": (("dict", "a"), ("dict", "b"))}
    leaf = {}
    for flat in ({"a": leaf, "a.b": 1}, {"a.b": 1, "a": leaf}):
        with pytest.raises(ValueError, match="`a"):
            unflatten(flat, paths)
    assert leaf == {}


def test_positions_that_no_list_has_are_refused():
    for position in ("zz", -1, 5 * 10**7):
        with pytest.raises(ValueError, match="do not form a list"):
            unflatten({"a": 1}, {"a": (("dict", "a"), ("list", position))})


def test_a_clash_of_a_list_and_a_dict_tells_which_is_which():
    plans = [local_plan({"a": [np.zeros(2)]}), local_plan({"a": {0: np.zeros(2)}})]
    with pytest.raises(PlanError, match=r"\['a'\]\[0\] \(list in dict\) and .* \(dict in dict\)"):
        global_plan(plans)


PLACES = {
    "empty list": [],
    "none": None,
    "number": 7,
    "tensor": np.zeros(2),
    "list of tensors": [np.zeros(2)],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("turned", [False, True])
def test_what_ranks_hold_in_one_place_as_a_value_and_as_a_dict_is_refused(place, turned):
    sides = [{"a": {"m": {"w": np.ones(2)}}}, {"a": {"m": PLACES[place]}}]
    plans = [local_plan(sd) for sd in (reversed(sides) if turned else sides)]
    with pytest.raises(PlanError, match=r"`a\.m.* on rank \d.*rename one of them") as caught:
        global_plan(plans)
    assert [issue.ranks for issue in caught.value.issues] == [(0, 1)]


@pytest.mark.parametrize("turned", [False, True])
def test_an_empty_dict_on_one_rank_gives_way_to_what_another_has_there(turned):
    sides = [{"a": {"m": {"w": np.ones(2)}}, "e": {}}, {"a": {"m": {}}, "e": {}}]
    plans = [local_plan(sd) for sd in (reversed(sides) if turned else sides)]
    plans, metadata = global_plan(plans)
    assert list(metadata.state_dict_metadata) == ["a.m.w", "e"]
    assert metadata.planner_data["empty"] == ("a.m", "e")
    assert sorted(i.index.fqn for plan in plans for i in plan.items) == ["a.m.w", "e"]
    assert unflatten({"a.m.w": 1, "e": {}}, metadata.planner_data["paths"]) == {
        "a": {"m": {"w": 1}},
        "e": {},
    }
    for sd in sides:  # each rank's own state dict can be loaded again
        load_plan(metadata, local_plan(sd))


def test_an_empty_dict_is_not_missing_unless_the_checkpoint_has_something_inside_it():
    metadata = global_plan([local_plan({"a": {"b": 1}, "ax": 2})])[1]
    report = load_plan(metadata, local_plan({"a": {"b": 0}, "c": {}, "d": [{}, {"e": {}}]})).report
    assert report.missing == ()
    with pytest.raises(PlanError, match=r"`a` is empty .* the checkpoint has more below \(a\.b"):
        load_plan(metadata, local_plan({"a": {}}))
    assert load_plan(metadata, local_plan({"a": {}}), strict=False).report.missing == ("a",)
    with pytest.raises(PlanError, match="`c` is not in the checkpoint"):
        load_plan(metadata, local_plan({"c": []}))


@pytest.mark.parametrize("passes", [rename({"a.b": "x"}), rename(lambda n: f"m.{n}"), drop("a.b")])
def test_passes_know_empty_dicts_by_their_new_names(passes):
    (plan,) = passes((local_plan({"a": {"b": {}}, "w": np.ones(2)}),))
    names = {item.index.fqn for item in plan.items}
    assert empty_names(plan.planner_data) == {n for n in names if not n.endswith("w")}
    metadata = global_plan([local_plan({"x": np.ones(2)})])[1]
    missing = load_plan(metadata, plan, strict=False).report.missing
    assert set(missing) == {n for n in names if n.endswith("w")}


def test_lists_are_opened_for_empty_dicts_as_torch_does_and_tuples_are_not():
    sd = {"a": [{}, 1], "b": ({}, 1), "c": [[{}]], "d": ([{}],), "e": [], "f": [[]], "g": [({},)]}
    names = ["a.0", "a.1", "b", "c.0.0", "d", "e", "f", "g"]
    flat, paths = flatten(sd)
    assert list(flat) == names
    assert unflatten(flat, paths) == sd


def test_containers_that_are_asked_for_whole_are_leaves():
    sd = {"a": {"b": {"c": 1}, "d": [{"e": 2}]}}
    flat, paths = flatten(sd, whole={"a.b", "a.d"})
    assert flat == {"a.b": {"c": 1}, "a.d": [{"e": 2}]}
    assert unflatten(flat, paths) == sd


def test_ranks_may_hold_different_keys_of_one_dict():
    plans = [local_plan({"m": {name: np.ones(2)}, "n": [{}, {"k": 1}]}) for name in "ab"]
    flat = list(global_plan(plans)[1].state_dict_metadata)
    assert flat == ["m.a", "m.b", "n.0", "n.1.k"]


def test_a_rename_onto_the_name_of_a_dict_is_refused():
    plan = local_plan({"x": np.ones(2), "m": {"a": np.ones(2)}})
    with pytest.raises(PlanError, match=r"`m` is a value .* and holds `m\.a`"):
        global_plan(rename(lambda name: "m" if name == "x" else name)((plan,)))
