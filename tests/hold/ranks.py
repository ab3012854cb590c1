"""Let a rank of three fail in each phase: the others name it in time, and nothing is lost.

``hold(count)``: so many of all pairs of a phase, a rank and a fault, in order of chance. Ranks are
processes of a gloo group; see ``tests/ranks/faults.py``. A process that is slow, or whose clock is
wrong, is no fault: all succeed.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from common import Row, held, is_sound

import shardplan

SCRIPT = Path(__file__).parents[1] / "ranks" / "faults.py"
HARMLESS = ("slow", "fast clock", "late clock")
HOWS = ("raise", "kill", "stop", "stall", *HARMLESS)
BATCH = 6  # groups at the same time


def module():
    """Import the script of the ranks."""
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def cases(faults):
    """Return every phase with every rank and every fault."""
    phases = (*faults.SAVES, *faults.LOADS, *faults.BACKGROUND, *faults.TRANSFERS)
    made = [(phase, rank, how) for phase in phases for rank in range(3) for how in HOWS]
    made += [("write", rank, how) for rank in range(3) for how in ("full", "read-only")]
    only_coordinator = [case for case in made if "commit" in case[0] and case[1] != 0]
    made = [case for case in made if case not in only_coordinator]
    # A store that is a file grows beyond what a process with a full disk may write.
    return [f"{p}:{r}:{h}:{'tcp' if h == 'full' else 'file'}" for p, r, h in made]


def run(folder, chosen):
    """Run a few groups at the same time."""
    command = [sys.executable, "-P", str(SCRIPT), folder, *chosen]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return "the ranks hang"
    return done.stderr[-2000:] if done.returncode else ""


def judge(faults, case, folder):
    """Return what is wrong about a case, if anything."""
    _phase, victim, how, _store = case.split(":")
    victim, fatal = int(victim), how in ("kill", "stop", "exit")
    said = {int(f.name[5:]): json.loads(f.read_text()) for f in folder.glob("told-*")}
    alive = {rank for rank in range(faults.WORLD) if not fatal or rank != victim}
    happens = happened(said, victim, alive)
    if set(said) != alive:
        return f"of the ranks {sorted(alive)}, {sorted(said)} ended"
    if how in HARMLESS or not happens:
        wrong = {rank: found for rank, found in said.items() if not found.get("returned")}
        return f"ranks failed: {wrong}" if wrong else ""
    for rank, found in said.items():
        if found.get("named") != [victim]:
            return f"rank {rank} names {found}"
        if rank != victim and found["seconds"] > faults.TIMEOUT + 2 + LATE:
            return f"rank {rank} raises after {found['seconds']:.1f} s"
    return lost(faults, case, folder / "checkpoint")


LATE = 10  # seconds that a busy machine may take for what is not waiting


def happened(said, victim, alive):
    """Return False if the victim never came to the phase, as none that shares no reads sends."""
    return not (victim in alive and all(found.get("returned") for found in said.values()))


def lost(faults, case, path):
    """Return what is wrong about the checkpoint after a fault, if anything."""
    saved, late = shardplan.restore(path)["part"], "commit" in case and "stall" in case
    for rank in range(faults.WORLD):
        for name, value in (faults.new(rank) if late else faults.old(rank)).items():
            if not torch.equal(saved[name], value):
                return f"{name} of rank {rank} is neither old nor new"
    is_sound(path)
    shardplan.save({"w": torch.arange(6.0)}, path, overwrite=True)
    shardplan.prune(path, keep_last=1, min_age=0)
    is_sound(path)
    left = [f.name for f in path.iterdir() if f.name != "shardplan.json"]
    return f"{left} are left" if len(left) > 1 else ""


def hold(count, seed=0):
    """Run so many cases; return a row for each fault."""
    faults = module()
    every = cases(faults)
    if count < 50:
        every = [case for case in every if ":stall:" not in case]  # which takes longest
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    before, tried, wrong = held(), Counter(), {}
    for at in range(0, len(chosen), BATCH):
        batch = chosen[at : at + BATCH]
        with tempfile.TemporaryDirectory() as folder:
            failed = run(folder, batch)
            for case in batch:
                how = case.split(":")[2]
                tried[how] += 1
                fault = failed or guarded(faults, case, Path(folder, case))
                wrong.setdefault(how, []).extend([f"{case}: {fault}"] if fault else [])
    assert held() == before
    note = f"of {len(every)} cases"
    return [Row(f"a rank of 3: {how}", n, tuple(wrong[how]), note) for how, n in tried.items()]


def guarded(faults, case, folder):
    """Return what is wrong, an error included."""
    try:
        return judge(faults, case, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
