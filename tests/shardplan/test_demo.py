"""The demo runs, all it claims holds, and it leaves what it says it leaves."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from shardplan import demo
from shardplan.demo import Demo


def test_a_folder_of_somebody_s_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="holds other files than a demo"):
        Demo(tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def wait_to_be_killed(rank, folder):
    (folder / str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_an_interrupt_ends_the_ranks_too(tmp_path, monkeypatch):
    def interrupted(jobs):
        while not all((tmp_path / str(rank)).exists() for rank in range(demo.RANKS)):
            time.sleep(0.01)
        started.extend(jobs.processes)
        raise KeyboardInterrupt

    started = []
    monkeypatch.setattr(torch.multiprocessing.ProcessContext, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run_processes(wait_to_be_killed, tmp_path)
    for process in started:
        process.join(timeout=30)
        assert process.exitcode < 0
    assert len(started) == demo.RANKS


@pytest.mark.slow
def test_the_demo_runs_and_everything_it_claims_holds(tmp_path):
    command = [sys.executable, "-P", "-m", "shardplan", "demo", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    text = done.stdout
    assert "✗" not in text
    assert text.count("✓") == 9
    assert re.search(r"Done in \d+ s; all of it held", text)
    assert "1 fault" in text  # the damaged copy
    assert {p.name for p in (tmp_path / "demo").iterdir()} >= {
        "step",
        "hf",
        "step.pt",
        "damaged",
        "tiling.svg",
        "reshard.svg",
    }
