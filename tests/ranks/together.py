"""What ranks do together, case by case: run by threads, by one rank alone, and by processes.

Run as ``python together.py RANK WORLD PORT OUT`` it is one rank of a real process group. It judges
nothing: OUT receives, per case, what the case told on this rank.
"""

import hashlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from datetime import timedelta

from shardplan.dist import (
    CheckpointError,
    LostRanksError,
    all_gather,
    all_keys,
    all_reduce,
    broadcast,
    reduce_scatter,
    torch_comm,
)

STEPS = ("reduce_scatter", "all_reduce", "all_gather", "broadcast")
FAULTS = (
    "none",
    "map_on_the_last",
    "map_on_all_but_the_first",
    "map_on_the_coordinator",
    "reduce",
    "unsendable_on_the_last",
    "unsendable_result",
)
SIZES = (0, 1, 4095, 4096, 4097, 1 << 20, (64 << 20) + 1)
COLLECTIVES = ("gather", "scatter", "broadcast", "all_gather", "reduce", "barrier")


def outcome(function):
    """Return what a function returns, or the failures that it raises."""
    try:
        return {"value": function()}
    except CheckpointError as error:
        rows = [[f.rank, f.step, f.type, f.text, f.traceback] for f in error.failures]
        return {"failures": rows, "text": str(error)}
    except LostRanksError as error:
        return {"lost": {str(rank): why for rank, why in error.reasons.items()}}


def take(comm, step, fault):
    """Take one step with one fault, and then one without on the same comm."""
    last, here = comm.world_size - 1, comm.rank

    def fail_if(guilty, what):
        if guilty:
            raise ValueError(f"{what} failed on {here}")

    def map():
        fail_if(fault == "map_on_the_last" and here == last, "map")
        fail_if(fault == "map_on_all_but_the_first" and here > 0, "map")
        fail_if(fault == "map_on_the_coordinator" and here == comm.coordinator, "map")
        return object() if fault == "unsendable_on_the_last" and here == last else here + 1

    def reduce(values):
        fail_if(fault == "reduce", "reduce")
        if fault == "unsendable_result":
            values = [object() for _ in values]
            return values if step == "reduce_scatter" else values[0]
        return [10 * v for v in values] if step == "reduce_scatter" else sum(values)

    taken = {
        "reduce_scatter": lambda: reduce_scatter(comm, "a step", map, reduce),
        "all_reduce": lambda: all_reduce(comm, "a step", map, reduce),
        "all_gather": lambda: all_gather(comm, "a step", map),
        "broadcast": lambda: broadcast(comm, "a step", map),
    }
    told = outcome(taken[step])
    return told | {"after": all_reduce(comm, "after", lambda: 1, sum)}


def pattern(rank, size):
    return bytes([rank + 1]) * size


def digest(data):
    return hashlib.blake2b(data).hexdigest()


def exchange(comm, size):
    """Exchange uneven payloads in every way: of all ranks the last has ``size`` bytes."""
    n, mine = comm.world_size, comm.rank == comm.coordinator
    sizes = [size if rank == n - 1 else rank for rank in range(n)]
    parts = [pattern(rank, s) for rank, s in enumerate(sizes)]
    gathered = comm.gather(parts[comm.rank])
    scattered = comm.scatter(parts if mine else None)
    whole = comm.broadcast(parts[-1] if mine else None)
    everything = comm.all_gather(parts[comm.rank])
    reduced = comm.reduce(parts[comm.rank], b"".join)
    comm.barrier()
    return {
        "gathered": gathered == parts if mine else gathered is None,
        "scattered": scattered == parts[comm.rank],
        "broadcast": digest(whole) == digest(parts[-1]),
        "all_gathered": everything == parts,
        "reduced": digest(reduced) == digest(b"".join(parts)),
    }


def keys(comm):
    return all_keys(comm, {"model": {f"layer.{comm.rank}": 0, "shared": 1}, "step": 7})


CASES = {
    **{f"{s}:{f}": lambda comm, s=s, f=f: take(comm, s, f) for s in STEPS for f in FAULTS},
    **{f"exchange:{size}": lambda comm, size=size: exchange(comm, size) for size in SIZES},
    "keys": keys,
}


def collective(comm, name):
    """Call one collective with small payloads."""
    mine = comm.rank == comm.coordinator
    calls = {
        "gather": lambda: comm.gather(b"x"),
        "scatter": lambda: comm.scatter([b"x"] * comm.world_size if mine else None),
        "broadcast": lambda: comm.broadcast(b"x" if mine else None),
        "all_gather": lambda: comm.all_gather(b"x"),
        "reduce": lambda: comm.reduce(b"x", b"".join),
        "barrier": comm.barrier,
    }
    return calls[name]()


def timed(function):
    start = time.monotonic()
    told = outcome(function)
    return told | {"seconds": time.monotonic() - start}


# Only processes


def stall(comm, name, victim, seconds):
    """One rank comes late to a collective; ``seconds`` says whether too late."""
    if comm.rank == victim:
        time.sleep(seconds)
    return timed(lambda: bool(collective(comm, name))) | {"again": outcome(comm.barrier)}


def stalls():
    """Let a rank stall in each collective, all at the same time, each with a comm of its own."""
    cases = [(name, victim, 2.5, 1.0) for name in COLLECTIVES for victim in (0, 2)]
    cases += [("all_gather", 2, 1.0, 20.0)]
    comms = [torch_comm(timeout=timeout) for *_, timeout in cases]
    told = {}

    def run(comm, name, victim, seconds, timeout):
        kind = "stall" if seconds > timeout else "late"
        told[f"{kind}:{name}:{victim}"] = stall(comm, name, victim, seconds)

    torch_comm(timeout=60).barrier()
    at_once([lambda c=c, case=case: run(c, *case) for c, case in zip(comms, cases, strict=True)])
    torch_comm(timeout=60).barrier()
    return told


def at_once(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def astray():
    """The last rank comes for something else."""
    comm = torch_comm(timeout=10)
    return outcome(lambda: collective(comm, "barrier" if comm.rank == 3 else "gather"))


def interrupted(where):
    """Rank 2 is interrupted in the map, or the coordinator in the reduce."""
    comm = torch_comm(timeout=20)

    def map():
        if where == "map" and comm.rank == 2:
            raise KeyboardInterrupt
        return 1

    def reduce(values):
        raise SystemExit(3)

    try:
        return timed(lambda: all_reduce(comm, "a step", map, reduce))
    except (KeyboardInterrupt, SystemExit) as error:
        return {"propagated": type(error).__name__}


def interrupt_soon():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupted_waiting(victim):
    """A rank is interrupted while all wait for the last one, which is late but well."""
    comm = torch_comm(timeout=20)
    comm.barrier()
    if comm.rank == victim:
        interrupt_soon()
    if comm.rank == 3:
        time.sleep(1)
    try:
        return timed(comm.barrier)
    except KeyboardInterrupt as error:
        return {"propagated": type(error).__name__}


def interrupted_transfer():
    """Rank 2 is interrupted while it waits for bytes; rank 1 waits for bytes of rank 2."""
    comm = torch_comm(timeout=20)
    comm.barrier()
    if comm.rank == 2:
        interrupt_soon()

    def map():
        if comm.rank in (1, 2):
            comm.receive(comm.rank + 1, memoryview(bytearray(8))).wait()

    try:
        return timed(lambda: all_reduce(comm, "a step", map, len))
    except KeyboardInterrupt as error:
        return {"propagated": type(error).__name__}


def chains():
    """Rank 0 waits for bytes of rank 1, which waits for rank 2, which stalls; 3 has no part."""
    told = {}

    def run(comm, name, seconds):
        def map():
            if comm.rank == 2:
                time.sleep(seconds)
            elif comm.rank < 2:
                comm.receive(comm.rank + 1, memoryview(bytearray(8))).wait()

        told[name] = timed(lambda: all_reduce(comm, "a step", map, len))

    cases = [("chain:absent", 6.0, 2.0), ("chain:late", 3.0, 4.0)]
    comms = [torch_comm(timeout=timeout) for *_, timeout in cases]
    torch_comm(timeout=60).barrier()
    at_once([lambda c=c, n=n, s=s: run(c, n, s) for c, (n, s, _) in zip(comms, cases, strict=True)])
    torch_comm(timeout=60).barrier()
    return told


def invalid():
    """The coordinator gives too few parts; the others hear why nothing comes."""
    comm = torch_comm(timeout=20)
    try:
        return timed(lambda: comm.scatter([b"x"] if comm.rank == 0 else None))
    except ValueError as error:
        return {"propagated": str(error)}


def patience():
    """The coordinator waits for a late rank and then works for a while; nobody is lost."""
    limit = 3.0
    comm = torch_comm(timeout=limit)

    def work(parts):
        time.sleep(0.8 * limit)
        return b"".join(parts)

    time.sleep({0: 0.9, 1: 1.7}.get(comm.rank, 0.0) * limit)
    return outcome(lambda: comm.reduce(b"x", work).decode())


def groups(rank):
    """Use overlapping groups at once, each from a thread of its own, and the world's twice."""
    import torch.distributed as dist

    members = {"low": [0, 1], "high": [2, 3], "odd": [1, 3], "backwards": [3, 2, 0]}
    made = {name: dist.new_group(ranks) for name, ranks in members.items()}
    comms = {n: torch_comm(made[n], timeout=20) for n, ranks in members.items() if rank in ranks}
    comms |= {"world": torch_comm(timeout=20), "again": torch_comm(timeout=20, coordinator=2)}
    told = {}

    def use(name):
        for size in (10, 10_000):
            told[name] = exchange(comms[name], size)
        told[name]["ranks"] = list(comms[name].ranks)

    at_once([lambda name=name: use(name) for name in comms])
    if "odd" in comms:

        def fail():
            raise ValueError("no")

        odd = comms["odd"]
        told["odd_failure"] = outcome(
            lambda: all_gather(odd, "a step", fail if odd.rank == 1 else lambda: 1)
        )
    return told


def twin():
    """A group whose backend moves nothing."""
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    other = dist.new_group([1, 2, 3], backend="fake")
    if dist.get_rank() == 0:
        return {}
    comms = [torch_comm(other, timeout=20) for _ in range(2)]
    values = [exchange(comm, 10_000) | {"around": around(comm, 10_000)} for comm in comms]
    return {"values": values}


def pieces():
    """Messages that go in many pieces through the store, or directly."""
    from shardplan.dist import rendezvous

    whole, rendezvous.PIECE = rendezvous.PIECE, 1000
    try:
        comm = torch_comm(timeout=20)
        return exchange(comm, 100_001) | {"around": around(comm, (9 << 20) + 1)}
    finally:
        rendezvous.PIECE = whole


def around(comm, size):
    """Send the next rank some bytes, and return whether those of the one before came."""
    n, came = comm.world_size, bytearray(size)
    sent = comm.send((comm.rank + 1) % n, memoryview(pattern(comm.rank, size)))
    comm.receive((comm.rank - 1) % n, memoryview(came)).wait()
    sent.wait()
    return came == pattern((comm.rank - 1) % n, size)


def leftovers():
    """What a hundred meetings leave in the store."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    comm = torch_comm(timeout=20)
    counts = []
    for _ in range(2):
        for _ in range(50):
            comm.barrier()
        time.sleep(0.2)
        counts.append(store.num_keys())
        comm.barrier()
    return counts


def forbid(*args, **kwargs):
    raise AssertionError("no rank may call this")


def main(rank, world, port, out):
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", int(port), world, rank == 0),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    told = {"groups": groups(rank), "twin": twin()}
    pickle.loads = pickle.load = pickle.Unpickler = forbid
    dist.distributed_c10d._unpickler = forbid
    torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.current_device = forbid
    comm = torch_comm(timeout=60)
    told |= {name: case(comm) for name, case in CASES.items()}
    told |= stalls()
    told["astray"] = astray()
    told |= {f"interrupted:{where}": interrupted(where) for where in ("map", "reduce")}
    told |= {f"interrupted:waiting:{r}": interrupted_waiting(r) for r in (0, 2)}
    told["interrupted:transfer"] = interrupted_transfer()
    told |= chains()
    told["invalid"] = invalid()
    told["patience"] = patience()
    told["pieces"] = pieces()
    told["leftovers"] = leftovers()
    with open(out, "w", encoding="utf-8") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
