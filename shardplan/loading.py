"""Load a checkpoint into a state dict, or make a new one of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from shardplan.io.arrays import as_tensor, empty, window
from shardplan.io.errors import ValueRefusedError
from shardplan.io.pool import Pool
from shardplan.io.read import Reader, ReadStats
from shardplan.io.sources import open_source
from shardplan.io.stores import Store
from shardplan.planning import (
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    NotFoundError,
    Pass,
    SavePlan,
    chain,
    dtype_name,
    find_shard,
    flatten,
    load_plan,
    local_plan,
    unflatten,
)
from shardplan.planning.errors import nearest_names
from shardplan.planning.flatten import is_tensor
from shardplan.planning.load import Strict
from shardplan.planning.metadata import TensorMetadata

from .nested import put
from .reports import LoadReport, Stopwatch

__all__ = ["load", "read_rank", "restore"]


def load(
    state_dict: Mapping[Any, Any],
    path: str | os.PathLike[str] | Store,
    *,
    planner: Pass[SavePlan] | None = None,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    shape: Literal["same", "overlap"] = "same",
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> LoadReport:
    """Fill a state dict from a checkpoint, in place.

    Args:
        state_dict: Tensors to fill, and other values to replace, nested in any way.
        path: The checkpoint.
        planner: The pass it was saved with.
        strict: Whether everything must be filled: True, False, or patterns of names that must be.
        dtype: ``"same"`` takes another stored dtype for a mistake, ``"cast"`` for a wish to cast.
        shape: ``"same"`` takes another shape for a mistake; ``"overlap"`` fills what both have.
        format: What wrote the checkpoint; found out if left out.
        verify: Whether to check what is read whole against its checksums.
        pool: The threads and the memory budget to use.

    Returns:
        What did not fit, what was read, and how long it took.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> sd = {"w": torch.zeros(2), "step": 0}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"w": torch.ones(2), "step": 7}, folder)
    ...     report = load(sd, folder)
    >>> sd, report.bytes_read
    ({'w': tensor([1., 1.]), 'step': 7}, 8)

    Raises:
        PlanError: Something that must be filled cannot be; nothing was changed.
        FormatError: The checkpoint is damaged; ``filled`` and ``touched`` say what was changed.
    """
    watch = Stopwatch()
    with watch.phase("open"):
        reader = Reader(open_source(path, format=format, pool=pool), pool)
    with watch.phase("plan"):
        flat, paths = flatten(state_dict)
        local = (planner or chain())((local_plan(state_dict),))[0]
        metadata = reader.metadata
        plan = load_plan(metadata, local, strict=strict, dtype=dtype, shape=shape)
    with watch.phase("read"):
        stats, values = read_rank(reader, flat, plan, verify=verify)
        for name, value in values.items():
            put(state_dict, paths[name], value)
    return _report(plan, stats, watch)


def _report(plan: LoadPlan, stats: ReadStats, watch: Stopwatch) -> LoadReport:
    keys = plan.report
    return LoadReport(
        keys.missing,
        keys.unexpected,
        keys.mismatched,
        stats.bytes_needed,
        stats.bytes_read,
        stats.requests,
        stats.verified,
        watch.seconds,
    )


def read_rank(
    reader: Reader, flat: Mapping[str, Any], plan: LoadPlan, *, verify: bool = True
) -> tuple[ReadStats, dict[str, Any]]:
    """Carry out one rank's load plan.

    Args:
        reader: The checkpoint.
        flat: The rank's state dict, flattened; its tensors are filled.
        plan: What to read.
        verify: Whether to check what is read whole against its checksums.

    Returns:
        What was read, and the values that are no tensors, by name in the state dict.
    """
    values = reader.values(plan, verify=verify)
    return reader.fill(plan.items, _destinations(flat, plan), verify=verify), values


def _destinations(flat: Mapping[str, Any], plan: LoadPlan) -> Callable[[int], torch.Tensor]:
    """Return what gives the box of the state dict that a read fills, having checked them all."""
    items = plan.items
    shards: dict[tuple[int, bytes], torch.Tensor] = {}
    refused: dict[str, str] = {}

    def key(row: int) -> tuple[int, bytes]:
        return int(items.dest[row]), items.dest_anchor[row].tobytes()

    for row, kind in enumerate(items.type.tolist()):
        if kind == LoadItemType.TENSOR.value and key(row) not in shards:
            name, anchor = items.names[items.dest[row]], items.dest_anchor[row]
            index = MetadataIndex(name, anchor[: items.ndim[row]].tolist())
            try:
                shards[key(row)] = as_tensor(find_shard(flat, index), writable=True)
            except TypeError as error:
                refused[name] = str(error)
    if refused:
        raise ValueRefusedError(refused)
    return lambda row: window(
        shards[key(row)], items.dest_offsets[row].tolist(), items.lengths[row].tolist()
    )


def restore(
    path: str | os.PathLike[str] | Store,
    target: Mapping[Any, Any] | None = None,
    *,
    keys: Iterable[str] | None = None,
    device: Any = "cpu",
    dtype: Literal["same", "cast"] = "same",
    format: str | None = None,
    verify: bool = True,
    pool: Pool | None = None,
) -> dict[Any, Any]:
    """Make a new state dict of a checkpoint, nested as it was saved.

    Args:
        path: The checkpoint.
        target: What to make, nested in any way: meta tensors, `TensorSpec`s, or anything else with
            a shape and a dtype; other leaves stand for values that are no tensors. Everything that
            was saved if left out.
        keys: Shell-style patterns of the flattened names to read; everything if left out.
        device: Where new tensors are made.
        dtype: Whether tensors of ``target`` may have another dtype than the saved ones: ``"cast"``.
        format: What wrote the checkpoint; found out if left out.
        verify: Whether to check what is read whole against its checksums.
        pool: The threads and the memory budget to use.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"model": {"w": torch.ones(2)}, "step": 7}, folder)
    ...     restore(folder)
    {'model': {'w': tensor([1., 1.])}, 'step': 7}

    Raises:
        PlanError: Something in ``target`` is not in the checkpoint, or does not fit.
        NotFoundError: A pattern of ``keys`` matches nothing.
        FormatError: The checkpoint is damaged.
    """
    reader = Reader(open_source(path, format=format, pool=pool), pool)
    metadata = reader.metadata
    if target is None:
        wanted, paths = _everything(metadata)
    else:
        wanted, paths = flatten(target)
    flat = {
        name: empty(leaf.shape, dtype_name(leaf.dtype), device) if is_tensor(leaf) else None
        for name, leaf in _matching(wanted, keys).items()
    }
    plan = load_plan(metadata, local_plan(flat), dtype=dtype)
    _, values = read_rank(reader, flat, plan, verify=verify)
    return unflatten({**flat, **values}, paths)


class _Saved:
    """A saved tensor's shape and dtype."""

    def __init__(self, entry: TensorMetadata) -> None:
        self.shape, self.dtype = entry.size, entry.properties.dtype


def _everything(metadata: Metadata) -> tuple[dict[str, Any], Mapping[str, Any]]:
    entries = metadata.state_dict_metadata
    wanted = {
        name: _Saved(entry) if isinstance(entry, TensorMetadata) else None
        for name, entry in entries.items()
    }
    data = metadata.planner_data
    return wanted, data.get("paths", {}) if isinstance(data, Mapping) else {}


def _matching(wanted: Mapping[str, Any], keys: Iterable[str] | None) -> Mapping[str, Any]:
    if keys is None:
        return wanted
    patterns = [keys] if isinstance(keys, str) else list(keys)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in wanted):
            near = nearest_names(pattern, wanted)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise NotFoundError(f"nothing in the checkpoint is called `{pattern}`{hint}", near)
    return {n: v for n, v in wanted.items() if any(fnmatchcase(n, p) for p in patterns)}
