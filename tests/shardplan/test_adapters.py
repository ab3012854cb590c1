"""torch.distributed.checkpoint on the other side: its records, planners, files and ranks."""

import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner, format_utils, planner_helpers
from torch.distributed.checkpoint import filesystem as torch_files
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import shardplan
from shardplan import (
    as_torch_load_planner,
    as_torch_save_planner,
    as_torch_storage_reader,
    as_torch_storage_writer,
    from_torch,
    metadata_of,
    planning,
    to_torch,
)
from shardplan._state import expand
from shardplan.io.tensors import tensor_bytes
from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Issue,
    KeyReport,
    LoadItemType,
    LoadPlan,
    Mesh,
    Metadata,
    MetadataIndex,
    PlanError,
    ReadItem,
    RefusedError,
    SavePlan,
    Shard,
    StorageMeta,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    cast,
    chain,
    drop,
    dtype_name,
    flatten,
    global_plan,
    load_plan,
    local_plan,
    rename,
    select,
    share_reads,
    split_chunks,
    world_plans,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.testing import strategies as plans_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]

RANKS = Path(__file__).parents[1] / "ranks"
DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]
PORTABLE = [name for name in DTYPES if name != "float4_e2m1fn_x2"]  # torch's writer has no width


# Records, there and back


def tensor_properties():
    return st.builds(
        TensorProperties,
        st.sampled_from(DTYPES),
        st.sampled_from(["strided", "sparse_coo"]),
        st.booleans(),
        st.sampled_from(["contiguous_format", "channels_last", "preserve_format"]),
        st.booleans(),
    )


def planner_data():
    """Whatever passes may have added, and data that looks like the other side's."""
    text = st.text("abw.", max_size=3)
    lookalike = st.dictionaries(text, st.tuples(text | st.integers(0, 2)), max_size=2)
    path = st.tuples(
        st.tuples(st.sampled_from(["dict", "list", "tuple"]), text | st.integers(0, 2))
    )
    paths = st.dictionaries(text, path, max_size=2)
    known = st.dictionaries(
        st.sampled_from(["paths", "torch", "shardplan", "planner_data", "ranks"]),
        paths | lookalike | st.integers() | st.dictionaries(text, lookalike, max_size=1),
        max_size=2,
    )
    return st.none() | st.integers() | lookalike | known | st.builds(lambda p: {"paths": p}, paths)


@st.composite
def worlds(draw):
    """Draw the plans of a world after passes: renamed, cut, with sources, hints and data."""
    plans = draw(plans_of.save_plans())
    if draw(st.booleans()):
        plans = chain(rename(lambda name: f"new.{name}"), split_chunks(16))(plans)
    if draw(st.booleans()):
        plans, _ = global_plan(plans)
    return tuple(attrs.evolve(p, planner_data=draw(planner_data())) for p in plans)


def assert_returns(record):
    there = to_torch(record)
    assert type(there).__module__.startswith("torch.")
    back = from_torch(there)
    assert back == record
    assert type(back) is type(record)
    return there


@given(worlds())
def test_our_save_plans_come_back_from_torch_s_with_their_sources(plans):
    for plan in plans:
        items = from_torch(assert_returns(plan)).items
        assert [item.index.index for item in items] == [item.index.index for item in plan.items]
        assert set(items.catalog.names) == set(plan.items.catalog.names)


@given(plans_of.save_plans(), planner_data(), st.booleans())
def test_our_metadata_and_load_plans_come_back_from_torch_s(plans, data, named):
    _, metadata = global_plan(plans)
    meta = StorageMeta("ckpt/1", "5f3a", None, ["a", "b"]) if named else None
    there = assert_returns(
        attrs.evolve(metadata, planner_data=data, storage_meta=meta, version="1")
    )
    assert there.state_dict_metadata.keys() == set(metadata.state_dict_metadata)
    for plan in plans:
        wanted = load_plan(metadata, plan)
        assert_returns(attrs.evolve(wanted, planner_data=data))


@given(tensor_properties())
def test_our_properties_come_back_from_torch_s(properties):
    assert_returns(properties)
    size = (2, 3)
    chunk = Chunk((0, 0), size)
    assert_returns(TensorMetadata(properties, size, [chunk]))
    assert_returns(TensorWriteData(chunk, properties, size))


def test_the_small_records_come_back_from_torch_s():
    tensor = ReadItem(
        LoadItemType.TENSOR, MetadataIndex("a", (2,), 1), (0,), MetadataIndex("b", (0,)), (1,), (3,)
    )
    value = ReadItem(LoadItemType.BYTE_IO, MetadataIndex("a"), (0,), MetadataIndex("b"), (0,), (0,))
    records = [Chunk((), ()), BytesMetadata(), StorageMeta(), MetadataIndex("w"), tensor, value]
    for record in [*records, *WriteItemType, *LoadItemType, LoadPlan([tensor, value])]:
        assert_returns(record)


def test_a_report_survives_the_way_through_torch_s_load_plan():
    issue = Issue("uncovered", "w", "no rows", [1, 2], ((0,), (2,)))
    assert_returns(LoadPlan([], report=KeyReport(["a"], ["b"], [issue])))


def torch_state_dict(sd):
    """Return a state dict of tensors as torch has them; keys are text, as torch makes them."""
    if isinstance(sd, dict):
        return {str(k): torch_state_dict(v) for k, v in sd.items()}
    if isinstance(sd, list):
        return [torch_state_dict(v) for v in sd]
    if isinstance(sd, TensorSpec):
        return torch.empty(sd.shape, dtype=getattr(torch, sd.dtype))
    return torch.from_numpy(sd) if isinstance(sd, np.ndarray) else sd


@given(plans_of.state_dicts(), st.booleans())
def test_torch_s_own_plans_come_back_from_ours(sd, nested):
    sd = torch_state_dict(sd)
    planner = default_planner.DefaultSavePlanner(flatten_state_dict=nested)
    planner.set_up_planner(sd if nested else flatten(sd)[0])
    local = planner.create_local_plan()
    assert to_torch(from_torch(local)) == local
    (plan,), metadata = planner.create_global_plan([local])
    assert to_torch(from_torch(plan)) == plan
    assert to_torch(from_torch(metadata)) == metadata
    reads = default_planner.create_default_local_load_plan(planner.state_dict, metadata)
    assert to_torch(from_torch(reads)) == reads


@pytest.mark.parametrize("data", [None, {}, {"a": ("a",), "s": ("s",)}, {"mine": 1}, ("x", 1)])
def test_plans_of_values_come_back_with_any_planner_data_but_without_sizes(data):
    index, kind = torch_metadata.MetadataIndex, torch_plans.WriteItemType.BYTE_IO
    sized = torch_plans.WriteItem(index("s"), kind, torch_plans.BytesIOWriteData(8))
    bare = [torch_plans.WriteItem(index(name), kind) for name in ("s", "a")]
    plan = torch_plans.SavePlan(bare, planner_data=data)
    assert to_torch(from_torch(plan)) == plan
    assert to_torch(from_torch(sized)) == bare[0]


@given(plans_of.save_plans())
def test_torch_s_plans_of_many_ranks_come_back_from_ours(plans):
    local = [to_torch(plan) for plan in plans]
    names = {item.index.fqn for plan in local for item in plan.items}
    local = [dataclasses.replace(p, planner_data={n: (n,) for n in names}) for p in local]
    plans, metadata = default_planner.DefaultSavePlanner()._create_global_plan(local)
    for plan in plans:
        assert to_torch(from_torch(plan)) == plan  # some names of its data have no item here
    assert to_torch(from_torch(metadata)) == metadata
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, torch_metadata.TensorStorageMetadata):
            for read in planner_helpers.create_read_items_for_chunk_list(name, entry, entry.chunks):
                assert to_torch(from_torch(read)) == read


def test_what_torch_wrote_to_its_files_comes_back_from_ours(tmp_path):
    dcp.save({"a": {"w": torch.ones(3)}, "step": 1}, checkpoint_id=tmp_path)
    metadata = torch_files.FileSystemReader(tmp_path).read_metadata()
    metadata.storage_meta.checkpoint_id = str(metadata.storage_meta.checkpoint_id)
    ours = from_torch(metadata)
    assert to_torch(ours) == metadata
    assert hash(ours) == hash(from_torch(metadata))  # frozen to the leaves
    assert ours.storage_data[MetadataIndex("a.w", (0,))].length > 0
    assert ours.planner_data == {"paths": {"a.w": (("dict", "a"), ("dict", "w"))}}


def test_torch_finds_nested_keys_in_the_metadata_we_give_it():
    _, metadata = global_plan([local_plan({"a": [torch.ones(1), {"b": 1}], 3: {"c": 2}})])
    data = to_torch(metadata).planner_data
    assert data["a.1.b"] == ("a", 1, "b")
    assert data["3.c"] == ("3", "c")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO, source=MetadataIndex("a")),
            "`b` comes from `a`",
        ),
        (TensorProperties(memory_format="spiral"), "'spiral'"),
    ],
)
def test_what_torch_s_record_cannot_say_is_refused_by_name(record, message):
    with pytest.raises(RefusedError, match=message):
        to_torch(record)


def test_a_rank_that_reads_for_others_is_refused_by_name():
    mesh = Mesh(dp=2)
    saved = {"w": TensorSpec((4,))}
    _, metadata = global_plan(world_plans(saved, mesh))
    loads = share_reads(metadata, min_bytes=1)(
        tuple(load_plan(metadata, p) for p in world_plans(saved, mesh))
    )
    assert any(len(plan.transfers) for plan in loads)
    with pytest.raises(RefusedError, match=r"`w`.*share_reads"):
        to_torch(next(plan for plan in loads if len(plan.transfers)))


def test_two_sources_of_one_chunk_are_refused_by_name():
    items = [
        WriteItem(MetadataIndex("v"), WriteItemType.BYTE_IO, source=MetadataIndex(source))
        for source in ("a", "b")
    ]
    with pytest.raises(RefusedError, match=r"`v`.*two places"):
        to_torch(SavePlan(items))


def test_what_our_records_cannot_say_is_refused_by_name():
    with pytest.raises(RefusedError, match="caching"):
        from_torch(torch_plans.SavePlan([], usable=False))
    odd = torch_metadata.TensorProperties(dtype=torch.qint8)
    entry = torch_metadata.TensorStorageMetadata(odd, torch.Size([0]), [])
    with pytest.raises(RefusedError, match=r"`q`.*qint8"):
        from_torch(torch_metadata.Metadata({"q": entry}))


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="KeyReport"):
        to_torch(KeyReport())
    with pytest.raises(TypeError, match="not a record"):
        from_torch("w")


# State dicts


def elements(dtype, count=6):
    if dtype == "bool":
        return torch.arange(count) % 3 == 0
    raw = torch.arange(count * getattr(torch, dtype).itemsize, dtype=torch.int64) % 61
    return raw.to(torch.uint8).view(getattr(torch, dtype))


def state(dtypes=PORTABLE):
    return {
        "dtypes": {name: elements(name) for name in dtypes},
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "list": [torch.arange(3), {"lr": 0.1}],
        "raw": b"\x00raw",
        "betas": (0.9, 0.99),
        "step": 7,
    }


def blank(value):
    """Return a state dict of the same form that holds nothing of the values."""
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and flatten({"x": value})[0].keys() != {"x"}:
        return type(value)(map(blank, value))
    if isinstance(value, torch.Tensor):
        raw = torch.zeros(value.nbytes, dtype=torch.uint8)
        return raw.view(value.dtype).reshape(value.shape)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else None


def shown(value):
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        return name, tuple(value.shape), bytes(tensor_bytes(value, name))
    return repr(value)


def assert_same(got, expected):
    got, expected = flatten(got)[0], flatten(expected)[0]
    assert {k: shown(v) for k, v in got.items()} == {k: shown(v) for k, v in expected.items()}


def only_failure(function, *args, **kwargs):
    """Return the one error inside torch's exception."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        function(*args, **kwargs)
    ((error, _),) = caught.value.failures.values()
    return error


# Our planners, torch's files


def test_our_planners_and_torch_s_load_each_other_s_checkpoints(tmp_path):
    sd = state()
    for save in (None, as_torch_save_planner()):
        folder = tmp_path / str(save is None)
        dcp.save(sd, checkpoint_id=folder, planner=save)
        for load in (None, as_torch_load_planner()):
            got = blank(sd)
            dcp.load(got, checkpoint_id=folder, planner=load)
            assert_same(got, sd)


def test_a_pipeline_decides_names_dtypes_and_chunks_of_torch_s_checkpoint(tmp_path):
    sd = {"m": {"w": torch.arange(8.0)}, "step": 3, "tmp": torch.ones(2)}
    passes = chain(rename({"m.w": "model.weight"}), drop("tmp"), cast("bfloat16"), split_chunks(4))
    metadata = dcp.save(sd, checkpoint_id=tmp_path, planner=as_torch_save_planner(passes))
    assert metadata.state_dict_metadata.keys() == {"model.weight", "step"}
    assert len(metadata.state_dict_metadata["model.weight"].chunks) == 4
    plain = {"model": {"weight": torch.zeros(8, dtype=torch.bfloat16)}, "step": 0}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert_same(plain, {"model": {"weight": sd["m"]["w"].bfloat16()}, "step": 3})
    got = {"m": {"w": torch.zeros(8)}, "step": 0, "tmp": torch.zeros(2)}
    dcp.load(got, checkpoint_id=tmp_path, planner=as_torch_load_planner(passes))
    assert_same(got, sd | {"tmp": torch.zeros(2)})  # what a pipeline drops is left alone


def test_a_tensor_that_needs_grad_is_filled_in_place(tmp_path):
    net, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    sd = dict(net.named_parameters())
    dcp.save(sd, checkpoint_id=tmp_path, planner=as_torch_save_planner(cast("float64")))
    got = dict(other.named_parameters())
    dcp.load(got, checkpoint_id=tmp_path, planner=as_torch_load_planner(cast("float64")))
    assert torch.equal(other.weight, net.weight)
    assert got["weight"] is other.weight


def test_keys_that_are_not_text_tuples_and_arrays_keep_their_places(tmp_path):
    sd = {"a": {3: {"x": 1, None: torch.ones(2)}, "t": (torch.ones(1), {"y": 2})}, "e": {}}
    sd["array"] = np.arange(4, dtype=np.float32)
    dcp.save(sd, checkpoint_id=tmp_path, planner=as_torch_save_planner())
    got = blank(sd)
    dcp.load(got, checkpoint_id=tmp_path, planner=as_torch_load_planner())
    assert_same(got, sd)
    assert got["a"][3]["x"] == 1
    assert_same(shardplan.restore(tmp_path), sd | {"array": torch.arange(4.0)})


def test_an_empty_dict_that_torch_left_out_is_left_alone(tmp_path):
    dcp.save({"optim": {"state": {}, "lr": 0.1}}, checkpoint_id=tmp_path)
    got = {"optim": {"state": {}, "lr": 0}}
    dcp.load(got, checkpoint_id=tmp_path, planner=as_torch_load_planner())
    assert got == {"optim": {"state": {}, "lr": 0.1}}


def _adamw(steps):
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optim.step()
    return {"model": model.state_dict(), "optim": optim.state_dict()}


def _sgd():
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


HOLLOW = {
    "a plain SGD": _sgd,
    "AdamW before its first step": lambda: _adamw(0),
    "AdamW after one": lambda: _adamw(1) | {"extra": {}},
    "only an empty dict": lambda: {"extra": {}},
    "an empty dict on top": lambda: {"m": {"w": torch.ones(2)}, "e": {}, "s": {"n": 3, "l": [1]}},
    "several": lambda: {"a": {"b": {}, "c": {"d": {}}}, "e": {}, "w": torch.ones(2), "s": {"n": 1}},
    "in lists": lambda: {"l": [[{}], {"a": {}}], "k": [{}], "s": {"n": 1}, "n": [[]]},
    "after tensors": lambda: {"l": [torch.ones(2), {}], "p": {"g": []}, "s": {"n": 1}},
    "after dicts": lambda: {"l": [{"a": 1}, {}, [{}]], "s": {"n": 1}},
    "no parameters": lambda: {"o": {"state": {}, "param_groups": [{"params": [], "lr": 0.1}]}},
    "no groups": lambda: {"o": {"state": {}, "param_groups": []}, "s": {"n": {"m": 1}}},
}


def _from_torch_file(folder, sd, convert):
    state = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in sd.items()}
    torch.save(state, f"{folder}.pt")
    convert(f"{folder}.pt", folder)


def _converted(sd, folder):
    shardplan.save(sd, f"{folder}-native")
    shardplan.convert(f"{folder}-native", folder, format="dcp")


TORCH_FILES = {  # savers of files that torch reads
    "torch": lambda sd, p: dcp.save(sd, checkpoint_id=p),
    "planner": lambda sd, p: dcp.save(sd, checkpoint_id=p, planner=as_torch_save_planner()),
    "save": lambda sd, p: shardplan.save(sd, p, format="dcp"),
    "convert": _converted,
    "torch_save_to_dcp": lambda sd, p: _from_torch_file(p, sd, shardplan.torch_save_to_dcp),
    "torch's own": lambda sd, p: _from_torch_file(p, sd, format_utils.torch_save_to_dcp),
}
OUR_FILES = {
    "native": lambda sd, p: shardplan.save(sd, p),
    "writer": lambda sd, p: dcp.save(sd, storage_writer=as_torch_storage_writer(p)),
    "both": lambda sd, p: dcp.save(
        sd, storage_writer=as_torch_storage_writer(p), planner=as_torch_save_planner()
    ),
}
TORCH_READS = {
    "torch": lambda sd, p: dcp.load(sd, checkpoint_id=p),
    "planner": lambda sd, p: dcp.load(sd, checkpoint_id=p, planner=as_torch_load_planner()),
}
OUR_READS = {
    "load": shardplan.load,
    "reader": lambda sd, p: dcp.load(sd, storage_reader=as_torch_storage_reader(p)),
    "both": lambda sd, p: dcp.load(
        sd, storage_reader=as_torch_storage_reader(p), planner=as_torch_load_planner()
    ),
}


@pytest.mark.parametrize("case", HOLLOW)
@pytest.mark.parametrize("saver", [*TORCH_FILES, *OUR_FILES])
def test_state_dicts_with_empty_dicts_go_from_every_writer_to_every_reader(tmp_path, case, saver):
    make, folder = HOLLOW[case], tmp_path / "saved"
    saved = make()
    save = TORCH_FILES.get(saver) or OUR_FILES[saver]
    save(saved, str(folder))
    for load in (OUR_READS | (TORCH_READS if saver in TORCH_FILES else {})).values():
        got = make()
        load(got, str(folder))
        inner = [expand(sd) for sd in (got, saved)]
        assert_same(*inner)


@pytest.mark.parametrize("saver", [*TORCH_FILES, *OUR_FILES])
@pytest.mark.parametrize("before", [1, torch.ones(2), {"a": 1}], ids=["value", "tensor", "dict"])
def test_our_readers_know_lists_that_torch_cannot_load_again(tmp_path, before, saver):
    """torch loads no list that has an empty dict before anything else, not from its own files."""
    sd = {"l": [{}, [{}], before, {}], "s": {"n": 1}}
    (TORCH_FILES.get(saver) or OUR_FILES[saver])(sd, str(tmp_path / "saved"))
    for read in (OUR_READS["load"], OUR_READS["both"]):
        got = blank(sd)
        read(got, str(tmp_path / "saved"))
        assert_same(got, sd)


@pytest.mark.parametrize("save", ["save", "planner", "convert", "torch_save_to_dcp"])
def test_empty_dicts_are_kept_in_dcp_files_where_torch_does_not_see_them(tmp_path, save):
    sd = {"m": {"w": torch.ones(2)}, "e": {}, "n": {3: {}}, "l": [{}, 1]}
    TORCH_FILES[save](sd, str(tmp_path / "a"))
    assert_same(shardplan.restore(tmp_path / "a"), sd)
    names = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert sorted(names) == ["l.1", "m.w"]
    assert shardplan.verify(tmp_path / "a").ok
    shardplan.convert(tmp_path / "a", tmp_path / "b")
    assert_same(shardplan.restore(tmp_path / "b"), sd)


def test_state_that_only_the_checkpoint_has_is_not_passed_over(tmp_path):
    shardplan.save(_adamw(1), tmp_path)
    for read in (OUR_READS["load"], OUR_READS["both"]):
        with pytest.raises(
            BaseException, match=r"`optim\.state` is empty .* before its first step"
        ):
            read(_adamw(0), tmp_path)


def test_a_load_that_is_not_strict_says_what_was_missing(tmp_path):
    dcp.save({"a": torch.ones(2), "c": 1}, checkpoint_id=tmp_path)
    got = {"a": torch.zeros(2), "b": torch.zeros(2)}
    planner = as_torch_load_planner(strict=False)
    dcp.load(got, checkpoint_id=tmp_path, planner=planner)
    assert got["a"].tolist() == [1, 1]
    assert (planner.report.missing, planner.report.unexpected) == (("b",), ("c",))


def test_another_dtype_is_a_mistake_unless_a_cast_is_asked_for(tmp_path):
    dcp.save({"w": torch.arange(3)}, checkpoint_id=tmp_path)
    got = {"w": torch.zeros(3)}
    error = only_failure(dcp.load, got, checkpoint_id=tmp_path, planner=as_torch_load_planner())
    assert isinstance(error, PlanError)
    assert "`w` was saved as int64 and is wanted as float32" in str(error)
    dcp.load(got, checkpoint_id=tmp_path, planner=as_torch_load_planner(dtype="cast"))
    assert got["w"].tolist() == [0, 1, 2]


def test_the_storage_says_of_itself_what_torch_s_own_does(tmp_path):
    writer = as_torch_storage_writer(tmp_path / "a")
    meta = dcp.save({"w": torch.zeros(4)}, storage_writer=writer).storage_meta
    assert (meta.save_id, meta.checkpoint_id) == (writer.save_id, str(tmp_path / "a"))
    reader = as_torch_storage_reader(tmp_path / "a")
    found = reader.read_metadata()
    expected = torch_metadata.StorageMeta(str(tmp_path / "a"), writer.save_id, reader.load_id)
    assert (found.storage_meta, found.version) == (expected, torch_files.CURRENT_DCP_VERSION)
    assert (writer.path, reader.path) == (tmp_path / "a", tmp_path / "a")
    first = writer.save_id, reader.load_id
    writer.reset(tmp_path / "b")
    reader.reset(tmp_path / "b")
    assert {writer.save_id, reader.load_id}.isdisjoint(first)
    assert (writer.path, reader.path) == (tmp_path / "b", tmp_path / "b")


def test_the_storage_keeps_what_torch_said_of_a_checkpoint(tmp_path):
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = as_torch_storage_reader(tmp_path).read_metadata()
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id
    assert ours.storage_meta.checkpoint_id == str(theirs.storage_meta.checkpoint_id)
    assert ours.version == theirs.version


def test_a_writer_that_is_used_again_writes_other_files(tmp_path):
    writer = as_torch_storage_writer(tmp_path, overwrite=True)
    for step in range(2):
        planner = default_planner.DefaultSavePlanner()
        planner.set_up_planner({"w": torch.full((2,), step)}, writer.storage_meta(), True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan(plans)
        done = writer.write_data(planner.finish_plan(plan), planner).wait()
        writer.finish(metadata, [done])
        assert shardplan.restore(tmp_path)["w"].tolist() == [step, step]


def test_asynchronous_saves_run_our_planner_and_our_storage(tmp_path):
    writer = as_torch_storage_writer(tmp_path)
    planner = as_torch_save_planner(rename({"w": "v"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.async_save({"w": torch.ones(2)}, storage_writer=writer, planner=planner).result()
    assert_same(shardplan.restore(tmp_path), {"v": torch.ones(2)})


class Custom:
    """A value that cannot be loaded without running code."""


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"gone": torch.zeros(2)}, "`gone` is not in the checkpoint"),
        ({"w": 1}, "`w` was saved as a tensor and is wanted as a non-tensor value"),
        ({"step": torch.zeros(2)}, "`step` was saved as a non-tensor value and is wanted"),
        ({"w": torch.zeros(3)}, r"`w` was saved with shape \[2\] and is wanted with \[3\]"),
    ],
)
@pytest.mark.parametrize("storage", ["torch", "ours"])
def test_a_load_that_cannot_be_right_is_one_error_that_names_the_key(
    tmp_path, storage, wanted, message
):
    planner = as_torch_save_planner(drop("gone"))
    sd = {"w": torch.ones(2), "step": 1, "gone": torch.ones(2)}
    ours = storage == "ours"
    where = (
        {"storage_writer": as_torch_storage_writer(tmp_path)}
        if ours
        else {"checkpoint_id": tmp_path}
    )
    dcp.save(sd, planner=planner, **where)
    where = (
        {"storage_reader": as_torch_storage_reader(tmp_path)}
        if ours
        else {"checkpoint_id": tmp_path}
    )
    error = only_failure(dcp.load, wanted, planner=as_torch_load_planner(), **where)
    assert isinstance(error, PlanError)
    with pytest.raises(PlanError, match=message):
        raise error


def test_tensors_that_cannot_be_filled_are_named_and_nothing_is_changed(tmp_path):
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    fixed = np.zeros(2, np.float32)
    fixed.flags.writeable = False
    got = {"a": torch.zeros(2), "b": fixed}
    error = only_failure(dcp.load, got, checkpoint_id=tmp_path, planner=as_torch_load_planner())
    assert "`b` is a numpy array that is read-only" in str(error)
    assert got["a"].tolist() == [0, 0]


def test_values_that_need_code_are_refused_by_key_both_ways(tmp_path):
    sd = {"w": torch.ones(2), "args": Custom()}
    for where in (
        {"checkpoint_id": tmp_path / "a", "planner": as_torch_save_planner()},
        {"storage_writer": as_torch_storage_writer(tmp_path / "a")},
    ):
        error = only_failure(dcp.save, sd, **where)
        assert "`args` " in str(error)
        assert "Custom" in str(error)
    left = {path.name for path in (tmp_path / "a").iterdir()}
    assert not left & {".metadata", "shardplan.json"}
    dcp.save(sd, checkpoint_id=tmp_path / "b")  # torch itself takes anything
    planner = as_torch_load_planner()
    error = only_failure(dcp.load, dict(sd), checkpoint_id=tmp_path / "b", planner=planner)
    assert "`args` cannot be loaded without running code" in str(error)


def test_casts_that_torch_cannot_make_are_refused_by_key(tmp_path):
    sd = {"w": torch.ones(2)}
    passes = cast({"w": "float4_e2m1fn_x2"}, lossy=True)
    planner = as_torch_save_planner(passes)
    error = only_failure(dcp.save, sd, checkpoint_id=tmp_path, planner=planner)
    assert "`w` is float32, which torch cannot cast to float4_e2m1fn_x2" in str(error)


def test_a_pipeline_that_matches_nothing_is_one_error(tmp_path):
    planner = as_torch_save_planner(select("no.such"))
    error = only_failure(dcp.save, {"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
    assert isinstance(error, PlanError)
    assert "'no.such' matches nothing" in str(error)


# torch's planners, our storage


def test_torch_s_planners_write_checkpoints_of_ours(tmp_path):
    sd = state(DTYPES)
    dcp.save(sd, storage_writer=as_torch_storage_writer(tmp_path))
    assert_same(shardplan.restore(tmp_path), sd)
    got = blank(sd)
    shardplan.load(got, tmp_path)
    assert_same(got, sd)
    assert shardplan.verify(tmp_path).ok
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_torch_s_planners_read_checkpoints_of_ours(tmp_path):
    sd = state(DTYPES)
    shardplan.save(sd, tmp_path)
    got = blank(sd)
    dcp.load(got, storage_reader=as_torch_storage_reader(tmp_path))
    assert_same(got, sd)


@pytest.mark.parametrize("format", ["dcp", "hf", "torch"])
def test_torch_s_planners_read_other_formats(tmp_path, format):
    sd = {"model": {"w": torch.arange(12.0).view(3, 4), "scale": torch.tensor(2.0)}}
    path = tmp_path / ("c.pt" if format == "torch" else "c")
    if format == "dcp":
        dcp.save(sd, checkpoint_id=path)
    elif format == "torch":
        torch.save(sd, path)
    else:
        path.mkdir()
        safetensors.torch.save_file(flatten(sd)[0], path / "model.safetensors")
    for planner in (None, as_torch_load_planner()):
        got = blank(sd)
        dcp.load(got, storage_reader=as_torch_storage_reader(path), planner=planner)
        assert_same(got, sd)


def test_torch_makes_a_nested_state_dict_of_a_checkpoint_of_ours(tmp_path):
    sd = {"model": {"w": torch.ones(2), "b": torch.ones(1)}, "groups": [{"lr": 0.1}], "step": 7}
    shardplan.save(sd, tmp_path)
    reader = as_torch_storage_reader(tmp_path)
    got = {}
    planner = default_planner._EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(got, reader, no_dist=True, planner=planner)
    assert_same(got, sd)
    some = dcp.state_dict_loader._load_state_dict_from_keys({"model"}, storage_reader=reader)
    assert_same(some, {"model": sd["model"]})


def test_both_ends_may_be_ours_inside_torch_s_save_and_load(tmp_path):
    passes = chain(rename(lambda key: f"x.{key}"), cast({"x.turned": "float64"}), split_chunks(16))
    sd = state(DTYPES) | {"nested": {3: torch.ones(2)}, "pair": (torch.ones(2), 1)}
    dcp.save(
        sd,
        storage_writer=as_torch_storage_writer(tmp_path),
        planner=as_torch_save_planner(passes),
    )
    got, again = blank(sd), blank(sd)
    dcp.load(
        got,
        storage_reader=as_torch_storage_reader(tmp_path),
        planner=as_torch_load_planner(passes),
    )
    assert_same(got, sd)
    shardplan.load(again, tmp_path, planner=passes)
    assert_same(again, sd)


def test_only_the_bytes_that_are_asked_for_are_read(tmp_path, monkeypatch):
    shardplan.save({"w": torch.arange(1000.0)}, tmp_path)
    stats = []
    fill = shardplan.io.execute.read.Reader.fill
    monkeypatch.setattr(
        shardplan.io.execute.read.Reader,
        "fill",
        lambda *args, **kwargs: stats.append(fill(*args, **kwargs)),
    )

    class Half(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            cut = {"lengths": torch.Size([10]), "storage_offsets": torch.Size([500])}
            unhinted = torch_metadata.MetadataIndex("w", [0])
            item = dataclasses.replace(plan.items[0], storage_index=unhinted, **cut)
            return torch_plans.LoadPlan([item])

    got = {"w": torch.zeros(1000)}
    dcp.load(got, storage_reader=as_torch_storage_reader(tmp_path), planner=Half())
    assert got["w"][:11].tolist() == [*range(500, 510), 0]
    assert stats[0].bytes_read == 40


def test_damage_is_noticed_through_torch_s_load(tmp_path):
    shardplan.save({"w": torch.arange(1000.0)}, tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    got = {"w": torch.zeros(1000)}
    error = only_failure(dcp.load, got, storage_reader=as_torch_storage_reader(tmp_path))
    assert "checksums do not fit: `w`" in str(error)


def test_a_missing_checkpoint_is_an_error_that_says_so(tmp_path):
    error = only_failure(
        dcp.load, {"w": torch.zeros(1)}, storage_reader=as_torch_storage_reader(tmp_path)
    )
    assert "there is no checkpoint" in str(error)


def test_a_checkpoint_is_replaced_only_if_asked_for(tmp_path):
    for writer in (as_torch_storage_writer(tmp_path), as_torch_storage_writer("elsewhere")):
        where = {} if writer.checkpoint_id == tmp_path else {"checkpoint_id": tmp_path}
        sd = {"w": torch.full((2,), float(not where))}
        if where:
            error = only_failure(dcp.save, sd, storage_writer=writer, **where)
            assert isinstance(error, FileExistsError)
        else:
            dcp.save(sd, storage_writer=writer)
    assert_same(shardplan.restore(tmp_path), {"w": torch.ones(2)})
    writer = as_torch_storage_writer(tmp_path, overwrite=True)
    for step in (5.0, 6.0):  # a writer serves any number of saves
        dcp.save({"w": torch.full((2,), step)}, storage_writer=writer)
        assert_same(shardplan.restore(tmp_path), {"w": torch.full((2,), step)})
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_fails_to_commit_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("shardplan.io.formats.native.write.publish", fail)
    error = only_failure(
        dcp.save, {"w": torch.ones(2)}, storage_writer=as_torch_storage_writer(tmp_path)
    )
    assert "disk full" in str(error)
    assert not list(tmp_path.iterdir())


def test_what_torch_plans_as_one_value_stays_one(tmp_path):
    sd = {"pair": (torch.ones(1), {"a": 2}), "step": 1}
    dcp.save(sd, storage_writer=as_torch_storage_writer(tmp_path))
    assert repr(shardplan.restore(tmp_path)["pair"]) == repr(sd["pair"])
    got = {"pair": None, "step": 0}
    dcp.load(got, storage_reader=as_torch_storage_reader(tmp_path))
    assert repr(got) == repr(sd)


class WrongData(dcp.DefaultSavePlanner):
    """Gives bytes for tensors and tensors for bytes."""

    def resolve_data(self, write_item):
        is_bytes = write_item.type is torch_plans.WriteItemType.BYTE_IO
        return torch.ones(1) if is_bytes else io.BytesIO()


def test_a_planner_that_gives_the_wrong_kind_of_data_gets_an_error_with_the_keys(tmp_path):
    sd = {"w": torch.ones(2), "step": 1}
    writer = as_torch_storage_writer(tmp_path)
    error = only_failure(dcp.save, sd, storage_writer=writer, planner=WrongData())
    assert "`w` is planned as a tensor, and its planner gives a BytesIO" in str(error)
    assert "`step` is planned as bytes, and its planner gives a Tensor" in str(error)


def swapped(kind):
    class Swapped(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            (item,) = super().create_local_plan().items
            index = torch_metadata.MetadataIndex("step" if kind.name == "TENSOR" else "w", None)
            if kind.name == "TENSOR":
                return torch_plans.LoadPlan([dataclasses.replace(item, storage_index=index)])
            zero = torch.Size([0])
            return torch_plans.LoadPlan(
                [torch_plans.ReadItem(kind, index, zero, index, zero, zero)]
            )

    return Swapped()


@pytest.mark.parametrize("kind", list(torch_plans.LoadItemType), ids=lambda kind: kind.name)
def test_a_planner_that_asks_for_the_wrong_kind_of_data_gets_an_error_with_the_key(tmp_path, kind):
    shardplan.save({"w": torch.ones(2), "step": 1}, tmp_path)
    reader, got = as_torch_storage_reader(tmp_path), {"w": torch.zeros(2)}
    error = only_failure(dcp.load, got, storage_reader=reader, planner=swapped(kind))
    name = "step" if kind.name == "TENSOR" else "w"
    assert isinstance(error, PlanError)
    assert f"`{name}` was saved as a" in str(error)


class Lossy(dcp.DefaultSavePlanner):
    """Forgets an item once all ranks have agreed."""

    def finish_plan(self, new_plan):
        return dataclasses.replace(new_plan, items=new_plan.items[:1])


def test_a_plan_that_changes_after_it_was_agreed_on_is_refused(tmp_path):
    sd = {"a": torch.ones(2), "b": torch.ones(2)}
    writer = as_torch_storage_writer(tmp_path)
    error = only_failure(dcp.save, sd, storage_writer=writer, planner=Lossy())
    assert "changed its plan" in str(error)


def forget_plans(monkeypatch):
    """Give torch's planners empty memories, as in a new process."""
    for cache in ("save_plan", "all_plans", "global_plan", "final_save_plan", "metadata"):
        monkeypatch.setattr(torch_plans.SavePlanner, f"_cached_{cache}", {})


def same(got, expected):
    got, expected = flatten(got)[0], flatten(expected)[0]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(got[name]), torch.as_tensor(value)), name


def test_plans_that_torch_s_planner_remembers_are_used_again(tmp_path, monkeypatch):
    forget_plans(monkeypatch)
    for number, size in enumerate([2, 2, 3]):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = as_torch_storage_writer(tmp_path / str(number))
        saved = {"w": torch.full((size,), number), "step": number}
        dcp.save(saved, storage_writer=writer, planner=planner, no_dist=True)
        assert shardplan.verify(tmp_path / str(number)).ok
        same(shardplan.restore(tmp_path / str(number)), saved)


def as_they_are(plans):
    return plans


@pytest.mark.parametrize("pipeline", [None, as_they_are, chain(select("w"), cast("float32"))])
def test_our_save_planner_can_be_sent_to_another_process(tmp_path, pipeline):
    planner = pickle.loads(pickle.dumps(as_torch_save_planner(pipeline)))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a", planner=planner, no_dist=True)
    same(shardplan.restore(tmp_path / "a"), {"w": torch.ones(2)})


def test_a_tensor_may_have_any_name(tmp_path):
    saved = {"shardplan": torch.ones(2), "x": {1: torch.ones(1)}}
    dcp.save(saved, checkpoint_id=tmp_path / "a", planner=as_torch_save_planner(), no_dist=True)
    same(shardplan.restore(tmp_path / "a"), saved)
    got = {"shardplan": torch.zeros(2), "x": {1: torch.zeros(1)}}
    dcp.load(got, checkpoint_id=tmp_path / "a", no_dist=True)
    same(got, saved)


@pytest.mark.parametrize("saved", [{"w": torch.ones(2), "s": 3}, {"w": {"v": torch.ones(2)}}])
def test_torch_loads_some_keys_of_a_checkpoint_of_ours(tmp_path, saved):
    shardplan.save(saved, tmp_path / "a")
    reader = as_torch_storage_reader(tmp_path / "a")
    same(_load_state_dict_from_keys("w", storage_reader=reader), {"w": saved["w"]})


def test_paths_that_lie_beside_torch_s_metadata_come_back(tmp_path):
    shardplan.save({"x": {1: torch.ones(2)}, "y": (torch.ones(1),)}, tmp_path, format="dcp")
    record = torch_files.FileSystemReader(tmp_path).read_metadata()
    assert vars(to_torch(from_torch(record))) == vars(record)
    assert set(from_torch(record).planner_data["paths"]) == {"x.1", "y.0"}


def test_what_our_storage_cannot_do_is_said(tmp_path, monkeypatch):
    sd = {"w": torch.ones(2)}
    writer = as_torch_storage_writer(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save(sd, storage_writer=writer, use_collectives=False)
    forget_plans(monkeypatch)
    cached = {"storage_writer": writer, "planner": dcp.DefaultSavePlanner(enable_plan_caching=True)}
    dcp.save(sd, **cached)
    remembered = torch_plans.SavePlanner._cached_global_plan
    remembered["another planner"] = [torch_plans.SavePlan([])]  # whose plan is meant?
    error = only_failure(dcp.save, sd, **cached)
    assert "enable_plan_caching" in str(error)


# Metadata that is read off a state dict


def test_metadata_of_a_state_dict_is_that_of_saving_it_in_one_process():
    sd = state() | {"nested": {3: torch.ones(2)}}
    assert metadata_of(sd) == global_plan([local_plan(sd)])[1]


@given(plans_of.state_dicts())
def test_metadata_of_any_state_dict_is_that_of_saving_it(sd):
    assert metadata_of(sd) == global_plan([local_plan(sd)])[1]


def test_metadata_of_a_sharded_state_dict_has_each_tensor_in_one_piece():
    sd = {"w": TensorSpec((6, 2), "float32", [Shard(0)])}
    metadata = metadata_of(sd)
    assert metadata.state_dict_metadata["w"].chunks == [Chunk((0, 0), (6, 2))]
    second = local_plan(sd, mesh=Mesh(dp=2), rank=1)
    (read,) = load_plan(metadata, second).items
    assert (read.storage_offsets, read.lengths) == ((3, 0), (3, 2))


def test_metadata_of_what_cannot_be_saved_names_every_key():
    sd = {k: torch.zeros(2, 2).to_sparse() for k in ("a", "b")}
    with pytest.raises(RefusedError, match=r"`a`.*`b`"):
        metadata_of(sd)


def test_the_front_door_has_what_planning_has():
    assert metadata_of is planning.metadata_of
    assert Metadata is planning.Metadata


# Four real ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return, per case, what each of four processes reported."""
    folder = tmp_path_factory.mktemp("adapt")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", RANKS / "adapt.py"]
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(4)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "4", folder / "store", folder],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    assert codes == [0] * 4, "\n".join((folder / f"log-{r}").read_text() for r in range(4))
    ranks = [json.loads((folder / f"told-{r}").read_text()) for r in range(4)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


@pytest.mark.slow
def test_torch_saves_in_another_process_through_our_planner(tmp_path):
    script = RANKS / "in_process.py"
    done = subprocess.run(
        [sys.executable, "-P", script, tmp_path / "a"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    same(shardplan.restore(tmp_path / "a"), {"model.w": torch.arange(4.0).bfloat16(), "step": 3})


@pytest.mark.slow
def test_on_four_ranks_our_pipeline_writes_torch_s_files(reports):
    for rank in reports["our_planners"]:
        assert (rank["loaded"], rank["optim"], rank["plain"]) == ([], [], [])
        assert rank["dtype"] == "torch.float64"
        assert rank["chunks"] > 1  # replicas were split


@pytest.mark.slow
def test_on_four_ranks_torch_s_planners_use_our_files(reports):
    for rank in reports["our_storage"]:
        assert rank["loaded"] == rank["resharded"] == rank["restored"] == rank["our load"] == []
        assert rank["verified"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both", "from_torch_s_own"])
def test_on_four_ranks_everything_comes_back(reports, case):
    assert [rank["loaded"] for rank in reports[case]] == [[]] * 4


@pytest.mark.slow
def test_what_four_ranks_saved_each_by_itself_is_read_as_one_and_rank_by_rank(reports):
    right = {"loaded": [], "resharded": [], "own": True, "verified": True}
    assert reports["each_alone"] == [right] * 4


@pytest.mark.slow
def test_some_of_the_ranks_can_save_and_load_by_themselves(reports):
    assert reports["some_ranks"] == [{}, {"loaded": []}, {}, {"loaded": []}]


@pytest.mark.slow
def test_on_four_ranks_a_planner_means_the_same_to_torch_and_to_us(reports):
    names = {
        "captured": [f"own.{rank}" for rank in range(4)],
        "numbered": [f"own@{rank}of4" for rank in range(4)],
        "counted": ["allx4", *(f"own{rank}x1" for rank in range(4)), "wx4"],
    }
    for rank in reports["scopes"]:
        for case, expected in names.items():
            assert rank[case] == {"names": [expected] * 2, "wrong": [[], []], "missing": []}


@pytest.mark.slow
def test_passes_see_their_rank_in_the_process_group_that_the_planner_is_given(reports):
    for rank in (1, 3):
        names, refused = reports["scopes"][rank]["some"]
        assert names == ["w@0of2", "w@1of2"]
        ((error, text),) = refused.values()
        assert error == "ValueError"
        assert "give the planner the process_group" in text


@pytest.mark.slow
def test_every_rank_learns_what_went_wrong_and_where(reports):
    first, *others = reports["failures"]
    assert others == [first] * 3
    assert first["dropped, planner"].keys() == set("0123")
    assert {tuple(e) for e in first["dropped, planner"].values()} == {
        ("PlanError", "`w` is not in the checkpoint; strict=False leaves it as it is")
    }
    assert "state_dict: w" in first["dropped, torch"]["0"][1]
    assert first["exists"]["0"][0] == "ExistsError"
    assert first["no such key"]["0"][0] == "PlanError"
    for kind in ("planner", "torch"):
        ((rank, (error, text)),) = first[f"unsafe, {kind}"].items()
        assert (rank, error) == ("3", "ValueRefusedError")
        assert "`only.r3`" in text
        assert "Callback" in text
    assert first["left"] == []
