"""One rank of a real process group: exchanges sharded checkpoints with torch's own save and load.

Run as ``python exchange.py RANK WORLD STORE FOLDER``. It judges nothing: FOLDER receives the
checkpoints ``theirs`` and ``ours``, conversions of ``theirs``, and a file ``told-<rank>`` per rank
with what it loaded.
"""

import json
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardplan

SHAPES = {"uneven": (10, 3), "few": (3, 2), "grid": (7, 5), "vector": (6,), "same": (4, 2)}


def full(name):
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + len(name)


def state(line, square, fill, *, other=False):
    """Return a nested state dict of DTensors; ``other`` lays them out in another way."""

    def lay(name, mesh, placements):
        return distribute_tensor(full(name) if fill else full(name) * 0 - 1, mesh, placements)

    return {
        "model": {
            "uneven": lay("uneven", line, [Shard(1 if other else 0)]),
            "few": lay("few", line, [Replicate() if other else Shard(0)]),
            "grid": lay("grid", square, [Shard(1), Shard(0)] if other else [Shard(0), Shard(1)]),
        },
        "optim": {"state": {"0": {"vector": lay("vector", line, [Shard(0)])}}},
        "same": lay("same", line, [Shard(0) if other else Replicate()]),
        "plain": torch.ones(3) if fill else torch.zeros(3),
        "step": 7 if fill else 0,
    }


def local(value):
    """Return what this rank holds of it."""
    if isinstance(value, dict):
        return {key: local(inner) for key, inner in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    return (value.to_local() if hasattr(value, "to_local") else value).tolist()


def convert(rank, folder):
    """Convert with all ranks, as torchrun starts them; and on one, as with torch's functions."""
    shardplan.convert(f"{folder}/theirs", f"{folder}/shared", max_shard_size=100)
    if rank == 0:
        shardplan.dcp_to_torch_save(f"{folder}/theirs", f"{folder}/alone.pt")
        shardplan.torch_save_to_dcp(f"{folder}/alone.pt", f"{folder}/alone")


def main(rank, world, store, folder):
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2))
    sd = state(line, square, True)
    dcp.save(sd, checkpoint_id=f"{folder}/theirs")
    shardplan.save(sd, f"{folder}/ours", format="dcp")
    told = []
    for other in (False, True):
        wanted = state(line, square, True, other=other)
        blank = state(line, square, False, other=other)
        dcp.load(blank, checkpoint_id=f"{folder}/ours")
        told.append(local(blank) == local(wanted))
        blank = state(line, square, False, other=other)
        shardplan.load(blank, f"{folder}/theirs")
        told.append(local(blank) == local(wanted))
    convert(rank, folder)
    with open(f"{folder}/told-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
