"""`dequantize`: a pass that says how a checkpoint is read.

It changes no plan. The tensors of a quantised checkpoint and those that come of them differ in
names, dtypes and shapes, so the checkpoint is opened as if it held the latter: then all other
passes see these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ..dtypes import Dtype, dtype_name
from ..plans import SavePlan
from .base import Passes, Step, as_steps


def dequantize(dtype: Dtype = "bfloat16", *, block: Sequence[int] | None = None) -> Step[SavePlan]:
    """Read tensors that are quantised in blocks as what they stand for.

    It is for `load`, `restore`, `open_checkpoint` and `convert`.

    These are FP8 with a ``weight_scale_inv`` (DeepSeek-V3) and MXFP4 with ``_blocks`` and
    ``_scales`` (gpt-oss). Each rank reads what it needs of elements and scales, a part at a time.
    To other passes the checkpoint looks as if it had been stored so; it does not matter where in
    a list this one stands.

    Args:
        dtype: What the tensors become.
        block: How many elements of the last two axes share an FP8 scale; by default what the
            ``config.json`` beside the tensors says, or else 128 × 128.

    >>> dequantize()
    dequantize()
    >>> reading_of([dequantize("float32")]).dtype
    'float32'

    Raises:
        ValueError: When run: on what is saved, or inside `where` or `on_ranks`.
    """
    options = {"dtype": dtype_name(dtype), "block": None if block is None else tuple(block)}
    return Step(dequantize, (), options, "rank", _refuse, "nothing here quantises tensors")


def _refuse(plans: tuple[SavePlan, ...]) -> tuple[SavePlan, ...]:
    raise ValueError(
        "dequantize says how a whole checkpoint is read: pass it to load or convert, by itself or "
        "in a list of passes; not to a save, nor inside where or on_ranks"
    )


@attrs.frozen
class Reading:
    """How a checkpoint is read."""

    dtype: str | None  # what quantised tensors become; None if they are read as they are stored
    # How many of their elements share a scale; None if the checkpoint says.
    block: tuple[int, ...] | None
    planner: Passes[SavePlan] | None  # the other passes


def reading_of(planner: Passes[SavePlan] | None) -> Reading:
    """Take `dequantize` out of a planner.

    >>> from shardplan.planning import drop
    >>> reading_of([drop("a"), dequantize()])
    Reading(dtype='bfloat16', block=None, planner=(drop('a'),))
    """
    steps = as_steps(planner)
    found: list[Any] = [s for s in steps if isinstance(s, Step) and s.factory is dequantize]
    if not found:
        return Reading(None, None, planner)
    if len(found) > 1:
        raise ValueError(f"dequantize is there {len(found)} times: {found}; once is enough")
    rest = tuple(step for step in steps if step is not found[0])
    return Reading(**found[0].options, planner=rest or None)
