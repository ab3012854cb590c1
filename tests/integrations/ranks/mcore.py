"""Load what `write_mcore` wrote, or what became of it, with Megatron-core: ``mcore.py FOLDER``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2] / "golden"))
import write_mcore as golden


def work(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=golden.RANKS)
    torch.cuda.synchronize = lambda *_, **__: None  # Megatron-core takes CUDA for granted
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing

    saved = golden.state(rank)
    wanted = golden.state(rank)
    asked = {name: wanted[name] for name in ("embedding", "layer", "norm", "rng")}
    for name in ("embedding", "layer", "norm"):
        asked[name].data.zero_()
    loaded = dist_checkpointing.load(asked, folder)
    for name in ("embedding", "layer", "norm"):
        assert torch.equal(loaded[name], saved[name].data), name
    assert loaded["rng"][0]["rank"] == rank
    assert loaded["iteration"] == 5
    assert loaded["scheduler"] == saved["scheduler"]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=golden.RANKS)
