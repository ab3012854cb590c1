"""Lightning's own trainer, alone and on ranks of gloo."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import shardplan
from shardplan.integrations.lightning import ShardplanIO


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 8})
        self.net = torch.nn.Linear(6, 5)

    def training_step(self, batch, _):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(folder, epochs, checkpoint=None):
    seed_everything(0)
    model = Model()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[ShardplanIO()],
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", monitor="loss", save_top_k=2)],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.ones(4, 6)), ckpt_path=checkpoint)
    return model, trainer


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_run_goes_on_where_its_checkpoint_ends(tmp_path):
    whole, _ = fit(tmp_path / "whole", 4)
    _, first = fit(tmp_path / "parts", 2)
    parts, trainer = fit(tmp_path / "parts", 4, first.checkpoint_callback.best_model_path)
    assert trainer.global_step == 16
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-5)


def test_checkpoints_that_the_callback_drops_are_removed(tmp_path):
    fit(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt"]
    assert shardplan.open_checkpoint(tmp_path / "epoch=3.ckpt")["state_dict.net.weight"].shape


def test_a_sharded_run_resumes_on_another_number_of_ranks(torchrun, tmp_path):
    torchrun("lit.py", 2, tmp_path, "4")
    (whole,) = (torch.load(tmp_path / "result-4.pt"),)
    (tmp_path / "again").mkdir()
    torchrun("lit.py", 2, tmp_path / "again", "2")
    torchrun("lit.py", 1, tmp_path / "again", "4", tmp_path / "again/epoch=1.ckpt")
    again = torch.load(tmp_path / "again/result-4.pt")
    assert again["step"] == whole["step"] == 16
    assert again["lr"] == whole["lr"]
    for name, tensor in whole["state"].items():
        torch.testing.assert_close(again["state"][name], tensor)
    for one, other in zip(again["moments"], whole["moments"], strict=True):
        torch.testing.assert_close(one, other)
