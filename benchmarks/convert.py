"""Converting, against torch: DCP to torch.save, and sharded safetensors to Hugging Face.

python -P benchmarks/convert.py [megabytes [folder]]
"""

import gc
import os
import shutil
import sys
import tempfile
import time

import torch

import shardplan
from shardplan.io.sources import FORMATS
from shardplan.planning import Mesh


def model(megabytes: int) -> dict[str, torch.Tensor]:
    """A transformer's shapes: large matrices, and as many small vectors."""
    torch.manual_seed(0)
    width = 1024
    layer = {"q": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    nbytes = sum(a * b for a, b in layer.values()) * 4
    count = max(1, megabytes * 2**20 // nbytes)
    sd = {}
    for i in range(count):
        sd |= {f"layers.{i}.{k}.weight": torch.randn(*shape) for k, shape in layer.items()}
        sd |= {f"layers.{i}.norm{k}.weight": torch.randn(width) for k in range(4)}
    return sd


def timed(work, target: str) -> tuple[float, float]:
    """Seconds on the clock and of processors, of one run into an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    gc.collect()
    os.sync()
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy


def compare(what: str, theirs, ours, target: str, times: int = 5) -> None:
    """Run both in turn, and take the best of each: other work on the machine disturbs both."""
    runs = [(timed(theirs, target), timed(ours, target)) for _ in range(times)]
    (a, a_busy), (b, b_busy) = (
        (min(run[i][0] for run in runs), min(run[i][1] for run in runs)) for i in range(2)
    )
    print(
        f"{what:<36} torch {a:5.2f} s ({a_busy:.2f} busy)  shardplan {b:5.2f} s ({b_busy:.2f} busy)"
        f"  {a / b:5.2f} × as fast, {a_busy / b_busy:5.2f} × less work"
    )


def sharded(source: str, target: str) -> None:
    """Files as torch's HuggingFaceStorageWriter names them, without our manifest and checksums."""
    os.makedirs(target)
    for file in os.listdir(source):
        if file.endswith(".safetensors"):
            name = "-".join(file.split("-")[:-1]) + ".safetensors"
            shutil.copy(f"{source}/{file}", f"{target}/{name}")


def consolidate(sharded: str, target: str, files: int, threads: int) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    names = list(shardplan.open_checkpoint(sharded))
    index = {name: 1 + i * files // len(names) for i, name in enumerate(names)}
    consolidate_safetensors_files(sharded, target, index, num_threads=threads)


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    where = sys.argv[2] if len(sys.argv) > 2 else None
    root = tempfile.mkdtemp(prefix="shardplan-convert-", dir=where)
    target = f"{root}/out"
    try:
        sd = model(megabytes)
        nbytes = sum(t.nbytes for t in sd.values())
        print(f"{nbytes / 2**20:,.0f} MiB in {len(sd)} tensors, {os.cpu_count()} cores")
        shardplan.save(sd, f"{root}/native")
        shardplan.convert(f"{root}/native", f"{root}/ours", mesh=Mesh(dp=4))
        sharded(f"{root}/ours", f"{root}/rows")
        for files in (1, 4):
            compare(
                f"4 sharded safetensors to {files} hf file{'s' * (files > 1)}",
                lambda files=files: consolidate(f"{root}/rows", target, files, files),
                lambda files=files: shardplan.convert(
                    f"{root}/rows",
                    target,
                    format="hf",
                    max_shard_size=nbytes if files == 1 else int(nbytes / files * 1.05),
                ),
                target,
            )
        if {"dcp", "torch"} <= set(FORMATS):
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp.save(sd, checkpoint_id=f"{root}/dcp", no_dist=True)
            del sd
            compare(
                "DCP to one torch.save file",
                lambda: dcp_to_torch_save(f"{root}/dcp", f"{target}/model.pt"),
                lambda: shardplan.dcp_to_torch_save(f"{root}/dcp", f"{target}/model.pt"),
                target,
            )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
