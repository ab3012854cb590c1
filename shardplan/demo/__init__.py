"""The demo: train on four ranks, save, inspect, load on fewer ranks, convert, damage, verify.

Run it with ``make demo``, ``shardplan demo`` or ``python -m shardplan.demo [folder]``.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import shardplan
from shardplan.planning import counted, human_bytes, human_seconds, named_extras

from .. import planning as sp

with named_extras("the demo"):
    from rich.console import Console

    from shardplan.cli.app import app
    from shardplan.cli.screen import show, table

__all__ = ["main"]

FILES = "build/demo"
MADE = ".made-by-shardplan-demo"
STEPS = 3
RANKS = 4
T = TypeVar("T")
SHOWN = "model.layers.0.up.weight"


class Demo:
    """The steps of the demo, in order; each prints its results.

    ``seconds`` has durations by name (torch's end in " torch"), ``failed`` the checks that failed.
    """

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder = folder.absolute()
        self.console = console or Console(highlight=False)
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def say(self, title: str) -> None:
        """Print a heading."""
        self.console.print(f"\n[bold]{title}[/bold]")

    def type(self, *words: str) -> int:
        """Print a command, run it, and return its exit code."""
        short = [word.removeprefix(f"{self.folder}/") for word in words]
        self.console.print(f"\n[bold]$ shardplan {shlex.join(short)}[/bold]", highlight=False)
        return int(app(list(words), standalone_mode=False) or 0)

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Run a function, and record how long it takes."""
        start = time.perf_counter()
        done = work()
        self.seconds[what] = time.perf_counter() - start
        return done

    def check(self, claim: str, holds: bool) -> None:
        """Print whether a claim holds, and record it if not."""
        if not holds:
            self.failed.append(claim)
        self.console.print(f"  {'✓' if holds else '✗'} {claim}")

    def train(self) -> None:
        """Train on four ranks, and save."""
        self.say("1. Train a small transformer on 4 ranks, FSDP2 × TP, and save it")
        self._run_ranks()
        job = self._results(RANKS)
        self.console.print(f"  losses of the first {STEPS} steps: {_listed(job['before'])}")
        same = job["losses"] == job["resumed"]
        self.check("4 ranks: loaded again, the next losses are the same to the last bit", same)
        self.console.print(f"      {_listed(job['resumed'])}")

    def look(self) -> None:
        """Show what was saved, and plan a load on 3 ranks, as tables and as pictures."""
        step = str(self.folder / "step")
        self.say("2. What was saved, and what loading it on 3 ranks would cost: no data is read")
        self.type("inspect", step, "model")
        reshard = str(self.folder / "reshard.svg")
        self.type("plan", step, "--mesh", "dp=3", "--svg", reshard)
        picture = self.folder / "tiling.svg"
        picture.write_text(str(sp.draw_tiling(shardplan.open_checkpoint(step).metadata, SHOWN)))
        self.console.print(f"wrote {picture}", style="dim", soft_wrap=True)

    def load_elsewhere(self) -> None:
        """Compare what two ranks and one rank loaded, and how they continued training."""
        self.say("3. Load it on 2 ranks (FSDP2) and on 1 (no sharding), and train on")
        saved = self._results(RANKS)
        for ranks in (2, 1):
            job, who = self._results(ranks), counted(ranks, "rank")
            what = f"{len(job['checksums'])} tensors, model and optimizer, equal in every bit"
            self.check(f"{who}: {what}", job["checksums"] == saved["checksums"])
            pairs = zip(job["losses"], saved["losses"], strict=True)
            near = all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs)
            self.check(f"{who}: the next losses are the same", near)
            self.console.print(f"      {_listed(job['losses'])}")

    def convert(self) -> None:
        """Convert to the formats of other tools, and read the results with those tools."""
        import torch
        from safetensors.torch import load_file

        self.say("4. Convert it: to Hugging Face's format and to a file of torch.save")
        source = shardplan.open_checkpoint(self.folder / "step")
        expected = source[SHOWN].read()
        hf, file = self.folder / "hf", self.folder / "step.pt"
        planner = sp.chain(sp.select("model.*"), sp.rename(lambda k: k.removeprefix("model.")))
        step, convert = self.folder / "step", shardplan.convert
        made = {
            "convert to Hugging Face": lambda: convert(step, hf, format="hf", planner=planner),
            "convert to torch.save": lambda: convert(step, file, format="torch"),
        }
        for what, work in made.items():
            report = self.timed(what, work)
            size = f"{human_bytes(report.bytes_written)} in {human_seconds(self.seconds[what])}"
            self.console.print(f"  {what}: {report.tensors} tensors, {size}")
        theirs = load_file(hf / "model.safetensors")[SHOWN.removeprefix("model.")]
        nested = torch.load(file, weights_only=True)["model"][SHOWN.removeprefix("model.")]
        self.check("the safetensors library reads the same bits", torch.equal(theirs, expected))
        self.check("torch.load reads the same bits", torch.equal(nested, expected))

    def damage(self) -> None:
        """Flip one bit of a copy, and verify both."""
        self.say("5. Verify it; then flip one bit of a copy")
        good, bad = self.folder / "step", self.folder / "damaged"
        shutil.copytree(good, bad)
        file = max(bad.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        codes = [self.type("verify", str(path)) for path in (good, bad)]
        self.timed("verify", lambda: shardplan.verify(good))
        self.check("the original is intact", codes[0] == 0)
        self.check("the damage is found", codes[1] == 1)

    def compare(self) -> None:
        """Show the durations next to torch's."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp, what = self.folder / "torch", "DCP checkpoint to torch.save"
        for word, work in (("", shardplan.dcp_to_torch_save), (" torch", dcp_to_torch_save)):
            into = self.folder / f"from-dcp{word.strip()}.pt"
            for _ in range(2):  # the first time warms up
                into.unlink(missing_ok=True)
                self.timed(f"{what}{word}", partial(work, str(dcp), str(into)))
        on_ranks = {
            f"{name} on {counted(ranks, 'rank')}{word}": self._results(ranks)["seconds"][
                name + word
            ]
            for name, ranks in (("save", 4), ("load", 4), ("load", 2), ("load", 1))
            for word in ("", " torch")
        }
        self.seconds = on_ranks | self.seconds
        self.say("7. How long each took, beside torch.distributed.checkpoint")
        head = ("work", "torch", "shardplan", "ratio")
        ours = [name for name in self.seconds if not name.endswith(" torch")]
        show(table(head, map(self._compared, ours), right=head[1:]))

    def _compared(self, what: str) -> tuple[str, str, str, str]:
        mine, theirs = self.seconds[what], self.seconds.get(f"{what} torch")
        if theirs is None:
            return what, "-", human_seconds(mine), ""
        return what, human_seconds(theirs), human_seconds(mine), f"{theirs / mine:.1f} ×"

    def plan_at_scale(self) -> None:
        """Plan a model that does not fit here: 405 billion parameters and their Adam state."""

        def reshard() -> sp.Report:
            saved, wanted = (
                sp.world_plans(sp.adam(sp.fsdp_tp(sp.llama3_405b(), mesh, sp.LLAMA_TP)), mesh)
                for mesh in (sp.Mesh(dp=2048, tp=8), sp.Mesh(dp=1536, tp=8))
            )
            return sp.explain(sp.world_metadata(saved), wanted)

        self.say("6. Planning needs no ranks: 405B with Adam, saved on 16,384, loaded on 12,288")
        report = self.timed("plan 405B, 16,384 to 12,288 ranks", reshard)
        show(str(report))

    def _run_ranks(self) -> None:
        """Run the training job on four local processes."""
        command = [sys.executable, "-P", "-m", "shardplan.demo.training", str(self.folder)]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        logs = [self.folder / f"rank-{rank}.log" for rank in range(RANKS)]
        with self.console.status(f"{RANKS} ranks are at work"), ExitStack() as files:
            jobs = [
                subprocess.Popen(
                    [*command, str(rank), str(STEPS)],
                    env=os.environ | quiet,
                    stdout=subprocess.DEVNULL,
                    stderr=files.enter_context(log.open("wb")),
                )
                for rank, log in enumerate(logs)
            ]
            codes = _wait(jobs)
        for log, code in zip(logs, codes, strict=True):
            if code > 0:
                raise RuntimeError(f"the training job failed:\n{log.read_text()[-4000:]}")

    def _results(self, ranks: int) -> dict[str, Any]:
        """Read the results of the training job on ``ranks`` ranks."""
        results: dict[str, Any] = json.loads((self.folder / f"results-{ranks}.json").read_text())
        return results

    def run(self) -> bool:
        """Run all steps, and return True if all checks passed."""
        _make_room(self.folder)
        start = time.perf_counter()
        for step in (
            self.train,
            self.look,
            self.load_elsewhere,
            self.convert,
            self.damage,
            self.plan_at_scale,
            self.compare,
        ):
            step()
        verdict = f"failed: {', '.join(self.failed)}" if self.failed else "all of it held"
        self.say(f"Done in {time.perf_counter() - start:.0f} s; {verdict}")
        return not self.failed


def _make_room(folder: Path) -> None:
    """Make a folder for the demo's files, or empty the one of an earlier demo."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MADE).exists():
        raise FileExistsError(f"{folder} holds other files than a demo's; name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MADE).touch()


def _wait(jobs: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for processes; if one fails, stop the others, which would wait for it forever.

    An interrupt may reach only this process, so the others are stopped then, too.
    """
    try:
        while all(job.poll() is None or not job.returncode for job in jobs):
            if all(job.returncode == 0 for job in jobs):
                break
            time.sleep(0.1)
    finally:
        for job in jobs:
            job.kill()
    return [job.wait() for job in jobs]


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo in the folder given as first argument: a new one, or an earlier demo's."""
    return 0 if Demo(Path(arguments[0] if arguments else FILES)).run() else 1
