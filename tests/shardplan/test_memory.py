"""Loads into tensors that share memory, and into tensors that have none yet."""

import warnings
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardplan
from shardplan.dist import run_ranks, solo
from shardplan.io.errors import FormatError, ValueRefusedError
from shardplan.planning import PlanError, rename

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def through_planner(sd, path, **options):
    planner = shardplan.as_torch_load_planner(options.pop("planner", None), **options)
    dcp.load(sd, storage_reader=shardplan.as_torch_storage_reader(path), planner=planner)
    return planner


LOADS = {"load": shardplan.load, "planner": through_planner}
loads = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


@contextmanager
def as_rank(rank, world):
    """Be one rank of a group in which nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Tied(nn.Module):
    """A model with an embedding that is its output layer as well, as language models have."""

    def __init__(self, scale):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(3)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(parameter.numel()).view_as(parameter)
                parameter.copy_(scale * (number + 1 + values))


@pytest.fixture
def untied(tmp_path):
    """A file as Hugging Face's tools write it: without the tied key."""
    sd = Tied(1).state_dict()
    del sd["head.weight"]
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(sd, tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf"


# Tied weights


@loads
@pytest.mark.parametrize("strict", [True, False, ("head.*", "norm.*")])
def test_a_key_that_shares_memory_with_one_that_was_filled_is_not_missing(untied, load, strict):
    model = Tied(0)
    sd = model.state_dict()
    report = load(sd, untied, strict=strict)
    assert report.tied == {"head.weight": "embed.weight"}
    assert getattr(report, "report", report).missing == ()
    assert torch.equal(model.head.weight, Tied(1).embed.weight)


def test_a_module_with_tied_weights_gets_its_state(untied):
    model = Tied(0)
    assert shardplan.load(model, untied).tied == {"head.weight": "embed.weight"}
    assert torch.equal(model.head.weight, Tied(1).head.weight)


@loads
def test_renamed_and_cast_tied_weights_are_known_by_their_names_in_the_checkpoint(tmp_path, load):
    passes = rename({"embed.weight": "e", "head.weight": "h"})
    shardplan.save({"e": Tied(1).embed.weight.detach(), "norm": 1}, tmp_path)
    model = Tied(0)
    sd = {"embed.weight": model.embed.weight, "head.weight": model.head.weight}
    assert load(sd, tmp_path, planner=passes).tied == {"h": "e"}
    assert torch.equal(model.head.weight, Tied(1).head.weight)
    shardplan.save({"e": Tied(2).embed.weight.detach().double()}, tmp_path, overwrite=True)
    load(sd, tmp_path, planner=passes, dtype="cast")
    assert torch.equal(model.head.weight, Tied(2).head.weight)


PARTLY = {
    "another shape": lambda w: w.view(15),
    "another part": lambda w: w[1:],
    "another order": lambda w: w.T,
    "another dtype": lambda w: w.view(torch.int32),
    "a copy": torch.clone,
    "no elements": lambda w: w[:0],
}


@loads
@pytest.mark.parametrize("way", PARTLY)
def test_a_key_that_shares_memory_in_another_way_is_missing(untied, load, way):
    weight = torch.zeros(5, 3)
    sd = {"embed.weight": weight, "head.weight": PARTLY[way](weight)}
    with pytest.raises((PlanError, dcp.api.CheckpointException), match=r"`head\.weight` is not in"):
        load(sd, untied)


@loads
def test_tied_weights_of_which_none_is_in_the_checkpoint_are_missing(tmp_path, load):
    shardplan.save({"x": torch.ones(2)}, tmp_path)
    with pytest.raises((PlanError, dcp.api.CheckpointException), match=r"`head\.weight` is not in"):
        load(dict(Tied(0).state_dict()), tmp_path)


def test_empty_tensors_are_not_tied(tmp_path):
    shardplan.save({"a": torch.zeros(0)}, tmp_path)
    report = shardplan.load({"a": torch.zeros(0), "b": torch.zeros(0)}, tmp_path, strict=False)
    assert report.missing == ("b",)


def test_what_is_restored_like_a_tied_target_is_tied(untied):
    got = shardplan.restore(untied, Tied(0).state_dict())
    assert got["head.weight"] is got["embed.weight"]
    assert torch.equal(got["head.weight"], Tied(1).head.weight)


def test_tied_weights_are_known_on_every_rank(untied):
    def fn(comm):
        model = Tied(0)
        report = shardplan.load(dict(model.state_dict()), untied, comm=comm)
        return report.tied, torch.equal(model.head.weight, Tied(1).head.weight)

    assert run_ranks(3, fn, timeout=60) == [({"head.weight": "embed.weight"}, True)] * 3


def test_tied_dtensors_are_known_by_their_parts(tmp_path):
    whole = torch.arange(8.0).view(4, 2)
    shardplan.save({"a": whole}, tmp_path)
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        one = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None)
        other = DTensor.from_local(one.to_local(), mesh, [Shard(0)], run_check=False)
        report = shardplan.load({"a": one, "b": other}, tmp_path, comm=solo())
        assert report.tied == {"b": "a"}
        assert torch.equal(other.to_local(), whole[2:])


# Tensors on the meta device


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


@loads
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_meta_tensors_are_replaced_by_what_was_saved(tmp_path, load, format):
    rows = torch.arange(6.0).view(2, 3)
    saved = {"m": {"w": rows}, "l": [torch.ones(2), (torch.ones(1),)], "n": 1}
    shardplan.save(saved, tmp_path, format=format)
    real = torch.zeros(2)
    sd = {"m": {"w": meta(2, 3)}, "l": [real, (meta(1),)], "n": 0}
    load(sd, tmp_path)
    assert sd["l"][0] is real
    assert (sd["m"]["w"].device.type, sd["m"]["w"].tolist()) == ("cpu", rows.tolist())
    assert (sd["l"][1][0].tolist(), real.tolist(), sd["n"]) == ([1], [1, 1], 1)


@loads
def test_meta_tensors_are_cast_renamed_and_keep_their_strides(tmp_path, load):
    shardplan.save({"x": torch.arange(6.0).view(2, 3)}, tmp_path)
    sd = {"w": meta(3, 2, dtype=torch.bfloat16).T}
    load(sd, tmp_path, planner=rename({"w": "x"}), dtype="cast")
    assert (sd["w"].dtype, sd["w"].stride()) == (torch.bfloat16, (1, 2))
    assert sd["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_dtensor_without_memory_gets_that_of_this_rank_s_part(tmp_path):
    whole = torch.arange(10.0).view(5, 2)
    shardplan.save({"w": whole}, tmp_path)
    for rank in range(3):
        with as_rank(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            rows = min(2, 5 - 2 * rank)
            part = DTensor.from_local(
                meta(rows, 2), mesh, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1)
            )
            sd = {"w": part}
            shardplan.load(sd, tmp_path, comm=solo())
            assert isinstance(sd["w"], DTensor)
            assert sd["w"].shape == (5, 2)
            assert torch.equal(sd["w"].to_local(), whole[2 * rank : 2 * rank + rows])


def test_a_rank_without_a_part_of_a_dtensor_is_not_left_with_one_on_the_meta_device(tmp_path):
    shardplan.save({"w": torch.ones(1, 2), "none": torch.empty(0, 2)}, tmp_path)
    with as_rank(2, 3):
        mesh = init_device_mesh("cpu", (3,))
        options = {"run_check": False, "shape": (1, 2), "stride": (2, 1)}
        sd = {"none": meta(0, 2)}
        for name in ("w", "missing"):
            sd[name] = DTensor.from_local(meta(0, 2), mesh, [Shard(0)], **options)
        shardplan.load(sd, tmp_path, comm=solo(), strict=False)
        assert isinstance(sd["w"], DTensor)
        found = {name: (tensor.is_meta, tensor.shape) for name, tensor in sd.items()}
    assert found == {"none": (False, (0, 2)), "w": (False, (1, 2)), "missing": (True, (1, 2))}


def test_as_torch_does_a_meta_model_is_filled_by_assigning_what_was_loaded(tmp_path):
    shardplan.save(Tied(1).state_dict(), tmp_path)
    with torch.device("meta"):
        model = Tied(0)
        sd = model.state_dict()
        shardplan.load(sd, tmp_path)
    model.load_state_dict(sd, assign=True)
    assert torch.equal(model.norm.weight, Tied(1).norm.weight)
    assert torch.equal(model.embed.weight, Tied(1).embed.weight)


def test_meta_tensors_that_share_a_storage_stay_tied(untied):
    with torch.device("meta"):
        sd = Tied(0).state_dict()
    report = shardplan.load(sd, untied)
    assert report.tied == {"head.weight": "embed.weight"}
    assert sd["head.weight"].data_ptr() == sd["embed.weight"].data_ptr()
    assert torch.equal(sd["head.weight"], Tied(1).head.weight)


def test_a_module_on_the_meta_device_is_refused_with_what_to_do(tmp_path):
    shardplan.save({"model": Tied(1).state_dict()}, tmp_path)
    with torch.device("meta"):
        model = Tied(0)
    way = r"`model.norm.weight` is on the meta device in a Tied.*to_empty.*assign=True"
    with pytest.raises(ValueRefusedError, match=way):
        shardplan.load({"model": model}, tmp_path)
    model.to_empty(device="cpu")
    shardplan.load({"model": model}, tmp_path)
    assert torch.equal(model.norm.weight, Tied(1).norm.weight)


@loads
def test_what_is_missing_stays_on_the_meta_device(tmp_path, load):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    sd = {"w": meta(2), "v": meta(2)}
    with pytest.raises((PlanError, dcp.api.CheckpointException), match="`v` is not in"):
        load(sd, tmp_path)
    assert sd["w"].is_meta
    load(sd, tmp_path, strict=False)
    assert (sd["w"].tolist(), sd["v"].is_meta) == ([1, 1], True)


@loads
def test_a_meta_tensor_that_would_be_filled_in_part_is_refused(tmp_path, load):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    sd = {"w": meta(3)}
    errors = (ValueRefusedError, dcp.api.CheckpointException)
    with pytest.raises(errors, match=r"`w` is on the meta device.* only a part"):
        load(sd, tmp_path, shape="overlap")
    assert sd["w"].is_meta
    full = {"w": torch.zeros(3)}
    load(full, tmp_path, shape="overlap")
    assert full["w"].tolist() == [1, 1, 0]


def test_a_load_that_fails_leaves_meta_tensors_as_they_are(tmp_path):
    shardplan.save({"w": torch.arange(1000.0), "v": torch.ones(2)}, tmp_path)
    (file,) = [f for f in tmp_path.iterdir() if f.suffix == ".safetensors"]
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    data[-4008] ^= 1
    file.write_bytes(data)
    sd = {"w": meta(1000), "v": meta(2)}
    with pytest.raises(FormatError):
        shardplan.load(sd, tmp_path)
    assert sd["w"].is_meta
    assert sd["v"].is_meta


def test_ranks_that_read_for_each_other_fill_meta_tensors(tmp_path):
    shardplan.save({"w": torch.arange(64.0)}, tmp_path)

    def fn(comm):
        sd = {"w": meta(64)}
        shardplan.load(sd, tmp_path, comm=comm, share_reads=True)
        return torch.equal(sd["w"], torch.arange(64.0))

    assert run_ranks(3, fn, timeout=60) == [True] * 3


# Containers that the checkpoint keeps whole


@loads
def test_containers_that_a_planner_did_not_flatten_are_replaced_whole(tmp_path, load):
    sd = {"w": torch.ones(2), "extra": {"step": 7, "deep": {"lr": [0.1]}}, "empty": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(sd, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    got = {"w": torch.zeros(2), "extra": {"step": 0, "deep": {"lr": []}}, "empty": {}}
    load(got, tmp_path)
    assert got["extra"] == sd["extra"]
    assert shardplan.restore(tmp_path, got)["extra"] == sd["extra"]


@loads
def test_a_container_with_tensors_is_never_replaced_whole(tmp_path, load):
    sd = {"model": {"w": torch.ones(2), "n": 1}}
    dcp.save(sd, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises((PlanError, dcp.api.CheckpointException), match=r"`model\.w` is not in"):
        load({"model": {"w": torch.zeros(2), "n": 0}}, tmp_path)
