"""Shared reads of replicas: messages, bytes and requests, and seconds, on real processes.

    python -P benchmarks/shared_reads.py --ranks 8 --shards 2 --tensors 100 5000 --kib 16

Ranks hold copies of shards, as HSDP does, and load a checkpoint that one rank saved, first each
alone and then with ``share_reads=True``: each byte should be read once, and each rank should send
others a few messages, however many tensors there are.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardplan
from shardplan.dist import solo, torch_comm


def whole(count, kib):
    return {f"t{n:05}": torch.full((kib << 8,), float(n)) for n in range(count)}


def blank(count, kib, mesh):
    rows = (kib << 8) // mesh.size(1)
    return {
        f"t{n:05}": DTensor.from_local(
            torch.zeros(rows), mesh, [Replicate(), Shard(0)], run_check=False
        )
        for n in range(count)
    }


def count_sends(comm):
    """Count what a comm sends from rank to rank, outside of meetings."""
    sent, kind = [], type(comm)
    send = kind.send

    def counted(self, place, data):
        sent.append(len(data))
        return send(self, place, data)

    kind.send = counted
    return sent


def measure(folder, count, kib, mesh, comm, sent):
    for share in (False, True):
        sd = blank(count, kib, mesh)
        dist.barrier()
        sent.clear()
        start = time.perf_counter()
        report = shardplan.load(sd, folder, share_reads=share, comm=comm)
        seconds = time.perf_counter() - start
        assert all((t.to_local() == float(name[1:])).all() for name, t in sd.items())
        row = torch.tensor([len(sent), sum(sent), report.bytes_read, report.requests])
        dist.all_reduce(row)
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if not dist.get_rank():
            messages, moved, read, requests = row.tolist()
            unique, how = count * kib << 10, "shared" if share else "alone"
            print(
                f"{count:6,} × {kib} KiB  {how:6}  {messages:8,} messages  "
                f"{moved / 2**20:8.1f} MiB sent  {read / unique:5.2f} × read  "
                f"{requests:7,} requests  {slowest.item():7.3f} s",
                flush=True,
            )


def run_rank(options):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.folder}/meet",
        rank=options.rank,
        world_size=options.ranks,
    )
    mesh = init_device_mesh("cpu", (options.ranks // options.shards, options.shards))
    comm = torch_comm(dist.group.WORLD)
    sent = count_sends(comm)
    for count in options.tensors:
        measure(options.folder / str(count), count, options.kib, mesh, comm, sent)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 5000])
    parser.add_argument("--kib", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        for count in options.tensors:
            shardplan.save(whole(count, options.kib), folder / str(count), comm=solo())
        given = [*sys.argv[1:], "--folder", str(folder), "--rank"]
        ranks = [
            subprocess.Popen([sys.executable, "-P", __file__, *given, str(rank)], env=os.environ)
            for rank in range(options.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
