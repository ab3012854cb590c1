"""Checkpoints of transformers' models load into other layouts through shipped mappings, and back.

The logits are those of transformers' own model.
"""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import shardplan
from shardplan.dist import run_ranks
from shardplan.planning import chain, rename
from shardplan.planning.mappings import fused_to_experts, llama_torchtitan_to_hf

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 2, 4, 2, 8, 32, 64
TOKENS = torch.arange(24).reshape(2, 12) * 7 % VOCAB


# A Llama in torchtitan's layout: heads whose rows lie in pairs, rotated as complex numbers


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, rotation):
        batch, length, _ = x.shape

        def heads(linear, count):
            return linear(x).view(batch, length, count, HEAD_DIM)

        def rotated(part):
            pairs = torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * rotation[None, :, None]).flatten(3)

        q, k = rotated(heads(self.wq, HEADS)), rotated(heads(self.wk, KV_HEADS))
        q, k, v = (part.transpose(1, 2) for part in (q, k, heads(self.wv, KV_HEADS)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(HIDDEN, eps=eps) for _ in range(2))

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(n): Block(eps) for n in range(LAYERS)})
        self.norm = nn.RMSNorm(HIDDEN, eps=eps)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, theta):
        steps = torch.arange(tokens.shape[1]).float()
        turns = theta ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        rotation = torch.polar(torch.tensor(1.0), torch.outer(steps, turns))
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, rotation)
        return self.output(self.norm(x))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of transformers with random weights, and the folder that it was saved to."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    return saved(config, tmp_path_factory.mktemp("llama"))


def saved(config, folder):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model, folder


def theta_of(config):
    return config.rope_parameters["rope_theta"]


@pytest.fixture
def to_hf():
    return llama_torchtitan_to_hf(
        layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, hidden=HIDDEN
    )


def logits_of(model, *more):
    with torch.no_grad():
        out = model(TOKENS, *more)
    return out if isinstance(out, torch.Tensor) else out.logits


def test_a_llama_of_transformers_gives_its_logits_in_torchtitans_layout(llama, to_hf):
    model, folder = llama
    titan = Titan(model.config.rms_norm_eps)
    shardplan.load(titan.state_dict(), folder, planner=to_hf)
    torch.testing.assert_close(logits_of(titan, theta_of(model.config)), logits_of(model))


def test_what_torchtitans_layout_saves_transformers_loads_bit_by_bit(llama, to_hf, tmp_path):
    model, folder = llama
    titan = Titan(model.config.rms_norm_eps)
    shardplan.load(titan.state_dict(), folder, planner=to_hf)
    shardplan.save(titan.state_dict(), tmp_path / "back", format="hf", planner=to_hf)
    shutil.copy(folder / "config.json", tmp_path / "back")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(logits_of(model), logits_of(again))


def test_converting_the_layout_is_the_same_as_loading_and_saving(llama, to_hf, tmp_path):
    model, folder = llama
    titan = Titan(model.config.rms_norm_eps)
    shardplan.load(titan.state_dict(), folder, planner=to_hf)
    shardplan.save(titan.state_dict(), tmp_path / "titan")
    shardplan.convert(tmp_path / "titan", tmp_path / "hf", format="hf", planner=to_hf)
    converted = shardplan.restore(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, converted[name]), name


def test_ranks_that_cut_the_model_unevenly_load_it_as_one_does(llama, to_hf):
    model, folder = llama
    whole = Titan(model.config.rms_norm_eps).state_dict()
    shardplan.load(whole, folder, planner=to_hf)

    def fn(comm):
        parts = {n: part_of(t, comm.rank) for n, t in Titan(1e-5).state_dict().items()}
        shardplan.load(parts, folder, planner=to_hf, comm=comm)
        return {name: part.local for name, part in parts.items()}

    for rank, local in enumerate(run_ranks(3, fn, timeout=120)):
        for name, tensor in whole.items():
            assert torch.equal(local[name], part_of(tensor, rank).local), (rank, name)


class Rows:
    """Some rows of a tensor, as three ranks may hold them: 5/8, 3/8 and none."""

    def __init__(self, tensor, start, stop):
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, False
        self.start, self.local = start, tensor[start:stop].clone()

    def __create_chunk_list__(self):
        from shardplan.planning import Chunk

        offsets = [self.start, *[0] * (self.local.ndim - 1)]
        return [Chunk(offsets, self.local.shape)] if self.local.numel() else []

    def __get_tensor_shard__(self, index):
        return self.local


def part_of(tensor, rank):
    cut = len(tensor) * 5 // 8
    return Rows(tensor, *[(0, cut), (cut, len(tensor)), (len(tensor), len(tensor))][rank])


# A mixture of experts: its module holds all experts in one tensor, its files one for each


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    torch.manual_seed(1)
    config = MixtralConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_local_experts=4,
        vocab_size=VOCAB,
    )
    return saved(config, tmp_path_factory.mktemp("mixtral"))


MIXTRAL = chain(
    rename([(r"\.mlp\.gate\.", ".block_sparse_moe.gate.")]),
    fused_to_experts(
        experts=4,
        ffn=24,
        of="*.mlp.experts",
        into="*.block_sparse_moe.experts",
        names=("w1", "w3", "w2"),
    ),
)


def test_experts_of_single_files_load_into_stacked_and_fused_tensors(mixtral):
    model, folder = mixtral
    blank = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    shardplan.load(blank.state_dict(), folder, planner=MIXTRAL)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, blank.state_dict()[name]), name
    assert torch.equal(logits_of(model), logits_of(blank))


def test_stacked_and_fused_experts_are_saved_one_by_one(mixtral, tmp_path):
    model, folder = mixtral
    shardplan.save(model.state_dict(), tmp_path / "back", format="hf", planner=MIXTRAL)
    theirs, ours = shardplan.restore(folder), shardplan.restore(tmp_path / "back")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    shutil.copy(folder / "config.json", tmp_path / "back")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(logits_of(model), logits_of(again))
