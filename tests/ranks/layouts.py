"""Models in training, each cut in another way: saved on each, loaded on each other.

Run as ``python layouts.py RANK WORLD PORT FOLDER`` it is one rank of a real process group. Four
ranks leave a checkpoint per layout in FOLDER, and load each on each layout; eight ranks load what
four have left there, on some. It judges nothing: ``FOLDER/told-WORLD-RANK`` receives, per case,
digests of what was there.
"""

import hashlib
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardplan
from shardplan.planning import flatten

STRICT = ["model.*", "optim.state.first.*"]  # names on ranks that hold the first stage
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class First(nn.Module):
    """Odd sizes, a parameter smaller than any mesh, and a counter that no optimizer knows."""

    def __init__(self):
        super().__init__()
        self.inp, self.up, self.down = nn.Linear(7, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        x = self.inp(x).relu()
        return (x + self.down(self.up(x).relu())) * self.scale


class Second(nn.Module):
    """Rows that two ranks times two cut unevenly, a frozen part, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(16, 6), nn.Linear(6, 16)
        self.out, self.frozen = nn.Linear(16, 5), nn.Linear(16, 5).requires_grad_(False)
        self.lazy = nn.Parameter(torch.rand(3, 5))

    def forward(self, x):
        x = x + self.back(self.wide(x).relu())
        return self.out(x) + self.frozen(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = First(), Second()

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


def fresh(seed):
    torch.manual_seed(seed)
    return Net()


# Layouts: each takes a whole model and returns this rank's


def fsdp(net, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def parallel(net, mesh, names):
    ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ways |= {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    for part in net.children():
        here = {n: way for n, way in ways.items() if n in names and hasattr(part, n)}
        parallelize_module(part, mesh, here)
    return net


def tp(net, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return parallel(net, mesh, ("up", "down"))


def fsdp_tp(net, world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(net, mesh["tp"], ("up", "down", "wide", "back"))
    return fully_shard(net, mesh=mesh["dp"])


def hsdp(net, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(net, mesh=mesh)


def ddp(net, world):
    return DistributedDataParallel(net, find_unused_parameters=True)


def pipeline(net, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    net.stage = mesh.get_local_rank("pp")
    delattr(net, "second" if net.stage == 0 else "first")
    return fully_shard(net, mesh=mesh["dp"])


LAYOUTS = {f.__name__: f for f in (fsdp, tp, fsdp_tp, hsdp, ddp, pipeline)}


class Training:
    """A model and its optimizer on all ranks."""

    def __init__(self, layout, world, seed):
        self.world = world
        self.net = LAYOUTS[layout](fresh(seed), world)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, foreach=False)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(4, n, generator=generator) for n in (7, 5))
        stage = getattr(self.net, "stage", None)
        if stage is None:
            (self.net(x) - y).square().mean().backward()
        else:
            self._pipelined(stage, x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _pipelined(self, stage, x, y):
        half, rank = self.world // 2, dist.get_rank()
        between = torch.empty(4, 16)
        if stage == 0:
            sent = self.net(x)
            dist.send(sent.detach(), rank + half)
            dist.recv(between, rank + half)
            sent.backward(between)
        else:
            dist.recv(between, rank - half)
            between.requires_grad_()
            (self.net(between) - y).square().mean().backward()
            dist.send(between.grad, rank - half)

    def state_dict(self, options=FLAT):
        model, optim = get_state_dict(self.net, self.optimizer, options=options)
        return {"model": model, "optim": optim}

    def load(self, sd, options=FLAT):
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=sd["model"],
            optim_state_dict=sd["optim"],
            options=options,
        )


def whole(sd):
    """Return a state dict with every tensor whole, of all ranks together."""
    flat, _ = flatten(sd)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in flat.items()}
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, full)
    return {k: v for part in reversed(told) for k, v in part.items()}


def digests(full):
    def digest(value):
        data = value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
        return hashlib.blake2b(data.encode() if isinstance(data, str) else data).hexdigest()[:12]

    return {name: digest(value) for name, value in sorted(full.items())}


def distance(a, b):
    pairs = [(a[k], b[k]) for k in a if k.startswith("model.")]
    return max(float((x - y).abs().max()) for x, y in pairs)


def save_all(world, folder):
    """Train on each layout, save, and train on."""
    told = {}
    for layout in LAYOUTS:
        training = Training(layout, world, seed=1)
        for number in (1, 2):
            training.step(number)
        sd = training.state_dict()
        report = shardplan.save(sd, f"{folder}/{world}-{layout}")
        saved = whole(sd)
        training.step(3)
        after = whole(training.state_dict())
        told[f"saved:{layout}"] = {"how": report.how, "digests": digests(saved)}
        if dist.get_rank() == 0:
            torch.save({"saved": saved, "after": after}, f"{folder}/{world}-{layout}.ref")
    return told


def load_all(world, folder, sources, layouts):
    """Load what was saved on some layouts on others, and train on."""
    told = {}
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".ref")):
        source = name.removesuffix(".ref")
        if source.partition("-")[2] not in sources:
            continue
        kept = torch.load(f"{folder}/{name}")
        for layout in layouts:
            training = Training(layout, world, seed=2)
            sd = training.state_dict()
            report = shardplan.load(sd, f"{folder}/{source}", strict=STRICT)
            training.load(sd)
            loaded = whole(training.state_dict())
            training.step(3)
            after = whole(training.state_dict())
            told[f"{source}:{layout}"] = {
                "digests": digests(loaded),
                "missing": report.missing,
                "distance": distance(kept["after"], after),
            }
    return told


def main(rank, world, port, folder):
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", int(port), world, rank == 0),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    told = save_all(world, folder) if world == 4 else {}
    dist.barrier()
    few = (("fsdp", "fsdp_tp", "pipeline"), ("fsdp", "fsdp_tp"))  # eight ranks take their time
    told |= load_all(world, folder, *((LAYOUTS, LAYOUTS) if world == 4 else few))
    with open(f"{folder}/told-{world}-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
