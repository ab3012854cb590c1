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
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ROOMS = ("planning", "io", "dist", "shardplan")

PURE_PACKAGES = {"attr", "attrs", "numpy"}
# A table of contents may load its own modules on demand; test_import.py says which.
ALSO_ALLOWED = {"strategies.py": {"hypothesis"}, "door.py": {"importlib"}}
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
        shutil.copytree(ROOT / room, destination / room, symlinks=True, ignore=ignored)
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
        "import shardplan.io.stores.base",
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


# Rooms are entered by their doors

DEEP_IMPORTS: dict[tuple[str, str], str] = {
    ("io", "shardplan.planning.door"): "makes the doors of io",
}


def room_of(module):
    parts = module.split(".")
    return parts[1] if parts[1:2] and parts[1] in ROOMS else "shardplan"


def is_door(module):
    folder = ROOT.joinpath("shardplan", *module.split(".")[1:])
    return (folder / "__init__.py").exists()


def imports_past_a_door():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and not node.level:
                    module = node.module or ""
                    inside = module.startswith("shardplan.") and room_of(module) != room
                    if inside and not is_door(module):
                        yield room, module


def test_a_room_imports_from_the_doors_of_others():
    assert set(imports_past_a_door()) == set(DEEP_IMPORTS)


def doors():
    for path in sorted(ROOT.joinpath("shardplan").glob("**/__init__.py")):
        yield from [path] if "door(" in path.read_text(encoding="utf-8") else []
    for room in ROOMS[:3]:
        for path in sorted((ROOT / room).rglob("__init__.py")):
            yield from [path] if "door(" in path.read_text(encoding="utf-8") else []


@pytest.mark.parametrize("path", list(doors()), ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_type_checkers_find_the_names_of_a_door_where_it_finds_them(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (seen,) = (node.body for node in tree.body if isinstance(node, ast.If))
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.func.id == "door")
    loaded = ast.literal_eval(call.args[1])
    assert {(n.module, alias.name) for n in seen for alias in n.names} == {
        (home, name) for home, names in loaded.items() for name in names.split()
    }
    modules = {p.stem for p in path.parent.glob("*.py")} | {p.name for p in path.parent.iterdir()}
    assert modules.isdisjoint(name for names in loaded.values() for name in names.split())


# One name, one meaning

# A command is named as the function that it runs, and `dcp` has torch's own names.
NAMED_AS_THE_VERB = ("cli", "dcp")
# What each of these is, its folder says: one per format, room or layer.
MODULES_BY_FOLDER = {"base", "comm", "errors", "joined", "source", "verify", "write"}
# What decides or describes, in planning, and what does it or offers it to users.
PLANNED_AND_DONE = {
    "diff", "explore", "fetch", "layouts", "load", "metadata", "pieces", "quantized", "read",
    "records", "retention", "save", "tensors", "transfer",
}  # fmt: skip
SHARED_MODULES = {
    "frames": "columns that say how two frames differ, and oracles for them",
    "keys": "state dicts whose keys differ by rank, and passes that change keys",
    "strategies": "the address that users import them from",
    "names": "lists of names in short, and the names that pickles may use",
}
SHARED_NAMES = {
    "Change": "a line of each of two reports, which print under that word",
    "pad": "a pass, and what numpy calls it for one array",
    "permute": "a pass, and what torch calls it for one tensor",
    "save_state": "accelerate's own name for it",
    "split": "a pass, and what MPI calls the parting of a group of ranks",
}


def own_modules():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            is_named = path.name not in ("__init__.py", "__main__.py")
            if is_named and path.relative_to(ROOT).parts[1] not in NAMED_AS_THE_VERB:
                yield path


def public_names(path):
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name


def repeated(names):
    return {name for name, count in Counter(names).items() if count > 1}


def test_one_module_name_has_one_meaning():
    shared = repeated(path.stem.strip("_") for path in own_modules())
    assert shared == MODULES_BY_FOLDER | set(PLANNED_AND_DONE) | set(SHARED_MODULES)


def test_one_name_of_a_class_or_function_has_one_meaning():
    shared = repeated(name for path in own_modules() for name in {*public_names(path)})
    assert shared == set(SHARED_NAMES)


# Control flow is visible, protocols are honest

GROWING = {"add", "append", "extend", "insert", "setdefault", "update"}
MEMOS = {"catalogs", "datas"}  # what `decode_plans` has decoded before
PROTOCOLS = ("Comm", "Format", "Source", "Store", "Writer")


@cache
def sources():
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def names_stored_in(node):
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not is_read(n)}
    return stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def is_read(name):
    return isinstance(name.ctx, ast.Load)


def collections_made_in(function):
    """Yield the names of lists, dicts and sets that a function begins."""
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                made = value.func if isinstance(value, ast.Call) else value
                made = made.value if isinstance(made, ast.Subscript) else made
                is_kind = isinstance(made, ast.Name) and made.id in {"dict", "list", "set"}
                if is_kind or isinstance(made, (ast.Dict, ast.List, ast.Set)):
                    yield name
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() | ast.List()):
                yield name


def collections_grown_in(closure):
    """Yield the names of variables of its caller that a closure puts something into."""
    own = names_stored_in(closure)
    for node in ast.walk(closure):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=verb)):
                if verb in GROWING and name not in own:
                    yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()) if name not in own:
                yield name


def closures_that_grow(tree):
    kinds = (ast.FunctionDef, ast.Lambda)
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        inner = [n for n in ast.walk(function) if isinstance(n, kinds) and n is not function]
        made = {*collections_made_in(function)} if inner else set()
        for closure in inner if made else ():
            yield from made & {*collections_grown_in(closure)}


def test_no_closure_adds_to_a_collection_of_its_caller():
    assert {name for tree in sources() for name in closures_that_grow(tree)} == MEMOS


def test_a_closure_that_adds_to_a_list_of_its_caller_would_be_noticed():
    text = "def f():\n    found = []\n    def g(x):\n        found.append(x)\n    return g, found\n"
    assert [*closures_that_grow(ast.parse(text))] == ["found"]


def test_nobody_asks_which_implementation_of_a_protocol_is_there():
    classes = [n for tree in sources() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    kinds = set(PROTOCOLS)
    while more := {
        c.name
        for c in classes
        if c.name not in kinds and any(isinstance(b, ast.Name) and b.id in kinds for b in c.bases)
    }:
        kinds |= more
    asked = {
        name.id
        for tree in sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance"
        for name in ast.walk(call.args[1])
        if isinstance(name, ast.Name)
    }
    assert {"LocalStore", "NativeSource", "HfWriter"} < kinds
    assert asked & kinds == {"Comm", "Store"}  # what a user passed: is it one at all?


# The map of the code


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_names_every_folder(room):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / room).glob("**/*/__init__.py")}
    assert sorted(folders - set(re.findall(r"(\w+)/", text))) == []


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


def test_the_standard_library_comes_before_the_repository_root_on_sys_path():
    entries = [Path(entry or ".").resolve() for entry in sys.path]
    library = Path(sysconfig.get_path("stdlib")).resolve()
    assert ROOT not in entries[: entries.index(library)]


@pytest.mark.slow
def test_type_checkers_find_the_package_in_an_editable_install(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import shardplan\n"
        "from shardplan.planning import local_plan\n"
        "plan: int = local_plan({})\n"
        "report: int = shardplan.load({}, 'step-7')\n"
    )
    command = [BIN / "mypy", "--no-incremental", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert 'expression has type "SavePlan"' in done.stdout
    assert 'expression has type "LoadReport"' in done.stdout


@pytest.mark.slow
def test_the_wheel_holds_every_room_and_the_type_marker(tmp_path):
    source = source_tree(tmp_path / "source")
    wheels = tmp_path / "wheels"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet")
    run(sys.executable, "-P", "-m", "pip", "wheel", *options, "-w", wheels, source, cwd=tmp_path)
    (wheel,) = wheels.glob("shardplan-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"shardplan/py.typed", "shardplan/explorer.html"}
    for room in ROOMS:
        inside = "shardplan" if room == "shardplan" else f"shardplan/{room}"
        files = (ROOT / room).rglob("*.py")
        expected |= {f"{inside}/{file.relative_to(ROOT / room).as_posix()}" for file in files}
    assert expected <= names
    assert len({name.split("/")[0] for name in names}) == 2  # the package, and its metadata


def test_the_version_is_the_same_wherever_it_is_named():
    read = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "CITATION.cff")}
    versions = {
        re.search(r'^version(?: = |: )"?([\d.]+)', text, re.MULTILINE)[1] for text in read.values()
    }
    changes = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions == {changes[0]}
