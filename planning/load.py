"""Load planning: the saved boxes that fill every wanted chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal

import numpy as np

from .check import layout_issues
from .columns.arrays import Ints, distinct, group_rows, pad, readonly
from .columns.items import Head, WriteItems
from .columns.pieces import GridReads, reads_of_pieces
from .columns.reads import ReadItems
from .errors import Issue, PlanError, nearest_hint, nearest_names, region_text
from .geometry.axes import cut
from .geometry.overlap import GridOverlap, Overlap, gaps, meet_grids, overlap_many, self_overlaps
from .geometry.tilings import Chunk, Grid, Tiling, tile, tile_chunks
from .matching import explain_missing, match_entries
from .metadata import Entries, Metadata, TensorMetadata
from .passes.base import Passes, Stages, as_steps, chain, may_see_rank, positioned
from .plans import LoadPlan, SavePlan
from .records import (
    KeyReport,
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorProperties,
    WriteItemType,
)
from .sources import dropped_names, in_source_frame, source_issues, with_replicas
from .tree import empty_names

Strict = bool | str | Sequence[str]
_TENSOR: Final = LoadItemType.TENSOR.value
_BYTES: Final = LoadItemType.BYTE_IO.value
_ACCEPT: Final = "strict=False accepts gaps"
_MANY: Final = 1 << 16  # reads from which on a plan holds them by rule


def load_plan(
    metadata: Metadata,
    plan: SavePlan,
    *,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    shape: Literal["same", "overlap"] = "same",
    optional: Collection[str] = (),
) -> LoadPlan:
    """Plan the reads that fill what ``plan`` says this rank holds.

    Args:
        metadata: The checkpoint.
        plan: What this rank holds: `local_plan` of its state dict, after any passes. Its names and
            dtypes are the checkpoint's, its sources the state dict's.
        strict: Whether every chunk must be filled: True, False, or a pattern (``"model.*"``) or
            several patterns of the names that must be. Other chunks that cannot be filled are left
            alone and reported. Names that only the checkpoint has are never an error. An empty
            dict needs no entry if the checkpoint has nothing inside it, since torch saves none.
        dtype: ``"same"`` refuses a stored dtype other than the plan's, ``"cast"`` casts.
        shape: ``"same"`` refuses another global shape; ``"overlap"`` fills the elements that both
            have, such as the rows of a vocabulary that has since been padded. It refuses tensors
            that passes have reshaped, moved or joined.
        optional: Names that need not be in the checkpoint, such as those of tied weights; they are
            not reported as missing.

    Returns:
        The reads, by item, then by saved chunk; its ``report`` says what did not fit, and what
        passes left out.

    Raises:
        PlanError: Something that must be filled cannot be, or passes would fill an element of the
            state dict twice or a tensor only in part; it lists all reasons.
    """
    if dtype not in ("same", "cast"):
        options = '"same", or "cast" to convert to the dtypes of the tensors that are filled'
        raise ValueError(f"dtype must be {options}; not {dtype!r}")
    if shape not in ("same", "overlap"):
        raise ValueError(f'shape must be "same" or "overlap", not {shape!r}')
    given: tuple[object, object] = metadata, plan
    if not isinstance(given[0], Metadata) or not isinstance(given[1], SavePlan):
        kinds = f"a {type(metadata).__name__} and a {type(plan).__name__}"
        raise TypeError(f"load_plan takes metadata and a plan, such as local_plan(sd); not {kinds}")
    wrong = source_issues((plan,), "filled")
    if wrong:
        raise PlanError(wrong)
    entries, items = metadata.state_dict_metadata, plan.items
    unneeded = _unneeded(metadata, plan).union(optional)
    match = match_entries(entries, items.catalog, distinct(items.row), dtype, shape, unneeded)
    moved = _moved(plan, list(match.shared))
    match.entry[list(moved)] = -1
    damage = _damage(entries, match.entry)
    entry = match.entry[items.row]
    is_bytes = items.catalog.is_bytes[items.row]
    wanted = np.flatnonzero((entry >= 0) & ~is_bytes & ~items.is_fill)
    layout = entries.layout[entry[wanted]]
    width = max(items.offsets.shape[1], max((len(x.size) for x in entries.layouts), default=0))
    boxes = [readonly(pad(c[wanted], width, v)) for c, v in ((items.offsets, 0), (items.sizes, 1))]
    tilings = [x.tiling for x in entries.layouts]
    pieces = _overlapped(tilings, layout, boxes, items.frame is None)
    unlike = list(dict.fromkeys(moved.values()))
    refused = {issue.fqn for issue in unlike}
    notes = [note for note in match.notes if note.fqn not in refused]
    issues = match.issues + unlike + damage
    issues += _uncovered(items, wanted, pieces, boxes, match.shared)
    must = _patterns(strict, items.catalog.names)
    fatal = [issue for issue in issues if any(fnmatchcase(issue.fqn, p) for p in must)]
    if fatal:
        raise PlanError(explain_missing(fatal, entries, items.catalog, dtype))
    named = set(items.catalog.names)  # a rank may know a tensor and hold nothing of it
    report = KeyReport(
        missing=[issue.fqn for issue in issues if issue.kind == "missing"],
        unexpected=sorted(name for name in entries.names if name not in named),
        mismatched=[issue for issue in issues + notes if issue.kind != "missing"],
        dropped=dropped_names((plan,)),
    )
    values = np.flatnonzero((entry >= 0) & is_bytes)
    if isinstance(pieces, GridOverlap):
        reads: ReadItems = GridReads(items, wanted, pieces, values)
    else:
        reads = reads_of_pieces(items, wanted, pieces, values)
    return LoadPlan(reads, report=report, rank=plan.rank, world_size=plan.world_size)


def loads_into(
    passes: Passes[SavePlan], plans: Iterable[SavePlan], metadata: Metadata
) -> tuple[LoadPlan, ...]:
    """Plan the reads of a checkpoint's tensors that passes keep, before the passes run.

    A conversion through the passes needs these reads.

    Args:
        passes: Passes from the names of the checkpoint to others.
        plans: What each rank holds of the checkpoint, in rank order, before the passes.
        metadata: The checkpoint.

    >>> from shardplan.planning import TensorSpec, drop, global_plan, local_plan, rename
    >>> plan = local_plan({"w": TensorSpec((3,)), "tmp": TensorSpec((2,))})
    >>> _, metadata = global_plan([plan])
    >>> [load] = loads_into([drop("tmp"), rename({"w": "v"})], [plan], metadata)
    >>> [read.storage_index.fqn for read in load.items]
    ['w']
    """
    stages = Stages.of(passes, load=True)
    left = chain(stages.own)(positioned(plans))
    if stages.rest:  # it may give replicas to one of their holders
        left = with_replicas(chain(stages.rest)(left), left)
    return tuple(load_plan(metadata, plan) for plan in in_source_frame(left))


def resolve_overlaps(
    metadata: Metadata, target_chunks: SavePlan | Mapping[str, Iterable[Chunk]]
) -> ReadItems:
    """Return the reads that fill some chunks, whatever dtype they are stored in.

    Args:
        metadata: The checkpoint.
        target_chunks: A plan, or chunks by name, in the frame of the saved tensors.

    Returns:
        The reads, by target, then by saved chunk; every element of every target is read once.

    >>> from shardplan.planning import BytesMetadata, TensorMetadata, TensorProperties
    >>> saved = [Chunk((0,), (3,)), Chunk((3,), (3,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), saved)})
    >>> reads = resolve_overlaps(metadata, {"w": [Chunk((i,), (2,)) for i in (0, 2, 4)]})
    >>> [(r.storage_index.offset, r.dest_index.offset, r.lengths) for r in reads]
    [((0,), (0,), (2,)), ((0,), (2,), (1,)), ((3,), (2,), (1,)), ((3,), (4,), (2,))]

    Raises:
        PlanError: A name is missing, or saved chunks leave part of a target uncovered.
    """
    if isinstance(target_chunks, SavePlan):
        return load_plan(metadata, target_chunks, dtype="cast").items
    unknown = [name for name in target_chunks if name not in metadata.state_dict_metadata]
    if unknown:
        raise PlanError(
            Issue("missing", name, f"`{name}` is not in the checkpoint") for name in sorted(unknown)
        )
    return load_plan(metadata, _plan_of(metadata, target_chunks), dtype="cast").items


def global_load_plan(
    plans: Iterable[LoadPlan], passes: Passes[LoadPlan] = ()
) -> tuple[LoadPlan, ...]:
    """Run passes over the load plans of all ranks; without any, each rank reads on its own.

    >>> global_load_plan([LoadPlan([])]) == (LoadPlan([]),)
    True

    Raises:
        PlanError: After the passes, some element would be filled twice, not at all, or from the
            wrong place.
    """
    if isinstance(plans, LoadPlan):
        text = "takes one load plan per rank; for one rank: global_load_plan([plan])"
        raise TypeError(f"global_load_plan {text}")
    before = tuple(plans)
    if not all(isinstance(plan, LoadPlan) for plan in before):
        raise TypeError("global_load_plan needs load plans; load_plan(metadata, plan) makes them")
    before, steps = positioned(before), as_steps(passes)
    after = chain(steps)(before)
    own = any(map(may_see_rank, steps))  # counting is enough for our steps
    issues = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is not new:
            issues += list(_changes(rank, old, new)) or (list(_moves(rank, old, new)) * own)
    if issues:
        raise PlanError(issues)
    return after


def _changes(rank: int, old: LoadPlan, new: LoadPlan) -> Iterator[Issue]:
    """Report shards that get more or fewer elements than in their rank's load plan."""
    was, now = _filled(old.items), _filled(_all_reads(rank, new))
    for shard in sorted(was.keys() | now.keys()):
        if was.get(shard, 0) != now.get(shard, 0):
            name, at = shard
            text = f"rank {rank} would fill {now.get(shard, 0):,} elements of `{name}` at "
            text += f"{list(at)}, and needs {was.get(shard, 0):,}: a pass lost or doubled a read"
            yield Issue("uncovered", name, text, [rank])


def _all_reads(rank: int, plan: LoadPlan) -> ReadItems:
    """Return what a rank reads for itself, and what others read for it."""
    received = np.flatnonzero(plan.transfers.target == rank)
    return ReadItems.concat([plan.items, plan.transfers.reads.take(received)])


def _moves(rank: int, old: LoadPlan, new: LoadPlan) -> Iterator[Issue]:
    """Report elements that are filled twice, or from elsewhere than in the load plan."""
    framed = [read for read in old.items if read.dest_lengths is not None]
    was, now = _regions(old.items, framed), _regions(_all_reads(rank, new), framed)
    for key in sorted(was.keys() | now.keys(), key=str):
        shard, saved, _ = key
        boxes = tile_chunks(now.get(key, ()))
        missing = [gap for box in was.get(key, ()) for gap in gaps(boxes, box, 1)]
        if missing or key not in was or self_overlaps(boxes, limit=1):
            where = f" at {list(shard.offset)}" if shard.offset else ""
            text = f"rank {rank} would fill `{shard.fqn}`{where} twice, or from elsewhere in "
            text += f"`{saved}` than planned: a pass changed where a read comes from or goes to"
            yield Issue("uncovered", shard.fqn, text, [rank])


_Move = tuple[MetadataIndex, str, tuple[int, ...]]


def _regions(reads: ReadItems, framed: Sequence[ReadItem]) -> dict[_Move, list[Chunk]]:
    """Return the filled boxes by shard, saved tensor, and shift between the two.

    Where the axes of the two differ, there is no one shift: the number of the planned read counts.
    """
    found: dict[_Move, list[Chunk]] = {}
    for read in reads:
        saved, into = read.storage_index.offset or (), read.dest_index.offset or ()
        places = zip(saved, read.storage_offsets, into, read.dest_offsets, strict=False)
        way = tuple(a + b - c - d for a, b, c, d in places)
        if read.dest_lengths is not None:
            way = (next((n for n, one in enumerate(framed) if _is_part(read, one)), -1),)
        key = (read.dest_index, read.storage_index.fqn, way)
        found.setdefault(key, []).append(read.dest_box)
    return found


def _is_part(read: ReadItem, whole: ReadItem) -> bool:
    """Return True if a read fills part of what another fills, from the same place."""
    ends = (read.dest_index, read.storage_index)
    if ends != (whole.dest_index, whole.storage_index):
        return False
    low = tuple(a - b for a, b in zip(read.storage_offsets, whole.storage_offsets, strict=True))
    highs = (a + n for a, n in zip(low, read.lengths, strict=True))
    if min(low, default=0) < 0 or any(h > n for h, n in zip(highs, whole.lengths, strict=True)):
        return False
    parts = cut(whole.axes, whole.dest_box.sizes, whole.lengths, low, read.lengths)
    start = [a - b for a, b in zip(read.dest_offsets, whole.dest_offsets, strict=True)]
    box = (tuple(start), read.dest_box.sizes, read.axes)
    return [(part.box_offsets, part.box_sizes, part.axes) for part in parts] == [box]


def _filled(reads: ReadItems) -> dict[tuple[str, tuple[int, ...]], int]:
    """Count the elements (for a non-tensor value, the reads) that go to each shard."""
    first, group = group_rows([reads.dest, reads.dest_anchor])
    count = np.zeros(len(first), np.int64)
    np.add.at(count, group, np.maximum(reads.numel, reads.type == _BYTES))
    ndim = reads.dest_ndim[first].tolist()
    at = [tuple(row[:n]) for row, n in zip(reads.dest_anchor[first].tolist(), ndim, strict=True)]
    names = [reads.names[n] for n in reads.dest[first].tolist()]
    return dict(zip(zip(names, at, strict=True), count.tolist(), strict=True))


def _unneeded(metadata: Metadata, plan: SavePlan) -> frozenset[str]:
    """Return the names of empty dicts that need no entry because nothing was saved inside them.

    A dict that was empty on one rank may have had contents on others.
    """
    empty = empty_names(plan.planner_data)
    wanted = empty - empty_names(metadata.planner_data)
    names = sorted(metadata.state_dict_metadata.names) if wanted else []
    after = {name: names[bisect_left(names, f"{name}.") :][:1] for name in wanted}
    return empty - {name for name in wanted if "".join(after[name]).startswith(f"{name}.")}


def _patterns(strict: Strict, names: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of names that must be filled; refuse those that match nothing."""
    if isinstance(strict, (bool, int)):
        return ("*",) if strict else ()
    patterns = strict_patterns(strict)
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unmatched:
        hints = [nearest_hint(nearest_names(p, names)) for p in unmatched]
        raise PlanError(
            Issue("unmatched", p, f"strict: {p!r} matches no wanted name{hint}")
            for p, hint in zip(unmatched, hints, strict=True)
        )
    return patterns


def strict_patterns(strict: Strict) -> tuple[str, ...]:
    """Return the patterns of ``strict``, given as one or several."""
    patterns = (strict,) if isinstance(strict, str) else strict
    if isinstance(patterns, Iterable) and all(isinstance(p, str) for p in patterns):
        return tuple(patterns)
    raise TypeError(f"strict is True, False, a pattern of names, or a list of them, not {strict!r}")


def _moved(plan: SavePlan, rows: Sequence[int]) -> dict[int, Issue]:
    """Return, by row of the catalog, tensors whose elements passes have put in other places.

    Indices that the saved and the wanted shape have in common are not those of the same elements
    then, so that an overlap would fill wrong ones.
    """
    if not rows:
        return {}
    items = plan.items
    held = {h.source: h.size for h in plan.holds.catalog.heads if h.properties is not None}
    boxes = items.take(np.isin(items.row, rows) & ~items.is_fill)
    shifted = set[int]()
    if boxes.frame is not None:
        width = max(boxes.offsets.shape[1], boxes.box_offsets.shape[1])
        starts = [pad(column, width, 0) for column in (boxes.offsets, boxes.box_offsets)]
        other = boxes.frame.axes.known | np.not_equal(*starts).any(axis=1)
        shifted = set(boxes.row[other].tolist())
    used = distinct(boxes.row).tolist()
    counts = Counter(items.catalog.names[row] for row in used)
    found = {}
    for row in used:
        name, source, _, _, size = items.catalog.heads[row]
        if row in shifted or counts[name] > 1 or held.get(source) != size:
            text = f"`{name}` was saved with another shape than {list(size)}, and passes "
            text += 'reshape, move or join its elements: shape="overlap" would misplace them'
            found[row] = Issue("shape", name, text, remedy="state the saved shape in the planner")
    return found


def _damage(entries: Entries, entry: Ints) -> list[Issue]:
    """Report saved chunks that overlap or do not fit their shape, and leave those tensors out."""
    issues: list[Issue] = []
    bad: dict[int, bool] = {}
    for at in np.flatnonzero(entry >= 0).tolist():
        number = int(entries.layout[entry[at]])
        if number < 0:
            continue
        if number not in bad:
            layout = entries.layouts[number]
            other_axes = len(layout.tiling) > 0 and layout.tiling.ndim != len(layout.size)
            bad[number] = other_axes or bool(self_overlaps(layout.tiling, limit=1))
        if bad[number]:
            issues += layout_issues(entries.names[entry[at]], entries.layouts[number])
            entry[at] = -1
    return issues


def _overlapped(
    tilings: Sequence[Tiling], which: Ints, boxes: Sequence[Ints], by_rule: bool
) -> Overlap | GridOverlap:
    """Return where boxes overlap saved chunks: by rule if they are grids and there is much."""
    grids = [isinstance(tilings[n], Grid) for n in distinct(which).tolist()]
    met = meet_grids(tilings, which, *boxes) if grids and all(grids) else None
    if met is None:
        return overlap_many(tilings, which, *boxes)
    return met if by_rule and met.count.sum() > _MANY else met.pieces()


def _uncovered(
    items: WriteItems,
    wanted: Ints,
    pieces: Overlap | GridOverlap,
    boxes: Sequence[Ints],
    shared: Mapping[int, tuple[int, ...]],
) -> list[Issue]:
    """Report every wanted chunk that the saved ones do not fill."""
    if isinstance(pieces, GridOverlap):
        got = pieces.covered
    else:
        got = np.zeros(len(wanted), np.int64)
        np.add.at(got, pieces.box, pieces.sizes.prod(axis=1))
    issues = []
    for short in np.flatnonzero(got < boxes[1].prod(axis=1)).tolist():
        row = int(items.row[wanted[short]])
        name, _, _, _, size = items.catalog.heads[row]
        axes = len(size)
        offsets, sizes = (box[short, :axes].tolist() for box in boxes)
        if row in shared:  # past what both shapes have, nothing is expected
            ends = [min(o + s, n) for o, s, n in zip(offsets, sizes, shared[row], strict=True)]
            sizes = [max(e - o, 0) for o, e in zip(offsets, ends, strict=True)]
        filled = _filled_of(pieces, short, axes)
        for gap in gaps(filled, Chunk(offsets, sizes)):
            where = region_text(gap.offsets, gap.sizes, size)
            text = f"saved chunks of `{name}` leave {where} uncovered"
            region = gap.offsets, gap.sizes
            issues.append(Issue("uncovered", name, text, (), region, _ACCEPT))
    return issues


def _filled_of(pieces: Overlap | GridOverlap, box: int, axes: int) -> Tiling:
    """Return the pieces of one box."""
    if isinstance(pieces, GridOverlap):
        low = int(pieces.count[:box].sum())
        some, mine = pieces.pieces(low + np.arange(int(pieces.count[box]))), slice(None)
    else:
        some, mine = pieces, slice(*np.searchsorted(pieces.box, (box, box + 1)).tolist())
    return tile(some.offsets[mine, :axes], some.sizes[mine, :axes])


def _plan_of(metadata: Metadata, targets: Mapping[str, Iterable[Chunk]]) -> SavePlan:
    """Return the plan of a rank that holds these chunks of the saved tensors."""
    held = []
    for name, chunks in targets.items():
        saved, wanted = metadata.state_dict_metadata.get(name), tile_chunks(chunks)
        if not len(wanted):
            continue
        properties, size = TensorProperties(), wanted.bounds().ends
        if isinstance(saved, TensorMetadata) and len(saved.size) == wanted.ndim:
            properties, size = saved.properties, saved.size
        held.append((Head(name, name, WriteItemType.SHARD, properties, size), wanted))
    return SavePlan(WriteItems.of_boxes(held))
