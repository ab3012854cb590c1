"""What would a reshard move? Counted layout by layout, without making any rank's plan.

A large model has thousands of tensors and few layouts. Per pair of a saved and a wanted layout the
overlaps are found once, for each distinct box once, and count for all tensors that share the pair
and for all ranks that hold the box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import attrs
import numpy as np

from ..distinct import group_rows
from ..errors import Issue, PlanError, nearest_hint, nearest_names
from ..load import load_plan
from ..metadata import Layout, Metadata, TensorMetadata
from ..overlap import overlap_many
from ..packing import Ints
from ..placed import SpecLayout, spread
from ..tiling import Grid, Tiling, tile
from ..topology import WorldPlans
from .axiswise import Axes
from .traffic import Tally, Traffic, count_runs, itemsizes, volume
from .writers import Writers

__all__ = ["HeldBoxes", "most_met", "reshard_traffic", "stretches"]

# Pieces that are looked at together: bounds memory to a few hundred MiB.
_BLOCK: Final = 1 << 20
# A box that meets more than one file in this many is noted for all files at once.
_CROWDED: Final = 16
_SUGGESTED: Final = 8  # missing names that get a "nearest" hint


@attrs.frozen(eq=False)
class _Tensors:
    """The tensors that go from one saved layout to one wanted layout.

    Attributes:
        count: How many there are.
        nbytes: Bytes of one element of each, added up.
        widest: Bytes of one element, at most.
        widest_cast: Likewise, of the tensors that are wanted in another dtype; 0 if none is.
        written: Per chunk the file it lies in, with the count and bytes of the tensors that are
            written so; empty if it is not known what lies where.
    """

    count: int
    nbytes: int
    widest: int
    widest_cast: int
    written: tuple[tuple[Ints, int, int], ...]


@attrs.frozen(eq=False)
class HeldBoxes:
    """The distinct boxes of a wanted layout, none of them empty.

    Attributes:
        offsets, sizes: One row a box.
        holders: How many ranks hold each box.
        first: Where each box's holders begin in ``rank``.
        rank: The holders, box by box.
    """

    offsets: Ints
    sizes: Ints
    holders: Ints
    first: Ints
    rank: Ints

    @classmethod
    def of(cls, held: SpecLayout) -> HeldBoxes:
        """Gather the boxes that ranks hold."""
        real = np.flatnonzero(held.sizes.all(axis=1))
        rank, offsets, sizes = held.rank[real], held.offsets[real], held.sizes[real]
        first, group = group_rows([np.zeros(len(real), np.int64), offsets, sizes])
        holders = np.bincount(group, minlength=len(first))
        whose = rank[np.argsort(group, kind="stable")]
        return cls(offsets[first], sizes[first], holders, np.cumsum(holders) - holders, whose)


def reshard_traffic(
    metadata: Metadata, world: WorldPlans, writers: Writers | None = None
) -> Traffic:
    """Count what all ranks of a world read to fill what they hold.

    Raises:
        PlanError: The checkpoint cannot fill it; every misfit of names and shapes is told.
    """
    issues = _misfits(metadata, world)
    if issues:
        raise PlanError(issues)
    entries = metadata.state_dict_metadata
    tally = Tally(len(world), writers)
    pairs: dict[tuple[int, int], list[str]] = {}
    for name in world.specs:
        pair = int(entries.layout[entries.row_of[name]]), world.layout_of[name]
        pairs.setdefault(pair, []).append(name)
    for (saved, wanted), names in pairs.items():
        boxes = HeldBoxes.of(world.layouts[wanted])
        tensors = _tensors(metadata, world, writers, tally, names)
        short = _count(tally, entries.layouts[saved], boxes, tensors)
        for box in np.flatnonzero(short)[:1].tolist():
            rank = int(boxes.rank[boxes.first[box]])
            load_plan(metadata, world[rank], dtype="cast")  # raises, and says what is uncovered
    _count_values(tally, metadata, world, writers)
    return tally.done()


def _count_values(
    tally: Tally, metadata: Metadata, world: WorldPlans, writers: Writers | None
) -> None:
    """Add one request per rank for each value that is no tensor."""
    tally.requests += len(world.values)
    if writers is None or not world.values:
        return
    rows = [metadata.state_dict_metadata.row_of[name] for name in world.values]
    writer = np.array([writers.columns[n][0] for n in writers.column[rows].tolist()])
    file = tally.file(writer)
    np.add.at(tally.file_requests, file, len(world))
    tally.seen[:, file] = True


def _misfits(metadata: Metadata, world: WorldPlans) -> list[Issue]:
    """Say which tensors the checkpoint does not have, or has in another shape."""
    entries = metadata.state_dict_metadata
    issues: list[Issue] = []
    for name in world.catalog.names:
        saved, spec = entries.get(name), world.specs.get(name)
        if saved is None:
            near = nearest_names(name, entries.names) if len(issues) < _SUGGESTED else ()
            hint = nearest_hint(near)
            issues.append(Issue("missing", name, f"`{name}` is not in the checkpoint{hint}"))
        elif isinstance(saved, TensorMetadata) != (spec is not None):
            kinds = ("a tensor", "a value that is no tensor")
            was, wanted = kinds if spec is None else kinds[::-1]
            text = f"`{name}` was saved as {was} and is wanted as {wanted}"
            issues.append(Issue("type", name, text))
        elif isinstance(saved, TensorMetadata) and spec is not None and saved.size != spec.shape:
            text = f"`{name}` was saved with shape {list(saved.size)} and is wanted with "
            issues.append(Issue("shape", name, f"{text}{list(spec.shape)}"))
    return issues


def _tensors(
    metadata: Metadata,
    world: WorldPlans,
    writers: Writers | None,
    tally: Tally,
    names: Sequence[str],
) -> _Tensors:
    entries = metadata.state_dict_metadata
    rows = np.array([entries.row_of[name] for name in names])
    itemsize = itemsizes(entries)[rows]
    wanted = [world.specs[name].dtype for name in names]
    saved = [entries.props[prop].dtype for prop in entries.prop[rows].tolist()]
    cast = itemsize[[a != b for a, b in zip(saved, wanted, strict=True)]]
    written = []
    if writers is not None:
        which = writers.column[rows]
        for number in np.unique(which).tolist():
            mine = itemsize[which == number]
            file = tally.file(writers.columns[number])
            written.append((file, len(mine), int(mine.sum())))
    return _Tensors(
        len(names),
        int(itemsize.sum()),
        int(itemsize.max()),
        int(cast.max(initial=0)),
        tuple(written),
    )


def _count(tally: Tally, saved: Layout, boxes: HeldBoxes, tensors: _Tensors) -> Ints:
    """Add what one pair of layouts moves; return, per box, how many elements it lacks."""
    even = len(boxes.holders) and (boxes.holders == boxes.holders[0]).all()
    axes = Axes.of(saved.tiling, boxes.offsets, boxes.sizes) if even else None
    if axes is None:
        sums = _by_piece(tally, saved.tiling, boxes, tensors)
    else:
        sums = _by_axis(tally, axes, boxes, tensors)
    # One row a rank and box: what a rank needs of a box, every other rank that holds it needs too.
    held = np.repeat(np.arange(len(boxes.first)), boxes.holders)
    peak = np.maximum(sums.staged * tensors.widest, sums.largest * tensors.widest_cast)
    requests, elements = sums.requests * tensors.count, sums.elements * tensors.count
    nbytes = sums.elements * tensors.nbytes
    tally.add_ranks(boxes.rank, nbytes[held], requests[held], elements[held])
    np.maximum.at(tally.peak, boxes.rank, peak[held])
    for file, count, size in tensors.written:
        tally.add_files(file, sums.chunk_elements * size, sums.chunk_requests * count)
    tally.whole += int((sums.whole * boxes.holders).sum()) * tensors.nbytes
    tally.unique += volume(tile(boxes.offsets, boxes.sizes)) * tensors.nbytes
    short: Ints = boxes.sizes.prod(axis=1) - sums.elements
    return short


def _by_piece(tally: Tally, tiling: Tiling, boxes: HeldBoxes, tensors: _Tensors) -> _Sums:
    """Count any chunks and boxes, piece by piece."""
    sums = _Sums.of(len(boxes.first), len(tiling))
    for low, high in stretches(most_met(tiling, boxes)):
        here, which = slice(low, high), np.zeros(high - low, np.int64)
        pieces = overlap_many((tiling,), which, boxes.offsets[here], boxes.sizes[here])
        box = pieces.box + low
        sums.add(box, pieces.chunk, pieces.sizes, tiling.sizes[pieces.chunk], boxes)
        for file, _, _ in tensors.written:
            _mark(tally, boxes, box, file[pieces.chunk])
    return sums


def _by_axis(tally: Tally, axes: Axes, boxes: HeldBoxes, tensors: _Tensors) -> _Sums:
    """Count two grids axis by axis; boxes that meet the same chunks are marked together."""
    if tensors.written:
        which, groups = axes.alike()
        held = np.repeat(which, boxes.holders)
        holders = np.bincount(held)
        whose = boxes.rank[np.argsort(held, kind="stable")]
        together = attrs.evolve(
            boxes, holders=holders, first=np.cumsum(holders) - holders, rank=whose
        )
        for low, high in stretches(groups[:, 1::2].prod(axis=1)):
            group, chunk = axes.chunks_met(groups[low:high])
            for file, _, _ in tensors.written:
                _mark(tally, together, group + low, file[chunk])
    copies = boxes.holders[0]
    return _Sums(*axes.per_box(), *(sums * copies for sums in axes.per_chunk()))


@attrs.frozen(eq=False)
class _Sums:
    """What one tensor moves between two layouts; the arrays are added to.

    Attributes:
        elements, requests, whole: Per box, for one holder; ``whole`` counts all elements of the
            chunks that are met.
        largest, staged: Per box, the elements of the largest piece, and of the largest one that is
            not contiguous in the box.
        chunk_elements, chunk_requests: Per saved chunk, for all holders.
    """

    elements: Ints
    requests: Ints
    whole: Ints
    largest: Ints
    staged: Ints
    chunk_elements: Ints
    chunk_requests: Ints

    @classmethod
    def of(cls, boxes: int, chunks: int) -> _Sums:
        return cls(*np.zeros((5, boxes), np.int64), *np.zeros((2, chunks), np.int64))

    def add(self, box: Ints, chunk: Ints, lengths: Ints, extents: Ints, boxes: HeldBoxes) -> None:
        """Add pieces of some size, out of chunks of some extent."""
        elements, runs = lengths.prod(axis=1), count_runs(lengths, extents)
        scattered = count_runs(lengths, boxes.sizes[box]) > 1
        np.add.at(self.elements, box, elements)
        np.add.at(self.requests, box, runs)
        np.add.at(self.whole, box, extents.prod(axis=1))
        np.maximum.at(self.largest, box, elements)
        np.maximum.at(self.staged, box, elements * scattered)
        np.add.at(self.chunk_elements, chunk, elements * boxes.holders[box])
        np.add.at(self.chunk_requests, chunk, runs * boxes.holders[box])


def most_met(tiling: Tiling, boxes: HeldBoxes) -> Ints:
    """Return how many chunks each box meets at most."""
    if not isinstance(tiling, Grid):
        return np.full(len(boxes.first), len(tiling))
    met = np.ones(len(boxes.first), np.int64)
    for axis, cuts in enumerate(tiling.cuts):
        low = boxes.offsets[:, axis]
        first = np.searchsorted(cuts, low, side="right")
        met *= np.searchsorted(cuts, low + boxes.sizes[:, axis], side="left") - first + 1
    return np.maximum(met, 0)


def stretches(counts: Ints) -> Iterator[tuple[int, int]]:
    """Cut rows into stretches that expand to about _BLOCK each.

    >>> list(stretches(np.array([_BLOCK, 1, _BLOCK, 1])))
    [(0, 1), (1, 3), (3, 4)]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(_BLOCK, total, _BLOCK)) + 1
    edges = np.unique(np.concatenate([[0], cuts, [len(counts)]])).tolist()
    yield from pairwise(edges)


def _mark(tally: Tally, boxes: HeldBoxes, box: Ints, file: Ints) -> None:
    """Note that every holder of a box reads a file; one row a box and file, in order of box."""
    met = np.bincount(box, minlength=len(boxes.first))
    crowded = met > tally.seen.shape[1] // _CROWDED
    for number in np.flatnonzero(crowded).tolist():  # whole rows at a time: nearly all are set
        low, high = np.searchsorted(box, [number, number + 1])
        row = np.zeros(tally.seen.shape[1], bool)
        row[file[low:high]] = True
        first = boxes.first[number]
        for rank in boxes.rank[first : first + boxes.holders[number]].tolist():
            tally.seen[rank] |= row
    few = np.flatnonzero(~crowded[box])
    box, file = box[few], file[few]
    for low, high in stretches(boxes.holders[box]):
        row, nth = spread(boxes.holders[box[low:high]])
        who = boxes.rank[boxes.first[box[low:high]][row] + nth]
        tally.seen[who, file[low:high][row]] = True
