"""`torch.save` files, both ways, with torch itself on the other side."""

import argparse
import contextlib
import fractions
import io
import os
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan._checkpoint import Checkpoint
from shardplan.io.errors import ExistsError, FormatError, UnsureCommitError, ValueRefusedError
from shardplan.io.execute.copying import Block, FileContents
from shardplan.io.execute.pieces import Lazy
from shardplan.io.execute.read import Reader
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.registry import find_writer, open_source, open_target
from shardplan.io.formats.torch_save import source as torchsave
from shardplan.io.formats.torch_save.archive import FileWindow, lay_out, read_archive
from shardplan.io.stores.base import StoreError, open_store
from shardplan.io.stores.testing import CountingStore, FaultyStore, InjectedError
from shardplan.planning import (
    PlanError,
    RefusedError,
    cast,
    flatten,
    global_plan,
    local_plan,
    rename,
    split_chunks,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.testing.strategies import tensor_specs

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]


def archive_parts(layout, held):
    """Yield the bytes of an archive in order, given the blocks of its storages."""
    return FileContents(lambda _: layout.contents(held)).parts()


def random_tensor(shape, dtype, seed=0):
    count = int(torch.Size(shape).numel()) * ITEMSIZE[dtype]
    generator = random.Random(f"{shape}{dtype}{seed}")
    data = bytes(generator.randrange(2 if dtype == "bool" else 256) for _ in range(count))
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


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


def torch_save(sd, path):
    torch.save(sd, path)


def torch_load(path):
    return torch.load(path, weights_only=True)


def save(sd, path, *, planner=None, overwrite=False, wrap=lambda store: store):
    store, writer = open_target(path, "torch")
    store = wrap(store)
    writer.refuse(store, overwrite)
    local = (local_plan(sd),) if planner is None else planner((local_plan(sd),))
    plans, metadata = global_plan(local)
    part = writer.write(WriteJob(store, sd, plans[0], save_id="0123ab", rank=0))
    writer.commit(
        CommitJob(store, metadata, plans, [part.report], save_id="0123ab", overwrite=overwrite)
    )
    return part


BASE = torch.arange(24.0).reshape(4, 6)
NESTED = {
    "model": {
        "w": torch.arange(12.0).reshape(4, 3),
        "base": BASE,
        "transposed": BASE.t(),
        "inner": BASE[1:3, 2:5],
        "turned": BASE[1:3, 2:5].t(),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    },
    "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "t": torch.ones(2)}],
    "pair": (torch.ones(1), {"x": 1}),
    3: {"number": torch.ones(1)},
    "step": 7,
    "betas": (0.9, 0.999),
    "name": "run",
    "raw": b"\0\xff",
    "none": None,
    "set": {1, 2},
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


# From torch


def test_what_torch_saved_is_restored_bit_for_bit(tmp_path):
    torch_save(NESTED, tmp_path / "x.pt")
    assert open_source(tmp_path / "x.pt").format == "torch"
    assert raw(shardplan.restore(tmp_path / "x.pt")) == raw(NESTED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_exchanged_both_ways(tmp_path, dtype):
    sd = {
        "m": random_tensor((3, 5), dtype),
        "s": random_tensor((), dtype, 1),
        "e": random_tensor((2, 0), dtype),
        "t": random_tensor((3, 2), dtype, 2).t(),
    }
    torch_save(sd, tmp_path / "theirs.pt")
    assert raw(shardplan.restore(tmp_path / "theirs.pt")) == raw(sd)
    save(sd, tmp_path / "ours.pt")
    assert raw(torch_load(tmp_path / "ours.pt")) == raw(sd)


def test_models_and_optimizers_are_read(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=True)
    net(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    sd = {"model": net.state_dict(), "optim": optimizer.state_dict()}
    torch_save(sd, tmp_path / "x.pt")
    found = shardplan.restore(tmp_path / "x.pt")
    assert raw(found) == raw(sd)
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])


def test_slices_read_only_their_bytes(tmp_path):
    rows = torch.arange(4096.0 * 256).reshape(4096, 256)
    torch_save({"w": rows, "t": rows.clone().t()}, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    store = CountingStore(open_store(tmp_path))
    counted = Checkpoint(Reader(torchsave.TorchFormat().open(store, "x.pt")))
    assert store.bytes_read() < 1 << 17
    store.clear()
    assert torch.equal(counted["w"][1000:1010], rows[1000:1010])
    assert torch.equal(counted["t"][:, 7:9], rows.t()[:, 7:9])
    assert store.bytes_read() <= 12 * 1024 + 256
    assert source.metadata == counted.metadata


def test_object_stores_hold_such_files_too():
    save(NESTED, "memory://torch-files/a/x.pt")
    assert raw(shardplan.restore("memory://torch-files/a/x.pt")) == raw(NESTED)


def test_archives_that_others_zipped_again_are_read(tmp_path):
    torch_save(NESTED, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_STORED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert raw(shardplan.restore(tmp_path / "y.pt")) == raw(NESTED)


def test_a_value_that_hides_tensors_is_read_with_these_alone(tmp_path):
    hidden = torch.arange(6.0)
    sd = {"w": torch.ones(1 << 16), "bag": {hidden}, "args": argparse.Namespace(lr=0.5, t=hidden)}
    torch_save(sd, tmp_path / "x.pt")
    store = CountingStore(open_store(tmp_path))
    with torch.serialization.safe_globals([argparse.Namespace]):
        source = torchsave.TorchFormat().open(store, "x.pt")
        store.clear()
        (found,), args = source.value("bag"), source.value("args")
    assert raw(found) == raw(args.t) == raw(hidden)
    assert args.lr == 0.5
    assert store.bytes_read() == 2 * hidden.nbytes


def test_a_value_of_another_class_that_hides_none_reads_nothing(tmp_path):
    sd = {"w": torch.ones(1 << 16), "args": argparse.Namespace(lr=0.5), "size": torch.Size([2])}
    torch_save(sd, tmp_path / "x.pt")
    store = CountingStore(open_store(tmp_path))
    with torch.serialization.safe_globals([argparse.Namespace]):
        source = torchsave.TorchFormat().open(store, "x.pt")
        store.clear()
        args = source.value("args")
        args.lr = 7
        assert source.value("args").lr == 0.5  # what is handed out is nobody else's
    assert source.value("size") == torch.Size([2])
    assert store.bytes_read() == 0


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from shardplan.io.errors import FormatError
from shardplan.io.formats.registry import open_source
from shardplan.io.formats.registry import find_format, locate
from shardplan.planning import TensorMetadata

source = open_source(sys.argv[1])
entries = source.metadata.state_dict_metadata
tensors = [name for name, entry in entries.items() if isinstance(entry, TensorMetadata)]
source.find_chunks([(name, 0) for name in tensors])
for name in sorted(tensors):
    print(name, entries[name].properties.dtype, entries[name].size)
print(source.value("betas"), source.value("raw"), source.value("step"))
print(find_format(source.format).verify(*locate(sys.argv[1])).faults)
try:
    open_source(sys.argv[2])
except FormatError as error:
    print(error)
"""


def test_looking_into_a_file_needs_no_torch(tmp_path):
    torch_save(NESTED, tmp_path / "x.pt")
    torch_save({"args": fractions.Fraction(1, 2)}, tmp_path / "odd.pt")
    files = [str(tmp_path / name) for name in ("x.pt", "odd.pt")]
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    *names, values, faults, refused = done.stdout.splitlines()
    flat = {n: v for n, v in flatten(NESTED)[0].items() if isinstance(v, torch.Tensor)}
    assert names == [
        f"{name} {str(flat[name].dtype).removeprefix('torch.')} {tuple(flat[name].shape)}"
        for name in sorted(flat)
    ]
    assert (values, faults) == (r"(0.9, 0.999) b'\x00\xff' 7", "()")
    assert "fractions.Fraction" in refused


# To torch


def test_torch_loads_the_nested_state_dict(tmp_path):
    save(NESTED, tmp_path / "x.pt")
    assert raw(torch_load(tmp_path / "x.pt")) == raw(NESTED)
    assert raw(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)) == raw(NESTED)
    assert list(torch_load(tmp_path / "x.pt")) == list(NESTED)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
    assert os.listdir(tmp_path) == ["x.pt"]


def test_tensors_that_hide_in_values_are_written_so_that_torch_reads_them(tmp_path):
    base = torch.arange(6.0)
    odd = torch.tensor([1, 2, 3], dtype=torch.uint16)
    sd = {"w": base, "bag": {base[2:4]}, "odd": {odd}, "none": {torch.empty(0)}}
    save(sd, tmp_path / "x.pt")
    for found in (torch_load(tmp_path / "x.pt"), shardplan.restore(tmp_path / "x.pt")):
        assert raw(found["w"]) == raw(base)
        bags = [found[name].pop() for name in ("bag", "odd", "none")]
        assert raw(bags) == raw([base[2:4], odd, torch.empty(0)])
    assert shardplan.verify(tmp_path / "x.pt").ok


def test_a_hidden_tensor_of_another_class_is_refused_before_anything_is_written(tmp_path):
    save({"n": 1}, tmp_path / "x.pt")
    sd = {"bag": {torch.ones(2).as_subclass(Special)}, "w": torch.ones(1)}
    with pytest.raises(ValueRefusedError, match=r"bag.*Special"):
        save(sd, tmp_path / "x.pt", overwrite=True)
    assert torch_load(tmp_path / "x.pt") == {"n": 1}


@pytest.mark.parametrize("way", ["save", "convert"])
def test_tied_tensors_have_one_storage(tmp_path, way):
    w = torch.rand(1000)
    sd = {"a": w, "b": w, "part": w[:10]}
    if way == "save":
        save(sd, tmp_path / "x.pt")
    else:
        torch_save(sd, tmp_path / "theirs.pt")
        report = shardplan.convert(tmp_path / "theirs.pt", tmp_path / "x.pt", format="torch")
        assert report.bytes_read < 2 * w.nbytes
    found = torch_load(tmp_path / "x.pt")
    assert raw(found) == raw(sd)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert (tmp_path / "x.pt").stat().st_size < 2 * w.nbytes


@pytest.mark.parametrize("way", ["save", "convert"])
def test_tensors_go_on_to_need_gradients(tmp_path, way):
    sd = {
        "p": torch.nn.Parameter(torch.ones(3)),
        "fixed": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "t": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "plain": torch.ones(2),
    }
    if way == "save":
        save(sd, tmp_path / "x.pt")
    else:
        torch_save(sd, tmp_path / "theirs.pt")
        shardplan.convert(tmp_path / "theirs.pt", tmp_path / "x.pt", format="torch")
    found = torch_load(tmp_path / "x.pt")
    assert raw(found) == raw(sd)
    assert {n: t.requires_grad for n, t in found.items()} == {
        n: t.requires_grad for n, t in sd.items()
    }
    if way == "save":
        assert {n: type(t) for n, t in found.items()} == {n: type(t) for n, t in sd.items()}


def test_plans_may_cast_and_rename_but_not_cut(tmp_path):
    sd = {"a": {"w": torch.arange(30.0).reshape(5, 6)}, "n": 1}
    with pytest.raises(RefusedError, match=r"a\.w.* would be split"):
        save(sd, tmp_path / "cut.pt", planner=split_chunks(16))
    save(sd, tmp_path / "cast.pt", planner=cast("bfloat16"))
    assert raw(torch_load(tmp_path / "cast.pt")["a"]["w"]) == raw(sd["a"]["w"].bfloat16())
    save(sd, tmp_path / "name.pt", planner=rename({"a.w": "v"}))
    assert raw(torch_load(tmp_path / "name.pt")) == raw({"v": sd["a"]["w"], "n": 1})


@st.composite
def views(draw):
    """A tensor of random bits, seen in some way."""
    spec = draw(tensor_specs())
    tensor = random_tensor(spec.shape, spec.dtype, draw(st.integers(0, 9)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    for axis in range(tensor.ndim):
        if tensor.shape[axis] > 2 and draw(st.booleans()):
            tensor = tensor[(slice(None),) * axis + (slice(1, None),)]
    return tensor.unsqueeze(0) if draw(st.booleans()) else tensor


def nested(leaves):
    keys = st.text("ab", min_size=1, max_size=2) | st.integers(0, 3)
    inner = st.recursive(
        leaves,
        lambda deeper: (
            st.lists(deeper, max_size=3)
            | st.tuples(deeper)
            | st.dictionaries(keys, deeper, max_size=3)
        ),
        max_leaves=5,
    )
    return st.dictionaries(keys, inner, max_size=3)


@given(nested(views() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)))
def test_random_state_dicts_survive_both_ways(tmp_path_factory, sd):
    folder = tmp_path_factory.mktemp("both")
    try:
        torch_save(sd, folder / "theirs.pt")
        torch_load(folder / "theirs.pt")
    except Exception:  # what torch itself cannot carry, such as very large numbers
        return
    try:
        local_plan(sd)
    except PlanError:  # two names alike
        return
    assert raw(shardplan.restore(folder / "theirs.pt")) == raw(sd)
    save(sd, folder / "ours.pt")
    assert raw(torch_load(folder / "ours.pt")) == raw(sd)


@pytest.mark.slow
def test_more_than_four_gib_need_longer_numbers(tmp_path):
    """One storage of more than 4 GiB, and one after it; zeros are skipped, the file is sparse."""
    zeros = memoryview(bytes(1 << 26))
    large = (1 << 32) + 128

    def blocks(nbytes):
        for start in range(0, nbytes, len(zeros)):
            yield zeros[: min(len(zeros), nbytes - start)]

    from shardplan.io.formats.torch_save.write import Leaf, pickle_nested

    tail = torch.arange(5, dtype=torch.uint8)
    leaves = {"z": Leaf("0", "uint8", (large,)), "t": Leaf("1", "uint8", (5,))}
    storages = [large, 5]
    layout = lay_out(pickle_nested(leaves)[0], storages)
    held = [[Block(list(blocks(large)))], [Block([memoryview(tail.numpy())])]]
    size = 0
    with open(tmp_path / "x.pt", "wb") as file:
        for part in archive_parts(layout, held):
            if part.obj is zeros.obj:
                file.seek(len(part), os.SEEK_CUR)
            else:
                file.write(part)
            size += len(part)
    assert size == layout.size == (tmp_path / "x.pt").stat().st_size
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        names = {info.filename: info.file_size for info in archive.infolist()}
        assert names["archive/data/0"] == large
        assert archive.read("archive/data/1") == bytes(range(5))
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert found["t"].tolist() == list(range(5))
    assert found["z"].shape == (large,)
    archive = read_archive(FileWindow(open_store(tmp_path), "x.pt", 0, size))
    assert all(archive.records[name].guess is not None for name in ("data/0", "data/1"))
    assert shardplan.open_checkpoint(tmp_path / "x.pt")["t"][:].tolist() == list(range(5))


# Safe commits


def test_an_existing_file_is_not_overwritten_unasked(tmp_path):
    save({"n": 1}, tmp_path / "x.pt")
    with pytest.raises(ExistsError, match=r"x\.pt.*overwrite=True"):
        save({"n": 2}, tmp_path / "x.pt")
    save({"n": 2}, tmp_path / "x.pt", overwrite=True)
    assert torch_load(tmp_path / "x.pt") == {"n": 2}
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("landed", [0, 0.5, 1])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_at_any_failure_the_old_or_the_new_file_is_there_whole(tmp_path, landed, place):
    path = f"{tmp_path}/x.pt" if place == "disk" else f"memory://torch-{landed}/x.pt"
    old, new = {"w": torch.ones(3)}, {"w": torch.zeros(4)}
    save(old, path, overwrite=True)
    for fail_at in range(3):
        with contextlib.suppress(InjectedError, UnsureCommitError):
            save(new, path, overwrite=True,
                 wrap=lambda s, n=fail_at: FaultyStore(s, fail_at=n, landed=landed))  # fmt: skip
        assert raw(shardplan.restore(path)) in (raw(old), raw(new))


def test_a_failed_write_leaves_nothing(tmp_path):
    class Broken(Lazy):
        shape, dtype = (4,), "float32"

        def read_box(self, offsets, sizes):
            raise OSError("the source is gone")

    save({"n": 1}, tmp_path / "x.pt")
    sd = {"w": torch.ones(2), "z": torch.zeros(4)}
    store, writer = open_target(tmp_path / "x.pt", "torch")
    plans, _ = global_plan((local_plan(sd),))
    with pytest.raises((OSError, StoreError)):
        writer.write(WriteJob(store, {**sd, "z": Broken()}, plans[0], save_id="a", rank=0))
    assert os.listdir(tmp_path) == ["x.pt"]
    assert torch_load(tmp_path / "x.pt") == {"n": 1}


def test_only_one_process_may_write_a_file(tmp_path):
    store, writer = open_target(tmp_path / "x.pt", "torch")
    plans, _ = global_plan((local_plan({"n": 1}),))
    with pytest.raises(ValueError, match="convert"):
        writer.write(WriteJob(store, {"n": 1}, plans[0], save_id="a", rank=1))
    assert not os.listdir(tmp_path)


def test_a_target_is_a_file(tmp_path):
    for path in (tmp_path, f"{tmp_path}/", open_store(tmp_path), "memory://bucket"):
        with pytest.raises(ValueError, match="is a file"):
            open_target(path, "torch")
    with pytest.raises(ValueError, match="open_target"):
        find_writer("torch").refuse(open_store(tmp_path), False)


def test_values_that_are_not_safe_are_refused_before_anything_is_written(tmp_path):
    sd = {"ok": 1, "bad": range(3), "worse": {"path": Path("/")}, "w": torch.ones(2)}
    with pytest.raises(ValueRefusedError) as error:
        save(sd, tmp_path / "x.pt")
    assert error.value.reasons.keys() == {"bad", "worse.path"}
    assert "add_safe_globals" in str(error.value)
    with pytest.raises(ValueRefusedError, match="keys"):
        save({"a": {Path("/"): 1}}, tmp_path / "x.pt")
    assert not os.listdir(tmp_path)


# Bad input


def test_pickles_that_name_other_things_are_refused_and_nothing_runs(tmp_path):
    marker = tmp_path / "ran"

    class Gadget:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    torch_save({"w": torch.ones(1), "g": Gadget()}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: .*posix\.system.*malicious") as caught:
        open_source(tmp_path / "x.pt")
    assert "add_safe_globals" not in str(caught.value)
    assert not marker.exists()


def test_other_classes_are_reported_with_the_way_to_allow_them(tmp_path):
    torch_save({"w": torch.ones(1), "path": Path("a/b")}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"pathlib.*add_safe_globals"):
        open_source(tmp_path / "x.pt")
    with torch.serialization.safe_globals([(type(Path("a")), "pathlib.PosixPath")]):
        assert shardplan.restore(tmp_path / "x.pt")["path"] == Path("a/b")


class Special(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            "(?i)quantized|quint8",
        ),
        (lambda: torch.ones(2).as_subclass(Special), "Special"),
        (lambda: torch.ones(2, device="meta"), "without elements"),
        (lambda: torch.tensor([1 + 2j]).conj(), r"resolve_conj\(\)"),
        (lambda: torch.tensor([1 + 2j]).conj().imag, r"resolve_conj\(\)"),
    ],
    ids=["sparse", "csr", "quantized", "subclass", "meta", "conjugate", "negated"],
)
def test_tensors_that_are_not_plain_are_refused_by_name(tmp_path, value, reason):
    torch_save({"odd": value()}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=reason):
        open_source(tmp_path / "x.pt")
    torch_save({"w": torch.ones(1)}, tmp_path / "y.pt")
    assert torch_load(tmp_path / "y.pt")["w"].item() == 1  # torch was left as it was


@pytest.mark.parametrize("value", [torch.ones(2), [1, 2], 3])
def test_what_is_not_a_state_dict_is_reported(tmp_path, value):
    torch_save(value, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt: it holds a .*not a state dict"):
        open_source(tmp_path / "x.pt")


def test_torchscript_is_reported(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "x.pt")
    with pytest.raises(FormatError, match="TorchScript"):
        open_source(tmp_path / "x.pt")


def test_truncated_files_are_reported(tmp_path):
    torch_save({"w": torch.ones(64), "v": 1}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for length in (20, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "x.pt").write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"x\.pt: "):
            shardplan.restore(tmp_path / "x.pt")


def test_a_file_of_the_older_kind_is_refused_with_the_way_out(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"x\.pt: .*torch\.load.* save it again"):
        shardplan.restore(tmp_path / "x.pt")


VIEWS = {
    "columns": BASE[:, ::2],
    "repeated": BASE[1].expand(7, 6),
    "windows": BASE.flatten().unfold(0, 6, 3),
    "diagonal": BASE[:4, :4].diagonal(),
}


def test_views_that_are_not_boxes_are_refused_by_name_once_they_are_asked_for(tmp_path):
    torch_save({**VIEWS, "w": BASE}, tmp_path / "x.pt")
    assert torch.equal(shardplan.open_checkpoint(tmp_path / "x.pt")["w"][:], BASE)
    with pytest.raises(FormatError, match=r"x\.pt: .*contiguous\(\)") as caught:
        shardplan.restore(tmp_path / "x.pt")
    assert all(f"`{name}`" in str(caught.value) for name in VIEWS)


def test_a_tensor_larger_than_its_storage_is_reported_and_takes_no_memory(tmp_path):
    from shardplan.io.formats.torch_save.write import Leaf, pickle_nested

    for nbytes in (0, 16):
        pickled = pickle_nested({"w": Leaf("0", "float32", (1 << 40,))})[0]
        layout = lay_out(pickled, [nbytes])
        blocks = [Block([memoryview(bytes(nbytes))])]
        (tmp_path / "x.pt").write_bytes(b"".join(archive_parts(layout, [blocks])))
        with pytest.raises(FormatError, match=r"x\.pt: .*bytes"):
            open_source(tmp_path / "x.pt")


def test_values_and_tensors_are_not_taken_for_each_other(tmp_path):
    torch_save({"w": torch.ones(2), "n": 1}, tmp_path / "x.pt")
    with pytest.raises(PlanError, match="`n`"):
        shardplan.load({"n": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(PlanError, match="`w`"):
        shardplan.load({"w": 1}, tmp_path / "x.pt")


def test_random_damage_is_an_error_or_does_no_harm(tmp_path):
    torch_save({"w": torch.ones(4), "t": torch.ones(4, 2).t(), "v": [1]}, tmp_path / "x.pt")
    good = (tmp_path / "x.pt").read_bytes()
    generator = random.Random(1)
    for _ in range(150):
        data = bytearray(good)
        data[generator.randrange(len(data))] = generator.randrange(256)
        (tmp_path / "x.pt").write_bytes(data)
        with contextlib.suppress(FormatError, PlanError):
            shardplan.restore(tmp_path / "x.pt")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(tmp_path, protocol):
    sd = {"w": torch.ones(1), "lr": 0.1, "size": torch.Size([2]), "seen": frozenset((1, b"x"))}
    torch.save(sd, tmp_path / "x.pt", pickle_protocol=protocol)
    assert raw(shardplan.restore(tmp_path / "x.pt")) == raw(sd)


def test_an_archive_may_lie_anywhere_in_a_file():
    buffer = io.BytesIO()
    torch.save(torch.arange(4), buffer)
    data = buffer.getvalue()
    store = open_store("memory://anywhere")
    store.write("f", [b"before", data, b"after"])
    archive = read_archive(FileWindow(store, "f", 6, len(data)))
    assert archive.read("data/0", 99) == torch.arange(4).numpy().tobytes()


def test_what_torch_s_files_say_beyond_tensors_and_values_is_not_carried_on(tmp_path):
    """As the documentation says; a module loads what remains."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    saved = OrderedDict(module.state_dict(keep_vars=True))
    saved._metadata = module.state_dict()._metadata
    torch.save(saved, tmp_path / "a.pt")
    shardplan.convert(tmp_path / "a.pt", tmp_path / "b.pt", format="torch")
    got = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (type(got), list(got)) == (dict, sorted(saved))
    assert {type(tensor) for tensor in got.values()} == {torch.Tensor}
    for name, tensor in saved.items():
        assert got[name].requires_grad == tensor.requires_grad
        assert torch.equal(got[name], tensor)
    module.load_state_dict(got)
