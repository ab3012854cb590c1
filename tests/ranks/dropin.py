"""One rank of a real process group that uses shardplan.dcp in place of torch's module.

Run as ``python dropin.py RANK WORLD STORE FOLDER``. It judges nothing: FOLDER/told-RANK receives,
per case, what came back, what was raised, or which keys differ.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torchs
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardplan
import shardplan.dcp as dcp

PLACEMENTS = [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Shard(1)] * 2
FULL = torch.arange(60.0).reshape(6, 10)


def state(mesh, *, shift=0, scale=1):
    """Return a state dict whose placements depend on ``shift``, and its values on ``scale``."""
    kinds = PLACEMENTS[shift:] + PLACEMENTS[:shift]
    tensors = {
        f"w{number}": distribute_tensor(scale * (FULL + number), mesh, kind, src_data_rank=None)
        for number, kind in enumerate(kinds)
    }
    return {"model": tensors, "step": 7 * scale, "betas": [scale * 0.5, {"eps": scale}]}


def differing(got, wanted):
    """Return the names of what differs, tensors being compared whole."""
    got, wanted = shardplan.planning.flatten(got)[0], shardplan.planning.flatten(wanted)[0]
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in wanted.items()}
    mine = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in got.items()}
    return [n for n in sorted(whole.keys() | mine.keys()) if not _same(mine.get(n), whole.get(n))]


def _same(one, other):
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


def record(metadata):
    """Return what both modules must say of a save."""
    entries = metadata.state_dict_metadata.items()
    boxes = {
        name: sorted((*c.offsets, *c.sizes) for c in entry.chunks)
        for name, entry in entries
        if isinstance(entry, torchs.TensorStorageMetadata)
    }
    return repr((boxes, sorted(dict(entries)), sorted(metadata.planner_data.items())))


def to_and_from_torch(folder, mesh):
    saved = state(mesh)
    ours = dcp.save(saved, checkpoint_id=f"{folder}/ours")
    theirs = torchs.save(saved, checkpoint_id=f"{folder}/theirs")
    one, other = (state(mesh, shift=n, scale=0) for n in (1, 2))
    torchs.load(one, checkpoint_id=f"{folder}/ours")
    dcp.load(other, checkpoint_id=f"{folder}/theirs")
    metadata = record(ours), record(theirs)
    return {"differ": differing(one, saved) + differing(other, saved), "metadata": metadata}


def sharded_tensors(folder, mesh):
    """Rows of a ShardedTensor, of which the ranks hold 3, 3, 0 and 0, become columns."""

    def sharded(whole, box, size):
        mine = [LocalShard.from_tensor_and_offsets(whole, box, dist.get_rank())] if size else []
        return init_from_local_shards(mine, 6, 10)

    rank = dist.get_rank()
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(5 * (rank % 2), 5 * (rank % 2) + 5)
    saved = {"w": sharded(FULL[rows].clone(), [3 * rank, 0], rank < 2)}
    got = {"w": sharded(torch.zeros(6, 5), [0, columns.start], rank < 2)}
    whole = {"w": torch.zeros(6, 10)}
    dcp.save(saved, checkpoint_id=folder)
    for state_dict in (got, whole):
        dcp.load(state_dict, checkpoint_id=folder)
    shards = [s.tensor for s in got["w"].local_shards()]
    return [torch.equal(s, FULL[:, columns]) for s in shards] + [torch.equal(whole["w"], FULL)]


def in_the_background(folder, mesh):
    """Two saves in a row, by the default ranks and by a group, whose copies are changed later."""
    found = []
    for number, group in enumerate((None, dist.group.WORLD)):
        saved = state(mesh)
        future = dcp.async_save(saved, checkpoint_id=f"{folder}/{number}", process_group=group)
        for tensor in saved["model"].values():
            tensor.to_local().zero_()
        metadata = future.result()
        got = state(mesh, shift=1, scale=0)
        torchs.load(got, checkpoint_id=f"{folder}/{number}")
        found += differing(got, state(mesh))
    return {"differ": found, "metadata": record(metadata)}


def by_some_ranks(folder, mesh):
    """Ranks 1 and 3 save and load by themselves; rank 3 coordinates."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    saved = {"w": torch.ones(3), "step": 7}
    returned = dcp.save(saved, checkpoint_id=f"{folder}/new", process_group=group)
    writer, reader = dcp.FileSystemWriter(f"{folder}/old"), dcp.FileSystemReader(f"{folder}/old")
    dcp.save_state_dict(saved, writer, group, coordinator_rank=1)
    new, old = ({"w": torch.zeros(3), "step": 0} for _ in range(2))
    dcp.load(new, checkpoint_id=f"{folder}/new", process_group=group)
    dcp.load_state_dict(old, reader, group, coordinator_rank=1)
    return {"differ": differing(new, saved) + differing(old, saved), "metadata": record(returned)}


def each_alone(folder, mesh):
    saved, got = {"rank": dist.get_rank()}, {"rank": -1}
    dcp.save(saved, checkpoint_id=f"{folder}/{dist.get_rank()}", no_dist=True)
    dcp.load(got, checkpoint_id=f"{folder}/{dist.get_rank()}", no_dist=True)
    return got == saved


def failures(folder, mesh):
    """Rank 2 wants a key and a shape that nobody saved, in a group whose ranks it is third of."""
    dcp.save({"w": torch.ones(3), "v": torch.ones(3)}, checkpoint_id=folder)
    mine = dist.get_rank() == 2
    wanted = {"w": torch.zeros(4 if mine else 3), **({"other": torch.zeros(1)} if mine else {})}
    try:
        dcp.load(wanted, checkpoint_id=folder)
    except torchs.CheckpointException as error:
        ours = error.__cause__
        kinds = {rank: type(e).__name__ for rank, (e, _) in error.failures.items()}
        return {"kinds": kinds, "text": str(error), "ranks": getattr(ours, "ranks", None)}


class Doubling(dcp.DefaultSavePlanner):
    """A planner of the caller's own, which torch carries out."""

    def lookup_object(self, index):
        return super().lookup_object(index) * 2


def with_a_planner_of_ones_own(folder, mesh):
    saved = {"w": distribute_tensor(FULL, mesh, [Shard(0), Shard(1)], src_data_rank=None)}
    got = {}
    for format in ("dcp", "safetensors"):
        dcp.save(saved, checkpoint_id=f"{folder}/{format}", planner=Doubling(), format=format)
        into = {"w": torch.zeros(6, 10)}
        dcp.load(into, checkpoint_id=f"{folder}/{format}")
        got[format] = torch.equal(into["w"], 2 * FULL)
    return got


CASES = (
    to_and_from_torch,
    sharded_tensors,
    in_the_background,
    by_some_ranks,
    each_alone,
    failures,
    with_a_planner_of_ones_own,
)


def main(rank, world, store, folder):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=110),
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = {}
    for case in CASES:
        told[case.__name__] = case(f"{folder}/{case.__name__}", mesh)
        dist.barrier()
    Path(folder, f"told-{rank}").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
