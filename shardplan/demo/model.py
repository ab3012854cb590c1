"""A small transformer, and how it is spread over ranks: FSDP2 × TP, FSDP2 alone, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

__all__ = ["Transformer", "batch", "build"]

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
