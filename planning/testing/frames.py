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

from ..geometry.axes import Cut, canonical, cut, cut_source
from ..geometry.tilings import Chunk
from ..plans import LoadPlan, SavePlan
from ..records import MetadataIndex, TensorWriteData, WriteItem, WriteItemType
from .elements import item_elements, pairs, plus

__all__ = ["Framing", "assert_accounted", "filled", "framed", "written"]

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


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
    """What becomes of a tensor of the state dict: parted, turned and merged axes, cut in two.

    Attributes:
        shape: The tensor's shape.
        split, order: How its axes are parted and turned, as in `Axes`.
        merged: Its shape after that.
        axis: The axis along which it is then cut in two, padded and trimmed.
        at: The length of the first part, which is called ``name.0``, the second ``name.1``.
        keeps: Whether the second part is saved, or left out.
        pads: The length of the padding that follows the first part.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    merged: tuple[int, ...]
    axis: int
    at: int
    keeps: bool
    pads: int

    def of(self, name: str, tensor: Array) -> Arrays:
        """Return the checkpoint's tensors; padding is 7."""
        turned = tensor.reshape(self.split).transpose(self.order).reshape(self.merged)
        first, second = np.split(turned, [self.at], axis=self.axis)
        widths = [(0, self.pads * (axis == self.axis)) for axis in range(turned.ndim)]
        parts = {f"{name}.0": np.pad(first, widths, constant_values=7)}
        return {**parts, f"{name}.1": second} if self.keeps else parts


def framed(plan: SavePlan, framings: Mapping[str, Framing]) -> SavePlan:
    """Return a plan with its tensors changed as stated, by name; others stay as they are."""
    items: list[WriteItem] = []
    left_out: list[WriteItem] = []
    padding: dict[str, WriteItem] = {}
    for item in plan.items:
        framing = framings.get(item.index.fqn)
        if framing is None or item.tensor_data is None:
            items.append(item)
            continue
        for number, piece in _pieces(framing, item.tensor_data.chunk):
            made = _item(framing, item, number, piece)
            (items if number == 0 or framing.keeps else left_out).append(made)
        if framing.pads:
            padding.setdefault(item.index.fqn, _fill(framing, item))
    return attrs.evolve(plan, items=[*items, *padding.values()], held=plan.holds, left_out=left_out)


def _pieces(framing: Framing, held: Chunk) -> Iterator[tuple[int, Cut]]:
    """Yield the parts of a held box in either part of the tensor, in global frames."""
    axes = canonical(framing.split, framing.order, framing.shape, framing.merged)
    for piece in cut_source(axes, framing.shape, framing.merged, held.offsets, held.sizes):
        low = piece.chunk_offsets[framing.axis]
        high = low + piece.chunk_sizes[framing.axis]
        for number, (start, end) in enumerate([(0, framing.at), (framing.at, high)]):
            first, last = max(low, start), min(high, end)
            if first >= last:
                continue
            offsets = _put(piece.chunk_offsets, framing.axis, first)
            sizes = _put(piece.chunk_sizes, framing.axis, last - first)
            within = tuple(a - b for a, b in zip(offsets, piece.chunk_offsets, strict=True))
            for part in cut(piece.axes, piece.box_sizes, piece.chunk_sizes, within, sizes):
                chunk = plus(piece.chunk_offsets, part.chunk_offsets)
                moved = _put(chunk, framing.axis, chunk[framing.axis] - start)
                box = plus(piece.box_offsets, part.box_offsets)
                yield number, part._replace(box_offsets=box, chunk_offsets=moved)


def _item(framing: Framing, item: WriteItem, number: int, piece: Cut) -> WriteItem:
    data, box = item.tensor_data, Chunk(piece.box_offsets, piece.box_sizes)
    assert data is not None
    if number == 1 and not framing.keeps:
        mine = attrs.evolve(data, chunk=box)
        return WriteItem(MetadataIndex(item.index.fqn), item.type, mine, item.source)
    size = list(framing.merged)
    size[framing.axis] = (framing.at + framing.pads, size[framing.axis] - framing.at)[number]
    chunk = Chunk(piece.chunk_offsets, piece.chunk_sizes)
    mine = TensorWriteData(chunk, data.properties, size)
    index = MetadataIndex(f"{item.index.fqn}.{number}")
    return WriteItem(index, WriteItemType.SHARD, mine, item.source, box, piece.axes)


def _fill(framing: Framing, item: WriteItem) -> WriteItem:
    assert item.tensor_data is not None
    size = _put(framing.merged, framing.axis, framing.at + framing.pads)
    offsets = _put((0,) * len(size), framing.axis, framing.at)
    chunk = Chunk(offsets, _put(size, framing.axis, framing.pads))
    data = TensorWriteData(chunk, item.tensor_data.properties, size)
    index = MetadataIndex(f"{item.index.fqn}.0")
    return WriteItem(index, WriteItemType.SHARD, data, item.source, fill=7)


def _put(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
