"""The demo: train on four ranks, save, look at it, load it elsewhere, convert it, damage it.

Run it with ``make demo``, ``shardplan demo`` or ``python -m shardplan.demo [folder]``.
"""

from __future__ import annotations

import json
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
    """The steps of the demo, in order; each prints what it finds.

    Args:
        folder: Where checkpoints and pictures go.
        console: Where text goes.
    """

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.folder = folder.absolute()
        self.console = console or Console(highlight=False)
        self.told: dict[int, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def say(self, title: str, *texts: object) -> None:
        """Print a heading and what belongs under it."""
        self.console.print(f"\n[bold]{title}[/bold]")
        for text in texts:
            self.console.print(str(text), markup=False, soft_wrap=True)

    def type(self, *words: str) -> int:
        """Run a command of the command line, and show what was typed; return its exit code."""
        short = [word.removeprefix(f"{self.folder}/") for word in words]
        self.console.print(f"\n[bold]$ shardplan {shlex.join(short)}[/bold]", highlight=False)
        return int(app(list(words), standalone_mode=False) or 0)

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Do something, and note how long it takes."""
        start = time.perf_counter()
        done = work()
        self.seconds[what] = time.perf_counter() - start
        return done

    def check(self, claim: str, holds: bool) -> str:
        """Note whether a claim holds, and say so."""
        if not holds:
            self.failed.append(claim)
        return f"  {'✓' if holds else '✗'} {claim}"

    def train(self) -> None:
        """Train on four ranks, and save."""
        self.say("1. Train a small transformer on 4 ranks, FSDP2 × TP, and save it")
        self._job()
        told = self.told[4]
        losses = ", ".join(f"{loss:.4f}" for loss in told["before"])
        self.console.print(f"  losses of the first {STEPS} steps: {losses}")
        same = told["losses"] == told["resumed"]
        claim = "4 ranks: loaded again, the next losses are the same to the last bit"
        self.console.print(self.check(claim, same), f"  {_listed(told['resumed'])}", sep="\n")

    def look(self) -> None:
        """Show the plan, as a table and as a picture; plan for ranks that nobody has."""
        step = str(self.folder / "step")
        self.say("2. What was saved, and what loading it on 3 ranks would cost: no data is read")
        self.type("inspect", step, "model")
        reshard = str(self.folder / "reshard.svg")
        self.type("plan", step, "--mesh", "dp=3", "--svg", reshard)
        picture = self.folder / "tiling.svg"
        picture.write_text(str(sp.draw_tiling(shardplan.open_checkpoint(step).metadata, SHOWN)))
        self.console.print(f"wrote {picture}", style="dim", soft_wrap=True)

    def load_elsewhere(self) -> None:
        """Load on two ranks and on one, compare bits, train on."""
        self.say("3. Load it on 2 ranks (FSDP2) and on 1 (no sharding), and train on")
        saved = self.told[4]
        for ranks in (2, 1):
            told = self.told[ranks]
            equal = told["checksums"] == saved["checksums"]
            count = f"{len(told['checksums'])} tensors"
            pairs = zip(told["losses"], saved["losses"], strict=True)
            who = f"{ranks} rank{'s' * (ranks > 1)}"
            near = all(abs(a - b) < 1e-4 * abs(b) for a, b in pairs)
            self.console.print(
                self.check(f"{who}: {count}, model and optimizer, equal in every bit", equal),
                self.check(f"{who}: the next losses are the same", near),
                f"      {_listed(told['losses'])}",
                sep="\n",
            )

    def convert(self) -> None:
        """Make checkpoints of other tools' formats, and have those tools read them."""
        import torch
        from safetensors.torch import load_file

        self.say("4. Convert it: to Hugging Face's format and to a file of torch.save")
        source = shardplan.open_checkpoint(self.folder / "step")
        whole = source[SHOWN].read()
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
        self.console.print(
            self.check("the safetensors library reads the same bits", torch.equal(theirs, whole)),
            self.check("torch.load reads the same bits", torch.equal(nested, whole)),
            sep="\n",
        )

    def damage(self) -> None:
        """Flip one bit of a copy, and see what is said to that."""
        self.say("5. Verify it; then flip one bit of a copy")
        good, bad = self.folder / "step", self.folder / "damaged"
        shutil.copytree(good, bad)
        file = max(bad.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        codes = [self.type("verify", str(path)) for path in (good, bad)]
        self.timed("verify", lambda: shardplan.verify(good))
        self.console.print(
            self.check("the good one is sound", codes[0] == 0),
            self.check("the bad one is found out", codes[1] == 1),
            sep="\n",
        )

    def compare(self) -> None:
        """Show how long it took, beside torch."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp, what = self.folder / "torch", "DCP checkpoint to torch.save"
        for word, work in (("", shardplan.dcp_to_torch_save), (" torch", dcp_to_torch_save)):
            into = self.folder / f"from-dcp{word.strip()}.pt"
            for _ in range(2):  # whatever is done once only is done before it counts
                into.unlink(missing_ok=True)
                self.timed(f"{what}{word}", partial(work, str(dcp), str(into)))
        told = {
            f"{name} on {counted(ranks, 'rank')}{word}": self.told[ranks]["seconds"][name + word]
            for name, ranks in (("save", 4), ("load", 4), ("load", 2), ("load", 1))
            for word in ("", " torch")
        }
        self.seconds = told | self.seconds
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
        """Plan what nobody here owns: 405 billion parameters and their Adam state."""

        def reshard() -> sp.Report:
            saved, wanted = (
                sp.world_plans(sp.adam(sp.fsdp_tp(sp.llama3_405b(), mesh, sp.LLAMA_TP)), mesh)
                for mesh in (sp.Mesh(dp=2048, tp=8), sp.Mesh(dp=1536, tp=8))
            )
            return sp.explain(sp.world_metadata(saved), wanted)

        self.say("6. Planning needs no ranks: 405B with Adam, saved on 16,384, loaded on 12,288")
        report = self.timed("plan 405B, 16,384 to 12,288 ranks", reshard)
        show(str(report))

    def _job(self) -> None:
        """Run the training job, and read what its first rank wrote down."""
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
        for ranks in (RANKS, 2, 1):
            self.told[ranks] = json.loads((self.folder / f"told-{ranks}.json").read_text())

    def run(self) -> bool:
        """Take all steps, and tell whether everything held."""
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
    """Make a folder for the demo's files, or empty the one that an earlier demo made.

    Raises:
        FileExistsError: It holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MADE).exists():
        raise FileExistsError(f"{folder} holds files that no demo made; name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MADE).touch()


def _wait(jobs: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for processes; when one fails, end the others, which would wait for it.

    An interrupt may have come to this process alone: the others must not go on without it.
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
    """Run the demo; its files go to the folder named first, a new one or one of a demo before."""
    return 0 if Demo(Path(arguments[0] if arguments else FILES)).run() else 1
