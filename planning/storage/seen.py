"""`seen_through`: a checkpoint as the state dict sees it that a planner maps to it."""

from __future__ import annotations

import attrs
import numpy as np

from ..columns.arrays import readonly
from ..columns.items import WriteItems
from ..metadata import Metadata
from ..passes import Passes, Stages, chain, inverse
from ..plans import SavePlan
from ..save import global_plan
from .target import held_tensors


@attrs.frozen(eq=False)
class Seen:
    """A checkpoint as the state dict sees it."""

    metadata: Metadata  # the tensors and values of the state dict
    # The boxes of the checkpoint's tensors that make them up. The names of items are the state
    # dict's, their sources the checkpoint's whole tensors. A fill is an element that the planner
    # leaves out, so that the checkpoint does not have it.
    items: WriteItems


def seen_through(metadata: Metadata, planner: Passes[SavePlan]) -> Seen:
    """Return a checkpoint as the state dict sees it that a planner maps to it.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan, split
    >>> metadata = global_plan([local_plan({"q": TensorSpec((4,)), "k": TensorSpec((2,))})])[1]
    >>> seen_through(metadata, split("qkv", {"q": 4, "k": 2})).metadata
    Metadata: 1 entry, 24 B
    name  dtype    shape  chunks
    qkv   float32  [6]    Grid(0:4:6)

    Raises:
        ValueError: The planner has no inverse.
        PlanError: The checkpoint is not one that the planner makes.
    """
    stages = Stages.of(planner, load=True)
    back = inverse(chain(*stages.own, *stages.rest))
    (plan,), seen = global_plan([held_tensors(metadata, whole=True)], back)
    start = readonly(np.zeros_like(plan.items.box_offsets))
    return Seen(seen, attrs.evolve(plan.items, source_offsets=start))
