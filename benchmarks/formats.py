"""How fast are other formats read, written and converted? Ratios of torch's own time in one run.

    python -P benchmarks/formats.py --gib 1 --folder /tmp

Both sides move the same bytes, with a warm page cache, several times in turn; the median counts.
Conversions sync their files on our side; torch's own ones do not.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardplan
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import Mesh

LARGE, SMALL, COLUMNS = 32, 5_000, 1024
GOALS = {
    "load dcp, large tensors": 3.0,
    "dcp to one torch.save file": 2.0,
    "dcp to one hf file": 2.0,
    "dcp to four hf files": 2.0,
}
MEMORY = 256 << 20


def state_dict(count, nbytes):
    rows = max(nbytes // 4 // count // COLUMNS, 1)
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{i}.weight": torch.randint(
            -(2**31), 2**31 - 1, (rows, COLUMNS), dtype=torch.int32, generator=generator
        ).view(torch.float32)
        for i in range(count)
    }


def dcp_save(sd, path):
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


def dcp_load(sd, path):
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def torch_load(sd, path):
    """Fill tensors that are there, as `shardplan.load` does."""
    for name, tensor in torch.load(path, weights_only=True, mmap=True).items():
        sd[name].copy_(tensor)


def consolidate(folder, target, names, files):
    """Have torch make Hugging Face files of sharded safetensors files, a thread for each."""
    index = {name: 1 + i * files // len(names) for i, name in enumerate(names)}
    consolidate_safetensors_files(str(folder), str(target), index, num_threads=files)


def timed(work):
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(label, theirs, ours, rounds, before=lambda: None):
    """Run both in turn, and print how many times as fast ours is."""
    times = {"torch": [], "ours": []}
    for _ in range(rounds):
        for name, work in (("torch", theirs), ("ours", ours)):
            before()
            times[name].append(timed(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    goal = f"   wanted {GOALS[label]}" if label in GOALS else ""
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items())
    print(f"{label:28} {medians['torch'] / medians['ours']:6.2f}   ({told}){goal}", flush=True)


def measure_exchange(sd, folder, size, rounds):
    """Read and write torch's formats."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
    new, file = folder / "new", folder / "x.pt"

    def clear():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()

    dcp_save(sd, folder / "dcp")
    load = (lambda: dcp_load(blank, folder / "dcp"), lambda: shardplan.load(blank, folder / "dcp"))
    ratio(f"load dcp, {size} tensors", *load, rounds)
    assert all(torch.equal(blank[n].view(torch.int32), sd[n].view(torch.int32)) for n in sd)
    write = (lambda: dcp_save(sd, new / "a"), lambda: shardplan.save(sd, new / "b", format="dcp"))
    ratio(f"save dcp, {size} tensors", *write, rounds, clear)
    torch.save(sd, file)
    load = (lambda: torch_load(blank, file), lambda: shardplan.load(blank, file))
    ratio(f"load torch, {size} tensors", *load, rounds)
    write = (
        lambda: torch.save(sd, new / "a.pt"),
        lambda: shardplan.save(sd, new / "b.pt", format="torch"),
    )
    ratio(f"save torch, {size} tensors", *write, rounds, clear)
    shutil.rmtree(folder)


def measure_reshard(folder):
    """Read a quarter of the columns of tensors that four ranks saved by rows, and count bytes."""
    store = CountingStore(open_store(folder))
    saved = shardplan.open_checkpoint(store)
    store.clear()
    needed = 0
    for name in saved:
        part = saved[name][:, COLUMNS // 4 : COLUMNS // 2]
        needed += part.numel() * part.element_size()
    print(f"dcp, rows as columns: {store.bytes_read() / needed:.4f} bytes read per byte needed")


def measure_conversions(sd, folder, rounds):
    """Convert what four ranks saved by rows, as torch's tools do."""
    nbytes, names, out = sum(t.nbytes for t in sd.values()), list(sd), folder / "out"
    dcp_save(sd, folder / "whole")
    shardplan.convert(folder / "whole", folder / "dcp", format="dcp", mesh=Mesh(dp=4))
    shardplan.convert(folder / "whole", folder / "native", mesh=Mesh(dp=4))
    sharded = folder / "sharded"
    sharded.mkdir()
    for file in sorted(
        (folder / "native").glob("*.safetensors")
    ):  # as torch's own writer names them
        file.rename(sharded / f"{file.stem.rpartition('-')[0]}.safetensors")
    del sd
    measure_reshard(folder / "dcp")

    def clear():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()

    ratio(
        "dcp to one torch.save file",
        lambda: dcp_to_torch_save(folder / "dcp", out / "a.pt"),
        lambda: shardplan.dcp_to_torch_save(folder / "dcp", out / "b.pt"),
        rounds,
        clear,
    )
    for count, files in ((1, "one hf file"), (4, "four hf files")):
        for source in ("dcp", "sharded"):
            ratio(
                f"{source} to {files}",
                lambda count=count: consolidate(sharded, out, names, count),
                lambda count=count, source=source: shardplan.convert(
                    folder / source, out, format="hf", max_shard_size=int(nbytes / count * 1.05)
                ),
                rounds,
                clear,
            )
    for format in ("torch", "hf"):
        clear()
        command = [sys.executable, "-P", __file__, "--memory", format, "--folder", folder]
        subprocess.run(command, check=True)


def measure_memory(folder, format):
    """Convert in a fresh process, and see how far its memory rises."""
    small = folder / "small"
    shutil.rmtree(small, ignore_errors=True)
    shardplan.save({"w": torch.ones(1)}, small / "a", format="dcp")
    shardplan.convert(small / "a", small / "b", format=format)  # imports what is needed
    before = peak = resident()
    stop = threading.Event()

    def watch():
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    shardplan.convert(folder / "dcp", folder / "out" / "x", format=format, max_memory=MEMORY)
    stop.set()
    thread.join()
    rise, most = (peak - before) / 2**20, MEMORY / 2**20
    print(f"dcp to {format}: memory rose by {rise:.0f} MiB   wanted at most {most:.0f}", flush=True)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", help="only measure the memory of converting to this format")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.memory:
        measure_memory(args.folder, args.memory)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, nbytes = Path(name), int(args.gib * 2**30)
        measure_exchange(state_dict(LARGE, nbytes), folder / "l", "large", args.rounds)
        measure_exchange(state_dict(SMALL, 0), folder / "s", "small", args.rounds)
        measure_conversions(state_dict(LARGE, nbytes), folder, args.rounds)


if __name__ == "__main__":
    main()
