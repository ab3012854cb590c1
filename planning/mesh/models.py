"""The parameters of known models: shapes and dtypes, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dtypes import Dtype
from ..tree import FrozenDict
from .placements import TensorSpec

__all__ = [
    "deepseek", "deepseek_v3", "kimi_k2", "llama", "llama3_405b", "llama3_8b", "qwen3_235b",
    "qwen3_moe",
]  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


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

    >>> params = llama(dim=8, layers=1, heads=4, kv_heads=2, ffn=16, vocab=10)
    >>> params["model.layers.0.self_attn.k_proj.weight"].shape
    (4, 8)
    """
    kv = dim // heads * kv_heads
    layer: Shapes = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        **_gated("mlp", dim, ffn),
    }
    return FrozenDict(_decoder([layer] * layers, dim, vocab, dtype))


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


def deepseek(
    *,
    dim: int,
    layers: int,
    heads: int,
    experts: int,
    ffn: int,
    expert_ffn: int,
    vocab: int,
    dense: int = 1,
    dtype: Dtype = "bfloat16",
) -> FrozenDict[str, TensorSpec]:
    """Return the parameters of a mixture of experts with latent attention, as DeepSeek-V3 is.

    The first ``dense`` layers have no experts; the others have one more that all tokens share.

    >>> tiny = {"dim": 8, "layers": 2, "heads": 2, "ffn": 16, "expert_ffn": 4, "vocab": 10}
    >>> params = deepseek(experts=4, **tiny)
    >>> params["model.layers.1.mlp.experts.3.down_proj.weight"].shape
    (8, 4)
    """
    q_rank, kv_rank, nope, rope, value = 1536, 512, 128, 64, 128
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_a_proj": (q_rank, dim),
        "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (kv_rank + rope, dim),
        "self_attn.kv_a_layernorm": (kv_rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), kv_rank),
        "self_attn.o_proj": (dim, heads * value),
    }
    mixture = {
        "mlp.gate": (experts, dim),
        **_gated("mlp.shared_experts", dim, expert_ffn),
        **_experts(experts, dim, expert_ffn),
    }
    each = [attention | (_gated("mlp", dim, ffn) if n < dense else mixture) for n in range(layers)]
    bias = TensorSpec((experts,), "float32")
    biases = {
        f"model.layers.{number}.mlp.gate.e_score_correction_bias": bias
        for number in range(dense, layers)
    }
    return FrozenDict({**_decoder(each, dim, vocab, dtype), **biases})


def deepseek_v3(dtype: Dtype = "bfloat16") -> FrozenDict[str, TensorSpec]:
    """Return the parameters of DeepSeek-V3, 671 billion, without those that predict more tokens.

    >>> len(deepseek_v3())
    45395
    """
    sizes = {"dim": 7168, "layers": 61, "heads": 128, "ffn": 18_432, "expert_ffn": 2048}
    return deepseek(**sizes, experts=256, dense=3, vocab=129_280, dtype=dtype)


def kimi_k2(dtype: Dtype = "bfloat16") -> FrozenDict[str, TensorSpec]:
    """Return the parameters of Kimi K2, 1,026 billion.

    >>> len(kimi_k2())
    69975
    """
    sizes = {"dim": 7168, "layers": 61, "heads": 64, "ffn": 18_432, "expert_ffn": 2048}
    return deepseek(**sizes, experts=384, dense=1, vocab=163_840, dtype=dtype)


def qwen3_moe(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    experts: int,
    expert_ffn: int,
    vocab: int = 151_936,
    head_dim: int = 128,
    dtype: Dtype = "bfloat16",
) -> FrozenDict[str, TensorSpec]:
    """Return the parameters of a Qwen3 mixture of experts.

    >>> tiny = {"dim": 8, "layers": 1, "heads": 4, "kv_heads": 2, "experts": 2, "expert_ffn": 4}
    >>> qwen3_moe(**tiny, vocab=10)["model.layers.0.self_attn.o_proj.weight"].shape
    (8, 512)
    """
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * head_dim, dim),
        "self_attn.k_proj": (kv_heads * head_dim, dim),
        "self_attn.v_proj": (kv_heads * head_dim, dim),
        "self_attn.o_proj": (dim, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate": (experts, dim),
        **_experts(experts, dim, expert_ffn),
    }
    return FrozenDict(_decoder([layer] * layers, dim, vocab, dtype))


def qwen3_235b(dtype: Dtype = "bfloat16") -> FrozenDict[str, TensorSpec]:
    """Return the parameters of Qwen3 235B-A22B, 235 billion.

    >>> len(qwen3_235b())
    36945
    """
    sizes = {"dim": 4096, "layers": 94, "heads": 64, "kv_heads": 4}
    return qwen3_moe(**sizes, experts=128, expert_ffn=1536, dtype=dtype)


def _gated(name: str, dim: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj": (ffn, dim),
        f"{name}.up_proj": (ffn, dim),
        f"{name}.down_proj": (dim, ffn),
    }


def _experts(count: int, dim: int, ffn: int) -> dict[str, tuple[int, ...]]:
    each = (_gated(f"mlp.experts.{number}", dim, ffn) for number in range(count))
    return {name: shape for expert in each for name, shape in expert.items()}


def _decoder(layers: Sequence[Shapes], dim: int, vocab: int, dtype: Dtype) -> dict[str, TensorSpec]:
    """Return a decoder of some layers, each with two norms; each tensor is a ``weight``."""
    norms = {"input_layernorm": (dim,), "post_attention_layernorm": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, dim)}
    for number, layer in enumerate(layers):
        both = {**layer, **norms}
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in both.items()}
    shapes |= {"model.norm": (dim,), "lm_head": (vocab, dim)}
    specs = {shape: TensorSpec(shape, dtype) for shape in set(shapes.values())}
    return {f"{name}.weight": specs[shape] for name, shape in shapes.items()}
