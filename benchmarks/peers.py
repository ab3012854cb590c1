"""Save and load speed beside other libraries: each job run by all of them in turn, bits compared.

    make bench-peers
    python -P benchmarks/peers.py --job save --gib 1 --rounds 5 --folder /tmp
    python -P benchmarks/peers.py --table

A job adds its medians to build/peers.json; `--table` writes them to docs/performance.md. Peers that
are not installed are named and left out. Saves end with an fsync of each file and folder. New
tensors are touched, page by page, within the time: a mapped file is not loaded before that.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardplan

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "build" / "peers.json", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
OURS, RAW, LIMIT = "shardplan", "raw", "limit"
TENSORS = 32
OWN_SIZE = ("small", "many", "start")  # jobs whose size is not `--gib`


@attrs.frozen
class Peer:
    """A library: functions that save, fill tensors that exist, and make new ones, if it can.

    `new` returns the tensors, and what owns their memory.
    """

    save: object = None
    load: object = None
    new: object = None


def state_dict(gib, count=TENSORS):
    rows = max(int(gib * 2**30) // 4 // count // 1024, 1)
    shape = (rows, 1024) if gib else (32, 32)
    bits = np.random.default_rng(0).integers(0, 2**32, (count, *shape), np.uint32)
    return {f"layers.{i}.weight": torch.from_numpy(one.view("f4")) for i, one in enumerate(bits)}


def copy_into(target, state):
    for name, tensor in state.items():
        target[name].copy_(tensor)


def own(state):
    return state, None


# The libraries


def our_peers():
    def load(target, path):
        shardplan.load(target, path)

    return {
        OURS: Peer(shardplan.save, load, lambda p: own(shardplan.restore(p))),
        f"{OURS}, unverified": Peer(
            None,
            lambda t, p: shardplan.load(t, p, verify=False),
            lambda p: own(shardplan.restore(p, verify=False)),
        ),
        f"{OURS}, mmap": Peer(new=lambda p: own(shardplan.restore(p, mmap=True))),
        f"{OURS}, mmap, verified": Peer(
            new=lambda p: own(shardplan.restore(p, mmap=True, verify=True))
        ),
    }


def our_torch_peers():
    def save(sd, path):
        shardplan.save(sd, path / "a.pt", format="torch")

    return {
        f"{OURS}, torch format": Peer(
            save,
            lambda t, p: shardplan.load(t, p / "a.pt"),
            lambda p: own(shardplan.restore(p / "a.pt")),
        )
    }


def torch_peers():
    def save(sd, path):
        path.mkdir()
        torch.save(sd, path / "a.pt")

    def read(path, mmap=True):
        return torch.load(path / "a.pt", weights_only=True, mmap=mmap)

    def dcp_save(sd, path):
        dcp.save(sd, storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True)

    def dcp_load(target, path):
        dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)

    def dcp_new(path):
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        target = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in known.items()}
        dcp_load(target, path)
        return own(target)

    return {
        "torch.save": Peer(
            save, lambda t, p: copy_into(t, read(p)), lambda p: own(read(p, mmap=False))
        ),
        "torch.load(mmap)": Peer(new=lambda p: own(read(p))),
        "torch DCP": Peer(dcp_save, dcp_load, dcp_new),
    }


def safetensors_peers():
    def read(path):
        return {
            k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()
        }

    def save(sd, path):
        path.mkdir()
        save_file(sd, path / "a.safetensors")

    return {"safetensors": Peer(save, lambda t, p: copy_into(t, read(p)), lambda p: own(read(p)))}


def fastsafetensors_peers():
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def new(path):
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, disable_cache=False)
        loader.add_filenames({0: [str(file) for file in sorted(path.glob("*.safetensors"))]})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, (loader, buffers)

    return {"fastsafetensors": Peer(new=new)}


def runai_peers():
    from runai_model_streamer import SafetensorsStreamer

    def new(path):
        streamer = SafetensorsStreamer().__enter__()
        streamer.stream_files([str(file) for file in sorted(path.glob("*.safetensors"))])
        return dict(streamer.get_tensors()), streamer

    return {"Run:ai streamer": Peer(new=new)}


def tensorizer_peers():
    from tensorizer import TensorDeserializer, TensorSerializer

    def save(sd, path):
        path.mkdir()
        writer = TensorSerializer(str(path / "a.tensors"))
        writer.write_state_dict(sd)
        writer.close()

    def new(path):
        reader = TensorDeserializer(str(path / "a.tensors"), device="cpu")
        return dict(reader.items()), reader

    return {"tensorizer": Peer(save, None, new)}


def orbax_peers():
    import orbax.checkpoint as ocp

    def new(path):
        found = ocp.PyTreeCheckpointer().restore(path)
        return own({name: torch.from_numpy(np.asarray(one)) for name, one in found.items()})

    def save(sd, path):
        ocp.PyTreeCheckpointer().save(path, {name: one.numpy() for name, one in sd.items()})

    return {"Orbax": Peer(save, None, new)}


def tensorstore_peers():
    import tensorstore as ts

    def spec(path):
        return {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}

    def write(path, tensor):
        shape = list(tensor.shape)
        meta = {"shape": shape, "chunks": shape, "dtype": "<f4", "compressor": None}
        return ts.open(spec(path) | {"metadata": meta}, create=True).result().write(tensor.numpy())

    def save(sd, path):
        for done in [write(path / name, tensor) for name, tensor in sd.items()]:
            done.result()

    def new(path):
        opened = {name: ts.open(spec(path / name)) for name in os.listdir(path)}
        reads = {name: one.result().read() for name, one in opened.items()}
        return own({name: torch.from_numpy(one.result()) for name, one in reads.items()})

    return {"TensorStore": Peer(save, None, new)}


def torch_checkpointing_peers():
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which fails on this disk
    config = {"save": SyncCheckpointSaverConfig(), "storage_config": storage}
    manager = CheckpointManager(CheckpointManager.Config(**config))

    def save(sd, path):
        manager.save(str(path), {"model": sd})

    def load(target, path):
        manager.load(str(path), into={"model": target})

    return {"torch_checkpointing": Peer(save, load)}


FAMILIES = (
    our_peers,
    our_torch_peers,
    safetensors_peers,
    torch_peers,
    fastsafetensors_peers,
    runai_peers,
    tensorizer_peers,
    orbax_peers,
    tensorstore_peers,
    torch_checkpointing_peers,
)


def peers():
    """Return the libraries by name; name those that are not installed."""
    found = {}
    for family in FAMILIES:
        try:
            found |= family()
        except ImportError as error:
            print(f"left out: {family.__name__.removesuffix('_peers')} ({error})")
    return found


# The machine's own speed


def raw_save(sd, path):
    path.mkdir()
    with open(path / "raw", "wb", buffering=0) as file:
        file.writelines(tensor.numpy().data for tensor in sd.values())


def raw_load(target, path):
    """Read with two threads, half of the tensors each."""
    with open(path / "raw", "rb") as file, ThreadPoolExecutor(2) as threads:
        views = [memoryview(tensor.numpy()).cast("B") for tensor in target.values()]
        starts = np.cumsum([0, *map(len, views)]).tolist()
        jobs = [
            threads.submit(os.preadv, file.fileno(), [v], at)
            for v, at in zip(views, starts, strict=False)
        ]
        assert all(job.result() for job in jobs)


def raw_new(path):
    whole = torch.from_numpy(np.memmap(path / "raw", "f4", "c"))
    return own({"all": whole})


# Measuring


def sync(path):
    for file in [path, *path.rglob("*")]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def forget(path):
    """Drop a folder's files from the page cache."""
    for file in (one for one in path.rglob("*") if one.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def touch(state):
    return sum(int(t.reshape(-1).view(torch.uint8)[::4096].sum()) for t in state.values())


def release(owner):
    for one in owner if isinstance(owner, tuple) else (owner,):
        for end in (getattr(one, "close", None), getattr(one, "__exit__", None)):
            if end is not None:
                end() if end.__name__ == "close" else end(None, None, None)
                break


def differs(state, sd):
    return [n for n in sd if not torch.equal(state[n].view(torch.int32), sd[n].view(torch.int32))]


def seconds(work, *args):
    start = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - start, result


def in_turn(works, rounds, before=lambda name: None):
    """Return the seconds of each work, turn by turn; the first turn warms up."""
    times = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            before(name)
            times[name].append(seconds(work)[0])
    return {name: values[1:] for name, values in times.items()}


def save_all(sd, folder, found):
    """Save with every library that saves; return the folder of each that can read some."""
    where = {}
    for name, peer in found.items():
        if peer.save is not None:
            where[name] = folder / name.replace(" ", "-").replace(":", "")
            peer.save(sd, where[name])
    where |= {name: where[OURS] for name in found if name.startswith(OURS) and name not in where}
    where |= {"torch.load(mmap)": where["torch.save"]}
    raw_save(sd, folder / RAW)
    sync(folder)
    return where


def measure_save(args, folder):
    sd, found = state_dict(args.gib), peers()
    ways = {name: peer.save for name, peer in found.items() if peer.save} | {RAW: raw_save}

    def run(name):
        ways[name](sd, folder / "x")
        sync(folder / "x")

    def before(name):
        shutil.rmtree(folder / "x", ignore_errors=True)
        os.sync()

    return in_turn({name: lambda name=name: run(name) for name in ways}, args.rounds, before)


def loads(sd, where, found, before, rounds, raw):
    """Fill tensors that exist."""
    target = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
    works = {
        name: lambda name=name: found[name].load(target, where[name])
        for name in where
        if found[name].load
    }
    for name, work in works.items():
        for tensor in target.values():
            tensor.zero_()
        work()
        assert not differs(target, sd), f"{name} loads other bits"
    works[RAW] = lambda: raw_load(target, raw)
    other = {name: torch.ones_like(tensor) for name, tensor in sd.items()}
    works[LIMIT] = lambda: copy_into(other, target)
    return in_turn(works, rounds, before)


def news(sd, where, found, before, rounds, raw):
    """Make new tensors, and touch each page of them."""

    def run(make, path):
        state, owner = make(path)
        touch(state)
        return state, owner

    times = {}
    ways = {name: (found[name].new, where[name]) for name in where if found[name].new}
    for turn in range(rounds + 1):
        for name, (make, path) in (ways | {RAW: (raw_new, raw)}).items():
            before(name)
            took, (state, owner) = seconds(run, make, path)
            if not turn and name != RAW:
                assert not differs(state, sd), f"{name} makes other bits"
            del state
            release(owner)
            times.setdefault(name, []).append(took)
    return {name: values[1:] for name, values in times.items()}


def measure_own_format(how):
    def measure(args, folder):
        sd, found = state_dict(args.gib), peers()
        where = save_all(sd, folder, found)
        return how(sd, where, found, lambda name: None, args.rounds, folder / RAW)

    return measure


def measure_hf(how, cold=False):
    """Read the same four Hugging Face files with whatever reads these."""

    def measure(args, folder):
        sd, found = state_dict(args.gib), peers()
        nbytes = sum(tensor.nbytes for tensor in sd.values())
        shardplan.save(sd, folder / "one")
        options = {"format": "hf", "max_shard_size": nbytes // 4 + 4096}
        shardplan.convert(folder / "one", folder / "hf", **options)
        raw_save(sd, folder / RAW)
        readers = ("safetensors", "fastsafetensors", "Run:ai streamer")
        where = {n: folder / "hf" for n in found if n in readers or n.startswith(OURS)}
        where.pop(f"{OURS}, torch format")
        before = (lambda name: forget(folder)) if cold else (lambda name: None)
        return how(sd, where, found, before, args.rounds, folder / RAW)

    return measure


def measure_small(count):
    """Move many tensors of 4 KiB, each library in its own format."""

    def measure(args, folder):
        sd, found = state_dict(0, count), peers()
        found = {name: peer for name, peer in found.items() if peer.save and name not in SLOW}
        where = save_all(sd, folder, found)
        target = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
        saved = in_turn(
            {n: lambda n=n: found[n].save(sd, folder / "x") for n in found},
            args.rounds,
            lambda name: shutil.rmtree(folder / "x", ignore_errors=True),
        )
        works = {n: lambda n=n: found[n].load(target, where[n]) for n in found if found[n].load}
        loaded = in_turn(works, args.rounds)
        return {f"save|{n}": v for n, v in saved.items()} | {
            f"load|{n}": v for n, v in loaded.items()
        }

    return measure


SLOW = ("Orbax", "TensorStore", "tensorizer", "torch_checkpointing")  # with many tensors: minutes


def measure_slices(args, folder):
    """Read an eighth of each tensor: some rows, and some columns."""
    sd, found = state_dict(args.gib), our_peers() | safetensors_peers()
    where = save_all(sd, folder, {**found, **torch_peers()})
    rows = next(iter(sd.values())).shape[0]
    boxes = {"rows": np.s_[: rows // 8], "columns": np.s_[:, 128:256]}

    def theirs(box):
        with safe_open(where["safetensors"] / "a.safetensors", "pt") as file:
            return {name: file.get_slice(name)[box].clone() for name in sd}

    def mapped(box):
        state = torch.load(where["torch.save"] / "a.pt", weights_only=True, mmap=True)
        return {name: one[box].clone() for name, one in state.items()}

    def ours(box):
        opened = shardplan.open_checkpoint(where[OURS])
        return {name: opened[name][box] for name in sd}

    def ours_mapped(box):
        opened = shardplan.open_checkpoint(where[OURS]).tensors()
        return {name: opened[name][box].clone() for name in sd}

    ways = {"safetensors": theirs, "torch.load(mmap)": mapped, OURS: ours}
    ways[f"{OURS}, mmap"] = ours_mapped
    for box in boxes.values():
        right = {name: tensor[box].contiguous() for name, tensor in sd.items()}
        assert not any(differs(way(box), right) for way in ways.values())
    works = {
        f"{label}|{name}": lambda way=way, box=box: way(box)
        for label, box in boxes.items()
        for name, way in ways.items()
    }
    return in_turn(works, args.rounds)


CONVERSIONS = {
    "DCP to torch.save": ("dcp", "x.pt", "torch"),
    "DCP to Hugging Face": ("dcp", "x", "hf"),
    "Hugging Face to torch.save": ("hf", "x.pt", "torch"),
}


def measure_conversions(args, folder):
    """Convert, each in a fresh process, whose most memory counts beyond that of the imports."""
    sd = state_dict(args.gib)
    shardplan.save(sd, folder / "dcp", format="dcp")
    shardplan.save(sd, folder / "hf", format="hf")
    del sd
    times = {}
    for _ in range(args.rounds):
        for label in CONVERSIONS:
            for name in (OURS, "torch"):
                shutil.rmtree(folder / "x", ignore_errors=True)
                (folder / "x.pt").unlink(missing_ok=True)
                command = [sys.executable, "-P", __file__, "--folder", str(folder)]
                command += ["--convert", label, "--contender", name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                took, rise = map(float, done.stdout.split())
                times.setdefault(f"{label}|{name}", []).append(took)
                times.setdefault(f"{label}, GiB of memory|{name}", []).append(rise)
    return times


def convert(label, contender, folder):
    """Convert once, and print the seconds and the GiB of memory."""
    source, target, format = CONVERSIONS[label]
    before = peak_kib()

    def theirs():
        file = folder / "x.pt"
        if label == "DCP to torch.save":
            dcp_to_torch_save(folder / source, file)
        elif source == "dcp":
            dcp_to_torch_save(folder / source, file)
            save_file(torch.load(file, weights_only=True, mmap=True), folder / "y.safetensors")
            sync(folder / "y.safetensors")
        else:
            torch.save(safetensors_peers()["safetensors"].new(folder / source)[0], file)
        sync(file)

    def ours():
        shardplan.convert(folder / source, folder / target, format=format)

    took, _ = seconds(ours if contender == OURS else theirs)
    print(took, (peak_kib() - before) / 2**20)


def peak_kib():
    """Return this process's most memory; `ru_maxrss` would count the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1])


def measure_async(args, folder):
    """Save while multiplying matrices: what the save blocks, and what the loop takes longer."""
    sd = state_dict(args.gib)
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def loop(seconds_long=2.0):
        steps, end = 0, time.perf_counter() + seconds_long
        while time.perf_counter() < end:
            a @ b
            steps += 1
        return steps

    def theirs(path):
        writer = dcp.FileSystemWriter(path, thread_count=2, sync_files=True)
        return dcp.async_save(sd, storage_writer=writer, no_dist=True)

    ways = {
        OURS: lambda path: shardplan.async_save(sd, path),
        f"{OURS}, process": lambda path: shardplan.async_save(sd, path, process=True),
        "torch DCP": theirs,
    }
    times = {}
    for _ in range(args.rounds + 1):
        for name, way in ways.items():
            shutil.rmtree(folder / "x", ignore_errors=True)
            alone = loop()
            blocked, future = seconds(way, folder / "x")
            during = loop()
            future.result()
            times.setdefault(f"blocked|{name}", []).append(blocked)
            times.setdefault(f"slowdown of the loop, ×|{name}", []).append(alone / during)
    return {name: values[1:] for name, values in times.items()}


def measure_start(args, folder):
    """Load 50 small tensors in a fresh process."""
    sd = state_dict(0, 50)
    where = save_all(sd, folder, our_peers() | safetensors_peers() | torch_peers())
    codes = {
        RAW: "import torch",
        OURS: f"import torch, shardplan; shardplan.restore({str(where[OURS])!r})",
        "safetensors": "import torch; from safetensors.torch import load_file; "
        f"load_file({str(where['safetensors'] / 'a.safetensors')!r})",
        "torch DCP": "import torch; import torch.distributed.checkpoint as d; "
        f"r = d.FileSystemReader({str(where['torch DCP'])!r}); m = r.read_metadata(); "
        "s = {n: torch.empty(t.size) for n, t in m.state_dict_metadata.items()}; "
        "d.load(s, storage_reader=r, no_dist=True)",
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    run = lambda code: subprocess.run(  # noqa: E731
        [sys.executable, "-P", "-W", "ignore", "-c", code], check=True, env=environment
    )
    return in_turn({n: lambda c=c: run(c) for n, c in codes.items()}, args.rounds)


JOBS = {
    "save": ("save, with fsync", measure_save),
    "load": ("load into existing tensors", measure_own_format(loads)),
    "new": ("new tensors, touched", measure_own_format(news)),
    "hf-load": ("Hugging Face files into existing tensors", measure_hf(loads)),
    "hf-new": ("Hugging Face files as new tensors", measure_hf(news)),
    "cold-load": (
        "Hugging Face files into existing tensors, cold cache",
        measure_hf(loads, cold=True),
    ),
    "cold-new": ("Hugging Face files as new tensors, cold cache", measure_hf(news, cold=True)),
    "small": ("10,000 tensors of 4 KiB", measure_small(10_000)),
    "many": ("100,000 tensors of 4 KiB", measure_small(100_000)),
    "slices": ("an eighth of each tensor", measure_slices),
    "convert": ("convert", measure_conversions),
    "async": ("async save", measure_async),
    "start": ("a fresh process that loads 50 tensors", measure_start),
}


# Results


def keep(job, args, times):
    """Add a job's figures to the file of results."""
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {n: [statistics.median(v), min(v), max(v)] for n, v in times.items()}
    known[job] = {"gib": args.gib, "rounds": args.rounds, "rows": rows}
    RESULTS.write_text(json.dumps(known, indent=1))
    for name, (middle, low, high) in rows.items():
        print(f"{job:10} {name:45} {middle:8.3f} ({low:.3f} to {high:.3f})", flush=True)


def write_table():
    """Write the results to the page, slowest last within each job."""
    known = json.loads(RESULTS.read_text())
    lines = ["| job | library | median, s | spread | × ours | × raw |", "|---|---|---|---|---|---|"]
    for job, (title, _) in JOBS.items():
        parts = {}
        for name, row in known.get(job, {}).get("rows", {}).items():
            label, _, who = name.rpartition("|")
            parts.setdefault(label, {})[who] = row
        for label, rows in parts.items():
            size = "" if job in OWN_SIZE else f"{known[job]['gib']:g} GiB"
            lines += table_rows(": ".join(filter(None, (title, size, label))), rows)
    text = f"{where_text(known)}\n\n" + "\n".join(lines)
    page = PAGE.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page))


def table_rows(title, rows):
    """Return the lines of one job."""
    ours, raw = rows[OURS][0], rows.get(RAW, [None])[0]
    for name, (middle, low, high) in sorted(rows.items(), key=lambda row: row[1][0]):
        bold = f"**{name}**" if name.startswith(OURS) else name
        share = f"{middle / raw:.2f}" if raw else ""
        spread = f"{low:.3f} to {high:.3f}"
        yield f"| {title} | {bold} | {middle:.3f} | {spread} | {middle / ours:.2f} | {share} |"


def where_text(known):
    """Say when and where the figures come from."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    names = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "tensorizer")
    names += ("orbax-checkpoint", "tensorstore", "torch_checkpointing")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rounds = " or ".join(map(str, sorted({job["rounds"] for job in known.values()})))
    cores = f"{os.cpu_count()} cores of {processor[1] if processor else platform.machine()}"
    system = f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    versions = ", ".join(f"{name} {version(name)}" for name in names if has(name))
    text = (
        f"{datetime.now(UTC):%d %B %Y}, {cores}, {memory:.0f} GiB of memory, {system}; medians of "
        f"{rounds} rounds, {TENSORS} tensors where nothing else is said. Versions: {versions}."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False)


def has(name):
    try:
        return bool(version(name))
    except ModuleNotFoundError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS, action="append", help="all if left out")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--convert", choices=CONVERSIONS, help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.convert:
        convert(args.convert, args.contender, args.folder)
        return
    for job in () if args.table else args.job or JOBS:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            keep(job, args, JOBS[job][1](args, Path(folder)))
    if args.table or not args.job:
        write_table()


if __name__ == "__main__":
    main()
