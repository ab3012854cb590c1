"""Which shapes do published models have? Tables of parameters, ready for the presets.

>>> from shardplan.planning import Mesh
>>> from shardplan.planning.mesh.presets import adam, fsdp_tp
>>> from shardplan.planning.mesh.worlds import world_plans
>>> mesh = Mesh(dp=1024, tp=8)
>>> world_plans(adam(fsdp_tp(llama3_405b(), mesh, LLAMA_TP)), mesh)
WorldPlans: 8,192 ranks on Mesh(dp=1024, tp=8), 4,548 tensors in 8 layouts, 3.7 TiB
shape            placements                          tensors  bytes
[53248, 16384]   dp=StridedShard(0, 8), tp=Shard(0)      756  2.0 TiB
[16384, 53248]   dp=Shard(0), tp=Shard(1)                378  1,023.8 GiB
[16384, 16384]   dp=Shard(0), tp=Shard(1)                378  315.0 GiB
[16384, 16384]   dp=StridedShard(0, 8), tp=Shard(0)      378  315.0 GiB
[1024, 16384]    dp=StridedShard(0, 8), tp=Shard(0)      756  39.4 GiB
[128256, 16384]  dp=StridedShard(0, 8), tp=Shard(0)        6  39.1 GiB
[16384]          dp=Shard(0)                             759  39.5 MiB
[]               on every rank                         1,137  4.4 KiB
"""

from __future__ import annotations

from typing import Final

from ..dtypes import Dtype
from ..frozen import FrozenDict
from .placements import TensorSpec
from .presets import Rule

__all__ = ["LLAMA_TP", "llama", "llama3_405b", "llama3_8b"]

LLAMA_TP: Final[FrozenDict[str, Rule]] = FrozenDict(
    {
        "*.embed_tokens.weight": 0,
        "*.[qkv]_proj.weight": "colwise",
        "*.o_proj.weight": "rowwise",
        "*.gate_proj.weight": "colwise",
        "*.up_proj.weight": "colwise",
        "*.down_proj.weight": "rowwise",
        "lm_head.weight": "colwise",
    }
)
"""How tensor parallelism cuts a Llama: the rules that `tensor_parallel` takes."""


def llama(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int = 128_256,
    dtype: Dtype = "bfloat16",
) -> FrozenDict[str, TensorSpec]:
    """Return the parameters of a Llama, under the names that Hugging Face gives them.

    Args:
        dim: How wide the model is.
        layers: How many layers it has.
        heads: How many query heads a layer has.
        kv_heads: How many heads keys and values have.
        ffn: How wide the feed-forward part is.
        vocab: How many tokens there are.
        dtype: The dtype of all parameters.

    >>> params = llama(dim=8, layers=1, heads=4, kv_heads=2, ffn=16, vocab=10)
    >>> params["model.layers.0.self_attn.k_proj.weight"].shape
    (4, 8)
    """
    kv = dim // heads * kv_heads
    layer = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, dim)}
    for number in range(layers):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    shapes |= {"model.norm": (dim,), "lm_head": (vocab, dim)}
    return FrozenDict({f"{name}.weight": TensorSpec(s, dtype) for name, s in shapes.items()})


def llama3_8b(dtype: Dtype = "bfloat16") -> FrozenDict[str, TensorSpec]:
    """Return the parameters of Llama 3 8B, 8.03 billion.

    >>> len(llama3_8b())
    291
    """
    return llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14_336, dtype=dtype)


def llama3_405b(dtype: Dtype = "bfloat16") -> FrozenDict[str, TensorSpec]:
    """Return the parameters of Llama 3.1 405B, 405.85 billion.

    >>> len(llama3_405b())
    1137
    """
    return llama(dim=16_384, layers=126, heads=128, kv_heads=8, ffn=53_248, dtype=dtype)
