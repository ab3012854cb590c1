"""The demo: train on four ranks, save, look at it, load it elsewhere, convert it, damage it.

Run it with ``make demo``, ``shardplan demo`` or ``python -m shardplan.demo [folder]``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import shardplan
from shardplan import planning as sp
from shardplan.planning.text import human_bytes

__all__ = ["main"]

FILES = "build/demo"
STEPS = 3
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
            self.console.print(
                text if isinstance(text, Table) else str(text), markup=False, soft_wrap=True
            )

    def check(self, claim: str, holds: bool) -> str:
        """Note whether a claim holds, and say so."""
        if not holds:
            self.failed.append(claim)
        return f"  {'✓' if holds else '✗'} {claim}"

    def train(self) -> None:
        """Train on four ranks, and save."""
        self.say("1. Train a small transformer on 4 ranks, FSDP2 × TP, and save it")
        told = self._job(ranks=4, tensor_parallel=2, steps=STEPS)
        report = shardplan.verify(self.folder / "step")
        losses = ", ".join(f"{loss:.4f}" for loss in told["before"])
        self.console.print(f"  losses of the first {STEPS} steps: {losses}")
        same = told["losses"] == told["resumed"]
        claim = "4 ranks: loaded again, the next losses are the same to the last bit"
        self.console.print(self.check(claim, same), f"  {_listed(told['resumed'])}", sep="\n")
        self.console.print(
            f"  {human_bytes(report.nbytes)} in {report.files} files: model, optimizer, step"
        )

    def look(self) -> None:
        """Show the plan, as a table and as a picture; plan for ranks that nobody has."""
        metadata = shardplan.open_checkpoint(self.folder / "step").metadata
        self.say("2. What was saved: every chunk is known without reading one of them", metadata)
        picture = self.folder / "tiling.svg"
        picture.write_text(str(sp.draw_tiling(metadata, SHOWN)))
        mesh = sp.Mesh(dp=3)
        sizes = {
            name: sp.TensorSpec(entry.size, entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, sp.TensorMetadata)
        }
        wanted = sp.world_plans(sp.fsdp(sizes, mesh), mesh)
        loads = [sp.load_plan(metadata, plan, strict=False) for plan in wanted]
        reshard = self.folder / "reshard.svg"
        reshard.write_text(str(sp.draw_reshard(metadata, wanted, SHOWN)))
        self.say("   What it would cost to load it on 3 ranks", sp.explain(metadata, loads))
        self.say("   Pictures", f"  {picture}", f"  {reshard}")

    def load_elsewhere(self) -> None:
        """Load on two ranks and on one, compare bits, train on."""
        self.say("3. Load it on 2 ranks (FSDP2) and on 1 (no sharding), and train on")
        saved = self.told[4]
        for ranks in (2, 1):
            told = self._job(ranks, tensor_parallel=1, steps=0)
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
        reports = [
            shardplan.convert(self.folder / "step", hf, format="hf", planner=planner),
            shardplan.convert(self.folder / "step", file, format="torch"),
        ]
        self.console.print(*(f"  {report}" for report in reports), sep="\n", markup=False)
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
        for path in (good, bad):
            self.console.print(str(shardplan.verify(path)), markup=False, soft_wrap=True)
        self.console.print(
            self.check("the good one is sound", shardplan.verify(good).ok),
            self.check("the bad one is found out", not shardplan.verify(bad).ok),
            sep="\n",
        )

    def compare(self) -> None:
        """Show how long it took, beside torch."""
        seconds = self.told[4]["seconds"]
        table = Table("4 ranks", "torch DCP", "shardplan", "", box=None)
        for what in ("save", "load"):
            ours, theirs = seconds[what], seconds[f"{what} torch"]
            table.add_row(what, f"{theirs:.3f} s", f"{ours:.3f} s", f"{theirs / ours:.1f} ×")
        self.say("6. How long it took, beside torch", table)

    def plan_at_scale(self) -> None:
        """Plan what nobody here owns: 405 billion parameters and their Adam state."""
        start = time.perf_counter()
        mesh, fewer = sp.Mesh(dp=2048, tp=8), sp.Mesh(dp=1536, tp=8)
        saved, wanted = (
            sp.world_plans(sp.adam(sp.fsdp_tp(sp.llama3_405b(), m, sp.LLAMA_TP)), m)
            for m in (mesh, fewer)
        )
        report = sp.explain(sp.world_metadata(saved), wanted)
        title = "7. Planning needs no ranks: 405B with Adam, saved on 16,384, loaded on 12,288"
        self.say(title, report, f"planned in {time.perf_counter() - start:.1f} s")

    def _job(self, ranks: int, tensor_parallel: int, steps: int) -> dict[str, Any]:
        """Run the training job on some ranks, and return what its first rank wrote down."""
        job = ["-m", "shardplan.demo.training", str(self.folder), str(tensor_parallel), str(steps)]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, "-P", *(launch if ranks > 1 else []), *job]
        quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        with self.console.status(f"{ranks} ranks are at work"):
            done = subprocess.run(
                command, env=os.environ | quiet, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RuntimeError(f"the training job failed:\n{done.stderr[-4000:]}")
        self.told[ranks] = json.loads((self.folder / f"told-{ranks}.json").read_text())
        return self.told[ranks]

    def run(self) -> bool:
        """Take all steps, and tell whether everything held."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        start = time.perf_counter()
        for step in (
            self.train,
            self.look,
            self.load_elsewhere,
            self.convert,
            self.damage,
            self.compare,
            self.plan_at_scale,
        ):
            step()
        verdict = f"failed: {', '.join(self.failed)}" if self.failed else "all of it held"
        self.say(f"Done in {time.perf_counter() - start:.0f} s; {verdict}")
        return not self.failed


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; its files go to the folder named first, which is emptied before."""
    return 0 if Demo(Path(arguments[0] if arguments else FILES)).run() else 1
