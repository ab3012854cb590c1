"""The plans of all ranks in one view: every chunk, sorted by tensor and position."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import Issue, listed, span
from ..geometry.tilings import shape_fault, tile
from ..metadata import Layout
from ..plans import SavePlan
from ..records import TensorProperties
from .arrays import Ints, column, padded
from .frames import SourceFrame
from .items import Catalog, Head, WriteItems


@attrs.frozen(eq=False, slots=False)
class Rows:
    """Every chunk of every rank; one row each, by tensor, then by start, then by rank."""

    names: tuple[str, ...]  # the tensors and values, sorted
    # The distinct properties, sorted; `prop` numbers them per tensor (-1: a non-tensor
    # value).
    props: tuple[TensorProperties, ...]
    prop: Ints
    shapes: tuple[tuple[int, ...], ...]  # each tensor's global shape
    start: Ints  # each tensor's first row; the last entry is the number of rows
    # Each rank's first item when all are laid end to end; the last entry is their number.
    first: Ints
    flat: Ints  # the item of each row, in that numbering
    offsets: Ints  # the chunk, in the global frame, padded
    sizes: Ints
    issues: tuple[Issue, ...]  # tensors on which ranks disagree; they have no rows
    # Of what each item is made, in the numbering of `flat`: one row of numbers, equal for equal
    # sources; None if every name has only one source, whose boxes are the chunks.
    source: Ints | None = None

    def __len__(self) -> int:
        return len(self.flat)

    def take(self, rows: npt.NDArray[Any]) -> Rows:
        """Return the given rows (numbers or a mask), which must stay grouped by tensor."""
        start = np.searchsorted(self.tensor[rows], np.arange(len(self.names) + 1))
        taken = (self.flat[rows], self.offsets[rows], self.sizes[rows])
        return attrs.evolve(self, start=start, flat=taken[0], offsets=taken[1], sizes=taken[2])

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat a value per tensor for each of its rows."""
        return np.repeat(values, np.diff(self.start))

    @cached_property
    def tensor(self) -> Ints:
        """The tensor of each row."""
        return self.spread(np.arange(len(self.names)))

    @cached_property
    def rank(self) -> Ints:
        """The rank of each row."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))[self.flat]

    @cached_property
    def item(self) -> Ints:
        """The number of each row's item in its rank's plan."""
        return self.flat - self.first[self.rank]

    @cached_property
    def place(self) -> Ints:
        """The start of each chunk when the tensor is laid out row-major, in elements."""
        shape = padded(self.shapes, 1)
        place, stride = np.zeros(len(self), np.int64), np.ones(len(shape), np.int64)
        for axis in reversed(range(shape.shape[1])):
            place += self.offsets[:, axis] * self.spread(stride)
            stride = stride * shape[:, axis]
        return place

    @cached_property
    def repeats(self) -> npt.NDArray[np.bool_]:
        """Which rows are replicas: the same chunk of the same tensor as the row before."""
        same = np.zeros(len(self), bool)
        if len(self):
            same[1:] = (self.tensor[1:] == self.tensor[:-1]) & (self.place[1:] == self.place[:-1])
            at = np.flatnonzero(same)
            same[at] = (self.sizes[at] == self.sizes[at - 1]).all(axis=1)
        return same

    @cached_property
    def clashes(self) -> npt.NDArray[np.bool_]:
        """Which rows repeat the row before but come from another source, so are not replicas."""
        clash = np.zeros(len(self), bool)
        if self.source is not None and len(self):
            at = np.flatnonzero(self.repeats)
            mine, before = self.source[self.flat[at]], self.source[self.flat[at - 1]]
            clash[at] = (mine != before).any(axis=1)
        return clash

    @property
    def faulty(self) -> bool:
        """Whether ranks disagree, so that writers cannot be assigned."""
        return bool(self.issues) or bool(self.clashes.any())

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each chunk in the checkpoint; non-tensor values count as one."""
        itemsize = np.array([*(p.itemsize for p in self.props), 1])[self.prop]
        return np.asarray(self.sizes.prod(axis=1) * itemsize[self.tensor])

    @cached_property
    def layouts(self) -> tuple[tuple[Layout, ...], Ints]:
        """The distinct layouts, and the layout number of each tensor (-1: a value)."""
        boxes = np.concatenate([self.offsets, self.sizes], axis=1)
        starts, is_tensor = self.start.tolist(), (self.prop >= 0).tolist()
        numbers: dict[tuple[tuple[int, ...], int, bytes], int] = {}
        layouts: list[Layout] = []
        which = []
        for tensor, shape in enumerate(self.shapes):
            if not is_tensor[tensor]:
                which.append(-1)
                continue
            rows = slice(starts[tensor], starts[tensor + 1])
            # Without axes there are no bytes: the count distinguishes one chunk from none.
            key = (shape, starts[tensor + 1] - starts[tensor], boxes[rows].tobytes())
            number = numbers.setdefault(key, len(layouts))
            if number == len(layouts):
                offsets, sizes = (c[rows, : len(shape)] for c in (self.offsets, self.sizes))
                layouts.append(Layout(shape, tile(offsets, sizes)))
            which.append(number)
        return tuple(layouts), column(which)


class World(tuple[SavePlan, ...]):
    """One plan per rank: a tuple whose sorted view is made once, on demand."""

    @classmethod
    def of(cls, plans: Iterable[SavePlan]) -> World:
        """Return the world of some plans; a world is returned unchanged."""
        return plans if isinstance(plans, World) else cls(plans)

    @cached_property
    def rows(self) -> Rows:
        """Every chunk of every rank, sorted."""
        return _sort(self)

    def keep(self, mask: npt.NDArray[np.bool_]) -> World:
        """Return the world in which each rank holds only the rows marked by the mask."""
        rows = self.rows
        kept = np.zeros(int(rows.first[-1]), bool)
        kept[rows.flat[mask]] = True
        if kept.all():
            return self
        edges = rows.first.tolist()
        plans = []
        for plan, low, high in zip(self, edges[:-1], edges[1:], strict=True):
            mine = kept[low:high]
            if not mine.all():
                plan = attrs.evolve(plan, items=plan.items.take(mine), held=plan.holds)
            plans.append(plan)
        world = World(plans)
        position = np.concatenate([[0], np.cumsum(kept)])  # of each kept item among all kept ones
        view = rows.take(mask)
        source = None if rows.source is None else rows.source[kept]
        view = attrs.evolve(
            view, first=position[rows.first], flat=position[view.flat], source=source
        )
        world.__dict__["rows"] = view  # sorted already: no second sort
        return world


def _sort(world: World) -> Rows:
    """Group all items by tensor, drop chunks outside their tensor, and sort the rest."""
    table = _merge_catalogs([plan.items for plan in world])
    shape = padded(table.shapes, 1)
    tensor, offsets, sizes = _lay_out(world, table, shape.shape[1])
    order = stable_order(tensor, len(table.names))
    if table.issues:
        bad = {issue.fqn for issue in table.issues}
        sound = np.array([name not in bad for name in table.names], bool)
        order = order[sound[tensor[order]]]
    if not sizes.all():  # empty chunks hold nothing; an empty tensor is still known by one
        is_empty = (shape == 0).any(axis=1)
        order = order[np.all(sizes[order], axis=1) | is_empty[tensor[order]]]
    count = np.bincount(tensor[order], minlength=len(table.names))
    rows = Rows(
        table.names,
        table.props,
        table.prop,
        table.shapes,
        start=np.concatenate([[0], np.cumsum(count)]),
        first=np.cumsum([0, *(len(plan.items) for plan in world)]),
        flat=order,
        offsets=offsets[order],
        sizes=sizes[order],
        issues=table.issues,
        source=_sources(world, table.mixed),
    )
    outside = np.zeros(len(rows), bool)
    for axis in range(shape.shape[1]):
        outside |= rows.offsets[:, axis] + rows.sizes[:, axis] > rows.spread(shape[:, axis])
    return _by_place(_drop_strays(rows, outside) if outside.any() else rows)


def _sources(world: World, mixed: bool) -> Ints | None:
    """Say of what every item of every rank is made, in order of rank; see `Rows.source`."""
    framed = any(plan.items.frame is not None for plan in world)
    if not mixed and not framed:
        return None
    numbers: dict[str, int] = {}
    by_catalog: dict[int, Ints] = {}
    parts = [column([])]
    for plan in world:
        catalog = plan.items.catalog
        if id(catalog) not in by_catalog:
            rows = [numbers.setdefault(name, len(numbers)) for name in catalog.sources]
            by_catalog[id(catalog)] = column(rows)
        parts.append(by_catalog[id(catalog)][plan.items.row])
    columns = [np.concatenate(parts)]
    if framed:
        every = SourceFrame.concat([plan.items.source_frame for plan in world])
        codes = (every.ndim, every.axes.number, every.fill.number)
        columns += [*codes, *every.offsets.T, *every.sizes.T]
    return np.stack(columns, axis=1)


def _lay_out(world: World, table: _Table, width: int) -> tuple[Ints, Ints, Ints]:
    """Return the tensor and the chunk of every item of every rank, in order of rank."""
    total = sum(len(plan.items) for plan in world)
    tensor = np.empty(total, np.int64)
    offsets, sizes = np.zeros((total, width), np.int64), np.ones((total, width), np.int64)
    low = 0
    for plan, number in zip(world, table.which, strict=True):
        items = plan.items
        rows, axes = slice(low, low + len(items)), slice(0, min(width, items.offsets.shape[1]))
        tensor[rows] = table.numbering[number][items.row]
        offsets[rows, axes] = items.offsets[:, axes]
        sizes[rows, axes] = items.sizes[:, axes]
        low += len(items)
    return tensor, offsets, sizes


def _by_place(rows: Rows) -> Rows:
    """Sort the rows of each tensor by position; ascending offsets are sorted already."""
    same = rows.tensor[1:] == rows.tensor[:-1]
    rows = _sort_where(rows, same & (rows.place[1:] < rows.place[:-1]))
    # Chunks of several sizes at one place collide; replicas among them must still lie together.
    tied = same & (rows.place[1:] == rows.place[:-1])
    return _sort_where(rows, tied & ~rows.repeats[1:], *rows.sizes.T)


def _sort_where(rows: Rows, wrong: npt.NDArray[np.bool_], *minor: Ints) -> Rows:
    """Sort, by position and then by ``minor`` columns, the tensors that are out of order."""
    if not wrong.any():
        return rows
    unsorted = np.zeros(len(rows.names), bool)
    unsorted[rows.tensor[1:][wrong]] = True
    at = np.flatnonzero(unsorted[rows.tensor])
    order = np.arange(len(rows))
    order[at] = at[np.lexsort((*(m[at] for m in minor), rows.place[at], rows.tensor[at]))]
    return rows.take(order)


def stable_order(keys: Ints, count: int) -> Any:
    """Return the stable order of keys below ``count``: radix sort, sixteen bits at a time."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = 16
    while count >> shift:
        digit = (keys[order] >> shift).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
        shift += 16
    return order


# What ranks must agree on: whether it is a tensor, its dtype, its shape.
_Variant = tuple[bool, str, tuple[int, ...]]
_Sides = dict[str, dict[_Variant, list[tuple[int, int]]]]


@attrs.frozen(eq=False)
class _Table:
    """All catalogs merged into one."""

    names: tuple[str, ...]  # as in `Rows`
    props: tuple[TensorProperties, ...]
    prop: Ints
    shapes: tuple[tuple[int, ...], ...]
    issues: tuple[Issue, ...]
    which: list[int]  # per plan, the number of its distinct catalog
    numbering: list[Ints]  # per distinct catalog, the tensor of each row
    mixed: bool  # whether some name has several sources in the state dict


def _merge_catalogs(plans: list[WriteItems]) -> _Table:
    """Number all names, in sorted order, and find those on which ranks disagree."""
    which, catalogs, used = _distinct_catalogs(plans)
    first: dict[str, Head] = {}  # per name, its row; of rows that agree, that of least properties
    disputed, mixed = set[str](), False
    for catalog, mask in zip(catalogs, used, strict=True):
        for row in np.flatnonzero(mask).tolist():
            head = catalog.heads[row]
            known = first.setdefault(head.name, head)
            if known is head:
                continue
            mixed |= known.source != head.source
            if _variant(known) != _variant(head):
                disputed.add(head.name)
            elif known.properties and head.properties and head.properties < known.properties:
                first[head.name] = head
    names = tuple(sorted(first))
    shapes = tuple(first[name].size for name in names)
    issues = list(_conflicts(_sides(disputed, catalogs, used), which, plans))
    faults = {shape: shape_fault(shape) for shape in set(shapes)}
    issues += [
        Issue("too_large", name, f"`{name}` {faults[shape]}")
        for name, shape in zip(names, shapes, strict=True)
        if faults[shape]
    ]
    number_of = {name: n for n, name in enumerate(names)}
    numbering = [column([number_of.get(name, -1) for name in c.names]) for c in catalogs]
    kinds = [first[name].properties for name in names]
    distinct = tuple(sorted({p for p in kinds if p is not None}))
    place = {p: n for n, p in enumerate(distinct)}
    prop = column([-1 if p is None else place[p] for p in kinds])
    return _Table(names, distinct, prop, shapes, tuple(issues), which, numbering, mixed)


def _distinct_catalogs(
    plans: list[WriteItems],
) -> tuple[list[int], list[Catalog], list[npt.NDArray[np.bool_]]]:
    """Return the catalog number of each plan, the catalogs, and which of their rows are used."""
    by_identity = {id(items.catalog): items.catalog for items in plans}
    numbers: dict[object, int] = {}
    number_of = {k: numbers.setdefault(c.content, len(numbers)) for k, c in by_identity.items()}
    catalogs = list({number_of[k]: c for k, c in by_identity.items()}.values())
    used = [np.zeros(len(catalog), bool) for catalog in catalogs]
    which = [number_of[id(items.catalog)] for items in plans]
    for items, number in zip(plans, which, strict=True):
        used[number][items.row] = True
    return which, catalogs, used


def _variant(head: Head) -> _Variant:
    """Return what ranks must agree on: whether it is a value, its dtype and its global shape."""
    props = head.properties
    return props is None, "" if props is None else props.dtype, head.size


def _sides(
    disputed: Collection[str], catalogs: list[Catalog], used: list[npt.NDArray[np.bool_]]
) -> _Sides:
    """Return, per variant of each disputed name, the catalogs and rows that have it."""
    sides: _Sides = {name: {} for name in sorted(disputed)}
    for number, (catalog, mask) in enumerate(zip(catalogs, used, strict=True)):
        for row in np.flatnonzero(mask).tolist() if disputed else ():
            head = catalog.heads[row]
            if head.name in sides:
                sides[head.name].setdefault(_variant(head), []).append((number, row))
    return sides


def _conflicts(
    disputed: _Sides,
    which: list[int],
    plans: list[WriteItems],
) -> Iterator[Issue]:
    """Describe each side of a disagreement, with its ranks."""
    if not disputed:
        return
    ranks_of = [np.flatnonzero(np.equal(which, number)) for number in range(max(which) + 1)]
    uses = []  # per catalog, one row per rank: the rows of the catalog that it holds
    for ranks in ranks_of:
        uses.append(np.zeros((len(ranks), len(plans[int(ranks[0])].catalog)), bool))
        for at, rank in enumerate(ranks.tolist()):
            uses[-1][at, plans[rank].row] = True
    for name, sides in disputed.items():
        each = []
        for (is_bytes, dtype, size), places in sides.items():
            held = [ranks_of[number][uses[number][:, row]].tolist() for number, row in places]
            who = sorted({rank for some in held for rank in some})
            what = "a non-tensor value" if is_bytes else f"{dtype} of shape {list(size)}"
            each.append((who, f"{span(who)}: {what}"))
        listing = listed([text for _, text in sorted(each)], quote="", between="; ")
        everyone = sorted({rank for who, _ in each for rank in who})
        text = f"`{name}` is not the same tensor everywhere ({listing}); give them different names"
        yield Issue("conflict", name, text, everyone)


def _drop_strays(rows: Rows, outside: npt.NDArray[np.bool_]) -> Rows:
    """Report chunks outside their tensor, and leave them out."""
    issues = list(rows.issues)
    for row in np.flatnonzero(outside).tolist():
        name, shape = rows.names[rows.tensor[row]], rows.shapes[rows.tensor[row]]
        low, extent = (tuple(c[row, : len(shape)].tolist()) for c in (rows.offsets, rows.sizes))
        text = f"`{name}`: rank {rows.rank[row]} holds a chunk at {low} of sizes {extent}, "
        text += f"which is outside shape {shape}; is it of another tensor?"
        issues.append(Issue("out_of_bounds", name, text, [rows.rank[row]], (low, extent)))
    return attrs.evolve(rows.take(~outside), issues=tuple(issues))
