"""One rank of a real process group that saves and loads through torch.distributed.checkpoint.

Run as ``python adapt.py RANK WORLD STORE FOLDER``. It judges nothing: FOLDER/told-RANK receives,
per case, the keys whose values are not the saved ones, or the failures that torch reports.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import shardplan
from shardplan.io.tensors import tensor_bytes
from shardplan.planning import (
    annotate,
    cast,
    chain,
    drop,
    dtype_name,
    flatten,
    rename,
    select,
    split_chunks,
    split_replicas,
    world_pass,
)
from shardplan.planning.dtypes import ITEMSIZE

DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]
TORCH_CANNOT = {"float4_e2m1fn_x2"}  # torch's FileSystemWriter has no width for it


def elements(dtype, count):
    """Return elements of any dtype that are all alike on every rank, and not all the same."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.arange(count) % 3 == 0
    raw = torch.arange(count * kind.itemsize, dtype=torch.int64) % 61
    return raw.to(torch.uint8).view(kind)


class Net(nn.Module):
    """Six rows and three: uneven on four ranks, of which one gets no row of three."""

    def __init__(self, scale):
        super().__init__()
        self.up = nn.Linear(3, 6)
        self.down = nn.Linear(6, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(scale * torch.arange(parameter.numel()).view(parameter.shape))


def trained(mesh, scale):
    """FSDP2 over all ranks, with the state of an optimizer that has made one step."""
    net = fully_shard(Net(scale), mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * scale, foreach=False)
    for parameter in net.parameters():
        parameter.grad = scale * parameter.detach().clone()
    optimizer.step()
    model, state = get_state_dict(net, optimizer)
    return {"model": model, "optim": state}


def placed(full, mesh, *placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def sharded(dtype, mesh):
    """A DTensor of seven rows of any dtype, made without any operator of that dtype."""
    full = elements(dtype, 14).view(7, 2)
    low = min(2 * dist.get_rank(), 7)
    local = full[low : low + 2].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], shape=(7, 2), stride=(2, 1))


def state(line, square, *, scale=1, dtypes=DTYPES):
    rows = scale * torch.arange(35.0).view(7, 5)
    return trained(line, scale) | {
        "dtypes": {name: sharded(name, line) for name in dtypes},
        "placed": {
            "rows": placed(rows, line, Shard(0)),
            "columns": placed(rows, line, Shard(1)),
            "both": placed(rows, square, Shard(0), Shard(1)),
            "twice": placed(rows, square, Shard(0), Shard(0)),
            "half": placed(rows, square, Replicate(), Shard(0)),
            "all": placed(rows, line, Replicate()),
            "scalar": placed(torch.tensor(2.5 * scale), line, Replicate()),
            "empty": placed(torch.zeros(0, 4), line, Shard(0)),
            "hollow": placed(torch.zeros(0, 8), line, Shard(1)),
        },
        "plain": [scale * torch.arange(3), {"zero": torch.tensor(scale)}],
        "step": 7 * scale,
        "betas": (0.9 * scale, 0.99),
        "raw": b"\x00raw" * scale,
        "nothing": {},
    }


def resharded(line, square):
    """The same tensors as in `state`, placed in other ways."""
    zeros = torch.zeros(7, 5)
    return {
        "model": {
            "up.weight": placed(torch.zeros(6, 3), square, Replicate(), Shard(1)),
            "down.bias": torch.zeros(3),
        },
        "placed": {
            "rows": placed(zeros, square, Shard(1), Shard(0)),
            "columns": placed(zeros, line, Replicate()),
            "both": placed(zeros, line, Shard(0)),
            "twice": zeros.clone(),
            "half": placed(zeros, line, Shard(1)),
            "all": placed(zeros, square, Shard(0), Shard(1)),
        },
    }


def unusual(square, scale):
    """What only our own planner saves right: keys that are no text, and rows in two places."""
    rows = scale * torch.arange(14.0).view(7, 2)
    rank = dist.get_rank()
    shards = [
        LocalShard.from_tensor_and_offsets(scale * torch.full((1, 2), row), [row, 0], rank)
        for row in (2 * rank + 1, 2 * rank)
    ]
    return {
        "stripes": placed(rows, square, _StridedShard(0, split_factor=3), Shard(0)),
        "shards": init_from_local_shards(shards, 8, 2),
        "nested": {3: {"value": scale, None: torch.full((2,), scale)}, "pair": (rows.clone(), 5)},
    }


def here(value):
    """Return what this rank holds of a value, so that it compares bit by bit."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "local_shards"):
        return [here(shard.tensor) for shard in value.local_shards()]
    if not isinstance(value, torch.Tensor):
        return repr(value)
    name = dtype_name(value.dtype)
    return name, tuple(value.shape), bytes(tensor_bytes(value.detach(), name))


def differing(got, expected):
    got, expected = flatten(got)[0], flatten(expected)[0]
    keys = got.keys() | expected.keys()
    return sorted(k for k in keys if here(got.get(k)) != here(expected.get(k)))


def whole(sd):
    """Return a state dict with every DTensor's elements, all of them, on every rank."""
    flat = flatten(sd)[0]
    for name, value in flat.items():
        if name.startswith("dtypes."):  # gloo cannot gather all of them
            flat[name] = elements(name.removeprefix("dtypes."), 14).view(7, 2)
        elif isinstance(value, DTensor):
            flat[name] = value.full_tensor()
    return flat


def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except dcp.api.CheckpointException as error:
        return {str(r): [type(e).__name__, str(e)] for r, (e, _) in error.failures.items()}
    return "nothing was raised"


def our_planners(folder, line, square):
    """Our pipeline, torch's files."""
    dtypes = [name for name in DTYPES if name not in TORCH_CANNOT]
    passes = chain(
        rename(lambda key: key.replace("placed.", "p.")),
        cast({"p.rows": "float64", "model.*": "bfloat16"}, required=False),
        split_chunks(40),
        split_replicas(),
        annotate(lambda plan: {"items": len(plan.items)}),
    )
    saved = state(line, square, dtypes=dtypes)
    metadata = dcp.save(
        saved, checkpoint_id=folder, planner=shardplan.as_torch_save_planner(passes)
    )
    got = state(line, square, scale=0, dtypes=dtypes)
    dcp.load(got, checkpoint_id=folder, planner=shardplan.as_torch_load_planner(passes))
    plain = {"p": resharded(line, square)["placed"], "step": 0, "raw": b""}
    plain["p"]["rows"] = placed(torch.zeros(7, 5, dtype=torch.float64), line, Shard(1))
    plain["optim"] = trained(line, 0)["optim"]
    dcp.load(plain, checkpoint_id=folder)
    expected = {f"p.{k}": v for k, v in whole(saved["placed"]).items() if k in plain["p"]}
    expected["p.rows"] = expected["p.rows"].double()
    optim = plain.pop("optim")
    rounded = {k: v.bfloat16().float() for k, v in saved["model"].items()}
    return {
        "loaded": differing(got, saved | {"model": rounded}),
        "optim": differing(optim, saved["optim"]),
        "plain": differing(whole(plain), {**expected, "step": saved["step"], "raw": saved["raw"]}),
        "dtype": str(metadata.state_dict_metadata["p.rows"].properties.dtype),
        "chunks": len(metadata.state_dict_metadata["p.all"].chunks),
    }


def our_storage(folder, line, square):
    """torch's planners, our files."""
    saved = state(line, square)
    dcp.save(saved, storage_writer=shardplan.as_torch_storage_writer(folder))
    got, other = state(line, square, scale=0), resharded(line, square)
    dcp.load(got, storage_reader=shardplan.as_torch_storage_reader(folder))
    dcp.load(other, storage_reader=shardplan.as_torch_storage_reader(folder))
    got["nothing"] = {}
    full, everything = flatten(whole(other))[0], whole(saved)
    restored = shardplan.restore(folder)
    everything.pop("nothing")  # torch leaves empty dicts out
    again = {"model": resharded(line, square)["model"], "step": 0}
    shardplan.load(again, folder)
    names = whole(again).keys()
    return {
        "loaded": differing(got, saved),
        "resharded": differing(full, {k: v for k, v in everything.items() if k in full}),
        "restored": differing(flatten(restored)[0], everything),
        "our load": differing(whole(again), {k: everything[k] for k in names}),
        "verified": shardplan.verify(folder).ok,
    }


def both(folder, line, square):
    """Our pipeline and our files, inside torch's save and load."""
    passes = chain(rename(lambda key: f"x.{key}"), cast("bfloat16"), split_chunks(24))
    saved = unusual(square, 1) | {"placed": state(line, square)["placed"], "nothing": {}}
    dcp.save(
        saved,
        storage_writer=shardplan.as_torch_storage_writer(folder),
        planner=shardplan.as_torch_save_planner(passes),
    )
    got = unusual(square, 0) | {
        "placed": state(line, square, scale=0)["placed"],
        "nothing": None,
    }
    dcp.load(
        got,
        storage_reader=shardplan.as_torch_storage_reader(folder),
        planner=shardplan.as_torch_load_planner(passes),
    )
    return {"loaded": differing(got, saved)}


def from_torch_s_own(folder, line, square):
    """torch saves; our planner loads, from torch's files."""
    dtypes = [name for name in DTYPES if name not in TORCH_CANNOT]
    saved = state(line, square, dtypes=dtypes)
    dcp.save(saved, checkpoint_id=folder)
    got = state(line, square, scale=0, dtypes=dtypes)
    dcp.load(got, checkpoint_id=folder, planner=shardplan.as_torch_load_planner())
    return {"loaded": differing(got, saved)}


def some_ranks(folder, line, square):
    """Two of the four ranks save and load; their first one coordinates."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return {}
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    rows = torch.arange(10.0).view(5, 2)
    saved = {"w": placed(rows, mesh, Shard(0)), "step": 3}
    writer = shardplan.as_torch_storage_writer(folder)
    planner = shardplan.as_torch_save_planner(rename({"w": "v"}))
    dcp.save(saved, storage_writer=writer, planner=planner, process_group=group)
    got = {"w": placed(torch.zeros(5, 2), mesh, Shard(1)), "step": 0}
    reader = shardplan.as_torch_storage_reader(folder)
    planner = shardplan.as_torch_load_planner(rename({"w": "v"}))
    dcp.load(got, storage_reader=reader, planner=planner, process_group=group)
    return {"loaded": differing(whole(got), {"w": rows, "step": 3})}


def numbered(plans):
    """Name everything after the rank that holds it, as the plan says."""
    (plan,) = plans
    return rename(lambda key: f"{key}@{plan.rank}of{plan.world_size}")(plans)


@world_pass
def counted(plans):
    """Name everything after the number of ranks that hold some of it; the last ones write it."""
    held = [key for plan in plans for key in {item.index.fqn for item in plan.items}]
    named = rename(lambda key: f"{key}x{held.count(key)}")(plans)
    last = {(i.index, i.tensor_data): plan.rank for plan in named for i in plan.items}
    return tuple(
        attrs.evolve(p, items=[i for i in p.items if last[i.index, i.tensor_data] == p.rank])
        for p in named
    )


def scopes(folder, line, square):
    """Passes that know their rank, by the plan or by themselves, and one that needs all plans."""
    rank, group = dist.get_rank(), dist.new_group([1, 3])
    rows = torch.arange(14.0).view(7, 2)
    own, shared = {"own": torch.full((3,), float(rank))}, {f"own{rank}": rows + rank, "all": rows}
    planners = {
        "captured": (own, rename(lambda key: f"{key}.{rank}")),
        "numbered": (own, [numbered]),
        "counted": (shared | {"w": placed(rows, line, Shard(0))}, [counted]),
    }
    found = {}
    for case, (held, planner) in planners.items():
        path = f"{folder}/{case}"
        dcp.save(held, checkpoint_id=path, planner=shardplan.as_torch_save_planner(planner))
        shardplan.save(held, f"{path}-ours", planner=planner)
        blank, both = ({k: torch.zeros_like(v) for k, v in held.items()} for _ in range(2))
        loader = shardplan.as_torch_load_planner(planner)
        dcp.load(blank, checkpoint_id=path, planner=loader)
        shardplan.load(both, path, planner=planner)
        names = [sorted(shardplan.open_checkpoint(p).keys()) for p in (path, f"{path}-ours")]
        wrong = [differing(got, held) for got in (blank, both)]
        found[case] = {"names": names, "wrong": wrong, "missing": loader.report.missing}
    if rank in (1, 3):
        where = {"process_group": group}
        known = shardplan.as_torch_save_planner(numbered, **where)
        dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{folder}/some", planner=known, **where)
        where |= {"planner": shardplan.as_torch_save_planner(numbered)}
        refused = failure(dcp.save, {"w": torch.ones(2)}, checkpoint_id=f"{folder}/none", **where)
        found["some"] = [sorted(shardplan.open_checkpoint(f"{folder}/some").keys()), refused]
    return found


def failures(folder, line, square):
    rows = torch.arange(14.0).view(7, 2)
    w, rank = placed(rows, line, Shard(0)), dist.get_rank()
    writer, reader = shardplan.as_torch_storage_writer, shardplan.as_torch_storage_reader
    planner = shardplan.as_torch_save_planner
    told = {}
    dcp.save({"w": w, "step": 1}, storage_writer=writer(f"{folder}/a"), planner=planner(drop("w")))
    for kind, load in {"planner": shardplan.as_torch_load_planner(), "torch": None}.items():
        told[f"dropped, {kind}"] = failure(
            dcp.load, {"w": w}, storage_reader=reader(f"{folder}/a"), planner=load
        )
    told["exists"] = failure(dcp.save, {"w": w}, storage_writer=writer(f"{folder}/a"))
    told["no such key"] = failure(
        dcp.save, {"w": w}, storage_writer=writer(f"{folder}/b"), planner=planner(select("v"))
    )
    # A lambda on the last rank only: all ranks learn of it, and no checkpoint appears.
    unsafe = {"w": w, "only": {f"r{rank}": Callback() if rank == 3 else 1}}
    for kind, plan in {"planner": planner(), "torch": None}.items():
        told[f"unsafe, {kind}"] = failure(
            dcp.save, unsafe, storage_writer=writer(f"{folder}/c"), planner=plan
        )
    dist.barrier()
    told["left"] = [name for name in "bc" if Path(folder, name, "shardplan.json").exists()]
    return told


def each_alone(folder, line, square):
    """torch's ranks save each by itself; we read what they saved together, and each one's own."""
    saved = state(line, square) | {"own": {dist.get_rank(): dist.get_rank()}}
    del saved["nothing"]
    rng = {"rng": dist.get_rank()}
    dcp.save(saved | rng, checkpoint_id=folder, use_collectives=False)
    dist.barrier()
    got, other = state(line, square, scale=0), resharded(line, square)
    got["own"] = dict.fromkeys(range(4), -1)
    shardplan.load(got, folder)
    shardplan.load(other, folder)
    expected = saved | {"nothing": {}, "own": {rank: rank for rank in range(4)}}
    mine = {"rng": -1}
    shardplan.load(mine, f"{folder}/__{dist.get_rank()}.metadata", comm=shardplan.dist.solo())
    full, everything = whole(other), whole(saved)
    return {
        "loaded": differing(got, expected),
        "resharded": differing(full, {k: v for k, v in everything.items() if k in full}),
        "own": mine == rng,
        "verified": shardplan.verify(folder).ok,
    }


class Callback:
    """A value that cannot be loaded without running code."""


CASES = (
    our_planners,
    our_storage,
    both,
    from_torch_s_own,
    each_alone,
    some_ranks,
    scopes,
    failures,
)


def main(rank, world, store, folder):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=110),
    )
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = {}
    for case in CASES:
        told[case.__name__] = case(f"{folder}/{case.__name__}", line, square)
        dist.barrier()
    Path(folder, f"told-{rank}").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
