"""Planners between frameworks, against plain torch code on random tensors."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardplan.planning import (
    Mesh,
    PlanError,
    Shard,
    TensorSpec,
    chain,
    global_plan,
    inverse,
    load_plan,
    local_plan,
    world_plans,
)
from shardplan.planning.mappings import (
    experts_to_fused,
    experts_to_stacked,
    fused_to_experts,
    llama_hf_to_megatron,
    llama_hf_to_torchtitan,
    llama_megatron_to_hf,
    llama_torchtitan_to_hf,
    stacked_to_experts,
)
from shardplan.planning.passes.base import run_pass
from shardplan.planning.testing.frames import filled, written

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, PADDED = 2, 4, 2, 4, 6, 7, 8
HIDDEN = HEADS * HEAD_DIM
SIZES = {
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden": HIDDEN,
}


@pytest.fixture(scope="module")
def hf():
    """A Llama of Hugging Face, with its own names."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        vocab_size=VOCAB,
    )
    return {name: torch.randn_like(t) for name, t in LlamaForCausalLM(config).state_dict().items()}


def as_torchtitan(hf):
    """Convert a Llama to torchtitan's layout, in plain torch."""

    def pairs(weight, heads):
        halves = weight.view(heads, 2, HEAD_DIM // 2, HIDDEN)
        return halves.transpose(1, 2).reshape(heads * HEAD_DIM, HIDDEN)

    titan = {
        "tok_embeddings.weight": hf["model.embed_tokens.weight"],
        "norm.weight": hf["model.norm.weight"],
        "output.weight": hf["lm_head.weight"],
    }
    for n in range(LAYERS):
        old, new = f"model.layers.{n}", f"layers.{n}"
        titan |= {
            f"{new}.attention.wq.weight": pairs(hf[f"{old}.self_attn.q_proj.weight"], HEADS),
            f"{new}.attention.wk.weight": pairs(hf[f"{old}.self_attn.k_proj.weight"], KV_HEADS),
            f"{new}.attention.wv.weight": hf[f"{old}.self_attn.v_proj.weight"],
            f"{new}.attention.wo.weight": hf[f"{old}.self_attn.o_proj.weight"],
            f"{new}.feed_forward.w1.weight": hf[f"{old}.mlp.gate_proj.weight"],
            f"{new}.feed_forward.w2.weight": hf[f"{old}.mlp.down_proj.weight"],
            f"{new}.feed_forward.w3.weight": hf[f"{old}.mlp.up_proj.weight"],
            f"{new}.attention_norm.weight": hf[f"{old}.input_layernorm.weight"],
            f"{new}.ffn_norm.weight": hf[f"{old}.post_attention_layernorm.weight"],
        }
    return titan


def as_megatron(hf, padded=VOCAB):
    """Convert a Llama to Megatron-core's layout, in plain torch, group by group."""

    def lengthened(weight):
        return torch.cat([weight, torch.zeros(padded - VOCAB, HIDDEN)])

    megatron = {
        "embedding.word_embeddings.weight": lengthened(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": lengthened(hf["lm_head.weight"]),
    }
    for n in range(LAYERS):
        old, new = f"model.layers.{n}", f"decoder.layers.{n}"
        q, k, v = (hf[f"{old}.self_attn.{name}_proj.weight"].split(HEAD_DIM) for name in "qkv")
        per, qkv = HEADS // KV_HEADS, []
        for group in range(KV_HEADS):
            qkv += [*q[group * per : (group + 1) * per], k[group], v[group]]
        halves = [hf[f"{old}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        attention, mlp = f"{new}.self_attention", f"{new}.mlp"
        megatron |= {
            f"{attention}.linear_qkv.weight": torch.cat(qkv),
            f"{attention}.linear_proj.weight": hf[f"{old}.self_attn.o_proj.weight"],
            f"{mlp}.linear_fc1.weight": torch.cat(halves),
            f"{mlp}.linear_fc2.weight": hf[f"{old}.mlp.down_proj.weight"],
            f"{attention}.linear_qkv.layer_norm_weight": hf[f"{old}.input_layernorm.weight"],
            f"{mlp}.linear_fc1.layer_norm_weight": hf[f"{old}.post_attention_layernorm.weight"],
        }
    return megatron


def spread(tensors):
    """Plan for three ranks that hold rows, unevenly, and for one that holds all."""
    specs = {n: TensorSpec(t.shape, "float32", [Shard(0)]) for n, t in tensors.items()}
    return tuple(world_plans(specs, Mesh(dp=3)))


def assert_maps(planner, before, after):
    """A save of ``before`` through the planner is ``after``, and a load leads back."""
    arrays = {name: tensor.double().numpy() for name, tensor in before.items()}
    plans = spread(before)
    saved, metadata = global_plan(plans, planner)
    checkpoint = written(saved, arrays)
    assert checkpoint.keys() == after.keys()
    for name, tensor in after.items():
        assert checkpoint[name].shape == tuple(tensor.shape), name
        assert (checkpoint[name] == tensor.double().numpy()).all(), name
    whole = (local_plan({n: TensorSpec(t.shape, "float32") for n, t in before.items()}),)
    for plan, target in zip(
        run_pass(planner, whole) + run_pass(planner, plans), whole + plans, strict=True
    ):
        values = filled(load_plan(metadata, plan), checkpoint, target)
        for item in target.items:
            box = tuple(map(slice, item.source_chunk.offsets, item.source_chunk.ends))
            lost = any(item.source.fqn == out.source.fqn for out in plan.left_out or ())
            expected = arrays[item.source.fqn][box]
            assert lost or (values[item.source.fqn][box] == expected).all(), item.source.fqn


def test_torchtitan_and_hugging_face(hf):
    titan = as_torchtitan(hf)
    assert_maps(llama_torchtitan_to_hf(**SIZES), titan, hf)
    assert_maps(llama_hf_to_torchtitan(**SIZES), hf, titan)


def test_hugging_face_and_megatron(hf):
    megatron = as_megatron(hf)
    assert_maps(llama_hf_to_megatron(**SIZES, ffn=FFN), hf, megatron)
    assert_maps(llama_megatron_to_hf(**SIZES, ffn=FFN), megatron, hf)


def test_megatron_pads_its_vocabulary(hf):
    megatron = as_megatron(hf, padded=PADDED)
    sizes = {**SIZES, "ffn": FFN, "vocab": VOCAB, "padded_vocab": PADDED}
    assert_maps(llama_hf_to_megatron(**sizes), hf, megatron)
    assert_maps(llama_megatron_to_hf(**sizes), megatron, hf)


def test_torchtitan_and_megatron_compose(hf):
    planner = chain(llama_torchtitan_to_hf(**SIZES), llama_hf_to_megatron(**SIZES, ffn=FFN))
    assert_maps(planner, as_torchtitan(hf), as_megatron(hf))
    assert_maps(inverse(planner), as_megatron(hf), as_torchtitan(hf))


EXPERTS = 3
MOE = {"of": "*.block_sparse_moe.experts", "experts": EXPERTS}


def mixtral():
    torch.manual_seed(0)
    sizes = {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}
    return {
        f"model.layers.{n}.block_sparse_moe.experts.{e}.{name}.weight": torch.randn(size)
        for n in range(LAYERS)
        for e in range(EXPERTS)
        for name, size in sizes.items()
    }


def every(experts, layer, name):
    path = f"model.layers.{layer}.block_sparse_moe.experts"
    return torch.stack([experts[f"{path}.{e}.{name}.weight"] for e in range(EXPERTS)])


def test_experts_and_stacked_experts():
    experts, names = mixtral(), {"w1": "w1", "w2": "w2", "w3": "w3"}
    stacked = {
        f"model.layers.{n}.moe.experts.{name}": every(experts, n, name)
        for n in range(LAYERS)
        for name in names
    }
    there = experts_to_stacked(**MOE, names=names, into="*.moe.experts")
    back = stacked_to_experts(
        experts=EXPERTS, names=names, of="*.moe.experts", into="*.block_sparse_moe.experts"
    )
    assert_maps(there, experts, stacked)
    assert_maps(back, stacked, experts)


def test_experts_and_fused_experts():
    experts, fused = mixtral(), {}
    for n in range(LAYERS):
        halves = [every(experts, n, name) for name in ("w1", "w3")]
        fused[f"model.layers.{n}.mlp.experts.gate_up_proj"] = torch.cat(halves, 1)
        fused[f"model.layers.{n}.mlp.experts.down_proj"] = every(experts, n, "w2")
    names = ("w1", "w3", "w2")
    assert_maps(experts_to_fused(**MOE, ffn=FFN, names=names), experts, fused)
    back = fused_to_experts(
        experts=EXPERTS, ffn=FFN, names=names, into="*.block_sparse_moe.experts"
    )
    assert_maps(back, fused, experts)


def test_experts_on_different_ranks_are_stacked():
    experts = mixtral()
    plans = tuple(
        local_plan({n: TensorSpec(t.shape) for n, t in experts.items() if f".{e}.w" in n})
        for e in range(EXPERTS)
    )
    planner = experts_to_fused(**MOE, ffn=FFN, names=("w1", "w3", "w2"))
    saved, _ = global_plan(plans, planner)
    made = written(saved, {name: t.double().numpy() for name, t in experts.items()})
    down = every(experts, 1, "w2").double().numpy()
    assert (made["model.layers.1.mlp.experts.down_proj"] == down).all()


def test_wrong_sizes_are_refused_with_names():
    plan = local_plan({"layers.0.attention.wq.weight": TensorSpec((16, 16))})
    planner = llama_torchtitan_to_hf(**{**SIZES, "head_dim": 8}, required=False)
    with pytest.raises(PlanError, match=r"`layers.0.attention.wq.weight` has shape \[16, 16\]"):
        run_pass(planner, (plan,))
    with pytest.raises(PlanError, match="matches nothing"):
        run_pass(llama_torchtitan_to_hf(**SIZES), (plan,))


def test_pipeline_stages_map_their_own_layers(hf):
    titan = as_torchtitan(hf)
    stages = [{n: t for n, t in titan.items() if f"layers.{s}." in n} for s in range(LAYERS)]
    plans = tuple(local_plan({n: TensorSpec(t.shape) for n, t in s.items()}) for s in stages)
    done = run_pass(llama_torchtitan_to_hf(**SIZES, required=False), plans)
    names = [{item.index.fqn for item in plan.items} for plan in done]
    assert names == [{n for n in hf if f"layers.{s}." in n} for s in range(LAYERS)]
