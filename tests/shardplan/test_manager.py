"""The manager of a run saves at intervals, resumes from what is sound, and removes the rest."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch

import shardplan
from shardplan import Checkpoints, Keep, PerRank
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import ValueRefusedError
from shardplan.io.stores import open_store
from shardplan.planning import PlanError, cast, select


def state(value=0.0):
    return {
        "model": {"w": torch.full((4,), float(value))},
        "optim": {"m": torch.full((2,), float(value))},
    }


def train(run, steps, **options):
    for step in steps:
        run.save(step, state(step), metrics={"loss": abs(step - 20.5)}, **options)
    run.wait()


def folders(path):
    return sorted(os.listdir(path))


@pytest.fixture(params=[True, False], ids=["background", "inline"])
def background(request):
    return request.param


def test_it_saves_at_intervals_and_resumes_with_the_next_step(tmp_path, background):
    run = Checkpoints(tmp_path, every=10, background=background)
    assert run.restore(state(), default=3) == 3
    train(run, range(3, 35))
    assert run.steps() == (10, 20, 30)
    into = state()
    assert Checkpoints(tmp_path, every=10).restore(into) == 31
    assert into["model"]["w"].tolist() == [30.0] * 4


def test_between_intervals_it_does_nothing(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    assert [run.save(step, state()) for step in (0, 1, 9, 11)] == [None] * 4
    assert folders(tmp_path) == []
    assert run.save(9, state(), force=True) is not None
    run.wait()
    assert run.steps() == (9,)


def test_the_last_the_best_and_every_nth_stay(tmp_path, background):
    keep = Keep(last=2, every=40, best=("loss", "min", 2))
    run = Checkpoints(tmp_path, every=10, keep=keep, background=background)
    train(run, range(1, 101))
    # best: 20 (0.5) and 30 (9.5); every: 40, 80; last: 90, 100
    assert run.steps() == (20, 30, 40, 80, 90, 100)
    assert run.best() == str(tmp_path / "step-20")
    assert run.best("loss", "max") == str(tmp_path / "step-100")
    for name in folders(tmp_path):
        assert shardplan.verify(tmp_path / name).ok
    assert folders(tmp_path) == sorted(f"step-{n}" for n in run.steps())


def test_nothing_is_removed_when_a_save_fails(tmp_path):
    run = Checkpoints(tmp_path, every=1, keep=Keep(last=1))
    run.save(1, state())
    run.wait()
    run.save(2, {"bad": object()})
    with pytest.raises(Exception, match="bad"):
        run.wait()
    assert run.steps() == (1,)
    run.save(3, state())
    run.wait()
    assert run.steps() == (3,)


def test_a_damaged_latest_is_skipped_with_a_warning_that_names_it(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(31))
    (tmp_path / "step-30" / "shardplan.json").write_bytes(b"{ not a manifest")
    data = next((tmp_path / "step-20").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    into = state()
    with pytest.warns(UserWarning, match="step-") as caught:
        assert run.restore(into) == 11
    assert into["model"]["w"].tolist() == [10.0] * 4
    texts = " ".join(str(warning.message) for warning in caught)
    assert "step-30" in texts
    assert "step-20" in texts
    assert {warning.filename for warning in caught} == {__file__}


def test_an_unfinished_save_is_skipped_with_a_warning(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(21))
    (tmp_path / "step-20" / "shardplan.json").unlink()
    with pytest.warns(UserWarning, match="step-20 was not finished") as caught:
        assert run.restore(state()) == 11
    assert [warning.filename for warning in caught] == [__file__]


def test_if_all_are_damaged_it_raises_and_does_not_start_anew(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(11))
    (tmp_path / "step-10" / "shardplan.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match="step-10"), pytest.raises(ValueError, match="step-10"):
        run.restore(state(), default=0)


def test_a_checkpoint_that_does_not_fit_is_not_taken_for_a_damaged_one(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(21))
    with pytest.raises(PlanError, match="other"):  # and no warning, which would be an error here
        run.restore({"other": torch.zeros(2)})


def test_excluded_names_keep_what_they_have(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(11))
    into = state(-1)
    assert run.restore(into, exclude="optim.*") == 11
    assert into["model"]["w"].tolist() == [10.0] * 4
    assert into["optim"]["m"].tolist() == [-1.0] * 2


def test_going_back_replaces_the_later_step_and_the_newest_in_time_is_resumed(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(31))
    run.save(20, state(99), force=True)
    into = state()
    assert run.restore(into) == 21
    assert into["model"]["w"].tolist() == [99.0] * 4


def test_time_is_an_interval_too(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = Checkpoints(tmp_path, seconds=60, background=False)
    saved = []
    for step in range(10):
        now[0] += 25
        saved += [step] if run.save(step, state()) else []
    assert saved == [2, 5, 8]


def test_the_result_is_saved_in_another_format_and_no_policy_removes_it(tmp_path):
    run = Checkpoints(tmp_path, every=1, keep=Keep(last=1))
    train(run, range(3))
    planner = [select("model.*"), cast("bfloat16")]
    run.finish(state(5), planner=planner, format="hf")
    train(run, range(3, 5))
    assert run.steps() == (4,)
    result = shardplan.restore(tmp_path / "final")
    assert list(result) == ["model.w"]
    assert result["model.w"].dtype is torch.bfloat16


def test_formats_that_cannot_hold_a_run_are_refused(tmp_path):
    for format in ("hf", "torch"):
        with pytest.raises(ValueError, match="finish"):
            Checkpoints(tmp_path, every=1, format=format)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"seconds": -1}, {"every": 1, "keep": Keep}])
def test_intervals_that_make_no_sense_are_refused(tmp_path, wrong):
    with pytest.raises((TypeError, ValueError)):
        Checkpoints(tmp_path, **wrong)


def test_a_state_dict_in_place_of_the_step_is_named_without_being_printed(tmp_path):
    with pytest.raises(ValueError, match=r"not a dict; is it save\(step, state_dict\)\?$"):
        Checkpoints(tmp_path).save({"w": torch.ones(1000)}, 7)


def test_dcp_checkpoints_are_kept_and_removed_too(tmp_path):
    run = Checkpoints(tmp_path, every=10, format="dcp", keep=Keep(last=2))
    train(run, range(41))
    assert run.steps() == (30, 40)
    assert folders(tmp_path) == ["step-30", "step-40"]
    assert run.restore(state()) == 41


def test_it_works_in_an_object_store(request):
    store = open_store(f"memory://{request.node.name}")
    run = Checkpoints(store, every=10, keep=Keep(last=1, best=("loss", "min", 1)))
    train(run, range(41))
    assert run.steps() == (20, 40)
    assert run.restore(state()) == 41
    into = state()
    shardplan.load(into, run.best())
    assert into["model"]["w"].tolist() == [20.0] * 4


def test_many_ranks_save_resume_on_fewer_and_agree_on_the_time(tmp_path):
    def part(comm, value=0.0):
        return {"w": torch.full((2,), value), "own": PerRank({"rank": comm.rank})}

    def first(comm):
        run = Checkpoints(
            tmp_path, every=4, seconds=1e9, keep=Keep(last=2), comm=comm, background=False
        )
        for step in range(run.restore(part(comm)), 13):
            run.save(step, part(comm, float(step)), metrics={"loss": float(comm.rank)})
        return run.steps()

    def second(comm):
        into = {"w": torch.zeros(2)}
        return Checkpoints(tmp_path, comm=comm).restore(into), into["w"].tolist()

    assert run_ranks(4, first, timeout=60) == [(8, 12)] * 4
    assert run_ranks(2, second, timeout=60) == [(13, [12.0, 12.0])] * 2
    notes = json.loads((tmp_path / "step-12" / "metrics.json").read_text())
    assert notes["step"] == 12
    assert [save["metrics"] for save in notes["saves"]] == [{"loss": 0.0}]


def test_many_ranks_skip_the_same_damaged_checkpoint(tmp_path):
    train(Checkpoints(tmp_path, every=10), range(21))
    data = next((tmp_path / "step-20").glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])

    def fn(comm):
        return Checkpoints(tmp_path, comm=comm).restore(state())

    with pytest.warns(UserWarning, match="step-20"):
        assert run_ranks(2, fn, timeout=60) == [11, 11]

    def misfit(comm):
        return Checkpoints(tmp_path, comm=comm).restore({"x": torch.zeros(1)})

    with pytest.raises(CheckpointError, match="`x`"):
        run_ranks(2, misfit, timeout=60)


SIGTERM = """
import sys, os, signal, torch
from shardplan import Checkpoints
with Checkpoints(sys.argv[1], every=1000, on_sigterm=True) as run:
    for step in range(run.restore({"w": torch.zeros(2)}), 100):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        run.save(step, {"w": torch.full((2,), float(step))})
        if run.stopping:
            break
print(step, run.steps(), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""


def test_sigterm_saves_once_if_asked_for_and_the_handler_is_given_back(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", SIGTERM, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "7 (7,) True"


def test_without_being_asked_it_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = Checkpoints(tmp_path, every=1)
    run.save(1, state())
    run.wait()
    assert signal.getsignal(signal.SIGTERM) is before


KILL = """
import sys, torch, os
from shardplan import Checkpoints, Keep
run = Checkpoints(sys.argv[1], every=1, keep=Keep(last=1), background=sys.argv[2] == "1")
step = run.restore({"w": torch.zeros(1000)}, default=0)
print(step, flush=True)
while True:
    step += 1
    run.save(step, {"w": torch.full((1000,), float(step))})
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_at_any_time_resumes_from_a_whole_checkpoint(tmp_path, background):
    for kill_after in (1, 4, 9):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", KILL, tmp_path, str(int(background))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(kill_after + 1):
            last = int(child.stdout.readline())
        child.kill()
        child.wait()
        child.stdout.close()
        into = {"w": torch.zeros(1000)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what was not finished
            step = Checkpoints(tmp_path).restore(into) - 1
        assert step >= last - 2
        assert into["w"].tolist() == [float(max(step, 0))] * 1000  # -1: before the first commit


def test_what_a_killed_save_left_is_removed_once_it_is_old(tmp_path):
    run = Checkpoints(tmp_path, every=10)
    train(run, range(21))
    for step in (10, 20):
        (tmp_path / f"step-{step}" / "shardplan.json").unlink()
    for file in (tmp_path / "step-10").iterdir():
        os.utime(file, (1.0, 1.0))
    train(run, [30])
    assert folders(tmp_path) == ["step-20", "step-30"]


def test_old_folders_of_another_program_stay(tmp_path):
    (tmp_path / "step-1").mkdir()
    file = tmp_path / "step-1" / "model.pt"
    torch.save(state(), file)
    os.utime(file, (1.0, 1.0))
    train(Checkpoints(tmp_path, every=10), range(11))
    assert file.exists()


def test_metrics_of_a_save_that_failed_are_not_those_of_the_checkpoint(tmp_path):
    keep = Keep(last=1, best=("loss", "min", 1))
    run = Checkpoints(tmp_path, every=1, background=False, keep=keep)
    for step, loss in ((1, 5.0), (2, 3.0), (3, 9.0)):
        run.save(step, state(step), metrics={"loss": loss})
    for _ in range(3):
        with pytest.raises(ValueRefusedError, match="bad"):
            run.save(3, {"bad": object()}, metrics={"loss": 0.0})
    run.save(4, state(4), metrics={"loss": 8.0})
    assert run.steps() == (2, 4)
    assert run.best() == str(tmp_path / "step-2")
    run.save(4, state(5), metrics={"loss": 1.0})
    assert run.steps() == (4,)


def test_metrics_that_are_no_numbers_fail_on_all_ranks_and_protect_nothing(tmp_path):
    def fn(comm):
        run = Checkpoints(tmp_path, every=1, comm=comm, background=False, keep=Keep(last=1))
        with pytest.raises(CheckpointError, match="write metrics"):
            run.save(1, state(), metrics={"loss": None if comm.rank == 0 else 1.0})
        for step in (1, 2):
            run.save(step, state(), metrics={"loss": 1.0})
        return run.steps()

    assert run_ranks(2, fn, timeout=60) == [(2,)] * 2


def test_elements_of_a_damaged_checkpoint_never_stay(tmp_path):
    run = Checkpoints(tmp_path, every=1, background=False)
    run.save(1, {"w": torch.full((4,), 1.0)})
    run.save(2, {"w": torch.full((4,), 2.0), "new": torch.full((4,), 2.0)})
    data = next((tmp_path / "step-2").glob("*.safetensors"))
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    into = {"w": torch.zeros(4), "new": torch.zeros(4)}
    with pytest.warns(UserWarning, match="step-2"), pytest.raises(ValueError, match="checksum"):
        run.restore(into, strict=False)
    whole = {"w": torch.zeros(4)}
    with pytest.warns(UserWarning, match="step-2"):
        assert run.restore(whole, strict=False) in (2, 3)
