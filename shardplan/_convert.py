"""Convert a checkpoint: to another format, to another sharding, to another place."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from shardplan.dist import Comm, solo
from shardplan.io import Pool, ProgressCallback
from shardplan.io.execute import Reader
from shardplan.io.formats import Source, find_format, open_source, open_target
from shardplan.io.stores import Store
from shardplan.planning import Mesh, Passes, SavePlan, counted, fingerprint, human_bytes, listed
from shardplan.planning.storage import parse_size

from ._comm import as_comm, take_step, told_apart
from ._report import Stopwatch, dropped_text, logged, sheet_of, times_text
from ._streaming import Budget, Done, Job
from ._targets import Placements, Target, plan_target

__all__ = ["ConvertReport", "convert", "dcp_to_torch_save", "torch_save_to_dcp"]

_LEAST_MEMORY: Final = 128 << 20
Path = str | os.PathLike[str] | Store


@attrs.frozen(repr=False)
class ConvertReport:
    """What a conversion did.

    Attributes:
        path: Where the new checkpoint lies.
        format: What it is.
        tensors: How many tensors it holds.
        values: How many other values it holds.
        files: How many data files were written, by all processes together.
        bytes_read: Bytes that were read of the old checkpoint.
        bytes_written: Size of the new one's data files.
        verified: How many chunks of the old one were found to fit their checksums.
        seconds: This process's seconds by phase: open, plan, write, commit.
        left_out: Names of values that the format cannot carry.
        tied: Names that share another's elements, and those others. Some formats store them once.
        notes: What was odd about the old checkpoint, and yet no error.
        leftovers: Files of the checkpoint that was replaced which could not be removed.
        dropped: Names in the old checkpoint of what the planner left out.
    """

    path: str
    format: str
    tensors: int
    values: int
    files: int
    bytes_read: int
    bytes_written: int
    verified: int
    seconds: Mapping[str, float]
    left_out: tuple[str, ...] = ()
    tied: Mapping[str, str] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def _told(self) -> str:
        return (
            f"converted {counted(self.tensors, 'tensor')} and {counted(self.values, 'value')} to "
            f"{self.format}: read {human_bytes(self.bytes_read)}, wrote "
            f"{human_bytes(self.bytes_written)} in {counted(self.files, 'file')}"
        )

    @property
    def _remarks(self) -> Iterator[str]:
        if self.left_out:
            names = listed(self.left_out, quote="")
            yield f"left out, as {self.format} holds only tensors: {names}"
        if self.tied:
            pairs = [f"{name} = {kept}" for name, kept in self.tied.items()]
            yield f"tied weights: {listed(pairs, quote='')}"
        yield from dropped_text(self.dropped, "converted")
        yield from self.notes

    def __repr__(self) -> str:
        return "\n".join([f"{self._told}; {times_text(self.seconds)}", *self._remarks])

    def _repr_html_(self) -> str:
        return sheet_of(self._told, self.seconds, notes=self._remarks).html()


def convert(
    src: Path,
    dst: Path,
    *,
    format: str = "safetensors",
    planner: Passes[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_memory: int | str = 1 << 30,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    verify: bool = True,
    progress: ProgressCallback | None = None,
    comm: Comm | None = None,
    pool: Pool | None = None,
) -> ConvertReport:
    """Make a checkpoint of another one, of any format and sharding, in bounded memory.

    Elements stream from the one to the other. The new checkpoint exists whole or not at all: if
    this is killed, call it again. Several processes share the work, if there are any: each writes
    some of the files, and one commits.

    Args:
        src: The checkpoint to read, of any format: a folder, or a file if it is a single one.
        dst: Where to write, on a disk or in an object store.
        format: What to write: see `save`.
        planner: A pass, or a list of them, such as ``[select("model.*"), cast("bfloat16")]``. The
            ranks that passes see are those of ``mesh``, or a single one.
        mesh: The ranks to shard for: files will be as these ranks would have written them. If left
            out, tensors stay cut as they are, or become whole where the format wants it.
        placements: How tensors lie on the mesh: placements for all tensors; or by shell-style
            pattern of their names, where the first that fits counts and other tensors are not cut;
            or a function of name and shape. By default, all are cut along their first axis.
        max_memory: Bytes of memory to use at most, as a number or as ``"2GiB"``, beside what Python
            and torch take themselves; 128 MiB at least, and 64 MiB more for each of the two that is
            in an object store.
        overwrite: Whether a checkpoint that is there may be replaced.
        max_shard_size: The most bytes of a file, as a number or as ``"5GB"``; a tensor that is
            larger has a file to itself. Not for a mesh, nor for ``"torch"``.
        verify: Whether to check every chunk against its checksum, where the old checkpoint has
            any. A chunk that is neither read whole nor in blocks is read once more for that.
        progress: Called with the bytes done and the bytes in all, of this process.
        comm: The processes that share the work; by default all of torch's process group, or this
            one alone.
        pool: The threads that read; by default as many as fit into ``max_memory``.

    Returns:
        What was read and written, what was left out, and how long it took.

    >>> import tempfile, torch
    >>> from shardplan import open_checkpoint, save
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = save({"w": torch.arange(6.0), "step": 7}, f"{folder.name}/a")
    >>> report = convert(f"{folder.name}/a", f"{folder.name}/b", mesh=Mesh(dp=3))
    >>> report.files, open_checkpoint(f"{folder.name}/b").metadata.state_dict_metadata["w"].chunks
    (3, Grid(0:2:4:6))
    >>> report = convert(f"{folder.name}/b", f"{folder.name}/c", format="hf")
    >>> sorted(os.listdir(f"{folder.name}/c")), report.left_out
    (['model.safetensors'], ('step',))
    >>> folder.cleanup()

    Raises:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        FormatError: The old checkpoint is damaged.
        ValueRefusedError: The format cannot carry some tensor or value; all are named.
        PlanError, RefusedError, ValueError: What was asked for makes no correct plan; or
            ``max_memory`` is too little.
        UnsureCommitError: The store failed at the last moment: the new checkpoint may be there
            nevertheless, and nothing of it was removed.
        CheckpointError: With several processes, any of these; it tells where.
    """
    comm = as_comm(comm)
    watch = Stopwatch()
    job: list[Job] = []

    def prepare() -> tuple[str, str]:
        limit = _shard_limit(max_shard_size, format, mesh)
        store, writer = open_target(dst, format)
        with watch.phase("open"):
            source = open_source(src, pool=pool)
            _refuse_same(source, store, writer.file)
        memory = parse_size(max_memory)
        _check_memory(memory, source.store.staging + store.staging)
        with watch.phase("plan"):
            target = plan_target(
                source,
                format,
                planner=planner,
                mesh=mesh,
                placements=placements,
                max_shard_size=limit,
                processes=comm.world_size,
            )
            writer.carry_over(target.tied, source.remarks)
            if comm.rank == comm.coordinator:
                writer.refuse(store, overwrite)
        budget = Budget.of(memory, source.store, store)
        job.append(Job(Reader(source, pool), store, format, writer, target, budget, verify))
        alike = planner is None or comm.world_size == 1
        return secrets.token_hex(6), "" if alike else _digest(target)

    def agreed(offers: list[tuple[str, str]]) -> str:
        apart = told_apart(comm.ranks, [digest for _, digest in offers])
        if apart:
            raise ValueError(
                f"the planner gives processes different plans (digests: {apart}); its passes must "
                "not depend on the process that runs them: `plan.rank` is the rank of the mesh"
            )
        return offers[comm.coordinator][0]

    save_id = take_step(comm, "open", prepare, agreed)
    done = job[0].run(comm, save_id, overwrite, watch, progress, pool)
    report, loud = _report(job[0], done, watch), comm.rank == comm.coordinator
    return logged(report, report.path, loud=loud, left=report.leftovers)


def _digest(target: Target) -> str:
    """Return a short text that differs if what will be written does."""
    parts = [fingerprint(target.metadata), *map(fingerprint, target.plans)]
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()


def _check_memory(max_memory: int, staging: int) -> None:
    least = _LEAST_MEMORY + staging
    if max_memory < least:
        stores = f", and {human_bytes(staging)} for parts on their way to or from object stores"
        raise ValueError(
            f"max_memory is {human_bytes(max_memory)}, and this conversion needs "
            f"{human_bytes(least)} at least: blocks of the file that it writes, and those that it "
            f"reads meanwhile{stores if staging else ''}"
        )


def _shard_limit(size: int | str | None, format: str, mesh: Mesh | None) -> int | None:
    """Return the most bytes of a file, having refused it where it would say nothing."""
    if size is None:
        return None
    if find_format(format).is_file:
        raise ValueError(f"max_shard_size is for several files, and a {format} checkpoint is one")
    if mesh is not None:
        raise ValueError("max_shard_size and mesh exclude each other: a mesh says what is cut how")
    return parse_size(size)


def _refuse_same(source: Source, target: Store, file: str | None) -> None:
    """Refuse to write over what is read; ``file`` is what is written, if it is a single file.

    A single file may lie in the folder that becomes a checkpoint: it stays there.
    """
    if _real(source.store.url) != _real(target.url):
        return
    if file in source.files or (file is None and not find_format(source.format).is_file):
        raise ValueError(f"{target.url} cannot be converted into itself; choose another place")


def _real(url: str) -> str:
    """Return the place that a store's address means, whatever links lead there."""
    return url.rstrip("/") if "://" in url else os.path.realpath(url)


def _report(job: Job, done: Done, watch: Stopwatch) -> ConvertReport:
    entries = job.target.metadata.state_dict_metadata
    tensors, left_out = int((entries.layout >= 0).sum()), job.target.left_out
    return ConvertReport(
        path=job.store.url,
        format=job.format,
        tensors=tensors,
        values=len(entries) - tensors - len(left_out),
        files=done.files,
        bytes_read=done.bytes_read,
        bytes_written=done.nbytes,
        verified=done.verified,
        seconds=dict(watch.seconds),
        left_out=left_out,
        tied=dict(job.target.tied),
        notes=job.reader.source.notes,
        leftovers=done.leftovers,
        dropped=job.target.dropped,
    )


def dcp_to_torch_save(
    dcp_dir: Path, torch_save_path: str | os.PathLike[str], *, comm: Comm | None = None
) -> ConvertReport:
    """Make a single ``torch.save`` file of a DCP checkpoint, nested as it was saved.

    As torch's function of the same name, but in bounded memory.

    Args:
        dcp_dir: The checkpoint; any other format will do as well.
        torch_save_path: The file to write; one that is there is replaced.
        comm: The processes that share the work; by default this one alone, as with torch's
            function: one rank of a job may call it by itself.
    """
    comm = solo() if comm is None else comm
    return convert(dcp_dir, torch_save_path, format="torch", overwrite=True, comm=comm)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_dir: Path, *, comm: Comm | None = None
) -> ConvertReport:
    """Make a DCP checkpoint of a ``torch.save`` file.

    As torch's function of the same name, but in bounded memory, and no code of the file is run.

    Args:
        torch_save_path: The file; any other checkpoint will do as well.
        dcp_dir: The folder to write; a checkpoint that is there is replaced. The file may lie in
            it, and stays there.
        comm: The processes that share the work; by default this one alone, as with torch's
            function: one rank of a job may call it by itself.
    """
    comm = solo() if comm is None else comm
    return convert(torch_save_path, dcp_dir, format="dcp", overwrite=True, comm=comm)
