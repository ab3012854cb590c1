"""Passes that rewrite chunks: split large ones, and choose which rank writes replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, distinct, numbered
from ..columns.cuts import cut_items
from ..columns.items import WriteItems
from ..columns.world import Rows, World
from ..geometry.overlap import expand
from ..plans import SavePlan
from .base import Step

_EVEN: Final = 1.05  # max over mean: search for a better assignment above this
_GOOD: Final = 1.001  # max over mean: stop the search below this
_FEW: Final = 256  # search only with at most this many shared chunks
_STEPS: Final = 20_000
_MANY: Final = 16  # sets of ranks from which on they are handled together


def dedup_replicas(*, prefer: Literal["balance", "lowest_rank"] = "balance") -> Step[SavePlan]:
    """Have each chunk that several ranks hold written by one of them.

    Chunks are replicas only if name, offset, size, dtype and global shape all agree. Other chunks
    with the same name and offset are left for `global_plan` to report.

    Args:
        prefer: ``"balance"`` evens out the bytes per rank: chunks with the fewest holders first,
            larger before smaller, each to its least loaded holder. ``"lowest_rank"`` always picks
            the lowest rank.

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
        return world  # no replicas, or faults that are reported later
    if prefer == "lowest_rank":
        return world.keep(~rows.repeats)
    keep = np.zeros(len(rows), bool)
    keep[assign(_groups(rows), rows.rank, rows.nbytes, len(world))] = True
    return world.keep(keep)


def _groups(rows: Rows) -> Ints:
    """Number the distinct chunks; replicas share a number."""
    return np.cumsum(~rows.repeats) - 1


def split_replicas(min_bytes: int = 1 << 20) -> Step[SavePlan]:
    """Have each holder of a replicated chunk write an equal share of it.

    Shares are cut along the first axis that is long enough. Chunks that are not cut are left for
    `dedup_replicas`.

    Args:
        min_bytes: The smallest share, in bytes; with too many holders, only some get a share.

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
    """Replace the chunks of some items (numbered over all plans), and drop some rows."""
    first = world.rows.first
    dropped = np.zeros(int(first[-1]), bool)
    dropped[world.rows.flat[~keeps]] = True
    order = np.argsort(at, kind="stable")
    edges = np.searchsorted(at[order], first)
    plans = []
    for rank, plan in enumerate(world):
        mine, items = order[edges[rank] : edges[rank + 1]], plan.items
        where, axes = at[mine] - first[rank], items.offsets.shape[1]
        shift, now_sizes = np.zeros_like(items.offsets), items.sizes.copy()
        shift[where] = offsets[mine, :axes] - items.offsets[where]
        now_sizes[where] = sizes[mine, :axes]
        stay = np.flatnonzero(~dropped[first[rank] : first[rank + 1]])
        cut, _ = cut_items(items, stay, shift[stay], now_sizes[stay])
        plans.append(attrs.evolve(plan, items=cut))
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

    def run(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
        large = [bool((plan.items.nbytes > max_bytes).any()) for plan in plans]
        return tuple(
            attrs.evolve(plan, items=_split_items(plan.items, max_bytes)) if cut else plan
            for plan, cut in zip(plans, large, strict=True)
        )

    return Step(split_chunks, (max_bytes,), {}, "rank", run)


def _split_items(items: WriteItems, max_bytes: int) -> WriteItems:
    inner = items.catalog.itemsize[items.row]
    if (inner > max_bytes).any():
        name = items.catalog.names[items.row[inner.argmax()]]
        raise ValueError(
            f"max_bytes={max_bytes} is less than one element of `{name}` ({inner.max()} bytes)"
        )
    inner = np.maximum(inner, 1)
    step = items.sizes.copy()  # how far a piece reaches along each axis
    for axis in reversed(range(step.shape[1])):
        step[:, axis] = np.clip(max_bytes // inner, 1, np.maximum(items.sizes[:, axis], 1))
        inner = inner * np.maximum(items.sizes[:, axis], 1)
    parts = np.maximum(-(-items.sizes // step), 1)
    row, cell = expand(parts)
    begin = cell * step[row]
    return cut_items(items, row, begin, np.minimum(step[row], items.sizes[row] - begin))[0]


def assign(group: Ints, rank: Ints, weight: Ints, ranks: int) -> Ints:
    """Choose one row of each group so that the weight per rank is even; see `share_out`.

    The rows of a group are the holders of one chunk; groups are numbered from 0, ascending. Return
    the chosen rows, one per group, ascending.

    >>> rows = assign(
    ...     np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0]), np.array([4, 4, 4, 4, 8]), 2
    ... )
    >>> rows.tolist()  # only rank 0 holds the chunk of weight 8, so rank 1 gets both others
    [1, 3, 4]
    """
    first = np.flatnonzero(np.diff(group, prepend=-1))
    count = np.diff(first, append=len(group))
    alone = first[count == 1]
    load = np.bincount(rank[alone], weight[alone], ranks).astype(np.int64)
    counts = distinct(count[count > 1]).tolist()
    numbers = [np.flatnonzero(count == n) for n in counts]
    shared = [
        Shared(number, weight[first[number]], rank[first[number][:, None] + np.arange(n)])
        for number, n in zip(numbers, counts, strict=True)
    ]
    chosen = first.copy()
    for number, holder in zip(numbers, share_out(shared, load), strict=True):
        chosen[number] += holder
    return chosen


@attrs.frozen(eq=False)
class Shared:
    """Chunks with the same number of holders; one row per chunk."""

    number: Ints  # the chunk's number among all chunks; ascending
    weight: Ints  # its bytes
    holders: Ints  # the ranks that hold it, ascending; one column per holder


def share_out(shared: Sequence[Shared], load: Ints) -> list[Ints]:
    """Assign each shared chunk to one holder so that the weight per rank is even.

    Heavier chunks come first, and each goes to its least loaded holder (the lowest rank on ties).
    If the result is uneven and there are few chunks, a search tries to improve it.

    Args:
        shared: The chunks, those with the fewest holders first.
        load: The bytes that each rank writes already.

    Returns:
        Per element of ``shared``, the column in ``holders`` of each chunk's writer.
    """
    chosen = []
    for chunks in shared:
        holder = _give(chunks, load)
        writers = np.take_along_axis(chunks.holders, holder[:, None], axis=1)[:, 0]
        weight = np.maximum(chunks.weight, 1)
        load = load + np.bincount(writers, weight, len(load)).astype(np.int64)
        chosen.append(holder)
    few = 0 < sum(len(chunks.number) for chunks in shared) <= _FEW
    uneven = few and load.max() > _EVEN * load.mean()
    return _even_out(shared, chosen, load) if uneven else chosen


def _give(chunks: Shared, load: Ints) -> Ints:
    """Return the holder that each chunk goes to; disjoint sets of ranks are handled together."""
    _, first, which = numbered(chunks.holders[:, 0])
    sets = chunks.holders[first]
    apart = len(distinct(sets.ravel())) == sets.size  # no rank is in two sets
    if len(sets) < _MANY or not apart or (sets[which] != chunks.holders).any():
        return _give_in_turn(chunks, load)
    weight, chosen = np.maximum(chunks.weight, 1), np.zeros(len(which), np.int64)
    order = np.lexsort((-chunks.weight, which))  # stable: in order of number among equals
    start = np.searchsorted(which[order], np.arange(len(sets) + 1))
    loads, counts = load[sets], np.diff(start)
    for turn in range(int(counts.max())):
        active = np.flatnonzero(counts > turn)
        at = order[start[active] + turn]
        chosen[at] = loads[active].argmin(axis=1)
        loads[active, chosen[at]] += weight[at]
    return chosen


def _give_in_turn(chunks: Shared, load: Ints) -> Ints:
    """Return the holder that each chunk goes to, one chunk after the other.

    Chunks with the same holders share a heap of them, least loaded first. Other heaps may raise a
    load; loads only rise, so a stale entry is noticed when it reaches the top.
    """
    chosen = np.zeros(len(chunks.number), np.int64)
    loads, weights = load.tolist(), np.maximum(chunks.weight, 1).tolist()
    heaps: dict[bytes, list[tuple[int, int, int]]] = {}
    for at in np.argsort(-chunks.weight, kind="stable").tolist():
        ranks = chunks.holders[at]
        heap = heaps.get(key := ranks.tobytes())
        if heap is None:
            heap = heaps[key] = [(loads[r], r, i) for i, r in enumerate(ranks.tolist())]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            _, rank, column = heap[0]
            heapq.heapreplace(heap, (loads[rank], rank, column))
        _, rank, column = heap[0]
        chosen[at] = column
        loads[rank] += weights[at]
        heapq.heapreplace(heap, (loads[rank], rank, column))
    return chosen


def _even_out(shared: Sequence[Shared], chosen: list[Ints], load: Ints) -> list[Ints]:
    """Search for a better assignment than ``chosen``, which leads to ``load``.

    With many chunks the greedy result is even already. The search is branch and bound, heaviest
    chunk first and least loaded holder first, and stops after a fixed number of steps, so that it
    is quick and deterministic.
    """
    chunks = [
        (-int(part.weight[row]), int(part.number[row]), which, row)
        for which, part in enumerate(shared)
        for row in range(len(part.number))
    ]
    chunks.sort()
    ranks = [shared[which].holders[row].tolist() for _, _, which, row in chunks]
    weights = [-weight for weight, *_ in chunks]
    base = load.tolist()  # without what is shared
    for (_, _, which, row), holders, weight in zip(chunks, ranks, weights, strict=True):
        base[holders[chosen[which][row]]] -= weight
    best, choice = int(load.max()), None
    stack: list[tuple[list[int], tuple[int, ...]]] = [(base, ())]
    for _ in range(_STEPS):
        if not stack or best <= _GOOD * load.mean():
            break
        loads, columns = stack.pop()
        if max(loads) >= best:
            continue  # a better one was found meanwhile
        if len(columns) == len(chunks):
            best, choice = max(loads), columns
            continue
        holders, weight = ranks[len(columns)], weights[len(columns)]
        # The holder that is put on the stack last is tried first.
        for column in sorted(range(len(holders)), key=lambda c: -loads[holders[c]]):
            after = loads.copy()
            after[holders[column]] += weight
            if max(after[holders[column]], max(base)) < best:
                stack.append((after, (*columns, column)))
    if choice is None:
        return chosen
    better = [part.copy() for part in chosen]
    for (_, _, which, row), column in zip(chunks, choice, strict=True):
        better[which][row] = column
    return better
