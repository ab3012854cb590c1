"""content_hash: equal for equal contents however they are cut, different for any difference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.dist import CheckpointError, run_ranks, solo
from shardplan.io import FormatError, LoadError, PlaceSums, place_sums
from shardplan.planning import Chunk, Mesh, PlanError, Replicate, Shard, TensorSpec, world_plans
from shardplan.planning.testing.strategies import meshes, placements, shapes, tilings


class Shards:
    """What one rank holds of a tensor, as boxes of its own memory."""

    def __init__(self, whole, chunks):
        self.shape, self.dtype = whole.shape, whole.dtype
        self.parts = {chunk: box(whole, chunk).clone() for chunk in chunks}

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))


def box(tensor, chunk):
    return tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]


def states(tensors, specs, mesh):
    made = []
    for plan in world_plans(specs, mesh):
        chunks = {}
        for item in plan.items:
            chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
        made.append({name: Shards(tensors[name], held) for name, held in chunks.items()})
    return made


def sums(array, shape, offsets, sizes):
    part = array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    data = np.frombuffer(np.ascontiguousarray(part).tobytes(), np.uint8)
    return place_sums(data, array.itemsize, shape, offsets, sizes)


LARGE = [(3, 1030), (2, 3, 520), (5, 1025), (1, 7), (4100,), (2, 2, 515), (300, 3)]


@given(st.data(), shapes(min_side=1) | st.sampled_from(LARGE), st.sampled_from("bhfd"))
def test_the_sums_of_any_boxes_add_up_to_those_of_the_whole(data, shape, kind):
    array = np.frombuffer(np.random.default_rng(0).bytes(8 * math.prod(shape)), np.uint8)
    array = array[: math.prod(shape) * np.dtype(kind).itemsize].view(kind).reshape(shape)
    tiling = data.draw(tilings(shape))
    parts = [sums(array, shape, chunk.offsets, chunk.sizes) for chunk in tiling]
    whole = sums(array, shape, (0,) * len(shape), shape)
    assert sum(parts, PlaceSums()) == whole


@st.composite
def worlds(draw):
    sizes = draw(st.dictionaries(st.sampled_from("abc"), shapes(min_side=1), min_size=1))
    tensors = {name: torch.randn(shape) for name, shape in sizes.items()}
    mesh = draw(meshes(max_ranks=4))
    specs = {
        name: TensorSpec(shape, "float32", draw(placements(mesh, shape)))
        for name, shape in sizes.items()
    }
    return tensors, states(tensors, specs, mesh)


@given(worlds())
def test_it_is_the_same_under_every_sharding(world):
    tensors, ranks = world
    expected = shardplan.content_hash({**tensors, "step": 7})
    by_tensor = shardplan.content_hash({**tensors, "step": 7}, by="tensor")
    found = run_ranks(
        len(ranks),
        lambda comm: (
            shardplan.content_hash({**ranks[comm.rank], "step": 7}, comm=comm),
            shardplan.content_hash({**ranks[comm.rank], "step": 7}, by="tensor", comm=comm),
        ),
        timeout=60,
    )
    assert found == [(expected, by_tensor)] * len(ranks)
    assert sorted(by_tensor) == sorted([*tensors, "step"])


STATE = {
    "w": torch.randn(65, 130),
    "half": torch.randn(7, 3).bfloat16(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "nested": {"x": [torch.ones(2), 5]},
    "lr": 0.5,
}


@pytest.mark.parametrize("format", ["safetensors", "dcp", "torch"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_has_the_hash_of_the_state_in_every_format(tmp_path, format, ranks):
    path = tmp_path / "c.pt"
    shardplan.save(STATE, path, format=format)
    found = run_ranks(ranks, lambda comm: shardplan.content_hash(path, comm=comm), timeout=60)
    assert found == [shardplan.content_hash(STATE)] * ranks


def changed(name, change):
    state = {
        key: value.clone() if torch.is_tensor(value) else value for key, value in STATE.items()
    }
    change(state)
    return pytest.param(state, id=name)


def swap(state):
    row = state["w"][0].clone()
    state["w"][0], state["w"][1] = state["w"][1].clone(), row


def swap_two(state):
    w = state["w"].view(-1)
    w[3], w[5] = w[5].clone(), w[3].clone()


def flip_signs(state):
    w = state["w"].view(-1)
    w[1] *= -1
    w[9] *= -1


@pytest.mark.parametrize(
    "state",
    [
        changed("an element", lambda s: s["w"][64].__setitem__(129, 0.0)),
        changed("one bit", lambda s: s["half"].view(torch.int16)[6].__setitem__(2, 1)),
        changed("rows swapped", swap),
        changed("elements swapped", swap_two),
        changed("two signs", flip_signs),
        changed("all signs", lambda s: s.update(w=-s["w"])),
        changed("a shape", lambda s: s.update(w=s["w"].view(130, 65))),
        changed("a dtype", lambda s: s.update(flags=s["flags"].to(torch.uint8))),
        changed("a name", lambda s: s.update(v=s.pop("w"))),
        changed("a value", lambda s: s.update(lr=0.25)),
        changed("a value's type", lambda s: s.update(lr="0.5")),
        changed("an empty tensor", lambda s: s.update(empty=torch.empty(3, 0))),
        changed("one less", lambda s: s.pop("scalar")),
    ],
)
def test_any_difference_changes_it(state):
    assert shardplan.content_hash(state) != shardplan.content_hash(STATE)


def test_only_the_tensors_that_differ_have_another_hash():
    one = shardplan.content_hash(STATE, by="tensor")
    other = shardplan.content_hash({**STATE, "lr": 1.0}, by="tensor")
    assert {name for name in one if one[name] != other[name]} == {"lr"}


def test_replicas_that_differ_and_parts_that_lack_are_refused():
    specs = {"w": TensorSpec((4, 2), "float32", [Replicate()])}
    ranks = states({"w": torch.ones(4, 2)}, specs, Mesh(n=2))
    next(iter(ranks[1]["w"].parts.values()))[0] = 5
    with pytest.raises(CheckpointError, match="`w` differs between ranks: rank 0 against rank 1"):
        run_ranks(2, lambda comm: shardplan.content_hash(ranks[comm.rank], comm=comm), timeout=60)
    specs = {"w": TensorSpec((4, 2), "float32", [Shard(0)])}
    half = states({"w": torch.ones(4, 2)}, specs, Mesh(n=2))[0]
    with pytest.raises(PlanError, match="`w` have 4 of its 8 elements"):
        shardplan.content_hash(half)


def test_another_by_is_refused():
    with pytest.raises(ValueError, match='by must be "all" or "tensor"'):
        shardplan.content_hash({}, by="file")


def test_a_load_proves_that_it_brought_what_was_expected(tmp_path):
    state = {"w": torch.randn(6, 4), "step": 7}
    expected = shardplan.content_hash(state)
    shardplan.save(state, tmp_path)

    def work(comm):
        target = {"w": torch.zeros(6, 4), "step": 0}
        shardplan.load(target, tmp_path, expect=expected, comm=comm)
        with pytest.raises(FormatError, match=f"content hash is {expected}, not {'0' * 32}"):
            shardplan.load(target, tmp_path, expect="0" * 32, comm=comm)
        return target["step"]

    assert run_ranks(2, work) == [7, 7]
    with pytest.raises(ValueError, match="once the future is done"):
        shardplan.load({"w": torch.zeros(6, 4)}, tmp_path, expect=expected, background=True)


def test_a_transfer_proves_that_both_sides_hold_the_same():
    whole = torch.randn(6, 4)

    def work(comm):
        if comm.rank < 2:
            rows = Shards(whole, [Chunk((3 * comm.rank, 0), (3, 4))])
            return shardplan.transfer({"w": rows, "step": 3}, None, verify=True, comm=comm)
        target = {"w": torch.zeros(6, 4), "step": 0}
        report = shardplan.transfer(None, target, verify=True, comm=comm)
        assert torch.equal(target["w"], whole)
        return report

    assert all("verify" in report.seconds for report in run_ranks(3, work))
    with pytest.raises(ValueError, match="planners and casts change"):
        shardplan.transfer({}, {}, verify=True, dtype="cast")


def test_a_target_that_changes_what_it_is_given_is_noticed():
    source, target = {"w": torch.zeros(4)}, {"w": torch.ones(4)}

    class Target:
        def state_dict(self):
            return target

        def load_state_dict(self, state):
            target["w"] = state["w"] + 1

    with pytest.raises(LoadError, match="`w` differ"):
        shardplan.transfer(source, Target(), verify=True, comm=solo())
