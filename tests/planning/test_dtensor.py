"""Real DTensors and ShardedTensors: what is planned is what is held, value for value.

Two ways to be a rank: four processes with a gloo group (ranks/hold.py), started once, and torch's
"fake" backend, by which one process is any rank of any mesh in turn while nobody communicates.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as ShardedTensorProperties,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.planning import (
    Chunk,
    MetadataIndex,
    NotFoundError,
    RefusedError,
    WriteItemType,
    decode_plan,
    find_object,
    find_shard,
    flatten,
    global_plan,
    load_plan,
    local_plan,
)
from shardplan.planning.mesh import JoinedPlans, derive_joined, describe, layout_key
from shardplan.planning.tensors import kind_of, shard_finder

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


def count_up(*shape):
    """Return the tensor whose every element is its own position."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def region(offsets, sizes):
    return tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))


def boxes(plan, name):
    return [
        (i.tensor_data.chunk.offsets, i.tensor_data.chunk.sizes)
        for i in plan.items
        if i.index.fqn == name
    ]


# Any rank, in one process


@contextmanager
def as_rank(rank, world):
    """Be one rank of a group in which nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # It keeps meshes, and with them the coordinates of the rank that was.
        _clear_sharding_prop_cache()


def held_by_each_rank(make, mesh_shape, names=None):
    """Plan ``make(mesh)`` on every rank; check every value found; return the plans."""
    world = math.prod(mesh_shape)
    plans = []
    for rank in range(world):
        with as_rank(rank, world):
            sd = make(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
            plan, find = local_plan(sd), shard_finder(sd)
            for item in plan.items:
                chunk, size = item.tensor_data.chunk, item.tensor_data.size
                found = find_shard(sd, item.source)
                assert same_view(find(item.source.fqn, item.source.offset), found)
                expected = count_up(*size)[region(chunk.offsets, chunk.sizes)]
                # Of an empty tensor every rank holds all, in whatever shape its memory has.
                assert (
                    torch.equal(found.detach(), expected) or found.numel() == math.prod(size) == 0
                )
                local = sd[item.source.fqn]._local_tensor
                same = found.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                assert same, "a copy was found, not the memory"
            plans.append(plan)
    return tuple(plans)


def same_view(a, b):
    """Return whether two tensors are the same elements of the same memory."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


@st.composite
def layouts(draw):
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    assume(math.prod(mesh) <= 8)
    shape = draw(st.lists(st.integers(0, 13), max_size=3))
    kinds = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds.append(st.builds(Shard, dims))
        kinds.append(
            st.builds(lambda d, f: _StridedShard(d, split_factor=f), dims, st.integers(1, 3))
        )
    placements = draw(st.lists(st.one_of(kinds), min_size=len(mesh), max_size=len(mesh)))
    return tuple(mesh), tuple(shape), tuple(placements)


@given(layouts())
@example(((3, 2), (13, 2), (_StridedShard(0, split_factor=2), Shard(0))))
@example(((2, 2), (6,), (_StridedShard(0, split_factor=2), Shard(0))))
@example(((2,), (0, 3), (Shard(1),)))
@example(((3,), (), (Replicate(),)))
def test_every_rank_finds_the_values_it_plans_and_together_they_are_the_tensor(layout):
    mesh_shape, shape, placements = layout

    def make(mesh):
        return {
            name: distribute_tensor(count_up(*shape), mesh, placements, src_data_rank=None)
            for name in ("like it", "w")
        }

    plans = held_by_each_rank(make, mesh_shape)
    _, metadata = global_plan(plans)
    for name in ("like it", "w"):
        assert metadata.state_dict_metadata[name].size == shape
        assert metadata.state_dict_metadata[name].chunks.volume() == math.prod(shape)


def test_a_strided_uneven_dtensor_is_found_in_as_many_places_as_it_lies():
    """13 rows on dp 3 × tp 2: one rank holds rows 6 and 11, next to each other in its memory."""

    def make(mesh):
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return {"w": distribute_tensor(count_up(13, 2), mesh, placements, src_data_rank=None)}

    plans = held_by_each_rank(make, (3, 2))
    assert boxes(plans[4], "w") == [((6, 0), (1, 2)), ((11, 0), (1, 2))]
    assert boxes(plans[5], "w") == [((12, 0), (1, 2))]


def test_writing_into_what_was_found_changes_the_dtensor_there_and_nowhere_else():
    with as_rank(4, 6):
        mesh = init_device_mesh("cpu", (3, 2))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        tensor = distribute_tensor(count_up(13), mesh, placements, src_data_rank=None)
        find_shard({"w": tensor}, MetadataIndex("w", (11,))).fill_(-1)
        assert tensor.to_local().tolist() == [6, -1]


def linear(rows, dp, tp):
    """Return a maker of an FSDP2 × TP linear layer, cut by rows both times."""

    def make(mesh):
        layer = nn.Linear(2, rows)
        with torch.no_grad():
            layer.weight.copy_(count_up(rows, 2))
            layer.bias.copy_(count_up(rows))
        parallelize_module(layer, mesh["tp"], ColwiseParallel(), src_data_rank=None)
        return dict(fully_shard(layer, mesh=mesh["dp"]).state_dict())

    return lambda: held_by_each_rank(make, (dp, tp), ("dp", "tp"))


@pytest.mark.parametrize(
    ("rows", "dp", "tp"),
    [(8, 2, 2), (24, 3, 4), (6, 2, 2), (5, 2, 2), (13, 3, 2), (27, 3, 4), (10, 4, 4), (1, 2, 2)],
)
def test_fsdp_times_tp_is_strided_and_found_where_it_lies(rows, dp, tp):
    """Six rows on FSDP 2 × TP 2 are uneven: ranks hold [0, 1], [3, 4], [2], [5] (PT PR#163843)."""
    plans = linear(rows, dp, tp)()
    _, metadata = global_plan(plans)
    assert metadata.state_dict_metadata["weight"].chunks.volume() == 2 * rows
    if rows == 6:
        assert [boxes(p, "bias") for p in plans] == [
            [((0,), (2,))],
            [((3,), (2,))],
            [((2,), (1,))],
            [((5,), (1,))],
        ]


def test_fsdp_times_tp_holds_other_rows_than_its_placements_say_and_they_are_found():
    """FSDP2 cuts each TP shard by itself; its placements, read as torch reads them, cut elsewhere.

    Of 13 rows on dp 3 × tp 2 FSDP2 leaves rank 4 with row 6, the placements say rows 6 and 11.
    """
    plans = linear(13, 3, 2)()
    assert boxes(plans[4], "bias") == [((6,), (1,))]
    assert boxes(plans[5], "bias") == [((11,), (2,))]


def test_wherever_fsdp_times_tp_holds_other_rows_than_placed_some_rank_has_another_size():
    """So comparing sizes on each rank is enough: no such layout passes on all of them."""
    differing = 0
    for rows in range(1, 41):
        for dp in range(2, 5):
            for tp in range(2, 5):
                cells = torch.arange(rows)
                striped = _StridedShard(0, split_factor=tp)
                split, _ = striped._split_tensor(cells, dp, with_padding=False)
                for d in range(dp):
                    placed, _ = Shard(0)._split_tensor(split[d], tp, with_padding=False)
                    held = [_part(_part(cells, tp, t), dp, d) for t in range(tp)]
                    if [h.tolist() for h in held] != [p.tolist() for p in placed]:
                        differing += 1
                        assert [len(h) for h in held] != [len(p) for p in placed]
    assert differing  # else nothing was tried


def _part(cells, parts, ours):
    shards, _ = Shard(0)._split_tensor(cells, parts, with_padding=False)
    return shards[ours]


def test_fsdp_may_cut_another_axis_than_the_first():
    def make(mesh):
        layer = nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            layer.weight.copy_(count_up(3, 6))
        return dict(
            fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1)).state_dict()
        )

    plans = held_by_each_rank(make, (3,))
    assert [boxes(p, "weight") for p in plans] == [[((0, 2 * r), (3, 2))] for r in range(3)]


def test_a_rank_outside_the_mesh_holds_nothing_not_even_of_an_empty_tensor():
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = DeviceMesh("cpu", [1, 3])
            sd = {
                "w": distribute_tensor(count_up(5, 2), mesh, [Shard(0)], src_data_rank=None),
                "none": distribute_tensor(count_up(0, 2), mesh, [Shard(0)], src_data_rank=None),
            }
            plan = local_plan(sd)
            if rank in (0, 2):
                assert len(plan.items) == 0
                with pytest.raises(NotFoundError, match="this rank holds nothing"):
                    find_shard(sd, MetadataIndex("w", (0, 0)))
            else:
                assert [i.index.fqn for i in plan.items] == ["none", "w"]


def test_a_tensor_that_is_sharded_in_another_order_than_its_mesh_is_refused_by_name():
    """Its placements are those of a plain one, and so is its local shape; what it holds is not."""
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        plain = distribute_tensor(count_up(8), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = DTensorSpec(mesh, plain.placements, plain._spec.tensor_meta, shard_order=order)
        odd = DTensor(torch.tensor([4.0, 5.0]), spec, requires_grad=False)
        assert local_plan({"w": plain}).items[0].tensor_data.chunk == Chunk((2,), (2,))
        with pytest.raises(RefusedError, match=r"`w` is sharded in another order.*redistribute"):
            local_plan({"w": odd})


@pytest.mark.parametrize("placement", [Partial(), Partial("max")])
def test_a_partial_sum_is_refused_by_name_with_every_other_such_key(placement):
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        loss = DTensor.from_local(torch.ones(2), mesh, [placement])
        with pytest.raises(RefusedError) as failure:
            local_plan({"loss": loss, "nested": {"other": loss}, "fine": torch.ones(1)})
    text = str(failure.value)
    assert "`loss` is Partial" in text
    assert "`nested.other` is Partial" in text
    assert "fine" not in text


def test_a_dtensor_whose_local_tensor_has_another_shape_is_refused_by_name():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,), stride=(1,))
        with pytest.raises(RefusedError, match=r"`w`: its local tensor has shape \(3,\)"):
            local_plan({"w": tensor})


def test_a_replicated_dtensor_is_held_whole_by_every_rank_and_written_once():
    def make(mesh):
        return {"w": distribute_tensor(count_up(4), mesh, [Replicate()], src_data_rank=None)}

    plans = held_by_each_rank(make, (3,))
    assert [boxes(p, "w") for p in plans] == [[((0,), (4,))]] * 3
    written, _ = global_plan(plans)
    assert sorted(len(p.items) for p in written) == [0, 0, 1]


# ShardedTensor, and classes that list their own chunks


def sharded_tensor(*shards, size):
    """Return a ShardedTensor with the given local shards, (offsets, values) each."""
    local = [LocalShard.from_tensor_and_offsets(v, list(o), dist.get_rank()) for o, v in shards]
    metadata = ShardedTensorMetadata(
        shards_metadata=[s.metadata for s in local],
        size=torch.Size(size),
        tensor_properties=ShardedTensorProperties(dtype=torch.float32),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


class Pieces:
    """A tensor-like class that knows its own chunks, as torch's protocol has it."""

    dtype = torch.float32

    def __init__(self, shape, *pieces):
        self.shape = torch.Size(shape)
        self.pieces = pieces
        self.asked = []

    def __create_chunk_list__(self):
        return [SimpleNamespace(offsets=torch.Size(o), sizes=v.shape) for o, v in self.pieces]

    def __get_tensor_shard__(self, index):
        self.asked.append(index)
        (found,) = (v for o, v in self.pieces[index.index :][:1] if o == index.offset)
        return found


def test_a_sharded_tensor_gives_each_of_its_local_shards():
    rows = count_up(4, 2)
    with as_rank(0, 1):
        sd = {"w": sharded_tensor(((2, 0), rows[2:]), ((0, 0), rows[:2]), size=(4, 2))}
        plan = local_plan(sd)
        assert boxes(plan, "w") == [((2, 0), (2, 2)), ((0, 0), (2, 2))]
        assert {i.type for i in plan.items} == {WriteItemType.SHARD}
        for item in plan.items:
            chunk = item.tensor_data.chunk
            assert torch.equal(
                find_shard(sd, item.source), rows[region(chunk.offsets, chunk.sizes)]
            )


def test_a_class_with_the_chunk_protocol_gives_each_of_its_pieces():
    rows = count_up(4, 2)
    pieces = Pieces((4, 2), ((2, 0), rows[2:]), ((0, 0), rows[:2]))
    plan = local_plan({"w": pieces})
    assert boxes(plan, "w") == [((2, 0), (2, 2)), ((0, 0), (2, 2))]
    for item in plan.items:
        assert find_shard({"w": pieces}, item.source).data_ptr() in {
            v.data_ptr() for o, v in pieces.pieces if o == item.index.offset
        }
    assert [(i.fqn, i.offset, i.index) for i in pieces.asked] == [
        ("w", (2, 0), 0),
        ("w", (0, 0), 1),
    ]


def test_a_dtensor_around_several_local_shards_gives_each_of_them():
    """Torch's LocalShardsWrapper: the local tensor, not the placements, knows the chunks."""
    rows = count_up(8, 2)
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = LocalShardsWrapper([rows[0:1], rows[5:7]], [(0, 0), (5, 0)])
        tensor = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
        )
        plan = local_plan({"w": tensor})
        assert boxes(plan, "w") == [((0, 0), (1, 2)), ((5, 0), (2, 2))]
        assert torch.equal(find_shard({"w": tensor}, plan.items[1].source), rows[5:7])


def empty_and_real(kind):
    """Return a tensor whose shards here are an empty and a real one at the same offset."""
    shards = ((0, 0), torch.empty(0, 2)), ((0, 0), count_up(4, 2))
    return Pieces((4, 2), *shards) if kind == "pieces" else sharded_tensor(*shards, size=(4, 2))


@pytest.mark.parametrize("kind", ["pieces", "ShardedTensor"])
def test_an_empty_shard_never_hides_a_real_one_at_the_same_offset(kind):
    with as_rank(0, 1):
        sd = {"w": empty_and_real(kind)}
        (item,) = local_plan(sd).items
        assert item.tensor_data.chunk == Chunk((0, 0), (4, 2))
        assert torch.equal(find_shard(sd, item.source), count_up(4, 2))
        assert torch.equal(shard_finder(sd)("w", (0, 0)), count_up(4, 2))


def test_tensors_that_hold_other_things_are_of_other_kinds():
    """Planning looks at one tensor of a kind, and takes all others for the same."""
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def placed(*placements, mesh=mesh, of=torch.zeros, **made):
            return distribute_tensor(of(4, 4, **made), mesh, placements, src_data_rank=None)

        alike = placed(Shard(0), Replicate()), placed(Shard(0), Replicate(), of=torch.ones)
        assert kind_of(alike[0]) == kind_of(alike[1])
        others = [
            alike[0],
            placed(Shard(1), Replicate()),
            placed(Replicate(), Shard(0)),
            placed(_StridedShard(0, split_factor=2), Shard(0)),
            placed(Shard(0), mesh=mesh["dp"]),
            placed(Shard(0), Replicate(), dtype=torch.float16),
            placed(Shard(0), Replicate(), requires_grad=True),
            torch.zeros(4, 4),
            torch.zeros(4, 4, requires_grad=True),
            torch.zeros(2, 4),
            torch.nn.Parameter(torch.zeros(4, 4)),
            np.zeros((4, 4), np.float32),
        ]
        assert len({kind_of(other) for other in others}) == len(others)
        # Of the same placements, but another local shape than they say: refused, by name.
        odd = DTensor(torch.zeros(3, 4), alike[0]._spec, requires_grad=False)
        with pytest.raises(RefusedError, match="`odd`"):
            local_plan({"even": alike[0], "odd": odd})


@pytest.mark.parametrize("kind", ["pieces", "ShardedTensor"])
def test_what_has_shards_of_its_own_is_of_no_kind(kind):
    with as_rank(0, 1):
        assert kind_of(empty_and_real(kind)) is None


class Like:
    """What planning takes for a DTensor; a ``_spec`` of such a class may mean anything."""

    def __init__(self, local, placements, mesh, **more):
        self.shape, self.dtype = torch.Size((4,)), local.dtype
        self.placements, self.device_mesh, self._local_tensor = placements, mesh, local
        self.__dict__.update(more)


@pytest.mark.parametrize("more", [{}, {"_spec": "by rows"}])
def test_what_only_looks_like_a_dtensor_is_planned_and_found_by_its_own_placements(more):
    """Two such tensors that differ in nothing but their meshes."""

    def mesh(place):
        return SimpleNamespace(shape=(2,), get_coordinate=lambda: (place,))

    sd = {
        "a": Like(torch.zeros(2), (Shard(0),), mesh(0), **more),
        "b": Like(torch.ones(2), (Shard(0),), mesh(1), **more),
    }
    assert boxes(local_plan(sd), "a") == [((0,), (2,))]
    assert boxes(local_plan(sd), "b") == [((2,), (2,))]
    assert layout_key({"w": sd["a"]}) is layout_key({"w": sd["b"]}) is None
    find = shard_finder(sd)
    assert find("a", (0,)) is sd["a"]._local_tensor
    assert find("b", (2,)) is sd["b"]._local_tensor


def test_chunks_of_its_own_count_more_than_a_spec():
    def made(start):
        pieces = Pieces((4,), ((start,), torch.zeros(2)))
        pieces._spec, pieces._local_tensor = "by rows", torch.zeros(2)
        return pieces

    plan = local_plan({"a": made(0), "b": made(2)})
    assert (boxes(plan, "a"), boxes(plan, "b")) == ([((0,), (2,))], [((2,), (2,))])
    assert layout_key({"w": made(0)}) is layout_key({"w": made(2)}) is None


def test_a_plain_tensor_is_its_own_shard_whatever_methods_it_has():
    class Odd(torch.Tensor):
        def to_local(self):
            return torch.zeros(4)

    odd = torch.arange(4.0).as_subclass(Odd)
    assert shard_finder({"w": odd})("w", (0,)) is odd


@torch.no_grad()
def test_a_finder_finds_and_refuses_what_find_shard_does():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        sd = {
            "plain": torch.zeros(4),
            "placed": distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None),
            "sparse": torch.zeros(4).to_sparse(),
            "step": 7,
        }
        find = shard_finder(sd)

        def outcome(find):
            try:
                return id(find())
            except NotFoundError as error:
                return str(error)

        for name, offset in product((*sd, "nope"), ((0,), (1,), (2,), (3,))):
            expected = outcome(partial(find_shard, sd, MetadataIndex(name, offset)))
            assert outcome(partial(find, name, offset)) == expected


def test_columns_of_a_layout_s_key_are_not_mixed_up():
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))

        def placed(size, **made):
            tensor = torch.zeros(size, **made)
            return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

        a, b, c, plain = placed(4), placed(6), placed(4, requires_grad=True), torch.zeros(4)
        odd = DTensor(torch.zeros(3), a._spec, requires_grad=False)
        states = [
            [a, b, plain],
            [b, a, plain],
            [a, plain, b],
            [plain, a, b],
            [a, a, plain],
            [a, c, plain],
            [c, a, plain],
            [odd, a, plain],
            [a, odd, plain],
            [[a], b, plain],
            [a, 1, 2],
            [1, a, 2],
            [1, 2, a],
        ]
        keys = [layout_key(dict(zip("xyz", state, strict=True))) for state in states]
        keys += [layout_key({"x": state}) for state in states]
        assert None not in keys
        assert len(set(keys)) == len(keys)
        again = layout_key({"x": placed(4), "y": placed(6), "z": torch.ones(4)})
        assert again == keys[0]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_tensor_is_planned_and_found_however_it_is_held(shape):
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        empty = torch.empty(shape)
        sd = {
            "plain": empty,
            "array": np.empty(shape, np.float32),
            "dtensor": distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None),
            "replica": distribute_tensor(empty, mesh, [Replicate()], src_data_rank=None),
            "pieces": Pieces(shape, ((0,) * len(shape), empty)),
            "sharded": sharded_tensor(((0,) * len(shape), empty), size=shape),
        }
        plan = local_plan(sd)
        assert {i.index.fqn for i in plan.items} == set(sd)
        find = shard_finder(sd)
        for item in plan.items:
            found = find_shard(sd, item.source)
            assert math.prod(found.shape) == 0
            again = find(item.source.fqn, item.source.offset)
            assert type(again) is type(found)
            assert again.shape == found.shape


# Looking up


def three_kinds():
    """Return a state dict with a sharded tensor, a plain one and another value."""
    rows = count_up(8, 2)
    shards = [((row, 0), rows[row : row + 2]) for row in (0, 2, 4, 6)]
    return {
        "layer.weight": sharded_tensor(*shards, size=(8, 2)),
        "layer.bias": torch.ones(3),
        "step": 7,
    }


@pytest.fixture
def state_dict():
    with as_rank(0, 1):
        yield three_kinds()


@pytest.mark.parametrize("find", [find_object, find_shard])
def test_the_error_about_a_missing_name_lists_the_nearest(state_dict, find):
    with pytest.raises(NotFoundError, match=r"`layer\.wieght` is not in the state dict") as failure:
        find(state_dict, MetadataIndex("layer.wieght", (0, 0)))
    assert failure.value.nearest[0] == "layer.weight"
    assert "nearest: layer.weight" in str(failure.value)


@pytest.mark.parametrize("find", [find_object, find_shard])
def test_the_error_about_a_missing_offset_lists_those_that_exist(state_dict, find):
    with pytest.raises(NotFoundError, match=r"no shard at \(1, 0\)") as failure:
        find(state_dict, MetadataIndex("layer.weight", (1, 0), 0))
    assert failure.value.nearest == ("(0, 0)", "(2, 0)", "(4, 0)", "(6, 0)")


def test_the_error_about_a_missing_offset_of_a_dtensor_lists_those_that_exist():
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        sd = {"w": distribute_tensor(count_up(4), mesh, [Shard(0)], src_data_rank=None)}
        assert find_shard(sd, MetadataIndex("w", (2,))).tolist() == [2, 3]
        with pytest.raises(NotFoundError, match=r"no shard at \(0,\); this rank holds \(2,\)"):
            find_shard(sd, MetadataIndex("w", (0,)))


@pytest.mark.parametrize("find", [find_object, find_shard])
def test_a_plain_tensor_has_no_shard_but_at_its_origin(state_dict, find):
    assert find(state_dict, MetadataIndex("layer.bias")) is state_dict["layer.bias"]
    assert find(state_dict, MetadataIndex("layer.bias", (0,))) is state_dict["layer.bias"]
    with pytest.raises(NotFoundError, match=r"no shard at \(1,\); this rank holds \(0,\)"):
        find(state_dict, MetadataIndex("layer.bias", (1,)))


def test_a_non_tensor_value_has_no_offset_and_no_shard(state_dict):
    assert find_object(state_dict, MetadataIndex("step")) == 7
    with pytest.raises(NotFoundError, match=r"`step` is a int, not a tensor"):
        find_object(state_dict, MetadataIndex("step", (0,)))
    with pytest.raises(NotFoundError, match=r"`step` is a int, not a tensor"):
        find_shard(state_dict, MetadataIndex("step"))


def test_of_several_shards_one_must_be_named(state_dict):
    with pytest.raises(NotFoundError, match="the offset is missing"):
        find_shard(state_dict, MetadataIndex("layer.weight"))


@pytest.mark.parametrize("hint", [None, 0, 1, 2, 3, 4, 99, -1])
def test_a_hint_is_never_trusted(state_dict, hint):
    """Whatever it says, the offset decides."""
    found = find_shard(state_dict, MetadataIndex("layer.weight", (4, 0), hint))
    assert found.tolist() == [[8, 9], [10, 11]]


def test_a_hint_is_probed_first():
    """Two copies of one chunk: without a hint the first is found, with one the copy it names."""
    first, second = count_up(2), count_up(2)
    sd = {"w": Pieces((2,), ((0,), first), ((0,), second))}
    found = [find_shard(sd, MetadataIndex("w", (0,), hint)) for hint in (None, 0, 1)]
    assert [f.data_ptr() for f in found] == [t.data_ptr() for t in (first, first, second)]


# Four real ranks

WORLD = 4
MODELS = ("fsdp", "tp", "fsdp_tp", "hsdp", "whole")
SCRIPT = Path(__file__).parents[1] / "ranks" / "hold.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run the script once on four processes; return, per rank, the report of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                SCRIPT,
                str(rank),
                str(WORLD),
                folder / "store",
                folder / str(rank),
            ],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        texts = [(folder / f"log-{rank}").read_text() for rank in range(WORLD)]
        for log in logs:
            log.close()
    assert codes == [0] * WORLD, "\n".join(texts)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(WORLD)]


def reports(ranks, case):
    """Return, per rank, the plan and, per item, the values found."""
    return [
        (decode_plan(bytes.fromhex(rank[case]["plan"])), rank[case]["values"]) for rank in ranks
    ]


def expected(name, size):
    """Return the whole tensor: parameters count up; Adam has halved gradients that equal them."""
    whole = count_up(*size)
    if name.endswith(".step"):
        return torch.ones(size)
    if name.endswith("exp_avg"):
        return whole / 2
    return whole**2 / 2 if name.endswith("exp_avg_sq") else whole


def as_tensor(values, sizes):
    return torch.tensor(values, dtype=torch.float32).reshape(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MODELS, "linear_of_one", "submesh", "strided", "sharded_tensor"])
def test_real_ranks_find_the_values_they_plan_and_together_they_are_the_tensors(ranks, case):
    held = reports(ranks, case)
    whole = {}
    for plan, values in held:
        for item, value in zip(plan.items, values, strict=True):
            if item.tensor_data is None:
                continue
            data = item.tensor_data
            found = as_tensor(value, data.chunk.sizes)
            full = expected(item.index.fqn, data.size)
            assert torch.equal(found, full[region(data.chunk.offsets, data.chunk.sizes)])
            seen = whole.setdefault(item.index.fqn, torch.zeros(data.size))
            seen[region(data.chunk.offsets, data.chunk.sizes)] = 1
    assert whole
    assert all(seen.all() for seen in whole.values())
    global_plan([plan for plan, _ in held])  # raises if any element were written twice or never


@pytest.mark.slow
@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("source", MODELS)
def test_what_real_ranks_save_in_one_layout_loads_in_another(ranks, source, target):
    """Write each chunk of the global plan down, follow the reads, and compare all values."""
    saved = reports(ranks, source)
    written, metadata = global_plan([plan for plan, _ in saved])
    stored = {}
    for plan, (local, values) in zip(written, saved, strict=True):
        mine = dict(zip((item.source for item in local.items), values, strict=True))
        for item in plan.items:
            if item.tensor_data:
                assert item.index not in stored
                stored[item.index] = as_tensor(mine[item.source], item.tensor_data.chunk.sizes)

    for plan, values in reports(ranks, target):
        model = [
            (i, v)
            for i, v in zip(plan.items, values, strict=True)
            if i.index.fqn.startswith("model.")
        ]
        memory = {i.index: torch.full(i.tensor_data.chunk.sizes, -1.0) for i, _ in model}
        reads = load_plan(metadata, plan, strict=["model.*"]).items
        for item in reads:
            if item.dest_index in memory:
                from_, to = stored[item.storage_index], memory[item.dest_index]
                piece = from_[region(item.storage_offsets, item.lengths)]
                to[region(item.dest_offsets, item.lengths)] = piece
        for item, value in model:
            assert torch.equal(memory[item.index], as_tensor(value, item.tensor_data.chunk.sizes))


@pytest.mark.slow
def test_real_replicas_are_written_once_and_shared_out(ranks):
    """HSDP 2 × 2: each shard is on two ranks, and each of the four ranks writes something."""
    plans = [plan for plan, _ in reports(ranks, "hsdp")]
    assert plans[0] == plans[2]
    assert plans[1] == plans[3]
    written, _ = global_plan(plans)
    assert sum(p.nbytes for p in written) == sum(p.nbytes for p in plans) // 2
    assert all(len(p.items) for p in written)


@pytest.mark.slow
def test_a_real_rank_outside_the_mesh_contributes_nothing(ranks):
    assert [len(plan.items) for plan, _ in reports(ranks, "submesh")] == [0, 1, 0, 1]


@pytest.mark.slow
def test_a_real_linear_of_one_lies_on_one_rank(ranks):
    """Linear(1, 1) under FSDP on four ranks (PT#132366)."""
    assert [len(plan.items) for plan, _ in reports(ranks, "linear_of_one")] == [2, 0, 0, 0]


@pytest.mark.slow
def test_a_real_partial_sum_is_refused_by_name_on_every_rank(ranks):
    for rank in ranks:
        assert rank["partial"]["refused"].startswith("`loss` is Partial")


@pytest.mark.slow
def test_a_real_optimizer_s_values_and_scalar_steps_are_planned_once(ranks):
    written, metadata = global_plan([plan for plan, _ in reports(ranks, "fsdp")])
    writers = [
        rank
        for rank, plan in enumerate(written)
        for item in plan.items
        if item.index.fqn == "optim.state.up.weight.step"
    ]
    assert len(writers) == 1
    assert metadata.state_dict_metadata["optim.state.up.weight.step"].size == ()
    assert metadata.state_dict_metadata["optim.state.up.weight.exp_avg"].size == (6, 3)


def test_a_nested_state_dict_is_looked_up_by_its_flat_names():
    sd = {"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1}]}
    flat, _ = flatten(sd)
    found = {i.index.fqn: find_object(flat, i.source) for i in local_plan(sd).items}
    assert found["model.w"] is sd["model"]["w"]
    assert found["groups.0.lr"] == 0.1


def trained(rank, rows):
    """Return what a rank of torchtitan's mesh holds: FSDP over two flattened axes, over TP."""
    mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "dp_shard", "cp", "tp"))
    dp_shard_cp = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    experts = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("pp", "ep", "efsdp"))
    layer = nn.Sequential(nn.Linear(3, rows), nn.LayerNorm(rows))
    parallelize_module(layer[0], mesh["tp"], ColwiseParallel(), src_data_rank=None)
    fully_shard(layer, mesh=dp_shard_cp)
    stage = mesh.get_local_rank("pp")
    moe = distribute_tensor(
        torch.zeros(8, 5, 3), experts["ep", "efsdp"], [Shard(0), Shard(1)], src_data_rank=None
    )
    sd = {f"layers.{stage}.{name}": value for name, value in layer.named_parameters()}
    return sd | {f"layers.{stage}.experts": moe, "rng": {f"rank_{rank}_of_16": torch.ones(4)}}


@pytest.mark.parametrize("rows", [8, 13])
def test_plans_on_flattened_sliced_and_expert_meshes_are_derived(rows):
    plans, found = [], []
    for rank in range(16):
        with as_rank(rank, 16):
            sd = trained(rank, rows)
            plans.append(local_plan(sd))
            found.append(describe(flatten(sd)[0], plans[-1], rank, range(16)))
    tags = [description.tag for description in found]
    assert len({*tags}) == 2  # one for each stage
    parts = list(dict.fromkeys(tags))
    world = JoinedPlans([found[tags.index(t)] for t in parts], [parts.index(t) for t in tags])
    assert derive_joined(world) == global_plan(plans)
