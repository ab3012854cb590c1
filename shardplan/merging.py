"""Average, merge and compare the weights of checkpoints, a block at a time.

``0.7 * open_checkpoint(a) + 0.3 * open_checkpoint(b)`` is a checkpoint, too: look at it, index its
tensors, or have `convert` write it in any format and sharding. What is read is added up a block at
a time, in float32, or in float64 where a tensor has it. Checkpoints may be cut differently, and be
of different formats; names and shapes must be equal. Integer tensors and non-tensor values come
from the first checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from operator import add

from shardplan.io import FormatError, MissingFileError, StoreError

from ._checkpoint import Checkpoint, in_sum, sum_of

__all__ = ["apply", "delta", "lerp", "mean", "merge", "merge_lora"]

_CONFIG = "adapter_config.json"
_MOST = 1 << 24  # bytes of a config
_UNKNOWN = ("alpha_pattern", "rank_pattern", "modules_to_save", "fan_in_fan_out", "use_dora")


def merge(checkpoints: Sequence[Checkpoint], weights: Sequence[float]) -> Checkpoint:
    """Return a weighted sum of checkpoints; the weights need not add up to 1.

    >>> import tempfile, torch
    >>> from shardplan import open_checkpoint, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, value in (("a", 1.0), ("b", 5.0)):
    ...         _ = save({"w": torch.full((2,), value)}, f"{folder}/{name}")
    ...     a, b = open_checkpoint(f"{folder}/a"), open_checkpoint(f"{folder}/b")
    ...     merge([a, b], [0.75, 0.25])["w"][:], mean(a, b)["w"][:]
    (tensor([2., 2.]), tensor([3., 3.]))
    """
    if not checkpoints or len(checkpoints) != len(weights):
        counts = f"not {len(checkpoints)} and {len(weights)}"
        raise ValueError(f"pass at least one checkpoint and as many weights, {counts}")
    return reduce(add, (one * weight for one, weight in zip(checkpoints, weights, strict=True)))


def mean(*checkpoints: Checkpoint) -> Checkpoint:
    """Return the average of checkpoints: their sum, each times 1/n."""
    return merge(checkpoints, [1 / max(len(checkpoints), 1)] * len(checkpoints))


def lerp(a: Checkpoint, b: Checkpoint, weight: float) -> Checkpoint:
    """Return the point between two checkpoints: ``(1 - weight) * a + weight * b``."""
    return merge([a, b], [1 - weight, weight])


def delta(new: Checkpoint, old: Checkpoint) -> Checkpoint:
    """Return what has changed: ``new - old``. To keep all digits, add ``.to("float32")``."""
    return new - old


def apply(base: Checkpoint, change: Checkpoint, scale: float = 1.0) -> Checkpoint:
    """Return ``base + scale * change``, where the change may lack some of the base's names."""
    return sum_of(base, change * scale, partial=True)


def merge_lora(base: Checkpoint, adapter: Checkpoint, scale: float | None = None) -> Checkpoint:
    """Return a model with a LoRA adapter merged in: ``W + scale * B @ A``.

    Args:
        base: The model.
        adapter: Matrices named as peft does: ``base_model.model.<module>.lora_A.weight``.
        scale: By default ``lora_alpha / r``, as the ``adapter_config.json`` beside them says (with
            ``use_rslora``, divided by the root of ``r``).

    >>> import tempfile, torch
    >>> from shardplan import open_checkpoint, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"up.weight": torch.zeros(2, 3)}, f"{folder}/base")
    ...     a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [10.0]])
    ...     _ = save({"up.lora_A.weight": a, "up.lora_B.weight": b}, f"{folder}/adapter")
    ...     base, adapter = (open_checkpoint(f"{folder}/{name}") for name in ("base", "adapter"))
    ...     merge_lora(base, adapter, scale=2.0)["up.weight"][:]
    tensor([[ 2.,  4.,  6.],
            [20., 40., 60.]])

    Raises:
        RefusedError: The adapter has tensors that fit none of the base's; it names all of them.
        ValueError: There is no ``scale``, or the config asks for what this does not do.
    """
    return in_sum(base, adapter, _scale(adapter) if scale is None else scale)


def _scale(adapter: Checkpoint) -> float:
    """Return the scale in an adapter's config."""
    try:
        data = adapter.reader.store.read_all(_CONFIG, limit=_MOST)
    except MissingFileError:
        text = f"there is no {_CONFIG} beside the adapter; pass scale=lora_alpha / r"
        raise ValueError(text) from None
    except StoreError as error:
        raise FormatError(_CONFIG, error.reason) from error
    try:
        config = json.loads(data)
        alpha, rank = float(config["lora_alpha"]), float(config["r"])
        rank = rank**0.5 if config.get("use_rslora") else rank
        scale = alpha / rank
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise FormatError(_CONFIG, "lora_alpha and r must be numbers, and r not 0") from None
    asked = [key for key in _UNKNOWN if config.get(key)]
    if asked:
        raise ValueError(f"{_CONFIG} has {', '.join(asked)}, which merge_lora does not support")
    return scale
