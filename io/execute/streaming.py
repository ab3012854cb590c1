"""Carry out copy plans: write files of one checkpoint while another is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

from shardplan.planning import SavePlan
from shardplan.planning.columns import column
from shardplan.planning.storage import CopyBudget, StoredChunks, copy_plan, tensor_bytes

from ..checksums import Proof
from ..formats.base import Part, Source, Writer
from ..pool import Pool, Progress, ProgressCallback
from ..stores.base import Store
from .ahead import Ahead, Lender
from .pieces import Kept
from .read import Reader, ReadStats

__all__ = ["Copied", "Copies", "write_copies"]


@attrs.frozen(eq=False)
class Copies:
    """What to copy, from where to where.

    Attributes:
        source: The checkpoint to read.
        stored: Where its chunks lie.
        plans: What to write.
        store, writer: Where to write it, and how.
        budget: How much may happen at once.
        verify: Whether to check what is read against its checksums.
    """

    source: Source
    stored: StoredChunks
    plans: Sequence[SavePlan]
    store: Store
    writer: Writer
    budget: CopyBudget
    verify: bool = True


@attrs.frozen(eq=False)
class Copied:
    """What was written and read.

    Attributes:
        parts: What was written, by number of the plan.
        bytes_read: Bytes that were read of the old checkpoint.
        verified: How many chunks of it were found to fit their checksums.
    """

    parts: Mapping[int, Part]
    bytes_read: int
    verified: int


def write_copies(
    copies: Copies,
    numbers: Sequence[int],
    save_id: str,
    tell: ProgressCallback | None,
    pool: Pool | None,
) -> Copied:
    """Write what some of the plans say; if that fails, nothing is left.

    Args:
        copies: What to copy.
        numbers: The plans to carry out.
        save_id: The name of the save.
        tell: Called with the bytes done and the bytes in all.
        pool: The threads that read; by default as many as fit into the budget.
    """
    plans, budget = copies.plans, copies.budget
    progress = Progress(sum(tensor_bytes(plans[n]) for n in numbers), tell)
    files = max(1, min(budget.files, len(numbers)))
    parts: dict[int, Part] = {}
    with (
        _reading_pool(pool, budget.reading) as reading,
        Pool(max_workers=files, max_bytes=1 << 62) as writing,
        ThreadPoolExecutor(files * (1 + budget.depth), "shardplan-ahead") as threads,
    ):
        reader, lender = Reader(copies.source, reading), Lender()
        proof = Proof(copies.source) if copies.verify else None
        settle = partial(proof.settle, reading) if proof is not None else _nothing

        def write(number: int) -> ReadStats:
            plan = plans[number]
            order = column([*copies.writer.write_order(plan, number)])
            ahead = Ahead(
                reader,
                copy_plan(reader.metadata, plan, order, copies.stored),
                threads,
                lender,
                depth=budget.depth,
                proof=proof,
                delivered=progress.add,
                # A single file may exist as soon as its last byte is there: it is checked before.
                last=settle if len(plans) == 1 else _nothing,
            )
            try:
                parts[number] = copies.writer.write(
                    copies.store,
                    _state_dict(reader, ahead, plan),
                    plan,
                    save_id=save_id,
                    rank=number,
                    pool=writing,
                )
            finally:
                ahead.close()
            return ahead.stats

        try:
            stats = writing.map(write, numbers)
            settle()
        except BaseException:
            for part in parts.values():
                copies.writer.discard(copies.store, part.report, save_id)
            raise
    progress.finish()
    verified = proof.proved if proof is not None else 0
    return Copied(parts, sum(one.bytes_read for one in stats), verified)


def _nothing() -> None:
    return


def _state_dict(reader: Reader, ahead: Ahead, plan: SavePlan) -> dict[str, Any]:
    """Return what a plan writes: tensors that are read when asked for, and other values."""
    known = plan.items.catalog.heads
    heads = [known[row] for row in sorted(set(plan.items.row.tolist()))]
    return {
        source: Kept(reader.value(source)) if properties is None else ahead.tensor(source)
        for _, source, _, properties, _ in heads
    }


@contextmanager
def _reading_pool(pool: Pool | None, max_bytes: int) -> Iterator[Pool]:
    """Give a pool for reads; the one that writes cannot be it, as it waits for them."""
    if pool is not None:
        yield pool
        return
    with Pool(max_bytes=max_bytes) as own:
        yield own
