"""The command line: what it prints, what it exits with, and what it does not import.

The screens are kept in tests/screens, 100 columns wide. To renew them after a change, and to see
what changed: ``RENEW_SCREENS=1 pytest tests/shardplan/test_cli.py; git diff tests/screens``.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app
from shardplan.cli.inspect import branches
from shardplan.cli.plan import parse_mesh, parse_placements
from shardplan.io.formats.native.manifest import MANIFEST, encode_manifest
from shardplan.io.formats.native.write import Written, WrittenFile, assemble
from shardplan.planning import (
    Mesh,
    Only,
    Replicate,
    Shard,
    StridedShard,
    derive_plans,
    fsdp,
    llama3_8b,
    split_chunks,
    world_plans,
)
from shardplan.planning.storage.write import file_name
from shardplan.planning.text import runs_text

ROOT = Path(__file__).resolve().parents[2]
SCREENS = Path(__file__).parents[1] / "screens"
PROGRAM = Path(sys.executable).with_name("shardplan")
WIDE = {"COLUMNS": "100", "NO_COLOR": "1"}


def run(*arguments, **environment):
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], env=WIDE | environment)


def answer(*arguments, code=0):
    """Run a command with --json, and return what it answers."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    answered = json.loads(result.stdout)
    assert answered.pop("schema") == 1
    return answered


def refusal(*arguments):
    """Run a command that cannot be done, and return the line that says why."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardplan: error: ")
    return line.removeprefix("shardplan: error: ")


def run_program(*arguments, **options):
    """Run the installed program."""
    environment = os.environ | WIDE | options.pop("environment", {})
    command = [str(PROGRAM), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, **options
    )


def run_without_torch(*arguments):
    """Run a command in an interpreter that has neither torch nor pydantic."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['pydantic'] = None\n"
        f"sys.argv = {['shardplan', *map(str, arguments)]!r}\n"
        "from shardplan.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)


def state(shift=0.0):
    """Make a small model."""
    generator = torch.Generator().manual_seed(1)

    def weight(*shape):
        return torch.randn(*shape, generator=generator)

    model = {"embed": {"weight": weight(1000, 64)}, "norm": torch.ones(64, dtype=torch.bfloat16)}
    for layer in range(4):
        attention = {"wq": weight(64, 64), "wo": weight(64, 64)}
        model[f"layers.{layer}"] = {"attn": attention, "norm": torch.ones(64) + shift}
    return {"model": model, "step": 7, "lr": 3e-4, "betas": (0.9, 0.95)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of three checkpoints; do not change it."""
    folder = tmp_path_factory.mktemp("runs")
    for step in (100, 200, 300):
        planner = split_chunks(32 << 10)
        shardplan.save(state(step - 100), folder / f"step-{step}", planner=planner)
    return folder


@pytest.fixture(scope="module")
def ckpt(runs):
    return runs / "step-100"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Llama 3 8B as 64 ranks would save it: the manifest of it, without any data."""
    folder, ranks, save_id = tmp_path_factory.mktemp("llama"), 64, "5f3a9c0d7e21"
    mesh = Mesh(dp=ranks)
    plans, metadata = derive_plans(world_plans(fsdp(llama3_8b(), mesh), mesh))
    sizes = [4096 + int(plan.items.nbytes.sum()) for plan in plans]
    names = [file_name(rank, 0, 1, save_id) for rank in range(ranks)]
    files = [WrittenFile(0, *pair, 4096, 0) for pair in zip(names, sizes, strict=True)]
    written = [Written((file,), {}) for file in files]
    whole = assemble(metadata, plans, written, save_id=save_id, created=1.79e9)
    (folder / MANIFEST).write_bytes(encode_manifest(whole))
    return folder


@pytest.fixture
def damaged(ckpt, tmp_path):
    """A copy of a checkpoint with a changed byte and a missing file."""
    copy = shutil.copytree(ckpt, tmp_path / "damaged")
    files = sorted(copy.glob("shard-*"))
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    files[2].unlink()
    return copy


def normal(text):
    """Replace what differs from one run to the next."""
    text = re.sub(r"\S*/(llama\d|runs\d|damaged|copy)", r"\1", text)
    text = re.sub(r"(llama|runs)\d", r"\1", text)
    text = re.sub(r"\b(?!5f3a9c0d7e21)[0-9a-f]{12}\b", "0123456789ab", text)
    text = re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", "2026-01-01 12:00 UTC", text)
    text = re.sub(r"[\d.]+ (ms|s|min) \([\d.,]+ [KMG]?i?B/s\)", "1 ms (1.0 GiB/s)", text)
    return re.sub(r"read in [\d.]+ (ms|s)\b", "read in 1 ms", text)


def check_screen(name, result):
    """Compare what was printed with the screen that is kept."""
    found, file = normal(result.stdout), SCREENS / f"{name}.txt"
    if os.environ.get("RENEW_SCREENS"):
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8")


# Screens


@pytest.mark.parametrize(
    ("name", "arguments", "columns"),
    [
        ("inspect", [], 100),
        ("inspect-narrow", [], 80),
        ("inspect-pattern", ["*_layernorm*"], 100),
        ("inspect-depth", ["--depth", "2"], 100),
        ("inspect-chunks", ["lm_head", "--chunks"], 100),
    ],
)
def test_inspect_shows_like_layers_once(llama, name, arguments, columns):
    result = run("inspect", llama, *arguments, COLUMNS=str(columns))
    assert result.exit_code == 0
    assert max(map(len, normal(result.stdout).splitlines())) <= columns
    check_screen(name, result)


def test_very_many_lines_take_no_time(llama):
    start = time.process_time()
    result = run("inspect", llama, "--chunks", "--all")
    assert len(result.stdout.splitlines()) > 18_624
    assert "[126252:128256, 0:4096]" in result.stdout
    assert time.process_time() - start < 10
    every = run("inspect", llama, "--all")
    assert "layers" in every.stdout


def test_inspect_shows_values(ckpt):
    check_screen("inspect-values", run("inspect", ckpt))


@pytest.mark.parametrize("columns", [60, 80])
def test_names_are_the_last_to_be_cut(tmp_path, columns):
    model = {f"layers.{n}.attention.weight": torch.ones(64, 48) for n in range(2)}
    note = "a text of sixty characters, which is more than a line holds."
    shardplan.save({"model": model, "optimizer_note": note, "step": 7}, tmp_path / "runs0")
    result = run("inspect", tmp_path / "runs0", COLUMNS=str(columns))
    assert f"{tmp_path / 'runs0'}\n" in result.stdout  # a path stays in one piece
    assert re.search(r"^optimizer_note +'a text .*(…|')$", result.stdout, re.MULTILINE)
    check_screen(f"inspect-long-value-{columns}", result)


def test_no_color_means_no_escape_codes_at_all(ckpt):
    assert "\x1b[1m" in run("inspect", ckpt, FORCE_COLOR="1", NO_COLOR="").stdout
    assert "\x1b" not in run("inspect", ckpt, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_plan_reports_the_cost(llama):
    placed = "*.o_proj.*=dp:shard0,tp:shard1"
    check_screen("plan", run("plan", llama, "--mesh", "dp=96,tp=2", "-p", placed))


def test_plan_states_the_default(llama):
    result = run("plan", llama, "--mesh", "dp=12")
    assert "* (default)" in result.stdout
    assert "dp:Shard(0)" in result.stdout


def test_verify_exits_with_0_if_all_is_sound(ckpt):
    result = run("verify", ckpt, COLUMNS="")
    assert result.exit_code == 0
    check_screen("verify", result)


def test_verify_exits_with_1_and_lists_all_damage(damaged):
    result = run("verify", damaged, COLUMNS="")
    assert result.exit_code == 1
    check_screen("verify-damaged", result)


def test_diff_exits_with_1_and_lists_what_differs(runs):
    result = run("diff", runs / "step-100", runs / "step-200", "--locate")
    assert result.exit_code == 1
    check_screen("diff", result)


def test_diff_exits_with_0_if_nothing_differs(ckpt):
    result = run("diff", ckpt, ckpt)
    assert (result.exit_code, result.stderr) == (0, "")
    check_screen("diff-equal", result)


def test_prune_can_only_say_what_would_go(runs):
    result = run("prune", runs, "--keep-last", "2", "--dry-run")
    assert result.exit_code == 0
    check_screen("prune-dry-run", result)
    assert sorted(p.name for p in runs.iterdir()) == ["step-100", "step-200", "step-300"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("cat-slice", "model.embed.weight[0:2, :5]"),
        ("cat-corners", "model.embed.weight"),
        ("cat-backwards", "model.embed.weight[::-100, 3]"),
        ("cat-bfloat16", "model.norm[:4]"),
        ("cat-value", "betas"),
    ],
)
def test_cat_prints_as_numpy_does(ckpt, name, key):
    check_screen(name, run("cat", ckpt, key))


@pytest.mark.parametrize(
    "command", ["inspect", "plan", "verify", "diff", "cat", "convert", "prune", "demo"]
)
def test_help_has_an_example_and_the_exit_codes(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    about = re.split(r"\n\w+:\n", result.stdout)[0]
    assert not re.search(r"\S {2}|^ {3}", about, re.MULTILINE)  # a docstring's margin is not shown
    text = " ".join(result.stdout.split())
    assert f"Example: shardplan {command} " in text
    assert "Exit codes: 0 fine; 1 diff found differences, or verify damage; 2 wrong" in text
    assert "JSON keys: " in text


def test_without_a_command_there_is_help():
    result = run()
    assert result.exit_code == 2
    assert "inspect" in result.stdout
    check_screen("help", run("--help"))


# JSON


def test_inspect_answers_in_json(ckpt):
    answered = answer("inspect", ckpt)
    assert set(answered) == {
        "path", "format", "save_id", "created", "bytes", "chunks", "files", "tensors", "values",
        "by_dtype",
    }  # fmt: skip
    by_name = {tensor["name"]: tensor for tensor in answered["tensors"]}
    assert by_name["model.embed.weight"] == {
        "name": "model.embed.weight",
        "shape": [1000, 64],
        "dtype": "float32",
        "bytes": 256_000,
        "chunks": 8,
        "grid": [8, 1],
        "files": 8,
    }
    assert answered["values"] == [
        {"name": "betas", "value": [0.9, 0.95]},
        {"name": "lr", "value": 3e-4},
        {"name": "step", "value": 7},
    ]
    assert answered["by_dtype"]["bfloat16"] == {"tensors": 1, "bytes": 128}
    assert sum(tensor["bytes"] for tensor in answered["tensors"]) == answered["bytes"]


def test_inspect_lists_chunks_in_json(ckpt):
    (tensor,) = answer("inspect", ckpt, "model.embed.weight", "--chunks")["tensors"]
    assert len(tensor["chunk_list"]) == 8
    last = tensor["chunk_list"][-1]
    assert (last["offsets"], last["sizes"], last["bytes"]) == ([896, 0], [104, 64], 26_624)
    assert last["file"] in os.listdir(ckpt)


PLANNERS = """
from shardplan.planning import cast, concat, drop, split, world_pass

def fuse():
    return [concat(["*.wq", "*.wo"], into="*.wqo", axis=0)]

def halves(plans):  # a pass
    return cast("float16")(plans)

@world_pass
def all_at_once(plans):
    return plans

def broken():
    raise RuntimeError("no luck today")

PARTS = split("*.wq", into=["*.wq.a", "*.wq.b"], axis=0)
SEVERAL = [PARTS, drop("step")]
NUMBER = 3

class Kit:
    planner = drop("step")
"""


@pytest.fixture
def planners(tmp_path, monkeypatch):
    """A working directory with a module of planners."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "my_planners.py").write_text(PLANNERS)
    (folder / "unlucky.py").write_text("import not_there_at_all")
    (folder / "wrong.py").write_text("def f(:\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in ("my_planners", "unlucky", "wrong"):
        sys.modules.pop(name, None)


def test_plan_shows_what_passes_do(llama, planners):
    text = PLANNERS.replace(
        '["*.wq", "*.wo"], into="*.wqo"',
        '["*.gate_proj.weight", "*.up_proj.weight"], into="*.gate_up_proj.weight"',
    )
    (planners / "my_planners.py").write_text(text)
    passes = ["--drop", "lm_head.*", "--rename", "*.q_proj.weight=*.wq", "--cast", "float16"]
    planner = ["--planner", "my_planners:fuse"]
    check_screen("plan-passes", run("plan", llama, "--mesh", "dp=96,tp=2", *passes, *planner))


def test_plan_counts_what_passes_leave(ckpt):
    mesh = ["--mesh", "dp=3"]
    whole, layers = (answer("plan", ckpt, *mesh, *o) for o in ([], ["--select", "*layers*"]))
    assert layers["totals"]["bytes"] == whole["totals"]["bytes"] - 1000 * 64 * 4 - 64 * 2
    renamed = answer("plan", ckpt, *mesh, "--rename", "*.wq=*.query", "--cast", "bfloat16")
    assert renamed["totals"]["bytes"] == whole["totals"]["bytes"]  # they are read as they lie
    by_rank = [[cost["bytes"] for cost in each["ranks"]] for each in (whole, renamed)]
    assert by_rank[0] == by_rank[1]


def test_plan_answers_what_passes_do_in_json(ckpt):
    passes = ["--select", "model.*", "--cast", "bfloat16", "--planner"]
    planner = "shardplan.planning:dedup_replicas"
    first, second, third = answer("plan", ckpt, "--mesh", "dp=2", *passes, planner)["passes"]
    assert (first["pass"], first["scope"], first["ranks"]) == ("select('model.*')", "rank", [0, 1])
    assert [change["kind"] for change in first["changes"]] == ["dropped", "left alone"]
    assert first["changes"][0]["names"] == ["betas", "lr", "step"]
    assert first["after"] == second["before"]
    assert second["changes"][0]["before"] == {"items": 26, "tensors": 13, "bytes": 388_096}
    assert second["changes"][0]["after"]["bytes"] == 388_096 // 2
    assert third["scope"] == "world"
    assert answer("plan", ckpt, "--mesh", "dp=2")["passes"] == []


def test_plan_puts_what_passes_do_into_the_page(ckpt, tmp_path):
    html = tmp_path / "a.html"
    result = run("plan", ckpt, "--mesh", "dp=2", "--drop", "step", "--html", html)
    assert result.exit_code == 0, result.stderr
    assert "1. drop(&#x27;step&#x27;): each plan, ranks 0, 1" in html.read_text()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_names_of_passes_are_wrapped_in_their_column(llama, columns):
    passes = ["--select", "*.layers.*", "--cast", "float16"]
    wide, narrow = (
        run("plan", llama, "--mesh", "dp=2", *passes, COLUMNS=str(number)).stdout
        for number in (100_000, columns)
    )
    tables = [text.partition("2 passes")[2].partition("Load:")[0] for text in (wide, narrow)]
    assert max(map(len, tables[1].splitlines())) <= columns
    assert "".join(tables[0].split()) == "".join(tables[1].split())  # nothing is lost


def test_passes_that_lose_elements_are_refused(ckpt, planners):
    (planners / "lossy.py").write_text(
        "import attrs\ndef lose(plans):\n"
        "    return tuple(attrs.evolve(p, items=p.items[p.rank == 0 :]) for p in plans)\n"
    )
    arguments = ["--select", "*.wq", "--planner", "lossy:lose"]
    assert "would not be saved" in refusal(
        "plan", ckpt, "--mesh", "dp=2,tp=1", "-p", "*.wq=dp:shard0", *arguments
    )


def test_too_many_plans_to_run_passes_over_are_refused(llama):
    says = refusal("plan", llama, "--mesh", "dp=200000", "--drop", "lm_head.*")
    assert "200,000 ranks × 291 names are too many to run passes over" in says


def test_plan_answers_in_json(ckpt):
    answered = answer("plan", ckpt, "--mesh", "dp=3,tp=2", "-p", "*.wo=tp:shard1,dp:shard0")
    assert answered["mesh"] == {"dp": 3, "tp": 2}
    assert answered["placements"] == [
        {
            "pattern": "*.wo",
            "placed": {"dp": "Shard(0)", "tp": "Shard(1)"},
            "tensors": 4,
            "bytes": 65_536,
        },
        {
            "pattern": "*",
            "placed": {"dp": "Shard(0)", "tp": "Replicate()"},
            "tensors": 10,
            "bytes": 322_688,
        },
    ]
    assert answered["totals"]["bytes"] == 65_536 + 2 * 322_688
    assert [cost["rank"] for cost in answered["ranks"]] == list(range(6))
    assert sum(cost["bytes"] for cost in answered["ranks"]) == answered["totals"]["bytes"]
    assert sum(cost["bytes"] for cost in answered["files"]) == answered["totals"]["bytes"]


def test_verify_answers_in_json(ckpt, damaged):
    assert answer("verify", ckpt)["ok"] is True
    answered = answer("verify", damaged, code=1)
    assert answered["ok"] is False
    assert sorted(fault["kind"] for fault in answered["faults"]) == ["checksum", "missing"]
    assert "model.embed.weight" in answered["keys"]


def test_in_a_pipe_verify_reports_a_fault_in_one_line(damaged):
    result = run("verify", damaged, COLUMNS="")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("checksum"))
    assert re.search(r"do not fit their checksum +shard-\S+\.safetensors +[\d,]+ to ", line)
    assert "\\n" not in result.stdout


def test_diff_answers_in_json(runs):
    answered = answer("diff", runs / "step-100", runs / "step-200", "--locate", code=1)
    assert answered["equal"] is False
    assert answered["changes"][0] == {
        "key": "model.layers.0.norm",
        "what": "values",
        "before": 1.0,
        "after": 101.0,
        "elements": 64,
        "first": [0],
        "chunks": 1,
    }
    assert answer("diff", runs / "step-100", runs / "step-100")["changes"] == []


def test_cat_answers_in_json(tmp_path):
    values = {"x": torch.tensor([1.0, float("nan"), -float("inf")]), "z": torch.tensor([1 + 2j])}
    shardplan.save(values | {"flags": torch.tensor([True, False])}, tmp_path / "a")
    answered = answer("cat", tmp_path / "a", "x[0:]")
    assert answered == {
        "key": "x", "index": "[0:]", "type": "tensor", "dtype": "float32", "shape": [3],
        "values": [1.0, "nan", "-inf"],
    }  # fmt: skip
    assert answer("cat", tmp_path / "a", "z")["values"] == [[1.0, 2.0]]
    assert answer("cat", tmp_path / "a", "flags")["values"] == [True, False]


def test_cat_of_a_value_answers_in_json(ckpt):
    assert answer("cat", ckpt, "betas") == {"key": "betas", "type": "value", "value": [0.9, 0.95]}


def test_prune_removes_and_answers_in_json(runs, tmp_path):
    copy = shutil.copytree(runs, tmp_path / "copy")
    would = answer("prune", copy, "--keep-last", "1", "--dry-run")
    did = answer("prune", copy, "--keep-last", "1")
    assert would["removed"] == did["removed"] == ["step-100", "step-200"]
    assert (would["files"], would["bytes"]) == (did["files"], did["bytes"])
    assert (would["dry_run"], did["dry_run"]) == (True, False)
    assert [p.name for p in copy.iterdir()] == ["step-300"]


# Pictures


def test_plan_writes_pictures(ckpt, tmp_path):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    result = run("plan", ckpt, "--mesh", "dp=3", "--svg", svg, "--html", html)
    assert result.exit_code == 0
    assert svg.read_text().startswith("<svg")
    assert html.read_text().count("<svg") == 2
    assert "model.embed.weight" in svg.read_text()  # the largest
    run("plan", ckpt, "--mesh", "dp=3", "--svg", svg, "--tensor", "model.layers.0.attn.wq")
    assert "model.layers.0.attn.wq" in svg.read_text()


# What is wrong is said in one line


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    for arguments in (["inspect"], ["verify"], ["cat", "k"], ["plan", "--mesh", "dp=2"]):
        command, *rest = arguments
        assert "no checkpoint" in refusal(command, tmp_path, *rest)
    assert "no checkpoint" in refusal("diff", tmp_path, tmp_path)
    assert "no checkpoint" in refusal("prune", tmp_path, "--keep-last", "1")


def test_all_commands_say_alike_that_nothing_is_there(ckpt, tmp_path):
    nope = tmp_path / "nope"
    for arguments in (
        ["inspect", nope],
        ["verify", nope],
        ["cat", nope, "k"],
        ["plan", nope, "--mesh", "dp=2"],
        ["diff", nope, ckpt],
        ["diff", ckpt, nope],
        ["convert", nope, tmp_path / "b", "--format", "hf"],
    ):
        assert refusal(*arguments).startswith(f"{nope} does not exist")
    close = str(ckpt)[:-1]
    near = f"{close} does not exist; nearest: {ckpt.name}"
    assert refusal("inspect", close).startswith(near)


def test_a_folder_of_checkpoints_names_them(runs):
    text = refusal("inspect", runs)
    assert text.endswith(f"give one: {runs}/step-100, {runs}/step-200, {runs}/step-300")


def test_a_file_of_a_checkpoint_names_its_folder(ckpt):
    file = next(ckpt.glob("shard-*"))
    assert refusal("inspect", file).endswith(f"give the folder: {ckpt}")


def test_a_name_that_looks_like_a_pattern_is_a_name(tmp_path):
    saved = {"w": torch.ones(4), "w[0]": torch.ones(4, 4), "wx": torch.ones(4)}
    shardplan.save(saved, tmp_path / "a")
    names = [tensor["name"] for tensor in answer("inspect", tmp_path / "a", "w[0]")["tensors"]]
    assert names == ["w[0]"]
    assert len(answer("inspect", tmp_path / "a", "w[xyz]", code=0)["tensors"]) == 1
    placed = answer("plan", tmp_path / "a", "--mesh", "dp=2", "-p", "w[0]=dp:shard1")["placements"]
    assert [group["tensors"] for group in placed] == [1, 2]


def test_an_index_is_shown_with_the_name(ckpt):
    assert run("cat", ckpt, "model.norm[1]").stdout.startswith("model.norm[1]: scalar bfloat16")


def test_bytes_in_json_are_not_text(tmp_path):
    shardplan.save({"rng": b"\0\1"}, tmp_path / "a")
    assert answer("cat", tmp_path / "a", "rng")["value"] == {"base64": "AAE="}
    assert answer("inspect", tmp_path / "a")["values"][0]["value"] == {"base64": "AAE="}


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "CKPT", "OUT", "--format", "hf"],
        ["demo", "OUT"],
    ],
)
def test_what_needs_torch_says_how_to_get_it(ckpt, tmp_path, arguments):
    places = {"CKPT": ckpt, "OUT": tmp_path / "out"}
    done = run_without_torch(*(places.get(a, a) for a in arguments))
    answered = "shardplan: error: this needs torch: pip install 'shardplan[torch]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", answered)


def test_elements_are_shown_without_torch_if_numpy_has_their_dtype(tmp_path):
    shardplan.save({"w": torch.arange(3.0), "b": torch.ones(2).bfloat16()}, tmp_path)
    assert run_without_torch("cat", tmp_path, "w[1:]").stdout == "w[1:]: 2 float32\n[1., 2.]\n"
    done = run_without_torch("cat", tmp_path, "b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: `b` cannot be read here: numpy has no dtype bfloat16; pip install" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "CKPT", "model.embd"], "nearest: model.embed"),
        (["cat", "CKPT", "model.nrm"], "nearest: model.norm"),
        (["cat", "CKPT", "model.norm[a]"], "'a' is not an index"),
        (["cat", "CKPT", "model.norm[99]"], "out of range"),
        (["cat", "CKPT", "model.norm[0, 0]"], "too many parts"),
        (["cat", "CKPT", "step[0]"], "`step` is not a tensor"),
        (["plan", "CKPT", "--mesh", "dp"], "'dp' is not an axis; write dp=96,tp=2"),
        (["plan", "CKPT", "--mesh", "dp = 0"], "dp needs at least 1 rank"),
        (["plan", "CKPT", "--mesh", "dp=99999999999"], "99,999,999,999 ranks; at most 1,048,576"),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "*=shard"], "'shard' needs an axis number"),
        (["plan", "CKPT", "--mesh", "dp=2,tp=2", "-p", "*=shard0"], "1 placement given"),
        (["plan", "CKPT", "--mesh", "dp=2", "--tensor", "model.norm"], "needs --svg or --html"),
        (["inspect", "CKPT", "model.layerz"], "nearest: model.layers, "),
        (["cat", "CKPT", "model.layers"], "`model.layers` is the start of 12 names"),
        (["convert", "CKPT", "x", "--format", "hf", "--mesh", "dp=2"], "leave out --mesh"),
        (
            ["convert", "CKPT", "x", "--format", "torch", "--max-shard-size", "5GB"],
            "--max-shard-size is for several files",
        ),
        (["demo", "CKPT"], "other files than a demo"),
        (["plan", "CKPT", "--mesh", "dp=2,dp=2"], "two axes named dp"),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "x"], "write PATTERN=PLACED"),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "nope*=dp:shard0"], "matches no tensor"),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "*=dp:slice0"], "'slice0' is not a placement"),
        (
            ["plan", "CKPT", "--mesh", "dp=2", "-p", "*=ep:shard0"],
            "ep is not an axis of Mesh(dp=2)",
        ),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "*=Shard(0),Replicate()"], "2 placements"),
        (["plan", "CKPT", "--mesh", "dp=2", "-p", "*=dp:shard1"], "5 reasons: "),
        (["plan", "CKPT", "--mesh", "dp=2", "--svg", "x.svg", "--tensor", "w"], "`w` is not in"),
        (
            ["plan", "CKPT", "--mesh", "dp=2", "--svg", "x.svg", "--tensor", "lr"],
            "non-tensor value",
        ),
        (["plan", "CKPT"], "Missing option '--mesh'; see shardplan plan --help"),
        (["inspect"], "Missing argument 'CKPT'"),
        (["inspect", "CKPT", "--nope"], "No such option: --nope"),
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option: --nope"),
        (["inspect", "ftp://x"], "the scheme must be one of"),
        (["convert", "CKPT", "x", "--format", "zip"], "'zip' is not one of"),
        (["convert", "CKPT", "x", "--format", "hf", "--max-memory", "1 cup"], "write 1GiB"),
        (["convert", "CKPT", "x", "--format", "hf", "-p", "*=dp:shard0"], "needs --mesh"),
        (["prune", "CKPT", "--keep-last", "0"], "x>=1"),
        (["plan", "CKPT", "--mesh", "dp=2", "--drop", "nope*"], "'nope*' matches nothing"),
        (
            ["plan", "CKPT", "--mesh", "dp=2", "--drop", "stp"],
            "nearest: step; leave the option out",
        ),
        (["plan", "CKPT", "--mesh", "dp=2", "--rename", "step"], "write OLD=NEW"),
        (["plan", "CKPT", "--mesh", "dp=2", "--rename", "step="], "write OLD=NEW"),
        (["plan", "CKPT", "--mesh", "dp=2", "--rename", "*.wq=q"], "write as many"),
        (["plan", "CKPT", "--mesh", "dp=2", "--rename", "lr=step"], "`lr`, `step` one name"),
        (["convert", "CKPT", "x", "--format", "hf", "--cast", "bf16"], "nearest: bfloat16"),
        (["convert", "CKPT", "x", "--format", "hf", "--planner", "x"], "write MODULE:NAME"),
    ],
)
def test_bad_input_is_explained_in_one_line(ckpt, arguments, says):
    assert says in refusal(*(ckpt if a == "CKPT" else a for a in arguments))


def test_debug_adds_the_traceback(tmp_path):
    result = run("inspect", tmp_path, "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("shardplan: error: ")


def test_a_name_cannot_write_to_the_terminal(tmp_path):
    shardplan.save({"\x1b[31mred[bold]": torch.ones(2)}, tmp_path / "a")
    result = run("inspect", tmp_path / "a")
    assert result.exit_code == 0
    assert "\\x1b[31mred[bold]" in result.stdout


def test_verbose_logs_to_stderr_only(ckpt):
    try:
        result = run("inspect", ckpt, "--verbose", "--json")
    finally:
        logging.getLogger("shardplan").handlers.clear()
    assert "shardplan.cli INFO opened" in result.stderr
    json.loads(result.stdout)


# Placements as text


@pytest.mark.parametrize(
    ("text", "placements"),
    [
        ("Shard(0),Replicate()", (Shard(0), Replicate())),
        ("shard1, r", (Shard(1), Replicate())),
        ("dp:S(-1)", (Shard(-1), Replicate())),
        ("tp:shard1", (Replicate(), Shard(1))),
        ("tp:shard0,dp:StridedShard(0,2)", (StridedShard(0, split_factor=2), Shard(0))),
        ("StridedShard(0, split_factor=2),shard0", (StridedShard(0, split_factor=2), Shard(0))),
        ("dp:Only(0,3)", (Only([0, 3]), Replicate())),
    ],
)
def test_placements_are_read(text, placements):
    mesh = parse_mesh("dp=4,tp=2")
    assert parse_placements([f"*.w={text}"], mesh)[0].placements == placements


# The tree


def test_every_name_is_in_the_tree_once():
    names = ["a", "a.b", "l.0.w", "l.1.w", "l.2.b", "l.10.w", "l.10.x", "07.q", "7.q"]
    kinds = dict(enumerate("xxyyyyyxx"))
    for collapse in (True, False):
        drawn = list(branches(dict(enumerate(names)), kinds, collapse=collapse))
        assert sorted(row for branch in drawn for row in branch.rows) == list(range(len(names)))
        tops = [branch for branch in drawn if branch.depth == 0]
        assert sum(len(branch.below) for branch in tops) == len(names)


def test_only_like_layers_are_drawn_together():
    names = [f"layers.{i}.{leaf}" for i in range(6) for leaf in ("w", "b")]
    kinds = {row: "other" if name == "layers.3.w" else "w" for row, name in enumerate(names)}
    drawn = branches(dict(enumerate(names)), kinds)
    labels = [branch.label for branch in drawn if branch.depth == 1]
    assert labels == ["├ 0–2,4–5", "└ 3"]


def test_many_runs_of_numbers_are_cut_short():
    assert runs_text([0, 2, 3, 7, 11, 12, 20], ",") == "0,2–3,7,…,20"


# Formats and stores


def test_inspect_reads_an_object_store(s3, ckpt, monkeypatch):
    for file in ckpt.iterdir():
        s3.client.upload_file(str(file), s3.bucket, f"cli/{file.name}")
    s3.requests.clear()
    for name, value in {
        "AWS_ENDPOINT": s3.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    here, there = answer("inspect", ckpt), answer("inspect", f"s3://{s3.bucket}/cli")
    assert there["tensors"] == here["tensors"]
    assert not any("shard-" in path for _, path, *_ in s3.requests)


def test_inspect_reads_safetensors_of_others(tmp_path):
    pytest.importorskip("safetensors.torch").save_file(
        {"w": torch.ones(4, 2), "b": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    answered = answer("inspect", tmp_path / "model.safetensors")
    assert answered["format"] == "hf"
    assert {t["name"]: t["shape"] for t in answered["tensors"]} == {"w": [4, 2], "b": [2]}
    assert answer("verify", tmp_path)["ok"] is True


def test_inspect_shows_as_much_of_dcp(ckpt, tmp_path):
    arguments = ["--format", "dcp", "--mesh", "dp=2,tp=2", "-p", "*.wq=dp:shard0,tp:shard1"]
    assert run("convert", ckpt, tmp_path / "b", *arguments).exit_code == 0
    here, there = answer("inspect", ckpt), answer("inspect", tmp_path / "b")
    names = [[tensor["name"] for tensor in answered["tensors"]] for answered in (here, there)]
    assert names[0] == names[1]
    assert here["values"] == there["values"]
    by_name = {tensor["name"]: tensor for tensor in there["tensors"]}
    assert by_name["model.layers.0.attn.wq"]["files"] == 4
    sizes = {file["name"]: file["bytes"] for file in there["files"]}
    assert sizes == {p.name: p.stat().st_size for p in (tmp_path / "b").glob("*.distcp")}
    screen = run("inspect", tmp_path / "b").stdout
    assert re.search(r"wq +4 +64×64 +f32 .* 2×2$", screen, re.MULTILINE)
    assert re.search(r"^step +7$", screen, re.MULTILINE)
    (tensor,) = answer("inspect", tmp_path / "b", "model.layers.0.attn.wq", "--chunks")["tensors"]
    assert {chunk["file"] for chunk in tensor["chunk_list"]} <= set(sizes)


def test_convert_reshards(ckpt, tmp_path):
    arguments = ["--format", "safetensors", "--mesh", "dp=2", "--max-memory", "256MiB"]
    placed = ["-p", "*.wq=dp:shard1"]
    answered = answer("convert", ckpt, tmp_path / "b", *arguments, *placed)
    assert answered["format"] == "safetensors"
    by_name = {t["name"]: t for t in answer("inspect", tmp_path / "b")["tensors"]}
    assert by_name["model.layers.0.attn.wq"]["grid"] == [1, 2]
    assert by_name["model.layers.0.attn.wo"]["grid"] == [2, 1]
    assert answer("diff", ckpt, tmp_path / "b")["equal"] is True
    assert "pass --overwrite" in refusal("convert", ckpt, tmp_path / "b", *arguments)
    assert run("convert", ckpt, tmp_path / "b", *arguments, "--overwrite").exit_code == 0


def test_convert_runs_passes_in_their_order(ckpt, tmp_path, planners):
    passes = ["--cast", "bfloat16", "--planner", "my_planners:fuse", "--drop", "*.0.*"]
    passes += ["--rename", "model.*=m.*", "--select", "model.layers.*", "--rename", "m.*=n.*"]
    passes += ["--drop", "*.norm"]
    answered = answer("convert", ckpt, tmp_path / "b", "--format", "safetensors", *passes)
    assert answered["dropped"] == [
        "betas", "lr", "model.embed.weight",
        *(f"model.layers.0.{name}" for name in ("attn.wo", "attn.wq", "norm")),
        *(f"model.layers.{n}.norm" for n in (1, 2, 3)),
        "model.norm", "step",
    ]  # fmt: skip
    assert "trace" not in answered
    wide = shardplan.restore(tmp_path / "b")
    assert sorted(wide) == [f"n.layers.{layer}.attn.wqo" for layer in (1, 2, 3)]
    attention = state()["model"]["layers.1"]["attn"]
    fused = torch.cat([attention["wq"], attention["wo"]]).bfloat16()
    assert torch.equal(wide["n.layers.1.attn.wqo"], fused)


@pytest.mark.parametrize(
    ("planner", "does"),
    [
        ("my_planners:fuse", ["concat(['*.wq', '*.wo'], '*.wqo')"]),
        ("my_planners:halves", ["halves"]),
        ("my_planners:all_at_once", ["all_at_once"]),
        ("my_planners:PARTS", ["split('*.wq', ['*.wq.a', '*.wq.b'])"]),
        ("my_planners:SEVERAL", ["split('*.wq', ['*.wq.a', '*.wq.b'])", "drop('step')"]),
        ("my_planners:Kit.planner", ["drop('step')"]),
        ("shardplan.planning:split_replicas", ["split_replicas()"]),
    ],
)
def test_a_planner_is_a_pass_a_list_or_a_function_that_returns_one(ckpt, planners, planner, does):
    answered = answer("plan", ckpt, "--mesh", "dp=2", "--planner", planner)
    assert [step["pass"] for step in answered["passes"]] == does


@pytest.mark.parametrize(
    ("planner", "says"),
    [
        ("nowhere:planner", "No module named 'nowhere' (looked in "),
        ("my_planners.deep:planner", "No module named 'my_planners.deep'"),
        ("unlucky:planner", "No module named 'not_there_at_all'"),
        ("wrong:planner", "importing wrong failed: SyntaxError: "),
        ("my_planners:fuze", "module 'my_planners' has no attribute 'fuze'"),
        ("my_planners:Kit.plan", "type object 'Kit' has no attribute 'plan'"),
        ("my_planners:NUMBER", "names no planner: a pass is a function from plans to plans"),
        ("my_planners:Kit", "names no planner: a pass is a function from plans to plans"),
        ("my_planners:broken", "raised by my_planners:broken, as --planner called it"),
        ("my_planners:", "write MODULE:NAME"),
    ],
)
def test_what_names_no_planner_is_explained_in_one_line(ckpt, planners, planner, says):
    assert says in refusal("plan", ckpt, "--mesh", "dp=2", "--planner", planner)


def test_the_program_finds_planners_as_python_m_does(ckpt, planners, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(planners / "my_planners.py", other / "path_planners.py")
    for module in ("my_planners", "path_planners"):
        done = run_program(
            "plan", ckpt, "--mesh", "dp=2", "--planner", f"{module}:fuse",
            cwd=planners, environment={"PYTHONPATH": str(other)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "concat(['*.wq', '*.wo'], '*.wqo'): all plans at once" in done.stdout


@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_convert_writes_other_formats_that_inspect_reads(ckpt, tmp_path, format):
    result = run("convert", ckpt, tmp_path / "b", "--format", format)
    assert result.exit_code == 0, result.stderr
    answered = answer("inspect", tmp_path / "b")
    assert answer("diff", ckpt, tmp_path / "b", code=int(format == "hf"))["b"] == str(
        tmp_path / "b"
    )
    assert answered["format"] == format
    assert len(answered["tensors"]) == 14


@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_looking_at_other_formats_does_not_import_torch(ckpt, tmp_path, format):
    assert run("convert", ckpt, tmp_path / "b", "--format", format).exit_code == 0
    for arguments in (["inspect"], ["verify"], ["plan", "--mesh", "dp=3"]):
        done = run_without_torch(arguments[0], tmp_path / "b", *arguments[1:])
        assert (done.returncode, done.stderr) == (0, "")


def test_inspect_shows_the_plain_values_of_a_torch_file_without_torch(tmp_path):
    plain = {"step": 7, "betas": (0.9, 0.95)}
    other = {"size": torch.Size([1, 2]), "long": list(range(5000))}
    torch.save({"w": torch.ones(4, 3), **plain, **other}, tmp_path / "a.pt")
    done = run_without_torch("inspect", tmp_path / "a.pt", "--json")
    assert json.loads(done.stdout)["values"] == [
        {"name": "betas", "value": [0.9, 0.95]},
        {"name": "long"},
        {"name": "size"},
        {"name": "step", "value": 7},
    ]
    assert "(0.9, 0.95)" in run("inspect", tmp_path / "a.pt").stdout


# The installed program


def test_the_program_and_the_module_are_one(ckpt):
    here = run("inspect", ckpt).stdout
    assert run_program("inspect", ckpt).stdout == here
    command = [sys.executable, "-P", "-m", "shardplan", "inspect", str(ckpt)]
    there = subprocess.run(command, env=os.environ | WIDE, capture_output=True, text=True)
    assert there.stdout == here


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "CKPT"],
        ["inspect", "CKPT", "--chunks", "--json"],
        ["plan", "CKPT", "--mesh", "dp=3", "--svg", "OUT"],
        ["verify", "CKPT"],
        ["cat", "CKPT", "betas"],
        ["prune", "RUNS", "--keep-last", "3", "--dry-run"],
        ["--help"],
    ],
)
def test_looking_does_not_import_torch(runs, tmp_path, arguments):
    places = {"CKPT": runs / "step-100", "RUNS": runs, "OUT": tmp_path / "a.svg"}
    done = run_without_torch(*(places.get(a, a) for a in arguments))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_program_starts_no_threads_for_linear_algebra():
    code = (
        "import os, sys; os.environ.pop('OPENBLAS_NUM_THREADS', None)\n"
        "import shardplan.cli; early = 'numpy' in sys.modules\n"
        "sys.argv = ['shardplan', '--version']\n"
        "try: shardplan.cli.main()\n"
        "finally: print(early, os.environ['OPENBLAS_NUM_THREADS'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False 1"


def test_a_reader_that_goes_away_is_not_an_error(llama):
    command = f"{PROGRAM} inspect {llama} --chunks --all | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["141"]


def test_piped_lines_are_as_long_as_they_need_to_be(llama):
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    done = subprocess.run([PROGRAM, "inspect", llama], env=environment, capture_output=True)
    text = done.stdout.decode()
    assert "post_attention_layernorm.weight" in text
    assert "\x1b" not in text
    assert not re.search(r" +$", text, re.MULTILINE)


def test_an_interrupt_exits_with_130_and_no_traceback(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "import shardplan.io.formats.registry as sources\n"
        "def wait(path, **options):\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "sources.open_source = wait\n"
        "sys.argv = ['shardplan', 'inspect', '.']\n"
        "from shardplan.cli import main; main()\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", script], text=True, **pipes) as program:
        try:
            first = program.stdout.readline()
            program.send_signal(signal.SIGINT)
            _, stderr = program.communicate(timeout=30)
        finally:
            program.kill()
    assert (first, program.returncode, stderr) == ("waiting\n", 130, "")


def test_without_typer_the_program_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from shardplan.cli import main; main()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'shardplan[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_runs_the_demo(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr("shardplan.demo.Demo.run", lambda demo: given.append(demo.folder) or True)
    assert (run("demo").exit_code, run("demo", tmp_path).exit_code) == (0, 0)
    assert given == [Path("build/demo").absolute(), tmp_path]


def test_demo_answers_in_json(monkeypatch, tmp_path):
    def run_it(demo):
        demo.say("a step")
        demo.seconds = {"save": 0.1}
        demo.failed.append("a claim")
        return False

    monkeypatch.setattr("shardplan.demo.Demo.run", run_it)
    answered = answer("demo", tmp_path / "out", code=1)
    folder = str(tmp_path / "out")
    assert answered == {
        "folder": folder, "ok": False, "failed": ["a claim"], "seconds": {"save": 0.1},
    }  # fmt: skip


def test_a_command_loads_no_other_command(ckpt):
    code = (
        f"import sys; sys.argv = ['shardplan', 'inspect', {str(ckpt)!r}]\n"
        "from shardplan.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "shardplan.cli.inspect" in loaded
    assert not loaded & {f"shardplan.cli.{name}" for name in ("actions", "plan")}


def test_a_pipe_gets_the_lines_of_a_wide_terminal(ckpt):
    """In a pipe tables are plain text; where COLUMNS is set, rich draws them."""
    for command in (
        ("inspect", ckpt),
        ("inspect", ckpt, "--chunks"),
        ("plan", ckpt, "--mesh", "dp=3"),
    ):
        wide, piped = (run(*command, COLUMNS=columns).stdout for columns in ("100000", ""))
        assert wide == piped != ""


def test_shell_completion_is_offered():
    environment = {"_SHARDPLAN_COMPLETE": "complete_bash", "COMP_WORDS": "shardplan in"}
    done = run_program(environment=environment | {"COMP_CWORD": "1"})
    assert done.stdout.split() == ["inspect"]


def test_completion_is_installed_for_the_shell_that_is_named(tmp_path):
    home = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    done = run_program("--install-completion", "fish", environment=home)
    assert (done.returncode, done.stderr) == (0, "")
    files = [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()]
    assert files == [Path(".config/fish/completions/shardplan.fish")]
    shown = run_program("--show-completion", "fish", environment=home)
    assert shown.stdout == (tmp_path / files[0]).read_text()


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
def test_completion_for_an_unknown_shell_is_refused(tmp_path, option):
    done = run_program(option, "tcsh", environment={"HOME": str(tmp_path)})
    answered = (
        f"{option} takes bash, zsh, fish, powershell or pwsh; without one, it detects your shell"
    )
    assert (done.returncode, done.stderr) == (2, f"shardplan: error: {answered}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "settings", "says"),
    [
        ("az://b/x", {}, "Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME and "),
        ("gs://b/x", {"GOOGLE_SERVICE_ACCOUNT": "/no/file"}, "; set GOOGLE_SERVICE_ACCOUNT"),
    ],
)
def test_missing_settings_of_a_service_are_named(url, settings, says):
    done = run_program("inspect", url, environment=settings)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert done.stderr.startswith(f"shardplan: error: cannot open {url}: ")
    assert says in done.stderr


@pytest.mark.slow
def test_inspect_shows_half_a_million_chunks(tmp_path):
    spec = importlib.util.spec_from_file_location("bench_cli", ROOT / "benchmarks" / "cli.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    manifest, chunks = bench.manifest()
    assert chunks > 500_000
    (tmp_path / MANIFEST).write_bytes(encode_manifest(manifest))
    shown = run_program("inspect", tmp_path).stdout
    assert f"{chunks:,} chunks" in shown
