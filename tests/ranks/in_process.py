"""A save of torch's that another process carries out, through a pipeline of ours."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardplan import as_torch_save_planner
from shardplan.planning import cast, chain, drop, rename


def main(folder: str) -> None:
    """Save, on one rank; the process that writes needs a group of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    pipeline = chain(drop("tmp"), rename({"w": "model.w"}), cast("bfloat16"))
    saving = dcp.async_save(
        {"w": torch.arange(4.0), "step": 3, "tmp": 1},
        checkpoint_id=folder,
        planner=as_torch_save_planner(pipeline),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
