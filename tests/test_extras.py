"""Each extra brings what it is for, and errors name the extra that is missing.

An environment here is what pip would install: the packages that an extra requires by their own
metadata, linked into an empty folder. Python runs without its site-packages.
"""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import shardplan

packaging = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(extras):
    """Return the distributions that `shardplan[extras]` brings."""
    found, todo = set(), [(text, "") for text in PROJECT["dependencies"]]
    todo += [(text, "") for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    while todo:
        text, extra = todo.pop()
        requirement = packaging.Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "shardplan":
            inner = [PROJECT["optional-dependencies"][name] for name in requirement.extras]
            todo += [(text, "") for texts in inner for text in texts]
        elif requirement.name.lower() not in found:
            found.add(requirement.name.lower())
            needed = metadata.requires(requirement.name) or []
            todo += [(text, e) for text in needed for e in ("", *requirement.extras)]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return a function that makes the environment of some extras, once each."""
    made = {}

    def make(*extras):
        if extras not in made:
            folder = made[extras] = tmp_path_factory.mktemp("site")
            (folder / "shardplan").symlink_to(ROOT / "shardplan")
            for name in required(extras):
                link(metadata.distribution(name), folder)
        return made[extras]

    return make


def link(distribution, folder):
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
        path = Path(distribution.locate_file(top))
        if top != "__pycache__" and path.exists() and not (folder / top).exists():
            (folder / top).symlink_to(path)


def run(folder, code):
    """Run code in an environment; return what it prints, or the last line of its error."""
    start = f"import sys; sys.path.append({str(folder)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", start + code]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


MAIN = "sys.argv = ['shardplan', {}]\nfrom shardplan.cli import main\nmain()"


@pytest.mark.slow
def test_the_extra_torch_alone_can_save_load_convert_and_verify(environment, tmp_path):
    code = f"""
import torch, shardplan
path = {str(tmp_path)!r}
shardplan.save({{"w": torch.ones(2)}}, path + "/a")
sd = {{"w": torch.zeros(2)}}
shardplan.load(sd, path + "/a")
for format in ("safetensors", "dcp", "hf", "torch"):
    shardplan.convert(path + "/a", f"{{path}}/{{format}}", format=format)
    assert torch.equal(shardplan.restore(f"{{path}}/{{format}}")["w"], sd["w"])
    assert shardplan.verify(f"{{path}}/{{format}}")
assert not shardplan.diff(path + "/a", path + "/dcp")
shardplan.async_save(sd, path + "/b").result()
shardplan.as_torch_storage_writer(path + "/c")
print(sd["w"].tolist(), "xxhash" in sys.modules, "obstore" in sys.modules)
"""
    assert run(environment("torch"), code) == "[1.0, 1.0] True False"


@pytest.mark.slow
def test_the_extra_io_alone_can_verify_and_find_checkpoints_of_any_format(environment, tmp_path):
    shardplan.save({"w": torch.ones(2), "step": 7}, tmp_path / "run" / "a")
    for format in ("dcp", "hf", "torch"):
        target = tmp_path / "run" / f"{format}.pt" if format == "torch" else tmp_path / format
        shardplan.convert(tmp_path / "run" / "a", target, format=format)
    code = f"""
import shardplan
path = {str(tmp_path)!r}
for place in ("/run/a", "/dcp", "/hf", "/run/torch.pt"):
    assert shardplan.verify(path + place)
assert shardplan.latest(path + "/run").endswith("/a")
print(shardplan.prune(path + "/run", keep_last=1).kept, "torch" in sys.modules)
"""
    assert run(environment("io"), code) == "('a',) False"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "dcp", "hf", "torch"])
def test_the_extra_io_alone_reads_elements_as_numpy_arrays(environment, tmp_path, format):
    w = torch.arange(12.0).reshape(4, 3)
    sd = {"w": w, "n": {"k": torch.tensor(3)}, "e": torch.zeros(0, 2), "b": w.bfloat16(), "step": 7}
    shardplan.save(sd | {"rng": [torch.ones(1)]}, tmp_path / "a")
    path = tmp_path / ("x.pt" if format == "torch" else "x")
    shardplan.convert(tmp_path / "a", path, format=format)
    code = f"""
import shardplan, numpy
found = shardplan.open_checkpoint({str(path)!r})
full = numpy.arange(12, dtype="float32").reshape(4, 3)
for index in (..., slice(1, 3), (slice(None, None, -2), 1), (0, 0), slice(1, 1)):
    part = found["w"][index]
    assert type(part) is numpy.ndarray and part.dtype == found["w"].dtype == "float32"
    assert numpy.array_equal(part, full[index]), index
keys = ["w", "n.k", "e"] + ["step"] * ("step" in found)
made = shardplan.restore({str(path)!r}, keys=keys)
assert numpy.array_equal(made["w"], full) and made["e"].shape == (0, 2)
assert int(found["n.k"]) == 3 and made.get("step", 7) == 7
for read in (lambda: found["b"][...], lambda: shardplan.restore({str(path)!r}, keys="b")):
    try: read()
    except TypeError as error: print(error)
print(shardplan.verify({str(path)!r}).ok, "torch" in __import__("sys").modules)
"""
    no = "`b` cannot be read here: numpy has no dtype bfloat16; pip install ml_dtypes, or 'shardpl"
    lines = run(environment("io"), code).splitlines()
    assert [line[: len(no)] for line in lines] == [no, no, "True False"]


@pytest.mark.slow
def test_a_value_that_needs_torch_says_so(environment, tmp_path):
    shardplan.save({"device": torch.device("cpu"), "n": 1}, tmp_path)
    for read in (f"open_checkpoint({str(tmp_path)!r})['device']", f"restore({str(tmp_path)!r})"):
        text = run(environment("io"), f"import shardplan; shardplan.{read}")
        assert text.endswith("the value of `device` needs torch: pip install 'shardplan[torch]'")


@pytest.mark.slow
def test_dtypes_that_numpy_lacks_are_those_of_ml_dtypes(environment, tmp_path):
    shardplan.save({"b": torch.ones(2, 3).bfloat16()}, tmp_path)
    code = f"""
import sys, types, numpy
sys.modules["ml_dtypes"] = types.SimpleNamespace(bfloat16=numpy.dtype([("bits", "<u2")]))
import shardplan
for made in (shardplan.open_checkpoint({str(tmp_path)!r})["b"][:, ::2],
             shardplan.restore({str(tmp_path)!r})["b"][:, ::2]):
    print(made["bits"].tolist())
"""
    assert run(environment("io"), code).splitlines() == ["[[16256, 16256], [16256, 16256]]"] * 2


def needed(text):
    """Return the package that a message names, having checked that the extra brings it."""
    package, command = text.split(" needs ")[1].split(": pip install ")
    extra = command.removeprefix("'shardplan[").removesuffix("]'")
    assert package in required([extra])
    return package, extra


@pytest.mark.slow
def test_each_function_names_the_one_extra_that_is_enough_for_it(environment):
    code = """
import shardplan
for name in set(shardplan.__all__) - {"__version__"}:
    try: getattr(shardplan, name)
    except ModuleNotFoundError as error: print(error)
"""
    nothing = run(environment(), code).splitlines()
    extras = {line.split()[0].removeprefix("shardplan."): needed(line)[1] for line in nothing}
    readers = ("PerRank", "explore", "latest", "open_checkpoint", "prune", "restore", "verify")
    assert {extras.pop(name) for name in readers} == {"io"}
    assert {"save", "load", "convert", "to_torch"} <= extras.keys()
    assert set(extras.values()) == {"torch"}
    without_torch = run(environment("io"), code).splitlines()
    assert {needed(line) for line in without_torch} == {("torch", "torch")}
    assert {line.split()[0].removeprefix("shardplan.") for line in without_torch} == extras.keys()
    assert run(environment("torch"), code) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "code", "says"),
    [
        (("io",), "import shardplan.torch_dcp", "shardplan.torch_dcp needs torch: "),
        (("io",), "import shardplan.dist as d; d.torch_comm()", "torch_comm needs torch: "),
        ((), "import shardplan.planning.testing.strategies", "strategies needs hypothesis: "),
        (
            (),
            "import shardplan.io.formats.native.manifest",
            "reading or writing a checkpoint needs xxhash: ",
        ),
        (("io",), "import shardplan; shardplan.latest('s3://b')", "needs obstore: "),
        (("io",), "import shardplan; shardplan.latest('memory://b')", "needs obstore: "),
        (("io",), "import shardplan.demo", "the demo needs torch: "),
        ((), MAIN.format("'inspect', 'x'"), "the command line needs "),
        (("io",), MAIN.format("'inspect', 'x'"), "the command line needs "),
        (("cli",), MAIN.format("'inspect', 's3://b/x'"), "needs obstore: "),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(environment, extras, code, says):
    text = run(environment(*extras), code)
    assert says in text
    needed(text)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "verify", "plan", "cat"])
def test_the_extra_cli_alone_can_look_into_checkpoints(environment, command, tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    more = {"plan": ", '--mesh', 'dp=2'", "cat": ", 'w[:1]'"}.get(command, "")
    text = run(environment("cli"), MAIN.format(f"{command!r}, {str(tmp_path)!r}{more}"))
    assert "error" not in text
    assert text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "diff"])
def test_a_command_that_needs_torch_says_so(environment, command, tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    more = {"convert": f"'{tmp_path}/b', '--format', 'dcp'", "diff": f"'{tmp_path}'"}
    code = MAIN.format(f"{command!r}, {str(tmp_path)!r}, {more[command]}")
    assert run(environment("cli"), code).endswith("needs torch: pip install 'shardplan[torch]'")


@pytest.mark.slow
def test_the_extra_hypothesis_brings_strategies(environment):
    code = "import shardplan.planning.testing.strategies as s; print(bool(s.shapes()))"
    assert run(environment("hypothesis"), code) == "True"
