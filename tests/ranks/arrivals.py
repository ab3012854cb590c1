"""One of four real ranks that load in the background while they go on with collectives.

Run as ``python arrivals.py PLACE FOLDER RANK``; FOLDER/checkpoint exists. It judges nothing:
FOLDER/told-RANK receives what happened on this rank.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardplan


def main(place, folder, rank):
    dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=4)
    mesh, told = init_device_mesh("cpu", (4,)), []
    for shared in (False, True):
        sd = {
            f"w{n}": distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)], src_data_rank=None)
            for n in range(4)
        } | {"all": torch.zeros(5), "step": 0}
        path = f"{folder}/checkpoint"
        future = shardplan.load(sd, path, background=True, share_reads=shared)
        total = torch.ones(1)
        dist.all_reduce(total)  # training's own
        arrived = [future[key].result(60) for key in future]
        tensors = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in arrived[:5]]
        report = future.result(60)
        sums = [float(tensor.sum()) for tensor in tensors]
        told.append([total.item(), sums, arrived[5], report.bytes_needed])
    Path(f"{folder}/told-{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
