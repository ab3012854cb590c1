"""Groups of four real ranks that save real models as Hugging Face files.

Run as ``python hugging.py FOLDER``. Torch and transformers are imported once, and each rank is a
fork. It judges nothing: ``FOLDER/CASE`` is what shardplan saved of the ranks' sharded model, and
``FOLDER/CASE.pt`` holds some tokens and what the whole model makes of them. In the cases called
``exit-RANK``, that rank exits while all write over an older checkpoint, and ``FOLDER/CASE.told-R``
is what the others were told.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import shardplan
from shardplan import _save as saving  # noqa: F401  # imported once, before the forks
from shardplan.dist import CheckpointError, torch_comm
from shardplan.io.stores.local import LocalStore

WORLD = 4
CASES = ("apart", "tied", "background")
EXITS = {"exit-0": 0, "exit-2": 2}
TIMEOUT = 5.0  # seconds that a rank waits for others
TOKENS = torch.arange(12).view(2, 6)
SPLIT = {
    "q_proj": ColwiseParallel,
    "k_proj": ColwiseParallel,
    "v_proj": ColwiseParallel,
    "o_proj": RowwiseParallel,
    "gate_proj": ColwiseParallel,
    "up_proj": ColwiseParallel,
    "down_proj": RowwiseParallel,
}


def model(case):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=66,
        hidden_size=32,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=case == "tied",
    )
    return LlamaForCausalLM(config).eval()


def sharded(net):
    """Cut a model over two ranks by tensor parallelism, and each part over two by FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in net.model.layers:
        names = [name for name, _ in layer.named_modules()]
        plan = {n: SPLIT[n.rpartition(".")[2]]() for n in names if n.rpartition(".")[2] in SPLIT}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def run(case, rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{case}.store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    net = model(case)
    if rank == 0:
        net.config.save_pretrained(f"{folder}/{case}.config")
        with torch.no_grad():
            torch.save({"tokens": TOKENS, "logits": net(TOKENS).logits}, f"{folder}/{case}.pt")
    state = sharded(net).state_dict()
    options = {"format": "hf", "comm": torch_comm(), "extra_files": f"{folder}/{case}.config"}
    torch_comm().barrier()
    if case == "background":
        shardplan.async_save(state, f"{folder}/{case}", **options).result()
    else:
        shardplan.save(state, f"{folder}/{case}", **options)
    dist.destroy_process_group()


class Exiting(LocalStore):
    """A disk on which writing a part of a file ends the process."""

    def write_ranges(self, path, ranges):
        os._exit(0)


def leave(case, rank, folder):
    """Save over an older checkpoint, while one rank exits."""
    store = dist.FileStore(f"{folder}/{case}.store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    path = f"{folder}/{case}"
    comm = torch_comm(timeout=100)
    shardplan.save({"w": torch.zeros(8, 4)}, path, format="hf", comm=comm)
    place = (Exiting if rank == EXITS[case] else LocalStore)(path)
    state = {"w": distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (4,)), [Shard(0)])}
    comm = torch_comm(timeout=TIMEOUT)
    torch_comm(timeout=100).barrier()
    time.sleep(1)  # all have left the barrier before a rank may go
    try:
        shardplan.save(state, place, format="hf", comm=comm, overwrite=True)
        told = "saved"
    except CheckpointError as error:
        told = str(error)
    with open(f"{folder}/{case}.told-{rank}", "w", encoding="utf-8") as file:
        file.write(told)
    time.sleep(1)
    os._exit(0)


def main(folder):
    for case in (*CASES, *EXITS):
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    (leave if case in EXITS else run)(case, rank, folder)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(f"a rank of the case {case} failed")


if __name__ == "__main__":
    main(sys.argv[1])
