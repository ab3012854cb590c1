"""Values that torch saves and loads again: numpy's, BytesIO, tuples of tensors, and others."""

import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardplan
from shardplan.io.formats.torch_save.names import load_summed

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

VALUES = {
    "BytesIO": lambda: io.BytesIO(b"abc"),
    "numpy scalar": lambda: np.float32(2.5),
    "numpy bool": lambda: np.bool_(True),
    "numpy text": lambda: np.array(["a", "bc"]),
    "numpy RNG state": lambda: np.random.RandomState(7).get_state(),
    "numpy RNG state as a dict": lambda: np.random.default_rng(7).bit_generator.state,
    "Fortran's order": lambda: [np.asfortranarray(np.arange(6.0).reshape(2, 3))],
    "the other byte order": lambda: [np.arange(3, dtype=">i4")],
    "an empty array": lambda: [np.zeros((0, 3))],
    "no axes": lambda: [np.array(3.5)],
    "tuple of tensors": lambda: (torch.ones(2), 3),
    "a view": lambda: (torch.arange(6).reshape(2, 3).t(),),
    "a parameter": lambda: (torch.nn.Parameter(torch.ones(2)),),
    "a set": lambda: {1, 2, frozenset((3, b"x"))},
    "a dtype": lambda: [torch.bfloat16, torch.Size([1, 2]), torch.device("cpu")],
}  # fmt: skip


def same(a, b):
    """Compare values and their types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype and a.flags.f_contiguous == b.flags.f_contiguous and (a == b).all()
        )
    if isinstance(a, torch.Tensor):
        return a.requires_grad == b.requires_grad and torch.equal(a, b)
    return a == b


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_torch_saved_comes_back_as_what_it_was(tmp_path, kind):
    make = VALUES[kind]
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        buffer = io.BytesIO()
        torch.save(make(), buffer, pickle_protocol=protocol)
        assert same(load_summed(buffer.getvalue(), "file", "v")[0], make())
    dcp.save({"v": {"x": make()}, "w": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    assert same(shardplan.restore(tmp_path / "dcp")["v"]["x"], make())


def blank(value):
    """Return a value of the same structure, with other contents."""
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(blank, value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return np.zeros_like(value)
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        with torch.no_grad():
            made = torch.zeros_like(value)
        return type(value)(made) if isinstance(value, torch.nn.Parameter) else made
    return value if isinstance(value, (torch.Tensor, np.ndarray)) else None


@pytest.mark.parametrize("kind", VALUES)
def test_load_fills_what_torch_kept_as_one_value(tmp_path, kind):
    make = VALUES[kind]
    dcp.save({"v": {"x": make()}, "w": torch.ones(1)}, checkpoint_id=tmp_path)
    for target in (make(), blank(make())):
        sd = {"v": {"x": target}, "w": torch.zeros(1)}
        if kind not in ("sparse", "sparse rows"):  # which no state dict of ours holds
            shardplan.load(sd, tmp_path)
            assert same(sd["v"]["x"], make())
    assert same(shardplan.restore(tmp_path, {"v": {"x": make()}})["v"]["x"], make()) or (
        kind in ("sparse", "sparse rows")
    )


def test_load_keeps_the_memory_of_tensors_and_arrays_in_tuples(tmp_path):
    dcp.save({"v": (torch.ones(2), np.arange(3.0), 7)}, checkpoint_id=tmp_path)
    tensor, array = torch.zeros(2), np.zeros(3)
    sd = {"v": (tensor, array, 0)}
    shardplan.load(sd, tmp_path)
    assert sd["v"][0] is tensor
    assert sd["v"][1] is array
    assert (tensor.tolist(), array.tolist(), sd["v"][2]) == ([1, 1], [0, 1, 2], 7)


@pytest.mark.parametrize("kind", VALUES)
def test_the_storage_adapters_take_what_torch_takes(tmp_path, kind):
    make = VALUES[kind]
    writer = shardplan.as_torch_storage_writer(tmp_path)
    dcp.save({"v": {"x": make()}, "w": torch.ones(1)}, storage_writer=writer)
    assert same(shardplan.restore(tmp_path)["v"]["x"], make())
    assert shardplan.verify(tmp_path).ok
    sd = {"v": {"x": make()}, "w": torch.zeros(1)}
    dcp.load(sd, storage_reader=shardplan.as_torch_storage_reader(tmp_path))
    assert same(sd["v"]["x"], make()) or kind == "the other byte order"  # which numpy changes


OWN = [
    *("BytesIO", "numpy scalar", "numpy bool", "numpy text", "tuple of tensors", "a view"),
    *("numpy RNG state as a dict", "a set", "a dtype"),
]  # not those with arrays, which become tensors


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("kind", OWN)
def test_what_save_takes_comes_back_as_what_it_was(tmp_path, kind, format):
    make = VALUES[kind]
    shardplan.save({"v": {"x": make()}, "w": torch.ones(1)}, tmp_path, format=format)
    assert same(shardplan.restore(tmp_path)["v"]["x"], make())
    sd = {"v": {"x": make()}, "w": torch.zeros(1)}
    shardplan.load(sd, tmp_path)
    assert same(sd["v"]["x"], make())
    assert shardplan.verify(tmp_path).ok
    if format == "dcp" and kind not in ("tuple of tensors", "a view"):  # which torch keeps whole
        sd = {"v": {"x": make()}, "w": torch.zeros(1)}
        dcp.load(sd, checkpoint_id=tmp_path)
        assert same(sd["v"]["x"], make())


def test_a_generator_of_numpy_goes_on_where_it_was(tmp_path):
    generator = np.random.RandomState(7)
    for way in ("ours", "theirs"):
        sd = {"rng": generator.get_state()}
        shardplan.save(sd, tmp_path / way) if way == "ours" else dcp.save(
            sd, checkpoint_id=tmp_path / way
        )
        wanted = generator.rand(3)
        other = np.random.RandomState(8)
        sd = {"rng": other.get_state()}
        shardplan.load(sd, tmp_path / way)
        other.set_state(sd["rng"])
        assert other.rand(3).tolist() == wanted.tolist()


def test_values_that_torch_would_not_load_are_refused_in_its_own_files(tmp_path):
    with pytest.raises(shardplan.io.ValueRefusedError, match=r"`v` is a _io\.BytesIO"):
        shardplan.save({"v": io.BytesIO(b"x")}, tmp_path / "a.pt", format="torch")
    assert not list(tmp_path.iterdir())
