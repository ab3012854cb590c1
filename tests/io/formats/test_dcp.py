"""Checkpoints of torch.distributed.checkpoint, both ways, with torch itself on the other side."""

import contextlib
import importlib.util
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import shardplan
from shardplan._memory import destinations
from shardplan._read import read_rank
from shardplan.io.errors import ExistsError, FormatError, UnsureCommitError, ValueRefusedError
from shardplan.io.execute.read import Reader
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.dcp import metadata as rank_module
from shardplan.io.formats.dcp.metadata import METADATA, Described, parse_metadata
from shardplan.io.formats.registry import find_writer, open_source
from shardplan.io.formats.torch_save.names import load_nested
from shardplan.io.pool import Pool
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore, FaultyStore, InjectedError
from shardplan.planning import (
    Chunk,
    Metadata,
    PlanError,
    TensorMetadata,
    TensorProperties,
    flatten,
    global_plan,
    load_plan,
    local_plan,
    split_chunks,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.geometry.tilings import tile_chunks
from shardplan.planning.testing.strategies import tensor_specs
from shardplan.torch_dcp.planners import UnsafeValueError, load_buffer

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]


# Means


def random_tensor(shape, dtype, seed=0):
    count = int(torch.Size(shape).numel()) * ITEMSIZE[dtype]
    generator = random.Random(f"{shape}{dtype}{seed}")
    raw = bytes(generator.randrange(2 if dtype == "bool" else 256) for _ in range(count))
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


def raw(value):
    """Return what says all of a value, bit by bit."""
    if isinstance(value, torch.Tensor):
        value = value.detach().resolve_conj().resolve_neg().contiguous()
        flat = value.as_strided((value.numel(),), (1,))
        data = flat.view(torch.uint8).tolist() if value.numel() else []
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return {key: raw(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [raw(inner) for inner in value]
    return value


def torch_save(sd, path, **options):
    planner = options.pop("planner", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(path, sync_files=False, **options)
        dcp.save(sd, storage_writer=writer, planner=planner, no_dist=True)


def torch_load(sd, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return sd


def torch_restore(path):
    """Let torch make a state dict of a checkpoint, nested as `dcp_to_torch_save` nests it."""
    sd = {}
    planner = _EmptyStateDictLoadPlanner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            sd, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True
        )
    return sd


def save(sd, store, *, planner=None, overwrite=False, save_id="0123ab"):
    store, writer = open_store(store), find_writer("dcp")
    writer.refuse(store, overwrite)
    local = (local_plan(sd),) if planner is None else planner((local_plan(sd),))
    plans, metadata = global_plan(local)
    part = writer.write(WriteJob(store, sd, plans[0], save_id=save_id, rank=0))
    try:
        return writer.commit(
            CommitJob(store, metadata, plans, [part.report], save_id=save_id, overwrite=overwrite)
        )
    except BaseException:
        writer.discard(store, part.report, save_id)
        raise


def load(sd, store):
    reader = Reader(open_source(store))
    flat, _ = flatten(sd)
    plan = load_plan(reader.metadata, local_plan(sd), strict=True)
    return read_rank(reader, plan, destinations(flat, plan.items, reader))


NESTED = {
    "model": {
        "w": torch.arange(12.0).reshape(4, 3),
        "transposed": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "columns": torch.arange(24).reshape(4, 6)[:, ::2],
        "scalar": torch.tensor(3, dtype=torch.int16),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    },
    "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "t": torch.ones(2)}],
    "step": 7,
    "betas": (0.9, 0.999),
    "name": "run",
    "raw": b"\0\xff",
    "none": None,
    "big": 1 << 80,
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


# From torch


def test_what_torch_saved_is_restored_bit_for_bit(tmp_path):
    torch_save(NESTED, tmp_path)
    assert raw(shardplan.restore(tmp_path)) == raw(NESTED)
    assert open_source(tmp_path).format == "dcp"


@pytest.mark.parametrize(
    "options",
    [
        {"single_file_per_rank": False},
        {"thread_count": 3},
        {"thread_count": 2, "single_file_per_rank": False},
    ],
    ids=str,
)
def test_torch_may_spread_items_over_files(tmp_path, options):
    torch_save(NESTED, tmp_path, **options)
    assert raw(shardplan.restore(tmp_path)) == raw(NESTED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_exchanged_both_ways(tmp_path, dtype):
    sd = {
        "m": random_tensor((3, 5), dtype),
        "s": random_tensor((), dtype, 1),
        "e": random_tensor((2, 0), dtype),
        "t": random_tensor((3, 2), dtype, 2).t(),
    }
    torch_save(sd, tmp_path / "theirs")
    assert raw(shardplan.restore(tmp_path / "theirs")) == raw(sd)
    save(sd, tmp_path / "ours")
    blank = {name: torch.empty_like(t.contiguous()) for name, t in sd.items()}
    try:
        assert raw(torch_load(blank, tmp_path / "ours")) == raw(sd)
    except (NotImplementedError, RuntimeError):  # torch cannot copy, or load, some dtypes
        with pytest.raises((NotImplementedError, RuntimeError)):
            torch_load(blank, tmp_path / "theirs")
    assert raw(shardplan.restore(tmp_path / "ours")) == raw(sd)


def test_safetensors_items_which_torch_cannot_load_are_refused(tmp_path):
    torch_save({"a": torch.ones(3)}, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(FormatError, match="`a`: it was written as safetensors"):
        shardplan.restore(tmp_path)


def load_value_pickle(data):
    return load_nested(data).value


@pytest.mark.parametrize(
    ("read", "name", "shared"),
    [
        (parse_metadata, b"builtins\nset\n", b"]" + b"(" + b"K\x01" * 1000 + b"e"),
        (load_value_pickle, b"builtins\nset\n", b"](" + bytes(range(75, 76)) * 400 + b"e"),
        (load_value_pickle, b"builtins\nbytearray\n", b"B\xe8\x03\x00\x00" + b"x" * 1000),
    ],
)
def test_a_pickle_that_copies_one_object_again_and_again_is_refused(read, name, shared):
    again = b"h\x01h\x00\x85R" * 1000
    data = b"\x80\x04" + shared + b"\x940c" + name + b"\x940](" + again + b"e."
    with pytest.raises(ValueError, match="copies or hashes more than its own length"):
        read(data)


class Alone(dcp.FileSystemWriter):
    """Writes as some rank of a save without collectives does, without the other ranks."""

    def __init__(self, path, rank):
        super().__init__(path)
        self.number = rank

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        super().set_up_storage_writer(True, rank=self.number, use_collectives=False)


def save_alone(folder, *states):
    for rank, sd in enumerate(states):
        dcp.save(sd, storage_writer=Alone(folder, rank), use_collectives=False)


def test_chunks_of_many_ranks_are_tiled_once_when_their_files_are_merged(monkeypatch):
    """Tiling after each rank would look at all chunks so far, again and again."""
    tiled = []

    def counted(chunks):
        chunks = list(chunks)
        tiled.append(len(chunks))
        return tile_chunks(chunks)

    monkeypatch.setattr(rank_module, "tile_chunks", counted)
    parts = {}
    for rank in range(50):
        chunks = [Chunk((0,), (2,)), Chunk((2 + rank,), (1,))]
        entry = TensorMetadata(TensorProperties(), (52,), chunks)
        parts[f"__{rank}.metadata"] = Described(Metadata({"w": entry}), (), {})
    merged = rank_module.merge_ranks(parts).metadata.state_dict_metadata["w"]
    assert tiled == [51]
    assert [c.offsets for c in merged.chunks] == [(0,), *((i,) for i in range(2, 52))]


def test_what_ranks_saved_each_by_itself_is_one_checkpoint(tmp_path):
    folder = tmp_path / "run" / "step-1"
    common = {"w": torch.arange(4.0), "step": 7, "s": {"lr": [0.1]}}
    save_alone(folder, *(common | {"own": {rank: torch.full((2,), rank)}} for rank in range(3)))
    assert METADATA not in os.listdir(folder)
    own = {str(rank): torch.full((2,), rank) for rank in range(3)}
    assert raw(shardplan.restore(folder)) == raw(common | {"own": own})
    assert "own.2" in shardplan.open_checkpoint(folder)
    assert shardplan.verify(folder).ok
    assert shardplan.latest(tmp_path / "run") == str(folder)
    shardplan.convert(folder, tmp_path / "native")
    assert raw(shardplan.restore(tmp_path / "native")) == raw(common | {"own": own})
    got = {"w": torch.zeros(4), "own": {"2": torch.zeros(2, dtype=torch.int64)}}
    dcp.load(got, storage_reader=shardplan.as_torch_storage_reader(folder))
    assert got["own"]["2"].tolist() == [2, 2]
    assert list(shardplan.restore(folder / "__1.metadata")["own"]) == ["1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": 1}, {"x": 2}),
        ({"x": torch.ones(3)}, {"x": torch.zeros(3)}),
        ({"x": torch.ones(3)}, {"x": torch.ones(4)}),
        ({"x": torch.ones(3)}, {"x": torch.ones(3).double()}),
        ({"x": torch.ones(3)}, {"x": 1}),
        ({"x": {"y": 1}}, {"x": 1}),
        ({"x": [torch.ones(1)]}, {"x": {"0": torch.ones(1)}}),
    ],
)
def test_what_ranks_saved_each_by_itself_and_differs_is_never_chosen_from(tmp_path, one, other):
    save_alone(tmp_path, one | {"w": torch.ones(2)}, other | {"w": torch.ones(2)})
    with pytest.raises(FormatError, match=r"`x.*(differs|different|nested|is a value)"):
        shardplan.restore(tmp_path)
    for rank, mine in enumerate((one, other)):
        got = shardplan.restore(tmp_path / f"__{rank}.metadata")
        assert raw(got) == raw(mine | {"w": torch.ones(2)})


def test_replicas_without_checksums_are_refused(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_alone(tmp_path, {"w": torch.ones(3)}, {"w": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(FormatError, match=r"`w`.*without checksums"):
        shardplan.restore(tmp_path)


def test_a_rank_that_never_finished_its_own_part_is_named(tmp_path):
    save_alone(tmp_path, *({"w": torch.ones(2)} for _ in range(3)))
    (tmp_path / "__1.metadata").unlink()
    with pytest.raises(FormatError, match=r"__1\.metadata: it is missing, and __2\.metadata is"):
        shardplan.open_checkpoint(tmp_path)
    (tmp_path / "__0.metadata").unlink()
    with pytest.raises(FormatError, match="there is no checkpoint"):
        shardplan.open_checkpoint(tmp_path)


def test_a_checkpoint_takes_the_place_of_what_ranks_saved_each_by_itself(tmp_path):
    save_alone(tmp_path, *({"w": torch.ones(2)} for _ in range(2)))
    for format in ("safetensors", "hf"):
        with pytest.raises(ExistsError, match=r"'dcp'.*choose another folder"):
            shardplan.save({"w": torch.zeros(2)}, tmp_path, format=format, overwrite=True)
    with pytest.raises(ExistsError, match="overwrite=True"):
        shardplan.save({"w": torch.zeros(2)}, tmp_path, format="dcp")
    shardplan.save({"w": torch.zeros(2)}, tmp_path, format="dcp", overwrite=True)
    assert shardplan.restore(tmp_path)["w"].tolist() == [0, 0]
    assert not [
        name for name in os.listdir(tmp_path) if re.match(r"__\d+(_0\.distcp|\.meta)", name)
    ]


def test_damage_to_what_another_rank_saved_is_found(tmp_path):
    save_alone(tmp_path, *({"w": torch.arange(100.0)} for _ in range(2)))
    file = tmp_path / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(torch.arange(100.0).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    report = shardplan.verify(tmp_path)
    assert [fault.file for fault in report.faults] == ["__1_0.distcp"]


def test_state_dicts_that_were_not_flattened_are_read(tmp_path):
    sd = {"w": torch.ones(2), "nested": {"t": torch.arange(3), "n": 1}}
    torch_save(sd, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert raw(shardplan.restore(tmp_path)) == raw(sd)


def test_pickles_of_other_pythons_and_torches_are_read(tmp_path):
    torch_save({"w": torch.ones(2)}, tmp_path)
    file = tmp_path / METADATA
    found = pickle.loads(file.read_bytes())
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(found, protocol=protocol)
        assert parse_metadata(data).metadata == parse_metadata(file.read_bytes()).metadata
    old = pickle.dumps(found, protocol=2)
    for new, older in (
        (b"torch.distributed.checkpoint.metadata\nTensorProperties",
         b"torch.distributed._shard.sharded_tensor.metadata\nTensorProperties"),
        (b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
         b"torch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING"),
    ):  # fmt: skip
        old = old.replace(new, older)
    assert b"_shard" in old
    assert parse_metadata(old).metadata == parse_metadata(file.read_bytes()).metadata


def test_opening_needs_no_torch(tmp_path):
    torch_save(NESTED, tmp_path)
    code = f"""
import sys
sys.modules["torch"] = None
from shardplan.io.formats.registry import open_source
source = open_source({str(tmp_path)!r})
print(source.format, len(source.metadata.state_dict_metadata), source.value("betas"))
print(source.find_chunks([("model.w", 0)])[0].extents)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:2] == ["dcp 19 (0.9, 0.999)", "(4, 3)"], done.stderr


# To torch


def test_torch_loads_what_was_saved_in_place(tmp_path):
    save(NESTED, tmp_path)
    blank = {
        **dict.fromkeys(NESTED),
        "model": {k: torch.zeros_like(v) for k, v in NESTED["model"].items()},
        "groups": [{"lr": 0, "params": None}, {"lr": 0, "t": torch.zeros(2)}],
    }
    assert raw(torch_load(blank, tmp_path)) == raw(NESTED)


def test_torch_restores_nested_and_so_do_we(tmp_path):
    sd = {"a": {3: {"k": torch.ones(2)}}, "t": (torch.ones(1), {"x": 1}), "l": [torch.ones(1)]}
    save(sd, tmp_path)
    assert raw(shardplan.restore(tmp_path)) == raw(sd)
    plain = {"a": {"3": {"k": torch.ones(2)}}, "t": [torch.ones(1), {"x": 1}]}
    assert raw(torch_restore(tmp_path)) == raw({**plain, "l": sd["l"]})


def test_model_and_optimizer_go_both_ways(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        model, state = get_state_dict(net, optimizer)
        return net, optimizer, {"model": model, "optim": state}

    _, _, first = make(0)
    for number, (write, read) in enumerate(((save, torch_load), (torch_save, shardplan.load))):
        net, optimizer, other = make(1)
        write(first, tmp_path / str(number))
        read(other, tmp_path / str(number))
        assert raw(other) == raw(first)
        set_state_dict(
            net, optimizer, model_state_dict=other["model"], optim_state_dict=other["optim"]
        )


@st.composite
def views(draw):
    """A tensor of random bits, seen in some way."""
    spec = draw(tensor_specs())
    tensor = random_tensor(spec.shape, spec.dtype, draw(st.integers(0, 9)))
    axes = draw(st.permutations(range(tensor.ndim)))
    tensor = tensor.permute(axes)
    for axis in range(tensor.ndim):
        if tensor.shape[axis] > 1 and draw(st.booleans()):
            tensor = tensor[(slice(None),) * axis + (slice(1, None, draw(st.integers(1, 2))),)]
    return tensor


@given(
    st.dictionaries(st.text("ab.", min_size=1, max_size=3), views(), max_size=4),
    st.integers(16, 64),
)
def test_random_state_dicts_survive_both_ways(tmp_path_factory, sd, max_bytes):
    folder = tmp_path_factory.mktemp("both")
    torch_save(sd, folder / "theirs")
    save(sd, folder / "ours", planner=split_chunks(max_bytes))
    assert raw(shardplan.restore(folder / "theirs")) == raw(sd)
    assert raw(shardplan.restore(folder / "ours")) == raw(sd)
    assert raw(torch_restore(folder / "ours")) == raw(sd)


def test_every_item_is_a_sound_archive_and_aligned(tmp_path):
    save(NESTED, tmp_path)
    found = pickle.loads((tmp_path / METADATA).read_bytes())
    for index, info in found.storage_data.items():
        data = (tmp_path / info.relative_path).read_bytes()[info.offset :][: info.length]
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert archive.testzip() is None, index
        assert info.offset % 64 == 0
        for record in archive.infolist():
            head = data[record.header_offset :][:30]
            lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:], "little")
            assert (record.header_offset + 30 + lengths) % 64 == 0 or "serial" in record.filename
    assert found.storage_meta.save_id == "0123ab"
    assert {info.relative_path for info in found.storage_data.values()} == {"__0_0-0123ab.distcp"}


# How much is read


def test_a_reshard_reads_what_it_needs_and_headers(tmp_path):
    rows = torch.arange(4096.0 * 256).reshape(4096, 256)
    torch_save({"w": rows, "v": rows * 2}, tmp_path)
    store = CountingStore(open_store(tmp_path))
    source = open_source(store)
    store.clear()
    saved = shardplan.open_checkpoint(store)["w"]
    store.clear()
    assert torch.equal(saved[1000:1010], rows[1000:1010])
    assert store.bytes_read() <= 10 * 1024 + 4096
    store.clear()
    assert torch.equal(saved[:, 3], rows[:, 3])
    assert store.bytes_read() <= rows.nbytes + 4096
    assert source.metadata.state_dict_metadata["w"].size == (4096, 256)


def test_thousands_of_items_take_few_requests(tmp_path):
    sd = {f"layer.{i}.w": torch.full((3, 4), float(i)) for i in range(1000)}
    torch_save(sd, tmp_path)
    store = CountingStore(open_store(tmp_path))
    found = shardplan.restore(store)
    assert raw(found) == raw(sd)
    assert sum(o.name == "read" for o in store.operations) < 20
    assert store.bytes_read() < 1000 * (1024 + 48) + (tmp_path / METADATA).stat().st_size + 65536


def test_object_stores_hold_such_checkpoints_too(tmp_path):
    save(NESTED, "memory://dcp-exchange/a")
    assert raw(shardplan.restore("memory://dcp-exchange/a")) == raw(NESTED)


# Safe commits


def test_an_existing_checkpoint_is_not_overwritten_unasked(tmp_path):
    save({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(ExistsError, match="overwrite=True"):
        save({"w": torch.zeros(1)}, tmp_path)
    shardplan.save({"w": torch.ones(1)}, tmp_path / "own")
    with pytest.raises(ExistsError):
        save({"w": torch.zeros(1)}, tmp_path / "own")


def test_overwriting_leaves_nothing_of_the_old(tmp_path):
    save({"w": torch.ones(1)}, tmp_path)
    assert save({"w": torch.zeros(2)}, tmp_path, overwrite=True, save_id="ffff") == ()
    assert sorted(os.listdir(tmp_path)) == [METADATA, "__0_0-ffff.distcp"]
    assert raw(torch_restore(tmp_path)) == raw({"w": torch.zeros(2)})


@pytest.mark.parametrize("mode", ["raise", "stop"])
@pytest.mark.parametrize("landed", [0, 0.5, 1])
def test_at_any_failure_the_old_or_the_new_checkpoint_loads(tmp_path, mode, landed):
    old, new = {"w": torch.ones(3), "n": 1}, {"w": torch.zeros(4), "n": 2}
    count = None
    for fail_at in range(99):
        if count is not None and fail_at > count:
            break
        folder = tmp_path / str(fail_at)
        save(old, folder)
        store = FaultyStore(open_store(folder), fail_at=fail_at, mode=mode, landed=landed)
        try:
            save(new, store, overwrite=True, save_id="new")
            count = fail_at
        except (InjectedError, UnsureCommitError):
            pass
        assert raw(shardplan.restore(folder)) in (raw(old), raw(new))
        assert raw(torch_restore(folder)) in (raw(old), raw(new))
    assert count is not None
    assert count >= 3


def test_values_that_are_not_safe_are_refused_before_anything_is_written(tmp_path):
    sd = {"ok": 1, "bad": range(3), "worse": {"path": Path("/")}, "w": torch.ones(2)}
    with pytest.raises(ValueRefusedError) as error:
        save(sd, tmp_path / "x")
    assert error.value.reasons.keys() == {"bad", "worse.path"}
    assert not (tmp_path / "x").exists()


# Bad input


class Gadget:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_pickle_that_names_other_things_is_refused_and_nothing_runs(tmp_path):
    marker = tmp_path / "ran"
    torch_save({"w": torch.ones(2), "v": 1}, tmp_path)
    file = tmp_path / METADATA
    gadget = b"cposix\nsystem\nX" + len(f"touch {marker}").to_bytes(4, "little")
    gadget += f"touch {marker}".encode() + b"\x85R."
    good = file.read_bytes()
    for data in (gadget, pickle.dumps(Gadget()), b"\x80\x04" + gadget):
        file.write_bytes(data)
        with pytest.raises(FormatError, match=r"posix\.system"):
            open_source(tmp_path)
    found = pickle.loads(good)
    found.planner_data = {"x": Gadget()}
    file.write_bytes(pickle.dumps(found))
    with pytest.raises(FormatError, match=r"\.metadata: .*posix\.system"):
        open_source(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x04]r\xff\xff\xff\xff.",  # a memo of four billion slots
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00.",  # a bytearray of petabytes
        b"\x80\x04cbuiltins\ngetattr\n)R.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x01aNs\x86b.",
        b"I1\n.",
        b"",
        b"\x80\x04",
        b"\x80\x04N.",
    ],
)
def test_hostile_pickles_are_refused_cheaply(attack):
    with pytest.raises(FormatError, match="metadata"):
        parse_metadata(attack)


def tuples_of_tuples(levels):
    """Open a pickle with a tuple that is short to tell, and endless to print or to hash."""
    pairs = b"".join(b"0h%ch%c\x86\x94" % (n, n) for n in range(levels))
    return b"\x80\x04)\x94" + pairs + b"0", b"h%c" % levels


_TORCH = b"ctorch.distributed.checkpoint."


@pytest.mark.parametrize("field", ["path", "offset", "size", "property", "place", "version"])
def test_nested_tuples_are_neither_printed_nor_hashed(field):
    begin, bomb = tuples_of_tuples(60)

    def text(value):
        return b"\x8c%c" % len(value) + value

    def put(name):
        return bomb if field == name else b"N"

    def record(name, **fields):
        pairs = b"".join(text(key.encode()) + value for key, value in fields.items())
        return _TORCH + name + b"\n)\x81}(" + pairs + b"ub"

    whole = b"K\x00\x85"
    properties = b"\x8c\x07float32\x8c\x07strided\x89" + put("property") + b"\x89"
    tensor = record(
        b"metadata\nTensorStorageMetadata",
        properties=_TORCH + b"metadata\nTensorProperties\n)\x81(" + properties + b"tb",
        size=bomb if field == "size" else whole,
        chunks=b"]",
    )
    index = record(b"metadata\nMetadataIndex", fqn=text(b"w"), offset=put("offset"))
    place = bomb if field == "place" else b"K\x00"
    info = record(
        b"filesystem\n_StorageInfo", relative_path=text(b"f"), offset=place, length=b"K\x00"
    )
    path = bomb if field == "path" else text(b"w") + b"\x85"
    data = record(
        b"metadata\nMetadata",
        state_dict_metadata=b"}" + text(b"w") + tensor + b"s",
        storage_data=b"}" + index + info + b"s",
        planner_data=b"}" + text(b"w") + path + b"s",
        version=put("version"),
    )
    with pytest.raises(FormatError, match="metadata"):
        parse_metadata(begin + data + b".")


def test_values_in_compressed_archives_are_not_unpacked(tmp_path):
    torch_save({"v": {"a": 1}, "w": torch.ones(1)}, tmp_path)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02X\x00\x00\x10\x00" + b"a" * (1 << 20) + b".")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    data = packed.getvalue()
    (tmp_path / "packed.distcp").write_bytes(data)
    found = pickle.loads((tmp_path / METADATA).read_bytes())
    set_info(found, "v.a", relative_path="packed.distcp", offset=0, length=len(data))
    (tmp_path / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(FormatError, match=r"`v\.a`.*compressed"):
        shardplan.restore(tmp_path)
    with pytest.raises(UnsafeValueError, match="compressed"):
        load_buffer(packed)


@pytest.fixture
def damaged(tmp_path):
    """Return a function that changes `.metadata` of a small checkpoint and opens it again."""
    sd = {"w": torch.arange(64.0).reshape(8, 8), "v": torch.ones(8, 8), "step": 7}
    torch_save(sd, tmp_path)
    file = tmp_path / METADATA
    good = file.read_bytes()

    def change(edit):
        found = pickle.loads(good)
        edit(found)
        file.write_bytes(pickle.dumps(found))
        return tmp_path

    return change


def info(found, name):
    return next(i for index, i in found.storage_data.items() if index.fqn == name)


def set_info(found, name, **fields):
    for key, value in fields.items():
        object.__setattr__(info(found, name), key, value)


def set_entry(found, name, **fields):
    for key, value in fields.items():
        setattr(found.state_dict_metadata[name], key, value)


CHUNK = records.ChunkStorageMetadata
BAD_METADATA = {
    "a missing file": lambda f: set_info(f, "w", relative_path="gone.distcp"),
    "a file outside": lambda f: set_info(f, "w", relative_path="../x.distcp"),
    "an offset that is off": lambda f: set_info(f, "w", offset=info(f, "w").offset + 1),
    "an offset past the end": lambda f: set_info(f, "w", offset=1 << 50),
    "a length that is short": lambda f: set_info(f, "w", length=info(f, "w").length - 7),
    "a huge length": lambda f: set_info(f, "w", length=1 << 60),
    "a negative offset": lambda f: set_info(f, "w", offset=-1),
    "another item": lambda f: set_info(f, "w", **vars(info(f, "step"))),
    "no place": lambda f: [f.storage_data.pop(k) for k in list(f.storage_data) if k.fqn == "w"],
    "other sizes": lambda f: set_entry(
        f, "w", size=torch.Size([4, 16]), chunks=[CHUNK(torch.Size([0, 0]), torch.Size([4, 16]))]
    ),
    "another dtype": lambda f: set_entry(f, "w", properties=records.TensorProperties(torch.int32)),
    "an unknown dtype": lambda f: set_entry(
        f, "w", properties=records.TensorProperties(torch.quint8)
    ),
    "a sparse layout": lambda f: set_entry(
        f, "w", properties=records.TensorProperties(torch.float32, layout=torch.sparse_coo)
    ),
    "a chunk outside": lambda f: set_entry(
        f, "w", chunks=[CHUNK(torch.Size([1, 0]), torch.Size([8, 8]))]
    ),
    "a compressed item": lambda f: set_info(f, "w", transform_descriptors=["stream.zstd"]),
}


KEYS = {
    "tuple": (1, 2),
    "nested tuple": (1, ("x", None)),
    "frozenset": frozenset({1}),
    "float": 1.5,
    "bytes": b"x",
    "none": None,
    "bool": True,
    "int": 7,
    "text that looks like one": "(1, 2)",
    "numpy": np.int64(3),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("save", ["save", "convert", "planner"])
def test_keys_that_are_not_text_are_kept_as_the_native_format_keeps_them(tmp_path, kind, save):
    key = KEYS[kind]
    sd = {"a": {key: {"w": torch.ones(2)}, "b": {key: 5}}, key: {}, "c": {key: {}}}
    if save == "planner":
        dcp.save(sd, checkpoint_id=tmp_path / "a", planner=shardplan.as_torch_save_planner())
    elif save == "convert":
        shardplan.save(sd, tmp_path / "native")
        shardplan.convert(tmp_path / "native", tmp_path / "a", format="dcp")
    else:
        shardplan.save(sd, tmp_path / "a", format="dcp")
    got = shardplan.restore(tmp_path / "a")
    assert got["a"][key].pop("w").tolist() == [1, 1]
    assert got == {"a": {key: {}, "b": {key: 5}}, key: {}, "c": {key: {}}}
    target = {"a": {key: {"w": torch.zeros(2)}, "b": {key: 0}}}
    shardplan.load(target, tmp_path / "a")
    assert target["a"]["b"] == {key: 5}


@pytest.mark.parametrize("key", [torch.float32, 1j, range(3)], ids=str)
def test_keys_that_cannot_be_kept_are_refused_and_nothing_is_written(tmp_path, key):
    sd = {"a": {key: torch.ones(2), "b": 1}}
    with pytest.raises(ValueRefusedError, match=r"`a\..*` lies under the key .*cannot be kept"):
        shardplan.save(sd, tmp_path / "a", format="dcp")
    with pytest.raises(dcp.api.CheckpointException, match="lies under the key"):
        dcp.save(sd, checkpoint_id=tmp_path / "b", planner=shardplan.as_torch_save_planner())
    assert not [file for _, _, files in os.walk(tmp_path) for file in files]


@pytest.mark.parametrize("fault", BAD_METADATA)
def test_metadata_that_disagrees_with_the_files_is_reported_by_file_and_key(damaged, fault):
    folder = damaged(BAD_METADATA[fault])
    blank = torch.empty(4, 16) if "sizes" in fault else torch.empty(8, 8)
    blank = blank.int() if fault == "another dtype" else blank
    with pytest.raises(FormatError, match=r"(distcp|metadata).*`w`"):
        load({"w": blank}, folder)


def test_another_long_length_is_reported(damaged):
    folder = damaged(lambda f: set_info(f, "v", length=info(f, "v").length + 7))
    with pytest.raises(FormatError, match="`v`"):
        load({"w": torch.empty(8, 8), "v": torch.empty(8, 8)}, folder)


def test_extensions_are_refused_by_name(damaged):
    with pytest.raises(FormatError, match=r"stream\.zstd"):
        load({"w": torch.empty(8, 8)}, damaged(BAD_METADATA["a compressed item"]))


def test_gaps_are_reported_and_nothing_is_touched(damaged):
    half = [CHUNK(torch.Size([0, 0]), torch.Size([4, 8]))]
    folder = damaged(lambda f: set_entry(f, "w", chunks=half))
    with pytest.raises(PlanError, match="`w`"):
        load({"w": torch.empty(8, 8)}, folder)


NOT_STRICT = {
    "restore": lambda folder: shardplan.restore(folder, keys=["w"]),
    "target": lambda folder: shardplan.restore(folder, {"w": torch.empty(8, 8, device="meta")}),
    "missing": lambda folder: shardplan.restore(folder, {"nope": torch.empty(8, device="meta")}),
    "open": lambda folder: shardplan.open_checkpoint(folder)["w"][:],
    "convert": lambda folder: shardplan.convert(folder, folder / "out"),
    "diff": lambda folder: shardplan.diff(folder, folder),
}


@pytest.mark.parametrize("reader", NOT_STRICT)
def test_an_error_speaks_of_no_argument_that_the_function_lacks(damaged, reader):
    half = [CHUNK(torch.Size([0, 0]), torch.Size([4, 8]))]
    folder = damaged(lambda f: set_entry(f, "w", chunks=half))
    with pytest.raises((PlanError, FormatError), match=r"`w`|`nope`") as caught:
        NOT_STRICT[reader](folder)
    assert "strict" not in str(caught.value)
    with pytest.raises(PlanError, match="uncovered; strict=False accepts gaps"):
        load({"w": torch.empty(8, 8)}, folder)


def test_values_and_tensors_are_not_taken_for_each_other(damaged):
    folder = damaged(lambda f: None)
    with pytest.raises(PlanError, match="`step`"):
        load({"step": torch.empty(2)}, folder)
    with pytest.raises(PlanError, match="`w`"):
        load({"w": 3}, folder)
    folder = damaged(lambda f: set_info(f, "w", **vars(info(f, "step"))))
    with pytest.raises(FormatError, match=r"`w`.*not a tensor"):
        load({"w": torch.empty(8, 8)}, folder)


def test_truncated_files_are_reported(tmp_path):
    torch_save({"w": torch.ones(64), "v": 1}, tmp_path)
    file = tmp_path / "__0_0.distcp"
    data = file.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"__0_0\.distcp: .*`[vw]`"):
            shardplan.restore(tmp_path)


def test_values_of_other_classes_are_reported_with_the_way_to_allow_them(tmp_path):
    torch_save({"w": torch.ones(1), "deep": {"path": Path("a/b")}}, tmp_path)
    with pytest.raises(FormatError, match=r"`deep\.path`.*pathlib.*add_safe_globals"):
        shardplan.restore(tmp_path)
    assert raw(shardplan.restore(tmp_path, keys="w")) == raw({"w": torch.ones(1)})
    with torch.serialization.safe_globals([type(Path("a")), *_path_globals()]):
        assert shardplan.restore(tmp_path, keys="deep.*") == {"deep": {"path": Path("a/b")}}


def _path_globals():
    return [(type(Path("a")), "pathlib.PosixPath")]


def test_a_gadget_inside_an_item_never_runs(tmp_path):
    marker = tmp_path / "ran"

    class Local:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    torch_save({"v": Local(), "w": torch.ones(2)}, tmp_path)
    marker.unlink(missing_ok=True)
    with pytest.raises(FormatError, match=r"posix\.system"):
        shardplan.restore(tmp_path)
    found = pickle.loads((tmp_path / METADATA).read_bytes())
    set_info(found, "w", **vars(info(found, "v")))
    (tmp_path / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(FormatError, match=r"`w`.*posix\.system"):
        load({"w": torch.ones(2)}, tmp_path)
    assert not marker.exists()


def test_random_damage_is_an_error_or_does_no_harm(tmp_path):
    torch_save({"w": torch.ones(16), "t": torch.ones(4, 2).t(), "v": [1, 2]}, tmp_path)
    file = tmp_path / METADATA
    good = file.read_bytes()
    generator = random.Random(1)
    for _ in range(100):
        data = bytearray(good)
        data[generator.randrange(len(data))] = generator.randrange(256)
        file.write_bytes(data)
        with contextlib.suppress(FormatError, PlanError, ValueError):
            shardplan.restore(tmp_path)


# Real ranks


WORLD = 4
SCRIPT = Path(__file__).parents[2] / "ranks" / "exchange.py"


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Run one process group of four ranks, which save and load both ways."""
    folder = tmp_path_factory.mktemp("exchange")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", SCRIPT]
    ranks = []
    for rank in range(WORLD):
        arguments = [str(rank), str(WORLD), str(folder / "store"), str(folder)]
        log = (folder / f"log-{rank}").open("w")
        ranks.append(
            subprocess.Popen(
                [*command, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        )
    try:
        codes = [rank.wait(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = "\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(WORLD))
    assert codes == [0] * WORLD, logs
    return folder


@pytest.mark.slow
def test_four_ranks_load_what_the_other_side_saved(exchanged):
    """As saved, and laid out in another way: by torch from us, by us from torch."""
    told = [json.loads((exchanged / f"told-{rank}").read_text()) for rank in range(WORLD)]
    assert told == [[True] * 4] * WORLD


@pytest.mark.slow
def test_one_process_loads_what_four_ranks_saved(exchanged):
    spec = importlib.util.spec_from_file_location("ranks_exchange", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    expected = {
        "model": {name: script.full(name) for name in ("uneven", "few", "grid")},
        "optim": {"state": {"0": {"vector": script.full("vector")}}},
        "same": script.full("same"),
        "plain": torch.ones(3),
        "step": 7,
    }
    assert raw(shardplan.restore(exchanged / "theirs")) == raw(expected)
    assert raw(torch_restore(exchanged / "ours")) == raw(expected)
    for converted in ("shared", "alone", "alone.pt"):  # by all ranks, and by the first alone
        assert raw(shardplan.restore(exchanged / converted)) == raw(expected)
    shards = {p.name.split("-")[1] for p in (exchanged / "shared").glob("shard-*")}
    assert len(shards) > 1
    files = {p.name.partition("-")[0] for p in (exchanged / "ours").glob("*.distcp")}
    assert files == {f"__{rank}_0" for rank in range(WORLD)}


def test_values_are_read_within_the_memory_budget(tmp_path):
    sd = {f"v{i}": os.urandom(1 << 20) * 2 for i in range(6)}
    shardplan.save(sd, tmp_path, format="dcp")
    with Pool(max_workers=4, max_bytes=24 << 20) as pool:
        tracemalloc.start()
        found = shardplan.restore(tmp_path, pool=pool)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert found == sd
    assert 10 << 20 < pool.peak_bytes <= 24 << 20
    assert peak < sum(map(len, sd.values())) + pool.max_bytes


@pytest.mark.parametrize("nbytes", [1, 4, 100, 4096])
def test_a_stretch_of_zeros_anywhere_in_a_data_file_is_found_by_load_and_by_verify(
    tmp_path, nbytes
):
    wanted = {"w": torch.rand(20, 20), "v": torch.arange(1, 9)}
    shardplan.save(wanted, tmp_path, format="dcp")
    (file,) = tmp_path.glob("*.distcp")
    sound = file.read_bytes()
    for at in range(0, len(sound), max(nbytes // 2, 17)):
        harmed = bytearray(sound)
        harmed[at : at + nbytes] = bytes(len(harmed[at : at + nbytes]))
        file.write_bytes(harmed)
        is_sound = shardplan.verify(tmp_path).ok
        try:
            found = shardplan.restore(tmp_path)
        except FormatError:
            assert harmed != sound
            assert not is_sound, f"verify missed what restore refuses: byte {at}"
        else:
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), at
