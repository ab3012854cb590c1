"""A model with fused and stacked weights, and checkpoints without, on real ranks.

Run as ``python shapes.py RANK WORLD STORE FOLDER`` it is one rank of a real process group. It
judges nothing: ``FOLDER/told-RANK`` receives, per case, the keys whose bits are not the expected.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardplan
from shardplan.dist import solo
from shardplan.planning import chain, concat, flatten, permute, rename, split, stack, unstack

HEADS, DIM, EXPERTS, WIDTH = 4, 3, 5, 6
LENGTHS = {"*.q.weight": 12, "*.k.weight": 6, "*.v.weight": 6}


class Block(nn.Module):
    """Attention with one matrix for queries, keys and values, and experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.experts = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 7))
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


def fused(square):
    """The state dict of a model under FSDP2 and tensor parallelism; all elements are -1."""
    net = Net()
    for layer in net.layers:
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(layer, square["tp"], plan)
        layer.experts = nn.Parameter(
            distribute_tensor(layer.experts.data, square["tp"], [Shard(0)])
        )
        fully_shard(layer, mesh=square["dp"])
    fully_shard(net, mesh=square["dp"])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(-1)
    return net.state_dict()


def numbers(*shape, start):
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def unfused():
    """The same model as another framework keeps it, whole on every rank."""
    state = {}
    for layer in range(2):
        name, start = f"model.layers.{layer}", 10_000 * layer
        for part, rows in (("q", 12), ("k", 6), ("v", 6)):
            state[f"{name}.{part}.weight"] = numbers(rows, WIDTH, start=start + ord(part) * 10)
        state[f"{name}.out.weight"] = numbers(24, WIDTH, start=start + 3000)  # transposed there
        for expert in range(EXPERTS):
            rows = numbers(WIDTH, 7, start=start + 4000 + 100 * expert)
            state[f"{name}.experts.{expert}.weight"] = rows
        for one in ("weight", "bias"):
            state[f"{name}.norm.{one}"] = numbers(WIDTH, start=start + ord(one[0]))
    return state


def as_fused(state):
    """What the model holds, by torch's operations on whole tensors."""
    made = {}
    for layer in range(2):
        name, own = f"model.layers.{layer}", f"layers.{layer}"
        made[f"{own}.qkv.weight"] = torch.cat([state[f"{name}.{p}.weight"] for p in "qkv"])
        made[f"{own}.out.weight"] = state[f"{name}.out.weight"].T
        experts = [state[f"{name}.experts.{n}.weight"] for n in range(EXPERTS)]
        made[f"{own}.experts"] = torch.stack(experts)
        for one in ("weight", "bias"):
            made[f"{own}.norm.{one}"] = state[f"{name}.norm.{one}"]
    return made


def to_unfused():
    """Map the model's state dict to the other framework's checkpoint."""
    return chain(
        rename([(r"^layers\.", "model.layers.")]),
        split("*.qkv.weight", LENGTHS),
        permute("*.out.weight", (1, 0)),
        unstack("*.experts", "*.experts.#.weight"),
    )


def differing(found, expected):
    """Return the keys that are not alike, bit by bit."""
    wrong = sorted(found.keys() ^ expected.keys())
    for name in sorted(found.keys() & expected.keys()):
        value = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        wrong += [] if torch.equal(value.detach(), expected[name]) else [name]
    return sorted(wrong)


def alone(work, *args, **options):
    """Do something on rank 0 only."""
    if dist.get_rank() == 0:
        work(*args, **options)
    dist.barrier()


def unfused_checkpoints(folder, square):
    """A sharded, fused model loads whole, unfused checkpoints, and writes such."""
    told = {}
    for format in ("hf", "safetensors", "dcp"):
        alone(shardplan.save, unfused(), f"{folder}-{format}", format=format, comm=solo())
        for share in (False, True):
            state = fused(square)
            shardplan.load(state, f"{folder}-{format}", planner=to_unfused(), share_reads=share)
            told[f"loaded {format} {share}"] = differing(state, as_fused(unfused()))
    for format in ("safetensors", "dcp"):
        shardplan.save(state, f"{folder}-out-{format}", planner=to_unfused(), format=format)
        found = flatten(shardplan.restore(f"{folder}-out-{format}"))[0]
        told[f"saved {format}"] = differing(found, unfused())
    meta = {n: torch.empty_like(t, device="meta") for n, t in fused(square).items()}
    shardplan.load(meta, f"{folder}-hf", planner=to_unfused())
    told["meta"] = differing(meta, as_fused(unfused()))
    made = shardplan.restore(f"{folder}-hf", fused(square), planner=to_unfused())
    told["restored"] = differing(made, as_fused(unfused()))
    return told


def through_torch(folder, square):
    """The same through torch's own save and load."""
    shardplan_save = shardplan.as_torch_save_planner(to_unfused())
    state = fused(square)
    alone(dcp.save, unfused(), checkpoint_id=f"{folder}-whole", no_dist=True)
    load = shardplan.as_torch_load_planner(to_unfused())
    dcp.load(state, checkpoint_id=f"{folder}-whole", planner=load)
    told = {"loaded": differing(state, as_fused(unfused()))}
    dcp.save(state, checkpoint_id=folder, planner=shardplan_save)
    found = {name: torch.zeros_like(tensor) for name, tensor in unfused().items()}
    dcp.load(found, checkpoint_id=folder)
    return told | {"saved": differing(found, unfused())}


def experts_apart(folder, square):
    """Each rank holds other experts, and parts of what is joined: only all together know."""
    rank, whole = dist.get_rank(), unfused()
    mine = {n: t for n, t in whole.items() if ".experts." not in n and ".norm." in n}
    for number, name in enumerate(sorted(set(whole) - set(mine))):
        if number % dist.get_world_size() == rank:
            mine[name] = whole[name]
    planner = chain(
        stack("*.experts.#.weight", "*.experts"),
        concat(["*.q.weight", "*.k.weight", "*.v.weight"], "*.qkv.weight"),
        permute("*.out.weight", (1, 0), required=False),  # which only some ranks hold
        rename([(r"^model\.", "")]),
    )
    shardplan.save(mine, folder, planner=planner)
    told = {"saved": differing(flatten(shardplan.restore(folder))[0], as_fused(whole))}
    state = fused(square)
    shardplan.load(state, folder)
    told["loaded sharded"] = differing(state, as_fused(whole))
    got = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    shardplan.load(got, folder, planner=planner)
    return told | {"loaded": differing(got, mine)}


CASES = (unfused_checkpoints, through_torch, experts_apart)


def main(rank, world, store, folder):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=110),
    )
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = {}
    for case in CASES:
        told[case.__name__] = case(f"{folder}/{case.__name__}", square)
        dist.barrier()
    Path(folder, f"told-{rank}").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
