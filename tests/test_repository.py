"""The repository keeps its promises: who imports whom, and no folder is silently left out."""

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ROOMS = ("planning", "io", "dist", "shardplan")

PURE_PACKAGES = {"attr", "attrs", "numpy"}
# A table of contents may load its own modules on demand; test_import.py says which.
ALSO_ALLOWED = {"strategies.py": {"hypothesis"}, "__init__.py": {"importlib"}}
EFFECTS = {
    "asyncio", "builtins", "concurrent", "ctypes", "datetime", "fileinput", "getpass", "glob",
    "http", "importlib", "io", "locale", "logging", "mmap", "multiprocessing", "os", "pathlib",
    "platform", "random", "runpy", "secrets", "select", "shelve", "shutil", "signal", "socket",
    "sqlite3", "subprocess", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
EFFECTFUL_CALLS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}
EFFECTFUL_NUMPY = {"fromfile", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"}

PLANNING_FILES = sorted((ROOT / "planning").rglob("*.py"))


def run(*command, cwd=ROOT, **environment):
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def modules_loaded_by(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    return set(run(sys.executable, "-I", "-c", code).split())


def source_tree(destination):
    """Copy what a build reads, so that building leaves nothing behind in the repository."""
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, destination / room, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, destination / name)
    return destination


def imported_modules(tree, path):
    """Yield the absolute name of each module that a file of planning/ imports, at any depth."""
    package = ("shardplan", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                parents = package[: len(package) - level + 1] if level else ()
                stem = ".".join([*parents, *([module] if module else [])])
                # `from .. import io` and `from numpy import random` name a module by an alias.
                if module in {None, "shardplan", "numpy"}:
                    yield from (f"{stem}.{alias.name}" for alias in aliases)
                else:
                    yield stem


def is_pure(module, also_allowed=frozenset()):
    top = module.partition(".")[0]
    if top == "shardplan":
        return module == "shardplan.planning" or module.startswith("shardplan.planning.")
    if top == "numpy":
        return module.split(".")[1:2] != ["random"]
    if top in PURE_PACKAGES | also_allowed:
        return True
    return top in sys.stdlib_module_names and top not in EFFECTS


def effects(source, path):
    """List what a file of planning/ imports or calls that does more than compute."""
    tree = ast.parse(source)
    also_allowed = ALSO_ALLOWED.get(path.name, frozenset())
    found = [name for name in imported_modules(tree, path) if not is_pure(name, also_allowed)]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in EFFECTFUL_CALLS:
                found.append(f"{name}() on line {node.lineno}")
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=name):
                if name in EFFECTFUL_NUMPY:
                    found.append(f"np.{name} on line {node.lineno}")
    return found


# Who may import whom


@pytest.mark.parametrize("path", PLANNING_FILES, ids=lambda path: path.name)
def test_planning_imports_only_pure_modules_and_has_no_effects(path):
    assert effects(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import os.path",
        "from time import monotonic",
        "from .. import io",
        "from ..dist import steps",
        "from shardplan import io",
        "import shardplan.io.stores",
        "from numpy import random",
        "def f():\n    import logging",
        "open('f')",
        "np.random.rand()",
        "import hypothesis",
    ],
)
def test_an_impure_line_in_planning_would_be_noticed(source):
    assert effects(source, ROOT / "planning" / "example.py") != []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from attrs import frozen",
        "from . import records",
        "from .records import Chunk",
        "from shardplan.planning.records import Chunk",
        "from collections.abc import Sequence",
    ],
)
def test_a_pure_line_in_planning_is_accepted(source):
    assert effects(source, ROOT / "planning" / "example.py") == []


@pytest.mark.parametrize("package", ["hypothesis", "shardplan.io", "shardplan.dist"])
def test_importing_planning_does_not_load(package):
    loaded = modules_loaded_by("import shardplan.planning")
    assert "shardplan.planning" in loaded
    assert not [name for name in loaded if name == package or name.startswith(f"{package}.")]


def test_importing_planning_does_not_load_torch():
    assert "torch" not in modules_loaded_by("import shardplan.planning")


def test_importing_shardplan_does_not_load_torch():
    assert "torch" not in modules_loaded_by("import shardplan")


# The map of the code


def modules_of(room):
    """Name the modules and folders of modules of one room."""
    found = {path.stem for path in (ROOT / room).glob("*.py")}
    return found - {"__init__", "__main__"} | {p.parent.name for p in (ROOT / room).glob("*/*.py")}


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_names_every_module(room):
    """Planning and the front door are mapped by the README, the others by their docstrings."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if room in ("io", "dist"):
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert sorted(modules_of(room) - set(re.findall(r"`(\w+)/?`", text))) == []


# The traps of the folder names io/ and dist/


def test_ruff_checks_the_files_in_dist():
    files = run(BIN / "ruff", "check", "--show-files", ".").splitlines()
    assert str(ROOT / "dist" / "__init__.py") in files


def test_ruff_would_report_an_unused_import_in_dist(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "bad.py").write_text('"""Bad."""\n\nimport json\n')
    with pytest.raises(subprocess.CalledProcessError) as failure:
        run(BIN / "ruff", "check", ".", cwd=tmp_path)
    assert "F401" in failure.value.stdout


def test_pytest_collects_the_doctests_in_dist():
    listing = run(BIN / "pytest", "--collect-only", "-q", "tests/test_doctests.py")
    assert "[shardplan.dist]" in listing


def test_pytest_collects_tests_in_a_folder_named_dist(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "dist").mkdir(parents=True)
    (tmp_path / "tests" / "dist" / "test_example.py").write_text("def test_example(): pass\n")
    assert "test_example" in run(BIN / "pytest", "--collect-only", "-q", cwd=tmp_path)


def test_git_sees_dist_even_where_a_global_list_ignores_that_name(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "ignored").write_text("dist/\n")
    repository = tmp_path / "repository"
    (repository / "dist").mkdir(parents=True)
    (repository / "dist" / "steps.py").touch()
    shutil.copy(ROOT / ".gitignore", repository)
    run("git", "init", "-q", cwd=repository)
    git = ("git", "-c", f"core.excludesFile={tmp_path / 'ignored'}")
    listing = run(*git, "ls-files", "--others", "--exclude-standard", cwd=repository)
    assert "dist/steps.py" in listing.split()


def test_io_is_the_standard_library_s():
    assert Path(io.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_the_repository_root_is_not_on_sys_path():
    assert ROOT not in {Path(entry or ".").resolve() for entry in sys.path}


@pytest.mark.slow
def test_the_wheel_holds_every_room_and_the_type_marker(tmp_path):
    source = source_tree(tmp_path / "source")
    wheels = tmp_path / "wheels"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-P", "-m", "pip", "wheel", *options, "-w", wheels, source, cwd=tmp_path)
    (wheel,) = wheels.glob("shardplan-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"shardplan/py.typed"}
    for room in ROOMS:
        inside = "shardplan" if room == "shardplan" else f"shardplan/{room}"
        files = (ROOT / room).rglob("*.py")
        expected |= {f"{inside}/{file.relative_to(ROOT / room).as_posix()}" for file in files}
    assert expected <= names
    assert {name.split("/")[0] for name in names} == {"shardplan", "shardplan-0.1.0.dist-info"}
