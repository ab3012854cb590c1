"""What saving and loading cost at 1,024 to 16,384 ranks, simulated; and on real processes.

    python -P benchmarks/scale.py [--ranks 1024 4096 16384] [--only deepseek] [--json]
    python -P benchmarks/scale.py --processes 8 16 32

The first form saves nothing: it plans for all ranks of a mesh, writes the manifest that the
checkpoint would have, and opens it in a process of its own. Its picture is scale.svg. The second
starts real processes without GPUs whose process group cannot talk (as NCCL cannot, to a CPU), so
that all coordination is ours. It counts what goes through the rendezvous store, byte by byte in a
proxy before it, and the connections of each process; then it fits how that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.io.formats.native.encoding import decode_manifest, encode_manifest
from shardplan.io.formats.native.expected import Expected
from shardplan.io.formats.native.record import file_bytes
from shardplan.io.formats.native.write import Written, WrittenFile, assemble
from shardplan.planning import (
    LLAMA_TP,
    Mesh,
    TensorSpec,
    adam,
    deepseek_v3,
    derive_plans,
    expert_parallel,
    find_issues,
    fsdp,
    fsdp_tp,
    hsdp,
    llama3_405b,
    pipeline,
    world_plans,
)
from shardplan.planning.draw import svg
from shardplan.planning.storage import chunk_places, file_name
from shardplan.planning.text import human_bytes, table

HERE = Path(__file__).parent
SAVE_ID = "5f3a9c0d7e21"
HEADER = 400_000  # bytes of a data file's header, about
Specs = Mapping[str, TensorSpec]


# Models on meshes


def dense_fsdp(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(dp=ranks)
    return fsdp(llama3_405b(), mesh), mesh


def dense_fsdp_tp(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(dp=ranks // 8, tp=8)
    return fsdp_tp(llama3_405b(), mesh, LLAMA_TP), mesh


def dense_hsdp(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(dp_replicate=8, dp_shard=ranks // 8)
    return hsdp(llama3_405b(), mesh), mesh


def dense_pp(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(pp=16, dp=ranks // 128, tp=8)
    return pipeline(fsdp_tp(llama3_405b(), mesh, LLAMA_TP), mesh), mesh


def moe_fsdp(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(dp=ranks)
    return fsdp(deepseek_v3(), mesh), mesh


def moe_ep(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(dp=ranks // 64, ep=64)
    return experts_apart(mesh), mesh


def moe_pp_ep(ranks: int) -> tuple[Specs, Mesh]:
    mesh = Mesh(pp=16, dp=ranks // 1024, ep=64)
    return pipeline(experts_apart(mesh), mesh), mesh


def experts_apart(mesh: Mesh) -> Specs:
    """Each expert on one rank of ``ep``, cut over ``dp``; all else is cut over both."""
    params = deepseek_v3()
    experts = {name: spec for name, spec in params.items() if ".experts." in name}
    rest = {name: spec for name, spec in params.items() if name not in experts}
    rest = fsdp(fsdp(rest, mesh, axis="dp"), mesh, axis="ep")
    return {**rest, **fsdp(expert_parallel(experts, mesh), mesh)}


CASES: dict[str, Callable[[int], tuple[Specs, Mesh]]] = {
    "405B FSDP": dense_fsdp,
    "405B FSDP x TP 8": dense_fsdp_tp,
    "405B HSDP 8": dense_hsdp,
    "405B PP 16 x FSDP x TP 8": dense_pp,
    "deepseek FSDP": moe_fsdp,
    "deepseek FSDP x EP 64": moe_ep,
    "deepseek PP 16 x FSDP x EP 64": moe_pp_ep,
}


# One case, in a process of its own


def seconds(work: Callable[[], Any], repeat: int = 1) -> tuple[float, Any]:
    """Return the least seconds of processor time of some runs, and what the last one returned."""
    best, result = math.inf, None
    for _ in range(repeat):
        result = None
        gc.collect()
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def measure(name: str, ranks: int) -> dict[str, Any]:
    """Plan a save by all ranks, and do what the coordinator does when all have written."""
    specs, mesh = CASES[name](ranks)
    specs = adam(specs)
    planning, (plans, metadata) = seconds(lambda: derive_plans(world_plans(specs, mesh)))
    plan_one, _ = seconds(lambda: plans[ranks // 3])  # who writes replicas is found out here
    reports = reports_of(plans, metadata)

    def commit() -> bytes:
        written = [Written.from_bytes(report) for report in reports]
        return encode_manifest(assemble(metadata, plans, written, save_id=SAVE_ID))

    committing, data = seconds(commit)
    manifest = decode_manifest(data)
    encoding, _ = seconds(lambda: encode_manifest(manifest))
    entries = metadata.state_dict_metadata
    chunks = [len(layout.tiling) for layout in entries.layouts]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(data)
        file.flush()
        opened = json.loads(run_self("--open", file.name))
    return {
        "case": name,
        "ranks": ranks,
        "tensors": len(entries),
        "chunks": sum(chunks[layout] for layout in entries.layout.tolist()),
        "manifest_bytes": len(data),
        "sent_bytes": len(zlib.compress(data, 1)),
        "encode_s": encoding,
        **opened,
        "plan_s": planning + plan_one,
        "commit_s": committing,
        "report_bytes": sum(map(len, reports)),
    }


def reports_of(plans: Any, metadata: Any) -> list[bytes]:
    """Return what each rank would report, had it written its files."""
    entries, ranks, most = metadata.state_dict_metadata, len(plans), 16
    files = np.arange(ranks * most).reshape(ranks, most)
    places = chunk_places(entries, plans, files, [True] * len(entries))
    held = file_bytes(
        entries, places.columns, places.entry, {}, files.size, max_bytes=math.inf
    ).reshape(ranks, most)
    reports = []
    for rank, sizes in enumerate(held):
        count = int((sizes > 0).sum())
        headers = [HEADER + 64 * ((rank + number) % 5) for number in range(count)]
        made = [
            WrittenFile(
                number,
                file_name(rank, number, count, SAVE_ID),
                header + int(sizes[number]),
                header,
                hash((rank, number)) % (1 << 64),
            )
            for number, header in enumerate(headers)
        ]
        reports.append(Written(tuple(made), {}).to_bytes())
    return reports


def measure_open(path: str) -> dict[str, Any]:
    """Open a manifest as a rank does that needs what it wrote: seconds and MiB."""
    data = Path(path).read_bytes()
    start = time.process_time()
    manifest = decode_manifest(data)
    assert not find_issues(manifest.metadata)
    opening = time.process_time() - start
    start = time.process_time()
    own = sum(1 for _ in Expected(manifest).slots(len(manifest.files) // 2))
    finding = time.process_time() - start
    del manifest
    tracemalloc.start()
    for _ in Expected(decode_manifest(data)).slots(0):
        pass
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    return {"open_s": opening, "open_mib": peak, "own_s": finding, "own_chunks": own}


def run_self(*arguments: str) -> str:
    """Run this file in a process of its own, and return what it prints."""
    command = [sys.executable, "-P", __file__, *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def simulated_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Lay out what was simulated."""
    head = ("case", "ranks", "tensors", "chunks", "manifest", "compressed", "encode", "open",
            "memory", "own part", "plan", "commit", "reports")  # fmt: skip
    rows = [
        (
            r["case"],
            f"{r['ranks']:,}",
            f"{r['tensors']:,}",
            f"{r['chunks']:,}",
            human_bytes(r["manifest_bytes"]),
            human_bytes(r["sent_bytes"]),
            f"{r['encode_s']:.2f} s",
            f"{r['open_s']:.3f} s",
            f"{r['open_mib']:.0f} MiB",
            f"{r['own_s']:.3f} s",
            f"{r['plan_s']:.2f} s",
            f"{r['commit_s']:.2f} s",
            human_bytes(r["report_bytes"]),
        )
        for r in results
    ]
    return table(head, rows)


# Real processes


class Proxy:
    """Passes bytes between ranks and the rendezvous store, and counts them.

    A client of the store waits for each answer, so what arrives at once is a request, or a part of
    a large one.
    """

    def __init__(self, port: int) -> None:
        self.requests = self.nbytes = self.clients = 0
        self._target, self._loop = port, asyncio.new_event_loop()
        self.port = self._loop.run_until_complete(self._listen())
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients += 1
        there, to = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass(reader, to, asks=True), self._pass(there, writer))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asks: bool = False
    ) -> None:
        try:
            while data := await reader.read(1 << 20):
                self.requests += asks
                self.nbytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


SAVES = 3  # the first one plans, later ones find their plans cached


def measure_processes(ranks: int) -> dict[str, Any]:
    """Save with so many processes; return what each save took."""
    import torch.distributed as dist

    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    proxy = Proxy(host.port)
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(proxy.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not host the store: this does
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", __file__, "--rank", folder]
        processes = [
            subprocess.Popen(command, env=env | {"RANK": str(rank)}) for rank in range(ranks)
        ]
        try:
            steps = [
                step_of(Path(folder), step, ranks, proxy, processes) for step in range(SAVES + 1)
            ]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    saves = [
        {
            "seconds": after["seconds"],
            "connections": after["connections"] - steps[0]["connections"],
            "requests": after["requests"] - before["requests"],
            "store_bytes": after["nbytes"] - before["nbytes"],
        }
        for before, after in pairwise(steps)
    ]
    return {"ranks": ranks, "first": saves[0], "cached": saves[-1]}


def step_of(
    folder: Path, step: int, ranks: int, proxy: Proxy, processes: Iterable[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    """Wait until all ranks have done a step; return what was counted so far, and let them go on."""
    files = [folder / f"{step}-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + 600
    while not all(file.exists() for file in files):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            raise RuntimeError(f"of {ranks} processes, some failed or were too slow")
        time.sleep(0.02)
    reports = [json.loads(file.read_text()) for file in files]
    counted = {"requests": proxy.requests, "nbytes": proxy.nbytes}
    (folder / f"go-{step}").touch()
    return counted | {
        "seconds": max(report["seconds"] for report in reports),
        "connections": sum(report["connections"] for report in reports) // 2,
    }


def run_rank(folder: Path) -> None:
    """Be one rank: save several times, and report after each save."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    import shardplan

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous("env://", rank, ranks))
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    local = torch.full((4, 64), float(rank))
    placed = [Shard(0)]
    sd = {
        f"layers.{number}.weight": DTensor.from_local(local, mesh, placed, run_check=False)
        for number in range(40)
    }
    for step in range(SAVES + 1):
        start = time.monotonic()
        if step:
            shardplan.save(sd, folder / f"step-{step}")
        report = {"seconds": time.monotonic() - start, "connections": connections()}
        part = folder / f"{step}-{rank}.part"
        part.write_text(json.dumps(report))
        part.rename(folder / f"{step}-{rank}")
        while not (folder / f"go-{step}").exists():
            time.sleep(0.02)
    os._exit(0)  # a process group that is fake needs no farewell


def connections() -> int:
    """Count this process' open connections over TCP."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(fields[3] == "01" and f"socket:[{fields[9]}]" in own for fields in lines)


def fitted(ranks: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return a and b so that a * ranks ** b is near the values."""
    some = [(math.log(n), math.log(v)) for n, v in zip(ranks, values, strict=True) if v > 0]
    if len(some) < 2:
        return 0.0, 0.0
    slope, start = np.polyfit(*zip(*some, strict=True), 1)
    return math.exp(start), float(slope)


WHAT = ("connections", "requests", "store_bytes", "seconds")


def real_table(results: Sequence[Mapping[str, Any]], at: int = 16_384) -> str:
    """Lay out what real processes took, how it grows, and what that comes to."""
    head = ("save", "what", *(f"{r['ranks']} ranks" for r in results), "grows as", f"at {at:,}")
    rows = []
    ranks = [r["ranks"] for r in results]
    for save in ("first", "cached"):
        for what in WHAT:
            values = [r[save][what] for r in results]
            scale, power = fitted(ranks, values)
            text = (lambda v: f"{v:.2f} s") if what == "seconds" else (lambda v: f"{v:,.0f}")
            shown = (f"N^{power:.2f}", text(scale * at**power)) if scale else ("-", text(0))
            rows.append((save, what.replace("_", " "), *map(text, values), *shown))
    return table(head, rows)


# The picture


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
Curves = Mapping[str, Sequence[tuple[float, float]]]


def picture(results: Sequence[Mapping[str, Any]]) -> str:
    """Draw how the manifest, opening it and the commit grow with the ranks."""
    panels = (
        ("bytes of the manifest", "manifest_bytes", lambda v: f"{v / 1e6:g} MB"),
        ("seconds to open it", "open_s", lambda v: f"{v:g} s"),
        ("seconds to commit", "commit_s", lambda v: f"{v:g} s"),
    )
    names = list(dict.fromkeys(r["case"] for r in results))
    wide, high, below = 340, 300, 26 + 18 * len(names)
    parts = [svg.element("rect", width=wide * 3, height=high + below, fill="#ffffff")]
    for number, (title, key, text) in enumerate(panels):
        curves = {
            name: [(r["ranks"], r[key]) for r in results if r["case"] == name] for name in names
        }
        parts += panel(curves, title, text, number * wide, wide, high)
    for number, name in enumerate(names):
        y = high + 20 + 18 * number
        parts.append(svg.line(60, y - 4, 90, y - 4, COLORS[number % len(COLORS)]))
        parts.append(say(98, y, name, "start"))
    space = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {wide * 3} {high + below}"}
    return svg.element("svg", *parts, **space) + "\n"


def panel(
    curves: Curves, title: str, text: Callable[[float], str], x: float, wide: float, high: float
) -> list[str]:
    """Draw curves over ranks, both axes logarithmic."""
    left, right, top, bottom = x + 70, x + wide - 20, 40, high - 40
    points = [point for curve in curves.values() for point in curve]
    x0, x1 = (f(math.log10(n) for n, _ in points) for f in (min, max))
    low = math.floor(min(math.log10(v) for _, v in points))
    end = max(math.ceil(max(math.log10(v) for _, v in points)), low + 1)

    def at(ranks: float, value: float) -> tuple[float, float]:
        along = (math.log10(ranks) - x0) / max(x1 - x0, 1e-9)
        up = (math.log10(value) - low) / (end - low)
        return left + along * (right - left), bottom - up * (bottom - top)

    parts = [say((left + right) / 2, 22, title, size=14)]
    for power in range(low, end + 1):
        _, y = at(10**x0, 10.0**power)
        parts.append(svg.line(left, y, right, y, "#dddddd"))
        parts.append(say(left - 6, y + 4, text(10.0**power), "end"))
    counts = sorted({n for n, _ in points})
    parts += [say(at(n, 10.0**low)[0], bottom + 18, f"{n:,}") for n in counts]
    parts.append(say((left + right) / 2, bottom + 36, "ranks"))
    for color, curve in zip(COLORS, curves.values(), strict=False):
        places = [at(*point) for point in sorted(curve)]
        parts += [svg.line(*a, *b, color) for a, b in pairwise(places)]
        parts += [svg.element("circle", cx=a, cy=b, r=3, fill=color) for a, b in places]
    return parts


def say(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
    style = {"text-anchor": anchor, "font-size": size, "font-family": "sans-serif"}
    return svg.element("text", words, x=x, y=y, **style)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--processes", type=int, nargs="+", help="how many real processes to start")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path, default=HERE / "scale.svg")
    for inner in ("--case", "--open", "--rank"):
        parser.add_argument(inner, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]))))
    elif options.open:
        print(json.dumps(measure_open(*options.open)))
    elif options.rank:
        run_rank(Path(*options.rank))
    elif options.processes:
        results = [measure_processes(ranks) for ranks in options.processes]
        print(json.dumps(results) if options.json else real_table(results))
    else:
        names = [name for name in CASES if options.only in name]
        pairs = [(name, str(ranks)) for name in names for ranks in options.ranks]
        results = [json.loads(run_self("--case", *pair)) for pair in pairs]
        print(json.dumps(results) if options.json else simulated_table(results))
        options.picture.write_text(picture(results))


if __name__ == "__main__":
    main()
