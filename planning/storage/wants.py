"""What the ranks of a load want, in classes, and which of them want the same.

Each rank sorts its reads into classes, by how their tensors are cut. Of a small chunk it wants all,
as reading it costs no more than reading a part. Ranks that want the same of a class are replicas.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, distinct, group_rows, pad, padded, readonly
from ..columns.reads import ReadItems
from ..metadata import Entries, Metadata
from ..plans import LoadPlan
from .blocks import locate_reads
from .filling import RANK_LABEL
from .ranges import fetched

MOST_READS: Final = 1 << 22
"""The most reads of all ranks for which the coordinator plans: they take some 12 s and 4 GB."""

SMALL_BYTES: Final = 1 << 12
"""Bytes of a chunk that ranks read whole, and share whole, even from a disk."""

_MOST_CLASSES: Final = 256
_VALUE_KINDS: Final = 16

Way = Literal["alone", "groups", "coordinator"]
"""Whether each rank reads for itself, or replicas share by rule, or as the coordinator plans."""


def _pairs(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((digest, nbytes) for digest, nbytes in pairs)


@attrs.frozen
class Need:
    """What one rank needs of a checkpoint."""

    fetched: int  # bytes that it would fetch alone: what it needs, and narrow gaps in between
    names: str  # a fingerprint of the names of all tensors that it reads, in whole or in part
    size: int  # bytes of these tensors, whole
    reads: int  # the number of reads in its plan
    total: int  # bytes of all tensors of the checkpoint
    host: str  # the machine it runs on
    is_local: bool  # whether the checkpoint is on a local path
    # A fingerprint of each class of its reads, and the bytes that it would fetch for them.
    classes: tuple[tuple[str, int], ...] = attrs.field(default=(), converter=_pairs)


@attrs.frozen(eq=False)
class Wants:
    """A rank's reads, sorted into classes; columns have one row per read.

    If a read is shared, the box from ``offsets`` on of ``lengths`` travels, relative to the chunk:
    the read's own, or all of a small chunk. Small chunks of one number are a class.
    """

    reads: ReadItems
    is_small: npt.NDArray[np.bool_]
    offsets: Ints
    lengths: Ints
    of_row: Ints  # the class of each read
    digests: tuple[str, ...]  # of what is wanted of each class
    nbytes: tuple[int, ...]  # of each class


def wants_of(
    reads: ReadItems,
    metadata: Metadata,
    ranks: int,
    *,
    block_bytes: int,
    small_bytes: int = SMALL_BYTES,
) -> Wants:
    """Sort a rank's reads into classes, so that replicas want the same of a class.

    Args:
        reads: What the rank needs, cut into blocks; see `split_reads`.
        metadata: The checkpoint.
        ranks: How many ranks load.
        block_bytes: The most bytes of a block that the checkpoint was hashed with.
        small_bytes: The most bytes of a chunk that is read whole.
    """
    if not len(reads):
        nothing = column([])
        return Wants(reads, nothing > 0, reads.storage_offsets, reads.lengths, nothing, (), ())
    located, width = locate_reads(metadata, reads, block_bytes), read_widths(reads, metadata)
    axes = reads.lengths.shape[1]
    is_small = located.inside & (located.numel * width <= small_bytes) & (width > 0)
    is_small &= (located.sizes == located.extents).all(axis=1)  # not the end of a large chunk
    offsets = np.where(is_small[:, None], located.start[:, :axes], reads.storage_offsets)
    lengths = np.where(is_small[:, None], located.sizes[:, :axes], reads.lengths)
    small_chunk = np.where(is_small, located.chunk, -1)
    _, of_row = group_rows([small_chunk, _kinds(reads, metadata, ranks, is_small)])
    of_row = np.minimum(of_row, _MOST_CLASSES - 1)
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in reads.names]
    known = np.frombuffer(b"".join(hashes), np.int64)[reads.storage]
    boxes = np.column_stack([known, reads.type, reads.storage_anchor + offsets, lengths])
    first, _ = group_rows([of_row, boxes])
    edges = np.searchsorted(of_row[first], np.arange(int(of_row.max()) + 2)).tolist()
    total = np.bincount(of_row[first], lengths[first].prod(axis=1) * width[first])
    each = [boxes[first[a:b]] for a, b in pairwise(edges)]
    return Wants(
        reads,
        is_small,
        readonly(offsets),
        readonly(lengths),
        readonly(of_row),
        tuple(_digest(some, axes) for some in each),
        tuple(total.astype(np.int64).tolist()),
    )


def _digest(boxes: Ints, axes: int) -> str:
    """Return a fingerprint of boxes, which may be padded to more axes than they have."""
    is_used = ((boxes[:, 2 : 2 + axes] != 0) | (boxes[:, 2 + axes :] != 1)).any(axis=0)
    used = int(np.flatnonzero(is_used).max(initial=-1)) + 1
    kept = np.ascontiguousarray(boxes[:, [*range(2 + used), *range(2 + axes, 2 + axes + used)]])
    return hashlib.blake2b(kept.tobytes(), digest_size=12).hexdigest()


def _kinds(
    reads: ReadItems, metadata: Metadata, ranks: int, is_small: npt.NDArray[np.bool_]
) -> Ints:
    """Return, per read, along which axes its tensor is cut, and into how many parts if it is large.

    Tensors that ranks may not share out evenly are kept apart by their sizes: some ranks may want
    nothing of them.
    """
    entries, count, axes = metadata.state_dict_metadata, len(reads.names), reads.lengths.shape[1]
    start = reads.storage_anchor + reads.storage_offsets
    low, high = np.full((count, axes), 1 << 62), np.zeros((count, axes), np.int64)
    np.minimum.at(low, reads.storage, start)
    np.maximum.at(high, reads.storage, start + reads.lengths)
    row = [entries.row_of.get(name, -1) for name in reads.names]
    layout = [-1 if r < 0 else int(entries.layout[r]) for r in row]
    shapes = [entries.layouts[n].size if n >= 0 else () for n in layout]
    extents, held = padded(shapes, 1, axes), np.maximum(high - low, 1)
    is_cut = held < extents
    kind = column([
        len(shape) if n >= 0 else _value_kind(name)
        for name, n, shape in zip(reads.names, layout, shapes, strict=True)
    ])  # fmt: skip
    odd = np.where(is_cut & (extents % ranks != 0), extents, 0)
    parts = np.rint(extents / held).astype(np.int64)
    which = reads.storage
    cuts = np.where(is_small[:, None], is_cut[which], parts[which])
    cuts = np.where(kind[which, None] < 0, 0, cuts)
    return np.column_stack([kind[which], odd[which], cuts])


def _value_kind(name: str) -> int:
    """Return the kind of a non-tensor value, less than 0; those of single ranks are apart."""
    if RANK_LABEL.search(name):
        return -1
    return -2 - zlib.crc32(name.encode()) % _VALUE_KINDS


def need_of(
    plan: LoadPlan, wants: Wants, metadata: Metadata, max_gap: int, *, host: str, is_local: bool
) -> Need:
    """Return what a rank with this plan needs; gaps of up to ``max_gap`` bytes are fetched.

    One column of four, of rows of 4 bytes, is 3 bytes, or 9 with what lies between:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, world_plans
    >>> wanted = world_plans({"w": TensorSpec((3, 4), "int8", [Shard(1)])}, Mesh(tp=4))
    >>> metadata = global_plan(world_plans({"w": TensorSpec((3, 4), "int8")}, Mesh(one=1)))[1]
    >>> plan = load_plan(metadata, wanted[0])
    >>> wants = wants_of(plan.items, metadata, 4, block_bytes=64, small_bytes=0)
    >>> at = {"host": "a", "is_local": True}
    >>> [need_of(plan, wants, metadata, gap, **at).fetched for gap in (0, 3)]
    [3, 9]
    """
    entries = metadata.state_dict_metadata
    used = sorted({wants.reads.names[n] for n in distinct(wants.reads.storage).tolist()})
    nbytes = _fetched_bytes(wants.reads, metadata, max_gap)
    exact = np.bincount(wants.of_row, nbytes, len(wants.digests)).astype(np.int64)
    is_small = np.bincount(wants.of_row, wants.is_small, len(wants.digests)) > 0
    whole = np.where(is_small, column(wants.nbytes), exact)  # if small chunks are read whole
    return Need(
        int((whole if max_gap else exact).sum()),
        hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(),
        _size(entries, [entries.row_of[name] for name in used]),
        len(plan.items),
        _size(entries, slice(None)),
        host,
        is_local,
        tuple(zip(wants.digests, whole.tolist(), strict=True)),
    )


def _fetched_bytes(items: ReadItems, metadata: Metadata, max_gap: int) -> Ints:
    """Return the bytes that each read fetches; 0 for non-tensor values."""
    width = read_widths(items, metadata)
    if not max_gap or not len(items):
        return items.numel * width
    extents = locate_reads(metadata, items).extents
    lengths = pad(items.lengths, extents.shape[1], 1)
    return fetched(lengths, extents, width, max_gap) * width


def plan_bytes(plan: LoadPlan, metadata: Metadata) -> int:
    """Count the bytes of tensors that a plan reads."""
    return int((plan.items.numel * read_widths(plan.items, metadata)).sum())


def read_widths(items: ReadItems, metadata: Metadata) -> Ints:
    """Return the bytes of one element of each read; 0 for non-tensor values."""
    entries = metadata.state_dict_metadata
    if not len(items):
        return column([])
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return entries.itemsize[row[items.storage]]


def sharing_way(needs: Sequence[Need], *, asked: bool = False) -> Way:
    """Choose how ranks share their reads; unless it was asked for, only where that is cheaper.

    If ranks fetch more bytes than there are in the tensors that they need, or in all, some fetch
    the same. A local disk is read faster than other ranks can send, though.

    >>> needs = [Need(9, "w", 9, 1, 12, "host", False, [("w, whole", 9)]) for rank in range(4)]
    >>> sharing_way(needs), sharing_way(needs[:1])
    ('groups', 'alone')
    >>> sharing_way([attrs.evolve(n, classes=[(f"part {r}", 9)]) for r, n in enumerate(needs)])
    'coordinator'
    """
    size = min(sum({need.names: need.size for need in needs}.values()), needs[0].total)
    if not asked:
        is_near = all(need.is_local for need in needs) and len({need.host for need in needs}) == 1
        if is_near or sum(need.fetched for need in needs) <= size:
            return "alone"
    once = sum(dict(pair for need in needs for pair in need.classes).values())
    is_large = sum(need.reads for need in needs) > MOST_READS
    return "groups" if once <= size or is_large else "coordinator"


Group = tuple[range, ...]
"""The ranks of a group, ascending, as few ranges: its size does not depend on theirs."""


def replica_groups(needs: Sequence[Need]) -> list[tuple[Group, ...]]:
    """Return, by rank, the ranks that read the same as it does, for each class of its reads.

    The cost depends on the number of ranks, not on that of their reads.

    >>> needs = [Need(9, "w", 9, 1, 9, "host", False, [(f"half {r % 2}", 9)]) for r in range(6)]
    >>> replica_groups(needs)[1]
    ((range(1, 7, 2),),)
    """
    members: dict[str, list[int]] = {}
    for rank, need in enumerate(needs):
        for digest, _ in need.classes:
            members.setdefault(digest, []).append(rank)
    groups = {digest: _ranges(ranks) for digest, ranks in members.items()}
    return [tuple(groups[digest] for digest, _ in need.classes) for need in needs]


def _ranges(numbers: Sequence[int]) -> Group:
    """Write ascending numbers as ranges of equal steps.

    >>> _ranges([0, 2, 4, 5]), _ranges([3])
    ((range(0, 6, 2), range(5, 6)), (range(3, 4),))
    """
    found: list[range] = []
    for number in numbers:
        last = found[-1] if found else None
        if last is not None and (len(last) == 1 or last.stop == number):
            step = number - last[-1]
            found[-1] = range(last.start, number + step, step)
        else:
            found.append(range(number, number + 1))
    return tuple(found)


def _size(entries: Entries, rows: list[int] | slice) -> int:
    """Count the bytes of some tensors, whole."""
    kinds = zip(entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True)
    return sum(
        count * math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for (layout, prop), count in Counter(kinds).items()
        if layout >= 0
    )
