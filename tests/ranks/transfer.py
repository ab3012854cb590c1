"""One of six real ranks: four FSDP trainers update two tensor-parallel servers.

Run as ``python transfer.py PLACE FOLDER RANK``. It judges nothing: FOLDER/told-RANK receives what
happened on this rank.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardplan
from shardplan.planning import concat, rename, stack

WIDTH, EXPERTS = 64, 4
PLANNER = [
    concat(["attention.q.weight", "attention.k.weight", "attention.v.weight"], into="qkv", axis=0),
    stack("experts.#.weight", into="experts"),
    rename({"out.weight": "o"}),
]


class Model(nn.Module):
    """What trainers have: q, k and v apart, each expert by itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, bias=False) for n in "qkv"})
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 32, bias=False) for _ in range(EXPERTS))
        self.out = nn.Linear(WIDTH, 50, bias=False)


def whole():
    """Return the trained weights, the same on all ranks."""
    torch.manual_seed(0)
    return Model()


def fused(model):
    """Return what servers should have, whole, and how each is cut."""
    weights = [model.attention[n].weight for n in "qkv"]
    return {
        "qkv": (torch.cat(weights).detach(), Shard(0)),
        "experts": (torch.stack([one.weight for one in model.experts]).detach(), Shard(2)),
        "o": (model.out.weight.detach(), Shard(1)),
    }


def main(place, folder, rank):
    rank = int(rank)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=6)
    trainers, servers = DeviceMesh("cpu", list(range(4))), DeviceMesh("cpu", [4, 5])
    model, wrong, needed = whole(), [], 0
    expected = fused(model)
    if rank < 4:
        fully_shard(model, mesh=trainers)
        report = shardplan.transfer(model.state_dict(), None, planner=PLANNER)
    else:
        into = {
            name: distribute_tensor(torch.zeros_like(t), servers, [cut], src_data_rank=None)
            for name, (t, cut) in expected.items()
        }
        report = shardplan.transfer(None, into, planner=PLANNER)
        for name, (tensor, cut) in expected.items():
            mine = distribute_tensor(tensor, servers, [cut], src_data_rank=None).to_local()
            needed += mine.nbytes
            wrong += [] if torch.equal(into[name].to_local(), mine) else [name]
    told = {"wrong": wrong, "needed": needed}
    told |= {"sent": report.bytes_sent, "received": report.bytes_received}
    Path(f"{folder}/told-{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
