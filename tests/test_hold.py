"""What `make hold` tries for long, for a few seconds each: nothing is lost, no damage is missed."""

import subprocess
import sys
from pathlib import Path

import pytest

HOLD = Path(__file__).parent / "hold"


def hold(section, count):
    """Run a section of tests/hold, which prints a table, and ends with an error on any fault."""
    command = [sys.executable, str(HOLD / "run.py"), f"{section}={count}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith(f"{section} ")]


@pytest.mark.slow
def test_a_process_killed_at_any_storage_operation_leaves_the_old_or_the_new():
    assert len(hold("kills", 60)) == 6


@pytest.mark.slow
def test_damage_anywhere_in_a_checkpoint_is_found_or_harmless():
    assert len(hold("corruption", 400)) == 6
