"""Oracles for plans whose tensors lie otherwise in the state dict than in the checkpoint.

They move real values, element by element, and count. Use small tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..geometry.axes import Axes
from ..geometry.tilings import Chunk
from ..passes import chain, pad, permute, rename, reshape, split, trim
from ..passes.base import Step
from ..plans import LoadPlan, SavePlan
from ..records import WriteItem

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Element = tuple[int, ...]
"""Where an element lies in its tensor, in the global frame."""


def item_elements(item: WriteItem) -> Iterator[tuple[Element, Element | None]]:
    """Yield each element that an item writes, with the state dict's that it is made of.

    An element of padding is made of none.
    """
    if item.tensor_data is None:
        yield (), ()
        return
    chunk, box = item.tensor_data.chunk, item.source_chunk
    if box is not None:
        yield from pairs(chunk, box, item.axes)
        return
    for element in np.ndindex(chunk.sizes):
        yield plus(chunk.offsets, element), None


def pairs(chunk: Chunk, box: Chunk, axes: Axes | None) -> Iterator[tuple[Element, Element]]:
    """Yield each element of a chunk, with that of the box which becomes it."""
    number: npt.NDArray[Any] = np.arange(box.numel)
    if axes is not None and box.numel:
        number = number.reshape(axes.split).transpose(axes.order)
    number = number.reshape(chunk.sizes)
    for element in np.ndindex(chunk.sizes):
        origin = [int(at) for at in np.unravel_index(int(number[element]), box.sizes)]
        yield plus(chunk.offsets, element), plus(box.offsets, origin)


def plus(a: Sequence[int], b: Sequence[int]) -> Element:
    """Add two vectors."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def written(plans: Iterable[SavePlan], tensors: Mapping[str, Array]) -> Arrays:
    """Write every element, and return the checkpoint's tensors.

    Args:
        plans: One plan per rank.
        tensors: The global tensors of the state dicts, by name.

    Raises:
        AssertionError: An element is written twice, or not at all.

    >>> from shardplan.planning import local_plan
    >>> sd = {"w": np.arange(3)}
    >>> written([local_plan(sd)], sd)
    {'w': array([0, 1, 2])}
    """
    values: Arrays = {}
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for item in (item for plan in plans for item in plan.items):
        data, name = item.tensor_data, item.index.fqn
        if data is None:
            continue
        source = tensors[item.source.fqn]
        into = values.setdefault(name, np.zeros(data.size, source.dtype))
        count = counts.setdefault(name, np.zeros(data.size, np.int64))
        for element, origin in item_elements(item):
            into[element] = item.fill if origin is None else source[origin]
            count[element] += 1
    for name, count in counts.items():
        wrong = np.argwhere(count != 1).tolist()
        assert not wrong, f"`{name}`: {wrong[0]} is written {count[tuple(wrong[0])]} times"
    return values


def filled(plan: LoadPlan, saved: Mapping[str, Array], target: SavePlan, rank: int = 0) -> Arrays:
    """Read every element, and return the tensors of the state dict; what is not read is -1.

    Args:
        plan: What the rank reads.
        saved: The checkpoint's tensors.
        target: What the rank holds, before passes.
        rank: Which rank it is; what others read for it counts.

    Raises:
        AssertionError: An element is filled twice.
    """
    values, counts = Arrays(), dict[str, npt.NDArray[np.int64]]()
    for item in target.holds:
        if item.tensor_data is not None:
            values[item.source.fqn] = np.full(item.tensor_data.size, -1.0)
            counts[item.source.fqn] = np.zeros(item.tensor_data.size, np.int64)
    for read in (*plan.items, *(t.read for t in plan.transfers if t.target == rank)):
        name, start, shard = read.dest_index.fqn, read.storage_index.offset, read.dest_index.offset
        if start is None or shard is None:
            continue
        own, box = Chunk(read.storage_offsets, read.lengths), read.dest_box
        for element, origin in pairs(own, box, read.axes):
            into = plus(shard, origin)
            values[name][into] = saved[read.storage_index.fqn][plus(start, element)]
            counts[name][into] += 1
            assert counts[name][into] == 1, f"`{name}`: {into} is filled twice"
    return values


def assert_accounted(plans: Iterable[SavePlan]) -> None:
    """Assert that ranks move or leave out each element that they hold once, or drop its tensor.

    Every plan must account for all that its rank holds, as plans do before replicas are assigned.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((3,))})
    >>> assert_accounted([attrs.evolve(plan, items=[], left_out=plan.items)])
    """
    plans = tuple(plans)
    used = {item.source.fqn for plan in plans for item in plan.items if item.fill is None}
    for rank, plan in enumerate(plans):
        held, moved, out = (_count(i or ()) for i in (plan.holds, plan.items, plan.left_out))
        for name, elements in held.items():
            if name in used:
                found = moved.get(name, Counter()) + out.get(name, Counter())
                assert found == elements, f"`{name}` of rank {rank}: {found - elements} is wrong"
        assert moved.keys() <= held.keys(), f"rank {rank} moves what it does not hold"


def _count(items: Iterable[WriteItem]) -> dict[str, Counter[Any]]:
    """Count the elements of the state dict that items are made of, with their shards."""
    counts: dict[str, Counter[Any]] = {}
    for item in items:
        if item.fill is None:
            own = counts.setdefault(item.source.fqn, Counter())
            own.update((item.source.offset, origin) for _, origin in item_elements(item))
    return counts


@attrs.frozen
class Framing:
    """What becomes of a tensor of the state dict: parted, turned and merged axes, cut in two."""

    shape: tuple[int, ...]  # the tensor's shape
    split: tuple[int, ...]  # how its axes are parted and turned, as in `Axes`
    order: tuple[int, ...]
    merged: tuple[int, ...]  # its shape after that
    axis: int  # the axis along which it is then cut in two, padded and trimmed
    at: int  # the length of the first part, which is called `name.0`, the second `name.1`
    keeps: bool  # whether the second part is saved, or left out
    pads: int  # the length of the padding that follows the first part

    def passes(self, name: str) -> Step[SavePlan]:
        """Return the passes that change a tensor so, where a rank holds any of it."""
        first, second, rest = f"{name}.0", f"{name}.1", self.merged[self.axis] - self.at
        turned = [
            reshape(name, self.split, required=False),
            permute(name, self.order, required=False),
            reshape(name, self.merged, required=False),
        ]
        parted = [
            trim(name, axis=self.axis, to=self.at, required=False),
            rename({name: first}, required=False),
        ]
        if self.keeps:
            parted = [split(name, {first: self.at, second: rest}, self.axis, required=False)]
        length = self.at + self.pads
        padded = pad(first, axis=self.axis, to=length, value=7, required=False)
        return chain(*turned, *parted, *([padded] if self.pads else []))

    def of(self, name: str, tensor: Array) -> Arrays:
        """Return the checkpoint's tensors; padding is 7."""
        turned = tensor.reshape(self.split).transpose(self.order).reshape(self.merged)
        first, second = np.split(turned, [self.at], axis=self.axis)
        widths = [(0, self.pads * (axis == self.axis)) for axis in range(turned.ndim)]
        parts = {f"{name}.0": np.pad(first, widths, constant_values=7)}
        return {**parts, f"{name}.1": second} if self.keeps else parts


def framed(plan: SavePlan, framings: Mapping[str, Framing]) -> SavePlan:
    """Return a plan with its tensors changed as stated, by name; others stay as they are."""
    done = chain(*(framing.passes(name) for name, framing in framings.items()))((plan,))[0]
    return attrs.evolve(done, held=plan.holds, left_out=done.left_out or ())
