"""Trainers update inference ranks: `transfer`, and torch's gather-and-broadcast, on the same ranks.

    python -P benchmarks/transfer.py --mib 256 --rounds 5

Four ranks hold a model cut by rows (FSDP), two others want it cut by columns (tensor parallel), all
over gloo on this machine. The other way gathers each tensor whole on the trainers, broadcasts it to
all ranks, and cuts it there. Both move the same tensors, several times in turn; medians count. A
time is that of the slowest rank.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardplan

TRAINERS, SERVERS, TENSORS = 4, 2, 16


def holdings(rank, mib):
    """Return what a rank holds, and what it wants; None on the other side."""
    rows = max((mib << 20) // 4 // TENSORS // 1024, TRAINERS)
    trainers = DeviceMesh("cpu", list(range(TRAINERS)))
    servers = DeviceMesh("cpu", list(range(TRAINERS, TRAINERS + SERVERS)))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.rand(rows, 1024, generator=generator) for _ in range(TENSORS)]
    if rank < TRAINERS:
        return {n: cut(t, trainers, 0) for n, t in named(whole)}, None, whole
    return None, {n: cut(torch.zeros_like(t), servers, 1) for n, t in named(whole)}, whole


def named(tensors):
    return ((f"layers.{number}", tensor) for number, tensor in enumerate(tensors))


def cut(tensor, mesh, axis):
    return distribute_tensor(tensor, mesh, [Shard(axis)], src_data_rank=None)


def gather_and_broadcast(source, target, like):
    """Bring each tensor whole to every rank; those that want it keep their part."""
    for name, tensor in named(like):
        full = source[name].full_tensor() if source else torch.empty_like(tensor)
        dist.broadcast(full, 0)
        if target:
            mine = target[name].to_local()
            place = (dist.get_rank() - TRAINERS) * mine.shape[1]
            mine.copy_(full[:, place : place + mine.shape[1]])


def timed(work):
    dist.barrier()
    start = time.perf_counter()
    work()
    longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def wrong(target, like):
    """Return the names of tensors that did not arrive; and forget what did."""
    names = []
    for name, tensor in named(like) if target else ():
        mine = target[name].to_local()
        place = (dist.get_rank() - TRAINERS) * mine.shape[1]
        if not torch.equal(mine, tensor[:, place : place + mine.shape[1]]):
            names.append(name)
        mine.zero_()
    return names


def run_rank(rank, place, mib, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=TRAINERS + SERVERS)
    source, target, whole = holdings(rank, mib)
    seconds, reports = {"transfer": [], "gather and broadcast": []}, []
    ways = {
        "transfer": lambda: reports.append(shardplan.transfer(source, target)),
        "gather and broadcast": lambda: gather_and_broadcast(source, target, whole),
    }
    for number in range(rounds + 1):
        for name, work in ways.items():
            taken = timed(work)
            assert not wrong(target, whole), f"{name} brought something else"
            if number:
                seconds[name].append(taken)
    sent = torch.tensor(reports[-1].bytes_sent)
    dist.all_reduce(sent)
    if rank == 0:
        print(f"{mib} MiB, {TRAINERS} → {SERVERS} ranks, median of {rounds} rounds (least to most)")
        for name, times in seconds.items():
            print(
                f"{name:22} {statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
            )
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        print(f"{'ratio':22} {statistics.median(ratios):.2f}; sent once: {sent.item() >> 20} MiB")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.place, options.mib, options.rounds)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--place", place]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=env)
        for rank in range(TRAINERS + SERVERS)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
