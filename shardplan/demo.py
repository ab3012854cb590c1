"""The demo: train on four ranks, save, inspect, load on fewer ranks, convert, damage, verify.

Each training job of `run_rank` writes a file of results: losses, a checksum of every tensor, and
durations, with shardplan and with torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import shardplan
from shardplan.planning import counted, human_seconds, named_extras

from . import planning as sp

with named_extras("the demo", with_torch=True):
    import torch
    import torch.distributed as dist
    from torch import Tensor, multiprocessing, nn
    from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import parallel as tp
    from torch.nn import functional

    from shardplan.cli.app import app
    from shardplan.cli.screen import show, table, waiting

MADE = ".made-by-shardplan-demo"
RANKS = 4
SHOWN = "model.layers.0.linear1.weight"
STEPS, MORE = 3, 2  # of training, before and after the save
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 2048, 256, 8, 4, 32, 8
T = TypeVar("T")


class Demo:
    """The steps of the demo, in order; each prints its results.

    ``seconds`` has durations by name (torch's end in " torch"), ``failed`` the checks that failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def run(self) -> bool:
        """Run all steps, and return True if all checks passed."""
        if self.folder.exists() and any(self.folder.iterdir()):
            if not (self.folder / MADE).exists():
                raise FileExistsError(
                    f"{self.folder} holds other files than a demo's; name a new folder"
                )
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / MADE).touch()
        start = time.perf_counter()
        self.train()
        self.look()
        self.convert()
        self.damage()
        self.plan_at_scale()
        self.compare()
        verdict = f"failed: {', '.join(self.failed)}" if self.failed else "all of it held"
        self.say(f"Done in {time.perf_counter() - start:.0f} s; {verdict}")
        return not self.failed

    def say(self, title: str) -> None:
        """Print a heading."""
        show(f"\n{title}", bold=True)

    def type(self, *words: str) -> int:
        """Print a command, run it, and return its exit code."""
        short = [word.removeprefix(f"{self.folder}/") for word in words]
        self.say(f"$ shardplan {shlex.join(short)}")
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
        show(f"  {'✓' if holds else '✗'} {claim}")

    def results(self, ranks: int) -> dict[str, Any]:
        """Read the results of the training job on ``ranks`` ranks."""
        results: dict[str, Any] = json.loads((self.folder / f"results-{ranks}.json").read_text())
        return results

    def train(self) -> None:
        """Train on four local processes and save; load on two ranks and on one, and train on."""
        self.say("1. Train a small transformer on 4 ranks (FSDP2 × TP), save, load on 4, 2 and 1")
        with waiting(f"{RANKS} ranks are at work"):
            run_processes(run_rank, self.folder)
        saved = self.results(RANKS)
        same = saved["losses"] == saved["resumed"]
        self.check("4 ranks: loaded again, the next losses are the same to the last bit", same)
        for ranks in (2, 1):
            job, who = self.results(ranks), counted(ranks, "rank")
            what = f"{len(job['checksums'])} tensors, model and optimizer, equal in every bit"
            self.check(f"{who}: {what}", job["checksums"] == saved["checksums"])
            pairs = zip(job["losses"], saved["losses"], strict=True)
            near = all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs)
            self.check(f"{who}: the next losses are the same", near)
            show(f"      {', '.join(f'{loss:.6f}' for loss in job['losses'])}")

    def look(self) -> None:
        """Show what was saved, and plan a load on 3 ranks, as tables and as pictures."""
        step, picture = str(self.folder / "step"), self.folder / "tiling.svg"
        self.say("2. What was saved, and what loading it on 3 ranks would cost: no data is read")
        self.type("inspect", step, "model")
        self.type("plan", step, "--mesh", "dp=3", "--svg", str(self.folder / "reshard.svg"))
        picture.write_text(str(sp.draw_tiling(shardplan.open_checkpoint(step).metadata, SHOWN)))
        show(f"wrote {picture}")

    def convert(self) -> None:
        """Convert to the formats of other tools, and read the results with those tools."""
        from safetensors.torch import load_file

        self.say("3. Convert it: to Hugging Face's format and to a file of torch.save")
        step, hf, file = (self.folder / name for name in ("step", "hf", "step.pt"))
        planner = sp.chain(sp.select("model.*"), sp.rename(lambda k: k.removeprefix("model.")))
        self.timed(
            "convert to Hugging Face",
            lambda: shardplan.convert(step, hf, format="hf", planner=planner),
        )
        self.timed("convert to torch.save", lambda: shardplan.dcp_to_torch_save(step, file))
        expected, name = shardplan.open_checkpoint(step)[SHOWN].read(), SHOWN[len("model.") :]
        theirs = load_file(hf / "model.safetensors")[name]
        nested = torch.load(file, weights_only=True)["model"][name]
        self.check("the safetensors library reads the same bits", torch.equal(theirs, expected))
        self.check("torch.load reads the same bits", torch.equal(nested, expected))

    def damage(self) -> None:
        """Flip one bit of a copy, and verify both."""
        self.say("4. Verify it; then flip one bit of a copy")
        good, bad = self.folder / "step", self.folder / "damaged"
        shutil.copytree(good, bad)
        file = max(bad.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        intact = self.timed("verify", lambda: self.type("verify", str(good)))
        self.check("the original is intact", intact == 0)
        self.check("the damage is found", self.type("verify", str(bad)) == 1)

    def plan_at_scale(self) -> None:
        """Plan a model that does not fit here: 405 billion parameters and their Adam state."""

        def reshard() -> sp.Report:
            saved, wanted = (
                sp.world_plans(sp.adam(sp.fsdp_tp(sp.llama3_405b(), mesh, sp.LLAMA_TP)), mesh)
                for mesh in (sp.Mesh(dp=2048, tp=8), sp.Mesh(dp=1536, tp=8))
            )
            return sp.explain(sp.world_metadata(saved), wanted)

        self.say("5. Planning needs no ranks: 405B with Adam, saved on 16,384, loaded on 12,288")
        show(str(self.timed("plan 405B, 16,384 to 12,288 ranks", reshard)))

    def compare(self) -> None:
        """Show the durations next to torch's."""
        self.say("6. How long each took, beside torch.distributed.checkpoint")
        for name, ranks in (("save", 4), ("load", 4), ("load", 2), ("load", 1)):
            for word in ("", " torch"):
                seconds = self.results(ranks)["seconds"][name + word]
                self.seconds[f"{name} on {counted(ranks, 'rank')}{word}"] = seconds
        rows = []
        for name in (name for name in self.seconds if not name.endswith(" torch")):
            mine, theirs = self.seconds[name], self.seconds.get(f"{name} torch")
            beside = (
                ("-", "") if theirs is None else (human_seconds(theirs), f"{theirs / mine:.1f} ×")
            )
            rows.append((name, beside[0], human_seconds(mine), beside[1]))
        show(table(("work", "torch", "shardplan", "ratio"), rows))


def run_processes(work: Callable[[int, Path], None], folder: Path) -> None:
    """Run a function of the rank in new processes; none outlives this call, whatever ends it."""
    jobs = multiprocessing.start_processes(work, (folder,), RANKS, join=False)  # type: ignore[no-untyped-call]
    try:
        while not jobs.join():
            pass
    finally:
        for process in jobs.processes:
            process.kill()


# One of the four ranks


class Transformer(nn.Module):
    """A language model that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        shape: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **shape) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for each next token."""
        mask, x = nn.Transformer.generate_square_subsequent_mask(LENGTH), self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(x)
        return scores


class Training:
    """The model, sharded over the ranks, its optimizer, and this rank's data."""

    def __init__(self, ranks: int) -> None:
        torch.manual_seed(0)
        self.model, self.part, self.parts, self.done = Transformer(), 0, 1, 0
        if ranks > 1:
            shape = (2, 2) if ranks == RANKS else (ranks, 1)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            styles = {"linear1": tp.ColwiseParallel(), "linear2": tp.RowwiseParallel()}
            for layer in self.model.layers if shape[1] > 1 else ():
                tp.parallelize_module(layer, mesh["tp"], styles)
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh=mesh["dp"])
            self.part, self.parts = mesh["dp"].get_local_rank(), shape[0]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def steps(self, count: int) -> list[float]:
        """Train some steps, and return the loss of each over all ranks."""
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        inputs, targets = (half[self.part :: self.parts] for half in batch(self.done))
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.done += 1
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        return float(mean) / (dist.get_world_size() if dist.is_initialized() else 1)

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue training."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.done}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a loaded state."""
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states)
        self.done = state["step"]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return one of two batches and its targets; each row counts up by its own stride."""
    random = torch.Generator().manual_seed(step % 2)
    first, stride = (torch.randint(1, 99, (BATCH, 1), generator=random) for _ in range(2))
    tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a nested state, by name."""
    return {k: v.detach() for k, v in sp.flatten(state)[0].items() if isinstance(v, Tensor)}


def checksums(state: dict[str, Any]) -> dict[str, str]:
    """Return a checksum of every full tensor, however it is sharded."""
    sums = {}
    for name, tensor in tensors(state).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        elements = full.contiguous().reshape(-1).view(torch.uint8).numpy().data
        sums[name] = hashlib.blake2b(elements, digest_size=8).hexdigest()
    return sums


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have finished the second call of a function."""
    barrier = dist.barrier if dist.is_initialized() else lambda: None
    start = 0.0
    for _ in range(2):  # the first call warms up
        barrier()
        start = time.perf_counter()
        work()
    barrier()
    return time.perf_counter() - start


def save_and_go_on(training: Training, folder: Path) -> dict[str, Any]:
    """Train, save with shardplan and with torch, continue; then load, and continue again."""
    training.steps(STEPS)
    state, step = training.state(), folder / "step"
    writer = FileSystemWriter(folder / "torch", overwrite=True)
    sums = checksums(state)
    seconds = {
        "save": timed(lambda: shardplan.save(state, step, overwrite=True)),
        "save torch": timed(lambda: state_dict_saver.save(state, storage_writer=writer)),
    }
    losses = training.steps(MORE)
    fresh = load_and_go_on(Training(RANKS), folder)
    seconds |= fresh["seconds"]
    return {"checksums": sums, "seconds": seconds, "losses": losses, "resumed": fresh["losses"]}


def load_and_go_on(training: Training, folder: Path) -> dict[str, Any]:
    """Load what was saved, perhaps by another number of ranks, and continue."""
    state = training.state()
    theirs = timed(lambda: state_dict_loader.load(state, checkpoint_id=folder / "torch"))
    for tensor in tensors(state).values():
        tensor.zero_()  # so that nothing of torch's is left
    ours = timed(lambda: shardplan.load(state, folder / "step"))
    sums = checksums(state)
    training.resume(state)
    seconds = {"load torch": theirs, "load": ours}
    return {"checksums": sums, "seconds": seconds, "losses": training.steps(MORE)}


def run_rank(rank: int, folder: Path) -> None:
    """Run one of the four processes: in a job of 4 ranks, then of 2, then alone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings; an exception goes to the parent
    torch.set_num_threads(1)
    for ranks in (RANKS, 2, 1):
        if rank >= ranks:
            return
        if ranks > 1:
            where = f"file://{folder}/meeting-{ranks}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
        run = save_and_go_on if ranks == RANKS else load_and_go_on
        results = run(Training(ranks), folder)
        if rank == 0:
            (folder / f"results-{ranks}.json").write_text(json.dumps(results))
        if ranks > 1:
            dist.destroy_process_group()
