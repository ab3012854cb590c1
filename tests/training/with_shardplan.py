"""Train a small model with FSDP2 × TP, and save it after half of the steps; or resume from there.

Run under torchrun as ``with_torch.py FOLDER [resume]``; rank 0 prints the losses.
"""

import sys

import torch
import torch.distributed as dist
import shardplan.dcp as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, BATCH, WIDTH = 6, 8, 16


class Training:
    """The model and the optimizer, as one value of a checkpoint."""

    def __init__(self, mesh):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))
        parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.group = mesh["dp"]

    def step(self, number):
        """Take one step on this rank's part of the batch; return the loss of the whole batch."""
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        mine = batch.chunk(self.group.size())[self.group.get_local_rank()]
        loss = (self.model(mine).squeeze() - mine.sum(dim=1)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group.get_group())
        return total.item() / self.group.size()

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(folder, resume=""):
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // 2, 2)
    training = Training(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
    state = {"training": training, "step": 0}
    if resume:
        dcp.load(state, checkpoint_id=folder)
    for step in range(state["step"], STEPS):
        if step == STEPS // 2 and not resume:
            dcp.save(state | {"step": step}, checkpoint_id=folder)
        loss = training.step(step)
        if dist.get_rank() == 0:
            print(step, loss, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
