"""Run the scripts beside this file on real ranks of gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def torchrun():
    """Return a function that runs a script on ranks, and returns what it prints."""

    def run(script, ranks, *arguments):
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={ranks}", HERE / "ranks" / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
