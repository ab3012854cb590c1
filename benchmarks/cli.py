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

from shardplan.io.formats.native.manifest import MANIFEST, encode_manifest
from shardplan.io.formats.native.write import Written, WrittenFile, assemble
from shardplan.planning import Mesh, derive_plans, fsdp, llama3_405b, world_plans
from shardplan.planning.storage import file_name

RANKS = 512
PROGRAM = Path(sys.executable).with_name("shardplan")


def manifest(ranks=RANKS):
    """Assemble the manifest of a checkpoint that nobody saved."""
    mesh, save_id, header = Mesh(dp=ranks), "5f3a9c0d7e21", 4096
    plans, metadata = derive_plans(world_plans(fsdp(llama3_405b(), mesh), mesh))
    written = []
    for rank, plan in enumerate(plans):
        name, size = file_name(rank, 0, 1, save_id), header + int(plan.items.nbytes.sum())
        written.append(Written((WrittenFile(0, name, size, header, rank),), {}))
    chunks = sum(len(plan.items) for plan in plans)
    return assemble(metadata, plans, written, save_id=save_id, created=1.79e9), chunks


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
