"""Descriptions of what ranks hold give the plans that a coordinator would have gathered."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    CodecError,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    flatten,
    global_plan,
    local_plan,
)
from shardplan.planning.mesh import Description, JoinedPlans, Mesh, derive_joined, describe
from shardplan.planning.mesh.placements import local_cuts, nested_cuts, shard_runs


class FakeDTensor:
    """What planning looks at in a DTensor, for a rank of a mesh that need not exist."""

    def __init__(self, shape, placements, numbers, rank, *, nested=False, grad=False):
        (found,) = np.argwhere(numbers == rank).tolist()
        self.shape, self.dtype, self.placements = shape, "float32", tuple(placements)
        self.requires_grad = grad
        self.device_mesh = SimpleNamespace(
            mesh=numbers, shape=numbers.shape, get_coordinate=lambda: found
        )
        cuts = local_cuts(shape, numbers.shape, found, placements)
        cuts = (nested and nested_cuts(cuts)) or cuts
        local = [sum(n for _, n in shard_runs(*axis)) for axis in zip(shape, cuts, strict=True)]
        self._local_tensor = SimpleNamespace(shape=tuple(local))


def numbers_of(sizes, strides, rank):
    """Return the ranks of the mesh with these sizes and strides that a rank is on."""
    own = sum(rank // d % n * d for n, d in zip(sizes, strides, strict=True))
    grid = np.indices(sizes).reshape(len(sizes), math.prod(sizes)) if sizes else np.zeros((0, 1))
    return (rank - own + np.array(strides, int) @ grid.astype(int)).reshape(sizes)


def factors(draw, count):
    """Draw the shape of a mesh of so many ranks."""
    sizes = []
    while count > 1:
        sizes.append(draw(st.sampled_from([n for n in range(2, count + 1) if count % n == 0])))
        count //= sizes[-1]
    return sizes or [1]


def slices(draw, sizes):
    """Draw a slice of a mesh: some neighbouring axes flattened, some left out."""
    strides = [math.prod(sizes[n + 1 :]) for n in range(len(sizes))]
    found, at = [], 0
    while at < len(sizes):
        end = draw(st.integers(at + 1, len(sizes)))
        if draw(st.integers(0, 3)):
            found.append((math.prod(sizes[at:end]), strides[end - 1]))
        at = end
    found = found or [(sizes[-1], 1)]
    return [n for n, _ in found], [d for _, d in found]


@st.composite
def jobs(draw):
    """Draw the state dicts of all ranks of a job: tensors on meshes of two roots, in stages."""
    count = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    roots = [factors(draw, count) for _ in range(2)]  # the second might be that of experts
    stages, stride = roots[0][0], count // roots[0][0]
    is_staged = draw(st.booleans())
    states = [{} for _ in range(count)]
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
        sizes, strides = slices(draw, draw(st.sampled_from(roots)))
        kinds = [st.just(Replicate())]
        if shape:
            dims = st.integers(0, len(shape) - 1)
            kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 3))]
        placed = draw(st.lists(st.one_of(kinds), min_size=len(sizes), max_size=len(sizes)))
        at = draw(st.sets(st.integers(0, stages - 1), min_size=1)) if is_staged else None
        nested, grad = draw(st.booleans()), draw(st.booleans())
        for rank, sd in enumerate(states):
            if at is None or rank // stride in at:
                numbers = numbers_of(sizes, strides, rank)
                tensor = FakeDTensor(shape, placed, numbers, rank, nested=nested, grad=grad)
                sd[f"layers.{number}.w"] = tensor
    extras = {
        "step": lambda rank: 7,
        "scale": lambda rank: np.zeros(3, np.float32),
        "seed": lambda rank: {f"rank_{rank}_of_{count}": np.zeros((2, 2), np.uint8)},
        "number": lambda rank: {rank: {"a": 1, "b": {}}},
        f"padded.{{0:05d}}.{count}": lambda rank: np.ones(()),
        "list": lambda rank: [np.zeros(2), {"x": rank}],
        "stage": lambda rank: {f"layers.{rank // stride}": 1},
        "hollow": lambda rank: {},
    }
    for name in draw(st.sets(st.sampled_from(sorted(extras)))):
        for rank, sd in enumerate(states):
            sd[name.format(rank)] = extras[name](rank)
    return states


def described(states):
    ranks = tuple(range(len(states)))
    return [describe(flatten(sd)[0], local_plan(sd), r, ranks) for r, sd in enumerate(states)]


def joined(found, templates=False):
    found = found if templates else [d.on(rank) for rank, d in enumerate(found)]
    tags = [description.tag for description in found]
    parts = list(dict.fromkeys(tags))
    return JoinedPlans([found[tags.index(t)] for t in parts], [parts.index(t) for t in tags])


@given(jobs(), st.booleans())
def test_descriptions_give_the_plans_that_are_gathered(states, templates):
    plans = tuple(map(local_plan, states))
    world = joined(described(states), templates)
    assert tuple(world) == plans
    try:
        expected, metadata = global_plan(plans)
    except PlanError:
        with pytest.raises(PlanError):
            derive_joined(world)
        return
    try:
        done, made = derive_joined(world)
    except PlanError:
        hollow = any("hollow" in sd for sd in states)  # an empty dict may give way
        nowhere = {name for sd in states for name in sd if name.startswith("layers")} - {
            *metadata.state_dict_metadata
        }
        assert hollow or nowhere, "all else is left to the coordinator"
        return
    assert tuple(done) == expected
    assert made == metadata
    assert [plan.planner_data for plan in done] == [plan.planner_data for plan in expected]


@given(jobs())
def test_a_description_comes_back_from_its_bytes(states):
    for description in described(states):
        again = Description.decoded(description.encoded)
        assert again == description
        assert again.tag == description.tag


def test_bytes_of_no_description_are_refused():
    (good,) = described([{"w": np.zeros(2)}])
    for bad in (b"", b"x", good.encoded[:-3]):
        with pytest.raises(CodecError, match="description of what a rank holds is damaged"):
            Description.decoded(bad)


def tensor(sizes, strides, rank, *placements, shape=(13, 4), **options):
    return FakeDTensor(shape, placements, numbers_of(sizes, strides, rank), rank, **options)


JOBS = {
    # dp_shard 2 × cp 2 flattened, over tp 2, of a mesh with pp 1 in front; norms on dp_shard_cp
    "flattened": lambda r: {
        "w": tensor([4, 2], [2, 1], r, Shard(0), Shard(1)),
        "norm": tensor([4], [2], r, Shard(0)),
    },
    "uneven FSDP over TP": lambda r: {
        "w": tensor([4, 2], [2, 1], r, StridedShard(0, 2), Shard(0), nested=True)
    },
    "a strided shard of DTensor's own": lambda r: {
        "w": tensor([4, 2], [2, 1], r, StridedShard(0, 2), Shard(0), shape=(27, 4))
    },
    "experts on a mesh of their own": lambda r: {
        "w": tensor([8], [1], r, Shard(0)),
        "experts": tensor([4, 2], [2, 1], r, Shard(0), Shard(1), shape=(8, 5)),
    },
    "two roots that no third mesh refines": lambda r: {
        "a": tensor([2, 4], [4, 1], r, Replicate(), Shard(0)),
        "b": tensor([4, 2], [1, 4], r, Shard(0), Shard(0)),
    },
    "trained": lambda r: {"w": tensor([8], [1], r, Shard(0), grad=True), "s": np.zeros(2)},
    "random states": lambda r: {
        "w": tensor([8], [1], r, Shard(0)),
        "rng": {f"rank_{r}_of_8": np.zeros(16, np.uint8)},
        f"loader.{r}": 5,
    },
}


@pytest.mark.parametrize("job", JOBS)
def test_ranks_of_one_kind_have_one_description(job):
    states = [JOBS[job](rank) for rank in range(8)]
    found = described(states)
    assert len({description.tag for description in found}) == 1
    assert derive_joined(joined(found, True)) == global_plan(map(local_plan, states))


def test_each_stage_of_a_pipeline_has_one_description():
    """Two stages of four ranks; the embedding is tied to the head, and both stages hold it."""
    states = [
        {
            "tied": tensor([4], [1], r, Shard(0)),
            f"layers.{r // 4}.w": tensor([2, 2], [2, 1], r, Shard(0), Replicate()),
            f"layers.{r // 4}.steps": 3,
            "step": 7,
        }
        for r in range(8)
    ]
    world = joined(described(states))
    assert len(world.parts) == 2
    assert derive_joined(world) == global_plan(map(local_plan, states))


def test_stages_that_hold_a_tensor_in_different_ways_are_left_to_the_coordinator():
    states = [{"w": tensor([4], [1], r, *([Shard(0)] if r < 4 else [Shard(1)]))} for r in range(8)]
    with pytest.raises(PlanError, match="`w` is not the same on all ranks"):
        derive_joined(joined(described(states)))


@pytest.mark.parametrize(
    "numbers", [[[0, 3], [1, 2]], [1, 2], [2, 0], [0, 9]], ids=["no grid", "shifted", "down", "far"]
)
def test_a_mesh_without_strides_has_no_description(numbers):
    numbers = np.array(numbers)
    rank = int(numbers.flat[0])
    sd = {"w": FakeDTensor((4, 4), [Replicate()] * numbers.ndim, numbers, rank)}
    assert describe(sd, local_plan(sd), rank, range(4)) is None


def test_a_mesh_is_known_by_the_numbers_of_its_ranks_in_the_job():
    """A group of ranks 4 to 7 of a job plans for itself."""
    sd = {"w": FakeDTensor((8,), [Shard(0)], np.arange(4, 8), 6)}
    found = describe(sd, local_plan(sd), 2, (4, 5, 6, 7))
    assert found.specs["w"].mesh == Mesh.strided([4], [1], 4)


def test_a_tensor_on_other_ranks_only_is_not_described():
    other = FakeDTensor((4,), [Shard(0)], np.arange(2), 0)
    other.device_mesh.get_coordinate = lambda: None
    (found,) = described([{"w": other, "step": 1}])
    assert (found.specs, found.values) == ({}, ("step",))
