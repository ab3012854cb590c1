"""Transfers between ranks: bits arrive where they belong, whatever the sharding and the names."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan
from shardplan import _moving as moving
from shardplan.dist import CheckpointError, run_ranks, solo
from shardplan.planning import (
    Mesh,
    Shard,
    TensorSpec,
    cast,
    concat,
    drop,
    permute,
    rename,
    stack,
    where,
    world_plans,
)
from shardplan.planning.testing.strategies import meshes, placements, shapes

SCRIPT = Path(__file__).parents[1] / "ranks" / "transfer.py"


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
    """Return what each rank of a mesh holds."""
    made = []
    for plan in world_plans(specs, mesh):
        chunks = {}
        for item in plan.items:
            chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
        made.append({name: Shards(tensors[name], held) for name, held in chunks.items()})
    return made


def wrong(state, tensors):
    """Return the shards of a state that do not have the elements of whole tensors."""
    return [
        (name, chunk)
        for name, shards in state.items()
        for chunk, part in shards.parts.items()
        if not torch.equal(part, box(tensors[name], chunk))
    ]


@st.composite
def worlds(draw):
    sizes = draw(st.dictionaries(st.sampled_from("abc"), shapes(min_side=1), min_size=1))
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    tensors = {}
    for name, shape in sizes.items():
        kind = draw(st.sampled_from(dtypes))
        tensors[name] = torch.randint(0, 100, shape).to(kind)
    both = []
    for _ in range(2):
        mesh = draw(meshes(max_ranks=4))
        specs = {
            name: TensorSpec(shape, str(tensors[name].dtype)[6:], draw(placements(mesh, shape)))
            for name, shape in sizes.items()
        }
        both.append((specs, mesh))
    return tensors, both, draw(st.sampled_from([0, 1, len(both[0][1])]))


@settings(max_examples=25)
@given(worlds(), st.sampled_from([1, 64, 1 << 20]))
def test_every_bit_arrives_between_any_meshes_on_any_ranks(world, round_bytes):
    tensors, (source, target), shift = world
    given_states = states(tensors, *source)
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    wanted = states(empty, *target)
    count = max(len(given_states), len(wanted) + shift)

    def fn(comm):
        mine = given_states[comm.rank] if comm.rank < len(given_states) else None
        number = comm.rank - shift
        into = wanted[number] if 0 <= number < len(wanted) else None
        return shardplan.transfer(mine, into, comm=comm)

    before, moving._ROUND_BYTES = moving._ROUND_BYTES, round_bytes
    try:
        reports = run_ranks(count, fn, timeout=60)
    finally:
        moving._ROUND_BYTES = before
    assert [wrong(state, tensors) for state in wanted] == [[]] * len(wanted)
    assert [wrong(state, tensors) for state in given_states] == [[]] * len(given_states)
    assert sum(r.bytes_sent for r in reports) == sum(r.bytes_received for r in reports)
    needed = sum(p.nbytes for s in wanted for t in s.values() for p in t.parts.values())
    assert sum(r.bytes_received + r.bytes_copied for r in reports) == needed


def test_names_layouts_dtypes_and_values_of_trainers_become_those_of_servers():
    q, k, v = (torch.randn(4, 6) for _ in range(3))
    experts = [torch.randn(2, 6) for _ in range(3)]
    names = {"q": q, "k": k, "v": v} | {f"e.{n}": one for n, one in enumerate(experts)}
    specs = {name: TensorSpec(tuple(t.shape), "float32", [Shard(0)]) for name, t in names.items()}
    trainers = states(names, specs, Mesh(fsdp=2))
    fused = torch.cat([q, k, v]).bfloat16()
    turned = torch.stack(experts).permute(0, 2, 1)
    planner = [concat(["q", "k", "v"], into="qkv", axis=0), stack("e.#", into="experts")]
    planner = [*planner, permute("experts", (0, 2, 1)), rename({"lr": "rate"})]
    planner = [*planner, drop("unused"), where("qkv", cast("bfloat16"))]

    planners = {
        "planner": planner,
        "target_planner": rename({f"model.{n}": n for n in ("qkv", "experts")}),
    }

    def fn(comm):
        if comm.rank < 2:
            state = {**trainers[comm.rank], "lr": 0.5, "unused": torch.ones(3)}
            return shardplan.transfer(state, None, comm=comm, **planners)
        into = {
            "model": {
                "qkv": torch.zeros(12, 6, dtype=torch.bfloat16),
                "experts": torch.zeros(3, 6, 2),
            },
            "rate": None,
        }
        report = shardplan.transfer(None, into, comm=comm, **planners)
        return into, report

    *_, (into, report) = run_ranks(3, fn, timeout=60)
    assert torch.equal(into["model"]["qkv"], fused)
    assert torch.equal(into["model"]["experts"], turned)
    assert into["rate"] == 0.5
    assert (report.missing, report.bytes_copied) == ((), 0)
    assert report.bytes_received == 12 * 6 * 2 + 3 * 6 * 2 * 4
    assert "received" in str(report)


def test_modules_are_given_their_state():
    net, into = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def fn(comm):
        if comm.rank == 0:
            return shardplan.transfer({"net": net, "step": 7}, None, comm=comm)
        state = {"net": into, "step": 0}
        shardplan.transfer(None, state, comm=comm)
        return state["step"]

    assert run_ranks(2, fn, timeout=60)[1] == 7
    assert torch.equal(into.weight, net.weight)


def test_one_rank_alone_copies():
    into = {"w": torch.zeros(2, 3)}
    report = shardplan.transfer({"w": torch.ones(2, 3)}, into, comm=solo())
    assert into["w"].sum() == 6
    assert (report.bytes_copied, report.messages) == (24, 0)


def test_a_target_that_shares_memory_with_the_source_is_refused():
    w = torch.ones(4)
    with pytest.raises(ValueError, match="`w` of the target shares memory with `w`"):
        shardplan.transfer({"w": w}, {"w": w}, comm=solo())


def test_ranks_that_pass_different_planners_are_refused():
    def fn(comm):
        planner = rename({"w": "v"}) if comm.rank == 0 else None
        state = {"w": torch.ones(3)} if comm.rank == 0 else None
        into = None if comm.rank == 0 else {"v": torch.zeros(3)}
        return shardplan.transfer(state, into, planner=planner, comm=comm)

    with pytest.raises(CheckpointError, match="all ranks must pass the same planners"):
        run_ranks(2, fn, timeout=60)


@pytest.mark.parametrize("who", ["target", "source"])
def test_if_a_rank_cannot_take_part_all_raise_and_nothing_changes(who):
    into = {"w": torch.zeros(3)}

    class Broken:
        def state_dict(self):
            raise RuntimeError("no state today")

        def load_state_dict(self, state):
            pass

    def fn(comm):
        if comm.rank == 0:
            state = {"w": torch.ones(3)} | ({"b": Broken()} if who == "source" else {})
            return shardplan.transfer(state, None, comm=comm)
        if comm.rank == 1 and who == "target":
            return shardplan.transfer(None, {"other": torch.zeros(3)}, comm=comm)
        return shardplan.transfer(None, into, comm=comm)

    with pytest.raises(CheckpointError) as raised:
        run_ranks(3, fn, timeout=60)
    assert ("other" if who == "target" else "no state today") in str(raised.value)
    assert into["w"].sum() == 0


@pytest.mark.slow
def test_fsdp_trainers_update_tensor_parallel_servers_over_gloo(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", str(SCRIPT), place, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(6)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * 6
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(6)]
    assert [one["wrong"] for one in told] == [[]] * 6
    assert sum(one["sent"] for one in told[:4]) == sum(one["received"] for one in told[4:])
    assert [one["received"] for one in told[:4]] == [0] * 4
    needed = told[4]["needed"]
    assert all(one["received"] == needed for one in told[4:])
    most, least = max(o["sent"] for o in told[:4]), min(o["sent"] for o in told[:4])
    assert most < 1.2 * least  # the sending is shared
