"""The explorer's page in a real browser: every view, on three checkpoints."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app
from shardplan.planning import (
    LLAMA_TP,
    Mesh,
    Replicate,
    Shard,
    TensorSpec,
    adam,
    derive_plans,
    explain,
    fsdp_tp,
    global_plan,
    llama3_405b,
    load_plan,
    split,
    world_plans,
)
from shardplan.planning.columns.runs import flat_runs
from shardplan.planning.reports import explorer_data

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SPECS = {
    "layers.0.w": TensorSpec((24, 16), "float32", [Shard(0), Shard(1)]),
    "layers.1.w": TensorSpec((24, 16), "float32", [Shard(0), Shard(1)]),
    "norm": TensorSpec((16,), "bfloat16", [Replicate(), Replicate()]),
}


def small(passes=(), **mesh):
    plans, saved = global_plan(world_plans(SPECS, Mesh(dp=4, tp=2)))
    return explain(saved, world_plans(SPECS, Mesh(mesh or {"dp": 3, "tp": 2})), writers=plans)


def expand(parts):
    found = []
    for part in parts:
        found += (
            [part[0] + n * part[2] for n in range(part[1])] if isinstance(part, list) else [part]
        )
    return found


@pytest.mark.parametrize(
    "values", [[], [5], [1, 2], [0, 8, 16, 24, 7, 7, 7, 7, 3], [3, 1, 4, 1, 5, 9, 2, 6], [0] * 9]
)
def test_runs_stand_for_the_numbers_they_were_made_of(values):
    import numpy as np

    assert expand(flat_runs(np.array(values, np.int64))) == values


def test_the_data_know_who_holds_what():
    data = explorer_data(small())
    assert sorted(data["names"]) == sorted(SPECS)
    (w,) = (case for case in data["cases"] if case["size"] == [24, 16])
    assert expand(w["holders"]) == [0, 1, 2, 3, 4, 5]
    assert [expand(cuts) for cuts in w["wanted"]["cuts"]] == [[0, 8, 16, 24], [0, 8, 16]]
    assert data["ranks"] == 6


def test_plans_that_a_planner_changed_are_shown_by_their_reads():
    whole = {"qkv": TensorSpec((6, 4), "float32", [Shard(0)])}
    parts = {name: TensorSpec((2, 4), "float32", [Shard(0)]) for name in "qkv"}
    plans, saved = global_plan(world_plans(parts, Mesh(dp=2)))
    held = split("qkv", ("q", "k", "v"))(tuple(world_plans(whole, Mesh(dp=3))))
    loads = [load_plan(saved, plan) for plan in held]
    data = explorer_data(explain(saved, loads, writers=plans))
    assert sorted(data["names"]) == ["k", "q", "v"]
    assert [expand(case["holders"]) for case in data["cases"]]


def test_a_save_is_not_explored():
    plans, saved = global_plan(world_plans(SPECS, Mesh(dp=4, tp=2)))
    with pytest.raises(ValueError, match="explain a load"):
        shardplan.explore(explain(saved, plans))


def test_a_page_of_16_384_ranks_is_small():
    model, many, few = adam(llama3_405b()), Mesh(dp=2048, tp=8), Mesh(dp=1536, tp=8)
    plans, saved = derive_plans(world_plans(fsdp_tp(model, many, LLAMA_TP), many))
    report = explain(saved, world_plans(fsdp_tp(model, few, LLAMA_TP), few), writers=plans)
    assert len(shardplan.explore(report).html) < 1_000_000


def test_nothing_in_names_gets_out_of_the_data():
    name = "</script><b>"
    plans, saved = global_plan([load_ready(name)])
    page = shardplan.explore(explain(saved, [load_plan(saved, load_ready(name))], writers=plans))
    assert name not in page.html


def load_ready(name):
    from shardplan.planning import local_plan

    return local_plan({name: TensorSpec((2,))})


def test_jupyter_shows_the_page_in_a_frame():
    page = shardplan.explore(small())
    assert page._repr_html_().startswith("<iframe srcdoc=")


# In a browser


def browse(path, view, width=1280):
    """Return the page as a browser made it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    command = [
        CHROMIUM,
        *options,
        f"--window-size={width},900",
        "--dump-dom",
        f"{path.as_uri()}#{view}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in done.stdout, done.stderr
    assert "data-error" not in done.stdout
    return done.stdout[: done.stdout.index('<script id="data"')]


in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@in_a_browser
@pytest.mark.slow
def test_every_view_shows_what_the_plans_say(tmp_path):
    shardplan.explore(small(), title="eight to six").save(tmp_path / "page.html")
    page = tmp_path / "page.html"
    assert "busiest rank against the mean" in browse(page, "")
    tensor = browse(page, "view=tensor&tensor=layers.0.w&wanted=2", 400)
    assert "[8:16, 0:8] · 256 B" in tensor
    assert re.findall(r"writers=(\d+)-", tensor) == ["2", "4"]  # rows 6 to 12, and 12 to 18
    saved = browse(page, "view=tensor&tensor=layers.0.w&saved=2")
    assert re.findall(r"rank=(\d+)", saved) == ["0", "2"]
    rank = browse(page, "view=rank&rank=5")
    assert "reads 544 B" in rank
    traffic = browse(page, "view=traffic")
    cells = re.findall(r"writer (\d+) to reader (\d+): ([\d.]+ \w+)<", traffic)
    assert len(cells) == 8 * 6
    assert ("2", "2", "256 B") in cells
    assert ("2", "1", "0 B") in cells


@in_a_browser
@pytest.mark.slow
def test_the_command_writes_a_page_that_names_files_and_bytes(tmp_path):
    state = {"model": {"w": torch.arange(24.0).reshape(6, 4)}, "step": 7}
    shardplan.save(state, tmp_path / "step")
    page = tmp_path / "page.html"
    command = ["explore", str(tmp_path / "step"), "--mesh", "dp=3", "--html", str(page)]
    result = CliRunner().invoke(app, [*command, "--cast", "float16", "--json"])
    assert result.exit_code == 0, result.output
    size = page.stat().st_size
    assert json.loads(result.output) == {"schema": 1, "html": str(page), "bytes": size}
    assert "cast" in browse(page, "view=planner")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    shown = browse(page, "view=tensor&tensor=model.w&wanted=1")
    assert re.search(
        r"shard-00000-model-00001-of-00001-\w+\.safetensors, bytes [\d,]+–[\d,]+", shown
    )


CLICKS = """<script>
document.querySelector("iframe").onload = e => {
  const page = e.target.contentDocument, seen = [];
  const look = () => seen.push(page.querySelector("#main").innerText);
  const click = (selector, kind = "click") => {
    page.querySelector(selector).dispatchEvent(new MouseEvent(kind, { bubbles: true }));
    look();
  };
  for (const view of ["overview", "tensor", "rank", "traffic"]) click(`[data-view=${view}]`);
  page.querySelector("#search").value = "LAYERS.1";
  page.querySelector("#search").dispatchEvent(new Event("input"));
  click("#tree a");
  click(".pair > div:nth-child(2) rect[data-n='3']");
  click("#about td a");
  page.querySelector("rect").dispatchEvent(
    Object.assign(new KeyboardEvent("keydown", { key: "Enter", bubbles: true })));
  look();
  click("[data-view=traffic]");
  click("rect[data-z]");
  document.body.dataset.error = page.body.dataset.error || "";
  document.querySelector("pre").textContent = JSON.stringify(seen);
};
</script>"""


@in_a_browser
@pytest.mark.slow
def test_in_a_frame_every_view_can_be_clicked_through(tmp_path):
    frame = shardplan.explore(small())._repr_html_()
    (tmp_path / "page.html").write_text(f"<pre></pre>{frame}{CLICKS}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    command = [CHROMIUM, *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-error=""' in done.stdout
    (text,) = re.findall("<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    views = json.loads(html.unescape(text))
    beginnings = [view.split("\n")[0].strip() for view in views]
    assert beginnings[:4] == ["What it costs", "layers.0.w", "rank", views[3].split("\n")[0]]
    assert beginnings[4:8] == ["layers.1.w"] * 4
    assert "wanted box 3" in views[5]
    assert "saved box" in views[6]
    assert "saved box 0" in views[7]
    assert "1 × 1" in views[9]
