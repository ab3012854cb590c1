"""How do I add a step? Passes: pure functions from one plan per rank to one plan per rank.

Any ``Callable[[tuple[Plan, ...]], tuple[Plan, ...]]`` is a pass. A one-rank tuple is a legal input,
so the same pass runs on one rank's own plan or on everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import numpy as np

from .balance import assign
from .records import LoadPlan, SavePlan
from .world import World

__all__ = ["Pass", "chain", "dedup_replicas"]

P = TypeVar("P", SavePlan, LoadPlan)
Pass = Callable[[tuple[P, ...]], tuple[P, ...]]


def chain(*passes: Pass[P]) -> Pass[P]:
    """Return the pass that runs ``passes`` one after the other; none of them is the identity.

    >>> chain()((SavePlan([]),)) == (SavePlan([]),)
    True
    """

    def run(plans: tuple[P, ...]) -> tuple[P, ...]:
        for step in passes:
            before = len(plans)
            plans = step(plans)
            if len(plans) != before:
                name = getattr(step, "__name__", repr(step))
                raise ValueError(f"pass {name} turned {before} plans into {len(plans)}")
        return plans

    run.__name__ = f"chain({', '.join(getattr(p, '__name__', repr(p)) for p in passes)})"
    return run


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
        world = plans if isinstance(plans, World) else World(plans)
        rows = world.rows
        if rows.issues or not rows.repeats.any():
            return world  # nothing to do, or nothing that can be done: it will be reported
        if prefer == "lowest_rank":
            return world.keep(~rows.repeats)
        group = np.cumsum(~rows.repeats) - 1
        itemsize = np.array([*(p.itemsize for p in rows.props), 1])[rows.prop]
        nbytes = rows.sizes.prod(axis=1) * itemsize[rows.tensor]
        keep = np.zeros(len(rows), bool)
        keep[assign(group, rows.rank, nbytes, len(world))] = True
        return world.keep(keep)

    return dedup


def as_pass(passes: Pass[P] | Iterable[Pass[P]]) -> Pass[P]:
    """Return one pass, given one or several."""
    return passes if callable(passes) else chain(*passes)
