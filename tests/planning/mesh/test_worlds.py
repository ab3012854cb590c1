"""Worlds without hardware: every rank's plan is the one that torch's own rules give it.

The presets are held against real modules under torch's "fake" backend, by which one process is any
rank of any mesh in turn while nobody communicates.
"""

import itertools
import math
import pickle
from contextlib import contextmanager

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as torch_placements
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.planning import (
    BytesMetadata,
    Mesh,
    NotFoundError,
    PlanError,
    RefusedError,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
    find_issues,
    flatten,
    global_plan,
    local_chunks,
    local_plan,
)
from shardplan.planning.mesh import (
    LLAMA_TP,
    SpecLayout,
    WorldPlans,
    adam,
    expert_parallel,
    fsdp,
    fsdp_tp,
    hsdp,
    llama,
    llama3_8b,
    llama3_405b,
    pipeline,
    tensor_parallel,
    world_metadata,
    world_plans,
)
from shardplan.planning.mesh import worlds as topology
from shardplan.planning.mesh.placements import AxisCut, Only, axis_runs, shard_runs
from shardplan.planning.testing.strategies import meshes, placements, shapes, tensor_specs

SHAPES = shapes(max_side=14, max_dims=3)


@st.composite
def worlds(draw, *, only=False):
    """Generate a mesh and a nested state dict of specs and values that lie on it."""
    mesh = draw(meshes(max_ranks=12))
    placed = tensor_specs(mesh=mesh, shape=SHAPES)
    spec = placed | tensor_specs(shape=SHAPES)
    if only:
        spec |= placed.flatmap(lambda s: at_some_coordinates(s, mesh))
    leaves = spec | st.sampled_from([7, "text", {}])
    names = st.sampled_from("abcdef")
    return draw(st.dictionaries(names, leaves | st.dictionaries(names, leaves))), mesh


def at_some_coordinates(spec, mesh):
    """Generate the spec with `Only` on some mesh axes."""
    per_axis = [
        st.just(placement)
        | st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda at: Only(sorted(at)))
        for placement, ranks in zip(spec.placements, mesh.shape, strict=True)
    ]
    return st.tuples(*per_axis).map(lambda placed: attrs.evolve(spec, placements=placed))


def without_others(sd, mesh, rank):
    """Drop the specs that `Only` keeps from a rank; on the rest it means no more than Replicate."""
    flat, _ = flatten(sd)
    kept = {}
    for name, value in flat.items():
        placed = getattr(value, "placements", ())
        here = zip(placed, mesh.coordinate(rank), strict=False)
        if all(at in p.coordinates for p, at in here if isinstance(p, Only)):
            plain = [Replicate() if isinstance(p, Only) else p for p in placed]
            kept[name] = attrs.evolve(value, placements=plain) if placed else value
    return kept


# What every rank holds


@given(worlds())
def test_every_rank_has_the_plan_that_local_plan_makes(world):
    sd, mesh = world
    plans = world_plans(sd, mesh)
    expected = tuple(local_plan(sd, mesh=mesh, rank=rank) for rank in range(len(mesh)))
    assert plans == expected
    assert expected == plans
    assert hash(plans) == hash(expected)


@given(worlds(only=True))
def test_a_rank_that_only_keeps_out_holds_nothing(world):
    sd, mesh = world
    for rank, plan in enumerate(world_plans(sd, mesh)):
        expected = local_plan(without_others(sd, mesh, rank), mesh=mesh, rank=rank)
        assert plan.items == expected.items


@given(worlds(only=True))
def test_the_columns_of_the_layouts_are_what_the_plans_say(world):
    plans = world_plans(*world)
    held = {name: [] for name in plans.specs}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                held[item.index.fqn].append((rank, chunk.offsets, chunk.sizes))
    for name, rows in held.items():
        layout = plans.layouts[plans.layout_of[name]]
        columns = (layout.rank.tolist(), layout.offsets.tolist(), layout.sizes.tolist())
        assert [(r, tuple(o), tuple(s)) for r, o, s in zip(*columns, strict=True)] == rows
        assert layout.size == plans.specs[name].shape


def torch_placement(placement):
    match placement:
        case Shard(dim):
            return torch_placements.Shard(dim)
        case StridedShard(dim, factor):
            return torch_placements._StridedShard(dim, split_factor=factor)
    return torch_placements.Replicate()


@st.composite
def layouts(draw):
    mesh = draw(meshes(max_ranks=24))
    shape = draw(SHAPES.filter(lambda s: 0 not in s and math.prod(s) < 2000))
    return SpecLayout(shape, draw(placements(mesh, shape)), mesh)


@given(layouts())
@example(SpecLayout((13,), (StridedShard(0, 2), Shard(0)), Mesh(dp=3, tp=2)))
@example(SpecLayout((6, 2), (Shard(0), Shard(0)), Mesh(dp=4, tp=2)))
def test_every_rank_holds_the_elements_that_torch_gives_it(layout):
    """Torch itself cuts a tensor of positions; the boxes must hold what is left, in its order."""
    positions = torch.arange(math.prod(layout.size)).view(layout.size)
    placed = [torch_placement(p) for p in layout.placements]
    for rank in range(len(layout.mesh)):
        coordinate = layout.mesh.coordinate(rank)
        local = positions
        for placement, parts, ours in zip(placed, layout.mesh.shape, coordinate, strict=True):
            if not isinstance(placement, torch_placements.Replicate):
                pieces, _ = placement._split_tensor(local, parts, with_padding=False)
                local = pieces[ours]
        mine = layout.rank == rank
        boxes = np.stack([layout.offsets[mine], layout.sizes[mine]], axis=-1).tolist()
        runs = [list(dict.fromkeys(map(tuple, axis))) for axis in zip(*boxes, strict=True)]
        assert [list(map(tuple, box)) for box in boxes] == (
            [list(box) for box in itertools.product(*runs)] if boxes else []
        )
        if boxes:
            held = [[i for at, n in axis for i in range(at, at + n)] for axis in runs]
            assert torch.equal(positions[np.ix_(*held)], local)
        else:
            assert local.numel() == 0

        shape, offset = _compute_local_shape_and_global_offset(
            layout.size, layout.mesh.shape, coordinate, placed
        )
        assert tuple(shape) == tuple(local.shape)
        if local.numel():
            assert tuple(offset) == tuple(layout.offsets[mine][0].tolist())


def part(indices, parts, ours):
    """Cut as ``torch.chunk`` does."""
    size = -(-len(indices) // parts)
    return indices[size * ours : size * (ours + 1)]


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3),
)
def test_runs_hold_the_indices_that_cutting_a_list_leaves(length, cuts):
    runs = axis_runs(length, cuts)
    for number, coordinate in enumerate(itertools.product(*(range(p) for p, _ in cuts))):
        held = list(range(length))
        for (parts, factor), ours in zip(cuts, coordinate, strict=True):
            pieces = [part(held, factor, piece) for piece in range(factor)]
            held = [index for piece in pieces for index in part(piece, parts, ours)]
        rows = slice(*runs.first[number : number + 2].tolist())
        found = tuple(zip(runs.start[rows].tolist(), runs.length[rows].tolist(), strict=True))
        assert [i for start, n in found for i in range(start, start + n)] == held
        assert all(b != a + n for (a, n), (b, _) in itertools.pairwise(found)), "not joined"
        steps = [AxisCut(p, at, f) for (p, f), at in zip(cuts, coordinate, strict=True)]
        assert shard_runs(length, tuple(steps)) == found
    assert runs.first[-1] == len(runs.start)


def test_a_large_mesh_gives_the_plans_that_local_plan_makes():
    mesh = Mesh(pp=2, dp=256, tp=32)
    specs = adam(fsdp_tp(llama(dim=999, layers=2, heads=9, kv_heads=3, ffn=1777), mesh, LLAMA_TP))
    plans = world_plans(specs, mesh)
    for rank in (0, 1, 8191, 8192, 12_345, 16_383):
        assert plans[rank] == local_plan(specs, mesh=mesh, rank=rank)
        for layout in plans.layouts:
            at, mine = mesh.coordinate(rank), layout.rank == rank
            if layout.placements:
                chunks = local_chunks(layout.size, mesh.shape, at, layout.placements)
                assert layout.offsets[mine].tolist() == [list(c.offsets) for c in chunks]
                assert layout.sizes[mine].tolist() == [list(c.sizes) for c in chunks]


# The checkpoint that results


@given(worlds(only=True))
def test_the_metadata_is_that_of_the_global_plan(world):
    plans = world_plans(*world)
    metadata = world_metadata(plans)
    assert metadata == global_plan(plans)[1]
    assert metadata == global_plan(tuple(plans))[1]
    assert find_issues(metadata) == ()


def test_layers_that_lie_alike_share_one_layout():
    mesh = Mesh(dp=4, tp=2)
    specs = fsdp_tp(llama(dim=16, layers=9, heads=4, kv_heads=4, ffn=32), mesh, LLAMA_TP)
    plans = world_plans(adam(specs), mesh)
    assert len(plans.layouts) == 7
    assert len(world_metadata(plans).state_dict_metadata.layouts) <= 7


def test_layouts_that_cut_alike_are_one_in_the_metadata():
    specs = {
        "a": TensorSpec((8, 2), "float32", [Shard(0), Replicate()]),
        "b": TensorSpec((8, 2), "float32", [Replicate(), Shard(0)]),
        "c": TensorSpec((8, 2), "float32", [Shard(-2), Replicate()]),
        "step": 3,
    }
    plans = world_plans(specs, Mesh(x=2, y=2))
    assert len(plans.layouts) == 3
    entries = world_metadata(plans).state_dict_metadata
    assert len(entries.layouts) == 1
    assert entries["step"] == BytesMetadata()


def test_metadata_is_checked_not_trusted(monkeypatch):
    plans = world_plans({"w": TensorSpec((8,), "float32", [Shard(0)])}, Mesh(dp=4))
    short = axis_runs(6, [(4, 1)])  # as if a rank's rows had been forgotten
    monkeypatch.setattr(
        "shardplan.planning.mesh.layouts.cached_axis_runs", lambda length, cuts: short
    )
    with pytest.raises(PlanError, match="no saved chunk of `w` holds rows 6 to 8"):
        world_metadata(plans)


def test_metadata_whose_runs_overlap_is_refused(monkeypatch):
    plans = world_plans({"w": TensorSpec((8,), "float32", [Shard(0)])}, Mesh(dp=2))
    twice = attrs.evolve(axis_runs(8, [(2, 1)]), length=np.array([5, 4]))
    monkeypatch.setattr(
        "shardplan.planning.mesh.layouts.cached_axis_runs", lambda length, cuts: twice
    )
    with pytest.raises(PlanError, match="`w`"):
        world_metadata(plans)


# A sequence that is made when it is asked for


@pytest.fixture
def made(monkeypatch):
    """Count the plans and the columns that are made."""
    counts = {"plans": 0, "columns": 0}

    def counting(kind, function):
        def count(*args, **kwargs):
            counts[kind] += 1
            return function(*args, **kwargs)

        return count

    monkeypatch.setattr(topology, "SavePlan", counting("plans", topology.SavePlan))
    columns = SpecLayout.__dict__["_boxes"]
    monkeypatch.setattr(columns, "func", counting("columns", columns.func))
    return counts


def test_nothing_is_made_before_it_is_asked_for(made):
    mesh = Mesh(dp=2048, tp=8)
    plans = world_plans(adam(fsdp_tp(llama3_8b(), mesh, LLAMA_TP)), mesh)
    assert len(plans) == 16_384
    assert plans == world_plans(plans.specs, mesh)
    assert "16,384 ranks" in repr(plans)
    world_metadata(plans)
    assert made == {"plans": 0, "columns": 0}
    assert plans[12_345].nbytes > 0
    assert made == {"plans": 1, "columns": 0}
    layout = plans.layouts[0]
    assert layout.rank is layout.rank
    assert len(layout.offsets) == len(layout.sizes) == len(layout.rank)
    assert made == {"plans": 1, "columns": 1}


def test_all_plans_share_one_catalog_and_their_paths():
    sd = {"model": {"w": TensorSpec((4,), "float32", [Shard(0)])}, "lr": 0.1}
    plans = tuple(world_plans(sd, Mesh(dp=4)))
    assert len({id(plan.items.catalog) for plan in plans}) == 1
    assert len({id(plan.planner_data) for plan in plans}) == 1


def small_world():
    sd = {"w": TensorSpec((5, 2), "bfloat16", [Shard(0)]), "step": 7, "b": TensorSpec((3,))}
    return world_plans(sd, Mesh(dp=3))


def test_a_world_behaves_like_a_tuple():
    plans = small_world()
    everyone = tuple(plans)
    assert plans[-1] == everyone[2] == plans[np.int64(2)]
    assert plans[1:] == everyone[1:]
    assert list(reversed(plans)) == list(everyone[::-1])
    assert everyone[1] in plans
    assert plans.index(everyone[1]) == 1
    assert plans != everyone[:2]
    assert plans != "plans"
    assert plans != world_plans(plans.specs, plans.mesh)  # without the value
    for rank in (3, -4):
        with pytest.raises(IndexError, match=f"no item {rank}: WorldPlans has 3"):
            plans[rank]


def test_worlds_described_differently_are_equal_if_their_plans_are():
    specs = [TensorSpec((4,), "float32", p) for p in ([Shard(0)], [StridedShard(0, 1)])]
    a, b = (world_plans({"w": spec}, Mesh(dp=2)) for spec in specs)
    assert a == b
    assert hash(a) == hash(b)


def test_a_world_and_its_layouts_cannot_change():
    plans = small_world()
    for name in ("mesh", "specs", "layouts"):
        with pytest.raises(AttributeError):
            setattr(plans, name, None)
    layout = plans.layouts[plans.layout_of["w"]]
    for array in (layout.rank, layout.offsets, layout.sizes):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_world_survives_pickling_with_its_columns_read_only():
    plans = small_world()
    assert plans.layouts[1].rank.tolist() == [0, 1, 2]
    again = pickle.loads(pickle.dumps(plans))
    assert isinstance(again, WorldPlans)
    assert again == plans
    layout = pickle.loads(pickle.dumps(plans.layouts[1]))
    assert layout == plans.layouts[1]
    assert not layout.offsets.flags.writeable


def test_a_world_prints_its_largest_layouts():
    text = repr(small_world()).splitlines()
    assert text[0] == "WorldPlans: 3 ranks on Mesh(dp=3), 2 tensors in 2 layouts, 32 B"
    assert text[2].split() == ["[5,", "2]", "dp=Shard(0)", "1", "20", "B"]
    many = {f"w{n}": TensorSpec((n + 1,)) for n in range(20)}
    assert repr(world_plans(many, Mesh(dp=1))).endswith("… 8 more")


def test_tensors_without_elements_or_axes_are_known_to_every_rank():
    specs = {
        "empty": TensorSpec((0, 4), "float32", [Shard(0), Only(1)]),
        "scalar": TensorSpec((), "float32", [Replicate(), Only(1)]),
    }
    plans = world_plans(specs, Mesh(dp=2, pp=2))
    assert [len(plan.items) for plan in plans] == [0, 2, 0, 2]
    assert plans.layouts[plans.layout_of["empty"]].sizes.tolist() == [[0, 4], [0, 4]]


# What has no plan


def test_all_that_does_not_fit_is_reported_at_once():
    specs = {
        "count": TensorSpec((4,), "float32", [Shard(0), Shard(0)]),
        "axis": TensorSpec((4,), "float32", [Shard(1)]),
        "nobody": TensorSpec((4,), "float32", [Only([])]),
        "stage": TensorSpec((4,), "float32", [Only(2)]),
        "large": TensorSpec((1 << 40, 1 << 40)),
        "fine": TensorSpec((4,), "float32", [Shard(-1)]),
    }
    with pytest.raises(PlanError) as error:
        world_plans(specs, Mesh(dp=2))
    assert {issue.fqn for issue in error.value.issues} == specs.keys() - {"fine"}


def test_partial_sums_and_real_tensors_are_refused_by_name():
    specs = {
        "a": TensorSpec((4,), "float32", [torch_placements.Partial()]),
        "b": TensorSpec((4,), "float32", [torch_placements.Partial()]),
    }
    with pytest.raises(RefusedError, match=r"`a`: Partial.*`b`: Partial"):
        world_plans(specs, Mesh(dp=2))
    with pytest.raises(RefusedError, match="`w` is a ndarray; describe it as TensorSpec"):
        world_plans({"w": np.zeros(3)}, Mesh(dp=2))


# Presets against torch


@contextmanager
def as_rank(rank, mesh):
    """Be one rank of a group in which nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(mesh))
    try:
        yield init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps meshes, and with them the rank that was


class Block(nn.Module):
    def __init__(self, width=8, vocab=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)


TORCH_PLAN = {
    "embed": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
    "norm": SequenceParallel,
}
RULES = {"embed.*": 0, "up.*": "colwise", "down.*": "rowwise", "norm.*": "replicate"}


def params_of(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def placements_on(mesh, tensor):
    """Return the placements on the whole mesh of a DTensor that may be on a part of it."""
    names = tensor.device_mesh.mesh_dim_names if hasattr(tensor, "device_mesh") else ()
    own = dict(zip(names, getattr(tensor, "placements", ()), strict=True))
    return [own.get(name, torch_placements.Replicate()) for name in mesh.names]


def placed_by(spec, mesh):
    return [torch_placement(p) for p in spec.placements or [Replicate()] * len(mesh.names)]


def boxes_of(plan):
    return [
        (i.index, i.tensor_data.chunk, i.tensor_data.size, i.tensor_data.properties.dtype)
        for i in plan.items
        if i.tensor_data is not None
    ]


def assert_same_as_torch(mesh, specs, make):
    """Compare placements and held boxes with those of ``make(device_mesh)``, on every rank."""
    plans = world_plans(specs, mesh)
    for rank in range(len(mesh)):
        with as_rank(rank, mesh) as device_mesh:
            sd, _ = flatten(make(device_mesh))
            tensors = {name: value for name, value in sd.items() if torch.is_tensor(value)}
            theirs = {name: placements_on(mesh, value) for name, value in tensors.items()}
            assert theirs == {name: placed_by(spec, mesh) for name, spec in specs.items()}
            assert boxes_of(plans[rank]) == boxes_of(local_plan(tensors))


@pytest.mark.parametrize("width", [8, 6], ids=["even", "uneven"])
def test_fsdp_places_as_fully_shard_does(width):
    mesh = Mesh(dp=4)

    def make(device_mesh):
        return fully_shard(Block(width), mesh=device_mesh).state_dict()

    assert_same_as_torch(mesh, fsdp(params_of(Block(width)), mesh), make)


def test_hsdp_places_as_fully_shard_on_two_axes_does():
    mesh = Mesh(dp_replicate=2, dp_shard=2)

    def make(device_mesh):
        return fully_shard(Block(), mesh=device_mesh).state_dict()

    assert_same_as_torch(mesh, hsdp(params_of(Block()), mesh), make)


def parallelized(device_mesh, block):
    styles = {name: style() for name, style in TORCH_PLAN.items()}
    return parallelize_module(block, device_mesh["tp"], styles)


@pytest.mark.parametrize("width", [8, 5], ids=["even", "uneven"])
def test_tensor_parallel_places_as_parallelize_module_does(width):
    mesh = Mesh(tp=4)

    def make(device_mesh):
        return parallelized(device_mesh, Block(width)).state_dict()

    assert_same_as_torch(mesh, tensor_parallel(params_of(Block(width)), mesh, RULES), make)


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 1)], ids=str)
def test_fsdp_over_tensor_parallel_is_strided_as_in_torch(shape):
    mesh = Mesh(dp=shape[0], tp=shape[1])

    def make(device_mesh):
        return fully_shard(parallelized(device_mesh, Block()), mesh=device_mesh["dp"]).state_dict()

    assert_same_as_torch(mesh, fsdp_tp(params_of(Block()), mesh, RULES), make)


def test_hsdp_over_tensor_parallel_with_adam_lies_as_in_torch():
    mesh = Mesh(dp_replicate=2, dp_shard=2, tp=2)

    def make(device_mesh):
        block = parallelized(device_mesh, Block())
        fully_shard(block, mesh=device_mesh["dp_replicate", "dp_shard"])
        optimizer = torch.optim.Adam(block.parameters())
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = get_optimizer_state_dict(block, optimizer)["state"]
        return {**block.state_dict(), "optimizer": {"state": state}}

    specs = hsdp(tensor_parallel(params_of(Block()), mesh, RULES), mesh)
    assert_same_as_torch(mesh, adam(specs), make)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 8, bias=False)
        self.experts = nn.ParameterDict({"w1": torch.empty(8, 4, 6), "w2": torch.empty(8, 6, 4)})


def test_fsdp_over_expert_parallel_is_strided_as_in_torch():
    mesh = Mesh(dp=2, ep=2)

    def make(device_mesh):
        module = Experts()
        for name, weight in module.experts.items():
            shard = distribute_tensor(weight, device_mesh["ep"], [torch_placements.Shard(0)])
            module.experts[name] = nn.Parameter(shard)
        return fully_shard(module, mesh=device_mesh["dp"]).state_dict()

    assert_same_as_torch(mesh, fsdp(expert_parallel(params_of(Experts()), mesh), mesh), make)


# Presets by themselves


def test_a_pipeline_gives_stages_disjoint_keys_that_together_are_all():
    mesh = Mesh(pp=3, dp=2, tp=2)
    params = llama(dim=8, layers=7, heads=2, kv_heads=2, ffn=16, vocab=10)
    specs = adam(fsdp_tp(pipeline(params, mesh), mesh, LLAMA_TP))
    plans = world_plans(specs, mesh)
    keys = [{item.index.fqn for item in plan.items} for plan in plans]
    stages = [set().union(*keys[4 * n : 4 * n + 4]) for n in range(3)]
    assert sum(map(len, stages)) == len(specs)
    assert set().union(*stages) == specs.keys()
    assert "model.embed_tokens.weight" in stages[0]
    assert "lm_head.weight" in stages[2]
    assert "optimizer.state.lm_head.weight.step" in stages[2]
    late = pipeline(adam(fsdp_tp(params, mesh, LLAMA_TP)), mesh)
    assert {name: spec.placements[0] for name, spec in late.items()} == {
        name: spec.placements[0] for name, spec in specs.items()
    }
    layers = [
        {name.split(".")[2] for name in s if name.startswith("model.layers.")} for s in stages
    ]
    assert layers == [{"0", "1", "2"}, {"3", "4"}, {"5", "6"}]
    for rank, plan in enumerate(plans):
        assert (
            plan.items == local_plan(without_others(specs, mesh, rank), mesh=mesh, rank=rank).items
        )
    assert world_metadata(plans) == global_plan(plans)[1]


def test_a_tensor_that_two_stages_tie_is_written_once():
    params = {"embed": (6, 2), "a.w": (4,), "b.w": (4,)}
    mesh = Mesh(pp=3)
    specs = pipeline(params, mesh, [["embed", "a.*"], "b.*", ["embed"]])
    assert specs["embed"].placements == (Only([0, 2]),)
    plans, metadata = global_plan(world_plans(specs, mesh))
    assert sum(item.index.fqn == "embed" for plan in plans for item in plan.items) == 1
    assert len(metadata.state_dict_metadata["embed"].chunks) == 1


def test_experts_with_keys_of_their_own_are_dealt_like_rows_of_a_stack():
    mesh = Mesh(dp=2, ep=4)
    params = {f"layers.0.experts.{n}.w": (4, 4) for n in range(6)} | {"layers.0.experts.w": (6, 2)}
    specs = expert_parallel(params, mesh)
    plans = world_plans(specs, mesh)
    for rank in range(4):
        here = {item.index.fqn: item.tensor_data.chunk for item in plans[rank].items}
        stack = here.pop("layers.0.experts.w", None)
        rows = range(stack.offsets[0], stack.ends[0]) if stack else ()
        assert here.keys() == {f"layers.0.experts.{n}.w" for n in rows}
    assert world_metadata(plans) == global_plan(plans)[1]


def test_presets_keep_dtypes_and_leave_scalars_whole():
    mesh = Mesh(dp=2)
    specs = fsdp({"w": TensorSpec((4,), "bfloat16"), "scale": TensorSpec((), "float16")}, mesh)
    assert specs["w"] == TensorSpec((4,), "bfloat16", [Shard(0)])
    assert specs["scale"].placements == (Replicate(),)
    state = adam(specs)
    assert state["optimizer.state.w.exp_avg_sq"] == TensorSpec((4,), "float32", [Shard(0)])
    assert state["optimizer.state.w.step"] == TensorSpec((), "float32")
    assert len(state) == 8


def test_presets_say_what_does_not_fit():
    mesh = Mesh(dp=2, tp=2)
    params = {"layers.0.up.weight": (4, 4), "norm": (4,)}
    with pytest.raises(NotFoundError, match=r"no parameter matches `\*\.upp\.\*`"):
        tensor_parallel(params, mesh, {"*.upp.*": "colwise"})
    with pytest.raises(ValueError, match="rule 'diagonal' does not fit `norm`"):
        tensor_parallel(params, mesh, {"norm": "diagonal"})
    with pytest.raises(ValueError, match="rule 1 does not fit `norm` of shape"):
        tensor_parallel(params, mesh, {"norm": 1})
    with pytest.raises(ValueError, match=r"has no axis `fsdp`; name one of dp, tp"):
        fsdp(params, mesh, axis="fsdp")
    with pytest.raises(ValueError, match="is placed on `dp` already"):
        fsdp(fsdp(params, mesh), mesh)
    with pytest.raises(ValueError, match="do not fit"):
        fsdp({"w": TensorSpec((4,), "float32", [Replicate()])}, mesh)
    with pytest.raises(NotFoundError, match="no stage has `norm`"):
        pipeline(params, mesh, ["layers.*", "layers.*"], axis="dp")
    with pytest.raises(ValueError, match="1 stages do not fit"):
        pipeline(params, mesh, ["*"], axis="dp")
    with pytest.raises(ValueError, match="1 numbered layers do not fill 2 stages"):
        pipeline(params, mesh, axis="dp")


# Published shapes


@pytest.mark.parametrize(
    ("model", "count", "tensors"),
    [(llama3_8b, 8_030_261_248, 291), (llama3_405b, 405_853_388_800, 1137)],
)
def test_published_models_have_their_published_size(model, count, tensors):
    params = model()
    assert sum(math.prod(spec.shape) for spec in params.values()) == count
    assert len(params) == tensors
    state = adam(params)
    assert len(state) == 4 * tensors
    assert sum(spec.nbytes for spec in state.values()) == count * (2 + 4 + 4) + 4 * tensors


def test_rules_of_a_llama_cut_all_its_matrices():
    mesh = Mesh(tp=8)
    for name, spec in tensor_parallel(llama3_8b(), mesh, LLAMA_TP).items():
        assert (spec.placements == (Replicate(),)) == ("norm" in name)
