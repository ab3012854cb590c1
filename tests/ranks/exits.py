"""Groups of four real ranks of which one exits without a word: what the others then tell.

Run as ``python exits.py FOLDER``. Torch is imported once; each rank of each group is a fork, and
all groups run at the same time. FOLDER receives a file ``<case>-<rank>`` per survivor.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from shardplan.dist import CheckpointError, LostRanksError, all_reduce, torch_comm

WORLD, TIMEOUT = 4, 3.0
CALLS = {
    "gather": lambda c: c.gather(b"x"),
    "scatter": lambda c: c.scatter([b"x"] * WORLD if c.rank == 0 else None),
    "broadcast": lambda c: c.broadcast(b"x" if c.rank == 0 else None),
    "all_gather": lambda c: c.all_gather(b"x"),
    "reduce": lambda c: c.reduce(b"x", b"".join),
    "barrier": lambda c: c.barrier(),
    "step": lambda c: all_reduce(c, "a step", lambda: 1, sum),
}
# Where the store lives: in the process of rank 0, or in a file.
CASES = [
    *(f"{call}:{victim}:{store}" for call in CALLS for victim, store in ((2, "tcp"), (0, "file"))),
    "step:0:tcp",
    "transfer:2:tcp",
    "transfer:0:file",
    "closed:2:tcp",
    "closed:0:file",
]


def call(comm, name, victim):
    """Do as the case says; in a transfer the victim dies when all have met and bytes flow.

    If connections are closed, they were used before, and the others have noticed before they send.
    """
    if name not in ("transfer", "closed"):
        if comm.rank == victim:
            os._exit(0)
        return CALLS[name](comm)
    if name == "closed":
        send_all(comm, 10)
    comm.barrier()
    if comm.rank == victim:
        os._exit(0)
    if name == "closed":
        time.sleep(1)
    send_all(comm, 100_000)
    return comm.barrier()


def send_all(comm, size):
    """Send the coordinator some bytes of each rank."""
    others = [r for r in range(WORLD) if r != comm.coordinator]
    if comm.rank == comm.coordinator:
        moved = [comm.receive(r, memoryview(bytearray(size))) for r in others]
    else:
        moved = [comm.send(comm.coordinator, memoryview(bytes(size)))]
    for one in moved:
        one.wait()


def run(case, rank, port, folder):
    name, victim, kind = case.split(":")
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0)
    else:
        store = dist.FileStore(f"{folder}/store-{case}", WORLD)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=wait)
    torch_comm(timeout=60).barrier()
    comm = torch_comm(timeout=TIMEOUT)
    time.sleep(0.5)  # All have left the barrier before the store may die.
    start = time.monotonic()
    try:
        call(comm, name, int(victim))
        told = {"returned": True}
    except LostRanksError as error:
        told = {"named": list(error.reasons), "text": str(error)}
    except CheckpointError as error:
        told = {"named": list(error.ranks), "text": str(error)}
    told["seconds"] = time.monotonic() - start
    with open(f"{folder}/{case}-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    time.sleep(1)  # The store may live here, and the others still be asking.


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
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
