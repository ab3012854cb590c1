"""One rank of a real process group: builds real models, and tells what it plans, holds and finds.

Run as ``python hold.py RANK WORLD STORE OUT``. It judges nothing: OUT receives, per case, the plan
(encoded) and, per item of it, the values that `find_shard` or `find_object` gives.
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from shardplan.planning import RefusedError, encode_plan, find_object, flatten, local_plan


class Net(nn.Module):
    """Six rows and three: uneven on two ranks and on four, and three are fewer than four."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.down = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))


def tensor_parallel(net, mesh):
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fsdp():
    """FSDP2 over all ranks, with the state of an optimizer that has made one step."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    net = fully_shard(Net(), mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0, betas=(0.5, 0.5), foreach=False)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optim": state}


def tp():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return {"model": tensor_parallel(Net(), mesh).state_dict()}


def fsdp_tp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = tensor_parallel(Net(), mesh["tp"])
    return {"model": fully_shard(net, mesh=mesh["dp"]).state_dict()}


def hsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {"model": fully_shard(Net(), mesh=mesh).state_dict()}


def whole():
    return {"model": Net().state_dict()}


def linear_of_one():
    mesh = init_device_mesh("cpu", (4,))
    linear = nn.Linear(1, 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return fully_shard(linear, mesh=mesh).state_dict()


def submesh():
    mesh = DeviceMesh("cpu", [1, 3])
    return {"w": distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])}


def strided():
    """Three stripes over two ranks, then two: some rank holds rows in two places."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    rows = torch.arange(14.0).view(7, 2)
    # Torch scatters even stripes only; without a source rank each rank cuts its own.
    return {"w": distribute_tensor(rows, mesh, placements, src_data_rank=None)}


def sharded_tensor():
    """Two shards on every rank, the second before the first."""
    rows = torch.arange(16.0).view(8, 2)
    rank = dist.get_rank()
    shards = [
        LocalShard.from_tensor_and_offsets(rows[row : row + 1].clone(), [row, 0], rank)
        for row in (2 * rank + 1, 2 * rank)
    ]
    return {"w": init_from_local_shards(shards, 8, 2)}


def partial():
    mesh = init_device_mesh("cpu", (4,))
    return {"loss": DTensor.from_local(torch.ones(2), mesh, [Partial()])}


CASES = (
    fsdp,
    tp,
    fsdp_tp,
    hsdp,
    whole,
    linear_of_one,
    submesh,
    strided,
    sharded_tensor,
    partial,
)


def report(sd):
    try:
        plan = local_plan(sd)
    except RefusedError as error:
        return {"refused": str(error)}
    flat, _ = flatten(sd)
    found = [find_object(flat, item.source) for item in plan.items]
    values = [v.tolist() if isinstance(v, torch.Tensor) else repr(v) for v in found]
    return {"plan": encode_plan(plan).hex(), "values": values}


def main(rank, world, store, out):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=110),
    )
    told = {case.__name__: report(case()) for case in CASES}
    with open(out, "w", encoding="utf-8") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
