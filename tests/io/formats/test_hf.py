"""Hugging Face checkpoints: read as their tools wrote them, written as their tools read them."""

import itertools
import json
import logging
import os
import struct
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import shardplan
from shardplan.io import ExistsError, FormatError, ValueRefusedError, open_store
from shardplan.io.errors import UnsureCommitError
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.headers import TORCH_NAMES
from shardplan.io.formats.hf.write import HfWriter
from shardplan.io.formats.registry import detect, open_source
from shardplan.io.stores.testing import FaultyStore, InjectedError
from shardplan.planning import Mesh, RefusedError, Shard, TensorSpec, global_plan, world_plans
from shardplan.planning.storage import (
    Shards,
    assign_shards,
    number_shards,
    parse_size,
    shard_plans,
    shards_of,
)

INDEX = "model.safetensors.index.json"


def tensors():
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(20, 8),
        "layer.0.bias": torch.randn(5).bfloat16(),
        "layer.0.weight": torch.randn(5, 8, dtype=torch.float64),
        "layer.0.count": torch.tensor(7),
        "layer.0.none": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
    }


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def write_raw(path, table, data=b""):
    """A safetensors file with any header at all."""
    text = json.dumps(table).encode() if not isinstance(table, bytes) else table
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def save_sharded(folder, parts, index=None, suffix=""):
    """Files as transformers writes them, with their index."""
    weights = {}
    for number, part in enumerate(parts):
        file = f"model{suffix}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weights |= dict.fromkeys(part, file)
    table = {"metadata": {"total_size": 0}, "weight_map": weights if index is None else index}
    (folder / f"model{suffix}.safetensors.index.json").write_text(json.dumps(table))


# ---- reading


def test_a_single_file_is_read_as_folder_and_as_file(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    assert detect(open_store(tmp_path)) == "hf"
    same(shardplan.restore(tmp_path), tensors())
    same(shardplan.restore(tmp_path / "model.safetensors"), tensors())
    assert shardplan.open_checkpoint(tmp_path)["embed.weight"][3:5, 1].shape == (2,)


def test_any_single_file_is_read_whatever_its_name(tmp_path):
    save_file(tensors(), tmp_path / "adapter.v2.safetensors")
    same(shardplan.restore(tmp_path / "adapter.v2.safetensors"), tensors())
    same(shardplan.restore(tmp_path), tensors())


@pytest.mark.parametrize("suffix", ["", ".fp16"])
def test_files_with_an_index_are_read(tmp_path, suffix):
    sd = tensors()
    names = list(sd)
    save_sharded(
        tmp_path, [{n: sd[n] for n in names[:2]}, {n: sd[n] for n in names[2:]}], None, suffix
    )
    same(shardplan.restore(tmp_path), sd)
    same(shardplan.restore(tmp_path / f"model{suffix}.safetensors.index.json"), sd)


def test_an_index_says_which_files_count(tmp_path):
    sd = tensors()
    save_sharded(tmp_path, [sd])
    save_file(sd, tmp_path / "consolidated.safetensors")
    same(shardplan.restore(tmp_path), sd)


def test_model_safetensors_counts_before_an_index_as_in_transformers(tmp_path):
    save_sharded(tmp_path, [{"old": torch.ones(1)}, {"older": torch.ones(1)}])
    save_file(tensors(), tmp_path / "model.safetensors")
    same(shardplan.restore(tmp_path), tensors())


def test_of_several_indices_one_must_be_chosen(tmp_path):
    save_sharded(tmp_path, [{"a": torch.ones(1)}], None, ".fp16")
    save_sharded(tmp_path, [{"a": torch.zeros(1)}], None, ".fp32")
    with pytest.raises(FormatError, match=r"several models.*fp16.*fp32"):
        shardplan.restore(tmp_path)
    assert shardplan.restore(tmp_path / "model.fp32.safetensors.index.json")["a"] == 0


def test_a_folder_without_index_is_read_whole(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    same(shardplan.restore(tmp_path), {"a": torch.ones(2), "b": torch.ones(3)})


def test_what_torch_saves_as_hf_is_read(tmp_path):
    sd = {"w": torch.randn(6, 4), "b": torch.arange(5)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=False)
    dcp.save(sd, storage_writer=writer, no_dist=True)
    same(shardplan.restore(tmp_path), sd)


def test_what_torch_saves_as_sharded_hf_is_read(tmp_path):
    sd = {"w": torch.randn(6, 4), "b": torch.arange(5)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(sd, storage_writer=writer, no_dist=True)
    assert any(name.startswith("shard-") for name in os.listdir(tmp_path))
    same(shardplan.restore(tmp_path), sd)


def chunk_file(path, name, tensor, offsets):
    info = json.dumps({name: {"saved_offsets": list(offsets)}})
    save_file({name: tensor.contiguous()}, path, metadata={"DCP_SHARDING_INFO": info})


def test_chunks_of_one_tensor_in_many_files_are_one_tensor(tmp_path):
    w = torch.arange(60.0).reshape(10, 6)
    for number, (row, column) in enumerate([(0, 0), (0, 4), (7, 0), (7, 4)]):
        part = w[row : 7 if row == 0 else 10, column : 4 if column == 0 else 6]
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        chunk_file(tmp_path / name, "w", part, (row, column))
    assert torch.equal(shardplan.restore(tmp_path)["w"], w)
    assert shardplan.open_checkpoint(tmp_path).metadata.state_dict_metadata["w"].size == (10, 6)


def test_reading_needs_no_torch(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    code = (
        "import sys; from shardplan.io.formats.registry import open_source; "
        "s = open_source(sys.argv[1]); s.find_chunks([('mask', 0)]); "
        "print(len(s.metadata.state_dict_metadata), 'torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == ["6", "False"]


def test_tied_weights_that_safetensors_stored_once_are_read_under_both_names(tmp_path, caplog):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(4, 4, bias=False)
            self.head = torch.nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

    module = Tied()
    save_model(module, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "shardplan"):
        found = shardplan.restore(tmp_path)
    assert torch.equal(found["head.weight"], module.embed.weight)
    assert torch.equal(found["embed.weight"], module.embed.weight)
    assert "tied weights" in caplog.text


def test_a_remark_that_happens_to_name_a_tensor_invents_none(tmp_path):
    sd = {"w": torch.ones(2), "unet": torch.ones(1)}
    remarks = {"format": "pt", "base_model": "unet"}
    save_file(sd, tmp_path / "x.safetensors", metadata=remarks)
    same(shardplan.restore(tmp_path / "x.safetensors"), sd)
    report = shardplan.convert(tmp_path / "x.safetensors", tmp_path / "out", format="hf")
    assert report.tied == {}
    same(shardplan.restore(tmp_path / "out"), sd)


def test_a_name_of_the_index_that_a_header_ties_is_read(tmp_path):
    file = "model-00001-of-00001.safetensors"
    save_sharded(tmp_path, [{"w": torch.ones(2)}], {"w": file, "alias": file})
    save_file({"w": torch.ones(2)}, tmp_path / file, metadata={"alias": "w"})
    same(shardplan.restore(tmp_path), {"w": torch.ones(2), "alias": torch.ones(2)})


@pytest.mark.parametrize("limit", [None, 8])
def test_what_people_noted_in_a_file_is_carried_over(tmp_path, limit):
    w = torch.ones(2)
    noted = {"format": "mlx", "modelspec.title": "my lora", "head.weight": "embed.weight"}
    save_file({"embed.weight": w, "v": w.clone()}, tmp_path / "m.safetensors", metadata=noted)
    report = shardplan.convert(
        tmp_path / "m.safetensors", tmp_path / "b", format="hf", max_shard_size=limit
    )
    assert report.tied == {"head.weight": "embed.weight"}
    files = [name for name in os.listdir(tmp_path / "b") if name.endswith(".safetensors")]
    assert len(files) == (2 if limit else 1)
    for name in files:
        with safe_open(tmp_path / "b" / name, "pt") as opened:
            found = opened.metadata()
            assert found.items() >= {"format": "mlx", "modelspec.title": "my lora"}.items()
            assert ("head.weight" in found) == ("embed.weight" in opened.keys())  # noqa: SIM118
    same(shardplan.restore(tmp_path / "b"), {"embed.weight": w, "head.weight": w, "v": w})


def test_names_of_an_index_that_a_tying_model_lacks_are_left_out_with_a_warning(tmp_path, caplog):
    sd = {"embed.weight": torch.ones(2)}
    file = "model-00001-of-00001.safetensors"
    save_sharded(tmp_path, [sd], {"embed.weight": file, "lm_head.weight": file})
    with pytest.raises(FormatError, match=r"00001.*`lm_head.weight`"):
        shardplan.restore(tmp_path)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with caplog.at_level(logging.WARNING, "shardplan"):
        same(shardplan.restore(tmp_path), sd)
    assert "lm_head.weight" in caplog.text
    report = shardplan.convert(tmp_path, tmp_path / "out")
    assert "lm_head.weight" in repr(report)


# ---- bad input


def bad(folder, match):
    with pytest.raises(FormatError, match=match):
        open_source(folder)


@pytest.mark.parametrize(
    "target",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        7,
        None,
        "model.bin",
        "",
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path, target):
    save_file({"a": torch.ones(1)}, tmp_path.parent / "secret.safetensors")
    save_sharded(tmp_path, [{"a": torch.ones(1)}], {"a": target})
    bad(tmp_path, rf"{INDEX}: it has `a` in")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 9999, "\x00"]
)
def test_a_damaged_index_is_refused(tmp_path, text):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(text)
    bad(tmp_path, INDEX)


def test_an_index_that_names_a_missing_file_or_key_is_refused(tmp_path):
    file = "model-00001-of-00001.safetensors"
    save_sharded(tmp_path, [{"a": torch.ones(1)}], {"a": "model-00009-of-00009.safetensors"})
    bad(tmp_path, r"model-00009-of-00009.safetensors: it is missing")
    save_sharded(tmp_path, [{"a": torch.ones(1)}], {"a": file, "b": file})
    bad(tmp_path, r"model-00001-of-00001.safetensors: it does not hold `b`")


def test_an_unknown_dtype_is_reported_by_file_and_key(tmp_path):
    table = {"w": {"dtype": "Q3", "shape": [1], "data_offsets": [0, 1]}}
    write_raw(tmp_path / "model.safetensors", table, b"\0")
    bad(tmp_path, r"model.safetensors: .*`w`.*Q3")


@pytest.mark.parametrize("length", [0, 4, 8, 40])
def test_a_file_that_was_cut_short_is_refused(tmp_path, length):
    save_file(tensors(), tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:length])
    bad(tmp_path, "model.safetensors")


@given(st.binary(max_size=60), st.integers(0, 400))
def test_no_damage_to_a_header_raises_anything_but_a_format_error(tmp_path_factory, junk, at):
    folder = tmp_path_factory.mktemp("hf")
    save_file(tensors(), folder / "model.safetensors")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[at : at + len(junk)] = junk
    (folder / "model.safetensors").write_bytes(data)
    with suppress(FormatError):
        open_source(folder)


def test_the_same_key_in_two_files_is_refused(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "two.safetensors")
    bad(tmp_path, r"two.safetensors: its `w` overlaps that of one.safetensors")


def test_overlapping_and_missing_chunks_are_refused(tmp_path):
    chunk_file(tmp_path / "a.safetensors", "w", torch.ones(4), (0,))
    chunk_file(tmp_path / "b.safetensors", "w", torch.ones(4), (3,))
    bad(tmp_path, r"b.safetensors: its `w` overlaps that of a.safetensors")
    chunk_file(tmp_path / "b.safetensors", "w", torch.ones(4), (5,))
    bad(tmp_path, r"a.safetensors, b.safetensors: .*`w`.*is a file missing")
    chunk_file(tmp_path / "b.safetensors", "w", torch.ones(4).double(), (4,))
    bad(tmp_path, r"b.safetensors: its `w` is float64")


def test_a_folder_that_lacks_a_numbered_file_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00003.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-00003-of-00003.safetensors")
    bad(tmp_path, "model-00002-of-00003.safetensors: it is missing")


def test_files_of_a_killed_native_save_are_no_checkpoint(tmp_path):
    shardplan.save(tensors(), tmp_path)
    (file,) = [name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]
    os.unlink(tmp_path / "shardplan.json")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(FormatError, match="no checkpoint"):
            open_source(path)


# ---- writing


def hf_index(folder):
    """Read a folder the way transformers does: the single file, or those of the index."""
    if os.path.exists(folder / "model.safetensors"):
        files = {"model.safetensors"}
        weights = None
    else:
        table = json.loads((folder / INDEX).read_text())
        weights = table["weight_map"]
        files = set(weights.values())
    found = {}
    for file in sorted(files):
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for key in opened.keys():  # noqa: SIM118
                assert weights is None or weights[key] == file
                found[key] = opened.get_tensor(key)
    return found


def test_a_small_model_becomes_one_file(tmp_path):
    report = shardplan.save(tensors(), tmp_path / "m", format="hf")
    assert os.listdir(tmp_path / "m") == ["model.safetensors"]
    same(hf_index(tmp_path / "m"), tensors())
    same(load_file(tmp_path / "m/model.safetensors"), tensors())
    same(shardplan.restore(tmp_path / "m"), tensors())
    assert report.files == 1


def test_a_large_model_becomes_numbered_files_with_an_index(tmp_path):
    shardplan.save(tensors(), tmp_path / "a")
    report = shardplan.convert(tmp_path / "a", tmp_path / "b", format="hf", max_shard_size=400)
    names = sorted(os.listdir(tmp_path / "b"))
    assert names[0].startswith("model-00001-of-0000")
    assert names[-1] == INDEX
    assert report.files == len(names) - 1 == 2
    same(hf_index(tmp_path / "b"), tensors())
    same(shardplan.restore(tmp_path / "b"), tensors())
    table = json.loads((tmp_path / "b" / INDEX).read_text())
    assert table["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
    for name in names[:-1]:
        assert sum(t.nbytes for t in load_file(tmp_path / "b" / name).values()) <= 640


def test_torch_reads_what_is_written(tmp_path):
    shardplan.save(tensors(), tmp_path / "a")
    shardplan.convert(tmp_path / "a", tmp_path / "b", format="hf", max_shard_size=400)
    sd = {name: torch.zeros_like(t) for name, t in tensors().items()}
    dcp.load(sd, storage_reader=HuggingFaceStorageReader(str(tmp_path / "b")), no_dist=True)
    same(sd, tensors())


def test_a_conversion_equals_what_torch_consolidates(tmp_path):
    sd = {f"w{i}": torch.randn(9, 6) for i in range(4)}
    shardplan.save(sd, tmp_path / "a")
    shardplan.convert(
        tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=2, tp=2), placements=[Shard(0), Shard(1)]
    )
    os.mkdir(tmp_path / "theirs")
    mapping = {name: 1 + i // 2 for i, name in enumerate(sd)}
    consolidate_safetensors_files(str(tmp_path / "b"), str(tmp_path / "theirs"), mapping)
    shardplan.convert(tmp_path / "b", tmp_path / "ours", format="hf", max_shard_size=2 * 9 * 6 * 4)
    theirs, ours = (
        {f: load_file(tmp_path / x / f) for f in sorted(os.listdir(tmp_path / x)) if f != INDEX}
        for x in ("theirs", "ours")
    )
    assert list(theirs) == list(ours)
    for file in theirs:
        same(ours[file], theirs[file])
    same(shardplan.restore(tmp_path / "theirs"), sd)


@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES.values()))
def test_every_dtype_of_safetensors_is_carried(tmp_path, dtype):
    bits = (
        torch.randint(0, 2, (16,), dtype=torch.uint8)
        if dtype == "bool"
        else (torch.arange(64, dtype=torch.uint8))
    )
    tensor = bits.view(getattr(torch, dtype))
    shardplan.save({"w": tensor}, tmp_path, format="hf")
    for found in (load_file(tmp_path / "model.safetensors")["w"], shardplan.restore(tmp_path)["w"]):
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_what_hf_cannot_carry_is_refused_by_name(tmp_path):
    sd = {"w": torch.ones(2), "step": 7, "z": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(ValueRefusedError) as caught:
        shardplan.save(sd, tmp_path / "m", format="hf")
    assert set(caught.value.reasons) == {"step", "z"}
    assert not os.path.exists(tmp_path / "m")


def test_values_can_be_left_out(tmp_path):
    writer = HfWriter(leave_out=True)
    plans, metadata = global_plan([shardplan.planning.local_plan({"w": torch.ones(2), "step": 7})])
    store = open_store(tmp_path)
    part = writer.write(
        WriteJob(store, {"w": torch.ones(2), "step": 7}, plans[0], save_id="ab", rank=0)
    )
    writer.commit(CommitJob(store, metadata, plans, [part.report], save_id="ab", overwrite=False))
    same(shardplan.restore(tmp_path), {"w": torch.ones(2)})


def test_nested_keys_are_joined_with_dots(tmp_path):
    shardplan.save({"model": {"layers": [{"w": torch.ones(2)}]}}, tmp_path, format="hf")
    assert list(load_file(tmp_path / "model.safetensors")) == ["model.layers.0.w"]


def test_tied_weights_are_stored_once_and_come_back_twice(tmp_path):
    w = torch.randn(4, 4)
    sd = {"embed.weight": w, "alias": w, "part": w[:2], "turned": w.t()}
    shardplan.save(sd, tmp_path / "a", format="hf")
    stored = load_file(tmp_path / "a/model.safetensors")
    assert sorted(stored) == ["embed.weight", "part", "turned"]  # the first of the state dict stays
    same(shardplan.restore(tmp_path / "a"), sd)
    report = shardplan.convert(tmp_path / "a", tmp_path / "b", format="hf", max_shard_size=64)
    assert report.tied == {"alias": "embed.weight"}
    assert "alias" not in json.loads((tmp_path / "b" / INDEX).read_text())["weight_map"]
    same(shardplan.restore(tmp_path / "b"), sd)


@pytest.mark.parametrize("way", ["save", "convert"])
def test_a_tensor_called_as_a_word_of_the_header_is_not_a_tie(tmp_path, way):
    w = torch.ones(2)
    sd = {"pt": w, "format": w, "shardplan": w}
    if way == "save":
        shardplan.save(sd, tmp_path / "b", format="hf")
    else:
        torch.save(sd, tmp_path / "x.pt")
        report = shardplan.convert(tmp_path / "x.pt", tmp_path / "b", format="hf")
        assert report.tied == {"pt": "format"}  # whose own name no header can tie to another
    same(shardplan.restore(tmp_path / "b"), sd)
    save_file({"pt": w}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    same(shardplan.restore(tmp_path / "x.safetensors"), {"pt": w})


def test_an_empty_state_dict_is_a_file_too(tmp_path):
    shardplan.save({}, tmp_path, format="hf")
    assert shardplan.restore(tmp_path) == {}


def test_sharded_tensors_are_refused_and_convert_is_named(tmp_path):
    specs = {"w": TensorSpec((4, 2), "float32", [Shard(0)])}
    plans, _ = global_plan(world_plans(specs, Mesh(dp=2)))
    for rank in (0, 1):
        with pytest.raises(RefusedError, match=r"`w`.*convert"):
            HfWriter().write(
                WriteJob(open_store(tmp_path), {}, plans[rank], save_id="a", rank=rank)
            )
    with pytest.raises(RefusedError, match=r"`w`.*convert"):
        number_shards(plans, 100)


def test_ranks_with_whole_tensors_write_one_checkpoint(tmp_path):
    store, writer = open_store(tmp_path), HfWriter()
    parts = [{"a": torch.ones(2)}, {"b": torch.ones(3), "c": torch.ones(1)}]
    local = [shardplan.planning.local_plan(sd) for sd in parts]
    plans, metadata = global_plan(local)
    plans = number_shards(plans, writer.max_shard_size)
    reports = [
        writer.write(WriteJob(store, sd, plan, save_id="ab", rank=rank)).report
        for rank, (sd, plan) in enumerate(zip(parts, plans, strict=True))
    ]
    writer.commit(CommitJob(store, metadata, plans, reports, save_id="ab", overwrite=False))
    assert sorted(os.listdir(tmp_path))[:2] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    same(shardplan.restore(tmp_path), parts[0] | parts[1])


# ---- commit


def test_a_checkpoint_is_not_replaced_unasked(tmp_path):
    shardplan.save(tensors(), tmp_path / "m", format="hf")
    with pytest.raises(ExistsError):
        shardplan.save({"w": torch.ones(1)}, tmp_path / "m", format="hf")
    same(shardplan.restore(tmp_path / "m"), tensors())


def test_a_folder_named_as_a_file_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        shardplan.save(tensors(), tmp_path / "model.safetensors", format="hf")


OLD, NEW = (
    {"old": torch.ones(30), "w": torch.zeros(30)},
    {"new": torch.ones(40), "w": torch.ones(40)},
)


def put(store, sd, files, **options):
    """Save as so many files."""
    limit = 1 << 30 if files == 1 else 4 * max(t.numel() for t in sd.values())
    writer = HfWriter(max_shard_size=limit)
    plans, metadata = global_plan([shardplan.planning.local_plan(sd)])
    writer.refuse(store, **options)
    save_id = os.urandom(3).hex()
    part = writer.write(WriteJob(store, sd, plans[0], save_id=save_id, rank=0))
    return writer.commit(
        CommitJob(store, metadata, plans, [part.report], save_id=save_id, **options)
    )


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("landed", [0, 0.5, 1])
def test_at_every_kill_point_the_old_or_the_new_one_loads(tmp_path, before, after, where, landed):
    def fresh(step):
        url = str(tmp_path / f"s{step}") if where == "local" else f"memory://{tmp_path.name}/{step}"
        store = open_store(url)
        put(store, OLD, before, overwrite=False)
        return store

    counting = FaultyStore(fresh("count"))
    put(counting, NEW, after, overwrite=True)
    for step in range(counting.changes):
        store = fresh(step)
        faulty = FaultyStore(store, fail_at=step, mode="stop", landed=landed)
        with suppress(
            InjectedError, UnsureCommitError
        ):  # what cannot be removed is told, not raised
            put(faulty, NEW, after, overwrite=True)
        found = shardplan.restore(store)
        assert set(found) in ({"old", "w"}, {"new", "w"})
        same(found, NEW if "new" in found else OLD)
        put(store, NEW, after, overwrite=True)
        same(shardplan.restore(store), NEW)
        names = store.list()
        expected = {"model.safetensors"} if after == 1 else {INDEX}
        assert expected <= set(names)
        assert len(names) == (1 if after == 1 else 3), names


def test_an_older_index_and_its_files_go_when_a_single_file_takes_their_place(tmp_path):
    save_sharded(tmp_path, [{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    put(open_store(tmp_path), NEW, 1, overwrite=True)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_files_are_kept_when_nobody_knows_whether_the_index_came(tmp_path):
    shardplan.save(OLD, tmp_path / "a")
    counting = FaultyStore(open_store(tmp_path / "count"))
    options = {"format": "hf", "max_shard_size": 120}
    shardplan.convert(tmp_path / "a", counting, **options)
    store = open_store(tmp_path / "b")
    lost = [FaultyStore(store, fail_at=step, landed=1) for step in range(counting.changes)]
    unsure = 0
    for faulty in lost:
        with suppress(InjectedError):
            try:
                shardplan.convert(tmp_path / "a", faulty, overwrite=True, **options)
            except UnsureCommitError:
                unsure += 1
                same(shardplan.restore(store), OLD)
    assert unsure == 1


def test_a_killed_save_is_not_a_checkpoint_and_does_not_hinder_the_next(tmp_path):
    store = open_store(tmp_path)
    faulty = FaultyStore(store, fail_at=1, mode="stop")
    with pytest.raises(InjectedError):
        put(faulty, OLD, 2, overwrite=False)
    assert store.list()
    with pytest.raises(FormatError, match="no checkpoint"):
        open_source(store)
    put(store, NEW, 2, overwrite=False)
    same(shardplan.restore(store), NEW)
    assert len(store.list()) == 3


def test_a_save_killed_before_its_index_is_not_a_checkpoint(tmp_path):
    store = open_store(tmp_path)
    put(store, OLD, 2, overwrite=False)
    store.delete([INDEX])
    with pytest.raises(FormatError, match="no checkpoint"):
        open_source(store)
    put(store, NEW, 1, overwrite=False)
    assert store.list() == ("model.safetensors",)


def test_a_folder_of_a_killed_save_and_other_files_shows_the_others(tmp_path):
    store = open_store(tmp_path)
    put(store, OLD, 2, overwrite=False)
    store.delete([INDEX])
    save_file(NEW, tmp_path / "theirs.safetensors")
    same(shardplan.restore(tmp_path), NEW)


# ---- sizes


def test_sizes_are_written_as_hugging_face_writes_them():
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size("2 GiB") == 2 << 30
    assert parse_size("300") == 300
    for wrong in ("", "five", "-1GB", "5XB", 0, -3):
        with pytest.raises(ValueError, match=r"size|byte"):
            parse_size(wrong)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 40), st.data())
def test_every_tensor_is_in_the_one_plan_of_its_file_but_tied_ones_in_none(sizes, limit, data):
    specs = {f"t{i:02d}": TensorSpec((n,), "int8") for i, n in enumerate(sizes)}
    names = list(specs)
    tied = {n: names[0] for n in names[1:] if data.draw(st.booleans())}
    whole = shardplan.planning.local_plan(specs)
    plans = shard_plans(whole, limit, tied)
    written = [[item.index.fqn for item in plan.items] for plan in plans]
    assert [n for file in written for n in file] == [n for n in names if n not in tied]
    assert [shards_of(plan) for plan in plans] == [
        Shards(number, len(plans), (tuple(file),)) for number, file in enumerate(written)
    ]
    held = {name: sizes[number] for number, name in enumerate(names)}
    for file, after in itertools.pairwise(written):  # a file is full before the next one begins
        assert sum(held[n] for n in file) + held[after[0]] > limit


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_no_file_is_too_large_and_all_tensors_are_in_one(sizes, limit):
    mine = {f"t{i:02d}": n for i, n in enumerate(sizes)}
    (shards,) = assign_shards([mine], limit)
    assert [name for file in shards.names for name in file] == list(mine)
    assert shards.count == len(shards.names) >= 1
    for file in shards.names:
        assert sum(mine[n] for n in file) <= limit or sum(mine[n] > 0 for n in file) == 1
