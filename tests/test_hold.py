"""What `make hold` tries for long, for a few seconds each: nothing is lost, no damage is missed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOLD = Path(__file__).parent / "hold"
JOBS = [
    "save safetensors",
    "overwrite safetensors",
    "overwrite dcp",
    "convert torch to hf",
    "prune",
    "incremental save",
]


def run(script, *args):
    """Run a script of tests/hold, which ends with an error if it finds a fault."""
    command = [sys.executable, "-W", "ignore", str(HOLD / script), *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [JOBS, ["manager", "async overwrite", "3 ranks overwrite"]])
def test_a_process_killed_at_any_storage_operation_leaves_the_old_or_the_new(jobs):
    assert "30 kills, 0 wrong" in run("kills.py", 30, *jobs)


@pytest.mark.slow
def test_damage_anywhere_in_a_checkpoint_is_found_or_harmless():
    assert run("corruption.py", 400).count(" 0 wrong") == 4
