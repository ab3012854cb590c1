"""One of the four ranks of the demo's job: ``python -m shardplan.demo.training FOLDER RANK STEPS``.

Four ranks train a small transformer (FSDP2 × TP), save, load again and train on. Then two of them
load what the four saved and train on (FSDP2 alone), and then one of them (no sharding). Each time
rank 0 writes a file of results: losses, a checksum of every tensor as it was saved or loaded, and
how long things took, with shardplan and with torch.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import shardplan
from shardplan.io import flat_memory, xxhash
from shardplan.planning import flatten

__all__ = ["main"]

MORE = 2
RANKS = 4
VOCABULARY = 2048
WIDTH = 256
HEADS = 8
LAYERS = 4
LENGTH = 32
BATCH = 8


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of a batch of sequences."""
        normed = self.norm(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        fed: Tensor = self.down(functional.gelu(self.up(self.feed_norm(x))))
        return x + fed


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for each next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return one of two batches, and what follows each token: rows count up by a stride each."""
    random = torch.Generator().manual_seed(step % 2)
    first, stride = (torch.randint(1, 99, (BATCH, 1), generator=random) for _ in range(2))
    tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def build(ranks: int, tensor_parallel: int) -> tuple[Transformer, DeviceMesh | None]:
    """Make the model, with the same weights wherever it is made, and spread it over the ranks."""
    torch.manual_seed(0)
    model = Transformer()
    if ranks == 1:
        return model, None
    mesh = init_device_mesh(
        "cpu", (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp")
    )
    if tensor_parallel > 1:
        style: dict[str, ParallelStyle] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for layer in range(LAYERS):
            style |= {f"layers.{layer}.{n}": ColwiseParallel() for n in ("query", "key", "value")}
            style |= {f"layers.{layer}.up": ColwiseParallel()}
            style |= {f"layers.{layer}.{n}": RowwiseParallel() for n in ("out", "down")}
        parallelize_module(model, mesh["tp"], style)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh


class Training:
    """A model, its optimizer, and the data that this rank sees."""

    def __init__(self, ranks: int, tensor_parallel: int) -> None:
        self.model, mesh = build(ranks, tensor_parallel)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.parts = 1 if mesh is None else mesh["dp"].size()
        self.part = 0 if mesh is None else mesh["dp"].get_local_rank()
        self.done = 0

    def step(self) -> float:
        """Train one step, and return the loss over all ranks."""
        inputs, targets = batch(self.done)
        mine = slice(self.part, None, self.parts)
        scores = self.model(inputs[mine])
        loss = functional.cross_entropy(scores.flatten(0, 1), targets[mine].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.done += 1
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return float(mean)

    def state(self) -> dict[str, Any]:
        """Return all that training needs to go on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.done}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state that was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.done = state["step"]


def checksums(state: dict[str, Any]) -> dict[str, str]:
    """Return a checksum of the whole of every tensor, wherever its parts are."""
    found = {}
    for name, value in flatten(state)[0].items():
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            view = flat_memory(whole.detach().contiguous())
            assert view is not None
            found[name] = xxhash.xxh3_64_hexdigest(view)
    return found


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have done something."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    work()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def save_and_go_on(training: Training, folder: Path, steps: int) -> dict[str, Any]:
    """Train, save with shardplan and with torch, go on; then load, and go on again."""
    before = [training.step() for _ in range(steps)]
    state = training.state()
    results: dict[str, Any] = {"checksums": checksums(state), "before": before}
    seconds: dict[str, float] = {}
    for turn in ("warm up", "save"):  # the first turn warms up
        seconds[turn] = timed(lambda: shardplan.save(state, folder / "step", overwrite=True))
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "torch", ignore_errors=True)
        seconds[f"{turn} torch"] = timed(
            lambda: state_dict_saver.save(state, checkpoint_id=folder / "torch")
        )
    results["losses"] = [training.step() for _ in range(MORE)]
    fresh = Training(dist.get_world_size(), 2)
    target = fresh.state()
    seconds |= load_both(target, folder)
    fresh.resume(target)
    results |= {"resumed": [fresh.step() for _ in range(MORE)], "seconds": seconds}
    return results


def load_both(state: dict[str, Any], folder: Path) -> dict[str, float]:
    """Load a state with torch and with shardplan, whose bits stay; return the seconds of each."""
    seconds: dict[str, float] = {}
    for turn in ("warm up", "load"):
        seconds[f"{turn} torch"] = timed(
            lambda: state_dict_loader.load(state, checkpoint_id=folder / "torch")
        )
        for value in flatten(state)[0].values():
            if isinstance(value, torch.Tensor):
                value.detach().zero_()  # so that nothing of torch's is left
        seconds[turn] = timed(lambda: shardplan.load(state, folder / "step"))
    return seconds


def load_and_go_on(training: Training, folder: Path) -> dict[str, Any]:
    """Load what another set of ranks saved, and go on."""
    state = training.state()
    seconds = load_both(state, folder)
    results = {"checksums": checksums(state), "seconds": seconds}
    training.resume(state)
    return results | {"losses": [training.step() for _ in range(MORE)]}


def main(folder: Path, rank: int, steps: int) -> None:
    """Be one rank."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    for ranks in (RANKS, 2, 1):
        if rank >= ranks:
            return
        if ranks > 1:
            where = f"file://{folder}/meeting-{ranks}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        training = Training(ranks, tensor_parallel=2 if ranks == RANKS else 1)
        results = (
            save_and_go_on(training, folder, steps)
            if ranks == RANKS
            else load_and_go_on(training, folder)
        )
        if rank == 0:
            (folder / f"results-{ranks}.json").write_text(json.dumps(results))
        if ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
