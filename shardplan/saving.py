"""Save a state dict."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardplan.io.commit import assemble, publish, read_manifest, refuse_existing
from shardplan.io.pool import Pool
from shardplan.io.stores import Store, open_store
from shardplan.io.write import write_rank
from shardplan.planning import Pass, SavePlan, chain, global_plan, local_plan

from .reports import SaveReport, Stopwatch

__all__ = ["save"]


def save(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Pass[SavePlan] | None = None,
    overwrite: bool = False,
    pool: Pool | None = None,
) -> SaveReport:
    """Save a state dict as a checkpoint, which exists whole or not at all.

    Args:
        state_dict: Tensors and other values, nested in any way.
        path: A folder that will hold the checkpoint, on a disk or in an object store.
        planner: A pass over the plan, such as ``chain(rename(...), cast("bfloat16"))``. Load with
            the same one.
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
    store = open_store(path)
    watch = Stopwatch()
    with watch.phase("plan"):
        refuse_existing(store, overwrite)
        plans, metadata = global_plan((planner or chain())((local_plan(state_dict),)))
    save_id = secrets.token_hex(6)
    with watch.phase("write"):
        written = write_rank(store, state_dict, plans[0], save_id=save_id, pool=pool)
    with watch.phase("commit"):
        manifest = assemble(metadata, plans, [written], save_id=save_id, created=time.time())
        try:
            left = publish(store, manifest, overwrite=overwrite)
        except BaseException:
            _undo(store, manifest.files.names, save_id)
            raise
    count = len(written.files)
    return SaveReport(store.url, save_id, count, written.nbytes, watch.seconds, left)


def _undo(store: Store, names: tuple[str, ...], save_id: str) -> None:
    """Remove what was written, unless the failed commit took place after all."""
    with suppress(Exception):
        try:
            published = read_manifest(store).save_id == save_id
        except ValueError:
            published = False
        if not published:
            store.delete(names)
