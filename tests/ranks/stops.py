"""Groups of three real ranks of which rank 0 is stopped, as a machine that hangs is.

Run as ``python stops.py FOLDER``. Torch is imported once; each rank of each group is a fork, and
all groups run at the same time. FOLDER receives a file ``<case>-<rank>`` per survivor, which says
whom it named, and how many seconds after the stop.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from shardplan.dist import LostRanksError, torch_comm

WORLD, TIMEOUT = 3, 3.0
# Where rank 0 is stopped, and where the store lives: in its process, or in a file.
CASES = [
    "making:tcp",  # before it makes the comm
    "absent:tcp",  # before it comes to a meeting
    "absent:file",
    "waiting:tcp",  # while it waits for rank 2
    "waiting:file",
    "working:tcp",  # when all have come
    "working:file",
    "moving:tcp",  # while bytes flow
]


def stop(path):
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(str(time.time()))
    os.rename(f"{path}.new", path)
    os.kill(os.getpid(), signal.SIGSTOP)


def call(where, rank, path):
    first = rank == 0
    if where == "making" and first:
        stop(path)
    comm = torch_comm(timeout=TIMEOUT)
    if where == "absent" and first:
        time.sleep(0.3)  # until the others have made theirs
        stop(path)
    if where == "waiting":
        if first:
            threading.Timer(0.5, stop, [path]).start()
        time.sleep(1 if rank == 2 else 0)
    if where == "moving" and first:
        type(comm._meetings)._fetch = lambda *args: stop(path)

    def work(parts):
        if where == "working":
            stop(path)
        return b"".join(parts)

    comm.reduce(bytes(100_000 if where == "moving" else 1), work)


def run(case, rank, port, folder):
    where, kind = case.split(":")
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0)
    else:
        store = dist.FileStore(f"{folder}/store-{case}", WORLD)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=wait)
    torch_comm(timeout=60).barrier()
    stopped = f"{folder}/stopped-{case}"
    try:
        call(where, rank, stopped)
        told = {"returned": True}
    except LostRanksError as error:
        told = {"named": list(error.reasons), "text": str(error)}
    with open(stopped, encoding="utf-8") as file:
        told["seconds"] = time.time() - float(file.read())
    with open(f"{folder}/{case}-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)


def main(folder):
    children = []
    for case in CASES:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                try:
                    run(case, rank, port, folder)
                finally:
                    os._exit(0)
            children.append((rank, child))
    for rank, child in children:
        if rank:
            os.waitpid(child, 0)
    for rank, child in children:
        if not rank:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
