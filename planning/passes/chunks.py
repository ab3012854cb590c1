"""Passes that rewrite chunks: split big ones, and share out those that several ranks hold."""

from __future__ import annotations

import heapq
from functools import partial
from typing import Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, readonly
from ..columns.items import WriteItems
from ..columns.world import Rows, World
from ..geometry.overlap import expand
from ..plans import SavePlan
from .base import Step

__all__ = ["assign", "dedup_replicas", "even_out", "split_chunks", "split_replicas", "uneven"]

_EVEN: Final = 1.05  # max over mean: from here on it is worth looking for better
_GOOD: Final = 1.001  # and from here on it is not
_FEW: Final = 256  # chunks that are held more than once, at the most
_STEPS: Final = 20_000


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


def assign(group: Ints, rank: Ints, weight: Ints, ranks: int) -> Ints:
    """Choose one row of each group so that the weight per rank comes out even.

    Rows of a group are the holders of one chunk. Chunks with one holder are given; then those with
    the fewest holders, the heaviest first, each to the holder that has least so far (the lowest
    rank among equals).

    Args:
        group: Which group each row belongs to; ascending, without holes.
        rank: Which rank each row stands for.
        weight: What the chunk weighs, the same on all rows of a group.
        ranks: How many ranks there are.

    Returns:
        The chosen rows, one a group, ascending.

    >>> rows = assign(
    ...     np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0]), np.array([4, 4, 4, 4, 8]), 2
    ... )
    >>> rows.tolist()  # rank 0 has 8 to itself, so rank 1 gets both others
    [1, 3, 4]
    """
    first = np.flatnonzero(np.diff(group, prepend=-1))
    count = np.diff(first, append=len(group))
    chosen = first.copy()
    alone = first[count == 1]
    load = (
        np.bincount(rank[alone], weights=weight[alone], minlength=ranks).astype(np.int64).tolist()
    )
    shared = np.flatnonzero(count > 1)
    shared = shared[np.lexsort((-weight[first[shared]], count[shared]))]
    # Chunks that the same ranks hold share a heap of them, least loaded first. Another heap may
    # have raised a load meanwhile; loads only rise, so a stale entry is found when it surfaces.
    heaps: dict[bytes, list[tuple[int, int, int]]] = {}
    weights = np.maximum(weight[first], 1).tolist()
    starts, counts = first.tolist(), count.tolist()
    holders = rank.astype(np.int32)
    for number in shared.tolist():
        low = starts[number]
        key = holders[low : low + counts[number]].tobytes()
        heap = heaps.get(key)
        if heap is None:
            members = rank[low : low + counts[number]].tolist()
            heap = heaps[key] = [(load[r], r, i) for i, r in enumerate(members)]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:
            _, r, i = heap[0]
            heapq.heapreplace(heap, (load[r], r, i))
        _, r, i = heap[0]
        chosen[number] = low + i
        load[r] += weights[number]
        heapq.heapreplace(heap, (load[r], r, i))
    even_out(chosen, first, count, rank, weight[first], np.array(load, np.int64))
    return chosen


def uneven(chunks: int, load: Ints) -> bool:
    """Tell whether greed came out uneven, with few enough chunks to look for better."""
    mean = load.sum() / max(len(load), 1)
    return 0 < chunks <= _FEW and bool(load.max() > _EVEN * mean)


def even_out(chosen: Ints, first: Ints, count: Ints, rank: Ints, weight: Ints, load: Ints) -> None:
    """Look for a better choice where greed came out uneven and there are few chunks to choose.

    Where there are many, greed is even already. The search tries the heaviest chunk first, on its
    least loaded holder first, leaves what cannot beat the best so far, and is cut off after a fixed
    number of steps, so that it is quick and always finds the same.
    """
    shared = np.flatnonzero(count > 1)
    mean = load.sum() / max(len(load), 1)
    if not uneven(len(shared), load):
        return
    np.subtract.at(load, rank[chosen[shared]], weight[shared])  # what is not ours to move
    shared = shared[np.argsort(-weight[shared], kind="stable")]
    holders = [list(range(first[g], first[g] + count[g])) for g in shared.tolist()]
    weights, ranks, base = weight[shared].tolist(), rank.tolist(), load.tolist()
    now = base.copy()
    for group, w in zip(shared.tolist(), weights, strict=True):
        now[ranks[chosen[group]]] += w
    best, found, steps = max(now), None, 0
    stack: list[tuple[int, list[int], tuple[int, ...]]] = [(0, base, ())]
    while stack and steps < _STEPS and best > _GOOD * mean:
        steps += 1
        depth, loads, rows = stack.pop()
        if max(loads) >= best:
            continue  # a better one was found meanwhile
        if depth == len(weights):
            best, found = max(loads), rows
            continue
        for row in sorted(
            holders[depth], key=lambda r: -loads[ranks[r]]
        ):  # the last is tried first
            if max(loads[ranks[row]] + weights[depth], max(base)) < best:
                after = loads.copy()
                after[ranks[row]] += weights[depth]
                stack.append((depth + 1, after, (*rows, row)))
    if found is not None:
        chosen[shared] = found
