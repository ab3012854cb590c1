"""Damage checkpoints in every way: the damage is found, or what is read is what was saved.

Run as ``corruption.py MUTATIONS [FORMAT ...]``. Each mutation harms a copy of a checkpoint in one
place. Then `verify` must find a fault, or `restore` must give the very bits that were saved; and
`restore` must give these bits or raise a documented error. Hugging Face files have no checksums:
there, elements that changed in place are counted apart.
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
    """Choose a byte of a file, its ends and its header more often than their size says."""
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


def only_elements(path, before):
    """Say whether nothing but bytes of tensors changed in a safetensors file."""
    after = {file.name: file.read_bytes() for file in files_of(path)}
    if after.keys() != before.keys():
        return False
    for name, data in after.items():
        old = before[name]
        header = (
            8 + int.from_bytes(old[:8], "little") if name.endswith(".safetensors") else len(old)
        )
        if len(data) != len(old) or data[:header] != old[:header]:
            return False
    return True


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
    return (
        "verify finds it sound, and its values are others" if is_sound else "restore gives others"
    )


def hold(mutations, formats=FORMATS, seed=0):
    """Damage that often; return rows of (format, mutations, unseen by design, what went wrong)."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="harm-") as root:
        for form in formats:
            chance, wrong, unseen = random.Random(f"{seed} {form}"), [], 0
            sound = Path(root) / form
            sound.mkdir()
            made, wanted = make(sound, form), state()
            assert judge(made, wanted) == ""
            done = mutations // len(formats)
            for _ in range(done):
                folder = Path(root) / "harmed"
                shutil.copytree(sound, folder)
                path = folder / made.name
                before = {file.name: file.read_bytes() for file in files_of(path)}
                what = harm(chance, path)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fault = judge(path, wanted)
                if fault and form == "hf" and only_elements(path, before):
                    unseen += 1
                elif fault:
                    wrong.append(f"{form}, {what}: {fault}")
                shutil.rmtree(folder)
            rows.append((form, done, unseen, wrong))
    return rows


def main(mutations, *formats):
    """Print a line per format; end with an error if damage was taken for something else."""
    rows = hold(int(mutations), formats or FORMATS)
    for form, done, unseen, wrong in rows:
        apart = f" ({unseen} of elements without checksums)" * bool(unseen)
        print(f"{form:12} {done:6,} mutations{apart}, {len(wrong)} wrong")
    faults = [fault for *_, wrong in rows for fault in wrong]
    print(*faults[:20], sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
