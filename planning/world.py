"""The plans of all ranks seen at once: every chunk, sorted by tensor and place."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from .columns import Catalog, WriteItems, column, padded
from .errors import Issue, span
from .items import TensorProperties
from .metadata import Layout
from .packing import Ints
from .records import SavePlan
from .tiling import tile

__all__ = ["Rows", "World"]

# Element counts past this would overflow the arithmetic below.
_TOO_LARGE: Final = float(1 << 61)


@attrs.frozen(eq=False, slots=False)
class Rows:
    """Every chunk of every rank; one row each, by tensor, then by where it starts, then by rank.

    Attributes:
        names: The tensors and values, sorted.
        props: The distinct properties, sorted, and ``prop``, which of them each tensor has (-1:
            it is no tensor).
        shapes: Each tensor's global shape.
        start: Where each tensor's rows begin, and, last, where all rows end.
        tensor: Which tensor each row belongs to.
        rank, item: Whose row it is, and which of that plan's items.
        offsets, sizes: The chunk, in the global frame, padded.
        place: Where the chunk starts when the tensor is laid out row-major, in elements.
        issues: Faults for which no rows can be made: tensors on which ranks disagree.
    """

    names: tuple[str, ...]
    props: tuple[TensorProperties, ...]
    prop: Ints
    shapes: tuple[tuple[int, ...], ...]
    start: Ints
    tensor: Ints
    rank: Ints
    item: Ints
    offsets: Ints
    sizes: Ints
    place: Ints
    issues: tuple[Issue, ...]

    def __len__(self) -> int:
        return len(self.tensor)

    def keep(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """Return only the rows that the mask marks; ``item`` still numbers the plans of before."""
        fields = ("tensor", "rank", "item", "offsets", "sizes", "place")
        kept = {name: getattr(self, name)[mask] for name in fields}
        start = np.concatenate([[0], np.cumsum(mask)])[self.start]
        return attrs.evolve(self, start=start, **kept)

    @cached_property
    def repeats(self) -> npt.NDArray[np.bool_]:
        """Which rows are the same chunk of the same tensor as the row before: replicas."""
        same = np.zeros(len(self), bool)
        if len(self):
            same[1:] = (self.tensor[1:] == self.tensor[:-1]) & (self.place[1:] == self.place[:-1])
            at = np.flatnonzero(same)
            same[at] = (self.sizes[at] == self.sizes[at - 1]).all(axis=1)
        return same

    @cached_property
    def layouts(self) -> tuple[tuple[Layout, ...], Ints]:
        """The distinct layouts, and which of them each tensor has (-1: it is no tensor)."""
        boxes = np.concatenate([self.offsets, self.sizes], axis=1)
        starts, is_tensor = self.start.tolist(), (self.prop >= 0).tolist()
        numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
        found: list[Layout] = []
        which = []
        for tensor, shape in enumerate(self.shapes):
            if not is_tensor[tensor]:
                which.append(-1)
                continue
            rows = slice(starts[tensor], starts[tensor + 1])
            number = numbers.setdefault((shape, boxes[rows].tobytes()), len(found))
            if number == len(found):
                axes = len(shape)
                found.append(
                    Layout(shape, tile(self.offsets[rows, :axes], self.sizes[rows, :axes]))
                )
            which.append(number)
        return tuple(found), column(which)


class World(tuple[SavePlan, ...]):
    """One plan per rank: a tuple, with the sorted view of all of them made once, when needed."""

    @cached_property
    def rows(self) -> Rows:
        """Every chunk of every rank, sorted."""
        return _sort(self)

    def keep(self, mask: npt.NDArray[np.bool_]) -> World:
        """Return the world in which each rank holds only its rows that the mask marks."""
        rows = self.rows
        counts = [len(plan.items) for plan in self]
        first = np.cumsum([0, *counts])
        kept = np.zeros(int(first[-1]), bool)
        kept[first[rows.rank[mask]] + rows.item[mask]] = True
        if kept.all():
            return self
        position = np.cumsum(kept) - kept  # of each kept item among all kept ones
        plans = []
        for plan, low, high in zip(self, first[:-1].tolist(), first[1:].tolist(), strict=True):
            mine = kept[low:high]
            plans.append(plan if mine.all() else attrs.evolve(plan, items=plan.items.take(mine)))
        world = World(plans)
        view = rows.keep(mask)
        now_first = np.concatenate([position, [kept.sum()]])[first]
        item = position[first[view.rank] + view.item] - now_first[view.rank]
        world.__dict__["rows"] = attrs.evolve(view, item=item)  # sorted already: no second sort
        return world


def _sort(plans: World) -> Rows:
    tables = _merge_catalogs([plan.items for plan in plans])
    catalogs, numbering, names, props, prop, shapes, issues = tables
    bad = {issue.fqn for issue in issues}
    width = max((len(s) for s in shapes), default=0)
    shape = padded(shapes, 1, width)
    counts = [len(plan.items) for plan in plans]
    total = sum(counts)
    tensor = np.empty(total, np.int64)
    offsets, sizes = np.zeros((total, width), np.int64), np.ones((total, width), np.int64)
    low = 0
    for plan, catalog, count in zip(plans, catalogs, counts, strict=True):
        items, rows = plan.items, slice(low, low + count)
        axes = min(width, items.offsets.shape[1])
        np.take(numbering[catalog], items.row, out=tensor[rows])
        offsets[rows, :axes] = items.offsets[:, :axes]
        sizes[rows, :axes] = items.sizes[:, :axes]
        low += count
    rank = np.repeat(np.arange(len(counts)), counts)
    item = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)

    order = stable_order(tensor, len(names))
    keep = np.array([name not in bad for name in names], bool)
    if not keep.all():
        order = order[keep[tensor[order]]]
    if not sizes.all():  # empty chunks hold nothing; an empty tensor must still be known by one
        order = order[sizes[order].all(axis=1) | ~shape.all(axis=1)[tensor[order]]]
    tensor, offsets, sizes = tensor[order], offsets[order], sizes[order]
    rank, item = rank[order], item[order]
    start = np.searchsorted(tensor, np.arange(len(names) + 1))
    per_tensor = np.diff(start)

    outside = offsets + sizes > np.repeat(shape, per_tensor, axis=0)
    if outside.any():
        wrong = outside.any(axis=1)
        issues = (*issues, *_out_of_bounds(wrong, names, shapes, tensor, rank, offsets, sizes))
        hit = np.zeros(len(names), bool)
        hit[tensor[wrong]] = True
        fine = ~hit[tensor]
        tensor, offsets, sizes = tensor[fine], offsets[fine], sizes[fine]
        rank, item = rank[fine], item[fine]
        start = np.searchsorted(tensor, np.arange(len(names) + 1))
        per_tensor = np.diff(start)

    strides = np.ones_like(shape)
    for axis in reversed(range(width - 1)):
        strides[:, axis] = strides[:, axis + 1] * shape[:, axis + 1]
    place = (offsets * np.repeat(strides, per_tensor, axis=0)).sum(axis=1)
    rows = Rows(
        names, props, prop, shapes, start, tensor, rank, item, offsets, sizes, place, issues
    )
    return _by_place(rows)


def _by_place(rows: Rows) -> Rows:
    """Sort the rows of each tensor by place; ranks that hold rising offsets are sorted already."""
    falls = (rows.tensor[1:] == rows.tensor[:-1]) & (rows.place[1:] < rows.place[:-1])
    if not falls.any():
        return rows
    unsorted = np.zeros(len(rows.names), bool)
    unsorted[rows.tensor[1:][falls]] = True
    at = np.flatnonzero(unsorted[rows.tensor])
    order = np.arange(len(rows))
    order[at] = at[np.lexsort((rows.place[at], rows.tensor[at]))]
    fields = ("rank", "item", "offsets", "sizes", "place")
    return attrs.evolve(rows, **{name: getattr(rows, name)[order] for name in fields})


def stable_order(keys: Ints, count: int) -> Any:
    """Return the stable order of keys below ``count``: radix sort, sixteen bits at a time.

    >>> stable_order(np.array([2, 0, 2, 1]), 3).tolist()
    [1, 3, 0, 2]
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = 16
    while count >> shift:
        digit = (keys[order] >> shift).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
        shift += 16
    return order


# What ranks must agree on to mean the same tensor: is it one, its dtype, its shape.
_Variant = tuple[bool, str, tuple[int, ...]]


def _merge_catalogs(plans: list[WriteItems]) -> tuple[Any, ...]:
    """Number all names, in sorted order, and find those on which catalogs disagree.

    Ranks that share a catalog, or have equal ones, are looked at once.
    """
    by_content: dict[object, int] = {}
    by_identity: dict[int, int] = {}
    catalogs: list[Catalog] = []
    used: list[npt.NDArray[np.bool_]] = []
    which = []
    for items in plans:
        number = by_identity.get(id(items.catalog))
        if number is None:
            number = by_content.setdefault(items.catalog.content, len(catalogs))
            by_identity[id(items.catalog)] = number
            if number == len(catalogs):
                catalogs.append(items.catalog)
                used.append(np.zeros(len(items.catalog), bool))
        used[number][items.row] = True
        which.append(number)

    variants: dict[str, dict[_Variant, list[int]]] = {}
    properties: dict[str, TensorProperties | None] = {}
    for number, (catalog, mask) in enumerate(zip(catalogs, used, strict=True)):
        for row in np.flatnonzero(mask).tolist():
            name, _, _, props, size = catalog.heads[row]
            variant = (props is None, "" if props is None else props.dtype, size)
            variants.setdefault(name, {}).setdefault(variant, []).append(number)
            known = properties.setdefault(name, props)
            if props is not None and known is not None and props < known:
                properties[name] = props
    names = tuple(sorted(variants))
    shapes = tuple(next(iter(variants[name]))[2] for name in names)
    issues = [
        _conflict(name, variants[name], which, plans) for name in names if len(variants[name]) > 1
    ]
    sizes = np.array([float(np.prod(s, dtype=np.float64)) for s in shapes])
    for tensor in np.flatnonzero(sizes > _TOO_LARGE).tolist():
        text = f"`{names[tensor]}` has an impossible shape: {shapes[tensor]} overflows 64 bits"
        issues.append(Issue("too_large", names[tensor], text))
    number_of = {name: n for n, name in enumerate(names)}
    numbering = [column([number_of.get(name, -1) for name in c.names]) for c in catalogs]
    distinct = sorted({p for p in properties.values() if p is not None})
    id_of = {p: i for i, p in enumerate(distinct)}
    prop = column([-1 if (p := properties[n]) is None else id_of[p] for n in names])
    return which, numbering, names, tuple(distinct), prop, shapes, tuple(issues)


def _conflict(
    name: str, variants: dict[_Variant, list[int]], which: list[int], plans: list[WriteItems]
) -> Issue:
    """Say what each side of a disagreement holds, and who is on it."""
    sides, everyone = [], []
    for (is_bytes, dtype, size), numbers in sorted(variants.items()):
        ranks = [
            rank
            for rank, items in enumerate(plans)
            if which[rank] in numbers and _holds(items, name, (is_bytes, dtype, size))
        ]
        what = "a value that is no tensor" if is_bytes else f"{dtype} of shape {list(size)}"
        sides.append(f"{span(ranks)}: {what}")
        everyone.extend(ranks)
    text = f"`{name}` is not the same tensor everywhere ({'; '.join(sides)})"
    return Issue("conflict", name, f"{text}; give them different names", sorted(set(everyone)))


def _holds(items: WriteItems, name: str, variant: _Variant) -> bool:
    for row in np.unique(items.row).tolist():
        head, _, _, props, size = items.catalog.heads[row]
        if head == name and (props is None, "" if props is None else props.dtype, size) == variant:
            return True
    return False


def _out_of_bounds(
    wrong: npt.NDArray[np.bool_],
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    tensor: Ints,
    rank: Ints,
    offsets: Ints,
    sizes: Ints,
) -> Iterable[Issue]:
    for row in np.flatnonzero(wrong).tolist():
        name, shape = names[tensor[row]], shapes[tensor[row]]
        low, extent = (tuple(a[row, : len(shape)].tolist()) for a in (offsets, sizes))
        text = f"`{name}`: rank {rank[row]} holds a chunk at {low} of sizes {extent}, which is "
        yield Issue(
            "out_of_bounds", name, f"{text}outside shape {shape}", [rank[row]], (low, extent)
        )
