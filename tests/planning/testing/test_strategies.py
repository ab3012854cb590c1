"""Tests that use the strategies pass on machines of any speed."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import DeadlineExceeded, FailedHealthCheck, FlakyFailure

from shardplan.planning import Mesh, dedup_replicas, global_plan, local_plan
from shardplan.planning.strategies import (
    assert_all_saved,
    assert_written_once,
    dtypes,
    framings,
    meshes,
    placements,
    save_plans,
    shapes,
    state_dicts,
    tensor_specs,
    tilings,
    values,
)

ROOT = Path(__file__).parents[3]
STRATEGIES = {
    "dtypes": dtypes(),
    "framings": framings((4, 6)),
    "meshes": meshes(),
    "placements": placements(Mesh(dp=2, tp=2), (4, 6)),
    "save_plans": save_plans(),
    "shapes": shapes(),
    "state_dicts": state_dicts(),
    "tensor_specs": tensor_specs(),
    "tilings": tilings((4, 6)),
    "values": values(),
}


@pytest.fixture
def busy_machine(monkeypatch):
    """A machine on which everything takes thirty times as long, as far as Hypothesis sees.

    What counts is the time of this process, so that a machine that is busy anyway makes no odds.
    """
    monkeypatch.setattr(time, "perf_counter", lambda: 30 * time.process_time())


def plans_are_whole(plans):
    done, metadata = global_plan(plans, dedup_replicas())
    assert_written_once(done, metadata)
    assert assert_all_saved(plans, done) == ()


USES = {"save_plans": plans_are_whole, "state_dicts": lambda sd: global_plan([local_plan(sd)])}


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_test_without_a_deadline_does_not_fail_because_the_machine_is_busy(name):
    use = USES.get(name, repr)
    settings(deadline=None, max_examples=20, database=None)(given(STRATEGIES[name])(use_of(use)))()


@pytest.mark.usefixtures("busy_machine")
def test_a_busy_machine_is_one_on_which_a_deadline_passes():
    test = given(save_plans())(use_of(plans_are_whole))
    slow = settings(deadline=10, database=None, suppress_health_check=[HealthCheck.too_slow])
    with pytest.raises((DeadlineExceeded, FlakyFailure, FailedHealthCheck)):
        slow(test)()


def use_of(use):
    """Return a test function of one argument; Hypothesis wants one of its own each time."""

    def test(value):
        use(value)

    return test


def examples():
    """Yield the name and the code of each page and notebook that shows a property test."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        yield page.name, page.read_text()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(notebook.read_text())["cells"]
        code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        yield notebook.name, "\n".join(code)
    for module in ("strategies.py", "__init__.py"):
        yield module, (ROOT / "planning" / "testing" / module).read_text()


def shown_without_a_deadline(text):
    """Return the lines above property tests that do not switch the deadline off."""
    named = re.findall(r"(\w+) = settings\(.*deadline=None", text)
    fine = re.compile("|".join(["deadline=None", *(rf"@{name}\b" for name in named)]))
    above = re.findall(r"^(.*)\n\W*@given\(", text, re.MULTILINE)
    return [line for line in above if not fine.search(line)]


@pytest.mark.parametrize(("name", "text"), examples(), ids=lambda value: value[:30])
def test_property_tests_that_are_shown_have_no_deadline(name, text):
    assert shown_without_a_deadline(text) == []


def test_a_property_test_with_a_deadline_would_be_found():
    assert shown_without_a_deadline("x\n@given(a)\n@settings(deadline=None)\n@given(b)") == ["x"]
