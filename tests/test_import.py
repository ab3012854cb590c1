"""Importing planning costs little more than importing what it is built on."""

import statistics
import subprocess
import sys

import pytest

RUNS = 7

# Processor time, not time on the clock: what other processes do meanwhile is not measured. Numpy
# and attrs are there before the clock starts, so that what is measured is the rest.
CODE = """
import numpy, attrs, time
start = time.process_time()
import shardplan.planning
print(time.process_time() - start)
"""


def seconds_in_a_fresh_interpreter():
    command = [sys.executable, "-I", "-c", CODE]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_importing_planning_takes_a_tenth_of_a_second_more_than_numpy_and_attrs():
    seconds_in_a_fresh_interpreter()  # compiles what has changed
    measured = [seconds_in_a_fresh_interpreter() for _ in range(RUNS)]
    assert statistics.median(measured) < 0.1, measured
