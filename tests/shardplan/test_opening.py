"""Looking into a checkpoint reads what is asked for, in bounded memory, and says what is wrong."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.io.errors import FormatError, ValueRefusedError
from shardplan.io.formats.native.manifest import MANIFEST, decode_manifest, sign
from shardplan.io.pool import Pool
from shardplan.io.stores.base import StoreError, open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import permute, rename, split_chunks
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.storage import FAR_GAP, range_axis

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def edit(folder, change):
    """Change a manifest and seal it again."""
    body = json.loads((folder / MANIFEST).read_bytes())
    for key in ("format", "version", "xxh3_64"):
        del body[key]
    change(body)
    (folder / MANIFEST).write_bytes(sign(json.dumps(body).encode()[1:]))


# Steps


ARRAY = np.arange(9 * 7 * 6, dtype=np.int16).reshape(9, 7, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("steps")


class Near(CountingStore):
    """A store that takes no memory of its own, as a disk."""

    staging = 0


@given(
    st.tuples(*(st.slices(n) | st.integers(-n, n - 1) for n in ARRAY.shape)),
    st.sampled_from([12, 100, 1 << 20]),
    st.sampled_from(["far", "near", "local"]),
)
def test_any_steps_through_any_chunks_read_what_numpy_would(folder, index, chunk, where):
    store = open_store(folder / str(chunk) if where == "local" else f"memory://steps-{chunk}")
    if not store.list():
        shardplan.save({"w": torch.from_numpy(ARRAY)}, store, planner=split_chunks(chunk))
    if where == "near":  # gaps are worth less than where every range is a request
        store = Near(store)
    saved = shardplan.open_checkpoint(store)["w"]
    assert np.array_equal(saved[index].numpy(), ARRAY[index])


@pytest.mark.parametrize(
    ("index", "most"),
    [
        ((slice(None), slice(None, None, 2)), 1.0),  # between the elements of a row: read over
        ((slice(None, None, 2), slice(None)), 0.5),  # rows: left out
        ((slice(None), slice(None, None, 1000)), 0.01),
        ((slice(None, None, -3), slice(1, None, 2)), 0.4),
    ],
)
def test_stepping_takes_little_time_and_reads_what_is_cheaper(tmp_path, index, most):
    tensor = torch.arange(4_000_000, dtype=torch.int32).reshape(1000, 4000)
    shardplan.save({"w": tensor}, tmp_path)
    assert np.array_equal(shardplan.open_checkpoint(tmp_path)["w"][index], tensor.numpy()[index])
    store = CountingStore(open_store(tmp_path))
    saved = shardplan.open_checkpoint(store)["w"]
    saved[0, 0]
    store.clear()
    start = time.process_time()
    found = saved[index]
    assert time.process_time() - start < 2
    assert np.array_equal(found.numpy(), tensor.numpy()[index])
    assert store.bytes_read() <= most * tensor.nbytes


def test_a_column_in_an_object_store_takes_few_requests(s3):
    tensor = torch.arange(512.0 * 512).reshape(512, 512)
    store = open_store(f"s3://{s3.bucket}/column", **s3.options)
    shardplan.save({"w": tensor}, store)
    saved = shardplan.open_checkpoint(store)["w"]
    saved[0, 0]
    for index in (
        (slice(None), 3),
        (slice(None, None, 2), slice(None)),
        (slice(None), slice(0, 2)),
    ):
        s3.requests.clear()
        assert torch.equal(saved[index], tensor[index])
        assert len([r for r in s3.requests if r[0] == "GET"]) <= 2


def test_narrow_slices_stay_within_the_budget(tmp_path):
    tensor = torch.zeros(1 << 20, 65, dtype=torch.uint8)
    tensor[:, 0] = 7
    shardplan.save({"w": tensor}, tmp_path)
    sizes, lock = [], threading.Lock()

    class Watching(CountingStore):
        def read(self, path, ranges):
            with lock:
                sizes.append(sum(view.nbytes for _, view in ranges))
            return super().read(path, ranges)

    pool = Pool(max_workers=2, max_bytes=64 << 20)
    saved = shardplan.open_checkpoint(Watching(open_store(tmp_path)), pool=pool)["w"]
    found = saved[:, 0:1]
    assert (found == 7).all()
    assert max(sizes) <= 33 << 20
    assert max(sizes) <= pool.peak_bytes <= 64 << 20


def test_gaps_are_read_over_where_that_is_cheaper():
    lengths, width = np.array([[100, 10]]), np.array([4])
    for pitch, near, far in ((10, 0, 0), (20, 0, 0), (1000, 1, 0), (100_000, 1, 1)):
        strides = np.array([[pitch, 1]])
        assert range_axis(lengths, strides, width, 512, 0.2).tolist() == [near]
        assert range_axis(lengths, strides, width, FAR_GAP, 0.2).tolist() == [far]


# What a saved tensor can do


@pytest.mark.parametrize("dtype", sorted(set(ITEMSIZE) - {"bool"}))
def test_every_dtype_is_indexed_backwards_and_by_steps(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype))
    shardplan.save({"w": tensor}, tmp_path)
    saved = shardplan.open_checkpoint(tmp_path)["w"]
    words = raw.reshape(-1, ITEMSIZE[dtype])
    for index in (slice(None, None, -1), slice(1, None, 2), slice(None, 1, -3)):
        found = saved[index].contiguous().view(torch.uint8).reshape(-1, ITEMSIZE[dtype])
        assert np.array_equal(found.numpy(), words.numpy()[index])


def test_dtypes_that_numpy_lacks_are_named_with_the_remedy(tmp_path):
    shardplan.save({"b": torch.tensor([1.5, 2]).bfloat16()}, tmp_path)
    saved = shardplan.open_checkpoint(tmp_path)["b"]
    assert np.asarray(saved, np.float64).tolist() == [1.5, 2]
    assert torch.as_tensor(saved).dtype == torch.bfloat16
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(TypeError, match=r"`b` is bfloat16.*torch tensor.*float32"):
            np.asarray(saved)
    else:
        assert np.asarray(saved).dtype == ml_dtypes.bfloat16


def test_a_saved_tensor_does_what_arrays_and_tensors_do(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4)
    shardplan.save({"w": tensor, "s": torch.tensor(2.5), "n": torch.tensor(3)}, tmp_path)
    checkpoint = shardplan.open_checkpoint(tmp_path)
    saved = checkpoint["w"]
    assert (saved.size, saved.numel(), saved.nbytes) == (12, 12, 48)
    assert torch.equal(torch.as_tensor(saved), tensor)
    assert np.array_equal(np.asarray(saved, np.int8), tensor.numpy())
    assert (5.0 in saved, 50.0 in saved, len(list(saved))) == (True, False, 3)
    assert (float(checkpoint["s"]), int(checkpoint["n"]), checkpoint["n"].item()) == (2.5, 3, 3)
    with pytest.raises(TypeError, match="`w` has 12 elements"):
        float(saved)
    for index in (
        None,
        (None, 1),
        (..., None),
        (0, None, slice(1, 3)),
        (slice(None, None, 2), None),
    ):
        assert torch.equal(saved[index], tensor[index])
    for wrong in ([0, 1], tensor > 3, np.array([1]), torch.tensor([0]), True, 1.0, "a"):
        with pytest.raises(TypeError, match=r"cannot index a saved tensor.*read\(\) it first"):
            saved[wrong]


def test_a_checkpoint_is_a_table_in_a_notebook(tmp_path):
    shardplan.save({"a<b": torch.ones(4, 3)}, tmp_path, planner=split_chunks(24))
    html = shardplan.open_checkpoint(tmp_path)._repr_html_()
    assert html.count("<table") == 1
    for part in ("a&lt;b", "4 × 3", "float32", "2 × 1 grid", str(tmp_path)):
        assert part in html


# What is wrong


def test_a_checkpoint_that_was_overwritten_while_it_was_open_says_so(tmp_path):
    text = "x" * 100_000  # too long for the manifest
    shardplan.save({"w": torch.ones(2), "t": text}, tmp_path)
    checkpoint = shardplan.open_checkpoint(tmp_path)
    shardplan.save({"w": torch.zeros(2), "t": text}, tmp_path, overwrite=True)
    for name in ("w", "t"):
        with pytest.raises(FormatError, match="overwritten while it was open: open it again"):
            np.asarray(checkpoint[name])


def test_damage_met_by_reading_speaks_of_no_target(tmp_path):
    shardplan.save({"w": torch.ones(4)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    checkpoint = shardplan.open_checkpoint(tmp_path)
    for read in (lambda: checkpoint["w"].read(), lambda: shardplan.restore(tmp_path)):
        with pytest.raises(FormatError, match="checksums do not fit") as caught:
            read()
        assert "overwritten in part" not in str(caught.value)
    with pytest.raises(FormatError, match="possibly overwritten in part: `w`"):
        shardplan.load({"w": torch.zeros(4)}, tmp_path)


def test_a_tensor_of_any_size_without_chunks_is_refused_before_memory_is_asked_for(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)

    def enlarge(body):
        body["layouts"].append({"size": [1 << 50], "chunks": 0, "offsets": [[]], "sizes": [[]]})
        body["places"].append([])
        tensors = body["tensors"]
        for key, value in (("names", "z"), ("properties", 0), ("layouts", 1), ("places", 1)):
            tensors[key].append(value)

    edit(tmp_path, enlarge)
    for read in (
        lambda: shardplan.restore(tmp_path),
        lambda: shardplan.open_checkpoint(tmp_path)["z"].read(),
        lambda: shardplan.open_checkpoint(tmp_path)["z"][::2],
    ):
        with pytest.raises(FormatError, match="no saved chunk of `z`"):
            read()


@pytest.mark.parametrize(
    "path",
    [
        [["dict", "a"], ["list", -5]],
        [["dict", "a"], ["zzz", 1]],
        [["dict", "a"]] * 3000,
        [["dict", "a"]],
        [["dict"]],
        ["dict"],
        [],
        7,
    ],
)
def test_impossible_paths_in_a_manifest_are_damage(tmp_path, path):
    shardplan.save({"a": [torch.arange(6.0), 3]}, tmp_path)
    edit(tmp_path, lambda body: body["planner_data"]["paths"].update({"a.0": path}))
    with pytest.raises(FormatError, match=rf"^{MANIFEST}: it is damaged"):
        shardplan.restore(tmp_path)
    report = shardplan.verify(tmp_path)
    assert [fault.file for fault in report.faults] == [MANIFEST]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_bytes": 0}, "block_bytes are 0"),
        ({"places": [[[0, 1 << 30, 0]]]}, "a run stands for 1,073,741,824 numbers"),
        ({"planner_data": {"paths": [1]}}, "paths that are not an object"),
    ],
)
def test_a_manifest_s_faults_are_told_in_words(tmp_path, change, told):
    shardplan.save({"a": torch.ones(2)}, tmp_path)
    edit(tmp_path, lambda body: body.update(change))
    with pytest.raises(FormatError, match=told):
        shardplan.open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", ['"1"', "true", "null", "1.0", "0"])
def test_a_version_that_is_not_a_number_is_refused(version):
    with pytest.raises(FormatError, match=r"shardplan\.json: it is not a manifest"):
        decode_manifest(b'{"format":"shardplan","version":%s}' % version.encode())


def test_a_folder_without_a_checkpoint_says_what_is_there(tmp_path):
    for there, told in (((), "the folder is empty"), (("a", "b"), "it holds a, b")):
        for name in there:
            (tmp_path / name).write_text("x")
        with pytest.raises(FormatError) as caught:
            shardplan.open_checkpoint(tmp_path)
        assert str(caught.value).count(str(tmp_path)) == 1
        assert told in str(caught.value)
    assert "safetensors, hf, dcp, torch" in str(caught.value)
    with pytest.raises(FormatError, match=r"^a: it is not a checkpoint of a known format"):
        shardplan.open_checkpoint(tmp_path / "a")


def test_paths_of_bytes_are_refused_with_the_remedy(tmp_path):
    path = str(tmp_path).encode()
    for call in (
        lambda: shardplan.save({"a": 1}, path),
        lambda: shardplan.restore(path),
        lambda: shardplan.open_checkpoint(path),
    ):
        with pytest.raises(TypeError, match=r"a path is text, not bytes; pass os\.fsdecode"):
            call()


def test_a_store_that_fails_says_so_while_nothing_was_overwritten(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)

    class Broken(CountingStore):
        def read(self, path, ranges):
            raise StoreError("read", path, "network gone")

    saved = shardplan.open_checkpoint(Broken(open_store(tmp_path)))["w"]
    with pytest.raises((StoreError, FormatError, RuntimeError), match="network gone"):
        saved.read()


@pytest.mark.parametrize("planner", [rename({"v": "w"}), permute("w", (1, 0))], ids=repr)
def test_a_large_chunk_is_checked_through_a_planner(tmp_path, planner):
    shardplan.save({"w": torch.arange(5 << 20).view(-1, 1 << 10)}, tmp_path)
    (saved,) = shardplan.open_checkpoint(tmp_path, planner=planner).values()
    found = shardplan.restore(tmp_path, planner=planner)[saved.name]
    assert torch.equal(saved.read(), found)
    assert torch.equal(saved[7:900:3, 5], found[7:900:3, 5])
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="checksums do not fit"):
        saved.read()


def test_a_tensor_of_a_checkpoint_is_not_saved_unchecked(tmp_path):
    shardplan.save({"w": torch.ones(3)}, tmp_path / "a")
    for planner in (None, rename({"w": "w"})):
        saved = shardplan.open_checkpoint(tmp_path / "a", planner=planner)["w"]
        with pytest.raises(ValueRefusedError, match=r"`m\.w` is a tensor of a checkpoint.*convert"):
            shardplan.save({"m": {"w": saved}}, tmp_path / "b", overwrite=True)
        shardplan.save({"m": {"w": saved.read()}}, tmp_path / "b", overwrite=True)
