"""Save and load speed on several ranks, as ratios of what torch DCP does on the same ranks.

    python -P benchmarks/ranks.py --gib 1 --ranks 4 --folder /tmp

Both sides move the same bytes over the same process group, with a warm page cache, several times in
turn; the medians count, of seconds and of each turn's ratio, as machines are now faster and now
slower. A time is that of the slowest rank. Files are synced on both sides.

Each kind of work gets processes of its own, and what is loaded was saved by others, as when a job
starts again: memory that a process has used before, and for what, makes torch's loads up to twice
as fast or as slow.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardplan

TENSORS, COLUMNS = 32, 1024
GOALS = {
    "save": 1.25,
    "load, same layout": 3.0,
    "load, rows to columns": 4.0,
    "load, replicated": 3.0,
}


def tensors(gib, mesh, placement, fill):
    """Return a state dict of DTensors of this many GiB over all ranks."""
    rows = max(int(gib * 2**30) // 4 // TENSORS // COLUMNS // 8 * 8, 8)
    ranks = 1 if isinstance(placement, Replicate) else mesh.size()
    shape = [rows, COLUMNS]
    if ranks > 1:
        shape[placement.dim] //= ranks
    seed = 0 if ranks == 1 else dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    sd = {}
    for number in range(TENSORS):
        local = torch.zeros(shape)
        if fill:
            ints = local.view(torch.int32)
            ints.random_(-(2**31), 2**31 - 1, generator=generator)
        sd[f"layers.{number}.weight"] = DTensor.from_local(
            local, mesh, [placement], run_check=False
        )
    return sd


def bits(tensor):
    return tensor.to_local().view(torch.int32)


def dcp_save(sd, path):
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(path, sync_files=True))


def dcp_load(sd, path):
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path))


def timed(work, *args):
    """Return the seconds until the last rank is done, by the clock that all processes share."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    span = torch.tensor([time.monotonic(), 0], dtype=torch.float64)
    work(*args)
    span[1] = time.monotonic()
    # A rank that waits in a collective of gloo takes time from those at work: let them end first.
    time.sleep(0.1 + 0.5 * (span[1] - span[0]).item())
    spans = [torch.zeros_like(span) for _ in range(dist.get_world_size())]
    dist.all_gather(spans, span)
    starts, ends = zip(*torch.stack(spans).tolist(), strict=True)
    return max(ends) - min(starts)


def in_turn(ways, rounds, before=lambda name: None):
    """Return the seconds of each way, turn by turn."""
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            before(name)
            times[name].append(timed(way))
    return times


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


PIECE = 1 << 18


def read_raw(path, tensors, check=False):
    """Fill tensors with as many bytes of a checkpoint's files, from the own rank's file on.

    To check is to hash each piece as it comes, as we do: nothing is faster that checks anything.
    """
    files = sorted(path.glob("*.safetensors"))
    files = files[dist.get_rank() % len(files) :] + files[: dist.get_rank() % len(files)]
    views = [memoryview(t.to_local().view(-1).numpy()).cast("B") for t in tensors.values()]
    left = iter(views)
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            for _ in range(os.path.getsize(file) // len(views[0])):
                view = next(left, None)
                if view is None:
                    return
                if not check:
                    opened.readinto(view)
                    continue
                state = xxhash.xxh3_64()
                for low in range(0, len(view), PIECE):
                    piece = view[low : low + PIECE]
                    opened.readinto(piece)
                    state.update(piece)


def tell(label, times, goal):
    usual = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        name: [theirs / mine for theirs, mine in zip(times["dcp"], values, strict=True)]
        for name, values in times.items()
    }
    ours = ratios["ours"]
    say(
        f"{label:24} torch DCP {usual['dcp']:6.3f} s   shardplan {usual['ours']:6.3f} s   "
        f"{statistics.median(ours):5.2f} × as fast ({min(ours):.1f} to {max(ours):.1f})   "
        f"wanted {goal}"
    )
    if "raw" in times:
        told = {
            name: f"{usual[name]:.3f} s, {statistics.median(ratios[name]):.2f} ×" for name in usual
        }
        say(f"  without checking anything, as torch loads: {told['unchecked']}")
        say(
            f"  a plain readinto of as many bytes by the same ranks: {told['raw']}; "
            f"with checksums: {told['checked']}"
        )


LOADS = {  # how it was saved, and how it is wanted
    "load, same layout": (Shard(0), Shard(0)),
    "load, rows to columns": (Shard(0), Shard(1)),
    "load, replicated": (Replicate(), Replicate()),
}


def measure_save(gib, folder, mesh, rounds):
    """Save by rows."""
    sd = tensors(gib, mesh, Shard(0), fill=True)

    def remove(name):
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()

    saves = {
        "dcp": lambda: dcp_save(sd, folder / "dcp"),
        "ours": lambda: shardplan.save(sd, folder / "ours"),
    }
    tell("save", in_turn(saves, rounds, remove), GOALS["save"])
    say(f"  {shardplan.save(sd, folder / 'ours', overwrite=True)!r}")


def save_for(label, gib, folder, mesh, rounds):
    """Save what `measure_load` loads."""
    sd = tensors(gib, mesh, LOADS[label][0], fill=True)
    dcp_save(sd, folder / "dcp")
    shardplan.save(sd, folder / "ours")


def measure_load(label, gib, folder, mesh, rounds):
    """Load what was saved in one layout into tensors of another."""
    target, load = tensors(gib, mesh, LOADS[label][1], fill=False), shardplan.load
    ways = {
        "raw": lambda: read_raw(folder / "ours", target),
        "checked": lambda: read_raw(folder / "ours", target, check=True),
        "dcp": lambda: dcp_load(target, folder / "dcp"),
        "ours": lambda: load(target, folder / "ours"),
        "unchecked": lambda: load(target, folder / "ours", verify=False),
    }
    tell(label, in_turn(ways, rounds), GOALS[label])
    seen = []
    for way in ("dcp", "ours"):
        for tensor in target.values():
            tensor.to_local().zero_()
        ways[way]()
        seen.append([xxhash.xxh3_64_digest(bits(tensor).numpy()) for tensor in target.values()])
    assert seen[0] == seen[1], "both should load the same"
    say(f"  {load(target, folder / 'ours')!r}")


def measure_planning(gib, folder, mesh, rounds):
    """Save a thousand small tensors again and again: planning is only looking up."""
    sd = {
        f"layers.{i}.weight": DTensor.from_local(torch.zeros(2, 8), mesh, [Shard(0)])
        for i in range(1000)
    }
    plans = []
    for turn in range(rounds + 1):
        dist.barrier()
        report = shardplan.save(sd, folder / "many", overwrite=True)
        plans.append(1000 * report.seconds["plan"])
        how = "derived" if turn == 0 else "cached"
        assert report.how == how, f"the plan was {report.how}, not {how}"
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, plans)
    slowest = [max(rank[turn] for rank in told) for turn in range(rounds + 1)]
    usual = [statistics.median(rank[turn] for rank in told) for turn in range(rounds + 1)]
    again = statistics.median(usual[1:]), statistics.median(slowest[1:])
    say(
        f"planning, 1,000 tensors  first {slowest[0]:.1f} ms; again {again[0]:.1f} ms on the median"
        f" rank, {again[1]:.1f} ms on the slowest   wanted below 5"
    )


def measure_async(gib, folder, mesh, rounds):
    """Time what training waits for, against a plain copy of the same tensors."""
    sd = tensors(gib, mesh, Shard(0), fill=True)
    copy = {name: tensor.to_local().clone() for name, tensor in sd.items()}

    def copied():
        for name, tensor in sd.items():
            copy[name].copy_(tensor.to_local())

    def cloned():
        return {name: tensor.to_local().clone() for name, tensor in sd.items()}

    futures, async_save = [], shardplan.async_save  # imported here, as torch's is

    def saved():
        futures.append(async_save(sd, folder / "async", overwrite=True))

    first = {"clone": timed(cloned), "save": timed(saved)}
    futures[-1].result()
    times = {"copy": [], "save": []}
    for _ in range(rounds):
        times["copy"].append(timed(copied))
        times["save"].append(timed(saved))
        futures[-1].result()
        dist.barrier()
    for label, other, mine in (
        ("first", first["clone"], first["save"]),
        ("again", statistics.median(times["copy"]), statistics.median(times["save"])),
    ):
        say(
            f"async_save, {label:12} copy {other:6.3f} s   blocks {mine:6.3f} s   "
            f"{mine / other:5.2f} × as long   wanted at most 1.3"
        )


PARTS = {  # what processes of their own do, one after the other
    "save": [measure_save],
    **{label: [partial(save_for, label), partial(measure_load, label)] for label in LOADS},
    "planning": [measure_planning],
    "async_save": [measure_async],
}


def rank_main(args):
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    PARTS[args.part][args.step](args.gib, args.folder, mesh, args.rounds)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--part", choices=PARTS, help="measure just this")
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)  # given to the ranks
    args = parser.parse_args()
    if args.step is not None:
        rank_main(args)
        return
    for part in [args.part] if args.part else PARTS:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for step in range(len(PARTS[part])):
                command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
                command += ["--nproc-per-node", str(args.ranks), __file__, "--folder", folder]
                command += ["--gib", str(args.gib), "--rounds", str(args.rounds)]
                command += ["--part", part, "--step", str(step)]
                environment = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
