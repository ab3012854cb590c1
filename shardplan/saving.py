"""Save a state dict."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from shardplan.io.pool import Pool
from shardplan.io.stores import Store, open_store
from shardplan.io.writers import find_writer
from shardplan.planning import Pass, SavePlan, chain, global_plan, local_plan

from .reports import SaveReport, Stopwatch

__all__ = ["save"]


def save(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Pass[SavePlan] | None = None,
    format: str = "safetensors",
    overwrite: bool = False,
    pool: Pool | None = None,
) -> SaveReport:
    """Save a state dict as a checkpoint, which exists whole or not at all.

    Args:
        state_dict: Tensors and other values, nested in any way.
        path: A folder that will hold the checkpoint, on a disk or in an object store.
        planner: A pass over the plan, such as ``chain(rename(...), cast("bfloat16"))``. Load with
            the same one.
        format: What to write; see `shardplan.io.writers.WRITERS`.
        overwrite: Whether a checkpoint that is there may be replaced. It can be loaded up to the
            instant at which the new one can.
        pool: The threads and the memory budget to use.

    Returns:
        What was written, and how long it took.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = save({"w": torch.zeros(2, 3), "step": 7}, folder)
    ...     sorted(name.split("-")[0] for name in os.listdir(folder))
    ['shard', 'shardplan.json']

    Raises:
        ExistsError: There is a checkpoint, and ``overwrite`` is false.
        ValueRefusedError: Some values cannot be stored safely; all are named, nothing was written.
        PlanError, RefusedError: There is no correct plan.
        StoreError: The store failed; what was there before is intact.
    """
    store, writer = open_store(path), find_writer(format)
    watch = Stopwatch()
    with watch.phase("plan"):
        writer.refuse(store, overwrite)
        plans, metadata = global_plan((planner or chain())((local_plan(state_dict),)))
    save_id = secrets.token_hex(6)
    with watch.phase("write"):
        part = writer.write(store, state_dict, plans[0], save_id=save_id, rank=0, pool=pool)
    with watch.phase("commit"):
        reports = [part.report]
        try:
            left = writer.commit(
                store, metadata, plans, reports, save_id=save_id, overwrite=overwrite
            )
        except BaseException:
            writer.discard(store, part.report, save_id)
            raise
    return SaveReport(store.url, save_id, part.files, part.nbytes, watch.seconds, left)
