"""Convert a checkpoint: to another format, to another sharding, to another place."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.dist import Comm, Turn, solo, take_step
from shardplan.io import FormatError, Pool, ProgressCallback
from shardplan.io.execute import Copied, Copies, stored_chunks, write_copies
from shardplan.io.formats import (
    CommitJob,
    ExtraFiles,
    Part,
    Source,
    find_format,
    open_source,
    open_target,
    read_as,
)
from shardplan.io.stores import Location, Store
from shardplan.planning import (
    Mesh,
    Passes,
    SavePlan,
    counted,
    fingerprint,
    human_bytes,
    listed,
    ranks_by_value,
)
from shardplan.planning.passes import Reading, reading_of
from shardplan.planning.storage import (
    CopyBudget,
    Placements,
    Target,
    copy_budget,
    parse_size,
    plan_target,
    share_plans,
)

from ._checkpoint import Checkpoint, source_of
from ._comm import as_comm
from ._report import Stopwatch, Timed, logged
from ._save import surely_failed

if TYPE_CHECKING:
    from shardplan.planning import PlannerTrace

_LEAST_MEMORY: Final = 128 << 20


@attrs.frozen(repr=False)
class ConvertReport(Timed):
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
        tied: Names of tied tensors, each with the name that it shares; some formats store one.
        notes: Oddities of the old checkpoint that are not errors.
        leftovers: Files of the checkpoint that was replaced which could not be removed.
        dropped: Names in the old checkpoint of what the planner left out.
        trace: What each pass of the planner did, with ``trace=True``.
        carried: Files that were put beside the tensors: a config, a tokenizer.
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
    trace: PlannerTrace | None = None
    carried: tuple[str, ...] = ()

    _verb = "converted"

    @property
    def _title(self) -> str:
        return (
            f"converted {counted(self.tensors, 'tensor')} and {counted(self.values, 'value')} to "
            f"{self.format}: read {human_bytes(self.bytes_read)}, wrote "
            f"{human_bytes(self.bytes_written)} in {counted(self.files, 'file')}"
        )

    @property
    def _notes(self) -> list[str]:
        ties = [f"{name} = {kept}" for name, kept in self.tied.items()]
        lists = {
            f"left out, as {self.format} holds only tensors": self.left_out,
            "tied weights": ties,
            "put beside the tensors": self.carried,
        }
        own = [f"{what}: {listed(names, quote='')}" for what, names in lists.items() if names]
        return [*own, *super()._notes, *self.notes]


def convert(
    src: Location | Checkpoint,
    dst: Location,
    *,
    format: str = "safetensors",
    planner: Passes[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_memory: int | str = 1 << 30,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    extra_files: ExtraFiles | None = None,
    verify: bool = True,
    progress: ProgressCallback | None = None,
    comm: Comm | None = None,
    pool: Pool | None = None,
    trace: bool = False,
) -> ConvertReport:
    """Convert a checkpoint to any format and sharding, in bounded memory.

    The new checkpoint exists whole or not at all: if this is killed, call it again. If there are
    several processes, each writes some of the files, and one commits.

    Args:
        src: The checkpoint to read, of any format: a folder, or a file if it is a single one; or
            an open one, or a sum of these such as ``0.7 * a + 0.3 * b`` (`shardplan.merging`).
        dst: Where to write, on a disk or in an object store.
        format: What to write: see `save`.
        planner: A pass, or a list of them, such as ``[select("model.*"), cast("bfloat16")]``, from
            the old checkpoint's names and shapes to the new one's. Passes see the ranks of
            ``mesh``, or a single one. `dequantize` reads a quantised model as if it were not.
        mesh: The ranks to shard for: files will be as these ranks would have written them. If left
            out, tensors stay cut as they are, or become whole where the format wants it.
        placements: How tensors lie on the mesh: placements for all tensors; or by shell-style
            pattern of names: the first that fits counts, and other tensors are not cut;
            or a function of name and shape. By default, all are cut along their first axis.
        max_memory: The most bytes to use beside Python and torch, such as ``"2GiB"``; 128 MiB at
            least, and 64 MiB more for each of ``src`` and ``dst`` that is in an object store.
        overwrite: Whether a checkpoint that is there may be replaced.
        max_shard_size: The most bytes of a file, such as ``"5GB"``; a larger tensor has a file to
            itself. Not for a mesh, nor for ``"torch"``.
        extra_files: As in `save`; they replace what is carried over from ``"hf"`` to ``"hf"``.
        verify: Whether to check every chunk against its checksum, where there is one.
        progress: Called with the bytes done and the bytes in all, of this process.
        comm: The processes that share the work; by default all of torch's process group, or this
            one alone.
        pool: The threads that read; by default as many as fit into ``max_memory``.
        trace: Whether to report what each pass of ``planner`` does, as `show` prints it.

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
        UnsureCommitError: The store failed at the last moment: the new checkpoint may be there.
        CheckpointError: With several processes, any of these; it names the ranks that failed.
    """
    ranks, watch = as_comm(comm), Stopwatch()
    call = _Call(
        src, dst, format, reading_of(planner), mesh, placements, max_memory, overwrite,
        max_shard_size, extra_files, verify, progress, ranks, pool, trace, watch,
    )  # fmt: skip
    opened = take_step(ranks, "open", partial(_prepare, call), partial(_agree, ranks))
    task = _AgreedConversion(call, opened.mine, opened.reply)
    done = take_step(ranks, "convert", task.write, task.commit, undo=task.discard).reply
    report = _report(format, opened.mine, done, watch)
    return logged(report, report.path, loud=ranks.rank == ranks.coordinator, left=report.leftovers)


@attrs.frozen(eq=False)
class _Call:
    """The arguments of a `convert`; see there."""

    src: Location | Checkpoint
    dst: Location
    format: str
    reading: Reading
    mesh: Mesh | None
    placements: Placements | None
    max_memory: int | str
    overwrite: bool
    max_shard_size: int | str | None
    extra_files: ExtraFiles | None
    verify: bool
    progress: ProgressCallback | None
    comm: Comm
    pool: Pool | None
    trace: bool
    watch: Stopwatch


@attrs.frozen(eq=False)
class _Plan:
    """What to write, and how to copy it."""

    target: Target
    copies: Copies


def _prepare(call: _Call) -> Turn[_Plan]:
    """Open both checkpoints and plan; offer an id for the save, and a digest of the plan."""
    limit, into = _shard_limit(call), find_format(call.format)
    options = {} if call.extra_files is None else {"extra_files": call.extra_files}
    store, writer = open_target(call.dst, call.format, **options)
    with call.watch.phase("open"):
        source = read_as(_opened(call), call.reading)
        for part in source.parts if source.expression is not None else (source,):
            _refuse_same(part, store, writer.file)
    budget = _budget(parse_size(call.max_memory), source.store.staging, store.staging)
    with call.watch.phase("plan"):
        stored = stored_chunks(source)
        target = plan_target(
            source.metadata,
            into,
            stored,
            planner=call.reading.planner,
            mesh=call.mesh,
            placements=call.placements,
            max_shard_size=limit,
            processes=call.comm.world_size,
            trace=call.trace,
        )
        writer = writer.carrying(target.tied, source.remarks)
        writer = writer if source.beside is None else writer.with_files(source.beside)
        if call.comm.rank == call.comm.coordinator:
            writer.refuse(store, call.overwrite)
    whole = into.whole_tensors
    copies = Copies(source, stored, target.plans, store, writer, budget, call.verify, whole)
    is_compared = call.reading.planner is not None and call.comm.world_size > 1
    digest = _digest(target) if is_compared else ""
    return Turn(_Plan(target, copies), (secrets.token_hex(6), digest))


def _opened(call: _Call) -> Source:
    if isinstance(call.src, Checkpoint):
        return source_of(call.src)
    return open_source(call.src, pool=call.pool)


def _digest(target: Target) -> str:
    """Return a digest of what will be written."""
    prints = [fingerprint(target.metadata), *map(fingerprint, target.plans)]
    return hashlib.blake2b(" ".join(prints).encode(), digest_size=6).hexdigest()


def _agree(comm: Comm, offers: list[tuple[str, str]]) -> Turn[None]:
    """Return the id of the save, if all processes have the same plans."""
    apart = ranks_by_value(comm.ranks, [digest for _, digest in offers])
    if apart:
        raise ValueError(
            f"the planner gives processes different plans (digests: {apart}); its passes must "
            "not depend on the process that runs them: `plan.rank` is the rank of the mesh"
        )
    return Turn(None, offers[comm.coordinator][0])


@attrs.frozen(eq=False)
class _AgreedConversion:
    """This process's share of a conversion that all have agreed on."""

    call: _Call
    plan: _Plan
    save_id: str

    def write(self) -> Turn[Copied]:
        """Write this process's share of the files."""
        comm, call, copies = self.call.comm, self.call, self.plan.copies
        share = share_plans(self.plan.target.plans, comm.world_size)[comm.rank]
        with call.watch.phase("write"), _pointing_at_verify(copies.source):
            copied = write_copies(copies, share, self.save_id, call.progress, call.pool)
        parts = [(number, attrs.astuple(part)) for number, part in copied.parts.items()]
        sent = {"parts": parts, "bytes_read": copied.bytes_read, "verified": copied.verified}
        return Turn(copied, sent)

    def commit(self, shares: list[dict[str, Any]]) -> Turn[None]:
        """Make a checkpoint of what all processes wrote; return what they did together."""
        target, copies = self.plan.target, self.plan.copies
        parts = {n: Part(*fields) for share in shares for n, fields in share["parts"]}
        reports = [parts[n].report for n in range(len(target.plans))]
        store, overwrite = copies.store, self.call.overwrite
        with self.call.watch.phase("commit"):
            left = copies.writer.commit(
                CommitJob(store, target.metadata, target.plans, reports, self.save_id, overwrite)
            )
        total = {
            "files": sum(part.files for part in parts.values()),
            "bytes_written": sum(part.nbytes for part in parts.values()),
            "bytes_read": sum(share["bytes_read"] for share in shares),
            "verified": sum(share["verified"] for share in shares),
            "leftovers": left,
            "carried": copies.writer.extra_names(),
        }
        return Turn(None, total)

    def discard(self, copied: Copied, error: BaseException) -> None:
        """Remove what this process wrote, if the conversion has certainly failed."""
        for part in copied.parts.values() if surely_failed(error) else ():
            self.plan.copies.writer.discard(self.plan.copies.store, part.report, self.save_id)


def _budget(max_memory: int, reading: int, writing: int) -> CopyBudget:
    """Divide the memory, given what object stores buffer to read and write; refuse too little."""
    staging = reading + writing
    least = _LEAST_MEMORY + staging
    if max_memory < least:
        stores = f", and {human_bytes(staging)} for parts on their way to or from object stores"
        raise ValueError(
            f"max_memory is {human_bytes(max_memory)}, but this conversion needs "
            f"{human_bytes(least)}, for the blocks that it reads and writes at a time"
            f"{stores if staging else ''}"
        )
    files = (os.cpu_count() or 1) + 2  # more files at once gain nothing
    return copy_budget(max_memory, read_staging=reading, write_staging=writing, max_files=files)


def _shard_limit(call: _Call) -> int | None:
    """Return the most bytes of a file; refuse a limit where it has no meaning."""
    size = call.max_shard_size
    if size is None:
        return None
    if find_format(call.format).is_file:
        text = f"max_shard_size is for several files, and a {call.format} checkpoint is one"
        raise ValueError(text)
    if call.mesh is not None:
        raise ValueError(
            "max_shard_size and mesh exclude each other: a mesh says how tensors are cut"
        )
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
    """Return the address of a store, with links resolved."""
    return url.rstrip("/") if "://" in url else os.path.realpath(url)


@contextmanager
def _pointing_at_verify(source: Source) -> Iterator[None]:
    """Point to `verify` in errors: a conversion ends at the first damage that it finds."""
    try:
        yield
    except FormatError as error:
        more = f"to see all that is damaged, verify {source.store.url}"
        raise FormatError(error.file, f"{error.reason}; {more}") from error


def _report(format: str, plan: _Plan, done: Mapping[str, Any], watch: Stopwatch) -> ConvertReport:
    target, copies = plan.target, plan.copies
    entries = target.metadata.state_dict_metadata
    tensors = int((entries.layout >= 0).sum())
    return ConvertReport(
        path=copies.store.url,
        format=format,
        tensors=tensors,
        values=len(entries) - tensors - len(target.left_out),
        seconds=dict(watch.seconds),
        left_out=target.left_out,
        tied=dict(target.tied),
        notes=copies.source.notes,
        dropped=target.dropped,
        trace=target.trace,
        **{**done, **{key: tuple(done[key]) for key in ("leftovers", "carried")}},
    )


def dcp_to_torch_save(
    dcp_dir: Location, torch_save_path: str | os.PathLike[str], *, comm: Comm | None = None
) -> ConvertReport:
    """Make a ``torch.save`` file of a DCP checkpoint, as torch does, but in bounded memory.

    Checkpoints of any format will do. A file that is there is replaced. By default, this process
    works alone, as with torch's function.
    """
    return convert(dcp_dir, torch_save_path, format="torch", overwrite=True, comm=comm or solo())


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_dir: Location, *, comm: Comm | None = None
) -> ConvertReport:
    """Make a DCP checkpoint of a ``torch.save`` file, as torch does, but in bounded memory.

    No code of the file is run. Checkpoints of any format will do. A checkpoint that is there is
    replaced. By default, this process works alone, as with torch's function.
    """
    return convert(torch_save_path, dcp_dir, format="dcp", overwrite=True, comm=comm or solo())
