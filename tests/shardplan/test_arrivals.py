"""Loads in the background: keys arrive one by one, verified, and the rest is as in a load."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan import _arrivals as arrivals
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import FormatError, open_store
from shardplan.io.stores.base import WrappedStore
from shardplan.planning import PlanError, load_plan, local_plan, metadata_of
from shardplan.planning.storage import key_batches

SCRIPT = Path(__file__).parents[1] / "ranks" / "arrivals.py"
SOON = 30


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(arrivals, "_BATCH_BYTES", 1)


def state(value, keys=6):
    tensors = {f"w{number}": torch.full((64, 8), float(value)) for number in range(keys)}
    return {"model": tensors, "step": int(value), "half": torch.full((3,), value).bfloat16()}


class Gate(WrappedStore):
    """A store whose reads wait, from the n-th file on, until they may go on."""

    def __init__(self, inner, before):
        super().__init__(inner)
        self.before, self.open, self.lock = before, threading.Event(), threading.Lock()

    def read(self, path, ranges):
        with self.lock:
            self.before -= path.endswith(".safetensors")
            waits = self.before < 0
        assert not waits or self.open.wait(SOON)
        return super().read(path, ranges)


def test_keys_arrive_while_the_rest_is_still_being_read(tmp_path):
    shardplan.save(state(1.0), tmp_path)
    sd, store = state(0.0), Gate(open_store(tmp_path), before=4)
    future = shardplan.load(sd, store, background=True)
    first = future["model.w0"].result(SOON)
    assert first is sd["model"]["w0"]
    assert first.unique().tolist() == [1]
    assert not future["half"].done()
    assert not future["step"].done()
    assert not future.done()
    assert sd["step"] == 0
    store.open.set()
    report = future.result(SOON)
    assert (sd["step"], future["step"].result()) == (1, 1)
    assert sd["half"].tolist() == [1] * 3
    assert list(future) == ["model." + f"w{n}" for n in range(6)] + ["step", "half"]
    assert report.bytes_needed == 6 * 64 * 8 * 4 + 6
    assert report.verified == 7
    assert report.bytes_unverified == 0


def test_what_a_load_in_the_background_reports_is_what_a_load_reports(tmp_path):
    shardplan.save(state(1.0), tmp_path)
    one, other, progress = state(0.0), state(0.0), []
    now = shardplan.load(one, tmp_path)
    later = shardplan.load(
        other, tmp_path, background=True, progress=lambda *pair: progress.append(pair)
    ).result(SOON)
    for name in ("missing", "unexpected", "bytes_needed", "bytes_read", "verified"):
        assert getattr(now, name) == getattr(later, name), name
    assert progress[0][0] == 0
    assert progress[-1] == (now.bytes_needed, now.bytes_needed)


def test_meta_tensors_tied_tensors_and_modules_arrive_too(tmp_path):
    shared = torch.ones(3)
    net = torch.nn.Linear(2, 2)
    shardplan.save({"net": net, "a": shared, "m": torch.ones(2)}, tmp_path)
    tied, into = torch.zeros(3), torch.nn.Linear(2, 2)
    sd = {"net": into, "a": tied, "b": tied.view(3), "m": torch.empty(2, device="meta")}
    future = shardplan.load(sd, tmp_path, background=True)
    assert future["m"].result(SOON).tolist() == [1, 1]
    report = future.result(SOON)
    assert report.tied == {"b": "a"}
    assert future["b"].result().tolist() == [1] * 3
    assert sd["m"] is future["m"].result()
    assert torch.equal(into.weight, net.weight)
    assert torch.equal(future["net.weight"].result(), net.weight)


def test_what_cannot_be_planned_is_refused_by_the_call(tmp_path):
    shardplan.save(state(1.0), tmp_path)
    with pytest.raises(PlanError, match="other"):
        shardplan.load({"other": torch.zeros(2)}, tmp_path, background=True)


def test_damage_fails_the_keys_that_have_not_arrived_and_names_those_that_have(tmp_path, caplog):
    shardplan.save(state(1.0), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    at = data.index(torch.full((64, 8), 1.0).numpy().tobytes())
    data[at + 3 * 64 * 8 * 4] ^= 1  # of w3
    file.write_bytes(data)
    sd = state(0.0)
    future = shardplan.load(sd, tmp_path, background=True)
    with pytest.raises(FormatError) as raised:
        future.result(SOON)
    assert raised.value.touched == ("model.w3",)
    assert raised.value.filled == ("model.w0", "model.w1", "model.w2")
    assert [future[f"model.w{n}"].exception() is None for n in range(6)] == [True] * 3 + [False] * 3
    assert "failed in the background" in caplog.text
    assert sd["step"] == 0


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_ranks_load_in_the_background_together(tmp_path, ranks, shared):
    shardplan.save(state(3.0), tmp_path)

    def fn(comm):
        sd = state(0.0)
        future = shardplan.load(sd, tmp_path, comm=comm, background=True, share_reads=shared)
        arrived = [future[key].result(SOON) for key in future]
        report = future.result(SOON)
        same = all(torch.equal(t, w) for t, w in zip(arrived, expected, strict=False))
        return same, sd["step"], len(arrived), report.bytes_needed

    expected = list(state(3.0)["model"].values())
    assert set(run_ranks(ranks, fn, timeout=60)) == {(True, 3, 8, 6 * 64 * 8 * 4 + 6)}


@pytest.mark.slow
def test_real_ranks_load_in_the_background_while_they_go_on(tmp_path):
    sd = {f"w{n}": torch.full((64, 8), float(n)) for n in range(4)}
    shardplan.save(sd | {"all": torch.ones(5), "step": 7}, tmp_path / "checkpoint")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", str(SCRIPT), place, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(4)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * 4
    sums = [512.0 * n for n in range(4)] + [5.0]
    for rank in range(4):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        assert told == [[4.0, sums, 7, 4 * 16 * 8 * 4 + 20]] * 2


def test_if_a_rank_fails_all_raise_and_what_has_arrived_stays(tmp_path):
    shardplan.save(state(1.0), tmp_path)

    def failing(comm):
        def stop(done, total):
            if comm.rank == 1 and done:
                raise KeyError("enough")

        future = shardplan.load(
            state(0.0), tmp_path, comm=comm, background=True, progress=stop, share_reads=False
        )
        return future.exception(SOON), [future[key].exception(SOON) is None for key in future]

    (one, came), (other, _) = run_ranks(2, failing, timeout=60)
    for error in (one, other):
        assert isinstance(error, CheckpointError)
        assert [failure.rank for failure in error.failures] == [1]
    assert came == [True] * 6 + [False, True]


def test_two_loads_in_the_background_do_not_disturb_each_other(tmp_path):
    for value in (1.0, 2.0):
        shardplan.save(state(value), tmp_path / str(value))
    states = [state(0.0) for _ in range(4)]
    futures = [
        shardplan.load(sd, tmp_path / str(1.0 + number % 2), background=True)
        for number, sd in enumerate(states)
    ]
    for number, future in enumerate(futures):
        future.result(SOON)
        assert states[number]["step"] == 1 + number % 2


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 30), st.randoms())
def test_batches_hold_every_read_once_and_whole_keys_in_order(sizes, most, random):
    sd = {f"k{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    metadata, plan = metadata_of(sd), load_plan(metadata_of(sd), local_plan(sd))
    order = list(sd)
    random.shuffle(order)
    batches = key_batches(plan, metadata, order, most)
    keys = [[items[row].dest_index.fqn for row in range(len(items))] for items in batches]
    assert [key for batch in keys for key in batch] == [
        key for key in order if any(item.dest_index.fqn == key for item in plan.items)
    ]
    for batch in keys:
        assert batch
        assert sum(sd[key].nbytes for key in batch[:-1]) < most
