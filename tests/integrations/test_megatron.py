"""Megatron-core on the other side: it writes, shardplan reads and writes, Megatron-core reads."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.planning import drop

TESTS = Path(__file__).parents[1]
full = runpy.run_path(str(TESTS / "golden/write_mcore.py"))["full"]


def run(script, folder):
    environment = os.environ | {"MASTER_PORT": "29671"}
    command = [sys.executable, "-P", TESTS / script, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    run("golden/write_mcore.py", folder)
    return folder


def test_what_megatron_core_writes_is_sound_and_loads_on_another_number_of_ranks(written):
    assert shardplan.verify(written).ok

    def load(comm):
        state = {name: torch.zeros_like(tensor) for name, tensor in full().items()}
        shardplan.load(state, written, comm=comm)
        return state

    for state in run_ranks(3, load):
        assert all(torch.equal(tensor, state[name]) for name, tensor in full().items())


def test_megatron_core_reads_its_checkpoint_after_a_round_trip(written, tmp_path):
    shardplan.convert(written, tmp_path / "ours", planner=drop("config"))
    shardplan.convert(tmp_path / "ours", tmp_path / "again", format="dcp")
    for name in ("common.pt", "metadata.json"):  # Megatron-core's own files beside the tensors
        shutil.copy(written / name, tmp_path / "again")
    run("integrations/ranks/mcore.py", tmp_path / "again")
