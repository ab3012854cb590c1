"""What the parts of the harness share: a row of the table, child processes, documented errors."""

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import attrs
import torch

import shardplan
from shardplan.dist import CheckpointError
from shardplan.io.errors import ExistsError, FormatError, LoadError, ValueRefusedError
from shardplan.io.stores.base import StoreError
from shardplan.planning import PlanError
from shardplan.planning.errors import CodecError, NotFoundError, RefusedError

FORMATS = ("safetensors", "dcp", "hf", "torch")
DOCUMENTED = (
    *(FormatError, LoadError, PlanError, RefusedError, StoreError, CheckpointError),
    *(ValueRefusedError, ExistsError, CodecError, NotFoundError),
)


@attrs.frozen
class Row:
    """A row of the table.

    Attributes:
        what: What was tried.
        tried: How often.
        wrong: What was found, in words.
        note: What else there is to say.
    """

    what: str
    tried: int
    wrong: tuple[str, ...] = ()
    note: str = ""


def state(value):
    """Make a state dict whose every element says which save it is of."""
    tensors = {f"layers.{i}.w": torch.full((64, 33), float(value)) for i in range(3)}
    return tensors | {"bias": torch.full((), float(value))}


def value_of(path):
    """Read all of a checkpoint, and return which save it is of."""
    found = shardplan.restore(path)
    values = {float(v) for tensor in found.values() for v in tensor.unique()}
    assert set(found) == set(state(0)), f"names are lost: {sorted(found)}"
    assert len(values) == 1, f"two saves are mixed: {values}"
    return values.pop()


def target(root, form):
    """Return where a checkpoint of some format lies."""
    return root / ("step-1.pt" if form == "torch" else "step-1")


def is_sound(path):
    report = shardplan.verify(path)
    assert report.ok, str(report)


def same(one, other):
    """Return True if two values are alike in type and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor):
    """Return the bytes of a tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


# What a process holds


def held():
    """Return the threads and the descriptors that this process has, by what they are."""
    threads = sorted(t.name for t in threading.enumerate() if t.name != "shardplan-pool")
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return threads, sorted(link for link in links if not link.startswith("/proc/"))


def resident():
    """Return the bytes of memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Child processes


def warm():
    """Import all that calls import when they are first made, so that children need not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writer, "w") as stream:
            try:
                call_everything()
            finally:
                stream.write("\n".join(sys.modules))
                stream.flush()
                os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        names = stream.read().split()
    os.waitpid(child, 0)
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def call_everything():
    """Save, check, read and convert in every format, and let a manager save."""
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMATS:
            path = target(Path(folder, form), form)
            path.parent.mkdir()
            shardplan.save(state(1), path, format=form)
            is_sound(path)
            value_of(path)
            shardplan.convert(path, f"{folder}/made-{form}", format="dcp")
        shardplan.async_save(state(1), f"{folder}/background").result()
        with shardplan.Checkpoints(f"{folder}/run", every=1) as run:
            run.save(1, state(1)).result()
        shardplan.prune(folder, keep_last=9)


def in_child(work, *args, seconds=None, strike=None):
    """Run in a forked process; return its exit status and what it said went wrong.

    ``strike`` is called with the process after ``seconds``; by default all of its group is killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            work(*args)
            status = 0
        except BaseException:  # reported to the parent
            os.write(writer, traceback.format_exc().encode()[-8000:])
        os._exit(status)
    os.close(writer)
    if seconds is not None:
        time.sleep(seconds)
        (strike or kill_group)(child)
    with open(reader, "rb") as stream:
        said = stream.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def kill_group(child):
    """Kill a process, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def must(work, *args):
    """Run in a forked process, which must succeed."""
    status, said = in_child(work, *args)
    assert status == 0, said or f"ended by signal {-status}"
