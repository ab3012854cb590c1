"""Bytes that lie here and there are copied out of the file's pages: just these, and safely."""

import os

import numpy as np
import pytest
import torch

import shardplan
from shardplan.io.stores import local_files
from shardplan.io.stores.base import StoreError
from shardplan.io.stores.local import LocalStore
from shardplan.io.stores.local_files import PAGE, can_map, map_ranges
from shardplan.planning import Chunk

pytestmark = pytest.mark.skipif(not can_map(), reason="the system cannot be asked for pages")


class Columns:
    """Some columns of a tensor, as a rank would hold them."""

    def __init__(self, shape, low, high, dtype=torch.float32):
        self.shape, self.dtype, self.low = shape, torch.float32, low
        self.held = torch.zeros(shape[0], high - low, dtype=dtype)

    def __create_chunk_list__(self):
        return [Chunk((0, self.low), tuple(self.held.shape))]

    def __get_tensor_shard__(self, index):
        return self.held


@pytest.mark.parametrize("shape", [(2000, 256), (500, 3000), (40, 20_000)])
@pytest.mark.parametrize("part", [(0, 1), (7, 60), (100, 200)])
def test_columns_are_read_exactly_however_far_apart_they_lie(tmp_path, shape, part):
    whole = torch.randn(shape)
    shardplan.save({"w": whole}, tmp_path)
    target = Columns(shape, *part)
    report = shardplan.load({"w": target}, tmp_path)
    assert torch.equal(target.held, whole[:, slice(*part)])
    assert report.bytes_read == report.bytes_needed == target.held.numel() * 4


@pytest.mark.parametrize("ranks", ["", "1000"])  # so many that each has one thread
def test_columns_of_many_tensors_are_copied_out_of_pages_that_are_mapped_together(
    tmp_path, monkeypatch, ranks
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    whole = {f"w{i}": torch.randn(3000, 1024 + i) for i in range(8)}  # 12 MiB each
    whole["all"] = torch.randn(100, 100)  # which is read as it is
    shardplan.save(whole, tmp_path)
    parts = {f"w{i}": (100 * i, 100 * i + 1 + 40 * i) for i in range(8)}
    target = {name: Columns(tuple(whole[name].shape), *part) for name, part in parts.items()}
    maps = []
    monkeypatch.setattr(
        local_files, "map_ranges", lambda *a, **k: maps.append(a) or map_ranges(*a, **k)
    )
    report = shardplan.load(target | {"all": torch.zeros(100, 100)}, tmp_path)
    for name, part in parts.items():
        assert torch.equal(target[name].held, whole[name][:, slice(*part)])
    assert report.bytes_read == report.bytes_needed
    assert len(maps) == (2 if ranks else 6)  # for 96 MiB


def test_columns_are_cast_and_put_into_scattered_memory(tmp_path):
    whole = torch.randn(300, 64)
    shardplan.save({"w": whole}, tmp_path)
    target = Columns((300, 64), 3, 9)
    target.held = torch.zeros(6, 300, dtype=torch.float64).T
    target.dtype = torch.float64
    shardplan.load({"w": target}, tmp_path, dtype="cast")
    assert torch.equal(target.held, whole[:, 3:9].double())


def test_a_file_that_is_cut_short_is_an_error_and_not_the_end(tmp_path):
    (tmp_path / "a").write_bytes(bytes(3 * PAGE))
    store = LocalStore(tmp_path)
    with (
        pytest.raises(StoreError, match="asked for, but the file has"),
        store.mapped("a", np.array([3 * PAGE - 4, 0]), np.array([8, 8])),
    ):
        pass


def test_pages_that_cannot_be_had_are_reported_before_they_are_touched(tmp_path):
    """A file that shrinks while it is mapped: touching what is gone would kill the process."""
    file = tmp_path / "a"
    file.write_bytes(bytes(4 * PAGE))
    fd = os.open(file, os.O_RDWR)
    try:
        seen = map_ranges(fd, np.array([0]), np.array([10]))
        assert seen[:10].sum() == 0
        os.ftruncate(fd, PAGE)
        with pytest.raises(ValueError, match="size"):
            map_ranges(fd, np.array([0, 3 * PAGE]), np.array([10, 10]))
    finally:
        os.close(fd)


def test_what_is_mapped_is_a_view_from_the_first_range_to_the_end_of_the_last(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 10 * PAGE, dtype=np.uint8)
    (tmp_path / "a").write_bytes(data.tobytes())
    starts, lengths = [7 * PAGE + 1, PAGE - 3, PAGE + 5, PAGE], [7, 9, 3 * PAGE, 20]
    with LocalStore(tmp_path).mapped("a", np.array(starts), np.array(lengths)) as found:
        for start, length in zip(starts, lengths, strict=True):
            at = start - (PAGE - 3)
            assert np.array_equal(found[at : at + length], data[start : start + length])
        assert len(found) == 7 * PAGE + 1 + 7 - (PAGE - 3)
