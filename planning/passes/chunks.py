"""Passes that rewrite chunks: split large ones, and choose which rank writes replicas."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints
from ..columns.cuts import cut_items
from ..columns.items import WriteItems
from ..columns.world import Rows, World
from ..geometry.overlap import grid_cells
from ..plans import SavePlan
from .base import Step
from .shares import assign, by_holders, cut_boxes, least_share, parts_of, share_out


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


def balance(*, min_bytes: int | None = None) -> Step[SavePlan]:
    """Have each chunk that several ranks hold written once, and about the same bytes by every rank.

    It does what `dedup_replicas` does. Where that leaves a rank with more than its share, as a
    chunk does that is larger than a share, chunks are cut, and several holders write parts of them.

    Args:
        min_bytes: The smallest part, in bytes; by default 64 KiB to 1 MiB, a 32nd of a share.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"a": TensorSpec((3 << 16, 8)), "b": TensorSpec((1 << 16, 8))})
    >>> for done in balance()((plan, plan)):
    ...     print(*(f"{item.index.fqn}[{item.tensor_data.chunk.text}]" for item in done.items))
    a[0:131072, 0:8]
    a[131072:196608, 0:8] b[0:65536, 0:8]
    """
    if min_bytes is not None and min_bytes < 1:
        raise ValueError(f"min_bytes must be at least 1, not {min_bytes}")
    run = partial(_balance, min_bytes)
    return Step(balance, (), {"min_bytes": min_bytes}, "world", run, assigns=True)


def _balance(min_bytes: int | None, plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    world = World.of(plans)
    rows = world.rows
    if rows.faulty or not rows.repeats.any():
        return world
    group = _groups(rows)
    first, shared, load = by_holders(group, rows.rank, rows.nbytes, len(world))
    least, keep, cuts = min_bytes or least_share(shared, load), np.bincount(group)[group] == 1, []
    for chunks, shares in zip(shared, share_out(shared, load, least=least), strict=True):
        row, parts = first[chunks.number[shares.chunk]], parts_of(chunks, shares)
        keep[(row + shares.holder)[~parts]] = True
        value = rows.prop[rows.tensor[row[parts]]] < 0
        boxes = cut_boxes(shares.take(parts), rows.sizes[row[parts]], value, least)
        at = first[chunks.number[boxes.shares.chunk]] + boxes.shares.holder
        keep[at] = True
        cuts.append((at, rows.offsets[at] + boxes.offsets, boxes.sizes))
    at, offsets, sizes = (np.concatenate(column) for column in zip(*cuts, strict=True))
    if not len(at):
        return world.keep(keep)
    return _replace(world, rows.flat[at], offsets, sizes, keep)


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
    row, cell = grid_cells(parts)
    begin = cell * step[row]
    return cut_items(items, row, begin, np.minimum(step[row], items.sizes[row] - begin))[0]
