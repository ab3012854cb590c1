"""What saves of a job without gloo cost its ranks: connections, requests to the store, seconds.

Run as ``python counts.py WORLD FOLDER``. Torch is imported once; each rank is a fork. Besides the
store, ranks have no connections of their own: the backend of their group is a fake. FOLDER receives
a file ``counts-<rank>`` per rank: for each kind of save, its connections after it, what it asked of
the store and how many bytes that took, its meetings, and its seconds.
"""

import json
import os
import socket
import sys
import time
from collections import Counter
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import shardplan
from shardplan import _async, _comm
from shardplan.dist import torch_comm

SAVES = ("gathered", "cached", "async", "derived")
LAYERS = 50


class Asked:
    """A store that counts requests, and the bytes of what is asked and answered."""

    def __init__(self, store):
        self.store, self.requests, self.nbytes = store, Counter(), 0

    def clone(self):
        return self.store.clone()

    def __getattr__(self, name):
        def ask(*arguments):
            answer = getattr(self.store, name)(*arguments)
            self.requests[name] += 1
            for part in (*arguments, answer):
                for text in part if isinstance(part, list) else [part]:
                    self.nbytes += len(text) if isinstance(text, (str, bytes)) else 8
            return answer

        return ask


class Rows:
    """Some rows of a tensor."""

    def __init__(self, rank, world):
        self.shape, self.dtype = (4 * world, 8), torch.float32
        self.own, self.start = torch.full((4, 8), float(rank)), 4 * rank

    def __create_chunk_list__(self):
        return [shardplan.planning.Chunk((self.start, 0), (4, 8))]

    def __get_tensor_shard__(self, index):
        return self.own


def connections():
    """Return how many TCP connections this process has."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = 0
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
            rows = [line.split() for line in lines][1:]
        found += sum(row[3] == "01" and f"socket:[{row[9]}]" in own for row in rows)
    return found


def counted(comm):
    """Have what a comm asks of the store be counted."""
    meetings = comm._meetings
    if not isinstance(meetings.store, Asked):
        meetings.store = Asked(meetings.store)
    return meetings.store


def measure(job, barrier, save):
    asked, meetings = counted(job.take()), job.held._meetings
    barrier()
    requests, nbytes, number = asked.requests.copy(), asked.nbytes, meetings.number
    start = time.perf_counter()
    save()
    seconds = time.perf_counter() - start
    time.sleep(0.2)  # what is posted may be on its way
    told = {
        "seconds": seconds,
        "meetings": meetings.number - number,
        "requests": dict(asked.requests - requests),
        "bytes": asked.nbytes - nbytes,
    }
    barrier()
    return told | {"connections": connections()}


def run(rank, world, port, folder):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=60))
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    shardplan.set_store = None
    comm = torch_comm(timeout=60)
    told = {"before": {"connections": connections()}}
    rows = {f"layers.{n}": Rows(rank, world) for n in range(LAYERS)} | {"step": 7}
    mesh = init_device_mesh("cpu", (world,))
    local = torch.ones(4, 8)
    shards = {
        f"layers.{n}": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        for n in range(LAYERS)
    } | {"step": 7}
    calls = {
        "gathered": (_comm._job, lambda path: shardplan.save(rows, path)),
        "cached": (_comm._job, lambda path: shardplan.save(rows, path)),
        "async": (_async._job, lambda path: shardplan.async_save(rows, path).result()),
        "derived": (_comm._job, lambda path: shardplan.save(shards, path)),
    }
    for name in SAVES:
        job, save = calls[name]
        told[name] = measure(job, comm.barrier, partial(save, f"{folder}/{name}"))
    with open(f"{folder}/counts-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    comm.barrier()
    time.sleep(0.3)  # the store lives with rank 0


def main(world, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                run(rank, world, port, folder)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
