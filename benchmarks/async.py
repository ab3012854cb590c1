"""What a save in the background costs training: the time it blocks, and how much it slows steps.

    python -P benchmarks/async.py --mib 512 --rounds 7 --folder /tmp

Training is a Python thread that calls small operations one after the other, as one does that keeps
an accelerator busy: it needs Python's lock and a processor. Each way of saving has its turn in each
round, so that a machine that is now faster and now slower is so for all of them. A step that a save
slows is compared with the steps just before it. Every way is used once before anything is measured:
its processes are there, and its memory is touched.

- *blocked*: milliseconds in the call, during which training stands still.
- *slowdown*: mean time of a step while the save is under way, per mean time of one before it.
- *save*: milliseconds until the checkpoint is there.
"""

import argparse
import logging
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardplan

TENSORS, CALLS, ALONE = 32, 200, 1000


def state_dict(mib):
    rows = max((mib << 20) // 4 // TENSORS // 1024, 1)
    return {f"layers.{i}.weight": torch.rand(rows, 1024) for i in range(TENSORS)}


def ours(**options):
    def begin(sd, path):
        return shardplan.async_save(sd, path, **options)

    return begin


def torchs(kind):
    def begin(sd, path):
        writer = dcp.FileSystemWriter(path, sync_files=True)
        return dcp.async_save(sd, storage_writer=writer, async_checkpointer_type=kind)

    return begin


WAYS = {
    "shardplan, thread": ours(),
    "shardplan, process": ours(process=True),
    "shardplan, process, overlap": ours(process=True, overlap=True),
    "torch DCP, thread": torchs(AsyncCheckpointerType.THREAD),
    "torch DCP, process": torchs(AsyncCheckpointerType.PROCESS),
}


class Training:
    """A loop of steps of equal work."""

    def __init__(self):
        self.a, self.b = torch.rand(64), torch.rand(64)

    def step(self):
        for _ in range(CALLS):
            torch.add(self.a, self.b, out=self.a)

    def step_until(self, ended):
        """Step until a condition holds, at least once; return the mean time of a step."""
        times = [self.timed_step()]
        while not ended(len(times)):
            times.append(self.timed_step())
        return statistics.fmean(times)

    def timed_step(self):
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


@attrs.frozen
class Cost:
    """What one save cost: seconds, and the slowdown of the steps during it."""

    blocked: float
    slowdown: float
    save: float


def measure(begin, sd, path, training):
    """Save once while training goes on."""
    alone = training.step_until(lambda steps: steps >= ALONE)
    start = time.perf_counter()
    future = begin(sd, path)
    blocked = time.perf_counter() - start
    during = training.step_until(lambda steps: future.done())
    save = time.perf_counter() - start
    future.result()
    shutil.rmtree(path)
    return Cost(blocked, during / alone, save)


def group_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)


def spread(numbers, scale, digits):
    low, middle, high = min(numbers), statistics.median(numbers), max(numbers)
    return f"{middle * scale:.{digits}f} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"


def show(costs):
    head = ("way", "blocked (ms)", "slowdown of steps", "save (ms)")
    rows = [head, ("-" * 27, *("-" * 22 for _ in head[1:]))]
    for way, found in costs.items():
        fields = [[getattr(cost, field.name) for cost in found] for field in attrs.fields(Cost)]
        scales = ((1000, 0), (1, 2), (1000, 0))
        texts = [spread(numbers, *how) for numbers, how in zip(fields, scales, strict=True)]
        rows.append((way, *texts))
    for row in rows:
        print("  ".join(f"{text:<{27 if n == 0 else 22}}" for n, text in enumerate(row)).rstrip())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    group_of_one()
    sd, training = state_dict(options.mib), Training()
    costs = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds + 1):
            for way, begin in WAYS.items():
                cost = measure(begin, sd, Path(folder) / f"{number}", training)
                if number:
                    costs[way].append(cost)
    print(
        f"{options.mib} MiB in {TENSORS} tensors, {options.rounds} rounds: median (least to most)"
    )
    show(costs)
    dist.destroy_process_group()


if __name__ == "__main__":  # torch's writer process imports this module again
    main()
