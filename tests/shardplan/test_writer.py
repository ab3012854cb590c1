"""Saves by a writer process: what is saved, what happens when either process dies."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import shardplan
from shardplan import _async as background
from shardplan import dcp
from shardplan._snapshots import Snapshot
from shardplan._writer import WriterProcessError
from shardplan.io import Pool, StoreError, ValueRefusedError, open_store

SCRIPT = Path(__file__).parents[1] / "ranks" / "writers.py"
SOON = 60  # seconds; a writer has to import torch first


def save(sd, path, **options):
    return shardplan.async_save(sd, path, process=True, **options)


def writer():
    return background._own.writer


def files(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def is_running(pid):
    """Return whether a process is there and does not wait to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid, within=10):
    deadline = time.monotonic() + within
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


class Killing:
    """Progress that kills the writer in the middle."""

    def __init__(self):
        self.pid = None

    def __call__(self, done, total):
        if done and self.pid is None:
            self.pid = writer().pid
            os.kill(self.pid, signal.SIGKILL)


BIG = 40 << 20  # bytes: several blocks


def big(value):
    return {"w": torch.full((BIG // 4,), float(value))}


# What is saved


@pytest.mark.parametrize("format", ["safetensors", "dcp", "torch", "hf"])
def test_it_saves_what_a_thread_saves(tmp_path, format):
    base = torch.arange(20.0).reshape(4, 5)
    sd = {
        "w": base,
        "transposed": base.T,
        "view": base[1:, ::2],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
    }
    if format != "hf":
        sd |= {
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "frozen": np.frombuffer(b"abcdefgh", np.uint8),
            "nested": [{"x": torch.zeros(2)}, (1, {"deep": [2]})],
            "values": {"step": 7, "text": "a", "bytes": b"b" * 100_000},
        }
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    shardplan.async_save(sd, one, format=format).result(SOON)
    save(sd, other, format=format).result(SOON)
    assert not shardplan.diff(one, other, read=True).changes
    assert shardplan.verify(other).ok


def test_two_saves_in_a_row_use_the_same_process_and_the_same_memory(tmp_path):
    seen = []
    for number in range(3):
        report = save(big(number), tmp_path / str(number)).result(SOON)
        seen.append((writer().pid, writer().memory.file.address))
        assert report.how in ("alone", "cached")
        assert shardplan.restore(tmp_path / str(number))["w"].unique().tolist() == [number]
    assert len(set(seen)) == 1
    save({"w": torch.ones(3)}, tmp_path / "small").result(SOON)
    assert writer().memory.file.nbytes < BIG  # not held for ever
    assert writer().pid == seen[0][0]


def test_threads_and_the_process_take_turns_without_disturbing_each_other(tmp_path):
    futures = [
        shardplan.async_save(big(number), tmp_path / str(number), process=bool(number % 2))
        for number in range(4)
    ]
    for number, future in enumerate(futures):
        future.result(SOON)
        assert shardplan.restore(tmp_path / str(number))["w"].unique().tolist() == [number]


def test_progress_and_the_limits_of_the_pool_are_those_of_a_thread(tmp_path):
    seen = []
    with Pool(max_workers=1, max_bytes=1 << 20) as pool:
        progress = lambda *pair: seen.append(pair)  # noqa: E731
        save(big(1), tmp_path, progress=progress, pool=pool).result(SOON)
    assert seen[0] == (0, BIG)
    assert seen[-1] == (BIG, BIG)
    assert len(seen) > 3
    assert seen == sorted(seen)


# Overlap


@pytest.fixture
def held(monkeypatch):
    """Hold copies in the background until the event is set."""
    go, finish = threading.Event(), Snapshot.finish

    def later(self):
        assert go.wait(30)
        return finish(self)

    monkeypatch.setattr(Snapshot, "finish", later)
    yield go
    go.set()


@pytest.mark.parametrize("process", [False, True])
def test_what_changes_after_staged_is_not_saved(tmp_path, held, process):
    sd = {"w": torch.ones(1000), "seen": [1]}
    future = shardplan.async_save(sd, tmp_path, process=process, overlap=True)
    assert not future.staged.done()
    sd["seen"].append(2)  # values are copied at once
    held.set()
    future.staged.result(SOON)
    sd["w"].zero_()
    future.result(SOON)
    saved = shardplan.restore(tmp_path)
    assert saved["w"].unique().tolist() == [1]
    assert saved["seen"] == [1]


@pytest.mark.parametrize("process", [False, True])
def test_what_changes_before_staged_fails_the_save_and_the_next_one_works(tmp_path, held, process):
    model = torch.nn.Linear(2, 2)
    future = shardplan.async_save({"m": model}, tmp_path, process=process, overlap=True)
    with torch.no_grad():
        model.bias.add_(1)
    held.set()
    assert future.staged.result(SOON) is None
    with pytest.raises(RuntimeError, match=r"`m\.bias` changed while being copied.*staged"):
        future.result(SOON)
    assert files(tmp_path) == []
    shardplan.async_save({"m": model}, tmp_path, process=process, overlap=True).result(SOON)
    assert torch.equal(shardplan.restore(tmp_path)["m"]["bias"], model.bias)


@pytest.mark.parametrize("overlap", [False, True])
def test_originals_are_let_go_as_soon_as_they_are_copied(tmp_path, overlap):
    """What state_dict() returns may be temporary, and large."""
    made = []

    class Temporary:
        def state_dict(self):
            tensor = torch.ones(100)
            made.append(weakref.ref(tensor))
            return {"w": tensor}

        def load_state_dict(self, state):
            pass

    go = threading.Event()
    future = shardplan.async_save(
        {"t": Temporary()}, tmp_path, overlap=overlap, progress=lambda *_: go.wait(30)
    )
    future.staged.result(SOON)
    assert made[0]() is None
    go.set()
    future.result(SOON)


def test_without_overlap_the_copy_is_complete_when_the_call_returns(tmp_path):
    w = torch.ones(1000)
    future = save({"w": w}, tmp_path)
    assert future.staged.done()
    w.zero_()
    future.result(SOON)
    assert shardplan.restore(tmp_path)["w"].unique().tolist() == [1]


# Errors


def test_a_killed_writer_fails_the_save_and_the_next_call_which_it_leaves_whole(tmp_path):
    save(big(1), tmp_path).result(SOON)
    before = files(tmp_path)
    killing = Killing()
    future = save(big(2), tmp_path, overwrite=True, progress=killing)
    while not future.done():
        time.sleep(0.01)
    text = rf"the writer process {killing.pid} was killed by SIGKILL"
    with pytest.raises(WriterProcessError, match=text):  # nobody asked for the result
        save(big(3), tmp_path, overwrite=True)
    assert files(tmp_path) == before
    assert shardplan.restore(tmp_path)["w"].unique().tolist() == [1]
    save(big(3), tmp_path, overwrite=True).result(SOON)
    assert writer().pid != killing.pid
    assert shardplan.restore(tmp_path)["w"].unique().tolist() == [3]


def test_a_writer_that_dies_between_two_saves_is_replaced(tmp_path):
    save(big(1), tmp_path / "a").result(SOON)
    pid = writer().pid
    os.kill(pid, signal.SIGKILL)
    writer()._running.process.wait(10)
    save(big(2), tmp_path / "b").result(SOON)
    assert shardplan.restore(tmp_path / "b")["w"].unique().tolist() == [2]


def test_a_full_disk_is_the_error_of_the_save_and_nothing_is_left(tmp_path):
    save({"w": torch.ones(2)}, tmp_path).result(SOON)
    before, pid = files(tmp_path), writer().pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    with pytest.raises(StoreError, match=r"cannot write .*File too large"):
        save(big(1), tmp_path, overwrite=True).result(SOON)
    assert files(tmp_path) == before
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    save(big(1), tmp_path, overwrite=True).result(SOON)
    assert writer().pid == pid


def test_staging_memory_that_the_system_does_not_grant_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        future = save({"w": torch.ones(BIG)}, tmp_path)
        with pytest.raises(OSError, match=r"167,772,160 bytes of staging memory: File too large"):
            future.result(SOON)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    save(big(1), tmp_path).result(SOON)


def test_a_path_where_nothing_can_be_written_is_the_error_of_the_save(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        save({"w": torch.ones(2)}, tmp_path / "file" / "deep").result(SOON)


def test_a_store_of_this_process_only_is_refused_by_the_call():
    with pytest.raises(TypeError, match=r"memory://here cannot be passed to another process"):
        save({"w": torch.ones(2)}, "memory://here")


def test_a_value_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(ValueRefusedError, match=r"`deep\.f`"):
        save({"w": torch.ones(2), "deep": {"f": lambda: 0}}, tmp_path).result(SOON)


def test_an_error_of_the_progress_function_stops_the_save(tmp_path):
    def stop(done, total):
        if done:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        save(big(1), tmp_path, progress=stop).result(SOON)
    assert files(tmp_path) == []
    save(big(1), tmp_path).result(SOON)


# The end of either process

PROGRAM = """
    import os, signal, sys, torch, shardplan
    from shardplan import _async

    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def progress(done, total):
        if done:
            print(_async._own.writer.pid, flush=True)
            {then}

    sd = {{"w": torch.ones(10 << 20)}}
    shardplan.async_save(sd, sys.argv[1], process=True, overwrite=True, progress=progress)
"""


def run(path, then="pass"):
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(PROGRAM).format(then=then), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_an_interpreter_that_exits_waits_for_the_writer_and_leaves_none(tmp_path):
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert shardplan.restore(tmp_path)["w"].unique().tolist() == [1]
    assert not is_running(int(done.stdout.split()[0]))


@pytest.mark.slow
def test_a_killed_parent_leaves_no_writer_and_the_older_checkpoint_loads(tmp_path):
    shardplan.save({"w": torch.zeros(2)}, tmp_path)
    done = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout.split()[0]))
    assert shardplan.restore(tmp_path)["w"].tolist() == [0, 0]
    shardplan.save({"w": torch.ones(2)}, tmp_path, overwrite=True)
    assert shardplan.restore(tmp_path)["w"].tolist() == [1, 1]


@pytest.mark.slow
def test_a_process_that_the_killed_parent_had_forked_does_not_keep_the_writer_alive(tmp_path):
    """It has inherited the connection, as the workers of a data loader do."""
    then = (
        "os.fork() or (os.close(1), os.close(2), __import__('time').sleep(30), os._exit(0)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = run(tmp_path, then)
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout.split()[0]))


@pytest.mark.slow
def test_signals_to_the_whole_group_do_not_stop_the_writer(tmp_path):
    then = "os.killpg(0, signal.SIGTERM)"
    program = textwrap.dedent(PROGRAM).format(then=then)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        start_new_session=True,
        timeout=120,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert shardplan.restore(tmp_path)["w"].unique().tolist() == [1]


# Many ranks, and torch's own call


@pytest.mark.slow
def test_the_writers_of_real_ranks_save_together_and_fail_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-P", str(SCRIPT), place, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    for one in told:
        assert one["how"] == ["derived", "cached", "cached"]
        assert [(rank, kind) for rank, kind, _ in one["failures"]] == [(1, "WriterProcessError")]
        assert one["differ"] == []
    assert files(tmp_path / "killed") == []


def test_torch_s_call_with_the_type_process_is_carried_out_here(tmp_path):
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    sd = {"model": {"w": torch.arange(6.0)}, "step": 7}
    metadata = dcp.async_save(
        sd, checkpoint_id=tmp_path / "a", async_checkpointer_type=kind
    ).result(SOON)
    assert sorted(metadata.state_dict_metadata) == ["model.w", "step"]
    got = {"model": {"w": torch.zeros(6)}, "step": 0}
    torch.distributed.checkpoint.load(got, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(got["model"]["w"], sd["model"]["w"])


def test_a_run_of_checkpoints_is_written_by_the_process(tmp_path):
    run = shardplan.Checkpoints(tmp_path, every=1, background="process")
    for step in range(1, 3):
        run.save(step, {"w": torch.full((3,), float(step))})
    run.wait()
    assert run.steps() == (1, 2)
    assert writer().pid is not None
    with pytest.raises(ValueError, match="background must be"):
        shardplan.Checkpoints(tmp_path, background="thread")


def test_a_store_with_options_goes_to_the_writer_as_it_is(tmp_path, s3):
    url = f"s3://{s3.bucket}/writer"
    save({"w": torch.ones(2)}, open_store(url, **s3.options)).result(SOON)
    assert shardplan.restore(open_store(url, **s3.options))["w"].tolist() == [1, 1]
