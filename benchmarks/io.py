"""Save and load speed, as ratios of what the disk and torch DCP do in the same run.

    python -P benchmarks/io.py --gib 2 --folder /tmp
    python -P benchmarks/io.py --small 30000

Both sides move the same bytes, with a warm page cache, several times in turn; the median counts.
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
from safetensors.torch import load_file, save_file

import shardplan
import shardplan.planning
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore

TENSORS = 32
GOALS = {
    "save / raw write": 0.85,
    "save / torch DCP": 1.25,
    "load / raw readinto": 0.7,
    "load / torch DCP": 4.0,
}
MOST = {"fused / plain load": 1.15, "turned load / copy": 2.0}


def state_dict(gib):
    rows = max(int(gib * 2**30) // 4 // TENSORS // 1024, 1)
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{i}.weight": torch.randint(
            -(2**31), 2**31 - 1, (rows, 1024), dtype=torch.int32, generator=generator
        ).view(torch.float32)
        for i in range(TENSORS)
    }


def zeros(sd):
    return {name: torch.zeros_like(tensor) for name, tensor in sd.items()}


def raw_write(sd, path):
    path.mkdir()
    with open(path / "raw.bin", "wb", buffering=0) as file:
        for tensor in sd.values():
            view = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
            while view:
                view = view[file.write(view[: 1 << 30]) :]
        os.fsync(file.fileno())


def raw_read(sd, path):
    with open(path / "raw.bin", "rb", buffering=0) as file:
        for tensor in sd.values():
            view = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
            while view:
                view = view[file.readinto(view[: 1 << 30]) :]


def dcp_save(sd, path):
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)


def dcp_load(sd, path):
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def timed(work, *args):
    os.sync()
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start


def measure_saves(sd, folder, rounds):
    ways = {"raw": raw_write, "dcp": dcp_save, "ours": shardplan.save}
    times = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            path = folder / name
            shutil.rmtree(path, ignore_errors=True)
            times[name].append(timed(way, sd, path))
        print("  save", {name: round(values[turn], 3) for name, values in times.items()})
    return {name: statistics.median(values) for name, values in times.items()}


def measure_loads(target, folder, rounds):
    ways = {"raw": raw_read, "dcp": dcp_load, "ours": shardplan.load}
    times = {name: [] for name in ways}
    for turn in range(rounds):
        for name, way in ways.items():
            times[name].append(timed(way, target, folder / name))
        print("  load", {name: round(values[turn], 3) for name, values in times.items()})
    return {name: statistics.median(values) for name, values in times.items()}


def measure_slice(folder, name):
    store = CountingStore(open_store(folder / "ours"))
    tensor = shardplan.open_checkpoint(store)[name]
    shares = {}
    for axis, length in enumerate(tensor.shape):
        store.clear()
        part = slice(length // 3, length // 3 + max(length // 100, 1))
        got = tensor[(slice(None),) * axis + (part,)]
        files = store.bytes_read() / tensor.nbytes
        shares[f"axis {axis}"] = (got.numel() * 4 / tensor.nbytes, files)
    return shares


def measure_shapes(gib, folder, rounds):
    """Load what lies otherwise in the checkpoint, in turn with what it is compared with."""
    rows = max(int(gib * 2**30) // 4 // TENSORS // 2048 // 6 * 6, 6)
    parts = {"q": rows * 4 // 6, "k": rows // 6, "v": rows // 6}
    plain = {
        f"{i}.{name}": torch.rand(length, 2048)
        for i in range(TENSORS)
        for name, length in parts.items()
    }
    shardplan.save(plain, folder / "parts")
    fused = {f"{i}.qkv": torch.zeros(rows, 2048) for i in range(TENSORS)}
    split = shardplan.planning.split("*.qkv", {f"*.{name}": n for name, n in parts.items()})
    square = {f"{i}": torch.rand(2048, rows) for i in range(TENSORS)}
    shardplan.save(square, folder / "square")
    turned = {name: torch.zeros(rows, 2048) for name in square}
    permute = shardplan.planning.permute("*", (1, 0))
    works = {
        "plain": lambda: shardplan.load(plain, folder / "parts"),
        "fused": lambda: shardplan.load(fused, folder / "parts", planner=split),
        "copied": lambda: [turned[name].copy_(tensor.T) for name, tensor in square.items()],
        "turned": lambda: shardplan.load(turned, folder / "square", planner=permute),
    }
    times = {name: [] for name in works}
    for turn in range(rounds):
        for name, work in works.items():
            times[name].append(timed(work))
        print("  shapes", {name: round(values[turn], 3) for name, values in times.items()})
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "fused / plain load": middle["fused"] / middle["plain"],
        "turned load / copy": middle["turned"] / middle["copied"],
    }


class PeakMemory:
    """The most memory that a block of code holds beyond what it started with."""

    def __enter__(self):
        self._before = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        self.mib = (max(self.peak, _resident()) - self._before) / 2**20


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_memory(gib, folder):
    """Save and load in a fresh process, tensors in place, and see how far memory rises."""
    sd = state_dict(gib)
    shardplan.save({"warm": torch.ones(1)}, folder / "warm", overwrite=True)
    cast = shardplan.planning.cast("bfloat16")
    works = {
        "save": lambda: shardplan.save(sd, folder / "plain"),
        "load": lambda: shardplan.load(sd, folder / "plain"),
        "save cast": lambda: shardplan.save(sd, folder / "cast", planner=cast),
        "load cast": lambda: shardplan.load(sd, folder / "cast", planner=cast),
    }
    for name, work in works.items():
        with PeakMemory() as memory:
            work()
        print(f"{name:10} peak {memory.mib:4.0f} MiB beyond the state dict   wanted at most 256")


def measure_small(count, folder, rounds):
    """Move many tensors of 4 KiB, in turn with safetensors' own functions and with torch's.

    Seconds, and seconds of processor time: that of both sides counts where a machine is busy.
    """
    memory = torch.randn(count, 32, 32)
    sd = {f"layers.{number}.weight": memory[number].clone() for number in range(count)}
    target, file = zeros(sd), folder / "theirs.safetensors"

    def load_into():
        for name, tensor in load_file(file).items():
            target[name].copy_(tensor)

    again = {"overwrite": True}
    jobs = {
        "safetensors save_file": lambda: save_file(sd, file),
        "save": lambda: shardplan.save(sd, folder / "ours", **again),
        "save, hf": lambda: shardplan.save(sd, folder / "hf", format="hf", **again),
        "safetensors load_file": lambda: load_file(file),
        "safetensors load_file, copy": load_into,
        "load": lambda: shardplan.load(target, folder / "ours"),
        "load, hf": lambda: shardplan.load(target, folder / "hf"),
        "convert to hf": lambda: shardplan.convert(
            folder / "ours", folder / "converted", format="hf", **again
        ),
        "torch.save": lambda: torch.save(sd, folder / "theirs.pt"),
        "save, torch": lambda: shardplan.save(sd, folder / "ours.pt", format="torch", **again),
        "torch.load": lambda: torch.load(folder / "theirs.pt", weights_only=True),
        "load, torch": lambda: shardplan.load(target, folder / "ours.pt"),
    }
    times = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            wall, own = time.perf_counter(), time.process_time()
            job()
            times[name].append((time.perf_counter() - wall, time.process_time() - own))
    for name, each in times.items():  # the first round warms up
        wall, own = (statistics.median(column) for column in zip(*each[1:], strict=True))
        print(f"{name:28} {wall:7.2f} s {own:7.2f} s of a processor")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, help="only measure so many tensors of 4 KiB")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", action="store_true", help="only measure memory")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if args.memory:
            measure_memory(args.gib, folder)
            return
        if args.small:
            measure_small(args.small, folder, args.rounds)
            return
        sd = state_dict(args.gib)
        saves = measure_saves(sd, folder, args.rounds)
        loads = measure_loads(zeros(sd), folder, args.rounds)
        ratios = {
            "save / raw write": saves["raw"] / saves["ours"],
            "save / torch DCP": saves["dcp"] / saves["ours"],
            "load / raw readinto": loads["raw"] / loads["ours"],
            "load / torch DCP": loads["dcp"] / loads["ours"],
        }
        for label, ratio in ratios.items():
            print(f"{label:22} {ratio:6.2f}   wanted {GOALS[label]}")
        for label, ratio in measure_shapes(args.gib, folder, args.rounds).items():
            print(f"{label:22} {ratio:6.2f}   wanted at most {MOST[label]}")
        for label, (asked, read) in measure_slice(folder, next(iter(sd))).items():
            print(f"1% slice, {label}: {asked:.3%} asked for, {read:.3%} of the tensor read")
    command = [sys.executable, "-P", __file__, "--memory", "--gib", str(args.gib)]
    subprocess.run([*command, "--folder", str(args.folder)], check=True)


if __name__ == "__main__":
    main()
