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


@pytest.mark.slow
def test_a_rank_that_fails_in_any_phase_is_named_in_time_and_nothing_is_lost():
    assert hold("ranks", 6)


@pytest.mark.slow
def test_what_happens_at_once_or_is_interrupted_works_or_is_refused_and_leaves_nothing():
    assert len(hold("concurrency", 9)) == 13


@pytest.mark.slow
def test_saves_and_loads_of_changing_layouts_hold_no_more_in_the_end():
    assert len(hold("soak", 20)) == 3


@pytest.mark.slow
def test_tensors_of_any_name_dtype_and_kind_come_back_exactly_or_are_refused():
    assert len(hold("sizes", 300)) == 9


@pytest.mark.slow
def test_behind_a_faulty_proxy_the_verdict_of_a_save_is_what_is_there():
    assert len(hold("objects", 8)) == 3
