r"""Planners between the layouts of frameworks, made of passes alone: to use, or to copy and change.

Each function maps the names of a state dict to those of a checkpoint. So a model in torchtitan's
layout is saved in Hugging Face's, and a Hugging Face checkpoint is loaded into it:

    planner = llama_torchtitan_to_hf(layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096)
    shardplan.load(state_dict, "meta-llama/Llama-3.1-8B", planner=planner)

The opposite direction is the inverse. Names are those of a flat model state dict; put
``rename([(r"^model\.", "")])`` and the like before them. Where ranks hold some layers only, as
pipeline stages do, pass ``required=False``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .passes import chain, concat, inverse, pad, permute, rename, reshape, stack
from .passes.base import Step
from .plans import SavePlan

__all__ = [
    "experts_to_fused",
    "experts_to_stacked",
    "fused_to_experts",
    "llama_hf_to_megatron",
    "llama_hf_to_torchtitan",
    "llama_megatron_to_hf",
    "llama_torchtitan_to_hf",
    "stacked_to_experts",
]

TORCHTITAN_TO_HF = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.#.attention.wq.weight": "model.layers.#.self_attn.q_proj.weight",
    "layers.#.attention.wk.weight": "model.layers.#.self_attn.k_proj.weight",
    "layers.#.attention.wv.weight": "model.layers.#.self_attn.v_proj.weight",
    "layers.#.attention.wo.weight": "model.layers.#.self_attn.o_proj.weight",
    "layers.#.feed_forward.w1.weight": "model.layers.#.mlp.gate_proj.weight",
    "layers.#.feed_forward.w2.weight": "model.layers.#.mlp.down_proj.weight",
    "layers.#.feed_forward.w3.weight": "model.layers.#.mlp.up_proj.weight",
    "layers.#.attention_norm.weight": "model.layers.#.input_layernorm.weight",
    "layers.#.ffn_norm.weight": "model.layers.#.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

HF_TO_MEGATRON = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.layers.#.self_attn.o_proj.weight": "decoder.layers.#.self_attention.linear_proj.weight",
    "model.layers.#.mlp.down_proj.weight": "decoder.layers.#.mlp.linear_fc2.weight",
    "model.layers.#.input_layernorm.weight": (
        "decoder.layers.#.self_attention.linear_qkv.layer_norm_weight"
    ),
    "model.layers.#.post_attention_layernorm.weight": (
        "decoder.layers.#.mlp.linear_fc1.layer_norm_weight"
    ),
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}


def llama_torchtitan_to_hf(
    *, layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, required: bool = True
) -> Step[SavePlan]:
    """Map torchtitan's Llama to that of Hugging Face.

    The rows of a head of ``wq`` and ``wk`` lie in pairs here, and half by half there.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"layers.0.attention.wk.weight": TensorSpec((4, 6))})
    >>> planner = llama_torchtitan_to_hf(
    ...     layers=1, heads=2, kv_heads=1, head_dim=4, hidden=6, required=False
    ... )
    >>> (item,) = planner((plan,))[0].items
    >>> item.index.fqn, item.axes  # rows 0 2 1 3: the pairs, split (2, 2), swap places
    ('model.layers.0.self_attn.k_proj.weight', Axes(split=(2, 2, 6), order=(1, 0, 2)))
    """
    return chain(
        *(
            half_by_half(f"layers.#.attention.{name}.weight", count, head_dim, hidden, required)
            for name, count in [("wq", heads), ("wk", kv_heads)]
        ),
        rename(per_layer(TORCHTITAN_TO_HF, layers), required=required),
    )


def llama_hf_to_torchtitan(
    *, layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, required: bool = True
) -> Step[SavePlan]:
    """Map Hugging Face's Llama to that of torchtitan; see `llama_torchtitan_to_hf`."""
    return inverse(
        llama_torchtitan_to_hf(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            required=required,
        )
    )


def llama_hf_to_megatron(
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    ffn: int,
    vocab: int | None = None,
    padded_vocab: int | None = None,
    required: bool = True,
) -> Step[SavePlan]:
    """Map Hugging Face's Llama to that of Megatron-core.

    There, the queries of a group of heads are followed by its key and its value, gate and up
    projections are one tensor, and each norm belongs to the linear layer after it. There are as
    many groups as ``kv_heads``. If Megatron pads the vocabulary, give both of its sizes.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    >>> sizes = [(8, 4), (4, 4), (4, 4)]  # 4 query heads in 2 groups, head_dim 2
    >>> plan = local_plan({n: TensorSpec(size) for n, size in zip(names, sizes)})
    >>> planner = llama_hf_to_megatron(
    ...     layers=1, heads=4, kv_heads=2, head_dim=2, hidden=4, ffn=6, required=False
    ... )
    >>> planned = planner((plan,))[0]
    >>> {item.index.fqn for item in planned.items}
    {'decoder.layers.0.self_attention.linear_qkv.weight'}
    >>> sorted((i.tensor_data.chunk.offsets[0], i.source.fqn[-13]) for i in planned.items)
    [(0, 'q'), (4, 'k'), (6, 'v'), (8, 'q'), (12, 'k'), (14, 'v')]
    """
    ours, theirs = "model.layers.#", "decoder.layers.#"
    widths = {"q": heads // kv_heads * head_dim, "k": head_dim, "v": head_dim}
    parts = {f"{ours}.self_attn.{name}_proj.weight": width for name, width in widths.items()}
    joined = f"{theirs}.self_attention.linear_qkv.weight"
    group = sum(widths.values())
    gated = {f"{ours}.mlp.{name}_proj.weight": ffn for name in ("gate", "up")}
    padding = [
        pad(name, to=padded_vocab, of=vocab, required=required)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
        if vocab is not None and padded_vocab is not None
    ]
    return chain(
        *(
            reshape(
                name, (kv_heads, width, hidden), of=(kv_heads * width, hidden), required=required
            )
            for name, width in parts.items()
        ),
        concat(parts, joined, axis=1, required=required),
        reshape(
            joined, (kv_heads * group, hidden), of=(kv_heads, group, hidden), required=required
        ),
        concat(gated, f"{theirs}.mlp.linear_fc1.weight", required=required),
        *padding,
        rename(per_layer(HF_TO_MEGATRON, layers), required=required),
    )


def llama_megatron_to_hf(
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    ffn: int,
    vocab: int | None = None,
    padded_vocab: int | None = None,
    required: bool = True,
) -> Step[SavePlan]:
    """Map Megatron-core's Llama to that of Hugging Face; see `llama_hf_to_megatron`."""
    return inverse(
        llama_hf_to_megatron(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            ffn=ffn,
            vocab=vocab,
            padded_vocab=padded_vocab,
            required=required,
        )
    )


def experts_to_stacked(
    *,
    experts: int,
    names: Mapping[str, str],
    of: str = "*.mlp.experts",
    into: str = "*.mlp.experts",
    required: bool = True,
) -> Step[SavePlan]:
    """Map a tensor for each expert to one of all experts, with a new first axis.

    ``names`` map what each expert's weight is called to what all experts' weight is called; the
    path of the experts changes from ``of`` (Mixtral's is ``"*.block_sparse_moe.experts"``) to
    ``into``.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> sd = {f"0.mlp.experts.{n}.down_proj.weight": TensorSpec((3, 2)) for n in range(4)}
    >>> planner = experts_to_stacked(experts=4, names={"down_proj": "w2"}, into="*.moe.experts")
    >>> [item.index.fqn for item in planner((local_plan(sd),))[0].items[:1]]
    ['0.moe.experts.w2']
    """
    return chain(
        *(
            stack(f"{of}.#.{one}.weight", f"{into}.{every}", count=experts, required=required)
            for one, every in names.items()
        )
    )


def stacked_to_experts(
    *,
    experts: int,
    names: Mapping[str, str],
    of: str = "*.mlp.experts",
    into: str = "*.mlp.experts",
    required: bool = True,
) -> Step[SavePlan]:
    """Map one tensor of all experts to one for each; see `experts_to_stacked`."""
    back = {one: every for every, one in names.items()}
    there = experts_to_stacked(experts=experts, names=back, of=into, into=of, required=required)
    return inverse(there)


def experts_to_fused(
    *,
    experts: int,
    ffn: int,
    of: str = "*.mlp.experts",
    into: str = "*.mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    required: bool = True,
) -> Step[SavePlan]:
    """Map a Mixtral's or Qwen's tensors for each expert to two of all experts.

    These are ``gate_up_proj``, of shape (experts, 2 ffn, hidden), and ``down_proj``, of shape
    (experts, hidden, ffn). ``names`` are those of an expert's weights, Mixtral's ``("w1", "w3",
    "w2")``; paths are as in `experts_to_stacked`.
    """
    gate, up, down = names
    every = {gate: "gate_proj", up: "up_proj", down: "down_proj"}
    halves = {f"{into}.gate_proj": ffn, f"{into}.up_proj": ffn}
    return chain(
        experts_to_stacked(experts=experts, names=every, of=of, into=into, required=required),
        concat(halves, f"{into}.gate_up_proj", axis=1, required=required),
    )


def fused_to_experts(
    *,
    experts: int,
    ffn: int,
    of: str = "*.mlp.experts",
    into: str = "*.mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    required: bool = True,
) -> Step[SavePlan]:
    """Map two tensors of all experts to those of each; see `experts_to_fused`."""
    return inverse(
        experts_to_fused(experts=experts, ffn=ffn, of=into, into=of, names=names, required=required)
    )


def half_by_half(
    pattern: str, heads: int, head_dim: int, hidden: int, required: bool
) -> Step[SavePlan]:
    """Reorder the rows of each head from pairs (0 1, 2 3, …) to halves (0 2 …, 1 3 …)."""
    rows, pairs, halves = (
        (heads * head_dim, hidden),
        (heads, head_dim // 2, 2, hidden),
        (heads, 2, head_dim // 2, hidden),
    )
    return chain(
        reshape(pattern, pairs, of=rows, required=required),
        permute(pattern, (0, 2, 1, 3), required=required),
        reshape(pattern, rows, of=halves, required=required),
    )


def per_layer(names: Mapping[str, str], layers: int) -> dict[str, str]:
    """Return a mapping of names with ``#`` replaced by the number of each layer."""
    return {
        old.replace("#", str(layer)): new.replace("#", str(layer))
        for old, new in names.items()
        for layer in (range(layers) if "#" in old else range(1))
    }
