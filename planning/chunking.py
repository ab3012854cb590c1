"""Passes that rewrite chunks: split big ones, and share out those that several ranks hold."""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np

from .balance import assign
from .columns import WriteItems
from .overlap import expand
from .packing import Ints, readonly
from .passes import Pass
from .records import SavePlan
from .world import Rows, World

__all__ = ["dedup_replicas", "split_chunks", "split_replicas"]


def dedup_replicas(*, prefer: Literal["balance", "lowest_rank"] = "balance") -> Pass[SavePlan]:
    """Have each chunk that several ranks hold written by one of them.

    Chunks are replicas only if name, offset, size, dtype and global shape all agree. Others that
    share a key are left alone, for `global_plan` to report.

    Args:
        prefer: ``"balance"`` evens out the bytes per rank: chunks with the fewest holders first,
            the largest first, each to its least loaded holder. ``"lowest_rank"`` takes the first.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"a": TensorSpec((4,)), "b": TensorSpec((4,))})
    >>> [p.items[0].index.fqn for p in dedup_replicas()((plan, plan))]
    ['a', 'b']
    """
    if prefer not in ("balance", "lowest_rank"):
        raise ValueError(f'prefer must be "balance" or "lowest_rank", not {prefer!r}')

    def dedup(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
        world = World.of(plans)
        rows = world.rows
        if rows.issues or not rows.repeats.any():
            return world  # nothing to do, or nothing that can be done: it will be reported
        if prefer == "lowest_rank":
            return world.keep(~rows.repeats)
        keep = np.zeros(len(rows), bool)
        keep[assign(_groups(rows), rows.rank, rows.nbytes, len(world))] = True
        return world.keep(keep)

    return dedup


def _groups(rows: Rows) -> Ints:
    """Number the distinct chunks; replicas share a number."""
    return np.cumsum(~rows.repeats) - 1


def split_replicas(min_bytes: int = 1 << 20) -> Pass[SavePlan]:
    """Have each holder of a replicated chunk write its share of it.

    Shares are cut along the first axis that is long enough, so that they are as even as can be.

    Args:
        min_bytes: Chunks whose shares would be smaller than this stay whole (see `dedup_replicas`).

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})
    >>> [p.items[0].tensor_data.chunk.offsets for p in split_replicas(1)((plan, plan))]
    [(0, 0), (2, 0)]
    """
    if min_bytes < 1:
        raise ValueError(f"min_bytes must be at least 1, not {min_bytes}")

    def split(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
        world = World.of(plans)
        rows = world.rows
        if rows.issues or not rows.repeats.any():
            return world
        group = _groups(rows)
        holders = np.bincount(group)[group]
        first = np.flatnonzero(~rows.repeats)
        part = np.arange(len(rows)) - first[group]  # which of the holders a row is
        long = rows.sizes >= holders[:, None]
        splits = (holders > 1) & (rows.nbytes // holders >= min_bytes) & long.any(axis=1)
        at = np.flatnonzero(splits & (rows.prop[rows.tensor] >= 0))
        if not len(at):
            return world
        axis = long[at].argmax(axis=1)
        size = rows.sizes[at, axis]
        low, high = (size * (part[at] + i) // holders[at] for i in (0, 1))
        offsets, sizes = rows.offsets.copy(), rows.sizes.copy()
        offsets[at, axis] += low
        sizes[at, axis] = high - low
        return _replace(world, at, offsets[at], sizes[at])

    return split


def _replace(world: World, at: Ints, offsets: Ints, sizes: Ints) -> tuple[SavePlan, ...]:
    """Give some rows of the world other chunks, of the same shards."""
    order = np.argsort(world.rows.rank[at], kind="stable")
    ranks, edges = np.unique(world.rows.rank[at][order], return_index=True)
    plans = list(world)
    for rank, chosen in zip(ranks.tolist(), np.split(order, edges[1:]), strict=True):
        items = plans[rank].items
        where, axes = world.rows.item[at[chosen]], items.offsets.shape[1]
        now_offsets, now_sizes = items.offsets.copy(), items.sizes.copy()
        now_offsets[where], now_sizes[where] = offsets[chosen, :axes], sizes[chosen, :axes]
        items = attrs.evolve(
            items,
            offsets=readonly(now_offsets),
            sizes=readonly(now_sizes),
            source_offsets=items.shard_offsets,
        )
        plans[rank] = attrs.evolve(plans[rank], items=items)
    return tuple(plans)


def split_chunks(max_bytes: int) -> Pass[SavePlan]:
    """Cut every chunk into pieces of at most ``max_bytes``, by rows first, then within rows.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})
    >>> [item.tensor_data.chunk.sizes for item in split_chunks(32)((plan,))[0].items]
    [(2, 4), (2, 4), (1, 4)]

    Raises:
        ValueError: ``max_bytes`` is not positive, or (when run) too small for a single element.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, not {max_bytes}")

    def split(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
        return tuple(
            attrs.evolve(plan, items=_split_items(plan.items, max_bytes))
            if (plan.items.nbytes > max_bytes).any()
            else plan
            for plan in plans
        )

    return split


def _split_items(items: WriteItems, max_bytes: int) -> WriteItems:
    inner = items.catalog.itemsize[items.row]
    if (inner > max_bytes).any():
        name = items.catalog.names[items.row[inner.argmax()]]
        raise ValueError(
            f"max_bytes={max_bytes} holds no element of `{name}` ({inner.max()} bytes)"
        )
    inner = np.maximum(inner, 1)
    step = items.sizes.copy()  # how far a piece reaches along each axis
    for axis in reversed(range(step.shape[1])):
        step[:, axis] = np.clip(max_bytes // inner, 1, np.maximum(items.sizes[:, axis], 1))
        inner = inner * np.maximum(items.sizes[:, axis], 1)
    parts = np.maximum(-(-items.sizes // step), 1)
    row, cell = expand(parts)
    begin = cell * step[row]
    return attrs.evolve(
        items.take(row),
        offsets=readonly(items.offsets[row] + begin),
        sizes=readonly(np.minimum(step[row], items.sizes[row] - begin)),
        source_offsets=readonly(items.shard_offsets[row]),
        hint=None,
    )
