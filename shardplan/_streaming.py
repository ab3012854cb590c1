"""How is a conversion carried out? Plan by plan; elements are read as they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import attrs

from shardplan.dist import CheckpointError, Comm
from shardplan.io import FormatError, Pool, Progress, ProgressCallback, Proof, UnsureCommitError
from shardplan.io.execute import (
    BATCH_BYTES,
    DEPTH,
    Ahead,
    Box,
    Kept,
    Lender,
    Reader,
    ReadStats,
    reads_of,
)
from shardplan.io.formats import Part, Writer
from shardplan.io.stores import Store
from shardplan.planning import Metadata, SavePlan
from shardplan.planning.storage import BLOCK_BYTES

from ._comm import take_step
from ._report import Stopwatch
from ._targets import Target, nbytes_of

__all__ = ["Budget", "Done", "Job", "file_bytes"]

_MADE: Final = 2  # blocks of a file that were cast: one is written while the next is made
_HELD: Final = 2  # batches of a file: one is written, and another was begun to be
_FILES: Final = (os.cpu_count() or 1) + 2  # more files at once gain nothing


@attrs.frozen
class Budget:
    """How much may happen at once.

    Attributes:
        files: How many files are written at a time.
        depth: How many batches are read before they are asked for, of each file.
        reading: Bytes that reads under way may hold.
    """

    files: int
    depth: int
    reading: int

    @classmethod
    def of(cls, max_memory: int, source: Store, target: Store) -> Budget:
        """Divide the memory: a quarter for reads under way, the rest for files in the making.

        What the stores themselves hold of bytes on their way is part of both.

        >>> from shardplan.io import open_store
        >>> Budget.of(192 << 20, open_store("."), open_store("memory://x"))
        Budget(files=1, depth=1, reading=50331648)
        """
        reading = max(min(max_memory // 4, 256 << 20), 2 * BATCH_BYTES + source.staging)
        rest = max_memory - reading
        depth = DEPTH if rest >= 2 * file_bytes(DEPTH, target) else 1
        return cls(max(1, min(rest // file_bytes(depth, target), _FILES)), depth, reading)


def file_bytes(depth: int, target: Store) -> int:
    """Return how much memory a file in the making takes at most."""
    return (_HELD + depth) * BATCH_BYTES + _MADE * BLOCK_BYTES + target.staging


@attrs.frozen
class Done:
    """What all processes did together.

    Attributes:
        files: How many data files were written.
        nbytes: Their size.
        bytes_read: Bytes that were read of the old checkpoint.
        verified: How many chunks of it were found to fit their checksums.
        leftovers: Files of the checkpoint that was replaced which could not be removed.
    """

    files: int
    nbytes: int
    bytes_read: int
    verified: int
    leftovers: tuple[str, ...]


@attrs.frozen(eq=False)
class Job:
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
    budget: Budget
    verify: bool

    def run(
        self,
        comm: Comm,
        save_id: str,
        overwrite: bool,
        watch: Stopwatch,
        tell: ProgressCallback | None,
        pool: Pool | None,
    ) -> Done:
        """Write this process's share of the plans; once all have, commit."""
        written: dict[int, Part] = {}
        committing = False
        stats: list[ReadStats] = []

        def write() -> dict[str, Any]:
            with watch.phase("write"), self._pointing_at_verify():
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
                "bytes_read": sum(share["read"][0] for share in shares),
                "verified": sum(share["read"][1] for share in shares),
                "leftovers": left,
            }

        try:
            done = take_step(comm, "convert", write, commit)
        except BaseException as error:
            sure = _surely_failed(error, begun=committing or comm.world_size > 1)
            for part in written.values() if sure else ():
                self.writer.discard(self.store, part.report, save_id)
            raise
        return Done(**{**done, "leftovers": tuple(done["leftovers"])})

    @contextmanager
    def _pointing_at_verify(self) -> Iterator[None]:
        """Say where the whole extent of damage is told: the first that is found ends this."""
        try:
            yield
        except FormatError as error:
            more = f"to see all that is damaged, verify {self.reader.store.url}"
            raise FormatError(error.file, f"{error.reason}; {more}") from error

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
        tell: ProgressCallback | None,
        pool: Pool | None,
    ) -> int:
        """Carry out some plans, and return how many chunks were found to fit their checksums."""
        plans = self.target.plans
        progress = Progress(sum(nbytes_of(plans[n]) for n in numbers), tell)
        files, depth = max(1, min(self.budget.files, len(numbers))), self.budget.depth
        with (
            _reading_pool(pool, self.budget.reading) as reading,
            Pool(max_workers=files, max_bytes=1 << 62) as writing,
            ThreadPoolExecutor(files * (1 + depth), "shardplan-ahead") as threads,
        ):
            reader, lender = Reader(self.reader.source, reading), Lender()
            proof = Proof(reader.source) if self.verify else None

            def settle() -> None:
                if proof is not None:
                    proof.settle(reading)

            def write(number: int) -> None:
                plan = plans[number]
                order = self.writer.write_order(plan, number)
                boxes = list(_boxes(order, plan, self.reader.metadata))
                # A single file may exist as soon as its last byte is there: it is checked before.
                last = settle if len(plans) == 1 else lambda: None
                ahead = Ahead(
                    reader,
                    boxes,
                    threads,
                    lender,
                    depth=depth,
                    proof=proof,
                    told=progress.add,
                    last=last,
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


def _surely_failed(error: BaseException, begun: bool) -> bool:
    """Return True if no process has committed or still can; ``begun``: one may have started."""
    if isinstance(error, CheckpointError):
        unsure = {"LostRank", UnsureCommitError.__name__}
        return all(failure.type not in unsure for failure in error.failures)
    return not begun or (isinstance(error, Exception) and not isinstance(error, UnsureCommitError))


def _boxes(order: Iterable[int], plan: SavePlan, source: Metadata) -> Iterator[Box]:
    """Yield what a writer will ask for, given the order in which it asks for items."""
    items, entries = plan.items, source.state_dict_metadata
    heads, rows = items.catalog.heads, items.row.tolist()
    offsets, sizes = items.offsets.tolist(), items.sizes.tolist()
    for item in order:
        _, name, _, properties, shape = heads[rows[item]]
        if properties is None:
            continue
        axes, stored = len(shape), entries.props[entries.prop[entries.row_of[name]]].dtype
        for at, size in reads_of(sizes[item][:axes], properties.dtype, stored):
            start = tuple(o + a for o, a in zip(offsets[item][:axes], at, strict=True))
            yield Box(name, start, tuple(size))


@contextmanager
def _reading_pool(pool: Pool | None, max_bytes: int) -> Iterator[Pool]:
    """Give a pool for reads; the one that writes cannot be it, as it waits for them."""
    if pool is not None:
        yield pool
        return
    with Pool(max_bytes=max_bytes) as own:
        yield own
