"""Who reads how much of what whom wrote? Bytes: one row a writer, one column a reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from ..catalog import column
from ..errors import PlanError
from ..overlap import overlap_many
from ..packing import Ints, readonly
from ..placed import spread
from ..records import LoadPlan, SavePlan
from ..reports.reshard import HeldBoxes, most_met, stretches
from ..reports.traffic import itemsizes
from ..reports.writers import Writers
from ..topology import WorldPlans
from ..world import World

__all__ = ["known_writers", "traffic_matrix", "world_sums"]


def traffic_matrix(
    plans: Iterable[LoadPlan] | WorldPlans, writers: Writers | Iterable[SavePlan]
) -> Ints:
    """Add up how many stored bytes each rank reads of what each rank wrote.

    Args:
        plans: What is read: one plan per reading rank; or a world that is to be filled, which is
            counted layout by layout, and needs `Writers`.
        writers: Who wrote: one plan per writing rank, as `global_plan` returns them, or what
            `writers_of` makes of them. A chunk that several ranks wrote counts for the lowest.

    Returns:
        Bytes: one row a writer, one column a reader.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, local_plan
    >>> sd = {"w": TensorSpec((6,), "float32", [Shard(0)])}
    >>> two, three = ([local_plan(sd, mesh=Mesh(dp=n), rank=r) for r in range(n)] for n in (2, 3))
    >>> writers, metadata = global_plan(two)
    >>> traffic_matrix([load_plan(metadata, plan) for plan in three], writers)
    array([[8, 4, 0],
           [0, 4, 8]])

    Raises:
        PlanError: Writers disagree about a tensor.
        TypeError: The plans are those of a world, and the writers are plans.
        ValueError: A read asks for a chunk that no writer wrote.
    """
    if isinstance(plans, WorldPlans):
        return readonly(world_sums(plans, known_writers(writers), (1, 1)))
    found = _Chunks.by(writers) if isinstance(writers, Writers) else _Chunks.of(World(writers))
    columns = [found.read_by(plan) for plan in plans]
    return readonly(np.array(columns, np.int64).reshape(-1, found.ranks).T)


@attrs.frozen(eq=False)
class _Chunks:
    """Chunks that were written, to be found by tensor and by where they start.

    Attributes:
        ranks: How many ranks there are.
        number: The number of each tensor, by name.
        itemsize: Bytes of an element of each tensor.
        strides: Per tensor, how far apart neighbours along each axis lie, in elements.
        places: The distinct places at which chunks start, in elements of a row-major tensor.
        keys: Tensor and place of each chunk as one number, ascending.
        rank: Who wrote each chunk.
    """

    ranks: int
    number: dict[str, int]
    itemsize: Ints
    strides: Ints
    places: Ints
    keys: Ints
    rank: Ints

    @classmethod
    def of(cls, world: World) -> _Chunks:
        """Take the chunks of all plans."""
        rows = world.rows
        if rows.issues:
            raise PlanError(rows.issues)
        itemsize = column([*(p.itemsize for p in rows.props), 0])[rows.prop]
        numbers = {name: i for i, name in enumerate(rows.names)}
        strides = _strides(rows.shapes)
        return cls._sorted(
            len(world), numbers, itemsize, strides, (rows.tensor, rows.place, rows.rank)
        )

    @classmethod
    def by(cls, writers: Writers) -> _Chunks:
        """Take the chunks of a checkpoint whose writers are known."""
        entries = writers.entries
        tensors = np.flatnonzero(entries.layout >= 0).tolist()
        layouts = [entries.layouts[entries.layout[row]] for row in tensors]
        numbers = {entries.names[row]: i for i, row in enumerate(tensors)}
        itemsize = column([entries.props[entries.prop[row]].itemsize for row in tensors])
        strides = _strides([layout.size for layout in layouts])
        none = np.zeros((0, 3), np.int64)
        parts = []
        for i, (row, layout) in enumerate(zip(tensors, layouts, strict=True)):
            place = layout.tiling.offsets @ strides[i, : len(layout.size)]
            rank = writers.columns[writers.column[row]]
            parts.append(np.stack([np.full(len(place), i), place, rank], axis=1))
        chunks = np.concatenate([none, *parts]).T
        ranks = int(writers.ranks.max(initial=-1)) + 1
        return cls._sorted(ranks, numbers, itemsize, strides, (chunks[0], chunks[1], chunks[2]))

    @classmethod
    def _sorted(
        cls,
        ranks: int,
        number: dict[str, int],
        itemsize: Ints,
        strides: Ints,
        chunks: tuple[Ints, Ints, Ints],
    ) -> _Chunks:
        """Sort chunks, given by tensor, place and rank."""
        tensor, place, rank = chunks
        places, at = np.unique(place, return_inverse=True)
        keys = tensor * len(places) + at
        order = np.lexsort((rank, keys))
        return cls(ranks, number, itemsize, strides, places, keys[order], rank[order])

    def read_by(self, plan: LoadPlan) -> Ints:
        """Add up what one plan reads of each writer's chunks, in bytes."""
        items = plan.items.take(plan.items.numel > 0)
        sums = np.zeros(self.ranks, np.int64)
        if not len(items):
            return sums
        tensor = column([self.number.get(name, -1) for name in items.names])[items.storage]
        axes = min(self.strides.shape[1], items.storage_anchor.shape[1])
        place = (items.storage_anchor[:, :axes] * self.strides[tensor, :axes]).sum(axis=1)
        at = np.searchsorted(self.places, place)
        key = tensor * len(self.places) + at
        row = np.searchsorted(self.keys, key)
        known = (tensor >= 0) & (np.append(self.places, -1)[at] == place)
        known &= np.append(self.keys, -1)[row] == key
        for lost in np.flatnonzero(~known)[:1].tolist():
            read = items[lost].storage_index
            raise ValueError(
                f"nobody wrote the chunk of `{read.fqn}` at {read.offset} that is read; pass the "
                "plans that global_plan returned together with the metadata"
            )
        np.add.at(sums, self.rank[row], items.numel * self.itemsize[tensor])
        return sums


def known_writers(writers: Writers | Iterable[SavePlan] | None) -> Writers:
    """Return who wrote, if anybody said so.

    Raises:
        TypeError: Nobody did.
    """
    if not isinstance(writers, Writers):
        raise TypeError("a world does not say who wrote; pass writers_of(plans, metadata)")
    return writers


def world_sums(world: WorldPlans, writers: Writers, steps: tuple[int, int]) -> Ints:
    """Add up what a world reads, in blocks of so many writers and readers.

    Tensors that were saved alike, written alike and are wanted alike are looked at once.
    """
    entries, size = writers.entries, itemsizes(writers.entries)
    alike: dict[tuple[int, int, int], int] = {}  # bytes of one element of each, added up
    for name, spec in world.specs.items():
        row = entries.row_of.get(name, -1)
        saved = -1 if row < 0 else int(entries.layout[row])
        if saved < 0 or entries.layouts[saved].size != spec.shape:
            raise ValueError(f"nobody wrote `{name}` as a tensor of shape {list(spec.shape)}")
        key = saved, int(writers.column[row]), world.layout_of[name]
        alike[key] = alike.get(key, 0) + int(size[row])
    rows = int(writers.ranks.max(initial=-1)) // steps[0] + 1
    sums = np.zeros((rows, -(-len(world) // steps[1])), np.int64)
    for (saved, column_of, wanted), itemsize in alike.items():
        tiling, boxes = entries.layouts[saved].tiling, HeldBoxes.of(world.layouts[wanted])
        writer = writers.columns[column_of] // steps[0]
        for low, high in stretches(most_met(tiling, boxes)):
            which = np.zeros(high - low, np.int64)
            met = overlap_many((tiling,), which, boxes.offsets[low:high], boxes.sizes[low:high])
            box, nbytes = met.box + low, met.sizes.prod(axis=1) * itemsize
            for begin, end in stretches(boxes.holders[box]):
                here = slice(begin, end)
                # One row a piece and rank that holds the box.
                row_of, nth = spread(boxes.holders[box[here]])
                reader = boxes.rank[boxes.first[box[here]][row_of] + nth] // steps[1]
                np.add.at(sums, (writer[met.chunk[here]][row_of], reader), nbytes[here][row_of])
    return sums


def _strides(shapes: Sequence[tuple[int, ...]]) -> Ints:
    """Return, per tensor, how far apart neighbours along each axis lie; one spare row at the end.

    >>> _strides([(2, 3), (4,)]).tolist()
    [[3, 1], [1, 0], [0, 0]]
    """
    strides = np.zeros((len(shapes) + 1, max(map(len, shapes), default=0)), np.int64)
    for tensor, shape in enumerate(shapes):
        step = 1
        for axis in reversed(range(len(shape))):
            strides[tensor, axis], step = step, step * shape[axis]
    return strides
