"""Importing planning loads little of it: names come on demand."""

import subprocess
import sys

import pytest

# Every module that looking into a checkpoint can do without.
NOT_NEEDED = {
    "codec", "columns.items", "columns.reads", "columns.world", "draw", "load",
    "matching", "mesh", "passes.keys", "plans", "reports", "save", "storage.ranges", "tensors",
}  # fmt: skip


def test_opening_a_checkpoint_loads_little_of_planning():
    code = (
        "import shardplan.cli.contents, shardplan.io.formats.native.source, sys\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-I", "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {f"shardplan.planning.{name}" for name in NOT_NEEDED} & set(loaded) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "load"])
def test_saving_and_loading_import_nothing_that_explains_or_draws(name):
    code = f"import sys, shardplan; shardplan.{name}; print(*sys.modules)"
    command = [sys.executable, "-I", "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "shardplan.planning.reports" not in loaded
    assert "shardplan.planning.draw" not in loaded


@pytest.mark.slow
def test_a_first_save_and_load_do_not_import_masked_arrays(tmp_path):
    code = """
import sys, torch, shardplan
before = "numpy.ma" in sys.modules
shardplan.save({"w": torch.ones(2, 3), "step": 1}, sys.argv[1])
shardplan.load({"w": torch.ones(2, 3), "step": 0}, sys.argv[1])
print(before, "numpy.ma" in sys.modules)
"""
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_name_of_planning_means_the_same_whatever_was_loaded_before():
    code = """
import importlib, pkgutil, types
import shardplan.planning as planning
for module in pkgutil.walk_packages(planning.__path__, "shardplan.planning."):
    importlib.import_module(module.name)
names = {name: getattr(planning, name) for name in planning.__all__}
print([name for name, value in names.items() if isinstance(value, types.ModuleType)])
print(sorted(set(names) - set(dir(planning))), planning.mesh.fsdp is planning.fsdp)
"""
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[] True"]
