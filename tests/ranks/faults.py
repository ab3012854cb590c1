"""Groups of three real ranks of which one fails in the middle of a save, a load or a transfer.

Run as ``python faults.py FOLDER [CASE ...]``. Torch is imported once; each rank of each group is a
fork, and all groups run at the same time, each with a checkpoint of its own below FOLDER, saved
before by all of its ranks. ``FOLDER/CASE/told-RANK`` says what each rank that lives was told, and
when.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardplan
from shardplan import _read
from shardplan import _save as saving  # noqa: F401  # imported once, before the forks
from shardplan.dist import CheckpointError, Comm, torch_comm
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore

WORLD, TIMEOUT, STALL = 3, 5.0, 12.0
SAVES = ("state_dict", "plan", "write", "commit")
LOADS = ("open", "read", "send", "receive")
BACKGROUND = ("background write", "background commit")
TRANSFERS = ("transfer", "transfer send", "transfer receive")
# The coordinator is rank 0, and so is the store's host where the store is TCP's.
CASES = [
    f"{phase}:{victim}:{how}:file"
    for how in ("exit", "stall")
    for phase in (*SAVES, *LOADS)
    for victim in (0, 2)
    if (phase, victim) != ("commit", 2)
]
CASES += ["write:0:exit:tcp", "write:2:exit:tcp", "read:2:stall:tcp"]
# Ranks 1 and 2 share some tensors, and ranks 0 and 1 others, which are moved in later rounds.
CASES += ["rounds:2:stall:tcp", "rounds:0:stall:tcp"]
WANTED = {0: (3, 4, 5), 1: range(6), 2: (0, 1, 2)}


def old(rank):
    """Every rank holds a row of its own, and all hold the same three megabytes, to be shared."""
    alike = {f"all{i}": torch.arange(1 << 17) + i + 0.5 for i in range(2 * WORLD)}
    return {f"row{rank}": torch.full((4,), float(rank))} | alike


def new(rank):
    return {name: -value for name, value in old(rank).items()}


class Fault:
    """What becomes of the victim when it comes to a phase."""

    def __init__(self, phase, how, active):
        self.phase, self.how, self.active = phase, how, active

    def at(self, phase):
        if self.active and phase == self.phase.removeprefix("background ").removeprefix(
            "transfer "
        ):
            self.active = False
            strike(self.how)


def strike(how):
    """Let this process fail."""
    if how == "exit":
        os._exit(0)
    if how == "raise":
        raise OSError("a fault, as the test wants it")
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    time.sleep({"slow": 1.0, "stall": STALL}.get(how, 0))


def prepare(how, folder):
    """Give this process a full disk, a folder that is read-only, or a wrong clock."""
    if how == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    if how == "read-only":
        if ctypes.CDLL(None).unshare(0x20000):  # mounts of its own
            raise PermissionError("this process may not mount")
        for command in ("--make-rprivate /", f"--bind {folder} {folder}"):
            subprocess.run(["mount", *command.split()], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    if how in ("fast clock", "late clock"):
        real, hours = time.time, 26 if how == "fast clock" else -26
        time.time = lambda: real() + hours * 3600


class Store(CountingStore):
    def __init__(self, inner, fault):
        super().__init__(inner)
        self.fault = fault

    def write(self, *args, **options):
        self.fault.at("write")
        return super().write(*args, **options)

    def replace(self, *args, **options):
        self.fault.at("commit")
        return super().replace(*args, **options)

    def read_all(self, *args, **options):
        self.fault.at("open")
        return super().read_all(*args, **options)

    def read(self, *args):
        self.fault.at("read")
        return super().read(*args)


class State:
    def __init__(self, state, fault):
        self.state, self.fault = state, fault

    def state_dict(self):
        self.fault.at("state_dict")
        return self.state

    def load_state_dict(self, state):
        pass


class FaultyComm(Comm):
    """The comm of a group, on which sending and receiving may strike."""

    rank = ranks = coordinator = lost = None

    def __init__(self, inner, fault):
        self.inner, self.fault, self.lost = inner, fault, False
        self.rank, self.ranks, self.coordinator = inner.rank, inner.ranks, inner.coordinator

    def send(self, place, data):
        self.fault.at("send")
        return self.inner.send(place, data)

    def receive(self, place, into):
        self.fault.at("receive")
        return self.inner.receive(place, into)

    def meet(self, data, topic):
        return self.inner.meet(data, topic)

    def answer(self, parts, topic):
        return self.inner.answer(parts, topic)

    def leave(self, reason):
        self.inner.leave(reason)


def take(case, rank, comm, path):
    phase, victim, how, _ = case.split(":")
    fault = Fault("read" if phase == "rounds" else phase, how, rank == int(victim))
    store, comm = Store(open_store(path), fault), FaultyComm(comm, fault)

    def planner(plans):
        fault.at("plan")
        return plans

    if rank == int(victim):
        prepare(how, path)
    if phase in BACKGROUND:
        shardplan.async_save({"part": new(rank)}, store, comm=comm, overwrite=True).result()
    elif phase in TRANSFERS:
        fault.at("transfer")
        into = {name: torch.zeros_like(value) for name, value in old((rank + 1) % WORLD).items()}
        shardplan.transfer(old(rank), into, comm=comm)
    elif phase in SAVES:
        state = {"part": State(new(rank), fault)}
        shardplan.save(state, store, comm=comm, overwrite=True, planner=planner)
    else:
        wanted = old(rank)
        if phase == "rounds":
            _read.ROUND_BYTES = 1 << 19
            wanted = {f"all{i}": wanted[f"all{i}"] for i in WANTED[rank]}
        state = {"part": {name: torch.zeros_like(value) for name, value in wanted.items()}}
        shardplan.load(state, store, comm=comm, share_reads=True)


def run(case, rank, folder):
    store = dist.FileStore(f"{folder}/{case}/store", WORLD)
    if case.endswith("tcp"):
        port = f"{folder}/{case}/port"
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, WORLD, True, wait_for_workers=False)
            with open(f"{port}.new", "w", encoding="utf-8") as file:
                file.write(str(store.port))
            os.rename(f"{port}.new", port)
        else:
            while not os.path.exists(port):
                time.sleep(0.05)
            with open(port, encoding="utf-8") as file:
                store = dist.TCPStore("127.0.0.1", int(file.read()), WORLD, False)
    wait = timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=wait)
    path = f"{folder}/{case}/checkpoint"
    shardplan.save({"part": old(rank)}, path, comm=torch_comm(timeout=100))
    comm = torch_comm(timeout=TIMEOUT)
    torch_comm(timeout=100).barrier()
    time.sleep(1)  # all have left the barrier before the store may die
    start = time.monotonic()
    try:
        take(case, rank, comm, path)
        told = {"returned": True}
    except CheckpointError as error:
        told = {"named": list(error.ranks), "text": str(error)}
    except BaseException as error:
        told = {"raised": repr(error)}
    told["seconds"] = time.monotonic() - start
    with open(f"{folder}/{case}/told-{rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)
    time.sleep(STALL if "stall" in case else 1)  # the store may live here, and others still ask


def main(folder, cases=CASES):
    children = []
    for case in cases:
        os.mkdir(f"{folder}/{case}")
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                try:
                    run(case, rank, folder)
                finally:
                    os._exit(0)
            children.append(child)
    statuses = {child: os.waitpid(child, os.WUNTRACED)[1] for child in children}
    stopped = [child for child, status in statuses.items() if os.WIFSTOPPED(status)]
    for child in stopped:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or CASES)
