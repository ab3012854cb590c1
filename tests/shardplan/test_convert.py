"""Converting keeps every bit, in whatever order formats and shardings follow one another."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as torchs_dcp_to_torch_save

import shardplan
from shardplan import convert, open_checkpoint, restore
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import ExistsError, FormatError, ValueRefusedError, open_store
from shardplan.io.execute import commit as leftovers
from shardplan.io.execute.read import Reader
from shardplan.io.execute.streaming import Ahead, Lender
from shardplan.io.formats.headers import TORCH_NAMES, file_entry
from shardplan.io.formats.registry import detect
from shardplan.io.stores.testing import CountingStore, FaultyStore
from shardplan.planning import (
    Mesh,
    PlanError,
    RefusedError,
    Replicate,
    Shard,
    StridedShard,
    cast,
    chain,
    concat,
    copy_plan,
    local_plan,
    rename,
    select,
    split_chunks,
    trim,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.storage import BATCH_BYTES, Box, copy_budget, copy_memory

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

FORMATS = ("safetensors", "hf", "dcp", "torch")
MESHES = (Mesh(dp=1), Mesh(dp=3), Mesh(dp=2, tp=2), Mesh(dp=7))


def place(folder, name, format):
    """Where a checkpoint of some format goes."""
    return f"{folder}/{name}.pt" if format == "torch" else f"{folder}/{name}"


def state():
    torch.manual_seed(0)
    w = torch.randn(7, 5)
    return {
        "model": {
            "w": w,
            "half": torch.randn(6).bfloat16(),
            "e8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 4),
            "mask": torch.tensor([True, False, True]),
            "deep": [{"x": torch.arange(3)}, {"x": torch.arange(4)}],
        },
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 5)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "step": 7,
        "name": "run",
    }


def bits(tensor):
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).tolist() if tensor.numel() else []


def same_tensor(a, b, name=""):
    assert (a.dtype, a.shape) == (b.dtype, b.shape), name
    assert bits(a) == bits(b), name


def same(a, b):
    """Compare nested state dicts, bit for bit."""
    if isinstance(b, torch.Tensor):
        same_tensor(a, b)
    elif isinstance(b, dict):
        assert set(a) == set(b)
        for key in b:
            same(a[key], b[key])
    elif isinstance(b, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def flat_tensors(sd):
    flat, _ = shardplan.planning.flatten(sd)
    return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}


def check(path, sd, nested=True):
    """Whatever was kept is as it was."""
    if nested:
        same(restore(path), sd)
        return
    found = flat_tensors(restore(path))
    expected = flat_tensors(sd)
    assert set(found) == set(expected)
    for name in expected:
        same_tensor(found[name], expected[name], name)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(FORMATS, FORMATS)))
def test_every_format_becomes_every_other(tmp_path, first, second):
    sd = state()
    shardplan.save(sd, tmp_path / "native")
    a, b = place(tmp_path, "a", first), place(tmp_path, "b", second)
    one = convert(tmp_path / "native", a, format=first)
    two = convert(a, b, format=second)
    lost = "hf" in (first, second)
    check(a, sd, nested=first != "hf")
    check(b, sd, nested=not lost)
    assert two.tensors == one.tensors == len(flat_tensors(sd))
    assert bool(one.left_out) == (first == "hf")
    assert bool(two.left_out) == (second == "hf" and first != "hf")
    assert two.bytes_read >= sum(t.nbytes for t in flat_tensors(sd).values())
    store, name = (os.path.dirname(b), os.path.basename(b)) if second == "torch" else (b, "")
    assert detect(open_store(store), name) == second


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_any_sharding_becomes_any_other(tmp_path, mesh, format):
    sd = state()
    shardplan.save(sd, tmp_path / "native")
    report = convert(tmp_path / "native", tmp_path / "a", format=format, mesh=mesh)
    check(tmp_path / "a", sd)
    chunks = open_checkpoint(tmp_path / "a").metadata.state_dict_metadata["model.w"].chunks
    assert len(chunks) == min(7, len(mesh)) or len(mesh) == 4
    assert report.files >= 1
    convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(x=5))
    check(tmp_path / "b", sd)
    convert(tmp_path / "b", tmp_path / "c", format="hf")
    check(tmp_path / "c", sd, nested=False)


def test_placements_by_pattern_are_those_that_ranks_would_have_written(tmp_path):
    sd = {"col": torch.randn(6, 8), "row": torch.randn(6, 8), "norm": torch.randn(8)}
    shardplan.save(sd, tmp_path / "a")
    placements = {
        "col": [Shard(0), Shard(1)],
        "r*": [StridedShard(0, split_factor=2), Shard(0)],
        "*": [Replicate(), Replicate()],
    }
    report = convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=2, tp=2), placements=placements)
    entries = open_checkpoint(tmp_path / "b").metadata.state_dict_metadata
    assert report.files == 4
    assert repr(entries["col"].chunks) == "Grid(0:3:6, 0:4:8)"
    assert len(entries["row"].chunks) == 4
    assert len(entries["norm"].chunks) == 1
    check(tmp_path / "b", sd)
    by_function = convert(
        tmp_path / "a",
        tmp_path / "c",
        mesh=Mesh(dp=2),
        placements=lambda name, shape: [Shard(len(shape) - 1)] if shape else [],
    )
    assert by_function.files == 2
    check(tmp_path / "c", sd)


def test_what_makes_no_sense_is_refused(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a")
    for wrong in (
        {"placements": [Shard(0)]},
        {"mesh": Mesh(dp=2), "format": "hf"},
        {"max_memory": 1000},
        {"format": "parquet"},
        {"format": "torch", "max_shard_size": "1GB"},
        {"mesh": Mesh(dp=2), "max_shard_size": "1GB"},
    ):
        with pytest.raises(ValueError, match=r"mesh|memory|format|max_shard_size"):
            convert(tmp_path / "a", tmp_path / "b", **wrong)
    with pytest.raises(PlanError, match="no axis"):
        convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=2), placements=[Shard(3)])
    with pytest.raises(RefusedError, match=r"`w` would be split; leave out the pass"):
        convert(tmp_path / "a", tmp_path / "b", format="hf", planner=split_chunks(4))
    with pytest.raises(ValueError, match="itself"):
        convert(tmp_path / "a", tmp_path / "a", overwrite=True)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("format", ["dcp", "safetensors", "hf"])
def test_a_torch_file_may_lie_in_the_folder_that_becomes_a_checkpoint(tmp_path, format):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()
    for _ in range(2):
        shardplan.convert(tmp_path / "model.pt", tmp_path, format=format, overwrite=True)
        assert shardplan.restore(tmp_path)["w"].tolist() == [1, 1]
        assert (tmp_path / "model.pt").read_bytes() == before
    with pytest.raises(ValueError, match="into itself"):
        shardplan.convert(tmp_path / "model.pt", tmp_path / "model.pt", format="torch")


def test_torch_s_two_converters_work_within_one_folder(tmp_path):
    shardplan.save({"w": torch.ones(2), "e": {}}, tmp_path / "a", format="dcp")
    for _ in range(2):
        shardplan.dcp_to_torch_save(tmp_path / "a", tmp_path / "a" / "model.pt")
        shardplan.torch_save_to_dcp(tmp_path / "a" / "model.pt", tmp_path / "a")
    assert torch.load(tmp_path / "a" / "model.pt")["w"].tolist() == [1, 1]
    target = {"w": torch.zeros(2), "e": {}}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert target["w"].tolist() == [1, 1]


@pytest.mark.parametrize("format", ["dcp", "torch"])
def test_a_checkpoint_is_not_converted_into_itself_through_a_link(tmp_path, format):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    source, target = place(tmp_path, "real/a", format), place(tmp_path, "link/a", format)
    shardplan.save({"w": torch.ones(2)}, source, format=format)
    before = sorted(os.walk(tmp_path / "real"))
    with pytest.raises(ValueError, match="into itself"):
        convert(source, target, format=format, overwrite=True)
    assert sorted(os.walk(tmp_path / "real")) == before


def test_planners_rename_select_cast_and_split(tmp_path):
    sd = {"model": {"w": torch.randn(9, 4), "b": torch.randn(4)}, "optim": torch.randn(3), "n": 1}
    shardplan.save(sd, tmp_path / "a")
    planner = chain(
        select("model.*"),
        rename(lambda name: name.removeprefix("model.")),
        cast("bfloat16"),
    )
    convert(tmp_path / "a", tmp_path / "b", format="hf", planner=planner)
    expected = {k: v.bfloat16() for k, v in sd["model"].items()}
    same(load_file(tmp_path / "b/model.safetensors"), expected)
    convert(tmp_path / "a", tmp_path / "c", planner=split_chunks(32))
    check(tmp_path / "c", sd)
    assert len(open_checkpoint(tmp_path / "c").metadata.state_dict_metadata["model.w"].chunks) > 1


def test_a_source_keeps_its_cut_unless_asked(tmp_path):
    shardplan.save({"w": torch.arange(40.0).reshape(10, 4)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=5))
    report = convert(tmp_path / "b", tmp_path / "c", format="dcp")
    chunks = open_checkpoint(tmp_path / "c").metadata.state_dict_metadata["w"].chunks
    assert repr(chunks) == "Grid(0:2:4:6:8:10, 0:4)"
    assert report.files == 5


def test_torch_itself_reads_every_result(tmp_path):
    sd = {"model": {"w": torch.randn(7, 5), "b": torch.arange(4)}, "step": 7}
    shardplan.save(sd, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "d", format="dcp", mesh=Mesh(dp=3))
    loaded = {"model": {"w": torch.zeros(7, 5), "b": torch.zeros(4, dtype=torch.int64)}, "step": 0}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    same(loaded, sd)
    convert(tmp_path / "d", tmp_path / "m.pt", format="torch")
    same(torch.load(tmp_path / "m.pt", weights_only=True), sd)


def test_the_two_functions_of_torch_do_the_same(tmp_path):
    sd = {"model": {"w": torch.randn(7, 5)}, "optim": {"lr": 0.1}, "step": 7}
    dcp.save(sd, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    report = shardplan.dcp_to_torch_save(tmp_path / "d", tmp_path / "ours.pt")
    torchs_dcp_to_torch_save(str(tmp_path / "d"), str(tmp_path / "theirs.pt"))
    ours, theirs = (torch.load(tmp_path / f, weights_only=False) for f in ("ours.pt", "theirs.pt"))
    same(ours, theirs)
    assert report.format == "torch"
    shardplan.torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "d2")
    loaded = {"model": {"w": torch.zeros(7, 5)}, "optim": {"lr": 0.0}, "step": 0}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "d2"), no_dist=True)
    same(loaded, sd)


def test_the_two_functions_of_torch_are_called_by_one_rank_or_by_those_that_are_named(
    tmp_path, monkeypatch
):
    def never():
        raise AssertionError("other ranks, which do not call it, would be waited for")

    monkeypatch.setattr("shardplan._comm.default_comm", never)
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    shardplan.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "b")
    shardplan.dcp_to_torch_save(tmp_path / "b", tmp_path / "c.pt")
    run_ranks(
        2, lambda comm: shardplan.torch_save_to_dcp(tmp_path / "c.pt", tmp_path / "d", comm=comm)
    )
    run_ranks(
        2, lambda comm: shardplan.dcp_to_torch_save(tmp_path / "d", tmp_path / "e.pt", comm=comm)
    )
    same(torch.load(tmp_path / "e.pt"), {"w": torch.ones(4)})


# ---- any chain

CARRIED = {
    "hf": sorted(TORCH_NAMES.values()),
    "safetensors": sorted(ITEMSIZE),
    "dcp": sorted(ITEMSIZE),
    "torch": sorted(ITEMSIZE),
}


@st.composite
def state_dicts(draw, formats):
    dtypes = sorted(set.intersection(*(set(CARRIED[f]) for f in formats)))
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)

    @st.composite
    def tensor(draw):
        dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes)
        if "hf" in formats and file_entry(dtype, shape) is None:
            shape = (1,)  # pairs of numbers lie along an axis, which a scalar has not
        count = int(np.prod(shape, dtype=int)) * ITEMSIZE[dtype]
        high = 2 if dtype == "bool" else 256
        raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, high, count, np.uint8)
        if not count:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape)

    keys = st.one_of(st.text("abc", min_size=1, max_size=3), st.integers(0, 9))
    values = st.one_of(
        st.integers(-5, 5),
        st.floats(allow_nan=False),
        st.text("xyz"),
        st.none(),
        st.booleans(),
        st.tuples(st.integers(), st.floats(allow_nan=False)),
    )
    leaves = st.one_of(tensor(), tensor(), values)
    trees = st.recursive(
        leaves,
        lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3).filter(_distinct),
        max_leaves=6,
    )
    return draw(st.dictionaries(keys, trees, min_size=1, max_size=4).filter(_distinct))


def _distinct(tree):
    return len({str(key) for key in tree}) == len(tree)


@given(st.data())
@settings(max_examples=25)
def test_a_chain_of_conversions_keeps_every_bit(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("chain")
    formats = data.draw(st.lists(st.sampled_from(FORMATS), min_size=1, max_size=4))
    sd = data.draw(state_dicts(formats))
    shardplan.save(sd, folder / "0")
    path = folder / "0"
    for number, format in enumerate(formats):
        mesh = None
        if format in ("safetensors", "dcp"):
            mesh = data.draw(st.sampled_from((None, *MESHES)))
        new = place(folder, f"{number + 1}", format)
        limit = data.draw(st.sampled_from([None, 1, 100]))
        limit = limit if mesh is None and format != "torch" else None
        convert(path, new, format=format, mesh=mesh, max_shard_size=limit)
        path = new
    check(path, sd, nested="hf" not in formats)


BASE = torch.arange(24.0).reshape(4, 6)
CORNERS = st.tuples(st.integers(1, 4), st.integers(1, 6), st.booleans())


@given(st.lists(CORNERS, min_size=2, max_size=4), st.sampled_from(FORMATS))
@settings(max_examples=20)
def test_corners_of_one_array_stay_what_they_are(tmp_path_factory, corners, format):
    folder = tmp_path_factory.mktemp("corners")
    views = [BASE[:rows, :columns] for rows, columns, _ in corners]
    turned = [corner[2] for corner in corners]
    sd = {f"v{i}": v.t() if t else v for i, (v, t) in enumerate(zip(views, turned, strict=True))}
    torch.save(sd, folder / "0")
    convert(folder / "0", place(folder, "1", format), format=format)
    check(place(folder, "1", format), sd)


# ---- stores


def test_conversions_cross_stores(tmp_path, s3):
    sd = {"w": torch.randn(50, 40), "b": torch.arange(9), "step": 1}
    shardplan.save(sd, tmp_path / "a")
    bucket = open_store(f"s3://{s3.bucket}/conv/native", **s3.options)
    memory = open_store(f"memory://{tmp_path.name}/hf")
    back = open_store(f"s3://{s3.bucket}/conv/dcp", **s3.options)
    convert(tmp_path / "a", bucket, mesh=Mesh(dp=3))
    check(bucket, sd)
    convert(bucket, memory, format="hf", max_shard_size=4000)
    check(memory, sd, nested=False)
    convert(memory, back, format="dcp")
    check(back, sd, nested=False)
    convert(back, tmp_path / "m.pt", format="torch")
    check(tmp_path / "m.pt", sd, nested=False)
    assert not s3.unfinished_uploads()


def test_small_tensors_are_read_together(tmp_path):
    sd = {f"t{i:04d}": torch.randn(10) for i in range(2000)}
    shardplan.save(sd, tmp_path / "a")
    counting = CountingStore(open_store(tmp_path / "a"))
    report = convert(counting, tmp_path / "b", format="hf")
    reads = [done for done in counting.operations if done.name == "read"]
    assert reads
    assert len(reads) < 50
    assert report.bytes_read == 2000 * 40
    check(tmp_path / "b", sd)


# ---- progress and reports


def test_progress_is_told_from_nothing_to_all(tmp_path):
    shardplan.save({f"w{i}": torch.randn(100, 100) for i in range(8)}, tmp_path / "a")
    told = []
    convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=2), progress=lambda *x: told.append(x))
    assert told[0] == (0, 320_000)
    assert told[-1] == (320_000, 320_000)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 4


def test_what_progress_raises_stops_it_and_nothing_is_left(tmp_path):
    shardplan.save({f"w{i}": torch.randn(100, 100) for i in range(8)}, tmp_path / "a")

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=2), progress=stop)
    assert not os.path.exists(tmp_path / "b") or os.listdir(tmp_path / "b") == []


def test_a_report_reads_well(tmp_path):
    w = torch.randn(4)
    torch.save({"embed": w, "head": w, "step": 3}, tmp_path / "m.pt")
    report = convert(tmp_path / "m.pt", tmp_path / "b", format="hf")
    text = repr(report)
    assert "2 tensors and 0 values to hf" in text
    assert "left out, as hf holds only tensors: step" in text
    assert "tied weights: head = embed" in text
    assert report.tied == {"head": "embed"}
    assert list(load_file(tmp_path / "b/model.safetensors")) == ["embed"]
    check(tmp_path / "b", {"embed": w, "head": w})


@pytest.mark.parametrize("format", FORMATS)
def test_views_that_begin_alike_are_not_tied(tmp_path, format):
    t = torch.arange(24.0).reshape(4, 6)
    sd = {"full": t, "half": t[:, :3], "more": t[:, :4], "top": t[:2], "again": t[:, :3]}
    torch.save(sd, tmp_path / "m.pt")
    report = convert(tmp_path / "m.pt", place(tmp_path, "b", format), format=format)
    assert report.tied == {"half": "again"}
    check(place(tmp_path, "b", format), sd)


def test_what_a_format_cannot_carry_is_refused_before_anything_is_written(tmp_path):
    shardplan.save({"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "a")
    with pytest.raises(ValueRefusedError, match="`z` is complex128"):
        convert(tmp_path / "a", tmp_path / "b", format="hf")
    assert not os.path.exists(tmp_path / "b")


@pytest.mark.parametrize("format", ["torch", "safetensors", "dcp"])
def test_tensors_inside_values_of_another_tool_arrive(tmp_path, format):
    sd = {"a": {"w": torch.arange(3.0)}, "b": torch.ones(2)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(sd, checkpoint_id=str(tmp_path / "a"), planner=planner, no_dist=True)
    path = place(tmp_path, "b", format)
    convert(tmp_path / "a", path, format=format)
    check(path, sd)
    if format == "torch":
        same(torch.load(path, weights_only=True), sd)


def test_a_value_that_another_tool_stored_as_one_stays_one(tmp_path):
    sd = {"groups": [{"lr": 0.1}, {"lr": 0.2}], "w": torch.ones(2)}
    dcp.save(sd, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    convert(tmp_path / "d", tmp_path / "a")
    same(restore(tmp_path / "a"), restore(tmp_path / "d"))


# ---- damage and kills


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_found_on_the_way(tmp_path, format):
    shardplan.save({"w": torch.randn(1000, 10)}, tmp_path / "a")
    (file,) = [f for f in os.listdir(tmp_path / "a") if f.endswith(".safetensors")]
    with open(tmp_path / "a" / file, "r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"\xff\xfe")
    told = r"`w`.*; to see all that is damaged, verify .*/a\b"
    with pytest.raises(FormatError, match=told):
        convert(tmp_path / "a", place(tmp_path, "b", format), format=format)
    left = set(os.listdir(tmp_path)) - {"a"}
    assert not left or not any(files for _, _, files in os.walk(tmp_path / "b"))


@pytest.mark.parametrize("mesh", [None, Mesh(dp=3)], ids=repr)
@pytest.mark.parametrize("format", FORMATS)
def test_damage_of_a_large_chunk_is_found_on_the_way(tmp_path, format, mesh):
    if mesh is not None and format in ("hf", "torch"):
        pytest.skip("whole tensors")
    shardplan.save({"w": torch.randn(6 << 20)}, tmp_path / "a")  # 24 MiB: two blocks
    (file,) = [f for f in os.listdir(tmp_path / "a") if f.endswith(".safetensors")]
    with open(tmp_path / "a" / file, "r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"\xff\xfe")
    target = place(tmp_path, "b", format)
    with pytest.raises(FormatError, match="`w`"):
        convert(tmp_path / "a", target, format=format, mesh=mesh)
    with pytest.raises(FormatError, match="no checkpoint"):
        open_checkpoint(target)
    assert convert(tmp_path / "a", target, format=format, mesh=mesh, verify=False).verified == 0


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ["dcp", "torch"])
def test_damage_of_records_that_are_copied_is_found(tmp_path, source, target):
    sd = {"w": torch.randn(5 << 20), "v": torch.randn(1000)}  # 20 MiB: two blocks
    shardplan.save(sd, place(tmp_path, "a", source), format=source)
    assert convert(place(tmp_path, "a", source), tmp_path / "sound").verified == 2
    (file,) = [*tmp_path.glob("a/*.distcp"), *tmp_path.glob("a*.pt")]
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff\xfe")
    with pytest.raises(FormatError, match="checksums do not fit: `w`"):
        convert(place(tmp_path, "a", source), place(tmp_path, "b", target), format=target)


def test_damage_found_by_ranks_says_how_to_see_all_of_it(tmp_path):
    shardplan.save({"w": torch.randn(1000, 10)}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    with open(file, "r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"`w`.*; to see all that is damaged, verify"):
        run_ranks(2, lambda comm: convert(tmp_path / "a", tmp_path / "b", comm=comm))


def test_every_chunk_is_verified_however_it_is_read(tmp_path):
    sd = {"w": torch.randn(5 << 10, 1 << 10), "v": torch.randn(100), "none": torch.empty(0)}
    shardplan.save(sd, tmp_path / "a")
    assert convert(tmp_path / "a", tmp_path / "b", mesh=Mesh(dp=3)).verified == 2
    assert convert(tmp_path / "b", tmp_path / "c", format="hf").verified == 6
    assert convert(tmp_path / "b", tmp_path / "d", format="dcp").verified == 6
    assert convert(tmp_path / "c", tmp_path / "e").verified == 0


def test_an_existing_checkpoint_is_replaced_only_if_asked(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a")
    for format in FORMATS:
        target = place(tmp_path, f"to-{format}", format)
        convert(tmp_path / "a", target, format=format)
        with pytest.raises(ExistsError):
            convert(tmp_path / "a", target, format=format)
        convert(tmp_path / "a", target, format=format, overwrite=True)
        check(target, {"w": torch.ones(2)})


@pytest.mark.parametrize("format", FORMATS)
def test_a_failing_store_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, format):
    if format == "torch":
        pytest.skip("its store cannot be passed in")
    sd = {"w": torch.randn(6, 4), "b": torch.arange(5)}
    shardplan.save(sd, tmp_path / "a")
    counting = FaultyStore(open_store(tmp_path / "count"))
    options = {"format": format, "max_shard_size": 50}
    convert(tmp_path / "a", counting, **options)
    for step in range(counting.changes):
        store = open_store(tmp_path / f"s{step}")
        failed = False
        try:
            convert(tmp_path / "a", FaultyStore(store, fail_at=step, mode="stop"), **options)
        except Exception:
            failed = True
        if failed:
            with pytest.raises(FormatError):
                open_checkpoint(store)
            convert(tmp_path / "a", store, **options)
        check(store, sd)


SLOW = """
    import os, sys, shardplan
    from shardplan.planning import Mesh
    def tell(done, total):
        if done > total // 2:
            print("half", flush=True)
            import time; time.sleep(60)
    shardplan.convert(sys.argv[1], sys.argv[2], format=sys.argv[3], progress=tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_conversion_shows_nothing_and_can_be_run_again(tmp_path, format, monkeypatch):
    sd = {f"w{i}": torch.randn(500, 500) for i in range(20)}
    shardplan.save(sd, tmp_path / "a")
    target = place(tmp_path, "b", format)
    code = textwrap.dedent(SLOW)
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "a"), str(target), format]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises((FormatError, FileNotFoundError)):
        open_checkpoint(target)
    others = {"__0_0.distcp", "x.0123456789abcdef.tmp", "__0_0-0123.distcp"}  # none of ours
    folder = tmp_path if format == "torch" else Path(target)
    left = {file.name for file in folder.iterdir() if file.is_file()}
    for name in others:
        (folder / name).write_bytes(b"x")
    convert(tmp_path / "a", target, format=format)
    check(target, sd)
    young = left & set(os.listdir(folder))
    assert bool(young) == (format != "hf")  # a save may be under way there: who can tell?
    told = shardplan.verify(target)
    assert told.ok
    assert set(told.leftovers) == (young if format in ("safetensors", "dcp") else set())
    now = time.time()
    monkeypatch.setattr(leftovers.time, "time", lambda: now + 3700)
    convert(tmp_path / "a", target, format=format, overwrite=True)
    check(target, sd)
    assert others <= set(os.listdir(folder))
    assert not left & set(os.listdir(folder))


# ---- ranks


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mesh", [None, Mesh(dp=4)], ids=repr)
def test_ranks_share_the_work(tmp_path, format, mesh):
    if mesh is not None and format in ("hf", "torch"):
        pytest.skip("whole tensors")
    sd = {f"w{i}": torch.randn(40, 10) for i in range(12)} | {"step": 5}
    shardplan.save(sd, tmp_path / "a")
    target = place(tmp_path, "b", format)
    told = {}

    def work(comm):
        return convert(
            tmp_path / "a",
            target,
            format=format,
            mesh=mesh,
            max_shard_size=None if mesh or format == "torch" else 4000,
            comm=comm,
            progress=lambda done, total: told.update({comm.rank: total}),
        )

    reports = run_ranks(3, work)
    check(target, sd, nested=format != "hf")
    assert len({(r.files, r.bytes_read, r.bytes_written) for r in reports}) == 1
    assert sum(told.values()) == 12 * 1600
    assert len(told) == 3
    if format != "torch":
        assert all(told.values())


def test_if_a_rank_fails_all_do_and_nothing_is_left(tmp_path):
    shardplan.save({f"w{i}": torch.randn(40, 10) for i in range(12)}, tmp_path / "a")

    def work(comm):
        def tell(done, total):
            if comm.rank == 1 and done:
                raise RuntimeError("rank 1 has had enough")

        return convert(
            tmp_path / "a", tmp_path / "b", max_shard_size=4000, comm=comm, progress=tell
        )

    with pytest.raises(CheckpointError, match="rank 1 has had enough"):
        run_ranks(3, work)
    assert not os.path.exists(tmp_path / "b") or os.listdir(tmp_path / "b") == []
    convert(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    "wrong", [{"dst": "s3nope://x/y"}, {"max_shard_size": "much"}, {"max_memory": 1000}], ids=str
)
def test_what_one_rank_cannot_begin_reaches_all_at_once(tmp_path, wrong):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a")

    def work(comm):
        options = {"dst": tmp_path / "b", **(wrong if comm.rank == 1 else {})}
        with pytest.raises(CheckpointError, match="rank 1, open: "):
            convert(tmp_path / "a", comm=comm, **options)

    run_ranks(2, work)
    assert os.listdir(tmp_path) == ["a"]


# ---- memory


@pytest.mark.parametrize("source", [0, 64])
@pytest.mark.parametrize("target", [0, 64])
@pytest.mark.parametrize("more", [0, 64, 1000])
def test_what_stores_hold_on_the_way_counts(source, target, more):
    least, source, target = (128 + source + target + more) << 20, source << 20, target << 20
    budget = copy_budget(least, read_staging=source, write_staging=target)
    files = budget.files * copy_memory(budget.depth, target)
    assert budget.files >= 1
    assert budget.reading >= BATCH_BYTES + source  # else one read would exceed it
    assert budget.reading + files <= least


def test_memory_that_the_stores_alone_use_up_is_refused(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a")
    target = f"memory://{tmp_path.name}-staged"
    with pytest.raises(ValueError, match=r"max_memory is 128.* needs 192.* 64.* for parts"):
        convert(tmp_path / "a", target, max_memory=128 << 20)
    convert(tmp_path / "a", target, max_memory=192 << 20)
    check(target, {"w": torch.ones(2)})


PEAK = """
    import pathlib, re, sys, threading
    import torch, shardplan
    from shardplan.planning import Mesh, Shard, cast

    def own():  # not the pages of files, which the system takes back when it needs them
        text = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\\s+(\\d+)", text)[1]) << 10

    tiny, target, format, source, bound, options = sys.argv[1:]
    options = {"format": format, "max_memory": int(bound), **eval(options)}
    shardplan.convert(tiny, target + "-warm", **options)
    before, seen, done = own(), [], threading.Event()

    def watch():
        while not done.wait(0.003):
            seen.append(own())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    shardplan.convert(source, target, **options)
    done.set()
    watcher.join()
    print(max(seen) - before)
"""


def extra_memory(tmp_path, source, format, bound, options="{}"):
    """Return how many bytes more a process takes that converts a large checkpoint, not a tiny."""
    shardplan.save({"w": torch.ones(2, 2)}, tmp_path / "tiny")
    target = place(tmp_path, "b", format)
    arguments = [str(tmp_path / "tiny"), target, format, str(source), str(bound), options]
    out = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(PEAK), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_memory_stays_within_its_bound(tmp_path, format):
    """A checkpoint of four times the bound, one of whose tensors alone exceeds it."""
    bound = 192 << 20
    sd = {"large": torch.zeros(64 << 20), **{f"w{i}": torch.zeros(4 << 20) for i in range(32)}}
    shardplan.save(sd, tmp_path / "a")
    del sd
    convert(tmp_path / "a", tmp_path / "cols", mesh=Mesh(dp=3))
    assert extra_memory(tmp_path, tmp_path / "cols", format, bound) < bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("hf", '{"planner": cast("float64")}'),
        ("safetensors", '{"planner": cast("float8_e5m2")}'),
        ("dcp", '{"mesh": Mesh(dp=4), "placements": [Shard(1)]}'),
    ],
)
def test_memory_stays_within_its_bound_where_bytes_must_be_made(tmp_path, format, options):
    """A view of columns, turned, none of whose bytes can be copied as they lie."""
    bound = 128 << 20
    whole = torch.zeros(1 << 12, 3 << 12)
    torch.save({"turned": whole.T, "half": whole[:, : 3 << 11]}, tmp_path / "a.pt")
    del whole
    assert extra_memory(tmp_path, tmp_path / "a.pt", format, bound, options) < bound


# ---- reading ahead


def test_boxes_come_in_any_order(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from shardplan.io.formats.registry import open_source

    sd = {f"w{i}": torch.randn(300, 300) for i in range(60)}
    shardplan.save(sd, tmp_path / "a")
    reader = Reader(open_source(tmp_path / "a"))
    (cut,) = split_chunks(100 * 300 * 4)((local_plan(sd),))
    plan = copy_plan(reader.metadata, cut)
    boxes = plan.boxes
    assert len(boxes) == 180
    with ThreadPoolExecutor(2) as threads:
        ahead = Ahead(reader, plan, threads)
        order = list(np.random.default_rng(0).permutation(len(boxes)))
        for i in [*range(9), *order, 5, 5]:
            box = boxes[i]
            expected = sd[box.name][box.offsets[0] : box.offsets[0] + 100]
            assert torch.equal(ahead.read(box), expected)
        odd = Box("w3", (7, 1), (2, 5))
        assert torch.equal(ahead.read(odd), sd["w3"][7:9, 1:6])
        ahead.close()


def test_memory_that_is_still_in_use_is_not_lent_again():
    lender = Lender()
    first = lender.take(10)
    first.fill_(1)
    view = first[2:4]
    del first
    lender.take(10).fill_(9)
    assert view.tolist() == [1, 1]


@pytest.mark.parametrize("format", FORMATS)
def test_parts_that_a_pass_drops_as_a_whole_are_left_out(tmp_path, format):
    sd = {"e.0.w": torch.arange(4.0), "e.1.w": torch.arange(4.0) + 9}
    shardplan.save(sd, tmp_path / "a")
    planner = [concat({"e.0.w": 4, "e.1.w": 4}, "w"), trim("w", to=4)]
    target = place(tmp_path, "b", format)
    shardplan.convert(tmp_path / "a", target, format=format, planner=planner)
    assert shardplan.restore(target)["w"].tolist() == [0, 1, 2, 3]
