"""Damage checkpoints in every way: the damage is found, or what is read is what was saved.

Each mutation harms a copy of a checkpoint in one place. Then `verify` must find a fault, or
`restore` must give the very bits that were saved; and `restore` must give these bits or raise a
documented error. Hugging Face files have no checksums: there, names and elements that changed in
place are counted apart. A manifest that was edited and signed again may say something else, as its
author's: what `verify` finds sound must then load, and no tensor may have other bits under its own
name.
"""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from common import DOCUMENTED, FORMATS, Row, same
from fuzzing import edit_json

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.formats.native.manifest import MANIFEST, sign

WHERE = ("start", "header", "middle", "any", "end")
HOW = ("flip", "flip", "zero", "truncate", "grow", "sparse", "remove", "empty", "swap", "exchange")
HOW += ("chunks",)
SIGNED = "safetensors, manifest signed again"


def state():
    """Make tensors of several sizes and dtypes, and values."""
    generator = torch.Generator().manual_seed(7)
    tensors = {f"w{i}": torch.rand(40 + i, 33, generator=generator) for i in range(4)}
    twins = {f"twin{i}": torch.full((64,), float(i)) for i in range(4)}
    return (
        tensors
        | twins
        | {
            "half": torch.rand(100, generator=generator).to(torch.bfloat16),
            "whole": torch.arange(999),
        }
    )


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
    elif how == "chunks":
        swap_chunks(chance, file, data)
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


def swap_chunks(chance, file, data):
    """Have two tensors of one length change places in a safetensors file."""
    if file.suffix != ".safetensors":
        return
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    pairs = [(a, b) for a in spans for b in spans if a < b and a[1] - a[0] == b[1] - b[0]]
    if pairs:
        (a, b), (c, d) = chance.choice(pairs)
        first = slice(begin + a, begin + b)
        second = slice(begin + c, begin + d)
        data[first], data[second] = data[second], data[first]


def sign_again(chance, path):
    """Edit a manifest, and give it a right checksum; return in words what was done."""
    file = path / MANIFEST
    tree = json.loads(file.read_bytes())
    version = [tree.pop(key) for key in ("format", "version", "xxh3_64")][1]
    edited, what = edit_json(chance.choice, tree)
    file.write_bytes(sign(json.dumps(edited).encode()[1:], version))
    return what


def judge_signed(path, wanted):
    """Return what is wrong about how a manifest that was signed again is taken, if anything."""
    try:
        is_sound = shardplan.verify(path).ok
    except DOCUMENTED:
        is_sound = False
    try:
        found = shardplan.restore(path)
    except DOCUMENTED as error:
        return f"verify finds it sound, restore says: {error}" if is_sound else ""
    changed = [
        name
        for name, tensor in wanted.items()
        if name in found
        and isinstance(found[name], torch.Tensor)
        and (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        and not same(found[name], tensor)
    ]
    return f"{changed} have other elements" if changed else ""


def sizes(path):
    """Return the size of each file."""
    return {file.name: file.stat().st_size for file in files_of(path)}


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


def sound(root, form):
    """Make a sound checkpoint to be harmed."""
    folder = Path(root) / form
    folder.mkdir()
    made = make(folder, form)
    assert judge(made, state()) == ""
    return made


def hold(mutations, formats=FORMATS, seed=0):
    """Damage that often; return a row for each format, and one for manifests signed again."""
    done = mutations // (len(formats) + 1)
    with tempfile.TemporaryDirectory(prefix="harm-") as root:
        made = {form: sound(root, form) for form in formats}
        rows = [damage(root, form, path, done, seed) for form, path in made.items()]
        return [*rows, forge(root, made["safetensors"], done, seed)]


def damage(root, form, sound, count, seed):
    """Harm copies of a checkpoint."""
    chance, wrong, unseen, wanted = random.Random(f"{seed} {form}"), [], 0, state()
    for _ in range(count):
        path = copy_of(sound, root)
        before = sizes(path)
        what = harm(chance, path)
        fault = judge(path, wanted)
        if fault and form == "hf" and sizes(path) == before:
            unseen += 1
        elif fault:
            wrong.append(f"{what}: {fault}")
    note = f"{unseen} of names and elements without checksums" * bool(unseen)
    return Row(form, count, tuple(wrong), note)


def forge(root, sound, count, seed):
    """Edit manifests of copies of a checkpoint, and sign them again."""
    chance, wrong = random.Random(seed), []
    for _ in range(count):
        path = copy_of(sound, root)
        what = sign_again(chance, path)
        fault = judge_signed(path, state())
        wrong += [f"{what}: {fault}"] * bool(fault)
    return Row(SIGNED, count, tuple(wrong))


def copy_of(sound, root):
    """Copy a checkpoint to where the last copy was."""
    folder = Path(root) / "harmed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound.parent, folder)
    return folder / sound.name
