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
    assert {extras.pop(name) for name in ("latest", "prune", "verify")} == {"io"}
    assert {"save", "load", "convert", "restore", "to_torch"} <= extras.keys()
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
@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_the_extra_cli_alone_can_look_into_checkpoints(environment, command, tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    more = ", '--mesh', 'dp=2'" if command == "plan" else ""
    text = run(environment("cli"), MAIN.format(f"{command!r}, {str(tmp_path)!r}{more}"))
    assert "error" not in text
    assert text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cat", "convert", "diff"])
def test_a_command_that_needs_torch_says_so(environment, command, tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    more = {"cat": "'w'", "convert": f"'{tmp_path}/b', '--format', 'dcp'", "diff": f"'{tmp_path}'"}
    code = MAIN.format(f"{command!r}, {str(tmp_path)!r}, {more[command]}")
    assert run(environment("cli"), code).endswith("needs torch: pip install 'shardplan[torch]'")


@pytest.mark.slow
def test_the_extra_hypothesis_brings_strategies(environment):
    code = "import shardplan.planning.testing.strategies as s; print(bool(s.shapes()))"
    assert run(environment("hypothesis"), code) == "True"
