"""The manifest by rule: any comes back, it is small, and it covers every bit of a checkpoint."""

import json
import math
import shutil
import time
import tracemalloc
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardplan
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io.checksums import XXH3
from shardplan.io.errors import FormatError
from shardplan.io.execute import leftovers
from shardplan.io.formats import open_source
from shardplan.io.formats.native import write
from shardplan.io.formats.native.encoding import decode_manifest, encode_manifest
from shardplan.io.formats.native.manifest import read_manifest
from shardplan.io.formats.native.record import MANIFEST, FileTable, Manifest, file_bytes
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import (
    LLAMA_TP,
    BytesMetadata,
    Mesh,
    Metadata,
    PlanError,
    Shard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    adam,
    derive_plans,
    find_issues,
    flatten,
    fsdp_tp,
    llama3_405b,
    load_plan,
    local_plan,
    split_chunks,
    world_pass,
    world_plans,
)
from shardplan.planning.columns import column
from shardplan.planning.storage import chunk_places, file_name
from shardplan.planning.testing.strategies import shapes, tilings
from shardplan.planning.tree import nesting_data


@st.composite
def manifests(draw):
    """Return any manifest: chunks in any arrangement, in any files, under any names."""
    nested = draw(
        st.dictionaries(
            st.text("a.b", min_size=1, max_size=4),
            st.none() | st.dictionaries(st.text("c.d", min_size=1, max_size=3), st.none()),
            max_size=6,
        )
    )
    try:
        flat, paths = flatten(nested)
    except PlanError:  # two keys flatten to one name
        flat, paths = {}, {}
    count = draw(st.integers(12, 16))
    entries, columns, place, values = {}, [], [], {}
    for name in sorted(flat):
        kind = draw(st.sampled_from(["tensor", "tensor", "inline", "bytes"]))
        entries[name] = BytesMetadata()
        if kind == "tensor":
            size = draw(shapes())
            dtype = TensorProperties(draw(st.sampled_from(["float32", "bfloat16"])))
            entries[name] = TensorMetadata(dtype, size, draw(tilings(size)))
        else:
            values[name] = (kind, draw(st.integers(0, 99)))
        chunks = len(entries[name].chunks) if kind == "tensor" else int(kind == "bytes")
        order = draw(
            st.permutations(range(count)) if draw(st.booleans()) else st.just(range(count))
        )
        where = list(order)[:chunks]
        if chunks and where not in columns:
            columns.append(where)
        place.append(columns.index(where) if chunks else -1)
    metadata = Metadata(entries, planner_data=nesting_data(flat, paths, {}))
    places = tuple(map(column, columns))
    own = draw(st.booleans())
    names = [file_name(r, 0, 1, "5f3a") if own else f"{r}.safetensors" for r in range(count)]
    tables = draw(st.lists(st.integers(0, count - 1), unique=True))
    names += [f"{names[row].removesuffix('.safetensors')}.sums" for row in tables]
    headers = np.array(draw(st.lists(st.integers(8, 99), min_size=len(names), max_size=len(names))))
    state = metadata.state_dict_metadata
    held = file_bytes(state, places, column(place), values, len(names), max_bytes=math.inf)
    digest = st.integers(0, (1 << 64) - 1)
    digests = draw(st.lists(digest, min_size=len(names), max_size=len(names)))
    files = FileTable(tuple(names), headers + held, headers, tuple(digests))
    return Manifest("5f3a", metadata, files, places, column(place), values, draw(st.floats(0, 2e9)))


@given(manifests())
def test_every_manifest_reads_back_as_it_was_written(manifest):
    again = decode_manifest(encode_manifest(manifest))
    assert again.metadata.state_dict_metadata == manifest.metadata.state_dict_metadata
    assert again.metadata.planner_data == manifest.metadata.planner_data
    assert (again.save_id, again.created) == (manifest.save_id, manifest.created)
    assert again.values == manifest.values
    for name in manifest.entries:
        assert again.files_of(name).tolist() == manifest.files_of(name).tolist()
    for field in ("names", "digests"):
        assert getattr(again.files, field) == getattr(manifest.files, field)
    for field in ("sizes", "headers"):
        assert getattr(again.files, field).tolist() == getattr(manifest.files, field).tolist()
    assert again.files.tables == manifest.files.tables
    assert encode_manifest(again) == encode_manifest(decode_manifest(encode_manifest(again)))


def test_files_whose_sizes_do_not_fit_their_chunks_are_not_committed(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    manifest = read_manifest(open_store(tmp_path))
    files = FileTable(manifest.files.names, column([7]), column([3]), (0,))
    wrong = attrs.evolve(manifest, files=files)
    with pytest.raises(FormatError, match="could not be opened: the sizes of its files"):
        encode_manifest(wrong)


# Small


def unsaved(plans, metadata, save_id="5f3a9c0d7e21"):
    """Return the manifest of a checkpoint that nobody saved; each rank has one file."""
    entries, ranks = metadata.state_dict_metadata, len(plans)
    places = chunk_places(entries, plans, np.arange(ranks)[:, None], [True] * len(entries))
    headers = 400_000 + 64 * (np.arange(ranks) % 7)
    held = file_bytes(entries, places.columns, places.entry, {}, ranks, max_bytes=math.inf)
    names = tuple(file_name(rank, 0, 1, save_id) for rank in range(ranks))
    digests = np.random.default_rng(0).integers(0, 1 << 63, ranks).tolist()
    files = FileTable(names, headers + held, headers, tuple(digests))
    return Manifest(save_id, metadata, files, places.columns, places.entry, {})


@pytest.mark.slow
def test_405b_with_adam_on_16384_ranks_takes_a_megabyte_and_opens_in_a_moment():
    mesh = Mesh(dp=2048, tp=8)
    specs = adam(fsdp_tp(llama3_405b(), mesh, LLAMA_TP))
    manifest = unsaved(*derive_plans(world_plans(specs, mesh)))
    data = encode_manifest(manifest)
    assert len(data) < 1_000_000
    took = []
    for _ in range(5):
        begun = time.process_time()
        assert not find_issues(decode_manifest(data).metadata)
        took.append(time.process_time() - begun)
    assert min(took) < 0.1
    tracemalloc.start()
    decode_manifest(data)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_the_manifest_does_not_grow_with_the_number_of_tensors_times_ranks(tmp_path):
    def size(ranks, tensors):
        mesh, spec = Mesh(dp=ranks), TensorSpec((4096, 2), "float32", [Shard(0)])
        specs = {f"layers.{n}.weight": spec for n in range(tensors)}
        return len(encode_manifest(unsaved(*derive_plans(world_plans(specs, mesh)))))

    few = size(64, 10)
    assert size(1024, 10) - few < 17 * (1024 - 64) + 100
    assert size(64, 1000) - few < 30 * 990
    assert abs(size(1024, 1000) - size(64, 1000) - (size(1024, 10) - few)) < 100


# Old versions


def state():
    """Return a state with values in files and in the manifest, nested in several ways."""
    whole = torch.arange(7 * 4, dtype=torch.float32).reshape(7, 4)
    return {
        "model": {"w": whole * 2, "b": torch.ones(5).bfloat16(), "deep": {"x": torch.arange(9)}},
        "step": 3,
        "raw": b"x" * 70_000,
        "list": [torch.zeros(2), {"a": 1}],
    }


@pytest.fixture
def both(tmp_path, as_old):
    """The same checkpoint with a manifest of version 3, and with one of version 2."""
    new = tmp_path / "new"
    options = {"planner": split_chunks(40)}
    run_ranks(3, lambda comm: shardplan.save(state(), new, comm=comm, **options))
    return new, as_old(Path(shutil.copytree(new, tmp_path / "old")))


def test_plans_places_and_checksums_are_the_same_from_either_version(both):
    new, old = map(open_source, both)
    assert (new.metadata.version, old.metadata.version) == ("3", "2")
    assert new.metadata.state_dict_metadata == old.metadata.state_dict_metadata
    assert new.metadata.planner_data == old.metadata.planner_data
    wanted = local_plan(state())
    assert load_plan(new.metadata, wanted) == load_plan(old.metadata, wanted)
    for name, entry in new.metadata.state_dict_metadata.items():
        chunks = len(entry.chunks) if isinstance(entry, TensorMetadata) else 0
        keys = [(name, number) for number in range(chunks)]
        assert new.find_chunks(keys) == old.find_chunks(keys)
        assert new.chunk_sums(keys) == old.chunk_sums(keys)
        assert new.sums_of(name).tolist() == old.sums_of(name).tolist()
    assert dict(new.file_sizes) == dict(old.file_sizes)


def test_an_old_checkpoint_is_checked_compared_and_replaced(both):
    new, old = both
    assert shardplan.verify(old).ok
    assert not shardplan.diff(new, old)
    assert shardplan.restore(old)["list"][1] == {"a": 1}
    shardplan.save({"w": torch.ones(2)}, old, overwrite=True)
    assert read_manifest(open_store(old)).metadata.version == "3"
    assert len(list(old.iterdir())) == 2


# Checksums in a file of their own


@pytest.fixture
def tabled(tmp_path, monkeypatch):
    """A checkpoint as stores that write from front to back get it, on a disk."""
    monkeypatch.setattr(write, "_COLLECTED", 100)
    sd = {"w": torch.arange(300.0).reshape(100, 3), "b": torch.ones(5), "raw": b"x" * 70_000}
    shardplan.save(sd, CountingStore(open_store(tmp_path / "c")), planner=split_chunks(600))
    return tmp_path / "c"


def test_large_files_on_stores_that_write_in_order_have_tables_of_checksums(tabled):
    names = {file.name for file in tabled.iterdir()}
    tables = sorted(name for name in names if name.endswith(".sums"))
    assert len(tables) == 2
    for table in tables:
        file = tabled / table.replace(".sums", ".safetensors")
        assert (tabled / table).stat().st_size == 8 * len(load_file(file))
    assert read_manifest(open_store(tabled)).files.names[-2:] == tuple(tables)
    assert shardplan.restore(tabled)["w"][99].tolist() == [297, 298, 299]
    report = shardplan.verify(tabled)
    assert report.ok
    assert report.nbytes == sum(file.stat().st_size for file in tabled.iterdir())


def test_every_bit_of_a_table_counts(tabled):
    for table in sorted(tabled.glob("*.sums")):
        whole = table.read_bytes()
        for position in range(len(whole)):
            data = bytearray(whole)
            data[position] ^= 1 << position % 8
            table.write_bytes(data)
            faults = shardplan.verify(tabled).faults
            assert [(fault.kind, fault.file) for fault in faults] == [("header", table.name)]
        with pytest.raises(FormatError, match="do not fit their own") as caught:
            shardplan.restore(tabled)
        assert caught.value.file == table.name
        table.write_bytes(whole)
    assert shardplan.verify(tabled).ok


@pytest.mark.parametrize("left", [None, 8, 10_000])
def test_a_table_that_is_gone_or_of_another_size_is_named(tabled, left):
    table = min(tabled.glob("*.sums"))
    data = table.read_bytes()
    table.unlink()
    if left is not None:
        table.write_bytes((data + bytes(left))[:left])
    kind = "missing" if left is None else "size"
    report = shardplan.verify(tabled)
    assert [(f.kind, f.file) for f in report.faults] == [(kind, table.name)]
    assert report.keys == ("b", "raw", "w")  # of which some bytes could not be checked
    with pytest.raises(FormatError) as caught:
        shardplan.restore(tabled)
    assert caught.value.file == table.name
    assert open_source(tabled).missing()[0].file == table.name


def test_tables_go_with_their_checkpoint(tabled):
    assert leftovers(open_store(tabled)) == ()
    shardplan.save({"w": torch.ones(2)}, tabled, overwrite=True)
    assert sorted(file.suffix for file in tabled.iterdir()) == [".json", ".safetensors"]


def test_a_save_that_fails_leaves_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "_COLLECTED", 100)

    class Full(CountingStore):
        def write(self, path, parts, **options):
            if "00002" in path.split("-of-")[0]:
                raise OSError("no space")
            return super().write(path, parts, **options)

    sd = {"w": torch.arange(300.0)}
    with pytest.raises(OSError, match="no space"):
        shardplan.save(sd, Full(open_store(tmp_path / "c")), planner=split_chunks(600))
    assert not list(tmp_path.rglob("*.s*"))


def test_large_files_are_written_to_object_stores_in_one_pass():
    tensor = torch.arange(5 << 20, dtype=torch.int32)
    store = CountingStore(open_store("memory://one-pass"))
    shardplan.save({"w": tensor}, store)
    assert sorted(name.rpartition(".")[2] for name in store.list()) == [
        "json",
        "safetensors",
        "sums",
    ]
    assert torch.equal(shardplan.restore(store)["w"], tensor)
    assert shardplan.verify(store).ok


# Every bit


def test_every_bit_of_a_header_and_of_the_manifest_counts(tmp_path):
    shardplan.save({"w": torch.arange(6.0), "b": torch.ones(3)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    header = json.loads((tmp_path / MANIFEST).read_text())["files"]["headers"][0]
    for path, end in ((file, header), (tmp_path / MANIFEST, None)):
        whole = path.read_bytes()
        for position in range(len(whole[:end])):
            data = bytearray(whole)
            data[position] ^= 1 << position % 8
            path.write_bytes(data)
            report = shardplan.verify(tmp_path)
            assert {fault.file for fault in report.faults} == {path.name}
        path.write_bytes(whole)
    assert shardplan.verify(tmp_path).ok


def test_a_checksum_in_a_header_that_was_edited_with_care_is_found_by_the_manifest(tmp_path):
    shardplan.save({"w": torch.arange(6.0)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    other = XXH3.of([memoryview(bytes(24))])
    file.write_bytes(data[:36] + f"{other:016x}".encode() + data[52:-24] + bytes(24))
    assert load_file(file)["w"].tolist() == [0.0] * 6
    with pytest.raises(FormatError, match="its header does not fit its checksum"):
        shardplan.restore(tmp_path)
    assert [f.kind for f in shardplan.verify(tmp_path).faults] == ["header"]


# Many ranks


@pytest.mark.parametrize("planner", [None, "world"])
def test_of_many_ranks_one_reads_the_manifest_and_sends_it_to_the_others(tmp_path, planner):
    shardplan.save(state(), tmp_path, planner=split_chunks(40))
    store = CountingStore(open_store(tmp_path))
    whole = world_pass(lambda plans: plans) if planner else None

    def fn(comm):
        mine = {"model": {"w": torch.zeros(7, 4)}, "step": 0}
        report = shardplan.load(mine, store, comm=comm, planner=whole)
        return mine["step"], mine["model"]["w"][6, 3].item(), report.verified > 0

    assert run_ranks(16, fn, timeout=60) == [(3, 54.0, True)] * 16
    reads = [o for o in store.operations if o.name == "read" and o.path == MANIFEST]
    assert len(reads) == 1


def test_if_that_rank_cannot_open_it_all_ranks_say_why(tmp_path):
    shardplan.save(state(), tmp_path)
    data = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(data.replace(b'"step"', b'"stop"'))

    def fn(comm):
        with pytest.raises(CheckpointError) as caught:
            shardplan.load({"step": 0}, tmp_path, comm=comm)
        return [(failure.rank, failure.type) for failure in caught.value.failures]

    assert run_ranks(16, fn, timeout=60) == [[(0, "FormatError")]] * 16


def test_other_formats_are_opened_by_each_rank(tmp_path):
    shardplan.save(state(), tmp_path, format="dcp")

    def fn(comm):
        mine = {"model": {"w": torch.zeros(7, 4)}}
        shardplan.load(mine, tmp_path, comm=comm)
        return mine["model"]["w"][6, 3].item()

    assert run_ranks(16, fn, timeout=60) == [54.0] * 16
