"""Kill a process at each of its storage operations: the checkpoint is then the old or the new one.

A child is forked for each kill. It counts what it does to files (opening for writing, writing,
syncing, renaming, deleting, ...), and ends itself by SIGKILL in place of one of them, a write
having been half done. Once each operation had its turn, children are killed at random times, with
the processes that they started. Another child then looks at what is there with shardplan's public
functions. What uses a writer process is killed at random times alone, and so is just that process.
"""

import contextlib
import functools
import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import attrs
import torch
from common import (
    FORMATS,
    Row,
    in_child,
    is_sound,
    kill_group,
    must,
    state,
    target,
    value_of,
    warm,
)

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.errors import FormatError

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"}
WRITES = ("write", "pwrite", "writev", "pwritev")
QUICK = ("overwrite safetensors", "3 ranks overwrite", "convert torch to hf", "prune", "manager")
SYNCS = ("fsync", "fdatasync", "posix_fallocate", "copy_file_range", "sendfile")


# Jobs: what stands before, what is done, and which values may be there afterwards


@attrs.frozen
class Job:
    """What a process does while it is killed."""

    before: object  # makes what stands before, given the folder of the case
    act: object  # does it; done again after the kill, it succeeds
    allowed: object  # given the folder, raises if something is wrong or lost
    after: object  # the same, once it was done again
    strikes: tuple = ()  # how it is struck at random times; empty: at its operations


def nothing(root):
    """Start from an empty folder."""


def one_of(path, *values, may_be_absent):
    """Check that a checkpoint is one of some saves, or absent where it may be."""
    try:
        shardplan.open_checkpoint(path)
    except FormatError:
        assert may_be_absent, f"{path.name} is lost"
        return
    assert value_of(path) in values
    is_sound(path)


def nothing_is_left(root):
    """Check that what killed jobs left is recognised, and goes."""
    before = {path.name for path in root.iterdir()}
    shardplan.prune(root, keep_last=9, min_age=0)
    shown = shardplan.prune(root, keep_last=9, min_age=0, dry_run=True)
    assert not shown.leftovers, f"{shown.leftovers} stayed of {before}"


def save_job(form, old):
    """Save, where nothing is or over an older checkpoint."""

    def before(root):
        if old:
            shardplan.save(state(1), target(root, form), format=form)

    def act(root):
        shardplan.save(state(2), target(root, form), format=form, overwrite=True)

    def allowed(root):
        one_of(target(root, form), *([1, 2] if old else [2]), may_be_absent=not old)
        newest = shardplan.latest(root)
        assert newest is None or value_of(Path(newest)) in {1, 2}

    def after(root):
        one_of(target(root, form), 2, may_be_absent=False)
        nothing_is_left(root)

    return Job(before, act, allowed, after)


def async_job(old, **options):
    """Save in the background."""
    strikes = (kill_group, kill_writer) if options else ()

    def act(root):
        shardplan.async_save(state(2), root / "step-1", overwrite=True, **options).result()

    return attrs.evolve(save_job("safetensors", old), act=act, strikes=strikes)


def kill_writer(child):
    """Kill the writer process that a process has started, if it has."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for started in Path(f"/proc/{child}/task/{child}/children").read_text().split():
            os.kill(int(started), signal.SIGKILL)


def ranks_job(old):
    """Save on three ranks (threads of the killed process), a part each."""
    plain = save_job("safetensors", old)

    def part(comm, root, value):
        whole = state(value)
        names = sorted(whole)[comm.rank :: 3]
        shardplan.save({n: whole[n] for n in names}, root / "step-1", overwrite=True, comm=comm)

    def before(root):
        if old:
            run_ranks(3, lambda comm: part(comm, root, 1))

    return attrs.evolve(
        plain, before=before, act=lambda root: run_ranks(3, lambda comm: part(comm, root, 2))
    )


def convert_job(source, form):
    """Convert a checkpoint into another format."""
    made = f"made{'.pt' if form == 'torch' else ''}"

    def act(root):
        shardplan.convert(target(root, source), root / made, format=form, overwrite=True)

    def allowed(root):
        one_of(target(root, source), 1, may_be_absent=False)
        one_of(root / made, 1, may_be_absent=True)

    def after(root):
        one_of(target(root, source), 1, may_be_absent=False)
        one_of(root / made, 1, may_be_absent=False)
        nothing_is_left(root)

    return Job(
        lambda root: shardplan.save(state(1), target(root, source), format=source),
        act,
        allowed,
        after,
    )


def prune_job():
    """Remove the older two of three checkpoints, and what a killed save left."""

    def before(root):
        for step in (1, 2, 3):
            shardplan.save(state(step), root / f"step-{step}")
            os.utime(root / f"step-{step}" / "shardplan.json", (step, step))

    def act(root):
        shardplan.prune(root, keep_last=1, min_age=0)

    def newest(root):
        path = shardplan.latest(root)
        assert path is not None, "the newest is lost"
        assert value_of(Path(path)) == 3
        for step in (1, 2):
            one_of(root / f"step-{step}", step, may_be_absent=True)

    def after(root):
        newest(root)
        one_of(root / "step-3", 3, may_be_absent=False)
        assert not any((root / f"step-{step}" / "shardplan.json").exists() for step in (1, 2))

    return Job(before, act, newest, after)


def manager_job(background=True):
    """Run a training loop with a manager that keeps the last two."""

    def manager(root):
        keep = shardplan.Keep(last=2)
        return shardplan.Checkpoints(root / "run", every=1, keep=keep, background=background)

    def act(root):
        checkpoints = manager(root)
        held = state(0)
        for step in range(checkpoints.restore(held, default=1), 6):
            checkpoints.save(step, {name: tensor * 0 + step for name, tensor in held.items()})
        checkpoints.wait()

    def allowed(root):
        held = state(0)
        step = manager(root).restore(held, default=1) if (root / "run").exists() else 1
        assert {float(v) for t in held.values() for v in t.unique()} == {float(step - 1)}

    def after(root):
        allowed(root)
        checkpoints = manager(root)
        checkpoints.save(6, state(6))
        checkpoints.wait()
        assert checkpoints.steps() == (5, 6)  # what was being dropped goes with the next save

    strikes = (kill_group,) if background == "process" else ()
    return Job(nothing, act, allowed, after, strikes)


def mixed(value):
    """Make a state dict of which most is always the same."""
    return {**state(0), "trained": torch.full((9,), float(value))}


def is_mixed(path, value):
    """Check that a checkpoint is whole, and of one save."""
    found = shardplan.restore(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in mixed(value).items())
    is_sound(path)


def incremental_job(step):
    """Save what has changed since step 1, beside it or over it; the old one goes later."""

    def act(root):
        shardplan.save(mixed(2), root / step, base=root / "step-1", overwrite=True)

    def allowed(root):
        if step != "step-1":
            is_mixed(root / "step-1", 1)
        elif float(shardplan.open_checkpoint(root / step)["trained"][0]) == 1:
            is_mixed(root / step, 1)
        if step == "step-1" or not (root / step / "shardplan.json").exists():
            return
        is_mixed(root / step, 2)

    def after(root):
        is_mixed(root / step, 2)
        shardplan.prune(root, keep_last=1, min_age=0)
        is_mixed(root / step, 2)
        nothing_is_left(root)

    return Job(lambda root: shardplan.save(mixed(1), root / "step-1"), act, allowed, after)


def incremental_manager_job():
    """Run a training loop whose checkpoints share files, and which keeps the last two."""

    def manager(root):
        keep = shardplan.Keep(last=2)
        return shardplan.Checkpoints(root / "run", every=1, keep=keep, incremental=True)

    def act(root):
        checkpoints = manager(root)
        for step in range(checkpoints.restore(mixed(0), default=1), 6):
            checkpoints.save(step, mixed(step))
        checkpoints.wait()

    def allowed(root):
        held = mixed(0)
        step = manager(root).restore(held, default=1) if (root / "run").exists() else 1
        expected = mixed(step - 1)
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())

    def after(root):
        allowed(root)
        for step in manager(root).steps()[-2:]:
            is_mixed(root / "run" / f"step-{step}", step)

    return Job(nothing, act, allowed, after)


def jobs():
    """Return all jobs by name."""
    made = {
        f"{'overwrite' if old else 'save'} {form}": save_job(form, old)
        for form in FORMATS
        for old in (False, True)
    }
    for old in (False, True):
        made[f"async {'overwrite' if old else 'save'}"] = async_job(old)
        made[f"async process {'overwrite' if old else 'save'}"] = async_job(old, process=True)
        made[f"3 ranks {'overwrite' if old else 'save'}"] = ranks_job(old)
    pairs = itertools.permutations(FORMATS, 2)
    made |= {f"convert {source} to {form}": convert_job(source, form) for source, form in pairs}
    made |= {
        "incremental save": incremental_job("step-2"),
        "incremental overwrite": incremental_job("step-1"),
        "incremental manager": incremental_manager_job(),
    }
    made |= {"prune": prune_job(), "manager": manager_job()}
    return made | {"manager process": manager_job("process"), "manager alone": manager_job(False)}


# Killing


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # other threads go on for a moment: not this one


def count_operations(root, kill_at, count):
    """Have this process count what it does to files below a folder, and die at one of them.

    ``count`` is memory that the parent sees: the number so far.
    """
    numbers = itertools.count()

    def passes():
        number = next(numbers)
        count[0:8] = (number + 1).to_bytes(8, "little")
        return number != kill_at

    def audit(event, args):
        if event == "open":
            path, _mode, flags = args
            changes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not changes or not str(path).startswith(str(root)):
                return
        elif event not in CHANGES:
            return
        if not passes():
            die()

    def half(real, name, fd, data, *more):
        """Do half of a write before dying."""
        if passes():
            return real(fd, data, *more)
        parts = list(data) if name.endswith("v") else [data]
        flat = b"".join(bytes(part) for part in parts)
        torn = flat[: len(flat) // 2]
        real(fd, [torn] if name.endswith("v") else torn, *more)
        return die()

    def whole(real, *args, **options):
        if not passes():
            die()
        return real(*args, **options)

    sys.addaudithook(audit)
    for name in WRITES:
        setattr(os, name, functools.partial(half, getattr(os, name), name))
    for name in SYNCS:
        setattr(os, name, functools.partial(whole, getattr(os, name)))


@attrs.frozen
class Prepared:
    """A job with the folder that it begins with, and how many operations it has."""

    name: str
    job: Job
    folder: Path
    operations: int
    seconds: float


def prepare(name, job, scratch):
    """Make what stands before a job, and count its operations."""
    folder = scratch / "before"
    folder.mkdir(parents=True)
    must(job.before, folder)
    trial = scratch / "trial"
    shutil.copytree(folder, trial)
    count = mmap.mmap(-1, 8)

    def counted():
        count_operations(trial, -1, count)
        job.act(trial)

    begun = time.monotonic()
    must(counted)
    seconds = time.monotonic() - begun
    must(job.after, trial)
    return Prepared(name, job, folder, int.from_bytes(count[:], "little"), seconds)


def kill_once(case, root, kill):
    """Kill a job; return what is wrong, if anything."""
    shutil.copytree(case.folder, root)
    count = mmap.mmap(-1, 8)

    def doomed():
        if kill.at is not None:
            count_operations(root, kill.at, count)
        case.job.act(root)

    try:
        status, said = in_child(doomed, seconds=kill.after, strike=kill.strike)
        its_writer = kill.strike is kill_writer and "WriterProcessError" in said
        if status not in (0, -signal.SIGKILL) and not its_writer:
            return f"it failed where it should have been killed:\n{said}"
        status, said = in_child(look_and_go_on, case.job, root)
        return f"afterwards:\n{said or status}" if status else ""
    finally:
        shutil.rmtree(root)


def look_and_go_on(job, root):
    """Look at what a killed process left, and do its job again."""
    job.allowed(root)
    job.act(root)
    job.after(root)


@attrs.frozen
class Kill:
    """When and how a job is killed: at an operation, or after some seconds."""

    at: int | None = None
    after: float | None = None
    strike: object = None


def choose(cases, kills, chance):
    """Choose pairs of a job and how to kill it: each operation once, then any time."""
    counted = [case for case in cases if not case.job.strikes]
    points = [(case, Kill(at)) for case in counted for at in range(case.operations)]
    chosen = chance.sample(points, min(len(points), kills - len(cases) + len(counted)))
    # A writer process takes seconds to start: each is struck once at least, and seldom.
    timed = [case for case in cases if case.job.strikes]
    while len(chosen) < kills:
        case = timed.pop() if timed else chance.choice(counted or cases)
        strike = chance.choice(case.job.strikes or (kill_group,))
        chosen.append((case, Kill(None, chance.uniform(0, case.seconds), strike)))
    return chosen


def hold(kills, names=(), seed=0):
    """Kill that many times; return a row for each job."""
    chance, wrong = random.Random(seed), {}
    warm()
    with tempfile.TemporaryDirectory(prefix="hold-") as folder:
        known = jobs()
        names = names or (QUICK if kills < 100 else ())
        cases = [
            prepare(name, known[name], Path(folder) / str(i))
            for i, name in enumerate(names or known)
        ]
        for number, (case, kill) in enumerate(choose(cases, kills, chance)):
            fault = kill_once(case, Path(folder) / f"kill-{number}", kill)
            when = f"{kill.after:.4f} s" if kill.at is None else f"operation {kill.at}"
            found = f"killed at {when}: {fault}" if fault else ""
            wrong.setdefault(case.name, []).append(found)
    operations = {case.name: case.operations for case in cases}
    return [
        Row(name, len(found), tuple(filter(None, found)), f"{operations[name]} operations")
        for name, found in sorted(wrong.items())
    ]
