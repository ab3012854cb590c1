"""Damage checkpoints in every way: the damage is found, or what is read is what was saved.

Run as ``corruption.py MUTATIONS [FORMAT ...]``. A checkpoint is made of several files in each format;
each mutation harms a copy of it in one place. Then `verify` must find a fault, or `restore` must give
the very bits that were saved; and `restore` must give these bits or raise a documented error.
"""

import os
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.errors import FormatError, LoadError
from shardplan.io.stores.base import StoreError
from shardplan.planning import PlanError
from shardplan.planning.errors import RefusedError

DOCUMENTED = (FormatError, LoadError, PlanError, RefusedError, StoreError)
FORMATS = ("safetensors", "dcp", "hf", "torch")
WHERE = ("start", "header", "middle", "any", "end")
HOW = ("flip", "flip", "zero", "truncate", "grow", "sparse", "remove", "empty", "swap", "exchange")


def state():
    """Make tensors of several sizes and dtypes, and values."""
    generator = torch.Generator().manual_seed(7)
    tensors = {f"w{i}": torch.rand(40 + i, 33, generator=generator) for i in range(4)}
    return tensors | {
        "half": torch.rand(100, generator=generator).to(torch.bfloat16),
        "whole": torch.arange(999),
    }


def make(folder, form):
    """Save the state in a format, by two ranks where it takes several files."""
    whole = state()
    if form == "torch":
        shardplan.save(whole, folder / "m.pt", format=form)
        return folder / "m.pt"

    def part(comm):
        mine = {name: whole[name] for name in sorted(whole)[comm.rank :: 2]}
        options = {} if form == "hf" else {"overwrite": True}
        shardplan.save(mine, folder / "ckpt", format=form, comm=comm, **options)

    run_ranks(2, part)
    return folder / "ckpt"


def files_of(path):
    """Name the files of a checkpoint."""
    return sorted([path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()])


def place(chance, size):
    """Choose a byte of a file: its ends and its header are chosen more often than their size says."""
    match chance.choice(WHERE):
        case "start":
            return chance.randrange(min(16, size))
        case "header":
            return chance.randrange(min(1200, size))
        case "middle":
            return size // 2
        case "end":
            return size - 1 - chance.randrange(min(80, size))
        case _:
            return chance.randrange(size)


def harm(chance, path):
    """Damage a checkpoint in one place; return in words what was done."""
    files = files_of(path)
    file, how = chance.choice(files), chance.choice(HOW)
    data = bytearray(file.read_bytes())
    at = place(chance, len(data))
    if how == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif how == "zero":
        end = at + chance.choice([1, 8, 100])
        data[at:end] = bytes(len(data[at:end]))
    elif how == "truncate":
        del data[at:]
    elif how == "grow":
        data += bytes(chance.choice([1, 8, 4096]))
    elif how == "empty":
        data.clear()
    elif how == "exchange":  # two stretches of a file change places
        other, length = place(chance, len(data)), chance.choice([1, 8, 64])
        a, b = sorted((at, other))
        if a + length <= b and b + length <= len(data):
            data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    if how == "remove":
        file.unlink()
    elif how == "sparse":
        os.truncate(file, 64 << 30)
    elif how == "swap" and len(files) > 1:
        other = chance.choice([one for one in files if one != file])
        theirs = other.read_bytes()
        other.write_bytes(data)
        file.write_bytes(theirs)
    else:
        file.write_bytes(data)
    return f"{how} of {file.name} at byte {at:,}"


def same(found, wanted):
    """Say whether what was read is bit for bit what was saved."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name])
        for name in wanted
    )


def judge(path, wanted):
    """Return what is wrong about how a damaged checkpoint is taken, if anything."""
    try:
        is_sound = shardplan.verify(path).ok
    except DOCUMENTED:
        is_sound = False
    try:
        is_same = same(shardplan.restore(path), wanted)
    except DOCUMENTED as error:
        return f"verify finds it sound, restore says: {error}" if is_sound else ""
    if is_same:
        return ""
    return "verify finds it sound, and its values are others" if is_sound else "restore gives others"


def hold(mutations, formats=FORMATS, seed=0):
    """Damage that often; return rows of (format, mutations, found, what went wrong)."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="harm-") as root:
        for form in formats:
            chance, wrong, found = random.Random(f"{seed} {form}"), [], 0
            sound = Path(root) / form
            sound.mkdir()
            made, wanted = make(sound, form), state()
            assert judge(made, wanted) == ""
            for _ in range(mutations // len(formats)):
                folder = Path(root) / "harmed"
                shutil.copytree(sound, folder)
                path = folder / made.name
                before = {p.name: p.read_bytes() for p in files_of(path)}
                what = harm(chance, path)
                after = {p.name: p.stat().st_size for p in files_of(path)}
                found += after != {n: len(b) for n, b in before.items()} or any(
                    (path if path.is_file() else path / n).read_bytes() != b
                    for n, b in before.items()
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fault = judge(path, wanted)
                if fault:
                    wrong.append(f"{form}, {what}: {fault}")
                shutil.rmtree(folder)
            rows.append((form, mutations // len(formats), found, wrong))
    return rows


def main(mutations, *formats):
    """Print a line per format; end with an error if damage was taken for something else."""
    rows = hold(int(mutations), formats or FORMATS)
    for form, done, changed, wrong in rows:
        print(f"{form:12} {done:6,} mutations, {changed:,} changed a byte, {len(wrong)} wrong")
    faults = [fault for *_, wrong in rows for fault in wrong]
    print(*faults[:20], sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
