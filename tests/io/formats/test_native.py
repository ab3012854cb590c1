"""The files on disk: headers, values, manifest, and that other programs read them."""

import itertools
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

import shardplan
from shardplan.io.errors import FormatError, ValueRefusedError
from shardplan.io.formats import headers
from shardplan.io.formats.headers import TORCH_NAMES, Slot, build_header, parse_header
from shardplan.io.formats.native.manifest import (
    MANIFEST,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from shardplan.io.stores.base import open_store
from shardplan.io.values import decode_value, encode_value, load_value, sort_values, store_values
from shardplan.planning import Mesh, Shard, split_chunks
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.storage.blocks import cut_blocks
from shardplan.planning.testing.strategies import shapes

GOLDEN = Path(__file__).parents[2] / "golden"
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
NATIVE = set(TORCH_NAMES.values())


def random_tensor(shape, dtype, seed=0):
    """Make a tensor of random bits, of which any may be a NaN."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * ITEMSIZE[dtype]
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def files(folder):
    return sorted(Path(folder).glob("shard-*-model-*-of-*.safetensors"))


@given(st.lists(st.tuples(shapes(), st.sampled_from(sorted(ITEMSIZE))), max_size=5))
def test_a_header_reads_back_as_it_was_built(tensors):
    slots = [
        Slot(f"é{i}", dtype, shape, tuple(range(len(shape))))
        for i, (shape, dtype) in enumerate(tensors)
    ]
    data = build_header("f", slots, "s1")
    begins = itertools.accumulate((slot.nbytes for slot in slots), initial=len(data))
    header = parse_header(data, "f", len(data) + sum(slot.nbytes for slot in slots))
    found = {n: (s.dtype, s.shape, s.offsets, s.begin) for n, s in header.slots.items()}
    expected = zip(slots, begins, strict=False)
    assert found == {s.name: (s.dtype, s.shape, s.offsets, b) for s, b in expected}
    assert (header.save_id, header.name, len(data) % 8) == ("s1", "f", 0)


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_the_safetensors_library_reads_every_dtype(tmp_path, dtype):
    tensor = random_tensor((3, 2), dtype)
    shardplan.save({"w": tensor}, tmp_path)
    with safe_open(files(tmp_path)[0], "pt") as file:
        found = file.get_tensor("w")
    if dtype in NATIVE:
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
    else:
        assert found.dtype == torch.uint8
        assert found.shape == (3, 2, ITEMSIZE[dtype])
    assert bits(found) == bits(tensor)


def test_torch_loads_our_files(tmp_path):
    sd = {
        "model": {"w": torch.randn(7, 5), "b": torch.randn(3).bfloat16()},
        "n": torch.arange(4),
        "dtype": torch.float32,
        "step": 3,
    }
    shardplan.save(sd, tmp_path, planner=split_chunks(40))
    assert len(files(tmp_path)) == 4
    target = {"model.w": torch.zeros(7, 5), "model.b": torch.zeros(3).bfloat16()}
    target["n"] = torch.zeros(4, dtype=torch.int64)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(target["model.w"], sd["model"]["w"])
    assert torch.equal(target["model.b"], sd["model"]["b"])
    assert torch.equal(target["n"], sd["n"])


def test_chunks_lie_aligned_whatever_their_names(tmp_path):
    sd = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.float64)}
    sd |= {"c": torch.zeros(3, dtype=torch.float16), "d": torch.zeros(3)}
    shardplan.save(sd, tmp_path)
    (file,) = files(tmp_path)
    header = parse_header(file.read_bytes(), file.name, file.stat().st_size)
    assert list(header.slots) == ["b", "d", "c", "a"]
    assert all(slot.begin % ITEMSIZE[slot.dtype] == 0 for slot in header.slots.values())


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.booleans()), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    """Compare values and their types to the leaves; NaN is itself, and zeros have signs."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return repr(a) == repr(b)


@given(plain)
def test_values_keep_their_types_through_json(value):
    text = json.dumps(encode_value(value), allow_nan=False)
    assert same(decode_value(json.loads(text)), value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({(1, "a")}),
        bytearray(b"x"),
        range(3),
        10**5000,
        np.float32(0.1),
        np.bool_(True),
        np.complex128(1j),
        np.int64(-5),
        torch.float32,
        torch.Size([2, 3]),
        torch.device("cpu"),
        "x" * 100_000,
        "\ud800",
        {"$tuple": [1]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_itself(tmp_path, value):
    stored = store_values({"v": value})["v"]
    found = load_value(stored, "f", "v")
    assert type(found) is type(value)
    assert found == value
    shardplan.save({"v": value}, tmp_path)
    assert shardplan.restore(tmp_path) == {"v": value}


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_lie_in_a_file_as_they_are_and_are_not_copied_to_be_saved(tmp_path, kind):
    value = kind(range(256)) * (1 << 16)
    shardplan.save({"v": 1, "w": torch.ones(2)}, tmp_path / "warm")
    tracemalloc.start()
    shardplan.save({"v": value}, tmp_path / "c")
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    found = shardplan.restore(tmp_path / "c")["v"]
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert type(found) is kind
    assert found == value
    assert saving < len(value) // 4
    assert loading < (1.25 if kind is bytes else 2.25) * len(value)
    (file,) = files(tmp_path / "c")
    assert file.read_bytes().endswith(value)
    assert shardplan.verify(tmp_path / "c").ok


def test_damaged_large_bytes_are_refused_by_key(tmp_path):
    shardplan.save({"v": b"x" * 100_000}, tmp_path)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + b"y")
    with pytest.raises(FormatError, match="`v` does not fit its checksum"):
        shardplan.restore(tmp_path)


def test_values_that_need_code_to_load_are_refused_by_key_before_anything_is_written(tmp_path):
    class Secret:
        pass

    sd = {"ok": torch.ones(2), "bad": {"one": Secret(), "two": lambda: 1}, "fine": 1}
    with pytest.raises(ValueRefusedError) as caught:
        shardplan.save(sd, tmp_path / "c")
    assert sorted(caught.value.reasons) == ["bad.one", "bad.two"]
    assert not (tmp_path / "c").exists()


def test_a_refusal_names_the_part_and_says_it_in_our_own_words(tmp_path):
    class Secret:
        pass

    sd = {"one": Secret(), "two": [1, {"x": (Secret(), 2)}], "three": np.array([object()])}
    _, refused = sort_values(sd)
    kind = f"{Secret.__module__}.{Secret.__qualname__}"
    tail = "which cannot be loaded without running code; save plain values or tensors instead, or "
    tail += "open it with register_node"
    assert refused == {
        "one": f"is a {kind}, {tail}",
        "two": f"holds a {kind} at [1]['x'][0], {tail}",
        "three": f"is a numpy.ndarray, {tail}",
    }


def test_all_that_is_refused_is_reported_at_once_whatever_the_reason(tmp_path):
    sd = {"__metadata__": torch.float32, "odd": object(), "meta": torch.ones(2, device="meta")}
    with pytest.raises(ValueRefusedError) as caught:
        shardplan.save(sd, tmp_path / "c")
    assert sorted(caught.value.reasons) == ["__metadata__", "meta", "odd"]


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_no_file_can_carry_are_refused(tmp_path, name):
    with pytest.raises(ValueRefusedError, match="rename"):
        shardplan.save({name: torch.ones(2)}, tmp_path)
    shardplan.save({name: 3}, tmp_path)
    assert shardplan.restore(tmp_path) == {name: 3}


def test_tensors_without_elements_here_are_refused(tmp_path):
    with pytest.raises(ValueRefusedError, match="meta device"):
        shardplan.save({"w": torch.ones(2, device="meta")}, tmp_path)


def test_the_manifest_reads_back_as_it_was_written(tmp_path):
    sd = {"a": {"w": torch.randn(6, 4)}, "e": torch.zeros(0, 3), "t": torch.float32, "n": 1}
    shardplan.save(sd, tmp_path, planner=split_chunks(16))
    manifest = read_manifest(open_store(tmp_path))
    data = encode_manifest(manifest)
    assert data == (tmp_path / MANIFEST).read_bytes()
    again = decode_manifest(data)
    assert again.metadata == manifest.metadata
    assert again.metadata.version == "3"
    assert set(again.metadata.state_dict_metadata) == {"a.w", "e", "t", "n"}


def test_equal_tilings_and_places_are_written_once(tmp_path):
    shardplan.save({f"w{i}": torch.ones(8) for i in range(50)}, tmp_path, planner=split_chunks(8))
    body = json.loads((tmp_path / MANIFEST).read_text())
    assert (len(body["layouts"]), len(body["places"]), len(body["properties"])) == (1, 1, 1)


@given(shapes(max_dims=4, max_side=7), st.sampled_from([1, 2, 8, 16]), st.integers(1, 100))
def test_blocks_lie_one_after_the_other_and_are_no_larger_than_asked(shape, width, limit):
    blocks = cut_blocks(np.array([shape], np.int64).reshape(1, -1), np.array([width]), limit)
    order = []
    for offsets, sizes in zip(blocks.offsets.tolist(), blocks.sizes.tolist(), strict=True):
        cells = itertools.product(*(range(o, o + s) for o, s in zip(offsets, sizes, strict=True)))
        order += cells
        assert math.prod(sizes) * width <= max(limit, width)
    assert order == list(itertools.product(*(range(n) for n in shape or (1,))))


def golden_state():
    """The state dict of which a checkpoint of each version is kept."""
    return {
        "model": {
            "weight": torch.arange(24, dtype=torch.float32).reshape(6, 4) / 8,
            "bias": torch.arange(5, dtype=torch.float32).bfloat16(),
            "scale": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
            "mask": torch.tensor([True, False, True]),
            "quantized": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        },
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "step": 100,
        "betas": (0.9, 0.999),
        "groups": [{"lr": 0.1, "names": {"a", "b"}}, {"lr": float("inf"), "names": set()}],
        "dtype": torch.bfloat16,
    }


def same_state(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_state, a, b))
    return type(a) is type(b) and a == b


def golden_of(version):
    """What the kept checkpoint of a version holds; of small "large" bytes, to keep it small."""
    raw = {"raw": bytes(range(256)), "array": bytearray(range(256, 0, -1)[1:])}
    return golden_state() | ({} if version == "v1" else raw)


@pytest.mark.parametrize("version", sorted(p.name for p in GOLDEN.glob("v*") if p.is_dir()))
def test_checkpoints_of_every_version_are_read_for_ever(version):
    assert same_state(golden_of(version), shardplan.restore(GOLDEN / version))
    assert shardplan.verify(GOLDEN / version).ok
    assert json.loads((GOLDEN / version / MANIFEST).read_text())["version"] == int(version[1])


def test_a_header_that_no_reader_would_accept_is_not_written():
    with pytest.raises(FormatError, match="fewer keys"):
        build_header("f", [Slot("x" * 60_000_000, "uint8", (1,), (0,))], "s1")


# ---- dtypes of which several elements or none share a byte


SCALED = {"float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4"}


def of_bytes(dtype, *shape):
    nbytes = int(np.prod(shape))
    return torch.arange(nbytes, dtype=torch.uint8).reshape(shape).view(getattr(torch, dtype))


def same_bytes(found, tensor):
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("format", ["safetensors", "hf"])
@pytest.mark.parametrize("dtype", list(SCALED))
def test_scales_and_packed_floats_have_their_own_names_in_files(tmp_path, dtype, format):
    sd = {"w": of_bytes(dtype, 4, 6), "v": of_bytes(dtype, 3), "none": of_bytes(dtype, 0, 2)}
    shardplan.save(sd, tmp_path, format=format)
    (file,) = tmp_path.glob("*.safetensors")
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {header[name]["dtype"] for name in sd} == {SCALED[dtype]}
    theirs, ours = load_file(file), shardplan.restore(tmp_path)
    for name, tensor in sd.items():
        same_bytes(theirs[name], tensor)
        same_bytes(ours[name], tensor)


@pytest.mark.parametrize("dtype", list(SCALED))
def test_they_are_cut_along_any_axis_and_put_together_again(tmp_path, dtype):
    tensor = of_bytes(dtype, 4, 6)
    shardplan.save({"w": tensor}, tmp_path / "a")
    for axis in (0, 1):
        cut = {"mesh": Mesh(dp=2), "placements": [Shard(axis)]}
        shardplan.convert(tmp_path / "a", tmp_path / f"b{axis}", **cut)
        same_bytes(shardplan.restore(tmp_path / f"b{axis}")["w"], tensor)
        assert shardplan.verify(tmp_path / f"b{axis}").ok


def test_a_packed_scalar_is_stored_as_bytes(tmp_path):
    sd = {"w": of_bytes("float4_e2m1fn_x2", 1)[0]}
    shardplan.save(sd, tmp_path)
    same_bytes(shardplan.restore(tmp_path)["w"], sd["w"])


@pytest.mark.parametrize("dtype", list(SCALED))
def test_files_that_have_them_as_bytes_still_load(tmp_path, monkeypatch, dtype):
    """As versions before wrote them, when safetensors had no names for them."""
    old = {ours: theirs for ours, theirs in headers._FILE_NAMES.items() if ours not in SCALED}
    monkeypatch.setattr(headers, "_FILE_NAMES", old)
    sd = {"w": of_bytes(dtype, 4, 6)}
    shardplan.save(sd, tmp_path)
    monkeypatch.undo()
    (file,) = tmp_path.glob("*.safetensors")
    assert b'"U8"' in file.read_bytes()
    same_bytes(shardplan.restore(tmp_path)["w"], sd["w"])
    assert shardplan.verify(tmp_path).ok


def test_a_packed_tensor_that_ends_within_a_byte_is_damaged():
    header = build_header("f", [Slot("w", "float4_e2m1fn_x2", (2,), (0,))], "s")
    odd = header.replace(b'"shape":[4]', b'"shape":[3]')
    with pytest.raises(FormatError, match="ends within a byte"):
        parse_header(odd, "f", len(odd) + 2)
