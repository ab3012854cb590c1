"""`restore(mmap=True)` and `Checkpoint.tensors()`: tensors that lie in a checkpoint's files."""

from pathlib import Path

import pytest
import torch

import shardplan
from shardplan.io import FormatError
from shardplan.io.stores.local_files import can_map
from shardplan.planning import Mesh, rename

pytestmark = pytest.mark.skipif(not can_map(), reason="the system cannot be asked for pages")


@pytest.fixture
def state():
    return {
        "w": torch.randn(300, 40),
        "half": torch.randn(500, 7).bfloat16(),
        "tiny": torch.randn(16).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
    }


def same(one, other):
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*bits)


def is_mapped(tensor, folder):
    """Return whether a tensor's memory is that of a file in a folder, by the system's own list."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        if int(low, 16) <= tensor.data_ptr() < int(high, 16):
            return str(folder) in line
    return False


@pytest.mark.parametrize("format", ["safetensors", "hf", "torch", "dcp"])
@pytest.mark.parametrize("verify", [None, True, False])
def test_mapped_tensors_have_the_bits_that_were_saved(tmp_path, state, format, verify):
    path = tmp_path / ("a.pt" if format == "torch" else "a")
    shardplan.save(state, path, format=format)
    restored = shardplan.restore(path, mmap=True, verify=verify)
    opened = shardplan.open_checkpoint(path).tensors(verify=bool(verify))
    for name, tensor in state.items():
        assert same(restored[name], tensor)
        assert same(opened[name], tensor)
    # The archives in a file of torch.distributed.checkpoint begin anywhere: not all is aligned.
    assert format == "dcp" or is_mapped(restored["w"], tmp_path)
    assert format == "dcp" or is_mapped(opened["w"], tmp_path)


def test_a_write_to_a_mapped_tensor_reaches_neither_the_file_nor_another_one(tmp_path, state):
    shardplan.save(state, tmp_path)
    first, second = (shardplan.restore(tmp_path, mmap=True) for _ in range(2))
    first["w"].zero_()
    assert same(second["w"], state["w"])
    assert shardplan.verify(tmp_path).ok


def test_only_whole_tensors_are_mapped_and_the_others_are_read(tmp_path, state):
    shardplan.save(state, tmp_path / "whole")
    shardplan.convert(tmp_path / "whole", tmp_path / "cut", mesh=Mesh(dp=2))
    found = shardplan.restore(tmp_path / "cut", mmap=True)
    assert same(found["w"], state["w"])
    assert not is_mapped(found["w"], tmp_path)


def test_mapped_tensors_may_be_renamed_and_go_into_a_target(tmp_path, state):
    shardplan.save(state, tmp_path)
    target = {"x": torch.empty(300, 40, device="meta"), "half": torch.empty(500, 7)}
    options = {"planner": rename({"x": "w"}), "dtype": "cast", "mmap": True}
    found = shardplan.restore(tmp_path, target, **options)
    assert is_mapped(found["x"], tmp_path)
    assert same(found["half"], state["half"].float())  # which had to be read, to be cast


def test_checksums_of_mapped_tensors_are_compared_on_demand(tmp_path, state):
    shardplan.save(state, tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    place = file.read_bytes().find(state["w"].numpy().tobytes())
    with open(file, "r+b") as damaged:
        damaged.seek(place)
        damaged.write(b"damage")
    assert not same(shardplan.restore(tmp_path, mmap=True)["w"], state["w"])
    for work in (
        lambda: shardplan.restore(tmp_path, mmap=True, verify=True),
        lambda: shardplan.open_checkpoint(tmp_path).tensors(verify=True),
    ):
        with pytest.raises(FormatError, match="checksums do not fit: `w`"):
            work()


def test_a_device_other_than_the_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="memory of the CPU, not of cuda"):
        shardplan.restore(tmp_path, mmap=True, device="cuda")
