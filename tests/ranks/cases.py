"""Saves and loads on four real ranks, case by case.

Run as ``python cases.py RANK WORLD PORT FOLDER`` it is one rank of a real process group. It judges
nothing: ``FOLDER/told-RANK`` receives, per case, what happened on this rank.
"""

import importlib.util
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardplan
from shardplan import _offers as offers
from shardplan._agree import agree
from shardplan._offers import Begun, PlanCache
from shardplan._report import Stopwatch
from shardplan.dist import CheckpointError, torch_comm
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import flatten


def script(name):
    path = Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts = script("parts")


class Slow(CountingStore):
    """A store that takes its time to write."""

    def write(self, *args, **options):
        time.sleep(1.5)
        return super().write(*args, **options)


# How a plan comes to be


def meshes():
    """State dicts that say it all: DTensors on one mesh, on axes of it, and plain tensors."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = grid["dp", "tp"]._flatten("dp_tp")
    rows = torch.arange(56.0).view(14, 4)
    even = torch.arange(64.0).view(16, 4)

    def on(mesh, whole, *placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    many = {f"layers.{i}": on(flat, rows, Shard(0)) for i in range(30)}
    return {
        "rows": many | {"plain": torch.ones(3), "step": 7},
        "two axes": {
            "a": on(grid, rows, Shard(0), Shard(1)),
            "b": on(grid, rows, Replicate(), Shard(0)),
            "c": on(grid, even, _StridedShard(0, split_factor=2), Shard(0)),
            **{f"d{i}": torch.zeros(i + 1) for i in range(30)},
        },
        "an axis each": {
            "dp": on(grid["dp"], rows, Shard(0)),
            "tp": on(grid["tp"], rows, Shard(1)),
            **{f"both{i}": on(grid, rows, Shard(0), Replicate()) for i in range(30)},
        },
        "two roots, one flattened": {
            "uneven": on(grid, rows[:13], _StridedShard(0, split_factor=2), Shard(0)),
            "seed": {f"rank_{dist.get_rank()}": torch.ones(5)},
            **{f"flat{i}": on(both, rows, Shard(0)) for i in range(30)},
            **{f"rows{i}": on(flat, rows, Shard(1)).requires_grad_() for i in range(2)},
        },
    }


def ways():
    told = {}
    derive = offers.describe
    for name, sd in meshes().items():
        found, given, cache = [], [], PlanCache()
        for way in ("derived", "gathered", "cached"):
            offers.describe = (lambda *args: None) if way == "gathered" else derive
            comm = parts.SpyComm(torch_comm(timeout=60))
            fresh = PlanCache() if way == "gathered" else cache
            begun = Begun(sd, "here")
            options = {"planner": None, "watch": Stopwatch(), "cache": fresh}
            found.append(agree(comm, lambda begun=begun: begun, **options).agreement)
            given.append(comm.nbytes())
        offers.describe = derive
        first, *others = found
        same = all(one.plan == first.plan for one in others)
        if dist.get_rank() == 0:
            same &= all(tuple(one.whole.plans) == tuple(first.whole.plans) for one in others)
            same &= all(one.whole.metadata == first.whole.metadata for one in others)
        told[name] = [one.how for one in found], same, given
    return told


# While training goes on


def in_background(folder):
    """Change everything while the save is under way, and reduce over the group that trains."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = torch.arange(32.0).view(8, 4)
    sd = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    sd |= {f"own{dist.get_rank()}.{i}": torch.ones(4) for i in range(200)}  # a plan of some size
    future = shardplan.async_save(sd, Slow(open_store(f"{folder}/background")))
    for value in sd.values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    rounds = wrong = 0
    while True:
        total = torch.full((1000,), float(dist.get_rank() + rounds))
        dist.all_reduce(total)
        wrong += not torch.equal(total, torch.full((1000,), 6.0 + 4 * rounds))
        rounds += 1
        # All ranks must leave the loop together.
        done = torch.tensor([float(future.done())])
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done.item() and rounds >= 20:
            break
        time.sleep(0.01)
    return {"rounds": rounds, "wrong": wrong, "how": future.result().how}


def lost(folder):
    """An interrupt on one rank, in a save and in a background save; then all go on."""

    class Interrupted:
        def state_dict(self):
            raise KeyboardInterrupt

        def load_state_dict(self, state):
            pass

    told = []
    for way in (shardplan.save, lambda *args: shardplan.async_save(*args).result()):
        for turn in range(3):
            bad = turn == 0 and dist.get_rank() == 2
            sd = {"w": torch.ones(2), "s": Interrupted()} if bad else {"w": torch.ones(2)}
            try:
                told.append(way(sd, f"{folder}/lost-{len(told)}").nbytes)
            except KeyboardInterrupt:
                told.append("interrupted")
            except CheckpointError as error:
                told.append(list(error.ranks))
    return told


# Who reads


def shared(folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = {f"w{i}": torch.arange(1 << 18).view(512, 512) + i for i in range(12)}
    sd = {k: distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for k, v in whole.items()}
    shardplan.save(sd, f"{folder}/shared")
    target = {name: torch.zeros_like(value) for name, value in whole.items()}
    report = shardplan.load(target, f"{folder}/shared", share_reads=True)
    return {
        "same": all(torch.equal(target[name], whole[name]) for name in whole),
        "total_read": report.total_read,
        "received": report.bytes_received,
        "unique": sum(value.nbytes for value in whole.values()),
    }


def file(folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole = {"rows": torch.arange(70.0).view(14, 5), "columns": torch.arange(84).view(7, 12)}
    path = f"{folder}/x.pt"
    if dist.get_rank() == 0:
        torch.save({"model": whole, "step": 7, "betas": (0.9, 0.99)}, path)
    dist.barrier()
    axes = {"rows": [Shard(0)], "columns": [Shard(1)]}
    blank = {k: torch.zeros_like(v) for k, v in whole.items()}
    model = {k: distribute_tensor(blank[k], mesh, axes[k]) for k in whole}
    sd = {"model": model, "step": 0, "betas": None}
    report = shardplan.load(sd, path)
    same = all(torch.equal(sd["model"][k].full_tensor(), whole[k]) for k in whole)
    same = same and (sd["step"], sd["betas"]) == (7, (0.9, 0.99))
    return {"same": same, "read": report.bytes_read}


# The rest


def replicas(folder):
    """Rank 3 holds another value than rank 1, which it should be a copy of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.arange(6.0).view(3, 2).clone()
    if dist.get_rank() == 3:
        local[2, 1] = 99
    tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    try:
        shardplan.save({"w": tensor}, f"{folder}/replicas", verify_replicas=True)
    except CheckpointError as error:
        return "; ".join(failure.text for failure in error.failures)
    return "nothing"


def nested(folder):
    """Optimizer state with its groups, as lists of names: saved by FSDP, loaded by HSDP."""

    def made(seed, shape, names):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        net = fully_shard(net, mesh=mesh)
        groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters()}]
        adam = torch.optim.AdamW(groups, lr=0.01 * seed, foreach=False)
        net(torch.ones(2, 5)).square().sum().backward()
        adam.step()
        return net, adam

    def state(net, adam):
        model, optim = get_state_dict(net, adam)
        return {"model": model, "optim": optim}

    def told(sd):
        flat, _ = flatten(sd)
        return {
            name: value.full_tensor().tolist() if isinstance(value, DTensor) else repr(value)
            for name, value in sorted(flat.items())
        }

    net, adam = made(1, (4,), ("dp",))
    sd = state(net, adam)
    shardplan.save(sd, f"{folder}/nested")
    other, second = made(2, (2, 2), ("replicate", "shard"))
    target = state(other, second)
    shardplan.load(target, f"{folder}/nested")
    set_state_dict(
        other, second, model_state_dict=target["model"], optim_state_dict=target["optim"]
    )
    return {"before": told(sd), "after": told(state(other, second))}


def main(rank, world, port, folder):
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", int(port), world, rank == 0),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    told = {
        "ways": ways(),
        "background": in_background(folder),
        "shared": shared(folder),
        "file": file(folder),
        "replicas": replicas(folder),
        "nested": nested(folder),
        "lost": lost(folder),
    }
    with open(f"{folder}/told-{rank}", "w", encoding="utf-8") as out:
        json.dump(told, out)
    # The interpreter exits while this save is under way.
    shardplan.async_save({"w": torch.arange(8.0)}, Slow(open_store(f"{folder}/last")))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
