"""Who reads what, and for whom, when many ranks load together.

1. Each rank sorts the tensors that it reads into classes, by how they are cut: `need_of`.
2. Ranks whose classes are equal are replicas, and form a group: `replica_groups`.
3. Which rank of a group reads which block is a formula of both: `turns_of`. So every rank knows by
   itself what it reads, sends and receives: `shared_by_rule`.
4. Where ranks need the same bytes though their classes differ, the coordinator plans transfers with
   `share_reads`, as long as there are few enough reads: `shared_by_transfers`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, distinct, group_rows, pad, padded, readonly
from ..columns.reads import ReadItems
from ..metadata import Entries, Metadata
from ..plans import LoadPlan
from ..records import LoadItemType
from .blocks import locate_reads
from .filling import RANK_LABEL
from .ranges import fetched

MOST_READS: Final = 1 << 22
"""The most reads of all ranks for which the coordinator plans: they take some 12 s and 4 GB."""

RUN_BYTES: Final = 1 << 20
"""Bytes that lie together and that one rank of a group reads, if there are as many."""

_MOST_CLASSES: Final = 64
_VALUE: Final = LoadItemType.BYTE_IO.value

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


def need_of(plan: LoadPlan, metadata: Metadata, max_gap: int, *, host: str, is_local: bool) -> Need:
    """Return what a rank with this plan needs; gaps of up to ``max_gap`` bytes are fetched.

    One column of four, of rows of 4 bytes, is 3 bytes, or 9 with what lies between:

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, load_plan, world_plans
    >>> wanted = world_plans({"w": TensorSpec((3, 4), "int8", [Shard(1)])}, Mesh(tp=4))
    >>> metadata = global_plan(world_plans({"w": TensorSpec((3, 4), "int8")}, Mesh(one=1)))[1]
    >>> plan = load_plan(metadata, wanted[0])
    >>> [need_of(plan, metadata, gap, host="a", is_local=True).fetched for gap in (0, 3)]
    [3, 9]
    """
    entries, items = metadata.state_dict_metadata, plan.items
    used = sorted({items.names[n] for n in distinct(items.storage).tolist()})
    nbytes, classes = _fetched_bytes(items, metadata, max_gap), _Classes.of(items, metadata)
    of_class = np.bincount(classes.of_row, nbytes, len(classes.digests)).astype(np.int64)
    return Need(
        int(nbytes.sum()),
        hashlib.blake2b("\0".join(used).encode(), digest_size=16).hexdigest(),
        _size(entries, [entries.row_of[name] for name in used]),
        len(items),
        _size(entries, slice(None)),
        host,
        is_local,
        tuple(zip(classes.digests, of_class.tolist(), strict=True)),
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
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    row = column([entries.row_of.get(name, 0) for name in items.names])
    return width[row[items.storage]]


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


@attrs.frozen(eq=False)
class _Classes:
    """The classes of a rank's reads: tensors that are cut into as many parts along each axis."""

    of_row: Ints
    digests: tuple[str, ...]  # of the boxes that are read, as they lie in the checkpoint

    @classmethod
    def of(cls, items: ReadItems, metadata: Metadata) -> _Classes:
        """Sort reads into classes; those of a rank and of its replicas are the same."""
        if not len(items):
            return cls(column([]), ())
        of_name = _class_of_name(items, metadata)
        number = of_name[items.storage]
        names = np.array(
            [hashlib.blake2b(n.encode(), digest_size=8).digest() for n in items.names], "S8"
        )
        start, known = items.storage_anchor + items.storage_offsets, np.frombuffer(names, np.int64)
        rows = np.column_stack([known[items.storage], items.type, items.ndim, start, items.lengths])
        digests = []
        for which in range(int(number.max()) + 1):
            mine = rows[number == which]
            axes = int(mine[:, 2].max())
            width = items.lengths.shape[1]
            mine = mine[:, [*range(3 + axes), *range(3 + width, 3 + width + axes)]]
            mine = mine[np.lexsort(mine.T[::-1])]
            digests.append(hashlib.blake2b(mine.tobytes(), digest_size=12).hexdigest())
        return cls(number, tuple(digests))


def _class_of_name(items: ReadItems, metadata: Metadata) -> Ints:
    """Return the class of each name that is read; if there are many, the last ones are one."""
    entries, count = metadata.state_dict_metadata, len(items.names)
    start = items.storage_anchor + items.storage_offsets
    axes = items.lengths.shape[1]
    low, high = np.full((count, axes), 1 << 62), np.zeros((count, axes), np.int64)
    np.minimum.at(low, items.storage, start)
    np.maximum.at(high, items.storage, start + items.lengths)
    row = [entries.row_of.get(name, -1) for name in items.names]
    layout = [-1 if r < 0 else int(entries.layout[r]) for r in row]
    shapes = [entries.layouts[n].size if n >= 0 else () for n in layout]
    parts = np.rint(padded(shapes, 1, axes) / np.maximum(high - low, 1)).astype(np.int64)
    kind = column([
        len(shape) if n >= 0 else -1 - bool(RANK_LABEL.search(name))  # a value; of one rank alone
        for name, n, shape in zip(items.names, layout, shapes, strict=True)
    ])  # fmt: skip
    used = np.flatnonzero(np.bincount(items.storage, minlength=count))
    _, group = group_rows([kind[used], parts[used] * (kind[used] >= 0)[:, None]])
    of_name = np.zeros(count, np.int64)
    of_name[used] = np.minimum(group, _MOST_CLASSES - 1)
    return of_name


class Turns(NamedTuple):
    """In which round each block is read, and by which member of the group."""

    round: Ints
    member: Ints


def turns_of(nbytes: Ints, members: int, round_bytes: int, run_bytes: int = RUN_BYTES) -> Turns:
    """Return when each block of a group is read, and by whom; blocks are in order of their places.

    Rounds take about ``round_bytes`` each. Within a round, members read runs of equal length, of at
    least ``run_bytes``: small blocks that lie together are read together. If a round has fewer
    blocks than members, the next one begins with others.

    >>> turns_of(np.array([4, 4, 4, 4]), 2, 8, 1)
    Turns(round=array([0, 0, 1, 1]), member=array([0, 1, 1, 0]))
    >>> turns_of(np.array([4, 4, 4, 4]), 2, 16, 8).member.tolist()
    [0, 0, 1, 1]
    """
    ends = np.cumsum(nbytes)
    total = int(ends[-1]) if len(ends) else 0
    span = max(-(-total // max(-(-total // round_bytes), 1)), 1)
    middle = ends - (nbytes + 1) // 2
    run = max(-(-span // members), run_bytes)
    number = middle // span
    return Turns(number, (middle % span // run + number) % members)


@attrs.frozen(eq=False)
class SharedReads:
    """What one rank reads for itself and for others, and what others read for it.

    Columns have one row per read.
    """

    reads: ReadItems
    reader: Ints  # the rank that reads it
    audience: Ints  # the ranks that the reader sends it to, in `audiences`
    audiences: tuple[tuple[int, ...], ...]  # without the reader
    own: npt.NDArray[np.bool_]  # whether it fills memory of this rank
    turn: Ints  # the round in which it is read; all ranks order rounds alike

    @property
    def is_value(self) -> npt.NDArray[np.bool_]:
        """Whether each read is of a non-tensor value."""
        is_value: npt.NDArray[np.bool_] = self.reads.type == _VALUE
        return is_value


def shared_by_rule(
    items: ReadItems,
    metadata: Metadata,
    rank: int,
    groups: Sequence[Sequence[int]],
    files: Ints | None = None,
    *,
    round_bytes: int,
    block_bytes: int,
) -> SharedReads:
    """Share reads among replicas: each block is read by one of them, and sent to the others.

    Args:
        items: What this rank needs, cut into blocks; see `split_reads`.
        metadata: The checkpoint.
        rank: The rank.
        groups: The ranks of each class of the reads; see `replica_groups`.
        files: The file of each read, if it is known.
        round_bytes: Bytes of a group that are in memory at a time.
        block_bytes: The most bytes of a block that the checkpoint was hashed with.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"a": TensorSpec((1 << 18,)), "b": TensorSpec((1 << 18,))})
    >>> metadata = global_plan([plan])[1]
    >>> reads, sizes = load_plan(metadata, plan).items, {"round_bytes": 1 << 21, "block_bytes": 64}
    >>> shared_by_rule(reads, metadata, 5, [range(4, 6)], **sizes).reader.tolist()
    [4, 5]
    """
    classes = _Classes.of(items, metadata)
    reader = np.full(len(items), rank, np.int64)
    turn, audience = np.zeros(len(items), np.int64), classes.of_row
    order = _place_order(items, metadata, files, block_bytes)
    nbytes = items.numel * read_widths(items, metadata)
    steps = 0  # rounds of classes before
    for which in sorted(range(len(groups)), key=classes.digests.__getitem__):
        members = column(list(groups[which]))
        rows = order.rows[classes.of_row[order.rows] == which]
        if len(members) < 2 or not len(rows):
            continue
        fresh = np.diff(order.block[rows], prepend=-1) != 0  # rows of a block follow one another
        block = np.cumsum(fresh) - 1
        turns = turns_of(
            np.bincount(block, nbytes[rows]).astype(np.int64), len(members), round_bytes
        )
        reader[rows] = members[turns.member[block]]
        turn[rows] = steps + turns.round[block]
        steps += int(turns.round[-1]) + 1
    audiences = tuple(tuple(other for other in group if other != rank) for group in groups)
    own = np.ones(len(items), bool)
    return SharedReads(items, readonly(reader), audience, audiences, own, readonly(turn))


class _PlaceOrder(NamedTuple):
    rows: Ints
    block: Ints  # a number of the block of each read


def _place_order(
    items: ReadItems, metadata: Metadata, files: Ints | None, block_bytes: int
) -> _PlaceOrder:
    """Order reads as files hold them: by file, widest elements first, then by name and place."""
    located, width = locate_reads(metadata, items, block_bytes), read_widths(items, metadata)
    names = metadata.state_dict_metadata.names
    by_name = np.empty(len(names), np.int64)
    by_name[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    file = np.zeros(len(items), np.int64) if files is None else files
    keys = [located.chunk, located.number]
    _, block = group_rows([file, -width, by_name[located.entry], *keys])
    where = items.storage_anchor + items.storage_offsets
    return _PlaceOrder(np.lexsort((*where.T[::-1], block)), block)


def shared_by_transfers(
    plan: LoadPlan, metadata: Metadata, rank: int, *, round_bytes: int
) -> SharedReads:
    """Share reads as the transfers of a plan say, which the coordinator made; see `share_reads`.

    All tensors of the checkpoint are thought to lie end to end, in order of their names, and are
    cut into rounds.
    """
    moves, own = plan.transfers, len(plan.items)
    reads = ReadItems.concat([moves.reads, plan.items])
    targets, to = np.unique(moves.target, return_inverse=True)
    return SharedReads(
        reads,
        np.concatenate([moves.source, np.full(own, rank, np.int64)]),
        np.concatenate([to, np.full(own, len(targets), np.int64)]),
        (*((int(target),) for target in targets), ()),
        np.concatenate([moves.target == rank, np.ones(own, bool)]),
        _rounds_by_name(reads, metadata, round_bytes),
    )


def _rounds_by_name(reads: ReadItems, metadata: Metadata, round_bytes: int) -> Ints:
    """Return the round of each read, by where it lies in the checkpoint."""
    entries, axes = metadata.state_dict_metadata, reads.lengths.shape[1]
    located = locate_reads(metadata, reads)
    shapes = [*(layout.size for layout in entries.layouts), ()]
    width = column([*(p.itemsize for p in entries.props), 0])[entries.prop]
    sizes = column([math.prod(shape) for shape in shapes])[entries.layout] * width
    by_name = column(sorted(range(len(entries.names)), key=entries.names.__getitem__))
    start = np.empty_like(sizes)
    start[by_name] = np.cumsum(sizes[by_name]) - sizes[by_name]
    extent = padded(shapes, 1, axes)[entries.layout[located.entry]]
    offsets = reads.storage_anchor + located.start[:, :axes]
    place = np.zeros(len(reads), np.int64)
    for axis in range(axes):
        place = place * extent[:, axis] + offsets[:, axis]
    rounds: Ints = (start[located.entry] + place * read_widths(reads, metadata)) // round_bytes
    return rounds


def _size(entries: Entries, rows: list[int] | slice) -> int:
    """Count the bytes of some tensors, whole."""
    kinds = zip(entries.layout[rows].tolist(), entries.prop[rows].tolist(), strict=True)
    return sum(
        count * math.prod(entries.layouts[layout].size) * entries.props[prop].itemsize
        for (layout, prop), count in Counter(kinds).items()
        if layout >= 0
    )
