"""Convert a checkpoint: to another format, to another sharding, to another place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io.ahead import BATCH_BYTES, DEPTH, Ahead, Box, Lender
from shardplan.io.errors import UnsureCommitError
from shardplan.io.hf_write import HfWriter, parse_size
from shardplan.io.pieces import Kept, boxes_of
from shardplan.io.pool import Pool
from shardplan.io.progress import Progress, Tell
from shardplan.io.proof import Proof
from shardplan.io.read import Reader, ReadStats
from shardplan.io.sources import Source, open_source
from shardplan.io.stores import Store
from shardplan.io.writers import Part, Writer, open_target
from shardplan.planning import Mesh, Pass, SavePlan
from shardplan.planning.text import counted, human_bytes

from .ranks import default_comm, take_step
from .reports import Stopwatch
from .targets import Placements, Target, nbytes_of, plan_target, write_order

__all__ = ["ConvertReport", "convert", "dcp_to_torch_save", "torch_save_to_dcp"]

_LEAST_MEMORY: Final = 128 << 20
_FILE: Final = 96 << 20  # memory that a file in the making takes: blocks on their way to the store
_FILES: Final = (os.cpu_count() or 1) + 2  # more files at once gain nothing
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

    def __repr__(self) -> str:
        times = ", ".join(f"{phase} {time:.3f} s" for phase, time in self.seconds.items())
        lines = [
            f"converted {counted(self.tensors, 'tensor')} and {counted(self.values, 'value')} to "
            f"{self.format}: read {human_bytes(self.bytes_read)}, wrote "
            f"{human_bytes(self.bytes_written)} in {counted(self.files, 'file')}; {times}"
        ]
        if self.left_out:
            lines.append(f"left out, as {self.format} holds only tensors: {_some(self.left_out)}")
        if self.tied:
            pairs = [f"{name} = {kept}" for name, kept in self.tied.items()]
            lines.append(f"tied weights: {_some(pairs)}")
        return "\n".join([*lines, *self.notes])


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def convert(
    src: Path,
    dst: Path,
    *,
    format: str = "safetensors",
    planner: Pass[SavePlan] | None = None,
    mesh: Mesh | None = None,
    placements: Placements | None = None,
    max_memory: int = 1 << 30,
    overwrite: bool = False,
    max_shard_size: int | str | None = None,
    verify: bool = True,
    progress: Tell | None = None,
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
        format: What to write: see `shardplan.io.writers.WRITERS`.
        planner: A pass over the plan, such as ``chain(select("model.*"), cast("bfloat16"))``.
        mesh: The ranks to shard for: files will be as these ranks would have written them. If left
            out, tensors stay cut as they are, or become whole where the format wants it.
        placements: How tensors lie on the mesh: placements for all tensors; or by shell-style
            pattern of their names, where the first that fits counts and other tensors are not cut;
            or a function of name and shape. By default, all are cut along their first axis.
        max_memory: Bytes of memory to use at most, beside what Python and torch take themselves.
        overwrite: Whether a checkpoint that is there may be replaced.
        max_shard_size: The most bytes of a file, as a number or as ``"5GB"``; a tensor that is
            larger has a file to itself. Not for a mesh.
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
        PlanError, RefusedError, ValueError: What was asked for makes no correct plan.
        CheckpointError: With several processes, any of these; it tells where.
    """
    if max_memory < _LEAST_MEMORY:
        raise ValueError(
            f"a conversion needs {human_bytes(_LEAST_MEMORY)}, and max_memory is "
            f"{human_bytes(max_memory)}"
        )
    comm = default_comm() if comm is None else comm
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    watch = Stopwatch()
    store, writer = open_target(dst, format)
    budget = _Budget.of(max_memory, store)
    job: list[_Job] = []

    def prepare() -> str:
        with watch.phase("open"):
            source = open_source(src, pool=pool)
            _refuse_same(source, store, getattr(writer, "file", None))
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
            if isinstance(writer, HfWriter):
                writer.leave_out, writer.tied = True, target.tied
            if comm.rank == comm.coordinator:
                writer.refuse(store, overwrite)
        job.append(_Job(Reader(source, pool), store, format, writer, target, budget, verify))
        return secrets.token_hex(6)

    save_id = take_step(comm, "open", prepare, lambda ids: ids[comm.coordinator])
    return job[0].run(comm, save_id, overwrite, watch, progress, pool)


def _refuse_same(source: Source, target: Store, file: str | None) -> None:
    """Refuse to write over what is read; ``file`` is what is written, if it is a single file."""
    if source.store.url.rstrip("/") != target.url.rstrip("/"):
        return
    if file is None or file in source.files:
        raise ValueError(f"{target.url} cannot be converted into itself; choose another place")


@attrs.frozen
class _Budget:
    """How much may happen at once.

    Attributes:
        files: How many files are written at a time.
        reading: Bytes that reads under way may hold.
    """

    files: int
    reading: int

    @classmethod
    def of(cls, max_memory: int, target: Store) -> _Budget:
        """Divide the memory: a quarter for reads under way, the rest for files in the making."""
        reading = min(max_memory // 4, 256 << 20)
        file = _FILE + (1 + DEPTH) * BATCH_BYTES + target.staging
        return cls(max(1, min((max_memory - reading) // file, _FILES)), reading)


@attrs.frozen(eq=False)
class _Job:
    """A conversion that was planned and is to be carried out.

    Attributes:
        reader: The old checkpoint.
        store: Where to write.
        format, writer: What to write.
        target: The plan.
        budget: How much may happen at once.
        verify: Whether to check what is read against its checksums.
    """

    reader: Reader
    store: Store
    format: str
    writer: Writer
    target: Target
    budget: _Budget
    verify: bool

    def run(
        self,
        comm: Comm,
        save_id: str,
        overwrite: bool,
        watch: Stopwatch,
        tell: Tell | None,
        pool: Pool | None,
    ) -> ConvertReport:
        """Write this process's share of the plans; once all have, commit."""
        written: dict[int, Part] = {}
        committing = False
        stats: list[ReadStats] = []

        def write() -> dict[str, Any]:
            with watch.phase("write"):
                proved = self._write(self._share(comm), save_id, written, stats, tell, pool)
            read = [sum(s.bytes_read for s in stats), proved]
            return {"parts": [(n, attrs.astuple(p)) for n, p in written.items()], "read": read}

        def commit(shares: list[dict[str, Any]]) -> dict[str, Any]:
            nonlocal committing
            committing = True
            parts = {n: Part(*fields) for share in shares for n, fields in share["parts"]}
            reports = [parts[n].report for n in range(len(self.target.plans))]
            with watch.phase("commit"):
                left = self.writer.commit(
                    self.store,
                    self.target.metadata,
                    self.target.plans,
                    reports,
                    save_id=save_id,
                    overwrite=overwrite,
                )
            return {
                "files": sum(part.files for part in parts.values()),
                "nbytes": sum(part.nbytes for part in parts.values()),
                "read": [sum(share["read"][i] for share in shares) for i in range(2)],
                "left": left,
            }

        try:
            done = take_step(comm, "convert", write, commit)
        except BaseException as error:
            sure = _surely_failed(error, begun=committing or comm.world_size > 1)
            for part in written.values() if sure else ():
                self.writer.discard(self.store, part.report, save_id)
            raise
        return self._report(done, watch)

    def _share(self, comm: Comm) -> list[int]:
        """Say which plans this process carries out: the largest first, each to the least busy."""
        sizes = [nbytes_of(plan) for plan in self.target.plans]
        loads = [0] * comm.world_size
        mine = []
        for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
            least = loads.index(min(loads))
            loads[least] += sizes[number] + 1
            if least == comm.rank:
                mine.append(number)
        return mine

    def _write(
        self,
        numbers: Sequence[int],
        save_id: str,
        written: dict[int, Part],
        stats: list[ReadStats],
        tell: Tell | None,
        pool: Pool | None,
    ) -> int:
        """Carry out some plans, and return how many chunks were found to fit their checksums."""
        plans = self.target.plans
        progress = Progress(sum(nbytes_of(plans[n]) for n in numbers), tell)
        files = self.budget.files
        with (
            _reading_pool(pool, self.budget.reading) as reading,
            Pool(max_workers=files, max_bytes=1 << 62) as writing,
            ThreadPoolExecutor(files * (1 + DEPTH), "shardplan-ahead") as threads,
        ):
            reader, lender = Reader(self.reader.source, reading), Lender()
            proof = Proof(reader.source) if self.verify else None

            def settle() -> None:
                if proof is not None:
                    proof.settle(reading)

            def write(number: int) -> None:
                plan = plans[number]
                boxes = list(_boxes(self.format, plan, number))
                # A single file may exist as soon as its last byte is there: it is checked before.
                last = settle if len(plans) == 1 else lambda: None
                ahead = Ahead(
                    reader, boxes, threads, lender, proof=proof, told=progress.add, last=last
                )
                try:
                    written[number] = self.writer.write(
                        self.store,
                        self._state_dict(ahead, plan),
                        plan,
                        save_id=save_id,
                        rank=number,
                        pool=writing,
                    )
                finally:
                    ahead.close()
                    stats.append(ahead.stats)

            writing.map(write, numbers)
            settle()
        progress.finish()
        return proof.proved if proof is not None else 0

    def _state_dict(self, ahead: Ahead, plan: SavePlan) -> dict[str, Any]:
        """Return what a plan is about: tensors that are read when asked for, and other values."""
        known = plan.items.catalog.heads
        heads = [known[row] for row in sorted(set(plan.items.row.tolist()))]
        return {
            source: Kept(self.reader.value(source)) if properties is None else ahead.tensor(source)
            for _, source, _, properties, _ in heads
        }

    def _report(self, done: Mapping[str, Any], watch: Stopwatch) -> ConvertReport:
        entries = self.target.metadata.state_dict_metadata
        tensors, left_out = int((entries.layout >= 0).sum()), self.target.left_out
        return ConvertReport(
            path=self.store.url,
            format=self.format,
            tensors=tensors,
            values=len(entries) - tensors - len(left_out),
            files=done["files"],
            bytes_read=done["read"][0],
            bytes_written=done["nbytes"],
            verified=done["read"][1],
            seconds=dict(watch.seconds),
            left_out=left_out,
            tied=dict(self.target.tied),
            notes=tuple(getattr(self.reader.source, "notes", ())),
            leftovers=tuple(done["left"]),
        )


def _surely_failed(error: BaseException, begun: bool) -> bool:
    """Tell whether nobody can have committed, or still will; ``begun``: somebody may be at it."""
    if isinstance(error, CheckpointError):
        unsure = {"LostRank", UnsureCommitError.__name__}
        return all(failure.type not in unsure for failure in error.failures)
    return not begun or (isinstance(error, Exception) and not isinstance(error, UnsureCommitError))


def _boxes(format: str, plan: SavePlan, rank: int) -> Iterator[Box]:
    """Yield what a writer will ask for, in order."""
    items = plan.items
    heads, rows = items.catalog.heads, items.row.tolist()
    offsets, sizes = items.offsets.tolist(), items.sizes.tolist()
    for item in write_order(format, plan, rank):
        _, source, _, properties, shape = heads[rows[item]]
        if properties is None:
            continue
        axes = len(shape)
        for at, size in boxes_of(sizes[item][:axes], properties.dtype):
            start = tuple(o + a for o, a in zip(offsets[item][:axes], at, strict=False))
            yield Box(source, start, tuple(size[:axes]))


@contextmanager
def _reading_pool(pool: Pool | None, max_bytes: int) -> Iterator[Pool]:
    """Give a pool for reads; the one that writes cannot be it, as it waits for them."""
    if pool is not None:
        yield pool
        return
    with Pool(max_bytes=max_bytes) as own:
        yield own


def dcp_to_torch_save(dcp_dir: Path, torch_save_path: str | os.PathLike[str]) -> ConvertReport:
    """Make a single ``torch.save`` file of a DCP checkpoint, nested as it was saved.

    As torch's function of the same name, but in bounded memory.

    Args:
        dcp_dir: The checkpoint; any other format will do as well.
        torch_save_path: The file to write; one that is there is replaced.
    """
    return convert(dcp_dir, torch_save_path, format="torch", overwrite=True)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_dir: Path) -> ConvertReport:
    """Make a DCP checkpoint of a ``torch.save`` file.

    As torch's function of the same name, but in bounded memory, and no code of the file is run.

    Args:
        torch_save_path: The file; any other checkpoint will do as well.
        dcp_dir: The folder to write; a checkpoint that is there is replaced.
    """
    return convert(torch_save_path, dcp_dir, format="dcp", overwrite=True)
