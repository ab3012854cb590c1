"""Replicas that ranks cut between them: saved, read back and checked in every format."""

import numpy as np
import pytest
import torch

import shardplan
from shardplan.dist import run_ranks


def state():
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(40_000, 32, generator=generator),  # 5 MB: two thirds of it all
        **{f"layers.{n}": torch.randn(400, 512, generator=generator) for n in range(3)},
        "norm": torch.randn(512, generator=generator),
        "step": 7,
    }


@pytest.mark.parametrize("format", ["safetensors", "dcp", "hf"])
def test_a_large_replica_is_written_by_all_and_read_back(tmp_path, format):
    path = tmp_path / "saved"
    held = state()
    if format == "hf":
        del held["step"]

    def save(comm):
        return shardplan.save(held, path, comm=comm, format=format)

    report = run_ranks(4, save, timeout=120)[0]
    written = [rank.nbytes for rank in report.ranks]
    assert max(written) <= 1.15 * sum(written) / 4
    for found in (shardplan.restore(path), run_ranks(2, lambda comm: shardplan.restore(path))[1]):
        assert torch.equal(found["embed"], held["embed"])
        assert torch.equal(found["layers.1"], held["layers.1"])
    assert shardplan.verify(path).ok


def test_replicas_are_compared_where_they_are_cut(tmp_path):
    def save(comm):
        held = state()
        held["embed"][30_000, 3] += comm.rank == 2
        shardplan.save(held, tmp_path / "saved", comm=comm, verify_replicas=True)

    with pytest.raises(Exception, match="embed"):
        run_ranks(4, save, timeout=120)


def test_half_of_a_cut_replica_is_loaded_in_place(tmp_path):
    held = state()
    run_ranks(3, lambda comm: shardplan.save(held, tmp_path / "saved", comm=comm), timeout=120)
    mine = {"embed": torch.zeros_like(held["embed"])}
    shardplan.load(mine, tmp_path / "saved")
    assert torch.equal(mine["embed"], held["embed"])
    rows = shardplan.open_checkpoint(tmp_path / "saved")["embed"][13_000:27_000:3]
    assert np.array_equal(rows, held["embed"][13_000:27_000:3])
