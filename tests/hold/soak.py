"""Save and load changing layouts for long: memory, threads, descriptors and files stay flat.

``hold(count)``: so many saves and loads by one process, and as many by four ranks, which are
processes of a gloo group.
"""

import json
import os
import random
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import FORMATS, Row, held, in_child, resident, target

import shardplan
from shardplan.dist import torch_comm

WORLD = 4
SLACK = 64 << 20  # bytes by which the memory of a process may grow once it has warmed up


def layout(chance, rank, world, step):
    """Cut a few tensors, of a size of this step, in rows between the ranks."""
    held = {}
    for i in range(chance.randint(1, 6)):
        rows, columns = chance.randint(world, 400), chance.randint(1, 200)
        cuts = sorted(chance.randint(0, rows) for _ in range(world - 1))
        begin, end = ([0, *cuts, rows][j] for j in (rank, rank + 1))
        held[f"{i}.{rank}"] = torch.full((end - begin, columns), float(step))
    return held


def one(step, rank, folder, comm, background):
    """Save a layout over the last one, and load it."""
    chance = random.Random(step)
    wanted = layout(chance, rank, 1 if comm is None else comm.world_size, step)
    form = FORMATS[step % 4] if comm is None and step % 4 else "safetensors"
    path = target(Path(folder, form), form)
    if background:
        shardplan.async_save(wanted, path, overwrite=True, comm=comm).result()
    else:
        shardplan.save(wanted, path, overwrite=True, comm=comm, format=form)
    into = {name: tensor * 0 - 1 for name, tensor in wanted.items()}
    shardplan.load(into, path, comm=comm)
    assert all(bool((tensor == step).all()) for tensor in into.values())


def soak(count, folder, rank=0, comm=None):
    """Save and load; raise if the process holds more at the end than after a fifth."""
    for form in FORMATS:
        Path(folder, form).mkdir(exist_ok=True)
    first = None
    for step in range(count):
        one(step, rank, folder, comm, background=step % 4 == 0 and comm is None)
        if step == count // 5:
            first = (*held(), resident())
    threads, files, memory = (*held(), resident())
    assert len(threads) <= len(first[0]), f"threads: {first[0]} became {threads}"
    assert len(files) <= len(first[1]), f"descriptors: {first[1]} became {files}"
    grown = memory - first[2]
    assert grown < SLACK, f"memory grew by {grown >> 20} MiB"
    left = [file for file in Path(folder).rglob("*") if file.is_file()]
    assert len(left) < 30, f"{len(left)} files: {left}"


def on_ranks(count, folder):
    """Fork ranks that soak together; return what is wrong, by rank."""
    children = []
    for rank in range(WORLD):
        children.append(os.fork())
        if children[-1] == 0:
            run_rank(count, folder, rank)
    for child in children:
        os.waitpid(child, 0)
    said = {rank: Path(folder, f"said-{rank}") for rank in range(WORLD)}
    texts = {r: json.loads(f.read_text()) if f.exists() else "it died" for r, f in said.items()}
    return [f"rank {rank}: {text}" for rank, text in texts.items() if text]


def run_rank(count, folder, rank):
    """Soak as one rank of a group, and write down what is wrong."""
    text = ""
    try:
        store = dist.FileStore(f"{folder}/store", WORLD)
        wait = timedelta(seconds=300)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=wait)
        soak(count, f"{folder}/run", rank, torch_comm(timeout=300))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    Path(folder, f"said-{rank}").write_text(json.dumps(text))
    os._exit(0)


def hold(count):
    """Soak alone and on four ranks; return a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        status, said = in_child(soak, count, folder)
        alone = Row("saves and loads, alone", count, (said or str(status),) if status else ())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run").mkdir()
        wrong = tuple(on_ranks(count, folder))
    return [alone, Row("saves and loads, on 4 ranks", count, wrong)]
