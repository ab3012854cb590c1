"""The demo runs, all it claims holds, and it leaves what it says it leaves."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shardplan import demo
from shardplan.demo import Demo


def test_a_folder_of_somebody_s_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="holds other files than a demo"):
        Demo(tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_interrupt_ends_the_ranks_too(monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "time", SimpleNamespace(sleep=interrupted))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        with pytest.raises(KeyboardInterrupt):
            demo._wait([job])
        assert job.wait(timeout=30) < 0


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
