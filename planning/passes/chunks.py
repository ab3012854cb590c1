"""Passes that rewrite chunks: split big ones, and share out those that several ranks hold."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, readonly
from ..columns.items import WriteItems
from ..columns.world import Rows, World
from ..geometry.overlap import expand
from ..records import SavePlan
from .balance import assign
from .base import Step

__all__ = ["dedup_replicas", "split_chunks", "split_replicas"]


def dedup_replicas(*, prefer: Literal["balance", "lowest_rank"] = "balance") -> Step[SavePlan]:
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
    run = partial(_dedup_replicas, prefer)
    return Step(dedup_replicas, (), {"prefer": prefer}, "world", run, assigns=True)


def _dedup_replicas(prefer: str, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    world = World.of(plans)
    rows = world.rows
    if rows.faulty or not rows.repeats.any():
        return world  # nothing to do, or nothing that can be done: it will be reported
    if prefer == "lowest_rank":
        return world.keep(~rows.repeats)
    keep = np.zeros(len(rows), bool)
    keep[assign(_groups(rows), rows.rank, rows.nbytes, len(world))] = True
    return world.keep(keep)


def _groups(rows: Rows) -> Ints:
    """Number the distinct chunks; replicas share a number."""
    return np.cumsum(~rows.repeats) - 1


def split_replicas(min_bytes: int = 1 << 20) -> Step[SavePlan]:
    """Have each holder of a replicated chunk write its share of it.

    Shares are cut along the first axis that is long enough, so that they are as even as can be.
    What stays whole is left for `dedup_replicas`.

    Args:
        min_bytes: The smallest share: where there are too many holders, only some get one.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((5, 4))})
    >>> [p.items[0].tensor_data.chunk.offsets for p in split_replicas(1)((plan, plan))]
    [(0, 0), (2, 0)]
    """
    if min_bytes < 1:
        raise ValueError(f"min_bytes must be at least 1, not {min_bytes}")
    run = partial(_split_replicas, min_bytes)
    return Step(split_replicas, (), {"min_bytes": min_bytes}, "world", run, assigns=True)


def _split_replicas(min_bytes: int, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    world = World.of(plans)
    rows = world.rows
    if rows.faulty or not rows.repeats.any():
        return world
    group = _groups(rows)
    holders = np.bincount(group)[group]
    first = np.flatnonzero(~rows.repeats)
    shares = np.clip(rows.nbytes // min_bytes, 1, holders)
    # Where not all holders get a share, the next chunk goes on with those that got none.
    turn = np.cumsum(shares[first]) - shares[first]
    part = (np.arange(len(rows)) - first[group] - turn[group]) % holders
    long = rows.sizes >= shares[:, None]
    splits = (shares > 1) & long.any(axis=1) & (rows.prop[rows.tensor] >= 0)
    if not splits.any():
        return world
    keeps = ~splits | (part < shares)
    at, part, shares, axis = (
        column[splits & keeps] for column in (rows.flat, part, shares, long.argmax(axis=1))
    )
    row = np.arange(len(at))
    offsets, sizes = rows.offsets[splits & keeps], rows.sizes[splits & keeps]
    size = sizes[row, axis]
    offsets[row, axis] += size * part // shares
    sizes[row, axis] = size * (part + 1) // shares - size * part // shares
    return _replace(world, at, offsets, sizes, keeps)


def _replace(
    world: World, at: Ints, offsets: Ints, sizes: Ints, keeps: npt.NDArray[np.bool_]
) -> tuple[SavePlan, ...]:
    """Give some items (by their number among all) other chunks of their shards; drop some rows."""
    first = world.rows.first
    dropped = np.zeros(int(first[-1]), bool)
    dropped[world.rows.flat[~keeps]] = True
    order = np.argsort(at, kind="stable")
    edges = np.searchsorted(at[order], first)
    plans = []
    for rank, plan in enumerate(world):
        mine, items = order[edges[rank] : edges[rank + 1]], plan.items
        where, axes = at[mine] - first[rank], items.offsets.shape[1]
        now_offsets, now_sizes = items.offsets.copy(), items.sizes.copy()
        now_offsets[where], now_sizes[where] = offsets[mine, :axes], sizes[mine, :axes]
        items = attrs.evolve(
            items,
            offsets=readonly(now_offsets),
            sizes=readonly(now_sizes),
            source_offsets=items.shard_offsets,
        )
        stay = ~dropped[first[rank] : first[rank + 1]]
        plans.append(attrs.evolve(plan, items=items if stay.all() else items.take(stay)))
    return tuple(plans)


def split_chunks(max_bytes: int) -> Step[SavePlan]:
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
    return Step(split_chunks, (max_bytes,), {}, "rank", partial(_split_chunks, max_bytes))


def _split_chunks(max_bytes: int, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    return tuple(
        attrs.evolve(plan, items=_split_items(plan.items, max_bytes))
        if (plan.items.nbytes > max_bytes).any()
        else plan
        for plan in plans
    )


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
