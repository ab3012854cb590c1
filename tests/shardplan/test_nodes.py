"""Objects of registered classes and named tuples, saved and loaded."""

import collections
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.stores.base import open_store
from shardplan.planning import PlanError, cast, drop, rename

Pair = collections.namedtuple("Pair", "a b")


@shardplan.register_node
@dataclasses.dataclass(frozen=True)
class Average:
    decay: float
    shadow: dict


class Model:
    """A class with parameters, and with data that is no state."""

    def __init__(self, width, params):
        self.width, self.params = width, params


shardplan.register_node(
    Model,
    lambda model: ({"params": dict(model.params)}, {"width": model.width}),
    lambda data, children: Model(data["width"], children["params"]),
)


@pytest.fixture
def store():
    return open_store(f"memory://{os.urandom(6).hex()}")


def averages(fill, decay):
    shadow = {"w": torch.full((4,), fill), "names": ["a"], "steps": int(fill)}
    return {"ema": [Average(decay, shadow)], "step": int(fill)}


def test_an_object_is_loaded_in_the_place_of_the_one_that_was_there(store):
    shardplan.save(averages(1.0, 0.9), store)
    target = averages(0.0, 0.0)
    tensor, outer = target["ema"][0].shadow["w"], target["ema"]
    shardplan.load(target, store)
    (found,) = target["ema"]
    assert type(found) is Average
    assert (found.decay, found.shadow["steps"], found.shadow["names"]) == (0.9, 1, ["a"])
    assert found.shadow["w"] is tensor
    assert tensor.tolist() == [1, 1, 1, 1]
    assert target["ema"] is outer


def test_children_that_are_copies_of_containers_are_put_back(store):
    shardplan.save({"m": Model(3, {"w": torch.ones(2), "lr": 0.5})}, store)
    target = {"m": Model(3, {"w": torch.zeros(2), "lr": 0.0})}
    shardplan.load(target, store)
    assert target["m"].params["lr"] == 0.5
    assert target["m"].params["w"].tolist() == [1, 1]


def test_restore_makes_objects_of_registered_classes(store):
    shardplan.save(averages(1.0, 0.9) | {"m": Model(3, {"w": torch.ones(2)})}, store)
    for target in (None, averages(0.0, 0.0) | {"m": Model(3, {"w": torch.zeros(2)})}):
        found = shardplan.restore(store, target=target)
        assert type(found["ema"][0]) is Average
        assert found["ema"][0].shadow["w"].tolist() == [1, 1, 1, 1]
        assert (found["m"].width, found["m"].params["w"].tolist()) == (3, [1, 1])


def test_a_program_without_the_class_gets_dicts_and_imports_nothing(tmp_path):
    shardplan.save({"ema": Average(0.9, {"steps": 1})}, tmp_path)
    code = "import sys, shardplan; "
    code += f"print(shardplan.restore({str(tmp_path)!r}), {__name__!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'ema': {'decay': 0.9, 'shadow': {'steps': 1}}} False\n"


@pytest.mark.parametrize("inside", [3, torch.ones(1)], ids=["value", "tensor"])
def test_named_tuples_keep_their_class_where_they_are_loaded(store, inside):
    shardplan.save({"x": Pair(inside, 3), "y": [Pair(1, 2)], "z": [Pair(1, 2)]}, store)
    blank = torch.zeros(1) if isinstance(inside, torch.Tensor) else 0
    target = {"x": Pair(blank, 0), "y": [Pair(0, 0)], "z": [(0, 0)]}
    shardplan.load(target, store)
    assert target == {"x": Pair(inside, 3), "y": [Pair(1, 2)], "z": [(1, 2)]}
    assert type(target["x"]) is type(target["y"][0]) is Pair
    assert type(target["z"][0]) is tuple
    found = shardplan.restore(store, target=target)
    assert type(found["x"]) is type(found["y"][0]) is Pair


@pytest.mark.parametrize("format", ["safetensors", "dcp", "torch"])
def test_any_format_holds_the_leaves(tmp_path, format):
    place = tmp_path / ("a.pt" if format == "torch" else "a")
    shardplan.save(averages(1.0, 0.9), place, format=format)
    target = averages(0.0, 0.0)
    shardplan.load(target, place)
    assert target["ema"][0].decay == 0.9
    assert target["ema"][0].shadow["w"].tolist() == [1, 1, 1, 1]


def test_a_converted_checkpoint_knows_its_classes(tmp_path):
    shardplan.save(averages(1.0, 0.9), tmp_path / "a")
    shardplan.convert(tmp_path / "a", tmp_path / "b", planner=cast("bfloat16"))
    assert type(shardplan.restore(tmp_path / "b")["ema"][0]) is Average


def test_a_snapshot_of_an_asynchronous_save_holds_objects(tmp_path):
    shardplan.async_save(averages(1.0, 0.9), tmp_path / "a").result()
    assert shardplan.restore(tmp_path / "a")["ema"][0].decay == 0.9


def test_what_is_in_fixed_containers_is_replaced_too(store):
    shardplan.save({"x": (Average(0.9, {"k": 1}), 2)}, store)
    target = {"x": (Average(0.0, {"k": 0}), 0)}
    shardplan.load(target, store)
    assert target == {"x": (Average(0.9, {"k": 1}), 2)}


def test_a_class_that_is_not_registered_is_refused_with_the_remedy(store):
    @dataclasses.dataclass
    class Unknown:
        a: int

    with pytest.raises(TypeError, match=r"`x` is a .*Unknown.*register_node"):
        shardplan.save({"x": Unknown(1)}, store)


def test_a_node_that_a_checkpoint_lacks_is_missing_leaf_by_leaf(store):
    shardplan.save({"step": 1}, store)
    with pytest.raises(PlanError, match=r"`ema\.0\.decay` is not in the checkpoint"):
        shardplan.load(averages(0.0, 0.0), store)


def held_in(sd):
    """Return what a state dict holds, as plain values."""
    plain = sd["x"]
    if isinstance(plain, Average):
        return "average", plain.decay, {k: plain.shadow[k].tolist() for k in sorted(plain.shadow)}
    if isinstance(plain, Model):
        return "model", plain.width, {k: plain.params[k].tolist() for k in sorted(plain.params)}
    return "value", plain


OBJECTS = [
    Average(0.9, {"w": torch.ones(2)}),
    Average(0.9, {"w": torch.arange(4.0), "b": torch.ones(3)}),
    Average(0.9, {"w": torch.arange(2)}),
    Model(1, {"w": torch.ones(2)}),
    Model(True, {"w": torch.ones(2)}),
    Model("1", {"w": torch.ones(2)}),
    3,
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_of_one_object_is_never_taken_for_another(ranks, tmp_path):
    """Plans of earlier saves are kept by layout; an object's layout is what is in it."""

    def fn(comm):
        for number, thing in enumerate([*OBJECTS, *reversed(OBJECTS)]):
            place = tmp_path / str(number)
            shardplan.save({"x": thing}, place, comm=comm)
            found, wanted = held_in(shardplan.restore(place)), held_in({"x": thing})
            assert repr(found) == repr(wanted), number

    run_ranks(ranks, fn, timeout=60)


def test_a_node_that_is_restored_in_part_is_a_dict(store):
    shardplan.save(averages(1.0, 0.9), store)
    for options in ({"keys": "ema.0.shadow.*"}, {"planner": rename({"decay": "ema.0.decay"})}):
        found = shardplan.restore(store, **options)
        assert type(found["ema"][0]) is dict
        assert found["ema"][0]["shadow"]["w"].tolist() == [1, 1, 1, 1]
    whole = shardplan.restore(store, keys="ema.*", planner=rename({"x": "y"}, required=False))
    assert type(whole["ema"][0]) is Average


def test_a_node_of_which_a_planner_dropped_a_leaf_is_a_dict(store):
    shardplan.save(averages(1.0, 0.9), store, planner=drop("ema.0.decay"))
    assert set(shardplan.restore(store)["ema"][0]) == {"shadow"}
