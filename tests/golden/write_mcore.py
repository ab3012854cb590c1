"""How `tests/golden/mcore` was written: on two ranks, by megatron-core 0.16.1 with torch 2.13.

``python write_mcore.py FOLDER``; no test runs it, and none needs Megatron-core.
"""

import argparse
import os
import pathlib
import signal
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def full():
    """Return the whole tensors, as the tests know them."""
    return {
        "embedding.weight": torch.arange(12.0).reshape(4, 3),
        "decoder.layers.weight": torch.arange(8.0).reshape(2, 2, 2),
        "norm.weight": torch.arange(3.0).bfloat16(),
    }


def state(rank):
    """Return what a rank saves: Megatron-core's own stand-ins for tensors and objects, and more."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig

    whole = full()
    cut = ShardedTensor.from_rank_offsets
    args = argparse.Namespace(
        lr=0.1,
        params_dtype=torch.bfloat16,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        save=pathlib.PosixPath("/checkpoints"),
    )
    return {
        "embedding": cut(
            "embedding.weight", whole["embedding.weight"].chunk(2)[rank].clone(), (0, rank, 2)
        ),
        # One layer a rank, whose number is an axis that the tensors themselves lack.
        "layer": cut(
            "decoder.layers.weight",
            whole["decoder.layers.weight"][rank].clone(),
            (0, rank, 2),
            prepend_axis_num=1,
        ),
        "norm": cut("norm.weight", whole["norm.weight"], replica_id=rank),
        "rng": ShardedObject(
            "rng_state", [{"cpu": torch.arange(4) + rank, "rank": rank}], (RANKS,), (rank,)
        ),
        "iteration": 5,
        "args": args,
        "scheduler": {"max_lr": 0.1, "steps": [1, 2]},
        "config": OptimizerConfig(),  # which is not read without its class
    }


def work(rank, folder):
    """Save one rank's part."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29633"), RANK=str(rank)
    )
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.cuda.synchronize = lambda *_, **__: None  # Megatron-core takes CUDA for granted
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(state(rank), folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    mp.spawn(work, args=(sys.argv[1],), nprocs=RANKS)
