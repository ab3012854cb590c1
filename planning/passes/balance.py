"""Who writes a chunk that several ranks hold?"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from ..columns.arrays import Ints

__all__ = ["assign", "even_out", "uneven"]

_EVEN: Final = 1.05  # max over mean: from here on it is worth looking for better
_GOOD: Final = 1.001  # and from here on it is not
_FEW: Final = 256  # chunks that are held more than once, at the most
_STEPS: Final = 20_000


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
