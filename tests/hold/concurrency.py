"""Do things at the same time, in any order, and interrupt them: it works, or it is refused.

``hold(count)``: so many Ctrl-C at random instants, a state machine with so many runs, and each of
the scenes of `SCENES` a hundredth as often, in a process of its own. Afterwards no thread, no
descriptor and no file is there that was not before.
"""

import contextlib
import math
import mmap
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hypothesis
from common import DOCUMENTED, FORMATS, Row, held, in_child, is_sound, state, target, value_of, warm
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.stores import open_store
from shardplan.io.stores.testing import FaultyStore
from shardplan.planning import cast

# Scenes: each does several things at once in a folder, and raises if something is wrong


def in_threads(*works):
    """Do several things at once; return their errors, of which some are documented."""
    errors = []

    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    strange = [error for error in errors if not isinstance(error, DOCUMENTED)]
    assert not strange, strange
    return errors


def two_saves(folder):
    """Of two saves to one path, one succeeds at least, and what is there is one of them."""
    path = folder / "step-1"
    errors = in_threads(*(lambda v=v: shardplan.save(state(v), path) for v in (1, 2)))
    assert len(errors) == 1
    assert value_of(path) in {1, 2}


def two_overwrites(folder):
    """One of them is there; what the other wrote is reported, and pruned."""
    path = folder / "step-1"
    save = [lambda v=v: shardplan.save(state(v), path, overwrite=True) for v in (1, 2)]
    assert len(in_threads(*save)) < 2
    assert value_of(path) in {1, 2}
    shardplan.prune(path, keep_last=1, min_age=0)


def loads_of_what_is_overwritten(folder):
    """Each load gets one save whole, or an error."""
    path = folder / "step-1"
    shardplan.save(state(0), path)

    def save():
        for value in range(1, 6):
            shardplan.save(state(value), path, overwrite=True)

    def load():
        for _ in range(8):
            with contextlib.suppress(*DOCUMENTED):
                value_of(path)

    in_threads(save, load, load)
    assert value_of(path) == 5


def prunes_of_what_is_loaded(folder):
    for step in range(1, 5):
        shardplan.save(state(step), folder / f"step-{step}")

    def load(step):
        with contextlib.suppress(*DOCUMENTED):
            assert value_of(folder / f"step-{step}") == step

    loads = [lambda s=s: load(s) for s in range(1, 5)]
    in_threads(lambda: shardplan.prune(folder, keep_last=1, min_age=0), *loads)
    assert value_of(folder / "step-4") == 4


def tensors_that_change(folder):
    """What is saved in the background is as it was when it was saved."""
    held = {name: tensor.clone() for name, tensor in state(0).items()}
    saves = []
    for step in range(6):
        for tensor in held.values():
            tensor.fill_(step)
        saves.append(shardplan.async_save(held, folder / f"step-{step}"))
    for step, save in enumerate(saves):
        save.result()
        assert value_of(folder / f"step-{step}") == step


def fork_after_use(folder):
    """A child that was forked saves and loads, too."""
    shardplan.async_save(state(1), folder / "a").result()

    def child():
        assert value_of(folder / "a") == 1
        shardplan.save(state(2), folder / "b")
        shardplan.async_save(state(3), folder / "c").result()

    status, said = in_child(child)
    assert status == 0, said
    assert [value_of(folder / name) for name in "bc"] == [2, 3]


def fork_while_saving(folder):
    """A child that was forked during a save in the background leaves that alone."""
    saving = shardplan.async_save(state(1), folder / "a")
    status, said = in_child(lambda: shardplan.save(state(2), folder / "b"))
    assert status == 0, said
    saving.result()
    assert [value_of(folder / name) for name in "ab"] == [1, 2]


def spawn(folder):
    code = "import sys, torch, shardplan; shardplan.save({'w': torch.ones(2)}, sys.argv[1])"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(folder / "a")], check=False)
    assert done.returncode == 0
    is_sound(folder / "a")


def many_threads(folder):
    """Threads save, load and convert checkpoints of their own."""

    def work(number):
        path = folder / f"step-{number}"
        shardplan.save(state(number), path)
        shardplan.convert(path, folder / f"made-{number}", format="dcp")
        assert value_of(folder / f"made-{number}") == number

    assert not in_threads(*(lambda n=n: work(n) for n in range(8)))


def callbacks(folder):
    """A callback that saves and loads, and one that raises."""

    def again(done, total):
        if not (folder / "inner").exists():
            shardplan.save(state(2), folder / "inner")
            value_of(folder / "inner")

    def stop(done, total):
        raise KeyError("stop")

    shardplan.save(state(1), folder / "a", progress=again)
    with contextlib.suppress(KeyError):
        shardplan.save(state(3), folder / "a", overwrite=True, progress=stop)
    assert [value_of(folder / name) for name in ("a", "inner")] == [1, 2]


SCENES = (two_saves, two_overwrites, loads_of_what_is_overwritten, prunes_of_what_is_loaded)
SCENES += (tensors_that_change, fork_after_use, fork_while_saving, spawn, many_threads, callbacks)


def play(scene):
    """Play a scene in a child that has warmed up; return what is wrong, if anything."""

    def child():
        with tempfile.TemporaryDirectory() as folder:
            warm_up(folder)
            before = held()
            scene(Path(folder))
            settle(before)
            nothing_is_left(folder)

    status, said = in_child(child)
    return said or f"ended with {status}" if status else ""


def warm_up(folder):
    """Have the threads and files that last be there before anything is counted."""
    for number in range(2):
        shardplan.async_save(state(1), Path(folder, f"first-{number}")).result()
        value_of(Path(folder, f"first-{number}"))


def settle(before):
    """Check that a process holds what it held, at the latest after some seconds."""
    end = time.monotonic() + 10
    while (now := held()) != before and time.monotonic() < end:
        time.sleep(0.02)
    threads, files = now
    new = [x for x in threads if x not in before[0]], [x for x in files if x not in before[1]]
    assert new == ([], []), f"threads {new[0]} and descriptors {new[1]} are left"


def nothing_is_left(folder):
    """Check that no file is left that belongs to no checkpoint."""
    for path in [Path(folder), *Path(folder).iterdir()]:
        if path.is_dir():
            left = shardplan.prune(path, keep_last=99, min_age=0, dry_run=True).leftovers
            assert not left, f"{left} of {path.name} are left"


# Ctrl-C


def interruptible(folder):
    """Return what a process is interrupted in, by name."""
    old, new = folder / "old", folder / "new"
    into = state(0)
    return {
        "save": lambda: shardplan.save(state(2), new),
        "overwrite": lambda: shardplan.save(state(2), old, overwrite=True),
        "load": lambda: shardplan.load(into, old),
        "restore": lambda: value_of(old),
        "convert": lambda: shardplan.convert(old, new, format="torch"),
        "async": lambda: shardplan.async_save(state(2), new).result(),
        "verify": lambda: shardplan.verify(old),
        "prune": lambda: shardplan.prune(folder, keep_last=1, min_age=0),
        "ranks": lambda: run_ranks(2, lambda comm: shardplan.save(state(2), new, comm=comm)),
    }


def interrupt(name, instant, hits):
    """Interrupt a process at an instant, a share of the time that it takes; count if it hits."""

    def child():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            warm_up(folder)
            shardplan.save(state(1), root / "old")
            trial = root / "trial"
            shutil.copytree(root / "old", trial / "old")
            begun = time.monotonic()
            interruptible(trial)[name]()
            seconds = time.monotonic() - begun
            before = held()
            alarm(seconds * instant)
            with contextlib.suppress(*DOCUMENTED):
                try:
                    interruptible(root)[name]()
                except KeyboardInterrupt:
                    hits[0] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            whole_after(root)
            settle(before)

    status, said = in_child(child)
    return said or f"ended with {status}" if status else ""


def alarm(seconds):
    """Interrupt this process once, as Ctrl-C does."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def whole_after(root):
    """Check that what is there after an interrupt is whole, and that the next save works."""
    shardplan.async_save(state(3), root / "next").result()
    assert value_of(root / "next") == 3
    allowed = {"old": {1, 2}, "new": {1, 2}}
    for path in [root / "old", root / "new"]:
        try:
            shardplan.open_checkpoint(path)
        except DOCUMENTED:
            assert path.name == "new", "the old checkpoint is lost"
            continue
        assert value_of(path) in allowed[path.name]
    shardplan.prune(root, keep_last=9, min_age=0)
    for path in (root / "old", root / "new"):
        if path.is_dir():
            shardplan.prune(path, keep_last=1, min_age=0)


# A state machine


class Machine(RuleBasedStateMachine):
    """Saves, loads, converts, prunes and crashes, against a model: which values may be where."""

    paths = Bundle("paths")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.model = {}  # by name: the values of which one must be there; None for nothing

    def teardown(self):
        shutil.rmtree(self.folder)

    @rule(number=st.integers(1, 5), ranks=st.integers(1, 3), value=st.integers(0, 99))
    def save(self, number, ranks, value):
        name = f"step-{number}"

        def part(comm):
            whole = state(value)
            mine = {key: whole[key] for key in sorted(whole)[comm.rank :: ranks]}
            shardplan.save(mine, self.folder / name, comm=comm, overwrite=True)

        run_ranks(ranks, part)
        self.model[name] = {value}

    @rule(number=st.integers(1, 5), value=st.integers(0, 99))
    def save_without_overwriting(self, number, value):
        name = f"step-{number}"
        known = self.model.get(name, {None})
        try:
            shardplan.save(state(value), self.folder / name)
        except FileExistsError:
            assert known != {None}
        else:
            assert None in known
            self.model[name] = {value}

    @rule(number=st.integers(1, 5), value=st.integers(0, 99), at=st.integers(0, 9))
    def crash(self, number, value, at):
        name = f"step-{number}"
        store = FaultyStore(open_store(self.folder / name), fail_at=at, mode="stop")
        try:
            shardplan.save(state(value), store, overwrite=True)
            self.model[name] = {value}
        except DOCUMENTED:
            self.model[name] = self.model.get(name, {None}) | {value}

    @rule(number=st.integers(1, 5), ranks=st.integers(1, 3))
    def load(self, number, ranks):
        name = f"step-{number}"
        if name not in self.model:
            return

        def part(comm):
            mine = {key: value * 0 - 1 for key, value in state(0).items()}
            shardplan.load(mine, self.folder / name, comm=comm)
            return {float(v) for tensor in mine.values() for v in tensor.unique()}

        try:
            (found,) = set(map(frozenset, run_ranks(ranks, part)))
        except DOCUMENTED:
            assert None in self.model[name]
            self.model[name] = {None}
            return
        assert found <= self.model[name]
        assert len(found) == 1
        self.model[name] = set(found)

    @rule(number=st.integers(1, 5), form=st.sampled_from(FORMATS))
    def convert(self, number, form):
        name = f"step-{number}"
        self.load(number, 1)
        if self.model.get(name, {None}) == {None}:
            return
        made = target(self.folder / "made", form)
        made.parent.mkdir(exist_ok=True)
        with contextlib.suppress(IsADirectoryError, NotADirectoryError):
            shutil.rmtree(made, ignore_errors=True)
        options = {} if form == "hf" else {"planner": cast("float64")}
        shardplan.convert(self.folder / name, made, format=form, overwrite=True, **options)
        assert {value_of(made)} == self.model[name]

    @rule(keep=st.integers(1, 4))
    def prune(self, keep):
        for number in range(1, 6):
            self.load(number, 1)
        whole = {name for name, values in self.model.items() if values != {None}}
        report = shardplan.prune(self.folder, keep_last=keep, min_age=0)
        assert len(report.kept) == min(keep, len(whole))
        assert set(report.kept) | set(report.removed) == whole
        for name in report.removed:
            self.model[name] = {None}

    @rule()
    def latest(self):
        found = shardplan.latest(self.folder)
        if found is None:
            assert all(None in values for values in self.model.values())
        elif Path(found).name in self.model:
            assert value_of(Path(found)) in self.model[Path(found).name]


def run_machine(runs):
    """Run the state machine so often; return what is wrong, if anything."""
    checks = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=runs, stateful_step_count=20, deadline=None, database=None,
        suppress_health_check=checks,
    )  # fmt: skip

    def child():
        run_state_machine_as_test(Machine, settings=settings)

    status, said = in_child(child)
    return said or f"ended with {status}" if status else ""


def hold(count, seed=0):
    """Interrupt, play all scenes and run the machine; return rows."""
    warm()
    chance, rows = random.Random(seed), []
    names = list(interruptible(Path()))
    trials, hits = (
        [(names[i % len(names)], chance.random()) for i in range(count)],
        mmap.mmap(-1, 4096),
    )
    counts = memoryview(hits).cast("q")
    faults = [(name, at, interrupt(name, at, counts)) for name, at in trials]
    wrong = tuple(f"{name} at {at:.0%}: {fault}" for name, at, fault in faults if fault)
    rows.append(Row("Ctrl-C at random instants", count, wrong, f"{counts[0]} hit the call"))
    often = math.ceil(count / 100)
    for scene in SCENES:
        wrong = tuple(filter(None, (play(scene) for _ in range(often))))
        rows.append(Row(scene.__name__.replace("_", " "), often, wrong))
    fault = run_machine(count)
    rows.append(Row("runs of a state machine, of 20 steps", count, (fault,) if fault else ()))
    return rows
