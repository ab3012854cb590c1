"""Hypothesis strategies for plans, for your own tests; all are valid by construction.

    from hypothesis import given, settings
    from shardplan.planning import global_plan
    from shardplan.planning.strategies import assert_written_once, save_plans

    @settings(deadline=None)
    @given(save_plans())
    def test_my_pass_loses_nothing(plans):
        assert_written_once(*global_plan(plans, passes=[my_pass(), dedup_replicas()]))

Without ``deadline=None``, Hypothesis fails an example that takes long, as happens where tests share
a machine. Plans and state dicts of an example that fails are printed as code too, to be pasted into
a test.

Tensors are small, because the oracles of `planning.testing` look at every element, and
examples shrink towards one small tensor on one rank. Needs the extra ``shardplan[hypothesis]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ..dtypes import ITEMSIZE, Dtype
from ..errors import named_extras
from ..geometry.tilings import Chunk, Tiling, tile_chunks
from ..mesh import Mesh, Placement, Replicate, Shard, StridedShard, TensorSpec, local_chunks
from ..plans import SavePlan
from ..records import MetadataIndex, TensorProperties, TensorWriteData, WriteItem, WriteItemType
from . import (
    assert_accounted,
    assert_all_saved,
    assert_read_once,
    assert_written_once,
    cells,
    count_writes,
    filled,
    trace_reads,
    written,
)
from .frames import Framing
from .printing import as_code

with named_extras("shardplan.planning.testing.strategies"):
    from hypothesis import note
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "assert_accounted", "assert_all_saved", "assert_read_once", "assert_written_once", "cells",
    "chunks", "count_writes", "dtypes", "filled", "framings", "meshes", "placements", "save_plans",
    "shapes", "state_dicts", "tensor_specs", "tilings", "trace_reads", "values", "written",
]  # fmt: skip

_AXES: Final = ("dp", "tp", "pp", "cp", "ep")
_COMMON: Final = ("float32", "float64", "float16", "int64", "int8", "uint8", "bool", "complex64")


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 6
) -> SearchStrategy[tuple[int, ...]]:
    """Generate the shapes of small tensors, also without axes, or empty (``min_side=0``)."""
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes() -> SearchStrategy[str]:
    """Generate the names of all dtypes that a checkpoint can carry, plain ones first."""
    rest = [name for name in ITEMSIZE if name not in _COMMON]
    return st.sampled_from([*_COMMON, *rest])


def chunks(shape: Sequence[int], *, allow_empty: bool = False) -> SearchStrategy[Chunk]:
    """Generate boxes that lie inside a tensor; empty ones if allowed, or if the tensor is empty."""

    def interval(length: int) -> SearchStrategy[tuple[int, int]]:
        least = 0 if allow_empty or not length else 1
        return st.integers(0, length - least).flatmap(
            lambda start: st.tuples(st.just(start), st.integers(least, length - start))
        )

    return st.tuples(*map(interval, shape)).map(
        lambda box: Chunk([start for start, _ in box], [size for _, size in box])
    )


def tilings(shape: Sequence[int], *, max_chunks: int = 12) -> SearchStrategy[Tiling]:
    """Generate ways to cut a tensor so that each element lies in exactly one chunk.

    One chunk, grids with uneven cuts, and boxes from repeated splits that form no grid, in any
    order. An empty tensor has one empty chunk.
    """
    return _tilings(tuple(shape), max_chunks)


# Strategies are values: making one costs more than drawing from it, so those that recur are kept.
@lru_cache(maxsize=1 << 12)
def _tilings(shape: tuple[int, ...], max_chunks: int) -> SearchStrategy[Tiling]:
    whole = Chunk([0] * len(shape), shape)
    if math.prod(shape) < 2:
        return st.just(tile_chunks([whole]))
    boxes = _splits(whole, max_chunks) | _grids(shape, max_chunks)
    return (boxes | boxes.flatmap(st.permutations)).map(tile_chunks)


@st.composite
def _splits(draw: st.DrawFn, whole: Chunk, max_chunks: int) -> list[Chunk]:
    """Split a box, then one of the halves, and so on."""
    boxes = [whole]
    for _ in range(draw(st.integers(0, max_chunks - 1))):
        choices = [
            (number, axis)
            for number, box in enumerate(boxes)
            for axis, size in enumerate(box.sizes)
            if size > 1
        ]
        if not choices:
            break
        number, axis = draw(st.sampled_from(choices))
        box = boxes[number]
        at = draw(st.integers(1, box.sizes[axis] - 1))
        sizes, offsets, rest = list(box.sizes), list(box.offsets), list(box.sizes)
        sizes[axis], rest[axis] = at, box.sizes[axis] - at
        offsets[axis] += at
        boxes[number : number + 1] = [Chunk(box.offsets, sizes), Chunk(offsets, rest)]
    return boxes


@st.composite
def _grids(draw: st.DrawFn, shape: tuple[int, ...], max_chunks: int) -> list[Chunk]:
    """Cut every axis at any positions."""
    axes, left = [], max_chunks
    for length in shape:
        most = min(left, length) - 1
        inner = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=most)) if most else ()
        cuts = [0, *sorted(inner), length]
        axes.append(list(itertools.pairwise(cuts)))
        left //= len(axes[-1])
    return [
        Chunk([low for low, _ in box], [high - low for low, high in box])
        for box in itertools.product(*axes)
    ]


@st.composite
def meshes(draw: st.DrawFn, *, max_ranks: int = 6, max_axes: int = 3) -> Mesh:
    """Generate meshes of a few ranks, on one to five axes."""
    sizes: dict[str, int] = {}
    for name in _AXES[: draw(st.integers(1, max_axes))]:
        sizes[name] = draw(st.integers(1, max_ranks // math.prod(sizes.values())))
    return Mesh(sizes)


def placements(mesh: Mesh, shape: Sequence[int]) -> SearchStrategy[tuple[Placement, ...]]:
    """Generate one placement for each axis of a mesh: Replicate, Shard or StridedShard."""
    return _placements(len(mesh.names), len(shape))


@lru_cache(maxsize=1 << 8)
def _placements(count: int, ndim: int) -> SearchStrategy[tuple[Placement, ...]]:
    one: SearchStrategy[Placement] = st.just(Replicate())
    if ndim:
        dims = st.integers(0, ndim - 1)
        one |= st.builds(Shard, dims) | st.builds(StridedShard, dims, st.integers(1, 4))
    return st.tuples(*(one for _ in range(count)))


def tensor_specs(
    *,
    mesh: Mesh | None = None,
    shape: SearchStrategy[tuple[int, ...]] | None = None,
    dtype: SearchStrategy[Dtype] | None = None,
) -> SearchStrategy[TensorSpec]:
    """Generate `TensorSpec`s; without a mesh they are whole on every rank."""
    sizes, kinds = (shapes() if shape is None else shape), (dtypes() if dtype is None else dtype)
    if mesh is None:
        return st.builds(TensorSpec, sizes, kinds)
    return sizes.flatmap(
        lambda size: st.builds(TensorSpec, st.just(size), kinds, placements(mesh, size))
    )


def values() -> SearchStrategy[Any]:
    """Generate what a state dict holds besides tensors; each equals itself, so NaN is left out."""
    numbers = st.booleans() | st.integers() | st.floats(allow_nan=False)
    plain: SearchStrategy[Any] = st.one_of(
        st.none(), numbers, st.text(max_size=4), st.binary(max_size=4)
    )
    lists = st.lists(plain, max_size=3)
    return plain | lists | lists.map(tuple) | st.just({})


@st.composite
def state_dicts(
    draw: st.DrawFn, *, mesh: Mesh | None = None, max_leaves: int = 8
) -> dict[Any, Any]:
    """Generate state dicts as training scripts have them: nested, mixed, with keys of any type.

    Dicts, lists and tuples hold numpy arrays of several dtypes, `TensorSpec`s and other values. No
    two leaves ever flatten to the same name.

    >>> from hypothesis import find
    >>> sorted(map(len, [find(state_dicts(), bool), find(state_dicts(), lambda sd: not sd)]))
    [0, 1]
    """
    made = draw(_state_dicts(mesh, max_leaves))
    note(_AsCode("state_dict", made))
    return made


@lru_cache(maxsize=1 << 4)
def _state_dicts(mesh: Mesh | None, max_leaves: int) -> SearchStrategy[dict[Any, Any]]:
    leaves = values() | _arrays() | tensor_specs(mesh=mesh)

    def nested(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        return _dicts(inner) | lists | lists.map(tuple)

    return _dicts(st.recursive(leaves, nested, max_leaves=max_leaves))


class _AsCode:
    """A value to note with a failing example, as code; others are not printed."""

    def __init__(self, name: str, value: object) -> None:
        self._name, self._value = name, value

    def __repr__(self) -> str:
        return f"{self._name} = {as_code(self._value)}"


def _dicts(inner: SearchStrategy[Any]) -> SearchStrategy[dict[Any, Any]]:
    """Generate dicts whose names differ before the first dot, so that flattening cannot clash."""
    words = st.text("abw_0", max_size=3)
    digits = st.integers(0, 9)
    dotted = st.tuples(words, words).map(".".join)
    keys = st.one_of(words, digits, dotted, st.booleans(), st.none(), st.tuples(digits))
    pairs = st.lists(
        st.tuples(keys, inner),
        max_size=4,
        unique_by=(lambda pair: str(pair[0]).partition(".")[0], lambda pair: pair[0]),
    )
    return pairs.map(dict)


def _arrays() -> SearchStrategy[Any]:
    """Generate numpy arrays with elements as distinct as the dtype allows."""
    return st.builds(
        lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
        shapes(max_side=3),
        st.sampled_from(_COMMON),
    )


@st.composite
def save_plans(
    draw: st.DrawFn,
    *,
    mesh: Mesh | SearchStrategy[Mesh] | None = None,
    tensors: Mapping[str, Any] | None = None,
    max_tensors: int = 3,
) -> tuple[SavePlan, ...]:
    """Generate the local plans of all ranks of a world, which `global_plan` accepts.

    Each tensor is placed on the mesh, or replicated on some ranks, or cut in any way with each
    chunk on any ranks. Non-tensor values are on some ranks. A plan's items are in any order, and a
    rank may hold nothing.

    ``tensors`` are the contents of the world by name: a `TensorSpec` (only its shape and dtype
    count) or anything else for a non-tensor value. Pass it to lay out the same tensors in a second
    world, as a load does.

    >>> from hypothesis import find
    >>> plans = find(save_plans(tensors={"w": TensorSpec((4,))}), lambda plans: len(plans) == 2)
    >>> {item.index.fqn for plan in plans for item in plan.items}
    {'w'}
    """
    where = mesh if isinstance(mesh, Mesh) else draw(meshes() if mesh is None else mesh)
    if tensors is None:
        names = st.text("abw.", min_size=1, max_size=3)
        tensors = draw(st.dictionaries(names, tensor_specs() | st.none(), max_size=max_tensors))
    plans: list[list[WriteItem]] = [[] for _ in range(len(where))]
    for name, what in tensors.items():
        index = MetadataIndex(name)
        if not isinstance(what, TensorSpec):
            for rank in draw(_some_ranks(len(where))):
                plans[rank].append(WriteItem(index, WriteItemType.BYTE_IO))
            continue
        kind, held = draw(_holdings(what, where))
        properties = TensorProperties(what.dtype)
        for items, boxes in zip(plans, held, strict=True):
            data = [TensorWriteData(box, properties, what.shape) for box in boxes]
            items.extend(WriteItem(index, kind, one) for one in data)
    if draw(st.booleans()):
        plans = [draw(st.permutations(items)) for items in plans]
    made = tuple(map(SavePlan, plans))
    note(_AsCode("plans", made))
    return made


@st.composite
def framings(draw: st.DrawFn, shape: Sequence[int]) -> Framing:
    """Generate what a pass may make of a tensor with elements and axes; see `framed`."""
    split: list[int] = []
    for size in shape:
        factors = [n for n in range(2, size) if size % n == 0]
        first = draw(st.sampled_from([size, *factors]))
        split += [first, size // first] if first < size else [size]
    order = draw(st.permutations(range(len(split))))
    merged = [split[order[0]]]
    for part in order[1:]:
        if draw(st.booleans()):
            merged.append(split[part])
        else:
            merged[-1] *= split[part]
    axis = draw(st.integers(0, len(merged) - 1))
    at = draw(st.integers(1, merged[axis]))
    keeps = at < merged[axis] and draw(st.booleans())
    pads = draw(st.integers(0, 2))
    return Framing(tuple(shape), tuple(split), tuple(order), tuple(merged), axis, at, keeps, pads)


@lru_cache(maxsize=1 << 8)
def _some_ranks(count: int) -> SearchStrategy[list[int]]:
    return st.sets(st.integers(0, count - 1), min_size=1).map(sorted)


@st.composite
def _holdings(
    draw: st.DrawFn, spec: TensorSpec, mesh: Mesh
) -> tuple[WriteItemType, list[list[Chunk]]]:
    """Generate the boxes of a tensor that each rank holds."""
    held: list[list[Chunk]] = [[] for _ in range(len(mesh))]
    how = draw(st.sampled_from(["whole", "cut", "placed"]))
    if how == "placed" and 0 not in spec.shape:
        placed = draw(placements(mesh, spec.shape))
        for rank in range(len(mesh)):
            held[rank].extend(local_chunks(spec.shape, mesh.shape, mesh.coordinate(rank), placed))
        return WriteItemType.SHARD, held
    if how == "cut":
        for chunk in draw(tilings(spec.shape)):
            for rank in draw(_some_ranks(len(mesh))):
                held[rank].append(chunk)
        return WriteItemType.SHARD, held
    for rank in draw(_some_ranks(len(mesh))):
        held[rank].append(Chunk([0] * len(spec.shape), spec.shape))
    return WriteItemType.TENSOR, held
