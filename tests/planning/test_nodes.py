"""Classes of one's own in state dicts: opened, and made again by those who know them."""

import dataclasses
import pickle
from collections import namedtuple

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    CodecError,
    FrozenDict,
    PlanError,
    RefusedError,
    chain,
    decode_plan,
    encode_plan,
    flatten,
    global_plan,
    local_plan,
    register_node,
    rename,
    select,
    unflatten,
)
from shardplan.planning.nodes import saved_nodes
from shardplan.planning.tree import nodes_of, with_entry


@register_node
@dataclasses.dataclass
class Average:
    decay: float
    shadow: object


@register_node
@attrs.define
class Schedule:
    _rate: float
    warmup: tuple = ()


Pair = namedtuple("Pair", "left right")


@register_node
class Both(namedtuple("Both", "left right")):
    pass


class Box:
    """A class with other data than its children."""

    def __init__(self, unit, things):
        self.unit, self.things = unit, things

    def __eq__(self, other):
        return (self.unit, list(self.things)) == (other.unit, list(other.things))

    __hash__ = None


def open_box(box):
    return list(box.things), {"unit": box.unit, "version": [1, 2]}


def make_box(data, things):
    assert data == {"unit": box_unit(data), "version": (1, 2)}
    return Box(data["unit"], things)


def box_unit(data):
    return data["unit"]


register_node(Box, open_box, make_box)

leaf = st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
nodes = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.builds(Average, st.floats(0, 1), inner),
        st.builds(Schedule, inner),
        st.builds(Both, inner, inner),
        st.builds(Box, st.text(max_size=2), st.lists(inner, min_size=1, max_size=2)),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.lists(inner, max_size=2),
    ),
    max_leaves=5,
)
state_dicts = st.dictionaries(st.sampled_from(["x", "y", "z"]), nodes, max_size=3)


@given(state_dicts)
def test_nodes_come_back_as_themselves(sd):
    done = unflatten(*flatten(sd), like=sd)
    assert done == sd
    assert repr(type(done.get("x"))) == repr(type(sd.get("x")))


@given(state_dicts)
def test_a_checkpoint_knows_its_nodes(sd):
    plan = decode_plan(encode_plan(local_plan(sd)))
    metadata = pickle.loads(pickle.dumps(global_plan([plan, plan])[1]))
    data = metadata.planner_data or {}
    flat, paths = flatten(sd)
    assert unflatten(flat, data.get("paths", {}), nodes=saved_nodes(data)) == sd
    assert unflatten(flat, paths, nodes=nodes_of(sd)) == sd


@given(state_dicts)
def test_without_the_classes_there_are_dicts_and_tuples(sd):
    def plain(value):
        if isinstance(value, Average):
            return {"decay": value.decay, "shadow": plain(value.shadow)}
        if isinstance(value, Schedule):
            return {"rate": plain(value._rate), "warmup": value.warmup}
        if isinstance(value, (Both, Box)):
            return tuple(map(plain, value if isinstance(value, Both) else value.things))
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return list(map(plain, value)) if isinstance(value, list) else value

    assert unflatten(*flatten(sd)) == plain(sd)


def test_names_are_those_of_children():
    sd = {"ema": Average(0.9, {"w": np.zeros(2)}), "box": [Box("m", [1, Both(2, 3)])]}
    flat, paths = flatten(sd)
    assert list(flat) == ["ema.decay", "ema.shadow.w", "box.0.0", "box.0.1.0", "box.0.1.1"]
    assert paths["box.0.1.0"] == (("dict", "box"), ("list", 0), ("tuple", 1), ("tuple", 0))
    assert flat["ema.shadow.w"] is sd["ema"].shadow["w"]


def test_a_state_dict_without_nodes_has_the_data_it_had():
    assert local_plan({"a": {"b": 1}}).planner_data == {"paths": flatten({"a": {"b": 1}})[1]}


def test_named_tuples_keep_their_class_where_the_caller_has_one():
    sd = {"a": Pair(np.zeros(2), 1), "b": [Pair(1, 2)], "c": {"d": Pair(Pair(1, 2), [])}}
    done = unflatten(*flatten(sd), like=sd)
    kinds = [type(done["a"]), type(done["b"][0]), type(done["c"]["d"].left)]
    assert kinds == [Pair, Pair, Pair]
    assert type(unflatten(*flatten(sd))["a"]) is tuple


def test_what_is_made_anew_is_of_the_same_class():
    assert with_entry(Average(0.9, {}), "decay", 0.5) == Average(0.5, {})
    assert type(with_entry(Pair(1, 2), 0, 3)) is Pair
    assert type(with_entry(Both(1, 2), 0, 3)) is Both
    assert with_entry(Box("m", [1]), 0, 2) == Box("m", [2])
    pair = Pair(1, 2)
    assert with_entry(pair, 0, pair.left) is pair


def test_ranks_must_agree_on_the_data_of_a_node():
    plans = [local_plan({"a": {"b": Box(unit, [1])}}) for unit in ("m", "cm")]
    with pytest.raises(PlanError, match=r"`a\.b` is a .*Box with .*'m'.* on rank 0 and a .*'cm'"):
        global_plan(plans)
    parts = [local_plan({"a": Average(0.9, {key: 1})}) for key in "xy"]
    data = global_plan(parts)[1].planner_data
    assert list(saved_nodes(data)) == [(("dict", "a"),)]


def test_a_node_that_is_renamed_in_part_comes_back_plain():
    plan = local_plan({"a": Average(0.9, 1), "b": Average(0.9, 1)})
    (done,) = chain(rename({"a.decay": "decay"}), select("*"))((plan,))
    assert list(saved_nodes(done.planner_data)) == [(("dict", "b"),)]


def test_a_class_is_registered_once():
    assert register_node(Average) is Average
    assert register_node(Box, open_box, make_box) is Box
    with pytest.raises(ValueError, match=r"test_nodes\.Box is registered already"):
        register_node(Box, open_box, lambda data, things: Box("", things))


@pytest.mark.parametrize("kind", [dict, list, tuple, int, str, 3, "Box"])
def test_only_classes_of_ones_own_are_registered(kind):
    with pytest.raises(TypeError, match="a class of your own"):
        register_node(kind, open_box, make_box)


def test_a_class_without_fields_needs_functions():
    class Thing:
        pass

    with pytest.raises(TypeError, match=r"is not a dataclass.*give flatten and unflatten"):
        register_node(Thing)
    with pytest.raises(TypeError, match="together, or neither"):
        register_node(Thing, open_box)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dataclasses.make_dataclass(
            "Hidden", ["decay", ("shadow", dict, dataclasses.field(init=False, default=3))]
        ),
        lambda: attrs.make_class(
            "Hidden", {"decay": attrs.field(), "shadow": attrs.field(init=False)}
        ),
    ],
)
def test_a_class_with_fields_that_no_call_sets_needs_functions(make):
    with pytest.raises(TypeError, match=r"init=False \(`shadow`\).*give flatten and unflatten"):
        register_node(make())
    kind = make()
    register_node(kind, lambda value: ({"decay": value.decay}, None), lambda _, had: kind(**had))
    assert flatten({"a": kind(0.5)})[0] == {"a.decay": 0.5}


def broken(name, flatten):
    kind = type(name, (), {})
    register_node(kind, flatten, lambda data, children: kind())
    return {"a": kind()}


@pytest.mark.parametrize(
    ("flatten_to", "reason"),
    [
        ({}, "must return its children and other data"),
        (("ab", None), "must return its children and other data"),
        ((3, None), "must be a dict or a sequence"),
        (((), None), "without children"),
    ],
)
def test_functions_that_return_something_else_are_refused(flatten_to, reason):
    with pytest.raises(RefusedError, match=reason):
        flatten(broken("Odd", lambda value: flatten_to))


def test_data_that_no_file_can_hold_is_refused_by_name():
    with pytest.raises(RefusedError, match="the data of `a` is a object"):
        local_plan(broken("Opaque", lambda value: ([1], object())))


def test_a_node_that_cannot_be_made_is_named():
    (only,) = broken("Failing", lambda value: ([1], None)).values()
    register_node(sub := type("Sub", (type(only),), {}), lambda v: ([1], None), int)
    sd = {"a": {"b": sub()}}
    with pytest.raises(TypeError) as caught:
        unflatten(*flatten(sd), like=sd)
    assert "while making `a.b`" in caught.value.__notes__[0]


@pytest.mark.parametrize("nodes", [3, {"a": 3}, {"a": (1, 2)}, {"a": ("x",)}])
def test_damaged_nodes_are_refused(nodes):
    with pytest.raises(CodecError, match="record of node classes is damaged"):
        saved_nodes(FrozenDict({"nodes": nodes}))
