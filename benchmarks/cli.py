"""How long does `shardplan inspect` take on a checkpoint of half a million chunks?

Run it with ``python -P benchmarks/cli.py [runs]``. The checkpoint is Llama 3 405B as 512 ranks
would save it, 582,142 chunks, of which only the manifest is written: inspecting reads nothing else.
Measured is the whole process, from its start to its end, interpreter and imports included.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shardplan.io.formats.native.manifest import MANIFEST, FileTable, Manifest, encode_manifest
from shardplan.planning import Mesh, fsdp, llama3_405b, world_metadata, world_plans
from shardplan.planning.columns.arrays import column
from shardplan.planning.storage.write import file_name

RANKS = 512
PROGRAM = Path(sys.executable).with_name("shardplan")


def manifest(ranks=RANKS):
    """Assemble the manifest of a checkpoint that nobody saved."""
    mesh = Mesh(dp=ranks)
    metadata = world_metadata(world_plans(fsdp(llama3_405b(), mesh), mesh))
    entries = metadata.state_dict_metadata
    lengths = [len(layout.tiling) for layout in entries.layouts]
    places = [column(np.arange(length)) for length in lengths]
    chunks = sum(lengths[layout] for layout in entries.layout.tolist())
    names = tuple(file_name(rank, 0, 1, "5f3a9c0d7e21") for rank in range(ranks))
    header = 4096
    sums = np.random.default_rng(0).integers(1 << 63, size=chunks, dtype=np.uint64)

    def made(sizes):
        files = FileTable(names, sizes, column([header] * ranks), (0,) * ranks)
        return Manifest(
            "5f3a9c0d7e21", metadata, files, tuple(places), entries.layout, sums, {}, 1.79e9
        )

    return made(column(made(column([1 << 40] * ranks)).file_bytes + header)), chunks


def seconds(*arguments, program=PROGRAM):
    """Run a program; return seconds on the clock, and of processor time."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL)
    took, after = time.perf_counter() - start, os.times()
    spent = after.children_user + after.children_system
    return took, spent - before.children_user - before.children_system


def main(runs=10):
    made, chunks = manifest()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, MANIFEST).write_bytes(encode_manifest(made))
        size = Path(folder, MANIFEST).stat().st_size
        print(f"{len(made.entries):,} tensors, {chunks:,} chunks, manifest of {size / 1e6:.1f} MB")
        for name, arguments in {
            "--version": ("--version",),
            "inspect": ("inspect", folder),
            "inspect --json": ("inspect", folder, "--json"),
            "plan dp=96,tp=2": ("plan", folder, "--mesh", "dp=96,tp=2"),
        }.items():
            seconds(*arguments)  # compiles what has changed, and warms the page cache
            took, spent = zip(*(seconds(*arguments) for _ in range(runs)), strict=True)
            best, median = min(took), statistics.median(took)
            print(
                f"{name:16} {best:.3f} s at best, {median:.3f} s median, "
                f"{min(spent):.3f} s of processor time"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
