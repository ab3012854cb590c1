"""How fast are other formats read and written? Ratios of torch's own time, both sides in one run.

    python -P benchmarks/formats.py --gib 2 --folder /tmp

Both sides move the same files, with a warm page cache, several times in turn; the median counts.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import shardplan
from shardplan.io.writers import open_target
from shardplan.planning import global_plan, local_plan

LARGE, SMALL = 32, 5_000
GOALS = {"load dcp, large tensors": 3.0}


def state_dict(count, nbytes):
    rows = max(nbytes // 4 // count // 1024, 1)
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{i}.weight": torch.randint(
            -(2**31), 2**31 - 1, (rows, 1024), dtype=torch.int32, generator=generator
        ).view(torch.float32)
        for i in range(count)
    }


def save(sd, path, format):
    store, writer = open_target(path, format)
    plans, metadata = global_plan((local_plan(sd),))
    part = writer.write(store, sd, plans[0], save_id="bench", rank=0)
    writer.commit(store, metadata, plans, [part.report], save_id="bench", overwrite=False)


def dcp_save(sd, path):
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def dcp_load(sd, path):
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def torch_save(sd, path):
    torch.save(sd, path)


def torch_load(sd, path):
    """Fill tensors that are there, as `shardplan.load` does."""
    for name, tensor in torch.load(path, weights_only=True, mmap=True).items():
        sd[name].copy_(tensor)


def timed(work, *args):
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def ratio(label, theirs, ours, rounds, before=lambda: None):
    """Run both in turn, and tell how many times as fast ours is."""
    times = {"torch": [], "ours": []}
    for _ in range(rounds):
        for name, work in (("torch", theirs), ("ours", ours)):
            before()
            times[name].append(timed(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    goal = f"   wanted {GOALS[label]}" if label in GOALS else ""
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())
    print(f"{label:28} {medians['torch'] / medians['ours']:6.2f}   ({told}){goal}", flush=True)


def measure(sd, folder, size, rounds):
    blank = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
    new = folder / "new"

    def clear():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()

    dcp_save(sd, folder / "dcp")
    load = (lambda: dcp_load(blank, folder / "dcp"), lambda: shardplan.load(blank, folder / "dcp"))
    ratio(f"load dcp, {size} tensors", *load, rounds)
    assert all(torch.equal(blank[n].view(torch.int32), sd[n].view(torch.int32)) for n in sd)
    write = (lambda: dcp_save(sd, new / "a"), lambda: save(sd, new / "b", "dcp"))
    ratio(f"save dcp, {size} tensors", *write, rounds, clear)
    file = folder / "x.pt"
    torch_save(sd, file)
    load = (lambda: torch_load(blank, file), lambda: shardplan.load(blank, file))
    ratio(f"load torch, {size} tensors", *load, rounds)
    write = (lambda: torch_save(sd, new / "a.pt"), lambda: save(sd, new / "b.pt", "torch"))
    ratio(f"save torch, {size} tensors", *write, rounds, clear)
    shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        measure(state_dict(LARGE, int(args.gib * 2**30)), Path(name) / "l", "large", args.rounds)
        measure(state_dict(SMALL, 0), Path(name) / "s", "small", args.rounds)


if __name__ == "__main__":
    main()
