"""A Lightning run of some epochs on shards: ``lit.py FOLDER EPOCHS [CHECKPOINT]``."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from shardplan.integrations.lightning import ShardplanStrategy

folder, epochs, *checkpoint = sys.argv[1:]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 8})
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 5))

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


ranks = int(__import__("os").environ["WORLD_SIZE"])
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=ShardplanStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    callbacks=[ModelCheckpoint(folder, filename="{epoch}", monitor="loss", save_top_k=2)],
    max_epochs=int(epochs),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
trainer.fit(model, DataLoader(torch.ones(4, 6)), ckpt_path=checkpoint[0] if checkpoint else None)
state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
optimizer = trainer.optimizers[0]
moments = [s["exp_avg"].full_tensor() for s in optimizer.state.values()]
if trainer.global_rank == 0:
    result = {"state": state, "moments": moments, "lr": optimizer.param_groups[0]["lr"]}
    torch.save({**result, "step": trainer.global_step}, f"{folder}/result-{epochs}.pt")
