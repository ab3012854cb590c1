"""A run that accelerate prepared, saved or resumed: ``accel.py FOLDER WHAT KIND``."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan.integrations.accelerate import load_state, save_model, save_state

folder, what, kind = sys.argv[1:]
options = {}
if kind == "fsdp2":
    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
    )
accelerator = Accelerator(cpu=True, **options)
torch.manual_seed(0 if what == "save" else 1)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)


class Seen:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


seen = Seen()
accelerator.register_for_checkpointing(seen)


def advance():
    tokens = torch.arange(12).view(2, 6)
    accelerator.backward(model(tokens, labels=tokens).loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def facts():
    whole = {}
    for name, tensor in model.state_dict().items():
        whole[name.removeprefix("module.")] = getattr(tensor, "full_tensor", lambda t=tensor: t)()
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    moments = [getattr(m, "full_tensor", lambda m=m: m)() for m in moments]
    lr = optimizer.param_groups[0]["lr"]
    return {"whole": whole, "moments": moments, "lr": lr, "seen": seen.count}


if what == "save":
    advance()
    seen.count = 7
    torch.manual_seed(5 + accelerator.process_index)
    save_state(accelerator, f"{folder}/state")
    save_model(accelerator, model, f"{folder}/export")
    drawn = torch.rand(3)
else:
    load_state(accelerator, f"{folder}/state")
    drawn = torch.rand(3)
found = facts()
torch.save({**found, "drawn": drawn}, f"{folder}/{what}-{accelerator.process_index}.pt")
accelerator.wait_for_everyone()
accelerator.end_training()
