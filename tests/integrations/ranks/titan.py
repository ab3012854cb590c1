"""A torchtitan run of two steps, saved or resumed: ``titan.py FOLDER WHAT``; prints what is wrong.

torchtitan's own models need triton, so the model is a plain one; all else is torchtitan's.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager as Theirs
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from shardplan.integrations.torchtitan import CheckpointManager

folder, what = sys.argv[1:]


class Adapter(StateDictAdapter):
    def to_hf(self, state_dict):
        return {f"model.{name}": tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict):
        return {name.removeprefix("model."): tensor for name, tensor in hf_state_dict.items()}


class Train:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]


class Run:
    """The parts of a run that its checkpoint manager gets, and the manager."""

    def __init__(self, config, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 5))
        fully_shard(self.model)
        groups = [
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
        ]
        options = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = options.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=9)
        self.train = Train()
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.train},
            sd_adapter=Adapter(None, None),
            base_folder=folder,
        )

    def advance(self):
        self.model(torch.ones(2, 6)).sum().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedulers.step()
        self.train.step += 1

    def facts(self):
        """Return everything that a checkpoint must bring back, whole."""
        whole = {name: t.full_tensor() for name, t in self.model.state_dict().items()}
        for name, value in self.optimizers.state_dict().items():
            whole[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole | {"step": self.train.step, "lr": self.schedulers.state_dict()["last_epoch"]}


def same(one, other):
    """Return True if two runs are in the same state."""
    pairs = [(one[name], other[name]) for name in one.keys() | other.keys()]
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def config(kind=CheckpointManager, **options):
    return kind.Config(enable=True, interval=2, keep_latest_k=2, **options)


dist.init_process_group("gloo")
if what == "save":
    run = Run(config(format="safetensors"), seed=0)
    for step in range(1, 8):
        run.advance()
        saved = run.manager.save(step, last_step=step == 7)
        assert saved == (step % 2 == 0 or step == 7), step
        if step == 6:
            torch.save(run.facts(), f"{folder}/facts-{dist.get_rank()}.pt")
    run.manager.close()
elif what == "resume":
    run = Run(config(), seed=1)
    assert run.manager.load(step=6)
    assert same(run.facts(), torch.load(f"{folder}/facts-0.pt"))
elif what == "theirs-to-ours":
    their = Run(config(Theirs, async_mode="disabled"), seed=0)
    their.advance()
    their.advance()
    assert their.manager.save(2)
    our = Run(config(exclude_from_loading=["lr_scheduler"]), seed=1)
    assert our.manager.load(step=2)
    assert same(our.facts() | {"lr": 2}, their.facts())
    assert our.facts()["lr"] == 0
    their.manager.close()
elif what == "ours-to-theirs":
    our = Run(config(format="dcp", background="process"), seed=0)
    our.advance()
    our.advance()
    assert our.manager.save(2)
    our.manager.maybe_wait_for_saving()
    their = Run(config(Theirs, async_mode="disabled"), seed=1)
    assert their.manager.load()
    assert same(our.facts(), their.facts())
    their.manager.close()
elif what == "hf":
    our = Run(config(last_save_in_hf=True, export_dtype="bfloat16"), seed=0)
    our.advance()
    assert our.manager.save(1, last_step=True)
    again = Run(
        config(
            initial_load_path=f"{folder}/checkpoint/step-1",
            initial_load_in_hf=True,
            folder="elsewhere",
        ),
        seed=1,
    )
    assert again.manager.load()
    for name, tensor in again.model.state_dict().items():
        saved = our.model.state_dict()[name].full_tensor().bfloat16().float()
        assert torch.equal(tensor.full_tensor(), saved), name
dist.barrier()
dist.destroy_process_group()
