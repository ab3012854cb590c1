"""Who writes what several ranks hold: shares of chunks, so that the bytes per rank are even.

1. Chunks with the fewest holders come first. Of these, the heaviest come first, and each goes to
   its least loaded holder.
2. A set of ranks where that leaves one with more than its share is poured anew: its chunks are laid
   end to end and cut where each rank has enough, like water that fills loads up to one level.
3. If nothing may be cut and there are few chunks, a short search looks for a better choice.

Time is near-linear in chunks and ranks, and the result depends on nothing else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import ColumnTable, Ints, distinct, group_rows, numbered, pad, spread

_EVEN: Final = 1.05  # max over mean: pour or search above this
_GOOD: Final = 1.001  # max over mean: stop the search below this
_FEW: Final = 256  # search only with at most this many chunks
_WORK: Final = 1 << 17  # holders that a search looks at
_MANY: Final = 16  # sets of ranks from which on they are handled together
SMALLEST: Final = 1 << 16  # bytes of the smallest share, at least
_LARGEST: Final = 1 << 20  # and at most
_PARTS: Final = 32  # what a rank writes is this many of the smallest shares


@attrs.frozen(eq=False)
class Shared:
    """Chunks with the same number of holders; one row per chunk."""

    number: Ints  # the chunk's number among all chunks; ascending
    weight: Ints  # its bytes
    holders: Ints  # the ranks that hold it, ascending; one column per holder


@attrs.frozen(eq=False)
class Shares(ColumnTable):
    """What each holder writes of the chunks of a `Shared`; by chunk, then by place in it."""

    chunk: Ints  # the row of the chunk
    holder: Ints  # the column of the holder
    low: Ints  # the share's first byte, counted from the start of the chunk
    high: Ints  # its end; a whole chunk is one share


def share_out(shared: Sequence[Shared], load: Ints, *, least: int = 0) -> list[Shares]:
    """Share chunks out to their holders so that the bytes per rank are even.

    Args:
        shared: The chunks, those with the fewest holders first.
        load: The bytes that each rank writes already.
        least: The bytes of the smallest share that a chunk is cut into; 0 if none may be cut.

    >>> chunks = Shared(np.arange(2), np.array([1 << 20, 1 << 22]), np.array([[0, 1], [0, 1]]))
    >>> (shares,) = share_out([chunks], np.zeros(2, np.int64), least=1024)
    >>> shares.chunk.tolist(), shares.holder.tolist(), (shares.high - shares.low).tolist()
    ([0, 1, 1], [0, 0, 1], [1048576, 1572864, 2621440])
    """
    base, mean = load, _mean(shared, load)
    done = []
    for chunks in shared:
        holder = _give(chunks, load)
        shares = Shares(np.arange(len(holder)), holder, 0 * holder, np.maximum(chunks.weight, 1))
        if least and (chunks.weight >= 2 * least).any():
            shares = _poured(chunks, shares, load, mean, least)
        load = load + _written(chunks, shares, len(load))
        done.append(shares)
    few = 0 < sum(len(chunks.number) for chunks in shared) <= _FEW
    whole = all(
        len(part.chunk) == len(chunks.number) for part, chunks in zip(done, shared, strict=True)
    )
    if not few or not whole or load.max() <= _EVEN * load.mean():
        return done
    chosen = _search(shared, [part.holder for part in done], base, int(load.max()))
    return [attrs.evolve(part, holder=holder) for part, holder in zip(done, chosen, strict=True)]


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
    first, shared, load = by_holders(group, rank, weight, ranks)
    chosen = first.copy()
    for chunks, shares in zip(shared, share_out(shared, load), strict=True):
        chosen[chunks.number] += shares.holder
    return chosen


def by_holders(
    group: Ints, rank: Ints, weight: Ints, ranks: int
) -> tuple[Ints, list[Shared], Ints]:
    """Return the first row of each group, the groups by number of rows, and the load of the rest.

    Groups of one row are what a rank has to itself: its load.
    """
    first = np.flatnonzero(np.diff(group, prepend=-1))
    count = np.diff(first, append=len(group))
    alone = first[count == 1]
    load = np.bincount(rank[alone], weight[alone], ranks).astype(np.int64)
    shared = []
    for n in distinct(count[count > 1]).tolist():
        number = np.flatnonzero(count == n)
        holders = rank[first[number][:, None] + np.arange(n)]
        shared.append(Shared(number, weight[first[number]], holders))
    return first, shared, load


def least_share(shared: Sequence[Shared], load: Ints) -> int:
    """Return the bytes of the smallest share that a chunk is cut into."""
    return int(np.clip(_mean(shared, load) // _PARTS, SMALLEST, _LARGEST))


def parts_of(chunks: Shared, shares: Shares) -> npt.NDArray[np.bool_]:
    """Return which shares are not whole chunks."""
    parts: npt.NDArray[np.bool_] = (
        shares.high - shares.low < np.maximum(chunks.weight, 1)[shares.chunk]
    )
    return parts


def _mean(shared: Sequence[Shared], load: Ints) -> float:
    """Return the bytes per rank, if they are even."""
    return (int(load.sum()) + sum(int(c.weight.sum()) for c in shared)) / max(len(load), 1)


def _written(chunks: Shared, shares: Shares, ranks: int) -> Ints:
    """Return the bytes of shares per rank."""
    writers = chunks.holders[shares.chunk, shares.holder]
    return np.bincount(writers, shares.high - shares.low, ranks).astype(np.int64)


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


def _poured(chunks: Shared, given: Shares, load: Ints, mean: float, least: int) -> Shares:
    """Pour the chunks of the sets of ranks that are uneven once chunks are given out whole."""
    first, which = group_rows([chunks.holders])
    sets = chunks.holders[first]
    total = np.bincount(which, given.high).astype(np.int64)
    load = load + _written(chunks, given, len(load))
    apart = len(distinct(sets.ravel())) == sets.size  # no rank is in two sets
    every = np.flatnonzero(np.bincount(which, given.high >= 2 * least))  # where any can be cut
    parts, poured = [given], np.zeros(len(which), bool)
    for some in [every] if apart else np.split(every, max(len(every), 1)):
        some = some[load[sets[some]].max(axis=1) > _EVEN * mean]
        mine = np.flatnonzero(np.isin(which, some))
        own = given.take(mine)
        base = load - _written(chunks, own, len(load))
        level = _level(base[sets[some]], total[some])
        some = some[load[sets[some]].max(axis=1) > _EVEN * level]
        mine = mine[np.isin(which[mine], some)]
        if len(mine):
            load = load - _written(chunks, given.take(mine), len(load))
            weight, of_set = given.high[mine], numbered(which[mine]).which
            new = _pour(weight, of_set, load[sets[some]], least)
            new = attrs.evolve(new, chunk=mine[new.chunk])
            load = load + _written(chunks, new, len(load))
            poured[mine] = True
            parts.append(new)
    shares = Shares.concat([given.take(~poured), *parts[1:]])
    return shares.take(np.argsort(shares.chunk, kind="stable"))


def _level(loads: Ints, total: Ints) -> npt.NDArray[np.float64]:
    """Return how high water stands in sets of ranks, given their loads and how much is poured in.

    >>> _level(np.array([[0, 10], [0, 1]]), np.array([5, 5])).tolist()
    [5.0, 3.0]
    """
    filled = np.cumsum(np.sort(loads, axis=1), axis=1) + total[:, None]
    level: npt.NDArray[np.float64] = (filled / np.arange(1, loads.shape[1] + 1)).min(axis=1)
    return level


def _pour(weight: Ints, which: Ints, loads: Ints, least: int) -> Shares:
    """Lay the chunks of each set end to end, and cut them where a rank has enough.

    A chunk that is too small for that goes to the holder that would get its middle.
    """
    total = np.bincount(which, weight, len(loads)).astype(np.int64)
    quota = np.maximum(_level(loads, total)[:, None] - loads, 0)
    ends = np.rint(np.cumsum(quota, axis=1)).astype(np.int64)
    ends = np.minimum(ends, total[:, None])
    ends[:, -1] = total
    origin = np.cumsum(total) - total  # of each set, where all sets lie end to end
    edges = (ends + origin[:, None]).ravel()
    order = np.argsort(which, kind="stable")
    start = np.empty(len(weight), np.int64)
    start[order] = np.cumsum(weight[order]) - weight[order]
    first = np.searchsorted(edges, start, side="right")
    last = np.searchsorted(edges, start + weight, side="left")
    chunk, nth = spread(last - first + 1)
    at = first[chunk] + nth
    low = np.maximum(np.append(0, edges)[at] - start[chunk], 0)
    high = np.minimum(edges[at] - start[chunk], weight[chunk])
    whole, small = weight[chunk], (weight < 2 * least)[chunk]
    low = np.where(small, np.where(2 * low < whole, 0, whole), low)
    high = np.where(small, np.where(2 * high < whole, 0, whole), high)
    shares = Shares(chunk, at % loads.shape[1], low, high)
    return shares.take(high > low)


@attrs.frozen(eq=False)
class Cuts:
    """The boxes of the shares of chunks that are cut; shares too small to be one are left out."""

    shares: Shares
    offsets: Ints  # relative to the chunk
    sizes: Ints


def cut_boxes(shares: Shares, sizes: Ints, is_value: npt.NDArray[np.bool_], least: int) -> Cuts:
    """Return the boxes that come nearest to some shares, along the first axis that is fine enough.

    Args:
        shares: All shares of the chunks that are cut.
        sizes: Per share, the sizes of its chunk.
        is_value: Per share, whether it is a non-tensor value, which stays whole.
        least: The bytes of the smallest share.

    >>> shares = Shares(*np.array([[0, 0], [0, 1], [0, 30], [30, 48]]))
    >>> cuts = cut_boxes(shares, np.array([[1, 12], [1, 12]]), np.zeros(2, bool), 4)
    >>> cuts.offsets.tolist(), cuts.sizes.tolist()
    ([[0, 0], [0, 8]], [[1, 8], [1, 4]])
    """
    row, axes, sizes = np.arange(len(sizes)), sizes.shape[1], pad(sizes, 1, 1)
    _, last, which = numbered(shares.chunk[::-1])
    weight = shares.high[::-1][last][which][::-1]  # of the whole chunk
    fine = sizes * least >= weight[:, None]
    axis = np.where(fine.any(axis=1), fine.argmax(axis=1), sizes.argmax(axis=1))
    length = sizes[row, axis]
    step = np.maximum(-(-least * length // weight), 1)  # cuts lie at multiples
    whole = is_value | (length < 2 * step)
    ends = []
    for place in (shares.low, shares.high):
        near = np.rint(place / weight * length / step).astype(np.int64) * step
        near = np.where((length - near < step) | (place == weight), length, near)
        ends.append(np.where(whole, np.where(2 * place < weight, 0, length), near))
    begin, end = ends
    offsets, sizes = np.zeros_like(sizes), sizes.copy()
    offsets[row, axis], sizes[row, axis] = begin, end - begin
    kept = begin < end
    return Cuts(shares.take(kept), offsets[kept, :axes], sizes[kept, :axes])


def _search(shared: Sequence[Shared], chosen: Sequence[Ints], base: Ints, best: int) -> list[Ints]:
    """Search for a better choice of holders than ``chosen``, which leads to a load of ``best``.

    Depth first, heaviest chunk first and least loaded holder first; it stops after it has looked at
    a fixed number of holders, so that it is quick and deterministic.
    """
    chunks = sorted(
        (-int(part.weight[row]), int(part.number[row]), which, row)
        for which, part in enumerate(shared)
        for row in range(len(part.number))
    )
    weights = [-weight for weight, *_ in chunks]
    ranks = [shared[which].holders[row].tolist() for _, _, which, row in chunks]
    loads, work = base.tolist(), _WORK
    good = _GOOD * (sum(loads) + sum(weights)) / len(loads)
    choice: list[int] = []
    tries: list[list[int]] = []  # per chunk that was given out, the holders that are still to try
    found: list[int] | None = None
    while work > 0 and best > good:
        if len(tries) == len(choice) and len(choice) < len(chunks):
            holders = ranks[len(choice)]
            tries.append(sorted(range(len(holders)), key=lambda n: -loads[holders[n]]))
            work -= len(holders)
        if len(tries) > len(choice) and tries[-1]:
            rank = ranks[len(choice)][tries[-1][-1]]
            column, weight = tries[-1].pop(), weights[len(choice)]
            if loads[rank] + weight < best:
                loads[rank] += weight
                choice.append(column)
            continue
        if len(choice) == len(chunks):
            best, found = max(loads), choice.copy()
        else:
            tries.pop()
        if not choice:
            break
        loads[ranks[len(choice) - 1][choice[-1]]] -= weights[len(choice) - 1]
        choice.pop()
    if found is None:
        return list(chosen)
    better = [part.copy() for part in chosen]
    for (_, _, which, row), column in zip(chunks, found, strict=True):
        better[which][row] = column
    return better
