"""Checkpoints of Megatron-core: what it wrote is read, and nothing of it is run."""

import argparse
import io
import pickle
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint import planner

import shardplan
from shardplan.io.errors import ExistsError, FormatError
from shardplan.io.formats.dcp.metadata import parse_metadata
from shardplan.planning import Mesh, drop

GOLDEN = Path(__file__).parents[2] / "golden" / "mcore"
MODULE = "megatron.core.dist_checkpointing.strategies.torch"
WHOLE = {
    "embedding.weight": torch.arange(12.0).reshape(4, 3),
    "decoder.layers.weight": torch.arange(8.0).reshape(2, 2, 2),
    "norm.weight": torch.arange(3.0).bfloat16(),
}
ARGS = argparse.Namespace(
    lr=0.1,
    params_dtype=torch.bfloat16,
    model_type=1,
    exit_signal=signal.SIGTERM,
    save="/checkpoints",
)


@pytest.fixture
def golden(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def same(path):
    """Return whether a checkpoint holds the golden one's tensors."""
    found = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    shardplan.load(found, path)
    return all(torch.equal(found[name], tensor) for name, tensor in WHOLE.items())


def test_a_checkpoint_opens_with_its_common_values_and_those_of_each_rank():
    found = shardplan.open_checkpoint(GOLDEN)
    assert set(found) == {
        *WHOLE,
        *("rng_state/shard_0_2", "rng_state/shard_1_2"),
        *("iteration", "args", "scheduler.max_lr", "scheduler.steps", "config"),
    }
    assert found["iteration"] == 5
    assert found["args"] == ARGS
    for rank in (0, 1):
        (((value,),),) = (found[f"rng_state/shard_{rank}_2"],)
        assert value["rank"] == rank
        assert torch.equal(value["cpu"], torch.arange(4) + rank)
    assert same(GOLDEN)
    assert torch.equal(found["decoder.layers.weight"][1:, 0], WHOLE["decoder.layers.weight"][1:, 0])


def test_a_value_that_is_not_admitted_is_named_and_refused_only_when_it_is_asked_for():
    found = shardplan.open_checkpoint(GOLDEN)
    reason = r"common\.pt: `config` needs `megatron\..*add_safe_glob.*drop\('config'\)"
    with pytest.raises(FormatError, match=reason):
        found["config"]
    restored = shardplan.restore(GOLDEN, keys=[name for name in found if name != "config"])
    assert restored["scheduler"] == {"max_lr": 0.1, "steps": [1, 2]}
    assert any("`config` needs" in note for note in shardplan.verify(GOLDEN).notes)


def test_every_byte_of_both_parts_is_verified(golden):
    report = shardplan.verify(golden)
    assert report.ok
    assert not report.unchecked
    data = bytearray((golden / "common.pt").read_bytes())
    data[data.index(b"iteration")] ^= 1
    (golden / "common.pt").write_bytes(data)
    (fault,) = shardplan.verify(golden).faults
    assert fault.file == "common.pt"


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_common_values_that_are_lost_are_reported_with_all_else_that_is_wrong(golden, damage):
    data = (golden / "common.pt").read_bytes()
    (golden / "common.pt").unlink()
    if damage == "cut short":
        (golden / "common.pt").write_bytes(data[:-100])
    (golden / "__1_0.distcp").unlink()
    faults = shardplan.verify(golden).faults
    assert {fault.file for fault in faults} == {"common.pt", "__1_0.distcp"}
    with pytest.raises(FormatError, match=r"common\.pt: .*open \.metadata itself"):
        shardplan.restore(golden)
    rest = shardplan.open_checkpoint(golden / ".metadata")
    assert "iteration" not in rest
    assert "norm.weight" in rest


@pytest.mark.parametrize("format", ["safetensors", "dcp", "hf", "torch"])
def test_it_converts_to_every_format_with_the_values_that_this_holds(tmp_path, format):
    path = tmp_path / ("x.pt" if format == "torch" else "x")
    report = shardplan.convert(GOLDEN, path, format=format, planner=drop("config"))
    assert same(path)
    assert shardplan.verify(path).ok
    if format == "hf":
        assert {"args", "iteration"} <= set(report.left_out)
        return
    found = shardplan.restore(path)
    changed = {**vars(ARGS), "exit_signal": 15}
    assert found["args"] == (changed if format == "torch" else ARGS)
    assert found["iteration"] == 5
    if format == "torch":
        assert torch.load(path, weights_only=True)["args"] == changed


def test_it_is_resharded_while_it_is_converted(tmp_path):
    planner = drop("config")
    shardplan.convert(GOLDEN, tmp_path / "x", format="dcp", mesh=Mesh(dp=4), planner=planner)
    assert same(tmp_path / "x")
    again = torch.zeros(4, 3)
    dcp.load({"embedding.weight": again}, checkpoint_id=tmp_path / "x", no_dist=True)
    assert torch.equal(again, WHOLE["embedding.weight"])


@pytest.mark.parametrize("format", ["dcp", "safetensors", "hf"])
def test_it_is_never_overwritten_in_part(golden, format):
    before = {file.name: file.read_bytes() for file in golden.iterdir()}
    with pytest.raises(ExistsError, match="choose another folder"):
        shardplan.save({"w": torch.ones(2)}, golden, format=format, overwrite=True)
    assert {file.name: file.read_bytes() for file in golden.iterdir()} == before


def test_a_name_that_is_in_both_parts_is_refused(golden):
    torch.save({"norm.weight": 1}, golden / "common.pt")
    with pytest.raises(FormatError, match=r"`norm\.weight` is in it and in \.metadata"):
        shardplan.open_checkpoint(golden)


def test_tensors_among_the_common_values_are_read(golden):
    torch.save({"optimizer": {"step": torch.arange(3)}}, golden / "common.pt")
    assert torch.equal(shardplan.restore(golden, keys="opt*")["optimizer"]["step"], torch.arange(3))
    assert shardplan.verify(golden).ok


# Hostile common values


class Evil:
    def __init__(self, make, *args):
        self.make, self.args = make, args

    def __reduce__(self):
        return self.make, self.args


@pytest.mark.parametrize(
    "value",
    [
        Evil(exec, "raise SystemExit('ran')"),
        Evil(getattr, signal.Signals, "SIGTERM"),
        Evil(sys.exit, "ran"),
        argparse.Namespace(a=[Evil(sys.exit, "ran")]),
        sys.exit,
        Evil(argparse.ArgumentParser),
    ],
    ids=["exec", "getattr", "exit", "in a namespace", "a function", "a class"],
)
def test_what_is_not_admitted_is_never_run(golden, value):
    torch.save({"iteration": 7, "evil": value}, golden / "common.pt")
    found = shardplan.open_checkpoint(golden)
    assert found["iteration"] == 7
    with pytest.raises(FormatError, match="`evil`"):
        found["evil"]
    assert same(golden)


def test_objects_of_subclasses_of_containers_are_sealed_too(golden):
    from collections import defaultdict, deque

    filled = {"d": defaultdict(list, a=[1]), "q": deque([1, 2]), "iteration": 3}
    torch.save(filled, golden / "common.pt")
    found = shardplan.open_checkpoint(golden)
    assert found["iteration"] == 3
    for name in "dq":
        with pytest.raises(FormatError, match=f"`{name}` needs `collections"):
            found[name]


def test_a_class_that_the_user_allowed_is_read(golden):
    torch.save({"evil": Allowed(3)}, golden / "common.pt")
    with torch.serialization.safe_globals([Allowed]):
        assert shardplan.open_checkpoint(golden)["evil"] == Allowed(3)


class Allowed:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x


@pytest.mark.parametrize(
    "value", [argparse.Namespace(a=1), types.SimpleNamespace(), signal.SIGTERM]
)
def test_plain_objects_come_back_as_they_were(tmp_path, value):
    for format in ("safetensors", "dcp"):
        shardplan.save({"v": value}, tmp_path / format, format=format)
        found = shardplan.restore(tmp_path / format)["v"]
        assert (type(found), found) == (type(value), value)


# Metadata of older versions


@pytest.fixture
def old(monkeypatch):
    """Return stand-ins for classes that Megatron-core had before 0.16."""
    package = types.ModuleType(MODULE)

    class MCoreMetadata(records.Metadata):
        pass

    class MCoreSavePlan(planner.SavePlan):
        pass

    for kind in (MCoreMetadata, MCoreSavePlan):
        kind.__module__, kind.__qualname__ = MODULE, kind.__name__
        setattr(package, kind.__name__, kind)
    parts = MODULE.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, package)
    return package


def test_older_metadata_that_names_classes_of_megatron_is_read(tmp_path, old):
    dcp.save({"w": torch.arange(6.0).reshape(1, 1, 6)}, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    made = old.MCoreMetadata(**vars(theirs))
    made.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}
    chunk = theirs.state_dict_metadata["w"].chunks[0]
    data = planner.TensorWriteData(chunk, theirs.state_dict_metadata["w"].properties, chunk.sizes)
    index = records.MetadataIndex("w", chunk.offsets)
    item = planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)
    made.all_local_plans = [old.MCoreSavePlan([item])]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(made))
    found = shardplan.open_checkpoint(tmp_path)
    assert torch.equal(found["w"][...], torch.arange(6.0).reshape(1, 1, 6))
    (note,) = found.reader.source.notes
    assert note.startswith("`w` ")
    assert shardplan.verify(tmp_path).notes == (note,)


def test_a_chunk_whose_sizes_lack_the_first_axes_is_read(tmp_path):
    dcp.save({"w": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    made = dcp.FileSystemReader(tmp_path).read_metadata()
    (chunk,) = made.state_dict_metadata["w"].chunks
    made.state_dict_metadata["w"].size = torch.Size((1, 2, 3))
    chunk.offsets = torch.Size((0, 0, 0))
    ((index, place),) = made.storage_data.items()
    made.storage_data = {records.MetadataIndex("w", chunk.offsets, index.index): place}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(made))
    found = shardplan.open_checkpoint(tmp_path)["w"]
    assert found.shape == (1, 2, 3)
    assert torch.equal(found[0, 1:, ::2], torch.tensor([[3.0, 5.0]]))
    assert torch.equal(found[...], torch.arange(6.0).reshape(1, 2, 3))


def test_kept_plans_that_are_shared_without_end_are_refused():
    inner = pickle.dumps([planner.SavePlan([])], 2)[:-1]
    lists = b"".join(b"q%c0](h%ch%ce" % (200, 200, 200) for _ in range(60))
    with pytest.raises(FormatError, match="more often than its length justifies"):
        parse_metadata(inner + lists + b".")
    stream = io.BytesIO()
    pickle.dump({"x": planner.SavePlan([])}, stream)
    with pytest.raises(FormatError, match="in place of a Metadata"):
        parse_metadata(stream.getvalue())
