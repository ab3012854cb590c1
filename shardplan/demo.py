"""The demo: plan a checkpoint, reshard it, see what that costs and prove that it is right.

Run it with ``make demo`` or ``python -m shardplan.demo [folder for the pictures]``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardplan import planning as sp

__all__ = ["main"]

FILES = "build/demo"


def small_model() -> dict[str, tuple[int, ...]]:
    """Return the parameters of a transformer that fits on a page."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (1000, 64)}
    for layer in range(2):
        shapes[f"layers.{layer}.attn.wq"] = (64, 64)
        shapes[f"layers.{layer}.attn.wo"] = (64, 64)
        shapes[f"layers.{layer}.norm"] = (64,)
    return shapes


def say(title: str, *texts: object) -> None:
    """Print a heading and what belongs under it."""
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n## {title}")
    for text in texts:
        print(text)


def reshard(folder: Path) -> None:
    """Save a small model from 8 ranks, load it on 3, and look at every step."""
    rules: dict[str, sp.Rule] = {"*wq": "colwise", "*wo": "rowwise", "embed*": "colwise"}
    mesh = sp.Mesh(dp=4, tp=2)
    saved = sp.world_plans(sp.fsdp_tp(small_model(), mesh, rules), mesh)
    say(f"What rank 3 of {mesh!r} holds (FSDP over TP)", saved[3])

    plans, metadata = sp.global_plan(saved)
    say("The checkpoint that all eight ranks write", metadata)

    fewer = sp.Mesh(dp=3)
    wanted = sp.world_plans(sp.fsdp(small_model(), fewer), fewer)
    loads = [sp.load_plan(metadata, plan) for plan in wanted]
    say("What rank 1 reads when three ranks load it", loads[1])

    writers = sp.writers_of(plans, metadata)
    report = sp.explain(metadata, loads, writers=writers)
    say("What that costs", report)
    say(
        "Why rank 1 reads element (500, 7) of the embedding",
        sp.why(report, "embed.weight", (500, 7)),
    )

    pictures = {
        "tiling.svg": sp.draw_tiling(plans, "embed.weight"),
        "reshard.svg": sp.draw_reshard(metadata, wanted, "embed.weight", writers=writers),
        "traffic.svg": sp.draw_traffic(loads, writers=writers),
        "bytes.svg": sp.draw_bytes([plan.nbytes for plan in plans]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (folder / name).write_text(str(picture))
    say("Pictures", *(folder / name for name in pictures))


def refuse() -> None:
    """Leave a rank out, and see what the plan says to that."""
    mesh = sp.Mesh(dp=4)
    plans = sp.world_plans(sp.fsdp(small_model(), mesh), mesh)
    try:
        sp.global_plan([plans[0], plans[1], sp.SavePlan([]), plans[3]])
    except sp.PlanError as error:
        say("A rank that saves nothing is noticed before anything is written", error)


def at_scale() -> None:
    """Plan what nobody here owns: 405 billion parameters and their Adam state on 16,384 ranks."""
    start = time.perf_counter()
    mesh = sp.Mesh(dp=2048, tp=8)
    model = sp.llama3_405b()
    saved = sp.world_plans(sp.adam(sp.fsdp_tp(model, mesh, sp.LLAMA_TP)), mesh)
    metadata = sp.world_metadata(saved)
    fewer = sp.Mesh(dp=1536, tp=8)
    wanted = sp.world_plans(sp.adam(sp.fsdp_tp(model, fewer, sp.LLAMA_TP)), fewer)
    report = sp.explain(metadata, wanted)
    took = time.perf_counter() - start
    say(
        "405B with Adam, saved on 16,384 ranks, loaded on 12,288",
        report,
        f"planned in {took:.1f} s",
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; pictures go to the folder named first."""
    folder = Path(arguments[0] if arguments else FILES)
    reshard(folder)
    refuse()
    at_scale()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
