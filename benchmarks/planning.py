"""Planning against torch DCP: both sides in one run, as ratios.

    python -P benchmarks/planning.py [--ranks 512] [--tensors 1000] [--largest 4096]

Prints a table for each claim and writes the growth curve to benchmarks/planning-growth.svg.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardplan.io.formats.native.manifest import encode_manifest
from shardplan.io.formats.native.write import Written, WrittenFile, assemble
from shardplan.planning import (
    LLAMA_TP,
    DerivedPlans,
    Mesh,
    Metadata,
    Replicate,
    SavePlan,
    Shard,
    TensorSpec,
    WorldPlans,
    adam,
    annotate,
    balance,
    cast,
    chain,
    concat,
    decode_metadata,
    decode_plans,
    dedup_replicas,
    derive_plans,
    drop,
    encode_metadata,
    encode_plan,
    explain,
    fingerprint,
    fsdp_tp,
    global_plan,
    hsdp,
    llama3_8b,
    llama3_405b,
    load_plan,
    local_plan,
    pad,
    partition,
    permute,
    pipeline,
    rename,
    reshape,
    select,
    share_reads,
    split,
    split_chunks,
    split_replicas,
    stack,
    trim,
    unstack,
    world_metadata,
    world_plans,
)
from shardplan.planning.draw import svg
from shardplan.planning.storage import file_name, file_numbers
from shardplan.planning.text import table

HERE = Path(__file__).parent
Specs = dict[str, TensorSpec]


def seconds(work: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """Return the shortest of some runs, and what the last one returned."""
    best = float("inf")
    for _ in range(repeat):
        result = None
        gc.collect()
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def model(tensors: int, ranks: int, axis: int = 0) -> Specs:
    """Make a transformer's mix of shapes, sharded over all ranks along one axis."""
    widths = (256, 512, 1024, 128)
    shapes = [
        (ranks * 4, widths[i % 4]) if axis == 0 else (widths[i % 4], ranks * 4)
        for i in range(tensors)
    ]
    return {
        f"layers.{i}.weight": TensorSpec(s, "float32", [Shard(axis)]) for i, s in enumerate(shapes)
    }


def our_blobs(specs: Specs, ranks: int) -> list[bytes]:
    """Encode every rank's plan; only offsets differ between ranks of an even sharding."""
    mesh = Mesh(dp=ranks)
    first = local_plan(specs, mesh=mesh, rank=0)
    [axis] = {p.dim for spec in specs.values() for p in spec.placements}
    step = np.zeros_like(first.items.offsets)
    step[:, axis] = first.items.sizes[:, axis]
    last = SavePlan(attrs.evolve(first.items, offsets=step * (ranks - 1)))
    assert last == local_plan(specs, mesh=mesh, rank=ranks - 1)
    return [
        encode_plan(SavePlan(attrs.evolve(first.items, offsets=step * rank)))
        for rank in range(ranks)
    ]


def torch_plan(plan: SavePlan) -> dcp_planner.SavePlan:
    """Return the same plan as torch's own planner makes it."""
    items = []
    for item in plan.items:
        data = item.tensor_data
        chunk = dcp.ChunkStorageMetadata(
            torch.Size(data.chunk.offsets), torch.Size(data.chunk.sizes)
        )
        properties = dcp.TensorProperties(dtype=torch.float32)
        written = dcp_planner.TensorWriteData(chunk, properties, torch.Size(data.size))
        index = dcp.MetadataIndex(item.index.fqn, chunk.offsets)
        kind = dcp_planner.WriteItemType.SHARD
        items.append(dcp_planner.WriteItem(index, kind, tensor_data=written))
    return dcp_planner.SavePlan(items)


def torch_coordinator(blobs: list[bytes]) -> bytes:
    """Do what DCP's coordinator does: decode, dedup, plan, validate, encode."""
    plans = dedup_save_plans([pickle.loads(blob) for blob in blobs])
    plans, metadata = create_default_global_save_plan(plans)
    assert not _validate_global_plan(plans, metadata)
    return pickle.dumps(metadata)


def our_coordinator(blobs: list[bytes]) -> bytes:
    """Do the same steps: decode, dedup, plan, validate, encode."""
    _, metadata = global_plan(decode_plans(blobs))
    return encode_metadata(metadata)


def compare(ranks: int, tensors: int) -> None:
    """Coordinator and load plan, ours against torch's."""
    specs = model(tensors, ranks)
    ours = our_blobs(specs, ranks)
    theirs = [pickle.dumps(torch_plan(plan)) for plan in decode_plans(ours)]
    torch_s, torch_meta = seconds(partial(torch_coordinator, theirs))
    our_s, our_meta = seconds(lambda: our_coordinator(ours), repeat=3)
    rows = [("coordinator", f"{torch_s:.2f} s", f"{our_s:.3f} s", f"{torch_s / our_s:.0f}x")]
    rows.append(
        (
            "plan, one rank",
            f"{len(theirs[0]):,} B",
            f"{len(ours[0]):,} B",
            f"{len(theirs[0]) / len(ours[0]):.0f}x",
        )
    )
    rows.append(
        (
            "metadata",
            f"{len(torch_meta):,} B",
            f"{len(our_meta):,} B",
            f"{len(torch_meta) / len(our_meta):.0f}x",
        )
    )
    wanted = local_plan(specs, mesh=Mesh(dp=ranks // 2), rank=3)

    def torch_load() -> int:
        metadata = pickle.loads(torch_meta)
        reads = 0
        for item in wanted.items:
            c = item.tensor_data.chunk
            chunk = dcp.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
            saved = metadata.state_dict_metadata[item.index.fqn]
            reads += len(create_read_items_for_chunk_list(item.index.fqn, saved, [chunk]))
        return reads

    torch_s, torch_reads = seconds(torch_load)
    our_s, plan = seconds(lambda: load_plan(decode_metadata(our_meta), wanted), repeat=3)
    assert len(plan.items) == torch_reads
    rows.append(
        ("load plan, one rank", f"{torch_s:.2f} s", f"{our_s:.4f} s", f"{torch_s / our_s:.0f}x")
    )
    print(f"\n{ranks} ranks x {tensors:,} tensors, decoding and validation included")
    print(table(("work", "torch DCP", "shardplan", "ratio"), rows))


def compare_axes(tensors: int = 20, shards: int = 1024) -> None:
    """The same tensors, sharded along their long axis and across it."""
    rows = []
    for who in ("torch DCP", "shardplan"):
        times = []
        for axis in (0, 1):
            shape = (shards, 4 * shards)  # the second axis is always the longer one
            size = [shape[0], shape[1]]
            specs = {f"w{i}": TensorSpec(size, "float32", [Shard(axis)]) for i in range(tensors)}
            blobs = our_blobs(specs, shards)
            if who == "shardplan":
                plans = decode_plans(blobs)
                times.append(seconds(lambda plans=plans: global_plan(plans), repeat=3)[0])
            else:
                plans, metadata = create_default_global_save_plan(
                    [torch_plan(plan) for plan in decode_plans(blobs)]
                )
                check = partial(_validate_global_plan, plans, metadata)
                times.append(seconds(check)[0])
        rows.append(
            (who, f"{times[1]:.3f} s", f"{times[0]:.3f} s", f"{max(times) / min(times):.1f}x")
        )
    print(f"\nwhich axis is sharded: {tensors} tensors x {shards:,} shards")
    print(table(("who", "long axis", "short axis", "ratio"), rows))


def routes(count: int) -> dict[str, Any]:
    """Return that many routes of a partition, none of which does anything."""
    return {str(number): chain() for number in range(count)}


def compare_passes(ranks: int, tensors: int) -> None:
    """What passes cost beside the global plan of the same world."""
    for label, mesh, placements in (
        ("sharded", Mesh(dp=ranks), [Shard(0)]),
        ("replicated twice", Mesh(r=2, dp=ranks // 2), [Replicate(), Shard(0)]),
    ):
        specs = {
            k: attrs.evolve(s, placements=placements) for k, s in model(tensors, ranks).items()
        }
        blobs = [encode_plan(local_plan(specs, mesh=mesh, rank=rank)) for rank in range(ranks)]
        plans = decode_plans(blobs)
        whole, (_, metadata) = seconds(lambda plans=plans: global_plan(plans), repeat=3)
        passes = {
            "rename": rename(lambda key: f"model.{key}"),
            "select": select("layers.1*"),
            "drop": drop("layers.1*"),
            "cast": cast("bfloat16"),
            "annotate": annotate(lambda plan: {"items": len(plan.items)}),
            "partition, 2 ways": partition(lambda key: str(int(key[7]) % 2), routes(2)),
            "partition, 10 ways": partition(lambda key: key[7], routes(10)),
            "split_chunks": split_chunks(1 << 20),
            "split_replicas": split_replicas(1 << 10),
            "dedup_replicas": dedup_replicas(),
            "balance": balance(),
            "split": split("*.weight", ["*.upper", "*.lower"]),
            "concat": concat(["layers.0.weight", "layers.4.weight"], "both"),
            "unstack, then stack": chain(
                unstack("layers.3.weight", "part.#", 1), stack("part.#", "layers.3.weight", 1)
            ),
            "permute": permute("*.weight", (1, 0)),
            "reshape": reshape("*.weight", (-1, 64)),
            "pad": pad("*.weight", to=8 * ranks),
            "trim": trim("*.weight", to=2 * ranks),
        }
        rows = [("global_plan", f"{whole:.3f} s", "1.00")]
        for name, step in passes.items():
            cost, _ = seconds(lambda step=step, plans=plans: step(plans), repeat=3)
            rows.append((name, f"{cost:.3f} s", f"{cost / whole:.2f}"))
        loads = tuple(load_plan(metadata, plan) for plan in plans)
        cost, _ = seconds(partial(share_reads(metadata, min_bytes=1), loads), repeat=3)
        rows.append(("share_reads", f"{cost:.3f} s", f"{cost / whole:.2f}"))
        print(f"\npasses over {ranks} ranks x {tensors:,} tensors, {label}")
        print(table(("pass", "time", "of the global plan"), rows))


def measure_growth(ranks: int, tensors: int) -> None:
    """Print one point of the growth curve: chunks, seconds, peak GiB (run in its own process)."""
    blobs = our_blobs(model(tensors, ranks), ranks)
    cost, _ = seconds(lambda: our_coordinator(blobs), repeat=3)
    print(ranks * tensors, cost, peak_gib())


def measure_derived(ranks: int, tensors: int) -> None:
    """Print what one rank computes when it derives everybody's plan (run in its own process)."""
    before = peak_gib()
    mesh = Mesh(dp=ranks // 8, tp=8)
    specs = dict(list(adam(fsdp_tp(llama3_405b(), mesh, LLAMA_TP)).items())[:tensors])
    start = time.perf_counter()
    plans, metadata = derive_plans(world_plans(specs, mesh))
    fingerprint(metadata), plans[ranks // 3]
    one = time.perf_counter() - start
    print(f"\neach of {ranks:,} ranks derives the plan of all for {len(specs):,} tensors")
    print(f"in {one:.2f} s and {peak_gib() - before:.2f} GiB")
    written = [_written(rank, plan) for rank, plan in enumerate(plans)]
    chunks = sum(len(plan.items) for plan in plans)
    start = time.perf_counter()
    data = encode_manifest(assemble(metadata, plans, written, save_id="x"))
    commit = time.perf_counter() - start
    print(f"the coordinator lists {chunks:,} chunks in {commit:.2f} s and {peak_gib():.2f} GiB")
    print(f"in all; manifest {len(data) / 1e6:.0f} MB")


def _written(rank: int, plan: SavePlan) -> Written:
    """Report what a rank would have written."""
    file, header = file_numbers(plan), 4096
    sizes = np.bincount(file, plan.items.nbytes).astype(np.int64) + header
    made = [
        WrittenFile(i, file_name(rank, i, len(sizes), "x"), size, header, rank)
        for i, size in enumerate(sizes.tolist())
    ]
    return Written(tuple(made), {})


def peak_gib() -> float:
    """Return the most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def presets(ranks: int) -> dict[str, tuple[Mesh, Specs]]:
    """Return ways to place Llama 3 with Adam on so many ranks."""
    copies = max(ranks // 64, 2)
    ddp, pp = Mesh(r=ranks), Mesh(pp=4, dp=ranks // 4)
    sharded = Mesh(dp_replicate=copies, dp_shard=ranks // copies)
    crossed = Mesh(dp=ranks // 8, tp=8)
    return {
        "8B, DDP": (ddp, adam(llama3_8b())),
        "8B, HSDP": (sharded, adam(hsdp(llama3_8b(), sharded))),
        "8B, pipeline": (pp, adam(pipeline(llama3_8b(), pp))),
        "405B, FSDP x TP": (crossed, adam(fsdp_tp(llama3_405b(), crossed, LLAMA_TP))),
    }


def measure_balance(largest: int) -> None:
    """How even the bytes per rank are by default, and with whole tensors."""
    rows = []
    ranks = 8
    while ranks <= largest:
        for name, (mesh, specs) in presets(ranks).items():
            cost, (plans, _) = seconds(lambda m=mesh, s=specs: _derive(world_plans(s, m)))
            load = np.array([plan.nbytes for plan in plans])
            # A stage of a pipeline writes what it alone holds.
            need = load.reshape(4 if "pp" in mesh.names else 1, -1).mean(axis=1).max()
            figures = (f"{load.max() / load.mean():.2f}", f"{load.max() / need:.2f}")
            rows.append((f"{ranks:,}", name, *figures, f"{cost:.2f} s"))
        ranks = ranks * 8 if ranks < 64 else ranks * 4
    print("\nbytes per rank by default; `need` is the mean of the heaviest stage")
    print(table(("ranks", "model", "max / mean", "max / need", "derived in"), rows))


def _derive(plans: WorldPlans) -> tuple[DerivedPlans, Metadata]:
    derived, metadata = derive_plans(plans)
    derived[0]  # of which all ranks have to know who writes what
    return derived, metadata


def measure_large() -> None:
    """Plans of one rank that has millions of reads, and the reshard of a whole job."""
    mesh, specs = presets(16384)["405B, FSDP x TP"]
    metadata = world_metadata(world_plans(specs, mesh))
    one = local_plan({name: TensorSpec(spec.shape, spec.dtype) for name, spec in specs.items()})
    flat = {name: spec for name, spec in adam(llama3_405b()).items() if spec.shape}
    rows, columns = (
        {k: attrs.evolve(s, placements=[Shard(axis % len(s.shape))]) for k, s in flat.items()}
        for axis in (0, -1)
    )
    by_rows = world_metadata(world_plans(rows, Mesh(dp=16384)))
    wanted = world_plans(columns, Mesh(dp=12288))
    before, out = peak_gib(), []
    for name, work in {
        "one rank restores 405B from 16,384 ranks": lambda: load_plan(metadata, one),
        "one of 12,288 ranks, rows to columns": lambda: load_plan(by_rows, wanted[3]),
        "explain 16,384 rows to 12,288 columns": lambda: explain(by_rows, wanted),
    }.items():
        cost, made = seconds(work)
        reads = made.totals.requests if hasattr(made, "totals") else len(made.items)
        memory = f"{(peak_gib() - before) * 1024:.0f} MiB"
        out.append((name, f"{reads:,}", f"{cost:.3f} s", memory))
    print("\nlarge plans")
    print(table(("work", "reads", "time", "memory"), out))


def growth(tensors: int, largest: int) -> None:
    """Cost per chunk from 64 thousand chunks up, each size in a process of its own."""
    points = []
    ranks = 64
    while ranks <= largest:
        command = [sys.executable, "-P", __file__, "--point", str(ranks), "--tensors", str(tensors)]
        chunks, cost, peak = subprocess.check_output(command, text=True).split()
        points.append((int(chunks), float(cost), float(peak)))
        ranks *= 4
    rows = [(f"{n:,}", f"{s:.3f} s", f"{1e9 * s / n:.0f} ns", f"{g:.2f} GiB") for n, s, g in points]
    per_chunk = [s / n for n, s, _ in points]
    print("\ngrowth of the coordinator's work: cost per chunk")
    print(f"varies {max(per_chunk) / min(per_chunk):.2f}x between all sizes,")
    print(
        f"and is {per_chunk[-1] / per_chunk[0]:.2f}x at the largest size what it is at the smallest"
    )
    print(table(("chunks", "time", "per chunk", "peak memory"), rows))
    picture = HERE / "planning-growth.svg"
    picture.write_text(growth_svg(points))
    print(f"picture: {picture}")


def growth_svg(points: list[tuple[int, float, float]]) -> str:
    """Draw seconds over chunks, both logarithmic, with the line of equal cost per chunk."""
    wide, high, left, top = 640, 360, 70, 40
    x0, x1 = np.log10(points[0][0]) - 0.1, np.log10(points[-1][0]) + 0.1
    y0, y1 = -2.0, 1.0

    def at(chunks: float, cost: float) -> tuple[float, float]:
        x = left + (np.log10(chunks) - x0) / (x1 - x0) * (wide - left - 30)
        y = top + (y1 - np.log10(cost)) / (y1 - y0) * (high - top - 60)
        return float(x), float(y)

    def say(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
        style = {"text-anchor": anchor, "font-size": size, "font-family": "sans-serif"}
        return svg.element("text", words, x=x, y=y, **style)

    unit = points[0][1] / points[0][0]
    ends = [at(n, n * unit) for n in (points[0][0], points[-1][0])]
    parts = [
        svg.element("rect", width=wide, height=high, fill="#ffffff"),
        say(left, 22, "Coordinator: decode, dedup, plan, validate, encode", "start", 14),
        svg.line(*ends[0], *ends[1], "#999999"),
        say((left + wide) / 2, high - 10, "chunks (grey: equal cost per chunk)"),
    ]
    for power in range(int(y0), int(y1) + 1):
        _, y = at(points[0][0], 10.0**power)
        parts.append(svg.line(left, y, wide - 30, y, "#dddddd"))
        parts.append(say(left - 8, y + 4, f"{10.0**power:g} s", "end"))
    places = [at(n, s) for n, s, _ in points]
    for (ax, ay), (bx, by) in pairwise(places):
        parts.append(svg.line(ax, ay, bx, by, "#0072b2"))
    for (n, s, _), (x, y) in zip(points, places, strict=True):
        parts.append(svg.element("circle", cx=x, cy=y, r=4, fill="#0072b2"))
        parts.append(say(x, y - 10, f"{s:.2f} s"))
        parts.append(say(x, high - 32, f"{n:,}"))
    space = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {wide} {high}"}
    return svg.element("svg", *parts, **space) + "\n"


def main() -> None:
    """Run everything, or one point of the growth curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument(
        "--largest", type=int, default=4096, help="ranks at the end of the growth curve"
    )
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--derive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--balance", type=int, help="only how even saves are, up to so many ranks")
    parser.add_argument("--large", action="store_true", help="only plans with millions of reads")
    options = parser.parse_args()
    if options.point:
        measure_growth(options.point, options.tensors)
        return
    if options.derive:
        measure_derived(options.derive, options.tensors)
        return
    if options.balance:
        measure_balance(options.balance)
        return
    if options.large:
        measure_large()
        return
    print(f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}")
    growth(options.tensors, options.largest)
    command = [sys.executable, "-P", __file__, "--derive", "16384", "--tensors", "3400"]
    subprocess.run(command, check=True)
    subprocess.run([sys.executable, "-P", __file__, "--large"], check=True)
    measure_balance(options.largest)
    compare_axes()
    compare_passes(options.ranks, options.tensors)
    compare(options.ranks, options.tensors)


if __name__ == "__main__":
    main()
