"""One of two real ranks that save with a writer process each.

Run as ``python writers.py PLACE FOLDER RANK``. It judges nothing: FOLDER/told-RANK receives what
happened on this rank.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardplan
from shardplan import _async as background
from shardplan.dist import CheckpointError

ROWS = 1 << 21


def state(mesh, value):
    whole = torch.full((ROWS, 8), float(value))
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "all": distribute_tensor(
            torch.arange(6.0) + value, mesh, [Replicate()], src_data_rank=None
        ),
        "step": value,
    }


def kill_one(done, total):
    """Kill the writer of rank 1 in the middle."""
    if done and dist.get_rank() == 1:
        os.kill(background._own.writer.pid, signal.SIGKILL)


def main(place, folder, rank):
    dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    how, differ = [], []
    for number in range(2):
        sd = state(mesh, number)
        future = shardplan.async_save(sd, f"{folder}/{number}", process=True, overlap=True)
        future.staged.result()
        sd["rows"].to_local().fill_(-1)
        how.append(future.result().how)
    try:
        options = {"process": True, "progress": kill_one}
        shardplan.async_save(state(mesh, 2), f"{folder}/killed", **options).result()
        failures = []
    except CheckpointError as error:
        failures = [(f.rank, f.type, f.text) for f in error.failures]
    how.append(shardplan.async_save(state(mesh, 3), f"{folder}/3", process=True).result().how)
    for number in (0, 1, 3):
        got, wanted = state(mesh, -1), state(mesh, number)
        shardplan.load(got, f"{folder}/{number}")
        pairs = {key: (got[key].to_local(), wanted[key].to_local()) for key in ("rows", "all")}
        differ += [(number, key) for key, pair in pairs.items() if not torch.equal(*pair)]
    told = {"how": how, "failures": failures, "differ": differ}
    Path(f"{folder}/told-{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
